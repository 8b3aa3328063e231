"""`jaxstack report`: sums that add up, a page that asks for nothing, mistakes in one line."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import time
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from jaxstack.cli.parser import execute
from jaxstack.config import ConfigError
from jaxstack.report import charts, comparison, page, runs, style
from jaxstack.tracking import goodput

CONFIG = "model:\n  num_layers: 2\noptim:\n  lr: 0.001\nrun:\n  dir: somewhere\ntrain:\n  steps: 40\n"


def training(step: int, **more: object) -> dict:
    """A line as train.py writes it, of two seconds."""
    line = {"step": step, "loss": 6.0 / step, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_s": 1000.0 * step, "mfu": None}
    return line | {"spike": 0, "skipped": 0, "time": 100.0 + step, "seconds": {"step": 1.5, "data": 0.5}} | more


LINES = [
    training(10, seconds={"start": 3.0, "compile": 5.0, "step": 1.0}),
    {"step": 10, "eval_loss": 0.7},
    {"step": 10, "event": "resumed", "lost_s": 2.5, "down_s": 60.5},
    training(20, seconds={"start": 3.0, "compile": 4.0, "step": 1.5, "evaluation": 0.5}),
    {"step": 20, "event": "rolled back", "spike": 25, "lost_s": 1.5},
    training(30, skipped=2, spike=1),
    {"step": 30, "event": "stopped", "time": 140.0, "seconds": {"checkpoint": 0.25, "end": 0.25}},
]


def write(path: Path, lines: list[dict], config: str = CONFIG) -> Path:
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "config.yaml").write_text(config)
    return path


class Page(HTMLParser):
    """Reads a page; asserts that every element is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "wbr"):  # they have no end
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data):
        self.text += data


NAMESPACES = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def checked(text: str) -> Page:
    """The page, of which this makes sure that it is whole, asks for nothing and runs nothing."""
    read = Page(text)
    assert set(re.findall(r"https?://[^\"'<> ]*", text)) <= NAMESPACES
    assert not {tag for tag, _ in read.tags} & {"script", "link", "img", "iframe", "object", "base", "form", "image"}
    attributes = [(name, value) for _, found in read.tags for name, value in found.items()]
    assert not [name for name, _ in attributes if name.startswith("on") or name in ("src", "action")]
    ids = [value for name, value in attributes if name == "id"]
    assert len(ids) == len(set(ids))
    used = {value for name, value in attributes if name.endswith("href")} | set(re.findall(r"url\(([^)]*)\)", text))
    assert all(value.startswith("#") and value[1:] in ids for value in used)
    assert ("http-equiv", "Content-Security-Policy") in attributes
    return read


def test_seconds_add_up_and_goodput_is_the_part_of_steps():
    sums = goodput.spent(LINES)
    assert sums == {
        "start": 6.0, "compile": 9.0, "step": 4.0, "data": 0.5, "rollout": 0.0, "evaluation": 0.5, "checkpoint": 0.25,
        "profile": 0.0, "end": 0.25, "lost": 4.0, "down": 60.5,
    }  # fmt: skip
    assert goodput.fraction(sums) == 4.0 / 85.0
    assert goodput.work_seconds(LINES) == 24.5  # without `down`
    assert goodput.fraction(goodput.spent([{"step": 1, "loss": 1.0}])) is None


def test_what_dropped_lines_say_of_earlier_losses_is_kept():
    """A run that goes back behind an earlier restart, since a checkpoint broke: no second is forgotten."""
    event = goodput.resumed_record(0, [], LINES)
    assert event is not None
    assert event["lost_s"] == goodput.work_seconds(LINES)
    assert event["down_s"] >= goodput.spent(LINES)["down"]


def test_bad_steps_with_lines_of_their_own_are_told_once(tmp_path):
    """Between two training lines, or beside one; the losses that they name are no points of the curve."""
    own = [
        {"step": 12, "event": "skipped", "loss": None, "grad_norm": None, "skipped": 1, "batch": "step 11: a"},
        {"step": 15, "event": "compiled again", "function": "train_step", "changed": ["a: x -> y", "b: new"]},
        {"step": 20, "event": "spike", "loss": 9.0, "grad_norm": 1.0, "skipped": 2, "batch": "step 19: b"},
    ]
    lines = [training(10), *own, training(20, spike=1, skipped=2), training(30, skipped=3)]
    (run,) = runs.read_runs([write(tmp_path / "run", lines)])
    assert runs.list_events(run) == [
        (12, "skipped", "loss -; batch of step 11: a"),
        (15, "compiled again", "train_step: a: x -> y; b: new"),
        (20, "spike", "loss 9.0000; batch of step 19: b"),
        (30, "skipped", "1 of the steps since the line before"),  # as lines of earlier versions say it
    ]
    assert run.series("loss")[0].tolist() == [10, 20, 30]
    assert goodput.spent(lines)["step"] == 4.5
    checked(page.render([run]))


def test_a_clock_that_was_set_back_takes_nothing_away():
    ahead = [training(10, time=time.time() + 1e6)]
    event = goodput.resumed_record(10, ahead, [])
    assert event == {"step": 10, "event": "resumed", "lost_s": 0.0, "down_s": 0.0}
    assert goodput.resumed_record(0, [], []) is None


def test_the_kinds_on_the_page_are_those_of_the_sums(tmp_path):
    (run,) = runs.read_runs([write(tmp_path / "run", LINES)])
    assert runs.time_categories([run])[0] == "step"
    assert set(runs.time_categories([run])) == {kind for kind, seconds in run.spent.items() if seconds}
    assert runs.time_share(run, "down") == ("60.5 s", "71.2%")
    widths = [float(part) for part in re.findall(r"width:([\d.]+)%", charts.time_bar(run))]
    assert abs(sum(widths) - 100) < 0.01 * len(widths)
    figures = runs.summarize(run)
    assert figures["goodput"] == "4.7%"
    assert figures["wall clock"] == "1 min 25 s"
    assert figures["last step"] == "30 of 40"
    assert figures["ended"] == "stopped"
    assert figures["best held-out loss (nats per token)"] == "0.7000 at step 10"
    assert figures["tokens per second, median"] == "20,000"


@pytest.mark.parametrize(
    ("config", "last", "best"),
    [
        (
            {"model.family": "diffusion"},
            "last loss (squared error per value)",
            "best held-out loss (squared error per value)",
        ),
        ({"data.source": "prompts"}, "last loss", "best held-out loss (negative reward)"),
    ],
)
def test_losses_of_the_summary_have_the_unit_of_the_run(tmp_path, config, last, best):
    (run,) = runs.read_runs([write(tmp_path / "run", LINES)])
    figures = runs.summarize(dataclasses.replace(run, config=run.config | config))
    assert figures[last] == "0.2000"
    assert figures[best] == "0.7000 at step 10"


def test_events_are_named_with_what_they_cost(tmp_path):
    (run,) = runs.read_runs([write(tmp_path / "run", LINES)])
    assert [(step, kind) for step, kind, _ in runs.list_events(run)] == [
        (10, "resumed"), (20, "rolled back"), (30, "spike"), (30, "skipped"), (30, "stopped"),
    ]  # fmt: skip
    words = " ".join(what for *_, what in runs.list_events(run))
    for word in ("2.5 s of work lost", "1 min 0 s down", "from the spike at step 25", "2 of the steps"):
        assert word in words


def test_the_figures_of_a_run_by_hand(tmp_path):
    lines = [*map(dict, LINES), {"step": 30, "eval_loss": 0.9}, {"step": 30, "eval_loss": None}, training(40, mfu=0.25)]
    end = {"step": 40, "event": "finished", "time": 150.0}
    figures = {"eval_bits_per_byte": 0.5, "parameters": 1_234_567}
    lines[1] |= figures
    lines.append({"step": 40, "ngram_order": 5, "ngram_bits_per_byte": 0.75, "ngram_train_bytes": 1000})
    sizes = CONFIG + "data:\n  batch_size: 4\n  seq_len: 256\n  tokenizer: bytes\n"
    (run,) = runs.read_runs([write(tmp_path / "run", [*lines, end], sizes)])
    assert runs.summarize(run) == {
        "parameters": "1,234,567",
        "tokenizer": "bytes",
        "tokens seen": "40,960",  # 40 steps of 4 x 256
        "last step": "40 of 40",
        "ended": "finished",
        "last loss (nats per token)": "0.1500",
        "best held-out loss (nats per token)": "0.7000 at step 10",
        "best held-out loss (bits per byte)": "0.5000 at step 10",
        "byte n-grams, held out (bits per byte)": "0.7500 (n = 5)",
        "tokens per second, median": "25,000",  # of 10, 20, 30 and 40 thousand
        "MFU, median": "25.0%",
        "wall clock": "1 min 27 s",  # 85 s, and two more
        "goodput": "6.3%",  # 5.5 of 87
    }
    (again,) = runs.read_runs([write(tmp_path / "again", [*lines, end, training(50)])])
    assert runs.summarize(again)["ended"] == "no end in the log"
    assert runs.summarize(again)["last step"] == "50 of 40"


def test_tokens_seen_count_each_step_with_the_batch_of_its_time(tmp_path):
    """10 steps of 1,000 tokens, 10 of 2,000; the 10 that were lost are not counted."""
    lines = [training(5, step_time_s=0.2), training(10, step_time_s=0.1), training(20, step_time_s=5.0)]
    lines += [{"step": 10, "event": "resumed", "lost_s": 2.5, "down_s": 1.0}, training(20, step_time_s=0.1)]
    (run,) = runs.read_runs([write(tmp_path / "run", lines)])
    assert runs.summarize(run)["tokens seen"] == "30,000"
    lines.append(training(30))  # without a size: the size of the configuration, which this one lacks
    (run,) = runs.read_runs([write(tmp_path / "short", lines)])
    assert runs.summarize(run)["tokens seen"] == "-"
    (run,) = runs.read_runs([write(tmp_path / "whole", lines, CONFIG + "data: {batch_size: 3, seq_len: 100}\n")])
    assert runs.summarize(run)["tokens seen"] == "33,000"


def run_of(folder: Path, tokenizer: dict, *, nats: float, bits: float | None, **data: object) -> Path:
    """Writes a run of two steps with a tokenizer, one evaluation and the n-grams of its text."""
    lines = [
        training(1, loss=2 * nats),
        {"step": 1, "eval_loss": nats, "eval_bits_per_byte": bits},
        {"step": 2, "ngram_order": 4, "ngram_bits_per_byte": 3.0},
    ]
    values = {"source": "tokens", "tokenizer": "bytes", **data}  # a token file determines its own tokenizer
    write(folder, lines, CONFIG + json.dumps({"data": values})[1:-1].replace('"data"', "data") + "\n")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


BYTES = {"kind": "bytes"}
BPE = {"kind": "hf", "name": "folder/bpe.json", "tokenizer": {"model": 1}}


def test_runs_with_different_tokenizers_are_compared_in_bits_per_byte(tmp_path):
    """The loss of a BPE token is several bytes'. Both units are of the same held-out text."""
    a = run_of(tmp_path / "a", BYTES, nats=1.4, bits=2.0)
    b = run_of(tmp_path / "b", BPE, nats=3.5, bits=1.25)
    found = runs.read_runs([a, b])
    (chart,) = comparison.compare(found).charts
    assert chart.title == "Loss (bits per byte)"
    assert [curves.held_out[1].tolist() for curves in chart.curves] == [[2.0], [1.25]]
    assert [curves.training[1].tolist() for curves in chart.curves] == [[4.0], [2.5]]
    assert [curves.ngrams for curves in chart.curves] == [3.0, pytest.approx(3.0)]
    assert charts.loss_limits(chart)[0] < 1.25
    assert charts.loss_limits(chart)[1] > 4.0
    rows = comparison.summary_rows(found)
    assert rows["best held-out loss (bits per byte)"] == ["2.0000 at step 1", "1.2500 at step 1"]
    assert not [key for key in rows if "nats per token" in key]
    assert rows["tokenizer"][0] == "bytes"
    assert rows["tokenizer"][1].startswith("bpe.json (")
    read = checked(page.render(found))
    for words in ("Loss (bits per byte)", "The tokenizers differ, so losses are in bits per byte", "byte n-grams"):
        assert words in read.text
    # The same vocabulary in another folder is the same tokenizer: nats per token, n-grams included.
    c = run_of(tmp_path / "c", BPE | {"name": "elsewhere/t.json"}, nats=3.5, bits=1.25)
    (chart,) = comparison.compare(runs.read_runs([b, c])).charts
    assert chart.title == "Loss (nats per token)"
    assert [curves.ngrams for curves in chart.curves] == [pytest.approx(3.0 * 3.5 / 1.25)] * 2


def test_losses_that_cannot_be_compared_are_apart_and_a_line_says_so(tmp_path, capsys):
    a, b = run_of(tmp_path / "a", BYTES, nats=1.4, bits=2.0), run_of(tmp_path / "b", BPE, nats=3.5, bits=None)
    found = runs.read_runs([a, b])
    shown = comparison.compare(found)
    assert [chart.title for chart in shown.charts] == ["Loss (bits per byte)", "Loss of b (nats per token)"]
    assert [[curves.color for curves in chart.curves] for chart in shown.charts] == [[0], [1]]
    line = "no bits per byte are known of b: these losses cannot be compared with others."
    assert line in shown.notes[-1]
    assert comparison.summary_rows(found)["last loss (nats per token)"] == ["-", "7.0000"]
    assert line in checked(page.render(found)).text
    execute(["report", str(a), str(b)])
    assert line in capsys.readouterr().out.replace("\n", " ")


def test_a_line_says_that_the_held_out_text_may_differ(tmp_path):
    paths = [run_of(tmp_path / name, BYTES, nats=1.4, bits=2.0, path=name) for name in "ab"]
    (note,) = comparison.compare(runs.read_runs(paths)).notes
    assert note == "The runs differ in data.path. Compare their losses only if the held-out text is the same."
    assert comparison.compare(runs.read_runs(paths[:1])).notes == ()


def test_runs_of_one_name_go_by_their_paths(tmp_path):
    paths = [write(tmp_path / folder, LINES) for folder in ("a/run", "b/run", "b/other")]
    assert [run.name for run in runs.read_runs(paths)] == [str(paths[0]), str(paths[1]), "other"]


def test_differences_leave_out_where_a_run_stands(tmp_path):
    others = CONFIG.replace("0.001", "3e-4").replace("somewhere", "elsewhere") + "data:\n  packing: true\n"
    found = runs.read_runs([write(tmp_path / "a", LINES), write(tmp_path / "b", LINES, others)])
    # 3e-4 without a dot is a word to YAML 1.1; it is read as the flags are
    assert runs.config_differences(found) == {"optim.lr": ["0.001", "0.0003"], "data.packing": ["-", "true"]}


def test_one_page_of_several_runs(tmp_path):
    lines = [training(i, mfu=0.4, moe_load_max_over_mean=1.5, moe_dropped_fraction=0.0) for i in range(1, 9)]
    found = runs.read_runs([write(tmp_path / "a", LINES), write(tmp_path / "b", lines, CONFIG.replace("2", "3"))])
    read = checked(page.render(found))
    figures = [tag for tag, _ in read.tags if tag == "figure"]
    assert len(figures) == 7, "loss, speed, MFU, gradient, rate, load, dropped"
    for word in ("Differences", "model.num_layers", "Model FLOPs utilisation", "Router load", "rolled back"):
        assert word in read.text
    (chart,) = comparison.compare(found).charts
    drawn = charts.loss_chart(chart)
    assert "var(--run0)" in drawn
    assert "var(--run1)" in drawn
    assert "#0" not in drawn, "a colour that the page does not set reads in light or in dark, not in both"


def test_the_page_leaves_out_what_no_run_has(tmp_path):
    """Signs of events that did not occur, and figures without a value, such as MFU on a CPU."""
    plain, spike = ([training(i) for i in (1, 2)], [training(1), {"step": 2, "event": "spike", "loss": 9.0}])
    for name, lines, there in (("plain", plain, []), ("spike", spike, ["spike"])):
        found = runs.read_runs([write(tmp_path / name, lines)])
        legend = page.render(found).split("<p class=legend>")[1].split("</p>")[0]
        assert [kind for kind in charts.MARKS if f"</b> {kind}</span>" in legend] == there
        assert "MFU, median" not in comparison.summary_rows(found)
    both = runs.read_runs([tmp_path / "plain", write(tmp_path / "chip", [training(1, mfu=0.5)])])
    assert comparison.summary_rows(both)["MFU, median"] == ["-", "50.0%"]


def test_the_losses_of_the_sources_of_a_mixture(tmp_path):
    """A chart and a figure for each source; another run of the page may lack them."""
    lines = [training(10), {"step": 10, "eval_loss": 0.7, "eval_loss/a <b>": 0.5, "eval_loss/c": 0.75}]
    found = runs.read_runs([write(tmp_path / "mixed", lines), write(tmp_path / "plain", lines[:1])])
    assert [run.mixture for run in found] == [["a <b>", "c"], []]
    row = comparison.summary_rows(found)["last held-out loss of c (nats per token)"]
    assert row == ["0.7500", "-"]
    read = checked(page.render(found))
    for name in ("a <b>", "c"):
        assert f"Held-out loss of {name} (nats per token)" in read.text


def test_rewards_and_completions_of_a_run_that_learns_from_them(tmp_path):
    def sample(text: str, reward: object) -> dict:
        return {"prompt": "<b>1 + 2", "completion": text, "reward": reward}

    lines = [
        training(10, reward=0.25, reward_std=0.5, ratio_max=1.0, seconds={"step": 1.0, "rollout": 3.0}),
        {"step": 10, "eval_loss": -0.5, "eval_reward": 0.5},
        {"step": 10, "samples": [sample("first", 0), sample("other", 1.5)]},
        {"step": 15, "samples": [sample("unshown", 1)]},
        training(20, reward=0.75, reward_std=0.5, ratio_max=1.5, seconds={"step": 1.0}),
        {"step": 20, "eval_loss": -0.875, "eval_reward": 0.875},
        {"step": 20, "samples": [sample("last", 1), "no sample", {"prompt": 3}, sample("no number", "1")]},
        {"step": 20, "samples": 3},
    ]
    (run,) = runs.read_runs([write(tmp_path / "run", lines, CONFIG + "data: {source: prompts, path: p}\n")])
    assert [chart.key for chart in charts.reward_charts([run])] == ["reward", "eval_reward", "reward_std", "ratio_max"]
    assert goodput.fraction(run.spent) == 1
    text = checked(page.render([run])).text
    assert "Completions" in text
    assert "<b>1 + 2" in text
    assert all(word in text for word in ("first", "other", "1.5", "last", "rollout"))
    assert not any(word in text for word in ("unshown", "no sample", "no number"))
    assert "last held-out reward0.8750" in text
    (plain,) = runs.read_runs([write(tmp_path / "plain", LINES)])
    assert charts.reward_charts([plain]) == []
    assert "Completions" not in checked(page.render([plain])).text


def test_what_comes_from_files_is_text(tmp_path):
    config = "sample:\n  prompts: ['<script>alert(1)</script>']\n'<i>key': \"'\\\"&\"\n"
    lines = [*LINES, {"step": 31, "event": "<img src=x onerror=alert(1)>", "seconds": {"<u>": 1.0, '"><u>': 9.0}}]
    found = runs.read_runs([write(tmp_path / "<b>x", lines, config), write(tmp_path / '"$y', lines)])
    text = page.render(found)
    read = checked(text)
    assert not {tag for tag, _ in read.tags} & {"script", "img", "u"}
    for word in ("<b>x", "<script>alert(1)</script>", "<i>key", "<img src=x onerror=alert(1)>", "<u>", '"$y'):
        assert word in read.text


def test_lines_are_thinned_and_keep_their_spikes(tmp_path):
    n = 100_000
    values = np.sin(np.arange(n) / 1e4)
    values[77_777], values[33_333] = 50.0, -50.0
    steps, kept = charts.thin_out(np.arange(n), values)
    assert len(steps) <= charts.MAX_POINTS
    assert (np.diff(steps) > 0).all()
    assert {0, 33_333, 77_777, n - 1} <= set(steps)
    assert np.array_equal(values[steps], kept)
    lines = [{"step": i, "loss": 1.0 + i % 7} for i in range(1, 30_001)]
    text = page.render(runs.read_runs([write(tmp_path / "run", lines)]))
    assert len(text) < 1_000_000
    assert "The logs have up to 30,000 lines. A chart shows at most 2,000 points" in checked(text).text


def test_smoothing_is_a_mean_of_neighbours(rng):
    assert np.allclose(charts.smooth(np.full(400, 2.0)), 2.0)
    ramp = np.arange(300.0)
    assert np.allclose(charts.smooth(ramp), ramp), "and keeps a straight line, at its ends too"
    values = rng.normal(size=500)
    assert np.allclose(charts.smooth(values)[250], values[245:256].mean())
    for size in range(5):
        assert len(charts.smooth(values[:size])) == size
    values[100] = 1e30
    assert np.allclose(charts.smooth(values)[250], values[245:256].mean()), "a spike is felt near it alone"


def test_a_run_from_before_seconds_were_recorded_gets_the_rest_of_the_page(tmp_path):
    old = [{"step": i, "loss": None if i == 2 else 1.0} for i in (1, 2, 3)]
    path = write(tmp_path / "run", old)
    (path / "config.yaml").unlink()
    (run,) = runs.read_runs([path])
    read = checked(page.render([run]))
    for word in (
        "3 training lines do not record how their seconds were spent",
        "There is no config.yaml",
        "beyond the edge of the chart: 1.",
    ):
        assert word in read.text
    assert runs.summarize(run)["goodput"] == "-"


def test_a_log_that_was_cut(tmp_path):
    path = write(tmp_path / "run", LINES)
    log = path / "metrics.jsonl"
    log.write_text(log.read_text()[:-20])  # within the last line, as a crash does
    (run,) = runs.read_runs([path])
    assert (len(run.records), run.gaps) == (len(LINES) - 1, ())
    lines = log.read_text().splitlines()
    log.write_text("\n".join([lines[0], "{", *lines[1:]]))
    (run,) = runs.read_runs([path])
    assert "metrics.jsonl is damaged, and the figures lack what these lines recorded: line 2 is not JSON." in run.gaps
    assert len(run.records) == len(LINES) - 1, "all later lines are read"


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (None, "contains no metrics.jsonl"),
        ("", "no training line yet"),
        ('{"step": 1, "eval_loss": 2.0}\n', "no training line yet"),
        ('{"loss": 1.0}\n', "line 1 has no step"),
        ("7\n", "line 1 is not a JSON object"),
        ('{"step": 1, "loss": 1.0, "seconds": 3}\n', "line 1 has seconds=3"),
        ('{"step": 1, "loss": 1.0, "seconds": {"step": -1.0}}\n', r"line 1 has seconds=\{"),
        ('{"step": 1, "loss": 1.0, "event": ["resumed"], "lost_s": null}\n', r"line 1 has event=\["),
    ],
)
def test_logs_that_are_none(log, words, tmp_path):
    if log is not None:
        (tmp_path / "metrics.jsonl").write_text(log)
    with pytest.raises(ConfigError, match=words):
        execute(["report", str(tmp_path)])
    assert not (tmp_path / "report.html").exists()


def test_command_lines_that_mean_nothing(tmp_path):
    run = str(write(tmp_path / "run", LINES))
    many = [str(tmp_path / str(i)) for i in range(style.MAX_RUNS + 1)]
    for argv, words in (
        ([], "RUN is missing"),
        ([str(tmp_path / "nowhere")], "is not a directory"),
        ([run, "--open"], "unknown key open"),
        ([run, "--out"], "--out has no value"),
        ([run, run], "named twice"),
        (many, "runs are more than"),
        ([run, "--out", f"{run}/metrics.jsonl"], "does not end in .html"),
        ([run, "--out", f"{run}/nope/x.html"], "is in a directory that does not exist"),
    ):
        with pytest.raises(ConfigError, match=words):
            execute(["report", *argv])
    (Path(run) / "config.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="is not YAML"):
        execute(["report", run])


def test_the_command_starts_without_jax_and_fails_in_one_line(tmp_path):
    run = write(tmp_path / "a run", LINES)
    code = "import sys; from jaxstack.cli.parser import execute; execute(sys.argv[1:]); assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, "report", str(run)], capture_output=True, text=True, check=True)
    for word in ("30 of 40", "goodput", "4.7%", "lost", "down", "report.html"):
        assert word in done.stdout
    checked((run / "report.html").read_text())
    argv = [sys.executable, "-m", "jaxstack", "report", str(tmp_path)]
    failed = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert failed.returncode == 2
    assert failed.stderr.startswith("jaxstack report: error: ")
    assert failed.stderr.count("\n") <= 2


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


LONG = "an-experiment-with-a-very-long-name-lr7e-3-seed0-trial-0017", "a_name_with_underscores_of_some_length_v2"


def long_runs(folder: Path) -> list[runs.LoggedRun]:
    """Three runs with long names, keys and values, and with large and small numbers."""
    lines = [
        training(i * 100_000, loss=3.0, grad_norm=0.1 * i, lr=1e-7, tokens_per_s=7e6 + i, seconds={"step": 9.0})
        for i in range(1, 11)
    ]
    lines += [{"step": 100_000, "eval_loss": 2.25, "eval_bits_per_byte": 1.5, "parameters": 1_234_567_890}]
    lines += [{"step": 300_000, "event": "skipped", "skipped": 1, "batch": f"step 9: {'a/' * 40}b.py tokens 1-2"}]
    key = "a_key:\n  of_two_parts_with_a_long_name: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]\n"
    paths = [write(folder / name, lines, CONFIG.replace("0.001", str(i)) + key) for i, name in enumerate(LONG)]
    return runs.read_runs([write(folder / "b", LINES), *paths])


def test_labels_of_charts_are_within_the_picture(tmp_path):
    """Widths are those of DejaVu Sans, which is wider than other fonts: a digit has 0.64 of the font's size."""
    found = long_runs(tmp_path)
    (losses,) = comparison.compare(found).charts
    drawn = [charts.loss_chart(losses, size) for size in (charts.WIDE, charts.NARROW)]
    drawn += [charts.metric_chart(chart, found) for chart in charts.CHARTS if charts.has_values(chart, found)]
    form = r'<text style="font-size: (\d+)px; text-anchor: (\w+);[^>]* x="([-.\d]+)" y="([-.\d]+)"[^>]*>([^<]+)</text>'
    labels = 0
    for svg in drawn:
        _, _, width, height = map(float, re.findall(r'viewBox="([^"]*)"', svg)[0].split())
        assert svg.count("<text") == len(re.findall(form, svg))
        for size, anchor, x, y, text in re.findall(form, svg):
            room = int(size) * sum(0.32 if letter in ",." else 0.64 for letter in text)
            left = float(x) - {"start": 0, "middle": room / 2, "end": room}[anchor]
            assert 0 <= left < left + room <= width, text
            assert int(size) <= float(y) <= height, text
            labels += 1
    assert labels > 40


def test_every_value_of_several_runs_has_the_name_of_its_run(tmp_path):
    """A narrow window shows values one below the other, where no column says whose they are."""
    found = long_runs(tmp_path)
    text = page.render(found)
    checked(text)
    tables = re.findall(r'<table class="(?:figures|config) stacked compared">.*?</table>', text)
    assert len(tables) == 3, "summary, time, differences"
    for row in (row for table in tables for row in re.findall(r"<tr>(.*?)</tr>", table.split("<tbody>")[1])):
        values = re.findall(r"<td><span class=of>(.*?)</span></span></span><span>.*?</td>", row)
        assert [re.sub("<.*?>", "", name) for name in values] == [run.name for run in found]
    (one,) = found[:1]
    assert "compared" not in page.render([one]).split("</style>")[1]
    assert "max-width: 800px) {\n  .stacked" in text, "320 pixels for labels, 160 for each run"


LAYOUT = """
const found = [];
for (const frame of document.querySelectorAll("iframe")) {
  const page = frame.contentDocument, width = frame.clientWidth;
  const say = (what, text) => found.push(`${width} pixels, ${what}: ${text}`);
  page.querySelectorAll("details").forEach(one => one.open = true);
  for (const one of page.querySelectorAll("html, .scroll"))
    if (one.scrollWidth > one.clientWidth) say("cut off", one.innerText.slice(0, 60));
  for (const text of page.querySelectorAll("svg text")) {
    const box = text.getBoundingClientRect(), svg = text.ownerSVGElement, all = svg.getBoundingClientRect();
    if (!box.width) continue; // the chart for other windows
    if (box.left < all.left || box.right > all.right) say("clipped", text.textContent);
    if (12 * all.width / svg.viewBox.baseVal.width < 8.5) say("tiny", text.textContent);
  }
  const texts = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode, parent = node.parentElement;
    if (parent.closest("svg") || !node.data.trim()) continue;
    const part = parent.closest(".bar span"), shortened = parent.closest(".stacked .name span");
    const outer = (part || parent.closest("section, header")).getBoundingClientRect();
    for (const word of node.data.matchAll(/(?<!\\S)\\S{1,24}(?!\\S)/g)) {
      const range = page.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const boxes = [...range.getClientRects()].filter(box => box.width && !(part && box.top >= outer.bottom));
      if (new Set(boxes.map(box => Math.round(box.top))).size > 1) say("broken", word[0]);
      for (const box of boxes)
        if (!shortened && (box.left < outer.left - 1 || box.right > outer.right + 1)) say("outside", word[0]);
    }
  }
}
document.body.innerText = JSON.stringify(found);
"""
"""Lists what the page does not show well: text that is cut off, clipped, broken within a word, or too small."""


def browse(folder: Path, *argv: str) -> subprocess.CompletedProcess:
    fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={folder}/own"]
    return subprocess.run([BROWSER, *fixed, *argv], capture_output=True, text=True, check=True)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here; the tests above have read the page")
def test_a_window_of_any_width_shows_everything(tmp_path):
    found = long_runs(tmp_path)
    frames = []
    for shown in (found, found[:1], found[1:]):
        text = re.sub("<meta http-equiv.*?>", "", page.render(shown), flags=re.S)  # it forbids the frame to read it
        frames += [f'<iframe width={width} srcdoc="{escape(text)}"></iframe>' for width in (360, 400, 800, 1400)]
    script = f"<script>onload = () => {{{LAYOUT}}}</script>"
    (tmp_path / "frames.html").write_text(f"<!DOCTYPE html><meta charset=utf-8><body>{''.join(frames)}{script}</body>")
    done = browse(tmp_path, "--dump-dom", (tmp_path / "frames.html").as_uri())
    said = set(json.loads(unescape(done.stdout.split("<body>")[1].split("</body>")[0])))
    assert not said, "\n".join(sorted(said))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here; the tests above have read the page")
def test_a_browser_shows_the_page(tmp_path):
    run = write(tmp_path / "run", LINES)
    execute(["report", str(run)])
    picture = tmp_path / "page.png"
    address = (run / "report.html").as_uri()
    done = browse(tmp_path, "--window-size=1200,2000", f"--screenshot={picture}", address)
    assert "CONSOLE" not in done.stderr, "nothing that the page's own policy forbids"

    from matplotlib.image import imread

    pixels = imread(picture)[..., :3]
    assert pixels.shape[:2] == (2000, 1200)
    blue = (pixels[..., 2] > 0.8) & (pixels[..., 0] < 0.3)  # the first run's colour
    assert blue.sum() > 1000, "curves"
