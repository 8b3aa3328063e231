"""Measures how long ModernBERT's 22 layers take to compile: `python benchmarks/encoder_compile.py`

Every third layer has no window, so that three windows repeat seven times, and one layer is left. The loop over layers
runs the seven repetitions, and the last layer follows it. The other form lists all 22 windows, which is one repetition,
and compiles every layer. Both are one training step on one CPU device, of a small width. The result has the processor
seconds of tracing and of compiling; it goes to `benchmarks/results/encoder_compile.json`.
"""

import argparse
import os
import time
from typing import Any

import record

LAYERS, PERIOD = 22, (0, 65, 65)


def measure(windows: tuple[int, ...], width: int) -> dict[str, float]:
    """Returns the processor seconds of tracing and of compiling a step, and the MB of temporary arrays."""
    import jax

    from jaxstack import families
    from jaxstack.config import Config, DataConfig, ModelConfig, OptimConfig
    from jaxstack.models import batches
    from jaxstack.models.context import Context
    from jaxstack.models.ops import Ops, implementations
    from jaxstack.training import assemble
    from jaxstack.training.state import Recipe, init_state

    model = ModelConfig(
        family="encoder", num_layers=LAYERS, d_model=width, num_heads=4, vocab_size=512, windows=windows,
        first_attention_norm=False, norm="layer", activation="gelu", tied_embeddings=True, rope_theta_local=1e4,
    )  # fmt: skip
    cfg = Config(model=model, data=DataConfig(seq_len=256, batch_size=4), optim=OptimConfig(name="adamw"))
    state = jax.eval_shape(lambda: init_state(Recipe.of(cfg)))
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    batch = batches.abstract_batch(families.of(model).batch_spec(cfg.model, cfg.data), one)
    ctx = Context(ops=Ops("cpu", **implementations("cpu")))
    began = time.process_time()
    lowered = jax.jit(assemble.make_train_step(cfg, ctx), donate_argnums=0).lower(state, batch)
    traced = time.process_time()
    compiled = lowered.compile()
    done = time.process_time()
    return {
        "trace_s": round(traced - began, 1),
        "compile_s": round(done - traced, 1),
        "temporary_mb": round(compiled.memory_analysis().temp_size_in_bytes / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    every = tuple(PERIOD[i % len(PERIOD)] for i in range(LAYERS))
    forms = {"loop over whole repetitions, and one layer": PERIOD, "every layer compiled": every}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in forms}
    for _ in range(args.rounds):
        for name, windows in forms.items():
            found[name].append(measure(windows, args.width))
            print(name, found[name][-1], flush=True)
    record.record("encoder_compile", {"layers": LAYERS, "windows": PERIOD, "width": args.width, "rounds": found})


if __name__ == "__main__":
    main()
