"""What jaxstack needs of other packages: floors without known vulnerabilities, and JAX's private names."""

import ast
import importlib
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import advisories
import pytest
import selected
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from jaxstack.common import jax_private
from jaxstack.common.errors import ConfigError

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [
    Requirement(text)
    for texts in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for text in texts
]


def floor(requirement: Requirement) -> Version | None:
    """Returns the lowest version that a requirement allows, or None if it allows all."""
    found = [Version(s.version) for s in requirement.specifier if s.operator in (">=", "==")]
    return max(found, default=None)


def test_no_floor_allows_a_version_with_a_known_vulnerability():
    lowest = {r.name: str(floor(r)) for r in REQUIREMENTS if floor(r)}
    assert len(lowest) > 35
    assert advisories.vulnerable(lowest) == []
    named = {canonicalize_name(r.name) for r in REQUIREMENTS}
    assert len([a for a in advisories.ADVISORIES if a.package in named]) == 15  # the others come with these


def test_every_requirement_has_a_floor():
    """CI installs the lowest versions, and only a floor says which. Extras of JAX have that of `jax`."""
    without = {r.name for r in REQUIREMENTS if floor(r) is None and not r.extras}
    assert without == {"types-psutil", "types-PyYAML"}  # annotations for mypy, which nothing runs


def test_the_floors_of_two_extras_agree():
    floors: dict[str, set[Version]] = {}
    for requirement in REQUIREMENTS:
        if not requirement.extras:
            floors.setdefault(requirement.name, set()).add(floor(requirement))
    assert {name: found for name, found in floors.items() if len(found) > 1} == {}


@pytest.mark.parametrize(
    ("name", "version", "repaired"),
    [
        ("jinja2", "3.1.5", "3.1.6"),  # a chat template leaves the sandbox
        ("Pillow", "12.2.0", "12.3.0"),
        ("starlette", "0.41.0", "1.3.1"),
        ("Jinja2", "3.1.10", None),  # versions, not texts
        ("pillow", "12.3.0", None),
        ("no-such-package", "0.1", None),
    ],
)
def test_a_version_is_compared_with_the_repaired_one(name, version, repaired):
    lines = advisories.vulnerable({name: version})
    assert len(lines) == (repaired is not None)
    assert all(line.endswith(f"repaired in {repaired}") and "CVE-" in line for line in lines)


def test_every_advisory_has_names_and_a_version():
    packages = [a.package for a in advisories.ADVISORIES]
    assert len(set(packages)) == len(packages)
    for advisory in advisories.ADVISORIES:
        assert advisory.package == canonicalize_name(advisory.package)
        assert Version(advisory.repaired)
        assert advisory.names
        assert all(name.startswith(("CVE-", "PYSEC-")) for name in advisory.names)


def test_nothing_vulnerable_is_installed():
    assert advisories.vulnerable({d.metadata["Name"]: d.version for d in distributions()}) == []


# Private names of JAX.


def private_imports(path: Path) -> set[str]:
    """Returns the imports of private modules of JAX that a file has as statements."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith(("jax._", "jaxlib._"))}


def test_private_names_of_jax_are_read_in_one_place():
    """A statement would break every run with a version of JAX that lacks the name."""
    assert {path: private_imports(path) for path in (ROOT / "jaxstack").rglob("*.py") if private_imports(path)} == {}


def test_every_private_module_that_is_read_is_listed():
    read = set()
    for path in (ROOT / "jaxstack").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "private_module":
                read.add(ast.literal_eval(node.args[0]))
    assert read == {module for module, _ in jax_private.FEATURES}


@pytest.mark.parametrize(("module", "name"), jax_private.FEATURES)
def test_jax_has_every_private_name(module, name):
    """Of this version of JAX; CI runs the test with the newest one too."""
    found = jax_private.private_module(module)
    assert found is importlib.import_module(f"jax._src.{module}")
    assert getattr(found, name) is not None


@pytest.mark.parametrize(("module", "name"), jax_private.FEATURES)
def test_a_missing_private_name_is_an_error_that_names_the_feature(module, name, monkeypatch):
    monkeypatch.delattr(importlib.import_module(f"jax._src.{module}"), name)
    with pytest.raises(ConfigError) as error:
        jax_private.private_module(module)
    assert f"has no jax._src.{module}.{name}, which {jax_private.FEATURES[module, name]} needs" in str(error.value)
    assert "Install a version of jax" in error.value.advice


def test_a_missing_private_module_is_the_same_error(monkeypatch):
    monkeypatch.setitem(jax_private.FEATURES, ("gone", "thing"), "nothing")
    with pytest.raises(ConfigError, match=r"has no jax\._src\.gone\.thing, which nothing needs"):
        jax_private.private_module("gone")


def test_a_run_needs_no_private_name(monkeypatch):
    """Without `train.debug`, in one process: the checks of reads and the watchdog start without them."""
    from jaxstack.runtime.host_reads import HostReads
    from jaxstack.runtime.watchdog import Watchdog

    def refuse(module):
        raise AssertionError(module)

    for place in ("jaxstack.runtime.host_reads", "jaxstack.runtime.watchdog"):
        monkeypatch.setattr(f"{place}.private_module", refuse)
    Watchdog(lost_s=1, stalled_s=1)
    with HostReads(active=False) as reads:
        reads.forbid()
    with pytest.raises(AssertionError, match="callback"):
        HostReads(active=True)


# What CI runs with other versions.


def test_ci_runs_selections_that_exist():
    script = (ROOT / ".ci" / "run").read_text()
    for name, paths in selected.SELECTIONS.items():
        assert f"tests/selected.py {name}" in script
        assert [path for path in paths if not (ROOT / path).exists()] == []
    assert "--resolution lowest-direct" in script
    assert "tests/advisories.py" in script
