"""Quantises the matrices of a model's layers: to the nearest, by GPTQ or by AWQ."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack import families, hf
from jaxstack.common.tree import Batch
from jaxstack.compress.awq import awq_scales
from jaxstack.compress.calibrate import Measure, Statistics, Walk
from jaxstack.compress.gptq import DAMP, gptq
from jaxstack.config import ConfigError, ModelConfig
from jaxstack.config.scheme import Scheme
from jaxstack.hf import weights
from jaxstack.kernels.rounding import output_error, round_to_nearest
from jaxstack.models.folding import divide_outputs, shared_inputs
from jaxstack.models.params import Param, Params, flat_spec, is_compressed

Method: TypeAlias = Literal["rtn", "gptq", "awq"]

Codes: TypeAlias = dict[str, tuple[np.ndarray, np.ndarray]]
"""Codes [O, I] and scales [O, G] of each quantised Hugging Face tensor by its name, see `hf_codes`, or of all layers of
a parameter by its path, see `stacked_codes`."""

_Layers = TypeVar("_Layers", Sequence["QuantizedLayer"], np.ndarray)

Matrices: TypeAlias = Mapping[str, Param]
"""The declarations of the matrices of a layer by path."""

DAMPS = (DAMP, 10 * DAMP, 100 * DAMP)
"""Values of `gptq`'s damp, of which the first one that gives finite factors is taken."""


@dataclass(frozen=True)
class Settings:
    """How a model is quantised.

    Attributes:
      scheme: the format of the matrices.
      method: `rtn` rounds to the nearest; `gptq` and `awq` need calibration batches.
      dtype: dtype in which scales are stored.
      int4_experts: which experts have 4 bits in place of the bits of `scheme`, bool [layers of all stacks, E]. `None`
        means none.
    """

    scheme: Scheme
    method: Method
    dtype: Literal["float32", "bfloat16"] = "float32"
    int4_experts: np.ndarray | None = None

    def for_expert(self, layer: int, expert: int) -> "Settings":
        """Returns how the matrices of one expert are quantised."""
        if self.int4_experts is None or not self.int4_experts[layer, expert]:
            return self
        return replace(self, scheme=replace(self.scheme, bits=4))


class QuantizedLayer(NamedTuple):
    """A layer after quantisation.

    Attributes:
      params: its parameters, on the host: matrices have the values that their codes stand for.
      codes: codes and scales of each matrix by path; for experts with a leading axis.
      errors: by path, the squared error of the outputs over the squared outputs; empty without statistics.
    """

    params: Params
    codes: dict[str, tuple[np.ndarray, np.ndarray]]
    errors: dict[str, float]


def quantize(
    walk: Walk,
    params: Params,
    batches: Sequence[Batch],
    how: Settings,
    finished: Callable[[int], QuantizedLayer | None] = lambda index: None,
) -> Iterator[QuantizedLayer]:
    """Yields one layer after the other, quantised; see `each_layer`."""

    def compress(index: int, matrices: Matrices, layer: Params, statistics: dict[str, Statistics]) -> QuantizedLayer:
        return quantize_layer(walk.cfg, matrices, layer, statistics, how, index)

    return each_layer(walk, params, batches, compress, finished)


def each_layer(
    walk: Walk,
    params: Params,
    batches: Sequence[Batch],
    compress: Callable[[int, Matrices, Params, dict[str, Statistics]], QuantizedLayer],
    finished: Callable[[int], QuantizedLayer | None],
) -> Iterator[QuantizedLayer]:
    """Yields the layers after their compression, each with the inputs that the layers before it then give.

    Args:
      batches: calibration batches on the devices; without any, the statistics are empty.
      compress: compresses the matrices of a layer on the host, given its number and the statistics of their inputs.
      finished: returns a layer that an earlier call has yielded, or `None`.
    """
    results: dict[int, QuantizedLayer] = {}  # `Walk.run` yields them in the same order

    def one(index: int, layer: Params, measure: Measure) -> Params:
        found = finished(index)
        if found is None:
            statistics = measure() if batches else {}
            found = compress(index, measure.matrices, jax.device_get(layer), jax.device_get(statistics))
        results[index] = found
        return found.params

    for index, _ in walk.run(params, batches, one):
        yield results.pop(index)


def quantize_layer(
    cfg: ModelConfig,
    matrices: Matrices,
    layer: Params,
    statistics: dict[str, Statistics],
    how: Settings,
    index: int = 0,
) -> QuantizedLayer:
    """Quantises the matrices of one layer.

    Args:
      matrices: the matrices by path.
      layer: parameters without the axis of layers, on the host.
      statistics: statistics of the inputs of each matrix by path; may be empty for rounding to the nearest.
      index: number of the layer, over all stacks.

    Raises:
      ConfigError: the statistics are not finite.
    """
    factors: dict[str, np.ndarray] = {}
    before = layer
    if how.method == "awq":
        layer, factors = _scale_inputs(cfg, layer, statistics, how)
    kind = np.dtype({"float": jnp.float8_e4m3fn, "normal": np.float32, "int": np.int8}[how.scheme.kind])
    codes: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    errors: dict[str, float] = {}
    for path, p in matrices.items():
        w = _get(layer, path)
        rows = as_rows(p, w) * factors.get(path, np.ones(1, np.float32))
        found = statistics.get(path)
        if found is not None and path in factors:
            found = found._replace(gram=found.gram / np.outer(factors[path], factors[path]))
        experts = rows if rows.ndim == 3 else rows[None]
        hows = [how.for_expert(index, e) for e in range(len(rows))] if rows.ndim == 3 else [how]
        done = [_quantize_one(path, one, _expert(found, e, rows.ndim), hows[e]) for e, one in enumerate(experts)]
        stacked = [np.stack(each) for each in zip(*(one[:3] for one in done), strict=True)]
        code, scale, value = stacked if rows.ndim == 3 else [each[0] for each in stacked]
        codes[path] = code.astype(kind), scale
        layer = _set(layer, path, from_rows(p, value, w.shape))
        if found is not None:
            errors[path] = sum(one[3] for one in done) / max(sum(one[4] for one in done), 1e-30)
    assert jax.tree.map(np.shape, layer) == jax.tree.map(np.shape, before)
    return QuantizedLayer(layer, codes, errors)


def _quantize_one(
    path: str, w: np.ndarray, found: Statistics | None, how: Settings
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float, float]:
    """Returns codes, scales, values, and the squared error and size of the outputs of one matrix [O, I]."""
    kind = jnp.dtype(how.dtype)
    if how.method == "gptq" and found is not None:
        for damp in DAMPS:
            made = gptq(w, found.gram, how.scheme, damp=damp, dtype=kind)
            if bool(jnp.isfinite(made.codes).all()):
                break
        else:
            raise ConfigError(
                f"the inputs of layers/{path} are not finite on the calibration batches, so --method=gptq cannot use "
                f"them. Use --method=rtn, or another --step."
            )
    else:
        made = _round_compiled(jnp.asarray(w), how.scheme, kind)
    off = size = 0.0
    if found is not None:
        off = float(output_error(jnp.asarray(w), made.values, jnp.asarray(found.gram)))
        size = float(output_error(jnp.asarray(w), jnp.zeros(w.shape), jnp.asarray(found.gram)))
    codes, scales, values = jax.device_get((made.codes, made.scales, made.values))
    return codes, scales, values, off, size


# Compiled as `train.qat` compiles it: operations one by one round a few numbers in the middle of two otherwise.
_round_compiled = jax.jit(round_to_nearest, static_argnums=(1, 2))


def _scale_inputs(
    cfg: ModelConfig, layer: Params, statistics: dict[str, Statistics], how: Settings
) -> tuple[Params, dict[str, np.ndarray]]:
    """Returns a layer whose norms and matrices have divided outputs, and the factors of each matrix's inputs [I].

    The factors are not yet multiplied into the matrices.
    """
    factors: dict[str, np.ndarray] = {}
    original = layer
    for producer, readers in shared_inputs(cfg).items():
        found = statistics[readers[0]]
        size = jnp.asarray(found.size / found.tokens)
        matrices = [jnp.asarray(_get(original, path)).reshape(len(size), -1).T for path in readers]
        s = np.asarray(awq_scales(matrices, found.gram, size, how.scheme, jnp.dtype(how.dtype)))
        layer = jax.device_get(divide_outputs(cfg, layer, producer, jnp.asarray(s)))
        factors |= dict.fromkeys(readers, s)
    return layer, factors


def join(cfg: ModelConfig, params: Params, layers: Sequence[QuantizedLayer]) -> Params:
    """Returns the parameters of a model with its layers replaced, sharded as before."""

    def place(new: np.ndarray, old: jax.Array) -> jax.Array:
        return jax.device_put(new.astype(old.dtype), old.sharding)

    joined = dict(params)
    for name, own in by_stack(cfg, layers).items():
        stacked = jax.tree.map(lambda *each: np.stack(each), *(layer.params for layer in own))
        joined[name] = jax.tree.map(place, stacked, params[name])
    return joined


def by_stack(cfg: ModelConfig, layers: _Layers) -> dict[str, _Layers]:
    """Returns the layers of each stack by its name, or the rows of an array for them."""
    found: dict[str, _Layers] = {}
    start = 0
    for name, stack in families.of(cfg).stacks(cfg).items():
        found[name] = layers[start : start + stack.depth]
        start += stack.depth
    assert start == len(layers)
    return found


def linear_tensors(cfg: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the Hugging Face tensors of the matrices of layers, by name: the path in a layer, and (layer, expert).

    Raises:
      ConfigError: a family whose tensors join matrices or are transposed.
    """
    plain = replace(cfg, pad_vocab_to=None)
    name = hf.family_of(plain)
    (group, _) = families.only_stack(plain)
    spec = families.spec(plain)
    declared = flat_spec(spec)
    found = {}
    for tensor, held in weights.hf_tensors(name, spec).items():
        path, layout, at = held.sources[0]
        stack, _, own = path.partition("/")
        if stack != group or not is_compressed(declared[path]):
            continue
        if not layout.transposed or layout.joined is not None:
            raise ConfigError(
                f"the family {name} has {tensor}, which is not the weight of one linear layer. Use a model of the "
                f"families llama, mistral, qwen3 or gemma2."
            )
        found[tensor] = (own, at)
    return found


def why_own_layout(cfg: ModelConfig) -> str | None:
    """Returns why the layouts of transformers cannot hold a quantised model; `None` means that they can."""
    if cfg.family != "decoder":
        return f"transformers has no layout for quantised matrices of model.family={cfg.family} that is tested"
    try:
        linear_tensors(cfg)
    except ConfigError as error:
        return str(error).partition(". ")[0]
    return None


def least_used(scores: Mapping[str, np.ndarray], count: int) -> np.ndarray:
    """Returns which experts of each layer have the lowest scores, bool [layers of all stacks, E]; of equal ones the
    first.

    Args:
      scores: such as the share of tokens of each expert [L, E], by the name of the stack, in the order of the stacks.
      count: experts of each layer.
    """
    each = np.concatenate([*scores.values()])
    lowest = np.argsort(each, axis=1, kind="stable")[:, :count]
    chosen = np.zeros(each.shape, bool)
    np.put_along_axis(chosen, lowest, True, axis=1)
    return chosen


def stacked_codes(cfg: ModelConfig, layers: Sequence[QuantizedLayer]) -> Codes:
    """Returns codes [L, (E,) O, I] and scales [L, (E,) O, G] by the path of their parameter."""
    return {
        f"{name}/{path}": (np.stack([one.codes[path][0] for one in own]), np.stack([one.codes[path][1] for one in own]))
        for name, own in by_stack(cfg, layers).items()
        for path in own[0].codes
    }


def hf_codes(cfg: ModelConfig, layers: Sequence[QuantizedLayer]) -> Codes:
    """Returns codes and scales by the name of their Hugging Face tensor.

    Raises:
      ConfigError: see `linear_tensors`.
    """
    found: Codes = {}
    for tensor, (own, at) in linear_tensors(cfg).items():
        codes, scales = layers[at[0]].codes[own]
        found[tensor] = (codes[at[1]], scales[at[1]]) if len(at) > 1 else (codes, scales)
    return found


def as_rows(p: Param, w: np.ndarray) -> np.ndarray:
    """Returns a matrix [*in, *out] of one layer as [O, I], and matrices of experts as [E, O, I]."""
    lead = w.shape[: p.batch_axes]
    inputs = prod(w.shape[p.batch_axes : p.batch_axes + p.in_axes])
    return w.reshape(*lead, inputs, -1).swapaxes(-1, -2)


def from_rows(p: Param, rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns what `as_rows` has made of a matrix of this shape."""
    return np.ascontiguousarray(rows.swapaxes(-1, -2)).reshape(shape)


def _expert(found: Statistics | None, expert: int, ndim: int) -> Statistics | None:
    """Returns the statistics of one expert. The statistics of a dense matrix do not change."""
    return found if found is None or ndim == 2 else Statistics(*(each[expert] for each in found))


def _get(layer: Params, path: str) -> np.ndarray:
    found = layer
    for name in path.split("/"):
        found = found[name]
    return np.asarray(found)


def _set(layer: Params, path: str, value: np.ndarray) -> Params:
    first, _, rest = path.partition("/")
    return {**layer, first: _set(layer[first], rest, value) if rest else value}
