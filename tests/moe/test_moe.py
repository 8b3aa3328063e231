"""Mixture of experts: routers and sums against numpy that visits one token at a time, every way of dispatch against the
dense definition, and every layout of experts against one device; values and every gradient."""

from functools import partial
from math import ceil

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxstack import moe
from jaxstack.kernels import implementation as choice
from jaxstack.kernels.grouped_matmul import TILE_ROWS
from jaxstack.moe.rounds import expected_rounds, room_of_shard, share_of_visits

# Relative error of a whole array. float32 rounds at 6e-8, a sum of n terms loses about sqrt(n) of that: 1e-5 leaves
# room for n in the thousands; no sum here is longer than a few hundred.
TOLERANCE = 1e-5


def assert_close(actual, truth):
    """Compares each leaf relative to the truth's norm, or to a root mean square of 1e-2 if that is larger."""
    assert jax.tree.structure(actual) == jax.tree.structure(truth)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(truth), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        assert np.linalg.norm(a - b) <= TOLERANCE * max(np.linalg.norm(b), 1e-2 * b.size**0.5)


def normal(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


# Routers

top_k_softmax = jax.jit(moe.top_k_softmax, static_argnums=1, static_argnames="normalize")
by_domain = jax.jit(moe.by_domain, static_argnums=1)
by_timestep = jax.jit(moe.by_timestep, static_argnums=(1, 2, 3))


def numpy_softmax_router(logits, k, normalize):
    experts, weights, scores = [], [], []
    for row in logits:
        p = np.exp(row - row.max())
        p /= p.sum()
        best = sorted(range(len(p)), key=lambda e: (-p[e], e))[:k]
        w = p[best]
        experts.append(best)
        weights.append(w / w.sum() if normalize else w)
        scores.append(p)
    return np.array(experts), np.array(weights), np.array(scores)


def numpy_sigmoid_router(logits, bias, k, groups, top_groups, scale):
    experts, weights, scores = [], [], []
    for row in logits:
        s = 1 / (1 + np.exp(-row))
        size = len(s) // groups
        value = [sum(sorted((s + bias)[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        kept = sorted(range(groups), key=lambda g: -value[g])[:top_groups]
        allowed = [e for e in range(len(s)) if e // size in kept]
        best = sorted(allowed, key=lambda e: -(s + bias)[e])[:k]
        experts.append(best)
        weights.append(scale * s[best] / s[best].sum())
        scores.append(s / s.sum())
    return np.array(experts), np.array(weights), np.array(scores)


def check_router(rng, route, reference, logits):
    """Compares choices, weights and scores, and the gradients of weights and scores with NumPy's slopes."""
    routing = jax.jit(route)(logits)
    experts, weights, scores = reference(np.asarray(logits, np.float64))
    np.testing.assert_array_equal(routing.experts, experts)
    assert routing.experts.dtype == jnp.int32
    assert_close((routing.weights, routing.scores, routing.logits), (weights, scores, logits))

    a, b, direction = (rng.standard_normal(array.shape) for array in (weights, scores, logits))
    gradient = jax.jit(
        jax.grad(lambda logits: (lambda r: jnp.sum(a * r.weights) + jnp.sum(b * r.scores))(route(logits)))
    )(logits)

    def value(step):
        _, weights, scores = reference(np.asarray(logits, np.float64) + step * direction)
        return (a * weights).sum() + (b * scores).sum()

    # A step of 1e-6 in float64: the error of the difference is about 1e-12 + 1e-16 / 1e-6, far below float32's.
    slope = (value(1e-6) - value(-1e-6)) / 2e-6
    assert abs((gradient * direction).sum() - slope) <= 1e-4 * (np.linalg.norm(gradient) * np.linalg.norm(direction))


@pytest.mark.parametrize("normalize", [True, False])
def test_top_k_softmax(rng, normalize):
    check_router(
        rng,
        partial(moe.top_k_softmax, k=3, normalize=normalize),
        partial(numpy_softmax_router, k=3, normalize=normalize),
        2 * normal(rng, 20, 8),
    )


@pytest.mark.parametrize("shift", [0.0, -5.0])  # with -5 every biased score is negative: 0 would beat them
@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2), (4, 1)])
def test_sigmoid_groups(rng, groups, top_groups, shift):
    bias = rng.standard_normal(16) * 0.3 + shift
    sizes = {"k": 3, "groups": groups, "top_groups": top_groups, "scale": 2.5}
    check_router(
        rng,
        lambda logits: moe.sigmoid_groups(logits, jnp.asarray(bias, jnp.float32), **sizes),
        lambda logits: numpy_sigmoid_router(logits, bias, **sizes),
        normal(rng, 20, 16),
    )


def test_bias_gets_no_gradient_and_one_choice_keeps_its_own(rng):
    logits = normal(rng, 12, 8)

    def total(logits, bias, k):
        r = moe.sigmoid_groups(logits, bias, k, groups=2, top_groups=1)
        return jnp.sum(r.weights * (1 + r.experts))

    assert not jax.grad(total, 1)(logits, normal(rng, 8), 2).any()
    one = moe.sigmoid_groups(logits, jnp.zeros(8), 1)
    assert_close(one.weights, jax.nn.sigmoid(logits).max(-1, keepdims=True))


def test_hard_gates(rng):
    ids = jnp.asarray(rng.integers(0, 5, 30))
    routing = by_domain(ids, 5)
    np.testing.assert_array_equal(routing.experts[:, 0], ids)
    assert (routing.weights == 1).all()
    np.testing.assert_array_equal(routing.scores, np.eye(5)[ids])
    assert routing.logits is None
    assert float(moe.z_loss(routing)) == float(moe.entropy_sum(routing)) == 0

    for steps, experts in [(1000, 4), (10, 3)]:
        t = np.arange(steps)
        routing = by_timestep(jnp.asarray(t), experts, steps)
        np.testing.assert_array_equal(routing.experts[:, 0], [i * experts // steps for i in t])
        assert (routing.weights == 1).all()
    routing = by_timestep(jnp.array([0.0, 0.25, 0.3, 0.99, 1.0]), 4, 1.0)
    np.testing.assert_array_equal(routing.experts[:, 0], [0, 1, 1, 3, 3])
    assert (routing.weights == 1).all()
    for times, dtype in (([0, 2, 3, 8, 9], np.int32), ([0.0, 2.9, 3.0, 8.9, 10.0], np.float32)):
        routing = by_timestep(jnp.asarray(times, dtype), 3, 10, (3, 9))
        np.testing.assert_array_equal(routing.experts[:, 0], [0, 0, 1, 1, 2])
        assert (routing.weights == 1).all()


def test_an_id_without_expert_is_loud():
    assert np.isnan(by_domain(jnp.array([0, 3, -1]), 3).weights[:, 0]).tolist() == [False, True, True]
    assert np.isnan(by_timestep(jnp.array([-1, 0, 10]), 2, 10).weights[:, 0]).tolist() == [True, False, True]
    assert np.isnan(by_timestep(jnp.array([-0.1, 1.1]), 2, 1.0).weights).all()
    assert np.isnan(by_timestep(jnp.array([-1, 0, 10]), 2, 10, (3,)).weights[:, 0]).tolist() == [True, False, True]
    moe.check_domains(np.array([0, 2]), 3)
    with pytest.raises(ValueError, match=r"domain id 3 has no expert: 2 of 4 .* outside of 0 to 2"):
        moe.check_domains(np.array([[0, 3], [-1, 2]]), 3)


def test_update_bias(rng):
    counts = np.array([[4.0, 0.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
    bias = rng.standard_normal((2, 4)).astype(np.float32)
    expected = bias + 0.1 * np.array([[-1, 1, 0, 0], [0, 0, 0, 0]])
    assert_close(moe.update_bias(jnp.asarray(bias), jnp.asarray(counts), 0.1), expected)

    # Skewed logits: the bias alone evens the load out. The bias moves in steps, so a load
    # swings by some hundredths about its mean: of a thousand draws the worst ended at 1.11.
    logits = normal(rng, 4096, 8) + jnp.linspace(0, 3, 8)

    @jax.jit
    def turn(bias):
        counts = moe.load(moe.sigmoid_groups(logits, bias, 2))
        return moe.update_bias(bias, counts, 0.003), counts.max() / counts.mean()

    bias, before = turn(jnp.zeros(8))
    for _ in range(400):
        bias, after = turn(bias)
    assert before > 2
    assert after < 1.2


# Sums


def numpy_sums(routing, rows, mask):
    experts, scores, logits = (np.asarray(x, np.float64) for x in (routing.experts, routing.scores, routing.logits))
    (T, k), E = experts.shape, scores.shape[1]
    balance, load = 0.0, np.zeros(E)
    for row in np.arange(T).reshape(rows, -1):
        row = row[mask[row]]
        if row.size:
            f = np.array([E / (k * row.size) * sum((experts[t] == e).sum() for t in row) for e in range(E)])
            balance += (f * scores[row].mean(0)).sum()
            load += f * k * row.size / E
    z = sum(np.log(np.exp(logits[t]).sum()) ** 2 for t in range(T) if mask[t])
    entropy = -sum((scores[t] * np.log(scores[t])).sum() for t in range(T) if mask[t])
    return balance, z, entropy, load


def sums(routing, rows, mask=None, axes=()):
    balance = moe.balance_loss(routing, rows, axes, mask)
    return balance, moe.z_loss(routing, mask), moe.entropy_sum(routing, mask), moe.load(routing, mask)


@pytest.mark.parametrize("masked", [False, True])
def test_sums(rng, masked):
    mask = rng.random(32) < 0.6 if masked else np.ones(32, bool)
    mask[:8] &= not masked  # a row without tokens
    routing = top_k_softmax(normal(rng, 32, 6), 2, normalize=True)
    actual = jax.jit(sums, static_argnums=1)(routing, 4, jnp.asarray(mask) if masked else None)
    assert_close(actual, numpy_sums(routing, 4, mask))


def test_even_routing_has_balance_1():
    routing = moe.Routing(jnp.arange(8)[:, None] % 4, jnp.ones((8, 1)), jnp.full((8, 4), 0.25), jnp.zeros((8, 4)))
    assert moe.balance_loss(routing, 1) == 1
    assert moe.balance_loss(routing._replace(experts=jnp.zeros((8, 1), int)), 2) == 2  # of two rows, scores even


@pytest.mark.parametrize("masked", [False, True])
def test_sums_are_the_same_under_every_split(rng, masked):
    """Sums add up over rows (microbatches), a data axis, and an axis that splits sequences; so do gradients."""
    B, S, E = 4, 16, 6
    logits = normal(rng, B, S, E)
    mask = jnp.asarray(rng.random((B, S)) < 0.6) if masked else jnp.ones((B, S), bool)

    def local(logits, mask, axes=()):
        rows = logits.shape[0]
        routing = moe.top_k_softmax(logits.reshape(-1, E), 2, normalize=True)
        balance, z, entropy, load = sums(routing, rows, mask.reshape(-1) if masked else None, axes)
        return balance + z, (balance, z, entropy, load)

    grad = partial(jax.value_and_grad, has_aux=True)
    (_, whole), d_whole = jax.jit(grad(local))(logits, mask)

    halves = [jax.jit(grad(local))(logits[i : i + 2], mask[i : i + 2]) for i in (0, 2)]
    assert_close(jax.tree.map(jnp.add, halves[0][0][1], halves[1][0][1]), whole)
    assert_close(jnp.concatenate([d for _, d in halves]), d_whole)

    mesh = jax.make_mesh((2, 2, 2), ("data", "context", "tensor"), axis_types=(AxisType.Auto,) * 3)
    cut = P("data", ("context", "tensor"))

    def on_mesh(logits, mask):
        (_, aux), d = grad(partial(local, axes=("context", "tensor")))(logits, mask)
        return jax.lax.psum(aux, mesh.axis_names), d

    split = jax.jit(jax.shard_map(on_mesh, mesh=mesh, in_specs=(cut, cut), out_specs=(P(), cut)))(logits, mask)
    assert_close(split, (whole, d_whole))


def test_summary():
    counts = jnp.array([[4.0, 0.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0]])
    figures = moe.summary(counts, jnp.array([2.0, 0.0]), jnp.array([4.0, 8.0]), jnp.asarray(4))
    truth = {"max_over_mean": (2, 1), "dropped_fraction": (0.25, 0), "entropy": (1, 2)}
    assert_close(figures, {name: np.array(value) for name, value in truth.items()})


# Dispatch


def draw(rng, T, D, F, E, gated=True):
    """Returns tokens, router, experts and a cotangent, all of about unit scale."""
    weights = {"w_up": normal(rng, E, D, F) / D**0.5, "w_down": normal(rng, E, F, D) / F**0.5}
    if gated:
        weights["w_gate"] = normal(rng, E, D, F) / D**0.5
    return normal(rng, T, D), normal(rng, D, E) / D**0.5, weights, normal(rng, T, D)


def layer(x, router, weights, k, **options):
    """Computes routing and experts, so that gradients reach the router through the gates."""
    options = {"num_experts": router.shape[1], "activation": jax.nn.silu} | options
    return moe_mlp(x, moe.top_k_softmax(x @ router, k, normalize=k > 1), weights, **options)


def moe_mlp(x, routing, weights, *, mask=None, **options):
    return moe.moe_mlp(x, routing, weights, moe.MoEOptions(**options), mask=mask)


STATIC = ("num_experts", "activation", "capacity_factor", "rows", "implementation")
jit_layer = jax.jit(layer, static_argnums=3, static_argnames=STATIC)
jit_moe_mlp = jax.jit(moe_mlp, static_argnames=STATIC)


def grads_and_value(x, router, weights, cotangent, k=2, **options):
    """Returns ((dx, drouter, dweights), (y, dropped)) on one device, without the loss, which may cancel to almost 0."""

    def loss(x, router, weights):
        y, dropped = layer(x, router, weights, k, **options)
        return jnp.sum(y * cotangent), (y, dropped)

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(x, router, weights)


def numpy_mlp(x, w):
    up = x @ w["w_up"]
    silu = lambda v: v / (1 + np.exp(-v))  # noqa: E731
    return (silu(x @ w["w_gate"]) * up if "w_gate" in w else silu(up)) @ w["w_down"]


@pytest.mark.parametrize("gated", [True, False])
def test_reference_is_the_definition(rng, gated):
    x, router, weights, _ = draw(rng, 24, 8, 12, 4, gated)
    y, dropped = jit_layer(x, router, weights, 2, implementation="reference")
    x, router, weights = jax.tree.map(lambda a: np.asarray(a, np.float64), (x, router, weights))
    experts, gates, _ = numpy_softmax_router(x @ router, 2, True)
    truth = np.zeros_like(x)
    for t, i in np.ndindex(experts.shape):
        truth[t] += gates[t, i] * numpy_mlp(x[t], {name: w[experts[t, i]] for name, w in weights.items()})
    assert_close((y, dropped), (truth, 0))


@pytest.mark.matrix(quick=["idle_experts", "one_choice-g"])
@pytest.mark.parametrize("implementation", ["grouped", "ragged", "pallas_gpu", "pallas_tpu"])
@pytest.mark.parametrize(
    ("T", "E", "k", "gated"),
    [(400, 2, 2, True), (300, 8, 1, False), (7, 16, 3, False)],
    ids=["large_tiles", "one_choice", "idle_experts"],
)
def test_dropless_equals_the_reference(rng, implementation, T, E, k, gated):
    inputs = draw(rng, T, 8, 12, E, gated)
    with choice.interpret_mode(implementation.startswith("pallas_")):
        actual = grads_and_value(*inputs, k=k, implementation=implementation)
    assert_close(actual, grads_and_value(*inputs, k=k, implementation="reference"))


def test_bfloat16(rng):
    """Gradients of weights are summed in float32 and returned in the weights' dtype; outputs have x's dtype."""
    x, router, weights, cotangent = draw(rng, 300, 8, 12, 4, gated=False)
    low = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (x, weights))
    exact = jax.tree.map(lambda a: a.astype(jnp.float32), low)
    routing = top_k_softmax(x @ router, 2, normalize=True)

    def run(x, weights):
        def loss(x, weights):
            y, _ = moe_mlp(x, routing, weights, num_experts=4, activation=jax.nn.silu)
            return jnp.sum(y.astype(jnp.float32) * cotangent), y

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(x, weights)

    for a, b in zip(jax.tree.leaves(run(*low)), jax.tree.leaves(run(*exact)), strict=True):
        if a.ndim:
            assert a.dtype == jnp.bfloat16
            # 2^-9 at each of the handful of places where a value returns to bfloat16
            assert jnp.linalg.norm(a.astype(jnp.float32) - b) <= 2e-2 * jnp.linalg.norm(b)


def shapes_of(jaxpr):
    for eqn in jaxpr.eqns:
        yield from (v.aval.shape for v in eqn.outvars)
        for sub in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from shapes_of(sub)


def test_work_does_not_grow_with_experts_times_tokens():
    """No array of the sorted layer, forward or backward, is larger than the experts, or the pairs, that go in."""
    T, D, F, E, k = 512, 16, 24, 64, 2

    x, weights = jnp.zeros((T, D)), {"w_up": jnp.zeros((E, D, F)), "w_down": jnp.zeros((E, F, D))}
    routing = moe.Routing(jnp.zeros((T, k), jnp.int32), jnp.ones((T, k)), jnp.ones((T, E)), jnp.ones((T, E)))

    def loss(x, weights):
        return moe_mlp(x, routing, weights, num_experts=E, activation=jax.nn.silu)[0].sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, weights).jaxpr
    largest = max(np.prod(shape) for shape in shapes_of(jaxpr))
    assert largest <= max(E * D * F, (T * k + TILE_ROWS[0]) * F) < T * k * E


# Capacity


def kept_pairs(routing, rows, capacity_factor):
    """Returns which pairs an expert keeps, computed one expert and sequence at a time: bool [T, k]."""
    experts, gates = np.asarray(routing.experts), np.asarray(routing.weights)
    (T, k), E = experts.shape, routing.scores.shape[1]
    capacity = ceil(capacity_factor * (T // rows) * k / E)
    kept = np.zeros((T, k), bool)
    for row in np.arange(T).reshape(rows, -1):
        for e in range(E):
            wanted = [(t, i) for t in row for i in range(k) if experts[t, i] == e]
            for pair in sorted(wanted, key=lambda pair: -gates[pair])[:capacity]:  # stable: the earlier wins a tie
                kept[pair] = True
    return kept


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("capacity_factor", [0.5, 1.0, 100.0])
def test_capacity_drops_the_lowest_weights(rng, capacity_factor, ties):
    x, router, weights, _ = draw(rng, 48, 8, 12, 4)
    routing = top_k_softmax(x @ router * 3, 2, normalize=True)
    if ties:
        routing = routing._replace(weights=jnp.round(routing.weights * 2) / 2)
    kept = kept_pairs(routing, 3, capacity_factor)
    options = {"num_experts": 4, "activation": jax.nn.silu}
    y, dropped = jit_moe_mlp(x, routing, weights, capacity_factor=capacity_factor, rows=3, **options)
    assert dropped == (~kept).sum()
    assert (dropped > 0) == (capacity_factor < 2)
    only_kept = routing._replace(weights=routing.weights * kept)
    assert_close(y, jit_moe_mlp(x, only_kept, weights, implementation="reference", **options)[0])


def test_capacity_gradients_and_independence_of_rows(rng):
    inputs = draw(rng, 48, 8, 12, 4, gated=False)
    options = {"capacity_factor": 0.7, "rows": 3}
    assert_close(grads_and_value(*inputs, **options), grads_and_value(*inputs, **options, implementation="reference"))
    x, router, weights, _ = inputs
    whole, dropped = jit_layer(x, router, weights, 2, **options)
    parts = [jit_layer(x[i : i + 16], router, weights, 2, capacity_factor=0.7, rows=1) for i in (0, 16, 32)]
    assert_close((jnp.concatenate([y for y, _ in parts]), sum(d for _, d in parts)), (whole, dropped))


# Experts over a mesh axis


def on_mesh(shape, names, inputs, rows, **options):
    """Returns `grads_and_value` with tokens sharded over every axis but `tensor`, and hidden widths over `tensor`."""
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
    tokens = tuple(name for name in names if name != "tensor")
    hidden = "tensor" if "tensor" in names else None
    if options.get("capacity_factor"):
        options["rows"] = rows // np.prod([mesh.shape[name] for name in tokens])
    weights = {name: P("expert", hidden) if name == "w_down" else P("expert", None, hidden) for name in inputs[2]}

    def local(x, router, weights, cotangent):
        def loss(x, router, weights):
            y, dropped = layer(x, router, weights, 2, expert_axis="expert", **options)
            value = jax.lax.psum(jnp.sum(y * cotangent), names)
            return value, (jax.lax.psum(y, hidden) if hidden else y, jax.lax.psum(dropped, tokens))

        return jax.grad(loss, (0, 1, 2), has_aux=True)(x, router, weights)

    outputs = ((P(tokens), P(), weights), (P(tokens), P()))
    inputs_specs = (P(tokens), P(), weights, P(tokens))
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=inputs_specs, out_specs=outputs))(*inputs)


MESHES = {
    "expert2": ((2,), ("expert",)),
    "expert4": ((4,), ("expert",)),
    "expert8": ((8,), ("expert",)),
    "data2_expert4": ((2, 4), ("data", "expert")),
    "expert2_data2_tensor2": ((2, 2, 2), ("data", "expert", "tensor")),
}


@pytest.fixture(scope="module")
def one_device(seed):
    """Returns inputs of 8 sequences, and the reference's results without and with a capacity."""
    inputs = draw(np.random.default_rng(seed), 64, 8, 12, 8, gated=False)
    return inputs, {
        None: grads_and_value(*inputs, implementation="reference"),
        0.8: grads_and_value(*inputs, implementation="reference", capacity_factor=0.8, rows=8),
    }


@pytest.mark.matrix(quick=["0.8", "None-expert4"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("capacity_factor", [None, 0.8])
def test_expert_axis_equals_one_device(one_device, mesh, capacity_factor):
    inputs, truth = one_device
    _, (_, dropped) = truth[capacity_factor]
    assert (dropped > 0) == (capacity_factor is not None)
    assert_close(on_mesh(*MESHES[mesh], inputs, 8, capacity_factor=capacity_factor), truth[capacity_factor])


def test_expert_axis_with_ragged_dot(one_device):
    inputs, truth = one_device
    assert_close(on_mesh(*MESHES["data2_expert4"], inputs, 8, implementation="ragged"), truth[None])


def test_everybody_to_one_expert(rng):
    """In the worst case of the exchange, which takes four rounds, nothing is lost."""
    x, router, weights, cotangent = draw(rng, 32, 8, 12, 8)
    inputs = (jnp.abs(x), router.at[:, 6:8].add(10.0), weights, cotangent)
    assert_close(on_mesh(*MESHES["expert4"], inputs, 8), grads_and_value(*inputs))


@pytest.mark.matrix
def test_rounds_in_bfloat16_are_near_float32(rng):
    """Values and gradients over several rounds are summed in float32."""
    x, router, weights, cotangent = draw(rng, 256, 16, 24, 8)
    inputs = (jnp.abs(x), router.at[:, 6:8].add(3.0), weights, cotangent)  # most go to the last shard
    low = jax.tree.map(lambda a: a.astype(jnp.bfloat16), inputs)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), low)
    routing = top_k_softmax(wide[0] @ wide[1], 2, normalize=True)  # one for both: a tie may round either way
    found = [fixed_on_mesh(*inputs, routing) for inputs in (low, wide)]
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        assert a.dtype == (jnp.float32 if b.shape == routing.weights.shape else jnp.bfloat16)
        # 2^-9 at each of the handful of places where a value returns to bfloat16
        assert jnp.linalg.norm(a.astype(jnp.float32) - b) <= 2e-2 * jnp.linalg.norm(b)


def fixed_on_mesh(x, _, weights, cotangent, routing):
    """Returns (y, (dx, dweights, dgates)) over four shards of experts, with a given routing."""
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,))

    def local(x, weights, cotangent, routing):
        def loss(x, weights, gates):
            how = {"num_experts": 8, "activation": jax.nn.silu, "expert_axis": "expert"}
            y, _ = moe_mlp(x, routing._replace(weights=gates), weights, **how)
            return jax.lax.psum(jnp.sum(y.astype(jnp.float32) * cotangent.astype(jnp.float32)), "expert"), y

        grads, y = jax.grad(loss, (0, 1, 2), has_aux=True)(x, weights, routing.weights)
        return y, grads

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    return jax.jit(mapped)(x, weights, cotangent, routing)


@pytest.mark.parametrize(
    ("tokens", "choices", "num_experts", "shards", "rounds"),
    [(128, 2, 16, 8, 1), (1024, 2, 8, 4, 1), (256, 4, 16, 2, 1), (64, 1, 8, 8, 1), (512, 8, 64, 8, 1)],
)
def test_random_routing_takes_the_expected_rounds(rng, tokens, choices, num_experts, shards, rounds):
    """The rounds of most of 50 drawn batches of all shards."""
    room = room_of_shard(tokens, choices, num_experts, shards)
    scores = rng.random((50, shards, tokens, num_experts))
    chosen = np.argpartition(scores, choices, -1)[..., :choices] // (num_experts // shards)
    pairs = (chosen[..., None] == np.arange(shards)).sum(-2)  # [50, n, T, n]
    drawn = np.ceil(pairs.sum(2) / room.at_once) + np.ceil((pairs > 0).sum(2) / room.visits) - 1
    assert expected_rounds(tokens, choices, num_experts, shards) == rounds == np.median(drawn.max((1, 2)))
    assert (pairs > 0).mean() == pytest.approx(share_of_visits(choices, num_experts, shards), abs=0.02)


@pytest.mark.parametrize(
    ("tokens", "choices", "routing", "room"),
    [
        (96, 1, "one shard", 1.25),
        (96, 3, "random", 1.25),
        (96, 3, "crowded", 1.25),
        (96, 8, "random", 1.25),
        (96, 8, "one shard", 1.25),
        (4, 8, "random", 1.25),  # one token on each device, which goes to several
        (96, 8, "one shard", None),  # all in one round, without a loop
        (96, 3, "random", 0.5),
    ],
)
def test_rounds_are_the_sum_over_choices(rng, tokens, choices, routing, room):
    """Values and gradients for tokens that have several experts on a shard, in one round and in several."""
    T, D, F, E, n = tokens, 8, 12, 16, 4
    x, weights = (
        rng.normal(size=(T, D)),
        {name: rng.normal(size=(E, *shape)) for name, shape in {"w_up": (D, F), "w_down": (F, D)}.items()},
    )
    scores = rng.random((T, E)) + {"random": 0, "crowded": np.arange(E) > 11, "one shard": np.arange(E) < 0}[routing]
    if routing == "one shard":
        scores[:, 4:12] += 2.0
    experts = np.argsort(-scores)[:, :choices].astype(np.int32)
    gates, cotangent = rng.normal(size=(T, choices)), rng.normal(size=(T, D))
    arrays = [jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), a) for a in (x, weights, gates, cotangent)]

    def layer(x, weights, gates, experts, **options):
        routing = moe.Routing(experts, gates, jnp.zeros((len(x), E)), jnp.zeros((len(x), E)))
        return moe_mlp(x, routing, weights, num_experts=E, activation=jax.nn.silu, **options)[0]

    def weighted(x, weights, gates, cotangent, experts, **options):
        y = layer(x, weights, gates, experts, **options)
        return (y * cotangent).sum(), y

    def split(*arguments):
        def loss(*arguments):
            value, y = weighted(*arguments, expert_axis="expert", room=room)
            return jax.lax.psum(value, "expert"), y

        return jax.grad(loss, (0, 1, 2), has_aux=True)(*arguments)

    mesh = jax.make_mesh((n,), ("expert",), axis_types=(AxisType.Auto,))
    arguments = (*arrays, jnp.asarray(experts))
    found = jax.jit(jax.shard_map(split, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")))(*arguments)
    truth = jax.jit(jax.grad(partial(weighted, implementation="reference"), (0, 1, 2), has_aux=True))(*arguments)
    assert_close(found, truth)
    program = str(
        jax.make_jaxpr(jax.shard_map(split, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")))(*arguments)
    )
    # The number of rounds is the largest over the shards. One token on each device needs one round in any case.
    assert ("pmax" in program) == (room is not None and tokens > n)


@pytest.mark.parametrize(
    ("choices", "num_experts", "shards"), [(1, 8, 4), (2, 8, 8), (8, 64, 8), (6, 8, 4), (3, 12, 2)]
)
def test_room_for_the_worst_case_is_no_more_than_that(choices, num_experts, shards):
    """All tokens have as many experts as possible on one shard; a token has each expert once."""
    local = num_experts // shards
    room = room_of_shard(64, choices, num_experts, shards, None)
    experts = np.argsort(np.arange(num_experts) // local != 0, kind="stable")[:choices]
    assert room.pairs == room.at_once == 64 * (experts // local == 0).sum()
    assert room.visits == 64
    assert expected_rounds(64, choices, num_experts, shards, None) == 1
    # A whole number of even shares reaches the same sizes, at the latest with one for each shard.
    wide = room_of_shard(64, choices, num_experts, shards, float(shards))
    assert wide.at_once >= room.at_once
    assert wide.visits == room.visits


def test_no_array_of_the_exchange_has_room_for_the_worst_case():
    """Forward and backward, n shards together have room for 1.3 even shares, not for n."""
    T, D, F, E, k, n = 4096, 16, 24, 8, 2, 8
    mesh = jax.make_mesh((n,), ("expert",), axis_types=(AxisType.Auto,))
    x, weights = jnp.zeros((T, D)), {"w_up": jnp.zeros((E, D, F)), "w_down": jnp.zeros((E, F, D))}
    routing = moe.Routing(jnp.zeros((T, k), jnp.int32), jnp.ones((T, k)), jnp.ones((T, E)), jnp.ones((T, E)))

    def loss(x, weights, routing):
        how = {"num_experts": E, "activation": jax.nn.silu, "expert_axis": "expert"}
        return jax.lax.psum(moe_mlp(x, routing, weights, **how)[0].sum(), "expert")

    gradient = jax.shard_map(jax.grad(loss, (0, 1)), mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    (region,) = jax.make_jaxpr(gradient)(x, weights, routing).jaxpr.eqns
    largest = max(np.prod(shape) for shape in shapes_of(region.params["jaxpr"]))
    rows = n * room_of_shard(T // n, k, E, n).pairs
    assert rows < 1.3 * T // n * k
    assert rows * F <= largest <= (rows + 2 * TILE_ROWS[0]) * F  # tiles of the grouped matmul's


# Whole uses


def test_a_hard_gate_is_the_expert_as_a_dense_mlp(rng):
    """They are equal bit for bit: sums of small integers are exact in float32, in any order."""
    x, _, weights, _ = jax.tree.map(lambda a: jnp.round(a * 2) if a.ndim > 1 else a, draw(rng, 600, 32, 48, 4))
    ids = rng.integers(0, 4, 600)
    routing = by_domain(jnp.asarray(ids), 4)
    y, _ = jit_moe_mlp(x, routing, weights, num_experts=4, activation=jax.nn.relu)
    dense_mlp = jax.jit(lambda x, w: (jax.nn.relu(x @ w["w_gate"]) * (x @ w["w_up"])) @ w["w_down"])
    for domain in range(4):
        dense = dense_mlp(x, {name: value[domain] for name, value in weights.items()})
        np.testing.assert_array_equal(np.asarray(y)[ids == domain], np.asarray(dense)[ids == domain])


def test_upcycled_experts_start_as_the_dense_mlp(rng):
    x, router, weights, _ = draw(rng, 24, 8, 12, 4)
    dense = {name: w[0] for name, w in weights.items()}
    experts = moe.upcycle(dense, 4)
    truth = numpy_mlp(*jax.tree.map(lambda a: np.asarray(a, np.float64), (x, dense)))
    assert_close(jit_layer(x, router, experts, 2)[0], truth)

    stacked = moe.upcycle(weights, 3)  # 4 layers
    assert stacked["w_up"].shape == (4, 3, 8, 12)
    assert (stacked["w_down"] == weights["w_down"][:, None]).all()
    with pytest.raises(ValueError, match="experts have no biases, but the dense MLP has b_up"):
        moe.upcycle(dense | {"b_up": jnp.zeros(12)}, 4)


def call(**options):
    T, E = 12, 4
    weights = {"w_up": jnp.zeros((E, 8, 8)), "w_down": jnp.zeros((E, 8, 8))}
    routing = options.pop("routing", None) or moe.top_k_softmax(jnp.zeros((T, E)), 2, normalize=True)
    options = {"num_experts": E, "activation": jax.nn.silu} | options
    return moe_mlp(jnp.zeros((T, 8)), routing, weights, **options)


def call_on_mesh(**options):
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,))
    return jax.shard_map(
        lambda _: call(expert_axis="expert", **options)[0], mesh=mesh, in_specs=P("expert"), out_specs=P("expert")
    )(jnp.zeros(2))


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda: moe.top_k_softmax(jnp.zeros((2, 4)), 5, normalize=True), r"k=5 .* number of experts, 4"),
        (lambda: moe.top_k_softmax(jnp.zeros((2, 4)), 0, normalize=True), r"k=0 "),
        (lambda: moe.top_k_softmax(jnp.zeros((2, 4)), 1, normalize=True), r"without a gradient. Use normalize=False"),
        (lambda: moe.sigmoid_groups(jnp.zeros((2, 6)), jnp.zeros(6), 2, groups=4), r"groups=4 does not divide the 6"),
        (
            lambda: moe.sigmoid_groups(jnp.zeros((2, 6)), jnp.zeros(6), 3, groups=3, top_groups=1),
            r"top_groups=1 group of 2 experts cannot give k=3",
        ),
        (
            lambda: moe.sigmoid_groups(jnp.zeros((2, 6)), jnp.zeros(6), 3, groups=3, top_groups=4),
            r"top_groups=4 is not between 1 and groups=3",
        ),
        (lambda: moe.balance_loss(moe.by_domain(jnp.zeros(6, int), 2), 4), r"batch_rows=4 does not divide the 6"),
        (lambda: call(num_experts=1), r"k=2 choices need as many experts, but num_experts=1"),
        (lambda: call(num_experts=8), r"w_up has 4 experts, but num_experts=8 over 1 shard leaves 8"),
        (lambda: call(implementation="fast"), r"no implementation 'fast'. Use one of ragged, grouped, "),
        (lambda: call(capacity_factor=1.0), r"rows=None does not divide the 12 tokens"),
        (lambda: call(capacity_factor=1.0, rows=5), r"rows=5 does not divide"),
        (lambda: call(capacity_factor=0.0, rows=4), r"capacity_factor=0.0 is not positive"),
        (
            lambda: call(routing=moe.by_domain(jnp.zeros(12, int), 4), capacity_factor=1.25, rows=4),
            r"capacity_factor=1.25 is counted in each sequence, and a hard gate .* Use capacity_factor=None",
        ),
        (lambda: call_on_mesh(num_experts=5), r"mesh.expert=2 does not divide moe.num_experts=5"),
        (lambda: call_on_mesh(), r"w_up has 4 experts, but num_experts=4 over 2 shards leaves 2 to each"),
        (lambda: call_on_mesh(num_experts=8, implementation="reference"), r"runs on one device"),
    ],
)  # fmt: skip
def test_errors(f, message):
    with pytest.raises(ValueError, match=message):
        f()
