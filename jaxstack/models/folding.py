"""Factors on the inputs of a layer's matrices. The norm or matrix that produces the inputs divides by them.

You may multiply a matrix by s along an input, and divide the producer of this input by s: the layer's result is the
same. Quantisation uses this freedom (`compress.awq`).
"""

import jax
import jax.numpy as jnp

from jaxstack.config import ConfigError, ModelConfig
from jaxstack.models.params import Params


def shared_inputs(cfg: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Returns the matrices of a layer that read the same inputs, by the path of the norm or matrix that produces only
    these inputs.

    The outputs of attention are means of values, so a factor on values passes through attention if each query head has
    its own values. The hidden layer of a gated MLP is linear in `w_up`. An MLP without a gate has a non-linearity in
    between.

    Raises:
      ConfigError: a model with experts, whose matrices the router and all experts would have to share.
    """
    if cfg.moe.num_experts:
        raise ConfigError(
            f"model.moe.num_experts={cfg.moe.num_experts}: factors of inputs cannot be moved through a router. "
            f"Use --method=gptq."
        )
    attention: tuple[str, ...] = ("attention/w_q", "attention/w_k", "attention/w_v")
    if cfg.latent.kv_rank:
        attention = ("attention/w_q_down" if cfg.latent.q_rank else "attention/w_q", "attention/w_kv_down")
    mlp: tuple[str, ...] = ("mlp/w_gate", "mlp/w_up") if cfg.gated else ("mlp/w_up",)
    found: dict[str, tuple[str, ...]] = {}
    if cfg.parallel == "one_norm":
        found["attention_norm"] = attention + mlp
    elif cfg.pre_norm:
        found = {"attention_norm": attention, "mlp_norm": mlp}
    if not cfg.norm_weights:  # nothing could be divided
        found = {}
    if cfg.num_heads == cfg.kv_heads and cfg.clip_qkv is None:
        found["attention/w_v"] = ("attention/w_o",)
    if cfg.gated:
        found["mlp/w_up"] = ("mlp/w_down",)
    return found


def divide_outputs(cfg: ModelConfig, layer: Params, producer: str, factors: jax.Array) -> Params:
    """Returns a layer in which the outputs of a norm or a matrix are divided by factors.

    Args:
      layer: parameters of one layer.
      producer: key of `shared_inputs`.
      factors: a factor for each output [N]; for a matrix with several output dimensions, N is their product.
    """
    group, _, name = producer.partition("/")
    old: Params = layer[group]
    if not name:
        new = {**old, "scale": _divided_scale(old["scale"], factors, cfg.norm_unit_offset)}
        if "bias" in old:
            new["bias"] = old["bias"] / factors
        return {**layer, group: new}
    w, bias = old[name], name.replace("w_", "b_", 1)
    by = factors.reshape(w.shape[1:])
    new = {**old, name: w / by}
    if bias in old:
        new[bias] = old[bias] / by
    return {**layer, group: new}


def _divided_scale(scale: jax.Array, factors: jax.Array, unit_offset: bool) -> jax.Array:
    """Returns the scale of a norm whose outputs are divided; with `unit_offset` the norm multiplies by 1 + scale."""
    return (1 + scale) / factors - 1 if unit_offset else jnp.asarray(scale) / factors
