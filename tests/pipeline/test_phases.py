"""Phases: every tick keeps its work, and the loops are few."""

import itertools

import numpy as np
import pytest

from jaxstack.pipeline import Program, Stages
from jaxstack.pipeline.partition import even
from jaxstack.pipeline.phases import MASKED, MOST_RUNS, Turns, find_phases
from jaxstack.pipeline.resolve import SCHEDULES

SIZES = [
    (name, stages, microbatches, chunks, layers)
    for name, chunks in (
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("interleaved_1f1b", 4),
        ("zb1", 1),
        ("zb1", 2),
    )
    for stages, microbatches, layers in itertools.product((2, 4), (4, 8, 32), (16, 22, 31))
]


def programs(name: str, stages: int, microbatches: int, chunks: int, layers: int) -> tuple[Program, Program]:
    """Returns a program with dynamic and one with static loops."""
    schedule = SCHEDULES[name](stages, microbatches, chunks)
    where = Stages(stages, even(layers, stages * chunks))
    return Program(schedule, where), Program(schedule, where, static=True)


def ticks_of(program: Program) -> list[Turns]:
    """Returns the trip counts that the phases of a program run, tick by tick."""
    ticks = []
    for phase in program.phases:
        runs = [turns for turns, count in phase.runs for _ in range(count)]
        assert phase.ticks == phase.repeats * len(runs)
        ticks += phase.repeats * runs
    return ticks


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_masked_turns_contain_the_work_of_every_tick(size):
    dynamic, static = programs(*size)
    found = np.array(ticks_of(static))
    needed = np.stack(dynamic.turns, 1)
    assert found.shape == needed.shape
    assert (found >= needed).all()
    turns = Turns(*found.T)
    assert np.array_equal(turns.loss, dynamic.turns.loss)
    # No tick runs layers in a direction that has no unit.
    assert np.array_equal(turns.forward > 0, dynamic.turns.forward > 0)
    assert np.array_equal(turns.backward > 0, dynamic.turns.backward > 0)
    assert np.array_equal(turns.weight > 0, dynamic.turns.weight > 0)
    assert turns.forward.max() <= dynamic.stages.max_groups
    assert static.bubble >= dynamic.bubble
    if size[-1] == 16:  # even stages have no masked layers
        assert static.bubble == dynamic.bubble
        # Warm-up, both directions with a loss and (with chunks) without, both with and without embeddings, the end.
        # Weight units begin later than backward units.
        most = (3 if size[3] == 1 else 7) + (dynamic.weight is not None)
        assert sum(len(phase.runs) for phase in static.phases) <= most
    assert static.bubble + 1 <= (1 + MASKED) * (dynamic.bubble + 1)
    assert sum(len(phase.runs) for phase in static.phases) <= 17
    assert static.trip_counts == {}


def test_a_cut_that_needs_many_runs_masks_layers_instead():
    """Sixteen stages of 1 to 16 layers: every tick of the warm-up has more turns than the one before."""
    schedule = SCHEDULES["1f1b"](16, 16, 1)
    static = Program(schedule, Stages(16, tuple(range(1, 17))), static=True)
    assert sum(len(phase.runs) for phase in static.phases) == 3
    assert set(static.turns.forward) == {0, 15, 16}
    few = Program(schedule, Stages(16, (8,) * 8 + (9,) * 8), static=True)
    assert set(few.turns.forward) == {0, 8, 9}
    assert sum(len(phase.runs) for phase in few.phases) <= MOST_RUNS


def test_the_number_of_loops_does_not_grow_with_the_microbatches():
    counts = {
        name: {len(programs(name, 4, m, chunks, 32)[1].phases) for m in (16, 64, 256)}
        for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 4))
    }
    assert all(len(found) == 1 for found in counts.values()), counts


def test_a_repeated_sequence_of_runs_is_one_phase():
    columns = [0, 0, 1, 2, 2, 1, 2, 2, 1, 2, 2, 0]
    trips = np.array(columns, np.int32)
    phases = find_phases(Turns(*[trips] * 7))
    assert [([(turns.forward, count) for turns, count in phase.runs], phase.repeats) for phase in phases] == [
        ([(0, 2)], 1),
        ([(1, 1), (2, 2)], 3),
        ([(0, 1)], 1),
    ]
