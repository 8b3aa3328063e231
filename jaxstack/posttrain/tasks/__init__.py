"""Tasks that need no download: prompts with a right answer, and functions that reward completions.

`data.path=task:addition` reads rows of a task, `task:addition:3` of another difficulty, and
`task:reasoning_gym:chain_sum` of a task of `reasoning-gym`. A row is a function of the seed
and its index. Tasks are plain Python: their functions are also rewards for `rl.rewards`.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jaxstack.config import ConfigError
from jaxstack.posttrain.tasks import arithmetic, gym, text

PREFIX = "task:"
"""What the paths of tasks begin with."""

GYM = "reasoning_gym"
"""Name of the tasks of `reasoning-gym`: `task:reasoning_gym:chain_sum`."""

ROWS = 10_000
"""Number of rows that are drawn. Rows with a prompt that was drawn before are left out."""


Tool = Callable[[str], str | None]
"""Returns the result of a call, or `None` if a text is not a call."""


@dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
      draw: returns a row, given random numbers and the difficulty: `prompt`, a right `completion` or the whole
        conversation as `messages`, and other fields.
      reward: returns the reward of a completion; its arguments are named as fields of the row.
      difficulty: the default.
      hardest: the largest difficulty.
      tool: what completions may call, with `rl.turns` above 1. `None` means nothing.
    """

    draw: Callable[[random.Random, int], dict[str, object]]
    reward: Callable[..., float]
    difficulty: int
    hardest: int
    tool: Tool | None = None


TASKS = {
    "addition": Task(arithmetic.draw_addition, arithmetic.addition, 2, 20),
    "calculator": Task(arithmetic.draw_calculator, arithmetic.calculator, 3, 9, arithmetic.calculate),
    "countdown": Task(arithmetic.draw_countdown, arithmetic.countdown, 3, 6),
    "letters": Task(text.draw_letters, text.letters, 1, 8),
    "sorting": Task(text.draw_sorting, text.sorting, 5, 100),
}


def is_task(path: str) -> bool:
    """Returns whether a path names a task."""
    return path.startswith(PREFIX)


def find(path: str) -> tuple[Task, int]:
    """Returns the task that a path names, and the difficulty.

    Raises:
      ConfigError: there is no such task, or it has no such difficulty.
    """
    name, _, difficulty = path.removeprefix(PREFIX).partition(":")
    if name == GYM:
        return Task(*gym.find(path, difficulty), 0, 0), 0
    task = TASKS.get(name)
    if task is None:
        raise ConfigError(f"data.path={path} is not a task. Use task:{', task:'.join([*TASKS, f'{GYM}:NAME'])}.")
    if not difficulty:
        return task, task.difficulty
    if not (difficulty.isascii() and difficulty.isdigit() and 1 <= int(difficulty[:9]) <= task.hardest):
        raise ConfigError(
            f"data.path={path} has the difficulty {difficulty[:20]}. Use a whole number from 1 to {task.hardest}."
        )
    return task, int(difficulty)


def row(path: str, seed: int, index: int) -> dict[str, object]:
    """Returns one row of a task. It depends on the path, the seed and the index alone."""
    task, difficulty = find(path)
    return task.draw(random.Random(f"{seed} {index} {difficulty}"), difficulty)


def rows(path: str, answered: bool, seed: int = 0) -> Iterator[tuple[str, dict[str, object]]]:
    """Yields rows of a task with their names for error messages, each prompt once.

    Args:
      path: `task:NAME`, `task:NAME:DIFFICULTY` or `task:reasoning_gym:NAME`.
      answered: half of all prompts, by a hash, are for conversations with answers, and the other half are for rewards.
        So no prompt of reinforcement learning has been learned with its answer.
    """
    seen = set()
    for index in range(ROWS):
        value = row(path, seed, index)
        prompt = str(value["prompt"])
        if prompt in seen or (hashlib.sha256(prompt.encode()).digest()[0] < 128) != answered:
            continue
        seen.add(prompt)
        yield f"{path}, row {index:,}", value
