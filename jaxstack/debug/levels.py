"""Programs whose every value is computed, and loops whose steps are run one after the other.

Devices along the axis of a guide may compute for nothing, such as the stages of a pipeline that have no unit in a tick.
The step discards their results later. Here they are discarded at once, so that they do not mislead the search.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import PartitionSpec

from jaxstack.common.jax_private import scan_sizes
from jaxstack.debug.devices import Devices, Function, Values, alone, communicates
from jaxstack.debug.statistics import Statistics, flags, is_float
from jaxstack.debug.way import Loop, Reading, Way

Key = TypeVar("Key")
Step = tuple[Way, Values, list[int]]
"""A step of a loop: the way into it, what it reads, and which results are bad for the first time."""


def flags_of(devices: Devices, values: Mapping[Key, Any]) -> dict[Key, np.ndarray]:
    """Returns for each entry of each value whether it is not finite, and whether it is NaN, [2, entries]."""
    return {key: np.asarray(flags(with_entries(devices, value))) for key, value in values.items()}


def with_entries(devices: Devices, value: Any) -> Any:
    """Returns a value with a leading dimension of entries, which whole arrays do not have."""
    return jnp.asarray(value)[None] if devices.mesh is None else value


class LevelProgram:
    """A program that runs on all devices.

    Attributes:
      made: the variables whose values it returns: all that its equations compute, or its results alone.
    """

    def __init__(self, jaxpr: Any, way: Way, results: bool = False) -> None:
        """Prepares a program, which is compiled when it is first called. With `results` it returns only the results."""
        self.made = [*jaxpr.outvars] if results else [v for equation in jaxpr.eqns for v in equation.outvars]
        self._jaxpr = jaxpr
        self._devices = way.devices
        self._guide = way.guide
        self._kinds = [way.guide.idle_kind(way.scopes, way.scopes_of(equation)) for equation in jaxpr.eqns]
        if way.guide.axis not in way.devices.axes:
            self._kinds = [""] * len(jaxpr.eqns)
        self._names = sorted({*self._kinds} - {""})

    def __call__(self, loops: Sequence[Loop], values: Values) -> Values:
        """Runs it in these steps of loops, on the values of its constants and inputs."""
        return [*self._compiled(*(jnp.asarray(self._guide.idle(name, loops)) for name in self._names), *values)]

    @cached_property
    def _compiled(self) -> Function:
        variables = [*self._jaxpr.constvars, *self._jaxpr.invars]
        masks = [PartitionSpec(self._guide.axis)] * len(self._names)
        devices = self._devices
        return devices.compile(self._evaluate, [*masks, *devices.specs(variables)], devices.specs(self.made))

    def _evaluate(self, *values: Any) -> Values:
        masks = dict(zip(self._names, values, strict=False))
        variables = [*self._jaxpr.constvars, *self._jaxpr.invars]
        env = dict(zip(variables, values[len(masks) :], strict=True))

        def read(variable: Any) -> Any:
            return jnp.asarray(variable.val) if isinstance(variable, core.Literal) else env[variable]

        for equation, kind in zip(self._jaxpr.eqns, self._kinds, strict=True):
            inputs = [read(v) for v in equation.invars]
            function, _, values_of_inputs = alone(equation, inputs)
            outputs = function(*values_of_inputs)
            if kind:
                outputs = [self._discard(masks[kind], equation, inputs, i, y) for i, y in enumerate(outputs)]
            env.update(zip(equation.outvars, outputs, strict=True))
        return [read(v) for v in self.made]

    def _discard(self, idle: jax.Array, equation: Any, inputs: Values, index: int, made: jax.Array) -> jax.Array:
        """Returns a result, in which an idle device has no bad value that it made of finite ones."""
        if not is_float(made) or self._guide.axis not in self._devices.split(equation.outvars[index]):
            return made  # what is equal on all stages is used
        wrong = idle & ~jnp.isfinite(made)
        old = _updated(equation, index)
        if old is not None:
            return jnp.where(wrong & jnp.isfinite(inputs[old]), inputs[old], made)
        if not communicates(equation):
            for x in inputs:
                wrong &= jnp.isfinite(x).all() if is_float(x) else True
        return jnp.where(wrong, 0, made).astype(made.dtype)


def evaluate(jaxpr: core.Jaxpr, way: Way, values: Values) -> tuple[dict[core.Var, jax.Array], dict[int, "Scan"]]:
    """Computes every value of a program from `values`, the values of its constants and inputs.

    Scans run step by step, so that the search need not run them again. Returns the values of all variables, and the
    scans by the numbers of their equations.
    """
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], values, strict=True))
    scans = {}

    def read(variable: Any) -> Any:
        return way.devices.constant(variable.val) if isinstance(variable, core.Literal) else known[variable]

    for are_scans, group in groupby(enumerate(jaxpr.eqns), lambda pair: _runs_stepwise(pair[1], way)):
        numbers, equations = zip(*group, strict=True)
        if not are_scans:
            computed = {v for equation in equations for v in equation.outvars}
            read_by_them = [v for equation in equations for v in equation.invars if not isinstance(v, core.Literal)]
            operands = [v for v in dict.fromkeys(read_by_them) if v not in computed]
            program = LevelProgram(core.Jaxpr((), operands, (), [*equations], jaxpr.effects), way)
            known |= zip(program.made, program(way.loops, [known[v] for v in operands]), strict=True)
            continue
        for number, equation in zip(numbers, equations, strict=True):
            inputs = [read(v) for v in equation.invars]
            scans[number] = Scan(equation, inputs, way)
            known |= zip(equation.outvars, scans[number].run(), strict=True)
    return known, scans


def _runs_stepwise(equation: Any, way: Way) -> bool:
    """Returns whether an equation is a scan with steps, and no device computes it for nothing, see `LevelProgram`."""
    return equation.primitive.name == "scan" and equation.params["length"] > 0 and way.of_work(equation) is way


def _updated(equation: Any, index: int) -> int | None:
    """Returns the index of the input of which a result is a later state, or `None`."""
    name = equation.primitive.name
    p = equation.params
    if name == "while":
        return p["cond_nconsts"] + p["body_nconsts"] + index
    if name == "scan":
        constant, carried = scan_sizes(p)
        return constant + index if index < carried else None
    return 0 if name == "dynamic_update_slice" else None


class _Steps:
    """The steps of a loop, which run one after the other.

    Attributes:
      body: the program of a step. The first of its results are carried to the next step.
      readings: what they read of the carried arrays that the guide watches, in the order in which they ran.
    """

    body: Any

    def __init__(self, equation: Any, way: Way) -> None:
        self._equation = equation
        self._way = way
        self.readings: tuple[Reading, ...] = ()

    def loop(self, step: int, length: int | None = None, reverse: bool = False) -> Loop:
        """Returns a step of this loop."""
        way = self._way
        equation = self._equation
        return Loop(way.frames_of(equation), step, length, reverse, way.scopes_of(equation))

    def _program(self, jaxpr: Any) -> LevelProgram:
        return LevelProgram(jaxpr, replace(self._way, scopes=self._way.scopes_of(self._equation)), results=True)

    def _watch(self, loop: Loop, carry: Values) -> None:
        devices = self._way.devices
        for k in self._way.guide.watched(loop, carry):
            value = with_entries(devices, carry[k])
            entries = devices.spread(self.body.jaxpr.outvars[k], np.arange(len(value)))
            self.readings += (Reading(loop.step, k, Statistics.of(value), entries),)

    def _flags(self, variables: Sequence[Any], values: Values) -> np.ndarray:
        """Returns for each variable whether it is not finite, and whether it is NaN, on devices that count [n, 2]."""
        devices = self._way.devices
        bad_entries = flags_of(devices, dict(enumerate(values))).values()
        flags = [(bad & devices.counted(v)).any(1) for v, bad in zip(variables, bad_entries, strict=True)]
        return np.array(flags, bool).reshape(-1, 2)

    def _into(self, loop: Loop, devices: Devices | None = None) -> Way:
        return self._way.into(self._equation, loop, devices)


class Scan(_Steps):
    """The steps of a `lax.scan`."""

    def __init__(self, equation: Any, inputs: Values, way: Way) -> None:
        """Prepares the loop of an equation with its inputs."""
        super().__init__(equation, way)
        p = equation.params
        self.body = p["jaxpr"]
        constant, self._carried = scan_sizes(p)
        self._consts = inputs[:constant]
        self._carry = inputs[constant : constant + self._carried]
        self._arrays = inputs[constant + self._carried :]
        self._steps = range(p["length"])[:: -1 if p["reverse"] else 1]
        self._step = self._program(self.body.jaxpr)
        self._first: list[tuple[Loop, Values, list[int]]] = []  # steps, with what they carry, and what is bad

    def at(self, step: int) -> Loop:
        """Returns a step of this loop."""
        return replace(self.loop_of(self._equation, self._way), step=step)

    @staticmethod
    def loop_of(equation: Any, way: Way) -> Loop:
        """Returns the first step of the loop of an equation."""
        p = equation.params
        return Loop(way.frames_of(equation), 0, p["length"], p["reverse"], way.scopes_of(equation))

    def _run(self, step: int, carry: Values) -> Values:
        values = [*map(self._way.devices.constant, self.body.consts), *self._given(step, carry)]
        return self._step((*self._way.loops, self.at(step)), values)

    def _given(self, step: int, carry: Values) -> Values:
        return [*self._consts, *carry, *_entry_of(self._arrays, step, axis=self._axis)]

    @property
    def _axis(self) -> int:
        return 0 if self._way.devices.mesh is None else 1

    def run(self) -> Values:
        """Runs all steps and returns what the loop computes. The steps in which a value became bad are kept."""
        variables = self.body.jaxpr.outvars
        carry = self._carry
        made = {}
        before = np.zeros((len(variables), 2), bool)  # what was bad in an earlier step
        before[: self._carried] = self._flags(variables[: self._carried], carry)
        for i in self._steps:
            self._watch(self.at(i), carry)
            results = self._run(i, carry)
            now = self._flags(variables, results)
            new = np.flatnonzero((now & ~before).any(1))
            if new.size:
                self._first.append((replace(self.at(i), readings=self.readings), carry, new.tolist()))
            before |= now
            carry = results[: self._carried]
            made[i] = results[self._carried :]
        return [*carry, *_stack([made[i] for i in sorted(made)], axis=self._axis)]

    def steps(self, bad: Sequence[int]) -> Iterator[Step]:
        """Yields the steps in which a carried value, or one of the bad results, is not finite for the first time.

        After them come other steps in which one is not finite. They are needed only if the first bad values are meant.
        """
        for loop, carry, new in self._first:
            if chosen := [k for k in new if k < self._carried or k in bad]:
                yield self._into(loop), self._given(loop.step, carry), chosen
        tried = {loop.step for loop, _, _ in self._first}
        variables = self.body.jaxpr.outvars
        carry = self._carry
        for i in self._steps:
            results = self._run(i, carry)
            if i not in tried:
                now = self._flags(variables, results)[:, 0]
                before = self._flags(variables[: self._carried], carry)[:, 0]
                new = [k for k in range(self._carried) if now[k] and not before[k]]
                new += [k for k in bad if k >= self._carried and now[k]]
                if new:
                    yield self._into(self.at(i)), self._given(i, carry), new
            carry = results[: self._carried]


@partial(jax.jit, static_argnames="axis")
def _entry_of(arrays: Values, index: int, axis: int) -> Values:
    """Returns what a step reads of arrays."""
    return [jax.lax.dynamic_index_in_dim(a, index, axis, keepdims=False) for a in arrays]


@partial(jax.jit, static_argnames="axis")
def _stack(parts: Sequence[Values], axis: int) -> Values:
    """Returns the arrays of results, from the results of each step."""
    return [jnp.stack(entries, axis) for entries in zip(*parts, strict=True)]


class While(_Steps):
    """The turns of a `lax.while_loop`. On a mesh, each device may have another number of them."""

    def __init__(self, equation: Any, inputs: Values, way: Way) -> None:
        """Prepares the loop of an equation with its inputs."""
        super().__init__(equation, way)
        p = equation.params
        devices = way.devices
        self._test = p["cond_jaxpr"]
        self.body = p["body_jaxpr"]
        first = p["cond_nconsts"]
        second = p["cond_nconsts"] + p["body_nconsts"]
        self._of_test = [*map(devices.constant, self._test.consts), *inputs[:first]]
        self._of_body = inputs[first:second]
        self._carry = inputs[second:]

    def steps(self, bad: Sequence[int]) -> Iterator[Step]:
        """Runs the turns; yields those in which one of the bad results is not finite any more."""
        devices = self._way.devices
        variables = self.body.jaxpr.outvars
        test = self._program(self._test.jaxpr)
        body = self._program(self.body.jaxpr)
        consts = [*map(devices.constant, self.body.consts)]
        before = self._flags(variables, self._carry)[:, 0]
        turn = 0
        while True:
            loop = self.loop(turn)
            loops = (*self._way.loops, loop)
            (answer,) = test(loops, [*self._of_test, *self._carry])
            runs = devices.spread(self._test.jaxpr.outvars[0], np.asarray(answer))
            if not (runs if devices.active is None else runs & devices.active).any():
                return
            self._watch(loop, self._carry)
            given = [*self._of_body, *self._carry]
            results = body(loops, [*consts, *given])
            arrays = zip(variables, results, self._carry, strict=True)
            self._carry = [devices.choose(runs, v, new, old) for v, new, old in arrays]
            now = self._flags(variables, self._carry)[:, 0]
            new = [k for k in bad if now[k] and not before[k]]
            before = now
            turn = turn + 1
            if new:
                way = self._into(replace(loop, readings=self.readings), None if runs.all() else devices.only(runs))
                yield way, given, new


def inline_single_steps(jaxpr: Any, way: Way) -> Any:
    """Returns a program in which the work of each loop of a single step is among its own equations.

    Such a loop is that over microbatches when there is one. Loops that the guide follows, and those with results for
    each step, are kept.
    """
    if not any(_is_single(equation, way) for equation in jaxpr.eqns):
        return jaxpr
    now: dict[Any, Any] = {}
    defined = {v for equation in jaxpr.eqns for v in equation.outvars} | {*jaxpr.constvars, *jaxpr.invars}
    equations = []
    for equation in jaxpr.eqns:
        equation = equation.replace(invars=_replaced(now, equation.invars))
        if _is_single(equation, way) and defined.isdisjoint(_variables(equation.params["jaxpr"].jaxpr)):
            body = equation.params["jaxpr"].jaxpr
            defined |= _variables(body)
            equations += _equations_of_step(equation, body, now)
            now |= zip(equation.outvars, _replaced(now, body.outvars), strict=True)
        else:
            equations.append(equation)
    return core.Jaxpr(jaxpr.constvars, jaxpr.invars, _replaced(now, jaxpr.outvars), equations, jaxpr.effects)


def _is_single(equation: Any, way: Way) -> bool:
    """Returns whether an equation is a loop of a single step that can be replaced."""
    if equation.primitive.name != "scan" or equation.params["length"] != 1 or equation.params["jaxpr"].consts:
        return False
    if len(equation.outvars) != scan_sizes(equation.params)[1]:
        return False
    return not way.guide.is_followed(Scan.loop_of(equation, way))


def _variables(body: Any) -> set[Any]:
    return {*body.invars} | {v for equation in body.eqns for v in equation.outvars}


def _replaced(now: Mapping[Any, Any], atoms: Any) -> list[Any]:
    """Returns what takes the place of each atom."""
    return [a if isinstance(a, core.Literal) else now.get(a, a) for a in atoms]


def _equations_of_step(equation: Any, body: Any, now: dict[Any, Any]) -> list[Any]:
    """Returns the equations of a loop's body with its inputs in `now`: arrays over steps lose this dimension."""
    same = sum(scan_sizes(equation.params))
    now |= zip(body.invars[:same], equation.invars[:same], strict=True)
    equations = [
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
        equations.append(inner.replace(invars=_replaced(now, inner.invars), source_info=source))
    return equations
