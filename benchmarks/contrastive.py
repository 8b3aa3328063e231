"""Finds names of digits in 18 languages by pictures: `python benchmarks/contrastive.py [--seeds 0]`, on the CPU.

It trains `configs/contrastive_digits.yaml`, which holds out 450 of scikit-learn's 1,797 digits, with its sigmoid loss
and with softmax. Then each held-out picture chooses among the ten names of one language: recall@1 is the share of
pictures whose most similar name is right. The baseline is a support vector machine on the pixels, which tells ten
classes apart.

Results go to `benchmarks/results/contrastive.json`.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import record

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "contrastive_digits.yaml"
sys.path.insert(0, str(ROOT))


def train(folder: Path, *flags: str) -> dict[str, float]:
    """Runs a training command; returns its seconds, those of its processors, and the last evaluation."""
    command = [sys.executable, str(ROOT / "train.py"), f"--config={CONFIG}", f"--run.dir={folder}", *flags]
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [r for r in records if "eval_loss" in r][-1]
    names = ("eval_loss", "eval_loss_contrastive", "eval_loss_caption", "eval_accuracy", "parameters")
    spent = {"seconds": round(time.perf_counter() - began, 1), "cpu_seconds": round(used, 1)}
    return spent | {name: round(last[name], 4) for name in names}


def recalls(run: Any, held_out: Any) -> dict[str, float]:
    """Returns recall@1 from held-out pictures to the ten names of each language of a run."""
    from jaxstack.data.captions import class_texts

    pictures = run.features(held_out.pixels)
    texts = class_texts(run.config.data, "0123456789")
    return {
        language: round(float(((pictures @ run.features(names).T).argmax(1) == held_out.classes).mean()), 4)
        for language, names in zip(run.config.data.languages, texts, strict=True)
    }


def machine(known: Any, held_out: Any) -> float:
    """Returns the accuracy of a support vector machine on the pixels."""
    from sklearn.svm import SVC

    flat = [part.pixels.reshape(len(part), -1) for part in (known, held_out)]
    return round(float(SVC(gamma=0.001 * 64).fit(flat[0], known.classes).score(flat[1], held_out.classes)), 4)


def main() -> None:
    """Trains, measures and records; results are written after each run."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments.add_argument("--losses", nargs="+", default=["sigmoid", "softmax"], choices=["sigmoid", "softmax"])
    given = arguments.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"

    import jaxstack
    from jaxstack.config.reading.parse import parse_config
    from jaxstack.data import load_for

    cfg = parse_config([f"--config={CONFIG}"])
    data = load_for(cfg.model, cfg.data)
    result: dict[str, Any] = {
        "held_out": len(data.eval),
        "load_average": os.getloadavg()[0],
        "support_vector_machine": machine(data.train, data.eval),
        "cases": [],
    }
    for seed in given.seeds:
        for loss in given.losses:
            with tempfile.TemporaryDirectory() as name:
                flags = [f"--run.seed={seed}", "--mesh.data=1", f"--model.contrastive.loss={loss}"]
                spent = train(Path(name) / loss, *flags)
                found = recalls(jaxstack.load(Path(name) / loss), data.eval)
            worst = min(found.values())
            case = {"seed": seed, "loss": loss, **spent, "least_recall": worst, "recall": found}
            case["mean_recall"] = round(float(np.mean([*found.values()])), 4)
            print(json.dumps(case), flush=True)
            result["cases"].append(case)
            record.record("contrastive", result)


if __name__ == "__main__":
    main()
