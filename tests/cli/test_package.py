"""What is installed: the command `jaxstack`, the configurations that come with it, and a wheel that trains anywhere."""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

import jaxstack
from jaxstack.cli import parser, supervise
from jaxstack.cli.parser import COMMANDS
from jaxstack.common import errors
from jaxstack.common.counts import plural
from jaxstack.config import ConfigError
from jaxstack.config.reading import parse

ROOT = Path(__file__).parents[2]


def jaxstack_(*argv: str, code: int = 0) -> tuple[str, str]:
    """Starts a process, which costs seconds; `parser.run` in this one is the same but for the start."""
    done = subprocess.run([sys.executable, "-m", "jaxstack", *argv], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


def test_help_of_every_command_comes_without_jax():
    """In one process, so that no command's help can hide behind another's start."""
    code = (
        "import sys\nfrom jaxstack.cli.parser import COMMANDS, run\n"
        "for name in ['', *COMMANDS]:\n"
        "    print('---', name)\n"
        "    try: run('jaxstack', [*name.split(), '--help'])\n"
        "    except SystemExit as end: assert not end.code, name\n"
        "    assert 'jax' not in sys.modules, name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name, text in (part.split("\n", 1) for part in done.stdout.split("--- ")[1:]):
        assert text.startswith(f"usage: jaxstack {name or 'COMMAND'} "), name


def test_the_overview_lists_every_command_in_its_group():
    text = jaxstack_("--help")[0]
    assert text == jaxstack_()[0]
    for name, command in COMMANDS.items():
        assert f"\n  {name} " in "\n" + text.split(f"\n{command.group}:\n")[1].split("\n\n")[0]
        assert command.summary in text


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_enough_ends_a_command_quietly(unbuffered):
    """As in `jaxstack | head`; Python keeps short output until it ends, unless `PYTHONUNBUFFERED` is set."""
    read, write = os.pipe()
    os.close(read)
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    words = [sys.executable, "-m", "jaxstack"]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, env=env, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


def test_every_command_exists():
    for command in COMMANDS.values():
        assert (ROOT / "jaxstack" / "cli" / f"{command.module}.py").is_file()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["trian"], ["unknown command trian. Did you mean train?"]),
        (["hlep"], ["unknown command hlep. Did you mean help?"]),
        (["plan", "memroy", "--target=h100:8"], ["unknown command plan memroy. Did you mean plan memory?"]),
        (
            ["--target=h100:8", "plan"],
            ["--target=h100:8 comes before the command. Write the command first: `jaxstack plan --target=h100:8`."],
        ),
        (
            ["plan", "serve", "--target=h100:8", "--batch=1,64"],
            ["--batch=1,64 is not valid. Use a list of integers, such as [1,64]."],
        ),
        (
            ["train", "--mesh.pipe=3", "--mesh.data=1", "--model.num_layers=6"],
            ["mesh.pipe=3 x mesh.fsdp=1 x mesh.expert=1 does not divide model.d_model=128, by which the embedding is"],
        ),
        (["train", "--model.num_layer=3"], ["Did you mean model.num_layers?"]),
        (["train", "--config=nowhere"], ["--config=nowhere is not a file", "qwen3_0.6b"]),
        (["train", "--model.num_layers=x"], ["model.num_layers=x is not valid. Use an integer >= 1."]),
        (["train", "--nothing.like.it=1"], ["`jaxstack train --help.all` lists every key"]),
        (["train", "quickstart"], ["unknown argument quickstart. Did you mean --config quickstart?"]),
        (["train", "--model.num_layers"], ["--model.num_layers has no value"]),
        (["data shwo"], ["unknown command data shwo. Did you mean data show?"]),
        (["schedule", "1f1b", "--stages=0"], ["--stages=0 is out of range. Use 1 or more; the default is 4."]),
        (["completion", "csh"], ["SHELL=csh is not valid. Use one of bash, zsh, fish."]),
        (["generate", "nowhere", "x"], ["nowhere is not a run"]),
        (["generate", "RUN", "--prompts", "x"], ["Write x without it, as in `jaxstack generate RUN PROMPT`."]),
        (["report", "--run=x"], ["--run is not a flag. Write x without it, as in `jaxstack report RUN`."]),
        (["report", "nowhere"], ["nowhere is not a directory"]),
        (["export", "nowhere", "out"], ["nowhere is not a run"]),
        (["data", "show", "nowhere"], [": nowhere does not exist"]),
        (["data", "verify", "nowhere.bin"], [": nowhere.bin does not exist"]),
        (["schedule", "1f2b"], ["SCHEDULE=1f2b is not valid. Did you mean 1f1b?"]),
        (["schedule", "x"], ["SCHEDULE=x is not valid. Use one of gpipe, 1f1b, "]),
        (
            ["supervise", "python", "-c", "1"],
            ["not behind --. Write `jaxstack supervise [options] -- jaxstack train ..."],
        ),
        (["train", "--model.num_layers="], ["model.num_layers has no value. Use an integer >= 1."]),
        (
            ["train", "--config=/dev/stdin"],
            ["--config=/dev/stdin is not a regular file, and it is read twice. Save it"],
        ),
        (["plan"], ["--target is missing"]),
        (["profile"], ["--out is missing"]),
        (
            ["supervise", "--", "ls"],
            ["the command `ls` does not train", "own script, name its run.dir with --run_dir=DIR"],
        ),
        (["supervise", "--shrink", "--run_dir=x", "--", "ls"], ["--shrink changes the mesh of `jaxstack train`"]),
    ],
)
def test_a_mistake_is_two_lines_by_the_name_of_the_command(argv, words, capsys):
    with pytest.raises(SystemExit) as end:
        parser.run("jaxstack", argv)
    assert end.value.code == errors.Exit.USER_ERROR
    err = capsys.readouterr().err
    assert err.count("\n") <= 2, err
    names = (" ".join(argv[:2]), argv[0])
    command = names[0] if argv[0] == "data" else next((name for name in names if name in COMMANDS), "")
    assert err.startswith(f"jaxstack {command}: error: " if command else "jaxstack: error: ")
    for word in words:
        assert word in err.replace("\n", " ")


@pytest.mark.parametrize(
    ("file", "advice"), [("config.yaml", "use --run.dir="), ("config.json", "make a run of it: `jaxstack import ")]
)
def test_a_folder_in_place_of_a_flag(tmp_path, file, advice):
    (tmp_path / file).write_text("{}")
    with pytest.raises(ConfigError, match=rf"unknown argument {tmp_path}\. .*{advice}{tmp_path}"):
        parse.parse_config([str(tmp_path)])


@pytest.mark.parametrize("tag", ["!!python/name:os.system", "!mine 3"])
def test_a_tag_without_a_value_is_named_with_its_file(tmp_path, tag):
    (tmp_path / "a.yaml").write_text(f"model:\n  num_layers: {tag}\n")
    with pytest.raises(ConfigError, match=r"a\.yaml, line 2 is not YAML \(could not determine a constructor"):
        parse.parse_config([f"--config={tmp_path / 'a.yaml'}"])


def test_there_is_one_version():
    assert jaxstack_("--version")[0] == f"jaxstack {jaxstack.__version__}\n"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["version"]["path"] == "jaxstack/common/version.py"
    assert f"## {jaxstack.__version__}" in (ROOT / "docs" / "changelog.md").read_text()


def test_a_configuration_goes_by_its_path_or_by_its_name(tmp_path, monkeypatch):
    assert sorted(parse.shipped().values()) == sorted((ROOT / "configs").rglob("*.yaml"))
    assert len({path.stem for path in parse.shipped().values()}) == len(parse.shipped()), "a name means one file"
    assert parse.parse_config([]) == parse.parse_config([f"--config={ROOT / 'configs' / 'quickstart.yaml'}"])
    assert parse.parse_config(["--config", "qwen3_0.6b"]).model.d_model == 1024
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").write_text("model: {d_model: 8}")
    assert parse.parse_config(["--config=quickstart"]).model.d_model == 8, "a file that is there is what was meant"
    with pytest.raises(ConfigError, match=r"configs/gpt2.yaml is not a file\. Did you mean --config gpt2\?"):
        parse.parse_config(["--config=configs/gpt2.yaml"])


@pytest.mark.parametrize(
    "command",
    [
        ["jaxstack", "train"],
        ["/v/bin/jaxstack", "train"],
        ["python", "-m", "jaxstack", "train"],
        ["python", "train.py"],
    ],
)
def test_the_supervisor_knows_every_way_to_train(command):
    assert supervise.training_config([*command, "--run.dir=x"]).run.dir == "x"


def test_the_supervisor_restarts_a_script_of_your_own(tmp_path, monkeypatch, capfd):
    """It acts on the script's exit code and on its run directory."""
    script = tmp_path / "my_train.py"
    script.write_text(
        """
import pathlib, sys
starts = pathlib.Path(sys.argv[1])
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
sys.exit(int(sys.argv[2 + len(starts.read_text()) - 1]))
"""
    )
    monkeypatch.setattr(supervise.signal, "signal", lambda *_: None)
    for name, codes, starts, end in (("a", "7 7 0", 3, 0), ("b", "7 2 0", 2, 2), ("c", "7 7 7 0", 3, 7)):
        words = ["--tries=3", "--wait_s=0", f"--run_dir={tmp_path / 'run'}", "--", sys.executable, str(script)]
        with pytest.raises(SystemExit) as ended:
            parser.run("jaxstack", ["supervise", *words, str(tmp_path / name), *codes.split()])
        assert (len((tmp_path / name).read_text()), ended.value.code) == (starts, end)
    assert "Gave up after 3 tries without a new checkpoint" in capfd.readouterr().err


def test_a_try_that_saved_a_checkpoint_does_not_count(monkeypatch, capfd):
    """The newest step is 0 before the first try, and then the step of each try."""
    monkeypatch.setattr(supervise.signal, "signal", lambda *_: None)
    for tries, steps in ((1, [0, 5, 7, 7]), (3, [0, 5, 5, 5, 5]), (2, [0, 0, 5, 5, 9, 9, 9])):
        newest = iter(steps)
        starts = []

        def start(starts=starts):
            starts.append(subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(7)"]))
            return starts[-1]

        supervisor = supervise.Supervisor(newest.__next__, lambda: 0, tries, 0.0)
        assert supervisor.run(start) == 7
        assert len(starts) == len(steps) - 1
        assert f"Gave up after {plural(tries, 'try')} without a new checkpoint" in capfd.readouterr().err


def test_bash_completes(tmp_path, capsys):
    """Words are as bash splits them: `=` is a word."""
    parser.run("jaxstack", ["completion", "bash"])
    (tmp_path / "completion").write_text(capsys.readouterr().out)
    for words, found in (
        (["tr"], "train"),
        (["train", "--model.num_l"], "--model.num_layers"),
        (["train", "--model.norm", "=", "r"], "rms"),
        (["train", "--config", "shakespeare_"], "shakespeare_cpu"),
        (["plan", "ro"], "roofline"),
        (["help", "opt"], "optim"),
        (["plan", "roofline", "--traffic", ""], "fused unfused"),
        (["data", ""], "tokenizer clean build verify show"),
        (["generate", "RUN", "--sample.rep"], "--sample.repetition_penalty"),
    ):
        code = (
            f"source {tmp_path / 'completion'}\n"
            "complete -p jaxstack >/dev/null || exit 1\n"
            f"COMP_WORDS=({shlex.join(['jaxstack', *words])})\nCOMP_CWORD={len(words)}\n"
            '_jaxstack\necho "${COMPREPLY[*]}"'
        )
        done = subprocess.run(["bash", "--norc", "-c", code], capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == (f"{found}\n", ""), words


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_every_command_and_key(shell, capsys):
    parser.run("jaxstack", ["completion", shell])
    script = capsys.readouterr().out
    for word in ("supervise", "roofline", "model.moe.num_experts", "sample.beams", "quickstart"):
        assert word in script
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=script, text=True, check=True)


@pytest.mark.slow
def test_a_wheel_trains_from_any_folder(tmp_path):
    """Built, installed into an environment of its own, and run from an empty folder.

    Its dependencies are read from where the tests' own are, to save the minute of copying them: that those which are
    declared suffice is what the README's commands show in `.ci/run`.
    """
    wheels, folder = tmp_path / "wheels", tmp_path / "folder"
    folder.mkdir()
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(wheels), str(ROOT)], check=True)
    (wheel,) = wheels.iterdir()
    assert wheel.name.startswith(f"jaxstack-{jaxstack.__version__}-")
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", str(wheel)], check=True)
    own, ours = (sysconfig.get_path("purelib", vars={"base": str(base)}) for base in (tmp_path / "venv", sys.prefix))
    Path(own, "dependencies.pth").write_text(ours)

    def run(*words: str) -> str:
        env = {k: v for k, v in os.environ.items() if k not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "PYTHONPATH")}
        done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    command = str(python.with_name("jaxstack"))
    small = ["--train.steps=3", "--model.num_layers=1", "--data.batch_size=4", "--train.eval_steps=1"]
    assert "3 of 3" in run(command, "train", *small, "--train.ngram_baseline=false", "--sample.prompts=[]")
    assert (folder / "runs" / "quickstart" / "metrics.jsonl").is_file()
    code = "from jaxstack.config.reading import parse\nfor name in parse.shipped():\n"
    code += " parse.parse_config([f'--config={name}']); print(name)"
    assert run(str(python), "-c", code).split() == [*parse.shipped()]
    assert Path(run(str(python), "-c", "import jaxstack; print(jaxstack.__path__[0])").strip()).is_relative_to(tmp_path)
