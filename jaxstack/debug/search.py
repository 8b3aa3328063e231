"""Finds the operation of a traced function in which the first value that is not finite came into being.

The function is evaluated level by level. On a level, each equation runs as a whole, such as a loop over all layers.
From a bad result, the search walks back through bad values to the equation that made one from finite values. Then it
goes into that equation: into the step of the loop, and on to the single operation. So only one path is evaluated
operation by operation, and no equation needs to be known to the search but those with inner programs.

Some bad values are meant, such as the -inf of a mask. They are constants, and an operation that turns them into finite
values ends their way. If a constant is all that the search finds, the answer is the operation that made NaN of it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

Values: TypeAlias = list[Any]
Frame: TypeAlias = tuple[str, int, str]
"""A place in the code: file, line, function."""


@dataclass(frozen=True)
class Loop:
    """A step of a loop on the way to an operation.

    Attributes:
      frames: places in the code where the loop is, innermost first.
      step: index of the step. Of a loop that runs backwards, it is the index in the arrays that it reads.
      length: number of steps; `None` if the loop's length is not static.
      carried: of a scan, its largest carried array before the step and after each of the steps before, newest first:
        the number of the step that read it, and its statistics.
      reverse: whether the loop runs from the last step to the first one, as that of gradients does.
    """

    frames: tuple[Frame, ...]
    step: int
    length: int | None
    carried: tuple[tuple[int, str], ...] = ()
    reverse: bool = False


@dataclass(frozen=True)
class Way:
    """How the search came to a level: scopes and frames of the equations that it went into, and the steps of loops.

    Attributes:
      scopes: names, outermost first.
      frames: of the call of a function with `jax.jit` that is on the way, or of the last one; see `Finding.frames`.
      is_call: whether the level is that of such a function.
      loops: steps of loops.
    """

    scopes: str = ""
    frames: tuple[Frame, ...] = ()
    is_call: bool = False
    loops: tuple[Loop, ...] = ()

    def into(self, equation: Any, loop: Loop | None = None) -> "Way":
        """Returns the way to what is within an equation."""
        scopes = f"{self.scopes}/{equation.source_info.name_stack}"
        is_call = equation.primitive.name in ("jit", "pjit")
        return Way(scopes, self.frames_of(equation), is_call, self.loops if loop is None else (*self.loops, loop))

    def frames_of(self, equation: Any) -> tuple[Frame, ...]:
        """Returns the places of an equation in the code.

        The program of a function with `jax.jit` may have been traced in an earlier call. Then the places of this call
        are more exact, although they do not lead into the function.
        """
        own = frames_of(equation)
        fits = own[len(own) - len(self.frames) :] == self.frames
        return own if own and (fits or not self.is_call) else self.frames


@dataclass(frozen=True)
class Finding:
    """The operation that made the first bad value.

    Attributes:
      equation: the operation.
      inputs: its inputs.
      outputs: what it computes from them.
      frames: places in the code where it is, innermost first.
      scopes: names of the scopes in which it is, outermost first, and the transformations of them, such as
        `transpose(jvp())`.
      loops: steps of loops on the way to it, outermost first.
      result: number of the result of the whole program that the search explains.
    """

    equation: Any
    inputs: Values
    outputs: Values
    frames: tuple[Frame, ...]
    scopes: str
    loops: tuple[Loop, ...] = ()
    result: int = 0


def is_bad(value: Any) -> bool:
    """Returns whether an array has a value that is NaN or infinite."""
    return _is_float(value) and not bool(jnp.isfinite(value).all())


def _has_nan(value: Any) -> bool:
    return _is_float(value) and bool(jnp.isnan(value).any())


def _is_float(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def find(closed: Any, arguments: Sequence[Any]) -> Finding | None:
    """Returns the operation that made the first bad value among the results of a program, or `None` if all are finite.

    The results are searched in their order: the first bad one is explained.

    Args:
      closed: the program, from `jax.make_jaxpr`.
      arguments: its inputs, flat.
    """
    level = _Level(closed.jaxpr, [*closed.consts], [*arguments])
    for number, variable in enumerate(closed.jaxpr.outvars):
        if is_bad(level.value(variable)):
            found = level.explain([variable], Way())
            return None if found is None else replace(found, result=number)
    return None


class _Level:
    """All values of one program, of which each equation was run as a whole."""

    def __init__(self, jaxpr: Any, consts: Values, arguments: Values) -> None:
        self._values: dict[Any, Any] = {}
        self._producer: dict[Any, int] = {}
        self._jaxpr = jaxpr
        self._values.update(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))
        for index, equation in enumerate(jaxpr.eqns):
            results = run(equation, [self.value(v) for v in equation.invars])
            for variable, result in zip(equation.outvars, results, strict=True):
                self._values[variable] = result
                self._producer[variable] = index

    def value(self, variable: Any) -> Any:
        return variable.val if isinstance(variable, core.Literal) else self._values[variable]

    def explain(self, bad: Sequence[Any], way: Way) -> Finding | None:
        """Returns the operation that made the bad values of these variables; `None` if they come from outside."""
        for index in self._candidates(bad):
            equation = self._jaxpr.eqns[index]
            inputs = [self.value(v) for v in equation.invars]
            outputs = [self._values[v] for v in equation.outvars]
            if (found := _go_into(equation, inputs, outputs, way)) is not None:
                return found
        return None

    def _candidates(self, bad: Sequence[Any]) -> list[int]:
        """Returns equations that may have made the bad values: those with finite inputs, then others.

        The others have infinite inputs, which may be constants, and made NaN of them or have inner programs. What only
        passes an infinite value on is none.
        """
        origins, makers, seen, waiting = set(), set(), set(), [*bad]
        while waiting:
            variable = waiting.pop()
            if isinstance(variable, core.Literal) or variable in seen or variable not in self._producer:
                continue
            seen.add(variable)
            index = self._producer[variable]
            equation = self._jaxpr.eqns[index]
            inputs = [v for v in equation.invars if is_bad(self.value(v))]
            nans = [v for v in inputs if _has_nan(self.value(v))]
            if not inputs:
                origins.add(index)
            elif not nans and (_has_nan(self.value(variable)) or any(map(_is_program, equation.params.values()))):
                makers.add(index)
            waiting += nans or inputs
        return [*sorted(origins), *sorted(makers)]


def run(equation: Any, inputs: Values) -> Values:
    """Returns what an equation computes."""
    program, given = alone(equation, inputs)
    return [*jax.jit(program)(*given)]


def alone(equation: Any, inputs: Values) -> tuple[Callable[..., Values], Values]:
    """Returns an equation as a function, and those of its inputs that are not constants."""
    given = {v: value for v, value in zip(equation.invars, inputs, strict=True) if not isinstance(v, core.Literal)}
    program = core.Jaxpr((), [*given], equation.outvars, [equation], equation.effects)
    return core.jaxpr_as_fun(core.ClosedJaxpr(program, ())), [*given.values()]


def frames_of(equation: Any) -> tuple[Frame, ...]:
    """Returns the places in the code where an equation was traced, innermost first, without those of JAX."""
    traceback = equation.source_info.traceback
    own = str(jax.__path__[0])
    found = [(f.file_name, f.line_num, f.function_name) for f in traceback.frames] if traceback is not None else []
    return tuple(frame for frame in found if not frame[0].startswith((own, "<frozen")))


def _go_into(equation: Any, inputs: Values, outputs: Values, way: Way) -> Finding | None:
    """Returns the operation within an equation that made its bad results; `None` if they come from a constant of it."""
    name, params = equation.primitive.name, equation.params
    bad = [i for i, value in enumerate(outputs) if is_bad(value)]
    if name == "scan":
        return _go_into_scan(equation, inputs, bad, way)
    if name == "while":
        return _go_into_while(equation, inputs, bad, way)
    if name == "cond":
        inner, given = params["branches"][int(inputs[0])], inputs[1:]
    else:
        programs = [params.get(key) for key in ("jaxpr", "call_jaxpr", "fun_jaxpr")]
        inner, given = next(filter(_is_program, programs), None), inputs
    if inner is None or len(_jaxpr_of(inner).invars) != len(given):
        return Finding(equation, inputs, outputs, way.frames_of(equation), way.into(equation).scopes, way.loops)
    jaxpr = _jaxpr_of(inner)
    level = _Level(jaxpr, [*getattr(inner, "consts", ())], given)
    return level.explain([jaxpr.outvars[i] for i in bad if is_bad(level.value(jaxpr.outvars[i]))], way.into(equation))


def _is_program(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")


def _jaxpr_of(program: Any) -> Any:
    return getattr(program, "jaxpr", program)


def _go_into_scan(equation: Any, inputs: Values, bad: list[int], way: Way) -> Finding | None:
    """Goes into the first step of a loop in which a carried value, or a bad result, is not finite any more."""
    p = equation.params
    body, (constant, carried) = p["jaxpr"], _scan_sizes(p)
    consts, carry, arrays = _split(inputs, constant, carried)
    step = jax.jit(core.jaxpr_as_fun(body))
    order = range(p["length"])
    history: list[tuple[int, str]] = []
    for i in reversed(order) if p["reverse"] else order:
        given = [*consts, *carry, *(a[i] for a in arrays)]
        if carry:
            history.insert(0, (i, statistics(max(carry, key=np.size))))
        results = step(*given)
        new = [k for k in range(carried) if is_bad(results[k]) and not is_bad(carry[k])]
        new += [k for k in bad if k >= carried and is_bad(results[k])]
        if new:
            here = way.into(equation, Loop(way.frames_of(equation), i, p["length"], tuple(history), p["reverse"]))
            level = _Level(body.jaxpr, [*body.consts], given)
            if found := level.explain([body.jaxpr.outvars[k] for k in new], here):
                return found
        carry = [*results[:carried]]
    return None


def _scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """Returns how many inputs of a scan are constants, and how many are carried. JAX 0.11 has other parameters."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    constant, carried, _ = (len([*part.vals]) for part in params["ft_in"].unpack())
    return constant, carried


def _go_into_while(equation: Any, inputs: Values, bad: list[int], way: Way) -> Finding | None:
    """Goes into the first step of a loop in which one of its values is not finite any more."""
    p = equation.params
    of_test, of_body, carry = _split(inputs, p["cond_nconsts"], p["body_nconsts"])
    test, body = (jax.jit(core.jaxpr_as_fun(p[key])) for key in ("cond_jaxpr", "body_jaxpr"))
    count = 0
    while bool(test(*of_test, *carry)[0]):
        results = [*body(*of_body, *carry)]
        new = [k for k in bad if is_bad(results[k]) and not is_bad(carry[k])]
        if new:
            here = way.into(equation, Loop(way.frames_of(equation), count, None))
            jaxpr = p["body_jaxpr"].jaxpr
            level = _Level(jaxpr, [*p["body_jaxpr"].consts], [*of_body, *carry])
            if found := level.explain([jaxpr.outvars[k] for k in new], here):
                return found
        carry, count = results, count + 1
    return None


def _split(values: Values, *sizes: int) -> Iterator[Values]:
    """Yields the first values in groups of these sizes, then the others."""
    start = 0
    for size in sizes:
        yield values[start : start + size]
        start += size
    yield values[start:]


def statistics(value: Any) -> str:
    """Returns one line about an array: dtype, shape, range of its finite values, RMS, and how many are not finite."""
    array = np.asarray(value, np.float64) if _is_float(value) else np.asarray(value)
    shape = "x".join(map(str, array.shape)) or "scalar"
    name = getattr(value, "dtype", array.dtype)
    if not array.size:
        return f"{name} {shape}, empty"
    finite = array[np.isfinite(array)] if _is_float(value) else array
    if not finite.size:
        parts = ["no finite value"]
    else:
        rms = float(np.sqrt(np.mean(np.square(finite.astype(np.float64)))))
        parts = [f"{finite.min():.4g} to {finite.max():.4g}, RMS {rms:.4g}"]
    if _is_float(value):
        counts = {"NaN": np.isnan(array).sum(), "infinite": np.isinf(array).sum()}
        parts += [f"{count:,} of {array.size:,} {word}" for word, count in counts.items() if count]
    return f"{name} {shape}: {', '.join(parts)}"
