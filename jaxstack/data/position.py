"""Where a run reads on when it resumes, also with batches of another size.

A checkpoint has the index of the next batch, and a `Position`: how many sequences of each source were read. As long as
batches stay as they were, the index says everything. Otherwise reading starts again at that index, behind the sequences
that were read. Where the data now has other sequences, such as with another length of rows, each source starts its next
pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

from jaxstack.common.counts import plural
from jaxstack.data.windows import Order

Counts = list[list[int]]
"""Sequences of each source in each bucket, `[buckets][sources]`. Rows of one length are one bucket."""


class Start(NamedTuple):
    """Where reading starts: at the first batch of a run, or at one from which batches have another size.

    Attributes:
      batch: index of the first batch.
      read: sequences that were read before it. Empty means none.
    """

    batch: int = 0
    read: Sequence[Sequence[int]] = ()


class SourceRecord(TypedDict):
    """What identifies a source in a checkpoint."""

    name: str
    text: str
    """Its fingerprint."""


class Position(TypedDict):
    """What a checkpoint has of the data, as JSON."""

    start_batch: int
    start_read: Counts
    """See `Start`."""
    read: Counts
    """Sequences that were read before the next batch."""
    sources: list[SourceRecord]
    orders: list[list[Order | None]]
    """What determines the sequences of each source in each bucket. `None` for a source that is not read."""


@dataclass(frozen=True)
class Continued:
    """How a source continues.

    Attributes:
      read: sequences that count as read, in each bucket.
      note: what is left out and why, for users; empty if nothing is.
    """

    read: list[int]
    note: str = ""


def continue_source(record: SourceRecord, orders: Sequence[Order | None], saved: Position) -> Continued:
    """Returns how a source continues after a checkpoint.

    It is the source of the same name, or else of the same text. One that the checkpoint does not have begins.
    """
    named = {one["name"]: number for number, one in reversed([*enumerate(saved["sources"])])}
    with_text = {one["text"]: number for number, one in reversed([*enumerate(saved["sources"])])}
    number = named.get(record["name"], with_text.get(record["text"]))
    if number is None:
        return Continued([0] * len(orders))
    read = [counts[number] for counts in saved["read"]]
    before = [each[number] for each in saved["orders"]]
    if len(before) == len(orders):  # a source that was not read for a while has its present order
        before = [one or other for one, other in zip(before, orders, strict=True)]
    same_text = saved["sources"][number]["text"] == record["text"]
    if not any(orders) or (same_text and before == [*orders]):
        return Continued(read)
    passes = max((-(-n // _rows(order)) for n, order in zip(read, before, strict=True) if order), default=0)
    begun = [passes * _rows(order) for order in orders]
    left_out = sum(passes * _rows(order) - n for n, order in zip(read, before, strict=True) if order)
    if not left_out:
        return Continued(begun)
    reason = _difference([one for one in before if one], [one for one in orders if one])
    total = sum(_rows(order) for order in before)
    return Continued(
        begun,
        f"{record['name']}: the rest of pass {passes:,}, {left_out:,} of {plural(total, 'sequence', spec=',')}, is "
        f"left out, because the run now reads other sequences ({reason if same_text else 'another text'}). Pass "
        f"{passes + 1:,} begins",
    )


def _rows(order: Order | None) -> int:
    return 0 if order is None else order["sequences of a pass"] or 0


def _difference(before: Sequence[Order], now: Sequence[Order]) -> str:
    """Returns the first value that differs, for users. Others may follow from it."""
    if len(before) != len(now):
        return f"lengths of rows: {len(before)} before, {len(now)} now"
    for one, other in zip(before, now, strict=True):
        for key, value in other.items():
            if one.get(key) != value:
                return f"{key}: {one.get(key)} before, {value} now"
    return "another number of lengths of rows"
