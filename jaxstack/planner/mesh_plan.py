"""Searches a mesh for a target or for the available devices, and puts the result into words and flags."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import jax

from jaxstack.common.counts import plural
from jaxstack.common.hardware import CHIPS, chip_name
from jaxstack.config import SEARCHED_KEYS, Config, ConfigError, flat, with_values
from jaxstack.kernels.implementation import platform_of
from jaxstack.planner import aot, figures, hlo, mesh_search
from jaxstack.planner.memory import GIB, Flags, Room, room_of
from jaxstack.planner.mesh_search import PIPELINE_KEYS, Candidate, Clock, Found, Search, Space
from jaxstack.planner.roofline import ChipLimits
from jaxstack.planner.step_clocks import ChipClock, CpuClock
from jaxstack.runtime import platform


@dataclass(frozen=True)
class Devices:
    """Devices that a mesh is searched for.

    Attributes:
      name: what they are, such as `h100:8x8`.
      count: number of devices.
      platform: `cpu`, `gpu` or `tpu`.
      room: the memory of one, or of all if they share it.
      clock: predicts times.
    """

    name: str
    count: int
    platform: str
    room: Room
    clock: Clock

    def search(self, space: Space) -> Search:
        """Returns a search with the memory and the times of the devices."""
        return Search(space, self.room, self.clock)


def of_target(target: str, gigabytes: float | None = None) -> Devices:
    """Returns the devices that a target names, see `figures.limits_of`.

    Args:
      target: chip and topology.
      gigabytes: GiB of memory of a device to use; None means all of the chip, or what a run reserves of a GPU's.

    Raises:
      ConfigError: the target is unknown.
    """
    name, count, limits = figures.limits_of(target)
    chip = limits.chip
    room = (
        chip.hbm_bytes * (platform.GPU_MEMORY_FRACTION if chip.platform == "gpu" else 1)
        if gigabytes is None
        else gigabytes * GIB
    )
    return Devices(target, count, chip.platform, Room(f"a device ({name})", room, room), ChipClock(limits))


def at_hand(devices: Sequence[jax.Device], local: Sequence[jax.Device]) -> Devices:
    """Returns the devices of a run, of which this process has the local ones.

    Raises:
      ConfigError: the device has no data sheet in `common.hardware`.
    """
    kind = devices[0].device_kind
    room = room_of(local)
    if devices[0].platform == "cpu":
        return Devices("CPU devices", len(devices), "cpu", room, CpuClock(platform.physical_cores()))
    name = chip_name(kind)
    if name is None:
        raise ConfigError(f"mesh=auto has no data sheet of {kind}. Set the axes of the mesh, such as mesh.fsdp.")
    hosts = len({d.process_index for d in devices})
    host = len(devices) // hosts if platform_of(devices[0]) == "gpu" else None
    limits = ChipLimits(CHIPS[name], host_devices=host)
    return Devices(kind, len(devices), platform_of(devices[0]), room, ChipClock(limits))


def search(cfg: Config, devices: Devices, given: Collection[str] = (), count: int = 8) -> Found:
    """Returns the fastest candidates that fit, one for each mesh.

    Args:
      cfg: the resolved configuration.
      devices: the devices, with their memory and times.
      given: keys of `config.SEARCHED_KEYS` whose values in `cfg` are kept.
      count: meshes to return at most.

    Raises:
      ConfigError: no mesh is possible, or none fits. The message names the nearest that is possible and fits.
    """
    space = Space(cfg, devices.count, devices.platform, given)
    found = mesh_search.search(space, devices.room, devices.clock, count)
    if not found.meshes:
        raise _impossible(space, devices.name)
    if not found.ranked:
        raise _too_large(space, devices, found)
    return found


def _kept(space: Space) -> str:
    """Returns the given keys with their values, as flags behind the word `with`."""
    values = flat(space.cfg)
    shown = [f"--{key}={values[key]}" for key in SEARCHED_KEYS if key in space.given]
    return " ".join([" with", *shown]) if space.given else ""


def _impossible(space: Space, name: str) -> ConfigError:
    """Returns the error that no mesh is possible: what refuses the plainest one, and the nearest number of devices."""
    plain: Flags = {key: 1 for key in SEARCHED_KEYS if key.startswith("mesh.") and key not in space.given}
    if "mesh.data" in plain:
        plain["mesh.data"] = -1
    reason = ""
    try:
        space.require(plain)
    except ConfigError as error:
        reason = f" {str(error)[0].upper()}{str(error)[1:].rstrip('.')}."
    fewer = (n for n in range(space.devices - 1, 0, -1) if replace(space, devices=n).is_possible)
    nearest = next(fewer, None)
    advice = (
        f"{plural(nearest, 'device has', 'devices have')} a mesh." if nearest else "Change the keys that are given."
    )
    return ConfigError(f"{plural(space.devices, 'device')} ({name}) have no mesh{_kept(space)}.{reason} {advice}")


def _too_large(space: Space, devices: Devices, found: Found) -> ConfigError:
    """Returns the error that no mesh fits: what the smallest needs, and what would fit."""
    cfg = space.cfg
    room = devices.room
    least = found.least
    assert least is not None
    needed = least.need.formula * room.sharing / mesh_search.HEADROOM / GIB
    help_ = [f"{needed:.3g} GiB of memory with {' '.join(flags(flat(least.cfg), flat(cfg)))}"]
    for batch in mesh_search.smaller_batches(cfg.data):
        smaller = with_values(cfg, {"data.batch_size": batch, "train.grad_accum": 1})
        run = devices.search(replace(space, cfg=smaller))
        if run.can_fit({f"mesh.{axis}": size for axis, size in least.cfg.mesh.sizes.items()}):
            help_.append(f"--data.batch_size={batch}")
            break
    if room.sharing == 1 and not any(key.startswith("mesh.") for key in space.given):
        for times in (2, 4, 8, 16, 32, 64):
            if devices.search(replace(space, devices=times * devices.count)).any_fits:
                help_.append(plural(devices.count * times, "device"))
                break
    return ConfigError(
        f"model.num_layers={least.cfg.model.num_layers}, model.d_model={least.cfg.model.d_model} and data.batch_size="
        f"{cfg.data.batch_size} do not fit any mesh of {devices.name}"
        f"{_kept(space)}: {room.name} has {room.bytes / GIB:.3g} GiB, of which a tenth is left free. The nearest "
        f"that fits: {'; '.join(help_)}."
    )


def flags(values: Mapping[str, object], before: Mapping[str, object]) -> list[str]:
    """Returns the flags that turn the values of a configuration into others, with every axis that splits something."""
    shown = []
    for key in SEARCHED_KEYS:
        if key in PIPELINE_KEYS and values["mesh.pipe"] == 1:
            continue
        axis = key.startswith("mesh.") and values[key] != 1
        if axis or key == "mesh.data" or values[key] != before[key] or (key in PIPELINE_KEYS and values[key] != 1):
            shown.append(f"--{key}={values[key]}")
    return shown


def table(found: Found, before: Mapping[str, object], tokens: int) -> str:
    """Returns the ranked candidates with predicted time and memory, one in a line.

    `before` has the values that their flags change, and `tokens` is the number of tokens of a batch.
    """
    lines = [f"{'rank':<5} {'step s':>9} {'tokens/s':>12} {'GiB':>8}  flags"]
    for rank, c in enumerate(found.ranked, 1):
        rate = f"{tokens / c.seconds:,.0f}"
        words = " ".join(flags(flat(c.cfg), before))
        lines.append(f"{rank:<5} {c.seconds:>9.4g} {rate:>12} {c.need.formula / GIB:>8.2f}  {words}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Compiled:
    """A candidate beside its compiled program.

    Attributes:
      candidate: the candidate.
      step: the compiled step, or None if it could not be compiled.
      reason: why it could not.
    """

    candidate: Candidate
    step: aot.CompiledStep | None
    reason: str = ""

    def fits(self, room: Room) -> bool:
        """Returns whether the compiled program fits."""
        return self.step is not None and self.step.total <= room.bytes


def compile_candidate(candidate: Candidate, target: str) -> Compiled:
    """Compiles a candidate for a target; one that cannot be compiled is a result too."""
    try:
        return Compiled(candidate, aot.compile(candidate.cfg, target))
    except (ConfigError, ValueError, jax.errors.JaxRuntimeError) as error:
        return Compiled(candidate, None, str(error).partition("\n")[0][:150])


def comparison(compiled: Sequence[Compiled]) -> str:
    """Returns the memory and the bytes sent of each candidate, by formula and as compiled, one in a line."""
    lines = [f"{'rank':<5} {'GiB, formula':>13} {'compiled':>9} {'GiB sent, formula':>18} {'compiled':>9}"]
    for rank, one in enumerate(compiled, 1):
        formula = one.candidate.need.formula / GIB
        if one.step is None:
            lines.append(f"{rank:<5} {formula:>13.2f}  not compiled: {one.reason}")
            continue
        expected, sent = (sum(hlo.sent(each).values()) / GIB for each in (one.step.expected, one.step.collectives))
        lines.append(f"{rank:<5} {formula:>13.2f} {one.step.total / GIB:>9.2f} {expected:>18.3f} {sent:>9.3f}")
    return "\n".join(lines)
