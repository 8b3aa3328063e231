"""The pictures of this folder: `python docs/parallelism/pictures.py`. Every split is what the library's rules answer.

A rectangle is an array, or a layer of one, cut as the mesh cuts it; numbers are the devices that hold a part.
"""

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}  # before JAX is imported

import matplotlib

matplotlib.use("Agg")
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from matplotlib import pyplot as plt

from jaxstack.config import Config, DataConfig, MeshConfig, ModelConfig, MoEConfig
from jaxstack.kernels import context_order
from jaxstack.models import decoder
from jaxstack.models.context import Context
from jaxstack.models.params import flat_spec
from jaxstack.sharding import make_mesh

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
MINE, OTHERS = "#7fb3e6", "#ededed"

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
    """Which devices hold each cell of a [ROWS, LENGTH] array; tokens are put back from their balanced order."""
    grid = np.empty((ROWS, LENGTH), object)
    for i in np.ndindex(grid.shape):
        grid[i] = frozenset()
    for device, index in NamedSharding(ctx.mesh, spec).devices_indices_map(grid.shape).items():
        for i in np.ndindex(grid[index].shape):
            at = tuple((s.start or 0) + n for s, n in zip(index, i, strict=True))
            grid[at] |= {device.id}
    if tokens:
        grid[:, context_order(ctx.mesh.shape["context"], LENGTH)] = grid.copy()
    return grid


def panel(axes: Any, grid: np.ndarray, title: str) -> None:
    """One array: its parts, each with its devices; those of device 0 are coloured."""
    rows = [0, *(i for i in range(1, ROWS) if (grid[i] != grid[i - 1]).any()), ROWS]
    columns = [0, *(i for i in range(1, LENGTH) if (grid[:, i] != grid[:, i - 1]).any()), LENGTH]
    for top, bottom in pairwise(rows):
        for left, right in pairwise(columns):
            held = grid[top, left]
            box = plt.Rectangle((left, top), right - left, bottom - top, edgecolor="white", linewidth=1.5)
            box.set_facecolor(MINE if 0 in held else OTHERS)
            axes.add_patch(box)
            middle = ((left + right) / 2, (top + bottom) / 2)
            narrow = right - left < 4 and bottom - top > 4
            axes.text(*middle, named(held), ha="center", va="center", fontsize=7, rotation=90 if narrow else 0)
    axes.set(xlim=(0, LENGTH), ylim=(ROWS, 0), xticks=[], yticks=[])
    axes.set_title(title, fontsize=8)
    axes.spines[:].set_visible(False)


def named(devices: frozenset[int]) -> str:
    """`3`, `0-7`, or `0 4`."""
    ids = sorted(devices)
    if len(ids) > 2 and ids == list(range(ids[0], ids[-1] + 1)):
        return f"{ids[0]}-{ids[-1]}"
    return " ".join(map(str, ids))


def scores(axes: Any, shards: int) -> None:
    """The causal mask: which shard computes each pair of query and key."""
    positions = context_order(shards, LENGTH).reshape(shards, -1)
    owner = np.empty(LENGTH, int)
    for shard, mine in enumerate(positions):
        owner[mine] = shard
    mask = np.tril(np.ones((LENGTH, LENGTH), bool))
    pairs = {int((mask[mine]).sum()) for mine in positions}
    assert len(pairs) == 1, f"shards differ in work: {pairs}"
    image = np.where(mask, (owner != 0)[:, None], np.nan)
    axes.imshow(image, cmap=matplotlib.colors.ListedColormap([MINE, OTHERS]), vmin=0, vmax=1)
    axes.set(xticks=[], yticks=np.arange(0.5, LENGTH, 2), yticklabels=[str(owner[i]) for i in range(0, LENGTH, 2)])
    axes.tick_params(length=0, labelsize=7)
    axes.set_title(f"scores, queries x keys\n{pairs.pop()} pairs on every shard", fontsize=8)
    axes.spines[:].set_visible(False)


def picture(name: str, mesh_config: MeshConfig) -> None:
    moe = MoEConfig(num_experts=16) if name == "expert" else MoEConfig()
    # The least that every axis divides.
    sizes = {"num_layers": 4, "d_model": 64, "num_heads": 16, "head_dim": 4, "d_ff": 64, "vocab_size": 64}
    cfg = Config(
        model=ModelConfig(**sizes, moe=moe), data=DataConfig(batch_size=ROWS, seq_len=LENGTH), mesh=mesh_config
    )
    ctx = Context.create(cfg, make_mesh(cfg.mesh, ROWS))
    declared = decoder.spec(cfg.model)
    where = dict(zip(flat_spec(declared), jax.tree.leaves(ctx.parameters(declared)), strict=True))

    drawn = {"expert": SPARSE, "pipe": STAGES}.get(name, DENSE)
    shown = ACTIVATIONS[: {"context": 2, "pipe": 0}.get(name, 3)]  # a stage works on what comes by
    lines = 1 if name == "pipe" else 2
    figure, rows = plt.subplots(lines, 4, figsize=(7.2, 2.3 * lines), layout="constrained")
    grid = rows.ravel()
    for axes, (path, dims, title) in zip(grid, drawn, strict=False):
        entries = (*where[path], *(None,) * 4)
        panel(axes, holders(ctx, PartitionSpec(*(entries[d] for d in dims))), title)
    for axes, (names, title) in zip(grid[len(drawn) :], shown, strict=False):
        spec = ctx.narrow(ctx.rules.activation(names))
        panel(axes, holders(ctx, spec, tokens=names[1] in ("sequence", "residual")), title)
    if name == "context":
        scores(grid[-1], mesh_config.context)
    what = " x ".join(f"{axis}={size}" for axis, size in cfg.mesh.sizes.items() if size > 1)
    figure.suptitle(f"{what}: the devices that hold each part; blue is device 0's", fontsize=9)
    figure.savefig(HERE / f"{name}.png", dpi=120, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    for each, config in PICTURES.items():
        picture(each, config)
        print(HERE / f"{each}.png")
