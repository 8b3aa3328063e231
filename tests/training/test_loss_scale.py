"""Training in float16: the scale of the loss changes no digit, small gradients stay, and an overflow costs one step."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_meshes as meshes
import test_precision as precision

from jaxstack import config as configs
from jaxstack.common.errors import ConfigError
from jaxstack.config.training import LossScaleConfig
from jaxstack.families.context import make_context
from jaxstack.sharding import abstract_mesh, make_mesh
from jaxstack.training import assemble
from jaxstack.training.features import loss_scale
from jaxstack.training.state import LossScale, Recipe, TrainState, abstract_state, make_state

CASES = [
    ("gpt2", {}, {"accum": 4}),
    ("softmax", {"fsdp": 2, "expert": 2}, {"remat": "selective"}),  # two losses of the router
    ("llama3", {"data": 2, "fsdp": 2, "tensor": 2}, {"packing": True, "accum": 2}),
    ("sigmoid", {"pipe": 2, "expert": 2}, {}),
    ("llama3", {"context": 2, "tensor": 2}, {}),
    ("gpt2", {"pipe": 2, "fsdp": 2}, {"schedule": "zb_h1", "microbatches": 4}),
    ("gpt2", {"fsdp": 2, "tensor": 2, **meshes.AUTO}, {}),
    ("clip", {"data": 2}, {"accum": 4}),
    ("t5", {"pipe": 2, "tensor": 2}, {"tokens": 32_768}),  # few pairs are noisy, see `precision.PAIRS_BOUND`
    ("dit", {"fsdp": 2}, {}),
    ("bert", {"fsdp": 2, "tensor": 2}, {"accum": 2}),
    ("lora", {"fsdp": 2}, {}),
]
QUICK = CASES[:1]
PARAMS = [
    pytest.param(
        c, id=precision.name_of(c), marks=() if c in QUICK else meshes.SLOW if c in CASES[:5] else meshes.MATRIX
    )
    for c in CASES
]


def with_scale(batch: dict[str, np.ndarray], cfg: configs.Config, scale: float) -> dict[str, np.ndarray]:
    places = batch[assemble.objective_of(cfg.model).terms[0].weights].shape
    return batch | {"loss_scale": np.full(places, scale, np.float32)}


def in_float32(cfg, ctx):
    """Builds the gradients of a run in float16, computed in float32."""
    return assemble.make_gradients(cfg, dataclasses.replace(ctx, dtype=jnp.dtype("float32")))


@pytest.mark.parametrize("case", PARAMS)
def test_a_power_of_two_changes_no_digit_of_a_gradient(case):
    """In float32 nothing overflows or vanishes, so loss, sums and gradients have the same bits with every scale."""
    family, mesh, how = case
    cfg = precision.config(family, mesh, "float16", **how | {"tokens": meshes.BATCH * meshes.SEQ})
    batch = precision.text_like(0, cfg)
    results = [
        meshes.gradients(cfg, 0, make=in_float32, batch=with_scale(batch, cfg, scale)) for scale in (1.0, 2.0**15)
    ]
    for name in results[0][1]:
        assert results[0][1][name].any() or name.endswith("balance"), name
    jax.tree.map(np.testing.assert_array_equal, *[(loss, grads) for loss, grads, _ in results])


@pytest.mark.parametrize("case", PARAMS)
def test_every_gradient_in_float16_is_near_that_in_float32(case):
    """The bounds are a fourth of those in bfloat16, which has three bits less. Routing and cancellation add noise."""
    family, mesh, how = case
    cfg = precision.config(family, mesh, "float16", **{"tokens": 8192} | how)
    batch = precision.text_like(0, cfg)
    _, short, _ = meshes.gradients(cfg, 0, batch=with_scale(batch, cfg, 2.0**16))
    exact_cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, dtype="float32"))
    _, exact, _ = meshes.gradients(exact_cfg, 0, batch=batch)
    total = math.sqrt(sum(float(np.square(g).sum()) for g in exact.values()))
    is_pairs = cfg.model.family == "encoder_decoder"
    for path, g in exact.items():
        bound = precision.TABLE_BOUND if path.startswith("relative/") else precision.BOUND
        bound = precision.PAIRS_BOUND if is_pairs and bound == precision.BOUND else bound
        # The true gradient of a bias of keys is zero: its rounding is compared with all gradients.
        size = total if path.endswith("attention/b_k") else np.linalg.norm(g)
        assert np.linalg.norm(short[path] - g) <= bound / 4 * size, path


def test_small_gradients_vanish_without_a_scale_and_stay_with_one():
    """A scale of 1/2,048 in a batch of 2,048 tokens is what a scale of 1 is in a batch of 4 million tokens."""
    cfg = precision.config("llama3", {}, "float16", tokens=2048)
    batch = precision.text_like(0, cfg)
    exact_cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, dtype="float32"))
    _, exact, _ = meshes.gradients(exact_cfg, 0, batch=batch)
    errors = {}
    for scale in (2.0**-11, 2.0**14):
        _, short, _ = meshes.gradients(cfg, 0, batch=with_scale(batch, cfg, scale))
        errors[scale] = max(np.linalg.norm(short[p] - g) / np.linalg.norm(g) for p, g in exact.items())
    assert errors[2.0**-11] > 0.5, errors
    assert errors[2.0**14] < precision.BOUND / 4, errors


def steps_of(scale: float, interval: int | None = 2) -> tuple[TrainState, assemble.TrainStep, dict]:
    cfg = precision.config("llama3", {}, "float16", tokens=256)
    optim = dataclasses.replace(cfg.optim, warmup_steps=0)
    train = dataclasses.replace(cfg.train, loss_scale=LossScaleConfig(scale, interval))
    cfg = dataclasses.replace(cfg, optim=optim, train=train)
    ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.data.batch_size, jax.devices()[:1]))
    state = make_state(Recipe.of(cfg), ctx, abstract_state(Recipe.of(cfg), ctx))
    return state, jax.jit(assemble.make_train_step(cfg, ctx)), precision.text_like(0, cfg)


def test_an_overflow_skips_the_step_and_halves_the_scale():
    state, train_step, batch = steps_of(2.0**24)
    scales = []
    before = state
    for _ in range(24):
        new, metrics = train_step(state, batch)
        scales.append(float(metrics["loss_scale"]))
        if metrics["overflow"]:
            kept = (new.params, new.opt_state, new.recent)
            jax.tree.map(np.testing.assert_array_equal, kept, (before.params, before.opt_state, before.recent))
            assert np.isfinite(metrics["loss"])
            assert not np.isfinite(metrics["grad_norm"])
            assert float(new.loss_scale.scale) == scales[-1] / 2
        else:
            break
        state = new
    skipped = len(scales) - 1
    assert skipped > 2
    assert scales == [2.0 ** (24 - i) for i in range(len(scales))]
    assert np.isfinite(metrics["grad_norm"])
    assert (int(new.skipped), int(new.step)) == (skipped, skipped + 1)
    assert int(metrics["skipped_in_a_row"]) == 0  # `train.max_bad_steps` does not count what a smaller scale repairs
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), new.params, state.params)
    assert any(jax.tree.leaves(changed))


@pytest.mark.parametrize(("scale", "interval", "in_a_row"), [(8.0, 2, 0), (1.0, 2, 1), (8.0, None, 1)])
def test_an_overflow_with_a_scale_that_cannot_be_halved_is_a_bad_step(scale, interval, in_a_row):
    """So `train.max_bad_steps` ends the run. The step below skips, as a step with an infinite gradient does."""
    state, _, batch = steps_of(scale, interval)

    def skipping(state, batch):
        metrics = {"loss": jnp.float32(2), "grad_norm": jnp.float32(jnp.inf), "skipped_in_a_row": jnp.int32(1)}
        return dataclasses.replace(state, skipped_in_a_row=state.skipped_in_a_row + 1), metrics

    objective = assemble.objective_of(precision.config("llama3", {}, "float16", tokens=256).model)
    step = loss_scale.with_loss_scale(skipping, LossScaleConfig(scale, interval), objective)
    new, metrics = step(state, batch)
    assert int(metrics["overflow"]) == 1
    assert int(new.skipped_in_a_row) == int(metrics["skipped_in_a_row"]) == in_a_row
    assert float(new.loss_scale.scale) == (scale if in_a_row else scale / 2)


def test_the_scale_is_halved_and_doubled_as_declared():
    """The sequence is computed by hand."""
    cfg = LossScaleConfig(8.0, 3)
    now = LossScale(jnp.float32(8), jnp.int32(0))
    seen = []
    for overflow in (0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1, 1, 0):
        now = loss_scale.adapted(now, jnp.array(bool(overflow)), cfg)
        seen.append((float(now.scale), int(now.good_steps)))
    assert [scale for scale, _ in seen] == [8, 8, 16, 8, 8, 8, 16, 8, 4, 2, 1, 1, 1]
    assert [steps for _, steps in seen] == [1, 2, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 1]
    top = LossScale(jnp.float32(2**24), jnp.int32(2))
    assert float(loss_scale.adapted(top, jnp.array(False), cfg).scale) == 2**24


def test_without_an_interval_the_scale_stays():
    still = LossScale(jnp.float32(8), jnp.int32(0))
    for overflow in (True, False):
        assert float(loss_scale.adapted(still, jnp.array(overflow), LossScaleConfig(8.0, None)).scale) == 8


def test_a_scale_that_is_not_a_power_of_two_is_refused():
    with pytest.raises(ConfigError, match=r"train.loss_scale.initial=1000.0 is not a power of two. Use 65536"):
        LossScaleConfig(1000.0)


def test_a_tpu_refuses_float16():
    cfg = precision.config("llama3", {}, "float16", tokens=256)
    with pytest.raises(ConfigError, match=r"train.dtype=float16 is for GPUs"):
        make_context(cfg, abstract_mesh(cfg.mesh, cfg.data.batch_size, 1), "tpu")


def test_other_dtypes_have_no_scale_in_their_state():
    """Checkpoints of other runs keep their form."""
    cfg = precision.config("llama3", {}, "bfloat16", tokens=256)
    ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.data.batch_size, jax.devices()[:1]))
    assert abstract_state(Recipe.of(cfg), ctx).loss_scale is None
