"""What a pipeline runs, and what it returns."""

from collections.abc import Callable
from dataclasses import dataclass

import jax

from jaxstack.common.tree import PyTree

Layer = Callable[[PyTree, PyTree, jax.Array, PyTree], tuple[PyTree, jax.Array, PyTree]]
"""(weights of one layer group, x, index of the group in its stack, inputs) -> (x, penalty, aux)."""


@dataclass(frozen=True)
class StackFns:
    """The functions of a stack of layers that follows another one.

    Attributes:
      enter: (shared, x, inputs) -> x, the input of the stack's first layer from the output of the stack before. All
        stages call it at once, and only stage 0 uses the value. What `enter` computes from `shared` and `inputs` alone
        may be divided among the stages.
      layer: see `PipelineFns`.
      split: see `PipelineFns`.
    """

    enter: Callable[[PyTree, PyTree, PyTree], PyTree]
    layer: Layer
    split: PyTree = None


@dataclass(frozen=True)
class PipelineFns:
    """The functions that a pipeline runs, each on the shards of one device.

    All stages call `embed` and `loss` at once with equal arguments, and the results must be equal on all stages. The
    functions may divide their work among the stages, for example by a split vocabulary. The result of `embed` may be
    device-varying along the stages, as a gathered array is; only stage 0 uses the value. Losses and penalties are
    shares of one sum over microbatches and layers, whose gradients the pipeline computes. `x` is an array, or a tree of
    arrays that stages send on together. It has the same type before and after each layer of a stack.

    Attributes:
      prepare: (one microbatch) -> inputs, the values that the other functions need from it. It runs once for each unit.
      embed: (shared, inputs) -> x, the input of the first layer.
      layer: (weights of one layer group, x, index of the group, inputs) -> (x, penalty, aux). `aux` has no gradient
        and is summed over microbatches.
      loss: (shared, x, inputs) -> loss, from the output of the last layer: a scalar, or a tree of totals, see
        `sharding.totals`, which are merged over microbatches. Gradients are taken of the sum of all its elements, so
        stop the gradients of elements that you only measure. `forward` does not call it.
      split: for each weight of a layer group, whether its gradient may be left to a weight unit. The layer uses such a
        weight only through `kernels.taps.product`. `None` means no weight.
      later: the stacks of layers after the first one, in order. If there are any, `stacked` is a tuple of trees.
      kept: names in `aux` that `forward` returns for each microbatch instead of their sum. `execute` does not read it.
    """

    prepare: Callable[[PyTree], PyTree]
    embed: Callable[[PyTree, PyTree], PyTree]
    layer: Layer
    loss: Callable[[PyTree, PyTree, PyTree], PyTree] | None = None
    split: PyTree = None
    later: tuple[StackFns, ...] = ()
    kept: tuple[str, ...] = ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """The values that a run sums over microbatches.

    Attributes:
      loss: totals of `PipelineFns.loss`, equal on all stages.
      penalty: sum of the penalties of this stage's layers.
      aux: sums of the `aux` of `PipelineFns.layer`, by layer slot of this stage; with several stacks a tuple.
      shared: float32 gradients of the shared parameters.
      stacked: float32 gradients of the parameters in this stage's layer slots; with several stacks a tuple.
    """

    loss: PyTree
    penalty: jax.Array
    aux: PyTree
    shared: PyTree
    stacked: PyTree
