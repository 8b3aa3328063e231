"""Runs `jaxstack plan memory`, `flops` and `time`: figures agree with their formulas, mistakes are named."""

import json
import re
from dataclasses import replace

import pytest

from jaxstack.cli.parser import execute
from jaxstack.cli.plan import with_vocabulary
from jaxstack.common.hardware import CHIPS
from jaxstack.config import ConfigError, DataConfig
from jaxstack.config.reading.parse import parse_config
from jaxstack.families.flops import flops_per_token
from jaxstack.planner import estimate, figures, memory, plan_plot, roofline
from jaxstack.planner.explain import Figure
from jaxstack.planner.job import Job
from jaxstack.planner.step_time import step_time

SMALL = ["--config=gpt2", "--mesh.data=1", "--train.grad_accum=1", "--data.batch_size=64"]
PIPED = [*SMALL, "--target=h100:2x8", "--mesh.tensor=4", "--mesh.pipe=4", "--train.remat=selective"]


def evaluated(formula: str) -> float:
    """Returns the value of a printed formula; units are left out."""
    formula = formula.replace(" x ", " * ").replace("bytes/s", "").replace("FLOP/s", "")
    return eval(re.sub(r"(?<![\w.])[A-Za-z][\w.,']*", "", formula))


def check_where(where: dict[str, str], *formulas: str) -> None:
    """Compares every number that has a name in a formula with the formula of the name."""
    for name, formula in where.items():
        pattern = rf"([\d.e+]+) {re.escape(name)}(?= [-+x/]|\)|$)"
        used = [float(n) for text in (*formulas, *where.values()) for n in re.findall(pattern, text)]
        assert used, name
        assert used == [pytest.approx(evaluated(formula))] * len(used), name


def tables(text: str) -> dict[str, tuple[float, str]]:
    """Returns value and formula of every printed row."""
    rows = re.findall(r"^(\S.*?) {2,}([\d,.]+)  (.*)$", text, re.M)
    return {name: (float(value.replace(",", "")), formula) for name, value, formula in rows}


@pytest.mark.parametrize(
    "words",
    [["memory"], ["memory", "--style=megatron-fp16"], ["flops"], ["time", "--plot=plot.png"]],
    ids=" ".join,
)
def test_every_figure_is_its_formula(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    execute(["plan", *words, *PIPED, "--explain", "--json=figures.json"])
    printed = capsys.readouterr().out
    found = tables(printed)
    written = json.loads((tmp_path / "figures.json").read_text())
    unit = {"memory": 2**30, "flops": 1e12, "time": 1e-3}[words[0]]
    assert len(found) >= 4
    where = dict(re.findall(r"^  (\S.*?) = (.*)$", printed.partition("\nwhere\n")[2], re.M))
    check_where(where, *(formula for _, formula in found.values()))
    assert (len(where) > 20) == (words == ["memory"])
    for name, (value, formula) in found.items():
        if "bytes/s" in formula and "/ " not in formula:
            continue  # bytes over an axis, and the rate of the link
        assert evaluated(formula) / unit == pytest.approx(value, rel=2e-3, abs=1e-3), name
        assert any(group.get(name, -1) / unit == pytest.approx(value, abs=1e-3) for group in written.values()
                   if isinstance(group, dict)), name  # fmt: skip
    assert any(name.startswith("pipeline stash") for name in found) == (words == ["memory"])
    assert (tmp_path / "plot.png").exists() == ("--plot=plot.png" in words)


MESHES = {
    "gpu": (8, "gpu", "--config=llama3_8b --mesh.fsdp=2 --mesh.tensor=2 --mesh.context=2 --data.batch_size=8"),
    "gpu, accumulated": (4, "gpu", "--config=gpt2 --train.grad_accum=4 --mesh.fsdp=2 --mesh.data=2"),
    "tpu": (4, "tpu", "--config=qwen3_0.6b --mesh.fsdp=4 --data.batch_size=8"),
    "cpu, scores": (2, "cpu", "--config=qwen3_0.6b --mesh.data=2 --kernels.attention=xla --data.batch_size=8"),
    "experts": (8, "tpu", "--config=mixtral_8x7b --mesh.expert=4 --mesh.tensor=2 --data.batch_size=8"),
    "dropped": (4, "gpu", "--config=mixtral_8x7b --mesh.expert=4 --model.moe.capacity_factor=1.25 --data.batch_size=8"),
    "stages": (4, "gpu", "--config=gpt2 --mesh.pipe=2 --mesh.fsdp=2 --mesh.data=1 --pipeline.schedule=zb1"),
    "muon": (4, "gpu", "--config=qwen3_0.6b --optim.name=muon --mesh.fsdp=4 --data.batch_size=8"),
    "muon, few tokens": (2, "gpu", "--config=qwen3_0.6b --optim.name=muon --mesh.data=2 --data.seq_len=64"),
}


@pytest.mark.parametrize("name", MESHES)
def test_every_part_of_the_memory_has_a_formula_with_named_shapes(name):
    """The formulas are recorded by the code of the estimate, which must count the same without a record."""
    devices, platform, words = MESHES[name]
    given = ["--train.grad_accum=1", "--mesh.data=1", *words.split()]
    base = with_vocabulary(parse_config(given))
    for remat in figures.POLICIES:
        cfg = replace(base, train=replace(base.train, remat=remat))
        ctx = memory.context(cfg, devices, platform)
        parts = figures.memory_figures(Job(cfg, ctx))
        plain = estimate.memory(Job(cfg, ctx), *estimate.abstract_inputs(Job(cfg, ctx)))
        assert [f.value for f in parts] == list(plain.values())
        for part in parts:
            assert evaluated(part.explanation) == pytest.approx(part.value, rel=1e-9), part.name
            check_where(part.where, part.explanation)
            assert part.where or part.name == "optimizer state" or not part.value, part.name


def test_memory_is_the_estimate_and_the_stash_grows_with_the_policy(capsys, tmp_path, gpt2):
    cfg, ctx = gpt2
    parts = figures.memory_figures(Job(cfg, ctx))
    policies = figures.memory_by_policy(Job(cfg, ctx))
    assert policies[cfg.train.remat] == parts
    saved = [f.value for of_it in policies.values() for f in of_it if figures.is_saved(f)]
    assert len(saved) == 4
    assert saved[0] == max(saved)
    assert saved[-1] == min(saved)
    cache = figures.generation_figures(Job(cfg, ctx))[1]
    assert cache.value == 2 * 2 * 16 * 12 * 1024 * 768  # keys and values, bf16, rows, layers, tokens, width
    plan_plot.draw_memory(policies, 80e9, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 10_000


@pytest.fixture(scope="module")
def gpt2():
    cfg = with_vocabulary(parse_config(["--config=gpt2", "--mesh.data=4", "--train.grad_accum=1"]))
    cfg = replace(cfg, data=DataConfig(seq_len=1024, batch_size=64))
    return cfg, memory.context(cfg, 4, "gpu")


def test_parts_of_the_time_add_up(gpt2):
    cfg, ctx = gpt2
    limits = figures.limits_of("h100:4")[2]
    time = step_time(Job(cfg, ctx), limits)
    parts = figures.time_figures(Job(cfg, ctx), limits, time)
    assert sum(f.value for f in parts) == pytest.approx(time.total)
    sent = sum(f.value for f in figures.traffic_figures(Job(cfg, ctx), limits))
    assert sent == pytest.approx(sum(c.sent for c in estimate.traffic(Job(cfg, ctx))))


def test_days_for_a_budget_are_by_hand(gpt2):
    cfg, ctx = gpt2
    job = Job(cfg, ctx)
    time = step_time(job, roofline.ChipLimits(CHIPS["h100"]))
    *_, days = figures.flops_figures(job, time, 1e12)
    per_token = flops_per_token(cfg.model, 1024).full + time.recomputed_flops / time.tokens
    assert days.value == pytest.approx(per_token * 1e12 / (4 * 989.4e12) / 86400)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["time"], "--target is missing"),
        (
            ["time", "--target=h100:2x16"],
            "hosts of 16 devices, but a host of h100 has at most 8. Use --target h100:4x8",
        ),
        (["memory", "--target=v5e:32x32"], "has 1024 chips, but a slice of v5e has at most 256"),
        (["time", "--target=h100:8x8", "--mesh.tensor=7", "--mesh.data=1"], "mesh"),
        (["time", "--target=rtx4090:16"], "--network"),
    ],
)
def test_mistakes_are_named(words, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        execute(["plan", *words, "--config=gpt2", "--train.grad_accum=1"])


def test_a_prediction_outside_of_the_fit_says_so(capsys):
    small = ["--config=gpt3", "--mesh.tensor=8", "--mesh.pipe=8", "--mesh.data=1", "--pipeline.microbatches=64",
             "--data.batch_size=64", "--train.grad_accum=1"]  # fmt: skip
    execute(["plan", "time", "--target=a100:8x8", *small])
    assert "no published step has" not in capsys.readouterr().out
    execute(["plan", "time", "--target=l40s:8x8", *small])
    printed = capsys.readouterr().out
    assert "no published step has chip l40s" in printed
    assert "this model is off by" in printed


def test_time_as_one_object(capsys):
    """The interval has the prediction inside, and a price counts the devices."""
    execute(["plan", "time", *PIPED, "--tokens=1e9", "--price=2", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["low"] < found["tokens_per_s_per_device"] < found["high"]
    assert sum(found["parts"].values()) == pytest.approx(found["step_s"])
    assert found["tokens_per_s_per_device"] * 16 == pytest.approx(found["tokens_per_s"])
    assert found["cost"] == pytest.approx(2 * 16 * 24 * found["days"])
    assert 0 < found["mfu"] < 1


def test_a_figure_without_terms_explains_itself():
    assert Figure("x", 6.0, "{a} x {b}", {"a": 2, "b": 3}).explanation == "2 x 3"
