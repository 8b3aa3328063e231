"""Rewards: plain Python functions of a prompt, a completion and the fields of a row, as `rl.rewards` names them.

    def short(completion: str, limit: int) -> float:
        return float(len(completion) <= limit)

A function takes what its arguments name: `prompt`, `completion`, and keys of the row in the file. With `**fields` it
takes all of them.
"""

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from jaxstack.config import ConfigError

Function: TypeAlias = Callable[..., Any]
"""A function of a user."""

GIVEN = ("prompt", "completion")
"""Arguments that are not fields of a row."""


@dataclass(frozen=True)
class Reward:
    """A function that rewards completions.

    Attributes:
      name: as `rl.rewards` has it.
      function: returns a number.
      weight: factor of the number.
      arguments: names of the arguments that it takes. `None` means all fields.
      required: names of the arguments without a default.
    """

    name: str
    function: Callable[..., float]
    weight: float = 1.0
    arguments: frozenset[str] | None = None
    required: frozenset[str] = frozenset()

    @classmethod
    def of(cls, name: str, function: Callable[..., float], weight: float = 1.0) -> "Reward":
        """Returns a reward whose arguments are read from the function's signature.

        Raises:
          ConfigError: it is not a function with named arguments.
        """
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            raise ConfigError(f"rl.rewards={name} is not a function. Name one that returns a number.") from None
        if any(one.kind is one.POSITIONAL_ONLY or one.kind is one.VAR_POSITIONAL for one in parameters):
            raise ConfigError(
                f"rl.rewards={name} has arguments without names. Give them names: prompt, completion or keys of the "
                f"rows."
            )
        named = [one for one in parameters if one.kind is not one.VAR_KEYWORD]
        required = frozenset(one.name for one in named if one.default is one.empty)
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        return cls(name, function, weight, None if takes_all else frozenset(one.name for one in named), required)

    def check(self, row: str, fields: Mapping[str, object]) -> None:
        """Makes sure that a row has the fields that the function needs.

        Raises:
          ConfigError: it has not.
        """
        if missing := sorted(self.required - fields.keys() - {*GIVEN}):
            raise ConfigError(
                f"rl.rewards={self.name} needs {missing[0]}, which {row} does not have. Its keys are "
                f"{', '.join(sorted(fields)) or 'prompt alone'}."
            )

    def __call__(self, row: str, prompt: str, completion: str, fields: Mapping[str, object]) -> float:
        """Returns the reward of a completion, without its weight.

        Args:
          row: name of the row for errors, such as its file and line.

        Raises:
          ConfigError: the function raises an exception, or does not return a finite number.
        """
        values = {**fields, "prompt": prompt, "completion": completion}
        if self.arguments is not None:
            values = {name: value for name, value in values.items() if name in self.arguments}
        where = f"for {row} and the completion {_short(completion)}"
        try:
            value = self.function(**values)
        except Exception as error:
            said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise ConfigError(
                f"rl.rewards={self.name} raised {_one_line(said)} {where}. Return a number for every text."
            ) from error
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if isinstance(value, str | bytes) or not math.isfinite(number):
            raise ConfigError(
                f"rl.rewards={self.name} returned {_short(value)} {where}. Return a finite number for every text."
            )
        return number


def load(names: Sequence[str], weights: Sequence[float]) -> list[Reward]:
    """Returns the functions that `rl.rewards` names.

    Raises:
      ConfigError: a function does not exist, or its module cannot be imported.
    """
    factors = weights or [1.0] * len(names)
    return [
        Reward.of(name, find_function("rl.rewards", name), factor) for name, factor in zip(names, factors, strict=True)
    ]


def total(rewards: Sequence[Reward], row: str, prompt: str, completion: str, fields: Mapping[str, object]) -> float:
    """Returns the weighted sum of all rewards of a completion; see `Reward`."""
    return sum(one.weight * one(row, prompt, completion, fields) for one in rewards)


def find_function(key: str, name: str) -> Function:
    """Returns the function that a key of the configuration names, as `module:function` or `file.py:function`.

    Raises:
      ConfigError: the function does not exist, or its module cannot be imported.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute.isidentifier():
        raise ConfigError(f"{key}={name} is not the name of a function. Write module:function.")
    try:
        module = _import_file(key, Path(place)) if place.endswith(".py") else _import(place)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{key}={name}: {place} cannot be imported ({type(error).__name__}: {_one_line(str(error))}). Run in "
            f"the folder that has it, or name a file such as rewards.py:function."
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        names = [own for own, value in vars(module).items() if inspect.isfunction(value) and not own.startswith("_")]
        raise ConfigError(
            f"{key}={name}: {place} has no function {attribute}. It has {', '.join(sorted(names)) or 'none'}."
        )
    return function


def _import(name: str) -> ModuleType:
    """Imports a module, also from the working directory."""
    sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop()


def _import_file(key: str, path: Path) -> ModuleType:
    """Imports a file of Python."""
    if not path.is_file():
        raise ConfigError(f"{key} names {path}, which is not a file. Check the path.")
    spec = importlib.util.spec_from_file_location(f"rewards_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
