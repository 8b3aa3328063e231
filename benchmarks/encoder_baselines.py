"""Compares an encoder with what sees less: `python benchmarks/encoder_baselines.py [--steps 800]`, on the CPU.

The text is the docstrings of Python's standard library, with whole modules held out. All models predict the same masked
bytes of the held-out text:

- the encoder of `configs/encoder_quickstart.yaml`, from the text around them, in which other bytes are masked, too;
- a decoder with the same layers, from all bytes before them, none of which is masked;
- interpolated n-gram models, fitted on the training text with masks: a mixture of one that reads bytes and masks before
  the byte and one that reads those after it, and one that reads both sides at once. Orders and weights are the best
  ones on the held-out text itself.

Losses and accuracies go to `benchmarks/results/encoder_baselines.json`.
"""

import argparse
import ast
import sys
import sysconfig
import tempfile
import tokenize
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import record

sys.path.insert(0, str(Path(__file__).parent.parent))
from jaxstack.config.reading.parse import parse_config

MASK = 256
TRAINED_SHARE, EVALUATED_SHARE = 0.3, 0.15
"""Shares of hidden bytes. With more of them, as in ModernBERT, a step learns from more."""
CHAINS = {
    "before": [-1, -2, -3, -4, -5, -6, -7, -8],
    "after": [1, 2, 3, 4, 5, 6, 7, 8],
    "both": [-1, 1, -2, 2, -3, 3, -4, 4],
}
"""The places around a byte from which n-gram models read, in the order in which they are added to a context."""


def docstrings(module: Path) -> str:
    """Returns the docstrings of a module, its classes and its functions."""
    with tokenize.open(module) as file:
        tree = ast.parse(file.read())
    places = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, places))
    return "\n\n".join(text for text in found if text)


def write_text(folder: Path) -> int:
    """Writes one file for each module of the standard library that has docstrings; returns the number of bytes."""
    root, size = Path(sysconfig.get_path("stdlib")), 0
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if {"test", "tests", "idle_test", "site-packages", "dist-packages"} & {*parts}:
            continue
        try:
            text = docstrings(path)
        except (SyntaxError, UnicodeDecodeError):
            continue
        if text:
            (folder / "-".join(parts).replace(".py", ".txt")).write_text(text)
            size += len(text.encode())
    return size


def n_grams(
    train: list[np.ndarray], inputs: np.ndarray, hidden: np.ndarray, chain: list[int], share: float, copies: int
) -> Iterator[np.ndarray]:
    """Yields the probabilities of every byte [hidden, 256] by interpolated n-gram models, for each length of a chain.

    Smoothing is Witten and Bell's, as in `jaxstack.data.ngram`: a context backs off to the one without its last byte.

    Args:
      train: the bytes of each training document.
      inputs: held-out rows [N, S] with `MASK` for chosen bytes.
      hidden: the bytes to predict, bool [N, S].
      chain: one of `CHAINS`.
      share: of masked bytes, for the contexts of the training text.
      copies: of the training text, each with masks of its own.
    """
    most = max(map(abs, chain))
    blank, rng = np.full(most, MASK), np.random.default_rng(0)
    bytes_ = np.concatenate([part for one in train for part in (blank, one, blank)] * copies).astype(np.uint64)
    text = np.where(rng.random(bytes_.size) < share, MASK, bytes_).astype(np.uint64)
    rows = np.pad(inputs, ((0, 0), (most, most)), constant_values=MASK).astype(np.uint64)
    at = np.flatnonzero(np.pad(hidden, ((0, 0), (most, most))))
    real = np.flatnonzero(bytes_ != MASK)
    own, asked = np.zeros(real.size, np.uint64), np.zeros(at.size, np.uint64)
    flat = rows.ravel()
    p = np.full((at.size, 256), np.bincount(bytes_[real].astype(int), minlength=256) / real.size)
    for step in chain:
        # A context is a number to the base 257; of eight bytes it is below 2**64 only after this renumbering.
        _, both = np.unique(np.append(own, asked), return_inverse=True)
        own = both[: own.size].astype(np.uint64) * np.uint64(257) + text[real + step]
        asked = both[own.size :].astype(np.uint64) * np.uint64(257) + flat[at + step]
        pairs, count = np.unique(own * np.uint64(256) + bytes_[real], return_counts=True)
        contexts, first = np.unique(pairs // np.uint64(256), return_index=True)
        total, kinds = np.add.reduceat(count, first), np.diff(first, append=pairs.size)
        place = np.minimum(np.searchsorted(contexts, asked), contexts.size - 1)
        seen = contexts[place] == asked
        norm = np.where(seen, total[place] + kinds[place], 1)
        p *= (np.where(seen, kinds[place], 1) / norm)[:, None]
        for i in np.flatnonzero(seen):
            span = slice(first[place[i]], first[place[i]] + kinds[place[i]])
            p[i, (pairs[span] % np.uint64(256)).astype(int)] += count[span] / norm[i]
        yield p.copy()


def baselines(
    share: float, train: list[np.ndarray], masked: np.ndarray, targets: np.ndarray, hidden: np.ndarray
) -> Any:
    """Returns loss and accuracy of the best n-gram models; for the arguments see `n_grams`."""
    truth = targets[hidden]

    def figures(p: np.ndarray) -> tuple[float, float]:
        return float(-np.log(p[np.arange(truth.size), truth]).mean()), float((p.argmax(1) == truth).mean())

    best: dict[str, Any] = {}
    for name, chain in CHAINS.items():
        for copies in (1, 2, 4):
            for order, p in enumerate(n_grams(train, masked, hidden, chain, share, copies), start=1):
                if name not in best or figures(p) < best[name][0]:
                    best[name] = figures(p), {"context": chain[:order], "copies": copies}, p
    mixtures = {w: figures(w * best["before"][2] + (1 - w) * best["after"][2]) for w in np.arange(1, 20) / 20}
    weight = min(mixtures, key=mixtures.__getitem__)
    result = {
        f"n_grams_{name}": {"loss": loss, "accuracy": accuracy, **how}
        for name, ((loss, accuracy), how, _) in best.items()
    }
    loss, accuracy = mixtures[weight]
    return result | {"n_grams_mixed": {"loss": loss, "accuracy": accuracy, "weight_before": float(weight)}}


def train(flags: list[str]) -> Any:
    """Trains a model; returns its configuration and parameters."""
    from jaxstack import sharding, train
    from jaxstack.config import Config
    from jaxstack.families.context import make_context
    from jaxstack.training.services import init_from

    cfg = parse_config(flags)
    train.main(cfg)
    run = init_from.find_source(cfg.run.dir, "run.dir")
    assert isinstance(run, Config)
    ctx = make_context(run, sharding.make_mesh(run.mesh, run.microbatch_size))
    return run, init_from.restore_params(run, ctx)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--steps", type=int, default=800)
    arguments.add_argument("--rows", type=int, default=256, help="held-out rows of 256 bytes")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "text")
        folder.mkdir()
        size = write_text(folder)
        common = [
            "--config=configs/encoder_quickstart.yaml", "--data.source=path", f"--data.path={folder}",
            f"--train.steps={given.steps}", f"--train.eval_every={given.steps}", f"--checkpoint.every={given.steps}",
            f"--train.eval_steps={given.rows // 8}", "--train.ngram_baseline=false", "--mesh.data=-1",
            "--sample.prompts=[]", f"--data.mask_share={TRAINED_SHARE}",
        ]  # fmt: skip
        result = compare(common, Path(scratch), given.rows)
    record.record("encoder_baselines", {"steps": given.steps, "text_bytes": size, **result})


def compare(common: list[str], scratch: Path, rows: int) -> dict[str, Any]:
    """Trains both models and returns the loss and accuracy of each model on the same hidden bytes."""
    from jaxstack import data

    encoder, values = train([*common, f"--run.dir={scratch / 'encoder'}"])

    import jax
    import jax.numpy as jnp

    from jaxstack import families
    from jaxstack.data.loader import window_sizes
    from jaxstack.families import encoder as encoders
    from jaxstack.models import params

    dataset = data.load(encoder.data)
    few = replace(encoder, data=replace(encoder.data, mask_share=EVALUATED_SHARE))
    held_out = data.eval_batches(dataset.eval, steps=rows // 8, **window_sizes(few.model, few.data))
    batches = [held_out[i] for i in range(len(held_out))]
    chosen = np.concatenate([batch["loss_weights"] for batch in batches]) > 0
    for batch in batches:  # of the chosen bytes only those with a mask: others show a byte, which may be the right one
        batch["loss_weights"] = (batch["tokens"] == MASK).astype(np.float32)
        batch["loss_weights"][:, 0] = 0  # the decoder has nothing before it

    def score(logits: jax.Array, batch: Any) -> np.ndarray:
        """Returns the sums of losses, of right predictions and of hidden bytes."""
        p = jax.nn.log_softmax(logits[..., :256])
        weights, own = batch["loss_weights"], jnp.take_along_axis(p, batch["targets"][..., None], -1)[..., 0]
        return jnp.stack([-(own * weights).sum(), ((p.argmax(-1) == batch["targets"]) * weights).sum(), weights.sum()])

    def figures(evaluate: Any, values: Any) -> dict[str, float]:
        total = sum(np.asarray(jax.jit(evaluate)(values, batch), np.float64) for batch in batches)
        return {"loss": total[0] / total[2], "accuracy": total[1] / total[2]}

    def by_encoder(values: Any, batch: Any) -> jax.Array:
        hidden, _ = encoders.FAMILY.hidden_states(encoder.model, values, batch)
        return score(encoders.logits(encoder.model, values, hidden), batch)

    values = jax.device_get(values)
    result = {"parameters": params.count(encoders.spec(encoder.model)), "encoder": figures(by_encoder, values)}
    decoder, values = train([*common, "--model.family=decoder", f"--run.dir={scratch / 'decoder'}"])

    def by_decoder(values: Any, batch: Any) -> jax.Array:
        logits, _ = families.forward(decoder.model, values, batch["targets"])
        return score(jnp.roll(logits, 1, axis=1), batch)

    values = jax.device_get(values)
    result["decoder_parameters"] = params.count(families.spec(decoder.model))
    result["decoder"] = figures(by_decoder, values)
    text = [dataset.train.ids[a:b] for a, b in zip(dataset.train.starts, dataset.train.ends, strict=True)]
    inputs, targets, weights = (
        np.concatenate([b[name] for b in batches]) for name in ("tokens", "targets", "loss_weights")
    )
    hidden, masked = weights > 0, np.where(chosen, MASK, inputs)
    result |= baselines(EVALUATED_SHARE, text, masked, targets, hidden)
    return result | {"masked_bytes": int(hidden.sum()), "train_bytes": len(dataset.train)}


if __name__ == "__main__":
    main()
