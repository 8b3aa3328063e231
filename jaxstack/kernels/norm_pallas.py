"""RMSNorm and LayerNorm of whole rows in one pass over memory, for GPU (Triton) and TPU (Mosaic).

Suffixes: T rows, D width, R rows of a block, C columns of a block (D or, on GPU, the next power of two).

The sum with a residual is made on the way in. The backward pass reads the rows again and makes their mean and variance
anew rather than saving them; each program adds up the gradients of gain and shift over its own rows, and XLA adds
these.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxstack.kernels import pallas_call


class Options(NamedTuple):
    platform: str
    eps: float
    centre: bool  # LayerNorm, whose mean is taken off


_PROGRAMS = 512  # of the backward pass on GPU: enough for any, and each leaves a row of the gain's gradient


def normalise(o: Options, x, residual, gain, shift):
    """y, and x + residual where there is one (else None): of x and residual [..., D], gain and shift [D] float32."""
    shape, width = x.shape, x.shape[-1]
    flat = x.reshape(-1, width)
    y, total = _normalise(o, flat, None if residual is None else residual.reshape(flat.shape), gain, shift)
    return y.reshape(shape), None if total is None else total.reshape(shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalise(o, x, residual, gain, shift):
    return _forward(o, x, residual, gain, shift)[0]


def _forward(o, x, residual, gain, shift):
    arrays = [x, gain, shift] if residual is None else [x, gain, shift, residual]
    outs = [(x.shape, x.dtype)] * (1 if residual is None else 2)
    results = _rows(partial(_forward_body, o), o, arrays, outs, partials=0)
    y, total = results if residual is not None else (results[0], None)
    return (y, total), (x if total is None else total, gain, residual is not None)


def _backward(o, residuals, cotangents):
    total, gain, summed = residuals
    dy, d_total = cotangents
    arrays = [total, gain, gain, dy, d_total] if summed else [total, gain, gain, dy]
    dx, d_gain, d_shift = _rows(partial(_backward_body, o), o, arrays, [(total.shape, total.dtype)], partials=2)
    return dx, dx if summed else None, d_gain.sum((0, 1)), d_shift.sum((0, 1))


def _normal(o, x, columns, width):
    """The rows without mean, divided by their deviation; and 1 / deviation. Columns beyond the width are 0."""
    wide = x.astype(jnp.float32)
    if o.centre:
        wide = jnp.where(columns, wide - wide.sum(-1, keepdims=True) / width, 0.0)
    inverse = lax.rsqrt((wide * wide).sum(-1, keepdims=True) / width + o.eps)
    return wide * inverse, inverse


def _forward_body(o, width, columns, x, gain, shift, residual=None):
    if residual is not None:
        x = (x.astype(jnp.float32) + residual.astype(jnp.float32)).astype(x.dtype)
    normal, _ = _normal(o, x, columns, width)
    y = normal * gain + shift
    return [y] if residual is None else [y, x]


def _backward_body(o, width, columns, x, gain, _, dy, d_total=None):
    normal, inverse = _normal(o, x, columns, width)
    dy = dy.astype(jnp.float32)
    d_normal = dy * gain
    d = d_normal - normal * ((d_normal * normal).sum(-1, keepdims=True) / width)
    if o.centre:
        d -= d_normal.sum(-1, keepdims=True) / width
    dx = inverse * d
    if d_total is not None:
        dx += d_total.astype(jnp.float32)
    return [dx, dy * normal, dy]


def _rows(body, o, arrays, outs, partials):
    """Runs `body` over blocks of rows. `arrays`: rows [T, D], two of [D], and more rows. It gives rows for `outs`, and
    `partials` more that are summed over the rows of a program: [programs, 1, D]."""
    (rows, width), n = arrays[0].shape, len(outs)
    arrays = [a if a.ndim == 2 else a[None] for a in arrays]
    if rows == 0:
        return [jnp.zeros(*out) for out in outs] + [jnp.zeros((1, 1, width), jnp.float32)] * partials
    if o.platform == "gpu":
        C = pl.next_power_of_2(width)
        R = max(1, min(2048 // C, pl.next_power_of_2(rows)))
        turns = max(1, -(-rows // (R * _PROGRAMS))) if partials else 1
    else:
        # Blocks of 512 KiB in float32: with two buffers each, five of them and what lies between fit in 16 MiB.
        C, turns = width, 1
        R = min(max(16, 2**17 // width // 16 * 16), 512)
        R = rows if rows <= R else R
    programs = -(-rows // (R * turns))

    def kernel(*refs):
        ins, results = refs[: len(arrays)], refs[len(arrays) :]
        columns = lax.broadcasted_iota(jnp.int32, (1, C), 1) < width
        read = partial(triton.load, other=0) if o.platform == "gpu" else lambda ref, mask: ref[...]
        start = pl.program_id(0) * (turns * R)

        def turn(j, sums):
            inside = start + j * R + lax.broadcasted_iota(jnp.int32, (R, 1), 0) < rows
            block = pl.ds(j * R, R)
            values = []
            for k, ref in enumerate(ins):
                if k in (1, 2):
                    values.append(read(ref.at[:, :], mask=columns))
                else:
                    # Rows beyond the last are anything in memory, and would reach the sums.
                    whole = read(ref.at[block, :], mask=inside & columns)
                    values.append(jnp.where(inside & columns, whole, jnp.zeros((), whole.dtype)))
            made = body(width, columns, *values)
            for ref, value in zip(results, made[:n], strict=False):
                value = value.astype(ref.dtype)
                if o.platform == "gpu":
                    triton.store(ref.at[block, :], value, mask=inside & columns)
                else:
                    ref[...] = value
            return [s + value.sum(0, keepdims=True) for s, value in zip(sums, made[n:], strict=True)]

        sums = [jnp.zeros((1, C), jnp.float32)] * partials
        sums = turn(0, sums) if turns == 1 else lax.fori_loop(0, turns, turn, sums)
        for ref, value in zip(results[n:], sums, strict=True):
            if o.platform == "gpu":
                triton.store(ref.at[:, :, :], value[None], mask=columns[None])
            else:
                ref[...] = value[None]

    across = pl.BlockSpec((R * turns, C), lambda i: (i, 0))
    vector = pl.BlockSpec((1, C), lambda i: (0, 0))
    partial_sum = pl.BlockSpec((1, 1, C), lambda i: (i, 0, 0))
    options: dict[str, Any] = {
        "grid": (programs,),
        "in_specs": [across, vector, vector, *[across] * (len(arrays) - 3)],
        "out_specs": [across] * n + [partial_sum] * partials,
        "out": [*outs, *[((programs, 1, width), jnp.float32)] * partials],
        "name": "norm_backward" if partials else "norm",
    }
    if o.platform == "gpu":
        return pallas_call.gpu(kernel, *arrays, warps=min(max(R * C // 512, 1), 8), **options)
    return pallas_call.tpu(kernel, *arrays, semantics=("parallel",), **options)


_normalise.defvjp(_forward, _backward)
