"""Measures pruning: `python benchmarks/prune.py --teacher RUN`

The quickstart is trained first if no run is named. A third of its parameters is removed, in several ways. The best way
is then trained for a quarter of the steps of the same model from scratch, on the same batches, with and without the
original as teacher. The result is the held-out loss in bits per byte (`benchmarks/results/prune.json`), and that of
sparse matrices before any training. Two cores need about 20 minutes. Runs in `--folder` that are complete are not
repeated.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import record

import jaxstack
from jaxstack import families
from jaxstack.cli.compress_quantize import calibration
from jaxstack.compress import prune, quantize, sparsify
from jaxstack.compress.calibrate import Walk
from jaxstack.compress.importance import measure
from jaxstack.compress.sparsity import Method, parse_pattern
from jaxstack.loaded.trained_run import TrainedRun
from jaxstack.models import params

THIRDS: list[dict[str, int]] = [
    {"d_ff": 152},
    {"heads": 3, "d_ff": 200},
    {"layers": 3, "d_ff": 264},
    {"d_model": 112, "d_ff": 208},
]
"""Ways to remove a third of the parameters. The first one is trained."""

SHORT = ["--optim.lr=4e-3", "--optim.warmup_steps=10", "--optim.decay_fraction=0.8"]
"""Schedule of a run that begins with trained parameters."""

PATTERNS = ("0.5", "2:4")


def flags(sizes: dict[str, int]) -> list[str]:
    """Returns sizes as flags of `jaxstack compress prune`."""
    return [f"--{name}={size}" for name, size in sizes.items()]


def train(path: Path, words: list[str]) -> float:
    """Trains the quickstart with flags unless it is done, and returns its last held-out loss in bits per byte."""
    script, log = str(record.RESULTS.parent.parent / "train.py"), path / "metrics.jsonl"
    own = ["--train.ngram_baseline=false", "--sample.prompts=[]", "--checkpoint.every=10000"]
    if not log.exists() or '"event": "finished"' not in log.read_text():
        command = [sys.executable, script, f"--run.dir={path}", *own, *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return [r["eval_bits_per_byte"] for r in records if "eval_bits_per_byte" in r][-1]


def remove_thirds(run: TrainedRun, sequences: int) -> list[dict[str, Any]]:
    """Returns the held-out loss after each way to remove a third of the parameters, before any training."""
    batches, rows = calibration(run, sequences), []
    assert run.context.layout.mesh is not None
    found = measure(Walk.of(run.model, run.context), run.params, batches)
    search = prune.LayerSearch(run.config, run.context, run.params, batches)
    for given in THIRDS:
        sizes = prune.smaller_sizes(run.model, given)
        steps = search.leave_out({"layers": sizes.layers})[0] if "layers" in given else None
        kept = prune.choose(run.model, sizes, found, steps)
        cfg = replace(run.config, model=prune.smaller_model(run.model, sizes))
        values = prune.keep(run.model, cfg.model, run.context, run.params, kept)
        small = replace(run, config=cfg, params=values)
        loss, count = small.evaluate().bits_per_byte, params.count(families.spec(cfg.model))
        rows.append({"sizes": given, "parameters": count, "bits_per_byte": round(loss, 5)})
        print(f"{' '.join(flags(given))}: {count:,} parameters, {loss:.4f} bits per byte", flush=True)
    return rows


def remove_weights(run: TrainedRun, sequences: int) -> list[dict[str, Any]]:
    """Returns the held-out loss with sparse matrices, before any training."""
    batches, rows = calibration(run, sequences), []
    walk = Walk.of(run.model, run.context)
    for pattern in PATTERNS:
        for method in get_args(Method):
            how = sparsify.Settings(parse_pattern(pattern), method)
            layers = list(sparsify.sparsify(walk, run.params, batches if method != "magnitude" else [], how))
            loss = replace(run, params=quantize.join(run.model, run.params, layers)).evaluate().bits_per_byte
            rows.append({"sparsity": pattern, "method": method, "bits_per_byte": round(loss, 5)})
            print(f"{pattern}, {method}: {loss:.4f} bits per byte", flush=True)
    return rows


def compare(teacher: Path, pruned: Path, folder: Path, seeds: list[int], steps: int) -> list[dict[str, float]]:
    """Returns the held-out losses of the runs of each seed."""
    quarter = steps // 4
    given = [f"--model.{name}={size}" for name, size in THIRDS[0].items()]
    short = [*given, f"--run.init_from={pruned}", *SHORT]
    cases: list[dict[str, float]] = [{"seed": seed} for seed in seeds]
    for kind, words, count in (
        ("scratch", given, steps),
        ("distilled", [*short, f"--distill.teacher={teacher}"], quarter),
        ("pruned", short, quarter),
    ):
        for case in cases:
            seed = case["seed"]
            own = [f"--train.steps={count}", f"--train.eval_every={quarter}", f"--run.seed={seed}"]
            case[kind] = train(folder / f"{kind}_{seed}", [*words, *own])
            print(f"{kind}, seed {seed}: {case[kind]:.4f} bits per byte", flush=True)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("runs/prune"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=660, help="of the model from scratch")
    parser.add_argument("--sequences", type=int, default=128, help="calibration sequences")
    args = parser.parse_args()
    teacher, pruned = args.teacher or args.folder / "teacher", args.folder / "small"
    if args.teacher is None and not (teacher / "checkpoints").is_dir():
        train(teacher, [])
    if not pruned.is_dir():
        words = ["compress", "prune", str(teacher), str(pruned), *flags(THIRDS[0]), f"--sequences={args.sequences}"]
        subprocess.run([sys.executable, "-m", "jaxstack", *words], check=True)
    run = jaxstack.load(teacher)
    result = {"before": round(run.evaluate().bits_per_byte, 5), "parameters": params.count(families.spec(run.model))}
    result |= {"steps": args.steps, "sequences": args.sequences, "schedule": SHORT, "unit": "bits per byte"}
    result |= {"thirds": remove_thirds(run, args.sequences), "sparse": remove_weights(run, args.sequences)}
    cases = compare(teacher, pruned, args.folder, args.seeds, args.steps)
    print(f"distilled is better on {sum(c['distilled'] < c['scratch'] for c in cases)} of {len(cases)} seeds")
    record.record("prune", result | {"cases": sorted(cases, key=lambda case: case["seed"])})


if __name__ == "__main__":
    main()
