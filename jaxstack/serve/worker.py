"""The thread that owns the model: it takes prompts from a queue and gives back tokens as they come."""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence

from jaxstack.generate.continuous import ContinuousBatch, Part, Prompt
from jaxstack.generate.row_programs import CALL
from jaxstack.generate.stream import next_count

Deliver = Callable[[Part | None], None]
"""Receives each part of a text in the worker's thread; `None` means that the worker has failed."""


class Worker:
    """Continues prompts in a thread of its own, all in one continuous batch.

    Attributes:
      error: what ended the thread, if it has failed.
      on_failure: is called by the thread then.
    """

    def __init__(self, batch: ContinuousBatch) -> None:
        """Starts the thread, which alone uses the batch from now on."""
        self.error: BaseException | None = None
        self.on_failure: Callable[[], object] = lambda: None
        self._batch = batch
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._texts: dict[int, Deliver] = {}
        self._names = itertools.count()
        self._thread = threading.Thread(target=self._run, daemon=True, name="jaxstack-model")
        self._thread.start()

    def submit(self, prompts: Sequence[Prompt], deliver: Sequence[Deliver]) -> list[int]:
        """Lets prompts wait for a row, each with what receives its parts, and returns new names for their texts."""
        names = [next(self._names) for _ in prompts]

        def add() -> None:
            for name, prompt, receiver in zip(names, prompts, deliver, strict=True):
                self._texts[name] = receiver
                self._batch.add(prompt._replace(name=name))

        self._tasks.put(add)
        return names

    def cancel(self, names: Sequence[int]) -> None:
        """Gives up texts that are not complete: their rows take other prompts."""

        def remove() -> None:
            for name in names:
                if self._texts.pop(name, None) is not None:
                    self._batch.remove(name)

        self._tasks.put(remove)

    def stop(self) -> None:
        """Ends the thread, and waits for it."""
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            count = 1
            while self._take_tasks():
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

    def _take_tasks(self) -> bool:
        """Does what was asked for, and waits for more while no text grows. Returns whether the thread continues."""
        while True:
            try:
                task = self._tasks.get(block=not self._batch.busy)
            except queue.Empty:
                return True
            if task is None:
                return False
            task()
