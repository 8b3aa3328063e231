"""The layout of a train state in a checkpoint, which is the same for every pipeline."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxstack.common.tree import path_of
from jaxstack.config import Config
from jaxstack.models import family, params
from jaxstack.models.context import Context
from jaxstack.training.state import TrainState


@dataclass(frozen=True)
class Layout:
    """The layout of a state in a checkpoint: layers are in the model's order, whatever pipeline trained them.

    Attributes:
      abstract: shapes, dtypes and shardings in the checkpoint.
      pack: converts the state of a run to that of a checkpoint. It copies the layers once, or not at all where the
        stages store them in the model's order.
      unpack: the inverse of `pack`, at the same cost.
    """

    abstract: TrainState
    pack: Callable[[TrainState], TrainState]
    unpack: Callable[[TrainState], TrainState]


def checkpoint_layout(cfg: Config, ctx: Context, abstract: TrainState) -> Layout:
    """Returns the layout of a run's checkpoints; `abstract` is from `abstract_state`."""
    if ctx.pipeline is None or ctx.pipeline.stages.is_layer_order:
        return Layout(abstract, lambda state: state, lambda state: state)
    stages = ctx.pipeline.stages
    stacked = tuple("/" + path for path, p in params.flat_spec(family.spec(cfg.model)).items() if p.stacked)

    def map_layers(f: Callable[[Any], Any], tree: TrainState) -> Any:
        """Applies `f` to every leaf that is stacked over layers: parameters and the optimizer's arrays for them."""
        return jax.tree_util.tree_map_with_path(
            lambda keys, leaf: f(leaf) if path_of(keys).endswith(stacked) else leaf, tree
        )

    def packed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape, (_, *rest) = (len(stages.slot_of_layer), *leaf.shape[1:]), leaf.sharding.spec
        # Layers that the stages do not divide are replicated on them while they are saved or restored.
        first = "pipe" if shape[0] % stages.stages == 0 else None
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=ctx.sharding(PartitionSpec(first, *rest)))

    saved = map_layers(packed, abstract)

    def jitted(f: Callable[[Any], Any], to: TrainState) -> Callable[[TrainState], TrainState]:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, to)
        return jax.jit(lambda state: map_layers(f, state), out_shardings=shardings)

    return Layout(saved, jitted(lambda a: a[stages.slot_of_layer], saved), jitted(ctx.to_stage_order, abstract))
