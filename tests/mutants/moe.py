"""Mutants of experts."""

from mutants.rows import BY_HAND, mistakes

MOE = "moe/test_moe.py"

mistakes(
    "moe", "moe/routers.py", BY_HAND,
    ("weights = weights / weights.sum(-1, keepdims=True)\n", "weights = weights\n"),
    ("weights = _pick(affinity, experts)", "weights = _pick(affinity + bias, experts)"),
    ("_within_groups(biased, groups, top_groups, 2)", "_within_groups(biased, groups, top_groups, 1)"),
    ("Routing(experts, weights * scale, affinity", "Routing(experts, weights, affinity"),
    ("biased = lax.stop_gradient(affinity + bias)", "biased = lax.stop_gradient(affinity)"),
    ("jnp.sign(counts.mean(-1, keepdims=True) - counts)", "jnp.sign(counts - counts.mean(-1, keepdims=True))", MOE + " -k bias"),
    ("timesteps == max_timestep, num_experts - 1", "timesteps >= max_timestep, num_experts - 1", MOE + " -k 'gate or loud or id'"),
    ("(timesteps >= start).astype", "(timesteps > start).astype", MOE + " -k 'gate or loud or id'"),
    ("(timesteps >= 0) & limit, expert, -1", "limit, expert, -1", MOE + " -k 'gate or loud or id'"),
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

ARITHMETIC = "training/test_arithmetic.py -k experts_are_added"

mistakes(
    "moe",
    "moe/pairs.py",
    ARITHMETIC,
    (
        "rows.astype(jnp.promote_types(dy.dtype, jnp.float32)).sum(1).astype(dy.dtype)",
        "sum(rows[:, i] for i in range(choices))",
    ),
)

mistakes(
    "moe",
    "moe/dispatch.py",
    ARITHMETIC,
    (
        "y = jnp.sum(out.reshape(T, k, D) * gates.reshape(T, k, 1), axis=1)  # float32: the gates are",
        "y = sum((out.reshape(T, k, D) * gates.reshape(T, k, 1).astype(x.dtype))[:, i] for i in range(k))",
    ),
    ("pairs = repeat_tokens(x, k)", "pairs = jnp.repeat(x, k, axis=0)", "training/test_arithmetic.py -k 'capacity'"),
)

mistakes(
    "moe",
    "moe/pairs.py",
    "training/test_arithmetic.py -k 'step and sigmoid'",
    (
        "functools.reduce(jnp.add, (row.astype(wide) for row in rows))",
        "functools.reduce(jnp.add, rows).astype(wide)",
    ),
)

mistakes(
    "moe",
    "moe/rounds.py",
    MOE + " -k rounds_are_the_sum",
    ("(first[visit] - starts) // room.at_once + (visit", "(visit"),
    (" + (visit - visit[starts]) // room.visits", ""),
    ("(shard != shard[before]) | (token", "(token"),
    ("leads = sent & (plan.first[plan.visit[at]] == at)", "leads = sent"),
    ("jnp.where(slots < last, back[", "jnp.where(slots <= last, back["),
    ("plan.visit[last - 1] - visit + 1, 0)", "plan.visit[last - 1] - visit, 0)"),
    (
        "one_is_enough = room.visits >= T and room.at_once >= T * min(k, local)",
        "one_is_enough = room.visits >= T or room.at_once >= T * min(k, local)",
    ),
    ("one_is_enough = room.visits >= T and room.at_once >= T * min(k, local)", "one_is_enough = False"),
    ("most = tokens * min(choices, num_experts // shards)", "most = tokens * choices", MOE + " -k worst_case"),
    ("return Room(most, most, tokens)", "return Room(most, most, most)", MOE + " -k worst_case"),
    ("        return ceil(max(size * even,", "        return ceil(max(ROOM * even,", MOE + " -k worst_case"),
)

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
    "moe", "moe/placement.py", "moe/test_placement.py",
    ("share = load / (self.replicas >= 0).sum(-1)", "share = load / 1"),
    ("np.where(counts < devices, load / counts, -1.0)", "np.where(counts < devices, load, -1.0)"),
    ("(after < total[busy] * (1 - 1e-9))", "(after < 0)"),
    ("if missing := sorted(set(range(num_experts)) - held):", "if missing := sorted(held - held):"),
)  # fmt: skip

mistakes(
    "moe", "moe/pairs.py", "moe/test_placement.py",
    ("len(replicas))[pairs] + device", "len(replicas))[pairs]"),
    ("turn = back - starts_of(pairs[order], len(replicas))[pairs]", "turn = back"),
)  # fmt: skip

OSS = BY_HAND + " -k gpt_oss"

mistakes(
    "moe", "features/experts.py", OSS,
    ("gate = jnp.minimum(gate, limit)", "gate = jnp.clip(gate, -limit, limit)"),
    ("return gate * jax.nn.sigmoid(1.702 * gate)", "return gate * jax.nn.sigmoid(gate)"),
    ('logits = logits + params["router_bias"]', "logits = logits"),
    ('matrices["b_down"] / collectives.count(ctx.layout.axes("mlp"))', 'matrices["b_down"]', "test_meshes.py -k 'gpt_oss and 4 and not fsdp and not expert and not context'"),
)  # fmt: skip

mistakes(
    "moe",
    "moe/expert_mlp.py",
    OSS,
    ("if scale is None else scale.astype(x.dtype)", "if True else scale.astype(x.dtype)"),
)

LAYERS = "config/test_expert_layers.py"
KEYS = "hf/test_hf.py -k 'layers_with_experts or counts_its_steps'"

mistakes(
    "moe", "config/expert_layers.py", LAYERS,
    ("i >= self.first and (i - self.first) % self.every == 0", "i >= self.first and i % self.every == 0"),
    ("self.encoder_numbers if encoder else self.numbers", "self.numbers"),
    ("for count in (most_units, most_units - 1):", "for count in (most_units,):"),
    ("alike[size] // size + 1", "alike[size] // size"),
    ("MOST_KINDS if period == 1 else 1", "MOST_KINDS"),
)  # fmt: skip

mistakes(
    "moe", "features/experts.py", BY_HAND,
    ("encoder=name == \"encoder\"", "encoder=False", "test_meshes.py -m matrix -k 't5_listed'"),
    ("loads[:, j]", "loads[:, 0]", "moe/test_experts.py -k biases_of_units"),
)  # fmt: skip

mistakes(
    "moe", "features/router_losses.py", BY_HAND,
    ('stack.depth * sum("moe" in kind.stored for kind in stack.kinds or (stack,))', "stack.depth", "moe/test_experts.py -k biases_of_units"),
)  # fmt: skip

mistakes(
    "moe", "hf/expert_keys.py", KEYS,
    ("i >= first and i % step == 0", "i >= first and (i - first) % step == 0"),
    ("(i + 1) % step == 0", "i % step == 0"),
    ("layers.first == layers.every - 1", "layers.first == layers.every"),
)  # fmt: skip

mistakes(
    "moe", "hf/weights.py", KEYS,
    ("start += rows * len(prefixes)", "start += rows"),
)  # fmt: skip
