"""Initial values and learning rates that transfer between widths: muP (Yang et al. 2022, arXiv:2203.03466, table 8).

Let m be the width of a model divided by the width of the base model, whose learning rate is known. Of a matrix that
reads a hidden width, the initial standard deviation is divided by sqrt(m), or by m if its outputs have a fixed number.
The optimizer divides the update by m (`training.optimizer`). Tables and vectors keep both. A tied head is a table, so
the hidden states before it are divided by m instead; for another head the two forms are equal under Adam.
"""

from dataclasses import replace

from jaxstack import kernels
from jaxstack.common.tree import PyTree
from jaxstack.config import ModelConfig
from jaxstack.models.context import Context
from jaxstack.models.family import Family
from jaxstack.models.layer_inputs import LayerInputs
from jaxstack.models.params import Param, Params, Spec, map_spec

GROWING = frozenset({"embed", "expert_embed", "heads", "kv_heads", "mlp"})
"""Logical axes whose sizes are in proportion to the width of a model."""


def with_width(family: Family) -> Family:
    """Returns the family with the initial values of muP, and where the head is tied with the hidden states divided."""

    def spec(cfg: ModelConfig) -> Spec:
        return scale_to_width(family.spec(cfg), cfg.width_ratio)

    def final_norm(cfg: ModelConfig, params: Params, x: PyTree, inputs: LayerInputs, ctx: Context) -> PyTree:
        x = family.final_norm(cfg, params, x, inputs, ctx)
        return kernels.multiply_in_float32(x, 1 / cfg.width_ratio) if cfg.tied_embeddings else x

    return replace(family, spec=spec, final_norm=final_norm)


def scale_to_width(spec: Spec, ratio: float) -> Spec:
    """Returns the declarations with the initial values and the `Param.width_ratio` of muP.

    Args:
      ratio: width of the model divided by the width of the base model.
    """

    def one(p: Param) -> Param:
        outputs = p.batch_axes + p.in_axes
        reads, writes = GROWING & {*p.axes[p.batch_axes : outputs]}, GROWING & {*p.axes[outputs:]}
        if p.kind not in ("matrix", "router") or not reads:
            return p
        return replace(p, std=p.std / (ratio**0.5 if writes else ratio), width_ratio=ratio)

    return map_spec(one, spec)
