"""Cuts long texts into pieces that together give the ids of the whole text, and groups texts for one call.

A tokenizer.json encodes a text in one thread and needs some 150 bytes of memory for each character. Pieces are encoded
on all cores, a bounded number of characters at a time.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

Item = TypeVar("Item")

_PIECE = 1 << 15  # characters, some 20 ms of one core
_GROUP = 1 << 23  # characters of one call, for which the library needs 1 GB

_CUT = re.compile(r"(?<=[^\W_])(?=[\r\n])")

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_SPLITS = {
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2 of tiktoken
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
    _CONTRACTIONS + _LETTERS + r"\p{N}{1,3}" + _OTHERS,  # GPT-4 and Llama 3
    _CONTRACTIONS + _LETTERS + r"\p{N}" + _OTHERS,  # Qwen 2 and 3
    f"{_WORD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_WORD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",  # GPT-4o
}
"""Patterns that always begin a new word at a line end behind a letter or a digit, whatever the rest of the text is."""


def can_cut(tokenizer: dict[str, Any]) -> bool:
    """Returns whether the pieces of a text have the same ids as the text, for a tokenizer.json.

    A pattern in `_SPLITS` must make its words, and nothing may depend on the place of a word in the text.
    """
    steps = tokenizer.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", []) if steps.get("type") == "Sequence" else [steps]
    last = steps[-1] if steps else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return False
    splits = [_pattern(step) for step in steps[:-1] if step.get("type") != "Digits"]
    knows_words = splits == [] if last.get("use_regex", True) else len(splits) == 1 and splits[0] in _SPLITS
    normalizer = tokenizer.get("normalizer") or {}
    return (
        knows_words
        and normalizer.get("type") in (None, "NFC")
        and not any(map(_sees_around, tokenizer.get("added_tokens") or []))
    )


def _pattern(step: dict[str, Any]) -> str | None:
    """Returns the regular expression whose matches a step of a pre-tokenizer separates, or `None` for other steps."""
    separates = step.get("type") == "Split" and step.get("behavior") == "Isolated" and not step.get("invert")
    return step["pattern"].get("Regex") if separates else None


def _sees_around(added: dict[str, Any]) -> bool:
    """Returns whether an added token may contain a line end, or depends on the characters around it."""
    flags = ("lstrip", "rstrip", "single_word")
    return bool(re.search(r"[\r\n]", added["content"])) or any(added.get(flag) for flag in flags)


def pieces(text: str) -> Iterator[str]:
    """Yields a text in pieces that end before a line end behind a letter or a digit."""
    start = 0
    while len(text) - start > _PIECE and (cut := _CUT.search(text, start + _PIECE)):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def grouped(items: Iterable[Item], text_of: Callable[[Item], str]) -> Iterator[list[Item]]:
    """Yields the items in lists whose texts have about 8 million characters, in order."""
    group: list[Item] = []
    size = 0
    for item in items:
        group.append(item)
        size += len(text_of(item))
        if size >= _GROUP:
            yield group
            group = []
            size = 0
    if group:
        yield group
