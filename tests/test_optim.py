"""Schedules by their closed forms, and which parameter each rule moves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import FAMILIES

from jaxstack import model, optim, params
from jaxstack.config import OptimConfig
from jaxstack.tree import flatten

STEPS, WARMUP, PEAK = 100, 10, 2.0


def rates(**kwargs) -> np.ndarray:
    schedule = optim.schedule(OptimConfig(lr=PEAK, warmup_steps=WARMUP, **kwargs), STEPS)
    return np.array([schedule(count) for count in range(STEPS)])


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
def test_warm_up_is_linear_and_never_zero(name):
    np.testing.assert_allclose(rates(schedule=name)[:WARMUP], PEAK * np.arange(1, WARMUP + 1) / WARMUP, rtol=1e-6)


def test_schedules_by_their_formulas():
    n = np.arange(1, STEPS + 1)
    part = (n - WARMUP) / (STEPS - WARMUP)
    after = n > WARMUP
    cosine = PEAK * (0.1 + 0.9 * (1 + np.cos(np.pi * part)) / 2)
    np.testing.assert_allclose(rates(schedule="cosine")[after], cosine[after], rtol=1e-5)
    linear = PEAK * (1 - 0.9 * part)
    np.testing.assert_allclose(rates(schedule="linear")[after], linear[after], rtol=1e-5)
    wsd = np.where(n <= 70, PEAK, PEAK * (1 - (n - 70) / 30))
    got = rates(schedule="wsd", decay_fraction=0.3, final_lr_fraction=0.0)
    np.testing.assert_allclose(got[after], wsd[after], rtol=1e-5, atol=1e-7)
    assert (rates(schedule="constant")[after] == PEAK).all()


def test_a_warm_up_longer_than_the_run_only_warms_up():
    schedule = optim.schedule(OptimConfig(lr=1.0, warmup_steps=50), 20)
    np.testing.assert_allclose([schedule(i) for i in range(20)], np.arange(1, 21) / 50, rtol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_weight_decay_moves_matrices_and_tables_alone(family):
    spec = model.spec(FAMILIES[family])
    values = jax.tree.map(jnp.ones_like, params.init(jax.random.key(0), spec))
    tx = optim.optimizer(OptimConfig(lr=0.1, warmup_steps=0, schedule="constant", weight_decay=0.5), 10, spec)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, values), tx.init(values), values)
    for path, update in flatten(updates).items():
        decayed = "norm" not in path and "/b_" not in path
        np.testing.assert_allclose(update, -0.05 if decayed else 0.0, rtol=1e-6, err_msg=path)


def test_muon_makes_hidden_matrices_orthogonal_and_leaves_the_rest_to_adam(rng):
    """A gradient U S V^T becomes U T V^T with every value of T near one.

    S is drawn between 0.1 and 1: five Newton-Schulz steps multiply a small value by at most 3.44^5 = 485, so nothing
    could be said of a matrix that happens to be nearly singular, and a random one may be.
    """
    spec = model.spec(FAMILIES["llama3"])
    shapes = flatten(params.abstract(spec))
    hidden = {path: 2 if path.endswith("w_o") else 1 for path in shapes if "/attention/w_" in path or "/mlp/w_" in path}
    grads, bases = {}, {}
    for path, p in shapes.items():
        grads[path] = rng.normal(size=p.shape).astype(np.float32)
        if path in hidden:
            rows = int(np.prod(p.shape[1 : 1 + hidden[path]]))
            u, _, vt = np.linalg.svd(grads[path].reshape(p.shape[0], rows, -1), full_matrices=False)
            s = rng.uniform(0.1, 1.0, size=(p.shape[0], 1, u.shape[-1]))
            grads[path], bases[path] = ((u * s) @ vt).reshape(p.shape).astype(np.float32), (u, vt)
    values = params.init(jax.random.key(0), spec)
    tree = jax.tree.unflatten(jax.tree.structure(values), list(grads.values()))
    cfg = OptimConfig(name="muon", lr=1.0, warmup_steps=0, schedule="constant", weight_decay=0.0, clip_norm=None)
    tx = optim.optimizer(cfg, 10, spec)
    updates, _ = tx.update(tree, tx.init(values), values)
    adam, _ = optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps).update(tree, optax.scale_by_adam().init(values))
    updates, adam = flatten(updates), flatten(adam)
    assert hidden
    for path, update in updates.items():
        if path in hidden:
            u, vt = bases[path]
            matrix = np.asarray(update).reshape(u.shape[0], u.shape[1], vt.shape[2])
            t = -(u.mT @ matrix @ vt.mT) / (0.2 * max(matrix.shape[1:]) ** 0.5)
            diagonal = np.diagonal(t, axis1=1, axis2=2)
            # With optax's coefficients the iteration ends between 0.68 and 1.14 for such values, not at 1.
            assert 0.6 < diagonal.min() <= diagonal.max() < 1.3, path
            np.testing.assert_allclose(t - diagonal[:, :, None] * np.eye(t.shape[1]), 0.0, atol=1e-3, err_msg=path)
        else:
            np.testing.assert_allclose(update, -adam[path], rtol=1e-5, err_msg=path)


def test_gradients_are_clipped_to_the_global_norm(rng):
    spec = model.spec(FAMILIES["llama3"])
    grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params.abstract(spec))
    cfg = OptimConfig(name="sgd", lr=1.0, b1=0.0, warmup_steps=0, schedule="constant", weight_decay=0.0, clip_norm=0.25)
    tx = optim.optimizer(cfg, 10, spec)
    updates, _ = tx.update(grads, tx.init(grads), grads)
    np.testing.assert_allclose(optax.global_norm(updates), 0.25, rtol=1e-5)
