"""Injects the faults of the tests on their meshes, also into the quickstart: `python benchmarks/debug_faults.py`

Each fault of `tests/debug/test_faults_on_meshes.py` is found in the tests' small model on simulated devices: layer,
line, direction, stage and device must be those of the table there. `runs` is how often the search runs the step,
counted in layers: the runs of layers, forward and backward, divided by those of one step.

Faults of the Llama family are found in the model of `configs/quickstart.yaml` too, with its length and batch (one
pipeline has more layers), each by a process of its own with nothing compiled before. `seconds` is the time of this
process, with Python's start, and `cpu_seconds` that of its cores: on a busy machine, an idle one needs at most these.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import record

ROOT = Path(__file__).parent.parent
NOT_IN_QUICKSTART = "overflow of attention's scores"
"""A fault that the quickstart cannot have: its queries and keys are normalised."""

DEEPER = "a layer of a stage, on idle stages too"
"""A fault whose pipeline has six layers, where the quickstart has four."""

FOLDERS = "", "tests", "tests/models", "tests/pipeline", "tests/debug"


def use_quickstart(faults: Any) -> None:
    """Replaces the tests' model of the Llama family by the quickstart's, with its length and batch."""
    from jaxstack.config.reading import parse

    cfg = parse.parse_config([f"--config={ROOT / 'configs' / 'quickstart.yaml'}"])
    faults.meshes.MODELS["llama3"] = dataclasses.replace(cfg.model, vocab_size=256)  # of the byte tokenizer
    faults.meshes.SEQ, faults.ROWS = cfg.data.seq_len, cfg.data.batch_size


def count_layers(patches: Any) -> list[int]:
    """Lets the layers of the decoder count how often they run; returns where the count is, of all devices."""
    import jax

    from jaxstack.models.blocks import Stack

    counts = [0]

    def one() -> None:
        counts[0] += 1

    @jax.custom_vjp
    def counted(x: jax.Array) -> jax.Array:
        jax.debug.callback(one)
        return x

    def backward(_: None, g: jax.Array) -> tuple[jax.Array]:
        jax.debug.callback(one)
        return (g,)

    counted.defvjp(lambda x: (counted(x), None), backward)
    real = Stack.run_layer

    def run_layer(stack: Stack, cfg: Any, ctx: Any, p: Any, x: jax.Array, *rest: Any, **how: Any) -> Any:
        return real(stack, cfg, ctx, p, counted(x), *rest, **how)

    patches.setattr(Stack, "run_layer", run_layer)
    return counts


def runs_of_step(faults: Any, fault: Any, counts: list[int]) -> float:
    """Returns how many runs of the step a search has taken, counted in layers."""
    import jax

    from jaxstack.training.assemble import make_gradients

    jax.effects_barrier()
    searched, counts[0] = counts[0], 0
    cfg, ctx, values, batch = faults.setting(fault)
    jax.block_until_ready(jax.jit(make_gradients(cfg, ctx))(values, batch, None))
    jax.effects_barrier()
    return searched / counts[0]


def find(faults: Any, name: str) -> dict[str, Any]:
    """Finds one fault in the small model; fails if anything differs from the table."""
    import pytest

    fault = faults.FAULTS[name]
    with pytest.MonkeyPatch.context() as patches:
        counts = count_layers(patches)
        lines = said(faults.check(name, patches))
        runs = round(runs_of_step(faults, fault, counts), 2)
    how = {n: fault.how[n] for n in ("schedule", "chunks", "loops", "remat", "accum") if n in fault.how}
    how |= {"dtype": fault.dtype} if fault.dtype != "float32" else {}
    return {"fault": name, "family": fault.family, "mesh": fault.mesh, "how": how, **lines, "runs": runs}


def work(names: list[str], in_quickstart: bool) -> None:
    """Finds faults in this process, and prints a line for each; all of the table without names."""
    for folder in FOLDERS:
        sys.path.insert(0, str(ROOT / folder))
    import pytest
    import test_faults_on_meshes as faults

    if in_quickstart:
        use_quickstart(faults)
    for name in names or faults.FAULTS:
        with contextlib.redirect_stdout(io.StringIO()), pytest.MonkeyPatch.context() as patches:
            found = said(faults.check(name, patches)) if in_quickstart else find(faults, name)
        print(json.dumps(found), flush=True)


def said(lines: list[str]) -> dict[str, str]:
    """Returns the lines that a user reads about operation, place, device and code, by their names."""
    found = {line[:8].strip(): line[8:].strip() for line in reversed(lines)}
    return {name: found[name] for name in ("first", "where", "device", "code") if name in found}


def child(names: list[str], cores: int, in_quickstart: bool) -> Iterator[dict[str, Any]]:
    """Runs `work` in a process on some cores, and yields what it prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    env |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": str(ROOT)}
    env |= {"JAX_ENABLE_COMPILATION_CACHE": "false", "NPROC": "16"}  # as `platform.configure` sets it
    env |= {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    flags = ["--in_quickstart"]
    if not in_quickstart:  # its time does not count
        env["XLA_FLAGS"] += " --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
        flags = []
    limit = ["taskset", "-c", ",".join(map(str, sorted(os.sched_getaffinity(0))[:cores]))]
    words = [*limit, sys.executable, __file__, "--work", *flags, "--only", *names]
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        sys.exit(f"a fault was not found as the table says: {words}")


def timed(name: str, cores: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Finds a fault in the quickstart; returns what was found, the seconds of the process and the load before it."""
    load, begin, before = round(os.getloadavg()[0], 2), time.perf_counter(), os.times()
    (found,) = child([name], cores, in_quickstart=True)
    seconds, after = time.perf_counter() - begin, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return found, {"seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1), "load": load}


def measured() -> list[dict[str, Any]]:
    """Returns the cases of the result on disk."""
    path = record.RESULTS / "debug_faults.json"
    return json.loads(path.read_text())["cases"] if path.exists() else []


def rows(cases: list[dict[str, Any]]) -> str:
    """Returns the table of docs/debugging.md."""
    lines = [
        "| fault | devices | found | line | runs of the step | quickstart |",
        "|---|---|---|---|---|---|",
    ]
    for case in cases:
        layout = {name: value for name, value in {**case["mesh"], **case["how"]}.items() if value not in (1, "float32")}
        found = ", ".join(filter(None, [case["first"].replace(", in the ", ", "), case.get("where")]))
        line = re.sub(r" in \S+$", "", case["code"]).removeprefix("tests/debug/").removeprefix("jaxstack/")
        times = case.get("quickstart")
        shown = f"{times['cpu_seconds']:.0f} s" if times else ""
        devices = ", ".join(f"{name} {value}" for name, value in layout.items())
        lines.append(f"| {case['fault']} | {devices} | {found} | `{line}` | {case['runs']:.1f} | {shown} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="faults; by default all")
    parser.add_argument("--part", choices=("table", "quickstart"), help="only the search in small models, or its times")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--print", action="store_true", help="print the table of docs/debugging.md")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)  # how the benchmark calls itself
    parser.add_argument("--in_quickstart", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.only, options.in_quickstart)
    if options.print:
        return print(rows(measured()), end="")

    def write(case: dict[str, Any]) -> None:
        print(case, flush=True)
        cases = record.replace_cases("debug_faults", [case], ("fault",))
        record.record("debug_faults", {"cores": options.cores, "cases": cases})

    if options.part != "quickstart":
        for case in child(options.only, options.cores, in_quickstart=False):
            write(case)
    if options.part != "table":
        for case in measured():
            name = case["fault"]
            if case["family"] == "llama3" and name != NOT_IN_QUICKSTART and name in (options.only or [name]):
                again, times = timed(case["fault"], options.cores)
                assert again["code"] == case["code"], (again, case)
                write({**case, "quickstart": times})


if __name__ == "__main__":
    main()
