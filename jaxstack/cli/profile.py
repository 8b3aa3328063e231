"""`jaxstack profile --config NAME --mesh.pipe=4 ... --out costs.json`

Measures what one microbatch of a run costs on the devices here, and writes it for `--pipeline.partition=costs.json`.
Configuration and flags are those of `jaxstack train`. The run may have more devices than there are here; then give the
sizes of all axes of its mesh.
"""

from pathlib import Path

from jaxstack import data
from jaxstack.config import ConfigError, parse, resolve
from jaxstack.runtime import platform


def main(argv: list[str]) -> None:
    name, words = parse.take(argv, "--out")
    if not name:
        raise ConfigError("--out is missing; name the file to write, such as --out costs.json")
    out = Path(name)
    if out.exists():
        raise ConfigError(f"--out={out} exists; remove it, or name another file")
    if not out.parent.is_dir():
        raise ConfigError(f"--out={out} lies in no directory; make {out.parent}, or name another file")
    cfg = parse.parse_config(words)
    if cfg.mesh.pipe == 1:
        raise ConfigError("mesh.pipe=1 has no stages to cut; give the mesh of the run, such as --mesh.pipe=4")
    cfg = resolve(cfg, cfg.model.vocab_size or data.load(cfg.data).tokenizer.vocab_size)
    platform.configure(cfg.mesh, cfg.data.batch_size // cfg.train.grad_accum)

    import jax

    from jaxstack.planner import pipeline_costs

    devices = jax.devices()
    measured = pipeline_costs.measure(cfg, cfg.mesh.resolved_sizes(len(devices)), devices)
    print(pipeline_costs.format_costs(measured))
    measured.save(out)
    print(f"wrote {out}: use it with --pipeline.partition={out}")
