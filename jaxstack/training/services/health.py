"""Checks the machines of a run before its first step: devices, versions, clocks, free disk, and an all-reduce."""

import json
import math
import os
import shutil
import socket
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxstack import families
from jaxstack.checkpoint import store
from jaxstack.common.counts import plural
from jaxstack.common.errors import Exit, RunError
from jaxstack.common.hardware import CHIPS, chip_name
from jaxstack.config import ConfigError, MeshConfig, ModelConfig
from jaxstack.models import params
from jaxstack.runtime import distributed
from jaxstack.runtime.watchdog import ending_of
from jaxstack.sharding import mesh as meshes

SKEW_S = 5.0
"""Difference between clocks that is reported. Machines with a time service differ by milliseconds."""

_ANNOUNCED_S = 2
"""Seconds in which a process that ends with an error tells the others why."""

SLOW = 0.25
"""Share of the data sheet's bandwidth below which an all-reduce is reported. Sound links reach 0.5 to 0.8; a link that
fell back to PCIe or to TCP reaches 0.1."""


@dataclass(frozen=True)
class Machine:
    """What one process reports about its machine.

    Attributes:
      host: name of the machine.
      devices: number of JAX's devices of this process.
      kind: JAX's name of these devices.
      versions: versions of Python, of the libraries, and of the platform with its driver.
      clock: seconds of its clock, which all processes read at the same time.
      free: bytes that are free on the disk of `run.dir`.
      bandwidth: bytes/s that each device sends in an all-reduce among the devices of this process; 0 for one device.
      idle_gpus: number of NVIDIA's GPUs that JAX does not use, if it uses the CPU without being asked to.
    """

    host: str
    devices: int
    kind: str
    versions: dict[str, str]
    clock: float
    free: int
    bandwidth: float
    idle_gpus: int = 0


def check(model: ModelConfig, mesh: MeshConfig, directory: str, timeout_s: float, preflight: bool = False) -> None:
    """Checks the machines of all processes, and prints a line with what was measured. All processes call this.

    Slow links and wrong clocks are warnings, with which a run is slow but right. In a preflight they are errors.

    Args:
      model: says what a checkpoint has.
      mesh: says how many devices the run needs.
      directory: `run.dir`.
      timeout_s: for all processes to answer.
      preflight: whether to check a single process too, and to print that the checks have passed.

    Raises:
      ConfigError: on every process, with a sentence for each machine that differs or lacks something.
      RunError: another process was lost meanwhile.
    """
    meshes.find_devices()  # its error says what to do if JAX cannot start
    if jax.process_count() == 1 and not preflight:
        return
    try:
        _check(model, mesh, directory, timeout_s, preflight)
    except jax.errors.JaxRuntimeError as error:
        time.sleep(_ANNOUNCED_S)
        if found := distributed.cause(jax.process_index()):
            index, code, why = found
            ended, message = ending_of(index, jax.process_count(), code, why)
            raise RunError(ended, f"error: {message}") from None
        reason = str(error).strip().partition("\n")[0]
        raise RunError(
            Exit.PEER_LOST,
            f"error: a process was lost while the machines were checked ({reason}). Check the logs of all processes, "
            f"and start them again.",
        ) from None


def _check(model: ModelConfig, mesh: MeshConfig, directory: str, timeout_s: float, preflight: bool) -> None:
    distributed.coordinator_barrier("health", timeout_s)  # so that all read their clocks at the same time
    texts = distributed.gather_to_process_0("health", json.dumps(asdict(measure(directory))), timeout_s)
    machines = [Machine(**json.loads(text)) for text in texts]
    sizes = None if mesh.open_axis else math.prod(mesh.sizes.values())
    errors = faults(machines, sizes, least_bytes(model)) if machines else []
    _raise(distributed.send_from_process_0("health/faults", _sentences(errors), timeout_s))

    bandwidth = all_reduce_bandwidth(jax.devices())
    expected = expected_bandwidth(jax.devices())
    warnings = slow(machines, bandwidth, expected) if machines else []
    if machines:
        print(summary(machines, bandwidth, expected), flush=True)
    if preflight:
        _raise(distributed.send_from_process_0("health/slow", _sentences(warnings), timeout_s))
    for line in [*warnings, *(["preflight passed; nothing was trained"] if preflight and machines else [])]:
        print(f"         {line}", flush=True)


def _sentences(found: Sequence[str], most: int = 3) -> str:
    more = (
        f" {plural(len(found) - most, 'more machine has', 'more machines have')} faults." if len(found) > most else ""
    )
    return " ".join(found[:most]) + more


def _raise(text: str) -> None:
    if text:
        raise ConfigError(text)


def measure(directory: str) -> Machine:
    """Returns what this process finds on its machine.

    Args:
      directory: `run.dir`, which need not exist.
    """
    clock = time.time()
    devices = jax.local_devices()
    path = Path(directory).absolute()
    disk = next(folder for folder in (path, *path.parents) if folder.exists())
    versions = store.versions() | {"platform": str(devices[0].client.platform_version).strip().splitlines()[0]}
    kind = devices[0].device_kind
    bandwidth = all_reduce_bandwidth(devices)
    fell_back = devices[0].platform == "cpu" and not os.environ.get("JAX_PLATFORMS")
    idle_gpus = len([*Path("/dev").glob("nvidia[0-9]*")]) if fell_back else 0
    return Machine(
        socket.gethostname(), len(devices), kind, versions, clock, shutil.disk_usage(disk).free, bandwidth, idle_gpus
    )


def least_bytes(model: ModelConfig) -> int:
    """Returns the bytes that every checkpoint has at least: the trained parameters in float32."""
    spec = families.spec(model)
    return 4 * params.count(params.partition(spec, spec)[0])


def faults(machines: Sequence[Machine], devices: int | None, needed: int) -> list[str]:
    """Returns two sentences for each machine with which the run would fail: what is wrong, and what to do.

    Args:
      machines: machines of all processes, in their order.
      devices: number of devices that the mesh needs; None if it takes what is there.
      needed: bytes of a checkpoint.
    """
    names = _names(machines)
    found = []
    most = max(machine.devices for machine in machines)
    complete = sum(machine.devices for machine in machines) == devices
    kind = _most_common([machine.kind for machine in machines])
    for name, machine in zip(names, machines, strict=True):
        if machine.devices < most and not complete:
            found.append(
                f"{name} has {plural(machine.devices, 'device')}, and others have {most}. Repair it, or leave it out "
                f"of the job."
            )
        if machine.kind != kind:
            found.append(f"{name} has devices of kind {machine.kind}, and others {kind}. Use one kind of machine.")
        if gpus := machine.idle_gpus:
            found.append(
                f"{name} has {gpus} GPU{'s' * (gpus > 1)} that JAX cannot use, so it uses the CPU. Check the driver "
                f"and jax[cuda13], or set JAX_PLATFORMS=cpu."
            )
        if machine.free < needed:
            found.append(
                f"{name} has {_giga(machine.free)} GB free for run.dir, and a checkpoint has at least "
                f"{_giga(needed)} GB. Make room, or set another run.dir."
            )
    for package in sorted({package for machine in machines for package in machine.versions}):
        versions = [machine.versions.get(package, "missing") for machine in machines]
        usual = _most_common(versions)
        found += [
            f"{name} has {package} {version}, and others {usual}. Install the same versions on all machines."
            for name, version in zip(names, versions, strict=True)
            if version != usual
        ]
    return found


def slow(machines: Sequence[Machine], bandwidth: float, expected: float) -> list[str]:
    """Returns two sentences for each wrong clock, and for links that are much slower than the data sheet says.

    Args:
      machines: machines of all processes, in their order.
      bandwidth: bytes/s of an all-reduce among all devices; 0 for one device.
      expected: bytes/s of the data sheet for it; 0 if there is none.
    """
    found = []
    usual = statistics.median_low(machine.clock for machine in machines)
    for name, machine in zip(_names(machines), machines, strict=True):
        if abs(late := usual - machine.clock) > SKEW_S:
            direction = "behind" if late > 0 else "ahead of"
            found.append(f"The clock of {name} is {abs(late):.0f} s {direction} the others. Start its time service.")
        chip = CHIPS.get(chip_name(machine.kind) or "")
        link = chip.interconnect_bandwidth if chip and chip.platform == "gpu" else 0.0  # a TPU's host has few links
        if 0 < machine.bandwidth < SLOW * link:
            found.append(
                f"An all-reduce within {name} has {_giga(machine.bandwidth)} GB/s, and the data sheet says "
                f"{_giga(link)}. Check its links, for example with nvidia-smi topo -m."
            )
    if 0 < bandwidth < SLOW * expected and not found:
        found.append(
            f"An all-reduce among all devices has {_giga(bandwidth)} GB/s, and the data sheet says "
            f"{_giga(expected)}. Check the network between {' and '.join(sorted({m.host for m in machines})[:4])}."
        )
    return found


def summary(machines: Sequence[Machine], bandwidth: float, expected: float) -> str:
    """Returns the line with what was measured; see `slow` for the arguments."""
    clocks = [machine.clock for machine in machines]
    counts = Counter(f"{machine.devices} {machine.kind}" for machine in machines)
    devices = " and ".join(f"{count} x {kind}" for kind, count in counts.items())
    reduced = f"; all-reduce {_giga(bandwidth)} GB/s" if bandwidth else ""
    share = f", {bandwidth / expected:.0%} of the data sheet" if bandwidth and expected else ""
    return (
        f"health   {devices}; clocks within {max(clocks) - min(clocks):.2f} s; "
        f"{_giga(min(machine.free for machine in machines))} GB free{reduced}{share}"
    )


def all_reduce_bandwidth(devices: Sequence[jax.Device]) -> float:
    """Returns the bytes/s that each device sends in an all-reduce among `devices`, or 0 for a single device.

    A ring sends 2 (n-1)/n of the bytes that each of n devices has. All processes with one of the devices call this.
    """
    count = len(devices)
    if count == 1:
        return 0.0
    simulated = devices[0].platform == "cpu"
    if simulated:
        meshes.disable_cache()
    floats = 1 << (18 if simulated else 24)
    mesh = Mesh(np.array(devices), ("all",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("all"))
    ones = jax.jit(lambda: jnp.ones((count, floats), jnp.float32), out_shardings=split)()
    reduced = jax.shard_map(
        lambda x: jax.lax.psum(x, "all"), mesh=mesh, in_specs=PartitionSpec("all"), out_specs=PartitionSpec()
    )
    all_reduce = jax.jit(reduced)
    jax.block_until_ready(all_reduce(ones))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(all_reduce(ones))
        seconds.append(time.perf_counter() - start)
    return 2 * (count - 1) / count * 4 * floats / min(seconds)


def expected_bandwidth(devices: Sequence[jax.Device]) -> float:
    """Returns the bytes/s that the chip's data sheet promises each device in an all-reduce, or 0 if it is not listed.

    Between hosts of GPUs, or between slices of TPUs, all network cards of a host carry rings.
    """
    chip = CHIPS.get(chip_name(devices[0].device_kind) or "")
    if chip is None:
        return 0.0
    group = "slice_index" if chip.platform == "tpu" else "process_index"
    sizes = Counter(getattr(device, group, 0) for device in devices)
    link = chip.interconnect_bandwidth
    return link if len(sizes) == 1 else min(link, chip.network_bandwidth * min(sizes.values()))


def _giga(value: float) -> str:
    """Returns a number of bytes, or of bytes/s, in billions with three digits."""
    return f"{value / 1e9:,.0f}" if value >= 1e11 else f"{value / 1e9:.3g}"


def _names(machines: Sequence[Machine]) -> list[str]:
    return [f"{machine.host} (process {i})" for i, machine in enumerate(machines)]


def _most_common(values: Sequence[str]) -> str:
    return Counter(values).most_common(1)[0][0]
