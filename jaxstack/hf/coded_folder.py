"""A folder of our own for quantised matrices of any family: integer codes, their scales, and the rest as it is.

`jaxstack compress quantize` writes it where the layouts of `transformers` have no room: for GPT-2, whose tensors join
matrices, and for families that are not decoders. Its files:

- `config.yaml` and `tokenizer.json`, as a run has them.
- `codes.json`: the format of the matrices, and which experts of which layers have 4 bits in place of 8.
- `model.safetensors`: `codes:PATH` int8 [L, (E,) O, I], of 4 bits two in a byte, lower bits first; `scales:PATH`
  [L, (E,) O, G]; and `values:PATH`, a parameter as it is stored in checkpoints. Where some experts have 4 bits, these
  are `int4:PATH` [N, O, (I + 1) / 2], and the others `codes:PATH` [N, O, I], in the order of layers and experts.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
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
    int4_experts: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Writes the two files of codes.

    Args:
      folder: the folder, which exists.
      model: without padding.
      values: all parameters on the host.
      codes: codes [L, (E,) O, I] and scales [L, (E,) O, G] of each quantised matrix by its path.
      bits: number of bits of a code.
      kind: `int` or `float`, see `Scheme`.
      dtype: dtype of the parameters that are not quantised.
      int4_experts: which experts have codes of 4 bits beside others of 8, bool [L, E] by the name of the stack.
    """
    tensors: dict[str, np.ndarray] = {}
    lower = int4_experts or {}
    for path, p in flat_spec(families.spec(model)).items():
        if path not in codes:
            tensors[f"values:{path}"] = np.asarray(flatten(values)[path]).astype(jnp.dtype(dtype))
            continue
        numbers, scales = codes[path]
        if (its := _of_path(lower, path, p)) is not None:
            tensors[f"int4:{path}"] = pack(numbers[its])
            numbers = numbers[~its]
        stored = pack(numbers) if bits == 4 else np.ascontiguousarray(numbers).view(np.uint8)
        tensors[f"codes:{path}"] = stored
        tensors[f"scales:{path}"] = scales.astype(np.float32)
    safetensors.save_file(tensors, folder / FILE)
    told: dict[str, object] = {"version": 1, "bits": bits, "kind": kind}
    if lower:
        told["int4_experts"] = {name: [np.flatnonzero(row).tolist() for row in its] for name, its in lower.items()}
    (folder / _FORMAT).write_text(json.dumps(told) + "\n")


def _of_path(int4_experts: Mapping[str, np.ndarray], path: str, p: Param) -> np.ndarray | None:
    """Returns which experts of a parameter have 4 bits [L, E]; `None` if it has one format for all."""
    return int4_experts.get(path.partition("/")[0]) if p.batch_axes > 1 else None


class CodedFolder:
    """A folder of `write`. Parameters are read later. Use it as a context manager, like `PretrainedFolder`.

    Attributes:
      folder: the path of the folder.
      model: its model, without adapters and padding.

    Raises:
      ConfigError: a damaged file, or one that does not match the model.
    """

    _int4_experts: Mapping[str, np.ndarray] = MappingProxyType({})

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
        if "int4_experts" in told:
            self._int4_experts = self._read_experts(told["int4_experts"])

    def _read_experts(self, told: Any) -> dict[str, np.ndarray]:
        """Returns which experts have 4 bits [L, E], by the name of the stack.

        Raises:
          ConfigError: the model does not have them.
        """
        stacks = families.of(self.model).stacks(self.model)
        chosen = {name: np.zeros((one.depth, self.model.moe.num_experts), bool) for name, one in stacks.items()}
        try:
            if {*told} != {*chosen}:
                raise KeyError(", ".join(map(str, told)))
            for name, rows in told.items():
                for row, experts in zip(chosen[name], rows, strict=True):
                    row[experts] = True
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.folder / _FORMAT} has experts that its config.yaml does not have ({error}). Make the folder "
                f"again with `jaxstack compress quantize`."
            ) from None
        return chosen

    def __enter__(self) -> "CodedFolder":
        return self

    def __exit__(self, *_: object) -> None:
        return

    def read_params(self, ctx: Context | None = None, pad_vocab_to: int | None = None) -> Params:
        """Returns the parameters with the values that the codes stand for, float32, sharded for a mesh.

        Each process reads the complete file. For `pad_vocab_to` see `PretrainedFolder.read_params`.
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
            if (its := _of_path(self._int4_experts, path, p)) is not None:
                lower = unpack(read("int4"), inputs) if f"int4:{path}" in tensors.infos else numbers[:0]
                if (len(lower), len(numbers)) != (its.sum(), (~its).sum()):
                    raise ConfigError(
                        f"{self.folder / FILE} and its {_FORMAT} have different experts of {path}. Use the files of "
                        f"one command."
                    )
                both = np.zeros((*its.shape, *numbers.shape[1:]), np.int8)
                both[its] = lower
                both[~its] = numbers
                numbers = both
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
