"""Draws the load of experts, and of the devices that store them."""

from pathlib import Path

import numpy as np

from jaxstack.common import drawing
from jaxstack.common.counts import plural
from jaxstack.moe.placement import Placement, even, imbalance


def draw(load: np.ndarray, found: Placement, path: Path) -> None:
    """Writes a picture of the load of experts and devices.

    At the left is the share of each expert in the tokens of its layer, where 1 is the mean. At the right is the load of
    the busiest device of each layer over the mean, with equal parts and as placed.

    Args:
      load: tokens of each expert in each layer [L, E].
      path: file of the picture; its suffix is the format.
    """
    layers, experts = load.shape
    share = load / np.maximum(load.mean(-1, keepdims=True), 1e-9)
    bars = {f"placed: {plural(found.experts.shape[2], 'slot')} a device": imbalance(found.device_load(load))}
    if experts % found.devices == 0:
        bars = {"equal parts": imbalance(even(layers, experts, found.devices).device_load(load))} | bars
    height = 0.8 / len(bars)
    with drawing.picture(path, 12, 1.5 + max(2.5, 0.3 * layers)) as figure:
        left, right = figure.subplots(1, 2)
        image = left.imshow(share, aspect="auto", vmin=0)
        figure.colorbar(image, ax=left, label="tokens over the mean of the layer")
        left.set(xlabel="expert", ylabel="layer", title="load of each expert", yticks=range(layers))
        if experts <= 32:
            left.set_xticks(range(experts))
        for i, (label, values) in enumerate(bars.items()):
            at = np.arange(layers) + (i - (len(bars) - 1) / 2) * height
            right.barh(at, values, height, label=label, color=(drawing.ORANGE, drawing.BLUE)[i - len(bars)])
        right.axvline(1, color=drawing.INK, linewidth=0.8)
        right.set(
            xlabel="load of the busiest device over the mean",
            ylabel="layer",
            yticks=range(layers),
            title=f"load of {plural(found.devices, 'device')}; at 1 no device waits",
        )
        right.invert_yaxis()
        figure.legend(loc="outside lower right", ncols=2)
