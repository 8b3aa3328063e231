"""Mutants of the diffusion family, its pictures and its sampler, and of averaged parameters."""

from mutants.rows import mistakes

DIT, IMAGES = "models/test_diffusion.py -k 'second or path or sampler'", "data/test_images.py"

mistakes(
    "diffusion", "models/diffusion.py", DIT,
    ("layers.norm(cfg, {\"scale\": ones}, x, ctx) * (1 + scale) + shift", "layers.norm(cfg, {\"scale\": ones}, x, ctx) * scale + shift"),
    ("return x + made[5] * h", "return x + h"),
    ("+ 0.5) / cfg.moe.max_timestep", ") / cfg.moe.max_timestep"),
    ("return cls(a, b, -b, a)", "return cls(a, b, b, a)"),
    ("jax.nn.silu(h + named)", "h + named"),
    ("(weights * squares).sum()", "squares.sum()"),
    ("6.0 * modulation + 2 * (4 * time + 6 * out)", "6.0 * modulation + 4 * time + 6 * out", "planner/test_aot.py -k matmuls"),
)  # fmt: skip

mistakes(
    "diffusion", "generate/pictures.py", DIT,
    ("np.linspace(last, 0, steps)", "np.linspace(last, 1, steps)"),
    ("without + sample.guidance * (with_class - without)", "with_class + sample.guidance * (with_class - without)"),
    ("jnp.append(diffusion.time_of(cfg, levels[1:]), 0.0)", "diffusion.time_of(cfg, levels)"),
)  # fmt: skip

mistakes(
    "diffusion", "data/images.py", IMAGES,
    ("reshape(B, H // size, size, W // size, size, C).swapaxes(2, 3)", "reshape(B, H // size, size, W // size, size, C).swapaxes(2, 4)"),
    ("rng.random() for rng in draws]) < self.class_dropout", "rng.random() for rng in draws]) > self.class_dropout"),
    ("numbers_B.astype(np.uint64) * np.uint64(_GOLDEN)", "numbers_B.astype(np.uint64)"),
    ("np.random.default_rng([self.seed, number, _STREAM])", "np.random.default_rng([self.seed, _STREAM])"),
    ("- 2 * np.sqrt(product.clip(0)).sum()", "- np.sqrt(product.clip(0)).sum()"),
    ("(pixels.reshape(*pixels.shape[:3], -1) * (2 / limit) - 1)", "(pixels.reshape(*pixels.shape[:3], -1) * (1 / limit))"),
)  # fmt: skip

mistakes(
    "diffusion", "training/optimizer.py", "training/test_optim.py -k averages",
    ("jnp.minimum(decay, (1 + n) / (10 + n))", "jnp.minimum(decay, n / (10 + n))"),
    ("average = jax.tree.map(lambda old, value: old + (1 - kept) * (value - old), state.average, new)",
     "average = jax.tree.map(lambda old, value: old + (1 - kept) * (value - old), state.average, values)"),
)  # fmt: skip
