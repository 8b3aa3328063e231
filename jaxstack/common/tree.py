"""Paths of pytree leaves, and the type aliases of pytrees and batches."""

from typing import Any, TypeAlias

import jax

PyTree: TypeAlias = Any
"""Any JAX pytree: nested dicts, tuples, lists or registered dataclasses of arrays."""

Batch: TypeAlias = dict[str, jax.Array]
"""The arrays of a batch by name: `tokens`, `targets` and `loss_weights` [B, S], and others that a model reads."""


def path_of(keys: tuple[Any, ...]) -> str:
    """Returns the path of a leaf as text, such as `layers/attention/w_q`."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def flatten(tree: PyTree) -> dict[str, Any]:
    """Returns every leaf by its path, in the tree's own order."""
    return {path_of(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)}
