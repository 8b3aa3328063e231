"""Compares programs of other stacks with ours, and with what their sources say. Runs `jaxstack plan time --program`."""

import json
import math
from dataclasses import replace

import numpy as np
import published_steps as published
import pytest

from jaxstack.cli.parser import execute
from jaxstack.config import ConfigError
from jaxstack.planner import programs
from jaxstack.planner.rates import rates
from jaxstack.planner.step_time import HOST, step_time, work_of

ALLTOALL = programs.Program({"gpu": "flash2"}, "kernels", "alltoall")


def row_named(where: str, source: str = "") -> dict:
    return next(row for row in published.TABLE["rows"] if row["where"] == where and source in row["source"])


def test_a_token_is_sent_once_to_each_host_and_device(rng):
    """DeepEP's exchange, by drawing experts: 16 devices on two hosts, 8 experts for each token."""
    row = row_named("Qwen3 30B-A3B, DGX-H100, 16 GPUs, FP8", "26.04.01")
    job, limits = published.job_of(row), published.limits_of(row)
    exchange = next(each for each in programs.collectives_of(job, limits) if "tokens to experts" in each[0].where)
    c, kind, seconds = programs.one_copy(job, limits, exchange)
    assert (c, kind) == exchange[:2]
    chosen = rng.integers(0, 16, (20000, 8))  # devices that have the experts of a token on device 0
    hosts = (chosen // 8 == 1).any(1).mean()  # 0.996 of the other host
    devices = np.mean([len(set(each) - {0}) for each in chosen.tolist()])  # 6.05 in place of 7.5
    copy = c.times * c.bytes / 8  # of all tokens
    expected = max(copy * hosts / limits.network_bandwidth, copy * devices / limits.link_bandwidth)
    assert seconds == pytest.approx(expected, rel=0.02)
    assert seconds == pytest.approx(exchange[2] * hosts / 4, rel=0.02)  # four of eight copies left the host
    other = next(each for each in programs.collectives_of(job, limits) if each[1] != "expert")
    assert programs.one_copy(job, limits, other) == other


def test_a_program_that_saves_everything_repeats_no_exchange():
    """Two exchanges in each pass; ours has a fifth, and repeats two of three products of experts."""
    row = row_named("GPT-OSS 20B, 8 GPUs")
    job, limits = published.job_of(row), published.limits_of(row)
    ours = {c.where: seconds for c, _, seconds in programs.collectives_of(job, limits)}
    plain = programs.work_of(ALLTOALL, job, limits)
    theirs = {c.where: seconds for c, _, seconds in plain.collectives}
    exchange = "tokens to experts and back"
    assert theirs[exchange] == pytest.approx(0.8 * ours[exchange])
    assert {name: s for name, s in ours.items() if name != exchange} == {
        n: s for n, s in theirs.items() if n != exchange
    }
    assert not any(op.for_remat for op in plain.ops)
    job = published.job_of(row | {"remat": "full"})
    full = programs.work_of(ALLTOALL, job, limits)
    assert full.collectives == programs.collectives_of(job, limits)


def test_megatron_sends_the_shards_of_a_sequence_to_experts():
    """4 devices of a tensor group send a quarter each, and gather 2 pairs of each token in place of the token."""
    row = row_named("Mixtral 8x22B, TP + EP + DP")
    job = published.job_of(row)
    before = programs.collectives_of(job, published.limits_of(row))
    for each in before:
        c, kind, seconds = each
        parts = [(name, part) for _, name, part in programs.of_sequence_shards(job, each)]
        if kind == "expert":
            assert parts == [(kind, pytest.approx(seconds / 4))]
        elif c.where in programs.OF_BLOCKS:  # one of attention, and one of two pairs for each token
            assert parts == [("tensor", pytest.approx(seconds / 2)), ("expert", pytest.approx(seconds))]
        else:
            assert parts == [(kind, seconds)]
    assert {c.where for c, _, _ in before} > set(programs.OF_BLOCKS)


def test_a_host_starts_a_product_for_each_expert():
    """GPT-OSS 20B: 4 of 32 experts on each of 8 devices, 3 matrices in 3 passes, 24 layers, 16 microbatches."""
    case = published.case_of(row_named("GPT-OSS 20B, 8 GPUs"))
    of_experts = [op for op in case.work.ops if op.matrix and op.matrix[3] > 1]
    assert sum(op.times * op.matrix[3] for op in of_experts) == 4 * 3 * 3 * 24 * 16  # nothing is repeated
    others = sum(op.times for op in case.work.ops if op.of_layer and op not in of_experts)
    assert case.work.launches == pytest.approx(1e-6 * (4 * 3 * 3 * 24 * 16 + others))
    compiled = published.case_of(row_named("table 1, FSDP + torch.compile"))
    assert compiled.work.launches == 0


def test_a_device_waits_for_a_late_host():
    case = published.case_of(row_named("GPT-OSS 20B, 8 GPUs"))
    busy = rates()
    assert case.ratio(busy) == published.step_time(case.job, case.limits, busy, case.work).total / case.seconds
    slow = replace(
        busy, factors={"gpu": {**busy.factors["gpu"], "host": 1e6 * case.seconds / case.work.launches / 1e6 * 3}}
    )
    assert case.ratio(slow) > 2.9  # three times the published step, and what is beside the layers


def test_our_program_waits_for_no_host_and_others_wait_in_a_step_as_predicted():
    row = row_named("GPT-OSS 20B, 8 GPUs")
    job, limits = published.job_of(row), published.limits_of(row)
    assert HOST not in step_time(job, limits).exposed
    work = programs.work_of(ALLTOALL, job, limits)
    slow = rates()
    slow = replace(slow, factors={"gpu": {**slow.factors["gpu"], "host": 1e4}})
    time = step_time(job, limits, slow, work)
    whole = 1e-6 * sum(op.times * (op.matrix[3] if op.matrix else 1) for op in work.ops if op.of_layer) * 1e4
    assert time.exposed[HOST] + time.hidden[HOST] == pytest.approx(whole)  # no pipeline has idle ticks
    assert {kind for _, kind, _ in work.collectives} == {"expert", "weights"}
    waited = slow.factors["gpu"]["expert"] * math.fsum(s for _, kind, s in work.collectives if kind == "expert")
    assert time.exposed[HOST] == pytest.approx(whole - time.layers - time.recomputation - waited)
    compiled = replace(work, launches=0.0)
    assert time.total - step_time(job, limits, slow, compiled).total == pytest.approx(time.exposed[HOST])


def test_in_8_bits_others_have_all_products_of_layers_in_8_bits():
    """Ours keeps experts and gradients of weights in bfloat16; each product of experts is preceded by two passes."""
    row = row_named("Qwen3 30B-A3B, DGX-H100, 16 GPUs, FP8", "26.04.01")
    job, limits = published.job_of(row), published.limits_of(row)
    ours = {op.name: op.dtype for op in work_of(job, limits).ops if op.part == "matmul" and op.of_layer}
    work = programs.work_of(ALLTOALL, job, limits)
    theirs = {op.name: op.dtype for op in work.ops if op.part == "matmul" and op.of_layer}
    experts = [f"moe/{name}{end}" for name in ("w_gate", "w_up", "w_down") for end in ("", ", gradient")]
    for name in [*experts, "attention/w_q, gradient"]:
        assert (ours[name], theirs[name]) == ("bfloat16", "float8"), name
    assert ours["attention/w_q"] == theirs["attention/w_q"] == "float8"
    assert theirs["moe/router"] == ours["moe/router"] == "float32"
    passes = [op for op in work.ops if op.name == "moe/w_up, to 8 bits"]
    up = next(op for op in work.ops if op.name == "moe/w_up")
    assert sum(op.times for op in passes) == up.times * up.matrix[3] == up.times * 128 / 16
    tokens, inputs, outputs, matrices = up.matrix
    assert passes[0].bytes == pytest.approx(3 * inputs * (tokens / matrices + outputs))  # reads 2 bytes, writes 1


def test_an_eager_program_reads_and_writes_memory_in_each_operation():
    row = row_named("table 1, FSDP + torch.compile")
    job, limits = published.job_of(row), published.limits_of(row)
    compiled, eager = (
        sum(op.times * op.bytes for op in programs.work_of(program, job, limits).ops if programs.is_pass(op))
        for program in (replace(ALLTOALL, operations="compiled"), replace(ALLTOALL, operations="eager"))
    )
    assert eager > 1.2 * compiled


def test_every_program_has_a_source_and_differs_from_all_others():
    found = programs.programs()
    for name, program in found.items():
        assert program.stacks, name
        assert program.source, name
        assert all(url.startswith("https://") for url in program.source)
        assert set(program.attention.values()) <= {"cudnn", "flash2", "flash3", "splash", "written"}
        assert program.operations in programs.STARTED
        assert program.dispatch in programs.SENT
    kernels = {kernel for program in found.values() for kernel in program.attention.values()}
    assert {f"attention, {kernel}" for kernel in kernels} <= {
        kind for factors in rates().factors.values() for kind in factors
    }


SMALL = ["plan", "time", "--target=h100:2x8", "--config=qwen3_30b_a3b", "--mesh.data=1", "--mesh.expert=16",
         "--data.batch_size=16", "--train.grad_accum=1", "--train.remat=none"]  # fmt: skip


def test_the_command_says_what_it_assumes_and_that_it_is_not_our_program(capsys):
    execute([*SMALL, "--program=megatron_deepep", "--train.quant=fp8_tensorwise"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("not our program, but the program of Megatron-LM with --moe-enable-deepep")
    for line in (
        "  attention: cudnn",
        "  operations: a host starts fused kernels one by one",
        "  8 bits: all products of linear layers and experts, gradients of weights too",
        "  experts: a token is sent once to each host and device that has experts of it",
        "  experts: their results are saved, nothing of them is repeated",
        "  source: https://github.com/deepseek-ai/DeepEP",
    ):
        assert line in lines
    assert not any(line.startswith(("sent by a device", "attention by")) for line in lines)


def test_the_command_predicts_our_program_without_the_option(capsys):
    execute([*SMALL, "--json"])
    ours = json.loads(capsys.readouterr().out)
    execute([*SMALL, "--json", "--program=torchtitan_eager"])
    theirs = json.loads(capsys.readouterr().out)
    assert ours["program"] is None
    assert ours["assumed"] == []
    assert theirs["program"] == "torchtitan_eager"
    assert theirs["attention"] == "flash2"
    assert "experts: a token is sent once for each of its experts" in theirs["assumed"]
    assert "recomputation" in ours["parts"]  # of our rounds
    assert "recomputation" not in theirs["parts"]
    assert math.fsum(theirs["parts"].values()) == pytest.approx(theirs["step_s"])


@pytest.mark.parametrize(
    ("words", "first", "second"),
    [
        (["--program=megatrom"], "--program=megatrom is not known", "Use megatron, megatron_deepep,"),
        (["--target=v5p:2x2x4", "--program=nanochat"], "has no attention for v5p, a tpu", "Use --program=maxtext"),
        (["--config=olmo2_7b", "--mesh.expert=1", "--mesh.fsdp=16", "--program=megatron"],
         "--program=megatron counts", "plan time"),
    ],
)  # fmt: skip
def test_a_program_that_is_not_known_is_refused(words, first, second):
    with pytest.raises(ConfigError) as error:
        execute([*SMALL, *words])
    assert first in str(error.value)
    assert second in str(error.value)
