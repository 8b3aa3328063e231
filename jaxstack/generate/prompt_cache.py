"""Prompt caching: the KV caches of prompts that were read recently, so that a prompt reads only what is new in it."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxstack.common.tree import PyTree
from jaxstack.config import ModelConfig
from jaxstack.generate.prompts import BUCKET


@dataclass(frozen=True, eq=False)
class _Entry:
    tokens: np.ndarray
    cache: PyTree
    bytes: int


class PromptCache:
    """The KV caches of prompts, up to a limit of memory; the least recently used cache is dropped first.

    In a cache, token i of the prompt has slot i. With full attention, each beginning of a prompt can be used. A layer
    with a sliding window has dropped the tokens before its window, so a longer prompt must be used as a whole. A state
    belongs to the whole prompt, which must then be used as a whole, too.

    Attributes:
      bytes: memory of the caches.
    """

    def __init__(self, cfg: ModelConfig, limit: int) -> None:
        """Makes an empty cache.

        Args:
          limit: largest number of bytes.
        """
        windows = [1] if cfg.states_key else [window for window in cfg.windows if window]
        self.bytes = 0
        self._limit = limit
        self._window = min(windows, default=None)
        self._entries: list[_Entry] = []  # the newest is the last

    def longest_prefix(self, tokens: Sequence[int]) -> tuple[int, PyTree]:
        """Returns how many tokens of a prompt need not be read, and the cache that has them, or 0 and `None`.

        The last token is always read, because its logits choose the next one. A prefix that does not save a whole
        bucket does not count: padding would take its place.
        """
        prompt = np.asarray(tokens)
        most = 0
        entry = None
        for one in self._entries:
            common = _common(one.tokens, prompt[:-1])
            whole = self._window is None or common == one.tokens.size or one.tokens.size < self._window
            if common > most and whole:
                most = common
                entry = one
        if entry is None or _buckets(prompt.size - most) == _buckets(prompt.size):
            return 0, None
        self._entries.remove(entry)
        self._entries.append(entry)
        return most, entry.cache

    def store(self, tokens: Sequence[int], cache: PyTree) -> None:
        """Keeps the cache of a prompt, and drops other caches if there is no room for them."""
        new = _Entry(np.asarray(tokens), cache, sum(a.nbytes for a in jax.tree.leaves(cache)))
        for one in [*self._entries]:
            common = _common(one.tokens, new.tokens)
            if common == new.tokens.size and (self._window is None or common == one.tokens.size):
                return  # what is kept serves this prompt, too
            if common == one.tokens.size and self._window is None:
                self._drop(one)
        self._entries.append(new)
        self.bytes += new.bytes
        while self.bytes > self._limit:
            self._drop(self._entries[0])

    def _drop(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        self.bytes -= entry.bytes


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Returns the number of tokens with which both begin."""
    length = min(a.size, b.size)
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if differ.size else length


def _buckets(tokens: int) -> int:
    return -(-tokens // BUCKET)
