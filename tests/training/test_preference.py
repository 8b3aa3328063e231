"""Compares what a step learns from pairs with the definition on single conversations, packed and on meshes."""

import itertools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_meshes
from orbax.checkpoint import v1 as ocp

import jaxstack
from jaxstack import families
from jaxstack.__main__ import main as run_command
from jaxstack.common.tree import flatten
from jaxstack.config import Config, ConfigError, RunConfig
from jaxstack.config.reading.parse import parse_config
from jaxstack.config.training import LABEL_REWARDS, REWARDS, PreferenceConfig
from jaxstack.data.preferences import PreferenceTokens, PreferenceWindows, scored
from jaxstack.models import params as parameters
from jaxstack.models.context import Context
from jaxstack.train import main
from jaxstack.training.assemble import make_eval_step, make_gradients, objective_of
from jaxstack.training.features.preference import with_divergence

SEQ, ROWS = test_meshes.SEQ, test_meshes.BATCH
LOSSES = {
    "dpo": PreferenceConfig("dpo", beta=0.3, label_smoothing=0.1),
    "robust": PreferenceConfig("robust", beta=0.3, label_smoothing=0.2),
    "ipo": PreferenceConfig("ipo", beta=0.3),
    "hinge": PreferenceConfig("hinge", beta=0.3, nll_weight=0.5),
    "orpo": PreferenceConfig("orpo", beta=0.3),
    "simpo": PreferenceConfig("simpo", beta=2.0, gamma=0.7),
}


def config(name, mesh, preference=LOSSES["dpo"], **how) -> Config:
    cfg = test_meshes.config(name, mesh, **how)
    source = replace(cfg.data, source="preferences", path="pairs.jsonl")
    return replace(cfg, data=source, preference=preference, run=RunConfig(init_from="base"))


def draw(rng, vocab, count=24, longest=5) -> PreferenceTokens:
    """Returns pairs whose prompts and completions have one to `longest` tokens."""
    pieces = []
    masks = []
    sizes = []
    for _ in range(count):
        prompt = rng.integers(0, vocab, rng.integers(1, longest + 1))
        for _ in range(2):
            completion = rng.integers(0, vocab, rng.integers(1, longest + 1))
            pieces.append(np.concatenate([prompt, completion]))
            masks.append(np.arange(pieces[-1].size) >= prompt.size)
            sizes.append(pieces[-1].size)
    bounds = np.append(0, np.cumsum(sizes))
    return PreferenceTokens(
        np.concatenate(pieces), bounds[:-1:2], bounds[2::2], vocab, loss_mask=np.concatenate(masks),
        middles=bounds[1::2],
    )  # fmt: skip


def batch_of(pairs, packing, rows=None):
    """Returns the batch of all pairs, or of the first rows, with log-probabilities of a reference by the token."""
    windows = PreferenceWindows.of(pairs, SEQ, packing)
    which = np.arange(windows.first_W.size if rows is None else rows)
    batch = windows.make_batch(which, SEQ, packing, pairs.vocab_size)
    ids = batch["tokens"].astype(np.int64) * 31 + batch["targets"] * 17
    return batch | {"reference_log_probs": -1 - (ids % 13).astype(np.float32) / 4}


def alone(pairs):
    """Returns the ids of each conversation in a row of its own, the mask of its targets, and its length."""
    spans = np.stack([pairs.starts, pairs.middles, pairs.middles, pairs.ends], 1).reshape(-1, 2)
    lengths = spans[:, 1] - spans[:, 0]
    at = np.minimum(spans[:, :1] + np.arange(int(lengths.max())), len(pairs.ids) - 1)
    inside = np.arange(1, at.shape[1]) < lengths[:, None]
    return pairs.ids[at], (pairs.loss_mask[at][:, 1:] & inside).astype(np.float32), lengths


def by_definition(cfg, values, pairs, preference):
    """Returns the loss and what is logged, from each conversation in a row of its own."""
    ids, mask, _ = alone(pairs)
    logits, _ = families.forward(cfg, values, jnp.asarray(ids[:, :-1], jnp.int32))
    scores = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, 1:, None], 2)[..., 0]
    frozen = -1 - (ids[:, :-1].astype(np.int64) * 31 + ids[:, 1:] * 17) % 13 / 4
    c, r = (scores * mask).sum(1).reshape(-1, 2).T
    nc, nr = mask.sum(1).reshape(-1, 2).T
    rc, rr = (frozen * mask).sum(1).reshape(-1, 2).T
    beta, e = preference.beta, preference.label_smoothing
    d = beta * ((c - rc) - (r - rr))
    odds = [m - jnp.log1p(-jnp.exp(m)) for m in (c / nc, r / nr)]
    right, swapped = jnp.logaddexp(0, -d), jnp.logaddexp(0, d)
    loss = {
        "dpo": (1 - e) * right + e * swapped,
        "robust": ((1 - e) * right - e * swapped) / (1 - 2 * e),
        "ipo": ((c - rc) / nc - (r - rr) / nr - 1 / (2 * beta)) ** 2,
        "hinge": jnp.maximum(0, 1 - d),
        "orpo": beta * jnp.logaddexp(0, -(odds[0] - odds[1])),
        "simpo": jnp.logaddexp(0, -(beta * (c / nc - r / nr) - preference.gamma)),
    }[preference.loss].mean()
    weight = {"hinge": 0.5, "orpo": 1.0}.get(preference.loss, 0.0)
    nll = -(c / nc).mean()
    free = preference.loss in ("orpo", "simpo")
    rewards = (beta * c / nc, beta * r / nr) if free else (beta * (c - rc), beta * (r - rr))
    margins = rewards[0] - rewards[1]
    logged = [each.mean() for each in (*rewards, margins, margins > 0)]
    return loss + weight * nll, (dict(zip(REWARDS, logged, strict=True)), loss, nll)


@pytest.mark.random
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "dpo" else pytest.mark.matrix) for n in LOSSES])
def test_loss_gradients_and_rewards_are_the_definition_packed_or_not(rng, name):
    cfg = config("llama3", {}, LOSSES[name])
    values = parameters.init(jax.random.key(0), families.spec(cfg.model))
    values = jax.tree.map(lambda a: a + rng.normal(0, 0.1, a.shape).astype(np.float32), values)
    pairs = draw(rng, cfg.model.vocab)
    expected = jax.jit(jax.value_and_grad(lambda v: by_definition(cfg.model, v, pairs, LOSSES[name]), has_aux=True))(
        values
    )
    (loss, (logged, part, nll)), grads = expected
    packed, unpacked = batch_of(pairs, True), batch_of(pairs, False)
    assert len(packed["tokens"]) < len(unpacked["tokens"]) / 1.5
    for batch in (packed, unpacked):
        found = jax.jit(make_gradients(cfg, Context()))(values, batch)
        np.testing.assert_allclose(found[0], loss, rtol=1e-5)
        for path, grad in flatten(grads).items():
            apart = np.linalg.norm(flatten(found[1])[path] - grad)
            assert apart <= 2e-5 * np.linalg.norm(grad) + 1e-7, path
        for key, value in logged.items():
            np.testing.assert_allclose(found[2][key], value, rtol=2e-5, atol=1e-6)
        assert found[2]["tokens"] == len(unpacked["tokens"]), "the mean is over pairs"
        if len([t for t in cfg.objective.terms if t.scale]) > 1:
            np.testing.assert_allclose(found[2]["loss_preference"], part, rtol=1e-5)
            np.testing.assert_allclose(found[2]["loss_nll"], nll, rtol=1e-5)
        sums = jax.jit(make_eval_step(cfg.model, Context(), 1, objective_of(cfg.model, LOSSES[name])))(values, batch)
        for key, value in (*logged.items(), ("preference", part)):
            np.testing.assert_allclose(sums.losses[key] / sums.weights[key], value, rtol=2e-5, atol=1e-6)


@pytest.mark.random
def test_kto_is_its_definition_packed_accumulated_or_not(rng):
    """The divergence is the mean over the whole batch, also where microbatches follow each other."""
    how = PreferenceConfig("kto", beta=0.3, wanted_weight=1.5, unwanted_weight=0.5)
    cfg = config("llama3", {}, how)
    values = parameters.init(jax.random.key(0), families.spec(cfg.model))
    values = jax.tree.map(lambda a: a + rng.normal(0, 0.1, a.shape).astype(np.float32), values)
    pairs = draw(rng, cfg.model.vocab, 12)
    wanted = np.arange(12) % 4 == 0
    refer = with_divergence(lambda params, batch: batch, cfg.model, Context())

    def definition(values, towards):
        ids, mask, _ = alone(pairs)
        logits, _ = families.forward(cfg.model, values, jnp.asarray(ids[:, :-1], jnp.int32))
        scores = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, 1:, None], 2)[..., 0]
        frozen = -1 - (ids[:, :-1].astype(np.int64) * 31 + ids[:, 1:] * 17) % 13 / 4 - towards
        own, others = ((scores - frozen) * mask).sum(1).reshape(-1, 2).T
        z = jax.lax.stop_gradient(jnp.maximum(others.mean(), 0.0))
        each = jnp.where(wanted, 1.5 * jax.nn.sigmoid(-0.3 * (own - z)), 0.5 * jax.nn.sigmoid(-0.3 * (z - own)))
        return each.mean(), (own, z)

    divergences = []
    expected = jax.jit(jax.value_and_grad(definition, has_aux=True))
    for towards, packing, accum in ((0.0, True, 1), (5.0, True, 2), (5.0, False, 1)):
        (loss, (own, z)), grads = expected(values, towards)  # z is above 0 if the reference finds everything unlikely
        divergences.append(float(z))
        batch = batch_of(replace(pairs, wanted=wanted), packing)
        batch = {name: np.pad(a, ((0, len(a) % accum), (0, 0))) for name, a in batch.items()}
        batch["reference_log_probs"] = batch["reference_log_probs"] - np.float32(towards)
        run = replace(
            cfg, train=replace(cfg.train, grad_accum=accum), data=replace(cfg.data, batch_size=len(batch["tokens"]))
        )
        found = jax.jit(make_gradients(run, Context()))(values, refer(values, batch))
        np.testing.assert_allclose(found[0], loss, rtol=1e-5)
        for path, grad in flatten(grads).items():
            apart = np.linalg.norm(flatten(found[1])[path] - grad)
            assert apart <= 2e-5 * np.linalg.norm(grad) + 1e-7, path
        rewards = 0.3 * np.asarray(own)
        right = (rewards > 0.3 * z) == wanted
        logged = (rewards[wanted].mean(), rewards[~wanted].mean(), right.mean(), z)
        for key, value in zip(LABEL_REWARDS, logged, strict=True):
            np.testing.assert_allclose(found[2][key], value, rtol=2e-5, atol=1e-6)
    assert divergences[0] == 0 < divergences[1] == divergences[2]


def of_scores(cfg, head=True):
    """Returns the configuration of a reward model."""
    how = PreferenceConfig("reward", margin=0.4, center=0.05)
    return replace(cfg, preference=how, model=replace(cfg.model, reward_head=head), run=RunConfig())


@pytest.mark.random
@pytest.mark.parametrize("name", ["llama3", pytest.param("gemma2", marks=pytest.mark.matrix)])
def test_a_reward_model_is_its_definition_packed_or_not(rng, name):
    cfg = of_scores(config(name, {}))
    values = parameters.init(jax.random.key(0), families.spec(cfg.model))
    assert np.abs(values["reward"]["w"]).max() == 0
    values = jax.tree.map(lambda a: a + rng.normal(0, 0.1, a.shape).astype(np.float32), values)
    pairs = draw(rng, cfg.model.vocab)
    sides = [
        (pairs.ids[first:last], pairs.loss_mask[first:last])
        for bounds in zip(pairs.starts, pairs.middles, pairs.ends, strict=True)
        for first, last in itertools.pairwise(bounds)
    ]

    margins = rng.normal(0, 2, pairs.starts.size).astype(np.float32)

    def definition(values):
        ids, _, lengths = alone(pairs)  # every text ends with its completion
        batch = {"tokens": jnp.asarray(ids, jnp.int32)}
        hidden, _ = families.of(cfg.model).hidden_states(cfg.model, values, batch)
        last = hidden[np.arange(lengths.size), lengths - 1]
        chosen, rejected = jnp.dot(last, values["reward"]["w"], precision="highest").reshape(-1, 2).T
        each = jnp.logaddexp(0, -(chosen - rejected - 0.4 - margins)) + 0.05 * (chosen + rejected) ** 2
        margin = chosen - rejected
        return each.mean(), [one.mean() for one in (chosen, rejected, margin, margin > 0)]

    (loss, logged), grads = jax.jit(jax.value_and_grad(definition, has_aux=True))(values)
    ended = [scored(*one) for one in sides]
    sizes = np.append(0, np.cumsum([ids.size for ids, _ in ended]))
    tokens = PreferenceTokens(
        np.concatenate([ids for ids, _ in ended]), sizes[:-1:2], sizes[2::2], cfg.model.vocab,
        loss_mask=np.concatenate([mask for _, mask in ended]), middles=sizes[1::2], margins=margins,
    )  # fmt: skip
    for packing in (False, True):
        windows = PreferenceWindows.of(tokens, SEQ, packing)
        batch = windows.make_batch(np.arange(windows.first_W.size), SEQ, packing, cfg.model.vocab)
        found = jax.jit(make_gradients(cfg, Context()))(values, batch)
        np.testing.assert_allclose(found[0], loss, rtol=1e-5)
        expected = flatten(grads)
        assert "head/w" not in flatten(found[1]), "the head of the vocabulary is not trained"
        for path, grad in flatten(found[1]).items():
            apart = np.linalg.norm(expected[path] - grad)
            assert apart <= 2e-5 * np.linalg.norm(grad) + 1e-7, path
        for key, value in zip(REWARDS, logged, strict=True):
            np.testing.assert_allclose(found[2][key], value, rtol=2e-5, atol=1e-6)


MESHES = [
    pytest.param("llama3", {"context": 2, "tensor": 2}, {}, "dpo", id="context"),
    pytest.param("llama3", {"data": 2, "fsdp": 2}, {"accum": 2}, "hinge", id="accumulation", marks=pytest.mark.matrix),
    pytest.param("gemma2", {"fsdp": 2, "tensor": 2}, {}, "robust", id="tensor", marks=pytest.mark.matrix),
    pytest.param("gpt2", {"pipe": 2, "data": 2}, {}, "dpo", id="pipe", marks=pytest.mark.matrix),
    pytest.param("llama3", {"pipe": 2, "context": 2}, {}, "orpo", id="pipe and context", marks=pytest.mark.matrix),
    pytest.param("softmax", {"expert": 2, "data": 2}, {}, "ipo", id="experts", marks=pytest.mark.matrix),
    pytest.param("qwen3", {"fsdp": 4, "partitioner": "auto"}, {}, "simpo", id="auto", marks=pytest.mark.matrix),
    pytest.param("lora", {"tensor": 2, "fsdp": 2}, {}, "dpo", id="adapters", marks=pytest.mark.matrix),
]


@pytest.mark.random
@pytest.mark.parametrize(("name", "mesh", "how", "loss"), MESHES)
def test_gradients_on_a_mesh_are_those_of_one_device(name, mesh, how, loss, seed, rng):
    one = config(name, {}, LOSSES[loss], packing=True)
    other = config(name, mesh, LOSSES[loss], packing=True, **how)
    usual = batch_of(draw(rng, one.model.vocab, 60), True, ROWS // 2)
    # The shortest conversations have one target each, so a row has as many conversations as it has places.
    short = batch_of(draw(rng, one.model.vocab, ROWS * SEQ, longest=1), True, ROWS // 2)
    batch = {name: np.concatenate([usual[name], short[name]]) for name in usual}
    found = [test_meshes.gradients(cfg, seed, batch=batch) for cfg in (one, other)]
    assert max(test_meshes.errors(name, *found)) < 1e-5


# ---- runs

FLAGS = [
    "--model.num_layers=2", "--model.d_model=32", "--model.d_ff=64", "--model.num_heads=4", "--data.seq_len=96",
    "--data.batch_size=8", "--train.eval_every=4", "--train.eval_steps=2", "--run.log_every=1", "--checkpoint.every=2",
    "--sample.prompts=[]", "--optim.warmup_steps=0", "--optim.schedule=constant", "--data.packing=true",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with conversations, pairs of completions, and a run that was trained on the conversations."""
    folder = tmp_path_factory.mktemp("preferences")
    asked = [(f"{i} + {i}?", f"{2 * i}", f"{2 * i + 1}") for i in range(40)]
    chats = [{"prompt": prompt, "completion": right} for prompt, right, _ in asked]
    pairs = [{"prompt": prompt, "chosen": right, "rejected": wrong} for prompt, right, wrong in asked]
    for name, lines in (("chat", chats), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    flags = ["--data.source=chat", f"--data.path={folder}/chat.jsonl", f"--run.dir={folder}/chat", "--train.steps=4"]
    main(parse_config([*FLAGS, *flags]))
    return folder


def train(folder, name, steps, *more):
    """Trains from the run `chat`, and returns the records of the log."""
    flags = [
        "--data.source=preferences", f"--data.path={folder}/pairs.jsonl", f"--run.init_from={folder}/chat",
        f"--train.steps={steps}", f"--run.dir={folder / name}", "--optim.lr=1e-3",
    ]  # fmt: skip
    main(parse_config([*FLAGS, *flags, *more]))
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def arrays(path):
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    saved = ocp.metadata(path).metadata
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one), saved)
    return {name: np.asarray(leaf) for name, leaf in flatten(ocp.load(path, abstract)).items()}


@pytest.mark.matrix
def test_a_run_resumes_bit_for_bit_and_begins_where_the_reference_is(folder):
    whole = train(folder, "whole", 4)
    train(folder, "parts", 2)
    parts = train(folder, "parts", 4)
    saved, again = (arrays(folder / name / "checkpoints" / "4") for name in ("whole", "parts"))
    assert [name for name in saved if not np.array_equal(saved[name], again[name])] == []
    first, *_ = (record for record in whole if "loss" in record)
    np.testing.assert_allclose(first["loss"], np.log(2), atol=1e-5)  # the model is its own reference
    assert abs(first["rewards/margins"]) < 1e-4
    losses = [[record["loss"] for record in log if "loss" in record] for log in (whole, parts)]
    assert losses[0] == losses[1]
    evaluated = [record for record in whole if "eval_loss" in record][-1]
    assert {f"eval_{name}" for name in REWARDS} <= evaluated.keys()
    assert 0 <= evaluated["eval_rewards/accuracies"] <= 1
    margin = evaluated["eval_rewards/chosen"] - evaluated["eval_rewards/rejected"]
    np.testing.assert_allclose(evaluated["eval_rewards/margins"], margin, atol=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "mesh", [[], ["--mesh.pipe=2", "--mesh.fsdp=2", "--mesh.data=2"], ["--mesh.context=2", "--mesh.tensor=2"]]
)
def test_adapters_switched_off_are_the_reference(folder, mesh):
    name = f"adapters{len(mesh)}{''.join(mesh)[-9:-2]}"
    off = train(folder, f"{name}off", 3, "--model.lora.rank=2", *mesh)
    read = train(folder, f"{name}read", 3, "--model.lora.rank=2", f"--preference.reference={folder}/chat", *mesh)
    losses = [[record["loss"] for record in log if "loss" in record] for log in (off, read)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    np.testing.assert_allclose(losses[0][0], np.log(2), atol=1e-5)
    assert losses[0][-1] < losses[0][0]


def scores_of(folder, name, rows):
    """Returns the scores that a saved reward model gives to prompts with completions."""
    return jaxstack.load(folder / name).rewards([([{"role": "user", "content": q}], a) for q, a in rows])


@pytest.mark.matrix
def test_a_reward_model_learns_is_saved_and_scores_on_every_mesh(folder):
    reward = ["--preference.loss=reward", "--model.reward_head=true", "--optim.lr=1e-2"]
    log = train(folder, "reward", 6, *reward)
    steps = [record for record in log if "loss" in record]
    np.testing.assert_allclose(steps[0]["loss"], np.log(2), atol=1e-6)  # all scores are 0 at first
    assert steps[-1]["loss"] < 0.6
    splits = (
        ["--mesh.pipe=2", "--mesh.fsdp=2", "--mesh.data=2"],
        ["--mesh.context=2", "--mesh.tensor=2", "--mesh.data=2", "--train.grad_accum=2"],
    )
    for k, mesh in enumerate(splits):
        other = train(folder, f"reward{k}", 6, *reward, *mesh)
        values = [[record["loss"] for record in each if "loss" in record] for each in (log, other)]
        np.testing.assert_allclose(*values, rtol=2e-4)
    adapted = train(folder, "rewardlora", 6, *reward, "--model.lora.rank=2")
    assert [record["loss"] for record in adapted if "loss" in record][-1] < 0.65
    rows = [(f"{i} + {i}?", f"{2 * i + wrong}") for i in range(40) for wrong in (0, 1)]
    found = scores_of(folder, "reward", rows).reshape(-1, 2)
    assert (found[:, 0] > found[:, 1]).mean() > 0.8
    adapted = scores_of(folder, "rewardlora", rows[:2])
    assert adapted[0] != adapted[1]
    alone = scores_of(folder, "reward", rows[10:11])
    np.testing.assert_allclose(alone[0], found.ravel()[10], rtol=1e-4, atol=1e-5)  # calls of other shapes
    with pytest.raises(ConfigError, match=r"chat is not a reward model \(model\.reward_head=false\)"):
        scores_of(folder, "chat", rows[:1])
    with pytest.raises(ConfigError, match=r"model\.reward_head=true scores texts, and does not continue them"):
        jaxstack.load(folder / "reward").generate("1 + 1?")
    evaluated(folder, found)
    rewarded(folder)


def evaluated(folder, scores):
    """`jaxstack eval` prints and keeps the share of pairs that the model ranks right, and writes each score."""
    argv = ["eval", f"{folder}/reward", f"--preferences={folder}/pairs.jsonl", f"--scores={folder}/scores.jsonl"]
    run_command(words=[*argv, "--rows=4"])
    lines = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    assert lines[3]["row"].endswith("pairs.jsonl, line 4")
    written = [[line["score_chosen"], line["score_rejected"]] for line in lines]
    np.testing.assert_allclose(written, scores, rtol=1e-4, atol=1e-5)
    (record,) = (json.loads(path.read_text()) for path in (folder / "reward" / "evaluations").glob("*.json"))
    results = {one["metric"]: one["value"] for one in record["results"]}
    np.testing.assert_allclose(results["accuracy"], (scores[:, 0] > scores[:, 1]).mean())
    np.testing.assert_allclose(results["margin"], (scores[:, 0] - scores[:, 1]).mean(), rtol=1e-4)
    with pytest.raises(SystemExit) as stopped:
        run_command(words=["eval", f"{folder}/chat", f"--preferences={folder}/pairs.jsonl"])
    assert stopped.value.code == 2


def rewarded(folder):
    """Completions that are sampled get the scores of the reward model, with their weight."""
    flags = [
        "--data.source=prompts", f"--data.path={folder}/pairs.jsonl", f"--run.init_from={folder}/chat",
        f"--run.dir={folder}/policy", "--train.steps=1", f"--rl.rewards=[run:{folder}/reward]", "--rl.weights=[0.5]",
        "--rl.group=4", "--rl.tokens=6", "--train.eval_steps=1", "--data.packing=false",
    ]  # fmt: skip
    main(parse_config([*FLAGS, *flags]))
    records = [json.loads(line) for line in (folder / "policy" / "metrics.jsonl").read_text().splitlines()]
    (step,) = (record for record in records if "reward" in record and "grad_norm" in record)
    assert np.isfinite(step["reward"])
    assert step["reward_std"] > 0
    (samples,) = (record["samples"] for record in records if record.get("samples"))
    shown = [(one["prompt"], one["completion"]) for one in samples if one["completion"].strip()]
    found = 0.5 * scores_of(folder, "reward", shown)
    ended = {one["completion"]: one["reward"] for one in samples}
    close = [abs(ended[text] - value) < 1e-3 for (_, text), value in zip(shown, found, strict=True)]
    assert not shown or any(close) or all(len(text) == 6 for _, text in shown), "a text that was cut ends elsewhere"
    with pytest.raises(ConfigError, match=r"rl\.rewards=run:.*chat is not a reward model"):
        main(parse_config([*FLAGS, *flags, f"--rl.rewards=[run:{folder}/chat]", f"--run.dir={folder}/none"]))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("same", "split"),
    [
        pytest.param([], ["--train.grad_accum=4", "--mesh.data=2", "--mesh.tensor=4"], id="accumulation"),
        pytest.param([], ["--mesh.pipe=2", "--mesh.fsdp=2", "--mesh.data=2"], id="pipe"),
        pytest.param(["--model.lora.rank=2"], ["--mesh.context=2", "--mesh.tensor=2"], id="context and adapters"),
        pytest.param(
            ["--data.packing=false"], ["--train.grad_accum=4", "--mesh.data=2", "--mesh.tensor=4"], id="unpacked"
        ),
    ],
)
def test_runs_of_kto_are_equal_whatever_splits_the_batch(folder, same, split, request):
    """Files of pairs are read as two completions each."""
    name = request.node.callspec.id.replace(" ", "")
    keys = ["--preference.loss=kto", "--optim.lr=1e-2", *same]
    one = train(folder, f"kto_{name}_one", 3, *keys)
    other = train(folder, f"kto_{name}_other", 3, *keys, *split)
    for key in ("loss", *LABEL_REWARDS, "grad_norm"):
        if key == "rewards/accuracies":
            continue  # in the first step all log-ratios are 0, but for rounding
        values = [[record[key] for record in log if "loss" in record] for log in (one, other)]
        np.testing.assert_allclose(*values, rtol=2e-4, atol=1e-5, err_msg=key)
    steps = [record for record in one if "loss" in record]
    assert steps[0]["kl"] < 1e-4
    np.testing.assert_allclose(steps[0]["loss"], 0.5, atol=1e-4)
    assert any("eval_kl" in record for record in one)


@pytest.mark.matrix
def test_a_reference_that_does_not_suit_is_named(folder):
    with pytest.raises(ConfigError, match=r"preference\.reference=nowhere is not a folder of a run"):
        train(folder, "refused", 2, "--preference.reference=nowhere")
    assert not (folder / "refused" / "metrics.jsonl").exists()
