"""The program does not grow with depth, so the time to compile it does not either (benchmarks/start.py measures it)."""

import re
from collections import Counter

import jax
import jax.numpy as jnp

from jaxstack.config import Config, DataConfig, MeshConfig, ModelConfig
from jaxstack.models.context import Context
from jaxstack.sharding import make_mesh
from jaxstack.training import step
from jaxstack.training.state import abstract_state


def operations(num_layers: int) -> tuple[Counter[str], Counter[str]]:
    """Counts the operations of the training step by their kind: as JAX lowers it, and as XLA compiles it."""
    cfg = Config(
        model=ModelConfig(num_layers=num_layers, d_model=16, num_heads=2, vocab_size=32),
        data=DataConfig(seq_len=16, batch_size=2),
    )
    mesh = make_mesh(MeshConfig(2), 2, jax.devices()[:2])
    ctx = Context.create(cfg, mesh)
    state = abstract_state(cfg, ctx)
    placed = jax.NamedSharding(mesh, jax.P("data"))
    batch = {
        name: jax.ShapeDtypeStruct((2, 16), dtype, sharding=placed)
        for name, dtype in [("tokens", jnp.int32), ("targets", jnp.int32), ("loss_weights", jnp.float32)]
    }
    lowered = jax.jit(step.make_train_step(cfg, ctx), donate_argnums=0).lower(state, batch)
    compiled = re.findall(r"^ +(?:ROOT )?%\S+ = .*? ([a-z][\w-]*)\(", lowered.compile().as_text(), re.M)
    return Counter(re.findall(r"= (?:\"?)(\w+\.\w+)", lowered.as_text())), Counter(compiled)


def test_48_layers_are_the_program_of_4():
    (lowered, compiled), (deep_lowered, deep_compiled) = operations(4), operations(48)
    assert lowered.total() > 500
    assert deep_lowered == lowered
    # XLA fuses a few otherwise, since shapes differ: 1% fewer when written. Unrolled loops would be 12 times as long.
    assert 500 < deep_compiled.total() < 1.1 * compiled.total()
