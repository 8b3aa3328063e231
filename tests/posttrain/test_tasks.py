"""Rows of tasks, their rewards on right and wrong completions, and functions of users as rewards."""

import itertools
import subprocess
import sys
from fractions import Fraction

import pytest

from jaxstack.config import ConfigError
from jaxstack.posttrain import rewards, tasks
from jaxstack.posttrain.rewards import Reward
from jaxstack.posttrain.tasks import arithmetic, gym

PATHS = ["task:addition", "task:addition:4", "task:countdown", "task:countdown:4", "task:letters", "task:sorting:3"]


@pytest.mark.parametrize("path", PATHS)
def test_a_task_rewards_its_own_completions_and_no_others(path):
    task, _ = tasks.find(path)
    for index in range(50):
        row = tasks.row(path, 7, index)
        reward = Reward.of(path, task.reward)
        reward.check(path, row)
        fields = {key: value for key, value in row.items() if key not in ("prompt", "completion")}
        assert reward("row", row["prompt"], f" {row['completion']}\n", fields) == 1
        for wrong in ("", "?", f"{row['completion']}1", row["prompt"], "1" * 10_000):
            assert reward("row", row["prompt"], wrong, fields) == 0


def test_rows_are_functions_of_seed_and_index():
    assert tasks.row("task:addition", 0, 5) == tasks.row("task:addition", 0, 5)
    assert tasks.row("task:addition", 0, 5) != tasks.row("task:addition", 1, 5)
    code = "from jaxstack.posttrain import tasks; print([tasks.row('task:countdown', 3, i) for i in range(5)])"
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert again == f"{[tasks.row('task:countdown', 3, i) for i in range(5)]}\n"


@pytest.mark.parametrize("path", ["task:addition", "task:sorting"])
def test_conversations_and_prompts_have_other_prompts(path):
    sides = [[row["prompt"] for _, row in tasks.rows(path, answered)] for answered in (True, False)]
    assert not {*sides[0]} & {*sides[1]}
    assert min(map(len, sides)) > 1000
    assert all(len({*side}) == len(side) for side in sides)


def reachable(numbers):
    """Returns all values of formulas with each number once, by combining any two of them."""
    if len(numbers) == 1:
        return {numbers[0]}
    values = set()
    for i, j in itertools.permutations(range(len(numbers)), 2):
        rest = [numbers[k] for k in range(len(numbers)) if k not in (i, j)]
        a, b = numbers[i], numbers[j]
        for value in (a + b, a - b, a * b, *([a / b] if b else [])):
            values |= reachable([*rest, value])
    return values


def test_targets_of_countdown_can_be_reached():
    for index in range(20):
        row = tasks.row("task:countdown", 0, index)
        assert row["target"] in reachable([Fraction(number) for number in row["numbers"]])
        assert 1 <= row["target"] <= 99


@pytest.mark.parametrize(
    ("formula", "reward"),
    [
        ("(3 + 5) * 2", 1), ("2*(5+3)", 1), ("5 * 2 + 3 * 2", 0), ("16", 0), ("8 * 2", 0), ("3 + 5 * 2", 0),
        ("(3 + 5) / 0.5", 0), ("2 ** 4", 0), ("__import__('os')", 0), ("(3 + 5) * 2 # 16", 1), ("(3 + 5 * 2", 0),
        ("((" * 80, 0), ("3 / (5 - 5) * 2", 0), ("(3 + 5) * 2; 1", 0), ("+3 + 5 * 2", 0), ("True + 3 + 5 + 2", 0),
    ],
)  # fmt: skip
def test_formulas_are_read_and_not_run(formula, reward):
    assert arithmetic.countdown(formula, [2, 3, 5], 16) == reward


def test_division_is_exact():
    assert arithmetic.countdown("1 / 3 * 9 / 3", [1, 3, 9, 3], 1) == 1
    assert arithmetic.countdown("8 / (3 - 8 / 3)", [3, 8, 8], 24) == 0
    assert arithmetic.countdown("8 / (3 - 8 / 3)", [8, 3, 8, 3], 24) == 1


@pytest.mark.parametrize("path", ["task:", "task:chess", "task:addition:0", "task:addition:21", "task:addition:x",
                                  "task:addition:-1", "task:addition:1.5", "task:addition:²"])  # fmt: skip
def test_a_task_that_does_not_exist_is_named(path):
    with pytest.raises(ConfigError, match=f"data.path={path}.*Use (a whole number|task:addition)"):
        tasks.find(path)


# ---- functions of users

MODULE = """
import math

def right(completion, answer):
    return completion == answer

def long(prompt, completion, *, least=3):
    return len(completion) >= least

def everything(**fields):
    return len(fields)

def positional(prompt, /):
    return 1

def missing(completion, nowhere):
    return 1

def raises(completion):
    raise KeyError("a\\nb")

def text(completion):
    return "1.0"

def nothing(completion):
    return None

def infinite(completion):
    return math.inf

value = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(MODULE)
    (tmp_path / "broken_rewards.py").write_text("import nothing_of_this_name")
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("my_rewards", None)


def test_rewards_are_weighted_sums_of_functions_of_a_file_or_a_module(module):
    functions = rewards.load(["my_rewards.py:right", "my_rewards:long", "my_rewards:everything"], [1, -0.5, 2])
    values = [one("row", "p", "four", {"answer": "four", "k": 1}) for one in functions]
    assert values == [1, 1, 4]
    assert rewards.total(functions, "row", "p", "four", {"answer": "four", "k": 1}) == 1 - 0.5 + 8
    assert [one.weight for one in rewards.load(["my_rewards:right"] * 2, [])] == [1, 1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_rewards.py:absent", "has no function absent. It has everything, infinite, long"),
        ("my_rewards:value", "has no function value"),
        ("nowhere.py:right", "nowhere.py, which is not a file"),
        ("nowhere:right", "nowhere cannot be imported .ModuleNotFoundError"),
        ("broken_rewards:right", "nothing_of_this_name"),
        ("right", "is not the name of a function. Write module:function"),
        (":right", "is not the name of a function"),
        ("my_rewards:", "is not the name of a function"),
        ("my_rewards:positional", "has arguments without names"),
    ],
)
def test_a_function_that_cannot_be_used_is_named(module, name, message):
    with pytest.raises(ConfigError, match=message) as error:
        rewards.load([name], [])
    assert "\n" not in str(error.value)


def test_a_row_without_a_field_is_named_before_the_run(module):
    (one,) = rewards.load(["my_rewards:missing"], [])
    with pytest.raises(ConfigError, match=r"needs nowhere, which data\.jsonl, line 3 does not have"):
        one.check("data.jsonl, line 3", {"answer": 1})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"raised KeyError: 'a\\nb' for line 3 and the completion 'c'"),
        ("text", "returned '1.0' for line 3 and the completion 'c'"),
        ("nothing", "returned None"),
        ("infinite", "returned inf"),
    ],
)
def test_a_function_that_fails_names_row_and_text_in_one_line(module, name, message):
    (one,) = rewards.load([f"my_rewards:{name}"], [])
    with pytest.raises(ConfigError, match=message) as error:
        one("line 3", "p", "c", {})
    assert "\n" not in str(error.value)


def test_a_task_of_reasoning_gym_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    gym.find.cache_clear()
    with pytest.raises(ConfigError, match=r"chain_sum needs reasoning-gym. Run pip install 'jaxstack\[gym\]'"):
        tasks.find("task:reasoning_gym:chain_sum")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain_sum", "leg_counting", "word_sorting"])
def test_tasks_of_reasoning_gym_reward_their_own_answers(name):
    """The package checks answers itself. Rows depend on seed and index, and prompts differ."""
    pytest.importorskip("reasoning_gym")
    gym.find.cache_clear()
    path = f"task:reasoning_gym:{name}"
    task, _ = tasks.find(path)
    reward = Reward.of(path, task.reward)
    found = [tasks.row(path, 3, i) for i in range(20)]
    assert found == [tasks.row(path, 3, i) for i in range(20)]
    assert len({row["prompt"] for row in found}) > 15
    for row in found:
        reward.check(path, row)
        fields = {"entry": row["entry"]}
        assert reward("row", row["prompt"], f" {row['completion']}\n", fields) == 1
        assert reward("row", row["prompt"], "nonsense", fields) < 1
    with pytest.raises(ConfigError, match=rf"{name}s is not one of the \d+ tasks of reasoning-gym.*{name}"):
        tasks.find(f"{path}s")
    with pytest.raises(ConfigError, match="task:reasoning_gym:composite cannot be made"):
        tasks.find("task:reasoning_gym:composite")
