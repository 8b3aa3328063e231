"""`optim.keep_zeros` needs a source whose matrices have zeros; padding and slots without a layer do not count."""

import dataclasses

import jax
import numpy as np
import pytest
import test_meshes as meshes

from jaxstack import families
from jaxstack.families.context import make_context
from jaxstack.models import params
from jaxstack.sharding import make_mesh
from jaxstack.training.services.init_from import has_zeros


@pytest.mark.parametrize("stages", [1, 2])
def test_a_zero_of_a_matrix_is_found(stages):
    cfg = meshes.config("llama3", {"pipe": stages})
    model = dataclasses.replace(cfg.model, num_layers=3, pad_vocab_to=128, tied_embeddings=False)
    cfg = dataclasses.replace(cfg, model=model)
    ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.microbatch_size, jax.devices()[:stages]))
    spec = params.pad_to_slots(families.spec(cfg.model), ctx.layout.stages)
    values = jax.tree.map(np.array, jax.jit(lambda key: params.init(key, spec, ctx.layout.stages))(jax.random.key(0)))
    assert values["head"]["w"].shape[1] == 128
    assert not values["head"]["w"][:, 64:].any()
    if stages == 2:
        assert len(values["layers"]["mlp"]["w_up"]) == 4
    values["final_norm"]["scale"][0] = 0
    assert not has_zeros(cfg.model, ctx, values)
    values["layers"]["mlp"]["w_up"][1, 5, 7] = 0
    assert has_zeros(cfg.model, ctx, values)
