"""Tests the measured costs of a pipeline's layers, and the stages that are cut by them."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import test_meshes as meshes
import test_pipeline as pipelines
from test_train import ROOT, SMALL, run

from jaxstack.cli.parser import execute
from jaxstack.config import Config, ConfigError, PipelineConfig
from jaxstack.families.context import make_context
from jaxstack.pipeline import Program, Stages, interleaved_one_f_one_b, resolve
from jaxstack.pipeline.costs import Costs
from jaxstack.pipeline.partition import Partition
from jaxstack.planner import pipeline_costs as profile
from jaxstack.planner import pipeline_programs as programs
from jaxstack.planner import timing
from jaxstack.planner.job import Job
from jaxstack.sharding import make_mesh
from jaxstack.training.state import Recipe

MESH = {"pipe": 2, "data": 1, "fsdp": 2, "tensor": 2}
TINY = [
    *SMALL,
    "--model.num_layers=6",
    "--data.source=stdlib",
    "--model.windows=[16,0]",
    "--model.vocab_size=256",
    "--mesh.pipe=2",
    "--mesh.data=1",
    "--mesh.tensor=2",
]


def config(**train: Any) -> Config:
    cfg = pipelines.config("llama3", MESH, layers=4, batch=8, microbatches=2)
    return replace(cfg, train=replace(cfg.train, **train))


@pytest.mark.matrix
def test_the_command_writes_costs_that_a_run_can_take(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(timing, "LONG_ENOUGH_S", 0.01)
    out = tmp_path / "costs.json"
    execute(["profile", *TINY, f"--out={out}"])
    printed = capsys.readouterr().out
    assert printed.endswith(f"wrote {out}: use it with --pipeline.partition={out}\n")
    costs = Costs.load(out)
    assert costs.layers == 3, "six layers in groups of two windows"
    for name in ("forward", "backward", "state_bytes", "stash_bytes"):
        values = getattr(costs, name)
        assert len(set(values)) == 1, name
        assert values[0] > 0, name
    assert min(*costs.first, costs.last[0], costs.bandwidth, costs.latency) > 0
    assert costs.spread
    assert "2 x cpu, microbatches of 1 x 32 tokens a replica in float32" in costs.measured_on
    assert costs.memory_bytes is None, "a CPU has no limit"
    assert costs.weight is None
    with pytest.raises(ConfigError, match=r"costs.json exists\. Remove it, or name another file"):
        execute(["profile", *TINY, "--out", str(out)])


def expected_pair_bytes(cfg: Config) -> int:
    """Returns the bytes for a microbatch: inputs and cotangents of queries, keys and values, output, gate, up, down."""
    m = cfg.model
    heads, kv = m.num_heads * m.head_width, m.kv_heads * m.head_width
    widths = [m.d_model + heads + 2 * kv, heads + m.d_model, m.d_model + 2 * m.ff_width, m.ff_width + m.d_model]
    return 4 * cfg.data.batch_size // 2 * cfg.data.seq_len * sum(widths)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "mesh", "how"),
    [
        ("softmax", {"expert": 2, "tensor": 2}, {"dropout": 0.3, "remat": "selective"}),
        ("gpt2", {"tensor": 2, "sequence_parallel": False}, {"dropout": 0.3, "remat": "dots"}),
        ("grouped", {"context": 2, "tensor": 2}, {"packing": True, "accum": 2, "remat": "full"}),
        ("domain", {"fsdp": 2}, {"schedule": "zb1", "split": None, "remat": "selective"}),
        ("llama3", {}, {"schedule": "zb_h1"}),
    ],
)
def test_every_axis_and_option_can_be_measured(family, mesh, how, monkeypatch):
    monkeypatch.setattr(timing, "LONG_ENOUGH_S", 0.01)
    cfg = pipelines.config(family, {"pipe": 2, **mesh}, layers=4, batch=16, microbatches=2, **how)
    costs = profile.measure(cfg, cfg.mesh.resolved_sizes(8), jax.devices())
    assert min(costs.forward + costs.backward + costs.stash_bytes + costs.first) > 0
    assert (costs.weight is not None) == ("schedule" in how)
    if how.get("split", ()) is not None and costs.weight is not None:
        assert min(costs.weight) > 0
        assert costs.pair_bytes[0] == expected_pair_bytes(cfg)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--mesh.pipe=2"], r"--out is missing\. Name the file to write"),
        (["--out=nowhere/costs.json"], "is in a directory that does not exist. Make nowhere"),
        (["--out=costs.json"], "mesh.pipe=1 has no stages to balance"),
        (["--out=costs.json", "--mesh.pipe=2", "--mesh.context=16", "--model.vocab_size=256"], "needs 16 devices"),
    ],
)
def test_the_command_refuses_in_one_line(argv, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=says) as error:
        execute(["profile", f"--config={ROOT / 'configs' / 'quickstart.yaml'}", *argv])
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("gather", "shards"), [("once", 1), ("layer", 2)])
def test_state_is_counted_to_the_byte(gather, shards):
    """AdamW on 2 x FSDP, 2 x tensor and 2 stages shards parameters and moments of matrices in four, of the vocabulary
    in eight. Gradients and bfloat16 copies are sharded in two and in four, or as often as parameters if units gather
    layers. Norms are neither sharded nor copied."""
    cfg = config(dtype="bfloat16")
    D, F, V = cfg.model.d_model, cfg.model.ff_width, cfg.model.vocab
    layer, norms = 4 * D * D + 3 * D * F, 2 * D  # 8 heads of 8 for queries, keys and values
    layout = profile.stage_layout(cfg.mesh, gather, {**MESH, "expert": 1, "context": 1})
    state, shared = profile._state_bytes(Recipe.of(cfg), layout)
    assert state == 12 * (layer / 4 + norms) + 4 * (layer / 2 / shards + norms) + 2 * layer / 2 / shards
    ends = 2 * V * D
    counters = 2 * 4  # the steps of the moments and of the learning rate
    assert shared == 12 * (ends / 8 + D) + 4 * (ends / 4 / shards + D) + 2 * ends / 4 / shards + counters


@pytest.mark.parametrize(
    ("remat", "dtype"), [("full", "float32"), ("full", "bfloat16"), ("selective", "float32")], ids=str
)
def test_residuals_and_the_stream_are_counted_to_the_byte(remat, dtype):
    """One sequence of a microbatch on two tensor shards, with sequence parallelism."""
    cfg = config(remat=remat, dtype=dtype)
    cfg = replace(cfg, model=replace(cfg.model, num_layers=2), data=replace(cfg.data, batch_size=2))
    cfg = replace(cfg, mesh=replace(cfg.mesh, pipe=1, fsdp=1), pipeline=PipelineConfig())
    ctx = make_context(cfg, make_mesh(cfg.mesh, 2, jax.devices()[:2]))
    boundary, stash, _ = programs.activation_bytes(
        Job(cfg, ctx), programs.initial_values(cfg.model, ctx), programs.random_batch(Job(cfg, ctx))
    )
    S, D, F, H = cfg.data.seq_len, cfg.model.d_model, cfg.model.ff_width, cfg.model.num_heads
    assert boundary == {"float32": 4, "bfloat16": 2}[dtype] * S / 2 * D
    if remat == "full":
        assert stash == boundary
    else:  # residual streams before and after attention; queries, keys, values, attention; gate and up; two norms
        assert stash == 4 * (2 * S / 2 * D + S * (4 * D / 2 + 2 * F / 2 + H / 2) + 2 * S / 2)


def unequal(layers: int, **change: Any) -> Costs:
    """Returns costs in which the first layer takes as long as all others together."""
    forward = np.array([layers - 1.0] + [1.0] * (layers - 1))
    same = (1.0,) * layers
    costs = Costs(forward, 2 * forward, same, same, 0.0, (0.0, 0.0), (0.0, 0.0), True, 1.0, 0.0, "paper")
    return replace(costs, **change)


def cut_by(path: Path, costs: Costs, cfg: Config) -> Config:
    costs.save(path)
    return replace(cfg, pipeline=replace(cfg.pipeline, partition=str(path)))


@pytest.mark.matrix(quick=["1f1b"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_cut_by_costs_gives_the_loss_and_gradients_of_one_device(tmp_path, schedule):
    cfg = pipelines.config("llama3", {"pipe": 2}, layers=5, microbatches=4)
    cfg = replace(cfg, pipeline=replace(cfg.pipeline, schedule=schedule, split=(".*",)))
    # A weight unit of the first layer takes as long as those of all others together, too.
    weight = {} if schedule == "1f1b" else {"weight": (4.0, *[1.0] * 4), "pair_bytes": (1.0,) * 5}
    cfg = cut_by(tmp_path / "costs.json", unequal(5, **weight), cfg)
    program = resolve(cfg.pipeline, cfg.model, 2, cfg.data.batch_size)
    assert program.stages.layers == (1, 4)
    assert program.explain().startswith(f"5 layers by {schedule}: 2 stages")
    one = meshes.gradients(pipelines.config("llama3", {}, layers=5), 0)
    loss, gradient = meshes.errors("llama3", one, meshes.gradients(cfg, 0))
    assert loss < 1e-5  # as in tests/pipeline/test_pipeline.py
    assert gradient < 1e-5


def test_layers_that_alternate_are_cut_in_their_groups(tmp_path):
    cfg = cut_by(tmp_path / "costs.json", unequal(4), pipelines.config("gemma2", {"pipe": 2}, layers=8))
    program = resolve(cfg.pipeline, cfg.model, 2, cfg.data.batch_size)
    assert program.stages.layers == (2, 6)
    assert program.explain().startswith("4 groups of 2 layers by 1f1b: 2 stages")


def test_equal_layers_are_cut_evenly_and_without_costs_nothing_is_explained(tmp_path):
    cfg = pipelines.config("llama3", {"pipe": 4}, layers=7)
    plain = resolve(cfg.pipeline, cfg.model, 4, cfg.data.batch_size)
    same = replace(unequal(7), forward=(1.0,) * 7, backward=(2.0,) * 7)
    cut = cut_by(tmp_path / "costs.json", same, cfg)
    measured = resolve(cut.pipeline, cut.model, 4, cut.data.batch_size)
    assert measured.stages == plain.stages
    assert plain.explain() == ""


def test_a_stage_stores_as_many_rows_as_the_longest_block():
    """`Partition.stage_bytes` counts the bytes that the executor allocates."""
    schedule, layers = interleaved_one_f_one_b(2, 4, 2), (1, 4, 2, 1)
    program = Program(schedule, Stages(2, layers))
    rows = len(program.stages.layer_of_slot) / 2
    costs = replace(unequal(8), state_bytes=(10.0,) * 8, stash_bytes=(1.0,) * 8)
    assert Partition(costs, schedule, layers).stage_bytes == 10 * rows + program.slots * program.stages.max_layers


@pytest.mark.parametrize(
    ("layers", "change", "says"),
    [
        (4, {}, r"costs.json holds costs of 4 layers, but model.num_layers=5 has 5 layers. Measure this model by"),
        (5, {"memory_bytes": 1.0}, r"costs.json: memory_bytes=1 .*: the smallest cut of 5 layers"),
    ],
)
def test_costs_that_do_not_fit_are_refused_in_one_line(layers, change, says, tmp_path):
    cfg = pipelines.config("llama3", {"pipe": 2}, layers=5)
    cfg = cut_by(tmp_path / "costs.json", unequal(layers, **change), cfg)
    with pytest.raises(ConfigError, match=says) as error:
        resolve(cfg.pipeline, cfg.model, 2, cfg.data.batch_size)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("partition", "says"),
    [
        ("auto", "pipeline.partition=auto is measured by train.py"),
        ("evne", "evne cannot be read .*name a file of Costs.save"),
    ],
)
def test_a_partition_that_cannot_be_had_here_is_refused_in_one_line(partition, says):
    cfg = pipelines.config("llama3", {"pipe": 2}, layers=5)
    with pytest.raises(ConfigError, match=says) as error:
        resolve(replace(cfg.pipeline, partition=partition), cfg.model, 2, cfg.data.batch_size)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"is empty\. Use even, auto"):
        PipelineConfig(partition="")


def test_several_processes_are_sent_to_the_command(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    cfg = pipelines.config("llama3", {"pipe": 2}, layers=4)
    cfg = replace(cfg, pipeline=replace(cfg.pipeline, partition="auto"))
    with pytest.raises(ConfigError, match=r"this run has 2. Run `jaxstack profile --out") as error:
        profile.resolve_partition(cfg, make_mesh(cfg.mesh, cfg.data.batch_size, jax.devices()[:2]))
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def measured_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], str]:
    """Trains two steps with `auto`; returns the run directory, the command and its output."""
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text((ROOT / "CONTRIBUTING.md").read_text())
    run_dir = tmp_path_factory.mktemp("measured") / "run"
    argv = [*SMALL, f"--data.path={text}", f"--run.dir={run_dir}", "--sample.prompts=[]", "--model.num_layers=3",
            "--train.steps=2", "--mesh.pipe=2", "--mesh.data=1", "--pipeline.partition=auto"]  # fmt: skip
    return run_dir, argv, run(*argv)[0]


@pytest.mark.matrix
def test_auto_measures_explains_and_trains(measured_run):
    run_dir, _, out = measured_run
    costs = Costs.load(run_dir / "profile.json")
    assert costs.layers == 3
    told = out.index("pipeline 1f1b, 2 stages") < out.index("3 layers by 1f1b") < out.index("first step done")
    assert told
    assert f"costs of {costs.measured_on}" in out
    assert "partition: auto" in (run_dir / "config.yaml").read_text()


@pytest.mark.slow
def test_a_run_goes_on_under_its_cut_and_under_another(measured_run):
    run_dir, argv, _ = measured_run
    path = run_dir / "profile.json"
    found = json.loads(path.read_text())
    changed = {**found, "forward": [10.0, 1.0, 1.0], "measured_on": "paper"}
    path.write_text(json.dumps(changed))
    out, _ = run(*argv, "--train.steps=3")
    assert "resumed from step 2" in out
    assert "layers 0 | 1-2;" in out
    assert json.loads(path.read_text()) == changed, "the costs are read again, not measured again"
    out, _ = run(*argv, "--train.steps=4", "--pipeline.partition=even")
    assert "resumed from step 3" in out
    assert "layers 0-1 | 2;" in out
    assert "costs of" not in out
    losses = [json.loads(line).get("loss", 0.0) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(map(math.isfinite, losses))
