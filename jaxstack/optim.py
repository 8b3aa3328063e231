"""Optimizers and learning-rate schedules, from optax: a direction, then decay on matrices, then the learning rate."""

from math import prod
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from jaxstack.config import OptimConfig
from jaxstack.params import Param, Spec, map_spec


def schedule(cfg: OptimConfig, steps: int) -> optax.Schedule:
    """Learning rate of each update, by the count of updates made before it.

    The first update of a warm-up of W has `lr / W`, the last of all has `lr * final_lr_fraction`. `wsd` is warm-up,
    stable, decay (Hu et al. 2024, arXiv:2404.06395, section 4).

    Args:
      cfg: peak and shape.
      steps: updates of the whole run.
    """
    peak, final, warmup = cfg.lr, cfg.lr * cfg.final_lr_fraction, cfg.warmup_steps
    after = max(steps - warmup, 1)
    decay = max(round(steps * cfg.decay_fraction), 1) if cfg.schedule == "wsd" else after
    tail: optax.Schedule = {
        "cosine": optax.cosine_decay_schedule(peak, after, cfg.final_lr_fraction),
        "linear": optax.linear_schedule(peak, final, after),
        "wsd": optax.linear_schedule(peak, final, decay, transition_begin=max(after - decay, 0)),
        "constant": optax.constant_schedule(peak),
    }[cfg.schedule]
    whole = optax.join_schedules([optax.linear_schedule(0.0, peak, max(warmup, 1)), tail], [warmup])
    return lambda count: whole(count + 1)


def _muon(cfg: OptimConfig, spec: Spec) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for hidden matrices, Adam for the rest.

    Updates are scaled to AdamW's typical size, 0.2 root mean square (Liu et al. 2025, arXiv:2502.16982, section 2.2),
    so that one learning rate serves both.
    """

    def of_hidden_matrices(f: Any) -> Any:
        return map_spec(lambda p: f(p) if p.is_hidden_matrix else optax.MaskedNode(), spec)

    def first_output(p: Param) -> int:
        return p.batch_axes + p.in_axes

    def dimensions(p: Param) -> MuonDimensionNumbers:
        first = first_output(p)
        return MuonDimensionNumbers(tuple(range(p.batch_axes, first)), tuple(range(first, len(p.shape))))

    def scale(p: Param) -> float:
        first = first_output(p)
        return 0.2 * max(prod(p.shape[p.batch_axes : first]), prod(p.shape[first:])) ** 0.5

    scales = of_hidden_matrices(scale)
    muon = optax.chain(
        scale_by_muon(beta=cfg.b1, weight_dimension_numbers=lambda _: of_hidden_matrices(dimensions)),
        optax.stateless(lambda updates, _: jax.tree.map(lambda u, s: u * s, updates, scales)),
    )
    labels = map_spec(lambda p: "muon" if p.is_hidden_matrix else "adam", spec)
    return optax.partition({"muon": muon, "adam": optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps)}, labels)


def optimizer(cfg: OptimConfig, steps: int, spec: Spec) -> optax.GradientTransformation:
    """The update rule: clip, direction, decoupled weight decay on matrices and tables, learning rate.

    Args:
      cfg: which, and its numbers.
      steps: updates of the whole run, for the schedule.
      spec: the model's declarations, which tell matrices from norms and biases.
    """
    direction = {
        "adamw": lambda: optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps),
        "muon": lambda: _muon(cfg, spec),
        "adafactor": lambda: optax.chain(  # Shazeer & Stern 2018, arXiv:1804.04235, without relative steps
            optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)
        ),
        "lion": lambda: optax.scale_by_lion(cfg.b1, cfg.b2),
        "sgd": lambda: optax.trace(cfg.b1) if cfg.b1 else optax.identity(),
    }[cfg.name]()
    return optax.chain(
        optax.clip_by_global_norm(cfg.clip_norm) if cfg.clip_norm else optax.identity(),
        direction,
        optax.add_decayed_weights(cfg.weight_decay, mask=map_spec(lambda p: p.kind != "vector", spec)),
        optax.scale_by_learning_rate(schedule(cfg, steps)),
    )
