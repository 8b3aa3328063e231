"""Token files on the command line.

    jaxstack data build --data.source=path --data.path=TEXT --data.tokenizer=gpt2/tokenizer.json OUT
    jaxstack data verify OUT
    jaxstack data show OUT

A user's mistake is one line on stderr and exit code 2.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

from jsonargparse import ArgumentParser, set_parsing_settings
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from jaxstack.common import errors
from jaxstack.config import ConfigError, DataConfig
from jaxstack.data.sources import Document, describe, documents
from jaxstack.data.tokenizers import make_tokenizer
from jaxstack.data.tokens import TokenFileHeader, read_header, read_token_file, verify_token_file, write_token_file

_NOT_IN_THE_FILE = {"seq_len", "batch_size", "packing", "eval_fraction"}  # chosen when training, not when building


class _Parser(ArgumentParser):
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        text = " ".join(line.strip(" -") for line in message.splitlines() if line.strip())
        raise ConfigError(f"{text}; `{errors.program} --help` lists the commands")


def build(out: str, cfg: DataConfig) -> None:
    """Streams a source into the token file OUT.bin, OUT.starts.npy and OUT.json."""
    if cfg.source == "tokens":
        raise ConfigError("data.source=tokens is a token file already; build from stdlib, path or hf")
    if cfg.source == "chat":
        raise ConfigError("data.source=chat needs no token file, which could not say what is an answer; train from it")
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()) as progress:
        alphabet = _counted(documents(cfg), progress, "reading the alphabet")
        tokenizer = make_tokenizer(cfg.tokenizer, (d.text for d in alphabet))
        header = write_token_file(out, _counted(documents(cfg), progress, "writing tokens"), tokenizer)
    print(f"{describe(cfg)} -> {out}: {_summary(header)}")
    print(f"jaxstack train --data.source=tokens --data.path={out}")


def _counted(source: Iterable[Document], progress: Progress, verb: str) -> Iterator[Document]:
    """The same documents, with a line that counts them; the line appears at the first one."""
    task, size = None, 0
    for n, document in enumerate(source, start=1):
        if task is None:
            task = progress.add_task(verb, total=None)
        size += len(document.text)
        progress.update(task, description=f"{verb}: {n:,} documents, {size / 1e6:,.1f} M characters")
        yield document


def verify(file: str) -> None:
    """Reads a whole token file; compares hashes and ids with its header."""
    print(f"{file} is whole: {_summary(verify_token_file(file))}")


def show(file: str) -> None:
    """Prints what a token file holds, and how its first document begins."""
    header = read_header(file)
    tokens, tokenizer = read_token_file(file)
    print(f"{file}: {_summary(header)}")
    print(f"{header.dtype}, tokenizer {tokenizer.name} with {tokenizer.vocab_size:,} tokens")
    print(f"begins: {tokenizer.decode(tokens.ids[: min(64, int(tokens.ends[0]))])!r}")


def _summary(header: TokenFileHeader) -> str:
    per_token = header.bytes / header.count
    return f"{header.documents:,} documents, {header.count:,} tokens, {per_token:.2f} bytes per token"


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line and runs one command.

    Raises:
      ConfigError: the user's mistake, in one line.
    """
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = _Parser(prog=errors.program, description="Makes and checks token files.", allow_abbrev=False)
    commands = parser.add_subcommands(dest="command")
    builder = _Parser(description=build.__doc__, allow_abbrev=False)
    builder.add_class_arguments(DataConfig, "data", skip=_NOT_IN_THE_FILE)
    builder.add_argument("out", type=str, help="name of the token file; its folder must exist")
    commands.add_subcommand("build", builder, help=build.__doc__)
    for command in (verify, show):
        reader = _Parser(description=command.__doc__, allow_abbrev=False)
        reader.add_argument("file", type=str, help="name of the token file")
        commands.add_subcommand(command.__name__, reader, help=command.__doc__)
    parsed = parser.parse_args(argv)
    options = parser.instantiate(parsed)[parsed.command]
    match parsed.command:
        case "build":
            build(options.out, options.data)
        case "verify":
            verify(options.file)
        case "show":
            show(options.file)
