"""Compiles the programs of a step for several lengths of rows, in a thread, before a batch needs them."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeAlias, TypeVar

import jax

from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import DataConfig
from jaxstack.models.batches import BatchSpec, abstract_batch, with_rows_of
from jaxstack.training.features.teacher import Teach

Result = TypeVar("Result")
Program: TypeAlias = "Future[jax.stages.Compiled]"


class CompileAhead:
    """A thread that compiles one program for each length of rows, in the order in which batches need them.

    With rows of one length it does nothing, and the first step compiles its program. Leaving the
    context cancels what the thread has not begun.
    """

    def __init__(self, data: DataConfig, spec: BatchSpec, where: jax.sharding.Sharding, active: bool = True) -> None:
        """Prepares to compile; nothing is compiled yet.

        Args:
          data: has the lengths of rows.
          spec: the arrays of a batch with the longest rows.
          where: sharding of a batch's arrays.
          active: False means that steps are not compiled at all.
        """
        self._data = data
        self._spec = spec
        self._where = where
        self._active = active and len(data.lengths) > 1
        self._programs: list[Program] = []

    def __enter__(self) -> "CompileAhead":
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jaxstack-compile")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def wrap(
        self, step: Callable[[PyTree, Batch], Result], first: PyTree, lengths: Iterable[int], teach: Teach | None = None
    ) -> Callable[[PyTree, Batch], Result]:
        """Returns a step that runs the program of each batch's length, and waits for it if it is not compiled yet.

        A program that cannot be compiled is an error of the next step, whichever length that step has.

        Args:
          step: the jitted function of the first argument and a batch.
          first: shapes, dtypes and shardings of the first argument.
          lengths: those that will be needed, in the order of first use. Others are compiled when they are needed.
          teach: what adds arrays to the batches before the step. `None` means that nothing does.
        """
        if not self._active:
            return step
        programs: dict[int, Program] = {}

        def begin(length: int) -> Program:
            if length not in programs:
                programs[length] = self._thread.submit(
                    lambda: step.lower(first, self._abstract_batch(length, teach)).compile()  # type: ignore[attr-defined]
                )
                self._programs.append(programs[length])
            return programs[length]

        for length in lengths:
            begin(length)

        def run(first: PyTree, batch: Batch) -> Result:
            rows = len(next(iter(batch.values())))
            program = begin(self._data.batch_size * self._data.seq_len // rows).result()
            for each in self._programs:
                if each.done():
                    each.result()  # raises what went wrong
            return program(first, batch)

        return run

    def _abstract_batch(self, length: int, teach: Teach | None) -> Batch:
        """Returns shapes, dtypes and shardings of a batch whose rows have this length."""
        batch = abstract_batch(with_rows_of(self._spec, length, self._data.seq_len), self._where)
        if teach is None:
            return batch
        taught = jax.eval_shape(teach, batch)
        return {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._where) for n, a in taught.items()}  # type: ignore[misc]
