"""Adapters: their declarations, what they compute and do not change, and complete runs with them."""

import dataclasses
import json
import shutil
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
import test_meshes as meshes
from families import EXPERTS, FAMILIES
from lines import lines, values
from test_train import ROOT, environment

from jaxstack import data, families, hf, sharding
from jaxstack.checkpoint import store
from jaxstack.common.tree import flatten
from jaxstack.config import Config, ConfigError, DataConfig, LoraConfig, OptimConfig, RunConfig, TrainConfig
from jaxstack.config.reading import parse
from jaxstack.families import flops as plan
from jaxstack.families.context import make_context
from jaxstack.features.adapters import merge_adapters
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.training import assemble, losses
from jaxstack.training.assemble import make_gradients
from jaxstack.training.state import Recipe, abstract_state, init_state

ALL = FAMILIES | EXPERTS
LORA = LoraConfig(rank=3, alpha=6)


def config(family, adapters=LORA, **optim):
    return Config(
        run=RunConfig(init_from="base"),
        model=replace(ALL[family], lora=adapters),
        data=DataConfig(seq_len=16, batch_size=4, domains=tuple("abc") if family == "domain" else ()),
        train=TrainConfig(steps=40),
        optim=OptimConfig(**{"lr": 1e-2, "warmup_steps": 0, "weight_decay": 0.1} | optim),
    )


def batch_of(cfg, rng):
    ids = rng.integers(0, cfg.vocab, (4, 17)).astype(np.int32)
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_weights": np.ones((4, 16), np.float32)}
    if cfg.moe.router == "domain":
        batch["gate_ids"] = rng.integers(0, cfg.moe.num_experts, (4, 16)).astype(np.int32)
    return batch


def values_of(cfg, rng, std=0.3):
    """Returns parameters whose adapters are not zero."""
    trained, frozen = params.partition(families.spec(cfg), initial(cfg))
    return params.combine(jax.tree.map(lambda v: v + rng.normal(0, std, v.shape).astype(np.float32), trained), frozen)


def initial(cfg):
    return jax.device_get(jax.jit(lambda: params.init(jax.random.key(0), families.spec(cfg)))())


# --- declarations -----------------------------------------------------------------------------------------------------


def test_adapters_stand_beside_their_matrices():
    cfg = replace(ALL["mixtral"], lora=replace(LORA, targets=("attention/w_[qo]", "moe/w_up")))
    spec = params.flat_spec(families.spec(cfg))
    base = params.flat_spec(families.spec(cfg.base))
    assert {path for path, p in spec.items() if not p.frozen} == spec.keys() - base.keys()
    assert all(dataclasses.replace(spec[path], frozen=False) == p for path, p in base.items())
    shapes = {path.removeprefix("layers/"): (spec[path].shape, spec[path].axes) for path in spec.keys() - base.keys()}
    L, D, H, K, r = 2, 32, 4, 8, 3
    assert shapes == {
        "attention/lora_a_q": ((L, D, r), ("layers", "embed", "lora")),
        "attention/lora_b_q": ((L, r, H, K), ("layers", "lora", "heads", "head_dim")),
        "attention/lora_a_o": ((L, H, K, r), ("layers", "heads", "head_dim", "lora")),
        "attention/lora_b_o": ((L, r, D), ("layers", "lora", "embed")),
        "moe/lora_a_up": ((L, 4, D, r), ("layers", "experts", "expert_embed", "lora")),
        "moe/lora_b_up": ((L, 4, r, 96), ("layers", "experts", "lora", "mlp")),
    }
    assert spec["layers/attention/lora_a_o"].in_axes == 2
    assert spec["layers/attention/lora_a_o"].std == D**-0.5


def test_targets_are_whole_names():
    cfg = dataclasses.replace(FAMILIES["llama3"], lora=LoraConfig(rank=2, targets=("attention/w_q|mlp/w",)))
    names = [path for path in params.flat_spec(families.spec(cfg)) if "lora_" in path]
    assert names == ["layers/attention/lora_a_q", "layers/attention/lora_b_q"]


def test_all_matrices_of_a_block_but_the_router_by_default():
    spec = params.flat_spec(families.spec(replace(ALL["deepseek"], lora=LORA)))
    found = {path.split("/", 1)[1] for path, p in spec.items() if not p.frozen and "lora_a_" in path}
    assert found == {
        *(f"attention/lora_a_{n}" for n in "qkvo"),
        *(f"{at}/lora_a_{n}" for at in ("moe", "moe/shared") for n in ("up", "gate", "down")),
    }


def test_split_and_join(rng):
    spec = families.spec(replace(ALL["gpt2"], lora=LORA))
    values = params.abstract(spec)
    trained, frozen = params.partition(spec, values)
    assert trained.keys() == {"layers"}
    assert jax.tree.structure(params.combine(trained, frozen)) == jax.tree.structure(values)
    assert all(
        a is b for a, b in zip(jax.tree.leaves(params.combine(trained, frozen)), jax.tree.leaves(values), strict=True)
    )
    base = families.spec(ALL["gpt2"])
    assert params.partition(base, base) == (base, {})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LoraConfig(rank=-1), r"model\.lora\.rank=-1 is out of range"),
        (lambda: LoraConfig(alpha=0), r"model\.lora\.alpha=0 is out of range"),
        (lambda: LoraConfig(targets=()), "targets is empty"),
        (lambda: LoraConfig(targets=("(",)), "is not a regular expression"),
        (lambda: replace(config("llama3"), run=RunConfig()), r"run\.init_from is not set. Name a run or a Hugging"),
        (
            lambda: families.spec(replace(ALL["llama3"], lora=replace(LORA, targets=("attention",)))),
            r"the pattern 'attention' matches no matrix of a layer. Use names among attention/w_k, .*mlp/w_up",
        ),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(ConfigError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


# --- what is computed -------------------------------------------------------------------------------------------------


SLOW = pytest.mark.matrix


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "deepseek", "capacity"])
def test_fresh_adapters_change_nothing_and_merged_ones_compute_the_same(family, rng):
    cfg = replace(ALL[family], lora=LORA)
    tokens = batch_of(cfg, rng)["tokens"]
    forward = jax.jit(families.forward, static_argnums=0)
    base, fresh = initial(cfg.base), initial(cfg)
    expected = forward(cfg.base, base, tokens)[0]
    np.testing.assert_array_equal(forward(cfg, fresh, tokens)[0], expected)  # b is zero: exactly
    values = values_of(cfg, rng, 0.1)
    merged = merge_adapters(cfg.lora, values)
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    got, want = forward(cfg, values, tokens)[0], forward(cfg.base, merged, tokens)[0]
    assert np.abs(want - expected).max() > 0.1
    # The same sums in another order: float32's rounding, of logits of the order of one through two layers. On a
    # tie, a router may choose another expert, and the rest of that row differs. Two ties in four rows are unlikely.
    differ = (np.abs(got - want) > 5e-5).any((1, 2))
    assert tokens.shape[0] == 4
    assert differ.sum() <= int(cfg.moe.num_experts > 0)


@pytest.mark.parametrize("family", ["llama3", pytest.param("mixtral", marks=SLOW)])
def test_gradients_are_those_of_the_merged_model_by_the_chain_rule_and_by_differences(family, rng):
    cfg = config(family)
    values, batch = values_of(cfg.model, rng, 0.1), batch_of(cfg.model, rng)
    gradients = jax.jit(make_gradients(cfg, Context()))
    of_merged = jax.jit(make_gradients(replace(cfg, model=cfg.model.base), Context()))
    loss, grads, _ = gradients(values, batch)
    loss_of_merged, of_weights, _ = of_merged(merge_adapters(LORA, values), batch)
    assert float(loss) == pytest.approx(float(loss_of_merged), rel=1e-5)
    fresh = initial(cfg.model)
    assert (
        gradients(fresh, batch)[0] == of_merged(params.partition(families.spec(cfg.model), fresh)[1], batch)[0]
    )  # exactly

    found, expected, held = flatten(grads), flatten(of_weights), flatten(values)
    assert found.keys() == {path for path in held if "/lora_" in path}
    for path in (p for p in found if "lora_a_" in p):
        path_b, path_w = path.replace("lora_a_", "lora_b_"), path.replace("lora_a_", "w_")
        a, b, dw = (np.asarray(x, np.float64) for x in (held[path], held[path_b], expected[path_w]))
        lead = a.ndim + b.ndim - 2 - dw.ndim
        flat = lambda x, rows, lead=lead: x.reshape(*x.shape[:lead], rows, -1)  # noqa: E731
        a, b = a.reshape(*a.shape[:lead], -1, LORA.rank), flat(b, LORA.rank)
        dw = dw.reshape(*dw.shape[:lead], a.shape[-2], b.shape[-1])
        scale = LORA.alpha / LORA.rank
        # float32 sums in another order; a wrong factor or index is of the order of one.
        for got, want in (
            (found[path], scale * dw @ b.swapaxes(-1, -2)),
            (found[path_b], scale * a.swapaxes(-1, -2) @ dw),
        ):
            assert np.linalg.norm(np.asarray(got).ravel() - want.ravel()) < 1e-4 * np.linalg.norm(want), path

    if family == "mixtral":
        return  # a small step may change an expert's choice
    trained, frozen = params.partition(families.spec(cfg.model), values)
    steepness = float(optax.global_norm(grads))

    def moved(by):
        return params.combine(jax.tree.map(lambda v, g: v + by / steepness * np.asarray(g), trained, grads), frozen)

    # Steps of 1e-3 along the gradient: the loss is known to about 1e-6, its slope so to 1e-3.
    ahead, behind = (float(gradients(moved(by), batch)[0]) for by in (1e-3, -1e-3))
    assert (ahead - behind) / 2e-3 == pytest.approx(steepness, rel=1e-2)


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "optim"), [("llama3", "lion"), ("deepseek", "muon"), ("gpt2", "adafactor")])
def test_only_adapters_move_and_have_moments(family, optim, rng):
    """`deepseek` has a bias that balances its experts without a gradient; it does not change, either."""
    cfg = config(family, name=optim)
    batch = batch_of(cfg.model, rng)
    heard = trained(cfg, lambda i: batch, 12)
    assert heard[-1] < 0.97 * heard[0]  # rank 3, untrained base, 12 steps: slowly, but it learns


def trained(cfg, batch, steps):
    """Returns the losses of `steps` steps; the base has stayed, bit for bit, the adapters have not, and they alone have
    moments."""
    state = jax.jit(lambda: init_state(Recipe.of(cfg)))()
    before, spec = flatten(jax.device_get(state.params)), families.spec(cfg.model)
    adapters = params.flat_spec(params.partition(spec, spec)[0])
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert moments
    assert sum(m.size for m in moments) <= 2 * sum(np.prod(p.shape) for p in adapters.values()) + len(adapters) * 2
    train_step, heard = jax.jit(assemble.make_train_step(cfg, Context())), []
    for i in range(steps):
        state, metrics = train_step(state, batch(i))
        heard.append(float(metrics["loss"]))
    after = flatten(state.params)
    for path, value in before.items():
        if path in adapters:
            assert (value != after[path]).any(), path
        else:
            np.testing.assert_array_equal(value, after[path], err_msg=path)
    return heard


@pytest.mark.slow
def test_the_gradient_of_a_frozen_matrix_is_not_computed():
    """Two of the three products of a matrix remain, and the products of the adapters."""
    cfg = config("llama3", replace(LORA, rank=1))
    cfg = replace(cfg, model=replace(cfg.model, d_model=128, head_dim=32, d_ff=256, vocab_size=512))
    flops = {}
    for name, one in (("adapters", cfg), ("all", replace(cfg, model=cfg.model.base))):
        values = params.abstract(families.spec(one.model))
        batch = batch_of(one.model, np.random.default_rng(0))
        compiled = jax.jit(make_gradients(one, Context())).lower(values, batch).compile()
        flops[name] = compiled.cost_analysis()["flops"]
    assert flops["adapters"] < 0.75 * flops["all"]
    ours = {n: plan.flops_per_token(m, 16).full for n, m in (("adapters", cfg.model), ("all", cfg.model.base))}
    assert ours["adapters"] / ours["all"] == pytest.approx(flops["adapters"] / flops["all"], abs=0.05)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["lora_t5", "lora_switch"])
def test_adapters_of_an_encoder_decoder_are_those_of_the_merged_model(name, rng):
    """Both stacks have them, and every layer of a unit; gradients are those through the merged matrices."""
    cfg = meshes.MODELS[name]
    spec = families.spec(cfg)
    trained = [path for path, p in params.flat_spec(spec).items() if not p.frozen]
    matrices = [path for path, p in params.flat_spec(families.spec(cfg.base)).items() if p.kind == "matrix"]
    assert sorted(trained) == sorted(
        path.replace("w_", f"lora_{part}_")
        for path in matrices
        if path.startswith(("encoder/", "decoder/"))
        for part in "ab"
    )
    fresh = jax.device_get(params.init(jax.random.key(0), spec))
    adapters, base = params.partition(spec, fresh)
    moved = jax.tree.map(lambda v: v + rng.normal(0, 0.1, v.shape).astype(np.float32), adapters)
    batch = meshes.random_batch(0, False, cfg)

    def loss(model, values):
        return losses.loss_sums(model, values, batch, Context())[0]["loss"]

    def own(adapters):
        return loss(cfg, params.combine(adapters, base))

    def merged(adapters):
        return loss(cfg.base, merge_adapters(cfg.lora, params.combine(adapters, base)))

    one, other = (jax.jit(jax.value_and_grad(f))(moved) for f in (own, merged))
    # Sums of float32 in another order: x w + (x a) b, and x (w + a b).
    np.testing.assert_allclose(one[0], other[0], rtol=1e-5)
    for path, gradient in flatten(other[1]).items():
        assert np.linalg.norm(flatten(one[1])[path] - gradient) <= 1e-4 * np.linalg.norm(gradient), path
    np.testing.assert_allclose(jax.jit(own)(adapters), jax.jit(lambda: loss(cfg.base, base))(), rtol=1e-6)


# --- whole runs -------------------------------------------------------------------------------------------------------

QUESTIONS = {"sky": "blue", "grass": "green", "lemons": "yellow", "snow": "white", "coal": "black", "blood": "red"}


def conversations(path):
    lines = ({"prompt": f"{name}?", "completion": colour} for name, colour in QUESTIONS.items())
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


@pytest.mark.matrix
def test_adapters_learn_answers_by_heart(tmp_path):
    """The random base has a large enough init_std for adapters to fit every answer."""
    found = data.load(DataConfig(source="chat", path=conversations(tmp_path / "colours.jsonl"), seq_len=96))
    cfg = config("llama3", LoraConfig(rank=8), lr=2e-2)
    cfg = replace(cfg, model=replace(cfg.model, vocab_size=256, init_std=0.3))
    ds = data.batches(found.train, seq_len=96, batch_size=4, seed=0, packing=True)
    heard = trained(cfg, ds.__getitem__, 40)
    assert heard[0] > 5  # worse than chance over bytes, ln 256 = 5.55 nats, or about as bad
    assert np.mean(heard[-3:]) < heard[0] / 10


def run(*argv):
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, env=environment(), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.matrix
def test_from_a_folder_to_a_chat_and_back(tmp_path):
    """Runs each command: import, LoRA on instructions, stop and resume, export, and answers."""
    pytest.importorskip("safetensors")
    base_cfg = replace(ALL["llama3"], vocab_size=256, init_std=0.3)
    folder, tuned, out = (tmp_path / name for name in ("folder", "tuned", "out"))
    folder.mkdir()
    base = params.init(jax.random.key(1), families.spec(base_cfg))
    hf.save_pretrained(folder, base_cfg, base, "float32", 64)
    flags = [
        "--model.lora.rank=8", "--data.tokenizer=bytes", "--data.source=chat", "--data.packing=true",
        f"--data.path={conversations(tmp_path / 'colours.jsonl')}", "--data.seq_len=64", "--data.batch_size=4",
        "--optim.lr=2e-2", "--optim.warmup_steps=0", "--train.steps=60", "--checkpoint.every=30",
        "--train.eval_steps=1", "--run.log_every=1",
    ]  # fmt: skip
    run("-m", "jaxstack", "import", str(folder), str(tuned), *flags)
    config_of = f"--config={tuned / 'config.yaml'}"
    said = run("train.py", config_of)
    assert "parameters of rank 8; all others are frozen" in said
    straight = tmp_path / "straight"
    # The same in two parts: bit for bit.
    run("train.py", config_of, f"--run.dir={straight}", "--train.steps=60")
    shutil.rmtree(straight / "checkpoints" / "60")
    assert "resumed from step 30" in run("train.py", config_of, f"--run.dir={straight}")
    assert values(tuned)[-2:] == values(straight)[-2:]
    losses_ = [line["loss"] for line in lines(tuned) if "loss" in line]
    assert losses_[-1] < losses_[0] / 10

    run("-m", "jaxstack", "export", str(tuned), str(out))
    with hf.PretrainedFolder(out) as exported:
        assert hf.model_differences(exported.model, base_cfg) == []
        merged = exported.read_params()
    cfg = parse.parse_config([config_of], tuned)
    cfg = replace(cfg, run=replace(cfg.run, dir=str(tuned)))
    mesh = sharding.make_mesh(replace(cfg.mesh, data=1), 1, jax.devices()[:1])
    ctx = replace(make_context(replace(cfg, mesh=replace(cfg.mesh, data=1)), mesh), remat="none")
    wanted = abstract_state(Recipe.of(cfg), ctx)
    state = store.restore(tuned / "checkpoints", 60, wanted)
    spec = families.spec(cfg.model)
    frozen = flatten(params.partition(spec, state.params)[1])
    for path, value in flatten(base).items():
        np.testing.assert_array_equal(frozen[path], value, err_msg=path)  # imported, trained, saved: bit for bit
    tokens = np.random.default_rng(0).integers(0, 256, (2, 32)).astype(np.int32)
    a, b = families.forward(cfg.model, state.params, tokens)[0], families.forward(cfg.model.base, merged, tokens)[0]
    np.testing.assert_allclose(a, b, atol=2e-3 * np.abs(b).max())  # sums in another order, at logits of the order of 10

    answers = run(
        "-m", "jaxstack", "generate", str(tuned), *(f"{n}?" for n in QUESTIONS), "--chat", "--sample.temperature=0"
    ).split("\n---\n")
    assert sum(a.strip() == c for a, c in zip(answers, QUESTIONS.values(), strict=True)) >= len(QUESTIONS) - 1
