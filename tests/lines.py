"""Reads metrics.jsonl, for tests that compare runs."""

import json
from pathlib import Path

TIMED = ("tokens_per_s", "mfu", "mfu_causal", "step_time_s", "data_wait_s", "time", "seconds")


def lines(run_dir: Path) -> list[dict]:
    """Returns every record of a run."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def values(run_dir: Path) -> list[dict]:
    """Returns the values that must repeat exactly: training and evaluation records, without times."""
    return [{k: v for k, v in line.items() if k not in TIMED} for line in lines(run_dir) if "event" not in line]
