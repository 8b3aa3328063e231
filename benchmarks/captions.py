"""Draws pictures from texts, and judges what they show: `python benchmarks/captions.py [--seeds 0 1 2]`, on the CPU.

For each seed it trains `configs/diffusion_captions.yaml` without weights, with the weight of key words alone, with the
weight of salient regions alone, and with both. All runs get the same pictures, noise and steps. Then each draws a
picture of each of the 160 texts, from the same noise, with guidance and without.

Each word is a token, so that a text has eight tokens in place of its 30 bytes. The judge finds in a picture

- the place: the corner whose pixels are the most saturated, because the background is grey;
- the colour: the nearest of the four, by the mean of the pixels of this corner without their grey;
- the digit: a support vector machine on the saturation of these pixels, which is proportional to the ink.

`judge` has its shares of right answers on the held-out pictures of the set: no model can expect more.

Results go to `benchmarks/results/captions.json`. Recorded cases of other seeds or kinds are kept. Flags after `--` are
for `jaxstack train`, in all runs.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import record

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "diffusion_captions.yaml"
sys.path.insert(0, str(ROOT))
KINDS = {"plain": (0.0, 0.0), "key_words": (0.5, 0.0), "salient": (0.0, 1.0), "both": (0.5, 1.0)}
"""The weight of key words, and the weight of salient regions."""
GUIDANCE = (1.0, 2.0)


def train(config: Path, folder: Path, *flags: str) -> dict[str, float]:
    """Runs a training in this process; returns its seconds, those of its processors, and the held-out loss."""
    from jaxstack.config.reading.parse import parse_config
    from jaxstack.train import main as train_run

    began, used = time.perf_counter(), time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        train_run(parse_config([f"--config={config}", f"--run.dir={folder}", *flags]))
    spent = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - used}
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    loss = [r["eval_loss"] for r in records if "eval_loss" in r][-1]
    return {name: round(value, 1) for name, value in spent.items()} | {"held_out_loss": round(loss, 4)}


def word_tokenizer(texts: list[str], path: Path) -> Path:
    """Writes a tokenizer.json in which each word of some texts is a token."""
    words = sorted({word for text in texts for word in text.split()})
    vocabulary = {word: i for i, word in enumerate(["<unknown>", *words])}
    split = {"type": "WhitespaceSplit"}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unknown>"}
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    whole = {"version": "1.0", **nothing, "added_tokens": [], "pre_tokenizer": split, "model": model}
    path.write_text(json.dumps(whole))
    return path


class Judge:
    """Finds place, colour and digit of a drawn picture."""

    def __init__(self, digits: Any) -> None:
        """Trains on scikit-learn's digits, of which it reads the pixels alone."""
        from sklearn.svm import SVC

        self.machine = SVC(gamma=0.064).fit(digits.pixels.reshape(len(digits), -1) / 2 + 0.5, digits.classes)

    def __call__(self, pictures: np.ndarray) -> np.ndarray:
        """Returns digit, colour and place of pictures [N, 16, 16, 3] from -1 to 1, int [N, 3]."""
        from jaxstack.data.own_captions import RGB

        pixels = (pictures / 2 + 0.5).clip(0, 1)
        corners = pixels.reshape(-1, 2, 8, 2, 8, 3).swapaxes(2, 3).reshape(-1, 4, 64, 3)
        saturation = corners.max(-1) - corners.min(-1)  # [N, 4, 64]
        place = saturation.mean(-1).argmax(1)
        rows = np.arange(len(pixels))
        mean = corners[rows, place].mean(1)
        chroma, known = (a - a.min(-1, keepdims=True) for a in (mean, RGB))
        chroma, known = (a / np.maximum(np.linalg.norm(a, axis=-1, keepdims=True), 1e-6) for a in (chroma, known))
        colour = (chroma @ known.T).argmax(1)
        spans = RGB.max(-1) - RGB.min(-1)
        digit = self.machine.predict((saturation[rows, place] / spans[colour, None]).clip(0, 1))
        return np.stack([digit, colour, place], 1)


def shares(found: np.ndarray, wanted: np.ndarray) -> dict[str, float]:
    """Returns the shares of pictures whose digit, colour, place, and all three are right, [N, 3]."""
    right = found == wanted
    each = dict(zip(("digit", "colour", "place"), right.mean(0).tolist(), strict=True))
    return {name: round(share, 4) for name, share in {**each, "all": float(right.all(1).mean())}.items()}


def kept_cases(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the recorded cases of other seeds or kinds that had as many steps and the same flags."""
    path = record.RESULTS / f"{given.name}.json"
    recorded = json.loads(path.read_text()) if path.exists() else {"cases": []}
    if not recorded["cases"] or (recorded["steps"], recorded["flags"]) != (given.steps, given.flags):
        return []
    return [case for case in recorded["cases"] if case["seed"] not in given.seeds or case["kind"] not in given.kinds]


def main() -> None:
    """Trains, draws, judges and records; results are written after each run."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--kinds", nargs="+", default=[*KINDS], choices=[*KINDS])
    arguments.add_argument("--steps", type=int, default=3000)
    arguments.add_argument("--pictures", type=int, default=1, help="of each text")
    arguments.add_argument("--name", default="captions")
    arguments.add_argument("--runs", type=Path, help="folder that keeps the runs")
    arguments.add_argument("flags", nargs="*")
    given = arguments.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"

    import jaxstack
    from jaxstack.config.reading.parse import parse_config
    from jaxstack.data import images, load_for, own_captions

    cfg = parse_config([f"--config={CONFIG}"])
    data = load_for(cfg.model, cfg.data)
    judge = Judge(images.read_digits()[0])
    attributes = [*itertools.product(range(10), range(4), range(4))]
    texts = [own_captions.describe_digit("en", *one)[0] for one in attributes]
    known = dict(zip(own_captions.read_own_captions(cfg.data).of_language()[0], itertools.count(), strict=False))
    by_class = np.array([one for _, one in sorted((known[t], a) for t, a in zip(texts, attributes, strict=True))])
    asked = np.repeat(np.array(attributes), given.pictures, 0)
    prompts = [text for text in texts for _ in range(given.pictures)]
    result: dict[str, Any] = {
        "steps": given.steps,
        "flags": given.flags,
        "load_average": os.getloadavg()[0],
        "pictures": len(prompts),
        "judge": shares(judge(data.eval.pixels), by_class[data.eval.classes]),
        "cases": kept_cases(given),
    }
    print(json.dumps(result["judge"]), flush=True)
    for seed, kind in itertools.product(given.seeds, given.kinds):
        with tempfile.TemporaryDirectory() as scratch:
            words = word_tokenizer(texts, Path(scratch) / "words.json")
            folder = (given.runs or Path(scratch)) / f"{kind}-{seed}"
            weights = zip(("key", "salient"), KINDS[kind], strict=True)
            flags = [f"--model.diffusion.{name}_weight={weight}" for name, weight in weights]
            flags += [f"--run.seed={seed}", "--mesh.data=1", "--sample.pictures=0"]
            flags += [f"--data.tokenizer={words}", "--data.target_len=12", f"--train.steps={given.steps}"]
            flags += [f"--train.eval_every={given.steps}", f"--checkpoint.every={given.steps}", *given.flags]
            spent = {} if folder.exists() else train(CONFIG, folder, *flags)
            run = jaxstack.load(folder)
            drawn = {g: judge(run.draw(prompts, seed=0, steps=10, guidance=g)) for g in GUIDANCE}
        case = {"seed": seed, "kind": kind, **spent}
        case |= {f"guidance_{g:g}": shares(found, asked) for g, found in drawn.items()}
        print(json.dumps(case), flush=True)
        result["cases"].append(case)
        record.record(given.name, result)


if __name__ == "__main__":
    main()
