"""Layers whose heads have states in place of a KV cache: what the delta rule and state spaces have in common.

Such a layer projects its tokens, mixes the last few of them by a convolution of each channel, and lets what comes out
write to states and read from them, see `kernels.states`. The size of a state does not depend on the text. Some layers
of a unit may have attention: one turn of the loop then runs a unit, and a checkpoint, a stage of a pipeline and the
cache of generation have units for layers, see `blocks.alternate`.

Suffixes: B batch, S sequence, H heads, K and V sizes of a state, W taps of the convolution, C its channels.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp

from jaxstack import kernels
from jaxstack.config import ModelConfig
from jaxstack.kernels import StateTokens
from jaxstack.models.blocks import Attention, Stack, alternate
from jaxstack.models.context import Context
from jaxstack.models.family import Family
from jaxstack.models.layer_inputs import LayerInputs
from jaxstack.models.layers import HEADS
from jaxstack.models.params import Params, Spec, stack, unstack

DECAY_BIAS = math.log(math.expm1(0.01))
"""Initial bias of decays: without an input, a token decays a state by 0.01 e^a. The a of the heads are drawn with
standard deviation 1, so that heads remember from ten to a thousand tokens."""

Self = TypeVar("Self", bound="Projections")


class Projections(Protocol):
    """What a layer reads of the tokens, by projections of them: a tuple of arrays."""

    def __iter__(self) -> Iterator[jax.Array]:
        """Yields the arrays."""

    @property
    def channels(self) -> jax.Array:
        """The channels of the convolution [B, S, C]."""

    def tokens(self, channels: jax.Array, starts: jax.Array | None) -> StateTokens:
        """Returns what the tokens do to the states, from the channels after the convolution [B, S, C]."""

    def finished(self, out: jax.Array, channels: jax.Array) -> jax.Array:
        """Returns what the heads have mixed [B, S, H, V], from what they read in the states and from the channels."""

    def skipping(self: Self, there: jax.Array) -> Self:
        """Returns the same where tokens that are padding, as `there` [B, S] says, change no state."""


@dataclass(frozen=True)
class Mixer:
    """A layer's convolution and states.

    Attributes:
      names: the projections that the convolution reads. Their factors are the parameters `taps_<name>` [W, ...], and
        what it adds are `offset_<name>`, where these are declared.
      declared: the declarations of these parameters.
      where: the logical axes of each array of `Projections`.
    """

    names: tuple[str, ...]
    declared: Spec
    where: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, spec: Spec, names: tuple[str, ...], where: tuple[tuple[str, ...], ...]) -> "Mixer":
        """Returns the mixer of a layer with these declarations."""
        paths = [f"{kind}_{name}" for kind in ("taps", "offset") for name in names]
        return cls(names, {path: spec[path] for path in paths if path in spec}, where)

    def mix(
        self, ctx: Context, params: Params, read: Projections, inputs: LayerInputs, cache: Params | None
    ) -> jax.Array:  # [B, S, H, V]
        """Returns what the heads have mixed.

        With a cache it keeps `state` [B, H, K, V] in float32, and `recent` [B, 1, W - 1, C], what the convolution reads
        of the last tokens. A row's first token has position 0 and reads neither. With a cache, tokens whose segment is
        0 are padding after the others.
        """
        own = {path: params[path] for path in self.declared}
        if cache:
            return self._go_on(ctx, own, read, inputs, cache)
        where = self.declared, ("batch", "sequence"), *self.where
        work = partial(self._from_the_start, cache is not None, type(read))
        mixed: jax.Array = ctx.region(work, (own, inputs.segment_ids, *read), where, HEADS)
        return mixed

    def _from_the_start(
        self,
        keep: bool,
        kind: Callable[..., Projections],
        ctx: Context,
        params: Params,
        segment_ids: jax.Array | None,
        *arrays: jax.Array,
    ) -> jax.Array:
        """Computes the heads of this device, from the first tokens of rows on."""
        read = kind(*arrays)
        axes = ctx.layout.axes("sequence")
        if axes:
            assert not keep, "generation has whole sequences"
            return self._over_devices(axes, params, read, segment_ids)
        channels = read.channels
        w, bias = self._joined(params)
        tokens = len(w) - 1
        same = None if segment_ids is None else kernels.same_document(segment_ids, tokens + 1)
        starts = None if same is None else ~same[..., -2]
        convolved = kernels.causal_convolution(channels, w, bias=bias, same=same)
        out, state = kernels.chunked_states(read.tokens(convolved, starts))
        if keep:
            ctx.keep("state", state)
            rows = jnp.pad(channels, ((0, 0), (tokens, 0), (0, 0)))
            ctx.keep("recent", rows[:, None, channels.shape[1] :])
        return read.finished(out, convolved)

    def _over_devices(
        self, axes: tuple[str, ...], params: Params, read: Projections, segment_ids: jax.Array | None
    ) -> jax.Array:
        """Computes the same where the sequence is sharded: each device has two parts, and reads the ends of others."""
        channels = read.channels
        w, bias = self._joined(params)
        B, S = channels.shape[:2]
        tokens = len(w) - 1
        ids = jnp.ones((B, S), jnp.int32) if segment_ids is None else segment_ids + 1  # 0 is before the first part
        earlier = kernels.tokens_before(channels, tokens, axes).reshape(2 * B, tokens, -1)
        theirs = kernels.tokens_before(ids, tokens, axes).reshape(2 * B, tokens)
        same = kernels.same_document(ids.reshape(2 * B, -1), tokens + 1, theirs)
        halves = channels.reshape(2 * B, S // 2, -1)
        convolved = kernels.causal_convolution(halves, w, bias=bias, earlier=earlier, same=same).reshape(B, S, -1)
        starts = ~same[..., -2].reshape(B, S)
        out = kernels.context_states(read.tokens(convolved, starts), axes=axes)
        return read.finished(out, convolved)

    def _go_on(self, ctx: Context, params: Params, read: Projections, inputs: LayerInputs, cache: Params) -> jax.Array:
        """Computes tokens after those of a cache, and keeps the next cache."""
        assert inputs.positions is not None
        channels = read.channels
        w, bias = self._joined(params)
        B, S = channels.shape[:2]
        tokens = len(w) - 1
        positions = jnp.broadcast_to(inputs.positions, (B, S))
        same = positions[..., None] >= jnp.arange(tokens + 1)[::-1]  # [B, S, W]
        earlier = cache["recent"][:, 0]
        state = jnp.where((positions[:, 0] == 0)[:, None, None, None], 0, cache["state"])
        count = jnp.full((B,), S)
        if inputs.segment_ids is not None:
            there = inputs.segment_ids != 0
            count = there.sum(1)
            read = read.skipping(there)
        rule = kernels.recurrent_states if S == 1 else kernels.chunked_states
        convolved = kernels.causal_convolution(channels, w, bias=bias, earlier=earlier, same=same)
        out, state = rule(read.tokens(convolved, None), state=state)
        rows = jnp.concatenate([earlier, channels], 1)
        last = jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, tokens))(rows, count)
        ctx.keep("state", state)
        ctx.keep("recent", last[:, None])
        return read.finished(out, convolved)

    def _joined(self, params: Params) -> tuple[jax.Array, jax.Array | None]:
        """Returns the factors of the convolution [W, C], and what it adds [C] or `None`."""
        factors = [params[f"taps_{name}"] for name in self.names]
        w = jnp.concatenate([a.reshape(len(a), -1) for a in factors], -1)
        offsets = [params[f"offset_{name}"].reshape(-1) for name in self.names if f"offset_{name}" in params]
        return w, (jnp.concatenate(offsets) if offsets else None)


def with_states(family: Family, declare: Callable[[ModelConfig], Spec], attention: Attention) -> Family:
    """Returns the family with states in place of attention, in the layers that `ModelConfig.state_layers` says.

    Args:
      declare: declares the parameters of such a layer in place of those of attention.
      attention: what such a layer computes in place of attention.
    """

    def spec(cfg: ModelConfig) -> Spec:
        tree = family.spec(cfg)
        for name, one in family.stacks(cfg).items():
            layer = unstack(tree[name])
            other = {**layer, "attention": declare(cfg)}
            kinds = [other if states else layer for states in cfg.state_layers]
            unit = {f"layer_{i}": kind for i, kind in enumerate(kinds)} if kinds[1:] else kinds[0]
            tree[name] = stack(unit, one.depth // len(kinds))
        return tree

    def stacks(cfg: ModelConfig) -> dict[str, Stack]:
        found = {}
        for name, one in family.stacks(cfg).items():
            other = replace(one, attention=attention, keeps=("state", "recent"))
            kinds = [other if states else one for states in cfg.state_layers]
            found[name] = alternate(one.depth, kinds) if kinds[1:] else kinds[0]
        return found

    return replace(family, spec=spec, stacks=stacks)
