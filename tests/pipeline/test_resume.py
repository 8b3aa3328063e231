"""A run that changes its pipeline schedule each time it resumes has the losses of one device."""

import json

import jax
import numpy as np
import pytest
from lines import lines
from orbax.checkpoint import v1 as ocp

from jaxstack.common.tree import flatten
from jaxstack.config import ConfigError
from jaxstack.config.reading.parse import parse_config
from jaxstack.train import main

FLAGS = [
    "--model.num_layers=5", "--model.d_model=32", "--model.d_ff=64", "--model.num_heads=4", "--data.source=path",
    "--data.seq_len=16", "--data.batch_size=8", "--train.eval_every=100", "--train.eval_steps=2",
    "--train.ngram_baseline=false", "--optim.warmup_steps=0", "--optim.schedule=constant", "--run.log_every=1",
    "--checkpoint.every=2", "--checkpoint.keep=100", "--sample.prompts=[]",
]  # fmt: skip
STAGES = ["--mesh.pipe=2", "--mesh.fsdp=2", "--mesh.data=1", "--pipeline.microbatches=4", "--pipeline.split=['.*']"]
LEGS = [
    ("1f1b", 1, "once"),
    ("zb1", 1, "layer"),
    ("zb_h1", 1, "once"),
    ("interleaved_1f1b", 2, "layer"),
    ("1f1b", 1, "once"),
]
"""Schedule, chunks and `pipeline.gather` of two steps each. Five layers make uneven stages, and empty slots."""


def arrays(path):
    """Returns the arrays of a checkpoint."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    saved = ocp.metadata(path).metadata
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one), saved)
    return {name: np.asarray(leaf) for name, leaf in flatten(ocp.load(path, abstract)).items()}


def pair_flags(folder, rng):
    """Writes pairs of words, and returns the flags of an encoder-decoder that reads them."""
    words = ["".join(word) for word in rng.choice(list("abc"), (300, 3))]
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(json.dumps({"source": w, "target": w[::-1], "language": "back"}) for w in words))
    return [f for f in FLAGS[2:-1] if "source" not in f and "eval" not in f] + [
        "--data.source=pairs", f"--data.path={path}", "--data.languages=[back]", "--data.target_len=8",
        "--model.family=encoder_decoder", "--model.d_model=32", "--train.eval_every=2", "--train.eval_steps=1",
    ]  # fmt: skip


@pytest.mark.matrix
def test_experts_in_some_layers_resume_bit_for_bit(tmp_path, rng, monkeypatch):
    """A dense run is up-cycled to one layer of two with experts, which a pipeline cannot do."""
    flags = [*pair_flags(tmp_path, rng), "--model.num_layers=4", "--model.encoder_layers=4"]
    grown = [
        f"--run.init_from={tmp_path / 'dense'}",
        "--model.moe={num_experts: 4, layers: {first: 1, every: 2}, top_k: 2}",
    ]
    spread = [*grown, "--mesh.data=1", "--mesh.expert=2", "--mesh.tensor=2"]
    stages = [*grown, *STAGES[:-1], "--pipeline.schedule=1f1b"]

    def run(name, steps, *more):
        main(parse_config([*flags, f"--train.steps={steps}", f"--run.dir={tmp_path / name}", *more]))

    devices = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda *_: devices[:1])
    run("dense", 2, "--mesh.data=1")
    monkeypatch.setattr(jax, "devices", lambda *_: devices[:4])
    with pytest.raises(
        ConfigError, match=r"up-cycled in the layers of model.moe.layers alone, .* mesh.pipe=1, and resume"
    ):
        run("refused", 2, *stages)
    run("whole", 4, *spread)
    run("parts", 2, *spread)
    run("parts", 4, *spread)
    whole, parts = (arrays(tmp_path / name / "checkpoints" / "4") for name in ("whole", "parts"))
    assert any("layer_1/moe/router" in name for name in whole)
    assert whole.keys() == parts.keys()
    assert [name for name in whole if not np.array_equal(whole[name], parts[name])] == []


@pytest.mark.matrix
def test_encoder_decoders_resume_in_and_out_of_a_pipeline(tmp_path, rng, monkeypatch):
    """Uneven stages of both stacks, another schedule in each leg, and evaluation: the losses of one device."""
    flags = [*pair_flags(tmp_path, rng), "--model.num_layers=3", "--model.encoder_layers=5"]

    def run(name, steps, *more):
        main(parse_config([*flags, f"--train.steps={steps}", f"--run.dir={tmp_path / name}", *more]))

    devices = jax.devices()
    one, four = ((lambda *_, n=n: devices[:n]) for n in (1, 4))
    monkeypatch.setattr(jax, "devices", one)
    run("plain", 6, "--mesh.data=1")
    monkeypatch.setattr(jax, "devices", four)
    run("legs", 2, *STAGES[:-1], "--pipeline.schedule=1f1b")
    run("legs", 4, *STAGES[:-1], "--pipeline.schedule=gpipe", "--pipeline.gather=layer")
    monkeypatch.setattr(jax, "devices", one)
    run("legs", 6, "--mesh.data=1")
    for key in ("loss", "eval_loss"):
        plain, legs = (
            {line["step"]: line[key] for line in lines(tmp_path / name) if key in line} for name in ("plain", "legs")
        )
        assert len(plain) == {"loss": 6, "eval_loss": 3}[key]
        assert legs == pytest.approx(plain, rel=3e-6)


@pytest.mark.slow
def test_every_leg_of_a_run_may_have_another_schedule(tmp_path, rng, monkeypatch, capsys):
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(c) for c in rng.integers(97, 122, 9000)))

    def run(name, steps, *flags):
        main(
            parse_config(
                [*FLAGS, f"--data.path={text}", f"--train.steps={steps}", f"--run.dir={tmp_path / name}", *flags]
            )
        )
        return capsys.readouterr().out

    devices = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda *_: devices[:1])
    run("plain", 2 * len(LEGS), "--mesh.data=1")
    monkeypatch.setattr(jax, "devices", lambda *_: devices[:4])
    for leg, (schedule, chunks, gather) in enumerate(LEGS):
        how = [f"--pipeline.schedule={schedule}", f"--pipeline.chunks={chunks}", f"--pipeline.gather={gather}"]
        out = run("legs", 2 * leg + 2, *STAGES, *how)
        assert f"pipeline {schedule}, 2 stages" in out
        assert ("waiting" in out) == schedule.startswith("zb"), "some gradients are left to weight units"
        assert leg == 0 or f"resumed from step {2 * leg}" in out
    plain, legs = (
        {line["step"]: line["loss"] for line in lines(tmp_path / name) if "loss" in line} for name in ("plain", "legs")
    )
    # Other orders of summation, as in test_faults.test_another_mesh.
    assert legs == pytest.approx(plain, rel=3e-6)

    # A step without an update, under another schedule, on other stages: it saves what it read.
    frozen = ["--optim.lr=0", "--optim.weight_decay=0", "--pipeline.schedule=zb_h1", "--pipeline.gather=layer"]
    out = run("legs", 2 * len(LEGS) + 1, *STAGES, *frozen)
    before, after = (arrays(tmp_path / "legs" / "checkpoints" / str(2 * len(LEGS) + n)) for n in (0, 1))
    for name in (name for name in before if name.startswith("params/")):
        np.testing.assert_array_equal(after[name], before[name], name)
