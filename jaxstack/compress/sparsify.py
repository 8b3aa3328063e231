"""Sets a share of the weights in a model's layers to zero, one layer after the other."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack.common.counts import plural
from jaxstack.common.tree import Batch, flatten, path_of
from jaxstack.compress.calibrate import Statistics, Walk
from jaxstack.compress.quantize import DAMPS, Matrices, QuantizedLayer, as_rows, each_layer, from_rows
from jaxstack.compress.sparsity import Method, Pattern, magnitude, sparsegpt, wanda
from jaxstack.config import ConfigError, ModelConfig
from jaxstack.models.context import Context
from jaxstack.models.params import Params


@dataclass(frozen=True)
class Settings:
    """Which weights become zero.

    Attributes:
      pattern: their share.
      method: how they are chosen; `magnitude` needs no calibration batches.
    """

    pattern: Pattern
    method: Method


def check_groups(cfg: ModelConfig, pattern: Pattern) -> None:
    """Checks that groups of neighbouring inputs divide the inputs of every matrix of a model's layers.

    Raises:
      ConfigError: they do not.
    """
    walk = Walk.of(cfg, Context())
    found = {f"{name}/{path}": p for name in walk.stacks for path, p in walk.matrices_of(name).items()}
    for path, p in found.items():
        inputs = np.prod(p.shape[p.batch_axes : p.batch_axes + p.in_axes], dtype=int)
        if pattern.group and inputs % pattern.group:
            raise ConfigError(
                f"--sparsity={pattern} needs groups of {plural(pattern.group, 'input')}, but {path} has {inputs}. Use "
                f"--sparsity={pattern.fraction:g}, or another width."
            )


def sparsify(
    walk: Walk,
    params: Params,
    batches: Sequence[Batch],
    how: Settings,
    finished: Callable[[int], QuantizedLayer | None] = lambda index: None,
) -> Iterator[QuantizedLayer]:
    """Yields one layer after the other, with zeros in its matrices and without codes; see `each_layer`."""

    def compress(index: int, matrices: Matrices, layer: Params, statistics: dict[str, Statistics]) -> QuantizedLayer:
        del index
        return sparsify_layer(matrices, layer, statistics, how)

    return each_layer(walk, params, batches, compress, finished)


def sparsify_layer(
    matrices: Matrices, layer: Params, statistics: Mapping[str, Statistics], how: Settings
) -> QuantizedLayer:
    """Sets weights of the matrices of one layer to zero.

    Args:
      matrices: the matrices by path.
      layer: parameters without the axis of layers, on the host.
      statistics: statistics of the inputs of each matrix by path; may be empty for `magnitude`.

    Raises:
      ConfigError: the statistics are not finite.
    """
    old = flatten(layer)
    new = {}
    errors = {}
    for path, p in matrices.items():
        rows = as_rows(p, old[path])
        experts = rows if rows.ndim == 3 else rows[None]
        sparse = []
        removed = 0.0
        energy = 0.0
        inputs = statistics.get(path)
        for e, w in enumerate(experts):
            gram = None
            if inputs is not None:
                gram = inputs.gram if rows.ndim == 2 else inputs.gram[e]
            sparse.append(_one(path, w, gram, how))
            if gram is not None:
                removed += _energy(sparse[-1] - w, gram)
                energy += _energy(w, gram)
        new[path] = from_rows(p, np.stack(sparse).reshape(rows.shape), old[path].shape)
        if inputs is not None:
            errors[path] = removed / max(energy, 1e-30)
    layer = jax.tree_util.tree_map_with_path(lambda keys, a: new.get(path_of(keys), a), layer)
    return QuantizedLayer(layer, {}, errors)


def _energy(w: np.ndarray, gram: jax.Array) -> float:
    """Returns the sum of squared outputs of a matrix [O, I]."""
    return float(((w @ gram) * w).sum())


def _one(path: str, w: np.ndarray, gram: jax.Array | None, how: Settings) -> np.ndarray:
    """Returns one matrix [O, I] with zeros."""
    if how.method == "magnitude" or gram is None:
        return np.asarray(magnitude(w, how.pattern))
    if how.method == "wanda":
        return np.asarray(wanda(w, gram, how.pattern))
    for damp in DAMPS:
        made = np.asarray(sparsegpt(jnp.asarray(w), jnp.asarray(gram), how.pattern, damp))
        if np.isfinite(made).all():
            return made
    raise ConfigError(
        f"the inputs of layers/{path} are not finite on the calibration batches, so --method=sparsegpt cannot use "
        f"them. Use --method=magnitude, or another --step."
    )
