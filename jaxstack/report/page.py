"""The page: one file that asks no network for anything, in which all that comes from a run's files is escaped."""

import time
from collections.abc import Iterable, Sequence
from html import escape
from string import Template

from jaxstack.report import charts, style
from jaxstack.report.runs import DASH, Run, differences, events, kinds, share, shown, summary

MOST_EVENTS = 200  # in the table


def page(runs: Sequence[Run]) -> str:
    """The whole page as HTML."""
    sections = [
        f"<div class=pair>{_section('Summary', _summary(runs))}{_section('Where the time went', _goodput(runs))}</div>",
        _section("Training", _charts(runs)),
        _section("Events", _events(runs)),
        _section("What differs", _differences(runs) if len(runs) > 1 else ""),
        _section("Configuration", "".join(map(_config, runs))),
    ]
    return _PAGE.substitute(
        title=escape(", ".join(run.name for run in runs)),
        style=style.sheet(),
        runs="".join(_run(i, run) for i, run in enumerate(runs)),
        gaps="".join(f"<p class=gap>{_name(run, runs)}{escape(gap)}</p>" for run in runs for gap in run.gaps),
        sections="".join(sections),
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>" if body else ""


def _run(i: int, run: Run) -> str:
    last = max((record["time"] for record in run.records if "time" in record), default=None)
    when = f"last line {time.strftime('%Y-%m-%d %H:%M', time.gmtime(last))} UTC" if last else ""
    return f"<span class=run>{_swatch(i)}<b>{escape(run.name)}</b><small>{when}</small></span>"


def _swatch(i: int) -> str:
    return f'<i class=swatch style="background:var(--run{i})"></i>'


def _name(run: Run, runs: Sequence[Run]) -> str:
    return f"{escape(run.name)}: " if len(runs) > 1 else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str) -> str:
    """A table of cells that are HTML already; the first of a row is its heading. An empty head leaves it out."""
    top = f"<thead><tr>{''.join(f'<th scope=col>{cell}</th>' for cell in head)}</tr></thead>" if any(head) else ""
    body = "".join(
        f"<tr><th scope=row>{first}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for first, *cells in rows
    )
    return f'<div class=scroll><table class="{kind}">{top}<tbody>{body}</tbody></table></div>'


def _heads(runs: Sequence[Run]) -> list[str]:
    return ["", *(f"{_swatch(i)}{escape(run.name)}" for i, run in enumerate(runs))] if len(runs) > 1 else []


def _summary(runs: Sequence[Run]) -> str:
    found = [summary(run) for run in runs]
    return _table(_heads(runs), [[key, *(escape(figures[key]) for figures in found)] for key in found[0]], "figures")


def _goodput(runs: Sequence[Run]) -> str:
    timed = [run for run in runs if any(run.spent.values())]
    if not timed:
        return "<p class=note>The logs do not say where the seconds went: they are from before that was recorded.</p>"
    bars = "".join(
        f"<div class=account>{escape(run.name) if len(runs) > 1 else ''}{charts.bar(run)}</div>" for run in timed
    )
    rows = [
        [f'<i class="swatch {style.tone(kind)}"></i>{escape(kind)}', *(_share(*share(run, kind)) for run in runs)]
        for kind in kinds(timed)
    ]
    walls = [sum(run.spent.values()) for run in runs]
    rows.append(["wall clock", *(_share(f"{wall:,.1f} s", "100.0%") if wall else DASH for wall in walls)])
    return (
        f"{bars}{_table(_heads(runs), rows, 'figures')}"
        "<p class=note>Goodput is the part of <b>step</b>. <b>data</b> is waiting for batches, <b>checkpoint</b> what "
        "training waited for saves, <b>lost</b> work that was done again after a restart or a return to a checkpoint, "
        "<b>down</b> the time without a process.</p>"
    )


def _share(seconds: str, part: str) -> str:
    return f"{escape(seconds)}<span class=part>{escape(part)}</span>"


def _charts(runs: Sequence[Run]) -> str:
    found = {chart: charts.drawn(chart, runs) for chart in charts.CHARTS}
    pictures = "".join(_picture(chart.title, svg) for chart, svg in found.items() if svg)
    missing = [chart for chart, svg in found.items() if svg is None and not chart.key.startswith("moe_")]
    return (
        _picture(charts.LOSS.title, charts.loss(runs), _legend(runs))
        + f"<div class=grid>{pictures}</div><p class=note>{escape(' '.join(_notes(runs, missing)))}</p>"
    )


def _notes(runs: Sequence[Run], missing: Sequence[charts.Chart]) -> list[str]:
    """What the pictures do not show by themselves."""
    lines = max(len(run.training) for run in runs)
    middle = f"{charts.width(lines):,}" if len(runs) == 1 else "a fiftieth of a run's"
    notes = [f"A smoothed point is the mean of {middle} training lines. A spike is marked if it fell on such a line."]
    if lines > charts.POINTS:
        notes.append(
            f"Of up to {lines:,} lines a picture shows at most {charts.POINTS:,} points of each curve: the least and "
            "the greatest of equal stretches."
        )
    if hidden := charts.hidden(runs):
        notes.append(f"Training losses that are not finite or lie beyond the picture's edge: {hidden:,}.")
    if missing:
        notes.append(f"Not in these logs: {', '.join(chart.title.split(' (')[0] for chart in missing)}.")
    return notes


def _legend(runs: Sequence[Run]) -> str:
    names = "".join(f"<span>{_swatch(i)}{escape(run.name)}</span>" for i, run in enumerate(runs))
    signs = "".join(f"<span><b>{sign}</b> {kind}</span>" for kind, sign in _SIGNS.items())
    return (
        f"<p class=legend>{names if len(runs) > 1 else ''}"
        '<span><i class="stroke faint"></i>training, each line</span>'
        '<span><i class=stroke></i>smoothed</span><span><i class="stroke dots"></i>held out</span>'
        f"{signs}</p>"
    )


_SIGNS = dict(zip(charts.MARKS, "▲✕◄►", strict=True))


def _picture(title: str, svg: str, below: str = "") -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption><div class=scroll>{svg}</div>{below}</figure>"


def _events(runs: Sequence[Run]) -> str:
    found = [(step, i, kind, what) for i, run in enumerate(runs) for step, kind, what in events(run)]
    rows = [
        [f"{step:,}", *([_swatch(i) + escape(runs[i].name)] if len(runs) > 1 else []),
         f"{_SIGNS.get(kind, '')} {escape(kind)}", escape(what)]
        for step, i, kind, what in sorted(found, key=lambda event: event[0])[-MOST_EVENTS:]
    ]  # fmt: skip
    more = f"<p class=note>The last {MOST_EVENTS} of {len(found):,}.</p>" if len(found) > MOST_EVENTS else ""
    head = ["step", *(["run"] if len(runs) > 1 else []), "event", ""]
    return _table(head, rows, "events") + more if rows else ""


def _differences(runs: Sequence[Run]) -> str:
    rows = [[escape(key), *map(escape, values)] for key, values in differences(runs).items()]
    return _table(_heads(runs), rows, "config") if rows else "<p class=note>The configurations are equal.</p>"


def _config(run: Run) -> str:
    if not run.config:
        return ""
    rows = [[escape(key), escape(shown(value))] for key, value in run.config.items()]
    return f"<details><summary>{escape(run.name)}: {len(rows)} values</summary>{_table([], rows, 'config')}</details>"


_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
$style</style>
</head>
<body>
<main>
<header><h1>Training report</h1><div class="runs">$runs</div>$gaps</header>
$sections
</main>
</body>
</html>
""")
