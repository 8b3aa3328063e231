"""Tests of tables sharded by rows: equal to a dense table with dense row-wise Adagrad, on several meshes."""

import json
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxstack.common.errors import ConfigError
from jaxstack.sharding.tables import EmbeddingTable

ROWS, WIDTH, BATCH, FEATURES, STEPS = 53, 6, 16, 3, 4
MESHES = {
    "one": {"x": 1},
    "eight": {"x": 8},
    "two axes": {"data": 2, "model": 2},
    "three axes": {"a": 2, "b": 2, "c": 2},
}


def mesh_of(sizes: dict[str, int]) -> Mesh:
    count = int(np.prod([*sizes.values()]))
    return Mesh(
        np.array(jax.devices()[:count]).reshape(*sizes.values()), (*sizes,), axis_types=(AxisType.Auto,) * len(sizes)
    )


def batches(rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns ids, of which some are frequent, and targets."""
    skewed = [rng.zipf(1.3, size=(BATCH, FEATURES)) % ROWS for _ in range(STEPS)]
    return [(ids.astype(np.int32), rng.standard_normal(BATCH)) for ids in skewed]


def dense(values: np.ndarray, weights: np.ndarray, data, rate: float) -> tuple[list[float], np.ndarray, np.ndarray]:
    """Trains with NumPy in float64: the losses, the table and the sums of dense row-wise Adagrad."""
    table = values.astype(np.float64).copy()
    sums = np.zeros(ROWS)
    losses = []
    for ids, target in data:
        out = np.einsum("bfd,fd->b", table[ids], weights)
        losses.append(float(np.mean((out - target) ** 2)))
        by_vector = (2 / BATCH * (out - target))[:, None, None] * weights
        grads = np.zeros_like(table)
        np.add.at(grads, ids, by_vector)
        sums += np.mean(grads**2, axis=1)
        table -= rate * grads / (np.sqrt(sums) + 1e-8)[:, None]
    return losses, table, sums


def loss_of(table: EmbeddingTable, rows, lookup, weights, target):
    out = jnp.einsum("bfd,fd->b", table.vectors(rows, lookup), weights)
    return jnp.mean((out - target) ** 2)


@pytest.mark.parametrize("slots", [BATCH * FEATURES, 6])
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.float64, 1e-12)], ids=["f32", "f64"])
def test_training_equals_the_dense_table(mesh, slots, dtype, tolerance, rng):
    """float32 has 24 bits, and a row's gradient is a sum of a few terms in another order."""
    if slots == 6 and mesh == {"x": 1}:
        slots = BATCH * FEATURES  # one device has all unique ids
    if slots == 6 and len(mesh) == 2:
        slots = 12
    with jax.enable_x64(dtype == jnp.float64):
        table = EmbeddingTable(ROWS, WIDTH, mesh_of(mesh), slots, dtype)
        values = rng.standard_normal((ROWS, WIDTH))
        weights = rng.standard_normal((FEATURES, WIDTH))
        data = batches(rng)
        state = table.from_dense(values)

        @jax.jit
        def step(state, ids, target):
            rows, lookup = table.fetch(state, ids)
            read = partial(loss_of, table, lookup=lookup, weights=jnp.asarray(weights, dtype), target=target)
            loss, grads = jax.value_and_grad(read)(rows)
            return table.update(state, lookup, grads, 0.1), loss, lookup

        losses = []
        for ids, target in data:
            state, loss, lookup = step(state, jnp.asarray(ids), jnp.asarray(target, dtype))
            table.check(lookup)
            losses.append(float(loss))
        found, sums = table.to_dense(state)
    expected = dense(values, weights, data, 0.1)
    np.testing.assert_allclose(losses, expected[0], rtol=tolerance)
    np.testing.assert_allclose(found, expected[1], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(sums, expected[2], rtol=tolerance, atol=tolerance)
    unseen = sorted({*range(ROWS)} - {int(i) for ids, _ in data for i in ids.ravel()})
    assert len(unseen) > 3
    np.testing.assert_array_equal(found[unseen], values[unseen].astype(dtype))


def test_values_do_not_depend_on_the_mesh():
    key = jax.random.key(3)
    tables = [EmbeddingTable(ROWS, WIDTH, mesh_of(mesh), 4) for mesh in MESHES.values()]
    first, *others = [table.to_dense(table.init(key))[0] for table in tables]
    assert first.std() == pytest.approx(0.01, rel=0.2)
    for other in others:
        np.testing.assert_array_equal(first, other)


def test_an_overflow_is_loud_and_changes_nothing(rng):
    """Device 0 asks for 3 rows that device 1 stores, and has 2 slots for it."""
    table = EmbeddingTable(ROWS, WIDTH, mesh_of({"x": 8}), slots=2)
    state = table.from_dense(rng.standard_normal((ROWS, WIDTH)))
    ids = np.zeros((8, 3), np.int32)
    ids[0] = [1, 9, 17]
    rows, lookup = table.fetch(state, jnp.asarray(ids))
    assert int(lookup.overflow) == 1
    assert np.isnan(rows).all()
    with pytest.raises(ConfigError, match="slots=2 is too small: 1 unique id has no slot"):
        table.check(lookup)
    after = table.update(state, lookup, jnp.ones_like(rows), 0.1)
    np.testing.assert_array_equal(after.rows, state.rows)
    np.testing.assert_array_equal(after.sums, state.sums)
    ids[0] = [1, 9, 9]
    rows, lookup = table.fetch(state, jnp.asarray(ids))
    table.check(lookup)
    assert not np.isnan(rows).any()


@pytest.mark.parametrize("wrong", [-1, ROWS, 2**30])
def test_an_unknown_id_is_loud(wrong, rng):
    table = EmbeddingTable(ROWS, WIDTH, mesh_of({"x": 8}), slots=3)
    state = table.from_dense(rng.standard_normal((ROWS, WIDTH)))
    rows, lookup = table.fetch(state, jnp.full((8, 2), 5, jnp.int32).at[3, 1].set(wrong))
    assert np.isnan(rows).all()
    with pytest.raises(ConfigError, match="1 id is not in 0 to 52"):
        table.check(lookup)


def test_mistakes():
    mesh = mesh_of({"x": 8})
    with pytest.raises(ConfigError, match="slots=0 is not a size"):
        EmbeddingTable(ROWS, WIDTH, mesh, 0)
    with pytest.raises(ConfigError, match="exceeds ids of 32 bits"):
        EmbeddingTable(2**31, WIDTH, mesh, 1)
    table = EmbeddingTable(ROWS, WIDTH, mesh, 1)
    with pytest.raises(ConfigError, match=r"int32\[7\], but 8 devices split integers"):
        table.fetch(table.init(jax.random.key(0)), jnp.zeros(7, jnp.int32))
    with pytest.raises(ConfigError, match="Give a row for each id"):
        table.from_dense(np.zeros((3, 3)))


def test_a_flax_model_reads_the_table(rng):
    """The example of docs/tables.md: a model of nnx without any embedding of its own learns, and so does the table."""
    from flax import nnx

    table = EmbeddingTable(1000, 8, mesh_of({"x": 8}), slots=16)
    state = table.init(jax.random.key(0))
    model = nnx.Linear(FEATURES * 8, 1, rngs=nnx.Rngs(0))
    ids = jnp.asarray(rng.integers(0, 1000, (16, FEATURES)), jnp.int32)
    target = jnp.asarray(rng.standard_normal(16), jnp.float32)

    @nnx.jit
    def step(model, state):
        rows, lookup = table.fetch(state, ids)

        def loss(model, rows):
            vectors = table.vectors(rows, lookup)
            return jnp.mean((model(vectors.reshape(16, -1))[:, 0] - target) ** 2)

        value, (_, grads) = nnx.value_and_grad(loss, argnums=(0, 1))(model, rows)
        return table.update(state, lookup, grads, 0.3), value, lookup

    losses = []
    for _ in range(30):
        state, value, lookup = step(model, state)
        losses.append(float(value))
    table.check(lookup)
    assert losses[-1] < 0.3 * losses[0]


SCRIPT = """
import json, re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh
from jaxstack.sharding.tables import EmbeddingTable, TableState
mesh = Mesh(np.array(jax.devices()).reshape(8, 8), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
table = EmbeddingTable(1_000_000, 32, mesh, slots=24)
def step(state, ids):
    rows, lookup = table.fetch(state, ids)
    grads = jax.grad(lambda r: jnp.sum(table.vectors(r, lookup) ** 2))(rows)
    return table.update(state, lookup, grads, 0.1), lookup
count = table.rows_per_device * table.devices
shapes = TableState(*(jax.ShapeDtypeStruct(s, jnp.float32, sharding=table.sharding) for s in ((count, 32), (count,))))
ids = jax.ShapeDtypeStruct((64 * 64, 8), jnp.int32, sharding=table.sharding)
compiled = jax.jit(step, donate_argnums=0).lower(shapes, ids).compile()
text = compiled.as_text()
found = []
for line in text.splitlines():
    for shapes in re.findall(r" = (.*) all-to-all(?:-start)?\\(", line):
        for dims in re.findall(r"(?:s32|f32)\\[([\\d,]+)\\]", shapes):
            found.append(4 * int(np.prod([int(d) for d in dims.split(",")])))
others = re.findall(r" (all-gather|reduce-scatter|collective-permute)(?:-start)?\\(", text)
sizes = table.bytes(64 * 8)
memory = compiled.memory_analysis()
print(json.dumps({"found": found, "others": others, "sizes": sizes._asdict(),
                  "arguments": memory.argument_size_in_bytes, "temporary": memory.temp_size_in_bytes,
                  "aliased": memory.alias_size_in_bytes}))
"""


def test_compiled_for_64_devices_it_moves_the_bytes_of_the_formula():
    """64 parts of 24 slots: ids, rows and gradients. The formula leaves out the part that stays on the device."""
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "64", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    sizes = result["sizes"]
    slots = 64 * 24
    assert sum(result["found"]) == slots * 4 + 2 * slots * 32 * 4
    assert sum(result["found"]) * 63 / 64 == sizes["fetch"] + sizes["update"]
    assert result["others"] == []  # nobody gathers the table or its gradient
    rows = -(-1_000_000 // 64)
    assert sizes["table"] == rows * 32 * 4
    assert result["arguments"] == sizes["table"] + sizes["optimizer"] + 64 * 8 * 4
    assert result["aliased"] == sizes["table"] + sizes["optimizer"]  # changed in place
    assert result["temporary"] < sizes["table"]
