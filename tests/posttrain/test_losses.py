"""The formulas of `posttrain.losses` against their definitions in NumPy's float64, and against numbers of TRL."""

import inspect
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.posttrain import losses

TRL = json.loads((Path(__file__).parent / "trl_losses.json").read_text())
PAIR = ("chosen", "rejected", "ref_chosen", "ref_rejected", "chosen_tokens", "rejected_tokens")


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def log_sigmoid(x):
    return -np.logaddexp(0, -x)


def pairs(rng, count=40):
    """Returns sums of log-probabilities of completions and their lengths, also extreme ones."""
    tokens = rng.integers(1, 60, (2, count)).astype(np.float64)
    means = -rng.gamma(1.0, 1.0, (4, count)) * np.where(np.arange(count) < 3, 30, 1) - 1e-3
    chosen, rejected, ref_chosen, ref_rejected = means * tokens[[0, 1, 0, 1]]
    return dict(zip(PAIR, (chosen, rejected, ref_chosen, ref_rejected, *tokens), strict=True))


def margin(p):
    return (p["chosen"] - p["ref_chosen"]) - (p["rejected"] - p["ref_rejected"])


def odds(p, side):
    mean = p[side] / p[f"{side}_tokens"]
    return mean - np.log1p(-np.exp(mean))


DEFINITIONS = {
    "dpo": (lambda p: -log_sigmoid(0.3 * margin(p)), {"beta": 0.3}),
    "dpo, smoothed": (
        lambda p: -0.8 * log_sigmoid(0.3 * margin(p)) - 0.2 * log_sigmoid(-0.3 * margin(p)),
        {"beta": 0.3, "label_smoothing": 0.2},
    ),
    "robust": (
        lambda p: (-0.8 * log_sigmoid(0.3 * margin(p)) + 0.2 * log_sigmoid(-0.3 * margin(p))) / 0.6,
        {"beta": 0.3, "label_smoothing": 0.2},
    ),
    "ipo": (
        lambda p: (
            (
                (p["chosen"] - p["ref_chosen"]) / p["chosen_tokens"]
                - (p["rejected"] - p["ref_rejected"]) / p["rejected_tokens"]
                - 1 / 0.6
            )
            ** 2
        ),
        {"beta": 0.3},
    ),
    "hinge": (lambda p: np.maximum(0, 1 - 0.3 * margin(p)), {"beta": 0.3}),
    "orpo": (lambda p: -0.3 * log_sigmoid(odds(p, "chosen") - odds(p, "rejected")), {"beta": 0.3}),
    "simpo": (
        lambda p: -log_sigmoid(2 * (p["chosen"] / p["chosen_tokens"] - p["rejected"] / p["rejected_tokens"]) - 0.7),
        {"beta": 2.0, "gamma": 0.7},
    ),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_preference_losses_are_their_definitions(rng, name):
    p = pairs(rng)
    definition, constants = DEFINITIONS[name]
    loss = getattr(losses, name.partition(",")[0])
    arguments = {key: p[key] for key in inspect.signature(loss).parameters if key in p}
    np.testing.assert_allclose(loss(**arguments, **constants), definition(p), rtol=1e-12, atol=1e-12)
    # By position, too: this is the order that others rely on.
    np.testing.assert_allclose(loss(*arguments.values(), **constants), definition(p), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_gradients_are_finite_where_probabilities_are_0_or_1(name):
    loss = getattr(losses, name.partition(",")[0])
    extremes = jnp.array([0.0, -1e-9, -1.0, -1e4], jnp.float32)
    chosen, rejected = (each.ravel() for each in jnp.meshgrid(extremes, extremes))
    p = dict(zip(PAIR, (chosen, rejected, rejected, chosen, jnp.ones(16), jnp.ones(16)), strict=True))
    names = [key for key in inspect.signature(loss).parameters if key in p]
    constants = DEFINITIONS[name][1]
    total, grads = jax.value_and_grad(lambda own: loss(**own, **constants).sum())({key: p[key] for key in names})
    assert np.isfinite(total)
    assert all(np.isfinite(grad).all() for grad in grads.values())


@pytest.mark.parametrize("name", [*TRL["losses"]])
def test_preference_losses_have_the_values_that_trl_has(name):
    p = {key: np.array(TRL["inputs"][key]) for key in PAIR}
    loss = getattr(losses, name.partition(",")[0])
    arguments = {key: p[key] for key in inspect.signature(loss).parameters if key in p}
    expected = TRL["losses"][name]
    # TRL computes in float32, where differences of sums of some hundred nats keep about 1e-5.
    np.testing.assert_allclose(loss(**arguments, **expected["constants"]), expected["values"], rtol=3e-5, atol=3e-6)


def test_kto_is_its_definition(rng):
    policy, reference, other_policy, other_reference = -rng.gamma(2.0, 5.0, (4, 30))
    wanted = rng.random(30) < 0.5
    for shift in (-3.0, 3.0):  # below 0, the divergence counts as 0
        z = losses.kto_divergence(other_policy + shift - other_reference)
        expected_z = max(0.0, np.mean(other_policy + shift - other_reference))
        np.testing.assert_allclose(z, expected_z, rtol=1e-12)
        r = policy - reference
        expected = np.where(
            wanted, 1.5 * (1 - 1 / (1 + np.exp(-0.2 * (r - z)))), 0.5 * (1 - 1 / (1 + np.exp(-0.2 * (z - r))))
        )
        loss = losses.kto(policy, reference, wanted, z, beta=0.2, wanted_weight=1.5, unwanted_weight=0.5)
        np.testing.assert_allclose(loss, expected, rtol=1e-12)

    def total(x):
        return losses.kto(policy, reference, wanted, losses.kto_divergence(x), beta=0.2).sum()

    np.testing.assert_array_equal(jax.grad(total)(other_policy + 3 - other_reference), 0)


def test_kto_has_the_values_that_trl_has():
    p = {key: np.array(TRL["inputs"][key]) for key in PAIR}
    expected = TRL["kto"]
    beta, wanted_weight, unwanted_weight = expected["constants"].values()
    found = losses.kto(
        np.append(p["chosen"], p["rejected"]), np.append(p["ref_chosen"], p["ref_rejected"]), np.arange(12) < 6,
        losses.kto_divergence(np.full(12, expected["divergence"])), beta=beta, wanted_weight=wanted_weight,
        unwanted_weight=unwanted_weight,
    )  # fmt: skip
    np.testing.assert_allclose(found, expected["values"], rtol=3e-5, atol=3e-6)  # as above


def test_pairs_of_scores_are_their_definition(rng):
    chosen, rejected, margin = rng.normal(size=(3, 20))
    expected = -log_sigmoid(chosen - rejected - margin) + 0.01 * (chosen + rejected) ** 2
    np.testing.assert_allclose(losses.reward_pair(chosen, rejected, margin, center=0.01), expected, rtol=1e-12)
    np.testing.assert_allclose(losses.reward_pair(chosen, rejected), -log_sigmoid(chosen - rejected), rtol=1e-12)


def test_advantages_are_their_definitions(rng):
    rewards = rng.normal(size=(7, 5))
    centred = rewards - rewards.mean(1, keepdims=True)
    np.testing.assert_allclose(losses.group_advantages(rewards, scale=False), centred, rtol=1e-12)
    scaled = centred / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(losses.group_advantages(rewards, scale=True), scaled, rtol=1e-12)
    others = np.array([[np.delete(group, i).mean() for i in range(5)] for group in rewards])
    np.testing.assert_allclose(losses.rloo_advantages(rewards), rewards - others, rtol=1e-12)


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("value", [0.1, 0.3, -7.7, 0.0])
def test_a_group_without_spread_has_no_advantage(scale, value):
    """In float32 the mean of five times 0.1 is not 0.1."""
    rewards = jnp.full((2, 5), value, jnp.float32)
    np.testing.assert_array_equal(losses.group_advantages(rewards, scale=scale), 0)
    np.testing.assert_array_equal(losses.group_advantages(rewards[:, :1], scale=scale), 0)


def tokens(rng, rows=6, length=9):
    """Returns log-probabilities now and before [rows, T], advantages, and a mask with completions of all lengths."""
    new = -rng.gamma(1.0, 1.0, (rows, length))
    old = new + rng.normal(0, 0.4, (rows, length))
    mask = (np.arange(length) < np.arange(rows)[:, None] * 2).astype(np.float64)  # the first has no token
    return new, old, rng.normal(size=rows), mask


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (3e-4, 4e-4)])
def test_clipped_losses_are_their_definitions(rng, low, high):
    new, old, advantages, mask = tokens(rng)
    expected = np.zeros(new.shape)
    completions = np.zeros(len(new))
    for i, A in enumerate(advantages):
        for t in range(new.shape[1]):
            rho = np.exp(new[i, t] - old[i, t])
            expected[i, t] = -min(rho * A, min(max(rho, 1 - low), 1 + high) * A)
        inside = mask[i] > 0
        s = np.exp(np.mean((new - old)[i, inside])) if inside.any() else 1.0
        completions[i] = -min(s * A, min(max(s, 1 - low), 1 + high) * A)
    np.testing.assert_allclose(losses.clipped(new, old, advantages, low=low, high=high), expected, rtol=1e-12)
    np.testing.assert_allclose(losses.gspo(new, old, advantages, mask, low=low, high=high), completions, rtol=1e-12)


def test_ratios_of_exactly_1_leave_advantages_and_the_gradient_of_reinforce(rng):
    new, _, advantages, mask = tokens(rng)

    def gradient(loss):
        return jax.grad(lambda x: (mask * loss(x)).sum())(new)

    plain = gradient(lambda x: losses.reinforce(x, advantages))
    np.testing.assert_allclose(plain, -mask * advantages[:, None], rtol=1e-12)
    clipped = gradient(lambda x: losses.clipped(x, new, advantages, low=0.2, high=0.2))
    np.testing.assert_allclose(clipped, plain, rtol=1e-12)
    np.testing.assert_allclose(gradient(lambda x: losses.cispo(x, new, advantages, high=5.0)), plain, rtol=1e-12)


def test_cispo_and_reinforce_are_their_definitions(rng):
    new, old, advantages, _ = tokens(rng)
    weight = np.minimum(np.exp(new - old), 1.2)
    assert 0 < (weight == 1.2).sum() < weight.size
    A = advantages[:, None]
    np.testing.assert_allclose(losses.cispo(new, old, advantages, high=1.2), -weight * A * new, rtol=1e-12)
    grads = jax.grad(lambda x: losses.cispo(x, old, advantages, high=1.2).sum())(new)
    np.testing.assert_allclose(grads, -weight * A, rtol=1e-12)
    np.testing.assert_allclose(losses.reinforce(new, advantages), -A * new, rtol=1e-12)


def test_estimates_of_the_divergence_are_their_definitions(rng):
    new, ref, *_ = tokens(rng)
    x = ref - new
    for kind, expected in (("k1", -x), ("k2", x**2 / 2), ("k3", np.exp(x) - x - 1)):
        np.testing.assert_allclose(losses.divergence(new, ref, kind), expected, rtol=1e-9, atol=1e-12)
    assert losses.divergence(jnp.float32(-1.0), jnp.float32(-1.0 + 1e-4), "k3") > 0  # exp(x) - 1 - x would round to 0


def test_truncated_weights_are_their_definition(rng):
    trainer, sampler, *_ = tokens(rng)
    found = losses.truncated_importance(trainer, sampler, limit=1.3)
    np.testing.assert_allclose(found, np.minimum(np.exp(trainer - sampler), 1.3), rtol=1e-12)
    assert 0 < (found == 1.3).sum() < found.size
    grads = jax.grad(lambda x: losses.truncated_importance(x, sampler, limit=2.0).sum())(trainer)
    np.testing.assert_array_equal(grads, 0)


def test_weights_of_tokens_are_their_definitions(rng):
    values, _, _, mask = tokens(rng)
    rows = len(mask)
    means = [values[i, mask[i] > 0].mean() if mask[i].any() else 0.0 for i in range(rows)]
    np.testing.assert_allclose((losses.per_completion(mask) * values).sum(), np.mean(means), rtol=1e-12)
    np.testing.assert_allclose((losses.per_token(mask) * values).sum(), values[mask > 0].mean(), rtol=1e-12)
    expected = (values * mask).sum() / (rows * 20)
    np.testing.assert_allclose((losses.per_longest(mask, 20) * values).sum(), expected, rtol=1e-12)
    for weights in (losses.per_completion, losses.per_token):
        np.testing.assert_array_equal(weights(jnp.zeros((2, 3))), 0)


def test_the_penalty_of_long_completions_falls_over_the_buffer():
    found = losses.overlong_penalty(jnp.array([0, 16, 17, 18, 20]), longest=20, buffer=4)
    np.testing.assert_allclose(found, [0, 0, -0.25, -0.5, -1])
