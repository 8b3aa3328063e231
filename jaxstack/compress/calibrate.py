"""Runs a model layer by layer over calibration batches, and measures the inputs of every matrix on any mesh.

Each layer sees the outputs of the layers before it after their compression, so that later layers make up for earlier
errors. The layers of one step of the loop (a period of windows) are measured together, before any of them is
compressed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxstack import families
from jaxstack.common.tree import Batch, PyTree, path_of
from jaxstack.config import ConfigError, ModelConfig
from jaxstack.generate.engine import dropless
from jaxstack.kernels import taps
from jaxstack.models import params
from jaxstack.models.blocks import Stack
from jaxstack.models.context import Context
from jaxstack.models.params import Param, Params, flat_spec, is_compressed, map_spec
from jaxstack.sharding import collectives
from jaxstack.sharding.rules import names_of


class Statistics(NamedTuple):
    """Sums over the tokens that a matrix has read, float32; for experts with a leading axis [E].

    Attributes:
      gram: sum of x x^T [I, I].
      size: sum of |x| [I].
      tokens: their number [].
      norms: sum over sequences of the L2 norm of each unit over the sequence's tokens [U] (Muralidharan et al. 2024,
        arXiv:2407.14679, section 2.2). A unit is an input; of the output projection of attention, a head. Rows of
        experts are not in the order of sequences: [E, 0].
    """

    gram: jax.Array
    size: jax.Array
    tokens: jax.Array
    norms: jax.Array


class Turn(NamedTuple):
    """Sums over the tokens that a step of layers has read, float32 [].

    Attributes:
      distance: sum of 1 - the cosine of the residual stream before and after the step.
      tokens: their number.
    """

    distance: jax.Array
    tokens: jax.Array


@dataclass
class _Once:
    """Calls a function at most once."""

    compute: Callable[[], tuple[list[dict[str, Statistics]], Turn]]

    @cached_property
    def found(self) -> tuple[list[dict[str, Statistics]], Turn]:
        """The result."""
        return self.compute()


@dataclass(frozen=True)
class Measure:
    """Measures a layer over the calibration batches, at the first call.

    Attributes:
      stack: name of the stack that the layer belongs to.
      matrices: the matrices of the layer by path: what is compressed.
    """

    stack: str
    matrices: dict[str, Param]
    _once: _Once
    _index: int

    def __call__(self) -> dict[str, Statistics]:
        """Returns the statistics of each matrix of the layer by path."""
        return self._once.found[0][self._index]

    def turn(self) -> Turn:
        """Returns how far the step of the layer turns the residual stream."""
        return self._once.found[1]


Stream = tuple[PyTree, PyTree]
"""The residual stream, or several by name, and the side inputs of the layers of a stack."""


def require_inputs(cfg: ModelConfig, other: str) -> None:
    """Checks that a walk can measure the inputs of every matrix.

    Args:
      other: a method that does not need them, for the error.

    Raises:
      ConfigError: a matrix has the inputs of two branches.
    """
    if cfg.family == "branches":
        raise ConfigError(
            f"model.family=branches has a trunk whose matrices have the inputs of two branches, which are not "
            f"measured. Use {other}, or export a branch with `jaxstack export --branch`."
        )


@dataclass(frozen=True)
class Walk:
    """The way through a model's layers: the stacks of its family, one after the other.

    Attributes:
      cfg: the model, without a capacity limit.
      ctx: how it is computed, with whole sequences on each device and without a pipeline.
    """

    cfg: ModelConfig
    ctx: Context

    @classmethod
    def of(cls, cfg: ModelConfig, ctx: Context) -> "Walk":
        """Returns the way through a model that was loaded for a mesh without stages.

        Raises:
          ConfigError: layers of several kinds, or several devices for a model that is not a decoder.
        """
        if cfg.states_key:
            raise ConfigError(f"{cfg.states_key}: layers with states are not compressed. Use a model without them.")
        if cfg.mixes_experts:
            raise ConfigError(
                "model.moe.layers leaves layers without experts, and layers of two kinds are not compressed. Use a "
                "model whose layers all have experts, or none."
            )
        walk = cls(dropless(cfg), ctx.whole_sequences())
        if walk._meshed and cfg.family != "decoder":
            raise ConfigError(
                f"model.family={cfg.family} is calibrated on one device, but the mesh has several. Use --mesh.data=1."
            )
        return walk

    @property
    def matrices(self) -> dict[str, Param]:
        """The matrices of one layer of the only stack by path: what is compressed."""
        return self.matrices_of(families.only_stack(self.cfg)[0])

    def matrices_of(self, stack: str) -> dict[str, Param]:
        """Returns the matrices of one layer of a stack by path: what is compressed."""
        return {path: p for path, p in flat_spec(self.stacks[stack].spec).items() if is_compressed(p)}

    @cached_property
    def stacks(self) -> dict[str, Stack]:
        """The stacks of layers by name, in the order in which they run."""
        return families.of(self.cfg).layers(self.cfg)

    def run(
        self, values: Params, batches: Sequence[Batch], compress: Callable[[int, Params, Measure], Params]
    ) -> Iterator[tuple[int, Params]]:
        """Compresses one layer after the other, and yields their index and parameters.

        Args:
          compress: receives the index of a layer, counted over all stacks, its parameters without the axis of layers,
            and a function that returns the statistics of its matrices by path. It returns the parameters to use
            instead, with the same shapes.
        """
        streams = [self._embed(values, batch) for batch in batches]
        before = 0
        for name, stack in self.stacks.items():
            if stack.enter is not None:
                enter = self._enter(name)
                streams = [enter(values, stream, batch) for stream, batch in zip(streams, batches, strict=True)]
            matrices = self.matrices_of(name)
            take = self._take(name)
            step = self._step(name)
            for first in range(0, stack.depth, stack.period):
                count = min(stack.period, stack.depth - first)  # the last step of an encoder may have fewer layers
                layers = [take(values[name], first + i) for i in range(count)]
                index = first // stack.period
                measured = _Once(partial(self._sum, step, [*layers], index, streams, batches))
                for i, layer in enumerate(layers):
                    number = before + first + i
                    new = compress(number, layer, Measure(name, matrices, measured, i))
                    layers[i] = jax.tree.map(lambda to, like: jax.device_put(to, like.sharding), new, layer)
                    yield number, new
                if first + count < stack.depth or name != [*self.stacks][-1]:
                    streams = [
                        (step(layers, index, stream, batch)[0], stream[1])
                        for stream, batch in zip(streams, batches, strict=True)
                    ]
            before += stack.depth

    def _sum(
        self,
        step: "Step",
        layers: list[Params],
        index: int,
        streams: list[Stream],
        batches: Sequence[Batch],
    ) -> tuple[list[dict[str, Statistics]], Turn]:
        """Returns the statistics of the matrices of each layer over all batches, and how far the layers turn."""
        found: Any = None
        for stream, batch in zip(streams, batches, strict=True):
            one = step(layers, index, stream, batch)[1:]
            found = one if found is None else jax.tree.map(jnp.add, found, one)
        return found

    def _layer_specs(self, stack: str) -> PyTree:
        """Returns how the parameters of one layer are sharded."""
        return self.ctx.layout.parameters(self.stacks[stack].spec) if self._meshed else None

    @property
    def _meshed(self) -> bool:
        return self.ctx.layout.mesh is not None and self.ctx.layout.mesh.size > 1

    @cached_property
    def _stream_spec(self) -> PartitionSpec | None:
        return self.ctx.layout.activation(("batch", None, None)) if self._meshed else None

    @cached_property
    def _batch_spec(self) -> PartitionSpec | None:
        return self.ctx.layout.batch if self._meshed else None

    @cached_property
    def _embed(self) -> Callable[[Params, Batch], Stream]:
        def work(values: Params, batch: Batch) -> Stream:
            its = families.of(self.cfg)
            layer_inputs = its.make_layer_inputs(self.cfg, batch, self.ctx)
            return its.embed(self.cfg, self._cast(values), layer_inputs, self.ctx)

        if not self._meshed:
            return jax.jit(work)
        where = self.ctx.layout.parameters(families.spec(self.cfg))
        return jax.jit(self.ctx.layout.local(work, (where, self._batch_spec), (self._stream_spec, None)))

    def _enter(self, name: str) -> Callable[[Params, Stream, Batch], Stream]:
        """Returns what leads from the stack before to a stack. The model is on one device."""
        enter = self.stacks[name].enter
        assert enter is not None
        assert not self._meshed

        def work(values: Params, stream: Stream, batch: Batch) -> Stream:
            layer_inputs = families.of(self.cfg).make_layer_inputs(self.cfg, batch, self.ctx)
            return enter(self.cfg, self._cast(values), *stream, layer_inputs, self.ctx)

        return jax.jit(work)

    def _cast(self, values: Params) -> Params:
        return params.cast_matrices(families.spec(self.cfg), values, self.ctx.dtype)

    def _take(self, name: str) -> Callable[[Params, int], Params]:
        """Returns one layer of the stacked parameters, sharded as before."""

        def take(stacked: Params, index: jax.Array) -> Params:
            return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, index, 0, keepdims=False), stacked)

        if not self._meshed:
            return jax.jit(take)
        return jax.jit(take, out_shardings=jax.tree.map(self.ctx.layout.sharding, self._layer_specs(name)))

    def _step(self, name: str) -> "Step":
        """Returns what computes the layers of one step: the residual stream after them, and what `_sum` adds up."""
        stack = self.stacks[name]
        matrices = self.matrices_of(name)
        one = map_spec(is_compressed, stack.spec)

        def work(
            layers: list[Params], index: jax.Array, stream: Stream, batch: Batch
        ) -> tuple[PyTree, list[dict[str, Statistics]], Turn]:
            before, side = stream
            layer_inputs = families.of(self.cfg).make_layer_inputs(self.cfg, batch, self.ctx).of_stack(name, side)
            cast = [params.cast_matrices(stack.spec, layer, self.ctx.dtype) for layer in layers]
            run = partial(stack.step, self.cfg, self.ctx, stack)
            wanted = [one] * len(layers)
            (x, _), seen = taps.record_inputs(lambda weights: run(weights, before, index, layer_inputs), cast, wanted)
            paths = [path_of(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(cast)]
            found: list[dict[str, Statistics]] = [{} for _ in layers]
            for leaf, (inputs, sizes) in seen.items():
                which, _, path = paths[leaf].partition("/")
                found[int(which)][path] = self._measure(matrices[path], inputs, sizes)
            turned = (before, x) if stack.stream is None else (before[stack.stream], x[stack.stream])
            turn = jax.tree.map(partial(self._total, self.ctx.layout.axes("batch")), _turn(*turned))
            return x, found, turn

        if not self._meshed:
            return jax.jit(work)

        def of_period(count: int) -> Any:
            where = (
                [self._layer_specs(name)] * count,
                PartitionSpec(),
                (self._stream_spec, None),
                self._batch_spec,
            )
            return self.ctx.layout.local(work, where, (self._stream_spec, PartitionSpec(), PartitionSpec()))

        return jax.jit(lambda layers, *rest: of_period(len(layers))(layers, *rest))

    def _measure(self, p: Param, x: jax.Array, sizes: tuple[jax.Array, ...]) -> Statistics:
        """Returns the statistics of the inputs of a matrix, equal on all devices.

        Args:
          x: its inputs on this device [..., *in]; for experts rows that are sorted by expert [N, I].
          sizes: for experts, the number of rows of each.
        """
        stored = self.ctx.layout.axes("batch")
        for dim in range(p.in_axes):
            split = tuple(axis for axis in self._axes(p.axes[p.batch_axes + dim]) if axis not in stored)
            x = collectives.all_gather_invariant(x, split, x.ndim - p.in_axes + dim)
        x = x.astype(jnp.float32)
        by_unit = x  # [B, S, U, ...]
        x = x.reshape(-1, prod(x.shape[x.ndim - p.in_axes :]))
        if sizes:
            ends = jnp.cumsum(sizes[0])
            rows = jnp.arange(x.shape[0])[:, None]
            member = ((rows >= ends - sizes[0]) & (rows < ends)).astype(jnp.float32)
            found = jax.lax.map(lambda chosen: _sums(x, chosen), member.T)
        else:
            squares = (by_unit**2).sum((1, *range(3, by_unit.ndim)))
            found = _sums(x, collectives.zeros(x.shape[:1], jnp.float32, x) + 1)
            found = found._replace(norms=jnp.sqrt(squares).sum(0))
        return jax.tree.map(partial(self._total, stored), found)

    def _axes(self, name: str) -> collectives.Axes:
        """Returns the mesh axes above 1 that split a logical axis of parameters."""
        mesh = self.ctx.layout.mesh
        if mesh is None:
            return ()
        return tuple(axis for axis in names_of(self.ctx.layout.rules.parameters[name]) if mesh.shape[axis] > 1)

    def _total(self, stored: collectives.Axes, a: jax.Array) -> jax.Array:
        """Returns the sum over devices with different tokens; devices with the same tokens have the same sums."""
        varies = collectives.varies_along(a)
        same = prod(collectives.count((axis,)) for axis in varies if axis not in stored)
        return collectives.all_reduce(a / same, varies)


Step = Callable[[list[Params], int, Stream, Batch], tuple[PyTree, list[dict[str, Statistics]], Turn]]
"""The program of a step of layers, see `Walk._step`."""


def _sums(x: jax.Array, chosen: jax.Array) -> Statistics:
    """Returns the statistics of the chosen rows; `chosen` [N] is 0 or 1."""
    x = x * chosen[:, None]
    gram = jnp.matmul(x.T, x, precision=jax.lax.Precision.HIGHEST)
    return Statistics(gram, jnp.abs(x).sum(0), chosen.sum(), gram[0, :0])


def _turn(before: jax.Array, after: jax.Array) -> Turn:
    """Returns by how much vectors [B, S, D] turn."""
    before = before.astype(jnp.float32)
    after = after.astype(jnp.float32)
    lengths = jnp.linalg.norm(before, axis=-1) * jnp.linalg.norm(after, axis=-1)
    distance = 1 - (before * after).sum(-1) / jnp.maximum(lengths, jnp.finfo(jnp.float32).tiny)
    return Turn(distance.sum(), (collectives.zeros(distance.shape, jnp.float32, distance) + 1).sum())
