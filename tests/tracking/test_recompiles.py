"""Functions that are compiled again are reported with the arguments that changed, and others are not."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxstack.tracking.recompiles import Recompile, Recompiles

ROOT = Path(__file__).parents[2]
MESH = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])


def place(x, *spec):
    return jax.device_put(jnp.asarray(x), NamedSharding(MESH, PartitionSpec(*spec)))


def step(state, batch):
    total = sum(a.sum() for a in batch.values())
    return jax.tree.map(lambda a: a + total.astype(a.dtype), state)


STATE = {"params": {"w": np.zeros((4, 8), "float32")}, "step": np.int32(0)}
BATCH = {"tokens": np.zeros((4, 16), "int32")}


def first():
    state = {"params": {"w": place(STATE["params"]["w"], "fsdp")}, "step": place(STATE["step"])}
    return state, {"tokens": place(BATCH["tokens"], "fsdp")}


def wider(state, batch):
    return state, {"tokens": place(np.zeros((4, 32), "int32"), "fsdp")}


def narrower_type(state, batch):
    return {**state, "params": {"w": state["params"]["w"].astype("bfloat16")}}, batch


def replicated(state, batch):
    return {**state, "params": {"w": place(STATE["params"]["w"])}}, batch


def more(state, batch):
    return state, {**batch, "weights": place(np.zeros((4, 16), "float32"), "fsdp")}


def both(state, batch):
    return state, {"tokens": place(np.zeros((2, 16), "int32"), None, "tensor")}


def on_host(state, batch):
    return state, {"tokens": np.zeros((4, 16), "int32")}


MESH_TEXT = "on fsdp=2, tensor=2"
CHANGES = {
    "shape": (wider, ["batch/tokens: int32[4,16] -> int32[4,32]"]),
    "dtype": (narrower_type, ["state/params/w: float32[4,8] -> bfloat16[4,8]"]),
    "sharding": (replicated, [f"state/params/w: sharding P('fsdp') {MESH_TEXT} -> sharding P() {MESH_TEXT}"]),
    "tree": (more, [f"batch/weights: new, float32[4,16], sharding P('fsdp') {MESH_TEXT}"]),
    "both": (
        both,
        [
            f"batch/tokens: int32[4,16], sharding P('fsdp') {MESH_TEXT} -> "
            f"int32[2,16], sharding P(None, 'tensor') {MESH_TEXT}"
        ],
    ),
    "host": (on_host, [f"batch/tokens: sharding P('fsdp') {MESH_TEXT} -> on the host"]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_argument_that_changed_is_named(name):
    change, expected = CHANGES[name]

    def own(state, batch):  # JAX would have the programs of a function of an earlier case
        return step(state, batch)

    compiled = jax.jit(own)
    with Recompiles() as recompiles:
        state, batch = first()
        compiled(state, batch)
        compiled(*first())
        assert recompiles.take() == []
        compiled(*change(state, batch))
        (found,) = recompiles.take()
    assert (found.function, found.reasons) == ("own", expected)
    assert found.lines()[0].startswith("compiled own again, in ")


def test_a_donated_state_and_the_nearest_earlier_call():
    """The differences are those to the most similar of all earlier calls."""
    compiled = jax.jit(lambda state, batch: step(state, batch), donate_argnums=0)
    with Recompiles() as recompiles:
        compiled(*first())
        compiled(*both(*first()))
        recompiles.take()
        state, _ = narrower_type(*first())
        compiled(state, both(*first())[1])
        assert [found.reasons for found in recompiles.take()] == [CHANGES["dtype"][1]]


def test_what_is_expected_is_not_reported():
    """JAX's own functions, another thread, what is compiled ahead, and what is declared as expected."""
    f, g, h = jax.jit(lambda x: x * 2), jax.jit(lambda x: x * 3), jax.jit(lambda x: x * 4)
    with Recompiles() as recompiles:
        for size in (2, 3):
            x = jnp.ones(size) + jnp.arange(size)
            f.lower(x).compile()
            thread = threading.Thread(target=h, args=(x,))
            thread.start()
            thread.join()
            with recompiles.expected():
                g(x)
        assert recompiles.take() == []
        g(jnp.ones(4))
        g(jnp.ones(5))
        assert len(recompiles.take()) == 1
    f(jnp.ones(6))
    f(jnp.ones(7))
    assert recompiles.take() == []


def test_a_python_number_and_many_arguments():
    f = jax.jit(lambda x, *rest: x)
    with Recompiles() as recompiles:
        f(jnp.float32(1))
        f(jnp.asarray(1.0))
        f(1.0)
        kinds = [found.reasons for found in recompiles.take()]
    assert kinds[0] == ["x: float32[] -> float32[] of a Python number"]
    lines = Recompile("f", [f"batch/{i}: int32[1] -> int32[2]" for i in range(7)], 1.25).lines()
    assert lines[0] == "compiled f again, in 1.2 s: batch/0: int32[1] -> int32[2]"
    assert lines[1:] == [f"         batch/{i}: int32[1] -> int32[2]" for i in (1, 2, 3)] + [
        "         and 3 more arguments"
    ]


@pytest.mark.matrix
def test_a_run_reports_a_batch_of_another_shape_and_a_read(tmp_path):
    """The loader of a real run makes a shorter batch; with `train.debug`, the loop then reads the loss."""
    (tmp_path / "text.txt").write_text("all the words of this text are here, one after the other. " * 60)
    patch = """
import sys
import jax
from jaxstack.data.loader import DataLoader
real, calls = DataLoader.to_devices, []
def to_devices(self, batch):  # of two steps, an evaluation, and the third step
    calls.append(1)
    whole = real(self, batch)
    return {n: jax.device_put(a[:2], a.sharding) for n, a in whole.items()} if len(calls) == 4 else whole
DataLoader.to_devices = to_devices
if sys.argv.pop(1) == "read":
    from jaxstack.tracking.profiler import Profiler
    run_step = Profiler.run_step
    def read(self, *arguments):
        state, metrics = run_step(self, *arguments)
        print(float(metrics["loss"]))
        return state, metrics
    Profiler.run_step = read
from jaxstack.cli import parser
parser.run("jaxstack", sys.argv[1:])
"""
    flags = f"""train --data.source=path --data.path={tmp_path}/text.txt --data.seq_len=16 --data.batch_size=4
        --mesh.data=2 --model.num_layers=1 --model.d_model=16 --model.num_heads=2 --train.steps=4 --train.eval_steps=1
        --train.eval_every=2 --train.ngram_baseline=false --sample.prompts=[]"""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": str(ROOT)}

    def run(*words):
        words = [sys.executable, "-c", patch, *words[:1], *flags.split(), *words[1:]]
        return subprocess.run(words, capture_output=True, text=True, env=env)

    done = run("no", f"--run.dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("compiled train_step again, in ") == 1
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (event,) = [record for record in records if record.get("event") == "compiled again"]
    assert (event["step"], event["function"]) == (3, "train_step")
    assert "batch/tokens: int32[4,16] -> int32[2,16]" in event["changed"]

    done = run("read", f"--run.dir={tmp_path}/read", "--train.debug=true")
    assert done.returncode == 2, done.stderr
    first, advice = done.stderr.splitlines()
    assert first.startswith("jaxstack train: error: <string>:16 in read reads an array of the devices, float32[]")
    assert advice.startswith("Read it where the step is logged")
