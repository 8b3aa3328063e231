"""Tests that the notebooks of `colab/` match their Python sources and run from start to end, as users run them."""

import os
import runpy
from pathlib import Path

import pytest

COLAB = Path(__file__).parent.parent / "colab"
NOTEBOOKS = sorted(COLAB.glob("*.ipynb"))

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@each
def test_badges_open_it(path):
    """The badge is in the notebook and in the README."""
    badge = f"https://colab.research.google.com/github/jaxstack/jaxstack/blob/main/colab/{path.name}"
    assert badge in path.read_text(encoding="utf-8")
    assert badge in (COLAB.parent / "README.md").read_text(encoding="utf-8")


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
