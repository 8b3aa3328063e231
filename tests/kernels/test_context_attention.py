"""Attention over a sequence split among devices equals attention on one: values and gradients, on fresh random inputs.

The truth is `attention(..., implementation="xla")` on the whole sequence in its own order (itself held to float64 numpy
in test_kernels.py).
"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxstack.kernels.attention import AttentionMask, RelativeBias, attention, cudnn, pallas_gpu
from jaxstack.kernels.context_attention import context_attention, order
from jaxstack.kernels.implementation import interpret_mode
from jaxstack.kernels.tiles import AttentionTile

chunked_module = importlib.import_module("jaxstack.kernels.attention.chunked")  # attention is a function, too

# Norm of the difference over norm of the truth. Both sides compute in float32, which rounds at 6e-8; sums of a few
# hundred terms and the merges of a few partial results lose some 10 times that. bfloat16 rounds at 2^-9 = 2e-3, at each
# of the few places where either side returns to it.
TOLERANCE = {jnp.float32: 5e-6, jnp.bfloat16: 1.5e-2}
SCALE = 0.7  # of scores whose standard deviation is then 2: far from uniform, far from one-hot


def mesh_of(**sizes):
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes), devices=devices)


def draw(rng, batch, length, heads, kv_heads, width, dtype=jnp.float32):
    """Returns q, k, v and a cotangent of the output."""
    return tuple(
        jnp.asarray(rng.standard_normal((batch, length, h, width)), dtype) for h in (heads, kv_heads, kv_heads, heads)
    )


def draw_segments(rng, batch, length, segments):
    """Returns segments of random lengths, with increasing ids that differ from positions."""
    return jnp.asarray(1000 + np.sort(rng.integers(0, segments, (batch, length)), axis=1), jnp.int32)


def whole(q, k, v, d_out, segment_ids=None, **options):
    """Returns output and gradients on one device, in the dtype of the inputs."""

    @jax.jit
    def run(q, k, v, d_out):
        f = lambda q, k, v: attention(q, k, v, scale=SCALE, segment_ids=segment_ids, **options)  # noqa: E731
        out, vjp = jax.vjp(f, q, k, v)
        return out, *vjp(d_out)

    return run(q, k, v, d_out)


def sharded(mesh, spec=None, kv_spec=None, **options):
    """Runs context_attention on arrays in the sequence's balanced order. `spec` and `kv_spec` shard [B, S, H]."""
    spec = spec or PartitionSpec(None, "context")
    kv_spec = kv_spec or spec

    def f(q, k, v, segment_ids):
        segment_spec = None if segment_ids is None else PartitionSpec(*spec[:2])
        return jax.shard_map(
            lambda q, k, v, ids: context_attention(q, k, v, axis="context", scale=SCALE, segment_ids=ids, **options),
            mesh=mesh,
            in_specs=(spec, kv_spec, kv_spec, segment_spec),
            out_specs=spec,
            # JAX's interpreter of Pallas pads blocks with constants, whose types differ from those of the arrays.
            check_vma=options.get("implementation") != "pallas_gpu",
        )(q, k, v, segment_ids)

    return f


def value_and_gradients(f, mesh, q, k, v, d_out, segment_ids=None):
    """Returns output and gradients by position, of a function that takes the balanced order."""
    balanced = order(mesh.shape["context"], q.shape[1])

    @jax.jit
    def run(q, k, v, d_out, segment_ids):
        out, vjp = jax.vjp(lambda q, k, v: f(q, k, v, segment_ids), q, k, v)
        return out, *vjp(d_out)

    results = run(*(None if x is None else x[:, balanced] for x in (q, k, v, d_out, segment_ids)))
    return tuple(x[:, np.argsort(balanced)] for x in results)


def assert_close(actual, truth, dtype=jnp.float32):
    for name, a, t in zip(("out", "dq", "dk", "dv"), actual, truth, strict=True):
        assert a.dtype == dtype, name
        a, t = np.asarray(a, np.float64), np.asarray(t, np.float64)
        error = np.linalg.norm(a - t) / np.linalg.norm(t)
        assert error <= TOLERANCE[dtype], (name, error)


def test_order():
    np.testing.assert_array_equal(order(4, 16), [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9])
    np.testing.assert_array_equal(order(1, 5), np.arange(5))
    for shards in (1, 2, 3, 8):  # as many pairs of a query and an earlier key on every shard
        positions = order(shards, 48).reshape(shards, -1)
        assert len(set((positions + 1).sum(axis=1))) == 1
        np.testing.assert_array_equal(np.sort(positions, axis=None), np.arange(48))


ALL_WAYS = ("ring xla", "ring chunked", "all_gather chunked")
CASES = {  # shards, length, heads, kv heads, options, segments, methods and implementations
    "one_shard": (1, 12, 2, 2, {}, 0, "ring chunked", "all_gather xla"),
    "two_shards": (2, 24, 4, 2, {}, 0, "ring xla", "all_gather chunked"),
    "full": (2, 24, 4, 2, {"mask": AttentionMask(kind="full")}, 3, "all_gather chunked"),
    "full_window": (4, 32, 2, 1, {"mask": AttentionMask(5, "full")}, 0, "all_gather xla"),
    "two_tokens_a_shard": (4, 8, 2, 1, {}, 0, "ring chunked"),
    "window_in_a_half": (4, 64, 2, 1, {"mask": AttentionMask(5)}, 0, "ring chunked"),
    "window_over_shards": (4, 64, 2, 1, {"mask": AttentionMask(29)}, 0, "ring xla", "all_gather xla"),
    "segments": (8, 64, 2, 1, {}, 7, "ring chunked", "ring pallas_gpu", "all_gather xla"),
    "blocks": (2, 128, 2, 1, {}, 7, "ring pallas_gpu"),
    "capped_kernel": (4, 64, 6, 2, {"softcap": 1.5}, 4, "ring pallas_gpu"),
    "capped": (4, 64, 6, 2, {"mask": AttentionMask(23), "softcap": 1.5}, 4, *ALL_WAYS),
}


@pytest.mark.matrix(quick=["[two_shards", "[window_in", "[segments-ring-c", "[full_w"])
@pytest.mark.parametrize(
    ("case", "method", "implementation"), [(name, *way.split()) for name, case in CASES.items() for way in case[6:]]
)
def test_equals_one_device(rng, monkeypatch, case, method, implementation):
    monkeypatch.setattr(chunked_module, "_CHUNK", 3)  # several chunks, scanned, and a shorter last one
    monkeypatch.setattr(chunked_module, "_MAX_GROUPS", 1)
    monkeypatch.setattr(pallas_gpu, "_tile", lambda kernel, q: AttentionTile(16, 16, 4, 1))  # several blocks
    shards, length, heads, kv_heads, options, segments = CASES[case][:6]
    arrays = draw(rng, 2, length, heads, kv_heads, 8)
    ids = draw_segments(rng, 2, length, segments) if segments else None
    mesh = mesh_of(context=shards)
    f = sharded(mesh, method=method, implementation=implementation, **options)
    with interpret_mode():
        actual = value_and_gradients(f, mesh, *arrays, ids)
    assert_close(actual, whole(*arrays, ids, **options))


@pytest.mark.matrix(quick=["chunked", "cudnn"])
@pytest.mark.parametrize(
    ("method", "implementation", "segments"),
    [
        ("ring", "chunked", 0),
        ("all_gather", "chunked", 0),
        ("ring", "pallas_gpu", 3),
        ("ring", "cudnn", 0),
    ],
)
def test_bfloat16(rng, monkeypatch, method, implementation, segments):
    """The expected values are computed in float32 from the same numbers.

    cuDNN cannot run here. Plain functions with the same arguments, dtypes and results replace its two kernels.
    """
    arrays = draw(rng, 1, 64, 4, 2, 8, jnp.bfloat16)
    ids = draw_segments(rng, 1, 64, segments) if segments else None
    mesh = mesh_of(context=4)
    monkeypatch.setattr(cudnn, "forward_block", plain_forward_block)
    monkeypatch.setattr(cudnn, "backward_block", plain_backward_block)
    f = sharded(mesh, method=method, implementation=implementation)
    truth = whole(*(x.astype(jnp.float32) for x in arrays), ids)
    with interpret_mode():
        actual = value_and_gradients(f, mesh, *arrays, ids)
    assert_close(actual, truth, jnp.bfloat16)


def block_scores(o, q, k):
    repeated = jnp.repeat(k.astype(jnp.float32), q.shape[2] // k.shape[2], axis=2)
    scores = o.scale * jnp.einsum("bshk,bthk->bhst", q.astype(jnp.float32), repeated)
    return jnp.where(jnp.tri(q.shape[1], dtype=bool) | (not o.causal), scores, -jnp.inf)


def plain_forward_block(o, q, k, v, mask):
    scores = block_scores(o, q, k)
    values = jnp.repeat(v.astype(jnp.float32), q.shape[2] // k.shape[2], axis=2)
    out = jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores), values).astype(q.dtype)
    return out.astype(jnp.float32), jax.nn.logsumexp(scores, axis=-1).swapaxes(1, 2)


def plain_backward_block(o, q, k, v, d_out, out, lse_BSH, delta_BSH, mask):
    """Computes `delta` from the output, as cuDNN does."""
    shared = q.shape[2] // k.shape[2]
    q, k, v, d_out, out = (x.astype(jnp.float32) for x in (q, k, v, d_out, out))
    weights = jnp.exp(block_scores(o, q, k) - lse_BSH.swapaxes(1, 2)[..., None])
    values, keys = (jnp.repeat(x, shared, axis=2) for x in (v, k))
    delta = (d_out * out).sum(-1).swapaxes(1, 2)[..., None]
    d_scores = o.scale * weights * (jnp.einsum("bshk,bthk->bhst", d_out, values) - delta)
    dq = jnp.einsum("bhst,bthk->bshk", d_scores, keys)
    dk, dv = jnp.einsum("bhst,bshk->bthk", d_scores, q), jnp.einsum("bhst,bshk->bthk", weights, d_out)
    return dq, *(x.reshape(*k.shape[:3], shared, -1).sum(3) for x in (dk, dv))


MASK_CASES = {  # shards, tensor shards, kind of mask, tokens of keys, whether there is a bias, whether it has positions
    "cross": (4, 1, "cross", 20, False, False),
    "cross_by_ring": (2, 2, "cross", 10, False, False),
    "encoder": (4, 1, "full", 24, True, False),
    "decoder": (2, 2, "causal", 24, True, True),
    "prefix": (2, 1, "prefix", 24, True, False),
}


@pytest.mark.parametrize(
    ("case", "implementation", "dtype"),
    [(case, "chunked", jnp.float32) for case in ("cross", "encoder", "decoder")]
    + [
        pytest.param(*way, marks=pytest.mark.matrix)
        for way in (
            ("cross_by_ring", "chunked", jnp.float32),
            ("prefix", "chunked", jnp.float32),
            ("encoder", "xla", jnp.float32),
            ("cross", "chunked", jnp.bfloat16),
            ("decoder", "chunked", jnp.bfloat16),
        )
    ],
)
def test_cross_attention_prefixes_and_biases(rng, monkeypatch, case, implementation, dtype):
    """A shard of the keys in cross-attention has an odd number of tokens. The gradient of the table is that of one
    device, too, and with heads over `tensor` each device has the columns of its heads."""
    monkeypatch.setattr(chunked_module, "_CHUNK", 3)
    monkeypatch.setattr(chunked_module, "_MAX_GROUPS", 1)
    shards, tensor, kind, length, biased, positioned = MASK_CASES[case]
    q, _, _, d_out = draw(rng, 2, 24, 4, 2, 8, dtype)
    k, v = draw(rng, 2, length, 4, 2, 8, dtype)[1:3]
    ids = {"segment_ids": draw_segments(rng, 2, 24, 3)}
    if kind == "cross":
        ids["kv_segment_ids"] = draw_segments(rng, 2, length, 3).at[:, -2:].set(0)
    if kind == "prefix":
        ids["prefix_ids"] = jnp.asarray(rng.integers(0, 2, (2, 24)), jnp.int32)
    table = jnp.asarray(2 * rng.standard_normal((8, 4)), dtype) if biased else None
    if positioned:
        ids["positions"] = jnp.asarray(np.sort(rng.integers(0, 60, (2, 24))), jnp.int32)

    def f(function, q, k, v, table, ids, **how):
        more = {name: x for name, x in ids.items() if name != "positions"}
        bias = None if table is None else RelativeBias(table, ids.get("positions"), 9, kind != "causal")
        return function(q, k, v, scale=SCALE, mask=AttentionMask(kind=kind), bias=bias, **more, **how)

    mesh = mesh_of(context=shards, tensor=tensor)
    rows, heads = PartitionSpec(None, "context"), PartitionSpec(None, "context", "tensor")
    method = "ring" if case == "cross_by_ring" else "all_gather"
    split = jax.shard_map(
        lambda *x: f(context_attention, *x, axis="context", method=method, implementation=implementation),
        mesh=mesh,
        in_specs=(heads, heads, heads, PartitionSpec(None, "tensor"), rows),
        out_specs=heads,
    )

    def by_order(x):
        return x if x.shape[1] % (2 * shards) else x[:, order(shards, x.shape[1])]

    def run(function, q, k, v, table, d_out, ids):
        out, vjp = jax.vjp(lambda *x: function(*x, ids), q, k, v, table)
        return out, *(x for x in vjp(d_out) if x is not None)

    balanced = [by_order(x) for x in (q, k, v)], by_order(d_out), jax.tree.map(by_order, ids)
    actual = jax.jit(lambda a, d, ids: run(split, *a, table, d, ids))(*balanced)
    wide = [None if x is None else x.astype(jnp.float32) for x in (q, k, v, table, d_out)]
    truth = jax.jit(lambda *x: run(lambda *y: f(attention, *y), *x, ids))(*wide)
    truth = [x if x.shape[0] == 8 else by_order(x) for x in truth]
    for name, a, t in zip(("out", "dq", "dk", "dv", "d_table"), actual, truth, strict=False):
        assert a.dtype == dtype, name
        a, t = np.asarray(a, np.float64), np.asarray(t, np.float64)
        assert np.linalg.norm(a - t) <= TOLERANCE[dtype] * np.linalg.norm(t), name
    assert len(actual) == len(truth) == 4 + biased


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_beside_a_data_axis(rng, method):
    arrays, ids = draw(rng, 4, 32, 2, 1, 8), draw_segments(rng, 4, 32, 3)
    mesh = mesh_of(data=2, context=4)
    f = sharded(mesh, PartitionSpec("data", "context"), method=method, implementation="chunked")
    assert_close(value_and_gradients(f, mesh, *arrays, ids), whole(*arrays, ids))


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_beside_a_tensor_axis(rng, monkeypatch, method):
    """Query heads over `tensor` share one kv head: every device stores it, and its gradients are summed."""
    monkeypatch.setattr(chunked_module, "_CHUNK", 3)
    monkeypatch.setattr(chunked_module, "_MAX_GROUPS", 1)
    arrays, ids = draw(rng, 2, 32, 4, 1, 8), draw_segments(rng, 2, 32, 3)
    mesh = mesh_of(data=2, context=2, tensor=2)
    spec, kv_spec = PartitionSpec("data", "context", "tensor"), PartitionSpec("data", "context")
    f = sharded(mesh, spec, kv_spec, method=method, implementation="chunked", mask=AttentionMask(11))
    assert_close(value_and_gradients(f, mesh, *arrays, ids), whole(*arrays, ids, mask=AttentionMask(11)))


def shapes(shards, tokens, kv_heads=2, segments=False):
    """Returns a mesh, and abstract q, k, v (and segment ids) of `tokens` tokens per shard."""
    q, k = (jax.ShapeDtypeStruct((1, shards * tokens, h, 8), jnp.float32) for h in (4, kv_heads))
    ids = jax.ShapeDtypeStruct((1, shards * tokens), jnp.int32) if segments else None
    return mesh_of(context=shards), q, k, k, ids


def gradients(f):
    return jax.grad(lambda q, k, v, ids: jnp.square(f(q, k, v, ids)).sum(), (0, 1, 2))


def test_ring_sends_and_gathers_nothing():
    """Few permutes are in the program, because the steps are a loop over the shards."""

    def collectives(shards, method):
        mesh, *arrays = shapes(shards, 16)
        f = sharded(mesh, method=method, implementation="chunked")
        text = jax.jit(gradients(f)).lower(*arrays).compile().as_text()
        return {name: text.count(f" {name}(") for name in ("collective-permute", "all-gather", "reduce-scatter")}

    ring = collectives(4, "ring")
    assert ring["collective-permute"] > 0
    assert ring["all-gather"] == ring["reduce-scatter"] == 0
    assert collectives(8, "ring") == ring
    gather = collectives(4, "all_gather")
    assert gather["all-gather"] > 0
    assert gather["reduce-scatter"] > 0
    assert gather["collective-permute"] == 0


def test_ring_saves_its_shard_only():
    """The residuals are q, k, v, segment ids, output and log-sum-exp of this shard."""

    def saved(method):
        mesh, q, k, v, ids = shapes(4, 16, segments=True)
        f = sharded(mesh, method=method, implementation="chunked")
        residuals = jax.eval_shape(lambda q, k, v, ids: jax.vjp(lambda *a: f(*a, ids), q, k, v)[1], q, k, v, ids)
        return sum(x.size for x in jax.tree.leaves(residuals)), 2 * q.size + k.size + v.size + ids.size + q.size // 8

    actual, expected = saved("ring")
    assert actual == expected
    actual, expected = saved("all_gather")
    assert actual > 2 * expected  # the check can tell


def array_sizes(jaxpr, on_device=False):
    """Returns the sizes of all arrays computed inside `shard_map`, including those in loops and calls."""
    for eqn in jaxpr.eqns:
        if on_device:
            yield from (x.aval.size for x in eqn.outvars if hasattr(x.aval, "size"))
        for parameter in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from array_sizes(inner, on_device or eqn.primitive.name == "shard_map")


def test_memory(monkeypatch):
    """The largest array of output and gradients: with "ring" it does not know the number of shards; with "chunked" it
    is linear in the tokens of a shard."""
    monkeypatch.setattr(chunked_module, "_MAX_GROUPS", 2)  # to trace less

    def largest(shards, length, method, implementation):
        mesh, *arrays = shapes(shards, length)
        f = gradients(sharded(mesh, method=method, implementation=implementation))
        return max(array_sizes(jax.make_jaxpr(f)(*arrays).jaxpr))

    for method in ("ring", "all_gather"):
        usual = largest(2, 512, method, "chunked")
        assert largest(2, 2048, method, "chunked") <= 4.1 * usual
        assert largest(2, 2048, method, "xla") == 16 * largest(2, 512, method, "xla")  # the check can tell
        more_shards = largest(8, 512, method, "chunked")
        assert more_shards == usual if method == "ring" else more_shards > 3 * usual


def test_selective_recomputation_keeps_the_ring_out_of_the_backward_pass():
    """A policy that saves the checkpoint names of `attention` does not repeat the forward pass."""

    mesh, *arrays, _ = shapes(2, 8)

    def ring(q, k, v):
        return sharded(mesh, method="ring", implementation="xla")(q, k, v, None)

    def hops(f):
        gradients = jax.jit(jax.grad(lambda *arrays: jnp.square(f(*arrays)).sum(), (0, 1, 2)))
        return gradients.lower(*arrays).as_text().count("stablehlo.collective_permute")

    def saving(*names):
        return jax.checkpoint(ring, policy=jax.checkpoint_policies.save_only_these_names(*names))

    assert hops(saving("attention", "attention_lse")) == hops(ring)
    assert hops(saving("attention")) > hops(ring)  # the check can tell


def test_attention_in_a_manual_region(rng):
    """Every device has the full sequence and a part of the query heads; "chunked" supports these types too."""
    arrays = draw(rng, 1, 150, 4, 1, 8)
    heads, shared = PartitionSpec(None, None, "tensor"), PartitionSpec()
    f = jax.shard_map(
        lambda q, k, v: attention(q, k, v, scale=SCALE, implementation="chunked"),
        mesh=mesh_of(tensor=2),
        in_specs=(heads, shared, shared),
        out_specs=heads,
    )

    @jax.jit
    def run(q, k, v, d_out):
        out, vjp = jax.vjp(f, q, k, v)
        return out, *vjp(d_out)

    assert_close(run(*arrays), whole(*arrays))


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="multiple of 8"):
        order(4, 20)

    def call(mesh=None, tokens=4, kv_heads=2, **options):
        mesh, *arrays = shapes(2, tokens, kv_heads)
        jax.eval_shape(sharded(mesh, **options), *arrays)

    call()
    with pytest.raises(ValueError, match="a multiple of 4 for mesh axis 'context' of size 2"):
        call(tokens=5)
    with pytest.raises(ValueError, match="ring, all_gather"):
        call(method="star")
    with pytest.raises(ValueError, match="xla, chunked"):
        call(implementation="fast")
    with pytest.raises(ValueError, match="evenly"):
        call(kv_heads=3)
    with pytest.raises(ValueError, match="the ring computes causal attention only; use method=all_gather"):
        call(mask=AttentionMask(kind="prefix"), prefix_ids=jnp.ones((1, 4)))
    with pytest.raises(ValueError, match="the ring does not add relative biases; use method=all_gather"):
        call(bias=RelativeBias(jnp.zeros((32, 4))))
    with pytest.raises(ValueError, match="window=-1"):
        call(mask=AttentionMask(-1))
