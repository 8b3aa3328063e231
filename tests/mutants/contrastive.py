"""Mutants of the contrastive family, its losses and its data."""

from mutants.rows import mistakes

TOWERS, CAPTIONS = "models/test_towers.py", "data/test_captions.py"
MESH = "test_meshes.py -k 'every_mesh and clip'"

mistakes(
    "contrastive", "kernels/contrastive.py", "kernels/test_contrastive.py",
    ("jnp.where(same, -s, s)", "jnp.where(same, s, -s)"),
    ("weights[:, None] * texts.counts * jax.nn.softplus", "weights[:, None] * jax.nn.softplus"),
    ("(share[:, None] + texts.share) / 2", "share[:, None]"),
    ("jnp.where(texts.counts, s, _MASKED), axis=1)", "s, axis=1)"),
    ("jnp.where(counts[:, None], s, _MASKED), axis=0)", "s, axis=0)"),
    ("collectives.reduce_scatter(jnp.exp(columns - top), axes, 0)", "collectives.local_slice(jnp.exp(columns - top), axes, 0)"),
    ("jax.nn.logsumexp(rows, axis=0)", "rows.sum(0)"),
    ("(pairs.ids[:, None] == t.ids) & t.counts", "pairs.ids[:, None] == t.ids"),
    ("image = pairs.image.astype(jnp.float32)\n    ids", "image = pairs.image\n    ids"),
    ("lax.map(jax.checkpoint(f), texts)", "lax.map(f, texts)"),
    ("range(min(block, rows), 0, -1)", "range(rows, 0, -1)"),
    ("texts.ids[s.argmax(1)]", "texts.ids[s.argmin(1)]"),
    ("(pairs.weights * (best_ids == pairs.ids)).sum()", "(best_ids == pairs.ids).sum(dtype=jnp.float32)"),
)  # fmt: skip

mistakes(
    "contrastive", "families/contrastive.py", TOWERS,
    ("init=math.log(10.0)", "init=10.0"),
    ("init=-10.0", "init=10.0"),
    ("Stack(cfg.encoder_depth, FULL,", "Stack(cfg.encoder_depth,"),
    ("x | {\"caption\": x[\"text\"]}", "x | {\"caption\": 0 * x[\"text\"]}"),
    ("layers.norm(cfg, params[\"text_norm\"], x[\"text\"], ctx)", "x[\"text\"]"),
    ("x = layers.norm(cfg, params[\"image_norm\"], x, ctx)", "x = x * 1"),
    ("jnp.square(x).sum(-1, keepdims=True)", "jnp.square(x).mean(-1, keepdims=True)"),
    ("total / collectives.count(others)", "total", MESH),
    ("ctx.layout.axes(\"residual\"))\n\n\ndef features", "ctx.layout.axes(\"sequence\"))\n\n\ndef features", MESH),
    ("scalars.get(\"bias\", 0.0)", "0.0"),
)  # fmt: skip

mistakes(
    "contrastive", "training/features/comparison.py", MESH,
    ("dropout_key=key)", "dropout_key=None)"),
    ("terms, grads = jax.tree.map(lambda a: objective.share(term, a, totals), (sums, grads))",
     "terms = jax.tree.map(lambda a: objective.share(term, a, totals), sums)"),
    ("if \"feature_grads\" not in batch:", "if batch:"),
    ("features = merge_microbatches(features)\n    right", "features = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), features)\n    right",
     TOWERS + " -k evaluation"),
    ("grads=jax.tree.map(jnp.add, part.grads, grads)", "grads=part.grads"),
)  # fmt: skip

mistakes(
    "contrastive", "families/flops.py", "planner/test_aot.py -k matmuls",
    ("6.0 * rows * texts * (own.features or cfg.d_model)", "6.0 * texts * (own.features or cfg.d_model)"),
    ("deep = (cfg.num_layers + own.caption_layers) * texts", "deep = cfg.num_layers * texts"),
    ("2.0 * own.patch_values * cfg.d_model * patches", "0.0 * own.patch_values * cfg.d_model * patches"),
    ("path.endswith((\"cross/w_k\", \"cross/w_v\"))\n            times", "path.endswith(\"cross/w_k\")\n            times"),
    ("\"cross/w_v\", \"projection/text\")) else 1", "\"cross/w_v\")) else 1"),
)  # fmt: skip

mistakes(
    "contrastive", "data/captions.py", CAPTIONS,
    ("targets[i, : len(ids) - 1] = ids[1:]", "targets[i, : len(ids) - 1] = ids[:-1]"),
    ("pairs[i, len(ids) - 1] = 1", "pairs[i, len(ids) - 2] = 1"),
    ("words[i, : len(ids) - 1] = 1", "words[i, : len(ids)] = 1"),
    ("if len(ids) > target_len:", "if len(ids) > target_len + 1:"),
    ("array[language_B, classes_B]", "array[0, classes_B]"),
    ("np.random.default_rng([self.seed, number, _STREAM])", "np.random.default_rng([number, _STREAM])"),
    ("num2words(int(name), lang=language)", "num2words(int(name))"),
)  # fmt: skip

mistakes(
    "contrastive", "families/contrastive.py", "models/test_towers.py -k unix2",
    ("array.swapaxes(1, 2).reshape(-1, array.shape[1])", "array.reshape(-1, array.shape[1])"),
    ("one, text, batch[\"pair_ids\"]", "image, text, batch[\"pair_ids\"]"),
    ("weights[:, i]\n", "weights[:, 0]\n"),
)  # fmt: skip

mistakes(
    "contrastive", "generate/caption_cache.py", "generate/test_caption_branch.py -k 'logits and coca'",
    ("jnp.where(index >= self.first[:, None], slot - index, 0)", "jnp.broadcast_to(slot - index, (len(self.first), self.num_slots))"),
    ("jnp.maximum(slot - self.first, 0)[:, None]", "jnp.broadcast_to(slot, (len(self.first), 1))"),
    ("later = jnp.arange(1, tokens.shape[1])", "later = jnp.arange(1, tokens.shape[1] - 1)"),
)  # fmt: skip
