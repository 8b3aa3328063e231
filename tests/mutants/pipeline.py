"""Mutants of pipelines."""

from mutants.rows import PIPELINE, mistakes

STACKS = "pipeline/test_pipeline.py -k 'slots_of_their_own or (gives and t5)'"

mistakes(
    "pipeline", "pipeline/schedule.py", "pipeline/test_schedule.py",
    ("[int(self.backward_MG[unit]) + 1]", "[int(self.backward_MG[unit])]"),
    ("max(ready[stage], needed) + (", "needed + (", "pipeline/test_schedule.py pipeline/test_partition.py"),
    ("m * self.chunks + g // self.stages", "m * self.chunks + g % self.chunks", "pipeline/test_schedule.py pipeline/test_pipeline.py"),
    ("(self.forward_MG <= ticks) & (ticks <= self.backward_MG)", "(self.forward_MG <= ticks) & (ticks < self.backward_MG)"),
)  # fmt: skip

mistakes(
    "pipeline", "pipeline/program.py", "pipeline/test_pipeline.py -k 'rows or idle or bubble or number or fit'",
    ("share = 3 * self.schedule.microbatches", "share = 2 * self.schedule.microbatches"),
    ("(s.forward_MG <= tick) & (tick <= s.backward_MG)", "(s.forward_MG < tick) & (tick <= s.backward_MG)",
     {"equivalent": "a stage that goes forward at a tick is not idle then, and its free slot is not read"}),
    ("return self._at_T(self.schedule.backward_MG[:, 0])", "return self._at_T(self.schedule.backward_MG[:, -1])",
     PIPELINE),
    ("chunk - chunks.start, slot", "chunk, slot", STACKS),
)  # fmt: skip

mistakes(
    "pipeline", "pipeline/schedule.py", "pipeline/test_schedule.py",
    ("lambda m, s: 2 * (P - 1) - s + m)", "lambda m, s: 2 * P - s + m)"),
    ("chunks * microbatches + stages - 1", "chunks * microbatches + stages"),
)  # fmt: skip

mistakes(
    "pipeline", "pipeline/resolve.py", "pipeline/test_pipeline.py -k 'rows or idle or bubble or number or fit'",
    ("if m <= 4 * stages]", "if m <= 2 * stages]"),
    ("evenly.lockstep_seconds <= best.lockstep_seconds", "evenly.lockstep_seconds >= best.lockstep_seconds", "planner/test_profile.py -k 'cut'"),
)  # fmt: skip

mistakes(
    "pipeline", "pipeline/execute.py", PIPELINE,
    ("counts = is_layer & unit.active\n            aux", "counts = is_layer\n            aux", "pipeline/test_pipeline.py -k 'auxiliary'"),
    ("counts = is_layer & unit.active\n            sums", "counts = is_layer\n            sums"),
    ("layer = trips - 1 - i", "layer = i"),
    ("penalty + jnp.where(counts, share, 0), aux", "penalty + share, aux", "pipeline/test_pipeline.py -k 'auxiliary'", {"survives": "no caller reads the sum of penalties, whose gradients are taken by themselves"}),
    (" send(dx, self.axis, -1)", " send(dx, self.axis, 1)"),
    ("before = where(used, before, self.carrier.stream(dx, part.index - 1))", "", STACKS),
    ("entries = jax.tree.map(lambda s, a: write_at(s, a, slot), entries, before)", "", STACKS),
    ("output = where(unit.active, output, index_leading(outputs, unit.slot))", "pass", "pipeline/test_pipeline.py -m '' -k 'gives and t5 and gpipe'"),
)  # fmt: skip

mistakes(
    "pipeline", "pipeline/parts.py", "training/test_precision.py -k 'near and pipe'",
    ("partial(jax.tree.map, lambda a: collectives.zeros(a.shape, jnp.float32, a))",
     "partial(jax.tree.map, lambda a: collectives.zeros(a.shape, a.dtype, a))"),
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
    ("lane_seconds(*self.unit_seconds).sum())", "lane_seconds(*self.unit_seconds).max())"),
    ("(lanes / schedule.microbatches", "(schedule.microbatches / schedule.microbatches"),
    ("stored_IJ += schedule.pair_slots", "stored_IJ += schedule.slots"),
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
    ("fns = replace(self.fns, split=self.check_functions(shared, stacked, microbatches))",
     "fns = (self.check_functions(shared, stacked, microbatches), self.fns)[1]",
     "pipeline/test_pipeline.py -k weight_units"),
)  # fmt: skip

mistakes(
    "pipeline", "kernels/taps.py", "pipeline/test_pipeline.py -k cannot_compute",
    ("if len(uses) != 1 or found_shapes != [shapes]:", "if found_shapes != [shapes]:"),
    ("found_shapes != [shapes]:", "not marked:"),
    ('"closed_call")', '"closed_call", "scan")'),
    ("if not isinstance(factor, int | float):", "if False:", "kernels/test_taps.py -k another_use"),
    ("if not (required or leaf in collector.sites):", "if True:", "kernels/test_taps.py -k another_use"),
)  # fmt: skip

mistakes(
    "pipeline", "pipeline/stages.py", "pipeline/test_pipeline.py -k hold_every",
    ("tuple(-(-n // self.period) for n in self.layers)", "tuple(n // self.period for n in self.layers)"),
)  # fmt: skip

mistakes(
    "pipeline", "pipeline/rotation.py", "pipeline/test_rotation.py",
    ("(tick >= stage) & (group < self.groups) & (turn < passes)", "(tick >= stage) & (turn < passes)"),
    ("last.active & (last.chunk == self.chunks - 1)", "last.active & (last.chunk == 0)"),
    ("passes * self.chunks * self.stages + self.groups - 1", "passes * self.chunks * self.stages + self.stages"),
)  # fmt: skip

SHAPES = "pipeline/test_any_shape.py -k 'gradients_of_one_device'"
THREE = "pipeline/test_any_shape.py -k 'gradients_of_one_device and 3'"

mistakes(
    "pipeline", "pipeline/any_shape.py", SHAPES,
    ("self.pipeline.loss(y, rows) / self.pieces", "self.pipeline.loss(y, rows)"),
    ("jnp.where(row.forward >= 0, x, read_at(stash, row.forward_slot))", "x"),
    ("[(b, a) for a, b in path] if back else path", "path"),
    ("runs_it = part % count == replica", "runs_it = replica == 0"),
    ("source = (replica - by) % count", "source = (replica + by) % count", THREE),
    ("sent = read_at(rows, (replica + by) % count)", "sent = read_at(rows, (replica - by) % count)", THREE),
    ("self.reduce_replicas(collectives.all_reduce(a, self.pipeline.batch_axes), device)", "self.reduce_replicas(a, device)"),
    ("part = k * self.replicas.counts[stage] + unit.replica", "part = k + unit.replica * self.replicas.runs(stage)"),
)  # fmt: skip

mistakes(
    "pipeline", "pipeline/packing.py", "pipeline/test_any_shape.py -k 'stores_its_own_stage'",
    ("max(widths.get(dtype, 0), -(-size // count))", "max(widths.get(dtype, 0), size)"),
)  # fmt: skip

mistakes(
    "pipeline", "pipeline/replicas.py", "pipeline/test_replicated_stages.py",
    ("2 * (replicas_R - 1) / replicas_R", "2 * replicas_R / replicas_R"),
    ("_sums(layer_seconds) + transfer + transfer[:, None]", "_sums(layer_seconds) + transfer"),
    ("if times[p - 1] <= least * (1 + 1e-9))", "if times[p - 1] <= 2 * least)"),
    ("self.device(stage, j + by))", "self.device(stage, j - by))"),
)  # fmt: skip

mistakes(
    "pipeline", "pipeline/measure.py", "pipeline/test_any_shape.py -k 'choice'",
    ("for x in [*received[1:], x])", "for x in received)"),
)  # fmt: skip
