"""Hot operations: a file an op, with its reference, its faster forms and the one public function that chooses."""

from jaxstack.kernels.activation import gelu
from jaxstack.kernels.attention import attention, cached_attention
from jaxstack.kernels.context_attention import context_attention
from jaxstack.kernels.context_attention import order as context_order
from jaxstack.kernels.cross_entropy import cross_entropy
from jaxstack.kernels.linear import linear
from jaxstack.kernels.norm import layer_norm, rms_norm

__all__ = [
    "attention",
    "cached_attention",
    "context_attention",
    "context_order",
    "cross_entropy",
    "gelu",
    "layer_norm",
    "linear",
    "rms_norm",
]
