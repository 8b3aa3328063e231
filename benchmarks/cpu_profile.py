"""Profiles a training step on the CPU beside PyTorch's, operation by operation: `python benchmarks/cpu_profile.py J2`

Needs the extra `[parity]`. Jobs, weights and batch are those of `train_cpu.py`. Each side runs a few steps under its
own profiler, on one core, so that the times of operations add up to a step. PyTorch is eager: a compiled program has
few names. Results go to `benchmarks/results/cpu_profile.json`, job by job.

Matrix products without a batch dimension are those with weights. Those with one are of attention, where PyTorch has one
kernel for products and softmax. So compare `attention` as a whole, and the parts of ours beside it.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import record

STEPS = 3
GEMMS = "products with weights"
ATTENTION = "attention"
REST = "all other operations"
CONTAINERS = ("while", "conditional")
"""Operations of XLA that run others, which the profile has, too."""


def kinds(text: str) -> dict[str, str]:
    """Returns the kind of each instruction of a compiled program by its name."""
    computations: dict[str, str] = dict(re.findall(r"^%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", text, re.M | re.S))

    def lines(line: str) -> list[str]:
        called = re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", line)
        return [line] + [inner for name in called for inner in computations.get(name, "").splitlines()]

    found = {}
    for name, opcode, line in re.findall(r"^\s+(?:ROOT )?%?([\w.\-]+) = [^\n]*? ([\w\-]+)\(([^\n]*)$", text, re.M):
        inside = "\n".join(lines(f" {opcode}({line}"))
        if opcode in CONTAINERS:
            continue
        dots = re.findall(r" dot\([^\n]*", inside)
        batched = any("lhs_batch_dims={}" not in dot and "lhs_batch_dims=" in dot for dot in dots)
        if batched:
            found[name] = f"{ATTENTION}: batched products"
        elif dots:
            found[name] = GEMMS
        elif re.search(r'op_name="[^"]*/[^"]*attention', inside):
            found[name] = f"{ATTENTION}: all else"
        else:
            found[name] = REST
    return found


def ours(name: str) -> None:
    """Profiles our side in a process of its own."""
    import train_cpu

    folder = tempfile.mkdtemp()
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*train_step.*"

    def serve(run: Any) -> None:
        import jax

        run(2)
        with jax.profiler.trace(folder):
            begin = time.perf_counter()
            run(STEPS)
            seconds = time.perf_counter() - begin
        (trace,) = Path(folder).rglob("*.xplane.pb")
        program = max(Path(folder).glob("*cpu_after_optimizations.txt"), key=lambda path: path.stat().st_size)
        kind = kinds(program.read_text())
        times: Counter[str] = Counter()
        for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
            for line in plane.lines:
                for event in line.events:
                    op = dict(event.stats).get("hlo_op")
                    if op in kind and not event.name.startswith("end: "):
                        times[kind[op]] += event.duration_ns / 1e6 / STEPS
        print(json.dumps({"step_ms": 1e3 * seconds / STEPS, "kinds": times}), flush=True)

    train_cpu.serve = serve
    train_cpu.ours(name)


def theirs(name: str) -> None:
    """Profiles PyTorch's side in a process of its own."""
    import train_cpu

    def serve(run: Any) -> None:
        from torch.profiler import ProfilerActivity, profile

        run(2)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            begin = time.perf_counter()
            run(STEPS)
            seconds = time.perf_counter() - begin
        times: Counter[str] = Counter()
        for event in profiler.key_averages():
            if event.key in ("aten::mm", "aten::addmm"):
                kind = GEMMS
            elif event.key in ("aten::bmm", "aten::baddbmm"):
                kind = f"{ATTENTION}: batched products"
            elif "scaled_dot_product" in event.key or "softmax" in event.key:
                kind = f"{ATTENTION}: all else"
            else:
                kind = REST
            times[kind] += event.self_cpu_time_total / 1e3 / STEPS
        print(json.dumps({"step_ms": 1e3 * seconds / STEPS, "kinds": times}), flush=True)

    train_cpu.serve = serve
    train_cpu.torch_peer(name, "eager")


def measure(side: str, job: str, folder: str) -> dict[str, Any]:
    """Returns the time of a step of one side by kind, in ms."""
    import peers_torch

    sizes = asdict(peers_torch.JOBS[job]) | {"accum": 1, "folder": folder}
    core = str(max(os.sched_getaffinity(0)))
    command = ["taskset", "-c", core, sys.executable, __file__, "--worker", side, job]
    done = subprocess.run(command, input=json.dumps(sizes) + "\n", stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["step_ms"] = round(found["step_ms"], 1)
    found["kinds"] = {name: round(ms, 1) for name, ms in sorted(found["kinds"].items())}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("jobs", nargs="*", default=["J1", "J2", "J3"])
    parser.add_argument("--worker", choices=("ours", "torch"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        return (ours if given.worker == "ours" else theirs)(given.jobs[0])
    results: dict[str, Any] = {}
    for job in given.jobs:
        with tempfile.TemporaryDirectory() as folder:
            results[job] = {side: measure(side, job, folder) for side in ("ours", "torch")}
        for side, found in results[job].items():
            print(job, side, found["step_ms"], found["kinds"], flush=True)
        path = record.record("cpu_profile", {"jobs": results})
    print(path)


if __name__ == "__main__":
    main()
