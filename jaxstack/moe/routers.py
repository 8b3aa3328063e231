"""Routers: each decides, for every token on its own, which experts see it and with what weight. One result type.

Suffixes: T tokens, E experts, k choices of a token, G groups of experts.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Routing(NamedTuple):
    """What a router decided for T tokens.

    Attributes:
      experts: the chosen experts, distinct within a token, int32 [T, k].
      weights: the gate of each chosen expert, float32 [T, k].
      scores: affinities that sum to 1 over the experts, float32 [T, E]; the balance loss reads them.
      logits: the scores before their softmax or sigmoid, float32 [T, E]; the z-loss reads them. None for a hard gate,
        which computes no logits.
    """

    experts: jax.Array
    weights: jax.Array
    scores: jax.Array
    logits: jax.Array | None


def top_k_softmax(logits: jax.Array, k: int, *, normalize: bool) -> Routing:
    """Softmax over all experts, of which the k likeliest are taken (Shazeer et al. 2017, arXiv:1701.06538).

    Args:
      logits: [T, E].
      k: choices of a token.
      normalize: divide a token's weights by their sum, as Mixtral (arXiv:2401.04088, section 2.1) and Qwen3 do; a
        softmax over the chosen logits alone (Shazeer, section 2.1) is the same thing.

    Raises:
      ValueError: more choices than experts, or one choice whose normalised weight would always be 1.
    """
    _check_choices(k, logits.shape[-1])
    if normalize and k == 1:
        raise ValueError(
            "k=1 with normalize=True makes every weight 1 and leaves the router without a gradient; "
            "use normalize=False (Switch Transformer, arXiv:2101.03961), or k=2"
        )
    logits = logits.astype(jnp.float32)
    scores = jax.nn.softmax(logits)
    experts = _top(scores, k)
    weights = _pick(scores, experts)
    if normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    return Routing(experts, weights, scores, logits)


def sigmoid_groups(
    logits: jax.Array, bias: jax.Array, k: int, *, groups: int = 1, top_groups: int = 1, scale: float = 1.0
) -> Routing:
    """DeepSeek-V3's router (arXiv:2412.19437, section 2.1.2), as its released modelling code computes it.

    Affinities are sigmoids. Experts are *chosen* by affinity plus bias, from the `top_groups` groups whose two best
    experts have the largest sum; they are *weighted* by the affinity alone, divided by the sum over the chosen (with
    one choice it stays as it is: divided it would always be 1). Experts outside of the kept groups are never chosen,
    also where a bias makes every kept one negative.

    Args:
      logits: [T, E].
      bias: [E]; gets no gradient, `update_bias` moves it.
      k: choices of a token.
      groups: equal parts of the experts, E / groups neighbours each.
      top_groups: groups that a token may choose from.
      scale: multiplies the weights (`routed_scaling_factor`).

    Raises:
      ValueError: sizes that do not fit together.
    """
    E = logits.shape[-1]
    _check_choices(k, E)
    if groups < 1 or E % groups:
        raise ValueError(f"groups={groups} does not divide the {E} experts; use a divisor of {E}")
    if not 1 <= top_groups <= groups:
        raise ValueError(f"top_groups={top_groups} must lie between 1 and groups={groups}")
    if top_groups * (E // groups) < k:
        raise ValueError(
            f"top_groups={top_groups} groups of {E // groups} experts hold fewer than k={k}; "
            f"raise top_groups or lower k"
        )
    logits = logits.astype(jnp.float32)
    affinity = jax.nn.sigmoid(logits)
    biased = lax.stop_gradient(affinity + bias)
    if top_groups < groups:
        grouped = biased.reshape(-1, groups, E // groups)
        best = lax.top_k(grouped, min(2, E // groups))[0].sum(-1)  # [T, G]
        kept = (_top(best, top_groups)[..., None] == jnp.arange(groups)).any(1)
        biased = jnp.where(kept[..., None], grouped, -jnp.inf).reshape(-1, E)
    experts = _top(biased, k)
    weights = _pick(affinity, experts)
    if k > 1:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)  # 1e-20: theirs
    return Routing(experts, weights * scale, affinity / (affinity.sum(-1, keepdims=True) + 1e-20), logits)


def by_domain(domain_ids: jax.Array, num_experts: int) -> Routing:
    """Hard gate: expert i serves domain i, with a weight of exactly 1.

    A traced id cannot raise. One that names no expert gets a weight of NaN, so that the loss says that something is
    wrong instead of training an expert on it; `check_domains` says what, before the batch goes to the device.

    Args:
      domain_ids: integers in [0, num_experts), [T].
    """
    return _hard(domain_ids.astype(jnp.int32), num_experts)


def by_timestep(timesteps: jax.Array, num_experts: int, max_timestep: float) -> Routing:
    """Hard gate over a diffusion's time: expert floor(t * E / max_timestep), with a weight of exactly 1.

    Each expert serves an equal stretch of noise levels (eDiff-I, Balaji et al. 2022, arXiv:2211.01324, section 4). A
    continuous t may be max_timestep itself, which belongs to the last stretch; a t outside of it gets a weight of NaN.

    Args:
      timesteps: integers in [0, max_timestep) or reals in [0, max_timestep], [T].
    """
    if jnp.issubdtype(timesteps.dtype, jnp.integer):
        return _hard(timesteps.astype(jnp.int32) * num_experts // int(max_timestep), num_experts)
    timesteps = timesteps.astype(jnp.float32)
    expert = jnp.floor(timesteps * num_experts / max_timestep).astype(jnp.int32)
    return _hard(jnp.where(timesteps == max_timestep, num_experts - 1, expert), num_experts)


def check_domains(ids: Any, num_experts: int) -> None:
    """Host-side guard of `by_domain`.

    Raises:
      ValueError: an id that names no expert.
    """
    ids = np.asarray(ids)
    bad = ids[(ids < 0) | (ids >= num_experts)]
    if bad.size:
        raise ValueError(
            f"domain id {bad.flat[0]} names no expert: {bad.size} of {ids.size} ids lie outside of "
            f"0 to {num_experts - 1}; raise moe.num_experts or renumber the domains"
        )


def update_bias(bias: jax.Array, counts: jax.Array, rate: float) -> jax.Array:
    """Balancing without a loss (Wang et al. 2024, arXiv:2408.15664, algorithm 1): busy experts down, idle ones up.

    Args:
      bias: [..., E].
      counts: pairs that each expert was chosen for in the whole step, summed over microbatches and shards, [..., E].
      rate: size of the step (0.001 in the paper).
    """
    return bias + rate * jnp.sign(counts.mean(-1, keepdims=True) - counts).astype(bias.dtype)


def _check_choices(k: int, num_experts: int) -> None:
    if not 1 <= k <= num_experts:
        raise ValueError(f"k={k} must lie between 1 and the number of experts, {num_experts}; change moe.k")


def _top(scores: jax.Array, k: int) -> jax.Array:
    """Indices of the k largest, int32 [T, k]; the lower index wins a tie."""
    return lax.top_k(lax.stop_gradient(scores), k)[1].astype(jnp.int32)


def _pick(scores: jax.Array, experts: jax.Array) -> jax.Array:
    """scores[t, experts[t, i]], as a comparison: the gradient of a lookup is a scatter, a slow loop on CPU."""
    chosen = experts[..., None] == jnp.arange(scores.shape[-1])
    return jnp.where(chosen, scores[:, None, :], 0.0).sum(-1)


def _hard(expert: jax.Array, num_experts: int) -> Routing:
    """One expert a token, with all of the score, so that the entropy is 0."""
    valid = (expert >= 0) & (expert < num_experts)
    expert = jnp.clip(expert, 0, num_experts - 1)
    chosen = expert[:, None] == jnp.arange(num_experts)
    weights = jnp.where(valid, 1.0, jnp.nan)[:, None]
    return Routing(
        expert[:, None],
        weights.astype(jnp.float32),
        chosen.astype(jnp.float32),
        None,
    )
