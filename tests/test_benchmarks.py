"""Runs the benchmarks of accelerators on tiny shapes, so that errors show before a GPU is rented."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gpu_check
import jax.numpy as jnp
import pytest

ROOT = Path(__file__).parent.parent
ALONE = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}


def run(script: str, *words: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--small", *words]
    out = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | ALONE)
    assert out.returncode == 0, out.stderr[-3000:]
    return out.stdout


def test_kernels(tmp_path):
    said = run("kernels.py", "--ops", "norm", "gelu", "--rounds", "1", "--out", str(tmp_path))
    (path,) = tmp_path.glob("kernels_*.json")
    found = json.loads(path.read_text())
    from jaxstack.kernels import OP_IMPLEMENTATIONS

    by_op = {case["op"]: case for case in found["cases"]}
    for op in ("norm", "gelu"):
        ran = {row["implementation"] for row in by_op[op]["rows"]}
        # Every implementation has run, or has a reason why not.
        assert ran | set(by_op[op]["left_out"]) >= set(OP_IMPLEMENTATIONS[op]), said
        assert all(row["ms"] > 0 for row in by_op[op]["rows"])
    assert {"xla", "custom_vjp", "copy"} <= {row["implementation"] for row in by_op["norm"]["rows"]}


@pytest.mark.slow
def test_every_operation_has_a_case():
    said = run("kernels.py", "--rounds", "1")
    assert "no cases for layers, update, decode\n" in said


@pytest.mark.slow
def test_the_whole_step(tmp_path):
    """Runs both families on our side, and on the side of torch if the extra `[parity]` is installed."""
    words = ("--rounds", "2", "--steps", "2", "--remats", "selective", "--out", str(tmp_path))
    said = run("train_gpu.py", *words)
    jobs = json.loads((tmp_path / "train_gpu.json").read_text())["jobs"]
    assert set(jobs) == {"dense_2048", "moe_2_of_8"}, said
    for job in jobs.values():
        ours = job["sides"]["jaxstack"]
        assert ours["tokens_per_s"] > 0
        assert ours["batch"] == 4  # the largest one
        assert ours["mfu"] is None  # the peak of a CPU is not known
        for peer, ratio in job["speed_against"].items():
            assert ratio > 0, peer
            # The same model on the same tokens: ln(256) at the first step, and slightly less after memorizing.
            assert abs(job["sides"][peer]["last_loss"] - ours["last_loss"]) < 1


@pytest.mark.slow
def test_the_check_of_a_device(tmp_path):
    """Values and gradients of every kernel and of a whole step; a wrong kernel is an error."""
    run("gpu_check.py", "--out", str(tmp_path))
    (path,) = tmp_path.glob("gpu_check_*.json")
    rows = json.loads(path.read_text())["cases"]
    assert {"step: dense", "step: experts"} < set(rows)
    for case, ways in rows.items():
        assert ways.keys() - {"xla", "ragged"}, case  # something was compared
        assert all(row["ok"] for row in ways.values()), case
    x = jnp.arange(1.0, 9)
    ways = {"xla": jnp.sin, "wrong": lambda x: 1.001 * jnp.sin(x), "fails": lambda x: x @ jnp.ones(3)}
    found = gpu_check.compare(ways, (x,), jnp.sin(x), "xla", "float32")
    assert [row["ok"] for row in found.values()] == [True, False, False]
