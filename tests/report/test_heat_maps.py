"""Heat maps of watched values: which there are, what they show, and the sentences about them."""

import json

import numpy as np
import pytest

from jaxstack.report import heat_maps, page, runs


def array(rms: float | None, zeros: float = 0.0) -> dict:
    return {"norm": 1.0, "rms": rms, "max": 2.0, "zeros": zeros, "histogram": {"0": 1.0}}


LINES = [
    {"step": 5, "loss": 6.0},
    {
        "step": 5,
        "watch": {
            "layers/0/mlp/out": array(0.5), "layers/1/mlp/out": array(1.0, 0.25), "layers/10/mlp/out": array(0.01),
            "layers/0/mlp/w_up/update_ratio": {"value": 1e-3}, "embedding/tokens/gradient": array(0.1, 0.005),
            "layers/1/attention/max_logit": {"value": -3.0}, "layers/0/attention/max_logit": {"value": -3.0},
        },
    },
    {
        "step": 10,
        "watch": {
            "layers/0/mlp/out": array(0.6), "layers/1/mlp/out": array(None), "layers/10/mlp/out": array(0.04),
            "layers/0/mlp/w_up/update_ratio": {"value": 1.01e-3}, "embedding/tokens/gradient": array(0.2),
            "layers/1/attention/max_logit": {"value": -3.0}, "layers/0/attention/max_logit": {"value": -3.0},
        },
    },
]  # fmt: skip


@pytest.fixture
def run(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    (found,) = runs.read_runs([tmp_path])
    return found


def test_a_map_has_a_row_for_each_layer_and_a_column_for_each_step(run):
    maps = {heat.title: heat for heat in heat_maps.heat_maps(run)}
    assert [*maps] == [
        "layers/*/attention/max_logit (value)", "layers/*/mlp/out (RMS, log scale)",
        "layers/*/mlp/out (share of zeros)", "embedding/tokens/gradient (RMS)",
        "layers/*/mlp/w_up/update_ratio (value)",
    ]  # fmt: skip
    heat = maps["layers/*/mlp/out (RMS, log scale)"]
    assert (heat.layers, heat.steps) == ([0, 1, 10], [5, 10])
    np.testing.assert_array_equal(heat.values, [[0.5, 0.6], [1.0, np.nan], [0.01, 0.04]])
    assert maps["embedding/tokens/gradient (RMS)"].layers == []


def test_sentences(run):
    assert {heat.title.split(" ")[0]: heat_maps.sentence(heat) for heat in heat_maps.heat_maps(run)} == {
        "layers/*/attention/max_logit": "The value is -3 everywhere.",
        "layers/*/mlp/out": "The share of zeros is from 0 (layer 0, step 5) to 0.25 (layer 1, step 5).",
        "embedding/tokens/gradient": "The RMS is from 0.1 (step 5) to 0.2 (step 10); the last step has 2 times the "
        "value of the first one.",
        "layers/*/mlp/w_up/update_ratio": "The value is from 0.001 (layer 0, step 5) to 0.00101 (layer 0, step 10); "
        "the last step has 1.01 times the value of the first one.",
    }
    (out,) = (heat for heat in heat_maps.heat_maps(run) if heat.statistic == "rms" and "mlp/out" in heat.name)
    assert heat_maps.sentence(out) == (
        "The RMS is from 0.01 (layer 10, step 5) to 1 (layer 1, step 5); layer 10 has changed most, to 4 times its "
        "value at the first step. 1 of 6 are not finite."
    )
    assert heat_maps.sentence(out._replace(values=np.full((3, 2), np.nan))) == "No RMS is finite."
    flat = out._replace(values=np.array([[1.0, 1.01], [2.0, 2.0], [2.0, 1.99]]))
    assert heat_maps.sentence(flat).endswith("; no layer has changed by 5% since the first step.")


def test_the_page_draws_them(run):
    text = page.render([run])
    assert text.count("<figcaption>layers/*/mlp/out") == 2
    assert "layer 10 has changed most" in text
    assert 'xlink:href="data:image/png;base64,' in text
    assert "Watched values" not in page.render([runs.LoggedRun("a", run.path, LINES[:1], {}, ())])


def test_columns_keep_the_largest_value(run, monkeypatch):
    shown = []
    monkeypatch.setattr(heat_maps, "_largest", lambda values: shown.append(values) or values.max(1))
    heat = heat_maps.HeatMap("x", "rms", [0], [*range(1000)], np.arange(1000.0)[None])
    heat_maps.draw(heat)
    assert len(shown) == heat_maps.MAX_COLUMNS
    assert sum(part.size for part in shown) == 1000
