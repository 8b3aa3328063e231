"""Lets a model answer prompts, and rewards the answers: pass@1, pass@N and the mean reward of a file or a task.

Each prompt is answered several times, at temperature 1 from all tokens, as reinforcement learning samples.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np

from jaxstack.common.counts import plural
from jaxstack.config import Config, ConfigError, DataConfig, RunConfig, TrainConfig
from jaxstack.config.training import RLConfig
from jaxstack.data import Dataset, Source, chat
from jaxstack.data.dataset import held_out_prompts
from jaxstack.data.loader import DataLoader
from jaxstack.data.rewarded import PromptTokens, encode_prompts, read_prompts
from jaxstack.generate.rollouts import Judged, Rollouts
from jaxstack.loaded.trained_run import TrainedRun
from jaxstack.posttrain.tasks import is_task
from jaxstack.training.setup import Setup
from jaxstack.training.state import Recipe, abstract_state

RIGHT = 1.0
"""The least reward of an answer that is counted as right."""


def answer(
    run: TrainedRun,
    path: str,
    rl: RLConfig,
    *,
    completions: int,
    context: int,
    tokens: int | None = None,
    limit: int | None = None,
    rows: int = 8,
) -> list[list[Judged]]:
    """Returns the answers to each prompt with their rewards.

    Args:
      run: a decoder with a chat template.
      path: a file, all of whose prompts are answered, or a task, whose held-out prompts are.
      rl: rewards, turns and the tool.
      completions: number of answers to each prompt.
      context: tokens of a prompt with its answer at most.
      tokens: maximum tokens of an answer. `None` means as many as the context has room for, but at most `rl.tokens`.
      limit: number of prompts at most. `None` means all.
      rows: number of answers in a call.

    Raises:
      ConfigError: the prompts cannot be read or are too long, or a reward does not suit them.
    """
    template = chat.template_for(run.tokenizer)
    prompts, too_long = encode_prompts(read_prompts(path), template, run.tokenizer, context, "--context")
    if too_long:
        raise ConfigError(f"{path}: {too_long}. Raise --context, or leave these prompts out of the file.")
    numbers = prompts.numbers
    if is_task(path):
        numbers = _held_out(run.config.data, path, prompts)
    longest = max(map(len, prompts.ids_of(range(prompts.numbers.size))))
    room = context + 1 - longest
    allowed = min(rl.tokens, room) if tokens is None else tokens
    if allowed > room or allowed >= context:
        raise ConfigError(
            f"--tokens={allowed} and the longest prompt of {path}, which has {plural(longest, 'token', spec=',')}, do "
            f"not fit --context={context}. Lower --tokens, or raise --context."
        )
    pairs = 2 * run.context.layout.replicas  # a batch has two answers or more on each device
    keys = DataConfig(source="prompts", path=path, seq_len=context, batch_size=-(-rows // pairs) * pairs)
    plain = replace(rl, tokens=allowed, group=2, exact=False, overlong_buffer=0, kl_weight=0.0, reference=None)
    judge = _rollouts(run, keys, plain, prompts).judge
    return judge(run.params, numbers[:limit].tolist(), completions, (0,))


def _held_out(learned: DataConfig, path: str, prompts: PromptTokens) -> np.ndarray:
    """Returns the numbers of the prompts of a task that a run holds out: this one, or one with the default fraction."""
    same = learned.source == "prompts" and learned.path == path
    fraction = learned.eval_fraction if same else DataConfig().eval_fraction
    return prompts.numbers[held_out_prompts(prompts, fraction)]


def _rollouts(run: TrainedRun, keys: DataConfig, rl: RLConfig, prompts: PromptTokens) -> Rollouts:
    """Returns what samples and rewards answers; nothing is compiled yet."""
    ctx = run.context
    mesh = ctx.layout.mesh
    assert mesh is not None, "a run is loaded onto a mesh"
    there = run.config
    cfg = Config(
        run=RunConfig(dir=there.run.dir, init_from=there.run.dir, seed=there.run.seed),
        model=replace(run.model, dropout=0.0),
        data=keys,
        train=TrainConfig(dtype=there.train.dtype, eval_steps=1),
        rl=rl,
        mesh=there.mesh,
        kernels=there.kernels,
    )
    source = Source(str(keys.path), prompts, prompts, "", "")
    loader = DataLoader(cfg, Dataset(run.tokenizer, (source,)), ctx.layout.sharding(jax.sharding.PartitionSpec()))
    every = replace(source, eval=prompts.documents(np.zeros(0, np.int64)))
    dataset = Dataset(run.tokenizer, (every,))
    return Rollouts.create(Setup(cfg, dataset, mesh, ctx, abstract_state(Recipe.of(cfg), ctx)), loader)


def figures(groups: Sequence[Sequence[Judged]]) -> dict[str, np.ndarray]:
    """Returns the value of each metric for each prompt, float64 [prompts].

    `pass@1` is the share of right answers, and `pass@N` is 1 if any of N answers is right.
    """
    rewards = np.array([[one.reward for one in group] for group in groups])
    right = rewards >= RIGHT
    found = {"pass@1": right.mean(1)}
    if rewards.shape[1] > 1:
        found[f"pass@{rewards.shape[1]}"] = right.any(1).astype(float)
    ended = np.array([[one.ended for one in group] for group in groups])
    return found | {"reward": rewards.mean(1), "ended": ended.mean(1)}
