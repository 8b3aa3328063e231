"""A run directory that others change: names that they have made links, and a directory that they delete."""

import json
import os
import shutil
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import harness
import numpy as np
import pytest
from lines import lines

from jaxstack.checkpoint import evaluations, manifest, run_dir, store
from jaxstack.cli.parser import execute
from jaxstack.common import files
from jaxstack.common.errors import ConfigError
from jaxstack.config import CheckpointConfig, Config, RunConfig
from jaxstack.data.tokenizers import ByteTokenizer
from jaxstack.pipeline.costs import Costs
from jaxstack.report import page, runs
from jaxstack.runtime import distributed
from jaxstack.tracking import jsonl, plot, sinks

SECRET = "the content of a file of somebody else"
PNG = b"\x89PNG\r\n\x1a\n" + bytes(30)


def take_lock(run: Path) -> None:
    with run_dir.DirectoryLock(run):
        pass


def probe(run: Path) -> None:
    store.Checkpoints(CheckpointConfig(), run / "checkpoints")._probe()


def draw(run: Path) -> None:
    pytest.importorskip("PIL.Image")
    from jaxstack.generate.pictures import write_grid

    write_grid(run / "samples" / "000001.png", np.zeros((1, 1, 8, 8, 1)))


def prepare(run: Path) -> None:
    run_dir.prepare(Config(run=RunConfig(dir=str(run))), ByteTokenizer().to_json())


def write_configuration(run: Path) -> None:
    run_dir.write(Config(run=RunConfig(dir=str(run))), ByteTokenizer().to_json())


def write_metrics(run: Path) -> None:
    jsonl.JsonLines(run / "metrics.jsonl").rewind(1)


def append_metrics(run: Path) -> None:
    jsonl.JsonLines(run / "metrics.jsonl").write({"step": 1})


COSTS = Costs((1.0,), (1.0,), (0.0,), (0.0,), 0.0, (0.0, 0.0), (0.0, 0.0), False, 1e9, 0.0, "a device")

WRITERS: dict[str, Callable[[Path], object]] = {
    ".lock": take_lock,
    "config.yaml": write_configuration,
    "tokenizer.json": write_configuration,
    ".config.yaml.new": write_configuration,
    ".tokenizer.json.new": write_configuration,
    "metrics.jsonl": write_metrics,
    ".metrics.jsonl.new": write_metrics,
    "samples.txt": lambda run: files.write_atomic(run / "samples.txt", "text"),
    "loss.png": lambda run: plot.plot_loss([{"step": 1, "loss": 2.0}], run / "loss.png"),
    ".loss.png.new": lambda run: plot.plot_loss([{"step": 1, "loss": 2.0}], run / "loss.png"),
    "samples/000001.png": draw,
    "checkpoints/.probe": probe,
    "profile.json": lambda run: COSTS.save(run / "profile.json"),
    "evaluations/.step_4_1.json.PID": lambda run: evaluations.write(run, {"step": 4}),
    "evaluations/step_4_1.json": lambda run: evaluations.write(run, {"step": 4}),
    "checkpoints/seal.json": lambda run: manifest.write(run / "checkpoints", {}),
}
"""Every file that a run writes in its directory, by name, and what writes it."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for name in ("samples", "checkpoints", "evaluations"):
        (tmp_path / "run" / name).mkdir(parents=True)
    return tmp_path / "run"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Returns a file of somebody else, to which a link points."""
    path = tmp_path / "target"
    path.write_text(SECRET)
    return path


@pytest.mark.parametrize("kind", ["symbolic", "hard"])
@pytest.mark.parametrize("name", WRITERS)
def test_no_writer_follows_a_link(name, kind, run, target):
    """The link is refused or replaced; the file that it names keeps its content."""
    write = WRITERS[name]
    name = name.replace("PID", str(os.getpid()))  # not in the name of a test, which all processes of pytest share
    if kind == "symbolic":
        (run / name).symlink_to(target)
    else:
        (run / name).hardlink_to(target)
    refused = ""
    try:
        write(run)
    except ConfigError as error:
        refused = str(error)
    assert target.read_text() == SECRET
    assert refused or not (run / name).exists() or (run / name).read_bytes() != SECRET.encode() or "step_4" in name
    assert bool(refused) == (name == ".lock")
    if refused:
        assert refused.startswith(f"{run / name} is ")
        assert "Remove it; the run makes a new one." in refused


def test_the_log_is_not_appended_to_a_link(run, target):
    """Somebody may replace the file during the run."""
    (run / "metrics.jsonl").symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        append_metrics(run)
    assert target.read_text() == SECRET


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_lock_that_is_not_a_file_is_refused(make, tmp_path):
    make(tmp_path / ".lock")
    with pytest.raises(ConfigError, match=r"\.lock"):
        prepare(tmp_path)


def test_the_lock_file_is_made_with_the_usual_permissions(tmp_path):
    before = os.umask(0o022)
    try:
        prepare(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / ".lock").stat().st_mode) == 0o644


def test_the_id_of_a_sink_is_not_read_from_a_link(run, target, monkeypatch):
    """Its content would be sent to the service."""
    monkeypatch.setattr(sinks.importlib, "import_module", lambda _: None)
    (run / "wandb_id").symlink_to(target)
    with pytest.raises(ConfigError, match="wandb_id is not an id"):
        sinks.WeightsAndBiases(run, {}, 0)


def logged(run: Path) -> Path:
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    return run


@pytest.mark.parametrize("name", ["samples/1.png", "evaluations/step_1_1.json", "samples", "evaluations"])
def test_the_report_embeds_nothing_from_elsewhere(name, run, tmp_path):
    """A file or a folder that is a link is named, and its content is not on the page."""
    logged(run)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    evaluation = {"step": 1, "made": SECRET, "results": [{"task": SECRET, "metric": "m", "filter": "f", "value": 1.0}]}
    (folder / "1.png").write_bytes(PNG + SECRET.encode())
    (folder / "step_1_1.json").write_text(json.dumps(evaluation))
    if "/" in name:
        (run / name).symlink_to(folder / Path(name).name)
    else:
        (run / name).rmdir()
        (run / name).symlink_to(folder)
    (report,) = runs.read_runs([run])
    assert report.pictures == []
    assert report.evaluations == {}
    assert any("it is a link to a file outside of the run" in gap for gap in report.gaps)


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
def test_the_report_refuses_a_log_or_a_configuration_from_elsewhere(name, run, tmp_path):
    logged(run)
    (tmp_path / "elsewhere").write_text('{"step": 1, "loss": 2.0}\n' if name == "metrics.jsonl" else "password: 7\n")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is a link to a file outside of the run"):
        runs.read_runs([run])


def test_the_report_embeds_only_pictures(run, target):
    """Neither text that is named as a picture, nor a hard link to a file of somebody else."""
    logged(run)
    (run / "samples" / "1.png").write_bytes(PNG)
    (run / "samples" / "2.png").hardlink_to(target)
    (run / "samples" / "._3.png").write_bytes(PNG)
    (run / "samples" / "\u0664.png").write_bytes(PNG)
    (run / "samples" / "5.png").symlink_to(run / "samples" / "1.png")
    (report,) = runs.read_runs([run])
    assert [step for step, _ in report.pictures] == [1, 5], "a link within the run is a picture of the run"
    assert "samples/2.png is not shown: it is not a PNG file that can be read." in report.gaps
    assert SECRET not in page._drawn(report)


def test_a_lock_notices_that_the_directory_was_deleted(run):
    """It can be taken again, unless another process has taken it: then the run must not write there."""
    with run_dir.DirectoryLock(run) as lock:
        assert lock.is_intact()
        for remove in (shutil.rmtree, lambda path: (path / ".lock").unlink(), lambda path: path.rename(f"{path}.old")):
            remove(run)
            assert not lock.is_intact()
            lock.take_again()
            assert lock.is_intact()
            assert lock.last_holder is None
            with pytest.raises(ConfigError, match="in use by process"), run_dir.DirectoryLock(run):
                pass
        shutil.rmtree(run)
        run.mkdir()
        with run_dir.DirectoryLock(run):
            assert not lock.is_intact()
            with pytest.raises(ConfigError, match="in use by process"):
                lock.take_again()
        lock.take_again()
    assert (run / ".lock").read_text() == ""


@pytest.mark.parametrize("remains", [[], pytest.param(["checkpoints"], marks=pytest.mark.slow)])
def test_a_run_directory_that_is_deleted_during_the_run_is_written_again(remains, tmp_path, monkeypatch, capsys):
    """Its log has every step, and the run can be resumed."""
    run = tmp_path / "run"
    (tmp_path / "text.txt").write_text("".join(f"{i % 10} is {'even' if i % 2 == 0 else 'odd'};\n" for i in range(900)))
    argv = ["train", *harness.SMALL, f"--data.path={tmp_path / 'text.txt'}", f"--run.dir={run}", "--train.steps=4"]
    argv += ["--model.num_layers=1", "--train.eval_every=4", "--checkpoint.every=3"]
    to_global_batch = distributed.to_global_batch
    batches = []

    def delete(*args):
        batches.append(args)
        if len(batches) == 3:
            shutil.rmtree(run)
            for name in remains:
                (run / name).mkdir(parents=True)
        return to_global_batch(*args)

    monkeypatch.setattr(distributed, "to_global_batch", delete)
    before = signal.getsignal(signal.SIGTERM)
    execute(argv)
    assert signal.getsignal(signal.SIGTERM) == before
    assert f"run.dir={run} or its lock was deleted, moved or replaced during the run." in capsys.readouterr().out
    for name in ("config.yaml", "tokenizer.json", ".lock", "loss.png"):
        assert (run / name).is_file()
    assert [line["step"] for line in lines(run) if jsonl.is_step(line)] == [1, 2, 3, 4]
    assert [line["event"] for line in lines(run) if "event" in line] == ["directory written again", "finished"]
    assert manifest.complete_steps(run / "checkpoints") == [4, 3]
    if remains:
        execute([*argv, "--train.steps=5"])
        assert "resumed from step 4" in capsys.readouterr().out
