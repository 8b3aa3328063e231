"""The tasks of `reasoning-gym`, more than a hundred generators of prompts that check answers themselves.

The package is imported when a path names one of its tasks: `task:reasoning_gym:chain_sum`.
"""

import difflib
import random
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from jaxstack.common.counts import plural
from jaxstack.config import ConfigError

_SIZE = 1_000_000  # rows to draw from


class Generator(NamedTuple):
    """A task of the package.

    Attributes:
      draw: returns a row, given random numbers: `prompt`, `entry`, and a right `completion` if the task has one.
      reward: returns the score of a completion, from 0 to 1.
    """

    draw: Callable[[random.Random, int], dict[str, object]]
    reward: Callable[..., float]


@cache
def find(path: str, name: str) -> Generator:
    """Returns a task of `reasoning-gym`.

    Args:
      path: as the configuration has it, for errors.
      name: name of the task.

    Raises:
      ConfigError: the package is not installed, or has no such task.
    """
    try:
        from reasoning_gym import create_dataset
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise ConfigError(f"data.path={path} needs reasoning-gym. Run pip install 'jaxstack[gym]'.") from None
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, 3) or sorted(DATASETS)[:3]
        raise ConfigError(
            f"data.path={path} is not one of the {plural(len(DATASETS), 'task')} of reasoning-gym. Similar names: "
            f"{', '.join(near)}."
        )
    try:
        dataset: Any = create_dataset(name, size=_SIZE, seed=0)
    except Exception as error:  # some have no default settings
        raise ConfigError(f"data.path={path} cannot be made: {error}. Choose another task.") from None

    def draw(rng: random.Random, difficulty: int) -> dict[str, object]:
        entry = dataset[rng.randrange(_SIZE)]
        answer = entry["answer"]
        return {
            "prompt": entry["question"],
            "entry": entry,
            **({"completion": answer} if isinstance(answer, str) else {}),
        }

    def reward(completion: str, entry: dict[str, object]) -> float:
        return float(dataset.score_answer(completion.strip(), entry))

    return Generator(draw, reward)
