"""`jaxstack generate` reads a run of `jaxstack compress quantize` on any mesh, and writes the texts of one device."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from families import EXPERTS, FAMILIES

import jaxstack as js
from jaxstack.checkpoint import run_dir
from jaxstack.checkpoint.store import Checkpoints
from jaxstack.cli.parser import execute
from jaxstack.config import Config, DataConfig, RunConfig, TrainConfig
from jaxstack.data.tokenizers import ByteTokenizer
from jaxstack.families.context import make_context
from jaxstack.sharding import make_mesh
from jaxstack.training.state import Recipe, abstract_state, make_state

SHAPES = {"llama3": replace(FAMILIES["llama3"], num_layers=2), "mixtral": replace(EXPERTS["mixtral"], num_layers=2)}
FORMATS = {"int8": ["--weights=int8", "--group=null"], "int4": ["--weights=int4", "--group=16"]}
PROMPTS = ["ab", "c", "defg", "hij"]
MESHES = [
    ("llama3", {"tensor": 2}),
    ("llama3", {"pipe": 2}),
    ("llama3", {"fsdp": 2, "pipe": 2, "tensor": 2}),
    ("mixtral", {"expert": 2}),
    ("mixtral", {"expert": 4, "tensor": 2}),
    ("mixtral", {"expert": 2, "pipe": 2}),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a run of each shape, and one of it in each format, in folders of these names."""
    folder = tmp_path_factory.mktemp("quantized")
    words = np.random.default_rng(0).integers(0, 100, 400)
    (folder / "text.txt").write_text(" ".join(f"word{n}" for n in words))
    for name, shape in SHAPES.items():
        path = folder / name
        cfg = Config(
            model=replace(shape, vocab_size=256),
            run=RunConfig(dir=str(path)),
            data=DataConfig(seq_len=32, batch_size=4, source="path", path=str(folder / "text.txt")),
            train=TrainConfig(eval_steps=1),
        )
        path.mkdir()
        run_dir.write(cfg, ByteTokenizer().to_json())
        ctx = make_context(cfg, make_mesh(replace(cfg.mesh, data=1), 1, jax.devices()[:1]))
        with Checkpoints(cfg.checkpoint, run_dir.checkpoints(path)) as checkpoints:
            state = make_state(Recipe.of(cfg), ctx, abstract_state(Recipe.of(cfg), ctx))
            # With noise in all weights, no next token is nearly as probable as another, and texts differ.
            noise = np.random.default_rng(1)
            varied = jax.tree.map(lambda a: a + noise.normal(0, 0.1, a.shape).astype(np.float32), state.params)
            checkpoints.save(1, replace(state, params=varied), {"config": {"data": {}}, "data": ""})
        for kind, flags in FORMATS.items():
            execute(["compress", "quantize", str(path), str(folder / f"{name}-{kind}"), "--method=rtn", *flags])
    return folder


@pytest.mark.matrix
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("name", "mesh"), MESHES, ids=str)
def test_the_command_writes_the_texts_of_one_device(runs, capsys, name, mesh, kind):
    def texts(run: str, mesh: dict[str, int]) -> str:
        flags = [f"--mesh.{axis}={size}" for axis, size in ({"data": 1} | mesh).items()]
        execute(["generate", str(runs / run), *PROMPTS, "--sample.temperature=0", "--sample.tokens=12", *flags])
        return capsys.readouterr().out

    capsys.readouterr()
    alone = texts(f"{name}-{kind}", {})
    assert len(set(alone)) > 12, "the texts are not one token again and again"
    assert texts(f"{name}-{kind}", mesh) == alone
    made, before = js.load(runs / f"{name}-{kind}", mesh=mesh), js.load(runs / name)
    tokens = np.frombuffer(b"word1 word2", np.uint8).astype(np.int32)[None]
    assert np.abs(made.logits(tokens) - before.logits(tokens)).max() > 1e-3, "the matrices are rounded"
