"""A model that reads prompts at once and then a token at a time, holding keys and values of all that it has read.

Rows are aligned at their ends: the last tokens of all prompts stand in one slot, and so does every token after them.
What stands before a shorter prompt is seen by nobody. Layers with a sliding window hold all tokens too, and mask those
outside of it.

Suffixes: B rows of this device, S slots of the prompts, T slots in all, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxstack import collectives, model
from jaxstack.config import ModelConfig
from jaxstack.context import Context
from jaxstack.params import cast_matrices


@dataclass(frozen=True)
class Reader:
    """Reads tokens with a model and tells the logits of the next ones; the work of one device.

    Keys and values are arrays [L, B, G, T, K], or with `steps` a list of [period, B, G, T, K].

    Attributes:
      cfg, params, ctx: the model and how to compute.
      gate: domain of all tokens, for a hard gate.
      vocabulary: ids that exist.
      first: slot of each prompt's first token [B].
      slots: in all, T.
      steps: with `ctx.decode=unrolled` the layers' weights apart, see `model.hidden_unrolled`.
    """

    cfg: ModelConfig
    params: Any
    ctx: Context
    gate: int | None
    vocabulary: int
    first: jax.Array
    slots: int
    steps: list[Any] | None

    @classmethod
    def create(cls, cfg: ModelConfig, params: Any, ctx: Context, **rest: Any) -> "Reader":
        """With parameters made ready once, and not for every token."""
        params = cast_matrices(model.spec(cfg), params, ctx.dtype)
        steps = None
        if ctx.decode == "unrolled" and ctx.pipeline is None:
            stacked = model.by_step(cfg, params["layers"])
            steps = [jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(cfg.num_layers // len(cfg.windows))]
        return cls(cfg, params, ctx, steps=steps, **rest)

    def prompts(self, tokens: jax.Array) -> tuple[jax.Array, Any]:
        """Logits [B, V] after the prompts [B, S], and keys and values so far."""
        positions = jnp.arange(tokens.shape[1]) - self.first[:, None]
        x, aux = model.hidden(
            self.cfg,
            self.params,
            tokens,
            self.ctx,
            cache={},
            positions=jnp.maximum(positions, 0),
            segment_ids=(positions >= 0).astype(jnp.int32),
            gate=self._gates(tokens),
        )
        room = self.slots - tokens.shape[1]
        cache: Any = {name: jnp.pad(aux[name], ((0, 0),) * 3 + ((0, room), (0, 0))) for name in ("keys", "values")}
        if self.steps is not None:
            period = len(self.cfg.windows)
            cache = [
                jax.tree.map(lambda a, i=i: a[i * period : (i + 1) * period], cache) for i in range(len(self.steps))
            ]
        return self._logits(x[:, -1:]), cache

    def token(self, tokens: jax.Array, slot: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        """Logits [B, V] after one more token of each row [B], in `slot`; and keys and values so far."""
        before = jnp.arange(self.slots)
        distance = jnp.where(before >= self.first[:, None], slot - before, 0)
        batch: dict[str, Any] = {"positions": (slot - self.first)[:, None], "distance": distance}
        if self.gate is not None:
            batch["gate"] = self._gates(tokens[:, None])
        made: Any
        if self.steps is None:
            x, aux = model.hidden(self.cfg, self.params, tokens[:, None], self.ctx, cache=cache, **batch)
            made = {name: aux[name] for name in cache}
        else:
            batch["tokens"] = tokens[:, None]
            x, made = model.hidden_unrolled(self.cfg, self.params, self.steps, batch, cache, self.ctx)
        cache = jax.tree.map(lambda a, new: jax.lax.dynamic_update_slice_in_dim(a, new, slot, 3), cache, made)
        return self._logits(x), cache

    def _gates(self, tokens: jax.Array) -> jax.Array | None:
        return None if self.gate is None else jnp.full_like(tokens, self.gate)

    def _logits(self, x: jax.Array) -> jax.Array:
        own = model.logits(self.cfg, self.params, x, self.ctx)[:, 0]
        return known(collectives.gather_equal(own, self.ctx.axes("vocab"), 1), self.vocabulary)


def known(logits: jax.Array, vocabulary: int) -> jax.Array:
    """Logits [B, V] of ids that exist, minus infinity for the rest."""
    return jnp.where(jnp.arange(logits.shape[1]) < vocabulary, logits, -jnp.inf)
