"""The costs of a model's layers, by which `partition` cuts them into stages. JAX is not imported."""

import json
import math
from dataclasses import MISSING, asdict, dataclass, fields
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from jaxstack.common import files
from jaxstack.common.counts import plural
from jaxstack.common.errors import quoted
from jaxstack.config import ConfigError


@dataclass(frozen=True)
class Costs:
    """The costs of layers, for one microbatch on the devices of one stage. Bytes are counted on one device.

    Where layers alternate in kind (such as Gemma 2's windows), a "layer" here is a group of them, which is never cut.

    Attributes:
      forward: forward seconds of each layer, [L].
      backward: backward seconds of each layer, including recomputation, [L]. Without the seconds of `weight`.
      state_bytes: weights, gradients and optimizer state of each layer, [L].
      stash_bytes: residuals of one microbatch in each layer, stored between forward and backward, [L].
      boundary_bytes: size of each layer's output, [L], or one number for all. The cotangents are as large.
      first: seconds (forward, backward) of the embedding.
      last: seconds (forward, backward) of the head and the loss.
      spread: true if every stage has a shard of embedding and head (vocabulary-parallel), so that they do not affect
        the cut. False if they are on the first and the last stage.
      bandwidth: bytes/s of the link between two stages.
      latency: seconds of one transfer.
      measured_on: device that the figures come from, as text.
      memory_bytes: memory of a device for state and residuals of the layers. `None` (JSON null) means no limit.
      weight: seconds of each layer in a weight unit, [L]. `None` means that `backward` has all gradients.
      pair_bytes: inputs and cotangents of one microbatch that wait for the weight unit, [L]; with `weight`.

    Raises (on construction):
      ConfigError: a value is not a valid cost.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    state_bytes: tuple[float, ...]
    stash_bytes: tuple[float, ...]
    boundary_bytes: float | tuple[float, ...]
    first: tuple[float, float]
    last: tuple[float, float]
    spread: bool
    bandwidth: float
    latency: float
    measured_on: str
    memory_bytes: float | None = None
    weight: tuple[float, ...] | None = None
    pair_bytes: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        L = max(1, len(self.forward)) if isinstance(self.forward, _LISTS) else 1
        counts = dict.fromkeys(("forward", "backward", "state_bytes", "stash_bytes"), L) | {"first": 2, "last": 2}
        counts |= {name: L for name in ("weight", "pair_bytes") if getattr(self, name) is not None}
        if (self.weight is None) != (self.pair_bytes is None):
            name = "weight" if self.pair_bytes is None else "pair_bytes"
            raise ConfigError(f"{name} is given alone, but weight and pair_bytes belong together. Give both, or none.")
        alone = ["bandwidth", "latency", *(["memory_bytes"] if self.memory_bytes is not None else [])]
        if isinstance(self.boundary_bytes, Real):
            alone.append("boundary_bytes")
        else:
            counts["boundary_bytes"] = L
        for name, count in counts.items():
            object.__setattr__(self, name, _floats(name, getattr(self, name), count))
        for name in alone:
            object.__setattr__(self, name, _floats(name, [getattr(self, name)], 1)[0])
        if self.bandwidth == 0:
            raise ConfigError("bandwidth=0 sends nothing. Give the bytes/s of a link.")
        if not isinstance(self.spread, bool):
            raise ConfigError(f"spread={quoted(self.spread)} must be true or false. Use one of them.")
        if not isinstance(self.measured_on, str):
            raise ConfigError(f"measured_on={quoted(self.measured_on)} must be text. Write the name of the device.")

    @property
    def layers(self) -> int:
        """Number of layers, L."""
        return len(self.forward)

    def save(self, path: Path) -> None:
        """Writes the costs as a JSON object with one key for each attribute."""
        files.write_atomic(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Costs":
        """Reads a file that `save` wrote.

        Raises:
          ConfigError: the file does not hold costs; the message names file, key and fix.
        """
        values = files.read_json(
            path, f"Measure the costs with `jaxstack profile --out={path}`, or name a file of Costs.save."
        )
        names = [field.name for field in fields(cls)]
        needed = [field.name for field in fields(cls) if field.default is MISSING]
        if not isinstance(values, dict):
            raise ConfigError(f"{path} must be an object with the keys {', '.join(names)}. Measure again.")
        if missing := [name for name in needed if name not in values]:
            raise ConfigError(f"{path}: {missing[0]} is missing. Measure again, or add it.")
        if unknown := [name for name in values if name not in names]:
            raise ConfigError(f"{path}: {unknown[0]} is not a cost; remove it. The keys are {', '.join(names)}")
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error


_LISTS = (list, tuple, np.ndarray)


def _floats(name: str, values: Any, count: int) -> tuple[float, ...]:
    if not isinstance(values, _LISTS) or len(values) != count:
        actual = f"{len(values)}" if isinstance(values, _LISTS) else quoted(values)
        raise ConfigError(
            f"{name} must hold {plural(count, 'number')}, not {actual}. Give first and last two numbers (forward and "
            f"backward), and the others one for each layer of forward."
        )
    for number in values:
        if isinstance(number, bool) or not isinstance(number, Real) or not 0 <= float(number) < math.inf:
            raise ConfigError(f"{name} holds {quoted(number)}. It takes finite numbers of 0 or more.")
    return tuple(float(number) for number in values)
