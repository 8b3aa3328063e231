"""The batches of a run: what its steps read, its evaluation, and what a checkpoint needs beside the state."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from jaxstack.common.tree import Batch
from jaxstack.data.loader import DataLoader
from jaxstack.models.params import Params
from jaxstack.training.features.preference import Refer
from jaxstack.training.losses import EvalSums, Metrics

Rows = dict[str, np.ndarray]
"""The arrays of a batch on this process."""

Evaluate = Callable[[Params, Batch], EvalSums]
"""Returns the sums of a held-out batch."""

Timer = Callable[[Params], AbstractContextManager[None]]
"""Counts the time inside as time without steps."""


@dataclass(eq=False)
class Batches:
    """Batches of a data set, as the loader reads them. A run that makes its batches derives from it.

    Attributes:
      loader: reads the rows of a step, a function of seed and index.
    """

    loader: DataLoader

    def place(self, rows: Rows, params: Params, index: int, timer: Timer) -> tuple[Batch, Metrics]:
        """Returns a batch on the devices, and what is logged of it.

        Args:
          rows: what the loader has read for this step.
          params: the parameters before the step.
          index: index of the batch.
          timer: for work that is not a step.
        """
        return self.loader.to_devices(rows), {}

    def evaluation(self, evaluate: Evaluate, refer: Refer) -> Evaluate:
        """Returns the evaluation of held-out batches, to which a reference adds its log-probabilities first."""
        return lambda params, batch: evaluate(params, refer(params, batch))

    def take_samples(self) -> list[dict[str, object]]:
        """Returns what the log shows of the newest evaluation, once."""
        return []

    def save(self, step: int) -> None:
        """Writes what waits for later steps beside the checkpoint of a step."""

    def restore(self, step: int, index: int) -> str:
        """Reads what `save` wrote; `index` is the next batch. Returns a line for the user if it is lost, else ""."""
        return ""

    def forget(self) -> None:
        """Drops what waits for later steps, after a rollback."""
