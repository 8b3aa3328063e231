"""Folders with matrices in nf4, in the layout of the bitsandbytes library, which transformers and vLLM read.

The numbers of NAME.weight [O, I] are taken in rows, and each block of 64 (or another size) has a scale. They are stored
as NAME.weight, uint8 [O * I / 2, 1], two positions in `NF4` to a byte, the first in the high bits. Beside it are
NAME.weight.absmax with the scales, NAME.weight.quant_map with the numbers, and NAME.weight.quant_state... with shape,
dtype and size of a block as JSON. Scales may be of 8 bits themselves ("double quantisation"), with a scale for 256.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jaxstack.common.counts import plural
from jaxstack.config import ConfigError
from jaxstack.config.scheme import NF4_GROUPS, Scheme
from jaxstack.hf.compressed import Codes
from jaxstack.hf.configs import JsonObject, Keys
from jaxstack.hf.safetensors import TensorFiles, TensorInfo
from jaxstack.kernels.rounding import NF4

METHOD = "bitsandbytes"
_STATE = ".quant_state.bitsandbytes__nf4"
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", _STATE)
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_NO_EFFECT = {
    "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant", "llm_int8_enable_fp32_cpu_offload",
    "llm_int8_has_fp16_weight", "llm_int8_skip_modules", "llm_int8_threshold",
}  # fmt: skip
"""Keys of `quantization_config` that do not change values: the tensors show which matrices are quantised, and how."""


def to_json(codes: Codes, linear: Iterable[str], dtype: str) -> JsonObject:
    """Returns the `quantization_config` of a folder.

    Args:
      linear: names of all tensors that are weights of linear layers.
      dtype: dtype of what is not quantised, in which transformers computes.
    """
    return {
        "quant_method": METHOD,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": dtype,
        "llm_int8_skip_modules": sorted({"lm_head", *(n.removesuffix(".weight") for n in linear if n not in codes)}),
    }


def tensor_sizes(name: str, codes: np.ndarray, scales: np.ndarray, dtype: str) -> dict[str, int]:
    """Returns the bytes of each tensor of `to_tensors`, in their order."""
    return {part: array.nbytes for part, array in _small(name, codes, scales, dtype).items()} | {name: codes.size // 2}


def to_tensors(name: str, codes: np.ndarray, scales: np.ndarray, dtype: str) -> dict[str, np.ndarray]:
    """Returns the tensors that hold a quantised matrix.

    Args:
      name: name of the matrix, which ends with `weight`.
      codes: [O, I], numbers of `NF4`.
      scales: [O, G], float32.
      dtype: dtype that the matrix has when it is not quantised.
    """
    numbers = np.asarray(NF4, np.float32)
    found = np.searchsorted(numbers, codes).astype(np.uint8)
    assert (numbers[found] == codes).all(), "a code is not in nf4"
    high, low = found.reshape(-1, 2).T
    return _small(name, codes, scales, dtype) | {name: (high << 4 | low)[:, None]}


def _small(name: str, codes: np.ndarray, scales: np.ndarray, dtype: str) -> dict[str, np.ndarray]:
    """Returns the tensors of a matrix besides its codes."""
    state = {
        "quant_type": "nf4",
        "blocksize": codes.shape[1] // scales.shape[1],
        "dtype": dtype,
        "shape": list(codes.shape),
    }
    return {
        f"{name}.absmax": scales.astype(np.float32).ravel(),
        f"{name}.quant_map": np.asarray(NF4, np.float32),
        name + _STATE: np.frombuffer(json.dumps(state).encode(), np.uint8),
    }


def check(where: str, values: Any) -> None:
    """Checks a `quantization_config` of this method.

    Raises:
      ConfigError: a key or value that would change the result and is not supported.
    """
    keys = Keys(f"{where}: quantization_config", values)
    keys.expect("quant_method", METHOD)
    keys.drop(_NO_EFFECT)
    for prefix in ("", "_"):  # transformers writes both
        keys.expect(f"{prefix}load_in_8bit", None, False)
        keys.expect(f"{prefix}load_in_4bit", None, True)
    keys.expect("bnb_4bit_quant_type", "nf4")
    keys.expect("bnb_4bit_quant_storage", None, "uint8")
    keys.require_empty()


def _read_state(name: str, file: Path, text: bytes) -> JsonObject:
    """Returns the state of a matrix.

    Raises:
      ConfigError: it is damaged, or of another format.
    """
    try:
        state = json.loads(text)
        known = state["quant_type"] == "nf4" and state["blocksize"] in NF4_GROUPS and state["dtype"] in _DTYPES
        known &= len([int(size) for size in state["shape"]]) == 2
        if "nested_blocksize" in state:
            known &= int(state["nested_blocksize"]) > 0 and math.isfinite(state["nested_offset"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        known = False
    if not known:
        raise ConfigError(
            f"{file}: the state of {name} is {text[:200].decode(errors='replace')}, which is not supported. Use nf4 "
            f"for matrices of float32, bfloat16 or float16, or fetch the folder again."
        )
    return state


class Nf4Files:
    """The tensors of a folder as if they were not quantised: a part that is read is dequantised.

    Attributes:
      infos: the tensors by name, as in `TensorFiles`; a quantised matrix is its `weight` as it was before.
      schemes: the formats of its matrices.

    Raises:
      ConfigError: parts of a quantised matrix that are missing or do not fit together.
    """

    def __init__(self, files: TensorFiles) -> None:
        self._files = files
        self._states: dict[str, JsonObject] = {}
        self.infos = {name: info for name, info in files.infos.items() if not name.endswith(_PARTS)}
        for part in files.infos:
            if part.endswith(_STATE):
                name = part.removesuffix(_STATE)
                self.infos[name] = self._info(name)
        self.schemes = {self._scheme(state) for state in self._states.values()}

    def __exit__(self, *_: object) -> None:
        self._files.__exit__()

    def scheme_of(self, name: str) -> Scheme | None:
        """Returns the format of a matrix, or `None` if it is not quantised."""
        state = self._states.get(name)
        return None if state is None else self._scheme(state)

    @staticmethod
    def _scheme(state: JsonObject) -> Scheme:
        return Scheme(4, state["blocksize"], "normal")

    def _info(self, name: str) -> TensorInfo:
        """Returns shape and dtype of a quantised matrix, and keeps its state."""
        held = self._files.infos
        stored = held[name + _STATE].file
        state = _read_state(name, stored, self._whole(name + _STATE).tobytes())
        nested = (".nested_absmax", ".nested_quant_map") if "nested_blocksize" in state else ()
        for part in (name, f"{name}.absmax", f"{name}.quant_map", *(name + end for end in nested)):
            if part not in held:
                raise ConfigError(
                    f"{stored} has parts of the quantised matrix {name}, but not {part}. Fetch or save it again."
                )
        shape = state["shape"]
        block = state["blocksize"]
        if shape[1] % block:
            raise ConfigError(
                f"{stored}: {name} of shape {shape} has blocks of {plural(block, 'number')}, which go over rows. Use a "
                f"blocksize that divides {shape[1]}."
            )
        found = held[name].shape, held[f"{name}.absmax"].shape
        if found != ((shape[0] * shape[1] // 2, 1), (shape[0] * shape[1] // block,)):
            raise ConfigError(
                f"{stored}: {name} of shape {shape} has codes {list(found[0])} and scales {list(found[1])}, which is "
                f"not nf4 with a scale for {plural(block, 'number')}. Fetch or save it again."
            )
        if not np.array_equal(self._whole(f"{name}.quant_map"), np.asarray(NF4, np.float32)):
            raise ConfigError(f"{stored}: {name}.quant_map has other numbers than nf4. Fetch or save it again.")
        self._states[name] = state
        return TensorInfo(stored, tuple(shape), _DTYPES[state["dtype"]])

    def _whole(self, name: str) -> np.ndarray:
        return self._files.read(name, (slice(None),) * len(self._files.infos[name].shape))

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a part of a tensor; of a quantised matrix its values, float32."""
        if name not in self._states:
            return self._files.read(name, index)
        shape = self.infos[name].shape
        block = self._states[name]["blocksize"]
        index += (slice(None),) * (2 - len(index))
        rows, cols = (slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))
        width = shape[1] // 2  # bytes of a row
        held = self._files.read(name, (slice(rows.start * width, rows.stop * width), slice(None)))
        codes = np.stack([held >> 4, held & 15], axis=-1).reshape(-1, shape[1])
        scales = self._scales(name).reshape(shape[0], -1)[rows]
        values = np.asarray(NF4, np.float32)[codes] * np.repeat(scales, block, axis=1)
        return values[:, cols]

    def _scales(self, name: str) -> np.ndarray:
        """Returns the scales of a matrix, float32."""
        found = self._whole(f"{name}.absmax")
        state = self._states[name]
        if "nested_blocksize" not in state:
            return found.astype(np.float32)
        factors = np.repeat(self._whole(f"{name}.nested_absmax"), state["nested_blocksize"])[: found.size]
        return self._whole(f"{name}.nested_quant_map")[found] * factors + np.float32(state["nested_offset"])
