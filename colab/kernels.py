# %% [markdown]
# # A kernel, from its reference to Pallas
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxstack/jaxstack/blob/main/colab/kernels.ipynb)
#
# When does a kernel pay, and how do you know that it is right? XLA fuses well, and most of a model needs no kernel. A kernel
# pays where XLA writes a large array to memory although the kernel could keep it on the chip: the scores of attention, or the
# logits of a vocabulary. In this notebook you write two kernels. RMSNorm shows a reference implementation, exact values to
# compare with, what a kernel must not read, and its gradient. Attention shows when a kernel pays, and what it may skip.
#
# You need no accelerator: Pallas has an interpreter, which runs a kernel block by block on any machine.

# %%
# include parts/install.py

# %%
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxstack.common.drawing import BLUE, GRAY, ORANGE, STYLE

plt.rcParams.update(STYLE)
rng = np.random.default_rng()
device = jax.devices()[0]
print(f"jax {jax.__version__}, {device.device_kind}")

# %% [markdown]
# ## 1. The reference, and exact values
#
# RMSNorm divides a row by its root mean square and multiplies by a gain. The *reference* is the simplest implementation, a few
# lines of `jax.numpy`. The exact values come from the same formula in float64 NumPy, which shares no code with the reference.
# Every error below is the norm of the difference from the exact values, divided by the norm of the exact values.


# %%
def rms_norm(x, gain, eps=1e-6):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps) * gain).astype(x.dtype)


def truth(x, gain, eps=1e-6):
    x, gain = np.float64(x), np.float64(gain)
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps) * gain


def error(got, want):
    """Returns the norm of the difference, divided by the norm of the exact values."""
    return np.linalg.norm(np.float64(got) - want) / np.linalg.norm(want)


ROWS, WIDTH = 100, 256
x = jnp.asarray(rng.standard_normal((ROWS, WIDTH)), jnp.float32)
gain = jnp.asarray(rng.standard_normal(WIDTH), jnp.float32)
print(f"error of the reference: {error(rms_norm(x, gain), truth(x, gain)):.1e}; float32 rounds at 6e-8")
assert error(rms_norm(x, gain), truth(x, gain)) < 1e-6

# %% [markdown]
# ## 2. A first kernel
#
# A kernel is a function of *refs*, which point to blocks in fast memory. `grid` says how often the kernel runs; each run is a
# *program* with a number `i`. A `BlockSpec` says which block of an array program `i` gets: the shape of the block, and a
# function from `i` to the block's index. `x_ref[...]` reads a block, and an assignment to `y_ref[...]` writes one. Everything
# else is ordinary JAX.
#
# Here each program processes 32 rows. The gain is the same block for every program, so it is loaded once.

# %%
BLOCK = 32


def run(kernel, **options):
    """Builds a kernel for a TPU, or for the interpreter on any other device."""
    if device.platform == "tpu":
        return pl.pallas_call(kernel, compiler_params=pltpu.CompilerParams(), **options)
    return pl.pallas_call(kernel, interpret=True, **options)


def rms_kernel(x_ref, gain_ref, y_ref, *, eps):
    x = x_ref[...].astype(jnp.float32)
    inverse = lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)
    y_ref[...] = (x * inverse * gain_ref[...]).astype(y_ref.dtype)


def rms_norm_pallas(x, gain, eps=1e-6):
    rows, width = x.shape
    block = pl.BlockSpec((BLOCK, width), lambda i: (i, 0))
    return run(
        partial(rms_kernel, eps=eps),
        grid=(pl.cdiv(rows, BLOCK),),
        in_specs=[block, pl.BlockSpec((1, width), lambda i: (0, 0))],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    )(x, gain[None])


print(f"error of the kernel: {error(rms_norm_pallas(x, gain), truth(x, gain)):.1e}")
assert error(rms_norm_pallas(x, gain), truth(x, gain)) < 1e-6

# %% [markdown]
# 100 rows are three blocks of 32 and one of 4. The last block extends 28 rows beyond the array. Values read there are
# undefined, and values written there are discarded. This is safe here, because rows do not depend on each other.

# %% [markdown]
# ## 3. What a kernel must not read
#
# A sum over *rows* does depend on the undefined values. The gradient of the gain is such a sum: `sum over rows of dy *
# normalized x`. Each program adds up its own block, and the sums of all programs are added outside of the kernel. A mask replaces
# undefined values with zeros. The interpreter fills memory beyond an array with NaN, so a kernel without this mask returns NaN.


# %%
def rms_backward_kernel(x_ref, gain_ref, dy_ref, dx_ref, d_gain_ref, *, eps, rows):
    x, dy = x_ref[...].astype(jnp.float32), dy_ref[...].astype(jnp.float32)
    inverse = lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)
    normal, d_normal = x * inverse, dy * gain_ref[...]
    dx_ref[...] = (inverse * (d_normal - normal * (d_normal * normal).mean(-1, keepdims=True))).astype(dx_ref.dtype)
    summands = dy * normal
    if rows is not None:
        row = pl.program_id(0) * BLOCK + lax.broadcasted_iota(jnp.int32, summands.shape, 0)
        summands = jnp.where(row < rows, summands, 0)
    d_gain_ref[...] = summands.sum(0, keepdims=True)[None]


def rms_backward(x, gain, dy, eps=1e-6, careful=True):
    rows, width = x.shape
    blocks = pl.cdiv(rows, BLOCK)
    block = pl.BlockSpec((BLOCK, width), lambda i: (i, 0))
    dx, d_gain = run(
        partial(rms_backward_kernel, eps=eps, rows=rows if careful else None),
        grid=(blocks,),
        in_specs=[block, pl.BlockSpec((1, width), lambda i: (0, 0)), block],
        out_specs=[block, pl.BlockSpec((1, 1, width), lambda i: (i, 0, 0))],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((blocks, 1, width), jnp.float32)],
    )(x, gain[None], dy)
    return dx, d_gain.sum((0, 1))


dy = jnp.asarray(rng.standard_normal(x.shape), jnp.float32)
careless = rms_backward(x, gain, dy, careful=False)[1]
print(f"without the mask, {int(jnp.isnan(careless).sum())} of {WIDTH} gradients of the gain are NaN")
if device.platform != "tpu":  # on a TPU, this memory has old values in place of NaN, which nobody notices
    assert jnp.isnan(careless).all()
assert jnp.isfinite(rms_backward(x, gain, dy)[1]).all()

# %% [markdown]
# ## 4. The gradient of a kernel
#
# `jax.custom_vjp` joins the kernel with the kernel of its gradient. The forward pass saves only `x` and the gain, where plain
# autodiff would also save the normalized rows. The exact values are again NumPy's, written out by hand.


# %%
@jax.custom_vjp
def fast_rms_norm(x, gain):
    return rms_norm_pallas(x, gain)


fast_rms_norm.defvjp(lambda x, gain: (rms_norm_pallas(x, gain), (x, gain)), lambda saved, dy: rms_backward(*saved, dy))


def true_gradients(x, gain, dy, eps=1e-6):
    x, gain, dy = np.float64(x), np.float64(gain), np.float64(dy)
    inverse = 1 / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps)
    normal, d_normal = x * inverse, dy * gain
    return inverse * (d_normal - normal * (d_normal * normal).mean(-1, keepdims=True)), (dy * normal).sum(0)


_, vjp = jax.vjp(fast_rms_norm, x, gain)
errors = {
    "reference": error(rms_norm(x, gain), truth(x, gain)),
    "kernel": error(rms_norm_pallas(x, gain), truth(x, gain)),
}
for name, got, want in zip(("x", "gain"), vjp(dy), true_gradients(x, gain, dy), strict=True):
    print(f"error of the gradient by {name}: {error(got, want):.1e}")
    errors[f"gradient by {name}"] = error(got, want)
    assert error(got, want) < 1e-5  # the gradient by the gain is a sum over a hundred rows

# %% [markdown]
# A kernel and its gradient should be about as exact as the reference. Compare their errors with the dashed line, at which
# float32 rounds:

# %%
figure, axes = plt.subplots(figsize=(6, 2.2))
axes.barh(list(errors), list(errors.values()), color=BLUE)
axes.axvline(2.0**-24, color=GRAY, linestyle="--")
axes.invert_yaxis()
axes.set(xlabel="relative error")
plt.show()

# %% [markdown]
# ## 5. Is it worth it?
#
# A kernel cannot be faster than memory. RMSNorm reads a row and writes a row: 4 bytes an element in bfloat16, for about 4
# FLOPs. In the time that memory needs for these bytes, the chip could do hundreds of FLOPs. So the time depends only on how many
# bytes are moved. XLA fuses the reference into one pass over the same bytes, so a kernel gains little here.
#
# Attention is different: a kernel avoids writing and reading `S x S` scores for each head.

# %%
CHIPS = {"H100": (989e12, 3.35e12), "TPU v5p": (459e12, 2.77e12), "A100": (312e12, 2.04e12)}  # bf16 FLOP/s, bytes/s
S, HEADS, WIDTH_OF_HEAD = 4096, 16, 128


def work(scores_in_memory):
    """Returns FLOPs and bytes of a causal head's forward pass in bfloat16; float32 scores cross memory four times."""
    pairs = S * S / 2
    flops = 4 * pairs * WIDTH_OF_HEAD
    in_and_out = 4 * 2 * S * WIDTH_OF_HEAD
    return flops, in_and_out + (4 * 4 * S * S if scores_in_memory else 0)


for chip, (peak, bandwidth) in CHIPS.items():
    (flops, large), (_, small) = work(True), work(False)
    print(
        f"{chip:<8} least time a head: {1e6 * max(flops / peak, large / bandwidth):6.1f} us with scores in memory, "
        f"{1e6 * max(flops / peak, small / bandwidth):5.1f} us without; computing takes {1e6 * flops / peak:.1f} us"
    )
    assert flops / peak > small / bandwidth  # the kernel is bound by compute: the reason to write it

# %% [markdown]
# A head takes at least the longer of two times: the time for moving its bytes (bars) and the time for computing (black lines). If
# a bar ends above its line, the program waits for memory.

# %%
figure, axes = plt.subplots(figsize=(6, 2.6))
places = np.arange(len(CHIPS))
moving = {scores: [1e6 * work(scores)[1] / bandwidth for _, bandwidth in CHIPS.values()] for scores in (True, False)}
axes.bar(places - 0.2, moving[True], 0.4, color=ORANGE, label="moving bytes, scores in memory")
axes.bar(places + 0.2, moving[False], 0.4, color=BLUE, label="moving bytes, scores on the chip")
for place, (peak, _) in zip(places, CHIPS.values(), strict=True):
    computing = 1e6 * work(True)[0] / peak
    axes.plot(
        [place - 0.45, place + 0.45], [computing, computing], color="black", label="computing" if place == 0 else None
    )
axes.set_xticks(places, list(CHIPS))
axes.set(ylabel="microseconds a head", yscale="log")
figure.legend(loc="outside upper center", ncols=3)
plt.show()

# %% [markdown]
# ## 6. Attention in blocks
#
# A softmax needs the largest score of a row before it can sum, which seems to need the complete row. It does not: when a
# larger score appears, the sum so far is scaled down (*online softmax*, Milakov and Gimelshein 2018; in attention:
# FlashAttention, Dao et al. 2022). So a kernel takes a block of queries, loops over the blocks of keys, and holds one block of
# scores at a time.
#
# Under a causal mask, the kernel never visits blocks above the diagonal: its loop ends at the diagonal. With a window, the loop
# also begins later. Skipping blocks halves the work under a causal mask; masking alone would not.

# %%
TILE = 64


def visited(i, window):
    """Returns the blocks of keys that block `i` of queries visits: the first, and one beyond the last."""
    return 0 if window is None else jnp.maximum((i * TILE - window + 1) // TILE, 0), i + 1


def attention_kernel(q_ref, k_ref, v_ref, o_ref, *, scale, window):
    i = pl.program_id(1)
    q = q_ref[0].astype(jnp.float32)
    rows = i * TILE + lax.broadcasted_iota(jnp.int32, (TILE, TILE), 0)

    def block(j, carry):
        top, total, mixed = carry
        keys = j * TILE + lax.broadcasted_iota(jnp.int32, (TILE, TILE), 1)
        scores = scale * (q @ k_ref[0, pl.ds(j * TILE, TILE)].astype(jnp.float32).T)
        seen = rows >= keys
        if window is not None:
            seen &= rows - keys < window
        scores = jnp.where(seen, scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(-1))
        shrink = jnp.exp(top - new_top)  # what was summed under a smaller maximum
        weights = jnp.exp(scores - new_top[:, None])
        mixed = mixed * shrink[:, None] + weights @ v_ref[0, pl.ds(j * TILE, TILE)].astype(jnp.float32)
        return new_top, total * shrink + weights.sum(-1), mixed

    begin = jnp.full(TILE, -1e30), jnp.zeros(TILE), jnp.zeros(q.shape)
    _, total, mixed = lax.fori_loop(*visited(i, window), block, begin)
    o_ref[0] = (mixed / total[:, None]).astype(o_ref.dtype)


def attention_pallas(q, k, v, window=None):
    """Computes causal attention of q, k and v [heads, S, K]; S is a multiple of the tile."""
    heads, length, width = q.shape
    rows = pl.BlockSpec((1, TILE, width), lambda h, i: (h, i, 0))
    whole = pl.BlockSpec((1, length, width), lambda h, i: (h, 0, 0))
    return run(
        partial(attention_kernel, scale=width**-0.5, window=window),
        grid=(heads, length // TILE),
        in_specs=[rows, whole, whole],
        out_specs=rows,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    )(q, k, v)


def true_attention(q, k, v, window=None):
    q, k, v = (np.float64(a) for a in (q, k, v))
    scores = np.einsum("hsk,htk->hst", q, k) * q.shape[-1] ** -0.5
    i, j = np.indices(scores.shape[1:])
    scores[:, (j > i) | (False if window is None else i - j >= window)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


q, k, v = (jnp.asarray(rng.standard_normal((2, 512, 64)), jnp.float32) for _ in range(3))
for window in (None, 100):
    off = error(attention_pallas(q, k, v, window), true_attention(q, k, v, window))
    print(f"error with window {window}: {off:.1e}")
    assert off < (1e-5 if device.platform == "cpu" else 1e-2)  # matmuls round to TF32 on GPUs, to bfloat16 on TPUs

# %% [markdown]
# Which blocks does the kernel visit? The picture has one row for each block of 64 queries, and the blue blocks are visited. On
# the left is the causal mask without a window.

# %%
figure, axes = plt.subplots(1, 2, figsize=(7, 3.2))
for axis, window in zip(axes, (None, 100), strict=True):
    blocks = 512 // TILE
    picture = np.zeros((blocks, blocks))
    for i in range(blocks):
        low, high = (int(n) for n in visited(i, window))
        picture[i, low:high] = 1
    axis.imshow(picture, cmap="Blues", vmin=0, vmax=1.6)
    axis.set(title=f"causal, window {window}", xlabel="block of keys", ylabel="block of queries")
    print(f"window {window}: {int(picture.sum())} of {blocks * blocks} blocks are visited")
plt.show()

# %% [markdown]
# ## 7. In the library
#
# `jaxstack.kernels` has implementations of these operations for each platform. Tests compare each implementation and its
# gradients with float64, on the same cases. `auto` selects one by platform and shapes. If you name one that cannot run, you get
# an error that lists the ones that can.

# %%
from jaxstack import kernels

for op, table in kernels.OP_IMPLEMENTATIONS.items():
    print(f"{op:<16}", ", ".join(f"{name} ({'/'.join(entry.platforms)})" for name, entry in table.items()))

# %%
batch = [a.swapaxes(0, 1)[None] for a in (q, k, v)]  # [1, S, heads, K]
ours = kernels.attention(*batch, scale=64**-0.5, mask=kernels.AttentionMask(100), implementation="chunked")
off = error(ours[0].swapaxes(0, 1), true_attention(q, k, v, 100))
print(f"error of chunked attention with window 100: {off:.1e}")
assert off < 1e-2

try:
    kernels.attention(*batch, scale=1.0, implementation="fastest")
except ValueError as mistake:
    print(mistake)
else:
    raise AssertionError("it took a name that does not exist")

# %% [markdown]
# ## Exercise
#
# How many of the 64 blocks above does the kernel visit with a window of 200? Draw the picture for 512 positions in blocks of 64,
# and count. The cell below checks your number.
#
# <details><summary>Answer</summary>
#
# 30. The first five blocks of queries visit all blocks up to the diagonal: 1 + 2 + 3 + 4 + 5. The other three visit five blocks
# each: the windows of a block's queries together cover 263 keys (64 + 199), which are in five blocks.
#
# </details>

# %%
# @title Check your answer { display-mode: "form" }
answer = None  # @param {type: "raw"}
right = sum(int(high) - int(low) for low, high in (visited(i, 200) for i in range(8)))
if answer is not None:
    print("Right." if answer == right else "Not yet.")
assert right == 30

# %% [markdown]
# In a run on a GPU or TPU, a key selects the kernel: `jaxstack train --kernels.attention=pallas`. To add an implementation, write
# its function and add its name to the op's table. Then the cases of `tests/kernels/test_kernels.py` test it like all others.
