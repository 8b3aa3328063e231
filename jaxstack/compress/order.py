"""Measures an order of layers and experts: the loss of the model without each of them, or with it quantised.

Every variant is the same program with other parameters, so that one compilation measures all of them. A layer without
outputs adds nothing to the residual stream, as if it were not there. An expert that the router never chooses leaves its
tokens to the others, as if it had been pruned.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack import families
from jaxstack.common.tree import Batch, PyTree, flatten, path_of
from jaxstack.compress.calibrate import Measure, Walk
from jaxstack.config import Config, ConfigError, ModelConfig
from jaxstack.config.scheme import Scheme
from jaxstack.models.blocks import Stack
from jaxstack.models.context import Context
from jaxstack.models.params import Params
from jaxstack.tracking.step_log import mean_losses
from jaxstack.training.assemble import make_eval_step, objective_of
from jaxstack.training.features import qat

OUTPUTS = ("w_o", "b_o", "w_down", "b_down")
"""Names of the parameters of a layer whose results are added to the residual stream."""
NEVER = -1e9
"""Bias with which a router does not choose an expert."""


class Row(NamedTuple):
    """What a part of a model is worth.

    Attributes:
      stack: name of the stack.
      layer: index of the layer in its stack.
      expert: index of the expert. `None` means the whole layer.
      loss: loss of the model without the part, or with the part quantised.
    """

    stack: str
    layer: int
    expert: int | None
    loss: float


@dataclass(frozen=True)
class Order:
    """Measures the parts of a model on batches.

    Attributes:
      cfg: the run on one device, with a model without adapters.
      ctx: how its model is computed.
      params: the parameters of its model.
      batches: on the device.
      scheme: the format of a part that is quantised. `None` means that it is removed.
    """

    cfg: Config
    ctx: Context
    params: Params
    batches: Sequence[Batch]
    scheme: Scheme | None = None

    def __post_init__(self) -> None:
        model = self.cfg.model
        if model.states_key:
            raise ConfigError(f"{model.states_key}: layers with states are not measured. Use a model without them.")
        if model.mixes_experts:
            raise ConfigError(
                "model.moe.layers leaves layers without experts, and layers of two kinds are not measured. Use a model "
                "whose layers all have experts, or none."
            )
        if model.norm_after and self.scheme is None:
            raise ConfigError(
                "model.norm_after=true normalises the residual stream in each layer, so that a layer without outputs "
                "is not the same as no layer. Use --by=int8 or --by=int4, or `jaxstack compress prune --layers`."
            )

    @cached_property
    def whole(self) -> float:
        """The loss of the model as it is."""
        return self._loss(self._biased, self._prepared)

    def layers(self) -> Iterator[Row]:
        """Yields the loss for each layer of each stack."""
        for name, stack in self._stacks.items():
            for layer in range(stack.depth):
                yield Row(name, layer, None, self._loss(self._biased, self._without_layer(name, layer)))

    def experts(self) -> Iterator[Row]:
        """Yields the loss for each expert of each layer, or nothing where none can be removed; see `why_no_experts`."""
        if self.why_no_experts is not None:
            return
        for name, stack in self._stacks.items():
            if "moe" not in self.params[name]:
                continue
            for layer in range(stack.depth):
                for expert in range(self.cfg.model.moe.num_experts):
                    yield Row(name, layer, expert, self._loss(self._biased, self._without_expert(name, layer, expert)))

    @property
    def why_no_experts(self) -> str | None:
        """Why experts are not measured one by one; `None` means that they are."""
        moe = self.cfg.model.moe
        if not moe.num_experts:
            return "the model has none"
        if self.scheme is not None:
            return None
        if moe.router in ("domain", "timestep"):
            return f"with model.moe.router={moe.router} each expert has tokens of its own, and none can be removed"
        if moe.num_experts == moe.top_k:
            return f"model.moe.top_k={moe.top_k} chooses all of them"
        if moe.router == "softmax" and (moe.shared_experts or moe.swiglu_limit):
            return "a softmax router beside shared experts has no bias that could exclude one"
        return None

    @cached_property
    def _stacks(self) -> dict[str, Any]:
        return families.of(self.cfg.model).stacks(self.cfg.model)

    @cached_property
    def _biased(self) -> ModelConfig:
        """The model, with biases of softmax routers where experts are removed."""
        model = self.cfg.model
        removes = self.scheme is None and self.why_no_experts is None
        if not removes or model.moe.router != "softmax" or model.moe.bias:
            return model
        return replace(model, moe=replace(model.moe, bias=True))

    @cached_property
    def _prepared(self) -> Params:
        """The parameters of `_biased`, whose biases are zero."""
        if self._biased == self.cfg.model:
            return self.params
        held = flatten(self.params)
        spec = families.spec(self._biased)

        def one(keys: tuple[Any, ...], p: Any) -> jax.Array:
            path = path_of(keys)
            return held[path] if path in held else jnp.zeros(p.shape, jnp.float32)

        made: Params = jax.tree_util.tree_map_with_path(one, spec, is_leaf=lambda x: hasattr(x, "axes"))
        return made

    @cached_property
    def _rounded(self) -> Params:
        assert self.scheme is not None
        return qat.round_arrays(self.cfg.model, self.scheme, self.params)

    def _without_layer(self, stack: str, layer: int) -> Params:
        if self.scheme is not None:
            return self._swapped(stack, lambda path, new, old: old.at[layer].set(new[layer]))

        def one(keys: tuple[Any, ...], a: jax.Array) -> jax.Array:
            return a.at[layer].set(0) if path_of(keys).rpartition("/")[2] in OUTPUTS else a

        return {**self._prepared, stack: jax.tree_util.tree_map_with_path(one, self._prepared[stack])}

    def _without_expert(self, stack: str, layer: int, expert: int) -> Params:
        if self.scheme is not None:

            def one(path: str, new: jax.Array, old: jax.Array) -> jax.Array:
                group, _, rest = path.partition("/")
                return old.at[layer, expert].set(new[layer, expert]) if group == "moe" and "/" not in rest else old

            return self._swapped(stack, one)
        group = self._prepared[stack]["moe"]
        name = "balance" if self.cfg.model.moe.router == "sigmoid" else "router_bias"
        changed = {**group, name: group[name].at[layer, expert].set(NEVER)}
        return {**self._prepared, stack: {**self._prepared[stack], "moe": changed}}

    def _swapped(self, stack: str, swap: Callable[[str, jax.Array, jax.Array], jax.Array]) -> Params:
        """Returns the parameters with a part of a stack's matrices rounded."""

        def one(keys: tuple[Any, ...], new: jax.Array, old: jax.Array) -> jax.Array:
            return swap(path_of(keys), new, old)

        changed = jax.tree_util.tree_map_with_path(one, self._rounded[stack], self.params[stack])
        return {**self.params, stack: changed}

    def _loss(self, model: ModelConfig, params: PyTree) -> float:
        """Returns the mean loss over the batches."""
        terms = objective_of(self.cfg.model).terms
        found = mean_losses(terms, (self._program(params, batch) for batch in self.batches), lambda: None)
        return found.loss

    @cached_property
    def _program(self) -> Callable[[Params, Batch], Any]:
        return jax.jit(make_eval_step(self._biased, self.ctx, self.cfg.train.grad_accum))


def measure_loads(walk: Walk, params: Params, batches: Sequence[Batch]) -> dict[str, np.ndarray]:
    """Returns the share of the pairs of tokens and experts that each expert gets [L, E], by the name of its stack."""
    tokens: dict[str, list[np.ndarray]] = {}

    def one(index: int, layer: Params, measure: Measure) -> Params:
        if "moe/w_down" in measure.matrices:
            counts = np.asarray(measure()["moe/w_down"].tokens, np.float64)
            tokens.setdefault(measure.stack, []).append(counts / counts.sum())
        return layer

    for _ in walk.run(params, batches, one):
        pass
    return {stack: np.stack(loads) for stack, loads in tokens.items()}


def describe(whole: float, rows: Sequence[Row], loads: Mapping[str, np.ndarray]) -> list[dict[str, object]]:
    """Returns parts as JSON, in the order of `rows`.

    Args:
      whole: the loss of the model as it is.
      loads: loads of the experts, see `measure_loads`.
    """
    made = []
    for row in rows:
        one: dict[str, object] = {"stack": row.stack, "layer": row.layer, "loss": row.loss, "above": row.loss - whole}
        if row.expert is not None:
            one |= {"expert": row.expert, "load": float(loads[row.stack][row.layer, row.expert])}
        made.append(one)
    return made


def read_experts(order: Mapping[str, object], layers: int, experts: int) -> np.ndarray:
    """Returns by how much the loss rises without each expert [L, E], from the JSON of `describe`.

    Raises:
      ConfigError: it has other layers or experts.
    """
    return _table(order, "experts", (layers, experts))


def read_experts_of(order: Mapping[str, object], stacks: Mapping[str, Stack], experts: int) -> dict[str, np.ndarray]:
    """Returns by how much the loss rises without each expert, or with it rounded [L, E], by the name of its stack.

    Raises:
      ConfigError: the JSON of `describe` has other layers or experts.
    """
    return {name: read_experts(_of_stack(order, "experts", name), one.depth, experts) for name, one in stacks.items()}


def read_layers(order: Mapping[str, object], layers: int) -> np.ndarray:
    """Returns by how much the loss rises without each layer [L], from the JSON of `describe`; see `read_experts`."""
    return _table(order, "layers", (layers,))


def read_layers_of(order: Mapping[str, object], stacks: Mapping[str, Stack]) -> dict[str, np.ndarray]:
    """Returns by how much the loss rises without each layer [L], by the name of its stack; see `read_experts_of`."""
    return {name: read_layers(_of_stack(order, "layers", name), one.depth) for name, one in stacks.items()}


def _of_stack(order: Mapping[str, object], kind: str, name: str) -> dict[str, object]:
    """Returns the rows of a stack of an order; what is not a list of rows has none."""
    rows: Any = order.get(kind, ())
    known = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    return {kind: [row for row in rows if row.get("stack") == name] if known else []}


def _table(order: Mapping[str, object], kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns `above` of each row of an order at the row's indices."""
    found = np.full(shape, np.nan)
    names = ("layer", "expert")[: len(shape)]
    rows: Any = order.get(kind, ())
    try:
        for row in rows:
            found[tuple(row[name] for name in names)] = row["above"]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--order has {kind} that the model does not have ({error!r}). Use the file of `jaxstack compress order` "
            f"for this run."
        ) from None
    if np.isnan(found).any():
        raise ConfigError(
            f"--order lacks {kind} of the model: it has {int(np.isfinite(found).sum())} of {found.size}. Use the file "
            f"of `jaxstack compress order` for this run."
        )
    return found
