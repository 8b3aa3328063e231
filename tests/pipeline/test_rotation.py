"""The schedule in which groups of rows pass the stages in turn, by its table."""

import numpy as np
import pytest

from jaxstack.pipeline import Rotation, groups_of


@pytest.mark.parametrize(("stages", "chunks", "groups"), [(2, 1, 2), (4, 1, 4), (4, 1, 3), (3, 2, 3), (4, 3, 1)])
def test_every_group_passes_all_layers_in_order(stages, chunks, groups):
    rotation, passes = Rotation(stages, chunks, groups), 3
    table, places = rotation.table(passes), np.arange(stages)
    for group in range(groups):
        ticks, at = np.nonzero(table == group)
        visits = [rotation.visit(tick, stage, passes) for tick, stage in zip(ticks, at, strict=True)]
        found = [(visit.turn, visit.chunk, stage) for visit, stage in zip(visits, at, strict=True)]
        # All stages of a chunk one after the other, then those of the next chunk, then the next pass.
        assert found == [(t, c, s) for t in range(passes) for c in range(chunks) for s in places]
        assert (np.diff(ticks) == 1).all(), "a group that leaves a stage is at the next one in the next tick"
        ends = [tick for tick in range(len(table)) if rotation.leaves(tick, passes)._asdict() | {"turn": 0} == {
            "group": group, "chunk": chunks - 1, "turn": 0, "active": True}]  # fmt: skip
        assert ends == [ticks[i] for i in range(chunks * stages - 1, len(ticks), chunks * stages)]
    assert len(table) == rotation.ticks(passes)
    assert (table[-1] >= 0).any()


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (4, 1), (4, 2)])
def test_idle_stages(stages, chunks):
    """One group leaves all stages but one idle. With a group for each, they wait only at the beginning and the end."""
    passes = 32
    assert Rotation(stages, chunks, 1).idle(passes) == pytest.approx(1 - 1 / stages)
    work = passes * chunks * stages
    assert Rotation(stages, chunks, stages).idle(passes) == pytest.approx((stages - 1) / (work + stages - 1))


def test_groups_are_equal_and_at_most_as_many_as_stages():
    assert [groups_of(rows, 4) for rows in (1, 2, 3, 4, 5, 6, 8, 12)] == [1, 2, 3, 4, 1, 3, 4, 4]
