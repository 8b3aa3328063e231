"""Mutants of the diffusion family, its pictures and its sampler, and of averaged parameters."""

from mutants.rows import mistakes

DIT, IMAGES = "models/test_diffusion.py -k 'second or path or sampler'", "data/test_images.py"

mistakes(
    "diffusion", "families/diffusion.py", DIT,
    ("(normal, 1 + scale.astype(jnp.float32))", "(normal, scale.astype(jnp.float32))"),
    ("x = x + kernels.multiply_in_float32(h, mlp_gate)", "x = x + h"),
    ("{\"condition\": jax.nn.silu(h)}", "{\"condition\": h}"),
    ("(weights * squares).sum()", "squares.sum()"),
    ("6.0 * modulation + 2 * (4 * time + 6 * out)", "6.0 * modulation + 4 * time + 6 * out", "planner/test_aot.py -k matmuls"),
    ("checkpoint_name(x + h, \"residual\")", "checkpoint_name(gate * h, \"residual\")"),
    ("layers.norm(cfg, params[\"cross_norm\"], x, ctx)", "modulated(cfg, x, shift, scale, ctx)"),
    ("layers.norm(cfg, params[\"text_norm\"], x, ctx), \"heads\"", "x, \"heads\""),
    ("words * (text_len / seq_len - 1)", "words * (text_len / seq_len)", "planner/test_aot.py -k 'texts and dit_text'"),
    ("cfg.num_layers * text_len\n", "cfg.num_layers * seq_len\n", "planner/test_aot.py -k 'texts and dit_text'"),
)  # fmt: skip

mistakes(
    "diffusion", "families/noise_path.py", DIT,
    ("+ 0.5) / cfg.moe.max_timestep", ") / cfg.moe.max_timestep"),
    ("return cls(a, b, -b, a)", "return cls(a, b, b, a)"),
)  # fmt: skip

mistakes(
    "diffusion", "data/captions.py", "data/test_captions.py",
    ("np.where(dropped_B, 1, end_B)", "np.where(dropped_B, 0, end_B)"),
    ("(place <= last_B)", "(place < last_B)"),
    ("cls(text_condition(arrays), text_condition(arrays, True))", "cls(text_condition(arrays), text_condition(arrays))"),
)  # fmt: skip

mistakes(
    "diffusion", "generate/pictures.py", DIT,
    ("np.linspace(last, 0, steps)", "np.linspace(last, 1, steps)"),
    ("without + sample.guidance * (with_it - without)", "with_it + sample.guidance * (with_it - without)"),
    ("jnp.append(time_of(cfg, levels[1:]), 0.0)", "time_of(cfg, levels)"),
)  # fmt: skip

mistakes(
    "diffusion", "data/images.py", IMAGES,
    ("reshape(B, H // size, size, W // size, size, C).swapaxes(2, 3)", "reshape(B, H // size, size, W // size, size, C).swapaxes(2, 4)"),
    ("rng.random() for rng in draws]) < self.class_dropout", "rng.random() for rng in draws]) > self.class_dropout"),
    ("numbers_B.astype(np.uint64) * np.uint64(_GOLDEN)", "numbers_B.astype(np.uint64)"),
    ("np.random.default_rng([self.seed, number, _STREAM])", "np.random.default_rng([self.seed, _STREAM])"),
    ("- 2 * np.sqrt(product.clip(0)).sum()", "- np.sqrt(product.clip(0)).sum()"),
    ("picture * (2 / limit) - 1", "picture * (1 / limit)"),
    ("if width * height > MOST_PIXELS", "if width > MOST_PIXELS"),
)  # fmt: skip

mistakes(
    "diffusion", "training/optimizer.py", "training/test_optim.py -k averages",
    ("jnp.minimum(decay, (1 + n) / (10 + n))", "jnp.minimum(decay, n / (10 + n))"),
    ("average = jax.tree.map(lambda old, value: old + (1 - kept) * (value - old), state.average, new)",
     "average = jax.tree.map(lambda old, value: old + (1 - kept) * (value - old), state.average, values)"),
)  # fmt: skip

mistakes(
    "diffusion",
    "families/diffusion.py",
    "training/test_arithmetic.py -k '(step and dit) or modulations'",
    ("x + kernels.multiply_in_float32(h, gate)", "x + gate * h"),
    ("kernels.multiply_in_float32(normal, 1 + scale.astype(jnp.float32))", "normal * (1 + scale)"),
)

OWN = "data/test_own_captions.py"

mistakes(
    "diffusion", "data/own_captions.py", OWN,
    ("1 + np.flatnonzero(", "np.flatnonzero("),
    ("rf\"(?<!\\w){re.escape(word)}(?!\\w)\", text, re.IGNORECASE", "rf\"(?<!\\w){re.escape(word)}(?!\\w)\", text"),
    ("known.update(words)", "known.intersection_update(words)"),
    ("(_CANVAS - len(shape)) * (place % 2)", "(_CANVAS - len(shape)) * (place // 2)"),
)  # fmt: skip

mistakes(
    "diffusion", "data/captions.py", OWN,
    ("np.where(place < last_B, texts[\"key_tokens\"], 0)", "texts[\"key_tokens\"]"),
    ("(width >= left) & (width < right)", "(width >= left) & (width <= right)"),
    ("1 + self.salient_weight * to_patches", "self.salient_weight * to_patches"),
)  # fmt: skip

mistakes(
    "diffusion", "families/diffusion.py", "models/test_diffusion.py -k 'second and dit_text'",
    ("key_scale=1 + cfg.diffusion.key_weight * keys", "key_scale=cfg.diffusion.key_weight * keys"),
)  # fmt: skip
