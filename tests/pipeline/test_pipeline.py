"""A pipeline never changes values: every schedule gives the loss and every gradient of one device.

`python tests/pipeline/test_pipeline.py` prints the table of docs/pipeline_results.md, and with `--measure` what each
case shows. JAXSTACK_TEST_SCHEDULE=zb1 or zb_h1 runs all cases of that table under that schedule, in place of their own.
"""

import os
import sys

if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}

import dataclasses
import functools
import itertools
import math
import re
from collections import Counter
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_meshes as meshes
from jax.sharding import AxisType, PartitionSpec

from jaxstack import families, pipeline
from jaxstack.common.tree import flatten
from jaxstack.config import Config, ConfigError, OptimConfig, PipelineConfig
from jaxstack.families.context import make_context
from jaxstack.kernels.taps import find_weights
from jaxstack.models.context import Context
from jaxstack.pipeline import (
    Program,
    ScheduleError,
    Stages,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    product,
    zb1,
    zb_h1,
)
from jaxstack.pipeline.schedule import BACKWARD, FORWARD, WEIGHT
from jaxstack.planner import estimate, hlo
from jaxstack.planner.job import Job
from jaxstack.sharding import BATCH_AXES, collectives, make_mesh
from jaxstack.training import assemble
from jaxstack.training.assemble import make_gradients
from jaxstack.training.services.checkpoint_layout import checkpoint_layout
from jaxstack.training.state import Recipe, abstract_state, make_state

Case = tuple[str, dict[str, Any], dict[str, Any]]


def case(
    family: str, schedule: str, pipe: int, microbatches: int, chunks: int = 1, layers: int = 8, **how: Any
) -> Case:
    """Returns a row of the table; a name that `meshes.config` does not have is an axis of the mesh."""
    run = {k: v for k, v in how.items() if k in ("accum", "packing", "remat", "dropout", "loops", "gather")}
    mesh = {"pipe": pipe} | {k: v for k, v in how.items() if k not in run}
    least = microbatches * run.get("accum", 1) * math.prod(mesh.get(axis, 1) for axis in BATCH_AXES)
    batch = least * math.ceil(meshes.BATCH / least)
    pipelined = {"schedule": schedule, "microbatches": microbatches, "chunks": chunks, "layers": layers}
    return family, mesh, run | pipelined | {"batch": batch}


ONE, TWO, ALL = "1f1b", "interleaved_1f1b", "gpipe"
QUICK: list[Case] = [
    case("llama3", ONE, 4, 4, layers=6, data=2, remat="selective", accum=2),
    case("gpt2", TWO, 2, 4, 2, layers=7, fsdp=2, tensor=2, dropout=0.3),
    case("softmax", ALL, 2, 4, expert=2, tensor=2),
]
CASES: list[Case] = [
    *QUICK,
    # Stages and microbatches: as many as stages, twice, four times, an odd number.
    *(case("llama3", ALL, p, m) for p, m in ((2, 2), (4, 8), (8, 8))),
    *(case("llama3", ONE, p, m) for p, m in ((2, 4), (4, 4), (4, 16), (8, 16))),
    *(case("llama3", s, p, 5, remat="full") for s, p in ((ALL, 2), (ONE, 4))),
    *(case("llama3", TWO, p, m, c) for p, m, c in ((2, 2, 4), (2, 8, 4), (4, 8, 2))),
    case("llama3", TWO, 8, 8, 2, layers=16),
    case("llama3", TWO, 2, 2, 1),
    # Beside other axes.
    case("llama3", ONE, 2, 2, data=4),
    case("llama3", ONE, 2, 4, fsdp=2, tensor=2, remat="selective"),
    case("llama3", ONE, 2, 4, tensor=4, sequence_parallel=False),
    case("llama3", TWO, 2, 2, 2, data=2, tensor=2, accum=2, remat="full"),
    case("llama3", ONE, 2, 2, fsdp=2, context=2, packing=True),
    case("grouped", ALL, 2, 4, tensor=2, context=2, dropout=0.3),
    # Families: tied heads, alternating windows (uneven stages of their groups too), packing.
    case("gpt2", ONE, 4, 4, tensor=2),
    case("untied", ONE, 2, 4, layers=5, fsdp=2, tensor=2, accum=2),
    case("untied", TWO, 4, 4, 2, data=2, packing=True),
    case("gpt2", ALL, 2, 4, layers=5, data=2, packing=True, dropout=0.2),
    case("gemma2", ONE, 4, 8, remat="selective", packing=True),
    case("gemma2", TWO, 2, 4, 2, layers=10, tensor=2),
    case("qwen3", TWO, 2, 4, 2, fsdp=2, packing=True, accum=2),
    # Experts, with every router.
    *(case("softmax", s, 2, 4, c, expert=2, accum=a) for s, c, a in ((ONE, 1, 2), (TWO, 2, 1))),
    case("softmax", ONE, 4, 4, layers=6, tensor=2, packing=True),
    case("capacity", ONE, 2, 4, expert=2),
    case("capacity", TWO, 2, 4, 2, data=2),
    case("sigmoid", ONE, 2, 4, expert=2, tensor=2, remat="selective"),
    case("sigmoid", ALL, 4, 4, layers=5),
    case("domain", TWO, 2, 4, 2, fsdp=2, accum=2),
    # Adapters, where most of a stage's weights have no gradient.
    case("lora", ONE, 4, 4, layers=6, fsdp=2, remat="selective"),
    case("lora", TWO, 2, 4, 2, layers=7, tensor=2, accum=2, dropout=0.2),
    case("lora_gpt2", ALL, 2, 4, data=2, tensor=2),
    case("lora_moe", ONE, 2, 4, expert=2, tensor=2, remat="full"),
]
STATIC: list[Case] = [
    case("untied", ONE, 4, 4, layers=6, loops="static"),
    case("gpt2", TWO, 2, 4, 2, layers=7, fsdp=2, tensor=2, dropout=0.3, loops="static"),
    case("softmax", ALL, 2, 4, layers=6, expert=2, tensor=2, accum=2, loops="static"),
    case("gemma2", TWO, 4, 8, 2, layers=20, packing=True, remat="selective", loops="static"),
    case("lora", ONE, 2, 4, layers=7, tensor=2, loops="static"),
]
"""Pipelines with static trip counts and masked turns, as on GPUs. The first one is quick."""
ZERO, H1 = "zb1", "zb_h1"
ZERO_BUBBLE: list[Case] = [
    case("llama3", ZERO, 2, 4, layers=4, remat="full"),
    case("gpt2", ZERO, 2, 4, layers=5, fsdp=2, tensor=2, dropout=0.3, remat="selective", packing=True),
    case("gemma2", ZERO, 2, 4, 2, layers=10, data=2, loops="static"),
    case("capacity", ZERO, 4, 8, layers=6, expert=2, accum=2),
    case("softmax", ZERO, 2, 4, layers=4, expert=2, tensor=2, remat="full"),
    case("lora_moe", ZERO, 2, 2, layers=3, tensor=2, remat="selective"),
    case("untied", H1, 4, 8, layers=6, remat="full", dropout=0.2),
    case("softmax", H1, 2, 4, layers=5, expert=2, tensor=2, remat="selective", accum=2),
    case("gpt2", H1, 2, 4, layers=5, fsdp=2, data=2, packing=True, loops="static", gather="layer"),
    case("lora", H1, 2, 4, layers=5, context=2, tensor=2, context_method="all_gather"),
]
"""Pipelines whose weight units run apart. The first one is quick."""

LAYER = "layer"
SHARDED: list[Case] = [
    case("untied", ONE, 2, 4, layers=5, fsdp=2, data=2, accum=2, gather=LAYER),
    case("gpt2", TWO, 2, 4, 2, layers=7, fsdp=2, tensor=2, dropout=0.3, packing=True, remat="selective", gather=LAYER),
    case("softmax", ALL, 2, 4, layers=5, fsdp=2, expert=2, remat="full", gather=LAYER),
    case("gemma2", ZERO, 2, 4, layers=6, fsdp=2, remat="full", loops="static", gather=LAYER),
    case("lora", ONE, 2, 4, layers=5, fsdp=2, remat="selective", gather=LAYER),
]
"""Pipelines whose units gather the weights of one layer at a time. The first one is quick."""
NEAR: list[Case] = [
    case("cohere2", ONE, 2, 4, layers=6, fsdp=2, tensor=2, dropout=0.3),
    case("cohere2", ZERO, 2, 4, layers=4, tensor=2, packing=True),
    case("gptj", ONE, 2, 4, layers=5, fsdp=2, tensor=2, packing=True),
    case("gptj", ZERO, 2, 4, layers=4, tensor=2, remat="selective"),
    case("gptj", TWO, 2, 4, 2, fsdp=2, accum=2, gather=LAYER),
    case("olmo2", TWO, 2, 4, 2, layers=7, tensor=2, accum=2),
    case("olmo2", ONE, 2, 4, fsdp=2, remat="full", gather=LAYER),
    case("granite", ALL, 4, 4, layers=5, data=2, packing=True),
    case("shared_gate", ONE, 2, 4, expert=2, tensor=2, remat="selective"),
    case("latent", ONE, 2, 4, layers=5, fsdp=2, tensor=2, packing=True),
    case("dense_first", ONE, 2, 4, layers=5, expert=2, tensor=2),
    case("dense_first", ALL, 2, 4, layers=4, fsdp=2, packing=True, remat="selective", gather=LAYER),
    case("listed", ONE, 2, 4, layers=6, fsdp=2, expert=2, dropout=0.3),
    case("listed", ALL, 2, 4, layers=6, tensor=2, packing=True, remat="selective", gather=LAYER),
    case("latent", ZERO, 2, 4, layers=4, tensor=2, remat="selective"),
    case("latent", TWO, 2, 4, 2, fsdp=2, accum=2, gather=LAYER),
    case("qwen3_next", ONE, 2, 4, layers=6, fsdp=2, expert=2, packing=True),
    case("qwen3_next", TWO, 2, 4, 2, layers=8, tensor=2, accum=2, gather=LAYER),
    case("delta_dense", ZERO, 2, 4, layers=9, tensor=2, remat="selective"),
    case("delta_dense", ALL, 2, 2, layers=6, fsdp=2, context=2, packing=True),
    case("mamba2", ONE, 4, 4, layers=6, fsdp=2, packing=True),
    case("mamba2", ZERO, 2, 4, layers=3, tensor=2, remat="selective"),
    case("hybrid", TWO, 2, 4, 2, layers=12, fsdp=2, context=2, packing=True),
    case("gpt_oss", ONE, 2, 4, layers=6, expert=2, tensor=2, packing=True),
    case("gpt_oss", ZERO, 2, 4, layers=4, tensor=2, remat="selective"),
    case("gpt_oss", TWO, 2, 4, 2, fsdp=2, accum=2, gather=LAYER),
]
"""Pipelines of decoders with other norms, rotations and sums, in docs/huggingface.md."""
ENCODERS: list[Case] = [
    case("bert_pairs", ONE, 2, 4, layers=5, fsdp=2, tensor=2, dropout=0.3),
    case("bert", TWO, 2, 4, 2, layers=7, data=2, packing=True, accum=2),
    case("bert", ZERO, 4, 8, layers=6, remat="full", loops="static"),
    case("bert", ALL, 4, 4, tensor=2, context_method="all_gather", remat="selective"),
    case("modernbert", ONE, 4, 4, fsdp=2, packing=True),
    case("modernbert", TWO, 2, 4, 2, tensor=2, remat="full"),
    case("modernbert", ONE, 2, 4, fsdp=2, context=2, context_method="all_gather", gather=LAYER),
    case("bert_labels", ONE, 2, 4, layers=5, fsdp=2, tensor=2),
    case("modernbert_labels", ONE, 2, 4, layers=4, fsdp=2, tensor=2),
    case("encoder_experts", ONE, 2, 4, layers=6, fsdp=2, expert=2, packing=True),
    # The last group of layers has one or two of three.
    case("modernbert_cut", ONE, 2, 4, layers=8, fsdp=2, dropout=0.3),
    case("modernbert_cut", TWO, 2, 4, 2, layers=10, tensor=2, remat="selective"),
    case("modernbert_cut", ZERO, 2, 4, layers=4, fsdp=2, remat="full", gather=LAYER),
]
"""Pipelines of encoders, in docs/encoders.md. The first one is quick."""
DIFFUSION: list[Case] = [
    case("dit_experts", ONE, 2, 4, layers=5, fsdp=2, expert=2, remat="selective"),
    case("dit", ONE, 4, 4, layers=6, data=2, accum=2),
    case("dit", TWO, 2, 4, 2, layers=7, fsdp=2, tensor=2),
    case("dit", ALL, 2, 4, tensor=2, context=2, context_method="all_gather"),
    case("dit_experts", TWO, 2, 4, 2, data=2, tensor=2, remat="full"),
    case("dit", ZERO, 2, 4, layers=5, fsdp=2, tensor=2, remat="selective"),
    case("dit_experts", H1, 2, 4, layers=4, expert=2, gather=LAYER),
    case("dit_text", ONE, 2, 4, layers=5, fsdp=2, tensor=2, remat="selective"),
    case("dit_text", ALL, 2, 4, layers=4, data=2, expert=2),
]
"""Pipelines of diffusion transformers, in docs/diffusion.md. None is quick: a mesh of theirs is."""
PAIRS: list[Case] = [
    case("t5", ONE, 2, 4, layers=3, fsdp=2, tensor=2, dropout=0.3),
    case("t5", ONE, 4, 8, layers=5, data=2),
    case("t5", TWO, 2, 4, 2, layers=5, tensor=2, accum=2),
    case("t5", ALL, 2, 4, layers=4, tensor=2, context=2, context_method="all_gather"),
    case("t5_1_1", ONE, 2, 2, layers=4, fsdp=4, remat="full", gather=LAYER),
    case("t5_1_1", TWO, 2, 4, 2, layers=6, data=2, tensor=2, remat="selective"),
    case("t5_gates", ONE, 2, 4, layers=3, fsdp=2, expert=2),
    case("t5_gates", ALL, 2, 4, expert=2, tensor=2, remat="selective"),
    case("t5_softmax", ONE, 2, 4, layers=2, expert=2, tensor=2),
    case("switch_2", ONE, 2, 4, layers=4, fsdp=2, expert=2),
    case("lora_t5", ONE, 2, 4, layers=3, fsdp=2, tensor=2),
]
"""Pipelines of encoder-decoders, in docs/encoder_decoders.md. All commits run the first one."""
BRANCHES: list[Case] = [
    case("branches", ONE, 2, 4, layers=5, fsdp=2, tensor=2, dropout=0.3),
    case("branches", ONE, 2, 2, layers=4, data=2, packing=True),
    case("deep_branches", TWO, 2, 4, 2, layers=8, tensor=2, accum=2),
    case("deep_branches", ALL, 2, 4, layers=5, tensor=2, context=2, context_method="all_gather"),
    case("branches", ONE, 2, 2, layers=4, fsdp=4, remat="full", gather=LAYER),
    case("deep_branches", ONE, 4, 8, layers=9, data=2, remat="selective"),
]
"""Pipelines of a trunk with two branches, in docs/branches.md."""
CONTRASTIVE: list[Case] = [
    case("coca", ONE, 2, 4, layers=3, fsdp=2, tensor=2, dropout=0.3),
    case("clip", ONE, 4, 8, layers=5, data=2, remat="selective"),
    case("coca", TWO, 2, 4, 2, layers=5, tensor=2, accum=2),
    case("coca", ALL, 2, 4, layers=4, tensor=2, context=2, context_method="all_gather"),
    case("clip", TWO, 2, 4, 2, layers=4, data=2, fsdp=2, accum=2),
    case("coca", ONE, 2, 2, layers=2, fsdp=4, remat="full", gather=LAYER),
    case("clip", ALL, 4, 4, layers=4, tensor=2, sequence_parallel=False),
]
"""Pipelines of contrastive models, in docs/contrastive.md. None is quick: a mesh of theirs with accumulation is."""
APART = [*STATIC, *ZERO_BUBBLE, *SHARDED, *NEAR, *ENCODERS, *DIFFUSION, *PAIRS, *BRANCHES, *CONTRASTIVE]
OTHER = os.environ.get("JAXSTACK_TEST_SCHEDULE", "")


def under(case: Case, schedule: str) -> Case:
    """Returns a case under another schedule. Only interleaved ones have several chunks; `zb_h1` takes no ring."""
    family, mesh, how = case
    if schedule == "zb_h1" and mesh.get("context", 1) > 1:
        mesh = mesh | {"context_method": "all_gather"}
    return family, mesh, how | {"schedule": schedule, "chunks": 1 if schedule == "zb_h1" else how["chunks"]}


if OTHER:
    CASES = [under(c, OTHER) for c in CASES]
    QUICK = CASES[: len(QUICK)]
FAST = [*QUICK[:2], ZERO_BUBBLE[0]]
ALWAYS = [*FAST, *QUICK, STATIC[0], SHARDED[0], ENCODERS[0], PAIRS[0]]


def name_of(case: Case) -> str:
    family, mesh, how = case
    words = [family, *(f"{k}={v}" for k, v in (mesh | how).items())]
    return " ".join(words).replace("=True", "").replace("sequence_parallel=False", "-sp")


def config(family: str, mesh: dict[str, Any], *, layers: int = 8, batch: int = meshes.BATCH, schedule: str = ONE,
           microbatches: int | None = None, chunks: int = 1, loops: Any = "auto", gather: Any = "once",
           split: tuple[str, ...] = (".*",), **how: Any) -> Config:  # fmt: skip
    cfg = meshes.config(family, mesh, **how)
    depths: dict[str, Any] = {"num_layers": layers}
    if cfg.model.family in ("encoder_decoder", "contrastive"):  # stacks of other depths
        depths["encoder_layers"] = layers + cfg.model.moe.layers.every
    if cfg.model.contrastive.caption_layers:
        depths["contrastive"] = dataclasses.replace(cfg.model.contrastive, caption_layers=max(layers - 1, 2))
    if cfg.model.family == "branches":
        depths["branches"] = dataclasses.replace(cfg.model.branches, layers=layers // 2)
    pipelined = PipelineConfig(schedule, microbatches, chunks, loops=loops, gather=gather, split=split)
    return dataclasses.replace(
        cfg,
        model=dataclasses.replace(cfg.model, **depths),
        data=dataclasses.replace(cfg.data, batch_size=batch),
        pipeline=pipelined,
    )


@functools.cache
def on_one_device(family: str, how: tuple[tuple[str, Any], ...], seed: int) -> Any:
    return meshes.gradients(config(family, {}, **dict(how)), seed)


def compare(case: Case, seed: int) -> tuple[float, float]:
    """Does what `meshes.compare` does, for pipelines."""
    family, mesh, how = case
    plain = tuple((k, v) for k, v in how.items() if k in ("packing", "dropout", "layers", "batch"))
    return meshes.errors(
        family, on_one_device(family, plain, seed), meshes.gradients(config(family, mesh, **how), seed)
    )


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=name_of(c), marks=() if c in FAST else meshes.SLOW if c in ALWAYS else meshes.MATRIX)
        for c in [*CASES, *APART]
    ],
)
def test_every_pipeline_gives_the_loss_and_gradients_of_one_device(case, seed):
    loss, gradient = compare(case, seed)
    # float32 sums in another order; a unit that is missing, doubled or misplaced is of the order of one.
    assert loss < 1e-5
    assert gradient < 1e-5


@pytest.mark.skipif(OTHER != "", reason="cases do not keep their own schedules")
@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_family_has_six_pipelines_that_vary_what_it_can(family):
    cases = [*{name_of(c): c for c in [*CASES, *APART] if meshes.MODELS[c[0]].family == family}.values()]
    assert len(cases) >= 6
    one_stack = family in ("decoder", "encoder", "diffusion")  # zero-bubble schedules are for these
    assert {how["schedule"] for _, _, how in cases} >= {ALL, ONE, TWO} | ({ZERO} if one_stack else set())
    assert {mesh["pipe"] for _, mesh, _ in cases} >= {2, 4}
    assert meshes.varied(cases) >= meshes.VARIED - meshes.UNUSED.get(family, set())


def by_autodiff(cfg: Config, ctx: Context) -> Any:
    """Computes `make_gradients` by autodiff through `pipeline.forward`, which is GPipe without a table."""

    def work(values: Any, batch: Any) -> Any:
        objective = assemble.objective_of(cfg.model)
        totals = objective.totals(batch, ctx)
        tokens = totals.weights[cfg.model.objective.terms[0].name]

        def full(values: Any) -> Any:
            hidden, aux = families.of(cfg.model).hidden_states(cfg.model, values, batch, ctx)
            total = objective.total(objective.shares(objective.loss(cfg.model, values, hidden, batch, ctx), totals))
            return total + objective.extras.loss(aux, totals.counts, None), (total, aux)

        (_, (loss, aux)), grads = jax.value_and_grad(full, has_aux=True)(values)
        loss, aux = jax.tree.map(lambda x: collectives.all_reduce(x, ctx.layout.token_axes), (loss, aux))
        counted = objective.extras.totals(totals.counts)
        return loss, grads, {"tokens": tokens, **aux, **counted}

    where, whole = ctx.layout.parameters(families.spec(cfg.model)), PartitionSpec()
    mapped = ctx.layout.local(work, (where, ctx.layout.batch), (whole, where, whole))
    return lambda values, batch, key: mapped(values, batch)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "case",
    [
        case("gpt2", ALL, 2, 4, layers=7, tensor=2),
        case("gemma2", ALL, 4, 4, data=2, remat="selective"),
        case("llama3", TWO, 2, 4, 2, layers=6, fsdp=2),
        case("sigmoid", ALL, 2, 4, expert=2, packing=True),
        case("t5", TWO, 2, 4, 2, layers=4, fsdp=2),
        case("branches", ALL, 2, 4, layers=5, data=2),
    ],
    ids=name_of,
)
def test_the_table_gives_what_autodiff_does(case, seed):
    family, mesh, how = case
    cfg = config(family, mesh, **how)
    loss, gradient = meshes.errors(family, meshes.gradients(cfg, seed, by_autodiff), meshes.gradients(cfg, seed))
    assert loss < 1e-5
    assert gradient < 1e-5


@functools.cache  # the reference is the same for all
def objective_of(
    accum: int, stages: int, microbatches: int, seed: int, schedule: str = ONE
) -> tuple[float, float, float]:
    """Returns loss, auxiliary loss and gradient norm of a mixture of experts."""
    mesh = {"pipe": stages} if stages > 1 else {}
    cfg = config("softmax", mesh, microbatches=microbatches, accum=accum, layers=4, schedule=schedule)
    sums, grads, _ = meshes.gradients(cfg, seed)
    balance = float(sums["balance_loss"].sum())
    return (
        float(sums["loss"]),
        balance,
        math.sqrt(sum(float(np.square(g, dtype=np.float64).sum()) for g in grads.values())),
    )


SPLITS = [(2, 1, 2), (1, 2, 8), (1, 4, 4), (2, 2, 4), (2, 4, 2)]
"""Accumulation, stages and microbatches."""


@pytest.mark.matrix
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_auxiliary_loss_and_gradient_norm_know_no_microbatches(split, seed):
    """Statistics that were means over a microbatch, or that included bubbles, would differ in the second digit."""
    np.testing.assert_allclose(objective_of(*split, seed), objective_of(1, 1, 1, seed), rtol=1e-6)
    other = {(1, 4, 4): ZERO, (1, 2, 8): H1}.get(split)
    if other:
        np.testing.assert_allclose(objective_of(*split, seed, other), objective_of(1, 1, 1, seed), rtol=1e-6)


TRAFFIC: list[Case] = [
    case("llama3", ONE, 2, 4, layers=5, fsdp=2, tensor=2, remat="selective"),
    case("llama3", TWO, 2, 4, 2, data=2, tensor=2, sequence_parallel=False),
    case("gpt2", ALL, 2, 2, layers=2, data=2, fsdp=2),
    case("gpt2", ALL, 4, 4, tensor=2, accum=2),
    case("softmax", ONE, 2, 4, expert=2, tensor=2, remat="selective"),
    case("llama3", TWO, 2, 4, 2, layers=7, tensor=2, loops="static"),
    case("gpt2", ONE, 4, 4, layers=5, sequence_parallel=False, tensor=2, loops="static"),
    case("llama3", ZERO, 2, 4, layers=5, fsdp=2, tensor=2, remat="full"),
    case("llama3", ONE, 2, 4, layers=5, fsdp=2, tensor=2, remat="selective", gather=LAYER),
    case("gpt2", TWO, 2, 4, 2, layers=8, data=2, fsdp=2, gather=LAYER),
    case("llama3", ZERO, 2, 4, layers=5, fsdp=2, tensor=2, remat="full", gather=LAYER),
    case("llama3", H1, 2, 4, layers=5, fsdp=2, tensor=2, remat="full", gather=LAYER),
]
"""Pipelines whose compiled programs are read."""


def traffic_cases(*quick: int) -> Any:
    marks = [() if i in quick else pytest.mark.matrix for i in range(len(TRAFFIC))]
    return pytest.mark.parametrize(
        "case", [pytest.param(c, id=name_of(c), marks=m) for c, m in zip(TRAFFIC, marks, strict=True)]
    )


@functools.cache
def moved(name: str) -> tuple[Config, Context, list[hlo.Collective]]:
    """Returns configuration, context and collectives of loss and gradients of a case in `TRAFFIC`."""
    family, mesh, how = next(c for c in TRAFFIC if name_of(c) == name)
    cfg = config(family, mesh, **how)
    devices = jax.devices()[: math.prod(cfg.mesh.sizes.values())]
    ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.data.batch_size // cfg.train.grad_accum, devices))
    values = abstract_state(Recipe.of(cfg), ctx).params
    shape, where = (cfg.data.batch_size, cfg.data.seq_len), ctx.layout.sharding(ctx.layout.batch)
    kinds = {"tokens": jnp.int32, "targets": jnp.int32, "loss_weights": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct(shape, kind, sharding=where) for name, kind in kinds.items()}
    placed = jax.tree.map(lambda leaf: leaf.sharding, values)
    run = jax.jit(make_gradients(cfg, ctx), out_shardings=(None, placed, None))
    return (
        cfg,
        ctx,
        hlo.collectives(run.lower(values, batch).compile().as_text(), ctx.layout.mesh.shape, ctx.layout.trip_counts),
    )


@pytest.mark.matrix(quick=["remat=selective", "-sp", "gpt2"])
@traffic_cases(0, 1, 2, 5)
def test_everything_that_stages_exchange_in_the_loop(case):
    """Each tick makes two permutes. For each microbatch the head's input and its gradient are all-reduced, the
    embedding is gathered and its gradient is scattered; tied embeddings are all-reduced in both passes. The list is
    complete, and it has no entry for the ticks of the bubble. With static loops, the embedding and its gradient run
    in every tick of a run, and ticks without units of a direction send nothing."""
    cfg, ctx, found = moved(name_of(case))
    plan, tensor, between = (
        ctx.layout.pipeline.schedule,
        cfg.mesh.tensor,
        cfg.mesh.tensor > 1 and cfg.mesh.sequence_parallel,
    )
    rows = cfg.data.batch_size // cfg.train.grad_accum // ctx.layout.replicas // plan.microbatches
    length, width = cfg.data.seq_len, cfg.model.d_model
    stream, numbers = (rows, length // tensor if between else length, width), (rows, length)
    summed = ("pipe", "tensor") if tensor > 1 and not between else ("pipe",)  # with the sum over `tensor`, where one is
    scattered = (cfg.mesh.pipe, *stream[:2], width // cfg.mesh.pipe)
    tied, static, accum = cfg.model.tied_embeddings, ctx.layout.pipeline.static, cfg.train.grad_accum
    turns = ctx.layout.pipeline.turns
    embeds, embed_grads, sends = plan.microbatches, plan.microbatches, 2 * plan.ticks
    if static:
        embeds, embed_grads = (int(trips_T.sum()) for trips_T in (turns.embed, turns.embed_grad))
        # In each direction there are V M + P - 1 ticks with units. Nothing reads what the last one sends; XLA drops it
        # if its tick is not in a loop.
        alone = []  # for each tick, whether it is not in a loop
        for phase in ctx.layout.pipeline.phases:
            alone += [phase.repeats * n == 1 for _, n in phase.runs for _ in range(n)] * phase.repeats
        dropped = sum(alone[np.flatnonzero(trips_T)[-1]] for trips_T in (turns.forward, turns.backward))
        sends = 2 * (plan.chunks * plan.microbatches + cfg.mesh.pipe - 1) - dropped
    expected: Counter[Any] = Counter()
    for runs, one in [
        (plan.microbatches, ("all-reduce", ("pipe",), stream)),  # the head's input
        (plan.microbatches, ("all-reduce", summed, stream)),  # its gradient
        # Maxima, sums and targets.
        (3 * plan.microbatches, ("all-reduce", ("pipe", "tensor") if tensor > 1 else ("pipe",), numbers)),
        (embeds, ("all-reduce", summed, stream) if tied else ("all-gather", ("pipe",), stream)),
        (embed_grads, ("all-reduce", ("pipe",), stream) if tied else ("reduce-scatter", ("pipe",), scattered)),
        (sends, ("collective-permute", ("pipe",), stream)),
    ]:
        expected[*one, "f32"] += accum * runs
    found = [c for c in found if c.shape]  # without a scalar a layer: how many rounds the exchange with experts makes
    along = [c for c in found if "pipe" in c.axes]
    counted: Counter[Any] = Counter()
    for c in along:
        if c.times > accum or (static and math.prod(c.shape) >= math.prod(numbers)):
            counted[c.kind, c.axes, c.shape, c.dtype] += int(c.times)
    assert counted == expected
    # After the loop the stages exchange routing's statistics, and nothing as large as an activation.
    assert static or all(math.prod(c.shape) < math.prod(stream) / 4 for c in along if c.times == accum)
    # Weights are gathered before the loop, gradients are scattered after it, unless units do so; sums are after it.
    once = ("all-reduce",) if ctx.layout.gather == "layer" else hlo.KINDS
    assert all(c.times == accum for c in found if {"data", "fsdp"} & set(c.axes) and c.kind in once)
    assert {c.kind for c in found if "fsdp" in c.axes} <= {"all-gather", "reduce-scatter", "all-reduce"}


@traffic_cases(0, 5)
def test_bytes_along_each_axis_are_what_the_formula_says(case):
    cfg, ctx, found = moved(name_of(case))
    measured, predicted = hlo.sent(found), hlo.sent(estimate.traffic(Job(cfg, ctx)))
    print(hlo.format_traffic(found, estimate.traffic(Job(cfg, ctx))))
    whole = sum(measured.values())
    assert {kind for kind, sent in measured.items() if sent > 0.01 * whole} <= set(predicted)
    for kind, sent in predicted.items():
        # What the formula leaves out are scalars, and statistics of routing.
        np.testing.assert_allclose(measured[kind], sent, rtol=0.02, atol=0.002 * whole, err_msg=str(kind))


# Stages and their layers.


def test_rows_hold_every_layer_once():
    for layers, stages, period, longest in [
        ((2, 2, 2, 1), 4, 1, 2),
        ((3, 1, 2, 2), 2, 1, 3),
        ((4, 2, 2, 2), 2, 2, 4),
        ((5,), 1, 1, 5),
        ((6, 4), 2, 3, 6),  # the last group has one layer of three
        ((3, 2), 2, 3, 3),
        ((4,), 1, 3, 6),
    ]:
        placed = Stages(stages, layers, period)
        L = sum(layers)
        assert sorted(placed.layer_of_slot[placed.layer_of_slot >= 0]) == list(range(L))
        assert (placed.layer_of_slot[placed.slot_of_layer] == np.arange(L)).all()
        assert len(placed.layer_of_slot) == len(layers) * longest
        starts = np.concatenate([[0], np.cumsum(layers)])
        for g, (start, count) in enumerate(zip(starts, layers, strict=False)):
            rows = placed.layer_of_slot.reshape(stages, placed.chunks, longest)[g % stages, g // stages]
            assert rows.tolist() == [*range(start, start + count), *[-1] * (longest - count)]
        assert (placed.group_of_slot * period == placed.layer_of_slot[::period])[placed.group_of_slot >= 0].all()
        assert sum(placed.groups) == (placed.group_of_slot >= 0).sum() == -(-L // period)
        assert placed.max_groups * period == longest
    assert Stages(4, (2, 2, 2, 2)).is_layer_order
    assert not Stages(2, (2, 2, 2, 2)).is_layer_order
    assert not Stages(2, (2, 1)).is_layer_order
    assert str(Stages(2, (2, 2, 1, 1))) == "0-1+4 | 2-3+5"


@pytest.mark.parametrize(
    "schedule",
    [gpipe(4, 6), one_f_one_b(4, 8), interleaved_one_f_one_b(2, 6, 3), zb1(4, 8), zb1(2, 6, 3), zb_h1(4, 8)],
    ids=lambda schedule: f"{schedule.name} {schedule.chunks}",
)
def test_idle_stages_write_where_nobody_waits(schedule):
    program = Program(schedule, Stages(schedule.stages, (1,) * schedule.model_chunks))
    holds: dict[tuple[int, int], Any] = {}
    pairs: dict[tuple[int, int], Any] = {}
    for tick, stage in itertools.product(range(schedule.ticks), range(schedule.stages)):
        forward, backward = program.forward, program.backward
        runs_alone = bool(program.mixed_T[tick])  # then a stage without a unit computes nothing
        if forward.active_TP[tick, stage] or (forward.groups_T[tick] and not runs_alone):
            place = stage, int(forward.slot_TP[tick, stage])
            assert holds.get(place) is None
            assert place[1] < program.slots
            if forward.active_TP[tick, stage]:
                holds[place] = forward.microbatch_TP[tick, stage], forward.chunk_TP[tick, stage]
        if backward.active_TP[tick, stage]:
            place = stage, int(backward.slot_TP[tick, stage])
            assert holds.pop(place) == (backward.microbatch_TP[tick, stage], backward.chunk_TP[tick, stage])
        if program.weight is None:
            continue
        weight = program.weight

        def take_pairs(lane: int, at=(tick, stage), weight=weight) -> None:
            if weight.active_TP[lane, *at]:
                place = at[1], int(weight.slot_TP[lane, *at])
                assert pairs.pop(place) == (weight.microbatch_TP[lane, *at], weight.chunk_TP[lane, *at])

        take_pairs(FORWARD)  # before the backward unit of the tick stores its pairs
        if backward.active_TP[tick, stage] or (backward.groups_T[tick] and not runs_alone):
            place = stage, int(program.schedule.pair_slot_TP[tick, stage])
            assert pairs.get(place) is None
            assert place[1] < program.pair_slots
            if backward.active_TP[tick, stage]:
                pairs[place] = backward.microbatch_TP[tick, stage], backward.chunk_TP[tick, stage]
        take_pairs(BACKWARD)
        take_pairs(WEIGHT)
    assert not holds
    assert not pairs
    assert program.pair_slots <= schedule.pair_slots + 1
    assert program.slots <= schedule.slots + 1


def test_the_bubble_of_uneven_stages_is_that_of_the_longest():
    even, uneven = (Program(one_f_one_b(2, 8), Stages(2, layers)) for layers in ((3, 3), (4, 2)))
    assert math.isclose(even.bubble, 1 / 8)
    assert math.isclose(uneven.bubble, (8 * 4 + 2) / (8 * 3) - 1)
    assert math.isclose(even.bubble, even.schedule.simulate().bubble)


@pytest.mark.parametrize(
    ("how", "pipe", "words"),
    [
        (
            {"layers": 4},
            8,
            "mesh.pipe=8 x pipeline.chunks=1 makes 8 model chunks, but model.num_layers=4 .* Use mesh.pipe=4",
        ),
        (
            {"layers": 6, "schedule": TWO, "chunks": 4},
            2,
            "8 model chunks.* 6 layers.* mesh.pipe=1, or pipeline.chunks=3",
        ),
        ({"family": "gemma2", "layers": 6}, 4, "3 groups of 2 layers .model.windows.* Use mesh.pipe=3"),
        ({"family": "switch_2", "layers": 4}, 4, "encoder of .* has only 3 groups of 2 layers. Use mesh.pipe=3"),
        ({"family": "t5", "layers": 2}, 4, "mesh.pipe=4 .* each stack, but the encoder of .* has only 3 .*mesh.pipe=3"),
        (
            {"family": "t5", "schedule": ZERO},
            2,
            "pipeline.schedule=zb1 is for .* 2 .encoder, decoder.. Use .*=gpipe or",
        ),
        ({"family": "t5", "loops": "static"}, 2, "pipeline.loops=static is for .*. Use pipeline.loops=auto or"),
        (
            {"family": "t5", "microbatches": 1},
            2,
            "microbatches=1 .* groups of mesh.pipe=2 .2 model chunks.*. Use 2 or 4",
        ),
        ({"microbatches": 3}, 2, "microbatches=3 does not divide the 8 sequences of a replica. Use 2 or 4"),
        ({"microbatches": 16}, 2, "microbatches=16 does not divide the 8 .* Use 4 or 8"),
        (
            {"schedule": TWO, "chunks": 2, "microbatches": 2},
            4,
            "microbatches=2 .* in groups of mesh.pipe=4 .*. Use 4 or 8",
        ),
        (
            {"schedule": TWO, "chunks": 2, "batch": 6},
            4,
            "microbatches=null .* 6 sequences .* No number does: use another",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_one_line_before_anything_compiles(how, pipe, words):
    how = dict(how)
    cfg = config(how.pop("family", "llama3"), {"pipe": pipe}, **how)
    with pytest.raises(ScheduleError, match=words) as caught:
        make_context(cfg, make_mesh(cfg.mesh, cfg.data.batch_size, jax.devices()[:pipe]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("schedule", [gpipe(2, 6, 3), interleaved_one_f_one_b(2, 6, 3), gpipe(4, 8, 3)], ids=str)
def test_units_of_each_stack_have_slots_of_their_own(schedule):
    """No unit is overwritten while it waits, and every unit enters its stack from the unit before."""
    P, M = schedule.stages, schedule.microbatches
    program = Program(schedule, Stages(P, (2,) * P + (3,) * 2 * P, stacks=(("low", 1, 1), ("high", 2, 1))))
    low, high = program.parts
    assert [part.stages.chunks for part in program.parts] == [1, 2]
    assert [str(part.stages) for part in program.parts] == str(program.stages).replace("low ", "").split(", high ")
    for part, first in ((low, 0), (high, 1)):
        holds: dict[tuple[int, int], Any] = {}
        forward, backward = part.forward, part.backward
        for tick, stage in itertools.product(range(schedule.ticks), range(P)):
            at = tick, stage
            if forward.active_TP[at]:
                unit = forward.microbatch_TP[at], forward.chunk_TP[at]
                assert schedule.forward_MG[unit[0], (unit[1] + first) * P + stage] == tick
                assert holds.setdefault((stage, forward.slot_TP[at]), unit) == unit
                assert forward.groups_TP[at] == part.stages.max_groups
            assert forward.active_TP[at] or not forward.groups_TP[at]
            if backward.active_TP[at]:
                unit = backward.microbatch_TP[at], backward.chunk_TP[at]
                assert holds.pop((stage, backward.slot_TP[at])) == unit
        assert not holds
    assert low.enter_at_T is low.enter_grad_at_T is None
    for at_T, ticks_MG in ((high.enter_at_T, schedule.forward_MG), (high.enter_grad_at_T, schedule.backward_MG)):
        assert [np.flatnonzero(at_T == m).tolist() for m in range(M)] == ticks_MG[:, P, None].tolist()


def test_without_a_number_microbatches_are_four_a_stage_at_most():
    numbers = {}
    for pipe, batch, how in [(2, 32, {}), (4, 8, {}), (2, 6, {"schedule": TWO, "chunks": 2})]:
        cfg = config("llama3", {"pipe": pipe}, batch=batch, **how)
        program = make_context(cfg, make_mesh(cfg.mesh, batch, jax.devices()[:pipe])).layout.pipeline
        numbers[pipe, batch] = program.schedule.microbatches
    assert numbers == {(2, 32): 8, (4, 8): 8, (2, 6): 6}


@pytest.mark.matrix(quick=["'1f1b'}-adafactor"])
@pytest.mark.parametrize(
    ("how", "optim"),
    [
        ({"schedule": TWO, "chunks": 2}, "muon"),  # its state has Adam's moments too, for arrays that are not matrices
        ({"schedule": TWO, "chunks": 2}, "adamw"),
        ({"schedule": ONE}, "muon"),
        ({"schedule": ONE}, "adamw"),
        ({"schedule": ONE}, "adafactor"),
    ],
    ids=str,
)
def test_a_checkpoint_has_the_layers_in_their_order(how, optim):
    """A state is trained, converted to the layout of checkpoints and back; empty layer slots stay zero."""
    cfg = dataclasses.replace(config("llama3", {"pipe": 2}, layers=5, **how), optim=OptimConfig(name=optim))
    ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.data.batch_size, jax.devices()[:2]))
    abstract = abstract_state(Recipe.of(cfg), ctx)
    layout = checkpoint_layout(Recipe.of(cfg), ctx, abstract)
    state = make_state(Recipe.of(cfg), ctx, abstract)
    plain = config("llama3", {}, layers=5)
    plain = dataclasses.replace(plain, optim=cfg.optim)
    whole = make_context(plain, make_mesh(plain.mesh, plain.data.batch_size, jax.devices()[:1]))
    reference = make_state(Recipe.of(plain), whole, abstract_state(Recipe.of(plain), whole))
    assert_states(layout.pack(state), reference, exactly=True)

    batch = meshes.random_batch(0, False, cfg.model)
    state, _ = assemble.jit_train_step(cfg, ctx, abstract)(
        state, jax.device_put(batch, ctx.layout.sharding(ctx.layout.batch))
    )
    reference, _ = jax.jit(assemble.make_train_step(plain, whole))(reference, batch)
    packed = layout.pack(state)
    assert_states(packed, reference, exactly=False)
    assert jax.tree.map(lambda a: (a.shape, a.sharding), packed) == jax.tree.map(
        lambda a: (a.shape, a.sharding), layout.abstract
    )
    assert_states(layout.unpack(packed), state, exactly=True)
    numbers = ctx.layout.pipeline.stages.layer_of_slot
    for path, leaf in flatten(state).items():
        if "/layers/" in path and leaf.shape[:1] == numbers.shape:
            assert not np.asarray(leaf)[numbers < 0].any(), path


def test_the_gathering_of_a_stage_changes_neither_state_nor_checkpoint():
    found = []
    for gather in ("once", LAYER):
        cfg = config("gpt2", {"pipe": 2, "fsdp": 2}, layers=5, schedule=ONE, gather=gather)
        ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.data.batch_size, jax.devices()[:4]))
        state = abstract_state(Recipe.of(cfg), ctx)
        found.append([
            jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), tree)
            for tree in (state, checkpoint_layout(Recipe.of(cfg), ctx, state).abstract)
        ])  # fmt: skip
    assert found[0] == found[1]


def assert_states(a: Any, b: Any, *, exactly: bool) -> None:
    a, b = flatten(a), flatten(b)
    assert a.keys() == b.keys()
    for path, leaf in a.items():
        x, y = np.asarray(leaf, np.float64), np.asarray(b[path], np.float64)
        assert x.shape == y.shape, path
        # After a step: what a first update of Adam or Muon makes of gradients that differ by rounding.
        assert np.linalg.norm(x - y) <= (0 if exactly else 1e-3 * np.linalg.norm(y)), path


# `value_and_grad` of any functions.


def mesh_of(pipe: int, data: int, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((data, pipe), ("d", "stage"), axis_types=(kind,) * 2, devices=jax.devices()[: pipe * data])


def strangers(rng: np.random.Generator, layers: int) -> tuple[Any, Any, Any, Any, Any, Any]:
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 3, jnp.float32)  # noqa: E731
    stacked = {"w": draw(layers, 8, 16), "v": draw(layers, 16, 8), "g": draw(layers, 8) + 1}
    shared = {"in": draw(5, 8), "out": draw(8)}
    batch = {"x": draw(24, 5), "y": draw(24)}

    def layer(w, x):
        return x + product(jnp.matmul, jnp.tanh(product(jnp.matmul, x, w["w"])), w["v"]) * w["g"]

    def first(shared, batch):
        return batch["x"] @ shared["in"]

    def last(shared, x, batch):
        return jnp.square(x @ shared["out"] - batch["y"]).mean()

    return stacked, shared, batch, layer, first, last


@pytest.mark.parametrize(
    ("schedule", "data", "layers", "kind"),
    [
        (one_f_one_b(4, 6), 2, None, AxisType.Auto),
        (gpipe(2, 3), 4, None, AxisType.Auto),
        (interleaved_one_f_one_b(2, 4, 2), 2, (1, 3, 2, 1), AxisType.Explicit),
        (one_f_one_b(4, 4), 1, (1, 2, 3, 1), AxisType.Auto),
        (zb1(2, 4, 2), 2, (1, 3, 2, 1), AxisType.Explicit),
        (zb_h1(4, 8), 1, (1, 2, 3, 1), AxisType.Auto),
    ],
    ids=str,
)
def test_anyones_functions_in_a_pipeline(schedule, data, layers, kind, rng):
    stacked, shared, batch, layer, first, last = strangers(rng, 7)
    mesh = mesh_of(schedule.stages, data, kind)
    run = pipeline.value_and_grad(
        jax.checkpoint(layer) if data == 2 else layer,
        first,
        last,
        schedule=schedule,
        mesh=mesh,
        axis="stage",
        batch_axes="d",
        layers=layers,
    )
    rows = jax.device_put(batch, jax.NamedSharding(mesh, jax.P("d")))
    wide = stacked | {"w": jax.device_put(stacked["w"], jax.NamedSharding(mesh, jax.P(None, None, "stage")))}
    loss, grads = jax.jit(run)(shared, wide, rows)
    if kind == AxisType.Explicit:  # as the gradients of `jax.grad`
        assert grads[1]["w"].sharding.spec == wide["w"].sharding.spec
    expected, expected_grads = on_one(layer, first, last)(shared, stacked, batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert a.dtype == jnp.float32
        assert jnp.linalg.norm(a - b) <= 1e-5 * jnp.linalg.norm(b)


def on_one(layer: Any, first: Any, last: Any) -> Any:
    """Returns loss and gradients of these functions on one device, by autodiff."""

    def plain(shared, stacked, batch):
        x = first(shared, batch)
        for i in range(len(jax.tree.leaves(stacked)[0])):
            x = layer(jax.tree.map(lambda a, i=i: a[i], stacked), x)
        return last(shared, x, batch)

    return jax.value_and_grad(plain, argnums=(0, 1))


@pytest.mark.parametrize(
    "schedule", [zb1(2, 4), pytest.param(zb_h1(2, 4), marks=pytest.mark.matrix)], ids=lambda schedule: schedule.name
)
def test_anyones_gradients_in_bfloat16_are_near_those_in_float32(schedule, rng):
    """Each product rounds to 8 bits (0.4%). The pipeline rounds as often as one device, and sums in float32."""
    stacked, shared, batch, *functions = strangers(rng, 4)
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (shared, stacked, batch))
    run = pipeline.value_and_grad(*functions, schedule=schedule, mesh=mesh_of(2, 1), axis="stage")
    plain = jax.jit(on_one(*functions))
    exact, found, rounded = (
        jax.tree.leaves(f(*values)[1])
        for f, values in (
            (plain, jax.tree.map(lambda a: a.astype(jnp.float32), half)),
            (jax.jit(run), half),
            (plain, half),
        )
    )
    ours, theirs = (
        max(float(jnp.linalg.norm(a - g) / jnp.linalg.norm(g)) for a, g in zip(grads, exact, strict=True))
        for grads in (found, rounded)
    )
    assert ours <= 2 * theirs <= 0.1


@pytest.mark.parametrize("remat", [False, True], ids=["saved", "recomputed"])
def test_weight_units_compute_the_gradients_of_anyones_products(remat, rng):
    """They move from the backward units to the weight units. Counts the matmuls of the compiled programs."""
    stacked, shared, batch, layer, first, last = strangers(rng, 4)
    counted = {}
    for schedule in (one_f_one_b(2, 4), zb1(2, 4)):
        run = pipeline.value_and_grad(
            jax.checkpoint(layer) if remat else layer, first, last, schedule=schedule, mesh=mesh_of(2, 1), axis="stage"
        )
        text = jax.jit(run).lower(shared, stacked, batch).compile().as_text()
        scopes = re.findall(r" dot\(.*op_name=\"[^\"]*(pipeline_\w+)/", text)
        counted[schedule.name] = Counter(scopes)
    print(counted)
    assert counted["zb1"]["pipeline_weight"] == 2
    assert counted["zb1"]["pipeline_backward"] == counted["1f1b"]["pipeline_backward"] - 2
    assert counted["zb1"].total() == counted["1f1b"].total()


UNUSUAL = {
    "plain": True,
    "cast": True,
    "scaled": True,
    "array": False,
    "twice": False,
    "changed": False,
    "summed": False,
    "batched": False,
    "columns": False,
    "repeated": False,
    "closing": False,
    "closed": False,
    "branch": False,
}
"""The weights of `unusual_layer`, and whether a weight unit can compute the gradient of each."""


def unusual_layer(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Uses weights with `product`: alone, changed, twice, in a batch, in a loop, with an array that f closes over."""
    x = x + jnp.sin(product(jnp.matmul, x, w["plain"]))
    x = x + jnp.sin(product(jnp.matmul, x, w["cast"].astype(jnp.float32)))
    x = x + jnp.sin(product(jnp.matmul, x, 0.5 * w["scaled"][...]))
    x = x + jnp.sin(x @ w["array"].T)
    x = x + jnp.sin(product(jnp.matmul, product(jnp.matmul, x, w["twice"]), w["twice"]))
    x = x + jnp.sin(product(jnp.matmul, x, jax.tree.map(lambda a: 2 * a, w["changed"])))
    x = x + jnp.sin(product(jnp.matmul, x, w["summed"])) + sum(a.sum() for a in jax.tree.leaves(w["summed"]))
    x = x + jnp.sin(jax.vmap(lambda row: product(jnp.matmul, row, w["batched"]))(x))
    x = x + jnp.sin(jax.vmap(lambda column: product(jnp.matmul, x, column), 1, 1)(w["columns"]))
    x = jax.lax.scan(lambda x, _: (x + jnp.sin(product(jnp.matmul, x, w["repeated"])), None), x, None, 2)[0]
    x = x + jnp.sin(product(lambda x, value: x @ value @ w["closed"], x, w["closing"]))
    return x + jax.lax.cond(jnp.bool_(True), lambda: product(jnp.matmul, x, w["branch"]), lambda: x)


def test_gradients_that_weight_units_cannot_compute_stay_with_backward_units(rng):
    _, shared, batch, _, first, last = strangers(rng, 2)
    stacked = {name: jnp.asarray(rng.normal(size=(2, 8, 8)) / 12, jnp.float32) for name in UNUSUAL}
    one, x = jax.tree.map(lambda a: a[0], stacked), first(shared, batch)
    assert find_weights(lambda weights: unusual_layer(weights, x), one) == UNUSUAL
    run = pipeline.value_and_grad(unusual_layer, first, last, schedule=zb1(2, 2), mesh=mesh_of(2, 1), axis="stage")
    _, (_, grads) = jax.jit(run)(shared, stacked, batch)
    _, (_, expected) = jax.jit(on_one(unusual_layer, first, last))(shared, stacked, batch)
    for name, g in expected.items():
        assert jnp.linalg.norm(g) > 0
        assert jnp.linalg.norm(grads[name] - g) <= 1e-5 * jnp.linalg.norm(g), name


def test_mistakes_of_anyones_are_named(rng):
    stacked, shared, batch, *functions = strangers(rng, 7)
    how: dict[str, Any] = {"mesh": mesh_of(4, 2), "axis": "stage", "batch_axes": ("d",)}
    with pytest.raises(ScheduleError, match=r"has no axis 'pipe'. It has d, stage"):
        pipeline.value_and_grad(*functions, schedule=gpipe(4, 2), mesh=how["mesh"])
    with pytest.raises(ScheduleError, match="2 stages, but the mesh's axis 'stage' has 4 devices"):
        pipeline.value_and_grad(*functions, schedule=gpipe(2, 2), **how)
    with pytest.raises(ScheduleError, match=r"24 rows .* 5 microbatches on 2 replicas. Use a multiple of 10"):
        pipeline.value_and_grad(*functions, schedule=gpipe(4, 5), **how)(shared, stacked, batch)
    with pytest.raises(ConfigError, match="7 layers cannot fill 8 model chunks"):
        pipeline.value_and_grad(*functions, schedule=interleaved_one_f_one_b(4, 4, 2), **how)(shared, stacked, batch)
    with pytest.raises(ScheduleError, match=r"layers=\[2, 2, 2, 2\] make 8, but `stacked` has 7"):
        pipeline.value_and_grad(*functions, schedule=gpipe(4, 2), layers=(2, 2, 2, 2), **how)(shared, stacked, batch)


def test_mistakes_in_a_call_or_in_a_function_name_the_argument(rng):
    stacked, shared, batch, layer, first, last = strangers(rng, 4)
    explicit = mesh_of(4, 2, AxisType.Explicit)
    settings: dict[str, Any] = {"schedule": gpipe(4, 3), "mesh": mesh_of(4, 2), "axis": "stage", "batch_axes": ("d",)}

    def refuses(words, functions=(layer, first, last), trees=(shared, stacked, batch), scope=None, **changes):
        with pytest.raises(ScheduleError, match=words), jax.set_mesh(scope) if scope else nullcontext():
            jax.eval_shape(pipeline.value_and_grad(*functions, **settings | changes), *trees)

    for words, changes in {
        "schedule='gpipe' is not a Schedule. Make one, such as": {"schedule": "gpipe"},
        "mesh is a tuple, not a Mesh": {"mesh": (2, 4)},
        "name an axis twice": {"batch_axes": ("d", "stage")},
        r"scope \(jax.set_mesh\) has d=2 \(explicit\), stage=4 \(explicit\), but .* stage=4 \(auto\)": {
            "scope": explicit
        },
    }.items():
        refuses(words, **changes)

    got = r"`layer` \(%s\) got x of float32\[4, 8\] and returned %s"
    narrow, half, pair = (lambda w, x: x[:, :6]), (lambda w, x: x.astype("bfloat16")), (lambda w, x: (x, None))
    order = r"in this order: layer\(weights, x\), embed\(shared, batch\), loss\(shared, x, batch\)\."
    for words, functions in {
        got % ("<lambda>", r"float32\[4, 6\], but it must return the shape and dtype of x"): (narrow, first, last),
        got % ("<lambda>", r"bfloat16\[4, 8\].*\. Cast its result with .astype"): (half, first, last),
        got % ("<lambda>", r"0 float32\[4, 8\]"): (pair, first, last),
        r"`embed` \(layer\) failed as embed\(shared, batch\): KeyError: 'w'. It got shared: in float32\[5, 8\], out .*"
        rf"; batch: x float32\[4, 5\], y .*{order}": (first, layer, last),
        r"`layer` \(<lambda>\) failed as layer\(weights, x\): .*weights: g": (lambda x, w: layer(w, x), first, last),
        r"`loss` must return one number .*, not float32\[4, 8\]": (layer, first, lambda shared, x, batch: x),
        "`embed` must return one array": (layer, lambda shared, batch: batch, last),
        f"`layer` is not a function, but a dict. .*{order}": (stacked, first, last),
    }.items():
        refuses(words, functions)

    call = r"\. Call it as \(shared, stacked, batch\)"
    shorter = stacked | {"v": stacked["v"][:3]}
    for words, trees in {
        r"arrays of `stacked` must have .*, the layers, but it has stacked/in \(5, 8\), stacked/out \(8,\)" + call: (
            stacked, shared, batch,
        ),
        r"has stacked/v \(3, 16, 8\), stacked/g \(4, 8\)": (shared, shorter, batch),
        r"arrays of `batch` must have .*, the rows, but it has batch/x \(24, 5\), batch/y \(20,\)" + call: (
            shared, stacked, batch | {"y": batch["y"][:20]},
        ),
        "`stacked` must have .* no array": (shared, {}, batch),
        r"the rows, but it has batch \(\)": (shared, stacked, batch["y"][0]),
        "shared/n has the dtype int32, for which there is no gradient. .*nnx.Param": (
            shared | {"n": jnp.zeros((), jnp.int32)}, stacked, batch,
        ),
    }.items():  # fmt: skip
        refuses(words, trees=trees)
    plain, mixed = (lambda w, x: x + jnp.tanh(x @ w["w"]) @ w["v"]), (lambda w, x: layer(w, x) + w["w"][0, 0])
    where = {"schedule": zb1(4, 3)}
    refuses(r"zb1 has weight units, but `layer` \(<lambda>\) .*product\(jnp.matmul", (plain, first, last), **where)
    refuses(r"the layer gives w to .*: it is indexed by \(0, 0\). Use", (mixed, first, last), **where)
    with pytest.raises(ScheduleError, match="shared/name is a str, not an array" + call):
        pipeline.value_and_grad(layer, first, last, **settings)(shared | {"name": "x"}, stacked, batch)


def table(seed: int | None = None) -> str:
    """Returns the table of the documents, as `meshes.table` does."""
    columns = ["model", "layers", "schedule", "stages", "chunks", "microbatches", "other axes and settings"]
    columns += [] if seed is None else ["loss", "worst gradient"]
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for row in CASES:
        family, mesh, how = row
        apart = ("pipe", "schedule", "chunks", "microbatches", "layers", "batch")
        beside = name_of(("", {k: v for k, v in (mesh | how).items() if k not in apart}, {})).strip()
        cells = [family, how["layers"], how["schedule"], mesh["pipe"], how["chunks"], how["microbatches"], beside]
        cells += [] if seed is None else [f"{error:.0e}" for error in compare(row, seed)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
        if seed is not None:
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(0 if "--measure" in sys.argv else None))
