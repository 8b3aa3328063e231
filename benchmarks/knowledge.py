"""Compares ERNIE 3.0's masks with plain ones: `python benchmarks/knowledge.py --seeds 0 1 2`, on the CPU.

The data are what `docs/examples/stdlib_facts.py` reads in Python's standard library. Each seed trains four encoders of
the same size for the same number of steps.

- Two read docstrings, of which whole modules are held out, and hide whole words. One of them also hides the phrases and
  names of a list whole. Both predict the same hidden phrases, and then the same hidden bytes.
- Two read texts with triples. One has the objective of ERNIE 3.0: it hides the relation or the tail of the triple, or
  bytes of the text. The other one reads the same rows as plain text, with hidden bytes anywhere. Both predict the
  relations and tails of held-out triples, which are hidden whole, and then hidden bytes of the texts.

What is to be predicted is hidden by the mask alone: no random byte takes its place. Results go to
`benchmarks/results/knowledge.json` after each seed.
"""

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import record

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "docs" / "examples"))
import stdlib_facts

from jaxstack import data
from jaxstack.config import Config, DataConfig, resolve
from jaxstack.config.reading.parse import parse_config
from jaxstack.data.loader import make_reader, window_sizes
from jaxstack.data.masking import Masking
from jaxstack.data.triples import read_triples

ROOT = Path(__file__).parent.parent
FLAGS = [
    "--model.d_model=64", "--model.d_ff=172", "--model.num_layers=4", "--data.seq_len=256", "--data.batch_size=4",
    "--data.packing=true", "--mesh.data=1", "--optim.name=adamw", "--optim.lr=3e-3", "--optim.warmup_steps=20",
    "--train.ngram_baseline=false", "--sample.prompts=[]",
]  # fmt: skip
MASK = 256
Rows = dict[str, np.ndarray]


class Encoder:
    """One encoder, whose programs are compiled once and used by all runs: they differ in data and seed alone."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._train_step: Any = None
        self._predict: Any = None

    def config(self, flags: list[str], seed: int) -> Config:
        """Returns the configuration of a run."""
        config = ROOT / "configs" / "encoder_quickstart.yaml"
        rest = [f"--train.steps={self.steps}", f"--run.seed={seed}", *flags]
        return resolve(parse_config([f"--config={config}", *FLAGS, *rest]), MASK)

    def train(self, flags: list[str], seed: int) -> tuple[Config, Any, float]:
        """Trains an encoder; returns its configuration, its parameters and its last losses' mean."""
        import jax

        from jaxstack import sharding
        from jaxstack.families.context import make_context
        from jaxstack.training.assemble import jit_train_step
        from jaxstack.training.state import Recipe, abstract_state, make_state

        cfg = self.config(flags, seed)
        reader = make_reader(cfg.model, cfg.data, data.load_for(cfg.model, cfg.data), seed)
        ctx = make_context(cfg, sharding.make_mesh(cfg.mesh, cfg.microbatch_size))
        abstract = abstract_state(Recipe.of(cfg), ctx)
        if self._train_step is None:
            self._train_step = jit_train_step(cfg, ctx, abstract)
        state = make_state(Recipe.of(cfg), ctx, abstract)
        where = ctx.layout.sharding(ctx.layout.batch)
        losses = []
        for index in range(self.steps):
            state, metrics = self._train_step(state, jax.device_put(reader.read(index), where))
            losses.append(float(metrics["loss"]))
            if (index + 1) % 50 == 0:
                print(f"step {index + 1}: loss {np.mean(losses[-50:]):.3f}", flush=True)
        return cfg, jax.device_get(state.params), round(float(np.mean(losses[-50:])), 4)

    def predict(self, cfg: Config, params: Any, batch: Rows) -> np.ndarray:
        """Returns the log-probabilities of each byte at each place [B, S, 256]."""
        import jax

        from jaxstack.families import encoder

        def work(params: Any, batch: Any) -> Any:
            hidden, _ = encoder.FAMILY.hidden_states(cfg.model, params, batch)
            return jax.nn.log_softmax(encoder.logits(cfg.model, params, hidden)[..., :MASK])

        if self._predict is None:
            self._predict = jax.jit(work)
        read = {name: batch[name] for name in ("tokens", "segment_ids", "positions")}
        return np.asarray(self._predict(params, read))


def held_out_rows(cfg: Config, keys: DataConfig, count: int) -> tuple[Rows, np.ndarray]:
    """Returns held-out rows of which all that is hidden is the mask, and the number of the unit of each token [N, S].

    With a list of phrases, they are the units, and nothing else is hidden.
    """
    dataset = data.load_for(cfg.model, keys)
    sizes = window_sizes(cfg.model, keys, dataset.tokenizer)
    batches = data.eval_batches(dataset.eval, steps=-(-count // keys.batch_size), **sizes)
    rows = [batches[i] for i in range(len(batches))]
    batch = {name: np.concatenate([each[name] for each in rows])[:count] for name in rows[0]}
    masking = sizes["masking"]
    number = np.broadcast_to(np.arange(batch["tokens"].shape[1]), batch["tokens"].shape)
    if keys.mask_phrases:
        assert isinstance(masking, Masking)
        assert masking.units is not None
        number = masking.units.first_tokens(batch["targets"], batch.get("segment_ids"))
        size = (number[:, :, None] == number[:, None, :]).sum(2)
        batch["loss_weights"] = batch["loss_weights"] * (size > 1)
    hidden = batch["loss_weights"] > 0
    batch["tokens"] = np.where(hidden, MASK, batch["targets"]).astype(np.int32)
    return batch, number


def figures(encoder: Encoder, cfg: Config, params: Any, batch: Rows, number: np.ndarray) -> dict[str, float]:
    """Returns nats per hidden byte, the share of right bytes, and the share of units with right bytes only."""
    parts = []
    for i in range(0, len(batch["tokens"]), 32):
        log_p = encoder.predict(cfg, params, {name: array[i : i + 32] for name, array in batch.items()})
        target = batch["targets"][i : i + 32]
        parts.append((np.take_along_axis(log_p, target[..., None], -1)[..., 0], log_p.argmax(-1) == target))
    own, right = (np.concatenate(each) for each in zip(*parts, strict=True))
    hidden = batch["loss_weights"] > 0
    unit = (np.arange(len(number))[:, None] * number.shape[1] + number)[hidden]
    _, unit = np.unique(unit, return_inverse=True)
    wrong = np.bincount(unit, ~right[hidden])
    return {
        "nats_per_byte": round(float(-own[hidden].mean()), 4),
        "right_bytes": round(float(right[hidden].mean()), 4),
        "right_units": round(float((wrong == 0).mean()), 4),
        "bytes": int(hidden.sum()),
        "units": int(unit.max() + 1),
    }


def compare_phrases(encoder: Encoder, facts: Path, seed: int, rows: int) -> dict[str, Any]:
    """Trains with and without a list of phrases; returns the figures of hidden phrases and of hidden bytes."""
    arms = {"words": [], "phrases": [f"--data.mask_phrases={facts / 'phrases.txt'}"]}
    result = {}
    for name, flags in arms.items():
        text = ["--data.source=path", f"--data.path={facts / 'docstrings'}", "--data.mask_words=true"]
        cfg, params, loss = encoder.train([*text, *flags], seed)
        plain = replace(cfg.data, mask_words=False, mask_phrases=None)
        listed = replace(plain, mask_phrases=str(facts / "phrases.txt"))
        result[name] = {
            "hidden_phrases": figures(encoder, cfg, params, *held_out_rows(cfg, listed, rows)),
            "hidden_bytes": figures(encoder, cfg, params, *held_out_rows(cfg, plain, rows)),
            "training_loss": loss,
        }
    return result


def compare_triples(encoder: Encoder, folder: Path, facts: Path, seed: int, rows: int) -> dict[str, Any]:
    """Trains with and without the objective over texts with triples; returns the figures of hidden parts."""
    source = ["--data.source=triples", f"--data.path={facts / 'facts.jsonl'}"]
    with_triples, params, loss = encoder.train([*source, "--data.triple_parts=[relation,tail,text]"], seed)
    held_out = {*data.load_for(with_triples.model, with_triples.data).eval.names}
    texts = folder / "rows"
    texts.mkdir()
    for number, row in enumerate(read_triples(str(facts / "facts.jsonl"))):
        if row.name not in held_out:
            (texts / f"{number:05}.txt").write_text("\n".join([*row.parts, ""]))
    same = ["--data.source=path", f"--data.path={texts}", "--data.eval_fraction=0.005"]
    plain, plain_params, plain_loss = encoder.train(same, seed)
    result: dict[str, Any] = {"triples": {"training_loss": loss}, "plain": {"training_loss": plain_loss}}
    for part in ("relation", "tail", "text"):
        keys = replace(with_triples.data, triple_parts=(part,))
        batch, number = held_out_rows(with_triples, keys, rows)
        if part != "text":  # a document has one of each, so its segment is the unit
            number = batch["segment_ids"]
        result["triples"][part] = figures(encoder, with_triples, params, batch, number)
        result["plain"][part] = figures(encoder, plain, plain_params, batch, number)
    return result


def main() -> None:
    """Trains, compares and records."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments.add_argument("--steps", type=int, default=250)
    arguments.add_argument("--rows", type=int, default=128, help="held-out rows of 256 bytes")
    arguments.add_argument("--name", default="knowledge")
    given = arguments.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    encoder = Encoder(given.steps)
    result: dict[str, Any] = {"steps": given.steps, "rows": given.rows, "cases": []}
    with tempfile.TemporaryDirectory() as name:
        facts = Path(name, "facts")
        result["data"] = stdlib_facts.write(facts)
        for seed in given.seeds:
            folder = Path(name, str(seed))
            folder.mkdir()
            case = {
                "seed": seed,
                "phrases": compare_phrases(encoder, facts, seed, given.rows),
                "triples": compare_triples(encoder, folder, facts, seed, given.rows),
            }
            print(case, flush=True)
            result["cases"].append(case)
            record.record(given.name, result)


if __name__ == "__main__":
    main()
