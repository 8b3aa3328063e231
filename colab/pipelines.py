# %% [markdown]
# # Pipelines and their schedule tables
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxstack/jaxstack/blob/main/colab/pipelines.ipynb)
#
# Which schedule keeps the stages busy, and what does it cost? A pipeline places the layers of a model on several devices, its
# *stages*, and sends the batch through them in *microbatches*. The *schedule* says what each stage computes at which time. Here
# a schedule is a table of integers. This notebook draws some schedules, counts their costs, runs them, and writes a new one.
#
# You need no accelerator: with fewer than four devices, the CPU simulates them.

# %%
# include parts/install.py

# %%
import os

os.environ["JAX_NUM_CPU_DEVICES"] = "8"  # JAX reads this when it is imported

# %%
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Image, display

from jaxstack.common.drawing import BLUE, GRAY, ORANGE, STYLE
from jaxstack.config import MeshConfig
from jaxstack.pipeline import (
    Schedule,
    ScheduleError,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    product,
    value_and_grad,
    zb1,
    zb_h1,
)
from jaxstack.pipeline.plot import draw
from jaxstack.sharding import make_mesh

jax.config.update("jax_default_matmul_precision", "float32")  # GPUs and TPUs would round more, and differ more
plt.rcParams.update(STYLE)
STAGES = 4
devices = (jax.devices() if jax.device_count() >= STAGES else jax.devices("cpu"))[:STAGES]
print(f"jax {jax.__version__}, {len(devices)} x {devices[0].device_kind}")

# %% [markdown]
# ## Schedules
#
# Time is divided into *ticks*. In each tick a stage runs at most one forward unit (one microbatch through its layers) and then
# at most one backward unit. Results reach the neighbor in the next tick. `text` returns the table: for each stage a line of
# forward units (F) and a line of backward units (B), with the microbatch of every tick. A dot is an idle tick.

# %%
print(one_f_one_b(STAGES, 8).text())

# %% [markdown]
# In the chart a backward unit takes twice as long as a forward unit. All stages run in lockstep, so a tick is as long as its
# longest forward unit and its longest backward unit together. The title has the bubble and the room, see *Bubble and slots*.


# %%
def show(schedule: Schedule) -> None:
    with tempfile.TemporaryDirectory() as directory:
        picture = Path(directory) / "schedule.png"
        draw(schedule, picture)
        display(Image(picture.read_bytes()))


show(gpipe(STAGES, 8))

# %% [markdown]
# *GPipe* runs all forward units, then all backward units. A stage stores the *residuals* of a microbatch, the arrays that its
# backward unit needs, until this unit runs. So GPipe stores the residuals of all microbatches.

# %%
show(one_f_one_b(STAGES, 8))

# %% [markdown]
# *1F1B* (one forward, one backward) starts the backward pass of a microbatch as soon as the microbatch reaches the last stage.
# Idle time is the same, but a stage stores the residuals of fewer microbatches: with P stages, at most 2P - 1. At the end of a
# row, stages without work wait for the others.

# %%
show(interleaved_one_f_one_b(STAGES, 8, chunks=2))

# %% [markdown]
# *Interleaved 1F1B* gives each stage two ranges of layers, *chunks*: light and dark. The gaps at both ends are half as
# long, but the stages send each other twice as many bytes.
#
# ## Weight units
#
# A backward unit computes two kinds of gradients. The previous stage waits for the gradient of the activations. No stage waits for
# the gradients of the weights. *ZB1* computes the gradients of the weights in a third kind of unit (green): on all stages at
# once, after the last backward unit of a microbatch. So the gaps at both ends are shorter than with 1F1B.

# %%
show(zb1(STAGES, 8))

# %% [markdown]
# *ZB-H1* also moves weight units into the idle time at the end. `text` marks weight units with a `w`.

# %%
show(zb_h1(STAGES, 8))
print(zb_h1(STAGES, 8).text())

# %% [markdown]
# ## Bubble and slots
#
# Two numbers describe a schedule. The *bubble* is the idle time of a stage divided by the time in which it computes. *Slots* are
# the units that a stage stores: first their residuals, then the inputs of their weight units. The table is for P stages, M
# microbatches and V chunks a stage. Forward units, gradients of activations and gradients of weights all take the same time.
#
# | | bubble | slots |
# |---|---|---|
# | GPipe | (P - 1) / M | M |
# | 1F1B | (P - 1) / M | min(2P - 1, M) |
# | interleaved, M at least 2P | (P - 1) / (V M) | P(V + 1) - 1, each 1/V as large |
# | ZB1 | 2 (P - 1) / (3 M) | min(2P - 1, M) |
# | ZB-H1, M at least 2P - 1 | (P - 1) / (3 M) | 2P - 1 |
#
# The cell checks these formulas by counting in the tables. A tick has three *lanes*, one after the other, for the three kinds of
# units. ZB-H1 has weight units in the other two lanes as well. On the left of the picture, GPipe and 1F1B share a line. On the
# right, 1F1B, ZB1 and ZB-H1 share a line.


# %%
def counted(schedule: Schedule) -> tuple[float, int]:
    """Returns the bubble and the slots, counted in the table; -1 means no unit."""
    lanes = np.stack([schedule.forward_TP, schedule.backward_TP, np.full_like(schedule.forward_TP, -1)])
    runs = (np.maximum(lanes, schedule.weight_KTP) != -1).any(axis=2)  # [lane, tick]: in which some stage has a unit
    lasts = [1, 2, 0] if schedule.weight_MG is None else [1, 1, 1]  # without weight units, backward units compute both
    work = 3 * schedule.microbatches * schedule.chunks
    most = 0
    for tick in range(schedule.ticks):
        waits = (schedule.forward_MG <= tick) & (tick <= schedule.last_MG)  # [microbatch, block]
        most = max(most, *(waits[:, stage :: schedule.stages].sum() for stage in range(schedule.stages)))
    return float(runs.sum(axis=1) @ lasts) / work - 1, int(most)


P = STAGES
history = {}
for M in (8, 16, 32, 64):
    for schedule, bubble, slots in (
        (gpipe(P, M), (P - 1) / M, M),
        (one_f_one_b(P, M), (P - 1) / M, 2 * P - 1),
        (interleaved_one_f_one_b(P, M, 2), (P - 1) / (2 * M), P * (2 + 1) - 1),
        (zb1(P, M), 2 * (P - 1) / (3 * M), 2 * P - 1),
        (zb_h1(P, M), (P - 1) / (3 * M), 2 * P - 1),
    ):
        found = counted(schedule)
        history.setdefault(schedule.name, []).append((M, *found))
        assert np.isclose(found[0], bubble)
        assert found[1] == slots == schedule.slots

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.8))
for (name, rows), style in zip(history.items(), ("o-", "s--", "^-", "v-", "d-"), strict=True):
    counts, bubbles, slots = np.transpose(rows)
    left.plot(counts, 100 * bubbles, style, markersize=4, label=name)
    right.plot(counts, slots, style, markersize=4)
left.set(xscale="log", xlabel="microbatches", ylabel="bubble (%)")
right.set(xscale="log", yscale="log", xlabel="microbatches", ylabel="slots")
for axes in (left, right):
    axes.set_xticks(counts, [f"{n:.0f}" for n in counts])
    axes.minorticks_off()
right.set_yticks([7, 11, 16, 32, 64], ["7", "11", "16", "32", "64"])
figure.legend(loc="outside right center")
plt.show()

# %% [markdown]
# ### Which one?
#
# - Use 1F1B unless you have a reason for another schedule.
# - Use interleaved 1F1B if there are few microbatches per stage and the links between stages are fast: the links carry V times
#   as much.
# - Use ZB1 or ZB-H1 if the bubble is large and you have free memory. Their slots differ in size. Before the backward unit, a
#   slot has residuals, which recomputation makes small. After the backward unit, and until the weight unit, the slot has the
#   inputs and the output gradients of all matrices. `pair_slots` counts these larger slots: P with ZB1, up to 2P - 1 with ZB-H1.
# - Short weight units fill less of the bubble. With long sequences, much of the backward work is in attention, which has no
#   weights.

# %%
print("pair_slots:", {make.__name__: make(STAGES, 32).pair_slots for make in (zb1, zb_h1)})
for share in (0.5, 0.335, 0.2):
    bubbles = {make.__name__: make(STAGES, 8).simulate(weight=share).bubble for make in (one_f_one_b, zb1, zb_h1)}
    found = ", ".join(f"{name} {bubble:.1%}" for name, bubble in bubbles.items())
    print(f"bubble if weight units take {share:.0%} of the time of the backward pass: {found}")

# %% [markdown]
# ### What lockstep costs
#
# All stages run one program, and a lane is as long as its longest unit in any stage. If each stage ran a program of its own:
#
# - 1F1B would take the same time, and store P microbatches in place of 2P - 1.
# - ZB1 would be as fast as ZB-H1 is in lockstep: each stage would run a weight unit whenever it has nothing else to do.
# - ZB-H1 would be faster if weight units are short. In lockstep, a weight unit in the lane of longer units takes as long as
#   they do.

# %%
for make in (one_f_one_b, zb1, zb_h1):
    for share in (0.5, 0.2):
        figures = make(STAGES, 8).simulate(weight=share)
        print(
            f"{make.__name__:12} weights {share:.0%} of the backward pass: "
            f"bubble {figures.bubble:.1%} in lockstep, {figures.free_bubble:.1%} without"
        )

# %% [markdown]
# ## Run the schedules
#
# The model is only an example: 8 equal layers, an embedding before them and a loss after them. `value_and_grad` takes these
# three as functions, and a schedule. `product(f, x, w)` returns `f(x, w)`; weight units compute the gradients of every `w` that
# is used so.

# %%
WIDTH, LAYERS, ROWS = 128, 8, 64  # rows of a microbatch

keys = iter(jax.random.split(jax.random.key(0), 6))
stacked = {
    "up": jax.random.normal(next(keys), (LAYERS, WIDTH, 4 * WIDTH)) / WIDTH**0.5,
    "down": jax.random.normal(next(keys), (LAYERS, 4 * WIDTH, WIDTH)) / (4 * WIDTH) ** 0.5,
}
shared = {"in": jax.random.normal(next(keys), (8, WIDTH)), "out": jax.random.normal(next(keys), (WIDTH,)) / WIDTH**0.5}


def layer(weights, x):
    return x + product(jnp.matmul, jnp.tanh(product(jnp.matmul, x, weights["up"])), weights["down"])


def embed(shared, batch):
    return batch["x"] @ shared["in"]


def loss_fn(shared, x, batch):
    return jnp.square(x @ shared["out"] - batch["y"]).mean()


def batch_of(microbatches: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(microbatches * ROWS, 8)).astype(np.float32)
    return {"x": x, "y": np.tanh(x[:, 0] * x[:, 1])}


mesh = make_mesh(MeshConfig(pipe=STAGES, data=1), ROWS, devices)


def pipelined(schedule: Schedule):
    return value_and_grad(layer, embed, loss_fn, schedule=schedule, mesh=mesh)


# %% [markdown]
# Loss and gradients must equal what plain JAX computes on one device, but not bit for bit: a pipeline adds numbers in another
# order, and float32 rounds each sum at the seventh digit.


# %%
def plain(shared, stacked, batch):
    x, _ = jax.lax.scan(lambda x, weights: (layer(weights, x), None), embed(shared, batch), stacked)
    return loss_fn(shared, x, batch)


def largest_difference(schedule: Schedule) -> float:
    """Returns the largest relative error of the loss and of all gradients."""
    batch = batch_of(schedule.microbatches)
    ours = jax.jit(pipelined(schedule))(shared, stacked, batch)
    theirs = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(shared, stacked, batch)
    return max(
        float(np.linalg.norm(np.ravel(a - b)) / np.linalg.norm(np.ravel(b)))
        for a, b in zip(jax.tree.leaves(jax.device_get(ours)), jax.tree.leaves(jax.device_get(theirs)), strict=True)
    )


for schedule in (interleaved_one_f_one_b(STAGES, 8, chunks=2), zb1(STAGES, 8), zb_h1(STAGES, 8)):
    difference = largest_difference(schedule)
    print(f"{schedule.name} against plain JAX: {difference:.1e}")
    assert difference < 1e-5

# %% [markdown]
# ## Memory
#
# More microbatches of the same size make the bubble smaller. How much memory do they cost? The compiler reports how much memory
# a program needs beside its arguments and results.

# %%
compiled = {}
for make in (gpipe, one_f_one_b):
    for M in (8, 16, 32):
        schedule = make(STAGES, M)
        compiled[schedule.name, M] = jax.jit(pipelined(schedule)).lower(shared, stacked, batch_of(M)).compile()

needs = {key: program.memory_analysis().temp_size_in_bytes for key, program in compiled.items()}
figure, axes = plt.subplots(figsize=(5, 2.4))
for shift, name, color in ((-0.2, "gpipe", ORANGE), (0.2, "1f1b", BLUE)):
    bars = axes.bar(np.arange(3) + shift, [needs[name, M] / 1e6 for M in (8, 16, 32)], 0.4, color=color, label=name)
    axes.bar_label(bars, fmt="%.0f")
axes.set_xticks(range(3), [f"{M} microbatches" for M in (8, 16, 32)])
axes.set(ylabel="memory of a device (MB)")
axes.legend(loc="upper left")
plt.show()

# %% [markdown]
# GPipe's memory grows with every microbatch. 1F1B never stores more than 7 units, so its memory hardly grows: by less than one
# percent over the whole picture.

# %%
assert needs["1f1b", 32] < 1.01 * needs["1f1b", 8]
assert needs["gpipe", 16] > 1.5 * needs["gpipe", 8]
assert needs["gpipe", 32] > 1.5 * needs["gpipe", 16]

# %% [markdown]
# ## Time
#
# Devices that share a CPU cannot show how fast a pipeline is, but they do show the bubble. In a tick without work, a stage
# computes on old data, and on a shared CPU this takes time from the other stages. So with M microbatches, each one should take
# 1 + (P - 1) / M times as long as in an infinitely long batch. The machine may be busy with other programs, so expect only
# rough agreement.

# %%
took = {}
for M in (8, 16, 32):
    arguments = jax.device_put((shared, stacked, batch_of(M)), jax.NamedSharding(mesh, jax.P()))
    program = jax.jit(pipelined(one_f_one_b(STAGES, M)))
    jax.block_until_ready(program(*arguments))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        times.append(time.perf_counter() - start)
    took[M] = min(times) / M
    print(f"M={M:<3}{took[M] * 1e3:6.2f} ms a microbatch")

figure, axes = plt.subplots(figsize=(5, 2.4))
expected = [(1 + (STAGES - 1) / M) / (1 + (STAGES - 1) / 32) for M in took]
axes.plot(list(took), expected, "--", color=GRAY, label="what the bubble says")
axes.plot(list(took), [seconds / took[32] for seconds in took.values()], "o", color=BLUE, label="measured")
axes.set(xticks=list(took), xlabel="microbatches", title="time of a microbatch, relative to 32 of them")
axes.margins(y=0.2)
axes.set_ylim(bottom=0)
axes.legend()
plt.show()

# %% [markdown]
# ## A schedule of your own
#
# If every stage runs a program of its own, 1F1B stores the residuals of P microbatches. The tables above store 2P - 1. Is a
# table with P possible? Let a microbatch enter at every second tick, and start its backward pass one tick after it reaches the
# last stage: in each tick half of the stages run forward and the other half backward.


# %%
def every_second_tick(stages: int, microbatches: int) -> Schedule:
    """Returns a schedule with at most P units stored on a stage."""
    m, s = np.arange(microbatches)[:, None], np.arange(stages)
    forward_MG = 2 * m + s
    backward_MG = 2 * m + 2 * (stages - 1) - s + 1
    return Schedule("every second tick", stages, 1, microbatches, forward_MG, backward_MG)


mine = every_second_tick(STAGES, 8)
show(mine)
print(mine.text())

# %% [markdown]
# The cell below runs this table: the gradients are right, and a stage needs 4 slots. But the table costs time: every tick is
# still as long as a forward and a backward unit, and each stage is idle for one of them. Only without lockstep would this table
# have the bubble of 1F1B. For this reason the 1F1B of jaxstack stores 2P - 1 microbatches.

# %%
figures = mine.simulate()
print(f"{mine.slots} slots; bubble {figures.bubble:.1%} in lockstep, {figures.free_bubble:.1%} without")
difference = largest_difference(mine)
print(f"against plain JAX: {difference:.1e}")
assert mine.slots == STAGES
assert np.isclose(figures.free_bubble, (STAGES - 1) / 8)
assert figures.bubble > 1
assert difference < 1e-5

# %% [markdown]
# ## Tables that cannot run
#
# A table is checked when it is made, before JAX sees it, so an invalid one cannot give wrong gradients.

# %%
forward, backward = mine.forward_MG, mine.backward_MG
late = forward.copy()
late[2, 3] += 1
mistakes = {
    "a unit runs a tick late, and its input is overwritten": (late, backward),
    "microbatches go back before they have arrived": (forward, backward - 2),
    "all microbatches at once": (0 * forward + forward[0], backward),
    "a stage is missing": (forward[:, :3], backward[:, :3]),
}
for what, (forward_MG, backward_MG) in mistakes.items():
    try:
        Schedule("mine", STAGES, 1, 8, forward_MG, backward_MG)
    except ScheduleError as error:
        print(f"{what}\n    {error}\n")
    else:
        raise AssertionError(f"{what}: not caught")

# %% [markdown]
# ## Exercise
#
# You have four stages and want a bubble of at most 10%. How many microbatches does 1F1B need, and how many does ZB-H1 need? Use
# the table of formulas. The cell below counts in the tables: write both numbers into `answer`, such as `(16, 8)`.
#
# <details><summary>Answer</summary>
#
# P - 1 is 3. With 1F1B, 3 / M is at most 0.1 from M = 30 on. With ZB-H1, 3 / (3 M) is at most 0.1 from M = 10 on. So ZB-H1
# reaches the same bubble with a third of the batch.
#
# </details>

# %%
# @title Check your answer { display-mode: "form" }
answer = None  # @param {type: "raw"}
right = tuple(next(M for M in range(7, 100) if counted(make(4, M))[0] < 0.1 + 1e-9) for make in (one_f_one_b, zb_h1))
if answer is not None:
    print("Right." if tuple(answer) == right else "Not yet.")
assert right == (30, 10)

# %% [markdown]
# ## Where to go next
#
# - [docs/pipelines.md](https://github.com/jaxstack/jaxstack/blob/main/docs/pipelines.md): which schedule to choose, and two
#   examples with Flax models. [docs/pipeline_design.md](https://github.com/jaxstack/jaxstack/blob/main/docs/pipeline_design.md)
#   explains the executor.
# - `jaxstack train --mesh.pipe=2` trains a language model in a pipeline of two stages.
# - [flax_sharding.ipynb](https://colab.research.google.com/github/jaxstack/jaxstack/blob/main/colab/flax_sharding.ipynb): split
#   the arrays of a Flax model instead of its depth.
