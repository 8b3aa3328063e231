"""Writes the curve of a run of `configs/NAME.yaml` to `benchmarks/results/`: `python benchmarks/curve.py RUN NAME`

The result has every evaluation, every 50th training line, the resolved configuration and the seconds of its steps.
"""

import sys
from pathlib import Path

import record
import yaml

sys.path.insert(0, str(Path(__file__).parent.parent))
from jaxstack.tracking.jsonl import read_lines


def main(run: Path, name: str) -> None:
    lines = read_lines(run / "metrics.jsonl")
    steps = [line for line in lines if "loss" in line and "event" not in line]
    interval = steps[1]["step"] - steps[0]["step"]
    timed = [line["step_time_s"] for line in steps if line["step_time_s"] is not None]
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["run"].pop("dir")
    config["data"].pop("path")
    held_out = [{k: round(v, 5) for k, v in line.items()} for line in lines if "eval_loss" in line]
    path = record.record(
        name,
        {
            "command": f"python train.py --config configs/{name}.yaml",
            "config": config,
            "steps": steps[-1]["step"],
            "training_s": round(sum(timed) * interval, 1),
            "ngram": next((line for line in lines if "ngram_order" in line), None),
            "best_eval_loss": min(line["eval_loss"] for line in held_out),
            "held_out": held_out,
            "training": [[line["step"], round(line["loss"], 4)] for line in steps if line["step"] % 50 == 0],
        },
    )
    print(path, min(line["eval_loss"] for line in held_out))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
