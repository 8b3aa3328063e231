"""Mutants of the losses after pretraining."""

from mutants.rows import mistakes

mistakes(
    "posttrain", "posttrain/losses.py", "posttrain/test_losses.py",
    ("return -(1 - label_smoothing) * jax.nn.log_sigmoid(logits) - label_smoothing * jax.nn.log_sigmoid(-logits)",
     "return -(1 - label_smoothing) * jax.nn.log_sigmoid(logits) + label_smoothing * jax.nn.log_sigmoid(-logits)"),
    ("return (right - swapped) / (1 - 2 * label_smoothing)", "return right - swapped"),
    ("(chosen - ref_chosen) / chosen_tokens - (rejected - ref_rejected) / rejected_tokens",
     "(chosen - ref_chosen) / rejected_tokens - (rejected - ref_rejected) / chosen_tokens"),
    ("1 / (2 * beta)", "beta / 2"),
    ("jax.nn.relu(1 - beta *", "jax.nn.relu(beta - beta *"),
    ("-jax.nn.log_sigmoid(beta * difference - gamma)", "-jax.nn.log_sigmoid(beta * (difference - gamma))"),
    ("jnp.where(wanted, reward, -reward)", "jnp.where(wanted, reward, reward)"),
    ("jnp.where(wanted, wanted_weight, unwanted_weight)", "jnp.where(wanted, unwanted_weight, wanted_weight)"),
    ("jnp.maximum(log_ratios.mean(), 0.0)", "log_ratios.mean()"),
    ("chosen - rejected - margin", "chosen - rejected + margin"),
    ("jnp.where(spread, rewards - rewards.mean(1, keepdims=True), 0.0)", "rewards - rewards.mean(1, keepdims=True)"),
    ("max(rewards.shape[1] - 1, 1)", "rewards.shape[1]"),
    ("/ (G - 1)", "/ G"),
    ("(lengths - (longest - buffer)) / buffer, 0.0)", "(lengths - longest) / buffer, 0.0)"),
    ("jnp.clip(ratio, 1 - low, 1 + high)", "jnp.clip(ratio, 1 - high, 1 + low)"),
    ("return -jnp.minimum(ratio * advantages", "return -jnp.maximum(ratio * advantages"),
    ("weight = jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_probs - old_log_probs), high))",
     "weight = jnp.minimum(jnp.exp(log_probs - old_log_probs), high)"),
    ("return jnp.expm1(x) - x", "return jnp.exp(x) - 1 - x"),
    ("jnp.exp(old_log_probs - sampler_log_probs), limit)", "jnp.exp(sampler_log_probs - old_log_probs), limit)"),
    ("jnp.minimum(log_prob, -jnp.finfo(log_prob.dtype).eps)", "log_prob"),
    ("(jnp.maximum(mask.sum(1, keepdims=True), 1) * mask.shape[0])", "jnp.maximum(mask.sum(), 1)"),
)  # fmt: skip

mistakes(
    "posttrain",
    "training/features/preference.py",
    "training/test_preference.py -k packed_or_not",
    (
        "sides = of_pairs(log_probs * mask, segment_ids, present, ctx)",
        "sides = of_pairs(log_probs, segment_ids, present, ctx)",
    ),
    ("of_pairs(each * mask, segment_ids, present, ctx)", "of_pairs(each, segment_ids, present, ctx)"),
    ("segment_ids + side, axis=1)", "segment_ids - side, axis=1)"),
    ("for side in (0, 1))", "for side in (1, 0))"),
    (
        "sums = collectives.all_reduce(sums.at[rows, segment_ids].add(values), axes)",
        "sums = sums.at[rows, segment_ids].add(values)",
        "training/test_preference.py -k context",
    ),
    (
        "segments = values.shape[1] * collectives.count(axes) + 2",
        "segments = values.shape[1] + 2",
        "training/test_preference.py -k context",
    ),
    ("margin = rewards[0] - rewards[1]", "margin = rewards[1] - rewards[0]"),
    (
        'batch["loss_weights"] * (batch["segment_ids"] % 2 == 0)',
        'batch["loss_weights"] * (batch["segment_ids"] % 2 == 1)',
        "training/test_preference.py -k kto_is",
    ),
    (
        "label_sums(preference, sides[0] - frozen[0][0], weights, *others[1:])",
        "label_sums(preference, sides[1] - frozen[0][1], weights, *others[1:])",
        "training/test_preference.py -k kto_is",
    ),
    (
        "above = rewards > preference.beta * divergence",
        "above = rewards > divergence",
        "training/test_preference.py -k kto_is",
    ),
    (
        "losses.reward_pair(*scores, margin, center=preference.center)",
        "losses.reward_pair(*scores, margin)",
        "training/test_preference.py -k reward_model_is",
    ),
    (
        "rewards = beta * (chosen - reference[0]), beta * (rejected - reference[1])",
        "rewards = chosen - reference[0], rejected - reference[1]",
    ),
    ('"nll": -means[0]}', '"nll": -chosen}', "training/test_preference.py -m matrix -k 'packed_or_not and orpo'"),
    (
        "return losses.hinge(*both, beta=beta)",
        "return losses.dpo(*both, beta=beta)",
        "training/test_preference.py -m matrix -k 'packed_or_not and hinge'",
    ),
)

mistakes(
    "posttrain",
    "data/preferences.py",
    "data/test_preferences.py",
    ("mask[first + 1 : last]", "mask[first : last - 1]"),
    ("np.roll(order, -most)", "np.roll(order, -1)"),
    ('batch["wanted_weights" if wanted[pair] else', 'batch["wanted_weights" if not wanted[pair] else'),
    ("ids = ids[: np.flatnonzero(answers)[-1] + 1]", "ids = ids[: np.flatnonzero(answers)[-1] + 2]"),
    ('batch["segment_ids"][where] = 2 * number + side', 'batch["segment_ids"][where] = number + side'),
    (
        'batch["positions"][where] = np.arange(last - first - 1)',
        'batch["positions"][where] = np.arange(at, at + last - first - 1)',
    ),
    ("positions = chosen[0].size + rejected[0].size - 2", "positions = chosen[0].size + rejected[0].size"),
    (
        "both = [one for one in preferences if one.chosen != one.rejected or one.wanted is not None]",
        "both = [*preferences]",
    ),
    ("earlier = frozenset(range(", "earlier = frozenset(range(0 * "),
    ("middles=self.middles[which], wanted=wanted", "wanted=wanted"),
    ("wanted=wanted, margins=margins)", "wanted=wanted)", "data/test_preferences.py"),
    ('batch["margins"][b, at] = margins[pair]', 'batch["margins"][b, 0] = margins[pair]', "data/test_preferences.py"),
    ("if messages[: len(before)] == before:", "if False:"),
)

mistakes(
    "posttrain", "training/features/policy.py", "training/test_policy.py -k definition",
    ('batch["token_weights"] * batch["importance"] * each', 'batch["token_weights"] * each'),
    ('(mask * divergence).sum()}', 'divergence.sum()}',
     {"equivalent": "beside the mask both log-probabilities are 0, and so is their divergence"}),
    ("losses.gspo(log_probs, old, advantages, mask, low=low, high=high)",
     "losses.gspo(log_probs, old, advantages, mask, low=high, high=low)"),
    ("return losses.reinforce(log_probs, advantages)", "return losses.reinforce(old, advantages)"),
    ("policy=jax.checkpoint_policies.nothing_saveable", "policy=jax.checkpoint_policies.everything_saveable",
     "training/test_policy.py -k bits"),
    ("sides = jnp.where(mask, jnp.stack([ratios, -ratios]), -jnp.inf)", "sides = jnp.stack([ratios, -ratios])",
     "training/test_policy.py -k bits"),
)  # fmt: skip

STAGES = "training/test_policy.py -k 'one_device and pipe'"
FORWARD = "training/test_policy.py -k 'without_gradients and pipe'"

mistakes(
    "posttrain", "training/features/pipelined.py", STAGES,
    ("for term in objective.terms if term.scale}", "for term in objective.terms}"),
    ("return jax.lax.stop_gradient(sums | shares) | learned", "return sums | shares | learned"),
)  # fmt: skip

mistakes(
    "posttrain", "pipeline/execute.py", STAGES,
    ("return dx, totals.merge(loss, share), add_trees(", "return dx, jax.tree.map(jnp.add, loss, share), add_trees("),
    ("return totals.merge(so_far, self.loss(self.shared, y, self.inputs_of(m)))",
     "return self.loss(self.shared, y, self.inputs_of(m))", FORWARD),
)  # fmt: skip

mistakes(
    "posttrain", "training/features/policy.py", FORWARD,
    ('empty.at[micro["row"][:, 0]].set(log_probs)', 'empty.at[: log_probs.shape[0]].set(log_probs)'),
    ("mesh.tensor != 1 or mesh.pipe != 1 or", "mesh.tensor != 1 or", "planner/test_beside.py -k stages"),
    ("rl.turns > 1 or mesh", "mesh", "planner/test_beside.py -k once_more"),
)  # fmt: skip

mistakes(
    "posttrain", "generate/rollouts.py", "training/test_policy.py -k definition",
    ('scale=rl.loss != "dr_grpo")', "scale=True)"),
    ('arrays["token_weights"] = mask / np.float32(rl.tokens * rl.turns)', 'arrays["token_weights"] = mask'),
    ('mask / np.float32(rl.tokens * rl.turns)', 'mask / np.float32(rl.tokens)', "generate/test_turns.py -k not_learned"),
    ('arrays["loss_weights"][where] = sampled', 'arrays["loss_weights"][where] = 1', "generate/test_turns.py -k not_learned"),
    ("slice(len(one.ids) - 1, len(text) - 1)", "slice(len(one.ids), len(text))"),
    ('case "grpo" | "gspo":', 'case "grpo":'),
    ("attempt * P : (attempt + 1) * P", ": P", "generate/test_rollouts.py -k replaced"),
    ("flat[place[0]] += not _has_spread(group)", "flat[place[0]] += _has_spread(group)",
     "generate/test_rollouts.py -k replaced"),
    ("(indices.start, attempt))", "(attempt,))", "generate/test_rollouts.py -k functions_of_seed"),
    ("if index % self.cfg.rl.updates == 0:", "if False:", "generate/test_rollouts.py -k waiting"),
)  # fmt: skip

mistakes(
    "posttrain", "generate/turns.py", "generate/test_turns.py",
    ("Completion(result, unknown, unknown, 0, unknown > 0)", "Completion(result, unknown, unknown, 0, unknown == 0)"),
    ("self.tokens - 1 <= longest", "self.tokens <= longest"),
    ("if turn + 1 < self.most else None", "if turn < self.most else None"),
    ("if tokens[-1] not in self.stop:", "if False:"),
    ("text = self.tokenizer.decode(tokens[:-1])", "text = self.tokenizer.decode(tokens)"),
    ("return ids[1:]", "return ids"),
    ("own = seed if not turn else", "own = seed if turn else"),
    ("[Answer(_joined(own), own[-1].tokens) for own in pieces]", "[Answer(_joined(own), own[0].tokens) for own in pieces]"),
)  # fmt: skip

mistakes(
    "posttrain", "serve/scoring.py", "serve/test_scoring.py",
    ("prompts = prompts * len(answers)", "prompts = prompts"),
    ("if len(text) > model.context:", "if False:"),
    ("self.on_failure()", "pass"),
    ("self.check_open(len(asked.texts))", "self.check_open()"),
)  # fmt: skip
