"""The walk through a model's layers: what it measures, on every mesh, and what it computes."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_meshes as meshes

from jaxstack import families
from jaxstack.common.tree import flatten
from jaxstack.compress import sparsify
from jaxstack.compress.calibrate import Walk
from jaxstack.compress.quantize import Settings, join, quantize
from jaxstack.compress.sparsity import Pattern
from jaxstack.config import ConfigError, MeshConfig
from jaxstack.families.context import make_context
from jaxstack.hf.compressed import Scheme
from jaxstack.models import decoder, params
from jaxstack.models.folding import divide_outputs, shared_inputs
from jaxstack.models.layers import norm
from jaxstack.sharding import make_mesh

Arrays = dict[str, np.ndarray]


def opened(name: str, sizes: dict[str, int]) -> tuple[Walk, Any, list[Any]]:
    """A model with random norms, on a mesh, and two batches of 8 rows."""
    cfg = meshes.config(name, sizes)
    cfg = replace(cfg, mesh=MeshConfig(**{"data": 1, **sizes}))
    ctx = make_context(cfg, make_mesh(cfg.mesh, 8, jax.devices()[: int(np.prod([*sizes.values(), 1]))]))
    spec = families.spec(cfg.model)
    values = jax.device_get(params.init(jax.random.key(1), spec))
    rng = np.random.default_rng(5)
    values = jax.tree.map(lambda a: a + rng.normal(size=a.shape).astype(np.float32) / 20, values)
    batches: list[Any] = [{"tokens": rng.integers(0, cfg.model.vocab, (8, 24)).astype(np.int32)} for _ in range(2)]
    if len(sizes) == 0:
        return Walk.of(cfg.model, ctx), jax.tree.map(jnp.asarray, values), batches
    place = jax.tree.map(ctx.layout.sharding, ctx.layout.parameters(spec))
    return (
        Walk.of(cfg.model, ctx),
        jax.device_put(values, place),
        jax.device_put(batches, ctx.layout.sharding(ctx.layout.batch)),
    )


def run_step(walk: Walk, *arguments: Any) -> Any:
    _, stack = families.only_stack(walk.cfg)
    return stack.step(walk.cfg, walk.ctx, stack, *arguments)


def measured(name: str, sizes: dict[str, int], dtype: Any = jnp.float32) -> list[Arrays]:
    """The statistics of every matrix of every layer, without compression."""
    walk, values, batches = opened(name, sizes)
    walk = Walk(walk.cfg, replace(walk.ctx, dtype=dtype))
    found: list[Arrays] = []

    def keep(index: int, layer: Any, measure: Any) -> Any:
        every = measure() | {"turn": measure.turn()}
        found.append({p: np.asarray(a) for p, a in flatten(jax.device_get(every)).items()})
        return layer

    assert [index for index, _ in walk.run(values, batches, keep)] == [0, 1]
    return found


@pytest.mark.matrix(quick=["llama3"])
@pytest.mark.parametrize("name", ["llama3", "gpt2", "gemma2", "softmax"])
def test_statistics_are_those_of_the_inputs(name: str) -> None:
    """Checked for the first layer's queries and keys, whose input is the norm of the embedding."""
    walk, values, batches = opened(name, {})
    layers = measured(name, {})
    first = layers[0]
    assert {path.rpartition("/")[0] for path in first} == set(walk.matrices) | {"turn"}
    gram, size, norms, turn = 0.0, 0.0, 0.0, 0.0
    for batch in batches:
        inputs = decoder.make_layer_inputs(walk.cfg, batch, walk.ctx)
        embedded = decoder.embed(walk.cfg, values, inputs, walk.ctx)[0]
        x = np.asarray(embedded, np.float64)
        period = [jax.tree.map(lambda a, i=i: a[i], values["layers"]) for i in range(len(walk.cfg.windows))]
        after = np.asarray(
            families.only_stack(walk.cfg)[1].step(
                walk.cfg, walk.ctx, families.only_stack(walk.cfg)[1], period, embedded, 0, inputs
            )[0],
            np.float64,
        )
        lengths = np.linalg.norm(x, axis=-1) * np.linalg.norm(after, axis=-1)
        turn += (1 - (x * after).sum(-1) / lengths).sum()
        scales = jax.tree.map(lambda a: np.asarray(a[0], np.float64), values["layers"]["attention_norm"])
        if walk.cfg.norm == "layer":
            x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + walk.cfg.norm_eps)
        x = x * (scales["scale"] + float(walk.cfg.norm_unit_offset)) + scales.get("bias", 0)
        norms = norms + np.sqrt((x**2).sum(1)).sum(0)
        x = x.reshape(-1, x.shape[-1])
        gram, size = gram + x.T @ x, size + np.abs(x).sum(0)
    for path in ("attention/w_q", "attention/w_k"):
        np.testing.assert_allclose(first[f"{path}/gram"], gram, rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(first[f"{path}/size"], size, rtol=1e-4)
        np.testing.assert_allclose(first[f"{path}/norms"], norms, rtol=1e-4)
        assert first[f"{path}/tokens"] == 2 * 8 * 24
    np.testing.assert_allclose(first["turn/distance"], turn, rtol=1e-3)  # float32, of 1 - a cosine near 1
    assert first["turn/tokens"] == 2 * 8 * 24
    if name == "softmax":  # every token is read by two experts
        assert first["moe/w_up/tokens"].sum() == first["moe/w_down/tokens"].sum() == 2 * 2 * 8 * 24


@pytest.mark.matrix(quick=["llama3"])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("llama3", {"data": 2, "tensor": 2}), ("gpt2", {"fsdp": 2, "tensor": 2}), ("grouped", {"tensor": 2}),
     ("softmax", {"data": 2, "tensor": 2}), ("gemma2", {"context": 2, "fsdp": 2})],
)  # fmt: skip
def test_statistics_are_equal_on_every_mesh(name: str, sizes: dict[str, int]) -> None:
    for one, many in zip(measured(name, {}), measured(name, sizes), strict=True):
        assert one.keys() == many.keys()
        for path in one:
            top = np.abs(one[path]).max(initial=0)
            assert np.abs(one[path] - many[path]).max(initial=0) <= 2e-5 * top, path  # float32 sums in another order


def test_statistics_in_bfloat16_are_near_those_in_float32() -> None:
    """Inputs are rounded to 2^-9 a few times; the sums are in float32."""
    for one, half in zip(
        measured("llama3", {}), measured("llama3", {"data": 2, "tensor": 2}, jnp.bfloat16), strict=True
    ):
        for path in one:
            assert half[path].dtype == np.float32
            off = np.linalg.norm(one[path] - half[path]) / np.linalg.norm(one[path])
            if path == "turn/distance":  # a difference of numbers near 1
                assert off < 0.05
                continue
            assert off == 0 if path.endswith("tokens") else 1e-5 < off < 0.02, (path, off)


def test_inputs_that_are_not_finite_are_one_line() -> None:
    walk, values, batches = opened("llama3", {})
    values["layers"]["attention_norm"]["scale"] = values["layers"]["attention_norm"]["scale"].at[0, 0].set(np.inf)
    with pytest.raises(ConfigError, match=r"layers/attention/w_.* are not finite on the calibration batches"):
        list(quantize(walk, values, batches[:1], Settings(Scheme(bits=4, group=16), "gptq")))


def test_a_layer_reads_what_the_compressed_layers_before_it_make() -> None:
    """The inputs of the second layer's queries, when the first layer was halved."""
    walk, values, batches = opened("llama3", {})
    found: list[Any] = []

    def halve(index: int, layer: Any, measure: Any) -> Any:
        found.append(jax.device_get(measure()))
        return jax.tree.map(lambda a: a / 2, layer)

    list(walk.run(values, batches, halve))
    first, second = (jax.tree.map(lambda a, i=i: a[i], values["layers"]) for i in range(2))
    gram = 0.0
    for batch in batches:
        inputs = decoder.make_layer_inputs(walk.cfg, batch, walk.ctx)
        x, _ = decoder.embed(walk.cfg, values, inputs, walk.ctx)
        x, _ = families.only_stack(walk.cfg)[1].step(
            walk.cfg, walk.ctx, families.only_stack(walk.cfg)[1], [jax.tree.map(lambda a: a / 2, first)], x, 0, inputs
        )
        h = np.asarray(norm(walk.cfg, second["attention_norm"], x, walk.ctx), np.float64).reshape(-1, x.shape[-1])
        gram = gram + h.T @ h
    np.testing.assert_allclose(found[1]["attention/w_q"].gram, gram, rtol=1e-4, atol=1e-4 * np.max(gram))


@pytest.mark.parametrize("name", ["llama3", "gpt2", "gemma2", "latent"])
def test_factors_of_inputs_change_nothing(name: str) -> None:
    walk, values, batches = opened(name, {})
    rng, cfg = np.random.default_rng(2), walk.cfg
    layers = []
    for i in range(2):
        layer = jax.tree.map(lambda a, i=i: a[i], values["layers"])
        for producer, readers in shared_inputs(cfg).items():
            count = int(np.prod([walk.matrices[readers[0]].shape[d] for d in range(walk.matrices[readers[0]].in_axes)]))
            factors = jnp.asarray(rng.uniform(0.5, 2, count), jnp.float32)
            layer = divide_outputs(cfg, layer, producer, factors)
            for path in readers:
                group, _, last = path.partition("/")
                w = layer[group][last]
                inputs = w.shape[: walk.matrices[path].in_axes]
                scaled = w * factors.reshape(*inputs, *(1,) * (w.ndim - len(inputs)))
                layer = {**layer, group: {**layer[group], last: scaled}}
        layers.append(layer)
    changed = {**values, "layers": jax.tree.map(lambda *each: jnp.stack(each), *layers)}
    before, after = (families.of(cfg).hidden_states(cfg, v, batches[0], walk.ctx)[0] for v in (values, changed))
    np.testing.assert_allclose(after, before, rtol=1e-3, atol=1e-4 * float(jnp.abs(before).max()))


@pytest.mark.parametrize(
    ("name", "method"),
    [("gemma2", "awq"), pytest.param("softmax", "gptq", marks=pytest.mark.matrix)],
)
def test_quantised_layers_make_fewer_errors_than_rounded_ones(name: str, method: Any) -> None:
    """In outputs on other batches: the walk has given each layer the inputs that it has after quantisation."""
    walk, values, batches = opened(name, {})
    for group in ("attention_norm", "mlp_norm"):  # a few inputs are much larger than the others, as in trained models
        values["layers"][group]["scale"] = values["layers"][group]["scale"].at[:, :3].set(8)
    scheme, found = Scheme(bits=4, group=16), {}
    for kind in (method, "rtn"):
        layers = list(quantize(walk, values, batches[:1], Settings(scheme, kind)))
        for layer in layers:
            assert set(layer.codes) == set(walk.matrices) == set(layer.errors)
        new = join(walk.cfg, values, layers)
        wanted, got = (families.of(walk.cfg).hidden_states(walk.cfg, v, batches[1], walk.ctx)[0] for v in (values, new))
        found[kind] = float(jnp.mean((wanted - got) ** 2))
    assert found[method] < 0.9 * found["rtn"], found


@pytest.mark.matrix
@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_the_same_weights_become_zero_on_two_meshes(method: Any) -> None:
    """Sums of statistics in another order change near ties alone."""
    how = sparsify.Settings(Pattern(0.5, 4), method)
    found = []
    for sizes in ({}, {"data": 2, "tensor": 2}, {"fsdp": 4}):
        walk, values, batches = opened("grouped", sizes)
        layers = list(sparsify.sparsify(walk, values, batches, how))
        assert all(layer.errors.keys() == walk.matrices.keys() for layer in layers)
        found.append(flatten([layer.params for layer in layers]))
    one, *others = found
    for path, a in one.items():
        for b in (other[path] for other in others):
            same = (a == 0) == (b == 0)
            assert same.mean() > 0.995, path
            assert np.abs(a - b)[same].mean() <= 1e-3 * np.abs(a).mean(), path  # what near ties let others make up for
