"""Predicts published steps that the fit of the model of time never saw: `python benchmarks/unseen_steps.py`

`unseen_steps.json` has the steps. They were chosen by their sources before anything was predicted for them, and
`published_steps.py` does not read them. Each becomes a configuration file, and the command `jaxstack plan time` predicts
it as it would for a user: our program on this mesh, not the published one. The result,
`benchmarks/results/unseen_steps.json`, has the printed interval of each step and says whether the published rate is
within it.

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

from published_steps import InexpressibleError, errors, job_of

from jaxstack.__main__ import main as jaxstack
from jaxstack.common.errors import ConfigError
from jaxstack.config.reading.parse import to_yaml

ROWS: list[dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())["rows"]
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
    rate = found["tokens_per_s_per_device"]
    return shown | {
        "experts": job.model.moe.num_experts, "tokens_per_s_per_device": rate, "low": found["low"],
        "high": found["high"], "ratio": row["published"] / rate,
        "inside": found["low"] <= row["published"] <= found["high"],
    }  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = [predict(row, Path(folder)) for row in ROWS]
    for row in rows:
        print(json.dumps(row))
    predicted = [row for row in rows if "reason" not in row]
    groups = {
        "all": predicted,
        "dense": [row for row in predicted if not row["experts"]],
        "experts": [row for row in predicted if row["experts"]],
    }
    result = {
        name: {"inside": sum(row["inside"] for row in group)} | errors(row["ratio"] for row in group)
        for name, group in groups.items()
    }
    print(json.dumps(result, indent=1))
    record.record("unseen_steps", {"summary": result, "rows": rows})


if __name__ == "__main__":
    main()
