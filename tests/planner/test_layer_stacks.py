"""Compares memory and traffic of latent attention, and of models whose first layers have no experts, with traces.

The expected numbers of the first tests are worked out by hand.
"""

import math
from dataclasses import replace

import jax
import pytest
from families import EXPERTS, NEAR

from jaxstack.common.hardware import CHIPS
from jaxstack.config import (
    Config,
    ConfigError,
    DataConfig,
    ExpertLayers,
    MeshConfig,
    ModelConfig,
    PipelineConfig,
    SampleConfig,
    TrainConfig,
    resolve,
)
from jaxstack.families.context import make_context
from jaxstack.planner import estimate, figures, hlo, memory, mesh_search, trace, traced
from jaxstack.planner.job import Job
from jaxstack.planner.memory import Room
from jaxstack.planner.roofline import ChipLimits
from jaxstack.planner.sizes import has_formulas, layer_stacks
from jaxstack.planner.step_clocks import ChipClock
from jaxstack.planner.step_time import step_time
from jaxstack.sharding import make_mesh
from jaxstack.training import assemble

LATENT = replace(NEAR["latent"], num_layers=3, vocab_size=64)
WIDE_QUERIES = replace(LATENT, latent=replace(LATENT.latent, q_rank=0))
DENSE_FIRST = replace(EXPERTS["dense_first"], vocab_size=64)
TWO_FIRST = replace(DENSE_FIRST, num_layers=4, moe=replace(DENSE_FIRST.moe, layers=ExpertLayers(first=2)))
BOTH = replace(DENSE_FIRST, head_dim=12, latent=LATENT.latent, num_kv_heads=DENSE_FIRST.num_heads, num_layers=5)


def job_of(model: ModelConfig, remat: str = "none", micro: int = 0, accum: int = 1, **mesh: int) -> Job:
    cfg = Config(
        model=model,
        data=DataConfig(seq_len=32, batch_size=16),
        train=TrainConfig(remat=remat, grad_accum=accum, dtype="float32"),
        mesh=MeshConfig(**{"data": 1} | mesh),
        pipeline=PipelineConfig(microbatches=micro) if micro else PipelineConfig(),
        sample=SampleConfig(prompts=()),
    )
    cfg = resolve(cfg, None)
    return Job(cfg, memory.context(cfg, math.prod(cfg.mesh.sizes.values()), "cpu"))


def test_latent_attention_gathers_narrow_vectors_by_hand():
    """A latent of 16, a shared key of 4 and queries' 24: in place of the stream of 32 in each layer, 3 layers.

    With `full`, the backward pass gathers all of them again. The stream is gathered before the MLP and its gradients.
    """
    job = job_of(LATENT, "full", tensor=2)
    sent = {c.where: c for c in estimate.traffic(job) if c.axes == ("tensor",)}
    for where, width in (("latent of attention", 16), ("key that heads share", 4), ("input of queries", 24)):
        assert sent[where].kind == "all-gather"
        assert (sent[where].shape, sent[where].times) == ((16, 32, width), 3 * 2)
        back = sent[f"gradient of the {where}"]
        assert (back.kind, back.shape, back.times) == ("reduce-scatter", (16, 32, width), 3)
    inputs = sent["inputs of attention and MLP"]
    assert (inputs.shape, inputs.times) == ((16, 32, 32), 3 * 2)  # of the MLP, forward and again
    assert sent["outputs of attention and MLP"].times == 3 * (2 + 1 + 1)  # two outputs, one again, one gradient


def test_selective_recomputation_gathers_no_shared_key_again():
    """The rotated keys of all heads are saved by name."""
    sent = {c.where: c.times for c in estimate.traffic(job_of(LATENT, "selective", tensor=2))}
    assert (sent["latent of attention"], sent["key that heads share"], sent["input of queries"]) == (6, 3, 6)


def test_layers_with_and_without_experts_save_what_they_have_by_hand():
    """16 x 32 tokens in float32: a layer saves its streams, heads, and its two products of the MLP or of experts."""
    job = job_of(DENSE_FIRST, "selective")
    m = job.model
    assert [(one.name, one.layers) for one in layer_stacks(m)] == [("dense_layers", 1), ("layers", 2)]
    parts = estimate.memory(job, *estimate.abstract_inputs(job))
    tokens = 16 * 32
    heads = 2 * m.head_width * (m.num_heads + m.kv_heads)
    dense = 4 * tokens * (2 * m.d_model + heads + 2 * m.ff_width)
    hidden = (m.moe.top_k + m.moe.shared_experts) * m.expert_width
    assert parts["saved by 1 layer of dense_layers, remat selective"] == dense
    assert parts["saved by 2 layers of layers, remat selective"] == 2 * 4 * tokens * (
        2 * m.d_model + heads + 2 * hidden
    )


def test_latent_attention_saves_narrow_values_by_hand():
    """Heads of queries and keys have 12 elements, values and outputs 10."""
    job = job_of(LATENT, "selective")
    m = job.model
    tokens = 16 * 32
    found = estimate.memory(job, *estimate.abstract_inputs(job))["saved by 3 layers, remat selective"]
    assert found == 3 * 4 * tokens * (2 * m.d_model + m.num_heads * (12 + 12 + 10 + 10) + 2 * m.ff_width)


@pytest.mark.parametrize(
    ("model", "how"),
    [
        pytest.param(LATENT, {"remat": "selective", "tensor": 2}, id="latent, selective, tensor"),
        pytest.param(
            WIDE_QUERIES, {"remat": "full", "tensor": 2, "sequence_parallel": False}, id="wide queries, full, tensor"
        ),
        pytest.param(LATENT, {"remat": "full", "context": 4}, id="latent, full, ring"),
        pytest.param(
            WIDE_QUERIES, {"remat": "dots", "tensor": 2, "fsdp": 2}, marks=pytest.mark.slow, id="wide queries, dots"
        ),
        pytest.param(LATENT, {"tensor": 2}, marks=pytest.mark.slow, id="latent, none, tensor"),
        pytest.param(
            LATENT, {"context": 2, "context_method": "all_gather"}, marks=pytest.mark.slow, id="latent, none, context"
        ),
        pytest.param(DENSE_FIRST, {"tensor": 2, "data": 2, "accum": 2}, marks=pytest.mark.slow, id="dense first"),
        pytest.param(BOTH, {"remat": "selective", "tensor": 2, "fsdp": 2}, marks=pytest.mark.slow, id="both"),
    ],
)
def test_bytes_along_each_axis_are_those_of_the_trace(model, how):
    """Scalars are left out."""
    job = job_of(model, **how)
    assert has_formulas(job.model)
    expected = hlo.sent(traced.traffic(job))
    least = 0.004 * sum(expected.values())
    found = hlo.sent(estimate.traffic(job))
    assert not {key for key in {*found, *expected} if abs(found[key] - expected[key]) > least}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "how"),
    [
        pytest.param(LATENT, {"remat": "selective", "tensor": 2, "fsdp": 2}, id="latent"),
        pytest.param(TWO_FIRST, {"remat": "full", "expert": 2, "tensor": 2}, id="dense first"),
        pytest.param(BOTH, {"remat": "full", "pipe": 2, "fsdp": 2, "micro": 4}, id="both, in a pipeline"),
    ],
)
def test_bytes_along_each_axis_are_what_compiled_programs_send(model, how):
    """Below a hundredth are scalars and statistics of routing, which formulas leave out.

    Two layers come first: XLA removes a loop of one layer, and merges its recomputation with the forward pass.
    """
    cfg = job_of(model, **how).cfg
    devices = jax.devices()[: math.prod(cfg.mesh.sizes.values())]
    ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.microbatch_size, devices))
    state, batch = estimate.abstract_inputs(Job(cfg, ctx))
    text = assemble.jit_train_step(cfg, ctx, state).lower(state, batch).compile().as_text()
    sent = hlo.sent(hlo.collectives(text, ctx.layout.mesh.shape, ctx.layout.trip_counts))
    expected = hlo.sent(estimate.traffic(Job(cfg, ctx)))
    least = 0.01 * sum(sent.values())
    differ = {key: (sent[key], expected[key]) for key in {*sent, *expected} if abs(sent[key] - expected[key]) > least}
    assert not differ


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "remat", "how"),
    [
        pytest.param(LATENT, "selective", {"tensor": 2}, id="latent, selective"),
        pytest.param(LATENT, "full", {"tensor": 2}, id="latent, full"),
        pytest.param(BOTH, "selective", {"pipe": 2, "micro": 4}, id="both, in a pipeline"),
    ],
)
def test_what_layers_save_is_what_the_trace_saves(model, remat, how):
    """Norms save a statistic of each token, and experts the order of the tokens, which formulas leave out."""
    job = job_of(replace(model, d_model=128, d_ff=256), remat, **how)
    arrays = next(found for label, found in traced.saved(job).items() if "of layers," in label)
    parts = estimate.memory(job, *estimate.abstract_inputs(job)).items()
    (found,) = (size for name, size in parts if name.startswith("saved by") and "dense" not in name)
    assert found == pytest.approx(trace.total(arrays), rel=0.15)


def test_layers_that_are_not_equal_are_refused_where_all_must_be():
    for model, key in ((LATENT, "model.latent.kv_rank=16"), (DENSE_FIRST, "model.moe.layers with layers without")):
        with pytest.raises(ConfigError, match=key):
            figures.memory_by_policy(job_of(model), 16)


def test_units_of_layers_with_and_without_experts_are_traced():
    every = replace(DENSE_FIRST, num_layers=4, moe=replace(DENSE_FIRST.moe, layers=replace(
        DENSE_FIRST.moe.layers, first=1, every=2)))  # fmt: skip
    assert len(layer_stacks(every)) == 1
    assert not has_formulas(every)


def test_a_pipeline_of_two_stacks_waits_in_the_ticks_of_both():
    """Two stages have the only dense layer on the first, and experts on both: some ticks have no unit of a stage."""
    job = job_of(DENSE_FIRST, "full", pipe=2, micro=4)
    time = step_time(job, ChipLimits(CHIPS["h100"]))
    assert time.bubble > 0.2 * (time.layers + time.recomputation)


@pytest.mark.slow
def test_the_search_finds_what_trying_everything_finds():
    """With all memory the fastest has no pipeline, whose stages wait. Nothing bounds the idle time of two stacks."""
    cfg = replace(job_of(BOTH).cfg, mesh=MeshConfig(), data=DataConfig(seq_len=32, batch_size=4))
    clock = ChipClock(ChipLimits(CHIPS["h100"]))
    space = mesh_search.Space(cfg, 2, "gpu")
    found = mesh_search.search(space, Room("a device", math.inf, math.inf), clock, 200)
    best: dict[int, float] = {}
    for one in space.candidates():
        seconds = clock.seconds(Job(one, memory.context(one, 2, "gpu")))
        best[one.mesh.pipe] = min(seconds, best.get(one.mesh.pipe, math.inf))
    assert best.keys() == {1, 2}
    for pipe, seconds in best.items():
        assert min(one.seconds for one in found.ranked if one.cfg.mesh.pipe == pipe) == pytest.approx(seconds)
    assert found.ranked[0].cfg.mesh.pipe == 1
