"""The arrays of a batch as declarations, and batches made from them for compiles, plans and measurements."""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack.common.tree import Batch


@dataclass(frozen=True)
class BatchArray:
    """Declares one array of a batch. The batch has a row for each sequence.

    Attributes:
      shape: dimensions; the first two are rows and the positions of a sequence.
      values: values of a made-up batch. `ids`: random integers from 0 to `below` - 1. `positions`: 0, 1, ... along each
        sequence. `one_document`: ones, int32, because 0 means padding. `ones` and `normal`: float32.
      below: see `values`.
    """

    shape: tuple[int, ...]
    values: Literal["ids", "positions", "one_document", "ones", "normal"]
    below: int = 1

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the array."""
        return jnp.dtype(jnp.float32 if self.values in ("ones", "normal") else jnp.int32)

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Returns the array of a made-up batch [B, S, ...], as `shape` and `values` declare it."""
        match self.values:
            case "ids":
                return rng.integers(0, self.below, self.shape).astype(np.int32)
            case "positions":
                return np.broadcast_to(np.arange(self.shape[1], dtype=np.int32), self.shape)
            case "normal":
                return rng.standard_normal(self.shape, np.float32)
        return np.ones(self.shape, self.dtype)


BatchSpec: TypeAlias = dict[str, BatchArray]
"""Declarations of the arrays of a batch, by name."""


def with_rows_of(spec: BatchSpec, length: int, longest: int) -> BatchSpec:
    """Returns the declarations of a batch with rows of another length, and the same number of tokens.

    Args:
      spec: declarations of a batch whose rows have the longest length.
      longest: length of the rows of `spec`.
    """
    return {
        name: replace(a, shape=(a.shape[0] * longest // length, a.shape[1] * length // longest, *a.shape[2:]))
        for name, a in spec.items()
    }


def abstract_batch(spec: BatchSpec, where: jax.sharding.Sharding) -> Batch:
    """Returns the shapes, dtypes and shardings of a batch; `where` is the sharding of each array."""
    return {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where) for n, a in spec.items()}  # type: ignore[misc]


def random_batch(spec: BatchSpec, where: jax.sharding.Sharding) -> Batch:
    """Returns a made-up batch on the devices, always the same; `where` is the sharding of each array."""
    rng = np.random.default_rng(0)
    return jax.device_put({name: array.draw(rng) for name, array in spec.items()}, where)
