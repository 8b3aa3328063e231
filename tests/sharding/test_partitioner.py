"""XLA's wrong gradients in pure JAX, what `shard` says of them, and that its advice is right.

Each test that fails on purpose tells when XLA is repaired: then the warning and the table of docs/flax.md can go.
"""

import json
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import partitioned_operations
import pytest
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxstack.config import MeshConfig
from jaxstack.sharding import PartitionerWarning, Rules, make_mesh, shard

ROOT = Path(__file__).parents[2]
WRONG = pytest.mark.xfail(strict=True, reason="XLA's partitioner, jax 0.10.2 to 0.12.0; see docs/flax.md")
BATCH = ("data", "fsdp")


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), batch=8)


# Gradients of pure JAX on a mesh, each against one device.


def depthwise(x, w):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=w.shape[-1])


def layers(x, w):
    return lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)[0]


def peaks(x, w):
    return lax.reduce_window(x * w, -jnp.inf, lax.max, (1, 3, 1), (1, 1, 1), "SAME")


def gradients(function, mesh, x, x_spec, w, w_spec):
    """Returns the gradients of x and w on the mesh, and on one device."""
    grad = jax.grad(lambda x, w: jnp.sum(jnp.sin(function(x, w))), (0, 1))
    placed = jax.device_put(x, NamedSharding(mesh, x_spec)), jax.device_put(w, NamedSharding(mesh, w_spec))
    return jax.jit(grad)(*placed), jax.jit(grad)(x, w)


def assert_equal(function, mesh, x, x_spec, w, w_spec) -> None:
    got, expected = gradients(function, mesh, x, x_spec, w, w_spec)
    for a, b in zip(got, expected, strict=True):  # other orders of sums of some hundred float32
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5 * np.abs(b).max())


@pytest.fixture
def images(rng) -> np.ndarray:
    return rng.normal(size=(8, 4, 4, 8)).astype(np.float32)


@pytest.fixture
def kernel(rng) -> np.ndarray:
    return rng.normal(size=(3, 3, 1, 8)).astype(np.float32)


@WRONG
@pytest.mark.parametrize("w_spec", [P(), P(None, None, None, "tensor")], ids=["replicated", "split"])
def test_groups_with_an_axis_that_does_not_split_the_batch(w_spec, mesh, images, kernel):
    assert_equal(depthwise, mesh, images, P(BATCH), kernel, w_spec)


def test_groups_are_multiplied_by_the_axes_that_do_not_split_the_batch(mesh, images, kernel):
    """The warning says so: 2 for `tensor`, and 4 if the batch is split over `data` alone."""
    for spec, factor in ((P(BATCH), 2), (P("data"), 4)):
        (_, got), (_, expected) = gradients(depthwise, mesh, images, spec, kernel, P())
        np.testing.assert_allclose(np.asarray(got), factor * np.asarray(expected), rtol=1e-4, atol=1e-4)


def test_groups_with_the_batch_over_all_axes_are_right(mesh, images, kernel):
    assert_equal(depthwise, mesh, images, P(mesh.axis_names), kernel, P())


@WRONG
def test_groups_without_shardy(mesh, images, kernel):
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        assert_equal(depthwise, mesh, images, P(BATCH), kernel, P())
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


@pytest.fixture
def stack(rng) -> tuple[np.ndarray, np.ndarray]:
    """Activations [B, S, D] and the kernels of three layers [L, D, D]."""
    return rng.normal(size=(8, 4, 16)).astype(np.float32), rng.normal(size=(3, 16, 16)).astype(np.float32) / 4


@WRONG
def test_a_loop_over_layers_split_by_inputs_and_outputs(mesh, stack):
    assert_equal(layers, mesh, stack[0], P(BATCH), stack[1], P(None, "fsdp", "tensor"))


@pytest.mark.parametrize("w_spec", [P(None, None, ("fsdp", "tensor")), P(None, "fsdp")], ids=["outputs", "inputs"])
def test_a_loop_over_layers_split_by_one_of_them_is_right(w_spec, mesh, stack):
    assert_equal(layers, mesh, stack[0], P(BATCH), stack[1], w_spec)


def heads(x, w):
    """Layers whose outputs have two dimensions, as the projections of attention have."""
    return lax.scan(lambda x, w: (jnp.sin(jnp.tensordot(x, w, 1)).reshape(x.shape), None), x, w)[0]


@WRONG
def test_a_loop_over_projections_to_heads_split_by_inputs_and_heads(mesh, stack):
    assert_equal(heads, mesh, stack[0], P(BATCH), stack[1].reshape(3, 16, 4, 4), P(None, "fsdp", "tensor"))


def test_a_loop_over_projections_to_heads_split_by_heads_is_right(mesh, stack):
    w_spec = P(None, None, ("tensor", "fsdp"))
    assert_equal(heads, mesh, stack[0], P(BATCH), stack[1].reshape(3, 16, 4, 4), w_spec)


@WRONG
def test_overlapping_windows_of_a_maximum_with_split_space(mesh, rng):
    x = rng.normal(size=(8, 8, 4)).astype(np.float32)
    assert_equal(peaks, mesh, x, P("data", "tensor"), np.ones(4, np.float32), P())


# What `shard` says.


class Model(nnx.Module):
    def __init__(self):
        keys = jax.random.split(jax.random.key(0), 4)
        self.depthwise = nnx.Conv(8, 8, (3, 3), feature_group_count=8, rngs=nnx.Rngs(0))
        self.groups = nnx.List([nnx.Conv(8, 8, (3,), feature_group_count=2, rngs=nnx.Rngs(0))])
        self.down = nnx.Conv(8, 16, (3, 3), strides=2, rngs=nnx.Rngs(0))
        self.patches = nnx.Conv(8, 16, (4, 4), strides=(4, 4), rngs=nnx.Rngs(0))
        self.same = nnx.Conv(8, 16, (3, 3), rngs=nnx.Rngs(0))
        self.up = nnx.ConvTranspose(8, 16, (3, 3), strides=2, rngs=nnx.Rngs(0))
        self.layers = nnx.vmap(lambda key: nnx.Linear(8, 8, rngs=nnx.Rngs(key)))(keys)
        self.attention = nnx.vmap(lambda key: nnx.MultiHeadAttention(2, 8, 8, rngs=nnx.Rngs(key)))(keys)
        self.einsums = nnx.vmap(lambda key: nnx.Einsum("ab,bc->ac", (8, 8), rngs=nnx.Rngs(key)))(keys)
        self.one = nnx.MultiHeadAttention(2, 8, 8, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(8, 8, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def model() -> Model:
    with nnx.use_eager_sharding(False):
        return nnx.eval_shape(Model)  # shapes alone: nothing is compiled


def said(tree, mesh, **kernels: P) -> list[str]:
    """Returns the warnings of `shard`, with the kernels of the named modules split as given."""
    paths = [(rf"(.*/)?{name}/kernel", tuple(spec)) for name, spec in kernels.items()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shard(tree, Rules(paths=[*paths, (".*", ())]), mesh)
    assert {w.category for w in caught} <= {PartitionerWarning}
    assert {Path(w.filename).name for w in caught} <= {"test_partitioner.py"}  # the place that calls `shard`
    return [str(w.message) for w in caught]


def test_groups_are_named(model, mesh):
    (text,) = said(model, mesh)
    assert text.startswith("depthwise, groups/0: XLA multiplies the gradient")
    assert "Split the batch over all axes of the mesh" in text
    (text,) = said({"model": model}, mesh)
    assert text.startswith("model/depthwise, model/groups/0: ")


@pytest.mark.parametrize("name", ["down", "patches"])
def test_strides_are_named_if_both_channels_are_split(name, model, mesh):
    texts = said(model, mesh, **{name: P(None, None, "fsdp", "tensor")})
    assert [t for t in texts if t.startswith(f"{name}: XLA's gradient of a convolution with strides")]
    for spec in (P(None, None, None, ("fsdp", "tensor")), P(None, None, "fsdp", None)):
        assert len(said(model, mesh, **{name: spec})) == 1  # of the groups


@pytest.mark.parametrize("name", ["same", "up", "head"])
def test_other_modules_are_not_named(name, model, mesh):
    spec = P("fsdp", "tensor") if name == "head" else P(None, None, "fsdp", "tensor")
    assert len(said(model, mesh, **{name: spec})) == 1


def test_stacked_layers_are_named_if_inputs_and_outputs_are_split(model, mesh):
    texts = said(model, mesh, layers=P(None, "fsdp", "tensor"))
    assert [t for t in texts if t.startswith("layers: XLA's gradient of a loop over layers")]
    assert len(said(model, mesh, layers=P(None, None, ("fsdp", "tensor")))) == 1


@pytest.mark.parametrize(
    ("name", "spec", "is_named"),
    [
        ("attention/query", P(None, "fsdp", "tensor", None), True),
        ("attention/query", P(None, "fsdp", None, "tensor"), True),
        ("attention/query", P(None, None, "fsdp", "tensor"), False),
        ("attention/out", P(None, "tensor", None, "fsdp"), True),
        ("attention/out", P(None, "fsdp", "tensor", None), False),
        ("einsums", P(None, "fsdp", "tensor"), True),
        ("einsums", P(None, None, ("fsdp", "tensor")), False),
        ("one/query", P("fsdp", "tensor", None), False),
        ("one/out", P("tensor", None, "fsdp"), False),
    ],
)
def test_stacks_of_other_products_are_named(name, spec, is_named, model, mesh):
    texts = said(model, mesh, **{name: spec})
    assert [t.split(":")[0] for t in texts if "a loop over layers" in t] == [name] * is_named


def test_a_mesh_with_one_axis_has_no_idle_one(model):
    assert said(model, make_mesh(MeshConfig(data=8), batch=8)) == []


def test_many_modules_are_counted(mesh):
    def layers() -> nnx.List:
        return nnx.List([nnx.Conv(4, 4, (3,), feature_group_count=4, rngs=nnx.Rngs(0)) for _ in range(6)])

    with nnx.use_eager_sharding(False):
        (text,) = said(nnx.eval_shape(layers), mesh)
    assert text.startswith("0, 1, 2, 3 and 2 more: ")


# The page.


def test_the_page_has_the_results():
    """The table of docs/flax.md is that of the committed results."""
    results = [json.loads(path.read_text()) for path in sorted(partitioned_operations.RESULTS.glob("partitioned_op*"))]
    assert len(results) >= 2
    assert partitioned_operations.table(results) in (ROOT / "docs" / "flax.md").read_text()
