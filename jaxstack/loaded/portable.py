"""Writes a model as a portable program: StableHLO by `jax.export`, with the parameters as its arguments.

The program needs no code of this package: `jax.export.deserialize` reads it, and a later JAX runs it on each platform
that it was lowered for. It takes the parameters and the arrays of a batch that the forward pass reads.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.errors import InconclusiveDimensionOperation
from jax.interpreters import partial_eval

from jaxstack import families
from jaxstack.common.tree import Batch, PyTree, flatten
from jaxstack.config import ConfigError, DataConfig, ModelConfig
from jaxstack.generate.engine import dropless
from jaxstack.models import params as parameters
from jaxstack.models.batches import BatchArray, BatchSpec
from jaxstack.models.context import Context
from jaxstack.models.params import Params

PROGRAM = "program.jax"
"""File of the program, as `jax.export` serializes it."""
PARAMS = "params.npz"
"""File of the parameters, by their path."""
STABLEHLO = "program.mlir.bc"
"""File of the same program as a portable artifact of StableHLO, for other compilers."""
DESCRIPTION = "program.json"
"""File that names inputs, outputs and platforms."""


@dataclass(frozen=True)
class PortableModel:
    """A program with its parameters.

    Attributes:
      exported: the function `(params, batch) -> outputs` of dicts of arrays.
      params: its first argument, by path. Arrays in bfloat16 have their bits as uint16, which every NumPy stores.
      description: inputs, outputs and platforms, as JSON.
    """

    exported: export.Exported
    params: dict[str, np.ndarray]
    description: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Writes the files to an existing folder."""
        (folder / PROGRAM).write_bytes(self.exported.serialize())
        (folder / STABLEHLO).write_bytes(self.exported.mlir_module_serialized)
        np.savez(folder / PARAMS, **self.params)  # type: ignore[arg-type]
        (folder / DESCRIPTION).write_text(json.dumps(self.description, indent=1) + "\n", "utf-8")


def make(
    model: ModelConfig,
    data: DataConfig,
    values: Params,
    platforms: Sequence[str],
    batch_size: int | None = None,
    dtype: str = "float32",
) -> PortableModel:
    """Returns the forward pass of a model as a portable program. Experts have no capacity limit, as in generation.

    Args:
      model: the model, without adapters.
      data: has the length of sequences.
      values: the parameters, float32.
      platforms: platforms that can run the program: `cpu`, `cuda`, `tpu`.
      batch_size: number of rows. `None` means any number.
      dtype: dtype of the computation and of stored matrices and tables.

    Raises:
      ConfigError: the family has no outputs to export, or the program needs a fixed number of rows.
    """
    model = dropless(model)
    if model.family == "diffusion":
        raise ConfigError(
            "model.family=diffusion makes a picture in many steps, and one program has one step. Use `jaxstack "
            "generate`."
        )
    names = {path for path, p in parameters.flat_spec(families.spec(model)).items() if p.is_cast}
    names = names if dtype == "bfloat16" else set()
    outputs = _outputs(model, Context(dtype=jnp.dtype(dtype)), names)
    stored = {path: _stored(value, path in names) for path, value in flatten(values).items()}
    arguments = {path: jax.ShapeDtypeStruct(a.shape, a.dtype) for path, a in stored.items()}
    inputs = _read(outputs, arguments, _batch(model, replace(data, batch_size=batch_size or 1)))
    rows = batch_size if batch_size is not None else export.symbolic_shape("batch")[0]
    shapes = {name: jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype) for name, a in inputs.items()}
    try:
        exported = export.export(jax.jit(outputs), platforms=tuple(platforms))(arguments, shapes)
    except InconclusiveDimensionOperation as error:
        raise ConfigError(
            f"model.moe.num_experts={model.moe.num_experts} sorts the tokens of a batch, for which JAX needs "
            f"to know their number. Set the number of rows, such as --batch_size=1."
        ) from error
    tree = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    description = {
        "family": model.family,
        "dtype": dtype,
        "platforms": list(exported.platforms),
        "jax": jax.__version__,
        "inputs": {name: _described(a) for name, a in shapes.items()},
        "outputs": {name: _described(a) for name, a in tree.items()},
    }
    return PortableModel(exported, stored, description)


def _outputs(model: ModelConfig, ctx: Context, in_bits: set[str]) -> Callable[..., PyTree]:
    """Returns the function to export.

    Args:
      in_bits: paths of the parameters whose arrays are the bits of bfloat16.
    """
    family = families.of(model)
    spec = families.spec(model)
    paths = list(parameters.flat_spec(spec))
    structure = jax.tree.structure(parameters.map_spec(lambda _: 0, spec))

    def outputs(stored: Mapping[str, jax.Array], batch: Batch) -> PyTree:
        arrays = [
            jax.lax.bitcast_convert_type(stored[path], jnp.bfloat16) if path in in_bits else stored[path]
            for path in paths
        ]
        params = jax.tree.unflatten(structure, arrays)
        hidden, _ = family.hidden_states(model, params, batch, ctx)
        if family.features is not None:
            pictures, texts = family.features(model, params, hidden, batch, ctx)
            return {"picture_features": pictures, "text_features": texts}
        logits = family.logits(model, params, hidden, ctx)
        named = logits if isinstance(logits, dict) else {"logits": logits}
        return {name: x[..., : model.classes] for name, x in named.items()}  # without padding

    return outputs


def _batch(model: ModelConfig, data: DataConfig) -> BatchSpec:
    """Returns the arrays of a batch whose rows have one text each; encoders also read where its padding begins."""
    arrays = families.batch_spec(model, replace(data, packing=False))
    if model.family == "encoder":
        arrays.setdefault("segment_ids", BatchArray(arrays["tokens"].shape, "one_document"))
    return arrays


def _read(outputs: Any, arguments: PyTree, batch: BatchSpec) -> BatchSpec:
    """Returns those arrays of a batch that the outputs depend on."""
    shapes = {name: jax.ShapeDtypeStruct(batch[name].shape, batch[name].dtype) for name in sorted(batch)}
    program = jax.make_jaxpr(outputs)(arguments, shapes).jaxpr
    _, used = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))
    return {name: batch[name] for name, is_used in zip(shapes, used[-len(shapes) :], strict=True) if is_used}


def _stored(value: jax.Array, in_bfloat16: bool) -> np.ndarray:
    a = np.asarray(jax.device_get(value), np.float32)
    return a.astype(jnp.bfloat16).view(np.uint16) if in_bfloat16 else a


def _described(a: Any) -> dict[str, Any]:
    """Returns shape and dtype of an array; a number of rows that is free is `batch`."""
    return {"shape": [n if isinstance(n, int) else str(n) for n in a.shape], "dtype": a.dtype.name}
