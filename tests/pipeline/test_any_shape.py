"""Pipelines of different functions give the loss and every gradient of one device, and store each stage once."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxstack.common.tree import flatten
from jaxstack.pipeline import (
    PackedStages,
    ScheduleError,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    pack_stages,
    profile_functions,
    replicate,
    value_and_grad_of_stages,
    zb1,
)

SIDE, ROWS = 8, 24


def conv(w: jax.Array, x: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def larger(x: jax.Array) -> jax.Array:
    return x.repeat(2, 1).repeat(2, 2)


class UNet:
    """Four stages: two go down and keep what the stages that go up concatenate; a skip passes through two of them."""

    @staticmethod
    def params(rng: np.random.Generator, dtype: Any = np.float32) -> list[Any]:
        draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / np.sqrt(np.prod(shape[:-1])), dtype)  # noqa: E731
        return [
            {"in": draw(3, 3, 1, 4)},
            {"down": draw(3, 3, 4, 6), "time": draw(1, 6)},
            [draw(3, 3, 6, 12), draw(3, 3, 12, 6)],
            {"up": draw(3, 3, 10, 4), "head": {"w": draw(4, 1), "b": draw(1)}},
        ]

    @staticmethod
    def stages() -> list[Any]:
        def first(params: Any, batch: Any) -> Any:
            return {"skips": (), "x": jax.nn.silu(conv(params["in"], batch["noisy"])), "level": batch["level"]}

        def down(params: Any, given: Any) -> Any:
            time = given["level"][:, None].astype(params["time"].dtype) @ params["time"]
            x = jax.nn.silu(conv(params["down"], given["x"], stride=2) + time[:, None, None])
            return {"skips": (given["x"],), "x": x}

        def middle(params: Any, given: Any) -> Any:
            x = jax.nn.silu(conv(params[0], given["x"], stride=2))
            return given | {"x": given["x"] + conv(params[1], larger(x))}

        def up(params: Any, given: Any) -> Any:
            x = jnp.concatenate([given["skips"][0], larger(given["x"])], -1)
            return jax.nn.silu(conv(params["up"], x)) @ params["head"]["w"] + params["head"]["b"]

        return [first, down, middle, up]

    @staticmethod
    def loss(y: Any, batch: Any) -> Any:
        return jnp.square(y - batch["clean"]).astype(jnp.promote_types(y.dtype, jnp.float32)).mean()

    @staticmethod
    def batch(rng: np.random.Generator, dtype: Any = np.float32, rows: int = ROWS) -> Any:
        draw = lambda: jnp.asarray(rng.normal(size=(rows, SIDE, SIDE, 1)), dtype)  # noqa: E731
        return {"noisy": draw(), "clean": draw(), "level": jnp.asarray(rng.integers(1, 4, rows), jnp.int32)}


class ConvNet:
    """Three stages: channels grow as pictures shrink, and the last one classifies. A mask of booleans goes along."""

    @staticmethod
    def params(rng: np.random.Generator, dtype: Any = np.float32) -> list[Any]:
        draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / np.sqrt(np.prod(shape[:-1])), dtype)  # noqa: E731
        return [
            {"w": draw(3, 3, 1, 3)},
            {"w": draw(3, 3, 3, 8), "v": draw(3, 3, 8, 8)},
            {"w": draw(8, 5), "b": draw(5)},
        ]

    @staticmethod
    def stages() -> list[Any]:
        def last(params: Any, given: Any) -> Any:
            x, mask = given
            return jnp.where(mask[..., None], x, 0).mean((1, 2)) @ params["w"] + params["b"]

        def wider(params: Any, x: Any) -> Any:
            x = jax.nn.relu(conv(params["w"], x, stride=2))
            x = x + conv(params["v"], x)
            return x, x.max(-1) > 0.1

        return [lambda params, batch: jax.nn.relu(conv(params["w"], batch["x"])), wider, last]

    @staticmethod
    def loss(y: Any, batch: Any) -> Any:
        log_p = jax.nn.log_softmax(y.astype(jnp.promote_types(y.dtype, jnp.float32)))
        return -jnp.take_along_axis(log_p, batch["label"][:, None], 1).mean()

    @staticmethod
    def batch(rng: np.random.Generator, dtype: Any = np.float32, rows: int = ROWS) -> Any:
        x = jnp.asarray(rng.normal(size=(rows, SIDE, SIDE, 1)), dtype)
        return {"x": x, "label": jnp.asarray(rng.integers(0, 5, rows), jnp.int32)}


def on_one_device(model: Any, params: Any, batch: Any) -> Any:
    """Returns the loss and the gradients of the stages, one after the other, by autodiff."""

    def plain(params: Any) -> Any:
        x = batch
        for stage, tree in zip(model.stages(), params, strict=True):
            x = stage(tree, x)
        return model.loss(x, batch)

    return jax.jit(jax.value_and_grad(plain))(params)


def mesh_of(devices: int, data: int = 1, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    found = jax.devices()[: devices * data]
    return jax.make_mesh((data, devices), ("data", "pipe"), axis_types=(kind,) * 2, devices=found)


def compare(found: Any, expected: Any, tolerance: float) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=tolerance)
    other = flatten(expected[1])
    assert flatten(found[1]).keys() == other.keys()
    for path, a in flatten(found[1]).items():
        error = jnp.linalg.norm(jnp.ravel(a - other[path]))
        assert error <= tolerance * jnp.linalg.norm(jnp.ravel(other[path].astype(a.dtype))), path


@pytest.mark.parametrize(
    ("model", "schedule", "data", "replicas"),
    [
        (UNet, one_f_one_b(4, 6), 2, None),
        (UNet, gpipe(4, 3), 1, None),
        (ConvNet, one_f_one_b(3, 4), 1, (1, 2, 1)),
        (ConvNet, one_f_one_b(3, 2), 1, (2, 3, 1)),
        pytest.param(ConvNet, gpipe(3, 1), 1, (1, 1, 2), marks=pytest.mark.slow),
        pytest.param(UNet, gpipe(4, 2), 1, (1, 3, 1, 3), marks=pytest.mark.slow),
        pytest.param(UNet, one_f_one_b(4, 8), 1, None, marks=pytest.mark.slow),
        pytest.param(ConvNet, one_f_one_b(3, 3), 2, (1, 2, 1), marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", None) or getattr(value, "name", None) or str(value),
)
def test_stages_of_any_shape_give_the_gradients_of_one_device(model, schedule, data, replicas, rng):
    params, batch = model.params(rng), model.batch(rng)
    mesh = mesh_of(sum(replicas or (1,) * schedule.stages), data)
    how: dict[str, Any] = {"schedule": schedule, "mesh": mesh, "batch_axes": "data", "replicas": replicas}
    run = value_and_grad_of_stages(model.stages(), model.loss, **how)
    loss, grads = jax.jit(run)(pack_stages(params, mesh, replicas=replicas), batch)
    assert isinstance(grads, PackedStages)
    # Sums of float32 in another order. A missing or doubled part would be of the order of one.
    compare((loss, grads.unpack()), on_one_device(model, params, batch), 1e-5)


def test_in_float64_they_are_equal_to_twelve_digits(rng):
    """Rounding is 1e-16 a sum, so that twelve digits leave room for sums in another order and for nothing else."""
    with jax.enable_x64(True):
        params, batch = UNet.params(rng, np.float64), UNet.batch(rng, np.float64)
        mesh = mesh_of(4)
        run = value_and_grad_of_stages(UNet.stages(), UNet.loss, schedule=one_f_one_b(4, 6), mesh=mesh)
        loss, grads = jax.jit(run)(pack_stages(params, mesh), batch)
        assert loss.dtype == jnp.float64
        compare((loss, grads.unpack()), on_one_device(UNet, params, batch), 1e-12)


def test_in_bfloat16_they_round_as_often_as_one_device(rng):
    """Each product rounds to 8 bits (0.4%). The pipeline sums the gradients of microbatches in float32."""
    half = UNet.params(rng, jnp.bfloat16), UNet.batch(rng, jnp.bfloat16)
    half[0][3]["head"] = jax.tree.map(lambda a: a.astype(jnp.float32), half[0][3]["head"])  # two dtypes in one stage
    exact = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, half)
    mesh = mesh_of(4)
    run = value_and_grad_of_stages(UNet.stages(), UNet.loss, schedule=one_f_one_b(4, 6), mesh=mesh)
    packed = pack_stages(half[0], mesh)
    assert {name: a.dtype for name, a in packed.arrays.items()} == {"bfloat16": jnp.bfloat16, "float32": jnp.float32}
    grads = flatten(jax.jit(run)(packed, half[1])[1].unpack())
    rounded, expected = (flatten(on_one_device(UNet, *trees)[1]) for trees in (half, exact))
    for path, g in expected.items():
        error, error_of_one = (jnp.linalg.norm(jnp.ravel(a[path] - g)) for a in (grads, rounded))
        assert grads[path].dtype == jnp.float32
        assert 0 < error_of_one < 0.1 * jnp.linalg.norm(g)
        assert error <= 1.5 * error_of_one + 1e-3 * jnp.linalg.norm(g), path


@pytest.mark.parametrize("kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)], ids=str)
def test_a_list_of_trees_gives_a_list_of_gradients(kind, rng):
    params, batch = tuple(ConvNet.params(rng)), ConvNet.batch(rng)
    mesh = mesh_of(4, 2, kind)
    how: dict[str, Any] = {"schedule": gpipe(3, 2), "mesh": mesh, "batch_axes": ("data",), "replicas": (1, 2, 1)}
    run = value_and_grad_of_stages(ConvNet.stages(), ConvNet.loss, **how)
    everywhere = jax.NamedSharding(mesh, jax.P())
    loss, grads = jax.jit(run)(*jax.device_put((params, batch), everywhere))
    assert isinstance(grads, tuple)
    compare((loss, grads), on_one_device(ConvNet, params, batch), 1e-5)


def test_one_stage_is_plain_accumulation(rng):
    params, batch = ConvNet.params(rng), ConvNet.batch(rng)

    def whole(trees: Any, x: Any) -> Any:
        for stage, tree in zip(ConvNet.stages(), trees, strict=True):
            x = stage(tree, x)
        return x

    run = value_and_grad_of_stages([whole], ConvNet.loss, schedule=gpipe(1, 4), mesh=mesh_of(1))
    loss, (grads,) = jax.jit(run)([params], batch)
    compare((loss, grads), on_one_device(ConvNet, params, batch), 1e-5)


@pytest.mark.parametrize("replicas", [(1, 1, 1), (1, 3, 2)], ids=str)
def test_a_device_stores_its_own_stage_alone(replicas, rng):
    """Rows are as long as the largest share needs, and optimizers keep them where they are."""
    params, mesh = ConvNet.params(rng), mesh_of(sum(replicas))
    packed = pack_stages(params, mesh, replicas=replicas)
    sizes = [sum(a.size for a in jax.tree.leaves(tree)) for tree in params]
    assert sizes == [27, 792, 45]
    width = max(-(-size // count) for size, count in zip(sizes, replicas, strict=True))
    (rows,) = packed.arrays.values()
    assert rows.shape == (sum(replicas), width)
    shards = {shard.device: np.asarray(shard.data) for shard in rows.addressable_shards}
    assert {shard.shape for shard in shards.values()} == {(1, width)}
    device = 0
    for tree, size, count in zip(params, sizes, replicas, strict=True):
        flat = np.concatenate([np.ravel(a) for a in jax.tree.leaves(tree)])
        stored = np.concatenate([shards[mesh.devices[0, device + j]][0] for j in range(count)])
        np.testing.assert_array_equal(stored[:size], flat)
        assert not stored[size:].any()
        device += count
    for tree, other in zip(packed.unpack(), params, strict=True):
        jax.tree.map(np.testing.assert_array_equal, tree, other)

    run = value_and_grad_of_stages(
        ConvNet.stages(), ConvNet.loss, schedule=one_f_one_b(3, 2), mesh=mesh, replicas=replicas
    )

    @jax.jit
    def step(packed: PackedStages, batch: Any) -> PackedStages:
        return jax.tree.map(lambda a, g: a - 0.1 * g, packed, run(packed, batch)[1])

    batch = ConvNet.batch(rng)
    compiled = step.lower(packed, batch).compile()
    moved = compiled(packed, batch)
    assert [a.sharding.spec for a in moved.arrays.values()] == [jax.P("pipe")]
    assert not compiled.as_text().count("all-gather(")  # no device collects the parameters of all
    expected = on_one_device(ConvNet, params, batch)[1]
    for tree, old, g in zip(moved.unpack(), params, expected, strict=True):
        jax.tree.map(lambda a, b, g: np.testing.assert_allclose(a, b - 0.1 * g, atol=1e-6), tree, old, g)


def test_the_choice_of_replicas_by_a_profile_runs(rng):
    """The slow function gets two of three devices, and the pipeline on them gives the gradients of one device."""
    params, batch = ConvNet.params(rng), ConvNet.batch(rng)
    functions = ConvNet.stages()
    costs = profile_functions(functions, ConvNet.loss, params, batch, bandwidth=1e9, repeats=1)
    assert costs.layers == 3
    assert min(*costs.forward, *costs.backward, *costs.last) > 0
    pixels = ROWS * SIDE * SIDE
    assert costs.boundary_bytes == (pixels * 3 * 4, pixels / 4 * (8 * 4 + 1), ROWS * 5 * 4)
    assert costs.stash_bytes == (pixels * 4 + ROWS * 4, *costs.boundary_bytes[:2])
    assert costs.state_bytes == (16 * 27, 16 * 792, 16 * 45)
    slow = dataclasses.replace(costs, forward=(1.0, 3.0, 0.1), backward=(1.0, 3.0, 0.1), last=(0.0, 0.0))
    cut = replicate(slow, devices=3, microbatches=4, stages=2)
    assert (cut.layers, cut.replicas) == ((1, 2), (1, 2))
    mesh = mesh_of(3)
    how: dict[str, Any] = {"schedule": one_f_one_b(2, 4), "mesh": mesh, "replicas": cut.replicas}
    run = value_and_grad_of_stages(cut.chain(functions), ConvNet.loss, **how)
    loss, grads = jax.jit(run)(pack_stages(cut.group(params), mesh, replicas=cut.replicas), batch)
    compare((loss, [tree for stage in grads.unpack() for tree in stage]), on_one_device(ConvNet, params, batch), 1e-5)


def test_mistakes_are_named(rng):
    params, batch, stages = UNet.params(rng), UNet.batch(rng), UNet.stages()
    net, pictures = ConvNet.params(rng), ConvNet.batch(rng)
    settings: dict[str, Any] = {"schedule": one_f_one_b(4, 3), "mesh": mesh_of(4, 2), "batch_axes": ("data",)}

    def refuses(words, stages=stages, loss=UNet.loss, trees=params, batch=batch, **changes):
        with pytest.raises(ScheduleError, match=words):
            jax.eval_shape(value_and_grad_of_stages(stages, loss, **settings | changes), trees, batch)

    refuses("stages is a function, not a list of functions", stages=stages[0])
    refuses(
        r"`stages\[1\]` is not a function, but a str. Give value_and_grad_of_stages a list", stages=[stages[0], "x"]
    )
    refuses("got 3 stages, but the schedule has 4. Make them equal", stages=stages[:3])
    refuses(
        "interleaved_1f1b has 2 chunks a stage, which .* Use gpipe or one_f_one_b",
        schedule=interleaved_one_f_one_b(4, 4, 2),
    )
    refuses("zb1 has weight units", schedule=zb1(4, 4))
    refuses("4 stages, but the mesh's axis 'pipe' has 8 devices. Make them equal, or give .*replicas", mesh=mesh_of(8))
    refuses(r"4 stages on 1 \+ 2 \+ 1 \+ 1 devices, but the mesh's axis 'pipe' has 4", replicas=(1, 2, 1, 1))
    refuses(r"replicas=\[2, 2\] has 2 entries for a pipeline of 4 stages", replicas=(2, 2))
    refuses("the mesh has no axis 'stage'. It has data, pipe", axis="stage")
    refuses("the mesh has no axis 'rows'. It has data, pipe", batch_axes="rows")
    refuses("params has 3 trees for 4 stages", trees=params[:3])
    refuses("params is a dict, not a list. Give a tree of arrays for each stage", trees={"a": params[0]})
    refuses(
        r"params\[1\]/n has the dtype int32, for which there is no gradient",
        trees=[params[0], {"n": jnp.zeros(1, int)}, *params[2:]],
    )
    refuses(r"24 rows .* 5 microbatches on 2 replicas. Use a multiple of 10", schedule=one_f_one_b(4, 5))
    refuses(
        r"all arrays of `batch` must have .*Call it as \(params, batch\)", batch=batch | {"clean": batch["clean"][:3]}
    )
    refuses(
        r"24 rows of the batch cannot be divided into 5 microbatches of 2 parts on 2 replicas. Use a multiple of 20",
        stages=ConvNet.stages()[:2], trees=net[:2], batch=pictures,
        schedule=one_f_one_b(2, 5), mesh=mesh_of(3, 2), replicas=(1, 2),
    )  # fmt: skip

    # Neighbours that do not fit: stage, shapes, and the stage before.
    narrow = [stages[0], lambda params, given: given | {"x": given["x"][..., :2], "skips": (given["x"],)}, *stages[2:]]
    refuses(
        r"stage 2 \(middle\) fails on what stage 1 \(<lambda>\) returns: .*It got params: 0 float32\[3, 3, 6, 12\], "
        r".*x float32\[4, 8, 8, 2\].*. Make the function before return what it takes",
        stages=narrow,
    )
    refuses(r"stage 0 \(first\) fails on rows of the batch: KeyError: 'noisy'", batch=pictures)
    refuses(
        r"loss \(loss\) fails on what stage 3 \(up\) returns, and rows of the batch",
        batch=batch | {"clean": jnp.zeros((24, 5))},
    )
    refuses(
        r"`loss` must return one number .*, not float32\[4, 8, 8, 1\]. It is called as loss\(x, batch\)",
        loss=lambda y, batch: y,
    )
    refuses(r"stage 3 \(<lambda>\) returns no array, but NoneType", stages=[*stages[:3], lambda params, x: None])
    refuses(
        r"stage 1 \(<lambda>\) returns key of the dtype key<fry>, which stages cannot send. Send jax.random.key_data",
        stages=[stages[0], lambda params, x: stages[1](params, x) | {"key": jax.random.key(0)}, *stages[2:]],
    )
    refuses(
        r"stage 1 \(<lambda>\) has a collective over a mesh axis \(.*data.*\), for which devices of other stages",
        stages=[stages[0], lambda params, x: stages[1](params, x | {"x": jax.lax.pmean(x["x"], "data")}), *stages[2:]],
    )
    packed = pack_stages(net, mesh_of(4), replicas=(1, 2, 1))
    refuses(r"params are packed for stages on \[1, 2, 1\] devices, but this pipeline has \[1, 1, 1, 1\]", trees=packed)
    with pytest.raises(ScheduleError, match="3 stages, but the mesh's axis 'pipe' has 4 devices"):
        pack_stages(net, mesh_of(4))
