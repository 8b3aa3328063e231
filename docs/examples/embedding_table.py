"""Trains a small recommender: a Flax model reads an embedding table whose rows are split over all devices.

    python docs/examples/embedding_table.py

Each user likes the items of a hidden group. The model learns it from pairs of a user and an item.
"""

import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # on a CPU; GPUs and TPUs have their number of devices

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxstack.config import MeshConfig
from jaxstack.sharding import make_mesh
from jaxstack.sharding.tables import EmbeddingTable

USERS, ITEMS, GROUPS, BATCH, STEPS = 300, 300, 4, 512, 200


class Score(nnx.Module):
    """A small network that reads the vectors of a user and an item."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(3 * width, 32, rngs=rngs)
        self.out = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, vectors: jax.Array) -> jax.Array:  # [B, 2, D] -> [B]
        user = vectors[:, 0]
        item = vectors[:, 1]
        joined = jnp.concatenate([user, item, user * item], -1)
        return self.out(nnx.relu(self.hidden(joined)))[:, 0]


def main() -> None:
    """Trains on new pairs in each step, and prints the loss before each step."""
    mesh = make_mesh(MeshConfig(data=-1), batch=BATCH)
    table = EmbeddingTable(USERS + ITEMS, 16, mesh, slots=2 * BATCH // mesh.size)
    state = table.init(jax.random.key(0), scale=0.1)
    model = Score(16, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    group = np.random.default_rng(0).integers(0, GROUPS, USERS + ITEMS)

    def batch(seed: int) -> tuple[jax.Array, jax.Array]:
        rng = np.random.default_rng(seed)
        user = rng.integers(0, USERS, BATCH)
        item = USERS + rng.integers(0, ITEMS, BATCH)
        same = rng.random(BATCH) < 0.5  # half of the pairs are of one group
        likely = USERS + np.array([rng.choice(np.flatnonzero(group[USERS:] == group[u])) for u in user])
        item = np.where(same, likely, item)
        ids = np.stack([user, item], 1).astype(np.int32)
        return jnp.asarray(ids), jnp.asarray(group[user] == group[item])

    @nnx.jit
    def step(model: Score, optimizer: nnx.Optimizer, state, ids, liked):
        rows, lookup = table.fetch(state, ids)

        def loss(model: Score, rows: jax.Array) -> jax.Array:
            score = model(table.vectors(rows, lookup))
            return optax.sigmoid_binary_cross_entropy(score, liked).mean()

        value, (model_grads, row_grads) = nnx.value_and_grad(loss, argnums=(0, 1))(model, rows)
        optimizer.update(model, model_grads)
        return table.update(state, lookup, row_grads, 0.1), value, lookup

    for i in range(STEPS):
        state, value, lookup = step(model, optimizer, state, *batch(i))
        if i % 50 == 0 or i == STEPS - 1:
            table.check(lookup)
            print(f"step {i:4}  loss {value:.3f}")
    sizes = table.bytes(2 * BATCH // mesh.size)
    print(f"a device stores {sizes.table + sizes.optimizer:,} bytes and sends {sizes.fetch + sizes.update:,} in a step")


if __name__ == "__main__":
    main()
