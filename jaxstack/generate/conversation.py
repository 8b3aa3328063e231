"""One text that a model continues several times, with a KV cache that stays in between."""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxstack.common.counts import plural
from jaxstack.common.tree import PyTree
from jaxstack.config import ConfigError, SampleConfig
from jaxstack.generate.engine import Added, Engine, Programs, Sampling
from jaxstack.generate.prompts import BUCKET, check_prompts, row_seeds


class Conversation:
    """One text that the model continues several times. Its KV cache stays, and only new tokens are read.

    Attributes:
      tokens: the tokens in the cache.
      context: maximum number of tokens of the text.
    """

    def __init__(
        self, engine: Engine, sample: SampleConfig, *, context: int, stop: Sequence[int] = (), seed: int = 0
    ) -> None:
        """Prepares a conversation; nothing is compiled yet.

        Args:
          engine: the model.
          sample: how tokens are chosen, and the maximum number of tokens of a reply.
          context: maximum number of tokens of the text.
          stop: tokens that end a reply.
        """
        self.tokens: list[int] = []
        self.context = context
        self._seed = seed
        self._cache: PyTree = None
        self._tokens = sample.tokens
        self._programs = Programs(engine, context, Sampling.of_all(sample, stop))

    def room(self, tokens: Sequence[int]) -> int:
        """Returns the number of tokens that can be added to a text of these tokens."""
        return self.context - len(tokens)

    def reply(self, tokens: Sequence[int]) -> Iterator[list[int]]:
        """Reads a text and yields the tokens that continue it, a few at a time.

        The tokens that the text has in common with the text before are not read again.

        Args:
          tokens: the complete text, with the replies so far.

        Raises:
          ConfigError: the text is empty or has an unknown id, or the context has no room for another token.
        """
        engine = self._programs.engine
        tokens = list(tokens)
        check_prompts(engine.cfg, [tokens], 0, engine.vocabulary)
        limit = min(self._tokens, self.room(tokens))
        if limit < 1:
            raise ConfigError(
                f"the text has {plural(len(tokens), 'token')} and the context has {self.context}. Shorten the text, or "
                f"use a larger context."
            )
        replicas = engine.ctx.layout.replicas
        zeros = np.zeros(replicas, np.int32)
        marks = np.repeat(row_seeds([tokens]), replicas, 0)
        rows = {"first": zeros, "marks": marks, "limit": zeros + np.int32(limit), "seed": np.uint32(self._seed)}
        cache = self._cache
        self._cache = None  # its memory is given to the next state
        read = self._common(tokens) if cache is not None else 0
        if cache is None:
            cache = self._programs.empty(1)["cache"]
        self.tokens = tokens[:read]
        state: PyTree = {"cache": cache}
        added: Added | None = None
        while read < len(tokens):
            block = tokens[read : read + BUCKET]
            padded = np.repeat([np.pad(np.asarray(block, np.int32), (0, BUCKET - len(block)))], replicas, 0)
            place = np.int32(len(block)), np.int32(read)
            state, added = self._programs.append(state["cache"], padded, self._used(tokens), place, rows)
            read += len(block)
        assert added is not None
        reply: list[int] = []
        for after, part in self._programs.extend_by_parts(state, added):
            new = part.tokens[0, : part.lengths[0]].tolist()
            reply += new
            self._cache = after["cache"]
            self.tokens = [*tokens, *reply[:-1]]  # the newest is not in the cache yet
            yield new

    def _common(self, tokens: list[int]) -> int:
        """Returns how many tokens of the cache can be used for another text."""
        pairs = zip(self.tokens, tokens[:-1], strict=False)  # the last token is read again, for its logits
        common = next((i for i, (old, new) in enumerate(pairs) if old != new), min(len(self.tokens), len(tokens) - 1))
        windows = [window for window in self._programs.engine.cfg.windows if window]
        if common < len(self.tokens) and self._programs.engine.cfg.states_key:
            return 0  # a state cannot drop tokens again
        if common < len(self.tokens) and windows and len(self.tokens) >= min(windows):
            return 0  # the tokens before have made room for those that are dropped now
        return common

    def _used(self, tokens: list[int]) -> np.ndarray:
        """Returns which tokens a text contains, as `engine.used_at_first` does."""
        engine = self._programs.engine
        used = np.zeros((engine.ctx.layout.replicas, engine.cfg.vocab), bool)
        if self._programs.sampling.repetition_penalty == 1:
            return used[:, :0]
        used[:, tokens] = True
        return used
