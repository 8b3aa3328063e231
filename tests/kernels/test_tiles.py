"""The table of block sizes: which entry a call takes, and the order in which the cross-entropy's programs run."""

import importlib
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxpr_as_fun

from jaxstack import kernels
from jaxstack.common.hardware import CHIPS
from jaxstack.kernels import tiles

pallas_tpu = importlib.import_module("jaxstack.kernels.attention.pallas_tpu")  # `attention` there is a function
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_every_entry_says_where_it_is_from():
    for name, chip in tiles.TABLE.items():
        assert name in CHIPS or name in ("gpu", "tpu")
        assert chip.source.startswith(tiles.NOT_TIMED) or (RESULTS / chip.source).exists(), name
        platform = tiles.TABLE[name if name in ("gpu", "tpu") else CHIPS[name].platform]
        for kernel, classes in chip.sizes.items():
            assert classes.keys() <= platform.sizes[kernel].keys(), (name, kernel)
            for tile in classes.values():
                assert platform is tiles.TABLE["tpu"] or all(n & (n - 1) == 0 for n in tile[:3]), (name, kernel, tile)


def on_a_chip(kind: str, platform: str):
    """Traces within a mesh of one device of a kind, as a step for this chip is traced."""
    device = jax.sharding.AbstractDevice(kind, 1, platform)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("data",), abstract_device=device))


def test_a_call_takes_the_sizes_of_its_chip():
    def dkv(width):
        return tiles.find_tile("attention_dkv", tiles.attention_class(width, jnp.bfloat16), "gpu")

    default = tiles.TABLE["gpu"].sizes["attention_dkv"]
    assert dkv(128) == default["128"]  # on this CPU, for the interpreter
    with on_a_chip("NVIDIA H100 80GB HBM3", "gpu"):
        assert dkv(128) == tiles.TABLE["h100"].sizes["attention_dkv"]["128"] != default["128"]
        assert dkv(200) == default["256"]  # it has no entry for these
        assert (
            tiles.find_tile("cross_entropy", "16 bits", "tpu") == tiles.TABLE["tpu"].sizes["cross_entropy"]["16 bits"]
        )
    with on_a_chip("NVIDIA GeForce GTX 1080", "gpu"):
        assert dkv(96) == default["128"]


@pytest.mark.parametrize(("length", "block"), [(4096, 512), (700, 384), (100, 128), (1024, 512)])
def test_blocks_of_attention_on_a_tpu(monkeypatch, length, block):
    """At most an eighth is padding beyond blocks of 128, and the table has the largest block."""
    q = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.bfloat16)
    assert pallas_tpu._block_of(q) == block
    larger = {"attention": {"16 bits": tiles.AttentionTile(1024, 1024)}}
    monkeypatch.setitem(tiles.TABLE, "tpu", tiles.Tiles(tiles.NOT_TIMED, larger))
    assert pallas_tpu._block_of(q) == (1024 if length % 1024 == 0 else block)


@pytest.mark.parametrize(
    ("width", "dtype", "expected"),
    [(8, "bfloat16", "64"), (64, "float16", "64"), (65, "bfloat16", "128"), (129, "float32", "256"),
     (64, "float32", "float32")],
)  # fmt: skip
def test_classes_of_attention(width, dtype, expected):
    assert tiles.attention_class(width, dtype) == expected


def pallas_calls(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn
        else:
            for sub in jax.extend.core.jaxprs_in_params(eqn.params):
                yield from pallas_calls(sub)


@pytest.mark.parametrize(("tokens", "passes"), [(8192, 1), (8200, 2), (32768, 4)])
def test_the_head_passes_by_once_for_each_32_mib_of_x(monkeypatch, tokens, passes):
    """A GPU runs the first axis of a grid fastest. Each block of logits has one program."""
    D, V = 2048, 4096

    def f(x, head, targets, weights):
        return kernels.cross_entropy(x, head, targets, weights, implementation="pallas_gpu")

    shapes = [
        ((1, tokens, D), jnp.bfloat16),
        ((D, V), jnp.bfloat16),
        ((1, tokens), jnp.int32),
        ((1, tokens), "float32"),
    ]
    monkeypatch.setitem(tiles.TABLE, "gpu", tiles.TABLE["h100"])
    (call,) = pallas_calls(jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).jaxpr)
    mapping = call.params["grid_mapping"]
    x_index, head_index = (jaxpr_as_fun(b.index_map_jaxpr) for b in mapping.block_mappings[:2])
    order = [index[::-1] for index in itertools.product(*(range(n) for n in mapping.grid[::-1]))]
    ids = jnp.asarray(order, jnp.int32)
    rows, columns = (jax.vmap(lambda *i, f=f: jnp.stack(f(*i)))(*ids.T) for f in (x_index, head_index))
    blocks = list(zip(rows[:, 0].tolist(), columns[:, 1].tolist(), strict=True))
    wanted = set(itertools.product(range(-(-tokens // 128)), range(V // 256)))
    assert wanted <= set(blocks)
    assert len(blocks) <= len(wanted) + passes * V // 256  # the last group may have one token block too many
    assert len(list(itertools.groupby(j for _, j in blocks))) == passes * V // 256
