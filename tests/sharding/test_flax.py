"""`shard` on models that do not import this package: every kind of tree, its layout, and equal training."""

import ast
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict
from flax.training import train_state
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxstack.common.tree import flatten
from jaxstack.config import ConfigError, MeshConfig
from jaxstack.sharding import Rules, ShardingError, assert_sharded, make_mesh, shard, shardings_of

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
MODELS = [EXAMPLES / "nnx_model.py", EXAMPLES / "linen_model.py"]
sys.path.insert(0, str(EXAMPLES))

from linen_model import CNN  # noqa: E402
from nnx_model import Transformer  # noqa: E402


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), batch=4)


def specs(tree) -> dict[str, P]:
    """Returns the spec of every array, read from the arrays; all arrays are on all devices."""
    for x in jax.tree.leaves(nnx.state(tree) if isinstance(tree, nnx.Pytree) else tree):
        assert isinstance(x.sharding, NamedSharding)
        assert x.sharding.mesh.size == 8
    return shardings_of(tree)[1]


def data(x) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def assert_same_values(a, b) -> None:
    a, b = (nnx.split(x)[1] if isinstance(x, nnx.Pytree) else x for x in (a, b))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(data(jnp.asarray(x)), data(y)), a, b)
    assert jax.tree.structure(a) == jax.tree.structure(b)


# Plain trees.

PLAIN = Rules(paths=[("layers/.*/w", ("fsdp", "tensor")), (".*/b", ())])


def plain() -> dict:
    return {"layers": [{"w": jnp.arange(32.0).reshape(4, 8) + n, "b": np.ones(8, np.float32)} for n in range(2)]}


def test_a_plain_tree(mesh):
    params = plain()
    new = shard(params, PLAIN, mesh)
    assert specs(new) == {
        "layers/0/w": P("fsdp", "tensor"),
        "layers/0/b": P(),
        "layers/1/w": P("fsdp", "tensor"),
        "layers/1/b": P(),
    }
    assert new["layers"][0]["w"].addressable_shards[0].data.shape == (2, 4)
    assert_same_values(params, new)


def test_shapes_without_values(mesh):
    new = shard(jax.eval_shape(plain), PLAIN, mesh)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(new))
    assert specs(new) == specs(shard(plain(), PLAIN, mesh))


def test_inside_jit(mesh):
    """Every device creates its own shards, to initialise a model that is too large for one device."""
    new = jax.jit(lambda: shard(jax.tree.map(jnp.asarray, plain()), PLAIN, mesh))()
    assert specs(new) == specs(shard(plain(), PLAIN, mesh))
    assert_same_values(plain(), new)


def test_rules_errors_come_through(mesh):
    with pytest.raises(ShardingError, match=r"layers/0/b: no rule reaches this array of shape \(8,\)"):
        shard(plain(), Rules(paths=PLAIN.paths[:1]), mesh)
    with pytest.raises(ShardingError, match="nothing uses the rule 'head'"):
        shard(plain(), replace(PLAIN, paths=[*PLAIN.paths, ("head", ())]), mesh)


def test_what_is_no_array(mesh):
    with pytest.raises(ShardingError, match="name: a leaf of type str is not an array"):
        shard({"name": "x"}, Rules(), mesh)
    with pytest.raises(ShardingError, match="the tree: a leaf of type Dense is not an array"):
        shard(nn.Dense(4), Rules(), mesh)
    with pytest.raises(ShardingError, match=r"rules is a dict, not Rules. Call it as shard\(tree, Rules"):
        shard(plain(), {"embed": "fsdp"}, mesh)
    with pytest.raises(ConfigError, match=r"mesh is a MeshConfig, not a Mesh. Make one with make_mesh"):
        shard(plain(), PLAIN, MeshConfig())


def test_a_mesh_with_explicit_axes(mesh):
    """`jax.make_mesh` makes explicit axes by default."""
    explicit = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * len(mesh.axis_names))
    with pytest.raises(ShardingError, match=r"axis_types=\(jax.sharding.AxisType.Auto,\) \* 6"):
        shard(plain(), PLAIN, explicit)


def test_keys_and_numbers_need_no_rule(mesh):
    tree = {"step": 3, "key": jax.random.key(0), "keys": jax.random.split(jax.random.key(0), 3), "scale": jnp.ones(1)}
    new = shard(tree, Rules(), mesh)
    assert set(specs(new).values()) == {P()}
    assert new["step"] == 3
    assert_same_values(tree, new)


def test_mesh_axes_of_size_one_are_not_named(mesh):
    """XLA omits them in the shardings of results; if `shard` kept them, the second step would compile again."""
    new = shard({"w": jnp.ones((4, 4, 2))}, Rules(paths=[("w", (("fsdp", "pipe"), "expert", None))]), mesh)
    assert new["w"].sharding.spec == P("fsdp")


# Optimizer states.


def test_moments_follow_their_parameters(mesh):
    """The patterns for parameters are anchored, so that none matches the path of a moment."""
    tx = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), 2)
    params = plain()
    state = tx.init(params)
    new = shard(state, PLAIN, mesh, like=params)
    got = specs(new)
    adam = "inner_opt_state/1/0"
    for moment in (f"{adam}/mu", f"{adam}/nu", "acc_grads"):
        assert got[f"{moment}/layers/1/w"] == P("fsdp", "tensor")
        assert got[f"{moment}/layers/1/b"] == P()
    assert got["mini_step"] == got[f"{adam}/count"] == P()
    assert_same_values(state, new)


def test_optimizer_state_that_follows_no_parameter_needs_a_rule(mesh):
    params = {"layers": [{"w": jnp.ones((128, 256)), "b": jnp.ones(256)}]}
    state = optax.adafactor(1e-3).init(params)  # factors of shapes (128,) and (256,)
    with pytest.raises(ShardingError, match="v_row/layers/0/w: no rule reaches"):
        shard(state, PLAIN, mesh, like=params)
    rules = replace(PLAIN, paths=[(".*/v_(row|col)/.*", ()), *PLAIN.paths])
    got = specs(shard(state, rules, mesh, like=params))
    assert got["0/v_row/layers/0/w"] == P()
    assert got["0/v/layers/0/b"] == P()


def test_a_state_for_other_parameters(mesh):
    """An array with the same path and another shape does not follow the parameter."""
    state = optax.trace(0.9).init({"w": jnp.ones((4, 4))})
    with pytest.raises(ShardingError, match=r"trace/w: no rule reaches this array of shape \(4, 4\)"):
        shard(state, Rules(paths=[("w", ("fsdp", None))]), mesh, like={"w": jnp.ones((4, 8))})
    with pytest.raises(ShardingError, match=r"w: the shape is \(4, 4\), but \(4, 8\) in `like`"):
        shard({"w": jnp.ones((4, 4))}, Rules(paths=[("w", ())]), mesh, like={"w": jnp.ones((4, 8))})


# nnx.


class MLP(nnx.Module):
    """A model without annotations, with all kinds of variables."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)])
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.again = self.layers[0]  # shared

    def __call__(self, x):
        return self.layers[1](self.dropout(self.norm(self.again(x))))


MLP_RULES = Rules(
    paths=[
        ("again/kernel", ("fsdp", "tensor")),
        ("layers/1/kernel", ("tensor", "fsdp")),
        (".*/bias", ()),
        ("norm/(mean|var|scale)", ("tensor",)),
    ]
)


@pytest.fixture
def names_are_logical():
    with nnx.use_eager_sharding(False):
        yield


def test_a_plain_nnx_module(mesh):
    model = MLP(nnx.Rngs(0))
    new = shard(model, MLP_RULES, mesh)
    assert isinstance(new, MLP)
    assert specs(new) == {
        "again/bias": P(),
        "again/kernel": P("fsdp", "tensor"),
        "dropout/rngs/count": P(),
        "dropout/rngs/key": P(),
        "layers/1/bias": P(),
        "layers/1/kernel": P("tensor", "fsdp"),
        "norm/bias": P(),
        "norm/mean": P("tensor"),
        "norm/scale": P("tensor"),
        "norm/var": P("tensor"),
    }
    assert new.again is new.layers[0]
    assert isinstance(new.norm.mean, nnx.BatchStat)
    assert_same_values(model, new)
    assert isinstance(model.layers[0].kernel.get_value().sharding, jax.sharding.SingleDeviceSharding)  # untouched


def test_batch_statistics_need_a_rule(mesh):
    with pytest.raises(ShardingError, match="norm/mean: no rule reaches"):
        shard(MLP(nnx.Rngs(0)), replace(MLP_RULES, paths=[*MLP_RULES.paths[:-1], ("norm/scale", ())]), mesh)


def test_an_annotated_nnx_module(mesh, names_are_logical):
    rules = Rules(
        {"vocab": "tensor", "embed": "fsdp", "heads": "tensor", "mlp": "tensor"},
        paths=[(r"(.*/)?norm\d?/scale", ()), ("positions", (None, "fsdp"))],
    )
    model = transformer()
    new = shard(model, rules, mesh)
    got = specs(new)
    assert got["tokens/embedding"] == P("tensor", "fsdp")
    assert got["blocks/0/attention/out/kernel"] == P("tensor", "fsdp")
    assert got["blocks/0/up/bias"] == P("tensor")
    assert got["positions"] == P(None, "fsdp")
    assert got["norm/scale"] == got["blocks/0/dropout/rngs/key"] == P()
    assert new.tokens.embedding.get_metadata()["out_sharding"] == ("vocab", "embed")  # kept
    assert_same_values(model, new)


@pytest.mark.filterwarnings("ignore:'sharding")
@pytest.mark.parametrize("key", ["out_sharding", "sharding", "sharding_names"])
def test_every_spelling_of_an_nnx_annotation(key, mesh, names_are_logical):
    layer = nnx.Linear(8, 16, use_bias=False, kernel_metadata={key: ("embed", "mlp")}, rngs=nnx.Rngs(0))
    assert specs(shard(layer, Rules({"embed": "fsdp", "mlp": "tensor"}), mesh)) == {"kernel": P("fsdp", "tensor")}


def test_annotations_that_name_mesh_axes(mesh):
    """Flax's guide annotates models with names under a mesh, or with full shardings."""

    def linear(annotation) -> nnx.Linear:
        return nnx.Linear(8, 16, use_bias=False, kernel_metadata={"out_sharding": annotation}, rngs=nnx.Rngs(0))

    with jax.set_mesh(mesh):
        layers = [linear(("fsdp", "tensor")), linear(P("fsdp", "tensor"))]
    for layer in [*layers, linear(NamedSharding(mesh, P("fsdp", "tensor")))]:
        new = shard(layer, Rules(), mesh)
        assert specs(new) == {"kernel": P("fsdp", "tensor")}
        assert_same_values(layer, new)


def test_an_abstract_nnx_module_becomes_a_real_one(mesh, names_are_logical):
    graph, state = nnx.split(shard(nnx.eval_shape(lambda: MLP(nnx.Rngs(0))), MLP_RULES, mesh))
    make = jax.jit(lambda: nnx.state(MLP(nnx.Rngs(0))), out_shardings=jax.tree.map(lambda x: x.sharding, state))
    new = nnx.merge(graph, make())
    assert specs(new) == specs(shard(MLP(nnx.Rngs(0)), MLP_RULES, mesh))


def test_an_nnx_module_made_inside_jit(mesh):
    new = nnx.jit(lambda: shard(MLP(nnx.Rngs(0)), MLP_RULES, mesh))()
    assert specs(new) == specs(shard(MLP(nnx.Rngs(0)), MLP_RULES, mesh))


def test_nnx_optimizer(mesh):
    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    new = shard(optimizer, MLP_RULES, mesh, like=model)
    assert isinstance(new, nnx.Optimizer)
    got = specs(new)
    assert got["opt_state/0/mu/again/kernel"] == got["opt_state/0/nu/again/kernel"] == P("fsdp", "tensor")
    assert got["opt_state/0/nu/norm/scale"] == P("tensor")
    assert got["opt_state/0/count"] == got["step"] == P()
    assert_same_values(optimizer, new)


def test_nnx_optimizer_with_a_layout_of_its_own(mesh, names_are_logical):
    """In nnx, a variable may have another sharding for its moments."""
    kernel = {"out_sharding": ("embed", None), "optimizer_sharding": ("embed", "mlp")}
    model = nnx.Linear(8, 16, use_bias=False, kernel_metadata=kernel, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    got = specs(shard(optimizer, Rules({"embed": "fsdp", "mlp": "tensor"}), mesh, like=model))
    assert got["opt_state/0/mu/kernel"] == P("fsdp", "tensor")


def test_modules_inside_a_tree(mesh):
    """Model and optimizer together need no `like` if rules reach both; shared arrays stay shared."""
    model = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))
    tree = {"a": model, "b": [model, jnp.ones(4)]}
    new = shard(tree, Rules(paths=[(".*/kernel", ("fsdp", "tensor")), ("b/1", ())]), mesh)
    assert new["a"] is new["b"][0]
    assert new["a"].kernel.get_value().sharding.spec == P("fsdp", "tensor")


# linen.


class Boxed(nn.Module):
    """A model with both kinds of annotations."""

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        x = nn.Dense(16, kernel_init=nn.with_logical_partitioning(init, ("embed", "mlp")), use_bias=False)(x)
        return nn.Dense(8, kernel_init=nn.with_partitioning(init, ("mlp", "embed")))(x)


def test_boxed_linen_variables(mesh):
    variables = Boxed().init(jax.random.key(0), jnp.ones((4, 8)))
    rules = Rules({"embed": "fsdp", "mlp": "tensor"}, paths=[(".*/bias", ())])
    new = shard(variables, rules, mesh)
    assert specs(new) == {
        "params/Dense_0/kernel": P("fsdp", "tensor"),
        "params/Dense_1/bias": P(),
        "params/Dense_1/kernel": P("tensor", "fsdp"),
    }
    assert isinstance(new["params"]["Dense_0"]["kernel"], nn.LogicallyPartitioned)
    assert new["params"]["Dense_1"]["kernel"].names == ("mlp", "embed")
    assert_same_values(variables, new)
    # Moments of boxed parameters are boxed.
    state = shard(optax.adam(1e-3).init(variables["params"]), rules, mesh, like=variables["params"])
    assert specs(state)["0/mu/Dense_1/kernel"] == P("tensor", "fsdp")


def test_scanned_linen_layers(mesh):
    """`nn.scan` adds an axis and its name."""

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
            body = lambda layer, x: (layer(x), None)  # noqa: E731
            scan = nn.scan(
                body,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            return scan(nn.Dense(8, kernel_init=init, use_bias=False, name="layer"), x)[0]

    variables = Layers().init(jax.random.key(0), jnp.ones((4, 8)))
    new = shard(variables, Rules({"layers": None, "embed": "fsdp", "mlp": "tensor"}), mesh)
    assert specs(new) == {"params/layer/kernel": P(None, "fsdp", "tensor")}


CNN_RULES = Rules(
    paths=[
        ("params/(stem|block/.*)/kernel", (None, None, None, ("fsdp", "tensor"))),
        ("params/head/kernel", ("fsdp", "tensor")),
        (".*/(bias|scale|mean|var)", ()),
    ]
)


@pytest.fixture(scope="module")
def images() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (4, 8, 8, 3))


@pytest.fixture(scope="module")
def variables(images) -> dict:
    return jax.jit(lambda key: CNN(4, channels=4).init(key, images, train=False))(jax.random.key(0))


@pytest.mark.parametrize("kind", [dict, FrozenDict])
def test_plain_linen_variables(kind, variables, mesh):
    variables = kind(variables)
    new = shard(variables, CNN_RULES, mesh)
    assert isinstance(new, kind)
    got = specs(new)
    assert got["params/block/conv1/kernel"] == P(None, None, None, ("fsdp", "tensor"))
    assert got["batch_stats/block/norm1/mean"] == P()
    assert_same_values(variables, new)


class TrainState(train_state.TrainState):
    batch_stats: dict


def test_a_train_state_in_one_call(variables, mesh):
    """The patterns begin with `params/`, and the moments still follow."""
    state = TrainState.create(apply_fn=CNN(4).apply, tx=optax.adam(1e-3), **variables)
    new = shard(state, CNN_RULES, mesh)
    assert isinstance(new, TrainState)
    got = specs(new)
    assert got["opt_state/0/mu/block/conv1/kernel"] == P(None, None, None, ("fsdp", "tensor"))
    assert got["opt_state/0/nu/head/kernel"] == P("fsdp", "tensor")
    assert got["step"] == got["opt_state/0/count"] == P()
    assert_same_values(state, new)
    abstract = shard(jax.eval_shape(lambda: state), CNN_RULES, mesh)
    assert specs(abstract) == got


# Shardings read from arrays.


def test_the_guard_reads_the_arrays(mesh):
    whole, rules = plain(), PLAIN
    with pytest.raises(ShardingError, match=r"100\.0% of the state .* layers/0/w"):
        assert_sharded(*shardings_of(whole), mesh)
    assert_sharded(*shardings_of(shard(whole, rules, mesh)), mesh, limit=0.2)


# Training.


def transformer() -> Transformer:
    return Transformer(vocab=16, width=16, heads=2, layers=1, length=8, dropout=0.1, rngs=nnx.Rngs(0))


NNX_RULES = Rules(
    {"embed": "fsdp", "heads": "tensor", "mlp": "tensor"},
    paths=[(r"(.*/)?norm\d?/scale", ()), ("positions", ()), ("tokens/embedding", (("fsdp", "tensor"), None))],
)


def assert_close(a, b) -> None:
    """Every array's relative distance, in norm. 1e-5 is 100 roundings of float32: sums over a batch or a width are
    made in parts and added in another order. Arrays whose gradient is zero by symmetry have only rounding to
    compare, so what counts as zero is measured against the largest."""
    a, b = (flatten(jax.tree.map(np.asarray, x)) for x in (a, b))
    assert a.keys() == b.keys()
    largest = max(np.linalg.norm(x) for x in b.values())
    for path, x in a.items():
        assert np.linalg.norm(x - b[path]) <= 1e-5 * max(np.linalg.norm(b[path]), 1e-2 * largest), path


def test_an_nnx_model_trains_as_on_one_device(mesh, names_are_logical):
    @nnx.jit
    def step(model, optimizer, ids):
        def loss_fn(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(ids[:, :-1]), ids[:, 1:]).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss, grads

    ids = np.random.default_rng(0).integers(0, 16, (8, 9)).astype(np.int32)
    results = []
    for parallel in (False, True):
        model = transformer()
        optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
        batch = jnp.asarray(ids)
        if parallel:
            model, optimizer = shard(model, NNX_RULES, mesh), shard(optimizer, NNX_RULES, mesh, like=model)
            batch = jax.device_put(ids, NamedSharding(mesh, P(("data", "fsdp"))))
            before = shardings_of(model)[1], shardings_of(optimizer)[1]
        losses, grads = [], None
        for _ in range(2):
            loss, grads = step(model, optimizer, batch)
            losses.append(float(loss))
        if parallel:
            assert before == (shardings_of(model)[1], shardings_of(optimizer)[1])  # a step leaves the layout as it was
        results.append((losses, nnx.to_pure_dict(grads), nnx.to_pure_dict(nnx.state(model, nnx.Param))))
    one, eight = results
    np.testing.assert_allclose(eight[0], one[0], rtol=1e-5)
    assert_close(eight[1], one[1])
    assert_close(eight[2], one[2])


def test_a_linen_model_trains_as_on_one_device(variables, images, mesh):
    labels = np.arange(4, dtype=np.int32)

    def step(state, images, labels, layout):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, updates = state.apply_fn(variables, images, train=True, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), updates

        (loss, updates), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return layout(state.apply_gradients(grads=grads, **updates)), loss, grads

    state = TrainState.create(apply_fn=CNN(4, channels=4).apply, tx=optax.sgd(0.1, momentum=0.9), **variables)
    one = jax.jit(lambda *args: step(*args, lambda state: state))
    eight = jax.jit(lambda *args: step(*args, lambda state: shard(state, CNN_RULES, mesh)))
    rows = NamedSharding(mesh, P(("data", "fsdp")))
    a = one(state, images, labels)
    b = eight(shard(state, CNN_RULES, mesh), jax.device_put(images, rows), jax.device_put(labels, rows))
    np.testing.assert_allclose(b[1], a[1], rtol=1e-5)
    assert_close(b[2], a[2])
    assert_close(b[0].batch_stats, a[0].batch_stats)
    assert shardings_of(b[0])[1] == shardings_of(shard(state, CNN_RULES, mesh))[1]
    eight(b[0], jax.device_put(images, rows), jax.device_put(labels, rows))
    assert eight._cache_size() == 1  # the second step is the first one's program


@pytest.mark.xfail(strict=True, reason="XLA's partitioner, jax 0.10.2; when it passes, docs/flax.md can say so")
def test_xla_partitions_strided_convolutions_by_both_channels(mesh):
    """This is a bug of XLA, without this package: the value is right, and the gradient is wrong by half its norm."""

    def conv(x, w, stride):
        return jax.lax.conv_general_dilated(x, w, (stride,) * 2, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def f(w, x, w2):
        return jnp.sum(jnp.sin(conv(jnp.sin(conv(x, w, 2)), w2, 1)).mean((1, 2)) ** 3)

    rng = np.random.default_rng(0)
    x, w, w2 = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 8, 8, 4), (3, 3, 4, 8), (3, 3, 8, 8)))
    channels, rows = NamedSharding(mesh, P(None, None, "fsdp", "tensor")), NamedSharding(mesh, P(("data", "fsdp")))
    grad = jax.jit(jax.grad(f))
    parts = grad(jax.device_put(w, channels), jax.device_put(x, rows), jax.device_put(w2, channels))
    assert_close({"w": parts}, {"w": grad(w, x, w2)})


# The examples of docs/.


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.name)
def test_the_models_import_nothing_of_ours(path):
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules.add(node.module)
    assert {name.split(".")[0] for name in modules} <= {"jax", "flax"}


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["train_nnx.py", "train_linen.py"])
def test_the_examples_learn(name):
    ours = {"JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS"}  # as for a user who has set nothing
    env = {key: value for key, value in os.environ.items() if key not in ours}
    env["PYTHONPATH"] = str(EXAMPLES.parent.parent)
    run = subprocess.run([sys.executable, name], cwd=EXAMPLES, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert re.search(r"fsdp(\+|, )tensor", run.stdout)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", run.stdout)]
    assert losses[-1] < 0.5 < 1 < losses[0]
    assert not run.stderr, run.stderr  # XLA complains there of layouts that it has to copy


def test_the_page_quotes_the_examples():
    """Every block of docs/flax.md that names a file is in that file."""
    page = (EXAMPLES.parent / "flax.md").read_text()
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.S)
    assert {name for name, _ in blocks} == {"nnx_model.py", "train_nnx.py", "linen_model.py", "train_linen.py"}
    for name, block in blocks:
        for part in block.split("...\n"):
            assert part.strip() in (EXAMPLES / name).read_text(), name
