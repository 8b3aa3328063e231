"""Measures what one microbatch of a run costs on the devices of this machine, for `--pipeline.partition=FILE`.

It takes the configuration of `jaxstack train`. If the run has more devices than this machine, give
all sizes of its mesh.
"""

from pathlib import Path

from jsonargparse import Namespace

from jaxstack.config import ConfigError
from jaxstack.config.reading.parse import Parser, user_path
from jaxstack.runtime import platform


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    parser.add_argument("--out", type=user_path, help="file to write, such as costs.json (required)", metavar="FILE")
    parser.add_config()


def main(args: Namespace) -> None:
    """Measures, prints a table and writes the file.

    Raises:
      ConfigError: the file exists, or the run has no pipeline.
    """
    if not args.out:
        raise ConfigError("--out is missing. Name the file to write, such as --out costs.json.")
    from jaxstack import data  # here: help need not wait for it

    cfg = args.cfg
    out = Path(args.out)
    if out.exists():
        raise ConfigError(f"--out={out} exists. Remove it, or name another file.")
    if not out.parent.is_dir():
        raise ConfigError(
            f"--out={out} is in a directory that does not exist. Make {out.parent}, or name another file."
        )
    if cfg.mesh.pipe == 1:
        raise ConfigError("mesh.pipe=1 has no stages to balance. Give the mesh of the run, such as --mesh.pipe=4.")
    cfg = data.resolve_from_data(cfg)
    platform.configure(cfg.mesh, cfg.microbatch_size)

    from jaxstack import sharding
    from jaxstack.planner import pipeline_costs

    devices = sharding.find_devices()
    measured = pipeline_costs.measure(cfg, cfg.mesh.resolved_sizes(len(devices)), devices)
    print(pipeline_costs.format_costs(measured))
    measured.save(out)
    print(f"wrote {out}: use it with --pipeline.partition={out}")
