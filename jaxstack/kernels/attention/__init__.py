"""Scaled dot-product attention: causal or full, grouped (GQA), windowed, soft-capped, within segments.

| implementation | what it is | file |
|---|---|---|
| `xla` | the definition: all scores at once | `reference.py` |
| `chunked` | a chunk of scores at a time, by XLA | `chunked.py` |
| `cudnn` | NVIDIA's kernel, through `jax.nn.dot_product_attention` | `cudnn.py` |
| `pallas_gpu` | our kernel for GPUs, by Triton | `pallas_gpu.py` |
| `pallas_tpu` | our kernel for TPUs, by Mosaic | `pallas_tpu.py` |

Shape suffixes: B batch, S sequence, H query heads, G kv heads, R = H // G query heads per kv head, K head width,
T slots of a KV cache.

`../context_attention.py` uses `chunked`, `cudnn` and `pallas_gpu` for queries and keys from different parts of a
sequence.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxstack.kernels.attention import chunked, reference
from jaxstack.kernels.attention.reference import MASKED, Mask, Options, heads_first, heads_last, masked_scores
from jaxstack.kernels.implementation import (
    Implementation,
    OpCase,
    interpret_setting,
    precedes_ampere,
    resolve_implementation,
)
from jaxstack.sharding import collectives

_MAX_HEAD_DIM = {"cudnn": 128, "pallas_gpu": 256, "pallas_tpu": 256}  # cuDNN supports 256 on Hopper and later
_DTYPES = {
    "cudnn": ("bfloat16", "float16"),
    "pallas_gpu": ("float32", "bfloat16", "float16"),
    "pallas_tpu": ("float32", "bfloat16"),
}


def _unsupported_reason(name: str, case: OpCase) -> str:
    """Returns why a kernel cannot compute a case; see `Implementation.unsupported_reason`."""
    symmetric = bool(case.get("window")) and not case.get("causal", True)
    if name == "cudnn" and symmetric:
        return "takes windows with a causal mask only"
    if case.get("sequence_shards", 1) > 1:
        if name == "pallas_tpu":
            return "takes whole sequences, and this one is split over mesh axis context"
        if case.get("window"):
            return "does not support a window in a sequence that is split over mesh axis context"
        if case.get("context_method", "ring") != "ring":
            return "takes the keys of a split sequence by mesh.context_method=ring only"
    if case.get("head_dim", 0) > _MAX_HEAD_DIM[name]:
        return f"takes heads up to {_MAX_HEAD_DIM[name]} wide, not {case['head_dim']}"
    if "dtype" in case and (dtype := jnp.dtype(case["dtype"]).name) not in _DTYPES[name]:
        return f"takes {' and '.join(_DTYPES[name])}, not {dtype}"
    if name != "cudnn":
        return ""
    if case.get("head_dim", 0) % 8:
        return f"takes head widths that are multiples of 8, not {case['head_dim']}"
    if why := precedes_ampere(case):
        return why
    if case.get("softcap") is not None:
        return "does not cap scores"
    return "does not support segments" if case.get("segments") else ""


IMPLEMENTATIONS = {
    "xla": Implementation(),
    "chunked": Implementation(),
    "cudnn": Implementation(("gpu",), partial(_unsupported_reason, "cudnn")),
    "pallas_gpu": Implementation(("gpu",), partial(_unsupported_reason, "pallas_gpu")),
    "pallas_tpu": Implementation(("tpu",), partial(_unsupported_reason, "pallas_tpu")),
}


@jax.named_scope("attention")
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    causal: bool = True,
    window: int = 0,
    softcap: float | None = None,
    segment_ids: jax.Array | None = None,
    implementation: str = "xla",
) -> jax.Array:
    """Returns softmax(scale * q k^T) v: [B, S, H, K] in q's dtype, with the softmax in float32.

    Implementations:
      - "xla" has all S x S scores in memory.
      - "chunked" has the scores of one chunk in memory, which is linear in S. It saves only the output and the
        log-sum-exp, and recomputes the scores in the backward pass. It skips keys that the causal mask or the window
        hides from a chunk (FlashAttention, Dao et al. 2022, section 3.1; chunks as in Rabe and Staats 2021).
      - "pallas_gpu", "pallas_tpu" and "cudnn" do the same in one kernel, with the scores on the chip
        (FlashAttention-2, Dao 2023, arXiv:2307.08691). They skip blocks outside the mask.

    Args:
      q: queries [B, S, H, K], with H a multiple of G. Query head h uses kv head h // (H // G).
      k: keys [B, S, G, K].
      v: values [B, S, G, K].
      scale: factor of the scores.
      causal: whether a token attends only to itself and earlier tokens.
      window: with a positive number, token i attends only to tokens i - window + 1 .. i (Mistral, Gemma), and without
        the causal mask also to i + 1 .. i + window - 1 (ModernBERT). 0 means all.
      softcap: replaces each score by softcap * tanh(score / softcap) before masking (Gemma 2). `None` means no cap.
      segment_ids: integers [B, S]; a token attends only to its own segment. `None` means one segment.
      implementation: a name of `IMPLEMENTATIONS`, "pallas" or "auto".

    Raises:
      ValueError: H is not a multiple of G, a window is negative, or the implementation is unknown or does not support
        the arguments.
    """
    o = options(q, k, scale, causal, window, softcap, implementation, segments=segment_ids is not None)
    q, k, v = collectives.match_varying(q, k, v)
    return _attend(o, q, k, v, segment_ids)


@jax.named_scope("attention")
def cached_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    distance: jax.Array,
    *,
    scale: float,
    window: int = 0,
    softcap: float | None = None,
) -> jax.Array:
    """Returns the result of `attention` for the newest S tokens of each sequence, with a KV cache: [B, S, H, K].

    The cache is read in place. The scores of the tokens' own keys are computed separately, so that nothing is
    concatenated to the cache or copied.

    Args:
      q: queries of the tokens [B, S, H, K].
      k: keys of the tokens [B, S, G, K].
      v: values of the tokens [B, S, G, K].
      keys: cached keys in T slots [B, G, K, T]: a matmul over K reads them in this order without a transpose.
      values: cached values [B, G, T, K].
      distance: number of tokens from the token of each slot to the first of these [B, T]. 0 or less masks the slot.
      scale, window, softcap: see `attention`.
    """
    g, slots, new = keys.shape[1], keys.shape[3], jnp.arange(q.shape[1])
    q_BGSRK, v_BGSK = heads_first(q, g), v.swapaxes(1, 2)
    visible = distance > 0
    visible, distance = visible[:, None], distance[:, None] + new[:, None]  # of each query [B, 1 or S, T]
    if window:
        visible &= distance < window
    cached = masked_scores(Options(scale, False, 0, softcap), q_BGSRK, keys.swapaxes(2, 3), new, new, None, None)
    cached = jnp.where(visible[:, None, :, None], cached, MASKED)
    own = masked_scores(Options(scale, new.size > 1, window, softcap), q_BGSRK, k.swapaxes(1, 2), new, new, None, None)
    weights = jax.nn.softmax(jnp.concatenate([cached, own], axis=-1), axis=-1).astype(v.dtype)
    mixed = jnp.einsum("bgcrt,bgtk->bgcrk", weights[..., :slots], values, preferred_element_type=jnp.float32)
    if new.size == 1:  # a product is faster than a matmul over one token
        mixed += weights[..., slots:] * v_BGSK[:, :, :, None]
    else:
        mixed += jnp.einsum("bgcrt,bgtk->bgcrk", weights[..., slots:], v_BGSK, preferred_element_type=jnp.float32)
    return heads_last(mixed.astype(q.dtype))


def options(q, k, scale, causal, window, softcap, implementation, **case: Any) -> Options:
    """Checks the arguments of `attention` and returns them as `Options`; `case` has more properties of the call."""
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads cannot share {k.shape[2]} kv heads evenly; use a divisor")
    if window < 0:
        raise ValueError(f"window={window} is negative; use a positive size, or window=0 to attend to all keys")
    case |= {"dtype": q.dtype, "head_dim": q.shape[3], "softcap": softcap, "window": window, "causal": causal}
    name = resolve_implementation("attention", IMPLEMENTATIONS, implementation, case)
    return Options(scale, causal, window, softcap, name, interpret_setting())


def _attend(o: Options, q, k, v, segment_ids):
    match o.name:  # kernels are imported only when used, because importing Pallas takes time
        case "cudnn":
            from jaxstack.kernels.attention import cudnn

            return cudnn.attend(o, q, k, v)
        case "pallas_gpu":
            from jaxstack.kernels.attention import pallas_gpu

            return pallas_gpu.attend(o, q, k, v, segment_ids)
        case "pallas_tpu":
            from jaxstack.kernels.attention import pallas_tpu

            return pallas_tpu.attend(o, q, k, v, segment_ids)
        case "chunked":
            return chunked.attend(o, q, k, v, Mask(segment_ids, segment_ids, None))
    return reference.attend(o, q, k, v, Mask(segment_ids, segment_ids, None))
