"""Predicts published steps that the fit of the model of time never saw: `python benchmarks/unseen_steps.py`

`unseen_steps.json` has the steps. They were chosen by their sources before anything was predicted for them, and
`published_steps.py` does not read them. Each becomes a configuration file, and `jaxstack plan time` predicts it twice,
as a user would ask:

- `command`: without an option, the command predicts our program.
- `program`: with `--program`, it predicts the program of the stack that the source describes. The table names it.

`benchmarks/results/unseen_steps.json` has both intervals, and says whether the published rate is within each of them.

Nothing is compiled, and no device is used.
"""

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import record

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from published_steps import TABLE, InexpressibleError, errors, job_of

from jaxstack.__main__ import main as jaxstack
from jaxstack.common.errors import ConfigError
from jaxstack.config.reading.parse import to_yaml

UNSEEN = json.loads(Path(__file__).with_suffix(".json").read_text())
ROWS: list[dict[str, Any]] = UNSEEN["rows"]
TABLE["sources"].update(UNSEEN["sources"])
SHOWN = ("project", "source", "model", "chip", "devices", "precision", "mesh", "sequence", "published", "unit", "where")


def target_of(row: dict[str, Any]) -> str:
    """Returns the target of the command: chip and devices, with the devices of a host where the source says them."""
    linked = row.get("linked_devices", row["devices"])
    if row["devices"] <= linked:
        return f"{row['chip']}:{row['devices']}"
    return f"{row['chip']}:{row['devices'] // linked}x{linked}"


def printed(words: Sequence[str]) -> dict[str, Any]:
    """Returns the object that a command prints with `--json`."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        jaxstack(words=[*words, "--json"])
    return json.loads(text.getvalue())


def program_of(row: dict[str, Any]) -> str:
    """Returns the value of `--program` for a row."""
    return row.get("program") or TABLE["sources"][row["source"]]["program"]


def predict(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns a row with what `jaxstack plan time` prints for it, or the reason why no configuration expresses it."""
    shown = {name: row[name] for name in SHOWN}
    try:
        job = job_of(row)
    except (InexpressibleError, ConfigError) as error:
        return shown | {"reason": str(error).split(". ")[0]}
    file = folder / "step.yaml"
    file.write_text(to_yaml(job.cfg))
    words = ["plan", "time", "--target", target_of(row), "--config", str(file)]
    kind = "experts" if job.model.moe.num_experts else "dense"
    return shown | {
        "kind": kind,
        "command": compared(row, printed(words)),
        "program": {"name": program_of(row)} | compared(row, printed([*words, f"--program={program_of(row)}"])),
    }


def compared(row: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Returns what a command has printed, and how far off the published rate is."""
    return {name: found[name] for name in ("tokens_per_s_per_device", "low", "high", "parts")} | {
        "ratio": row["published"] / found["tokens_per_s_per_device"],  # predicted over published seconds
        "inside": found["low"] <= row["published"] <= found["high"],
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = [predict(row, Path(folder)) for row in ROWS]
    for row in rows:
        print(json.dumps(row))
    predicted = [row for row in rows if "reason" not in row]
    groups = {
        "all": predicted,
        **{kind: [row for row in predicted if row["kind"] == kind] for kind in ("dense", "experts")},
        "16 bits": [row for row in predicted if row["precision"] == "bf16"],
        "8 bits": [row for row in predicted if row["precision"] != "bf16"],
    }
    result = {
        name: {
            way: {"inside": sum(row[way]["inside"] for row in group)} | errors(row[way]["ratio"] for row in group)
            for way in ("command", "program")
        }
        for name, group in groups.items()
    }
    print(json.dumps(result, indent=1))
    record.record("unseen_steps", {"summary": result, "rows": rows})


if __name__ == "__main__":
    main()
