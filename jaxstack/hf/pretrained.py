"""A Hugging Face folder as a model with its parameters, and a model's parameters as a folder."""

import json
import re
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack.common.tree import flatten, path_of
from jaxstack.config import ConfigError, ModelConfig
from jaxstack.hf import configs, safetensors, weights
from jaxstack.models import decoder
from jaxstack.models.context import Context
from jaxstack.models.params import Param, flat_spec, map_spec

PREFIXES = ("transformer.", "model.")  # which a model saved without its head does not write


class PretrainedFolder:
    """A folder with a `config.json` and `model*.safetensors`, checked whole; parameters are read when asked for.

    Use as a context manager: leaving it closes the files.

    Attributes:
      folder: where it lies.
      family: its `model_type`.
      model: what its `config.json` says.
      ignored_values: values of it that act on training alone and are not taken over.
      dtypes: of its tensors, in safetensors' words.

    Raises:
      ConfigError: a family, key or value that we do not have, damaged files, or tensors that are not those of the
        model: too few, too many, of another shape or dtype.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.family, self.model, self.ignored_values = configs.read_config(folder)
        self._spec = decoder.spec(self.model)
        self._tensors = safetensors.TensorFiles(folder)
        try:
            self._names = self._match_names()
        except ConfigError:
            self._tensors.__exit__()
            raise
        self.dtypes = sorted({self._tensors.infos[name].dtype for name in self._names.values()})

    def __enter__(self) -> "PretrainedFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self._tensors.__exit__()

    def _match_names(self) -> dict[str, str]:
        """Their names by the table's; both are the same but for a prefix."""
        held = {name: h for name, h in self._tensors.infos.items() if not re.fullmatch(weights.BUFFERS, name)}
        many = max(prod(p.shape[: p.batch_axes]) for p in flat_spec(self._spec).values())
        if many > len(held):  # before they are listed: the number may be absurd
            raise ConfigError(
                f"{self.folder} holds {len(held)} tensors, but by its config.json {many} of one kind alone"
            )
        expected = weights.hf_tensors(self.family, self._spec)
        prefix = next(p for p in PREFIXES if any(name.startswith(p) for name in expected))
        bare = not any(name.startswith(prefix) for name in held)
        names = {name: name.removeprefix(prefix) if bare else name for name in expected}
        if self.model.tied_embeddings and "lm_head.weight" in held:
            table = weights.WEIGHT_MAPS[self.family]["embedding/tokens"][0]
            self._require_equal("lm_head.weight", table.removeprefix(prefix) if bare else table)
            del held["lm_head.weight"]
        for what, found in (
            ("lacks", sorted(set(names.values()) - held.keys())),
            ("holds, beyond the model's,", sorted(held.keys() - set(names.values()))),
        ):
            if found:
                raise ConfigError(
                    f"{self.folder} {what} {weights.format_names(found)}; its tensors and its config.json must "
                    f"be of one {self.family} model"
                )
        for name, tensor in expected.items():
            info = held[names[name]]
            if info.shape != tensor.shape:
                raise ConfigError(
                    f"{info.file}: {names[name]} is {list(info.shape)}, but {list(tensor.shape)} by config.json; "
                    f"the two must be of one model"
                )
            if info.dtype not in safetensors.DTYPES:
                raise ConfigError(
                    f"{info.file}: {names[name]} is of dtype {info.dtype}; save it as one of "
                    f"{', '.join(safetensors.DTYPES)}"
                )
        return names

    def _require_equal(self, one: str, other: str) -> None:
        """A tied head may be stored a second time, if it is the same."""
        infos = self._tensors.infos
        equal = other in infos and infos[one].shape == infos[other].shape
        rows = infos[one].shape[0] if equal and infos[one].shape else 0
        for start in range(0, rows, 1024):
            part = (slice(start, min(start + 1024, rows)),)
            equal = equal and np.array_equal(self._tensors.read(one, part), self._tensors.read(other, part))
        if not equal:
            raise ConfigError(
                f"{self.folder} has tie_word_embeddings=true, but {one} is not {other}; with false both are read"
            )

    def read_params(self, ctx: Context | None = None) -> Any:
        """The parameters as `model.spec` declares them, float32, each shard read where it belongs and no more.

        Args:
          ctx: the mesh and how parameters lie on it, a pipeline's stages included; by default one device.
        """
        ctx = ctx or Context()
        layers = None if ctx.pipeline is None else ctx.pipeline.stages.layer_of_slot
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        where = map_spec(lambda p: one, self._spec) if ctx.mesh is None else ctx.parameters(self._spec)
        rows = weights.weight_map(self.family, self._spec)

        def fetch(name: str, index: tuple[slice, ...]) -> np.ndarray:
            return self._tensors.read(self._names[name], index)

        def place(keys: tuple[Any, ...], p: Param, lies: Any) -> jax.Array:
            sharding = lies if ctx.mesh is None else ctx.sharding(lies)
            row = rows[path_of(keys)]
            read = lambda index: weights.read_param(p, row, fetch, index, layers)  # noqa: E731
            return jax.make_array_from_callback(p.shape, sharding, read)

        stored = ctx.pad_to_stages(self._spec)
        return jax.tree_util.tree_map_with_path(place, stored, where, is_leaf=lambda x: isinstance(x, Param))


def save_pretrained(folder: Path, cfg: ModelConfig, values: Any, dtype: str, seq_len: int, end: int | None) -> str:
    """Writes `config.json` and tensors into an empty folder, such that `transformers` loads them.

    Args:
      folder: where.
      cfg: the model; it must be one of a family's.
      values: its parameters, on the CPU, each in one piece.
      dtype: of the tensors, `float32` or `bfloat16`.
      seq_len: tokens that it was trained on, for a model that does not say how far its positions reach.
      end: token at the end of a document.

    Returns:
      The family.
    """
    family, spec = configs.family_of(cfg), decoder.spec(cfg)
    declared, leaves, kind = flat_spec(spec), flatten(values), jnp.dtype(dtype)
    assert {path: leaf.shape for path, leaf in leaves.items()} == {path: p.shape for path, p in declared.items()}
    tensors = weights.hf_tensors(family, spec)
    sizes = {name: kind.itemsize * prod(tensor.shape) for name, tensor in tensors.items()}
    made = ((name, weights.build_tensor(tensor, declared, leaves, kind)) for name, tensor in tensors.items())
    safetensors.write_tensors(folder, sizes, made)
    config = configs.to_json(family, cfg, seq_len, end) | {"torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return family
