"""Policy gradients: losses of a step against their definitions in NumPy, and one loss on meshes and in microbatches."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_meshes

from jaxstack import families
from jaxstack.common.tree import flatten
from jaxstack.config import Config, PipelineConfig, RunConfig
from jaxstack.config.training import RLConfig
from jaxstack.data.rewarded import RewardedPrompt
from jaxstack.families.context import make_context
from jaxstack.generate.rollouts import Completion, Judged, make_arrays
from jaxstack.models import params as parameters
from jaxstack.models.context import Context
from jaxstack.training import losses
from jaxstack.training.assemble import make_gradients
from jaxstack.training.features.policy import sums_of, trainer_log_probs
from jaxstack.training.state import Recipe, abstract_state, make_state

SEQ, ROWS = test_meshes.SEQ, test_meshes.BATCH
G = 4
TOKENS = 9
LOSSES = {
    "grpo": RLConfig(kl_weight=0.3, kl="k3"),
    "dr_grpo": RLConfig(loss="dr_grpo"),
    "dapo": RLConfig(loss="dapo", kl_weight=0.1, kl="k1"),
    "gspo": RLConfig(loss="gspo", clip_low=0.05, clip_high=0.1),
    "rloo": RLConfig(loss="rloo", kl_weight=0.05, kl="k2"),
    "cispo": RLConfig(loss="cispo", clip_high=1.3),
    "inexact": RLConfig(exact=False, importance_limit=1.2, kl_weight=0.2),
}
LOSSES = {name: replace(rl, group=G, tokens=TOKENS) for name, rl in LOSSES.items()}


def draw(rng, vocab, rows=ROWS):
    """Returns groups of completions of all lengths, whose log-probabilities belong to no model."""
    groups = []
    for _ in range(rows // G):
        prompt = rng.integers(0, vocab, rng.integers(1, 6)).tolist()
        group = []
        for _ in range(G):
            tokens = rng.integers(0, vocab, rng.integers(1, TOKENS + 1)).tolist()
            old = -rng.gamma(2.0, 2.0, len(tokens)).astype(np.float32)
            sampler = old + rng.normal(0, 0.3, old.shape).astype(np.float32)
            reward = float(rng.normal())
            completion = Completion(tokens, old, sampler)
            group.append(Judged(RewardedPrompt("row", [], {}), prompt, completion, True, "", [reward], reward))
        groups.append(group)
    return groups


def by_definition(rl, groups, new, reference):
    """Returns loss and divergence in float64, one completion and token at a time, with `new[i][t]` for completion i."""
    low, high = rl.bounds
    total, penalty, kl, tokens = 0.0, 0.0, 0.0, 0
    flat = [one for group in groups for one in group]
    count = sum(len(one.completion.tokens) for one in flat)
    i = 0
    for group in groups:
        rewards = np.array([one.reward for one in group])
        for k, one in enumerate(group):
            A = rewards[k] - rewards.mean()
            if rl.loss == "rloo":
                A = rewards[k] - np.delete(rewards, k).mean()
            elif rl.loss != "dr_grpo":
                A /= rewards.std(ddof=1) + 1e-6
            old = one.completion.old_log_probs.astype(np.float64)
            n = len(old)
            ratios = np.exp(new[i] - old)
            if rl.loss == "gspo":
                ratios = np.full(n, np.exp((new[i] - old).mean()))
            for t in range(n):
                clipped = min(max(ratios[t], 1 - low), 1 + high)
                loss = -min(ratios[t] * A, clipped * A)
                if rl.loss == "cispo":
                    loss = -min(ratios[t], high) * A * new[i][t]
                if rl.loss == "rloo":
                    loss = -A * new[i][t]
                loss *= min(np.exp(old[t] - float(one.completion.log_probs[t])), rl.importance_limit)
                weight = {
                    "grpo": 1 / (n * len(flat)), "gspo": 1 / (n * len(flat)), "dapo": 1 / count, "cispo": 1 / count,
                    "dr_grpo": 1 / (len(flat) * TOKENS), "rloo": 1 / len(flat),
                }[rl.loss]  # fmt: skip
                x = reference[i][t] - new[i][t]
                each = {"k1": -x, "k2": x**2 / 2, "k3": np.exp(x) - x - 1}[rl.kl]
                total += weight * loss
                penalty += weight * rl.kl_weight * each
                kl += each
                tokens += 1
            i += 1
    return total + penalty, kl / tokens


def placed(groups, values, seq_len):
    """Returns values of tokens where a batch has the targets of completions [B, S]."""
    flat = [one for group in groups for one in group]
    found = np.full((len(flat), seq_len), -77.0)
    for row, one, own in zip(found, flat, values, strict=True):
        row[len(one.ids) - 1 : len(one.ids) - 1 + len(own)] = own
    return found


@pytest.mark.random
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_a_step_is_its_definition(rng, name):
    rl = LOSSES[name]
    groups = draw(rng, 50)
    flat = [one for group in groups for one in group]
    new = [one.completion.old_log_probs + rng.normal(0, 0.3, len(one.completion.tokens)) for one in flat]
    reference = [own + rng.normal(0, 0.5, own.shape) for own in new]
    batch = make_arrays(rl, groups, SEQ) | {"reference_log_probs": placed(groups, reference, SEQ)}
    sums = sums_of(rl, placed(groups, new, SEQ), batch)
    expected, kl = by_definition(rl, groups, new, reference)
    loss = sum(term.scale * float(sums[term.name]) / batch[term.weights].sum() for term in rl.terms)
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-6)
    if rl.has_reference:
        np.testing.assert_allclose(sums["kl"] / batch["loss_weights"].sum(), kl, rtol=1e-5, atol=1e-6)


def config(name, mesh, rl, layers=2, pipeline=None, **how) -> Config:
    cfg = test_meshes.config(name, mesh, **how)
    source = replace(cfg.data, source="prompts", path="prompts.jsonl")
    stages = PipelineConfig(split=(".*",), **pipeline or {})
    model = replace(cfg.model, num_layers=layers)
    return replace(cfg, model=model, data=source, rl=rl, run=RunConfig(init_from="base"), pipeline=stages)


def with_reference(batch):
    ids = batch["tokens"].astype(np.int64) * 31 + batch["targets"] * 17
    return batch | {"reference_log_probs": -1 - (ids % 13).astype(np.float32) / 4}


STAGES = {"remat": "full", "pipeline": {"microbatches": 2}}
CHUNKS = {"remat": "full", "layers": 5, "pipeline": {"schedule": "interleaved_1f1b", "chunks": 2, "microbatches": 4}}
ZERO_BUBBLE = {"remat": "full", "accum": 2, "layers": 3, "pipeline": {"schedule": "zb_h1", "microbatches": 2}}
GPIPE = {"remat": "selective", "layers": 4, "pipeline": {"schedule": "gpipe", "microbatches": 4}}
STATIC = {"remat": "full", "pipeline": {"loops": "static", "microbatches": 4, "gather": "layer"}}

MESHES = [
    pytest.param("llama3", {"data": 2, "tensor": 2}, {}, "grpo", id="tensor"),
    pytest.param("llama3", {"data": 2}, {"accum": 2}, "dapo", id="accumulation"),
    pytest.param("gpt2", {"data": 2, "fsdp": 2}, {"accum": 2}, "gspo", id="fsdp", marks=pytest.mark.matrix),
    pytest.param("qwen3", {"fsdp": 2}, {"remat": "full"}, "cispo", id="remat", marks=pytest.mark.matrix),
    pytest.param("softmax", {"expert": 2, "data": 2}, {}, "dr_grpo", id="experts", marks=pytest.mark.matrix),
    pytest.param("gemma2", {"fsdp": 2, "tensor": 2}, {}, "inexact", id="inexact", marks=pytest.mark.matrix),
    pytest.param("llama3", {"fsdp": 4}, {"accum": 2}, "rloo", id="rloo", marks=pytest.mark.matrix),
    pytest.param("llama3", {"pipe": 2, "data": 2}, STAGES, "grpo", id="pipe"),
    pytest.param("gpt2", {"pipe": 2, "tensor": 2}, CHUNKS, "gspo", id="chunks", marks=pytest.mark.matrix),
    pytest.param("qwen3", {"pipe": 2, "fsdp": 2}, ZERO_BUBBLE, "dapo", id="zero bubble", marks=pytest.mark.matrix),
    pytest.param("softmax", {"pipe": 2, "expert": 2}, STAGES, "cispo", id="staged experts", marks=pytest.mark.matrix),
    pytest.param("gemma2", {"pipe": 2}, GPIPE, "inexact", id="gpipe", marks=pytest.mark.matrix),
]


@pytest.mark.random
@pytest.mark.parametrize(("name", "mesh", "how", "loss"), MESHES)
def test_gradients_on_a_mesh_are_those_of_one_device(name, mesh, how, loss, seed, rng):
    one = config(name, {}, LOSSES[loss], how.get("layers", 2))
    other = config(name, mesh, LOSSES[loss], **how)
    batch = with_reference(make_arrays(LOSSES[loss], draw(rng, one.model.vocab), SEQ))
    found = [test_meshes.gradients(cfg, seed, batch=batch) for cfg in (one, other)]
    extremes = [sums.pop("log_ratio").largest for sums, _, _ in found]
    np.testing.assert_allclose(*extremes, rtol=1e-5)
    assert max(test_meshes.errors(name, *found)) < 1e-5


@pytest.mark.random
@pytest.mark.parametrize("mesh", [{}, pytest.param({"data": 2, "fsdp": 2}, marks=pytest.mark.matrix)])
def test_the_log_probabilities_of_a_step_have_the_bits_of_the_forward_pass(mesh, rng):
    """With `rl.exact` the ratios are exactly 1 before the parameters change; and the extremes say how far from it."""
    cfg = config("llama3", mesh, replace(LOSSES["grpo"], kl_weight=0.0))
    devices = jax.devices()[: int(np.prod([*cfg.mesh.sizes.values()]))]
    ctx = Context() if not mesh else make_context(cfg, test_meshes.make_mesh(cfg.mesh, ROWS, devices))
    spec = families.spec(cfg.model)
    values = jax.jit(lambda key: parameters.init(key, spec))(jax.random.key(0))
    groups = draw(rng, cfg.model.vocab)
    batch = make_arrays(cfg.rl, groups, SEQ)

    def score(values, batch):
        return losses.sequence_log_probs(cfg.model, values, batch, ctx.whole_sequences())

    if mesh:
        where = (ctx.layout.parameters(spec), ctx.layout.batch)
        values = jax.device_put(values, jax.tree.map(ctx.layout.sharding, where[0]))
        score = ctx.layout.local(score, where, ctx.layout.batch)
    old = np.asarray(jax.jit(score)(values, {name: batch[name] for name in ("tokens", "targets")}))
    exact = batch | {"old_log_probs": np.where(batch["loss_weights"] > 0, old, 0)}
    gradients = jax.jit(make_gradients(cfg, ctx))
    _, grads, sums = gradients(values, exact)
    np.testing.assert_array_equal(np.asarray(sums["log_ratio"].largest), 0)
    assert float(sum(abs(leaf).sum() for leaf in jax.tree.leaves(grads))) > 0
    for shift in (0, 20, -20):  # ratios on both sides of 1, below it, and above it
        apart = (old - batch["old_log_probs"] - shift)[batch["loss_weights"] > 0]
        _, _, sums = gradients(values, batch | {"old_log_probs": batch["old_log_probs"] + np.float32(shift)})
        np.testing.assert_allclose(sums["log_ratio"].largest, [apart.max(), -apart.min()], rtol=1e-5)


STAGED = [
    pytest.param("llama3", {"pipe": 2}, STAGES, "float32", id="pipe"),
    pytest.param("llama3", {"pipe": 2}, GPIPE | {"remat": "full"}, "float32", id="gpipe", marks=pytest.mark.matrix),
    pytest.param("llama3", {"pipe": 2, "data": 2}, CHUNKS, "bfloat16", id="chunks", marks=pytest.mark.matrix),
    pytest.param("gpt2", {"pipe": 2, "fsdp": 2, "tensor": 2}, ZERO_BUBBLE, "float32", id="zero bubble",
                 marks=pytest.mark.matrix),
    pytest.param("softmax", {"pipe": 2, "expert": 2}, STAGES | {"accum": 2}, "float32", id="experts",
                 marks=pytest.mark.matrix),
    pytest.param("qwen3", {"pipe": 2, "fsdp": 2}, STATIC, "float32", id="static", marks=pytest.mark.matrix),
]  # fmt: skip


@pytest.mark.random
@pytest.mark.parametrize(("name", "mesh", "how", "dtype"), STAGED)
def test_a_pipeline_without_gradients_has_the_bits_of_its_step(name, mesh, how, dtype, rng):
    """The program that gives the old log-probabilities; and its log-probabilities are those of one device."""
    cfg = config(name, mesh, replace(LOSSES["grpo"], kl_weight=0.0), **how)
    cfg = replace(cfg, train=replace(cfg.train, dtype=dtype))
    accum = cfg.train.grad_accum
    devices = jax.devices()[: int(np.prod([*cfg.mesh.sizes.values()]))]
    ctx = make_context(cfg, test_meshes.make_mesh(cfg.mesh, ROWS // accum, devices))
    values = make_state(Recipe.of(cfg), ctx, abstract_state(Recipe.of(cfg), ctx)).params
    batch = make_arrays(cfg.rl, draw(rng, cfg.model.vocab), SEQ)

    def placed(arrays):
        return jax.device_put(arrays, ctx.layout.sharding(ctx.layout.batch))

    texts = {name: batch[name] for name in ("tokens", "targets")}
    old = np.asarray(trainer_log_probs(cfg.model, ctx, accum, cfg.pipeline.split)(values, placed(texts)))
    exact = batch | {"old_log_probs": np.where(batch["loss_weights"] > 0, old, 0)}
    gradients = jax.jit(make_gradients(cfg, ctx))
    _, _, sums = gradients(values, placed(exact))
    np.testing.assert_array_equal(np.asarray(sums["log_ratio"].largest), 0)
    _, _, sums = gradients(values, placed(batch))
    apart = (old - batch["old_log_probs"])[batch["loss_weights"] > 0]
    np.testing.assert_allclose(sums["log_ratio"].largest, [apart.max(), -apart.min()], rtol=1e-5)
    one = jax.tree.map(lambda a: jax.device_put(np.asarray(a), jax.devices()[0]), values)
    whole = {path: a[ctx.layout.stages.of(path).slot_of_layer] for path, a in flatten(one).items() if "layers" in path}
    one = jax.tree.unflatten(jax.tree.structure(one), (flatten(one) | whole).values())
    expected = losses.sequence_log_probs(cfg.model, one, texts, Context(dtype=jnp.dtype(dtype)))
    tolerance = 1e-5 if dtype == "float32" else 0.05  # bfloat16 has 8 bits
    np.testing.assert_allclose(old, np.asarray(expected), rtol=tolerance, atol=tolerance)
