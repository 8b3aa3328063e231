"""Trains a decoder with layers of another kind and a loss of its own on eight simulated devices.

    python docs/examples/own_layers.py

Three of four layers are gated recurrences, the fourth one is a block with attention. The loss is the focal loss (Lin et
al. 2017, arXiv:1708.02002), which counts easy tokens less. Each of the two is a change of a few functions of
`jaxstack.models.decoder.FAMILY`.
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
from jaxstack.kernels import AttentionMask
from jaxstack.models import decoder, layers
from jaxstack.models.blocks import Stack, block
from jaxstack.models.context import Context
from jaxstack.models.layer_inputs import Aux, LayerInputs
from jaxstack.models.params import Param, Params, Spec, stack, unstack
from jaxstack.sharding import make_mesh
from jaxstack.training.state import abstract_state, make_state
from jaxstack.training.step import jit_train_step

PERIOD = 4
"""Layers of one unit: three recurrences, and a block with attention. Units are equal, so that one loop runs them."""


def recurrence_spec(cfg: ModelConfig) -> Spec:
    """Declares a gated recurrence: its hidden width is split like the hidden width of an MLP."""
    D, F = cfg.d_model, cfg.ff_width
    return {
        "norm": layers.norm_spec(cfg, D, "norm"),
        "w_in": Param((D, F), ("embed", "mlp")),
        "w_gate": Param((D, F), ("embed", "mlp")),
        "w_out": Param((F, D), ("mlp", "embed")),
    }


def spec(cfg: ModelConfig) -> Spec:
    """Declares the parameters of a decoder, with a stack of units in place of its layers."""
    one = decoder.spec(replace(cfg, num_layers=1))
    unit = {f"recurrence_{i}": recurrence_spec(cfg) for i in range(PERIOD - 1)}
    unit["block"] = unstack(one["layers"])
    return one | {"layers": stack(unit, cfg.num_layers // PERIOD)}


def recurrence(cfg: ModelConfig, params: Params, x: jax.Array, ctx: Context) -> jax.Array:
    """Adds a gated recurrence to the residual stream [B, S/n, D]: h_t = a_t h_(t-1) + (1 - a_t) v_t."""
    h = layers.norm(cfg, params["norm"], x, ctx)
    h = ctx.layout.gather_activations(h, "mlp")  # [B, S, D]
    v = layers.linear(cfg, params, "in", h, ctx, "mlp")  # [B, S, F]
    a = jax.nn.sigmoid(layers.linear(cfg, params, "gate", h, ctx, "mlp"))

    def join(earlier: tuple[jax.Array, jax.Array], later: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return earlier[0] * later[0], earlier[1] * later[0] + later[1]

    _, h = jax.lax.associative_scan(join, (a, (1 - a) * v), axis=1)
    y = layers.linear(cfg, params, "out", h, ctx, "mlp", back=True)
    return x + ctx.layout.reduce_activations(y, "mlp")


def unit_step(
    cfg: ModelConfig,
    ctx: Context,
    params: list[Params],
    x: jax.Array,
    index: jax.Array | int,
    layer_inputs: LayerInputs,
    cache: Any = None,
) -> tuple[jax.Array, Aux]:
    """Runs one unit; arguments and results are those of `blocks.StackStep`."""
    unit = ctx.layout.gather_params(unstack(spec(cfg)["layers"]), params[0])
    for i in range(PERIOD - 1):
        x = recurrence(cfg, unit[f"recurrence_{i}"], x, ctx)
    x, aux = block(cfg, unit["block"], x, ctx, layer_inputs, mask=AttentionMask(kind="causal"))
    return x, jax.tree.map(lambda leaf: leaf[None], aux)


def focal_loss(cfg: ModelConfig, params: Params, hidden: Any, batch: Any, ctx: Context) -> dict[str, jax.Array]:
    """Returns the sum of weight * (1 - p)^2 * -log p over tokens, where p is the probability of the target."""
    log_p, _ = decoder.log_probs(cfg, params, hidden, batch["targets"], ctx)  # [B, S]
    return {"loss": -(batch["loss_weights"] * (1 - jnp.exp(log_p)) ** 2 * log_p).sum()}


UNITS = replace(decoder.FAMILY, spec=spec, stacks=lambda cfg: {"layers": Stack(cfg.num_layers // PERIOD, 1, unit_step)})
FOCAL = replace(decoder.FAMILY, loss=focal_loss)
BOTH = replace(UNITS, loss=focal_loss)
register_family("recurrent", UNITS)
register_family("focal", FOCAL)
register_family("recurrent_focal", BOTH)


def config(family: str, **mesh: int) -> Config:
    """Returns a run of one of these families."""
    sizes: dict[str, Any] = {"num_layers": 8, "d_model": 64, "num_heads": 4, "d_ff": 128, "vocab_size": 16}
    return Config(
        model=ModelConfig(family=family, **sizes),  # type: ignore[arg-type]
        data=DataConfig(seq_len=16, batch_size=64),
        train=TrainConfig(steps=200),
        optim=OptimConfig(lr=3e-3, warmup_steps=20),
        mesh=MeshConfig(**{"data": 1, **mesh}),
    )


def make_batch(rng: np.random.Generator, cfg: Config) -> dict[str, np.ndarray]:
    """Returns rows that count upwards from a random number, modulo the vocabulary."""
    first = rng.integers(0, cfg.model.vocab, (cfg.data.batch_size, 1))
    ids = ((first + np.arange(cfg.data.seq_len + 1)) % cfg.model.vocab).astype(np.int32)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_weights": np.ones(ids[:, 1:].shape, np.float32)}


if __name__ == "__main__":
    cfg = config("recurrent_focal", pipe=2, fsdp=2, tensor=2)
    ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.data.batch_size))
    abstract = abstract_state(cfg, ctx)
    state = make_state(cfg, ctx, abstract)
    train_step = jit_train_step(cfg, ctx, abstract)
    rng = np.random.default_rng(0)
    for step in range(cfg.train.steps):
        state, metrics = train_step(state, jax.device_put(make_batch(rng, cfg), ctx.layout.sharding(ctx.layout.batch)))
        loss = float(metrics["loss"])
        if step % 100 == 0 or step == cfg.train.steps - 1:
            print(f"step {step:3d}  loss {loss:.3f}")
