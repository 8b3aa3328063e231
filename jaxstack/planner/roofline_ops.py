"""The operations that a roofline is made of, with the FLOPs and bytes of each.

Memory traffic follows one of two models:

fused    A matmul reads its operands and writes its result once. Attention does not write scores, recomputes them in the
         backward pass (FlashAttention, Dao et al. 2022, section 3.1), and skips what the causal mask hides. Each norm,
         rotation, activation and residual sum is one pass that reads its inputs and writes its outputs once. Sums of
         gradients, biases and dropout are part of a neighbouring pass. Logits are written in float32.
unfused  Each operation is one kernel, as in an eager framework. Scores, attention weights and masks of all pairs of
         tokens, masked pairs included, are read and written. Every sum of gradients, bias and dropout is a pass.

Caches are not modelled: every operation reads its inputs from memory. The load of experts is assumed to be even.

Suffixes: B rows of one microbatch on one device, S tokens of a row, D width, H heads, G key/value heads, K head width.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxstack.config import ModelConfig
from jaxstack.kernels.states import CHUNK
from jaxstack.planner import shards

Traffic = Literal["fused", "unfused"]
Scores = Literal["none", "visible", "all"]
Part = Literal["matmul", "attention", "normalisation", "pointwise", "optimizer", "communication"]
PARTS: tuple[Part, ...] = ("matmul", "attention", "normalisation", "pointwise", "optimizer", "communication")
Kind = Literal["contraction", "normalisation", "pointwise", "transfer"]

FLOPS_PER_ELEMENT = {
    "softmax": 5, "softmax backward": 4, "norm": 7, "norm backward": 12, "activation": 8, "activation backward": 8,
    "rotation": 3, "adamw": 14,
}  # fmt: skip
"""Approximate FLOPs per element. They do not change any bound, because memory bounds all of these operations."""


class Op(NamedTuple):
    """One operation that a device runs in a training step. A search over meshes makes many.

    Attributes:
      name: a description for people.
      part: the row of the report that counts it.
      kind: how it is computed: a `contraction` runs on the matrix units, a `normalisation` reduces and then scales, a
        `transfer` sends to other devices, and `pointwise` is everything else.
      flops: FLOPs of one run.
      bytes: bytes that one run reads and writes in memory; for a transfer, bytes that a device sends.
      times: runs in a step.
      of_layer: runs in one layer and microbatch; 0 for operations outside the layers.
      dtype: dtype of a contraction's operands.
      recomputes: whether it repeats earlier work, for `train.remat` or within attention's kernel. Such FLOPs are not
        part of the model's FLOPs.
      for_remat: whether it repeats earlier work for `train.remat`.
      of_update: whether it runs once a step beside the passes: the optimizer, casts of weights, sums of gradients.
      matrix: for a weight matmul, (tokens, inputs, outputs, number of matrices), from which it can be measured.
      head_width: for attention, the width of a head.
      stack: for an operation of a layer, the name of the stack, and `/layer_i` for layer i of a unit of several layers.
    """

    name: str
    part: Part
    kind: Kind
    flops: float
    bytes: float
    times: float = 1.0
    of_layer: int = 0
    dtype: str = "bfloat16"
    recomputes: bool = False
    for_remat: bool = False
    of_update: bool = False
    matrix: tuple[int, int, int, int] | None = None
    head_width: int = 0
    stack: str = ""

    @property
    def in_backward(self) -> bool:
        """Whether it runs in the backward pass: repeated operations, and those whose names say `gradient`."""
        return self.recomputes or "gradient" in self.name

    @property
    def product(self) -> tuple[float, float, float, int]:
        """Rows, inner dimension, columns and number of the products of a weight matmul, in the pass where it runs."""
        assert self.matrix is not None
        tokens, inputs, outputs, matrices = self.matrix
        rows = max(1.0, tokens / matrices)
        if self.name.endswith(", gradient"):
            return inputs, rows, outputs, matrices
        if "gradient of input" in self.name:
            return rows, outputs, inputs, matrices
        return rows, inputs, outputs, matrices

    def fill(self, tile: int) -> float:
        """Returns the part of a matrix unit's rows that the heads of attention fill; 1 without a tile."""
        if not tile or not self.head_width:
            return 1.0
        return self.head_width / (-(-self.head_width // tile) * tile)


def pointwise_op(name: str, flops: float, bytes: float, times: float = 1.0) -> Op:
    """Returns a pointwise operation whose bytes are given."""
    return Op(name, "pointwise", "pointwise", flops, bytes, times)


@dataclass(frozen=True)
class DeviceShapes:
    """The sizes of one pass over one microbatch on one device.

    Attributes:
      model: the model.
      rows: sequences of the microbatch on this device.
      length: tokens of a sequence on this device.
      seq_len: tokens of a whole sequence.
      tensor: devices of tensor parallelism.
      between: devices that shard the residual stream between attention and MLP.
      expert: devices of expert parallelism.
    """

    model: ModelConfig
    rows: int
    length: int
    seq_len: int
    tensor: int = 1
    between: int = 1
    expert: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of the microbatch on this device."""
        return self.rows * self.length

    @property
    def stream(self) -> float:
        """Elements of the residual stream on this device."""
        return self.tokens * self.model.d_model / self.between

    @property
    def heads(self) -> float:
        """Heads of a device."""
        return self.model.num_heads / self.tensor

    @property
    def kv_heads(self) -> float:
        """Key/value heads of a device."""
        return self.model.kv_heads / self.tensor

    @property
    def rounds(self) -> bool:
        """Whether tokens are sent to experts in rounds, whose backward pass repeats all but the last matmul."""
        return shards.runs_in_rounds(self.model.moe, self.expert)

    @property
    def pairs(self) -> float:
        """Pairs of token and expert: all places of a capacity, or the share of an even load."""
        moe = self.model.moe
        if moe.capacity_factor is None:
            return self.tokens * moe.choices
        return shards.pair_capacity(moe, self.rows, self.length, self.expert)


@dataclass(frozen=True)
class StateHeads:
    """The heads of a layer with states on one device, see `kernels.states`.

    Attributes:
      heads: value heads, each of which has a state.
      key_heads: heads of queries and keys.
      key_width, value_width: sizes of a state.
      corrects: whether tokens write corrections, as the delta rule does.
      taps: tokens that the convolution mixes.
    """

    heads: float
    key_heads: float
    key_width: int
    value_width: int
    corrects: bool
    taps: int

    @property
    def channels(self) -> float:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_width + self.heads * self.value_width


@dataclass(frozen=True)
class Matmul:
    """A weight and the tokens that are multiplied with it.

    Attributes:
      name: a description for people.
      tokens: rows of the input.
      inputs, outputs: sizes of the weight.
      matrices: matrices of this size, among which the tokens are distributed.
      dtype: dtype of the operands; empty for the compute dtype.
      trained: whether the weight has a gradient.
      quant: the 8-bit type of its operands, or `none`.
    """

    name: str
    tokens: float
    inputs: float
    outputs: float
    matrices: int = 1
    dtype: str = ""
    trained: bool = True
    quant: str = "none"


@dataclass(frozen=True)
class OpBuilder:
    """Builds operations for one model of memory traffic and one way to compute.

    Where a method has `recomputed`, it says whether the backward pass repeats the forward operations.

    Attributes:
      traffic: the model of memory traffic.
      remat: `train.remat`.
      dtype: compute dtype.
      itemsize: bytes of the compute dtype.
      quant: `train.quant`.
      scores: which scores attention writes to memory with fused traffic: none, those that the mask leaves, or all.
    """

    traffic: Traffic
    remat: str
    dtype: str
    itemsize: int
    quant: str = "none"
    scores: Scores = "none"

    @property
    def fused(self) -> bool:
        """Whether memory traffic is counted for fused kernels."""
        return self.traffic == "fused"

    def recomputed(self, ops: Iterable[Op], condition: bool = True) -> list[Op]:
        """Returns the operations as the backward pass repeats them, or none if the condition is false."""
        again = [op._replace(name=f"{op.name}, recomputed", recomputes=True, for_remat=True) for op in ops]
        return again if condition else []

    def elementwise(self, name: str, elements: float, arrays: float, flops: float = 1) -> Op:
        """Returns one pass over a number of arrays in the compute dtype, with `flops` FLOPs for each element."""
        size = self.itemsize * arrays * elements
        return Op(name, "pointwise", "pointwise", flops * elements, size, dtype=self.dtype)

    def elementwise_pair(
        self, name: str, elements: float, arrays: tuple[int, int], recomputed: bool = False, flops: float = 1
    ) -> list[Op]:
        """Returns a pass of the forward and one of the backward pass; each moves `arrays`."""
        forward = self.elementwise(name, elements, arrays[0], flops)
        backward = self.elementwise(f"{name}, gradient", elements, arrays[1], flops)
        return [forward, backward, *self.recomputed([forward], recomputed)]

    def dropout(self, name: str, elements: float) -> list[Op]:
        """Returns unfused dropout and its gradient: each reads, writes, and has a mask of one byte per element."""
        size = (2 * self.itemsize + 1) * elements
        forward = Op(name, "pointwise", "pointwise", elements, size, dtype=self.dtype)
        return [forward, forward._replace(name=f"{name}, gradient")]

    def norm(self, name: str, elements: float, recomputed: bool, incoming: int = 1) -> list[Op]:
        """Returns a norm and its gradient.

        The gradient adds up `incoming` gradients of the norm's output, and the gradient of the residual stream.
        """

        def one(name: str, arrays: int, flops: str) -> Op:
            op = self.elementwise(name, elements, arrays, FLOPS_PER_ELEMENT[flops])
            return op._replace(part="normalisation", kind="normalisation")

        forward = one(name, 2, "norm")
        backward = one(f"{name}, gradient", 3 + incoming if self.fused else 5, "norm backward")
        # Unfused: the gradient of x reads two arrays and writes one, the gradient of the gain reads two.
        # Each sum is a pass of its own.
        sums = [] if self.fused else [self.elementwise("sums of gradients", elements, 3) for _ in range(incoming)]
        return [forward, backward, *sums, *self.recomputed([forward], recomputed)]

    def matmul(self, m: Matmul, recomputed: bool = False) -> list[Op]:
        """Returns a weight's matmul, its repetition, and the gradients of its input and of a trained weight.

        With 8-bit operands, the forward matmul and the gradient of the input are preceded by a pass that reads their
        operands and writes them as bytes.
        """
        dtype = m.dtype or self.dtype
        e = 4 if dtype == "float32" else self.itemsize
        flops = 2 * m.tokens * m.inputs * m.outputs
        x = m.tokens * m.inputs
        w = m.matrices * m.inputs * m.outputs
        y = m.tokens * m.outputs
        matrix = (round(m.tokens), round(m.inputs), round(m.outputs), m.matrices)
        low, size = ("int8" if m.quant == "int8" else "float8", 1) if m.quant != "none" else (dtype, e)

        def one(name: str, dtype: str, read: float, written: float) -> Op:
            return Op(name, "matmul", "contraction", flops, read + e * written, dtype=dtype, matrix=matrix)

        forward = [one(m.name, low, size * (x + w), y)]
        backward = [one(f"{m.name}, gradient of input", low, size * (y + w), x)]
        if m.quant != "none":
            forward.insert(0, pointwise_op(f"{m.name}, to 8 bits", x + w, (e + 1) * (x + w)))
            backward.insert(0, pointwise_op(f"{m.name}, gradient to 8 bits", y + w, (e + 1) * (y + w)))
        if m.trained:
            backward.append(one(f"{m.name}, gradient", dtype, e * (x + y), w))
        return [*forward, *backward, *self.recomputed(forward, recomputed)]

    def attention(self, s: DeviceShapes, recomputed: bool) -> list[Op]:
        """Returns scores, softmax and the weighted mean of values, forward and backward."""
        fused = self.fused and self.scores == "none"
        return self._fused_attention(s, recomputed) if fused else self._unfused_attention(s, recomputed)

    def _fused_attention(self, s: DeviceShapes, recomputed: bool) -> list[Op]:
        m = s.model
        arrays = _attention_arrays(s)
        pairs = s.tokens * keys_seen(m, s.seq_len) * s.heads
        scores = 2 * pairs * m.head_width
        mean = 2 * pairs * m.value_width
        statistics = 4 * s.tokens * s.heads

        def kernel(name: str, flops: float, times: int) -> Op:
            size = self.itemsize * times * arrays + (statistics if times else 0)
            return Op(name, "attention", "contraction", flops, size, dtype=self.dtype, head_width=m.head_width)

        forward = kernel("attention", scores + mean, 2)
        backward = kernel("attention, gradients", 2 * scores + 2 * mean, 4)
        again = kernel("attention, scores in the backward pass", scores, 0)._replace(recomputes=True)
        return [forward, backward, again, *self.recomputed([forward], recomputed)]

    def _unfused_attention(self, s: DeviceShapes, recomputed: bool) -> list[Op]:
        m = s.model
        e = self.itemsize
        arrays = _attention_arrays(s)
        keys = keys_seen(m, s.seq_len) if self.scores == "visible" else s.seq_len
        pairs = s.tokens * keys * s.heads

        def contraction(name: str) -> Op:
            width = m.value_width if name.startswith("mean of values") else m.head_width
            return Op(name, "attention", "contraction", 2 * pairs * width, e * (pairs + arrays), dtype=self.dtype)

        def over_pairs(name: str, passes: int, kind: Kind = "pointwise", flops: float = 1) -> Op:
            return Op(name, "attention", kind, flops * pairs, e * passes * pairs, dtype=self.dtype)

        scores = [
            contraction("scores"),
            over_pairs("scale and mask", 2),
            over_pairs("softmax", 2, "normalisation", FLOPS_PER_ELEMENT["softmax"]),
        ]
        mean = contraction("mean of values")
        backward = [
            *(contraction(f"{name}, gradients") for name in ("mean of values", "mean of values")),
            over_pairs("softmax, gradient", 3, "normalisation", FLOPS_PER_ELEMENT["softmax backward"]),
            over_pairs("scale and mask, gradient", 2),
            *(contraction(f"{name}, gradients") for name in ("scores", "scores")),
        ]
        repeated = [*scores, mean] if recomputed else scores if self.remat == "selective" else []
        return [*scores, mean, *backward, *self.recomputed(repeated)]

    def states(self, s: DeviceShapes, heads: StateHeads, recomputed: bool) -> list[Op]:
        """Returns what the heads of a layer write to their states and read from them, in chunks, see `kernels.states`.

        Within a chunk, tokens read each other's values through a matrix of products of queries and keys. The delta rule
        also multiplies keys with keys, solves a triangular system with it, and multiplies a part of the solution with
        the state before the chunk. All of it is in float32.
        """
        chunk = min(CHUNK, s.length)
        chunks = s.rows * math.ceil(s.length / chunk)
        H = heads.heads
        N = heads.key_heads
        K = heads.key_width
        V = heads.value_width

        def product(name: str, batch: float, rows: int, inner: int, columns: int) -> Op:
            size = 4 * batch * (rows * inner + inner * columns + rows * columns)
            return Op(name, "matmul", "contraction", 2 * batch * rows * inner * columns, size, dtype="float32")

        def over_pairs(name: str, passes: int) -> Op:
            elements = chunks * H * chunk * chunk
            return pointwise_op(name, elements, 4 * passes * elements)

        products = [
            product("states, queries with keys", chunks * N, chunk, K, chunk),
            product("states, read", chunks * H, chunk, K, V),
            product("states, read within a chunk", chunks * H, chunk, chunk, V),
            product("states, write", chunks * H, K, chunk, V),
        ]
        corrections = product("states, corrections", chunks * H, chunk, K, V)
        if heads.corrects:
            products.append(product("states, keys with keys", chunks * N, chunk, K, chunk))
        forward = [*products, over_pairs("states, decays within a chunk", 2)]
        backward = [op._replace(name=f"{op.name}, gradients") for op in products for _ in range(2)]
        if heads.corrects:  # of the loop over chunks, and of what its states are read with
            forward += [corrections] * 2
            backward += [corrections._replace(name=f"{corrections.name}, gradients")] * 6
        backward.append(over_pairs("states, gradients of decays within a chunk", 4))
        if heads.corrects:
            solved = chunks * H * chunk * (K + V)
            size = 4 * (2 * solved + chunks * H * chunk * chunk)
            solve = pointwise_op("states, triangular system", solved * chunk, size)
            forward.append(solve)
            backward.append(solve._replace(name="states, triangular system, gradients"))
            backward.append(product("states, gradients of the system", chunks * H, chunk, K + V, chunk))
        return [*forward, *backward, *self.recomputed(forward, recomputed)]


def _attention_arrays(s: DeviceShapes) -> float:
    """Returns half of the elements of queries, keys, values and results of attention."""
    m = s.model
    return s.tokens * (s.heads + s.kv_heads) * (m.head_width + m.value_width) / 2


def keys_seen(m: ModelConfig, seq_len: int) -> float:
    """Returns the keys that a token attends to under its mask and windows, as a mean over tokens and layers."""
    windows = m.layer_windows
    total = 0.0
    for window in windows:
        w = min(window or seq_len, seq_len)
        total += (w * (w + 1) / 2 + (seq_len - w) * w) / seq_len
    if m.family != "decoder":  # as many keys after a token as before it
        total = 2 * total - len(windows)
    return total / len(windows)
