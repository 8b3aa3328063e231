"""Captions by the language branch of a contrastive model: with a cache as without one, on meshes, and whole runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_meshes as meshes
from families import CONTRASTIVE

import jaxstack
from jaxstack import families
from jaxstack.cli.parser import execute
from jaxstack.config import ConfigError, SampleConfig
from jaxstack.config.reading.parse import parse_config
from jaxstack.data.images import to_patches
from jaxstack.data.seq2seq import special_ids
from jaxstack.data.tokenizers import make_tokenizer
from jaxstack.families import contrastive
from jaxstack.families.context import make_context
from jaxstack.generate import captions, prompts
from jaxstack.generate.caption_cache import CachedCaptions
from jaxstack.models import params
from jaxstack.models.context import Context

BYTES = make_tokenizer("bytes", ())
START = special_ids(BYTES).start


@pytest.fixture(scope="module", params=["coca", pytest.param("unix2", marks=pytest.mark.slow)])
def model(request, seed):
    cfg = dataclasses.replace(CONTRASTIVE[request.param], vocab_size=256)
    rng = np.random.default_rng(seed)
    values = params.init(jax.random.key(seed), contrastive.spec(cfg))
    return cfg, jax.tree.map(lambda v: v + rng.normal(0, 0.2, v.shape).astype(np.float32), values)


def pictures(cfg, rng, count):
    return rng.uniform(-1, 1, (count, *cfg.contrastive.image)).astype(np.float32)


def whole(cfg, values, pixels, rows):
    """Logits after every token of texts of one length, by the forward pass of training."""
    batch = {"patches": to_patches(pixels, cfg.contrastive.patch_size), "tokens": jnp.asarray(rows)}
    hidden, _ = families.of(cfg).hidden_states(cfg, values, batch, Context())
    return np.asarray(contrastive.logits(cfg, values, hidden))


def test_logits_with_a_cache_are_those_of_the_forward_pass(model, rng):
    """Two rows of different lengths end in the same slot. float32: sums of some hundred products in another order."""
    cfg, values = model
    pixels = pictures(cfg, rng, 2)
    texts = [rng.integers(0, 256, n).tolist() for n in (5, 3)]
    later = rng.integers(0, 256, (4, 2))
    tokens = np.array([texts[0], [0, 0, *texts[1]]], np.int32)

    def run(tokens, later):
        patches = jnp.asarray(to_patches(pixels, cfg.contrastive.patch_size))
        cached = CachedCaptions.create(
            cfg, values, Context(), vocabulary=256, first=jnp.array([0, 2]), patches=patches, num_slots=9
        )
        logits, cache = cached.prefill(tokens)
        found = [logits]
        for i, new in enumerate(later):
            logits, cache = cached.decode_token(new, jnp.int32(5 + i), cache)
            found.append(logits)
        return jnp.stack(found)

    found = jax.jit(run)(jnp.asarray(tokens), jnp.asarray(later, jnp.int32))
    for row, text in enumerate(texts):
        wanted = whole(cfg, values, pixels[row : row + 1], [[*text, *later[:, row].tolist()]])[0, len(text) - 1 :]
        np.testing.assert_allclose(found[:, row], wanted, atol=2e-4 * np.abs(wanted).max())


def greedy(cfg, values, picture, row, count):
    """Tokens that the forward pass adds to a row, the likeliest ones, up to the end."""
    added = []
    while len(added) < count:
        token = int(whole(cfg, values, picture[None], [[*row, *added]])[0, -1, :256].argmax())
        if token == START:  # the byte 0 is the end, too
            break
        added.append(token)
    return added


@pytest.mark.slow
def test_a_greedy_caption_has_the_likeliest_token_of_every_step(model, rng):
    cfg, values = model
    pixels = pictures(cfg, rng, 3)
    write = captions.make_captions(cfg, SampleConfig(temperature=0, tokens=6), BYTES, 9)
    begin = ["", "ab", "a"]
    found = write(values, pixels, begin, 0)
    for picture, text, made in zip(pixels, begin, found, strict=True):
        row = [START, *text.encode()]
        assert made == BYTES.decode([*text.encode(), *greedy(cfg, values, picture, row, 6)])
    assert found[0] == write(values, pixels[:1], [""], 0)[0]
    assert write(values, pixels, ["abcdef", "", ""], 0)[0].startswith("abcdef")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 2, "tensor": 2}, {"fsdp": 4}], ids=str)
def test_a_caption_is_the_same_on_every_mesh(model, mesh, rng):
    cfg, values = model
    pixels = pictures(cfg, rng, 3)
    sample = SampleConfig(temperature=0.7, tokens=5)
    alone = captions.make_captions(cfg, sample, BYTES, 16)(values, pixels, ["", "b", ""], 3)
    run = meshes.config("coca", mesh)
    ctx = make_context(run, meshes.make_mesh(run.mesh, 8, jax.devices()[:4]))
    placed = jax.device_put(values, jax.tree.map(ctx.layout.sharding, ctx.layout.parameters(families.spec(cfg))))
    assert captions.make_captions(cfg, sample, BYTES, 16, ctx)(placed, pixels, ["", "b", ""], 3) == alone


def test_what_cannot_be_captioned_is_refused():
    for name, said in (
        ("clip", "caption_layers=0 does not write captions"),
        ("dit", "family=diffusion does not write"),
    ):
        with pytest.raises(ConfigError, match=said):
            prompts.require_captions(meshes.MODELS[name])
    assert prompts.begin_captions(BYTES, ["", "ab"], 4) == [[START], [START, 97, 98]]
    with pytest.raises(ConfigError, match=r"'abc' has 4 tokens with its start, which leaves no room in the 4 of"):
        prompts.begin_captions(BYTES, ["abc"], 4)
    run = meshes.config("coca", {"pipe": 2})
    ctx = make_context(run, meshes.make_mesh(run.mesh, 8, jax.devices()[:2]))
    with pytest.raises(ConfigError, match=r"Use --mesh\.pipe=1"):
        captions.make_captions(CONTRASTIVE["coca"], SampleConfig(), BYTES, 9, ctx)


@pytest.mark.slow
def test_a_run_learns_to_write_the_captions_of_its_pictures(tmp_path, capsys):
    image = pytest.importorskip("PIL.Image")
    import json

    lines = [
        {"picture": (np.eye(4) * 255 * shade // 4).astype(int).tolist(), "text": {"en": en, "de": de}}
        for shade, en, de in ((0, "no", "nein"), (4, "yes", "ja")) * 8
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = [
        "--model.family=contrastive", "--data.source=captions", f"--data.path={tmp_path / 'a.jsonl'}",
        "--data.languages=[en,de]", "--model.contrastive.translations=true", "--model.contrastive.caption_layers=1",
        "--model.encoder_layers=1", "--model.num_layers=1", "--model.d_model=32", "--model.num_heads=2",
        "--data.seq_len=4", "--data.target_len=8", "--data.batch_size=8", "--data.eval_fraction=0.5",
        "--train.steps=60", "--train.eval_every=60", "--train.eval_steps=1", "--checkpoint.every=60",
        "--optim.lr=1e-2", "--optim.warmup_steps=5", "--mesh.data=8", "--train.ngram_baseline=false",
        f"--run.dir={tmp_path / 'run'}",
    ]  # fmt: skip
    from jaxstack.train import main

    main(parse_config(flags))
    for name, shade in (("no", 0), ("yes", 255)):
        image.fromarray((np.eye(4) * shade).astype(np.uint8)).save(tmp_path / f"{name}.png")
    run, capture = str(tmp_path / "run"), capsys.readouterr
    capture()
    files = [f"--picture={tmp_path / name}.png" for name in ("no", "yes")]
    execute(["generate", run, "n", "y", "j", *files[:1], "--sample.temperature=0"])
    assert capture().out.split("\n")[0] in ("no", "nein")
    execute(["generate", run, "ne", *files[:1], "--sample.temperature=0"])
    assert capture().out == "nein\n"
    execute(["generate", run, "", *files, "--sample.temperature=0"])
    no, yes, _ = capture().out.split("\n")
    assert no in ("no", "nein")
    assert yes in ("yes", "ja")
    assert jaxstack.load(run).captions(np.full((1, 4, 4, 1), -1, np.float32), ["no"], temperature=0) == ["no"]
    image.fromarray(np.zeros((4, 5), np.uint8)).save(tmp_path / "wide.png")
    for arguments, said in (
        ([""], r"there is none\. Add --picture=FILE"),
        (["", f"--picture={tmp_path / 'none.png'}"], r"none\.png is not a file\. Name a PNG"),
        (["", f"--picture={tmp_path / 'wide.png'}"], "is 5x4 with 1 channel, but the model reads 4x4"),
        (["", *files, "--out=a.png"], "--out is not for captions"),
        ([*files, "abcdefgh"], "leaves no room"),
    ):
        with pytest.raises(ConfigError, match=said) as error:
            execute(["generate", run, *arguments])
        assert "\n" not in str(error.value)
