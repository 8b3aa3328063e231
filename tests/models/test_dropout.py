"""No two dropout masks of a step are equal: not of two sites, two tokens, two microbatches or two streams."""

import dataclasses
import functools
import itertools
import re
import zlib
from pathlib import Path

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_meshes as meshes
from test_family import TWO_STACKS

from jaxstack import families as model_families
from jaxstack.config import ConfigError
from jaxstack.models import layers, params
from jaxstack.models.context import Context
from jaxstack.training.step import dropout_key

PACKAGE = Path(layers.__file__).parents[1]

SITES = {  # of a microbatch: those of the embeddings, and of the layers
    "llama3": 1 + 2 * 2,
    "modernbert_cut": 1 + 2 * 5,
    "bert_pairs": 1 + 2 * 2,
    "t5": 2 + 2 * 3 + 3 * 2,
    "switch_2": 2 + 2 * 4 + 3 * 2,
    "coca": 2 + 2 * 3 + 2 * 2 + 3 * 2,
    "branches": 2 + 2 * 2 * 3,
    "two_stacks": 1 + 2 * 2 + 2 * 2,
}
WITHOUT_DROPOUT = {"diffusion"}


RATE = 0.5


def masks_of_step(cfg, batch, monkeypatch) -> list[np.ndarray]:
    """Returns the mask [B, S, D] of each dropout site, in two microbatches of a step, one after the other."""
    drop, drawn = layers.dropout, []

    def recorded(key, rate, x, dropout_ids):
        if key is not None:
            assert rate == RATE
            jax.debug.callback(lambda *one: drawn.append((*one, x.shape)), jax.random.key_data(key), dropout_ids)
        return x

    monkeypatch.setattr(layers, "dropout", recorded)
    model, half = model_families.of(cfg.model), cfg.data.batch_size // 2
    values = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), params.abstract(model.spec(cfg.model)))

    @jax.jit
    def hidden_states(values, micro):
        return model.hidden_states(
            cfg.model, values, micro, Context(), dropout_key=dropout_key(cfg.model, cfg.run.seed, 3)
        )

    for rows in (np.arange(half), np.arange(half, 2 * half)):
        micro = {name: array[rows] for name, array in batch.items()} | {"rows": rows.astype(np.int32)}
        hidden_states(values, micro)
    jax.effects_barrier()

    @functools.partial(jax.jit, static_argnums=2)
    def mask(key, dropout_ids, shape):
        return drop(jax.random.wrap_key_data(key), RATE, jnp.ones(shape), dropout_ids) != 0

    return [np.asarray(mask(*one)) for one in drawn]


@pytest.mark.random
@pytest.mark.parametrize("name", SITES)
def test_no_two_masks_of_a_step_are_equal(name, seed, monkeypatch):
    """The masks of all tokens, at all sites of both microbatches, differ from each other."""
    if name == "two_stacks":  # a family of a user, whose stacks share one function
        monkeypatch.setitem(model_families.FAMILIES, "decoder", TWO_STACKS)
    cfg = meshes.config("llama3" if name == "two_stacks" else name, {}, dropout=RATE)
    # With 128 units, two independent masks are equal with a probability of 2^-128.
    cfg = dataclasses.replace(
        cfg, model=dataclasses.replace(cfg.model, d_model=128), data=dataclasses.replace(cfg.data, batch_size=2)
    )
    batch = meshes.random_batch(seed, False, cfg.model, rows=2)
    if name == "two_stacks":
        batch["gate_ids"] = np.zeros_like(batch["tokens"])
    masks = masks_of_step(cfg, batch, monkeypatch)
    assert len(masks) == 2 * SITES[name]
    for one, other in itertools.combinations(masks, 2):
        if one.shape == other.shape:
            # A share of n independent elements has a standard deviation of 0.5 / sqrt(n); six of them are allowed.
            equal = float((one == other).mean())
            assert abs(equal - 0.5) < 3 / one.size**0.5
    of_tokens = [mask.tobytes() for site in masks for mask in site.reshape(-1, site.shape[-1])]
    repeated = len(of_tokens) - len(set(of_tokens))
    assert repeated == 0


def test_every_family_is_held_to_this():
    covered = SITES.keys() - {"two_stacks"}
    assert {meshes.MODELS[name].family for name in covered} | WITHOUT_DROPOUT == set(model_families.FAMILIES)
    for model in families.DIFFUSION.values():
        with pytest.raises(ConfigError, match=r"model.dropout=0.5"):
            meshes.config("dit", {}, dropout=0.5)
        with pytest.raises(AssertionError):
            model_families.of(model).make_layer_inputs(model, {"key": jax.random.key(0)}, Context())


def test_random_numbers_are_drawn_in_three_places():
    """Dropout, initial values, and those of large tables: another draw would need a test as above.

    Keys are folded by `params.random_key` alone, because `split(key)[i]` is `fold_in(key, i)`: beside each other on one
    key, they would give two draws one key.
    """
    uses = set()
    for room in ("kernels", "models", "moe", "pipeline", "sharding", "training"):
        for path in (PACKAGE / room).rglob("*.py"):
            uses |= {(path.name, name) for name in re.findall(r"jax\.random\.(\w+)\(", path.read_text())}
    uses -= {use for use in uses if use[1] in ("key", "key_data", "wrap_key_data")}
    assert uses == {
        ("layers.py", "bernoulli"), ("layers.py", "fold_in"), ("params.py", "fold_in"), ("params.py", "normal"),
        ("tables.py", "normal"),
    }  # fmt: skip
    key = jax.random.key(0)
    assert (jax.random.key_data(jax.random.split(key)[1]) == jax.random.key_data(jax.random.fold_in(key, 1))).all()


@pytest.mark.parametrize("name", meshes.MODELS)
def test_no_two_parameters_share_a_key(name):
    """The hashes of paths differ, and the key of dropout is none of theirs."""
    paths = [*params.flat_spec(model_families.spec(meshes.MODELS[name])), "dropout"]
    assert len({zlib.crc32(path.encode()) for path in paths}) == len(paths)


def test_the_keys_of_dropout_are_not_those_of_initial_values():
    """The key of step n would else be the key of a parameter whose path has the hash n."""
    cfg = meshes.config("llama3", {}, dropout=0.5)
    root = jax.random.key(cfg.run.seed)
    path = next(iter(params.flat_spec(model_families.spec(cfg.model))))
    ours = dropout_key(cfg.model, cfg.run.seed, np.uint32(zlib.crc32(path.encode())))
    assert (jax.random.key_data(ours) != jax.random.key_data(params.random_key(root, path))).any()
    assert dropout_key(meshes.config("llama3", {}).model, 0, 0) is None
