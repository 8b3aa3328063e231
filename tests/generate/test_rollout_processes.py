"""Reinforcement learning in several processes: the same run as in one, also resumed in the middle of a rollout."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
FLAGS = [
    "--model.num_layers=1", "--model.d_model=16", "--model.d_ff=32", "--model.num_heads=2", "--data.seq_len=48",
    "--data.batch_size=8", "--train.eval_every=6", "--train.eval_steps=1", "--run.log_every=1", "--checkpoint.every=2",
    "--sample.prompts=[]", "--optim.warmup_steps=0", "--optim.schedule=constant", "--data.path=task:addition:1",
    "--data.eval_fraction=0.3", "--optim.lr=3e-3", "--optim.name=adamw",
]  # fmt: skip
RL = ["--data.source=prompts", "--rl.tokens=4", "--rl.group=4", "--rl.updates=4", "--rl.kl_weight=0.1"]
REWARDS = """
import os, pathlib

def letters(completion, answer):
    with open(pathlib.Path(__file__).parent / f"calls_{os.getpid()}", "a") as file:
        file.write("x")
    return sum(map(str.isalpha, completion)) + 0.1 * len(answer)

def fails(completion):
    if "3" in completion or len(completion) > 1:
        raise RuntimeError("no")
    return 0.0
"""


def start(*argv, devices):
    env = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *argv],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
    )  # fmt: skip


def start_two(*argv):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = [f"--distributed.coordinator=127.0.0.1:{port}", "--distributed.num_processes=2"]
    return [start(*argv, *common, f"--distributed.process_id={i}", devices=1) for i in range(2)]


def finish(*processes, code=0):
    try:
        outputs = [process.communicate(timeout=550) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [code] * len(processes), outputs
    return outputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    (folder / "rewards.py").write_text(REWARDS)
    chat = [*FLAGS, "--data.source=chat", f"--run.dir={folder}/chat", "--train.steps=2", "--mesh.data=1"]
    finish(start(*chat, devices=1))
    return folder


def flags(folder, name, steps, reward="letters"):
    return [
        *FLAGS, *RL, f"--run.init_from={folder}/chat", f"--train.steps={steps}", f"--run.dir={folder / name}",
        f"--rl.rewards=[{folder}/rewards.py:{reward}]", "--mesh.data=1", "--mesh.fsdp=2",
    ]  # fmt: skip


def steps(folder, name):
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "grad_norm" in line]


NAMES = ("loss", "reward", "reward_std", "kl", "ratio_max", "ratio_min", "length", "groups_without_spread", "grad_norm")


def shown(records):
    return [[record[name] for name in NAMES] for record in records]


@pytest.mark.slow
def test_two_processes_sample_and_learn_as_one_and_resume_in_a_rollout(folder):
    finish(*start_two(*flags(folder, "two", 6)))
    calls = sum(len(file.read_text()) for file in folder.glob("calls_*"))
    assert len([*folder.glob("calls_*")]) == 2, "both processes reward"
    assert calls == 2 * 4 * 8 + 2, "each completion of two rollouts of four steps, and of an evaluation, once"
    finish(start(*flags(folder, "one", 6), devices=2))
    both = [shown(steps(folder, name)) for name in ("two", "one")]
    assert len(both[0]) == 6
    np.testing.assert_allclose(both[0], both[1], rtol=2e-5, atol=1e-6)  # processes add gradients in another order
    ratios = [(record["ratio_min"], record["ratio_max"]) for record in steps(folder, "two")]
    assert [ratio == (1, 1) for ratio in ratios] == [True, False, False, False, True, False]

    # A checkpoint of step 2 is within the rollout of steps 1 to 4.
    finish(*start_two(*flags(folder, "parts", 2)))
    assert [file.name for file in (folder / "parts" / "rollouts").iterdir()] == ["2.npz"]
    shutil.copytree(folder / "parts", folder / "lost")
    (folder / "lost" / "rollouts" / "2.npz").write_bytes(b"PK")
    finish(*start_two(*flags(folder, "parts", 6)))
    assert shown(steps(folder, "parts")) == both[0], "bit for bit"
    (out, _), _ = finish(*start_two(*flags(folder, "lost", 4)))
    assert "2.npz with completions for the next steps cannot be read" in " ".join(out.split())


@pytest.mark.slow
def test_stages_in_two_processes_learn_as_one_device(folder):
    deep = ["--model.num_layers=2", f"--run.init_from={folder}/deep"]
    chat = [*FLAGS, *deep[:1], "--data.source=chat", f"--run.dir={folder}/deep", "--train.steps=2", "--mesh.data=1"]
    finish(start(*chat, devices=1))
    sgd = [*deep, "--optim.name=sgd", "--optim.lr=0.1"]  # Adam divides small gradients by their size
    stages = ["--mesh.fsdp=1", "--mesh.pipe=2", "--train.remat=full"]
    finish(start(*flags(folder, "alone", 5), *sgd, "--mesh.fsdp=1", devices=1))
    finish(*start_two(*flags(folder, "stages", 5), *sgd, *stages))
    both = [shown(steps(folder, name)) for name in ("stages", "alone")]
    assert len(both[0]) == 5
    np.testing.assert_allclose(both[0], both[1], rtol=1e-4, atol=1e-6)  # stages sum microbatches in another order
    ratios = [(record["ratio_min"], record["ratio_max"]) for record in steps(folder, "stages")]
    assert [ratio == (1, 1) for ratio in ratios] == [True, False, False, False, True]


@pytest.mark.slow
def test_a_reward_that_fails_in_one_process_ends_both(folder):
    for _, err in finish(*start_two(*flags(folder, "fails", 2, "fails")), code=2):
        assert "rewards.py:fails raised RuntimeError: no for task:addition:1, row" in " ".join(err.split())
