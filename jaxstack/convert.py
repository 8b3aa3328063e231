"""From one model to another: a dense one up-cycled to experts, one expert taken out, a run begun with another."""

from dataclasses import replace
from typing import Any

import jax

from jaxstack import hf, model, params, step
from jaxstack.config import Config, ConfigError, ModelConfig, MoEConfig
from jaxstack.context import Context
from jaxstack.moe import upcycle as copy_experts


def upcycle(cfg: ModelConfig, values: Any, moe: MoEConfig, key: jax.Array) -> tuple[ModelConfig, Any]:
    """A dense model with its MLPs copied to every expert (Komatsuzaki et al. 2022, arXiv:2212.05055, section 3).

    With weights that sum to 1 (`normalize`), and no shared experts, it computes what the dense model does.

    Args:
      cfg: the dense model.
      values: its parameters.
      moe: the experts; `d_ff` is left null, for they are as wide as the MLP was.
      key: of the router's initial values.

    Raises:
      ConfigError: a model that has experts already, or experts of another width.
    """
    if cfg.moe.num_experts or not moe.num_experts:
        raise ConfigError(f"up-cycling goes from a dense model to experts, not from {cfg.moe.num_experts} of them")
    if moe.d_ff not in (None, cfg.ff_width):
        raise ConfigError(f"model.moe.d_ff={moe.d_ff} differs from the dense model's {cfg.ff_width}; leave it null")
    grown = replace(cfg, moe=moe)
    initial = params.init(key, model.spec(grown))
    layers = {name: group for name, group in values["layers"].items() if name != "mlp"}
    layers["moe"] = initial["layers"]["moe"] | copy_experts(values["layers"]["mlp"], moe.num_experts)
    return grown, {**values, "layers": layers}


def extract_expert(cfg: ModelConfig, values: Any, expert: int) -> tuple[ModelConfig, Any]:
    """The dense model that a hard gate makes of all tokens of one domain (or one stretch of timesteps).

    Raises:
      ConfigError: a model whose tokens do not pass exactly one expert, or an expert that it does not have.
    """
    if cfg.moe.router not in ("domain", "timestep") or cfg.moe.shared_experts or not cfg.moe.num_experts:
        raise ConfigError(
            f"model.moe.router={cfg.moe.router} with {cfg.moe.shared_experts} shared experts is no hard gate: one "
            f"expert alone is not the model; this needs router=domain or timestep and shared_experts=0"
        )
    if not 0 <= expert < cfg.moe.num_experts:
        raise ConfigError(f"there is no expert {expert}; the model has 0 to {cfg.moe.num_experts - 1}")
    layers = {name: group for name, group in values["layers"].items() if name != "moe"}
    layers["mlp"] = {name: w[:, expert] for name, w in values["layers"]["moe"].items()}
    return replace(cfg, moe=MoEConfig(), d_ff=cfg.expert_width), {**values, "layers": layers}


def start_from(cfg: Config, ctx: Context, abstract: step.TrainState) -> step.TrainState:
    """The first state of a run that begins with the parameters of another run or a Hugging Face folder,
    `run.init_from`.

    Where this run has experts and the other has none, the other is up-cycled. Adapters of the other are merged, and
    those of this run begin anew.

    Raises:
      ConfigError: neither is there, no checkpoint in the run, or another model.
    """
    name = cfg.run.init_from
    source = hf.find(str(name), "run.init_from")
    there, here = source.model.base, cfg.model.base
    grows = bool(cfg.model.moe.num_experts and not there.moe.num_experts)
    if different := hf.differ(replace(there, moe=here.moe) if grows else there, here):
        raise ConfigError(
            f"run.init_from={name} holds another model ({'; '.join(different[:3])}); give this run the model keys of "
            f"its config.yaml, which `jaxstack import` writes for a Hugging Face folder"
        )
    if isinstance(source, hf.Pretrained):
        with source:
            values = source.read(ctx)
    else:
        values = hf.restore(source, ctx)
    if grows:
        key = jax.random.key(cfg.run.seed)
        shardings = jax.tree.map(ctx.sharding, ctx.parameters(model.spec(here)))
        grow = jax.jit(lambda values: upcycle(there, values, cfg.model.moe, key)[1], out_shardings=shardings)
        values = grow(values)
    state = step.make_state(cfg, ctx, abstract)
    adapters = params.split(model.spec(cfg.model), state.params)[0] if cfg.model.lora.rank else {}
    return replace(state, params=params.join(adapters, values))
