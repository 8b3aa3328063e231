"""Measures what stale weights cost: `python benchmarks/weight_stashing.py [--epochs 4] [--seeds 3] [--small]`

An asynchronous pipeline (PipeDream with weight stashing, Harlap et al. 2018) updates its weights without a bubble. In
return, stage s of P computes the gradients of a microbatch with weights that lack the last P - 1 - s updates, forward
and backward alike. If updates have as many microbatches as there are stages, or more, all stages lack one update
(PipeDream-2BW, Narayanan et al. 2021).

This is simulated on one device, by a plain loop that keeps old weights: a convolutional network of eight layers learns
the digits of scikit-learn. Every setting sees equally many pictures, with the best of several constant learning rates.
A microbatch has 4 pictures. Time is by formula, in units of the busy time of a stage: N (1 + (P - 1) / M) for N
microbatches, M of them an update, and N without a bubble. The result goes to `benchmarks/results/weight_stashing.json`.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import record

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")  # compiles in a quarter of the time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

LAYERS, ROWS, POINTS = 8, 4, 16
"""Layers of the network, pictures of a microbatch, and points of a curve at which held-out pictures are tried."""
RATES = {"momentum": (0.003, 0.01, 0.03, 0.1), "adam": (3e-4, 1e-3, 3e-3, 1e-2)}
OPTIMIZERS = {"momentum": partial(optax.sgd, momentum=0.9), "adam": optax.adam}
Params = dict[str, Any]


def settings() -> dict[str, tuple[int, list[int]]]:
    """Returns the microbatches of an update, and the updates that each layer lacks, by name."""

    def late(stages: int) -> list[int]:
        return [stages - 1 - layer * stages // LAYERS for layer in range(LAYERS)]

    return {
        "M=1, exact": (1, [0] * LAYERS),
        "M=1, stale, P=4": (1, late(4)),
        "M=1, stale, P=8": (1, late(8)),
        "M=8, exact": (8, [0] * LAYERS),
        "M=8, stale": (8, [1] * LAYERS),
    }


def init(key: jax.Array) -> Params:
    """Returns weights of a convolution to 8 channels, one to 12, five residual ones, and a matrix."""
    keys = jax.random.split(key, 4)

    def layer(key: jax.Array, scale: float, *shape: int) -> Params:
        w = scale * np.sqrt(2 / shape[-2]) * jax.random.normal(key, shape)
        return {"w": w, "b": jnp.zeros((*shape[:-2], shape[-1]))}

    return {
        "first": layer(keys[0], 1, 9, 8),
        "second": layer(keys[1], 1, 72, 12),
        "blocks": layer(keys[2], 0.5, LAYERS - 3, 108, 12),
        "head": layer(keys[3], 1, 12, 10),
    }


def windows(x: jax.Array) -> jax.Array:
    """Returns the 3x3 windows of pictures [B, H, W, C], zeros beyond the border: [B, H, W, 9 C]."""
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return jnp.concatenate([padded[:, i : i + x.shape[1], j : j + x.shape[2]] for i in range(3) for j in range(3)], -1)


def logits(params: Params, x: jax.Array) -> jax.Array:
    """Returns the logits [B, 10] of pictures [B, 8, 8, 1]. Convolutions are products, so that many runs are one."""

    def conv(layer: Params, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ layer["w"] + layer["b"])

    x = conv(params["first"], windows(x)[:, ::2, ::2])
    x = conv(params["second"], windows(x))
    x, _ = lax.scan(lambda x, layer: (x + conv(layer, windows(x)), None), x, params["blocks"])
    return x.mean((1, 2)) @ params["head"]["w"] + params["head"]["b"]


def loss_of(params: Params, x: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), labels).mean()


def old_weights(stash: Params, t: jax.Array, late: jax.Array) -> Params:
    """Returns the weights that each layer has `late` updates before the last one; at the start, the first weights."""
    version = jnp.maximum(t - late, 0) % LAYERS
    blocks = version[2:-1], jnp.arange(LAYERS - 3)
    at = {"first": version[0], "second": version[1], "blocks": blocks, "head": version[-1]}
    return {name: jax.tree.map(lambda a, name=name: a[at[name]], layer) for name, layer in stash.items()}


def train(optimizer: Any, late: jax.Array, key: jax.Array, x: jax.Array, y: jax.Array, held_out: Any) -> jax.Array:
    """Returns loss and accuracy on the held-out pictures, at the points of the curve, [POINTS, 2].

    The pictures x are [POINTS, updates, rows, ...]. `late` is the number of updates that each layer lacks.
    """
    params = init(key)
    # Entry t % LAYERS has the weights after t updates: no layer lacks more than LAYERS - 1.
    stash = jax.tree.map(lambda a: jnp.broadcast_to(a, (LAYERS, *a.shape)), params)

    def update(carry: Any, batch: Any) -> Any:
        params, moments, stash, t = carry
        grads = jax.grad(loss_of)(old_weights(stash, t, late), *batch)
        updates, moments = optimizer.update(grads, moments)
        params = optax.apply_updates(params, updates)
        stash = jax.tree.map(lambda s, a: s.at[(t + 1) % LAYERS].set(a), stash, params)
        return (params, moments, stash, t + 1), None

    def point(carry: Any, batches: Any) -> Any:
        carry, _ = lax.scan(update, carry, batches)
        found = logits(carry[0], held_out[0])
        loss = optax.softmax_cross_entropy_with_integer_labels(found, held_out[1]).mean()
        return carry, jnp.stack([loss, (found.argmax(-1) == held_out[1]).mean()])

    return lax.scan(point, (params, optimizer.init(params), stash, 0), (x, y))[1]


def summary(name: str, optimizer: str, M: int, curves: dict[float, np.ndarray]) -> dict[str, Any]:
    """Returns what the best rate reaches after all pictures, and in the time in which no stage would be idle."""
    final = {rate: float(np.nan_to_num(curve[:, -1, 0], nan=np.inf).mean()) for rate, curve in curves.items()}
    best = min(final, key=final.__getitem__)
    curve = curves[best]
    row: dict[str, Any] = {
        "setting": name, "optimizer": optimizer, "rate": best, "loss_by_rate": final, "loss": final[best],
        "losses": curve[:, -1, 0].tolist(), "accuracy": float(curve[:, -1, 1].mean()),
        "curve": curve[:, :, 0].mean(0).tolist(),
    }  # fmt: skip
    for stages in (4, 8):
        slowdown = 1.0 if "stale" in name else 1 + (stages - 1) / M
        points = int(POINTS / slowdown)
        row[f"time_{stages}"] = slowdown
        row[f"loss_in_equal_time_{stages}"] = row["curve"][points - 1] if points else None
    return row


def main() -> None:
    """Trains all settings, prints a table, and writes the result."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--epochs", type=int, default=4)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--small", action="store_true", help="one seed, and nothing is written")
    given = arguments.parse_args()
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = jnp.asarray(digits.images[..., None] / 8 - 1, jnp.float32)
    labels = jnp.asarray(digits.target, jnp.int32)
    shuffled = np.random.default_rng(0).permutation(len(pixels))
    held_out = pixels[shuffled[:360]], labels[shuffled[:360]]
    seen = shuffled[360:]
    unit = POINTS * 8 * ROWS  # pictures that divide into all points and updates
    count = unit * max(1, round(given.epochs * len(seen) / unit))
    seeds = range(1 if given.small else given.seeds)
    order = np.stack(
        [
            np.concatenate([np.random.default_rng([seed, e]).permutation(seen) for e in range(1 + count // len(seen))])
            for seed in seeds
        ]
    )[:, :count]
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])

    def run_all(M: int, optimizer: str) -> Any:
        """Returns a function of rates and delays that runs all rates and seeds: [rates, seeds, POINTS, 2]."""
        data = [a[order].reshape(len(order), POINTS, -1, M * ROWS, *a.shape[1:]) for a in (pixels, labels)]
        one = lambda rate, late, *data: train(OPTIMIZERS[optimizer](rate), late, *data, held_out)  # noqa: E731
        every = jax.vmap(jax.vmap(one, (None, None, 0, 0, 0)), (0, None, None, None, None))
        run = jax.jit(every)
        return lambda rates, late: np.asarray(run(jnp.array(rates), jnp.array(late), keys, *data))

    runs: dict[tuple[int, str], Any] = {}
    rows: list[dict[str, Any]] = []
    for name, (M, late) in settings().items():
        for optimizer, rates in RATES.items():
            if (M, optimizer) not in runs:
                runs[M, optimizer] = run_all(M, optimizer)
            row = summary(name, optimizer, M, dict(zip(rates, runs[M, optimizer](rates, late), strict=True)))
            rows.append(row)
            spread = " ".join(f"{loss:.3f}" for loss in row["losses"])
            print(f"{name:<16} {optimizer:<9} rate {row['rate']:<6} loss {row['loss']:.3f} ({spread})", flush=True)
    if not given.small:
        result = {"pictures": count, "epochs": given.epochs, "rows_of_a_microbatch": ROWS, "settings": rows}
        print(record.record("weight_stashing", result))


if __name__ == "__main__":
    main()
