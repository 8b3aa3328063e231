"""Mutants of the contrastive family, its losses and its data."""

from mutants.rows import mistakes

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
    ("image.astype(jnp.float32), pairs.ids", "image, pairs.ids"),
    ("lax.map(jax.checkpoint(f), texts)", "lax.map(f, texts)"),
    ("range(min(block, rows), 0, -1)", "range(rows, 0, -1)"),
    ("texts.ids[s.argmax(1)]", "texts.ids[s.argmin(1)]"),
    ("(pairs.weights * (found == pairs.ids)).sum()", "(found == pairs.ids).sum(dtype=jnp.float32)"),
)  # fmt: skip
