"""From one model to another: a dense one up-cycled to experts, one expert taken out."""

from dataclasses import replace
from typing import Any

import jax

from jaxstack.config import ConfigError, ModelConfig, MoEConfig
from jaxstack.models import decoder, params
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
    initial = params.init(key, decoder.spec(grown))
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
