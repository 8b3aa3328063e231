"""Reads and writes folders with quantised matrices.

Matrices of nf4 are in the layout of bitsandbytes, and others in compressed-tensors. Experts of gpt-oss may be mxfp4,
which can only be read.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

import numpy as np

from jaxstack.common import files
from jaxstack.config.scheme import Scheme
from jaxstack.hf import bitsandbytes, compressed, mxfp4
from jaxstack.hf.compressed import KEY, Codes
from jaxstack.hf.configs import JsonObject
from jaxstack.hf.safetensors import TensorFiles

QuantizedFiles: TypeAlias = compressed.QuantizedFiles | bitsandbytes.Nf4Files | mxfp4.Mxfp4Files


def open_tensors(folder: Path) -> TensorFiles | QuantizedFiles:
    """Opens the tensors of a folder, whose config.json says whether they are quantised.

    Raises:
      ConfigError: another method or format, or damaged files.
    """
    path = folder / "config.json"
    config = files.read_json(path, "Give the model's own config.json.")
    values = config.get(KEY) if isinstance(config, dict) else None
    if values is None:
        return TensorFiles(folder)
    method = values.get("quant_method") if isinstance(values, dict) else None
    schemes: dict[Scheme, bool] = {}
    if method == bitsandbytes.METHOD:
        bitsandbytes.check(str(path), values)
    elif method == mxfp4.METHOD:
        mxfp4.check(str(path), values)
    else:
        schemes = compressed.read_schemes(str(path), values)
    tensors = TensorFiles(folder)
    try:
        if method == bitsandbytes.METHOD:
            return bitsandbytes.Nf4Files(tensors)
        if method == mxfp4.METHOD:
            return mxfp4.Mxfp4Files(tensors)
        return compressed.QuantizedFiles(tensors, schemes)
    except BaseException:
        tensors.__exit__()
        raise


def to_json(scheme: Scheme, codes: Codes, linear: Iterable[str], dtype: str) -> JsonObject:
    """Returns the `quantization_config` of a folder.

    Args:
      linear: names of all tensors that are weights of linear layers.
      dtype: dtype of what is not quantised.
    """
    if scheme.kind == "normal":
        return bitsandbytes.to_json(codes, linear, dtype)
    return compressed.to_json(scheme, codes, linear)


def tensor_sizes(name: str, codes: np.ndarray, scales: np.ndarray, scheme: Scheme, dtype: np.dtype) -> dict[str, int]:
    """Returns the bytes of each tensor of `to_tensors`, in their order."""
    if scheme.kind == "normal":
        return bitsandbytes.tensor_sizes(name, codes, scales, dtype.name)
    return compressed.tensor_sizes(name, codes, scales, scheme, dtype)


def to_tensors(
    name: str, codes: np.ndarray, scales: np.ndarray, scheme: Scheme, dtype: np.dtype
) -> dict[str, np.ndarray]:
    """Returns the tensors that hold a quantised matrix.

    Args:
      name: name of the matrix, which ends with `weight`.
      codes: [O, I], in the dtype that `compress.quantize` gives to the format's codes.
      scales: [O, G].
      dtype: dtype of what is not quantised.
    """
    if scheme.kind == "normal":
        return bitsandbytes.to_tensors(name, codes, scales, dtype.name)
    return compressed.to_tensors(name, codes, scales, scheme, dtype)
