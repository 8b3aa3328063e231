"""An update that is not finite is skipped. Where the settings exclude one, nothing checks it."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_optim import SPEC, WIDE
from test_step import TINY, build, config, random_batch, same

from jaxstack.common.tree import flatten
from jaxstack.config import DataConfig, LoraConfig, MeshConfig, OptimConfig, RunConfig, TrainConfig
from jaxstack.config.reading import parse
from jaxstack.debug.update import explain_update
from jaxstack.families.context import make_context
from jaxstack.models.context import Context
from jaxstack.models.params import flat_spec, map_spec
from jaxstack.sharding import make_mesh
from jaxstack.training import assemble, optimizer, step
from jaxstack.training.state import Recipe, abstract_state, init_state, make_state

CONFIGS = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))
OPTIMIZERS = ("adamw", "muon", "adafactor", "lion", "sgd")
BOTH = SPEC | {"wide": WIDE["layers"]}
STEPS = 1000


def hostile_gradients(rng, largest: float):
    """Yields trees of finite gradients whose elements are at most `largest`, by name."""
    size = sum(p.size for p in flat_spec(BOTH).values())

    def tree(draw):
        return map_spec(lambda p: jnp.asarray(draw(p.shape), jnp.float32), BOTH)

    most = largest / size**0.5  # so that the norm is finite in float32
    zero_rows = map_spec(lambda p: jnp.full(p.shape, most, jnp.float32).at[..., : p.shape[-1] // 2].set(0), BOTH)
    yield "zeros", tree(np.zeros)
    yield "below the normal numbers", tree(lambda shape: np.full(shape, 1e-40))
    yield "squares that vanish", tree(lambda shape: 1e-25 * rng.choice([-1.0, 1.0], shape))
    yield "ordinary", tree(lambda shape: rng.normal(size=shape))
    yield "largest", tree(lambda shape: most * rng.choice([-1.0, 1.0], shape))
    yield "largest beside zeros", zero_rows
    yield "one element", tree(lambda shape: np.eye(1, int(np.prod(shape)), 0).reshape(shape) * most)
    yield "of all sizes", tree(lambda shape: most * 10 ** rng.uniform(-40, 0, shape))
    yield "zeros after these", tree(np.zeros)


def bad_arrays(tx, values, updates, state) -> list[str]:
    results = flatten({"parameter": optax.apply_updates(values, updates), "state": state})
    return [name for name, array in results.items() if not np.isfinite(np.asarray(array, np.float32)).all()]


@pytest.mark.random
@pytest.mark.matrix(quick=["1.0-adamw", "None-sgd", "1.0-adafactor"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip", [1.0, None])
def test_settings_that_exclude_such_an_update_do(name, clip, rng):
    """One gradient follows another, with the defaults and at the limits, and every update and state is finite."""
    cfg = OptimConfig(name=name, clip_norm=clip, lr=0.1, warmup_steps=0, weight_decay=10.0, b1=0.999, b2=1 - 1e-6)
    if name == "adafactor" and clip is None:
        assert not optimizer.updates_are_bounded(cfg, STEPS)
        return
    assert optimizer.updates_are_bounded(cfg, STEPS)
    tx = optimizer.optimizer(cfg, STEPS, BOTH)
    values = map_spec(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), BOTH)
    state, update = tx.init(values), jax.jit(tx.update)
    for kind, grads in hostile_gradients(rng, 1e19):
        assert np.isfinite(optax.global_norm(grads)), kind
        updates, state = update(grads, state, values)
        assert bad_arrays(tx, values, updates, state) == [], kind
        values = optax.apply_updates(values, updates)


@pytest.mark.random
@pytest.mark.matrix(quick=["adamw-{'eps': 0.0", "lion-{'lr'", "sgd-{'lr'"])
@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, {"eps": 0.0}) for name in ("adamw", "muon")),
        *((name, {"eps": 1e-39, "clip_norm": 1e-30}) for name in ("adamw", "muon")),
        *((name, {"lr": 1e38, "clip_norm": None}) for name in OPTIMIZERS),
        *((name, {"weight_decay": 1e38, "lr": 10.0}) for name in OPTIMIZERS),
        *((name, {"b2": 1 - 1e-9}) for name in ("adamw", "muon")),
        ("muon", {"b1": 1 - 1e-9}),
    ],
    ids=str,
)
def test_settings_that_allow_such_an_update_are_checked(name, how, rng):
    """Some finite gradient makes a parameter not finite, and `all_finite` says so of exactly these updates."""
    cfg = OptimConfig(**{"name": name, "warmup_steps": 0, "schedule": "constant"} | how)
    assert not optimizer.updates_are_bounded(cfg, STEPS)
    tx = optimizer.optimizer(cfg, STEPS, SPEC)
    values = map_spec(lambda p: jnp.asarray(10 * rng.normal(size=p.shape), jnp.float32), SPEC)

    @jax.jit
    def update(grads, state):
        updates, state = tx.update(grads, state, values)
        return updates, state, step.all_finite((optax.apply_updates(values, updates), state))

    found = set()
    for _, grads in hostile_gradients(rng, 1e19):
        updates, state, finite = update({name: grads[name] for name in SPEC}, tx.init(values))
        assert bool(finite) == (bad_arrays(tx, values, updates, state) == [])
        found.add(bool(finite))
    assert False in found


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_no_shipped_configuration_checks_its_updates(path):
    """So their steps are the programs that they were."""
    cfg = parse.parse_config([f"--config={path}"])
    assert optimizer.updates_are_bounded(cfg.optim, cfg.train.steps)


def unseen_tokens(cfg, rng):
    """Returns a batch with few of the tokens: the gradients of the other rows of the table are zero."""
    batch = random_batch(cfg, rng)
    return batch | {name: batch[name] % 5 for name in ("tokens", "targets")}


NO_EPS = OptimConfig(eps=0.0, warmup_steps=0)


@pytest.mark.parametrize(
    ("update", "devices"), [("branch", 1), pytest.param("select", 1, marks=pytest.mark.matrix), ("branch", 2)]
)
def test_an_update_that_is_not_finite_changes_nothing_and_is_counted(update, devices, rng):
    """On several devices, too, of which only some have a bad row of the table."""
    cfg = config(optim=NO_EPS, data=DataConfig(seq_len=16, batch_size=8))
    state, train_step, _ = build(cfg, devices, update=update)
    batch = unseen_tokens(cfg, rng)
    after, metrics = train_step(state, batch)
    assert np.isfinite(metrics["loss"])
    assert np.isfinite(metrics["grad_norm"])
    assert same((after.params, after.opt_state, after.recent), (state.params, state.opt_state, state.recent))
    assert (int(after.step), int(after.skipped), int(after.skipped_in_a_row)) == (1, 1, 1)


@pytest.mark.matrix
def test_stages_accumulation_and_adapters_go_the_same_way(rng):
    """The first gradient of half of the adapters is zero, because the other half is."""
    cfg = config(
        run=RunConfig(init_from="base"),
        model=dataclasses.replace(TINY, vocab_size=20, lora=LoraConfig(rank=2)),
        optim=NO_EPS,
        train=TrainConfig(steps=10, grad_accum=2),
        mesh=MeshConfig(data=1, pipe=2, fsdp=2),
    )
    ctx = make_context(cfg, make_mesh(cfg.mesh, 4, jax.devices()[:4]))
    abstract = abstract_state(Recipe.of(cfg), ctx)
    state = make_state(Recipe.of(cfg), ctx, abstract)
    before = jax.device_get(state)
    batch = jax.device_put(unseen_tokens(cfg, rng), ctx.layout.sharding(ctx.layout.batch))
    after, metrics = assemble.jit_train_step(cfg, ctx, abstract)(state, batch)
    assert np.isfinite(metrics["grad_norm"])
    assert int(after.skipped) == 1
    assert same((after.params, after.opt_state), (before.params, before.opt_state))


def test_a_state_that_overflows_is_skipped_though_the_update_is_finite(rng, monkeypatch):
    """No optimizer of ours does this. One whose state is infinite and whose update is zero is skipped all the same."""

    def update(grads, state, values=None):
        return jax.tree.map(jnp.zeros_like, grads), jax.tree.map(lambda s: s + jnp.inf, state)

    zeros = optax.GradientTransformation(lambda values: jax.tree.map(jnp.zeros_like, values), update)
    monkeypatch.setattr(assemble, "make_optimizer", lambda cfg, ctx: zeros)
    cfg = config(optim=NO_EPS)
    state = init_state(Recipe.of(cfg))
    state = dataclasses.replace(state, opt_state=zeros.init(state.params))
    after, _ = jax.jit(assemble.make_train_step(cfg, Context()))(state, random_batch(cfg, rng))
    assert int(after.skipped) == 1
    assert same(after.opt_state, state.opt_state)


def test_debug_names_optimizer_parameter_and_reason(rng):
    cfg = config(optim=NO_EPS, model=dataclasses.replace(TINY, num_layers=1))

    def explained(cfg):
        recipe = Recipe.of(cfg)
        gradients = assemble.make_gradients(cfg, Context())
        return [*explain_update(recipe, gradients, Context(), init_state(recipe), unseen_tokens(cfg, rng))]

    lines = explained(cfg)
    text = "\n".join(lines)
    assert lines[0].startswith("update   optim.name=adamw makes ")
    assert lines[1].startswith("where    the parameter embedding/tokens, first at [5, 0]: float32 ")
    assert "\nreason   div of 0 and 0 gives nan\n" in text
    assert "in scale_by_adam" in text
    assert lines[-1].startswith("fix      optim.eps=0 ")
    assert lines[-1].endswith("Use optim.eps=1e-08.")
    fine = dataclasses.replace(cfg, optim=OptimConfig(warmup_steps=0))
    assert explained(fine) == []
