"""Chooses the mesh of `--mesh=auto` for the devices of a run."""

import math
from collections.abc import Collection
from dataclasses import replace

import jax

from jaxstack.common.counts import plural
from jaxstack.config import Config, flat, with_values
from jaxstack.planner import mesh_plan
from jaxstack.runtime import distributed
from jaxstack.sharding import find_devices


def choose(cfg: Config, given: Collection[str], kept: Config | None) -> tuple[Config, str]:
    """Returns the configuration with the mesh of the run so far or the best one, and a line that says which.

    All processes choose the same: the choice depends on the configuration, on the devices of all processes and on the
    memory that process 0 has.

    Args:
      cfg: the resolved configuration. One axis of its mesh is open: its size is -1.
      given: keys of `config.SEARCHED_KEYS` that the search must not change.
      kept: the configuration with the mesh of the earlier part of the run. None means that there is none to keep.

    Raises:
      ConfigError: no mesh is possible, no mesh fits, or the devices have no data sheet in `common.hardware`.
    """
    devices = find_devices()
    if kept is not None and math.prod(kept.mesh.sizes.values()) == len(devices):
        return kept, f"mesh     of the run so far: {' '.join(mesh_plan.flags(flat(kept), flat(kept)))}"
    if len(devices) == 1:
        closed = with_values(cfg, {f"mesh.{axis}": 1 for axis in cfg.mesh.sizes})
        return closed, "mesh     one device, so that --mesh=auto has nothing to choose"
    local = [d for d in devices if d.process_index == jax.process_index()]
    here = mesh_plan.at_hand(devices, local)
    if jax.process_count() > 1:  # all processes must choose the same mesh
        size = distributed.broadcast_from_process_0(int(here.room.bytes / 2**20)) * 2**20
        here = replace(here, room=replace(here.room, bytes=size))
    first, *others = mesh_plan.search(cfg, here, given, count=2).ranked
    words = [
        f"{' '.join(mesh_plan.flags(flat(c.cfg), flat(cfg)))} ({c.seconds:.3g} s a step predicted)"
        for c in (first, *others)
    ]
    line = f"mesh     {words[0]}, chosen for {plural(len(devices), 'device')}"
    return first.cfg, line + (f"; runner-up {words[1]}" if others else "")
