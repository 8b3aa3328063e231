"""Attention's kernels, interpreted on CPU: values and gradients against float64 numpy, and what they visit.

Blocks are small here, so that every case has several. That the kernels compile for H100 and TPUs, tests/aot holds.
"""

import functools
import importlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_kernels import (
    ATTENTION_CASES,
    assert_close,
    attention_gradient_jaxpr,
    draw,
    largest_intermediate,
    numpy_attention,
    value_and_vjp,
)

from jaxstack import kernels
from jaxstack.config import ConfigError, KernelsConfig, LoraConfig, ModelConfig, MoEConfig
from jaxstack.features import experts as experts_feature
from jaxstack.kernels import OP_IMPLEMENTATIONS, tiles
from jaxstack.kernels import implementation as choice
from jaxstack.kernels.attention import block_ranges
from jaxstack.kernels.attention.reference import AttentionMask, Options
from jaxstack.models import ops

pallas_gpu, pallas_tpu = (
    importlib.import_module(f"jaxstack.kernels.attention.{name}") for name in ("pallas_gpu", "pallas_tpu")
)
KERNELS = ("pallas_gpu", "pallas_tpu")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    sizes = {"forward": (32, 16), "dq": (16, 32), "dkv": (16, 32)}
    monkeypatch.setattr(pallas_gpu, "_tile", lambda kernel, q: tiles.AttentionTile(*sizes[kernel]))
    monkeypatch.setattr(pallas_tpu, "_BLOCKS", (32, 16))


def segment_ids(batch, lengths):
    return np.tile(np.repeat(np.arange(len(lengths)), lengths), (batch, 1)).astype(np.int32)


def check(rng, implementation, shape, options, ids, dtype=jnp.float32, scale=0.4, how=True):
    """Compares values and gradients for shapes B, S, H, G, K with numpy; a sixth number is the width of values."""
    b, s, h, g, width, *of_values = shape
    (narrow,) = of_values or [width]
    (q, q64), (k, k64), (v, v64), (d_out, d_out64) = (
        draw(rng, (b, s, n, wide), dtype, scale=size)
        for n, wide, size in ((h, width, 2.0), (g, width, 1.0), (g, narrow, 1.0), (h, narrow, 1.0))
    )

    def f(q, k, v):
        return kernels.attention(q, k, v, scale=scale, segment_ids=ids, implementation=implementation, **options)

    with choice.interpret_mode(how):
        out, gradients = value_and_vjp(f, d_out, q, k, v)
    assert out.dtype == dtype
    truth = numpy_attention(q64, k64, v64, d_out64, scale, segment_ids=ids, **options)
    for actual, expected in zip((out, *gradients), truth, strict=True):
        assert_close(actual, expected, dtype)


# No size is a multiple of a block, and of the widths only 16 is a power of two. In the interpreter, memory beyond an
# array is NaN.
@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize(
    ("shape", "options", "segments", "dtype"),
    [
        ((1, 75, 4, 2, 16), {}, None, jnp.bfloat16),
        ((1, 75, 4, 2, 48), {"mask": AttentionMask(40), "softcap": 2.0}, (30, 1, 44), jnp.float32),
        ((1, 41, 2, 2, 16), {"mask": AttentionMask(kind="full")}, None, jnp.float32),
        ((1, 75, 4, 2, 16), {"mask": AttentionMask(20, "full")}, (30, 45), jnp.bfloat16),
        ((1, 75, 4, 4, 24, 10), {}, (30, 45), jnp.bfloat16),
        ((1, 41, 2, 2, 24, 16), {}, None, jnp.float32),
    ],
    ids=["causal", "everything", "full", "full_window", "narrow_values_packed", "narrow_values"],
)
def test_values_and_gradients(rng, implementation, shape, options, segments, dtype):
    ids = None if segments is None else segment_ids(shape[0], segments)
    check(rng, implementation, shape, options, ids, dtype)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("options", [{}, {"softcap": -2.0}], ids=["plain", "softcap"])
def test_a_negative_scale(rng, options, implementation):
    """The largest score then has the smallest product. A cap counts by its absolute value."""
    check(rng, implementation, (1, 20, 2, 1, 16), options, None, scale=-0.4)


@pytest.mark.matrix
@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("case", [*ATTENTION_CASES, "width_80", "width_256"])
def test_the_cases_of_the_definition(rng, implementation, case):
    widths = {
        "width_80": (1, 40, 2, 1, 80, {}, None),
        "width_256": (1, 40, 2, 1, 256, {"mask": AttentionMask(20)}, None),
    }
    b, s, h, g, width, options, segments = (ATTENTION_CASES | widths)[case]
    ids = None if segments is None else segment_ids(b, segments)
    check(rng, implementation, (b, s, h, g, width), options, ids, scale=0.4 if width < 80 else 0.1)


@pytest.mark.matrix
@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("turn", range(4))
def test_any_case_at_all(rng, implementation, turn):
    """Lengths from one token on, widths, groups, windows, caps, scores large enough to leave one key alone, and ids in
    any order: a segment's tokens need not be contiguous."""
    g = int(rng.integers(1, 3))
    shape = (
        int(rng.integers(1, 3)),
        int(rng.integers(1, 90)),
        g * int(rng.integers(1, 4)),
        g,
        int(rng.integers(1, 40)),
    )
    kind = "causal" if rng.integers(0, 4) else "full"
    options = {"softcap": float(rng.uniform(1, 5)) if rng.integers(0, 2) else None}
    options["mask"] = AttentionMask(int(rng.integers(1, 100)) if rng.integers(0, 2) else 0, kind)
    ids = rng.integers(0, 4, shape[:2]).astype(np.int32) if rng.integers(0, 2) else None
    if ids is not None and rng.integers(0, 2):
        ids = np.sort(ids, axis=1)
    print(shape, options, ids)
    # Float32 scores of some hundreds carry errors of 1e-5: a cap keeps them small.
    scale = float(rng.uniform(0.1, 20)) if options["softcap"] else float(rng.uniform(0.1, 0.5))
    check(rng, implementation, shape, options, ids, scale=scale)


@pytest.mark.slow
def test_nothing_is_raced_for_or_read_before_it_is_written(rng):
    """Under TPU semantics, memory and scratch buffers that have not been written are NaN."""
    how = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    check(rng, "pallas_tpu", (1, 40, 2, 1, 16), {}, segment_ids(1, (10, 30)), how=how)
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    assert not interpret_pallas_call.races.races_found


@pytest.mark.parametrize("implementation", KERNELS)
def test_scores_that_leave_one_key_alone(rng, implementation):
    q, k, v = (100 * draw(rng, (1, 40, 1, 16))[0] for _ in range(3))
    f = functools.partial(kernels.attention, scale=100.0)
    with choice.interpret_mode():
        out = f(q, k, v, implementation=implementation)
    np.testing.assert_allclose(out, f(q, k, v), rtol=1e-5)


LARGE = [(name, 10_000, 1e-3) for name in ("xla", "chunked")] + [(name, 30, 3e-6) for name in ("xla", "chunked")]
LARGE_KERNELS = [(name, *bound) for name in KERNELS for bound in ((10_000, 1e-3), (30, 3e-6))]


@pytest.mark.parametrize(
    ("implementation", "size", "bound"), [*LARGE, *(pytest.param(*c, marks=pytest.mark.matrix) for c in LARGE_KERNELS)]
)
def test_what_large_scores_cost(rng, implementation, size, bound):
    """All scores are near `size`, and their softmax is not: they are sums that float32 adds exactly.

    A log-sum-exp in one float32 number is rounded by 5e-4 at 10,000. Gradients of queries are not compared, because
    they are small differences of products with numbers of `size`.
    """
    q, k = (rng.integers(-8, 9, (1, 24, 1, 16)) / 8 for _ in range(2))
    q[..., 0] = 1
    k[..., 0] = size
    (v, v64), (d_out, d_out64) = draw(rng, (1, 24, 1, 16)), draw(rng, (1, 24, 1, 16))
    mask = AttentionMask(kind="full")

    def f(q, k, v):
        return kernels.attention(q, k, v, scale=1.0, mask=mask, implementation=implementation)

    with choice.interpret_mode():
        out, (_, dk, dv) = value_and_vjp(f, d_out, jnp.float32(q), jnp.float32(k), v)
    truth, _, dk_truth, dv_truth = numpy_attention(q, k, v64, d_out64, 1.0, mask)
    for actual, expected in ((out, truth), (dk, dk_truth), (dv, dv_truth)):
        assert np.linalg.norm(actual - expected) <= bound * np.linalg.norm(expected)


# Visited blocks


def seen_blocks(o, length, rows, keys):
    """Returns the pairs of blocks with any visible pair, and those whose existing pairs are all visible."""
    i, j = np.arange(length)[:, None], np.arange(-(-length // keys) * keys)
    seen = (j < length) & ((j <= i) | (not o.causal)) & ((abs(i - j) < o.window) | (o.window == 0))
    any_, all_ = set(), set()
    for r in range(0, length, rows):
        for k in range(0, length, keys):
            tile = seen[r : r + rows, k : k + keys]
            if tile.any():
                any_.add((r // rows, k // keys))
            if tile.all():
                all_.add((r // rows, k // keys))
    return any_, all_


@pytest.mark.parametrize("turn", range(40))
def test_visits_are_the_blocks_that_are_seen(rng, turn):
    length, rows, keys = (int(n) for n in rng.integers(1, [100, 30, 30]))
    kind = "causal" if rng.integers(0, 4) else "full"
    o = Options(1.0, AttentionMask(int(rng.integers(0, 60)), kind), None)
    any_, all_ = seen_blocks(o, length, rows, keys)

    def pairs(visits, inner):
        starts, ends = (visits.inner_low, visits.inner_high) if inner else (visits.low, visits.high)
        return {(own, other) for own in range(len(starts)) for other in range(starts[own], ends[own])}

    by_rows, by_keys = block_ranges.key_blocks(o, length, rows, keys), block_ranges.query_blocks(o, length, rows, keys)
    assert pairs(by_rows, False) == any_
    assert pairs(by_rows, True) == all_
    assert {(row, key) for key, row in pairs(by_keys, False)} == any_
    inner = {(row, key) for key, row in pairs(by_keys, True)}
    assert all_ <= inner <= any_
    last = -(-length // keys) - 1  # keys beyond the end may be seen there: their gradients are not stored
    assert {pair for pair in inner if pair[1] != last or length % keys == 0} <= all_


@pytest.mark.parametrize(("n", "window"), [(1, 0), (8, 0), (8, 3), (5, 9)])
def test_visits_by_formula(n, window):
    """n blocks of 16 tokens form a triangle. A window just below w + 1 blocks gives a band of w + 1 blocks."""
    o = Options(1.0, AttentionMask(16 * window), None)
    band = min(window + 1, n) if window else n  # a window of w blocks touches w + 1
    expected = n * band - band * (band - 1) // 2
    for visits in (block_ranges.key_blocks(o, 16 * n, 16, 16), block_ranges.query_blocks(o, 16 * n, 16, 16)):
        assert visits.total == expected
    full = block_ranges.key_blocks(Options(1.0, AttentionMask(kind="full"), None), 16 * n, 16, 16)
    assert full.total == n * n


def test_documents_do_not_visit_each_other():
    """Packed documents of 3, 1 and 4 blocks have a triangle each."""
    o, ids = Options(1.0, AttentionMask(), None), jnp.asarray(segment_ids(2, (48, 16, 64)))
    for visits in (block_ranges.key_blocks(o, 128, 16, 16), block_ranges.query_blocks(o, 128, 16, 16)):
        low, _, _, high = jnp.moveaxis(block_ranges.to_array(visits, (ids, ids), 16, 16), -1, 0)
        assert (high - low).sum(1).tolist() == [6 + 1 + 10] * 2


@pytest.mark.parametrize("implementation", KERNELS)
def test_memory_is_linear(implementation):
    short, long = (largest_intermediate(attention_gradient_jaxpr(s, implementation)) for s in (2048, 8192))
    assert long <= 4.1 * short


# Platforms


@pytest.mark.parametrize("implementation", KERNELS)
def test_on_a_mesh(rng, implementation):
    """Within a shard_map, tracing checks the types; the interpreter does not support them."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    q, k, v, d_out = (draw(rng, (2, 40, n, 16))[0] for n in (4, 2, 2, 4))
    ids = segment_ids(2, (17, 23))

    def f(implementation, check_vma, q, k, v):
        return jax.shard_map(
            lambda q, k, v, ids: kernels.attention(q, k, v, scale=0.3, segment_ids=ids, implementation=implementation),
            mesh=mesh,
            in_specs=(P("data", None, "tensor"),) * 3 + (P("data"),),
            out_specs=P("data", None, "tensor"),
            check_vma=check_vma,
        )(q, k, v, ids)

    jax.make_jaxpr(jax.grad(lambda *x: f(implementation, True, *x).sum(), (0, 1, 2)))(q, k, v)
    with choice.interpret_mode():
        out, gradients = value_and_vjp(functools.partial(f, implementation, False), d_out, q, k, v)
    truth, expected = value_and_vjp(functools.partial(f, "xla", True), d_out, q, k, v)
    for actual, right in zip((out, *gradients), (truth, *expected), strict=True):
        assert_close(actual, right)


def test_lowers_for_tpus_here(monkeypatch):
    """Mosaic's Python half lowers the kernels, with every version of JAX under test; tests/aot runs the compiler."""
    monkeypatch.undo()  # blocks are those of every day
    x, ids = jax.ShapeDtypeStruct((1, 300, 2, 48), jnp.bfloat16), jax.ShapeDtypeStruct((1, 300), jnp.int32)

    def total(q, k, v, ids):
        options = {"mask": AttentionMask(100), "softcap": 3.0, "segment_ids": ids, "implementation": "pallas_tpu"}
        return kernels.attention(q, k, v, scale=1.0, **options).astype(jnp.float32).sum()

    lowered = jax.jit(jax.grad(total, (0, 1, 2))).trace(x, x, x, ids).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("@tpu_custom_call") == 3


def choose(wanted, platform, **case):
    return choice.select_implementation(
        "attention", OP_IMPLEMENTATIONS["attention"], wanted, platform, {"dtype": jnp.bfloat16} | case
    )


def test_what_a_kernel_cannot_do_is_an_error_and_auto_goes_on():
    plain = {"head_dim": 128, "softcap": None, "segments": False, "sequence_shards": 1, "compute_capability": "9.0"}
    packed = plain | {"segments": True, "max_documents": 16}
    wide = plain | {"head_dim": 256}
    for case in (plain, packed, wide, packed | {"head_dim": 192}):
        assert choose("auto", "gpu", **case) == choose("cudnn", "gpu", **case) == "cudnn"
        assert choose("pallas", "tpu", **case) == "pallas_tpu"
    for case, words in [
        (plain | {"softcap": 50.0}, "does not cap scores"),
        (plain | {"head_dim": 20}, "multiples of 8, not 20"),
        (plain | {"dtype": jnp.float32}, "takes bfloat16 and float16, not float32"),
        (packed | {"max_documents": None}, "takes segments only with data.max_documents"),
        (packed | {"mask": AttentionMask(9)}, "does not support segments with a window"),
        (packed | {"sequence_shards": 2}, "does not support segments in a sequence that is split"),
        (packed | {"compute_capability": "8.9"}, "takes segments on NVIDIA GPUs of compute capability 9.0 and later"),
        (wide | {"compute_capability": "8.0"}, "takes heads of 256 on NVIDIA GPUs of compute capability 9.0 and later"),
        (wide | {"sequence_shards": 2}, "takes heads up to 128 wide in a sequence that is split"),
    ]:
        assert choose("auto", "gpu", **case) == "pallas_gpu"
        with pytest.raises(ValueError, match=f"attention=cudnn .*{words}.*. Use one of .*pallas_gpu"):
            choose("cudnn", "gpu", **case)
    for change, words in [
        ({"sequence_shards": 2, "mask": AttentionMask(5)}, "split over mesh axis context"),
        ({"head_dim": 1024}, "wide, not 1024"),
        ({"value_dim": 256}, "takes values as wide as keys, not 256 and 128"),
        ({"value_dim": 64, "sequence_shards": 2}, "split over mesh axis context"),
        ({"dtype": jnp.float64}, "not float64"),
    ]:
        for platform in ("gpu", "tpu"):
            assert choose("auto", platform, **plain | change) == "chunked"
            with pytest.raises(ValueError, match=f"attention=pallas .*{words}.*. Use one of xla, chunked"):
                choose("pallas", platform, **plain | change)
    with pytest.raises(ValueError, match=r"as wide as keys in a sequence that is split .*, not 64 and 128"):
        choose("cudnn", "gpu", **plain | {"value_dim": 64, "sequence_shards": 2})
    latent = plain | {"head_dim": 192, "value_dim": 128}
    assert choose("auto", "gpu", **latent) == "cudnn"
    assert choose("auto", "tpu", **latent) == "pallas_tpu"
    for capability in ("7.5", "gfx942"):  # one without bfloat16, and one of another vendor
        assert choose("auto", "gpu", **packed | {"compute_capability": capability}) == "chunked"
    ring = plain | {"sequence_shards": 2}
    assert (choose("auto", "gpu", **ring), choose("pallas", "gpu", **ring)) == ("cudnn", "pallas_gpu")
    assert choose("auto", "gpu", **ring, context_method="all_gather") == "chunked"
    with pytest.raises(ValueError, match="takes the keys of a split sequence by mesh"):
        choose("pallas", "gpu", **ring, context_method="all_gather")
    x = jnp.zeros((1, 4, 2, 8), jnp.bfloat16)
    with pytest.raises(
        ValueError, match=r"cudnn takes segments only with .*. Use one of xla, chunked, pallas_gpu, pallas_tpu"
    ):
        kernels.attention(x, x, x, scale=1.0, segment_ids=jnp.zeros((1, 4)), implementation="cudnn")


@pytest.fixture
def with_tokamax(monkeypatch):
    monkeypatch.setattr(choice, "find_spec", lambda name: name)


def test_what_tokamax_cannot_do_is_an_error(with_tokamax):
    """`auto` selects other kernels, also where cuDNN cannot run and tokamax can."""
    plain = {"head_dim": 128, "softcap": None, "segments": True, "compute_capability": "9.0", "dtype": jnp.bfloat16}
    assert choose("tokamax", "gpu", **plain | {"softcap": 50.0, "mask": AttentionMask(9, "full"), "sinks": True})
    for change, words in [
        ({"compute_capability": "8.9"}, "takes NVIDIA GPUs of compute capability 9 .Hopper., not 8.9"),
        ({"compute_capability": "10.0"}, "not 10.0"),
        ({"compute_capability": "gfx942"}, "not gfx942"),
        ({"dtype": jnp.float32}, "takes bfloat16 and float16, not float32"),
        ({"dtype": jnp.float16, "softcap": 50.0}, "does not cap scores in float16"),
        ({"head_dim": 320}, "takes heads up to 256 wide, not 320"),
        ({"value_dim": 256}, "takes values as wide as keys, not 256 and 128"),
        ({"sequence_shards": 2}, "takes whole sequences"),
        ({"bias": True}, "does not support relative biases"),
        ({"mask": AttentionMask(kind="prefix")}, "does not support prefixes"),
        ({"mask": AttentionMask(kind="cross")}, "of different sequences"),
    ]:
        with pytest.raises(ValueError, match=f"attention=tokamax .*{words}.*. Use one of xla, chunked"):
            choose("tokamax", "gpu", **plain | change)
    with pytest.raises(ValueError, match=r"attention=tokamax runs on gpu, not on cpu. Use one of xla, chunked, or"):
        choose("tokamax", "cpu", **plain)
    for change in ({"softcap": 50.0}, {"mask": AttentionMask(9, "full")}, {"max_documents": None}):
        assert choose("auto", "gpu", **plain | change) == "pallas_gpu"


def test_tokamax_has_whole_blocks_of_an_expert(with_tokamax):
    table, case = OP_IMPLEMENTATIONS["moe"], {"dtype": jnp.bfloat16, "compute_capability": "9.0"}
    chosen = choice.select_implementation("moe", table, "tokamax", "gpu", case | {"widths": (2048, 1408)})
    assert chosen == "tokamax"
    with pytest.raises(ValueError, match=r"moe=tokamax takes inputs and outputs .* multiples of 128, not 720. Use one"):
        choice.select_implementation("moe", table, "tokamax", "gpu", case | {"widths": (1024, 720)})
    x, w = jnp.zeros((8, 128), jnp.bfloat16), jnp.zeros((1, 128, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="multiples of 128, not 64"):
        kernels.grouped_matmul(x, w, jnp.array([8]), implementation="tokamax")
    assert choice.select_implementation("moe", table, "auto", "gpu", case | {"widths": (2048, 1408)}) == "pallas_gpu"


@pytest.mark.parametrize(
    ("experts", "widths"),
    [({}, ()), ({"num_experts": 4, "d_ff": 256}, (512, 128)), ({"num_experts": 4, "bias": True}, (512, 1024, 1))],
)
def test_a_run_names_the_matrices_of_its_experts(experts, widths):
    model = ModelConfig(d_model=512, moe=MoEConfig(**experts))
    assert experts_feature.matrix_sizes(model, 2) == widths
    adapted = experts_feature.matrix_sizes(replace(model, lora=LoraConfig(rank=8)), 2)
    assert experts_feature.matrix_sizes(replace(model, lora=LoraConfig(8, targets=("attention/.*",))), 2) == widths
    assert adapted == ((*widths[:2], 8, *widths[2:]) if widths else ())


@pytest.mark.parametrize("op", ["attention", "moe"])
def test_without_tokamax_its_name_is_an_error_with_the_command(monkeypatch, op):
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=rf"kernels.{op}=tokamax needs .* \(pip install 'jaxstack\[tokamax\]'\). Use one"
    ):
        ops.implementations("gpu", KernelsConfig(**{op: "tokamax"}))


def test_padding_of_prompts_is_a_segment_that_every_kernel_of_a_prompt_knows(with_tokamax):
    from jaxstack.models.context import Context
    from jaxstack.models.ops import Ops

    for name in OP_IMPLEMENTATIONS["attention"]:
        chosen = Context(ops=Ops(attention=name)).whole_sequences().ops.attention
        assert chosen == (choose("auto", "gpu", segments=True) if name == "cudnn" else name)
        assert not OP_IMPLEMENTATIONS["attention"][chosen].unsupported_reason({"segments": True})
