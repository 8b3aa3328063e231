"""The mesh does not change texts: on every mesh, greedy and sampled tokens equal those of one device.

Greedy ones also with matrices of 8 and 4 bits, rounded as `jaxstack compress quantize` does.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_generate import GREEDY, PROMPTS, SAMPLED, on_mesh

from jaxstack.common.tree import PyTree
from jaxstack.compress import quantize
from jaxstack.config import SampleConfig
from jaxstack.config.scheme import Scheme
from jaxstack.generate import decode
from jaxstack.models.blocks import Stack
from jaxstack.models.context import Context

BEAMS = replace(GREEDY, tokens=6, beams=3)
ROUNDED = {"int8": Scheme(8), "int4": Scheme(4, 16)}
Case = tuple[str, dict[str, int]]
QUICK: list[Case] = [("llama3", {"pipe": 2, "tensor": 2})]
MATRIX: list[Case] = [
    ("softmax", {"expert": 2}),
    ("llama3", {"tensor": 4, "data": 2}),
    ("llama3", {"data": 2, "fsdp": 2, "tensor": 2}),
    ("gemma2", {"fsdp": 4, "tensor": 2}),
    ("gpt2", {"pipe": 2, "fsdp": 4}),
    ("gpt2", {"tensor": 8}),
    ("llama3", {"pipe": 2, "data": 2, "tensor": 2}),
    ("tall", {"pipe": 4}),
    ("deep", {"pipe": 2, "data": 2}),
    ("softmax", {"expert": 4, "tensor": 2}),
    ("softmax", {"expert": 8}),
    ("softmax", {"pipe": 2, "expert": 2, "tensor": 2}),
    ("sigmoid", {"expert": 4, "data": 2}),
    ("sigmoid", {"pipe": 2, "expert": 2}),
    ("domain", {"expert": 2, "fsdp": 2}),
]
"""Tensor, pipe and expert meshes. `deep` has windows and two chunks a stage, `tall` six layers on four stages."""


@cache
def alone(name: str, sample: SampleConfig) -> Any:
    """Returns the parameters and the texts of one device, by the format of the matrices."""
    cfg, values, options = on_mesh(name, {})
    # With large embeddings, every token of a model with tied ones repeats itself.
    values = {**values, "embedding": jax.tree.map(lambda a: 0.1 * a, values["embedding"])}
    run = decode.make_generate(cfg, sample, stop=(9,), **options)
    formats = {"float": values}
    walk = quantize.Walk.of(cfg, Context())
    for kind, scheme in ROUNDED.items():
        layers = [*quantize.quantize(walk, values, [], quantize.Settings(scheme, "rtn"))]
        formats[kind] = quantize.join(cfg, values, layers)
    return {kind: (jax.device_get(one), run(one, PROMPTS, 3)) for kind, one in formats.items()}


def sharded(values: PyTree, like: PyTree, ctx: Context) -> PyTree:
    """Returns parameters of one device as a mesh stores them."""
    if ctx.layout.stages is not None:
        order = np.maximum(ctx.layout.stages.layer_of_slot, 0)
        values = {**values, "layers": jax.tree.map(lambda a: a[order], values["layers"])}
    return jax.tree.map(lambda a, b: jax.device_put(a, b.sharding), values, like)


def marked(cases: list[Case], *marks: Any) -> list[Any]:
    return [pytest.param(*case, marks=marks, id=f"{case[0]} {case[1]}") for case in cases]


@pytest.mark.parametrize(("name", "mesh"), marked(QUICK) + marked(MATRIX, pytest.mark.matrix))
def test_greedy_texts_are_those_of_one_device(name, mesh):
    cfg, placed, options = on_mesh(name, mesh)
    run = decode.make_generate(cfg, GREEDY, stop=(9,), **options)
    texts = []
    for kind, (values, expected) in alone(name, GREEDY).items():
        assert run(sharded(values, placed, options["ctx"]), PROMPTS, 3) == expected, kind
        texts.append(str(expected))
    assert len({*texts}) > 1, "rounding changes a text"


SAMPLES: list[tuple[str, dict[str, int], SampleConfig]] = [
    ("llama3", {"data": 2, "fsdp": 2, "tensor": 2}, SAMPLED),
    ("gpt2", {"pipe": 2, "tensor": 2}, BEAMS),
    ("softmax", {"expert": 4, "tensor": 2}, SAMPLED),
    ("llama3", {"pipe": 2, "data": 2, "tensor": 2}, SAMPLED),
    ("capacity", {"expert": 2, "fsdp": 2}, SAMPLED),
    ("sigmoid", {"expert": 4, "data": 2}, replace(GREEDY, beams=3)),
    ("domain", {"expert": 2, "data": 2}, SAMPLED),
    ("gpt2", {"pipe": 2, "fsdp": 4}, SAMPLED),
    ("softmax", {"pipe": 2, "expert": 2}, SAMPLED),
    ("llama3", {"context": 2, "data": 2}, SAMPLED),
    ("deep", {"pipe": 2, "data": 2}, SAMPLED),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "mesh", "sample"), SAMPLES)
def test_sampled_texts_and_beams_are_those_of_one_device(name, mesh, sample):
    def texts(mesh: dict[str, int]) -> list[list[int]]:
        cfg, values, options = on_mesh(name, mesh)
        return decode.generate(cfg, values, PROMPTS, sample, seed=3, stop=(9,), **options)

    assert texts(mesh) == texts({})


MANY = [[i, *range(i)] for i in range(1, 8)]


@pytest.mark.matrix
@pytest.mark.parametrize(("mesh", "rows"), [({"pipe": 4}, 7), ({"pipe": 2}, 1), ({"pipe": 4, "data": 2}, 3)], ids=str)
def test_any_number_of_prompts_passes_the_stages_in_turn(mesh, rows):
    """More prompts than stages, one, and fewer; some devices have rows without a prompt."""
    sample = replace(SAMPLED, tokens=8)
    cfg, placed, options = on_mesh("tall", mesh)
    values, here = alone("tall", GREEDY)["float"][0], on_mesh("tall", {})[2]
    expected = decode.generate(cfg, values, MANY[:rows], sample, seed=1, stop=(9,), **here)
    run = sharded(values, placed, options["ctx"])
    assert decode.generate(cfg, run, MANY[:rows], sample, seed=1, stop=(9,), **options) == expected


@pytest.mark.matrix
def test_stages_run_their_layers_on_the_rows_of_a_group_and_never_for_nothing(monkeypatch):
    """Four rows on two stages of one layer: 11 tokens after the first, of two groups of two rows, in each layer."""
    ran, run_layer = [], Stack.run_layer

    def counted(stack: Stack, cfg: Any, ctx: Any, params: Any, x: jax.Array, *others: Any, **how: Any) -> Any:
        if x.shape[1] == 1:  # not the prompts
            jax.debug.callback(lambda rows: ran.append(int(rows)), jnp.int32(x.shape[0]))
        return run_layer(stack, cfg, ctx, params, x, *others, **how)

    monkeypatch.setattr(Stack, "run_layer", counted)
    cfg, values, options = on_mesh("llama3", {"pipe": 2})
    decode.generate(cfg, values, MANY[:4], GREEDY, **options)
    jax.effects_barrier()
    assert ran == [2] * (11 * 2 * 2)
