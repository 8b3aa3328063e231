"""An encoder-decoder with caches: it reads the inputs at once, then writes one token at a time.

Rows of inputs are aligned at their ends, as prompts are. The decoder of each row begins with the start token at
position 0, and all rows write their tokens at the same positions.

Suffixes: B rows of this device, S slots of the inputs, T tokens to write, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxstack import families
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import ModelConfig
from jaxstack.families import encoder_decoder
from jaxstack.generate.caption_cache import CachedCaptions
from jaxstack.generate.kv_cache import SLOT_AXIS, CachedDecoder, known_logits
from jaxstack.models.context import Context
from jaxstack.models.params import cast_matrices
from jaxstack.sharding import collectives


@dataclass(frozen=True)
class CachedPairs:
    """Writes the targets of inputs; the work of one device. It has the methods of `kv_cache.CachedDecoder`.

    Attributes:
      cfg: the model.
      params: its parameters in the compute dtype.
      ctx: the execution context.
      gate: domain of all tokens, for a model with a hard gate.
      vocabulary: number of ids that exist.
      first: slot of each input's first token [B].
      start: id that the decoder reads first.
      num_slots: number of slots T.
    """

    cfg: ModelConfig
    params: PyTree
    ctx: Context
    gate: int | None
    vocabulary: int
    first: jax.Array
    start: int
    num_slots: int

    @classmethod
    def create(
        cls, cfg: ModelConfig, params: PyTree, ctx: Context, *, gate: int | None, vocabulary: int, first: jax.Array,
        start: int, num_slots: int,
    ) -> "CachedPairs":  # fmt: skip
        """Returns the model with its parameters cast, for rows with `first` [B]. For the others see the class."""
        params = cast_matrices(families.spec(cfg), params, ctx.dtype)
        return cls(cfg, params, ctx, gate, vocabulary, first, start, num_slots)

    def prefill(self, tokens: jax.Array) -> tuple[jax.Array, PyTree]:
        """Returns the logits [B, V] of the first token to write, and the caches, given the inputs [B, S]."""
        positions = jnp.arange(tokens.shape[1]) - self.first[:, None]
        batch: Batch = {
            "encoder_tokens": tokens,
            "encoder_positions": jnp.maximum(positions, 0),
            "encoder_segment_ids": (positions >= 0).astype(jnp.int32),
        }
        if self.gate is not None:
            batch["encoder_gate_ids"] = jnp.full_like(tokens, self.gate)
            batch["gate_ids"] = jnp.full_like(tokens[:, :1], self.gate)
        cross = encoder_decoder.encode(self.cfg, families.of(self.cfg), self.params, batch, self.ctx)
        layers, rows, heads, width = cross["cross_keys"].shape[:4]
        like = cross["cross_keys"]
        own = {
            "keys": collectives.zeros((layers, rows, heads, width, self.num_slots), like.dtype, like),
            "values": collectives.zeros((layers, rows, heads, self.num_slots, width), like.dtype, like),
        }
        cache = {"own": own, "cross": cross, "segments": batch["encoder_segment_ids"][:, None, None]}
        return self._write(jnp.full_like(tokens[:, 0], self.start), jnp.int32(0), cache)

    def prefill_counted(self, tokens: jax.Array) -> tuple[jax.Array, PyTree, PyTree]:
        """Returns what `prefill` does for the inputs [B, S], and no load: only a decoder's experts are counted."""
        return *self.prefill(tokens), ()

    def decode_counted(
        self, tokens: jax.Array, slot: jax.Array, cache: PyTree, counted: jax.Array | None = None
    ) -> tuple[jax.Array, PyTree, PyTree]:
        """Returns what `decode_token` does for a token of each row [B], and no load."""
        return *self.decode_token(tokens, slot, cache), ()

    def no_load(self) -> PyTree:
        """Returns the load of no tokens, see `prefill_counted`."""
        return ()

    def decode_token(self, tokens: jax.Array, slot: jax.Array, cache: PyTree) -> tuple[jax.Array, PyTree]:
        """Returns the logits [B, V] after one more token of each row [B], and the caches that include it.

        Args:
          tokens: the newest tokens.
          slot: S for the first token that was written, S + 1 for the second, ...
          cache: cache from `prefill` or `decode_token`.
        """
        return self._write(tokens, slot - cache["segments"].shape[-1] + 1, cache)

    def _write(self, tokens: jax.Array, position: jax.Array, cache: PyTree) -> tuple[jax.Array, PyTree]:
        """Returns what `decode_token` does, given the position of the tokens in the decoder's rows."""
        rows = tokens.shape[0]
        index = jnp.arange(self.num_slots)
        batch: dict[str, Any] = {
            "tokens": tokens[:, None],
            "positions": jnp.broadcast_to(position, (rows, 1)),
            "encoder_segment_ids": cache["segments"][:, 0, 0],
            "distance": [jnp.broadcast_to(position - index, (rows, self.num_slots))],
        }
        if self.gate is not None:
            batch["gate_ids"] = jnp.full((rows, 1), self.gate, jnp.int32)
            batch["encoder_gate_ids"] = jnp.full_like(batch["encoder_segment_ids"], self.gate)
        x, new = encoder_decoder.decode(
            self.cfg, families.of(self.cfg), self.params, batch, cache["own"] | cache["cross"], self.ctx
        )
        own = {
            name: jax.lax.dynamic_update_slice_in_dim(held, new[name], position, held.ndim + SLOT_AXIS[name])
            for name, held in cache["own"].items()
        }
        logits = encoder_decoder.logits(self.cfg, self.params, x, self.ctx)[:, 0]
        logits = collectives.all_gather_invariant(logits, self.ctx.layout.axes("vocab"), 1)
        return known_logits(self.cfg, logits, self.vocabulary), cache | {"own": own}


CachedModel: TypeAlias = CachedDecoder | CachedPairs | CachedCaptions
"""A model that writes one token of each row at a time."""
