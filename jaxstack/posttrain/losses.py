"""The losses of preferences, reward models and policy gradients, as functions of log-probabilities.

Log-probabilities are in nats. `chosen` and `rejected` [pairs] are sums over the tokens of a completion, under the model
that learns; `ref_chosen` and `ref_rejected` are the same sums under a frozen reference. Preference losses return one
number per pair, and the loss of a batch is their mean.

Policy gradients read one log-probability per token [rows, T] and an advantage per row [rows]. They return the loss of
each token; `per_completion`, `per_token` and `per_longest` are the weights by which algorithms add these losses up.

No function needs to know how a batch is split over devices: all of them work on each pair, group or token alone.
"""

from typing import Literal

import jax
import jax.numpy as jnp


def dpo(
    chosen: jax.Array,
    rejected: jax.Array,
    ref_chosen: jax.Array,
    ref_rejected: jax.Array,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> jax.Array:
    """Returns the loss of direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290, equation 7).

    Args:
      label_smoothing: assumed share of pairs whose labels are swapped; the loss is the expected one, given this share
        (conservative DPO). See `robust` for an unbiased estimate.
    """
    logits = beta * _margin(chosen, rejected, ref_chosen, ref_rejected)
    return -(1 - label_smoothing) * jax.nn.log_sigmoid(logits) - label_smoothing * jax.nn.log_sigmoid(-logits)


def robust(
    chosen: jax.Array,
    rejected: jax.Array,
    ref_chosen: jax.Array,
    ref_rejected: jax.Array,
    *,
    beta: float,
    label_smoothing: float,
) -> jax.Array:
    """Returns the loss of robust DPO (Ray Chowdhury et al. 2024, arXiv:2403.00409).

    If labels are swapped with this probability, the expected loss is DPO's loss of the true labels.

    Args:
      label_smoothing: label smoothing from 0 to below 0.5.
    """
    logits = beta * _margin(chosen, rejected, ref_chosen, ref_rejected)
    right = -(1 - label_smoothing) * jax.nn.log_sigmoid(logits)
    swapped = -label_smoothing * jax.nn.log_sigmoid(-logits)
    return (right - swapped) / (1 - 2 * label_smoothing)


def ipo(
    chosen: jax.Array,
    rejected: jax.Array,
    ref_chosen: jax.Array,
    ref_rejected: jax.Array,
    chosen_tokens: jax.Array,
    rejected_tokens: jax.Array,
    beta: float,
) -> jax.Array:
    """Returns the loss of identity preference optimisation (Azar et al. 2023, arXiv:2310.12036, equation 17).

    Log-probabilities are means over the tokens of a completion, as the paper's authors recommend.

    Args:
      chosen_tokens, rejected_tokens: tokens of the completions [pairs].
    """
    difference = (chosen - ref_chosen) / chosen_tokens - (rejected - ref_rejected) / rejected_tokens
    return jnp.square(difference - 1 / (2 * beta))


def hinge(
    chosen: jax.Array, rejected: jax.Array, ref_chosen: jax.Array, ref_rejected: jax.Array, *, beta: float
) -> jax.Array:
    """Returns the hinge loss of SLiC (Zhao et al. 2023, arXiv:2305.10425), on rewards relative to the reference."""
    return jax.nn.relu(1 - beta * _margin(chosen, rejected, ref_chosen, ref_rejected))


def orpo(
    chosen: jax.Array, rejected: jax.Array, chosen_tokens: jax.Array, rejected_tokens: jax.Array, *, beta: float
) -> jax.Array:
    """Returns the odds ratio's part of ORPO (Hong et al. 2024, arXiv:2403.07691, equation 7), which has no reference.

    The whole loss also has the negative log-likelihood of the chosen completion, -chosen / chosen_tokens.
    """
    ratio = _log_odds(chosen / chosen_tokens) - _log_odds(rejected / rejected_tokens)
    return -beta * jax.nn.log_sigmoid(ratio)


def simpo(
    chosen: jax.Array,
    rejected: jax.Array,
    chosen_tokens: jax.Array,
    rejected_tokens: jax.Array,
    beta: float,
    gamma: float,
) -> jax.Array:
    """Returns the loss of SimPO (Meng et al. 2024, arXiv:2405.14734, equation 6), which has no reference.

    Args:
      gamma: the margin by which the chosen completion should win.
    """
    difference = chosen / chosen_tokens - rejected / rejected_tokens
    return -jax.nn.log_sigmoid(beta * difference - gamma)


def kto(
    log_probs: jax.Array,
    ref_log_probs: jax.Array,
    wanted: jax.Array,
    divergence: jax.Array,
    *,
    beta: float,
    wanted_weight: float = 1.0,
    unwanted_weight: float = 1.0,
) -> jax.Array:
    """Returns the loss of KTO for completions without a partner (Ethayarajh et al. 2024, arXiv:2402.01306).

    Args:
      log_probs, ref_log_probs: sums over the tokens of each completion [rows].
      wanted: whether each completion is wanted, bool [rows].
      divergence: divergence from `kto_divergence`, a scalar without gradient.
    """
    reward = log_probs - ref_log_probs - jax.lax.stop_gradient(divergence)
    value = jax.nn.sigmoid(beta * jnp.where(wanted, reward, -reward))
    return jnp.where(wanted, wanted_weight, unwanted_weight) * (1 - value)


def kto_divergence(log_ratios: jax.Array) -> jax.Array:
    """Returns KTO's reference point, an estimate of the divergence of the model from the reference; no gradient.

    Args:
      log_ratios: log-probability under the model minus under the reference, of completions [rows] that belong to the
        prompts of other rows.
    """
    return jax.lax.stop_gradient(jnp.maximum(log_ratios.mean(), 0.0))


def reward_pair(
    chosen: jax.Array, rejected: jax.Array, margin: jax.Array | float = 0.0, *, center: float = 0.0
) -> jax.Array:
    """Returns the loss of a reward model for pairs (Touvron et al. 2023, arXiv:2307.09288, equation 2).

    Args:
      chosen, rejected: scores [pairs].
      margin: by how much the chosen completion should win [pairs].
      center: factor of the squared sum of both scores, which keeps scores near zero (Eisenstein et al. 2023,
        arXiv:2312.09244).
    """
    return -jax.nn.log_sigmoid(chosen - rejected - margin) + center * jnp.square(chosen + rejected)


def group_advantages(rewards: jax.Array, *, scale: bool, epsilon: float = 1e-6) -> jax.Array:
    """Returns the advantages of completions over the mean of their group [prompts, G].

    With `scale` they are divided by the group's standard deviation plus `epsilon`: GRPO (Shao et al. 2024,
    arXiv:2402.03300, section 4.1.2). Without, they are the advantages of Dr. GRPO (Liu et al. 2025, arXiv:2503.20783).
    A group whose rewards are all equal has advantages of exactly 0.

    Args:
      rewards: G completions of each prompt [prompts, G].
      epsilon: added to the standard deviation, which is the one of a sample (it divides by G - 1).
    """
    spread = rewards.max(1, keepdims=True) > rewards.min(1, keepdims=True)  # rounding must not be amplified
    centred = jnp.where(spread, rewards - rewards.mean(1, keepdims=True), 0.0)
    if not scale:
        return centred
    variance = jnp.square(centred).sum(1, keepdims=True) / max(rewards.shape[1] - 1, 1)
    return centred / (jnp.sqrt(variance) + epsilon)


def rloo_advantages(rewards: jax.Array) -> jax.Array:
    """Returns rewards minus the mean reward of the other completions of the group (Ahmadian et al. 2024,
    arXiv:2402.14740) [prompts, G]; G is at least 2."""
    G = rewards.shape[1]
    return rewards - (rewards.sum(1, keepdims=True) - rewards) / (G - 1)


def overlong_penalty(lengths: jax.Array, *, longest: int, buffer: int) -> jax.Array:
    """Returns the penalty of DAPO for long completions [rows] (Yu et al. 2025, arXiv:2503.14476, equation 13).

    It falls from 0 to -1 over the last `buffer` tokens before `longest`.
    """
    return jnp.minimum(-(lengths - (longest - buffer)) / buffer, 0.0)


def clipped(
    log_probs: jax.Array, old_log_probs: jax.Array, advantages: jax.Array, *, low: float, high: float
) -> jax.Array:
    """Returns the clipped loss of each token [rows, T], of PPO, GRPO, Dr. GRPO and DAPO.

    Ratios are clipped to [1 - low, 1 + high]. GRPO (arXiv:2402.03300, equation 3) has low = high = 0.2, and DAPO
    (arXiv:2503.14476, equation 8) has 0.2 and 0.28.
    """
    ratio = jnp.exp(log_probs - old_log_probs)
    return _pessimistic(ratio, advantages[:, None], low, high)


def gspo(
    log_probs: jax.Array, old_log_probs: jax.Array, advantages: jax.Array, mask: jax.Array, *, low: float, high: float
) -> jax.Array:
    """Returns the clipped loss of each completion [rows] of GSPO (Zheng et al. 2025, arXiv:2507.18071, equation 5).

    The ratio is of a whole completion: exp of the mean over its tokens.

    Args:
      mask: 1 for tokens of the completion, otherwise 0 [rows, T].
    """
    mean = ((log_probs - old_log_probs) * mask).sum(1) / jnp.maximum(mask.sum(1), 1)
    return _pessimistic(jnp.exp(mean), advantages, low, high)


def cispo(log_probs: jax.Array, old_log_probs: jax.Array, advantages: jax.Array, *, high: float) -> jax.Array:
    """Returns the loss of each token [rows, T] of CISPO (MiniMax 2025, arXiv:2506.13585, equation 4).

    The ratio is a weight without gradient, and at most `high`, so that each token has a gradient.
    """
    weight = jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_probs - old_log_probs), high))
    return -weight * advantages[:, None] * log_probs


def reinforce(log_probs: jax.Array, advantages: jax.Array) -> jax.Array:
    """Returns the loss of each token [rows, T] of REINFORCE (Williams 1992), which RLOO uses with its advantages."""
    return -advantages[:, None] * log_probs


def divergence(log_probs: jax.Array, ref_log_probs: jax.Array, kind: Literal["k1", "k2", "k3"]) -> jax.Array:
    """Returns an estimate for each token of the divergence from the reference (Schulman 2020, "Approximating KL").

    `k1` is unbiased and may be negative, `k2` is biased with little variance, `k3` is unbiased and at least 0.
    """
    x = ref_log_probs - log_probs
    match kind:
        case "k1":
            return -x
        case "k2":
            return jnp.square(x) / 2
        case "k3":
            return jnp.expm1(x) - x


def truncated_importance(old_log_probs: jax.Array, sampler_log_probs: jax.Array, *, limit: float) -> jax.Array:
    """Returns a weight for each token, for samplers whose probabilities differ from the trainer's; no gradient.

    It is the ratio of both probabilities, and at most `limit` (Ionides 2008, "Truncated importance sampling").

    Args:
      old_log_probs: log-probabilities of the trainer, with the parameters that have sampled.
    """
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(old_log_probs - sampler_log_probs), limit))


def per_completion(mask: jax.Array) -> jax.Array:
    """Returns the weight of each token [rows, T] in GRPO: the mean over a completion, then over completions.

    Completions without a token count as completions. The weights of all tokens add up to 1 otherwise.
    """
    return mask / (jnp.maximum(mask.sum(1, keepdims=True), 1) * mask.shape[0])


def per_token(mask: jax.Array) -> jax.Array:
    """Returns the weight of each token [rows, T] in DAPO: the mean over all tokens of the batch."""
    return mask / jnp.maximum(mask.sum(), 1)


def per_longest(mask: jax.Array, longest: int) -> jax.Array:
    """Returns the weight of each token [rows, T] in Dr. GRPO: the sum over tokens, divided by rows * `longest`."""
    return mask / (mask.shape[0] * longest)


def _margin(chosen: jax.Array, rejected: jax.Array, ref_chosen: jax.Array, ref_rejected: jax.Array) -> jax.Array:
    """Returns by how much the log ratio of the chosen completion exceeds the log ratio of the rejected one."""
    return (chosen - ref_chosen) - (rejected - ref_rejected)


def _log_odds(log_prob: jax.Array) -> jax.Array:
    """Returns log(p / (1 - p)). A probability that rounds to 1 counts as the largest one below, with gradient 0."""
    log_prob = jnp.minimum(log_prob, -jnp.finfo(log_prob.dtype).eps)
    return log_prob - jnp.log(-jnp.expm1(log_prob))


def _pessimistic(ratio: jax.Array, advantages: jax.Array, low: float, high: float) -> jax.Array:
    """Returns the larger of the losses with and without clipping (Schulman et al. 2017, arXiv:1707.06347)."""
    return -jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - low, 1 + high) * advantages)
