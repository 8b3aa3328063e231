"""Adds pages to the site beyond the files of docs/: the README as its home, CONTRIBUTING.md, the library's reference.

Links that leave docs/ point to the repository. A badge, which another host draws, becomes its text.
"""

import ast
import json
import re
import sys
from html import unescape
from pathlib import Path
from posixpath import join, normpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/jaxstack/jaxstack"

MADE = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md"}
"""Pages made from files outside docs/."""

STYLE = """\
.md-typeset table:not([class]) { font-size: 0.7rem; }
.md-typeset td:first-child code, .md-typeset code .flag { white-space: nowrap; }
.md-typeset th code, .md-typeset td code { word-break: normal; }
.md-typeset img { background: #fff; }
.md-typeset h1, .md-typeset .doc-heading { overflow-wrap: anywhere; }
@media screen and (max-width: 44.9375em) {
  .md-typeset table:not([class]) th, .md-typeset table:not([class]) td { padding: 0.5em 0.6em; min-width: 3.5rem; }
  .md-typeset table:not([class]) td:last-child, .md-typeset table:not([class]) td.words { min-width: 8rem; }
  .md-typeset table:not([class]) td.sentence { min-width: 12rem; }
  .md-typeset p:has(> img:only-child) { overflow-x: auto; }
  .md-typeset p > img:only-child { min-width: 32rem; }
}
"""
"""Pictures have a white background; names of the library may be long. A flag is never broken behind its hyphens, and
code of a table only between its words. On a phone, you scroll a wide table and a picture: cells keep room for their
words, and the picture's letters can be read."""

WORDS, SENTENCE = 18, 45
"""Least letters of a cell that is `words` or a `sentence` to the style sheet."""

FLAG = re.compile(r"(?<![\w-])(--?\w[\w.]{0,22}=?)")
"""A flag in code, up to its value: a wide table may break the value."""

WORD = re.compile(r"(?<!_)([/_.,=])(?=[A-Za-z0-9])")
"""The end of a word of code, after which a line may break."""

GROUPS = {
    "Models": ["models", "moe", "kernels", "generate", "hf"],
    "Parallelism": ["sharding", "pipeline"],
    "Training": ["training", "config", "data", "checkpoint", "tracking", "runtime"],
    "Tools": ["planner", "report", "common"],
}
"""The library's reference in groups; a public room that no group names is added to the last one."""

TITLE = """# Library

Look up a function by the room that holds it. `import jaxstack as js` gives every room as an attribute.
"""


def groups() -> dict[str, list[str]]:
    """Returns the public rooms (folders of `jaxstack/` with attributes of the package) by group."""
    sys.path.insert(0, str(ROOT))
    import jaxstack

    public = {name for name in dir(jaxstack) if (ROOT / "jaxstack" / name / "__init__.py").is_file()}
    named = {room for rooms in GROUPS.values() for room in rooms}
    if missing := named - public:
        raise ValueError(f"docs/site/hooks.py names rooms that are not public: {sorted(missing)}")
    *first, last = GROUPS
    return {group: GROUPS[group] for group in first} | {last: GROUPS[last] + sorted(public - named - {"cli"})}


def _module(room: str) -> ast.Module:
    return ast.parse((ROOT / "jaxstack" / room / "__init__.py").read_text(encoding="utf-8"))


def library_index() -> str:
    """Returns the overview: a table of rooms for each group, with the first line of each room's docstring."""
    parts = [TITLE]
    for group, rooms in groups().items():
        lines = {room: (ast.get_docstring(_module(room)) or "").partition("\n\n")[0] for room in rooms}
        rows = [f"| [`jaxstack.{room}`]({room}.md) | {' '.join(line.split())} |" for room, line in lines.items()]
        parts.append("\n".join([f"## {group}\n", "| room | what it holds |", "|---|---|", *rows]))
    short = "`js.model` is `jaxstack.models.decoder`, and `js.params` is `jaxstack.models.params`."
    return "\n\n".join([*parts, short]) + "\n"


def library_page(room: str) -> str:
    """Returns the page of a room: the names that it exports, in the order of its imports, else all of its files.

    Each name is looked up where it is defined, since a function may have the name of its file.
    """
    path = ROOT / "jaxstack" / room
    title = f"# jaxstack.{room}\n"
    body = _module(room).body
    (exported,) = [ast.literal_eval(n.value) for n in body if ast.unparse(n).startswith("__all__ = ")] or [[]]
    if not exported:
        files = [f"jaxstack.{room}.{file.stem}" for file in sorted(path.glob("[!_]*.py"))]
        parts = [f"## {file}\n\n" + _shown(file, heading_level=3) for file in files]
        return "\n".join((title, _shown(f"jaxstack.{room}"), *parts))
    imports = [n for n in body if isinstance(n, ast.ImportFrom)]
    homes = {name.asname or name.name: f"{n.module}.{name.name}" for n in imports for name in n.names}
    names = [*(name for name in homes if name in exported), *(name for name in exported if name not in homes)]
    where = [(name, homes.get(name, f"jaxstack.{room}.{name}")) for name in names]
    where = [(name, home) for name, home in where if home.startswith(f"jaxstack.{room}.")]  # others have another page
    heading = {"show_root_heading": True, "show_root_toc_entry": True}
    parts = [_shown(home, heading=name, toc_label=name, **heading) for name, home in where]
    return "\n".join((title, _shown(f"jaxstack.{room}", members=False), *parts))


def _shown(name: str, **options: Any) -> str:
    return f"::: {name}\n    options: {json.dumps(options)}\n"


def on_config(config: Any) -> Any:
    """Adds the library's reference to the navigation."""
    pages = [{group: [{room: f"api/{room}.md"} for room in rooms]} for group, rooms in groups().items()]
    config.nav.append({"Library": ["api/index.md", *pages]})
    return config


def on_files(files: Files, config: Any) -> Files:
    for page, source in MADE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "api/index.md", content=library_index()))
    for rooms in groups().values():
        for room in rooms:
            files.append(File.generated(config, f"api/{room}.md", content=library_page(room)))
    files.append(File.generated(config, "site.css", content=STYLE))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Resolves links relative to the file in the repository, to pages of the site or to the repository."""
    here = page.file.src_uri
    source = MADE.get(here, join("docs", here))
    # A badge that is a link keeps the text of its picture, in parentheses: it follows the name of a notebook.
    markdown = re.sub(r"\[!\[([^]]*)\]\(https?://[^)]*\)\](\([^)]*\))", r"([\1]\2)", markdown)

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
            raise ValueError(f"{source} links to {link}, which does not exist")
        return f"{text}({REPOSITORY}/{'tree' if (ROOT / where).is_dir() else 'blob'}/main/{where}{mark}{anchor})"

    # Blocks of code stay as they are.
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.M | re.S)
    parts[::2] = [re.sub(r"(!?\[[^]]*\])\(([^)\s]+)\)", target, part) for part in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, **_: Any) -> str:
    """Keeps each flag in one line, in code that is not a block, and lets other code break between its words.

    Cells of tables get a class that says how much room they need.
    """

    def marked(match: re.Match[str]) -> str:
        if match[1] is None:  # a block, or the first column of a table
            return match[0]
        parts = FLAG.split(match[1])  # flags are every second part
        parts[::2] = [WORD.sub(r"\1<wbr>", part) for part in parts[::2]]
        parts[1::2] = [f'<span class="flag">{flag}</span>' for flag in parts[1::2]]
        return f"<code>{''.join(parts)}</code>"

    def sized(match: re.Match[str]) -> str:
        letters = len(unescape(re.sub(r"<[^>]*>", "", match[2])).strip())
        if letters < WORDS:
            return match[0]
        return f'<td class="{"words" if letters < SENTENCE else "sentence"}"{match[1]}>{match[2]}</td>'

    html = re.sub(r"<pre.*?</pre>|<tr>\s*<td>\s*<code>[^<]*</code>|<code>([^<]*)</code>", marked, html, flags=re.S)
    return re.sub(r"<td((?: style=[^>]*)?)>(.*?)</td>", sized, html, flags=re.S)
