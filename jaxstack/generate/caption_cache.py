"""The language branch of a contrastive model with caches: it reads a picture once, then writes one token at a time.

Rows end in the same slot, as prompts do. Suffixes: B rows of this device, S slots of the beginnings or patches, T slots
in all, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxstack import families
from jaxstack.common.tree import PyTree
from jaxstack.config import ModelConfig
from jaxstack.families import contrastive
from jaxstack.generate.kv_cache import SLOT_AXIS, known_logits
from jaxstack.models.context import Context
from jaxstack.models.params import cast_matrices
from jaxstack.sharding import collectives


@dataclass(frozen=True)
class CachedCaptions:
    """Writes the captions of pictures; the work of one device. It has the methods of `kv_cache.CachedDecoder`.

    Attributes:
      cfg: the model.
      params: its parameters in the compute dtype.
      ctx: the execution context.
      vocabulary: number of ids that exist.
      first: slot of each row's start token [B].
      patches: patches of the pictures [B, S, P].
      num_slots: number of slots T.
    """

    cfg: ModelConfig
    params: PyTree
    ctx: Context
    vocabulary: int
    first: jax.Array
    patches: jax.Array
    num_slots: int

    @classmethod
    def create(
        cls, cfg: ModelConfig, params: PyTree, ctx: Context, *, vocabulary: int, first: jax.Array, patches: jax.Array,
        num_slots: int,
    ) -> "CachedCaptions":  # fmt: skip
        """Returns the model with its parameters cast, for rows with `first` [B] and `patches` [B, S, P].

        For the other arguments see the class.
        """
        params = cast_matrices(families.spec(cfg), params, ctx.dtype)
        return cls(cfg, params, ctx, vocabulary, first, patches, num_slots)

    def prefill(self, tokens: jax.Array) -> tuple[jax.Array, PyTree]:
        """Returns the logits [B, V] after the beginnings [B, S], which it reads token by token, and the caches."""
        cross = contrastive.encode_picture(self.cfg, families.of(self.cfg), self.params, self.patches, self.ctx)
        like = cross["cross_keys"]
        _, rows, heads, width, _ = like.shape
        shapes = {"keys": (rows, heads, width, self.num_slots), "values": (rows, heads, self.num_slots, width)}
        depths = {"text": self.cfg.num_layers, "caption": self.cfg.contrastive.caption_layers}
        own = {
            stack: {name: collectives.zeros((depth, *shape), like.dtype, like) for name, shape in shapes.items()}
            for stack, depth in depths.items()
        }
        logits, cache = self.decode_token(tokens[:, 0], jnp.int32(0), {"own": own, "cross": cross})

        def read(carry: tuple[jax.Array, PyTree], at: jax.Array) -> tuple[tuple[jax.Array, PyTree], None]:
            new = self.decode_token(tokens[:, at], at, carry[1])
            return collectives.match_varying_tree(new, carry), None

        later = jnp.arange(1, tokens.shape[1])
        return jax.lax.scan(read, (logits, cache), later)[0]

    def prefill_counted(self, tokens: jax.Array) -> tuple[jax.Array, PyTree, PyTree]:
        """Returns what `prefill` does for the beginnings [B, S], and no load: only a decoder's experts are counted."""
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
        """Returns the logits [B, V] after one more token of each row [B], in `slot`, and the caches that include it."""
        index = jnp.arange(self.num_slots)
        distance = jnp.where(index >= self.first[:, None], slot - index, 0)
        batch: dict[str, Any] = {
            "tokens": tokens[:, None],
            "positions": jnp.maximum(slot - self.first, 0)[:, None],
            "distance": [distance],
        }
        own = cache["own"]
        known = {"text": own["text"], "caption": own["caption"] | cache["cross"]}
        x, new = contrastive.decode_caption(self.cfg, families.of(self.cfg), self.params, batch, known, self.ctx)

        def put(name: str, held: jax.Array, entry: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(held, entry, slot, held.ndim + SLOT_AXIS[name])

        own = {s: {n: put(n, held, new[s][n]) for n, held in arrays.items()} for s, arrays in own.items()}
        logits = contrastive.logits(self.cfg, self.params, {"caption": x}, self.ctx)[:, 0]
        logits = collectives.all_gather_invariant(logits, self.ctx.layout.axes("vocab"), 1)
        return known_logits(self.cfg, logits, self.vocabulary), cache | {"own": own}
