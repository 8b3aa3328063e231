"""A model drafts with its own module: greedy texts are those of the model alone, and samples have its distribution."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy
from test_generate import GREEDY, MODELS, on_mesh, slow
from test_speculative import added, last

import jaxstack
from jaxstack import families
from jaxstack.cli.parser import execute
from jaxstack.config import ConfigError, PredictionConfig, SampleConfig
from jaxstack.generate import decode
from jaxstack.generate.drafters import OwnModule
from jaxstack.generate.engine import Engine
from jaxstack.generate.prompts import require_modules
from jaxstack.generate.speculative import Speculation
from jaxstack.loaded.trained_run import Draft
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.models.ops import Ops

STOP = (9,)
LONG = replace(GREEDY, tokens=25)
ONE = PredictionConfig(1)


def leaning(values):
    """Returns parameters whose module reads little but the last token, on which the model's next token depends most.

    So its drafts are right at times, and wrong at times.
    """
    w = values["mtp"]["join"]["w"]
    token = jax.device_put(np.eye(*w.shape[1:], dtype=np.float32)[None], w.sharding)
    return values | {"mtp": values["mtp"] | {"join": values["mtp"]["join"] | {"w": token + 2 * w}}}


def modular(name: str, **changes):
    """Returns a model with a module, and its parameters."""
    cfg = replace(MODELS[name], mtp=ONE, **changes)
    values = params.init(jax.random.key(3), families.spec(cfg))
    return cfg, leaning(jax.tree.map(lambda a: 1.5 * a, values))


def test_drafts_are_those_of_the_module_without_a_cache(rng):
    """Round by round, against passes over the whole text; the module has read every accepted token.

    The probability of the first draft is the one that the loss of training has. The others have no such formula: the
    module reads the text and its own results behind it.
    """
    N = 14
    cfg, values = modular("llama3")
    ids = jnp.asarray(rng.integers(0, cfg.vocab, (1, N)))
    engine = Engine.create(cfg, values)
    model = engine.decoder(engine.params, engine.token_weights, jnp.zeros(1, jnp.int32), 20, spare=3)
    drafter = OwnModule.create(model, cfg.mtp, engine.modules, 3)

    def greedy(logits, i):
        return logits.argmax(-1), jax.nn.softmax(logits)

    @jax.jit
    def expected(newest):
        """Returns three drafts after the token with this index, their logits, and the first one's loss in training."""
        x, _ = families.of(engine.cfg).hidden_states(engine.cfg, engine.params, {"tokens": ids})
        reads = jnp.roll(ids, -1, 1)
        drafts = []
        logits = []
        for at in (newest, newest + 1, newest + 2):
            h, _ = drafter.run({"tokens": reads}, x, None)
            logits.append(model.logits(h)[0, at - 1])
            drafts.append(logits[-1].argmax())
            x = x.at[:, at].set(h[:, at - 1])
            reads = reads.at[:, at].set(drafts[-1])
        weights = jnp.zeros(ids.shape).at[:, newest].set(1)
        batch = {"tokens": ids, "targets": jnp.roll(ids, -1, 1).at[:, newest].set(drafts[0]), "loss_weights": weights}
        _, aux = families.of(cfg).hidden_states(cfg, values, batch)
        return jnp.stack(drafts), jnp.stack(logits), aux["mtp_loss"][0]

    draft = jax.jit(lambda state, last, slot: drafter.draft(state, last, slot, greedy))
    verify = jax.jit(model.verify_hidden)
    settle = jax.jit(drafter.settle)
    hidden, cache, _ = jax.jit(model.prefill_hidden)(ids[:, :5])
    state = jax.jit(drafter.start)(ids[:, :5], hidden, ids[:, 5])
    at = 5
    for accepted in (0, 3, 1):
        drafted, q, state = draft(state, ids[:, at], jnp.int32(at))
        tokens, logits, loss = expected(at)
        assert drafted.tolist() == tokens.tolist()
        np.testing.assert_allclose(jnp.log(q), jax.nn.log_softmax(logits), atol=1e-4)  # sums of other orders, float32
        np.testing.assert_allclose(-jnp.log(q[0, drafted[0]]), loss, rtol=1e-4)
        other = jnp.full((1, 3 - accepted), 7)  # dropped tokens
        read = jnp.concatenate([ids[:, at : at + accepted + 1], other], 1)
        hidden, cache = verify(read, jnp.int32(at), cache)
        after = jnp.concatenate([ids[:, at + 1 : at + accepted + 2], other], 1)
        state = settle(state, hidden, after, jnp.int32(accepted), jnp.int32(at))
        at += accepted + 1


@pytest.mark.random
@pytest.mark.parametrize(
    ("name", "form", "tokens"),
    [
        ("llama3", "unrolled", 1),
        *slow(
            [
                ("gemma2", "scan", 3),
                ("gemma2", "unrolled", 2),  # windows of 6 tokens, of which 2 may be dropped again
                ("mixtral", "scan", 2),
                ("latent", "unrolled", 2),
                ("dense_first", "scan", 3),
            ]
        ),
    ],
)
def test_greedy_tokens_are_those_of_the_model_alone(name, form, tokens, rng):
    cfg, values = modular(name)
    ctx = Context(ops=Ops(decode=form))
    work = Speculation(Engine.create(cfg, values, ctx=ctx), None, tokens)
    accepted, rounds = 0, 0
    for length in (1, 20, 33):
        prompt = rng.integers(0, cfg.vocab, length).tolist()
        (expected,) = decode.generate(cfg, values, [prompt], LONG, stop=STOP, ctx=ctx)
        for at_once in (True, False):
            found = last(work.stream(prompt, LONG, stop=STOP, at_once=at_once))
            assert [*prompt, *added(found)] == expected
        accepted += int(found.accepted)
        rounds += int(found.rounds)
    assert 0 < accepted < tokens * rounds, "a draft that is always right, or never, tests half of it"


@pytest.mark.parametrize(
    ("name", "mesh"),
    slow(
        [
            ("llama3", {"data": 2, "tensor": 2}),
            ("gemma2", {"fsdp": 4}),
            ("softmax", {"expert": 4, "tensor": 2}),
        ]
    ),
)
def test_a_mesh_writes_what_the_model_alone_writes(name, mesh, rng):
    cfg, values, options = on_mesh(name, mesh, mtp=ONE)
    values = leaning(values) | {"layers": jax.tree.map(lambda a: a / 4, values["layers"])}  # so that they change little
    prompt = rng.integers(0, cfg.vocab, 20).tolist()
    (expected,) = decode.generate(cfg, values, [prompt], LONG, stop=STOP, **options)
    found = last(Speculation(Engine.create(cfg, values, **options), None, 2).stream(prompt, LONG, stop=STOP))
    assert [*prompt, *added(found)] == expected
    assert found.accepted


@pytest.mark.slow
@pytest.mark.random
def test_sampled_texts_have_the_distribution_of_the_model(rng):
    """Of whole texts: the second and third tokens after a prompt, against those of `decode.generate`, with top-k."""
    cfg, values = modular("llama3", vocab_size=5)
    values |= {"head": {"w": 6 * values["head"]["w"]}}  # so that the distributions are far from uniform and each other
    sample = SampleConfig(tokens=3, temperature=1.3, top_k=4)
    work = Speculation(Engine.create(cfg, values), None, 2)
    count = 2000
    drafted = [added(last(work.stream([1, 2], sample, seed=seed, at_once=True))) for seed in range(count)]
    run = decode.make_generate(cfg, sample)
    alone = [row[2:] for row in run(values, [[1, 2]] * count, int(rng.integers(2**31)))]
    places = np.asarray([25, 5, 1])
    seen = np.stack([np.bincount(np.asarray(texts) @ places, minlength=125) for texts in (drafted, alone)])
    often = seen.sum(0) >= 20
    table = np.concatenate([seen[:, often], seen[:, ~often].sum(1, keepdims=True)], 1)
    assert scipy.stats.chi2_contingency(table[:, table.sum(0) > 0]).pvalue > 1e-4


@pytest.mark.parametrize(
    ("mtp", "stages", "message"),
    [
        (PredictionConfig(), 1, r"model\.mtp\.depth=0 leaves the model without a module .*\. Train with"),
        (PredictionConfig(2), 4, r"model\.mtp\.depth=2 has modules, which .* mesh\.pipe=4 do not run\. Use --mesh"),
    ],
)
def test_what_cannot_draft_says_so(mtp, stages, message):
    with pytest.raises(ConfigError, match=message):
        require_modules(mtp, stages)


def test_a_model_without_modules_does_not_draft():
    cfg = MODELS["llama3"]
    values = params.init(jax.random.key(3), families.spec(cfg))
    with pytest.raises(ConfigError, match=r"model\.mtp\.depth=0 leaves"):
        next(Speculation(Engine.create(cfg, values), None).stream([1], LONG))


@pytest.mark.slow
def test_the_command_and_python_write_the_text_of_the_run_alone(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("a line of a text, which is read\n" * 300)
    flags = [
        f"--data.path={tmp_path / 'text.txt'}",
        "--data.source=path",
        "--data.tokenizer=chars",
        "--data.seq_len=32",
    ]
    flags += ["--model.num_layers=2", "--model.d_model=32", "--model.num_heads=2", "--model.mtp.depth=1"]
    flags += ["--data.batch_size=16", "--train.steps=40", "--sample.prompts=[]", "--optim.lr=1e-2"]
    execute(["train", *flags, f"--run.dir={tmp_path / 'run'}"])
    texts = []
    for more in ([], ["--draft=mtp", "--draft_tokens=2"]):
        capsys.readouterr()
        execute(["generate", str(tmp_path / "run"), "a line", "--sample.tokens=30", "--sample.temperature=0", *more])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    run = jaxstack.load(tmp_path / "run")
    text = run.generate("a line", tokens=30, temperature=0.0, draft=Draft(tokens=3))
    assert text.strip() == texts[0].strip()
