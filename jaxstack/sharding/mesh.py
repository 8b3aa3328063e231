"""The device mesh."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxstack.config import ConfigError, MeshConfig

AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")
"""Mesh axes, outermost (slowest links) first. All always exist: size 1 costs nothing, and rules need no branches."""


def make_mesh(cfg: MeshConfig, batch: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over `devices` (all of them by default), with automatic axes.

    Args:
      cfg: sizes.
      batch: sequences of one microbatch; the data axis must divide it.
      devices: what to build on.

    Raises:
      ConfigError: more devices are asked for than there are, or they do not divide the batch.
    """
    devices = list(jax.devices() if devices is None else devices)
    data = cfg.data if cfg.data != -1 else len(devices)
    if data > len(devices):
        raise ConfigError(f"mesh.data={data} needs {data} devices, but there are {len(devices)}; lower it or use -1")
    if batch % data:
        fits = max(n for n in range(1, data + 1) if batch % n == 0)
        raise ConfigError(
            f"mesh.data={data} does not divide the {batch} sequences of a microbatch; use mesh.data={fits}, "
            f"or a data.batch_size that is a multiple of {data}"
        )
    shape = tuple(data if axis == "data" else 1 for axis in AXES)
    # Auto is said aloud: `jax.make_mesh` would default to explicit axes. A prefix of the devices may be used.
    return Mesh(np.asarray(devices[:data]).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))
