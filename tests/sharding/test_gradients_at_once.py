"""Gradients of a layer that are all computed before one is used: values on meshes, and where the barriers are."""

import dataclasses

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from families import SMALL, SPARSE, STATE_SPACE

from jaxstack import families
from jaxstack.common.tree import flatten
from jaxstack.config import Config, DataConfig, MeshConfig, ModelConfig, TrainConfig
from jaxstack.families.context import make_context
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.sharding import make_mesh
from jaxstack.training.assemble import make_gradients

SIZES = SMALL | {"vocab_size": 64}
MODELS = {  # with the layers of a turn
    "dense": (ModelConfig(**SIZES | {"num_layers": 4}), 1),
    "windows": (ModelConfig(**SIZES | {"num_layers": 4, "windows": (8, 0)}), 2),
    "units": (dataclasses.replace(STATE_SPACE["hybrid"], num_layers=6, vocab_size=64), 3),
    "experts": (dataclasses.replace(SPARSE["every_second"], num_layers=4, vocab_size=64), 2),
}


def plan(model: str, platform: str, dtype: str = "float32", **mesh: int) -> tuple[Config, Context]:
    cfg = Config(
        model=MODELS[model][0],
        data=DataConfig(seq_len=16, batch_size=4, source="stdlib"),
        train=TrainConfig(remat="full", dtype=dtype),
        mesh=MeshConfig(**{"data": 1} | mesh),
    )
    ctx = make_context(cfg, make_mesh(cfg.mesh, 4, jax.devices()[: int(np.prod([*mesh.values()]))]))
    return cfg, dataclasses.replace(ctx, ops=dataclasses.replace(ctx.ops, platform=platform))


def barriers(jaxpr) -> list[int]:
    """Returns the number of operands of each barrier of a program."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "optimization_barrier":
            found.append(len(equation.invars))
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            found += barriers(inner)
    return found


def inputs(cfg: Config, rng):
    values = params.init(jax.random.key(0), families.spec(cfg.model))
    batch = {name: array.draw(rng) for name, array in families.batch_spec(cfg.model, cfg.data).items()}
    return values, batch


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        ("dense", {"fsdp": 2}),
        ("windows", {"fsdp": 2, "tensor": 2}),
        ("units", {"fsdp": 2}),
        pytest.param("experts", {"fsdp": 2, "expert": 2}, marks=pytest.mark.slow),
        pytest.param("units", {"data": 2, "fsdp": 2, "context": 2}, marks=pytest.mark.slow),
    ],
)
def test_gradients_do_not_depend_on_the_barriers(model, mesh, rng):
    cfg, plain = plan(model, "cpu", **mesh)
    _, ordered = plan(model, "gpu", **mesh)
    values, batch = inputs(cfg, rng)
    expected, got = (flatten(jax.jit(make_gradients(cfg, ctx))(values, batch, None)[1]) for ctx in (plain, ordered))
    assert len(barriers(jax.make_jaxpr(make_gradients(cfg, ordered))(values, batch, None).jaxpr)) > len(
        barriers(jax.make_jaxpr(make_gradients(cfg, plain))(values, batch, None).jaxpr)
    )
    for path, gradient in expected.items():
        # Gradients of vectors are summed over devices once, in place of once for each use: float32's rounding.
        np.testing.assert_allclose(
            got[path], gradient, rtol=1e-5, atol=1e-6 * float(jnp.abs(gradient).max()), err_msg=path
        )


@pytest.mark.parametrize("model", MODELS)
def test_a_turn_has_a_barrier_for_each_layer_that_another_one_follows(model, rng):
    """The backward pass of a turn ends with its first layer. A loop of single layers continues with the next turn."""
    cfg, plain = plan(model, "cpu", fsdp=2)
    _, ordered = plan(model, "gpu", fsdp=2)
    values, batch = inputs(cfg, rng)
    before, after = (
        barriers(jax.make_jaxpr(make_gradients(cfg, ctx))(values, batch, None).jaxpr) for ctx in (plain, ordered)
    )
    for one in before:
        after.remove(one)
    layers = MODELS[model][1]
    assert len(after) == max(layers - 1, 1)
    weights = len(flatten(values["layers"])) // layers
    assert all(operands > weights / 2 for operands in after), "a barrier has the weights of a layer and the stream"
    _, replicated = plan(model, "gpu", data=2)
    assert len(barriers(jax.make_jaxpr(make_gradients(cfg, replicated))(values, batch, None).jaxpr)) == len(before)


def test_bfloat16_gradients_are_equal(rng):
    cfg, plain = plan("windows", "cpu", "bfloat16", fsdp=2)
    _, ordered = plan("windows", "gpu", "bfloat16", fsdp=2)
    values, batch = inputs(cfg, rng)
    expected, got = (flatten(jax.jit(make_gradients(cfg, ctx))(values, batch, None)[1]) for ctx in (plain, ordered))
    for path, gradient in expected.items():
        error = jnp.linalg.norm((got[path] - gradient).astype(jnp.float32))
        # XLA fuses what it rounds to bfloat16 differently: 8 bits of a sum of a few terms.
        assert error <= 0.02 * jnp.linalg.norm(gradient.astype(jnp.float32)), path
