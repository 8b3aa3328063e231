"""Mutants of layers, the model, losses and parameters."""

from mutants.rows import BY_HAND, GENERATE, STEP, mistakes

ARITHMETIC = "training/test_arithmetic.py"

mistakes(
    "layers", "models/rope.py", BY_HAND,
    ("-(jnp.arange(half, dtype=jnp.float32) / half)", "-(jnp.arange(half, dtype=jnp.float32) / cfg.head_width)"),
    ("return keep + (1 - keep) / factor", "return keep / factor + (1 - keep)"),
    ("turns = scaling.original_max_position * frequencies / (2 * jnp.pi)",
     "turns = scaling.original_max_position * frequencies"),
    ("a * cos - b * sin, b * cos + a * sin", "a * cos + b * sin, b * cos - a * sin"),
    ("(wide[..., ::2], wide[..., 1::2]) if interleaved else", "(wide[..., ::2], wide[..., 1::2]) if True else"),
    ("return frequencies / scaling.factor, 1.0", "return frequencies, 1.0"),
    ("0.1 * math.log(scaling.factor) + 1", "1.0"),
    ("rotated if width == x.shape[-1] else", "rotated if True else"),
)  # fmt: skip

mistakes(
    "layers", "models/layers.py", BY_HAND,
    ('params.get("bias"), eps=cfg.norm_eps', 'params.get("bias"), eps=1e-6'),
    ('x, params["scale"], eps=cfg.norm_eps, unit_offset', 'x, params["scale"], eps=1e-6, unit_offset'),
    ("unit_offset=cfg.norm_unit_offset, implementation", "unit_offset=False, implementation"),
    ("inverse = jax.lax.rsqrt(squares / (heads * x.shape[-1])", "inverse = jax.lax.rsqrt(squares / x.shape[-1]"),
    ("cfg.head_width**-0.5 if cfg.attention_scale is None", "cfg.d_model**-0.5 if cfg.attention_scale is None"),
    ('"softcap": cfg.attention_softcap', '"softcap": cfg.logit_softcap'),
    ('head_norm(cfg, params["k_norm"], k, ctx)', 'head_norm(cfg, params["q_norm"], k, ctx)'),
    ("activate(cfg.activation, gate, ctx) * up", "activate(cfg.activation, up, ctx) * gate"),
    ('approximate=name == "gelu_tanh"', "approximate=False"),
    ("cfg.d_model**0.5, x.dtype", "cfg.vocab**0.5, x.dtype"),
)  # fmt: skip

mistakes(
    "layers", "features/experts.py", BY_HAND,
    ("d_ff=F * cfg.moe.shared_experts", "d_ff=F"),
    ('cfg.moe.router == "sigmoid":\n        spec["balance"]', 'cfg.moe.router == "softmax":\n        spec["balance"]'),
)  # fmt: skip

mistakes(
    "layers", "models/layers.py", BY_HAND,
    ("wide / (1.0 - rate), 0.0", "wide / rate, 0.0", "models/test_model.py -k dropout"),
    ("wide = x.astype(jnp.float32)  # 1 - rate", "wide = x  # 1 - rate", ARITHMETIC + " -k 'dropout and scale'"),
    ("jax.random.bernoulli(k, 1.0 - rate,", "jax.random.bernoulli(k, rate,", "models/test_model.py -k dropout"),
    ("lambda i: jax.random.fold_in(key, i)", "lambda i: jax.random.fold_in(key, 0 * i)", "models/test_model.py -k dropout"),
    ("in_axes=2,\n            std=std / (2 * cfg.num_layers) ** 0.5,", "in_axes=2,\n            std=std,", "models/test_model.py -k spread"),
    ('"w_down": Param((F, D), ("mlp", "embed"), std=std / (2 * cfg.num_layers) ** 0.5',
     '"w_down": Param((F, D), ("mlp", "embed"), std=std', "models/test_model.py -k spread"),
)  # fmt: skip

mistakes(
    "layers", "features/experts.py", BY_HAND,
    ("down = cfg.init_std / (2 * cfg.num_layers) ** 0.5", "down = cfg.init_std / cfg.num_layers**0.5",
     "models/test_model.py -k spread"),
)  # fmt: skip

mistakes(
    "layers", "models/layers.py", BY_HAND,
    ('init="zeros" if cfg.norm_unit_offset else "ones"', 'init="ones" if cfg.norm_unit_offset else "zeros"', "models/test_model.py -k spread"),
)  # fmt: skip

mistakes(
    "layers", "features/experts.py", BY_HAND,
    ('Param((D, E), ("embed", "router"), "router", std=cfg.init_std)',
     'Param((D, E), ("embed", "router"), "matrix", std=cfg.init_std)',
     "models/test_model.py -k cast"),
    ("gate_ids.reshape(-1))", "gate_ids.T.reshape(-1))", BY_HAND + " -k 'domain or timestep'"),
)  # fmt: skip

mistakes(
    "model", "models/blocks.py", BY_HAND,
    ('h = layers.norm(cfg, params["attention_post_norm"], h, ctx)', 'h = layers.norm(cfg, params["mlp_post_norm"], h, ctx)'),
    ('h = layers.norm(cfg, params["mlp_norm"], x, ctx)', 'h = layers.norm(cfg, params["attention_norm"], x, ctx)'),
    ("index * period + i", "index + i", "models/test_dropout.py -k masks"),
)  # fmt: skip

mistakes(
    "model", "models/decoder.py", BY_HAND,
    ("cap * jnp.tanh(scores / cap)", "jnp.tanh(scores / cap)"),
)  # fmt: skip

HEAD_BIAS = "models/test_head_bias.py"

mistakes(
    "model", "models/decoder.py", BY_HAND + " -k gptj",
    ("            kernels.with_one(hidden) if cfg.head_bias else hidden,\n", "            hidden,\n"),
    ("scores = scores + head_bias(cfg, params, ctx).astype(jnp.float32)", "scores = scores"),
    ('pad(Param((V,), ("vocab",), "vector", init="zeros"), 0', 'pad(Param((V,), ("norm",), "vector", init="zeros"), 0', HEAD_BIAS),
    ('params["head"]["bias"]).astype(ctx.dtype)', 'params["head"]["bias"])', HEAD_BIAS),
)  # fmt: skip

mistakes(
    "model", "models/layers.py", BY_HAND + " -k gptj",
    ('    if "b_down" in params:\n', "    if cfg.bias:\n"),
)  # fmt: skip

mistakes(
    "kernels", "kernels/cross_entropy.py", BY_HAND + " -k gptj",
    ("jnp.ones_like(hidden[..., :1])], axis=-1)", "jnp.zeros_like(hidden[..., :1])], axis=-1)"),
)  # fmt: skip

mistakes(
    "generate", "generate/score.py", "generate/test_score.py -m '' -k gptj",
    ("hidden = with_one(hidden) if cfg.head_bias else hidden", "pass"),
)  # fmt: skip

mistakes(
    "model", "models/blocks.py", BY_HAND,
    ('x = x + dropout(cfg, "mlp", h, inputs)', 'x = x + drop("attention", h)', "models/test_dropout.py -k masks"),
)  # fmt: skip

mistakes(
    "model", "models/decoder.py", BY_HAND,
    ("rope = rope_tables(cfg, positions)", "rope = rope_tables(cfg, ctx.layout.token_index(length))",
     GENERATE + " -k 'greedy and gemma2'"),
)  # fmt: skip

mistakes(
    "model", "models/blocks.py", BY_HAND,
    ("a.reshape(-1, period, *a.shape[1:])[:, i]", "a.reshape(period, -1, *a.shape[1:])[i]", "models/test_model.py -k dealt"),
)  # fmt: skip

mistakes(
    "model", "features/adapters.py", BY_HAND,
    ("after_update=Extras().after_update", "after_update=family.extras(cfg).after_update", "moe/test_experts.py -k frozen"),
)  # fmt: skip

mistakes(
    "model", "features/experts.py", BY_HAND,
    ("counts=load, rate=cfg.moe.bias_update_rate", "counts=load, rate=-cfg.moe.bias_update_rate", "moe/test_experts.py -k frozen"),
)  # fmt: skip

mistakes(
    "model", "models/blocks.py", BY_HAND,
    ("return a.reshape(-1, microbatches, *a.shape[1:]).swapaxes(0, 1)",
     "return a.reshape(microbatches, -1, *a.shape[1:])", "models/test_model.py -k dealt"),
)  # fmt: skip

mistakes(
    "model", "models/recomputation.py", "models/test_model.py -k 'several or each_layer'",
    ('ctx.remat == "none" and not ctx.layout.gathers_params', 'ctx.remat == "none"', "sharding/test_collectives.py"),
    ("if not runs_several:", "if True:"),
    ("return run(params.take() if isinstance(params, LayerOfStep) else params, x)", "return run(params, x)"),
    ("return LayerOfStep(self.stacked[name], self.index)", "return LayerOfStep(self.stacked[name], 0)",
     "models/test_model.py -k 'several and units'"),
    ("recomputed = remat(ctx, layer, in_loop=False)", "recomputed = layer"),
    ("recomputed = remat(ctx, layer, in_loop=False)", "recomputed = remat(ctx, layer, in_loop)",
     "models/test_model.py -k in_turn"),
)  # fmt: skip

mistakes(
    "model", "models/recomputation.py", "sharding/test_gradients_at_once.py -k 'barrier and (dense or windows or units)'",
    ('ctx.ops.platform == "gpu" and ctx.layout.gathers_params and', "ctx.layout.gathers_params and"),
    ('ctx.ops.platform == "gpu" and ctx.layout.gathers_params and', 'ctx.ops.platform == "gpu" and'),
    ("and (in_loop or runs_several)", "and runs_several"),
    ("jax.lax.optimization_barrier([leaves[i] for i in together])", "[leaves[i] for i in together]"),
    ("leaves[i] = leaf", "leaves[i] = leaves[together[0]]"),
)  # fmt: skip

mistakes(
    "model", "models/context.py", "sharding/test_gradients_at_once.py -k 'a_turn'",
    ("if index == 0 and count > 1 else self", "if count > 1 else self"),
    ("if index == 0 and count > 1 else self", "if index == 0 else self"),
    ("if index == 0 and count > 1 else self", "if False else self"),
)  # fmt: skip

mistakes(
    "model", "models/blocks.py", "models/test_encoder.py -k behind",
    ("stack.step(cfg, ctx, stack, weights, x, count, of_layer())", "stack.step(cfg, ctx, stack, weights, x, 0, of_layer())"),
    ("for i in range(looped, stack.depth)]", "for i in range(looped - 1, stack.depth - 1)]"),
)  # fmt: skip

mistakes(
    "model", "families/encoder.py", "models/test_labels.py -k mean",
    ("axes = ctx.layout.axes(\"residual\")\n        texts", "axes = ctx.layout.axes(\"sequence\")\n        texts"),
    ("sums[:, :-1] / sums[:, -1:]", "sums[:, :-1] / texts"),
)  # fmt: skip

mistakes(
    "losses", "features/router_losses.py", BY_HAND,
    ("(balance / sequences + z / tokens) / sum(depths.values())", "balance / sequences + z / tokens"),
    ("if stack.counts is None:", "if True:", "moe/test_experts.py -k each_stack"),
    ("batch.get(stack.counts, jnp", "batch.get(None, jnp", "models/test_encoder_experts.py -k padding"),
    ('values["balance_loss"].sum()', 'values["balance_loss"].mean()'),
    ("(balance / sequences + z / tokens)", "(balance + z) / tokens"),
    ("jnp.sum(weights != 0, axis=1", "jnp.sum(weights == weights, axis=1"),
    ('figures["max_over_mean"].max()', 'figures["max_over_mean"].mean()'),
)  # fmt: skip

mistakes(
    "losses", "models/decoder.py", BY_HAND,
    ('segment_ids=batch.get("segment_ids"),', "segment_ids=None,"),
    ('positions = batch.get("positions", ctx.layout.token_index(length))', "positions = ctx.layout.token_index(length)"),
    ("softcap=cfg.logit_softcap", "softcap=cfg.attention_softcap"),
    ('rows = batch.get("rows")', "rows = None", STEP + " -k dropout"),
)  # fmt: skip

mistakes(
    "params", "models/params.py", "models/test_model.py -k 'spread or initial'",
    ("draw(random_key(own, i))", "draw(own)"),
    ("random_key(key, path_of(keys))", 'random_key(key, path_of(keys).split("/")[-1])'),
    ("p.std * jax.random.normal", "p.std**2 * jax.random.normal"),
    ('return self.kind in ("matrix", "table")', 'return self.kind == "matrix"',
     "models/test_model.py -k cast"),
    ('self.stacked + int("experts" in self.axes)', "self.stacked", "training/test_optim.py hf/test_hf.py -k 'muon or lies or Muon'"),
    ('self.kind == "matrix" and "vocab" not in self.axes', 'self.kind == "matrix"', "training/test_optim.py"),
    ("return frozen if trained is None else trained", "return trained if frozen is None else frozen",
     "models/test_lora.py -k split", {"equivalent": "each leaf is in one of the two trees alone"}),
)  # fmt: skip

DROPOUT = "models/test_dropout.py -k masks"

mistakes(
    "model", "models/layer_inputs.py", DROPOUT,
    ("jax.random.key_data(random_key(jax.random.wrap_key_data(self.key), name))", "self.key"),
)  # fmt: skip

mistakes(
    "model", "families/encoder_decoder.py", DROPOUT,
    ('decoder.with_stream_key(ours, "decoder")', 'decoder.with_stream_key(ours, "encoder")'),
)  # fmt: skip

mistakes(
    "model", "families/contrastive.py", DROPOUT,
    ('"tokens": tokens, **shared}, "text")', '"tokens": tokens, **shared}, "image")'),
)  # fmt: skip


mistakes(
    "model",
    "models/decoder.py",
    ARITHMETIC + " -k logits",
    (
        'scores = jnp.einsum("bsd,dv->bsv", hidden, w, preferred_element_type=jnp.float32)',
        'scores = jnp.einsum("bsd,dv->bsv", hidden, w).astype(jnp.float32)',
    ),
)

mistakes(
    "model", "features/width.py", ARITHMETIC + " -k 'step and gpt2'",
    ("kernels.multiply_in_float32(x, 1 / cfg.width_ratio)", "x / cfg.width_ratio"),
)  # fmt: skip

mistakes(
    "model",
    "families/encoder.py",
    ARITHMETIC + " -k logits",
    (
        "head(cfg, params, ctx), preferred_element_type=jnp.float32)",
        "head(cfg, params, ctx), preferred_element_type=jnp.float32).astype(ctx.dtype).astype(jnp.float32)",
    ),
)

mistakes(
    "model",
    "families/encoder_decoder.py",
    ARITHMETIC + " -k 'step and t5'",
    ("x = kernels.multiply_in_float32(x, cfg.head_scale)", "x = (x * cfg.head_scale).astype(x.dtype)"),
)

mistakes(
    "model",
    "models/blocks.py",
    ARITHMETIC + " -k 'step and (t5 or dit)'",
    ("wide = jax.tree.map(lambda a: a.astype(jnp.float32), inputs.side)", "wide = layer_inputs.side"),
)

mistakes(
    "layers", "features/linear_attention.py", BY_HAND + " -k 'next or delta'",
    ('+ params["b_decay"])', ")"),
    ("eps=cfg.norm_eps, implementation=ctx.ops.norm)\n    mixed", "eps=1e-6, implementation=ctx.ops.norm)\n    mixed"),
    ("jax.nn.silu(z.astype(jnp.float32))", "jax.nn.sigmoid(z.astype(jnp.float32))"),
)  # fmt: skip

mistakes(
    "layers", "features/states.py", BY_HAND + " -k 'mamba2 or delta'",
    ("starts = None if same is None else ~same[..., -2]", "starts = None"),
    ("return read.finished(out, convolved)\n\n    def _over", "return out\n\n    def _over"),
    ("(positions[:, 0] == 0)[:, None, None, None]", "(positions[:, 0] < 0)[:, None, None, None]",
     "generate/test_generate.py -m '' -k 'streams and delta_dense'"),
    ("dynamic_slice_in_dim(row, start, tokens))(rows, count)", "dynamic_slice_in_dim(row, start + 1, tokens))(rows, count)",
     "generate/test_prompt_cache.py -m '' -k 'state_needs'"),
)  # fmt: skip

mistakes(
    "layers", "features/state_space.py", BY_HAND + " -k 'mamba2 or hybrid'",
    ('+ params["step_bias"])  # [B, S, H]', ")"),
    ("x * self.step[..., None], self.decay", "x, self.decay"),
    ("StateTokens(c, b, x", "StateTokens(b, c, x"),
    ("mixed * jax.nn.silu(z.astype(jnp.float32))", "mixed * jax.nn.sigmoid(z.astype(jnp.float32))"),
    ("groups = max(x.shape[2] // each, 1)", "groups = 1"),
    ("+ cfg.norm_eps)\n    return (split", "+ 1e-6)\n    return (split"),
)  # fmt: skip

mistakes(
    "layers", "features/xielu.py", "hf/test_parity.py -m '' -k 'logits and apertus'",
    ("jnp.where(wide > 0, rising, falling) + BETA * wide", "jnp.where(wide > 0, rising, falling)"),
    ("(BETA + jax.nn.softplus(negative))", "jax.nn.softplus(negative)"),
)  # fmt: skip

mistakes(
    "layers", "families/token_prediction.py", "models/test_token_prediction.py",
    ("jnp.concatenate([token, hidden], -1)", "jnp.concatenate([hidden, token], -1)"),
    ("for k in range(1, K + 1)]\n    index", "for k in range(K)]\n    index"),
    ('there &= later(batch["segment_ids"], k, ctx) == batch["segment_ids"]', "pass"),
    ("index + k < length", "index + k <= length"),
    ('return layers.norm(cfg, own["module_norm"], h, ctx), values', "return h, values"),
    ("row[:, jnp.argsort(order)[wanted]]", "row[:, wanted]",
     "models/test_token_prediction.py -m '' -k 'every_mesh and mesh3'"),
    ("cfg.mtp.weight * mean_loss", "mean_loss"),
    ("sums / jnp.where(weights == 0, 1, weights)", "sums / weights"),
    ("counts[0], stack) + cfg", "counts[0], stack) + 0 * cfg"),
)  # fmt: skip
