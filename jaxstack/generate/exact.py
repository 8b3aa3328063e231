"""Texts whose tokens and log-probabilities equal the training forward pass, bit for bit.

A token's logits from a KV cache differ from the logits of training in the last bits: other shapes sum in other orders.
So the cache only drafts: a forward pass over the complete text then chooses every token again, with the same random
numbers. The first token that differs replaces its draft, and the text is continued from there. The result is the text
that this forward pass alone would write, at the cost of about one pass for each text.

Suffixes: B rows of this device, S slots, C slots of a chunk, V vocabulary.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxstack import families
from jaxstack.config import ConfigError, SampleConfig
from jaxstack.generate import sampling
from jaxstack.generate.continuous import ContinuousBatch, Prompt
from jaxstack.generate.engine import Engine, row_keys
from jaxstack.generate.kv_cache import known_logits
from jaxstack.generate.prompts import Rows, check_prompts, row_seeds
from jaxstack.generate.score import Scorer
from jaxstack.models import decoder
from jaxstack.models.params import Params
from jaxstack.runtime import distributed
from jaxstack.sharding import collectives


class Rollout(NamedTuple):
    """A text that a model has added to a prompt.

    Attributes:
      tokens: ids of the text.
      log_probs: log-probability in nats of each under the model, before temperature and filters, float32 [tokens].
      redrafted: number of its tokens that the forward pass has chosen in place of drafts.
    """

    tokens: list[int]
    log_probs: np.ndarray
    redrafted: int


@dataclass(frozen=True, eq=False)
class Exact:
    """Writes texts that a forward pass has checked.

    Attributes:
      scorer: the forward pass.
      engine: drafts with a KV cache.
      sample: how tokens are chosen.
      stop: tokens that end a text.
      rows: number of texts in a call.
    """

    scorer: Scorer
    engine: Engine
    sample: SampleConfig
    stop: tuple[int, ...]
    rows: int = 8

    def with_params(self, params: Params) -> "Exact":
        """Returns the writer with other parameters of the model, and with the programs that this one compiles."""
        other = replace(self, scorer=self.scorer.with_params(params), engine=self.engine.with_params(params))
        other.__dict__["_program"] = self._program
        return other

    def texts(self, prompts: Rows, seed: int) -> list[Rollout]:
        """Returns a text for each prompt; see `TrainedRun.rollout`."""
        how = self.sample
        for name, plain in (("beams", 1), ("repetition_penalty", 1.0)):
            if (value := getattr(how, name)) != plain:
                raise ConfigError(f"sample.{name}={value} does not fit exact texts. Use sample.{name}={plain}.")
        check_prompts(self.scorer.cfg, prompts, how.tokens, self.engine.vocabulary)
        marks = row_seeds(prompts)
        added = [list[int]() for _ in prompts]
        redrafted = [0] * len(prompts)
        open_texts = list(range(len(prompts))) if how.tokens else []
        while open_texts:
            self._draft(prompts, added, marks, open_texts, seed)
            unfinished = []
            for i, chosen in self._choose(prompts, added, marks, open_texts, seed):
                wrong = next((j for j, token in enumerate(added[i]) if token != chosen[j]), None)
                if wrong is not None:
                    redrafted[i] += 1
                    added[i] = [*added[i][:wrong], chosen[wrong]]
                    if chosen[wrong] not in self.stop and len(added[i]) < how.tokens:
                        unfinished.append(i)
            open_texts = unfinished
        whole = [[*prompt, *new] for prompt, new in zip(prompts, added, strict=True)]
        found = {} if not how.tokens else dict(self.scorer.scores(whole, self.rows))
        return [
            Rollout(new, found[i].log_probs[len(whole[i]) - len(new) - 1 :] if new else np.zeros(0, np.float32), count)
            for i, (new, count) in enumerate(zip(added, redrafted, strict=True))
        ]

    def _draft(self, prompts: Rows, added: Rows, marks: np.ndarray, some: list[int], seed: int) -> None:
        """Adds the tokens to some texts that the KV cache gives them."""
        longest = max(len(prompts[i]) for i in some) + self.sample.tokens
        batch = ContinuousBatch(self.engine, rows=self.rows, slots=longest, stop=self.stop)
        for i in some:
            batch.add(Prompt(i, [*prompts[i], *added[i]], self.sample, marks[i], seed, begun=len(added[i])))
        while batch.busy:
            for part in batch.advance():
                added[part.name] += part.tokens

    def _choose(
        self, prompts: Rows, added: Rows, marks: np.ndarray, some: list[int], seed: int
    ) -> list[tuple[int, list[int]]]:
        """Returns what the forward pass chooses in place of each added token of some texts."""
        size = -(-self.rows // self.scorer.ctx.layout.replicas) * self.scorer.ctx.layout.replicas
        found = []
        for slots in sorted({self._slots(prompts[i]) for i in some}):
            own = [i for i in some if self._slots(prompts[i]) == slots]
            for at in range(0, len(own), size):
                part = own[at : at + size]
                tokens = np.zeros((size, slots), np.int32)
                seeds = np.zeros((size, 2), np.uint32)
                ends = np.ones(size, np.int32)
                for row, i in enumerate(part):
                    text = [*prompts[i], *added[i]][:-1]
                    tokens[row, : len(text)] = text
                    ends[row] = len(prompts[i])
                    seeds[row] = marks[i]
                chosen = distributed.fetch(self._program(self.scorer.params, tokens, ends, seeds, np.uint32(seed)))
                for row, i in enumerate(part):
                    first = len(prompts[i]) - 1
                    found.append((i, chosen[row, first : first + len(added[i])].tolist()))
        return found

    def _slots(self, prompt: list[int]) -> int:
        """Returns the length of the program of a text, which does not depend on the other texts."""
        return self.scorer.slots(len(prompt) + self.sample.tokens - 1)

    @cached_property
    def _program(self) -> jax.stages.Wrapped:
        scorer = self.scorer
        ctx = self.scorer.ctx
        vocabulary = self.engine.vocabulary

        def work(values: Params, tokens: jax.Array, ends: jax.Array, marks: jax.Array, seed: jax.Array) -> jax.Array:
            hidden = scorer.hidden_states(values, tokens)
            B, S = tokens.shape
            size = max(1, min(S, ctx.ops.loss_chunk // B))
            index = jnp.maximum(jnp.arange(S) + 1 - ends[:, None], 0)  # of the token after each slot in its text
            keys = jax.vmap(lambda key, own: jax.vmap(lambda i: jax.random.fold_in(key, i))(own))(
                row_keys(seed, marks), index
            )

            def choose(part: tuple[jax.Array, jax.Array]) -> jax.Array:
                x, own = part
                local = decoder.logits(scorer.cfg, values, x, ctx)
                every = collectives.all_gather_invariant(local, ctx.layout.axes("vocab"), 2)
                logits = known_logits(scorer.cfg, every, vocabulary).reshape(B * size, -1)
                used = jnp.zeros_like(logits[:, :0], bool)
                return sampling.sample_tokens(logits, used, own.reshape(-1), self.sample).reshape(B, size)

            def chunks(a: jax.Array) -> jax.Array:
                widths = [(0, 0), (0, -S % size), *[(0, 0)] * (a.ndim - 2)]
                return jnp.pad(a, widths).reshape(B, -1, size, *a.shape[2:]).swapaxes(0, 1)

            data = jax.random.key_data(keys)
            parts = chunks(hidden), chunks(data)
            found = jax.lax.map(lambda part: choose((part[0], jax.random.wrap_key_data(part[1]))), parts)
            return found.swapaxes(0, 1).reshape(B, -1)[:, :S]

        if ctx.layout.mesh is None or ctx.layout.mesh.size == 1:
            return jax.jit(work)
        where = (ctx.layout.parameters(families.spec(scorer.cfg)), *[ctx.layout.batch] * 3, PartitionSpec())
        return jax.jit(ctx.layout.local(work, where, ctx.layout.batch))
