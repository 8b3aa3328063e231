"""How to compute, never what: the rules and mesh, the kernels, the compute dtype and what is recomputed."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxstack.config import TrainConfig
from jaxstack.sharding import Rules


@dataclass(frozen=True)
class Context:
    """Carried through the model beside the parameters. The default computes plainly, in float32, on one device.

    Attributes:
      mesh: devices, or None for no constraints at all.
      rules: logical axes to mesh axes.
      dtype: of activations and of the matrices as they enter matmuls.
      remat: what the backward pass recomputes, see `jaxstack.config.TrainConfig`.
      attention, linear, norm, gelu, cross_entropy: implementation of each op in `jaxstack.kernels`.
    """

    mesh: Mesh | None = None
    rules: Rules = field(default_factory=Rules)
    dtype: Any = jnp.float32
    remat: Literal["none", "selective", "dots", "full"] = "none"
    attention: str = "xla"
    linear: str = "xla"
    norm: str = "xla"
    gelu: str = "xla"
    cross_entropy: str = "xla"

    @classmethod
    def create(cls, cfg: TrainConfig, mesh: Mesh) -> "Context":
        """The context of a run: kernels by the mesh's platform."""
        context = cls(mesh=mesh, dtype=jnp.dtype(cfg.dtype), remat=cfg.remat)
        return replace(context, **KERNELS.get(mesh.devices.flat[0].platform, {}))

    @property
    def batch_shards(self) -> int:
        """Parts that the batch is split into."""
        return 1 if self.mesh is None else self.mesh.shape["data"]

    def constrain(self, x: jax.Array, *axes: str) -> jax.Array:
        """Fixes the layout of an activation, whose dimensions are the logical `axes`."""
        if self.mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, self.rules.activation(axes)))


KERNELS: dict[str, dict[str, Any]] = {
    "cpu": {
        "attention": "chunked",
        "linear": "barrier",
        "norm": "explicit_vjp",
        "gelu": "saved",
        "cross_entropy": "chunked",
    },
}
"""What runs where, by platform; an op that is not named takes its XLA reference."""
