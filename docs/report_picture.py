"""Draws `docs/report.png`: `python docs/report_picture.py runs/quickstart`. It needs Chromium.

The picture shows the page of a run as a browser draws it, with the pointer over each chart.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from jaxstack.report import page, runs

SIZE = (1240, 1208)
POINTER = ".at:nth-last-of-type(23)"
"""The strip under the pointer: step 440 of 660, where a line has both losses."""


def main(run: str, to: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    html = page.render(runs.read_runs([Path(run)])).replace(".at:hover", POINTER)
    html = re.sub(r"last line [-\d: ]+UTC", "", html)  # another day, the same picture
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "page.html").write_text(html, encoding="utf-8")
        size = f"--window-size={SIZE[0]},{SIZE[1]}"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/own"]
        subprocess.run([browser, *flags, size, f"--screenshot={to}", f"{folder}/page.html"], check=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(__file__).parent / "report.png")
