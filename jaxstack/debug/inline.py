"""Replaces loops of one step by their work, so that the search need not run it once more to get into them."""

from collections.abc import Mapping
from typing import Any

from jax.extend import core

from jaxstack.debug.levels import Scan, scan_sizes
from jaxstack.debug.way import Way


def inline_single_steps(jaxpr: Any, way: Way) -> Any:
    """Returns a program in which the work of each loop of a single step is among its own equations.

    Such a loop is that over microbatches when there is one. Loops that the guide follows, and those with results for
    each step, are kept.
    """
    if not any(_is_single(equation, way) for equation in jaxpr.eqns):
        return jaxpr
    now: dict[Any, Any] = {}
    made = {v for equation in jaxpr.eqns for v in equation.outvars} | {*jaxpr.constvars, *jaxpr.invars}
    equations = []
    for equation in jaxpr.eqns:
        equation = equation.replace(invars=_read(now, equation.invars))
        if _is_single(equation, way) and made.isdisjoint(_variables(equation.params["jaxpr"].jaxpr)):
            body = equation.params["jaxpr"].jaxpr
            made |= _variables(body)
            equations += _work(equation, body, now)
            now |= zip(equation.outvars, _read(now, body.outvars), strict=True)
        else:
            equations.append(equation)
    return core.Jaxpr(jaxpr.constvars, jaxpr.invars, _read(now, jaxpr.outvars), equations, jaxpr.effects)


def _is_single(equation: Any, way: Way) -> bool:
    """Returns whether an equation is a loop of a single step that can be replaced."""
    if equation.primitive.name != "scan" or equation.params["length"] != 1 or equation.params["jaxpr"].consts:
        return False
    if len(equation.outvars) != scan_sizes(equation.params)[1]:
        return False
    return not way.guide.is_followed(Scan.loop_of(equation, way))


def _variables(body: Any) -> set[Any]:
    return {*body.invars} | {v for equation in body.eqns for v in equation.outvars}


def _read(now: Mapping[Any, Any], atoms: Any) -> list[Any]:
    """Returns what takes the place of each atom."""
    return [a if isinstance(a, core.Literal) else now.get(a, a) for a in atoms]


def _work(equation: Any, body: Any, now: dict[Any, Any]) -> list[Any]:
    """Returns the equations of a loop's body with its inputs in `now`: arrays over steps lose this dimension."""
    same = sum(scan_sizes(equation.params))
    now |= zip(body.invars[:same], equation.invars[:same], strict=True)
    found = [
        equation.replace(
            invars=[array],
            outvars=[entry],
            primitive=core.primitives.squeeze_p,
            params={"dimensions": (0,)},
            effects=set(),
        )
        for array, entry in zip(equation.invars[same:], body.invars[same:], strict=True)
    ]
    outer = equation.source_info.name_stack
    for inner in body.eqns:
        source = inner.source_info.replace(name_stack=outer + inner.source_info.name_stack)
        found.append(inner.replace(invars=_read(now, inner.invars), source_info=source))
    return found
