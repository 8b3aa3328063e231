# %% [markdown]
# # Your own Flax model on eight devices
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxstack/jaxstack/blob/main/colab/flax_sharding.ipynb)
#
# You have a model in Flax and more than one device. One decision is missing for every array: which of its dimensions is
# split over which axis of the devices. Here the decisions are a list of rules. `shard` checks every rule and places the
# arrays; the model's code does not change.
#
# No accelerator is needed. With fewer than eight, the CPU plays eight devices.

# %%
import importlib.util
import os

if importlib.util.find_spec("jaxstack") is None:
    print("installing jaxstack, about a minute")
    # %pip install -q git+https://github.com/jaxstack/jaxstack

os.environ["JAX_NUM_CPU_DEVICES"] = "8"  # JAX reads this when it is imported

# %%
import jax
import numpy as np
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState

from jaxstack.config import MeshConfig
from jaxstack.sharding import Rules, ShardingError, guard, make_mesh, placed, shard, table

jax.config.update("jax_default_matmul_precision", "float32")  # GPUs and TPUs would round more, and differ more
devices = (jax.devices() if jax.device_count() >= 8 else jax.devices("cpu"))[:8]
print(f"jax {jax.__version__}, {len(devices)} x {devices[0].device_kind}")

# %% [markdown]
# ## The mesh
#
# A mesh gives the eight devices three coordinates, here 2 x 2 x 2. By convention `data` splits only the batch, `fsdp` the
# batch and the parameters, `tensor` the parameters and the arithmetic of each layer. Axes of size one do nothing.

# %%
BATCH, LENGTH, VOCAB, STEPS = 32, 16, 64, 20

mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), BATCH, devices)
rows = jax.NamedSharding(mesh, jax.P(("data", "fsdp")))  # how a batch lies: in quarters
print(dict(mesh.shape))

# %% [markdown]
# ## A stranger's model
#
# Plain nnx. It names no device and no mesh axis, and imports nothing of ours.


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
# `placed` reads how arrays lie now, `table` prints it. Nothing is split yet: on the mesh every device would hold all of it.
# The first column has the paths that rules are written for.

# %%
print(table(*placed(plain), mesh))

# %% [markdown]
# ## Rules
#
# A rule is a regular expression for the path and one entry a dimension: a mesh axis, several, or `None`. The expression
# must match the whole path; the first match wins; `()` replicates.
#
# `up` is split by columns over `tensor` and `down` by rows, so the wide activations between them stay where they are
# made. `fsdp` takes the other dimension: it saves memory, and each matrix is put together when it is needed.

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
print(table(*placed(model), mesh))

# %% [markdown]
# Each device now holds about a quarter. `shard` returned a new module with the same values, and `plain` is untouched.
# `guard` raises an error where more than 5% of the bytes are still split over neither `fsdp` nor `tensor`.

# %%
guard(*placed(model), mesh)
assert jax.tree.all(jax.tree.map(np.array_equal, nnx.state(model), nnx.state(plain)))

# %% [markdown]
# ## A picture
#
# JAX draws where the parts of an array are. First `up/kernel`, 128 x 512: its rows in two halves (`fsdp`), its columns in
# two halves (`tensor`). Each part is on two devices, because parameters are not split over `data`.

# %%
jax.debug.visualize_array_sharding(model.blocks[0].up.kernel[...], scale=0.6)

# %% [markdown]
# The embedding, 64 x 128: its rows over `fsdp` and `tensor` together, in four parts.

# %%
jax.debug.visualize_array_sharding(model.embed.embedding[...], scale=0.8)

# %% [markdown]
# ## The optimizer
#
# Adam keeps two moments of every parameter. With `like=model` each lies where its parameter does, by the same rules.

# %%
optimizer = shard(nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param), rules, mesh, like=model)

lies = placed(optimizer)[1]
assert lies["opt_state/0/mu/blocks/0/up/kernel"] == placed(model)[1]["blocks/0/up/kernel"]
for path in lies:
    if "blocks/0/up" in path:
        print(f"{path:36}{lies[path]}")

# %% [markdown]
# ## Twenty steps
#
# An ordinary training step. The compiler reads from the arguments how they lie, and adds the communication.


# %%
@nnx.jit
def train_step(model: NextToken, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    def loss_fn(model: NextToken) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


# %% [markdown]
# Something to learn: each token has one successor, drawn once.

# %%
rng = np.random.default_rng(0)
successor = rng.permutation(VOCAB)
sequences = [rng.integers(0, VOCAB, (STEPS, BATCH))]
while len(sequences) <= LENGTH:
    sequences.append(successor[sequences[-1]])
batches = np.stack(sequences, axis=-1).astype(np.int32)  # [step, sequence, position]

# %%
on_eight = np.array([train_step(model, optimizer, jax.device_put(tokens, rows)) for tokens in batches])
for step in (0, 5, 10, 15, 19):
    print(f"step {step:2}  loss {on_eight[step]:.4f}")
assert on_eight[-1] < on_eight[0] / 2

# %% [markdown]
# Did the layout survive? XLA chooses how a step's results lie, so look again after the first steps of every new model.

# %%
guard(*placed(model), mesh)
guard(*placed(optimizer), mesh)

# %% [markdown]
# ## The same on one device
#
# `plain` was never placed. The same step, on one device, must give the same losses. Not bit for bit: eight devices add
# the same numbers in another order, float32 rounds each sum at the seventh digit, and Adam carries this on for twenty
# steps. Hence 1e-5.

# %%
plain_optimizer = nnx.Optimizer(plain, optax.adamw(3e-4), wrt=nnx.Param)
on_one = np.array([train_step(plain, plain_optimizer, jax.device_put(tokens, devices[0])) for tokens in batches])

np.testing.assert_allclose(on_eight, on_one, rtol=1e-5)
print(f"largest relative difference of the loss: {np.max(np.abs(on_eight / on_one - 1)):.1e}")

# %% [markdown]
# ## Linen
#
# The same for a linen model, this time with attention. Its kernels have three dimensions, and a rule one entry for each.


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
# Linen keeps its parameters in a dict. A `TrainState` holds them beside the optimizer's moments, so one call places both
# and needs no `like`. Query, key and value are (width, heads, head width): whole heads go over `tensor`.

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
guard(*placed(state), mesh)
print(table(*placed(state.params), mesh))

# %% [markdown]
# A linen step is a function from state to state. `out_shardings` holds its result to the layout of its argument.


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
# A model may name its dimensions, as this layer does. Then a rule maps a name to a mesh axis, and one rule serves every
# array that has the name.

# %%
kernel_init = linen.with_partitioning(linen.initializers.lecun_normal(), ("embed", "mlp"))
layer = linen.Dense(512, use_bias=False, kernel_init=kernel_init)
named = layer.init(jax.random.key(0), np.zeros((1, 128), np.float32))
print(table(*placed(shard(named, Rules(parameters={"embed": "fsdp", "mlp": "tensor"}), mesh)), mesh))

# %% [markdown]
# ## Mistakes
#
# Nothing is silently ignored. A misspelt rule would leave its arrays to a later rule, or replicated, and you would
# find out by running out of memory. Here it is an error that names the rule, the array and the way out.

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
# ## Where to go next
#
# - [docs/flax.md](https://github.com/jaxstack/jaxstack/blob/main/docs/flax.md): models larger than one device (`shard`
#   works inside `jax.jit` and on shapes without values), every error, and the traps.
# - [first_model.ipynb](https://colab.research.google.com/github/jaxstack/jaxstack/blob/main/colab/first_model.ipynb): train
#   a language model of our own, in five minutes.
# - [docs/meshes.md](https://github.com/jaxstack/jaxstack/blob/main/docs/meshes.md): our own models on every mesh of a long table,
#   each equal to one device.
