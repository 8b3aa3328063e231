"""Measures generation on pipelines and on expert meshes: `python benchmarks/mesh_decode.py [--rounds 5]`

Pipelines: the share of ticks in which a stage is idle, from the schedule's table, when all prompts pass the stages
together and when each stage has its own group of prompts. And the time of both programs for the same tokens on
simulated devices, in alternating rounds. `decode_token` in a loop is the program in which all prompts pass together.

Experts: the load of the busiest device over the mean, with equal parts and with replicas. The load is that of a run
which this script trains without a balancing loss, counted while it generates, and Zipf's. Replicas are placed by one
half of the texts and judged by the other half, as they are in use. Writes `benchmarks/results/mesh_decode.json`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")

import record

ROOT = Path(__file__).parent.parent
PROMPT, TOKENS, ROWS = 32, 96, 16


def pipeline(stages: int, rounds: int) -> dict[str, Any]:
    """Returns idle shares and times of both programs on a pipeline."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxstack.config import Config, MeshConfig, ModelConfig, SampleConfig
    from jaxstack.families.context import make_context
    from jaxstack.generate import decode
    from jaxstack.generate.engine import jit_on_mesh
    from jaxstack.generate.kv_cache import CachedDecoder
    from jaxstack.generate.prompts import align_rows, row_seeds
    from jaxstack.pipeline import Rotation
    from jaxstack.sharding import make_mesh
    from jaxstack.training.state import Recipe, abstract_state, make_state

    model = ModelConfig(num_layers=8, d_model=256, num_heads=4, d_ff=688, vocab_size=256)
    cfg = Config(model=model, mesh=MeshConfig(data=1, pipe=stages))
    cfg = replace(cfg, data=replace(cfg.data, batch_size=ROWS))
    ctx = make_context(cfg, make_mesh(cfg.mesh, ROWS, jax.devices()[:stages])).whole_sequences()
    params = make_state(Recipe.of(cfg), ctx, abstract_state(Recipe.of(cfg), ctx)).params
    prompts = np.random.default_rng(0).integers(0, 256, (ROWS, PROMPT)).tolist()

    def together(params: Any, tokens: Any, first: Any, marks: Any, seed: Any) -> Any:
        slots = tokens.shape[1]
        model = CachedDecoder.create(
            cfg.model, params, ctx, gate=None, vocabulary=256, first=first, num_slots=slots + TOKENS
        )
        logits, cache = model.prefill(tokens)
        added = jnp.zeros((ROWS, TOKENS), jnp.int32).at[:, 0].set(logits.argmax(-1))

        def step(i: Any, carry: Any) -> Any:
            added, cache = carry
            logits, cache = model.decode_token(added[:, i - 1], slots + i - 1, cache)
            return added.at[:, i].set(logits.argmax(-1)), cache

        return jax.lax.fori_loop(1, TOKENS, step, (added, cache))[0]

    compiled = jit_on_mesh(together, cfg.model, ctx, parts=3)
    in_turn = decode.make_generate(cfg.model, SampleConfig(tokens=TOKENS, temperature=0), vocabulary=256, ctx=ctx)
    arguments = (*align_rows(prompts), row_seeds(prompts), np.uint32(0))

    def texts_together() -> list[list[int]]:
        added = jax.device_get(compiled(params, *arguments))
        return [[*prompt, *row.tolist()] for prompt, row in zip(prompts, added, strict=True)]

    works = {"together": texts_together, "in_turn": lambda: in_turn(params, prompts, 0)}
    assert works["together"]() == works["in_turn"]()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - began)
    ratios = [a / b for a, b in zip(times["together"], times["in_turn"], strict=True)]
    return {
        "stages": stages,
        "rows": ROWS,
        "tokens": TOKENS,
        "idle_together": Rotation(stages, 1, 1).idle(TOKENS - 1),
        "idle_in_turn": Rotation(stages, 1, stages).idle(TOKENS - 1),
        "seconds": times,
        "times_as_fast": median(ratios),
        "times_as_fast_range": [min(ratios), max(ratios)],
    }


def measured_loads(steps: int) -> list[Any]:
    """Returns the loads [L, E] of two halves of the held-out texts, of a run that is trained here."""
    import numpy as np

    import jaxstack as js
    from jaxstack.config import SampleConfig
    from jaxstack.data import load_for
    from jaxstack.generate import decode

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        flags = [
            f"--config={ROOT / 'configs' / 'moe_quickstart.yaml'}", f"--run.dir={run}", "--sample.prompts=[]",
            "--model.moe={num_experts: 16, top_k: 2, d_ff: 86, aux_loss_weight: 0.0}", "--train.ngram_baseline=false",
            *(f"--{key}={steps}" for key in ("train.steps", "train.eval_every", "checkpoint.every")),
        ]  # fmt: skip
        environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
        command = [sys.executable, str(ROOT / "train.py"), *flags]
        subprocess.run(command, check=True, capture_output=True, env=environment)
        opened = js.load(run)
        held_out = next(load_for(opened.config.model, opened.config.data).held_out_texts)
        found = []
        for half in (0, 1):
            starts = np.random.default_rng(half).integers(0, held_out.ids.size - 64, 32)
            prompts = [held_out.ids[start : start + 64].tolist() for start in starts]
            engine = opened.engine()
            engine.counted.clear()
            for _ in decode.stream(engine, prompts, SampleConfig(tokens=128), seed=half, at_once=True):
                pass
            found.append(engine.counted["load"])
    return found


def balance(name: str, known: Any, judged: Any, devices: int, slots: int) -> dict[str, Any]:
    """Returns the load of the busiest device over the mean for a placement by one load, judged by another one."""
    from jaxstack.moe import placement

    found = placement.place(known, devices, slots)
    layers, experts = judged.shape
    after = placement.imbalance(found.device_load(judged))
    before = placement.imbalance(placement.even(layers, experts, devices).device_load(judged))
    case = {
        "load": name,
        "experts": experts,
        "devices": devices,
        "slots": slots,
        "before": before.tolist(),
        "after": after.tolist(),
        "before_mean": float(before.mean()),
        "after_mean": float(after.mean()),
    }
    print(f"{name}: {experts} experts, {devices} devices of {slots} slots: {before.mean():.2f} to {after.mean():.2f}")
    return case


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=150, help="of the run whose load is measured")
    given = arguments.parse_args()
    import numpy as np

    pipelines = []
    for stages in (2, 4):
        pipelines.append(pipeline(stages, given.rounds))
        found = pipelines[-1]
        print(
            f"{stages} stages: idle {found['idle_together']:.1%} to {found['idle_in_turn']:.1%}, "
            f"{found['times_as_fast']:.2f} times as fast",
            flush=True,
        )
    known, judged = measured_loads(given.steps)
    cases = [balance("measured", known, judged, 4, slots) for slots in (4, 5, 6)]
    rng, weights = np.random.default_rng(0), 1 / np.arange(1, 65)
    zipf = np.stack([rng.permutation(weights) for _ in range(8)])
    # Other texts: the same probabilities, 8,192 tokens with 2 choices each.
    seen, other = (np.stack([rng.multinomial(16384, row / row.sum()) for row in zipf]) for _ in range(2))
    cases += [balance("zipf", seen, other, 8, slots) for slots in (8, 9, 10, 12)]
    result = {"pipelines": pipelines, "experts": cases, "measured_load": known.tolist(), "steps": given.steps}
    print(record.record("mesh_decode", result))


if __name__ == "__main__":
    main()
