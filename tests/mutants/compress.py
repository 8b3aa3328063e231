"""Mutants of pruning, of training with rounded matrices, and of products with codes."""

from mutants.rows import mistakes

SPARSITY, PRUNE = "compress/test_sparsity.py", "compress/test_prune.py"
STATISTICS = "compress/test_calibrate.py -k 'of_the_inputs and llama3'"

mistakes(
    "compress", "compress/quantize.py", "compress/test_expert_bits.py",
    ("lowest = np.argsort(each, axis=1, kind=\"stable\")[:, :count]", "lowest = np.argsort(-each, axis=1, kind=\"stable\")[:, :count]"),
    ("if self.int4_experts is None or not self.int4_experts[layer, expert]:", "if self.int4_experts is None or not self.int4_experts[0, expert]:"),
    ("[how.for_expert(index, e) for e in range(len(rows))] if rows.ndim == 3 else [how]", "[how] * len(rows)"),
)  # fmt: skip

mistakes(
    "compress", "hf/coded_folder.py", "compress/test_expert_bits.py",
    ("both[its] = lower", "both[~its][: len(lower)] = lower"),
    ("tensors[f\"int4:{path}\"] = pack(numbers[its])", "tensors[f\"int4:{path}\"] = pack(numbers[its] // 2)"),
    ("if {*told} != {*chosen}:", "if not {*told} <= {*chosen}:"),
)  # fmt: skip

mistakes(
    "compress", "compress/order.py", "compress/test_expert_bits.py",
    ('row.get("stack") == name] if known', 'row.get("stack")] if known'),
)  # fmt: skip

mistakes(
    "compress", "compress/sparsity.py", SPARSITY,
    ("left = left - errors @ rows", "left = left + errors @ rows"),
    ("scores = jax.lax.dynamic_slice_in_dim((left / diagonal) ** 2", "scores = jax.lax.dynamic_slice_in_dim(left**2"),
)  # fmt: skip

mistakes(
    "compress", "compress/prune.py", PRUNE,
    ("largest(groups.sum(-1), small.kv_heads)", "largest(groups.max(-1), small.kv_heads)"),
    ("out = min(losses", "out = max(losses"),
)  # fmt: skip

mistakes(
    "compress", "compress/importance.py", PRUNE,
    ("neurons[group] = norms * np.linalg.norm(w, axis=-1)", "neurons[group] = norms"),
)  # fmt: skip

mistakes(
    "compress", "compress/calibrate.py", STATISTICS,
    ("norms=jnp.sqrt(squares).sum(0)", "norms=squares.sum(0)"),
)  # fmt: skip

mistakes(
    "models", "families/surgery.py", PRUNE,
    ("factor = (cfg.d_model / small.d_model) ** 0.5", "factor = cfg.d_model / small.d_model"),
)  # fmt: skip

STACKS = "compress/test_prune_families.py -k 'not trace and not like_any_other and not channels'"
CHANNELS = "compress/test_prune_families.py -k 'channels and t5'"

mistakes(
    "models", "families/surgery.py", STACKS,
    ('return self.stacks[rest].heads["attention"][0]', 'return self.stacks["decoder"].heads["attention"][0]'),
    ('"text": r"text|layers/cross/w_[kv]",', '"text": r"text",'),
    ("read = small.head_scale / cfg.head_scale", "read = 1.0", CHANNELS),
    ("|projection/image|caption/cross/w_[kv]", "|projection/image", "compress/test_prune_families.py -k 'channels and unix2'"),
)  # fmt: skip

mistakes(
    "compress", "compress/prune.py", STACKS,
    ("groups = np.broadcast_to(groups.sum(0), groups.shape)", "groups = np.broadcast_to(groups.max(0), groups.shape)"),
    ("if old.encoder_layers and cfg.encoder_layers is None and", "if old.encoder_layers and"),
    ("too_many = [name for name in too_many if len(left[name]) > keep[name]]",
     "too_many = [name for name in too_many if len(left[name]) > min(keep.values())]"),
    ("scale = sizes.d_model**-0.5", "scale = cfg.d_model**-0.5", CHANNELS),
)  # fmt: skip

mistakes(
    "compress", "compress/importance.py", STACKS,
    ('"cross/w_q", "cross/w_k", ', '"cross/w_q", '),
    ('channels["condition"] = weights * ', 'channels["condition"] = '),
)  # fmt: skip

mistakes(
    "optim", "training/optimizer.py", "training/test_optim.py -k zeros",
    ("inner.update(masked(values, grads), state, values)", "inner.update(grads, state, values)"),
    ("return masked(values, changes), state", "return changes, state"),
)  # fmt: skip

QAT = "training/test_qat.py"

mistakes(
    "compress", "training/features/qat.py", QAT + " -k rounded_matrices",
    ("gradients(round_params(model, scheme, params), batch, key)", "gradients(params, batch, key)"),
)  # fmt: skip

mistakes(
    "compress", "training/features/qat.py", QAT + " -k evaluation",
    ("return round_arrays(recipe.model, recipe.train.rounding, averaged_params(recipe.model, state))",
     "return averaged_params(recipe.model, state)"),
)  # fmt: skip

mistakes(
    "compress", "models/params.py", QAT + " -k rounded_matrices",
    ('return p.kind == "matrix" and "lora" not in p.axes', 'return p.kind == "matrix"'),
)  # fmt: skip

mistakes(
    "compress", "kernels/rounding.py", QAT + " -k compression_stores",
    ("inputs = prod(w.shape[batch_axes : batch_axes + in_axes])", "inputs = w.shape[batch_axes]"),
)  # fmt: skip

mistakes(
    "compress", "kernels/coded_weight.py", "kernels/test_coded_weight.py -k 'rounded or training'",
    ("low = jnp.zeros_like(high) if rounds_inputs else", "low = jnp.zeros_like(high) if not rounds_inputs else"),
    ("coarse += fine * (1 / 254)", "coarse += fine * (1 / 127)"),
    ("if not rounds_inputs:\n        coarse", "if rounds_inputs:\n        coarse"),
)  # fmt: skip

mistakes(
    "compress", "kernels/coded_weight.py", "kernels/test_coded_weight.py -k 'rounded or two_codes'",
    ("low = blocks[:, 0]", "low = blocks[:, 1]"),
    ("low = (packed << 4) >> 4", "low = packed & 15"),
    ("unpack(self.codes)[: self.inputs]", "unpack(self.codes)[-self.inputs :]"),
)  # fmt: skip

mistakes(
    "compress", "kernels/coded_weight_pallas.py", "kernels/test_coded_weight.py -k 'only_the_weights'",
    ("group = jnp.minimum(first // inputs_of_scale, G - 1)", "group = 0"),
    ("add(add(total, first, low), first + half, high)", "add(add(total, first, high), first + half, low)"),
    ("low = (both << 28) >> 28", "low = both & 15"),
    ("first = (part * share + i) * PACKED", "first = i * PACKED"),
    ("return parts.sum(0)", "return parts[0]"),
)  # fmt: skip

mistakes(
    "compress", "kernels/rounding.py", "kernels/test_coded_weight.py -k 'stay_as_they_are'",
    ("HELD = (1.0, 8 / 7, 8 / 6,", "HELD = (1.0, 8 / 6,"),
)  # fmt: skip

mistakes(
    "compress", "hf/compressed.py", "hf/test_compressed.py -k 'inputs'",
    ('"symmetric": True, "strategy": "token", "dynamic": True}', '"symmetric": True, "strategy": "tensor", "dynamic": True}'),
)  # fmt: skip

mistakes(
    "compress", "kernels/rounding.py", "compress/test_rounding.py -k 'nf4'",
    ("scales = jnp.abs(parts).max(-1)\n    elif", "scales = parts.max(-1)\n    elif"),
    ("(numbers[1:] + numbers[:-1]) / 2", "numbers[1:]"),
    ("-0.09105003625154495, 0.0, 0.07958029955625534", "-0.09105003625154495, 0.01, 0.07958029955625534"),
)  # fmt: skip

mistakes(
    "compress", "hf/bitsandbytes.py", "hf/test_bitsandbytes.py",
    ("(high << 4 | low)", "(low << 4 | high)"),
    ("codes = np.stack([held >> 4, held & 15], axis=-1)", "codes = np.stack([held & 15, held >> 4], axis=-1)"),
    ("scales = self._scales(name).reshape(shape[0], -1)[rows]", "scales = self._scales(name).reshape(shape[0], -1)[: rows.stop - rows.start]"),
    ('f"{name}.absmax": scales.astype(np.float32).ravel()', 'f"{name}.absmax": scales.astype(np.float32).T.ravel()'),
)  # fmt: skip

EVERY = "compress/test_every_family.py -k 't5 or bytes'"
ORDER = "compress/test_order.py"
TAUGHT = "training/test_teacher_families.py"

mistakes(
    "compress", "compress/calibrate.py", EVERY,
    ("before += stack.depth", "before += 1"),
    ("enter(values, stream, batch) for stream, batch in", "stream for stream, batch in"),
)  # fmt: skip

mistakes(
    "compress", "hf/coded_folder.py", EVERY,
    ("nibbles[..., ::2] | (nibbles[..., 1::2] << 4)", "nibbles[..., 1::2] | (nibbles[..., ::2] << 4)"),
    ("((nibbles ^ 8).astype(np.int8) - 8)", "(nibbles.astype(np.int8))"),
)  # fmt: skip

mistakes(
    "compress", "compress/order.py", ORDER,
    ("return a.at[layer].set(0) if path_of", "return a.at[layer - 1].set(0) if path_of"),
    ("group[name].at[layer, expert].set(NEVER)", "group[name].at[layer, expert].set(-NEVER)"),
    ("tokens.setdefault(measure.stack, []).append(counts / counts.sum())",
     "tokens.setdefault(measure.stack, []).append(counts / counts.max())"),
)  # fmt: skip

mistakes(
    "step", "training/features/teacher.py", TAUGHT,
    ("(1 - distill.weight) * own + distill.weight * apart", "distill.weight * own + (1 - distill.weight) * apart"),
    ("if name not in GATES}", "}"),
)  # fmt: skip

mistakes(
    "step", "families/encoder.py", TAUGHT + " -k modernbert",
    ("            head(cfg, params, ctx),\n            *arrays,", "            0 * head(cfg, params, ctx),\n            *arrays,"),
)  # fmt: skip
