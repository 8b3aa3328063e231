"""The train step: accumulation, bad steps, meshes, and learning to a known optimum."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack import families
from jaxstack.common.tree import flatten
from jaxstack.config import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    SpikeConfig,
    TrainConfig,
)
from jaxstack.families.context import make_context
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.models.ops import Ops
from jaxstack.sharding import make_mesh
from jaxstack.training import assemble, losses
from jaxstack.training.state import Recipe, abstract_state, init_state, make_state

TINY = ModelConfig(num_layers=2, d_model=32, num_heads=4, d_ff=64, vocab_size=19, max_positions=16)


def config(**groups) -> Config:
    base = {
        "model": TINY,
        "data": DataConfig(seq_len=16, batch_size=8),
        "optim": OptimConfig(warmup_steps=0, lr=1e-2),
        "train": TrainConfig(steps=10),
    }
    return Config(**base | groups)


def build(cfg: Config, devices: int = 1, **how):
    """Returns a state on a mesh, the jitted step, and its context."""
    mesh = make_mesh(MeshConfig(devices), cfg.data.batch_size // cfg.train.grad_accum, jax.devices()[:devices])
    ctx = make_context(cfg, mesh)
    ctx = dataclasses.replace(ctx, ops=dataclasses.replace(ctx.ops, **how))
    return (
        make_state(Recipe.of(cfg), ctx, abstract_state(Recipe.of(cfg), ctx)),
        jax.jit(assemble.make_train_step(cfg, ctx)),
        ctx,
    )


def random_batch(cfg: Config, rng: np.random.Generator, weights: bool = True) -> dict[str, np.ndarray]:
    shape = (cfg.data.batch_size, cfg.data.seq_len)
    ids = rng.integers(0, cfg.model.vocab, (shape[0], shape[1] + 1)).astype(np.int32)
    keep = rng.random(shape) < rng.random((shape[0], 1)) if weights else np.ones(shape)
    keep[0, 0] = 1
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_weights": keep.astype(np.float32)}


def relative(a, b) -> float:
    return float(jnp.linalg.norm(a - b) / jnp.maximum(jnp.linalg.norm(b), 1e-12))


# A step moves by 1e4 times the gradient: against so large a move the rounding of the parameters is nothing.
SGD = OptimConfig(name="sgd", lr=1e4, b1=0.0, warmup_steps=0, schedule="constant", weight_decay=0.0, clip_norm=None)


def test_accumulation_gives_the_gradient_of_the_whole_batch(rng):
    """Rows differ widely in how many tokens count; one step of SGD changes parameters by the gradient."""
    whole = config(optim=SGD)
    batch = random_batch(whole, rng)
    state, one_step, _ = build(whole)
    a, a_metrics = one_step(state, batch)
    before, a = flatten(state.params), flatten(a.params)
    for accum in (2, 8):  # microbatches of several rows, and of one
        _, many_steps, _ = build(config(optim=SGD, train=TrainConfig(steps=10, grad_accum=accum)))
        b, b_metrics = many_steps(state, batch)
        np.testing.assert_allclose(a_metrics["loss"], b_metrics["loss"], rtol=1e-6)
        np.testing.assert_allclose(a_metrics["grad_norm"], b_metrics["grad_norm"], rtol=1e-5)
        b = flatten(b.params)
        for path in before:
            # float32 sums over 128 tokens in another order
            assert relative(b[path] - before[path], a[path] - before[path]) < 1e-5, (accum, path)


def test_the_loss_is_the_mean_over_weighted_tokens(rng):
    cfg = config()
    batch = random_batch(cfg, rng)
    state, train_step, _ = build(cfg)
    logits, _ = families.forward(cfg.model, state.params, batch["tokens"])
    nll = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), batch["targets"][..., None], -1)[..., 0]
    expected = (nll * batch["loss_weights"]).sum() / batch["loss_weights"].sum()
    np.testing.assert_allclose(train_step(state, batch)[1]["loss"], expected, rtol=1e-5)


def test_the_data_mesh_changes_nothing(rng):
    """Initial values are bit-equal; loss and every gradient agree to float32's order of summation."""
    cfg = config(optim=SGD)
    batch = random_batch(cfg, rng)
    one, one_step, _ = build(cfg)
    many, many_step, ctx = build(cfg, 8)  # 2 and 4 are rows of test_meshes.py
    for path, value in flatten(one.params).items():
        assert (np.asarray(value) == np.asarray(flatten(many.params)[path])).all(), path
    placed = jax.device_put(batch, jax.NamedSharding(ctx.layout.mesh, jax.P("data")))
    a, a_metrics = one_step(one, batch)
    b, b_metrics = many_step(many, placed)
    np.testing.assert_allclose(a_metrics["loss"], b_metrics["loss"], rtol=1e-6)
    before, a, b = (jax.tree.map(np.asarray, flatten(s.params)) for s in (one, a, b))
    for path in before:
        assert relative(b[path] - before[path], a[path] - before[path]) < 1e-5, path


@pytest.mark.matrix(quick=["[selective"])
@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_unrolled_layers_have_the_gradients_of_a_loop(remat, rng):
    """In float32 they differ by the order of sums. In bfloat16 they are as near to float32 as those of the loop are."""
    change, rng_seed = {}, int(rng.integers(2**31))
    for dtype in ("float32", "bfloat16"):
        cfg = config(optim=SGD, train=TrainConfig(steps=10, remat=remat, dtype=dtype))
        batch = random_batch(cfg, np.random.default_rng(rng_seed))
        for layers in ("scan", "unrolled"):
            state, train_step, _ = build(cfg, layers=layers)
            after, _ = train_step(state, batch)
            change[dtype, layers] = jax.tree.map(jnp.subtract, flatten(after.params), flatten(state.params))
    for path, exact in change["float32", "scan"].items():
        assert relative(change["float32", "unrolled"][path], exact) < 1e-5, path
        error = {layers: relative(change["bfloat16", layers][path], exact) for layers in ("scan", "unrolled")}
        assert error["unrolled"] < 1.25 * error["scan"] + 1e-3, (path, error)


@pytest.mark.matrix(quick=["nan-branch", "inf-select"])
@pytest.mark.parametrize("update", ["branch", "select"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(poison, update, rng):
    cfg = config()
    state, train_step, _ = build(cfg, update=update)
    good, bad = random_batch(cfg, rng), random_batch(cfg, rng)
    bad["loss_weights"][0, 0] = poison
    state, _ = train_step(state, good)
    after, metrics = train_step(state, bad)
    assert not np.isfinite(metrics["loss"])
    for path, value in flatten((after.params, after.opt_state)).items():
        assert (np.asarray(value) == np.asarray(flatten((state.params, state.opt_state))[path])).all(), path
    assert (int(after.step), int(after.skipped), int(after.skipped_in_a_row)) == (2, 1, 1)
    twice, _ = train_step(after, bad)
    assert (int(twice.skipped), int(twice.skipped_in_a_row)) == (2, 2)
    healed, metrics = train_step(twice, good)
    assert (int(healed.step), int(healed.skipped), int(healed.skipped_in_a_row)) == (4, 2, 0)
    relapsed, _ = train_step(healed, bad)
    assert (int(relapsed.skipped), int(relapsed.skipped_in_a_row)) == (3, 1)
    # The optimizer has made one update so far, and the learning rate reported is that of the second.
    assert float(metrics["lr"]) == float(train_step(state, good)[1]["lr"])


def test_it_learns_a_markov_chain_down_to_its_entropy():
    """On tokens of a random first-order chain, the loss comes close to the chain's entropy, its lower bound."""
    rng = np.random.default_rng(5)
    V = 8
    transition = rng.dirichlet(np.full(V, 0.3), V)
    stationary = np.linalg.matrix_power(transition, 200)[0]
    entropy = -(stationary[:, None] * transition * np.log(transition)).sum()
    cfg = config(
        model=dataclasses.replace(TINY, num_layers=1, vocab_size=V),
        data=DataConfig(seq_len=32, batch_size=32),
        optim=OptimConfig(lr=1e-2, warmup_steps=10, weight_decay=0.0),
        train=TrainConfig(steps=150),
    )
    state, train_step, _ = build(cfg)
    cumulative = transition.cumsum(1)

    def sample():
        ids = np.empty((32, 33), np.int32)
        ids[:, 0] = rng.choice(V, 32, p=stationary)
        for t in range(1, 33):
            ids[:, t] = (rng.random((32, 1)) > cumulative[ids[:, t - 1]]).sum(1)
        return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_weights": np.ones((32, 32), np.float32)}

    tail = []
    for i in range(150):
        state, metrics = train_step(state, sample())
        if i >= 130:
            tail.append(float(metrics["loss"]))
    excess = np.mean(tail) - entropy
    # 20 batches of 1,024 tokens, whose loss varies by about 1 nat a token: the mean is known to 0.007.
    assert -0.03 < excess < 0.05, (np.mean(tail), entropy)


@pytest.mark.matrix(quick=["[muon"])
@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor", "lion", "sgd"])
def test_every_optimizer_learns_one_batch_by_heart(name, rng):
    lr = {"adamw": 1e-2, "muon": 1e-2, "adafactor": 1e-2, "lion": 2e-3, "sgd": 0.3}[name]
    cfg = config(optim=OptimConfig(name=name, lr=lr, warmup_steps=2, weight_decay=0.0), train=TrainConfig(steps=60))
    batch = random_batch(cfg, rng, weights=False)
    state, train_step, _ = build(cfg)
    first = None
    for _ in range(60):
        state, metrics = train_step(state, batch)
        first = first or float(metrics["loss"])
    assert float(metrics["loss"]) < 0.7 * first


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_master_weights_and_optimizer_stay_float32(dtype, rng):
    cfg = config(train=TrainConfig(steps=10, dtype=dtype))
    state, train_step, _ = build(cfg)
    state, metrics = train_step(state, random_batch(cfg, rng))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"float32", "int32"}
    assert metrics["loss"].dtype == jnp.float32


@pytest.mark.matrix
def test_dropout_follows_from_seed_and_step_alone(rng):
    cfg = config(model=dataclasses.replace(TINY, dropout=0.5), optim=SGD)
    batch = random_batch(cfg, rng)
    state, train_step, _ = build(cfg)
    same, _ = train_step(state, batch)
    again, metrics = train_step(state, batch)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), same, again))
    later = dataclasses.replace(state, step=state.step + 1)
    assert float(train_step(later, batch)[1]["loss"]) != float(metrics["loss"])
    sharded, sharded_step, _ = build(cfg, 4)
    np.testing.assert_allclose(sharded_step(sharded, batch)[1]["loss"], metrics["loss"], rtol=1e-6)
    _, accumulated, _ = build(dataclasses.replace(cfg, train=TrainConfig(steps=10, grad_accum=4)))
    np.testing.assert_allclose(accumulated(state, batch)[1]["loss"], metrics["loss"], rtol=1e-6)


def test_the_chunked_loss_is_the_loss(rng):
    cfg = config(model=dataclasses.replace(TINY, logit_softcap=3.0))
    values = params.init(jax.random.key(0), families.spec(cfg.model))
    batch = random_batch(cfg, rng)
    loss = functools.partial(losses.loss_sums, cfg.model)
    (a, _), (b, _) = (
        loss(values, batch, Context(ops=Ops(cross_entropy=implementation))) for implementation in ("xla", "chunked")
    )
    np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-6)


def spiking(**spike) -> Config:
    return config(train=TrainConfig(steps=10, spike=SpikeConfig(window=3, **spike)))


def same(a, b) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: bool((np.asarray(x) == np.asarray(y)).all()), a, b))


def test_the_first_state_follows_from_the_seed():
    state = init_state(Recipe.of(config(run=RunConfig(seed=7))))
    assert same(state.params, params.init(jax.random.key(7), families.spec(TINY)))
    assert not state.recent.any()
    assert (int(state.step), int(state.skipped), int(state.skipped_in_a_row)) == (0, 0, 0)


def test_recent_losses_are_those_of_the_last_good_steps_oldest_first(rng):
    cfg = spiking()
    state, train_step, _ = build(cfg)
    good = []
    for i in range(6):
        batch, before = random_batch(cfg, rng), state.recent
        if i == 3:
            batch["loss_weights"][0, 0] = np.nan
        state, metrics = train_step(state, batch)
        if i == 3:
            assert same(state.recent, before)
        else:
            good.append(metrics["loss"])
            assert same(state.recent, np.array([0.0] * 3 + good, np.float32)[-3:])


@pytest.mark.matrix(quick=["[skip"])
@pytest.mark.parametrize("action", ["report", "skip", "rollback"])
def test_a_spike_is_skipped_unless_it_is_only_reported(action, rng):
    """The last losses were 1, so a loss of about 3 is a spike after enough good steps."""
    cfg = spiking(action=action)
    batch = random_batch(cfg, rng)
    state, train_step, _ = build(cfg)
    state = dataclasses.replace(state, recent=jnp.ones(3), step=jnp.int32(3))
    after, metrics = train_step(state, batch)
    assert (int(metrics["spike"]), int(after.step), int(after.skipped)) == (1, 4, int(action != "report"))
    for leaves in ("params", "opt_state", "recent"):
        assert same(getattr(after, leaves), getattr(state, leaves)) == (action != "report"), leaves
    early, metrics = train_step(dataclasses.replace(state, step=jnp.int32(4), skipped=jnp.int32(2)), batch)
    assert (int(metrics["spike"]), int(early.skipped)) == (0, 2)


def test_a_gradient_that_is_not_finite_is_skipped_though_the_loss_is_finite(rng, monkeypatch):
    real = assemble.make_gradients

    def poisoned(*settings):
        def gradients(*args):
            loss, grads, sums = real(*settings)(*args)
            scale = grads["final_norm"]["scale"].at[0].set(np.inf)
            return loss, grads | {"final_norm": {"scale": scale}}, sums

        return gradients

    monkeypatch.setattr(assemble, "make_gradients", poisoned)
    cfg = config()
    state, train_step, _ = build(cfg)
    after, metrics = train_step(state, random_batch(cfg, rng))
    assert np.isfinite(metrics["loss"])
    assert same((after.params, after.opt_state, after.recent), (state.params, state.opt_state, state.recent))
    assert (int(after.step), int(after.skipped), int(after.skipped_in_a_row)) == (1, 1, 1)


@pytest.mark.parametrize("accum", [1, 4])
def test_evaluation_sums_over_weights_and_drops_nothing(rng, accum):
    cfg = config(model=dataclasses.replace(TINY, dropout=0.5), train=TrainConfig(steps=10, grad_accum=accum))
    batch = random_batch(cfg, rng)
    batch["loss_weights"] *= rng.random(batch["loss_weights"].shape).astype(np.float32)
    values = params.init(jax.random.key(0), families.spec(cfg.model))
    total, tokens, right = jax.jit(assemble.make_eval_step(cfg.model, Context()))(values, batch)
    assert right is None  # of next tokens the loss is the aim
    logits, _ = families.forward(cfg.model, values, batch["tokens"])
    nll = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), batch["targets"][..., None], -1)[..., 0]
    np.testing.assert_allclose(total["loss"], (nll * batch["loss_weights"]).sum(dtype=np.float64), rtol=1e-5)
    np.testing.assert_allclose(tokens["loss"], batch["loss_weights"].sum(dtype=np.float64), rtol=1e-6)


def test_microbatches_are_summed_in_float32_whatever_the_dtype_of_the_pass(rng):
    """The step's gradient is the sum of the gradients of each microbatch, added in float64."""
    cfg = config(train=TrainConfig(steps=10, grad_accum=8, dtype="bfloat16"))
    # All tokens count: then the divisors differ by a power of two, and nothing rounds otherwise.
    batch, ctx = random_batch(cfg, rng, weights=False), Context(dtype=jnp.bfloat16)
    values = params.init(jax.random.key(0), families.spec(cfg.model))
    _, got, sums = jax.jit(assemble.make_gradients(cfg, ctx))(values, batch)
    one = jax.jit(assemble.make_gradients(dataclasses.replace(cfg, train=TrainConfig(steps=10, dtype="bfloat16")), ctx))
    expected = dict.fromkeys(flatten(values), 0.0)
    for i in range(8):
        micro = {name: a[i::8] for name, a in batch.items()}
        for path, leaf in flatten(one(values, micro)[1]).items():
            expected[path] = expected[path] + np.asarray(leaf, np.float64) / 8
    np.testing.assert_allclose(sums["tokens"], batch["loss_weights"].sum())
    for path, leaf in flatten(got).items():
        assert leaf.dtype == jnp.float32, path
        # Float32 sums of eight; sums rounded to bfloat16 would be off by some 0.003.
        assert relative(leaf, expected[path]) < 1e-5, path
