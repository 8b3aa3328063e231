"""Makes a token file from a data source: OUT.bin, OUT.starts.npy and OUT.json."""

from collections.abc import Iterable, Iterator

from jsonargparse import Namespace
from rich import get_console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from jaxstack.common.counts import plural
from jaxstack.config import ConfigError, DataConfig
from jaxstack.config.reading.parse import Parser, user_path
from jaxstack.data.sources import Document, describe, describe_skipped, documents
from jaxstack.data.tokenizers import make_tokenizer
from jaxstack.data.tokens import TokenFileHeader, write_token_file

_CHOSEN_IN_TRAINING = {
    "seq_len", "batch_size", "packing", "eval_fraction", "mixture", "mixture_changes", "format", "vocab_size",
    "buckets", "max_padding", "max_documents",
}  # fmt: skip


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    parser.add_argument("out", metavar="OUT", type=user_path, help="name of the token file; its folder must exist")
    parser.add_class_arguments(DataConfig, "data", skip=_CHOSEN_IN_TRAINING)


def main(args: Namespace) -> None:
    """Writes the token file, in two passes over the source: one for the alphabet, one for the tokens.

    Raises:
      ConfigError: the source cannot be a token file, or cannot be read.
    """
    cfg = args.data
    out = args.out
    if cfg.source == "tokens":
        raise ConfigError("data.source=tokens is already a token file. Build from stdlib, path or hf.")
    if what := {
        "chat": "answers",
        "labels": "labels",
        "pairs": "translations",
        "preferences": "pairs of completions",
        "prompts": "prompts whose completions are rewarded",
        "triples": "triples",
    }.get(cfg.source):
        raise ConfigError(
            f"data.source={cfg.source} cannot become a token file, which does not mark {what}. Train from it directly."
        )
    with progress_of_documents() as progress:
        alphabet = counted(documents(cfg), progress, "reading the alphabet")
        tokenizer = make_tokenizer(cfg.tokenizer, (d.text for d in alphabet), None, cfg.special_tokens)
        skipped: list[str] = []
        header = write_token_file(out, counted(documents(cfg, skipped), progress, "writing tokens"), tokenizer)
    print(f"{describe(cfg)} -> {out}: {summary(header)}")
    if skipped:
        print(describe_skipped(cfg, skipped))
    print(f"jaxstack train --data.source=tokens --data.path={out}")


def progress_of_documents() -> Progress:
    """Returns the line that shows on a terminal how many documents `counted` has yielded."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, disable=not get_console().is_interactive)


def counted(source: Iterable[Document], progress: Progress, verb: str) -> Iterator[Document]:
    """Yields the documents and shows their number, from the first one on."""
    task = None
    size = 0
    for n, document in enumerate(source, start=1):
        if task is None:
            task = progress.add_task(verb, total=None)
        size += len(document.text)
        progress.update(task, description=f"{verb}: {plural(n, 'document', spec=',')}, {size / 1e6:,.1f} M characters")
        yield document


def summary(header: TokenFileHeader) -> str:
    """Returns the number of documents and tokens of a token file, and its bytes per token."""
    per_token = header.bytes / header.count
    documents = plural(header.documents, "document", spec=",")
    return f"{documents}, {plural(header.count, 'token', spec=',')}, {per_token:.2f} bytes per token"
