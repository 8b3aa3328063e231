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

from jaxstack import train
from jaxstack.config import ConfigError, DebugConfig
from jaxstack.debug import eager
from jaxstack.models import layers
from jaxstack.models.context import Context
from jaxstack.sharding import make_mesh
from jaxstack.training.state import abstract_state, make_state
from jaxstack.training.step import jit_train_step

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


@pytest.mark.slow
def test_an_eager_step_is_that_of_the_compiled_program(monkeypatch):
    """Each of two layers has a breakpoint, which stops once, under recomputation too."""
    cfg = meshes.config("gpt2", {}, remat="selective")
    mesh = make_mesh(cfg.mesh, cfg.microbatch_size, jax.devices()[:1])
    ctx = Context.create(cfg, mesh)
    abstract = abstract_state(cfg, ctx)
    batch = jax.device_put(meshes.random_batch(0, False, cfg.model, cfg.data.batch_size), ctx.sharding(ctx.batch))
    stops, real = [], layers.mlp

    def mlp(cfg, params, x, ctx):
        breakpoint()
        return real(cfg, params, x, ctx)

    monkeypatch.setattr(eager.Debugger, "set_trace", lambda self, frame: stops.append(frame.f_locals["x"].shape))
    expected = jit_train_step(cfg, ctx, abstract)(make_state(cfg, ctx, abstract), batch)
    monkeypatch.setattr(layers, "mlp", mlp)
    found = eager.make_eager_step(cfg, ctx, abstract)(make_state(cfg, ctx, abstract), batch)
    assert stops == [(cfg.data.batch_size, cfg.data.seq_len, cfg.model.d_model)] * cfg.model.num_layers
    # float32: XLA fuses operations, which rounds otherwise.
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-4, atol=2e-6)


def test_a_mesh_is_refused():
    cfg = meshes.config("gpt2", {"data": 2})
    cfg = dataclasses.replace(cfg, debug=DebugConfig(eager=True))
    ctx = Context.create(cfg, make_mesh(cfg.mesh, cfg.microbatch_size, jax.devices()[:2]))
    with pytest.raises(ConfigError, match=r"one device, but the mesh has 2\. Set mesh\.data=1"):
        train.make_step(cfg, ctx, abstract_state(cfg, ctx))


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
