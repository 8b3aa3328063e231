"""The operations that take most of the time, each with a reference and faster implementations.

Each op has a file or a folder with its public function. `implementation.py` selects the implementation.
"""

from jaxstack.kernels.activation import IMPLEMENTATIONS as _GELU
from jaxstack.kernels.activation import gelu
from jaxstack.kernels.attention import IMPLEMENTATIONS as _ATTENTION
from jaxstack.kernels.attention import (
    AttentionMask,
    RelativeBias,
    attention,
    cached_attention,
    cached_cross_attention,
)
from jaxstack.kernels.attention.latent import cached_latent_attention
from jaxstack.kernels.causal_convolution import causal_convolution, same_document, tokens_before
from jaxstack.kernels.coded_weight import IMPLEMENTATIONS as _CODES
from jaxstack.kernels.context_attention import context_attention
from jaxstack.kernels.context_attention import order as context_order
from jaxstack.kernels.cross_entropy import IMPLEMENTATIONS as _CROSS_ENTROPY
from jaxstack.kernels.cross_entropy import cross_entropy, mask_vocab_padding, token_log_probs, with_one
from jaxstack.kernels.distillation import Mix, distillation_loss
from jaxstack.kernels.embedding import embedding_lookup
from jaxstack.kernels.grouped_matmul import IMPLEMENTATIONS as _GROUPED_MATMUL
from jaxstack.kernels.grouped_matmul import grouped_matmul
from jaxstack.kernels.implementation import Implementations
from jaxstack.kernels.largest_logit import largest_logit
from jaxstack.kernels.linear import IMPLEMENTATIONS as _LINEAR
from jaxstack.kernels.linear import Adapted, add_in_float32, linear, multiply_in_float32
from jaxstack.kernels.norm import IMPLEMENTATIONS as _NORM
from jaxstack.kernels.norm import layer_norm, rms_norm
from jaxstack.kernels.quantized_matmul import quantized_matmul
from jaxstack.kernels.states import StateTokens
from jaxstack.kernels.states import chunked as chunked_states
from jaxstack.kernels.states import over_devices as context_states
from jaxstack.kernels.states import recurrent as recurrent_states
from jaxstack.kernels.taps import find_sites

OP_IMPLEMENTATIONS: dict[str, Implementations] = {
    "attention": _ATTENTION,
    "linear": _LINEAR,
    "norm": _NORM,
    "gelu": _GELU,
    "cross_entropy": _CROSS_ENTROPY,
    "moe": _GROUPED_MATMUL,
    "codes": _CODES,
}
"""The implementations of every op, by the op's key in `kernels` of the configuration."""

__all__ = [
    "OP_IMPLEMENTATIONS",
    "Adapted",
    "AttentionMask",
    "Mix",
    "RelativeBias",
    "StateTokens",
    "add_in_float32",
    "attention",
    "cached_attention",
    "cached_cross_attention",
    "cached_latent_attention",
    "causal_convolution",
    "chunked_states",
    "context_attention",
    "context_order",
    "context_states",
    "cross_entropy",
    "distillation_loss",
    "embedding_lookup",
    "find_sites",
    "gelu",
    "grouped_matmul",
    "largest_logit",
    "layer_norm",
    "linear",
    "mask_vocab_padding",
    "multiply_in_float32",
    "quantized_matmul",
    "recurrent_states",
    "rms_norm",
    "same_document",
    "token_log_probs",
    "tokens_before",
    "with_one",
]
