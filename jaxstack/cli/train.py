"""Trains a model and writes everything to run.dir. The same command resumes an interrupted run."""

from jsonargparse import Namespace

from jaxstack.config import SEARCHED_KEYS
from jaxstack.config.reading.parse import Parser, given_keys


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    parser.add_config(auto_mesh=True)
    parser.add_argument("--print_shardings", action="store_true", help="print how parameters are sharded, and exit")
    parser.add_argument("--preflight", action="store_true", help="check all machines, and exit")


def main(args: Namespace) -> None:
    """Trains, checks the machines, or prints the shardings."""
    from jaxstack import start, train  # here: help and errors need not wait for it

    searched = given_keys(args.words, SEARCHED_KEYS) if args.auto_mesh else None
    if args.print_shardings:
        start.show(args.cfg, searched)
    else:
        train.main(args.cfg, searched, args.preflight)
