"""Warns of modules for which XLA's partitioner returns wrong gradients, with what to do.

`benchmarks/partitioned_operations.py` found these cases, and docs/flax.md has the table. A module of nnx shows them by
its attributes. Linen variables and plain trees are arrays without modules, so nothing can be said about them.
"""

import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxstack.common.tree import PyTree, path_of
from jaxstack.sharding.rules import names_of


class PartitionerWarning(UserWarning):
    """XLA's partitioner can return a wrong gradient for a module in this layout."""


MOST_NAMES = 4
"""Modules that a warning names."""


def warn_of_wrong_gradients(tree: PyTree, specs: Mapping[str, PartitionSpec], mesh: Mesh | AbstractMesh) -> None:
    """Warns, once for each kind, of the modules in a tree whose gradients XLA can get wrong on this mesh.

    Args:
      tree: a tree that may contain nnx modules.
      specs: how each array is split, by its path in the tree.
    """
    if sum(size > 1 for size in mesh.shape.values()) < 2:
        return  # every case needs an axis that splits the batch, and one that does not
    hits: dict[str, list[str]] = {}
    for path, module in _modules(tree):
        for text in _problems(module, specs.get(f"{path}/kernel" if path else "kernel", PartitionSpec())):
            hits.setdefault(text, []).append(path or "the model")
    for text, paths in hits.items():
        more = f" and {len(paths) - MOST_NAMES} more" if len(paths) > MOST_NAMES else ""
        # Of the call of `shard`, two functions up.
        warnings.warn(f"{', '.join(paths[:MOST_NAMES])}{more}: {text}", PartitionerWarning, stacklevel=3)


def _modules(tree: PyTree) -> Iterator[tuple[str, Any]]:
    """Yields the modules of nnx in a tree with their paths."""
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return
    for keys, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, nnx.Pytree)):
        if not isinstance(node, nnx.Pytree):
            continue
        for inner, module in nnx.iter_graph(node):
            if isinstance(module, nnx.Module):
                yield "/".join(part for part in (path_of(keys), *map(str, inner)) if part), module


def _problems(module: Any, spec: PartitionSpec) -> Iterator[str]:
    """Yields what can be wrong with the gradients of a module, whose kernel is split by `spec`, and what to do."""
    nnx: Any = sys.modules["flax.nnx"]
    if isinstance(module, nnx.Conv):
        rank = module.kernel.ndim
        if module.feature_group_count > 1:
            yield (
                "XLA multiplies the gradient of a convolution's kernel with groups by the size of every mesh axis that "
                "does not split the batch. Split the batch over all axes of the mesh. See docs/flax.md."
            )
        elif math.prod(_numbers(module.strides)) > 1 and _differ(spec, rank):
            yield (
                "XLA's gradient of a convolution with strides can be wrong if its kernel is split by input and by "
                "output channels. Split only the output channels, over both axes. See docs/flax.md."
            )
    elif _splits_layers_of_a_loop(module, spec):
        yield (
            "XLA's gradient of a loop over layers can be wrong if their kernels are split by inputs and by outputs "
            "over different axes, and one of these splits the batch too. Split only the outputs, over both axes. See "
            "docs/flax.md."
        )


def _splits_layers_of_a_loop(module: Any, spec: PartitionSpec) -> bool:
    """Returns whether a module is a stack of layers, of whose kernel `spec` splits inputs and outputs.

    A loop over a stack has one dimension more than the kernel of a layer. Heads are among the outputs of the
    projections of attention. The letters of an einsum do not say which are inputs, so any two dimensions count.
    """
    nnx: Any = sys.modules["flax.nnx"]
    if isinstance(module, nnx.Einsum):
        layer = range(module.kernel.ndim - len(module.kernel_shape), module.kernel.ndim)
        groups = [[d] for d in layer]
    elif isinstance(module, nnx.LinearGeneral):
        outputs = module.kernel.ndim - len(module.out_features)
        inputs = outputs - len(module.in_features)
        groups = [[*range(inputs, outputs)], [*range(outputs, module.kernel.ndim)]]
        layer = range(inputs - len(module.batch_axis), module.kernel.ndim)
    elif isinstance(module, nnx.Linear):
        layer = range(module.kernel.ndim - 2, module.kernel.ndim)
        groups = [[d] for d in layer]
    else:
        return False
    entries = (*spec, *(None,) * (module.kernel.ndim - len(spec)))
    return layer.start > 0 and sum(any(names_of(entries[d]) for d in group) for group in groups) > 1


def _numbers(value: Any) -> tuple[int, ...]:
    """Returns the strides of a convolution: a number for each dimension, a number for all, or None for 1."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _differ(spec: PartitionSpec, rank: int) -> bool:
    """Returns whether both of the last two dimensions of an array are split, which are inputs and outputs."""
    entries = (*spec, *(None,) * (rank - len(spec)))
    return bool(names_of(entries[-2])) and bool(names_of(entries[-1]))
