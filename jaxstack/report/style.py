"""Colors and style sheet of the page, in light and dark. Charts name their colors by variables of this sheet."""

import re
from string import Template

_RUNS = (  # light, dark
    ("#2563eb", "#6ea8fe"),
    ("#ea580c", "#fb923c"),
    ("#059669", "#34d399"),
    ("#9333ea", "#c084fc"),
    ("#dc2626", "#f87171"),
    ("#0e7490", "#22d3ee"),
    ("#a16207", "#facc15"),
    ("#db2777", "#f472b6"),
)
MAX_RUNS = len(_RUNS)
"""Maximum number of runs on a page: there are as many colors."""

_CATEGORIES = {
    "step": "#15803d",
    "compile": "#7c3aed",
    "start": "#64748b",
    "data": "#c2410c",
    "rollout": "#0f766e",
    "evaluation": "#0369a1",
    "checkpoint": "#a16207",
    "profile": "#be185d",
    "end": "#475569",
    "lost": "#dc2626",
    "down": "#7f1d1d",
}

# Placeholders that matplotlib writes, and `use_page_colors` replaces. Nothing else is drawn in these colors.
INK = "#000001"
"""Placeholder for the color of text."""
GRID = "#000002"
"""Placeholder for the color of grid lines."""


def run_color(i: int) -> str:
    """Returns the placeholder for the color of run i."""
    return f"#0001{i:02}"


def page_color(i: int) -> str:
    """Returns the color of run i, for what the page itself draws."""
    return f"var(--run{i})"


def use_page_colors(svg: str) -> str:
    """Returns the SVG with placeholders replaced by the color variables of the page."""
    svg = re.sub(r"#0001(\d\d)", lambda found: page_color(int(found[1])), svg)
    return svg.replace(INK, "var(--soft)").replace(GRID, "var(--line)")


def css_class(category: str) -> str:
    """Returns the CSS class of a category of time."""
    return f"k-{category}" if category in _CATEGORIES else "k-other"


def style_sheet(runs: int) -> str:
    """Returns the style sheet of a page of this many runs.

    Tables with a column for each run are shown row by row on a window that is too narrow for the columns.
    """
    columns = _LABEL + _COLUMN * runs
    light, dark = ("".join(f"--run{i}: {pair[shade]}; " for i, pair in enumerate(_RUNS)) for shade in (0, 1))
    categories = "".join(f".{css_class(name)} {{ background: {color} }}\n" for name, color in _CATEGORIES.items())
    return _SHEET.substitute(
        light=light,
        dark=dark,
        categories=categories,
        width=max(1180, columns),
        stacked=max(640, columns if runs > 1 else 0),
        narrow=NARROW,
    )


NARROW = 700
"""Windows of at most this many pixels show the narrow chart of the loss."""

_LABEL = 320
_COLUMN = 160
"""Pixels of a table beside the columns of runs (labels and margins), and of each such column."""

_SHEET = Template("""\
:root { color-scheme: light dark; --ink: #1e293b; --soft: #64748b; --line: #e2e8f0; --back: #f8fafc; --card: #fff;
  $light}
@media (prefers-color-scheme: dark) {
  :root { --ink: #e2e8f0; --soft: #94a3b8; --line: #334155; --back: #0f172a; --card: #1e293b;
    $dark}
}
* { box-sizing: border-box }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif }
main { max-width: ${width}px; margin: 0 auto; padding: 32px 24px 64px; overflow-wrap: anywhere }
h1 { margin: 0 0 4px; font-size: 26px; letter-spacing: -.01em }
h2 { margin: 0 0 14px; font-size: 18px }
section { margin-top: 24px; padding: 20px 24px; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px }
.runs { display: flex; flex-wrap: wrap; gap: 4px 28px }
.run { display: flex }
.run small { margin-left: 10px; color: var(--soft) }
.gap { margin: 10px 0 0; padding: 6px 12px; border-left: 3px solid var(--run1) }
.swatch { display: inline-block; flex: none; width: 11px; height: 11px; margin-right: 8px; border-radius: 3px;
  print-color-adjust: exact }
.run > .swatch { margin-top: 6px }
.name { display: inline-flex; align-items: baseline; max-width: 16em; overflow-wrap: anywhere; text-align: left;
  white-space: normal }
.pair { display: flex; flex-wrap: wrap; gap: 0 24px }
.pair section { flex: 1 1 auto; min-width: min(470px, 100%); max-width: 100% }
.pair .note, .pair .account { width: 0; min-width: 100% } /* only tables set the width of a section */
.part { display: inline-block; min-width: 4.4em; text-align: right; color: var(--soft); font-weight: 400 }
.note, .legend { margin: 14px 0 0; color: var(--soft); font-size: 13.5px }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: break-word }
th, td { padding: 5px 28px 5px 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top;
  font-weight: 400 }
tbody tr:last-child > * { border-bottom: 0 }
thead th { color: var(--soft); font-weight: 600 }
th[scope=row] { color: var(--soft) }
.figures { min-width: 100% }
.figures td, .figures thead th { padding: 5px 0 5px 28px; text-align: right }
.figures td { white-space: nowrap; font-weight: 600 }
.figures thead .name { text-align: right }
.figures th[scope=row] { padding-right: 0 }
.config td, .config th[scope=row] { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
.config th[scope=row] { white-space: nowrap }
.config td { white-space: pre-wrap; overflow-wrap: anywhere }
.events td { white-space: nowrap }
.events .name { width: max-content }
.events td:last-child { white-space: normal; overflow-wrap: anywhere }
.of { display: none } /* the name of a run beside each of its values, if rows are shown one below the other */
.account { margin-bottom: 12px }
.bar { display: flex; height: 30px; border-radius: 6px; overflow: hidden; color: #fff; font-size: 13px;
  line-height: 30px; text-align: center; print-color-adjust: exact }
.bar span { overflow: hidden }
.bar span::before { content: "\\200b" } /* a label that does not fit goes to a second line, which is hidden */
.bar b { display: inline-block; padding: 0 4px; font-weight: 600; white-space: nowrap }
$categories.k-other { background: #94a3b8 }
figure { margin: 0 }
figure img.drawn { display: block; max-width: 100%; margin-top: 6px; image-rendering: pixelated }
figure svg { display: block; width: 100%; height: auto; margin-top: 6px }
.grid svg, .narrow svg { max-width: 560px }
.grid .long { grid-column: 1 / -1 }
.long .wide svg { max-width: none }
.narrow { display: none }
.at .hit { fill: transparent }
.at > :not(.hit) { display: none; pointer-events: none }
.at:hover > * { display: inline }
.at path { stroke: var(--soft) }
.at .box { fill: var(--card); stroke: var(--line) }
.at text { fill: var(--ink) }
figcaption { font-weight: 600 }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(max(330px, 34%), 100%), 1fr)); gap: 28px 32px;
  margin-top: 28px }
.legend { display: flex; flex-wrap: wrap; gap: 2px 22px; margin-top: 8px }
.stroke { display: inline-block; width: 26px; margin-right: 7px; border-top: 3px solid currentColor;
  vertical-align: middle }
.faint { border-top-width: 1px; opacity: .6 }
.dots { border-top-style: dotted }
.dashes { border-top-width: 2px; border-top-style: dashed }
details + details { margin-top: 10px }
summary { cursor: pointer }
details .scroll { margin-top: 10px }
@media (max-width: ${narrow}px) {
  main { padding: 20px 10px 40px }
  section { margin-top: 14px; padding: 14px }
  .wide { display: none }
  .narrow { display: block }
}
@media (max-width: ${stacked}px) {
  .stacked, .stacked tbody { display: block; min-width: 0 }
  .stacked thead { display: none }
  .stacked tr { display: flex; flex-wrap: wrap; gap: 0 20px; padding: 6px 0; border-bottom: 1px solid var(--line) }
  .stacked tr:last-child { border-bottom: 0 }
  .stacked th[scope=row], .stacked td { padding: 0; border: 0; text-align: left; white-space: pre-wrap }
  .compared td { display: flex; flex: 1 1 100%; min-width: 0; justify-content: space-between; gap: 20px }
  .compared td > :last-child { flex: none; max-width: 75% }
  .compared .of { display: block; min-width: 0; font: 400 13px/1.7 system-ui, sans-serif; color: var(--soft) }
  .compared.config td { flex-wrap: wrap; gap: 0 20px }
  .compared.config .of { flex: 0 0 45% }
  .stacked .name { display: flex; max-width: 50vw } /* one line: the whole name is at the top, beside the same color */
  .stacked .of .name { max-width: none }
  .stacked wbr { display: none }
  .stacked .name span { overflow: hidden; white-space: nowrap; text-overflow: ellipsis }
}
@media print {
  body { background: none }
  main { padding: 0 }
  section { padding: 12px 0; border: 0 }
  figure, tr, .account { break-inside: avoid }
  h2 { break-after: avoid }
  .grid { grid-template-columns: 1fr 1fr }
}
""")
