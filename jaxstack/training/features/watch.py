"""Which values `debug.watch` names, and the steps of a run that measure them.

A name is a path with the index of the layer: `layers/3/mlp/out` is an activation, `layers/3/mlp/w_up/gradient` the
gradient of a parameter, `/update` its change, and `/update_ratio` the norm of this change divided by that of the
parameter before it. A step returns one array for all layers of a stack, by the name without the index.
"""

import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp

from jaxstack import families
from jaxstack.common.tree import PyTree, flatten
from jaxstack.config import ConfigError, DataConfig, ModelConfig
from jaxstack.features.watching import TAPS, Watcher, moments
from jaxstack.models import params as parameters
from jaxstack.models.batches import BatchSpec
from jaxstack.models.context import Context
from jaxstack.models.params import Param, Params
from jaxstack.models.values import observed
from jaxstack.sharding.totals import Measured
from jaxstack.training.losses import Metrics
from jaxstack.training.step import Probe

KINDS = ("gradient", "update", "update_ratio")
"""What can be watched of a trained parameter."""

NEAREST = 5
"""Number of names that the message about a pattern without a match lists."""


@dataclass(frozen=True)
class Watched:
    """The values that a step measures.

    Attributes:
      model: the model.
      names: names of the values, without the index of the layer.
    """

    model: ModelConfig
    names: frozenset[str]

    @property
    def watcher(self) -> Watcher:
        """Measures the activations among them, for `Context.observer`."""
        return Watcher(frozenset(tap for tap in TAPS if any(name.endswith(f"/{tap}") for name in self.names)))


@dataclass(frozen=True)
class WatchProbe(Probe):
    """Measures the values of `watched` in a step; the metric `watch` has all of them, by name.

    `ctx` is the context of the run.
    """

    watched: Watched
    ctx: Context

    def updates(
        self, params: Params, changes: Params | None = None, new: tuple[Params, Params] | None = None
    ) -> Metrics:
        """Returns the statistics of updates, and what their ratios need, by name. A skipped step changes by zeros."""
        if changes is None:
            changes = jax.tree.map(jnp.zeros_like, params)
        if new is not None:
            changes = jax.tree.map(lambda change, a, b: change if a is b else change + (b - a), changes, *new)
        figures = self._measure("update", changes)
        before = flatten(params)
        for path, p, change in self._trained(changes):
            if f"{path}/update_ratio" in self.watched.names:
                squares = {"update": _squares(p, change), "parameter": _squares(p, before[path])}
                figures[f"{path}/update_ratio"] = Measured(_in_layer_order(self.ctx, path, p, squares))
        return figures

    def metrics(self, sums: Metrics, grads: Params, grad_norm: jax.Array, updated: Metrics) -> Metrics:
        """Returns `watch`: the activations among the sums, the statistics of gradients, and `updated`."""
        activations = {name: value for name, value in observed(sums).items() if name in self.watched.names}
        return {"watch": activations | self._measure("gradient", grads) | updated}

    def _measure(self, kind: str, tree: Params) -> Metrics:
        figures: Metrics = {}
        for path, p, x in self._trained(tree):
            if f"{path}/{kind}" in self.watched.names:
                sums, largest = moments(x, keep=p.stacked)
                padding = prod(p.shape[p.stacked :]) - prod((p.unpadded or p.shape)[p.stacked :])
                sums |= {name: sums[name] - padding for name in ("count", "zeros")}  # padding is zero
                figures[f"{path}/{kind}"] = _in_layer_order(self.ctx, path, p, Measured(sums, largest))
        return figures

    def _trained(self, tree: Params) -> Iterable[tuple[str, Param, jax.Array]]:
        arrays = flatten(tree)
        return [(path, p, arrays[path]) for path, p in trained(self.watched.model).items()]


def trained(model: ModelConfig) -> dict[str, Param]:
    """Returns the declarations of the trained parameters by path."""
    spec = families.spec(model)
    trained_spec, _ = parameters.partition(spec, spec)
    return parameters.flat_spec(trained_spec)


def _squares(p: Param, x: jax.Array) -> jax.Array:
    return jnp.square(x.astype(jnp.float32)).sum(tuple(range(p.stacked, x.ndim)))


def _in_layer_order(ctx: Context, path: str, p: Param, tree: PyTree) -> PyTree:
    """Returns arrays over the slots of all stages [R, ...] in the order of layers [L, ...]."""
    if ctx.layout.stages is None or not p.stacked:
        return tree
    slots = ctx.layout.stages.of(path).slot_of_layer
    return jax.tree.map(lambda a: a[slots], tree)


def all_names(cfg: ModelConfig, arrays: BatchSpec, dtype: str) -> dict[str, str]:
    """Returns the names of all values of a model that can be watched, each with its name without the layer's index.

    One abstract forward pass on one device gives the names of activations. Nothing is computed.

    Args:
      dtype: dtype of activations.
    """
    ctx = Context(dtype=jnp.dtype(dtype), observer=Watcher(frozenset(TAPS)))
    model = families.of(cfg)
    batch = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in arrays.items()}
    params = parameters.abstract(families.spec(cfg))
    _, values = jax.eval_shape(lambda params, batch: model.hidden_states(cfg, params, batch, ctx), params, batch)
    depths = {name: jax.tree.leaves(measured)[0].shape[0] for name, measured in observed(values).items()}
    for path, p in trained(cfg).items():
        depths |= {f"{path}/{kind}": p.shape[0] if p.stacked else None for kind in KINDS}
    found: dict[str, str] = {}
    for name, depth in depths.items():
        stack, _, rest = name.partition("/")
        found |= {name: name} if depth is None else {f"{stack}/{i}/{rest}": name for i in range(depth)}
    return found


def _by_distance(pattern: str, names: Iterable[str]) -> list[str]:
    """Returns names, the one most similar to a pattern first."""
    every = [*names]
    return difflib.get_close_matches(pattern, every, n=len(every), cutoff=0)


def watched_of(model: ModelConfig, patterns: Sequence[str], keys: DataConfig, dtype: str) -> Watched | None:
    """Returns what a run measures; `None` if `debug.watch` has no patterns.

    Args:
      model: has the values that patterns name.
      patterns: patterns of `debug.watch`.
      keys: the shape of a batch.
      dtype: dtype of activations.

    Raises:
      ConfigError: a pattern matches no name.
    """
    if not patterns:
        return None
    names = all_names(model, families.batch_spec(model, keys), dtype)
    found: set[str] = set()
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            near = {names[name]: name for name in _by_distance(pattern, names)[::-1]}  # one of each, not of each layer
            nearest = ", ".join([*near.values()][: -NEAREST - 1 : -1])
            raise ConfigError(
                f"debug.watch={pattern} matches no name. The nearest names are {nearest}. Use one of them, or * for "
                f"any text."
            )
        found |= {names[name] for name in matches}
    return Watched(model, frozenset(found))
