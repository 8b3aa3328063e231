"""Draws the pictures of this folder and the README's: `python docs/parallelism/pictures.py`.

A rectangle is an array, or one layer of it, split by the library's rules; numbers are the devices that hold a part.
"""

import json
import math
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}  # before JAX is imported

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle

from jaxstack import families
from jaxstack.common import drawing
from jaxstack.config import Config, DataConfig, MeshConfig, ModelConfig, MoEConfig
from jaxstack.families.context import make_context
from jaxstack.kernels import context_order
from jaxstack.models.context import Context
from jaxstack.models.params import flat_spec
from jaxstack.pipeline import one_f_one_b
from jaxstack.pipeline.schedule import IDLE
from jaxstack.sharding import make_mesh
from jaxstack.tracking.plot import plot_loss

HERE = Path(__file__).parent
PICTURES = {
    "data": MeshConfig(data=8),
    "fsdp": MeshConfig(data=2, fsdp=4),
    "tensor": MeshConfig(data=2, tensor=4),
    "context": MeshConfig(data=2, context=4),
    "expert": MeshConfig(data=2, expert=4),
    "pipe": MeshConfig(data=2, pipe=4),
}
ROWS = LENGTH = 16  # cells of a picture each way
MINE = drawing.SKY
OTHERS = "#ededed"

DENSE = [  # path, the dimensions that are drawn and what they are called
    ("embedding/tokens", (0, 1), "embedding\nvocabulary x width"),
    ("layers/attention/w_q", (1, 2), "queries\nwidth x heads"),
    ("layers/attention/w_o", (1, 3), "attention's output\nheads x width"),
    ("layers/mlp/w_up", (1, 2), "MLP, up\nwidth x hidden"),
    ("layers/mlp/w_down", (1, 2), "MLP, down\nhidden x width"),
]
SPARSE = [
    *DENSE[:3],
    ("layers/moe/w_up", (1, 2), "experts, up\nexperts x width"),
    ("layers/moe/w_down", (1, 3), "experts, down\nexperts x width"),
]
STAGES = [
    DENSE[0],
    ("head/w", (0, 1), "head\nwidth x vocabulary"),
    ("layers/attention/w_q", (0, 2), "queries\nlayers x heads"),
    ("layers/mlp/w_up", (0, 2), "MLP, up\nlayers x hidden"),
]
ACTIVATIONS = [
    (("batch", "residual"), "residual stream\nsequences x tokens"),
    (("batch", "sequence"), "in attention and MLP\nsequences x tokens"),
    (("batch", "mlp"), "in attention and MLP\nsequences x heads, hidden"),
]


def holders(ctx: Context, spec: PartitionSpec, tokens: bool = False) -> np.ndarray:
    """Returns the devices that hold each cell of a [ROWS, LENGTH] array; tokens are in their original order."""
    grid = np.empty((ROWS, LENGTH), object)
    for i in np.ndindex(grid.shape):
        grid[i] = frozenset()
    for device, index in NamedSharding(ctx.layout.mesh, spec).devices_indices_map(grid.shape).items():
        for i in np.ndindex(grid[index].shape):
            at = tuple((s.start or 0) + n for s, n in zip(index, i, strict=True))
            grid[at] |= {device.id}
    if tokens:
        grid[:, context_order(ctx.layout.mesh.shape["context"], LENGTH)] = grid.copy()
    return grid


def panel(axes: Any, grid: np.ndarray, title: str) -> None:
    """Draws one array: its parts, each with its devices; the parts of device 0 are blue."""
    rows = [0, *(i for i in range(1, ROWS) if (grid[i] != grid[i - 1]).any()), ROWS]
    columns = [0, *(i for i in range(1, LENGTH) if (grid[:, i] != grid[:, i - 1]).any()), LENGTH]
    for top, bottom in pairwise(rows):
        for left, right in pairwise(columns):
            held = grid[top, left]
            box = Rectangle((left, top), right - left, bottom - top, edgecolor="white", linewidth=1.5)
            box.set_facecolor(MINE if 0 in held else OTHERS)
            axes.add_patch(box)
            middle = ((left + right) / 2, (top + bottom) / 2)
            narrow = right - left < 4 and bottom - top > 4
            axes.text(*middle, named(held), ha="center", va="center", fontsize=7, rotation=90 if narrow else 0)
    axes.set(xlim=(0, LENGTH), ylim=(ROWS, 0), xticks=[], yticks=[])
    axes.set_title(title, fontsize=8)
    axes.spines[:].set_visible(False)


def named(devices: frozenset[int]) -> str:
    """Returns a set of devices as text: `3`, `0-7`, or `0 4`."""
    ids = sorted(devices)
    if len(ids) > 2 and ids == list(range(ids[0], ids[-1] + 1)):
        return f"{ids[0]}-{ids[-1]}"
    return " ".join(map(str, ids))


def scores(axes: Any, shards: int) -> None:
    """Draws the causal mask: which shard computes each pair of query and key."""
    positions = context_order(shards, LENGTH).reshape(shards, -1)
    owner = np.empty(LENGTH, int)
    for shard, mine in enumerate(positions):
        owner[mine] = shard
    mask = np.tril(np.ones((LENGTH, LENGTH), bool))
    pairs = {int((mask[mine]).sum()) for mine in positions}
    assert len(pairs) == 1, f"shards differ in work: {pairs}"
    image = np.where(mask, (owner != 0)[:, None], np.nan)
    axes.imshow(image, cmap=ListedColormap([MINE, OTHERS]), vmin=0, vmax=1)
    axes.set(xticks=[], yticks=np.arange(0.5, LENGTH, 2), yticklabels=[str(owner[i]) for i in range(0, LENGTH, 2)])
    axes.tick_params(length=0, labelsize=7)
    axes.set_title(f"scores, queries x keys\n{pairs.pop()} pairs on every shard", fontsize=8)
    axes.spines[:].set_visible(False)


def picture(name: str, mesh_config: MeshConfig) -> None:
    """Writes the picture of one mesh."""
    moe = MoEConfig(num_experts=16) if name == "expert" else MoEConfig()
    # The smallest sizes that every axis divides.
    sizes = {"num_layers": 4, "d_model": 64, "num_heads": 16, "head_dim": 4, "d_ff": 64, "vocab_size": 64}
    cfg = Config(
        model=ModelConfig(**sizes, moe=moe), data=DataConfig(batch_size=ROWS, seq_len=LENGTH), mesh=mesh_config
    )
    ctx = make_context(cfg, make_mesh(cfg.mesh, ROWS))
    declared = families.spec(cfg.model)
    where = dict(zip(flat_spec(declared), jax.tree.leaves(ctx.layout.parameters(declared)), strict=True))

    drawn = {"expert": SPARSE, "pipe": STAGES}.get(name, DENSE)
    shown = ACTIVATIONS[: {"context": 2, "pipe": 0}.get(name, 3)]
    lines = 1 if name == "pipe" else 2
    with drawing.picture(HERE / f"{name}.png", 7.2, 2.3 * lines) as figure:
        grid = figure.subplots(lines, 4).ravel()
        for axes, (path, dims, title) in zip(grid, drawn, strict=False):
            entries = (*where[path], *(None,) * 4)
            panel(axes, holders(ctx, PartitionSpec(*(entries[d] for d in dims))), title)
        for axes, (names, title) in zip(grid[len(drawn) :], shown, strict=False):
            spec = ctx.layout.narrow(ctx.layout.rules.activation(names))
            panel(axes, holders(ctx, spec, tokens=names[1] in ("sequence", "residual")), title)
        if name == "context":
            scores(grid[-1], mesh_config.context)
        what = " x ".join(f"{axis}={size}" for axis, size in cfg.mesh.sizes.items() if size > 1)
        figure.suptitle(f"{what}: the devices that hold each part; device 0 is blue", fontsize=9)


def losses(path: Path) -> None:
    """Writes the loss of the quickstart as its run does."""
    run = json.loads((HERE.parents[1] / "benchmarks" / "results" / "quickstart.json").read_text(encoding="utf-8"))
    records = [{"step": step, "loss": loss} for step, loss in run["training"]]
    ngram = run["ngram"]
    baseline = (f"byte {ngram['ngram_order']}-grams", ngram["ngram_bits_per_byte"] * math.log(2))
    plot_loss([*records, *run["held_out"]], path, baseline)
    print(path)


def overview(path: Path) -> None:
    """Writes the README's picture: the quickstart's losses, one matrix on a mesh, and a pipeline schedule."""
    run = json.loads((HERE.parents[1] / "benchmarks" / "results" / "quickstart.json").read_text(encoding="utf-8"))
    bits = np.log(2)
    steps, losses = zip(*run["training"], strict=True)
    sizes = {"num_layers": 1, "d_model": 64, "num_heads": 16, "head_dim": 4, "d_ff": 64, "vocab_size": 64}
    cfg = Config(model=ModelConfig(**sizes), data=DataConfig(batch_size=ROWS), mesh=MeshConfig(2, fsdp=2, tensor=2))
    ctx = make_context(cfg, make_mesh(cfg.mesh, ROWS))
    entries = ctx.layout.parameters(families.spec(cfg.model))["layers"]["mlp"]["w_up"]
    schedule = one_f_one_b(stages=4, microbatches=8)
    kinds = ((schedule.forward_TP, 1, MINE), (schedule.backward_TP, 2, drawing.ORANGE))
    with drawing.picture(path, 11, 2.8) as figure:
        curve, matrix, chart = figure.subplots(1, 3, width_ratios=(1.25, 0.75, 2))
        figure.get_layout_engine().set(wspace=0.04)
        curve.plot(steps, np.divide(losses, bits), color=drawing.GRAY, linewidth=1, label="training")
        held_out = [(line["step"], line["eval_bits_per_byte"]) for line in run["held_out"]]
        curve.plot(*zip(*held_out, strict=True), "o-", color=drawing.BLUE, markersize=4, label="held out")
        curve.axhline(
            run["ngram"]["ngram_bits_per_byte"], color=drawing.RED, linestyle="--", linewidth=1, label="best n-gram"
        )
        curve.legend()
        curve.set_title("quickstart: bits per byte")
        curve.set_xlabel("optimizer step")

        panel(matrix, holders(ctx, PartitionSpec(*entries[1:])), "")
        matrix.set_title("data=2 fsdp=2 tensor=2:\ndevices of a matrix")

        now = 0
        for tick in range(schedule.ticks):
            for units, length, colour in kinds:
                if (units[tick] == IDLE).all():
                    continue
                for stage, unit in enumerate(units[tick].tolist()):
                    if unit != IDLE:
                        chart.barh(stage, length, 0.9, left=now, color=colour, edgecolor="white", linewidth=0.5)
                        chart.text(now + length / 2, stage, unit, ha="center", va="center", fontsize=8)
                now += length
        chart.set(xlim=(0, now), yticks=range(4), yticklabels=[f"stage {s}" for s in range(4)], xticks=[])
        chart.set_title("pipe=4: forward and backward of 8 microbatches by 1F1B, one program")
        chart.invert_yaxis()
        chart.tick_params(length=0, labelsize=8)
        chart.spines[:].set_visible(False)
    print(path)


ROOMS = {  # rows of the house, and what is in each room
    "what you call": {
        "cli": "commands",
        "generate": "samplers, caches",
        "serve": "HTTP",
        "evaluate": "tasks, lm-eval",
        "planner": "memory, time, cost",
        "report": "pages, charts",
        "debug": "finds a NaN",
    },
    "a run": {
        "train.py": "",
        "start.py": "the door",
        "config": "keys, checks",
        "data": "f(seed, step)",
        "checkpoint": "save, verify",
        "tracking": "metrics",
        "runtime": "processes",
    },
    "what plugs in": {
        "families": "T5, diffusion, ...",
        "features": "adapters, experts",
        "moe": "routers, dispatch",
        "pipeline": "schedules",
        "posttrain": "DPO, GRPO",
        "compress": "quantise, prune",
        "hf": "Hugging Face",
    },
    "the core": {"training": "", "models": "", "sharding": "rules, meshes", "kernels": "Pallas, XLA"},
}
STOP = re.compile(r"^## (\d+)\. `jaxstack/([\w/]+\.py)`: `([\w.]+)`", re.MULTILINE)


def house(path: Path) -> None:
    """Writes a drawing of the package: its rooms in rows, and the stops of a batch, as the page lists them."""
    page = (HERE.parent / "way_of_a_batch.md").read_text(encoding="utf-8")
    visited: dict[str, list[str]] = {}
    for number, file, name in STOP.findall(page):
        room = file.split("/")[0]
        visited.setdefault(room, []).append(f"{number:>2}  {file.removeprefix(f'{room}/')}: {name}")
    assert {room for row in ROOMS.values() for room in row} >= {*visited}
    edges = {}
    with drawing.picture(path, 9, 5.4) as figure:
        axes = figure.subplots()
        axes.axis("off")
        top = 0.4
        for title, rooms in ROOMS.items():
            texts = {room: visited.get(room, [what]) for room, what in rooms.items()}
            height = 0.8 + 0.42 * max(map(len, texts.values()))
            wide = {room: 2.2 if len(lines) > 1 else 1.0 for room, lines in texts.items()}
            axes.text(0, top, title, color=drawing.INK, va="bottom")
            left = 0.0
            for room, lines in texts.items():
                width = 14 * wide[room] / sum(wide.values())
                color = drawing.SKY if room in visited else OTHERS
                axes.add_patch(Rectangle((left, top + 0.1), width - 0.12, height, facecolor=color, linewidth=0))
                axes.text(left + 0.12, top + 0.48, room, weight="bold", va="center")
                for i, text in enumerate(lines):
                    axes.text(left + 0.12, top + 0.95 + 0.42 * i, text, fontsize=8, va="center")
                edges[room] = (left, top + 0.1, left + width - 0.12, top + 0.1 + height)
                left += width
            top += height + 0.75
        axes.set(xlim=(0, 14), ylim=(top - 0.5, 0))
        arrow = {"arrowprops": {"arrowstyle": "->", "color": drawing.RED, "linewidth": 1.6}}
        train, training, models = (edges[room] for room in ("train.py", "training", "models"))
        behind = train[2] - 0.12  # the rooms between the two are drawn over the arrow
        axes.annotate("", (behind, training[1]), (behind, train[3]), zorder=0.5, **arrow)
        for height, ends in ((0.35, (training[2], models[0])), (0.85, (models[0], training[2]))):
            at = training[1] + height * (training[3] - training[1])
            axes.annotate(
                "",
                (ends[1] + 0.15 * np.sign(ends[1] - ends[0]), at),
                (ends[0] - 0.15 * np.sign(ends[1] - ends[0]), at),
                **arrow,
            )
    print(path)


if __name__ == "__main__":
    losses(HERE.parent / "quickstart.png")
    overview(HERE.parent / "overview.png")
    house(HERE.parent / "house.png")
    for each, config in PICTURES.items():
        picture(each, config)
        print(HERE / f"{each}.png")
