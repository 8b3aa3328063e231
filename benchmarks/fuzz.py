"""Runs the readers of tests/fuzz on drawn inputs, and records tries, refusals and failures: `results/fuzz.json`.

    python benchmarks/fuzz.py --tries=100000

A failure is another exception than a reader promises, or a try beyond the limits of memory and time, which
`tests/fuzz/fuzz_child.py` has. The run continues after a failure, and lists each kind once, with an input.
It takes more than an hour of one core: start it with `nice`. With `--minutes`, it stops earlier.
"""

import argparse
import re
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import record

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "fuzz"))

from fuzz_child import MEMORY, SECONDS
from fuzz_inputs import INPUTS
from fuzz_room import Room
from hypothesis import HealthCheck, Phase, given, seed, settings

SHARES = {"yaml": 0.3, "flags": 0.3, "report_config": 0.3, "chat_template": 0.3, "npz": 0.5}
"""Tries of slow readers, as a part of those of a quick one."""

WALL_SECONDS = 3600
"""A child of low priority may wait this long for a core; what it may compute is limited by `SECONDS`."""

BLOCK = 500
"""Tries of a reader before the next reader has its turn, so that a run that stops early has tried all of them."""


def kind(why: str) -> str:
    """Returns what is equal in failures of one kind: the error, and the last line of jaxstack that it came through."""
    places = re.findall(r"jaxstack/(\S+\.py)\", line (\d+)", why)
    errors = re.findall(r"^(\w[\w.]*(?:Error|Exception|Warning|Interrupt)\b.{0,80})", why, re.MULTILINE)
    error = errors[-1] if errors else why.strip().splitlines()[0][:120]
    error = re.sub(r"\S*/jaxstack-fuzz-\w+/", "", error)  # the folder of a try has another name each time
    place = ":".join(places[-1]) if places else "?"
    return f"{re.sub(r'[0-9]+|0x[0-9a-f]+', 'N', error)} at {place}"


def fuzz(room: Room, name: str, count: int, start: int) -> dict[str, str]:
    """Runs a reader on some inputs; returns an input for each kind of failure."""
    failures: dict[str, str] = {}

    @seed(start)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )
    @given(INPUTS[name])
    def check(content: bytes) -> None:
        outcome = room.attempt(name, content)
        if outcome["outcome"] == "failed":
            failures.setdefault(kind(outcome["why"]), f"{content[:300]!r}")

    check()
    return failures


def installed(package: str) -> str:
    """Returns the version of a package; an optional one may be absent, so that a long run does not end here."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def main(argv: list[str]) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--readers", nargs="*", default=[*INPUTS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="another folder for the result")
    args = parser.parse_args(argv)
    weights = {name: SHARES.get(name, 1.0) for name in args.readers}
    goals = {name: round(args.tries * weight / sum(weights.values())) for name, weight in weights.items()}
    room = Room(WALL_SECONDS)
    failures: dict[str, dict[str, str]] = {name: {} for name in goals}
    began = time.monotonic()
    turn = 0
    while any(room.tries.get(name, 0) < goal for name, goal in goals.items()):
        for name, goal in goals.items():
            left = goal - room.tries.get(name, 0)
            if left > 0 and time.monotonic() - began < 60 * args.minutes:
                found = fuzz(room, name, min(left, BLOCK), args.seed + turn)
                for failure in found.keys() - failures[name].keys():
                    failures[name][failure] = found[failure]
                    print(f"{name}: {failure}\n    {found[failure]}", flush=True)
        turn += 1
        print(f"{sum(room.tries.values()):,} tries in {time.monotonic() - began:.0f} s", flush=True)
        if time.monotonic() - began >= 60 * args.minutes:
            break
    readers: dict[str, Any] = {
        name: {"tries": room.tries.get(name, 0), "refused": room.refused.get(name, 0), "failures": failures[name]}
        for name in goals
    }
    record.record(
        "fuzz",
        {
            "limits": {"bytes": MEMORY, "cpu_seconds": SECONDS},
            "tries": sum(room.tries.values()),
            "failures": sum(map(len, failures.values())),
            "readers": readers,
            "libraries": {
                package: installed(package)
                for package in ("hypothesis", "pyyaml", "jsonargparse", "tokenizers", "safetensors", "pillow", "jinja2")
            },
        },
        args.out,
    )
    room.close()


if __name__ == "__main__":
    main(sys.argv[1:])
