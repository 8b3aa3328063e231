"""What `train.offload` stores in the host's memory, what it moves, and how long a device waits for the copies."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import jax

from jaxstack import families
from jaxstack.common.hardware import HOST_BANDWIDTH
from jaxstack.common.tree import path_of
from jaxstack.config import ConfigError
from jaxstack.models import params as parameters
from jaxstack.planner import shards
from jaxstack.planner.hlo_text import Instruction, bytes_of, computations_of, dims, runs_of
from jaxstack.planner.job import Job
from jaxstack.training.state import HOST, TrainState, host_paths

IN_FLIGHT = 2
"""Layers whose residuals are on the device: those that are copied and those that are computed or read."""

TO_HOST = "to the host"
TO_DEVICE = "to the device"

_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,]*)\](\{[^{}]*\})?")
_HOST_SPACE = "S(5)"
"""How XLA writes in an array's layout that it is in the host's memory."""


def has_host_memory(job: Job) -> bool:
    """Returns whether host and device have separate memories. On a CPU they do not."""
    return job.ctx.ops.platform != "cpu"


def device_state(job: Job, state: TrainState) -> TrainState:
    """Returns the abstract state without the arrays that are in the host's memory between updates."""
    if not job.train.offloads_optimizer or not has_host_memory(job):
        return state
    on_host = _host_paths(job, state)
    opt_state = jax.tree_util.tree_map_with_path(
        lambda keys, leaf: None if path_of(keys) in on_host else leaf, state.opt_state
    )
    return replace(state, opt_state=opt_state)


def host_state_bytes(job: Job, state: TrainState) -> float:
    """Returns the bytes of the optimizer's state that a device has in its host's memory."""
    return shards.bytes_of(state) - shards.bytes_of(device_state(job, state))


def group_bytes(job: Job, state: TrainState) -> float:
    """Returns the bytes of the optimizer's state that the update of one group copies to the device."""
    if not job.train.offloads_optimizer or not has_host_memory(job):
        return 0.0
    trained, _ = parameters.partition(families.spec(job.model), state.params)
    sizes = [leaf.size for leaf in jax.tree.leaves(trained)]
    return host_state_bytes(job, state) * max(sizes) / sum(sizes)


def residual_layers(job: Job, layers: float) -> float:
    """Returns how many of the layers have their residuals on the device."""
    return min(IN_FLIGHT, layers) if job.train.offloads_residuals and has_host_memory(job) else layers


def host_rate(chip: str) -> float:
    """Returns the bytes/s that a device copies to its host; at the same time, it copies as many from the host.

    Raises:
      ConfigError: no source has the rate of the chip.
    """
    if chip not in HOST_BANDWIDTH:
        raise ConfigError(
            f"train.offload copies to the host, but no source has the rate of {chip}. Use train.offload=none, or "
            f"another chip: {', '.join(HOST_BANDWIDTH)}."
        )
    return HOST_BANDWIDTH[chip][0]


def _host_paths(job: Job, state: TrainState) -> set[str]:
    trained, _ = parameters.partition(families.spec(job.model), families.spec(job.model))
    return host_paths(state.opt_state, tuple(parameters.flat_spec(trained)))


def host_copies(text: str, trip_counts: Mapping[str, float] | None = None) -> dict[str, float]:
    """Returns the bytes that a program copies between device and host in one step, by direction.

    Args:
      text: the result of `jax.stages.Compiled.as_text()`, for GPU or TPU.
      trip_counts: see `hlo.collectives`.
    """
    computations, entry = computations_of(text)
    times = runs_of(computations, entry, trip_counts or {})
    found: Counter[str] = Counter()
    for name, instructions in computations.items():
        types = {i.name: i.type for i in instructions}
        for i in instructions if times.get(name) else ():
            for direction, size in _copy_of(i, types):
                found[direction] += times[name] * size  # type: ignore[assignment]
    return dict(found)


def _copy_of(i: Instruction, types: Mapping[str, str]) -> list[tuple[str, float]]:
    """Returns direction and bytes of the copy that an instruction starts, if it starts one.

    Copies are written as `copy-start`. Slices of stacked arrays are written as an asynchronous slice or update, which
    on a GPU is a fusion.
    """
    if i.op not in ("copy", "copy-start", "dynamic-slice-start", "dynamic-update-slice-start", "fusion-start"):
        return []
    arrays = _arrays(i.type)
    if i.op == "copy":
        arrays += [array for name in i.operands for array in _arrays(types.get(name, ""))]
    on_device = [size for on_host, size in arrays if not on_host]
    if len(on_device) == len(arrays) or not on_device:
        return []
    # A copy has its result first. An asynchronous operation has its operands first, and then its result.
    result_on_host = arrays[0][0] if i.op in ("copy", "copy-start") else [on_host for on_host, n in arrays if n > 4][-1]
    return [(TO_HOST if result_on_host else TO_DEVICE, max(on_device))]


def _arrays(type: str) -> list[tuple[bool, float]]:
    """Returns for each array of a type whether it is in the host's memory, and its bytes."""
    return [(_HOST_SPACE in layout, bytes_of(dtype, dims(shape))) for dtype, shape, layout in _ARRAY.findall(type)]


def place_arguments(lowered: jax.stages.Lowered, state: TrainState, job: Job) -> None:
    """Writes into a lowered step that the optimizer's arrays are in the host's memory when it begins.

    JAX writes this for devices that list their memories. A described GPU has no list, so JAX drops the memory kind of
    the arguments, and XLA would read them without a copy.
    """
    from jaxlib.mlir import ir

    on_host = _host_paths(job, state)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    module = lowered.compiler_ir("stablehlo")
    assert module is not None
    with module.context:
        main = next(op for op in module.body.operations if op.attributes["sym_name"].value == "main")
        changed = []
        for index, attributes in enumerate(main.attributes["arg_attrs"]):
            path = path_of(leaves[index][0]) if index < len(leaves) else ""
            kind = HOST if path.removeprefix("opt_state/") in on_host else "device"
            entries = ir.DictAttr(attributes)
            named = {entries[k].name: entries[k].attr for k in range(len(entries))}
            named["mhlo.memory_kind"] = ir.StringAttr.get(kind)
            changed.append(ir.DictAttr.get(named))
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(changed)
