"""Measures how long a user waits before the first step: `python benchmarks/start.py [--rounds 5]`

Measures the import of the package, the help of every command, and how long a training step with 4 and with 48 layers
takes to compile on two simulated CPU devices. Depths alternate. The medians and the ratio of the two depths go to
`benchmarks/results/start.json`. Use an idle machine.
"""

import argparse
import os
import subprocess
import sys
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


def compile_seconds(num_layers: int) -> float:
    """Empties caches and returns the seconds to trace, lower and compile a step."""
    import jax
    import jax.numpy as jnp

    from jaxstack.config import Config, DataConfig, MeshConfig, ModelConfig
    from jaxstack.models.context import Context
    from jaxstack.sharding import make_mesh
    from jaxstack.training import step
    from jaxstack.training.state import abstract_state

    cfg = Config(
        model=ModelConfig(num_layers=num_layers, d_model=128, num_heads=4, vocab_size=256),
        data=DataConfig(seq_len=128, batch_size=8),
    )
    mesh = make_mesh(MeshConfig(2), 8, jax.devices()[:2])
    ctx = Context.create(cfg, mesh)
    state = abstract_state(cfg, ctx)
    placed = jax.NamedSharding(mesh, jax.P("data"))
    batch = {
        name: jax.ShapeDtypeStruct((8, 128), dtype, sharding=placed)
        for name, dtype in [("tokens", jnp.int32), ("targets", jnp.int32), ("loss_weights", jnp.float32)]
    }
    jax.clear_caches()
    begin = time.perf_counter()
    jax.jit(step.make_train_step(cfg, ctx), donate_argnums=0).lower(state, batch).compile()
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
    medians = {name: round(median(values), 3) for name, values in taken.items()}
    ratio = round(medians["compile_48_layers"] / medians["compile_4_layers"], 3)
    print("\n".join(f"{value:8.3f} s  {name}" for name, value in medians.items()))
    print(f"48 layers take {ratio} times as long as 4")
    print(record.record("start", {"rounds": rounds, "seconds": medians, "compile_48_over_4": ratio}))


if __name__ == "__main__":
    main()
