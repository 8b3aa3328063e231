"""Finds documents that are nearly equal: MinHash signatures, locality-sensitive hashing, and connected components."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from jaxstack.common.errors import ConfigError
from jaxstack.data.clean.settings import NearRules

_BLOCK = 4096
"""Sequences that are hashed at once: the hashes of all functions for these are in memory."""
_SEED = 1
_SCHEME: Literal["affine32"] = "affine32"


def require_datasketch() -> None:
    """Raises a `ConfigError` if the library of near duplicates is missing."""
    try:
        import datasketch  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--rules has near, which needs the datasketch library. Run pip install 'jaxstack[clean]', or leave near "
            "out."
        ) from None


def shingles(text: str, n: int) -> set[str]:
    """Returns the sequences of n words of a text, in lower case. A shorter text is one sequence."""
    words = text.lower().split()
    return {" ".join(words[i : i + n]) for i in range(max(len(words) - n + 1, 1))}


def signature(text: str, rules: NearRules) -> np.ndarray:
    """Returns the MinHash signature of a text: the least value of each hash function over its sequences."""
    import datasketch

    sketch = datasketch.MinHash(num_perm=rules.hashes, seed=_SEED, scheme=_SCHEME)
    parts = sorted(part.encode("utf-8", "surrogatepass") for part in shingles(text, rules.ngram))
    for i in range(0, len(parts), _BLOCK):
        sketch.update_batch(parts[i : i + _BLOCK])
    return np.asarray(sketch.hashvalues, np.uint32)


class Pair(NamedTuple):
    """Two documents that are nearly equal, by their numbers, and their estimated Jaccard similarity."""

    first: int
    second: int
    similarity: float


def near_pairs(signatures: Sequence[np.ndarray], rules: NearRules) -> Iterator[Pair]:
    """Yields the pairs of documents whose estimated similarity is at least the threshold.

    Two documents are compared if locality-sensitive hashing puts them in a common bucket.
    """
    import datasketch

    buckets = datasketch.MinHashLSH(threshold=rules.threshold, num_perm=rules.hashes)
    for i, values in enumerate(signatures):
        sketch = datasketch.MinHash(num_perm=rules.hashes, seed=_SEED, scheme=_SCHEME, hashvalues=values)
        for j in sorted(buckets.query(sketch)):
            similarity = float(np.mean(signatures[j] == values))
            if similarity >= rules.threshold:
                yield Pair(j, i, similarity)
        buckets.insert(i, sketch)


def components(count: int, pairs: Sequence[Pair]) -> list[int]:
    """Returns the least number of each document's component: documents that pairs connect, directly or by others."""
    parent = list(range(count))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for first, second, _ in pairs:
        low, high = sorted((root(first), root(second)))
        parent[high] = low
    return [root(i) for i in range(count)]
