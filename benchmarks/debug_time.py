"""Measures how long `jaxstack debug` takes for the quickstart: `python benchmarks/debug_time.py [--steps 3]`

The MLP of a copy of the quickstart divides by zero, so that no step is finite. The run takes a few steps, and
`jaxstack debug` explains the first one, and the last one, before which it repeats the others. Nothing that is compiled
is kept. The seconds of each command and those of its CPU time go to `benchmarks/results/debug_time.json`, with the load
of the machine at the start and at the end: on a busy machine, the CPU time is what an idle one needs at most.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import record

ROOT = Path(__file__).parent.parent
COMMAND = """
import sys
from jaxstack.runtime import platform
configure = platform.configure
def patched(*arguments):
    configure(*arguments)  # sets what JAX reads when it is imported
    import jax.numpy as jnp
    from jaxstack.models import layers
    products = layers.mlp_products
    def broken(cfg, params, x, ctx):
        y, watched = products(cfg, params, x, ctx)
        return y / jnp.zeros(()), watched
    layers.mlp_products = broken
platform.configure = patched
from jaxstack.cli import parser
parser.run("jaxstack", sys.argv[1:])
"""


def command(words: list[str], cores: int) -> tuple[dict[str, float], str]:
    """Runs a command with the broken MLP; returns its seconds and what it printed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    env |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false", "PYTHONPATH": str(ROOT)}
    limit = ["taskset", "-c", ",".join(map(str, sorted(os.sched_getaffinity(0))[:cores]))]
    begin, before = time.perf_counter(), os.times()
    done = subprocess.run(
        [*limit, sys.executable, "-c", COMMAND, *words], check=True, env=env, stdout=subprocess.PIPE, text=True
    )
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": round(time.perf_counter() - begin, 1), "cpu_seconds": round(cpu, 1)}, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder for the result instead of benchmarks/results")
    options = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    load = [round(os.getloadavg()[0], 2)]
    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/run"
        flags = [f"--train.steps={options.steps}", "--sample.prompts=[]", "--train.ngram_baseline=false"]
        flags += ["--train.eval_steps=1", "--optim.warmup_steps=1", f"--run.dir={run}"]
        train = ["train", f"--config={ROOT / 'configs' / 'quickstart.yaml'}", *flags]
        found["train"], _ = command(train, options.cores)
        for step in sorted({1, options.steps}):
            seconds, text = command(["debug", run, f"--step={step}"], options.cores)
            assert "first    div, for the loss, in the forward pass" in text, text
            found[f"debug step {step}"] = seconds
            print(text)
    load.append(round(os.getloadavg()[0], 2))
    result = {"cores": options.cores, "load": load, "commands": found}
    print(result)
    record.record("debug_time", result, options.out)


if __name__ == "__main__":
    main()
