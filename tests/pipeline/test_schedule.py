"""Schedule tables: dependencies, stash slots, closed forms of bubbles, and errors. No JAX."""

import itertools

import numpy as np
import pytest

from jaxstack.cli.parser import execute
from jaxstack.config import ConfigError
from jaxstack.pipeline import schedule
from jaxstack.pipeline.schedule import IDLE, Schedule, ScheduleError

SIZES = [
    *(("gpipe", p, 1, m) for p, m in itertools.product((1, 2, 4, 8), (1, 2, 5, 8, 16))),
    *(("1f1b", p, 1, m) for p, m in itertools.product((1, 2, 4, 8), (1, 2, 5, 8, 16))),
    *(("interleaved_1f1b", p, v, k * p) for p, v, k in itertools.product((2, 4, 8), (1, 2, 4), (1, 2, 4))),
]


def make(name: str, stages: int, chunks: int, microbatches: int) -> Schedule:
    if name == "gpipe":
        return schedule.gpipe(stages, microbatches)
    if name == "1f1b":
        return schedule.one_f_one_b(stages, microbatches)
    return schedule.interleaved_one_f_one_b(stages, microbatches, chunks)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_unit_runs_once_after_what_it_needs(size):
    """Simulates an executor tick by tick, with one buffer per neighbour and the stash slots."""
    s = make(*size)
    P, G = s.stages, s.model_chunks
    sent_forward: dict[int, tuple[int, int]] = {}  # arriving at a stage: microbatch, block
    sent_backward: dict[int, tuple[int, int]] = {}
    stash: dict[tuple[int, int], tuple[int, int]] = {}
    done = {"forward": set(), "backward": set()}
    for tick in range(s.ticks):
        next_forward, next_backward = {}, {}
        for stage in range(P):
            if (unit := int(s.forward_TP[tick, stage])) != IDLE:
                m, chunk = divmod(unit, s.chunks)
                g = chunk * P + stage
                assert g == 0 or sent_forward[stage] == (m, g), "its input has just arrived"
                slot = (stage, int(s.slots_MG[m, g]))
                assert slot not in stash, "nobody's residuals are overwritten"
                stash[slot] = (m, g)
                next_forward[(stage + 1) % P] = (m, g + 1)
                done["forward"].add((m, g))
        for stage in range(P):
            if (unit := int(s.backward_TP[tick, stage])) != IDLE:
                m, chunk = divmod(unit, s.chunks)
                g = chunk * P + stage
                assert g == G - 1 or sent_backward[stage] == (m, g), "its cotangent has just arrived"
                assert stash.pop((stage, int(s.slots_MG[m, g]))) == (m, g), "its own residuals"
                next_backward[(stage - 1) % P] = (m, g - 1)
                done["backward"].add((m, g))
        sent_forward, sent_backward = next_forward, next_backward
    everything = set(itertools.product(range(s.microbatches), range(G)))
    assert done == {"forward": everything, "backward": everything}
    assert not stash


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bubbles_are_the_closed_forms(size):
    _, P, V, M = size
    for forward, backward in ((1.0, 2.0), (1.0, 1.0), (3.0, 4.0)):
        result = make(*size).simulate(forward, backward)
        assert result.work == M * V * (forward + backward)
        assert result.free_bubble == pytest.approx((P - 1) / (V * M))
        assert result.bubble == pytest.approx((P - 1) / (V * M))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_what_waits_is_bounded(size):
    name, P, V, M = size
    s = make(*size)
    in_flight = s.in_flight()
    assert in_flight.max() == s.slots, "colouring intervals needs no more than overlap"
    if name == "gpipe":
        assert (in_flight == M).all()
    elif V == 1:
        np.testing.assert_array_equal(in_flight, np.minimum(2 * (P - np.arange(P)) - 1, M))
    else:
        assert s.slots <= P * (V + 1) - 1, "whatever the number of microbatches"


def test_a_wrong_table_is_refused():
    good = schedule.one_f_one_b(4, 6)

    def with_ticks(forward=good.forward_MG, backward=good.backward_MG):
        return Schedule("mine", 4, 1, 6, forward, backward)

    late = good.forward_MG.copy()
    late[2, 3] += 1
    with pytest.raises(
        ScheduleError, match=r"forward unit of microbatch 2 runs in model chunk 3 at tick 6.* at tick 4"
    ):
        with_ticks(forward=late)
    twice = good.forward_MG.copy()
    twice[5] = twice[4]
    with pytest.raises(ScheduleError, match=r"stage 0 would run two forward units at tick 4, of microbatches 4 and 5"):
        with_ticks(forward=twice)
    with pytest.raises(ScheduleError, match=r"microbatch 0 goes backward before"):
        with_ticks(backward=good.backward_MG - 1)
    with pytest.raises(ScheduleError, match="shape"):
        with_ticks(forward=good.forward_MG[:, :3])
    with pytest.raises(ScheduleError, match=r"10 microbatches come in groups of 4 stages; use 8 or 12"):
        schedule.interleaved_one_f_one_b(4, 10, 2)
    with pytest.raises(ScheduleError, match=r"stages=0 must be an integer of 1 or more"):
        schedule.gpipe(0, 4)
    with pytest.raises(ScheduleError, match=r"microbatches='4' must be an integer of 1 or more"):
        schedule.one_f_one_b(4, "4")


def test_the_drawing_shows_every_unit():
    text = schedule.one_f_one_b(2, 3).text()
    assert text.splitlines()[1:] == [
        "stage 0 F  0 1 2 . .",
        "        B  . . 0 1 2",
        "stage 1 F  . 0 1 2 .",
        "        B  . 0 1 2 .",
    ]


def test_a_chart_is_drawn_and_mistakes_are_one_line(tmp_path, capsys):
    execute(
        ["schedule", "interleaved_1f1b", "--stages=2", "--microbatches=4", "--chunks=2", f"--out={tmp_path / 'a.png'}"]
    )
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "bubble 12.5% in lockstep" in capsys.readouterr().out
    with pytest.raises(ScheduleError, match="groups of 3 stages"):
        execute(["schedule", "interleaved_1f1b", "--stages=3", "--microbatches=4", "--chunks=2"])
    with pytest.raises(ConfigError, match="one chunk per stage"):
        execute(["schedule", "gpipe", "--chunks=2"])
