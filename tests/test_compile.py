"""Compile time does not grow with depth."""

import time
from statistics import median

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxstack import step
from jaxstack.config import Config, DataConfig, MeshConfig, ModelConfig
from jaxstack.context import Context
from jaxstack.sharding import make_mesh


@pytest.fixture
def no_cache():
    """Every compilation is one; see conftest.py."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.mark.slow
def test_48_layers_compile_as_fast_as_4(no_cache):
    """At most 1.3 times the time, medians of three rounds that take turns; caches are emptied before each."""

    def compile_seconds(num_layers: int) -> float:
        cfg = Config(
            model=ModelConfig(num_layers=num_layers, d_model=128, num_heads=4, vocab_size=256),
            data=DataConfig(seq_len=128, batch_size=8),
        )
        mesh = make_mesh(MeshConfig(2), 8, jax.devices()[:2])
        ctx = Context.create(cfg, mesh)
        state = step.abstract_state(cfg, ctx)
        placed = jax.NamedSharding(mesh, jax.P("data"))
        batch = {
            name: jax.ShapeDtypeStruct((8, 128), dtype, sharding=placed)
            for name, dtype in [("tokens", jnp.int32), ("targets", jnp.int32), ("weights", jnp.float32)]
        }
        jax.clear_caches()
        begin = time.perf_counter()
        jax.jit(step.make_train_step(cfg, ctx), donate_argnums=0).lower(state, batch).compile()
        return time.perf_counter() - begin

    times = [(compile_seconds(4), compile_seconds(48)) for _ in range(3)]
    shallow, deep = (median(column) for column in zip(*times, strict=True))
    print(f"4 layers {shallow:.1f} s, 48 layers {deep:.1f} s, ratio {deep / shallow:.2f}")
    assert deep < 1.3 * shallow
