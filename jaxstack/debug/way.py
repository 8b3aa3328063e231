"""The way of the search through a program: scopes, places in the code, and steps of loops."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxstack.debug.devices import Devices
from jaxstack.debug.rules import Frame, frames_of
from jaxstack.debug.statistics import Statistics


@dataclass(frozen=True)
class Reading:
    """What a step of a loop read of one carried array.

    Attributes:
      step: index of the step.
      carry: index of the array among the carried ones.
      statistics: statistics of the array, for each of its entries, see `Devices`.
      entries: which entry each device has, as an array over the axes of the mesh.
    """

    step: int
    carry: int
    statistics: Statistics
    entries: np.ndarray

    def text(self, devices: np.ndarray | None = None) -> str:
        """Returns one line about the values on the chosen devices, or on all, taken together."""
        return self.statistics.text(np.unique(self.entries if devices is None else self.entries[devices]))


@dataclass(frozen=True)
class Loop:
    """A step of a loop on the way to an operation.

    Attributes:
      frames: places in the code where the loop is, innermost first.
      step: index of the step. Of a loop that runs backwards, it is the index in the arrays that it reads.
      length: number of steps; `None` if the loop's length is not static.
      reverse: whether the loop runs from the last step to the first one, as a loop of gradients does.
      scopes: names of the scopes in which the loop is.
      readings: what steps read of the carried arrays that the guide watches, in the order in which they ran.
      others: loops over the same layers, such as the loop of the other direction.
    """

    frames: tuple[Frame, ...]
    step: int
    length: int | None
    reverse: bool = False
    scopes: str = ""
    readings: tuple[Reading, ...] = ()
    others: tuple["Loop", ...] = ()

    @property
    def function(self) -> str:
        """Name of the function that has the loop."""
        return self.frames[0][2].rpartition(".")[2] if self.frames else ""


class Guide:
    """What the search is told about a program. This one says nothing."""

    axis = ""
    """Mesh axis along which devices may compute for nothing."""

    def idle_kind(self, outer: str, scopes: str) -> str:
        """Returns which work in `scopes` some devices compute for nothing; empty if none do, or if `outer` is in it."""
        return ""

    def idle(self, kind: str, loops: Sequence[Loop]) -> np.ndarray:
        """Returns for each device along the axis whether it computes this work for nothing in these steps of loops."""
        raise NotImplementedError

    def watched(self, loop: Loop, carry: Sequence[Any]) -> list[int]:
        """Returns which carried arrays of a loop are described."""
        return []

    def is_followed(self, loop: Loop) -> bool:
        """Returns whether the steps after a bad one, and loops at the same place in the code, are described too."""
        return False


@dataclass(frozen=True)
class Way:
    """How the search came to a level: scopes and frames of the equations that it went into, and the steps of loops.

    Attributes:
      scopes: names, outermost first.
      frames: frames of the call of a function with `jax.jit` that is on the way, or of the last one; see `frames_of`.
      is_call: whether the level is the program of such a function.
      loops: steps of loops.
      devices: where the equations run.
      guide: what is known about the program.
    """

    scopes: str = ""
    frames: tuple[Frame, ...] = ()
    is_call: bool = False
    loops: tuple[Loop, ...] = ()
    devices: Devices = field(default_factory=Devices)
    guide: Guide = field(default_factory=Guide)

    def into(self, equation: Any, loop: Loop | None = None, devices: Devices | None = None) -> "Way":
        """Returns the way to what is within an equation."""
        return replace(
            self,
            scopes=self.scopes_of(equation),
            frames=self.frames_of(equation),
            is_call=equation.primitive.name in ("jit", "pjit"),
            loops=self.loops if loop is None else (*self.loops, loop),
            devices=self.devices if devices is None else devices,
        )

    def scopes_of(self, equation: Any) -> str:
        """Returns the names of the scopes in which an equation is."""
        return f"{self.scopes}/{equation.source_info.name_stack}"

    def frames_of(self, equation: Any) -> tuple[Frame, ...]:
        """Returns the places of an equation in the code.

        The program of a function with `jax.jit` may have been traced in an earlier call. Then the places of this call
        are more exact, although they do not lead into the function.
        """
        own = frames_of(equation)
        fits = own[len(own) - len(self.frames) :] == self.frames
        return own if own and (fits or not self.is_call) else self.frames

    def of_work(self, equation: Any) -> "Way":
        """Returns this way without the devices that compute an equation for nothing."""
        guide = self.guide
        devices = self.devices
        kind = guide.idle_kind(self.scopes, self.scopes_of(equation))
        if not kind or guide.axis not in devices.axes:
            return self
        sizes = [-1 if axis == guide.axis else 1 for axis in devices.axes]
        idle = np.broadcast_to(guide.idle(kind, self.loops).reshape(sizes), devices.shape)
        return replace(self, devices=devices.only(~idle))
