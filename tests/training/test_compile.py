"""The lowered and compiled training step: its length does not grow with depth, and it has no empty arrays."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from jaxstack.config import Config, DataConfig, MeshConfig, ModelConfig, MoEConfig
from jaxstack.families.context import make_context
from jaxstack.sharding import make_mesh
from jaxstack.training import assemble
from jaxstack.training.state import Recipe, abstract_state


def lower_step(model: ModelConfig, sizes: MeshConfig) -> jax.stages.Lowered:
    """Lowers the training step of two rows on two devices."""
    cfg = Config(model=model, data=DataConfig(seq_len=16, batch_size=2), mesh=sizes)
    mesh = make_mesh(sizes, 2, jax.devices()[:2])
    ctx = make_context(cfg, mesh)
    state = abstract_state(Recipe.of(cfg), ctx)
    placed = ctx.layout.sharding(ctx.layout.batch)
    batch = {
        name: jax.ShapeDtypeStruct((2, 16), dtype, sharding=placed)
        for name, dtype in [("tokens", jnp.int32), ("targets", jnp.int32), ("loss_weights", jnp.float32)]
    }
    return jax.jit(assemble.make_train_step(cfg, ctx), donate_argnums=0).lower(state, batch)


def operations(num_layers: int) -> tuple[Counter[str], Counter[str]]:
    """Counts the operations of the training step by their kind: as JAX lowers it, and as XLA compiles it."""
    program = lower_step(ModelConfig(num_layers=num_layers, d_model=16, num_heads=2, vocab_size=32), MeshConfig(2))
    compiled = re.findall(r"^ +(?:ROOT )?%\S+ = .*? ([a-z][\w-]*)\(", program.compile().as_text(), re.M)
    return Counter(re.findall(r"= (?:\"?)(\w+\.\w+)", program.as_text())), Counter(compiled)


def test_48_layers_are_the_program_of_4():  # so the time to compile does not grow either, see benchmarks/start.py
    (lowered, compiled), (deep_lowered, deep_compiled) = operations(4), operations(48)
    assert lowered.total() > 500
    assert deep_lowered == lowered
    # XLA fuses a few otherwise, since shapes differ: 1% fewer when written. Unrolled loops would be 12 times as long.
    assert 500 < deep_compiled.total() < 1.1 * compiled.total()


@pytest.mark.parametrize("axis", ["pipe", "fsdp", "context", "expert"])
def test_no_step_has_an_empty_array(axis):
    # The compiler of jaxlib 0.11.2 crashes on an empty array that a `jax.shard_map` takes. JAX makes one for the index
    # of `x.at[...]` if the index is the full range, and a pipeline's `jax.shard_map` takes it.
    moe = MoEConfig(num_experts=4) if axis == "expert" else MoEConfig()
    model = ModelConfig(num_layers=2, d_model=16, num_heads=2, vocab_size=32, moe=moe)
    text = lower_step(model, MeshConfig(**{axis: 2})).as_text()
    assert "sdy.manual_computation" in text
    assert re.findall(r"tensor<(?:\d+x)*0x.*?>", text) == []
