"""Writes each notebook from the Python file of the same name: `python colab/build.py` (extra `[notebook]`).

Edit the Python files, which are in jupytext's percent format. Notebooks contain no outputs, and the id of a cell is a hash of
its text, so a diff shows only what changed.
"""

import hashlib
from pathlib import Path

import jupytext
import nbformat

SOURCES = sorted(set(Path(__file__).parent.glob("*.py")) - {Path(__file__)})


def notebook(source: Path) -> str:
    """Returns the text of the .ipynb file."""
    cells = jupytext.read(source, fmt="py:percent").cells
    for cell in cells:
        cell.id = hashlib.sha256(cell.source.encode()).hexdigest()[:8]
        cell.metadata = {}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return nbformat.writes(nbformat.v4.new_notebook(cells=cells, metadata=metadata)) + "\n"


if __name__ == "__main__":
    for source in SOURCES:
        source.with_suffix(".ipynb").write_text(notebook(source), encoding="utf-8")
