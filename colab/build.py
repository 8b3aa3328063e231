"""Writes each notebook from the Python file of the same name: `python colab/build.py` (extra `[notebook]`).

Edit the Python files, which are in jupytext's percent format. A cell `# include parts/install.py images` becomes the file with
the list EXTRAS of the words behind its name. Notebooks contain no outputs, and the id of a cell is a hash of
its text, so a diff shows only what changed.
"""

import hashlib
from pathlib import Path

import jupytext
import nbformat

SOURCES = sorted(set(Path(__file__).parent.glob("*.py")) - {Path(__file__)})


def included(cell: str) -> str:
    """Returns the text of a cell, with a file in place of the line that includes it."""
    match cell.split():
        case ["#", "include", name, *extras]:
            text = (Path(__file__).parent / name).read_text(encoding="utf-8").strip()
            assert text.count("EXTRAS = []") == 1
            return text.replace("EXTRAS = []", f"EXTRAS = {extras!r}".replace("'", '"'))
    return cell


def notebook(source: Path) -> str:
    """Returns the text of the .ipynb file."""
    cells = jupytext.read(source, fmt="py:percent").cells
    for cell in cells:
        cell.source = included(cell.source)
        cell.id = hashlib.sha256(cell.source.encode()).hexdigest()[:8]
        cell.metadata = {}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return nbformat.writes(nbformat.v4.new_notebook(cells=cells, metadata=metadata)) + "\n"


if __name__ == "__main__":
    for source in SOURCES:
        source.with_suffix(".ipynb").write_text(notebook(source), encoding="utf-8")
