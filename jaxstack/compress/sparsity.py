"""Chooses which weights of a matrix [outputs, inputs] become zero: by size, by Wanda, or by SparseGPT.

A pattern is a fraction of all weights, or N:M: of M neighbouring inputs of each output, M - N become zero, which GPUs
compute faster for 2:4. All three methods remove equally many weights from every matrix.

Suffixes: O outputs, I inputs.
"""

import re
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxstack.compress.gptq import DAMP, inverse_factor
from jaxstack.config import ConfigError

Method: TypeAlias = Literal["sparsegpt", "wanda", "magnitude"]

_BLOCK = 128  # inputs whose zeros SparseGPT chooses at once


class Pattern(NamedTuple):
    """Which share of the weights becomes zero.

    Attributes:
      fraction: fraction of the weights.
      group: neighbouring inputs in which this share becomes zero. `None` means the zeros are anywhere.
    """

    fraction: float
    group: int | None = None

    def __str__(self) -> str:
        if self.group is None:
            return f"{self.fraction:g}"
        return f"{self.group - self.zeros(self.group)}:{self.group}"

    def zeros(self, weights: int) -> int:
        """Returns how many of this many weights become zero."""
        return round(self.fraction * weights)


def parse_pattern(text: str) -> Pattern:
    """Returns the pattern `0.5` or `2:4`.

    Raises:
      ConfigError: the text is neither.
    """
    if found := re.fullmatch(r"(\d{1,3}):(\d{1,3})", text):
        kept = int(found[1])
        group = int(found[2])
        if 0 < kept < group:
            return Pattern(1 - kept / group, group)
    elif re.fullmatch(r"0?\.\d+", text) and float(text) > 0:
        return Pattern(float(text))
    raise ConfigError(
        f"--sparsity={text} is neither a fraction nor N:M. Use a number between 0 and 1, such as 0.5, or 2:4 to keep "
        f"2 of 4 neighbouring weights."
    )


def smallest(scores: jax.Array, zeros: int) -> jax.Array:
    """Returns whether each score is among the `zeros` smallest of its row; of equal ones the first."""
    order = jnp.argsort(scores, axis=-1, stable=True)
    return jnp.argsort(order, axis=-1, stable=True) < zeros


def _removed(scores: jax.Array, pattern: Pattern, rows: int) -> jax.Array:
    """Returns which weights [O, I] become zero: the smallest scores of each group, or of each of the given `rows`."""
    rows = rows if pattern.group is None else scores.size // pattern.group
    table = scores.reshape(rows, -1)
    return smallest(table, pattern.zeros(table.shape[1])).reshape(scores.shape)


@partial(jax.jit, static_argnames="pattern")
def magnitude(w: jax.Array, pattern: Pattern) -> jax.Array:
    """Returns a matrix [O, I] whose smallest weights are zero."""
    return jnp.where(_removed(jnp.abs(w), pattern, 1), 0, w)


@partial(jax.jit, static_argnames="pattern")
def wanda(w: jax.Array, gram: jax.Array, pattern: Pattern) -> jax.Array:
    """Returns a matrix whose weights with the least |w| times norm of the input are zero, equally many of each output.

    See Sun et al. 2023, arXiv:2306.11695.

    Args:
      w: [O, I].
      gram: sum over tokens of x x^T [I, I].
    """
    return jnp.where(_removed(jnp.abs(w) * jnp.sqrt(jnp.diag(gram)), pattern, len(w)), 0, w)


@partial(jax.jit, static_argnames=("pattern", "damp"))
def sparsegpt(w: jax.Array, gram: jax.Array, pattern: Pattern, damp: float = DAMP) -> jax.Array:
    """Returns a matrix with zeros, whose other weights make up for them as well as they can.

    See Frantar and Alistarh 2023, arXiv:2301.00774. Inputs are done one after the other, as in `gptq`. If a weight
    becomes zero and all later ones change in the best way, the squared error is w^2 / U[i, i]^2. Where this is smallest
    among the weights of 128 inputs and all outputs, or of a group, they become zero.

    Args:
      w: [O, I].
      gram: sum over tokens of x x^T [I, I]. Inputs that are always zero are allowed.
      damp: see `gptq.DAMP`.

    Returns:
      The matrix. It is NaN if the factors of the gram matrix cannot be computed: use a larger `damp`.
    """
    inputs = w.shape[1]
    group = pattern.group or 1
    block = _BLOCK // group * group or group
    factor = inverse_factor(gram, damp)

    def run_block(start: jax.Array | int, left: jax.Array, size: int) -> jax.Array:
        rows = jax.lax.dynamic_slice_in_dim(factor, start, size, 0)
        own = jax.lax.dynamic_slice_in_dim(rows, start, size, 1)
        columns = jax.lax.dynamic_slice_in_dim(left, start, size, 1)
        values, errors = _remove_in_block(columns, own, pattern)
        left = left - errors @ rows  # the columns of this block are overwritten, those before it have rows of zeros
        return jax.lax.dynamic_update_slice_in_dim(left, values, start, 1)

    whole = inputs // block
    if whole:
        w = jax.lax.fori_loop(0, whole, lambda i, left: run_block(i * block, left, block), w)
    return w if inputs == whole * block else run_block(whole * block, w, inputs - whole * block)


def _remove_in_block(w: jax.Array, own: jax.Array, pattern: Pattern) -> tuple[jax.Array, jax.Array]:
    """Returns the weights of a block of inputs with zeros, and the errors that later inputs make up for [O, B].

    Args:
      w: [O, B].
      own: their part of the factor [B, B].
    """
    diagonal = jnp.diag(own)
    group = pattern.group

    def remove(carry: tuple[jax.Array, jax.Array], i: jax.Array) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        left, zero = carry
        if group is not None:  # chosen at the first input of a group
            first = i // group * group
            scores = jax.lax.dynamic_slice_in_dim((left / diagonal) ** 2, first, group, 1)
            own_zero = _removed(scores, pattern, 1)
            zero = jnp.where(i == first, jax.lax.dynamic_update_slice_in_dim(zero, own_zero, first, 1), zero)
        value = jnp.where(zero[:, i], 0, left[:, i])
        error = (left[:, i] - value) / diagonal[i]
        return (left - error[:, None] * own[i], zero), (value, error)

    zero = jnp.zeros(w.shape, bool) if group else _removed((w / diagonal) ** 2, pattern, 1)
    _, (values, errors) = jax.lax.scan(remove, (w, zero), jnp.arange(w.shape[1]))
    return values.T, errors.T
