"""Where the experts of each layer are stored: hot experts have replicas, and devices get nearly equal loads.

`place` follows DeepSeek's EPLB (arXiv:2412.19437, section 3.4): the expert with the most tokens for each replica gets
one more until all slots are taken, and the replicas are packed onto the devices from the heaviest down. Swaps then
lower the largest load further.

Suffixes: L layers, E experts, N devices, S slots of a device, R replicas.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from jaxstack.common import files
from jaxstack.common.counts import plural
from jaxstack.config import ConfigError

EXPERT_WEIGHTS = ("w_up", "w_gate", "w_down", "b_up", "b_gate", "b_down")
"""The parameters of experts in the group `moe` of a layer, which replicas have copies of."""


@dataclass(frozen=True, eq=False)
class Placement:
    """The expert in each slot of each device.

    Attributes:
      num_experts: E.
      experts: which expert a slot has [L, N, S].
    """

    num_experts: int
    experts: np.ndarray

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.experts.shape[1]

    @cached_property
    def stored(self) -> np.ndarray:
        """The expert in each slot of all devices, in their order [L, N * S]."""
        return self.experts.reshape(len(self.experts), -1)

    @cached_property
    def replicas(self) -> np.ndarray:
        """The slots with a replica of each expert, by their index in `stored`, and -1 behind them: int32 [L, E, R]."""
        found = [[np.flatnonzero(row == expert) for expert in range(self.num_experts)] for row in self.stored]
        most = max(len(slots) for layer in found for slots in layer)
        table = np.full((len(found), self.num_experts, most), -1, np.int32)
        for layer, own in zip(table, found, strict=True):
            for row, slots in zip(layer, own, strict=True):
                row[: len(slots)] = slots
        return table

    def device_load(self, load: np.ndarray) -> np.ndarray:
        """Returns the tokens of each device [L, N], if each expert's tokens [L, E] are divided among its replicas."""
        share = load / (self.replicas >= 0).sum(-1)
        return np.take_along_axis(share, self.stored, 1).reshape(self.experts.shape).sum(-1)

    def to_json(self) -> str:
        """Returns the text of a placement file."""
        _, devices, slots = self.experts.shape
        layers = ",\n  ".join(json.dumps(layer.tolist()) for layer in self.experts)
        head = json.dumps({"experts": self.num_experts, "devices": devices, "slots": slots})[1:-1]
        return f'{{{head}, "layers": [\n  {layers}\n]}}\n'


def even(num_layers: int, num_experts: int, devices: int) -> Placement:
    """Returns the placement without replicas: each device has as many neighbouring experts."""
    return Placement(num_experts, np.tile(np.arange(num_experts).reshape(1, devices, -1), (num_layers, 1, 1)))


def imbalance(device_load: np.ndarray) -> np.ndarray:
    """Returns the largest load of a device over the mean load, for each layer [L]; 1 where there are no tokens."""
    mean = device_load.mean(-1)
    return np.where(mean > 0, device_load.max(-1) / np.maximum(mean, 1e-9), 1.0)


def place(load: np.ndarray, devices: int, slots: int) -> Placement:
    """Returns a placement for a measured load.

    Args:
      load: tokens of each expert in each layer [L, E].
      devices: number of devices N.
      slots: experts that each device has room for, in each layer.

    Raises:
      ConfigError: there are too few slots for all experts, or more on a device than experts.
    """
    experts = load.shape[1]
    if devices * slots < experts or slots > experts:
        raise ConfigError(
            f"slots={slots} on each of devices={devices} do not fit experts={experts}. Use from "
            f"{-(-experts // devices)} to {plural(experts, 'slot')}."
        )
    return Placement(experts, np.stack([_place_layer(row.astype(np.float64), devices, slots) for row in load]))


def _place_layer(load: np.ndarray, devices: int, slots: int) -> np.ndarray:
    """Returns the experts of one layer [N, S], given its load [E]."""
    counts = np.ones(len(load), np.int64)
    for _ in range(devices * slots - len(load)):
        counts[np.argmax(np.where(counts < devices, load / counts, -1.0))] += 1
    share = load / counts
    total, placed = np.zeros(devices), [[] for _ in range(devices)]  # type: ignore[var-annotated]
    for expert in sorted(np.repeat(np.arange(len(load)), counts).tolist(), key=lambda e: -share[e]):
        free = [d for d in range(devices) if len(placed[d]) < slots]
        device = min(free, key=lambda d: (expert in placed[d], total[d]))
        placed[device].append(expert)
        total[device] += share[expert]
    return np.sort(_swap(np.asarray(placed), share), axis=1)


def _swap(placed: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Returns the experts of each device [N, S] after swaps, each of which lowers the load of the busiest device."""
    placed = placed.copy()
    while True:
        has = (placed[..., None] == np.arange(len(share))).any(1)  # [N, E]
        total = share[placed].sum(1)
        busy = int(total.argmax())
        own = placed[busy]
        # Of each slot of the busiest device [S], and each slot of every device [N, S]:
        less = share[own][:, None, None] - share[placed]
        after = np.maximum(total[busy] - less, total[:, None] + less)
        useful = ~has[:, own].T[..., None] & ~has[busy][placed] & (after < total[busy] * (1 - 1e-9))
        if not useful.any():
            return placed
        slot, device, other = np.unravel_index(np.where(useful, after, np.inf).argmin(), after.shape)
        placed[busy, slot], placed[device, other] = placed[device, other], placed[busy, slot]


def read(path: Path, num_layers: int, num_experts: int) -> Placement:
    """Reads a placement file of `jaxstack plan experts`.

    Raises:
      ConfigError: it is not a placement of this model's experts.
    """
    advice = "Make it with `jaxstack plan experts`."
    given = files.read_json(path, advice)
    try:
        *sizes, lists = (given[key] for key in ("experts", "devices", "slots", "layers"))
        found, devices, slots = map(int, sizes)
        layers = [[[int(expert) for expert in device] for device in layer] for layer in lists]
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"{path} is not a placement: it needs experts, devices, slots and layers, lists of experts. {advice}"
        ) from None
    if (found, len(layers)) != (num_experts, num_layers):
        raise ConfigError(
            f"{path} places experts={found} of layers={len(layers)}, but the model has {plural(num_experts, 'expert')} "
            f"in {plural(num_layers, 'layer')}. Use a load that was measured with this model."
        )
    for i, layer in enumerate(layers):
        if len(layer) != devices:
            raise ConfigError(f"{path} has devices={devices}, but layer {i} has {len(layer)}. {advice}")
        for d, own in enumerate(layer):
            if len(own) != slots:
                raise ConfigError(
                    f"{path} has slots={slots}, but device {d} of layer {i} has {plural(len(own), 'replica')}. {advice}"
                )
        held = {expert for own in layer for expert in own}
        if unknown := sorted(held - set(range(num_experts))):
            raise ConfigError(
                f"{path} has expert {unknown[0]} in layer {i}, but ids end at {num_experts - 1}. {advice}"
            )
        if missing := sorted(set(range(num_experts)) - held):
            raise ConfigError(f"{path} has no slot for expert {missing[0]} in layer {i}. {advice}")
    return Placement(num_experts, np.asarray(layers, np.int64))


def require_devices(path: Path, placement: Placement, devices: int) -> None:
    """Checks that a placement is for a mesh.

    Raises:
      ConfigError: it is for another number of devices than the mesh axis has.
    """
    if placement.devices != devices:
        raise ConfigError(
            f"{path} has devices={placement.devices}, but mesh.expert={devices}. Use --mesh.expert="
            f"{placement.devices}, or make the placement for {devices}."
        )


def write_load(path: Path, load: np.ndarray) -> None:
    """Writes the tokens of each expert in each layer [L, E] to a file."""
    rows = ",\n  ".join(json.dumps(row.tolist()) for row in load)
    files.write_atomic(path, f'{{"experts": {load.shape[1]}, "tokens": [\n  {rows}\n]}}\n')


def read_load(path: Path) -> np.ndarray:
    """Returns the tokens of each expert in each layer [L, E], from a file of `jaxstack generate --expert_load`.

    Raises:
      ConfigError: it is not such a file.
    """
    advice = "Write it with `jaxstack generate --expert_load`."
    given = files.read_json(path, advice)
    try:
        load = np.asarray(given["tokens"], np.float64)
        fits = load.ndim == 2 and load.size and load.shape[1] == given["experts"] and (load >= 0).all()
    except (KeyError, TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise ConfigError(f"{path} does not have the tokens of each expert in each layer. {advice}")
    return load
