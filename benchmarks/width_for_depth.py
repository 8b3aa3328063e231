"""Compares width with depth for translation: `python benchmarks/width_for_depth.py [--seeds 0 1 2]`, on the CPU.

A dense model has four layers in the encoder and four in the decoder. The other models have half of them: one is dense,
and one has an expert for each language. All have equal steps and batches, of Django's messages in eight languages. The
result has the held-out loss in nats per byte of a translation.

Then the models of the first seed translate the same held-out messages by beam search, one model after the other in each
round, so that all share the machine's load. `beam_seconds` has the time of each round, and its median. Compiling is not
counted. `beam_ratio` has the ratio of the dense model's time to that of the experts in each round.

Results go to `benchmarks/results/width_for_depth.json`, after each run. With `--runs FOLDER` a run is kept there as
KIND_SEED, and one that is there already is not trained again. It needs the extra [translate].
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import record

ROOT = Path(__file__).parent.parent
LANGUAGES = "[cs,de,es,fr,it,pl,pt,sv]"
SMALL = [
    f"--config={ROOT / 'configs' / 'translate_quickstart.yaml'}",
    f"--data.languages={LANGUAGES}",
    "--model.d_model=64",
    "--model.d_ff=128",
    "--data.seq_len=128",
    "--data.target_len=160",
    "--mesh.data=1",
]
DENSE = ["--model.moe.num_experts=0", "--data.domains=[]"]
DEEP = ["--model.num_layers=4", "--model.encoder_layers=4"]
KINDS = {
    "dense_4": [*DEEP, *DENSE],
    "experts_2": ["--model.moe.num_experts=8", f"--data.domains={LANGUAGES}"],
    "dense_2": DENSE,
}


def train(folder: Path, seed: int, steps: int, *flags: str) -> dict[str, float]:
    """Trains the small model with flags, unless the run exists; returns its last held-out loss and its parameters."""
    if not (folder / "metrics.jsonl").is_file():
        lasting = [f"--train.steps={steps}", f"--train.eval_every={steps}", f"--checkpoint.every={steps}"]
        command = [sys.executable, str(ROOT / "train.py"), *SMALL, f"--run.dir={folder}", f"--run.seed={seed}"]
        subprocess.run([*command, *lasting, *flags], check=True, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [r for r in records if "eval_loss" in r][-1]
    return {"held_out_loss": round(last["eval_loss"], 4), "parameters": last["parameters"]}


def held_out_messages(run: Any, language: str, count: int) -> list[str]:
    """Returns `count` held-out messages with a translation into a language, drawn by a fixed seed."""
    from jaxstack.data import load

    tokens = load(run.config.data).sources[0].eval
    order = np.random.default_rng(0).permutation(len(tokens.names))
    own = [i for i in order if tokens.names[i].endswith(f"({language})")][:count]
    return [run.tokenizer.decode(tokens.pair(i).inputs[1:-1]) for i in own]  # without the language and the end


def time_beams(runs: dict[str, Path], count: int, beams: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Returns the seconds of a beam search of each model, in rounds of one search each."""
    import jaxstack

    opened = {kind: jaxstack.load(folder, mesh={"data": 1}) for kind, folder in runs.items()}
    messages = held_out_messages(next(iter(opened.values())), "de", count)
    seconds: dict[str, list[float]] = {kind: [] for kind in opened}
    for round_ in range(rounds + 1):
        for kind, run in opened.items():
            began = time.perf_counter()
            run.translate(messages, language="de", temperature=0.0, beams=beams, tokens=tokens)
            if round_:  # the first one compiles
                seconds[kind].append(round(time.perf_counter() - began, 3))
    ratios = [round(a / b, 3) for a, b in zip(seconds["dense_4"], seconds["experts_2"], strict=True)]
    return {
        "beams": beams,
        "messages": len(messages),
        "tokens": tokens,
        "beam_seconds": {kind: {"rounds": each, "median": median(each)} for kind, each in seconds.items()},
        "beam_ratio": {"rounds": ratios, "median": median(ratios)},
    }


def main() -> None:
    """Trains, searches, measures and records; results are written after each run."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--steps", type=int, default=400)
    arguments.add_argument("--messages", type=int, default=16)
    arguments.add_argument("--beams", type=int, default=4)
    arguments.add_argument("--tokens", type=int, default=64, help="new tokens of a search")
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--runs", type=Path, help="folder that keeps the runs")
    given = arguments.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    result: dict[str, Any] = {"steps": given.steps, "flags": SMALL[1:], "unit": "nats per byte", "cases": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.runs or Path(scratch)
        for seed in given.seeds:
            for kind, flags in KINDS.items():
                case = train(folder / f"{kind}_{seed}", seed, given.steps, *flags)
                result["cases"].append({"seed": seed, "kind": kind, **case})
                print(result["cases"][-1], flush=True)
                record.record("width_for_depth", result)
        runs = {kind: folder / f"{kind}_{given.seeds[0]}" for kind in KINDS}
        result |= time_beams(runs, given.messages, given.beams, given.tokens, given.rounds)
        print(result["beam_seconds"], result["beam_ratio"], flush=True)
    print(record.record("width_for_depth", result))


if __name__ == "__main__":
    main()
