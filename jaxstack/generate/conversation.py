"""One text that a model continues several times, with a KV cache that is kept in between."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from jaxstack.config import ConfigError, SampleConfig
from jaxstack.generate.prompts import BUCKET, check_prompts, row_seeds
from jaxstack.generate.stream import Engine, Programs, Results


class Conversation:
    """One text that the model continues several times. Its KV cache is kept, and only new tokens are read.

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
          seed: of sampling.
        """
        self.tokens: list[int] = []
        self.context = context
        self._engine, self._seed, self._cache = engine, seed, None
        self._work = Programs(engine, context, replace(sample, prompts=None), tuple(stop))

    def room(self, tokens: Sequence[int]) -> int:
        """Returns the number of tokens that can be added to a text."""
        return self.context - len(tokens)

    def reply(self, tokens: Sequence[int]) -> Iterator[list[int]]:
        """Reads a text and yields the tokens that continue it, a few at a time.

        What the text has in common with the one before is not read again.

        Args:
          tokens: the complete text, with the replies so far.

        Raises:
          ConfigError: the text is empty or has an unknown id, or the context has no room for another token.
        """
        check_prompts(self._engine.cfg, [list(tokens)], 0, self._engine.vocabulary)
        limit = min(self._work.sample.tokens, self.room(tokens))
        if limit < 1:
            raise ConfigError(
                f"the text has {len(tokens)} tokens and the context has {self.context}. Shorten the text, or use a "
                f"larger context."
            )
        replicas, tokens = self._engine.ctx.layout.replicas, list(tokens)
        seeds = np.repeat(row_seeds([tokens]), replicas, 0)
        rows = np.zeros(replicas, np.int32), seeds, np.uint32(self._seed)
        cache, self._cache = self._cache, None  # its memory is given to the next state
        kept = self._common(tokens) if cache is not None else 0
        state = {"cache": self._work.empty_cache(rows) if cache is None else cache}
        results: Results | None = None
        self.tokens = tokens[:kept]
        while kept < len(tokens):
            block = tokens[kept : kept + BUCKET]
            padded = np.repeat([np.pad(np.asarray(block, np.int32), (0, BUCKET - len(block)))], replicas, 0)
            place = np.int32(len(block)), np.int32(kept)
            state, results = self._work.append(rows, state["cache"], padded, self._used(tokens, replicas), place)
            kept += len(block)
        assert results is not None
        parts, shown = self._work.extend_by_parts(rows, state, results, (len(tokens), limit)), 0
        for state, found in parts:
            self._cache, count = state["cache"], int(found.i)
            self.tokens = [*tokens, *found.added[0, : count - 1].tolist()]  # the newest is not in the cache yet
            yield found.added[0, shown : int(found.lengths[0])].tolist()
            shown = count

    def _common(self, tokens: list[int]) -> int:
        """Returns how many tokens of the cache can be used for another text."""
        pairs = zip(self.tokens, tokens[:-1], strict=False)  # the last token is read again, for its logits
        common = next((i for i, (old, new) in enumerate(pairs) if old != new), min(len(self.tokens), len(tokens) - 1))
        windows = [window for window in self._engine.cfg.windows if window]
        if common < len(self.tokens) and windows and len(self.tokens) >= min(windows):
            return 0  # the tokens before have made room for those that are dropped now
        return common

    def _used(self, tokens: list[int], replicas: int) -> np.ndarray:
        """Returns which tokens a text contains, as `row_sampler.used_at_first` does."""
        used = np.zeros((replicas, self._engine.cfg.vocab), bool)
        if self._work.sample.repetition_penalty == 1:
            return used[:, :0]
        used[:, tokens] = True
        return used
