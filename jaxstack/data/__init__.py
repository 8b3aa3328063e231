"""Reads text and makes tokens, windows and batches, with NumPy and grain, without JAX.

`load(cfg.data)` returns the tokenizer, the training text and the held-out text. `batches` and `eval_batches` cut them
into batches.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from jaxstack.config import ConfigError, DataConfig
from jaxstack.data import chat, sources
from jaxstack.data.sources import Document, documents
from jaxstack.data.tokenizers import Tokenizer, make_tokenizer, same_vocabulary, tokenizer_from_json
from jaxstack.data.tokens import Tokens, assign_domains, encode, read_header, read_token_file, split, write_token_file
from jaxstack.data.windows import Batch, batches, describe_batch, eval_batches, prefetch

__all__ = [
    "Batch",
    "Dataset",
    "Document",
    "Tokenizer",
    "Tokens",
    "assign_domains",
    "batches",
    "describe_batch",
    "documents",
    "encode",
    "eval_batches",
    "load",
    "make_tokenizer",
    "prefetch",
    "read_token_file",
    "same_vocabulary",
    "split",
    "tokenizer_from_json",
    "write_token_file",
]


@dataclass(frozen=True)
class Dataset:
    """The training text and the held-out text of a run."""

    tokenizer: Tokenizer
    train: Tokens
    eval: Tokens
    description: str
    """For users: `Python 3.11 standard library: 1,021 files, 11.4 MB train, 1.2 MB held out`."""
    fingerprint: str
    """SHA-256 of all ids. It identifies the text and the tokenizer."""


def load(cfg: DataConfig) -> Dataset:
    """Returns the tokens of a configuration's source, with a part of them held out.

    Text is encoded in memory; a token file stays on disk. A token file determines its own tokenizer.

    Raises:
      ConfigError: there is no text to read, a file is not text, or a token file is damaged.
    """
    if cfg.source == "tokens":
        tokens, tokenizer = read_token_file(str(cfg.path))
        fingerprint = read_header(str(cfg.path)).sha256["bin"]
        if cfg.tokenizer != DataConfig.tokenizer and not _is_named(tokenizer, cfg.tokenizer):
            raise ConfigError(
                f"data.tokenizer={cfg.tokenizer}, but data.path={cfg.path} was made with {tokenizer.name}. Build the "
                f"file again with `jaxstack data build --data.tokenizer={cfg.tokenizer}`, or use "
                f"--data.tokenizer={tokenizer.name}."
            )
    elif cfg.source == "chat":
        return _load_chat(cfg)
    else:
        tokenizer = make_tokenizer(cfg.tokenizer, (d.text for d in documents(cfg)))
        tokens = encode(documents(cfg), tokenizer)
        fingerprint = hashlib.sha256(tokens.ids.data).hexdigest()
        if cfg.domains:
            tokens = assign_domains(tokens, cfg.domains)
    train, held_out = split(tokens, cfg.eval_fraction)
    kind = "file" if cfg.source in ("stdlib", "path") else "document"
    count = f"{tokens.starts.size:,} {kind}{'s' * (tokens.starts.size != 1)}"
    sizes = f"{_format_size(train, tokenizer)} train, {_format_size(held_out, tokenizer)} held out"
    name = str(cfg.path) if cfg.source == "tokens" else sources.describe(cfg)
    return Dataset(tokenizer, train, held_out, f"{name}: {count}, {sizes}", fingerprint)


def _is_named(tokenizer: Tokenizer, name: str) -> bool:
    """Returns whether `data.tokenizer` names a tokenizer, or a file with the same vocabulary in another place."""
    if name == tokenizer.name:
        return True
    return Path(name).is_file() and same_vocabulary(make_tokenizer(name, ()).to_json(), tokenizer.to_json())


def _load_chat(cfg: DataConfig) -> Dataset:
    """Returns conversations. Only their answers are targets of the loss."""
    saved = chat.read_template(cfg.tokenizer)
    template = (
        chat.PlainTemplate() if saved is None else chat.JinjaTemplate(f"the chat template of {cfg.tokenizer}", saved)
    )
    rendered = [*chat.render_conversations(chat.read_conversations(str(cfg.path)), template)]
    tokenizer = make_tokenizer(cfg.tokenizer, (one.text for one in rendered), saved)
    tokens, note = chat.encode_conversations(rendered, tokenizer, cfg.seq_len)
    assert tokens.loss_mask is not None
    fingerprint = hashlib.sha256(tokens.ids.tobytes() + tokens.loss_mask.tobytes()).hexdigest()
    train, held_out = split(tokens, cfg.eval_fraction)
    parts = [
        f"{tokens.starts.size:,} conversations",
        *([note] if note else []),
        f"{_format_size(train, tokenizer)} train, {_format_size(held_out, tokenizer)} held out",
        f"{tokens.loss_mask.mean():.0%} of the tokens in answers",
    ]
    return Dataset(tokenizer, train, held_out, f"{cfg.path}: {', '.join(parts)}", fingerprint)


def _format_size(tokens: Tokens, tokenizer: Tokenizer) -> str:
    """Returns the size of a text in bytes or tokens, for users."""
    count = len(tokens)
    if tokenizer.name == "bytes":
        return f"{count / 1e6:,.1f} MB" if count >= 100_000 else f"{count:,} bytes"
    return f"{count / 1e6:,.1f} M tokens" if count >= 1_000_000 else f"{count:,} tokens"
