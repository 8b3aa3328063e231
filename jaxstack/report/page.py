"""The page: one HTML file that loads nothing from a network. All text from a run's files is escaped."""

import re
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape

from jaxstack.common.counts import plural
from jaxstack.report import charts, evaluations, heat_maps, html, style
from jaxstack.report.comparison import Comparison, compare, summary_rows
from jaxstack.report.runs import (
    MISSING,
    LoggedRun,
    config_differences,
    format_number,
    format_value,
    list_events,
    time_categories,
    time_share,
)

MAX_GRIDS = 4
"""Maximum number of grids of pictures of a run."""
MAX_EVENTS = 200
"""Maximum number of rows of the table of events."""


def render(runs: Sequence[LoggedRun]) -> str:
    """Returns the whole page as HTML."""
    found = compare(runs)
    gaps = [f"{_name(run, runs)}{escape(gap)}" for run in runs for gap in run.gaps] + [*map(escape, found.notes)]
    summary = html.section("Summary", _summary(runs))
    time_spent = html.section("Where the time went", _goodput(runs))
    sections = [
        f"<div class=pair>{summary}{time_spent}</div>",
        html.section("Training", _charts(runs, found)),
        html.section("Evaluations", _evaluations(runs)),
        html.section("Watched values", "".join(_watched(run, runs) for run in runs)),
        html.section("Pictures", "".join(map(_drawn, runs))),
        html.section("Completions", "".join(_completions(run, runs) for run in runs)),
        html.section("Events", _events(runs)),
        html.section("Differences", _differences(runs) if len(runs) > 1 else ""),
        html.section("Configuration", "".join(map(_config, runs))),
    ]
    return html.PAGE.substitute(
        title=escape(", ".join(run.name for run in runs)),
        style=style.style_sheet(len(runs)),
        heading="Training report",
        runs="".join(_run(i, run) for i, run in enumerate(runs)),
        gaps="".join(f"<p class=gap>{gap}</p>" for gap in gaps),
        sections="".join(sections),
    )


def _run(i: int, run: LoggedRun) -> str:
    last = max((record["time"] for record in run.records if "time" in record), default=None)
    when = f"last line {time.strftime('%Y-%m-%d %H:%M', time.gmtime(last))} UTC" if last else ""
    return f"<span class=run>{_swatch(i)}<span><b>{_breakable(run.name)}</b> <small>{when}</small></span></span>"


def _swatch(i: int) -> str:
    return f'<i class=swatch style="background:var(--run{i})"></i>'


def _breakable(name: str) -> str:
    """Returns a name as HTML that may break into lines after its parts."""
    return re.sub(r"([_/.])(?=.)", r"\1<wbr>", escape(name))


def _named(i: int, run: LoggedRun) -> str:
    return f"<span class=name>{_swatch(i)}<span>{_breakable(run.name)}</span></span>"


def _name(run: LoggedRun, runs: Sequence[LoggedRun]) -> str:
    return f"{_breakable(run.name)}: " if len(runs) > 1 else ""


def _compared(runs: Sequence[LoggedRun], rows: Iterable[Sequence[str]], kind: str) -> str:
    """Returns a table of one value for each run. Each value has the name of its run, for windows without columns."""
    if len(runs) == 1:
        return html.table([], rows, kind)
    names = [_named(i, run) for i, run in enumerate(runs)]

    def beside(cells: Sequence[str]) -> list[str]:
        return [f"<span class=of>{name}</span><span>{cell}</span>" for name, cell in zip(names, cells, strict=True)]

    return html.table(["", *names], ([first, *beside(cells)] for first, *cells in rows), f"{kind} stacked compared")


def _summary(runs: Sequence[LoggedRun]) -> str:
    return _compared(runs, [[escape(key), *map(escape, row)] for key, row in summary_rows(runs).items()], "figures")


def _goodput(runs: Sequence[LoggedRun]) -> str:
    timed = [run for run in runs if any(run.spent.values())]
    if not timed:
        return "<p class=note>These logs are from a version that did not record how time was spent.</p>"
    bars = "".join(
        f"<div class=account>{_breakable(run.name) if len(runs) > 1 else ''}{charts.time_bar(run)}</div>"
        for run in timed
    )
    rows = [
        [
            f'<i class="swatch {style.css_class(name)}"></i>{escape(name)}',
            *(_share(*time_share(run, name)) for run in runs),
        ]
        for name in time_categories(timed)
    ]
    walls = [sum(run.spent.values()) for run in runs]
    rows.append(["wall clock", *(_share(f"{wall:,.1f} s", "100.0%") if wall else MISSING for wall in walls)])
    return (
        f"{bars}{_compared(runs, rows, 'figures')}"
        "<p class=note>Goodput is the share of <b>step</b>. <b>data</b> is time spent waiting for batches, "
        "<b>checkpoint</b> time spent waiting for saves, <b>lost</b> work repeated after a restart or a rollback, and "
        "<b>down</b> time without a process.</p>"
    )


def _share(seconds: str, part: str) -> str:
    return f"{escape(seconds)}<span class=part>{escape(part)}</span>"


def _charts(runs: Sequence[LoggedRun], losses: Comparison) -> str:
    wanted = (*charts.source_charts(runs), *charts.reward_charts(runs), *charts.CHARTS)
    missing = [chart for chart in wanted if not charts.has_values(chart, runs) and not chart.key.startswith("moe_")]
    curves = "".join(
        _picture(chart.title, *_both(partial(charts.loss_chart, chart), charts.WIDE, charts.NARROW))
        for chart in losses.charts
    )
    notes = escape(" ".join(_notes(runs, losses, missing)))
    return f"{curves}{_legend(runs)}{_grid(wanted, runs)}<p class=note>{notes}</p>"


def _grid(wanted: Iterable[charts.Chart], runs: Sequence[LoggedRun]) -> str:
    """Returns the charts that some run has values for, two in a row on wide windows; an odd one has a whole row."""
    shown = [chart for chart in wanted if charts.has_values(chart, runs)]
    pictures = [_picture(chart.title, charts.metric_chart(chart, runs)) for chart in shown[: len(shown) // 2 * 2]]
    if len(shown) % 2:
        draw = partial(charts.metric_chart, shown[-1], runs)
        pictures.append(_picture(shown[-1].title, *_both(draw, charts.LONG, charts.SMALL), kind="long"))
    return f"<div class=grid>{''.join(pictures)}</div>"


def _evaluations(runs: Sequence[LoggedRun]) -> str:
    found = evaluations.rows([run.evaluations for run in runs], MISSING)
    table = _compared(runs, [[escape(name), *map(escape, row)] for name, row in found.items()], "figures")
    return f"{table}{_grid(charts.evaluation_charts(runs), runs)}" if found else ""


def _both(draw: Callable[[tuple[int, int]], str], wide: tuple[int, int], narrow: tuple[int, int]) -> list[str]:
    """Returns a chart for wide and for narrow windows. The page shows one of them."""
    return [f"<div class={kind}>{draw(size)}</div>" for kind, size in (("wide", wide), ("narrow", narrow))]


def _notes(runs: Sequence[LoggedRun], losses: Comparison, missing: Sequence[charts.Chart]) -> list[str]:
    """Returns sentences about smoothing, and about values that the charts do not show."""
    lines = max(len(run.training) for run in runs)
    width = plural(charts.smoothing_width(lines), "training line", spec=",")
    middle = width if len(runs) == 1 else "a fiftieth of a run's training lines"
    notes = [f"A smoothed point is the mean of {middle}. A spike is marked if it fell on such a line."]
    if lines > charts.MAX_POINTS:
        notes.append(
            f"The logs have up to {plural(lines, 'line', spec=',')}. A chart shows at most {charts.MAX_POINTS:,} "
            f"points of each curve: the minimum and maximum of equal intervals."
        )
    if hidden := sum(map(charts.count_hidden, losses.charts)):
        notes.append(f"Training losses that are not finite or beyond the edge of the chart: {hidden:,}.")
    if missing:
        notes.append(f"Not in these logs: {', '.join(chart.title.split(' (')[0] for chart in missing)}.")
    return notes


def _legend(runs: Sequence[LoggedRun]) -> str:
    names = "".join(_named(i, run) for i, run in enumerate(runs))
    there = {event.kind for run in runs for event in list_events(run)}
    signs = "".join(f"<span><b>{sign}</b> {kind}</span>" for kind, sign in _SIGNS.items() if kind in there)
    ink = f' style="color:{style.page_color(0)}"' if len(runs) == 1 else ""
    drawn = any(run.ngrams and run.bits_per_nat for run in runs)
    held_out = f'<span><i class="stroke dots"{ink}></i>held out</span>'
    ngrams = f'<span><i class="stroke dashes"{ink}></i>byte n-grams, held out</span>' if drawn else ""
    return (
        f"<p class=legend>{names if len(runs) > 1 else ''}"
        f'<span><i class="stroke faint"{ink}></i>training, each line</span>'
        f"<span><i class=stroke{ink}></i>smoothed</span>"
        f"{held_out if any(run.series('eval_loss')[1].size for run in runs) else ''}{ngrams}{signs}</p>"
    )


_SIGNS = dict(zip(charts.MARKS, "▲✕◄►", strict=True))


def _picture(title: str, *drawings: str, kind: str = "") -> str:
    start = f"<figure class={kind}>" if kind else "<figure>"
    return f"{start}<figcaption>{escape(title)}</figcaption>{''.join(drawings)}</figure>"


def _watched(run: LoggedRun, runs: Sequence[LoggedRun]) -> str:
    """Returns the heat maps of what `debug.watch` names, each with a sentence about it."""
    maps = heat_maps.heat_maps(run)
    if not maps:
        return ""
    figures = "".join(
        f"<figure><figcaption>{_name(run, runs)}{escape(heat.title)}</figcaption>{heat_maps.draw(heat)}"
        f"<p class=note>{escape(heat_maps.sentence(heat))}</p></figure>"
        for heat in maps[: heat_maps.MAX_MAPS]
    )
    more = len(maps) - heat_maps.MAX_MAPS
    note = f"<p class=note>metrics.jsonl has {plural(more, 'more map')} of {escape(run.name)}.</p>" if more > 0 else ""
    return f"<div class=grid>{figures}</div>{note}"


def _drawn(run: LoggedRun) -> str:
    """Returns some of the grids of pictures that a run has drawn, evenly spread over its steps, with the last one."""
    every = run.pictures
    shown = [every[-1 - i * len(every) // MAX_GRIDS] for i in reversed(range(min(MAX_GRIDS, len(every))))]

    def figure(step: int, data: bytes) -> str:
        source = f"data:image/png;base64,{b64encode(data).decode()}"
        return _picture(f"{run.name}, step {step:,}", f'<img class=drawn alt="pictures of step {step}" src="{source}">')

    figures = "".join(figure(step, file.read_bytes()) for step, file in shown)
    return f"<div class=grid>{figures}</div>" if figures else ""


def _completions(run: LoggedRun, runs: Sequence[LoggedRun]) -> str:
    """Returns a table of the completions that the first and the newest evaluation have logged, with their rewards."""
    every = run.completions
    rows = [
        (f"{step:,}", escape(one.prompt), escape(one.completion), format_number(one.reward, ".4g"))
        for step, samples in (every[:1] if len(every) == 1 else [*every[:1], *every[-1:]])
        for one in samples
    ]
    title = f"<p>{_name(run, runs)}completions of held-out prompts</p>"
    return title + html.table(["Step", "Prompt", "Completion", "Reward"], rows, "events") if rows else ""


def _events(runs: Sequence[LoggedRun]) -> str:
    found = [(step, i, kind, detail) for i, run in enumerate(runs) for step, kind, detail in list_events(run)]
    rows = [
        [f"{step:,}", *([_named(i, runs[i])] if len(runs) > 1 else []),
         f"{_SIGNS.get(kind, '')} {escape(kind)}", escape(detail)]
        for step, i, kind, detail in sorted(found, key=lambda event: event[0])[-MAX_EVENTS:]
    ]  # fmt: skip
    more = f"<p class=note>The last {MAX_EVENTS} of {len(found):,}.</p>" if len(found) > MAX_EVENTS else ""
    head = ["step", *(["run"] if len(runs) > 1 else []), "event", ""]
    return html.table(head, rows, "events stacked") + more if rows else ""


def _differences(runs: Sequence[LoggedRun]) -> str:
    rows = [[escape(key), *map(escape, values)] for key, values in config_differences(runs).items()]
    return _compared(runs, rows, "config") if rows else "<p class=note>The configurations are equal.</p>"


def _config(run: LoggedRun) -> str:
    if not run.config:
        return ""
    rows = [[escape(key), escape(format_value(value))] for key, value in run.config.items()]
    table = html.table([], rows, "config stacked")
    return f"<details><summary>{_breakable(run.name)}: {plural(len(rows), 'value')}</summary>{table}</details>"
