"""Trains a model and writes everything to run.dir. The same command resumes an interrupted run."""

from pathlib import Path

from jsonargparse import Namespace

from jaxstack.config import SEARCHED_KEYS, ConfigError
from jaxstack.config.reading.parse import Parser, given_keys
from jaxstack.config.reading.shipped import first_command
from jaxstack.posttrain.tasks import is_task


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    parser.add_config(auto_mesh=True)
    parser.add_argument("--print_shardings", action="store_true", help="print how parameters are sharded, and exit")
    parser.add_argument("--preflight", action="store_true", help="check all machines, and exit")


def main(args: Namespace) -> None:
    """Trains, checks the machines, or prints the shardings.

    Raises:
      ConfigError: the run cannot start. If it needs a file that does not exist, it names the command of `--config` that
        comes first.
    """
    try:
        _train(args)
    except ConfigError as error:
        paths = [path for path in (args.cfg.run.init_from, args.cfg.data.path) if path and not is_task(path)]
        is_missing = any(not Path(path).exists() for path in paths)
        if is_missing and not error.advice and (first := first_command(args.files)):
            raise ConfigError(str(error), f"First: {first}") from None
        raise


def _train(args: Namespace) -> None:
    from jaxstack import start, train  # here: help and errors need not wait for it

    searched = given_keys(args.words, SEARCHED_KEYS) if args.auto_mesh else None
    if args.print_shardings:
        start.show(args.cfg, searched)
    else:
        train.main(args.cfg, searched, args.preflight)
