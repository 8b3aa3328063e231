"""Finds the operation that made the loss or a gradient of a step NaN or infinite, and its place in the code.

The step is run again on the mesh of the run, whose devices a CPU may simulate. It starts from the newest checkpoint
before the step, and repeats the steps in between.
"""

from dataclasses import replace
from pathlib import Path

from jsonargparse import Namespace

from jaxstack.config import Config, ConfigError
from jaxstack.config.bounds import PositiveInt
from jaxstack.config.reading import parse
from jaxstack.config.reading.parse import Parser, user_path
from jaxstack.runtime import platform


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    parser.add_argument("run", metavar="RUN", type=user_path, help="run directory")
    parser.add_argument(
        "--step",
        type=PositiveInt | None,
        default=None,
        help="number of the step; by default the first one that was skipped because it was not finite",
    )


def main(args: Namespace) -> None:
    """Runs the step again and prints what was found.

    Raises:
      ConfigError: the folder is not a run, or has no such step.
    """
    run = Path(args.run)
    cfg = _config(run)
    step = args.step or _bad_step(run)
    folder = run / "debug" / f"step_{step}"
    if folder.exists():
        raise ConfigError(f"{folder} exists, with what was found before. Remove it, or name another step.")
    if step > cfg.train.steps:
        raise ConfigError(f"--step={step} is past the last one, train.steps={cfg.train.steps}. Give an earlier one.")
    platform.configure(cfg.mesh, cfg.microbatch_size)

    from jaxstack.debug import replay

    for line in replay.explain_step(replay.Replay(cfg), step, folder):
        print(line)


def _config(run: Path) -> Config:
    """Returns the configuration of a run with its present folder."""
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run} is not a run directory: it has no config.yaml. Check the path.")
    cfg = parse.parse_config([f"--config={run / 'config.yaml'}"], run)
    return replace(cfg, run=replace(cfg.run, dir=str(run)))


def _bad_step(run: Path) -> int:
    """Returns the first step of a run that was not finite."""
    from jaxstack.tracking.jsonl import read_lines

    step = next((r["step"] for r in read_lines(run / "metrics.jsonl") if r.get("event") == "skipped"), None)
    if step is None:
        raise ConfigError(f"{run} has no step that was skipped because it was not finite. Name one with --step.")
    return int(step)
