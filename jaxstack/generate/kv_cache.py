"""A model that reads prompts at once and then a token at a time, holding keys and values of all that it has read.

Rows are aligned at their ends: the last tokens of all prompts stand in one slot, and so does every token after them.
What stands before a shorter prompt is seen by nobody. A layer with a sliding window holds as many tokens as it sees:
that of slot n is in place n modulo their number, where the oldest was.

Suffixes: B rows of this device, S slots of the prompts, T tokens that a layer holds, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxstack.config import ModelConfig
from jaxstack.models import decoder
from jaxstack.models.context import Context
from jaxstack.models.params import cast_matrices
from jaxstack.sharding import collectives


@dataclass(frozen=True)
class CachedDecoder:
    """Reads tokens with a model and tells the logits of the next ones; the work of one device.

    Keys and values are arrays [L/period, B, G, T, K] for each block of a step of the layers, or with `steps` arrays
    [B, G, T, K] for each block of each step.

    Attributes:
      cfg, params, ctx: the model and how to compute.
      gate: domain of all tokens, for a hard gate.
      vocabulary: ids that exist.
      first: slot of each prompt's first token [B].
      slots: in all, of prompts and of what is to come.
      steps: with `ctx.decode=unrolled` the layers' weights apart, see `model.hidden_unrolled`.
    """

    cfg: ModelConfig
    params: Any
    ctx: Context
    gate: int | None
    vocabulary: int
    first: jax.Array
    num_slots: int
    steps: list[Any] | None

    @classmethod
    def create(cls, cfg: ModelConfig, params: Any, ctx: Context, **rest: Any) -> "CachedDecoder":
        """With parameters made ready once, and not for every token."""
        params = cast_matrices(decoder.spec(cfg), params, ctx.dtype)
        steps = None
        if ctx.decode == "unrolled" and ctx.pipeline is None:
            stacked = decoder.group_layers(cfg, params["layers"])
            steps = [jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(cfg.num_layers // len(cfg.windows))]
        return cls(cfg, params, ctx, steps=steps, **rest)

    def prefill(self, tokens: jax.Array) -> tuple[jax.Array, Any]:
        """Logits [B, V] after the prompts [B, S], and keys and values so far."""
        positions = jnp.arange(tokens.shape[1]) - self.first[:, None]
        x, aux = decoder.hidden_states(
            self.cfg,
            self.params,
            tokens,
            self.ctx,
            cache={},
            positions=jnp.maximum(positions, 0),
            segment_ids=(positions >= 0).astype(jnp.int32),
            gate_ids=self._gates(tokens),
        )
        made = {name: aux[name] for name in ("keys", "values")}
        cache: Any = [
            jax.tree.map(lambda a, T=T: _fill_cache(a, T), block)
            for T, block in zip(self._lengths, decoder.group_layers(self.cfg, made), strict=True)
        ]
        if self.steps is not None:
            cache = [jax.tree.map(lambda a, i=i: a[i], cache) for i in range(len(self.steps))]
        return self._logits(x[:, -1:]), cache

    def decode_token(self, tokens: jax.Array, slot: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        """Logits [B, V] after one more token of each row [B], in `slot`; and keys and values so far."""
        batch: dict[str, Any] = {
            "positions": (slot - self.first)[:, None],
            "distance": [self._distance(slot, T) for T in self._lengths],
        }
        if self.gate is not None:
            batch["gate_ids"] = self._gates(tokens[:, None])
        made: Any
        if self.steps is None:
            x, aux = decoder.hidden_states(self.cfg, self.params, tokens[:, None], self.ctx, cache=cache, **batch)
            made = decoder.group_layers(self.cfg, {name: aux[name] for name in ("keys", "values")})
        else:
            batch["tokens"] = tokens[:, None]
            x, made = decoder.hidden_states_unrolled(self.cfg, self.params, self.steps, batch, cache, self.ctx)
        write = lambda a, new: jax.lax.dynamic_update_slice_in_dim(a, new, slot % a.shape[-2], a.ndim - 2)  # noqa: E731
        return self._logits(x), jax.tree.map(write, cache, made)

    @property
    def _lengths(self) -> list[int]:
        """How many tokens each block of a step holds: those that a window sees beside the newest."""
        return [min(max(window - 1, 1), self.num_slots) if window else self.num_slots for window in self.cfg.windows]

    def _distance(self, slot: jax.Array, T: int) -> jax.Array:
        """From the tokens [B, T] that a layer holds to the one in `slot`; 0: there is none yet, or of no one's text."""
        there = slot - 1 - (slot - 1 - jnp.arange(T)) % T
        return jnp.where(there >= self.first[:, None], slot - there, 0)

    def _gates(self, tokens: jax.Array) -> jax.Array | None:
        return None if self.gate is None else jnp.full_like(tokens, self.gate)

    def _logits(self, x: jax.Array) -> jax.Array:
        own = decoder.logits(self.cfg, self.params, x, self.ctx)[:, 0]
        return mask_unknown_ids(collectives.all_gather_invariant(own, self.ctx.axes("vocab"), 1), self.vocabulary)


def _fill_cache(a: jax.Array, T: int) -> jax.Array:
    """Of the slots [..., S, K] the last T, each in its place, with room for what is to come [..., T, K]."""
    S = a.shape[-2]
    if S <= T:
        return jnp.pad(a, [(0, 0)] * (a.ndim - 2) + [(0, T - S), (0, 0)])
    return jnp.roll(a[..., S - T :, :], S % T, a.ndim - 2)


def mask_unknown_ids(logits: jax.Array, vocabulary: int) -> jax.Array:
    """Logits [B, V] of ids that exist, minus infinity for the rest."""
    return jnp.where(jnp.arange(logits.shape[1]) < vocabulary, logits, -jnp.inf)
