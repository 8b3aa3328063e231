"""Every command with hostile arguments: one line that says what is wrong and what to do, and never a traceback.

The cases are made from the commands' own arguments and from the keys of `Config`, so new ones are covered at once. They
run in this process, up to the point where a command would start JAX.
"""

import contextlib
import io
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
import typing
from pathlib import Path

import pytest

from jaxstack import train
from jaxstack.cli import parser, supervise
from jaxstack.common import errors, files
from jaxstack.config import ConfigError, resolve
from jaxstack.config.reading import parse
from jaxstack.runtime import platform, preemption
from jaxstack.sharding import mesh


class Started(BaseException):
    """Raised in place of starting JAX or a process: every argument was accepted."""


HOSTILE = {  # by what a key or an argument takes
    int: ("three", "1.5", "-1", "99999999999999999999", "9" * 5000, "", "[1]", "nan", "true"),
    float: ("much", "nan", "inf", "-1e999", "", "{a: 1}", "9" * 5000),
    bool: ("maybe", "2", "", "[true]"),
    str: ("", "x" * 300, "a/" * 3000, "a\nb", "\x1b[31m", "\u202e", "\udcff", "[", "null", "../../.."),
    tuple: ("x", "[[1]]", "[null]", "['(']", "[99999999999999999999]", "{}", "['a\0b']", "[nan]"),
}
"""Values of the wrong type, extreme ones, and text that YAML, a terminal or a file system may take amiss."""

TEXTS = {
    "empty": b"",
    "latin1": "h\xe9llo".encode("latin1"),
    "utf16": "run: {dir: x}".encode("utf16"),
    "zeros": b"\0" * 16,
    "binary": bytes(range(256)),
    "list": b"[1]",
    "number": b"3",
    "null": b"null",
    "object": b"{}",
    "deep": b"[" * 3000,
    "unknown": b"nothing: {like: it}",
    "recursive": b"run: &a {dir: *a}\nmodel: &b {moe: *b}",
    "keys": b"? [1]\n: 2",
    "nan": b"optim: {lr: .nan}",
    "controls": b'run: {dir: "a\\0b"}',
}
"""Contents of files, each of which is put under every name that a command reads."""

NAMES = (
    "config.yaml", "tokenizer.json", "config.json", "metrics.jsonl", "model.safetensors", "x.json", "x.bin",
    "x.starts.npy", "checkpoints/5/manifest.json",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Hostile files and folders; the tests run there."""
    root = tmp_path_factory.mktemp("hostile")
    (root / "text.txt").write_text("hello world " * 100)
    (root / "run").mkdir()
    (root / "run" / "config.yaml").write_text("run: {dir: run}")
    (root / "run" / "tokenizer.json").write_text('{"kind": "bytes"}')
    os.mkfifo(root / "fifo")
    for name, content in TEXTS.items():
        (root / f"{name}.yaml").write_bytes(content)
        for file in NAMES:
            path = root / f"folder_of_{name}" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    for file in NAMES:
        (root / "folder_of_folders" / file).mkdir(parents=True)
    (root / "folder_of_fifo").mkdir()
    os.mkfifo(root / "folder_of_fifo" / "text.txt")
    (root / "no_checkpoint").mkdir()
    (root / "no_checkpoint" / "config.yaml").write_text("run: {init_from: no_checkpoint}")
    (root / "no_checkpoint" / "tokenizer.json").write_text('{"kind": "bytes"}')
    return root


@pytest.fixture
def say(folder, monkeypatch):
    """Returns a function that runs a command line, and returns what is wrong with how it ended, or nothing."""

    def start(*_, **__):
        raise Started

    monkeypatch.chdir(folder)
    monkeypatch.setattr(platform, "configure", start)
    monkeypatch.setattr(mesh, "find_devices", start)
    monkeypatch.setattr(supervise.Supervisor, "run", start)

    def said(*words, named=()):
        out, err = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                monkeypatch.setattr("sys.stdin", io.StringIO("\udcff"))
                parser.run("jaxstack", words)
        except Started:
            return ""
        except SystemExit as end:
            return complaint(end.code, err.getvalue(), named)
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return said


def complaint(code, text, named):
    """What is wrong with an error: its exit code or its line."""
    lines = text.removesuffix("\n").split("\n")
    line = " ".join(lines)
    if code in (0, None):
        return ""
    if code != errors.Exit.USER_ERROR:
        return f"exit code {code}: {line}"
    if not line.isprintable() or len(line) > 1500 or len(lines) > 2:
        return f"not two short lines: {text[:200]!r}"
    said = re.sub(r"^jaxstack [a-z ]*: error: ", "", line)
    if not re.search(r"[^.]\S*[.?] [`A-Z-]", said) or said[-1] not in ".?":
        return f"not two sentences: {said}"
    if absent := [word for word in named if word not in said]:
        return f"does not name {absent}: {said}"
    return ""


def kind_of(hint):
    """The class of the values of a type: of `int | None`, `Annotated[int, ...]` or a choice of words."""
    if typing.get_origin(hint) is typing.Literal:
        return str
    if hint in HOSTILE:
        return hint
    if typing.get_origin(hint) is tuple:
        return tuple
    return next((kind for part in typing.get_args(hint) if (kind := kind_of(part))), None)


def own_arguments(command):
    """The arguments of a command that are not keys of a configuration."""
    actions = parser.parser_of(command)._actions
    return [a for a in actions if "." not in a.dest and a.dest not in ("help", "print_config", *parse.GROUPS)]


def with_hostile(command, action, value):
    """A command line with a hostile value of one argument, and good ones of the others that it needs."""
    words = command.split()
    for other in own_arguments(command):
        if not other.option_strings and other is not action:
            words.append(GOOD.get(other.dest, "nowhere"))
        elif other.dest in FLAGS.get(command, {}) and other is not action:
            words.append(f"--{other.dest}={FLAGS[command][other.dest]}")
        elif other is action:
            words.append(f"{action.option_strings[-1]}={value}" if action.option_strings else value)
    return words


GOOD = {
    "run": "run", "runs": "run", "prompts": "x", "shell": "bash", "schedule": "1f1b", "out": "new", "file": "x",
    "training": "train",
}  # fmt: skip
"""A value of each positional, while another argument is hostile."""
FLAGS = {"plan": {"target": "v5e:2x2"}, "profile": {"out": "new"}, "launch": {"on": "slurm"}}


@pytest.mark.matrix(quick=["[train]", "[optim]"])
@pytest.mark.parametrize("group", parse.GROUPS)
def test_no_value_of_a_key_prints_a_traceback(group, say, monkeypatch):
    """The message names the key. Each key gets two values in turn; keys of one type get all of them together."""
    monkeypatch.setattr(train, "main", lambda cfg, *_: resolve(cfg, 256))
    wrong, actions = {}, [a for a in parser.parser_of("train")._actions if a.dest.startswith(f"{group}.")]
    for i, action in enumerate(actions):
        values = HOSTILE[kind_of(getattr(action, "_typehint", None)) or str]
        for value in [values[(2 * i + j) % len(values)] for j in range(2)]:
            if complained := say("train", f"--{action.dest}={value}", named=[action.dest.rpartition(".")[2]]):
                wrong[action.dest, value[:20]] = complained
    assert actions
    assert not wrong


@pytest.mark.matrix(quick=["[train]", "[generate]", "[chat]", "[export]", "[data build]"])
@pytest.mark.parametrize("command", parser.COMMANDS)
def test_no_argument_of_a_command_prints_a_traceback(command, say, folder):
    wrong = {}
    paths = [
        *HOSTILE[str],
        "text.txt",
        "fifo",
        *(p.name for p in sorted(folder.glob("*_*"))),
        "text.txt/below",
        "/dev/null",
    ]
    # Reading the keys of a run takes long: each argument then gets a few of the values, and the next one others.
    reads_keys = command == "launch" or "--config" in parser.parser_of(command)._option_string_actions
    for i, action in enumerate(own_arguments(command)):
        kind = kind_of(getattr(action, "_typehint", None) or action.type)
        values = paths if kind in (None, str) else HOSTILE[kind]
        every = len(values) // 3 if reads_keys else 1
        for value in values[i % every :: every]:
            if complained := say(*with_hostile(command, action, value)):
                wrong[action.dest, value[:30]] = complained
    assert not wrong


@pytest.mark.parametrize("name", TEXTS)
def test_no_file_of_a_configuration_prints_a_traceback(name, say):
    assert not say("train", f"--config={name}.yaml")


@pytest.mark.parametrize("source", ["path", "tokens", "chat"])
def test_no_data_prints_a_traceback(source, say, folder):
    wrong = {}
    for i, path in enumerate(["fifo", *sorted(p.name for p in folder.iterdir())]):
        for name in ("", "x.json", "config.yaml", "text.txt"):
            where = str(Path(path, name))
            if os.path.exists(where) or not name:
                complained = say(
                    "data", "build", f"new_{source}_{i}_{name}", f"--data.source={source}", f"--data.path={where}"
                )
                wrong |= {where: complained} if complained else {}
    assert not wrong


# Interrupts.


def interrupted_process(code):
    """Runs Python code in a terminal of its own; returns the exit code, and all that the terminal shows."""
    (ours, theirs), env = pty.openpty(), os.environ | {"TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen([sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the terminal is closed at the end of the process
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    return process.wait(), shown.decode()


AT_IMPORT = """
import os, signal, sys, time
class Interrupts:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
sys.meta_path.insert(0, Interrupts())
from jaxstack.__main__ import main
main("jaxstack", ["train"])
"""


@pytest.mark.parametrize("module", ["difflib", "jsonargparse"])
def test_an_interrupt_during_the_imports_prints_no_traceback(module):
    """Before the command's own handler is there, the signal ends the process, which a shell reports as 130 too."""
    code, shown = interrupted_process(AT_IMPORT.format(module=module))
    assert code in ((-signal.SIGINT,) if module == "difflib" else (errors.Exit.INTERRUPTED,))
    assert "Traceback" not in shown
    if code > 0:
        assert shown.splitlines()[1:2] == [
            "jaxstack train: interrupted. Run the same command to start or resume the run."
        ]


def test_the_prompt_has_a_line_of_its_own_after_the_second_interrupt():
    """A progress bar is live, whose cursor is hidden at the end of the bar's line."""
    code, shown = interrupted_process(
        "import os, signal, time\nfrom jaxstack.runtime import preemption\n"
        "from jaxstack.tracking.console import Console\n"
        "with preemption.catch_stop_signals() as request:\n"
        "    console = Console(10)\n    console.start(0)\n    console.show_step(1, 2.5)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    while request.signal is None: time.sleep(0.01)\n"
        "    time.sleep(0.3)\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(30)\n"
    )
    assert code == errors.Exit.INTERRUPTED
    assert "stopping after this step; interrupt again to exit now" in shown
    # The bar's own thread may draw it once more before the process ends.
    assert "\r\nexiting now; committed checkpoints are intact\r\n\x1b[?25h" in shown


@pytest.mark.parametrize("handled", [False, True])
def test_an_interrupt_removes_what_is_half_written(handled, tmp_path, monkeypatch):
    """Nothing can swallow it, as a callback of JAX would a `KeyboardInterrupt`; a handler of other code counts more."""
    ended = threading.Event()
    monkeypatch.setattr(preemption, "_exit", lambda message: ended.set())
    with preemption.exit_at_interrupt("interrupted"), files.scratch_folder(tmp_path / "out") as folder:
        (folder / "half").touch()
        if handled:
            signal.signal(signal.SIGINT, lambda *_: None)
        os.kill(os.getpid(), signal.SIGINT)
        assert ended.wait(0.2 if handled else 10) is not handled
        assert folder.exists() is handled
    assert not [*tmp_path.iterdir()]


def test_a_process_in_the_background_of_a_script_ignores_interrupts():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with preemption.exit_at_interrupt("interrupted"):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_of_a_prompt_does_not_end_the_command(monkeypatch):
    """The command continues at once with its handler gone, long before a thread can ask for it."""
    ended = threading.Event()
    monkeypatch.setattr(preemption, "_exit", lambda message: ended.set())

    def wait_for_user():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)

    with preemption.exit_at_interrupt("interrupted"):
        for _ in range(20):
            with pytest.raises(KeyboardInterrupt), preemption.handle_interrupts(signal.default_int_handler):
                wait_for_user()
        assert not ended.wait(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        assert ended.wait(10), "the thread listens again"


@pytest.mark.parametrize("name", ["sft_quickstart", "dpo_quickstart", "grpo_quickstart", "speedrun/dpo"])
def test_a_configuration_whose_step_before_is_missing_names_the_first_command(tmp_path, monkeypatch, name):
    """It is the line `# First: ...` of the file. A file of the user has none, and then nothing is added."""
    from jaxstack.cli import train
    from jaxstack.cli.parser import read_arguments
    from jaxstack.config.reading.shipped import shipped

    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        train.main(read_arguments(["train", "--config", name]))
    (line,) = (line for line in shipped()[name].read_text().splitlines() if line.startswith("# First: "))
    assert error.value.advice == line.removeprefix("# ")
    (tmp_path / "mine.yaml").write_text("data: {source: chat, path: none.jsonl}\n")
    with pytest.raises(ConfigError) as error:
        train.main(read_arguments(["train", "--config=mine.yaml"]))
    assert error.value.advice == ""
