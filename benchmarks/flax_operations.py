"""Lists the operations that Flax modules use, for `partitioned_operations.py`: each is a function of named arrays.

The text of an array gives each dimension a role and a size: `"b8 s8 s8 c4"`. A layout splits dimensions by role:

| role | dimension |
|---|---|
| b | batch, or the rows of a matrix |
| s | space or sequence |
| c | channels of an activation |
| i, o | inputs and outputs of a kernel |
| v | rows of an embedding |
| k | window of a kernel, which no layout splits |
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

Arrays = dict[str, Any]


class Array(NamedTuple):
    """An argument: the role of each dimension, its shape, and for integers the number that they stay below."""

    roles: tuple[str, ...]
    shape: tuple[int, ...]
    below: int = 0
    positive: bool = False

    def values(self, rng: np.random.Generator) -> np.ndarray:
        """Returns random values: integers below `below`, or of a normal distribution."""
        if self.below:
            return rng.integers(0, self.below, self.shape).astype(np.int32)
        normal = rng.normal(size=self.shape).astype(np.float32)
        return np.abs(normal) + 0.5 if self.positive else normal


class Operation(NamedTuple):
    """A function of named arrays, whose values and gradients are compared.

    Attributes:
      kind: group of operations, a row of the page's table.
      name: unique name.
      function: takes the arrays by name.
      arrays: its arguments.
    """

    kind: str
    name: str
    function: Callable[[Arrays], Any]
    arrays: dict[str, Array]


def array(text: str, below: int = 0, positive: bool = False) -> Array:
    """Returns the array that a text such as `"b8 s4 c16"` describes."""
    words = text.split()
    return Array(tuple(w[0] for w in words), tuple(int(w[1:]) for w in words), below, positive)


def pure(kind: str, name: str, function: Callable[..., Any], **arrays: str | Array) -> Operation:
    """Returns an operation of JAX, whose arguments are `arrays` by name."""
    return Operation(
        kind,
        name,
        lambda values: function(**values),
        {key: text if isinstance(text, Array) else array(text) for key, text in arrays.items()},
    )


def parameter(path: tuple[Any, ...], shape: tuple[int, ...]) -> Array:
    """Returns the array of a module's variable, with roles by its name and rank."""
    names = [str(getattr(key, "key", key)) for key in path]
    last, rank = names[-1], len(shape)
    if last == "embedding":
        roles = "vo"
    elif last != "kernel":  # bias, scale, statistics, vectors of the spectral norm
        roles = "k" * (rank - 1) + "o"
    elif names[-2] in ("query", "key", "value"):  # [D, H, K]
        roles = "iok"
    elif names[-2] == "out" and rank == 3:  # [H, K, D]
        roles = "iko"
    else:
        roles = "k" * (rank - 2) + "io"
    return Array(tuple(roles), shape, positive=last == "var")


def module(kind: str, name: str, layer: nn.Module, x: str | Array, **call: Any) -> Operation:
    """Returns a module of Flax as an operation of its input and its variables; `call` are further arguments."""
    inputs = x if isinstance(x, Array) else array(x)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    dummy = jnp.zeros(inputs.shape, jnp.int32 if inputs.below else jnp.float32)
    abstract = jax.eval_shape(lambda: layer.init(keys, dummy, **call))
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
    arrays = {jax.tree_util.keystr(path, simple=True, separator="/"): parameter(path, v.shape) for path, v in leaves}

    def function(values: Arrays) -> Any:
        variables = jax.tree.unflatten(structure, [values[key] for key in arrays])
        rngs = {"dropout": jax.random.key(1)}
        mutable = ["batch_stats"] if "batch_stats" in abstract else False
        return layer.apply(variables, values["x"], rngs=rngs, mutable=mutable, **call)

    return Operation(kind, name, function, {"x": inputs, **arrays})


def convolutions() -> Iterator[Operation]:
    """Yields the convolutions of `Conv`, `ConvTranspose` and `ConvLocal`."""
    inputs = {1: "b8 s16 c8", 2: "b8 s8 s8 c8", 3: "b8 s8 s4 s4 c8"}

    def conv(kind: str, name: str, rank: int = 2, features: int = 16, window: int = 3, **options: Any) -> Operation:
        layer = nn.Conv(features, (window,) * rank, **options)
        return module(kind, f"{name} {rank}D", layer, inputs[rank])

    for rank in inputs:
        yield conv("convolution", "window 3", rank)
        yield conv("convolution, strided", "stride 2", rank, strides=2)
        yield conv("convolution, dilated", "kernel dilation 2", rank, kernel_dilation=2)
        yield conv("convolution, grouped", "2 groups", rank, feature_group_count=2)
        yield conv("convolution, depthwise", "depthwise", rank, features=8, feature_group_count=8)
        yield conv("convolution, depthwise", "depthwise, stride 2", rank, features=8, feature_group_count=8, strides=2)
        for strides in (1, 2):
            transposed = nn.ConvTranspose(16, (3,) * rank, strides=(strides,) * rank)
            yield module("convolution, transposed", f"transposed, stride {strides} {rank}D", transposed, inputs[rank])
    yield conv("convolution", "window 1", window=1)
    yield conv("convolution", "window 2", window=2)
    yield conv("convolution", "window 5", window=5)
    for padding in ("VALID", "CIRCULAR", "REFLECT", ((2, 1), (0, 3))):
        yield conv("convolution", f"padding {padding}", padding=padding)
        yield conv("convolution, strided", f"stride 2, padding {padding}", padding=padding, strides=2)
    yield conv("convolution", "padding CAUSAL", rank=1, padding="CAUSAL")
    yield conv("convolution, strided", "stride 2, window 1", window=1, strides=2)
    yield conv("convolution, strided", "stride 2, window 2 (patches)", window=2, strides=2)
    yield conv("convolution, strided", "stride 4, window 4 (patches)", window=4, strides=4, padding="VALID")
    yield conv("convolution, strided", "stride 3", strides=3)
    yield conv("convolution, strided", "stride 2, window 7", window=7, strides=2)
    yield conv("convolution, strided", "stride (2, 1)", strides=(2, 1))
    yield conv("convolution, dilated", "input dilation 2", input_dilation=2, padding=((1, 1), (1, 1)))
    yield conv("convolution, dilated", "kernel dilation 2, stride 2", kernel_dilation=2, strides=2)
    yield conv("convolution, grouped", "4 groups", feature_group_count=4)
    yield conv("convolution, grouped", "4 groups, window 1", feature_group_count=4, window=1)
    yield conv("convolution, grouped", "2 groups, stride 2", feature_group_count=2, strides=2)
    yield conv("convolution, grouped", "2 groups, kernel dilation 2", feature_group_count=2, kernel_dilation=2)
    yield conv("convolution, depthwise", "depthwise, 2 outputs each", feature_group_count=8)
    causal = nn.Conv(8, (4,), padding="CAUSAL", feature_group_count=8)
    yield module("convolution, depthwise", "depthwise, causal 1D", causal, inputs[1])
    dilated = {"feature_group_count": 8, "kernel_dilation": 2}
    yield conv("convolution, depthwise", "depthwise, kernel dilation 2", features=8, **dilated)
    for padding in ("VALID", "CIRCULAR"):
        layer = nn.ConvTranspose(16, (2, 2), strides=(2, 2), padding=padding)
        yield module("convolution, transposed", f"transposed, window 2, {padding}", layer, inputs[2])
    layer = nn.ConvTranspose(16, (3, 3), strides=(2, 2), transpose_kernel=True)
    yield Operation(*module("convolution, transposed", "transposed, kernel of the forward one", layer, inputs[2]))
    yield module("convolution", "unshared (ConvLocal) 1D", nn.ConvLocal(16, (3,)), inputs[1])
    yield module("convolution, strided", "unshared, stride 2 1D", nn.ConvLocal(16, (3,), strides=2), inputs[1])
    yield pure(
        "convolution, strided",
        "patches, stride 2",
        lambda x: lax.conv_general_dilated_patches(
            x, (3, 3), (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        x=inputs[2],
    )

    def two(x: Any, w1: Any, w2: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        inner = jnp.sin(lax.conv_general_dilated(x, w1, (2, 2), "SAME", dimension_numbers=numbers))
        return lax.conv_general_dilated(inner, w2, (1, 1), "SAME", dimension_numbers=numbers)

    yield pure("convolution, strided", "two convolutions, the first with stride 2", two, x=inputs[2], w1="k3 k3 i8 o8", w2="k3 k3 i8 o8")  # fmt: skip


def pooling() -> Iterator[Operation]:
    """Yields poolings and changes of size."""
    x = "b8 s8 s8 c8"
    for name, pool in (("max", nn.max_pool), ("mean", nn.avg_pool)):
        yield pure("pooling", f"{name}, window 2", lambda x, p=pool: p(x, (2, 2), (2, 2)), x=x)
        yield pure("pooling", f"{name}, window 3, stride 2", lambda x, p=pool: p(x, (3, 3), (2, 2), "SAME"), x=x)
        yield pure("pooling", f"{name}, window 3, stride 1", lambda x, p=pool: p(x, (3, 3), (1, 1), "SAME"), x=x)
        yield pure("pooling", f"{name}, window 2 1D", lambda x, p=pool: p(x, (2,), (2,)), x="b8 s16 c8")
        yield pure("pooling", f"{name}, window 2 3D", lambda x, p=pool: p(x, (2,) * 3, (2,) * 3), x="b8 s8 s4 s4 c8")
    yield pure("pooling", "mean over space", lambda x: jnp.mean(x, (1, 2)), x=x)
    for method in ("nearest", "bilinear", "bicubic"):
        yield pure("resize", f"{method}, up", lambda x, m=method: jax.image.resize(x, (8, 16, 16, 8), m), x=x)
        yield pure("resize", f"{method}, down", lambda x, m=method: jax.image.resize(x, (8, 4, 4, 8), m), x=x)
    yield pure("resize", "repeat", lambda x: jnp.repeat(jnp.repeat(x, 2, 1), 2, 2), x=x)
    yield pure("resize", "space to depth", _space_to_depth, x=x)


def _space_to_depth(x: Any) -> Any:
    b, h, w, c = x.shape
    return x.reshape(b, h // 2, 2, w // 2, 2, c).transpose(0, 1, 3, 2, 4, 5).reshape(b, h // 2, w // 2, 4 * c)


def norms() -> Iterator[Operation]:
    """Yields the norms of activations and of weights."""
    x = "b8 s8 s8 c8"
    yield module("norm", "batch norm, training", nn.BatchNorm(use_running_average=False), x)
    yield module("norm", "batch norm, evaluation", nn.BatchNorm(use_running_average=True), x)
    yield module("norm", "layer norm", nn.LayerNorm(), x)
    yield module("norm", "RMS norm", nn.RMSNorm(), x)
    yield module("norm", "group norm, 2 groups", nn.GroupNorm(2), x)
    yield module("norm", "group norm, 4 groups", nn.GroupNorm(4), x)
    yield module("norm", "instance norm", nn.InstanceNorm(), x)
    yield module("norm", "weight norm of a product", nn.WeightNorm(nn.Dense(16)), "b8 s8 c16")
    yield module("norm", "weight norm of a convolution", nn.WeightNorm(nn.Conv(16, (3, 3))), x)
    spectral = nn.SpectralNorm(nn.Dense(16))
    yield module("norm", "spectral norm of a product", spectral, "b8 s8 c16", update_stats=False)
    spectral = nn.SpectralNorm(nn.Conv(16, (3, 3)))
    yield module("norm", "spectral norm of a convolution", spectral, x, update_stats=False)
    yield pure("norm", "softmax", lambda x: jax.nn.softmax(x), x="b8 s8 c16")
    yield pure("norm", "log-sum-exp", lambda x: jax.nn.logsumexp(x, axis=-1), x="b8 s8 c16")
    yield pure("norm", "standardize", lambda x: jax.nn.standardize(x, axis=(0, 1)), x="b8 s8 c16")


def products() -> Iterator[Operation]:
    """Yields products and attention."""
    x = "b8 s8 c16"
    yield module("product", "Dense", nn.Dense(32), x)
    yield module("product", "DenseGeneral over two axes", nn.DenseGeneral(16, axis=(-2, -1)), "b8 s4 k4 c8")
    yield module("product", "Einsum", nn.Einsum((16, 32), "bsd,df->bsf"), x)
    yield pure("product", "einsum of a batch", lambda x, y: jnp.einsum("bsc,btc->bst", x, y), x=x, y="b8 s8 c16")
    yield pure("product", "einsum of three", lambda x, y, z: jnp.einsum("bsi,io,bto->bst", x, y, z), x=x, y="i16 o16", z=x)  # fmt: skip
    yield pure("product", "outer", lambda x, y: jnp.einsum("bc,bo->co", x, y), x="b8 c16", y="b8 c16")
    yield pure("product", "gated experts", _experts, x="b8 s8 c16", gate="i16 o4", w="v4 i16 o16")
    sizes = np.array([3, 0, 4, 1], np.int32)
    yield pure("product", "ragged_dot", lambda x, w: lax.ragged_dot(x, w, jnp.asarray(sizes)), x="b8 c16", w="v4 i16 o16")  # fmt: skip
    yield module("attention", "self-attention", nn.MultiHeadDotProductAttention(4), x)
    mask = jnp.tril(jnp.ones((1, 1, 8, 8), bool))
    yield module("attention", "self-attention, causal", nn.MultiHeadDotProductAttention(4), x, mask=mask)
    qkv = {"q": "b8 s8 o4 c8", "k": "b8 s8 o4 c8", "v": "b8 s8 o4 c8"}
    yield pure("attention", "nn.dot_product_attention", lambda q, k, v: nn.dot_product_attention(q, k, v), **qkv)
    few = qkv | {"k": "b8 s8 o2 c8", "v": "b8 s8 o2 c8"}
    yield pure("attention", "fewer key heads, causal", lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True), **few)  # fmt: skip
    yield pure("attention", "window", lambda q, k, v: jax.nn.dot_product_attention(q, k, v, local_window_size=2), **qkv)


def _experts(x: Any, gate: Any, w: Any) -> Any:
    weights = jax.nn.softmax(x @ gate)
    best, index = lax.top_k(weights, 2)
    one_hot = jax.nn.one_hot(index, 4) * best[..., None]
    return jnp.einsum("bske,bsi,eio->bso", one_hot, x, w)


def recurrences() -> Iterator[Operation]:
    """Yields recurrent cells and loops."""
    x = "b8 s6 c8"
    for cell in (nn.SimpleCell, nn.GRUCell, nn.MGUCell, nn.LSTMCell, nn.OptimizedLSTMCell):
        yield module("recurrence", cell.__name__, nn.RNN(cell(16)), x)
    yield module("recurrence", "LSTM, reversed", nn.RNN(nn.LSTMCell(16), reverse=True, keep_order=True), x)
    yield module("recurrence", "LSTM, lengths", nn.RNN(nn.LSTMCell(16)), x, seq_lengths=jnp.arange(8) % 6 + 1)
    both = nn.Bidirectional(nn.RNN(nn.GRUCell(16)), nn.RNN(nn.GRUCell(16)))
    yield module("recurrence", "GRU, both directions", both, x)
    yield module("recurrence", "ConvLSTM", nn.RNN(nn.ConvLSTMCell(8, (3, 3))), "b8 s4 s8 s8 c4")
    yield pure("recurrence", "lax.scan over layers", _scan, x="b8 c16", w="v4 i16 o16")
    yield pure("recurrence", "lax.scan over layers, of tokens", _scan, x="b8 s4 c16", w="v4 i16 o16")
    yield pure("recurrence", "lax.scan over MLPs", _scan_mlp, x="b8 s4 c16", up="v4 i16 o16", down="v4 o16 i16")
    yield pure("recurrence", "layers without a loop", _layers, x="b8 c16", w="v4 i16 o16")
    yield pure("recurrence", "lax.map", lambda x: lax.map(lambda row: jnp.sin(row) @ row.T, x), x="b8 s8 c8")
    yield pure("recurrence", "lax.associative_scan", lambda x: lax.associative_scan(jnp.multiply, x, axis=1), x="b8 s8 c8")  # fmt: skip
    yield pure("recurrence", "lax.cond", lambda x, w: lax.cond(x.sum() > 0, lambda: x @ w, lambda: jnp.sin(x @ w)), x="b8 c16", w="i16 o16")  # fmt: skip


def _scan(x: Any, w: Any) -> Any:
    return lax.scan(jax.checkpoint(lambda x, w: (jnp.sin(x @ w), x.mean())), x, w)


def _scan_mlp(x: Any, up: Any, down: Any) -> Any:
    return lax.scan(lambda x, w: (x + jnp.sin(x @ w[0] / 16) @ w[1] / 16, None), x, (up, down))[0]


def _layers(x: Any, w: Any) -> Any:
    for layer in w:
        x = jnp.sin(x @ layer)
    return x


def lookups() -> Iterator[Operation]:
    """Yields lookups, scatters, and sums of segments."""
    ids, table = array("b8 s8", below=16), "v16 o8"
    yield module("lookup", "Embed", nn.Embed(16, 8), ids)
    yield pure("lookup", "rows", lambda table, ids: table[ids], table=table, ids=ids)
    yield pure("lookup", "take, clipped", lambda table, ids: jnp.take(table, ids, axis=0, mode="clip"), table=table, ids=ids)  # fmt: skip
    yield pure("lookup", "take_along_axis", lambda x, ids: jnp.take_along_axis(x, ids[..., None], -1), x="b8 s8 c16", ids=ids)  # fmt: skip
    yield pure("lookup", "columns", lambda x, ids: x[:, ids[0]], x="b8 c16", ids=ids)
    yield pure("lookup", "pairs of indices", lambda x, ids: x[ids[:, 0] % 8, ids[:, 1]], x="b8 c16 k4", ids=ids)
    yield pure("lookup", "one-hot product", lambda table, ids: jax.nn.one_hot(ids, 16) @ table, table=table, ids=ids)
    yield pure("lookup", "cross-entropy", _cross_entropy, x="b8 s8 c16", ids=ids)
    yield pure("lookup", "dynamic_slice", lambda x, ids: lax.dynamic_slice_in_dim(x, ids[0, 0] // 2, 8, 1), x="b8 s16 c8", ids=ids)  # fmt: skip
    yield pure("scatter", "dynamic_update_slice", lambda x, y, ids: lax.dynamic_update_slice_in_dim(x, y, ids[0, 0] // 2, 1), x="b8 s16 c8", y="b8 s4 c8", ids=ids)  # fmt: skip
    yield pure("scatter", "add to rows", lambda x, ids: jnp.zeros((16, 8)).at[ids].add(x), x="b8 s8 c8", ids=ids)
    yield pure("scatter", "add in each row", lambda x, y, ids: x.at[jnp.arange(8)[:, None], ids].add(y), x="b8 c16", y="b8 s8", ids=ids)  # fmt: skip
    yield pure("scatter", "set a row of each", lambda x, y, ids: x.at[jnp.arange(8), ids[:, 0]].set(y), x="b8 s16 c8", y="b8 c8", ids=ids)  # fmt: skip
    yield pure("scatter", "largest of rows", lambda x, ids: jnp.full((16, 8), -9.0).at[ids].max(x), x="b8 s8 c8", ids=ids)  # fmt: skip
    rows = array("b8", below=4)
    yield pure("scatter", "segment_sum", lambda x, ids: jax.ops.segment_sum(x, ids, 4), x="b8 c8", ids=rows)
    yield pure("scatter", "segment_max", lambda x, ids: jax.ops.segment_max(x, ids, 4), x="b8 c8", ids=rows)
    yield pure("scatter", "bincount", lambda ids: jnp.bincount(ids.ravel(), length=16), ids=ids)


def _cross_entropy(x: Any, ids: Any) -> Any:
    return jax.nn.logsumexp(x, -1) - jnp.take_along_axis(x, ids[..., None], -1)[..., 0]


def orders() -> Iterator[Operation]:
    """Yields sorts, cumulative operations, and arguments of extremes."""
    for axis, name in ((1, "sequence"), (0, "batch"), (2, "channels")):
        yield pure("sort", f"sort over the {name}", lambda x, a=axis: jnp.sort(x, a), x="b8 s8 c8")
        yield pure("sort", f"argsort over the {name}", lambda x, a=axis: jnp.argsort(x, a), x="b8 s8 c8")
        for function in (lax.cumsum, lax.cummax, lax.cumprod, lax.cumlogsumexp):
            yield pure("cumulative", f"{function.__name__} over the {name}", lambda x, f=function, a=axis: f(x, a), x="b8 s8 c8")  # fmt: skip
        yield pure("sort", f"argmax over the {name}", lambda x, a=axis: jnp.argmax(x, a), x="b8 s8 c8")
        yield pure("sort", f"largest over the {name}", lambda x, a=axis: jnp.max(x, a), x="b8 s8 c8")
    yield pure("cumulative", "cumsum, reversed", lambda x: lax.cumsum(x, 1, reverse=True), x="b8 s8 c8")
    yield pure("sort", "top_k", lambda x: lax.top_k(x, 3), x="b8 s8 c16")
    yield pure("sort", "median", lambda x: jnp.median(x, 1), x="b8 s8 c8")
    yield pure("sort", "sort with a payload", lambda x, y: lax.sort((x, y), dimension=1, num_keys=1)[1], x="b8 s8", y="b8 s8")  # fmt: skip
    yield pure("sort", "searchsorted", lambda x, y: jnp.searchsorted(jnp.sort(x), y), x="c16", y="b8")


def shapes() -> Iterator[Operation]:
    """Yields moves of data, Fourier transforms, random numbers and decompositions."""
    x = "b8 s8 c8"
    moves: dict[str, Callable[..., Any]] = {
        "flip of the sequence": lambda x: jnp.flip(x, 1),
        "flip of the batch": lambda x: jnp.flip(x, 0),
        "roll": lambda x: jnp.roll(x, 3, 1),
        "roll of the batch": lambda x: jnp.roll(x, 1, 0),
        "pad of the sequence": lambda x: jnp.pad(x, ((0, 0), (3, 1), (0, 0))),
        "pad of the batch": lambda x: jnp.pad(x, ((1, 2), (0, 0), (0, 0))),
        "pad, interior": lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 1, 1), (0, 0, 0))),
        "pad, negative": lambda x: lax.pad(x, 0.0, ((0, 0, 0), (-1, -2, 0), (0, 0, 0))),
        "pad, reflect": lambda x: jnp.pad(x, ((0, 0), (2, 2), (0, 0)), "reflect"),
        "pad, wrap": lambda x: jnp.pad(x, ((0, 0), (2, 2), (0, 0)), "wrap"),
        "pad, edge": lambda x: jnp.pad(x, ((0, 0), (2, 2), (0, 0)), "edge"),
        "slice with steps": lambda x: x[:, 1::3],
        "slice of the batch": lambda x: x[1:6],
        "shift of tokens": lambda x: jnp.concatenate([x[:, :1], x[:, :-1]], 1),
        "split and concatenate": lambda x: jnp.concatenate(jnp.split(x, 4, 1)[::-1], 1),
        "split and stack the batch": lambda x: jnp.stack(jnp.split(x, 4), 1),
        "tile": lambda x: jnp.tile(x, (1, 3, 1)),
        "repeat of the batch": lambda x: jnp.repeat(x, 3, 0),
        "reshape, merge": lambda x: x.reshape(64, 8),
        "reshape, split": lambda x: x.reshape(2, 4, 8, 2, 4),
        "reshape, regroup": lambda x: x.reshape(4, 16, 8),
        "transpose": lambda x: x.transpose(1, 2, 0),
        "diagonal": lambda x: jnp.diagonal(x, axis1=1, axis2=2),
        "triangle": lambda x: jnp.tril(x),
        "mean of the batch": lambda x: x.mean(0),
        "variance": lambda x: x.var((0, 1)),
        "product of all": lambda x: jnp.prod(1 + 0.01 * x, (0, 1)),
        "where": lambda x: jnp.where(jnp.arange(8)[:, None] > 3, x, 0.5 * x),
    }
    for name, function in moves.items():
        yield pure("move", name, function, x=x)
    yield pure("move", "concatenate sequences", lambda x, y: jnp.concatenate([x, y], 1), x=x, y="b8 s4 c8")
    yield pure("move", "concatenate channels", lambda x, y: jnp.concatenate([x, y], 2), x=x, y="b8 s8 c4")
    yield pure("move", "concatenate batches", lambda x, y: jnp.concatenate([x, y], 0), x=x, y="b4 s8 c8")
    for axis, name in ((1, "sequence"), (0, "batch")):
        yield pure("Fourier", f"fft over the {name}", lambda x, a=axis: jnp.abs(jnp.fft.fft(x, axis=a)), x=x)
        yield pure("Fourier", f"rfft over the {name}", lambda x, a=axis: jnp.abs(jnp.fft.rfft(x, axis=a)), x=x)
    yield pure("Fourier", "fft2", lambda x: jnp.fft.fft2(x, axes=(1, 2)).real, x="b8 s8 s8 c4")
    yield pure("Fourier", "irfft of rfft", lambda x: jnp.fft.irfft(jnp.fft.rfft(x, axis=1) ** 2, axis=1), x=x)
    yield module("random", "dropout", nn.Dropout(0.5, deterministic=False), x)
    yield module("random", "dropout, one mask for the sequence", nn.Dropout(0.5, broadcast_dims=(1,), deterministic=False), x)  # fmt: skip
    key = jax.random.key(3)
    yield pure("random", "normal", lambda x: x * jax.random.normal(key, x.shape), x=x)
    yield pure("random", "bernoulli", lambda x: x * jax.random.bernoulli(key, 0.3, x.shape), x=x)
    yield pure("random", "categorical", lambda x: jax.random.categorical(key, x), x=x)
    yield pure("random", "permutation", lambda x: jax.random.permutation(key, x), x=x)
    yield pure("random", "a key for each row", _rows_of_keys, x=x)
    yield pure("decomposition", "cholesky", lambda x: jnp.linalg.cholesky(_definite(x)), x=x)
    yield pure("decomposition", "solve", lambda x, y: jnp.linalg.solve(_definite(x), y), x=x, y="b8 s8 c2")
    yield pure("decomposition", "inverse", lambda x: jnp.linalg.inv(_definite(x)), x=x)
    yield pure("decomposition", "triangular solve", lambda x, y: jax.scipy.linalg.solve_triangular(jnp.tril(_definite(x)), y, lower=True), x=x, y="b8 s8 c2")  # fmt: skip
    yield pure("decomposition", "qr", lambda x: jnp.abs(jnp.linalg.qr(x)[1]), x=x)
    yield pure("decomposition", "singular values", lambda x: jnp.linalg.svd(x, compute_uv=False), x=x)
    yield pure("decomposition", "eigenvalues", lambda x: jnp.linalg.eigvalsh(_definite(x)), x=x)


def _rows_of_keys(x: Any) -> Any:
    keys = jax.random.split(jax.random.key(4), x.shape[0])
    return x * jax.vmap(lambda key: jax.random.uniform(key, x.shape[1:]))(keys)


def _definite(x: Any) -> Any:
    return jnp.einsum("bik,bjk->bij", x, x) / math.sqrt(x.shape[-1]) + 2 * jnp.eye(x.shape[-1])


def operations() -> list[Operation]:
    """Returns every operation of the sweep."""
    groups = (convolutions, pooling, norms, products, recurrences, lookups, orders, shapes)
    return [operation for group in groups for operation in group()]
