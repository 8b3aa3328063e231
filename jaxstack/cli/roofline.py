"""`jaxstack plan --target v5e:4x4 --config NAME --mesh.tensor=4 ...`
`jaxstack plan roofline --chip h100 --config NAME --mesh.fsdp=8 ...`

The first compiles the training step for chips that are not here and prints whether it fits, and what it moves along
each axis of the mesh, both beside the formula.

The second says where the time of a layer and of a step must go on a chip: FLOPs, bytes, what bounds each part and its
least time, see `jaxstack/planner/roofline.py`. Configuration and flags are those of `jaxstack train`; its own are

    --chip NAME                 of `jaxstack/common/hardware.py`; `here`: measure this device's matmuls and copies;
    default: the
                                device at hand, where its data sheet is known
    --devices N                 fills an axis of the mesh that is left open (default 1)
    --traffic fused|unfused     of memory (default fused)
    --matmul_efficiency X       part of the peak that matmuls reach (default 1)
    --bandwidth_efficiency X    part of the memory's bandwidth (default 1)
    --link GB                   GB/s that a device sends (default: the chip's to its host or slice)
    --measure yes|no            time the parts here too (default: where the chip is the one at hand)
    --json FILE, --plot FILE    write everything, or a picture
"""

import json
import os
from pathlib import Path

from jaxstack.common.hardware import CHIPS, name_of
from jaxstack.config import ConfigError, parse, resolve

FLAGS = ("chip", "devices", "traffic", "matmul_efficiency", "bandwidth_efficiency", "link", "measure", "json", "plot")
"""Of `roofline`, beside the configuration's."""


def main(argv: list[str]) -> None:
    if argv[:1] == ["roofline"]:
        return roofline(argv[1:])
    from jaxstack.cli.plan import main as compile_ahead

    compile_ahead(argv)


def roofline(words: list[str]) -> None:
    if {"-h", "--help"} & set(words):
        return print(__doc__)
    own = {}
    for flag in FLAGS:
        own[flag], words = parse.take(words, f"--{flag}")
    cfg = parse.parse_config(words)
    if cfg.model.vocab_size is None:
        raise ConfigError("model.vocab_size is missing; no data is read here: set --model.vocab_size=...")
    cfg = resolve(cfg, cfg.model.vocab_size)
    chip, traffic = own["chip"], own["traffic"] or "fused"
    if chip not in (None, "here", *CHIPS):
        raise ConfigError(f"--chip={chip} must be here or one of {', '.join(CHIPS)}")
    if traffic not in ("fused", "unfused"):
        raise ConfigError(f"--traffic={traffic} must be fused or unfused")
    if own["measure"] not in (None, "yes", "no"):
        raise ConfigError(f"--measure={own['measure']} must be yes or no")
    devices = _number("devices", own["devices"], 1)
    if devices != int(devices):
        raise ConfigError(f"--devices={own['devices']} must be a whole number")
    matmul, bandwidth = (_number(name, own[name], 1) for name in ("matmul_efficiency", "bandwidth_efficiency"))
    for part, value in (("matmul_efficiency", matmul), ("bandwidth_efficiency", bandwidth)):
        if value > 1:
            raise ConfigError(f"--{part}={value} must lie between 0 and 1: a part of what the data sheet says")
    link = _number("link", own["link"], 0)

    # JAX takes most of a GPU's memory when it starts; only what measures needs any.
    if own["measure"] == "no":
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    from jaxstack.planner import measure
    from jaxstack.planner import roofline as roof

    device = jax.devices()[0]
    at_hand = name_of(device.device_kind)
    if chip is None and at_hand is None:
        raise ConfigError(
            f"--chip is missing, and of this device ({device.device_kind}) there is no data sheet here; name one of "
            f"{', '.join(CHIPS)}, or --chip here to measure it"
        )
    name = chip or at_hand
    assert name is not None
    ctx = roof.context(cfg, int(devices))
    data = measure.this_chip(device, cfg.train.dtype) if name == "here" else CHIPS[name]
    if not (link or data.interconnect_bandwidth) and ctx.mesh is not None and ctx.mesh.size > 1:
        raise ConfigError("--link is missing: a mesh of several devices needs the GB/s that one sends")
    limits = roof.ChipLimits(data, matmul, bandwidth, 1e9 * link or None)
    here = name in (at_hand, "here")
    if own["measure"] == "yes" and not here:
        raise ConfigError(f"--measure=yes, but the device at hand is {device.device_kind}; use --chip here")
    measured = measure.parts(cfg, ctx, device) if here and own["measure"] != "no" else {}
    report = roof.make_roofline(cfg, name, limits, traffic, int(devices), measured)  # type: ignore[arg-type]
    print(report)
    if own["json"]:
        Path(own["json"]).write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
        print(f"wrote {own['json']}")
    if own["plot"]:
        from jaxstack.planner import plot

        plot.draw(report, Path(own["plot"]))
        print(f"wrote {own['plot']}")


def _number(name: str, text: str | None, default: float) -> float:
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"--{name}={text} must be a number above 0")
    return value
