"""Attention by cuDNN's fused kernel.

`attend` calls `jax.nn.dot_product_attention`. `attend_packed` is for rows of several documents, which JAX has no public
function for, and for heads wider than 128, which JAX refuses to compile for a GPU that is not here. It writes XLA's
custom call itself. JAX's private function for documents finds the wrong keys where heads share keys, in versions before
0.12: it takes the offsets of keys from the width of the queries.

Shape suffixes: B batch, S sequence, H query heads, G kv heads, K head width, M documents of a row, N = B * M.
"""

import json
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from jaxstack.common.jax_private import private_module
from jaxstack.kernels.attention.reference import Mask, Options
from jaxstack.sharding import collectives

PUBLIC_HEAD_DIM = 128
"""Widest heads of `jax.nn.dot_product_attention` on every GPU that it supports."""


class Documents(NamedTuple):
    """Where the documents of all rows are, in the order of their tokens.

    Attributes:
      starts: index of the first token of each document, counted over all rows [N]. B * S where there is none.
      lengths: its tokens [N]. 0 where there is none.
      fit: whether these are all documents, and each is contiguous.
    """

    starts: jax.Array
    lengths: jax.Array
    fit: jax.Array


def attend(o: Options, q, k, v):
    """Returns the output [B, S, H, K] in q's dtype, for q [B, S, H, K], k and v [B, S, G, K].

    The results have no checkpoint names. `models.recomputation.POLICIES` names JAX's primitive instead, so that the
    backward pass gets the log-sum-exp as well and does not run this kernel again.
    """
    # JAX's window does not count the token itself.
    window = (o.window - 1, 0) if 0 < o.window < q.shape[1] else None
    return jax.nn.dot_product_attention(
        q, k, v, scale=o.scale, is_causal=o.causal, local_window_size=window, implementation="cudnn"
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_packed(o: Options, q, k, v, segment_ids):
    """Returns the output [B, S, H, K] in q's dtype, for q [B, S, H, K], k and v [B, S, G, K], segment_ids [B, S].

    The first output of each row is NaN if the rows have more than B * o.max_documents documents together, or if a
    document is not contiguous. `segment_ids` of `None` mean that each row is one document.
    """
    return _forward_packed(o, q, k, v, segment_ids)[0]


def _forward_packed(o: Options, q, k, v, segment_ids):
    places, fit = _places(o, q, k, segment_ids)
    out, lse = _forward_call(o, q, k, v, places)
    if fit is not None:
        # In place, without reading: to copy the output once more would cost a sixth of the kernel's bytes.
        out = out.at[:, jnp.where(fit, out.shape[1], 0)].set(jnp.nan, mode="drop")
    out = checkpoint_name(out, "attention")
    lse = checkpoint_name(lse, "attention_lse")
    return out, (q, k, v, places, out, lse)


def _backward_packed(o: Options, residuals, d_out):
    q, k, v, places, out, lse = residuals
    return *_backward_call(o, q, k, v, places, out, lse, d_out), None


attend_packed.defvjp(_forward_packed, _backward_packed)


def find_documents(segment_ids: jax.Array, count: int) -> Documents:
    """Returns the first `count` documents, given the segment ids [B, S]: runs of equal ids within a row."""
    b, s = segment_ids.shape
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    first_BS = jnp.concatenate([jnp.ones((b, 1), bool), changes], axis=1)
    starts = jnp.nonzero(first_BS.ravel(), size=count, fill_value=b * s)[0].astype(jnp.int32)
    lengths = jnp.diff(starts, append=b * s)
    there = starts < b * s
    ids = segment_ids.ravel()[jnp.minimum(starts, b * s - 1)]
    row = jnp.where(there, starts // s, -jnp.arange(1, count + 1))  # a row of its own where there is none
    same = (row[:, None] == row) & (ids[:, None] == ids)  # [N, N]
    return Documents(starts, lengths, (first_BS.sum() <= count) & (same.sum() == count))


def _places(o: Options, q, k, segment_ids):
    """Returns the kernel's integers about documents, and whether all documents fit; nothing for rows without segments.

    The integers are lengths [B, M], and the offsets of queries and of keys [B, M + 1]: elements before each document.
    """
    if segment_ids is None:
        return (), None
    b, s, h, width = q.shape
    if b * s * h * width >= 2**31:
        raise ValueError(
            f"attention=cudnn counts elements in 32 bits, and queries of {b} x {s} x {h} x {width} are too many; use a "
            f"smaller microbatch, or pallas"
        )
    m = max(o.max_documents, 2)  # 1 means one document a row to the kernel
    found = find_documents(jnp.asarray(segment_ids), b * m)
    end = jnp.full(b, b * s, jnp.int32)  # of the last document, and as many as make rows of M + 1
    offsets = jnp.concatenate([found.starts, end]).reshape(b, m + 1)
    return (found.lengths.reshape(b, m), offsets * (h * width), offsets * (k.shape[2] * width)), found.fit


def _forward_call(o: Options, q, k, v, places):
    """Returns the output [B, S, H, K] and the log-sum-exp [N, H, S]; there S counts from a document's start."""
    b, s, h, width = q.shape
    slots = b * places[0].shape[1] if places else b
    out = _type((b, h, s, width), q.dtype, q)
    out, lse, _ = _call(
        o, "__cudnn$fmhaSoftmax", False, (q, k, v, *_operands(places)), places,
        (out, _type((slots, h, s), jnp.float32, q)),
    )  # fmt: skip
    return out.swapaxes(1, 2), lse


def _backward_call(o: Options, q, k, v, places, out, lse, d_out):
    """Returns the gradients of q, k and v."""
    results = [_type((x.shape[0], x.shape[2], x.shape[1], x.shape[3]), x.dtype, x) for x in (q, k, v)]
    operands = (q, k, v, lse, d_out, out, *_operands(places))
    *gradients, _ = _call(o, "__cudnn$fmhaSoftmaxBackward", True, operands, places, results)
    return tuple(x.swapaxes(1, 2) for x in gradients)


def _operands(places) -> tuple[jax.Array, ...]:
    """Returns the lengths of queries and keys, and their offsets; nothing without documents."""
    if not places:
        return ()
    lengths, of_queries, of_keys = places
    return lengths, lengths, of_queries, of_keys


def _type(shape, dtype, like) -> jax.ShapeDtypeStruct:
    """Returns a type that varies over the same mesh axes as `like`, which `shard_map` cannot infer for a call."""
    found = jax.typeof(like)
    where = None if found.mat.empty else NamedSharding(found.sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where, manual_axis_type=found.mat)


def _call(o: Options, target: str, backward: bool, operands, places, results):
    """Calls the kernel, which stores each [B, H, S, K] as [B, S, H, K]; the last result is its workspace."""
    b, s, h, _ = operands[0].shape
    layouts = [(0, 2, 1, 3) if len(x.shape) == 4 else None for x in results]
    call = jax.ffi.ffi_call(
        target,
        [*results, _type((0,), jnp.uint8, operands[0])],
        output_layouts=[*layouts, None],
        custom_call_api_version=2,
        legacy_backend_config=config(o, b, s, h, operands[0].dtype, places[0].shape[1] if places else 1, backward),
    )
    return call(*collectives.match_varying(*operands))


def config(o: Options, b: int, s: int, h: int, dtype, max_documents: int, backward: bool) -> str:
    """Returns what XLA reads about the call, as JSON; `dtype` is that of the queries."""
    mask = {
        (True, True): "PADDING_CAUSAL",
        (True, False): "PADDING",
        (False, True): "CAUSAL",
        (False, False): "NO_MASK",
    }
    # The contracted axis of both operands of each product, and the other one's head axis: arrays are [B, S, H, K], and
    # scores [B, H, S, S].
    products = {
        "bmm1_grad_gemm1": (2, 1, 1, 2), "bmm1_grad_gemm2": (3, 1, 1, 2), "bmm2_grad_gemm1": (2, 1, 1, 2),
        "bmm2_grad_gemm2": (3, 3, 2, 2),
    } if backward else {"bmm1": (3, 3, 2, 2), "bmm2": (3, 1, 1, 2)}  # fmt: skip
    dimensions = {
        f"{name}_dot_dimension_numbers": {
            "lhs_contracting_dimensions": [str(left)],
            "rhs_contracting_dimensions": [str(right)],
            "lhs_batch_dimensions": ["0", str(left_heads)],
            "rhs_batch_dimensions": ["0", str(right_heads)],
        }
        for name, (left, right, left_heads, right_heads) in products.items()
    }
    scores: dict[str, Any] = {
        "element_type": {"bfloat16": "BF16", "float16": "F16"}[jnp.dtype(dtype).name],
        "dimensions": [str(n) for n in (b, h, s, s)],
        "layout": {"minor_to_major": ["3", "2", "1", "0"]},
        "is_dynamic_dimension": [False] * 4,
    }
    attention = {
        "algorithm": {"algo_id": "0", "math_type": "TENSOR_OP_MATH", "tuning_knobs": {"17": "1", "24": "0"},
                      "is_cudnn_frontend": True, "workspace_size": "0"},
        "fmha_scale": o.scale,
        "intermediate_tensor_shape": scores,
        "is_flash_attention": True,
        "mask_type": mask[max_documents > 1, o.causal],
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": o.window if 0 < o.window < s else 0,
        "max_seg_per_batch": max_documents,
        "is_paged_attention": False,
    }  # fmt: skip
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": attention | dimensions})


def forward(o: Options, q, k, v):
    """Returns the output [B, S, H, K] in q's dtype, and the log-sum-exp [B, S, H], of rows of one document."""
    out, lse_BHS = _forward_call(o, q, k, v, ())
    return out, lse_BHS.swapaxes(1, 2)


def backward(o: Options, q, k, v, d_out, out, lse_BSH):
    """Returns the gradients of q, k and v, given an output and a log-sum-exp that may be of more than these keys."""
    return _backward_call(o, q, k, v, (), out, lse_BSH.swapaxes(1, 2), d_out)


def forward_block(o: Options, q, k, v, mask: Mask):
    """Returns the output [B, S, H, K] and the log-sum-exp [B, S, H] for a part of the keys, both in float32.

    `jax.nn.dot_product_attention` would round the log-sum-exp to the dtype of q, so JAX's own function is called.
    """
    fused = private_module("cudnn.fused_attention_stablehlo")
    kind = fused.MaskType.CAUSAL if o.causal else fused.MaskType.NO_MASK
    out, lse_BHS = fused.dot_product_attention(q, k, v, scale=o.scale, mask_type=kind, return_residual=True)
    return out.astype(jnp.float32), lse_BHS.swapaxes(1, 2)


def backward_block(o: Options, q, k, v, d_out, out, lse_BSH, delta_BSH, mask: Mask):
    """Returns the parts of the gradients, in float32, that are due to these keys; `out` and `lse` are of all keys.

    cuDNN computes `delta` from `out` itself. JAX has no public function for its backward kernel.
    """
    fused = private_module("cudnn.fused_attention_stablehlo")
    kind = fused.MaskType.CAUSAL if o.causal else fused.MaskType.NO_MASK
    unused = jnp.zeros(0, q.dtype)
    residuals = (q, k, v, *(unused,) * 7, lse_BSH.swapaxes(1, 2), out)
    static = (o.scale, 42, 0.0, (False, False), kind, fused.AttentionLayout.BTNH.value, None, True, False)
    gradients = fused._dot_product_attention_bwd_rule(*static, residuals, d_out)[:3]
    return tuple(x.astype(jnp.float32) for x in gradients)
