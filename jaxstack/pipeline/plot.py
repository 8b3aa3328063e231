"""Draws schedules as Gantt charts: `jaxstack schedule 1f1b --stages 4 --microbatches 8 --out chart.png`."""

from pathlib import Path

from jaxstack.pipeline.schedule import IDLE, Schedule


def draw(schedule: Schedule, path: Path, forward: float = 1.0, backward: float = 2.0) -> None:
    """Writes a picture of a schedule in lockstep. A tick is as long as its longest forward and backward unit.

    Numbers are microbatches. Units of later chunks are darker.

    Args:
      schedule: the schedule.
      path: file of the picture; its suffix is the format.
      forward: time of one forward unit.
      backward: time of one backward unit, in the same unit of time.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    kinds = (
        ("forward", schedule.forward_TP, forward, "Blues"),
        ("backward", schedule.backward_TP, backward, "Oranges"),
    )
    shades = {
        (kind, chunk): plt.get_cmap(colours)(0.3 + 0.5 * chunk / schedule.chunks)
        for kind, _, _, colours in kinds
        for chunk in range(schedule.chunks)
    }
    figure, axes = plt.subplots(figsize=(12, 0.5 * schedule.stages + 1.5), layout="constrained")
    now = 0.0
    for tick in range(schedule.ticks):
        for kind, unit_TP, length, _ in kinds:
            if (unit_TP[tick] == IDLE).all():
                continue
            for stage, unit in enumerate(unit_TP[tick].tolist()):
                if unit != IDLE:
                    microbatch, chunk = divmod(unit, schedule.chunks)
                    shade = shades[kind, chunk]
                    axes.barh(stage, length, 0.9, left=now, color=shade, edgecolor="white", linewidth=0.5)
                    if schedule.ticks <= 80:
                        axes.text(now + length / 2, stage, microbatch, ha="center", va="center", fontsize=8)
            now += length
    figures = schedule.simulate(forward, backward)
    chunks = f" x {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    axes.set(
        yticks=range(schedule.stages),
        yticklabels=[f"stage {s}" for s in range(schedule.stages)],
        xlabel=f"time (a forward unit takes {forward:g}, a backward unit {backward:g})",
        xlim=(0, now),
        title=f"{schedule.name}: {schedule.stages} stages{chunks}, {schedule.microbatches} microbatches; "
        f"bubble {figures.bubble:.1%}, room for {schedule.slots} units a stage",
    )
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    for (kind, chunk), shade in shades.items():
        of_chunk = f", chunk {chunk}" if schedule.chunks > 1 else ""
        axes.bar(0, 0, color=shade, label=f"{kind}{of_chunk}")
    figure.legend(loc="outside lower right", ncols=len(shades), frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
