"""Mutants of generation, LoRA and conversion."""

from mutants.rows import GENERATE, mistakes

mistakes(
    "generate", "generate/sampling.py", GENERATE + " -k 'samples or distribution'",
    ("jnp.where(logits > 0, logits / penalty, logits * penalty)", "jnp.where(logits > 0, logits * penalty, logits / penalty)"),
    ("jnp.where(before < sample.top_p", "jnp.where(before + probabilities < sample.top_p"),
    ("jnp.log(sample.min_p)", "sample.min_p"),
    ("keep_likeliest(logits / sample.temperature, sample)", "keep_likeliest(logits * sample.temperature, sample)"),
    ("jax.lax.top_k(logits, sample.top_k)[0][:, -1:]", "jax.lax.top_k(logits, sample.top_k)[0][:, :1]"),
)  # fmt: skip

mistakes(
    "generate", "loaded/portable.py", "loaded/test_portable.py -k 'llama3 or bert or bfloat16 or loader'",
    ("model = dropless(model)", "pass", "loaded/test_portable.py -m '' -k capacity"),
    ("x[..., : model.classes]", "x", "loaded/test_portable.py -m '' -k modernbert"),
    ("rows = batch_size if batch_size is not None else export.symbolic_shape", "rows = 1 if batch_size is None else export.symbolic_shape"),
    ("a.astype(jnp.bfloat16).view(np.uint16)", "a.astype(np.float16).view(np.uint16)"),
    ("items() if p.is_cast}", "items()}"),
    ("replace(data, packing=False)", "replace(data, packing=True)"),
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
    "generate/engine.py",
    GENERATE + " -k 'sampled or stop or greedy or reference'",
    (
        'jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(rows["key"]), rows["index"])',
        'jax.random.wrap_key_data(rows["key"])',
    ),
    ('rows["index"] + ~rows["done"]', 'rows["index"] + 1'),
    (
        "there = jnp.arange(slots) >= first[:, None]",
        "there = jnp.arange(slots) > first[:, None]",
        GENERATE + " -k own_tokens",
    ),
)

mistakes(
    "generate",
    "generate/prompts.py",
    GENERATE + " -k 'sampled or stop or greedy or reference'",
    ("marks.append((mark, equal[mark]))", "marks.append((mark, 0))"),
)

mistakes(
    "generate",
    "generate/kv_cache.py",
    GENERATE + " -k '(greedy and gemma2) or window'",
    ("[max(window - 1, 1) + self.spare", "[max(window, 1) + self.spare"),
    ("there = slot - 1 - (slot - 1 - jnp.arange(T)) % T", "there = slot - (slot - jnp.arange(T)) % T"),
    (
        "jnp.roll(jax.lax.slice_in_dim(a, S - T, S, axis=axis), S % T, axis)",
        "jax.lax.slice_in_dim(a, S - T, S, axis=axis)",
    ),
    ("slot % a.shape[axis]", "slot"),
)

mistakes(
    "lora", "features/adapters.py", "models/test_lora.py models/test_by_hand.py -k 'lora or stand or default or mistakes'",
    ("factor=cfg.alpha / cfg.rank)", "factor=cfg.rank / cfg.alpha)"),
    ("std=prod(p.shape[lead:inputs]) ** -0.5", "std=prod(p.shape[lead:inputs]) ** 0.5"),
    ('a, b, precision=jax.lax.Precision.HIGHEST)', "a, b) * 2"),
    ("any(re.fullmatch(pattern, path) for pattern in cfg.targets)}", "any(re.match(pattern, path) for pattern in cfg.targets)}", "models/test_lora.py -k whole_names"),
)  # fmt: skip

mistakes(
    "convert",
    "families/surgery.py",
    "moe/test_experts.py moe/test_moe.py -k 'expert_is or up_cycled or upcycled or dense'",
    ("moe=MoEConfig(), d_ff=cfg.expert_width)", "moe=MoEConfig(), d_ff=cfg.ff_width)"),
    ("w[:, expert] for name", "w[:, 0] for name"),
    (
        'not in ("domain", "timestep") or cfg.moe.shared_experts',
        'not in ("domain", "timestep")',
        "moe/test_experts.py -k expert_is",
    ),
    ("moe.d_ff not in (None, cfg.ff_width)", "moe.d_ff is None", "moe/test_experts.py -k mistakes"),
)

mistakes(
    "generate",
    "generate/pair_cache.py",
    "generate/test_translate.py -m '' -k 'whole_model and t5'",
    ("jnp.broadcast_to(position - index, ", "jnp.broadcast_to(position + 1 - index, "),
    ('slot - cache["segments"].shape[-1] + 1', 'slot - cache["segments"].shape[-1]'),
    ("(positions >= 0).astype(jnp.int32)", "(positions >= -99).astype(jnp.int32)"),
)

mistakes(
    "generate",
    "generate/continuous.py",
    "generate/test_continuous.py -k 'one_batch and llama3 or free_takes or room'",
    ("self._programs.slots - longest)", "2 * self._programs.slots - longest)"),
    ("if not slots // 4 < needed <= slots:", "if needed > slots:"),
)

mistakes(
    "generate",
    "generate/engine.py",
    "generate/test_continuous.py -k 'one_batch and llama3 or free_takes or room or own_sampling'",
    ("jnp.where(at[0] >= 0, b, old)", "jnp.where(at[0] >= 0, old, b)"),
    ("& ~(wait & (ending > 0))", ""),
    (
        'rows["done"] | is_stop(new, self.sampling.stop) | (index >= rows["limit"])',
        'rows["done"] | is_stop(new, self.sampling.stop)',
    ),
    ("jax.lax.cond(wanted, compute,", "jax.lax.cond(~wanted, compute,"),
    (
        '"first": state["first"] + (to - slot)',
        '"first": state["first"]',
        "generate/test_prompt_cache.py -m '' -k counter",
    ),
)

mistakes(
    "generate", "generate/sampling.py", "generate/test_continuous.py -k 'sampled_as'",
    ("before < rows.top_p[:, None]", "before + probabilities < rows.top_p[:, None]"),
    ("(rows.top_k > 0) & (rows.top_k < V), rows.top_k, V", "(rows.top_k > 0) & (rows.top_k < V), rows.top_k, 1"),
    ("jnp.log(rows.min_p)[:, None]", "rows.min_p[:, None]"),
    ("descending = jnp.where(descending < least, -jnp.inf, descending)\n", "\n"),
)  # fmt: skip

mistakes(
    "generate", "generate/prompt_cache.py", "generate/test_prompt_cache.py",
    ("_common(one.tokens, prompt[:-1])", "_common(one.tokens, prompt)"),
    ("common == one.tokens.size or one.tokens.size < self._window", "True", "generate/test_prompt_cache.py -k longer"),
    ("self._drop(self._entries[0])", "self._drop(self._entries[-1])"),
    ("_buckets(prompt.size - most) == _buckets(prompt.size)", "False"),
    ("        self._entries.append(entry)\n", "        self._entries.insert(0, entry)\n"),
)  # fmt: skip

mistakes(
    "generate", "generate/kv_cache.py", "generate/test_continuous.py -m '' -k 'gemma2-scan or room'",
    ("jnp.roll(in_order, to % T, axis)", "jnp.roll(in_order, 0 * to, axis)"),
    ("jnp.roll(a, -slot % had, axis)", "jnp.roll(a, slot % had, axis)"),
    ("(T - had, 0) if i == axis % a.ndim", "(0, T - had) if i == axis % a.ndim"),
)  # fmt: skip

mistakes(
    "generate", "generate/speculative.py", "generate/test_speculative.py -k 'greedy or distribution or perfect or ends'",
    ("jax.random.uniform(for_uniform, (G,)) * of_draft < own", "jax.random.uniform(for_uniform, (G,)) < own"),
    ("p[n] - jnp.pad(q, ((0, 1), (0, 0)))[n]", "p[n]"),
    ("jnp.cumprod(accepted.astype(jnp.int32)).sum()", "accepted.astype(jnp.int32).sum()"),
    ("length = jnp.where(ends.any(), ends.argmax() + 1, n + 1)", "length = n + 1"),
)  # fmt: skip

mistakes(
    "generate", "generate/drafters.py", "generate/test_speculative.py -k 'greedy or distribution or perfect or ends'",
    ("(last, state), jnp.arange(G + 1))", "(last, state), jnp.arange(G))"),
)  # fmt: skip

mistakes(
    "generate", "generate/drafters.py", "generate/test_own_draft.py -k drafts_are",
    ("jnp.concatenate([tokens[:, 1:], last[:, None]], 1)", "tokens"),
    ("carry[\"hidden\"], slot + i, carry", "carry[\"hidden\"], slot, carry"),
    ("dynamic_slice_in_dim(h, accepted, 1, 1)", "dynamic_slice_in_dim(h, self.tokens, 1, 1)"),
    ("self._read(tokens, hidden, slot, state[\"cache\"])", "self._read(tokens, hidden, slot - 1, state[\"cache\"])"),
)  # fmt: skip

mistakes(
    "generate", "generate/drafters.py", "generate/test_own_draft.py -m '' -k distribution",
    ("jnp.concatenate([q, chances])", "jnp.concatenate([q, jnp.ones_like(chances) / chances.size])"),
)  # fmt: skip

mistakes(
    "generate", "generate/prompts.py", "generate/test_own_draft.py -k says_so",
    ("stages > 1", "stages > 4"),
)  # fmt: skip

mistakes(
    "generate", "generate/kv_cache.py", "generate/test_speculative.py -k 'greedy and gemma2'",
    ("+ self.spare if window", "if window"),
)  # fmt: skip

mistakes(
    "generate",
    "generate/in_turn.py",
    "generate/test_mesh_texts.py -k greedy",
    ("slot = self.slot + visit.turn\n        row = ", "slot = self.slot\n        row = "),
    ("jax.lax.dynamic_slice_in_dim(a, group * size, size, 0)", "jax.lax.dynamic_slice_in_dim(a, 0, size, 0)"),
)

mistakes(
    "generate",
    "generate/kv_cache.py",
    "generate/test_replicas.py -k texts_of_one_device",
    ('            "loss_weights": there,\n', ""),
    ("broadcast_to(counted[:, None], tokens.shape)", "broadcast_to(counted[:, None] | True, tokens.shape)"),
)
