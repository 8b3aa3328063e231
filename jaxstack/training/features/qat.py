"""Quantisation-aware training: a forward pass with the rounded matrices that `jaxstack compress quantize` would store.

The gradient of a rounded matrix is taken as the gradient of the matrix itself, the straight-through estimator (Bengio
et al. 2013, arXiv:1308.3432). So the matrices are rounded before the gradient is taken: once a step, as arrays of all
devices. Scales are equal on every mesh, because XLA exchanges what a group of inputs on several devices needs.
"""

from functools import partial

import jax

from jaxstack import families
from jaxstack.common.tree import Batch
from jaxstack.config import ModelConfig
from jaxstack.config.scheme import Scheme
from jaxstack.kernels.rounding import round_matrix
from jaxstack.models.params import Param, Params, is_compressed, map_spec
from jaxstack.training.gradients import Gradients, Key
from jaxstack.training.losses import Metrics
from jaxstack.training.state import Recipe, TrainState, averaged_params


def rounded(gradients: Gradients, model: ModelConfig, scheme: Scheme) -> Gradients:
    """Returns the gradients at the rounded parameters."""

    def straight_through(params: Params, batch: Batch, key: Key = None) -> tuple[jax.Array, Params, Metrics]:
        return gradients(round_params(model, scheme, params), batch, key)

    return straight_through


def round_arrays(model: ModelConfig, scheme: Scheme | None, params: Params) -> Params:
    """Returns what `round_params` does for arrays on devices, sharded as they are; without a scheme, the arrays."""
    if scheme is None:
        return params
    rounded = _round_compiled(model, scheme, params)
    return jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), rounded, params)


def evaluated_params(recipe: Recipe, state: TrainState) -> Params:
    """Returns the parameters that evaluation and samples use: averaged with `optim.ema`, rounded with `train.qat`."""
    return round_arrays(recipe.model, recipe.train.rounding, averaged_params(recipe.model, state))


def round_params(model: ModelConfig, scheme: Scheme, params: Params) -> Params:
    """Returns the parameters with rounded matrices, in a function that is compiled.

    The arrays are global. Adapters are not merged, and stay as they are.
    """

    def one(p: Param, value: jax.Array) -> jax.Array:
        return round_matrix(value, p.batch_axes, p.in_axes, scheme) if is_compressed(p) else value

    spec = families.spec(model)
    with jax.named_scope("round"):
        return params | {name: map_spec(one, spec[name], params[name]) for name in families.of(model).stacks(model)}


_round_compiled = partial(jax.jit, static_argnums=(0, 1))(round_params)
