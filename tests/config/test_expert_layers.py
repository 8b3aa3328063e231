"""Which layers have experts: the declaration, the stacks that it makes, and the names of earlier versions."""

import pytest

from jaxstack import families
from jaxstack.config import ConfigError, ExpertLayers, ModelConfig, MoEConfig, PipelineConfig
from jaxstack.config.expert_layers import rule_of, segments
from jaxstack.config.reading.parse import parse_config
from jaxstack.families import spec
from jaxstack.models.params import count, flat_spec
from jaxstack.pipeline.resolve import resolve
from jaxstack.pipeline.schedule import ScheduleError

D, E = False, True


@pytest.mark.parametrize(
    ("layers", "depth", "expected"),
    [
        ({}, 3, [E, E, E]),
        ({"first": 2}, 4, [D, D, E, E]),
        ({"first": 1, "every": 2}, 5, [D, E, D, E, D]),
        ({"every": 3}, 7, [E, D, D, E, D, D, E]),
        ({"numbers": (0, 3)}, 4, [E, D, D, E]),
        ({"encoder_numbers": (0, 3)}, 4, [D, D, D, D]),
    ],
)
def test_a_rule_or_a_list_says_which_layers_have_experts(layers, depth, expected):
    found = ExpertLayers(**layers).of_stack(depth)
    assert [*found] == expected
    if any(found):
        assert rule_of(found).of_stack(depth) == found


def test_an_encoder_has_layers_of_its_own():
    both = ExpertLayers(numbers=(1,), encoder_numbers=(0, 2))
    assert (both.of_stack(3), both.of_stack(3, encoder=True)) == ((D, E, D), (E, D, E))
    assert ExpertLayers(first=1).of_stack(2, encoder=True) == (D, E)


@pytest.mark.parametrize(
    ("has", "expected"),
    [
        ([E] * 4, [("x", 0, 1, 4)]),
        ([D] * 4, [("x", 0, 1, 4)]),
        ([D] * 3 + [E] * 58, [("dense_x", 0, 1, 3), ("x", 3, 1, 58)]),
        ([E] * 2 + [D] * 5, [("x", 0, 1, 2), ("x_2", 2, 1, 5)]),
        ([D, E] * 6, [("x", 0, 2, 6)]),
        ([D, E], [("dense_x", 0, 1, 1), ("x", 1, 1, 1)]),
        ([D, E, D, D] * 2, [("x", 0, 4, 2)]),
        ([D, E, E, D, E, D], [("dense_x", 0, 1, 1), ("x", 1, 1, 1), ("x_2", 2, 2, 2)]),
        ([D, D, D, D, E] * 25 + [D] * 3, [("x", 0, 5, 25), ("x_2", 125, 1, 3)]),
    ],
)
def test_a_stack_is_cut_where_its_layers_change(has, expected):
    """Name, first layer, layers of a unit and units of each part. Its units are what a program has to compile."""
    found = segments("x", tuple(has))
    assert sum(len(one.kinds) for one in found) == sum(size for _, _, size, _ in expected)
    assert [kind for one in found for kind in one.kinds * one.units] == has
    assert len(found) == len(expected)
    if has[:5] != [D] * 4 + [E]:  # of which another cut is as good
        assert [(one.name, one.start, len(one.kinds), one.units) for one in found] == expected


def test_windows_that_alternate_leave_no_units():
    assert [one.kinds for one in segments("x", (D, D, E, E) * 2, period=2)] == [(D,), (E,)] * 2


def test_files_of_earlier_versions_are_read_and_flags_are_refused(tmp_path):
    file = tmp_path / "config.yaml"
    for old, new in (
        ("dense_layers: 2", ExpertLayers(first=2)),
        ("every: 1, dense_layers: 0", ExpertLayers()),
        ("every: 2", ExpertLayers(first=1, every=2)),
    ):
        file.write_text(f"model: {{family: decoder, num_layers: 4, moe: {{num_experts: 4, {old}}}}}")
        assert parse_config([f"--config={file}"]).model.moe.layers == new
    file.write_text("model: {moe: {num_experts: 4, every: 2, layers: {first: 1}}}")
    with pytest.raises(ConfigError, match=r"model.moe.every is the earlier name .* Remove model.moe.every"):
        parse_config([f"--config={file}"])
    with pytest.raises(ConfigError, match=r"unknown key model.moe.dense_layers, .* Use --model.moe.layers.first=VALUE"):
        parse_config(["--model.moe.dense_layers=1"])
    with pytest.raises(ConfigError, match=r"unknown key model.moe.every, .* Set model.moe.layers.first=1 with it"):
        parse_config(["--model.moe={num_experts: 4, every: 2}"])


@pytest.mark.parametrize(("layers", "stacks"), [(6, 3), (7, 4)])
def test_a_pipeline_takes_three_stacks_and_refuses_four(layers, stacks):
    """The smaller stacks have one layer each, on the first stage alone."""
    moe = MoEConfig(num_experts=4, layers=ExpertLayers(numbers=(1, 2, 4)))
    model = ModelConfig(num_layers=layers, moe=moe, vocab_size=64)
    found = {name: (one.depth, one.period) for name, one in families.of(model).stacks(model).items()}
    assert len(found) == stacks
    if stacks == 4:
        with pytest.raises(ScheduleError, match=r"numbers=\[1, 2, 4\] cuts the model into 4 stacks .* mesh.pipe=2"):
            resolve(PipelineConfig(), model, 2, 8, stacks=found)
        return
    stages = resolve(PipelineConfig(), model, 2, 8, stacks=found).stages
    assert str(stages) == "dense_layers 0 | none, layers 0 | none, layers_2 0 | 1"


def test_128_layers_of_which_24_have_experts():
    """The sizes of all matrices, by hand: 24 layers have 64 experts and a router, 104 an MLP, 64 cross attention."""
    model = parse_config(["--config=translation_128"]).model
    width, hidden = 2048, 8192
    sides = (model.moe.layers.of_stack(64, encoder=True), model.moe.layers.of_stack(64))
    assert [sum(side) for side in sides] == [12, 12]
    mlp, attention = 3 * width * hidden, 4 * width**2
    matrices = 24 * (64 * mlp + width * 64) + 104 * mlp + (128 + 64) * attention
    declared = flat_spec(spec(model))
    layers = {path: p for path, p in declared.items() if "coder" in path.split("/")[0] and p.stacked}
    assert sum(p.size for p in layers.values() if p.kind in ("matrix", "router")) == matrices
    assert {path.split("/")[0] for path in layers} == {"encoder", "decoder", "dense_encoder", "dense_decoder"}
    # Compiled are six layers of each side and not 64.
    assert {len(one.kinds) for parts in model.expert_segments.values() for one in parts} == {1, 5}
    assert count(spec(model)) > 81e9
