"""Eager steps: `breakpoint()` in a model's code stops and sees arrays, and the step is that of the compiled program."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_meshes as meshes

from jaxstack.config import ConfigError, DebugConfig, PipelineConfig
from jaxstack.debug import eager
from jaxstack.families.context import make_context
from jaxstack.models import layers
from jaxstack.sharding import make_mesh
from jaxstack.training.assemble import jit_train_step
from jaxstack.training.state import Recipe, abstract_state, make_state

ROOT = Path(__file__).parents[2]


def test_breakpoints_stop_at_arrays_and_pass_over_tracers(monkeypatch):
    stops = []
    monkeypatch.setattr(eager.Debugger, "set_trace", lambda self, frame: stops.append(frame.f_locals["x"]))

    def f(x):
        breakpoint()
        return x * 2

    with eager.breakpoints():
        f(jnp.ones(2))
        jax.grad(lambda x: f(x).sum())(jnp.ones(2))
        jax.jit(f)(jnp.ones(2))
    assert [type(x).__name__ for x in stops] == ["ArrayImpl"]
    assert sys.breakpointhook is sys.__breakpointhook__


def test_operations_on_a_mesh_are_compiled_once(rng):
    """JAX alone would compile each of them in each call."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    rows = jax.sharding.PartitionSpec("data")
    f = jax.shard_map(lambda x: jnp.sin(x) * 3, mesh=mesh, in_specs=rows, out_specs=rows)
    x = jax.device_put(rng.normal(size=(4, 5)).astype("float32"), jax.sharding.NamedSharding(mesh, rows))
    compiled = []

    def count(event, seconds, **_):
        compiled.extend([event] * event.endswith("backend_compile_duration"))

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        with jax.disable_jit(), eager.keep_programs():
            f(x)
            assert compiled
            compiled.clear()
            np.testing.assert_allclose(f(x), np.sin(np.asarray(x)) * 3, rtol=1e-6)  # float32's sine
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert not compiled


@pytest.mark.matrix
@pytest.mark.parametrize("axis", ["", "fsdp", "pipe"])
def test_an_eager_step_is_that_of_the_compiled_program(monkeypatch, axis):
    """Each of two layers has a breakpoint, which stops once, under recomputation too; on stages once in each tick."""
    cfg = meshes.config("gpt2", {axis: 2} if axis else {}, remat="selective")
    cfg = dataclasses.replace(cfg, pipeline=PipelineConfig(microbatches=2))
    devices = 2 if axis else 1
    mesh = make_mesh(cfg.mesh, cfg.microbatch_size, jax.devices()[:devices])
    ctx = make_context(cfg, mesh)
    abstract = abstract_state(Recipe.of(cfg), ctx)
    batch = jax.device_put(
        meshes.random_batch(0, False, cfg.model, cfg.data.batch_size), ctx.layout.sharding(ctx.layout.batch)
    )
    stops, real = [], layers.mlp

    def mlp(cfg, params, x, ctx):
        breakpoint()
        return real(cfg, params, x, ctx)

    monkeypatch.setattr(eager.Debugger, "set_trace", lambda self, frame: stops.append(frame.f_locals["x"].shape))
    expected = jit_train_step(cfg, ctx, abstract)(make_state(Recipe.of(cfg), ctx, abstract), batch)
    monkeypatch.setattr(layers, "mlp", mlp)
    found = eager.make_eager_step(cfg, ctx, abstract)(make_state(Recipe.of(cfg), ctx, abstract), batch)
    rows = cfg.data.batch_size // devices
    # Two microbatches run through two stages in three ticks; a stage has one of the layers.
    assert stops == [(rows, cfg.data.seq_len, cfg.model.d_model)] * (3 if axis == "pipe" else cfg.model.num_layers)
    # float32: XLA fuses operations, which rounds otherwise.
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize(("family", "schedule"), [("gpt2", "zb1"), ("t5", "gpipe")])
def test_a_pipeline_whose_stages_have_other_trip_counts_is_refused(family, schedule):
    cfg = meshes.config(family, {"pipe": 2})
    pipeline = PipelineConfig(schedule=schedule, microbatches=2, split=(".*",))
    cfg = dataclasses.replace(cfg, debug=DebugConfig(eager=True), pipeline=pipeline)
    ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.microbatch_size, jax.devices()[:2]))
    with pytest.raises(ConfigError, match=rf"mesh\.pipe=2 has .*pipeline\.schedule={schedule}\. Use"):
        eager.make_eager_step(cfg, ctx, abstract_state(Recipe.of(cfg), ctx))


def test_an_array_of_a_device_is_not_a_tracer(monkeypatch, capsys):
    """Within `jax.shard_map` there are arrays; `show` has the devices in their first dimension."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    rows = jax.sharding.PartitionSpec("data")
    shown = []

    def show(self, frame):
        self.curframe, self.curframe_locals = frame, frame.f_locals
        self.do_show("x")
        shown.append(capsys.readouterr().out)

    monkeypatch.setattr(eager.Debugger, "set_trace", show)

    def work(x):
        breakpoint()
        return x

    with jax.disable_jit(), eager.breakpoints():
        jax.shard_map(work, mesh=mesh, in_specs=rows, out_specs=rows)(jnp.ones((4, 3)))
    assert len(shown) == 1
    assert shown[0].startswith("x  float32 2x2x3: 1 to 1")


@pytest.mark.slow
def test_a_script_for_the_debugger_sees_values(tmp_path):
    """A real process, in which the norm of the model has a breakpoint, and a debugger that reads from a pipe."""
    text = tmp_path / "text.txt"
    text.write_text("all the words of this text are here, one after the other. " * 60)
    patch = """
from jaxstack.models import layers
real = layers.norm
def norm(cfg, params, x, ctx, kind=None):
    breakpoint()
    return real(cfg, params, x, ctx, kind)
layers.norm = norm
import sys
from jaxstack.cli import parser
parser.run("train.py", ["train", *sys.argv[1:]])
"""
    flags = f"""--run.dir={tmp_path}/run --data.source=path --data.path={text} --data.seq_len=16 --data.batch_size=4
        --mesh.data=1 --model.num_layers=2 --model.d_model=16 --model.num_heads=2 --train.steps=2 --train.eval_steps=1
        --debug.eager=true"""
    commands = "p type(x).__name__\nshow x\nshow params\nshow no_name\nc\np x.shape\nq\n"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", patch, *flags.split()], input=commands, capture_output=True, text=True, env=env
    )
    assert done.returncode == 130, done.stderr
    assert "stopped in the debugger" in done.stderr
    out = done.stdout
    assert "'ArrayImpl'" in out
    assert "x  float32 4x16x16: " in out
    assert "scale  float32 16: 1 to 1, RMS 1" in out
    assert "NameError: name 'no_name' is not defined" in out
    assert "(4, 16, 2, 8)" in out  # the queries of the first layer
