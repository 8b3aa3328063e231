"""Reads batches ahead of the step that needs them."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grain

    from jaxstack.data.windows import Batch


def prefetch(ds: "grain.MapDataset[Batch]", start: int = 0, depth: int = 2) -> "Iterator[tuple[int, Batch]]":
    """Yields (step, batch) from step `start` to the end of `ds`, while a thread reads `depth` batches ahead.

    An exception of the thread is raised at the step of its batch. Closing the generator ends the thread.
    """
    end = len(ds)
    with ThreadPoolExecutor(1, thread_name_prefix="jaxstack-prefetch") as reader:
        ahead = deque(reader.submit(ds.__getitem__, step) for step in range(start, min(start + depth, end)))
        try:
            for step in range(start, end):
                batch = ahead.popleft().result()
                if step + depth < end:
                    ahead.append(reader.submit(ds.__getitem__, step + depth))
                yield step, batch
        finally:
            reader.shutdown(cancel_futures=True)
