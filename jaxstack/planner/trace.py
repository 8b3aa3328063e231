"""Walks a traced program: which arrays it holds at once, and which operations it runs how often, without compiling.

The program is a jaxpr. Its equations run in their order. An array takes memory from the equation that writes it to the
last one that reads it, unless it is never written: XLA computes elementwise operations, broadcasts and slices within
whatever reads them, see `FUSED`. Such an array keeps alive what it is computed from. It is written as soon as an
operation reads it that does not compute its operands itself, such as a matmul. Loops write what they carry in place.
On a GPU they compute what is spread from a small array, such as a mask, in each of their turns.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.extend.core

from jaxstack.common.jax_private import scan_sizes

FUSED = frozenset([
    "abs", "add", "add_any", "and", "atan2", "broadcast_in_dim", "ceil", "clamp", "concatenate",
    "convert_element_type", "cos", "div", "dynamic_slice", "eq", "erf", "erf_inv", "exp", "exp2", "floor", "ge",
    "gt", "integer_pow", "iota", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne",
    "neg", "not", "or", "pad", "pow", "random_bits", "random_wrap", "random_unwrap", "rem", "rev", "round", "rsqrt",
    "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "slice", "split",
    "sqrt", "square", "sub", "tan", "tanh", "threefry2x32", "transpose", "unstack", "xor",
])  # fmt: skip
"""Primitives whose results XLA computes within the operations that read them."""

VIEWS = frozenset([
    "copy", "expand_dims", "name", "pbroadcast", "pcast", "pvary", "reduce_precision", "reshape", "squeeze",
    "stop_gradient",
])  # fmt: skip
"""Primitives whose result is their operand, in the same memory."""

READS_FUSED = frozenset([
    "argmax", "argmin", "gather", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum",
])  # fmt: skip
"""Other primitives that compute their operands themselves."""

IN_PLACE = frozenset([
    "dynamic_update_slice", "optimization_barrier", "scatter", "scatter-add", "scatter_add",
])  # fmt: skip
"""Primitives that write their result over their operand."""

LOOPS = frozenset(["cond", "scan", "while"])

PARAMETERS = "parameters"
"""Label of arguments that are parameters. What is computed from them alone has a label that begins with it."""


class Array(NamedTuple):
    """An array that a program holds.

    Attributes:
      label: what it is for; empty if nothing says so.
      name: name by `checkpoint_name`, or the primitive that makes it.
      shape, dtype: shape and dtype of one device's part.
      bytes: bytes that the array takes.
    """

    label: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


class Run(NamedTuple):
    """An operation that writes arrays.

    Attributes:
      primitive: its name in JAX. `fused` means elementwise operations that write one array.
      where: named scopes, joined by `/`.
      inputs, outputs: arrays that it reads and writes.
      times: how often it runs.
      params: parameters of the primitive.
    """

    primitive: str
    where: str
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    times: float
    params: Mapping[str, Any]


class Trace(NamedTuple):
    """What a program needs.

    Attributes:
      arrays: those that are alive where they take the most memory, with their number. Arguments are left out.
      waiting: all arrays that wait for the backward pass, see `labels` of `walk`.
      runs: its operations.
    """

    arrays: Counter[Array]
    waiting: Counter[Array]
    runs: list[Run]


@dataclass(eq=False)
class _Value:
    """An array of a program during the walk.

    Attributes:
      array: what it is.
      written: whether it takes memory, of its own or of its `place`.
      outside: whether the caller counts its memory.
      sources: written values that it is computed from, if it is not written.
      place: the value into whose memory it is written.
      shared: whether other operations may read it.
      born, last: steps that write it and read it last.
    """

    array: Array
    written: bool = False
    outside: bool = False
    sources: tuple["_Value", ...] = ()
    place: "_Value | None" = None
    shared: bool = False
    born: int = -1
    last: int = -1

    @property
    def is_spread(self) -> bool:
        """Whether it is computed from much smaller arrays. XLA then computes it again in each turn of a loop."""
        return not self.written and 4 * sum(source.array.bytes for source in self.sources) < self.array.bytes

    @property
    def root(self) -> "_Value":
        """The value that has the memory."""
        return self if self.place is None else self.place.root


Values = list[_Value | None]
"""Values by position; `None` stands for a literal."""


@dataclass
class _Walk:
    """The walk over the equations of one level: of the program, or of a turn of a loop.

    Attributes:
      labels: label of the arrays that are made in a named scope and wait for the backward pass, by a part of its name.
      trips: mean trip counts of `while` loops by the name of their scope.
      copies: whether loops read copies of arguments.
      on_gpu: see `walk`.
      times: how often the equations run.
      known: results of operations that write none, and copies of operands of matmuls.
    """

    labels: Mapping[str, str]
    trips: Mapping[str, float]
    copies: bool = False
    on_gpu: bool = True
    times: float = 1.0
    step: int = 0
    values: list[_Value] = field(default_factory=list)
    inner: dict[int, Counter[Array]] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    copied: dict[int, _Value] = field(default_factory=dict)
    known: dict[Any, list[_Value]] = field(default_factory=dict)
    waiting: Counter[Array] = field(default_factory=Counter)

    def read(self, value: _Value | None, fused: bool, where: str = "") -> None:
        """Keeps alive what an operation reads. It is written before, unless the operation computes it."""
        if value is None:
            return
        if not value.written:
            for source in value.sources:
                source.root.last = self.step
            if fused or not value.array.bytes:
                return
            self.write(value)
            most = 2 * value.array.bytes  # of a slice, only a part is read
            sources = tuple(s.array._replace(bytes=min(s.array.bytes, most)) for s in value.sources)
            self.runs.append(Run("fused", where, sources, (value.array,), self.times, {}))
        value.root.last = self.step

    def write(self, value: _Value) -> None:
        """Gives a value memory of its own."""
        value.written = True
        value.born = self.step
        value.last = self.step
        self.values.append(value)

    def run(self, jaxpr: Any, inputs: Sequence[_Value | None], scope: str) -> Values:
        """Walks the equations of a jaxpr, and returns the values of its results."""
        env: dict[Any, _Value | None] = dict(zip(jaxpr.invars, inputs, strict=True))

        def get(atom: Any) -> _Value | None:
            return None if isinstance(atom, jax.extend.core.Literal) else env.get(atom)

        for equation in jaxpr.eqns:
            where = f"{scope}/{equation.source_info.name_stack}"
            found = self.equation(equation, [get(atom) for atom in equation.invars], where)
            env |= dict(zip(equation.outvars, found, strict=True))
        return [get(atom) for atom in jaxpr.outvars]

    def equation(self, equation: Any, inputs: Values, where: str) -> Values:
        """Walks one equation, and returns the values of its results."""
        self.step += 1
        name = equation.primitive.name
        if name in LOOPS:
            return self.loop(equation, inputs, where)
        inner = list(jax.extend.core.jaxprs_in_params(equation.params))
        if len(inner) == 1 and len(inner[0].invars) == len(inputs) and name != "pallas_call":
            if name == "shard_map":  # outside are the arrays of all devices
                inputs = [
                    value and _outside(variable, value.array.label)
                    for value, variable in zip(inputs, inner[0].invars, strict=True)
                ]
            return self.run(inner[0], inputs, where)
        if name in VIEWS and len(inputs) == 1 and inputs[0] is not None:
            if name == "name":
                inputs[0].array = inputs[0].array._replace(name=equation.params["name"])
            return [inputs[0]]
        if name in FUSED:
            return self.fused(equation, inputs, where)
        results = [self.value(variable, name, where, inputs) for variable in equation.outvars]
        if name in IN_PLACE:
            inputs = [_own(value) for value in inputs]
        for value in inputs:
            self.read(value, name in READS_FUSED, where)
        if name == "dot_general" and self.on_gpu:
            self.reorder(equation, inputs)
        for k, result in enumerate(results):
            self.write(result)
            if name in IN_PLACE and k < len(inputs):
                result.place = inputs[k]
        pairs = zip(inputs, equation.invars, strict=True)  # a view has another shape than its array
        read = tuple(_array(x, v.array.label, v.array.name) for v, x in pairs if v is not None)
        self.runs.append(Run(name, where, read, tuple(v.array for v in results), self.times, equation.params))
        return list(results)

    def fused(self, equation: Any, inputs: Values, where: str) -> Values:
        """Returns the values of the results of an operation that writes none, of equal operations the same."""
        key = _key(equation, inputs)
        if key not in self.known or not self.on_gpu:
            results = [self.value(variable, equation.primitive.name, where, inputs) for variable in equation.outvars]
            for result in results:
                result.sources = _sources(inputs)
                result.shared = True
            self.known[key] = results
        return list(self.known[key])

    def reorder(self, equation: Any, inputs: Values) -> None:
        """Writes copies of the operands of a batched matmul in which neither rows nor columns are side by side."""
        for value, dims in zip(inputs, _dims(equation), strict=True):
            if value is None or dims.count("fc") + dims.count("cf") < 2:
                continue
            (copy,) = self.known.setdefault((value, dims), [_Value(value.array)])
            if not copy.written:
                self.write(copy)
            copy.last = self.step

    def loop(self, equation: Any, inputs: Values, where: str) -> Values:
        """Walks the turns of a loop, or the branches of a condition. What they need on the way is freed behind them."""
        name = equation.primitive.name
        params = equation.params
        constants = 0
        carry = 0
        turns = 1.0
        if name == "cond":
            bodies = [branch.jaxpr for branch in params["branches"]]
            inputs = inputs[1:]
        elif name == "scan":
            bodies = [params["jaxpr"].jaxpr]
            constants, carry = scan_sizes(params)
            turns = params["length"]
        else:
            bodies = [params["body_jaxpr"].jaxpr]
            inputs = inputs[params["cond_nconsts"] :]
            carry = len(bodies[0].outvars)
            turns = next((count for scope, count in self.trips.items() if where.endswith(scope)), 1.0)
        if name == "scan" and turns == 1:  # XLA removes the loop
            return self.run(bodies[0], inputs, where)
        inputs = [self.copy(value) for value in inputs]
        first = constants if name == "scan" else len(inputs) - carry
        for k in range(first, first + carry):
            inputs[k] = _own(inputs[k])
        for k, value in enumerate(inputs):
            carried = first <= k < first + carry
            self.read(value, self.on_gpu and not carried and value is not None and value.is_spread, where)
        results = [self.value(variable, name, where, []) for variable in equation.outvars]
        labels = {} if any(part in where for part in self.labels) else self.labels
        walks = [_Walk(labels, self.trips, on_gpu=self.on_gpu, times=self.times * turns) for _ in bodies]
        names = [walk.turn(body, inputs, where) for walk, body in zip(walks, bodies, strict=True)][-1]
        most = max(walks, key=lambda walk: total(walk.peak()))
        self.inner[self.step] = most.peak()
        self.runs += most.runs
        self.waiting += most.wait()
        for k, result in enumerate(results):
            result.array = result.array._replace(name=names[k] or name)
            self.write(result)
            result.place = inputs[first + k] if k < carry else None
        return list(results)

    def turn(self, jaxpr: Any, inputs: Values, where: str) -> list[str]:
        """Walks a turn of a loop, whose inputs are outside of it, and returns the names of its results."""
        labels = [value.array.label if value is not None else "" for value in inputs]
        kept = [label if label.startswith(PARAMETERS) else "" for label in labels]
        outside = [_outside(variable, label) for variable, label in zip(jaxpr.invars, kept, strict=True)]
        results = self.run(jaxpr, outside, where)
        self.step += 1
        for value in results:
            self.read(value, True)
        return ["" if value is None else value.array.name for value in results]

    def copy(self, value: _Value | None) -> _Value | None:
        """Returns what a loop reads in place of a value: its copy, if it is an argument and loops copy these."""
        if value is None or not self.copies or not (value.outside and value.array.label == PARAMETERS):
            return value
        if id(value) not in self.copied:
            self.copied[id(value)] = _Value(value.array._replace(label=f"{PARAMETERS}, copied for the loops"))
            self.write(self.copied[id(value)])
        return self.copied[id(value)]

    def value(self, variable: Any, name: str, where: str, inputs: Values) -> _Value:
        """Returns a new value that is not written yet."""
        label = ""
        if "transpose(" not in where:
            label = next((label for part, label in self.labels.items() if part in where), "")
        made = _array(variable, label, name)
        given = [value.array.label for value in inputs if value is not None]
        if given and all(label.startswith(PARAMETERS) for label in given):
            how = "gathered" if name.startswith("all_gather") else f"in {made.dtype}"
            made = made._replace(label=f"{PARAMETERS} {how}")
        return _Value(made)

    def wait(self) -> Counter[Array]:
        """Returns the arrays with one of `labels`."""
        own = [v.array for v in self.values if v.root is v and not v.outside and v.array.label in self.labels.values()]
        return self.waiting + Counter(own)

    def peak(self) -> Counter[Array]:
        """Returns the arrays that are alive where they take the most memory."""
        begin = defaultdict(list)
        end = defaultdict(list)
        for value in self.values:
            if value.root is value and not value.outside:
                begin[value.born].append(value.array)
                end[value.last].append(value.array)
        alive: Counter[Array] = Counter()
        most = alive
        size = 0
        largest = -1
        for step in range(self.step + 1):
            alive.update(begin[step])
            size += sum(array.bytes for array in begin[step])
            inner = self.inner.get(step, Counter())
            if size + total(inner) > largest:
                largest = size + total(inner)
                most = alive + inner
            alive.subtract(end[step])
            size -= sum(array.bytes for array in end[step])
        return most


def _sources(inputs: Values) -> tuple[_Value, ...]:
    """Returns the written values that a value is computed from."""
    found = [s for value in inputs if value is not None for s in ((value,) if value.written else value.sources)]
    return tuple({id(source): source for source in found}.values())


def _own(value: _Value | None) -> _Value | None:
    """Returns a value that may be written over: a copy of one that other operations may read."""
    return _Value(value.array, sources=_sources([value])) if value is not None and value.shared else value


def _key(equation: Any, inputs: Values) -> Any:
    """Returns what is equal for operations with equal results."""
    pairs = zip(inputs, equation.invars, strict=True)
    operands = (repr(getattr(atom, "val", atom)) if value is None else value for value, atom in pairs)
    return equation.primitive, str(equation.params), *operands


def _dims(equation: Any) -> list[str]:
    """Returns for each operand of a `dot_general` its dimensions without batches, as `f` if free, `c` if contracted."""
    contracted, batches = equation.params["dimension_numbers"]
    operands = zip(equation.invars, contracted, batches, strict=True)
    return ["".join("fc"[i in c] for i in range(v.aval.ndim) if i not in b) for v, c, b in operands]


def _outside(variable: Any, label: str = "") -> _Value:
    return _Value(_array(variable, label, ""), written=True, outside=True)


def _array(variable: Any, label: str, name: str) -> Array:
    shape = tuple(getattr(variable.aval, "shape", ()))
    dtype = getattr(variable.aval, "dtype", None)
    return Array(label, name, shape, str(dtype), math.prod(shape) * getattr(dtype, "itemsize", 0))


def total(arrays: Mapping[Array, int]) -> int:
    """Returns the bytes of arrays."""
    return sum(array.bytes * count for array, count in arrays.items())


def walk(
    jaxpr: Any,
    arguments: Iterable[str],
    labels: Mapping[str, str],
    trips: Mapping[str, float],
    results: str = "",
    copies: bool = False,
    on_gpu: bool = True,
) -> Trace:
    """Returns what a program needs.

    Args:
      jaxpr: the program. Arrays within a `shard_map` are the shards of one device.
      arguments: label of each argument, see `PARAMETERS`.
      labels: label of the arrays that are made in a named scope and wait for the backward pass, by a part of its name.
      trips: mean trip counts of `while` loops by the name of their scope.
      results: label of the arrays that the program returns.
      copies: whether loops read copies of parameters, as on a CPU.
      on_gpu: whether XLA does what was seen for GPUs. It computes equal operations once. It computes arrays that are
        spread from small ones again in each turn of a loop. It copies operands whose rows or columns are apart.
    """
    run = _Walk(labels, trips, copies, on_gpu)
    inputs = [_outside(variable, label) for variable, label in zip(jaxpr.invars, arguments, strict=True)]
    found = run.run(jaxpr, inputs, "")
    run.step += 1
    for value in found:
        run.read(value, True)  # what updates the parameters computes it
        for root in {source.root for source in _sources([value])}:
            root.array = root.array._replace(label=results)
    return Trace(run.peak(), run.wait(), run.runs)
