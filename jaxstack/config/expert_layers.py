"""Which layers of a model have experts, and the stacks that such layers make. JAX is not imported."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import NamedTuple

from jaxstack.config.bounds import NonNegativeInt, PositiveInt, check_bounds, require

MOST_KINDS = 64
"""Most layers of a unit. Longer repetitions are not looked for."""


@dataclass(frozen=True)
class ExpertLayers:
    """Which layers have experts, counted from 0; the others have an MLP of width `model.d_ff`. By default all layers
    do."""

    first: NonNegativeInt = 0
    """First layer that has experts. DeepSeek-V3 uses 3: its layers 0 to 2 have none."""
    every: PositiveInt = 1
    """Distance from one layer with experts to the next, from `first` on. Switch Transformers have experts in every
    second layer, from the second on: `first=1` and `every=2`. In an encoder-decoder the rule is for both stacks."""
    numbers: tuple[int, ...] = ()
    """The layers that have experts, in rising order, such as `[5, 10, 15]`, in place of `first` and `every`. In an
    encoder-decoder, these are layers of the decoder."""
    encoder_numbers: tuple[int, ...] = ()
    """With family `encoder_decoder`: the layers of the encoder that have experts. If you set only one of `numbers` and
    `encoder_numbers`, the other stack has no experts."""

    def __post_init__(self) -> None:
        check_bounds("model.moe.layers", self)
        for name in ("numbers", "encoder_numbers"):
            numbers = getattr(self, name)
            require(
                all(one < other for one, other in pairwise((-1, *numbers))),
                f"model.moe.layers.{name}={list(numbers)} are not layers in rising order, counted from 0. Sort them, "
                f"and name each once.",
            )
        require(
            not self.is_list or (self.first == 0 and self.every == 1),
            f"{self.shown} are a rule and a list of layers. Use one of them.",
        )

    @property
    def shown(self) -> str:
        """Returns the keys that are set, for messages: `model.moe.layers.first=3`."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        shown = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        return " and ".join(f"model.moe.layers.{name}={value}" for name, value in shown.items())

    @property
    def is_list(self) -> bool:
        """Returns whether the layers are listed."""
        return bool(self.numbers or self.encoder_numbers)

    def of_stack(self, depth: int, encoder: bool = False) -> tuple[bool, ...]:
        """Returns whether each layer of a stack has experts.

        Args:
          depth: number of layers of the stack.
          encoder: whether it is the encoder of an encoder-decoder.
        """
        if self.is_list:
            listed = {*(self.encoder_numbers if encoder else self.numbers)}
            return tuple(i in listed for i in range(depth))
        return tuple(i >= self.first and (i - self.first) % self.every == 0 for i in range(depth))


def rule_of(has: Sequence[bool]) -> ExpertLayers:
    """Returns the declaration of the layers of one stack, of which some have experts, by a rule if there is one."""
    numbers = [i for i, one in enumerate(has) if one]
    every = numbers[1] - numbers[0] if numbers[1:] else 1
    rule = ExpertLayers(first=numbers[0], every=every)
    return rule if rule.of_stack(len(has)) == tuple(has) else ExpertLayers(numbers=tuple(numbers))


class Segment(NamedTuple):
    """Layers of a stack that follow each other and are equal, or make equal units. They are a stack of their own.

    Attributes:
      name: name of the stack.
      start: number of its first layer.
      kinds: whether each layer of a unit has experts. Equal layers are units of one layer.
      units: number of units.
    """

    name: str
    start: int
    kinds: tuple[bool, ...]
    units: int

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.kinds) * self.units


def segments(name: str, has: tuple[bool, ...], period: int = 1) -> tuple[Segment, ...]:
    """Cuts a stack where its layers change in kind, such that a program has as few different layers as possible.

    `[dense] * 3 + [experts] * 58` are two segments. Thirty times `[dense, experts]` are one, whose units have two
    layers. The first segment is `dense_NAME` if it has no experts and is not the only one. The others are `NAME`,
    `NAME_2`, `NAME_3` and so on.

    Args:
      name: name of the stack.
      has: whether each layer has experts.
      period: number of windows that alternate over the layers. Above 1 there are no units of several kinds.
    """
    found = _cut(has, MOST_KINDS if period == 1 else 1)
    first = 1 if found[1:] and not any(found[0].kinds) else 0
    names = [f"dense_{name}"] * first + [name] + [f"{name}_{i}" for i in range(2, len(found) + 1)]
    return tuple(one._replace(name=own) for one, own in zip(found, names, strict=False))


def stack_of(name: str) -> str:
    """Returns the stack that a segment is of: `layers` for `dense_layers`, `layers` and `layers_2`."""
    return re.sub(r"_\d+$", "", name.removeprefix("dense_"))


def order(name: str) -> tuple[int, int]:
    """Returns a key that sorts the segments of a stack by their layers."""
    number = re.search(r"_(\d+)$", name)
    return (0 if name.startswith("dense_") else 1, int(number[1]) if number else 1)


@functools.lru_cache(maxsize=256)
def _cut(has: tuple[bool, ...], most: int) -> tuple[Segment, ...]:
    """Returns the segments, without names, with the fewest layers in their units, and of those the fewest segments.

    A unit of several layers repeats.
    """
    depth = len(has)
    if list(has) == sorted(has):  # the usual case, at once: layers without experts, then layers with them
        dense = has.count(False)
        runs = (Segment("", 0, (False,), dense), Segment("", dense, (True,), depth - dense))
        return tuple(run for run in runs if run.units)
    best: list[tuple[int, int, Segment | None]] = [(0, 0, None)] * (depth + 1)
    alike = [0] * (most + 1)  # by distance: how many layers from here on equal those so far behind them
    for start in range(depth - 1, -1, -1):
        found: list[tuple[int, int, Segment]] = []
        for size in range(1, min(most, depth - start) + 1):
            behind = start + size
            alike[size] = alike[size] + 1 if behind < depth and has[start] == has[behind] else 0
            most_units = alike[size] // size + 1
            for count in (most_units, most_units - 1):  # the last one may be the first layer of longer units
                if count > 1 or (count == 1 and size == 1):
                    layers, parts, _ = best[start + size * count]
                    found.append((layers + size, parts + 1, Segment("", start, has[start:behind], count)))
        best[start] = min(found, key=lambda one: one[:2])
    cut = []
    start = 0
    while start < depth:
        segment = best[start][2]
        assert segment is not None
        cut.append(segment)
        start += segment.depth
    return tuple(cut)
