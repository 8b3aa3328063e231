"""Which gradients of weights wait for weight units: the bytes and FLOPs of each choice, the limit, the idle time."""

import dataclasses
import importlib
import math

import jax
import pytest
import test_meshes as meshes

from jaxstack.config import ConfigError, PipelineConfig
from jaxstack.families.context import make_context
from jaxstack.pipeline import zb1
from jaxstack.pipeline.program import Program
from jaxstack.pipeline.stages import Stages
from jaxstack.planner import estimate, memory, step_bytes, weight_split
from jaxstack.planner.job import Job
from jaxstack.sharding import make_mesh
from jaxstack.training.assemble import make_gradients

ALL = (".*",)


def config(family="llama3", schedule="zb1", split=ALL, layers=4, remat="full", loops="static", **mesh):
    cfg = meshes.config(family, {"pipe": 2, **mesh}, remat=remat)
    pipeline = PipelineConfig(schedule=schedule, microbatches=4, split=split, loops=loops)
    model = dataclasses.replace(cfg.model, num_layers=layers)
    return dataclasses.replace(cfg, model=model, pipeline=pipeline)


def context(cfg):
    devices = jax.devices()[: math.prod(cfg.mesh.sizes.values())]
    return make_context(cfg, make_mesh(cfg.mesh, cfg.microbatch_size, devices))


def traced(cfg):
    """Returns the function that computes the gradients of a run, and its abstract arguments."""
    ctx = context(cfg)
    state, batch = estimate.abstract_inputs(Job(cfg, ctx))
    return make_gradients(cfg, ctx), state.params, batch


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "split", "mesh"),
    [
        ("llama3", ("mlp/w_up", "attention/w_[qo]"), {"fsdp": 2}),
        ("softmax", ALL, {"tensor": 2}),
        ("llama3", ALL, {"tensor": 2}),
        ("capacity", ALL, {"expert": 2}),
        ("softmax", ALL, {"expert": 2}),
        ("lora", ALL, {}),
    ],
)
def test_bytes_are_those_of_what_the_executor_stores(monkeypatch, family, split, mesh):
    cfg, stored = config(family, split=split, **mesh), []
    run = importlib.import_module("jaxstack.pipeline.execute")._Run
    initial_state = run.initial_state

    def spy(self):
        state = initial_state(self)
        (pairs,) = state.pairs  # of the only stack
        stored.append(jax.tree.leaves({i: (pair.x, pair.dy) for i, pair in pairs.items()}))
        return state

    monkeypatch.setattr(run, "initial_state", spy)
    jax.eval_shape(*traced(cfg))
    assert stored[0]
    assert estimate.split_of(Job(cfg, context(cfg))).bytes == sum(a.size * a.dtype.itemsize for a in stored[0])


def test_cheap_pairs_are_chosen_while_they_fit(monkeypatch):
    """By hand, in float32: tokens x (input + outputs) for 2 waiting units of 2 layers, FLOPs 2 x tokens x weights."""
    cfg = config(split=None)
    ctx = memory.context(cfg)
    m, tokens = cfg.model, cfg.data.seq_len * cfg.data.batch_size // 4
    D, F, Q, KV = m.d_model, m.ff_width, m.num_heads * m.head_width, m.kv_heads * m.head_width
    elements = {"w_q": D + Q + 2 * KV, "w_o": Q + D, "w_up": D + 2 * F, "w_down": F + D}
    weights = {"w_q": D * (Q + 2 * KV), "w_o": Q * D, "w_up": 2 * D * F, "w_down": F * D}
    found = {one.weights[-1].partition("/")[2]: one for one in weight_split.find_readers(Job(cfg, ctx))}
    found = {name: one for name in elements for one in found.values() if any(name in path for path in one.weights)}
    assert {name: one.bytes for name, one in found.items()} == {k: 4 * 4 * tokens * n for k, n in elements.items()}
    assert {name: one.flops for name, one in found.items()} == {k: 2 * tokens * n for k, n in weights.items()}
    order = sorted(elements, key=lambda name: elements[name] / weights[name])
    needed = 10 * sum(found[name].bytes for name in order[:2]) + 1
    split = weight_split.choose(Job(cfg, ctx), needed)
    assert split.split == tuple(found[name] for name in order[:2])
    assert split.flops_share == pytest.approx(sum(weights[n] for n in order[:2]) / sum(weights.values()))
    assert "wait: at most" in str(split).replace("do not ", "")
    assert not weight_split.choose(Job(cfg, ctx), 0).split
    smallest = min(found.values(), key=lambda one: one.bytes)  # one that fits is taken after larger ones that do not
    assert weight_split.choose(Job(cfg, ctx), 10 * smallest.bytes).split == (smallest,)


def test_memory_is_at_most_a_tenth_above_1f1b():
    cfg = config(split=None, remat="selective")
    other = config(schedule="1f1b", remat="selective")
    totals = []
    for one in (cfg, other):
        ctx = memory.context(one)
        totals.append(sum(estimate.memory(Job(one, ctx), *estimate.abstract_inputs(Job(one, ctx))).values()))
    resolved, line = estimate.resolve_split(Job(cfg, memory.context(cfg)))
    assert 1 <= totals[0] / totals[1] <= 1.1
    assert resolved.pipeline.split is not None
    assert "bubble" in line
    job = Job(other, memory.context(other))
    assert estimate.resolve_split(job) == (job, "")


@pytest.mark.matrix
@pytest.mark.parametrize("remat", ["full", "selective"])
def test_a_split_step_has_no_more_flops_than_a_fused_one(remat):
    """In the compiled programs. With static loops the fused one has more: its masked turns compute weight gradients."""
    flops = []
    for schedule in ("1f1b", "zb1"):
        f, *arguments = traced(config(schedule=schedule, layers=2, remat=remat))
        program = step_bytes.read_program(jax.jit(f).lower(*arguments).compile().as_text())
        flops.append(sum(row[2] for row in step_bytes.by_part(program).values()))
    assert 0.9 <= flops[1] / flops[0] <= 1.01


def test_uneven_stages_are_as_slow_as_the_largest():
    """By hand, with 2 stages of 3 and 1 layers and 4 microbatches: a lane takes as long as the longest unit in it."""
    program = Program(zb1(2, 4), Stages(2, (3, 1)))
    forward, backward = 4 * 3 + 1, 1 + 4 * 3  # stage 1 is alone in its last forward and its first backward lane
    assert weight_split.lockstep_seconds(program, 1, 0, 0) == forward
    assert weight_split.lockstep_seconds(program, 0, 1, 0) == backward
    assert weight_split.lockstep_seconds(program, 0, 0, 1) == 4 * 3
    assert weight_split.bubble(program, 0) == pytest.approx((forward + 2 * backward) / (3 * 4 * 2) - 1)
    even = Program(zb1(4, 8), Stages(4, (2,) * 4))
    assert weight_split.bubble(even, 1) == pytest.approx(zb1(4, 8).simulate().bubble)
    assert weight_split.bubble(even, 0) == pytest.approx(3 / 8)  # that of 1F1B


def test_mistakes_are_named():
    cfg = config(split=("mlp/.*", "ffn"))
    with pytest.raises(ConfigError, match=r"'ffn' matches no matrix of a layer .* Use names among attention/w_k, "):
        estimate.resolve_split(Job(cfg, memory.context(cfg)))
    with pytest.raises(ConfigError, match=r"pipeline.split=null is chosen where a run starts"):
        jax.eval_shape(*traced(config(split=None)))
