"""Predicts published steps that the fit of the model of time never saw: `python benchmarks/unseen_steps.py`

`unseen_steps.json` has the steps. They were chosen by their sources before anything was predicted for them, and
`published_steps.py` does not read them. Each is predicted twice:

- Its configuration file goes to the command `jaxstack plan time`, as a user would do it. The command predicts our
  program. In 8 bits ours keeps experts and gradients of weights in bfloat16, and these published programs do not.
- The program that its source describes, as `published_steps.py` predicts the steps of the fit.

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

from published_steps import TABLE, InexpressibleError, case_of, errors, job_of, kind_of

from jaxstack.__main__ import main as jaxstack
from jaxstack.common.errors import ConfigError
from jaxstack.config.reading.parse import to_yaml
from jaxstack.planner.rates import rates

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


def predict(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns a row with what `jaxstack plan time` prints for it, or the reason why no configuration expresses it."""
    shown = {name: row[name] for name in SHOWN}
    try:
        job = job_of(row)
    except (InexpressibleError, ConfigError) as error:
        return shown | {"reason": str(error).split(". ")[0]}
    file = folder / "step.yaml"
    file.write_text(to_yaml(job.cfg))
    found = printed(["plan", "time", "--target", target_of(row), "--config", str(file)])
    case = case_of(row)
    kind = kind_of(case)
    slow = case.ratio(rates())  # predicted over published seconds of the published program
    least, most = rates().interval[kind]
    return shown | {
        "kind": kind,
        "command": {name: found[name] for name in ("tokens_per_s_per_device", "low", "high")}
        | {
            "ratio": row["published"] / found["tokens_per_s_per_device"],
            "inside": found["low"] <= row["published"] <= found["high"],
        },
        "published_program": {"ratio": slow, "inside": least * slow <= 1 <= most * slow},
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
            for way in ("command", "published_program")
        }
        for name, group in groups.items()
    }
    print(json.dumps(result, indent=1))
    record.record("unseen_steps", {"summary": result, "rows": rows})


if __name__ == "__main__":
    main()
