"""Compiles the programs of a step for several lengths of rows, in a thread, before a batch needs them."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeAlias, TypeVar

import jax

from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import Config
from jaxstack.data.loader import DataLoader
from jaxstack.models import family
from jaxstack.models.batches import abstract_batch, with_rows_of
from jaxstack.models.context import Context
from jaxstack.tracking.step_log import LoopState
from jaxstack.training.features.teacher import Teach
from jaxstack.training.state import TrainState, averaged_params

Result = TypeVar("Result")
Trained = TypeVar("Trained")
Program: TypeAlias = "Future[jax.stages.Compiled]"


class CompileAhead:
    """A thread that compiles one program for each length of rows, in the order in which batches need them.

    With rows of one length it does nothing, and the first step compiles its program; nor with eager steps. Leaving the
    context cancels what the thread has not begun.
    """

    def __init__(self, cfg: Config, ctx: Context) -> None:
        """Prepares to compile; nothing is compiled yet.

        Args:
          cfg: the run.
          ctx: its execution context.
        """
        self._cfg, self._data, self._where = cfg, cfg.data, ctx.layout.sharding(ctx.layout.batch)
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
        if len(self._data.lengths) == 1 or self._cfg.debug.eager:
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

    def wrap_steps(
        self,
        steps: tuple[Callable[[TrainState, Batch], Trained], Callable[[PyTree, Batch], Result]],
        abstract: TrainState,
        loader: DataLoader,
        loop: LoopState,
        teach: Teach,
    ) -> tuple[Callable[[TrainState, Batch], Trained], Callable[[PyTree, Batch], Result]]:
        """Returns the steps of training and of evaluation, see `wrap`.

        Args:
          steps: both, jitted.
          abstract: shapes, dtypes and shardings of the state.
          loader: says which lengths the batches have.
          loop: position at which training begins.
          teach: what adds arrays to the batches of training.
        """
        lengths = loader.lengths(loop.batch, loop.batch + self._cfg.train.steps - loop.step)
        values = averaged_params(self._cfg, abstract)
        train_step = self.wrap(steps[0], abstract, lengths, teach)
        return train_step, self.wrap(steps[1], values, loader.held_out_lengths)

    def _abstract_batch(self, length: int, teach: Teach | None) -> Batch:
        """Returns shapes, dtypes and shardings of a batch whose rows have this length."""
        spec = family.of(self._cfg.model).batch_spec(self._cfg)
        batch = abstract_batch(with_rows_of(spec, length, self._data.seq_len), self._where)
        if teach is None:
            return batch
        taught = jax.eval_shape(teach, batch)
        return {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._where) for n, a in taught.items()}  # type: ignore[misc]
