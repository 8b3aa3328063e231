"""Compares the predicted time of a step with sums done by hand, with the schedule's simulator, and with links."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import record
import train_gpu

from jaxstack.common.hardware import CHIPS
from jaxstack.config import Config, ConfigError, DataConfig, MeshConfig, ModelConfig, PipelineConfig, TrainConfig
from jaxstack.families.flops import flops_per_token
from jaxstack.pipeline import zb_h1
from jaxstack.pipeline.stages import Stages
from jaxstack.planner import memory, traffic
from jaxstack.planner.hlo import Collective
from jaxstack.planner.job import Job
from jaxstack.planner.roofline import ChipLimits
from jaxstack.planner.roofline_ops import Op
from jaxstack.planner.roofline_step import local_operations
from jaxstack.planner.step_time import Placement, StepTime, _bubble, step_time

H100 = ChipLimits(CHIPS["h100"])


def config(
    remat: str = "full", microbatches: int | None = None, chunks: int = 1, schedule: str = "1f1b", **mesh: int
) -> Config:
    model = ModelConfig(num_layers=8, d_model=1024, num_heads=8, num_kv_heads=8, d_ff=4096, vocab_size=4096)
    return Config(
        model=model,
        data=DataConfig(seq_len=512, batch_size=64),
        train=TrainConfig(dtype="bfloat16", remat=remat),
        mesh=MeshConfig(**{"data": 1} | mesh),
        pipeline=PipelineConfig(schedule=schedule, microbatches=microbatches, chunks=chunks, split=(".*",)),
    )


def predict(cfg: Config, limits: ChipLimits = H100) -> StepTime:
    return step_time(Job(cfg, memory.context(cfg)), limits)


def place(limits: ChipLimits = H100, **sizes: int) -> Placement:
    order = ("pipe", "data", "fsdp", "expert", "context", "tensor")
    return Placement({axis: sizes.get(axis, 1) for axis in order}, limits)


def test_parts_add_up_to_all_operations_and_collectives():
    cfg = config(fsdp=4, tensor=2)
    ctx = memory.context(cfg)
    found = predict(cfg)
    work = sum(op.times * H100.seconds(op)[0] for op in local_operations(Job(cfg, ctx)))
    assert found.layers + found.recomputation + found.head + found.update == pytest.approx(work)
    alone = sum(c.sent / 450e9 for c in traffic.traffic(Job(cfg, ctx)))
    assert sum(found.exposed.values()) + sum(found.hidden.values()) == pytest.approx(alone)
    assert found.total == pytest.approx(work + sum(found.exposed.values()))
    assert found.tokens_per_s == pytest.approx(64 * 512 / found.total)


def test_recomputation_is_counted_once_more_by_each_convention():
    """Full recomputation repeats the forward pass of the layers but for the last matmul of each, by hand."""
    full, none = predict(config("full")), predict(config("none"))
    tokens = 64 * 512
    matrices = 4 * 1024**2 + 3 * 1024 * 4096  # attention and a gated MLP
    assert none.recomputed_flops == 0
    assert none.recomputation == 0
    assert full.model_flops == none.model_flops
    last = 1024 * 4096
    assert full.recomputed_flops == pytest.approx(tokens * 8 * (2 * (matrices - last) + 4 * 1024 * 512))
    assert full.model_flops.full == pytest.approx(tokens * flops_per_token(config().model, 512).full)
    assert full.hfu / full.mfu.full == pytest.approx(1 + full.recomputed_flops / full.model_flops.full)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zb1", 1)])
def test_the_bubble_is_that_of_the_schedule(schedule, chunks):
    cfg = config(pipe=4, microbatches=8, chunks=chunks, schedule=schedule)
    ctx = memory.context(cfg)
    found = predict(cfg)
    inside = [op for op in local_operations(Job(cfg, ctx)) if op.of_layer]
    forward = sum(op.times * H100.seconds(op)[0] for op in inside if not op.in_backward)
    backward = sum(op.times * H100.seconds(op)[0] for op in inside if op.in_backward)
    weight = sum(
        op.times * H100.seconds(op)[0] for op in inside if op.part == "matmul" and op.name.endswith(", gradient")
    )
    simulated = ctx.layout.pipeline.schedule.simulate(forward, backward, weight / backward)
    assert found.bubble / (found.layers + found.recomputation) == pytest.approx(simulated.bubble)


def test_gradients_of_weights_fill_the_bubble():
    """By hand, with forward, backward and weight units of one second each: zb_h1 idles for P - 1 seconds."""
    second = H100.peak("bfloat16")
    ops = [
        Op(name, "matmul", "contraction", second, 0, times=8)
        for name in ("w", "w, gradient of input", "w, gradient")
    ]  # fmt: skip
    pipeline = SimpleNamespace(schedule=zb_h1(4, 8), stages=Stages(4, (1,) * 4))
    ctx = SimpleNamespace(layout=SimpleNamespace(pipeline=pipeline))
    assert _bubble(ctx, ops, H100) == pytest.approx(3)


def test_a_backward_pass_takes_twice_the_forward_pass_without_recomputation():
    ops = [op for op in local_operations(Job(config("none"), memory.context(config("none")))) if op.part == "matmul"]
    forward = sum(op.times * op.flops for op in ops if not op.in_backward)
    assert sum(op.times * op.flops for op in ops if op.in_backward) == pytest.approx(2 * forward)


def test_an_axis_that_spans_hosts_runs_at_the_speed_of_the_network():
    p = place(pipe=2, data=4, tensor=4)  # 8 devices a host: a host has 4 of tensor and 2 of data
    assert p.bandwidth(("tensor",), "all-reduce") == (450e9, math.inf)
    assert p.bandwidth(("data",), "all-reduce") == (450e9, 100e9)  # two network cards for a ring each
    assert p.bandwidth(("pipe",), "collective-permute") == (450e9, 50e9)
    assert p.members(("data", "tensor")) == 8
    exchange = Collective("all-to-all", ("data",), 4, "bf16", (4,), 4e9, 1)
    assert p.seconds(exchange) == pytest.approx(2e9 / 50e9)  # two of the four parts leave the host
    assert place(tensor=16).members(("tensor",)) == 8
    assert place(tensor=3, data=8).members(("tensor",)) == 1  # hosts cut groups of three
    hosts_of_4 = replace(H100, host_devices=4, network=1e9, link_efficiency=0.5)
    assert place(hosts_of_4, tensor=8).bandwidth(("tensor",), "all-gather") == (225e9, 2e9)


def test_a_tpu_axis_uses_one_dimension_of_the_torus():
    p = place(ChipLimits(CHIPS["v5p"]), fsdp=16, tensor=4)
    assert p.bandwidth(("tensor",), "all-gather") == (200e9, math.inf)
    assert p.bandwidth(("fsdp", "tensor"), "all-gather") == (400e9, math.inf)
    assert p.bandwidth(("fsdp",), "collective-permute") == (100e9, math.inf)


def test_collectives_of_weights_hide_behind_the_layers_and_of_activations_do_not():
    slow = replace(H100, link=1e9)
    fast, waits, tensor = predict(config(fsdp=8)), predict(config(fsdp=8), slow), predict(config(tensor=8), slow)
    assert fast.exposed["fsdp"] < 0.5 * fast.hidden["fsdp"]
    beside = fast.layers + fast.recomputation
    half_more = replace(H100, link=450e9 * sum((fast.exposed["fsdp"], fast.hidden["fsdp"])) / (1.5 * beside))
    assert 0.5 * beside < predict(config(fsdp=8), half_more).hidden["fsdp"] <= beside
    assert waits.exposed["fsdp"] > waits.hidden["fsdp"]
    assert tensor.exposed["tensor"] > 10 * tensor.hidden["tensor"]  # the gradients of weights hide what they can


def test_a_chip_without_a_network_asks_for_its_speed():
    limits = ChipLimits(CHIPS["rtx4090"])
    predict(config(data=8), limits)
    with pytest.raises(ConfigError, match="--network"):
        predict(config(data=16), limits)
    assert predict(config(data=16), replace(limits, network=1e9)).exposed["data"] > 0


@pytest.mark.parametrize(
    ("layout", "mesh"),
    [("fsdp", {"fsdp": 8}), ("tensor", {"tensor": 8}), ("fsdp_tensor", {"fsdp": 4, "tensor": 2})],
)
def test_exposed_time_is_that_of_compiled_programs(layout, mesh):
    """The programs are those of benchmarks/overlap.py for 8 H100.

    XLA's schedules hide up to a quarter more, because their operations take longer than the least time.
    """
    found = json.loads((record.RESULTS / "overlap.json").read_text())["layouts"][layout]["with_options"]
    cfg = train_gpu.config(train_gpu.JOBS["dense_2048"], 16, "selective", {})
    cfg = replace(cfg, mesh=MeshConfig(data=1, **mesh))
    time = step_time(Job(cfg, memory.context(cfg, 8, "gpu")), H100)
    exposed = sum(time.exposed.values())
    assert 1e3 * (exposed + sum(time.hidden.values())) == pytest.approx(found["collectives_ms"])
    assert 1 <= 1e3 * exposed / found["exposed_ms"] < 1.25
