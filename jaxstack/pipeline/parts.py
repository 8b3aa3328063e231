"""The stacks of layers that an executor runs, and the arrays that stages send for all of them."""

from dataclasses import dataclass
from functools import cached_property, partial

import jax
import jax.numpy as jnp

from jaxstack.common.counts import plural
from jaxstack.common.tree import PyTree
from jaxstack.pipeline import program
from jaxstack.pipeline.functions import PipelineFns, StackFns, Sums
from jaxstack.pipeline.operations import zeros
from jaxstack.pipeline.split_vjp import Pairs, SplitVJP
from jaxstack.sharding import collectives
from jaxstack.sharding.collectives import varies_along, varying


@dataclass(frozen=True)
class Stack:
    """One stack of layers on this device.

    Attributes:
      index: number of the stack.
      plan: its units, slots and stages.
      fns: its functions.
      stacked: parameters in this stage's layer slots.
      constants: arrays in this stage's layer slots without gradients, or `None`.
      group_of_slot: index of the layer group in each of this stage's layer slots, or -1 for an empty slot.
    """

    index: int
    plan: program.StackPlan
    fns: PipelineFns | StackFns
    stacked: PyTree
    constants: PyTree
    group_of_slot: jax.Array

    @cached_property
    def vjp(self) -> SplitVJP:
        """The VJP of a layer, in parts."""
        return SplitVJP(self.layer)

    @property
    def max_groups(self) -> int:
        """Layer groups in the largest model chunk."""
        return self.plan.stages.max_groups

    def layer(self, weights: PyTree, x: PyTree, group: jax.Array, inputs: PyTree) -> tuple[PyTree, jax.Array, PyTree]:
        """Runs a layer group on the pair (inputs, constants), see `PipelineFns.layer`."""
        inputs, constants = inputs
        return self.fns.layer(weights if self.constants is None else (weights, constants), x, group, inputs)

    def enter(self, shared: PyTree, x: PyTree, inputs: PyTree) -> PyTree:
        """Returns the input of the first layer from the output of the stack before."""
        assert isinstance(self.fns, StackFns), "the first stack begins with the embedding"
        return self.fns.enter(shared, x, inputs)


def parts_of(
    plan: program.Program, fns: PipelineFns, axis: str, stacked: PyTree, constants: PyTree
) -> tuple[Stack, ...]:
    """Returns the stacks of a program on this device. For the arguments, see `execute`."""
    if len(plan.parts) != 1 + len(fns.later):
        raise ValueError(
            f"the program has {plural(len(plan.parts), 'stack')} of layers, and the functions {1 + len(fns.later)}"
        )
    one = not fns.later
    stacks: tuple[PipelineFns | StackFns, ...] = (fns, *fns.later)
    return tuple(
        Stack(
            index,
            part,
            stacks[index],
            stacked if one else stacked[index],
            constants if one or constants is None else constants[index],
            group_of_slot=collectives.local_slice(jnp.asarray(part.stages.group_of_slot), (axis,), 0),
        )
        for index, part in enumerate(plan.parts)
    )


class Carrier:
    """The arrays that stages send for the streams of all stacks; streams share arrays of equal shape and dtype.

    A tick sends the same arrays on all stages, whichever stack a stage runs.

    Attributes:
      arrays: zeros of the arrays' types.
    """

    def __init__(self, streams: list[PyTree]) -> None:
        """Makes the carrier of streams, each a tree of arrays, by stack."""
        self.arrays: list[jax.Array] = []
        self._places: list[list[int]] = []
        self._structures = [jax.tree.structure(stream) for stream in streams]
        for stream in streams:
            free = list(range(len(self.arrays)))
            places = []
            for leaf in jax.tree.leaves(stream):
                found = [i for i in free if (self.arrays[i].shape, self.arrays[i].dtype) == (leaf.shape, leaf.dtype)]
                if found:
                    free.remove(found[0])
                    self.arrays[found[0]] = varying(self.arrays[found[0]], varies_along(leaf))
                else:
                    self.arrays.append(zeros(leaf))
                places.append(found[0] if found else len(self.arrays) - 1)
            self._places.append(places)

    def stream(self, arrays: list[jax.Array], index: int) -> PyTree:
        """Returns the stream of a stack."""
        return jax.tree.unflatten(self._structures[index], [arrays[i] for i in self._places[index]])

    def put(self, arrays: list[jax.Array], index: int, stream: PyTree) -> list[jax.Array]:
        """Returns the arrays with the stream of a stack in place."""
        new = dict(zip(self._places[index], jax.tree.leaves(stream), strict=True))
        return [new.get(i, a) for i, a in enumerate(arrays)]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """The values that a stage carries from tick to tick. Fields with `by stack` have an entry for each stack of layers.

    Attributes:
      x: activations received from the previous stage, see `Carrier`.
      dx: cotangents received from the next stage.
      stash: by stack, residuals of layers, [stash slots, groups of a model chunk, ...] each.
      entries: by stack, the output of the stack before, from which its units entered it, [stash slots, ...]; None for
        the first stack.
      outputs: outputs of the last layer that wait for the loss, [stash slots, ...]; None if none waits.
      pairs: by stack, what the weight units need from the backward units, [pair slots, groups of a model chunk, ...].
      sums: results so far; aux and gradients of layers are by stack.
    """

    x: list[jax.Array]
    dx: list[jax.Array]
    stash: list[list[jax.Array]]
    entries: list[PyTree]
    outputs: PyTree
    pairs: list[Pairs]
    sums: Sums


def empty_sums(
    loss: PyTree, penalty: jax.Array, aux: list[PyTree], shared: PyTree, stacked: tuple[PyTree, ...]
) -> Sums:
    """Returns sums to which nothing was added, with float32 gradients of zero.

    `loss`, `penalty` and `aux` are zeros already. `aux` and `stacked` have an entry for each stack.
    """
    gradients = partial(jax.tree.map, lambda a: collectives.zeros(a.shape, jnp.float32, a))
    with jax.named_scope("gradient_sums"):
        return Sums(loss, penalty, tuple(aux), gradients(shared), tuple(gradients(group) for group in stacked))
