"""Draws the figures of a plan: memory as stacked bars, and a step as a Gantt chart of operations and communication."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxstack.common import drawing
from jaxstack.planner.explain import Figure
from jaxstack.planner.figures import is_saved
from jaxstack.planner.step_time import StepTime

GIB = 2**30
SAVED_COLOR = drawing.RED
COLORS = tuple(color for color in drawing.COLORS if color != SAVED_COLOR)
HIDDEN = drawing.GRAY


def draw_memory(policies: Mapping[str, Sequence[Figure]], hbm: float, path: Path) -> None:
    """Draws one stacked bar of a device for each policy of recomputation, below the line of its memory.

    Args:
      policies: bytes by purpose under each policy.
      hbm: bytes of a device's memory.
    """
    with drawing.picture(path, 8, 4.4) as figure:
        axes = figure.subplots()
        for place, parts in enumerate(policies.values()):
            bottom = 0.0
            colors = iter(COLORS)
            for part in parts:
                color = SAVED_COLOR if is_saved(part) else next(colors)
                label = "saved activations" if is_saved(part) else part.name
                axes.bar(place, part.value / GIB, 0.6, bottom=bottom, color=color, label=None if place else label)
                bottom += part.value / GIB
            axes.text(place, bottom, f"{bottom:.1f}", ha="center", va="bottom")
        axes.axhline(hbm / GIB, color=drawing.INK, linestyle="--", linewidth=1.2, label="there is")
        axes.set_xticks(range(len(policies)), [f"remat {name}" for name in policies])
        axes.set(ylabel="GiB of one device")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def draw_time(time: StepTime, path: Path) -> None:
    """Draws a step of one device: operations above, and below them a row for each mesh axis that it sends over.

    Collectives that run beside operations are drawn below the layers. Parts of one kind are added up: the picture shows
    how long each is, and not in which order microbatches and layers run.
    """
    sent = [axes for axes, waits in time.exposed.items() if waits + time.hidden[axes] > 1e-3 * time.total]
    rows = ["operations", *sent]
    with drawing.picture(path, 10, 1.4 + 0.5 * len(rows)) as figure:
        axes = figure.subplots()
        now = 0.0
        for (name, seconds), color in zip(
            (("layers", time.layers), ("recomputation", time.recomputation), ("head", time.head)), COLORS, strict=False
        ):
            axes.barh(0, 1e3 * seconds, left=1e3 * now, color=color, label=name)
            now += seconds
        for row, name in enumerate(sent, 1):
            seconds = time.exposed[name]
            axes.barh(row, 1e3 * time.hidden[name], left=0, color=HIDDEN, label="sent beside" if row == 1 else None)
            axes.barh(row, 1e3 * seconds, left=1e3 * now, color=SAVED_COLOR, label="waiting" if row == 1 else None)
            now += seconds
        for name, seconds, color in (("bubble", time.bubble, "#ffffff"), ("update", time.update, COLORS[5])):
            if seconds:
                axes.barh(
                    0, 1e3 * seconds, left=1e3 * now, color=color, edgecolor=drawing.INK, linewidth=0.6, label=name
                )
            now += seconds
        axes.set_yticks(range(len(rows)), rows)
        axes.set(xlim=(0, 1e3 * time.total), xlabel="ms of one step")
        axes.invert_yaxis()
        axes.legend(ncols=7, loc="lower center", bbox_to_anchor=(0.5, 1))
