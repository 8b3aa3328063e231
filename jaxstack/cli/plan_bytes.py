"""Compiles the training step for a chip that is not here, and prints the bytes and FLOPs of each part of the program.

The program is read after the compiler has optimised it. It takes the configuration of `jaxstack train`.
"""

import json
import os
from pathlib import Path

from jsonargparse import Namespace

from jaxstack.cli.plan import resolve_for_target
from jaxstack.config import ConfigError
from jaxstack.config.reading.parse import Parser, user_path


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    parser.add_argument(
        "--target", type=str, help="GPU and topology, such as h100:1x1x8 (required)", metavar="CHIP:TOPOLOGY"
    )
    parser.add_argument("--largest", type=int, default=10, help="number of operations to list", metavar="N")
    parser.add_argument("--json", type=user_path, help="file to write with every operation and loop", metavar="FILE")
    parser.add_config()


def main(args: Namespace) -> None:
    """Compiles, prints the tables and writes the file that is asked for.

    Raises:
      ConfigError: the target is unknown or no GPU, its compiler is not installed, or the configuration does not fit it.
    """
    cfg = resolve_for_target(args, "a GPU and a topology, such as --target h100:1x1x8")
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # its keys ignore the scopes that decide the parts

    from jaxstack.common.hardware import CHIPS
    from jaxstack.planner import aot, step_bytes

    chip, _ = aot.parse_target(args.target)
    if CHIPS[chip].platform == "tpu":
        raise ConfigError(
            f"--target={args.target} is a TPU, whose programs do not show what is kept on the chip. "
            f"Name a GPU, such as --target h100:1x1x8, or use `jaxstack plan --target {args.target}`."
        )
    compiled = aot.compile(cfg, args.target)
    program = step_bytes.read_program(str(compiled.compiled.as_text()), compiled.trip_counts)
    print(f"{args.target}: {(compiled.arguments + compiled.temporary) / 2**30:.2f} GiB on a device")
    print(step_bytes.format_program(program, CHIPS[chip].hbm_bandwidth, args.largest))
    if args.json:
        Path(args.json).write_text(json.dumps(step_bytes.as_json(program), indent=1) + "\n", encoding="utf-8")
        print(f"wrote {args.json}")
