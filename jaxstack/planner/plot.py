"""Draws a roofline (the attainable FLOP/s of a chip, and the parts of one layer below it), and a scaling law."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from jaxstack.common import drawing
from jaxstack.planner.roofline import Roofline
from jaxstack.planner.scaling_law import FLOPS_PER_PARAMETER_AND_TOKEN, HOFFMANN, Fit, ScalingLaw

COLORS = {
    "matmul": drawing.BLUE,
    "attention": drawing.RED,
    "normalisation": drawing.GREEN,
    "pointwise": drawing.ORANGE,
}


def draw(roofline: Roofline, path: Path) -> None:
    """Draws attainable FLOP/s over FLOPs per byte, and the share of each part in FLOPs, bytes and least time."""
    limits = roofline.limits
    peak = limits.peak(roofline.dtype) * limits.matmul_efficiency
    bandwidth = limits.chip.hbm_bandwidth * limits.bandwidth_efficiency
    rows = [row for row in roofline.tables["layer"] if row.name in COLORS]
    lowest = min(0.3, *(row.intensity for row in rows if row.intensity))
    intensities = [lowest / 2, peak / bandwidth, 30 * peak / bandwidth]
    shares = {
        "FLOPs": [row.flops for row in rows],
        "bytes": [row.bytes for row in rows],
        "least time": [row.seconds for row in rows],
    }
    if all(row.name in roofline.measured for row in rows):
        shares["measured"] = [roofline.measured[row.name] for row in rows]
    with drawing.picture(path, 10, 4.2) as figure:
        roof, bars = figure.subplots(1, 2, width_ratios=(3, 2))
        roof.plot(intensities, [min(peak, bandwidth * i) / 1e12 for i in intensities], color=drawing.INK, linewidth=1.8)
        roof.axvline(peak / bandwidth, color=drawing.GRAY, linewidth=0.8, linestyle="--")
        for i, row in enumerate(rows):
            if row.intensity:
                reached = row.flops / row.seconds / 1e12
                roof.plot([row.intensity], [reached], "o", color=COLORS[row.name], markersize=8)
                roof.annotate(row.name, (row.intensity, reached), xytext=(7, -14 if i % 2 else 6),
                              textcoords="offset points", fontsize=9)  # fmt: skip
                if row.name in roofline.measured:
                    real = row.flops / roofline.measured[row.name] / 1e12
                    roof.plot([row.intensity], [real], "x", color=COLORS[row.name], markersize=8)
        roof.set(xscale="log", yscale="log", xlabel="FLOPs a byte of memory traffic", ylabel="TFLOP/s")
        crosses = "; crosses: measured" if roofline.measured else ""
        roof.set_title(f"One layer on {roofline.chip}, {roofline.dtype}{crosses}")
        for place, values in enumerate(shares.values()):
            left = 0.0
            for row, value in zip(rows, values, strict=True):
                part = 100 * value / sum(values)
                bars.barh(place, part, left=left, color=COLORS[row.name], label=row.name if place == 0 else None)
                if part >= 6:
                    bars.text(
                        left + part / 2, place, f"{part:.0f}%", ha="center", va="center", color="white", fontsize=9
                    )
                left += part
        bars.set_yticks(range(len(shares)), list(shares))
        bars.set(xlim=(0, 100), xlabel="% of the layer")
        bars.invert_yaxis()
        bars.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)


def draw_scaling_law(
    fitted: Fit, runs: Sequence[tuple[float, float, float]], budgets: Sequence[float], path: Path
) -> None:
    """Draws the loss of runs over their training FLOPs, the law's lowest loss for every budget, and chosen points.

    Args:
      fitted: the law.
      runs: parameters, tokens and loss of each run.
      budgets: training FLOPs whose best points are marked.
      path: file to write, PNG.
    """
    parameters, tokens, losses = map(np.array, zip(*runs, strict=True))
    flops = FLOPS_PER_PARAMETER_AND_TOKEN * parameters * tokens
    with drawing.picture(path, 7, 4.4) as figure:
        axes = figure.subplots()
        shown = axes.scatter(flops, losses, c=np.log10(parameters), s=26, zorder=3)
        figure.colorbar(shown, ax=axes, label="log10 of parameters")
        ends = [*flops, *budgets]
        at = np.geomspace(min(ends) / 2, max(ends) * 2, 100)
        axes.plot(
            at,
            [fitted.law.loss(*fitted.law.optimum(c)) for c in at],
            color=drawing.INK,
            label="lowest loss of a budget",
        )
        for budget in budgets:
            n, d = fitted.law.optimum(budget)
            loss = fitted.law.loss(n, d)
            axes.plot([budget], [loss], "*", color=drawing.RED, markersize=13, zorder=4)
            text = f"{n:.3g} parameters\n{d:.3g} tokens"
            axes.annotate(text, (budget, loss), xytext=(6, 8), textcoords="offset points", fontsize=8)
        axes.set(xscale="log", yscale="log", xlabel="training FLOPs", ylabel="held-out loss, nats per token")
        axes.legend()


def _lowest_loss(flops: float, law: ScalingLaw) -> float:
    return law.loss(*law.optimum(flops))


def draw_budget(fitted: Fit, flops: float, chosen: tuple[float, float], path: Path) -> None:
    """Draws the law's lowest loss over training FLOPs with its 95% band, Hoffmann's law, and a chosen point.

    Args:
      fitted: the law, with samples.
      flops: training FLOPs of the chosen point.
      chosen: its parameters and tokens.
    """
    at = np.geomspace(flops / 1e3, flops * 30, 60)
    bands = np.array([fitted.interval_of(partial(_lowest_loss, c)) for c in at])
    with drawing.picture(path, 7, 4.4) as figure:
        axes = figure.subplots()
        axes.fill_between(
            at, bands[:, 0], bands[:, 1], color=drawing.BLUE, alpha=0.2, linewidth=0, label="95% interval"
        )
        for law, label, style in ((fitted.law, "Besiroglu et al. 2024", "-"), (HOFFMANN, "Hoffmann et al. 2022", "--")):
            axes.plot(at, [_lowest_loss(c, law) for c in at], style, color=drawing.BLUE, label=label)
        parameters, tokens = chosen
        loss = fitted.law.loss(parameters, tokens)
        axes.plot([flops], [loss], "*", color=drawing.RED, markersize=14, zorder=4, label="this plan")
        text = f"{parameters:.3g} parameters\n{tokens:.3g} tokens\n{loss:.3f} nats"
        axes.annotate(text, (flops, loss), xytext=(8, 10), textcoords="offset points", fontsize=8)
        axes.set(xscale="log", xlabel="training FLOPs", ylabel="lowest loss of a budget, nats per token")
        axes.legend()
