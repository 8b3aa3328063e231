"""Scaled dot-product attention: causal or full, grouped (GQA), windowed, soft-capped, within segments.

| implementation | what it is | file |
|---|---|---|
| `xla` | the definition: all scores at once | `definition.py` |
| `chunked` | a chunk of scores at a time, by XLA | `chunked.py` |
| `cudnn` | NVIDIA's kernel, through `jax.nn.dot_product_attention` | `vendor.py` |
| `pallas_gpu` | ours, by Triton | `pallas_gpu.py` |
| `pallas_tpu` | ours, by Mosaic | `pallas_tpu.py` |

Shape suffixes: B batch, S sequence, H query heads, G kv heads, R = H // G query heads a kv head, K head width,
T keys held in a cache.

`../context_attention.py` is built of the parts of `chunked`, for rows and keys that are different stretches of one
sequence.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxstack.kernels.attention import chunked, reference
from jaxstack.kernels.attention.reference import MASKED, Mask, Options, heads_first, heads_last, masked_scores
from jaxstack.kernels.implementation import Implementation, OpCase, interpret_setting, resolve_implementation
from jaxstack.sharding import collectives

_WIDEST = {"cudnn": 128, "pallas_gpu": 256, "pallas_tpu": 256}  # heads, in elements; cuDNN's take 256 since Hopper
_DTYPES = {
    "cudnn": ("bfloat16", "float16"),
    "pallas_gpu": ("float32", "bfloat16", "float16"),
    "pallas_tpu": ("float32", "bfloat16"),
}


def _limits(name: str, case: OpCase) -> str:
    """What of a case a kernel does not do, as a choice says it."""
    if case.get("sequence_shards", 1) > 1:
        return "takes whole sequences, and this one is split over mesh axis context"
    if case.get("head_dim", 0) > _WIDEST[name]:
        return f"takes heads up to {_WIDEST[name]} wide, not {case['head_dim']}"
    if "dtype" in case and (dtype := jnp.dtype(case["dtype"]).name) not in _DTYPES[name]:
        return f"takes {' and '.join(_DTYPES[name])}, not {dtype}"
    if name != "cudnn":
        return ""
    if case.get("head_dim", 0) % 8:
        return f"takes head widths that are multiples of 8, not {case['head_dim']}"
    if case.get("softcap") is not None:
        return "caps no scores"
    return "knows no segments" if case.get("segments") else ""


IMPLEMENTATIONS = {
    "xla": Implementation(),
    "chunked": Implementation(),
    "cudnn": Implementation(("gpu",), partial(_limits, "cudnn")),
    "pallas_gpu": Implementation(("gpu",), partial(_limits, "pallas_gpu")),
    "pallas_tpu": Implementation(("tpu",), partial(_limits, "pallas_tpu")),
}


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
    """Softmax over `scale * q k^T`, times `v`: [B, S, H, K] in q's dtype, the softmax in float32.

    q [B, S, H, K], k and v [B, S, G, K] with H a multiple of G: query head h reads kv head h // (H // G).
    window: 0 for all keys, else token i sees the `window` tokens i - window + 1 .. i (Mistral, Gemma).
    softcap: scores become softcap * tanh(score / softcap) before they are masked (Gemma 2).
    segment_ids: [B, S] integers; a token sees only tokens of its own segment.

    "xla" holds all S x S scores. "chunked" holds those of one chunk, so memory is linear in S: it saves only the output
    and the log-sum-exp, recomputes scores in the backward pass, and never computes a chunk's scores against keys that
    the causal mask or the window hides (FlashAttention, Dao et al. 2022, section 3.1; chunks of rows as in Rabe and
    Staats 2021). "pallas_gpu", "pallas_tpu" and "cudnn" do the same in one kernel (FlashAttention-2, Dao 2023,
    arXiv:2307.08691), which keeps scores on the chip; blocks outside the mask are skipped.

    Raises ValueError for heads that do not group, a window without a causal mask, an unknown implementation, or one
    that cannot do this.
    """
    o = options(q, k, scale, causal, window, softcap, implementation, segments=segment_ids is not None)
    q, k, v = collectives.match_varying(q, k, v)
    return _attend(o, q, k, v, segment_ids)


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
    """What `attention` gives the last token of each row, by held keys and values of those before it: [B, 1, H, K].

    The held ones are read where they lie; the token's own are scored apart, so that nothing is joined or copied.

    q [B, 1, H, K], k and v [B, 1, G, K]: of the token.
    keys, values: [B, G, T, K], held in T slots.
    distance: tokens from each slot's token to this one [B, T]; 0 or less: not of this row, and not seen.
    """
    g, slots = keys.shape[1], keys.shape[2]
    o = Options(scale, False, 0, softcap)
    q_BG1RK, none = heads_first(q, g), jnp.zeros((0,))
    seen = distance > 0
    if window:
        seen &= distance < window
    held = jnp.where(seen[:, None, None, None], masked_scores(o, q_BG1RK, keys, none, none, None, None), MASKED)
    own = masked_scores(o, q_BG1RK, k.swapaxes(1, 2), none, none, None, None)
    weights = jax.nn.softmax(jnp.concatenate([held, own], axis=-1), axis=-1).astype(v.dtype)
    mixed = jnp.einsum("bgcrt,bgtk->bgcrk", weights[..., :slots], values, preferred_element_type=jnp.float32)
    mixed += weights[..., slots:] * v.swapaxes(1, 2)[:, :, :, None]
    return heads_last(mixed.astype(q.dtype))


def options(q, k, scale, causal, window, softcap, implementation, **case: Any) -> Options:
    """The options in one, or what is wrong with them; `case`: what else is known of it."""
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads cannot share {k.shape[2]} kv heads evenly; use a divisor")
    if window < 0 or (window and not causal):
        raise ValueError(f"window={window} needs causal=True and a positive size (0: all keys)")
    case |= {"dtype": q.dtype, "head_dim": q.shape[3], "softcap": softcap}
    name = resolve_implementation("attention", IMPLEMENTATIONS, implementation, case)
    return Options(scale, causal, window, softcap, name, interpret_setting())


def _attend(o: Options, q, k, v, segment_ids):
    match o.name:  # a kernel's file is imported where it is used: Pallas takes a while
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
