"""Which values `debug.watch` names, and the steps of a run that measure them.

A name is a path with the index of the layer: `layers/3/mlp/out` is an activation, `layers/3/mlp/w_up/gradient` the
gradient of a parameter, `/update` its change, and `/update_ratio` the norm of this change divided by that of the
parameter before it. A step returns one array for all layers of a stack, by the name without the index.
"""

import difflib
import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp

from jaxstack.common.tree import PyTree, flatten
from jaxstack.config import Config, ConfigError
from jaxstack.models import family, params
from jaxstack.models import watch as taps
from jaxstack.models.context import Context
from jaxstack.models.layer_inputs import Aux
from jaxstack.models.params import Param, Params
from jaxstack.sharding.totals import Measured

KINDS = ("gradient", "update", "update_ratio")
"""What can be watched of a trained parameter."""

NEAREST = 5
"""Number of names that the message about a pattern without a match lists."""


@dataclass(frozen=True)
class Watched:
    """The values that a step measures.

    Attributes:
      cfg: the run.
      names: of the values, without the index of the layer.
    """

    cfg: Config
    names: frozenset[str]

    @property
    def taps(self) -> frozenset[str]:
        """The names of activations within a layer, for `Context.watch`."""
        return frozenset(tap for tap in taps.TAPS if any(name.endswith(f"/{tap}") for name in self.names))

    def activations(self, sums: Aux) -> dict[str, Measured]:
        """Returns the activations among the sums of a step, by name."""
        return {name: value for name, value in taps.only(sums).items() if name in self.names}

    def gradients(self, ctx: Context, grads: Params) -> dict[str, Measured]:
        """Returns the statistics of gradients, before they are clipped, by name."""
        return self._measure("gradient", ctx, grads)

    def updates(
        self, ctx: Context, values: Params, changes: Params | None = None, moved: tuple[Params, Params] | None = None
    ) -> dict[str, Measured]:
        """Returns the statistics of updates, and what their ratios need, by name.

        Args:
          ctx: execution context.
          values: trained parameters before the update.
          changes: what the optimizer adds to them. `None` means zeros, for a step that is skipped.
          moved: the parameters before and after the biases of routers were moved, which is not done by the optimizer.
        """
        changes = jax.tree.map(jnp.zeros_like, values) if changes is None else changes
        if moved is not None:
            changes = jax.tree.map(lambda u, a, b: u if a is b else u + (b - a), changes, *moved)
        found = self._measure("update", ctx, changes)
        before = flatten(values)
        for path, p, change in self._trained(changes):
            if f"{path}/update_ratio" in self.names:
                parts = (_in_layer_order(ctx, path, p, _squares(p, x)) for x in (change, before[path]))
                found[f"{path}/update_ratio"] = Measured(dict(zip(("update", "parameter"), parts, strict=True)))
        return found

    def _measure(self, kind: str, ctx: Context, tree: Params) -> dict[str, Measured]:
        found = {}
        for path, p, x in self._trained(tree):
            if f"{path}/{kind}" in self.names:
                sums, largest = taps.moments(x, keep=p.stacked)
                padding = prod(p.shape[p.stacked :]) - prod((p.unpadded or p.shape)[p.stacked :])
                sums |= {name: sums[name] - padding for name in ("count", "zeros")}  # padding is zero
                measured: Measured = _in_layer_order(ctx, path, p, Measured(sums, largest))
                found[f"{path}/{kind}"] = measured
        return found

    def _trained(self, tree: Params) -> Iterable[tuple[str, Param, jax.Array]]:
        arrays = flatten(tree)
        return [(path, p, arrays[path]) for path, p in trained(self.cfg).items()]


def trained(cfg: Config) -> dict[str, Param]:
    """Returns the declarations of the trained parameters by path."""
    spec = family.spec(cfg.model)
    return params.flat_spec(params.partition(spec, spec)[0])


def _squares(p: Param, x: jax.Array) -> jax.Array:
    return jnp.square(x.astype(jnp.float32)).sum(tuple(range(p.stacked, x.ndim)))


def _in_layer_order(ctx: Context, path: str, p: Param, tree: PyTree) -> PyTree:
    """Returns arrays over the slots of all stages [R, ...] in the order of layers [L, ...]."""
    if ctx.layout.stages is None or not p.stacked:
        return tree
    slots = ctx.layout.stages.of(path).slot_of_layer
    return jax.tree.map(lambda a: a[slots], tree)


def all_names(cfg: Config) -> dict[str, str]:
    """Returns the names of all values of a model that can be watched, each with its name without the layer's index.

    Those of activations are what one abstract forward pass returns on one device. Nothing is computed.
    """
    ctx = Context(dtype=jnp.dtype(cfg.train.dtype), watch=frozenset(taps.TAPS))
    model = family.of(cfg.model)
    batch = {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in model.batch_spec(cfg).items()}
    values = params.abstract(family.spec(cfg.model))
    _, aux = jax.eval_shape(lambda values, batch: model.hidden_states(cfg.model, values, batch, ctx), values, batch)
    depths = {name: jax.tree.leaves(measured)[0].shape[0] for name, measured in taps.only(aux).items()}
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


def watched_of(cfg: Config) -> Watched | None:
    """Returns what a run measures; `None` if `debug.watch` is empty.

    Raises:
      ConfigError: a pattern matches no name.
    """
    if not cfg.debug.patterns:
        return None
    names = all_names(cfg)
    found: set[str] = set()
    for pattern in cfg.debug.patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            near = {names[name]: name for name in _by_distance(pattern, names)[::-1]}  # one of each, not of each layer
            nearest = ", ".join([*near.values()][: -NEAREST - 1 : -1])
            raise ConfigError(
                f"debug.watch={pattern} matches no name. The nearest names are {nearest}. Use one of them, or * for "
                f"any text."
            )
        found |= {names[name] for name in matches}
    return Watched(cfg, frozenset(found))
