"""Reads the model and parameters of a Hugging Face folder, and writes a folder from a model and its parameters."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack import families
from jaxstack.common.counts import plural
from jaxstack.common.tree import PyTree, flatten, path_of
from jaxstack.config import ConfigError, ModelConfig
from jaxstack.config.scheme import Scheme
from jaxstack.families.token_prediction import without_prediction
from jaxstack.features.adapters import merge_adapters
from jaxstack.hf import configs, peft, quantized_folders, safetensors, weights
from jaxstack.hf.compressed import KEY, Codes
from jaxstack.hf.configs import NO_IDS, SpecialIds
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.models.params import Param, flat_spec, map_spec, pad_to_slots

PREFIXES = ("transformer.", "model.", "bert.", "roberta.")
"""Prefixes of tensor names that are missing if a model was saved without its head."""


def _new_name(name: str) -> str:
    """Returns the name of a tensor of BERT as newer files have it: older ones have gamma and beta in a LayerNorm."""
    return re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name))


class PretrainedFolder:
    """A folder with a `config.json` and `model*.safetensors`. The folder is checked at once, parameters are read later.

    Use it as a context manager, which closes the files.

    Attributes:
      folder: the path of the folder.
      family: the `model_type` of the model.
      model: the model that its `config.json` describes.
      ignored_values: keys and values of `config.json` that affect training alone and are not imported.
      unknown_values: keys of `config.json` that jaxstack does not read. Their values are null, false or empty.
      code: the value of `auto_map` in `config.json`, which names code in the folder. Nothing of it is run.
      dtypes: the dtypes of its tensors, as safetensors spells them; for a quantised matrix, the dtype of its scales.
      formats: the formats of its quantised matrices, which are read as dense float32 parameters.
      inputs: `int8` if the matrices of layers expect inputs rounded to 8 bits, as `train.quant=int8` rounds them.
      adapters: adapters in PEFT's format that are merged into the parameters, or `None`.

    Raises:
      ConfigError: an unsupported family, key or value, damaged files, or tensors that do not match the model: missing,
        unknown, or of another shape or dtype.
    """

    def __init__(self, folder: Path, adapter: Path | None = None) -> None:
        self.folder = folder
        self.family, self.model, self.ignored_values, self.unknown_values, self.code = configs.read_config(folder)
        self.adapters = None if adapter is None else peft.read_adapters(adapter, self.family, self.model)
        self._tensors = quantized_folders.open_tensors(folder)
        if not any(name.startswith(f"model.layers.{self.model.num_layers}.") for name in self._tensors.infos):
            self.leave_modules()
        self._spec = families.spec(self.model)
        try:
            self._names = self._match_names()
        except ConfigError:
            self._tensors.__exit__()
            raise
        self.dtypes = sorted({self._tensors.infos[name].dtype for name in self._names.values()})
        found = {} if isinstance(self._tensors, safetensors.TensorFiles) else self._tensors.schemes
        self.formats = sorted(map(str, found))
        self.inputs: Literal["none", "int8"] = "int8" if any(s.inputs == "int8" for s in found) else "none"
        if self.inputs != "none":
            self._require_all_inputs()

    def leave_modules(self) -> None:
        """Leaves out the model's modules of multi-token prediction, which a file may lack."""
        if self.model.mtp.depth:
            self.ignored_values = {**self.ignored_values, "num_nextn_predict_layers": self.model.mtp.depth}
            self.model = without_prediction(self.model)
            self._spec = families.spec(self.model)

    def __enter__(self) -> "PretrainedFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self._tensors.__exit__()

    def _require_all_inputs(self) -> None:
        """Checks that the inputs of all matrices of layers are quantised, because `train.quant` is one key for all."""
        assert not isinstance(self._tensors, safetensors.TensorFiles)
        tensors = weights.hf_tensors(self.family, self._spec)
        linear = {self._names[name] for name, tensor in tensors.items() if tensor.is_linear and "lm_head" not in name}
        other = sorted(name for name in linear if getattr(self._tensors.scheme_of(name), "inputs", "none") == "none")
        experts = self.model.moe.num_experts
        if other or experts:
            self._tensors.__exit__()
            what = "jaxstack does not round the inputs of experts" if experts else f"not those of {other[0]}"
            raise ConfigError(
                f"{self.folder} has layers whose inputs are quantised, but {what}. Set input_activations to null in "
                f"its config.json to use inputs that are not quantised."
            )

    def _match_names(self) -> dict[str, str]:
        """Returns the name in the files of each expected tensor; the two differ at most in a prefix."""
        rows = weights.weight_map(self.family, self._spec)
        read = {name for name, _ in rows.values()}
        in_file = {_new_name(name): name for name in self._tensors.infos}
        in_file = {new: own for new, own in in_file.items() if new in read or not re.fullmatch(weights.BUFFERS, own)}
        ahead = self.ignored_values.get("num_nextn_predict_layers") or 0
        last = self.model.num_layers + ahead if isinstance(ahead, int) else 0
        unread = tuple(f"model.layers.{i}." for i in range(self.model.num_layers, last))
        in_file = {new: own for new, own in in_file.items() if not new.startswith(unread)}
        self._require_constants(in_file)
        held = {name: self._tensors.infos[own] for name, own in in_file.items()}
        declared = flat_spec(self._spec)
        many = max(layout.tensors(declared[path]) for path, (_, layout) in rows.items())
        if many > len(held):  # checked before names are generated, since the number may be absurd
            raise ConfigError(
                f"{self.folder} holds {plural(len(held), 'tensor')}, but its config.json requires {many} of one kind. "
                f"Use the config.json of the same model."
            )
        expected = weights.hf_tensors(self.family, self._spec)
        prefix = next((p for p in PREFIXES if any(name.startswith(p) for name in expected)), "")
        bare = not any(name.startswith(prefix) for name in held)
        names = {name: name.removeprefix(prefix) if bare else name for name in expected}
        for copy, path in weights.copies(self.family, self.model).items():
            if copy in held and (self.model.tied_embeddings or copy != "lm_head.weight"):
                table = names[weights.WEIGHT_MAPS[self.family][path][0]]
                if table in held:
                    self._require_equal(in_file[copy], in_file[table])
                    del held[copy]
                else:  # of tensors that share memory, `safetensors.save_model` writes one
                    held[table] = held.pop(copy)
                    in_file[table] = in_file[copy]
        for what, found in (
            ("lacks", sorted(set(names.values()) - held.keys())),
            ("has unexpected tensors", sorted(held.keys() - set(names.values()))),
        ):
            if found:
                raise ConfigError(
                    f"{self.folder} {what} {weights.format_names(found)}. Use tensors and a config.json of the same "
                    f"{self.family} model."
                )
        for name, tensor in expected.items():
            info = held[names[name]]
            if info.shape != tensor.shape:
                raise ConfigError(
                    f"{info.file}: {names[name]} has shape {list(info.shape)}, but config.json requires "
                    f"{list(tensor.shape)}. Use tensors and a config.json of the same model."
                )
            if info.dtype not in safetensors.DTYPES:
                raise ConfigError(
                    f"{info.file}: {names[name]} has dtype {info.dtype}. Save it as one of "
                    f"{', '.join(safetensors.DTYPES)}."
                )
        return {name: in_file[own] for name, own in names.items()}

    def _require_constants(self, in_file: dict[str, str]) -> None:
        """Checks numbers that are the same in every model of the family, and removes their names from `in_file`."""
        for name, value in weights.constants(self.family, self.model.num_layers).items():
            own = in_file.pop(name, None)
            if own is None:
                continue
            info = self._tensors.infos[own]
            saved = self._tensors.read(own, (slice(None),) * len(info.shape))
            # Both may be rounded to bfloat16. Numbers as small as 1e-6 are 2^-24 apart in float16.
            if saved.shape != () or not np.allclose(np.float32(saved), value, rtol=2**-7, atol=2**-25):
                raise ConfigError(
                    f"{info.file}: {own} is {saved.tolist()}, and in every model of the family {self.family} it is "
                    f"{value}. Use the tensors of such a model."
                )

    def _require_equal(self, one: str, other: str) -> None:
        """Checks that a table that is stored again equals the first one."""
        infos = self._tensors.infos
        equal = other in infos and infos[one].shape == infos[other].shape
        rows = infos[one].shape[0] if equal and infos[one].shape else 0
        for start in range(0, rows, 1024):
            part = (slice(start, min(start + 1024, rows)),)
            equal = equal and np.array_equal(self._tensors.read(one, part), self._tensors.read(other, part))
        if not equal and one.endswith((".embed_tokens.weight", ".shared_head.head.weight")) and self.model.mtp.depth:
            raise ConfigError(
                f"{self.folder} has {one}, which is not equal to {other}, but modules share embedding and head with "
                f"the model. Set num_nextn_predict_layers to 0 in its config.json, and leave their tensors out."
            )
        if not equal:
            raise ConfigError(
                f"{self.folder} has tie_word_embeddings=true, but {one} is not equal to {other}. Set it to false to "
                f"read both."
            )

    def read_params(self, ctx: Context | None = None, pad_vocab_to: int | None = None) -> PyTree:
        """Returns the parameters that the family declares, float32; every device reads only its own shards.

        Args:
          ctx: the mesh, the sharding of parameters and the pipeline's stages. `None` means one device.
          pad_vocab_to: rows of the token table and the head, see `ModelConfig`. `None` means the vocabulary's size.
        """
        ctx = ctx or Context()
        spec = families.spec(replace(self.model, pad_vocab_to=pad_vocab_to))
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        where = map_spec(lambda p: one, spec) if ctx.layout.mesh is None else ctx.layout.parameters(spec)
        names = weights.weight_map(self.family, self._spec)

        def fetch(name: str, index: tuple[slice, ...]) -> np.ndarray:
            return self._tensors.read(self._names[name], index)

        def place(keys: tuple[Any, ...], p: Param, where: Any) -> jax.Array:
            sharding = where if ctx.layout.mesh is None else ctx.layout.sharding(where)
            name = names[path_of(keys)]
            stages = ctx.layout.stages if p.stacked else None
            layers = None if stages is None else stages.of(path_of(keys)).layer_of_slot

            def read(index: tuple[slice, ...] | None) -> np.ndarray:
                return weights.read_param(p, name, fetch, index, layers)

            return jax.make_array_from_callback(p.shape, sharding, read)

        stored = pad_to_slots(spec, ctx.layout.stages)
        values = jax.tree_util.tree_map_with_path(place, stored, where, is_leaf=lambda x: isinstance(x, Param))
        if self.adapters is None:
            return values
        adapters = peft.place(self.adapters, self.model, ctx)
        cfg = self.adapters.lora
        shardings = jax.tree.map(lambda a: a.sharding, values)
        merge = jax.jit(lambda a, v: merge_adapters(cfg, params.combine(a, v)), out_shardings=shardings)
        return merge(adapters, values)


def _require_linear(family: str, codes: Codes, linear: list[str]) -> None:
    """Checks that every tensor with codes is one of the weights of linear layers."""
    if other := sorted(codes.keys() - set(linear)):
        raise ConfigError(
            f"{other[0]} of the family {family} is not the weight of one linear layer and cannot be quantised. Use a "
            f"model of another family than gpt2."
        )


def save_pretrained(
    folder: Path,
    cfg: ModelConfig,
    values: PyTree,
    dtype: str,
    seq_len: int,
    ids: SpecialIds = NO_IDS,
    quantized: tuple[Scheme, Codes] | None = None,
    preferred: str | None = None,
) -> str:
    """Writes `config.json` and tensors that `transformers` can load into an empty folder, and returns the family.

    Args:
      cfg: the model, which one of the families must be able to express.
      values: its parameters on the CPU, not sharded.
      dtype: dtype of the tensors and of the scales, `float32` or `bfloat16`.
      seq_len: the sequence length of training, for a model without `max_positions`.
      ids: special ids of the run's tokenizer.
      quantized: a format, and the codes and scales of matrices by the name of their tensor. They are stored in place
        of the matrices' values. `None` stores values only.
      preferred: the family to take if several can express the model.

    Raises:
      ConfigError: no family has this model, or a quantised tensor is not the weight of a linear layer.
    """
    family = configs.family_of(cfg, preferred)
    spec = families.spec(cfg)
    declared = flat_spec(spec)
    leaves = flatten(values)
    kind = jnp.dtype(dtype)
    assert {path: leaf.shape for path, leaf in leaves.items()} == {path: p.shape for path, p in declared.items()}
    tensors = weights.with_copies(family, cfg, weights.hf_tensors(family, spec))
    config = configs.to_json(family, cfg, seq_len, ids) | {"torch_dtype": dtype}
    codes: Codes = {}
    if quantized is not None:
        scheme, codes = quantized
        linear = [name for name, tensor in tensors.items() if tensor.is_linear]
        _require_linear(family, codes, linear)
        assert all(code.shape == tensors[name].shape for name, (code, _) in codes.items())
        config[KEY] = quantized_folders.to_json(scheme, codes, linear, dtype)
    constants = weights.constants(family, cfg.num_layers)
    sizes = dict.fromkeys(constants, kind.itemsize)
    for name, tensor in tensors.items():
        if name in codes:
            sizes |= quantized_folders.tensor_sizes(name, *codes[name], scheme, kind)
        else:
            sizes[name] = kind.itemsize * prod(tensor.shape)

    def arrays() -> Iterator[tuple[str, np.ndarray]]:
        yield from ((name, np.asarray(value, kind)) for name, value in constants.items())
        for name, tensor in tensors.items():
            if name in codes:
                yield from quantized_folders.to_tensors(name, *codes[name], scheme, kind).items()
            else:
                yield name, weights.build_tensor(tensor, declared, leaves, kind)

    safetensors.write_tensors(folder, sizes, arrays())
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return family
