"""The two ways to call a Pallas kernel, with what both need said: the compiler meant, interpretation, the types of what
comes out."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton

from jaxstack.kernels.implementation import interpret
from jaxstack.sharding import collectives

Out = tuple[tuple[int, ...], Any]
"""Shape and dtype."""


def gpu(
    kernel: Callable[..., None], *args: Any, out: Sequence[Out], warps: int = 4, stages: int = 2, **options: Any
) -> Any:
    """A kernel for Triton. All shapes in it are powers of two: what of a block lies beyond its array is masked."""
    args = collectives.match_varying(*args)
    return pl.pallas_call(
        kernel,
        out_shape=[_struct(o, args[0]) for o in out],
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=bool(interpret()),
        **options,
    )(*args)


def tpu(
    kernel: Callable[..., None],
    *args: Any,
    out: Sequence[Out],
    semantics: tuple[Any, ...],
    vmem: int | None = None,
    **options: Any,
) -> Any:
    """A kernel for Mosaic. `semantics`: of each axis of the grid, `parallel`, or `arbitrary` where order matters;
    `vmem`: bytes that it needs, where that is more than the compiler's 16 MiB."""
    args = collectives.match_varying(*args)
    return pl.pallas_call(
        kernel,
        out_shape=[_struct(o, args[0]) for o in out],
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=vmem),
        interpret=interpret(),
        **options,
    )(*args)


def _struct(out: Out, like: jax.Array) -> jax.ShapeDtypeStruct:
    """Without it, a result within `shard_map` has no type: a kernel may do anything with what differs by device."""
    return jax.ShapeDtypeStruct(*out, manual_axis_type=jax.typeof(like).mat)
