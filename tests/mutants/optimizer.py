"""Mutants of precision and optimizers."""

from mutants.rows import KERNELS, mistakes

PRECISION = "training/test_precision.py -k 'near_that_in_float32 and gpt2'"

mistakes(
    "precision",
    "kernels/embedding.py",
    PRECISION,
    ("collectives.zeros(table.shape, jnp.float32, dy)", "collectives.zeros(table.shape, table.dtype, dy)"),
    (
        "zeros.at[ids].add(dy.astype(jnp.float32))",
        "zeros.at[ids].set(dy.astype(jnp.float32))",
        KERNELS + " -k embedding",
    ),
)

mistakes(
    "precision",
    "kernels/linear.py",
    PRECISION,
    ("(x.astype(jnp.float32) + b.astype(jnp.float32)).astype(x.dtype)", "x + b.astype(x.dtype)"),
    ("jnp.moveaxis(dy, batch, last)", "jnp.moveaxis(dy, batch[::-1], last)", KERNELS + " -k 'linear and barrier'"),
    (
        "dw = jnp.moveaxis(dw, range(-in_axes, 0), range(in_axes))",
        "dw = dw.reshape(w.shape)",
        KERNELS + " -k 'linear and barrier'",
    ),
)

mistakes(
    "precision",
    "models/layers.py",
    PRECISION,
    (
        'return kernels.add_in_float32(y, params["b_o"]) if "b_o" in params else y',
        'return y + params["b_o"].astype(y.dtype) if "b_o" in params else y',
    ),
    (
        'kernels.add_in_float32(x, kernels.embedding_lookup(params["positions"], positions))',
        'x + params["positions"][positions]',
        {"survives": "the test's 128 rows add up to less than its bar of 2%; the token table is held by it"},
    ),
)

mistakes(
    "precision",
    "sharding/collectives.py",
    "training/test_precision.py -k 'devices_sum and tensor and not accum'",
    ("dx = dy.astype(how.reduce_dtype)", "dx = dy"),
    ("(all_reduce(dx, how.sum_axes).astype(dy.dtype),)", "(dx.astype(dy.dtype),)"),
)

mistakes(
    "precision", "models/layout.py", "training/test_precision.py -k 'devices_sum and tensor and not accum'",
    ('summed = self._grad_sync_axes(p) if p.is_cast or gathered else ()', 'summed = self._grad_sync_axes(p) if gathered else ()', "training/test_precision.py -k 'devices_sum and not fsdp'"),
    ("dtype = self.reduce_dtype if p.is_cast else value.dtype", "dtype = value.dtype",
     "training/test_precision.py -k 'devices_sum and accum'"),
)  # fmt: skip

mistakes(
    "optim", "training/optimizer.py", "training/test_optim.py -k 'warm or schedule or formulas or decay or closed or clipped'",
    ("n = jnp.asarray(count) + 1", "n = jnp.asarray(count)"),
    ("max(round(steps * cfg.decay_fraction), 1)", "max(round((steps - cfg.warmup_steps) * cfg.decay_fraction), 1)"),
    ("max(cfg.warmup_steps, steps - _wsd_decay_steps(cfg, steps))", "steps - _wsd_decay_steps(cfg, steps)"),
    ('mask=map_spec(lambda p: p.is_decayed, spec)', 'mask=map_spec(lambda p: p.kind == "matrix", spec)'),
    ('"adamw": lambda: optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps)', '"adamw": lambda: optax.scale_by_adam(cfg.b2, cfg.b1, cfg.eps)'),
    ('"lion": lambda: optax.scale_by_lion(cfg.b1, cfg.b2)', '"lion": lambda: optax.scale_by_lion(cfg.b2, cfg.b1)'),
    ('"sgd": lambda: optax.trace(cfg.b1) if cfg.b1', '"sgd": lambda: optax.trace(cfg.b1, nesterov=True) if cfg.b1'),
    ("final + (1 - final) * shape", "final + shape"),
)  # fmt: skip

mistakes(
    "optim", "training/optimizer.py", "training/test_optim.py -k 'closed or optaxs or orthogonal'",
    ("NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)", "NEWTON_SCHULZ = (3.4445, -4.7750, 2.3015)"),
    ("NEWTON_SCHULZ_STEPS = 5", "NEWTON_SCHULZ_STEPS = 4"),
    ("0.2 * max(height, width) ** 0.5", "0.2 * min(height, width) ** 0.5"),
    ("lambda m, g: b * m + (1 - b) * g,", "lambda m, g: m,"),
    ("optax.tree.bias_correction(momentum, b, count + 1)", "optax.tree.bias_correction(momentum, b, count)"),
    ("** -0.8", "** -0.5"),
    ("return u / jnp.maximum(1.0, size / threshold), row", "return u, row"),
    ("keepdims=True) + epsilon))\n", "keepdims=True) + epsilon)) ** 2\n"),
    ("u**2).mean(tuple(range(p.batch_axes, g.ndim)), keepdims=True)", "u**2).mean(keepdims=True)"),
)  # fmt: skip

mistakes(
    "optim", "training/optimizer.py", "training/test_finite_updates.py -k settings",
    ("if cfg.eps >= 1e-30 else math.inf", "if cfg.eps >= 0 else math.inf"),
    ("cfg.lr * cfg.weight_decay <= 1", "cfg.lr * cfg.weight_decay >= 0"),
    ("steps * cfg.lr * direction <= 1e36", "steps * cfg.lr <= 1e36"),
)  # fmt: skip

mistakes(
    "optim", "training/whole_matrices.py", "training/test_whole_matrices.py",
    ("gathers = rest * (1 - 1 / splits) < exchange", "gathers = False"),
    ("if size % part == 0)", "if size >= part)"),
    ("Turns(count, splits * replicas * matrices, matrices", "Turns(count, replicas * matrices, matrices"),
)  # fmt: skip
