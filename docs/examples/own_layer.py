"""Trains a decoder whose every second layer is of another kind, on eight simulated devices.

    python docs/examples/own_layer.py

The other kind has a gated recurrence in place of attention. At each token, every unit of a state keeps a share of its
value, and the token decides how much (as in Martin and Cundy 2018, arXiv:1709.04057). The share is between -1 and 1.
With a negative share, a state can tell odd numbers from even ones (Grazzi et al. 2024, arXiv:2411.12537), which the
model of this example learns. No file of the package changes.
"""

import os

if not {"JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS"} & os.environ.keys():
    os.environ.update(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="8")

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from jaxstack.families import register_family
from jaxstack.families.context import make_context
from jaxstack.models import decoder, layers
from jaxstack.models.blocks import Stack, alternate
from jaxstack.models.context import Context
from jaxstack.models.layer_inputs import LayerInputs
from jaxstack.models.params import Param, Params, Spec, stack, unstack
from jaxstack.sharding import make_mesh
from jaxstack.training.assemble import jit_train_step
from jaxstack.training.state import Recipe, abstract_state, make_state


def recurrence_spec(cfg: ModelConfig) -> Spec:
    """Declares a recurrence: what a token writes, how much of the state stays, and the way back to the stream."""
    D, F = cfg.d_model, cfg.ff_width
    return {
        "w_write": Param((D, F), ("embed", "mlp")),
        "w_keep": Param((D, F), ("embed", "mlp")),
        "w_read": Param((F, D), ("mlp", "embed")),
    }


def spec(cfg: ModelConfig) -> Spec:
    """Declares the parameters: units of a layer of a decoder, and of a layer with a recurrence."""
    tree = decoder.spec(cfg)
    layer = unstack(tree["layers"])
    other = {name: group for name, group in layer.items() if name != "attention"} | {"recurrence": recurrence_spec(cfg)}
    tree["layers"] = stack({"layer_0": layer, "layer_1": other}, cfg.num_layers // 2)
    return tree


def recurrence(cfg: ModelConfig, params: Params, x: jax.Array, ctx: Context) -> jax.Array:  # [B, S/n, D] of both
    """Computes state[t] = keep[t] * state[t - 1] + (1 - keep[t]) * write[t]; each device has some of the units."""
    x = ctx.layout.gather_activations(x, "mlp")
    write = layers.linear(cfg, params, "write", x, ctx, "mlp").astype(jnp.float32)  # [B, S, F/n]
    keep = jnp.tanh(layers.linear(cfg, params, "keep", x, ctx, "mlp").astype(jnp.float32))

    def after(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return a[0] * b[0], a[1] * b[0] + b[1]

    _, state = jax.lax.associative_scan(after, (keep, (1 - keep) * write), axis=1)
    y = layers.linear(cfg, params, "read", state.astype(x.dtype), ctx, "mlp", back=True)
    return ctx.layout.reduce_activations(y, "mlp")


def recurrent_block(
    cfg: ModelConfig, stack: Stack, params: Params, x: jax.Array, ctx: Context, inputs: LayerInputs, **_: Any
) -> jax.Array:  # [B, S/n, D] of both
    """Runs a layer: the recurrence and the MLP read norms of the residual stream, and are added to it."""
    h = layers.norm(cfg, params["attention_norm"], x, ctx)
    x = x + recurrence(cfg, params["recurrence"], h, ctx)
    h = layers.norm(cfg, params["mlp_norm"], x, ctx)
    return x + stack.feed_forward(cfg, stack, params, h, ctx, inputs)


def stacks(cfg: ModelConfig) -> dict[str, Stack]:
    """Returns one stack, in which layers of both kinds follow each other."""
    plain = decoder.stacks(cfg)["layers"]
    return {"layers": alternate(cfg.num_layers, [plain, replace(plain, block=recurrent_block)])}


register_family("hybrid", replace(decoder.FAMILY, spec=spec, stacks=stacks))


def make_batch(rng: np.random.Generator, cfg: Config) -> dict[str, np.ndarray]:
    """Returns rows of zeros and ones in which a token says whether the number of ones before it is odd."""
    bits = rng.integers(0, 2, (cfg.data.batch_size, cfg.data.seq_len)).astype(np.int32)
    odd = bits.cumsum(axis=1).astype(np.int32) % 2
    return {"tokens": bits, "targets": odd, "loss_weights": np.ones(bits.shape, np.float32)}


def config(**mesh: int) -> Config:
    """Returns the run on a mesh."""
    return Config(
        model=ModelConfig(family="hybrid", num_layers=4, d_model=64, num_heads=4, d_ff=128, vocab_size=16),  # type: ignore[arg-type]
        data=DataConfig(seq_len=16, batch_size=64),
        train=TrainConfig(steps=200),
        optim=OptimConfig(lr=3e-3, warmup_steps=20),
        mesh=MeshConfig(data=1, **mesh),
    )


if __name__ == "__main__":
    cfg = config(pipe=2, fsdp=2, tensor=2)
    ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.data.batch_size))
    abstract = abstract_state(Recipe.of(cfg), ctx)
    state = make_state(Recipe.of(cfg), ctx, abstract)
    train_step = jit_train_step(cfg, ctx, abstract)
    rng = np.random.default_rng(0)
    for step in range(cfg.train.steps):
        state, metrics = train_step(state, jax.device_put(make_batch(rng, cfg), ctx.layout.sharding(ctx.layout.batch)))
        # Read in every step: with many steps under way, simulated devices may wait for each other without end.
        loss = float(metrics["loss"])
        if step % 50 == 0 or step == cfg.train.steps - 1:
            print(f"step {step:3d}  loss {loss:.3f}")
