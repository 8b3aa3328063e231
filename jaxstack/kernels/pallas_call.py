"""Wrappers of `pl.pallas_call` for Triton and Mosaic: compiler parameters, interpret mode and the types of results."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton

from jaxstack.kernels.implementation import interpret_setting
from jaxstack.sharding import collectives

Out = tuple[tuple[int, ...], jax.typing.DTypeLike]
"""Shape and dtype of a result."""

Kernel = Callable[..., None]
"""A Pallas kernel: a function of the references of its inputs, results and scratch arrays."""


def gpu(
    kernel: Kernel, *args: jax.Array | None, out: Sequence[Out], warps: int = 4, stages: int = 2, **options: Any
) -> list[jax.Array]:
    """Runs a Triton kernel. Blocks must have powers of two as sizes; the kernel masks what is beyond its arrays.

    `options` are arguments of `pl.pallas_call`.
    """
    args = collectives.match_varying(*args)
    options.setdefault("interpret", bool(interpret_setting()))
    return pl.pallas_call(
        kernel,
        out_shape=[_result_type(o, args[0]) for o in out],
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        **options,
    )(*args)


def tpu(
    kernel: Kernel,
    *args: jax.Array | None,
    out: Sequence[Out],
    semantics: tuple[Literal["parallel", "arbitrary"], ...],
    vmem: int | None = None,
    **options: Any,
) -> list[jax.Array]:
    """Runs a Mosaic kernel.

    `semantics` has one entry for each axis of the grid: "arbitrary" where the order of its steps matters, else
    "parallel". `vmem` is the VMEM in bytes that the kernel needs; `None` means the compiler's limit of 16 MiB.
    `options` are arguments of `pl.pallas_call`.
    """
    args = collectives.match_varying(*args)
    options.setdefault("interpret", interpret_setting())
    return pl.pallas_call(
        kernel,
        out_shape=[_result_type(o, args[0]) for o in out],
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=vmem),
        **options,
    )(*args)


def _result_type(out: Out, like: Any) -> jax.ShapeDtypeStruct:
    """Adds the varying mesh axes of `like` to a shape and a dtype. `shard_map` cannot infer them for a kernel."""
    return jax.ShapeDtypeStruct(*out, manual_axis_type=jax.typeof(like).mat)
