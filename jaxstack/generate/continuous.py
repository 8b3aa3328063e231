"""Continuous batching: a row whose text has ended takes the next prompt, while the other rows continue.

All rows share a slot counter, and the KV cache is a ring: slot n has entry n modulo T. A prompt that enters a row gets
the slots right before the counter. So every step still writes one slot of all rows, and attention finds the beginning
of each text as it does in a batch that starts together. Yu et al. 2022 ("Orca", OSDI, section 3.1) schedule single
steps in this way.

`generate.engine` has the compiled programs.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np

from jaxstack.common.tree import PyTree
from jaxstack.config import SampleConfig
from jaxstack.generate.engine import CALL, Added, Engine, Programs, Sampling, next_count, rows_of_replica
from jaxstack.generate.prompt_cache import PromptCache
from jaxstack.generate.prompts import BUCKET, Rows, align_rows, power_of_buckets, row_seeds, whole_buckets
from jaxstack.generate.sampling import Logprobs, RowSample
from jaxstack.runtime import distributed

_LAST_SLOT = 2**30
"""Beyond this the counter of slots begins again, long before int32 ends."""


class Prompt(NamedTuple):
    """A prompt that waits.

    Attributes:
      name: the caller's number for the text.
      tokens: ids of the prompt.
      sample: how tokens are chosen, and their maximum number. All prompts of a batch have the same repetition penalty.
      mark: part of the seed of the text's samples, see `prompts.row_seeds`.
      seed: seed of the text's samples.
      logprobs: whether log-probabilities are wanted.
      begun: number of tokens at the end of the prompt that were added earlier. They count toward `sample.tokens`.
    """

    name: int
    tokens: list[int]
    sample: SampleConfig
    mark: np.ndarray
    seed: int = 0
    logprobs: bool = False
    begun: int = 0


class Part(NamedTuple):
    """Tokens that were added to a text.

    Attributes:
      name: name of the text.
      tokens: the new ids.
      ended: whether the text ends with them.
      logprobs: log-probabilities of the new tokens [tokens], if they were wanted.
      cached: number of tokens of the prompt that were not read, since the prompt cache had them.
    """

    name: int
    tokens: list[int]
    ended: bool
    logprobs: Logprobs | None = None
    cached: int = 0


class ContinuousBatch:
    """Rows that generate texts, and the prompts that wait for one.

    `decode.generate` writes the same text, up to rounding, whatever the other rows contain.

    Attributes:
      waiting: the prompts that have no row yet, in their order.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        rows: int,
        slots: int,
        stop: Sequence[int] = (),
        repetition_penalty: float = 1.0,
        alternatives: int | None = None,
        cache: PromptCache | None = None,
    ) -> None:
        """Makes an empty batch.

        Args:
          rows: number of texts at the same time; rounded up, see `rows_of_replica`.
          slots: largest number of tokens of a text with its prompt; rounded up to whole buckets.
          stop: tokens that end a text.
          repetition_penalty: repetition penalty of all texts.
          alternatives: number of tokens with log-probabilities beside the chosen token. `None`: see `Sampling`.
          cache: where prompts are kept, so that others with the same beginning read less. It needs a single replica.
        """
        replicas = engine.ctx.layout.replicas
        assert cache is None or replicas == 1
        each = rows_of_replica(rows, engine.ctx)
        self.waiting: deque[Prompt] = deque()
        self._most = whole_buckets(slots)
        self._cache = cache
        self._slot = 0
        self._texts = np.full((replicas, each), -1)
        self._lengths = np.zeros((replicas, each), np.int64)
        self._scored: set[int] = set()
        self._filled = False
        self._programs = Programs(engine, BUCKET, Sampling(tuple(stop), None, repetition_penalty, alternatives))
        self._state = self._programs.empty(each)

    def add(self, prompt: Prompt) -> None:
        """Lets a prompt wait for a row."""
        assert prompt.sample.tokens > 0
        assert prompt.sample.repetition_penalty == self._programs.sampling.repetition_penalty
        assert not prompt.logprobs or self._programs.sampling.alternatives is not None
        assert 0 <= prompt.begun < prompt.sample.tokens
        assert len(prompt.tokens) + prompt.sample.tokens - prompt.begun <= self._most
        self.waiting.append(prompt)

    def remove(self, name: int) -> None:
        """Gives up a text, waiting or not. Its row takes the next prompt."""
        self.waiting = deque(prompt for prompt in self.waiting if prompt.name != name)
        self._texts[self._texts == name] = -1

    @property
    def busy(self) -> bool:
        """Whether any text waits or has not ended."""
        return bool(self.waiting) or bool((self._texts >= 0).any())

    def advance(self, count: int = CALL) -> list[Part]:
        """Returns the first tokens of prompts that fill free rows, or else up to `count` more tokens of each text.

        The two take turns, so that neither waits for the other. Adding stops early when a text ends and another waits.
        """
        self._filled = not self._filled and bool(parts := list(self._fill()))
        if self._filled:
            return parts
        alive = self._texts >= 0
        if not alive.any():
            return []
        longest = int(self._lengths[alive].max())
        self._resize(longest + 1)
        self._scored &= {*self._texts[alive].tolist()}
        count = min(count, CALL, self._programs.slots - longest)
        self._state, results = self._programs.extend(
            self._state, alive.reshape(-1), count, wait=bool(self.waiting), scored=bool(self._scored)
        )
        added: Added = distributed.fetch(results)
        self._slot += int(added.lengths[alive.reshape(-1)].max())
        parts = []
        for place, name in enumerate(self._texts.reshape(-1).tolist()):
            if name >= 0:
                parts.append(self._part(added, place, name, int(added.lengths[place])))
                self._lengths.reshape(-1)[place] += len(parts[-1].tokens)
                if parts[-1].ended:
                    self._texts.reshape(-1)[place] = -1
        return parts

    def _part(self, added: Added, place: int, name: int, length: int) -> Part:
        scores = jax.tree.map(lambda a: a[place, :length], added.logprobs) if name in self._scored else None
        return Part(name, added.tokens[place, :length].tolist(), bool(added.ended[place]), scores)

    def _resize(self, needed: int) -> None:
        """Gives the cache the slots that the longest text needs: attention reads all slots for every token.

        The cache shrinks when half of the smaller number is enough, and therefore does not move to and fro.
        """
        slots = self._programs.slots
        if not slots // 4 < needed <= slots:
            slots = self._slots_for(needed)
        if slots != self._programs.slots or self._slot > _LAST_SLOT:
            self._programs = replace(self._programs, slots=slots)
            self._state = self._programs.resize(self._state)
            self._slot = slots

    def _slots_for(self, tokens: int) -> int:
        """Returns a power of two times a bucket, but not more than the largest."""
        return min(power_of_buckets(tokens), self._most)

    def _fill(self) -> Iterator[Part]:
        """Gives waiting prompts to free rows, one of each replica in a call, and yields their first tokens."""
        while self.waiting and (self._texts < 0).any():
            free = [int(np.argmax(own < 0)) if (own < 0).any() else -1 for own in self._texts]
            taken = [self.waiting.popleft() if place >= 0 and self.waiting else None for place in free]
            places = np.asarray([at if prompt else -1 for at, prompt in zip(free, taken, strict=True)], np.int32)
            prompts = [prompt or _NO_PROMPT for prompt in taken]
            ends = np.asarray([len(prompt.tokens) for prompt in prompts], np.int32)
            cached, read = self._read([prompt.tokens for prompt in prompts])
            self._resize(max([*ends.tolist(), *self._lengths[self._texts >= 0].tolist()]) + 1)
            self._state, results = self._programs.admit(self._state, read, self._rows(prompts), (ends, places))
            added: Added = distributed.fetch(results)
            for replica, prompt in enumerate(taken):
                if prompt is not None:
                    if prompt.logprobs:
                        self._scored.add(prompt.name)
                    part = self._part(added, replica, prompt.name, 1)._replace(cached=cached)
                    self._texts[replica, free[replica]] = -1 if part.ended else prompt.name
                    self._lengths[replica, free[replica]] = len(prompt.tokens)
                    yield part

    def _read(self, prompts: Rows) -> tuple[int, PyTree]:
        """Reads a prompt on each replica, and returns the number of tokens that were in the cache; see `read`."""
        programs = replace(self._programs, slots=self._slots_for(max(map(len, prompts))))
        if self._cache is None:
            return 0, programs.read(*align_rows(prompts))
        (tokens,) = prompts
        cached, prefix = self._cache.longest_prefix(tokens)
        if cached:
            new = len(tokens) - cached
            block, _ = align_rows([tokens[cached:]])
            block = np.roll(block, new, 1)  # padding after the tokens
            read = programs.read_on(prefix, block, (np.int32(new), np.int32(cached)))
        else:
            read = programs.read(*align_rows(prompts))
        self._cache.store(tokens, read[1])
        return cached, read

    def _rows(self, prompts: Sequence[Prompt]) -> dict[str, PyTree]:
        """Returns what the programs need to know of some prompts, see `Sampling`."""
        penalty = self._programs.sampling.repetition_penalty
        vocab = self._programs.engine.cfg.vocab
        used = np.zeros((len(prompts), vocab if penalty != 1 else 0), bool)
        for row, prompt in zip(used, prompts, strict=True):
            row[prompt.tokens if penalty != 1 else []] = True
        return {
            "seed": np.asarray([prompt.seed for prompt in prompts], np.uint32),
            "marks": np.stack([prompt.mark for prompt in prompts]),
            "sample": RowSample.of([prompt.sample for prompt in prompts]),
            "index": np.asarray([prompt.begun for prompt in prompts], np.int32),
            "limit": np.asarray([prompt.sample.tokens for prompt in prompts], np.int32),
            "used": used,
        }


_NO_PROMPT = Prompt(-1, [0], SampleConfig(tokens=1, temperature=0), np.zeros(2, np.uint32))
"""What a replica without a free row reads."""


def continue_in_turn(
    engine: Engine, prompts: Rows, sample: SampleConfig, *, stop: Sequence[int], seed: int, at_once: bool
) -> Iterator[Rows]:
    """Yields the tokens that are added to each prompt, `sample.rows` texts at a time; see `decode.stream`."""
    assert sample.rows is not None
    slots = max(len(prompt) for prompt in prompts) + sample.tokens
    batch = ContinuousBatch(
        engine, rows=sample.rows, slots=slots, stop=stop, repetition_penalty=sample.repetition_penalty
    )
    for name, (prompt, mark) in enumerate(zip(prompts, row_seeds(prompts), strict=True)):
        batch.add(Prompt(name, prompt, sample, mark, seed))
    count = CALL if at_once else 1
    while batch.busy:
        began = time.perf_counter()
        new: Rows = [[] for _ in prompts]
        for part in batch.advance(count):
            new[part.name] = part.tokens
        yield new
        if not at_once:
            count = min(next_count(count, time.perf_counter() - began), CALL)
