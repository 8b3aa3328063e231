# %% [markdown]
# # Debugging: which operation made it NaN?
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxstack/jaxstack/blob/main/colab/debugging.ipynb)
#
# A model is broken here on purpose. Its loss is finite, and its gradients are NaN. The layers run in a loop that XLA compiles,
# so Python's `print` and its debugger see no value of the loop. `jaxstack.debug` finds the operation, the layer and the line,
# and shows the inputs of the operation.
#
# You need no accelerator, and no data to download.

# %%
# include parts/install.py

# %% [markdown]
# ## A model, and a mistake
#
# The mistake is a change of the MLP: each output vector is divided by its length, the root of its sum of squares. Where the
# length is zero, the result should be zero, so the author has written `jnp.where`. Some recipes initialize an output matrix
# with zeros. Here layer 2 has such a matrix, so all its lengths are zero. Layers are counted from 0.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from jaxstack import families
from jaxstack.common.drawing import BLUE, GREEN, RED, STYLE
from jaxstack.config import Config, DataConfig, ModelConfig
from jaxstack.debug import replay, search
from jaxstack.debug.guide import RunGuide
from jaxstack.debug.statistics import statistics
from jaxstack.models import layers, params
from jaxstack.models.context import Context
from jaxstack.training.assemble import make_gradients

plt.rcParams.update(STYLE)
cfg = Config(
    model=ModelConfig(num_layers=4, d_model=64, num_heads=4, vocab_size=256),
    data=DataConfig(seq_len=32, batch_size=4),
)
ctx = Context()  # one device, in float32
values = params.init(jax.random.key(0), families.spec(cfg.model))
values["layers"]["mlp"]["w_down"] = values["layers"]["mlp"]["w_down"].at[2].set(0.0)
ids = np.random.default_rng(0).integers(0, 256, (4, 33)).astype(np.int32)
batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_weights": np.ones((4, 32), np.float32)}
right = layers.mlp


def mistaken(cfg, p, x, ctx):
    """The MLP, with outputs of length one."""
    y = right(cfg, p, x, ctx)
    length = jnp.sqrt(jnp.square(y).sum(axis=-1, keepdims=True))
    return jnp.where(length > 0, y / length, 0.0)


layers.mlp = mistaken

# %% [markdown]
# ## What a user sees
#
# The loss is finite. The gradients of nearly all parameters are NaN, because the backward pass carries NaN from layer 2 to all
# layers before it.

# %%
loss, gradients, _ = jax.jit(make_gradients(cfg, ctx))(values, batch)
print(f"loss {float(loss):.4f}")


def show_finite(gradients) -> None:
    """Draws which share of each gradient is NaN, for the matrices of attention and MLP in every layer."""
    paths = {f"{part}/{name}": g for part in ("attention", "mlp") for name, g in gradients["layers"][part].items()}
    shares = np.array([np.isnan(g).reshape(4, -1).mean(axis=1) for g in paths.values()])
    _, axis = plt.subplots(figsize=(5.2, 3.2))
    shown = axis.imshow(100 * shares, vmin=0, vmax=100, cmap="cividis", aspect="auto")
    axis.set(xticks=range(4), xlabel="layer", title="elements of the gradient that are NaN")
    axis.set_yticks(range(len(paths)), list(paths))
    plt.colorbar(shown, ax=axis, label="%")
    plt.show()


show_finite(gradients)

# %% [markdown]
# Read the picture from the right, as the backward pass runs. All gradients of layer 3 are finite, and all of layer 2 are NaN.
# The MLP is the last part of a layer. So the mistake is in the MLP of layer 2, or between this MLP and the next layer. The picture
# does not show which operation it is.

# %% [markdown]
# ## What made it NaN
#
# `replay.explain` traces the computation of loss and gradients as a JAX program. From the first result that is infinite or NaN
# it walks back to the operation that made such a value from finite inputs. For a run, `jaxstack debug RUN` does the same from
# the run's checkpoints.

# %%
found = replay.explain(cfg, ctx, values, batch)
assert found is not None
print("\n".join(replay.describe(found, RunGuide(cfg.model))))

# %% [markdown]
# `first` is the operation, a division, and `code` is its line in this notebook: the line of the square root. The derivative of
# the square root at zero is infinite: `1 / (2 * sqrt(0))`. The author's `where` chooses zero in the forward pass. In the
# backward pass the branch `y / length`, which was not chosen, gets a gradient of zero, and zero times infinity is NaN.
#
# `found` has the arrays themselves. So you can look at every input, and repeat the operation.

# %%
print(found.equation.primitive.name, [statistics(value) for value in found.inputs])
again = search.run(found.equation, found.inputs)
print("again:", statistics(again[0]))

# %% [markdown]
# The picture shows why the forward pass hides the mistake. The left curve, the length, is finite everywhere. Its derivative on
# the right grows without a limit as the sum of squares approaches zero, and at zero it is infinite.

# %%
squares = np.linspace(0.0, 1.0, 2000)
with np.errstate(divide="ignore"):
    slope = 0.5 / np.sqrt(squares)
figure, (left, right_side) = plt.subplots(1, 2, figsize=(9, 3))
left.plot(squares, np.sqrt(squares), color=BLUE)
left.set(xlabel="sum of squares", title="length: the square root")
right_side.plot(squares[1:], slope[1:], color=RED)
right_side.axvline(0, color=RED, linestyle=":")
right_side.annotate("infinite at zero", (0, slope[1:].max()), (0.04, 0.9 * slope[1:].max()))
right_side.set(xlabel="sum of squares", title="its derivative, by which gradients are multiplied")
plt.show()

# %% [markdown]
# ## The repair
#
# The square root must not read a zero at all: put `where` inside it.


# %%
def repaired(cfg, p, x, ctx):
    """The MLP, with outputs of length one, or zero."""
    y = right(cfg, p, x, ctx)
    squares = jnp.square(y).sum(axis=-1, keepdims=True)
    length = jnp.sqrt(jnp.where(squares > 0, squares, 1.0))
    return jnp.where(squares > 0, y / length, 0.0)


layers.mlp = repaired
_, gradients, _ = jax.jit(make_gradients(cfg, ctx))(values, batch)
print("all finite:", all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(gradients)))
print("found:", replay.explain(cfg, ctx, values, batch))
layers.mlp = right

# %% [markdown]
# Every gradient is finite now, so the first picture has one color. The second picture has the norms of the gradients in the
# MLPs. They are zero in layer 2: all its lengths are zero, so `where` chooses the constant zero, which has no gradient.

# %%
show_finite(gradients)
norms = {name: np.sqrt((np.square(g).reshape(4, -1)).sum(axis=1)) for name, g in gradients["layers"]["mlp"].items()}
_, axis = plt.subplots(figsize=(5.2, 3))
for k, (name, by_layer) in enumerate(norms.items()):
    axis.bar(np.arange(4) + 0.25 * k, by_layer, 0.22, label=name, color=(BLUE, GREEN, RED)[k])
axis.set(xticks=range(4), xlabel="layer", title="norm of the gradient, after the repair")
axis.legend()
plt.show()

# %% [markdown]
# ## Exercise
#
# Another author repairs the MLP by `jnp.maximum`: `y / jnp.sqrt(jnp.maximum(squares, 1e-12))`. Are the gradients finite now?
# How large is the norm of the gradient of `layers/mlp/w_down` in layer 2? With the original MLP, which does not divide, this
# norm is 0.14. Guess the new norm within a factor of ten; the cell below computes it.
#
# <details><summary>Answer</summary>
#
# They are finite. But where the length is zero, the output is divided by 1e-6, and so is the gradient. So a good guess is
# 0.14 / 1e-6 = 140,000. The norm is about 19,000; in the other layers, and after the repair above, it is at most 3. A check
# for NaN finds nothing, and the clipping of gradients then makes all other gradients tiny.
#
# </details>

# %%
# @title Check your answer { display-mode: "form" }
answer = None  # @param {type: "raw"}


def other(cfg, p, x, ctx):
    """The MLP with the other author's repair."""
    y = right(cfg, p, x, ctx)
    return y / jnp.sqrt(jnp.maximum(jnp.square(y).sum(axis=-1, keepdims=True), 1e-12))


layers.mlp = other
_, gradients, _ = jax.jit(make_gradients(cfg, ctx))(values, batch)
layers.mlp = right
norm = float(jnp.linalg.norm(gradients["layers"]["mlp"]["w_down"][2].ravel()))
if answer is not None:
    print("Right." if norm / 10 < answer < 10 * norm else "Not yet.", f"The norm is {norm:,.0f}.")
assert 15_000 < norm < 25_000

# %% [markdown]
# ## Stop within a layer
#
# Python's debugger cannot stop in a compiled step. With `--debug.eager=true`, a run computes each step operation by operation.
# Put `breakpoint()` into a function of `jaxstack/models/layers.py`: the debugger stops there, and sees arrays. The debugger's
# command `show x` prints the values of `x` with their statistics.
#
# Read how to debug runs, and how the search works: [debugging](https://github.com/jaxstack/jaxstack/blob/main/docs/debugging.md).
