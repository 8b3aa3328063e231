"""Keys of the group `model.branches`."""

from dataclasses import dataclass

from jaxstack.config.bounds import PositiveFloat, PositiveInt, check_bounds, require
from jaxstack.config.objective import Objective, Term


@dataclass(frozen=True)
class BranchesConfig:
    """A trunk that two branches share, for `model.family=branches`."""

    layers: PositiveInt | None = None
    """Number of blocks that each branch has of its own: the last ones. Both branches share the others, the trunk. Null
    means a quarter of num_layers, and at least one."""
    rates: tuple[int, int] = (1, 1)
    """Two numbers for each row of a batch: how many windows of text the branch `understanding` reads, and how many the
    branch `generation` reads."""
    masked_weight: PositiveFloat = 1.0
    """Factor of the loss on hidden tokens in the objective. The loss on next tokens has the factor 1."""
    freeze_trunk: bool = False
    """Train the branches and the embedding, but not the blocks of the trunk."""

    def __post_init__(self) -> None:
        check_bounds("model.branches", self)
        require(
            min(self.rates) >= 1,
            f"model.branches.rates={list(self.rates)} leaves a branch without text. Use two numbers from 1 on.",
        )

    def depth(self, num_layers: int) -> int:
        """Returns the number of layers of each branch of a model in which `num_layers` run for a text."""
        return self.layers or max(1, num_layers // 4)

    @property
    def windows(self) -> int:
        """Returns the number of windows of text for each row of a batch."""
        return sum(self.rates)

    def objective(self, more: tuple[Term, ...] = ()) -> Objective:
        """Returns what a trunk with two branches is trained for, with `more` terms of the branch `understanding`."""
        terms = (Term("causal"), Term("masked", "masked_weights", self.masked_weight), *more)
        return Objective("held-out causal and masked loss", "nats per token", terms=terms)
