"""Models with experts: training step, its sums, conversion from and to dense models. `test_moe.py` tests the parts."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import ENCODER_DECODERS, EXPERTS, FAMILIES, SPARSE

from jaxstack import families
from jaxstack.common.tree import flatten
from jaxstack.config import (
    Config,
    ConfigError,
    DataConfig,
    ExpertLayers,
    LoraConfig,
    MoEConfig,
    OptimConfig,
    TrainConfig,
)
from jaxstack.families import flops, surgery
from jaxstack.features import experts, router_losses
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.models.ops import Ops, implementations
from jaxstack.training import assemble, losses
from jaxstack.training.assemble import make_gradients
from jaxstack.training.state import Recipe, TrainState, make_optimizer

CONTEXTS = {
    "xla": Context(ops=Ops(moe="reference")),
    "ragged": Context(ops=Ops(moe="ragged")),
    "cpu": Context(ops=Ops(**implementations("cpu"))),
}


def hidden_states(cfg, values, batch):
    return families.of(cfg).hidden_states(cfg, values, batch)


def randomised(cfg, rng):
    values = params.init(jax.random.key(0), families.spec(cfg))
    return jax.tree.map(lambda v: v + 0.1 * jnp.asarray(rng.normal(size=v.shape), jnp.float32), values)


def random_batch(cfg, rng, rows=4, length=16):
    ids = rng.integers(0, cfg.vocab, (rows, length + 1)).astype(np.int32)
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_weights": np.ones((rows, length), np.float32)}
    gates = {"domain": cfg.moe.num_experts, "timestep": cfg.moe.max_timestep}
    if cfg.moe.router in gates:
        batch["gate_ids"] = rng.integers(0, gates[cfg.moe.router], (rows, length)).astype(np.int32)
    return batch


def run_config(name, **train) -> Config:
    domains = tuple("abc") if name == "domain" else ()
    return Config(
        model=EXPERTS[name],
        data=DataConfig(seq_len=16, batch_size=4, domains=domains),
        optim=OptimConfig(warmup_steps=0, lr=1e-2),
        train=TrainConfig(steps=10, **train),
    )


@pytest.mark.matrix(quick=["mixtral"])
@pytest.mark.parametrize("name", EXPERTS)
def test_every_implementation_is_the_reference(name, rng):
    cfg = EXPERTS[name]
    values, batch = randomised(cfg, rng), random_batch(cfg, rng)

    def objective(values, ctx):
        sums, aux = losses.loss_sums(cfg, values, batch, ctx)
        counts = router_losses.Counts({"layers": 64.0}, {"layers": 4.0})
        return sums["loss"] / 64 + families.of(cfg).extras(cfg).loss(aux, counts, None), aux

    ways = {n: c for n, c in CONTEXTS.items() if n != "ragged" or name == "mixtral"}
    results = {
        n: jax.jit(jax.value_and_grad(lambda v, c=c: objective(v, c), has_aux=True))(values) for n, c in ways.items()
    }
    (loss, aux), grads = results.pop("xla")
    for way, ((other, other_aux), other_grads) in results.items():
        np.testing.assert_allclose(other, loss, rtol=1e-6, err_msg=way)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), other_aux, aux)
        for path, g in flatten(grads).items():
            difference = jnp.linalg.norm(flatten(other_grads)[path] - g)
            assert difference <= 1e-5 * jnp.linalg.norm(g), (way, path)  # float32 sums in another order


@pytest.mark.parametrize("name", EXPERTS)
def test_every_parameter_is_read(name, rng):
    """It uses finite differences, since the balancing bias is read but has no gradient."""
    cfg = EXPERTS[name]
    values, batch = randomised(cfg, rng), random_batch(cfg, rng)
    loss = jax.jit(lambda v: losses.loss_sums(cfg, v, batch, Context())[0]["loss"])
    for path in flatten(values):
        # A row of one entry moves, so that a bias which moves all experts alike is seen, too.
        moved = jax.tree_util.tree_map_with_path(
            lambda keys, v, path=path: (
                v.at[..., :1].add(3.0) if jax.tree_util.keystr(keys, simple=True, separator="/") == path else v
            ),
            values,
        )
        assert float(loss(moved)) != float(loss(values)), path


@pytest.mark.parametrize("name", ["mixtral", "deepseek"])
def test_every_product_with_the_router_has_the_highest_precision(name):
    """In the lowered program: forward, recomputed and backward. TPUs and GPUs round products of default precision."""
    moe = dataclasses.replace(EXPERTS[name].moe, num_experts=7, num_groups=1, top_k_groups=1)
    cfg = dataclasses.replace(EXPERTS[name], moe=moe)
    run = dataclasses.replace(run_config("mixtral"), model=cfg, train=TrainConfig(dtype="bfloat16", remat="full"))
    values = params.abstract(families.spec(cfg))
    batch = random_batch(cfg, np.random.default_rng(0))
    context = Context(dtype=jnp.bfloat16, remat="full")
    text = jax.jit(make_gradients(run, context)).lower(values, batch).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line and re.search(r"<\d+x7xf32>", line)]
    # Forward, recomputed, the gradient of the tokens, that of the router.
    assert len(products) == 4
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products), products


@pytest.mark.parametrize("name", ["mixtral", "deepseek"])
def test_logits_of_tokens_in_bfloat16_are_a_product_in_float32(name, rng):
    cfg = EXPERTS[name]
    E = cfg.moe.num_experts
    x = jnp.asarray(rng.standard_normal((64, 32)), jnp.bfloat16)
    router = jnp.asarray(rng.standard_normal((32, E)), jnp.float32)
    values = {"router": router, "balance": jnp.zeros(E)}

    def logits(x, router):
        return experts.route(cfg, values | {"router": router}, x, None).logits

    made, pull = jax.vjp(logits, x, router)
    d = jnp.asarray(rng.standard_normal(made.shape), jnp.float32)
    dx, d_router = pull(d)
    wide, w, dy = (np.asarray(a, np.float64) for a in (x, router, d))
    # Sums of 32 or 64 float32 products round at 6e-8 each. A router rounded to bfloat16 would be off by 2e-3.
    for ours, truth, tolerance in ((made, wide @ w, 1e-6), (d_router, wide.T @ dy, 1e-6), (dx, dy @ w.T, 4e-3)):
        assert np.linalg.norm(np.asarray(ours, np.float64) - truth) <= tolerance * np.linalg.norm(truth)
    assert (dx.dtype, d_router.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.matrix(quick=["deepseek"])
@pytest.mark.parametrize("name", ["mixtral", "capacity", "deepseek"])
def test_sums_do_not_depend_on_accumulation(name, rng):
    """MaxText's auxiliary loss does: it fell from 457 to 2.0 with two microbatches."""
    batch = random_batch(EXPERTS[name], rng)
    batch["loss_weights"] *= rng.random(batch["loss_weights"].shape) < 0.7
    batch["loss_weights"][2] = 0
    values = randomised(EXPERTS[name], rng)
    _, whole, sums = jax.jit(make_gradients(run_config(name), Context()))(values, batch)
    _, parts, parts_sums = jax.jit(make_gradients(run_config(name, grad_accum=4), Context()))(values, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), parts_sums, sums)
    assert float(sums["balance_loss"].sum()) > 0
    for path, g in flatten(whole).items():
        assert jnp.linalg.norm(flatten(parts)[path] - g) <= 1e-5 * jnp.linalg.norm(g), path


@pytest.mark.matrix(quick=["mixtral-bfloat16"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("mixtral", "float32"), ("mixtral", "bfloat16"), ("capacity", "float32"), ("deepseek", "bfloat16")],
)
def test_padding_changes_no_statistic_no_loss_and_no_gradient(name, dtype, rng):
    """Padding is rows, and the ends of rows; with a capacity, which counts padding, only rows."""
    run = run_config(name, dtype=dtype)
    moe = dataclasses.replace(run.model.moe, aux_loss_weight=1.0, z_loss_weight=0.1)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, moe=moe))
    values, padded = randomised(run.model, rng), random_batch(run.model, rng)
    rows, length = 3, 16 if name == "capacity" else 11
    batch = {key: value[:rows, :length] for key, value in padded.items()}
    # What counts may weigh anything; sums, and the loss alone, follow the weights.
    batch["loss_weights"] = rng.choice(np.float32([0, 0.5, 1, 2]), (rows, length))
    padded["loss_weights"] = np.zeros_like(padded["loss_weights"])
    padded["loss_weights"][:rows, :length] = batch["loss_weights"]

    @jax.jit
    def gradients(batch):
        loss, grads, sums = make_gradients(run, Context(dtype=jnp.dtype(dtype)))(values, batch)
        return sums, router_losses.routing_metrics(sums), {"loss": loss, **grads}

    sums, _, _ = alone = gradients(batch)
    assert sums["counted_tokens"] == (batch["loss_weights"] != 0).sum() < batch["loss_weights"].size
    # In bfloat16 other shapes may round otherwise (2^-9 a value), and a token between two experts changes sides.
    tolerance = 1e-5 if dtype == "float32" else 5e-2
    for (path, a), b in zip(flatten(gradients(padded)).items(), jax.tree.leaves(alone), strict=True):
        assert jnp.linalg.norm(a - b) <= tolerance * jnp.linalg.norm(b), path


def test_means_of_what_counts_are_those_of_even_scores(rng):
    """With a router of zeros every statistic has a known value, and uncounted tokens change no mean."""
    cfg = run_config("mixtral")
    values, batch = randomised(cfg.model, rng), random_batch(cfg.model, rng)
    values["layers"]["moe"]["router"] *= 0
    batch["loss_weights"] *= rng.random(batch["loss_weights"].shape) < 0.5
    batch["loss_weights"][1] = 0
    _, _, sums = jax.jit(make_gradients(cfg, Context()))(values, batch)
    counts = router_losses.Counts(*({"layers": sums[f"counted_{name}"]} for name in ("tokens", "sequences")))
    assert (counts.tokens["layers"], counts.sequences["layers"]) == (batch["loss_weights"].sum(), 3)
    figures = router_losses.routing_metrics(sums)
    truth = {"load_max_over_mean": 2, "entropy": math.log(4), "balance_loss": 1, "z_loss": math.log(4) ** 2}
    for name, value in truth.items():
        np.testing.assert_allclose(figures[f"moe_{name}"], value, rtol=1e-6, err_msg=name)
    # By the objective's weights, too: 0.01 for the balance loss, 1e-3 for the z-loss.
    objective = families.of(cfg.model).extras(cfg.model).loss(sums, counts, None)
    np.testing.assert_allclose(objective, 0.01 + 1e-3 * math.log(4) ** 2, rtol=1e-6)


def layers_of(every: int) -> ExpertLayers:
    """Returns the layers of Switch Transformers: the second one of each group."""
    return ExpertLayers(first=min(1, every - 1), every=every)


@pytest.mark.matrix
@pytest.mark.parametrize("every", [1, 3])
def test_each_stack_counts_its_own_tokens(every, rng):
    """With routers of zeros every mean is known, however many tokens an encoder and a decoder have, and however many
    of their layers have experts."""
    moe = MoEConfig(num_experts=4, d_ff=16, aux_loss_weight=0.01, z_loss_weight=1e-3, layers=layers_of(every))
    model = dataclasses.replace(ENCODER_DECODERS["t5"], encoder_layers=6, num_layers=3, moe=moe)
    values = params.init(jax.random.key(0), families.spec(model))
    (values["encoder"] if every == 1 else values["encoder"]["layer_1"])["moe"]["router"] *= 0
    values["decoder"]["moe"]["router"] *= 0  # with every=3, the decoder's three layers are three stacks
    lengths = {"encoder": np.array([9, 3, 0, 1]), "decoder": np.array([2, 8, 1, 0])}
    segments = {name: (np.arange(12) < n[:, None]).astype(np.int32) for name, n in lengths.items()}
    tokens = {name: rng.integers(0, model.vocab, (4, 12)).astype(np.int32) for name in ("encoder", "decoder")}
    positions = np.broadcast_to(np.arange(12, dtype=np.int32), (4, 12))
    batch = {
        "encoder_tokens": tokens["encoder"], "encoder_positions": positions, "encoder_segment_ids": segments["encoder"],
        "tokens": tokens["decoder"], "positions": positions, "segment_ids": segments["decoder"],
        "targets": tokens["decoder"], "loss_weights": segments["decoder"].astype(np.float32),
    }  # fmt: skip
    data = DataConfig(seq_len=12, target_len=12, batch_size=4, source="pairs", path="pairs.jsonl")
    cfg = dataclasses.replace(run_config("mixtral"), model=model, data=data)
    _, _, sums = jax.jit(make_gradients(cfg, Context()))(values, batch)
    assert sums["counted_tokens"].tolist() == [13.0] * (6 // every) + [11.0] * (3 // every)
    assert sums["counted_sequences"].tolist() == [3.0] * (9 // every)
    figures = router_losses.routing_metrics(sums)
    truth = {"load_max_over_mean": 2, "entropy": math.log(4), "balance_loss": 1, "z_loss": math.log(4) ** 2}
    for name, value in truth.items():
        np.testing.assert_allclose(figures[f"moe_{name}"], value, rtol=1e-6, err_msg=name)
    penalties = {name: sums[name] for name in ("balance_loss", "z_loss")}
    extras = families.of(model).extras(model)
    objective = extras.loss(penalties, extras.count(batch, Context()), None)
    np.testing.assert_allclose(objective, 0.01 + 1e-3 * math.log(4) ** 2, rtol=1e-6)


def test_losses_and_biases_of_units_with_two_layers_of_experts(rng):
    """Units of a dense layer and two with experts: the mean loss of four routers, and each bias by its own load."""
    moe = MoEConfig(
        num_experts=4, d_ff=16, router="sigmoid", z_loss_weight=1e-3, layers=ExpertLayers(numbers=(1, 2, 4, 5))
    )
    model = dataclasses.replace(FAMILIES["llama3"], num_layers=6, moe=moe)
    values = params.init(jax.random.key(0), families.spec(model))
    for name in ("layer_1", "layer_2"):
        values["layers"][name]["moe"]["router"] *= 0
    batch = random_batch(EXPERTS["mixtral"], rng)
    _, sums = families.of(model).hidden_states(model, values, batch)
    assert sums["load"].shape == (4, 4)
    extras = families.of(model).extras(model)
    loss = extras.loss(sums, extras.count(batch, Context()), None)
    np.testing.assert_allclose(loss, 1e-3 * math.log(4) ** 2, rtol=1e-6)
    load = jnp.array([[9.0, 1, 1, 1], [1, 9, 1, 1], [1, 1, 9, 1], [1, 1, 1, 9]])
    moved = extras.after_update(values, {"load": load}, Context())
    for name, layers in (("layer_1", (0, 2)), ("layer_2", (1, 3))):  # in the order of the layers
        lowered = np.asarray(moved["layers"][name]["moe"]["balance"]).argmin(-1)
        assert lowered.tolist() == list(layers), name


def test_layers_in_a_loop_are_layers_one_by_one(rng):
    """Three stacks, of which one has units of two layers. The tolerance is rounding of float32 in another order."""
    model = SPARSE["listed"]
    values, tokens = randomised(model, rng), rng.integers(0, model.vocab, (2, 9))
    found = {}
    for layers in ("scan", "unrolled"):
        found[layers], values_of_layers = families.forward(model, values, tokens, Context(ops=Ops(layers=layers)))
        assert values_of_layers["load"].shape == (3, 4)
    np.testing.assert_allclose(found["scan"], found["unrolled"], atol=1e-5 * float(jnp.abs(found["scan"]).max()))


def test_the_balance_loss_is_in_the_gradient_by_its_weight(rng):
    """The router's gradient is that of likelihood plus weight x loss, which is linear in the weight."""
    batch, values = random_batch(EXPERTS["mixtral"], rng), randomised(EXPERTS["mixtral"], rng)

    def router(balance: float, z: float):
        cfg = run_config("mixtral")
        moe = dataclasses.replace(cfg.model.moe, aux_loss_weight=balance, z_loss_weight=z)
        cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, moe=moe))
        return flatten(jax.jit(make_gradients(cfg, Context()))(values, batch)[1])["layers/moe/router"]

    none, balance, z = router(0, 0), router(1, 0), router(0, 1)
    assert jnp.linalg.norm(balance - none) > 1e-3 * jnp.linalg.norm(none)
    assert jnp.linalg.norm(z - none) > 1e-3 * jnp.linalg.norm(none)
    np.testing.assert_allclose(router(2, 3) - none, 2 * (balance - none) + 3 * (z - none), atol=1e-5)


def test_a_step_reports_the_load_and_moves_the_bias_against_it(rng):
    cfg = run_config("deepseek")
    tx = make_optimizer(Recipe.of(cfg))
    values = params.init(jax.random.key(0), families.spec(cfg.model))
    # One expert that everybody wants.
    values["layers"]["moe"]["balance"] = values["layers"]["moe"]["balance"].at[:, 3].set(10.0)
    zero = jnp.zeros((), jnp.int32)
    state = TrainState(zero, zero, zero, jnp.zeros(cfg.train.spike.window), values, tx.init(values))
    after, metrics = jax.jit(assemble.make_train_step(cfg, Context()))(state, random_batch(cfg.model, rng))
    assert (
        8 / 3 - 1e-4 < float(metrics["moe_load_max_over_mean"]) <= 8 / 3 + 1e-4
    )  # every token has it among its 3 of 8
    assert float(metrics["moe_dropped_fraction"]) == 0
    assert 0 < float(metrics["moe_entropy"]) <= math.log(8) + 1e-5
    moved = after.params["layers"]["moe"]["balance"] - values["layers"]["moe"]["balance"]
    np.testing.assert_allclose(moved[:, 3], -cfg.model.moe.bias_update_rate, rtol=1e-3)
    assert (moved > 0).any()


def test_the_bias_moves_by_its_rate_unless_it_is_frozen():
    cfg = dataclasses.replace(
        EXPERTS["deepseek"], moe=dataclasses.replace(EXPERTS["deepseek"].moe, bias_update_rate=0.25)
    )
    values = {"layers": {"moe": {"balance": jnp.full((2, 8), 0.5), "w": jnp.ones(2)}}, "head": 1}
    load = np.array([[9, 0, 4, 4, 4, 4, 4, 3], [5, 5, 5, 5, 5, 5, 5, 5]], np.float32)  # means of 4 and 5
    moved = families.of(cfg).extras(cfg).after_update(values, {"load": jnp.asarray(load)}, Context())
    assert moved["layers"]["moe"]["balance"].tolist() == [[0.25, 0.75, 0.5, 0.5, 0.5, 0.5, 0.5, 0.75], [0.5] * 8]
    assert (moved["head"], moved["layers"]["moe"]["w"].tolist()) == (1, [1, 1])
    for other in (dataclasses.replace(cfg, lora=LoraConfig(rank=2)), EXPERTS["mixtral"], FAMILIES["llama3"]):
        assert families.of(other).extras(other).after_update(values, {"load": jnp.asarray(load)}, Context()) is values


def test_dropped_pairs_are_reported(rng):
    cfg = run_config("capacity")
    values = randomised(cfg.model, rng)
    values["layers"]["moe"]["router"] *= 0  # all scores alike: the first experts take everything
    _, _, sums = jax.jit(make_gradients(cfg, Context()))(values, random_batch(cfg.model, rng))
    # Room for ceil(0.75 x 16 x 2 / 4) = 6 of the 16 pairs of a sequence at each of two experts.
    np.testing.assert_array_equal(sums["dropped"], [4 * 20] * 2)


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_hard_gates_expert_is_a_dense_model(context, rng):
    """Bit for bit in the reference, whose matmuls have the dense model's shapes. In tiles of rows the same products may
    be summed in another order, as the processor has it; that the products are the same is shown with integers in
    `test_moe`."""
    cfg = EXPERTS["domain"]
    values, batch = randomised(cfg, rng), random_batch(cfg, rng)
    tokens, ctx = batch["tokens"], CONTEXTS[context]
    for expert in range(cfg.moe.num_experts):
        gate = jnp.full(tokens.shape, expert)
        whole, _ = jax.jit(lambda v, g: families.forward(cfg, v, tokens, ctx, gate_ids=g))(values, gate)
        dense, dense_values = surgery.extract_expert(cfg, values, expert)
        alone, aux = jax.jit(lambda v, d=dense: families.forward(d, v, tokens, ctx))(dense_values)
        assert aux == {}
        if ctx.ops.moe == "ragged":
            assert (whole == alone).all()
        np.testing.assert_allclose(whole, alone, atol=1e-5 * float(jnp.abs(alone).max()))


def test_dense_layers_stay_before_an_expert(rng):
    cfg = dataclasses.replace(
        EXPERTS["domain"], moe=dataclasses.replace(EXPERTS["domain"].moe, layers=ExpertLayers(first=1))
    )
    values, tokens = randomised(cfg, rng), random_batch(cfg, rng)["tokens"]
    whole, _ = families.forward(cfg, values, tokens, gate_ids=jnp.full(tokens.shape, 2))
    alone, _ = families.forward(*surgery.extract_expert(cfg, values, 2), tokens)
    np.testing.assert_allclose(whole, alone, atol=1e-5 * float(jnp.abs(alone).max()))


def test_an_expert_is_as_wide_as_it_was_and_shared_ones_keep_it_from_being_a_model():
    moe = dataclasses.replace(EXPERTS["domain"].moe, d_ff=24)
    cfg = dataclasses.replace(EXPERTS["domain"], moe=moe)
    values = params.init(jax.random.key(0), families.spec(cfg))
    dense, found = surgery.extract_expert(cfg, values, 1)
    assert (dense.d_ff, dense.moe) == (24, MoEConfig())
    assert {path: v.shape for path, v in flatten(found).items()} == {
        path: p.shape for path, p in params.flat_spec(families.spec(dense)).items()
    }
    with pytest.raises(ConfigError, match="with 1 shared expert is not a hard gate"):
        surgery.extract_expert(dataclasses.replace(cfg, moe=dataclasses.replace(moe, shared_experts=1)), values, 1)


@pytest.mark.parametrize("first", [0, 1])
def test_an_up_cycled_model_starts_as_the_dense_one(first, rng):
    cfg = dataclasses.replace(FAMILIES["qwen3"])
    values, tokens = randomised(cfg, rng), rng.integers(0, 61, (2, 9))
    moe = MoEConfig(num_experts=4, top_k=2, layers=ExpertLayers(first=first))
    grown, grown_values = surgery.upcycle(cfg, values, moe, jax.random.key(1))
    assert jax.tree.map(jnp.shape, grown_values) == jax.tree.map(
        lambda p: p.shape, params.abstract(families.spec(grown))
    )
    dense, _ = families.forward(cfg, values, tokens)
    sparse, _ = families.forward(grown, grown_values, tokens)
    np.testing.assert_allclose(sparse, dense, atol=1e-5 * float(jnp.abs(dense).max()))


@pytest.mark.matrix
@pytest.mark.parametrize("every", [1, 3])
def test_both_stacks_of_an_encoder_decoder_are_converted(every, rng):
    """Up-cycled, it computes what the dense model does. One expert of the result has the dense weights, in order."""
    cfg = dataclasses.replace(ENCODER_DECODERS["t5"], encoder_layers=6, num_layers=3)
    values = params.init(jax.random.key(0), families.spec(cfg))
    positions = np.broadcast_to(np.arange(7, dtype=np.int32), (2, 7))
    batch = {f"{side}{name}": np.ones((2, 7), np.int32) for side in ("", "encoder_") for name in ("segment_ids",)}
    batch |= {f"{side}positions": positions for side in ("", "encoder_")}
    batch |= {f"{side}tokens": rng.integers(0, cfg.vocab, (2, 7)) for side in ("", "encoder_")}
    moe = MoEConfig(num_experts=4, top_k=2, layers=layers_of(every))
    grown, grown_values = surgery.upcycle(cfg, values, moe, jax.random.key(1))
    assert jax.tree.map(jnp.shape, grown_values) == jax.tree.map(
        lambda p: p.shape, params.abstract(families.spec(grown))
    )
    dense, _ = families.of(cfg).hidden_states(cfg, values, batch)
    sparse, _ = families.of(grown).hidden_states(grown, grown_values, batch)
    np.testing.assert_allclose(sparse, dense, atol=1e-5 * float(jnp.abs(dense).max()))

    gates = dataclasses.replace(grown, moe=MoEConfig(num_experts=4, router="domain", layers=layers_of(every)))
    routed = params.init(jax.random.key(2), families.spec(gates))
    batch |= {f"{side}gate_ids": np.full((2, 7), 3) for side in ("", "encoder_")}
    whole, _ = families.of(gates).hidden_states(gates, routed, batch)
    alone, _ = hidden_states(*surgery.extract_expert(gates, routed, 3), batch)
    np.testing.assert_allclose(whole, alone, atol=1e-5 * float(jnp.abs(alone).max()))


def test_active_parameters_are_what_is_counted():
    cfg = EXPERTS["mixtral"]
    dense = dataclasses.replace(cfg, moe=MoEConfig(), d_ff=2 * 96)
    router = cfg.num_layers * cfg.d_model * cfg.moe.num_experts
    assert flops.matmul_params(cfg) == flops.matmul_params(dense) + router


def test_mistakes_are_named(rng):
    with pytest.raises(ConfigError, match=r"top_k=5 is more than model.moe.num_experts=4"):
        MoEConfig(num_experts=4, top_k=5)
    with pytest.raises(ConfigError, match="top_k=1 with normalize"):
        MoEConfig(num_experts=4, top_k=1)
    for router in ("domain", "timestep"):
        with pytest.raises(ConfigError, match=rf"capacity_factor=1.25 .* model.moe.router={router} .*=null"):
            MoEConfig(num_experts=8, router=router, capacity_factor=1.25)
    with pytest.raises(ConfigError, match=r"model\.bias=true is for dense layers"):
        dataclasses.replace(FAMILIES["gpt2"], moe=MoEConfig(num_experts=4))
    with pytest.raises(ConfigError, match=r"data.domains=\[\] has 0 patterns, .* has 3 experts"):
        Config(model=EXPERTS["domain"])
    with pytest.raises(ConfigError, match=r"set without model.moe.router=domain"):
        Config(data=DataConfig(domains=("a",)))
    with pytest.raises(ConfigError, match="needs diffusion time"):
        Config(model=EXPERTS["timestep"])
    with pytest.raises(ValueError, match=r"needs the batch array `gate_ids`"):
        families.forward(EXPERTS["domain"], randomised(EXPERTS["domain"], rng), np.zeros((1, 4), np.int32))
    with pytest.raises(ConfigError, match="is not a hard gate"):
        surgery.extract_expert(EXPERTS["mixtral"], {}, 0)
    with pytest.raises(ConfigError, match=r"expert 3 does not exist"):
        surgery.extract_expert(EXPERTS["domain"], {}, 3)
    with pytest.raises(ConfigError, match="d_ff=7 differs"):
        surgery.upcycle(FAMILIES["llama3"], {}, MoEConfig(num_experts=2, d_ff=7), jax.random.key(0))
    narrow = MoEConfig(num_experts=2, d_ff=7, router="domain", layers=layers_of(2))
    with pytest.raises(ConfigError, match=r"d_ff=7 differs from the .* layers of two widths"):
        surgery.extract_expert(dataclasses.replace(ENCODER_DECODERS["t5"], moe=narrow), {}, 0)
