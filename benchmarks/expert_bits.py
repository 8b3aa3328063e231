"""Measures experts of 4 bits beside experts of 8: `python benchmarks/expert_bits.py --seeds 0 1 2`, on the CPU.

Each seed trains a small form of `configs/moe_quickstart.yaml`. Its matrices are rounded to the nearest: all to 8 bits,
all to 4, or half of the experts of each layer to 4 and everything else to 8. That half gets the fewest tokens, or the
most, or it costs least by the order of `jaxstack compress order --by=int4`. In one case all experts but the most used
one have 4 bits. Experts and order are chosen on training data. Each model is stored, and its file measured. Results go
to `benchmarks/results/expert_bits.json`.
"""

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import record

sys.path.insert(0, str(Path(__file__).parent.parent))
from jaxstack.config.reading.parse import parse_config

ROOT = Path(__file__).parent.parent
FLAGS = [
    "--model.num_layers=2", "--model.d_model=64", "--model.moe.d_ff=96", "--data.seq_len=128", "--mesh.data=1",
    "--train.ngram_baseline=false", "--sample.prompts=[]", "--train.eval_steps=20",
]  # fmt: skip
GROUP = 32


def compare(folder: Path, seed: int, steps: int, sequences: int) -> dict[str, Any]:
    """Trains a model; returns loss and stored bytes of each choice of formats."""
    import jax

    import jaxstack
    from jaxstack import train
    from jaxstack.cli.compress_quantize import calibration
    from jaxstack.compress import order, quantize
    from jaxstack.compress.calibrate import Walk
    from jaxstack.config.scheme import Scheme
    from jaxstack.hf import coded_folder

    every = [f"--train.steps={steps}", f"--train.eval_every={steps}", f"--checkpoint.every={steps}"]
    config = ROOT / "configs" / "moe_quickstart.yaml"
    train.main(parse_config([f"--config={config}", *FLAGS, *every, f"--run.seed={seed}", f"--run.dir={folder}"]))
    run = jaxstack.load(folder)
    walk = Walk.of(run.model, run.context)
    batches = calibration(run, sequences)
    loads = order.measure_loads(walk, run.params, batches)
    measured = order.Order(run.config, run.context, run.params, batches, Scheme(4, GROUP))
    rows = [{"stack": row.stack, "layer": row.layer, "expert": row.expert, "above": row.loss - measured.whole}
            for row in measured.experts()]  # fmt: skip
    costs = order.read_experts_of({"experts": rows}, walk.stacks, run.model.moe.num_experts)
    experts = run.model.moe.num_experts
    half = experts // 2
    (stack,) = walk.stacks
    choices = {
        "int8": None,
        "half in int4, the least used": (loads, half),
        "half in int4, first in the order": (costs, half),
        "half in int4, the most used": ({stack: -loads[stack]}, half),
        "all but one in int4, the least used": (loads, experts - 1),
        "int4": None,
    }
    result: dict[str, Any] = {
        "float": round(run.evaluate().bits_per_byte, 5),
        "loads": {"least": float(loads[stack].min()), "most": float(loads[stack].max())},
        "cases": [],
    }
    for name, choice in choices.items():
        lower = None if choice is None else quantize.least_used(*choice)
        how = quantize.Settings(Scheme(4 if name == "int4" else 8, GROUP), "rtn", int4_experts=lower)
        layers = [*quantize.quantize(walk, run.params, [], how)]
        values = quantize.join(run.model, run.params, layers)
        path = folder / name.replace(" ", "_")
        path.mkdir()
        codes = quantize.stacked_codes(run.model, layers)
        its = None if lower is None else quantize.by_stack(run.model, lower)
        coded_folder.write(path, run.model, jax.device_get(values), codes, how.scheme.bits, "int", "float32", its)
        result["cases"].append({
            "matrices": name,
            "bits_per_byte": round(replace(run, params=values).evaluate().bits_per_byte, 5),
            "bytes": (path / coded_folder.FILE).stat().st_size,
        })  # fmt: skip
    return result


def main() -> None:
    """Trains, rounds, stores and records."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments.add_argument("--steps", type=int, default=400)
    arguments.add_argument("--sequences", type=int, default=16, help="training sequences for loads and order")
    arguments.add_argument("--name", default="expert_bits")
    given = arguments.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    result: dict[str, Any] = {"steps": given.steps, "sequences": given.sequences, "group": GROUP, "cases": []}
    for seed in given.seeds:
        with tempfile.TemporaryDirectory() as name:
            case = {"seed": seed, **compare(Path(name, "run"), seed, given.steps, given.sequences)}
        print(case, flush=True)
        result["cases"].append(case)
        record.record(given.name, result)


if __name__ == "__main__":
    main()
