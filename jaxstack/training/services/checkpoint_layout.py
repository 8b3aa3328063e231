"""The layout of a train state in a checkpoint, which is the same for every pipeline and every padding."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxstack import families
from jaxstack.common.tree import path_of
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.pipeline import Stages
from jaxstack.pipeline.operations import to_slots
from jaxstack.sharding.rules import names_of
from jaxstack.training.state import Recipe, TrainState, init_state

Leaf = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Layout:
    """The layout of a state in a checkpoint: layers are in the model's order, and nothing is padded.

    Attributes:
      abstract: shapes, dtypes and shardings in the checkpoint.
      pack: converts the state of a run to the state in a checkpoint. It copies the arrays once, or not at all where
        the run stores them like the checkpoint.
      unpack: the inverse of `pack`, at the same cost. Leaves that are `...` stay as they are.
    """

    abstract: TrainState
    pack: Callable[[TrainState], TrainState]
    unpack: Callable[[TrainState], TrainState]


def checkpoint_layout(recipe: Recipe, ctx: Context, abstract: TrainState) -> Layout:
    """Returns the layout of a run's checkpoints; `abstract` is from `abstract_state`."""
    assert ctx.layout.mesh is not None
    stages = (
        None if ctx.layout.pipeline is None or ctx.layout.pipeline.stages.is_layer_order else ctx.layout.pipeline.stages
    )
    model = recipe.model
    is_padded = model.padded_vocab > model.vocab
    sizes = ctx.layout.mesh.shape
    if stages is None and not is_padded:
        return Layout(abstract, lambda state: state, lambda state: state)
    stacked = [path for path, p in params.flat_spec(families.spec(model)).items() if p.stacked]
    small = padded = _leaves(abstract)
    if is_padded:
        bare = recipe._replace(model=replace(model, pad_vocab_to=None))
        small = _leaves(jax.eval_shape(lambda: init_state(bare, ctx)))

    def placed(path: str) -> Stages | None:  # of parameters of layers, and of the optimizer's arrays for them
        found = [name for name in stacked if path.endswith("/" + name)]
        return stages.of(found[0]) if stages is not None and found else None

    def saved(keys: tuple[Any, ...], leaf: Leaf) -> Leaf:
        path = path_of(keys)
        entries = (*leaf.sharding.spec, *[None] * leaf.ndim)
        shape = small[path].shape
        if stack := placed(path):
            shape = (len(stack.slot_of_layer), *shape[1:])
        shards = [prod(sizes[name] for name in names_of(entry)) for entry in entries]
        # A dimension that its mesh axes do not divide is replicated over them while it is saved or restored.
        split = [entry if n % parts == 0 else None for n, entry, parts in zip(shape, entries, shards, strict=False)]
        return Leaf(shape, leaf.dtype, sharding=ctx.layout.sharding(PartitionSpec(*split)))

    def on_device(a: jax.Array) -> jax.Array:  # devices compute with their own memory only (`train.offload`)
        return jax.device_put(a, jax.memory.Space.Device) if recipe.train.offloads_optimizer else a

    def to_checkpoint(path: str, a: jax.Array) -> jax.Array:
        a = on_device(a)
        if stack := placed(path):
            return a[stack.slot_of_layer]
        return a[tuple(slice(n) for n in small[path].shape)]

    def to_run(path: str, a: jax.Array) -> jax.Array:
        a = on_device(a)
        if stack := placed(path):
            return to_slots(stack, a)
        zeros = [(0, to - n) for n, to in zip(a.shape, padded[path].shape, strict=True)]
        return jnp.pad(a, zeros) if zeros else a

    in_checkpoint = jax.tree_util.tree_map_with_path(saved, abstract)
    return Layout(in_checkpoint, _convert(to_checkpoint, in_checkpoint), _convert(to_run, abstract))


def _leaves(tree: Any) -> dict[str, Any]:
    return {path_of(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _convert(f: Callable[[str, jax.Array], jax.Array], to: TrainState) -> Callable[[TrainState], TrainState]:
    """Returns a function that applies `f(path, array)` to the arrays of a state, sharded like the arrays of `to`."""
    shardings = {path: leaf.sharding for path, leaf in _leaves(to).items()}

    @cache  # each save runs the same program
    def compiled(paths: tuple[str, ...]) -> Callable[[dict[str, jax.Array]], dict[str, jax.Array]]:
        where = {path: shardings[path] for path in paths}
        return jax.jit(lambda arrays: {path: f(path, a) for path, a in arrays.items()}, out_shardings=where)

    def convert(state: TrainState) -> TrainState:
        arrays = {path: leaf for path, leaf in _leaves(state).items() if leaf is not ...}
        done = compiled(tuple(arrays))(arrays)
        return jax.tree_util.tree_map_with_path(lambda keys, leaf: done.get(path_of(keys), leaf), state)

    return convert
