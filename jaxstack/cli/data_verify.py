"""Reads a whole token file and compares its hashes and token ids with its header."""

from jsonargparse import Namespace

from jaxstack.cli.data_build import summary
from jaxstack.config.reading.parse import Parser, user_path
from jaxstack.data.tokens import verify_token_file


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    parser.add_argument("file", metavar="FILE", type=user_path, help="name of the token file")


def main(args: Namespace) -> None:
    """Prints that the file is intact.

    Raises:
      ConfigError: the file is damaged.
    """
    print(f"{args.file} is intact: {summary(verify_token_file(args.file))}")
