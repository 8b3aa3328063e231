"""A run after `start.resolve`: its services, its steps and the planner read parts of this record."""

from dataclasses import dataclass

from jax.sharding import Mesh

from jaxstack.config import Config
from jaxstack.data import Dataset
from jaxstack.models.context import Context
from jaxstack.training.features.watch import Watched
from jaxstack.training.state import Recipe, TrainState


@dataclass(frozen=True)
class Setup:
    """A run before its first step: nothing is computed or written yet. `start.resolve` builds it.

    Attributes:
      cfg: the configuration, with the values that follow from the data. There is no other version of it.
      dataset: what the run is trained on.
      mesh: devices.
      ctx: execution context; its pipeline has the partition and the split that were chosen.
      abstract: shapes, dtypes and shardings of the state.
      watched: what some steps measure. `None` means nothing.
      warnings: lines for the user, such as that the run may not fit into memory.
      split: which gradients of weights a pipeline computes later, and why; empty if it computes none later.
    """

    cfg: Config
    dataset: Dataset
    mesh: Mesh
    ctx: Context
    abstract: TrainState
    watched: Watched | None = None
    warnings: tuple[str, ...] = ()
    split: str = ""

    @property
    def recipe(self) -> Recipe:
        """What the state and its steps depend on."""
        return Recipe.of(self.cfg)
