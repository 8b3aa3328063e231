"""Measures the host memory to import and export Hugging Face weights: `python benchmarks/hf_memory.py [--layers 16]`

Needs the extra `[hf]`. Writes a Llama with random bfloat16 weights to a temporary folder. One process imports it,
another exports it. Then it is saved as a checkpoint and read again. The result is the peak of resident memory beyond
the arrays themselves, which a CPU stores in host memory. It is given as a multiple of the largest tensor in float32,
and of our largest array, which stacks all layers, as in a checkpoint. `--layers` sets the size of the model. Writes
results/hf_memory.json.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from math import prod
from pathlib import Path
from typing import Any

import psutil

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parent.parent))

from record import record

SHAPES = {"d_model": 2048, "num_heads": 16, "num_kv_heads": 4, "d_ff": 8192, "vocab_size": 64000}


def config(layers: int) -> Any:
    """Returns the configuration of a Llama with `layers` layers."""
    from jaxstack.config import ModelConfig

    return ModelConfig(num_layers=layers, **SHAPES, max_positions=4096)


def make(folder: Path, layers: int) -> int:
    """Writes a model with random weights and returns the bytes of its files."""
    import ml_dtypes
    import numpy as np

    from jaxstack import families
    from jaxstack.hf import configs, safetensors, weights

    cfg, rng = config(layers), np.random.default_rng(0)
    tensors = weights.hf_tensors("llama", families.spec(cfg))

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        return (0.02 * rng.standard_normal(shape, np.float32)).astype(ml_dtypes.bfloat16)

    sizes = {name: 2 * int(np.prod(tensor.shape)) for name, tensor in tensors.items()}
    safetensors.write_tensors(folder, sizes, ((name, draw(tensor.shape)) for name, tensor in tensors.items()))
    (folder / "config.json").write_text(json.dumps(configs.to_json("llama", cfg, 4096, None)))
    return sum(sizes.values())


def work(what: str, folder: Path, devices: int) -> None:
    """Reads the model in its own process, writes it if asked to, and prints the peak of memory beyond its arrays."""
    import jax

    from jaxstack import families, hf, sharding
    from jaxstack.checkpoint import store
    from jaxstack.config import CheckpointConfig, Config, DataConfig, MeshConfig
    from jaxstack.families.context import make_context
    from jaxstack.hf import weights
    from jaxstack.models import params

    with hf.PretrainedFolder(folder / "model") as source:
        mesh = MeshConfig(data=1, fsdp=devices)
        cfg = Config(model=source.model, mesh=mesh, data=DataConfig(batch_size=devices))
        ctx = make_context(cfg, sharding.make_mesh(mesh, devices))
        jax.block_until_ready(jax.device_put(0.0))
        before, begin = psutil.Process().memory_info().rss, time.perf_counter()
        if what == "restore":
            spec = families.spec(cfg.model)
            tree = jax.tree.map(
                lambda a, where: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=ctx.layout.sharding(where)),
                params.abstract(spec),
                ctx.layout.parameters(spec),
            )
            values = store.restore(folder, 1, {"params": tree})
        else:
            values = jax.block_until_ready(source.read_params(ctx))
        if what == "save":
            with store.Checkpoints(CheckpointConfig(), folder) as saving:
                saving.save(1, {"params": values}, {})
        if what == "write":
            begin = time.perf_counter()
            (folder / "out").mkdir()
            hf.save_pretrained(folder / "out", source.model, values, "float32", 4096)
        seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sizes = [x.nbytes for x in jax.tree.leaves(values)]
    arrays = sum(sizes)
    tensors = weights.hf_tensors(source.family, families.spec(source.model)).values()
    largest = 4 * max(prod(tensor.shape) for tensor in tensors)
    row = {
        "what": what,
        "devices": devices,
        "arrays_bytes": arrays,
        "largest_tensor_bytes": largest,
        "peak_beyond_arrays_bytes": peak - before - arrays,
        "over_largest_tensor": round((peak - before - arrays) / largest, 2),
        "over_largest_array": round((peak - before - arrays) / max(sizes), 2),
        "seconds": round(seconds, 1),
    }
    print(json.dumps(row))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--layers", type=int, default=16)
    arguments.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.worker:
        what, folder, devices = given.worker
        return work(what, Path(folder), int(devices))
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "model").mkdir()
        size = make(Path(directory) / "model", given.layers)
        for what, devices in (("read", 1), ("read", 8), ("write", 1), ("save", 1), ("restore", 1)):
            words = [sys.executable, __file__, "--worker", what, directory, str(devices)]
            environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)}
            out = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
            rows.append(json.loads(out))
            print(out, end="", flush=True)
    print(record("hf_memory", {"layers": given.layers, "model": SHAPES, "files_bytes": size, "cases": rows}))


if __name__ == "__main__":
    main()
