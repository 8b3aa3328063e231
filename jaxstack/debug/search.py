"""Finds the operation of a traced function in which the first value that is not finite came into being.

The function is evaluated level by level. A level is a program, such as the body of a loop, whose every value is
computed. From a bad result, the search walks back through bad values to the equation that made one from finite values.
Then it goes into that equation: into the step of the loop, and on to the single operation. So only one path is
evaluated operation by operation, and no equation needs to be known to the search but those with inner programs. Within
`jax.shard_map` a level runs on all devices of the mesh, see `jaxstack.debug.devices`.

Some bad values are meant, such as the -inf of a mask. They are constants, and an operation that turns them into finite
values ends their way. If a constant is all that the search finds, the answer is the operation that made NaN of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jaxstack.debug.devices import Devices, Values, alone
from jaxstack.debug.levels import Scan, While, evaluate, flags_of, inline_single_steps
from jaxstack.debug.rules import Frame
from jaxstack.debug.statistics import is_bad
from jaxstack.debug.way import Guide, Loop, Way


@dataclass(frozen=True)
class Finding:
    """The operation that made the first bad value.

    Attributes:
      equation: the operation.
      inputs: inputs of the operation; on a mesh, on `device` alone.
      outputs: what it computes from them.
      frames: places in the code where it is, innermost first.
      scopes: names of the scopes in which it is, outermost first, and the transformations of them, such as
        `transpose(jvp())`.
      loops: steps of loops on the way to it, outermost first.
      device: coordinates on the mesh of the first device with a bad output; empty outside of `jax.shard_map`.
      bad: on which devices of the mesh an output is bad, as an array over its axes.
      devices: where the operation ran.
      everywhere: its inputs on all devices, as `Devices` has them.
      result: number of the result of the whole program that the search explains.
    """

    equation: Any
    inputs: Values
    outputs: Values
    frames: tuple[Frame, ...]
    scopes: str
    loops: tuple[Loop, ...]
    device: dict[str, int]
    bad: np.ndarray
    devices: Devices
    everywhere: Values = field(repr=False)
    result: int = 0


def find(closed: Any, arguments: Sequence[Any], guide: Guide | None = None) -> Finding | None:
    """Returns the operation that made the first bad value among the results of a program, or `None` if all are finite.

    The results are searched in their order: the first bad one is explained. `closed` is the program from
    `jax.make_jaxpr`, and `arguments` are its flat inputs.
    """
    way = Way(guide=guide or Guide())
    jaxpr = closed.jaxpr
    consts = [*closed.consts]
    values = [*arguments]
    results = jaxpr.outvars
    if len(jaxpr.eqns) == 1 and jaxpr.eqns[0].primitive.name == "shard_map":  # it need not run as a whole before
        (equation,) = jaxpr.eqns
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))
        inputs = [v.val if isinstance(v, core.Literal) else known[v] for v in equation.invars]
        inner, consts, values, way = _enter_mesh(equation, inputs, way)
        inner = inline_single_steps(inner, way)
        places = {v: inner.outvars[i] for i, v in enumerate(equation.outvars)}
        jaxpr = inner
        results = [places[v] for v in results if v in places]
    else:
        jaxpr = inline_single_steps(jaxpr, way)
        results = jaxpr.outvars
    level = _Level(jaxpr, consts, values, way)
    for number, variable in enumerate(results):
        if level.is_bad(variable):
            finding = level.explain([variable])
            return None if finding is None else replace(finding, result=number)
    return None


def run(equation: Any, inputs: Values) -> Values:
    """Returns what an equation computes from whole arrays."""
    program, _, values = alone(equation, inputs)
    return [*jax.jit(program)(*values)]


class _Level:
    """All values of one program."""

    def __init__(self, jaxpr: Any, consts: Values, arguments: Values, way: Way) -> None:
        self._jaxpr = jaxpr
        self._way = way
        self._devices = way.devices
        inputs = [*map(self._devices.constant, consts), *arguments]
        self._values, self._scans = evaluate(jaxpr, way, inputs)
        self._producer = {v: i for i, equation in enumerate(jaxpr.eqns) for v in equation.outvars}
        self._flags = flags_of(self._devices, self._values)

    def value(self, variable: Any) -> Any:
        return self._devices.constant(variable.val) if isinstance(variable, core.Literal) else self._values[variable]

    def is_bad(self, variable: Any, nan: bool = False) -> bool:
        """Returns whether a variable is not finite, or whether it is NaN, on a device that counts."""
        if isinstance(variable, core.Literal):
            return bool(np.isnan(variable.val).any()) if nan else is_bad(np.asarray(variable.val))
        return bool((self._flags[variable][int(nan)] & self._devices.counted(variable)).any())

    def explain(self, bad: Sequence[Any]) -> Finding | None:
        """Returns the operation that made the bad values of these variables; `None` if they come from outside."""
        for index in self._candidates(bad):
            if (finding := self._go_into(index)) is not None:
                return finding
        return None

    def _candidates(self, bad: Sequence[Any]) -> list[int]:
        """Returns equations that may have made the bad values: those with finite inputs, then others.

        The others have infinite inputs, which may be constants, and made NaN of them or have inner programs. What only
        passes an infinite value on is none.
        """
        origins = set()
        makers = set()
        visited = set()
        waiting = [*bad]
        while waiting:
            variable = waiting.pop()
            if isinstance(variable, core.Literal) or variable in visited or variable not in self._producer:
                continue
            visited.add(variable)
            index = self._producer[variable]
            equation = self._jaxpr.eqns[index]
            inputs = [v for v in equation.invars if self.is_bad(v)]
            nans = [v for v in inputs if self.is_bad(v, nan=True)]
            if not inputs:
                origins.add(index)
            elif not nans and (self.is_bad(variable, nan=True) or any(map(_is_program, equation.params.values()))):
                makers.add(index)
            waiting += nans or inputs
        return [*sorted(origins), *sorted(makers)]

    def _go_into(self, index: int) -> Finding | None:
        """Returns the operation in an equation that made its bad results; `None` if they come from a constant of it."""
        equation = self._jaxpr.eqns[index]
        way = self._way.of_work(equation)
        name = equation.primitive.name
        params = equation.params
        inputs = [self.value(v) for v in equation.invars]
        bad = [i for i, v in enumerate(equation.outvars) if self.is_bad(v)]
        if name == "scan":
            if index not in self._scans:
                self._scans[index] = Scan(equation, inputs, way)
                self._scans[index].run()
            return self._go_into_loop(self._scans[index], bad)
        if name == "while":
            return self._go_into_loop(While(equation, inputs, way), bad)
        if name == "cond":
            return self._go_into_branches(equation, inputs, bad, way)
        if name == "shard_map" and way.devices.mesh is None:
            return _explain(*_enter_mesh(equation, inputs, way), bad)
        programs = [params.get(key) for key in ("jaxpr", "call_jaxpr", "fun_jaxpr")]
        inner = next(filter(_is_program, programs), None)
        if inner is None or name == "shard_map" or len(_jaxpr_of(inner).invars) != len(inputs):
            return self._finding(equation, inputs, way)
        return _explain(_jaxpr_of(inner), [*getattr(inner, "consts", ())], inputs, way.into(equation), bad)

    def _go_into_loop(self, loop: Scan | While, bad: list[int]) -> Finding | None:
        """Goes into the first step of a loop in which a value is not finite any more."""
        for inner, given, new in loop.steps(bad):
            if finding := _explain(loop.body.jaxpr, [*loop.body.consts], given, inner, new):
                return finding if isinstance(loop, While) else self._with_others(loop, finding)
        return None

    def _with_others(self, loop: Scan, finding: Finding) -> Finding:
        """Adds what the loop reads after the bad step, and what other loops over the same layers read."""
        depth = len(self._way.loops)
        here = loop.at(0)
        if not self._way.guide.is_followed(here):
            return finding
        others = [scan for scan in self._scans.values() if scan is not loop and scan.at(0).frames == here.frames]
        readings = tuple(replace(other.at(0), readings=other.readings) for other in others)
        full = replace(finding.loops[depth], readings=loop.readings, others=readings)
        return replace(finding, loops=(*finding.loops[:depth], full, *finding.loops[depth + 1 :]))

    def _go_into_branches(self, equation: Any, inputs: Values, bad: list[int], way: Way) -> Finding | None:
        """Goes into the branch that was taken, or on a mesh into each that some devices have taken."""
        devices = way.devices
        taken = devices.spread(equation.invars[0], np.asarray(inputs[0]))
        for number in np.unique(taken if devices.active is None else taken[devices.active]):
            inner = equation.params["branches"][int(number)]
            here = way.into(equation, devices=devices if devices.mesh is None else devices.only(taken == number))
            if finding := _explain(_jaxpr_of(inner), [*getattr(inner, "consts", ())], inputs[1:], here, bad):
                return finding
        return None

    def _finding(self, equation: Any, inputs: Values, way: Way) -> Finding:
        devices = way.devices
        bad = np.zeros(way.devices.shape, bool)
        for v in equation.outvars:
            bad = bad | devices.spread(v, self._flags[v][0])
        bad = bad if devices.active is None else bad & devices.active
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        outputs = [self._values[v] for v in equation.outvars]
        return Finding(
            equation,
            [devices.at(v, x, first) for v, x in zip(equation.invars, inputs, strict=True)],
            [devices.at(v, x, first) for v, x in zip(equation.outvars, outputs, strict=True)],
            way.frames_of(equation),
            way.scopes_of(equation),
            way.loops,
            dict(zip(devices.axes, first, strict=True)),
            bad,
            devices,
            inputs,
        )


def _explain(jaxpr: Any, consts: Values, inputs: Values, way: Way, bad: Sequence[int]) -> Finding | None:
    """Explains the results of a program with the numbers `bad`, as far as they are not finite."""
    jaxpr = inline_single_steps(jaxpr, way)
    level = _Level(jaxpr, consts, inputs, way)
    return level.explain([v for v in (jaxpr.outvars[i] for i in bad) if level.is_bad(v)])


def _enter_mesh(equation: Any, inputs: Values, way: Way) -> tuple[Any, Values, Values, Way]:
    """Returns program, constants and values within a `shard_map`, and the way there."""
    devices = Devices.of(equation)
    program = equation.params["jaxpr"]
    inner = way.into(equation, devices=devices)
    return _jaxpr_of(program), [*getattr(program, "consts", ())], devices.enter(equation, inputs), inner


def _is_program(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")


def _jaxpr_of(program: Any) -> Any:
    return getattr(program, "jaxpr", program)
