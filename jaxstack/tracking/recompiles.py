"""Reports functions that are compiled again while a run trains, and the arguments that changed.

JAX tells listeners when it compiles. The call of the function is then on the stack, and its arguments are compared with
those of earlier calls. A step that does not compile costs nothing.
"""

import inspect
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from jaxstack.common.counts import plural
from jaxstack.common.tree import path_of

Signature = dict[str, str]
"""The type of each argument by its path, such as `batch/tokens`."""

_COMPILED = "/jax/core/compile/backend_compile_duration"
_JAX = str(Path(jax.__file__).parent)
_CALL = "cache_miss"
"""The function of `jax._src.pjit` that runs where a call with these arguments was not compiled."""

MOST_REASONS = 4
"""Maximum number of changed arguments that are named."""


class Recompile(NamedTuple):
    """A function that was compiled again.

    Attributes:
      function: name of the function.
      reasons: arguments that changed, such as `batch/tokens: int32[8,128] -> int32[8,256]`.
      seconds: time that compiling took, without tracing.
    """

    function: str
    reasons: list[str]
    seconds: float

    def lines(self) -> list[str]:
        """Returns the lines for the user."""
        first, *more = self.reasons[:MOST_REASONS]
        lines = [f"compiled {self.function} again, in {self.seconds:.1f} s: {first}", *more]
        if (left := len(self.reasons) - MOST_REASONS) > 0:
            lines.append(f"and {plural(left, 'more argument')}")
        return [lines[0], *(f"         {line}" for line in lines[1:])]


class Recompiles:
    """Collects the functions with `jax.jit` that the main thread compiles again within the context.

    The first program of each function is expected, as are programs of JAX's own functions and of other threads.
    """

    def __init__(self) -> None:
        """Prepares to listen."""
        self._known: dict[Callable[..., Any], list[Signature]] = {}
        self._found: list[Recompile] = []
        self._expected = False

    def __enter__(self) -> "Recompiles":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Ignores programs that are compiled inside the context."""
        before = self._expected
        self._expected = True
        try:
            yield
        finally:
            self._expected = before

    def take(self) -> list[Recompile]:
        """Returns the functions that were compiled again since the last call."""
        found = self._found
        self._found = []
        return found

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event != _COMPILED or self._expected or threading.current_thread() is not threading.main_thread():
            return
        if (call := _call()) is None:
            return
        function, arguments = call
        signature = signature_of(function, *arguments)
        known = self._known.setdefault(function, [])
        if known:
            reasons = min((changes(old, signature) for old in known), key=len)
            self._found.append(Recompile(_name(function), reasons, duration_secs))
        known.append(signature)


def _call() -> tuple[Callable[..., Any], tuple[tuple[Any, ...], dict[str, Any]]] | None:
    """Returns the function that is compiled, and its arguments; None for a function of JAX."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != _CALL:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None or not frame.f_code.co_filename.startswith(_JAX):
        return None
    found = frame.f_locals
    function = found.get("fun")
    code = None if function is None else getattr(inspect.unwrap(function), "__code__", None)
    if function is None or code is None or code.co_filename.startswith(_JAX):
        return None
    return function, (found["args"], found["kwargs"])


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def signature_of(function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Signature:
    """Returns the type of each argument of a call."""
    try:
        given = dict(inspect.signature(function).bind(*arguments, **named).arguments)
    except (TypeError, ValueError):  # a function without a signature
        given = {f"argument {i}": value for i, value in enumerate(arguments)} | named
    return {path_of(keys): type_of(leaf) for keys, leaf in jax.tree_util.tree_leaves_with_path(given)}


def type_of(value: Any) -> str:
    """Returns dtype and shape of an array, and where it is stored, as text. Other values are shown as Python shows
    them."""
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        return f"{type(value).__name__} {textwrap.shorten(repr(value), 60)}"
    kind = f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if getattr(value, "weak_type", False):
        kind += " of a Python number"
    if not isinstance(value, jax.Array):
        return f"{kind}, on the host"
    sharding = value.sharding
    if isinstance(sharding, NamedSharding):
        entries = ", ".join(map(repr, sharding.spec))
        sizes = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items() if size > 1)
        return f"{kind}, sharding P({entries}) on {sizes or 'one device'}"
    committed = "" if getattr(value, "committed", True) else ", not placed by the program"
    return f"{kind}, sharding {sharding}{committed}"


def changes(old: Signature, new: Signature) -> list[str]:
    """Returns what differs between the arguments of two calls, a line for each of them."""
    lines = []
    for path in dict.fromkeys([*new, *old]):
        before = old.get(path)
        after = new.get(path)
        if before == after:
            continue
        if before is None or after is None:
            lines.append(f"{path}: {'new, ' + str(after) if before is None else 'no longer given'}")
            continue
        (kind, _, place), (new_kind, _, new_place) = before.partition(", "), after.partition(", ")
        if kind == new_kind:
            lines.append(f"{path}: {place} -> {new_place}")
        elif place == new_place:
            lines.append(f"{path}: {kind} -> {new_kind}")
        else:
            lines.append(f"{path}: {before} -> {after}")
    return lines or ["its arguments are those of an earlier call; JAX's settings, mesh or caches have changed"]
