"""Seconds that no step of a set of candidates beats, for the search over meshes.

A pipeline adds idle time to the layers. `Floor.with_idle` is a bound for every schedule table, because a unit runs one
tick after the unit of the chunk before:

- A stage runs all its units in ticks of their own, each at least as long as the layers of the unit.
- Before its first forward unit, the microbatch of this unit passes through the chunks on the stages before, a tick
  each. After its last forward unit, the microbatch passes through the chunks on the stages behind. Backward units do
  the same in the other direction.

So the forward units of a step take at least as long as the units of one stage and these two chains, for each stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxstack.config import ModelConfig
from jaxstack.pipeline.partition import even
from jaxstack.planner.memory import Flags
from jaxstack.planner.sizes import layer_stacks


@dataclass(frozen=True)
class Floor:
    """Seconds that no candidate of a set beats.

    Attributes:
      seconds: seconds of a step.
      forward: seconds of the forward units of a mean stage.
      backward: seconds of its backward units, with recomputation and the gradients of weights.
      weights: seconds of the gradients of weights, which some schedules move into idle ticks.
      waiting: seconds of layers and their waiting for `tensor`, divided by the seconds of layers.
    """

    seconds: float
    forward: float = 0.0
    backward: float = 0.0
    weights: float = 0.0
    waiting: float = 1.0

    def with_recomputation(self, share: float) -> "Floor":
        """Returns the bound where backward units also repeat a share of the forward units."""
        more = share * self.forward
        layers = self.forward + self.backward
        waiting = 1 + (self.waiting - 1) * layers / (layers + more) if layers else 1.0
        return replace(self, seconds=self.seconds + more, backward=self.backward + more, waiting=waiting)

    def with_idle(self, model: ModelConfig, stages: int, pipeline: Flags) -> "Floor":
        """Returns the bound with the least idle time of a pipeline. With several stacks of layers, none is added."""
        if stages == 1 or not self.forward or len(layer_stacks(model)) > 1:
            return self
        chunks = pipeline["pipeline.chunks"]
        groups = even(model.layer_groups, stages * chunks)
        share = longest_chain(groups, stages, pipeline["pipeline.microbatches"]) - 1
        splits = pipeline["pipeline.schedule"].startswith("zb")
        work = self.forward + self.backward
        idle = share * work
        if splits:
            least = (1 + share) * (work - self.weights) - work
            own = longest_chain(groups, stages, pipeline["pipeline.microbatches"], chains=False) - 1
            idle = max(least, own * work, 0.0)
        return replace(self, seconds=self.seconds + idle * self.waiting)


def longest_chain(groups: Sequence[int], stages: int, microbatches: int, chains: bool = True) -> float:
    """Returns the least time of all units of one direction as a multiple of the mean stage's work.

    Args:
      groups: layer groups of each model chunk.
      stages: number of stages. Model chunk g is on stage g % stages.
      microbatches: number of microbatches.
      chains: whether the chains before and behind a stage count. Weight units may run beside them.
    """
    longest = 0
    for stage in range(stages):
        own = microbatches * sum(groups[stage::stages])
        longest = max(longest, own + chains * (sum(groups[:stage]) + sum(groups[len(groups) - stages + stage + 1 :])))
    return longest * stages / (microbatches * sum(groups))
