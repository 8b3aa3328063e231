"""Says which parameter an update of the optimizer makes not finite, by which operation, and why."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax

from jaxstack import families
from jaxstack.common.counts import plural
from jaxstack.common.tree import Batch, flatten
from jaxstack.config import OptimConfig
from jaxstack.debug import rules, search
from jaxstack.debug.describe import code_lines
from jaxstack.debug.guide import RunGuide
from jaxstack.debug.statistics import is_bad, statistics
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.training.gradients import Gradients
from jaxstack.training.state import Recipe, TrainState, make_optimizer
from jaxstack.training.step import dropout_key

NAMED = 5
"""Number of parameters, and arrays of the optimizer's state, that are named."""


def explain_update(
    recipe: Recipe, gradients: Gradients, ctx: Context, state: TrainState, batch: Batch
) -> Iterator[str]:
    """Yields lines about an update that is not finite; nothing if it is finite.

    `state` is the state before the step, whose loss and gradients are finite.
    """
    optimizer = make_optimizer(recipe, ctx)
    _, grads, _ = jax.jit(gradients)(state.params, batch, dropout_key(recipe.model, recipe.seed, state.step))
    trained, _ = params.partition(families.spec(recipe.model), state.params)
    flat, tree = jax.tree.flatten((trained, state.opt_state, grads))

    def program(*flat: jax.Array) -> Any:
        values, opt_state, grads = jax.tree.unflatten(tree, flat)
        changes, opt_state = optimizer.update(grads, opt_state, values)
        return {"the parameter": optax.apply_updates(values, changes), "the optimizer's state": opt_state}

    results = {name.replace("/", " ", 1): array for name, array in flatten(jax.jit(program)(*flat)).items()}
    bad = {name: array for name, array in results.items() if is_bad(array)}
    if not bad:
        return
    counts = f"{len(bad)} of {plural(len(results), 'array')}"
    yield f"update   optim.name={recipe.optim.name} makes {counts} not finite; loss and gradients are finite"
    for name, array in [*bad.items()][:NAMED]:
        yield f"where    {name}, first at {_first_bad(array)}: {statistics(array)}"
    with rules.own_lines():
        traced = jax.make_jaxpr(program)(*flat)
    finding = search.find(traced, flat, RunGuide(recipe.model))
    if finding is not None:
        yield f"reason   {_reason(finding)}"
        yield from code_lines(finding)
        yield from (f"input    {statistics(value)}" for value in finding.inputs)
        yield from (f"output   {statistics(value)}" for value in finding.outputs)
    yield f"fix      {_advice(recipe.optim)}"


def _first_bad(array: Any) -> list[int]:
    first: list[int] = np.argwhere(~np.isfinite(np.asarray(array, np.float32)))[0].tolist()
    return first


def _reason(finding: search.Finding) -> str:
    """Returns the operation with the numbers that it reads and writes at its first bad element."""
    output = np.asarray(next(value for value in finding.outputs if is_bad(value)), np.float32)
    place = tuple(_first_bad(output))
    inputs = [np.asarray(value) for value in finding.inputs]
    read = [a[place] if a.shape == output.shape else a for a in inputs if a.shape in ((), output.shape)]
    numbers = " and ".join(f"{float(number):.4g}" for number in read)
    return f"{finding.equation.primitive.name} of {numbers or 'arrays'} gives {output[place]:.4g}"


def _advice(cfg: OptimConfig) -> str:
    """Returns what to change in the settings of the optimizer."""
    if cfg.name in ("adamw", "muon") and cfg.eps < OptimConfig.eps:
        return (
            f"optim.eps={cfg.eps:g} does not keep the division by the root of the second moment finite. Use "
            f"optim.eps={OptimConfig.eps:g}."
        )
    if max(cfg.b1, cfg.b2) > 1 - 1e-6:
        return f"optim.b1={cfg.b1} or optim.b2={cfg.b2} is 1 in float32. Use {1 - 1e-6} or less."
    if cfg.clip_norm is None:
        return f"Clip the gradients, for example with optim.clip_norm=1, or lower optim.lr={cfg.lr:g}."
    return f"Lower optim.lr={cfg.lr:g}."
