# %% [markdown]
# # Your first model in five minutes
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxstack/jaxstack/blob/main/colab/first_model.ipynb)
#
# Train a small language model to write Python, byte by byte, on the source of Python's standard library, which is already on
# this machine. Then change the model and measure the difference. You need no download and no accelerator.

# %%
import importlib.util

if importlib.util.find_spec("jaxstack") is None:
    print("installing jaxstack, about a minute")
    # %pip install -q git+https://github.com/jaxstack/jaxstack

# %% [markdown]
# ## The configuration
#
# Every choice of a run is a field with a default. A wrong value raises an error when the object is created.

# %%
from dataclasses import replace

from jaxstack import data
from jaxstack.config import Config, DataConfig, ModelConfig, OptimConfig, SampleConfig, TrainConfig, resolve
from jaxstack.runtime import platform

cfg = Config(
    model=ModelConfig(num_layers=2, d_model=128, num_heads=4, d_ff=344),
    data=DataConfig(source="stdlib", tokenizer="bytes", seq_len=128, batch_size=8),
    train=TrainConfig(steps=150, eval_steps=20),
    optim=OptimConfig(name="muon", lr=7e-3, warmup_steps=20, schedule="wsd", decay_fraction=0.6, final_lr_fraction=0.0),
)

# %% [markdown]
# ## The data
#
# A tenth of the text is held out: the model never trains on it. A token is a byte, so the vocabulary has 256 entries.

# %%
dataset = data.load(cfg.data)
cfg = resolve(cfg, dataset.tokenizer.vocab_size)
print(dataset.description)
assert cfg.model.vocab_size == 256

# %% [markdown]
# A batch is a function of the seed and the step. `targets` are the tokens shifted by one position.

# %%
reading = {"seq_len": cfg.data.seq_len, "batch_size": cfg.data.batch_size, "packing": cfg.data.packing}
batches = data.batches(dataset.train, seed=cfg.run.seed, **reading)
for name, array in batches[0].items():
    print(f"{name:8}", array.dtype, array.shape)
print(dataset.tokenizer.decode(batches[0]["tokens"][0]))

# %% [markdown]
# ## The model
#
# `decoder.spec` declares every parameter once: shape, a name for each dimension, initializer. All layers of one kind are
# stacked in one array, with the dimension `layers` first. Values and shardings derive from this declaration, for a mesh of any
# size.

# %%
platform.configure(cfg.mesh, cfg.data.batch_size)  # one device per CPU core; JAX reads this when it is imported

import jax
import matplotlib.pyplot as plt
import numpy as np

from jaxstack import sharding
from jaxstack.generate import decode
from jaxstack.models import decoder, params
from jaxstack.models.context import Context
from jaxstack.training import step
from jaxstack.training.state import TrainState, abstract_state, make_state

spec = decoder.spec(cfg.model)
for path, param in params.flat_spec(spec).items():
    print(f"{path:29}{param.shape!s:20}{', '.join(param.axes)}")
print(f"{params.count(spec):,} parameters on {jax.device_count()} x {jax.devices()[0].device_kind}")

# %% [markdown]
# ## The loop
#
# `Context` says how to compute: devices, kernels, precision. `step` has the pure functions. This is what `train.py` does,
# without checkpoints and logging.


# %%
mesh = sharding.make_mesh(cfg.mesh, cfg.data.batch_size)


def train(cfg: Config) -> tuple[TrainState, list[float]]:
    """Returns the state after `train.steps` steps, and the loss of each step in nats per byte."""
    ctx = Context.create(cfg, mesh)
    abstract = abstract_state(cfg, ctx)  # shapes and shardings, without values
    state = make_state(cfg, ctx, abstract)
    train_step = step.jit_train_step(cfg, ctx, abstract)
    losses = []
    for i in range(cfg.train.steps):
        state, metrics = train_step(state, jax.device_put(batches[i], ctx.sharding(ctx.batch)))
        losses.append(float(metrics["loss"]))
        if i % 25 == 0 or i == cfg.train.steps - 1:
            print(f"step {i + 1:3}  loss {losses[-1]:.3f}")
    return state, losses


def held_out_bits(cfg: Config, state: TrainState) -> float:
    """Returns the held-out loss in bits per byte."""
    ctx = Context.create(cfg, mesh)
    eval_step = jax.jit(step.make_eval_step(cfg, ctx))
    held_out = data.eval_batches(dataset.eval, steps=cfg.train.eval_steps, **reading)
    sums = [jax.device_get(eval_step(state.params, jax.device_put(b, ctx.sharding(ctx.batch)))) for b in held_out]
    nats, count = np.sum(sums, axis=0)
    return float(nats / count / np.log(2))


# %% [markdown]
# Before the first step every byte is equally probable, so the loss starts near ln 256 = 5.55. The first step compiles, which
# takes a few seconds.

# %%
state, losses = train(cfg)
bits = held_out_bits(cfg, state)
print(f"held out: {bits:.3f} bits per byte")

assert abs(losses[0] - np.log(256)) < 0.2
assert bits < 3.2

# %% [markdown]
# ## What it writes
#
# After half a minute of training the text looks like Python: it has indentation, brackets and fragments of words. `python
# train.py` trains for a few minutes, and most of the words are right.

# %%
sample = decode.generate(
    cfg.model,
    state.params,
    [dataset.tokenizer.encode("import os\n\ndef ").tolist()],
    SampleConfig(tokens=100, temperature=0.7),
    ctx=Context.create(cfg, mesh),
)
print(dataset.tokenizer.decode(sample[0]))

# %% [markdown]
# ## Change the model
#
# How much do positions help? Without them, the first layer sees the earlier bytes as a set without an order. One field
# changes; the other initial values, the batches and their order stay the same.

# %%
without = replace(cfg, model=replace(cfg.model, positions="none"))
state_without, losses_without = train(without)
bits_without = held_out_bits(without, state_without)
print(f"held out: {bits:.3f} bits per byte with positions, {bits_without:.3f} without")

assert bits_without > bits + 0.1

# %% [markdown]
# Both curves have the same bumps, because both models read the same batches. They separate once the models have learned
# which bytes are frequent.

# %%
figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
axes.plot(losses, label="rotary positions")
axes.plot(losses_without, label="no positions")
axes.set(xlabel="step", ylabel="loss (nats per byte)")
axes.grid(alpha=0.3)
axes.legend()
plt.show()

# %% [markdown]
# ## Where to go next
#
# - Change other fields: `norm="layer"`, `gated=False`, `tied_embeddings=True`; `OptimConfig(name="adamw", lr=3e-3)`.
#   `help(ModelConfig)` lists them.
# - Run the same from a shell, with checkpoints, resuming and a log: `python train.py`
#   ([first run](https://github.com/jaxstack/jaxstack/blob/main/docs/first_run.md)).
# - Read the model: [decoder.py](https://github.com/jaxstack/jaxstack/blob/main/jaxstack/models/decoder.py) and
#   [layers.py](https://github.com/jaxstack/jaxstack/blob/main/jaxstack/models/layers.py).
# - Shard your own Flax model over several devices:
#   [flax_sharding.ipynb](https://colab.research.google.com/github/jaxstack/jaxstack/blob/main/colab/flax_sharding.ipynb).
