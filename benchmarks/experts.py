"""Measures whether more experts slow a training step down: `python benchmarks/experts.py [--rounds 9]`, on the CPU.

The model is small and dropless, and each token uses two experts. With 64 experts there are as many FLOPs as with 8, and
eight times the weights. Steps of both alternate; the median of the ratios goes to `benchmarks/results/experts.json`.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import record

sys.path.insert(0, str(Path(__file__).parent.parent))
from jaxstack.config import Config, DataConfig, ModelConfig, MoEConfig, OptimConfig, TrainConfig
from jaxstack.runtime import platform


def config(experts: int, batch: int) -> Config:
    """Returns a small model with `experts` experts."""
    return Config(
        model=ModelConfig(
            num_layers=4,
            d_model=256,
            num_heads=4,
            vocab_size=256,
            moe=MoEConfig(num_experts=experts, top_k=2, d_ff=512),
        ),
        data=DataConfig(seq_len=256, batch_size=batch),
        optim=OptimConfig(warmup_steps=0, schedule="constant"),
        train=TrainConfig(steps=10**6),
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--batch", type=int, default=64)
    given = arguments.parse_args()
    platform.configure(config(8, given.batch).mesh, given.batch)

    import jax
    import numpy as np

    from jaxstack import sharding
    from jaxstack.families.context import make_context
    from jaxstack.training import assemble
    from jaxstack.training.assemble import make_gradients
    from jaxstack.training.state import Recipe, abstract_state, make_state

    runs: dict[int, Any] = {}
    ids = np.random.default_rng(0).integers(0, 256, (given.batch, 257)).astype(np.int32)
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_weights": np.ones((given.batch, 256), np.float32)}
    for experts in (8, 64):
        cfg = config(experts, given.batch)
        ctx = make_context(cfg, sharding.make_mesh(cfg.mesh, given.batch))
        abstract = abstract_state(Recipe.of(cfg), ctx)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract.params)
        state = make_state(Recipe.of(cfg), ctx, abstract)
        gradients = jax.jit(make_gradients(cfg, ctx), out_shardings=(None, shardings, None))
        runs[experts] = [
            state,
            assemble.jit_train_step(cfg, ctx, abstract),
            gradients,
            ctx.layout.sharding(ctx.layout.batch),
        ]

    def one_step(experts: int) -> float:
        state, train_step, _, where = runs[experts]
        begin = time.perf_counter()
        runs[experts][0], metrics = train_step(state, jax.device_put(batch, where))
        jax.block_until_ready(metrics)
        return time.perf_counter() - begin

    def one_gradient(experts: int) -> float:
        state, _, gradients, where = runs[experts]
        begin = time.perf_counter()
        jax.block_until_ready(gradients(state.params, jax.device_put(batch, where)))
        return time.perf_counter() - begin

    results: dict[str, Any] = {"tokens": given.batch * 256, "rounds": given.rounds}
    for name, run in (("step", one_step), ("gradients", one_gradient)):
        times: dict[int, list[float]] = {8: [], 64: []}
        for experts in (8, 64):
            run(experts)
        for _ in range(given.rounds):
            for experts, found in times.items():
                found.append(run(experts))
        ratios = [many / few for few, many in zip(times[8], times[64], strict=True)]
        results[name] = {
            "ms": {experts: round(1e3 * median(found), 1) for experts, found in times.items()},
            "64_over_8": round(median(ratios), 3),
        }
        print(name, results[name], flush=True)
    print(record.record("experts", results))


if __name__ == "__main__":
    main()
