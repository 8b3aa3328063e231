"""State-space layers in place of attention (Mamba-2, arXiv:2405.21060), in all layers or in most of a hybrid.

A token writes its values to the states of heads at a key that the heads of a group share, after a decay that it chooses
by a step: a large step forgets what was before, and writes more. Its query reads them, see `states`. Mamba-2 consists
of such layers alone, without an MLP. Hybrids such as Granite 4 have attention in some layers, and an MLP or experts in
all.

Suffixes: B batch, S sequence, D width, H heads, P width of a head, G groups, N size of a key, W taps of the
convolution, C = H P + 2 G N channels of the convolution.
"""

import math
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxstack.common.tree import PyTree
from jaxstack.config import ModelConfig
from jaxstack.features.latent_attention import narrow
from jaxstack.features.states import DECAY_BIAS, Mixer, with_states
from jaxstack.kernels import AttentionMask, StateTokens
from jaxstack.models import layers
from jaxstack.models.blocks import Stack, dropout
from jaxstack.models.context import Context
from jaxstack.models.family import Family
from jaxstack.models.layer_inputs import LayerInputs
from jaxstack.models.layers import HEADS, RESIDUAL
from jaxstack.models.params import Param, Params, Spec
from jaxstack.sharding import collectives

CHANNELS = ("x", "b", "c")
"""The projections that the convolution reads: values, keys and queries."""


class Projections(NamedTuple):
    """What the states read of the tokens, see `states.Projections`.

    Attributes:
      x: values before the convolution [B, S, H, P].
      b, c: keys and queries before the convolution [B, S, G, N].
      step: factor on what each token writes, in float32 [B, S, H].
      decay: logarithm of the factor on the state before each token [B, S, H].
      skip: factor on a token's own values that its output gets, too [H].
    """

    x: jax.Array
    b: jax.Array
    c: jax.Array
    step: jax.Array
    decay: jax.Array
    skip: jax.Array

    @property
    def channels(self) -> jax.Array:
        """The channels of the convolution [B, S, C]."""
        return jnp.concatenate([a.reshape(*a.shape[:2], -1) for a in self[:3]], -1)

    def tokens(self, channels: jax.Array, starts: jax.Array | None) -> StateTokens:
        """Returns the tokens with queries, keys and values from the channels of the convolution [B, S, C]."""
        x, b, c = self._parts(channels)
        return StateTokens(c, b, x * self.step[..., None], self.decay, starts=starts)

    def finished(self, out: jax.Array, channels: jax.Array) -> jax.Array:
        """Returns what the heads have mixed in float32 [B, S, H, P]: what they read, and a part of the values."""
        return out + self.skip[:, None] * self._parts(channels)[0]

    def skipping(self, there: jax.Array) -> "Projections":
        """Returns the same where tokens change no state unless `there` [B, S] is true."""
        step = jnp.where(there[..., None], self.step, 0)
        return self._replace(step=step, decay=jnp.where(there[..., None], self.decay, 0))

    def _parts(self, channels: jax.Array) -> list[jax.Array]:
        """Returns values, keys and queries from the channels of the convolution."""
        sizes = [math.prod(a.shape[2:]) for a in self[:3]]
        parts = jnp.split(jax.nn.silu(channels), [sizes[0], sizes[0] + sizes[1]], -1)
        return [part.reshape(a.shape) for part, a in zip(parts, self[:3], strict=True)]


def with_state_space(family: Family) -> Family:
    """Returns the family with state spaces in place of attention, in the layers that `model.ssm.layers` lists."""
    return with_states(family, state_space_spec, state_space)


def without_mlp(family: Family) -> Family:
    """Returns the family whose layers have no MLP."""

    def spec(cfg: ModelConfig) -> Spec:
        tree = family.spec(cfg)
        for name in family.stacks(cfg):
            tree[name] = {group: p for group, p in tree[name].items() if group not in ("mlp", "mlp_norm")}
        return tree

    def stacks(cfg: ModelConfig) -> dict[str, Stack]:
        return {name: replace(one, block=mixer_block) for name, one in family.stacks(cfg).items()}

    return replace(family, spec=spec, stacks=stacks)


def mixer_block(
    cfg: ModelConfig,
    stack: Stack,
    params: Params,
    x: jax.Array,
    ctx: Context,
    inputs: LayerInputs,
    *,
    mask: AttentionMask,
    cache: PyTree = None,
) -> jax.Array:  # [B, S/n, D] -> [B, S/n, D]
    """Runs one layer without an MLP; see `blocks.block`."""
    ctx.observe("residual/in", x, *RESIDUAL)
    h = layers.norm(cfg, params["attention_norm"], x, ctx)
    ctx.observe("attention_norm/out", h, *RESIDUAL)
    h = stack.attention(cfg, params["attention"], h, ctx, inputs, mask=mask, cache=cache)
    x = x + dropout(cfg, "attention", h, inputs)
    ctx.observe("residual/out", x, *RESIDUAL)
    return x


def state_space_spec(cfg: ModelConfig) -> Spec:
    """Declares the projections of a state-space layer, its convolution, its steps and the norm of what it reads.

    The devices of a tensor group split the heads, and the groups if there are several.
    """
    D = cfg.d_model
    H = cfg.ssm.heads
    P = cfg.ssm.head_dim
    G = cfg.ssm.groups
    N = cfg.ssm.state_dim
    W = cfg.ssm.taps
    std = cfg.init_std
    groups = "heads" if G > 1 else "rank"
    wide = ("embed", "heads", "head_dim")
    shared = ("embed", groups, "head_dim")
    taps = partial(Param, kind="table", std=W**-0.5)
    offset = partial(Param, kind="vector", init="zeros")
    return {
        "w_z": Param((D, H, P), wide, std=std),
        "w_x": Param((D, H, P), wide, std=std),
        "w_b": Param((D, G, N), shared, std=std, roles=("key",)),
        "w_c": Param((D, G, N), shared, std=std, roles=("query",)),
        "w_step": Param((D, H), ("embed", "heads"), std=std, orthogonal=False),
        "taps_x": taps((W, H, P), ("position", "heads", "head_dim")),
        "taps_b": taps((W, G, N), ("position", groups, "head_dim")),
        "taps_c": taps((W, G, N), ("position", groups, "head_dim")),
        "offset_x": offset((H, P), ("heads", "head_dim")),
        "offset_b": offset((G, N), (groups, "head_dim")),
        "offset_c": offset((G, N), (groups, "head_dim")),
        "rate": Param((H,), ("heads",), "vector", std=1.0),
        "step_bias": Param((H,), ("heads",), "vector", init=DECAY_BIAS),
        "skip": Param((H,), ("heads",), "vector", init="ones"),
        "norm": {"scale": Param((H, P), ("heads", "head_dim"), "vector", init="ones")},
        "w_o": Param(
            (H, P, D),
            ("heads", "head_dim", "embed"),
            in_axes=2,
            std=std / (2 * cfg.num_layers) ** 0.5,
            roles=("attention_output",),
        ),
    }


def state_space(
    cfg: ModelConfig,
    params: Params,
    x: jax.Array,
    ctx: Context,
    inputs: LayerInputs,
    *,
    mask: AttentionMask,
    cache: Params | None = None,
) -> jax.Array:  # [B, S/n, D] -> [B, S/n, D]
    """Mixes the tokens of a document by states; see `layers.attention` and `states.Mixer.mix`.

    A single group's keys and queries are made where the residual stream is, and gathered: all devices of a tensor group
    read them.
    """
    h = ctx.layout.gather_activations(x, "heads")
    project = partial(layers.linear, cfg, params, x=h, ctx=ctx, over="heads")
    if cfg.ssm.groups > 1:
        b, c = (project(name) for name in ("b", "c"))
    else:
        b, c = (ctx.layout.gather_activations(narrow(params, f"w_{name}", x, ctx), "heads") for name in ("b", "c"))
    b = checkpoint_name(b, "key")  # [B, S, G, N]
    c = checkpoint_name(c, "query")
    values = checkpoint_name(project("x"), "value")  # [B, S, H, P]
    z = project("z")
    step = jax.nn.softplus(project("step").astype(jnp.float32) + params["step_bias"])  # [B, S, H]
    read = Projections(values, b, c, step, -jnp.exp(params["rate"]) * step, params["skip"])
    groups = HEADS if cfg.ssm.groups > 1 else HEADS[:2]
    where = (HEADS, groups, groups, HEADS, HEADS, HEADS[2:])
    mixed = Mixer.of(state_space_spec(cfg), CHANNELS, where).mix(ctx, params, read, inputs, cache)
    ctx.observe("attention/mixed", mixed, *HEADS)
    mixed = group_norm(cfg, params["norm"]["scale"], mixed * jax.nn.silu(z.astype(jnp.float32)), ctx)
    y = layers.project_out(cfg, params, mixed.astype(x.dtype), ctx)
    ctx.observe("attention/out", y, *RESIDUAL)
    return y


def group_norm(cfg: ModelConfig, scale: jax.Array, x: jax.Array, ctx: Context) -> jax.Array:  # [B, S, H, P]
    """Normalises the heads of each group together; one group may be split over devices."""
    each = cfg.ssm.heads // cfg.ssm.groups
    groups = max(x.shape[2] // each, 1)
    split = x.reshape(*x.shape[:2], groups, -1)
    squares = jnp.square(split).sum(-1, keepdims=True)
    if cfg.ssm.groups == 1:
        squares = collectives.all_reduce(squares, ctx.layout.axes("heads"))
    inverse = jax.lax.rsqrt(squares / (each * cfg.ssm.head_dim) + cfg.norm_eps)
    return (split * inverse).reshape(x.shape) * scale
