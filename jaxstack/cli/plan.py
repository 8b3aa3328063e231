"""Prints the memory of a device and the bytes moved per mesh axis, for chips that are not here.

Where the target's compiler is installed, the step is compiled, and the formula is shown beside it. Elsewhere both are
estimates by formula. It takes the configuration of `jaxstack train`.
"""

import math
import os
import time

from jsonargparse import Namespace

from jaxstack.common.hardware import CHIPS
from jaxstack.config import Config, ConfigError, resolve
from jaxstack.config.reading.parse import Parser

BYTES = 256
"""Size of the vocabulary of `data.tokenizer=bytes`."""


def add_chips(parser: Parser) -> None:
    """Declares the chips that a command plans for."""
    parser.add_argument(
        "--target",
        type=str,
        help="chip and number or topology of chips, such as a100:8, v5e:4x4, or h100:8x8 for 8 hosts of 8 (required)",
        metavar="CHIP:TOPOLOGY",
    )


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    add_chips(parser)
    parser.add_argument(
        "--formula", action="store_true", help="estimate by formula, even where the step could be compiled"
    )
    parser.add_config()


def main(args: Namespace) -> None:
    """Compiles or estimates, and prints the report.

    Raises:
      ConfigError: the target is unknown, or the configuration does not fit it.
    """
    cfg = resolve_for_target(args)

    from jaxstack.planner import aot, memory
    from jaxstack.planner.job import Job

    reason = "--formula is set." if args.formula else aot.obstacle(args.target)
    if reason:
        print(f"estimated by formula for {args.target}; nothing was compiled: {reason}")
        name, topology = aot.parse_target(args.target)
        chip = CHIPS[name]
        ctx = memory.context(cfg, math.prod(topology) * chip.devices, chip.platform)
        print(memory.plan(Job(cfg, ctx), name))
        return
    begin = time.perf_counter()
    report = aot.compile(cfg, args.target)
    print(f"compiled for {args.target} in {time.perf_counter() - begin:.0f} s")
    print(report)


def resolve_for_target(
    args: Namespace, such: str = "a chip and a topology, such as --target a100:8 or h100:8x8"
) -> Config:
    """Returns the resolved configuration of a command that plans for chips which are not here.

    JAX must not be imported before: it will see the CPU alone.

    Args:
      such: what to name with `--target`.

    Raises:
      ConfigError: the target or the size of the vocabulary is missing.
    """
    if not args.target:
        raise ConfigError(f"--target is missing. Name {such}.")
    cfg = with_vocabulary(args.cfg)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    return cfg


def with_vocabulary(cfg: Config) -> Config:
    """Returns the resolved configuration, with sizes of vocabulary and pictures that the configuration gives.

    What it leaves open is read from data that Python packages have on this machine. No other data is read.

    Raises:
      ConfigError: the size of the vocabulary is missing, or the package is not installed.
    """
    missing = cfg.model.vocab_size is None or (cfg.model.pictures is not None and not cfg.model.pictures.image)
    if missing and (cfg.data.source == "digits" or (cfg.data.path or "").startswith("package:")):
        from jaxstack.data.dataset import resolve_from_data

        return resolve_from_data(cfg)
    if cfg.model.vocab_size is None and cfg.data.source == "stdlib" and cfg.data.tokenizer == "bytes":
        return resolve(cfg, BYTES)
    if cfg.model.vocab_size is None:
        raise ConfigError("model.vocab_size is missing, and no data is read here. Set --model.vocab_size=...")
    return resolve(cfg, None)
