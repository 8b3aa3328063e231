"""Measures reinforcement learning on a task without a download, with three seeds and a control.

    python benchmarks/reinforcement.py

A byte model of 0.5 million parameters learns to sort digits from conversations, half of which are wrong. Then GRPO
continues from it, once for each seed, with the right rewards, and with the rewards of a step shuffled among its
completions. The latter must not improve. Both are measured on held-out prompts: pass@1 is the mean reward of eight
completions of each prompt, and pass@8 the share of the prompts with a right one.
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import record
from sorting_model import COMMON, train_on_conversations, write_data

RL = [
    *COMMON, "--run.log_every=1", "--optim.weight_decay=0",
    "--data.source=prompts", "--data.seq_len=64", "--data.batch_size=64", "--rl.tokens=12", "--optim.lr=3e-4",
    "--optim.warmup_steps=5", "--optim.schedule=constant", "--train.eval_steps=1",
]  # fmt: skip
GROUP = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--chat_steps", type=int, default=600)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=128)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), args)


def run(folder: Path, args: argparse.Namespace) -> None:
    """Trains all runs in a folder, and records the figures after each."""
    import jaxstack
    from jaxstack.config import resolve
    from jaxstack.config.reading.parse import parse_config
    from jaxstack.train import main as train

    write_data(folder)
    asked = [f"--data.path={folder}/sorting_pairs.jsonl", "--rl.rewards=[jaxstack.posttrain.tasks.text:sorting]"]
    train_on_conversations(folder, args.chat_steps, "--optim.weight_decay=0")
    first = jaxstack.load(folder / "chat")
    prompts = parse_config([*RL, *asked, f"--run.init_from={folder}/chat"])
    rl = resolve(replace(prompts, model=first.config.model), None)
    before = measure(first, rl, args.prompts)
    print("supervised", before, flush=True)
    runs = []
    for seed in range(args.seeds):
        for shuffled in (False, True):
            name = f"seed{seed}{'shuffled' if shuffled else ''}"
            flags = [
                *RL, *asked, f"--run.dir={folder}/{name}", f"--run.init_from={folder}/chat",
                f"--run.seed={seed}",
                f"--train.steps={args.steps}", f"--train.eval_every={args.steps}", f"--rl.reference={folder}/chat",
            ]  # fmt: skip
            began = time.perf_counter()
            with shuffling(shuffled):
                train(parse_config(flags))
            seconds = time.perf_counter() - began
            lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
            steps = [line for line in lines if "reward" in line and "grad_norm" in line]
            after = measure(jaxstack.load(folder / name), rl, args.prompts)
            ratios = [min(line["ratio_min"] for line in steps), max(line["ratio_max"] for line in steps)]
            kl = next(line["eval_kl"] for line in reversed(lines) if "eval_kl" in line)
            speeds = {
                key: float(np.median([line[key] for line in steps if line.get(key)]))
                for key in ("rollout_tokens_per_s", "rollout_s", "step_time_s")
            }
            runs.append(
                {"seed": seed, "shuffled": shuffled, **after, "ratios": ratios, "kl": kl, "seconds": seconds, **speeds}
            )
            print(runs[-1], flush=True)
            record.record("reinforcement", {**vars(args), "supervised": before, "runs": runs})


def measure(run, rl, count: int) -> dict[str, float]:  # type: ignore[no-untyped-def]
    """Returns pass@1 and pass@8 of a model on held-out prompts, with the same random numbers for all models."""
    import jax

    from jaxstack import data
    from jaxstack.data.loader import DataLoader
    from jaxstack.generate.rollouts import Rollouts
    from jaxstack.training.setup import Setup
    from jaxstack.training.state import Recipe, abstract_state

    dataset = data.load_for(rl.model, rl.data)
    ctx = run.context
    setup = Setup(rl, dataset, ctx.layout.mesh, ctx, abstract_state(Recipe.of(rl), ctx))
    loader = DataLoader(rl, dataset, ctx.layout.sharding(jax.sharding.PartitionSpec()))
    rollouts = Rollouts.create(setup, loader)
    numbers = dataset.eval.numbers[:count].tolist()
    judged = rollouts.judge(run.params, numbers, GROUP, (7,))
    rewards = np.array([[one.reward for one in group] for group in judged])
    return {"pass@1": float(rewards.mean()), "pass@8": float(rewards.max(1).mean())}


class shuffling:
    """Within it, the rewards of a training step are shuffled among all completions of the step."""

    def __init__(self, active: bool) -> None:
        self.active = active

    def __enter__(self) -> None:
        from jaxstack.generate.rollouts import Rollouts

        self.judge = Rollouts.judge
        if not self.active:
            return
        judge = self.judge

        def shuffled(self, params, numbers, group, key):  # type: ignore[no-untyped-def]
            judged = judge(self, params, numbers, group, key)
            if group == 1:  # an evaluation
                return judged
            rewards = [one.reward for own in judged for one in own]
            order = iter(np.random.default_rng(key).permutation(rewards).tolist())
            return [[one._replace(reward=next(order)) for one in own] for own in judged]

        Rollouts.judge = shuffled

    def __exit__(self, *error: object) -> None:
        from jaxstack.generate.rollouts import Rollouts

        Rollouts.judge = self.judge


if __name__ == "__main__":
    main()
