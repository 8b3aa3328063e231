"""Reads which tokens end a text from the files beside a tokenizer.json, as `transformers` does.

| file | key | what it says |
|---|---|---|
| `tokenizer_config.json`, else `special_tokens_map.json` | `eos_token` | the token that ends a document |
| `generation_config.json`, else `config.json` | `eos_token_id` | the ids that end a generated text: one, or a list |
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxstack.common import files
from jaxstack.config import ConfigError


class TextEnds(NamedTuple):
    """The tokens that end a text.

    Attributes:
      eos: the id that ends a document. `None` means that the tokenizer has none.
      stop: all ids that end a generated text, with `eos`.
    """

    eos: int | None
    stop: tuple[int, ...]


def read_text_ends(folder: Path, find: Callable[[str], int | None], vocab_size: int, usual: int | None) -> TextEnds:
    """Returns the tokens that end a text.

    Ids that the tokenizer does not have are left out: a model never generates them.

    Args:
      folder: the folder of the tokenizer.json.
      find: returns the id of a token, or `None`.
      vocab_size: a bound of the ids.
      usual: the end of a document if the files do not name it.

    Raises:
      ConfigError: a file is damaged, or the tokenizer does not have the token.
    """
    listed = next((ids for name in _ID_FILES if (ids := _listed(folder / name)) is not None), [])
    stop = [i for i in listed if i < vocab_size]
    eos = next((i for name in _TOKEN_FILES if (i := _named(folder / name, find)) is not None), None)
    if eos is None:
        eos = usual if not stop or usual in stop else stop[0]
    return TextEnds(eos, tuple(dict.fromkeys([*([] if eos is None else [eos]), *stop])))


_TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_ID_FILES = ("generation_config.json", "config.json")


def _named(file: Path, find: Callable[[str], int | None]) -> int | None:
    """Returns the id of the `eos_token` in a file, or `None` if the file does not name one."""
    token = _read(file).get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return None
    found = find(token) if isinstance(token, str) else None
    if found is None:
        raise ConfigError(
            f"{file} has eos_token={str(token)[:60]!r}, which is not a token of the tokenizer.json beside it. Use the "
            f"files of the same model."
        )
    return found


def _listed(file: Path) -> list[int] | None:
    """Returns `eos_token_id` of a file as a list, or `None` if the file does not have it."""
    value = _read(file).get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not all(type(i) is int for i in ids):
        raise ConfigError(
            f"{file} has eos_token_id={str(value)[:60]}, which is neither an id nor a list of ids. Correct it."
        )
    return [i for i in ids if i >= 0]  # some files write -1 for none


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    content = files.read_json(file, "Use the model's own file.")
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is not a JSON object. Use the model's own file.")
    return content
