"""Watched values: their statistics in NumPy and float64, on every mesh, their names, and what they cost when off."""

import dataclasses
import fnmatch
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_by_hand as definition
import test_meshes as meshes
from jax.sharding import PartitionSpec

from jaxstack import families, start
from jaxstack.common.tree import flatten
from jaxstack.config import ConfigError, DebugConfig, MeshConfig, OptimConfig, PipelineConfig
from jaxstack.families.context import make_context
from jaxstack.features import watching as taps
from jaxstack.models.context import Context
from jaxstack.models.layout import Layout
from jaxstack.models.values import Mean, observed
from jaxstack.sharding import make_mesh, totals, transformer
from jaxstack.tracking import watched
from jaxstack.training.assemble import jit_train_step, make_gradients, make_train_step
from jaxstack.training.features import watch
from jaxstack.training.setup import Setup
from jaxstack.training.state import Recipe, abstract_state, make_state

EXPONENTS = range(-40, 17)
ROUNDING = 3e-7
"""Error of an element between two meshes, as a part of the RMS: five units of float32, as was found in T5."""


def watched_of(cfg):
    return watch.watched_of(cfg.model, cfg.debug.patterns, cfg.data, cfg.train.dtype)


def statistics(x):
    """Returns the statistics of an array in float64. `frexp` gives a mantissa of 0.5 to 1, and a power of two."""
    x = np.abs(np.asarray(x, np.float64)).ravel()
    bins = dict.fromkeys(EXPONENTS, 0.0)
    for size in x[x > 0]:
        mantissa, power = math.frexp(size)
        for exponent, share in ((power, 2 * mantissa - 1), (power - 1, 2 - 2 * mantissa)):
            bins[min(max(exponent, EXPONENTS[0]), EXPONENTS[-1])] += share / x.size
    return {
        "norm": math.sqrt((x**2).sum()), "rms": math.sqrt((x**2).mean()), "max": x.max(), "zeros": (x == 0).mean(),
        "histogram": {str(exponent): share for exponent, share in bins.items() if share},
    }  # fmt: skip


def assert_equal(found, expected, tolerance, of_same_values=True):
    """Compares statistics of values by name: relative errors, but of shares in a histogram the absolute ones.

    If the values themselves differ by rounding, bins below a thousandth of the RMS are taken together: the rounding
    error of numbers that small is a large part of them. In the bins above, an error of `ROUNDING` times the RMS in each
    element moves that much of its share over the width of the narrower bin. This is far more than the tolerance only
    where many elements are small and equal, as in rows of padding.
    """
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert found[name].keys() == one.keys(), name
        for key, value in one.items():
            if key != "histogram":
                assert found[name][key] == pytest.approx(value, rel=tolerance, abs=1e-30), (name, key)
                continue
            least = EXPONENTS[0] if of_same_values else math.floor(math.log2(one["rms"])) - 10
            pair = [dict.fromkeys(EXPONENTS, 0.0), dict.fromkeys(EXPONENTS, 0.0)]
            for bins, shares in zip(pair, (found[name][key], value), strict=True):
                for exponent, share in shares.items():
                    bins[min(max(int(exponent), least), EXPONENTS[-1])] += share
            moved = 0.0 if of_same_values else ROUNDING * one["rms"]
            near = {e: sum(pair[1].get(e + step, 0.0) for step in (-1, 0, 1)) for e in EXPONENTS}
            wrong = {e: (pair[0][e], x) for e, x in pair[1].items()
                     if abs(pair[0][e] - x) > max(tolerance, moved / 2.0 ** (e - 1) * near[e])}  # fmt: skip
            assert not wrong, name


def draw(rng, shape):
    """Returns numbers of very different sizes, some of them zero, exact powers of two, or beyond the bins."""
    x = rng.normal(size=shape) * 10.0 ** rng.integers(-6, 4, shape)
    special = [0.0, 0.0, 0.25, -8.0, 3e-20, 7e9]
    return np.where(rng.random(shape) < 0.2, rng.choice(special, shape), x).astype(np.float32)


def names_of(cfg):
    """Returns the names that the model of a run has."""
    return watch.all_names(cfg.model, families.batch_spec(cfg.model, cfg.data), cfg.train.dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_statistics_are_those_of_numpy(rng, dtype):
    """Of what a program rounds to the dtype: 8 significant digits in float32, from float64 on the same values."""
    a, b = draw(rng, (3, 5, 40)), rng.normal(size=(3, 5, 40)).astype(np.float32)

    @jax.jit
    def run(a, b):
        x = (a * b).astype(dtype)
        sums, largest = taps.moments(x, keep=1)
        return x, totals.Measured(sums, largest)

    x, measured = jax.device_get(run(a, b))
    found = watched.statistics(["*"], {"layers/x": measured})
    expected = {f"layers/{i}/x": statistics(x[i].astype(np.float64)) for i in range(3)}
    assert_equal(found, expected, 1e-6)
    some = watched.statistics(["layers/[12]/x"], {"layers/x": measured})
    assert some.keys() == {"layers/1/x", "layers/2/x"}


def by_hand(cfg, values, batch):
    """Returns the activations of the decoder by name, written again in NumPy; see test_by_hand.py."""
    D = definition
    heads, groups = cfg.num_heads, cfg.num_kv_heads or cfg.num_heads
    x = values["embedding"]["tokens"][batch["tokens"]] * (math.sqrt(cfg.d_model) if cfg.embedding_scale else 1)
    if cfg.positions == "learned":
        x = x + values["embedding"]["positions"][batch["positions"]]
    found, scalars = {}, {}
    for i in range(cfg.num_layers):
        p = jax.tree.map(lambda a, i=i: a[i], values["layers"])
        window, a = cfg.windows[i % len(cfg.windows)], p["attention"]
        h = D.norm(cfg, p["attention_norm"], x)
        q, k, v = (np.einsum("bsd,dhk->bshk", h, a[f"w_{n}"]) + a.get(f"b_{n}", 0) for n in "qkv")
        if cfg.qk_norm:
            q, k = D.norm(cfg, a["q_norm"], q, "rms"), D.norm(cfg, a["k_norm"], k, "rms")
        if cfg.positions == "rope":
            q, k = (
                np.array([
                    [[D.rotated(cfg, head, t) for head in token] for token, t in zip(row, ts, strict=True)]
                    for row, ts in zip(each, batch["positions"], strict=True)
                ])
                for each in (q, k)
            )  # fmt: skip
        logits = np.einsum("bshk,bthk->bhst", q, np.repeat(k, heads // groups, 2))
        logits = logits * (cfg.attention_scale or q.shape[-1] ** -0.5)
        if cfg.attention_softcap:
            logits = cfg.attention_softcap * np.tanh(logits / cfg.attention_softcap)
        t, segments = np.arange(q.shape[1]), batch["segment_ids"]
        seen = (t[:, None] >= t) & ((t[:, None] - t < window) | (window == 0))
        logits = np.where((seen & (segments[:, :, None] == segments[:, None]))[:, None], logits, -np.inf)
        mixed = np.einsum("bhst,bthk->bshk", D.softmax(logits), np.repeat(v, heads // groups, 2))
        out = np.einsum("bshk,hkd->bsd", mixed, a["w_o"]) + a.get("b_o", 0)
        y = D.norm(cfg, p["attention_post_norm"], out) if cfg.post_norm else out
        seen_here = {
            "residual/in": x,
            "attention_norm/out": h,
            "attention/query": q,
            "attention/key": k,
            "attention/value": v,
        }
        x = x + y
        h = D.norm(cfg, p["mlp_norm"], x)
        seen_here |= {"attention/mixed": mixed, "attention/out": out, "residual/attention": x, "mlp_norm/out": h}
        scalars[f"layers/{i}/attention/max_logit"] = logits.max()
        if cfg.moe.num_experts:
            counts = batch["loss_weights"] != 0
            sums = {"balance": 0.0, "z": 0.0, "entropy": 0.0, "dropped": 0, "load": np.zeros(cfg.moe.num_experts)}
            rows = zip(h, batch["gate_ids"], counts, strict=True)
            out = np.array([D.experts(cfg, p["moe"], row, gates, count, sums) for row, gates, count in rows])
            seen_here["moe/out"] = out
            scalars[f"layers/{i}/moe/router_entropy"] = sums["entropy"] / counts.sum()
        else:
            up = h @ p["mlp"]["w_up"] + p["mlp"].get("b_up", 0)
            gate = h @ p["mlp"]["w_gate"] + p["mlp"].get("b_gate", 0) if cfg.gated else None
            hidden = D.activate(cfg.activation, up) if gate is None else D.activate(cfg.activation, gate) * up
            out = hidden @ p["mlp"]["w_down"] + p["mlp"].get("b_down", 0)
            seen_here |= {"mlp/up": up, "mlp/hidden": hidden, "mlp/out": out}
            seen_here |= {} if gate is None else {"mlp/gate": gate}
        x = x + (D.norm(cfg, p["mlp_post_norm"], out) if cfg.post_norm else out)
        found |= {f"layers/{i}/{name}": array for name, array in (seen_here | {"residual/out": x}).items()}
    return {name: statistics(a) for name, a in found.items()} | {n: {"value": v} for n, v in scalars.items()}


SLOW = pytest.mark.matrix
HAND = ["mixtral", *(pytest.param(name, marks=SLOW) for name in ("gemma2", "llama3", "gated_bias", "gpt2"))]


@pytest.mark.parametrize("name", HAND)
def test_activations_are_those_of_the_definition(name, rng):
    """All that can be watched in a decoder's layers, on one device, with packed documents and padding.

    All models have SiLU: far from zero, values of GELU in float32 have no right digits.
    """
    cfg = dataclasses.replace(definition.MODELS[name], activation="silu")
    values, batch = definition.drawn(cfg, rng)
    ctx = Context(observer=taps.Watcher(frozenset(taps.TAPS)))
    _, aux = jax.jit(lambda values, batch: families.of(cfg).hidden_states(cfg, values, batch, ctx))(values, batch)
    found = watched.statistics(["*"], jax.device_get(observed(aux)))
    expected = by_hand(cfg, jax.tree.map(lambda leaf: leaf.astype(np.float64), values), batch)
    # A dozen float32 operations in a row: some 1e-6, ten times that.
    assert_equal(found, expected, 2e-5, of_same_values=False)


def run_step(cfg, batch, names, with_gradients=False):
    """Returns the statistics of the first step of a run, its initial parameters, and its gradients or `None`."""
    cfg = dataclasses.replace(cfg, debug=DebugConfig(watch=names))
    mesh = make_mesh(cfg.mesh, cfg.microbatch_size, jax.devices()[: math.prod(cfg.mesh.sizes.values())])
    ctx = make_context(cfg, mesh)
    state = make_state(Recipe.of(cfg), ctx, abstract_state(Recipe.of(cfg), ctx))
    step, gradients = make_train_step(cfg, ctx, watched_of(cfg)), make_gradients(cfg, ctx)

    @jax.jit
    def run(state, batch):
        measured = step(state, batch)[1]["watch"]
        return measured, gradients(state.params, batch)[1] if with_gradients else None

    measured, grads = jax.device_get(run(state, jax.device_put(batch, ctx.layout.sharding(ctx.layout.batch))))
    return watched.statistics(cfg.debug.patterns, measured), state.params, grads


def test_gradients_and_updates_are_those_of_numpy(seed):
    """On one device. An update of SGD without momentum is the clipped gradient with decay, times the learning rate."""
    cfg = meshes.config("gpt2", {})
    model = dataclasses.replace(cfg.model, num_layers=2, vocab_size=61, pad_vocab_to=64)
    optim = OptimConfig(name="sgd", b1=0.0, lr=0.3, warmup_steps=0, schedule="constant", clip_norm=0.2)
    cfg = dataclasses.replace(cfg, model=model, optim=optim)
    batch = meshes.random_batch(seed, False, cfg.model)
    batch["loss_weights"][:] = batch["tokens"] % 2  # and some rows of the table have no gradient
    names = ["embedding/tokens/*", "layers/*/mlp/w_up/*", "final_norm/*"]
    found, values, grads = run_step(cfg, batch, names, with_gradients=True)
    grads, values = ({path: np.asarray(a, np.float64) for path, a in flatten(tree).items()} for tree in (grads, values))
    clip = min(1, 0.2 / math.sqrt(sum((g**2).sum() for g in grads.values())))
    expected = {}
    for path in ("embedding/tokens", "layers/mlp/w_up", "final_norm/scale", "final_norm/bias"):
        g, w = grads[path], values[path]
        update = -0.3 * (clip * g + 0.1 * w * path.endswith(("tokens", "w_up")))
        if path == "embedding/tokens":
            assert not g[61:].any()
            g, w, update = g[:61], w[:61], update[:61]  # padding is not counted
        for i in range(2) if path.startswith("layers") else (None,):
            name = path if i is None else path.replace("layers", f"layers/{i}")
            of_layer = [a if i is None else a[i] for a in (g, update, w)]
            ratio = np.linalg.norm(of_layer[1]) / np.linalg.norm(of_layer[2]) if of_layer[2].any() else None
            expected[f"{name}/gradient"], expected[f"{name}/update"] = map(statistics, of_layer[:2])
            expected[f"{name}/update_ratio"] = {"value": ratio if ratio is not None else math.inf}
    # Numbers in a thousandth of the RMS differ more from the closed form, whose gradients are rounded to float32.
    assert_equal(found, expected, 2e-6, of_same_values=False)


def test_parts_of_arrays_add_up(rng):
    """On a mesh that splits rows, tokens and heads: an array in the layout of heads, and one of the residual stream."""
    mesh = make_mesh(MeshConfig(data=2, context=2, tensor=2), 8, jax.devices())
    ctx = Context(Layout(mesh, transformer(MeshConfig(tensor=2))), observer=taps.Watcher(frozenset(taps.TAPS)))
    x, y = draw(rng, (4, 8, 4, 6)), draw(rng, (4, 8, 6))

    def work(x, y):
        inner, aux = ctx.collecting()
        inner.observe("attention/mixed", x, "batch", "sequence", "heads")
        inner.observe("mlp/out", y, "batch", "residual")
        inner.observe("moe/router_entropy", Mean(y.sum(), (y > 0).sum(dtype=jnp.float32)), "batch", "residual")
        inner.observe("cross/max_logit", lambda: -jnp.abs(x).min(), "batch", "sequence", "heads")
        twice = totals.merge(totals.merge(totals.empty(aux), aux), aux)
        return totals.reduce((aux, twice), ctx.layout.token_axes)

    P = PartitionSpec
    specs = P("data", "context", "tensor"), P("data", ("context", "tensor"))
    run = jax.jit(jax.shard_map(work, mesh=mesh, in_specs=specs, out_specs=P()))
    once, twice = (observed(aux) for aux in jax.device_get(run(x, y)))
    expected = {"attention/mixed": statistics(x), "mlp/out": statistics(y)}
    expected["moe/router_entropy"] = {"value": y.astype(np.float64).sum() / (y > 0).sum()}
    expected["cross/max_logit"] = {"value": -np.abs(x).min().astype(np.float64)}
    assert_equal(watched.statistics(["*"], once), expected, 1e-6)
    expected = {n: s | ({"norm": s["norm"] * math.sqrt(2)} if "norm" in s else {}) for n, s in expected.items()}
    assert_equal(watched.statistics(["*"], twice), expected, 1e-6)


MATRIX = [
    ("llama3", {"data": 2, "fsdp": 2, "tensor": 2}, {"accum": 2}, {}),
    ("llama3", {"tensor": 2, "sequence_parallel": False}, {}, {}),
    ("llama3", {"fsdp": 2, "context": 4}, {"packing": True}, {}),
    ("llama3", {"pipe": 2, "data": 2, "tensor": 2}, {"accum": 2}, {}),
    ("llama3", {"data": 2, "fsdp": 2, "tensor": 2, "partitioner": "auto"}, {"accum": 2}, {}),
    ("softmax", {"data": 2, "expert": 2, "tensor": 2}, {"accum": 2}, {}),
    ("softmax", {"pipe": 2, "expert": 2}, {}, {"schedule": "zb_h1", "split": (".*",)}),
    ("llama3", {"pipe": 2, "context": 2}, {}, {"schedule": "gpipe"}),
    ("gemma2", {"fsdp": 2, "tensor": 2}, {}, {}),
    ("t5", {"pipe": 2, "data": 2}, {}, {}),
]
NAMES = [
    "*/0/residual/in",
    "*/max_logit",
    "*/mixed",
    "*/mlp/hidden",
    "*/out",
    "*/router_entropy",
    "*/w_o/*",
    "*/w_down/update_ratio",
]


@pytest.mark.matrix
@pytest.mark.parametrize(("model", "mesh", "how", "pipe"), MATRIX, ids=str)
def test_every_mesh_gives_the_statistics_of_one_device(model, mesh, how, pipe, seed):
    packing = how.get("packing", False)
    batch = meshes.random_batch(seed, packing, meshes.MODELS[model])
    names = [p for p in NAMES if fnmatch.filter(names_of(meshes.config(model, {})), p)]
    cfg = meshes.config(model, mesh, **how)
    # Adam's first update is a gradient divided by its own size: of gradients near zero, it is rounding alone.
    sgd = OptimConfig(name="sgd", b1=0.0, lr=0.3, warmup_steps=0)
    plain = dataclasses.replace(meshes.config(model, {}, packing=packing), optim=sgd)
    one, *_ = run_step(plain, batch, names)
    other, *_ = run_step(dataclasses.replace(cfg, optim=sgd, pipeline=PipelineConfig(**pipe)), batch, names)
    assert any("max_logit" in name for name in one)
    # The sums are of other parts, in float32: some 1e-7.
    assert_equal(other, one, 1e-6, of_same_values=False)


@pytest.mark.parametrize(
    ("model", "some"),
    [
        ("llama3", "layers/1/mlp/out layers/1/mlp/w_up/gradient embedding/tokens/update final_norm/scale/update_ratio"),
        ("lora_moe", "layers/0/moe/router_entropy layers/0/attention/lora_a_q/gradient"),
        ("t5", "encoder/0/attention/key decoder/1/cross/max_logit decoder/1/cross/w_q/update"),
        ("switch_2", "encoder/1/layer_0/mlp/hidden encoder/1/layer_1/moe/out encoder/1/layer_1/moe/router/gradient"),
        ("branches", "trunk/0/understanding/residual/out branches/0/generation/mlp/w_up/update"),
        ("coca", "image/0/attention/max_logit text/1/mlp/out caption/0/cross/out"),
        ("dit_text", "text/0/residual/out layers/0/cross/max_logit layers/1/moe/out layers/1/residual/out"),
    ],
)
def test_every_family_has_names(model, some):
    """Of activations in each layer of each stack, and of trained parameters."""
    names = names_of(meshes.config(model, {}))
    assert {*some.split()} <= {*names}
    assert all(("lora" in name) == (model == "lora_moe") for name in names if name.endswith("gradient"))
    assert any("router_entropy" in name for name in names) == (model in ("lora_moe", "switch_2"))


def test_a_pattern_without_a_match_names_the_nearest():
    cfg = meshes.config("llama3", {})
    wrong = dataclasses.replace(cfg, debug=DebugConfig(watch=("layers/*/mlp/out", "layers/1/mpl/up")))
    with pytest.raises(
        ConfigError, match=r"watch=layers/1/mpl/up matches no name\. The nearest names are layers/1/mlp/up, "
    ):
        watched_of(wrong)
    right = watched_of(dataclasses.replace(cfg, debug=DebugConfig(watch="layers/1/mlp/*")))
    assert right.watcher.names == {"mlp/up", "mlp/gate", "mlp/hidden", "mlp/out"}
    assert {name for name in right.names if "w_up" in name} == {
        f"layers/mlp/w_up/{kind}" for kind in ("gradient", "update", "update_ratio")
    }


def test_nothing_is_measured_between_the_steps():
    """The program of the other steps, and that of a run without `debug.watch`, is the same text."""
    cfg = meshes.config("llama3", {})
    ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.microbatch_size, jax.devices()[:1]))
    abstract, where = abstract_state(Recipe.of(cfg), ctx), ctx.layout.sharding(ctx.layout.batch)
    batch = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
        for name, x in meshes.random_batch(0, False, cfg.model).items()
    }
    plain = jit_train_step(cfg, ctx, abstract).lower(abstract, batch).as_text()
    on = dataclasses.replace(cfg, debug=DebugConfig(watch="*/mlp/out", watch_every=3))
    mesh = ctx.layout.mesh
    steps = start.make_steps(Setup(on, None, mesh, ctx, abstract, watched_of(on)))
    usual = steps.train
    chosen = [steps.choose(number, on.debug.watch_every, usual) for number in range(1, 8)]
    assert [step is usual for step in chosen] == [True, True, False, True, True, False, True]
    assert usual.lower(abstract, batch).as_text() == plain
    assert start.make_steps(Setup(cfg, None, mesh, ctx, abstract)).choose(3, 3, usual) is usual
