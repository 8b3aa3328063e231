"""Cross-attention, prefixes and relative biases: values and gradients against float64 numpy.

The buckets of the truth are T5's formula, written out for one distance at a time in float32.
"""

import functools
import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_kernels import assert_close, draw, largest_intermediate, numpy_attention, value_and_vjp

from jaxstack import kernels
from jaxstack.kernels import AttentionMask, RelativeBias
from jaxstack.kernels.attention import relative_bias

chunked = importlib.import_module("jaxstack.kernels.attention.chunked")
FULL, CAUSAL, PREFIX, CROSS = (AttentionMask(kind=kind) for kind in ("full", "causal", "prefix", "cross"))


def ways(cases, bfloat16):
    """Returns cases with an implementation and a dtype: quick ones are "chunked", in float32 and some in bfloat16."""
    every = [(c, name, dtype) for c in cases for name in ("chunked", "xla") for dtype in (jnp.float32, jnp.bfloat16)]
    quick = [way for way in every if way[1] == "chunked" and (way[2] == jnp.float32 or way[0] in bfloat16)]
    return [
        pytest.param(
            *way, marks=[] if way in quick else [pytest.mark.matrix], id=f"{way[0]}-{way[1]}-{way[2].__name__}"
        )
        for way in every
    ]


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    """Chunks of 8 tokens in at most 2 groups, which loop over them, and a shorter last chunk."""
    monkeypatch.setattr(chunked, "_CHUNK", 8)
    monkeypatch.setattr(chunked, "_MAX_GROUPS", 2)


def bucket_of(distance, count, max_distance, bidirectional):
    """Returns T5's bucket (Raffel et al. 2020) of a key that is `distance` tokens after the query."""
    start, own, n = 0, count, max(-distance, 0)
    if bidirectional:
        own = count // 2
        start, n = own * (distance > 0), abs(distance)
    exact = own // 2
    if n < exact:
        return start + n
    f = np.float32
    wide = f(math.log(f(n) / f(exact))) / f(math.log(max_distance / exact)) * f(own - exact)
    return start + min(exact + int(wide), own - 1)


def pair_buckets(positions, count, max_distance, bidirectional):
    """Returns the bucket of each query and key [B, S, S], from positions [B, S]."""
    apart = positions[:, None, :] - positions[:, :, None]
    return np.vectorize(lambda d: bucket_of(int(d), count, max_distance, bidirectional), otypes=[int])(apart)


BUCKETS = [(32, 128, True), (32, 128, False), (32, 64, False), (33, 100, True), (4, 3, True), (2, 2, False)]


@pytest.mark.parametrize(("count", "max_distance", "bidirectional"), BUCKETS)
def test_buckets_are_those_of_t5(count, max_distance, bidirectional):
    """Every distance belongs to one bucket; 2^31 - 1 is the farthest."""
    every = (*range(-600, 601), 2**31 - 1, 1 - 2**31)
    found = RelativeBias(jnp.zeros((count, 1)), None, max_distance, bidirectional).buckets
    assert len(found) == count
    for distance in every:
        within = [n for n, (low, high) in enumerate(found) if low <= distance <= high]
        assert within == [bucket_of(distance, count, max_distance, bidirectional)], distance


def test_a_few_buckets_by_hand():
    """T5's encoder: distances below 8 have a bucket each, 8 to 11 share the next, and 91 to 127 the last but none."""
    backward = dict(enumerate(RelativeBias(jnp.zeros((32, 1))).buckets))
    assert [backward[n] for n in (0, 1, 7, 8, 14)] == [(0, 0), (-1, -1), (-7, -7), (-11, -8), (-90, -64)]
    assert [backward[n] for n in (15, 17, 24, 31)] == [(1 - 2**31, -91), (1, 1), (8, 11), (91, 2**31 - 1)]
    assert backward[16] == (1, 0)  # distance 0 has no direction
    causal = RelativeBias(jnp.zeros((32, 1)), None, 128, False).buckets
    assert (causal[0], causal[16], causal[31]) == ((0, 2**31 - 1), (-18, -16), (1 - 2**31, -113))


@pytest.mark.matrix
@pytest.mark.parametrize(("count", "max_distance", "bidirectional"), BUCKETS)
def test_buckets_are_those_of_transformers(count, max_distance, bidirectional):
    torch, t5 = pytest.importorskip("torch"), pytest.importorskip("transformers.models.t5.modeling_t5")
    apart = torch.arange(-3000, 3001)
    expected = t5.T5Attention._relative_position_bucket(apart, bidirectional, count, max_distance).numpy()
    low, high = np.asarray(RelativeBias(jnp.zeros((count, 1)), None, max_distance, bidirectional).buckets).T
    within = (apart.numpy()[:, None] >= low) & (apart.numpy()[:, None] <= high)
    np.testing.assert_array_equal(within.argmax(1), expected)
    assert within.sum() == apart.numel()


def packed(rng, batch, length, padding=0):
    """Returns segment ids [B, S] of three documents of random lengths, 0 for padding, and positions within them."""
    ids, positions = np.zeros((batch, length), np.int32), np.zeros((batch, length), np.int32)
    for row in range(batch):
        lengths = rng.multinomial(length - padding - 3, np.ones(3) / 3) + 1
        lengths = np.append(lengths, padding)
        ids[row] = np.repeat([1, 2, 3, 0], lengths)
        positions[row] = np.concatenate([np.arange(n) for n in lengths])
    return ids, positions


def draw_inputs(rng, shape, dtype):
    """Returns queries, keys, values and a cotangent for B, S, T, H, G, K, and the same numbers in float64."""
    b, s, t, h, g, width = shape
    sizes = ((s, h, 2.0), (t, g, 1.0), (t, g, 1.0), (s, h, 1.0))
    return zip(*(draw(rng, (b, tokens, heads, width), dtype, scale) for tokens, heads, scale in sizes), strict=True)


def check(f, inputs, truth, dtype):
    """Compares the value and the gradients of f(q, k, v, ...) with the truth."""
    *arrays, d_out = inputs
    out, gradients = value_and_vjp(f, d_out, *arrays)
    assert out.dtype == dtype
    for actual, expected in zip((out, *gradients), truth, strict=True):
        assert np.isfinite(np.asarray(actual, np.float32)).all()
        assert_close(actual, expected, dtype)
    return out, gradients


CROSS_CASES = {  # sizes, whether there are segments, cap
    "packed": ((2, 19, 41, 4, 2, 8), True, None),
    "one_key": ((1, 41, 1, 2, 2, 16), False, None),
    "capped": ((2, 13, 9, 2, 1, 4), True, 1.5),
}


@pytest.mark.parametrize(("case", "implementation", "dtype"), ways(CROSS_CASES, ["packed"]))
def test_cross_attention(rng, case, implementation, dtype):
    """Keys of another sequence. Segment 3 of the first row has no keys, and segment 4 has no queries."""
    shape, segmented, softcap = CROSS_CASES[case]
    (q, k, v, d_out), wide = draw_inputs(rng, shape, dtype)
    own = other = None
    if segmented:
        (own, _), (other, _) = packed(rng, *shape[:2], padding=3), packed(rng, shape[0], shape[2], padding=2)
        other[0] = np.where(other[0] == 3, 4, other[0])
    ids = {"segment_ids": own, "kv_segment_ids": other}

    def f(q, k, v):
        return kernels.attention(q, k, v, scale=0.4, mask=CROSS, softcap=softcap, implementation=implementation, **ids)

    truth = numpy_attention(*wide, 0.4, CROSS, softcap, **ids)
    out, (dq, dk, dv) = check(f, (q, k, v, d_out), truth, dtype)
    if segmented:  # exactly zero
        unseeing = (own == 0) | ((own == 3) & (np.arange(shape[0]) == 0)[:, None])
        assert unseeing.any()
        assert not np.asarray(out)[unseeing].any()
        assert not np.asarray(dq)[unseeing].any()
        unseen = (other == 0) | (other == 4)
        assert not np.asarray(dk)[unseen].any()
        assert not np.asarray(dv)[unseen].any()


@pytest.mark.parametrize(("case", "implementation", "dtype"), ways(["prefix"], []))
def test_prefix(rng, case, implementation, dtype):
    """Two documents with a prefix each, of the same id: segments keep them apart. One row has an empty prefix."""
    (q, k, v, d_out), wide = draw_inputs(rng, (2, 37, 37, 4, 2, 8), dtype)
    segments = np.repeat([[1, 2], [3, 4]], [20, 17], axis=1).astype(np.int32)
    index = np.arange(37)
    prefix = np.where((index < 9) | ((index >= 20) & (index < 33)), 7, 0)[None].repeat(2, 0).astype(np.int32)
    prefix[1, :20] = 0
    options = {"mask": PREFIX, "segment_ids": segments, "prefix_ids": prefix}

    def f(q, k, v):
        return kernels.attention(q, k, v, scale=0.4, implementation=implementation, **options)

    check(f, (q, k, v, d_out), numpy_attention(*wide, 0.4, **options), dtype)


BIAS_CASES = {  # tokens, heads, kv heads, mask, options, max_distance, what positions are: "order", "given" or "gaps"
    "encoder": (41, 4, 2, FULL, {}, 20, "order"),
    "encoder_packed": (41, 2, 2, FULL, {}, 20, "given"),
    "decoder": (41, 4, 4, CAUSAL, {}, 20, "order"),
    "decoder_packed": (29, 4, 2, CAUSAL, {}, 18, "gaps"),
    "window": (41, 2, 1, AttentionMask(11), {"softcap": 1.5}, 20, "order"),
    "one_token": (1, 2, 1, FULL, {}, 128, "order"),
    "prefix": (29, 2, 2, PREFIX, {}, 20, "order"),
}


@pytest.mark.parametrize(("case", "implementation", "dtype"), ways(BIAS_CASES, ["encoder_packed", "decoder"]))
def test_relative_bias(rng, case, implementation, dtype):
    """Positions may have gaps, be the same in every row, or follow from the order of the tokens."""
    s, h, g, mask, options, max_distance, given = BIAS_CASES[case]
    (q, k, v, d_out), wide = draw_inputs(rng, (2, s, s, h, g, 8), dtype)
    table, table64 = draw(rng, (16, h), dtype, scale=2.0)
    segments, positions = packed(rng, 2, s, padding=3) if s > 8 else (None, np.zeros((2, 1), np.int32))
    if given == "gaps":
        positions = positions * 3 + rng.integers(0, 3, positions.shape).astype(np.int32)
    how = {"mask": mask, "segment_ids": segments, **options}
    if mask == PREFIX:
        how["prefix_ids"] = (positions < 5).astype(np.int32)
    both_ways = mask != CAUSAL
    # Where documents are contiguous, the order of tokens in a row gives the same distances within them.
    buckets = pair_buckets(positions, 16, max_distance, both_ways)

    def f(q, k, v, table):
        bias = RelativeBias(table, None if given == "order" else jnp.asarray(positions), max_distance, both_ways)
        return kernels.attention(q, k, v, scale=0.7, bias=bias, implementation=implementation, **how)

    truth = numpy_attention(*wide, 0.7, bias=(table64, buckets), **how)
    check(f, (q, k, v, table, d_out), truth, dtype)


def test_no_scale_and_scale_zero(rng):
    """T5 does not scale its scores. With a scale of 0 only the biases count, and have gradients."""
    (q, k, v, d_out), wide = draw_inputs(rng, (1, 12, 12, 2, 2, 4), jnp.float32)
    table, table64 = draw(rng, (8, 2))
    buckets = pair_buckets(np.arange(12)[None], 8, 9, True)
    for scale in (1.0, 0.0):

        def f(q, k, v, table, scale=scale):
            bias = RelativeBias(table, None, 9)
            return kernels.attention(q, k, v, scale=scale, mask=FULL, bias=bias, implementation="chunked")

        truth = numpy_attention(*wide, scale, FULL, bias=(table64, buckets))
        check(f, (q, k, v, table, d_out), truth, jnp.float32)


@pytest.mark.parametrize(("new", "dtype"), [(1, jnp.float32), (1, jnp.bfloat16), (4, jnp.float32)])
def test_cached_keys_with_a_bias(rng, new, dtype):
    """The last of 22 tokens attend to those before them, which are in 25 slots in any order; the second row has 15."""
    old = 22 - new
    (q, k, v, _), wide = draw_inputs(rng, (2, 22, 22, 4, 2, 8), dtype)
    table, table64 = draw(rng, (12, 4), dtype, scale=2.0)
    slots, distance = rng.permutation(25)[:old], np.zeros((2, 25), np.int32)
    distance[:, slots] = old - np.arange(old)
    distance[1, slots[:7]] = 0  # of no document
    held_k, held_v = (draw(rng, (2, 25, 2, 8), dtype)[0].at[:, slots].set(x[:, :old]) for x in (k, v))
    cache = held_k.transpose(0, 2, 3, 1), held_v.swapaxes(1, 2), jnp.asarray(distance)
    bias = RelativeBias(table, None, 14, False)
    out = jax.jit(functools.partial(kernels.cached_attention, scale=0.7))(
        q[:, old:], k[:, old:], v[:, old:], *cache, bias=bias
    )
    assert out.dtype == dtype
    buckets = pair_buckets(np.arange(22)[None], 12, 14, False)
    for row, start in ((0, 0), (1, 7)):
        texts = (x[row : row + 1, start:] for x in wide)
        truth = numpy_attention(*texts, 0.7, bias=(table64, buckets[:, start:, start:]))[0]
        assert_close(out[row], truth[0, -new:], dtype)


@pytest.mark.parametrize(
    ("new", "softcap", "dtype"), [(1, None, jnp.float32), (1, None, jnp.bfloat16), (3, 2.0, jnp.float32)]
)
def test_cached_cross_attention(rng, new, softcap, dtype):
    """Texts of 9 and 5 tokens, and one of none, which gives zeros."""
    (q, k, v, _), wide = draw_inputs(rng, (3, new, 11, 4, 2, 8), dtype)
    visible = np.arange(11) < np.array([[9], [5], [0]])
    cache = k.transpose(0, 2, 3, 1), v.swapaxes(1, 2), jnp.asarray(visible)
    out = jax.jit(functools.partial(kernels.cached_cross_attention, scale=0.4, softcap=softcap))(q, *cache)
    ids = {"segment_ids": np.ones((3, new), int), "kv_segment_ids": visible.astype(int)}
    assert out.dtype == dtype
    assert_close(out, numpy_attention(*wide, 0.4, CROSS, softcap, **ids)[0], dtype)
    assert not np.asarray(out[2]).any()


@pytest.mark.parametrize("given", [False, True])
def test_memory_with_a_bias_is_linear(monkeypatch, given):
    """No array has a number for each pair of tokens, neither of scores nor of buckets."""
    monkeypatch.setattr(chunked, "_CHUNK", 32)

    def largest(s):
        x, table, ids = (
            jax.ShapeDtypeStruct(*z) for z in (((1, s, 2, 8), "float32"), ((32, 2), "float32"), ((1, s), "int32"))
        )

        def total(q, k, v, table, ids):
            bias = RelativeBias(table, ids if given else None)
            return kernels.attention(q, k, v, scale=1.0, mask=FULL, bias=bias, implementation="chunked").sum()

        return largest_intermediate(jax.make_jaxpr(jax.grad(total, (0, 1, 2, 3)))(x, x, x, table, ids).jaxpr)

    assert largest(4096) <= 4.1 * largest(1024)


@pytest.mark.parametrize("rows", [1, 2])
def test_two_ways_to_sum_the_gradient_of_a_table(rng, rows):
    """CPUs add by index, and other platforms multiply with a one-hot array. Bucket 4 has no distances."""
    buckets = RelativeBias(jnp.zeros((8, 4)), None, 9).buckets
    d_scores, wide = draw(rng, (2, 2, 13, 2, 17))
    apart = np.sort(rng.integers(-20, 20, (rows, 13, 17)).astype(np.int32), axis=2)
    expected = np.zeros((8, 4))
    for b, i, j in np.ndindex(2, 13, 17):
        expected[bucket_of(int(apart[b % rows, i, j]), 8, 9, True)] += wide[b, :, i, :, j].reshape(-1)
    for way in (relative_bias.table_gradient, relative_bias._sums_by_products, relative_bias._sums_by_adding):
        assert_close(jax.jit(functools.partial(way, buckets))(d_scores, apart).reshape(8, 4), expected)
    assert not expected[4].any()
    traced = jax.jit(functools.partial(relative_bias.table_gradient, buckets)).trace(d_scores, apart)
    for platform in ("cpu", "cuda", "tpu"):
        lowered = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("stablehlo.scatter" in lowered) == (platform == "cpu")


def test_what_no_kernel_computes_goes_to_chunked():
    choose = functools.partial(kernels.implementation.select_implementation, "attention")
    table, plain = kernels.OP_IMPLEMENTATIONS["attention"], {"dtype": jnp.bfloat16, "head_dim": 64}
    for case, words in [
        ({"mask": CROSS}, "queries and keys of different sequences"),
        ({"mask": PREFIX}, "does not support prefixes"),
        ({"bias": True}, "does not support relative biases"),
    ]:
        for platform, name in (("gpu", "cudnn"), ("gpu", "pallas"), ("tpu", "pallas")):
            assert choose(table, "auto", platform, plain | case) == "chunked"
            with pytest.raises(ValueError, match=f"attention={name} .*{words}. Use one of xla, chunked"):
                choose(table, name, platform, plain | case)


def test_mistakes_are_named():
    x, ids, bias = jnp.zeros((1, 4, 2, 8)), jnp.ones((1, 4), jnp.int32), RelativeBias(jnp.zeros((32, 2)))
    call = functools.partial(kernels.attention, x, scale=1.0)
    for arguments, options, words in [
        ((x[:, :3], x[:, :3]), {}, "4 queries and 3 keys .* use kind='cross'"),
        ((x, x), {"mask": CROSS, "segment_ids": ids}, "segment_ids and kv_segment_ids need each other"),
        ((x, x), {"kv_segment_ids": ids}, "use kind='cross'"),
        ((x, x), {"mask": PREFIX}, "prefix_ids and a mask of kind='prefix' need each other"),
        ((x, x), {"prefix_ids": ids}, "prefix_ids and a mask of kind='prefix' need each other"),
        ((x, x), {"mask": AttentionMask(3, "cross")}, "kind='cross' has no window"),
        ((x, x), {"mask": CROSS, "bias": bias}, "a relative bias needs queries and keys of one sequence"),
        ((x, x), {"bias": RelativeBias(jnp.zeros((32, 3)))}, "a bias of 3 heads does not fit 2 query heads"),
        ((x, x), {"bias": RelativeBias(jnp.zeros((3, 2)))}, "3 buckets cannot divide distances up to 128"),
        ((x, x), {"bias": RelativeBias(jnp.zeros((32, 2)), None, 8)}, "use .* a max_distance above 8"),
        ((x, x), {"bias": bias, "implementation": "cudnn"}, "attention=cudnn does not support relative biases"),
    ]:
        with pytest.raises(ValueError, match=words):
            call(*arguments, **options)
