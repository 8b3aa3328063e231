"""Trains a U-Net of linen on four stages of different shapes, the slow one on two devices: python pipeline_unet.py

It runs on 5 simulated CPU devices. The network removes noise from pictures of a bright square. The mean squared error
starts above 1 and falls below 0.5 in 20 steps.
"""

import os

if not {"JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS"} & os.environ.keys():
    os.environ.update(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="5")

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jaxstack.config import MeshConfig
from jaxstack.pipeline import one_f_one_b, pack_stages, value_and_grad_of_stages
from jaxstack.sharding import make_mesh

SIZE, BATCH, STEPS = 12, 24, 20

# The model imports nothing from jaxstack. What a later part concatenates (the skips) is part of what a part returns.


class Enter(nn.Module):
    @nn.compact
    def __call__(self, batch: Any) -> Any:
        return {"x": nn.silu(nn.Conv(8, (3, 3))(batch["noisy"])), "skips": []}


class Down(nn.Module):
    @nn.compact
    def __call__(self, given: Any) -> Any:
        x = nn.silu(nn.Conv(16, (3, 3), strides=2)(given["x"]))
        return {"x": nn.silu(nn.Conv(16, (3, 3))(x)), "skips": [given["x"]]}


class Middle(nn.Module):
    @nn.compact
    def __call__(self, given: Any) -> Any:
        x = nn.silu(nn.Conv(32, (3, 3), strides=2)(given["x"]))
        x = nn.silu(nn.ConvTranspose(16, (3, 3), strides=(2, 2))(x))
        return {"x": x + given["x"], "skips": given["skips"]}


class Up(nn.Module):
    @nn.compact
    def __call__(self, given: Any) -> Any:
        x = nn.silu(nn.ConvTranspose(8, (3, 3), strides=(2, 2))(given["x"]))
        return nn.Conv(1, (3, 3))(jnp.concatenate([x, *given["skips"]], -1))


def loss_fn(prediction: jax.Array, batch: Any) -> jax.Array:
    return jnp.square(prediction - batch["clean"]).mean()


# Each stage is a function of its parameters and of what the stage before returns.

modules = [Enter(), Down(), Middle(), Up()]
stages = [lambda params, x, module=module: module.apply({"params": params}, x) for module in modules]
params = []
x: Any = {"noisy": jnp.zeros((1, SIZE, SIZE, 1))}
for i, module in enumerate(modules):
    x, variables = module.init_with_output(jax.random.key(i), x)
    params.append(variables["params"])

# Builds the pipeline.

replicas = (1, 1, 2, 1)
mesh = make_mesh(MeshConfig(pipe=sum(replicas), data=1), BATCH, jax.devices()[: sum(replicas)])
schedule = one_f_one_b(stages=4, microbatches=6)
gradients = value_and_grad_of_stages(stages, loss_fn, schedule=schedule, mesh=mesh, replicas=replicas)
optimizer = optax.adam(1e-2)


@jax.jit
def train_step(packed: Any, moments: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
    loss, grads = gradients(packed, batch)
    updates, moments = optimizer.update(grads, moments)
    return optax.apply_updates(packed, updates), moments, loss


if __name__ == "__main__":
    packed = pack_stages(params, mesh, replicas=replicas)  # a row of parameters on each device
    moments = optimizer.init(packed)
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        clean = np.zeros((BATCH, SIZE, SIZE, 1), np.float32)
        for picture, (top, left) in zip(clean, rng.integers(0, SIZE - 4, (BATCH, 2)), strict=True):
            picture[top : top + 4, left : left + 4] = 3.5
        noisy = (clean + rng.normal(size=clean.shape)).astype(np.float32)
        packed, moments, loss = train_step(packed, moments, {"noisy": noisy, "clean": clean})
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss {float(loss):.3f}")
    print({path: a.sharding.spec for path, a in packed.arrays.items()}, [*packed.unpack()[3]])
