"""Mutants of pruning."""

from mutants.rows import mistakes

SPARSITY, PRUNE = "compress/test_sparsity.py", "compress/test_prune.py"
STATISTICS = "compress/test_calibrate.py -k 'of_the_inputs and llama3'"

mistakes(
    "compress", "compress/sparsity.py", SPARSITY,
    ("left = left - errors @ rows", "left = left + errors @ rows"),
    ("scores = jax.lax.dynamic_slice_in_dim((left / diagonal) ** 2", "scores = jax.lax.dynamic_slice_in_dim(left**2"),
)  # fmt: skip

mistakes(
    "compress", "compress/prune.py", PRUNE,
    ("largest(groups.sum(-1), sizes.kv_heads)", "largest(groups.max(-1), sizes.kv_heads)"),
    ("out = min(losses", "out = max(losses"),
)  # fmt: skip

mistakes(
    "compress", "compress/importance.py", PRUNE,
    ("neurons[group] = norms * np.linalg.norm(w, axis=-1)", "neurons[group] = norms"),
)  # fmt: skip

mistakes(
    "compress", "compress/calibrate.py", STATISTICS,
    ("norms=jnp.sqrt(squares).sum(0)", "norms=squares.sum(0)"),
)  # fmt: skip

mistakes(
    "models", "models/surgery.py", PRUNE,
    ("factor = (cfg.d_model / len(kept.channels)) ** 0.5", "factor = cfg.d_model / len(kept.channels)"),
)  # fmt: skip

mistakes(
    "optim", "training/optimizer.py", "training/test_optim.py -k zeros",
    ("inner.update(masked(values, grads), state, values)", "inner.update(grads, state, values)"),
    ("return masked(values, changes), state", "return changes, state"),
)  # fmt: skip
