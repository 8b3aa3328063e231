"""The families of models: their table, and the functions that read it.

Code outside of `models`, `families` and `hf` names no group of parameters: it asks the family of a configuration.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack.common.counts import plural
from jaxstack.config import ConfigError, DataConfig, ModelConfig
from jaxstack.config.objective import OBJECTIVES, Objective
from jaxstack.families import branches, contrastive, diffusion, encoder, encoder_decoder
from jaxstack.families.token_prediction import with_prediction_loss, with_token_prediction
from jaxstack.features.adapters import with_adapters
from jaxstack.features.experts import with_experts
from jaxstack.features.latent_attention import with_latent_attention
from jaxstack.features.linear_attention import with_attention_gate, with_delta_rule
from jaxstack.features.plain_norms import with_plain_norms
from jaxstack.features.residual import needed, with_residual, with_scales
from jaxstack.features.reward_head import with_reward_head
from jaxstack.features.sinks import with_sinks
from jaxstack.features.state_space import with_state_space, without_mlp
from jaxstack.features.width import with_width
from jaxstack.features.xielu import with_xielu
from jaxstack.models import decoder, shape_errors
from jaxstack.models.batches import BatchSpec
from jaxstack.models.blocks import Stack
from jaxstack.models.context import Context
from jaxstack.models.family import FAMILIES, Family
from jaxstack.models.params import Params, Spec
from jaxstack.models.values import Aux

Group = TypeVar("Group")

FAMILIES.update(
    branches=branches.FAMILY,
    contrastive=contrastive.FAMILY,
    decoder=decoder.FAMILY,
    diffusion=diffusion.FAMILY,
    encoder=encoder.FAMILY,
    encoder_decoder=encoder_decoder.FAMILY,
)


def register_family(name: str, family: Family, objective: Objective | None = None) -> None:
    """Registers a family under a name for `model.family`. Without an objective, the decoder's objective is used.

    Raises:
      ValueError: the name is taken.
    """
    if name in FAMILIES:
        raise ValueError(f"There is a family {name!r} already. Use another name.")
    FAMILIES[name] = family
    OBJECTIVES[name] = objective or OBJECTIVES["decoder"]


def of(cfg: ModelConfig) -> Family:
    """Returns the family of a model, with the features of the model."""
    family = FAMILIES[cfg.family]
    if cfg.mtp.depth:
        family = with_token_prediction(family)
    if cfg.family == "decoder" and (cfg.embedding_multiplier != 1 or cfg.head_scale != 1):
        family = with_scales(family)
    if needed(cfg):
        family = with_residual(family)
    if cfg.latent.kv_rank:
        family = with_latent_attention(family)
    if cfg.attention_gate:
        family = with_attention_gate(family)
    if cfg.attention_sinks:
        family = with_sinks(family)
    if cfg.activation == "xielu":
        family = with_xielu(family)
    if cfg.moe.num_experts:
        family = with_experts(family)
    if cfg.delta.every:
        family = with_delta_rule(family)
    if not cfg.ssm.mlp:
        family = without_mlp(family)
    if cfg.ssm.layers:
        family = with_state_space(family)
    if cfg.base_width:
        family = with_width(family)
    if cfg.lora.rank:
        family = with_adapters(family)
    if not cfg.norm_weights:
        family = with_plain_norms(family)
    if cfg.reward_head:
        family = with_reward_head(family)
    if cfg.mtp.depth:
        family = with_prediction_loss(family)
    return family


def spec(cfg: ModelConfig) -> Spec:
    """Returns the declarations of every parameter of a model."""
    return of(cfg).spec(cfg)


def batch_spec(model: ModelConfig, data: DataConfig) -> BatchSpec:
    """Declares the arrays of a training batch, from the model and its data."""
    arrays = of(model).batch_spec(model, data)
    sources = {one.source for one in data.mixture or (data,)}
    if not sources <= {"prompts", "preferences"}:
        return arrays
    ids = arrays["tokens"]
    if sources == {"prompts"}:
        floats = {name: replace(ids, values="ones") for name in ("row_weights", "token_weights", "importance")}
        normal = ("old_log_probs", "reference_log_probs", "advantages")
        return arrays | floats | {name: replace(ids, values="normal") for name in normal}
    return arrays | {
        "segment_ids": replace(ids, values="one_document"),
        "positions": replace(ids, values="positions"),
        "pair_weights": replace(ids, values="ones"),
        "wanted_weights": replace(ids, values="ones"),
        "unwanted_weights": replace(ids, values="ones"),
        "margins": replace(ids, values="ones"),
        "reference_log_probs": replace(ids, values="normal"),
        "divergence": replace(ids, values="ones"),
    }


def runs_several(cfg: ModelConfig) -> bool:
    """Returns whether one step of a loop over layers runs several layers, in any stack of a model."""
    return any(stack.runs_several for stack in of(cfg).stacks(cfg).values())


def only_stack(cfg: ModelConfig) -> tuple[str, Stack]:
    """Returns the name and the stack of a model with one stack of layers.

    Raises:
      ConfigError: the model has several stacks.
    """
    stacks = of(cfg).layers(cfg)
    if len(stacks) > 1:
        names = f"{plural(len(stacks), 'stack')} of layers ({', '.join(stacks)}), and this needs one"
        if cfg.mtp.depth:
            raise ConfigError(
                f"model.mtp.depth={cfg.mtp.depth} gives the model {names}. Make a run without modules of it: `jaxstack "
                f"train --run.init_from=RUN --model.mtp.depth=0`."
            )
        cut = any(parts[1:] for parts in cfg.expert_segments.values())
        why = "model.moe.layers" if cut else f"model.family={cfg.family}"
        raise ConfigError(f"{why} gives the model {names}. Use a model with one stack, or leave this out.")
    ((name, stack),) = stacks.items()
    return name, stack


def split_stacks(cfg: ModelConfig, params: Mapping[str, Group]) -> tuple[dict[str, Group], dict[str, Group]]:
    """Splits the groups of parameters (or what is stored by their names) into those outside of stacks, and the stacks.

    Groups that are not there, such as stacks in which nothing is trained, are left out.
    """
    names = of(cfg).stacks(cfg)
    shared = {name: group for name, group in params.items() if name not in names}
    return shared, {name: params[name] for name in names if name in params}


def _check_tokens(cfg: ModelConfig, tokens: jax.Array) -> None:
    """Raises a ValueError for tokens that `forward` cannot read; ids are compared only outside of `jax.jit`."""
    if tokens.ndim != 2:
        advice = "Use tokens[None] for one row." if tokens.ndim == 1 else "Give one row for each text."
        raise ValueError(f"tokens have the shape {tokens.shape}, but forward reads rows of tokens [B, S]. {advice}")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens are {tokens.dtype}, but ids are integers. Use tokens.astype('int32').")
    if isinstance(tokens, jax.core.Tracer) or not getattr(tokens, "is_fully_addressable", True) or not tokens.size:
        return
    ids = np.asarray(tokens)  # in NumPy: a trace would record a constant's operations
    least, largest = ids.min(), ids.max()
    if least < 0 or largest >= cfg.vocab:
        wrong = largest if largest >= cfg.vocab else least
        raise ValueError(
            f"tokens contain the id {wrong}, but model.vocab_size={cfg.vocab}. Use ids from 0 to {cfg.vocab - 1}."
        )


@shape_errors.explained()
def forward(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    ctx: Context | None = None,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    gate_ids: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
) -> tuple[jax.Array, Aux]:
    """Returns logits [B, S, V/n] of a decoder in float32 (see `decoder.logits`), and the named values of its layers.

    Args:
      params: as `spec` declares them, float32.
      tokens: ids [B, S], from 0 to `cfg.vocab` - 1. Within `jax.jit` their values are not checked: a token beyond the
        vocabulary gets the embedding of another one, or zeros. With `jax_debug_nans` it gets NaN, and JAX runs the
        function again without `jax.jit`, which raises the error.
      ctx: execution context. `None` means one device in float32.
      positions, segment_ids, gate_ids: [B, S], see `decoder.make_layer_inputs`.
      dropout_key: `None` disables dropout, for evaluation.

    Raises:
      ValueError: tokens that are not rows of integers, or, outside of `jax.jit`, an id beyond the vocabulary.
    """
    _check_tokens(cfg, tokens)
    arrays = {"tokens": tokens, "positions": positions, "segment_ids": segment_ids, "gate_ids": gate_ids}
    batch = {name: array for name, array in arrays.items() if array is not None}
    x, values = of(cfg).hidden_states(cfg, params, batch, ctx, dropout_key=dropout_key)
    return decoder.logits(cfg, params, x, ctx), values
