"""Pallas kernels for RMSNorm and LayerNorm in one pass over memory, on GPU (Triton) and TPU (Mosaic).

Suffixes: T rows, D width, R rows of a block, C columns of a block (D, or on GPU the next power of two).

The backward kernel recomputes mean and variance of the rows, so that they need not be saved. Each program sums the
gradients of gain and shift over its own rows, and XLA sums over the programs.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxstack.kernels import pallas_call


class Options(NamedTuple):
    """Compile-time options of the kernels.

    Attributes:
      platform: "gpu" or "tpu".
      eps: added to the variance.
      center: whether to subtract the mean, which makes the norm a LayerNorm.
    """

    platform: str
    eps: float
    center: bool


_MAX_PROGRAMS = 512  # of the backward kernel on GPU: enough for any GPU. Each one stores a row of the gain's gradient.


def normalize(o: Options, x, gain, shift):
    """Returns the norm of x [..., D]; gain and shift [D] in float32."""
    return _normalize(o, x.reshape(-1, x.shape[-1]), gain, shift).reshape(x.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalize(o, x, gain, shift):
    return _forward(o, x, gain, shift)[0]


def _forward(o, x, gain, shift):
    (y,) = _run(partial(_forward_body, o), o, [x, gain, shift], [(x.shape, x.dtype)], num_sums=0)
    return y, (x, gain)


def _backward(o, residuals, dy):
    x, gain = residuals
    # The backward kernel does not use its third array; the forward kernel has the shift there.
    dx, d_gain, d_shift = _run(partial(_backward_body, o), o, [x, gain, gain, dy], [(x.shape, x.dtype)], num_sums=2)
    return dx, d_gain.sum((0, 1)), d_shift.sum((0, 1))


def _standardize(o, x, columns, width):
    """Returns the rows divided by their deviation (minus their mean for LayerNorm), and 1 / deviation.

    Columns beyond the width are 0.
    """
    wide = x.astype(jnp.float32)
    if o.center:
        wide = jnp.where(columns, wide - wide.sum(-1, keepdims=True) / width, 0.0)
    inverse = lax.rsqrt((wide * wide).sum(-1, keepdims=True) / width + o.eps)
    return wide * inverse, inverse


def _forward_body(o, width, columns, x, gain, shift):
    normal, _ = _standardize(o, x, columns, width)
    return [normal * gain + shift]


def _backward_body(o, width, columns, x, gain, _, dy):
    normal, inverse = _standardize(o, x, columns, width)
    dy = dy.astype(jnp.float32)
    d_normal = dy * gain
    d = d_normal - normal * ((d_normal * normal).sum(-1, keepdims=True) / width)
    if o.center:
        d -= d_normal.sum(-1, keepdims=True) / width
    return [inverse * d, dy * normal, dy]


class _Static(NamedTuple):
    """The sizes that a kernel is compiled for.

    Attributes:
      rows, width: T and D.
      R, C: rows and columns of a block.
      blocks: blocks of rows that a program loops over.
      num_inputs, num_outs: number of input arrays, and of outputs with rows. The other outputs are sums over rows.
    """

    rows: int
    width: int
    R: int
    C: int
    blocks: int
    num_inputs: int
    num_outs: int

    @property
    def programs(self) -> int:
        return -(-self.rows // (self.R * self.blocks))


def _run(body, o, arrays, outs, num_sums):
    """Runs `body` over blocks of rows.

    `arrays` are rows [T, D], two vectors [D], and more rows. The results are rows as `outs` describes, and then
    `num_sums` arrays [programs, 1, D] with the sums over the rows of each program.
    """
    rows, width = arrays[0].shape
    n = len(outs)
    arrays = [a if a.ndim == 2 else a[None] for a in arrays]
    if rows == 0:
        return [jnp.zeros(*out) for out in outs] + [jnp.zeros((1, 1, width), jnp.float32)] * num_sums
    if o.platform == "gpu":
        C = pl.next_power_of_2(width)
        R = max(1, min(2048 // C, pl.next_power_of_2(rows)))
        blocks = max(1, -(-rows // (R * _MAX_PROGRAMS))) if num_sums else 1
    else:
        # A block is 512 KiB in float32: five of them with two buffers each, and intermediate values, fit in 16 MiB.
        C = width
        blocks = 1
        R = min(max(16, 2**17 // width // 16 * 16), 512)
        R = rows if rows <= R else R
    s = _Static(rows, width, R, C, blocks, len(arrays), n)
    by_rows = pl.BlockSpec((R * blocks, C), lambda i: (i, 0))
    vector = pl.BlockSpec((1, C), lambda i: (0, 0))
    in_specs = [by_rows, vector, vector, *[by_rows] * (len(arrays) - 3)]
    out_specs = [by_rows] * n + [pl.BlockSpec((1, 1, C), lambda i: (i, 0, 0))] * num_sums
    out = [*outs, *[((s.programs, 1, width), jnp.dtype(jnp.float32))] * num_sums]
    name = "norm_backward" if num_sums else "norm"
    kernel = partial(_kernel, body, o.platform == "gpu", s)
    grid = (s.programs,)
    if o.platform == "gpu":
        warps = min(max(R * C // 512, 1), 8)
        return pallas_call.gpu(
            kernel, *arrays, out=out, warps=warps, grid=grid, in_specs=in_specs, out_specs=out_specs, name=name
        )
    return pallas_call.tpu(
        kernel, *arrays, out=out, semantics=("parallel",), grid=grid, in_specs=in_specs, out_specs=out_specs, name=name
    )


def _kernel(body, is_gpu, s: _Static, *refs):
    """Loops over the row blocks of a program: loads them, applies `body`, stores rows and adds up the sums."""
    inputs = refs[: s.num_inputs]
    outs = refs[s.num_inputs :][: s.num_outs]
    sum_refs = refs[s.num_inputs + s.num_outs :]
    columns = lax.broadcasted_iota(jnp.int32, (1, s.C), 1) < s.width
    start = pl.program_id(0) * (s.blocks * s.R)

    def load(ref, mask):
        return triton.load(ref, mask=mask, other=0) if is_gpu else ref[...]

    def one_block(j, sums):
        inside = start + j * s.R + lax.broadcasted_iota(jnp.int32, (s.R, 1), 0) < s.rows
        block = pl.ds(j * s.R, s.R)
        values = []
        for k, ref in enumerate(inputs):
            if k in (1, 2):
                values.append(load(ref.at[:, :], columns))
            else:
                # Memory beyond the last row is undefined, and must not enter the sums.
                value = load(ref.at[block, :], inside & columns)
                values.append(jnp.where(inside & columns, value, jnp.zeros((), value.dtype)))
        results = body(s.width, columns, *values)
        for ref, value in zip(outs, results[: s.num_outs], strict=True):
            value = value.astype(ref.dtype)
            if is_gpu:
                triton.store(ref.at[block, :], value, mask=inside & columns)
            else:
                ref[...] = value
        return [total + value.sum(0, keepdims=True) for total, value in zip(sums, results[s.num_outs :], strict=True)]

    sums = [jnp.zeros((1, s.C), jnp.float32)] * len(sum_refs)
    sums = one_block(0, sums) if s.blocks == 1 else lax.fori_loop(0, s.blocks, one_block, sums)
    for ref, value in zip(sum_refs, sums, strict=True):
        if is_gpu:
            triton.store(ref.at[:, :, :], value[None], mask=columns[None])
        else:
            ref[...] = value[None]


_normalize.defvjp(_forward, _backward)
