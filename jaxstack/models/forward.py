"""The way from one stack of a model to the next, and the named values of all stacks in the order of the layers."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax

from jaxstack.common.tree import PyTree
from jaxstack.config import ModelConfig
from jaxstack.models import blocks
from jaxstack.models.blocks import Stack
from jaxstack.models.context import Context
from jaxstack.models.layer_inputs import LayerInputs
from jaxstack.models.params import Params
from jaxstack.models.values import Aux, within

Stream: TypeAlias = tuple[jax.Array, PyTree]
"""What a stage of a pipeline sends to the next: the residual stream, and the side inputs of the layers."""


def join(values: Mapping[str, Aux]) -> Aux:
    """Joins the named values of stacks, [L, ...] each with its own depth. Observed values get the stack's name."""
    return blocks.join([within(stack, of_stack) for stack, of_stack in values.items()])


def enter(cfg: ModelConfig, stack: Stack, ctx: Context) -> Callable[[Params, Stream, LayerInputs], Stream]:
    """Returns `Stack.enter` as a pipeline calls it."""

    def enter(shared: Params, stream: Stream, inputs: LayerInputs) -> Stream:
        assert stack.enter is not None, "a stack after the first one says how it begins"
        return stack.enter(cfg, shared, *stream, inputs, ctx)

    return enter


def in_layer_order(ctx: Context, stacks: Mapping[str, Stack], values: Sequence[Aux]) -> Aux:
    """Joins the named values of stacks, by the layer slots of this device's stage, to values of all layers [L, ...].

    Each is [R/P, ...]; the results are equal on all stages.
    """
    by_stack = zip(stacks, values, strict=True)
    return join({name: ctx.layout.to_layer_order(of_stack, name) for name, of_stack in by_stack})
