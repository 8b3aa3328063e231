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
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import record

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "docs" / "examples"))
import stdlib_facts

from jaxstack import data
from jaxstack.config import Config, DataConfig
from jaxstack.config.reading.parse import parse_config
from jaxstack.data.loader import window_sizes
from jaxstack.data.masking import Masking
from jaxstack.data.triples import read_triples

ROOT = Path(__file__).parent.parent
SIZES = ["--model.d_model=64", "--model.d_ff=172", "--model.num_layers=4", "--data.batch_size=4", "--mesh.data=1"]
MASK = 256
Rows = dict[str, np.ndarray]


def train(flags: list[str], steps: int, seed: int) -> tuple[Config, Any, float]:
    """Trains an encoder; returns its configuration, its parameters and its seconds."""
    from jaxstack import sharding, train
    from jaxstack.families.context import make_context
    from jaxstack.training.services import init_from

    began = time.perf_counter()
    cfg = parse_config([
        f"--config={ROOT / 'configs' / 'encoder_quickstart.yaml'}", *SIZES, f"--train.steps={steps}",
        f"--train.eval_every={steps}", f"--checkpoint.every={steps}", "--train.eval_steps=2", f"--run.seed={seed}",
        "--train.ngram_baseline=false", "--sample.prompts=[]", "--run.sinks=[]", *flags,
    ])  # fmt: skip
    train.main(cfg)
    run = init_from.find_source(cfg.run.dir, "run.dir")
    assert isinstance(run, Config)
    ctx = make_context(run, sharding.make_mesh(run.mesh, run.microbatch_size))
    return run, init_from.restore_params(run, ctx), round(time.perf_counter() - began, 1)


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


def figures(cfg: Config, params: Any, batch: Rows, number: np.ndarray) -> dict[str, float]:
    """Returns nats per hidden byte, the share of right bytes, and the share of units with right bytes only."""
    import jax

    from jaxstack.families import encoder

    def predict(params: Any, batch: Any) -> Any:
        hidden, _ = encoder.FAMILY.hidden_states(cfg.model, params, batch)
        return jax.nn.log_softmax(encoder.logits(cfg.model, params, hidden)[..., :MASK])

    run = jax.jit(predict)
    parts = []
    for i in range(0, len(batch["tokens"]), 32):
        read = {name: batch[name][i : i + 32] for name in ("tokens", "segment_ids", "positions") if name in batch}
        log_p = np.asarray(run(params, read))
        target = batch["targets"][i : i + 32]
        own = np.take_along_axis(log_p, target[..., None], -1)[..., 0]
        parts.append((own, log_p.argmax(-1) == target))
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


def compare_phrases(folder: Path, facts: Path, steps: int, seed: int, rows: int) -> dict[str, Any]:
    """Trains with and without a list of phrases; returns the figures of hidden phrases and of hidden bytes."""
    arms = {"words": [], "phrases": [f"--data.mask_phrases={facts / 'phrases.txt'}"]}
    result = {}
    for name, flags in arms.items():
        text = [
            "--data.source=path",
            f"--data.path={facts / 'docstrings'}",
            "--data.seq_len=256",
            "--data.mask_words=true",
        ]
        cfg, params, seconds = train([*text, *flags, f"--run.dir={folder / name}"], steps, seed)
        plain = replace(cfg.data, mask_words=False, mask_phrases=None, mask_share=0.15)
        listed = replace(plain, mask_phrases=str(facts / "phrases.txt"))
        result[name] = {
            "hidden_phrases": figures(cfg, params, *held_out_rows(cfg, listed, rows)),
            "hidden_bytes": figures(cfg, params, *held_out_rows(cfg, plain, rows)),
            "seconds": seconds,
        }
    return result


def compare_triples(folder: Path, facts: Path, steps: int, seed: int, rows: int) -> dict[str, Any]:
    """Trains with and without the objective over texts with triples; returns the figures of hidden parts."""
    source = ["--data.source=triples", f"--data.path={facts / 'facts.jsonl'}"]
    size = ["--data.seq_len=256", "--data.packing=true"]
    parts = "--data.triple_parts=[relation,tail,text]"
    with_triples, params, seconds = train([*source, *size, parts, f"--run.dir={folder / 'triples'}"], steps, seed)
    held_out = {*data.load_for(with_triples.model, with_triples.data).eval.names}
    texts = folder / "rows"
    texts.mkdir()
    for number, row in enumerate(read_triples(str(facts / "facts.jsonl"))):
        if row.name not in held_out:
            (texts / f"{number:05}.txt").write_text("\n".join([*row.parts, ""]))
    same = ["--data.source=path", f"--data.path={texts}", *size, "--data.eval_fraction=0.005"]
    plain, plain_params, plain_seconds = train([*same, f"--run.dir={folder / 'plain'}"], steps, seed)
    result: dict[str, Any] = {"triples": {"seconds": seconds}, "plain": {"seconds": plain_seconds}}
    for part in ("relation", "tail", "text"):
        keys = replace(with_triples.data, triple_parts=(part,))
        batch, number = held_out_rows(with_triples, keys, rows)
        if part != "text":  # a document has one of each, so its segment is the unit
            number = batch["segment_ids"]
        result["triples"][part] = figures(with_triples, params, batch, number)
        result["plain"][part] = figures(plain, plain_params, batch, number)
    return result


def main() -> None:
    """Trains, compares and records."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments.add_argument("--steps", type=int, default=300)
    arguments.add_argument("--rows", type=int, default=192, help="held-out rows of 256 bytes")
    arguments.add_argument("--name", default="knowledge")
    given = arguments.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    result: dict[str, Any] = {"steps": given.steps, "rows": given.rows, "cases": []}
    with tempfile.TemporaryDirectory() as name:
        facts = Path(name, "facts")
        result["data"] = stdlib_facts.write(facts)
        for seed in given.seeds:
            folder = Path(name, str(seed))
            folder.mkdir()
            rest = facts, given.steps, seed, given.rows
            case = {"seed": seed, "phrases": compare_phrases(folder, *rest), "triples": compare_triples(folder, *rest)}
            print(case, flush=True)
            result["cases"].append(case)
            record.record(given.name, result)


if __name__ == "__main__":
    main()
