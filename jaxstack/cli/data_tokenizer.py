"""Makes a tokenizer for your own text: the folder OUT with a tokenizer.json, which `data.tokenizer` reads."""

import json
import os
from itertools import chain
from pathlib import Path
from typing import Literal

from jsonargparse import Namespace

from jaxstack.cli.data_build import counted, progress_of_documents
from jaxstack.common import files
from jaxstack.common.counts import plural
from jaxstack.config import ConfigError, DataConfig
from jaxstack.config.bounds import PositiveInt
from jaxstack.config.reading.parse import Parser, user_path
from jaxstack.data import bpe
from jaxstack.data.sources import describe_skipped, documents
from jaxstack.data.text_pieces import grouped
from jaxstack.data.tokenizers import HFTokenizer


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    parser.usage = "%(prog)s [TEXT ...] OUT [options] [--GROUP.KEY=VALUE ...]"
    add_texts(parser)
    parser.add_argument("out", metavar="OUT", type=user_path, help="folder to write")
    parser.add_argument("--vocab_size", type=PositiveInt, default=8192, help="number of tokens")
    parser.add_argument(
        "--special_tokens",
        type=list[str],
        default=[bpe.END_OF_TEXT],
        help="special tokens, each a single token wherever a text spells it; the first one ends a document",
    )
    parser.add_argument("--chat", action="store_true", help="add a chat template, and the special tokens of its turns")
    add_source_keys(parser)


def add_texts(parser: Parser) -> None:
    """Declares the texts to read."""
    parser.add_argument(
        "texts",
        metavar="TEXT",
        nargs="*",
        type=user_path,
        help="files or folders of text, as for data.path; give none for stdlib",
    )


def add_source_keys(parser: Parser) -> None:
    """Declares the keys that say how texts are read."""
    keys = DataConfig()
    parser.add_argument(
        "--data.source", type=Literal["path", "stdlib", "hf"], default="path", help="where text comes from"
    )
    parser.add_argument("--data.glob", type=str | None, default=keys.glob, help="which files of a folder to read")
    parser.add_argument("--data.skip", type=bool, default=keys.skip, help="skip files that are not UTF-8 text")
    parser.add_argument("--data.hf_split", type=str, default=keys.hf_split, help="split of a Hugging Face dataset")
    parser.add_argument("--data.hf_column", type=str, default=keys.hf_column, help="column of a Hugging Face dataset")


def main(args: Namespace) -> None:
    """Writes the folder, and prints how long a token is.

    Raises:
      ConfigError: there is no text, it cannot be read, or the folder exists.
    """
    folder = Path(args.out)
    sources = text_sources(args, folder)
    if folder.exists():
        raise ConfigError(f"{folder} exists and is never overwritten. Name another folder.")
    special = args.special_tokens
    if args.chat:
        special = [*special, *(token for token in bpe.CHAT_TOKENS if token not in special)]
    skipped: list[str] = []
    with progress_of_documents() as progress:
        read = counted(chain.from_iterable(documents(cfg, skipped) for cfg in sources), progress, "reading")
        content = bpe.train_bpe((document.text for document in read), args.vocab_size, special)
    tokenizer = HFTokenizer(str(folder / "tokenizer.json"), content)
    sample = next(grouped((document.text for cfg in sources for document in documents(cfg)), str))
    size = sum(len(text.encode()) for text in sample)
    count = sum(ids.size for ids in tokenizer.encode_batch(sample))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special[0]}
    with files.scratch_folder(folder) as scratch:
        (scratch / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", "utf-8")
        (scratch / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False) + "\n", "utf-8")
        if args.chat:
            (scratch / "chat_template.jinja").write_text(bpe.CHAT_TEMPLATE, "utf-8")
        os.replace(scratch, folder)
    print(
        f"{folder}: {plural(tokenizer.vocab_size, 'token', spec=',')}, {size / count:.2f} bytes per token of the first "
        f"{plural(size, 'byte', spec=',')}"
    )
    if tokenizer.vocab_size < args.vocab_size:
        print(f"The text has no more parts of words, so there are fewer tokens than --vocab_size={args.vocab_size}.")
    if skipped:
        print(describe_skipped(sources[0], skipped))
    print(f"jaxstack train --data.tokenizer={folder / 'tokenizer.json'} ...")


def text_sources(args: Namespace, folder: Path) -> list[DataConfig]:
    """Returns the sources of the texts that a command line names.

    Raises:
      ConfigError: a text is missing, or the source has none.
    """
    return [DataConfig(path=path, **vars(args.data)) for path in _paths(args.data.source, args.texts, folder)]


def _paths(source: str, texts: list[str], folder: Path) -> list[str | None]:
    """Returns `data.path` of each source.

    Raises:
      ConfigError: a text is missing, or the source has none.
    """
    if source == "stdlib":
        if texts:
            raise ConfigError(f"data.source=stdlib reads no files, but {texts[0]} is named. Name only the folder OUT.")
        return [None]
    if not texts:
        raise ConfigError(f"{folder} is the folder to write, and no text is named. Name a text or a folder before it.")
    for path in texts if source == "path" else ():
        if not Path(path).exists():
            raise ConfigError(f"{path} does not exist. Name a text file or a folder of text files.")
    return [*texts]
