"""Rollouts: completions that a model samples before a step, their rewards, and the batch that the step learns from.

Prompts and completions depend on the seed, the index of the batch and the parameters alone. The prompts of several
steps (`rl.updates`) are continued at once; a checkpoint between these steps has a file with the batches that wait.

Suffixes: B completions of a step, S positions, P prompts, G completions of a prompt.
"""

import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack.checkpoint import manifest, run_dir
from jaxstack.common import files
from jaxstack.common.counts import plural
from jaxstack.common.tree import Batch
from jaxstack.config import Config, ConfigError, SampleConfig
from jaxstack.config.training import RLConfig
from jaxstack.data import Tokenizer, chat
from jaxstack.data.loader import DataLoader
from jaxstack.data.rewarded import PromptTokens, RewardedPrompt
from jaxstack.generate.continuous import ContinuousBatch, Prompt
from jaxstack.generate.engine import Engine
from jaxstack.generate.exact import Exact
from jaxstack.generate.prompts import Rows, row_seeds
from jaxstack.generate.score import Scorer
from jaxstack.generate.turns import Answer, Completion, Turns, open_turns
from jaxstack.models.params import Params
from jaxstack.posttrain import losses, rewards, tasks
from jaxstack.posttrain.rewards import Reward
from jaxstack.runtime import distributed
from jaxstack.training.features.pipelined import chosen_split
from jaxstack.training.features.policy import scores_again, trainer_log_probs
from jaxstack.training.features.preference import Refer
from jaxstack.training.losses import EvalSums, Metrics
from jaxstack.training.services.batches import Batches, Evaluate, Timer
from jaxstack.training.services.init_from import read_frozen
from jaxstack.training.setup import Setup

RUN = "run:"
"""What the name of a reward model in `rl.rewards` begins with; the folder of its run follows."""

SAMPLES = 4
"""Number of completions of held-out prompts that an evaluation logs."""

Arrays = dict[str, np.ndarray]
"""The arrays of a batch by name [B, S]."""


Figures = dict[str, np.generic]
"""What is logged of the completions of a step, by name."""


class Judged(NamedTuple):
    """A completion with its reward.

    Attributes:
      row: the prompt.
      ids: ids of the prompt.
      completion: the sampled completion.
      ended: whether it ended before the limit of tokens.
      text: the completion as text, without the token that ends it.
      parts: the value of each reward function.
      reward: the weighted sum of `parts`, with the penalty for the completion's length.
    """

    row: RewardedPrompt
    ids: list[int]
    completion: Completion
    ended: bool
    text: str
    parts: list[float]
    reward: float


@dataclass(frozen=True, eq=False)
class Sampler:
    """Samples completions at temperature 1 from all tokens.

    Attributes:
      exact: the forward pass of the trainer, and the KV cache with which it drafts.
      rl: the group `rl` of the configuration.
    """

    exact: Exact
    rl: RLConfig

    @classmethod
    def create(cls, setup: Setup) -> "Sampler":
        """Returns a sampler without parameters; its calls have the shapes of the step's forward pass."""
        cfg = setup.cfg
        tokenizer = setup.dataset.tokenizer
        sample = SampleConfig(tokens=cfg.rl.tokens, temperature=1.0, prompts=())
        scorer = replace(Scorer.create(cfg.model, {}, setup.ctx), length=cfg.data.seq_len)
        engine = Engine.without_params(cfg.model, ctx=setup.ctx, vocabulary=tokenizer.vocab_size)
        return cls(Exact(scorer, engine, sample, stop_tokens(tokenizer), cfg.microbatch_size), cfg.rl)

    def sample(self, params: Params, prompts: Rows, seed: int) -> list[Completion]:
        """Returns a completion of each prompt, with these parameters."""
        exact = self.exact.with_params(params)
        if self.rl.exact:
            found = exact.texts(prompts, seed)
            return [Completion(one.tokens, one.log_probs, one.log_probs, one.redrafted) for one in found]
        tokens, parts = self._sample_fast(exact.engine, prompts, seed)
        log_probs = map(np.concatenate, parts)
        return [Completion(new, each, each) for new, each in zip(tokens, log_probs, strict=True)]

    def _sample_fast(self, engine: Engine, prompts: Rows, seed: int) -> tuple[Rows, list[list[np.ndarray]]]:
        """Returns tokens with their log-probabilities, from the KV cache alone."""
        exact = self.exact
        slots = max(map(len, prompts)) + exact.sample.tokens
        batch = ContinuousBatch(engine, rows=exact.rows, slots=slots, stop=exact.stop, alternatives=1)
        for i, (prompt, mark) in enumerate(zip(prompts, row_seeds(prompts), strict=True)):
            batch.add(Prompt(i, prompt, exact.sample, mark, seed, logprobs=True))
        tokens: Rows = [[] for _ in prompts]
        log_probs: list[list[np.ndarray]] = [[] for _ in prompts]
        while batch.busy:
            for part in batch.advance():
                assert part.logprobs is not None
                tokens[part.name] += part.tokens
                log_probs[part.name].append(np.asarray(part.logprobs.chosen, np.float32))
        return tokens, log_probs


def stop_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the tokens that end a completion.

    Raises:
      ConfigError: no single token ends an answer of the chat template.
    """
    end = chat.end_of_turn(chat.template_for(tokenizer), tokenizer)
    if stop := tuple(dict.fromkeys((*end.tokens, *tokenizer.stop_ids))):
        return stop
    raise ConfigError(
        f"no single token of data.tokenizer={tokenizer.name} ends an answer, so that completions would not end. Use a "
        f"tokenizer whose chat template ends answers with a special token."
    )


class ModelReward(NamedTuple):
    """A reward model that rewards completions, as `rl.rewards` names it: `run:PATH`.

    Attributes:
      name: as `rl.rewards` has it.
      scorer: the model.
      weight: factor of its scores.
    """

    name: str
    scorer: Scorer
    weight: float

    def check(self, row: str, fields: Mapping[str, object]) -> None:
        """Does nothing: a reward model reads no fields."""


@dataclass(eq=False)
class Rollouts(Batches):
    """Makes the batches of a run that learns from rewards. The loader says which prompts a step has.

    Attributes:
      cfg: the run.
      tokenizer: its tokenizer.
      prompts: all prompts, training and held out, by their numbers.
      rewards: functions of completions.
      turns: what continues a completion after a call of a tool. `None` means that nothing does.
      sampler: samples completions.
      rescore: computes the log-probabilities of a batch as its step will, where the sampler's may differ in bits.
        `None` means that they do not differ.
      rows: where the rows of a batch are on the devices.
      waiting: batches that were made for later steps, by their index, with what is logged of them.
      samples: completions of the newest evaluation, for the log.
    """

    cfg: Config
    tokenizer: Tokenizer
    prompts: PromptTokens
    rewards: list[Reward | ModelReward]
    turns: Turns | None
    sampler: Sampler
    rescore: Callable[[Params, Batch], jax.Array] | None
    rows: jax.sharding.Sharding
    waiting: dict[int, tuple[Arrays, Figures]] = field(default_factory=dict)
    samples: list[dict[str, object]] = field(default_factory=list)

    @classmethod
    def create(cls, setup: Setup, loader: DataLoader) -> "Rollouts":
        """Prepares to sample; nothing is compiled yet.

        Raises:
          ConfigError: a reward does not exist or does not suit the rows, or a prompt is too long.
        """
        cfg = setup.cfg
        train = setup.dataset.train
        assert isinstance(train, PromptTokens)
        held_out = setup.dataset.eval
        assert isinstance(held_out, PromptTokens)
        order = np.argsort(np.append(train.numbers, held_out.numbers))
        starts = np.append(train.starts, held_out.starts)[order]
        ends = np.append(train.ends, held_out.ends)[order]
        prompts = replace(train, starts=starts, ends=ends, numbers=np.arange(order.size))
        functions = find_rewards(cfg.rl, str(cfg.data.path), partial(open_reward_model, setup))
        longest = int((ends - starts).argmax())
        needed = int(ends[longest] - starts[longest]) + cfg.rl.tokens - 1
        if needed > cfg.data.seq_len:
            raise ConfigError(
                f"{prompts.rows[longest].name} needs {plural(needed, 'position', spec=',')} with "
                f"rl.tokens={cfg.rl.tokens}, but data.seq_len={cfg.data.seq_len}. Raise data.seq_len, or lower "
                f"rl.tokens."
            )
        for row in prompts.rows:
            for one in functions:
                one.check(row.name, row.fields)
        rows = setup.ctx.layout.sharding(setup.ctx.layout.batch)
        sampler = Sampler.create(setup)
        turns = open_turns(cfg.rl, str(cfg.data.path), setup.dataset.tokenizer, sampler.exact.stop)
        rescore = None
        if scores_again(cfg.model, cfg.mesh, cfg.rl):
            split = None if setup.ctx.layout.pipeline is None else chosen_split(cfg.pipeline, setup.ctx)
            rescore = trainer_log_probs(cfg.model, setup.ctx, cfg.train.grad_accum, split)
        return cls(loader, cfg, setup.dataset.tokenizer, prompts, functions, turns, sampler, rescore, rows)

    # ---- training

    def place(self, rows: Arrays, params: Params, index: int, timer: Timer) -> tuple[Batch, Metrics]:
        """Returns the batch with this index, see `batch`, which reads the prompts itself: `rows` is not read."""
        with timer(params):
            return self.batch(params, index)

    def forget(self) -> None:
        """Drops the batches of later steps after a rollback, because parameters from before it sampled them."""
        self.waiting.clear()

    def batch(self, params: Params, index: int) -> tuple[Batch, Figures]:
        """Returns the batch with this index on the devices, and what is logged of its completions.

        If it is not there yet, the prompts of this step and of the next steps are continued with these parameters.
        """
        if index not in self.waiting:
            after = (index // self.cfg.rl.updates + 1) * self.cfg.rl.updates
            self.waiting = self._roll_out(params, range(index, after))
        arrays, figures = self.waiting.pop(index)
        return self._to_devices(arrays), figures

    def _to_devices(self, arrays: Arrays) -> Batch:
        """Returns a batch on the devices; every process has all of its rows."""
        rows = self.cfg.data.batch_size
        local = distributed.local_rows(self.rows, rows)
        own = {name: array[local] for name, array in arrays.items()}
        return distributed.to_global_batch(own, self.rows, local, rows)

    def _rescored(self, params: Params, groups: list[list[Judged]]) -> list[list[Judged]]:
        """Returns the completions of a batch with the log-probabilities that its step will compute."""
        if self.rescore is None:
            return groups
        arrays = make_arrays(self.cfg.rl, groups, self.cfg.data.seq_len)
        own = {name: arrays[name] for name in ("tokens", "targets")}
        log_probs = iter(distributed.fetch(self.rescore(params, self._to_devices(own))))

        def one(judged: Judged) -> Judged:
            first = len(judged.ids) - 1
            completion = judged.completion
            old = next(log_probs)[first : first + len(completion.tokens)]
            return judged._replace(completion=completion._replace(old_log_probs=old))

        return [[one(judged) for judged in group] for group in groups]

    def _roll_out(self, params: Params, indices: range) -> dict[int, tuple[Arrays, Figures]]:
        """Returns the batches of some steps."""
        began = time.perf_counter()
        rl = self.cfg.rl
        P = self.cfg.data.batch_size // rl.group
        numbers = {i: self.loader.read(i)["prompts"][:, 0].tolist() for i in indices}
        groups: dict[tuple[int, int], list[Judged]] = {}
        drawn = dict.fromkeys(indices, 0)
        flat = dict.fromkeys(indices, 0)
        sampled = 0
        for attempt in range(rl.attempts):
            places = [(i, p) for i in indices for p in range(P) if not _has_spread(groups.get((i, p)))]
            if not places:
                break
            fresh = {i: iter(numbers[i][attempt * P : (attempt + 1) * P]) for i in indices}
            wanted = [next(fresh[i]) for i, _ in places]
            judged = self.judge(params, wanted, rl.group, (indices.start, attempt))
            sampled += sum(len(one.completion.tokens) for group in judged for one in group)
            for place, group in zip(places, judged, strict=True):
                drawn[place[0]] += 1
                flat[place[0]] += not _has_spread(group)
                groups[place] = group
        seconds = time.perf_counter() - began
        speed = {"rollout_s": np.float64(seconds / len(indices)), "rollout_tokens_per_s": np.float64(sampled / seconds)}
        found = {}
        for i in indices:
            own = self._rescored(params, [groups[i, p] for p in range(P)])
            share = {"groups_without_spread": np.float64(flat[i] / drawn[i]), "groups_drawn": np.int64(drawn[i])}
            found[i] = make_arrays(rl, own, self.cfg.data.seq_len), self._figures(own) | share | speed
        return found

    def judge(self, params: Params, numbers: Sequence[int], group: int, key: tuple[int, ...]) -> list[list[Judged]]:
        """Returns `group` completions of each prompt with their rewards, given the numbers of prompts.

        Random numbers depend on `key`.
        """
        rl = self.cfg.rl
        rows = [self.prompts.rows[number] for number in numbers for _ in range(group)]
        ids = [one for one in self.prompts.ids_of(numbers) for _ in range(group)]
        seed = int(np.random.SeedSequence((self.cfg.run.seed, *key)).generate_state(1)[0])
        if self.turns is None:
            sampled = self.sampler.sample(params, ids, seed)
            answers = [Answer(one, one.tokens) for one in sampled]
        else:
            answers = self.turns.sample(partial(self.sampler.sample, params), rows, ids, seed, self.cfg.data.seq_len)
        stop = self.sampler.exact.stop
        endings = [last[-1] in stop for _, last in answers]
        texts = [
            self.tokenizer.decode(last[: len(last) - end]) for (_, last), end in zip(answers, endings, strict=True)
        ]
        completions = [one for one, _ in answers]
        parts = self._parts(rows, texts, [[*own, *one.tokens] for own, one in zip(ids, completions, strict=True)])
        judged = []
        for i, completion in enumerate(completions):
            reward = sum(one.weight * value for one, value in zip(self.rewards, parts[i].tolist(), strict=True))
            if rl.overlong_buffer:
                length = jnp.float32(len(completion.tokens))
                reward += float(losses.overlong_penalty(length, longest=rl.tokens, buffer=rl.overlong_buffer))
            judged.append(Judged(rows[i], ids[i], completion, endings[i], texts[i], parts[i].tolist(), reward))
        return [judged[i : i + group] for i in range(0, len(judged), group)]

    def _parts(self, rows: Sequence[RewardedPrompt], texts: Sequence[str], whole: Rows) -> np.ndarray:
        """Returns the value of each reward for each completion, float64 [completions, rewards].

        Functions run once for each completion, whatever the number of processes, which share them. So a function may
        be random, or ask another program.

        Args:
          whole: ids of each prompt with its completion.

        Raises:
          ConfigError: a function fails, on every process.
        """
        count = jax.process_count()
        found = np.zeros((len(texts), len(self.rewards)))
        failure = None
        try:
            for i in range(jax.process_index(), len(texts), count):
                for k, one in enumerate(self.rewards):
                    if isinstance(one, Reward):
                        found[i, k] = one(rows[i].name, rows[i].text, texts[i], rows[i].fields)
        except ConfigError as error:
            if count == 1:
                raise
            failure = str(error)
        if count > 1:
            if reason := distributed.first_reason(failure):
                raise ConfigError(failure or reason)
            found = distributed.gather_numbers(found).sum(0)
        for k, one in enumerate(self.rewards):
            if isinstance(one, ModelReward):
                found[:, k] = one.scorer.rewards(whole, self.cfg.microbatch_size)
        return found

    def _figures(self, groups: Sequence[Sequence[Judged]]) -> Figures:
        """Returns what is logged of the completions of a step."""
        flat = [one for group in groups for one in group]
        values = np.array([one.reward for one in flat])
        lengths = np.array([one.completion.mask.sum() for one in flat])
        figures = {
            "reward": values.mean(),
            "reward_std": values.std(),
            "length": lengths.mean(),
            "ended": np.mean([one.ended for one in flat]),
        }
        if len(self.rewards) > 1:
            for k, one in enumerate(self.rewards):
                figures[f"reward/{one.name}"] = np.mean([each.parts[k] for each in flat])
        if self.turns is not None:
            figures["turns"] = np.mean([one.completion.turns for one in flat])
        if self.cfg.rl.exact:
            figures["redrafted"] = sum(one.completion.redrafted for one in flat) / lengths.sum()
        if self.rescore is not None:
            pairs = [one.completion for one in flat]
            apart = np.concatenate([(one.old_log_probs - one.log_probs)[one.mask] for one in pairs])
            figures["sampler_kl"] = float(np.mean(np.expm1(apart) - apart))
            figures["sampler_difference"] = np.abs(apart).max()
        return {name: np.float64(value) for name, value in figures.items()}

    # ---- evaluation

    def evaluation(self, evaluate: Evaluate, refer: Refer) -> Evaluate:
        """Returns `evaluator(refer)` in place of `evaluate`: the loss of held-out rows is not computed."""
        return self.evaluator(refer)

    def evaluator(self, refer: Refer) -> Evaluate:
        """Returns the evaluation of held-out prompts: one completion of each is sampled, always with the same seed."""
        count = 0

        def evaluate(params: Params, batch: Batch) -> EvalSums:
            nonlocal count
            numbers = np.asarray(distributed.fetch(batch["prompts"]))[:, 0].tolist()
            judged = [one for (one,) in self.judge(params, numbers, 1, (0, 0, 1))]
            if count % self.cfg.train.eval_steps == 0:
                self.samples = [_sample(one) for one in judged[:SAMPLES]]
            count += 1
            sums = {
                "reward": float(sum(one.reward for one in judged)),
                "length": float(sum(one.completion.mask.sum() for one in judged)),
            }
            weights = dict.fromkeys(("policy", "reward", "length"), float(len(judged)))
            sums["policy"] = -sums["reward"]
            if self.cfg.rl.has_reference:
                divergence, tokens = self._divergence(params, judged, refer)
                sums |= dict.fromkeys(("kl", "penalty"), divergence)
                weights |= dict.fromkeys(("kl", "penalty"), tokens)
            names = [term.name for term in self.cfg.objective.terms]
            losses_of, weights_of = ({name: jnp.float32(each[name]) for name in names} for each in (sums, weights))
            return EvalSums(losses_of, weights_of, None)

        return evaluate

    def take_samples(self) -> list[dict[str, object]]:
        """Returns the samples of an evaluation once."""
        samples = self.samples
        self.samples = []
        return samples

    def _divergence(self, params: Params, judged: Sequence[Judged], refer: Refer) -> tuple[float, float]:
        """Returns the sum of the divergence from the reference over the tokens of completions, and their number."""
        total = count = 0.0
        rows = self.cfg.data.batch_size
        for at in range(0, len(judged), rows):
            part = [[one] for one in judged[at : at + rows]]
            arrays = make_arrays(self.cfg.rl, part, self.cfg.data.seq_len)
            padded = {name: np.pad(a, ((0, rows - len(a)), (0, 0))) for name, a in arrays.items()}
            batch = refer(params, self._to_devices(padded))
            reference = distributed.fetch(batch["reference_log_probs"])
            log_probs = padded["old_log_probs"]
            if self.rescore is not None:
                inputs = {name: batch[name] for name in ("tokens", "targets")}
                log_probs = distributed.fetch(self.rescore(params, inputs))
            mask = padded["loss_weights"] > 0
            own = log_probs[mask]
            total += float(losses.divergence(jnp.asarray(own), jnp.asarray(reference[mask]), self.cfg.rl.kl).sum())
            count += float(mask.sum())
        return total, count

    # ---- checkpoints between the steps of a rollout

    def save(self, step: int) -> None:
        """Writes the batches that wait beside the checkpoint of a step; removes files of checkpoints that are gone."""
        if jax.process_index():
            return
        folder = Path(self.cfg.run.dir) / "rollouts"
        kept = {*manifest.steps(run_dir.checkpoints(Path(self.cfg.run.dir))), step}
        for old in folder.glob("*.npz"):
            if old.stem.isdigit() and int(old.stem) not in kept:
                old.unlink()
        if not self.waiting:
            return
        folder.mkdir(exist_ok=True)
        content = {
            f"{index}/{kind}/{name}": value
            for index, (arrays, figures) in self.waiting.items()
            for kind, values in (("arrays", arrays), ("figures", figures))
            for name, value in values.items()
        }
        with files.atomic_file(folder / f"{step}.npz") as file:
            np.savez(file, **content)  # type: ignore[arg-type]

    def restore(self, step: int, index: int) -> str:
        """Reads the batches that waited at a checkpoint.

        Args:
          step: step of the checkpoint.
          index: index of the next batch.

        Returns:
          A line for the user if the batches are needed and cannot be read; then new ones are sampled. Otherwise "".
        """
        self.waiting = {}
        if index % self.cfg.rl.updates == 0:
            return ""
        path = Path(self.cfg.run.dir) / "rollouts" / f"{step}.npz"
        failure = None
        try:
            with np.load(path, allow_pickle=False) as content:
                for key in content.files:
                    number, kind, name = key.split("/", 2)
                    arrays, figures = self.waiting.setdefault(int(number), ({}, {}))
                    if kind == "arrays":
                        arrays[name] = content[key]
                    else:
                        figures[name] = content[key][()]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            failure = type(error).__name__
        if jax.process_count() > 1:
            failure = distributed.first_reason(failure)  # all processes sample again, or none
        if failure:
            self.waiting = {}
            return f"{path} with completions for the next steps cannot be read ({failure}); new ones are sampled"
        return ""


def find_rewards(rl: RLConfig, path: str, open_run: Callable[[str, str], Scorer]) -> list[Reward | ModelReward]:
    """Returns the functions and reward models of `rl.rewards`, or the function of the task that `data.path` names.

    Args:
      path: `data.path`.
      open_run: returns the reward model of a run, from the key that names the run, for errors, and the run's folder.

    Raises:
      ConfigError: nothing gives a reward, or a function or a reward model does not exist.
    """
    found: list[Reward | ModelReward] = []
    for name, weight in zip(rl.rewards, rl.weights or [1.0] * len(rl.rewards), strict=True):
        if name.startswith(RUN):
            found.append(ModelReward(name, open_run(f"rl.rewards={RUN}", name.removeprefix(RUN)), weight))
        else:
            found += rewards.load([name], [weight])
    if found:
        return found
    if path.startswith(tasks.PREFIX):
        return [Reward.of(path, tasks.find(path)[0].reward)]
    raise ConfigError(
        f"rl.rewards is empty, but data.path={path} is not a task with a reward. Name functions, such as "
        f"--rl.rewards=[rewards.py:right]."
    )


def open_reward_model(setup: Setup, key: str, folder: str) -> Scorer:
    """Returns the reward model of a run, on the mesh of the run that learns.

    Args:
      setup: the run that learns.
      key: the key that names the reward model's run, for error messages.
      folder: the reward model's run.

    Raises:
      ConfigError: it cannot be read, is not a reward model, or has another tokenizer.
    """
    model, params, ctx = read_frozen(setup.cfg, key, folder, setup.dataset.tokenizer, setup.mesh)
    if not model.reward_head:
        raise ConfigError(
            f"{key}{folder} is not a reward model (model.reward_head=false). Name a run of preference.loss=reward."
        )
    return Scorer.create(model, params, ctx)


def make_arrays(rl: RLConfig, groups: Sequence[Sequence[Judged]], seq_len: int) -> Arrays:
    """Returns the batch of some groups of completions, in rows of `seq_len` tokens, one for each completion.

    Returns:
      Arrays [B, S]:

      - `tokens` and `targets`, int32: the targets are the tokens that follow.
      - `loss_weights`, float32: 1 where the target is of the completion, and not of a tool's result.
      - `row_weights`, float32: 1 at the first position.
      - `token_weights`, float32: the weight of each token in the sum that `RLConfig.terms` divides.
      - `importance`, float32: ratio of the trainer's and the sampler's probability, at most `rl.importance_limit`.
      - `old_log_probs`, float32: of the targets of the completion.
      - `advantages`, float32: of the completion, at every position.
    """
    values = jnp.asarray([[one.reward for one in group] for group in groups], jnp.float32)
    if rl.loss == "rloo":
        scaled = losses.rloo_advantages(values) if values.shape[1] > 1 else values
    else:
        scaled = losses.group_advantages(values, scale=rl.loss != "dr_grpo")
    flat = [one for group in groups for one in group]
    shape = len(flat), seq_len
    arrays: Arrays = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets")}
    floats = ("loss_weights", "row_weights", "token_weights", "importance", "old_log_probs", "advantages")
    arrays |= {name: np.zeros(shape, np.float32) for name in floats}
    for row, one in enumerate(flat):
        text = [*one.ids, *one.completion.tokens]
        arrays["tokens"][row, : len(text) - 1] = text[:-1]
        arrays["targets"][row, : len(text) - 1] = text[1:]
        where = row, slice(len(one.ids) - 1, len(text) - 1)
        sampled = one.completion.mask
        arrays["loss_weights"][where] = sampled
        arrays["old_log_probs"][where] = np.where(sampled, one.completion.old_log_probs, 0)
        pair = (jnp.asarray(one.completion.old_log_probs), jnp.asarray(one.completion.log_probs))
        weights = losses.truncated_importance(*pair, limit=rl.importance_limit)  # 1 where the bits are equal
        arrays["importance"][where] = np.where(sampled, weights, 0)
    arrays["row_weights"][:, 0] = 1
    arrays["advantages"][:] = np.asarray(scaled).reshape(-1, 1)
    mask = arrays["loss_weights"]
    match rl.loss:
        case "grpo" | "gspo":
            arrays["token_weights"] = mask / np.maximum(mask.sum(1, keepdims=True), 1)
        case "dr_grpo":
            arrays["token_weights"] = mask / np.float32(rl.tokens * rl.turns)
        case _:
            arrays["token_weights"] = mask.copy()
    return arrays


def _has_spread(group: Sequence[Judged] | None) -> bool:
    """Returns whether the rewards of a group differ. A group that was not drawn yet has none."""
    return group is not None and len({one.reward for one in group}) > 1


def _sample(one: Judged) -> dict[str, object]:
    """Returns what the log shows of a completion."""
    return {"prompt": one.row.text[-500:], "completion": one.text[:500], "reward": one.reward}
