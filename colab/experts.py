# %% [markdown]
# # Experts: watch a router learn
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxstack/jaxstack/blob/main/colab/experts.ipynb)
#
# What happens to a router that nothing balances? In a *mixture of experts* each block has several MLPs, and a *router* sends
# every token to a few of them. So the model has many weights, but multiplies each token with few of them. Without balancing, a
# router sends nearly all tokens to a few experts: these improve, are chosen more often, and the others learn nothing. This
# notebook shows this collapse, and two remedies.
#
# It trains small models on bytes of Python's standard library, in a minute or two. You need no accelerator, and no data to
# download.

# %%
# include parts/install.py

# %% [markdown]
# ## The model
#
# The model has two blocks with eight experts each. Each token, here a byte, uses two of the eight. An expert takes at most
# 1.25 times its even share of a sequence (`capacity_factor`). Further pairs of token and expert are *dropped*: the expert adds
# nothing to the residual stream of that token.

# %%
import html
from dataclasses import replace
from typing import Any, NamedTuple

from jaxstack import data, families
from jaxstack.config import Config, DataConfig, ModelConfig, MoEConfig, OptimConfig, TrainConfig, resolve
from jaxstack.runtime import platform

LAYERS, EXPERTS, CHOICES = 2, 8, 2

cfg = Config(
    model=ModelConfig(
        num_layers=LAYERS,
        d_model=96,
        num_heads=4,
        moe=MoEConfig(num_experts=EXPERTS, top_k=CHOICES, d_ff=128, capacity_factor=1.25),
    ),
    data=DataConfig(source="stdlib", tokenizer="bytes", seq_len=128, batch_size=16),
    train=TrainConfig(steps=100),
    optim=OptimConfig(name="muon", lr=7e-3, warmup_steps=20, schedule="wsd", decay_fraction=0.6, final_lr_fraction=0.0),
)
dataset = data.load(cfg.data)
cfg = resolve(cfg, dataset.tokenizer.vocab_size)
platform.configure(cfg.mesh, cfg.data.batch_size)  # one device per CPU core; JAX reads this when it is imported

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from IPython.display import HTML, display

from jaxstack import sharding
from jaxstack.common.drawing import BLUE, COLORS, GRAY, ORANGE, STYLE
from jaxstack.families import flops
from jaxstack.families.context import make_context
from jaxstack.features.experts import route
from jaxstack.models import decoder, layers, params
from jaxstack.models.context import Context
from jaxstack.training.assemble import make_gradients
from jaxstack.training.state import Recipe, abstract_state, make_optimizer, make_state

plt.rcParams.update(STYLE)
print(dataset.description)
print(
    f"{params.count(families.spec(cfg.model)):,} parameters, of which each byte uses {flops.matmul_params(cfg.model):,}"
)

# %% [markdown]
# ## Three routers
#
# - **nothing**: a softmax and the two most probable experts, without balancing.
# - **a loss**: the same, with a term in the objective that grows with uneven load (`aux_loss_weight`).
# - **a bias**: DeepSeek-V3's sigmoid router. Each expert has a bias that is used to *choose* experts, but not to weight their
#   outputs. After every step the bias of busy experts decreases and that of idle experts increases (`bias_update_rate`).
#   Nothing is added to the objective.
#
# DeepSeek-V3 uses a rate of 0.001 over very many steps. Here there are 100 steps, so the rate is larger.

# %%
routers = {
    "nothing": replace(cfg.model.moe, aux_loss_weight=0.0),
    "a loss": replace(cfg.model.moe, aux_loss_weight=0.01),
    "a bias": replace(cfg.model.moe, router="sigmoid", bias_update_rate=0.02),
}

# %% [markdown]
# `make_train_step` reports sums over experts. Here we want to see each expert, so the step is written out: gradients, update,
# and the router's bias (`after_update` does nothing for the first two routers). For every layer, `sums` has sums over the
# batch: how many pairs chose each expert (`load`), how many pairs were dropped, and the entropy of the router's probabilities.

# %%
batches = data.batches(dataset.train, seed=0, seq_len=cfg.data.seq_len, batch_size=cfg.data.batch_size, packing=False)
mesh = sharding.make_mesh(cfg.mesh, cfg.data.batch_size)
TOKENS = cfg.data.batch_size * cfg.data.seq_len  # of a step


class History(NamedTuple):
    loss: np.ndarray  # [steps], nats per byte
    load: np.ndarray  # [steps, layers, experts], 1 is the even share
    dropped: np.ndarray  # [steps, layers], part of all pairs
    entropy: np.ndarray  # [steps, layers], nats, mean over all bytes


def train(cfg: Config) -> tuple[Any, History]:
    """Returns the parameters after `train.steps` steps, and the figures of the routers in each step."""
    ctx = make_context(cfg, mesh)
    gradients = make_gradients(cfg, ctx)
    optimizer = make_optimizer(Recipe.of(cfg))
    extras = families.of(cfg.model).extras(cfg.model)

    def one_step(values, opt_state, batch):
        loss, grads, sums = gradients(values, batch)
        changes, opt_state = optimizer.update(grads, opt_state, values)
        values = extras.after_update(optax.apply_updates(values, changes), sums, ctx)
        return values, opt_state, (loss, sums["load"], sums["dropped"], sums["entropy"])

    abstract = abstract_state(Recipe.of(cfg), ctx)
    state = make_state(Recipe.of(cfg), ctx, abstract)
    where = jax.tree.map(lambda leaf: leaf.sharding, (abstract.params, abstract.opt_state))
    one_step = jax.jit(one_step, donate_argnums=(0, 1), out_shardings=(*where, None))

    values, opt_state, seen = state.params, state.opt_state, []
    for i in range(cfg.train.steps):
        batch = jax.device_put(batches[i], ctx.layout.sharding(ctx.layout.batch))
        values, opt_state, figures = one_step(values, opt_state, batch)
        seen.append(jax.device_get(figures))
    loss, load, dropped, entropy = map(np.stack, zip(*seen, strict=True))
    pairs = TOKENS * CHOICES
    return values, History(loss, load * EXPERTS / pairs, dropped / pairs, entropy / TOKENS)


# %% [markdown]
# The three runs have equal batches, and equal initial values of all parameters that they share. The first step of each
# compiles. Each picture shows the loads of the busiest and of the idlest expert while the model learns, for both layers. Loads
# are multiples of the even share, which is the gray line.


# %%
configs = {name: replace(cfg, model=replace(cfg.model, moe=router)) for name, router in routers.items()}
trained, histories = {}, {}


def run(name: str) -> None:
    trained[name], histories[name] = train(configs[name])
    h = histories[name]
    np.testing.assert_allclose(h.load.mean(-1), 1, rtol=1e-5)  # every pair is counted once, in every layer and step
    print(f"loss             {h.loss[-20:].mean():.3f} nats per byte, mean of the last 20 steps")
    print(f"busiest expert   {h.load[-20:].max(-1).mean():.2f} times its even share")
    print(f"dropped          {h.dropped[-20:].mean():.1%} of all pairs")
    figure, axes = plt.subplots(figsize=(5, 1.8))
    for layer, style in enumerate(("-", "--")):
        axes.plot(h.load[:, layer].max(-1), style, color=ORANGE, label=f"busiest, layer {layer}")
        axes.plot(h.load[:, layer].min(-1), style, color=BLUE, label=f"idlest, layer {layer}")
    axes.axhline(1, color=GRAY, linewidth=0.8)
    axes.set(xlabel="step", ylabel="load", ylim=(0, 4), title=f"balanced by {name}")
    figure.legend(loc="outside right center")
    plt.show()


run("nothing")

# %%
run("a loss")

# %%
run("a bias")

# %% [markdown]
# ## The load of every expert, over time
#
# Each row is an expert. White is the even share, red is less, and blue is more: at 4, every byte is sent to the expert.

# %%
figure, grid = plt.subplots(LAYERS, len(routers), figsize=(9, 4), sharex=True, sharey=True)
for column, (name, h) in enumerate(histories.items()):
    for layer in range(LAYERS):
        axes = grid[layer, column]
        image = axes.imshow(
            np.log2(np.maximum(h.load[:, layer].T, 1 / 8)), aspect="auto", cmap="RdBu", vmin=-2, vmax=2,
            interpolation="nearest",
        )  # fmt: skip
        axes.set(yticks=range(EXPERTS))
        if layer == 0:
            axes.set_title(f"balanced by {name}")
        if column == 0:
            axes.set_ylabel(f"layer {layer}, expert")
for axes in grid[-1]:
    axes.set_xlabel("step")
bar = figure.colorbar(image, ax=grid, ticks=[-2, -1, 0, 1, 2])
bar.set_ticklabels(["1/4 or less", "1/2", "even", "2", "4"])
plt.show()

# %% [markdown]
# Without balancing, two or three experts take nearly all tokens, and most expert weights stay unused. In the first steps the
# loads of all three runs become uneven in this way. The balancing loss and the bias then correct them.

# %%
busiest = {name: h.load[-20:].max(-1).mean() for name, h in histories.items()}
idlest = {name: h.load[-20:].min(-1).mean() for name, h in histories.items()}
assert busiest["nothing"] > 2.5
assert max(busiest["a loss"], busiest["a bias"]) < 2
assert idlest["nothing"] < 0.1
assert min(idlest["a loss"], idlest["a bias"]) > 0.25

# %% [markdown]
# ## What imbalance costs
#
# With a capacity, uneven load means dropped pairs. Without one (`capacity_factor=None`, the default) nothing is dropped, but
# all devices wait for the device with the busiest expert.
#
# The entropy shows how decided the routers are: at ln 8 = 2.08 nats, the dashed line, all experts are equally probable. The
# entropy is computed from the scores, before experts are chosen. The pictures have the mean of both layers.

# %%
figure, grid = plt.subplots(1, 3, figsize=(9, 2.8))
for name, h in histories.items():
    grid[0].plot(h.loss, label=name)
    grid[1].plot(100 * h.dropped.mean(-1), label=name)
    grid[2].plot(h.entropy.mean(-1), label=name)
for axes, title in zip(grid, ("loss (nats per byte)", "dropped pairs (%)", "router entropy (nats)"), strict=True):
    axes.set(title=title, xlabel="step")
grid[2].axhline(np.log(EXPERTS), color=GRAY, linestyle="--")
grid[0].legend()
plt.show()

dropped = {name: h.dropped[-20:].mean() for name, h in histories.items()}
assert dropped["nothing"] > 2 * max(dropped["a loss"], dropped["a bias"])

# %% [markdown]
# After so few steps of such a small model the losses are nearly equal, so they do not show which router is best. The dropped
# pairs do differ. Neither remedy reduces the drops to zero: the capacity applies to every *sequence* of 128 bytes, but both
# remedies balance averages over many sequences.
#
# ## Which expert gets which byte?
#
# You can also call the functions of the model one by one. The function `choices` calls them block by block, and returns which
# experts each router chooses.


# %%
def choices(cfg: Config, values: Any, tokens: np.ndarray) -> np.ndarray:
    """Returns the experts of every token in every layer, [L, B, S, k]."""
    ctx = Context()
    m = cfg.model
    _, stack = families.only_stack(m)
    inputs = decoder.make_layer_inputs(m, {"tokens": tokens}, ctx)
    x, _ = decoder.embed(m, values, inputs, ctx)
    found = []
    for i in range(m.num_layers):
        weights = jax.tree.map(lambda leaf, i=i: leaf[i], values["layers"])
        h = layers.norm(m, weights["attention_norm"], x, ctx)
        h = layers.attention(m, weights["attention"], h, ctx, inputs, mask=layers.AttentionMask())
        h = layers.norm(m, weights["mlp_norm"], x + h, ctx)
        found.append(route(m, weights["moe"], h.reshape(-1, m.d_model), None).experts)
        x, _ = stack.run_layer(m, ctx, weights, x, i, inputs, mask=layers.AttentionMask())
    return np.stack(jax.device_get(found)).reshape(m.num_layers, *tokens.shape, CHOICES)


held_out = data.eval_batches(dataset.eval, steps=4, seq_len=128, batch_size=32, packing=False)
tokens = np.concatenate([batch["tokens"] for batch in held_out])
values = jax.device_put(trained["a loss"], jax.devices()[0])
experts = choices(configs["a loss"], values, tokens)

# Checks the choices against the counts that the model returns. The model's compiled loop rounds in other places. So two nearly
# equal scores may change their order, for a few of the 16,384 tokens.
_, aux = families.forward(configs["a loss"].model, values, tokens)
for layer in range(LAYERS):
    assert np.abs(np.bincount(experts[layer].ravel(), minlength=EXPERTS) - aux["load"][layer]).sum() <= 32

# %% [markdown]
# Each column is a frequent byte, and each row an expert. Dark cells are the experts to which the byte is sent. The darkest color
# is one half, because each byte has two pairs.

# %%
frequent = np.argsort(-np.bincount(tokens.ravel(), minlength=256))[:40]
frequent = np.sort(frequent)
figure, grid = plt.subplots(LAYERS, 1, figsize=(9, 4.4), sharex=True)
for layer, axes in enumerate(grid):
    share = np.zeros((EXPERTS, len(frequent)))
    for column, byte in enumerate(frequent):
        share[:, column] = np.bincount(experts[layer][tokens == byte].ravel(), minlength=EXPERTS)
    image = axes.imshow(share / share.sum(0), aspect="auto", cmap="Blues", vmin=0, vmax=0.5)
    axes.set(yticks=range(EXPERTS), ylabel=f"layer {layer}, expert")
names = {10: "\\n", 32: "sp"}
grid[-1].set_xticks(range(len(frequent)), [names.get(byte, chr(byte)) for byte in frequent.tolist()])
figure.colorbar(image, ax=grid, label="part of the byte's pairs")
plt.show()

# %% [markdown]
# How much of a router's first choice depends on the byte? Divide the mutual information of byte and expert by the entropy of the
# expert: 100% if the byte decides everything, 0% if nothing. The rest depends on the context. The second column printed below
# uses the byte *before* in place of the byte.


# %%
def decided(byte: np.ndarray, expert: np.ndarray) -> float:
    """Returns the mutual information of both, divided by the entropy of `expert`."""
    joint = np.zeros((256, EXPERTS))
    np.add.at(joint, (byte.ravel(), expert.ravel()), 1 / byte.size)
    apart = joint.sum(1, keepdims=True) * joint.sum(0)
    shared = np.sum(joint[joint > 0] * np.log(joint[joint > 0] / apart[joint > 0]))
    part = joint.sum(0)
    return float(shared / -np.sum(part[part > 0] * np.log(part[part > 0])))


print("layer  the byte  the byte before  (part of the first choice that it decides)")
for layer in range(LAYERS):
    first = experts[layer, :, 1:, 0]  # the more probable of the two
    print(f"{layer:5}  {decided(tokens[:, 1:], first):8.0%}  {decided(tokens[:, :-1], first):15.0%}")
shuffled = np.random.default_rng(0).permutation(experts[0, :, 1:, 0].ravel())
assert decided(tokens[:, 1:], experts[0, :, 1:, 0]) > 0.3 > 10 * decided(tokens[:, 1:], shuffled)

# %% [markdown]
# These experts do not specialize in a subject. In such a small model they divide the alphabet: the byte decides most of the
# choice. Below is held-out text, each byte in the color of its first expert in the last layer.

# %%
spans = [
    f'<span style="background: {COLORS[expert]}80">{html.escape(chr(byte)) if byte != 10 else "&#8629;<br>"}</span>'
    for row in range(3)
    for byte, expert in zip(tokens[row].tolist(), experts[-1, row, :, 0].tolist(), strict=True)
]
display(HTML(f'<pre style="line-height: 1.5; color: black; background: white">{"".join(spans)}</pre>'))

# %% [markdown]
# ## Exercise
#
# Each byte has two of the eight experts, and an expert takes at most 1.25 times its even share of a sequence. If every byte
# chooses one and the same expert first, what percentage of that expert's pairs is dropped? What percentage of all pairs are
# these? The cell below checks the second number, such as `12.5`.
#
# <details><summary>Answer</summary>
#
# A sequence of S bytes has 2 S pairs, so the even share is S / 4 and the capacity 1.25 S / 4 = 0.3125 S. The expert is chosen S
# times and drops 68.75% of its pairs. These are 34.4% of all pairs. Without balancing, the run above drops even more (the middle
# picture of *What imbalance costs*), because second choices are uneven too.
#
# </details>

# %%
# @title Check your answer { display-mode: "form" }
answer = None  # @param {type: "raw"}
length = cfg.data.seq_len
capacity = cfg.model.moe.capacity_factor * length * CHOICES / EXPERTS
right = 100 * (length - capacity) / (length * CHOICES)
if answer is not None:
    print("Right." if abs(answer - right) < 0.5 else "Not yet.")
assert abs(right - 34.4) < 0.1

# %% [markdown]
# ## Where to go next
#
# - Lower the bias rate, `bias_update_rate=0.001`, or raise the loss weight, `aux_loss_weight=0.1`, and compare load and loss.
# - Try other routers: `router="domain"` gives each expert one kind of text; `shared_experts=1` adds an expert that every token
#   uses. `help(MoEConfig)` lists all fields.
# - Train a larger model with experts from a shell, with the routers' figures in `metrics.jsonl`:
#   `jaxstack train --config moe_quickstart` ([experts](https://github.com/jaxstack/jaxstack/blob/main/docs/experts.md)).
# - Split experts over several devices: [expert parallelism](https://github.com/jaxstack/jaxstack/blob/main/docs/parallelism/expert.md).
# - Read the routers: [routers.py](https://github.com/jaxstack/jaxstack/blob/main/jaxstack/moe/routers.py).
