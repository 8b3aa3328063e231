# %% [markdown]
# # Diffusion with experts by timestep
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxstack/jaxstack/blob/main/colab/diffusion.ipynb)
#
# Does a step that removes noise need another expert than a step that sharpens edges? A diffusion model turns noise into a
# picture in many small steps. The first steps decide where ink will be at all, the last ones sharpen edges. These are
# different tasks, so each range of times may have an MLP of its own: an *expert by timestep*, as in ERNIE-ViLG 2.0. Attention
# and all other weights are shared, and each step multiplies with one expert only.
#
# This notebook trains such a model on 8x8 digits in a minute or two. Then it draws digits step by step, and measures what each
# expert has learned. You need no accelerator, and no data to download.

# %%
# include parts/install.py images

# %% [markdown]
# ## The model
#
# A transformer reads the patches of a noisy picture, the picture's time, and its class. It predicts the *velocity* at which the
# picture moves towards noise. There are 1,000 timesteps, from the picture to noise. Expert 0 has the first quarter of them,
# close to the picture, and expert 3 has the last quarter.

# %%
from jaxstack import data, families, train
from jaxstack.config import (
    Config,
    DataConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    RunConfig,
    SampleConfig,
    TrainConfig,
    resolve,
)  # fmt: skip
from jaxstack.runtime import platform

EXPERTS, STEPS = 4, 350

cfg = Config(
    run=RunConfig(dir="runs/digits", log_every=50),
    model=ModelConfig(
        family="diffusion", num_layers=3, d_model=64, num_heads=4, norm="layer", positions="learned", gated=False,
        activation="gelu_tanh", moe=MoEConfig(num_experts=EXPERTS, router="timestep"),
    ),
    data=DataConfig(source="digits", eval_fraction=0.2, seq_len=16, batch_size=128),
    train=TrainConfig(steps=STEPS, eval_every=STEPS, eval_steps=2),
    optim=OptimConfig(name="muon", lr=1e-2, warmup_steps=20, schedule="cosine", final_lr_fraction=0.0, ema=0.98),
    sample=SampleConfig(pictures=0),
)  # fmt: skip
dataset = data.load(cfg.data)
cfg = resolve(cfg, dataset.vocab_size, dataset.image)
platform.configure(cfg.mesh, cfg.data.batch_size)  # one device per CPU core; JAX reads this when it is imported
print(dataset.description)

# %% [markdown]
# `train.main` is what the command `jaxstack train` runs.

# %%
train.main(cfg)

# %% [markdown]
# ## What the model sees
#
# Training mixes a picture with noise: `(1 - t) picture + t noise`, where t is the timestep divided by 1,000. The color of a
# frame shows which expert learns from this time: the darkest is expert 0, and the lightest is expert 3.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxstack as js
from jaxstack.common.drawing import STYLE
from jaxstack.data.images import from_patches, to_patches
from jaxstack.families import diffusion
from jaxstack.models import params
from jaxstack.models.context import Context

plt.rcParams.update(STYLE)
run = js.load("runs/digits", mesh={"data": 1})
model, ctx = run.model, Context()
last = model.moe.max_timestep
colors = plt.cm.viridis(np.linspace(0.1, 0.9, EXPERTS))


def expert_of(timestep: int) -> int:
    return timestep * EXPERTS // last


def pixels(patches: np.ndarray) -> np.ndarray:
    """Returns pictures [N, H, W] of patches [N, S, P]."""
    return np.asarray(from_patches(np.asarray(patches), model.diffusion.image, model.diffusion.patch_size))[..., 0]


def show(rows: list[list[np.ndarray]], timesteps: list[int], title: str) -> None:
    """Draws rows of pictures, one column for each timestep, framed in the color of the timestep's expert."""
    figure, axes = plt.subplots(
        len(rows), len(timesteps), figsize=(0.9 * len(timesteps), 0.9 * len(rows) + 0.6), squeeze=False
    )
    for row, cells in zip(axes, rows, strict=True):
        for axis, cell, timestep in zip(row, cells, timesteps, strict=True):
            axis.imshow(cell, cmap="gray", vmin=-1, vmax=1)
            axis.set(xticks=[], yticks=[])
            for spine in axis.spines.values():
                spine.set(visible=True, color=colors[expert_of(timestep)], linewidth=3)
    for axis, timestep in zip(axes[0], timesteps, strict=True):
        axis.set_title(f"t={timestep / last:.1f}", fontsize=8)
    figure.suptitle(title, fontsize=10)
    plt.show()


held_out = to_patches(dataset.eval.pixels, model.diffusion.patch_size)
labels = np.asarray(dataset.eval.classes)
noise = np.random.default_rng(0).standard_normal(held_out.shape, np.float32)
columns = [int(t) for t in np.linspace(0, last - 1, 9)]
digits = [int(np.flatnonzero(labels == digit)[0]) for digit in (3, 8)]
show(
    [[pixels((1 - t / last) * held_out[[i]] + t / last * noise[[i]])[0] for t in columns] for i in digits],
    columns,
    "pictures on their way to noise",
)

# %% [markdown]
# ## Drawing, step by step
#
# The sampler begins with noise at the last timestep. In each step it asks the model for the velocity, and computes the picture
# that this velocity would lead to. Then it goes a small step towards this predicted picture. Below you see the predicted picture
# of every third step. It begins as an average of digits, and gets its details when the experts of early times take over.


# %%
@jax.jit
def velocity(values, noisy, classes, timestep):
    rows = jnp.broadcast_to(classes[:, None], noisy.shape[:2])
    batch = {"noisy": noisy, "classes": rows, "gate_ids": jnp.zeros_like(rows) + timestep}
    hidden, _ = families.of(model).hidden_states(model, values, batch, ctx)
    return diffusion.predict(model, values, hidden, batch, ctx)


def draw(values, classes: np.ndarray, timesteps: list[int]) -> list[np.ndarray]:
    """Returns the predicted pictures [N, H, W] of every step, from noise to the picture."""
    noisy, guesses = jnp.asarray(noise[: len(classes)]), []
    for here, there in zip(timesteps, [*timesteps[1:], None], strict=True):
        step = diffusion.Path.at("flow", diffusion.time_of(model, jnp.int32(here)))
        clean, left = step.solve(noisy, velocity(values, noisy, jnp.asarray(classes), here))
        guesses.append(pixels(clean))
        if there is not None:
            noisy = diffusion.Path.at("flow", diffusion.time_of(model, jnp.int32(there))).mix(clean, left)
    return guesses


down = [int(t) for t in np.linspace(last - 1, 0, 24)]
wanted = np.array([0, 3, 7, 8])
guesses = draw(run.params, wanted, down)
shown = [*range(0, len(down), 3), len(down) - 1]
show(
    [[guesses[step][row] for step in shown] for row in range(len(wanted))],
    [down[step] for step in shown],
    "what the model would draw, from noise to picture",
)

# %% [markdown]
# ## One expert for all times
#
# What has each expert learned? In the first column all experts draw. In every other column one expert takes the place of all
# others, and draws from beginning to end. Experts of late times have learned where ink belongs, but have never sharpened an
# edge. Expert 0 has never begun a picture.


# %%
def only(values, expert: int):
    """Returns the parameters with one expert in the place of all."""
    experts = jax.tree.map(lambda a: jnp.broadcast_to(a[:, expert, None], a.shape), values["layers"]["moe"])
    return {**values, "layers": {**values["layers"], "moe": experts}}


columns_of = {"all": draw(run.params, wanted, down)[-1]}
columns_of |= {f"only {e}": draw(only(run.params, e), wanted, down)[-1] for e in range(EXPERTS)}
figure, axes = plt.subplots(len(wanted), len(columns_of), figsize=(len(columns_of) * 1.2, len(wanted) * 1.2))
for column, (name, made) in enumerate(columns_of.items()):
    axes[0, column].set_title(name, fontsize=9)
    for row in range(len(wanted)):
        axes[row, column].imshow(made[row], cmap="gray", vmin=-1, vmax=1)
        axes[row, column].set(xticks=[], yticks=[])
plt.show()

# %% [markdown]
# ## Which expert is best at which time
#
# The picture answers the same question with numbers: the mean squared error of the velocity on held-out pictures, for each range
# of times (rows) and each expert (columns). The lightest cell of a row is the best expert. Each expert should be the best one in
# its own range, on the diagonal.


# %%
def error(values, part: int) -> float:
    """Returns the mean squared error of the velocity on held-out pictures, over timesteps of one range."""
    found = []
    for timestep in np.linspace(part * last / EXPERTS, (part + 1) * last / EXPERTS - 1, 6).astype(int):
        path = diffusion.Path.at("flow", diffusion.time_of(model, jnp.int32(timestep)))
        guess = velocity(values, path.mix(held_out, noise), jnp.asarray(labels), int(timestep))
        found.append(float(jnp.square(guess - path.velocity(held_out, noise)).mean()))
    return float(np.mean(found))


errors = np.array([[error(only(run.params, e), part) for e in range(EXPERTS)] for part in range(EXPERTS)])
figure, axis = plt.subplots(figsize=(4.2, 3.6))
relative = errors / errors.min(1, keepdims=True)
axis.imshow(np.log(relative), cmap="viridis_r")
for (row, column), value in np.ndenumerate(errors):
    axis.text(
        column, row, f"{value:.2f}", ha="center", va="center", color="white" if relative[row, column] > 1.2 else "black"
    )
axis.set(xlabel="expert", ylabel="range of times, 3 is noise", xticks=range(EXPERTS), yticks=range(EXPERTS))
plt.show()
print("best expert of each range:", errors.argmin(1).tolist())
assert (errors.argmin(1) == np.arange(EXPERTS)).all(), "each expert is the best one where it has learned"

# %% [markdown]
# ## Exercise
#
# How many more parameters does this model have than a model with one MLP in each block? How many more FLOPs does a step of the
# sampler take? An MLP has two matrices of `model.d_model` by `model.expert_width` elements, and no biases. Print both sizes in a
# new cell. The cell below checks your first number.
#
# <details><summary>Answer</summary>
#
# Each of the three blocks has `EXPERTS - 1` further MLPs, so the model has
# `3 * (EXPERTS - 1) * 2 * model.d_model * model.expert_width` more parameters. A step takes no more FLOPs, because all pictures
# of a step have the same time, and so one expert computes.
#
# </details>

# %%
# @title Check your answer { display-mode: "form" }
answer = None  # @param {type: "raw"}
experts = families.spec(model)["layers"]["moe"]
right = params.count(experts) * (EXPERTS - 1) // EXPERTS
if answer is not None:
    print("Right." if answer == right else "Not yet.")
assert right == model.num_layers * (EXPERTS - 1) * 2 * model.d_model * model.expert_width

# %% [markdown]
# ## Things to try
#
# - Train longer, with guidance: `jaxstack train --config=configs/diffusion_digits.yaml`, then
#   `jaxstack generate runs/diffusion_digits 3 8 --sample.guidance=2 --out=digits.png`.
# - Change the number of experts: `EXPERTS = 2`, or 8. With more experts, each one learns from fewer pictures.
# - Read pictures of your own: `data.source=images` with a folder for each class, see
#   [docs/diffusion.md](https://github.com/jaxstack/jaxstack/blob/main/docs/diffusion.md).
