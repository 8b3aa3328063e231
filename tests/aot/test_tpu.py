"""Compiles the training step for TPUs with libtpu, on a machine without a TPU."""

import re

import numpy as np
import pytest

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install -e '.[test,tpu]'")

import programs
from cases import (
    ATTENTION,
    CASES,
    LARGE,
    attention,
    attention_step,
    check,
    dropless_over_capacity,
    holds_no_stage,
    report,
)

from jaxstack.planner import aot, hlo
from jaxstack.training import assemble


def test_dense_on_16_v5e():
    """FSDP over 4, tensor with sequence parallelism over 4: gathers and scatters alone, as many as the formula has."""
    sent = check("v5e_dense")
    assert set(sent) == {(axes, kind) for axes in ("fsdp", "tensor") for kind in ("all-gather", "reduce-scatter")}
    predicted = hlo.sent(report("v5e_dense").expected)
    for kind, value in sent.items():
        # TPU pads what it scatters to whole tiles: one of 18 arrays here, by 3%.
        np.testing.assert_allclose(value, predicted[kind], rtol=0.02, err_msg=str(kind))


def test_experts_on_8_v5p():
    sent = check("v5p_moe")
    assert ("expert", "all-to-all") in sent
    # A device's experts are its own: no weight of theirs is summed or gathered over the axis. Dense ones are.
    assert ("expert", "all-gather") in sent
    assert ("expert", "all-reduce") not in sent
    found = report("v5p_moe").collectives
    assert not any(1408 // 2 in c.shape for c in found if "expert" in c.axes)


def test_dropless_experts_need_no_worst_case_of_memory():
    """Over eight shards the worst case of one layer would be 6.4 times a capacity of 1.25, and each layer kept it."""
    assert dropless_over_capacity("v5p") <= 1.5


def test_sequence_parallelism_and_selective_recomputation_need_a_quarter_of_the_activation_memory():
    """1.4e9 parameters, tensor 8, against plain tensor parallelism that recomputes nothing.

    Held twice: against what our own plain variant needs, and against what Megatron's does by its paper (Korthikanti et
    al. 2022, table 2, in bytes a layer, for 16-bit activations), which saves no float32 in its norms as XLA does.
    """
    activations = {}
    for name in ("v5p_plain_1.4b", "v5p_selective_1.4b"):
        check(name)
        r = report(name)
        activations[name] = r.temporary - r.memory["parameters in bfloat16"] - r.memory["gradients"]
    _, cfg = CASES["v5p_plain_1.4b"]
    s, b, h, a, t = cfg.data.seq_len, cfg.data.batch_size, LARGE.d_model, LARGE.num_heads, cfg.mesh.tensor
    megatron = LARGE.num_layers * s * b * h * (10 + 24 / t + 5 * a * s / (h * t))
    ratios = [activations["v5p_selective_1.4b"] / plain for plain in (activations["v5p_plain_1.4b"], megatron)]
    print("activation memory, of our plain variant and of Megatron's by its formula:", *(f"{r:.3f}" for r in ratios))
    assert max(ratios) <= 0.25


def test_selective_recomputation_costs_at_most_a_twentieth_more_flops():
    """Counts the matmuls of a step in its jaxpr: the backward pass repeats only the scores of attention."""
    flops = {}
    for name in ("v5p_plain_1.4b", "v5p_selective_1.4b"):
        target, cfg = CASES[name]
        ctx, state, batch = aot.abstract_inputs(cfg, target)
        flops[name] = aot.matmul_flops(assemble.make_train_step(cfg, ctx), state, batch)
    ratio = flops["v5p_selective_1.4b"] / flops["v5p_plain_1.4b"]
    print(f"FLOPs with selective recomputation over those without: {ratio:.4f}")
    assert 1 < ratio <= 1.05


@pytest.mark.parametrize("schedule", ["1f1b", "zb1x2"])
def test_memory_of_a_pipeline_does_not_grow_with_its_microbatches(schedule):
    """With 4 stages and 4 replicas, 32 microbatches need the memory of 8. GPipe's grows by the residuals of 24.

    `zb1x2` has two chunks a stage, so it has interleaved 1F1B's stash, and weight units beside it.
    """
    totals = {}
    for name in (f"v5e_{schedule}_8", f"v5e_{schedule}_32", "v5e_gpipe_8", "v5e_gpipe_32"):
        check(name)
        totals[name] = report(name).total
    ratios = [totals[f"v5e_{which}_32"] / totals[f"v5e_{which}_8"] for which in (schedule, "gpipe")]
    print("memory at 32 microbatches over that at 8:", *(f"{ratio:.3f}" for ratio in ratios))
    assert ratios[0] <= 1.05 < ratios[1]


@pytest.mark.parametrize("name", ["v5p_stages", "v5p_zb1", "v5p_zb_h1"])
def test_stages_beside_other_axes_on_8_v5p(name):
    """Two sends a tick; weights are gathered and gradients scattered once, also where weight units compute them."""
    check(name)
    found = report(name).collectives
    programs.stages_exchange(found, sends=2 * (8 + 2), microbatches=8, ends=8)  # ticks of 1F1B: M + 2 (P - 1)
    assert all(c.times == 1 for c in found if "fsdp" in c.axes)
    ratio = report(name).total / report("v5p_stages").total
    print(f"memory over that of 1F1B: {ratio:.3f}")
    assert ratio <= 1.1


def test_units_that_gather_layers_hold_no_stage():
    # 1.16, and 13.9% by the formula: 55 MiB more than shards, stash and one layer; 10% is the goal.
    holds_no_stage("v5p_layers", most=1.2, within=0.15)


def test_a_target_that_is_none_is_named():
    with pytest.raises(aot.ConfigError, match="v5e:4x4 for 16 TPUs"):
        aot.devices("v5e:four")
    with pytest.raises(aot.ConfigError, match="cannot be described"):
        aot.devices("v5e:3x5x7")
    assert [len(aot.devices(chip)) for chip in ("v5e", "v5p", "v6e")] == [1, 1, 1]
    assert len(aot.devices("v5e:4x4")) == 16


@pytest.mark.parametrize("target", ["v5e:2x2", "v5p:2x2x1"])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_kernels(name, target):
    """A kernel needs copies of its arrays with heads before tokens; on v5e they need no HBM."""
    compiled = attention(name, "pallas_tpu", target)
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 3  # forward, by q, by k and v
    temporary = programs.temporary(compiled)
    print(f"{name}, {target}: {temporary / 2**20:.1f} MiB")
    b, s, h, *_ = ATTENTION[name][0]
    assert temporary < 2 * b * h * s**2 / 8  # an eighth of all scores in bfloat16


def test_a_step_with_attention_kernels():
    """The kernels run within shard_map, which checks the types; their residuals are saved, not recomputed."""
    found, scores = attention_step("pallas", "v5e:2x2", fsdp=2, tensor=2)
    assert found.compiled.as_text().count('custom_call_target="tpu_custom_call"') == 3
    print(f"{found.temporary / 2**20:.1f} MiB, and scores would be {scores / 2**20:.1f}")
    assert found.temporary < scores


ONE = "v5e:2x2"


def test_norms():
    programs.norms(ONE, "pallas_tpu")


def test_the_loss_never_holds_its_logits():
    """At 8192 tokens, width 2048 and a vocabulary of 131072: the kernel needs at most 15% of the 4 GiB of logits."""
    ratios = {name: programs.loss_memory(ONE, name) for name in ("chunked", "pallas_tpu")}
    assert ratios["pallas_tpu"] <= 0.15 < ratios["chunked"] <= 0.35
    programs.odd_loss(ONE, "tpu")


@pytest.mark.parametrize("shape", [(16384, 2048, 1408, 8), (8190, 1000, 720, 128)])
def test_experts(shape):
    print("MiB of temporaries:", programs.temporary(programs.experts(ONE, "pallas_tpu", *shape)) >> 20)


def test_products_in_int8_are_convolutions_of_int8():
    """The product and the gradient of x are in 8 bits, the gradient of w in 16 bits."""
    text = programs.low_precision(ONE, "int8")
    shapes = dict(re.findall(r"%([\w.-]+) = \(?(\w+)\[", text))
    found = re.findall(r"= (\w+)\[\S* convolution\(%([\w.-]+), %([\w.-]+)\)", text)
    assert sorted((out, shapes[a], shapes[b]) for out, a, b in found) == sorted(
        [("s32", "s8", "s8"), ("s32", "s8", "s8"), ("bf16", "bf16", "bf16")]
    )


@pytest.mark.parametrize(
    ("target", "mesh"), [("v5e:2x4", {"fsdp": 2, "tensor": 2, "expert": 2}), ("v5p:2x2x1", {"tensor": 2, "expert": 2})]
)
def test_a_step_with_every_kernel(target, mesh):
    """The kernels run within shard_map, in int8."""
    text = programs.small_step(target, **mesh)
    assert text.count("tpu_custom_call") >= 10
    assert re.search(r"= s32\[\S* convolution\(", text)


def test_offload_copies_what_the_formula_says():
    programs.offload("v5p:2x2x1")
