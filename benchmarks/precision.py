"""Compares gradients in bfloat16 with those in float32: `python benchmarks/precision.py`, on the CPU, in minutes.

Computes the gradient of one step of small models without QK norm at their initial values, on 128 x 256 bytes of the
standard library. It does so on one device, with accumulation, and on eight simulated devices that sum gradients in
float32 and in bfloat16. Writes the relative error of every parameter's gradient to `benchmarks/results/precision.json`.
"""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}

import record

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

ROWS = 128
MODELS: dict[str, list[str]] = {
    "llama": [],
    "gpt2": [
        "--model.norm=layer",
        "--model.positions=learned",
        "--model.activation=gelu_tanh",
        "--model.gated=false",
        "--model.bias=true",
        "--model.tied_embeddings=true",
    ],
    "experts": ["--model.moe.num_experts=8", "--model.moe.top_k=2", "--model.moe.d_ff=172", "--kernels.moe=ragged"],
}
MODELS["experts, all chosen"] = [*MODELS["experts"], "--model.moe.top_k=8"]
CASES: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    *((name, {}, {}) for name in MODELS),
    ("llama", {}, {"grad_accum": 4}),
    ("llama", {"data": 8}, {}),
    ("llama", {"data": 8}, {"reduce_dtype": "bfloat16"}),
]


def gradients(name: str, mesh: dict[str, int], train: dict[str, Any]) -> dict[str, Any]:
    """Returns the gradient of each parameter."""
    import jax
    import numpy as np

    from jaxstack import data
    from jaxstack.common.tree import flatten
    from jaxstack.config import resolve
    from jaxstack.config.reading import parse
    from jaxstack.families.context import make_context
    from jaxstack.sharding import make_mesh
    from jaxstack.training.assemble import make_gradients
    from jaxstack.training.state import Recipe, abstract_state, make_state

    flags = [f"--config={ROOT / 'configs/quickstart.yaml'}", f"--data.batch_size={ROWS}", "--model.qk_norm=false"]
    flags += MODELS[name]
    cfg = parse.parse_config(flags, ROOT)
    sizes = {axis: mesh.get(axis, 1) for axis in cfg.mesh.sizes}
    cfg = resolve(
        dataclasses.replace(
            cfg, mesh=dataclasses.replace(cfg.mesh, **sizes), train=dataclasses.replace(cfg.train, **train)
        ),
        256,
    )
    devices = jax.devices()[: max(mesh.values(), default=1)]
    ctx = make_context(cfg, make_mesh(cfg.mesh, ROWS // cfg.train.grad_accum, devices))
    values = make_state(Recipe.of(cfg), ctx, abstract_state(Recipe.of(cfg), ctx)).params
    text = data.load(cfg.data)
    batch = data.batches(text.train, seed=0, seq_len=cfg.data.seq_len, batch_size=ROWS, packing=False)[0]
    _, grads, _ = jax.jit(make_gradients(cfg, ctx))(
        values, jax.device_put(batch, ctx.layout.sharding(ctx.layout.batch))
    )
    return {path: np.asarray(g, np.float64) for path, g in flatten(grads).items()}


def main() -> None:
    import numpy as np

    exact: dict[str, dict[str, Any]] = {}
    results = []
    for name, mesh, train in CASES:
        if name not in exact:
            exact[name] = gradients(name, {}, {"dtype": "float32"})
        short = gradients(name, mesh, {"dtype": "bfloat16", **train})
        # With learned positions the true gradient of a key's bias is zero, so its error is only rounding.
        paths = [path for path in short if not (path.endswith("b_k") and name == "gpt2")]
        errors = {p: float(np.linalg.norm(short[p] - exact[name][p]) / np.linalg.norm(exact[name][p])) for p in paths}
        errors = dict(sorted(errors.items(), key=lambda item: -item[1]))
        whole = [np.sqrt(sum(np.square(g).sum() for g in grads.values())) for grads in (short, exact[name])]
        results.append(
            {
                "model": name,
                "mesh": mesh,
                "train": train,
                "norm_over_float32": round(float(whole[0] / whole[1]), 5),
                "relative_error": {path: round(error, 5) for path, error in errors.items()},
            }
        )
        worst = ", ".join(f"{path} {error:.4f}" for path, error in [*errors.items()][:3])
        print(name, mesh, train, f"norm x {whole[0] / whole[1]:.4f}; worst: {worst}", flush=True)
    print(record.record("precision", {"tokens": [ROWS, 256], "cases": results}))


if __name__ == "__main__":
    main()
