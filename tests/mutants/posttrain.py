"""Mutants of the losses after pretraining."""

from mutants.rows import mistakes

mistakes(
    "posttrain", "posttrain/losses.py", "posttrain/test_losses.py",
    ("return -(1 - label_smoothing) * jax.nn.log_sigmoid(logits) - label_smoothing * jax.nn.log_sigmoid(-logits)",
     "return -(1 - label_smoothing) * jax.nn.log_sigmoid(logits) + label_smoothing * jax.nn.log_sigmoid(-logits)"),
    ("return (right - swapped) / (1 - 2 * label_smoothing)", "return right - swapped"),
    ("(chosen - ref_chosen) / chosen_tokens - (rejected - ref_rejected) / rejected_tokens",
     "(chosen - ref_chosen) / rejected_tokens - (rejected - ref_rejected) / chosen_tokens"),
    ("1 / (2 * beta)", "beta / 2"),
    ("jax.nn.relu(1 - beta *", "jax.nn.relu(beta - beta *"),
    ("-jax.nn.log_sigmoid(beta * difference - gamma)", "-jax.nn.log_sigmoid(beta * (difference - gamma))"),
    ("jnp.where(wanted, reward, -reward)", "jnp.where(wanted, reward, reward)"),
    ("jnp.where(wanted, wanted_weight, unwanted_weight)", "jnp.where(wanted, unwanted_weight, wanted_weight)"),
    ("jnp.maximum(log_ratios.mean(), 0.0)", "log_ratios.mean()"),
    ("chosen - rejected - margin", "chosen - rejected + margin"),
    ("jnp.where(spread, rewards - rewards.mean(1, keepdims=True), 0.0)", "rewards - rewards.mean(1, keepdims=True)"),
    ("max(rewards.shape[1] - 1, 1)", "rewards.shape[1]"),
    ("/ (G - 1)", "/ G"),
    ("(lengths - (longest - buffer)) / buffer, 0.0)", "(lengths - longest) / buffer, 0.0)"),
    ("jnp.clip(ratio, 1 - low, 1 + high)", "jnp.clip(ratio, 1 - high, 1 + low)"),
    ("return -jnp.minimum(ratio * advantages", "return -jnp.maximum(ratio * advantages"),
    ("weight = jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_probs - old_log_probs), high))",
     "weight = jnp.minimum(jnp.exp(log_probs - old_log_probs), high)"),
    ("return jnp.expm1(x) - x", "return jnp.exp(x) - 1 - x"),
    ("jnp.exp(old_log_probs - sampler_log_probs), limit)", "jnp.exp(sampler_log_probs - old_log_probs), limit)"),
    ("jnp.minimum(log_prob, -jnp.finfo(log_prob.dtype).eps)", "log_prob"),
    ("(jnp.maximum(mask.sum(1, keepdims=True), 1) * mask.shape[0])", "jnp.maximum(mask.sum(), 1)"),
)  # fmt: skip
