"""Multi-token prediction: its loss and gradients by hand, its edges, and the meshes it runs on."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES

from jaxstack import families
from jaxstack.config import (
    Config,
    DataConfig,
    ExpertLayers,
    LatentConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    PredictionConfig,
    SampleConfig,
    TrainConfig,
)
from jaxstack.families.context import make_context
from jaxstack.families.token_prediction import trunk_params
from jaxstack.generate.decode import generate
from jaxstack.generate.engine import Engine
from jaxstack.models import params
from jaxstack.models.blocks import scan_stack, split_steps
from jaxstack.models.context import Context
from jaxstack.sharding import make_mesh
from jaxstack.training.assemble import make_eval_step, make_gradients

LAMBDA = 0.3
LLAMA = dataclasses.replace(FAMILIES["llama3"], mtp=PredictionConfig(2, LAMBDA))
DEEPSEEK = dataclasses.replace(
    LLAMA,
    num_layers=3,
    num_kv_heads=4,
    head_dim=16,
    latent=LatentConfig(kv_rank=12, rotary_dim=8, value_dim=6),
    moe=MoEConfig(
        num_experts=4, d_ff=16, router="sigmoid", aux_loss_weight=0.0, z_loss_weight=0.1, layers=ExpertLayers(first=1)
    ),
)
MODELS = {
    "llama": dataclasses.replace(LLAMA, num_heads=4, vocab_size=64),
    "deepseek": dataclasses.replace(DEEPSEEK, vocab_size=64),
}
B, S = 4, 12


def values_of(cfg: ModelConfig, seed: int = 3) -> params.Params:
    """Returns parameters whose norms and gradients are of a size that a wrong term would change."""
    drawn = params.init(jax.random.key(seed), families.spec(dataclasses.replace(cfg, init_std=0.2)))
    return jax.tree.map(lambda a: a + 0.1 * jnp.cos(jnp.arange(a.size).reshape(a.shape) * 1.0), drawn)


def packed_batch(rng, rows: int = B, length: int = S) -> dict[str, np.ndarray]:
    """Returns rows of three documents with tokens that are not learned; the last one is padding in every second row."""
    ids = rng.integers(0, 61, (rows, length + 1)).astype(np.int32)
    ends = np.stack([np.sort(rng.choice(np.arange(2, length), 2, replace=False)) for _ in range(rows)])
    segments = (np.arange(length) >= ends[:, :1]).astype(np.int32) + (np.arange(length) >= ends[:, 1:])
    starts = np.where(segments == 0, 0, np.where(segments == 1, ends[:, :1], ends[:, 1:]))
    padding = (segments == 2) & (np.arange(rows) % 2 == 0)[:, None]
    weights = np.where(padding, 0, rng.choice([0.0, 0.5, 1.0], (rows, length))).astype(np.float32)
    return {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "loss_weights": weights,
        "segment_ids": segments,
        "positions": (np.arange(length) - starts).astype(np.int32),
    }


def rms(x, scale, eps):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def predictions(batch, depth: int) -> list[list[tuple[int, int, int]]]:
    """Returns for each module the row, the place and the place of the predicted target of each prediction.

    Places are within documents: those of a row that have one number in `segment_ids`.
    """
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(depth)]
    for row, segments in enumerate(batch["segment_ids"]):
        for document in np.unique(segments):
            places = np.flatnonzero(segments == document)
            for k in range(1, depth + 1):
                found[k - 1] += [(row, places[i], places[i + k]) for i in range(len(places) - k)]
    return found


def by_hand(cfg: ModelConfig, values, batch):
    """Returns the mean loss of the modules: equations 21 to 25 of DeepSeek-V3's report."""
    plain = dataclasses.replace(cfg, mtp=PredictionConfig())
    trunk = {name: group for name, group in values.items() if name != "mtp"}
    h, _ = families.of(plain).hidden_states(plain, trunk, batch)
    table = values["embedding"]["tokens"]
    head = table.T if cfg.tied_embeddings else values["head"]["w"]
    total = 0.0
    for k, places in enumerate(predictions(batch, cfg.mtp.depth), 1):
        module = jax.tree.map(lambda a, k=k: a[k - 1], values["mtp"])
        row, at, of = map(np.asarray, zip(*places, strict=True))
        reads = np.zeros_like(batch["targets"])  # where nothing is predicted, nothing is read that counts
        for r, i, j in places:
            reads[r, i] = batch["targets"][r, j - 1]
        e = rms(table[reads], module["join"]["token_norm"]["scale"], cfg.norm_eps)
        h = rms(h, module["join"]["hidden_norm"]["scale"], cfg.norm_eps)
        h = layer_of(plain, module, jnp.concatenate([e, h], -1) @ module["join"]["w"], batch)
        h = rms(h, module["module_norm"]["scale"], cfg.norm_eps)
        log_p = jax.nn.log_softmax(h @ head)
        weights = batch["loss_weights"][row, of]
        total -= (weights * log_p[row, at, batch["targets"][row, of]]).sum() / max(weights.sum(), 1)
    return total / cfg.mtp.depth


def layer_of(cfg: ModelConfig, module, h, batch):
    """Runs the layer of a module: as the last stack of the model runs a layer, with these vectors [B, S, D] for x."""
    family = families.of(cfg)
    stack = dataclasses.replace([*family.layers(cfg).values()][-1], depth=1, enter=None)
    layer = {name: jax.tree.map(lambda a: a[None], module[name]) for name in stack.spec}
    inputs = family.make_layer_inputs(cfg, batch, Context())
    return scan_stack(cfg, Context(), stack, split_steps(stack, layer), h, inputs)[0]


def gradients_of(model: ModelConfig, values, batch, accum: int = 1, **mesh):
    rows, length = batch["tokens"].shape
    cfg = Config(
        model=model,
        data=DataConfig(seq_len=length, batch_size=rows, packing=True),
        train=TrainConfig(steps=3, grad_accum=accum),
        mesh=MeshConfig(**{"data": 1, **mesh}),
    )
    devices = math.prod(size for axis, size in mesh.items() if isinstance(size, int) and not isinstance(size, bool))
    ctx = make_context(cfg, make_mesh(cfg.mesh, rows, jax.devices()[:devices]))
    return jax.jit(make_gradients(cfg, ctx))(values, batch)


@pytest.mark.parametrize("name", ["tied", "deepseek"])
def test_loss_and_gradients_are_those_of_the_paper(name, rng):
    """Packed rows, weights of tokens and two modules; the reference takes one document at a time."""
    cfg = {"tied": dataclasses.replace(LLAMA, tied_embeddings=True), "deepseek": DEEPSEEK}[name]
    cfg = dataclasses.replace(cfg, moe=dataclasses.replace(cfg.moe, z_loss_weight=0.0))
    values, batch = values_of(cfg), packed_batch(rng)
    loss, grads, sums = gradients_of(cfg, values, batch)
    figures = families.of(cfg).extras(cfg).metrics(sums)
    plain = dataclasses.replace(cfg, mtp=PredictionConfig())
    trunk = {group: tree for group, tree in values.items() if group != "mtp"}
    without, plain_grads, _ = gradients_of(plain, trunk, batch)
    wanted, of_modules = jax.jit(jax.value_and_grad(lambda values: by_hand(cfg, values, batch)))(values)
    assert float(loss) == pytest.approx(float(without), rel=1e-6)
    assert float(figures["mtp_loss"]) == pytest.approx(float(wanted), rel=1e-5)
    want = jax.tree.map(lambda a: LAMBDA * a, of_modules)
    want |= {group: jax.tree.map(jnp.add, want[group], plain_grads[group]) for group in plain_grads}
    for (path, a), b in zip(jax.tree.leaves_with_path(want), jax.tree.leaves(grads), strict=True):
        scale = max(float(jnp.abs(a).max()), 1e-3)
        np.testing.assert_allclose(b / scale, a / scale, atol=2e-5, err_msg=jax.tree_util.keystr(path))


MESHES = [
    ("llama", {"data": 2, "fsdp": 2, "tensor": 2}, 2),
    ("llama", {"fsdp": 2, "context": 2, "tensor": 2, "sequence_parallel": False}, 1),
    ("deepseek", {"fsdp": 2, "expert": 2, "tensor": 2}, 2),
    ("llama", {"context": 4}, 2),
    ("llama", {"fsdp": 2, "context": 2, "tensor": 2, "partitioner": "auto"}, 1),
    ("deepseek", {"data": 2, "expert": 2, "context": 2}, 1),
    ("deepseek", {"fsdp": 2, "tensor": 2, "partitioner": "auto"}, 2),
]


@functools.cache
def on_one_device(name: str):
    """Returns the results of a model that the meshes share, and its parameters and batch."""
    cfg = MODELS[name]
    values, batch = values_of(cfg), packed_batch(np.random.default_rng(5), 8, 16)
    return values, batch, gradients_of(cfg, values, batch)


CASES = [pytest.param(*case, marks=pytest.mark.slow if i else ()) for i, case in enumerate(MESHES)]


@pytest.mark.parametrize(("name", "mesh", "accum"), CASES)
def test_every_mesh_and_accumulation_gives_the_same(name, mesh, accum):
    """Packed rows: a token's successor may be on another device, and microbatches have different numbers of tokens."""
    values, batch, (loss, grads, sums) = on_one_device(name)
    found, found_grads, found_sums = gradients_of(MODELS[name], values, batch, accum, **mesh)
    assert float(found) == pytest.approx(float(loss), rel=1e-5)
    for figure in ("mtp_loss", "mtp_tokens"):
        np.testing.assert_allclose(found_sums[figure], sums[figure], rtol=1e-5)
    for (path, a), b in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(found_grads), strict=True):
        scale = max(float(np.abs(a).max()), 1e-3)
        np.testing.assert_allclose(b / scale, a / scale, atol=5e-5, err_msg=jax.tree_util.keystr(path))


def test_rows_without_a_prediction_change_nothing(rng):
    """Documents of one token and prompts have no token after the next one. Then the loss is 0, and not NaN."""
    cfg = MODELS["llama"]
    values, batch = values_of(cfg), packed_batch(rng)
    batch["segment_ids"] = np.broadcast_to(np.arange(S, dtype=np.int32), (B, S))
    batch["positions"] = np.zeros((B, S), np.int32)
    loss, grads, sums = gradients_of(cfg, values, batch, accum=2)
    assert np.isfinite(float(loss))
    assert float(families.of(cfg).extras(cfg).metrics(sums)["mtp_loss"]) == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(grads["mtp"]))


def test_texts_scores_and_evaluations_are_those_of_the_model_without_modules(rng):
    cfg = MODELS["deepseek"]
    plain = dataclasses.replace(cfg, mtp=PredictionConfig())
    values, batch = values_of(cfg), packed_batch(rng)
    trunk = trunk_params(values)
    sample = SampleConfig(tokens=5, temperature=0.0)
    prompts = [[3, 1, 4], [1, 5]]
    assert generate(cfg, values, prompts, sample) == generate(plain, trunk, prompts, sample)
    engines = [Engine.create(*model) for model in ((cfg, values), (plain, trunk))]
    assert engines[0].params.keys() == trunk.keys()
    assert engines[0].cfg.mtp.depth == 0
    found = [
        jax.jit(make_eval_step(model, Context()))(params, batch).losses["loss"]
        for model, params in ((cfg, values), (plain, trunk))
    ]
    assert float(found[0]) == pytest.approx(float(found[1]), rel=1e-6)
