"""Runs of an encoder: resume, what a person sees, and commands that are for decoders."""

import dataclasses
import json
import re

import pytest
import test_meshes as meshes

from jaxstack.cli.parser import execute
from jaxstack.config import ConfigError
from jaxstack.config.reading.parse import parse_config
from jaxstack.report import comparison, runs
from jaxstack.train import main

FLAGS = [
    "--model.family=encoder", "--model.tied_embeddings=true", "--model.norm_after=true", "--model.token_types=2",
    "--model.positions=learned", "--model.num_layers=2", "--model.d_model=32", "--model.num_heads=4",
    "--model.pad_vocab_to=258",
    "--data.source=path", "--data.seq_len=32", "--data.batch_size=4", "--train.eval_every=2", "--train.eval_steps=2",
    "--train.ngram_baseline=false", "--run.log_every=1", "--checkpoint.every=2", "--mesh.data=4", "--mesh.tensor=2",
    "--optim.name=adamw",
]  # fmt: skip


def losses(directory):
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return {(line["step"], key): line[key] for line in lines for key in ("loss", "eval_loss") if key in line}


@pytest.mark.matrix
def test_a_run_is_resumed_bit_for_bit_and_its_loss_is_named(tmp_path, rng, capsys):
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(c) for c in rng.integers(97, 122, 9000)))
    # The other schedules have train.steps as a constant, and XLA may fuse and round another program otherwise.
    flags = [*FLAGS, f"--data.path={text}", "--optim.schedule=constant"]
    for name, steps in (("straight", 4), ("resumed", 2), ("resumed", 4)):
        main(parse_config([*flags, f"--train.steps={steps}", f"--run.dir={tmp_path / name}"]))
    assert losses(tmp_path / "straight") == losses(tmp_path / "resumed")
    assert len(losses(tmp_path / "straight")) == 4 + 2
    out = capsys.readouterr().out
    assert "held-out masked-LM loss" in out
    # Without bits per byte, which would be those of a text.
    assert re.search(r"nats per hidden token, accuracy on hidden tokens \d+\.\d%\n", out)
    (found,) = runs.read_runs([tmp_path / "straight"])
    assert runs.summarize(found)["objective"] == "masked-LM loss in nats per hidden token"
    decoder = dataclasses.replace(found, name="next", config=found.config | {"model.family": "decoder"})
    shown = comparison.compare([found, decoder])
    assert len(shown.charts) == 2  # their losses share no axis
    assert "The objectives differ" in shown.notes[0]
    for words in (
        ["generate", str(tmp_path / "straight"), "ab"],
        ["compress", "quantize", str(tmp_path / "straight"), str(tmp_path / "small")],
    ):
        with pytest.raises(ConfigError, match=r"model\.family=encoder") as error:
            execute(words)
        assert "\n" not in str(error.value)


@pytest.mark.matrix
def test_layers_behind_the_last_whole_period_are_those_of_a_list_of_all_windows(seed):
    """A list of all windows is one period, whose layers no loop runs. Three windows make a loop and two layers more."""
    cut = meshes.config("modernbert_cut", {}, dropout=0.3, remat="full", accum=2)
    listed = dataclasses.replace(cut.model, windows=cut.model.layer_windows)
    assert listed.windows == (0, 4, 4, 0, 4)
    one, other = (meshes.gradients(cfg, seed) for cfg in (dataclasses.replace(cut, model=listed), cut))
    loss, gradient = meshes.errors("modernbert_cut", one, other)
    # The same operations, which XLA fuses otherwise; a window or a mask of another layer is of the order of one.
    assert loss < 1e-6
    assert gradient < 1e-5
