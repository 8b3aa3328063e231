"""Layers of the gated delta rule in place of attention (Gated DeltaNet, arXiv:2412.06464), as Qwen3-Next has them.

Three of four layers of Qwen3-Next mix tokens by a state for each head, whose size does not depend on the text. The
fourth has attention. So a stack has units of four layers: one turn of the loop runs a unit, and a checkpoint, a stage
of a pipeline and the cache of generation have units for layers, see `blocks.alternate`.

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
from jaxstack.kernels import AttentionMask
from jaxstack.models import layers
from jaxstack.models.blocks import Stack, alternate
from jaxstack.models.context import Context
from jaxstack.models.family import Family
from jaxstack.models.layer_inputs import LayerInputs
from jaxstack.models.layers import HEADS, RESIDUAL
from jaxstack.models.params import Param, Params, Spec, stack, unstack

DECAY_BIAS = math.log(math.expm1(0.01))
"""Initial bias of decays: without an input, a token decays a state by 0.01 e^a. The a of the heads are drawn with
standard deviation 1, so that heads remember from ten to a thousand tokens."""

TAPS = ("taps_q", "taps_k", "taps_v")
"""The factors of the convolution, by the projections that it reads."""


class Projections(NamedTuple):
    """What the rule reads of the tokens, by projections of them.

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

    def convolved(self, channels: jax.Array) -> "Projections":
        """Returns these with queries, keys and values from the channels of the convolution [B, S, C]."""
        sizes = [math.prod(a.shape[2:]) for a in self[:3]]
        parts = jnp.split(jax.nn.silu(channels), [sizes[0], sizes[0] + sizes[1]], -1)
        q, k, v = (part.reshape(a.shape) for part, a in zip(parts, self[:3], strict=True))
        return self._replace(q=q, k=k, v=v)


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

    def spec(cfg: ModelConfig) -> Spec:
        tree = family.spec(cfg)
        for name, one in family.stacks(cfg).items():
            layer = unstack(tree[name])
            other = {**layer, "attention": delta_spec(cfg)}
            unit = {f"layer_{i}": other for i in range(cfg.delta.every - 1)}
            unit[f"layer_{cfg.delta.every - 1}"] = layer
            tree[name] = stack(unit, one.depth // cfg.delta.every)
        return tree

    def stacks(cfg: ModelConfig) -> dict[str, Stack]:
        found = {}
        for name, one in family.stacks(cfg).items():
            other = replace(one, attention=delta_attention, keeps=("state", "recent"))
            found[name] = alternate(one.depth, [*[other] * (cfg.delta.every - 1), one])
        return found

    return replace(family, spec=spec, stacks=stacks)


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
    """Mixes the tokens of a document by the gated delta rule; see `layers.attention` for the arguments.

    With a cache it keeps `state` [B, H, K, V] in float32, and `recent` [B, 1, W - 1, C], what the convolution reads of
    the last tokens. A row's first token has position 0 and reads neither. With a cache, tokens whose segment is 0 are
    padding after the others.
    """
    x = ctx.layout.gather_activations(x, "heads")
    q = checkpoint_name(_project(cfg, params, "q", x, ctx), "query")  # [B, S, N, K]
    k = checkpoint_name(_project(cfg, params, "k", x, ctx), "key")
    v = checkpoint_name(_project(cfg, params, "v", x, ctx), "value")  # [B, S, H, V]
    z = _project(cfg, params, "z", x, ctx)
    beta = jax.nn.sigmoid(_project(cfg, params, "beta", x, ctx))  # [B, S, H]
    # `linear` would add the bias in the compute dtype.
    free = {name: w for name, w in params.items() if name != "b_decay"}
    step = jax.nn.softplus(_project(cfg, free, "decay", x, ctx).astype(jnp.float32) + params["b_decay"])
    decay = -jnp.exp(params["rate"]) * step
    taps = {name: params[name] for name in TAPS}
    read = Projections(q, k, v, decay, beta)
    if cache:
        mixed = _go_on(ctx, taps, cache, inputs, read)
    else:
        arguments = taps, read, inputs.segment_ids
        declared = {name: delta_spec(cfg)[name] for name in TAPS}
        where = declared, HEADS, ("batch", "sequence")
        mixed = ctx.region(partial(_mix, cache is not None), arguments, where, HEADS)
    ctx.observe("attention/mixed", mixed, *HEADS)
    mixed = kernels.rms_norm(mixed, params["norm"]["scale"], eps=cfg.norm_eps, implementation=ctx.ops.norm)
    mixed = (mixed * jax.nn.silu(z.astype(jnp.float32))).astype(x.dtype)
    y = layers.project_out(cfg, params, mixed, ctx)
    ctx.observe("attention/out", y, *RESIDUAL)
    return y


def _project(cfg: ModelConfig, params: Params, name: str, x: jax.Array, ctx: Context) -> jax.Array:
    return layers.linear(cfg, params, name, x, ctx, "heads")


def _mix(
    keep: bool, ctx: Context, taps: Params, read: Projections, segment_ids: jax.Array | None
) -> jax.Array:  # [B, S, H, V]
    """Computes the convolution and the rule over the heads of this device, from the first tokens of rows on."""
    axes = ctx.layout.axes("sequence")
    w = _join_taps(taps)
    if axes:
        assert not keep, "generation has whole sequences"
        return _mix_parts(axes, w, read, segment_ids)
    channels = read.channels
    same = None if segment_ids is None else kernels.same_document(segment_ids, len(w))
    starts = None if same is None else ~same[..., -2]
    convolved = read.convolved(kernels.causal_convolution(channels, w, same=same))
    mixed, state = kernels.gated_delta_rule(*convolved, starts=starts)
    if keep:
        ctx.keep("state", state)
        rows = jnp.pad(channels, ((0, 0), (len(w) - 1, 0), (0, 0)))
        ctx.keep("recent", rows[:, None, channels.shape[1] :])
    return mixed


def _mix_parts(
    axes: tuple[str, ...], w: jax.Array, read: Projections, segment_ids: jax.Array | None
) -> jax.Array:  # [B, S, H, V]
    """Does what `_mix` does where the sequence is sharded: each device has two parts, and reads the ends of others."""
    channels = read.channels
    B, S = channels.shape[:2]
    tokens = len(w) - 1
    ids = jnp.ones((B, S), jnp.int32) if segment_ids is None else segment_ids + 1  # 0 is before the first part
    earlier = kernels.tokens_before(channels, tokens, axes).reshape(2 * B, tokens, -1)
    theirs = kernels.tokens_before(ids, tokens, axes).reshape(2 * B, tokens)
    same = kernels.same_document(ids.reshape(2 * B, -1), len(w), theirs)
    halves = channels.reshape(2 * B, S // 2, -1)
    convolved = kernels.causal_convolution(halves, w, earlier=earlier, same=same)
    starts = ~same[..., -2].reshape(B, S)
    return kernels.context_delta_rule(*read.convolved(convolved.reshape(B, S, -1)), axes=axes, starts=starts)


def _go_on(
    ctx: Context, taps: Params, cache: Params, inputs: LayerInputs, read: Projections
) -> jax.Array:  # [B, S, H, V]
    """Computes the convolution and the rule for tokens after those of a cache, and keeps the next cache."""
    assert inputs.positions is not None
    w = _join_taps(taps)
    channels = read.channels
    B, S = channels.shape[:2]
    positions = jnp.broadcast_to(inputs.positions, (B, S))
    ago = jnp.arange(len(w))[::-1]
    same = positions[..., None] >= ago  # [B, S, W]
    earlier = cache["recent"][:, 0]
    state = jnp.where((positions[:, 0] == 0)[:, None, None, None], 0, cache["state"])
    count = jnp.full((B,), S)
    if inputs.segment_ids is not None:
        there = inputs.segment_ids != 0
        count = there.sum(1)
        decay = jnp.where(there[..., None], read.decay, 0)
        beta = jnp.where(there[..., None], read.beta, 0)
        read = read._replace(decay=decay, beta=beta)
    rule = kernels.recurrent_delta_rule if S == 1 else kernels.gated_delta_rule
    convolved = kernels.causal_convolution(channels, w, earlier=earlier, same=same)
    mixed, state = rule(*read.convolved(convolved), state=state)
    rows = jnp.concatenate([earlier, channels], 1)
    last = jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, len(w) - 1))(rows, count)
    ctx.keep("state", state)
    ctx.keep("recent", last[:, None])
    return mixed


def _join_taps(taps: Params) -> jax.Array:
    """Returns the factors of the convolution [W, C]."""
    return jnp.concatenate([taps[name].reshape(len(taps[name]), -1) for name in TAPS], -1)
