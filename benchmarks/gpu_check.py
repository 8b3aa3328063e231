"""Compares every kernel and a whole step with XLA in float32 on this device: `python benchmarks/gpu_check.py`

Run it first on a device that has not run this code. It needs jax, flax, optax, numpy and pyyaml, and takes about five
minutes on a GPU. The cases are those of kernels.py: values and gradients of every implementation that can run, with
random arrays in bfloat16 (float32 on a CPU). The reference is the first implementation of the operation's table in
float32 with the highest precision of products. The steps are loss and gradients of a decoder and of a mixture of
experts, with the kernels that `auto` selects and with our own.

An error is the norm of the difference over the norm of the reference. XLA itself has an error in bfloat16, and twice
that error is allowed, or 1/256 if that is more (in float32: 1e-4). The results go to `results/gpu_check_<device>.json`
after each case, and the exit code is 1 if an error is larger. `--small` is a smoke test on any device.
"""

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernels as cases_of_kernels
import record

ALLOWED = 2.0  # times the error of XLA in the same dtype
FLOOR = {"bfloat16": 2.0**-8, "float32": 1e-4}


def error(found: Any, expected: Any) -> float:
    """Returns the largest relative error among the arrays of two equal trees; NaN counts as infinite."""
    import jax
    import jax.numpy as jnp

    def one(a: Any, b: Any) -> Any:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.linalg.norm((a - b).ravel()) / jnp.maximum(jnp.linalg.norm(b.ravel()), 1e-30)

    errors = [float(jax.jit(one)(a, b)) for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True)]
    return max(value if value == value else float("inf") for value in errors)


def with_gradients(f: Callable[..., Any], differentiated: int) -> Callable[..., Any]:
    """Returns `f` with its gradients from random incoming ones. Those of the value itself nearly cancel in a norm."""
    import jax

    def run(*args: Any) -> Any:
        held = args[differentiated:]
        y, back = jax.vjp(lambda *given: f(*given, *held), *args[:differentiated])
        return y, back(jax.random.normal(jax.random.key(1), y.shape).astype(y.dtype))

    return run


def compare(ways: dict[str, Callable[..., Any]], args: Any, expected: Any, plain: str, dtype: str) -> dict[str, Any]:
    """Returns the error of each function, and whether it is allowed.

    Args:
      ways: functions of the arguments, by name.
      args: arrays in the dtype of the comparison.
      expected: the results in float32.
      plain: the name of XLA's function, whose error is the measure.
      dtype: of the arguments.
    """
    import jax

    rows: dict[str, Any] = {}
    limit = FLOOR[dtype]
    for name in sorted(ways, key=lambda name: name != plain):
        try:
            found = error(jax.jit(ways[name])(*args), expected)
        except Exception as problem:  # from any compiler; the others are still compared
            rows[name] = {"failed": f"{type(problem).__name__}: {str(problem)[:300]}", "ok": False}
        else:
            limit = max(limit, ALLOWED * found) if name == plain else limit
            rows[name] = {"error": found, "allowed": limit, "ok": found <= limit}
        print(f"  {name:<14} {rows[name]}", flush=True)
    return rows


def kernel_rows(small: bool, platform: str, dtype: str) -> Any:
    """Yields the name of each case of kernels.py, and the errors of its implementations."""
    import jax
    import jax.numpy as jnp

    from jaxstack.kernels import implementation as choice
    from jaxstack.models.context import OPS

    for case in cases_of_kernels.cases(small, platform, dtype):
        ways, plain = {}, next(iter(OPS[case.op]))
        for name in OPS[case.op]:
            if name == "reference":
                continue
            try:
                choice.select_implementation(case.op, OPS[case.op], name, platform, case.choice)
            except ValueError:
                continue
            ways[name] = with_gradients(case.call(name), case.differentiated)
        print(f"{case.op}: {case.name}", flush=True)
        args = case.args()
        wide = jax.tree.map(lambda a: a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a, args)
        with jax.default_matmul_precision("highest"):
            expected = jax.jit(ways[plain])(*wide)
        yield f"{case.op}: {case.name}", compare(ways, args, expected, plain, dtype)


def step_rows(small: bool, dtype: str) -> Any:
    """Yields the name of each step, and the errors of its loss and gradients by choice of the kernels."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxstack import sharding
    from jaxstack.config import (
        Config,
        ConfigError,
        DataConfig,
        KernelsConfig,
        MeshConfig,
        ModelConfig,
        MoEConfig,
        TrainConfig,
    )
    from jaxstack.models import family, params
    from jaxstack.models.context import Context
    from jaxstack.training.gradients import make_gradients

    sizes = {"num_layers": 2, "d_model": 64, "num_heads": 2, "d_ff": 128, "vocab_size": 256}
    if not small:
        sizes = {"num_layers": 4, "d_model": 1024, "num_heads": 8, "d_ff": 2816, "vocab_size": 32768}
    rows, length = (2, 64) if small else (4, 2048)
    plain = KernelsConfig(attention="xla", norm="xla", linear="xla", gelu="xla", cross_entropy="xla", moe="ragged",
                          layers="scan", update="branch", decode="scan")  # fmt: skip
    ours = replace(plain, attention="pallas", norm="pallas", cross_entropy="pallas", moe="pallas")
    mesh = sharding.make_mesh(MeshConfig(data=1), rows, jax.devices()[:1])
    for name, experts in (("dense", MoEConfig()), ("experts", MoEConfig(num_experts=8, top_k=2))):
        model = ModelConfig(**sizes, moe=experts)  # type: ignore[arg-type]
        cfg = Config(
            model=model,
            data=DataConfig(seq_len=length, batch_size=rows),
            train=TrainConfig(dtype=dtype, remat="selective"),  # type: ignore[arg-type]
            mesh=MeshConfig(data=1),
        )
        ids = np.random.default_rng(0).integers(0, model.vocab, (rows, length + 1)).astype(np.int32)
        batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_weights": np.ones((rows, length), np.float32)}
        values = params.init(jax.random.key(0), family.spec(model))
        ways: dict[str, Callable[..., Any]] = {}
        for how, kernels in {"xla": plain, "auto": KernelsConfig(), "pallas": ours}.items():
            try:
                ctx = Context.create(replace(cfg, kernels=kernels), mesh)
            except ConfigError as problem:  # no kernel of ours runs on this platform
                print(f"  {how}: {problem}")
                continue
            ways[how] = lambda values, ctx=ctx: make_gradients(cfg, ctx)(values, batch)[:2]
        wide = replace(Context.create(replace(cfg, kernels=plain), mesh), dtype=jnp.dtype("float32"))
        print(f"step: {name}", flush=True)
        with jax.default_matmul_precision("highest"):
            expected = jax.jit(lambda values, ctx=wide: make_gradients(cfg, ctx)(values, batch)[:2])(values)
        yield f"step: {name}", compare(ways, (values,), expected, "xla", dtype)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--small", action="store_true", help="smoke test with tiny shapes")
    arguments.add_argument("--out", type=Path, help="folder of the result (default: results/; --small: no file)")
    given = arguments.parse_args()

    import jax

    from jaxstack.kernels.implementation import platform_of

    device = jax.devices()[0]
    platform = platform_of(device)
    dtype = "float32" if platform == "cpu" else "bfloat16"
    cases: dict[str, Any] = {}
    own = device.device_kind.lower().replace(" ", "_").removeprefix("nvidia_")
    for name, rows in itertools.chain(kernel_rows(given.small, platform, dtype), step_rows(given.small, dtype)):
        cases[name] = rows
        if given.out or not given.small:
            record.record(f"gpu_check_{own}", {"device": device.device_kind, "dtype": dtype, "cases": cases}, given.out)
    wrong = [f"{case}, {name}" for case, rows in cases.items() for name, row in rows.items() if not row["ok"]]
    print(f"{sum(map(len, cases.values()))} comparisons, {len(wrong)} with a larger error than allowed")
    sys.exit("\n".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
