"""Measures decoding beside the memory bandwidth of one GPU: `python benchmarks/decode_gpu.py [--models llama3_8b]`

Needs jax, flax, optax, numpy and pyyaml. Weights and prompts are random, in bfloat16; nothing is downloaded. The
programs are those of `jaxstack generate`: the new tokens are a loop on the device with a KV cache, at temperature 0.

The time of a token is the difference between long and short continuations over the number of tokens between them, so
the prompt and the start of a program do not count. A token needs the bytes of the matrices and norms, of one row of the
embedding for each sequence, and of the keys and values so far. The part of the bandwidth that it reaches is these bytes
over its time and over the bandwidth of the chip's data sheet. Copies of weights or of the cache, and empty slots of the
cache, are not needed, so they lower this part.

`results/decode_gpu_<device>_<model>.json` is written after each batch and round. A model takes about four minutes, most
of it to compile. `--small` is a smoke test for any device. `--aot h100` (extra `[cuda13]`) counts the bytes that the
compiled program of a token moves, without a GPU, and writes them to `results/decode_gpu_aot.json`.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import record

BAR = 0.7  # of the bandwidth, at batch 1
MODELS = {
    "dense_1b": {"num_layers": 24, "d_model": 2048, "num_heads": 16, "d_ff": 5632, "vocab_size": 32768},
    "llama3_8b": {
        "num_layers": 32, "d_model": 4096, "num_heads": 32, "num_kv_heads": 8, "d_ff": 14336, "vocab_size": 128256,
    },
}  # fmt: skip
SMALL = {"tiny": {"num_layers": 2, "d_model": 64, "num_heads": 4, "num_kv_heads": 2, "d_ff": 128, "vocab_size": 256}}


@dataclass(frozen=True)
class Length:
    """Tokens of the prompts, and of the short and the long continuation."""

    prompt: int = 512
    short: int = 64
    long: int = 320


@dataclass(frozen=True)
class Decoding:
    """The programs of a batch of prompts on one device. Each takes weights in the dtype of the computation.

    Attributes:
      cfg: the model.
      ctx: how it is computed.
      batch: number of prompts.
      length: of prompts and continuations.
    """

    cfg: Any
    ctx: Any
    batch: int
    length: Length

    def prepare(self, params: Any) -> Any:
        """Returns the weights cast, and their copies with `kernels.decode=unrolled`, else None."""
        model = self._model(params, None)
        return model.params, model.token_weights

    def start(self, weights: Any, tokens: Any) -> Any:
        """Reads prompts [B, S] and returns the state after the first new token."""
        import jax.numpy as jnp

        sampler = self._sampler(*weights)
        marks = jnp.zeros((self.batch, 2), jnp.uint32)
        rows = sampler.row(sampler.model.first, jnp.uint32(0), marks, self.length.long)
        return sampler.read(tokens, rows)[0]

    def extend(self, weights: Any, state: Any, count: Any) -> Any:
        """Returns the state with more tokens, and what was added."""
        return self._sampler(*weights).extend(state, count)

    def _model(self, params: Any, copies: Any) -> Any:
        import jax.numpy as jnp

        from jaxstack.generate.kv_cache import CachedDecoder

        return CachedDecoder.create(
            self.cfg, params, self.ctx, gate=None, vocabulary=self.cfg.vocab, first=jnp.zeros(self.batch, jnp.int32),
            num_slots=self.length.prompt + self.length.long, token_weights=copies,
        )  # fmt: skip

    def _sampler(self, params: Any, copies: Any) -> Any:
        from jaxstack.config import SampleConfig
        from jaxstack.generate.engine import RowSampler, Sampling

        sample = SampleConfig(tokens=self.length.long, temperature=0)
        return RowSampler(self._model(params, copies), Sampling.of_all(sample, ()))


def context(cfg: Any, dtype: str, kernels: dict[str, Any], device: Any) -> Any:
    """Returns how a model is computed on a device."""
    from jaxstack import sharding
    from jaxstack.config import Config, DataConfig, KernelsConfig, MeshConfig, TrainConfig
    from jaxstack.families.context import make_context

    run = Config(
        model=cfg,
        data=DataConfig(batch_size=1),
        train=TrainConfig(dtype=dtype),  # type: ignore[arg-type]
        mesh=MeshConfig(data=1),
        kernels=KernelsConfig(**kernels),  # type: ignore[arg-type]
    )
    return make_context(run, sharding.make_mesh(run.mesh, 1, [device])).whole_sequences()


def bytes_of_token(cfg: Any, batch: int, seen: float, size: int) -> dict[str, float]:
    """Returns the bytes that one new token of each sequence needs.

    Args:
      cfg: the model, without experts and windows.
      batch: number of sequences.
      seen: tokens of each sequence whose keys and values it reads.
      size: bytes of an element of matrices, keys and values. Norms are in float32.
    """
    from jaxstack.families import flops

    norms = (2 * cfg.num_layers + 1) * cfg.d_model * 4.0
    cache = 2.0 * cfg.num_layers * batch * cfg.kv_heads * cfg.head_width * size
    return {
        "parameters": flops.matmul_params(cfg) * size + norms + batch * cfg.d_model * size,
        "cache": cache * (seen + 1),  # with the keys and values that it writes
    }


def bytes_saved(weights: Any, size: int) -> float:
    """Returns the bytes that the codes of `kernels.decode_weights` have less than their matrices, with scales."""
    import jax

    from jaxstack.kernels.coded_weight import CodedWeight

    leaves = jax.tree.leaves(weights, is_leaf=lambda leaf: isinstance(leaf, CodedWeight))
    codes = [leaf for leaf in leaves if isinstance(leaf, CodedWeight)]
    held = sum(a.size * a.dtype.itemsize for leaf in codes for a in (leaf.codes, leaf.scales))
    return float(sum(leaf.inputs * math.prod(leaf.out) for leaf in codes) * size - held)


def measure(work: Decoding, weights: Any, tokens: Any, rounds: int) -> Iterator[list[float]]:
    """Yields the seconds of a new token in each round so far."""
    import jax
    import numpy as np

    start, extend = jax.jit(work.start), jax.jit(work.extend, donate_argnums=1)
    length, found = work.length, []

    def seconds(until: int) -> float:
        state = jax.block_until_ready(start(weights, tokens))
        begin = time.perf_counter()
        lengths = np.asarray(extend(weights, state, np.int32(until - 1))[1].lengths)  # waits for the result
        taken = time.perf_counter() - begin
        assert (lengths == until - 1).all()
        return taken

    seconds(length.short)  # compiles
    for _ in range(rounds):
        found.append((seconds(length.long) - seconds(length.short)) / (length.long - length.short))
        yield found


def run(name: str, sizes: dict[str, int], given: argparse.Namespace, device: Any) -> None:
    """Measures a model and writes its result as it grows."""
    import jax
    import jax.numpy as jnp

    from jaxstack import families
    from jaxstack.common.hardware import CHIPS, chip_name
    from jaxstack.config import ModelConfig
    from jaxstack.models import params

    cfg = ModelConfig(**sizes)  # type: ignore[arg-type]
    dtype = "float32" if device.platform == "cpu" else "bfloat16"
    ctx, spec = context(cfg, dtype, given.kernels, device), families.spec(cfg)
    weights = jax.jit(lambda: params.cast_matrices(spec, params.init(jax.random.key(0), spec), ctx.dtype))()
    length, chip = Length(64, 4, 12) if given.small else Length(), chip_name(device.device_kind)
    weights = jax.jit(Decoding(cfg, ctx, 1, length).prepare)(weights)
    result: dict[str, Any] = {
        "device": device.device_kind,
        "bandwidth": CHIPS[chip].hbm_bandwidth if chip else None,
        "model": sizes,
        "dtype": dtype,
        "kernels": ctx.ops.by_name,
        "length": asdict(length),
        "cases": [],
    }
    variant = [f"{key}-{value}" for key, value in given.kernels.items()]

    def write() -> None:
        if given.out or not given.small:
            record.record(record.name_of("decode_gpu", device.device_kind, name, *variant), result, given.out)

    for batch in given.batches:
        tokens = jax.random.randint(jax.random.key(1), (batch, length.prompt), 0, cfg.vocab)
        need = bytes_of_token(cfg, batch, length.prompt + (length.short + length.long) / 2, jnp.dtype(dtype).itemsize)
        need["parameters"] -= bytes_saved(weights, jnp.dtype(dtype).itemsize)
        row: dict[str, Any] = {"batch": batch, "bytes_of_token": need, "bar": BAR if batch == 1 else None}
        result["cases"].append(row)
        try:
            for seconds in measure(Decoding(cfg, ctx, batch, length), weights, tokens, given.rounds):
                rate = sum(need.values()) / median(seconds)
                row |= {
                    "tokens_per_s": round(batch / median(seconds), 1),
                    "ms_of_rounds": [round(1e3 * one, 4) for one in seconds],
                    "bytes_per_s": round(rate),
                    "of_bandwidth": round(rate / result["bandwidth"], 3) if chip else None,
                }
                write()
        except jax.errors.JaxRuntimeError as error:  # out of memory, for a large batch
            row["failed"] = str(error)[:300]
            write()
        print(f"{name}: {json.dumps(row)}", flush=True)


def ahead_of_time(target: str, given: argparse.Namespace) -> None:
    """Counts the bytes that the program of a token moves on a chip that this machine does not have."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    from jaxstack.config import ModelConfig
    from jaxstack.planner import aot

    measured = []
    for name in given.models:
        cfg = ModelConfig(**MODELS[name])  # type: ignore[arg-type]
        for batch in given.batches:
            ctx = context(cfg, "bfloat16", given.kernels, aot.devices(f"{target}:1x1x1")[0])
            scheme = ctx.ops.decode_weights
            weights, codes = ("bfloat16", None) if scheme is None else (str(scheme), ctx.ops.codes)
            row = {"model": name, "batch": batch, "target": target, "decode": ctx.ops.decode}
            row |= {"weights": weights, "codes": codes}
            measured.append(row | program_of_token(Decoding(cfg, ctx, batch, Length())))
            print(json.dumps(measured[-1]), flush=True)
            cases = record.replace_cases("decode_gpu_aot", measured, tuple(row), given.out)
            whole = {"note": "by the compiled programs; nothing ran", "cases": cases}
            record.record("decode_gpu_aot", whole, given.out)


def program_of_token(work: Decoding) -> dict[str, Any]:
    """Compiles the program that adds tokens for the device of its context, and returns the bytes of one token.

    `bytes_of_a_call` counts the bytes that the program moves before and after the loop over tokens.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from jaxstack import families
    from jaxstack.models import params
    from jaxstack.planner import step_bytes

    where, spec = work.ctx.layout.sharding(PartitionSpec()), families.spec(work.cfg)

    def shapes(f: Any, *args: Any) -> Any:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), jax.eval_shape(f, *args))

    stored = shapes(lambda: params.cast_matrices(spec, params.init(jax.random.key(0), spec), work.ctx.dtype))
    weights = shapes(work.prepare, stored)
    tokens = shapes(lambda: jnp.zeros((work.batch, work.length.prompt), jnp.int32))
    state, until = shapes(work.start, weights, tokens), shapes(lambda: jnp.int32(0))
    begin = time.perf_counter()
    compiled = jax.jit(work.extend, donate_argnums=1).lower(weights, state, until).compile()
    seconds = time.perf_counter() - begin
    text = str(compiled.as_text())
    once, twice = (step_bytes.read_program(text, {"extend": turns}) for turns in (1, 2))  # of the loop over tokens
    more = [
        o._replace(times=o.times - before.times) for before, o in zip(once.operations, twice.operations, strict=True)
    ]
    parts = step_bytes.by_part(twice._replace(operations=[o for o in more if o.times]))
    mean = work.length.prompt + (work.length.short + work.length.long) / 2
    size = jnp.dtype(work.ctx.dtype).itemsize
    need = sum(bytes_of_token(work.cfg, work.batch, mean, size).values()) - bytes_saved(weights, size)
    moved = {part: read + written for part, (read, written, _) in parts.items()}
    return {
        "compile_s": round(seconds, 1),
        "bytes_needed": round(need),
        "bytes_moved": round(sum(moved.values())),
        "bytes_by_part": {part: round(size) for part, size in moved.items()},
        "bytes_of_a_call": round(sum(o.bytes for o in once.operations) - sum(moved.values())),
        "kernels_a_token": sum(o.times for o in more),
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


def main(argv: Sequence[str] | None = None) -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS], help="default: all")
    arguments.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    arguments.add_argument("--kernels", nargs="*", default=[], metavar="OP=NAME", help="kernels.* of train.py")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--small", action="store_true", help="smoke test with a tiny model")
    arguments.add_argument("--aot", metavar="CHIP", help="h100 or h200: only compile, for a chip that is not here")
    arguments.add_argument("--out", type=Path, help="folder of the result (default: results/; --small: no file)")
    given = arguments.parse_args(argv)
    pairs = (word.split("=") for word in given.kernels)
    given.kernels = {key: int(value) if value.isdecimal() else value for key, value in pairs}
    if given.aot:
        ahead_of_time(given.aot, given)
        return
    device = record.accelerator(given.small)
    for name, sizes in (SMALL if given.small else {name: MODELS[name] for name in given.models}).items():
        run(name, sizes, given, device)


if __name__ == "__main__":
    main()
