"""Scores texts: the log-probability of each token after those before it, and logits.

Texts of similar length share a call, and a call has one of few lengths, so that few programs are compiled.
Suffixes: B rows, S slots, K alternatives to a token, V vocabulary.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxstack import families
from jaxstack.common.counts import plural
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import ConfigError, ModelConfig
from jaxstack.features import reward_head
from jaxstack.generate.engine import dropless
from jaxstack.generate.prompts import BUCKET, Rows, check_rows, power_of_buckets
from jaxstack.generate.sampling import Logprobs
from jaxstack.kernels.cross_entropy import negative_log_likelihood, scan_chunks, with_one
from jaxstack.models import decoder
from jaxstack.models.context import Context
from jaxstack.models.params import Params
from jaxstack.runtime import distributed
from jaxstack.sharding import collectives


class Scores(NamedTuple):
    """What a model says of a text of n tokens.

    Attributes:
      log_probs: log-probability in nats of each token but the first, after those before it, float32 [n - 1].
      greedy: whether each of them is the most probable token, bool [n - 1].
    """

    log_probs: np.ndarray
    greedy: np.ndarray


@dataclass(frozen=True, eq=False)
class Scorer:
    """Computes log-probabilities with the forward pass of training.

    Attributes:
      cfg: the model, without capacity limits.
      params: its parameters.
      ctx: the execution context, for whole sequences.
      gate: domain of the texts, for a model with a hard gate.
      length: length of the program of every text. `None` means that the length of the text chooses it.
      programs_with_alternatives: the programs of `logprobs`, by number of alternatives and vocabulary.
    """

    cfg: ModelConfig
    params: Params
    ctx: Context
    gate: int | None = None
    length: int | None = None
    programs_with_alternatives: dict[tuple[int, int], Callable[..., PyTree]] = field(default_factory=dict, repr=False)

    @classmethod
    def create(cls, cfg: ModelConfig, params: Params, ctx: Context, gate: int | None = None) -> "Scorer":
        """Returns a scorer.

        Args:
          gate: domain of the texts, for a model with a hard gate.
        """
        return cls(dropless(cfg), params, ctx.whole_sequences(), gate)

    def with_params(self, params: Params) -> "Scorer":
        """Returns the scorer with other parameters of the model, and with the program of `scores` of this one."""
        other = replace(self, params=params)
        other.__dict__["_score"] = self._score
        return other

    def scores(self, texts: Rows, rows: int = 8) -> Iterator[tuple[int, Scores]]:
        """Yields the index of each text and its scores; the longest texts come first.

        The texts of a call share a program, which the length of each alone would choose too. So the scores of a text
        do not depend on the other texts.

        Args:
          texts: ids of each text, two or more.
          rows: number of texts in a call, rounded up to a multiple of the replicas.

        Raises:
          ConfigError: a text of one token, an id that does not exist, or more tokens than learned positions.
        """
        self.check(texts)
        for tokens, indices in self._calls(texts, rows):
            arrays = distributed.fetch(self._score(self.params, tokens[:, :-1], tokens[:, 1:]))
            for i, log_probs, greedy in zip(indices, *arrays, strict=False):
                yield i, Scores(log_probs[: len(texts[i]) - 1], greedy[: len(texts[i]) - 1])

    def logprobs(
        self, texts: Rows, alternatives: int, *, vocabulary: int | None = None, rows: int = 8
    ) -> Iterator[tuple[int, Logprobs]]:
        """Yields the index of each text, and what `scores` says of its tokens with the likeliest tokens beside each.

        `scores` gives the same log-probabilities. The arrays of a text of n tokens have n - 1 rows.

        Args:
          texts: see `scores`.
          alternatives: number K of likeliest tokens, at most the number of ids.
          vocabulary: number of ids that may be among them. `None` means all ids of the model.
          rows: see `scores`.

        Raises:
          ConfigError: see `scores`.
        """
        self.check(texts)
        program = self._program_with(alternatives, vocabulary or self.cfg.vocab)
        for tokens, indices in self._calls(texts, rows):
            packed = distributed.fetch(program(self.params, tokens[:, :-1], tokens[:, 1:]))  # [B, S, 1 + 2K]
            for i, row in zip(indices, packed, strict=False):
                chosen, values, ids = np.split(row[: len(texts[i]) - 1], (1, 1 + alternatives), axis=1)
                yield i, Logprobs(chosen[:, 0], ids.astype(np.int32), values)

    def rewards(self, texts: Rows, rows: int = 8) -> np.ndarray:
        """Returns the scores that a reward model gives to texts, float32 [texts]: of the last token of each.

        Args:
          texts: ids of each text, one or more.
          rows: see `scores`.

        Raises:
          ConfigError: see `scores`.
        """
        self.check(texts, unread=0)
        longer = [[*text, text[-1]] for text in texts]  # the last token of a text that is scored is not read
        found = np.zeros(len(texts), np.float32)
        for tokens, indices in self._calls(longer, rows):
            for i, scores in zip(indices, distributed.fetch(self._rewards(self.params, tokens[:, :-1])), strict=False):
                found[i] = scores[len(texts[i]) - 1]
        return found

    def _calls(self, texts: Rows, rows: int) -> Iterator[tuple[np.ndarray, list[int]]]:
        """Yields the tokens of each call with their padding [B, S + 1], and the indices of its texts."""
        size = -(-rows // self.ctx.layout.replicas) * self.ctx.layout.replicas
        order = sorted(range(len(texts)), key=lambda i: (-len(texts[i]), texts[i]))
        for slots, group in itertools.groupby(order, lambda i: self.slots(len(texts[i]) - 1)):
            own = [*group]
            for at in range(0, len(own), size):
                indices = own[at : at + size]
                tokens = np.zeros((size, slots + 1), np.int32)
                for row, i in zip(tokens, indices, strict=False):
                    row[: len(texts[i])] = texts[i]  # attention is causal, so padding at the end is not seen
                yield tokens, indices

    def slots(self, tokens: int) -> int:
        """Returns the length of the program that reads this number of tokens: `length`, or else 64, 128, 256 and so on.

        A table of learned positions limits it.
        """
        if self.length is not None:
            return self.length
        table = self.cfg.max_positions if self.cfg.positions == "learned" else None
        slots = power_of_buckets(tokens)
        return slots if table is None else min(slots, table)

    def check(self, texts: Rows, unread: int = 1) -> None:
        """Checks that the model can read texts, but for the last `unread` tokens of each.

        Raises:
          ConfigError: see `scores`.
        """
        check_rows(texts, self.cfg.vocab)
        table = self.cfg.max_positions if self.cfg.positions == "learned" else None
        longest = max(map(len, texts)) - unread
        if min(map(len, texts)) <= unread:
            raise ConfigError("a text has one token, before which there is nothing. Give two tokens or more.")
        if table is not None and longest > table:
            raise ConfigError(
                f"a text has {plural(longest + unread, 'token')}, but the model's table of learned positions ends at "
                f"{table}. Use shorter texts, or windows of at most {plural(table, 'token')}."
            )

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the logits of the token after each token [B, S], float32 [B, S, V]."""
        count, length = tokens.shape
        slots = -(-length // BUCKET) * BUCKET
        if self.cfg.positions == "learned":
            slots = min(slots, self.cfg.max_positions or slots)
        padded = np.pad(tokens, ((0, -count % self.ctx.layout.replicas), (0, slots - length))).astype(np.int32)
        found = np.asarray(distributed.fetch(self._logits(self.params, padded)))[:count, :length]
        return found[..., : self.cfg.vocab]  # without padding

    @property
    def programs(self) -> int:
        """Number of programs that scoring has compiled."""
        return self._score._cache_size()  # type: ignore[attr-defined]

    def hidden_states(self, values: Params, tokens: jax.Array) -> jax.Array:
        """Returns the hidden states of tokens [B, S], given the parameters `values`; the work of one device."""
        batch: Batch = {"tokens": tokens}
        if self.gate is not None:
            batch["gate_ids"] = jnp.full_like(tokens, self.gate)
        return families.of(self.cfg).hidden_states(self.cfg, values, batch, self.ctx)[0]

    @cached_property
    def _score(self) -> Callable[..., tuple[PyTree, PyTree]]:
        def work(values: Params, tokens: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
            hidden = self.hidden_states(values, tokens)
            return decoder.log_probs(self.cfg, values, hidden, targets, self.ctx)

        return self._compiled(work, 2, self.ctx.layout.batch if self.ctx.layout.mesh else None)

    def _program_with(self, alternatives: int, vocabulary: int) -> Callable[..., PyTree]:
        """Returns the program of `logprobs`, with the result of `_with_likeliest` [B, S, 1 + 2K]."""
        key = alternatives, vocabulary
        if key not in self.programs_with_alternatives:

            def work(values: Params, tokens: jax.Array, targets: jax.Array) -> jax.Array:
                return self._with_likeliest(values, self.hidden_states(values, tokens), targets, *key)

            results = self.ctx.layout.batch if self.ctx.layout.mesh else None
            self.programs_with_alternatives[key] = self._compiled(work, 2, results)
        return self.programs_with_alternatives[key]

    def _with_likeliest(
        self, values: Params, hidden: jax.Array, targets: jax.Array, alternatives: int, vocabulary: int
    ) -> jax.Array:
        """Returns the log-probability of every target, the log-probabilities of the K likeliest ids, and these ids.

        All are float32 [B, S, 1 + 2K], which represents ids up to 2^24. Only the logits of one chunk of tokens are in
        memory.
        """
        assert vocabulary <= 2**24
        cfg = self.cfg
        ctx = self.ctx
        axes = ctx.layout.axes("vocab")
        head = decoder.head(cfg, values, ctx)  # [D, V/n]
        hidden = with_one(hidden) if cfg.head_bias else hidden
        hidden, head = collectives.match_varying(hidden, head)
        V = head.shape[1]
        options = cfg.logit_softcap, axes, None if V * collectives.count(axes) == cfg.vocab else cfg.vocab
        ids = collectives.index(axes) * V + jnp.arange(V)

        def one_chunk(x: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
            nll, logits, lse, _ = negative_log_likelihood(options, x, head, targets)
            shown = jnp.where(ids < vocabulary, logits, -jnp.inf)
            values, places = jax.lax.top_k(shown, min(alternatives, V))
            values = collectives.all_gather_invariant(values, axes, 2)
            likeliest = collectives.all_gather_invariant(ids[places], axes, 2)
            values, places = jax.lax.top_k(values, alternatives)
            likeliest = jnp.take_along_axis(likeliest, places, 2)
            log_probs = lse.log_probs(values)
            return jnp.float32(0), jnp.concatenate([-nll[..., None], log_probs, likeliest.astype(jnp.float32)], 2)

        return scan_chunks(ctx.ops.loss_chunk, one_chunk, jnp.float32(0), hidden, targets)[1]

    @cached_property
    def _rewards(self) -> Callable[..., PyTree]:
        def work(values: Params, tokens: jax.Array) -> jax.Array:
            return reward_head.scores(values, self.hidden_states(values, tokens), self.ctx)

        return self._compiled(work, 1, self.ctx.layout.batch if self.ctx.layout.mesh else None)

    @cached_property
    def _logits(self) -> Callable[..., PyTree]:
        ctx = self.ctx

        def work(values: Params, tokens: jax.Array) -> jax.Array:
            return decoder.logits(self.cfg, values, self.hidden_states(values, tokens), ctx)

        return self._compiled(
            work,
            1,
            PartitionSpec(*ctx.layout.batch, None, ctx.layout.axes("vocab") or None) if ctx.layout.mesh else None,
        )

    def _compiled(
        self, work: Callable[..., PyTree], arrays: int, results: PartitionSpec | None
    ) -> Callable[..., PyTree]:
        """Compiles `work(params, *arrays)`, the work of one device on its rows."""
        ctx = self.ctx
        if ctx.layout.mesh is None or ctx.layout.mesh.size == 1:
            return jax.jit(work)
        where = ctx.layout.parameters(families.spec(self.cfg)), *[ctx.layout.batch] * arrays
        return jax.jit(ctx.layout.local(work, where, results))
