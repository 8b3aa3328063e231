"""Makes one model from another: up-cycles to experts, extracts one expert, or keeps a part of layers and widths."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack import families
from jaxstack.common.counts import plural
from jaxstack.common.tree import path_of
from jaxstack.config import ConfigError, ModelConfig, MoEConfig
from jaxstack.features.experts import segments_of
from jaxstack.models import params
from jaxstack.models.blocks import kinds_of
from jaxstack.models.folding import divide_outputs
from jaxstack.models.params import Param, Params
from jaxstack.moe import upcycle as copy_experts


def upcycle(cfg: ModelConfig, values: Params, moe: MoEConfig, key: jax.Array) -> tuple[ModelConfig, Params]:
    """Returns a dense model with its MLPs copied to every expert (Komatsuzaki et al. 2022, arXiv:2212.05055, sec. 3).

    With weights that sum to 1 (`normalize`) and without shared experts, it computes the same as the dense model.

    Args:
      cfg: the dense model.
      values: parameters of the dense model.
      moe: the experts; `d_ff` is null or the width of the dense MLP.
      key: PRNG key [] for the router's initial values.

    Raises:
      ConfigError: a model that already has experts or has units of layers, or experts with another MLP or width.
    """
    if cfg.moe.num_experts or not moe.num_experts:
        raise ConfigError(
            f"up-cycling starts from a dense model, but this one has {plural(cfg.moe.num_experts, 'expert')}. "
            f"Name a dense model, and set model.moe.num_experts of the new one."
        )
    if cfg.delta.every:
        raise ConfigError(
            f"model.delta.every={cfg.delta.every} has units of layers, which are not up-cycled. Train a model with "
            f"experts from the start."
        )
    if moe.swiglu_limit is not None:
        raise ConfigError(
            f"model.moe.swiglu_limit={moe.swiglu_limit} is another MLP than the dense model's. Leave it null."
        )
    if moe.d_ff not in (None, cfg.ff_width):
        raise ConfigError(f"model.moe.d_ff={moe.d_ff} differs from the dense model's {cfg.ff_width}. Leave it null.")
    grown = replace(cfg, moe=moe)
    initial = params.init(key, families.spec(grown))
    layers: Params = {}
    for name, one in families.of(cfg).stacks(cfg).items():
        for part in () if one.plain else segments_of(grown, name, one):
            own = jax.tree.map(lambda a, part=part: a[part.start : part.start + part.depth], values[name])
            layers[part.name] = _with_experts(own, initial[part.name], moe)
    return grown, {**values, **layers}


def _with_experts(layers: Params, initial: Params, moe: MoEConfig) -> Params:
    """Returns dense layers [L, ...] as layers of a grown stack, which has `initial` values, or one of its units."""
    size = len(kinds_of(initial))
    if size > 1:
        each = {f"layer_{i}": jax.tree.map(lambda a, i=i: a[i::size], layers) for i in range(size)}
        return {name: _with_experts(one, initial[name], moe) for name, one in each.items()}
    if "moe" not in initial:
        return layers
    grown = {name: group for name, group in layers.items() if name != "mlp"}
    return {**grown, "moe": initial["moe"] | copy_experts(layers["mlp"], moe.num_experts)}


def extract_expert(cfg: ModelConfig, values: Params, expert: int) -> tuple[ModelConfig, Params]:
    """Returns the dense model that a hard gate applies to the tokens of one domain, or of one range of timesteps.

    Args:
      values: parameters of the model with experts.
      expert: number of the expert, from 0.

    Raises:
      ConfigError: a model that does not send every token to exactly one expert, that has units of layers or MLPs of two
        widths; or an expert that it does not have.
    """
    if cfg.moe.router not in ("domain", "timestep") or cfg.moe.shared_experts or not cfg.moe.num_experts:
        raise ConfigError(
            f"model.moe.router={cfg.moe.router} with {plural(cfg.moe.shared_experts, 'shared expert')} is not a hard "
            f"gate, so one expert alone is not the model. Use a model with router=domain or timestep and "
            f"shared_experts=0."
        )
    if cfg.delta.every:
        raise ConfigError(
            f"model.delta.every={cfg.delta.every} has units of layers, of which no expert is extracted. Use a model "
            f"without it."
        )
    if not 0 <= expert < cfg.moe.num_experts:
        raise ConfigError(f"expert {expert} does not exist. Use one from 0 to {cfg.moe.num_experts - 1}.")
    some = any(False in part.kinds for parts in cfg.expert_segments.values() for part in parts)
    if some and cfg.expert_width != cfg.ff_width:
        raise ConfigError(
            f"model.moe.d_ff={cfg.expert_width} differs from the {cfg.ff_width} of the layers without experts, so one "
            f"expert alone has layers of two widths. Use a model whose model.moe.d_ff is null."
        )
    plain = replace(cfg, moe=MoEConfig(), d_ff=cfg.expert_width)
    kept = {name: value for name, value in values.items() if name not in families.of(cfg).stacks(cfg)}
    for name, one in families.of(plain).stacks(plain).items():
        names = [name] if one.plain else [part.name for part in segments_of(cfg, name, one)]
        layers = [_without_experts(values[part], expert) for part in names]
        kept[name] = jax.tree.map(lambda *a: jnp.concatenate(a), *layers) if layers[1:] else layers[0]
    return plain, kept


def _without_experts(layers: Params, expert: int) -> Params:
    """Returns the dense layers [L, ...] of a stack, or of one layer of its units, with one expert as their MLP."""
    kinds = kinds_of(layers)
    if kinds[1:]:
        each = [_without_experts(kind, expert) for kind in kinds]
        return jax.tree.map(lambda *a: jnp.stack(a, 1).reshape(-1, *a[0].shape[1:]), *each)
    if "moe" not in layers:
        return layers
    dense = {name: group for name, group in layers.items() if name != "moe"}
    return {**dense, "mlp": {name: w[:, expert] for name, w in layers["moe"].items()}}


COUNTS: dict[str, dict[str, str]] = {
    "decoder": {"layers": "layers"},
    "encoder": {"layers": "layers"},
    "encoder_decoder": {"encoder": "encoder_layers", "decoder": "layers"},
    "diffusion": {"text": "text_layers", "layers": "layers"},
    "contrastive": {"image": "encoder_layers", "text": "layers", "caption": "caption_layers"},
}
"""For each family that can lose parts: the flag that has the number of layers of each stack."""

_WIDTHS = {
    "contrastive": {"image": r"picture/|image/|image_norm/|projection/image|caption/cross/w_[kv]", "text": ""},
    "diffusion": {
        "text": r"text|layers/cross/w_[kv]",
        "time": r"condition/(w_time|b_time|w_out:embed)",
        "condition": r"condition/|.*modulation/w:embed",
        "picture": "",
    },
}
"""For families with several vectors of the model's width: how parameters and axes begin that have channels of each."""


def width_of(family: str, path: str, axis: str) -> str:
    """Returns the name of the vectors whose channels a parameter has along an axis of the model's width.

    A tower has a residual stream of its own, and so have pictures beside texts. The condition of a diffusion model is
    another vector, and so is the hidden layer that reads the timestep. The two residual streams of an encoder-decoder
    begin with rows of one table, so they have the same channels.
    """
    widths = _WIDTHS.get(family, {"residual": ""})
    return next(name for name, pattern in widths.items() if re.match(pattern, f"{path}:{axis}"))


@dataclass(frozen=True)
class KeptLayers:
    """The parts of a stack that stay, as increasing indices in the old model. Layers may keep different ones.

    Attributes:
      layers: indices of the layers [L].
      heads: query heads of each layer that stays [L, H], by their group of parameters: `attention`, and `cross`, which
        attends to another stack. Each key head that stays has the same number of query heads.
      kv_heads: key and value heads of the same groups [L, G].
      neurons: hidden units of MLPs by their group of parameters: `mlp` [L, F], `moe` [L, E, F] of each expert that
        stays, `moe/shared` [L, F].
      experts: indices of the experts [L, E]; E = 0 in a stack without experts.
    """

    layers: np.ndarray
    heads: Mapping[str, np.ndarray]
    kv_heads: Mapping[str, np.ndarray]
    neurons: Mapping[str, np.ndarray]
    experts: np.ndarray

    def index(self, path: str, axis: str) -> np.ndarray | None:
        """Returns what stays along a logical axis of a parameter of the layers, such as [L, H]; `None` means all."""
        match axis:
            case "layers":
                return self.layers
            case "heads":
                return self.heads[path.partition("/")[0]]
            case "kv_heads":
                return self.kv_heads[path.partition("/")[0]]
            case "mlp":
                return self.neurons[path.rpartition("/")[0]]
            case "experts" | "router":
                return self.experts
        return None


@dataclass(frozen=True)
class Kept:
    """The parts of a model that stay.

    Attributes:
      stacks: parts of the layers, by the name of their stack.
      channels: increasing indices in the old model [D], by the name of the vectors, see `width_of`.
    """

    stacks: Mapping[str, KeptLayers]
    channels: Mapping[str, np.ndarray]

    def index(self, family: str, path: str, axis: str) -> np.ndarray | None:
        """Returns what stays along a logical axis of a parameter, such as [L, H]; `None` means everything."""
        if axis in ("embed", "expert_embed", "input_embed", "norm"):
            return self.channels[width_of(family, path, axis)]
        group, _, rest = path.partition("/")
        if group == "relative" and axis == "heads":  # all layers of a stack share the table, and keep the same heads
            return self.stacks[rest].heads["attention"][0]
        return self.stacks[group].index(rest, axis) if group in self.stacks else None


def keep(cfg: ModelConfig, small: ModelConfig, values: Params, kept: Kept) -> Params:
    """Returns the parameters of a smaller model, which consists of parts of a model.

    Where a factor on embeddings or on what the head reads depends on the width, parameters make up for its change.

    Args:
      cfg: the model.
      small: the smaller model.
      values: parameters of the model.
      kept: the parts that stay.
    """

    def one(keys: tuple[Any, ...], p: Param, a: jax.Array) -> jax.Array:
        for dim, axis in enumerate(p.axes):
            index = kept.index(cfg.family, path_of(keys), axis)
            a = a if index is None else _take(a, jnp.asarray(index), dim)
        return a

    spec = families.spec(cfg)
    new: Params = jax.tree_util.tree_map_with_path(one, spec, values, is_leaf=lambda x: isinstance(x, Param))
    read = small.head_scale / cfg.head_scale  # by which what the head reads would grow
    factor = (cfg.d_model / small.d_model) ** 0.5
    if cfg.embedding_scale and factor != 1:
        new["embedding"] = {**new["embedding"], "tokens": factor * new["embedding"]["tokens"]}
        read *= factor if cfg.tied_embeddings else 1
    return divide_outputs(cfg, new, "final_norm", jnp.asarray(read)) if read != 1 and "final_norm" in new else new


def _take(a: jax.Array, index: jax.Array, dim: int) -> jax.Array:
    """Returns the elements of an array along a dimension; an index [..., N] is that of each of the first dimensions."""
    if index.ndim == 1:
        return jnp.take(a, index, axis=dim)
    return jax.vmap(lambda a, index: _take(a, index, dim - 1))(a, index)
