"""The layers of a model on the stages of a pipeline: model chunks, and the slots that store their layers.

The layers of a model are cut, in order, into model chunks. Model chunk `g` is chunk `g // stages` of stage
`g % stages`. Arrays with a leading dimension over layers are stored in layer slots, ordered by stage and then by
chunk. Every model chunk has as many slots as the largest one has layers, so that an even split of the leading
dimension gives every stage its own layers. If model chunks are equal and every stage has one, slots are in layer
order. Layers run in groups of `period` layers that differ in kind (such as Gemma 2's windows). A group is never cut.
The last group of a model may have fewer layers (ModernBERT's); its other slots are empty.

In a model with several stacks, such as an encoder and a decoder, the model chunks of the first stack come before the
model chunks of the second. So every stage has layers of all stacks. Each stack has its own layer slots.

Suffixes: P stages, G model chunks, L layers. JAX is not imported.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxstack.common.counts import plural
from jaxstack.pipeline.schedule import ScheduleError


@dataclass(frozen=True)
class Stages:
    """The assignment of layers to stages and layer slots.

    Attributes:
      stages: number of stages, P.
      layers: number of layers in each model chunk, in the model's order [G].
      period: layers in a group; the last one may have fewer. With several stacks it is 1 here, and each stack has its
        own period.
      stacks: name, chunks on each stage and period of each stack, if there are several. No model chunk has layers of
        two stacks.
      sparse: whether model chunks may have no layer, for a stack with fewer layers than model chunks.

    Raises:
      ScheduleError: the model chunks cannot be divided among the stages, or one has no layer or a part of a group.
    """

    stages: int
    layers: tuple[int, ...]
    period: int = 1
    stacks: tuple[tuple[str, int, int], ...] = ()
    sparse: bool = False

    def __post_init__(self) -> None:
        count = len(self.layers)
        fewest = 0 if self.sparse else 1
        cut = any(n % self.period for n in self.layers[:-1])
        if not count or count % self.stages or min(self.layers) < fewest or cut:
            raise ScheduleError(
                f"layers of each model chunk {list(self.layers)} do not fit {plural(self.stages, 'stage')}. Give each "
                f"stage the same number of model chunks, each but the last with a positive multiple of "
                f"{plural(self.period, 'layer')}."
            )

    @cached_property
    def parts(self) -> dict[str, "Stages"]:
        """The layers of each stack by its name, in order. If there is only one stack, its name is empty."""
        if not self.stacks:
            return {"": self}
        ends = np.cumsum([chunks for _, chunks, _ in self.stacks]) * self.stages
        return {
            name: Stages(self.stages, self.layers[end - chunks * self.stages : end], period, sparse=self.sparse)
            for (name, chunks, period), end in zip(self.stacks, ends, strict=True)
        }

    def of(self, path: str) -> "Stages":
        """Returns the layers of the stack that a parameter belongs to, by its path."""
        return self.parts[path.split("/")[0]] if self.stacks else self

    @property
    def chunks(self) -> int:
        """Number of model chunks on each stage."""
        return len(self.layers) // self.stages

    @property
    def groups(self) -> tuple[int, ...]:
        """Number of layer groups in each model chunk [G]."""
        return tuple(-(-n // self.period) for n in self.layers)

    @property
    def max_layers(self) -> int:
        """Layer slots of each model chunk: the layers of the largest one, in whole groups."""
        return self.max_groups * self.period

    @cached_property
    def layer_of_slot(self) -> np.ndarray:
        """Layer that each layer slot holds, or -1 for an empty slot. int32 [P * chunks * max_layers]."""
        layers = np.full((self.stages, self.chunks, self.max_layers), -1, np.int32)
        start = 0
        for g, count in enumerate(self.layers):
            layers[g % self.stages, g // self.stages, :count] = np.arange(start, start + count)
            start += count
        return layers.reshape(-1)

    @cached_property
    def slot_of_layer(self) -> np.ndarray:
        """Layer slot of each layer, int32 [L]."""
        is_layer = self.layer_of_slot >= 0
        return np.flatnonzero(is_layer)[np.argsort(self.layer_of_slot[is_layer])].astype(np.int32)

    @property
    def group_of_slot(self) -> np.ndarray:
        """Layer group that each `period` of layer slots holds, or -1 for empty slots. int32 [slots / period]."""
        return self.layer_of_slot[:: self.period] // self.period

    @property
    def max_groups(self) -> int:
        """Layer groups in the largest model chunk."""
        return max(self.groups)

    @property
    def is_layer_order(self) -> bool:
        """Whether the layer slots of each stack hold its layers in the model's order, without empty slots."""
        if self.stacks:
            return all(part.is_layer_order for part in self.parts.values())
        return np.array_equal(self.layer_of_slot, np.arange(sum(self.layers)))

    def __str__(self) -> str:
        """Returns the layers of each stage, counted from 0: `0-3 | 4-7`. Chunks of a stage are joined by `+`."""
        if self.stacks:
            return ", ".join(f"{name} {part}" for name, part in self.parts.items())
        ends = np.cumsum(self.layers)
        spans = [
            (str(end - 1) if count == 1 else f"{end - count}-{end - 1}") if count else "none"
            for count, end in zip(self.layers, ends, strict=True)
        ]
        return " | ".join("+".join(spans[stage :: self.stages]) for stage in range(self.stages))
