"""The committed result of benchmarks/chat_model.py: it has the commands and figures of the page, and bounds hold."""

import json
import re
from pathlib import Path

import chat_model

ROOT = Path(__file__).parents[2]
RESULT = json.loads((ROOT / "benchmarks/results/chat_model.json").read_text(encoding="utf-8"))
TEXT = (ROOT / "docs/chat_model.md").read_text(encoding="utf-8")


def test_the_commands_of_the_page_were_run():
    assert [step["command"] for step in RESULT["steps"]] == chat_model.commands(TEXT)


def test_two_cores_need_less_than_twenty_minutes():
    """Even if no command used the second core."""
    assert RESULT["cores"] == 2
    assert RESULT["cpu_seconds"] == sum(step["cpu_seconds"] for step in RESULT["steps"]) < 20 * 60


def test_each_step_makes_answers_better_and_the_server_is_right():
    answers, preferred, by_rewards = (RESULT["pass@1"][name] for name in ("answers", "preferred", "by_rewards"))
    assert 0.2 <= answers <= 0.6
    assert preferred > answers + 0.1
    assert by_rewards > preferred + 0.1
    server = RESULT["steps"][-1]
    assert server["answer"] == server["in_browser"] == " ".join(sorted("31295"))


def test_the_page_has_the_figures():
    rows = re.findall(r"^\| (.+) \| (\d+) \| (\d+) \| ([\d.]*)%? ?\|$", TEXT, re.M)
    *steps, (_, cpu, seconds, _) = rows
    assert len(steps) == len(RESULT["steps"])
    assert (cpu, seconds) == (f"{RESULT['cpu_seconds']:.0f}", f"{RESULT['seconds']:.0f}")
    for (_, cpu, seconds, share), step in zip(steps, RESULT["steps"], strict=True):
        assert (cpu, seconds) == (f"{step['cpu_seconds']:.0f}", f"{step['seconds']:.0f}")
        run = re.search(r"--run.dir=runs/(\w+)", step["command"])
        value = run and RESULT["pass@1"].get(run[1])
        assert share == (f"{100 * value:.1f}" if value else "")
    fast = RESULT["with_the_learning_rate_of_the_quickstart"]["too_fast"]
    for value in fast.values():
        assert f"{100 * value:.1f}%" in TEXT
    assert fast["pass@1"] < RESULT["pass@1"]["answers"]
