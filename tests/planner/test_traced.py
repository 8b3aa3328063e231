"""The walk over traced programs: against programs counted by hand, and against what XLA compiles for every family."""

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import step_memory
from families import BRANCHES, CONTRASTIVE, DIFFUSION, ENCODER_DECODERS

from jaxstack.config import Config, ConfigError, DataConfig, MeshConfig, OptimConfig, PipelineConfig, TrainConfig
from jaxstack.models import flops
from jaxstack.models.context import Context
from jaxstack.planner import estimate, figures, hlo, memory, roofline, trace, traced
from jaxstack.planner.step_time import step_time
from jaxstack.sharding import make_mesh
from jaxstack.training import step

ROWS = json.loads((Path(step_memory.__file__).parent / "results" / "step_memory_cpu.json").read_text())["cases"]
FAMILIES = ("t5", "switch", "branches", "dit", "coca", "clip")
MODELS = {
    "t5": ENCODER_DECODERS["t5"],
    "branches": BRANCHES["deep_branches"],
    "dit": DIFFUSION["dit"],
    "experts": DIFFUSION["dit_experts"],
    "coca": CONTRASTIVE["coca"],
}


def of_family(name: str, *, remat: str = "none", accum: int = 1, micro: int = 0, **mesh: int) -> Config:
    model = MODELS[name]
    source = {"encoder_decoder": "pairs", "branches": "stdlib"}.get(model.family, "digits")
    data = DataConfig(
        source=source, path="pairs.jsonl" if source == "pairs" else None, seq_len=32, batch_size=16,
        target_len=16 if model.family in ("encoder_decoder", "contrastive") else None,
    )  # fmt: skip
    return Config(
        model=dataclasses.replace(model, vocab_size=64),
        data=data,
        train=TrainConfig(remat=remat, grad_accum=accum),
        mesh=MeshConfig(**{"data": 1} | mesh),
        pipeline=PipelineConfig(microbatches=micro) if micro else PipelineConfig(),
    )


def walked(f, *arguments, **options) -> trace.Trace:
    jaxpr = jax.make_jaxpr(f)(*arguments).jaxpr
    labels = options.pop("labels", {})
    return trace.walk(jaxpr, [options.pop("label", "")] * len(jaxpr.invars), labels, options.pop("trips", {}), **options)


X = jax.ShapeDtypeStruct((64, 64), jnp.float32)
KIB = 1024
"""An array of this shape has 16 of them."""


@pytest.mark.parametrize(
    ("f", "arrays"),
    [
        (lambda x: x @ x, 1),  # the product
        (lambda x: jnp.exp(x) + x.T, 0),  # XLA computes it where it is read
        (lambda x: jnp.exp(x) @ x, 2),  # a matmul reads arrays: the exponential and the product
        (lambda x: jnp.exp(x @ x) @ x, 3),  # both products, and the exponential between them
        (lambda x: (x @ x) @ x, 2),  # the first product is read once
        (lambda x: (x @ x @ x @ x @ x).sum(), 2),  # of a chain, two at a time
        (lambda x: jnp.reshape(x @ x, (4096,)).reshape(64, 64) @ x, 2),  # a view has no memory
        (lambda x: jax.checkpoint(lambda y: y @ y)(x @ x), 2),  # what is called is part of the program
    ],
)
def test_arrays_that_are_alive_at_once(f, arrays):
    assert trace.total(walked(f, X).arrays) == arrays * 16 * KIB


def test_loops_stack_what_each_turn_returns_and_carry_in_place():
    def f(x):
        return jax.lax.scan(lambda c, _: ((c @ x) @ x, c @ x), x @ x, length=8)

    found = walked(f, X)
    # The carry, eight results, and in a turn two products: what it carries on, and what it returns.
    assert trace.total(found.arrays) == (1 + 8 + 2) * 16 * KIB
    assert Counter({run.primitive: 0 for run in found.runs}).keys() == {"dot_general"}
    assert [run.times for run in found.runs] == [1, 8, 8, 8]
    once = walked(lambda x: jax.lax.scan(lambda c, _: (c @ x, None), x, length=1), X)
    assert trace.total(once.arrays) == 16 * KIB  # XLA removes a loop of one turn


def test_what_a_scan_saves_for_the_backward_pass_is_labelled():
    def f(x):
        def body(c, _):
            return jnp.sin(c @ x), None

        with jax.named_scope("stack_a"):
            return jax.lax.scan(jax.checkpoint(body), x, length=4)[0].sum()

    found = walked(jax.grad(f), X, labels={"stack_a": "saved"}, results="gradients")
    saved = {array: n for array, n in found.waiting.items() if array.shape == (4, 64, 64)}
    assert sum(saved.values()) == 1  # the carry of each turn
    assert {array.label for array in found.arrays} >= {"saved", "gradients"}


def test_a_cpu_copies_parameters_for_loops():
    def f(x):
        return jax.lax.scan(lambda c, _: (c @ x, None), jnp.zeros((64, 64)), length=4)[0]

    plain, copies = (walked(f, X, label=trace.PARAMETERS, copies=flag) for flag in (False, True))
    assert trace.total(copies.arrays) - trace.total(plain.arrays) == 16 * KIB
    assert "parameters, copied for the loops" in {array.label for array in copies.arrays}


def test_a_while_loop_runs_as_often_as_its_scope_says():
    def f(x):
        with jax.named_scope("turns"):
            return jax.lax.while_loop(lambda c: c[0].sum() > 0, lambda c: (c[0] @ c[0],), (x,))

    (run,) = [run for run in walked(f, X, trips={"turns": 2.5}).runs if run.primitive == "dot_general"]
    assert run.times == 2.5


@pytest.mark.parametrize("name", MODELS)
def test_traced_flops_are_those_of_the_formula(name):
    """All matmuls that `train.remat` does not repeat, in a step of one device, with attention that computes all pairs."""
    cfg = of_family(name, remat="full")
    cfg = dataclasses.replace(cfg, kernels=dataclasses.replace(cfg.kernels, attention="xla"))
    ctx = memory.context(cfg, 1, "tpu")
    ops = traced.operations(cfg, ctx)
    found = sum(op.times * op.flops for op in ops if not op.for_remat)
    per_token = flops.flops_per_token(cfg.model, cfg.data.seq_len, cfg.data.target_length, cfg.microbatch_size)
    tokens = cfg.data.batch_size * cfg.data.seq_len
    assert found == pytest.approx(per_token.full * tokens, rel=1e-6)
    assert sum(op.flops for op in ops if op.for_remat) > 0
