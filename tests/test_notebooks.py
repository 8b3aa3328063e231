"""Tests that the notebooks of `colab/` match their Python sources and run from start to end, as users run them."""

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest
from packaging.requirements import Requirement

COLAB = Path(__file__).parent.parent / "colab"
NOTEBOOKS = sorted(COLAB.glob("*.ipynb"))

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@each
def test_badges_open_it(path):
    """The badge is in the notebook and in the README."""
    badge = f"https://colab.research.google.com/github/jaxstack/jaxstack/blob/main/colab/{path.name}"
    assert badge in path.read_text(encoding="utf-8")
    assert badge in (COLAB.parent / "README.md").read_text(encoding="utf-8")


@each
def test_it_asks_a_question_and_ends_with_an_exercise(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    assert "?" in texts[0], "the first cell has no question"
    (exercise,) = [text for text in texts[-2:] if text.startswith("## Exercise\n")]
    asked, answer = exercise.split("<details><summary>Answer</summary>")
    assert "?" in asked
    assert answer.endswith("</details>")
    after = next(i for i, cell in enumerate(cells) if "".join(cell["source"]) == exercise) + 1
    check = ast.parse("".join(cells[after]["source"]))
    assert "answer = None" in ast.unparse(check), "no cell below the exercise checks an answer"
    assert any(isinstance(node, ast.Assert) for node in ast.walk(check)), "nothing tests the printed answer"


CELLS_WITHOUT_A_PICTURE = 5
"""This many cells with code may follow each other without a picture."""


def code_cells(path):
    """Returns the code of the cells below the first heading: the cells before it install and import."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    first = next(i for i, (kind, text) in enumerate(texts) if kind == "markdown" and text.startswith("## "))
    return [text for kind, text in texts[first:] if kind == "code"]


def draws(node, functions=()):
    """Returns whether code shows a picture, or calls one of `functions`."""
    calls = [ast.unparse(each) for each in ast.walk(node) if isinstance(each, ast.Call)]
    return any(
        call == "plt.show()" or call.startswith("display(Image(") or call.split("(")[0] in functions for call in calls
    )


def pictures(path):
    """Returns for each cell with code whether it draws."""
    trees = [ast.parse(text) for text in code_cells(path)]
    defined = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    functions = {node.name for node in defined if draws(node)}
    return [any(draws(node, functions) for node in tree.body if node not in defined) for tree in trees]


@each
def test_a_picture_every_few_cells(path):
    seen = "".join(" P"[drawn] for drawn in pictures(path))
    assert max(map(len, seen.split("P"))) <= CELLS_WITHOUT_A_PICTURE, f"cells with code, P draws: {seen!r}"


COLOR_MAPS = {"Blues", "RdBu", "cividis", "gray", "viridis", "viridis_r"}
"""Their colors differ in lightness, or are blue and red: a color-blind reader tells them apart."""


@each
def test_pictures_have_one_style(path):
    """Colors are those of `jaxstack.common.drawing`, beside black and white, which text and edges may have."""
    tree = ast.parse(path.with_suffix(".py").read_text(encoding="utf-8"))
    assert "plt.rcParams.update(STYLE)" in ast.unparse(tree)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        for option in call.keywords:
            names = {each.value for each in ast.walk(option.value) if isinstance(each, ast.Constant)}
            if option.arg == "cmap":
                assert names <= COLOR_MAPS, ast.unparse(call)
            elif option.arg in ("color", "facecolor", "edgecolor", "edgecolors", "c"):
                assert {name for name in names if isinstance(name, str)} <= {"black", "white"}, ast.unparse(call)
            assert (option.arg, ast.unparse(option.value)) != ("layout", "'constrained'"), "the style has it"


# --- the first cell: Colab's machines have an older JAX, whose GPU plugin pip keeps unless the extra is named ---------

JAX = ("0.10.2", "gpu", "Tesla T4")


class Machine:
    """Runs the cell on a machine of another kind: `nvidia-smi` is a file, pip only notes what it should install."""

    def __init__(self, tmp_path, monkeypatch):
        self.path = tmp_path / "bin"
        self.path.mkdir()
        self.installed = []
        self.jax = JAX
        self.runs = subprocess.run
        monkeypatch.setenv("PATH", str(self.path))
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
        monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        monkeypatch.setattr(subprocess, "run", self.run)
        monkeypatch.setattr(sys, "modules", {name: m for name, m in sys.modules.items() if name != "jax"})

    def nvidia_smi(self, code):
        (self.path / "nvidia-smi").write_text(f"#!/bin/sh\nexit {code}\n")
        (self.path / "nvidia-smi").chmod(0o755)

    def run(self, words, **how):
        if words[0] != sys.executable:
            return self.runs(words, **how)
        if words[1:4] == ["-m", "pip", "install"]:
            self.installed.append(words[-1])
        output = "" if self.jax is None else "\n".join(self.jax) + "\n"
        return subprocess.CompletedProcess(words, int(self.jax is None), output, "the plugin is not compatible")

    def cell(self, stem="first_model"):
        cells = json.loads((COLAB / f"{stem}.ipynb").read_text(encoding="utf-8"))["cells"]
        source = next("".join(cell["source"]) for cell in cells if '"pip"' in "".join(cell["source"]))
        exec(compile(source, f"{stem}.ipynb", "exec"), {})


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


SOURCE = "git+https://github.com/jaxstack/jaxstack"


def test_a_gpu_gets_the_plugin_of_the_same_jax(machine, capsys):
    machine.nvidia_smi(0)
    machine.cell()
    assert machine.installed == [f"jaxstack[cuda12] @ {SOURCE}"]
    assert capsys.readouterr().out.splitlines()[-1] == "JAX 0.10.2 runs on Tesla T4"
    machine.cell("diffusion")
    assert machine.installed[1:] == [f"jaxstack[images,cuda12] @ {SOURCE}"]


def test_a_tpu_gets_its_library(machine, monkeypatch):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5e-1")
    machine.jax = ("0.10.2", "tpu", "TPU v5 lite")
    machine.cell()
    assert machine.installed == [f"jaxstack[tpu] @ {SOURCE}"]


@pytest.mark.parametrize("driver", [None, 9])
def test_a_machine_without_an_accelerator_gets_neither(machine, driver):
    """Also if `nvidia-smi` is installed and finds no driver, as on Colab's machines with a CPU."""
    if driver is not None:
        machine.nvidia_smi(driver)
    machine.jax = ("0.10.2", "cpu", "cpu")
    machine.cell()
    assert machine.installed == [f"jaxstack @ {SOURCE}"]


def test_planning_uses_the_cpu_of_a_machine_with_a_gpu(machine, monkeypatch):
    machine.nvidia_smi(0)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # as the cell before it
    machine.jax = ("0.10.2", "cpu", "cpu")
    machine.cell("planning")
    assert machine.installed == [f"jaxstack @ {SOURCE}"]


@pytest.mark.parametrize("jax", [("0.10.2", "cpu", "cpu"), None])
def test_a_gpu_that_jax_does_not_use_is_an_error(machine, jax, capsys):
    machine.nvidia_smi(0)
    machine.jax = jax
    with pytest.raises(RuntimeError, match=r"has a GPU, but JAX .* runs on (cpu|nothing)\. Restart .*'jax\[cuda12\]'"):
        machine.cell()
    assert "not compatible" in capsys.readouterr().out


def test_a_tpu_that_this_process_uses_is_found(machine, monkeypatch, capsys):
    """A TPU serves one process. If the cell is run again after JAX has begun, another process cannot ask it."""
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5e-1")
    machine.jax = None
    device = types.SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
    version = importlib.metadata.version("jax")
    monkeypatch.setitem(sys.modules, "jax", types.SimpleNamespace(__version__=version, devices=lambda: [device]))
    machine.cell()
    assert capsys.readouterr().out.splitlines()[-1] == f"JAX {version} runs on TPU v5 lite"
    monkeypatch.setitem(sys.modules, "jax", types.SimpleNamespace(__version__="0.7.2", devices=lambda: [device]))
    with pytest.raises(RuntimeError, match=r"imported before .* was installed"):
        machine.cell()


def test_an_older_jax_that_was_imported_before_is_an_error(machine, monkeypatch):
    machine.nvidia_smi(0)
    monkeypatch.setitem(sys.modules, "jax", types.SimpleNamespace(__version__="0.7.2"))
    with pytest.raises(RuntimeError, match=r"imported before 0\.10\.2 was installed\. Restart the session"):
        machine.cell()


def test_the_extra_replaces_the_plugin_of_colab():
    """JAX alone does not name the plugin, so pip keeps 0.7.2. With the extra, pip must take the one of this JAX."""
    found = {}
    for text in importlib.metadata.requires("jax"):
        requirement = Requirement(text)
        if requirement.name == "jax-cuda12-plugin":
            for extra in ("", "cuda12"):
                if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                    found[extra] = requirement.specifier
    assert {*found} == {"cuda12"}
    assert not found["cuda12"].contains("0.7.2")
    assert found["cuda12"].contains(importlib.metadata.version("jax"))


def test_what_colab_imports_before_the_first_cell_is_not_replaced():
    """Its kernel imports psutil 5.9.5; another version would ask the user to restart."""
    requirements = (COLAB.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert '"psutil>=5.9.5"' in requirements


@each
def test_every_notebook_begins_with_the_same_cell(path):
    part = (COLAB / "parts" / "install.py").read_text(encoding="utf-8").strip()
    cells = ["".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    before, after = part.split("EXTRAS = []")
    (cell,) = [cell for cell in cells if cell.startswith(before)]
    assert cell.endswith(after)
    assert sum('"pip"' in cell for cell in cells) == 1


SOURCES = sorted(set(COLAB.glob("*.py")) - {COLAB / "build.py"})


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_it_imports_and_calls_what_exists(path):
    """Each name of jaxstack exists, and each call of one fits its signature. Running a notebook takes minutes."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = dict(pair for node in ast.walk(tree) for pair in imported(node))
    assert names, "it imports nothing of jaxstack"
    checked = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            find(node, names)
        if not isinstance(node, ast.Call) or any(isinstance(argument, ast.Starred) for argument in node.args):
            continue
        function = find(node.func, names)
        if callable(function) and all(keyword.arg for keyword in node.keywords):
            checked += 1
            try:
                inspect.signature(function).bind(*node.args, **{str(one.arg): one.value for one in node.keywords})
            except TypeError as error:
                pytest.fail(f"{path.name}:{node.lineno}: {ast.unparse(node)}: {error}")
    assert checked


def imported(node):
    """Yields the names that an import of jaxstack binds, with the modules, functions and classes."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jaxstack":
        for alias in node.names:
            yield alias.asname or alias.name, member(importlib.import_module(node.module), alias.name)
    elif isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == "jaxstack":
                module = importlib.import_module(alias.name)
                yield (alias.asname, module) if alias.asname else ("jaxstack", sys.modules["jaxstack"])


def member(module, name):
    """Returns a name of a module, which may be a module below it."""
    return getattr(module, name) if hasattr(module, name) else importlib.import_module(f"{module.__name__}.{name}")


def find(expression, names):
    """Returns what `a` or `a.b.c` is if each of its parents is a module, else `None`."""
    if isinstance(expression, ast.Name):
        return names.get(expression.id)
    if isinstance(expression, ast.Attribute) and inspect.ismodule(parent := find(expression.value, names)):
        return member(parent, expression.attr)
    return None


# Without the extra [notebook] the slow tests fail. `importorskip` would let CI skip them unnoticed.


@pytest.mark.slow
def test_notebooks_are_what_their_sources_give():
    build = runpy.run_path(str(COLAB / "build.py"))
    assert [source.with_suffix(".ipynb") for source in build["SOURCES"]] == NOTEBOOKS
    for path in NOTEBOOKS:
        made = build["notebook"](path.with_suffix(".py"))
        assert path.read_text(encoding="utf-8") == made, f"{path.name} is out of date; run python colab/build.py"


@pytest.mark.matrix
@each
def test_runs_from_start_to_end(path, tmp_path):
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    # Variables that conftest.py sets for the process of the tests are removed, as users do not have them.
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")}
    client = nbclient.NotebookClient(
        notebook, timeout=None, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env=environment)  # raises the first error of a cell
    code = [cell for cell in notebook.cells if cell.cell_type == "code"][-len(pictures(path)) :]
    shown = [any("image/png" in output.get("data", {}) for output in cell.outputs) for cell in code]
    assert shown == pictures(path)
