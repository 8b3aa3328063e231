"""Chooses the layers, heads, hidden units, experts and channels of a model that stay."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack import families
from jaxstack.common.counts import plural
from jaxstack.common.tree import Batch, flatten
from jaxstack.compress.importance import Importance, OfStack
from jaxstack.config import Config, ConfigError, ModelConfig
from jaxstack.families import surgery
from jaxstack.families.surgery import Kept, KeptLayers
from jaxstack.models.blocks import Stack
from jaxstack.models.context import Context
from jaxstack.models.params import Params, flat_spec
from jaxstack.tracking.step_log import mean_losses
from jaxstack.training.assemble import make_eval_step, objective_of
from jaxstack.training.losses import EvalSums


class Sizes(NamedTuple):
    """Sizes of a model that pruning changes. All stacks of layers have the same ones, except for their depth.

    Attributes:
      layers: number of layers; beside an encoder, of the decoder.
      heads: query heads.
      kv_heads: key and value heads.
      d_ff: hidden width of the MLP, or of one expert.
      experts: experts of a layer; 0 in a dense model.
      d_model: width of the residual stream.
      encoder_layers: layers of an encoder beside a decoder, or of the tower for pictures; 0 in other models.
      text_layers: layers of a diffusion model that read a text.
      caption_layers: layers of a contrastive model that write captions.
    """

    layers: int
    heads: int
    kv_heads: int
    d_ff: int
    experts: int
    d_model: int
    encoder_layers: int = 0
    text_layers: int = 0
    caption_layers: int = 0


_ABSENT = {
    "experts": "model.moe.num_experts=0",
    "encoder_layers": "model.family={family} has no encoder or tower of its own depth",
    "text_layers": "model.diffusion.text_layers=0",
    "caption_layers": "model.contrastive.caption_layers=0",
}
"""Why a model has no part whose size with this name is 0."""


def sizes_of(cfg: ModelConfig) -> Sizes:
    """Returns the sizes of a model."""
    return Sizes(
        layers=cfg.num_layers,
        heads=cfg.num_heads,
        kv_heads=cfg.kv_heads,
        d_ff=cfg.expert_width if cfg.moe.num_experts else cfg.ff_width,
        experts=cfg.moe.num_experts,
        d_model=cfg.d_model,
        encoder_layers=cfg.encoder_depth if "encoder_layers" in surgery.COUNTS[cfg.family].values() else 0,
        text_layers=cfg.diffusion.text_layers,
        caption_layers=cfg.contrastive.caption_layers,
    )


def smaller_sizes(cfg: ModelConfig, given: Mapping[str, int | None]) -> Sizes:
    """Returns the sizes of the smaller model.

    Args:
      given: sizes by their name in `Sizes`; `None` means as before. By default each key head keeps its number of query
        heads, if `heads` allows it. An encoder whose depth is not set has as many layers as the decoder.

    Raises:
      ConfigError: a size that the model cannot have.
    """
    if cfg.family not in surgery.COUNTS:
        advice = "Use --sparsity alone, or another family."
        if cfg.family == "branches":
            advice = "Export a branch with `jaxstack export --branch`, and prune it."
        raise ConfigError(f"model.family={cfg.family}: pruning does not remove parts of such a model. {advice}")
    if cfg.latent.kv_rank:
        raise ConfigError(
            f"model.latent.kv_rank={cfg.latent.kv_rank}: pruning does not remove parts of latent attention. Use "
            f"`jaxstack compress quantize`, or a model without it."
        )
    if cfg.states_key:
        raise ConfigError(
            f"{cfg.states_key}: pruning does not remove parts of layers with states. Use a model without them."
        )
    if cfg.mixes_experts:
        raise ConfigError(
            "model.moe.layers leaves layers without experts, and pruning keeps equal parts of all layers. Use a model "
            "whose layers all have experts, or none."
        )
    if cfg.mtp.depth:
        families.only_stack(cfg)  # refuses it
    old = sizes_of(cfg)
    wanted = {name: value for name, value in given.items() if value is not None}
    for name, value in wanted.items():
        most = getattr(old, name)
        if not most:
            raise ConfigError(f"--{name}={value}, but {_ABSENT[name].format(family=cfg.family)}. Leave it out.")
        if value > most:
            raise ConfigError(f"--{name}={value} is more than the {most} of the model. Use at most {most}.")
    each = old.heads // old.kv_heads
    if "heads" in wanted and "kv_heads" not in wanted and wanted["heads"] % each == 0:
        wanted["kv_heads"] = wanted["heads"] // each
    layers = wanted.get("layers")
    if old.encoder_layers and cfg.encoder_layers is None and layers is not None:
        wanted.setdefault("encoder_layers", layers)
    new = old._replace(**wanted)
    _check(cfg, new)
    return new


def smaller_model(cfg: ModelConfig, sizes: Sizes) -> ModelConfig:
    """Returns the configuration of a model with other sizes. Heads keep their width, and so do compared features."""
    moe = cfg.moe
    if moe.num_experts:
        moe = replace(moe, num_experts=sizes.experts, d_ff=sizes.d_ff)
    separate = cfg.encoder_layers is not None or sizes.encoder_layers not in (0, sizes.layers)
    contrastive = cfg.contrastive
    if cfg.family == "contrastive":
        features = contrastive.features or cfg.d_model
        contrastive = replace(contrastive, features=features, caption_layers=sizes.caption_layers)
    scale = cfg.head_scale
    if cfg.family == "encoder_decoder" and math.isclose(scale, cfg.d_model**-0.5):  # T5 derives it from the width
        scale = sizes.d_model**-0.5
    return replace(
        cfg,
        num_layers=sizes.layers,
        encoder_layers=sizes.encoder_layers if separate else None,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=cfg.head_width,
        d_model=sizes.d_model,
        d_ff=cfg.ff_width if moe.num_experts and not _one_width(cfg) else sizes.d_ff,
        moe=moe,
        diffusion=replace(cfg.diffusion, text_layers=sizes.text_layers),
        contrastive=contrastive,
        head_scale=scale,
    )


def _one_width(cfg: ModelConfig) -> bool:
    """Returns whether a model has experts beside stacks without experts, and both have the same hidden width."""
    return _plain_stacks(cfg) and cfg.expert_width == cfg.ff_width


def _plain_stacks(cfg: ModelConfig) -> bool:
    return any(stack.plain for stack in families.of(cfg).stacks(cfg).values())


def _check(cfg: ModelConfig, new: Sizes) -> None:
    """Checks that a model can have these sizes."""
    each = cfg.num_heads // cfg.kv_heads
    if new.heads % new.kv_heads or new.heads // new.kv_heads > each:
        advice = f"Use --kv_heads={new.heads}." if each == 1 else f"Use at most {each} times as many heads as kv_heads."
        raise ConfigError(
            f"--heads={new.heads} with --kv_heads={new.kv_heads}: each key head must keep equally many of its "
            f"{plural(each, 'query head')}. {advice}"
        )
    period = len(cfg.windows)
    if new.layers != cfg.num_layers and (new.layers % period or cfg.num_layers % period):
        advice = f"Use a multiple of {period}."
        if cfg.num_layers % period:
            advice = f"The model's {cfg.num_layers} are not whole periods. Leave --layers out."
        raise ConfigError(
            f"--layers={new.layers}, but layers are removed in whole periods of model.windows={list(cfg.windows)}. "
            f"{advice}"
        )
    if new.d_model != cfg.d_model and cfg.base_width is not None:
        raise ConfigError(
            f"--d_model={new.d_model} would change learning rates and logits of a model with "
            f"model.base_width={cfg.base_width}. Leave --d_model out."
        )
    if new.d_model != cfg.d_model and cfg.family == "encoder" and cfg.embedding_scale:
        raise ConfigError(
            f"--d_model={new.d_model} would change the logits of an encoder with model.embedding_scale=true. Leave "
            f"--d_model out."
        )
    if cfg.moe.num_experts and new.d_ff != cfg.expert_width and _plain_stacks(cfg) and not _one_width(cfg):
        raise ConfigError(
            f"--d_ff={new.d_ff} is for MLPs and experts of one width, but model.moe.d_ff={cfg.expert_width} and "
            f"model.d_ff={cfg.ff_width} differ. Leave --d_ff out."
        )
    if new.experts == cfg.moe.num_experts:
        return
    if cfg.moe.router in ("domain", "timestep"):
        raise ConfigError(
            f"--experts={new.experts}: with model.moe.router={cfg.moe.router} each expert has tokens of its own. Leave "
            f"--experts out."
        )
    if new.experts < cfg.moe.top_k or new.experts % cfg.moe.num_groups:
        raise ConfigError(
            f"--experts={new.experts} must be a multiple of model.moe.num_groups={cfg.moe.num_groups}, and at least "
            f"model.moe.top_k={cfg.moe.top_k}. Use such a number."
        )


class Losses(NamedTuple):
    """Losses of the models with one step of layers less, as `Order` measures them.

    Attributes:
      whole: loss of the model with all layers.
      without: for each step, of the model without it alone, by the name of each stack that loses layers.
    """

    whole: float
    without: dict[str, list[float]]


Steps = Mapping[str, Sequence[int]]
"""Steps of layers by the name of their stack."""


@dataclass(frozen=True)
class LayerSearch:
    """Leaves out the steps of layers that matter least, by the loss on calibration batches.

    Attributes:
      cfg: the run on the mesh, with a model without adapters.
      ctx: how its model is computed.
      params: the parameters of its model.
      batches: on the devices.
    """

    cfg: Config
    ctx: Context
    params: Params
    batches: Sequence[Batch]

    def loss(self, steps: Steps) -> float:
        """Returns the mean loss of the model with these steps of layers alone."""
        layers = {
            name: jnp.asarray(_layers_of(self._stacks[name].period, np.asarray(own))) for name, own in steps.items()
        }
        run = self._program(tuple(len(own) for own in layers.values()))
        found = mean_losses(
            objective_of(self.cfg.model).terms,
            (run(self.params, layers, batch) for batch in self.batches),
            lambda: None,
        )
        return found.loss

    def leave_out(
        self, keep: Mapping[str, int], say: Callable[[str], None] = lambda line: None
    ) -> tuple[dict[str, np.ndarray], Losses]:
        """Returns the steps that stay of each stack that loses some, and the losses of the first round.

        Each round tries every step that is left of a stack with too many, and leaves out the one without which the loss
        is lowest.

        Args:
          keep: number of steps that stay, by the name of the stack. Other stacks keep all.
        """
        left = {name: [*range(stack.depth // stack.period)] for name, stack in self._stacks.items()}
        too_many = [name for name, count in keep.items() if len(left[name]) > count]
        losses = self._without_each(left, too_many)
        first = {name: [losses[name, step] for step in left[name]] for name in too_many}
        whole = self.loss(left)
        stay = [*too_many]
        while too_many:
            name, out = min(losses, key=lambda one: losses[one])
            left[name].remove(out)
            gone = _name(name, self._stacks, out)
            say(f"left out {gone}: loss {losses[name, out]:.4f} (all layers {whole:.4f})")
            too_many = [name for name in too_many if len(left[name]) > keep[name]]
            losses = self._without_each(left, too_many)
        return {name: np.array(left[name]) for name in stay}, Losses(whole, first)

    def _without_each(self, left: Steps, stacks: Sequence[str]) -> dict[tuple[str, int], float]:
        """Returns the loss without each step of some stacks."""
        return {
            (name, out): self.loss({**left, name: [step for step in left[name] if step != out]})
            for name in stacks
            for out in left[name]
        }

    @cached_property
    def _stacks(self) -> dict[str, Stack]:
        return families.of(self.cfg.model).stacks(self.cfg.model)

    @cached_property
    def _compiled(self) -> dict[tuple[int, ...], Callable[[Params, dict[str, jax.Array], Batch], EvalSums]]:
        return {}

    def _program(self, depths: tuple[int, ...]) -> Callable[[Params, dict[str, jax.Array], Batch], EvalSums]:
        """Returns the program of models with stacks of these depths, which receives layers by their indices."""
        if depths not in self._compiled:
            model = self.cfg.model
            counts = [surgery.COUNTS[model.family][name] for name in self._stacks]
            sizes = sizes_of(model)._replace(**dict(zip(counts, depths, strict=True)))
            step = make_eval_step(smaller_model(model, sizes), self.ctx, self.cfg.train.grad_accum)

            def work(params: Params, layers: dict[str, jax.Array], batch: Batch) -> EvalSums:
                own = {
                    name: jax.tree.map(lambda a, index=index: jnp.take(a, index, axis=0), params[name])
                    for name, index in layers.items()
                }
                return step({**params, **own}, batch)

            self._compiled[depths] = jax.jit(work)
        return self._compiled[depths]


def _name(name: str, stacks: Mapping[str, Stack], step: int) -> str:
    """Returns the name of a step of layers in messages; it begins with the stack where there are several."""
    period = stacks[name].period
    own = f"layer {step}" if period == 1 else f"layers {step * period} to {step * period + period - 1}"
    return own if len(stacks) == 1 else f"{name} {own}"


def _layers_of(period: int, steps: np.ndarray) -> np.ndarray:
    """Returns the layers of steps."""
    return (steps[:, None] * period + np.arange(period)).reshape(-1)


def choose(cfg: ModelConfig, sizes: Sizes, found: Importance, steps: Mapping[str, np.ndarray] | None = None) -> Kept:
    """Returns the parts that stay: of each kind those that matter most.

    Args:
      steps: steps of layers that stay, by the name of their stack. Stacks that are not named keep those that turn the
        residual stream most.
    """
    small = smaller_model(cfg, sizes)
    stacks = {
        name: _choose(cfg, small, stack, found.stacks[name], (steps or {}).get(name))
        for name, stack in families.of(small).layers(small).items()
    }
    return Kept(stacks, {name: largest(own, small.d_model) for name, own in found.channels.items()})


def _choose(cfg: ModelConfig, small: ModelConfig, stack: Stack, found: OfStack, steps: np.ndarray | None) -> KeptLayers:
    """Returns the parts of a stack that stay.

    Args:
      small: the smaller model.
      stack: stack of the smaller model, with the declarations of one layer.
      steps: see `choose`.
    """
    if stack.depth == len(found.experts):  # the last step of an encoder may have fewer layers
        layers = np.arange(stack.depth)
    else:
        steps = largest(found.turns, stack.depth // stack.period) if steps is None else steps
        layers = _layers_of(stack.period, steps)
    each = cfg.num_heads // cfg.kv_heads
    heads = {}
    kv_heads = {}
    for group, of_heads in found.heads.items():
        groups = of_heads[layers].reshape(len(layers), cfg.kv_heads, each)
        if cfg.positions == "relative" and group == "attention":  # all layers read one bias for each head
            groups = np.broadcast_to(groups.sum(0), groups.shape)
        kv_heads[group] = largest(groups.sum(-1), small.kv_heads)
        own = np.take_along_axis(groups, kv_heads[group][..., None], 1)
        own = largest(own, small.num_heads // small.kv_heads)
        heads[group] = (kv_heads[group][..., None] * each + own).reshape(len(layers), -1)
    experts = np.zeros((len(layers), 0), int)
    if found.experts.size:
        by_group = found.experts[layers].reshape(len(layers), cfg.moe.num_groups, -1)
        own = largest(by_group, small.moe.num_experts // cfg.moe.num_groups)
        first = np.arange(cfg.moe.num_groups)[:, None] * by_group.shape[-1]
        experts = (own + first).reshape(len(layers), -1)
    neurons = {}
    for group, of_units in found.neurons.items():
        its = of_units[layers]
        if group == "moe":
            its = np.take_along_axis(its, experts[..., None], 1)
        neurons[group] = largest(its, flat_spec(stack.spec)[f"{group}/w_down"].shape[-2])
    return KeptLayers(layers, heads, kv_heads, neurons, experts)


def largest(importance: np.ndarray, count: int) -> np.ndarray:
    """Returns the increasing indices of the `count` largest numbers of the last axis; of equal ones the first."""
    return np.sort(np.argsort(-importance, axis=-1, kind="stable")[..., :count], axis=-1)


def keep(cfg: ModelConfig, small: ModelConfig, ctx: Context, params: Params, kept: Kept) -> Params:
    """Returns the parameters of the parts that stay, sharded over the mesh.

    Args:
      cfg: the model.
      small: the smaller model, see `smaller_model`.
    """
    spec = families.spec(small)
    shardings = None if ctx.layout.mesh is None else jax.tree.map(ctx.layout.sharding, ctx.layout.parameters(spec))
    new: Params = jax.jit(lambda params: surgery.keep(cfg, small, params, kept), out_shardings=shardings)(params)
    assert all(leaf.shape == p.shape for leaf, p in zip(flatten(new).values(), flat_spec(spec).values(), strict=True))
    return new


def describe(found: Importance, kept: Kept, losses: Losses | None) -> dict[str, Any]:
    """Returns the importance of every part and what stays, as JSON; with several stacks, their parts by the stack."""
    measured: dict[str, dict[str, Any]] = {}
    if losses is not None:
        measured = {n: {"loss": losses.whole, "loss_without": without} for n, without in losses.without.items()}
    stacks = {name: _describe(own, kept.stacks[name], measured.get(name, {})) for name, own in found.stacks.items()}
    channels = {"channels" if name == "residual" else f"channels of {name}": name for name in found.channels}
    widths = {shown: _part(found.channels[name], kept.channels[name]) for shown, name in channels.items()}
    return (stacks if len(stacks) > 1 else next(iter(stacks.values()))) | widths


def _describe(found: OfStack, kept: KeptLayers, losses: dict[str, Any]) -> dict[str, Any]:
    """Returns the importance of every part of a stack and what stays."""
    parts = {"layers": {"one_minus_cosine": found.turns.tolist(), "kept": kept.layers.tolist()} | losses}
    for group, own in kept.heads.items():
        parts["heads" if group == "attention" else f"heads of {group}"] = _part(found.heads[group], own)
    if found.experts.size:
        parts["experts"] = _part(found.experts, kept.experts)
        parts["load of experts"] = _part(found.load, kept.experts)
    return parts | {f"hidden units of {g}": _part(found.neurons[g], own) for g, own in kept.neurons.items()}


def _part(importance: np.ndarray, kept: np.ndarray) -> dict[str, Any]:
    return {"importance": importance.tolist(), "kept": kept.tolist()}
