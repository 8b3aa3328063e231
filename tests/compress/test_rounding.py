"""Rounding, GPTQ and AWQ of one matrix equal independent NumPy programs in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.compress.awq import awq_scales
from jaxstack.compress.gptq import gptq
from jaxstack.hf.compressed import Scheme
from jaxstack.kernels.rounding import NF4, output_error, round_to_nearest

SCHEMES = {
    "int4 groups": Scheme(bits=4, group=8),
    "int8 rows": Scheme(bits=8, group=None),
    "fp8 rows": Scheme(bits=8, group=None, kind="float"),
    "nf4 groups": Scheme(bits=4, group=64, kind="normal"),
}

# Written again, to 7 digits, from the table of appendix E of QLoRA (arXiv:2305.14314).
NUMBERS = np.float32([
    -1, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500,
    0, 0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1,
])  # fmt: skip


def problem(seed: int, name: str = "", outputs: int = 24, tokens: int = 96) -> tuple[Any, Any]:
    """For a scheme, a matrix, and correlated inputs: one is always zero, one is ten times as large as the others."""
    rng, inputs = np.random.default_rng(seed), 128 if name.startswith("nf4") else 40
    x = rng.normal(size=(tokens, inputs)) @ (np.eye(inputs) + 0.5 * rng.normal(size=(inputs, inputs)) / inputs**0.5)
    x[:, 3], x[:, 7] = 0, 10 * x[:, 7]
    return rng.normal(size=(outputs, inputs)), x


def nearest(x: np.ndarray, scheme: Scheme) -> np.ndarray:
    """The number of the format next to x; of two equally near ones, that with an even last bit."""
    if scheme.kind == "float":
        return np.clip(x, -448, 448).astype(jnp.float8_e4m3fn).astype(np.float64)
    if scheme.kind == "normal":
        return np.asarray(NF4)[np.abs(x[..., None] - np.asarray(NF4)).argmin(-1)]
    return np.clip(np.rint(x), -(2 ** (scheme.bits - 1)), 2 ** (scheme.bits - 1) - 1)


def steps(w: np.ndarray, scheme: Scheme, importance: np.ndarray | None = None) -> np.ndarray:
    """The scale of each input; with an importance, the one of eight sizes with the least error in each group."""
    plain = largest_to_the_end(w, scheme)
    if importance is None:
        return plain
    size, best = scheme.group or w.shape[1], plain.copy()
    for row in range(len(w)):
        for i in range(0, w.shape[1], size):
            own, errors = slice(i, i + size), []
            for factor in (1, 0.96, 0.92, 0.88, 0.84, 0.8, 0.75, 0.7):
                step = np.float64(np.float32(plain[row, i] * factor))
                off = nearest(w[row, own] / step, scheme) * step - w[row, own]
                errors.append(((off**2 * importance[own]).sum(), step))
            best[row, own] = min(errors, key=lambda pair: pair[0])[1]
    return best


def largest_to_the_end(w: np.ndarray, scheme: Scheme) -> np.ndarray:
    """The scale of each input with which no number is clipped."""
    size, found = scheme.group or w.shape[1], []
    for i in range(0, w.shape[1], size):
        part = w[:, i : i + size]
        largest = np.take_along_axis(part, np.abs(part).argmax(1)[:, None], 1)
        ends = {"int": 127, "float": 448, "normal": 1}
        signed = scheme.kind == "int" and scheme.bits == 4
        found.append(-largest / 8 if signed else np.abs(largest) / ends[scheme.kind])
    return np.repeat(np.concatenate(found, 1), size, axis=1)


def by_hand(w: np.ndarray, gram: np.ndarray, scheme: Scheme, damp: float) -> np.ndarray:
    """Optimal brain quantisation with an explicit inverse for the inputs that are left; returns the codes."""
    step, w, codes = steps(w, scheme, np.diag(gram)), w.copy(), np.zeros(w.shape)
    gram = gram + damp * np.mean(np.diag(gram)) * np.eye(len(gram))
    left = list(np.argsort(-np.diag(gram), kind="stable"))
    while left:
        inverse = np.linalg.inv(gram[np.ix_(left, left)])
        first, rest = left[0], left[1:]
        codes[:, first] = nearest(w[:, first] / step[:, first], scheme)
        error = w[:, first] - codes[:, first] * step[:, first]
        w[:, rest] -= np.outer(error, inverse[0, 1:] / inverse[0, 0])
        left = rest
    return codes


@pytest.mark.parametrize("name", SCHEMES)
def test_rounding_takes_the_nearest_number_of_the_format(name: str) -> None:
    scheme, (w, _) = SCHEMES[name], problem(0, name)
    w[2] = 0
    made = round_to_nearest(jnp.asarray(w, jnp.float32), scheme)
    step = np.where(steps(w, scheme) == 0, 1, steps(w, scheme))
    grid = np.arange(-(2.0 ** (scheme.bits - 1)), 2 ** (scheme.bits - 1))
    if scheme.kind == "float":
        grid = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float64)
        grid = np.unique(grid[np.isfinite(grid)])
    if scheme.kind == "normal":
        np.testing.assert_allclose(NF4, NUMBERS, atol=6e-8)  # the last digit of the table
        grid = np.float32(NF4)
    best = np.abs(w[..., None] / step[..., None] - grid).min(-1)
    np.testing.assert_allclose(np.abs(w / step - np.asarray(made.codes)), best, atol=1e-4 * grid.max())
    assert np.isin(np.asarray(made.codes), grid).all()
    assert not np.asarray(made.values)[2].any()


def test_a_signed_scale_makes_a_fifth_less_error_than_two_equal_ends() -> None:
    """On normal weights in groups of 64, as `find_scales` says."""
    w = np.random.default_rng(0).normal(size=(4000, 64))
    made = round_to_nearest(jnp.asarray(w, jnp.float32), Scheme(bits=4, group=64))
    step = np.abs(w).max(1, keepdims=True) / 7
    ratio = ((np.asarray(made.values) - w) ** 2).mean() / ((np.rint(w / step) * step - w) ** 2).mean()
    assert 0.76 < ratio < 0.80


def test_training_in_int8_finds_the_same_codes() -> None:
    from jaxstack.kernels.quantized_matmul import quantize

    made = round_to_nearest(jnp.asarray(problem(1)[0], jnp.float32), SCHEMES["int8 rows"])
    codes, _ = quantize(made.values, (1,), jnp.dtype(jnp.int8))
    assert (np.asarray(codes) == np.asarray(made.codes)).all()


@pytest.mark.parametrize("name", SCHEMES)
def test_gptq_equals_an_explicit_inverse(name: str) -> None:
    """All codes are equal in float64. In float32 a few fall on the other side of a tie, so the error is compared."""
    scheme, (w, x) = SCHEMES[name], problem(2, name)
    gram = x.T @ x
    expected = by_hand(w, gram, scheme, 0.01)
    with jax.enable_x64(True):
        made = gptq(jnp.asarray(w), jnp.asarray(gram), scheme)
        assert made.codes.dtype == jnp.float64
        np.testing.assert_array_equal(np.asarray(made.codes), expected)
    w32, gram32 = jnp.asarray(w, jnp.float32), jnp.asarray(gram, jnp.float32)
    single = gptq(w32, gram32, scheme)
    assert (np.asarray(single.codes) == expected).mean() > 0.99
    found, wanted = (
        output_error(w32, single.values, gram32),
        output_error(w, expected * steps(w, scheme, np.diag(gram)), gram),
    )
    np.testing.assert_allclose(found, wanted, rtol=0.02)
    assert found < 0.7 * output_error(w32, round_to_nearest(w32, scheme).values, gram32)


def test_gptq_without_correlations_takes_the_nearest_codes() -> None:
    """Independent inputs cannot make up for each other; nor can inputs that were never seen."""
    for name, scheme in SCHEMES.items():
        w = problem(3, name)[0]
        inputs = w.shape[1]
        for gram in (np.diag(np.arange(1.0, inputs + 1)), np.zeros((inputs, inputs))):
            step = steps(w, scheme, np.diag(gram))
            found = gptq(jnp.asarray(w, jnp.float32), jnp.asarray(gram, jnp.float32), scheme).codes
            assert (np.asarray(found) == nearest(w / step, scheme)).mean() > 0.998  # float32


@pytest.mark.parametrize("name", SCHEMES)
def test_awq_equals_a_search_over_all_exponents(name: str) -> None:
    scheme, (w, x) = SCHEMES[name], problem(4, name)
    v = problem(5, name)[0]
    size, errors = np.abs(x).mean(0), []
    for i in range(20):
        s = np.maximum(size ** (i / 20), 1e-4)
        s /= np.sqrt(s.max() * s.min())
        error = 0.0
        for one in (w, v):
            step = steps(one * s, scheme)
            error += (((nearest(one * s / step, scheme) * step / s - one) @ x.T) ** 2).sum()
        errors.append((error, s))
    error, expected = min(errors, key=lambda pair: pair[0])
    with jax.enable_x64(True):
        found = awq_scales([jnp.asarray(w), jnp.asarray(v)], jnp.asarray(x.T @ x), jnp.asarray(size), scheme)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-12)
    assert error < 0.98 * errors[0][0]  # the problem is one where it helps
