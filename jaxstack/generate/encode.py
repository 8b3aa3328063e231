"""Reads whole texts with an encoder: their embeddings, and the logits of all their tokens.

Texts of a call share one of few lengths, so that few programs are compiled. Padding is a segment of its own.
Suffixes: N texts, B rows of a call, S slots, D width, V vocabulary or labels.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack import families
from jaxstack.common.counts import plural
from jaxstack.common.tree import PyTree
from jaxstack.config import ConfigError, ModelConfig
from jaxstack.data import Tokenizer
from jaxstack.data.tokenizers import missing_before
from jaxstack.families import encoder
from jaxstack.generate.engine import dropless, jit_on_mesh
from jaxstack.generate.prompts import Rows, check_rows, power_of_buckets
from jaxstack.models.context import Context
from jaxstack.models.params import Params
from jaxstack.sharding import collectives

ROWS = 8
"""Texts of a call."""


def framed(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Returns the ids of a text with those that its tokenizer puts around it, such as [CLS] and [SEP]."""
    return [*missing_before(tokenizer, ids), *ids, *tokenizer.after]


@dataclass(frozen=True, eq=False)
class TextEncoder:
    """An encoder that reads texts.

    Attributes:
      cfg: the model.
      params: its parameters.
      ctx: the execution context.
    """

    cfg: ModelConfig
    params: Params
    ctx: Context

    @classmethod
    def create(cls, cfg: ModelConfig, params: Params, ctx: Context) -> "TextEncoder":
        """Returns an encoder without capacity limits of experts.

        Raises:
          ConfigError: the model is not an encoder.
        """
        if cfg.family != "encoder":
            raise ConfigError(f"model.family={cfg.family} is not an encoder. Use a run with family=encoder.")
        return cls(dropless(cfg), params, ctx.whole_sequences())

    def embeddings(self, texts: Rows) -> np.ndarray:
        """Returns the mean of the last layer's outputs over the tokens of each text, scaled to length 1 [N, D].

        Raises:
          ConfigError: no text, an empty text, an id that does not exist, or more tokens than learned positions.
        """
        found = np.zeros((len(texts), self.cfg.d_model), np.float32)
        for index, arrays in self._calls(texts):
            found[index] = np.asarray(self._embed(self.params, *arrays, np.int32(0)))[: len(index)]
        return found

    def logits(self, texts: Rows) -> list[np.ndarray]:
        """Returns the logits of each token of each text: arrays [S, V] in float32.

        Raises:
          ConfigError: see `embeddings`.
        """
        found: dict[int, np.ndarray] = {}
        for index, arrays in self._calls(texts):
            values = np.asarray(self._predict(self.params, *arrays, np.int32(0)))[..., : self.cfg.classes]
            found |= {i: row[: len(texts[i])] for i, row in zip(index, values, strict=False)}
        return [found[i] for i in range(len(texts))]

    def _calls(self, texts: Rows) -> Iterator[tuple[list[int], tuple[np.ndarray, np.ndarray]]]:
        """Yields the indices of the texts of a call, and their tokens and segments [B, S]."""
        check_rows(texts, self.cfg.vocab)
        most = self.cfg.max_positions if self.cfg.positions == "learned" else None
        longest = max(map(len, texts))
        if most is not None and longest > most:
            raise ConfigError(
                f"a text has {plural(longest, 'token')}, but the model's table of learned positions ends at {most}. "
                f"Shorten it."
            )
        size = -(-ROWS // self.ctx.layout.replicas) * self.ctx.layout.replicas
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        for at in range(0, len(order), size):
            index = order[at : at + size]
            slots = power_of_buckets(max(len(texts[i]) for i in index))
            slots = slots if most is None else min(slots, most)
            tokens = np.zeros((size, slots), np.int32)
            segments = np.zeros((size, slots), np.int32)
            for row, i in enumerate(index):
                tokens[row, : len(texts[i])] = texts[i]
                segments[row, : len(texts[i])] = 1
            yield index, (tokens, segments)

    @cached_property
    def _embed(self) -> Callable[..., PyTree]:
        # What a head reads has gone through the head's transform. The layers' output has not.
        family = replace(families.of(self.cfg), final_norm=encoder.last_layer)

        def work(params: Params, tokens: jax.Array, segments: jax.Array, _: jax.Array) -> jax.Array:
            batch = {"tokens": tokens, "segment_ids": segments}
            hidden = family.hidden_states(self.cfg, params, batch, self.ctx)[0].astype(jnp.float32)
            inside = (segments > 0)[..., None]
            mean = jnp.sum(hidden * inside, 1) / jnp.maximum(jnp.sum(inside, 1), 1)
            return mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)

        return jit_on_mesh(work, self.cfg, self.ctx, parts=2)

    @cached_property
    def _predict(self) -> Callable[..., PyTree]:
        family = families.of(self.cfg)

        def work(params: Params, tokens: jax.Array, segments: jax.Array, _: jax.Array) -> jax.Array:
            batch = {"tokens": tokens, "segment_ids": segments}
            hidden = family.hidden_states(self.cfg, params, batch, self.ctx)[0]
            logits = family.logits(self.cfg, params, hidden, self.ctx)
            return collectives.all_gather_invariant(logits, self.ctx.layout.axes("vocab"), 2)

        return jit_on_mesh(work, self.cfg, self.ctx, parts=2)
