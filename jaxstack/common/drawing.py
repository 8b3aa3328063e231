"""One style for all pictures: colors that a color-blind reader tells apart, one font, and no frame at top and right."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxstack.common import files

if TYPE_CHECKING:  # matplotlib takes a second to import
    from matplotlib.figure import Figure

# Okabe and Ito 2008, https://jfly.uni-koeln.de/color. Neighbors differ in lightness, too, for prints in gray.
BLUE = "#0072b2"
ORANGE = "#e69f00"
GREEN = "#009e73"
RED = "#d55e00"
SKY = "#56b4e9"
PURPLE = "#cc79a7"
YELLOW = "#f0e442"
GRAY = "#b3b3b3"
INK = "#444444"

COLORS = (BLUE, ORANGE, GREEN, RED, SKY, PURPLE, YELLOW, GRAY)
"""Colors of curves and bars, in their order."""

STYLE: dict[Any, Any] = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.edgecolor": INK,
    "axes.titlesize": 10,
    "axes.grid": False,
    "axes.prop_cycle": f"cycler('color', {list(COLORS)})",
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",  # matplotlib brings it along
    "font.size": 9,
    "image.cmap": "viridis",
    "legend.fontsize": 8,
    "legend.frameon": False,
    "savefig.dpi": 130,
}
"""Settings that replace matplotlib's defaults. In a notebook: `plt.rcParams.update(STYLE)`."""


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator["Figure"]:
    """Yields a figure to draw on, and writes it at the end of the block.

    Args:
      path: path of the picture. Its suffix is the format, see `files.PICTURES`.
      width: inches.
      height: inches.
    """
    import matplotlib
    from matplotlib.figure import Figure

    form = path.suffix.removeprefix(".")
    # Without the version of matplotlib in it, the same picture has the same bytes.
    metadata = {"png": {"Software": None}, "svg": {"Date": None}}.get(form)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height))
        yield figure
        with files.atomic_file(path) as file:
            figure.savefig(file, format=form, metadata=metadata)
