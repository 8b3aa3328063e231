"""Runs training steps operation by operation, so that breakpoints in a model's code see arrays.

A step first runs the forward pass, without gradients and dropout: every operation is one of JAX's eager operations, and
the layers are a Python loop. `breakpoint()` stops there. Then it computes the step with its gradients, operation by
operation too. While JAX differentiates, the forward pass has tracers in place of arrays, and breakpoints are
skipped. In the backward pass of a `jax.custom_vjp` rule there are arrays again.
"""

import bdb
import os
import pdb
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from jaxstack.common.errors import Exit, RunError
from jaxstack.common.tree import Batch, flatten
from jaxstack.config import Config
from jaxstack.debug.statistics import statistics
from jaxstack.models.context import Context
from jaxstack.training.gradients import Metrics
from jaxstack.training.state import TrainState
from jaxstack.training.step import make_eval_step, make_train_step
from jaxstack.training.watch import Watched

MOST_VALUES = 1000
"""Values of an array up to which `show` prints all of them."""


def make_eager_step(
    cfg: Config, ctx: Context, abstract: TrainState, watched: Watched | None = None
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Returns the training step, run operation by operation, and lets `breakpoint()` stop in it.

    Args:
      cfg: the run.
      ctx: its execution context.
      abstract: shapes, dtypes and shardings of the state.
      watched: what the step measures. `None` means nothing.
    """
    forward, train_step = make_eval_step(cfg, ctx), make_train_step(cfg, ctx, watched)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        try:
            with jax.disable_jit(), breakpoints():
                forward(state.params, batch)
                state, metrics = train_step(state, batch)
        except bdb.BdbQuit:
            raise RunError(Exit.INTERRUPTED, "stopped in the debugger. Committed checkpoints are intact.") from None
        return jax.device_put(state, shardings), metrics

    return step


@contextmanager
def breakpoints() -> Iterator[None]:
    """Lets `breakpoint()` stop where the caller's variables are arrays, and skips it where one is a tracer."""

    def stop(*arguments: Any, **named: Any) -> None:
        frame = sys._getframe(1)
        if any(map(_is_tracer, jax.tree.leaves([*frame.f_locals.values()]))):
            return
        if os.environ.get("PYTHONBREAKPOINT"):
            sys.__breakpointhook__(*arguments, **named)
        else:
            Debugger().set_trace(frame)

    hook, sys.breakpointhook = sys.breakpointhook, stop
    try:
        yield
    finally:
        sys.breakpointhook = hook


def _is_tracer(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)


class Debugger(pdb.Pdb):
    """Python's debugger with the command `show`."""

    def do_show(self, argument: str) -> None:
        """Prints an array, or a tree of arrays, with dtypes, shapes and statistics: `show EXPRESSION`.

        Small arrays are printed in full.
        """
        from rich.console import Console
        from rich.pretty import Pretty

        try:
            value = self._getval(argument)
        except Exception:  # `_getval` has printed it
            return
        console = Console(file=self.stdout, highlight=True)
        tree = value if isinstance(value, dict) else {argument: value}
        for path, leaf in flatten(tree).items():
            console.print(f"{path}  {statistics(leaf) if hasattr(leaf, 'dtype') else ''}".rstrip())
            if not hasattr(leaf, "dtype") or leaf.size <= MOST_VALUES:
                console.print(Pretty(leaf))
