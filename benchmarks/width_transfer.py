"""Shows that learning rates transfer between widths under muP: `python benchmarks/width_transfer.py`

Models of several widths are trained on bytes of Python's standard library with the same batches, with and without
`model.base_width`. Heads have one width, so wider models have more of them.

- The sweep: the loss at the end for each width and learning rate. Under muP, the best learning rates of all widths are
  within a factor of 2.
- The coordinate check (Yang et al. 2022, appendix D.1): the change of hidden states and logits by a few steps, as a
  power of the width. Under muP the power is near 0.

Each row is written to `benchmarks/results/width_transfer.json` when it is measured, and a later call continues there.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import record

WIDTHS = (32, 64, 128, 256)
BASE = 128  # narrower models are scaled too, to larger initial values and learning rates
RATES = {"adamw": tuple(2.0**-n for n in range(10, 3, -1)), "muon": tuple(2.0**-n for n in range(9, 2, -1))}
HEAD, LAYERS, SEQ, BATCH, STEPS = 16, 3, 128, 8, 120


def config(width: int, base: int | None, name: str, rate: float, steps: int, tied: bool) -> Any:
    """Returns the run of one width and learning rate."""
    from jaxstack.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig

    model = ModelConfig(
        num_layers=LAYERS,
        d_model=width,
        num_heads=width // HEAD,
        d_ff=3 * width,
        vocab_size=256,
        tied_embeddings=tied,
        base_width=base,
    )
    data = DataConfig(source="stdlib", tokenizer="bytes", seq_len=SEQ, batch_size=BATCH)
    optim = OptimConfig(name=name, lr=rate, warmup_steps=steps // 10, schedule="linear", final_lr_fraction=0.0)
    return Config(model=model, data=data, optim=optim, train=TrainConfig(steps=steps))


def train(cfg: Any, batches: Sequence[Any]) -> tuple[list[float], Any]:
    """Trains on the batches, and returns the loss of every step and the parameters."""
    import jax

    from jaxstack.config import resolve
    from jaxstack.families.context import make_context
    from jaxstack.sharding import make_mesh
    from jaxstack.training import assemble
    from jaxstack.training.state import Recipe, abstract_state, make_state

    cfg = resolve(cfg, cfg.model.vocab_size)
    ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.data.batch_size, jax.devices()[:1]))
    abstract = abstract_state(Recipe.of(cfg), ctx)
    state, losses = make_state(Recipe.of(cfg), ctx, abstract), []
    run = assemble.jit_train_step(cfg, ctx, abstract)
    for batch in batches:
        state, metrics = run(state, batch)
        losses.append(metrics["loss"])
    return [float(loss) for loss in jax.device_get(losses)], state.params


def coordinates(cfg: Any, values: Any, tokens: Any) -> tuple[Any, Any]:
    """Returns the normalised hidden states after the last layer, and the logits."""
    import jax

    from jaxstack import families
    from jaxstack.models import decoder
    from jaxstack.models.context import Context

    hidden, _ = jax.jit(lambda values: families.of(cfg.model).hidden_states(cfg.model, values, {"tokens": tokens}))(
        values
    )
    logits = hidden @ decoder.head(cfg.model, values, Context())
    return hidden * (cfg.model.width_ratio if cfg.model.tied_embeddings else 1.0), logits


def powers(widths: Sequence[int], base: int | None, name: str, rate: float, tied: bool, batches: Any) -> list[float]:
    """Returns the power of the width by which the root mean square of each change grows.

    The changes are those of the hidden states after the last layer, and of the logits, by training on the batches.
    """
    import numpy as np

    changes = []
    for width in widths:
        cfg = config(width, base, name, rate, len(batches), tied)
        cfg = replace(cfg, optim=replace(cfg.optim, warmup_steps=1, schedule="constant", weight_decay=0.0))
        _, before = train(cfg, [])
        _, after = train(cfg, batches)
        pairs = zip(*(coordinates(cfg, values, batches[0]["tokens"]) for values in (before, after)), strict=True)
        changes.append([float(np.sqrt(np.mean(np.square(b - a)))) for a, b in pairs])
    return [float(np.polyfit(np.log(widths), np.log(change), 1)[0]) for change in zip(*changes, strict=True)]


def best_rates(rows: Sequence[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Returns the learning rate with the lowest loss, for each parametrization and optimizer, and each width."""
    best: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        if row["loss"] is not None:
            of_width = best.setdefault(f"{row['optimizer']}, {row['rule']}", {})
            if row["loss"] < of_width.get(row["width"], row)["loss"] or row["width"] not in of_width:
                of_width[row["width"]] = row
    return {rule: {width: row["lr"] for width, row in rows.items()} for rule, rows in best.items()}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--widths", nargs="+", type=int, default=[*WIDTHS])
    arguments.add_argument("--optimizers", nargs="+", choices=RATES, default=[*RATES])
    arguments.add_argument("--steps", type=int, default=STEPS)
    given = arguments.parse_args()
    import numpy as np

    from jaxstack import data

    first = config(given.widths[0], None, "adamw", 1e-3, given.steps, True)
    stream = data.batches(data.load(first.data).train, seed=0, seq_len=SEQ, batch_size=BATCH, packing=False)
    batches = [stream[i] for i in range(given.steps)]
    shape = {"layers": LAYERS, "head": HEAD, "seq_len": SEQ, "batch": BATCH, "steps": given.steps}
    shape |= {"tied": True, "base": BASE}
    path = record.RESULTS / "width_transfer.json"
    rows = json.loads(path.read_text())["sweep"] if path.exists() else []
    checks: dict[str, list[float]] = {}

    def write() -> None:
        result = {"shape": shape, "coordinates": checks, "best": best_rates(rows), "sweep": rows}
        record.record("width_transfer", result)

    for name in given.optimizers:
        for rule, of in (("muP", BASE), ("standard", None)):
            found = powers(given.widths, of, name, 2.0**-8, True, batches[:8])
            checks[f"{name}, {rule}"] = [round(p, 3) for p in found]
            print(f"{name}, {rule}: the changes grow with the powers {checks[f'{name}, {rule}']}", flush=True)
            write()
    for name in given.optimizers:
        for width in given.widths:
            for rule, of in (("standard", None), ("muP", BASE)):
                for rate in RATES[name]:
                    key = {"optimizer": name, "rule": rule, "width": width, "lr": rate}
                    if any(row.items() >= key.items() for row in rows):
                        continue
                    same = key | {"rule": "standard"}  # at the width of the base, the two are equal
                    known = [row for row in rows if width == BASE and row.items() >= same.items()]
                    losses = [] if known else train(config(width, of, name, rate, given.steps, True), batches)[0]
                    end = known[0]["loss"] if known else float(np.mean(losses[-20:]))
                    rows.append(key | {"loss": round(end, 4) if end is not None and np.isfinite(end) else None})
                    print(json.dumps(rows[-1]), flush=True)
                    write()
    print(json.dumps(best_rates(rows), indent=1))


if __name__ == "__main__":
    main()
