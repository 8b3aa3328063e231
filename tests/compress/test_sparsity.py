"""Magnitude, Wanda and SparseGPT of one matrix equal independent NumPy programs in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.compress.sparsity import Pattern, magnitude, parse_pattern, sparsegpt, wanda
from jaxstack.config import ConfigError

PATTERNS = {"third": Pattern(0.35), "2:4": Pattern(0.5, 4), "1:5": Pattern(0.8, 5)}


def problem(rng: np.random.Generator, outputs: int = 6, inputs: int = 160) -> tuple[np.ndarray, np.ndarray]:
    """A matrix of more inputs than one block of SparseGPT, and the gram matrix of correlated inputs."""
    x = rng.normal(size=(300, inputs)) @ (np.eye(inputs) + rng.normal(size=(inputs, inputs)) / inputs**0.5)
    x[:, 3], x[:, 7] = 0, 10 * x[:, 7]
    return rng.normal(size=(outputs, inputs)), x.T @ x


def lowest(scores: np.ndarray, count: int) -> np.ndarray:
    """Whether each score is one of the `count` lowest of all."""
    chosen = np.zeros(scores.size, bool)
    chosen[np.argsort(scores.reshape(-1), kind="stable")[:count]] = True
    return chosen.reshape(scores.shape)


def by_hand(w: np.ndarray, scores: np.ndarray, pattern: Pattern, each_output: bool) -> np.ndarray:
    """The matrix with the lowest scores at zero, in parts: groups, outputs, or the whole matrix."""
    made = w.copy()
    if pattern.group is not None:
        starts = range(0, w.shape[1], pattern.group)
        parts = [(row, slice(i, i + pattern.group)) for row in range(len(w)) for i in starts]
    else:
        parts = [(row, slice(None)) for row in range(len(w))] if each_output else [(slice(None), slice(None))]
    for part in parts:
        made[part] = np.where(lowest(scores[part], round(pattern.fraction * scores[part].size)), 0, w[part])
    return made


def sparsegpt_by_hand(w: np.ndarray, gram: np.ndarray, pattern: Pattern) -> np.ndarray:
    """Optimal brain surgery with an explicit inverse for the inputs that are left."""
    w, inputs = w.copy(), w.shape[1]
    gram = gram + 0.01 * np.mean(np.diag(gram)) * np.eye(inputs)
    inverses = [np.linalg.inv(gram[i:, i:]) for i in range(inputs)]
    costs = np.array([inverse[0, 0] for inverse in inverses])
    zero = np.zeros(w.shape, bool)
    for i, inverse in enumerate(inverses):
        size = pattern.group or 128
        if i % size == 0:
            for rows in [slice(None)] if pattern.group is None else [slice(row, row + 1) for row in range(len(w))]:
                scores = w[rows, i : i + size] ** 2 / costs[i : i + size]
                zero[rows, i : i + size] = lowest(scores, round(pattern.fraction * scores.size))
        error = np.where(zero[:, i], w[:, i], 0)
        w[:, i:] -= np.outer(error, inverse[0] / inverse[0, 0])
        w[zero[:, i], i] = 0
    return w


@pytest.mark.parametrize("name", ["third", "2:4", pytest.param("1:5", marks=pytest.mark.matrix)])
def test_every_method_equals_a_program_in_float64(name: str, rng: np.random.Generator) -> None:
    pattern, (w, gram) = PATTERNS[name], problem(rng)
    expected = {
        "magnitude": by_hand(w, np.abs(w), pattern, False),
        "wanda": by_hand(w, np.abs(w) * np.sqrt(np.diag(gram)), pattern, True),
        "sparsegpt": sparsegpt_by_hand(w, gram, pattern),
    }
    with jax.enable_x64(True):
        w64, gram64 = jnp.asarray(w), jnp.asarray(gram)
        found = {
            "magnitude": magnitude(w64, pattern),
            "wanda": wanda(w64, gram64, pattern),
            "sparsegpt": sparsegpt(w64, gram64, pattern),
        }
    errors = {}
    for method, want in expected.items():
        got = np.asarray(found[method])
        np.testing.assert_array_equal(got == 0, want == 0)
        np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-10)  # float64, inverses of condition 1e4
        assert (got == 0).mean() == pytest.approx(pattern.fraction, abs=0.01)
        errors[method] = (((got - w) @ gram) * (got - w)).sum()
    assert errors["sparsegpt"] < 0.8 * errors["wanda"] < 0.8 * errors["magnitude"]
    if name != "2:4":
        return
    # Float32 chooses the same weights, but for a few near ties.
    single = np.asarray(sparsegpt(jnp.asarray(w, jnp.float32), jnp.asarray(gram, jnp.float32), pattern))
    assert ((single == 0) == (expected["sparsegpt"] == 0)).mean() > 0.98


def test_patterns() -> None:
    assert parse_pattern("0.5") == Pattern(0.5)
    assert str(parse_pattern("2:4")) == "2:4"
    assert parse_pattern("1:4").zeros(4) == 3
    for text in ("1", "0", "0.0", "1.5", "4:4", "0:4", "half", "2:", "-0.5", "2:1"):
        with pytest.raises(ConfigError, match=f"--sparsity={text} is neither"):
            parse_pattern(text)
