"""What pruning keeps: parts that matter stay, and a part that adds nothing changes nothing when it leaves."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_meshes as meshes
from families import FAMILIES

from jaxstack import families
from jaxstack.common.tree import flatten
from jaxstack.compress import prune
from jaxstack.compress.calibrate import Walk
from jaxstack.compress.importance import Importance, OfStack, measure
from jaxstack.config import ConfigError, ModelConfig, MoEConfig
from jaxstack.families.surgery import KeptLayers
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.training.assemble import objective_of
from jaxstack.training.losses import evaluate

_SHARED = replace(meshes.EXPERTS["sigmoid"], num_groups=2)
PRUNED: dict[str, tuple[ModelConfig, dict[str, int]]] = {
    "grouped": (meshes.MODELS["grouped"], {"layers": 1, "heads": 4, "kv_heads": 2, "d_ff": 40, "d_model": 48}),
    "gpt2": (meshes.MODELS["gpt2"], {"layers": 1, "heads": 5, "d_ff": 50}),
    "gemma2": (FAMILIES["gemma2"], {"heads": 2, "d_ff": 56, "d_model": 20}),
    "experts": (
        replace(meshes.MODELS["sigmoid"], moe=_SHARED),
        {"layers": 1, "heads": 6, "d_ff": 20, "experts": 4, "d_model": 50},
    ),
    "gpt_oss": (replace(meshes.MODELS["gpt_oss"], num_layers=4), {"layers": 2, "heads": 5, "d_ff": 20, "experts": 3}),
}


def drawn(cfg: ModelConfig, rng: np.random.Generator) -> Any:
    """Parameters of which no scale or bias is that of the initial values."""
    values = jax.device_get(params.init(jax.random.key(0), families.spec(cfg)))
    return jax.tree.map(lambda a: a + rng.normal(size=a.shape).astype(np.float32) / 5, values)


def mask(size: int, kept: np.ndarray) -> np.ndarray:
    """1 for the parts that stay, else 0."""
    return np.isin(np.arange(size), kept).astype(np.float32)


def without_outputs(cfg: ModelConfig, layers: Any, kept: KeptLayers) -> None:
    """Sets the output weights of the layers, heads, units and experts that leave to zero, in place."""
    outputs = [("attention", "w_o"), ("attention", "b_o"), ("mlp", "w_down"), ("mlp", "b_down"), ("moe", "w_down")]
    outputs += [("moe", "b_down")]
    dense = [layers["moe"]["shared"]["w_down"]] if cfg.moe.shared_experts else []
    dense += [layers[group][name] for group, name in outputs if name in layers.get(group, {})]
    for layer in set(range(cfg.num_layers)) - set(kept.layers.tolist()):
        for leaf in dense:
            leaf[layer] = 0
    for row, layer in enumerate(kept.layers):
        layers["attention"]["w_o"][layer] *= mask(cfg.num_heads, kept.heads["attention"][row])[:, None, None]
        for group, units in kept.neurons.items():
            w = layers["moe"]["shared"]["w_down"] if group == "moe/shared" else layers[group]["w_down"]
            if group != "moe":
                w[layer] *= mask(w.shape[1], units[row])[:, None]
                continue
            for i, expert in enumerate(kept.experts[row]):
                w[layer, expert] *= mask(w.shape[2], units[row, i])[:, None]
            gone = np.setdiff1d(np.arange(cfg.moe.num_experts), kept.experts[row])
            layers["moe"]["router_bias" if cfg.moe.bias else "balance"][layer, gone] = -50  # never chosen


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.matrix] if name != "gemma2" else []) for name in PRUNED]
)
def test_parts_that_add_nothing_leave_without_a_trace(name: str, rng: np.random.Generator) -> None:
    """The output weights of the parts that leave are zero in the large model, as are their channels everywhere."""
    cfg, given = PRUNED[name]
    sizes, values = prune.smaller_sizes(cfg, given), drawn(cfg, rng)
    L, E, F = cfg.num_layers, cfg.moe.num_experts, prune.sizes_of(cfg).d_ff
    units = {"moe": rng.random((L, E, F))} if E else {"mlp": rng.random((L, F))}
    units |= {"moe/shared": rng.random((L, F))} if cfg.moe.shared_experts else {}
    turns, heads = rng.random(L // len(cfg.windows)), rng.random((L, cfg.num_heads))
    found = OfStack(turns, {"attention": heads}, units, rng.random((L, E)))
    kept = prune.choose(cfg, sizes, Importance({"layers": found}, {"residual": rng.random(cfg.d_model)}))
    without_outputs(cfg, values["layers"], kept.stacks["layers"])
    channels = mask(cfg.d_model, kept.channels["residual"])
    for path, p in params.flat_spec(families.spec(cfg)).items():
        leaf = flatten(values)[path]
        for dim, axis in enumerate(p.axes):
            if axis in ("embed", "expert_embed", "input_embed"):
                leaf *= channels.reshape(-1, *(1,) * (leaf.ndim - dim - 1))
    small = prune.smaller_model(cfg, sizes)
    assert prune.sizes_of(small) == sizes
    new = jax.tree.map(np.array, prune.keep(cfg, small, Context(), values, kept))
    for path, leaf in flatten(new).items():  # a root mean square over fewer channels is larger
        if path.endswith("norm/scale") and leaf.shape[-1] == sizes.d_model:
            offset = float(cfg.norm_unit_offset)
            leaf[...] = (offset + leaf) * (cfg.d_model / sizes.d_model) ** 0.5 - offset
    tokens = jnp.asarray(rng.integers(0, cfg.vocab, (2, 20)))
    expected, got = (jax.jit(partial(families.forward, c))(v, tokens)[0] for c, v in ((cfg, values), (small, new)))
    np.testing.assert_allclose(got, expected, atol=1e-4 * float(jnp.abs(expected).max()))  # float32 sums, other order


def test_the_parts_that_matter_most_stay() -> None:
    """Two key heads of four, one query head of two each; one expert of two in each of two groups; and its units."""
    moe = MoEConfig(num_experts=4, router="sigmoid", top_k=1, num_groups=2, top_k_groups=2)
    cfg = ModelConfig(num_layers=2, d_model=4, num_heads=8, num_kv_heads=4, head_dim=2, d_ff=3, moe=moe, vocab_size=5)
    heads = np.array([[9, 0, 4, 1, 4, 4, 0, 3]] * 2, float)  # key heads: 9, 5, 8, 3
    heads[1] = heads[0, ::-1]
    units = np.arange(24.0).reshape(2, 4, 3) % 5
    experts = np.array([[1, 2, 4, 3], [2, 1, 3, 4.0]])
    of_layers = OfStack(np.array([0.3, 0.1]), {"attention": heads}, {"moe": units}, experts)
    found = Importance({"layers": of_layers}, {"residual": np.array([3, 1, 2, 4.0])})
    sizes = prune.smaller_sizes(cfg, {"heads": 2, "kv_heads": 2, "experts": 2, "d_ff": 1, "d_model": 3})
    chosen = prune.choose(cfg, sizes, found)
    kept = chosen.stacks["layers"]
    assert kept.layers.tolist() == [0, 1]
    assert kept.kv_heads["attention"].tolist() == [[0, 2], [1, 3]]
    assert kept.heads["attention"].tolist() == [[0, 4], [2, 7]]
    assert kept.experts.tolist() == [[1, 2], [0, 3]]
    assert kept.neurons["moe"].tolist() == [[[1], [2]], [[2], [2]]]
    assert chosen.channels["residual"].tolist() == [0, 2, 3]
    sizes = prune.smaller_sizes(cfg, {"layers": 1, "heads": 4})
    assert (sizes.kv_heads, prune.choose(cfg, sizes, found).stacks["layers"].layers.tolist()) == (2, [0])
    given = prune.choose(cfg, sizes, found, {"layers": np.array([1])})
    assert given.stacks["layers"].layers.tolist() == [1]


def test_importance_is_the_size_of_what_a_part_adds(rng: np.random.Generator) -> None:
    """Of rows of one sequence: from the sums of squares of the inputs, and zero for a layer that adds nothing."""
    cfg = replace(meshes.MODELS["sigmoid"], num_layers=2)
    values = drawn(cfg, rng)
    layers = values["layers"]
    for leaf in (layers["attention"]["w_o"], layers["moe"]["w_down"], layers["moe"]["shared"]["w_down"]):
        leaf[1] = 0
    walk, grams = Walk.of(cfg, Context()), []
    values = jax.tree.map(jnp.asarray, values)
    batches: list[Any] = [{"tokens": jnp.asarray(rng.integers(0, cfg.vocab, (1, 24)))}]

    def look(index: int, layer: Any, measure: Any) -> Any:
        grams.append({path: np.asarray(each.gram, np.float64) for path, each in measure().items()})
        return layer

    list(walk.run(values, batches, look))
    every = measure(walk, values, batches)
    found = every.stacks["layers"]
    gram, first = grams[0], jax.tree.map(lambda a: np.asarray(a[0], np.float64), values["layers"])
    assert found.turns[1] == pytest.approx(0, abs=1e-6)
    assert found.turns[0] > 0.01
    assert not any(part[1].any() for part in (found.heads["attention"], found.experts, found.neurons["moe"]))
    squares = np.diag(gram["attention/w_o"]).reshape(8, 8).sum(1)
    np.testing.assert_allclose(
        found.heads["attention"][0], np.sqrt(squares * (first["attention"]["w_o"] ** 2).sum((1, 2))), rtol=1e-4
    )
    down = first["moe"]["shared"]["w_down"]
    units = np.sqrt(np.diag(gram["moe/shared/w_down"]) * (down**2).sum(1))
    np.testing.assert_allclose(found.neurons["moe/shared"][0], units, rtol=1e-4)
    down, own = first["moe"]["w_down"], gram["moe/w_down"]
    units = np.sqrt(np.diagonal(own, axis1=1, axis2=2) * (down**2).sum(2))
    np.testing.assert_allclose(found.neurons["moe"][0], units, rtol=1e-4)
    outputs = [np.trace(w.T @ g @ w) for w, g in zip(down, own, strict=True)]
    np.testing.assert_allclose(found.experts[0], np.sqrt(outputs), rtol=1e-4)
    channels = sum(np.sqrt(np.diag(g[path])) for g in grams for path in ("attention/w_q", "moe/shared/w_up"))
    np.testing.assert_allclose(every.channels["residual"], channels, rtol=1e-4)


def test_the_loss_without_a_layer_is_that_of_a_layer_that_adds_nothing(rng: np.random.Generator) -> None:
    cfg = replace(meshes.config("llama3", {}), model=replace(meshes.MODELS["llama3"], num_layers=3))
    values = drawn(cfg.model, rng)
    tokens = rng.integers(0, cfg.model.vocab, (8, 17)).astype(np.int32)
    batch: Any = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_weights": np.ones((8, 16), np.float32)}
    ctx = Context()
    search = prune.LayerSearch(cfg, ctx, jax.tree.map(jnp.asarray, values), [batch, batch])
    left, losses = search.leave_out({"layers": 1})
    whole = jax.jit(lambda values: evaluate(objective_of(cfg.model), cfg.model, values, batch, ctx).losses)

    def loss(out: list[int]) -> float:
        layers = jax.tree.map(np.copy, values["layers"])
        for leaf in (layers["attention"]["w_o"], layers["mlp"]["w_down"]):
            leaf[out] = 0
        return float(sum(whole({**values, "layers": layers}).values())) / (8 * 16)

    assert losses.whole == pytest.approx(loss([]), rel=1e-5)
    np.testing.assert_allclose(losses.without["layers"], [loss([out]) for out in range(3)], rtol=1e-5)
    first = int(np.argmin(losses.without["layers"]))
    second = min((loss([first, out]), out) for out in range(3) if out != first)[1]
    assert left["layers"].tolist() == sorted({0, 1, 2} - {first, second})


@pytest.mark.parametrize(
    ("name", "given", "text"),
    [("llama3", {"layers": 5}, "--layers=5 is more than the 2 of"), ("llama3", {"experts": 2}, "num_experts=0"),
     ("grouped", {"heads": 3}, "--heads=3 with --kv_heads=2: each"), ("grouped", {"kv_heads": 1}, "--heads=8 with --k"),
     ("gemma2", {"layers": 1}, "whole periods of model.windows=.*multiple of 2"),
     ("softmax", {"experts": 1}, "at least model.moe.top_k=2"), ("sigmoid", {"experts": 6}, "multiple of .*groups=4"),
     ("domain", {"experts": 4}, "router=domain each expert has tokens"), ("mup", {"d_model": 32}, "base_width=32")],
)  # fmt: skip
def test_sizes_that_a_model_cannot_have(name: str, given: dict[str, int | None], text: str) -> None:
    models = meshes.MODELS | {"mup": replace(meshes.MODELS["llama3"], base_width=32)}
    with pytest.raises(ConfigError, match=text):
        prune.smaller_sizes(models[name], given)
