"""Checks the documents: every command parses, and is run or has a reason; outputs, tables, names of files and tests.

A new command is found without a change here. It fails until it parses, and until `RUN` or `NOT_RUN` has its pattern.
"""

import ast
import functools
import json
import os
import pkgutil
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from jaxstack.cli import parser
from jaxstack.config import Config, ConfigError, DistributedConfig, resolve
from jaxstack.config.reading import parse

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
QUICKSTART = Path("configs/quickstart.yaml")

PROGRAMS = ("$", "curl", "docker", "gcloud", "jaxstack", "kubectl", "mkdocs", "pip", "pytest", "python", "sbatch", "uv")
OUTPUT = ("device ", "health ", "pipeline ", "{", "<|user|>")  # how blocks begin that are not commands


@functools.cache  # each pattern of a table asks for them
def _words(line: str) -> tuple[str, ...]:
    words = shlex.split(line, comments=True)
    if words[:2] == ["python", "train.py"]:
        return ("train", *words[2:])
    return tuple(words[1:] if words[0] == "jaxstack" else words)


class Command(NamedTuple):
    """A command of a page; `output` holds the lines that the page shows below it."""

    page: str
    line: str
    output: tuple[str, ...] = ()

    @property
    def mistake(self) -> str:
        """Returns the error that the page shows, or an empty string."""
        return " ".join(self.output).partition(": error: ")[2]

    @property
    def words(self) -> list[str]:
        """Returns the words after `jaxstack` for a command of ours, else all words."""
        return list(_words(self.line))

    @property
    def text(self) -> str:
        """What patterns match."""
        return shlex.join(self.words)


def commands() -> list[Command]:
    """Returns the commands of every block without a language or with that of a shell."""
    found: dict[str, Command] = {}
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        for language, text in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
            if language not in ("", "sh", "bash", "shell", "console") or text.startswith(OUTPUT):
                continue
            lines = text.replace("\\\n", " ").splitlines()
            assert lines[0].startswith(PROGRAMS), f"{name}: is this a command? {lines[0]}"
            shown = lines[0].startswith("$ ")
            for i, line in enumerate(lines):
                if shown and not line.startswith("$ "):
                    continue
                below = tuple(takewhile(lambda line: not line.startswith("$ "), lines[i + 1 :])) if shown else ()
                for part in re.split(r" && (?=(?:[^']*'[^']*')*[^']*$)", line.removeprefix("$ ")):
                    found.setdefault(part, Command(name, " ".join(part.split()), below))
    return list(found.values())


COMMANDS = commands()
each = pytest.mark.parametrize("command", COMMANDS, ids=[c.line[:70] for c in COMMANDS])

NOT_RUN = {  # why not here; what parses is still parsed
    r"^pip install": "what .ci/run begins with",
    r"^uv ": "a program of its own; tests/test_containers.py",
    r"^docker ": "a container engine; tests/test_containers.py",
    r"^(pytest|ruff|mypy)": "this, and what .ci/run begins with",
    r"^python tests/mutations.py": "it runs tests for hours",
    r"^mkdocs": "test_the_site_builds_and_asks_no_network_for_anything",
    r"^(sbatch|kubectl|gcloud)": "a cluster; tests/runtime/test_processes.py reads docs/examples and starts processes",
    r"^supervise -- jaxstack launch": "several processes; tests/faults/test_faults.py",
    r"--preflight": "several processes; tests/runtime/test_processes.py",
    r"^serve |^curl |^lm_eval ": "a server, which does not end; tests/serve/test_serve_command.py",
    r"^compress|^generate runs/small|init_from=runs/pruned": "half a minute; tests/compress/test_command.py",
    r"--picture=": "a trained run; tests/generate/test_caption_branch.py",
    r"--draft=mtp": "a trained run; tests/generate/test_own_draft.py",
    r"^(train|eval) .*(runs/kto|runs/reward|run:runs)\b": "a trained run; tests/training/test_preference.py",
    r"^export .*--format": "a trained run; tests/loaded/test_portable.py",
    r"^eval .*--tasks": "an extra; tests/evaluate/test_evaluate.py",
    r"^debug ": "a run with a bad step; tests/debug/test_search.py",
    r"^plan fit": "runs of several sizes; tests/planner/test_scaling_law.py",
    r"^plan run(?! --days)": "files and pictures; tests/planner/test_plan_run.py",
    r"^plan (mesh|bytes|--(config|target (?!a100)))": "a compiler of an extra, or a search; tests/aot",
    r"^python benchmarks/": "measured on its own; tests/test_benchmarks.py runs the ones for accelerators, small",
    r"^python docs/examples/own_(family|layer)": "eight devices; tests/pipeline/test_pipeline_examples.py",
    r"^plan roofline(?!.*llama3_8b)": "tests/planner/test_roofline.py",
    r"--kernels\.attention=pallas": "an error on a CPU; tests/kernels/test_attention_kernels.py",
    r"^(report|generate|export) runs/gpt2": "what an accelerator has trained; run with runs/quickstart",
    r"^(?!plan ).*--config (configs/models/)?(llama3_8b|gpt2)\b(?!.*--print_sh)": "accelerators; test_config.py",
    r"\bshakespeare(\.yaml| |$)": "an hour; configs/shakespeare_cpu.yaml is run",
    r"gpt2/tokenizer\.json": "a download; tests/data/test_data.py",
    r"--data\.source=hf": "an extra, and a download; tests/data/test_files_of_others.py",
    r"--data\.mask_id": "a folder of BERT; tests/hf/test_encoders.py",
    r"--data\.format": "files of other programs; tests/data/test_binary.py",
    r"--run\.sinks": "packages of extras; tests/tracking/test_sinks.py",
    r"runs/chat": "a tokenizer and its template; tests/data/test_chat.py",
    r"^train.*--mesh\.(data|fsdp|tensor|context|expert)=[48](?!.*--print_shardings)": "tests/test_meshes.py",
    r"--pipeline\.schedule=interleaved_1f1b": "tests/pipeline/test_pipeline.py",
    r"num_layers=8 (.* )?--run.dir=runs/(deeper|wider)": "the quickstart, deeper; tests/models/test_by_hand.py",
    r"^train --kernels\.attention=chunked": "what the quickstart takes; tests/kernels/test_attention_kernels.py",
    r"^train --mesh.fsdp=2 --mesh.tensor=2 --mesh.data=1 --run.dir": "tests/test_meshes.py",
    r"^train.*--mesh.expert=2": "tests/test_meshes.py",
    r"^train.*--train\.qat=": "a trained run; tests/training/test_qat.py",
}
STEPS = ["--train.steps=2", "--train.eval_every=2", "--train.eval_steps=1", "--checkpoint.every=2"]
ALONE = ["--train.ngram_baseline=false", "--sample.prompts=[]", "--optim.name=sgd"]  # Muon compiles for longest
SHORT = [*STEPS, *ALONE, "--data.seq_len=32", "--data.batch_size=8"]
RUN: list[tuple[str, list[str]]] = [  # flags that make it short; the first that matches
    (r"^launch ", []),
    (r"--print_shardings|^plan (roofline|memory|flops|time|serve|run --days|--target|--formula)", []),
    (r"--pipeline\.partition=", [*STEPS, *ALONE, "--data.seq_len=32"]),
    (r"^profile ", ["--data.seq_len=32"]),
    (r"--data\.source=chat", [*STEPS, *ALONE]),
    (r"(sft|dpo|grpo)_quickstart", [*STEPS, "--data.batch_size=8"]),
    (r"--data\.buckets", [*STEPS, *ALONE, "--data.batch_size=4"]),
    (r"--profile\.steps=", [*SHORT, "--profile.steps=1:2"]),
    (r"--model\.base_width", [*SHORT, "--optim.name=adamw"]),  # SGD is refused
    (r"--data\.(mask_phrases|source=triples)", [*STEPS, *ALONE, "--data.batch_size=8"]),  # longer than 32 bytes
    (r"(diffusion|contrastive)_(digits|captions)\b", [*STEPS, "--sample.pictures=1"]),
    (r"^train\b", SHORT),
    (r"^python docs/examples/", []),
    (r"^supervise", [*SHORT, "--train.steps=4"]),
    (r"^(generate|chat)", ["--sample.tokens=8"]),
    (r"^(report|eval|data|import|export|schedule|completion|help|plan experts) |^--help$", []),
]


def in_sandbox(path: Path) -> Path:
    """A directory with what the documents' commands read."""
    for name in ("configs", "docs"):
        shutil.copytree(ROOT / name, path / name, ignore=shutil.ignore_patterns("site", "__pycache__"))
    shutil.copy(ROOT / "train.py", path)
    (path / "my_texts").mkdir()
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/pipelines.md"))
    for i in range(4):
        (path / "my_texts" / f"{i}.txt").write_text(text[i * 500 :])
    (path / "tinyshakespeare.txt").write_text(3 * text)
    (path / "my_pairs.tsv").write_text("en\tde\tfr\n" + "".join(f"text {i}\tText {i}\ttexte {i}\n" for i in range(40)))
    reviews = [{"text": f"A {word} lens.", "label": word} for word in 40 * ("bad", "good")]
    (path / "reviews.jsonl").write_text("".join(f"{json.dumps(review)}\n" for review in reviews))
    return path


def reason(command: Command) -> str | None:
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, command.text)), None)


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory) -> tuple[Path, Config]:
    """What the commands read, also what others of them write; and the quickstart."""
    path = in_sandbox(tmp_path_factory.mktemp("docs"))
    quickstart = parse.parse_config([], ROOT / QUICKSTART)
    for made in ("RUN", "runs/imported", "runs/chat"):  # by `jaxstack import`
        (path / made).mkdir(parents=True)
        own = replace(quickstart, run=replace(quickstart.run, dir=made))
        (path / made / "config.yaml").write_text(parse.to_yaml(own))
    return path, quickstart


@each
def test_a_command_resolves(command, sandbox, monkeypatch):
    """Its flags are known, and what they say fits together; nothing is run."""
    path, quickstart = sandbox
    monkeypatch.chdir(path)
    program, *rest = command.words
    if program == "gcloud":  # what it starts
        (inner,) = (word.partition("&& ")[2] for word in rest if word.startswith("--command="))
        program, *rest = Command(command.page, inner).words
    if program == "supervise":
        assert rest[0] == "--"
        program, *rest = Command(command.page, shlex.join(rest[1:])).words
        assert program in ("train", "launch")
    if program == "launch":
        own, rest = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
        parser.read_arguments(["launch", *own, "--", *rest])
        program, *rest = rest
        assert program == "train"
    if program == "train":
        if command.mistake:
            with pytest.raises(ConfigError) as mistake:
                parser.read_arguments(["train", *rest])
            assert command.mistake == str(mistake.value)
            return
        if {"--help", "--print_config"} & set(rest):
            with pytest.raises(SystemExit) as done:
                parser.read_arguments(["train", *rest])
            assert not done.value.code
            return
        cfg = checked(rest)
        names_its_directory(cfg, quickstart, rest)
    elif program in ("plan", "profile"):
        args = parser.read_arguments([program, *rest])
        if "cfg" in args:  # `plan fit` has runs instead
            resolve(args.cfg, args.cfg.model.vocab_size or 256, (8, 8, 1))
    elif program == "help":
        with pytest.raises(SystemExit) as done:
            parser.execute(["help", *rest])
        assert not done.value.code
    elif program in {name.split()[0] for name in parser.COMMANDS}:
        parser.read_arguments([program, *rest])
    elif program in ("sbatch", "kubectl"):
        assert all((path / word).is_file() for word in rest if word.startswith("docs/"))
    elif program == "mkdocs":
        assert (ROOT / rest[-1]).is_file()
    elif program == "python":
        assert (ROOT / rest[0]).is_file()
    elif program not in ("pip", "pytest", "ruff", "mypy"):  # of ours: it parses as it runs
        assert reason(command) or any(re.search(pattern, command.text) for pattern, _ in RUN), command


def checked(flags: list[str]) -> Config:
    """A configuration that the model can have, whatever data it reads."""
    cfg = parser.read_arguments(["train", *flags]).cfg
    return resolve(cfg, cfg.model.vocab_size or 256, (16, 16, 3) if cfg.data.path == "drawn:digits" else (8, 8, 1))


def names_its_directory(cfg: Config, quickstart: Config, flags: list[str]) -> None:
    """Who follows a page has run the quickstart: another run in its directory would end at once, or be refused."""
    same = replace(quickstart, run=replace(quickstart.run, dir=cfg.run.dir))
    other = replace(cfg, distributed=DistributedConfig()) != resolve(same, 256)
    if other and "--print_shardings" not in flags:
        assert cfg.run.dir != quickstart.run.dir, "add --run.dir=..."


@pytest.mark.matrix
def test_runs_in_one_directory_train_one_model(sandbox, monkeypatch):
    """Who follows two pages must not find another model's checkpoints where the second one begins a run."""
    monkeypatch.chdir(sandbox[0])
    trained = {}
    for command in COMMANDS:
        flags = command.words[1:]
        if command.words[0] != "train" or command.mistake or {"--help", "--print_config"} & {*flags}:
            continue
        cfg = checked(flags)
        page, model = trained.setdefault(cfg.run.dir, (command.page, cfg.model))
        assert model == cfg.model, f"{page} and {command.page} train other models in {cfg.run.dir}"


def test_every_command_is_run_or_has_a_reason():
    for command in COMMANDS:
        ran = any(re.search(pattern, command.text) for pattern, _ in RUN)
        assert command.mistake or reason(command) or ran, f"{command}: add it to RUN or NOT_RUN"
    for pattern in [*NOT_RUN, *(pattern for pattern, _ in RUN)]:
        assert any(re.search(pattern, command.text) for command in COMMANDS), f"nothing uses {pattern}"


def start(line: str, path: Path, flags: list[str]) -> str:
    """Runs a command as a user would, in a sandbox; returns what it prints."""
    words = [sys.executable if word == "python" else word for word in shlex.split(line, comments=True)]
    ours = {"JAX_NUM_CPU_DEVICES", "XLA_FLAGS"}
    env = {name: value for name, value in os.environ.items() if name not in ours} | {"PYTHONPATH": str(ROOT)}
    env |= {"JAX_PLATFORMS": "cpu", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run([*words, *flags], cwd=path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def after_the_readme(tmp_path_factory) -> Path:
    """What a reader of any page has: the quickstart's run, its export, and texts as tokens."""
    path = in_sandbox(tmp_path_factory.mktemp("read"))
    start("python train.py", path, SHORT)
    start("jaxstack export runs/quickstart DIR", path, [])
    for tokens in ("tokens.bin", "my_texts.bin"):
        start(f"jaxstack data build --data.source=path --data.path=my_texts {tokens}", path, [])
    return path


AFTER = {
    "docs/encoder_decoders.md": ["docs/data.md"],
    "docs/generation.md": ["docs/finetuning.md"],
    "docs/huggingface.md": ["docs/finetuning.md"],
}
"""Pages whose files a page needs. Other pages need only those of the README."""
MADE = {  # files that must be there after a page
    "docs/first_run.md": ["runs/quickstart/report.html", "both.html"],
    "docs/huggingface.md": ["OUT/config.json"],
    "docs/pipelines.md": ["costs.json"],
}


def run_of(page: str) -> list[tuple[Command, list[str]]]:
    """Returns the commands of a page that run here, each with the flags that make it short."""
    found = [c for c in COMMANDS if c.page == page and not c.mistake and not reason(c) and c.text != "train"]
    return [(c, next(flags for pattern, flags in RUN if re.search(pattern, c.text))) for c in found]


RUN_PAGES = [page for page in dict.fromkeys(c.page for c in COMMANDS) if run_of(page)]


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=pytest.mark.slow if p == "README.md" else pytest.mark.matrix) for p in RUN_PAGES]
)
def test_the_commands_run(page, after_the_readme, tmp_path):
    """Runs those of a page in order; each one sees the files of those before it. Shown output must be right."""
    path = tmp_path / "reader"
    shutil.copytree(after_the_readme, path)
    if page == "README.md":  # which makes them
        for file in path.glob("my_texts.*"):
            file.unlink()
    shutil.copytree(path / "runs" / "quickstart", path / "runs" / "deeper")
    for command, flags in [each for before in [*AFTER.get(page, []), page] for each in run_of(before)]:
        if command.words[0] in ("import", "export"):  # nothing is overwritten, and some pages show two ways
            shutil.rmtree(path / command.words[2], ignore_errors=True)
        printed = [line.rstrip() for line in start(command.line, path, flags).splitlines()]
        missing = [line for line in command.output if line not in ("...", *printed)]
        assert not missing, f"{command.page}: {command.line} does not print {missing}"
    for file in MADE.get(page, []):
        assert (path / file).is_file(), file


def test_commands_within_sentences_exist():
    for page in PAGES:
        for code in re.findall(r"`(python (?!-m jaxstack\\?\.)[^`\n]+)`", page.read_text(encoding="utf-8")):
            words = code.split()
            if words[1] == "-m":
                module = ROOT / words[2].replace(".", "/")
                assert any(p.is_file() for p in (module.with_suffix(".py"), module / "__main__.py")), (
                    f"{page.name}: {code}"
                )
            else:
                assert (ROOT / words[1]).is_file() or not words[1].endswith(".py"), f"{page.name}: {code}"


def named_in(path: Path) -> set[str]:
    """Returns the functions, classes and variables that a file defines, also within classes."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assigned = [node.targets if isinstance(node, ast.Assign) else [node.target]
                for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign)]  # fmt: skip
    return defined | {target.id for targets in assigned for target in targets if isinstance(target, ast.Name)}


def table_below(page: str, heading: str) -> list[list[str]]:
    """Returns the cells of the first table of a page whose first row begins with `heading`."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(heading))
    rows = takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_tour_names_what_is_there():
    """Ten files to read; and for every task of a newcomer, a file with the function or class that decides it."""
    tour = table_below("CONTRIBUTING.md", "| file | what it decides")
    tasks = table_below("CONTRIBUTING.md", "| task | file | name |")
    assert len(tour) == 10
    assert len({task for task, *_ in tasks}) == len(tasks) >= 12
    for file in [*(row[0] for row in tour), *(row[1] for row in tasks)]:
        assert (ROOT / file.strip("`")).is_file(), file
    for task, file, name, _ in tasks:
        assert name.strip("`") in named_in(ROOT / file.strip("`")), f"{task}: {file} does not define {name}"


def test_the_table_of_floors_is_that_of_the_test():
    from test_floors import FLOORS

    shown = {
        room: int(floor)
        for floor, rooms in table_below("CONTRIBUTING.md", "| floor | rooms")
        for room in re.findall(r"`(\w+)`:", rooms)
    }
    assert shown == FLOORS


def test_tests_and_files_that_documents_name_exist():
    """In backticks: `tests/...`, `benchmarks/...`, `jaxstack/...`, `docs/...`, `configs/...` and `test_...`."""
    tests = {name for path in (ROOT / "tests").rglob("*.py") for name in named_in(path)}
    for page in PAGES:
        if page.name in ("changelog.md", "glossary.md"):  # what was; expressions
            continue
        for code in re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")):
            path, _, name = code.partition("::")
            if re.fullmatch(r"(tests|benchmarks|jaxstack|docs|configs|colab)/[\w./]+", path) and "NAME" not in path:
                assert (ROOT / path).exists(), f"{page.name}: {path} does not exist"
                assert not name or name in named_in(ROOT / path), f"{page.name}: {code} does not exist"
            elif re.fullmatch(r"test_\w+", code):
                assert code in tests, f"{page.name}: {code} is not a test"


def test_the_page_of_commands_lists_all_with_their_summaries():
    from jaxstack.cli.parser import COMMANDS

    shown = {name.strip("`"): what for name, what, _ in table_below("docs/commands.md", "| command |")}
    assert shown == {name: command.summary for name, command in COMMANDS.items()}


def test_the_commands_of_the_table_of_systems_exist(sandbox, monkeypatch):
    """Each row has a command with keys that exist and fit together, or `not implemented` and the reason."""
    monkeypatch.chdir(sandbox[0])
    rows = table_below("docs/systems.md", "| system | method |")
    assert len(rows) > 40
    for system, method, theirs, command, ours in rows:
        assert system, method
        assert theirs, method
        assert len(ours) > 10, method
        if command == "not implemented":
            continue
        program, *rest = shlex.split(command.strip("`"))
        if program == "python":
            assert (ROOT / rest[0]).is_file(), command
        elif rest[0] == "train":
            checked(rest[1:])
        else:
            assert program == "jaxstack", command
            parser.read_arguments(rest)


def test_the_readme_and_the_tour_are_short():
    for name, most in (("README.md", 130), ("CONTRIBUTING.md", 130)):
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= most, name


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.parent != ROOT and p.name != "changelog.md"], ids=lambda p: p.stem
)
def test_a_page_opens_with_what_the_reader_can_do_then_a_command_then_a_table(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    command = next(i for i, line in enumerate(lines) if line.startswith("```"))
    table = next(i for i, line in enumerate(lines) if line.startswith("| "))
    assert lines[0].startswith("# ")
    assert re.match(r"[A-Z]", lines[2])
    assert command <= 8
    assert command < table


def test_the_navigation_has_every_page_once():
    text = (ROOT / "docs" / "site" / "mkdocs.yml").read_text(encoding="utf-8")
    nav = str(yaml.safe_load(text)["nav"])
    named = re.findall(r"[\w/]+\.md", nav)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(named) == sorted(pages | {"index.md", "contributing.md"})


def test_links_between_documents_lead_somewhere():
    """To files, and to headings of pages."""

    def anchors(path: Path) -> set[str]:
        titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
        return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}

    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", link):
                continue
            file, _, anchor = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            assert target.exists(), f"{page.name} links to {link}"
            assert not anchor or anchor in anchors(target), f"{page.name} links to {link}: no such heading"


@pytest.mark.slow
def test_the_memory_and_the_traffic_of_gathers_are_those_of_the_command(tmp_path):
    (command,) = [c for c in COMMANDS if c.page == "docs/pipelines.md" and "--pipeline.gather=layer" in c.line]
    rows = {cells[0]: cells[1:] for cells in table_below("docs/pipelines.md", "| | `once` | `layer` |")}
    for column, gather in enumerate(("once", "layer")):
        printed = start(command.line, tmp_path, [f"--pipeline.gather={gather}"])
        (memory,) = re.findall(r"by formula +([\d.]+)  ", printed)
        assert rows["memory of a device in GiB, by the command above"][column] == f"{float(memory):.1f}"
        sent = sum(float(mib) for mib in re.findall(r"^fsdp .* ([\d.]+)$", printed, re.M)) / 1024
        assert rows["GiB that a device sends over `fsdp`, by the same command"][column] == f"{sent:.1f}"


def test_tables_of_traffic_are_those_of_the_result(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    traffic = runpy.run_path(str(ROOT / "benchmarks" / "traffic.py"))
    result = json.loads((ROOT / "benchmarks" / "results" / "traffic.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "pipeline_results.md").read_text(encoding="utf-8")
    assert traffic["stages_rows"](result["stages"]["cases"]) in page
    for page, names in traffic["SHOWN"].items():
        assert traffic["rows"](result["cases"], names) in (ROOT / "docs" / "parallelism" / f"{page}.md").read_text(
            encoding="utf-8"
        )


def nested_blocks(text: str) -> list[str]:
    """Returns the lines of lists, tables and paragraphs within a list that have fewer than four spaces before them."""
    parts = re.split(r"(^ *```.*?^ *```)", text, flags=re.M | re.S)
    found = [
        line for part in parts[::2] for line in re.findall(r"(?<=\n\n) {1,3}\S.*|^ {1,3}(?:[-*]|\d+\.) .*", part, re.M)
    ]
    return found + [block.splitlines()[0] for block in parts[1::2] if re.match(r" {1,3}`", block)]


def test_blocks_within_a_list_have_four_spaces():
    """With fewer, the site's Markdown ends the list, and shows what follows a table as rows of the table."""
    assert nested_blocks("- a\n\n  | b |\n\n  ```\n  c\n  ```\n- d\n  more\n  - e\n\n    f") == [
        "  | b |", "  - e", "  ```",
    ]  # fmt: skip
    found = {page.name: nested_blocks(page.read_text(encoding="utf-8")) for page in PAGES}
    assert not {name: lines for name, lines in found.items() if lines}


def test_cells_of_the_site_have_room_for_their_words():
    pytest.importorskip("mkdocs", reason="needs the extra [docs]")
    show = runpy.run_path(str(ROOT / "docs" / "site" / "hooks.py"))["on_page_content"]
    cells = ["12", "one of eight devices", "what a step of the run sends, by mesh axis and collective"]
    row = "".join(f'<td style="text-align: right;">{cell}</td>' for cell in cells)
    assert re.findall(r'<td(?: class="(\w+)")?', show(f"<tr>{row}</tr>")) == ["", "words", "sentence"]
    assert show("<td><code>a&lt;b</code></td>") == "<td><code>a&lt;b</code></td>"


def test_code_on_the_site_breaks_between_its_words():
    pytest.importorskip("mkdocs", reason="needs the extra [docs]")
    show = runpy.run_path(str(ROOT / "docs" / "site" / "hooks.py"))["on_page_content"]
    assert show("<code>a/b_c --mesh.data=8,9</code>") == (
        '<code>a/<wbr>b_<wbr>c <span class="flag">--mesh.data=</span>8,<wbr>9</code>'
    )
    for same in (
        "<code>a/__init__.py</code>",
        "<pre><code>a/b --mesh.data=8</code></pre>",
        "<tr>\n<td><code>a/b</code>",
    ):
        assert show(same) == same


def test_the_code_of_the_readme_runs():
    """Its first block has assertions."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert 15 <= len(block.splitlines()) <= 20
    exec(block, {})


def named_in_code(text: str) -> set[str]:
    """Returns the dotted names of the package in a page's Python blocks, and in its code within sentences."""
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    found = set(re.findall(r"`(jaxstack(?:\.[a-zA-Z_]\w*)+)[`(]", text))
    for block in blocks:
        found |= {f"jaxstack.{name}" for name in re.findall(r"\b(?:js|jaxstack)\.((?:\w+\.)*\w+)\(", block)}
        for module, names in re.findall(r"^\s*from (jaxstack[\w.]*) import \(?([\w, \n]+)", block, re.M):
            found |= {f"{module}.{name.split()[0]}" for name in names.split(",") if name.strip()}
    return found


def test_names_of_the_package_in_code_exist():
    wrong = []
    for page in PAGES:
        for name in sorted(named_in_code(page.read_text(encoding="utf-8"))):
            try:
                pkgutil.resolve_name(name)
            except (AttributeError, ImportError):
                wrong.append(f"{page.relative_to(ROOT)}: {name}")
    assert not wrong


def test_the_readme_counts_the_lines_of_the_core():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (most,) = re.findall(r"are the core, with fewer than ([\d,]+) lines", text)
    core = re.findall(r"^\| \[jaxstack/\S+\]\((\S+\.py)\)", text, re.M)
    assert f"The {['no', 'one', 'two', 'three', 'four', 'five', 'six'][len(core)]} files" in text
    lines = sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in core)
    assert lines < int(most.replace(",", ""))


def test_tables_and_counts_of_what_is_tested_are_those_of_the_tests():
    """A new case changes the number wherever a page names it. `python tests/test_meshes.py` prints its page's table."""
    import test_meshes
    import test_pipeline

    for page, module in (("meshes", test_meshes), ("pipeline_results", test_pipeline)):
        shown = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        assert module.table() in shown, (
            f"docs/{page}.md: run python tests/{module.__name__}.py and paste what it prints"
        )
    faults = re.findall(r"^\| ([\d, ]+) \|.*\|.*\|$", (ROOT / "docs/reliability.md").read_text(encoding="utf-8"), re.M)
    listed = [int(number) for row in faults for number in row.split(",")]
    numbers = {*listed[listed.index(1) :]}  # exit codes are in a table before; a fault may have several rows
    assert numbers == {*range(1, len(numbers) + 1)}
    counts = {"meshes": len(test_meshes.CASES), "pipelines": len(test_pipeline.CASES), "faults": len(numbers)}
    named = set()
    for page in [*PAGES, *sorted((ROOT / "colab").glob("*.py"))]:
        text = page.read_text(encoding="utf-8")
        for number, what in re.findall(r"\b(\d+)\s(meshes|pipelines|faults)\b(?!, equal)", text):  # but of a soak
            assert int(number) == counts[what], f"{page.name}: {number} {what}, but there are {counts[what]}"
            named.add(what)
    assert named == set(counts)


def test_keys_in_the_tables_of_other_vocabularies_exist():
    from jaxstack.config import flat

    known = {*flat(Config()), *(f"{key}.*" for key in ("model", "data"))}
    page = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    groups = {key.split(".")[0] for key in known}
    ours = [cell for row in page.splitlines() if row.startswith("| ") for cell in row.split(" | ")[1:]]
    for key in re.findall(r"`(\w+\.[\w.]+)(?:=\w+)?`", " ".join(ours)):
        assert key in known or key.split(".")[0] not in groups, key


@pytest.mark.slow
def test_the_site_builds_and_asks_no_network_for_anything(tmp_path):
    """In strict mode: no dead link, no page without a place. Extra `[docs]`; without it this fails."""
    build = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "-f",
        str(ROOT / "docs" / "site" / "mkdocs.yml"),
        "-d",
        str(tmp_path),
    ]
    made = subprocess.run(build, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    pages = {
        page.relative_to(tmp_path).as_posix(): page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html")
    }
    assert len(pages) > 30
    for name, text in pages.items():
        fetched = re.findall(r'<(?:script|img|iframe|link)\b[^>]*?(?:src|href)="?(https?:[^" >]+)', text)
        assert not fetched, f"{name}: {fetched}"
    for sheet in tmp_path.rglob("*.css"):
        assert not re.findall(r"(?:url|@import)\W*https?:", sheet.read_text(encoding="utf-8")), sheet
    assert 'id="jaxstack.kernels.attention.attention"' in pages["api/kernels/index.html"]
    assert 'id="jaxstack.sharding.flax.shard"' in pages["api/sharding/index.html"]
