"""Mutants of the training step."""

from mutants.rows import PIPELINE, STEP, mistakes

mistakes(
    "step", "training/losses.py", STEP,
    ("collectives.all_reduce(batch[t.weights].sum(), ctx.layout.token_axes)",
     "collectives.all_reduce((batch[t.weights] >= 0).sum(), ctx.layout.token_axes)", STEP + " -k mean_over"),
)  # fmt: skip

mistakes(
    "step", "training/step.py", STEP,
    ("jnp.append(state.recent[1:], loss)", "jnp.append(state.recent[:-1], loss)", STEP + " -k recent"),
    ("jnp.where(good, jnp.append(state.recent[1:], loss), state.recent)", "jnp.append(state.recent[1:], loss)",
     STEP + " -k 'recent or spike'"),
    ("jnp.isfinite(loss) & jnp.isfinite(grad_norm)", "jnp.isfinite(loss)", STEP + " -k finite"),
    ("jnp.isfinite(loss) & jnp.isfinite(grad_norm)", "~jnp.isnan(loss) & ~jnp.isnan(grad_norm)", STEP + " -k finite"),
    ("good = check_update(optimizer, good, grads, params, opt_state)", "good = good & True",
     "training/test_finite_updates.py -k counted"),
    ("return all_finite((optax.apply_updates(params, changes), new_state))",
     "return all_finite(optax.apply_updates(params, changes))", "training/test_finite_updates.py -k overflows"),
    ("return all_finite((optax.apply_updates(params, changes), new_state))",
     "return all_finite(new_state)", "training/test_finite_updates.py -k counted"),
    ('train.spike.action != "report"', 'train.spike.action == "rollback"', STEP + " -k spike"),
    ("(state.skipped_in_a_row + 1) * bad", "state.skipped_in_a_row + bad", STEP + " -k finite"),
    ("skipped=state.skipped + bad,", "skipped=state.skipped_in_a_row + bad,", STEP + " -k finite"),
    ('"lr": schedule(updates)', '"lr": schedule(state.step)', STEP + " -k finite"),
    ("updates = state.step - state.skipped", "updates = state.step", STEP + " -k 'finite or spike'"),
    ('random_key(jax.random.key(seed), "dropout", step)', 'random_key(jax.random.key(seed), "dropout")', STEP + " -k dropout"),
    ("middle + cfg.threshold * jnp.maximum", "cfg.threshold * jnp.maximum", "checkpoint/test_reliability.py -k spike"),
    ("1.4826 * jnp.median", "jnp.median", "checkpoint/test_reliability.py -k spike"),
    ("(updates >= cfg.window)", "(updates > cfg.window)", "checkpoint/test_reliability.py -k spike"),
)  # fmt: skip

mistakes(
    "step", "training/losses.py", STEP,
    ("{term.name: batch[term.weights].sum() for", "{term.name: jnp.ones_like(batch[term.weights]).sum() for",
     STEP + " -k evaluation"),
    ("total = totals.weights[term.name]", "total = totals.weights[self.terms[0].name]", "models/test_family.py -k side"),
    ("term.scale * mean", "mean", "models/test_family.py -k side"),
    ("(logits > own) | ((logits == own) & (ids < target[:, None]))", "logits > own",
     "models/test_labels.py -k right"),
    ("weight * (collectives", "(weight > 0) * (collectives", "models/test_labels.py -k right"),
)  # fmt: skip

mistakes(
    "step", "training/gradients.py", STEP,
    ("return objective.total(terms) + objective.extras.loss(aux, totals.counts, None), (terms, aux)", "return objective.total(terms), (terms, aux)",
     "moe/test_experts.py -k balance"),
)  # fmt: skip

mistakes(
    "step", "training/state.py", STEP,
    ('parameters.init(jax.random.key(recipe.seed), spec, ctx', "parameters.init(jax.random.key(0), spec, ctx",
     STEP + " -k first_state"),
)  # fmt: skip

mistakes(
    "step", "training/state.py", "training/test_zero.py -k 'stores or data4'",
    ("split = jax.tree.leaves(ctx.layout.updates(spec))", "split = whole"),
    ("optim.in_shards(optimizer, shardings, whole)", "optim.in_shards(optimizer, whole, whole)",
     {"equivalent": "the result is the same; only the program gathers more"}),
)  # fmt: skip

mistakes(
    "step", "models/layout.py", "training/test_zero.py -k 'stores or data2'",
    ("key=lambda dim: (dim < p.batch_axes, held[dim], -dim)", "key=lambda dim: (held[dim], -dim)"),
    ("names = (*names_of(entries[dim]), *self.update_axes)", "names = (*self.update_axes, *names_of(entries[dim]))"),
    ("without = (*without, *self.update_axes)", "without = self._grad_sync_axes(p)"),
)  # fmt: skip

mistakes(
    "step", "training/assemble.py", "training/test_zero.py -k 'data4'",
    ("or train.noise_scale or is_scattered", "or train.noise_scale"),
)  # fmt: skip

mistakes(
    "step", "planner/traffic.py", "training/test_zero.py -k planner",
    ('times = accum if ctx.layout.zero == "gradients" else 1', "times = accum"),
    ("t.add(\"all-gather\", tuple(split), shards.stored_shape(p, job.ctx), 1", "t.add(\"all-gather\", tuple(split), shards.shard_shape(p, axes, t.sizes), 1"),
)  # fmt: skip

mistakes(
    "step", "training/features/pipelined.py", STEP,
    ("_, scatter = jax.vjp(partial(gather, trained_spec), trained)", "_, scatter = jax.vjp(partial(gather, spec), trained)",
     PIPELINE, {"equivalent": "the tests of pipelines freeze nothing, and then both specs are one"}),
    ("inputs[0].of_stack(name, side)", "inputs[0].of_stack(name, jax.lax.stop_gradient(side))",
     "models/test_family.py -k side"),
)  # fmt: skip

mistakes(
    "training", "training/services/compile_ahead.py", "training/test_bucket_steps.py -k 'thread or cannot'",
    ("if length not in programs:", "if True:"),
    ("if each.done():", "if False:"),
)  # fmt: skip

mistakes(
    "step", "training/features/loss_scale.py", "training/test_loss_scale.py -k 'no_digit and gpt2 and accum'",
    ("return counts.scale * extras.loss(", "return extras.loss(",
     "training/test_loss_scale.py -m '' -k 'no_digit and softmax'"),
    ("lambda x: x / scale, (part.terms, part.grads)", "lambda x: x, (part.terms, part.grads)"),
    ("good_steps = jnp.where(overflow, 0, before.good_steps + 1)", "good_steps = before.good_steps + 1",
     "training/test_loss_scale.py -k as_declared"),
    ("jnp.where(overflow, 0.5, jnp.where(grows, 2.0, 1.0))", "jnp.where(grows, 2.0, 1.0)",
     "training/test_loss_scale.py -k as_declared"),
    ("halved = overflow & (before.scale > 1)", "halved = overflow & (before.scale > 0)",
     "training/test_loss_scale.py -k cannot_be_halved"),
    ("(before.scale > 1) & (cfg.interval is not None)", "(before.scale > 1)",
     "training/test_loss_scale.py -k cannot_be_halved"),
)  # fmt: skip

OFFLOAD = "training/test_offload.py"

mistakes(
    "step", "training/step.py", OFFLOAD,
    ("opt_state = new_opt_state if keeps_state else select(new_opt_state, old_opt_state)", "opt_state = new_opt_state",
     "training/test_step.py"),
)  # fmt: skip

mistakes(
    "step", "features/host_residuals.py", OFFLOAD + " -k residuals",
    ("f(checkpoint_name(x, INPUT), *others)", "f(x, *others)"),
    ('Offloadable("device", "pinned_host")', "True"),
    ("if name in STATISTICS else", "if name == INPUT else"),
)  # fmt: skip

mistakes(
    "step", "training/state.py", OFFLOAD,
    ('and not path.startswith("average/")', "", OFFLOAD + " -k moments"),
    ("if leaf.ndim and f", "if f", OFFLOAD + " -k moments"),
)  # fmt: skip

mistakes(
    "step", "training/features/offload.py", OFFLOAD,
    ("kept = jnp.where(good, array, old[path])", "kept = array", OFFLOAD + " -k bad_step"),
    ("old = {path: before[path] for path in flatten(template)}",
     "old = {path: new[path] for path in flatten(template)}", OFFLOAD + " -k 'run_with_offload and lion'"),
    ("if total + size > largest:", "if total + size >= largest:", OFFLOAD + " -k group"),
    ("grads, _ = clip.update(grads, clip.init(params))", "", OFFLOAD + " -k 'run_with_offload and lion'"),
    ("if HOST not in kinds:", "if not kinds:", OFFLOAD + " -k refused"),
    ("if not updates_are_bounded(optim, recipe.train.steps):", "if False:", OFFLOAD + " -k refused"),
    ("unclipped = recipe._replace(optim=replace(optim, clip_norm=None))", "unclipped = recipe",
     OFFLOAD + " -k 'run_with_offload and lion'",
     {"survives": "the norm of a group is at most the norm of all, so that a second clipping changes nothing"}),
)  # fmt: skip
