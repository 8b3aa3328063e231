"""Measures how much slower a pipeline is than data parallelism: `python benchmarks/pipeline_cpu.py [--rounds 9]`

Runs the training step of a small model on two CPU devices, as two stages by each schedule and as two replicas, with the
same recomputation. Steps of all alternate. The median of the ratios goes to `benchmarks/results/pipeline_cpu.json`,
beside the ratio that the bubble alone would give.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import record

sys.path.insert(0, str(Path(__file__).parent.parent))
from jaxstack.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, PipelineConfig, TrainConfig
from jaxstack.runtime import platform

STAGES = MeshConfig(data=1, pipe=2)
CASES = {
    "replicas": (MeshConfig(data=2), PipelineConfig()),
    "gpipe": (STAGES, PipelineConfig("gpipe", 16)),
    "1f1b": (STAGES, PipelineConfig("1f1b", 16)),
    "interleaved_1f1b": (STAGES, PipelineConfig("interleaved_1f1b", 16, 2)),
}


def config(mesh: MeshConfig, pipeline: PipelineConfig, batch: int) -> Config:
    """Returns a small model on a mesh."""
    return Config(
        model=ModelConfig(num_layers=8, d_model=256, num_heads=4, vocab_size=256),
        data=DataConfig(seq_len=256, batch_size=batch),
        optim=OptimConfig(warmup_steps=0, schedule="constant"),
        train=TrainConfig(steps=10**6),
        mesh=mesh,
        pipeline=pipeline,
    )


def measure(configs: dict[str, Config], rounds: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Runs the training steps of several configurations in turn.

    Args:
      configs: by name; all have the same batch size.
      rounds: how often each is timed, after one step that is not.

    Returns:
      The seconds of each step by name, and the pipeline programs by name.
    """
    import jax
    import numpy as np

    from jaxstack import sharding
    from jaxstack.families.context import make_context
    from jaxstack.training import assemble
    from jaxstack.training.state import Recipe, abstract_state, make_state

    runs: dict[str, Any] = {}
    programs: dict[str, Any] = {}
    for name, cfg in configs.items():
        rows, length = cfg.data.batch_size, cfg.data.seq_len
        ids = np.random.default_rng(0).integers(0, 256, (rows, length + 1)).astype(np.int32)
        batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_weights": np.ones((rows, length), np.float32)}
        ctx = make_context(cfg, sharding.make_mesh(cfg.mesh, rows))
        abstract = abstract_state(Recipe.of(cfg), ctx)
        train_step = assemble.jit_train_step(cfg, ctx, abstract)
        runs[name] = [
            make_state(Recipe.of(cfg), ctx, abstract),
            train_step,
            jax.device_put(batch, ctx.layout.sharding(ctx.layout.batch)),
        ]
        if ctx.layout.pipeline is not None:
            programs[name] = ctx.layout.pipeline

    def one_step(name: str) -> float:
        state, train_step, placed = runs[name]
        begin = time.perf_counter()
        runs[name][0], metrics = train_step(state, placed)
        jax.block_until_ready(metrics)
        return time.perf_counter() - begin

    times: dict[str, list[float]] = {name: [] for name in configs}
    for name in configs:
        one_step(name)
    for _ in range(rounds):
        for name, found in times.items():
            found.append(one_step(name))
    return times, programs


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--batch", type=int, default=32)
    given = arguments.parse_args()
    platform.configure(STAGES, given.batch)

    configs = {name: config(mesh, pipeline, given.batch) for name, (mesh, pipeline) in CASES.items()}
    times, programs = measure(configs, given.rounds)
    results: dict[str, Any] = {"tokens": given.batch * 256, "rounds": given.rounds, "step_ms": {}, "over_replicas": {}}
    for name, found in times.items():
        results["step_ms"][name] = round(1e3 * median(found), 1)
        if name in programs:
            ratio = median(t / plain for t, plain in zip(found, times["replicas"], strict=True))
            results["over_replicas"][name] = {
                "ratio": round(ratio, 3),
                "of_the_bubble": round(1 + programs[name].bubble, 3),
            }
    print(results)
    print(record.record("pipeline_cpu", results))


if __name__ == "__main__":
    main()
