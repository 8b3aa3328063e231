"""Compares text-text pairs across languages with pictures alone: `python benchmarks/caption_pairs.py`, on the CPU.

For each seed it trains `configs/contrastive_captions.yaml` with pairs of texts in two languages, and without them. Both
runs get the same pictures, the same first texts and as many steps. Then it measures on held-out pictures

- `recall`: each picture chooses among the 160 texts of one language; the share of right ones, for each language;
- `across`: each text chooses among the 160 texts of another language; the mean share over all six directions;
- `captions`: the share of pictures whose caption, written by the language branch, is right word for word. It begins
  with the first word of its language, "a", "eine" or "un".

Each word is a token. Results go to `benchmarks/results/caption_pairs.json`. Flags after `--` are for `jaxstack train`.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import record
from captions import train, word_tokenizer

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "contrastive_captions.yaml"
sys.path.insert(0, str(ROOT))
CAPTIONED = 200
"""Held-out pictures of which captions are written, in each language."""


def recalls(run: Any, held_out: Any, texts: list[list[str]]) -> dict[str, Any]:
    """Returns the shares of pictures and of texts that find the right text, see the file."""
    names = run.config.data.languages
    known = [run.features(each) for each in texts]
    pictures = run.features(held_out.pixels)
    found = {
        name: round(float(((pictures @ each.T).argmax(1) == held_out.classes).mean()), 4)
        for name, each in zip(names, known, strict=True)
    }
    pairs = [(a @ b.T).argmax(1) == np.arange(len(a)) for a, b in itertools.permutations(known, 2)]
    return {"recall": found, "across": round(float(np.mean(pairs)), 4)}


def captions(run: Any, held_out: Any, texts: list[list[str]]) -> dict[str, float]:
    """Returns the share of captions that are right, for each language."""
    some = held_out.take(np.arange(CAPTIONED))
    found = {}
    for name, each in zip(run.config.data.languages, texts, strict=True):
        begin = [each[0].split()[0]] * CAPTIONED
        written = run.captions(some.pixels, begin, temperature=0.0)
        right = [made.split() == each[i].split() for made, i in zip(written, some.classes, strict=True)]
        found[name] = round(float(np.mean(right)), 4)
    return found


def main() -> None:
    """Trains, measures and records; results are written after each run."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--steps", type=int, default=1500)
    arguments.add_argument("--name", default="caption_pairs")
    arguments.add_argument("flags", nargs="*")
    given = arguments.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"

    import jaxstack
    from jaxstack.config.reading.parse import parse_config
    from jaxstack.data import load_for, own_captions

    cfg = parse_config([f"--config={CONFIG}"])
    held_out = load_for(cfg.model, cfg.data).eval
    texts = own_captions.read_own_captions(cfg.data).of_language()
    result: dict[str, Any] = {
        "steps": given.steps,
        "flags": given.flags,
        "load_average": os.getloadavg()[0],
        "pictures": len(held_out),
        "captioned": CAPTIONED,
        "cases": [],
    }
    for seed, pairs in itertools.product(given.seeds, (True, False)):
        with tempfile.TemporaryDirectory() as scratch:
            words = word_tokenizer([text for each in texts for text in each], Path(scratch) / "words.json")
            flags = [f"--run.seed={seed}", "--mesh.data=1", f"--model.contrastive.translations={str(pairs).lower()}"]
            flags += [f"--data.tokenizer={words}", "--data.target_len=12", f"--train.steps={given.steps}"]
            flags += [f"--train.eval_every={given.steps}", f"--checkpoint.every={given.steps}", *given.flags]
            spent = train(CONFIG, Path(scratch) / "run", *flags)
            run = jaxstack.load(Path(scratch) / "run")
            case = {"seed": seed, "text_pairs": pairs, **spent, **recalls(run, held_out, texts)}
            case["captions"] = captions(run, held_out, texts)
        print(json.dumps(case), flush=True)
        result["cases"].append(case)
        record.record(given.name, result)


if __name__ == "__main__":
    main()
