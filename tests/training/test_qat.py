"""Quantisation-aware training: what is rounded, gradients on every mesh, and that storing the result loses nothing."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
import test_meshes

import jaxstack as js
from jaxstack.cli.parser import execute
from jaxstack.common.tree import flatten
from jaxstack.compress.calibrate import Walk
from jaxstack.compress.quantize import Settings, quantize_layer
from jaxstack.config import Config
from jaxstack.config.scheme import Scheme
from jaxstack.families.context import make_context
from jaxstack.features import adapters
from jaxstack.models.context import Context
from jaxstack.planner import estimate
from jaxstack.planner.job import Job
from jaxstack.sharding import make_mesh
from jaxstack.training.assemble import make_gradients
from jaxstack.training.features import qat
from jaxstack.training.features.qat import evaluated_params
from jaxstack.training.optimizer import AverageState
from jaxstack.training.state import Recipe, TrainState, abstract_state

# Groups of 32: with two tensor shards, the 96 inputs of w_down have a group on both of them.
FORMATS = {"int4": 32, "int8": 32, "fp8": None, "nf4": 64}
MESHES = [
    ("llama3", {"data": 2, "fsdp": 2, "tensor": 2}, {"accum": 2}),
    ("gpt2", {"pipe": 2, "tensor": 2}, {"accum": 2}),
    ("llama3", {"context": 2, "fsdp": 2}, {"packing": True, "remat": "selective"}),
    ("softmax", {"expert": 4, "tensor": 2}, {}),
    ("lora", {"fsdp": 4, "tensor": 2}, {}),
    ("qwen3", {"fsdp": 2, "tensor": 2, "partitioner": "auto"}, {}),
]
SLOW = [pytest.param(*case, marks=pytest.mark.matrix) for case in MESHES[1:]]

MORE = [("llama3", "fp8"), ("lora", "int4"), ("llama3", "int8")]


def config(name, mesh, weights="int4", dtype="float32", **how) -> Config:
    cfg = test_meshes.config(name, mesh, **how)
    return replace(cfg, train=replace(cfg.train, qat=weights, qat_group=FORMATS.get(weights, 64), dtype=dtype))


def placed(cfg: Config, seed: int):
    """The context of a run on its mesh, and random parameters."""
    devices = jax.devices()[: int(np.prod([*cfg.mesh.sizes.values()]))]
    ctx = make_context(cfg, make_mesh(cfg.mesh, test_meshes.BATCH, devices))
    rng, abstract = np.random.default_rng(seed), abstract_state(Recipe.of(cfg), ctx).params
    return ctx, jax.tree.map(
        lambda like: jax.device_put(rng.normal(0, 0.1, like.shape).astype(np.float32), like.sharding), abstract
    )


def stored(cfg: Config, values):
    """What `compress quantize --method=rtn` makes of each layer, by its own program, in NumPy."""
    walk, found = Walk.of(cfg.model.base, Context()), []
    how = Settings(Scheme.of(cfg.train.qat, cfg.train.qat_group), "rtn")
    for i in range(cfg.model.num_layers):
        layer = jax.tree.map(lambda a, i=i: np.asarray(a[i]), values["layers"])
        made = quantize_layer(walk.cfg, walk.matrices, layer, {}, how)
        for path, (codes, scales) in made.codes.items():
            p, value = walk.matrices[path], dict(flatten(made.params))[path]
            rows = np.repeat(scales, codes.shape[-1] // scales.shape[-1], -1) * codes.astype(np.float32)
            np.testing.assert_array_equal(rows.swapaxes(-1, -2).reshape(p.shape), value)
        found.append(made.params)
    return values | {"layers": jax.tree.map(lambda *each: np.stack(each), *found)}


@pytest.mark.matrix
@pytest.mark.random
@pytest.mark.parametrize(
    ("name", "weights"),
    [("softmax", "int4"), ("gemma2", "int8"), *MORE],
)
def test_the_forward_pass_reads_what_compression_stores(name, weights, seed):
    """Bit for bit. Embedding, norms, routers and adapters are the same arrays as before."""
    cfg = config(name, {}, weights)
    _, values = placed(cfg, seed)
    expected = dict(flatten(stored(cfg, jax.device_get(values))))
    compiled = jax.jit(lambda values: qat.round_params(cfg.model, cfg.train.rounding, values))(values)
    changed = 0
    for found in (compiled, qat.round_arrays(cfg.model, cfg.train.rounding, values)):
        for path, value in flatten(found).items():
            np.testing.assert_array_equal(np.asarray(value), np.asarray(expected[path]), path)
            changed += not np.array_equal(np.asarray(value), np.asarray(flatten(values)[path]))
    matrices = Walk.of(cfg.model.base, Context()).matrices
    assert changed == 2 * len(matrices)
    assert all(adapters.A not in path and "router" not in path for path in matrices)


@pytest.mark.random
@pytest.mark.parametrize("name", [pytest.param("llama3", marks=pytest.mark.matrix), "lora"])
def test_gradients_are_those_at_the_rounded_matrices(name, seed):
    cfg = config(name, {})
    ctx, values = placed(cfg, seed)
    batch = test_meshes.random_batch(seed, False, cfg.model)
    plain = replace(cfg, train=replace(cfg.train, qat="none"))
    found = jax.jit(make_gradients(cfg, ctx))(values, batch)
    rounded = jax.tree.map(np.asarray, stored(cfg, jax.device_get(values)))
    expected = jax.jit(make_gradients(plain, ctx))(rounded, batch)
    other = jax.jit(make_gradients(plain, ctx))(values, batch)
    assert found[0] == pytest.approx(float(expected[0]), rel=1e-6)  # the same sums in another program
    for (path, a), b, c in zip(
        flatten(found[1]).items(), *(flatten(g[1]).values() for g in (expected, other)), strict=True
    ):
        assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b), path
        assert np.linalg.norm(a - c) >= 1e-3 * np.linalg.norm(c), path


@pytest.mark.random
def test_evaluation_uses_rounded_matrices(seed):
    """Also those of averages, of which an optimizer's state has the trained part."""
    cfg = config("softmax", {})
    _, values = placed(cfg, seed)
    halves = jax.tree.map(lambda a: a / 2, values)
    plain = TrainState(*[jax.numpy.zeros(())] * 4, params=values, opt_state=())
    averaged = replace(plain, opt_state=AverageState(jax.numpy.zeros(()), halves, ()))
    for state, used in ((plain, values), (averaged, halves)):
        expected = qat.round_arrays(cfg.model, cfg.train.rounding, used)
        for path, found in flatten(evaluated_params(Recipe.of(cfg), state)).items():
            np.testing.assert_array_equal(np.asarray(found), np.asarray(flatten(expected)[path]), path)
        assert not np.array_equal(expected["layers"]["moe"]["w_up"], used["layers"]["moe"]["w_up"])


@pytest.mark.random
@pytest.mark.parametrize(("name", "mesh", "how"), [MESHES[0], *SLOW])
def test_scales_are_those_of_one_device(name, mesh, how, seed):
    """Bit for bit, also where a group of inputs is on two devices; and the arrays are sharded as before."""
    one, other = config(name, {}), config(name, mesh)
    (_, values), (_, split) = placed(one, seed), placed(other, seed)
    expected, found = (
        flatten(qat.round_arrays(one.model, one.train.rounding, values)),
        flatten(qat.round_arrays(other.model, other.train.rounding, split)),
    )
    for path, before in flatten(split).items():
        np.testing.assert_array_equal(np.asarray(found[path]), np.asarray(expected[path]), path)
        assert found[path].sharding.is_equivalent_to(before.sharding, before.ndim), path


@pytest.mark.random
@pytest.mark.matrix
@pytest.mark.parametrize(("name", "mesh", "how"), MESHES)
def test_gradients_on_a_mesh_are_those_of_one_device(name, mesh, how, seed):
    kept = {"packing": how.get("packing", False)}
    one, other = config(name, {}, **kept), config(name, mesh, **how)
    errors = test_meshes.errors(name, test_meshes.gradients(one, seed), test_meshes.gradients(other, seed))
    assert max(errors) < 1e-5  # float32 sums in another order; a group with two scales is off by 1e-2


@pytest.mark.slow
@pytest.mark.random
def test_gradients_in_bfloat16_are_those_of_float32(seed):
    """The bound is that of `test_precision` for whole models. Rounded matrices are cast as any others are."""
    found = []
    for dtype in ("float32", "bfloat16"):
        cfg = config("llama3", {}, dtype=dtype)
        ctx, values = placed(cfg, seed)
        batch = test_meshes.random_batch(seed, False, cfg.model)
        found.append(flatten(jax.jit(make_gradients(cfg, ctx))(values, batch)[1]))
    for path, exact in found[0].items():
        apart = np.linalg.norm(np.asarray(found[1][path] - exact, np.float64)) / np.linalg.norm(np.asarray(exact))
        assert found[1][path].dtype == np.float32
        assert apart < 0.03, path


def test_the_plan_counts_the_rounded_copy():
    """Each device has a copy of its own part of the matrices of layers, float32."""
    cfg = config("llama3", {"fsdp": 2, "tensor": 2})
    ctx = make_context(cfg, make_mesh(cfg.mesh, test_meshes.BATCH, jax.devices()[:4]))
    found = estimate.memory(Job(cfg, ctx), *estimate.abstract_inputs(Job(cfg, ctx)))
    matrices = Walk.of(cfg.model, ctx).matrices.values()
    assert found["rounded matrices, float32"] == 4 * cfg.model.num_layers * sum(p.size for p in matrices) / 4
    plain = replace(cfg, train=replace(cfg.train, qat="none"))
    assert {*found} - {*estimate.memory(Job(plain, ctx), *estimate.abstract_inputs(Job(plain, ctx)))} == {
        "rounded matrices, float32"
    }


FLAGS = """--model.num_layers=2 --model.d_model=64 --model.num_heads=4 --model.num_kv_heads=2 --model.d_ff=96
    --data.seq_len=32 --data.batch_size=4 --data.source=path --train.steps=4 --train.eval_every=4 --train.eval_steps=2
    --train.ngram_baseline=false --sample.prompts=[] --optim.warmup_steps=1 --optim.lr=0.01"""


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("weights", "more"),
    [("int4", ["--optim.ema=0.9"]), ("int8", ["--train.dtype=bfloat16"]), ("fp8", [])],
)
def test_storing_a_trained_run_loses_nothing(weights, more, tmp_path, monkeypatch):
    """The held-out loss of the log, of the loaded run, and of the run after `compress quantize` are the same bits."""
    one, devices = jax.devices()[:1], jax.devices
    monkeypatch.setattr(jax, "devices", lambda *a: one if not a else devices(*a))
    words = np.random.default_rng(0).integers(0, 100, 3000)
    (tmp_path / "text.txt").write_text(" ".join(f"word{n}" for n in words))
    group = json.dumps(FORMATS[weights])
    run, out = tmp_path / "run", tmp_path / "out"
    data = [f"--data.path={tmp_path / 'text.txt'}", f"--run.dir={run}"]
    execute(["train", *FLAGS.split(), *data, f"--train.qat={weights}", f"--train.qat_group={group}", *more])
    execute(["compress", "quantize", str(run), str(out), f"--weights={weights}", f"--group={group}", "--method=rtn"])
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (logged,) = [record["eval_loss"] for record in records if "eval_loss" in record]
    trained, converted = js.load(run), js.load(out)
    assert trained.evaluate().loss == converted.evaluate().loss == logged
    for (path, a), b in zip(flatten(trained.params).items(), flatten(converted.params).values(), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), path)
    assert converted.config.train.qat == "none"
    # A run that continues gets the master weights, which are between the codes.
    execute(["train", *FLAGS.split(), data[0], f"--run.dir={tmp_path / 'next'}", f"--run.init_from={run}",
             "--train.steps=1", "--optim.lr=0"])  # fmt: skip
    continued = np.asarray(js.load(tmp_path / "next").params["layers"]["mlp"]["w_up"])
    assert (continued != np.asarray(trained.params["layers"]["mlp"]["w_up"])).mean() > 0.5
