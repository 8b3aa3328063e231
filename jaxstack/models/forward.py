"""What leads from stack to stack of a model, and the auxiliary values of all of them in the order of the layers."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jaxstack.common.tree import PyTree
from jaxstack.config import ModelConfig
from jaxstack.models import watch
from jaxstack.models.blocks import Stack
from jaxstack.models.context import Context
from jaxstack.models.layer_inputs import Aux, LayerInputs
from jaxstack.models.params import Params

Stream: TypeAlias = tuple[jax.Array, PyTree]
"""What a stage of a pipeline sends to the next: the residual stream, and the side inputs of the layers."""


def join(every: Mapping[str, Aux]) -> Aux:
    """Joins the auxiliary values of stacks, [L, ...] each with its own depth. Watched ones get the stack's name."""
    parts = [watch.within(stack, aux) for stack, aux in every.items()]
    if len(parts) == 1:
        return parts[0]
    names = dict.fromkeys(name for aux in parts for name in aux)
    found = {name: [aux[name] for aux in parts if name in aux] for name in names}
    return {name: jax.tree.map(lambda *a: jnp.concatenate(a), *each) for name, each in found.items()}


def enter(cfg: ModelConfig, stack: Stack, ctx: Context) -> Callable[[Params, Stream, LayerInputs], Stream]:
    """Returns `Stack.enter` as a pipeline calls it."""

    def enter(shared: Params, stream: Stream, layer_inputs: LayerInputs) -> Stream:
        assert stack.enter is not None, "a stack after the first one says how it begins"
        return stack.enter(cfg, shared, *stream, layer_inputs, ctx)

    return enter


def in_layer_order(ctx: Context, stacks: Mapping[str, Stack], auxes: Sequence[Aux]) -> Aux:
    """Joins the auxiliary values of stacks, by the layer slots of this device's stage, to those of all layers [L, ...].

    Each is [R/P, ...]; the results are equal on all stages.
    """
    return join({name: ctx.layout.to_layer_order(aux, name) for name, aux in zip(stacks, auxes, strict=True)})
