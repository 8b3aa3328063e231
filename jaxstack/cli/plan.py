"""Compiles the training step for chips that are not here, and prints memory per device and bytes moved per mesh axis.

Both are shown beside a formula. The configuration is that of `jaxstack train`.
"""

import os
import time

from jsonargparse import Namespace

from jaxstack.config import Config, ConfigError, resolve
from jaxstack.config.parse import Parser


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    parser.add_argument(
        "--target",
        type=str,
        help="chip and topology, such as v5e:4x4 or h100:1x8x8 (required)",
        metavar="CHIP:TOPOLOGY",
    )
    parser.add_config()


def main(args: Namespace) -> None:
    """Compiles, and prints the report.

    Raises:
      ConfigError: the target is unknown, its compiler is not installed, or the configuration does not fit it.
    """
    if not args.target:
        raise ConfigError("--target is missing. Name a chip and a topology, such as --target v5e:4x4 or h100:1x8x8.")
    cfg = with_vocabulary(args.cfg)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX is imported: the target's chips are not here

    from jaxstack.planner import aot

    begin = time.perf_counter()
    try:
        report = aot.compile(cfg, args.target)
    except aot.Unavailable as error:
        raise ConfigError(str(error)) from error
    print(f"compiled for {args.target} in {time.perf_counter() - begin:.0f} s")
    print(report)


def with_vocabulary(cfg: Config) -> Config:
    """Returns the resolved configuration of a model whose vocabulary is given, since no data is read here.

    Raises:
      ConfigError: the size of the vocabulary is missing.
    """
    if cfg.model.vocab_size is None:
        raise ConfigError("model.vocab_size is missing, and no data is read here. Set --model.vocab_size=...")
    return resolve(cfg, cfg.model.vocab_size)
