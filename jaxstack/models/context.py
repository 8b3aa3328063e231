"""How a model is computed: the layout of its arrays, the choice of kernels, the dtype, and what is recomputed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias

import jax
import jax.numpy as jnp

from jaxstack.common.tree import PyTree
from jaxstack.models.layout import Dims, Layout
from jaxstack.models.ops import Ops
from jaxstack.models.values import Aux, Mean
from jaxstack.moe.placement import Placement

Observable: TypeAlias = jax.Array | Mean | Callable[[], jax.Array]
"""This device's part of an activation, or of a mean. A function returns this device's maximum, and is called only if
the activation is measured."""


class Observer(Protocol):
    """Measures activations of a layer."""

    def __call__(self, ctx: "Context", name: str, value: Observable, axes: Sequence[str], /) -> Aux:
        """Returns the measured values of an activation by name; nothing if it does not measure this one.

        Args:
          name: name of the activation within a layer, such as `mlp/out`.
          value: what is measured.
          axes: logical axes of the dimensions that are split.
        """


def _unchanged(weights: PyTree, x: jax.Array) -> tuple[PyTree, jax.Array]:
    return weights, x


@dataclass(frozen=True)
class Context:
    """How a model is computed; passed to its functions with the parameters. The default is one device in float32.

    Attributes:
      layout: how arrays are sharded, and how devices communicate.
      ops: the implementation that runs each op.
      dtype: dtype of activations, and of matrices in matmuls.
      remat: what the backward pass recomputes, see `jaxstack.config.TrainConfig`.
      checkpoint: `jax.checkpoint`, or a function with the same arguments that stores residuals elsewhere.
      around_layer: changes the function that runs a layer, where a step of the loop over layers runs several.
      before_layer: gets the weights of a layer and the residual stream, and returns both.
      observer: measures activations of the layers. `None` measures nothing: the program is then the same.
      placement: the experts that each device stores, some of them several times. `None` means equal parts.
      values: collects the named values of a layer, see `collecting`. `None` means that nothing collects them.
      shown: the activations of the layer by name, for messages about shapes.
    """

    layout: Layout = field(default_factory=Layout)
    ops: Ops = field(default_factory=Ops)
    dtype: Any = jnp.float32
    remat: Literal["none", "selective", "dots", "full"] = "none"
    checkpoint: Callable[..., Any] = jax.checkpoint
    around_layer: Callable[[Callable[..., PyTree]], Callable[..., PyTree]] = lambda run: run
    before_layer: Callable[[PyTree, jax.Array], tuple[PyTree, jax.Array]] = _unchanged
    observer: Observer | None = None
    placement: Placement | None = None
    values: Aux | None = field(default=None, compare=False, repr=False)
    shown: dict[str, Observable] = field(default_factory=dict, compare=False, repr=False)

    def collecting(self) -> tuple["Context", Aux]:
        """Returns this context for the body of a layer, and the dict that gets the layer's named values.

        The body of a loop, of recomputation or of a region calls this itself, and returns the values as its results.
        """
        values: Aux = {}
        return replace(self, values=values, shown={}), values

    def layer(self, index: int, count: int) -> "Context":
        """Returns this context for layer `index` of the `count` layers of a step.

        The backward pass of a step ends with its first layer, so the first layer waits for nothing.
        """
        return replace(self, before_layer=_unchanged) if index == 0 and count > 1 else self

    def keep(self, name: str, value: PyTree) -> None:
        """Adds a named value of the layer."""
        if self.values is not None:
            assert name not in self.values, f"two values of a layer are called {name}"
            self.values[name] = value

    def observe(self, name: str, value: Observable, *axes: str) -> None:
        """Passes an activation to the observer, see `Observer`, and keeps the observer's results."""
        if self.values is None:
            return
        self.shown[name] = value
        if self.observer is not None:
            for measured, measurement in self.observer(self, name, value, axes).items():
                self.keep(measured, measurement)

    def region(self, f: Callable[..., PyTree], arguments: Sequence[PyTree], inputs: PyTree, output: Dims) -> PyTree:
        """Returns the array `f(ctx, *arguments)`. `f` communicates explicitly, whatever the partitioner is.

        The values that `f` keeps are sums over tokens. For the arguments see `partitioned.AutoLayout.region`.
        """

        def work(layout: Layout, *shards: PyTree) -> tuple[PyTree, Aux]:
            ctx, values = replace(self, layout=layout).collecting()
            return f(ctx, *shards), values

        array, values = self.layout.region(work, arguments, inputs, output)
        for name, value in values.items():
            self.keep(name, value)
        return array

    def sum_region(self, f: Callable[..., PyTree], arguments: Sequence[PyTree], inputs: PyTree) -> PyTree:
        """Returns `f(ctx, *arguments)`, which is a sum over tokens; see `region`."""

        def work(layout: Layout, *shards: PyTree) -> tuple[None, PyTree]:
            return None, f(replace(self, layout=layout), *shards)

        return self.layout.region(work, arguments, inputs, ())[1]

    @property
    def within_stage(self) -> "Context":
        """This context for the units of a pipeline, see `Layout.within_stage`."""
        return replace(self, layout=self.layout.within_stage)

    def whole_sequences(self) -> "Context":
        """Returns this context for generation: sequences are whole on each device, and padding is its own segment."""
        return replace(self, layout=self.layout.whole_sequences, ops=self.ops.whole_sequences)
