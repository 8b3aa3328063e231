"""A text as pieces of an array of ids, which windows are cut from. Suffixes: B batch, T tokens read, P pieces."""

from dataclasses import dataclass, replace

import numpy as np

from jaxstack.data.file_ids import Ids
from jaxstack.data.tokens import Tokens


@dataclass(frozen=True)
class TokenStream:
    """Pieces of `ids`, concatenated without a copy and readable from any offset."""

    ids: Ids
    starts_P: np.ndarray
    """Start of each piece in `ids`, int64."""
    bounds_P: np.ndarray
    """Start of each piece in the stream, then the length of the stream, int64 [P + 1]."""
    domains_P: np.ndarray | None = None
    """Domain of each piece, int32. `None` if documents have no domain."""
    loss_mask: np.ndarray | None = None
    """Whether each id of `ids` is a target of the loss. `None` means all."""
    labels: np.ndarray | None = None
    """Index of the label of each id of `ids`, or -1. `None` means that tokens are the targets."""

    @classmethod
    def from_documents(cls, tokens: Tokens, order: np.ndarray | None = None) -> "TokenStream":
        """Returns the documents in the order of these indices [documents]. `None` keeps their order."""
        tokens = replace(tokens, names=None)  # there may be millions, and a stream does not need them
        if order is not None:
            tokens = tokens.documents(order)
        tokens = tokens.documents(tokens.ends > tokens.starts)
        bounds = np.append(np.int64(0), np.cumsum(tokens.ends - tokens.starts))
        return cls(tokens.ids, tokens.starts, bounds, tokens.domains, tokens.loss_mask, tokens.labels)

    def merge_adjacent(self) -> "TokenStream":
        """Returns the same stream with adjacent pieces of `ids` merged, so that an uncut text is a single piece.

        Pieces that have domains are not merged.
        """
        if self.domains_P is not None:
            return self
        lengths = np.diff(self.bounds_P)
        first = np.append(True, self.starts_P[1:] != (self.starts_P + lengths)[:-1])
        return TokenStream(self.ids, self.starts_P[first], np.append(self.bounds_P[:-1][first], self.bounds_P[-1]))

    def __len__(self) -> int:
        return int(self.bounds_P[-1])

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
        piece_BT = self.pieces(place_BT)
        begins_BT = self.bounds_P[piece_BT] + turns_BT * len(self)
        index_BT = self.starts_P[piece_BT] + at_BT - begins_BT
        position_BT = at_BT - np.maximum(begins_BT, first_B[:, None])
        return index_BT, piece_BT + turns_BT * self.starts_P.size, position_BT

    def pieces(self, at: np.ndarray) -> np.ndarray:
        """Returns the piece of each offset of the stream."""
        return np.searchsorted(self.bounds_P, at, side="right") - 1

    def ids_at(self, at: np.ndarray) -> np.ndarray:
        """Returns the id at each offset of the stream."""
        piece = self.pieces(at)
        return self.ids[self.starts_P[piece] + at - self.bounds_P[piece]]
