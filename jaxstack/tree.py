"""Small tools over trees of arrays: paths, counts, casts."""

from typing import Any

import jax
import numpy as np


def path_of(keys: tuple[Any, ...]) -> str:
    """A tree path as text: `layers/attention/w_q`."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def flatten(tree: Any) -> dict[str, Any]:
    """Every leaf under its path, in the tree's own order."""
    return {path_of(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def size(tree: Any) -> int:
    """Number of elements of all leaves (arrays or anything else with a shape)."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))


def cast(tree: Any, dtype: Any) -> Any:
    """The tree with its floating-point leaves in `dtype`; the others as they are."""

    def one(leaf: jax.Array) -> jax.Array:
        return leaf.astype(dtype) if jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating) else leaf

    return jax.tree.map(one, tree)
