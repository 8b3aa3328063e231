"""Makes one model from another: up-cycles a dense model to experts, or extracts one expert as a dense model."""

from dataclasses import replace

import jax

from jaxstack.config import ConfigError, ModelConfig, MoEConfig
from jaxstack.models import family, params
from jaxstack.models.params import Params
from jaxstack.moe import upcycle as copy_experts


def upcycle(cfg: ModelConfig, values: Params, moe: MoEConfig, key: jax.Array) -> tuple[ModelConfig, Params]:
    """Returns a dense model with its MLPs copied to every expert (Komatsuzaki et al. 2022, arXiv:2212.05055, sec. 3).

    With weights that sum to 1 (`normalize`) and without shared experts, it computes the same as the dense model.

    Args:
      cfg: the dense model.
      values: its parameters.
      moe: the experts; `d_ff` is null, since an expert has the width of the dense MLP.
      key: PRNG key for the router's initial values.

    Raises:
      ConfigError: a model that already has experts, or experts of another width.
    """
    if cfg.moe.num_experts or not moe.num_experts:
        raise ConfigError(
            f"up-cycling starts from a dense model, but this one has {cfg.moe.num_experts} experts. "
            f"Name a dense model, and set model.moe.num_experts of the new one"
        )
    if moe.d_ff not in (None, cfg.ff_width):
        raise ConfigError(f"model.moe.d_ff={moe.d_ff} differs from the dense model's {cfg.ff_width}. Leave it null")
    grown = replace(cfg, moe=moe)
    initial = params.init(key, family.spec(grown))
    layers = {name: group for name, group in values["layers"].items() if name != "mlp"}
    layers["moe"] = initial["layers"]["moe"] | copy_experts(values["layers"]["mlp"], moe.num_experts)
    return grown, {**values, "layers": layers}


def extract_expert(cfg: ModelConfig, values: Params, expert: int) -> tuple[ModelConfig, Params]:
    """Returns the dense model that a hard gate applies to the tokens of one domain, or of one range of timesteps.

    Raises:
      ConfigError: a model that does not send every token to exactly one expert, or an expert that it does not have.
    """
    if cfg.moe.router not in ("domain", "timestep") or cfg.moe.shared_experts or not cfg.moe.num_experts:
        raise ConfigError(
            f"model.moe.router={cfg.moe.router} with {cfg.moe.shared_experts} shared experts is not a hard gate, so "
            f"one expert alone is not the model. Use a model with router=domain or timestep and shared_experts=0"
        )
    if not 0 <= expert < cfg.moe.num_experts:
        raise ConfigError(f"expert {expert} does not exist. Use one from 0 to {cfg.moe.num_experts - 1}")
    layers = {name: group for name, group in values["layers"].items() if name != "moe"}
    layers["mlp"] = {name: w[:, expert] for name, w in values["layers"]["moe"].items()}
    return replace(cfg, moe=MoEConfig(), d_ff=cfg.expert_width), {**values, "layers": layers}
