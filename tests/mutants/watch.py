"""Mutants of watched values."""

from mutants.rows import mistakes

WATCH = "training/test_watch.py"

mistakes(
    "watched", "features/watching.py", WATCH + " -k numpy",
    ("2 * relative - 1", "2 * relative"),
    ("jnp.where(is_last, 1.0, 2 - relative)", "2 - relative"),
)  # fmt: skip

mistakes(
    "watched", "sharding/totals.py", WATCH + " -k add_up",
    ("jnp.maximum(x.largest, y.largest)", "x.largest + y.largest"),
    ("every = (*axes, *x.axes)", "every = axes"),
)  # fmt: skip

mistakes(
    "watched", "training/features/watch.py", WATCH + " -k gradients_and",
    ("sums[name] - padding for name", "sums[name] for name"),
)  # fmt: skip

mistakes(
    "watched", "kernels/largest_logit.py", WATCH + " -k mixtral", ("Mask(of_queries, of_keys), table", "Mask(), table")
)
mistakes(
    "watched",
    "models/blocks.py",
    WATCH + " -k mixtral",
    ('ctx.observe("residual/in", x, *RESIDUAL)', 'ctx.observe("residual/in", x + 1, *RESIDUAL)'),
)
mistakes(
    "watched",
    "features/experts.py",
    WATCH + " -k mixtral",
    ("is None else mask.sum(dtype=jnp.float32)", "is None else x.sum(dtype=jnp.float32)"),
)
mistakes("watched", "report/heat_maps.py", "report/test_heat_maps.py", ("finite.min() >= 10", "finite.min() >= 1000"))
