"""Chooses the layers, heads, hidden units, experts and channels of a decoder that stay."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack import families
from jaxstack.common.tree import Batch, flatten
from jaxstack.compress.importance import Importance
from jaxstack.config import Config, ConfigError, ModelConfig
from jaxstack.families import surgery
from jaxstack.families.surgery import Kept
from jaxstack.models.context import Context
from jaxstack.models.params import Params, flat_spec
from jaxstack.training.assemble import make_eval_step


class Sizes(NamedTuple):
    """Sizes of a decoder that pruning changes.

    Attributes:
      layers: number of layers.
      heads: query heads.
      kv_heads: key and value heads.
      d_ff: hidden width of the MLP, or of one expert.
      experts: experts of a layer; 0 in a dense model.
      d_model: width of the residual stream.
    """

    layers: int
    heads: int
    kv_heads: int
    d_ff: int
    experts: int
    d_model: int


def sizes_of(cfg: ModelConfig) -> Sizes:
    """Returns the sizes of a decoder."""
    width = cfg.expert_width if cfg.moe.num_experts else cfg.ff_width
    return Sizes(cfg.num_layers, cfg.num_heads, cfg.kv_heads, width, cfg.moe.num_experts, cfg.d_model)


def smaller_sizes(cfg: ModelConfig, given: Mapping[str, int | None]) -> Sizes:
    """Returns the sizes of the smaller model.

    Args:
      given: sizes by their name in `Sizes`; `None` means as before. By default each key head keeps its number of query
        heads, if `heads` allows it.

    Raises:
      ConfigError: a size that the model cannot have.
    """
    if cfg.latent.kv_rank:
        raise ConfigError(
            f"model.latent.kv_rank={cfg.latent.kv_rank}: pruning does not remove parts of latent attention. Use "
            f"`jaxstack compress quantize`, or a model without it."
        )
    if cfg.states_key:
        raise ConfigError(
            f"{cfg.states_key}: pruning does not remove parts of layers with states. Use a model without them."
        )
    if cfg.moe.num_experts and not all(cfg.has_experts):
        raise ConfigError(
            "model.moe.layers leaves layers without experts, and pruning keeps equal parts of all layers. Use a model "
            "whose layers all have experts, or none."
        )
    old = sizes_of(cfg)
    wanted = {name: value for name, value in given.items() if value is not None}
    if "experts" in wanted and not cfg.moe.num_experts:
        raise ConfigError(f"--experts={wanted['experts']}, but model.moe.num_experts=0. Leave it out.")
    for name, value in wanted.items():
        if value > (most := getattr(old, name)):
            raise ConfigError(f"--{name}={value} is more than the {most} of the model. Use at most {most}.")
    each = old.heads // old.kv_heads
    if "heads" in wanted and "kv_heads" not in wanted and wanted["heads"] % each == 0:
        wanted["kv_heads"] = wanted["heads"] // each
    new = old._replace(**wanted)
    _check(cfg, new)
    return new


def smaller_model(cfg: ModelConfig, sizes: Sizes) -> ModelConfig:
    """Returns the configuration of a decoder with other sizes. Heads keep their width."""
    moe = cfg.moe
    if moe.num_experts:
        moe = replace(moe, num_experts=sizes.experts, d_ff=sizes.d_ff)
    return replace(
        cfg,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=cfg.head_width,
        d_model=sizes.d_model,
        d_ff=cfg.ff_width if moe.num_experts else sizes.d_ff,
        moe=moe,
    )


def _check(cfg: ModelConfig, new: Sizes) -> None:
    """Checks that a model can have these sizes."""
    each = cfg.num_heads // cfg.kv_heads
    if new.heads % new.kv_heads or new.heads // new.kv_heads > each:
        advice = f"Use --kv_heads={new.heads}." if each == 1 else f"Use at most {each} times as many heads as kv_heads."
        raise ConfigError(
            f"--heads={new.heads} with --kv_heads={new.kv_heads}: each key head must keep equally many of its {each} "
            f"query heads. {advice}"
        )
    if new.layers % len(cfg.windows) or (new.layers != cfg.num_layers and cfg.num_layers % len(cfg.windows)):
        raise ConfigError(
            f"--layers={new.layers}, but layers are removed in whole periods of model.windows={list(cfg.windows)}. Use "
            f"a multiple of {len(cfg.windows)}."
        )
    if new.d_model != cfg.d_model and cfg.base_width is not None:
        raise ConfigError(
            f"--d_model={new.d_model} would change learning rates and logits of a model with "
            f"model.base_width={cfg.base_width}. Leave --d_model out."
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
    """Losses of the models with one step of layers less, in nats per token.

    Attributes:
      whole: of the model with all layers.
      without: for each step, of the model without it alone.
    """

    whole: float
    without: list[float]


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

    def loss(self, steps: Sequence[int]) -> float:
        """Returns the mean loss of the model with these steps of layers alone."""
        layers = jnp.asarray(_layers_of(self._period, np.asarray(steps)))
        run = self._programs(len(layers))
        sums = [jax.device_get(run(self.params, layers, batch)) for batch in self.batches]
        return float(sum(s for s, _ in sums) / sum(n for _, n in sums))

    def leave_out(self, keep: int, say: Callable[[str], None] = lambda line: None) -> tuple[np.ndarray, Losses]:
        """Returns the steps that stay, and the losses of the first round.

        Each round tries every step that is left, and leaves out the one without which the loss is lowest.
        """
        left = list(range(self.cfg.model.num_layers // self._period))
        first = Losses(self.loss(left), [self.loss([s for s in left if s != out]) for out in left])
        losses = dict(zip(left, first.without, strict=True))
        while len(left) > keep:
            out = min(losses, key=lambda step: losses[step])
            left.remove(out)
            say(f"left out {_name(self._period, out)}: loss {losses[out]:.4f} (all layers {first.whole:.4f})")
            losses = {out: self.loss([s for s in left if s != out]) for out in left} if len(left) > keep else {}
        return np.array(left), first

    @property
    def _period(self) -> int:
        return len(self.cfg.model.windows)

    @cached_property
    def _compiled(self) -> dict[int, Callable[[Params, jax.Array, Batch], tuple[jax.Array, jax.Array]]]:
        return {}

    def _programs(self, depth: int) -> Callable[[Params, jax.Array, Batch], tuple[jax.Array, jax.Array]]:
        """Returns the program of models with this number of layers, which it receives by their indices."""
        if depth not in self._compiled:
            name, _ = families.only_stack(self.cfg.model)
            step = make_eval_step(replace(self.cfg.model, num_layers=depth), self.ctx, self.cfg.train.grad_accum)

            def work(params: Params, layers: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
                stacked = jax.tree.map(lambda a: jnp.take(a, layers, axis=0), params[name])
                sums = step({**params, name: stacked}, batch)
                return sum(sums.losses.values(), jnp.zeros(())), sum(sums.weights.values(), jnp.zeros(()))

            self._compiled[depth] = jax.jit(work)
        return self._compiled[depth]


def _name(period: int, step: int) -> str:
    return f"layer {step}" if period == 1 else f"layers {step * period} to {step * period + period - 1}"


def _layers_of(period: int, steps: np.ndarray) -> np.ndarray:
    """Returns the layers of steps."""
    return (steps[:, None] * period + np.arange(period)).reshape(-1)


def choose(cfg: ModelConfig, sizes: Sizes, found: Importance, steps: np.ndarray | None = None) -> Kept:
    """Returns the parts that stay: of each kind those that matter most.

    Args:
      steps: steps of layers that stay. `None` means those that turn the residual stream most.
    """
    period = len(cfg.windows)
    steps = largest(found.turns, sizes.layers // period) if steps is None else steps
    layers = _layers_of(period, steps)
    each = cfg.num_heads // cfg.kv_heads
    groups = found.heads[layers].reshape(len(layers), cfg.kv_heads, each)
    kv_heads = largest(groups.sum(-1), sizes.kv_heads)
    own = largest(np.take_along_axis(groups, kv_heads[..., None], 1), sizes.heads // sizes.kv_heads)
    heads = (kv_heads[..., None] * each + own).reshape(len(layers), -1)
    experts = np.zeros((len(layers), 0), int)
    if cfg.moe.num_experts:
        by_group = found.experts[layers].reshape(len(layers), cfg.moe.num_groups, -1)
        own = largest(by_group, sizes.experts // cfg.moe.num_groups)
        first = np.arange(cfg.moe.num_groups)[:, None] * by_group.shape[-1]
        experts = (own + first).reshape(len(layers), -1)
    neurons = {}
    for group, sizes_of in found.neurons.items():
        its = sizes_of[layers]
        if group == "moe":
            its = np.take_along_axis(its, experts[..., None], 1)
        neurons[group] = largest(its, sizes.d_ff * (cfg.moe.shared_experts if group == "moe/shared" else 1))
    return Kept(layers, heads, kv_heads, neurons, experts, largest(found.channels, sizes.d_model))


def largest(importance: np.ndarray, count: int) -> np.ndarray:
    """Returns the increasing indices of the `count` largest numbers of the last axis; of equal ones the first."""
    return np.sort(np.argsort(-importance, axis=-1, kind="stable")[..., :count], axis=-1)


def keep(cfg: ModelConfig, ctx: Context, params: Params, kept: Kept) -> Params:
    """Returns the parameters of the parts that stay, sharded over the mesh."""
    spec = families.spec(smaller_model(cfg, sizes_of_kept(kept)))
    shardings = None if ctx.layout.mesh is None else jax.tree.map(ctx.layout.sharding, ctx.layout.parameters(spec))
    new: Params = jax.jit(lambda params: surgery.keep(cfg, params, kept), out_shardings=shardings)(params)
    assert all(leaf.shape == p.shape for leaf, p in zip(flatten(new).values(), flat_spec(spec).values(), strict=True))
    return new


def sizes_of_kept(kept: Kept) -> Sizes:
    """Returns the sizes of the model that stays."""
    layers, heads = kept.heads.shape
    units = kept.neurons["moe" if "moe" in kept.neurons else "mlp"].shape[-1]
    return Sizes(layers, heads, kept.kv_heads.shape[1], units, kept.experts.shape[1], len(kept.channels))


def describe(found: Importance, kept: Kept, losses: Losses | None) -> dict[str, Any]:
    """Returns the importance of every part and what stays, as JSON."""
    parts = {"heads": (found.heads, kept.heads), "experts": (found.experts, kept.experts)}
    parts |= {f"hidden units of {group}": (found.neurons[group], own) for group, own in kept.neurons.items()}
    parts |= {"channels": (found.channels, kept.channels)}
    if not found.experts.size:
        del parts["experts"]
    else:
        parts["load of experts"] = (found.load, kept.experts)
    layers: dict[str, Any] = {"one_minus_cosine": found.turns.tolist(), "kept": kept.layers.tolist()}
    if losses is not None:
        layers |= {"loss": losses.whole, "loss_without": losses.without}
    return {"layers": layers} | {
        name: {"importance": importance.tolist(), "kept": chosen.tolist()}
        for name, (importance, chosen) in parts.items()
    }
