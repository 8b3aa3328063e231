"""Renders the tables of `docs/coming_from.md` from `jaxstack/config/reading/other_tools.yaml`.

python docs/coming_from.py
"""

import re
from pathlib import Path

from jaxstack.config.reading.other_tools import table, tables

PAGE = Path(__file__).with_suffix(".md")


def rendered(page: str) -> str:
    """Returns the page with the tables of the data."""
    for tool in tables():
        rows = rf"(## From {tool}\n\n\|.*\n\|---\|---\|\n)(?:\|.*\n)+"
        page = re.sub(rows, lambda found, tool=tool: found[1] + table(tool), page)
    return page


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
