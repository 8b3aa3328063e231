"""Compares the planner's accounting with published figures of Megatron-LM: memory, FLOPs and utilisation."""

import json
import re
from dataclasses import replace
from pathlib import Path

import korthikanti as published
import pytest

from jaxstack.cli.plan import with_vocabulary
from jaxstack.common.hardware import CHIPS
from jaxstack.config.reading.parse import parse_config
from jaxstack.families.flops import matmul_params
from jaxstack.planner import megatron, memory
from jaxstack.planner.job import Job


@pytest.mark.parametrize("name", published.ROWS)
def test_memory_of_figures_one_and_seven(name):
    """The published state leaves out the embedding, which is at most 1.5% of it."""
    row, found = published.ROWS[name], published.memory(name)
    assert found["state"] == pytest.approx(row.gib[0], rel=0.016)
    assert [found["nothing recomputed"], found["selective"]] == pytest.approx(row.gib[1:], abs=0.01)


@pytest.mark.parametrize(("name", "mfu", "hfu"), [("175B", 0.514, 0.528), ("530B", 0.560, 0.570)])
def test_utilisation_of_megatron_follows_from_its_times(name, mfu, hfu):
    """Times have three or four digits. The paper counts recomputed attention three times as often as we do."""
    found = published.utilisation(name)
    assert found["paper"] == pytest.approx((mfu, hfu), abs=5e-4)
    assert found["ours"][0] == pytest.approx(mfu, abs=5e-4)
    assert mfu < found["ours"][1] < hfu


def gpt3(style_bytes: int = 16, **mesh: int):
    cfg = with_vocabulary(parse_config(["--config=gpt3", *(f"--mesh.{axis}={size}" for axis, size in mesh.items())]))
    ctx = memory.context(cfg, 1024 if cfg.mesh.open_axis else None)
    return cfg, ctx, megatron.memory(Job(cfg, ctx), style_bytes)


def test_gpt3_needs_more_than_35_a100():
    cfg, _, figures = gpt3(data=1)
    state = sum(f.value for f in figures[:-1])
    assert state == pytest.approx(2.8e12, rel=0.005)
    assert 34.9 < state / 80e9 < 35
    assert sum(f.value for f in figures) / 80e9 > 35  # with the activations of the whole batch
    eighteen = megatron.memory(Job(cfg, memory.context(cfg)), 18)
    assert sum(f.value for f in eighteen[:-1]) == pytest.approx(state * 18 / 16)


@pytest.mark.parametrize(("remat", "per_layer"), [("none", 72), ("selective", 72), ("full", 96)])
def test_recomputation_is_that_of_the_policy(remat, per_layer):
    """72 B s L h^2 (1 + s / 6h) without recomputation; `selective` adds the 4 B s^2 L h of attention once more."""
    cfg, _, _ = gpt3(data=1)
    cfg = replace(cfg, train=replace(cfg.train, remat=remat))
    s, h, V, L = 2048, 12288, 51200, 96
    expected = 1536 * s * L * h**2 * per_layer * (1 + s / (6 * h)) + 6 * 1536 * s * h * V
    expected += 4 * 1536 * s**2 * L * h if remat == "selective" else 0
    assert megatron.hardware_flops(Job(cfg, memory.context(cfg))) == pytest.approx(expected, rel=1e-6)


def test_gpt3_takes_430_zettaflops_and_16000_days():
    cfg, _, _ = gpt3(data=1)
    step = megatron.hardware_flops(Job(cfg, memory.context(cfg)))
    s, h, V, L = 2048, 12288, 51200, 96
    assert step == pytest.approx(96 * 1536 * s * L * h**2 * (1 + s / (6 * h) + V / (16 * L * h)), rel=1e-3)
    total = 95_000 * step
    assert total == pytest.approx(430e21, rel=0.01)
    assert total / CHIPS["a100"].flops["bfloat16"] / 86400 == pytest.approx(16_000, rel=0.01)
    assert matmul_params(cfg.model) == pytest.approx(12 * L * h**2 + V * h)


@pytest.mark.parametrize(
    ("remat", "sequence_parallel", "bytes_per_element"),
    [("none", False, 10 + 24 / 8 + 80 / 8), ("none", True, 34 / 8 + 80 / 8), ("selective", True, 34 / 8),
     ("full", False, 2), ("full", True, 2 / 8)],
)  # fmt: skip
def test_activations_are_those_of_the_paper(remat, sequence_parallel, bytes_per_element):
    """5 a s / h is 80 for GPT-3; eight stages with three chunks hold 8 (1 + 7/24) microbatches of 12 layers."""
    row = published.ROWS["175B"]
    cfg = published.config(row, remat, sequence_parallel)
    found = megatron.activations(Job(cfg, memory.context(cfg)))
    assert found.value == pytest.approx(2048 * 12288 * bytes_per_element * 96 * (1 + 7 / 24))
    alone = replace(cfg, mesh=replace(cfg.mesh, pipe=1), pipeline=type(cfg.pipeline)())
    saved = megatron.activations(Job(alone, memory.context(alone)))
    assert saved.value == pytest.approx(2048 * 64 * 12288 * bytes_per_element * 96)
    numbers = re.sub(r"[a-z]+", "", found.explanation.replace(" x ", " * "))
    assert eval(numbers) == pytest.approx(found.value, rel=1e-3)  # of what is printed


RESULT = json.loads((Path(published.__file__).parent / "results" / "korthikanti.json").read_text())
PAGE = (Path(published.__file__).parents[1] / "docs" / "planning_results.md").read_text(encoding="utf-8")


def test_recomputation_at_1t_adds_about_what_was_measured():
    """2% was measured, and 32% more throughput; the model of time is off by about a tenth."""
    found = published.predicted("1T")
    assert found == pytest.approx(RESULT["predicted"]["1T"])
    assert found["selective adds"] == pytest.approx(0.02, abs=0.005)
    assert found["more throughput"] == pytest.approx(94.42 / 71.49 - 1, abs=0.03)
    # 4 B s^2 h L of attention once more, over 72 B s L h^2 (1 + s / 6h + V / 12 h L)
    s, h, V, L = 2048, 25600, 51200, 128
    assert found["selective adds, FLOPs"] == pytest.approx(4 * s / (72 * h * (1 + s / (6 * h) + V / (12 * h * L))))


def test_the_page_has_these_figures():
    for name, key, text in (
        ("1T", "selective adds", "| time that selective recomputation adds to layers, 1T | 2% |"),
        ("1T", "full adds", "| time that full recomputation adds to layers, 1T | 36% |"),
        ("175B", "more throughput", "| throughput gained by selective in place of full recomputation, 175B | 31.9% |"),
        ("530B", "more throughput", "| this gain, 530B | 29.7% |"),
        ("1T", "more throughput", "| this gain, 1T | 32.1% |"),
    ):
        assert f"{text} {100 * RESULT['predicted'][name][key]:.1f}% |" in PAGE
