"""The formula of a step's memory against compiled programs, and what users read before and after memory runs out."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import predicted_memory
import psutil
import pytest
import step_memory
import train_gpu

from jaxstack.cli import parser
from jaxstack.common.hardware import CHIPS, find_chip
from jaxstack.config import (
    Config,
    ConfigError,
    DataConfig,
    KernelsConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    TrainConfig,
    resolve,
)
from jaxstack.config.reading.parse import parse_config
from jaxstack.families.context import make_context
from jaxstack.moe.placement import Placement
from jaxstack.planner import aot, estimate, generation_memory, memory
from jaxstack.planner.job import Job
from jaxstack.planner.memory import GIB, RATIOS, Room
from jaxstack.sharding import make_mesh
from jaxstack.training.assemble import make_eval_step
from jaxstack.training.state import Recipe, abstract_state

RESULTS = Path(step_memory.__file__).parent / "results"
MODEL = ModelConfig(num_layers=4, d_model=256, num_heads=4, d_ff=704, vocab_size=2048)


def config(batch: int = 8, **groups) -> Config:
    return Config(model=MODEL, data=DataConfig(seq_len=256, batch_size=batch), **groups)


def within(platform: str, ratio: float) -> bool:
    low, high = RATIOS[platform]
    return low <= ratio <= high


def test_the_results_of_all_compilers_are_within_the_bounds():
    """All committed programs: those of step_memory.py and predicted_memory.py, and of the benchmark of one GPU."""
    cpu = json.loads((RESULTS / "step_memory_cpu.json").read_text())["cases"]
    assert set(cpu) == set(step_memory.CASES)
    ratios = [("cpu", name, row["ratio"]) for name, row in cpu.items()]
    # The arguments are exact but for scalars, and for arrays that the program does not use.
    assert all(abs(row["argument_ratio"] - 1) < 0.01 for row in cpu.values())
    for key, row in predicted_memory.load().items():
        found = predicted_memory.compare(row["name"], row["chip"], row["compiled"])
        ratios.append((predicted_memory.PLATFORMS[row["chip"]], key, found["temporary_ratio"]))
    for row in json.loads((RESULTS / "train_gpu_aot.json").read_text())["cases"]:  # one GPU
        cfg = train_gpu.config(train_gpu.JOBS[row["job"]], row["batch"], row["remat"], row["kernels_asked"])
        need = memory.need(cfg, 1, "gpu")
        ratios.append(("gpu", f"{row['job']} {row['remat']}", row["temporary"] / (need.formula - need.state)))
    assert len(ratios) > 80
    assert not [row for row in ratios if not within(row[0], row[2])]
    for platform, (low, high) in RATIOS.items():  # bounds that are too wide would refuse and warn too late
        found = [ratio for p, _, ratio in ratios if p == platform]
        assert min(found) < 1.4 * low, platform
        assert high < 1.35 * max(found), platform


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["adamw, few tokens", "gpt2, remat none", "mixtral", "fsdp 8, remat full"])
def test_a_fresh_program_is_within_the_bounds(name):
    row = step_memory.measure(step_memory.CASES[name], None)
    assert abs(row["argument_ratio"] - 1) < 0.01
    assert within("cpu", row["ratio"]), row


def test_evaluation_needs_no_more_than_a_microbatch():
    """Otherwise `train.grad_accum` would be bad advice: a run would end at its first evaluation."""
    temporary = []
    for batch, accum in ((4, 1), (32, 8)):
        cfg = config(batch, train=TrainConfig(grad_accum=accum))
        ctx = make_context(cfg, make_mesh(MeshConfig(data=1), 4, jax.devices()[:1]))
        state, abstract = estimate.abstract_inputs(Job(cfg, ctx))
        compiled = jax.jit(make_eval_step(cfg.model, ctx, cfg.train.grad_accum)).lower(state.params, abstract).compile()
        temporary.append(compiled.memory_analysis().temp_size_in_bytes)
    assert temporary[1] < 1.05 * temporary[0]


def room(gib: float) -> Room:
    return Room("a device (test)", gib * GIB, gib * GIB)


def test_a_run_is_refused_by_the_lower_bound_only(monkeypatch):
    cfg = config()
    ctx = make_context(cfg, make_mesh(MeshConfig(data=1), 8, jax.devices()[:1]))
    run = Job(cfg, ctx), abstract_state(Recipe.of(cfg), ctx)
    found = memory.need(cfg, 1, "cpu")
    low, high = found.bounds
    assert found.state < low < found.formula < high
    for size, raises, warns in ((0.99 * low, True, False), (1.01 * low, False, True), (0.99 * high, False, True)):
        monkeypatch.setattr(memory, "room_of", lambda devices, size=size: room(size / GIB))
        if raises:
            with pytest.raises(
                ConfigError, match=r"data.batch_size=8, .*train.remat=selective needs at least"
            ) as error:
                memory.check(*run)
            assert error.value.advice.startswith("What would help")
        else:
            assert warns == ("may not fit" in memory.check(*run))
    monkeypatch.setattr(memory, "room_of", lambda devices: room(1.01 * high / GIB))
    assert memory.check(*run) is None
    # Where the state alone is too large, the model is named and not the batch.
    monkeypatch.setattr(memory, "room_of", lambda devices: room(0.9 * found.state / GIB))
    with pytest.raises(ConfigError, match=r"state of model.num_layers=4, model.d_model=256"):
        memory.check(*run)


def test_the_host_of_simulated_devices_has_its_memory_once():
    host = memory.room_of(jax.devices())
    assert host.sharing == 8
    assert host.free <= host.bytes <= psutil.virtual_memory().total + psutil.swap_memory().total


def test_a_gpu_has_what_the_runtime_reserves(monkeypatch):
    class Device:
        platform, device_kind = "gpu", "NVIDIA A100-SXM4-80GB"

        def __init__(self, limit):
            self.memory_stats = lambda: limit and {"bytes_limit": limit}

    found = memory.room_of([Device(60 * GIB), Device(59 * GIB)])
    assert (found.bytes, found.sharing, found.larger) == (59 * GIB, 1, 0.92 * 80 * GIB)
    assert memory.room_of([Device(76 * GIB)]).larger == 0
    assert memory.room_of([Device(None)]).bytes == 80 * GIB  # without statistics, the data sheet counts
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.92" in memory.Savings(config(), 1, "gpu", found).advice()


@pytest.mark.parametrize(
    ("cfg", "devices", "expected"),
    [
        # 12 sequences on 4 devices: accumulation in 3 leaves 4 sequences, in 2 it leaves 6, which 4 do not divide.
        (config(12), 4, {"train.grad_accum": {3}, "mesh.fsdp": {2, 4}, "train.remat": {"full"}}),
        (config(6, train=TrainConfig(remat="full")), 1, {"train.grad_accum": {2, 3, 6}, "data.batch_size": {1, 2, 3}}),
        (config(1, kernels=KernelsConfig(attention="xla")), 1, {"kernels.attention": {"auto"}}),
    ],
    ids=["four devices", "one device", "one sequence"],
)
def test_advice_is_valid_and_says_what_the_formula_says(cfg, devices, expected):
    before = memory.need(cfg, devices, "gpu")
    found = memory.Savings(cfg, devices, "gpu", room(1e-6)).find()
    assert {key for flags, _ in found for key in flags} >= set(expected)
    for flags, after in found:
        assert after.formula < 0.98 * before.formula
        for key, value in flags.items():
            assert value in expected.get(key, {value}), (key, value)
        words = [f"--{key}={value}" for key, value in flags.items()]
        given = parser.read_arguments(["plan", *_words(cfg), *words]).cfg  # as a user would give them
        assert memory.need(given, devices, "gpu").formula == after.formula
    assert not any({"data.batch_size", "train.grad_accum"} <= set(flags) for flags, _ in found)  # they save the same
    text = memory.Savings(cfg, devices, "gpu", room(1e-6)).advice()
    assert all(f"{after.formula / before.formula - 1:+.0%}" in text for _, after in found)
    assert "fits" not in text
    assert text.endswith("None is enough. Use more devices with mesh.fsdp, or a smaller model.")
    fits = memory.Savings(cfg, devices, "gpu", room(1e6)).advice()
    assert " fits)" in fits
    assert "None is enough" not in fits


def _words(cfg: Config) -> list[str]:
    m, d = cfg.model, cfg.data
    values = {"model.num_layers": m.num_layers, "model.d_model": m.d_model, "model.num_heads": m.num_heads}
    values |= {"model.d_ff": m.d_ff, "model.vocab_size": m.vocab_size, "data.batch_size": d.batch_size}
    values |= {"data.seq_len": d.seq_len, "train.remat": cfg.train.remat, "kernels.attention": cfg.kernels.attention}
    values |= {"optim.name": cfg.optim.name, "model.qk_norm": m.qk_norm}
    return [f"--{key}={value}" for key, value in values.items()]


HUGE = ["--model.vocab_size=268435456", "--model.d_model=4096", "--model.num_heads=4", "--model.num_layers=1"]  # 4 TiB


@pytest.mark.parametrize("checked", [True, False], ids=["before compiling", "by the runtime"])
def test_memory_that_runs_out_is_two_lines(checked, tmp_path, monkeypatch, capsys):
    """Without the check the runtime really has no memory for the table."""
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question.\n" * 400)
    if not checked:
        monkeypatch.setattr(memory, "room_of", lambda devices: Room("this machine", 2**60, 2**34))
    words = [f"--run.dir={tmp_path}/run", "--data.source=path", f"--data.path={tmp_path}/text.txt", "--data.seq_len=32"]
    with pytest.raises(SystemExit) as ended:
        parser.run(
            "jaxstack",
            ["train", *words, *HUGE, "--data.batch_size=8", "--train.steps=2", "--mesh.data=1", "--mesh.fsdp=8"],
        )
    assert ended.value.code == 2
    first, second = capsys.readouterr().err.splitlines()[-2:]
    assert first.startswith("jaxstack train: error: " + ("the state of" if checked else "out of memory: "))
    assert "model.d_model=4096" in first or "data.batch_size=8" in first
    assert second.startswith("What would help") or second.startswith("Use more devices")
    if checked:
        assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_only_exhausted_memory_is_explained():
    def describe() -> ConfigError:
        return ConfigError("explained")

    with pytest.raises(ConfigError, match="explained"), memory.explained(describe):
        jnp.zeros(1 << 42).block_until_ready()
    with pytest.raises(ConfigError, match="explained"), memory.explained(describe):
        raise jax.errors.JaxRuntimeError("INTERNAL: Failed to allocate: CUDA_ERROR_OUT_OF_MEMORY: out of memory")
    for text in ("INTERNAL: a bug", "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem"):
        with pytest.raises(jax.errors.JaxRuntimeError), memory.explained(describe):
            raise jax.errors.JaxRuntimeError(text)


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_counts_parameters_and_cache(beams):
    cfg = dataclasses.replace(config(2), model=dataclasses.replace(MODEL, windows=(16, 0), num_kv_heads=2))
    cfg = dataclasses.replace(cfg, sample=dataclasses.replace(cfg.sample, beams=beams, temperature=0.0))
    ctx = memory.context(cfg, 1, "cpu")
    parameters = memory.need(cfg, 1, "cpu").parts["parameters, float32"]
    # 2 texts x 2 layers x (16 + 64 tokens) x 2 heads of 64, keys and values, in float32
    assert generation_memory.generation_need(Job(cfg, ctx), 64) == (
        parameters,
        beams * 2 * 2 * (16 + 64) * 2 * 64 * 2 * 4,
    )


@pytest.mark.parametrize(("layers", "of_a_stage"), [(4, 2), (5, 3)])
def test_generation_counts_the_cache_of_a_stage(layers, of_a_stage):
    """All stages have arrays of the same size, so the smaller one has a slot without a layer."""
    model = dataclasses.replace(MODEL, num_layers=layers)
    cfg = dataclasses.replace(config(2), model=model, mesh=MeshConfig(data=1, pipe=2))
    alone = dataclasses.replace(cfg, mesh=MeshConfig(data=1))
    _, staged = generation_memory.generation_need(Job(cfg, memory.context(cfg, 2, "cpu")), 64)
    _, whole = generation_memory.generation_need(Job(alone, memory.context(alone, 1, "cpu")), 64)
    assert staged == whole / layers * of_a_stage


def test_generation_counts_replicas_of_experts():
    """A device stores three slots in place of its two of four experts."""
    moe = dataclasses.replace(MODEL, moe=MoEConfig(num_experts=4, top_k=2))
    cfg = dataclasses.replace(config(2), model=moe, mesh=MeshConfig(data=1, expert=2))
    ctx = memory.context(cfg, 2, "cpu")
    slots = np.tile([[0, 2, 1], [3, 0, 0]], (moe.num_layers, 1, 1))
    replicated = dataclasses.replace(ctx, placement=Placement(4, slots))
    once, more = (generation_memory.generation_need(Job(cfg, each), 64) for each in (ctx, replicated))
    own = 4 * moe.num_layers * 3 * moe.d_model * moe.expert_width  # of one expert: up, gate and down, in float32
    assert more == (once[0] + own, once[1])


@pytest.mark.parametrize("chip", CHIPS)
def test_plan_needs_no_compiler(chip, capsys):
    target = chip if chip in ("t4", "v2") else f"{chip}:2x2"
    rows = "--data.batch_size=16"  # four chips of Trainium2 are sixteen devices
    words = [*_words(config(8)), f"--target={target}", "--formula", "--mesh.data=1", "--mesh.fsdp=-1", rows]
    parser.execute(["plan", *words])
    out = capsys.readouterr().out
    count = (1 if target == chip else 4) * CHIPS[chip].devices
    assert out.startswith(f"estimated by formula for {target}; nothing was compiled")
    device = "the device" if count == 1 else f"one of {count} devices"
    assert f"memory of {device} ({CHIPS[chip].kinds[0]})" in out
    assert "(it fits)" in out
    assert ("all-gather" in out) == (count > 1)
    assert ("XLA_PYTHON_CLIENT_MEM_FRACTION" in out) == (CHIPS[chip].platform == "gpu")


def test_plan_says_what_would_fit(capsys):
    words = ["--config=llama3_8b", "--target=a100:8", "--formula", "--mesh.fsdp=1", "--mesh.data=8"]  # 8 copies
    parser.execute(["plan", *words])
    out = capsys.readouterr().out
    assert "it does NOT fit" in out
    assert "--mesh.fsdp=4 --mesh.data=2" in out  # the least that fits


@pytest.mark.parametrize(
    ("name", "found"),
    [("A100", "a100"), ("rtx-4090", "rtx4090"), ("TPU v5e", "v5e"), ("TPU7x", "v7x"), ("V100-32GB", "v100_32gb")],
)
def test_chips_are_found_by_the_names_that_users_write(name, found):
    assert find_chip(name) == found


@pytest.mark.parametrize(
    ("name", "near"),
    [("a1000", "a100"), ("4090", "rtx4090"), ("rtx4080", "rtx4090"), ("a100-80gb", "a100"), ("v5", "v5e or v5p")],
)
def test_a_near_miss_of_a_chip_is_suggested(name, near):
    with pytest.raises(ConfigError, match=rf"Did you mean {near}\b"):
        aot.parse_target(f"{name}:8")


def test_divisors_of_an_absurd_batch_come_at_once():
    """The advice tries the divisors of the batch; counting up to it would take minutes."""
    assert estimate.divisors(2**31 - 1) == [1, 2**31 - 1]
    assert estimate.divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]


def work_of(words: str, devices: int, optimizer: str) -> float:
    """The bytes of temporary arrays on one of as many GPUs."""
    cfg = parse_config([*words.split(), f"--optim.name={optimizer}", f"--data.batch_size={devices}"])
    parts = memory.need(resolve(cfg, devices), devices, "gpu").parts
    return sum(parts.get(purpose, 0) for purpose in (estimate.WORK, estimate.MUON_WORK))


@pytest.mark.parametrize("words", ["--config=llama3_8b --mesh.fsdp=8", "--config=quickstart"])
def test_work_of_muon_never_grows_with_the_devices(words):
    """It is at most 1.3 times the work of AdamW; on 256 devices it was 6.5 and 300 times as much."""
    for devices in (64, 256, 4096):
        adamw, muon = (work_of(words, devices, name) for name in ("adamw", "muon"))
        assert muon <= 1.3 * adamw, devices


def test_a_refusal_names_the_largest_part(monkeypatch):
    """The batch is not blamed for the update of Muon, whose matrices are large beside few tokens."""
    flags = "--config=qwen3_0.6b --optim.name=muon --data.seq_len=16 --data.batch_size=2 --mesh.data=2"
    cfg = resolve(parse_config(flags.split()), 2)
    ctx = make_context(cfg, make_mesh(cfg.mesh, 2, jax.devices()[:2]))
    found = memory.need(cfg, 2, "cpu")
    size = found.parts[estimate.MUON_WORK]
    assert size == max(found.parts.values())
    monkeypatch.setattr(memory, "room_of", lambda devices: room(0.99 * found.bounds[0] / GIB))
    with pytest.raises(ConfigError, match=r"optim.name=muon with .* needs at least") as error:
        memory.check(Job(cfg, ctx), abstract_state(Recipe.of(cfg), ctx))
    assert f"The largest part by formula is {estimate.MUON_WORK}: {memory.gib(size)}." in str(error.value)


@pytest.mark.parametrize(("remat", "layers"), [("selective", 3), ("none", 3), ("full", 1), ("dots", 1)])
def test_the_log_sum_exps_of_packed_rows_are_counted(remat, layers):
    """cuDNN writes a float32 number for each token, head and document that a row may have; two documents at least."""
    model = ModelConfig(num_layers=3, d_model=256, num_heads=4, num_kv_heads=2, d_ff=256, vocab_size=256)

    def total(**data):
        cfg = Config(
            model=model,
            data=DataConfig(seq_len=512, batch_size=16, **data),
            train=TrainConfig(dtype="bfloat16", remat=remat),
        )
        return sum(memory.need(dataclasses.replace(cfg, mesh=MeshConfig(data=2, tensor=2)), 4, "gpu").parts.values())

    tokens = 16 // 2 * 512
    more = total(packing=True, max_documents=64) - total(packing=True, max_documents=32)
    assert more == 4 * tokens * 4 // 2 * 32 * layers
    assert total(packing=True, max_documents=1) == total(packing=True, max_documents=2)
    if layers == 3:  # otherwise the loss needs more than a layer without log-sum-exps
        packed = total(packing=True, max_documents=2) - total(packing=True, max_documents=None)
        assert packed == 4 * tokens * 4 // 2 * 2 * layers, "the kernel of this package has none of them"
