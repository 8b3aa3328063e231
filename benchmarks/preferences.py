"""Measures preference learning on a task without a download, with three seeds.

    python benchmarks/preferences.py

A byte model of 0.5 million parameters learns to sort digits from conversations, half of which are wrong. Then DPO
continues from it, once for each seed, with pairs of a right and a wrong answer. Two shares of the held-out pairs are
measured, of which no prompt was trained on: `accuracy` is the share with a larger reward for the right answer,
where the reward is relative to the reference, and `likelier` the share with a larger log-probability of the right
answer, which the supervised model has, too.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import record
from sorting_model import COMMON, train_on_conversations, write_data

PAIRS = [
    *COMMON, "--data.source=preferences", "--data.seq_len=192", "--data.batch_size=16", "--data.packing=true",
    "--data.eval_fraction=0.2", "--preference.loss=dpo",
    "--preference.beta=0.1", "--optim.lr=3e-4", "--optim.warmup_steps=10", "--optim.schedule=constant",
    "--optim.weight_decay=0", "--train.eval_steps=10",
]  # fmt: skip
"""The keys of configs/dpo_quickstart.yaml, but for the optimizer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--chat_steps", type=int, default=600)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--eval_every", type=int, default=50)
    parser.add_argument("--folder", type=Path, help="where runs are kept; finished ones are not trained again")
    args = parser.parse_args()
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
        run(args.folder, args)
        return
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), args)


def run(folder: Path, args: argparse.Namespace) -> None:
    """Trains all runs in a folder, and records the figures after each."""
    import jaxstack
    from jaxstack.config.reading.parse import parse_config
    from jaxstack.train import main as train

    write_data(folder)
    train_on_conversations(folder, args.chat_steps)
    pairs = folder / "sorting_pairs.jsonl"
    supervised = likelier(jaxstack.load(folder / "chat"), pairs)
    runs = []
    for seed in range(args.seeds):
        name = folder / f"seed{seed}"
        flags = [
            f"--data.path={pairs}", f"--run.dir={name}", f"--run.init_from={folder}/chat", f"--run.seed={seed}",
            f"--train.steps={args.steps}", f"--train.eval_every={args.eval_every}",
        ]  # fmt: skip
        train(parse_config([*PAIRS, *flags]))
        lines = [json.loads(line) for line in (name / "metrics.jsonl").read_text().splitlines()]
        evaluated = [line for line in lines if "eval_loss" in line]
        runs.append(
            {
                "seed": seed,
                "accuracy": {str(line["step"]): line["eval_rewards/accuracies"] for line in evaluated},
                "margin": evaluated[-1]["eval_rewards/margins"],
                "loss": evaluated[-1]["eval_loss"],
                "likelier": likelier(jaxstack.load(name), pairs),
            }
        )
        print(runs[-1], flush=True)
        settings = {key: value for key, value in vars(args).items() if key != "folder"}
        record.record("preferences", {**settings, "supervised": {"likelier": supervised}, "runs": runs})


def likelier(run, path: Path) -> float:  # type: ignore[no-untyped-def]
    """Returns the share of held-out pairs whose right answer has the larger log-probability under a model."""
    from jaxstack import data
    from jaxstack.config import DataConfig

    keys = DataConfig(source="preferences", path=str(path), seq_len=192, eval_fraction=0.2)
    pairs = data.load(keys).eval
    spans = np.stack([pairs.starts, pairs.middles, pairs.middles, pairs.ends], 1).reshape(-1, 2).tolist()
    texts = [np.asarray(pairs.ids[first:last]).tolist() for first, last in spans]
    masks = [pairs.loss_mask[first + 1 : last] for first, last in spans]
    found = dict(run.scorer.scores(texts, 32))
    sums = np.array([float((found[i].log_probs * mask).sum()) for i, mask in enumerate(masks)]).reshape(-1, 2)
    return float((sums[:, 0] > sums[:, 1]).mean())


if __name__ == "__main__":
    main()
