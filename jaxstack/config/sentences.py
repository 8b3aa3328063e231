"""Keys of the group `model.sentences`: what an encoder learns about the parts of a text, beside hidden tokens."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from jaxstack.config.bounds import Interval, PositiveFloat, check_bounds, require
from jaxstack.config.objective import Term

SentenceTask: TypeAlias = Literal["next", "distance", "reordering"]


@dataclass(frozen=True)
class SentencesConfig:
    """Tasks on the parts of a window of text, for families `encoder` and `branches`."""

    tasks: tuple[SentenceTask, ...] = ()
    """Tasks that are learned in addition to hidden tokens; each window draws one. `next`: whether its second half
    follows the first (BERT). `distance`: whether the halves are neighbours, from one document, or from two (ERNIE).
    `reordering`: the original order of its shuffled parts (ERNIE)."""
    parts: Annotated[int, Interval(2, 6)] = 3
    """With the task `reordering`: largest number of parts. Each window draws a number from 1 to this."""
    weight: PositiveFloat = 1.0
    """Factor of the loss of each task in the objective. The loss of hidden tokens has the factor 1."""

    def __post_init__(self) -> None:
        check_bounds("model.sentences", self)
        require(
            len({*self.tasks}) == len(self.tasks),
            f"model.sentences.tasks={list(self.tasks)} names a task twice. Name each once.",
        )

    def classes(self, task: SentenceTask) -> int:
        """Returns the number of answers that a task has."""
        if task == "reordering":
            return sum(math.factorial(parts) for parts in range(1, self.parts + 1))
        return {"next": 2, "distance": 3}[task]

    @property
    def terms(self) -> tuple[Term, ...]:
        """Returns the losses of the tasks, whose weights are 1 at the first token of a window with the task."""
        return tuple(Term(task, f"{task}_weights", self.weight) for task in self.tasks)
