# %% [markdown]
# # Your first model in five minutes
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxstack/jaxstack/blob/main/colab/first_model.ipynb)
#
# What does a small model learn about Python in half a minute? Train a language model to write Python, byte by byte. It reads
# the source of Python's standard library, which is already on this machine. Then change the model and measure the
# difference. You need no accelerator, and no data to download.

# %%
# include parts/install.py

# %% [markdown]
# ## The configuration
#
# Every choice of a run is a field with a default. A wrong value raises an error when the object is created.

# %%
import json
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import jaxstack as js
from jaxstack import data, families, train
from jaxstack.common.drawing import BLUE, GRAY, ORANGE, STYLE
from jaxstack.config import Config, DataConfig, ModelConfig, OptimConfig, RunConfig, SampleConfig, TrainConfig, resolve
from jaxstack.runtime import platform

cfg = Config(
    run=RunConfig(dir="runs/positions", log_every=1),
    model=ModelConfig(num_layers=2, d_model=128, num_heads=4, d_ff=344),
    data=DataConfig(source="stdlib", tokenizer="bytes", seq_len=128, batch_size=8),
    train=TrainConfig(steps=150, eval_steps=20),
    optim=OptimConfig(name="muon", lr=7e-3, warmup_steps=20, schedule="wsd", decay_fraction=0.6, final_lr_fraction=0.0),
    sample=SampleConfig(prompts=()),
)
plt.rcParams.update(STYLE)

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
# A batch is a function of the seed and the step. `targets` are the tokens shifted by one position, and `loss_weights` says how
# much each target counts. Below the arrays you see the first row of a batch as text.

# %%
reading = {"seq_len": cfg.data.seq_len, "batch_size": cfg.data.batch_size, "packing": cfg.data.packing}
batches = data.batches(dataset.train, seed=cfg.run.seed, **reading)
for name, array in batches[0].items():
    print(f"{name:8}", array.dtype, array.shape)
print(dataset.tokenizer.decode(batches[0]["tokens"][0]))

# %% [markdown]
# Which bytes are frequent? A model that always predicts these shares, without reading the bytes before, has their entropy as
# its loss. The dashed line is the share of a byte if all were equally frequent. The model predicts this share before its first
# step.

# %%
seen = np.concatenate([batches[step]["tokens"].ravel() for step in range(20)])
shares = np.bincount(seen, minlength=256) / seen.size
frequent = np.argsort(shares)[::-1][:16]
entropy = -(shares[shares > 0] * np.log(shares[shares > 0])).sum()
print(f"entropy of single bytes: {entropy:.2f} nats; if all 256 were equally frequent: {np.log(256):.2f} nats")

figure, axes = plt.subplots(figsize=(7, 2.6))
axes.bar([repr(chr(byte)) for byte in frequent], 100 * shares[frequent], color=BLUE)
axes.axhline(100 / 256, color=GRAY, linestyle="--")
axes.set(ylabel="share of all bytes (%)", title="the most frequent bytes of 20 batches")
plt.show()
assert shares.argmax() == ord(" ")
assert 2 < entropy < np.log(256)

# %% [markdown]
# ## The model
#
# `families.spec` returns the declaration of every parameter: its shape, a name for each dimension, and its initializer. The
# parameters of all layers are stacked in one array, with the dimension `layers` first. Values and shardings derive from this
# declaration, for a mesh of any size.

# %%
platform.configure(cfg.mesh, cfg.data.batch_size)  # one device per CPU core; JAX reads this when it is imported

from jaxstack.models import params

spec = families.spec(cfg.model)
for path, param in params.flat_spec(spec).items():
    print(f"{path:29}{param.shape!s:20}{', '.join(param.axes)}")
print(f"{params.count(spec):,} parameters")

# %% [markdown]
# ## The training
#
# `train.main` is what `python train.py` does: it trains, evaluates and saves a checkpoint in the run directory. Before the
# first step every byte is equally probable, so the loss starts near ln 256 = 5.55. The first step compiles, which takes a few
# seconds. If you run this cell again, it finds the run complete and does not train.

# %%
train.main(cfg)

# %% [markdown]
# ## What the run wrote
#
# `metrics.jsonl` has a line for each step. `js.load` reads the model back, here on all devices, as in the training. `evaluate`
# computes the held-out loss in bits per byte, which equals the last logged value. A model that predicts all bytes as equally
# likely needs 8 bits.


# %%
def logged(cfg: Config, name: str) -> list[float]:
    """Returns the values of one metric, from every line of the log that has this metric."""
    lines = map(json.loads, (Path(cfg.run.dir) / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


run = js.load(cfg.run.dir, mesh={"data": -1})
losses, bits = logged(cfg, "loss"), run.evaluate().bits_per_byte
print(f"{run}: {bits:.3f} bits per byte of held-out text")

assert abs(losses[0] - np.log(256)) < 0.2
assert bits == logged(cfg, "eval_bits_per_byte")[-1]
assert bits < 3.2

# %% [markdown]
# Let the model write. After half a minute of training its text looks like Python: it has indentation, brackets and fragments
# of words.

# %%
for piece in run.stream("import os\n\ndef ", tokens=100, temperature=0.7):
    print(piece, end="", flush=True)

# %% [markdown]
# The model gives a score to every possible next byte, and a softmax makes probabilities of the scores. The bars are the six
# likeliest bytes after `de` at the beginning of a line, and after a closed bracket.

# %%
figure, both = plt.subplots(1, 2, figsize=(7, 2.6), sharey=True)
for axes, text in zip(both, ("import os\n\nde", "print(1)"), strict=True):
    scores = run.logits(text)[-1]
    probabilities = np.exp(scores - np.logaddexp.reduce(scores))
    likeliest = np.argsort(scores)[::-1][:6]
    axes.bar([repr(chr(byte)) for byte in likeliest], probabilities[likeliest], color=BLUE)
    axes.set(title=f"after {text[-8:]!r}", xlabel="next byte")
both[0].set_ylabel("probability")
plt.show()
assert abs(probabilities.sum() - 1) < 1e-4

# %% [markdown]
# ## Change the model
#
# How much do positions help? Without positions, the first layer sees the earlier bytes as a set without an order. One field
# changes; the initial values, the batches and their order stay the same. A new run needs a new directory.

# %%
without = replace(cfg, run=replace(cfg.run, dir="runs/no_positions"), model=replace(cfg.model, positions="none"))
train.main(without)
losses_without = logged(without, "loss")
bits_without = js.load(without.run.dir, mesh={"data": -1}).evaluate().bits_per_byte
print(f"held out: {bits:.3f} bits per byte with positions, {bits_without:.3f} without")

assert bits_without > bits + 0.1

# %% [markdown]
# Both curves have the same bumps, because both models read the same batches. They separate below the dashed line, where a
# model must use the bytes before.

# %%
figure, axes = plt.subplots(figsize=(7, 3))
axes.plot(losses, color=BLUE, label="rotary positions")
axes.plot(losses_without, color=ORANGE, label="no positions")
axes.axhline(entropy, color=GRAY, linestyle="--", label="entropy of single bytes")
axes.set(xlabel="step", ylabel="loss (nats per byte)")
axes.legend()
plt.show()

# %% [markdown]
# ## Exercise
#
# How many parameters does this model have with four layers in place of two? Compute it from the table of parameters, and let
# the cell below check your number.
#
# <details><summary>Answer</summary>
#
# Arrays whose first dimension is `layers` have twice the size. The embedding, the head and the last norm stay as they are.
# So you add the parameters of two layers: `params.count(spec) + params.count(spec["layers"])`.
#
# </details>

# %%
# @title Check your answer { display-mode: "form" }
answer = None  # @param {type: "raw"}
right = params.count(families.spec(replace(cfg.model, num_layers=4)))
if answer is not None:
    print("Right." if answer == right else "Not yet.")
assert right == params.count(spec) + params.count(spec["layers"])

# %% [markdown]
# ## Where to go next
#
# - Change other fields: `norm="layer"`, `gated=False`, `tied_embeddings=True`; `OptimConfig(name="adamw", lr=3e-3)`.
#   `help(ModelConfig)` lists them.
# - Train a larger model from a shell, in a few minutes, until most of its words are right: `jaxstack train`
#   ([first run](https://github.com/jaxstack/jaxstack/blob/main/docs/first_run.md)).
# - Read the model: [decoder.py](https://github.com/jaxstack/jaxstack/blob/main/jaxstack/models/decoder.py) and
#   [layers.py](https://github.com/jaxstack/jaxstack/blob/main/jaxstack/models/layers.py).
# - Shard your own Flax model over several devices:
#   [flax_sharding.ipynb](https://colab.research.google.com/github/jaxstack/jaxstack/blob/main/colab/flax_sharding.ipynb).
