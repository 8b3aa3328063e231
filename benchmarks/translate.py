"""Compares experts by language with other models: `python benchmarks/translate.py [--seeds 0 1 2]`, on the CPU.

The others are a dense model, and experts that a learned router chooses for each token.

The pairs are Django's messages in 24 languages (`configs/translate_quickstart.yaml`). A held-out message is not trained
on in any language. All models have equal active parameters, steps and batches. The held-out loss is that of the last
step, in nats per byte of a translation. For chrF (Popovic 2015, computed by sacrebleu) the models translate held-out
messages of each language greedily.

Results go to `benchmarks/results/translate.json`, after each run; cases that a call does not run stay. It needs the
extra [translate].
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import record

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "translate_quickstart.yaml"
OUT = ROOT / "benchmarks" / "results" / "translate.json"
ROUTED = ["--model.moe.router=softmax", "--model.moe.top_k=1", "--model.moe.normalize=false", "--data.domains=[]"]
KINDS = {
    "language experts": [],
    "dense": ["--model.moe.num_experts=0", "--data.domains=[]"],
    "token-routed experts": ROUTED,
}


def train(folder: Path, *flags: str) -> dict[str, float]:
    """Runs a training command; returns its seconds, its parameters and the last held-out loss."""
    command = [sys.executable, str(ROOT / "train.py"), f"--config={CONFIG}", f"--run.dir={folder}", *flags]
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [r for r in records if "eval_loss" in r][-1]
    seconds = round(time.perf_counter() - began, 1)
    return {"seconds": seconds, "held_out_loss": last["eval_loss"], "parameters": last["parameters"]}


def held_out_messages(run: Any, count: int) -> dict[str, list[tuple[str, str]]]:
    """Returns up to `count` held-out messages of each language with their translations, drawn by a fixed seed."""
    from jaxstack.data import load

    tokens = load(run.config.data).sources[0].eval
    found = defaultdict(list)
    for i in np.random.default_rng(0).permutation(len(tokens.names)):
        language = tokens.names[i].rpartition("(")[2].rstrip(")")
        if len(found[language]) < count:
            pair = tokens.pair(i)
            source, target = pair.inputs[1:-1], pair.targets[:-1]  # without the language and the ends
            found[language].append((run.tokenizer.decode(source), run.tokenizer.decode(target)))
    return dict(found)


def chrf(run: Any, messages: dict[str, list[tuple[str, str]]]) -> dict[str, float]:
    """Returns the chrF of greedy translations by language, from 0 to 100."""
    from sacrebleu.metrics import CHRF

    scores = {}
    for language, pairs in sorted(messages.items()):
        made = run.translate([source for source, _ in pairs], language=language, temperature=0.0, tokens=160)
        scores[language] = round(CHRF().corpus_score(made, [[target for _, target in pairs]]).score, 1)
    return scores


def main() -> None:
    """Trains, translates, measures and records; results are written after each run."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--kinds", nargs="+", default=[*KINDS], choices=[*KINDS])
    arguments.add_argument("--steps", type=int, default=800)
    arguments.add_argument("--messages", type=int, default=30, help="translated messages of each language")
    given = arguments.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"

    import jaxstack

    sizes = {"steps": given.steps, "messages": given.messages}
    before = json.loads(OUT.read_text()) if OUT.is_file() else {}
    kept = before["cases"] if sizes == {name: before.get(name) for name in sizes} else []
    result: dict[str, Any] = {**sizes, "cases": kept}
    for seed in given.seeds:
        for kind in given.kinds:
            with tempfile.TemporaryDirectory() as name:
                flags = [f"--run.seed={seed}", "--mesh.data=1", f"--train.steps={given.steps}", *KINDS[kind]]
                flags += [f"--train.eval_every={given.steps}", f"--checkpoint.every={given.steps}"]
                spent = train(Path(name) / "run", *flags)
                run = jaxstack.load(Path(name) / "run", mesh={"data": 1})
                scores = chrf(run, held_out_messages(run, given.messages))
            mean = round(sum(scores.values()) / len(scores), 2)
            case = {"seed": seed, "kind": kind, **spent, "chrf_mean": mean, "chrf": scores}
            print(json.dumps(case), flush=True)
            others = [c for c in result["cases"] if (c["seed"], c["kind"]) != (seed, kind)]
            result["cases"] = [*others, case]
            record.record("translate", result)


if __name__ == "__main__":
    main()
