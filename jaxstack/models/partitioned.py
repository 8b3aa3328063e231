"""The layout for XLA's partitioner: sharding constraints in place of collectives.

`Layout` runs a model as the work of one device inside `jax.shard_map`. Here the same functions see global arrays under
`jax.jit`. Where `Layout` communicates, an array gets a sharding, and XLA's partitioner inserts the collectives. Sums
over devices are then sums within an array, so `axes` is empty.

Functions that XLA cannot partition well remain manual regions: the lookup of embeddings, attention (with its ring over
`context`), the experts with their exchange, and the cross-entropy. See `AutoLayout.region`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from jaxstack.common.tree import Batch, PyTree
from jaxstack.kernels import context_order
from jaxstack.models.context import Context
from jaxstack.models.layout import Arguments, Dims, Layout, Result, Tree
from jaxstack.models.params import Spec, map_spec
from jaxstack.sharding import totals
from jaxstack.sharding.collectives import Axes


def within_step(ctx: Context) -> Context:
    """Returns the context in which the training step calls the model, as the layout's partitioner says."""
    if ctx.layout.partitioner == "manual":
        return ctx
    return replace(ctx, layout=AutoLayout(**_fields(ctx.layout)))


def _fields(layout: Layout) -> dict[str, Any]:
    return {f.name: getattr(layout, f.name) for f in fields(layout)}


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def reshard(to: NamedSharding, back: NamedSharding, x: jax.Array) -> jax.Array:
    """Returns x [...] with the sharding `to`; its gradient gets the sharding `back`.

    Autodiff would give `to` to the gradient as well. A gather would then sum its gradient over all devices and slice
    it, in place of a reduce-scatter.
    """
    return jax.lax.with_sharding_constraint(x, to)


def _forward(to: NamedSharding, back: NamedSharding, x: jax.Array) -> tuple[jax.Array, None]:
    return jax.lax.with_sharding_constraint(x, to), None


def _backward(to: NamedSharding, back: NamedSharding, _: None, dy: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(dy, back),)


reshard.defvjp(_forward, _backward)


@dataclass(frozen=True)
class AutoLayout(Layout):
    """The layout of a model whose collectives XLA inserts. Make it with `within_step`."""

    @property
    def manual(self) -> Layout:
        """The layout inside a manual region."""
        return Layout(**_fields(self))

    def axes(self, *names: str) -> Axes:
        """Returns no axes: an array has all shards."""
        return ()

    @property
    def gathers_params(self) -> bool:
        """See `Layout.gathers_params`."""
        return self.manual.gathers_params

    def _activation(self, *names: str | None) -> NamedSharding:
        return self.sharding(self.activation(names))

    def local(self, f: Callable[Arguments, Result], in_specs: PyTree, out_specs: PyTree) -> Callable[Arguments, Result]:
        """Returns `f` with the shardings of its arguments and of its results."""
        given, made = (jax.tree.map(self.sharding, specs) for specs in (in_specs, out_specs))

        def constrained(*arguments: Any) -> Any:
            arguments = jax.lax.with_sharding_constraint(arguments, given)
            return jax.lax.with_sharding_constraint(f(*arguments), made)  # type: ignore[call-arg]

        return constrained  # type: ignore[return-value]

    def region(self, f: Callable[..., PyTree], arguments: Sequence[PyTree], inputs: PyTree, output: Dims) -> PyTree:
        """Runs a part of the model inside `jax.shard_map`, with explicit collectives.

        Args:
          f: `f(layout, *shards)` does the work of one device. It returns an array, and sums over this device's tokens.
          arguments: global arrays, or trees of them.
          inputs: how each argument is sharded: declarations of parameters, or the logical axes of an activation.
          output: logical axes of the array.

        Returns:
          The array, and the sums over all tokens; the sums may have maxima among them, see `sharding.totals`.
        """
        inner = self.manual

        def work(*shards: PyTree) -> tuple[Any, PyTree]:
            array, sums = f(inner, *shards)
            return array, totals.reduce(sums, inner.token_axes)

        specs = tuple(self.parameters(x) if isinstance(x, dict) else self.activation(x) for x in inputs)
        results = self.activation(output), PartitionSpec()
        return jax.shard_map(work, mesh=self.mesh, in_specs=specs, out_specs=results)(*arguments)

    def gather_activations(self, x: jax.Array, over: str) -> jax.Array:
        """Gathers the residual stream [B, S, D] over its sequence. Without sequence parallelism it is already
        complete."""
        whole, parts = self._activation("batch", "sequence"), self._activation("batch", "residual")
        # Without it XLA may gather before a cast, on the side that has more bytes.
        x = jax.lax.with_sharding_constraint(x, parts)
        return checkpoint_name(reshard(whole, parts, x), "gathered")  # `remat` saves no constraint by itself

    def reduce_activations(self, y: jax.Array, over: str) -> jax.Array:
        """Shards a result [B, S, D] like the residual stream; XLA sums the parts of a contraction that was split."""
        whole, parts = self._activation("batch", "sequence"), self._activation("batch", "residual")
        return reshard(parts, whole, y)

    def gather_params(self, spec: Spec, params: Tree) -> Tree:
        """Returns the parameters as a layer uses them. Their gradients are sharded as the parameters are stored."""
        stored = self.parameters(spec)
        used = self.manual.with_gathered_params.parameters(spec)

        def gather(_: Any, value: jax.Array, held: PartitionSpec, whole: PartitionSpec) -> jax.Array:
            if held == whole:
                return value
            parts = self.sharding(held)
            # The backward pass gathers it again from here, so that it is saved in shards.
            value = reshard(self.sharding(whole), parts, jax.lax.with_sharding_constraint(value, parts))
            return checkpoint_name(value, "weight")

        return map_spec(gather, spec, params, stored, used)

    def _row_order(self, length: int) -> jax.Array:
        shards = 1 if self.mesh is None else self.mesh.shape["context"]
        return jnp.asarray(context_order(shards, length))

    def token_index(self, length: int) -> jax.Array:
        """Returns the positions within a row of its tokens, in the order of the devices that have them, int32 [S]."""
        return self._row_order(length)

    def shard_sequence(self, batch: Batch) -> Batch:
        """Returns the batch with each row [B, S] in the order of `token_index`, and split over the sequence."""
        if not self.manual.axes("sequence"):
            return batch
        where = self._activation("batch", "sequence")
        return {
            name: jax.lax.with_sharding_constraint(x[:, self._row_order(x.shape[1])], where)
            for name, x in batch.items()
        }
