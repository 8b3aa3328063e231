"""Compares states of heads and their convolution with NumPy in float64, with `transformers`, and over devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxstack import kernels
from jaxstack.kernels import StateTokens, states
from jaxstack.kernels.context_attention import order

B, N, H, K, V = 2, 2, 4, 5, 3
BORDERS = [0, 7, 8, 40, 64, 69]
"""First tokens of documents: one of a single token, one at the border of a chunk of 8 and of 64."""


KINDS = {"delta": StateTokens.unit, "plain": StateTokens}
"""The gated delta rule, and the recurrence of Mamba-2."""


def drawn(rng, length=75, kind="delta"):
    """Returns queries, keys, values, decays, and for the delta rule betas."""
    q, k = rng.normal(size=(2, B, length, N, K))
    v = rng.normal(size=(B, length, H, V))
    decay = -np.exp(rng.normal(size=(B, length, H)))
    beta = 1 / (1 + np.exp(-rng.normal(size=(B, length, H))))
    return [a.astype(np.float32) for a in (q, k, v, decay, beta)][: 5 if kind == "delta" else 4]


def starts_of(length=75):
    return np.tile(np.isin(np.arange(length), BORDERS), (B, 1))


def by_hand(arguments, starts, state):
    """Follows one head at a time, in float64."""
    q, k, v, decay, *betas = (a.astype(np.float64) for a in arguments)
    out, last = np.zeros_like(v), np.zeros((B, H, K, V))
    for b in range(B):
        for h in range(H):
            S = state[b, h].astype(np.float64)
            for t in range(q.shape[1]):
                query, key = (a[b, t, h // (H // N)] for a in (q, k))
                S = np.zeros((K, V)) if starts[b, t] else np.exp(decay[b, t, h]) * S
                value = v[b, t, h]
                for beta in betas:
                    query, key = (a / np.sqrt((a**2).sum() + 1e-6) for a in (query, key))
                    query, value = query / np.sqrt(K), beta[b, t, h] * (value - S.T @ key)
                S = S + np.outer(key, value)
                out[b, t, h] = S.T @ query
            last[b, h] = S
    return out, last


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rule", [kernels.recurrent_states, partial(kernels.chunked_states, chunk=8)])
def test_the_rule_is_that_of_the_definition(rule, packed, kind, rng):
    arguments = drawn(rng, kind=kind)
    state = rng.normal(size=(B, H, K, V)).astype(np.float32)
    starts = starts_of() if packed else np.zeros((B, 75), bool)
    expected = by_hand(arguments, starts, state)
    found = jax.jit(rule)(KINDS[kind](*arguments, starts=starts if packed else None), state=state)
    for got, wanted in zip(found, expected, strict=True):  # float32 sums through a chain of 75 tokens
        np.testing.assert_allclose(got, wanted, atol=1e-5 * np.abs(wanted).max())


def weighted(rule, kind, weights, arguments):
    out, state = rule(KINDS[kind](*arguments, starts=starts_of()))
    return (out.astype(jnp.float32) * weights).sum() + (state * weights[:, 0, :, None]).sum()


def exact(rule, kind, weights, arguments):
    out, state = rule(KINDS[kind](*arguments, starts=starts_of()))
    return (out * weights).sum() + (state * weights[:, 0, :, None]).sum()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_have_the_gradients_of_the_recurrence(dtype, kind, rng):
    """In bfloat16 both compute in float32, so that gradients differ by one rounding."""
    weights = rng.normal(size=(B, 75, H, V)).astype(np.float32)
    arguments = [jnp.asarray(a, dtype) for a in drawn(rng, kind=kind)]
    arguments[3] = arguments[3].astype(jnp.float32)
    rules = kernels.recurrent_states, kernels.chunked_states
    one, other = (jax.jit(jax.grad(partial(weighted, rule, kind, weights)))(arguments) for rule in rules)
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.linalg.norm(a - b) < (1e-5 if dtype == "float32" else 4e-3) * np.linalg.norm(a)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_are_the_recurrence_in_float64(kind, rng):
    """Values and gradients agree to the precision of float64, so that no term is left out that rounding could hide."""
    weights = rng.normal(size=(B, 75, H, V))
    with jax.enable_x64(True):
        arguments = [jnp.asarray(a, jnp.float64) for a in drawn(rng, kind=kind)]
        rules = kernels.recurrent_states, partial(kernels.chunked_states, chunk=8)
        found = [jax.jit(jax.value_and_grad(partial(exact, rule, kind, weights)))(arguments) for rule in rules]
    (one, grads), (other, theirs) = found
    assert float(one) == pytest.approx(float(other), rel=1e-12)
    for a, b in zip(grads, theirs, strict=True):
        assert a.dtype == np.float64
        assert np.linalg.norm(a - b) < 1e-11 * np.linalg.norm(a)


def test_a_strong_decay_and_equal_keys_stay_finite(rng):
    """Equal keys with beta 1 make the largest triangular system, and a decay of e^-50 a token would overflow apart."""
    q, k, v, decay, beta = drawn(rng, 64)
    k = np.broadcast_to(k[:, :1], k.shape)
    arguments = [q, k, v, decay * 0 - np.where(np.arange(64) % 2, 50, 0)[:, None], beta * 0 + 1]
    run = jax.jit(jax.value_and_grad(lambda a: kernels.chunked_states(StateTokens.unit(*a))[0].sum()))
    value, grads = run([jnp.asarray(a, jnp.float32) for a in arguments])
    assert all(np.isfinite(g).all() for g in grads)
    expected = by_hand(arguments, np.zeros((B, 64), bool), np.zeros((B, H, K, V)))[0].sum()
    assert float(value) == pytest.approx(expected, rel=1e-5)


def test_a_token_with_decay_0_and_beta_0_changes_no_state(rng):
    arguments = drawn(rng, 9)
    arguments[3][:, 5:] = 0
    arguments[4][:, 5:] = 0
    _, all_tokens = kernels.chunked_states(StateTokens.unit(*arguments))
    _, some = kernels.chunked_states(StateTokens.unit(*[a[:, :5] for a in arguments]))
    np.testing.assert_allclose(all_tokens, some, atol=1e-6)


def test_value_heads_that_key_heads_cannot_share_are_refused(rng):
    q, k, v, decay, beta = drawn(rng, 4)
    with pytest.raises(ValueError, match="3 value heads cannot be shared by 2 key heads"):
        kernels.chunked_states(StateTokens.unit(q, k, v[:, :, :3], decay[..., :3], beta[..., :3]))


def test_the_convolution_reads_the_last_tokens_of_a_document(rng):
    x, w = rng.normal(size=(B, 75, 6)).astype(np.float32), rng.normal(size=(4, 6)).astype(np.float32)
    ids = np.cumsum(starts_of(), 1)
    expected = np.zeros((B, 75, 6))
    for t in range(75):
        for ago in range(min(t + 1, 4)):
            expected[:, t] += np.where(ids[0, t - ago] == ids[0, t], w[3 - ago] * x[:, t - ago].astype(np.float64), 0)
    same = kernels.same_document(jnp.asarray(ids), 4)
    np.testing.assert_allclose(kernels.causal_convolution(x, w, same=same), expected, atol=1e-5)
    moved = kernels.causal_convolution(x, w, bias=w[0], same=same)
    np.testing.assert_allclose(moved, expected + w[0], atol=1e-5)
    whole = kernels.causal_convolution(x, w)
    later = kernels.causal_convolution(x[:, 9:], w, earlier=x[:, 6:9])
    np.testing.assert_allclose(later, whole[:, 9:], atol=1e-6)
    np.testing.assert_allclose(whole[:, 0], w[3] * x[:, 0], atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shards", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_states_pass_from_shard_to_shard(shards, kind, rng):
    """A sequence over devices gives the result and the gradients of one device, also across documents."""
    length = 64
    weights = rng.normal(size=(B, length, H, V)).astype(np.float32)
    arguments, starts, places = drawn(rng, length, kind), starts_of(length), order(shards, length)
    mesh = jax.make_mesh((shards,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:shards])

    def one(arguments):
        return (kernels.chunked_states(KINDS[kind](*arguments, starts=starts), chunk=8)[0] * weights).sum()

    def local(arguments, starts, weights):
        out = kernels.context_states(KINDS[kind](*arguments, starts=starts), axes=("context",), chunk=8)
        return jax.lax.psum((out * weights).sum(), "context")

    where = PartitionSpec(None, "context")
    split = jax.shard_map(local, mesh=mesh, in_specs=(where, where, where), out_specs=PartitionSpec())
    ordered = [a[:, places] for a in arguments]
    value, grads = jax.jit(jax.value_and_grad(split))(ordered, starts[:, places], weights[:, places])
    expected, theirs = jax.jit(jax.value_and_grad(one))(arguments)
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    for got, wanted in zip(grads, theirs, strict=True):
        wanted = np.asarray(wanted)[:, places]
        assert np.linalg.norm(got - wanted) < 1e-5 * np.linalg.norm(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("theirs", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_transformers_has_the_same_values_and_gradients(theirs, dtype, rng):
    torch = pytest.importorskip("torch", reason="needs the extra [parity]")
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    ours = [jnp.asarray(a, dtype) for a in drawn(rng, 150)]
    ours[3] = ours[3].astype(jnp.float32)
    tensors = [torch.tensor(np.asarray(a, np.float32)).to(getattr(torch, str(a.dtype))) for a in ours]
    tensors = [t.requires_grad_() for t in tensors]
    q, k, v, decay, beta = tensors
    weights = rng.normal(size=(B, 150, H, V)).astype(np.float32)
    out, state = getattr(modeling, theirs)(
        q, k, v, g=decay, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    (out.float() * torch.from_numpy(weights)).sum().backward()
    rule = kernels.chunked_states if "chunk" in theirs else kernels.recurrent_states
    found, last = rule(StateTokens.unit(*ours))
    grads = jax.grad(lambda a: (rule(StateTokens.unit(*a))[0].astype(jnp.float32) * weights).sum())(ours)
    # Both compute in float32; in bfloat16, results and gradients are rounded once.
    tolerance = 1e-5 if dtype == "float32" else 4e-3
    pairs = [(found, out.detach()), (last, state.detach()), *zip(grads, (t.grad for t in tensors), strict=True)]
    for got, wanted in pairs:
        wanted = wanted.float().numpy()
        assert np.linalg.norm(np.asarray(got, np.float32) - wanted) < tolerance * np.linalg.norm(wanted)


def test_chunks_have_one_size_of_at_most_64_tokens():
    """Compiled programs of all lengths hold matrices of 64 by 64 tokens, not of the whole sequence."""
    shapes = [jax.ShapeDtypeStruct((1, 256, *rest), jnp.float32) for rest in ((1, 8), (1, 8), (1, 8), (1,), (1,))]
    text = jax.jit(kernels.chunked_states).lower(StateTokens(*shapes)).as_text()
    assert f"{states.CHUNK}x{states.CHUNK}xf32" in text
    assert "256x256" not in text
