"""Taps: the gradients of a layer in two halves are those of one VJP, for every kind of product, and cost as much."""

import dataclasses
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_meshes as meshes
from jax import lax

from jaxstack import families
from jaxstack.common.tree import flatten
from jaxstack.config import Config, ConfigError
from jaxstack.families.context import make_context
from jaxstack.features.router_losses import Counts
from jaxstack.kernels import taps
from jaxstack.models import params
from jaxstack.models.blocks import group_layers
from jaxstack.models.context import Context
from jaxstack.pipeline.operations import index_leading
from jaxstack.pipeline.split_vjp import SplitVJP
from jaxstack.sharding import make_mesh
from jaxstack.sharding.collectives import varies_along, varying
from jaxstack.training import losses
from jaxstack.training.assemble import make_gradients, objective_of
from jaxstack.training.features.pipelined import pipeline_fns, with_frozen
from jaxstack.training.state import Recipe, abstract_state


def config(name: str, mesh: dict[str, Any], dtype: str, quant: str, remat: str, linear: str) -> Config:
    cfg = meshes.config(name, mesh, remat=remat, dropout=0.2)
    return dataclasses.replace(
        cfg,
        data=dataclasses.replace(cfg.data, batch_size=math.prod(cfg.mesh.sizes.values()), seq_len=meshes.SEQ),
        train=dataclasses.replace(cfg.train, dtype=dtype, quant=quant),
        kernels=dataclasses.replace(cfg.kernels, linear=linear, moe="ragged"),
    )


def layer_gradients(cfg: Config, ctx: Context, part: str, values: Any, batch: Any) -> tuple[Any, Any]:
    """Returns gradients of the first layer on one device, and the weights that can have taps.

    The part "one VJP" and "both halves" compute all gradients. "dx" computes the first half, "dw" the second half of
    pairs of zeros.
    """
    (name, stack), spec = families.only_stack(cfg.model), families.spec(cfg.model)
    values, batch = ctx.layout.defer_grad_sync(spec, values), ctx.layout.shard_sequence(batch)
    batch |= {"rows": ctx.layout.row_indices(len(batch["tokens"])), "key": jax.random.key_data(jax.random.key(1))}
    values = ctx.layout.gather_params(spec, params.cast_matrices(spec, values, ctx.dtype))
    trained, frozen = params.partition(spec, values)
    rows, length = batch["tokens"].shape
    counts = Counts({"layers": float(rows * length)}, {"layers": float(rows)})
    totals = losses.BatchTotals({"loss": 1.0}, counts)
    fns = pipeline_fns(cfg.model, ctx, objective_of(cfg.model), cfg.pipeline.split or (), totals)
    layer = fns.layer

    def first(tree: Any) -> Any:  # the blocks of the first step
        return index_leading(group_layers(stack.period, tree[name]), jnp.int32(0))

    if frozen:
        constants, of_pairs = first(frozen), with_frozen(fns, frozen)
        fns, layer = of_pairs, lambda weights, *rest: of_pairs.layer((weights, constants), *rest)
    weights = first(trained)
    declared = params.partition(spec, spec)[0][name]
    matrices = [params.map_spec(lambda p: p.kind == "matrix", declared)] * stack.period
    inputs = fns.prepare(batch)
    x, index = fns.embed(trained, inputs), jnp.int32(0)
    found = taps.find_sites(lambda w: layer(w, x, index, inputs), weights, matrices)
    later = found.without_gradients(weights)[0]
    if part == "dw":
        return found.weight_gradients(later, lax.optimization_barrier(found.taps())), later
    vjp = SplitVJP(layer, taps.Sites({}) if part == "one VJP" else found)
    y, penalty, _, residuals = vjp.forward(weights, x, index, inputs)
    dy, one = jax.tree.map(jnp.sin, y), varying(jnp.ones((), penalty.dtype), varies_along(penalty))
    others, dx, pairs = vjp.backward(residuals, weights, index, inputs, dy, one)
    if part == "dx":
        return (others, dx, pairs), later
    either = jax.tree.map(
        lambda a, b: b if a is None else a, others, vjp.weights(weights, pairs), is_leaf=lambda g: g is None
    )
    return {"x": dx, "weights": either}, later


def on_devices(cfg: Config, seed: int, part: str) -> tuple[Any, Any, dict[str, Any]]:
    """Returns the compiled program of a part of the gradients, its arguments, and the weights that can have taps."""
    count = math.prod(cfg.mesh.sizes.values())
    ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.data.batch_size, jax.devices()[:count]))
    spec, axes = families.spec(cfg.model), tuple(ctx.layout.mesh.axis_names)
    rng = np.random.default_rng(seed)
    values = params.map_spec(lambda p: rng.normal(0, 0.3, p.shape).astype(np.float32), spec)
    batch = meshes.random_batch(seed, False, cfg.model, cfg.data.batch_size)
    tapped: dict[str, Any] = {}

    def work(values: Any, batch: Any) -> Any:
        grads, found = layer_gradients(cfg, ctx, part, values, batch)
        tapped.update({path: w.shape for path, w in flatten(found).items()})
        return jax.tree.map(lambda a: varying(a, axes)[None], grads) if count > 1 else grads

    run = jax.jit(ctx.layout.local(work, (ctx.layout.parameters(spec), ctx.layout.batch), jax.P(axes)))
    return run.lower(values, batch).compile(), (values, batch), tapped


CASES = {
    "llama3": ("llama3", {}, "float32", "none", "none", "xla"),
    "gpt2": ("gpt2", {"context": 2, "tensor": 2, **meshes.PLAIN}, "float32", "none", "full", "xla"),
    "gemma2": ("gemma2", {}, "bfloat16", "none", "selective", "barrier"),
    "qwen3": ("qwen3", {"data": 2}, "bfloat16", "none", "full", "float32_sums"),
    "int8": ("llama3", {"tensor": 2}, "float32", "int8", "selective", "xla"),
    "fp8": ("llama3", {"tensor": 2, **meshes.PLAIN}, "bfloat16", "fp8_tensorwise", "none", "xla"),
    "sigmoid": ("sigmoid", {"tensor": 2}, "float32", "none", "selective", "xla"),
    "capacity": ("capacity", {"expert": 2, "tensor": 2}, "float32", "none", "full", "xla"),
    "rounds": ("softmax", {"expert": 2}, "float32", "none", "none", "xla"),
    "lora": ("lora", {"fsdp": 2, "tensor": 2}, "float32", "none", "full", "xla"),
    "lora_moe": ("lora_moe", {}, "bfloat16", "none", "full", "xla"),
}
QUICK = ("llama3", "lora_moe")
every_case = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.matrix) for name in CASES]
)


@every_case
def test_two_halves_give_the_gradients_of_one_vjp(name, seed):
    """The same products of the same operands, so the results are equal bit by bit."""
    cfg = config(*CASES[name])
    (one, arguments, tapped), (both, _, _) = (on_devices(cfg, seed, part) for part in ("one VJP", "both halves"))
    expected, found = flatten(one(*arguments)), flatten(both(*arguments))
    assert found.keys() == expected.keys()
    for path, g in expected.items():
        assert np.any(g) or path.endswith("balance"), path  # a balancing bias has no gradient
        np.testing.assert_array_equal(found[path], g, path)
    matrices = {path.removeprefix("weights/") for path in expected if "/w_" in path or "/lora_" in path}
    assert tapped.keys() == {path for path in matrices if name != "rounds" or "moe" not in path}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "llama3" else pytest.mark.matrix)
        for name in ("llama3", "gpt2", "int8", "lora")
    ],
)
def test_both_halves_together_cost_one_vjp(name, seed):
    """Counts the operations of compiled programs. The second half is products of one device, and nothing else."""
    cfg = config(*CASES[name])
    one, dx, dw = (on_devices(cfg, seed, part)[0] for part in ("one VJP", "dx", "dw"))
    tapped = on_devices(cfg, seed, "dw")[2]
    flops = [program.cost_analysis()["flops"] for program in (one, dx, dw)]
    assert flops[1] + flops[2] <= 1.01 * flops[0]
    tokens = cfg.data.batch_size // cfg.mesh.fsdp * meshes.SEQ // cfg.mesh.context
    assert flops[2] == pytest.approx(sum(2 * tokens * math.prod(shape) for shape in tapped.values()), rel=0.01)
    assert "all-" not in dw.as_text()
    assert "reduce-scatter" not in dw.as_text()


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["lora_moe", "int8", "capacity"])
def test_without_taps_the_program_has_no_trace_of_them(name, monkeypatch):
    """The lowered text of a step's gradients is that of layers that call their products themselves."""
    cfg = config(*CASES[name])
    count = math.prod(cfg.mesh.sizes.values())
    ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.data.batch_size, jax.devices()[:count]))
    values = abstract_state(Recipe.of(cfg), ctx).params
    batch = meshes.random_batch(0, False, cfg.model, cfg.data.batch_size)

    def text() -> str:
        return jax.jit(make_gradients(cfg, ctx)).lower(values, batch, jax.random.key(0)).as_text()

    with_seam = text()
    calls = []

    def direct(f: Any, x: Any, w: Any, *integers: Any) -> Any:
        calls.append(f)
        return f(x, w, *integers)

    for module in ("linear", "grouped_matmul"):
        monkeypatch.setattr(sys.modules[f"jaxstack.kernels.{module}"], "product", direct)
    monkeypatch.setattr(taps, "product", direct)
    jax.clear_caches()
    assert text() == with_seam
    assert calls


def test_weights_that_cannot_have_taps_stay_in_the_first_half():
    """A weight of two products, one behind `fused`, and one that nobody asked for. Two pairs share their input."""

    def layer(w: dict[str, Any]) -> jax.Array:
        x = jnp.ones((3, 4))
        y = taps.product(jnp.dot, x, w["a"]) + taps.product(jnp.dot, x, w["b"] * 2.0)
        y = taps.product(jnp.dot, taps.product(jnp.dot, y, w["twice"]), w["twice"])
        return taps.product(jnp.dot, y @ taps.fused(w["fused"]), w["plain"])

    weights = dict.fromkeys(("a", "b", "fused", "plain", "twice"), jnp.ones((4, 4)))
    found = taps.find_sites(layer, weights, {name: name != "plain" for name in weights})
    assert [bool(w is not None) for w in found.without_gradients(weights)[0].values()] == [
        True,
        True,
        False,
        False,
        False,
    ]
    a, b = found.taps().values()
    assert a.x.shape == (3, 4)
    assert b.x is None
    assert a.dy.shape == b.dy.shape == (3, 4)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda w, x: taps.product(jnp.dot, x, w["a"]) @ w["a"], "unsupported operand"),
        (lambda w, x: jnp.dot(taps.product(jnp.dot, x, w["a"]), w["a"]), "dot requires .*Tapped"),
        (lambda w, x: taps.product(jnp.dot, x @ w["b"], w["a"] * x[0, 0]), "multiplied by a .*Tracer, which is not"),
        (lambda w, x: taps.product(jnp.dot, x, w["a"] * np.float32(2)), "multiplied by a float32, which is not"),
        (lambda w, x: taps.product(jnp.dot, x, w["a"][0]), "indexed by 0"),
    ],
)
def test_another_use_of_a_tapped_weight_is_an_error_that_names_it(use, words):
    weights, x = {"a": jnp.ones((4, 4)), "b": jnp.ones((4, 4))}, jnp.ones((3, 4))

    def layer(w: dict[str, Any]) -> Any:
        return use({"a": w["a"], "b": taps.fused(w["b"])}, x)

    with pytest.raises(ConfigError, match=rf"the layer gives a to .*: .*{words}.*\. Use it only as w of") as caught:
        taps.find_sites(layer, weights, {"a": True, "b": True})
    assert "\n" not in str(caught.value)
