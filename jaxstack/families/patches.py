"""The patches of pictures as the tokens of a transformer: parameters and embedding.

Shapes: B rows of this device, S/n patches of a picture in the residual stream, P values of a patch, D width.
"""

import jax

from jaxstack import kernels
from jaxstack.config import ModelConfig
from jaxstack.models.context import Context
from jaxstack.models.params import Param, Params, Spec


def patches_spec(cfg: ModelConfig, values: int, positions: int) -> Spec:
    """Declares the matrix that patches of `values` numbers are multiplied with, and a table of `positions` rows.

    There is a table only with `model.positions=learned`.
    """
    spec = {"patches": Param((values, cfg.d_model), ("features", "embed"), std=values**-0.5)}
    if cfg.positions == "learned":
        spec["positions"] = Param((positions, cfg.d_model), ("position", "embed"), "table", std=cfg.init_std)
    return spec


def embed_patches(
    cfg: ModelConfig, spec: Spec, params: Params, patches: jax.Array, positions: jax.Array, ctx: Context
) -> jax.Array:
    """Returns the residual stream before the first layer [B, S/n, D].

    Args:
      patches: patches of the residual stream [B, S/n, P].
      positions: positions of these patches [S/n].
    """
    values = ctx.layout.gather_params(spec, params)
    x: jax.Array = kernels.linear(patches.astype(ctx.dtype), values["patches"], implementation=ctx.ops.linear)
    if cfg.positions == "learned":
        x = kernels.add_in_float32(x, kernels.embedding_lookup(values["positions"], positions))
    return x
