"""The report of `jaxstack data clean`: what was dropped and why, with examples, as a page and as a table of text."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from jaxstack.report import html, style

Summary = Mapping[str, Any]

_WORDS = {
    "exact": "exact duplicate of a kept text",
    "near": "near duplicate of a kept text",
    "language.keep": "another language",
    "overlap.min_characters": "too short without its overlap with evaluations",
    "overlap.max_pieces": "too much overlap with evaluations",
    "c4.span_sentences": "too short without sentences that other documents have",
}


def render(summary: Summary, source: str) -> str:
    """Returns the page as HTML.

    Args:
      source: what was read, in words.
    """
    sections = [
        html.section("Summary", html.table(["", "documents", "bytes", "of bytes"], _totals(summary), "figures")),
        html.section("Why documents were dropped", _reasons(summary)),
        html.section("Examples", "".join(_examples(name, of) for name, of in summary["reasons"].items())),
        html.section("Settings", _settings(summary["settings"])),
    ]
    return html.PAGE.substitute(
        title=escape(f"Cleaned: {source}"),
        style=style.style_sheet(1),
        heading="Cleaned texts",
        runs=f"<span class=run>{escape(source)}</span>",
        gaps="",
        sections="".join(sections),
    )


def text_table(summary: Summary) -> str:
    """Returns the counts as lines for the terminal."""
    rows = [["", "documents", "bytes", "of bytes"], *_totals(summary)]
    rows += [[f"  {name}", *_counts(of, summary)] for name, of in summary["reasons"].items()]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


def _totals(summary: Summary) -> list[list[str]]:
    rows = [[name, *_counts(summary[name], summary)] for name in ("read", "kept", "dropped")]
    edited = summary["edited"]["bytes"]
    return rows + ([["removed from kept documents", *_counts({"bytes": edited}, summary)]] if edited else [])


def _counts(of: Mapping[str, Any], summary: Summary) -> list[str]:
    documents = f"{of['documents']:,}" if "documents" in of else ""
    share = of["bytes"] / max(summary["read"]["bytes"], 1)
    return [documents, f"{of['bytes']:,}", f"{share:.1%}"]


def _reasons(summary: Summary) -> str:
    limits = _limits(summary["settings"])
    rows = [
        [_reason(name, limits), *_counts(of, summary), f"{of['failing']:,}", f"{of['only']:,}"]
        for name, of in summary["reasons"].items()
    ]
    if not rows:
        return "<p class=note>No document was dropped.</p>"
    note = (
        "<p class=note>A document that fails several rules counts under the first. <b>failing</b> counts all documents "
        "that fail the rule, <b>only</b> documents that fail no other rule.</p>"
    )
    return html.table(["rule", "documents", "bytes", "of bytes", "failing", "only"], rows, "figures") + note


def _reason(name: str, limits: Mapping[str, object]) -> str:
    if name in _WORDS:
        return f"{escape(name)}: {_WORDS[name]}"
    return escape(f"{name}: {_shown(limits[name])}") if name in limits else escape(name)


def _examples(name: str, of: Mapping[str, Any]) -> str:
    rows = []
    for row in of["examples"]:
        if "kept" in row:
            similarity = f", similarity {row['similarity']:.2f}" if "similarity" in row else ""
            why = f"kept: {row['kept']}{similarity}"
        else:
            why = "; ".join(f"{rule} {value:.4g} (limit {limit:.4g})" for rule, value, limit in row["failures"])
        rows.append([escape(row["name"]), escape(why), escape(row["start"])])
    title = f"<summary>{escape(name)}: {len(rows)} of {of['documents']:,}</summary>"
    return f"<details open>{title}{html.table(['document', 'why', 'begins'], rows, 'config stacked')}</details>"


def _settings(settings: Mapping[str, Any]) -> str:
    rows = [["rules", escape(", ".join(settings["rules"]))]]
    rows += [[escape(key), escape(_shown(value))] for key, value in _limits(settings).items()]
    return html.table([], rows, "config stacked")


def _limits(settings: Mapping[str, Any]) -> dict[str, object]:
    """Returns the thresholds by their dotted keys."""
    groups = {name: group for name, group in settings.items() if isinstance(group, Mapping)}
    return {f"{name}.{key}": value for name, group in groups.items() for key, value in group.items()}


def _shown(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value))
    return "null" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
