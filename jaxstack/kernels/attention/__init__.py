"""Scaled dot-product attention: masked, grouped (GQA), soft-capped, within segments, with biases by distance.

| implementation | what it is | file |
|---|---|---|
| `xla` | the definition: all scores at once | `reference.py` |
| `chunked` | a chunk of scores at a time, by XLA | `chunked.py` |
| `cudnn` | NVIDIA's kernel | `cudnn.py` |
| `pallas_gpu` | our kernel for GPUs, by Triton | `pallas_gpu.py` |
| `pallas_tpu` | our kernel for TPUs, by Mosaic | `pallas_tpu.py` |
| `tokamax` | that package's kernel for Hopper GPUs | `tokamax.py` |

Shape suffixes: B batch, S sequence, H query heads, G kv heads, R = H // G query heads per kv head, K head width,
T slots of a KV cache.

`../context_attention.py` uses `chunked`, `cudnn` and `pallas_gpu` for queries and keys from different parts of a
sequence.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxstack.common.counts import plural
from jaxstack.kernels.attention import chunked, cudnn, pallas_gpu, pallas_tpu, reference, tokamax
from jaxstack.kernels.attention import sinks as attention_sinks
from jaxstack.kernels.attention.reference import (
    MASKED,
    AttentionMask,
    Mask,
    Options,
    Tokens,
    heads_first,
    heads_last,
    masked_scores,
    with_sinks,
)
from jaxstack.kernels.attention.relative_bias import RelativeBias
from jaxstack.kernels.implementation import (
    Implementation,
    OpCase,
    interpret_setting,
    precedes,
    resolve_implementation,
    unsupported_by_tokamax,
)
from jaxstack.sharding import collectives

CAUSAL = AttentionMask()
"""Every token attends to itself and all earlier ones of its segment."""

_MAX_HEAD_DIM = 256
_DTYPES = {
    "cudnn": ("bfloat16", "float16"),
    "pallas_gpu": ("float32", "bfloat16", "float16"),
    "pallas_tpu": ("float32", "bfloat16"),
    "tokamax": ("bfloat16", "float16"),
}


def _unsupported_reason(name: str, case: OpCase) -> str:
    """Returns why a kernel cannot compute a case; see `Implementation.unsupported_reason`."""
    mask = case.get("mask", AttentionMask())
    if name == "cudnn" and mask.window and not mask.causal:
        return "takes windows with a causal mask only"
    if mask.kind == "cross":
        return "does not support queries and keys of different sequences"
    if mask.kind == "prefix":
        return "does not support prefixes"
    if case.get("bias"):
        return "does not support relative biases"
    if name == "cudnn" and case.get("sinks") and case.get("segments"):
        return "does not support sinks with segments"
    if case.get("sequence_shards", 1) > 1:
        if name in ("pallas_tpu", "tokamax"):
            return "takes whole sequences, and this one is split over mesh axis context"
        if mask.window:
            return "does not support a window in a sequence that is split over mesh axis context"
        if case.get("context_method", "ring") != "ring":
            return "takes the keys of a split sequence by mesh.context_method=ring only"
    if case.get("head_dim", 0) > _MAX_HEAD_DIM:
        return f"takes heads up to {_MAX_HEAD_DIM} wide, not {case['head_dim']}"
    keys, values = case.get("head_dim", 0), case.get("value_dim", case.get("head_dim", 0))
    if values > keys or (values < keys and case.get("sequence_shards", 1) > 1):
        where = " in a sequence that is split over mesh axis context" if values < keys else ""
        return f"takes values as wide as keys{where}, not {values} and {keys}"
    if "dtype" in case and (dtype := jnp.dtype(case["dtype"]).name) not in _DTYPES[name]:
        return f"takes {' and '.join(_DTYPES[name])}, not {dtype}"
    if name == "pallas_tpu":
        return ""
    if name == "tokamax":
        return _unsupported_by_tokamax(case)
    if why := precedes(case):
        return why
    return _unsupported_by_cudnn(case) if name == "cudnn" else ""


def _unsupported_by_tokamax(case: OpCase) -> str:
    """Returns why tokamax's kernel cannot compute a case that a kernel of ours for GPUs can."""
    half = "dtype" in case and jnp.dtype(case["dtype"]).name == "float16"
    if half and case.get("softcap") is not None:
        return "does not cap scores in float16, where its weights are infinite; use train.dtype=bfloat16"
    return unsupported_by_tokamax(case)


def _unsupported_by_cudnn(case: OpCase) -> str:
    """Returns why cuDNN's kernel cannot compute a case that a kernel of ours for GPUs can."""
    if case.get("head_dim", 0) % 8:
        return f"takes head widths that are multiples of 8, not {case['head_dim']}"
    if case.get("softcap") is not None:
        return "does not cap scores"
    if case.get("head_dim", 0) > cudnn.PUBLIC_HEAD_DIM:
        if case.get("sequence_shards", 1) > 1:
            return f"takes heads up to {cudnn.PUBLIC_HEAD_DIM} wide in a sequence that is split over mesh axis context"
        if why := precedes(case, "9.0", f"heads of {case['head_dim']} on "):
            return why
    if not case.get("segments"):
        return ""
    if case.get("sequence_shards", 1) > 1:
        return "does not support segments in a sequence that is split over mesh axis context"
    if case.get("mask", AttentionMask()).window:
        return "does not support segments with a window"
    if not case.get("max_documents"):
        return "takes segments only with data.max_documents, the most of them in a row"
    return precedes(case, "9.0", "segments on ")


IMPLEMENTATIONS = {
    "xla": Implementation(),
    "chunked": Implementation(),
    "cudnn": Implementation(("gpu",), partial(_unsupported_reason, "cudnn")),
    "pallas_gpu": Implementation(("gpu",), partial(_unsupported_reason, "pallas_gpu")),
    "pallas_tpu": Implementation(("tpu",), partial(_unsupported_reason, "pallas_tpu")),
    "tokamax": Implementation(("gpu",), partial(_unsupported_reason, "tokamax")),
}


@jax.named_scope("attention")
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    mask: AttentionMask = CAUSAL,
    softcap: float | None = None,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    prefix_ids: jax.Array | None = None,
    bias: RelativeBias | None = None,
    sinks: jax.Array | None = None,
    max_documents: int | None = None,
    implementation: str = "xla",
) -> jax.Array:
    """Returns softmax(scale * q k^T + bias) v: [B, S, H, K] in q's dtype, with the softmax in float32.

    Values may have another width than keys; the result then has the width of the values. For most kernels, narrower
    values are padded with zeros.

    Implementations:

      - "xla" has all S x S scores in memory.
      - "chunked" has the scores of one chunk in memory, which is linear in S. It saves only the output and the
        log-sum-exp, and recomputes the scores in the backward pass. It skips keys that the causal mask or the window
        hides from a chunk (FlashAttention, Dao et al. 2022, section 3.1; chunks as in Rabe and Staats 2021).
      - "pallas_gpu", "pallas_tpu" and "cudnn" do the same in one kernel, with the scores on the chip
        (FlashAttention-2, Dao 2023, arXiv:2307.08691). They skip blocks outside the mask.
      - "tokamax" does the same in Mosaic GPU. Its backward pass skips blocks outside the causal mask only.

    Args:
      q: queries [B, S, H, K], with H a multiple of G. Query head h uses kv head h // (H // G).
      k: keys [B, T, G, K]. T is S unless the mask is of kind="cross".
      v: values [B, T, G, K].
      scale: factor of the scores.
      mask: which keys of its segment a query attends to.
      softcap: replaces each score by softcap * tanh(score / softcap) before masking (Gemma 2). `None` means no cap.
      segment_ids: integers [B, S]; a query attends only to keys of its own segment. `None` means one segment.
      kv_segment_ids: the segments of the keys [B, T], with kind="cross". Segment 0 is padding: no query attends to it.
        The output of a query whose segment has no key is 0.
      prefix_ids: integers [B, S], with kind="prefix". Tokens of a segment with the same id attend to each other. 0
        means that a token is not in a prefix.
      bias: is added to the scores before the cap; its table has a column for each query head. `None` means no bias.
      sinks: one more score for each query head [H], float32. It takes part in the softmax but has no value, so that the
        weights of the keys sum to less than 1 (gpt-oss). `None` means none.
      max_documents: maximum number of segments in a row, which only "cudnn" needs; `None` means unknown. Each segment
        must then be contiguous. If the rows do not fit, "cudnn" makes the first output of each row NaN.
      implementation: a name of `IMPLEMENTATIONS`, "pallas" or "auto".

    Raises:
      ValueError: H is not a multiple of G, a window is negative, the arrays do not fit the mask, or the implementation
        is unknown or does not support the arguments.
    """
    case = {"segments": segment_ids is not None, "value_dim": v.shape[3], "max_documents": max_documents}
    case |= {"sinks": sinks is not None}
    o = options(q, k, scale, mask, softcap, implementation, bias, **case)._replace(max_documents=max_documents or 0)
    arrays = mask_arrays(mask, segment_ids, kv_segment_ids, prefix_ids, bias)
    q, k, v, table, sinks = collectives.match_varying(q, k, v, None if bias is None else bias.table, sinks)
    return _attend_any_width(o, q, k, v, arrays, table, sinks)


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
    bias: RelativeBias | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Returns the result of `attention` for the newest S tokens of each sequence, with a KV cache: [B, S, H, K].

    The cache is read in place. The scores of the tokens' own keys are computed separately, so that nothing is
    concatenated to the cache or copied.

    Args:
      q: queries of the newest tokens [B, S, H, K].
      k: keys of the tokens [B, S, G, K].
      v: values of the tokens [B, S, G, K].
      keys: cached keys in T slots [B, G, K, T]: a matmul over K reads them in this order without a transpose.
      values: cached values [B, G, T, K].
      distance: tokens from the token in each slot to the first of the newest tokens [B, T]. 0 or less masks the slot.
      scale, window, softcap: see `attention`.
      bias: see `attention`; its positions are ignored, because `distance` gives the positions of the cached tokens.
      sinks: see `attention`.
    """
    g = keys.shape[1]
    slots = keys.shape[3]
    new = jnp.arange(q.shape[1])
    q_BGSRK = heads_first(q, g)
    v_BGSK = v.swapaxes(1, 2)
    visible = (distance > 0)[:, None]  # [B, 1, T]
    distances = distance[:, None] + new[:, None]  # [B, S, T]
    if window:
        visible &= distances < window
    o = Options(scale, AttentionMask(kind="full"), softcap)
    table = None
    positions = Mask()
    if bias is not None:
        o = o._replace(buckets=bias.buckets)
        table = bias.table
        positions = Mask(Tokens(positions=new[None]), Tokens(positions=-distance))
    cached_scores = masked_scores(o, q_BGSRK, keys.swapaxes(2, 3), new, new, positions, table)  # [B, G, S, R, T]
    cached_scores = jnp.where(visible[:, None, :, None], cached_scores, MASKED)
    new_mask = AttentionMask(window, "causal" if new.size > 1 else "full")
    new_scores = masked_scores(o._replace(mask=new_mask), q_BGSRK, k.swapaxes(1, 2), new, new, Mask(), table)
    scores = jnp.concatenate([cached_scores, new_scores], axis=-1)  # [B, G, S, R, T + S]
    weights = jax.nn.softmax(with_sinks(scores, sinks), axis=-1).astype(v.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    mixed = jnp.einsum("bgcrt,bgtk->bgcrk", weights[..., :slots], values, preferred_element_type=jnp.float32)
    if new.size == 1:  # a product is faster than a matmul over one token
        mixed += weights[..., slots:] * v_BGSK[:, :, :, None]
    else:
        mixed += jnp.einsum("bgcrt,bgtk->bgcrk", weights[..., slots:], v_BGSK, preferred_element_type=jnp.float32)
    return heads_last(mixed.astype(q.dtype))


@jax.named_scope("attention")
def cached_cross_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    visible: jax.Array,
    *,
    scale: float,
    softcap: float | None = None,
) -> jax.Array:
    """Returns the result of `attention` for tokens that attend to cached keys of another sequence: [B, S, H, K].

    The cache is read in place. The result is 0 for a row without visible keys.

    Args:
      q: queries of the tokens [B, S, H, K].
      keys: cached keys in T slots [B, G, K, T].
      values: cached values [B, G, T, K].
      visible: whether the tokens attend to a slot [B, T].
      scale, softcap: see `attention`.
    """
    q_BGSRK = heads_first(q, keys.shape[1])
    new = jnp.arange(q.shape[1])
    o = Options(scale, AttentionMask(kind="cross"), softcap)
    visible = visible[:, None, None, None]  # [B, 1, 1, 1, T]
    scores = jnp.where(visible, masked_scores(o, q_BGSRK, keys.swapaxes(2, 3), new, new, Mask()), MASKED)
    weights = jnp.where(visible, jax.nn.softmax(scores, axis=-1), 0).astype(values.dtype)
    mixed = jnp.einsum("bgcrt,bgtk->bgcrk", weights, values, preferred_element_type=jnp.float32)
    return heads_last(mixed.astype(q.dtype))


def options(q, k, scale, mask: AttentionMask, softcap, implementation, bias=None, **case: Any) -> Options:
    """Checks the arguments of `attention` and returns them as `Options`; `case` has more properties of the call."""
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{plural(q.shape[2], 'query head')} cannot share {plural(k.shape[2], 'kv head')} evenly; use a divisor"
        )
    if mask.window < 0:
        raise ValueError(f"window={mask.window} is negative; use a positive size, or window=0 to attend to all keys")
    if mask.window and mask.kind not in ("causal", "full"):
        raise ValueError(f"a mask of kind={mask.kind!r} has no window; use window=0, or kind='causal'")
    if mask.kind != "cross" and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"{plural(q.shape[1], 'query')} and {plural(k.shape[1], 'key')} are not the same tokens; use kind='cross'"
        )
    if bias is not None and mask.kind == "cross":
        raise ValueError("a relative bias needs queries and keys of one sequence; leave it out with kind='cross'")
    if case.get("sinks") and (bias is not None or mask.kind not in ("causal", "full")):
        raise ValueError(f"sinks are not for relative biases or a mask of kind={mask.kind!r}; leave them out")
    if bias is not None and bias.table.shape[1] != q.shape[2]:
        raise ValueError(
            f"a bias of {plural(bias.table.shape[1], 'head')} does not fit {plural(q.shape[2], 'query head')}; use as "
            f"many"
        )
    case |= {"dtype": q.dtype, "head_dim": q.shape[3], "softcap": softcap, "mask": mask, "bias": bias is not None}
    name = resolve_implementation("attention", IMPLEMENTATIONS, implementation, case)
    return Options(scale, mask, softcap, name, interpret_setting(), None if bias is None else bias.buckets)


def mask_arrays(mask: AttentionMask, segment_ids, kv_segment_ids, prefix_ids, bias) -> Mask:
    """Returns the array arguments of `attention`, about queries and about keys.

    Raises:
      ValueError: an array is missing, or does not belong to this kind of mask.
    """
    if (prefix_ids is not None) != (mask.kind == "prefix"):
        raise ValueError("prefix_ids and a mask of kind='prefix' need each other; pass both, or neither")
    cross = mask.kind == "cross"
    if kv_segment_ids is not None and not cross:
        raise ValueError("kv_segment_ids are those of other keys than the queries' own; use kind='cross'")
    if cross and (segment_ids is None) != (kv_segment_ids is None):
        raise ValueError("segment_ids and kv_segment_ids need each other; pass both, or neither")
    if kv_segment_ids is not None:
        kv_segment_ids = jnp.where(kv_segment_ids == 0, -1, kv_segment_ids)
    of_queries = Tokens(segment_ids, prefix_ids, None if bias is None else bias.positions)
    return Mask(of_queries, of_queries._replace(segments=kv_segment_ids) if cross else of_queries)


def _attend_any_width(o: Options, q, k, v, mask: Mask, table, sinks):
    width = v.shape[3]
    pads = o.name not in ("xla", "chunked", "tokamax") and width < q.shape[3]  # others have one width of a head
    if pads:
        v = jnp.pad(v, (*[(0, 0)] * 3, (0, q.shape[3] - width)))
    if sinks is not None and o.name != "xla":
        out = attention_sinks.attend(o, q, k, v, mask, sinks)
    else:
        out = _attend(o, q, k, v, mask, table, sinks)
    return out[..., :width] if pads else out


def _attend(o: Options, q, k, v, mask: Mask, table, sinks):
    match o.name:
        case "cudnn" if mask.queries.segments is None and q.shape[3] <= cudnn.PUBLIC_HEAD_DIM:
            return cudnn.attend(o, q, k, v)
        case "cudnn":
            return cudnn.attend_packed(o, q, k, v, mask.queries.segments)
        case "pallas_gpu":
            return pallas_gpu.attend(o, q, k, v, mask.queries.segments)
        case "pallas_tpu":
            return pallas_tpu.attend(o, q, k, v, mask.queries.segments)
        case "tokamax":
            return tokamax.attend(o, q, k, v, mask.queries.segments)
        case "chunked":
            return chunked.attend(o, q, k, v, mask, table)
    return reference.attend(o, q, k, v, mask, table, sinks)
