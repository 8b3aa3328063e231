"""What the site has beyond the files of docs/: the README as its home, the contributors' page, the library's pages.

Links that leave docs/ lead to the repository. Badges, which another host draws, become their text.
"""

import ast
import json
import re
from pathlib import Path
from posixpath import join, normpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/jaxstack/jaxstack"

MADE = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md"}
"""Pages made of files outside docs/."""

STYLE = """\
.md-typeset table:not([class]) { font-size: 0.7rem; }
.md-typeset td:first-child code { white-space: nowrap; }
.md-typeset img { background: #fff; }
.md-typeset h1, .md-typeset .doc-heading { overflow-wrap: anywhere; }
"""
"""Pictures are drawn on white; names of the library may be long."""


def rooms() -> list[str]:
    """The public modules, as `jaxstack/__init__.py` lists them; read, not imported."""
    for node in ast.parse((ROOT / "jaxstack" / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_ROOMS":
            return sorted(ast.literal_eval(node.value))
    raise ValueError("jaxstack/__init__.py has no _ROOMS")


def library_page(room: str) -> str:
    """What a room exports, in the order of its imports; what exports nothing by name, with all its files.

    Each name is asked for where it is defined: a function may share its name with its file.
    """
    path = ROOT / "jaxstack" / room
    title = f"# jaxstack.{room}\n"
    if not path.is_dir():
        return "\n".join((title, _shown(f"jaxstack.{room}")))
    body = ast.parse((path / "__init__.py").read_text(encoding="utf-8")).body
    (exported,) = [ast.literal_eval(n.value) for n in body if ast.unparse(n).startswith("__all__ = ")] or [[]]
    if not exported:
        files = [f"jaxstack.{room}.{file.stem}" for file in sorted(path.glob("[!_]*.py"))]
        parts = [f"## {file}\n\n" + _shown(file, heading_level=3) for file in files]
        return "\n".join((title, _shown(f"jaxstack.{room}"), *parts))
    imports = [n for n in body if isinstance(n, ast.ImportFrom)]
    homes = {name.asname or name.name: f"{n.module}.{name.name}" for n in imports for name in n.names}
    names = [*(name for name in homes if name in exported), *(name for name in exported if name not in homes)]
    where = [(name, homes.get(name, f"jaxstack.{room}.{name}")) for name in names]
    whole = {"show_root_heading": True, "show_root_toc_entry": True}
    parts = [_shown(home, heading=name, toc_label=name, **whole) for name, home in where]
    return "\n".join((title, _shown(f"jaxstack.{room}", members=False), *parts))


def _shown(name: str, **options: Any) -> str:
    return f"::: {name}\n    options: {json.dumps(options)}\n"


def on_config(config: Any) -> Any:
    """Adds pages that the navigation forgot to Guides, and the library's."""
    named = set(re.findall(r"[\w/]+\.md", str(config.nav)))
    docs = ROOT / "docs"
    left = sorted({path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} - named)
    (guides,) = (entry["Guides"] for entry in config.nav if "Guides" in entry)
    guides += left
    config.nav.append({"Library": [{room: f"api/{room}.md"} for room in rooms()]})
    return config


def on_files(files: Files, config: Any) -> Files:
    for page, source in MADE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for room in rooms():
        files.append(File.generated(config, f"api/{room}.md", content=library_page(room)))
    files.append(File.generated(config, "site.css", content=STYLE))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links from where the text lies in the repository, to pages of the site or into the repository."""
    here = page.file.src_uri
    source = MADE.get(here, join("docs", here))
    # A badge that is a link: its text is the picture's.
    markdown = re.sub(r"\[!\[([^]]*)\]\(https?://[^)]*\)\]", r"[\1]", markdown)

    def target(match: re.Match[str]) -> str:
        text, link = match.groups()
        if re.match(r"[a-z]+:|#", link):
            return match[0]
        path, mark, anchor = link.partition("#")
        where = normpath(join(source, "..", path))
        made = {v: k for k, v in MADE.items()}
        inside = made.get(where) or (where.removeprefix("docs/") if where.startswith("docs/") else None)
        if inside and Path(inside).suffix in (".md", ".png", ".svg"):
            up = "../" * here.count("/")
            return f"{text}({up}{inside}{mark}{anchor})"
        if not (ROOT / where).exists():
            raise ValueError(f"{source} links to {link}, which is not there")
        return f"{text}({REPOSITORY}/{'tree' if (ROOT / where).is_dir() else 'blob'}/main/{where}{mark}{anchor})"

    # Not within blocks of code.
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.M | re.S)
    parts[::2] = [re.sub(r"(!?\[[^]]*\])\(([^)\s]+)\)", target, part) for part in parts[::2]]
    return "".join(parts)
