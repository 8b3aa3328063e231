"""Routers: each chooses the experts of a token and their weights, independently of all other tokens.

Suffixes: T tokens, E experts, k choices of a token, G groups of experts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxstack.common.counts import plural


class Routing(NamedTuple):
    """The choices of a router for T tokens.

    Attributes:
      experts: the chosen experts, distinct within a token, int32 [T, k].
      weights: the gate of each chosen expert, float32 [T, k].
      scores: affinities that sum to 1 over the experts, float32 [T, E]; the balance loss reads them.
      logits: the scores before their softmax or sigmoid, float32 [T, E]; the z-loss reads them. `None` for a hard gate,
        which computes no logits.
    """

    experts: jax.Array
    weights: jax.Array
    scores: jax.Array
    logits: jax.Array | None


def top_k_softmax(
    logits: jax.Array, k: int, *, normalize: bool, groups: int = 1, top_groups: int = 1, scale: float = 1.0
) -> Routing:
    """Chooses the k most probable experts of a softmax over all (Shazeer et al. 2017, arXiv:1701.06538).

    With groups they are chosen from the `top_groups` groups with the most probable experts (DeepSeek-V2,
    arXiv:2405.04434, section 2.2.2).

    Args:
      logits: [T, E].
      k: number of choices of a token.
      groups, top_groups, scale: see `sigmoid_groups`.
      normalize: divide a token's weights by their sum, as Mixtral (arXiv:2401.04088, section 2.1) and Qwen3 do. A
        softmax over the chosen logits alone (Shazeer, section 2.1) gives the same weights.

    Raises:
      ValueError: more choices than experts, or one choice whose normalised weight would always be 1.
    """
    _check_groups(k, logits.shape[-1], groups, top_groups)
    if normalize and k == 1:
        raise ValueError(
            "k=1 with normalize=True makes every weight 1 and leaves the router without a gradient. "
            "Use normalize=False (Switch Transformer, arXiv:2101.03961), or k=2"
        )
    logits = logits.astype(jnp.float32)
    scores = jax.nn.softmax(logits)
    experts = _top(_within_groups(scores, groups, top_groups, 1), k)
    weights = _pick(scores, experts)
    if normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    return Routing(experts, weights if scale == 1 else weights * scale, scores, logits)


def sigmoid_groups(
    logits: jax.Array,
    bias: jax.Array,
    k: int,
    *,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    normalize: bool = True,
) -> Routing:
    """Chooses experts like DeepSeek-V3's released modelling code (arXiv:2412.19437, section 2.1.2).

    Affinities are sigmoids. Experts are *chosen* by affinity plus bias, from the `top_groups` groups whose two best
    experts have the largest sum. They are *weighted* by the affinity alone, divided by the sum over the chosen ones.
    With one choice the weight is not divided, since it would always be 1. Experts outside of the kept groups are never
    chosen, even where a bias makes every kept one negative.

    Args:
      logits: [T, E].
      bias: [E]; it has no gradient, `update_bias` moves it.
      k: number of choices of a token.
      groups: number of equal groups of the experts, each of E / groups neighbours.
      top_groups: number of groups that a token may choose from.
      scale: multiplies the weights (`routed_scaling_factor`).
      normalize: divide a token's weights by their sum.

    Raises:
      ValueError: sizes that do not fit together.
    """
    _check_groups(k, logits.shape[-1], groups, top_groups)
    logits = logits.astype(jnp.float32)
    affinity = jax.nn.sigmoid(logits)
    biased = lax.stop_gradient(affinity + bias)
    experts = _top(_within_groups(biased, groups, top_groups, 2), k)
    weights = _pick(affinity, experts)
    if normalize and k > 1:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)  # 1e-20 as in DeepSeek's code
    return Routing(experts, weights * scale, affinity / (affinity.sum(-1, keepdims=True) + 1e-20), logits)


def by_domain(domain_ids: jax.Array, num_experts: int) -> Routing:
    """Chooses expert i for the tokens of domain i, with a weight of exactly 1: a hard gate.

    A traced id cannot raise. An id without an expert gets a weight of NaN, so that the loss shows the mistake and no
    expert is trained on it. `check_domains` raises an error before the batch is sent to the device.

    Args:
      domain_ids: integers in [0, num_experts), [T].
    """
    return _hard(domain_ids.astype(jnp.int32), num_experts)


def by_timestep(timesteps: jax.Array, num_experts: int, max_timestep: float, starts: Sequence[int] = ()) -> Routing:
    """Chooses the expert of the range that has the diffusion time t, with a weight of exactly 1: a hard gate.

    Equal ranges give expert floor(t * E / max_timestep), as in ERNIE-ViLG 2.0. eDiff-I (Balaji et al. 2022,
    arXiv:2211.01324, section 4) has an expert for each end of the time, and one for the long range between them. A
    continuous t may equal max_timestep, which belongs to the last range. A t out of range gets a weight of NaN.

    Args:
      timesteps: integers in [0, max_timestep) or reals in [0, max_timestep], [T].
      num_experts: E.
      max_timestep: end of the time range.
      starts: first time of each range but the first one, rising. Empty means equal ranges.
    """
    if starts:
        limit = timesteps < max_timestep if jnp.issubdtype(timesteps.dtype, jnp.integer) else timesteps <= max_timestep
        expert = sum((timesteps >= start).astype(jnp.int32) for start in starts)
        return _hard(jnp.where((timesteps >= 0) & limit, expert, -1), num_experts)
    if jnp.issubdtype(timesteps.dtype, jnp.integer):
        return _hard(timesteps.astype(jnp.int32) * num_experts // int(max_timestep), num_experts)
    timesteps = timesteps.astype(jnp.float32)
    expert = jnp.floor(timesteps * num_experts / max_timestep).astype(jnp.int32)
    return _hard(jnp.where(timesteps == max_timestep, num_experts - 1, expert), num_experts)


def check_domains(ids: np.typing.ArrayLike, num_experts: int) -> None:
    """Checks on the host that each id that you give to `by_domain` has an expert.

    Args:
      ids: numbers of domains, of any shape. They must be 0 to `num_experts` - 1.

    Raises:
      ValueError: an id has no expert.
    """
    ids = np.asarray(ids)
    bad = ids[(ids < 0) | (ids >= num_experts)]
    if bad.size:
        raise ValueError(
            f"domain id {bad.flat[0]} has no expert: {bad.size} of {plural(ids.size, 'id')} are outside of "
            f"0 to {num_experts - 1}. Raise moe.num_experts or renumber the domains"
        )


def update_bias(bias: jax.Array, counts: jax.Array, rate: float) -> jax.Array:
    """Lowers the bias of experts with more than the mean load, and raises the bias of the others.

    This balances without a loss (Wang et al. 2024, arXiv:2408.15664, algorithm 1).

    Args:
      bias: [..., E].
      counts: number of pairs of each expert in the step, summed over microbatches and shards, [..., E].
      rate: size of the change (0.001 in the paper).
    """
    return bias + rate * jnp.sign(counts.mean(-1, keepdims=True) - counts).astype(bias.dtype)


def _check_choices(k: int, num_experts: int) -> None:
    if not 1 <= k <= num_experts:
        raise ValueError(f"k={k} is not between 1 and the number of experts, {num_experts}. Change moe.top_k")


def _check_groups(k: int, E: int, groups: int, top_groups: int) -> None:
    _check_choices(k, E)
    if groups < 1 or E % groups:
        raise ValueError(f"groups={groups} does not divide the {plural(E, 'expert')}. Use a divisor of {E}")
    if not 1 <= top_groups <= groups:
        raise ValueError(f"top_groups={top_groups} is not between 1 and groups={groups}. Choose a number in that range")
    if top_groups * (E // groups) < k:
        raise ValueError(
            f"top_groups={plural(top_groups, 'group')} of {plural(E // groups, 'expert')} cannot give "
            f"k={k}. Raise top_groups or lower k"
        )


def _within_groups(scores: jax.Array, groups: int, top_groups: int, best: int) -> jax.Array:
    """Returns the scores [T, E] with minus infinity outside of the groups whose `best` largest have the largest sum."""
    if top_groups == groups:
        return scores
    grouped = lax.stop_gradient(scores).reshape(-1, groups, scores.shape[-1] // groups)
    sums = lax.top_k(grouped, min(best, grouped.shape[-1]))[0].sum(-1)  # [T, G]
    kept = (_top(sums, top_groups)[..., None] == jnp.arange(groups)).any(1)
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(scores.shape)


def _top(scores: jax.Array, k: int) -> jax.Array:
    """Returns the indices of the k largest, int32 [T, k]; the lower index wins a tie."""
    return lax.top_k(lax.stop_gradient(scores), k)[1].astype(jnp.int32)


def _pick(scores: jax.Array, experts: jax.Array) -> jax.Array:
    """Returns scores[t, experts[t, i]] by comparison: the gradient of a lookup is a scatter, a slow loop on CPU."""
    chosen = experts[..., None] == jnp.arange(scores.shape[-1])
    return jnp.where(chosen, scores[:, None, :], 0.0).sum(-1)


def _hard(expert: jax.Array, num_experts: int) -> Routing:
    """Returns one expert a token, which has all of the score, so that the entropy is 0."""
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
