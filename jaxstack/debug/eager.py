"""Runs training steps operation by operation, so that breakpoints in a model's code see arrays.

A step first runs the forward pass, without gradients and dropout: every operation is one of JAX's eager operations, and
the layers are a Python loop. `breakpoint()` stops there. Then it computes the step with its gradients, operation by
operation too. While JAX differentiates, the forward pass has tracers in place of arrays, and breakpoints are
skipped. In the backward pass of a `jax.custom_vjp` rule there are arrays again.

On a mesh, JAX compiles every operation within `jax.shard_map` as a program of its own. It looks for the program of an
earlier operation by an object that it does not keep, so it would compile each operation of each step again.
`keep_programs` keeps these objects. The ticks of a pipeline, and the layers of a stage, are Python loops too, with the
trip counts of `pipeline.loops=static`: all stages run an operation at the same time, as on a mesh.
"""

import bdb
import os
import pdb
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxstack.common.errors import Exit, RunError
from jaxstack.common.jax_private import private_module
from jaxstack.common.tree import Batch, flatten
from jaxstack.config import Config, ConfigError
from jaxstack.debug.statistics import statistics
from jaxstack.models.context import Context
from jaxstack.training.assemble import make_eval_step, make_train_step, objective_of
from jaxstack.training.features.watch import Watched
from jaxstack.training.losses import Metrics
from jaxstack.training.state import TrainState

MOST_VALUES = 1000
"""Values of an array up to which `show` prints all of them."""


def make_eager_step(
    cfg: Config, ctx: Context, abstract: TrainState, watched: Watched | None = None
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Returns the training step, run operation by operation, and lets `breakpoint()` stop in it.

    `abstract` has the shapes, dtypes and shardings of the state. `watched` is what the step measures, if anything.

    Raises:
      ConfigError: the pipeline has several stacks or weight units, so that loops of stages have other trip counts.
    """
    ctx = _with_static_loops(cfg.mesh.pipe, cfg.model.family, ctx)
    objective = objective_of(cfg.model, cfg.aim)
    forward = make_eval_step(cfg.model, ctx, cfg.train.grad_accum, objective)
    train_step = make_train_step(cfg, ctx, watched)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        try:
            with jax.disable_jit(), keep_programs(), breakpoints():
                forward(state.params, batch)
                state, metrics = train_step(state, batch)
        except bdb.BdbQuit:
            raise RunError(Exit.INTERRUPTED, "stopped in the debugger. Committed checkpoints are intact.") from None
        return jax.device_put(state, shardings), metrics

    return step


def _with_static_loops(stages: int, family: str, ctx: Context) -> Context:
    """Returns a context whose pipeline, if there is one, has static trip counts, which Python loops need."""
    program = ctx.layout.pipeline
    if program is None:
        return ctx
    if program.stages.stacks or program.weight is not None:
        raise ConfigError(
            f"debug.eager=true runs pipelines of one stack of layers without weight units, but mesh.pipe="
            f"{stages} has model.family={family} and pipeline.schedule={program.schedule.name}. Use "
            f"pipeline.schedule=1f1b, or set mesh.pipe=1."
        )
    return replace(ctx, layout=replace(ctx.layout, pipeline=replace(program, static=True)))


_kept: dict[Any, Any] = {}
"""The functions that JAX has compiled for operations within `jax.shard_map`, each by itself."""


@contextmanager
def keep_programs() -> Iterator[None]:
    """Lets JAX find the programs of operations within `jax.shard_map` again.

    The functions that it gives to `jax.jit` are equal for equal operations, but `jax.jit` forgets a function that
    nobody keeps.
    """
    shard_map = private_module("shard_map")
    create = shard_map.HashablePartial

    def kept(*arguments: Any, **named: Any) -> Any:
        function = create(*arguments, **named)
        return _kept.setdefault(function, function)

    vars(shard_map)["HashablePartial"] = kept
    try:
        yield
    finally:
        vars(shard_map)["HashablePartial"] = create


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

    hook = sys.breakpointhook
    sys.breakpointhook = stop
    try:
        yield
    finally:
        sys.breakpointhook = hook


def _is_tracer(value: Any) -> bool:
    """Returns whether a value is not there yet; an array of a device within `jax.shard_map` is."""
    return isinstance(value, jax.core.Tracer) and not _is_array_of_devices(value)


def _is_array_of_devices(value: Any) -> bool:
    """Returns whether a value is an array within `jax.shard_map`, which runs operation by operation."""
    return isinstance(value, private_module("shard_map").ShardMapTracer)


def _array(value: Any) -> Any:
    """Returns an array within `jax.shard_map` as one array, with the devices that differ in its first dimension."""
    return np.asarray(value.val) if _is_array_of_devices(value) else value


class Debugger(pdb.Pdb):
    """Python's debugger with the command `show`."""

    def do_show(self, argument: str) -> None:
        """Prints an array, or a tree of arrays, with dtypes, shapes and statistics: `show EXPRESSION`.

        Small arrays are printed in full. On a mesh, the first dimension has the devices that differ.
        """
        from rich.console import Console
        from rich.pretty import Pretty

        try:
            value = self._getval(argument)
        except Exception:  # `_getval` has printed it
            return
        console = Console(file=self.stdout, highlight=True)
        tree = value if isinstance(value, dict) else {argument: value}
        for path, leaf in flatten(jax.tree.map(_array, tree)).items():
            console.print(f"{path}  {statistics(leaf) if hasattr(leaf, 'dtype') else ''}".rstrip())
            if not hasattr(leaf, "dtype") or leaf.size <= MOST_VALUES:
                console.print(Pretty(leaf))
