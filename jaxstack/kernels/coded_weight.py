"""Products with a matrix that is kept as codes of 8 or 4 bits, for decoding one token at a time.

A new token reads every weight once, so that its time is the time to read them. Codes of 8 bits have half of the bytes
of bfloat16, and codes of 4 bits a quarter. Implementations:

- "int8" is for CPUs and codes of 8 bits with one scale for each output. The input is written as two numbers of 8 bits,
  a coarse one and a fine one: x = s (high + low / 254), which is off by at most 1/64,516 of a token's largest number.
  Both are multiplied with the codes in one product of int8, whose sums are exact, so that in effect only the weights
  are rounded. XLA:CPU has a fast int8 product from two rows on.
- "xla" multiplies with the values of the codes. XLA decides whether it keeps them in memory.
- "pallas_gpu" makes the values within the kernel, see `coded_weight_pallas.py`.

Two codes of 4 bits share a byte: of each `PACKED` inputs, the first half has the low bits and the second half the high
ones, so that a kernel makes two contiguous blocks of values from a block of bytes.

Suffixes: I inputs, O outputs, G groups of inputs, R rows of x (tokens).
"""

from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack.config.scheme import Scheme
from jaxstack.kernels import coded_weight_pallas
from jaxstack.kernels.coded_weight_pallas import PACKED
from jaxstack.kernels.implementation import (
    Implementation,
    OpCase,
    exceeds_float32,
    precedes,
    resolve_implementation,
)
from jaxstack.kernels.rounding import nearest_held, repeat


def _unsupported_by_int8(case: OpCase) -> str:
    if case.get("scheme") in (None, Scheme(8)):
        return ""
    return f"is for int8 with one scale for each output, not for {case['scheme'].weights}"


def _unsupported_by_pallas(case: OpCase) -> str:
    scheme = case.get("scheme")
    if scheme is not None and scheme.group is not None and scheme.group % (PACKED // 2):
        return f"takes groups that are multiples of {PACKED // 2}, not of {scheme.group}"
    return precedes(case) or exceeds_float32(case)


IMPLEMENTATIONS = {
    "xla": Implementation(),
    "int8": Implementation(unsupported_reason=_unsupported_by_int8),
    "pallas_gpu": Implementation(platforms=("gpu",), unsupported_reason=_unsupported_by_pallas),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CodedWeight:
    """A matrix of a layer as codes; it replaces the array in a tree of parameters.

    Attributes:
      codes: int8, [I, O]; with 4 bits [bytes, O], two codes in a byte. There the inputs are padded with zeros to a
        multiple of `PACKED`.
      scales: [G, O], float32.
      bits: number of bits of a code.
      inputs: I.
      out: dimensions of the outputs, whose product is O.
      implementation: a name of `IMPLEMENTATIONS`.
    """

    codes: jax.Array
    scales: jax.Array
    bits: int = field(metadata={"static": True})
    inputs: int = field(metadata={"static": True})
    out: tuple[int, ...] = field(metadata={"static": True})
    implementation: str = field(metadata={"static": True})

    @classmethod
    def of(cls, w: jax.Array, in_axes: int, scheme: Scheme, implementation: str = "xla") -> "CodedWeight":
        """Returns the nearest codes of a matrix [*in, *out].

        A matrix that `compress quantize` or `train.qat` has rounded to integers of this scheme loses nothing, except
        8 bits after GPTQ or AWQ, which are rounded once more.

        Raises:
          ValueError: the implementation is unknown, or it does not compute this scheme.
        """
        case: dict[str, Any] = {"scheme": scheme}
        name = resolve_implementation("codes", IMPLEMENTATIONS, implementation, case)
        rows = w.reshape(prod(w.shape[:in_axes]), -1).T
        quantized = nearest_held(rows.astype(jnp.float32), scheme)
        codes = quantized.codes.T.astype(jnp.int8)
        codes = codes if scheme.bits == 8 else pack(codes)
        return cls(codes, quantized.scales.T, scheme.bits, rows.shape[1], w.shape[in_axes:], name)

    def values(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Returns the matrix that the codes stand for, [I, O]."""
        codes = self.codes if self.bits == 8 else unpack(self.codes)[: self.inputs]
        return (codes.astype(jnp.float32) * repeat(self.scales.T, self.inputs).T).astype(dtype)


def pack(codes: jax.Array) -> jax.Array:
    """Returns codes of 4 bits, int8 [I, O], as bytes [ceil(I / PACKED) * PACKED / 2, O]."""
    blocks = jnp.pad(codes, ((0, -len(codes) % PACKED), (0, 0))).reshape(-1, 2, PACKED // 2, codes.shape[1])
    low = blocks[:, 0]
    high = blocks[:, 1]
    return ((low & 15) | (high << 4)).reshape(-1, codes.shape[1])


def unpack(packed: jax.Array) -> jax.Array:
    """Returns the codes of `pack`, int8 [2 * bytes, O], with its padding."""
    low = (packed << 4) >> 4
    high = packed >> 4  # shifts to the right keep the sign
    both = (part.reshape(-1, 1, PACKED // 2, packed.shape[1]) for part in (low, high))
    return jnp.concatenate([*both], axis=1).reshape(-1, packed.shape[1])


def coded_product(x: jax.Array, w: CodedWeight, in_axes: int, *, rounds_inputs: bool = False) -> jax.Array:
    """Returns the product of x [..., *in] with a matrix, [..., *out] in the dtype of x.

    Args:
      x, w: inputs of tokens, and the matrix.
      rounds_inputs: whether inputs are rounded to 8 bits, as `train.quant=int8` does. `quantized_matmul` then computes
        the same product on every device. It needs codes of 8 bits with one scale for each output.
    """
    lead = x.shape[: x.ndim - in_axes]
    rows = x.reshape(prod(lead), -1)
    if rounds_inputs or w.implementation == "int8":
        y = _int8(rows, w, rounds_inputs)
    elif w.implementation == "pallas_gpu":
        y = coded_weight_pallas.product(rows, w.codes, w.scales, w.bits)
    else:
        y = jnp.matmul(rows, w.values(x.dtype))
    return y.astype(x.dtype).reshape(*lead, *w.out)


def _int8(x: jax.Array, w: CodedWeight, rounds_inputs: bool) -> jax.Array:
    assert (w.bits, len(w.scales)) == (8, 1), "codes of 8 bits with one scale for each output"
    wide = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.abs(wide).max(-1, keepdims=True), 1e-30) / 127
    high = jnp.round(wide / scale)
    low = jnp.zeros_like(high) if rounds_inputs else jnp.round((wide - high * scale) / (scale / 254))
    # Without the barrier, XLA:CPU repeats the rounding for every output.
    rows = lax.optimization_barrier(jnp.concatenate([high, low]).astype(jnp.int8))
    sums = lax.dot_general(rows, w.codes, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)
    coarse, fine = jnp.split(sums.astype(jnp.float32), 2)
    if not rounds_inputs:
        coarse += fine * (1 / 254)
    return coarse * scale * w.scales
