"""Reads and writes adapters in the format of Hugging Face's PEFT, without torch and PEFT.

A folder has an `adapter_config.json` and an `adapter_model.safetensors`. The second holds `lora_A.weight` [rank,
inputs] and `lora_B.weight` [outputs, rank] of each linear layer that has an adapter.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import DTypeLike

from jaxstack import families
from jaxstack.common import inputs
from jaxstack.common.errors import shortened
from jaxstack.common.tree import PyTree, flatten, path_of
from jaxstack.config import ConfigError, LoraConfig, ModelConfig
from jaxstack.features import adapters
from jaxstack.hf import safetensors, weights
from jaxstack.hf.tensor_layout import TensorLayout
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.models.params import Param, flat_spec

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),  # others change the base model
}
_WITHOUT_EFFECT = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout",
    "megatron_config", "megatron_core", "parent_library", "peft_version", "qalora_group_size", "r", "rank_pattern",
    "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
"""Keys that are read, or that do not change what an adapter computes. The tensors show which layers have one."""


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model.

    Attributes:
      lora: their configuration.
      values: `lora_a_*` and `lora_b_*` by path, float32, as the family's `spec` declares them.
    """

    lora: LoraConfig
    values: dict[str, np.ndarray]


@dataclass(frozen=True)
class _Matrix:
    """A matrix that may have adapters: its path and declaration, the name of its linear layer, and its layout there."""

    path: str
    p: Param
    module: str
    layout: TensorLayout

    @property
    def adapters(self) -> tuple[str, str]:
        """Returns the paths of its two adapters."""
        group, _, name = self.path.rpartition("/")
        suffix = name.removeprefix("w_")
        return f"{group}/{adapters.A}{suffix}", f"{group}/{adapters.B}{suffix}"

    @property
    def sizes(self) -> tuple[int, int]:
        """Returns the numbers of inputs and outputs."""
        lead = self.p.batch_axes
        outputs = self.p.batch_axes + self.p.in_axes
        return math.prod(self.p.shape[lead:outputs]), math.prod(self.p.shape[outputs:])


def _matrices(family: str, model: ModelConfig) -> Iterator[_Matrix]:
    spec = families.spec(model)
    stacks = families.of(model).stacks(model)
    declared = flat_spec(spec)
    for path, (name, layout) in weights.weight_map(family, spec).items():
        if path.split("/")[0] in stacks and declared[path].kind == "matrix":
            yield _Matrix(path, declared[path], name.removesuffix(".weight"), layout)


def read_adapters(folder: Path, family: str, model: ModelConfig) -> Adapters:
    """Returns the adapters of a folder.

    Ranks and scales may differ between layers (`rank_pattern`, `alpha_pattern`): smaller adapters are filled up with
    zeros, which stay zero in training, and another scale is multiplied into `lora_b_*`.

    Args:
      family: `model_type` of the base model.

    Raises:
      ConfigError: not such a folder, a method other than LoRA, or tensors that do not fit the model.
    """
    config = _read_config(folder / CONFIG)
    tensors = _read_tensors(folder)
    pairs: dict[tuple[str, tuple[int, ...]], tuple[np.ndarray, np.ndarray, float]] = {}
    used = set()
    matrices = list(_matrices(family, model))
    for matrix in matrices:
        for at in np.ndindex(*matrix.p.shape[: matrix.p.batch_axes]):
            module = matrix.layout.name(matrix.module, at)
            names = [f"{_PREFIX}{module}.lora_{part}.weight" for part in "AB"]
            if not tensors.keys() & set(names):
                continue
            rank, alpha = (_by_pattern(config, module, *keys) for keys in (("rank", "r"), ("alpha", "lora_alpha")))
            (inputs, outputs) = matrix.sizes
            for name, shape in zip(names, ((rank, inputs), (matrix.layout.joined or outputs, rank)), strict=True):
                if name not in tensors or tensors[name].shape != shape:
                    found = list(tensors[name].shape) if name in tensors else "absent"
                    raise ConfigError(
                        f"{folder / WEIGHTS}: {name} is {found}, but the model and {CONFIG} require {list(shape)}. Use "
                        f"the base model of these adapters."
                    )
            used |= set(names)
            scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            a, b = (tensors[name] for name in names)
            pairs[matrix.path, at] = a, b[matrix.layout.outputs(matrix.p).ravel()], scale
    if left := sorted(tensors.keys() - used):
        raise ConfigError(
            f"{folder / WEIGHTS} has adapters for other layers than those of a {family} model's blocks: "
            f"{weights.format_names(left)}. Merge them with PEFT's merge_and_unload, and import the model."
        )
    if not pairs:
        raise ConfigError(f"{folder / WEIGHTS} has no tensors. Save the adapters again.")
    return _stack([matrix for matrix in matrices if any(path == matrix.path for path, _ in pairs)], pairs)


def _stack(
    matrices: list[_Matrix], pairs: dict[tuple[str, tuple[int, ...]], tuple[np.ndarray, np.ndarray, float]]
) -> Adapters:
    """Returns adapters of one rank and one scale, stacked over layers, from A, B and scale of each layer."""
    rank = max(len(a) for a, _, _ in pairs.values())
    common = next(iter(pairs.values()))[2]
    values: dict[str, np.ndarray] = {}
    for matrix in matrices:
        lead = matrix.p.shape[: matrix.p.batch_axes]
        inputs, outputs = matrix.sizes
        stacked = np.zeros((*lead, inputs, rank), np.float32), np.zeros((*lead, rank, outputs), np.float32)
        for at in np.ndindex(*lead):
            if (matrix.path, at) in pairs:
                a, b, scale = pairs[matrix.path, at]
                stacked[0][at][:, : len(a)] = a.T
                stacked[1][at][: len(a)] = b.T.astype(np.float32) * np.float32(scale / common)
        split = matrix.p.batch_axes + matrix.p.in_axes
        shapes = (*matrix.p.shape[:split], rank), (*lead, rank, *matrix.p.shape[split:])
        values |= {path: x.reshape(s) for path, x, s in zip(matrix.adapters, stacked, shapes, strict=True)}
    names = dict.fromkeys(matrix.path.partition("/")[2] for matrix in matrices)  # equal ones of two stacks once
    targets = tuple(re.escape(name).replace(r"\-", "-") for name in names)
    return Adapters(LoraConfig(rank, common * rank, targets), values)


def _read_config(path: Path) -> dict[str, Any]:
    """Returns the content of an `adapter_config.json` after checking that it describes plain LoRA."""
    try:
        config = inputs.read_json(path)
        config = {"r": 8, "lora_alpha": 8, "peft_type": None} | config
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Name a folder that PEFT's save_pretrained wrote.") from None
    for key, value in config.items():
        allowed = _ALLOWED.get(key, () if key in _WITHOUT_EFFECT else (None, False, "", [], {}))
        if allowed and not any(value == one and type(value) is type(one) for one in allowed):
            raise ConfigError(
                f"{path}: {key}={shortened(json.dumps(value))} is not supported; adapters here are plain LoRA. Merge "
                f"them with PEFT's merge_and_unload, and import the model."
            )
    return config


def _by_pattern(config: dict[str, Any], module: str, name: str, usual: str) -> Any:
    """Returns `r` or `lora_alpha` of a linear layer."""
    for pattern, value in (config.get(f"{name}_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return config[usual]


def _read_tensors(folder: Path) -> dict[str, np.ndarray]:
    library = safetensors.import_safetensors()
    path = folder / WEIGHTS
    if not path.is_file():
        raise ConfigError(f"{folder} has no {WEIGHTS}. Save the adapters with PEFT's save_pretrained.")
    try:
        with library.safe_open(path, "numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is not a dictionary
    except (OSError, library.SafetensorError) as error:
        raise ConfigError(f"{path} is not a complete safetensors file: {error}. Fetch or save it again.") from None


def place(adapters: Adapters, model: ModelConfig, ctx: Context) -> PyTree:
    """Returns adapters as parameters: sharded, and with layers in the order of the pipeline's stages."""
    spec = families.spec(replace(model, lora=adapters.lora))
    spec, _ = params.partition(spec, spec)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    split = params.map_spec(lambda p: one, spec) if ctx.layout.mesh is None else ctx.layout.parameters(spec)

    def put(keys: tuple[Any, ...], p: Param, where: Any) -> jax.Array:
        value = adapters.values[path_of(keys)]
        if ctx.layout.pipeline is not None:
            layers = ctx.layout.pipeline.stages.of(path_of(keys)).layer_of_slot
            value = np.where((layers >= 0).reshape(-1, *[1] * (value.ndim - 1)), value[layers], np.float32(0))
        sharding = where if ctx.layout.mesh is None else ctx.layout.sharding(where)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return jax.tree_util.tree_map_with_path(put, spec, split, is_leaf=lambda x: isinstance(x, Param))


def save_adapters(
    folder: Path, family: str, cfg: ModelConfig, values: PyTree, dtype: DTypeLike, base: str | None
) -> None:
    """Writes the adapters of a model to an empty folder.

    Args:
      family: `model_type` of the base model.
      values: its parameters on the CPU, not sharded. Only the adapters are read.
      base: folder of the base model, if there is one.

    Raises:
      ConfigError: adapters of experts.
    """
    leaves = flatten(values)
    modules = dict[tuple[str, tuple[int, int]], list[_Matrix]]()
    for matrix in _matrices(family, cfg.base):
        if matrix.adapters[0] in leaves:
            modules.setdefault((matrix.module, matrix.layout.layers), []).append(matrix)
    if experts := [name for (name, _), (first, *_) in modules.items() if "experts" in first.p.axes]:
        raise ConfigError(
            f"the adapters of experts ({experts[0].format('N', 'M')}) have no place in PEFT's format, since "
            f"transformers joins the experts of a layer. Export the merged model, without --adapter."
        )
    tensors = {}
    ranks = dict[str, int]()
    for (module, _), matrices in modules.items():
        for layer in range(matrices[0].p.shape[0]):
            a, b = _join([tuple(np.asarray(leaves[path][layer]) for path in m.adapters) for m in matrices], matrices)
            ranks[module] = max(len(a), ranks.get(module, 0))
            place = matrices[0].layout.name(module, (layer,))
            for part, tensor in (("A", a), ("B", b)):
                name = f"{_PREFIX}{place}.lora_{part}.weight"
                tensors[name] = np.ascontiguousarray(tensor.astype(dtype))
    safetensors.save_file(tensors, folder / WEIGHTS)
    own = cfg.lora
    scale = cfg.lora.alpha / cfg.lora.rank
    others = {_short(family, cfg, module): rank for module, rank in ranks.items() if rank != own.rank}
    config = {
        "peft_type": "LORA",
        "task_type": "SEQ_2_SEQ_LM" if cfg.family == "encoder_decoder" else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": None,
        "inference_mode": True,
        "r": own.rank,
        "lora_alpha": _integer(own.alpha),
        "lora_dropout": 0.0,
        "target_modules": [*dict.fromkeys(_short(family, cfg, module) for module, _ in modules)],
        "fan_in_fan_out": family == "gpt2",  # its linear layers are [inputs, outputs]
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": others,
        "alpha_pattern": {name: _integer(scale * rank) for name, rank in others.items()},
        "modules_to_save": None,
        "init_lora_weights": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _join(pairs: list[tuple[np.ndarray, ...]], matrices: list[_Matrix]) -> tuple[np.ndarray, np.ndarray]:
    """Returns A and B of one linear layer from the adapters (a, b) of its matrices; GPT-2's attention has three in one.

    Several matrices share A if their a are equal. Otherwise A has the rows of each, and B is zero where an output does
    not read a row.
    """
    (inputs, outputs) = matrices[0].sizes
    joined = matrices[0].layout.joined or outputs
    all_a = [a.reshape(inputs, -1).T for a, _ in pairs]
    rank = len(all_a[0])
    shared = sum(matrix.sizes[1] for matrix in matrices) == joined and all(np.array_equal(all_a[0], a) for a in all_a)
    b = np.zeros((joined, rank if shared else rank * len(pairs)), np.float32)
    for i, ((_, own), matrix) in enumerate(zip(pairs, matrices, strict=True)):
        column = 0 if shared else i * rank
        b[matrix.layout.outputs(matrix.p).ravel(), column : column + rank] = own.reshape(rank, -1).T
    return (all_a[0] if shared else np.concatenate(all_a)), b


def _short(family: str, cfg: ModelConfig, module: str) -> str:
    """Returns the end of a module's name that PEFT matches: `q_proj`, or `attn.c_proj` beside an `mlp.c_proj`."""
    *_, group, last = module.split(".")
    others = {matrix.module for matrix in _matrices(family, cfg.base)} - {module}
    return f"{group}.{last}" if any(other.endswith(f".{last}") for other in others) else last


def _integer(number: float) -> float:
    return int(number) if number == int(number) else number
