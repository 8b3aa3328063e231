"""Trains a stack of nnx blocks on pipe 4 x data 2, by 1F1B, on 8 simulated devices: python pipeline_nnx.py

The loss starts near ln 64 = 4.2 nats and falls below 0.2 in 30 steps: the next token is a fixed function of the last.
"""

import os

if not {"JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS"} & os.environ.keys():
    os.environ.update(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="8")

from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from jaxstack.config import MeshConfig
from jaxstack.pipeline import one_f_one_b, value_and_grad
from jaxstack.sharding import make_mesh

VOCAB, WIDTH, HEADS, LAYERS, LENGTH, BATCH, STEPS = 64, 64, 4, 8, 16, 32, 30


# The model imports nothing from jaxstack: it has no mesh, stages or microbatches.


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm1, self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.LinearGeneral(WIDTH, (3, HEADS, WIDTH // HEADS), rngs=rngs)
        self.out = nnx.LinearGeneral((HEADS, WIDTH // HEADS), WIDTH, axis=(-2, -1), rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (self.qkv(self.norm1(x))[..., i, :, :] for i in range(3))
        x = x + self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Ends(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)


# Stacks the blocks, and wraps the model in three functions of its parameters.


@nnx.vmap
def make_blocks(key: jax.Array) -> Block:
    return Block(nnx.Rngs(key))


block, stacked = nnx.split(make_blocks(jax.random.split(jax.random.key(0), LAYERS)))
ends, shared = nnx.split(Ends(nnx.Rngs(1)))


@jax.checkpoint  # saves only the inputs of layers for each microbatch
def layer(weights: Any, x: jax.Array) -> jax.Array:
    return nnx.merge(block, weights)(x)


def embed(shared: Any, batch: Any) -> jax.Array:
    return nnx.merge(ends, shared).embed(batch["tokens"])


def loss_fn(shared: Any, x: jax.Array, batch: Any) -> jax.Array:
    model = nnx.merge(ends, shared)
    return optax.softmax_cross_entropy_with_integer_labels(model.head(model.norm(x)), batch["targets"]).mean()


# Builds the pipeline.

mesh = make_mesh(MeshConfig(pipe=4, data=2), BATCH)
schedule = one_f_one_b(stages=4, microbatches=8)
gradients = value_and_grad(layer, embed, loss_fn, schedule=schedule, mesh=mesh, batch_axes=("data",))
optimizer = optax.adamw(5e-3)


@jax.jit
def train_step(params: Any, moments: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
    loss, grads = gradients(*params, batch)
    updates, moments = optimizer.update(grads, moments, params)
    return optax.apply_updates(params, updates), moments, loss


if __name__ == "__main__":
    print(schedule.text())
    everywhere, stages, rows = (jax.NamedSharding(mesh, spec) for spec in (jax.P(), jax.P("pipe"), jax.P("data")))
    params = jax.device_put(shared, everywhere), jax.device_put(stacked, stages)
    moments = optimizer.init(params)  # each is sharded like its parameter
    rng = np.random.default_rng(0)
    successor = rng.permutation(VOCAB).astype(np.int32)
    for step in range(STEPS):
        ids = [rng.integers(0, VOCAB, BATCH, np.int32)]
        while len(ids) <= LENGTH:
            ids.append(successor[ids[-1]])
        tokens = np.stack(ids, axis=1)
        batch = jax.device_put({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}, rows)
        params, moments, loss = train_step(params, moments, batch)
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss {float(loss):.3f}")
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(params[1])} == {jax.P("pipe")}, "layers stay on their stages"
