"""A text as pieces of an array of ids, which windows are cut from. Suffixes: B batch, T tokens read, P pieces.

`TokenStream` keeps the place of each piece in memory. `ShuffledStream` keeps one number for each block of documents,
and makes the places within a block when a window is read there.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jaxstack.data.file_ids import Ids
from jaxstack.data.tokens import Tokens

BLOCK = 8192
"""Documents that are shuffled in memory. A row reads the places of one block or two, which takes about a millisecond.

A text with more documents is shuffled twice: its blocks, and the documents within each block.
"""


class Pieces(NamedTuple):
    """The pieces that have some tokens of a stream; all arrays have the shape of these tokens."""

    number: np.ndarray
    """Number of the piece, ascending along the stream."""
    begins: np.ndarray
    """Offset of the piece in the stream."""
    start: np.ndarray
    """Start of the piece in the ids."""


class Stream(ABC):
    """Pieces of `ids`, concatenated without a copy and readable from any offset.

    Attributes:
      ids: the ids.
      loss_mask: whether each id of `ids` is a target of the loss. `None` means all.
      labels: index of the label of each id of `ids`, or -1. `None` means that tokens are the targets.
      parts: which part of its text with a triple each id of `ids` is in. `None` without triples.
    """

    ids: Ids
    loss_mask: np.ndarray | None
    labels: np.ndarray | None
    parts: np.ndarray | None

    @property
    def predicts_next(self) -> bool:
        """Whether the target of a token is the next one, so that the last token of a row is only a target."""
        return self.labels is None and self.parts is None

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of pieces; empty ones may count, too."""

    @property
    @abstractmethod
    def has_domains(self) -> bool:
        """Whether each piece has a domain."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def find(self, at: np.ndarray) -> Pieces:
        """Returns the pieces with these offsets of the stream."""

    @abstractmethod
    def domains(self, number: np.ndarray) -> np.ndarray:
        """Returns the domains of pieces, int32."""

    @abstractmethod
    def table(self, at: int) -> "tuple[TokenStream, int]":
        """Returns the places of the pieces around an offset, and the offset of the first of them."""

    def locate(self, first_B: np.ndarray, length: int, wrap: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Locates `length` tokens from each offset of the stream.

        Args:
          first_B: offset of the first token of each row.
          wrap: whether the first token of the stream follows the last one, where a new piece begins. Otherwise the last
            token is repeated.

        Returns:
          For each token [B, T]: its index in `ids`; its piece, numbered on in the second time around; and its
          position within the part of that piece that is in the row.
        """
        at_BT = first_B[:, None] + np.arange(length)
        if not wrap:
            at_BT = np.minimum(at_BT, len(self) - 1)
        turns_BT, place_BT = np.divmod(at_BT, len(self))
        piece_BT, begins_BT, start_BT = self.find(place_BT)
        begins_BT = begins_BT + turns_BT * len(self)
        index_BT = start_BT + at_BT - begins_BT
        position_BT = at_BT - np.maximum(begins_BT, first_B[:, None])
        return index_BT, piece_BT + turns_BT * self.count, position_BT

    def pieces(self, at: np.ndarray) -> np.ndarray:
        """Returns the piece of each offset of the stream."""
        return self.find(at).number

    def ids_at(self, at: np.ndarray) -> np.ndarray:
        """Returns the id at each offset of the stream."""
        _, begins, start = self.find(at)
        return self.ids[start + at - begins]


@dataclass(frozen=True)
class TokenStream(Stream):
    """A stream that keeps the place of each piece in memory."""

    ids: Ids
    starts_P: np.ndarray
    """Start of each piece in `ids`, int64."""
    bounds_P: np.ndarray
    """Start of each piece in the stream, then the length of the stream, int64 [P + 1]."""
    domains_P: np.ndarray | None = None
    """Domain of each piece, int32. `None` if documents have no domain."""
    loss_mask: np.ndarray | None = None
    labels: np.ndarray | None = None
    parts: np.ndarray | None = None

    @classmethod
    def from_documents(cls, tokens: Tokens, order: np.ndarray | None = None) -> "TokenStream":
        """Returns the documents in the order of these indices [documents]. `None` keeps their order."""
        tokens = replace(tokens, names=None)  # there may be millions, and a stream does not need them
        if order is not None:
            tokens = tokens.documents(order)
        tokens = tokens.documents(tokens.sizes() > 0)
        bounds = np.append(np.int64(0), np.cumsum(tokens.sizes()))
        each = tokens.domains, tokens.loss_mask, tokens.labels, tokens.parts
        return cls(tokens.ids, tokens.starts[:], bounds, *each)

    @classmethod
    def merged(cls, tokens: Tokens) -> "TokenStream":
        """Returns the documents in their order, the adjacent ones as one piece: an uncut text is a single piece.

        Documents that have domains are not merged.
        """
        if tokens.domains is not None:
            return cls.from_documents(tokens)

        def runs(chunk: slice) -> tuple[np.ndarray, np.ndarray]:
            return _runs(tokens.starts[chunk], tokens.ends[chunk])

        starts, ends = zip(*tokens.each_chunk(runs), strict=True)
        start_P, end_P = _runs(np.concatenate(starts), np.concatenate(ends))
        return cls(tokens.ids, start_P, np.append(np.int64(0), np.cumsum(end_P - start_P)))

    @property
    def count(self) -> int:
        """Number of pieces."""
        return self.starts_P.size

    @property
    def has_domains(self) -> bool:
        """Whether each piece has a domain."""
        return self.domains_P is not None

    def __len__(self) -> int:
        return int(self.bounds_P[-1])

    def find(self, at: np.ndarray) -> Pieces:
        """Returns the pieces with these offsets of the stream."""
        piece = np.searchsorted(self.bounds_P, at, side="right") - 1
        return Pieces(piece, self.bounds_P[piece], self.starts_P[piece])

    def domains(self, number: np.ndarray) -> np.ndarray:
        """Returns the domains of pieces, int32."""
        assert self.domains_P is not None
        return self.domains_P[number]

    def table(self, at: int) -> "tuple[TokenStream, int]":
        """Returns the whole stream, and 0."""
        return self, 0


def _runs(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the starts and ends of ranges, the adjacent ones joined and the empty ones left out."""
    filled = ends > starts
    starts = starts[filled]
    ends = ends[filled]
    if not starts.size:
        return starts, ends
    is_apart = starts[1:] != ends[:-1]
    return starts[np.append(True, is_apart)], ends[np.append(is_apart, True)]


class ShuffledStream(Stream):
    """The documents of a large text in a random order: the blocks are shuffled, and the documents of each block.

    A piece is a document, and its number counts empty documents, too.
    """

    def __init__(self, tokens: Tokens, tokens_K: np.ndarray, rng: np.random.Generator, seeds: Sequence[int]) -> None:
        """Makes a stream.

        Args:
          tokens: the text, which has no loss mask and no labels.
          tokens_K: number of tokens of each block, see `block_tokens`.
          rng: draws the order of the blocks.
          seeds: what seeds the order within each block, together with its number.
        """
        assert tokens.loss_mask is None
        assert tokens.labels is None
        self.ids = tokens.ids
        self.loss_mask = self.labels = self.parts = None
        self._tokens = replace(tokens, names=None)
        self._order_K = rng.permutation(tokens_K.size)
        documents_K = np.minimum(BLOCK, tokens.starts.size - self._order_K * BLOCK)
        self._bounds_K = np.append(np.int64(0), np.cumsum(tokens_K[self._order_K]))
        self._numbers_K = np.append(np.int64(0), np.cumsum(documents_K))  # of the first piece of each block
        self._seeds = [*seeds]
        self._block = lru_cache(maxsize=16)(self._make_block)

    def _make_block(self, block: int) -> TokenStream:
        """Returns the documents of the block at this place of the stream, in their order there."""
        number = int(self._order_K[block])
        size = int(self._numbers_K[block + 1] - self._numbers_K[block])
        documents = self._tokens.documents(slice(number * BLOCK, number * BLOCK + size))
        rng = np.random.default_rng([*self._seeds, number + 1])  # NumPy pads seeds with zeros, so no other draw has it
        return TokenStream.from_documents(documents, rng.permutation(size))

    @property
    def count(self) -> int:
        """Number of pieces."""
        return int(self._numbers_K[-1])

    @property
    def has_domains(self) -> bool:
        """Whether each piece has a domain."""
        return self._tokens.domains is not None

    def __len__(self) -> int:
        return int(self._bounds_K[-1])

    def find(self, at: np.ndarray) -> Pieces:
        """Returns the pieces with these offsets of the stream."""
        flat = at.ravel()
        block = np.searchsorted(self._bounds_K, flat, side="right") - 1
        changes = np.flatnonzero(np.diff(block)) + 1
        found = Pieces(*(np.empty(flat.size, np.int64) for _ in Pieces._fields))
        for first, end in zip(np.append(0, changes).tolist(), np.append(changes, flat.size).tolist(), strict=True):
            if first == end:  # nothing was asked for
                continue
            number = int(block[first])
            offset = self._bounds_K[number]
            within = self._block(number).find(flat[first:end] - offset)
            found.number[first:end] = within.number + self._numbers_K[number]
            found.begins[first:end] = within.begins + offset
            found.start[first:end] = within.start
        return Pieces(*(each.reshape(at.shape) for each in found))

    def domains(self, number: np.ndarray) -> np.ndarray:
        """Returns the domains of pieces, int32."""
        domains = np.empty(number.shape, np.int32)
        block = np.searchsorted(self._numbers_K, number, side="right") - 1
        for each in np.unique(block).tolist():
            here = block == each
            domains[here] = self._block(each).domains(number[here] - self._numbers_K[each])
        return domains

    def table(self, at: int) -> tuple[TokenStream, int]:
        """Returns the block with an offset, and the offset of the block."""
        block = int(np.searchsorted(self._bounds_K, at, side="right")) - 1
        return self._block(block), int(self._bounds_K[block])


def block_tokens(tokens: Tokens) -> np.ndarray:
    """Returns the number of tokens of each block of documents, int64 [blocks]."""

    def sums(chunk: slice) -> np.ndarray:
        length_D = tokens.sizes(chunk)
        return np.add.reduceat(length_D, np.arange(0, length_D.size, BLOCK))

    return np.concatenate([*tokens.each_chunk(sums)])
