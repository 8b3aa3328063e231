"""Measures what `train.noise_scale` costs: `python benchmarks/noise_scale.py [--rounds 21]`, on the CPU, idle.

Steps of the quickstart with and without it take turns, on one device for each core, with one microbatch and with four.
`ratio` is the median time with it over the median without. The result goes to `benchmarks/results/noise_scale.json`.
"""

import argparse
import os
import time
from dataclasses import replace
from statistics import median
from typing import Any

import record

from jaxstack.config import Config, resolve
from jaxstack.config.reading.parse import parse_config
from jaxstack.runtime import platform


def measure(cfg: Config, rounds: int) -> dict[str, Any]:
    """Returns the median milliseconds of a step without and with the noise scale, and their ratio."""
    import jax
    import numpy as np

    from jaxstack import sharding
    from jaxstack.families.context import make_context
    from jaxstack.training import assemble
    from jaxstack.training.state import Recipe, abstract_state, make_state

    rng = np.random.default_rng(0)
    ids = rng.integers(0, cfg.model.vocab, (cfg.data.batch_size, cfg.data.seq_len + 1)).astype(np.int32)
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_weights": np.ones(ids[:, 1:].shape, np.float32)}
    ctx = make_context(cfg, sharding.make_mesh(cfg.mesh, cfg.microbatch_size))
    placed = jax.device_put(batch, ctx.layout.sharding(ctx.layout.batch))
    runs: dict[bool, list[Any]] = {}
    for on in (False, True):
        one = replace(cfg, train=replace(cfg.train, noise_scale=on))
        abstract = abstract_state(Recipe.of(one), ctx)
        runs[on] = [make_state(Recipe.of(one), ctx, abstract), assemble.jit_train_step(one, ctx, abstract)]
    seconds: dict[bool, list[float]] = {on: [] for on in runs}
    for _ in range(rounds + 1):
        for on, run in runs.items():
            begin = time.perf_counter()
            run[0], metrics = run[1](run[0], placed)
            jax.block_until_ready((run[0], metrics))
            seconds[on].append(time.perf_counter() - begin)
    off_ms, on_ms = (1e3 * median(found[1:]) for found in seconds.values())  # the first one compiles
    return {"off_ms": round(off_ms, 1), "on_ms": round(on_ms, 1), "ratio": round(on_ms / off_ms, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=21)
    rounds = parser.parse_args().rounds
    os.environ["JAX_PLATFORMS"] = "cpu"
    base = resolve(parse_config(["--config=quickstart"]), 256)
    platform.configure(base.mesh, base.data.batch_size)
    import jax

    load, rows = os.getloadavg()[0], []
    for microbatches in (1, 4):
        cfg = replace(base, train=replace(base.train, grad_accum=microbatches))
        row = {"devices": jax.device_count(), "microbatches": microbatches, **measure(cfg, rounds)}
        rows.append(row)
        print(row, flush=True)
    record.record("noise_scale", {"load_before": round(load, 1), "rounds": rounds, "cases": rows})


if __name__ == "__main__":
    main()
