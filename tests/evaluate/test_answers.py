"""Tests of `jaxstack eval --prompts`: what it answers, how it counts, and what it refuses."""

import json

import numpy as np
import pytest

from jaxstack import data
from jaxstack.cli.parser import execute
from jaxstack.config import ConfigError, DataConfig
from jaxstack.config.reading.parse import parse_config
from jaxstack.data.rewarded import RewardedPrompt
from jaxstack.evaluate import answers
from jaxstack.generate.rollouts import Judged
from jaxstack.generate.turns import Completion
from jaxstack.train import main

FLAGS = [
    "--model.num_layers=1", "--model.d_model=16", "--model.d_ff=32", "--model.num_heads=2", "--data.seq_len=48",
    "--data.batch_size=8", "--train.eval_every=4", "--train.eval_steps=1", "--sample.prompts=[]", "--train.steps=2",
]  # fmt: skip
REWARDS = """
def vowels(completion):
    return sum(map("aeiou".count, completion.lower()))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run that was trained a little on conversations, a run on text, prompts, and a reward."""
    folder = tmp_path_factory.mktemp("answers")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "Say {i}"}}\n' for i in range(5)))
    (folder / "long.jsonl").write_text('{"prompt": "Say"}\n' + f'{{"prompt": "{"Say" * 20}"}}\n')
    main(parse_config([*FLAGS, "--data.source=chat", "--data.path=task:addition:1", f"--run.dir={folder}/chat"]))
    return folder


def evaluated(folder, *flags):
    """Returns the results of the command by metric, and the answers that it wrote."""
    before = {*folder.glob("chat/evaluations/*.json")}
    execute(["eval", f"{folder}/chat", f"--scores={folder}/scores.jsonl", *flags])
    (path,) = {*folder.glob("chat/evaluations/*.json")} - before
    results = {one["metric"]: one for one in json.loads(path.read_text())["results"]}
    return results, [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]


def judged(rewards, ended=True):
    row = RewardedPrompt("row", [{"role": "user", "content": "?"}], {})
    completion = Completion([1], np.zeros(1), np.zeros(1))
    return [Judged(row, [1], completion, ended, "", [value], value) for value in rewards]


def test_figures_by_hand():
    """An answer is right from a reward of 1 on, and a prompt is solved by any right answer."""
    found = answers.figures([judged([1.0, 0.0, 0.5, 2.0]), judged([0.99, 0.0, 0.0, 0.0], ended=False)])
    assert {name: values.tolist() for name, values in found.items()} == {
        "pass@1": [0.5, 0.0],
        "pass@4": [1.0, 0.0],
        "reward": [0.875, 0.2475],
        "ended": [1.0, 0.0],
    }


def test_the_prompts_of_a_file_are_answered_and_rewarded(folder, capsys):
    reward = f"--rewards={folder}/rewards.py:vowels"
    prompts = f"--prompts={folder}/prompts.jsonl"
    results, lines = evaluated(folder, prompts, reward, "--completions=3", "--tokens=16")
    assert "pass@3" in capsys.readouterr().out
    assert [line["row"] for line in lines] == [f"{folder}/prompts.jsonl, line {i}" for i in range(1, 6) for _ in "abc"]
    counted = np.array([sum(map("aeiou".count, line["completion"].lower())) for line in lines], float)
    assert [line["score"] for line in lines] == counted.tolist()
    assert {*counted} >= {0.0, 1.0}  # the model is random: both must occur, so that the test can fail
    right = counted.reshape(5, 3) >= 1
    assert results["pass@1"]["value"] == pytest.approx(right.mean())
    assert results["pass@3"]["value"] == pytest.approx(right.any(1).mean())
    assert results["pass@1"]["stderr"] == pytest.approx(right.mean(1).std(ddof=1) / 5**0.5)
    assert results["reward"]["value"] == pytest.approx(counted.mean())
    assert results["ended"]["value"] < 1
    again, same = evaluated(folder, prompts, reward, "--completions=3", "--tokens=16")
    assert (again, same) == (results, lines)
    longer, _ = evaluated(folder, prompts, reward, "--completions=1", "--context=64", "--tokens=30")
    assert longer["reward"]["value"] > results["reward"]["value"]  # longer answers have more vowels
    single, some = evaluated(folder, prompts, reward, "--completions=1", "--limit=2", "--tokens=4")
    assert single.keys() == {"pass@1", "reward", "ended"}
    assert len(some) == 2


def test_the_prompts_of_a_task_are_those_that_runs_hold_out(folder):
    results, lines = evaluated(folder, "--prompts=task:addition:1", "--completions=1", "--tokens=4")
    held_out = data.load(DataConfig(source="prompts", path="task:addition:1", tokenizer="bytes", seq_len=48)).eval
    assert [line["row"] for line in lines] == [held_out.rows[i].name for i in held_out.numbers]
    assert 0 < len(lines) < len(held_out.rows) / 5
    assert results["pass@1"]["rows"] == len(lines)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompts={f}/prompts.jsonl"], "rl.rewards is empty, but data.path=.*prompts.jsonl is not a task"),
        (["--prompts={f}/none.jsonl"], "none.jsonl is not a file"),
        (["--prompts=task:addition:1", "--tokens=40"], "--tokens=40 and the longest prompt .* do not fit"),
        (["--prompts={f}/long.jsonl"], "1 left out, too long for --context=48 .* Raise --context"),
        (["--prompts={f}/long.jsonl", "--context=2"], r"none of \d prompts fits into --context=2 .* Raise --context"),
        (["--prompts=task:addition:1", "--turns=2"], "rl.turns=2, but data.path=task:addition:1 has no tool"),
        (["--text={f}/prompts.jsonl", "--rewards=x:y"], "--rewards=.* is for prompts"),
        (["--text={f}/prompts.jsonl", "--tokens=3"], "--tokens=3 is for prompts"),
        (["--text={f}/prompts.jsonl", "--limit=3"], "--limit=3 is for tasks and prompts"),
        (["--text={f}/prompts.jsonl", "--scores=x"], "--scores=x is for scores of completions"),
        (["--prompts=a", "--preferences=b", "--scores=x"], "--scores=x is one file"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(folder, flags, message):
    with pytest.raises(ConfigError, match=message):
        execute(["eval", f"{folder}/chat", *(flag.format(f=folder) for flag in flags)])
