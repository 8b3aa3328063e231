"""Compares the bytes that devices send in a step, read from the compiled program, with the papers and the formula.

`pytest -rP tests/sharding/test_collectives.py` shows bytes per axis beside the formula.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.config import Config, DataConfig, MeshConfig, ModelConfig, MoEConfig, TrainConfig
from jaxstack.families.context import make_context
from jaxstack.models.context import Context
from jaxstack.moe import rounds
from jaxstack.planner import estimate, hlo, hlo_text
from jaxstack.planner.job import Job
from jaxstack.sharding import make_mesh
from jaxstack.training.assemble import make_gradients
from jaxstack.training.state import Recipe, abstract_state

# All of these sizes, and their parts, differ, so that a shape identifies an array.
L, B, S, D, F, V, H = 5, 8, 32, 64, 176, 624, 8
DENSE = ModelConfig(num_layers=L, d_model=D, num_heads=H, d_ff=F, vocab_size=V)
MOE = ModelConfig(num_layers=L, d_model=D, num_heads=H, vocab_size=V, moe=MoEConfig(num_experts=8, top_k=2, d_ff=F))


def compiled(*, moe: bool = False, remat: str = "none", accum: int = 1, **mesh: int) -> tuple[Config, Context, str]:
    """Returns the compiled program of loss and gradients on `mesh`, as text."""
    return _compiled(moe, remat, accum, tuple(sorted(mesh.items())))


@functools.cache
def _compiled(moe: bool, remat: str, accum: int, mesh: tuple[tuple[str, int], ...]) -> tuple[Config, Context, str]:
    cfg = Config(
        model=MOE if moe else DENSE,
        data=DataConfig(seq_len=S, batch_size=B),
        train=TrainConfig(remat=remat, grad_accum=accum),
        mesh=MeshConfig(**{"data": 1} | dict(mesh)),
    )
    ctx = make_context(cfg, make_mesh(cfg.mesh, B // accum, jax.devices()[: math.prod(cfg.mesh.sizes.values())]))
    values = abstract_state(Recipe.of(cfg), ctx).params
    batch = {
        name: jax.ShapeDtypeStruct((B, S), dtype, sharding=ctx.layout.sharding(ctx.layout.batch))
        for name, dtype in [("tokens", jnp.int32), ("targets", jnp.int32), ("loss_weights", jnp.float32)]
    }
    placed = jax.tree.map(lambda leaf: leaf.sharding, values)
    gradients = jax.jit(make_gradients(cfg, ctx), out_shardings=(None, placed, None))
    return cfg, ctx, gradients.lower(values, batch).compile().as_text()


def moved(**how) -> list[hlo.Collective]:
    _, ctx, text = compiled(**how)
    return hlo.collectives(text, ctx.layout.mesh.shape, ctx.layout.trip_counts)


def per_layer(found: list[hlo.Collective], kind: str, *axes: str) -> dict[tuple[int, ...], int]:
    """Counts how often a layer moves arrays of each shape, forward and backward together."""
    counts: dict[tuple[int, ...], int] = {}
    for c in found:
        if c.kind == kind and c.axes == axes and c.times % L == 0:
            counts[c.shape] = counts.get(c.shape, 0) + c.times // L
    return counts


STREAM = (B, S, D)


def test_tensor_parallelism_all_reduces_four_times_a_layer():
    """Each pass has two all-reduces (Shoeybi et al. 2019, section 3), and nothing else."""
    found = moved(tensor=4, sequence_parallel=False)
    assert {c.kind for c in found} == {"all-reduce"}
    assert per_layer(found, "all-reduce", "tensor") == {STREAM: 4}


def test_sequence_parallelism_gathers_and_scatters_in_place_of_all_reduces():
    """Each pass has two of each (Korthikanti et al. 2022, figure 5); only gradients of norms [D] are all-reduced."""
    found = moved(tensor=4)
    assert per_layer(found, "all-gather", "tensor") == {STREAM: 4}
    assert per_layer(found, "reduce-scatter", "tensor") == {(4, B, S // 4, D): 4}
    assert per_layer(found, "all-reduce", "tensor") == {(D,): 2}
    assert all(math.prod(c.shape) <= B * S for c in found if c.kind == "all-reduce")


@pytest.mark.parametrize("how", [{}, {"sequence_parallel": False}], ids=str)
def test_no_device_holds_all_logits(how):
    """No array that is sent is as long as the vocabulary: neither logits, their gradients, nor the head."""
    arrays = hlo_text.shapes(compiled(tensor=4, **how)[2])
    assert any(V // 4 in shape for _, shape in arrays)
    assert not any(V in shape for _, shape in arrays)


def test_fsdp_scatters_gradients_and_all_reduces_only_parts_of_them():
    """Both passes gather weights; gradients are reduce-scattered, and replicas sum their shards."""
    found = moved(data=2, fsdp=4)
    width = D // H
    parameters = {(D, H, width): 3, (H, width, D): 1, (D, F): 2, (F, D): 1}
    assert per_layer(found, "all-gather", "fsdp") == {shape: 2 * n for shape, n in parameters.items()}
    scattered = per_layer(found, "reduce-scatter", "fsdp")
    assert sum(scattered.values()) == sum(parameters.values())
    assert {math.prod(shape) for shape in scattered} == {math.prod(shape) for shape in parameters}
    # Over fsdp no more than gradients of norms is all-reduced, and over data a quarter of each gradient.
    assert max(math.prod(c.shape) for c in found if c.kind == "all-reduce" and "fsdp" in c.axes) == D
    summed = per_layer(found, "all-reduce", "data")
    assert {math.prod(shape) for shape in summed} == {math.prod(shape) // 4 for shape in parameters}
    assert max(math.prod(c.shape) for c in found if c.kind == "all-reduce" and "data" in c.axes) == V * D // 4


@pytest.mark.parametrize("remat", ["none", "selective"])
def test_fsdp_holds_the_whole_weights_of_one_layer_at_a_time(remat):
    arrays = hlo_text.shapes(compiled(data=2, fsdp=4, remat=remat)[2])
    assert ("f32", (D, F)) in arrays
    assert not {("f32", (L, D, F)), ("f32", (L, 1, D, F)), ("f32", (L, F, D)), ("f32", (L, D, H, D // H))} & arrays


@pytest.mark.matrix
def test_experts_exchange_tokens_and_never_weights():
    found = moved(moe=True, expert=4)
    _, pairs, visits = rounds.room_of_shard(B // 4 * S, 2, 8, 4)  # of a shard to one other, in one round
    assert visits < pairs
    trips = per_layer(found, "all-to-all", "expert")
    # There and back; backward there again, gradients there and back. With the rows go their experts' numbers and their
    # gates, whose gradients come back.
    assert trips == {(4, visits, D): 5, (4, pairs): 2, (4, pairs, 1): 3}
    # A device holds 2 of the 8 experts, and their gradients are not summed with others.
    assert not any(F in c.shape for c in found)
    # All other weights are stored in parts: attention's matrices and the router are gathered in each pass.
    width = D // H
    dense = {(D, H, width): 3, (H, width, D): 1, (D, 8): 1}
    assert per_layer(found, "all-gather", "expert") == {shape: 2 * n for shape, n in dense.items()}
    assert sum(per_layer(found, "reduce-scatter", "expert").values()) == sum(dense.values())


def test_the_ring_passes_keys_and_values_on_and_gathers_nothing():
    found = moved(context=4)
    assert {c.kind for c in found} == {"collective-permute", "all-reduce"}
    # Keys and values make 4 hops in each pass, and 4 with their gradients: (2 + 2 + 2) * 4.
    assert per_layer(found, "collective-permute", "context") == {(B, H, S // 4, D // H): 24}


@pytest.mark.matrix(quick=["'tensor': 4}", "'remat': 'selective'}]", "'full'"])
@pytest.mark.parametrize(
    "how",
    [
        {"tensor": 4, "sequence_parallel": False},
        {"tensor": 4},
        {"data": 2, "fsdp": 4},
        {"data": 2, "fsdp": 4, "remat": "selective"},
        {"context": 4},
        {"fsdp": 2, "context": 2, "tensor": 2, "remat": "full", "accum": 2},
        {"moe": True, "expert": 4},
        {"moe": True, "fsdp": 2, "expert": 4, "remat": "full"},
        {"moe": True, "data": 2, "expert": 2, "tensor": 2, "remat": "selective"},
    ],
    ids=str,
)
def test_bytes_along_each_axis_are_what_the_formula_says(how):
    cfg, ctx, text = compiled(**how)
    found, expected = (
        hlo.collectives(text, ctx.layout.mesh.shape, ctx.layout.trip_counts),
        estimate.traffic(Job(cfg, ctx)),
    )
    print(hlo.format_traffic(found, expected))
    measured, predicted = hlo.sent(found), hlo.sent(expected)
    kinds = {kind for kind, sent in measured.items() if sent > 0.01 * sum(measured.values())}
    assert kinds <= set(predicted)
    for kind, sent in predicted.items():
        # Below a hundredth are the scalars that the formula leaves out: tokens, losses, statistics of routing.
        np.testing.assert_allclose(measured[kind], sent, rtol=0.01, atol=0.001 * sum(measured.values()), err_msg=kind)


def test_loops_and_groups_are_read_in_every_notation():
    """XLA's backends write device groups and trip counts in several ways; the parser must reject others."""
    module = """
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %a = f32[8,4]{1,0} all-gather(%x), channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
}
%condition (p: (s32[], f32[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(7)
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}
%step (p: f32[8]) -> f32[8] {
  %b = f32[8]{0} all-gather(%x), replica_groups={{0,1,2,3}}, frontend_attributes={chain_id="0"}
}
ENTRY %main (p: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]) while(%t), condition=%condition, body=%body
  %f = f32[8]{0} fusion(%p), calls=%step
  %c = (bf16[2,3]{1,0}, bf16[2,3]{1,0}, u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}
  %h = ((f32[7]{0}, f32[9]{0}), (f32[7]{0}, f32[9]{0}), u32[]) collective-permute-start(%p), source_target_pairs={{0,2}}
  %d = (f32[5]{0:T(8,128)}, f32[6]{0}) all-reduce(%p, %q), replica_groups=mesh['a'=4,'b'=2] {'b'}, to_apply=%add
  %e = (f32[2,3]{1,0}, f32[4,3]{1,0}) all-gather-start(%p), replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}
  %g = f32[4,3]{1,0} all-gather-done(%e)
  %i = ((s32[10]{0}), s32[10]{0}) all-to-all-start(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}
}
"""
    found = hlo.collectives(module, {"data": 2, "fsdp": 2, "tensor": 2})
    assert [(c.kind, c.axes, c.shape, c.times) for c in found] == [
        ("all-gather", ("data",), (8, 4), 7),
        ("collective-permute", ("tensor",), (2, 3), 1),
        ("collective-permute", ("fsdp",), (7,), 1),
        ("collective-permute", ("fsdp",), (9,), 1),
        ("all-reduce", ("tensor",), (5,), 1),
        ("all-reduce", ("tensor",), (6,), 1),
        ("all-gather", ("data",), (4, 3), 1),
        ("all-to-all", ("tensor",), (10,), 1),
    ]
    assert [c.sent for c in found] == [7 * 128 / 2, 12, 28, 36, 20, 24, 24, 20]
    with pytest.raises(ValueError, match="trip count"):
        hlo.collectives(module.replace("direction=LT", "direction=GT"), {"data": 2, "fsdp": 2, "tensor": 2})
    with pytest.raises(ValueError, match="do not follow the axes"):
        hlo.collectives(module.replace("{{0,4},{1,5},{2,6},{3,7}}", "{{0,3},{1,2}}"), {"a": 2, "b": 2, "c": 2})


def test_a_sum_in_float32_that_returns_bfloat16_counts_as_float32():
    """So XLA:TPU writes the reduce-scatter of gradients: it sums in float32, and casts and slices the result."""
    text = """
ENTRY %main (x: f32[64,8], y: bf16[64]) -> bf16[64,8] {
  %x = f32[64,8]{1,0} parameter(0)
  %y = bf16[64]{0} parameter(1)
  %sums = (bf16[64,8]{1,0}, bf16[64]{0}) all-reduce(%x, %y), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %sum = bf16[64,8]{1,0} get-tuple-element(%sums), index=0
}
"""
    found = hlo.collectives(text, {"fsdp": 4})
    assert [(c.dtype, c.bytes, c.sent) for c in found] == [("f32", 2048, 2048 * 6 / 4), ("bf16", 128, 128 * 6 / 4)]
