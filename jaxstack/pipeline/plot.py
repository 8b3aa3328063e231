"""Draws schedules as Gantt charts: `jaxstack schedule 1f1b --stages 4 --microbatches 8 --out chart.png`."""

from pathlib import Path

from jaxstack.common import drawing
from jaxstack.common.counts import plural
from jaxstack.pipeline.schedule import BACKWARD, FORWARD, KINDS, WEIGHT, Schedule


def draw(schedule: Schedule, path: Path, forward: float = 1.0, backward: float = 2.0, weight: float = 0.5) -> None:
    """Writes a picture of a schedule in lockstep. Each lane of a tick is as long as its longest unit.

    Numbers are microbatches. Units of later chunks are darker.

    The suffix of `path` is the format of the picture. For the times, see `Schedule.seconds`.
    """
    import matplotlib  # imported here because it takes a second

    seconds = schedule.seconds(forward, backward, weight)
    kinds = (FORWARD, BACKWARD) if schedule.weight_MG is None else (FORWARD, BACKWARD, WEIGHT)
    shades = {
        (kind, chunk): matplotlib.colormaps[("Blues", "Oranges", "Greens")[kind]](0.3 + 0.5 * chunk / schedule.chunks)
        for kind in kinds
        for chunk in range(schedule.chunks)
    }
    lengths = schedule.lane_seconds(*seconds).T  # the lanes of a tick follow each other
    starts = (lengths.cumsum() - lengths.ravel()).reshape(lengths.shape)
    figures = schedule.simulate(forward, backward, weight)
    chunks = f" x {plural(schedule.chunks, 'chunk')}" if schedule.chunks > 1 else ""
    others = [f"a {KINDS[kind]} unit {seconds[kind]:g}" for kind in kinds[1:]]
    with drawing.picture(path, 12, 0.5 * schedule.stages + 1.5) as figure:
        axes = figure.subplots()
        for tick, lane, kind, microbatch, g in schedule.units():
            chunk, stage = divmod(g, schedule.stages)
            start = starts[tick, lane]
            length = seconds[kind]
            axes.barh(stage, length, 0.9, left=start, color=shades[kind, chunk], edgecolor="white", linewidth=0.5)
            if schedule.ticks <= 80:
                axes.text(start + length / 2, stage, str(microbatch), ha="center", va="center", fontsize=8)
        axes.set(
            yticks=range(schedule.stages),
            yticklabels=[f"stage {s}" for s in range(schedule.stages)],
            xlabel=f"time (a forward unit takes {forward:g}, {', '.join(others)})",
            xlim=(0, lengths.sum()),
            title=f"{schedule.name}: {plural(schedule.stages, 'stage')}{chunks}, "
            f"{plural(schedule.microbatches, 'microbatch')}; bubble {figures.bubble:.1%}, room for {schedule.room}",
        )
        axes.invert_yaxis()
        axes.spines["left"].set_visible(False)
        axes.tick_params(left=False)
        for (kind, chunk), shade in shades.items():
            of_chunk = f", chunk {chunk}" if schedule.chunks > 1 else ""
            axes.bar(0, 0, color=shade, label=f"{KINDS[kind]}{of_chunk}")
        figure.legend(loc="outside lower right", ncols=len(shades))
