"""Measures what the exact sampler of reinforcement learning costs, and how its bits compare on meshes.

    python benchmarks/exactness.py

Two samplers write the same number of completions of the same prompts: `rl.exact=true`, whose tokens the forward pass of
training has chosen, and `rl.exact=false`, whose tokens come from the KV cache. Their steps are timed, too. With
`rl.exact=true`, the backward pass computes the forward pass again. Rounds of both alternate, and `ratio` divides their
medians. `cpu` has the same of CPU seconds, which other work on the machine changes less. For each of `--meshes` of
simulated devices there are also the extremes of the first ratio of each rollout, and the largest difference between
sampler and trainer, in nats.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import record
from sorting_model import SIZES, write_data

EXPERTS = ["--model.moe.num_experts=4", "--model.moe.top_k=2", "--model.moe.d_ff=128"]
COMMON = ["--sample.prompts=[]", "--run.log_every=1", "--optim.weight_decay=0", "--train.eval_steps=1"]
CHAT = ["--data.source=chat", "--data.seq_len=144", "--data.packing=true", "--data.batch_size=16", "--train.steps=20"]
RL = [
    "--data.source=prompts", "--data.seq_len=64", "--data.batch_size=64", "--rl.tokens=12", "--optim.lr=3e-4",
    "--optim.warmup_steps=0", "--optim.schedule=constant", "--rl.rewards=[jaxstack.posttrain.tasks.text:sorting]",
]  # fmt: skip
MESHES: dict[str, tuple[list[str], list[str]]] = {
    "one device": (["--mesh.data=1"], []),
    "data=2": (["--mesh.data=2"], []),
    "tensor=2": (["--mesh.data=1", "--mesh.tensor=2"], []),
    "one device, experts": (["--mesh.data=1"], EXPERTS),
    "expert=2": (["--mesh.data=1", "--mesh.expert=2"], EXPERTS),
}
TORCHTITAN = {"rollout": 2.4, "update": 2.9}
"""What torchtitan states for its batch-invariant kernels: a decoded token, and forward and backward."""


CLOCKS = {"seconds": time.perf_counter, "cpu": time.process_time}


def now() -> dict[str, float]:
    """Returns the time of each clock."""
    return {name: clock() for name, clock in CLOCKS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each sampler")
    parser.add_argument("--steps", type=int, default=3, help="steps on each mesh")
    parser.add_argument("--meshes", nargs="*", choices=MESHES, default=["tensor=2"])
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        job = json.loads(args.only)
        run_mesh(args.folder, job["name"], job["exact"], args.steps) if "name" in job else time_both(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), args)


def measure(folder: Path, args: argparse.Namespace) -> None:
    """Runs all meshes and the timed rounds in processes of their own, and records the figures."""
    write_data(folder)
    settings = {"rounds": args.rounds, "steps": args.steps, "torchtitan": TORCHTITAN}
    result = {**settings, "times": child(folder, args, {}, 1), "meshes": []}
    print(result["times"], flush=True)
    record.record("exactness", result)
    for name in args.meshes:
        devices = 2 if any(flag.endswith("=2") for flag in MESHES[name][0]) else 1
        for exact in (True, False):
            figures = child(folder, args, {"name": name, "exact": exact}, devices)
            result["meshes"].append({"mesh": name, "exact": exact} | figures)
            print(result["meshes"][-1], flush=True)
            record.record("exactness", result)


def child(folder: Path, args: argparse.Namespace, job: dict[str, Any], devices: int) -> dict[str, Any]:
    """Returns what a process with this number of devices has measured."""
    flags = [f"--only={json.dumps(job)}", f"--folder={folder}", f"--rounds={args.rounds}", f"--steps={args.steps}"]
    env = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)}
    subprocess.run([sys.executable, __file__, *flags], check=True, stdout=subprocess.DEVNULL, env=env)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def start_of(folder: Path, experts: list[str], mesh: list[str]) -> Path:
    """Returns a run that was trained a little on conversations."""
    from jaxstack.config.reading.parse import parse_config
    from jaxstack.train import main as train

    path = folder / ("experts" if experts else "dense")
    if not (path / "config.yaml").exists():
        flags = [*SIZES, *COMMON, *CHAT, *experts, *mesh, f"--data.path={folder}/sorting.jsonl", f"--run.dir={path}"]
        train(parse_config(flags))
    return path


def config(folder: Path, name: str, exact: bool, steps: int) -> Any:
    """Returns the configuration of a run that learns from rewards, on one of `MESHES`."""
    from jaxstack.config.reading.parse import parse_config

    mesh, experts = MESHES[name]
    base = start_of(folder, experts, mesh)
    target = folder / f"{name}{exact}".replace(" ", "_")
    flags = [f"--data.path={folder}/sorting_pairs.jsonl", f"--run.init_from={base}", f"--run.dir={target}"]
    every = [f"--train.steps={steps}", f"--train.eval_every={steps}", f"--rl.exact={str(exact).lower()}"]
    return parse_config([*SIZES, *COMMON, *RL, *experts, *mesh, *flags, *every])


def run_mesh(folder: Path, name: str, exact: bool, steps: int) -> None:
    """Trains on a mesh, and writes the extremes of all ratios."""
    from jaxstack.train import main as train

    cfg = config(folder, name, exact, steps)
    train(cfg)
    lines = [json.loads(line) for line in (Path(cfg.run.dir) / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if "grad_norm" in line]
    result = {
        "ratios": [min(line["ratio_min"] for line in found), max(line["ratio_max"] for line in found)],
        "sampler_difference": max((line.get("sampler_difference", 0.0) for line in found), default=0.0),
        "sampler_kl": max((line.get("sampler_kl", 0.0) for line in found), default=0.0),
    }
    (folder / "result.json").write_text(json.dumps(result))


def time_both(args: argparse.Namespace) -> None:
    """Times rollouts and steps of both samplers in turn, and writes the medians."""
    import jax

    from jaxstack import data, start
    from jaxstack.config import resolve
    from jaxstack.data.loader import DataLoader
    from jaxstack.generate.rollouts import Rollouts
    from jaxstack.training.assemble import jit_train_step
    from jaxstack.training.services import init_from

    sides = {}
    for exact in (True, False):
        cfg = config(args.folder, "one device", exact, 1000)
        dataset = data.load_for(cfg.model, cfg.data, cfg.aim)
        cfg = resolve(cfg, dataset.vocab_size, dataset.image, dataset.buckets)
        setup = start.resolve(cfg, dataset)
        loader = DataLoader(cfg, dataset, setup.ctx.layout.sharding(jax.sharding.PartitionSpec()))
        state = init_from.init_state_from(cfg, setup.ctx, setup.abstract, dataset.tokenizer)
        sides[exact] = [Rollouts.create(setup, loader), jit_train_step(cfg, setup.ctx, setup.abstract), state]
    empty = {clock: {exact: {"rollout": [], "update": []} for exact in sides} for clock in CLOCKS}
    seconds: dict[str, dict[bool, dict[str, list[float]]]] = empty
    tokens: dict[bool, list[float]] = {exact: [] for exact in sides}
    for index in range(args.rounds + 2):  # the first rounds compile
        for exact, side in sides.items():
            rollouts, step, state = side
            began = now()
            batch, figures = rollouts.batch(state.params, index)
            jax.block_until_ready(batch)
            between = now()
            side[2], metrics = step(state, batch)
            jax.block_until_ready(metrics)
            ended = now()
            if index >= 2:
                tokens[exact].append(float(figures["length"]))
                for clock, own in seconds.items():
                    own[exact]["rollout"].append((between[clock] - began[clock]) / float(figures["length"]))
                    own[exact]["update"].append(ended[clock] - between[clock])
    result: dict[str, Any] = {"load_average": os.getloadavg()[0]}
    for clock, own in seconds.items():
        median = {
            exact: {what: float(np.median(each)) for what, each in of_side.items()} for exact, of_side in own.items()
        }
        result[clock] = {
            "exact": median[True],
            "inexact": median[False],
            "ratio": {what: median[True][what] / median[False][what] for what in median[True]},
        }
    result["tokens"] = {str(exact): float(np.mean(each)) for exact, each in tokens.items()}
    (args.folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
