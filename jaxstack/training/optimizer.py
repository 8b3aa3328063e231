"""Optimizers and learning-rate schedules: a direction, then decay on matrices, then the learning rate.

Most parts are optax's. The directions of Muon and Adafactor are written here, because they depend on which dimensions
of an array count its matrices, and on how it is sharded.
"""

import math
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.typing import ArrayLike
from optax.contrib import MuonState, scale_by_muon

from jaxstack.common.counts import plural
from jaxstack.common.tree import PyTree
from jaxstack.config import OptimConfig
from jaxstack.models.params import Param, Spec, flat_spec, map_spec
from jaxstack.training import whole_matrices


def _last_peak_step(cfg: OptimConfig, steps: int) -> int:
    """Returns the number of the update after which the learning rate decays, counted from 1.

    A decay begins after the warm-up: with `wsd`, it takes fewer steps than `decay_fraction` says if fewer remain.
    """
    if cfg.schedule != "wsd":
        return cfg.warmup_steps
    return max(cfg.warmup_steps, steps - _wsd_decay_steps(cfg, steps))


def _wsd_decay_steps(cfg: OptimConfig, steps: int) -> int:
    return max(round(steps * cfg.decay_fraction), 1)


def schedule(cfg: OptimConfig, steps: int) -> optax.Schedule:
    """Returns the learning rate of each update, as a function of the number of updates before it.

    Update n of N, counted from 1, has the following rate, where W is the number of warm-up steps, B the last step
    before the decay, and f is `final_lr_fraction`:

    - n <= W: lr n / W
    - n <= B: lr
    - n > B: lr (f + (1 - f) s), with r = (N - n) / (N - B), and s = r (`linear`, `wsd`) or s = sin^2(pi r / 2)
      (`cosine`, which is (1 + cos(pi (1 - r))) / 2)

    B is W. With `wsd`, which is warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395, section 4), B is the larger
    one of W and N - `decay_fraction` N. So the last update of a run has lr f, unless the rate is constant or the
    warm-up takes the whole run.

    Args:
      cfg: peak and shape.
      steps: number of updates of the run.
    """
    peak = cfg.lr
    final = cfg.final_lr_fraction
    warmup = cfg.warmup_steps
    last_peak = _last_peak_step(cfg, steps)
    decay = max(steps - last_peak, 1)

    def rate(count: ArrayLike) -> jax.Array:
        n = jnp.asarray(count) + 1
        rising = n / max(warmup, 1)
        left = jnp.clip((last_peak + decay - n) / decay, 0, 1)
        shape = {
            "cosine": lambda: jnp.sin(jnp.pi / 2 * left) ** 2,
            "linear": lambda: left,
            "wsd": lambda: left,
            "constant": lambda: jnp.ones_like(left),
        }[cfg.schedule]()
        return peak * jnp.where(n < warmup, rising, final + (1 - final) * shape)

    return rate


def schedule_warning(cfg: OptimConfig, steps: int) -> str | None:
    """Returns a line for the user if the warm-up leaves fewer steps than the schedule needs, else `None`.

    This is not an error, because short trials of a long run may want it.
    """
    warmup = cfg.warmup_steps
    if warmup >= steps:
        return (
            f"optim.warmup_steps={warmup} takes all of train.steps={steps}: the learning rate rises until the last "
            f"step, to {cfg.lr * steps / warmup:.3g} of optim.lr={cfg.lr:g}. Lower optim.warmup_steps to train at "
            f"optim.lr."
        )
    remaining = steps - warmup
    if cfg.schedule == "wsd" and _wsd_decay_steps(cfg, steps) > remaining:
        return (
            f"optim.decay_fraction={cfg.decay_fraction:g} of train.steps={steps} is "
            f"{plural(_wsd_decay_steps(cfg, steps), 'step')}, but optim.warmup_steps={warmup} leaves {remaining}: the "
            f"decay takes {plural(remaining, 'step')}. Lower one of the two to decay as slowly as "
            f"optim.decay_fraction says."
        )
    return None


LARGEST_GRADIENT = 2e19
"""No element of gradients is larger if their norm is finite in float32, since its square is below 3.5e38."""


def updates_are_bounded(cfg: OptimConfig, steps: int) -> bool:
    """Returns whether the settings alone exclude an update that is not finite, if all gradients are finite.

    Moments are means of gradients or of their squares, and SGD's momentum is at most g / (1 - b1), where g is the
    largest element of a gradient. So the optimizer's state stays finite. The elements of a direction have these bounds:

    - `adamw`: g / eps, since the root of the second moment is not negative.
    - `muon`: 1e4, since singular values end below 1.2 and matrices have fewer than 1e9 inputs; for the rest `adamw`.
    - `adafactor`: 1e6, the root of a matrix's size, since each is clipped to a root mean square of 1. Its means divide
      without underflow only if gradients are clipped to 1000 or less.
    - `lion`: 1, which is a sign.

    The sum of all updates of a parameter is then far below float32's largest number, 3.4e38. Weight decay brings a
    parameter nearer to zero. For other settings a step checks its update, see `assemble.make_train_step`.

    Args:
      steps: number of updates of the run.
    """
    gradient = min(cfg.clip_norm or LARGEST_GRADIENT, LARGEST_GRADIENT)
    adam = gradient / cfg.eps if cfg.eps >= 1e-30 else math.inf  # float32 has no smaller normal numbers than 1.2e-38
    direction = {
        "adamw": adam,
        "muon": max(adam, 1e4),
        "adafactor": 1e6 if gradient <= 1000 else math.inf,
        "lion": 1.0,
        "sgd": gradient / (1 - cfg.b1),
    }[cfg.name]
    # Nearer to 1, `1 - b` and `1 - b**n` lose their digits in float32, and either may be zero.
    has_digits = max(cfg.b1, cfg.b2) <= 1 - 1e-6
    return has_digits and cfg.lr * cfg.weight_decay <= 1 and steps * cfg.lr * direction <= 1e36


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration x, x x^T x, (x x^T)^2 x (Jordan et al. 2024)."""
NEWTON_SCHULZ_STEPS = 5


def newton_schulz(x: jax.Array) -> jax.Array:
    """Moves the singular values of each matrix [N, in, out] near one (Jordan et al. 2024), in float32.

    A value that is at least a tenth of the matrix's norm ends between 0.68 and 1.14. A smaller one is multiplied by at
    most 3.4445 in a step.
    """
    a, b, c = NEWTON_SCHULZ
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x  # so that x x^T is the smaller of the two products
    x = x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + 1e-8)

    def iterate(_: int, x: jax.Array) -> jax.Array:
        square = x @ x.mT
        return a * x + (b * square + c * square @ square) @ x

    x = jax.lax.fori_loop(0, NEWTON_SCHULZ_STEPS, iterate, x)
    return x.mT if tall else x


def orthogonalized(p: Param, x: jax.Array, sharding: NamedSharding | None = None) -> jax.Array:
    """Applies `newton_schulz` to every matrix of a parameter, and scales the result to the size of AdamW's update.

    Args:
      p: the parameter's declaration.
      x: its momentum, of the shape [layers, experts, *in, *out] of the parameter, and sharded like it.
      sharding: how it is sharded. `None` means one device.
    """
    lead = p.batch_axes
    outputs = lead + p.in_axes
    height = prod(p.shape[lead:outputs])
    width = prod(p.shape[outputs:])
    sizes = {} if sharding is None else sharding.mesh.shape
    how = whole_matrices.sharing(p, x.shape, None if sharding is None else sharding.spec, sizes)

    def scaled(matrices: jax.Array) -> jax.Array:
        return 0.2 * max(height, width) ** 0.5 * newton_schulz(matrices)

    def local(x: jax.Array) -> jax.Array:
        stack = x.reshape(-1, *x.shape[lead:])
        return whole_matrices.map_matrices(scaled, stack, how, (height, width)).reshape(x.shape)

    if sharding is None or sharding.mesh.size == 1:
        return local(x)
    # Nothing is differentiated here, so device-varying types are not needed.
    return jax.shard_map(local, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=sharding.spec, check_vma=False)(x)


def _muon(cfg: OptimConfig, spec: Spec, shardings: PyTree) -> optax.GradientTransformation:
    """Builds Muon (Jordan et al. 2024) for hidden matrices, and Adam for the other parameters.

    The momentum is optax's: Nesterov's, with the bias corrections of Nadam (Dozat 2016). Jordan's Muon does not have
    them; the two agree after about 1 / (1 - b1) steps. Updates are scaled to AdamW's typical size, a root mean square
    of 0.2 (Liu et al. 2025, arXiv:2502.16982, section 2.2), so that one learning rate fits both.
    """
    of_optax = scale_by_muon(beta=cfg.b1)

    def update(grads: Any, state: MuonState, values: Any = None) -> tuple[Any, MuonState]:
        count = state.count + 1
        b = cfg.b1
        momentum = optax.tree.update_moment(grads, state.mu, b, 1)
        ahead = jax.tree.map(
            lambda m, g: b * m + (1 - b) * g,
            optax.tree.bias_correction(momentum, b, count + 1),
            optax.tree.bias_correction(grads, b, count),
        )
        where = map_spec(lambda _: None, spec) if shardings is None else shardings
        updates = map_spec(lambda p, m, s: orthogonalized(p, m, s) if p.is_hidden_matrix else m, spec, ahead, where)
        return updates, MuonState(count, momentum, state.ns_coeffs)

    labels = map_spec(lambda p: "muon" if p.is_hidden_matrix else "adam", spec)
    muon = optax.GradientTransformation(of_optax.init, update)
    return optax.partition({"muon": muon, "adam": optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps)}, labels)


class AdafactorState(NamedTuple):
    """Means of squared gradients. A parameter has either `rows` and `columns` or `elements`; the others are empty.

    Attributes:
      updates: number of updates so far.
      rows: means over a matrix's outputs, [layers, experts, in].
      columns: means over a matrix's inputs, [layers, experts, out].
      elements: means for parameters that are not factored, with the shape of the parameter.
    """

    updates: jax.Array
    rows: PyTree
    columns: PyTree
    elements: PyTree


def _adafactor(spec: Spec) -> optax.GradientTransformation:
    """Builds Adafactor (Shazeer & Stern 2018, arXiv:1804.04235, algorithms 4 and 5) without relative steps.

    Each matrix of each layer and expert is factored and clipped by itself, as if layers were not stacked; optax's
    version would clip all layers together. Vectors, and matrices with fewer than 128 inputs or outputs, are not
    factored.
    """
    epsilon = 1e-30
    threshold = 1.0
    none = optax.MaskedNode()

    def outputs(p: Param) -> int:
        return p.batch_axes + p.in_axes

    def factored(p: Param) -> bool:
        shape = p.unpadded or p.shape
        return p.kind != "vector" and min(prod(shape[p.batch_axes : outputs(p)]), prod(shape[outputs(p) :])) >= 128

    def unpadded(p: Param, dims: range) -> float:
        """Returns the factor that makes a mean over dimensions, with zeros as padding, the mean without them."""
        return prod(p.shape[dim] / (p.unpadded or p.shape)[dim] for dim in dims)

    def init(values: Any) -> AdafactorState:
        def zeros(shape: Any, of_factored: bool) -> Any:
            return map_spec(
                lambda p, v: jnp.zeros(shape(p, v.shape)) if factored(p) == of_factored else none, spec, values
            )

        return AdafactorState(
            jnp.zeros((), jnp.int32),
            zeros(lambda p, shape: shape[: outputs(p)], True),
            zeros(lambda p, shape: shape[: p.batch_axes] + shape[outputs(p) :], True),
            zeros(lambda p, shape: shape, False),
        )

    def update(grads: Any, state: AdafactorState, values: Any = None) -> tuple[Any, AdafactorState]:
        updates = state.updates + 1
        decay = 1 - updates.astype(jnp.float32) ** -0.8

        def mean(old: jax.Array, new: jax.Array) -> jax.Array:
            return decay * old + (1 - decay) * new

        def one(p: Param, g: jax.Array, row: Any, column: Any, element: Any) -> tuple[jax.Array, Any, Any, Any]:
            g = g.astype(jnp.float32)
            ins = range(p.batch_axes, outputs(p))
            outs = range(outputs(p), g.ndim)
            if factored(p):
                row = mean(row, (g**2).mean(tuple(outs)) * unpadded(p, outs))
                correction = unpadded(p, ins)
                column = mean(column, correction * (g**2).mean(tuple(ins)))
                of_row = jax.lax.rsqrt((row + epsilon) / (correction * row.mean(tuple(ins), keepdims=True) + epsilon))
                of_column = jax.lax.rsqrt(column + epsilon)
                u = g * jnp.expand_dims(of_row, tuple(outs)) * jnp.expand_dims(of_column, tuple(ins))
            else:
                element = mean(element, g**2)
                u = g * jax.lax.rsqrt(element + epsilon)
            square = (u**2).mean(tuple(range(p.batch_axes, g.ndim)), keepdims=True)
            size = jnp.sqrt(square * unpadded(p, range(p.batch_axes, g.ndim)))
            return u / jnp.maximum(1.0, size / threshold), row, column, element

        found = map_spec(one, spec, grads, state.rows, state.columns, state.elements)
        u, *means = (map_spec(lambda _, each, i=i: each[i], spec, found) for i in range(4))
        return u, AdafactorState(updates, *means)

    return optax.GradientTransformation(init, update)


def _scaled_to_width(cfg: OptimConfig, spec: Spec) -> optax.GradientTransformation:
    """Builds the division of updates by the ratio of widths (muP, see `features.width`).

    The update of Adam, and of the others whose elements have a fixed size, grows with the width in its spectral norm.
    An orthogonalized one is multiplied by the root of the width (`orthogonalized`), so it is divided by the root only.
    Weight decay follows later and is not divided, so that it keeps its time scale at every width.
    """

    def one(p: Param, update: jax.Array) -> jax.Array:
        if p.width_ratio == 1:
            return update
        return update / p.width_ratio ** (0.5 if cfg.name == "muon" and p.is_hidden_matrix else 1.0)

    return optax.stateless(lambda updates, _: map_spec(one, spec, updates))


class AverageState(NamedTuple):
    """State of an optimizer that also averages the parameters.

    Attributes:
      updates: number of updates so far.
      average: exponential average of the parameters.
      inner: state of the optimizer.
    """

    updates: jax.Array
    average: PyTree
    inner: PyTree


def _averaging(inner: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """Builds an optimizer that averages the parameters after each update: decay * average + (1 - decay) * parameters.

    After n updates the decay is at most (1 + n) / (10 + n), so that the initial values are soon forgotten.
    """

    def init(values: Any) -> AverageState:
        # A copy: the step donates both, and one buffer cannot be donated twice.
        return AverageState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, values), inner.init(values))

    def update(grads: Any, state: AverageState, values: Any = None) -> tuple[Any, AverageState]:
        changes, inner_state = inner.update(grads, state.inner, values)
        n = state.updates.astype(jnp.float32)
        kept = jnp.minimum(decay, (1 + n) / (10 + n))
        new = optax.apply_updates(values, changes)
        average = jax.tree.map(lambda old, value: old + (1 - kept) * (value - old), state.average, new)
        return changes, AverageState(state.updates + 1, average, inner_state)

    return optax.GradientTransformation(init, update)


def _keeping_zeros(inner: optax.GradientTransformation, spec: Spec) -> optax.GradientTransformation:
    """Builds an optimizer that leaves the zeros of matrices at zero, and computes as if their gradients were zero.

    A zero is never changed, so it is still one at the next update: the parameters are the mask, which needs no state.
    """

    def masked(values: Any, changes: Any) -> Any:
        return map_spec(lambda p, v, u: jnp.where(v == 0, 0, u) if p.kind == "matrix" else u, spec, values, changes)

    def update(grads: Any, state: Any, values: Any = None) -> tuple[Any, Any]:
        changes, state = inner.update(masked(values, grads), state, values)
        return masked(values, changes), state

    return optax.GradientTransformation(inner.init, update)


def in_shards(inner: optax.GradientTransformation, shards: PyTree, whole: PyTree) -> optax.GradientTransformation:
    """Builds an optimizer whose replicas each update a part of the parameters, and gather the changes.

    That is the update of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054, section 5.1).

    Args:
      inner: the optimizer, whose state and gradients are sharded.
      shards: how the optimizer's state and gradients are sharded, a tree of NamedSharding like the parameters.
      whole: how the parameters are sharded.
    """

    def update(grads: Any, state: Any, values: Any = None) -> tuple[Any, Any]:
        changes, state = inner.update(grads, state, jax.lax.with_sharding_constraint(values, shards))
        # The first constraint keeps XLA from gathering gradients and state, and computing all changes everywhere.
        changes = jax.lax.with_sharding_constraint(changes, shards)
        return jax.lax.with_sharding_constraint(changes, whole), state

    return optax.GradientTransformation(inner.init, update)


def optimizer(cfg: OptimConfig, steps: int, spec: Spec, shardings: PyTree = None) -> optax.GradientTransformation:
    """Builds the update rule: clipping, direction, decoupled weight decay on matrices and tables, learning rate.

    Args:
      cfg: name and settings.
      steps: number of updates of the run, for the schedule.
      spec: the model's declarations, which say what is a matrix and what is a norm or a bias.
      shardings: how the parameters are sharded, a tree of NamedSharding like `spec`. `None` means one device. Muon,
        which needs complete matrices, then divides them among the devices.
    """
    direction = {
        "adamw": lambda: optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps),
        "muon": lambda: _muon(cfg, spec, shardings),
        "adafactor": lambda: _adafactor(spec),
        "lion": lambda: optax.scale_by_lion(cfg.b1, cfg.b2),
        "sgd": lambda: optax.trace(cfg.b1) if cfg.b1 else optax.identity(),
    }[cfg.name]()
    if any(p.width_ratio != 1 for p in flat_spec(spec).values()):
        direction = optax.chain(direction, _scaled_to_width(cfg, spec))
    whole = optax.chain(
        optax.clip_by_global_norm(cfg.clip_norm) if cfg.clip_norm else optax.identity(),
        direction,
        optax.add_decayed_weights(cfg.weight_decay, mask=map_spec(lambda p: p.is_decayed, spec)),
        optax.scale_by_learning_rate(schedule(cfg, steps)),
    )
    whole = _keeping_zeros(whole, spec) if cfg.keep_zeros else whole
    return whole if cfg.ema is None else _averaging(whole, cfg.ema)
