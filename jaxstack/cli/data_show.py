"""Prints what a token file contains, and how its first document begins."""

from jsonargparse import Namespace

from jaxstack.cli.data_build import summary
from jaxstack.common.counts import plural
from jaxstack.config.reading.parse import Parser, user_path
from jaxstack.data.tokens import read_header, read_token_file


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    parser.add_argument("file", metavar="FILE", type=user_path, help="name of the token file")


def main(args: Namespace) -> None:
    """Prints the contents of the file.

    Raises:
      ConfigError: there is no such token file.
    """
    header = read_header(args.file)
    tokens, tokenizer = read_token_file(args.file)
    print(f"{args.file}: {summary(header)}")
    print(f"{header.dtype}, tokenizer {tokenizer.name} with {plural(tokenizer.vocab_size, 'token', spec=',')}")
    print(f"begins: {tokenizer.decode(tokens.ids[: min(64, int(tokens.ends[0]))])!r}")
