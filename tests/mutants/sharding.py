"""Mutants of collectives, the context and sharding."""

from mutants.rows import GENERATE, mistakes

MESHES = "test_meshes.py -k 'llama3 and dropout'"

mistakes(
    "collectives", "sharding/collectives.py", MESHES,
    ("lax.dynamic_slice_in_dim(x, index(axes) * size, size, dim)", "lax.dynamic_slice_in_dim(x, index(axes), size, dim)"),
    ("lax.dynamic_update_slice_in_dim(padded, x, index(axes) * x.shape[dim], dim)",
     "lax.dynamic_update_slice_in_dim(padded, x, index(axes), dim)", GENERATE + " -k mesh"),
    ("return lax.psum(x, axes) if axes else x", "return lax.pmean(x, axes) if axes else x"),
)  # fmt: skip

mistakes(
    "context", "models/layout.py", MESHES,
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
    "sharding",
    "sharding/partitioner.py",
    "sharding/test_partitioner.py -k 'named or idle or counted'",
    ("if module.feature_group_count > 1:", "if module.feature_group_count > 2:"),
    ("math.prod(_numbers(module.strides)) > 1 and _differ(spec, rank)", "math.prod(_numbers(module.strides)) > 1"),
    ("if sum(size > 1 for size in mesh.shape.values()) < 2:", "if sum(size > 1 for size in mesh.shape.values()) < 1:"),
    ("layer.start > 0 and sum", "sum"),
    ("for group in groups) > 1", "for group in groups) > 0"),
    ("outputs = module.kernel.ndim - len(module.out_features)", "outputs = module.kernel.ndim - 1"),
)  # fmt: skip

mistakes(
    "tables", "sharding/tables.py", "sharding/test_tables.py",
    ("total = jax.ops.segment_sum(parts, inverse.reshape(-1), asked.size)", "total = jnp.zeros_like(parts).at[inverse.reshape(-1)].set(parts)"),
    ("+ jnp.mean(total**2, -1)", "+ jnp.sum(total**2, -1)"),
    ("fits = (unique < none) & (place < slots)", "fits = (unique < none) & (place <= slots)"),
    ("valid = (flat >= 0) & (flat < self.num_rows)", "valid = flat < self.num_rows", "sharding/test_tables.py -k unknown"),
    ("asked = jnp.where((asked < 0) | failed, none, asked)", "asked = jnp.where(asked < 0, none, asked)"),
    ("keys = jax.vmap(partial(jax.random.fold_in, key))(ids)", "keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(ids.size))"),
    ("sent = (self.devices - 1) * slots", "sent = self.devices * slots"),
)  # fmt: skip
