"""How devices divide matrices among themselves, counted turn by turn for stacks and meshes of many sizes."""

import math

import pytest
from jax.sharding import PartitionSpec

from jaxstack.models.params import Param
from jaxstack.training import whole_matrices
from jaxstack.training.whole_matrices import sharing

HEIGHT, WIDTH = 840, 1680  # divisible by all sizes below


def matrices(count: int) -> Param:
    return Param((count, HEIGHT, WIDTH), ("layers", "embed", "mlp"))


def mesh_of(**sizes: int) -> dict[str, int]:
    axes = ("pipe", "data", "fsdp", "expert", "context", "tensor")
    return {axis: sizes.get(axis, 1) for axis in axes}


def divide(count: int, mesh: dict[str, int]) -> whole_matrices.Sharing:
    p = matrices(count)
    return sharing(p, p.shape, PartitionSpec(None, "fsdp", "tensor"), mesh)


def sent(how: whole_matrices.Sharing, mesh: dict[str, int]) -> float:
    """What a device sends in a step, in matrices: a collective over n devices sends (n - 1) / n of the full array."""
    total = 0.0
    sizes = [math.prod(mesh[axis] for axis in axes) for _, axes in how.split]
    for turns in how.turns:
        if turns.gathers:
            total += turns.repeats * turns.rows * (1 - 1 / math.prod(sizes))
            continue
        exchanged = turns.matrices  # a shard of splits x matrices rows has as many elements
        total += turns.repeats * 2 * sum(1 - 1 / n for n in sizes) * exchanged
        total += turns.repeats * (1 - 1 / turns.replicas) * turns.rows / math.prod(sizes)
    return total


def test_turns_cover_the_stack_and_send_no_more_than_a_gather(rng):
    """A gather of all gradients over the devices that have different shards, or over replicas if there are no others.

    Two devices' exchange sends as much as their gather: half of the matrices there, and half back.
    """
    for _ in range(300):
        count = int(rng.integers(1, 50))
        data, fsdp, context, tensor = (int(size) for size in rng.choice([1, 1, 2, 3, 4, 5, 8], size=4))
        mesh = mesh_of(data=data, fsdp=fsdp, context=context, tensor=tensor)
        how = divide(count, mesh)
        case = f"{count} matrices on {mesh}: {how}"
        assert sum(turns.repeats * turns.rows for turns in how.turns) == count, case
        for turns in how.turns:
            workers = how.splits * turns.replicas * turns.matrices
            # Padding only where the devices of one replica outnumber the matrices.
            assert turns.gathers or turns.rows == workers or (turns.rows < how.splits and turns.replicas == 1), case
            along = math.prod(mesh[axis] for axis in turns.axes)
            assert along % turns.replicas == 0, case
            assert set(turns.axes) <= {"data", "context"}, case
        shards = fsdp * tensor
        devices = shards if shards > 1 else data * context
        assert sent(how, mesh) <= count * (1 - 1 / devices) * (1 + 1e-9), case


@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"fsdp": 2, "tensor": 4}, {}], ids=str)
@pytest.mark.parametrize("count", [1, 12, 32])
def test_more_replicas_take_neither_memory_nor_time(axes, count):
    before = None
    for data in (1, 8, 32, 128, 512):
        how = divide(count, mesh_of(data=data, **axes))
        # Whole matrices that a device receives and gathers in a turn: a stack of shards, or one matrix.
        rows = max(max(turns.rows / how.splits, turns.matrices) for turns in how.turns)
        assert rows <= max(count / how.splits, 1), how
        assert before is None or how.matrices <= before, how
        before = how.matrices
    # Replicas share the work as far as their number and the number of matrices have divisors in common.
    assert how.matrices <= {1: 1, 12: 2, 32: 1}[count], how


def test_groups_are_neighbours():
    """Groups of six among 4 x 6 x 4 replicas are not neighbours on whole axes; groups of 4, 8 and 12 are."""
    groups = list(whole_matrices._groups({"data": 4, "expert": 6, "context": 4}))
    assert groups == [
        ((), 1),
        (("context",), 2),
        (("context",), 4),
        (("expert", "context"), 8),
        (("expert", "context"), 12),
        (("expert", "context"), 24),
        (("data", "expert", "context"), 48),
        (("data", "expert", "context"), 96),
    ]
