"""Folders with quantised matrices, in the layout of the compressed-tensors library, which vLLM and transformers read.

A matrix NAME.weight [O, I] with codes of 4 or 8 bits is stored as NAME.weight_packed, int32 [O, I * bits / 32], with
the first input in the lowest bits and 2^(bits-1) added to each code; NAME.weight_scale [O, G], for G groups of inputs;
and NAME.weight_shape. Where zero is not code 0, NAME.weight_zero_point has a code for each group, packed along O.
Codes that are not packed, int8 or float8, are stored as NAME.weight itself.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np

from jaxstack.common.counts import plural
from jaxstack.config import ConfigError
from jaxstack.config.scheme import Scheme
from jaxstack.hf.configs import JsonObject, Keys
from jaxstack.hf.safetensors import TensorFiles, TensorInfo

KEY = "quantization_config"
METHOD = "compressed-tensors"
FORMATS = {
    "pack-quantized": {("int", 4): "I32", ("int", 8): "I32"},
    "int-quantized": {("int", 8): "I8"},
    "float-quantized": {("float", 8): "F8_E4M3"},
    "naive-quantized": {("int", 8): "I8", ("float", 8): "F8_E4M3"},
}
"""The dtype of the tensor with the codes, by format, and by kind and bits of the codes."""

PARTS = (".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx")
"""Ends of the names of tensors beside, or in place of, NAME.weight."""

_NO_EFFECT = {
    "dequantize", "global_compression_ratio", "ignore", "run_compressed", "use_optimized_inference", "version",
}  # fmt: skip
"""Keys of `quantization_config` that do not change values: the tensors show which matrices are quantised."""

_CALIBRATION = {"observer", "observer_kwargs", "scale_dtype", "zp_dtype"}
"""Keys of a format that describe how codes were found, or repeat the dtype of a tensor."""

INPUTS: JsonObject = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
"""Inputs of 8 bits, with a scale for each token that is found when the model runs."""

Codes: TypeAlias = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Codes [O, I], int8 or float8_e4m3fn, and scales [O, G], float32, of quantised tensors by name (`....weight`)."""


def to_json(scheme: Scheme, codes: Codes, linear: Iterable[str]) -> JsonObject:
    """Returns the `quantization_config` of a folder.

    Args:
      linear: names of all tensors that are weights of linear layers.
    """
    sizes: dict[int | None, set[str]] = {}
    for name, (code, scale) in codes.items():
        size = None if scale.shape[1] == 1 else code.shape[1] // scale.shape[1]
        sizes.setdefault(size, set()).add(name.removesuffix(".weight").rpartition(".")[2])
    groups = {}
    for i, (size, layers) in enumerate(sizes.items()):
        targets = ["Linear"] if len(sizes) == 1 else [rf"re:.*\.{layer}$" for layer in sorted(layers)]
        weights = {
            "num_bits": scheme.bits,
            "type": scheme.kind,
            "symmetric": True,
            "strategy": "channel" if size is None else "group",
            "group_size": size,
            "dynamic": False,
        }
        groups[f"group_{i}"] = {"targets": targets, "weights": weights}
        if scheme.inputs != "none":
            groups[f"group_{i}"]["input_activations"] = INPUTS
    kept = {"lm_head", *(name.removesuffix(".weight") for name in linear if name not in codes)}
    return {
        "quant_method": METHOD,
        "format": "pack-quantized" if scheme.is_packed else f"{scheme.kind}-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(kept),
    }


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Returns codes [O, I] as int32 [O, I * bits / 32], with zeros in the bits that are left."""
    per = 32 // bits
    low = 1 << (bits - 1)
    assert -low <= codes.min(initial=0) <= codes.max(initial=0) < low, f"codes exceed {plural(bits, 'bit')}"
    shifted = np.pad(codes.astype(np.int32) + low, ((0, 0), (0, -codes.shape[1] % per)))
    words = shifted.astype(np.uint32).reshape(len(codes), -1, per) << (bits * np.arange(per, dtype=np.uint32))
    return np.bitwise_or.reduce(words, axis=2, dtype=np.uint32).view(np.int32)


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Returns the codes of `pack`, int32 [O, 32 / bits * words]."""
    shifts = bits * np.arange(32 // bits, dtype=np.uint32)
    parts = (np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return parts.astype(np.int32).reshape(len(words), -1) - (1 << (bits - 1))


def tensor_sizes(name: str, codes: np.ndarray, scales: np.ndarray, scheme: Scheme, dtype: np.dtype) -> dict[str, int]:
    """Returns the bytes of each tensor of `to_tensors`, in their order."""
    scale = {f"{name}_scale": scales.size * dtype.itemsize}
    if not scheme.is_packed:
        return {name: codes.size} | scale
    words = codes.shape[0] * -(-codes.shape[1] * scheme.bits // 32)
    return {f"{name}_packed": 4 * words} | scale | {f"{name}_shape": 16}


def to_tensors(
    name: str, codes: np.ndarray, scales: np.ndarray, scheme: Scheme, dtype: np.dtype
) -> dict[str, np.ndarray]:
    """Returns the tensors that hold a quantised matrix.

    Args:
      name: name of the matrix, which ends with `weight`.
      codes: [O, I], int8 or float8_e4m3fn.
      scales: [O, G].
      dtype: dtype in which scales are stored.
    """
    scale = {f"{name}_scale": np.ascontiguousarray(scales.astype(dtype))}
    if not scheme.is_packed:
        assert codes.dtype == ("float8_e4m3fn" if scheme.kind == "float" else np.int8)
        return {name: np.ascontiguousarray(codes)} | scale
    return {f"{name}_packed": pack(codes, scheme.bits)} | scale | {f"{name}_shape": np.array(codes.shape, np.int64)}


def read_schemes(where: str, values: Any) -> dict[Scheme, bool]:
    """Returns the formats that a `quantization_config` lists, each with whether its matrices need zero points.

    Raises:
      ConfigError: another method, or a key or value that would change the result and is not supported.
    """
    keys = Keys(f"{where}: {KEY}", values)
    if (method := keys.take("quant_method", None)) != METHOD:
        fix = (
            f"Use the model before quantisation, nf4 of bitsandbytes, or convert the folder to {METHOD}, for example "
            f"with llm-compressor"
        )
        raise keys.error("quant_method", method, fix)
    keys.drop(_NO_EFFECT)
    keys.expect("quantization_status", "compressed")
    for key in ("kv_cache_scheme", "moe_sparsity_config"):
        keys.expect(key, None)
    keys.expect("transform_config", None, {})
    keys.expect("sparsity_config", None, {}, {"format": "dense"})
    name = keys.take("format")
    groups = keys.take("config_groups")
    keys.require_empty()
    if not isinstance(groups, dict) or not groups:
        raise keys.error("config_groups", groups, "List at least one group of matrices")
    found: dict[Scheme, bool] = {}
    for label, group in groups.items():
        scheme, asymmetric = _read_scheme(Keys(f"{keys.where}: {label}", group), name)
        found[scheme] = found.get(scheme, True) and asymmetric
    return found


def _read_scheme(keys: Keys, default: Any) -> tuple[Scheme, bool]:
    """Returns the format of one group of matrices, and whether it is asymmetric.

    Args:
      default: name of the folder's format, which a group may override.
    """
    keys.drop({"targets"})
    keys.expect("output_activations", None)
    inputs = _read_inputs(keys)
    name = keys.take("format", None) or default
    weights = Keys(f"{keys.where}: weights", keys.take("weights"))
    keys.require_empty()
    weights.drop(_CALIBRATION)
    kind = weights.take("type", "int")
    bits = weights.take("num_bits")
    if name not in FORMATS or (kind, bits) not in FORMATS[name]:
        allowed = [
            f"{n} with {plural(b, 'bit')} of {k}"
            for n, row in FORMATS.items()
            for k, b in row
            if n != "naive-quantized"
        ]
        raise weights.error("num_bits", bits, f"In {name} of type {kind} it cannot be read. Use {', '.join(allowed)}")
    if (order := weights.take("actorder", None)) not in (None, False, "weight", "static"):
        raise weights.error("actorder", order, "Quantise the model with actorder=weight or without it")
    weights.expect("dynamic", False)
    weights.expect("block_structure", None)
    symmetric = weights.take("symmetric", True)
    if type(symmetric) is not bool:
        raise weights.error("symmetric", symmetric, "Use true or false")
    group = weights.take("group_size", None)
    group = None if group == -1 else group
    strategy = weights.take("strategy", None) or ("group" if group else "tensor")
    if strategy not in ("group", "channel", "tensor"):
        raise weights.error("strategy", strategy, "Use group, channel or tensor")
    if strategy == "group" and not (type(group) is int and group > 0):
        raise weights.error("group_size", group, "Give a positive number")
    weights.require_empty()
    if kind == "float" and (strategy == "group" or not symmetric):
        raise weights.error("strategy", strategy, "Use channel or tensor, with symmetric=true, for fp8")
    try:
        return Scheme(bits, group if strategy == "group" else None, kind, inputs), not symmetric
    except ConfigError as error:
        raise ConfigError(f"{keys.where}: {error}") from None


def _read_inputs(keys: Keys) -> Literal["none", "int8"]:
    """Returns the format of the inputs of a group of matrices."""
    found = keys.take("input_activations", None)
    if found is None:
        return "none"
    own = Keys(f"{keys.where}: input_activations", found)
    own.drop(_CALIBRATION)
    for key, value in INPUTS.items():
        if (given := own.take(key, None)) != value:
            raise own.error(key, given, f"Only {json.dumps(INPUTS)} is. Use null for inputs that are not quantised")
    for key in ("group_size", "block_structure", "actorder"):
        own.expect(key, None)
    own.require_empty()
    return "int8"


class QuantizedFiles:
    """The tensors of a folder as if they were not quantised: a part that is read is dequantised.

    Attributes:
      infos: the tensors by name, as in `TensorFiles`; a quantised matrix is its `weight` in the dtype of its scales.
      schemes: the formats of its matrices.

    Raises:
      ConfigError: parts of a quantised matrix that are missing or do not fit together.
    """

    def __init__(self, files: TensorFiles, schemes: dict[Scheme, bool]) -> None:
        self._files = files
        self.schemes = schemes
        self._scheme: dict[str, Scheme] = {}
        self.infos = {name: info for name, info in files.infos.items() if not name.endswith(PARTS)}
        for part in files.infos:
            if part.endswith((".weight_packed", ".weight_scale")):
                name = part.removesuffix("_packed").removesuffix("_scale")
                self.infos[name] = self._info(name)

    def __exit__(self, *_: object) -> None:
        self._files.__exit__()

    def scheme_of(self, name: str) -> Scheme | None:
        """Returns the format of a matrix, or `None` if it is not quantised."""
        return self._scheme.get(name)

    def _info(self, name: str) -> TensorInfo:
        """Returns shape and dtype of a quantised matrix, and keeps its format."""
        held = self._files.infos
        packed = f"{name}_packed" in held
        stored = name + "_packed" * packed
        for part in (stored, f"{name}_scale", *([f"{name}_shape"] * packed)):
            if part not in held:
                raise ConfigError(
                    f"{self._files.folder} has parts of the quantised matrix {name}, but not {part}. Fetch or save it "
                    f"again."
                )
        codes = held[stored]
        scale = held[f"{name}_scale"]
        if f"{name}_g_idx" in held:
            raise ConfigError(
                f"{codes.file}: {name}_g_idx assigns inputs to groups in another order, which is not supported. "
                f"Quantise the model with actorder=weight or without it."
            )
        shape = codes.shape
        if packed:
            length = (slice(None),) * len(held[f"{name}_shape"].shape)
            shape = tuple(int(n) for n in self._files.read(f"{name}_shape", length).ravel()[:3])
        for scheme, asymmetric in self.schemes.items():
            if len(shape) == 2 and _fits(scheme, shape, codes, scale):
                if asymmetric and f"{name}_zero_point" not in held:
                    raise ConfigError(
                        f"{codes.file}: {name} has no {name}_zero_point, which symmetric=false requires. Fetch or save "
                        f"it again."
                    )
                self._scheme[name] = scheme
                return TensorInfo(codes.file, shape, scale.dtype)
        raise ConfigError(
            f"{codes.file}: {name} of shape {list(shape)} has {codes.dtype} codes {list(codes.shape)} and scales "
            f"{list(scale.shape)}, which is not {' or '.join(sorted(map(str, self.schemes)))}. Fetch or save it again."
        )

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a part of a tensor; of a quantised matrix its values, float32."""
        if name not in self._scheme:
            return self._files.read(name, index)
        shape = self.infos[name].shape
        scheme = self._scheme[name]
        index += (slice(None),) * (2 - len(index))
        rows, cols = (slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))
        values = self._codes(name, rows, cols).astype(np.float32)
        scale = self._files.infos[f"{name}_scale"].shape
        if len(scale) < 2:  # one for the matrix
            return values * self._files.read(f"{name}_scale", (slice(None),) * len(scale)).astype(np.float32)
        size = shape[1] // scheme.groups(shape[1])
        groups = slice(cols.start // size, -(-cols.stop // size))
        of_input = np.arange(cols.start, cols.stop) // size - groups.start
        if f"{name}_zero_point" in self._files.infos:
            values -= self._zero_points(name, rows, groups)[:, of_input]
        return values * self._files.read(f"{name}_scale", (rows, groups)).astype(np.float32)[:, of_input]

    def _codes(self, name: str, rows: slice, cols: slice) -> np.ndarray:
        """Returns a part of the codes of a matrix."""
        if f"{name}_packed" not in self._files.infos:
            return self._files.read(name, (rows, cols))
        bits = self._scheme[name].bits
        per = 32 // bits
        words = slice(cols.start // per, -(-cols.stop // per))
        codes = unpack(self._files.read(f"{name}_packed", (rows, words)), bits)
        return codes[:, cols.start - words.start * per :][:, : cols.stop - cols.start]

    def _zero_points(self, name: str, rows: slice, groups: slice) -> np.ndarray:
        """Returns the codes of zero of some outputs and groups, float32."""
        zeros = f"{name}_zero_point"
        bits = self._scheme[name].bits
        if self._files.infos[zeros].dtype != "I32":
            return self._files.read(zeros, (rows, groups)).astype(np.float32)
        per = 32 // bits
        words = slice(rows.start // per, -(-rows.stop // per))
        found = unpack(self._files.read(zeros, (words, groups)).T, bits).T
        return found[rows.start - words.start * per :][: rows.stop - rows.start].astype(np.float32)


def _fits(scheme: Scheme, shape: tuple[int, ...], codes: TensorInfo, scale: TensorInfo) -> bool:
    """Returns whether a matrix of this shape [O, I] has codes and scales of a format."""
    stored = {"I32": (shape[0], -(-shape[1] * scheme.bits // 32))}.get(codes.dtype, shape)
    dtypes = {row.get((scheme.kind, scheme.bits)) for row in FORMATS.values()}
    whole = scheme.group is None and scale.shape in ((), (1,))
    exact = scheme.group is None or shape[1] % scheme.group == 0
    groups = whole or (exact and scale.shape == (shape[0], scheme.groups(shape[1])))
    return codes.dtype in dtypes and codes.shape == stored and groups
