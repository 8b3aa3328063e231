"""The mistakes that tests/mutations.py makes, room by room: a file, tests, and pairs of old and new text.

Each is of the kind that a human makes: a swapped argument, an off-by-one, a wrong axis, sign, dtype or constant, a
missing sum or check, a stale value. The old text must occur exactly once; tests/test_mutants.py checks that.
"""

from typing import Any

from mutations import Mutant

MUTANTS: list[Mutant] = []


def mistakes(room: str, file: str, tests: str, *pairs: tuple[Any, ...]) -> None:
    """Adds mutants of one file. A pair may be followed by other tests, and by what explains that a mutant passes."""
    for old, new, *rest in pairs:
        own = next((r for r in rest if isinstance(r, str)), tests)
        why = next((r for r in rest if isinstance(r, dict)), {})
        MUTANTS.append(Mutant(room, f"jaxstack/{file}", old, new, own, **why))


BY_HAND = "models/test_by_hand.py"
STEP = "training/test_step.py"
MOE = "moe/test_moe.py"
KERNELS = "kernels/test_kernels.py"
MESHES = "test_meshes.py -k 'llama3 and dropout'"
PIPELINE = "pipeline/test_pipeline.py -k 'gives and llama3'"
CHECKS = "config/test_config_checks.py"
DATA = "data/test_data.py data/test_windows.py"
HF = "hf/test_hf.py"
GENERATE = "generate/test_generate.py"

mistakes(
    "layers", "models/layers.py", BY_HAND,
    ('params.get("bias"), eps=cfg.norm_eps', 'params.get("bias"), eps=1e-6'),
    ('x, params["scale"], eps=cfg.norm_eps, unit_offset', 'x, params["scale"], eps=1e-6, unit_offset'),
    ("unit_offset=cfg.norm_unit_offset, implementation", "unit_offset=False, implementation"),
    ("-(jnp.arange(half, dtype=jnp.float32) / half)", "-(jnp.arange(half, dtype=jnp.float32) / cfg.head_width)"),
    ("frequencies * (keep + (1 - keep) / scaling.factor)", "frequencies * (keep / scaling.factor + (1 - keep))"),
    ("turns = scaling.original_max_position * frequencies / (2 * jnp.pi)",
     "turns = scaling.original_max_position * frequencies"),
    ("[a * cos - b * sin, b * cos + a * sin]", "[a * cos + b * sin, b * cos - a * sin]"),
    ("a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)",
     "a, b = x.astype(jnp.float32)[..., ::2], x.astype(jnp.float32)[..., 1::2]"),
    ("cfg.head_width**-0.5 if cfg.attention_scale is None", "cfg.d_model**-0.5 if cfg.attention_scale is None"),
    ('"softcap": cfg.attention_softcap', '"softcap": cfg.logit_softcap'),
    ('norm(cfg, params["k_norm"], k, ctx, "rms")', 'norm(cfg, params["q_norm"], k, ctx, "rms")'),
    ("activate(cfg.activation, gate, ctx) * up", "activate(cfg.activation, up, ctx) * gate"),
    ("jax.nn.gelu(x, approximate=True)", "jax.nn.gelu(x, approximate=False)"),
    ("cfg.d_model**0.5, x.dtype", "cfg.vocab**0.5, x.dtype"),
)  # fmt: skip

mistakes(
    "layers", "models/moe_layer.py", BY_HAND,
    ("d_ff=F * cfg.moe.shared_experts", "d_ff=F"),
    ('cfg.moe.router == "sigmoid":\n        spec["balance"]', 'cfg.moe.router == "softmax":\n        spec["balance"]'),
)  # fmt: skip

mistakes(
    "layers", "models/layers.py", BY_HAND,
    ("x / (1.0 - rate), 0.0", "x / rate, 0.0", "models/test_model.py -k dropout"),
    ("jax.random.bernoulli(k, 1.0 - rate,", "jax.random.bernoulli(k, rate,", "models/test_model.py -k dropout"),
    ("lambda i: jax.random.fold_in(key, i)", "lambda i: jax.random.fold_in(key, 0 * i)", "models/test_model.py -k dropout"),
    ("in_axes=2,\n            std=std / (2 * cfg.num_layers) ** 0.5,", "in_axes=2,\n            std=std,", "models/test_model.py -k spread"),
    ('"w_down": Param((F, D), ("mlp", "embed"), std=std / (2 * cfg.num_layers) ** 0.5',
     '"w_down": Param((F, D), ("mlp", "embed"), std=std', "models/test_model.py -k spread"),
)  # fmt: skip

mistakes(
    "layers", "models/moe_layer.py", BY_HAND,
    ("down = cfg.init_std / (2 * cfg.num_layers) ** 0.5", "down = cfg.init_std / cfg.num_layers**0.5",
     "models/test_model.py -k spread"),
)  # fmt: skip

mistakes(
    "layers", "models/layers.py", BY_HAND,
    ('init="zeros" if unit_offset else "ones"', 'init="ones" if unit_offset else "zeros"', "models/test_model.py -k spread"),
)  # fmt: skip

mistakes(
    "layers", "models/moe_layer.py", BY_HAND,
    ('Param((D, E), ("embed", "router"), "router", std=cfg.init_std)',
     'Param((D, E), ("embed", "router"), "matrix", std=cfg.init_std)',
     "models/test_model.py -k cast"),
    ("gate_ids.reshape(-1))", "gate_ids.T.reshape(-1))", BY_HAND + " -k 'domain or timestep'"),
)  # fmt: skip

mistakes(
    "model", "models/blocks.py", BY_HAND,
    ('h = layers.norm(cfg, params["attention_post_norm"], h, ctx)', 'h = layers.norm(cfg, params["mlp_post_norm"], h, ctx)'),
    ('h = layers.norm(cfg, params["mlp_norm"], x, ctx)', 'h = layers.norm(cfg, params["attention_norm"], x, ctx)'),
)  # fmt: skip

mistakes(
    "model", "models/decoder.py", BY_HAND,
    ("cap * jnp.tanh(scores / cap)", "jnp.tanh(scores / cap)"),
)  # fmt: skip

mistakes(
    "model", "models/blocks.py", BY_HAND,
    ("layers.dropout(keys[1], cfg.dropout, h", "layers.dropout(keys[0], cfg.dropout, h", "models/test_model.py -k mask"),
)  # fmt: skip

mistakes(
    "model", "models/decoder.py", BY_HAND,
    ("index * len(cfg.windows) + i", "index + i", "models/test_model.py -k mask"),
    ("rope = layers.rope_tables(cfg, positions)", "rope = layers.rope_tables(cfg, ctx.token_index(length))",
     GENERATE + " -k 'greedy and gemma2'"),
)  # fmt: skip

mistakes(
    "model", "models/blocks.py", BY_HAND,
    ("a.reshape(-1, period, *a.shape[1:])[:, i]", "a.reshape(period, -1, *a.shape[1:])[i]", "models/test_model.py -k dealt"),
)  # fmt: skip

mistakes(
    "model", "models/decoder.py", BY_HAND,
    ('cfg.moe.router != "sigmoid" or cfg.lora.rank:', 'cfg.moe.router != "sigmoid":', "moe/test_experts.py -k frozen"),
    ('ctx.to_stage_order(aux["load"]), cfg.moe.bias_update_rate', 'ctx.to_stage_order(aux["load"]), -cfg.moe.bias_update_rate', "moe/test_experts.py -k frozen"),
)  # fmt: skip

mistakes(
    "model", "models/blocks.py", BY_HAND,
    ("return a.reshape(-1, microbatches, *a.shape[1:]).swapaxes(0, 1)",
     "return a.reshape(microbatches, -1, *a.shape[1:])", "models/test_model.py -k dealt"),
    ('ctx.remat == "none" and not ctx.gathers_params', 'ctx.remat == "none"', "sharding/test_collectives.py"),
)  # fmt: skip

mistakes(
    "losses", "training/losses.py", BY_HAND,
    ("(balance / sequences + z / tokens) / cfg.num_layers", "balance / sequences + z / tokens"),
    ('aux["balance_loss"].sum() if', 'aux["balance_loss"].mean() if'),
    ("(balance / sequences + z / tokens)", "(balance + z) / tokens"),
    ("each = jnp.sum(weights != 0, axis=1", "each = jnp.sum(weights == weights, axis=1"),
    ('figures["max_over_mean"].max()', 'figures["max_over_mean"].mean()'),
)  # fmt: skip

mistakes(
    "losses", "models/decoder.py", BY_HAND,
    ('segment_ids=batch.get("segment_ids"),', "segment_ids=None,"),
    ('positions = batch.get("positions", ctx.token_index(length))', "positions = ctx.token_index(length)"),
    ("softcap=cfg.logit_softcap", "softcap=cfg.attention_softcap"),
    ('rows = batch.get("rows")', "rows = None", STEP + " -k dropout"),
)  # fmt: skip

mistakes(
    "params", "models/params.py", "models/test_model.py -k 'spread or initial'",
    ("draw(jax.random.fold_in(own, i))", "draw(own)"),
    ("zlib.crc32(path_of(keys).encode())", 'zlib.crc32(path_of(keys).split("/")[-1].encode())'),
    ("p.std * jax.random.normal", "p.std**2 * jax.random.normal"),
    ('return self.kind in ("matrix", "table")', 'return self.kind == "matrix"',
     "models/test_model.py -k cast"),
    ('self.stacked + int("experts" in self.axes)', "self.stacked", "training/test_optim.py hf/test_hf.py -k 'muon or lies or Muon'"),
    ('self.kind == "matrix" and "vocab" not in self.axes', 'self.kind == "matrix"', "training/test_optim.py"),
    ("return frozen if trained is None else trained", "return trained if frozen is None else frozen",
     "models/test_lora.py -k split", {"equivalent": "each leaf is in one of the two trees alone"}),
)  # fmt: skip

mistakes(
    "step", "training/losses.py", STEP,
    ("loss_weight = collectives.all_reduce(weights.sum(), ctx.token_axes)",
     "loss_weight = collectives.all_reduce((weights >= 0).sum(), ctx.token_axes)", STEP + " -k mean_over"),
)  # fmt: skip

mistakes(
    "step", "training/step.py", STEP,
    ("jnp.append(state.recent[1:], loss)", "jnp.append(state.recent[:-1], loss)", STEP + " -k recent"),
    ("jnp.where(good, jnp.append(state.recent[1:], loss), state.recent)", "jnp.append(state.recent[1:], loss)",
     STEP + " -k 'recent or spike'"),
    ("jnp.isfinite(loss) & jnp.isfinite(grad_norm)", "jnp.isfinite(loss)", STEP + " -k finite"),
    ("jnp.isfinite(loss) & jnp.isfinite(grad_norm)", "~jnp.isnan(loss) & ~jnp.isnan(grad_norm)", STEP + " -k finite"),
    ('cfg.train.spike.action != "report"', 'cfg.train.spike.action == "rollback"', STEP + " -k spike"),
    ("(state.skipped_in_a_row + 1) * bad", "state.skipped_in_a_row + bad", STEP + " -k finite"),
    ("skipped=state.skipped + bad,", "skipped=state.skipped_in_a_row + bad,", STEP + " -k finite"),
    ('"lr": schedule(updates)', '"lr": schedule(state.step)', STEP + " -k finite"),
    ("updates = state.step - state.skipped", "updates = state.step", STEP + " -k 'finite or spike'"),
    ("jax.random.fold_in(jax.random.key(cfg.run.seed), state.step)", "jax.random.key(cfg.run.seed)", STEP + " -k dropout"),
    ('batch["loss_weights"].sum(), ctx.token_axes\n        )', 'jnp.ones_like(batch["loss_weights"]).sum(), ctx.token_axes\n        )',
     STEP + " -k evaluation"),
    ("middle + cfg.threshold * jnp.maximum", "cfg.threshold * jnp.maximum", "checkpoint/test_reliability.py -k spike"),
    ("1.4826 * jnp.median", "jnp.median", "checkpoint/test_reliability.py -k spike"),
    ("(updates >= cfg.window)", "(updates > cfg.window)", "checkpoint/test_reliability.py -k spike"),
)  # fmt: skip

mistakes(
    "step", "training/gradients.py", STEP,
    ("return loss + losses.auxiliary(cfg.model, aux, totals), (loss, aux)", "return loss, (loss, aux)",
     "moe/test_experts.py -k balance"),
)  # fmt: skip

mistakes(
    "step", "training/state.py", STEP,
    ('params.init(jax.random.key(cfg.run.seed), spec, layers)', "params.init(jax.random.key(0), spec, layers)",
     STEP + " -k first_state"),
)  # fmt: skip

mistakes(
    "step", "training/pipelined.py", STEP,
    ("_, scatter = jax.vjp(partial(gather, trained_spec), trained)", "_, scatter = jax.vjp(partial(gather, spec), trained)",
     PIPELINE, {"equivalent": "the tests of pipelines freeze nothing, and then both specs are one"}),
)  # fmt: skip

mistakes(
    "kernels", "kernels/norm.py", KERNELS + " -k 'norms and not pallas'",
    ("wide = x.astype(jnp.float32)\n    inverse = checkpoint", "wide = x\n    inverse = checkpoint"),
    ("wide = x.astype(jnp.float32)\n    mean = checkpoint", "wide = x\n    mean = checkpoint"),
    ("d_normal - normal * (d_normal * normal).mean(-1, keepdims=True))\n    return dx.astype(x.dtype), (dy * normal).sum(range",
     "d_normal - (d_normal * normal).mean(-1, keepdims=True))\n    return dx.astype(x.dtype), (dy * normal).sum(range"),
    ("centred = d_normal - d_normal.mean(-1, keepdims=True)", "centred = d_normal"),
    ("scale.astype(jnp.float32) + 1 if unit_offset", "scale.astype(jnp.float32) if unit_offset"),
)  # fmt: skip
mistakes(
    "kernels",
    "kernels/activation.py",
    KERNELS + " -k gelu",
    ("(below + wide * density)", "below"),
    ("lax.erf(wide * 0.5**0.5)", "lax.erf(wide)"),
)
mistakes(
    "kernels", "kernels/cross_entropy.py", KERNELS + " -k 'cross_entropy and not pallas'",
    ("logits = jnp.matmul(x, head, preferred_element_type=jnp.float32)", "logits = jnp.matmul(x, head)"),
    ("d_logits *= 1 - jnp.square(logits / softcap)", "d_logits *= 1 - jnp.abs(logits / softcap)"),
    ("top = lax.pmax(lax.stop_gradient(lse), vocab_axes)", "top = lax.stop_gradient(lse)"),
    ("is_local = (local >= 0) & (local < head.shape[1])", "is_local = (local >= 0) & (local <= head.shape[1])"),
    ("return d_total.astype(dx.dtype) * dx, d_total", "return dx, d_total"),
    ("in_full_chunks = s - s % size\n", "in_full_chunks = s - size\n"),
    ("weights[..., None] * (jnp.exp(logits - lse[..., None]) - at_target)", "jnp.exp(logits - lse[..., None]) - at_target"),
)  # fmt: skip
mistakes(
    "kernels", "kernels/grouped_matmul.py", KERNELS + " -k 'grouped and not pallas'",
    ("a = jnp.where((row + jnp.arange(rows) < ends[e])[:, None], a, 0)", "a = jnp.where((row + jnp.arange(rows) <= ends[e])[:, None], a, 0)"),
    ("return state[0] + rows <= end + beyond", "return state[0] + rows < end + beyond"),
    ("return _rows_times_experts(dy, w, sizes, 1), dw, None", "return _rows_times_experts(dy, w.swapaxes(1, 2), sizes, 1), dw, None"),
)  # fmt: skip
mistakes(
    "kernels", "kernels/quantized_matmul.py", "kernels/test_quantized.py",
    ('{"int8": 127.0', '{"int8": 128.0'),
    ("jnp.round(values) if dtype", "jnp.floor(values) if dtype"),
    ("top = lax.pmax(collectives.varying(top, axes), axes)", "top = top"),
    ("FORMATS[kind].gradients, split_out, x.dtype", "FORMATS[kind].values, split_out, x.dtype"),
    ("(sums.astype(jnp.float32) * a_scale * b_scale)", "(sums.astype(jnp.float32) * a_scale / b_scale)"),
)  # fmt: skip
mistakes(
    "kernels", "kernels/implementation.py", "kernels/test_kernels.py kernels/test_attention_kernels.py -k 'mistakes or auto or cannot or choose or default'",
    ("names = [*AUTO_ORDER.get(platform, {}).get(op, ()), *implementations]", "names = [*implementations]"),
)  # fmt: skip

mistakes(
    "attention", "kernels/attention/reference.py", KERNELS + " -k 'test_attention and not mistakes'",
    ("q_positions[:, None] - k_positions < o.window", "q_positions[:, None] - k_positions <= o.window"),
    ("visible = q_positions[:, None] >= k_positions", "visible = q_positions[:, None] > k_positions"),
    ("jax.nn.softmax(scores, axis=-1).astype(v.dtype)", "jax.nn.softmax(scores.astype(v.dtype), axis=-1)"),
    ("return x.reshape(b, s, g, h // g, width).transpose(0, 2, 1, 3, 4)",
     "return x.reshape(b, s, h // g, g, width).transpose(0, 3, 1, 2, 4)"),
    ("o.softcap * jnp.tanh(scores / o.softcap)", "jnp.tanh(scores / o.softcap)"),
    ('"bgcrk,bgtk->bgcrt", q, k, preferred_element_type=jnp.float32)', '"bgcrk,bgtk->bgcrt", q, k)'),
)  # fmt: skip
mistakes(
    "attention", "kernels/attention/chunked.py", KERNELS + " -k 'test_attention and not mistakes'",
    ("o.scale * weights * (d_weights - delta[..., None])", "o.scale * weights * d_weights"),
    ("d_scores *= 1 - jnp.square(jnp.clip(scores / o.softcap, -1, 1))", "d_scores *= 1 - jnp.abs(jnp.clip(scores / o.softcap, -1, 1))"),
    ("max(0, start - o.window + 1) if o.window", "max(0, start - o.window + 2) if o.window"),
    ("min(other_length, end + o.window - 1) if o.window", "min(other_length, end + o.window - 2) if o.window"),
    ("(top + jnp.log(total))[..., 0]", "jnp.log(total)[..., 0]"),
    ("return dq_group + more, (dk, dv)", "return more, (dk, dv)"),
)  # fmt: skip
mistakes(
    "attention",
    "kernels/attention/__init__.py",
    KERNELS + " -k held",
    ("visible &= distance < window", "visible &= distance <= window"),
    ("visible = distance > 0", "visible = distance >= 0"),
    ("mixed += weights[..., slots:] *", "mixed = weights[..., slots:] *"),
)
mistakes(
    "attention",
    "kernels/context_attention.py",
    "kernels/test_context_attention.py",
    ("np.stack([low, high[::-1]], axis=1)", "np.stack([low, high], axis=1)"),
    ("start = jnp.where(source < me, 0, half)", "start = jnp.where(source > me, 0, half)"),
    ("out * jnp.exp(lse - total)[..., None]", "out * jnp.exp(total - lse)[..., None]"),
    ("for x in _next(axis, d_block))\n    return heads_last", "for x in d_block)\n    return heads_last"),
    ("causal=o.window > 0", "causal=False"),
    ("jnp.abs(me - source) * half", "(source - me) * half"),
    ("source = (me - t) % shards\n        result", "source = (me + t) % shards\n        result"),
)
mistakes(
    "attention",
    "kernels/attention/block_ranges.py",
    "kernels/test_attention_kernels.py -k 'visit'",
    ("(first + 1) // block_kv if o.causal", "(last + 1) // block_kv if o.causal"),
    (
        "np.minimum((last + o.window - 1) // block_q + 1, blocks)",
        "np.minimum((last + o.window - 1) // block_q, blocks)",
    ),
    ("(least[:, None, :] <= own_most[:, :, None])", "(least[:, None, :] < own_most[:, :, None])"),
    ("np.maximum(first - o.window + 1, 0) // block_kv", "np.maximum(first - o.window, 0) // block_kv"),
)
mistakes(
    "pallas",
    "kernels/attention/pallas_gpu.py",
    "kernels/test_attention_kernels.py -k 'gpu and values'",
    ("rescale = jnp.exp2(top - higher)", "rescale = jnp.exp2(higher - top)"),
    ("return o.softcap * _LOG2E * share, 1 - share * share", "return o.softcap * _LOG2E * share, 1 - share"),
    ("top + jnp.log2(total), mask=queries < static.length", "top + jnp.log(total), mask=queries < static.length"),
    ("_store(static, dq_ref, start, o.scale * dq)", "_store(static, dq_ref, start, dq)"),
    ("visible &= queries - keys < o.window", "visible &= queries - keys <= o.window"),
)
mistakes(
    "pallas", "kernels/cross_entropy_pallas.py", KERNELS + " -k 'cross_entropy and pallas'",
    ("d = weights * (jnp.exp(capped - lse)", "d = (jnp.exp(capped - lse)"),
    ("[targets - start, lse, weights]", "[targets, lse, weights]"),
    ("return top + jnp.log(jnp.exp(lse - top).sum(0)), chosen.sum(0)", "return top + jnp.log(jnp.exp(lse - top).sum(0)), chosen.max(0)"),
    ("in_full_blocks = V - V % block", "in_full_blocks = V - block"),
    ("(jnp.logaddexp, jnp.add)", "(jnp.logaddexp, jnp.maximum)"),
)  # fmt: skip
mistakes(
    "pallas",
    "kernels/norm_pallas.py",
    KERNELS + " -k 'norm and pallas_gpu'",
    ("wide - wide.sum(-1, keepdims=True) / width", "wide - wide.mean(-1, keepdims=True)"),
    ("dx += d_total.astype(jnp.float32)", "dx = d_total.astype(jnp.float32)"),
    ("inside = start + j * s.R +", "inside = j * s.R +"),
    ("(d_normal * normal).sum(-1, keepdims=True) / width", "(d_normal * normal).sum(-1, keepdims=True)"),
)
mistakes(
    "pallas",
    "kernels/grouped_matmul_pallas.py",
    KERNELS + " -k 'visits or (grouped and pallas)'",
    ("(ends - 1) // tile_rows, first)", "ends // tile_rows, first)"),
    ('jnp.searchsorted(through, visit, side="right")', 'jnp.searchsorted(through, visit, side="left")'),
    ("mask=(row < end)[:, None] & (into < A)[None, :]", "mask=(row <= end)[:, None] & (into < A)[None, :]"),
    ("first = jnp.minimum(starts // tile_rows, tiles - 1)", "first = starts // tile_rows"),
)

mistakes(
    "moe", "moe/routers.py", BY_HAND,
    ("weights = weights / weights.sum(-1, keepdims=True)\n", "weights = weights\n"),
    ("weights = _pick(affinity, experts)", "weights = _pick(affinity + bias, experts)"),
    ("lax.top_k(grouped, min(2, E // groups))[0].sum(-1)", "lax.top_k(grouped, 1)[0].sum(-1)"),
    ("Routing(experts, weights * scale, affinity", "Routing(experts, weights, affinity"),
    ("biased = lax.stop_gradient(affinity + bias)", "biased = lax.stop_gradient(affinity)"),
    ("jnp.sign(counts.mean(-1, keepdims=True) - counts)", "jnp.sign(counts - counts.mean(-1, keepdims=True))", MOE + " -k bias"),
    ("timesteps == max_timestep, num_experts - 1", "timesteps >= max_timestep, num_experts - 1", MOE + " -k 'gate or loud or id'"),
    ("weights = jnp.where(valid, 1.0, jnp.nan)[:, None]", "weights = jnp.where(valid, 1.0, 0.0)[:, None]", MOE + " -k 'gate or loud or id'"),
)  # fmt: skip
mistakes(
    "moe", "moe/metrics.py", BY_HAND,
    ("E / k * count / tokens", "E * count / tokens"),
    ("share = (scores * counted[:, None])", "share = scores"),
    ("z = jnp.square(jax.nn.logsumexp(routing.logits, axis=-1))", "z = jax.nn.logsumexp(routing.logits, axis=-1)"),
    ("count, tokens = lax.psum((count, tokens), sequence_axes)", "tokens = lax.psum(tokens, sequence_axes)", MOE + " -k split"),
    ("chosen if mask is None else chosen * mask[:, None], axis=0)", "chosen, axis=0)"),
    ('"dropped_fraction": dropped / pairs', '"dropped_fraction": dropped / jnp.maximum(tokens, 1)'),
    ("counts.max(-1) * counts.shape[-1] / pairs", "counts.max(-1) / pairs"),
    ("lax.stop_gradient(E / k * count / tokens) * share", "E / k * count / tokens * share", MOE,
     {"equivalent": "counts are comparisons of integers, which have no gradient anyway"}),
)  # fmt: skip
mistakes(
    "moe", "moe/dispatch.py", MOE,
    ("ceil(capacity_factor * (T // rows) * k / num_experts)", "ceil(capacity_factor * T * k / num_experts)", BY_HAND),
)  # fmt: skip

mistakes(
    "moe", "moe/pairs.py", MOE,
    ("rank < capacity, groups * capacity + rank", "rank <= capacity, groups * capacity + rank", BY_HAND),
)  # fmt: skip

mistakes(
    "moe", "moe/dispatch.py", MOE,
    ("gates.reshape(T, k, 1), axis=1)", "1.0, axis=1)", BY_HAND),
)  # fmt: skip

mistakes(
    "moe", "moe/expert_mlp.py", MOE,
    ("y = y + matmul(matmul(x, a), b)", "y = matmul(matmul(x, a), b)", BY_HAND + " -k lora"),
)  # fmt: skip

mistakes(
    "moe", "moe/dispatch.py", MOE,
    ('w[..., None, :, :], (*w.shape[:-2], num_experts, *w.shape[-2:])', 'w[..., None, :, :] / num_experts, (*w.shape[:-2], num_experts, *w.shape[-2:])',
     MOE + " moe/test_experts.py -k 'upcycled or up_cycled'"),
)  # fmt: skip

mistakes(
    "collectives", "sharding/collectives.py", MESHES,
    ("lax.dynamic_slice_in_dim(x, index(axes) * size, size, dim)", "lax.dynamic_slice_in_dim(x, index(axes), size, dim)"),
    ("lax.dynamic_update_slice_in_dim(padded, x, index(axes) * x.shape[dim], dim)",
     "lax.dynamic_update_slice_in_dim(padded, x, index(axes), dim)", GENERATE + " -k mesh"),
    ("return lax.psum(x, axes) if axes else x", "return lax.pmean(x, axes) if axes else x"),
)  # fmt: skip

mistakes(
    "context", "models/context.py", MESHES,
    ("y = collectives.all_reduce(y, tuple(axis for axis in summed if axis not in between))",
     "y = collectives.all_reduce(y, summed)"),
    ('collectives.index(self.axes("batch")) * local_rows + jnp', 'collectives.index(self.axes("batch")) + jnp',
     "test_meshes.py -k numbered"),
    ("rows[:, None].astype(jnp.uint32) * row_length", "rows[:, None].astype(jnp.uint32) * length", "test_meshes.py -k numbered"),
    ('"sequence": None, "residual": None}', '"sequence": None}', GENERATE + " -k mesh"),
    ('self.axes("batch", "sequence", "residual") if a not in held', 'self.axes("batch", "sequence") if a not in held',
     MESHES, {"survives": "the types of shard_map sum over axes that are not named: the values agree, the sums are more"}),
    ('axis not in self.axes("sequence"))', 'axis in self.axes("residual"))', "test_meshes.py -k 'llama3 and context'"),
    ('index = collectives.local_slice(self.token_index(length), self.sequence_parallel_axes, 0)', "index = self.token_index(length)", "test_meshes.py -k numbered"),
)  # fmt: skip

mistakes(
    "sharding", "sharding/rules.py", "sharding/test_rules.py",
    ("if pattern.fullmatch(path)), None)\n            if first", "if pattern.match(path)), None)\n            if first"),
    ("if name in claimed:", "if name in claimed and dim == 0:"),
    ("if shape[dim] % parts:", "if parts % shape[dim]:"),
    ("if math.prod(leaf.shape) <= 1:", "if math.prod(leaf.shape) <= 2:"),
)  # fmt: skip
mistakes(
    "sharding",
    "sharding/summary.py",
    "sharding/test_rules.py",
    ("part = size // _parts(specs[path], mesh)", "part = size"),
    ("if fraction > limit:", "if fraction < limit:"),
    (
        "math.prod(mesh.shape[axis] for axis in _split_over(spec, mesh, axes))",
        "math.prod(mesh.shape[axis] for axis in axes)",
    ),
    ("for name in names_of(entry) if mesh.shape[name] > 1}", "for name in names_of(entry)}"),
)
mistakes(
    "sharding",
    "sharding/mesh.py",
    "config/test_config.py sharding/test_rules.py -k 'mesh or nearest'",
    ("if batch % (n * rest) == 0]", "if batch % n == 0]"),
    ("sum(abs(math.log(n / sizes[axis]))", "sum(math.log(n / sizes[axis])"),
)
mistakes(
    "sharding",
    "config/parallel.py",
    "config/test_config.py sharding/test_rules.py -k 'mesh or nearest'",
    ("max(devices // known, 1) if size", "devices if size"),
)

mistakes(
    "pipeline", "pipeline/schedule.py", "pipeline/test_schedule.py",
    ("[int(self.backward_MG[unit]) + 1]", "[int(self.backward_MG[unit])]"),
    ("max(ready[stage], needed) + (", "needed + (", "pipeline/test_schedule.py pipeline/test_partition.py"),
    ("ticks_MG[m, g], g % self.stages, m * self.chunks + g // self.stages",
     "ticks_MG[m, g], g % self.stages, m * self.chunks + g % self.chunks", "pipeline/test_schedule.py pipeline/test_pipeline.py"),
    ("lambda m, s: 2 * (P - 1) - s + m)", "lambda m, s: 2 * P - s + m)"),
    ("(self.forward_MG <= ticks) & (ticks <= self.backward_MG)", "(self.forward_MG <= ticks) & (ticks < self.backward_MG)"),
)  # fmt: skip
mistakes(
    "pipeline", "pipeline/program.py", "pipeline/test_pipeline.py -k 'rows or idle or bubble or number or fit'",
    ("share = 3 * self.schedule.microbatches", "share = 2 * self.schedule.microbatches"),
    ("(s.forward_MG <= tick) & (tick <= s.backward_MG)", "(s.forward_MG < tick) & (tick <= s.backward_MG)",
     {"equivalent": "a stage that goes forward at a tick is not idle then, and its free slot is not read"}),
    ("return self._at_T(self.schedule.backward_MG[:, 0])", "return self._at_T(self.schedule.backward_MG[:, -1])",
     PIPELINE),
    ("if m <= 4 * stages]", "if m <= 2 * stages]"),
    ("evenly.lockstep_seconds <= best.lockstep_seconds", "evenly.lockstep_seconds >= best.lockstep_seconds", "planner/test_profile.py -k 'cut'"),
)  # fmt: skip
mistakes(
    "pipeline", "pipeline/execute.py", PIPELINE,
    ("counts = is_layer & unit.active\n            aux", "counts = is_layer\n            aux", "pipeline/test_pipeline.py -k 'auxiliary'"),
    ("counts = is_layer & unit.active\n            sums", "counts = is_layer\n            sums"),
    ("layer = row.backward_groups - 1 - i", "layer = i"),
    ("penalty + jnp.where(counts, share, 0), aux", "penalty + share, aux", "pipeline/test_pipeline.py -k 'auxiliary'", {"survives": "no caller reads the sum of penalties, whose gradients are taken by themselves"}),
    (" send(dx, self.axis, -1)", " send(dx, self.axis, 1)"),
    ("stacked=jax.tree.map(lambda a: collectives.zeros(a.shape, jnp.float32, a), self.stacked),",
     "stacked=jax.tree.map(lambda a: collectives.zeros(a.shape, a.dtype, a), self.stacked),", "training/test_precision.py -k 'near and pipe'"),
)  # fmt: skip
mistakes(
    "pipeline", "pipeline/reference.py", "pipeline/test_pipeline.py -k autodiff",
    ("group * P + rest % P", "group + rest % P"),
)  # fmt: skip
mistakes(
    "pipeline",
    "pipeline/partition.py",
    "pipeline/test_partition.py",
    ("send[1:L] = costs.latency + np", "send[1:L] = np"),
    ("max(1).sum())", "max(1).max())"),
    ("(first + last) / model_chunks", "first + last"),
    (
        "layers // model_chunks + (g < layers % model_chunks)",
        "layers // model_chunks + (g >= model_chunks - layers % model_chunks)",
    ),
    ("schedule.slots * _sums(costs.stash_bytes)", "schedule.microbatches * _sums(costs.stash_bytes)"),
    ("limit = np.nextafter(slowest, 0)", "limit = slowest / 2"),
)
mistakes(
    "pipeline", "pipeline/transform.py", "pipeline/test_pipeline.py pipeline/test_pipeline_examples.py -k 'anyone or plain'",
    ("loss(shared, x, microbatch) / parts", "loss(shared, x, microbatch) / schedule.microbatches"),
    ("return self.all_reduce(sums.loss), self.all_reduce(sums.shared), self.all_reduce(sums.stacked)",
     "return self.all_reduce(sums.loss), self.all_reduce(sums.shared), sums.stacked"),
)  # fmt: skip

mistakes(
    "data",
    "data/windows.py",
    "data/test_windows.py",
    (
        "np.arange(1, seq_len + 1) < length_B[:, None]",
        "np.arange(1, seq_len + 1) <= length_B[:, None]",
        "data/test_chat.py",
    ),
    ("(piece_BS == piece_BT[:, 1:])", "(piece_BS == piece_BT[:, :-1])"),
    ("at_BT - np.maximum(begins_BT, first_B[:, None])", "at_BT - begins_BT"),
    ("rng.integers(slack + 1)", "rng.integers(slack)"),
    ("        rng = np.random.default_rng([seed, index])", "        rng = np.random.default_rng(seed + index)"),
    ('batch["loss_weights"][row_B >= len(samples)] = 0', 'batch["loss_weights"][row_B > len(samples)] = 0'),
    ("ds.__getitem__, step + depth))", "ds.__getitem__, step + 1))"),
    ('"targets": np.ascontiguousarray(ids_BT[:, 1:])', '"targets": np.ascontiguousarray(ids_BT[:, :-1])'),
    ("stream.loss_mask[index_BT[:, 1:]]", "stream.loss_mask[index_BT[:, :-1]]", "data/test_chat.py"),
    ("np.argsort(-length_D, kind", "np.argsort(length_D, kind", "data/test_chat.py"),
)
mistakes(
    "data", "data/tokens.py", DATA,
    ("kept = min(int(len(tokens) * (1 - eval_fraction))", "kept = min(int(len(tokens) * eval_fraction)"),
    ("if pattern.fullmatch(name)", "if pattern.match(name)"),
    ("return tokens.documents(~held_out), tokens.documents(held_out)", "return tokens.documents(held_out), tokens.documents(~held_out)"),
    ("chunk.max() >= header.vocab_size", "chunk.max() > header.vocab_size", "data/test_token_file.py"),
    ("found != header.sha256.get(key)", "key not in header.sha256", "data/test_token_file.py"),
    ("(starts > ends).any()", "(starts > ends).all()", "data/test_token_file.py"),
)  # fmt: skip
mistakes(
    "data",
    "data/sources.py",
    "data/test_data.py",
    ("if f not in _TEST_FOLDERS | _OTHER_PACKAGES", "if f not in _TEST_FOLDERS"),
    ('if not f.startswith(".")]\n    if not names', "if f]\n    if not names"),
)
mistakes(
    "data",
    "data/ngram.py",
    "data/test_ngram.py",
    ("total[context] + followers[context], 1)", "total[context], 1)"),
    (
        "full, other_full = offset >= n - 1, other_offset >= n - 1",
        "full, other_full = offset >= n - 1, other_offset >= 0",
    ),
    ('is_target[:, 1:] = batch["loss_weights"] > 0', 'is_target[:, 1:] = batch["loss_weights"] >= 0'),
)
mistakes(
    "tokenizers",
    "data/tokenizers.py",
    "data/test_data.py data/test_chat.py",
    ("np.cumsum(ids & 0xC0 != 0x80) - 1", "np.cumsum(ids & 0xC0 != 0x80)"),
    ("_ByteTable([c.encode() for c in self.alphabet])", "_ByteTable([c.encode()[:1] for c in self.alphabet])"),
    ("return np.min_scalar_type(vocab_size - 1)", "return np.min_scalar_type(vocab_size)"),
    ("add_special_tokens=False).ids", "add_special_tokens=True).ids"),
    ("self.vocab_size = max(vocab.values()) + 1", "self.vocab_size = len(vocab)"),
)
mistakes(
    "chat",
    "data/chat.py",
    "data/test_chat.py",
    ("(ends > start) & (starts < end)", "(starts >= start) & (ends <= end)"),
    ("if ids.size > seq_len + 1:", "if ids.size > seq_len:"),
    ("if not answers[1:].any()", "if not answers.any()"),
    ("len(before) + _answer_length(after[len(before) :], message", "len(before) + _answer_length(after, message"),
    ('said = message["content"] + "\\0" * (message["role"] == "assistant")', 'said = message["content"]'),
    ("return ids[0] if len(ids) == 1 else None", "return ids[0] if ids else None"),
)

mistakes(
    "hf", "hf/weights.py", HF + " -k lies",
    ('"layers/attention/w_o": ("model.layers.{}.self_attn.o_proj.weight", TRANSPOSED)',
     '"layers/attention/w_o": ("model.layers.{}.self_attn.o_proj.weight", SAME)'),
    ('"layers/attention/w_q": ("transformer.h.{}.attn.c_attn.weight", THIRDS[0]),\n'
     '        "layers/attention/w_k": ("transformer.h.{}.attn.c_attn.weight", THIRDS[1])',
     '"layers/attention/w_q": ("transformer.h.{}.attn.c_attn.weight", THIRDS[1]),\n'
     '        "layers/attention/w_k": ("transformer.h.{}.attn.c_attn.weight", THIRDS[0])'),
    ('w_gate="w1", w_up="w3", w_down="w2"', 'w_gate="w3", w_up="w1", w_down="w2"'),
    ('"layers/mlp/w_gate": ("model.layers.{}.mlp.gate_proj.weight", TRANSPOSED),\n    "layers/mlp/w_up": ("model.layers.{}.mlp.up_proj.weight"',
     '"layers/mlp/w_gate": ("model.layers.{}.mlp.up_proj.weight", TRANSPOSED),\n    "layers/mlp/w_up": ("model.layers.{}.mlp.gate_proj.weight"'),
    ('post_norm/scale": ("model.layers.{}.post_attention_layernorm.weight", SAME),\n'
     '        "layers/mlp_norm/scale": ("model.layers.{}.pre_feedforward_layernorm.weight"',
     'post_norm/scale": ("model.layers.{}.pre_feedforward_layernorm.weight", SAME),\n'
     '        "layers/mlp_norm/scale": ("model.layers.{}.post_attention_layernorm.weight"'),
    ("skipped = self.part * prod(own[d] for d in axes[-1])", "skipped = self.part * own[-1]", HF + " -k 'out_and_in or lies'"),
    ("numbers = [s.start + i for s, i in zip(where, at, strict=False)]", "numbers = list(at)", HF + " -k 'mesh'"),
)  # fmt: skip
mistakes(
    "hf", "hf/configs.py", HF + " -k 'published or refused or both or rope or out_and_in'",
    ('_number(keys, "query_pre_attn_scalar") ** -0.5', '1 / _number(keys, "query_pre_attn_scalar")'),
)  # fmt: skip
mistakes(
    "hf", "hf/families.py", HF + " -k 'published or refused or both or rope or out_and_in'",
    ('"attn_logit_softcapping": "attention_softcap", "final_logit_softcapping": "logit_softcap"',
     '"attn_logit_softcapping": "logit_softcap", "final_logit_softcapping": "attention_softcap"'),
)  # fmt: skip
mistakes(
    "hf", "hf/configs.py", HF + " -k 'published or refused or both or rope or out_and_in'",
    ("theta = _number(rope, \"rope_theta\", *([] if usual is None else [usual]))", "theta = _number(rope, \"rope_theta\", 10000.0)"),
    ("self._left.pop(key, *default)", "self._left.get(key, *default)"),
)  # fmt: skip
mistakes(
    "hf", "hf/families.py", HF + " -k 'published or refused or both or rope or out_and_in'",
    ('fixed={"norm_unit_offset": True, "post_norm": True, "embedding_scale": True}', 'fixed={"norm_unit_offset": True, "post_norm": True}'),
)  # fmt: skip
mistakes(
    "hf", "hf/configs.py", HF + " -k 'published or refused or both or rope or out_and_in'",
    ("scaling[\"original_max_position\"] = int(_number(rope, \"original_max_position_embeddings\"))",
     "scaling[\"original_max_position\"] = 8192", HF),
    ("if n % p == 0 and windows == windows[:p] * (n // p))", "if windows == windows[:p] * (n // p))", HF,
     {"equivalent": "where p does not divide n the two tuples differ in length, and so are never equal"}),
)  # fmt: skip

mistakes(
    "metrics", "tracking/throughput.py", "tracking/test_metrics.py",
    ("seconds = (time.perf_counter() - self._since) / self._steps", "seconds = time.perf_counter() - self._since"),
    ("self._kind, self._devices, self._dtype)", "self._kind, 1, self._dtype)"),
    ('"data_wait_s": self._waited / self._steps', '"data_wait_s": self._waited'),
    ("self._since += time.perf_counter() - began", "self._since = time.perf_counter()"),
    ("self._tokens = cfg.data.batch_size * cfg.data.seq_len", "self._tokens = cfg.data.batch_size * (cfg.data.seq_len + 1)"),
    ('"mfu": flops.full, "mfu_causal": flops.causal', '"mfu": flops.causal, "mfu_causal": flops.full'),
)  # fmt: skip
mistakes(
    "goodput",
    "tracking/goodput.py",
    "tracking/test_metrics.py",
    ("self._kind, self._since = kind, now", "self._kind = kind"),
    ("            self.enter(before)", "            self.enter(kind)"),
    ('round(sum(sums.values()) - sums["down"], 4)', "round(sum(sums.values()), 4)"),
    ('began - before[-1]["time"]', 'began - before[0]["time"]'),
    ('down += spent(dropped)["down"]', "down += 0.0"),
)
mistakes(
    "progress",
    "tracking/step_log.py",
    "checkpoint/test_reliability.py -k course",
    ("if self.rollbacks == limit:", "if self.rollbacks > limit:"),
    (
        "LoopState(self.saved, spike + self.batch - self.step, self.saved",
        "LoopState(self.saved, self.batch, self.saved",
    ),
    ("replace(self, saved=self.step, rollbacks=0)", "replace(self, saved=self.step)"),
)
mistakes(
    "report",
    "report/runs.py",
    "report/test_report.py",
    ("eval_losses.argmin()", "eval_losses.argmax()"),
    ('max((record.get("skipped") or skipped) - skipped, 0)', '(record.get("skipped") or 0)'),
    ("names.count(path.name) == 1", "names.count(path.name) >= 1"),
    ("if len(set(row)) > 1}", "if len(row) > 1}"),
    ("total // size:,} {unit} {total % size // part}", "total // size:,} {unit} {total // part}"),
)
mistakes(
    "report", "tracking/jsonl.py", "tracking/test_metrics.py",
    ('[record for record in self.records if record["step"] <= after]', '[record for record in self.records if record["step"] < after]'),
    ("isinstance(v, float) and not math.isfinite(v)", "isinstance(v, float) and math.isnan(v)"),
)  # fmt: skip

mistakes(
    "config", "config/bounds.py", CHECKS,
    ("else self.low <= value)", "else self.low < value)"),
    ("value < self.high if self.high_open", "value <= self.high if self.high_open"),
)  # fmt: skip
mistakes(
    "config", "config/run.py", CHECKS,
    ("longest + sample.tokens <= seq_len", "sample.tokens <= seq_len"),
    ("max((len(prompt.encode()) for prompt", "max((len(prompt) for prompt"),
)  # fmt: skip
mistakes(
    "config", "config/training.py", CHECKS,
    ("self.temperature == 0 and self.repetition_penalty == 1", "self.temperature == 0"),
)  # fmt: skip
mistakes(
    "config", "config/run.py", CHECKS,
    ('shards = sizes["pipe"] * sizes["tensor"]', 'shards = sizes["tensor"]'),
    ("mesh.context * math.lcm(split, 2)", "mesh.context * split"),
)  # fmt: skip
mistakes(
    "config", "config/model.py", CHECKS,
    ("0 < self.low_freq_factor < self.high_freq_factor", "0 < self.low_freq_factor <= self.high_freq_factor"),
    ("not learned or self.top_k <= self.num_experts", "not learned or self.top_k < self.num_experts"),
    ("self.num_layers % len(self.windows) == 0", "len(self.windows) % self.num_layers == 0"),
)  # fmt: skip
mistakes(
    "config", "config/parallel.py", CHECKS,
    ("self.process_id < self.num_processes", "self.process_id <= self.num_processes"),
)  # fmt: skip
mistakes(
    "config", "config/run.py", CHECKS,
    ("cfg.profile.span[1] <= train.steps", "cfg.profile.span[0] <= train.steps"),
    ("positions >= seq_len", "positions > seq_len"),
)  # fmt: skip
mistakes(
    "config", "config/model.py", CHECKS,
    ("return self.head_dim or self.d_model // self.num_heads", "return self.head_dim or self.d_model // self.kv_heads", CHECKS + " " + BY_HAND),
    ("return self.moe.d_ff or self.ff_width", "return self.ff_width", BY_HAND + " config/test_config.py"),
)  # fmt: skip
mistakes(
    "config", "config/run.py", CHECKS,
    ("positions = config.data.seq_len\n", "positions = config.data.seq_len - 1\n", "config/test_config.py config/test_config_checks.py"),
)  # fmt: skip
mistakes(
    "cli", "config/parse.py", "config/test_config.py cli/test_package.py -k 'flag or help or config or mistake or resolved'",
    ('"allow_abbrev": False', '"allow_abbrev": True'),
    ('[*(f"--config={path}" for path in files), *words]', '[*words, *(f"--config={path}" for path in files)]'),
)  # fmt: skip
mistakes(
    "cli", "cli/parser.py", "config/test_config.py cli/test_package.py -k 'flag or help or config or mistake or resolved'",
    ('return Exit.USER_ERROR, f"error: {error}"', 'return Exit.INTERRUPTED, f"error: {error}"'),
)  # fmt: skip
mistakes(
    "cli", "config/parse.py", "config/test_config.py cli/test_package.py -k 'flag or help or config or mistake or resolved'",
    ('names.append(word.removeprefix("--config="))', 'names.append(word)', "config/test_config.py cli/test_package.py"),
)  # fmt: skip

mistakes(
    "generate", "generate/sampling.py", GENERATE + " -k 'samples or distribution'",
    ("jnp.where(logits > 0, logits / penalty, logits * penalty)", "jnp.where(logits > 0, logits * penalty, logits / penalty)"),
    ("jnp.where(before < sample.top_p", "jnp.where(before + probabilities < sample.top_p"),
    ("jnp.log(sample.min_p)", "sample.min_p"),
    ("keep_likeliest(logits / sample.temperature, sample)", "keep_likeliest(logits * sample.temperature, sample)"),
    ("jax.lax.top_k(logits, sample.top_k)[0][:, -1:]", "jax.lax.top_k(logits, sample.top_k)[0][:, :1]"),
)  # fmt: skip
mistakes(
    "generate",
    "generate/beam_search.py",
    GENERATE + " -k 'beams_by_hand or beams_for'",
    ("min(K * (1 + len(self.stop)), K * V)", "min(K, K * V)"),
    ("/ (i + 1.0) ** penalty", "/ (i + 2.0) ** penalty"),
    ("from_rows = (own * K + parents[own, chosen])", "from_rows = (own * K + chosen)"),
    ("if penalty >= 0 else i + 2.0", "if penalty < 0 else i + 2.0"),
)
mistakes(
    "generate",
    "generate/decode.py",
    GENERATE + " -k 'sampled or stop or greedy or reference'",
    ("step_keys = jax.vmap(lambda key: jax.random.fold_in(key, i))(keys)", "step_keys = keys"),
    ('state["lengths"] + going', 'state["lengths"] + ~done'),
    ("marks.append((mark, seen[mark]))", "marks.append((mark, 0))"),
    (
        "there = jnp.arange(slots) >= first[:, None]",
        "there = jnp.arange(slots) > first[:, None]",
        GENERATE + " -k own_tokens",
    ),
)
mistakes(
    "generate",
    "generate/kv_cache.py",
    GENERATE + " -k '(greedy and gemma2) or window'",
    ("min(max(window - 1, 1), self.num_slots)", "min(max(window, 1), self.num_slots)"),
    ("there = slot - 1 - (slot - 1 - jnp.arange(T)) % T", "there = slot - (slot - jnp.arange(T)) % T"),
    ("jnp.roll(a[..., S - T :, :], S % T, a.ndim - 2)", "a[..., S - T :, :]"),
    ("slot % a.shape[-2]", "slot"),
)

mistakes(
    "lora", "models/lora.py", "models/test_lora.py models/test_by_hand.py -k 'lora or stand or default or mistakes'",
    ("(cfg.alpha / cfg.rank)", "(cfg.rank / cfg.alpha)"),
    ("std=prod(p.shape[lead:inputs]) ** -0.5", "std=prod(p.shape[lead:inputs]) ** 0.5"),
    ('a, b, precision=jax.lax.Precision.HIGHEST)', "a, b) * 2"),
    ("any(re.fullmatch(pattern, path) for pattern in cfg.targets)}", "any(re.match(pattern, path) for pattern in cfg.targets)}", "models/test_lora.py -k whole_names"),
)  # fmt: skip
mistakes(
    "convert",
    "models/surgery.py",
    "moe/test_experts.py moe/test_moe.py -k 'expert_is or up_cycled or upcycled or dense'",
    ("d_ff=cfg.expert_width), {**values", "d_ff=cfg.ff_width), {**values"),
    ("w[:, expert] for name", "w[:, 0] for name"),
    (
        'not in ("domain", "timestep") or cfg.moe.shared_experts',
        'not in ("domain", "timestep")',
        "moe/test_experts.py -k expert_is",
    ),
    ("moe.d_ff not in (None, cfg.ff_width)", "moe.d_ff is None", "moe/test_experts.py -k mistakes"),
)

mistakes(
    "plan",
    "models/flops.py",
    "planner/test_plan.py tracking/test_metrics.py",
    ("(w * (w + 1) / 2 + (S - w) * w) / S", "(w * (w + 1) / 2 + (S - w)) / S"),
    (
        "* cfg.moe.choices // cfg.moe.num_experts",
        "* cfg.moe.top_k // cfg.moe.num_experts",
        "planner/test_plan.py -k experts",
    ),
    ("flops_per_s / (peak * devices)", "flops_per_s / peak"),
    (
        "- 2.0 * matmul_params(cfg, frozen=True)",
        "- 4.0 * matmul_params(cfg, frozen=True)",
        "planner/test_roofline.py -k conventions",
    ),
)
mistakes(
    "aot",
    "planner/estimate.py",
    "planner/test_aot.py",
    (
        "return (8 if accumulates else _itemsize(cfg)) * weights.trained",
        "return _itemsize(cfg) * weights.trained",
    ),
    ('remat {t.remat}": layers * saved', 'remat {t.remat}": saved'),
)
mistakes(
    "aot",
    "planner/traffic.py",
    "sharding/test_collectives.py -k formula",
    ('"attention_out": int(remat in ("full", "dots"))', '"attention_out": int(remat == "full")'),
    (
        "2 * accum * ctx.pipeline.schedule.ticks",
        "accum * ctx.pipeline.schedule.ticks",
        "pipeline/test_pipeline.py -k formula",
    ),
)
mistakes(
    "plan", "planner/roofline.py", "planner/test_roofline.py -k 'hand or conventions or tenths or fused'",
    ("return max((computing, \"compute\"), (moving, \"memory\"))", "return min((computing, \"compute\"), (moving, \"memory\"))"),
)  # fmt: skip
mistakes(
    "plan", "planner/roofline_ops.py", "planner/test_roofline.py -k 'hand or conventions or tenths or fused'",
    ("flops = 2 * m.tokens * m.inputs * m.outputs", "flops = m.tokens * m.inputs * m.outputs"),
    ("product = 2 * s.tokens * keys_seen(m, s.seq_len) * width", "product = 2 * s.tokens * s.seq_len * width"),
    ("return total / len(m.windows)", "return total"),
)  # fmt: skip
mistakes(
    "plan", "planner/roofline_step.py", "planner/test_roofline.py -k 'hand or conventions or tenths or fused'",
    ("8 * count + 2 * shards.bytes_of(state.opt_state)", "8 * count + shards.bytes_of(state.opt_state)"),
    ("bytes=head[0].bytes + (4 - e) * logits", "bytes=head[0].bytes + 4 * logits"),
)  # fmt: skip

mistakes(
    "supervise", "cli/supervise.py", "checkpoint/test_reliability.py -k 'left or supervisor or waits'",
    ("mesh.fsdp % fsdp == 0 and batch %", "batch %"),
    ("_, fsdp, data = max(choices)", "_, data, fsdp = max(choices)"),
    ("data * fsdp * others <= devices", "data * fsdp <= devices"),
    ("failed = 1 if step > reached else failed + 1", "failed = failed + 1"),
    ("self._wait_s * 2 ** (failed - 1)", "self._wait_s * 2**failed"),
    ("if failed >= self._tries:", "if failed > self._tries:"),
)  # fmt: skip
mistakes(
    "watch", "runtime/watchdog.py", "checkpoint/test_reliability.py -k watch",
    ("now - heard > self._lost_s and i not in self._ends", "now - heard > self._lost_s"),
    ("now - self._progress > self._stalled_s", "now - self._progress > 1000 * self._stalled_s"),
)  # fmt: skip

mistakes(
    "checkpoint",
    "checkpoint/manifest.py",
    "checkpoint/test_reliability.py -k 'seal or whole or aside or share or written'",
    ("if writer == process and name != NAME)", "if writer == process)"),
    ("sorted(found - wanted.keys())", "sorted(found - found)"),
    ("_size(checkpoint / name) or 0) != size", "_size(checkpoint / name) or 0) < size"),
    ("_sha256(checkpoint / name) == wanted[name]", "_sha256(checkpoint / name)[0] == wanted[name][0]"),
    (
        "if unknown := sorted(_files(checkpoint) - digests.keys())",
        "if unknown := sorted(digests.keys() - _files(checkpoint))",
    ),
    ("if (directory / str(step) / NAME).is_file()]", "if (directory / str(step)).is_dir()]"),
    ("bytes_of[least] += wanted[name][0]", "bytes_of[least] += 1"),
    ("return sorted(found, reverse=True)", "return sorted(found)"),
)
mistakes(
    "checkpoint",
    "checkpoint/store.py",
    "checkpoint/test_reliability.py",
    (
        "kept = set(steps[: self._cfg.keep])",
        "kept = set(steps[-self._cfg.keep :])",
        "checkpoint/test_reliability.py -k policies",
    ),
    (
        "step % self._cfg.keep_every == 0",
        "step // self._cfg.keep_every == 0",
        "checkpoint/test_reliability.py -k policies",
    ),
    (
        "kept |= {step for _, step in scored[: self._cfg.keep_best]}",
        "kept |= {step for _, step in scored[-self._cfg.keep_best :]}",
        "checkpoint/test_reliability.py -k policies",
    ),
    (
        "jnp.isfinite(leaf).all() for leaf",
        "jnp.isfinite(leaf).any() for leaf",
        "checkpoint/test_reliability.py -k finite",
    ),
    ("if total > limit:", "if total > 2 * limit:", "checkpoint/test_reliability.py -k parts"),
)
mistakes(
    "checkpoint",
    "checkpoint/verify.py",
    "checkpoint/test_reliability.py",
    (
        "for _, file in stored if file not in read}",
        "for _, file in stored}",
        "checkpoint/test_reliability.py -k loaded",
    ),
    (
        "wanted = {name: digest for name, digest in wanted.items() if name not in unread}",
        "wanted = {name: digest for name, digest in wanted.items() if name in unread}",
        "checkpoint/test_reliability.py -k 'loaded or whole'",
    ),
)
mistakes(
    "checkpoint",
    "common/files.py",
    "checkpoint/test_reliability.py -k whole",
    ("        os.fsync(file.fileno())\n", "        pass\n"),
    ('path.with_name(f".{path.name}.new")', "path"),
)
mistakes(
    "checkpoint", "checkpoint/run_dir.py", "test_train.py -k 'does_not_fit or is_not_trained'",
    ("if cfg.train.steps < max(saved_steps):", "if cfg.train.steps <= max(saved_steps):"),
    ("if key.startswith(_FIXED) and key not in _FREE:", "if key.startswith(_FIXED):"),
    ('_FIXED = ("model.", "optim.name")', '_FIXED = ("model.",)'),
    ("before.get(key) != now[key] and not key.startswith(LAUNCH)]", "before.get(key) != now[key]]", "runtime/test_processes.py -k started"),
)  # fmt: skip
mistakes(
    "distributed",
    "runtime/distributed.py",
    "runtime/test_processes.py -k rows",
    ("position[local] = np.arange(len(local))", "position[: len(local)] = np.arange(len(local))"),
    ("np.unique(np.concatenate([np.arange(rows)[index]", "np.sort(np.concatenate([np.arange(rows)[index]"),
)

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
)
mistakes(
    "precision",
    "models/layers.py",
    PRECISION,
    (
        'y = kernels.add_in_float32(y, params["b_o"]) if cfg.bias else y',
        'y = y + params["b_o"].astype(y.dtype) if cfg.bias else y',
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
    "precision", "models/context.py", "training/test_precision.py -k 'devices_sum and tensor and not accum'",
    ('summed = self._grad_sync_axes(p) if p.is_cast or gathered else ()', 'summed = self._grad_sync_axes(p) if gathered else ()', "training/test_precision.py -k 'devices_sum and not fsdp'"),
    ("dtype = self.reduce_dtype if p.is_cast else value.dtype", "dtype = value.dtype",
     "training/test_precision.py -k 'devices_sum and accum'"),
)  # fmt: skip

mistakes(
    "optim", "training/optimizer.py", "training/test_optim.py -k 'warm or formulas or decay or closed or clipped'",
    ("return lambda count: joined(count + 1)", "return lambda count: joined(count)"),
    ("decay = max(round(steps * cfg.decay_fraction), 1)", "decay = max(round(after * cfg.decay_fraction), 1)"),
    ('mask=map_spec(lambda p: p.kind != "vector", spec)', 'mask=map_spec(lambda p: p.kind == "matrix", spec)'),
    ('"adamw": lambda: optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps)', '"adamw": lambda: optax.scale_by_adam(cfg.b2, cfg.b1, cfg.eps)'),
    ('"lion": lambda: optax.scale_by_lion(cfg.b1, cfg.b2)', '"lion": lambda: optax.scale_by_lion(cfg.b2, cfg.b1)'),
    ('"sgd": lambda: optax.trace(cfg.b1) if cfg.b1', '"sgd": lambda: optax.trace(cfg.b1, nesterov=True) if cfg.b1'),
    ("peak, final, warmup = cfg.lr, cfg.lr * cfg.final_lr_fraction, cfg.warmup_steps",
     "peak, final, warmup = cfg.lr, cfg.final_lr_fraction, cfg.warmup_steps"),
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
