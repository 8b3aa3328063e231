"""Training in bfloat16: gradients of the whole model against float32, and the dtypes in which devices sum them.

The bound of 0.02 is four to eight times the rounding error that remains: activations and the gradients that pass
through a layer are rounded to 8 bits (0.4%) some ten times, and a token near the border between two experts may change
sides. Summing in bfloat16 over the tokens of a device, which is the fault that these tests exist for, costs 0.1 to 0.8.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
import test_meshes as meshes
import test_pipeline as pipelines

from jaxstack import families
from jaxstack.config import Config, KernelsConfig, PipelineConfig
from jaxstack.families.context import make_context
from jaxstack.models import params
from jaxstack.sharding import BATCH_AXES, make_mesh
from jaxstack.training.assemble import make_gradients

BOUND = 0.02
# Rows of pairs are short and mostly padding. Their noise falls with the root of the tokens, as rounding errors in a sum
# do: that of `w_k` is 4.9%, 2.9% and 1.6% with 8, 33 and 131 thousand. The table of biases sums differences.
PAIRS_BOUND, TABLE_BOUND = 0.06, 0.1
# Models that compare rows: one device that compares all at once has 0.0200 at 8,192 tokens, for queries and keys of
# the text. Rows in microbatches add little to that: 0.0205 with accumulation or a pipeline.
ROWS_BOUND = 0.023
TOKENS = 32_768  # of a device: sums over tokens must be long enough to show that they are lost

Case = tuple[str, dict[str, Any], dict[str, Any]]
QUICK: list[Case] = [
    ("gpt2", {}, {"accum": 4}),  # biases, learned positions, a tied head
    ("llama3", {"fsdp": 2, "tensor": 2}, {"packing": True, "tokens": 8192}),
    ("untied", {"pipe": 2, "tensor": 2}, {"tokens": 2048}),
    ("bert", {}, {"tokens": 4096}),
    ("dit", {}, {"tokens": 4096}),
]
CASES: list[Case] = [
    *QUICK,
    ("softmax", {}, {}),
    ("bert", {"fsdp": 2, "tensor": 2}, {"tokens": 8192, "accum": 2}),
    ("modernbert", {}, {}),
    ("dit", {"fsdp": 2, "tensor": 2}, {"tokens": 8192, "accum": 2}),
    ("dit_experts", {}, {}),
    ("dit_experts", {"expert": 2, "tensor": 2}, {"tokens": 8192, "remat": "selective"}),
    ("modernbert", {"data": 2, "fsdp": 2}, {"tokens": 8192, "packing": True}),
    ("branches", {}, {"tokens": 8192}),
    ("clip", {}, {"tokens": 8192}),
    ("clip", {}, {"tokens": 8192, "accum": 4}),
    ("clip", {"pipe": 2, "fsdp": 2}, {"tokens": 8192}),
    ("deep_branches", {"fsdp": 2, "tensor": 2}, {"tokens": 8192, "accum": 2}),
    ("bert_pairs", {}, {"tokens": 8192}),
    ("switch_2", {"fsdp": 2, "expert": 2}, {}),
    ("t5", {}, {}),
    ("t5", {"fsdp": 2, "tensor": 2}, {"accum": 2}),
    ("t5", {"pipe": 2, "tensor": 2}, {}),
    ("gpt2", {}, {}),
    ("gpt2", {}, {"packing": True, "accum": 2}),
    ("llama3", {}, {}),
    ("gemma2", {}, {"packing": True}),
    ("qwen3", {}, {"accum": 4}),
    ("grouped", {}, {}),
    ("softmax", {}, {"accum": 4}),
    ("latent", {}, {"tokens": 8192}),
    ("latent", {"fsdp": 2, "tensor": 2}, {"tokens": 8192, "packing": True, "accum": 2}),
    ("dense_first", {"fsdp": 2, "expert": 2}, {"tokens": 8192}),
    ("capacity", {}, {}),
    ("sigmoid", {}, {}),
    ("domain", {}, {}),
    ("lora", {}, {}),
    ("gpt2", {"data": 4}, {}),
    ("gpt2", {"fsdp": 2, "tensor": 2}, {"remat": "selective"}),
    ("gpt2", {"tensor": 2, "context": 2, "sequence_parallel": False}, {"accum": 2}),
    ("gemma2", {"data": 2, "fsdp": 2}, {"accum": 2, "remat": "full"}),
    ("llama3", {"context": 4}, {"packing": True}),
    ("softmax", {"expert": 2, "tensor": 2}, {"remat": "selective"}),
    ("sigmoid", {"fsdp": 2, "expert": 2}, {"accum": 2}),
    ("lora", {"fsdp": 2, "tensor": 2}, {}),
    ("gpt2", {"fsdp": 2, "tensor": 2, **meshes.AUTO}, {"tokens": 8192}),
    ("gpt2", {"pipe": 2, "data": 2}, {"schedule": "zb1"}),
    ("gpt2", {"pipe": 2, "fsdp": 2}, {"schedule": "zb_h1", "microbatches": 4}),
    ("gpt2", {"pipe": 2, "fsdp": 2}, {"gather": "layer"}),
    ("llama3", {"pipe": 2, "fsdp": 2, "tensor": 2}, {"tokens": 8192, "packing": True, "accum": 2}),
    ("softmax", {"pipe": 2, "expert": 2}, {"tokens": 8192}),
]


def config(
    family: str,
    mesh: dict[str, Any],
    dtype: str,
    *,
    tokens: int = TOKENS,
    schedule: Any = pipelines.ONE,
    gather: Any = "once",
    microbatches: int = 2,
    **how: Any,
) -> Config:
    cfg = meshes.config(family, mesh, **how)
    replicas = math.prod(mesh.get(axis, 1) for axis in (*BATCH_AXES, "context"))
    return dataclasses.replace(
        cfg,
        data=dataclasses.replace(cfg.data, batch_size=replicas * tokens // meshes.SEQ),
        train=dataclasses.replace(cfg.train, dtype=dtype),
        # `grouped` takes minutes here: XLA:CPU converts the whole of a bfloat16 array whenever a loop writes some rows.
        kernels=KernelsConfig(moe="ragged"),
        pipeline=PipelineConfig(schedule=schedule, microbatches=microbatches, split=(".*",), gather=gather)
        if "pipe" in mesh
        else PipelineConfig(),
    )


def text_like(seed: int, cfg: Config) -> dict[str, np.ndarray]:
    """A random batch that has two properties of text: some tokens are a hundred times as frequent as others, and the
    next token follows from the present one, so that the gradients of tokens add up instead of cancelling."""
    batch = meshes.random_batch(seed, cfg.data.packing, cfg.model, cfg.data.batch_size)
    rng = np.random.default_rng(seed)
    if "tokens" not in batch:
        return batch
    frequent = {
        name: (cfg.model.vocab * rng.random(array.shape) ** 3).astype(np.int32)
        for name, array in batch.items()
        if name in ("tokens", "encoder_tokens", "masked_tokens")
    }
    learned = {"targets": "tokens", "masked_targets": "masked_tokens"}
    follows = {new: (5 * frequent[old] + 3) % cfg.model.vocab for new, old in learned.items() if old in frequent}
    return batch | frequent | follows


@functools.cache
def gradients(family: str, mesh: tuple[tuple[str, Any], ...], dtype: str, how: tuple[tuple[str, Any], ...]) -> Any:
    cfg = config(family, dict(mesh), dtype, **dict(how))
    return meshes.gradients(cfg, 0, batch=text_like(0, cfg))


def name_of(case: Case) -> str:
    return meshes.name_of(case) or "one device"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=name_of(c), marks=() if c in QUICK[:2] else meshes.SLOW if c in QUICK else meshes.MATRIX)
        for c in CASES
    ],
)
def test_every_gradient_in_bfloat16_is_near_that_in_float32(case):
    family, mesh, how = case
    plain = tuple((k, v) for k, v in how.items() if k in ("packing", "tokens"))
    # The same batch on one device, in float32.
    replicas = math.prod(mesh.get(axis, 1) for axis in (*BATCH_AXES, "context"))
    whole = dict(plain) | {"tokens": replicas * how.get("tokens", TOKENS)}
    _, exact, _ = gradients(family, (), "float32", tuple(whole.items()))
    _, short, _ = gradients(family, tuple(mesh.items()), "bfloat16", tuple(how.items()))
    total = math.sqrt(sum(float(np.square(g).sum()) for g in exact.values()))
    pairs, rows = (meshes.MODELS[family].family == name for name in ("encoder_decoder", "contrastive"))
    for path, g in exact.items():
        if path.endswith("attention/b_k") and meshes.MODELS[family].positions != "rope":
            # Its true gradient is zero (see `meshes.errors`); rounding must not make it large.
            assert np.linalg.norm(short[path]) < BOUND * total, path
        elif path.endswith("moe/balance"):
            assert not g.any(), path  # moved by the load
            assert not short[path].any(), path
        else:
            assert g.any(), path
            bound = ROWS_BOUND if rows else PAIRS_BOUND if pairs else BOUND
            bound = TABLE_BOUND if path.startswith("relative/") else bound
            assert np.linalg.norm(short[path] - g) <= bound * np.linalg.norm(g), path
    norm = math.sqrt(sum(float(np.square(g).sum()) for g in short.values()))
    assert abs(norm - total) <= BOUND * total  # clipping reads it


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields all equations of a jaxpr, including those of inner jaxprs."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


REDUCTIONS = {"psum", "psum_invariant", "reduce_scatter", "psum_scatter", "unreduced_psum"}
MESHES = [
    ("gpt2", {"data": 4, "tensor": 2}, {}),
    ("gpt2", {"data": 2, "fsdp": 2, "tensor": 2}, {}),
    ("gpt2", {"data": 2, "fsdp": 2, "tensor": 2}, {"accum": 2}),
    ("gpt2", {"data": 2, "fsdp": 2, "context": 2}, {"remat": "selective"}),
    ("sigmoid", {"data": 2, "fsdp": 2, "expert": 2}, {"remat": "selective"}),
    ("llama3", {"pipe": 2, "data": 2, "fsdp": 2}, {}),
]


@pytest.mark.matrix(quick=["gpt2 data=2 fsdp=2 tensor=2-"])
@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [pytest.param(c, id=name_of(c)) for c in MESHES])
def test_devices_sum_gradients_in_the_dtype_that_is_asked_for(case, reduce_dtype):
    """The traced step gathers weights in bfloat16 and sums gradients in `reduce_dtype`."""
    family, mesh, how = case
    cfg = config(family, mesh, "bfloat16", tokens=meshes.BATCH * meshes.SEQ, **how)
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, reduce_dtype=reduce_dtype))
    ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.data.batch_size // cfg.train.grad_accum))
    values = params.abstract(params.pad_to_slots(families.spec(cfg.model), ctx.layout.stages))
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), text_like(0, cfg))
    traced = jax.make_jaxpr(make_gradients(cfg, ctx))(values, batch)
    replicated = {"context", *BATCH_AXES}  # axes along which devices see other tokens

    def is_router(aval: Any) -> bool:
        return aval.ndim == 2 and aval.shape[-1] == cfg.model.moe.num_experts

    summed: dict[str, set[str]] = {"large": set(), "small": set()}
    gathered = set()
    for eqn in equations(traced.jaxpr):
        axes = set(eqn.params.get("axes") or eqn.params.get("axis_name") or ())
        for aval in (v.aval for v in eqn.invars if axes & replicated):
            if eqn.primitive.name in REDUCTIONS:
                # A device's part of a matrix has 512 numbers or more. Norms and biases of two layers have 192 at most;
                # their gradients are summed in float32, as those of routers are, which are float32 weights.
                summed["small" if aval.size <= 192 or is_router(aval) else "large"].add(str(aval.dtype))
            elif eqn.primitive.name == "all_gather" and not is_router(aval):
                gathered.add(str(aval.dtype))
    assert summed == {"large": {reduce_dtype}, "small": {"float32"}}
    if "pipe" not in mesh:  # there the transpose of a float32 gather is traced with its forward half, which XLA drops
        assert gathered == ({"bfloat16"} if "fsdp" in mesh else set())
