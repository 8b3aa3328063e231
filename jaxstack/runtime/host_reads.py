"""Refuses reads of a device's arrays by the host in the middle of a step.

`jax.transfer_guard_device_to_host` does nothing on a CPU, whose devices have the host's memory. So the functions that
read an array are replaced, on every platform: `jax.Array`'s own, and `numpy.asarray` and `numpy.array`, which read an
array on a CPU without asking JAX. Other functions of NumPy are seen only on accelerators, and for arrays of several
devices.

Within a compiled step, `jax.pure_callback` and `io_callback` send values to the host. They are refused when the step is
traced. `jax.debug.print` and `jax.debug.callback` are allowed: they are there to look at values.
"""

import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack.common.errors import ConfigError
from jaxstack.common.files import short_path
from jaxstack.common.jax_private import private_module

_JAX = str(Path(jax.__file__).parent)
_COMPILES = tuple(f"{_JAX}/_src/{name}" for name in ("interpreters/", "pjit.py", "compiler.py", "dispatch.py"))
"""Files of JAX that read arrays to make them constants of a program, or to place them elsewhere."""
_LIBRARIES = (_JAX, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
_PACKAGE = str(Path(__file__).parents[1])


class HostReads:
    """Raises an error when the main thread reads an array between `forbid` and `allow`; other threads may read.

    Leaving the context allows reads. Values that are known while JAX traces may be read. Programs
    with callbacks are refused in the whole context.
    """

    def __init__(self, active: bool) -> None:
        """Prepares to watch; without `active`, nothing happens."""
        self._active = active
        self._callbacks: tuple[Any, ...] = ()
        if active:
            callback = private_module("callback")
            self._callbacks = (callback.pure_callback_p, callback.io_callback_p)
        self._before: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> "HostReads":
        for operation in self._callbacks:
            operation.bind = _refuse(operation.name)
        return self

    def __exit__(self, *_: object) -> None:
        self.allow()
        for operation in self._callbacks:
            del operation.bind

    def forbid(self) -> None:
        """Refuses reads from here on."""
        if not self._active or self._before:
            return
        kind: Any = type(jnp.zeros(()))
        value = kind._value.fget
        self._replace(kind, "_value", property(lambda array: _checked(array, value)(array)))
        for name in ("asarray", "array"):
            read = getattr(np, name)
            self._replace(np, name, _numpy(read))

    def allow(self) -> None:
        """Allows reads again."""
        while self._before:
            setattr(*self._before.pop())

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        self._before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)


def _refuse(name: str) -> Callable[..., Any]:
    def bind(*_: Any, **__: Any) -> Any:
        frame = _reader(compiling=True)
        raise ConfigError(
            f"{_where(frame)} calls {name}, which sends values to the host in the middle of a step.",
            "Compute it in JAX, look at it with jax.debug.print, or use train.debug=false.",
        )

    return bind


def _where(frame: FrameType | None) -> str:
    if frame is None:
        return "the step"
    return f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def _numpy(read: Callable[..., Any]) -> Callable[..., Any]:
    def checked(value: Any = (), *arguments: Any, **named: Any) -> Any:
        if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
            return _checked(value, read)(value, *arguments, **named)
        return read(value, *arguments, **named)

    return checked


def _checked(array: jax.Array, read: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `read`.

    Raises:
      ConfigError: the main thread reads the array for the code of a user.
    """
    place = _reader() if threading.current_thread() is threading.main_thread() else None
    if place is not None:
        kind = f"{array.dtype}[{','.join(map(str, array.shape))}]"
        raise ConfigError(
            f"{_where(place)} reads an array of the devices, {kind}, in the middle of a step. The host waits for it.",
            "Read it where the step is logged, after `run.log_step`, or use train.debug=false.",
        )
    return read


def _reader(compiling: bool = False) -> FrameType | None:
    """Returns the innermost frame of neither JAX nor a library.

    Unless `compiling`, it returns None if JAX compiles or traces, or places an array.
    """
    frame: FrameType | None = sys._getframe(2)
    found: FrameType | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_COMPILES) and not compiling:
            return None
        own = file.startswith(_PACKAGE) or not file.startswith(_LIBRARIES)
        if found is None and own and file != __file__:
            found = frame
        frame = frame.f_back
    return found
