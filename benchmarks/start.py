"""Measures how long a user waits before the first step: `python benchmarks/start.py [--rounds 5]`

Measures the import of the package, the help of every command, and how long a training step with 4 and with 48 layers
takes to compile on two simulated CPU devices. Depths alternate. Then it measures the seconds until the first step of
the quickstart, and those of `jaxstack generate` with 20 tokens, each with an empty cache of compiled programs and once
more. The medians and the ratio of the two depths go to `benchmarks/results/start.json`. Use an idle machine.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import record

ROOT = Path(__file__).parent.parent


def shown() -> dict[str, list[str]]:
    """Returns the commands that are timed by name: the import of the package, and the help of every command."""
    from jaxstack.cli.parser import COMMANDS

    jaxstack = [sys.executable, "-m", "jaxstack"]
    found = {"import jaxstack": [sys.executable, "-c", "import jaxstack"]}
    found["train.py --help"] = [sys.executable, str(ROOT / "train.py"), "--help"]
    found["jaxstack --help"] = [*jaxstack, "--help"]
    return found | {f"jaxstack {name} --help": [*jaxstack, *name.split(), "--help"] for name in COMMANDS}


def seconds(words: list[str]) -> float:
    """Runs a command and returns its seconds."""
    begin = time.perf_counter()
    subprocess.run(words, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def start_seconds() -> dict[str, float]:
    """Returns the seconds of a first and a second start: until the first step, and of generating 20 tokens."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
        env |= {"XDG_CACHE_HOME": folder, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        for start in ("first", "second"):
            run = Path(folder, start)
            flags = ["--train.steps=1", "--sample.prompts=[]", "--train.ngram_baseline=false", f"--run.dir={run}"]
            train = [sys.executable, str(ROOT / "train.py"), *flags]
            out = subprocess.run(train, check=True, cwd=folder, env=env, stdout=subprocess.PIPE, text=True).stdout
            (seconds,) = re.findall(r"first step done ([\d.]+) s", out)
            found[f"{start} start, quickstart, until the first step"] = float(seconds)
        for start in ("first", "second"):
            words = [sys.executable, "-m", "jaxstack", "generate", str(run), "import os", "--sample.tokens=20"]
            begin = time.perf_counter()
            subprocess.run(words, check=True, cwd=folder, env=env, stdout=subprocess.DEVNULL)
            found[f"{start} start, generate 20 tokens"] = time.perf_counter() - begin
    return found


def compile_seconds(num_layers: int) -> float:
    """Empties caches and returns the seconds to trace, lower and compile a step."""
    import jax
    import jax.numpy as jnp

    from jaxstack.config import Config, DataConfig, MeshConfig, ModelConfig
    from jaxstack.families.context import make_context
    from jaxstack.sharding import make_mesh
    from jaxstack.training import assemble
    from jaxstack.training.state import Recipe, abstract_state

    cfg = Config(
        model=ModelConfig(num_layers=num_layers, d_model=128, num_heads=4, vocab_size=256),
        data=DataConfig(seq_len=128, batch_size=8),
    )
    mesh = make_mesh(MeshConfig(2), 8, jax.devices()[:2])
    ctx = make_context(cfg, mesh)
    state = abstract_state(Recipe.of(cfg), ctx)
    placed = jax.NamedSharding(mesh, jax.P("data"))
    batch = {
        name: jax.ShapeDtypeStruct((8, 128), dtype, sharding=placed)
        for name, dtype in [("tokens", jnp.int32), ("targets", jnp.int32), ("loss_weights", jnp.float32)]
    }
    jax.clear_caches()
    begin = time.perf_counter()
    jax.jit(assemble.make_train_step(cfg, ctx), donate_argnums=0).lower(state, batch).compile()
    return time.perf_counter() - begin


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--rounds", type=int, default=5)
    rounds = arguments.parse_args().rounds
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    commands = shown()
    taken: dict[str, list[float]] = {name: [] for name in (*commands, "compile_4_layers", "compile_48_layers")}
    for _ in range(rounds):
        for name, words in commands.items():
            taken[name].append(seconds(words))
        for layers in (4, 48):
            taken[f"compile_{layers}_layers"].append(compile_seconds(layers))
        for name, value in start_seconds().items():
            taken.setdefault(name, []).append(value)
    medians = {name: round(median(values), 3) for name, values in taken.items()}
    ratio = round(medians["compile_48_layers"] / medians["compile_4_layers"], 3)
    print("\n".join(f"{value:8.3f} s  {name}" for name, value in medians.items()))
    print(f"48 layers take {ratio} times as long as 4")
    print(record.record("start", {"rounds": rounds, "seconds": medians, "compile_48_over_4": ratio}))


if __name__ == "__main__":
    main()
