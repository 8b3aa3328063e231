"""Compares the predicted time of a step with sums done by hand, with the schedule's simulator, and with links."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import record
import train_gpu

from jaxstack.common.hardware import CHIPS
from jaxstack.config import (
    Config,
    ConfigError,
    DataConfig,
    ExpertLayers,
    LatentConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    PipelineConfig,
    SampleConfig,
    TrainConfig,
)
from jaxstack.families.flops import flops_per_token
from jaxstack.pipeline import zb_h1
from jaxstack.pipeline.stages import Stages
from jaxstack.planner import memory, rates, traffic
from jaxstack.planner.hlo import Collective
from jaxstack.planner.job import Job
from jaxstack.planner.roofline import ChipLimits
from jaxstack.planner.roofline_ops import Matmul, Op, OpBuilder, pointwise_op
from jaxstack.planner.roofline_step import local_operations
from jaxstack.planner.step_time import Placement, StepTime, _bubble, _bubble_of_stacks, _stack_loop, step_time, work_of

H100 = ChipLimits(CHIPS["h100"])
FITTED = rates.rates()


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


def seconds(ops) -> float:
    return sum(op.times * FITTED.of_op(op, H100) for op in ops)


def place(limits: ChipLimits = H100, **sizes: int) -> Placement:
    order = ("pipe", "data", "fsdp", "expert", "context", "tensor")
    return Placement({axis: sizes.get(axis, 1) for axis in order}, limits)


def test_parts_add_up_to_all_operations_and_collectives():
    cfg = config(fsdp=4, tensor=2)
    ctx = memory.context(cfg)
    found = predict(cfg)
    work = seconds(work_of(Job(cfg, ctx), H100).ops)
    assert found.layers + found.recomputation + found.head + found.update == pytest.approx(work)
    hop = 1e-6 * FITTED.factors["gpu"]["hop"]
    alone = sum(c.sent / 450e9 for c in traffic.traffic(Job(cfg, ctx)))
    alone += sum(hop * c.times * math.log2(c.devices) for c in traffic.activation_traffic(Job(cfg, ctx)))
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
    inside = [op for op in work_of(Job(cfg, ctx), H100).ops if op.of_layer]
    forward = seconds(op for op in inside if not op.in_backward)
    backward = seconds(op for op in inside if op.in_backward)
    weight = seconds(op for op in inside if op.part == "matmul" and op.name.endswith(", gradient"))
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
    assert _bubble(ctx, ops, lambda ops: sum(op.times * H100.seconds(op)[0] for op in ops)) == pytest.approx(3)


def test_stacks_with_and_without_experts_have_chunks_of_their_own():
    """By hand: two stacks of two equal layers are two chunks of two stages, so that (P - 1) / (V M) is idle."""
    model = ModelConfig(
        num_layers=4, d_model=32, num_heads=4, d_ff=96, vocab_size=64,
        moe=MoEConfig(num_experts=4, d_ff=32, layers=ExpertLayers(first=2)),
    )  # fmt: skip
    cfg = Config(
        model=model, data=DataConfig(seq_len=32, batch_size=8), train=TrainConfig(remat="none"),
        mesh=MeshConfig(data=1, pipe=2), pipeline=PipelineConfig(schedule="gpipe", microbatches=4),
        sample=SampleConfig(prompts=()),
    )  # fmt: skip
    ctx = memory.context(cfg)
    stacks = {op.stack for op in local_operations(Job(cfg, ctx)) if op.of_layer}
    assert stacks == set(ctx.layout.pipeline.stages.parts)
    ops = [
        Op(name, "matmul", "contraction", 1, 0, times, 1, stack=stack)
        for stack in sorted(stacks)
        for name, times in (("w", 8), ("w, gradient of input", 8), ("w, gradient", 8))
    ]  # fmt: skip
    idle = _bubble_of_stacks(ctx, ops, lambda ops: sum(op.times for op in ops), _stack_loop)
    assert idle == pytest.approx(2 * (8 + 16) / (2 * 4))


def test_the_step_of_a_model_with_two_stacks_adds_up():
    """Of a pipeline's two stages, each has half of the operations of one device, and waits besides."""
    model = ModelConfig(
        num_layers=4, d_model=32, num_heads=4, head_dim=12, d_ff=96, vocab_size=64,
        latent=LatentConfig(kv_rank=16, q_rank=24, rotary_dim=4, value_dim=10),
        moe=MoEConfig(num_experts=4, d_ff=32, layers=ExpertLayers(first=2)),
    )  # fmt: skip
    cfg = Config(
        model=model, data=DataConfig(seq_len=32, batch_size=8), train=TrainConfig(dtype="bfloat16", grad_accum=4),
        mesh=MeshConfig(data=1),
    )  # fmt: skip
    staged = replace(
        cfg, train=replace(cfg.train, grad_accum=1), mesh=MeshConfig(data=1, pipe=2),
        pipeline=PipelineConfig(schedule="gpipe", microbatches=4), sample=SampleConfig(prompts=()),
    )  # fmt: skip
    one, two = predict(cfg), predict(staged)
    assert two.layers == pytest.approx(one.layers / 2)
    assert one.bubble == 0
    assert two.bubble > (two.layers + two.recomputation) / 8
    assert two.recomputed_flops == pytest.approx(one.recomputed_flops)


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
    hosts_of_4 = replace(H100, host_devices=4, network=1e9)
    assert place(hosts_of_4, tensor=8).bandwidth(("tensor",), "all-gather") == (450e9, 4e9)
    racks = place(ChipLimits(CHIPS["gb200"]), data=8, expert=32)  # 64 of the 72 devices that a rack links
    assert racks.members(("expert",)) == 32
    assert racks.members(("data", "expert")) == 64


def test_a_tpu_axis_uses_its_dimensions_of_the_torus():
    """64 chips are 4 x 4 x 4: an axis of 4 has one dimension, and an axis of 16 has two."""
    p = place(ChipLimits(CHIPS["v5p"]), fsdp=16, tensor=4)
    assert p.bandwidth(("tensor",), "all-gather") == (pytest.approx(200e9), math.inf)
    assert p.bandwidth(("fsdp",), "all-gather") == (pytest.approx(400e9), math.inf)
    assert p.bandwidth(("fsdp", "tensor"), "all-gather") == (pytest.approx(600e9), math.inf)
    assert p.bandwidth(("fsdp",), "collective-permute") == (100e9, math.inf)


def test_collectives_of_weights_hide_behind_the_layers_and_of_activations_do_not():
    slow = replace(H100, link=1e9)
    fast, waits, tensor = predict(config(fsdp=8)), predict(config(fsdp=8), slow), predict(config(tensor=8), slow)
    assert fast.exposed["fsdp"] < 0.5 * fast.hidden["fsdp"]
    beside = fast.layers + fast.recomputation
    half_more = replace(H100, link=450e9 * sum((fast.exposed["fsdp"], fast.hidden["fsdp"])) / (1.5 * beside))
    assert 0.5 * beside < predict(config(fsdp=8), half_more).hidden["fsdp"] <= 1.001 * beside
    assert waits.exposed["fsdp"] > waits.hidden["fsdp"]
    assert tensor.exposed["tensor"] > 1.5 * tensor.hidden["tensor"]


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "matrices", "part"),
    [
        (128 * 132, 4096, 256, 1, 4096 / 4224),  # one wave of 132 tiles of 128 x 256
        (128 * 133, 4096, 256, 1, 0.9 * 266 / 396 * 4096 / 4224),  # one more: 266 small tiles in three waves
        (16, 4096, 256 * 132, 1, 16 / 128 * 4096 / 4224),  # an eighth of each tile is used
    ],
)
def test_a_matmul_fills_tiles_and_waves(rows, inner, columns, matrices, part):
    op = Op("w", "matmul", "contraction", 1.0, 1.0, matrix=(rows * matrices, inner, columns, matrices))
    assert rates.shape_efficiency(op, H100) == pytest.approx(part)


def test_a_tpu_pads_a_matmul_to_its_matrix_unit():
    op = Op("w", "matmul", "contraction", 1.0, 1.0, matrix=(8, 256, 192, 1))
    assert rates.shape_efficiency(op, ChipLimits(CHIPS["v5e"])) == pytest.approx(192 / 256)
    narrow = Op("attention", "attention", "contraction", 1.0, 1.0, head_width=128)
    assert [narrow.fill(CHIPS[name].tile) for name in ("h100", "v5e", "v6e")] == [1, 1, 0.5]


def test_the_work_of_a_step_by_kind():
    """Passes in the order of experts have a kind of their own; a pass of 3,350 MB takes 1 ms of an H100's memory."""

    def kinds(name: str) -> dict[str, float]:
        return rates.work(pointwise_op(name, 0, 3350e6), H100)

    assert kinds("residual sum") == pytest.approx({"memory": 1e-3, "launch": 1e-6})
    for name in ("tokens to experts", "combined expert outputs, gradient"):
        assert kinds(name) == pytest.approx({"permutation": 1e-3, "launch": 1e-6})
    many = pointwise_op("moe/w_up", 0, 3350e6)._replace(kind="contraction", part="matmul", matrix=(4096, 512, 512, 16))
    assert kinds("moe/w_up")["memory"] == pytest.approx(rates.work(many, H100)["matmul bytes"])
    assert rates.work(many, H100)["launch"] == pytest.approx(16e-6)  # a product for each expert
    assert "experts" in rates.work(many, H100)
    assert "matmul" in rates.work(many._replace(matrix=(4096, 512, 512, 1)), H100)


def test_the_three_products_of_a_weight_have_their_own_shapes():
    ops = OpBuilder("fused", "none", "bfloat16", 2).matmul(Matmul("w", tokens=96, inputs=32, outputs=64))
    assert [op.product for op in ops] == [(96, 32, 64, 1), (96, 64, 32, 1), (32, 96, 64, 1)]


def test_attention_takes_the_kernel_that_auto_selects():
    """A packed batch has segments, which cuDNN's kernel takes with a bound. Scores of chunks are written to memory."""
    cfg = config("none")
    packed = replace(cfg, data=replace(cfg.data, packing=True))
    bounded = replace(cfg, data=replace(cfg.data, packing=True, max_documents=4))
    by_chunks = replace(packed, kernels=replace(cfg.kernels, attention="chunked"))
    jobs = [Job(c, memory.context(c, 1, "gpu")) for c in (cfg, packed, bounded, by_chunks)]
    plain, _, _, chunked = jobs
    assert [work_of(job, H100).kernel for job in jobs] == ["cudnn", "flash2", "cudnn", ""]
    assert work_of(plain, ChipLimits(CHIPS["a100"])).kernel == "flash2, before Hopper"
    assert step_time(chunked, H100).layers > 1.1 * step_time(plain, H100).layers


def test_eight_bits_speed_up_the_products_that_have_them():
    """Two of the three products of a linear layer; the gradient of weights stays in bfloat16."""
    plain = Job(config("none"), memory.context(config("none"), 1, "gpu"))
    low = replace(plain, cfg=replace(plain.cfg, train=replace(plain.train, quant="fp8_tensorwise")))
    low = replace(low, ctx=memory.context(low.cfg, 1, "gpu"))
    eight = {op.name for op in work_of(low, H100).ops if op.dtype == "float8"}
    assert eight
    assert not any(name.endswith(", gradient") for name in eight)
    assert FITTED.of_op(PRODUCT._replace(dtype="float8"), H100) < 0.7 * FITTED.of_op(PRODUCT, H100)


PRODUCT = Op("w", "matmul", "contraction", 2 * 8192**3, 6 * 8192**2, matrix=(8192, 8192, 8192, 1))


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
def test_collectives_take_the_time_of_compiled_programs(layout, mesh):
    """The programs are those of benchmarks/overlap.py for 8 H100.

    The exposed shares are those of published programs. XLA's schedules expose about as much of `tensor`, and less of
    weights, which slow the operations beside them down in a real program.
    """
    found = json.loads((record.RESULTS / "overlap.json").read_text())["layouts"][layout]["with_options"]
    cfg = train_gpu.config(train_gpu.JOBS["dense_2048"], 16, "selective", {})
    cfg = replace(cfg, mesh=MeshConfig(data=1, **mesh))
    time = step_time(Job(cfg, memory.context(cfg, 8, "gpu")), H100)
    exposed = sum(time.exposed.values())
    ctx = memory.context(cfg, 8, "gpu")
    starts = sum(c.times * math.log2(c.devices) for c in traffic.activation_traffic(Job(cfg, ctx)))
    starts *= 1e-3 * FITTED.factors["gpu"]["hop"]
    assert 1e3 * (exposed + sum(time.hidden.values())) == pytest.approx(found["collectives_ms"] + starts)
    assert 0.85 * found["exposed_ms"] < 1e3 * exposed < 0.75 * (found["collectives_ms"] + starts)
