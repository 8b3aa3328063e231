"""A padded vocabulary changes nothing: loss, updates, checkpoints and texts are those of the model without padding."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest
import test_meshes as meshes
from families import FAMILIES

from jaxstack import families
from jaxstack.common.tree import flatten
from jaxstack.config import Config, MeshConfig, OptimConfig, PipelineConfig, SampleConfig, TrainConfig
from jaxstack.families import flops
from jaxstack.families.context import make_context
from jaxstack.generate import decode
from jaxstack.models import params
from jaxstack.models.params import Param
from jaxstack.sharding import make_mesh
from jaxstack.training import assemble, optimizer
from jaxstack.training.services.checkpoint_layout import checkpoint_layout
from jaxstack.training.state import Recipe, abstract_state, make_state

SLOW = pytest.mark.matrix
CASES = [  # family, mesh, implementation of the cross-entropy, dtype, optimizer
    pytest.param("gemma2", {"tensor": 4}, "chunked", "float32", "adamw", marks=SLOW),  # tied, with a softcap
    ("llama3", {}, "xla", "bfloat16", "adafactor"),  # a head of its own
    pytest.param("llama3", {"fsdp": 2, "tensor": 4}, "xla", "float32", "adafactor", marks=SLOW),
    pytest.param("gemma2", {}, "chunked", "bfloat16", "lion", marks=SLOW),
    pytest.param("gptj", {"fsdp": 2, "tensor": 4}, "chunked", "float32", "adamw", marks=SLOW),  # a head with a bias
    pytest.param("llama3", {"pipe": 2, "tensor": 2}, "chunked", "float32", "muon", marks=SLOW),
    pytest.param("gemma2", {"pipe": 2, "tensor": 2}, "xla", "float32", "adamw", marks=SLOW),
]


def first_state(family, mesh, kernel, dtype, optim, padding, layers=2):
    """Returns configuration, context, abstract state and first state of a run. Adafactor factors 130 times 128."""
    staged = "pipe" in mesh  # the first stage has layers 0 and 2
    cfg = Config(
        model=replace(meshes.MODELS[family], vocab_size=130, d_model=128, pad_vocab_to=padding, num_layers=layers),
        data=meshes.config(family, {}).data,
        train=TrainConfig(dtype=dtype),
        optim=OptimConfig(name=optim, lr=0.01, warmup_steps=0, weight_decay=0.1),
        mesh=MeshConfig(**{"data": 1} | mesh),
        pipeline=PipelineConfig(microbatches=4, schedule="interleaved_1f1b", chunks=2) if staged else PipelineConfig(),
    )  # fmt: skip
    devices = jax.devices()[: math.prod(cfg.mesh.sizes.values())]
    ctx = make_context(cfg, make_mesh(cfg.mesh, meshes.BATCH, devices))
    ctx = replace(ctx, ops=replace(ctx.ops, cross_entropy=kernel))
    abstract = abstract_state(Recipe.of(cfg), ctx)
    return cfg, ctx, abstract, make_state(Recipe.of(cfg), ctx, abstract)


@pytest.mark.parametrize(("family", "mesh", "kernel", "dtype", "optim"), CASES, ids=str)
def test_a_step_is_that_without_padding(family, mesh, kernel, dtype, optim, seed):
    """On four shards of 192 rows, the third has ids and padding, and the last has padding alone."""
    layers = (4 if "pipe" in mesh else 1) * len(meshes.MODELS[family].windows)
    cfg, ctx, abstract, state = first_state(family, mesh, kernel, dtype, optim, 192, layers)
    plain, alone, _, expected = first_state(family, {}, kernel, dtype, optim, None, layers)
    layout = checkpoint_layout(Recipe.of(cfg), ctx, abstract)
    # The same random numbers, but XLA may compile their logarithms in another way: one rounding.
    assert_close(layout.pack(state), expected, 1e-7)
    batch = meshes.random_batch(seed, False, cfg.model)
    state, metrics = assemble.jit_train_step(cfg, ctx, abstract)(
        state, jax.device_put(batch, ctx.layout.sharding(ctx.layout.batch))
    )
    expected, metrics_of_expected = jax.jit(assemble.make_train_step(plain, alone))(expected, batch)
    for name in ("loss", "grad_norm"):  # the sums of a softmax in another order, in float32
        assert float(metrics[name]) == pytest.approx(float(metrics_of_expected[name]), rel=1e-5), name
    packed = layout.pack(state)
    # What a first update makes of gradients that differ by rounding: it divides them by their own size.
    assert_close(packed, expected, 1e-3 if dtype == "float32" else 1e-2)
    assert {path: (a.shape, a.sharding) for path, a in flatten(packed).items()} == {
        path: (a.shape, a.sharding) for path, a in flatten(layout.abstract).items()
    }
    assert_close(layout.unpack(packed), state, 0)  # so what was cut off were zeros


def assert_close(found, expected, tolerance):
    """Compares arrays of equal shapes by the relative norm of their difference."""
    found, expected = flatten(jax.device_get(found)), flatten(jax.device_get(expected))
    assert {path: a.shape for path, a in found.items()} == {path: a.shape for path, a in expected.items()}
    for path, a in found.items():
        b = np.asarray(expected[path], np.float64)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), path


@pytest.mark.parametrize("family", [pytest.param("gemma2", marks=SLOW), pytest.param("llama3", marks=SLOW)])
def test_texts_and_logits_are_those_without_padding(family, rng):
    """A temperature of 50 makes all ids about equally likely, so that padding would be chosen soon."""
    plain = FAMILIES[family]
    cfg = replace(plain, pad_vocab_to=96)
    values = jax.tree.map(np.asarray, params.init(jax.random.key(0), families.spec(plain)))
    padded = params.init(jax.random.key(0), families.spec(cfg))
    tokens = rng.integers(0, 61, (2, 9))
    logits, expected = (families.forward(c, v, tokens)[0] for c, v in ((cfg, padded), (plain, values)))
    np.testing.assert_allclose(logits[..., :61], expected, rtol=1e-5, atol=1e-6)
    probabilities = jax.nn.softmax(logits)
    assert not probabilities[..., 61:].any()
    assert np.isfinite(logits * 0).all()
    with pytest.raises(ValueError, match=r"contain the id 61, but model\.vocab_size=61"):
        families.forward(cfg, padded, tokens.clip(61))
    # The softmax sees 61 ids, so the same random numbers choose the same ones.
    for sample in (SampleConfig(tokens=9, temperature=50.0), SampleConfig(tokens=5, temperature=0, beams=3)):
        texts = [decode.generate(c, v, [[1, 2], [3]], sample) for c, v in ((cfg, padded), (plain, values))]
        assert texts[0] == texts[1]
    uncached = [decode.generate_uncached(c, v, [[1]], SampleConfig(tokens=5, temperature=50.0), window=4)
                for c, v in ((cfg, padded), (plain, values))]  # fmt: skip
    assert uncached[0] == uncached[1]
    assert params.count(families.spec(cfg)) == params.count(families.spec(plain))
    assert flops.flops_per_token(cfg, 32) == flops.flops_per_token(plain, 32)


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor", "lion", "sgd"])
def test_zeros_at_the_end_do_not_change_an_update(name, rng):
    """The gradients are far from normal, so that Adafactor clips the updates."""
    plain = {"table": Param((130, 128), ("vocab", "embed"), "table"), "head": Param((128, 130), ("embed", "vocab"))}
    padded = {"table": params.pad(plain["table"], 0, 192), "head": params.pad(plain["head"], 1, 192)}
    settings = OptimConfig(name=name, warmup_steps=0, weight_decay=0.1)
    draws = [params.map_spec(lambda p: rng.normal(size=p.shape).astype(np.float32) ** 5, plain) for _ in range(3)]

    def updates(spec):
        def fill(tree):
            return params.map_spec(
                lambda p, a: np.pad(a, [(0, n - m) for n, m in zip(p.shape, a.shape, strict=True)]), spec, tree
            )

        transform = optimizer.optimizer(settings, 9, spec)
        values, found = fill(draws[0]), []
        state = transform.init(values)
        for grads in draws[1:]:
            update, state = transform.update(fill(grads), state, values)
            found.append(update)
        return found

    for got, expected in zip(updates(padded), updates(plain), strict=True):
        table, head = np.asarray(got["table"]), np.asarray(got["head"])
        assert not table[130:].any()
        assert not head[:, 130:].any()
        # Float32 means of as many numbers in another order.
        np.testing.assert_allclose(table[:130], expected["table"], rtol=1e-4, atol=1e-9)
        np.testing.assert_allclose(head[:, :130], expected["head"], rtol=1e-4, atol=1e-9)
