"""Checks the container files and uv.lock by their text, because CI has no container engine and asks no network."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from jaxstack.cli import parser

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "containers").glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = tomllib.loads((ROOT / "uv.lock").read_text())


def instructions(text: str) -> list[tuple[str, str]]:
    """Returns the instructions of a container file with their arguments."""
    lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.M)).splitlines()
    return [(word.upper(), rest) for word, _, rest in (line.strip().partition(" ") for line in lines) if word]


def problems(text: str) -> list[str]:
    """Returns what a reviewer would object to."""
    found = []
    steps = instructions(text)
    images = [rest.split()[0] for word, rest in steps if word == "FROM"]
    images += [image for word, rest in steps if word == "COPY" for image in re.findall(r"--from=(\S+)", rest)]
    found += [f"{image} is not pinned" for image in images if not re.search(r":\d+\.\d+\.\d+", image)]
    for base in re.findall(r"FROM python:(\d+\.\d+)", text):
        if not Requirement(f"x{PROJECT['requires-python']}").specifier.contains(base):
            found.append(f"Python {base} is too old")
    users = [rest for word, rest in steps if word == "USER"]
    if not users or users[-1] in ("root", "0"):
        found.append("it runs as root")
    if any(word == "ADD" for word, _ in steps):
        found.append("ADD: use COPY")
    kept = (ROOT / ".dockerignore").read_text().split()
    for source in (
        path for word, rest in steps if word == "COPY" and "--from" not in rest for path in rest.split()[:-1]
    ):
        if not (ROOT / source).exists() or f"!{source}" not in kept:
            found.append(f"{source} does not exist, or .dockerignore leaves it out")
    runs = [rest for word, rest in steps if word == "RUN"]
    syncs = [run for run in runs if "uv sync" in run]
    if len(syncs) != 1 or "--locked" not in syncs[0]:
        found.append("uv sync --locked is not run once")
    extras = {extra for run in syncs for extra in re.findall(r"--extra (\S+)", run)}
    found += [f"there is no extra {extra}" for extra in extras - {*PROJECT["optional-dependencies"]}]
    found += [f"{run} may ask" for run in runs if "apt-get install" in run and "-y" not in run]
    if dict(steps).get("ENTRYPOINT") not in (f'["{name}"]' for name in PROJECT["scripts"]):
        found.append("the entry point is not a command")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_nobody_would_object(file):
    assert problems(file.read_text()) == []


def test_there_is_one_for_cpus_and_one_for_gpus():
    assert [file.stem for file in FILES] == ["cpu", "gpu"]
    assert "cuda13" in FILES[1].read_text()
    assert "cuda" not in FILES[0].read_text()


@pytest.mark.parametrize(
    ("old", "new", "objection"),
    [
        (r"FROM python:\S+", "FROM python:latest", "python:latest is not pinned"),
        (r"FROM python:\S+", "FROM python:3.9.1-slim", "Python 3.9 is too old"),
        (r"uv:\d\S+", "uv:latest", "ghcr.io/astral-sh/uv:latest is not pinned"),
        (r"USER jaxstack\n", "", "it runs as root"),
        (r"USER jaxstack", "USER root", "it runs as root"),
        (r"COPY configs", "COPY tests", "tests does not exist, or .dockerignore leaves it out"),
        (r"COPY configs", "ADD configs", "ADD: use COPY"),
        (r"--locked ", "", "uv sync --locked is not run once"),
        (r"--extra hf", "--extra huggingface", "there is no extra huggingface"),
        (r'\["jaxstack"\]', '["train"]', "the entry point is not a command"),
    ],
)
def test_a_mistake_is_an_objection(old, new, objection):
    text, count = re.subn(old, new, FILES[0].read_text(), count=1)
    assert count
    assert objection in problems(text)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_its_example_is_a_command_of_jaxstack(file, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (line,) = re.findall(r"^# docker run (.*)", file.read_text(), re.M)
    words = shlex.split(line)
    parser.read_arguments(words[words.index(f"jaxstack:{file.stem}") + 1 :])
    assert f"-t jaxstack:{file.stem} ." in file.read_text()
    assert f"docker build -f containers/{file.name}" in file.read_text()


def test_the_lock_names_public_places_alone():
    addresses = re.findall(r"\b\w+://[^/\"]+/[^/\"]*", (ROOT / "uv.lock").read_text())
    assert {*addresses} == {"https://pypi.org/simple", "https://files.pythonhosted.org/packages"}


def test_the_lock_is_of_this_project():
    """Otherwise `uv sync --locked` refuses it. `uv lock` writes it again."""
    assert LOCK["requires-python"] == PROJECT["requires-python"]
    own = next(package for package in LOCK["package"] if package["name"] == PROJECT["name"])
    assert {*own["metadata"]["provides-extras"]} == {*PROJECT["optional-dependencies"]}
    wanted = {("", Requirement(text)) for text in PROJECT["dependencies"]}
    for extra, texts in PROJECT["optional-dependencies"].items():
        wanted |= {(extra, Requirement(text)) for text in texts}
    locked = set()
    for each in own["metadata"]["requires-dist"]:
        extra = "".join(re.findall(r"extra == '(.*)'", each.get("marker", "")))
        extras = f"[{','.join(each['extras'])}]" if each.get("extras") else ""
        locked.add((extra, Requirement(f"{each['name']}{extras}{each.get('specifier', '')}")))

    def normal(pairs):
        return {(e, r.name.lower().replace("_", "-"), frozenset(r.extras), frozenset(r.specifier)) for e, r in pairs}

    assert normal(locked) == normal(wanted)


def test_each_locked_version_is_allowed():
    versions: dict[str, set[Version]] = {}
    for package in LOCK["package"]:
        if "version" in package:
            versions.setdefault(package["name"], set()).add(Version(package["version"]))
    for text in [
        *PROJECT["dependencies"],
        *(text for each in PROJECT["optional-dependencies"].values() for text in each),
    ]:
        requirement = Requirement(text)
        for version in versions[requirement.name.lower().replace("_", "-")]:
            assert requirement.specifier.contains(version), f"{text} is locked at {version}"
