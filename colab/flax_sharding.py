# %% [markdown]
# # Your own Flax model on eight devices
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxstack/jaxstack/blob/main/colab/flax_sharding.ipynb)
#
# How do you train a model of your own on eight devices, without changing it? For every array you decide which of its dimensions
# is split over which mesh axis, and write these decisions as a list of rules. `shard` checks every rule and places the arrays;
# the code of the model does not change.
#
# You need no accelerator: with fewer than eight devices, the CPU simulates eight.

# %%
# include parts/install.py

# %%
import os

os.environ["JAX_NUM_CPU_DEVICES"] = "8"  # JAX reads this when it is imported

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState

from jaxstack.common.drawing import BLUE, COLORS, GRAY, ORANGE, STYLE
from jaxstack.config import MeshConfig
from jaxstack.sharding import Rules, ShardingError, assert_sharded, make_mesh, shard, shardings_of, summarize

jax.config.update("jax_default_matmul_precision", "float32")  # GPUs and TPUs would round more, and differ more
plt.rcParams.update(STYLE)
devices = (jax.devices() if jax.device_count() >= 8 else jax.devices("cpu"))[:8]
print(f"jax {jax.__version__}, {len(devices)} x {devices[0].device_kind}")

# %% [markdown]
# ## The mesh
#
# A mesh arranges the eight devices in a grid, here 2 x 2 x 2. By convention `data` splits only the batch, `fsdp` the batch and
# the parameters, and `tensor` the parameters and the arithmetic of each layer. Axes of size one do nothing.

# %%
BATCH, LENGTH, VOCAB, STEPS = 32, 16, 64, 20

mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), BATCH, devices)
rows = jax.NamedSharding(mesh, jax.P(("data", "fsdp")))  # splits a batch into quarters
print(dict(mesh.shape))

# %% [markdown]
# ## A model that does not use jaxstack
#
# This is plain nnx. It mentions no device and no mesh axis, and imports nothing from jaxstack.


# %%
class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class NextToken(nnx.Module):
    def __init__(self, vocab: int, width: int, layers: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(layers)])
        self.head = nnx.Linear(width, vocab, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


plain = NextToken(VOCAB, width=128, layers=2, rngs=nnx.Rngs(0))

# %% [markdown]
# `shardings_of` reads the present sharding of arrays, and `summarize` returns a table of it. Nothing is split yet: on the mesh,
# every device would store the complete model. The first column has the paths for which you write rules. The column `spec` has
# the mesh axes that split each dimension; `-` means none.

# %%
print(summarize(*shardings_of(plain), mesh))

# %% [markdown]
# ## Rules
#
# A rule is a regular expression for the path, and one entry per dimension: a mesh axis, several axes, or `None`, which does not
# split the dimension. The expression must match the complete path, and the first match is used. `()` splits no dimension, so
# every device stores the whole array.
#
# `up` is split over `tensor` by columns and `down` by rows, so the wide activations between them need no communication.
# `fsdp` splits the other dimension: it saves memory, and each matrix is gathered when it is needed.

# %%
rules = Rules(
    paths=[
        ("embed/embedding", (("fsdp", "tensor"), None)),
        (r"blocks/\d+/up/kernel", ("fsdp", "tensor")),
        (r"blocks/\d+/up/bias", ("tensor",)),
        (r"blocks/\d+/down/kernel", ("tensor", "fsdp")),
        ("head/kernel", ("fsdp", "tensor")),
        (".*/(bias|scale)", ()),
    ]
)
model = shard(plain, rules, mesh)
print(summarize(*shardings_of(model), mesh))

# %% [markdown]
# Each device now stores about a quarter of the parameters. `shard` returned a new module with the same values, and `plain` has
# not changed. `assert_sharded` raises an error if more than 5% of the bytes are split over neither `fsdp` nor `tensor`.

# %%
assert_sharded(*shardings_of(model), mesh)
assert jax.tree.all(jax.tree.map(np.array_equal, nnx.state(model), nnx.state(plain)))

# %% [markdown]
# ## Pictures
#
# How many bytes of each array does a device store? Split over all three axes, an array would have an eighth on each device. Here
# a device stores a quarter of each matrix, because `data` does not split parameters.


# %%
def show_stored(tree) -> float:
    """Draws the bytes of each array and what a device stores of it. Returns the stored part of all bytes."""
    leaves, specs = shardings_of(tree)
    whole = np.array([leaf.itemsize * np.prod(leaf.shape) for leaf in leaves.values()]) / 1024
    parts = [jax.NamedSharding(mesh, specs[path]).shard_shape(leaf.shape) for path, leaf in leaves.items()]
    stored = np.array([leaf.itemsize * np.prod(part) for leaf, part in zip(leaves.values(), parts, strict=True)]) / 1024
    _, axes = plt.subplots(figsize=(7, 0.5 + 0.22 * len(leaves)))
    axes.barh(list(leaves), whole, color=GRAY, label="the whole array")
    axes.barh(list(leaves), stored, color=BLUE, label="on each device")
    axes.invert_yaxis()
    axes.set(xlabel="KiB")
    axes.legend()
    plt.show()
    print(f"a device stores {stored.sum() / whole.sum():.1%} of the parameters")
    return stored.sum() / whole.sum()


assert show_stored(model) < 0.27

# %% [markdown]
# Which devices store which part of an array? The left picture shows `up/kernel`, 128 x 512: `fsdp` splits its rows, and `tensor`
# its columns. Two devices store each part, because parameters are not split over `data`. The right picture shows the embedding,
# 64 x 128: `fsdp` and `tensor` together split its rows into four parts.


# %%
def draw_parts(axes, array: jax.Array, title: str) -> None:
    """Draws a matrix with its parts, and the devices that store each part."""
    holders = {}
    for device, place in array.sharding.devices_indices_map(array.shape).items():
        ends = [part.indices(size)[:2] for part, size in zip(place, array.shape, strict=True)]
        holders.setdefault(tuple(ends), []).append(device.id)
    for color, (((top, bottom), (left, right)), ids) in zip(COLORS, sorted(holders.items()), strict=False):
        axes.add_patch(plt.Rectangle((left, top), right - left, bottom - top, facecolor=color, edgecolor="white"))
        text = "devices " + ", ".join(map(str, sorted(ids)))
        axes.text((left + right) / 2, (top + bottom) / 2, text, ha="center", va="center", color="white")
    axes.set(xlim=(0, array.shape[1]), ylim=(array.shape[0], 0), xlabel="column", ylabel="row", title=title)


figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.6))
draw_parts(left, model.blocks[0].up.kernel[...], "blocks/0/up/kernel")
draw_parts(right, model.embed.embedding[...], "embed/embedding")
plt.show()

# %% [markdown]
# ## The optimizer
#
# Adam stores two moments for every parameter. With `like=model` each moment is sharded like its parameter, by the same
# rules.

# %%
optimizer = shard(nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param), rules, mesh, like=model)

specs = shardings_of(optimizer)[1]
assert specs["opt_state/0/mu/blocks/0/up/kernel"] == shardings_of(model)[1]["blocks/0/up/kernel"]
for path in specs:
    if "blocks/0/up" in path:
        print(f"{path:36}{specs[path]}")

# %% [markdown]
# ## Twenty steps
#
# This is an ordinary training step. The compiler reads the sharding of the arguments and adds the communication.


# %%
@nnx.jit
def train_step(model: NextToken, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    def loss_fn(model: NextToken) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


# %% [markdown]
# The task: each token has one successor, which is drawn once. A model that has learned all successors has a loss of zero. A
# model that predicts all tokens as equally likely has a loss of ln 64, the dashed line below.

# %%
rng = np.random.default_rng(0)
successor = rng.permutation(VOCAB)
sequences = [rng.integers(0, VOCAB, (STEPS, BATCH))]
while len(sequences) <= LENGTH:
    sequences.append(successor[sequences[-1]])
batches = np.stack(sequences, axis=-1).astype(np.int32)  # [step, sequence, position]

on_eight = np.array([train_step(model, optimizer, jax.device_put(tokens, rows)) for tokens in batches])
figure, axes = plt.subplots(figsize=(5, 2.4))
axes.plot(on_eight, "o-", color=BLUE, markersize=3)
axes.axhline(np.log(VOCAB), color=GRAY, linestyle="--")
axes.set(xlabel="step", ylabel="loss (nats per token)", ylim=(0, None), xticks=range(0, STEPS, 5))
plt.show()
print(f"loss {on_eight[0]:.4f} at the first step, {on_eight[-1]:.4f} at the last")
assert on_eight[-1] < on_eight[0] / 2

# %% [markdown]
# Is the state still sharded? XLA chooses the sharding of a step's results, so check it after the first steps of every new
# model.

# %%
assert_sharded(*shardings_of(model), mesh)
assert_sharded(*shardings_of(optimizer), mesh)

# %% [markdown]
# ## The same on one device
#
# `plain` was never sharded. The same steps on one device must give the same losses, but not bit for bit: eight devices add the
# same numbers in another order, float32 rounds each sum at the seventh digit, and twenty steps of Adam accumulate the
# differences. So the check has a relative tolerance of 1e-5, the dashed line in the right picture. A point at 1e-9 means that
# both losses are equal.

# %%
plain_optimizer = nnx.Optimizer(plain, optax.adamw(3e-4), wrt=nnx.Param)
on_one = np.array([train_step(plain, plain_optimizer, jax.device_put(tokens, devices[0])) for tokens in batches])

np.testing.assert_allclose(on_eight, on_one, rtol=1e-5)
print(f"largest relative difference of the loss: {np.max(np.abs(on_eight / on_one - 1)):.1e}")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.8))
left.plot(on_one, color=ORANGE, linewidth=4, label="one device")
left.plot(on_eight, color=BLUE, label="eight devices")
left.set(xlabel="step", ylabel="loss (nats per token)")
left.legend()
right.semilogy(np.abs(on_eight / on_one - 1) + 1e-9, "o", color=BLUE, markersize=3)
right.axhline(1e-5, color=GRAY, linestyle="--")
right.set(xlabel="step", title="relative difference of the loss")
plt.show()

# %% [markdown]
# ## Linen
#
# Now shard a linen model with attention. The kernels of attention have three dimensions, so their rules have three entries.


# %%
class Attention(linen.Module):
    vocab: int
    width: int

    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = linen.Embed(self.vocab, self.width, name="embed")(tokens)
        mask = linen.make_causal_mask(tokens)
        x = x + linen.MultiHeadDotProductAttention(num_heads=8, name="attention")(
            linen.LayerNorm(name="norm")(x), mask=mask
        )
        return linen.Dense(self.vocab, use_bias=False, name="head")(x)


attention = Attention(VOCAB, width=128)
variables = attention.init(jax.random.key(0), batches[0])
plain_state = TrainState.create(apply_fn=attention.apply, params=variables["params"], tx=optax.adamw(1e-3))

# %% [markdown]
# Linen stores its parameters in a dict. A `TrainState` has the parameters beside the optimizer's moments, so one call of `shard`
# shards both and needs no `like`. The kernels of query, key and value have the shape (width, heads, head width): `tensor` splits
# them by complete heads.

# %%
state_rules = Rules(
    paths=[
        ("params/embed/embedding", (("fsdp", "tensor"), None)),
        ("params/attention/(query|key|value)/kernel", ("fsdp", "tensor", None)),
        ("params/attention/out/kernel", ("tensor", None, "fsdp")),
        ("params/head/kernel", ("fsdp", "tensor")),
        ("params/.*/(bias|scale)", ()),
    ]
)
state = shard(plain_state, state_rules, mesh)
assert_sharded(*shardings_of(state), mesh)
assert show_stored(state.params) < 0.27

# %% [markdown]
# A linen step is a function from state to state. `out_shardings` gives the new state the sharding of the old one.


# %%
def linen_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss_fn(params: dict) -> jax.Array:
        logits = state.apply_fn({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def losses(step, state, where):
    found = []
    for tokens in batches:
        state, loss = step(state, jax.device_put(tokens, where))
        found.append(loss)
    return np.array(found)


layout = jax.tree.map(lambda array: array.sharding, state)
on_eight = losses(jax.jit(linen_step, out_shardings=(layout, None)), state, rows)
on_one = losses(jax.jit(linen_step), plain_state, devices[0])

print(f"loss {on_eight[0]:.4f} at the first step, {on_eight[-1]:.4f} at the last")
print(f"largest relative difference to one device: {np.max(np.abs(on_eight / on_one - 1)):.1e}")
assert on_eight[-1] < on_eight[0] / 2
np.testing.assert_allclose(on_eight, on_one, rtol=1e-5)  # as above

# %% [markdown]
# ## Names instead of paths
#
# A model may name the dimensions of its arrays, as this layer does. Then a rule maps a name to a mesh axis, and applies to every
# dimension with this name.

# %%
kernel_init = linen.with_partitioning(linen.initializers.lecun_normal(), ("embed", "mlp"))
layer = linen.Dense(512, use_bias=False, kernel_init=kernel_init)
named = layer.init(jax.random.key(0), np.zeros((1, 128), np.float32))
print(summarize(*shardings_of(shard(named, Rules(parameters={"embed": "fsdp", "mlp": "tensor"}), mesh)), mesh))

# %% [markdown]
# ## Mistakes
#
# No mistake is ignored silently. Without a check, the arrays of a misspelled rule would match a later rule or be replicated. You
# would notice only when memory runs out. Here a misspelled rule is an error that names the rule, the array and the fix.

# %%
mistakes = {
    "nothing uses a rule": [*rules.paths, ("head/weight", ("fsdp", "tensor"))],
    "no rule reaches an array": rules.paths[:-1],
    "a pattern matches only a part": [("embedding", ()), *rules.paths[1:]],
    "two dimensions claim one axis": [("head/kernel", ("fsdp", "fsdp")), *rules.paths],
}
for what, paths in mistakes.items():
    try:
        shard(plain, Rules(paths=paths), mesh)
    except ShardingError as error:
        print(f"{what}\n    {error}\n")
    else:
        raise AssertionError(f"{what}: not caught")

# %% [markdown]
# ## Exercise
#
# Change the rule of `params/head/kernel` in `state_rules` so that every device has the whole array. How many times as many
# bytes of this array does each device then store? The cell below checks your number.
#
# <details><summary>Answer</summary>
#
# The rule becomes `("params/head/kernel", ())`. Before, `fsdp` and `tensor` split the array into four parts. So each device now
# stores four times as many bytes of it. The eight devices had two copies of each part, because `data` does not split parameters.
#
# </details>

# %%
# @title Check your answer { display-mode: "form" }
answer = None  # @param {type: "raw"}
changed = Rules(paths=[("params/head/kernel", ()), *state_rules.paths[:3], state_rules.paths[4]])
shapes = [
    leaf.sharding.shard_shape(leaf.shape)
    for leaf in (shard(plain_state, r, mesh).params["head"]["kernel"] for r in (changed, state_rules))
]
right = np.prod(shapes[0]) // np.prod(shapes[1])
if answer is not None:
    print("Right." if answer == right else "Not yet.")
assert right == 4

# %% [markdown]
# ## Where to go next
#
# - [docs/flax.md](https://github.com/jaxstack/jaxstack/blob/main/docs/flax.md): models larger than one device (`shard` works
#   inside `jax.jit` and on shapes without values), every error, and the traps.
# - [first_model.ipynb](https://colab.research.google.com/github/jaxstack/jaxstack/blob/main/colab/first_model.ipynb): train a
#   language model of jaxstack in five minutes.
# - [docs/meshes.md](https://github.com/jaxstack/jaxstack/blob/main/docs/meshes.md): jaxstack's own models on many meshes, each
#   compared with one device.
