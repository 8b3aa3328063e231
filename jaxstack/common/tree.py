"""Paths of trees."""

from typing import Any

import jax


def path_of(keys: tuple[Any, ...]) -> str:
    """A tree path as text: `layers/attention/w_q`."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def flatten(tree: Any) -> dict[str, Any]:
    """Every leaf under its path, in the tree's own order."""
    return {path_of(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)}
