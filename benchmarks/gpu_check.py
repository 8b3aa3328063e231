"""Compares every kernel and a whole step with XLA in float32 on this device: `python benchmarks/gpu_check.py`

Run it first on a device that has not run this code. It needs jax, flax, optax, numpy and pyyaml, and takes about five
minutes on a GPU. The cases are those of kernels.py: values and gradients of every implementation that can run, with
random arrays in bfloat16 (float32 on a CPU). The reference is XLA's plain implementation in float32 with the highest
precision of products. The steps are loss and gradients of a decoder and of a mixture of experts, with the kernels that
`auto` selects and with our own.

An error is the norm of the difference over the norm of the reference. XLA itself has an error in bfloat16, and twice
that error is allowed for each array, or 1/256 if that is more (in float32: 1e-4). `results/gpu_check_<device>.json` is
written after each case, and the exit code is 1 if an error is larger or something fails. A kernel that writes beyond
its arrays may end the process; `--ops` then checks the other operations. `--small` is a smoke test on any device.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernels as cases_of_kernels
import record

ALLOWED = 2.0  # times the error of XLA in the same dtype
FLOOR = {"bfloat16": 2.0**-8, "float32": 1e-4}


def compare(ways: dict[str, Callable[..., Any]], args: Any, expected: Any, plain: str, dtype: str) -> dict[str, Any]:
    """Returns the errors of each function, and whether they are allowed.

    Args:
      ways: functions of the arguments, by name.
      args: arrays in the dtype of the comparison.
      expected: the results in float32.
      plain: the name of XLA's function, whose errors are the measure.
      dtype: of the arguments.
    """
    import jax

    rows: dict[str, Any] = {}
    limits = [FLOOR[dtype]] * len(jax.tree.leaves(expected))
    for name in sorted(ways, key=lambda name: name != plain):
        try:
            found = cases_of_kernels.errors(jax.jit(ways[name])(*args), expected)
        except Exception as problem:  # from any compiler; the others are still compared
            rows[name] = {"failed": f"{type(problem).__name__}: {str(problem)[:300]}", "ok": False}
            print(f"  {name:<14} {rows[name]['failed']}", flush=True)
            continue
        if name == plain:
            limits = [max(FLOOR[dtype], ALLOWED * error) for error in found]
        of_limit, error, limit = max((e / limit, e, limit) for e, limit in zip(found, limits, strict=True))
        rows[name] = {"errors": found, "allowed": limits, "ok": of_limit <= 1}
        print(f"  {name:<14} {'ok   ' if of_limit <= 1 else 'WRONG'} {error:.1e} of {limit:.1e} allowed", flush=True)
    return rows


def kernel_rows(small: bool, platform: str, dtype: str, ops: Sequence[str]) -> Any:
    """Yields the name of each case of kernels.py, and the errors of its implementations."""
    from jaxstack.kernels import implementation as choice
    from jaxstack.models.ops import OPS

    for case in cases_of_kernels.cases(small, platform, dtype):
        if case.op not in ops:
            continue
        ways, plain = {}, next(iter(OPS[case.op]))
        for name in OPS[case.op]:
            if name == "reference":
                continue
            try:
                choice.select_implementation(case.op, OPS[case.op], name, platform, case.choice)
            except ValueError:
                continue
            ways[name] = cases_of_kernels.both(case.call(name), case.differentiated)
        print(f"{case.op}: {case.name}", flush=True)
        args = case.args()
        dy = cases_of_kernels.incoming(case.call(plain), args)
        yield f"{case.op}: {case.name}", expected_and_compared(
            lambda case=case, args=args: cases_of_kernels.in_float32(case, OPS[case.op], args),
            ways, (dy, *args), plain, dtype,
        )  # fmt: skip


def expected_and_compared(
    reference: Callable[[], Any], ways: dict[str, Callable[..., Any]], args: Any, plain: str, dtype: str
) -> dict[str, Any]:
    """Returns the errors of each function, or why their reference fails."""
    try:
        expected = reference()
    except Exception as problem:  # from any compiler, or out of memory; the other cases are still compared
        why = f"{type(problem).__name__}: {str(problem)[:300]}"
        print(f"  the reference fails: {why}", flush=True)
        return {"the reference": {"failed": why, "ok": False}}
    return compare(ways, args, expected, plain, dtype)


def step_rows(small: bool, dtype: str) -> Any:
    """Yields the name of each step, and the errors of its loss and gradients by choice of the kernels."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxstack import families, sharding
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
    from jaxstack.families.context import make_context
    from jaxstack.models import params
    from jaxstack.models.context import Context
    from jaxstack.training.assemble import make_gradients

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
        values = params.init(jax.random.key(0), families.spec(model))
        ways: dict[str, Callable[..., Any]] = {}
        for how, kernels in {"xla": plain, "auto": KernelsConfig(), "pallas": ours}.items():
            try:
                ctx = make_context(replace(cfg, kernels=kernels), mesh)
            except ConfigError as problem:  # no kernel of ours runs on this platform
                print(f"  {how}: {problem}")
                continue
            ways[how] = lambda values, ctx=ctx: make_gradients(cfg, ctx)(values, batch)[:2]
        wide = replace(make_context(replace(cfg, kernels=plain), mesh), dtype=jnp.dtype("float32"))
        print(f"step: {name}", flush=True)

        def reference(cfg: Config = cfg, ctx: Context = wide, values: Any = values, batch: Any = batch) -> Any:
            with jax.default_matmul_precision("highest"):
                return jax.jit(lambda values: make_gradients(cfg, ctx)(values, batch)[:2])(values)

        yield f"step: {name}", expected_and_compared(reference, ways, (values,), "xla", dtype)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--ops", nargs="+", help="operations of kernels.py, and `step` (default: all)")
    arguments.add_argument("--small", action="store_true", help="smoke test with tiny shapes")
    arguments.add_argument("--out", type=Path, help="folder of the result (default: results/; --small: no file)")
    given = arguments.parse_args(argv)
    device = record.accelerator(given.small)

    from jaxstack.kernels.implementation import platform_of
    from jaxstack.models.ops import OPS

    platform, ops = platform_of(device), given.ops or [*OPS, "step"]
    dtype = "float32" if platform == "cpu" else "bfloat16"
    cases: dict[str, Any] = {}
    steps = step_rows(given.small, dtype) if "step" in ops else ()
    for name, rows in itertools.chain(kernel_rows(given.small, platform, dtype, ops), steps):
        cases[name] = rows
        if given.out or not given.small:
            result = {"device": device.device_kind, "dtype": dtype, "wrong": wrong(cases), "cases": cases}
            record.record(record.name_of("gpu_check", device.device_kind, *(given.ops or ())), result, given.out)
    if not cases:
        sys.exit(f"--ops={' '.join(ops)} has no cases. Use some of {', '.join([*OPS, 'step'])}.")
    print(f"{sum(map(len, cases.values()))} comparisons, {len(wrong(cases))} failed or with too large an error")
    if wrong(cases):
        sys.exit("\n".join(wrong(cases)))


def wrong(cases: dict[str, Any]) -> list[str]:
    """Returns the names of the comparisons that failed or have too large an error."""
    return [f"{case}, {name}" for case, rows in cases.items() for name, row in rows.items() if not row["ok"]]


if __name__ == "__main__":
    main()
