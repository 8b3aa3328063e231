"""Named values: what a layer computes besides the residual stream, such as keys for a cache or the load of experts.

A function within a layer gives a value to `Context.keep` or `Context.observe`. What runs the layer collects the values,
and returns them from the loop over layers (`Context.collecting`). A value that nobody collects is not computed.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import jax

from jaxstack.common.tree import PyTree

Aux: TypeAlias = dict[str, PyTree]
"""The named values of a layer, or of several layers [L, ...]."""

OBSERVED = "observed/"
"""Begins the names of values that only an observer reads, see `Context.observe`."""


class Mean(NamedTuple):
    """A mean over tokens, for `Context.observe`: its sum and number over the tokens of this device."""

    total: jax.Array
    tokens: jax.Array


def within(group: str, values: Mapping[str, PyTree]) -> Aux:
    """Returns named values in which the names of observed values begin with a group, such as the stack's name."""
    return {
        f"{OBSERVED}{group}/{name.removeprefix(OBSERVED)}" if name.startswith(OBSERVED) else name: value
        for name, value in values.items()
    }


def observed(values: Mapping[str, PyTree]) -> Aux:
    """Returns the observed values by their names without the prefix."""
    return {name.removeprefix(OBSERVED): value for name, value in values.items() if name.startswith(OBSERVED)}
