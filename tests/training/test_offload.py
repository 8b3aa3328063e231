"""`train.offload` stores the optimizer's state and residuals in the host's memory, and changes no value."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import offload as bytes_of
import pytest
import test_meshes as meshes
import test_train
from jax.ad_checkpoint import checkpoint_name

from jaxstack import families
from jaxstack.checkpoint import store
from jaxstack.common.hardware import CHIPS
from jaxstack.common.tree import flatten, path_of
from jaxstack.config import CheckpointConfig, ConfigError, OptimConfig, PipelineConfig, TrainConfig
from jaxstack.families.context import make_context
from jaxstack.features import host_residuals
from jaxstack.models.params import Param, flat_spec
from jaxstack.planner import estimate, figures, memory
from jaxstack.planner import offload as planned
from jaxstack.planner.job import Job
from jaxstack.planner.roofline import ChipLimits
from jaxstack.planner.step_time import step_time
from jaxstack.sharding import make_mesh
from jaxstack.training import assemble
from jaxstack.training.features import offload
from jaxstack.training.services.checkpoint_layout import checkpoint_layout
from jaxstack.training.state import Recipe, abstract_state, make_state

SLOW = pytest.mark.slow
Case = tuple[str, str, dict[str, Any], dict[str, Any], str]
CASES: list[Case] = [
    ("lion", "llama3", {"data": 2, "fsdp": 2}, {}, "both"),
    ("adamw", "gpt2", {"data": 2, "zero": "state"}, {"accum": 2, "dropout": 0.3}, "optimizer"),
]
SLOW_CASES: list[Case] = [
    ("adamw", "llama3", {}, {"remat": "full"}, "both"),
    ("adamw", "gemma2", {"fsdp": 2}, {"remat": "full"}, "both"),
    ("lion", "hybrid", {"fsdp": 2}, {}, "residuals"),
    ("adamw", "llama3", {"fsdp": 2, "tensor": 2}, {"remat": "dots"}, "residuals"),
    ("adamw", "llama3", {"fsdp": 2, "tensor": 2}, {"accum": 2, "remat": "full"}, "both"),
    ("adamw", "llama3", {"data": 2, "context": 2}, {"packing": True}, "both"),
    ("adamw", "llama3", {"pipe": 2, "data": 2}, {}, "optimizer"),
    ("adamw", "sigmoid", {"data": 2, "expert": 2}, {}, "both"),
    ("adamw", "lora", {"fsdp": 2}, {}, "both"),
    ("adamw", "llama3", {"fsdp": 2}, {"dtype": "float16"}, "optimizer"),
    ("adamw", "coca", {"data": 2, "fsdp": 2}, {}, "both"),
    ("adamw", "llama3", {"fsdp": 4, "partitioner": "auto"}, {}, "both"),
    ("muon", "llama3", {"data": 2, "fsdp": 2}, {}, "both"),
    ("adafactor", "wide", {"fsdp": 4}, {}, "both"),
    ("adamw", "llama3", {"data": 2, "fsdp": 2}, {}, "both"),
    ("sgd", "llama3", {"fsdp": 4}, {}, "both"),
]
meshes.MODELS["wide"] = dataclasses.replace(meshes.MODELS["llama3"], d_model=128, head_dim=16, d_ff=256)


def name_of(case: Case) -> str:
    optimizer, family, mesh, how, where = case
    return " ".join([optimizer, family, *(f"{k}{v}" for k, v in (mesh | how).items()), where])


def build(optimizer: str, family: str, mesh: dict[str, Any], how: dict[str, Any], where: str):
    dtype = how.get("dtype", "float32")
    how = {name: value for name, value in how.items() if name != "dtype"}
    cfg = meshes.config(family, mesh, **{"remat": "selective"} | how)
    cfg = dataclasses.replace(
        cfg,
        optim=OptimConfig(name=optimizer, lr=1e-2, warmup_steps=0, ema=0.9 if optimizer == "lion" else None),
        train=dataclasses.replace(cfg.train, steps=10, offload=where, dtype=dtype),
        pipeline=PipelineConfig(schedule="1f1b", microbatches=2 if cfg.mesh.pipe > 1 else None),
    )
    devices = int(np.prod(list(cfg.mesh.sizes.values())))
    ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.microbatch_size, jax.devices()[:devices]))
    return cfg, ctx, abstract_state(Recipe.of(cfg), ctx)


def batch_of(cfg, ctx, seed):
    batch = meshes.random_batch(seed, cfg.data.packing, cfg.model, cfg.data.batch_size)
    return jax.device_put(batch, ctx.layout.sharding(ctx.layout.batch))


def trained(optimizer: str, family: str, mesh: dict[str, Any], how: dict[str, Any], where: str, seed: int):
    """Returns the metrics of two steps, and the state before and after them."""
    cfg, ctx, abstract = build(optimizer, family, mesh, how, where)
    state = make_state(Recipe.of(cfg), ctx, abstract)
    first = {path: np.array(x) for path, x in flatten(state).items()}
    step = assemble.jit_train_step(cfg, ctx, abstract)
    batch = batch_of(cfg, ctx, seed)
    metrics = []
    for _ in range(2):
        state, found = step(state, batch)
        metrics.append({name: float(x) for name, x in found.items()})
    places = jax.tree.map(lambda a: (a.sharding.spec, a.sharding.memory_kind), state)
    assert places == jax.tree.map(lambda a: (a.sharding.spec, a.sharding.memory_kind), abstract)
    return metrics, first, {path: np.array(x) for path, x in flatten(state).items()}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=name_of(c), marks=SLOW if c in SLOW_CASES else ()) for c in [*CASES, *SLOW_CASES]],
)
def test_a_run_with_offload_is_the_run_without(case, seed):
    """The host's memory is the device's on a CPU, but the programs differ: groups, barriers and policies.

    The arithmetic is the same, in the same order. With Lion, whose directions are signs, no bit differs. In the updates
    of others XLA fuses other operations, which rounds the last bit.
    """
    *how, where = case
    metrics, first, state = trained(*how, "none", seed)
    other_metrics, other_first, other_state = trained(*how, where, seed)
    assert all(np.array_equal(value, other_first[path]) for path, value in first.items())
    if how[0] == "lion":
        assert other_metrics == metrics
        assert [path for path, value in state.items() if not np.array_equal(value, other_state[path])] == []
        return
    # In float16, the last bit of a parameter can move an activation to the next number, which is 1e-3 away. Two steps
    # changed a parameter by 1.1e-3 of its size otherwise; an update of another group would be of the order of one.
    is_float16 = how[3].get("dtype") == "float16"
    for one, other in zip(metrics, other_metrics, strict=True):
        assert other == pytest.approx(one, rel=1e-3 if is_float16 else 1e-6)
    # A key's bias moves all scores of a query alike: without RoPE its true gradient is zero, and what is left is noise.
    noise = () if meshes.MODELS[how[1]].positions == "rope" else ("/b_k",)
    for path, value in state.items():
        if path.endswith(noise):
            continue
        # Adam divides a gradient by its own size: a last bit is a larger part of a sum that is nearly zero.
        error = np.linalg.norm((other_state[path] - value).astype(np.float64))
        size = max(np.linalg.norm((value - first[path]).astype(np.float64)), 1e-6)
        assert error <= (3e-3 if is_float16 else 1e-3) * size, path


@pytest.mark.parametrize(("family", "scalars"), [("llama3", 0), ("coca", 2)])
def test_moments_are_on_the_host_and_all_else_on_the_device(family, scalars):
    _, _, abstract = build("lion", family, {"fsdp": 2}, {}, "optimizer")
    kinds = {path_of(keys): leaf.sharding.memory_kind for keys, leaf in jax.tree_util.tree_leaves_with_path(abstract)}
    on_host = {path for path, kind in kinds.items() if kind == "pinned_host"}
    params = flatten(abstract.params)
    arrays = [path for path, leaf in params.items() if leaf.ndim]
    assert len(params) - len(arrays) == scalars
    assert on_host == {f"opt_state/inner/1/mu/{path}" for path in arrays}  # counters and averages are not


def test_residuals_and_inputs_of_layers_are_on_the_host_and_statistics_are_not():
    """What the backward pass reads, by the trace: the input, the query, the mean, and the cotangent of the result."""

    def layer(x, w):
        query = checkpoint_name(x @ w, "query")
        mean = checkpoint_name(jnp.sin(query).sum(1), "norm_mean")
        return jnp.cos(query) * (jnp.sin(mean) * jnp.exp(x).sum(1))[:, None]

    policy = jax.checkpoint_policies.save_only_these_names("query", "norm_mean")
    stored = host_residuals.checkpoint(layer, policy=policy, prevent_cse=False)
    gradient = jax.grad(lambda w, x: stored(x, w).sum())
    traced = jax.make_jaxpr(gradient)(jnp.ones((3, 4)), jnp.ones((5, 3)))
    (backward,) = [equation for equation in traced.eqns if "policy" in equation.params]
    read = [(v.aval.shape, v.aval.memory_space == jax.memory.Space.Host) for v in backward.invars]
    assert sorted(read) == [((5,), False), ((5, 3), True), ((5, 4), False), ((5, 4), True)]


def test_a_group_may_be_as_large_as_the_largest_parameter():
    """Sizes 3, 5, 2, 3 and 5: the third and the fourth have five elements together."""
    spec = {name: Param((size,), ("embed",), "vector") for name, size in zip("abcde", (3, 5, 2, 3, 5), strict=True)}
    groups = [[path for path, p in flat_spec(group).items() if not p.frozen] for group in offload.groups(spec)]
    assert groups == [["a"], ["b"], ["c", "d"], ["e"]]


def test_groups_are_in_order_and_no_larger_than_the_largest_parameter():
    cfg, _, _ = build("adamw", "llama3", {}, {}, "optimizer")
    spec = families.spec(cfg.model)
    sizes = {path: int(np.prod(p.shape)) for path, p in flat_spec(spec).items()}
    groups = [[path for path, p in flat_spec(group).items() if not p.frozen] for group in offload.groups(spec)]
    assert [path for group in groups for path in group] == list(sizes)
    totals = [sum(sizes[path] for path in group) for group in groups]
    assert max(totals) == max(sizes.values())
    assert all(a + sizes[group[0]] > max(totals) for a, group in zip(totals, groups[1:], strict=False))


def test_a_bad_step_leaves_the_state_as_it_was(seed):
    cfg, ctx, abstract = build("adamw", "llama3", {"fsdp": 2}, {}, "both")
    step = assemble.jit_train_step(cfg, ctx, abstract)
    batch = batch_of(cfg, ctx, seed)
    state, _ = step(make_state(Recipe.of(cfg), ctx, abstract), batch)
    before = {path: np.array(x) for path, x in flatten(state).items()}
    batch["loss_weights"] = batch["loss_weights"] * np.float32("inf")
    state, metrics = step(state, batch)
    assert metrics["skipped"] == 1
    after = {path: np.array(x) for path, x in flatten(state).items()}
    changed = [path for path in before if not np.array_equal(before[path], after[path])]
    assert changed == ["step", "skipped", "skipped_in_a_row"]


@pytest.mark.parametrize("pipe", [1, pytest.param(2, marks=SLOW)])
def test_a_run_resumes_with_and_without_offload(rng, tmp_path, pipe):
    """With stages of two chunks, a checkpoint has the layers in another order than the run."""
    mesh = {"pipe": pipe} if pipe > 1 else {"fsdp": 2}

    def layout_of(where):
        cfg, ctx, abstract = build("adamw", "llama3", mesh, {}, where)
        if pipe > 1:
            model = dataclasses.replace(cfg.model, num_layers=4)
            pipeline = PipelineConfig(schedule="interleaved_1f1b", microbatches=2, chunks=2)
            cfg = dataclasses.replace(cfg, model=model, pipeline=pipeline)
            ctx = make_context(cfg, ctx.layout.mesh)
            abstract = abstract_state(Recipe.of(cfg), ctx)
            assert not ctx.layout.pipeline.stages.is_layer_order
        return abstract, checkpoint_layout(Recipe.of(cfg), ctx, abstract)

    abstract, layout = layout_of("optimizer")
    drawn = jax.tree.map(lambda a: rng.standard_normal(a.shape).astype(a.dtype), abstract)
    state = jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), drawn, abstract)
    expected = {path: np.array(x) for path, x in flatten(layout.pack(state)).items()}
    with store.Checkpoints(CheckpointConfig(), tmp_path) as checkpoints:
        checkpoints.save(1, layout.pack(state), {})
    for where in ("none", "optimizer"):
        abstract, layout = layout_of(where)
        restored = layout.unpack(store.restore(tmp_path, 1, layout.abstract))
        assert jax.tree.map(lambda a: a.sharding, restored) == jax.tree.map(lambda a: a.sharding, abstract)
        for path, value in flatten(layout.pack(restored)).items():
            assert np.array_equal(value, expected[path]), (where, path)


@SLOW
def test_complete_runs_resume_bit_for_bit_across_a_switch(tmp_path):
    """Two runs to the end, and each of them again from its middle with the other value of `train.offload`."""
    (tmp_path / "text.txt").write_text("".join(p.read_text() for p in sorted((test_train.ROOT / "docs").glob("*.md"))))
    argv = [*test_train.SMALL, f"--data.path={tmp_path / 'text.txt'}", "--train.steps=8", "--sample.prompts=[]"]
    ends = {}
    for where, other in (("none", "both"), ("both", "none")):
        run, again = tmp_path / where, tmp_path / f"{where}-{other}"
        test_train.run(*argv, f"--run.dir={run}", f"--train.offload={where}")
        shutil.copytree(run, again)
        shutil.rmtree(again / "checkpoints" / "8")
        out, _ = test_train.run(*argv, f"--run.dir={again}", f"--train.offload={other}")
        assert "resumed from step 4" in out
        assert ("saves nothing on a CPU" in out) == (other == "both")
        ends |= {folder: test_train.arrays(folder / "checkpoints" / "8") for folder in (run, again)}
    straight, *others = ends.values()
    for arrays in others:
        for (path, a), (of_other, b) in zip(straight, arrays, strict=True):
            assert path == of_other
            assert np.array_equal(a, b), path


def test_devices_that_do_not_read_the_memory_of_the_host_are_refused():
    device = mock.Mock(device_kind="Toy", platform="toy")
    device.addressable_memories.return_value = [mock.Mock(kind="device")]
    with pytest.raises(ConfigError, match=r"train.offload=both needs devices .* Toy has only device. Use"):
        offload.check_memory(TrainConfig(offload="both"), [device])
    assert offload.check_memory(TrainConfig(), [device]) is None
    on_cpu = offload.check_memory(TrainConfig(offload="optimizer"), jax.devices())
    assert on_cpu == "offload  train.offload=optimizer saves nothing on a CPU: the host's memory is the device's"


def test_settings_that_need_a_check_of_the_update_are_refused():
    cfg, ctx, _ = build("adamw", "llama3", {}, {}, "optimizer")
    cfg = dataclasses.replace(cfg, optim=OptimConfig(eps=1e-38))
    with pytest.raises(ConfigError, match=r"cannot check whether an update is finite, as optim.eps=1e-38"):
        assemble.make_train_step(cfg, ctx)
    assemble.make_train_step(dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, offload="residuals")), ctx)


def test_layers_run_in_a_loop_on_gpus():
    cfg, ctx, _ = build("adamw", "llama3", {}, {}, "residuals")
    assert make_context(cfg, ctx.layout.mesh, "gpu").ops.layers == "scan"
    cfg, ctx, _ = build("adamw", "llama3", {}, {}, "optimizer")
    assert make_context(cfg, ctx.layout.mesh, "gpu").ops.layers == "unrolled"


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "offload.json"


@pytest.mark.parametrize(("chip", "name"), [(chip, name) for chip in bytes_of.TARGETS for name in bytes_of.CASES])
def test_the_planner_counts_what_the_compiler_made(chip, name):
    """The bytes were compiled for eight H100 and eight v5p, by benchmarks/offload.py."""
    row = json.loads(RESULTS.read_text())["cases"][chip][name]
    found = bytes_of.formula(bytes_of.CASES[name], chip)
    assert found == {name: row[name] for name in found}  # the file has the formula of today
    assert found["formula_arguments"] == pytest.approx(row["arguments"], rel=1e-3)
    on_host = sum(found["formula_host"].values())
    assert on_host == pytest.approx(row["host"], rel=2e-3)  # XLA pads vectors
    copied = dict.fromkeys((planned.TO_HOST, planned.TO_DEVICE), on_host) if on_host else {}
    assert row["copies"] == pytest.approx(copied, rel=2e-3)
    # What XLA has of the copies on the device differs: the formula says between 0.6 and 1.4 times what is saved.
    plain = json.loads(RESULTS.read_text())["cases"][chip][f"none, {name.partition(', ')[2]}"]
    saved, expected = (
        total(plain) - total(row) for total in (lambda r: r["arguments"] + r["temporary"], lambda r: r["formula_bytes"])
    )
    assert 0.6 * saved <= expected <= 1.4 * saved


def test_a_step_waits_for_its_copies():
    """By hand: bytes by 64 GB/s, against the seconds of the layers."""
    cfg = dataclasses.replace(bytes_of.CASES["both, remat selective"])

    def times(accum, **more):
        train = dataclasses.replace(cfg.train, grad_accum=accum, **more)
        job = Job(dataclasses.replace(cfg, train=train), memory.context(cfg, 8, "gpu"))
        time = step_time(job, ChipLimits(CHIPS["h100"]))
        return time, estimate.host_memory(job, job.state)

    time, on_host = times(1)
    state = on_host.pop("optimizer state") / 64e9
    (residuals,) = on_host.values()
    assert time.exposed["optimizer state from and to the host"] == pytest.approx(state)
    assert time.hidden["optimizer state from and to the host"] == 0
    name = "residuals to and from the host"
    backward = time.layers + time.recomputation - time.forward
    each = residuals / 64e9
    assert time.forward < each
    waits = each - time.forward + max(0, each - backward)
    assert time.exposed[name] == pytest.approx(waits)
    assert time.exposed[name] + time.hidden[name] == pytest.approx(2 * each)
    assert time.total == pytest.approx(
        time.layers + time.recomputation + time.head + time.update + sum(time.exposed.values())
    )
    job = Job(cfg, memory.context(cfg, 8, "gpu"))
    copied = figures.copy_figures(job, ChipLimits(CHIPS["h100"]))
    assert [figure.value for figure in copied] == [state * 64e9, residuals]
    several, on_host = times(4)
    assert several.exposed[name] + several.hidden[name] == pytest.approx(2 * 4 * sum(list(on_host.values())[1:]) / 64e9)
    plain, none = times(1, offload="none")
    assert not none
    assert plain.exposed.keys() == {"fsdp"}
    with pytest.raises(ConfigError, match=r"no source has the rate of trn2. Use train.offload=none, or"):
        step_time(job, ChipLimits(CHIPS["trn2"]))


def test_only_one_of_the_passes_waits():
    """On a GB200, the copies to the host take longer than the forward pass, and less time than the backward pass."""
    cfg = bytes_of.CASES["both, remat selective"]
    job = Job(cfg, memory.context(cfg, 8, "gpu"))
    time = step_time(job, ChipLimits(CHIPS["gb200"]))
    _, residuals = estimate.host_memory(job, job.state).values()
    each = residuals / 225e9
    assert time.forward < each < time.layers + time.recomputation - time.forward
    assert time.exposed["residuals to and from the host"] == pytest.approx(each - time.forward)


def test_a_cpu_has_one_memory():
    cfg = bytes_of.CASES["both, remat selective"]
    job = Job(cfg, memory.context(cfg, 8, "cpu"))
    assert estimate.host_memory(job, job.state) == {}
    without = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, offload="none"))
    other = Job(without, memory.context(without, 8, "cpu"))
    parts = [sum(estimate.memory(each, *estimate.abstract_inputs(each)).values()) for each in (job, other)]
    assert parts[0] == parts[1]


PROGRAM = """HloModule toy

%body (p: (s32[], f32[8,4,16])) -> (s32[], f32[8,4,16]) {
  %up = ((f32[8,4,16]{2,1,0:T(8,128)S(5)}, f32[1,4,16]{2,1,0}, s32[], s32[]), f32[8,4,16]{2,1,0:S(5)}, u32[]{:S(2)}) dynamic-update-slice-start(%a, %b, %i, %j)
  %done = f32[8,4,16]{2,1,0:S(5)} dynamic-update-slice-done(%up)
  %down = ((f32[8,4,16]{2,1,0:S(5)}, s32[], s32[]), f32[1,4,16]{2,1,0}, u32[]) fusion-start(%done, %i, %j), kind=kCustom, calls=%copying
  ROOT %t = (s32[], f32[8,4,16]{2,1,0:S(5)}) tuple(%i, %done)
}

%condition (p: (s32[], f32[8,4,16])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (a: f32[100], b: bf16[30]) -> f32[100] {
  %a = f32[100]{0:S(5)} parameter(0)
  %start = (f32[100]{0}, f32[100]{0:S(5)}, u32[]) copy-start(%a)
  %b = bf16[30]{0} parameter(1)
  %plain = bf16[30]{0:S(5)} copy(%b)
  %on_chip = (f32[50]{0:S(1)}, f32[50]{0}, u32[]) copy-start(%c)
  %loop = (s32[], f32[8,4,16]{2,1,0:S(5)}) while(%t), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"8"}}
  ROOT %back = (f32[100]{0:S(5)}, f32[100]{0}, u32[]) copy-start(%new)
}
"""  # noqa: E501


def test_copies_of_a_program_are_counted_by_hand():
    residuals = 8 * 4 * 4 * 16
    found = planned.host_copies(PROGRAM)
    assert found == {planned.TO_HOST: residuals + 400 + 2 * 30, planned.TO_DEVICE: residuals + 400}
