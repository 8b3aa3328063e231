"""Injects the faults of the tests on their meshes, also into the quickstart: `python benchmarks/debug_faults.py`

Each fault of `tests/debug/test_faults_on_meshes.py` is found by a process of its own, in the tests' small model on
simulated devices: layer, line, direction, stage and device must be those of the table there. `runs` is how often the
search runs the step, counted in layers: the runs of layers, forward and backward, divided by those of one step.

Faults of the Llama family are found in the model of `configs/quickstart.yaml` too, with its length and batch (one
pipeline has more layers), by a second process with nothing compiled before. `seconds` is the time of this process,
with Python's start, and `cpu_seconds` that of its cores: on a busy machine, it is what an idle one needs at most.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import record

ROOT = Path(__file__).parent.parent
FOLDERS = "", "tests", "tests/models", "tests/pipeline", "tests/debug"


def use_quickstart(faults: Any) -> None:
    """Replaces the tests' model of the Llama family by the quickstart's, with its length and batch."""
    from jaxstack.config import parse

    cfg = parse.parse_config([f"--config={ROOT / 'configs' / 'quickstart.yaml'}"])
    faults.meshes.MODELS["llama3"] = dataclasses.replace(cfg.model, vocab_size=256)  # of the byte tokenizer
    faults.meshes.SEQ, faults.ROWS = cfg.data.seq_len, cfg.data.batch_size


def count_layers() -> list[int]:
    """Lets the layers of the decoder count how often they run; returns where the count is, of all devices."""
    import jax

    from jaxstack.models import blocks, decoder, encoder_decoder

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
    real = blocks.block

    def block(cfg: Any, p: Any, x: jax.Array, *rest: Any, **how: Any) -> Any:
        return real(cfg, p, counted(x), *rest, **how)

    for module in (blocks, decoder, encoder_decoder):
        module.block = block  # type: ignore[attr-defined]
    return counts


def runs_of_step(faults: Any, fault: Any, counts: list[int]) -> float:
    """Returns how many runs of the step a search has taken, counted in layers."""
    import jax

    from jaxstack.training.gradients import make_gradients

    jax.effects_barrier()
    searched, counts[0] = counts[0], 0
    cfg, ctx, values, batch = faults.setting(fault)
    jax.block_until_ready(jax.jit(make_gradients(cfg, ctx))(values, batch, None))
    jax.effects_barrier()
    return searched / counts[0]


def find(name: str, in_quickstart: bool) -> dict[str, Any]:
    """Finds one fault in this process, which fails if anything differs from the table."""
    for folder in FOLDERS:
        sys.path.insert(0, str(ROOT / folder))
    import pytest
    import test_faults_on_meshes as faults

    fault = faults.FAULTS[name]
    with pytest.MonkeyPatch.context() as patches:
        if in_quickstart:
            use_quickstart(faults)
            return {"code": said(faults.check(name, patches))["code"]}
        counts = count_layers()
        lines = said(faults.check(name, patches))
        runs = round(runs_of_step(faults, fault, counts), 2)
    how = {n: fault.how[n] for n in ("schedule", "chunks", "loops", "remat", "accum") if n in fault.how}
    how |= {"dtype": fault.dtype} if fault.dtype != "float32" else {}
    return {"family": fault.family, "mesh": fault.mesh, "how": how, **lines, "runs": runs}


def said(lines: list[str]) -> dict[str, str]:
    """Returns the lines that a user reads about operation, place, device and code, by their names."""
    found = {line[:8].strip(): line[8:].strip() for line in reversed(lines)}
    return {name: found[name] for name in ("first", "where", "device", "code") if name in found}


def child(name: str, cores: int, in_quickstart: bool) -> tuple[dict[str, Any], dict[str, float]]:
    """Runs `find` in a process on some cores; returns its result, its seconds and those of its CPU time."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    env |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": str(ROOT)}
    env |= {"JAX_ENABLE_COMPILATION_CACHE": "false", "NPROC": "16"}  # as `platform.configure` sets it
    env |= {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    flags = ["--in_quickstart"]
    if not in_quickstart:  # time does not count
        env["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
        flags = []
    limit = ["taskset", "-c", ",".join(map(str, sorted(os.sched_getaffinity(0))[:cores]))]
    begin, before = time.perf_counter(), os.times()
    words = [*limit, sys.executable, __file__, f"--find={name}", *flags]
    done = subprocess.run(words, check=True, env=env, stdout=subprocess.PIPE, text=True)
    seconds, after = time.perf_counter() - begin, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return json.loads(done.stdout.splitlines()[-1]), {"seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1)}


def names_of_faults() -> list[str]:
    """Returns the names of the table's rows. This process does not start JAX."""
    words = "import test_faults_on_meshes as t, json; print(json.dumps([*t.FAULTS]))"
    env = os.environ | {"PYTHONPATH": ":".join(str(ROOT / folder) for folder in FOLDERS)}
    done = subprocess.run([sys.executable, "-c", words], check=True, stdout=subprocess.PIPE, text=True, env=env)
    return [*json.loads(done.stdout)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="*", help="faults; by default all")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder for the result instead of benchmarks/results")
    parser.add_argument("--find", help=argparse.SUPPRESS)  # how the benchmark calls itself
    parser.add_argument("--in_quickstart", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.find:
        with contextlib.redirect_stdout(io.StringIO()):
            found = find(options.find, options.in_quickstart)
        print(json.dumps(found))
        return
    for name in options.only or names_of_faults():
        case, _ = child(name, options.cores, in_quickstart=False)
        if case["family"] == "llama3":
            load = round(os.getloadavg()[0], 2)
            again, seconds = child(name, options.cores, in_quickstart=True)
            assert again["code"] == case["code"], (again, case)
            case["quickstart"] = {**seconds, "load": load}
        print({"fault": name, **case}, flush=True)
        cases = record.replace_cases("debug_faults", [{"fault": name, **case}], ("fault",), options.out)
        record.record("debug_faults", {"cores": options.cores, "cases": cases}, options.out)


if __name__ == "__main__":
    main()
