"""Classifiers: right predictions are counted, gradients in bfloat16 are near, and a run is fine-tuned from another."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_meshes as meshes

from jaxstack import hf
from jaxstack.cli.parser import execute
from jaxstack.common.tree import flatten
from jaxstack.config import ConfigError, MeshConfig, PipelineConfig
from jaxstack.config.reading.parse import parse_config
from jaxstack.families import encoder
from jaxstack.families.context import make_context
from jaxstack.kernels import context_order
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.report import runs
from jaxstack.sharding import make_mesh
from jaxstack.train import main
from jaxstack.training.assemble import make_eval_step, make_gradients
from jaxstack.training.losses import count_right
from jaxstack.training.state import Recipe, abstract_state, make_state

MODEL = [
    "--model.family=encoder", "--model.tied_embeddings=true", "--model.norm_after=true", "--model.norm=layer",
    "--model.positions=learned", "--model.bias=true", "--model.gated=false", "--model.activation=gelu",
    "--model.token_types=2", "--model.num_layers=2", "--model.d_model=32", "--model.num_heads=4", "--model.d_ff=64",
    "--model.vocab_size=258", "--model.max_positions=32", "--data.seq_len=32", "--optim.warmup_steps=0",
    "--train.ngram_baseline=false", "--run.log_every=1", "--optim.name=adamw", "--mesh.data=8",
    "--model.norm_eps=1e-12", "--model.qk_norm=false",
]  # fmt: skip


def moved(values, rng):
    """Returns parameters away from their initial values, of which those of a classifier are zeros."""
    return jax.tree.map(lambda v: v + rng.normal(0, 0.05, v.shape).astype(np.float32), values)


@pytest.mark.matrix(quick=["bert_words"])
@pytest.mark.parametrize("family", ["bert", "bert_words"])
def test_right_predictions_are_those_with_the_largest_logit(family, rng, seed):
    """Summed over weights, in float64 from the logits of one device; each split of the classes gives the same."""
    cfg = meshes.config(family, {})
    batch = meshes.random_batch(seed, False, cfg.model)
    values = moved(params.init(jax.random.key(seed), encoder.spec(cfg.model)), rng)
    hidden, _ = encoder.FAMILY.hidden_states(cfg.model, values, batch, Context())
    scores = np.asarray(encoder.logits(cfg.model, values, hidden))[..., : cfg.model.classes]
    likely = scores.argmax(-1)
    batch["targets"] = np.where(rng.random(likely.shape) < 0.4, likely, batch["targets"]).astype(np.int32)
    batch["loss_weights"] *= rng.integers(1, 5, likely.shape).astype(np.float32)
    expected = (batch["loss_weights"] * (batch["targets"] == likely)).sum(dtype=np.float64)
    for mesh in ({}, {"data": 2, "tensor": 2, "pipe": 2}):
        own = dataclasses.replace(cfg, mesh=MeshConfig(**{"data": 1} | mesh), pipeline=PipelineConfig(microbatches=2))
        devices = jax.devices()[: 8 if mesh else 1]
        ctx = make_context(own, make_mesh(own.mesh, meshes.BATCH, devices))
        state = make_state(Recipe.of(own), ctx, abstract_state(Recipe.of(own), ctx))
        placed = jax.tree.map(lambda a, b: jax.device_put(a, b.sharding), values, state.params)
        sums = jax.jit(make_eval_step(own.model, ctx, own.train.grad_accum))(
            placed, jax.device_put(batch, ctx.layout.sharding(ctx.layout.batch))
        )
        np.testing.assert_allclose(float(sums.right), expected)
        np.testing.assert_allclose(float(sums.weights["loss"]), batch["loss_weights"].sum(dtype=np.float64))
        assert 0 < expected < float(sums.weights["loss"])


def test_of_equal_logits_the_first_one_is_the_right_prediction():
    """Else a head of zeros would always be right."""
    cfg = meshes.MODELS["bert_words"]
    zeros = jax.tree.map(jnp.zeros_like, params.init(jax.random.key(0), encoder.spec(cfg)))
    batch = {"targets": jnp.array([[0, 1, 4, 0]]), "loss_weights": jnp.array([[1.0, 1.0, 1.0, 0.5]])}
    right = count_right(cfg, zeros, jnp.ones((1, 4, cfg.d_model)), batch, Context())
    assert float(right) == 1.5


def test_the_mean_of_a_text_is_that_of_its_tokens_beside_others_and_on_other_devices(rng, seed):
    """A row of three texts and padding gives the logits of each text in a row of its own, on context shards too."""
    cfg = dataclasses.replace(meshes.config("modernbert_labels", {}).model, norm_eps=0.01)
    values = moved(params.init(jax.random.key(seed), encoder.spec(cfg)), rng)
    lengths = (13, 1, 9)
    ids = np.repeat([1, 2, 3, 0], [*lengths, meshes.SEQ - sum(lengths)])[None]
    tokens = rng.integers(0, cfg.vocab, ids.shape)
    position = np.concatenate([np.arange(n) for n in (*lengths, meshes.SEQ - sum(lengths))])[None]
    batch = {"tokens": tokens, "segment_ids": ids, "positions": position}

    def logits(values, batch, ctx):
        batch = ctx.layout.shard_sequence(batch)
        return encoder.logits(cfg, values, encoder.FAMILY.hidden_states(cfg, values, batch, ctx)[0], ctx)

    run = meshes.config("modernbert_labels", {"context": 2, "tensor": 2, **meshes.GATHER})
    ctx = make_context(run, make_mesh(run.mesh, 1, jax.devices()[:4]))
    where = ctx.layout.parameters(encoder.spec(cfg))
    whole = ctx.layout.local(
        lambda *given: logits(*given, ctx), (where, ctx.layout.batch), jax.P(None, "context", "tensor")
    )
    order = context_order(2, meshes.SEQ)
    packed = jax.jit(whole)(values, batch)[:, np.argsort(order), : cfg.classes]
    for i, length in enumerate(lengths):
        own = {"tokens": tokens[:, (ids == i + 1)[0]]}
        alone = jax.jit(lambda v, b: logits(v, b, Context()))(values, own)[:, :, : cfg.classes]
        assert np.ptp(alone, axis=1).max() < 1e-5  # every token has the mean
        start = sum(lengths[:i])
        # Sums of float32 in another order, in three layers.
        np.testing.assert_allclose(packed[0, start : start + length], alone[0], atol=1e-5 * np.abs(alone).max())


@pytest.mark.matrix(quick=["modernbert_labels"])
@pytest.mark.parametrize("family", ["bert_labels", "modernbert_labels"])
def test_gradients_in_bfloat16_are_near_those_in_float32(family, rng, seed):
    """A sequence counts once, so that fewer terms average their rounding than in a language model."""
    run = meshes.config(family, {})
    cfg = run.model
    batch = meshes.random_batch(seed, False, cfg, rows=64)
    values = moved(params.init(jax.random.key(seed), encoder.spec(cfg)), rng)
    grads = [
        flatten(jax.jit(make_gradients(run, Context(dtype=jnp.dtype(name))))(values, batch)[1])
        for name in ("float32", "bfloat16")
    ]
    zero = "attention/b_k" if cfg.positions == "learned" else "-"  # it moves all scores alike
    off = {
        path: float(np.linalg.norm(grads[1][path] - g) / np.linalg.norm(g))
        for path, g in grads[0].items()
        if not path.endswith(zero)
    }
    assert {path: value for path, value in off.items() if not value < 0.02} == {}


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in texts))
    return str(path)


def spoken(rng, count):
    """Texts that say whether they are loud: an `a` anywhere, or no `a`."""
    texts = ["".join(chr(c) for c in rng.integers(98, 123, rng.integers(6, 30))) for _ in range(count)]
    return [(t[:3] + "aaa" + t[3:], "loud") if i % 2 else (t, "quiet") for i, t in enumerate(texts)]


@pytest.mark.matrix
def test_a_run_becomes_a_classifier_which_is_exported_and_read_again(tmp_path, rng, capsys):
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(c) for c in rng.integers(97, 122, 9000)))
    masked = [*MODEL, "--data.source=path", f"--data.path={text}", "--data.batch_size=8", "--train.steps=2"]
    main(parse_config([*masked, f"--run.dir={tmp_path / 'masked'}"]))
    file = write(tmp_path / "spoken.jsonl", spoken(rng, 400))
    labels = [
        *MODEL, "--data.source=labels", f"--data.path={file}", "--model.labels=[quiet,loud]", "--data.batch_size=32",
        "--train.steps=60", "--train.eval_every=30", "--optim.lr=3e-3", "--checkpoint.every=60",
    ]  # fmt: skip
    tuned = tmp_path / "tuned"
    main(parse_config([*labels, f"--run.dir={tuned}", f"--run.init_from={tmp_path / 'masked'}"]))
    out = capsys.readouterr().out
    assert "400 texts with 400 labels" in out
    assert re.search(r"held-out classification loss 0\.\d+ nats per sequence, accuracy per sequence \d+\.\d%\n", out)
    (run,) = runs.read_runs([tuned])
    assert runs.summarize(run)["objective"] == "classification loss in nats per sequence"
    assert run.series("eval_accuracy")[1][-1] > 0.9
    execute(["export", str(tuned), str(tmp_path / "out")])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert config["id2label"] == {"0": "quiet", "1": "loud"}
    with hf.PretrainedFolder(tmp_path / "out") as found:
        assert found.model.labels == ("quiet", "loud")
    again = [*labels, f"--run.dir={tmp_path / 'again'}", f"--run.init_from={tmp_path / 'out'}", "--train.steps=60"]
    main(parse_config([*again, "--train.steps=1", "--train.eval_every=1", "--optim.lr=1e-9"]))
    (continued,) = runs.read_runs([tmp_path / "again"])
    assert continued.series("eval_loss")[1][-1] == pytest.approx(run.series("eval_loss")[1][-1], rel=1e-4)


def test_labels_that_do_not_fit_are_one_line(tmp_path):
    def refused(pattern, *flags):
        with pytest.raises(ConfigError, match=pattern) as error:
            main(parse_config([*MODEL, f"--run.dir={tmp_path / 'run'}", *flags]))
        assert "\n" not in str(error.value)

    labels = ["--data.source=labels", "--model.labels=[up,down]"]
    file = write(tmp_path / "a.jsonl", [("a", "up"), ("b", "sideways")])
    refused(
        r"a\.jsonl, line 2: the label 'sideways' is not in model\.labels \(up, down\)", *labels, f"--data.path={file}"
    )
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n')
    refused(
        r"line 1: there is no label, but model\.label_each=sequence", *labels, f"--data.path={tmp_path / 'b.jsonl'}"
    )
    refused(r"data\.source=stdlib does not have", "--model.labels=[up,down]")
    refused(r"model\.labels is empty", "--data.source=labels", f"--data.path={file}")
