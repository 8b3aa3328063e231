"""Compares training steps with PyTorch on the CPU: `python benchmarks/train_cpu.py [--jobs J1 J2 ...] [--rounds 9]`

Needs the extra `[parity]`. For each job, three processes (jaxstack, torch eager, torch.compile) take turns of a few
steps. Turns alternate in rounds, so that other work on the machine slows all of them. The result is the ratio within a
round: the time of the better torch mode over ours. Medians are printed, and written to
`benchmarks/results/train_cpu.json` after each job. The jobs are GPTs (J1, J2), a Llama (J3), a BERT (E1) and a T5 (T1).

Other work on the machine delays the threads of a process that wait for each other, and one side more than the other. So
on a busy machine run `taskset -c 0 python benchmarks/train_cpu.py ...`: all processes then have one thread on one core.
`processor_ms` and `processor_ratios` have the processor's time, which does not count waiting. With several threads they
mean little, because threads of PyTorch use the processor while they wait.

Our side runs as `train.py` does: with its device count and flags, `assemble.jit_train_step`, and metrics that are read
one step late. It writes its initial weights and the batch for the other sides, which begin with them. All sides decay
the same weights. So their losses agree step by step, and `losses` has the first ones.
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

import record

ROOT = Path(__file__).parent.parent
COMPARED = 4
"""Steps whose losses are compared, before any time is taken."""

TOLERANCE = 2e-5
"""Largest relative difference of these losses. Sums in another order gave 1e-7. Another epsilon, a missing decay
or another batch gives more."""

STEPS = {"J1": 30, "J2": 2, "J3": 2, "E1": 4, "T1": 4}  # steps of a turn, which takes about a second or two


def ours(name: str) -> None:
    """Trains one job of `peers_torch.JOBS` in a process of its own; each line of input is a number of steps."""
    sys.path.insert(0, str(ROOT))
    from jaxstack.config import (
        Config,
        DataConfig,
        DenoiserConfig,
        MeshConfig,
        ModelConfig,
        OptimConfig,
        TrainConfig,
    )
    from jaxstack.runtime import platform

    job = json.loads(sys.stdin.readline())
    platform.configure(MeshConfig(), job["batch"] // job["accum"])

    import jax
    import numpy as np

    from jaxstack import sharding
    from jaxstack.families import of as family_of
    from jaxstack.families.context import make_context
    from jaxstack.training import assemble
    from jaxstack.training.state import Recipe, abstract_state, make_state

    family: dict[str, Any] = {
        "gpt": {
            "norm": "layer",
            "norm_eps": 1e-5,
            "positions": "learned",
            "max_positions": job["seq_len"],
            "activation": "gelu",
            "gated": False,
            "tied_embeddings": True,
        },
        "llama": {"norm_eps": 1e-6},
        "bert": {
            "family": "encoder",
            "norm": "layer",
            "norm_eps": 1e-12,
            "norm_after": True,
            "token_types": 2,
            "positions": "learned",
            "max_positions": job["seq_len"],
            "activation": "gelu",
            "gated": False,
            "bias": True,
            "tied_embeddings": True,
        },
        "t5": {
            "family": "encoder_decoder",
            "positions": "relative",
            "attention_scale": 1.0,
            "activation": "relu",
            "gated": False,
            "tied_embeddings": True,
            "head_scale": job["width"] ** -0.5,
        },
    }[job["family"]]
    both = {"denoisers": (DenoiserConfig(),), "target_len": job["seq_len"] // 2} if job["family"] == "t5" else {}
    cfg = Config(
        model=ModelConfig(
            num_layers=job["layers"],
            d_model=job["width"],
            num_heads=job["heads"],
            num_kv_heads=job["kv_heads"],
            d_ff=job["hidden"],
            vocab_size=job["vocab"],
            **family,
        ),
        data=DataConfig(seq_len=job["seq_len"], batch_size=job["batch"], **both),
        optim=OptimConfig(lr=1e-3, warmup_steps=0, schedule="constant"),
        train=TrainConfig(steps=10**6, grad_accum=job["accum"]),
    )
    mesh = sharding.make_mesh(cfg.mesh, job["batch"] // job["accum"])
    ctx = make_context(cfg, mesh)
    abstract = abstract_state(Recipe.of(cfg), ctx)
    state = make_state(Recipe.of(cfg), ctx, abstract)
    train_step = assemble.jit_train_step(cfg, ctx, abstract)
    arrays = family_of(cfg.model).batch_spec(cfg.model, cfg.data)
    rng = np.random.default_rng(0)
    batch = {name: array.draw(rng) for name, array in arrays.items()}
    write_start(Path(job["folder"]), job["family"], cfg.model, state.params, batch)
    placed = ctx.layout.sharding(ctx.layout.batch)

    def run(steps: int) -> float:
        nonlocal state
        unread = None
        for _ in range(steps):
            state, metrics = train_step(state, jax.device_put(batch, placed))
            if unread is not None:
                unread = float(unread["loss"])
            unread = metrics
        return float(unread["loss"])

    serve(run)


def write_start(folder: Path, family: str, model: Any, params: Any, batch: dict[str, Any]) -> None:
    """Writes the weights by their names in PyTorch, the names of those that are decayed, and the batch."""
    import numpy as np

    from jaxstack import families
    from jaxstack.common.tree import flatten
    from jaxstack.hf.weights import build_tensor, hf_tensors

    declared = flatten(families.spec(model))
    values = {path: np.asarray(value, np.float32) for path, value in flatten(params).items()}
    weights, decayed = {}, []
    if family == "gpt":
        import peers_torch

        for name, path, array in peers_torch.gpt_weights(values):
            weights[name] = array
            decayed += [name] * declared[path].is_decayed
    else:
        for name, tensor in hf_tensors(family, families.spec(model)).items():
            weights[name] = build_tensor(tensor, declared, values, np.float32)
            decayed += [name] * declared[tensor.sources[0][0]].is_decayed
    np.savez(folder / "weights.npz", **weights)
    np.savez(folder / "batch.npz", **batch)
    (folder / "decayed.json").write_text(json.dumps(decayed))


def torch_peer(name: str, mode: str) -> None:
    """Trains one job in PyTorch, in a process of its own."""
    job = json.loads(sys.stdin.readline())
    import peers_torch

    peer = peers_torch.Peer(name, mode, folder=Path(job["folder"]), threads=len(os.sched_getaffinity(0)))

    def run(steps: int) -> float:
        for _ in range(steps):
            loss = peer.step()
        return loss

    serve(run)


def serve(run: Any) -> None:
    """Answers each line `n` with the seconds and processor seconds per step over n steps, and the last loss."""
    begin = time.perf_counter()
    losses = [run(1)]
    first_step_s = time.perf_counter() - begin
    losses += [run(1) for _ in range(COMPARED - 1)]
    print(json.dumps({"first_step_s": first_step_s, "losses": losses}), flush=True)
    for line in sys.stdin:
        begin, used = time.perf_counter(), time.process_time()
        loss = run(int(line))
        spent = {"step_s": time.perf_counter() - begin, "processor_s": time.process_time() - used}
        print(json.dumps({name: s / int(line) for name, s in spent.items()} | {"loss": loss}), flush=True)


class Worker:
    """A process that trains on request."""

    script = __file__

    def __init__(self, *words: str, job: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, self.script, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._say(json.dumps(job))
        self.first = self._hear()  # the worker's description of itself
        self.first_step_s = self.first["first_step_s"]

    def turn(self, steps: int) -> dict[str, Any]:
        self._say(str(steps))
        return self._hear()

    def close(self) -> None:
        self._process.communicate()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("a worker ended early; its error is printed above")
        return json.loads(line)


def compare(name: str, rounds: int, accum: int) -> dict[str, Any]:
    """Runs all sides of a job in rounds and returns their times and ratios."""
    from dataclasses import asdict

    import peers_torch

    job = asdict(peers_torch.JOBS[name]) | {"accum": accum}
    with tempfile.TemporaryDirectory() as folder:
        workers = {
            label: Worker("--worker", kind, name, job=job | {"folder": folder})
            for label, kind in (("jaxstack", "ours"), ("torch eager", "eager"), ("torch compile", "compile"))
        }
    first = {label: worker.first["losses"] for label, worker in workers.items()}
    difference = max(abs(a / b - 1) for a, b in zip(first["jaxstack"], first["torch eager"], strict=True))
    if difference > TOLERANCE:
        sys.exit(f"{name}: the sides do not train the same model: losses {first}")
    for worker in workers.values():
        worker.turn(2)
    steps, losses = {key: [] for key in workers}, {}
    used: dict[str, list[float]] = {key: [] for key in workers}
    for turn in range(rounds):
        # The order changes from round to round, so that no process always runs after the same one.
        names = list(workers)
        for key in names[turn % 3 :] + names[: turn % 3]:
            answer = workers[key].turn(STEPS[name])
            steps[key].append(answer["step_s"])
            used[key].append(answer["processor_s"])
            losses[key] = answer["loss"]
    for worker in workers.values():
        worker.close()
    ratios, processor = ([min(e, c) / o for o, e, c in zip(*times.values(), strict=True)] for times in (steps, used))
    return {
        "job": job,
        "rounds": rounds,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "step_ms": {key: round(1e3 * median(values), 2) for key, values in steps.items()},
        "processor_ms": {key: round(1e3 * median(values), 2) for key, values in used.items()},
        "first_step_s": {key: round(worker.first_step_s, 1) for key, worker in workers.items()},
        "losses": first,
        "largest_difference_of_losses": difference,
        "last_loss": losses,
        "ratios": [round(r, 3) for r in ratios],
        "speed_against_better_torch": round(median(ratios), 3),
        "processor_ratios": [round(r, 3) for r in processor],
        "processor_time_against_better_torch": round(median(processor), 3),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--jobs", nargs="+", default=[*STEPS])
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--accum", type=int, default=1, help="microbatches of jaxstack's side")
    arguments.add_argument("--name", default="train_cpu", help="name of the result file")
    arguments.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.worker:
        kind, name = given.worker
        return ours(name) if kind == "ours" else torch_peer(name, kind)
    results: dict[str, Any] = {}
    for name in given.jobs:
        results[name] = compare(name, given.rounds, given.accum)
        times = ", ".join(f"{key} {value:.1f} ms" for key, value in results[name]["step_ms"].items())
        print(
            f"{name}: {results[name]['speed_against_better_torch']:.2f} x the better torch mode ({times})", flush=True
        )
        path = record.record(given.name, {"jobs": results})  # after each job: what is measured is not lost
    print(path)


if __name__ == "__main__":
    main()
