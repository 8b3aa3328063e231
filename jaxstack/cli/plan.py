"""`jaxstack plan --target v5e:4x4 --config NAME --mesh.tensor=4 ...`

Compiles the training step for chips that are not here and prints whether it fits, and what it moves along each axis of
the mesh, both beside the formula. Configuration and flags are those of
`jaxstack train`.
"""

import os
import time

from jaxstack.config import ConfigError, parse, resolve


def main(argv: list[str]) -> None:
    target, words = parse.take(argv, "--target")
    if not target:
        raise ConfigError("--target is missing; name a chip and a topology, such as --target v5e:4x4 or h100:1x8x8")
    cfg = parse.parse_config(words)
    if cfg.model.vocab_size is None:
        raise ConfigError("model.vocab_size is missing; no data is read here: set --model.vocab_size=...")
    cfg = resolve(cfg, cfg.model.vocab_size)

    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX is imported: the target's chips are not here
    from jaxstack.planner import aot

    begin = time.perf_counter()
    try:
        report = aot.compile(cfg, target)
    except aot.Unavailable as error:
        raise ConfigError(str(error)) from error
    print(f"compiled for {target} in {time.perf_counter() - begin:.0f} s")
    print(report)
