"""Experts with replicas write the texts of one device, their load is counted exactly, and bad files are refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from families import EXPERTS
from test_generate import MODELS, PROMPTS, gate_of, joined, on_mesh, values_of

import jaxstack as js
from jaxstack import families
from jaxstack.checkpoint import run_dir
from jaxstack.checkpoint.store import Checkpoints
from jaxstack.cli.parser import execute
from jaxstack.config import Config, ConfigError, DataConfig, ModelConfig, RunConfig, SampleConfig
from jaxstack.data.tokenizers import ByteTokenizer
from jaxstack.families.context import make_context
from jaxstack.generate import decode
from jaxstack.generate.engine import Engine
from jaxstack.moe.placement import read_load
from jaxstack.sharding import make_mesh
from jaxstack.training.state import Recipe, abstract_state, make_state

TEXTS = ["ab", "c", "defg", "ab", "hij"]
FLAGS = ["--sample.temperature=0", "--sample.tokens=10"]
HOT = [[[0, 2, 1], [3, 0, 0]], [[3, 1, 0], [2, 3, 1]]]
"""Of two layers on two devices. Device 1 stores expert 0 of the first layer twice."""


def begin_run(path: Path, shape: ModelConfig) -> Config:
    cfg = Config(model=replace(shape, vocab_size=256), run=RunConfig(dir=str(path)), data=DataConfig(seq_len=64))
    run_dir.write(cfg, ByteTokenizer().to_json())
    return cfg


@pytest.fixture(scope="module")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates a run with four experts in each of two layers."""
    path = tmp_path_factory.mktemp("run")
    cfg = begin_run(path, replace(EXPERTS["mixtral"], num_layers=2))
    ctx = make_context(cfg, make_mesh(replace(cfg.mesh, data=1), 1, jax.devices()[:1]))
    with Checkpoints(cfg.checkpoint, run_dir.checkpoints(path)) as checkpoints:
        state = make_state(Recipe.of(cfg), ctx, abstract_state(Recipe.of(cfg), ctx))
        checkpoints.save(1, replace(state, params=jax.tree.map(lambda a: 4 * a, state.params)), {})
    return path


def placement_file(path: Path, experts: list[list[list[int]]]) -> Path:
    """Writes the experts of each layer and device."""
    head = {"experts": 4, "devices": len(experts[0]), "slots": len(experts[0][0])}
    path.write_text(json.dumps(head | {"layers": experts}))
    return path


@pytest.mark.matrix
def test_replicas_write_the_texts_of_one_device(run_path, tmp_path, capsys):
    """By the commands. Each token but the last of a text chooses two experts, and no byte ends a text here."""

    def texts(*flags: str) -> str:
        execute(["generate", str(run_path), *TEXTS, *FLAGS, *flags])
        return capsys.readouterr().out

    alone = texts(f"--expert_load={tmp_path / 'load.json'}")
    load = read_load(tmp_path / "load.json")
    assert load.shape == (2, 4)
    assert load.sum(1).tolist() == [2 * sum(len(text) + 10 - 1 for text in TEXTS)] * 2
    chosen = placement_file(tmp_path / "placement.json", HOT)
    flags = ["--mesh.expert=2", "--mesh.data=1", f"--placement={chosen}"]
    assert texts(*flags, f"--expert_load={tmp_path / 'again.json'}") == alone
    np.testing.assert_array_equal(read_load(tmp_path / "again.json"), load)


MESHES = [{"expert": 2, "tensor": 2}, {"expert": 2, "fsdp": 2}, {"expert": 2, "pipe": 2}, {"expert": 2, "data": 2}]


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_replicas_on_other_meshes(run_path, tmp_path, mesh):
    """Each device stores the experts of its slots, and the texts are those of one device, with `rows` too."""
    alone = js.load(run_path)
    run = js.load(run_path, mesh=mesh, placement=placement_file(tmp_path / "placement.json", HOT))
    stored = np.asarray(HOT).reshape(2, 6)
    for name in ("w_up", "w_gate", "w_down"):
        weights = jax.device_get(alone.params["layers"]["moe"][name])
        expected = np.stack([layer[slots] for layer, slots in zip(weights, stored, strict=True)])
        np.testing.assert_array_equal(jax.device_get(run.params["layers"]["moe"][name]), expected)
    expected = alone.generate(TEXTS, tokens=10, temperature=0)
    assert run.generate(TEXTS, tokens=10, temperature=0) == expected
    assert run.generate(TEXTS, tokens=10, temperature=0, rows=2) == expected
    np.testing.assert_allclose(run.logits("abcdef"), alone.logits("abcdef"), atol=1e-4)  # logits up to 30


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "mesh", "tokens"),
    [
        ("deepseek", None, 12),
        ("timestep", None, 12),
        ("softmax", {"pipe": 2, "expert": 2}, 12),
        ("sigmoid", {"expert": 2, "tensor": 2}, 12),
        ("domain", {"data": 4}, 1),
    ],
)
def test_the_load_counts_what_the_uncached_forward_counts(name, mesh, tokens):
    """Prompts and all tokens that were read count; padding, rows without a prompt and ended texts do not."""
    if mesh is None:
        cfg, values, options = MODELS[name], values_of(MODELS[name]), {"gate": gate_of(MODELS[name])}
        alone = values
    else:
        (cfg, values, options), (_, alone, _) = on_mesh(name, mesh), on_mesh(name, {})
    engine = Engine.create(cfg, values, **options)
    sample = SampleConfig(tokens=tokens, temperature=1.0)
    rows = joined(PROMPTS, decode.stream(engine, PROMPTS, sample, stop=(*range(8),), seed=2))
    if tokens > 1:
        assert len({len(row) - len(prompt) for row, prompt in zip(rows, PROMPTS, strict=True)}) > 1
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    read = np.zeros_like(tokens)
    for i, row in enumerate(rows):  # aligned at their beginnings; attention is causal
        tokens[i, : len(row)], read[i, : len(row) - 1] = row, 1
    batch = {"tokens": tokens, "loss_weights": read}
    if options["gate"] is not None:
        batch["gate_ids"] = np.full_like(tokens, options["gate"])
    forward = jax.jit(lambda values: families.of(cfg).hidden_states(decode.dropless(cfg), values, batch)[1]["load"])
    expected = jax.device_get(forward(jax.device_get(alone)))
    np.testing.assert_array_equal(engine.counted["load"], expected)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--placement=nowhere.json"], "nowhere.json cannot be read (No such file"),
        (["--placement=FILE"], "has devices=2, but mesh.expert=1. Use --mesh.expert=2"),
        (["--placement=FILE", "--mesh.expert=4", "--mesh.data=1"], "has devices=2, but mesh.expert=4"),
        (["--expert_load=load.txt"], "--expert_load=load.txt does not end in .json"),
        (["--expert_load=a.json", "--sample.rows=1"], "counts the tokens of one batch, unlike sample.rows=1"),
        (["--expert_load=a.json", "--sample.beams=2"], "counts the tokens of one batch, unlike sample.beams=2"),
        (["--expert_load=a.json", "--draft=x"], "counts the tokens of one batch, unlike --draft=x"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_mistake_is_one_line(run_path, tmp_path, flags, message):
    path = str(placement_file(tmp_path / "placement.json", HOT))
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        execute(["generate", str(run_path), "ab", "c", *FLAGS, *(flag.replace("FILE", path) for flag in flags)])
    assert "\n" not in str(raised.value)


def test_a_dense_model_has_no_experts_to_place(tmp_path):
    begin_run(tmp_path, MODELS["llama3"])
    for flag in ("--placement=x.json", "--expert_load=x.json"):
        with pytest.raises(ConfigError, match=re.escape(flag) + r".*model.moe.num_experts=0. Remove --\w+"):
            execute(["generate", str(tmp_path), "ab", *FLAGS, flag])
