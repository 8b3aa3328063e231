"""Runs the benchmarks of accelerators on tiny shapes, so that errors show before a GPU is rented."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gpu_check
import jax.numpy as jnp
import kernels
import pytest
import tune

import jaxstack.kernels
from jaxstack.kernels import OP_IMPLEMENTATIONS, tiles

ROOT = Path(__file__).parent.parent
ALONE = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}


def run(script: str, *words: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--small", *words]
    out = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | ALONE)
    assert out.returncode == 0, out.stderr[-3000:]
    return out.stdout


def result(folder: Path, name: str):
    found = json.loads((folder / f"{name}.json").read_text())
    assert found["device"] == "cpu"
    assert found["command"]
    assert found["versions"]["jax"]
    return found


def test_kernels(tmp_path, capsys):
    kernels.main(["--small", "--ops", "norm", "gelu", "--rounds", "1", "--out", str(tmp_path)])
    by_op = {case["op"]: case for case in result(tmp_path, "kernels_cpu_norm_gelu")["cases"]}
    for op in ("norm", "gelu"):
        ran = {row["implementation"]: row for row in by_op[op]["rows"]}
        # Every implementation has run, or has a reason why not.
        assert set(ran) | set(by_op[op]["left_out"]) >= set(OP_IMPLEMENTATIONS[op]), capsys.readouterr().out
        assert all(row["ms"] > 0 for row in by_op[op]["rows"])
        for name in ran.keys() & OP_IMPLEMENTATIONS[op].keys():  # float32: sums of 128 terms, some 1e-7
            assert len(ran[name]["errors"]) == {"norm": 3, "gelu": 2}[op]  # the value and each gradient
            assert max(ran[name]["errors"]) < 1e-5
    assert {"xla", "custom_vjp", "copy"} <= {row["implementation"] for row in by_op["norm"]["rows"]}


def test_a_benchmark_that_is_killed_leaves_its_measurements(tmp_path, monkeypatch):
    rounds = iter(range(10))
    measure = kernels.Loop.measure

    def killed_later(loop):
        if loop.turns and next(rounds) == 9:
            raise KeyboardInterrupt
        measure(loop)

    monkeypatch.setattr(kernels.Loop, "measure", killed_later)
    with pytest.raises(KeyboardInterrupt):  # two implementations, two passes: four calls when they are made, then five
        kernels.main(["--small", "--ops", "gelu", "--rounds", "3", "--out", str(tmp_path)])
    rows = result(tmp_path, "kernels_cpu_gelu")["cases"][0]["rows"]
    assert [row["rounds"] for row in rows] == [1, 1, 1, 1]


def test_block_sizes_are_timed_only_where_values_are_right(tmp_path, monkeypatch):
    """The smallest size of the cross-entropy is made wrong here; the present one stays."""
    loss = jaxstack.kernels.cross_entropy
    monkeypatch.setattr(tiles, "TABLE", dict(tiles.TABLE))
    (before,) = (tiles.TABLE["gpu"].sizes["cross_entropy"][name] for name in ("float32",))

    def wrong(*args, implementation, **options):
        now = tiles.find_tile("cross_entropy", "float32", "gpu")
        return loss(*args, implementation=implementation, **options) * (1 + 1e-3 * (now != before))

    monkeypatch.setattr(jaxstack.kernels, "cross_entropy", wrong)
    tune.main(["--small", "--kernels", "cross_entropy", "--rounds", "1", "--out", str(tmp_path)])
    found = result(tmp_path, "tiles_cpu")["kernels"]["cross_entropy"]["float32"]
    assert [(row["before"], row["ok"], "ms" in row) for row in found["tried"]] == [
        (True, True, True),
        (False, False, False),
    ]
    assert found["best"] == before._asdict()
    assert tiles.find_tile("cross_entropy", "float32", "gpu") == before


@pytest.mark.slow
def test_block_sizes_of_attention(tmp_path, monkeypatch):
    monkeypatch.setattr(tiles, "TABLE", dict(tiles.TABLE))
    tune.main(["--small", "--kernels", "attention_forward", "--rounds", "2", "--out", str(tmp_path)])
    found = result(tmp_path, "tiles_cpu")["kernels"]["attention_forward"]["float32"]
    assert all(row["ok"] and row["ms"] > 0 for row in found["tried"])
    assert len(found["tried"]) == 3
    fastest = min(found["tried"], key=lambda row: row["ms"])["tile"]
    assert found["best"] == fastest == tiles.find_tile("attention_forward", "float32", "gpu")._asdict()


def test_a_wrong_kernel_is_an_error(tmp_path, monkeypatch):
    gelu = jaxstack.kernels.gelu
    wrong = {"saved": 1.001}
    monkeypatch.setattr(
        jaxstack.kernels, "gelu", lambda x, implementation: wrong.get(implementation, 1) * gelu(x, implementation="xla")
    )
    with pytest.raises(SystemExit, match="gelu: exact, 64 x 64, saved"):
        gpu_check.main(["--small", "--ops", "gelu", "--out", str(tmp_path)])
    found = result(tmp_path, "gpu_check_cpu_gelu")
    assert found["wrong"] == ["gelu: exact, 64 x 64, saved"]
    assert [row["ok"] for row in found["cases"]["gelu: exact, 64 x 64"].values()] == [True, False]
    x = jnp.arange(1.0, 9)
    ways = {"xla": jnp.sin, "fails": lambda x: x @ jnp.ones(3), "nan": lambda x: jnp.sqrt(-x)}
    rows = gpu_check.compare(ways, (x,), jnp.sin(x), "xla", "float32")
    assert [row["ok"] for row in rows.values()] == [True, False, False]


@pytest.mark.parametrize("script", [gpu_check])
def test_without_a_gpu(script):
    with pytest.raises(SystemExit, match=r"needs a GPU or a TPU, and JAX finds none\. Use --small"):
        script.main([])


@pytest.mark.slow
def test_every_operation_has_a_case(capsys):
    kernels.main(["--small", "--rounds", "1"])
    assert "no cases for layers, update, decode\n" in capsys.readouterr().out


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
    """Values and gradients of every kernel and of a whole step."""
    gpu_check.main(["--small", "--out", str(tmp_path)])
    rows = result(tmp_path, "gpu_check_cpu")["cases"]
    assert {"step: dense", "step: experts"} < set(rows)
    for case, ways in rows.items():
        assert ways.keys() - {"xla", "ragged"}, case  # something was compared
        assert all(row["ok"] for row in ways.values()), case
