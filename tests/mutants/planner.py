"""Mutants of planning ahead of time."""

from mutants.rows import mistakes

mistakes(
    "plan",
    "families/flops.py",
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
        "return (4 if accumulates else itemsize(train)) * weights.trained + sums",
        "return itemsize(train) * weights.trained",
    ),
    ('remat {t.remat}": on_device * saved', 'remat {t.remat}": saved'),
)

mistakes(
    "aot",
    "planner/traffic.py",
    "sharding/test_collectives.py -k formula",
    ('"attention_out": int(remat in ("full", "dots"))', '"attention_out": int(remat == "full")'),
    (
        "accum * ctx.layout.pipeline.sends",
        "accum * ctx.layout.pipeline.schedule.ticks",
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
    ("pairs = s.tokens * keys_seen(m, s.seq_len) * s.heads\n        scores", "pairs = s.tokens * s.seq_len * s.heads\n        scores"),
    ("return total / len(windows)", "return total"),
)  # fmt: skip

mistakes(
    "plan", "planner/roofline_step.py", "planner/test_roofline.py -k 'hand or conventions or tenths or fused'",
    ("8 * count + 2 * shards.bytes_of(job.state.opt_state)", "8 * count + shards.bytes_of(job.state.opt_state)"),
    ("bytes=head[0].bytes + (4 - e) * logits", "bytes=head[0].bytes + 4 * logits"),
)  # fmt: skip

mistakes(
    "plan", "planner/roofline_ops.py", "planner/test_roofline.py -k 'each_kind and (latent or mamba2 or qwen3_next)'",
    ("m.value_width if name.startswith", "m.head_width if name.startswith"),
    ("product(\"states, keys with keys\", chunks * N", "product(\"states, keys with keys\", chunks * H"),
    ("for op in products for _ in range(2)]", "for op in products]"),
)  # fmt: skip

mistakes(
    "plan", "planner/roofline_step.py", "planner/test_roofline.py -k 'each_kind and (latent or mamba2 or qwen3_next)'",
    ("    if path in UNNAMED:\n        return float(full or selective)\n", ""),
    ("m.qk_norm and not kind.has_states and roles", "m.qk_norm and roles"),
    ("last = \"mlp_output\" if kind.has_mlp else \"attention_output\"", "last = \"mlp_output\""),
    ("op.times / math.fsum(runs.values())", "op.times", "planner/test_roofline.py -k mean_layer"),
)  # fmt: skip

mistakes(
    "plan", "planner/rates.py", "planner/test_step_time.py -k 'work_of_a_step'",
    ('"permutation" if op.name.startswith(TOKENS_MOVED) else "memory"', '"memory"'),
    ('TOKENS_MOVED = ("tokens to experts", "combined expert outputs")', 'TOKENS_MOVED = ("tokens to experts",)'),
    ('"launch": 1e-6 * matrices}', '"launch": 1e-6}'),
    ('kind = "experts" if matrices > 1', 'kind = "experts" if matrices > 16'),
)  # fmt: skip

mistakes(
    "plan", "planner/step_time.py", "planner/test_step_time.py -k stacks",
    ("busy[loop_of(op)] += seconds([op])", "busy[loop_of(op)] = seconds([op])"),
)  # fmt: skip

mistakes(
    "plan",
    "planner/trace.py",
    "planner/test_traced.py -k 'alive or loops or turn or saves or copies or while'",
    ("            result.place = inputs[first + k] if k < carry else None\n", ""),
    ("if size + total(inner) > largest:", "if size > largest:"),
    ('        if name == "scan" and turns == 1:  # XLA removes the loop\n', "        if False:\n"),
    ("        value.root.last = self.step\n", "", "planner/test_traced.py -k alive"),
    ("times=self.times * turns)", "times=self.times)"),
    ("            inputs[k] = _own(inputs[k])\n", "            pass\n", "planner/test_traced.py -k once"),
    ("            inputs = [_own(value) for value in inputs]\n", "            pass\n", "planner/test_traced.py -k once"),
    ("        if key not in self.known or not self.on_gpu:\n", "        if True:\n", "planner/test_traced.py -k once"),
    ("return equation.primitive, str(equation.params), *operands", "return equation.primitive, *operands",
     "planner/test_traced.py -k once"),
    ("self.on_gpu and not carried and value is not None and value.is_spread", "self.on_gpu and value is not None and value.is_spread",
     "planner/test_traced.py -k once"),
    ("return not self.written and 4 * sum(", "return not self.written and 0 * sum(", "planner/test_traced.py -k once"),
    ('dims.count("fc") + dims.count("cf") < 2', 'dims.count("fc") + dims.count("cf") < 3', "planner/test_traced.py -k once"),
    ("            if not copy.written:\n", "            if True:\n", "planner/test_traced.py -k once"),
    ("        read = tuple(_array(x, v.array.label, v.array.name) for", "        read = tuple(v.array for",
     "planner/test_traced.py -k 'flops and t5'"),
)  # fmt: skip

mistakes(
    "plan",
    "planner/traced.py",
    "planner/test_traced.py -k 'flops and t5'",
    ("return 2.0 * math.prod(run.inputs[0]", "return 1.0 * math.prod(run.inputs[0]"),
    ('"rematted_computation" in run.where', '"checkpoint" in run.where'),
)

mistakes(
    "plan",
    "planner/step_time.py",
    "planner/test_traced.py -m '' -k pipeline_of_two",
    ("ticks_TP.max(1).sum()", "ticks_TP.min(1).sum()"),
)

mistakes(
    "plan",
    "planner/generation_memory.py",
    "planner/test_memory.py -k generation",
    ("job.ctx.placement.stored.shape[1] / job.ctx.placement.num_experts", "job.ctx.placement.experts.shape[2] / job.ctx.placement.num_experts"),
    ('group == "moe" and name in EXPERT_WEIGHTS', 'group == "moe"'),
    ("min(window or slots, slots)", "slots"),
    ("* copies\n", "\n"),
)  # fmt: skip

mistakes(
    "plan",
    "planner/sizes.py",
    "planner/test_memory.py -k log_sum",
    ("max(job.ctx.ops.max_documents or 0, 2)", "max(job.ctx.ops.max_documents or 0, 1)"),
    ('counts = job.ctx.ops.attention == "cudnn" and documents > 0', "counts = documents > 0"),
)

mistakes(
    "plan",
    "families/context.py",
    "kernels/test_kernels.py -k auto_unrolls",
    ('loops = others or train.grad_accum > 1 or train.remat == "full"', 'loops = others or train.remat == "full"'),
    ('loops = others or train.grad_accum > 1 or train.remat == "full"', "loops = others or train.grad_accum > 1"),
    ('("pipe", "expert", "context", "tensor")', '("pipe", "expert", "context")'),
    ("(too_long or layout.gathers_params) and not", "too_long and not"),
)

mistakes(
    "plan",
    "planner/serving.py",
    "planner/test_serving.py",
    ("share = 1 - (1 - moe.choices / moe.num_experts) ** of_copy", "share = min(1.0, of_copy * moe.choices / moe.num_experts)"),
    ("return size + 4.0 * outputs", "return float(size)"),
    ("rows if \"head\" in p.roles else tokens", "tokens"),
    ("sent = 2 * (self.tensor - 1) / self.tensor * 2 * tokens", "sent = (self.tensor - 1) / self.tensor * 2 * tokens"),
    ("return self.first_token + (self.tokens - 1) * self.each_token", "return self.first_token + self.tokens * self.each_token"),
    ("m.num_heads * (2 * m.latent.kv_rank + m.latent.rotary_dim)", "m.num_heads * (m.latent.kv_rank + m.latent.rotary_dim)"),
    ("rows = -(-batch // self.expert)", "rows = batch"),
    ("ctx.layout.parameters(families.spec(self.job.model))", "pass"),
)  # fmt: skip

mistakes(
    "plan", "planner/step_floor.py", "planner/test_mesh_search.py -k 'bound_of or longest_chain'",
    ("chains * (sum(groups[:stage])", "chains * (sum(groups[: stage + 1])"),
    ("idle = share * work\n", "idle = 2 * share * work\n"),
    ("more = share * self.forward", "more = 2 * share * self.forward"),
    ("least = (1 + share) * (work - self.weights) - work", "least = share * work"),
)  # fmt: skip

mistakes(
    "plan", "planner/mesh_search.py", "planner/test_mesh_search.py -k trying_everything",
    ("bound > limits[count - 1]", "bound > limits[0]"),
    ("            if accum <= branch.accum\n", "", "planner/test_mesh_search.py -k less_accumulation"),
    ("if least > self._limit:", "if least < self._limit:"),
    ("if numbers[key] % number == 0), default", "if number % numbers[key] == 0), default",
     "planner/test_mesh_search.py -k bound_of_its_branch"),
    ('if remat != "none" or not self.cfg', 'if remat != "none" or self.cfg', "planner/test_mesh_search.py -k copied_to_the_host"),
    ("return Branch(sizes, NEVER, least)", "return None", "planner/test_mesh_search.py -k cannot_fit"),
)  # fmt: skip

mistakes(
    "plan", "planner/estimate.py", "planner/test_mesh_search.py -k least_of_its_mesh",
    ("return size / replicas", "return size"),
    ("return 4 * stored + optimizer + cast", "return 8 * stored + optimizer + cast"),
    ("optimizer = 0 if job.train.offloads_optimizer else _least", "optimizer = 0 * _least"),
)  # fmt: skip

mistakes(
    "plan", "planner/shards.py", "planner/test_mesh_search.py -k checks_allow",
    ("        if math.prod(p.shape) > 1\n        for size, axis", "        if math.prod(p.shape) < 1\n        for size, axis"),
)  # fmt: skip

mistakes(
    "plan", "planner/step_clocks.py", "planner/test_mesh_search.py -k bound_of",
    ("waits / turns,", "waits,",
     {"survives": "idle time hides it in the cases of the test: the bound is then 3.4% too low in place of 4.4%"}),
)  # fmt: skip

OFFLOAD = "training/test_offload.py"

mistakes(
    "planner", "planner/offload.py", OFFLOAD,
    ("arrays[0][0] if i.op in", "not arrays[0][0] if i.op in", OFFLOAD + " -k by_hand"),
    ("[on_host for on_host, n in arrays if n > 4][-1]", "arrays[0][0]", OFFLOAD + " -k by_hand"),
    ("max(on_device))]", "sum(on_device))]", OFFLOAD + " -k by_hand"),
    ("found[direction] += times[name] * size", "found[direction] += size", OFFLOAD + " -k by_hand"),
    ("return min(IN_FLIGHT, layers) if", "return layers if", OFFLOAD + " -k compiler"),
    ("return shards.bytes_of(state) - shards.bytes_of(device_state(job, state))", "return shards.bytes_of(state)",
     OFFLOAD + " -k compiler"),
)  # fmt: skip

mistakes(
    "planner", "planner/step_time.py", OFFLOAD,
    ("max(0.0, each - forward) + max(0.0, each - backward)", "max(0.0, 2 * each - forward - backward)",
     OFFLOAD + " -k passes_waits"),
    ('"optimizer state from and to the host": (state, state),', '"optimizer state from and to the host": (state, 0.0),',
     OFFLOAD + " -k waits"),
)  # fmt: skip

mistakes(
    "planner", "planner/estimate.py", OFFLOAD,
    ("size * (1 if name == state else job.train.grad_accum)", "size", OFFLOAD + " -k waits"),
)  # fmt: skip

mistakes(
    "plan", "planner/beside.py", "planner/test_beside.py -k 'rollout or decoding or forward'",
    ("cache=cache * (1 - rl.tokens / 2 / job.data.seq_len)", "cache=cache"),
    ("gathered=used - stored", "gathered=used"),
    ("rl.tokens * rl.turns * job.train.grad_accum", "rl.tokens * rl.turns"),
    ("passes = 2 * aim.exact + scores_again(", "passes = aim.exact + scores_again("),
    ("groups = min(job.ctx.layout.stages.stages, rows)", "groups = 1", "planner/test_beside.py -k stages"),
    ("aim.exact and job.ctx.layout.pipeline is None", "aim.exact", "planner/test_beside.py -k stages"),
    ("not (op.in_backward or op.for_remat or op.of_update)", "not (op.for_remat or op.of_update)"),
    ("batch_size=job.cfg.microbatch_size", "batch_size=job.data.batch_size"),
)  # fmt: skip

mistakes(
    "plan", "planner/generation_memory.py", "planner/test_memory.py -k cache_of_a_stage",
    ("layers = len(stages.layer_of_slot) // stages.stages", "layers = m.num_layers // stages.stages"),
)  # fmt: skip

mistakes(
    "plan", "planner/estimate.py", "planner/test_beside.py -k reference",
    ("itemsize(job.train) * cast + 4 * rest", "itemsize(job.train) * (cast + rest)"),
    ("parts.get(FROZEN, 0)", "0"),
    ("aim.reference is not None or not job.model.lora.rank", "not job.model.lora.rank"),
)  # fmt: skip

mistakes(
    "plan", "cli/plan_time.py", "planner/test_beside.py -k planned",
    ("budget / time.tokens * whole / 86400", "budget / time.tokens * time.total / 86400"),
)  # fmt: skip

mistakes(
    "plan", "cli/plan_memory.py", "planner/test_beside.py -k does_not_fit",
    ("of_phase in (parts, rollout))", "of_phase in (parts,))"),
)  # fmt: skip

mistakes(
    "plan",
    "planner/programs.py",
    "planner/test_programs.py",
    ("of_all * others(hosts) / network", "of_all * others(c.devices) / network"),
    ("seconds * 4 / 5", "seconds"),
    ('seconds / shards.mesh_sizes(job.ctx)["tensor"]', "seconds"),
    ("times=op.times * matrices", "times=op.times"),
    ('op.dtype != "float32"', "True"),
    ("launches if late else 0.0", "launches"),
    ("1e-6 * math.fsum(op.times * _matrices(op)", "1e-6 * math.fsum(op.times"),
)

mistakes(
    "plan",
    "planner/step_time.py",
    "planner/test_programs.py",
    ("max(0.0, starting - busy)", "starting"),
    ("for _, kind, alone in work.collectives if kind in OF_LAYERS", "for _, kind, alone in work.collectives"),
)

mistakes(
    "plan",
    "planner/sizes.py",
    "planner/test_layer_stacks.py",
    ("replace(model, moe=moe), one.depth)", "model, one.depth)"),
    (
        'named("head_width", m.head_width) + named("value_width", m.value_width)',
        '2 * named("head_width", m.head_width)',
    ),
)

mistakes(
    "plan",
    "planner/traffic.py",
    "planner/test_layer_stacks.py",
    ("wide = 1 if m.latent.kv_rank else 2", "wide = 2"),
    ('(m.latent.rotary_dim, repeats["attention"])', '(m.latent.rotary_dim, repeats["layer_in"])'),
    ("return accum * stack.layers", "return accum * self.job.model.num_layers", "planner/test_layer_stacks.py -m slow"),
)
