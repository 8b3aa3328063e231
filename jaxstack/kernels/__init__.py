"""Hot operations: a file an op, with its reference, its faster forms and its public function; `choice.py` chooses."""

from jaxstack.kernels.activation import IMPLEMENTATIONS as _GELU
from jaxstack.kernels.activation import gelu
from jaxstack.kernels.attention import IMPLEMENTATIONS as _ATTENTION
from jaxstack.kernels.attention import attention, cached_attention
from jaxstack.kernels.context_attention import context_attention
from jaxstack.kernels.context_attention import order as context_order
from jaxstack.kernels.cross_entropy import IMPLEMENTATIONS as _CROSS_ENTROPY
from jaxstack.kernels.cross_entropy import cross_entropy
from jaxstack.kernels.embedding import embedding_lookup
from jaxstack.kernels.grouped_matmul import IMPLEMENTATIONS as _GROUPED_MATMUL
from jaxstack.kernels.grouped_matmul import grouped_matmul
from jaxstack.kernels.implementation import Table
from jaxstack.kernels.linear import IMPLEMENTATIONS as _LINEAR
from jaxstack.kernels.linear import add_in_float32, linear
from jaxstack.kernels.norm import IMPLEMENTATIONS as _NORM
from jaxstack.kernels.norm import layer_norm, rms_norm
from jaxstack.kernels.quantized_matmul import quantized_matmul

TABLES: dict[str, Table] = {
    "attention": _ATTENTION,
    "linear": _LINEAR,
    "norm": _NORM,
    "gelu": _GELU,
    "cross_entropy": _CROSS_ENTROPY,
    "moe": _GROUPED_MATMUL,
}
"""The implementations of every op, by the op's key in the configuration."""

__all__ = [
    "TABLES",
    "add_in_float32",
    "attention",
    "cached_attention",
    "context_attention",
    "context_order",
    "cross_entropy",
    "embedding_lookup",
    "gelu",
    "grouped_matmul",
    "layer_norm",
    "linear",
    "quantized_matmul",
    "rms_norm",
]
