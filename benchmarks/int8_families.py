"""Compares int8 with bfloat16 in training a translation and a diffusion model: `python benchmarks/int8_families.py`

Both models are dense. Each seed trains them in bfloat16 and with `train.quant=int8` on the same batches, on the CPU.
The result has the training loss and the held-out loss of each run, and for each seed the difference of the last
held-out losses (`benchmarks/results/int8_families.json`). Seeds that are recorded already and that `--seeds` does not
name are kept. It compares losses and not speed, because CPUs have no fast
8-bit products. It needs the extras [translate] and [images].

`--compile` runs nothing. In the environment of the extra `[cuda13]` it compiles the training step of a larger model of
each family for one H100. It counts the products of the program by the dtype of their result, which is int32 for int8,
and the bytes that the program reads and writes (`benchmarks/results/int8_families_h100.json`). A loop over layers
contains the products of one layer.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import record

sys.path.insert(0, str(Path(__file__).parent.parent))

ROOT = Path(__file__).parent.parent
TRANSLATION = [
    "--config=configs/translate_quickstart.yaml",
    "--model.moe.num_experts=0",
    "--data.domains=[]",
    "--data.languages=[cs,de,es,fr,it,pl,pt,sv]",
    "--model.d_model=64",
    "--model.d_ff=128",
    "--data.seq_len=128",
    "--data.target_len=160",
    "--train.steps=120",
    "--optim.warmup_steps=20",
]
DIFFUSION = ["--config=configs/diffusion_digits.yaml", "--model.moe.num_experts=0", "--train.steps=240"]
MODELS = {"translation": TRANSLATION, "diffusion": [*DIFFUSION, "--sample.pictures=0", "--train.ngram_baseline=false"]}
COMPILED = [
    "--kernels.attention=chunked",
    "--kernels.cross_entropy=xla",
    "--train.ngram_baseline=false",
    "--optim.name=adamw",
]
LARGE = {
    "translation": [
        "--model.family=encoder_decoder",
        "--model.positions=relative",
        "--model.attention_scale=1.0",
        "--model.num_layers=2",
        "--model.d_model=512",
        "--model.num_heads=8",
        "--model.d_ff=2048",
        "--model.vocab_size=8192",
        "--data.source=pairs",
        "--data.path=messages.tsv",
        "--data.seq_len=512",
        "--data.target_len=512",
        "--data.batch_size=32",
    ],
    "diffusion": [
        "--model.family=diffusion",
        "--model.num_layers=2",
        "--model.d_model=768",
        "--model.num_heads=12",
        "--model.d_ff=3072",
        "--model.gated=false",
        "--model.activation=gelu_tanh",
        "--model.norm=layer",
        "--model.positions=learned",
        "--model.max_positions=256",
        "--model.vocab_size=1000",
        "--model.diffusion.patch_size=2",
        "--model.diffusion.image=[32,32,4]",
        "--data.source=digits",
        "--data.seq_len=256",
        "--data.batch_size=64",
    ],
}


def train(name: str, seed: int, quant: str) -> dict[str, Any]:
    """Trains a model in bfloat16 or int8, and returns its curves."""
    with tempfile.TemporaryDirectory() as run:
        flags = [f"--run.dir={run}/run", f"--run.seed={seed}", "--run.log_every=1", "--mesh.data=1"]
        steps = int(MODELS[name][next(i for i, f in enumerate(MODELS[name]) if "train.steps" in f)].partition("=")[2])
        flags += [f"--train.eval_every={steps // 4}", f"--checkpoint.every={steps}", "--train.dtype=bfloat16"]
        command = [sys.executable, "train.py", *MODELS[name], *flags, f"--train.quant={quant}"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in Path(run, "run", "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    every = steps // 20
    return {
        "training": [[i, round(sum(losses[i - every : i]) / every, 4)] for i in range(every, steps + 1, every)],
        "held_out": [[line["step"], round(line["eval_loss"], 5)] for line in lines if "eval_loss" in line],
    }


def compile_step(name: str, quant: str) -> dict[str, Any]:
    """Compiles the step of a large model for an H100, and counts its products and bytes."""
    from jaxstack.config.reading.parse import parse_config
    from jaxstack.planner import aot, step_bytes

    flags = [*LARGE[name], "--train.dtype=bfloat16", f"--train.quant={quant}", "--mesh.data=1"]
    cfg = parse_config([*flags, *COMPILED])
    step = aot.compile(cfg, "h100:1x1x1")
    text = str(step.compiled.as_text())
    products: Counter[str] = Counter()
    for line in text.splitlines():
        found = re.search(r"= \(?(\w+)\[.* (dot|custom-call)\(", line)
        if found and (found[2] == "dot" or re.search(r'custom_call_target="[^"]*(gemm|matmul)', line)):
            products[found[1]] += 1
    program = step_bytes.read_program(text, step.trip_counts)
    sizes = {part: round(read + written) for part, (read, written, _) in step_bytes.by_part(program).items()}
    return {
        "products": dict(products),
        "int8_products": products["s32"],
        "gemm_bytes": sizes.get("gemm", 0),
        "all_bytes": sum(sizes.values()),
        "arguments": step.arguments,
        "temporary": step.temporary,
    }


def kept_cases(seeds: list[int]) -> list[dict[str, Any]]:
    """Returns the recorded cases of other seeds that had the same flags, which are not run again."""
    path = record.RESULTS / "int8_families.json"
    recorded = json.loads(path.read_text()) if path.exists() else {"flags": None, "cases": []}
    return [case for case in recorded["cases"] if recorded["flags"] == MODELS and case["seed"] not in seeds]


def differences(cases: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Returns the last held-out loss of int8 above bfloat16 for each model, in the order of the seeds."""
    found: dict[str, list[float]] = {name: [] for name in MODELS}
    for case in sorted(cases, key=lambda case: case["seed"]):
        apart = case["int8"]["held_out"][-1][1] - case["bfloat16"]["held_out"][-1][1]
        found[case["model"]].append(round(apart, 5))
    return found


def main() -> None:
    """Trains or compiles, and records; results are written after each run."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--compile", action="store_true", help="compile large models for an H100, and run nothing")
    given = arguments.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    if given.compile:
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        compiled: dict[str, Any] = {"device": "h100", "flags": LARGE, "steps": {}}
        for name in LARGE:
            for quant in ("none", "int8"):
                compiled["steps"].setdefault(name, {})[quant] = compile_step(name, quant)
                print(name, quant, compiled["steps"][name][quant], flush=True)
                record.record("int8_families_h100", compiled)
        print(record.record("int8_families_h100", compiled))
        return
    result: dict[str, Any] = {"flags": MODELS, "int8_above_bfloat16": {}, "cases": kept_cases(given.seeds)}
    for seed in given.seeds:
        for name in MODELS:
            curves = {quant: train(name, seed, quant) for quant in ("none", "int8")}
            result["cases"].append({"model": name, "seed": seed, "bfloat16": curves["none"], "int8": curves["int8"]})
            result["int8_above_bfloat16"] = differences(result["cases"])
            print(name, seed, {quant: curve["held_out"] for quant, curve in curves.items()}, flush=True)
            record.record("int8_families", result)
    print(record.record("int8_families", result))


if __name__ == "__main__":
    main()
