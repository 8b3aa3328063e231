"""Reads places in the code from equations, within rules for gradients (`jax.custom_vjp` and `custom_jvp`) too.

While JAX differentiates, it gives a new equation the place of the equation that it is derived from. So all equations of
a rule get the line that calls the function with the rule. While `own_lines` is active, they keep their own lines, and
the lines of the call follow.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeAlias

import jax
from jax.extend import source_info_util

from jaxstack.common.jax_private import private_module

Frame: TypeAlias = tuple[str, int, str]
"""A place in the code: file, line, function."""

_RULES = {jax.custom_vjp: ("fwd", "bwd"), jax.custom_jvp: ("jvp",)}
_calls: list[tuple[Frame, ...]] = []
"""Where rules were called, by the number in the name of their scope."""


def frames_of(equation: Any) -> tuple[Frame, ...]:
    """Returns the places in the code where an equation was traced, innermost first, without JAX's own files."""
    frames, in_rule = _frames(equation.source_info.traceback)
    rule = re.findall(r"rule_(\d+)", str(equation.source_info.name_stack))
    return (*frames, *_calls[int(rule[-1])]) if in_rule and rule else frames


def _frames(traceback: Any) -> tuple[tuple[Frame, ...], bool]:
    """Returns the frames of a traceback without JAX's files, up to the call of a rule, and whether there is one."""
    for i, frame in enumerate(traceback.frames if traceback is not None else ()):
        if frame.file_name == __file__ and frame.function_name == _apply.__name__:
            return _own(traceback, i), True
    return _own(traceback), False


def _own(traceback: Any, count: int | None = None) -> tuple[Frame, ...]:
    """Returns the first `count` frames of a traceback, without the files of JAX and this file."""
    others = (str(jax.__path__[0]), "<frozen", __file__)
    frames = traceback.frames[:count] if traceback is not None else ()
    return tuple((f.file_name, f.line_num, f.function_name) for f in frames if not f.file_name.startswith(others))


def _apply(rule: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Calls a rule such that its equations have their own places."""
    _calls.append(_own(source_info_util.current().traceback))
    names = source_info_util.current_name_stack().extend(f"rule_{len(_calls) - 1}")
    context = private_module("source_info_util")._source_info_context
    before = context.context
    context.context = source_info_util.new_source_info().replace(name_stack=names)
    try:
        return rule(*arguments, **named)
    finally:
        context.context = before


@contextmanager
def own_lines() -> Iterator[None]:
    """Lets the equations of rules keep their own lines in what is traced within."""
    before = {kind: kind.__call__ for kind in _RULES}

    def patched(kind: Any) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            rules = {name: getattr(self, name) for name in _RULES[kind]}
            try:
                for name, rule in rules.items():
                    if rule is not None:
                        setattr(self, name, wraps(rule)(lambda *a, rule=rule, **k: _apply(rule, *a, **k)))
                return before[kind](self, *arguments, **named)
            finally:
                for name, rule in rules.items():
                    setattr(self, name, rule)

        return call

    try:
        for kind in _RULES:
            kind.__call__ = patched(kind)  # type: ignore[method-assign]
        yield
    finally:
        for kind, call in before.items():
            kind.__call__ = call  # type: ignore[method-assign]
