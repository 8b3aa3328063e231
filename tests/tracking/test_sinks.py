"""TensorBoard and Weights & Biases get exactly the records of metrics.jsonl."""

import os
import re
import struct
import subprocess
import sys
import types
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from lines import lines
from test_train import SMALL, run

from jaxstack.config import Config, ConfigError, RunConfig
from jaxstack.config.reading import parse
from jaxstack.tracking import jsonl, sinks

RECORDS = [
    {"step": 1, "loss": 5.5, "mfu": None, "time": 7.0, "seconds": {"start": 2.0, "step": 0.5}},
    {"step": 2, "event": "spike", "loss": 9.0, "grad_norm": None, "batch": "step 1: text"},
    {"step": 2, "loss": 9.0},
    {"step": 2, "eval_loss": 4.0},
]


def begin(others: sinks.Sinks, run_dir: Path, name: str, start: int = 0) -> None:
    """Opens a sink for a run in a folder."""
    others.open((name,), run_dir, asdict(Config()), start)


def events(directory: Path) -> list:
    """Returns everything in the event files of a directory, in the order of their names, as TensorBoard reads them."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    found = []
    for path in sorted(directory.glob("events.*")):
        content = path.read_bytes()
        while content:  # each: a length, its checksum, that many bytes, their checksum
            (length,) = struct.unpack("<Q", content[:8])
            found.append(event_pb2.Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
    return found


def curve(found: list, tag: str) -> dict[int, float]:
    """Returns values by step as TensorBoard shows them. A file that begins at a step hides earlier values from there
    on."""
    values: dict[int, float] = {}
    for event in found:
        if event.session_log.status == event.session_log.START:
            values = {step: value for step, value in values.items() if step < event.step}
        for value in event.summary.value:
            if value.tag == tag:
                values[event.step] = value.simple_value
    return values


def test_tensorboard_has_every_line_and_forgets_what_is_run_again(tmp_path):
    with sinks.Sinks() as others:
        begin(others, tmp_path, "tensorboard")
        log = jsonl.JsonLines(tmp_path / "metrics.jsonl", others)
        for record in RECORDS:
            log.write(record)
        log.rewind(1)
        log.write({"step": 1, "event": "rolled back", "spike": 2})
    found = events(tmp_path / "tensorboard")
    assert curve(found, "loss") == {1: 5.5}
    assert curve(found, "seconds/step") == {1: 0.5}
    assert not curve(found, "eval_loss"), "it was after the step to which the run went back"
    texts = [
        value.tensor.string_val[0] for e in found for value in e.summary.value if value.tag.startswith("event/text")
    ]
    assert texts == [b"spike; step 1: text", b"rolled back"]
    with sinks.Sinks() as others:
        begin(others, tmp_path, "tensorboard", 1)
        others.write({"step": 2, "loss": 3.0})
    assert curve(events(tmp_path / "tensorboard"), "loss") == {1: 5.5, 2: 3.0}


@pytest.mark.slow
def test_tensorboard_of_a_run(tmp_path):
    (tmp_path / "text").write_text("abc def ghi\n" * 400)
    argv = [*SMALL, f"--data.path={tmp_path / 'text'}", f"--run.dir={tmp_path / 'run'}", "--run.sinks=[tensorboard]"]
    run(*argv, "--train.steps=4")
    found = events(tmp_path / "run" / "tensorboard")
    for name in ("loss", "eval_loss", "step_time_s"):
        written = {line["step"]: line[name] for line in lines(tmp_path / "run") if line.get(name) is not None}
        # Event files hold float32.
        assert curve(found, name) == pytest.approx(written, rel=1e-6)
        assert written


class Wandb(types.ModuleType):
    """The part of the package that jaxstack uses."""

    Error = type("Error", (Exception,), {})

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: list[dict] = []
        self.logged: list[dict] = []
        self.ended: list[int] = []

    def Settings(self, **settings):
        return settings

    def init(self, **how):
        self.begun.append(how)
        return types.SimpleNamespace(
            define_metric=lambda *_, **__: None,
            log=self.logged.append,
            finish=lambda exit_code: self.ended.append(exit_code),
        )


def test_weights_and_biases_has_every_line_and_one_run(tmp_path, monkeypatch):
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for record in RECORDS[:2], RECORDS[2:]:
        with sinks.Sinks() as others:
            begin(others, tmp_path, "wandb")
            for line in record:
                others.write(line)
    others = sinks.Sinks()
    begin(others, tmp_path, "wandb")
    others.__exit__(KeyError)
    assert len({how["id"] for how in wandb.begun}) == 1
    assert all(how["resume"] == "allow" and how["dir"] == str(tmp_path) for how in wandb.begun)
    assert wandb.begun[0]["config"]["model"]["num_layers"] == Config().model.num_layers
    assert wandb.ended == [0, 0, 1]
    assert wandb.logged == [
        {"step": 1, "loss": 5.5, "time": 7.0, "seconds/start": 2.0, "seconds/step": 0.5},
        {"step": 2, "event/loss": 9.0, "event": "spike; step 1: text"},
        {"step": 2, "loss": 9.0},
        {"step": 2, "eval_loss": 4.0},
    ]
    wandb.init = lambda **_: (_ for _ in ()).throw(Wandb.Error("no API key\nmore"))
    with pytest.raises(ConfigError, match=r"run.sinks=\[wandb\] cannot be used: no API key"):
        begin(sinks.Sinks(), tmp_path, "wandb")
    wandb.init = lambda **_: (_ for _ in ()).throw(ValueError("1 error\nmode\n  input_value=''"))  # WANDB_MODE=
    with pytest.raises(ConfigError, match=r"cannot be used: 1 error mode input_value=''\. .* set WANDB_MODE=offline"):
        begin(sinks.Sinks(), tmp_path, "wandb")


def test_trackio_has_every_line_and_one_run(tmp_path, monkeypatch):
    begun, logged, ended = [], [], []
    log = types.SimpleNamespace(
        log=lambda metrics, step: logged.append((step, metrics)), finish=lambda: ended.append(1)
    )
    trackio = types.ModuleType("trackio")
    trackio.init = lambda **how: begun.append(how) or log
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    for record in RECORDS[:2], RECORDS[2:]:
        with sinks.Sinks() as others:
            begin(others, tmp_path, "trackio")
            for line in record:
                others.write(line)
    assert len({how["name"] for how in begun}) == 1
    assert begun[0]["name"].startswith(f"{tmp_path.name}-")
    assert all(how["resume"] == "allow" and how["project"] == "jaxstack" for how in begun)
    assert begun[0]["config"]["model"]["num_layers"] == Config().model.num_layers
    assert ended == [1, 1]
    assert logged == [
        (1, {"step": 1, "loss": 5.5, "time": 7.0, "seconds/start": 2.0, "seconds/step": 0.5}),
        (2, {"step": 2, "event/loss": 9.0, "event": "spike; step 1: text"}),
        (2, {"step": 2, "loss": 9.0}),
        (2, {"step": 2, "eval_loss": 4.0}),
    ]
    trackio.init = lambda **_: (_ for _ in ()).throw(ConnectionError("no such space\nmore"))
    with pytest.raises(
        ConfigError, match=r"run.sinks=\[trackio\] cannot be used: no such space. Unset TRACKIO_SPACE_ID"
    ):
        begin(sinks.Sinks(), tmp_path, "trackio")


@pytest.mark.slow
def test_trackio_on_this_machine(tmp_path):
    """With the real package, two processes log to one run, which its own reader shows."""
    pytest.importorskip("trackio", reason="needs the extra [trackio]")
    code = (
        "import sys; from pathlib import Path; from jaxstack.tracking import sinks; import test_sinks as t\n"
        "with sinks.Sinks() as others:\n"
        "    t.begin(others, Path(sys.argv[1]), 'trackio')\n"
        "    [others.write(line) for line in t.RECORDS if line['step'] == int(sys.argv[2])]\n"
    )
    places = [str(Path(__file__).parent), *sys.path]
    env = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": os.pathsep.join(places)}
    for step in ("1", "2"):
        subprocess.run([sys.executable, "-c", code, str(tmp_path), step], env=env, check=True)
    show = [sys.executable, "-m", "trackio.cli", "list", "runs", "--project", "jaxstack", "--json"]
    shown = subprocess.run(show, env=env, check=True, capture_output=True, text=True).stdout
    name = f"{tmp_path.name}-{(tmp_path / 'trackio_id').read_text()}"
    assert {*re.findall(rf"{re.escape(tmp_path.name)}-\w+", shown)} == {name}


@pytest.mark.parametrize("name", sinks.PACKAGES)
def test_a_package_that_is_missing_is_named_with_its_extra(name, monkeypatch):
    monkeypatch.setitem(sinks.PACKAGES, name, "no_such_package")
    with pytest.raises(ConfigError, match=rf"no_such_package is not installed. Run pip install 'jaxstack\[{name}\]'"):
        sinks.require_packages([name])


def test_none_is_the_default_and_nothing_else_passes():
    assert parse.parse_config([]).run.sinks == ()
    cfg = parse.parse_config(["--run.sinks=[tensorboard,wandb]"])
    assert cfg.run.sinks == ("tensorboard", "wandb")
    assert replace(cfg, run=RunConfig()).run.sinks == ()
    with pytest.raises(ConfigError, match=r"run.sinks"):
        parse.parse_config(["--run.sinks=[mlflow]"])


@pytest.mark.matrix
def test_weights_and_biases_offline(tmp_path, monkeypatch):
    """With the real package, a resumed run continues the same W&B run."""
    pytest.importorskip("wandb")
    monkeypatch.setitem(os.environ, "WANDB_MODE", "offline")
    (tmp_path / "text").write_text("abc def ghi\n" * 400)
    argv = [*SMALL, f"--data.path={tmp_path / 'text'}", f"--run.dir={tmp_path / 'run'}", "--run.sinks=[wandb]"]
    for steps in (4, 6):
        run(*argv, f"--train.steps={steps}")
    name = (tmp_path / "run" / "wandb_id").read_text()
    parts = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))
    assert len(parts) == 2
    assert all(b"eval_loss" in part.read_bytes() for part in parts)
