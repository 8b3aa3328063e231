"""A folder of our own for quantised matrices of any family: integer codes, their scales, and the rest as it is.

`jaxstack compress quantize` writes it where the layouts of `transformers` have no room: for GPT-2, whose tensors join
matrices, and for families that are not decoders. Its files:

- `config.yaml` and `tokenizer.json`, as a run has them.
- `codes.json`: the format of the matrices.
- `model.safetensors`: `codes:PATH` int8 [L, (E,) O, I], of 4 bits two in a byte, lower bits first; `scales:PATH`
  [L, (E,) O, G]; and `values:PATH`, a parameter as it is stored in checkpoints.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack import families
from jaxstack.common import files
from jaxstack.common.tree import flatten, path_of
from jaxstack.config import ConfigError, LoraConfig, ModelConfig
from jaxstack.config.reading import parse
from jaxstack.hf import safetensors
from jaxstack.models.context import Context
from jaxstack.models.params import Param, Params, flat_spec, map_spec, pad_to_slots

FILE = safetensors.SINGLE
_FORMAT = "codes.json"
_DTYPES = {"int": np.int8, "float": jnp.float8_e4m3fn}


def is_coded(folder: Path) -> bool:
    """Returns whether a folder has the files of `write`."""
    return (folder / _FORMAT).is_file() and (folder / "config.yaml").is_file()


def pack(codes: np.ndarray) -> np.ndarray:
    """Returns codes from -8 to 7 [..., I] as uint8 [..., (I + 1) // 2], two in a byte."""
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], -1)
    nibbles = codes.astype(np.int8).view(np.uint8) & 15
    return nibbles[..., ::2] | (nibbles[..., 1::2] << 4)


def unpack(packed: np.ndarray, inputs: int) -> np.ndarray:
    """Returns the codes [..., I] that `pack` has packed, int8."""
    nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)[..., :inputs]
    return ((nibbles ^ 8).astype(np.int8) - 8).astype(np.int8)


def write(
    folder: Path,
    model: ModelConfig,
    values: Params,
    codes: Mapping[str, tuple[np.ndarray, np.ndarray]],
    bits: int,
    kind: str,
    dtype: str,
) -> None:
    """Writes the two files of codes.

    Args:
      folder: it exists.
      model: without padding.
      values: all parameters on the host.
      codes: codes [L, (E,) O, I] and scales [L, (E,) O, G] of each quantised matrix by its path.
      bits: of a code.
      kind: `int` or `float`, see `Scheme`.
      dtype: dtype of the parameters that are not quantised.
    """
    tensors: dict[str, np.ndarray] = {}
    for path in flat_spec(families.spec(model)):
        if path not in codes:
            tensors[f"values:{path}"] = np.asarray(flatten(values)[path]).astype(jnp.dtype(dtype))
            continue
        numbers, scales = codes[path]
        stored = pack(numbers) if bits == 4 else np.ascontiguousarray(numbers).view(np.uint8)
        tensors[f"codes:{path}"] = stored
        tensors[f"scales:{path}"] = scales.astype(np.float32)
    safetensors.save_file(tensors, folder / FILE)
    (folder / _FORMAT).write_text(json.dumps({"version": 1, "bits": bits, "kind": kind}) + "\n")


class CodedFolder:
    """A folder of `write`. Parameters are read later. Use it as a context manager, like `PretrainedFolder`.

    Attributes:
      folder: the path of the folder.
      model: its model, without adapters and padding.

    Raises:
      ConfigError: a damaged file, or one that does not match the model.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        run = parse.parse_config([f"--config={folder / 'config.yaml'}"])
        self.model = replace(run.model, lora=LoraConfig(), pad_vocab_to=None)
        told = files.read_json(folder / _FORMAT, "Make the folder again with `jaxstack compress quantize`.")
        known = isinstance(told, dict) and told.get("version") == 1
        if not known or told.get("bits") not in (4, 8) or told.get("kind") not in _DTYPES:
            raise ConfigError(f"{folder / _FORMAT} has another format. Make the folder again with this version.")
        self._bits: int = told["bits"]
        self._dtype = np.dtype(_DTYPES[told["kind"]])

    def __enter__(self) -> "CodedFolder":
        return self

    def __exit__(self, *_: object) -> None:
        return

    def read_params(self, ctx: Context | None = None, pad_vocab_to: int | None = None) -> Params:
        """Returns the parameters with the values that the codes stand for, float32, sharded for a mesh.

        Each process reads the complete file.
        """
        ctx = ctx or Context()
        spec = families.spec(replace(self.model, pad_vocab_to=pad_vocab_to))
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        where = map_spec(lambda p: one, spec) if ctx.layout.mesh is None else ctx.layout.parameters(spec)
        declared = flat_spec(families.spec(self.model))
        with safetensors.TensorFiles(self.folder) as tensors:
            self._check(declared, tensors.infos.keys())

            def place(keys: tuple[Any, ...], p: Param, where: Any) -> jax.Array:
                path = path_of(keys)
                value = self._value(path, declared[path], tensors)
                slots = ctx.layout.stages.of(path).layer_of_slot if ctx.layout.stages and p.stacked else None
                if slots is not None:
                    value = np.where((slots >= 0).reshape(-1, *(1,) * (value.ndim - 1)), value[slots], 0)
                if value.shape != p.shape:
                    value = np.pad(value, [(0, to - size) for size, to in zip(value.shape, p.shape, strict=True)])
                return jax.device_put(value, where if ctx.layout.mesh is None else ctx.layout.sharding(where))

            stored = pad_to_slots(spec, ctx.layout.stages)
            placed: Params = jax.tree_util.tree_map_with_path(
                place, stored, where, is_leaf=lambda x: isinstance(x, Param)
            )
        return placed

    def _check(self, declared: Mapping[str, Param], names: "set[str] | Any") -> None:
        """Checks that the file has every parameter, and nothing else."""
        found = {name.partition(":")[2] for name in names}
        if different := sorted(found ^ declared.keys()):
            raise ConfigError(
                f"{self.folder / FILE} and its config.yaml have different parameters, such as {different[0]}. Use the "
                f"files of one command."
            )

    def _value(self, path: str, p: Param, tensors: safetensors.TensorFiles) -> np.ndarray:
        """Returns one parameter, float32."""

        def read(kind: str) -> np.ndarray:
            name = f"{kind}:{path}"
            return tensors.read(name, (slice(None),) * len(tensors.infos[name].shape))

        if f"values:{path}" in tensors.infos:
            value = read("values").astype(np.float32)
        else:
            axes = p.batch_axes
            inputs = int(np.prod(p.shape[axes : axes + p.in_axes]))
            raw = read("codes")
            numbers = unpack(raw, inputs) if self._bits == 4 else raw.view(self._dtype)
            scales = read("scales")
            steps = np.repeat(scales, inputs // scales.shape[-1], axis=-1)
            rows = numbers.astype(np.float32) * steps
            if rows.size != int(np.prod(p.shape)):
                raise ConfigError(
                    f"{self.folder / FILE} has another shape of {path} than its config.yaml. Write it again."
                )
            value = np.ascontiguousarray(rows.swapaxes(-1, -2)).reshape(p.shape)
        if value.shape != p.shape:
            raise ConfigError(f"{self.folder / FILE} has another shape of {path} than its config.yaml. Write it again.")
        return value
