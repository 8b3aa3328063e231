"""Throughput and goodput by a fake clock on known chips; every expected figure is computed beside it."""

import dataclasses
import math
from types import SimpleNamespace

import pytest

from jaxstack.config import Config, DataConfig, ModelConfig, TrainConfig
from jaxstack.tracking import goodput, jsonl, throughput

# One layer: 4 x 8 x 8 for q, k, v, o; 3 x 8 x 16 for the MLP; a head of 8 x 10. Multiply-adds of one token: 720.
MODEL = ModelConfig(num_layers=1, d_model=8, num_heads=2, d_ff=16, vocab_size=10)
CFG = Config(model=MODEL, data=DataConfig(seq_len=6, batch_size=4), train=TrainConfig(dtype="bfloat16"))
# Forward and backward are three times the forward pass, a multiply-add two FLOPs: 6 x 720, and for each of the 6 keys
# of a query (of 3.5 on average that the mask leaves) 2 FLOPs in each of two matmuls over 8 numbers.
FULL, CAUSAL = 6 * 720 + 3 * 4 * 8 * 6, 6 * 720 + 3 * 4 * 8 * 3.5
H100 = 989.4e12


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(t=100.0)
    monkeypatch.setattr("time.perf_counter", lambda: now.t)
    monkeypatch.setattr("jaxstack.runtime.platform.seconds_since_start", lambda: 2.5)
    return now


def meter(cfg=CFG, kind="NVIDIA H100 80GB HBM3", devices=4):
    return throughput.ThroughputMeter(
        cfg.model, cfg.data, cfg.train.dtype, [SimpleNamespace(device_kind=kind)] * devices
    )


def test_figures_of_timed_steps(clock):
    timed = meter()
    assert not timed.started
    assert set(timed.take().values()) == {None}
    clock.t += 50  # compilation
    timed.restart()
    assert timed.started
    assert set(timed.take().values()) == {None}
    for wait in (0.25, 0.5, 0.0):
        clock.t += 2.0
        timed.count_step(wait)
    with timed.paused():
        clock.t += 1000
    taken = timed.take()
    speed = 4 * 6 / 2.0
    assert taken == pytest.approx(
        {
            "tokens_per_s": speed,
            "step_time_s": 2.0,
            "data_wait_s": 0.25,
            "mfu": speed * FULL / (4 * H100),
            "mfu_causal": speed * CAUSAL / (4 * H100),
        },
        rel=1e-12,
        abs=0,
    )
    clock.t += 3.0  # what was taken is forgotten
    timed.count_step(1.0)
    again = timed.take()
    assert (again["step_time_s"], again["data_wait_s"]) == (3.0, 1.0)
    assert set(timed.take().values()) == {None}


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "NVIDIA H100 80GB HBM3"), ("bfloat16", "cpu")])
def test_without_a_known_peak_there_is_no_mfu(clock, dtype, kind):
    timed = meter(dataclasses.replace(CFG, train=TrainConfig(dtype=dtype)), kind)
    timed.restart()
    clock.t += 1.0
    timed.count_step(0.0)
    taken = timed.take()
    assert (taken["mfu"], taken["mfu_causal"], taken["tokens_per_s"]) == (None, None, 24.0)


def test_every_second_belongs_to_one_kind(clock):
    account = goodput.GoodputRecorder()
    for kind, seconds in (("compile", 3.0), ("data", 0.5), ("step", 2.0)):
        account.enter(kind)
        clock.t += seconds
    with account.during("evaluation"):
        clock.t += 7.0
        with account.during("checkpoint"):
            clock.t += 11.0
        clock.t += 1.0
    clock.t += 0.25  # a step again
    assert account.take() == {
        "start": 2.5, "compile": 3.0, "step": 2.25, "data": 0.5, "evaluation": 8.0, "checkpoint": 11.0
    }  # fmt: skip
    clock.t += 0.5
    assert account.take() == {"step": 0.5}


@pytest.mark.parametrize(
    ("kept", "dropped", "lost", "down"),
    [
        ([(100, {}), (950, {})], [], 0.0, 47.5),  # this process began 2.5 s before 1000, which is now
        ([(100, {})], [(960, {"seconds": {"step": 3.0, "data": 1.0}})], 4.0, 37.5),
        ([(100, {})], [(960, {"seconds": {"step": 3.0}, "down_s": 7.0, "lost_s": 2.0})], 5.0, 44.5),
        ([(100, {}), (950, {"event": "finished"})], [], 0.0, 0.0),
        ([(999, {})], [], 0.0, 0.0),  # a clock that was set back
    ],
)
def test_time_that_is_lost_when_a_run_goes_on(clock, monkeypatch, kept, dropped, lost, down):
    monkeypatch.setattr("time.time", lambda: 1000.0)
    before, after = ([{"step": 1, "time": time, **more} for time, more in lines] for lines in (kept, dropped))
    assert goodput.resumed_record(4, before, after) == {"step": 4, "event": "resumed", "lost_s": lost, "down_s": down}


def test_lines_are_finite_json_and_steps_that_come_again_are_taken_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = jsonl.JsonLines(path)
    for step, loss in ((1, 0.5), (2, math.nan), (3, math.inf), (3, -math.inf), (4, 2)):
        log.write({"step": step, "loss": loss})
    lines = [(1, 0.5), (2, None), (3, None), (3, None), (4, 2)]
    assert [(line["step"], line["loss"]) for line in log.records] == lines
    assert [(line["step"], line["loss"]) for line in jsonl.read_lines(path)] == lines
    assert [line["step"] for line in log.rewind(2)] == [3, 3, 4]
    log.write({"step": 3, "loss": 0.25})
    path.write_text(path.read_text() + '{"step": 4, "lo')  # a crash
    assert [line["step"] for line in jsonl.JsonLines(path).records] == [1, 2, 3]
