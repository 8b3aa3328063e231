"""Quantisation-aware training: a forward pass with the rounded matrices that `jaxstack compress quantize` would store.

The gradient with respect to a rounded matrix is taken as that of the matrix itself, the straight-through estimator
(Bengio et al. 2013, arXiv:1308.3432). So the matrices are rounded before the gradient is taken: once a step, as arrays
of all devices. Scales are equal on every mesh, because XLA exchanges what a group of inputs on several devices needs.
"""

from functools import partial

import jax

from jaxstack import families
from jaxstack.config import Config, ModelConfig
from jaxstack.config.scheme import Scheme
from jaxstack.kernels.rounding import round_matrix
from jaxstack.models.params import Param, Params, is_compressed, map_spec


def round_params(cfg: Config, values: Params) -> Params:
    """Returns the parameters with rounded matrices, in a function that is compiled; without `train.qat`, as they are.

    Args:
      cfg: the run.
      values: global arrays; adapters are not merged, and stay as they are.
    """
    return values if cfg.train.rounding is None else _round(cfg.model, cfg.train.rounding, values)


def round_arrays(cfg: Config, values: Params) -> Params:
    """Returns what `round_params` does for arrays on devices, sharded as they are."""
    if cfg.train.rounding is None:
        return values
    rounded = _round_compiled(cfg.model, cfg.train.rounding, values)
    return jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), rounded, values)


def _round(model: ModelConfig, scheme: Scheme, values: Params) -> Params:
    def one(p: Param, value: jax.Array) -> jax.Array:
        return round_matrix(value, p.batch_axes, p.in_axes, scheme) if is_compressed(p) else value

    name, _ = families.only_stack(model)
    with jax.named_scope("round"):
        return {**values, name: map_spec(one, families.spec(model)[name], values[name])}


_round_compiled = partial(jax.jit, static_argnums=(0, 1))(_round)
