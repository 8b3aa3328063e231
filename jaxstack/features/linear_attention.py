"""Layers of the gated delta rule in place of attention (Gated DeltaNet, arXiv:2412.06464), as Qwen3-Next has them.

Three of four layers of Qwen3-Next mix tokens by a state for each head, and the fourth has attention, see `states`.

Suffixes: B batch, S sequence, D width, N key heads, H value heads, K key width, V value width, W taps of the
convolution, C = 2 N K + H V channels of the convolution.
"""

import math
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxstack import kernels
from jaxstack.config import ModelConfig
from jaxstack.features.states import DECAY_BIAS, Mixer, with_states
from jaxstack.kernels import AttentionMask, StateTokens
from jaxstack.models import layers
from jaxstack.models.context import Context
from jaxstack.models.family import Family
from jaxstack.models.layer_inputs import LayerInputs
from jaxstack.models.layers import HEADS, RESIDUAL
from jaxstack.models.params import Param, Params, Spec


class Projections(NamedTuple):
    """What the rule reads of the tokens, see `states.Projections`.

    Attributes:
      q, k: queries and keys before the convolution [B, S, N, K].
      v: values before the convolution [B, S, H, V].
      decay: logarithm of the factor on the state before each token [B, S, H].
      beta: share of the state's error that each token corrects [B, S, H].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    decay: jax.Array
    beta: jax.Array

    @property
    def channels(self) -> jax.Array:
        """The channels of the convolution [B, S, C]."""
        return jnp.concatenate([a.reshape(*a.shape[:2], -1) for a in self[:3]], -1)

    def tokens(self, channels: jax.Array, starts: jax.Array | None) -> StateTokens:
        """Returns the tokens with queries, keys and values from the channels of the convolution [B, S, C]."""
        sizes = [math.prod(a.shape[2:]) for a in self[:3]]
        parts = jnp.split(jax.nn.silu(channels), [sizes[0], sizes[0] + sizes[1]], -1)
        q, k, v = (part.reshape(a.shape) for part, a in zip(parts, self[:3], strict=True))
        return StateTokens.unit(q, k, v, self.decay, self.beta, starts)

    def finished(self, out: jax.Array, channels: jax.Array) -> jax.Array:
        """Returns what the heads have read in the states [B, S, H, V]."""
        return out

    def skipping(self, there: jax.Array) -> "Projections":
        """Returns the same where tokens change no state unless `there` [B, S] is true."""
        decay = jnp.where(there[..., None], self.decay, 0)
        return self._replace(decay=decay, beta=jnp.where(there[..., None], self.beta, 0))


def with_attention_gate(family: Family) -> Family:
    """Returns the family with a gate on what each head of attention has mixed."""

    def spec(cfg: ModelConfig) -> Spec:
        tree = family.spec(cfg)
        for name in family.stacks(cfg):
            attention = tree[name]["attention"]
            gated = {**attention, "w_gate": replace(attention["w_q"], roles=())}
            tree[name] = {**tree[name], "attention": gated}
        return tree

    return replace(family, spec=spec)


def with_delta_rule(family: Family) -> Family:
    """Returns the family with the delta rule in place of attention, but for the last layer of each unit."""
    return with_states(family, delta_spec, delta_attention)


def delta_spec(cfg: ModelConfig) -> Spec:
    """Declares the projections of the delta rule, its convolution, its decays and the norm of what it reads."""
    D = cfg.d_model
    N = cfg.delta.key_heads
    H = cfg.delta.value_heads
    K = cfg.delta.key_dim
    V = cfg.delta.value_dim
    W = cfg.delta.taps
    std = cfg.init_std
    wide = ("embed", "heads", "head_dim")
    taps = partial(Param, axes=("position", "heads", "head_dim"), kind="table", std=W**-0.5)
    return {
        "w_q": Param((D, N, K), wide, std=std, roles=("query",)),
        "w_k": Param((D, N, K), wide, std=std, roles=("key",)),
        "w_v": Param((D, H, V), wide, std=std),
        "w_z": Param((D, H, V), wide, std=std),
        "w_beta": Param((D, H), ("embed", "heads"), std=std, orthogonal=False),
        "w_decay": Param((D, H), ("embed", "heads"), std=std, orthogonal=False),
        "taps_q": taps((W, N, K)),
        "taps_k": taps((W, N, K)),
        "taps_v": taps((W, H, V)),
        "rate": Param((H,), ("heads",), "vector", std=1.0),
        "b_decay": Param((H,), ("heads",), "vector", init=DECAY_BIAS),
        "norm": {"scale": Param((V,), ("head_dim",), "vector", init="ones")},
        "w_o": Param(
            (H, V, D),
            ("heads", "head_dim", "embed"),
            in_axes=2,
            std=std / (2 * cfg.num_layers) ** 0.5,
            roles=("attention_output",),
        ),
    }


def delta_attention(
    cfg: ModelConfig,
    params: Params,
    x: jax.Array,
    ctx: Context,
    inputs: LayerInputs,
    *,
    mask: AttentionMask,
    cache: Params | None = None,
) -> jax.Array:  # [B, S/n, D] -> [B, S/n, D]
    """Mixes the tokens of a document by the gated delta rule; see `layers.attention` and `states.Mixer.mix`."""
    x = ctx.layout.gather_activations(x, "heads")
    project = partial(layers.linear, cfg, x=x, ctx=ctx, over="heads")
    q = checkpoint_name(project(params, "q"), "query")  # [B, S, N, K]
    k = checkpoint_name(project(params, "k"), "key")
    v = checkpoint_name(project(params, "v"), "value")  # [B, S, H, V]
    z = project(params, "z")
    beta = jax.nn.sigmoid(project(params, "beta"))  # [B, S, H]
    # `linear` would add the bias in the compute dtype.
    free = {name: w for name, w in params.items() if name != "b_decay"}
    step = jax.nn.softplus(project(free, "decay").astype(jnp.float32) + params["b_decay"])
    read = Projections(q, k, v, -jnp.exp(params["rate"]) * step, beta)
    mixer = Mixer.of(delta_spec(cfg), ("q", "k", "v"), (HEADS,) * len(read))
    mixed = mixer.mix(ctx, params, read, inputs, cache)  # [B, S, H, V]
    ctx.observe("attention/mixed", mixed, *HEADS)
    mixed = kernels.rms_norm(mixed, params["norm"]["scale"], eps=cfg.norm_eps, implementation=ctx.ops.norm)
    mixed = (mixed * jax.nn.silu(z.astype(jnp.float32))).astype(x.dtype)
    y = layers.project_out(cfg, params, mixed, ctx)
    ctx.observe("attention/out", y, *RESIDUAL)
    return y
