"""Compares two places of the sums of gradients over simulated devices: `python benchmarks/gradient_sums.py`

Without accumulation, a layer's gradients are summed over devices in its part of the backward pass. The other place is
after the whole backward pass, as with accumulation. Both steps of two small models take turns in rounds, on 2 and on
8 devices of a CPU; `speed` is the median time of today's place over that of the other. The result goes to
`benchmarks/results/gradient_sums.json`.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from statistics import median
from typing import Any
from unittest import mock

import record

from jaxstack.config import Config, DataConfig, KernelsConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from jaxstack.runtime import platform

MODELS = {
    "quickstart": (
        ModelConfig(num_layers=4, d_model=128, num_heads=4, d_ff=352, vocab_size=256),
        DataConfig(seq_len=128, batch_size=16),
    ),
    "deep": (
        ModelConfig(num_layers=16, d_model=64, num_heads=8, d_ff=176, vocab_size=256),
        DataConfig(seq_len=64, batch_size=16),
    ),
}


def measure(cfg: Config, rounds: int) -> dict[str, float]:
    """Returns the median milliseconds of a step with each place, and today's over the other's."""
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
    runs: dict[str, list[Any]] = {}
    for place, by_layer in (("by layer", True), ("once", False)):
        abstract = abstract_state(Recipe.of(cfg), ctx)
        with mock.patch.object(assemble, "in_parts", lambda *_, answer=not by_layer: answer):
            train_step = assemble.jit_train_step(cfg, ctx, abstract)
            runs[place] = [make_state(Recipe.of(cfg), ctx, abstract), train_step]
            runs[place][0], _ = train_step(runs[place][0], placed)
    seconds: dict[str, list[float]] = {place: [] for place in runs}
    for _ in range(rounds):
        for place, run in runs.items():
            begin = time.perf_counter()
            run[0], metrics = run[1](run[0], placed)
            jax.block_until_ready((run[0], metrics))
            seconds[place].append(time.perf_counter() - begin)
    times = {place: 1e3 * median(found) for place, found in seconds.items()}
    return {place: round(t, 1) for place, t in times.items()} | {"speed": round(times["by layer"] / times["once"], 3)}


def worker(devices: int, rounds: int) -> None:
    """Prints a line for each model, form of its layers and axis of the mesh."""
    for model, (shape, data) in MODELS.items():
        for layers in ("scan", "unrolled"):
            for axis in ("data", "fsdp"):
                cfg = Config(
                    model=shape,
                    data=data,
                    optim=OptimConfig(warmup_steps=0, schedule="constant"),
                    train=TrainConfig(steps=10**6, remat="none"),
                    kernels=KernelsConfig(layers=layers),  # type: ignore[arg-type]
                    mesh=MeshConfig(**{"data": 1, axis: devices}),  # type: ignore[arg-type]
                )
                case = {"model": model, "devices": devices, "layers": layers, "axis": axis}
                print(json.dumps(case | measure(cfg, rounds)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--devices", nargs="+", type=int, default=[2, 8])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args.devices[0], args.rounds)
    os.environ["JAX_PLATFORMS"] = "cpu"
    rows = []
    for devices in args.devices:
        variables = {"JAX_NUM_CPU_DEVICES": str(devices), "NPROC": str(2 * devices)}
        variables["XLA_FLAGS"] = f"--{'='.join(platform.CPU_FLAG)}"
        words = [sys.executable, __file__, "--worker", "--rounds", str(args.rounds), "--devices", str(devices)]
        with subprocess.Popen(words, env=os.environ | variables, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None
            for line in run.stdout:
                print(line, end="", flush=True)
                rows.append(json.loads(line))
        assert run.returncode == 0, run.returncode
        record.record("gradient_sums", {"cases": rows})


if __name__ == "__main__":
    main()
