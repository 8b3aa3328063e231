"""The thread that owns the model: it takes prompts from a queue and gives back tokens as they come."""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxstack.generate.continuous import ContinuousBatch, Part, Prompt
from jaxstack.generate.engine import CALL, next_count
from jaxstack.generate.sampling import Logprobs
from jaxstack.generate.score import Scorer


class PromptScores(NamedTuple):
    """What comes before the new tokens of a text whose prompt is a part of the answer.

    Attributes:
      logprobs: of all tokens of the prompt but the first [tokens - 1]; `None` means that they are not wanted.
      ended: whether the text ends with the prompt, since no tokens are added to it.
    """

    logprobs: Logprobs | None
    ended: bool


class _Unscored(NamedTuple):
    """A prompt that waits for its scores, and the number of likeliest tokens in them."""

    prompt: Prompt
    alternatives: int


Deliver = Callable[[Part | PromptScores | None], None]
"""Receives each part of a text in the worker's thread; `None` means that the worker has failed."""


class Worker:
    """Scores and continues prompts in a thread of its own, all of them in one continuous batch.

    Attributes:
      error: what ended the thread, if it has failed.
      on_failure: is called by the thread then.
    """

    def __init__(
        self, batch: ContinuousBatch, scorer: Scorer | None = None, *, rows: int = 1, vocabulary: int | None = None
    ) -> None:
        """Starts the thread, which alone uses the model from now on.

        Args:
          batch: continues prompts.
          scorer: scores prompts. `None` means that no scores are asked for.
          rows: number of prompts that are scored at once.
          vocabulary: number of ids that exist, if the tokenizer has fewer than the model.
        """
        self.error: BaseException | None = None
        self.on_failure: Callable[[], object] = lambda: None
        self._batch = batch
        self._scorer = scorer
        self._rows = rows
        self._vocabulary = vocabulary
        self._unscored: list[_Unscored] = []
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._texts: dict[int, Deliver] = {}
        self._names = itertools.count()
        self._thread = threading.Thread(target=self._run, daemon=True, name="jaxstack-model")
        self._thread.start()

    def submit(
        self, prompts: Sequence[Prompt], deliver: Sequence[Deliver], *, alternatives: int | None = None
    ) -> list[int]:
        """Lets prompts wait for a row, and returns new names for their texts.

        Args:
          prompts: the prompts. One that is scored may ask for 0 tokens after it.
          deliver: what receives the parts of each text.
          alternatives: number of likeliest tokens in the scores of the prompts, which come before any new token.
            `None` means no scores.
        """
        names = [next(self._names) for _ in prompts]

        def add() -> None:
            for name, prompt, receiver in zip(names, prompts, deliver, strict=True):
                self._texts[name] = receiver
                if alternatives is None:
                    self._batch.add(prompt._replace(name=name))
                else:
                    self._unscored.append(_Unscored(prompt._replace(name=name), alternatives))

        self._tasks.put(add)
        return names

    def cancel(self, names: Sequence[int]) -> None:
        """Gives up texts that are not complete: their rows take other prompts."""

        def remove() -> None:
            for name in names:
                if self._texts.pop(name, None) is not None:
                    self._batch.remove(name)
            self._unscored = [one for one in self._unscored if one.prompt.name in self._texts]

        self._tasks.put(remove)

    def stop(self) -> None:
        """Ends the thread, and waits for it."""
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            count = 1
            while self._take_tasks():
                self._score()
                began = time.perf_counter()
                for part in self._batch.advance(count):
                    receiver = self._texts.pop(part.name) if part.ended else self._texts[part.name]
                    receiver(part)
                count = min(next_count(count, time.perf_counter() - began), CALL)
        except BaseException as error:
            self.error = error
            for receiver in self._texts.values():
                receiver(None)
            self.on_failure()

    def _score(self) -> None:
        """Scores prompts that wait for it, in one call, so that the texts that grow do not wait for longer.

        The first prompt chooses the length and the number of alternatives. Equal prompts are scored once.
        """
        if not self._unscored:
            return
        first = self._unscored[0]
        chosen: dict[tuple[int, ...], list[Prompt]] = {}
        others = []
        for one in self._unscored:
            tokens = tuple(one.prompt.tokens)
            fits = self._length(one) == self._length(first) and one.alternatives == first.alternatives
            if fits and (len(chosen) < self._rows or tokens in chosen):
                chosen.setdefault(tokens, []).append(one.prompt)
            else:
                others.append(one)
        self._unscored = others
        for tokens, logprobs in self._logprobs([*chosen], first.alternatives):
            for prompt in chosen[tokens]:
                ended = prompt.sample.tokens == 0
                receiver = self._texts.pop(prompt.name) if ended else self._texts[prompt.name]
                receiver(PromptScores(logprobs, ended))
                if not ended:
                    self._batch.add(prompt)

    def _length(self, one: _Unscored) -> int:
        """Returns the length of the program that scores a prompt: 0 for one token, which has nothing before it."""
        assert self._scorer is not None
        scored = len(one.prompt.tokens) - 1
        return self._scorer.slots(scored) if scored else 0

    def _logprobs(self, prompts: Sequence[tuple[int, ...]], count: int) -> list[tuple[tuple[int, ...], Logprobs]]:
        """Returns each prompt with the log-probabilities of its tokens but the first."""
        assert self._scorer is not None
        if len(prompts[0]) == 1:
            nothing = np.zeros((0, count), np.float32)
            return [(tokens, Logprobs(nothing[:, 0], nothing.astype(np.int32), nothing)) for tokens in prompts]
        rows = 1 if len(prompts) == 1 else self._rows  # a single prompt does not pay for rows without text
        texts = [[*tokens] for tokens in prompts]
        scores = self._scorer.logprobs(texts, count, vocabulary=self._vocabulary, rows=rows)
        return [(prompts[i], logprobs) for i, logprobs in scores]

    def _take_tasks(self) -> bool:
        """Does what was asked for, and waits for more while there is no work. Returns whether the thread continues."""
        while True:
            try:
                task = self._tasks.get(block=not (self._batch.busy or self._unscored))
            except queue.Empty:
                return True
            if task is None:
                return False
            task()
