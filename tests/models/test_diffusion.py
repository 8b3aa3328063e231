"""The diffusion family: a second implementation in float64, paths and samplers by hand, and whole runs."""

import dataclasses
import json
from base64 import b64encode

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_meshes as meshes
from families import DIFFUSION

import jaxstack
from jaxstack import families
from jaxstack.cli.parser import execute
from jaxstack.config import ConfigError, MoEConfig, SampleConfig
from jaxstack.config.reading.parse import parse_config
from jaxstack.data import images
from jaxstack.data.captions import Given
from jaxstack.families.context import make_context
from jaxstack.families.diffusion import Path
from jaxstack.generate import pictures
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.train import main
from jaxstack.training import losses

ODD = {"norm_eps": 0.07}


def norm(cfg, x, scale=1.0):
    x = x - x.mean(-1, keepdims=True) if cfg.norm == "layer" else x
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + cfg.norm_eps) * scale


def silu(x):
    return x / (1 + jnp.exp(-x))


def rms(cfg, x, scale):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + cfg.norm_eps) * scale


def attention(cfg, p, h, among=None, weights=1):
    """From tokens h [S, D] to themselves, or to `among` [T, D], whose scores are multiplied by weights [T]."""
    rows, group, other = [], cfg.num_heads // cfg.kv_heads, h if among is None else among
    for head in range(cfg.num_heads):
        q, k, v = (
            x @ p[f"w_{n}"][:, i] + (p[f"b_{n}"][i] if cfg.bias else 0)
            for n, x, i in (("q", h, head), ("k", other, head // group), ("v", other, head // group))
        )
        if cfg.qk_norm:
            q, k = rms(cfg, q, p["q_norm"]["scale"]), rms(cfg, k, p["k_norm"]["scale"])
        if cfg.positions == "rope":
            half = cfg.head_width // 2
            angle = np.arange(len(h))[:, None] * cfg.rope_theta ** -(np.arange(half) / half)
            cos, sin = np.cos(angle), np.sin(angle)
            q, k = (
                jnp.concatenate([x[:, :half] * cos - x[:, half:] * sin, x[:, half:] * cos + x[:, :half] * sin], 1)
                for x in (q, k)
            )
        e = jnp.exp(q @ k.T / np.sqrt(cfg.head_width) * weights)
        rows.append(e / e.sum(1, keepdims=True) @ v @ p["w_o"][head])
    return sum(rows) + (p["b_o"] if cfg.bias else 0)


def read_by_hand(cfg, values, ids):
    """The tokens of a text [T, D] that the picture's blocks attend to."""
    x = values["text_embedding"]["tokens"][ids] + values["text_embedding"]["positions"][: len(ids)]
    plain = dataclasses.replace(cfg, moe=MoEConfig())
    for i in range(cfg.diffusion.text_layers):
        layer = jax.tree.map(lambda a, i=i: a[i], values["text"])
        h = scaled(cfg, layer["attention_norm"], x)
        x = x + attention(cfg, layer["attention"], h)
        x = x + mlp(plain, layer["mlp"], scaled(cfg, layer["mlp_norm"], x))
    return scaled(cfg, values["text_norm"], x)


def scaled(cfg, p, x):
    return norm(cfg, x, p["scale"]) + p.get("bias", 0)


def mlp(cfg, p, h):
    up = h @ p["w_up"] + (p["b_up"] if cfg.bias else 0)
    if cfg.gated:
        up = silu(h @ p["w_gate"]) * up
    else:
        up = 0.5 * up * (1 + jnp.tanh(0.7978845608028654 * (up + 0.044715 * up**3)))  # sqrt(2 / pi)
    return up @ p["w_down"] + (p["b_down"] if cfg.bias else 0)


def predict_by_hand(cfg, values, noisy, step, label, keys=0):
    """The velocity of one picture [S, P], from its timestep, and its class or the ids of its text.

    Tokens of key words have ones in `keys`.
    """
    c = values["condition"]
    angle = 1000 * (step + 0.5) / cfg.moe.max_timestep * 10_000.0 ** -(np.arange(128) / 128)
    time = silu(np.concatenate([np.cos(angle), np.sin(angle)]) @ c["w_time"] + c["b_time"]) @ c["w_out"] + c["b_out"]
    side = silu(time + (0 if cfg.reads_captions else c["classes"][label]))
    text = read_by_hand(cfg, values, label) if cfg.reads_captions else None
    x = noisy @ values["embedding"]["patches"]
    if cfg.positions == "learned":
        x = x + values["embedding"]["positions"][: len(x)]
    for i in range(cfg.num_layers):
        layer = jax.tree.map(lambda a, i=i: a[i], values["layers"])
        made = jnp.einsum("d,dke->ke", side, layer["modulation"]["w"]) + layer["modulation"]["b"]
        x = x + made[2] * attention(cfg, layer["attention"], norm(cfg, x) * (1 + made[1]) + made[0])
        if text is not None:
            x = x + attention(
                cfg, layer["cross"], scaled(cfg, layer["cross_norm"], x), text, 1 + cfg.diffusion.key_weight * keys
            )
        own = layer["mlp"] if not cfg.moe.num_experts else None
        if own is None:
            expert = step * cfg.moe.num_experts // cfg.moe.max_timestep
            own = jax.tree.map(lambda a, e=expert: a[e], layer["moe"])
        x = x + made[5] * mlp(cfg, own, norm(cfg, x) * (1 + made[4]) + made[3])
    made = jnp.einsum("d,dke->ke", side, values["output"]["modulation"]["w"]) + values["output"]["modulation"]["b"]
    return (norm(cfg, x) * (1 + made[1]) + made[0]) @ values["output"]["w"] + values["output"]["b"]


def loss_by_hand(cfg, values, batch):
    total = 0.0
    for row in range(len(batch["patches"])):
        step = int(batch["gate_ids"][row, 0])
        keys = 0
        if cfg.reads_captions:
            real = np.asarray(batch["encoder_segment_ids"][row]) == 1
            label, keys = (np.asarray(batch[f"encoder_{name}"][row])[real] for name in ("tokens", "key_tokens"))
        else:
            label = int(batch["classes"][row, 0])
        x, e, t = batch["patches"][row], batch["noise"][row], (step + 0.5) / cfg.moe.max_timestep
        if cfg.diffusion.path == "flow":
            noisy, wanted = (1 - t) * x + t * e, e - x
        else:
            a, b = np.cos(np.pi * t / 2), np.sin(np.pi * t / 2)
            noisy, wanted = a * x + b * e, a * e - b * x
        squares = (predict_by_hand(cfg, values, noisy, step, label, keys) - wanted) ** 2
        total += (batch["loss_weights"][row] * squares.mean(-1)).sum()
    return total / batch["loss_weights"].sum()


@pytest.mark.matrix
@pytest.mark.parametrize("name", DIFFUSION)
def test_loss_and_gradients_are_those_of_a_second_implementation(name, rng, seed):
    """It has one head, one expert and one picture at a time, in float64. No parameter is zero, as many are at first."""
    cfg = dataclasses.replace(DIFFUSION[name], **ODD)
    values = params.init(jax.random.key(seed), families.spec(cfg))
    values = jax.tree.map(lambda v: v + rng.normal(0, 0.2, v.shape).astype(np.float32), values)
    batch = meshes.random_pictures(rng, cfg, 3)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda v: np.asarray(v, np.float64), values)
        wide_batch = {n: np.asarray(v, np.float64) if v.dtype == np.float32 else v for n, v in batch.items()}
        wanted, gradient = jax.jit(jax.value_and_grad(lambda v: loss_by_hand(cfg, v, wide_batch)))(wide)
        gradient = jax.tree.map(np.asarray, gradient)

    # float32: angles of time go to 1000, where its steps are 6e-5. bfloat16: 8 bits, some ten times, and three rows do
    # not average the errors; test_precision.py has more.
    # With a text there are more layers, and three rows that share less; a table of positions is off by 0.131.
    for dtype, bound in ((jnp.float32, 5e-5), (jnp.bfloat16, 0.15 if cfg.reads_captions else 0.06)):
        ctx = Context(dtype=jnp.dtype(dtype))

        def mean(values, ctx=ctx):
            return losses.loss_sums(cfg, values, batch, ctx)[0]["loss"] / batch["loss_weights"].sum()

        found, grads = jax.jit(jax.value_and_grad(mean))(values)
        assert float(found) == pytest.approx(float(wanted), rel=bound)
        size = np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(gradient)))
        for path, p in params.flat_spec(families.spec(cfg)).items():
            one, other = _at(grads, path), _at(gradient, path)
            if path.endswith("b_k") and cfg.positions != "rope":  # moves all scores alike
                assert np.linalg.norm(one) < bound * size
                continue
            assert np.linalg.norm(one - other) < bound * max(np.linalg.norm(other), 1e-3 * size), (path, p.shape, dtype)


def _at(tree, path):
    for key in path.split("/"):
        tree = tree[key]
    return np.asarray(tree, np.float64)


@pytest.mark.parametrize("kind", ["flow", "cosine"])
def test_a_path_leads_from_the_picture_to_noise_and_is_solved_for_both(kind, rng):
    x, e = rng.normal(size=(2, 5, 7)).astype(np.float32)
    ends = [Path.at(kind, jnp.float32(t)).mix(x, e) for t in (0, 1)]
    np.testing.assert_allclose(ends, [x, e], atol=1e-6)
    for t in (0.01, 0.37, 0.99):
        path = Path.at(kind, jnp.float32(t))
        slope = (
            Path.at(kind, jnp.float32(t + 0.005)).mix(x, e) - Path.at(kind, jnp.float32(t - 0.005)).mix(x, e)
        ) / 0.01
        scale = 1 if kind == "flow" else np.pi / 2
        np.testing.assert_allclose(path.velocity(x, e) * scale, slope, atol=2e-3)
        found = path.solve(path.mix(x, e), path.velocity(x, e))
        np.testing.assert_allclose(found, [x, e], atol=1e-5)
    middle = Path.at(kind, jnp.float32(0.5))
    assert float(middle.a) == pytest.approx(0.5 if kind == "flow" else 0.5**0.5)


@pytest.fixture(scope="module")
def model(seed):
    """A small model with random parameters, whose outputs depend on everything."""
    cfg = DIFFUSION["dit_experts"]
    rng = np.random.default_rng(seed)
    values = params.init(jax.random.key(seed), families.spec(cfg))
    return cfg, jax.tree.map(lambda v: v + rng.normal(0, 0.1, v.shape).astype(np.float32), values)


def test_the_sampler_is_eulers_method_on_a_straight_path_and_ddim_on_a_circle(model):
    """Both are written out here, with the model's own predictions, with guidance."""
    cfg, values = model
    sample = SampleConfig(steps=4, guidance=1.7)
    for kind in ("flow", "cosine"):
        own = dataclasses.replace(cfg, diffusion=dataclasses.replace(cfg.diffusion, path=kind))
        drawn = pictures.make_draw(own, sample)(values, Given.classes(own, [3, 5]), 7)
        for i, label in enumerate((3, 5)):
            x = np.random.default_rng([7, i, 3]).standard_normal((32, 12), np.float32)
            levels = [99, 66, 33, 0]
            for at, then in zip(levels, [66, 33, 0, None], strict=True):
                v = sum(
                    w * np.asarray(predict_by_hand(own, values, x, at, k)) for w, k in ((1.7, label), (-0.7, own.vocab))
                )
                t, s = (at + 0.5) / 100, 0 if then is None else (then + 0.5) / 100
                if kind == "flow":
                    x = x + (s - t) * v
                else:
                    a, b = np.cos(np.pi * t / 2), np.sin(np.pi * t / 2)
                    x = np.cos(np.pi * s / 2) * (a * x - b * v) + np.sin(np.pi * s / 2) * (b * x + a * v)
            wanted = images.from_patches(x[None], (8, 16, 3), 2)[0]
            np.testing.assert_allclose(drawn[i], wanted, atol=2e-4 * np.abs(wanted).max())


@pytest.mark.slow
def test_a_picture_depends_neither_on_the_others_nor_on_the_mesh(model, monkeypatch):
    cfg, values = model
    draw, three = pictures.make_draw(cfg, SampleConfig(steps=3)), Given.classes(cfg, [2, 9, 2])
    alone = draw(values, three, 1)
    assert np.abs(alone[0] - alone[2]).max() > 0.1  # the noise of another place
    four = Given.classes(cfg, [2, 4, 2, 7])
    np.testing.assert_allclose(draw(values, four, 1)[[0, 2]], alone[[0, 2]], atol=1e-5)
    monkeypatch.setattr(pictures, "ROWS", 2)
    np.testing.assert_allclose(draw(values, three, 1), alone, atol=1e-5)
    run = meshes.config("dit_experts", {"fsdp": 2, "tensor": 2, "expert": 2})
    run = dataclasses.replace(run, model=cfg)
    ctx = make_context(run, meshes.make_mesh(run.mesh, 8, jax.devices()))
    placed = jax.device_put(values, jax.tree.map(ctx.layout.sharding, ctx.layout.parameters(families.spec(cfg))))
    np.testing.assert_allclose(pictures.make_draw(cfg, SampleConfig(steps=3), ctx)(placed, three, 1), alone, atol=1e-4)


FLAGS = [
    "--model.family=diffusion", "--model.num_layers=2", "--model.d_model=32", "--model.num_heads=4",
    "--model.moe.num_experts=2", "--model.moe.router=timestep", "--model.norm=layer", "--data.source=images",
    "--data.seq_len=16", "--data.batch_size=8", "--train.eval_every=2", "--train.eval_steps=2", "--run.log_every=1",
    "--checkpoint.every=2", "--mesh.fsdp=2", "--optim.ema=0.9",
    "--optim.warmup_steps=1", "--optim.schedule=constant", "--train.ngram_baseline=false",
    "--sample.steps=2", "--sample.pictures=2",
]  # fmt: skip


def values_of(directory):
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return {(line["step"], key): line[key] for line in lines for key in ("loss", "eval_loss") if key in line}


@pytest.mark.matrix
def test_a_run_is_resumed_bit_for_bit_and_draws_pictures(tmp_path, rng, capsys):
    file = tmp_path / "pictures.npz"
    np.savez(file, images=rng.random((40, 8, 8)), labels=np.arange(40) % 3)
    flags = [*FLAGS, f"--data.path={file}"]
    for name, steps in (("straight", 4), ("resumed", 2), ("resumed", 4)):
        main(parse_config([*flags, f"--train.steps={steps}", f"--run.dir={tmp_path / name}"]))
    assert values_of(tmp_path / "straight") == values_of(tmp_path / "resumed")
    assert len(values_of(tmp_path / "straight")) == 4 + 2
    assert "held-out denoising loss" in capsys.readouterr().out
    for step in (2, 4):  # the averages are resumed as well
        one, other = ((tmp_path / name / "samples" / f"{step:06}.png").read_bytes() for name in ("straight", "resumed"))
        assert one == other

    execute(["report", str(tmp_path / "straight"), f"--out={tmp_path / 'report.html'}"])
    page = (tmp_path / "report.html").read_text()
    assert page.count('src="data:image/png;base64,') == 2
    assert b64encode((tmp_path / "straight" / "samples" / "000004.png").read_bytes()).decode() in page
    capsys.readouterr()

    out = tmp_path / "two.png"
    execute(["generate", str(tmp_path / "straight"), "0", "2", "--sample.pictures=3", f"--out={out}"])
    assert str(out) in capsys.readouterr().out
    from PIL import Image

    with Image.open(out) as picture:  # two rows of three pictures of 48 pixels, with two between them
        assert picture.size == (148, 98)
    run = jaxstack.load(tmp_path / "straight")
    drawn = run.draw(["0", "2"], steps=3, guidance=2.0)
    assert drawn.shape == (2, 8, 8, 1)
    assert run.evaluate().loss == pytest.approx(values_of(tmp_path / "straight")[4, "eval_loss"], rel=1e-5)
    for words in (
        ["generate", str(tmp_path / "straight"), "3"],
        ["generate", str(tmp_path / "straight"), "2", "--chat"],
        ["export", str(tmp_path / "straight"), str(tmp_path / "hf")],
        ["compress", "quantize", str(tmp_path / "straight"), str(tmp_path / "small")],
    ):
        with pytest.raises(ConfigError) as error:
            execute(words)
        assert "\n" not in str(error.value)


@pytest.mark.matrix
def test_a_run_with_texts_is_resumed_bit_for_bit_and_draws_from_any_text(tmp_path, rng, capsys):
    file = tmp_path / "pictures.npz"
    np.savez(file, images=rng.random((40, 8, 8)), labels=np.arange(40) % 3)
    texts = ["--model.diffusion.text_layers=1", "--data.languages=[en,de]", "--data.target_len=8"]
    flags = [*FLAGS, *texts, f"--data.path={file}"]
    for name, steps in (("straight", 4), ("resumed", 2), ("resumed", 4)):
        main(parse_config([*flags, f"--train.steps={steps}", f"--run.dir={tmp_path / name}"]))
    assert values_of(tmp_path / "straight") == values_of(tmp_path / "resumed")
    from PIL import Image

    with Image.open(tmp_path / "straight" / "samples" / "000004.png") as picture:  # three classes, two pictures of each
        assert picture.size == (98, 148)
    run, out = str(tmp_path / "straight"), tmp_path / "two.png"
    capsys.readouterr()
    execute(["generate", run, "two", "", "--sample.pictures=3", "--sample.guidance=2", f"--out={out}"])
    assert "two, " in capsys.readouterr().out
    with Image.open(out) as picture:
        assert picture.size == (148, 98)
    loaded = jaxstack.load(run)
    one, other, none = (loaded.draw([text], steps=2, guidance=2.0) for text in ("two", "zwei", ""))
    assert np.abs(one - other).max() > 0
    # With no text, both predictions of guidance are the same one.
    np.testing.assert_allclose(none, loaded.draw([""], steps=2), atol=1e-5)
    with pytest.raises(ConfigError, match=r"target_len=8 is less than the 9 tokens of 'seventy' "):
        execute(["generate", run, "seventy"])
