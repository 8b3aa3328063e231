"""Measures the costs of functions that follow each other, by which `replicate` divides them into stages."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack.common.counts import plural
from jaxstack.common.tree import PyTree
from jaxstack.pipeline.costs import Costs
from jaxstack.pipeline.schedule import ScheduleError


def profile_functions(
    functions: Sequence[Callable[[PyTree, PyTree], PyTree]],
    loss: Callable[[PyTree, PyTree], jax.Array],
    params: Sequence[PyTree],
    rows: PyTree,
    *,
    bandwidth: float,
    latency: float = 0.0,
    repeats: int = 5,
) -> Costs:
    """Returns the measured costs of functions on the default device. Each function counts as one layer.

    The backward seconds include running the function again, as `value_and_grad_of_stages` does. State is weights,
    gradients and two moments. Residuals are the input of a function, the only thing that is stored.

    Args:
      functions: (parameters of the function, x) -> x of the next one. The first one gets `rows`.
      loss: (output of the last function, rows) -> scalar.
      params: a tree of arrays for each function.
      rows: rows of a batch, as many as a device computes at a time.
      bandwidth: bytes/s of the link between two devices.
      latency: seconds of one transfer.
      repeats: how often each function is timed; the result is the median.

    Raises:
      ScheduleError: there is not one tree of parameters for each function.
    """
    if len(functions) != len(params):
        raise ScheduleError(
            f"params has {plural(len(params), 'tree')} for {plural(len(functions), 'function')}. Give each one."
        )

    forward: list[float] = []
    backward: list[float] = []
    received: list[PyTree] = []
    x = rows
    for i, (function, tree) in enumerate(zip(functions, params, strict=True)):
        received.append(x)
        t, y = _seconds(repeats, function, tree, x)
        forward.append(t)
        # Rows of a batch have no gradient.
        of_params = _gradients(function) if i else _gradients(lambda tree, x=x, f=function: f(tree, x))
        backward.append(_seconds(repeats, of_params, y, tree, *([x] if i else []))[0])
        x = y
    last_forward, value = _seconds(repeats, loss, x, rows)
    last_backward, _ = _seconds(repeats, _gradients(lambda x: loss(x, rows)), value, x)
    return Costs(
        forward=tuple(forward),
        backward=tuple(backward),
        state_bytes=tuple(4.0 * _bytes(tree) for tree in params),
        stash_bytes=tuple(float(_bytes(x)) for x in received),
        boundary_bytes=tuple(float(_bytes(x)) for x in [*received[1:], x]),
        first=(0.0, 0.0),
        last=(last_forward, last_backward),
        spread=False,
        bandwidth=bandwidth,
        latency=latency,
        measured_on=jax.devices()[0].device_kind,
    )


def _seconds(repeats: int, function: Callable[..., PyTree], *arguments: PyTree) -> tuple[float, PyTree]:
    """Returns the median seconds of a function once it is compiled, and what it returns."""
    run = jax.jit(function)
    result = jax.block_until_ready(run(*arguments))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append(time.perf_counter() - start)
    return statistics.median(times), result


def _gradients(function: Callable[..., PyTree]) -> Callable[..., list[jax.Array]]:
    """Returns a function (cotangent, arguments) that runs `function` and its VJP. Integers have no gradient."""

    def run(cotangent: PyTree, *arguments: PyTree) -> list[jax.Array]:
        _, pull = jax.vjp(function, *arguments)
        leaves = jax.tree.leaves(pull(jax.tree.map(_cotangent, cotangent)))
        return [leaf for leaf in leaves if leaf.dtype != jax.dtypes.float0]

    return run


def _cotangent(a: jax.Array) -> Any:
    return a if jnp.issubdtype(a.dtype, jnp.inexact) else np.zeros(a.shape, jax.dtypes.float0)


def _bytes(tree: PyTree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
