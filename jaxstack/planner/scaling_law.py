"""The scaling law of loss: how it falls with parameters and tokens, its fit to runs, and the best size for a budget.

The law is L = E + A / N^alpha + B / D^beta, in nats per token, for N parameters and D training tokens (Hoffmann et al.
2022, arXiv:2203.15556, section 3.3). Training takes C = 6 N D FLOPs.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

FLOPS_PER_PARAMETER_AND_TOKEN = 6
"""Two in the forward pass and four in the backward pass (Kaplan et al. 2020, arXiv:2001.08361, section 2.1)."""
HUBER_DELTA = 1e-3
"""Errors of log L above this count linearly, so that runs that went wrong move the fit little (Hoffmann et al.)."""
FEWEST_RUNS = 8
"""The law has five constants; with fewer runs than this, the bootstrap's samples rarely determine them."""
MOST_WITHOUT_OPTIMUM = 0.025
"""Share of the bootstrap's samples that may have no best size, and are left out: an end of the 95% interval has as many
samples beyond it."""


class ScalingLaw(NamedTuple):
    """Constants of the law, as in the module's first lines.

    Attributes:
      irreducible: E, the loss that no model and no amount of data goes below, in nats per token.
      parameters_factor: A.
      parameters_exponent: alpha.
      tokens_factor: B.
      tokens_exponent: beta.
    """

    irreducible: float
    parameters_factor: float
    parameters_exponent: float
    tokens_factor: float
    tokens_exponent: float

    @property
    def falls(self) -> bool:
        """Whether the loss falls with parameters and with tokens, so that each budget has a best size."""
        factors = (self.parameters_factor, self.tokens_factor)
        return min(self.parameters_exponent, self.tokens_exponent, *factors) > 0 and all(map(math.isfinite, factors))

    def loss(self, parameters: float, tokens: float) -> float:
        """Returns the loss in nats per token of a model after that many tokens."""
        of_parameters = self.parameters_factor / parameters**self.parameters_exponent
        return float(self.irreducible + of_parameters + self.tokens_factor / tokens**self.tokens_exponent)

    def optimum(self, flops: float) -> tuple[float, float]:
        """Returns the parameters and tokens of the lowest loss that this many FLOPs of training can reach."""
        alpha = self.parameters_exponent
        beta = self.tokens_exponent
        product = flops / FLOPS_PER_PARAMETER_AND_TOKEN
        ratio = (alpha * self.parameters_factor / (beta * self.tokens_factor)) ** (1 / (alpha + beta))
        parameters = ratio * product ** (beta / (alpha + beta))
        return float(parameters), float(product / parameters)

    def optimum_served(self, flops: float, served: float) -> tuple[float, float]:
        """Returns the parameters and tokens that reach their loss with the fewest FLOPs of training and use together.

        Use takes 2 N FLOPs for each of `served` tokens (Sardana et al. 2023, arXiv:2401.00448, section 2). Of the pairs
        that are best in this sense, it is the one that takes `flops` of training. There the derivatives of 6 N D + 2 N
        `served` and of the loss are proportional: alpha A / N^alpha = (1 + served / 3 D) beta B / D^beta.

        Args:
          flops: FLOPs of training.
          served: tokens that the model reads and writes in use.
        """
        from scipy.optimize import brentq

        largest, _ = self.optimum(flops)
        if not served:
            return self.optimum(flops)
        product = flops / FLOPS_PER_PARAMETER_AND_TOKEN

        def excess(log_parameters: float) -> float:
            """Rises with the number of parameters, and is zero at the optimum."""
            n = float(np.exp(log_parameters))
            d = product / n
            of_parameters = self.parameters_exponent * self.parameters_factor / n**self.parameters_exponent
            of_tokens = self.tokens_exponent * self.tokens_factor / d**self.tokens_exponent
            return float(np.log((1 + served / (3 * d)) * of_tokens / of_parameters))

        parameters = float(np.exp(brentq(excess, 0.0, np.log(largest) + 1e-9, xtol=1e-12)))
        return parameters, product / parameters

    def training_flops(self, loss: float) -> float:
        """Returns the fewest FLOPs of training that reach a loss above the irreducible one."""
        from scipy.optimize import brentq

        def excess(log_flops: float) -> float:
            return self.loss(*self.optimum(float(np.exp(log_flops)))) - loss

        return float(np.exp(brentq(excess, 0.0, 200.0, xtol=1e-10)))


BESIROGLU = ScalingLaw(1.8172, 482.01, 0.3478, 2085.43, 0.3658)
"""Besiroglu et al. 2024, arXiv:2404.10102: their fit of Hoffmann et al.'s points, without the five highest losses."""
HOFFMANN = ScalingLaw(1.6934, 406.4, 0.3392, 410.7, 0.2849)
"""Hoffmann et al. 2022, arXiv:2203.15556, equation 10, with the digits of the paper's source, which give its table A3
and its exponent 0.46. The printed digits give 0.45. Besiroglu et al. show that it does not fit their points."""
PIVOT = (1e9, 2e10)
"""Parameters and tokens amid the published points. Around them the constants hardly correlate."""
_COVARIANCE = (
    (2.0622e-04, -4.5411e-04, 1.2054e-04, -6.2727e-04, 1.9538e-04),
    (-4.5411e-04, 3.4824e-03, -8.5432e-04, -1.2818e-03, 3.2569e-04),
    (1.2054e-04, -8.5432e-04, 2.1467e-04, 2.6314e-04, -6.7426e-05),
    (-6.2727e-04, -1.2818e-03, 2.6314e-04, 4.8047e-03, -1.4250e-03),
    (1.9538e-04, 3.2569e-04, -6.7426e-05, -1.4250e-03, 4.3308e-04),
)
"""Covariance of `centered` constants in 1000 fits to the published points, drawn with replacement. From
benchmarks/results/scaling_law_interval.json."""


class Range(NamedTuple):
    """The runs that a law was fitted to, by training FLOPs, parameters and tokens a parameter: least and largest."""

    flops: tuple[float, float]
    parameters: tuple[float, float]
    tokens_per_parameter: tuple[float, float]


PUBLISHED_RANGE = Range((1.40e18, 1.30e22), (5.73e7, 1.62e10), (0.456, 341.0))
"""The 240 published points, from benchmarks/results/scaling_law_interval.json."""


class Fit(NamedTuple):
    """A law that was fitted to runs.

    Attributes:
      law: the law with the least objective.
      objective: the sum over runs of Huber's loss of the error of log L; NaN from `published`.
      samples: laws fitted to runs drawn with replacement, [samples, 5] in the order of `ScalingLaw`'s constants.
    """

    law: ScalingLaw
    objective: float
    samples: np.ndarray

    def interval(self, confidence: float = 0.95) -> tuple[ScalingLaw, ScalingLaw]:
        """Returns the lower and the upper end of each constant's bootstrap interval."""
        ends = np.quantile(self.samples, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
        return ScalingLaw(*map(float, ends[0])), ScalingLaw(*map(float, ends[1]))

    def optimum_interval(self, flops: float, confidence: float = 0.95) -> tuple[float, float]:
        """Returns the interval of the compute-optimal number of parameters for a budget."""
        return self.interval_of(lambda law: law.optimum(flops)[0], confidence)

    def interval_of(self, figure: Callable[[ScalingLaw], float], confidence: float = 0.95) -> tuple[float, float]:
        """Returns the interval of a figure that each law gives, such as its loss for a model."""
        found = [figure(ScalingLaw(*map(float, sample))) for sample in self.samples]
        low, high = np.quantile(found, [(1 - confidence) / 2, (1 + confidence) / 2])
        return float(low), float(high)


def centered(laws: np.ndarray) -> np.ndarray:
    """Returns the constants of laws [n, 5] as log E, log A / N^alpha, alpha, log B / D^beta, beta, at `PIVOT`."""
    e, a, alpha, b, beta = np.asarray(laws, float).T
    of_a = np.log(a) - alpha * np.log(PIVOT[0])
    of_b = np.log(b) - beta * np.log(PIVOT[1])
    return np.stack([np.log(e), of_a, alpha, of_b, beta], axis=1)


def published(samples: int = 2000) -> Fit:
    """Returns the law of Besiroglu et al., with laws drawn from the covariance of its constants; the same each time."""
    (middle,) = centered(np.array([BESIROGLU]))
    e, a, alpha, b, beta = np.random.default_rng(0).multivariate_normal(middle, _COVARIANCE, samples).T
    at = a + alpha * np.log(PIVOT[0]), b + beta * np.log(PIVOT[1])
    return Fit(BESIROGLU, math.nan, np.stack([np.exp(e), np.exp(at[0]), alpha, np.exp(at[1]), beta], axis=1))


def fit(
    parameters: Sequence[float] | np.ndarray,
    tokens: Sequence[float] | np.ndarray,
    losses: Sequence[float] | np.ndarray,
    samples: int = 400,
    seed: int = 0,
) -> Fit:
    """Fits the law to finished runs by the method of Hoffmann et al. (appendix D.3), with a bootstrap.

    The objective is Huber's loss of the errors of log L. Minimization starts from the best points of a grid, since it
    has several minima.

    Args:
      parameters: N of each run [runs].
      tokens: D of each run [runs].
      losses: final loss of each run in nats per token [runs].
      samples: number of bootstrap samples.
      seed: seed of the samples.

    Raises:
      ValueError: there are fewer than `FEWEST_RUNS` runs, the runs have too few sizes or numbers of tokens, or the loss
        does not fall with both, in the fit or in more than `MOST_WITHOUT_OPTIMUM` of the samples.
    """
    n, d, y = (np.log(np.asarray(values, float)) for values in (parameters, tokens, losses))
    if len(y) < FEWEST_RUNS:
        raise ValueError(f"a law with five constants needs at least {FEWEST_RUNS} runs, not {len(y)}")
    for name, values in (("numbers of parameters", n), ("numbers of tokens", d)):
        if len(set(values)) < 3:
            raise ValueError(f"the runs have too few different {name} ({len(set(values))}): give at least 3")
    points = _Points(n - n.mean(), d - d.mean(), y)
    tries = [points.minimize(start) for start in _starts(points)]
    best, objective = min(tries, key=lambda found: found[1])
    rng = np.random.default_rng(seed)
    resampled = [points.take(rng.integers(0, len(y), len(y))).minimize(best)[0] for _ in range(samples)]
    law, *laws = (_law(theta, n.mean(), d.mean()) for theta in (best, *resampled))
    falling = [sample for sample in laws if sample.falls]
    others = len(laws) - len(falling)
    if not law.falls or others > MOST_WITHOUT_OPTIMUM * len(laws):
        where = f"in {others} of {len(laws)} fits to runs drawn with replacement" if law.falls else "in the best fit"
        raise ValueError(f"the loss does not fall with both parameters and tokens {where}: the runs determine no law")
    return Fit(law, objective, np.array(falling).reshape(-1, 5))


class _Points(NamedTuple):
    """Runs, with logarithms of parameters and tokens around their means, so that the constants hardly correlate."""

    parameters: np.ndarray
    tokens: np.ndarray
    losses: np.ndarray

    def take(self, which: np.ndarray) -> "_Points":
        return _Points(self.parameters[which], self.tokens[which], self.losses[which])

    def _terms(self, theta: np.ndarray) -> np.ndarray:
        """Returns the logarithms of the law's three terms, [3, runs] or [3, starts, runs]."""
        e, a, alpha, b, beta = np.expand_dims(theta.T, -1)
        flat = np.zeros_like(self.losses)
        return np.stack([e + flat, a - alpha * self.parameters, b - beta * self.tokens])

    def errors(self, theta: np.ndarray) -> np.ndarray:
        """Returns predicted minus measured log loss."""
        return np.logaddexp.reduce(self._terms(theta), axis=0) - self.losses

    def derivative(self, theta: np.ndarray) -> np.ndarray:
        """Returns the derivatives of `errors`, [runs, 5]."""
        terms = self._terms(theta)
        of_e, of_a, of_b = np.exp(terms - np.logaddexp.reduce(terms, axis=0))
        return np.stack([of_e, of_a, -of_a * self.parameters, of_b, -of_b * self.tokens], axis=1)

    def minimize(self, start: np.ndarray) -> tuple[np.ndarray, float]:
        """Returns the minimum that a start leads to, and its objective."""
        from scipy.optimize import least_squares

        found = least_squares(
            self.errors, start, self.derivative, loss="huber", f_scale=HUBER_DELTA, x_scale="jac",
            xtol=1e-10, ftol=1e-12, gtol=1e-12, max_nfev=500,
        )  # fmt: skip
        return found.x, float(found.cost)


def _starts(points: _Points, count: int = 40) -> np.ndarray:
    """Returns the best of a grid of constants, [count, 5]: each term is a part of the mean loss."""
    level = points.losses.mean()
    grid = np.stack(
        np.meshgrid(
            level + np.log([0.2, 0.5, 0.8]),
            level + np.log([0.05, 0.2, 0.5]),
            [0.1, 0.3, 0.5, 1.0],
            level + np.log([0.05, 0.2, 0.5]),
            [0.1, 0.3, 0.5, 1.0],
        ),
        axis=-1,
    ).reshape(-1, 5)
    absolute = np.abs(points.errors(grid))
    return grid[np.argsort(absolute.sum(-1))[:count]]


def _law(theta: np.ndarray, parameters_mean: float, tokens_mean: float) -> ScalingLaw:
    """Returns the constants for parameters and tokens themselves."""
    e, a, alpha, b, beta = map(float, theta)
    with np.errstate(over="ignore"):  # see `ScalingLaw.falls`
        of_one = np.exp([a + alpha * parameters_mean, b + beta * tokens_mean])
    return ScalingLaw(float(np.exp(e)), float(of_one[0]), alpha, float(of_one[1]), beta)
