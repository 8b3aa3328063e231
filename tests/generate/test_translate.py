"""Encoder-decoders write texts: the tokens are those of the whole model without caches, on every mesh, and by a run."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
from families import ENCODER_DECODERS

import jaxstack
from jaxstack import families
from jaxstack.cli import parser
from jaxstack.config import Config, ConfigError, DataConfig, ExpertLayers, MeshConfig, MoEConfig, SampleConfig
from jaxstack.config.denoisers import DenoiserConfig
from jaxstack.data.seq2seq import Pair, make_batch
from jaxstack.families import encoder_decoder
from jaxstack.families.context import make_context
from jaxstack.generate import translate
from jaxstack.generate.translate import make_translate
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.sharding import make_mesh

MODELS = ENCODER_DECODERS | {
    "gates": dataclasses.replace(ENCODER_DECODERS["t5_1_1"], moe=MoEConfig(num_experts=2, d_ff=32, router="domain")),
    "routed": dataclasses.replace(ENCODER_DECODERS["t5"], moe=MoEConfig(num_experts=4, d_ff=32)),
    # Two stacks in the encoder, and three in the decoder, of which the last one has units of two layers.
    "listed": dataclasses.replace(
        ENCODER_DECODERS["t5"],
        encoder_layers=3,
        num_layers=6,
        moe=MoEConfig(num_experts=4, d_ff=32, layers=ExpertLayers(numbers=(1, 2, 4), encoder_numbers=(2,))),
    ),
    "rope": dataclasses.replace(ENCODER_DECODERS["t5_1_1"], positions="rope", qk_norm=True, num_kv_heads=2),
}
LENGTHS, N = (9, 30, 1), 10


def random_values(cfg, seed):
    """Returns parameters whose logits are far apart, so that rounding changes no token."""
    values = params.init(jax.random.key(seed), families.spec(cfg))
    keys = iter(jax.random.split(jax.random.key(seed), 100))
    return jax.tree.map(lambda a: a + 0.15 * jax.random.normal(next(keys), a.shape), values)


def whole_model(cfg, values, row, gate):
    """Returns the likeliest tokens by running the whole model again for each."""
    targets = np.zeros(0, np.int32)
    for _ in range(N):
        pair = Pair(np.asarray(row, np.int32), np.append(targets, 0).astype(np.int32), gate)
        batch = make_batch([[pair]], len(row), N, 0, gates=bool(cfg.moe.num_experts))
        hidden, _ = families.of(cfg).hidden_states(cfg, values, batch, Context())
        logits = encoder_decoder.logits(cfg, values, hidden)[0, len(targets), : cfg.vocab]
        targets = np.append(targets, int(logits.argmax()))
        if targets[-1] == 1:
            break
    return targets.tolist()


def inputs_of(rng, cfg):
    return [rng.integers(2, cfg.vocab, length).tolist() for length in LENGTHS]


@pytest.mark.matrix
@pytest.mark.random
@pytest.mark.parametrize("kind", MODELS)
def test_tokens_are_those_of_the_whole_model(kind, rng, seed):
    cfg, gate = MODELS[kind], 1
    values, inputs = random_values(cfg, seed), inputs_of(rng, cfg)
    write = make_translate(cfg, SampleConfig(tokens=N, temperature=0.0), start=0, stop=(1,), gate=gate)
    assert write(values, inputs, 0) == [whole_model(cfg, values, row, gate) for row in inputs]


@pytest.mark.matrix
@pytest.mark.random
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("mesh", [{"data": 2, "tensor": 2}, {"fsdp": 2, "tensor": 2}, {"tensor": 4}], ids=str)
def test_every_mesh_writes_what_one_device_writes(mesh, beams, rng, seed):
    cfg = dataclasses.replace(MODELS["t5_1_1"], vocab_size=64)
    data = DataConfig(batch_size=8, denoisers=(DenoiserConfig(),), target_len=64)
    run = Config(model=cfg, data=data, mesh=MeshConfig(**{"data": 1} | mesh))
    values, inputs = random_values(cfg, seed), inputs_of(rng, cfg)
    sample = SampleConfig(tokens=N, temperature=0.0, beams=beams)
    expected = make_translate(cfg, sample, start=0, stop=(1,))(values, inputs, 0)
    ctx = make_context(run, make_mesh(run.mesh, 8, jax.devices()[: math.prod(mesh.values())]))
    placed = jax.device_put(values, jax.tree.map(ctx.layout.sharding, ctx.layout.parameters(families.spec(cfg))))
    assert make_translate(cfg, sample, start=0, stop=(1,), ctx=ctx)(placed, inputs, 0) == expected


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> str:
    """A run that learned to repeat a word in capitals, or reversed."""
    folder = tmp_path_factory.mktemp("pairs")
    words = ["".join(w) for w in np.random.default_rng(0).choice(list("abc"), (300, 3))]
    rows = [{"source": w, "target": t, "language": n} for w in words for n, t in (("up", w.upper()), ("back", w[::-1]))]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parser.execute([
        "train", "--data.source=pairs", f"--data.path={folder}/pairs.jsonl", "--data.languages=[up, back]",
        "--model.family=encoder_decoder", "--model.num_layers=1", "--model.d_model=64", "--model.num_heads=4",
        "--model.d_ff=128", "--model.positions=relative", "--model.attention_scale=1.0", "--model.qk_norm=false",
        "--model.activation=gelu_tanh", "--data.seq_len=8", "--data.target_len=8", "--data.batch_size=64",
        "--mesh.data=8", "--train.steps=250", "--train.eval_every=250", "--train.eval_steps=1",
        "--train.ngram_baseline=false", "--optim.lr=0.01", "--optim.warmup_steps=10", f"--run.dir={folder}/run",
    ])  # fmt: skip
    return f"{folder}/run"


@pytest.mark.slow
def test_a_run_translates_to_the_language_that_is_named(trained, capsys):
    run = jaxstack.load(trained, mesh={"data": 1})
    assert run.translate(["abc", "cab"], language="up", temperature=0.0) == ["ABC", "CAB"]
    assert run.translate(["abc"], language="back", temperature=0.0, beams=2) == ["cba"]
    capsys.readouterr()
    parser.execute(["generate", trained, "bca", "--language=up", "--sample.temperature=0", "--mesh.data=1"])
    assert capsys.readouterr().out == "BCA\n"
    for options, message in (
        ({}, "Name one of up, back with --language"),
        ({"language": "de"}, "--language=de is not a language of the run. Use one of up, back"),
    ):
        with pytest.raises(ConfigError, match=message):
            run.translate(["a"], **options)
    with pytest.raises(ConfigError, match="does not continue texts"):
        run.generate("a")


@pytest.mark.matrix
def test_an_exported_run_writes_the_same_with_transformers(trained, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    parser.execute(["export", trained, str(tmp_path / "out")])
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "out")
    run = jaxstack.load(trained, mesh={"data": 1})
    (row,) = translate.to_inputs(run.config.data, run.tokenizer, ["bca"], "up")
    made = theirs.generate(input_ids=torch.tensor([row]), max_new_tokens=8, do_sample=False)[0, 1:].tolist()
    assert translate.to_text(run.config.data, run.tokenizer, made) == "BCA"
