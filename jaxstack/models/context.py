"""Execution context: how a model is computed, beside what it computes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax.numpy as jnp

from jaxstack.common.tree import PyTree
from jaxstack.models.layout import Dims, Layout
from jaxstack.models.ops import Ops
from jaxstack.moe.placement import Placement


@dataclass(frozen=True)
class Context:
    """How a model is computed; passed to its functions with the parameters. The default is one device in float32.

    Attributes:
      layout: how arrays are sharded, and how devices communicate.
      ops: the implementation that runs each op.
      dtype: dtype of activations, and of matrices in matmuls.
      remat: what the backward pass recomputes, see `jaxstack.config.TrainConfig`.
      watch: activations of a layer whose statistics it returns, see `models.watch`.
      placement: the experts that each device stores, some of them several times. `None` means equal parts.
    """

    layout: Layout = field(default_factory=Layout)
    ops: Ops = field(default_factory=Ops)
    dtype: Any = jnp.float32
    remat: Literal["none", "selective", "dots", "full"] = "none"
    watch: frozenset[str] = frozenset()
    placement: Placement | None = None

    def region(self, f: Callable[..., PyTree], arguments: Sequence[PyTree], inputs: PyTree, output: Dims) -> PyTree:
        """Returns `f(ctx, *arguments)`, which communicates explicitly, whatever the partitioner is.

        See `partitioned.AutoLayout.region`.
        """

        def work(layout: Layout, *shards: PyTree) -> PyTree:
            return f(replace(self, layout=layout), *shards)

        return self.layout.region(work, arguments, inputs, output)

    @property
    def within_stage(self) -> "Context":
        """This context for the units of a pipeline, see `Layout.within_stage`."""
        return replace(self, layout=self.layout.within_stage)

    def whole_sequences(self) -> "Context":
        """Returns this context for generation: sequences are whole on each device, and padding is its own segment."""
        return replace(self, layout=self.layout.whole_sequences, ops=self.ops.whole_sequences)
