"""The contrastive family: a second implementation in float64, features, and whole runs."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_meshes as meshes
import test_pipeline as pipelines
from families import CONTRASTIVE
from test_diffusion import mlp, rms

import jaxstack
from jaxstack import families
from jaxstack.cli.parser import execute
from jaxstack.config import ConfigError
from jaxstack.config.reading.parse import parse_config
from jaxstack.families import contrastive
from jaxstack.families.context import make_context
from jaxstack.generate import features
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.sharding import make_mesh
from jaxstack.train import main
from jaxstack.training.assemble import make_eval_step, objective_of
from jaxstack.training.state import Recipe, abstract_state, make_state


def norm(cfg, p, x):
    if cfg.norm == "rms":
        return rms(cfg, x, p["scale"])
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + cfg.norm_eps) * p["scale"] + p["bias"]


def attend(cfg, p, h, other=None):
    """Attention of one row; `other` has the keys of a picture, and without it h sees what it may."""
    theirs = h if other is None else other
    q, k, v = (
        jnp.einsum("td,dhk->htk", x, p[f"w_{n}"]) + (p[f"b_{n}"][:, None] if cfg.bias else 0)
        for n, x in (("q", h), ("k", theirs), ("v", theirs))
    )
    if cfg.qk_norm:
        q, k = rms(cfg, q, p["q_norm"]["scale"]), rms(cfg, k, p["k_norm"]["scale"])
    if cfg.positions == "rope" and other is None:
        half = cfg.head_width // 2
        angle = np.arange(len(h))[:, None] * cfg.rope_theta ** -(np.arange(half) / half)
        cos, sin = np.cos(angle), np.sin(angle)
        q, k = (
            jnp.concatenate([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)
            for x in (q, k)
        )
    e = jnp.exp(q @ k.swapaxes(1, 2) / np.sqrt(cfg.head_width)) * p.get("seen", 1)
    mixed = e / e.sum(-1, keepdims=True) @ v
    return jnp.einsum("htk,hkd->td", mixed, p["w_o"]) + (p["b_o"] if cfg.bias else 0)


def tower(cfg, stack, x, seen=1, picture=None):
    for i in range(len(stack["attention"]["w_q"])):
        layer = jax.tree.map(lambda a, i=i: a[i], stack)
        x = x + attend(cfg, layer["attention"] | {"seen": seen}, norm(cfg, layer["attention_norm"], x))
        if picture is not None:
            x = x + attend(cfg, layer["cross"], norm(cfg, layer["cross_norm"], x), picture)
        x = x + mlp(cfg, layer["mlp"], norm(cfg, layer["mlp_norm"], x))
    return x


def row_by_hand(cfg, values, row):
    """The features of a picture and of a text before they have length 1, and the sum of the caption's losses."""
    x, y = row["patches"] @ values["picture"]["patches"], values["embedding"]["tokens"][row["tokens"]]
    if cfg.positions == "learned":
        x, y = x + values["picture"]["positions"], y + values["embedding"]["positions"][: len(y)]
    x = norm(cfg, values["image_norm"], tower(cfg, values["image"], x))
    causal = np.tril(np.ones((len(y), len(y))))
    y = tower(cfg, values["text"], y, causal)
    last = row["pair_weights"] != 0
    text = norm(cfg, values["text_norm"], y)[last.argmax()] * last.any() @ values["projection"]["text"]
    words = 0.0
    if cfg.contrastive.caption_layers:
        z = norm(cfg, values["final_norm"], tower(cfg, values["caption"], y, causal, x))
        log = jax.nn.log_softmax(z @ values["head"]["w"])
        words = -(row["loss_weights"] * log[np.arange(len(y)), row["targets"]]).sum()
    return x.mean(0) @ values["projection"]["image"], text, words


def of_text(batch, which):
    """The batch with one of two texts of each row."""
    return {n: a[..., which] if a.ndim == 3 and n != "patches" else a for n, a in batch.items()}


def losses_by_hand(cfg, values, batch):
    """The objective: rows one by one, and then the matrices of all pairs, of pictures and of second texts."""
    each = [of_text(batch, i) for i in range(1 + cfg.contrastive.translations)]
    made = [jax.vmap(lambda row: row_by_hand(cfg, values, row))(one) for one in each]
    anchors = [made[0][0], *(text for _, text, _ in made[1:])]
    losses = [pairs_by_hand(cfg, values, x, made[0][1], one) for x, one in zip(anchors, each, strict=True)]
    captions = 0.0
    if cfg.contrastive.caption_layers:
        captions = 2.0 * sum(words.sum() for *_, words in made) / batch["loss_weights"].sum()
    return sum(losses) / batch["pair_weights"].sum() + captions


def pairs_by_hand(cfg, values, image, text, batch):
    """The sum over pairs of the contrastive loss."""
    image, text = (x / jnp.sqrt(jnp.maximum((x * x).sum(1, keepdims=True), 1e-12)) for x in (image, text))
    weights, ids = batch["pair_weights"].sum(1), batch["pair_ids"][:, 0]
    real = np.flatnonzero(weights)
    s, same = jnp.exp(values["pairs"]["log_scale"]) * image[real] @ text[real].T, ids[real][:, None] == ids[real]
    if cfg.contrastive.loss == "sigmoid":
        each = jnp.log1p(jnp.exp(-np.where(same, 1, -1) * (s + values["pairs"]["bias"]))).sum(1)
    else:
        each = -sum((same * jax.nn.log_softmax(s, axis)).sum(axis) / same.sum(axis) for axis in (0, 1)) / 2
    return (weights[real] * each).sum()


@pytest.fixture(
    scope="module",
    params=[p if p == "clip" else pytest.param(p, marks=pytest.mark.matrix) for p in CONTRASTIVE],
)
def model(request, seed):
    """A small model with random parameters, none of which is zero."""
    cfg = dataclasses.replace(CONTRASTIVE[request.param], norm_eps=0.07)
    rng = np.random.default_rng(seed)
    values = params.init(jax.random.key(seed), contrastive.spec(cfg))
    return cfg, jax.tree.map(lambda v: v + rng.normal(0, 0.2, v.shape).astype(np.float32), values)


def test_the_scale_begins_at_ten_and_the_bias_at_minus_ten():
    values = params.init(jax.random.key(0), contrastive.spec(CONTRASTIVE["coca"]))["pairs"]
    assert float(np.exp(values["log_scale"])) == pytest.approx(10)
    assert float(values["bias"]) == -10
    assert set(params.init(jax.random.key(0), contrastive.spec(CONTRASTIVE["clip"]))["pairs"]) == {"log_scale"}


def test_loss_and_gradients_are_those_of_a_second_implementation(model, rng):
    """In float64, with one row at a time. bfloat16: 8 bits, in some ten layers, times a scale of ten."""
    cfg, values = model
    batch = meshes.random_captions(rng, cfg, 4)
    batch["pair_ids"][:2] = 3  # two rows show the same
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda v: np.asarray(v, np.float64), values)
        wide_batch = {n: np.asarray(v, np.float64) if v.dtype == np.float32 else v for n, v in batch.items()}
        wanted, gradient = jax.jit(jax.value_and_grad(lambda v: losses_by_hand(cfg, v, wide_batch)))(wide)
        gradient = jax.tree.map(np.asarray, gradient)
    size = np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(gradient)))
    goal = objective_of(cfg)
    totals = goal.totals(batch, Context())
    for dtype, bound in ((jnp.float32, 1e-5), (jnp.bfloat16, 0.06)):
        ctx = Context(dtype=jnp.dtype(dtype))

        def objective(values, ctx=ctx):
            hidden, _ = families.of(cfg).hidden_states(cfg, values, batch, ctx)
            return goal.total(goal.shares(goal.loss(cfg, values, hidden, batch, ctx), totals))

        found, grads = jax.jit(jax.value_and_grad(objective))(values)
        assert float(found) == pytest.approx(float(wanted), rel=bound)
        for (path, one), other in zip(
            jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(gradient), strict=True
        ):
            error = np.linalg.norm(np.asarray(one, np.float64) - other)
            assert error < bound * max(np.linalg.norm(other), 2e-2 * size), (jax.tree_util.keystr(path), dtype)


def test_right_pictures_are_those_whose_most_similar_text_shows_the_same(model, rng):
    """`features` are what they are compared by; a text's features do not depend on the picture beside it."""
    cfg, values = model
    batch = meshes.random_captions(rng, cfg, 6)
    ctx = Context()
    hidden, _ = contrastive.FAMILY.hidden_states(cfg, values, batch, ctx)
    image, text, *second = rows = contrastive.features(cfg, values, hidden, batch, ctx)
    ids, wanted = batch["pair_ids"][:, 0], 0.0
    for i, x in enumerate((image, *second)):
        weights = of_text(batch, i)["pair_weights"].sum(1)
        s = np.where(weights != 0, np.asarray(x @ text.T), -2)
        wanted += (weights * (ids[s.argmax(1)] == ids)).sum()
    assert float(contrastive.count_right(cfg, values, rows, batch, ctx)) == pytest.approx(float(wanted), rel=1e-6)
    np.testing.assert_allclose(np.square(image).sum(1), 1, rtol=1e-5)
    other = batch | {"patches": batch["patches"][::-1]}
    again, swapped, *_ = contrastive.features(
        cfg, values, contrastive.FAMILY.hidden_states(cfg, values, other, ctx)[0], batch, ctx
    )
    np.testing.assert_allclose(swapped, text, atol=1e-5)
    np.testing.assert_allclose(again, image[::-1], atol=1e-5)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, {"accum": 2, "dropout": 0.3}),
        ({"fsdp": 2, "context": 2, **meshes.GATHER}, {}),
        ({"data": 2, "tensor": 2, **meshes.AUTO}, {"remat": "full"}),
    ],
    ids=str,
)
def test_two_texts_of_a_row_are_compared_alike_on_every_mesh(mesh, how, seed):
    """Rounding of float32 in sums of another order; gradients differ by 1e-5 of their size at most."""
    assert max(meshes.compare(("unix2", mesh, how), seed)) < 1e-5


@pytest.mark.matrix
@pytest.mark.parametrize("how", [{"fsdp": 2}, {"tensor": 2, "dropout": 0.3}], ids=str)
def test_two_texts_of_a_row_are_compared_alike_on_stages(how, seed):
    axes = {name: size for name, size in how.items() if name != "dropout"}
    options = {name: rate for name, rate in how.items() if name == "dropout"}
    case = pipelines.case("unix2", pipelines.ONE, 2, 4, layers=3, **axes, **options)
    assert max(pipelines.compare(case, seed)) < 1e-5


@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        ({}, {"accum": 4}),  # microbatches of two rows, with one of which right and wrong texts can be confused
        pytest.param({"pipe": 2, "fsdp": 2}, {"schedule": pipelines.ONE, "microbatches": 2}, marks=pytest.mark.matrix),
        pytest.param({"pipe": 2, "tensor": 2}, {"schedule": pipelines.TWO, "accum": 2}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_an_evaluation_compares_all_rows_of_a_batch(mesh, how, seed):
    """In microbatches, and on stages, where one device compares all of them at once."""
    found = []
    for axes, split in (({}, {}), (mesh, how)):
        cfg = pipelines.config("clip", axes, layers=2, **split)
        devices = jax.devices()[: math.prod(cfg.mesh.sizes.values())]
        ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.microbatch_size, devices))
        batch = meshes.random_batch(seed, False, cfg.model)
        values = make_state(Recipe.of(cfg), ctx, abstract_state(Recipe.of(cfg), ctx)).params
        sums = jax.jit(make_eval_step(cfg.model, ctx, cfg.train.grad_accum))(
            values, jax.device_put(batch, ctx.layout.sharding(ctx.layout.batch))
        )
        found.append(jax.tree.map(float, sums))
    one, other = found
    assert other.right == pytest.approx(one.right, rel=1e-6)  # sums of the weights in another order
    assert other.losses == pytest.approx(one.losses, rel=1e-5)
    assert other.weights == pytest.approx(one.weights, rel=1e-6)


FLAGS = [
    "--model.family=contrastive", "--model.num_layers=1", "--model.d_model=32", "--model.num_heads=4",
    "--model.contrastive.caption_layers=1", "--model.norm=layer", "--data.source=images", "--data.seq_len=16",
    "--data.target_len=8", "--data.batch_size=8", "--train.eval_every=2", "--train.eval_steps=2", "--run.log_every=1",
    "--checkpoint.every=2", "--mesh.fsdp=2", "--optim.warmup_steps=1", "--optim.schedule=constant",
    "--train.ngram_baseline=false",
]  # fmt: skip


def values_of(directory):
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    keys = ("loss", "loss_contrastive", "loss_caption", "eval_loss", "eval_accuracy", "eval_loss_contrastive")
    return {(line["step"], key): line[key] for line in lines for key in keys if key in line}


@pytest.mark.matrix
def test_a_run_is_resumed_bit_for_bit_and_reports_its_losses(tmp_path, rng, capsys):
    file = tmp_path / "pictures.npz"
    np.savez(file, images=rng.random((40, 8, 8)), labels=np.arange(40) % 3)
    flags = [*FLAGS, f"--data.path={file}"]
    for name, steps in (("straight", 4), ("resumed", 2), ("resumed", 4)):
        main(parse_config([*flags, f"--train.steps={steps}", f"--run.dir={tmp_path / name}"]))
    found = values_of(tmp_path / "straight")
    assert found == values_of(tmp_path / "resumed")
    assert len(found) == 3 * 4 + 3 * 2
    assert found[2, "loss"] == pytest.approx(found[2, "loss_contrastive"] + 2 * found[2, "loss_caption"], rel=1e-6)
    out = capsys.readouterr().out
    assert "recall@1 among the texts of a batch" in out
    assert "named in 1 language" in out
    execute(["report", str(tmp_path / "straight"), f"--out={tmp_path / 'report.html'}"])
    page = (tmp_path / "report.html").read_text()
    for name in ("loss of contrastive", "loss of caption", "last held-out recall@1 among the texts of a batch"):
        assert name in page

    run = jaxstack.load(tmp_path / "straight")
    assert run.evaluate().loss == pytest.approx(found[4, "eval_loss"], rel=1e-5)
    pixels, names = rng.uniform(-1, 1, (5, 8, 8, 1)), ["0", "1", "twelve"]
    one, two = run.features(pixels), run.features(names)
    assert (one.shape, two.shape) == ((5, 32), (3, 32))
    wide = jaxstack.load(tmp_path / "straight", mesh={"fsdp": 2, "tensor": 2})
    np.testing.assert_allclose(wide.features(pixels), one, atol=1e-5)
    for given in (pixels[:, :4], ["thirteen"]):
        with pytest.raises(ConfigError) as error:
            run.features(given)
        assert "\n" not in str(error.value)
    for said, *words in (
        ("does not continue texts", "generate", str(tmp_path / "straight"), "3"),
        ("contrastive", "export", str(tmp_path / "straight"), str(tmp_path / "hf")),
        ("reads decoders", "compress", "prune", str(tmp_path / "straight"), str(tmp_path / "small"), "--layers=1"),
    ):
        with pytest.raises(ConfigError, match=said) as error:
            execute(words)
        assert "\n" not in str(error.value)
    length = run.config.data.target_length
    assert features.text_features(run.model, run.params, ["2"], run.tokenizer, length, run.context).shape == (1, 32)
