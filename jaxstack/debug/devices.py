"""Runs programs on whole arrays, or as the work of every device of a mesh at once.

Inside of `jax.shard_map` a variable has a value on each device. Here they are the entries of one array with another
leading dimension, which is split over the mesh axes along which the variable's type says that it varies. A value that
is equal along an axis has one entry for it. So a program runs with the types with which it was traced, with its
collectives, and on the devices of the mesh.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Values: TypeAlias = list[Any]
Function: TypeAlias = Callable[..., Values]


@dataclass(frozen=True, eq=False)
class Devices:
    """Where the equations of a level run. The default is outside of `jax.shard_map`, where arrays are whole.

    Attributes:
      mesh: the mesh of a `shard_map`.
      axes: its axes of which each device sees a part of the arrays, in the order of the mesh.
      typed: whether types say along which axes a value varies. Otherwise all may vary along all.
      active: the devices whose values count, as an array over these axes; `None` means all. The others compute along
        with them in a loop or a branch that they do not run.
    """

    mesh: Mesh | None = None
    axes: tuple[str, ...] = ()
    typed: bool = True
    active: np.ndarray | None = None

    @classmethod
    def of(cls, equation: Any) -> "Devices":
        """Returns the devices of a `shard_map`."""
        p = equation.params
        manual = p.get("newly_manual_axes", p.get("manual_axes"))
        return cls(p["mesh"], tuple(axis for axis in p["mesh"].axis_names if axis in manual), p["check_vma"])

    @property
    def shape(self) -> tuple[int, ...]:
        """Numbers of devices along the axes."""
        return self._sizes(self.axes)

    def _sizes(self, axes: Sequence[str]) -> tuple[int, ...]:
        return tuple(self.mesh.shape[axis] for axis in axes) if self.mesh is not None else ()

    def split(self, variable: Any) -> tuple[str, ...]:
        """Returns the axes along which a variable's value has entries."""
        if self.mesh is None or not self.typed:
            return self.axes
        return tuple(axis for axis in self.axes if axis in variable.aval.mat.varying)

    def specs(self, variables: Sequence[Any]) -> list[PartitionSpec]:
        """Returns how the entries of variables are sharded."""
        return [PartitionSpec(self.split(v) or None) for v in variables]

    def compile(self, f: Function, in_specs: Sequence[PartitionSpec], out_specs: Sequence[PartitionSpec]) -> Function:
        """Returns `f`, which maps values of variables to values of other variables, for all devices at once."""
        if self.mesh is None:
            return jax.jit(f)
        return self._map(lambda *values: [y[None] for y in f(*(x[0] for x in values))], in_specs, out_specs)

    def enter(self, equation: Any, inputs: Values) -> Values:
        """Returns the values that a `shard_map` gives to its program, from whole arrays."""
        p = equation.params
        divide = self._map(lambda *values: [x[None] for x in values], p["in_specs"], self.specs(p["jaxpr"].invars))
        return divide(*inputs)

    def _map(self, f: Function, in_specs: Sequence[PartitionSpec], out_specs: Sequence[PartitionSpec]) -> Function:
        specs = {"in_specs": tuple(in_specs), "out_specs": [*out_specs]}
        return jax.jit(jax.shard_map(f, mesh=self.mesh, axis_names={*self.axes}, check_vma=self.typed, **specs))

    def constant(self, value: Any) -> Any:
        """Returns a constant of a program, which is equal on all devices, as a value."""
        if self.mesh is None:
            return value
        entries = 1 if self.typed else self.mesh.size
        value = jnp.broadcast_to(value, (entries, *np.shape(value)))
        return jax.device_put(value, NamedSharding(self.mesh, PartitionSpec()))

    def counted(self, variable: Any) -> np.ndarray:
        """Returns which entries of a variable's value are on devices that count."""
        if self.mesh is None:
            return np.ones(1, bool)
        active = np.ones(self.shape, bool) if self.active is None else self.active
        return active.any(tuple(i for i, axis in enumerate(self.axes) if axis not in self.split(variable))).ravel()

    def spread(self, variable: Any, entries: np.ndarray) -> np.ndarray:
        """Returns the entries of a variable's value as an array over all devices."""
        split = self.split(variable)
        sizes = [n if axis in split else 1 for axis, n in zip(self.axes, self.shape, strict=True)]
        return np.broadcast_to(np.asarray(entries).reshape(sizes), self.shape)

    def only(self, chosen: np.ndarray) -> "Devices":
        """Returns these devices, of which only some of those that count are left."""
        return replace(self, active=chosen if self.active is None else self.active & chosen)

    def choose(self, chosen: np.ndarray, variable: Any, new: Any, old: Any) -> Any:
        """Returns `new` on the chosen devices, and `old` on the others: values of a variable."""
        if chosen.all() or self.mesh is None:
            return new
        entries = replace(self, active=chosen).counted(variable)
        return jnp.where(entries.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    def at(self, variable: Any, value: Any, device: tuple[int, ...]) -> Any:
        """Returns the value of a variable on the device with these coordinates, or the whole array."""
        if self.mesh is None:
            return value
        index = self.spread(variable, np.arange(len(value)))[device]
        return jnp.asarray(np.asarray(value[int(index)]))


def alone(equation: Any, inputs: Values) -> tuple[Function, list[Any], Values]:
    """Returns an equation as a function, its variables without constants, and their values among the inputs."""
    values = {v: value for v, value in zip(equation.invars, inputs, strict=True) if not isinstance(v, core.Literal)}
    program = core.Jaxpr((), [*values], equation.outvars, [equation], equation.effects)
    return core.jaxpr_as_fun(core.ClosedJaxpr(program, ())), [*values], [*values.values()]


def communicates(equation: Any) -> bool:
    """Returns whether an equation, or a program within it, needs other devices, or the place of its own."""
    return any(type(effect).__name__ == "NamedAxisEffect" for effect in equation.effects)
