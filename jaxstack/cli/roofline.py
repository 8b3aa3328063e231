"""Computes the least time of each part of a layer and of a step on a chip: FLOPs, bytes, and what limits it.

Parts are measured too if this machine has the chip. It takes the configuration of `jaxstack train`.
"""

import json
import os
from typing import TYPE_CHECKING, Literal

from jsonargparse import Namespace

from jaxstack.cli.plan import with_vocabulary
from jaxstack.common import files
from jaxstack.common.hardware import CHIPS, chip_name
from jaxstack.config import ConfigError
from jaxstack.config.bounds import PositiveFloat, PositiveFraction, PositiveInt
from jaxstack.config.reading.parse import Parser, user_path

if TYPE_CHECKING:  # JAX must start after the environment is set
    import jax

    from jaxstack.common.hardware import Chip
    from jaxstack.models.context import Context


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    parser.add_argument(
        "--chip",
        metavar="NAME",
        type=Literal["here", *CHIPS] | None,
        help="chip, or `here` to measure this machine's device; null means this machine's device by its data sheet",
    )
    parser.add_argument("--devices", type=PositiveInt, default=1, help="devices, for the open axis of the mesh")
    parser.add_argument(
        "--traffic",
        type=Literal["fused", "unfused"],
        default="fused",
        help="memory traffic of fused operations, or of one kernel for each operation",
    )
    parser.add_argument(
        "--matmul_efficiency", type=PositiveFraction, default=1.0, help="fraction of the peak that matmuls reach"
    )
    parser.add_argument(
        "--bandwidth_efficiency", type=PositiveFraction, default=1.0, help="fraction of the memory bandwidth reached"
    )
    parser.add_argument(
        "--link", metavar="GB", type=PositiveFloat | None, help="GB/s that a device sends; null means the chip's figure"
    )
    parser.add_argument(
        "--measure",
        type=Literal["auto", "yes", "no"],
        default="auto",
        help="whether to time the parts too; auto does so if the chip is this machine's device",
    )
    parser.add_argument("--json", metavar="FILE", type=user_path, help="file to write all figures to")
    parser.add_argument("--plot", metavar="FILE", type=user_path, help="file to write a picture to")
    parser.add_config()


def main(args: Namespace) -> None:
    """Prints the tables, and writes the files that are asked for.

    Raises:
      ConfigError: an argument is missing, or does not suit the chip or the configuration.
    """
    cfg = with_vocabulary(args.cfg)
    tables = files.writable("--json", args.json, (".json",)) if args.json is not None else None
    picture = files.writable("--plot", args.plot, files.PICTURES) if args.plot is not None else None
    if args.measure == "no":  # JAX takes most of a GPU's memory when it starts, and only measuring needs any
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from jaxstack import sharding
    from jaxstack.planner import measure, memory
    from jaxstack.planner import roofline as roof
    from jaxstack.planner.job import Job
    from jaxstack.planner.sizes import has_formulas

    device = sharding.find_devices()[0]
    name = _chip_name(args.chip, device)
    here = name in ("here", chip_name(device.device_kind))
    if args.measure == "yes" and not here:
        raise ConfigError(f"--measure=yes, but the device of this machine is {device.device_kind}. Use --chip here.")
    ctx = memory.context(cfg, args.devices if cfg.mesh.open_axis else None)
    chip = measure.this_chip(device, cfg.train.dtype) if name == "here" else CHIPS[name]
    limits = roof.ChipLimits(chip, args.matmul_efficiency, args.bandwidth_efficiency, _link(args.link, chip, ctx))
    job = Job(cfg, ctx)
    able = args.measure == "yes" or has_formulas(cfg.model)
    measured = measure.parts(job, device) if here and args.measure != "no" and able else {}
    report = roof.make_roofline(job, name, limits, args.traffic, measured)
    print(report)
    if tables:
        tables.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
        print(f"wrote {tables}")
    if picture:
        from jaxstack.planner import plot

        plot.draw(report, picture)
        print(f"wrote {picture}")


def _chip_name(name: str | None, device: "jax.Device") -> str:
    """Returns the name of the chip: the argument, or the chip of this machine's device.

    Raises:
      ConfigError: no name is given, and this machine's device is not in `CHIPS`.
    """
    found = name or chip_name(device.device_kind)
    if found is None:
        raise ConfigError(
            f"--chip is missing, and there is no data sheet of this machine's device ({device.device_kind}). Name one "
            f"of {', '.join(CHIPS)}, or measure this device with --chip here."
        )
    return found


def _link(gigabytes: float | None, chip: "Chip", ctx: "Context") -> float | None:
    """Returns the bytes/s that a device sends, or None for the chip's own figure.

    Raises:
      ConfigError: a mesh of several devices needs it, and neither the flag nor the chip gives it.
    """
    if not (gigabytes or chip.interconnect_bandwidth) and ctx.layout.mesh is not None and ctx.layout.mesh.size > 1:
        raise ConfigError("--link is missing, but the mesh has several devices. Give the GB/s that one device sends.")
    return 1e9 * gigabytes if gigabytes else None
