"""Schedule tables: dependencies, stash slots, closed forms of bubbles, and errors. No JAX."""

import itertools

import numpy as np
import pytest

from jaxstack.cli.parser import execute
from jaxstack.config import ConfigError
from jaxstack.pipeline import gpipe, interleaved_one_f_one_b, one_f_one_b
from jaxstack.pipeline.resolve import SCHEDULES
from jaxstack.pipeline.schedule import BACKWARD, FORWARD, IDLE, WEIGHT, Schedule, ScheduleError

SIZES = [
    *(("gpipe", p, 1, m) for p, m in itertools.product((1, 2, 4, 8), (1, 2, 5, 8, 16))),
    *(("1f1b", p, 1, m) for p, m in itertools.product((1, 2, 4, 8), (1, 2, 5, 8, 16))),
    *(("interleaved_1f1b", p, v, k * p) for p, v, k in itertools.product((2, 4, 8), (1, 2, 4), (1, 2, 4))),
]
ZERO_BUBBLE = [
    *(("zb1", p, 1, m) for p, m in itertools.product((1, 2, 4, 8), (1, 2, 5, 8, 16))),
    *(("zb1", p, v, k * p) for p, v, k in itertools.product((2, 4), (2, 4), (1, 4))),
    *(("zb_h1", p, 1, m) for p, m in itertools.product((1, 2, 3, 4, 8), (1, 2, 4, 5, 7, 8, 15, 16, 32))),
]


def make(name: str, stages: int, chunks: int, microbatches: int) -> Schedule:
    return SCHEDULES[name](stages, microbatches, chunks)


@pytest.mark.parametrize("size", [*SIZES, *ZERO_BUBBLE], ids=str)
def test_every_unit_runs_once_after_what_it_needs(size):
    """Simulates an executor tick by tick, with one buffer per neighbour and the stash slots of both kinds."""
    s = make(*size)
    P, G = s.stages, s.model_chunks
    sent_forward: dict[int, tuple[int, int]] = {}  # arriving at a stage: microbatch, block
    sent_backward: dict[int, tuple[int, int]] = {}
    stash: dict[tuple[int, int], tuple[int, int]] = {}
    pairs: dict[tuple[int, int], tuple[int, int]] = {}
    done = {"forward": set(), "backward": set(), "weight": set()}

    def run_weight(lane: int, tick: int, stage: int) -> None:
        if (unit := int(s.weight_KTP[lane, tick, stage])) != IDLE:
            m, chunk = divmod(unit, s.chunks)
            g = chunk * P + stage
            assert (s.forward_TP, s.backward_TP, np.full_like(s.forward_TP, IDLE))[lane][tick, stage] == IDLE
            assert pairs.pop((stage, int(s.pair_slots_MG[m, g]))) == (m, g), "its own pair"
            done["weight"].add((m, g))

    for tick in range(s.ticks):
        next_forward, next_backward = {}, {}
        for stage in range(P):
            run_weight(FORWARD, tick, stage)
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
            run_weight(BACKWARD, tick, stage)
            if (unit := int(s.backward_TP[tick, stage])) != IDLE:
                m, chunk = divmod(unit, s.chunks)
                g = chunk * P + stage
                assert g == G - 1 or sent_backward[stage] == (m, g), "its cotangent has just arrived"
                assert stash.pop((stage, int(s.slots_MG[m, g]))) == (m, g), "its own residuals"
                next_backward[(stage - 1) % P] = (m, g - 1)
                done["backward"].add((m, g))
                if s.weight_MG is not None:
                    slot = (stage, int(s.pair_slots_MG[m, g]))
                    assert slot not in pairs, "nobody's pair is overwritten"
                    pairs[slot] = (m, g)
            run_weight(WEIGHT, tick, stage)
        sent_forward, sent_backward = next_forward, next_backward
    everything = set(itertools.product(range(s.microbatches), range(G)))
    assert done == {"forward": everything, "backward": everything, "weight": everything if size[0][0] == "z" else set()}
    assert not stash
    assert not pairs


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


@pytest.mark.parametrize("size", ZERO_BUBBLE, ids=str)
def test_weight_units_shorten_the_bubble_at_the_memory_of_1f1b(size):
    name, P, V, M = size
    s = make(*size)
    saved = min(max(M - P, 0), P - 1) if name == "zb_h1" else 0  # weight lanes that fit where stages are idle
    for forward, backward, weight in ((1.0, 2.0, 0.5), (1.0, 2.0, 0.335), (3.0, 5.0, 0.2)):
        F, B, W = forward, backward * (1 - weight), backward * weight
        found = s.simulate(forward, backward, weight)
        assert found.work == pytest.approx(M * V * (F + B + W))
        assert found.lockstep == pytest.approx((M * V + P - 1) * (F + B) + (M * V - saved) * W)
        if P == 8 and M == 32:
            bars = {0.5: 0.075, 0.335: 0.125}
            assert found.bubble <= bars.get(weight, 0.2)
        if name == "zb1" and V == 1:
            assert found.bubble == pytest.approx((P - 1) * (F + B) / (M * (F + B + W)))
    fused = make("interleaved_1f1b" if V > 1 else "1f1b", P, V, M)
    assert s.slots == fused.slots
    assert s.in_flight().max() <= (min(2 * P - 1, M) if V == 1 else fused.slots + P)
    assert s.pair_slots <= {"zb1": V * P, "zb_h1": 2 * P - 1}[name]


def test_the_bars_of_the_zero_bubble_schedules():
    """Eight stages, 32 microbatches; forward, backward and weight units of 1, 1, 1 and of 1, 1.33, 0.67."""
    bubbles = {
        name: [round(make(name, 8, 1, 32).simulate(1, 2, weight).bubble, 3) for weight in (0.5, 0.335)]
        for name in ("1f1b", "zb1", "zb_h1")
    }
    assert bubbles == {"1f1b": [0.219, 0.219], "zb1": [0.146, 0.17], "zb_h1": [0.073, 0.121]}
    assert [make(name, 8, 1, 32).in_flight().max() for name in bubbles] == [15, 15, 15]


def test_a_wrong_weight_unit_is_refused():
    good = make("zb_h1", 2, 1, 4)

    def with_units(ticks=good.weight_MG, lanes=good.weight_lane_MG):
        return Schedule("mine", 2, 1, 4, good.forward_MG, good.backward_MG, ticks, lanes)

    with pytest.raises(ScheduleError, match=r"weight unit of microbatch 0 runs before its backward unit"):
        with_units(lanes=np.zeros_like(good.weight_lane_MG))
    with pytest.raises(ScheduleError, match="in a lane that does not exist"):
        with_units(lanes=good.weight_lane_MG + 1)
    with pytest.raises(ScheduleError, match=r"stage 0 would run two weight units at tick 6, of microbatches 0 and 1"):
        with_units(np.full_like(good.weight_MG, 6), None)
    with pytest.raises(ScheduleError, match="weight ticks have shape"):
        with_units(good.weight_MG[:2])


def test_a_wrong_table_is_refused():
    good = one_f_one_b(4, 6)

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
    with pytest.raises(ScheduleError, match=r"10 microbatches come in groups of 4 stages. Use 8 or 12"):
        interleaved_one_f_one_b(4, 10, 2)
    with pytest.raises(ScheduleError, match=r"stages=0 must be an integer of 1 or more"):
        gpipe(0, 4)
    with pytest.raises(ScheduleError, match=r"microbatches='4' must be an integer of 1 or more"):
        one_f_one_b(4, "4")


def test_the_drawing_shows_every_unit():
    text = one_f_one_b(2, 3).text()
    assert text.splitlines()[1:] == [
        "stage 0 F  0 1 2 . .",
        "        B  . . 0 1 2",
        "stage 1 F  . 0 1 2 .",
        "        B  . 0 1 2 .",
    ]
    assert make("zb_h1", 2, 1, 4).text().splitlines()[1:] == [
        "stage 0 F   0  1  2  3 w1  .",
        "        B   .  .  0  1  2  3",
        "        W   .  .  0  .  2  3",
        "stage 1 F   .  0  1  2  3  .",
        "        B   .  0  1  2  3 w2",
        "        W   .  .  0  .  1  3",
    ]


def test_a_chart_is_drawn_and_mistakes_are_one_line(tmp_path, capsys):
    execute(
        ["schedule", "interleaved_1f1b", "--stages=2", "--microbatches=4", "--chunks=2", f"--out={tmp_path / 'a.png'}"]
    )
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "bubble 12.5% in lockstep" in capsys.readouterr().out
    execute(["schedule", "zb_h1", "--stages=2", "--microbatches=4", "--weight=0.25", f"--out={tmp_path / 'b.png'}"])
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    assert "bubble 16.7% in lockstep" in capsys.readouterr().out  # (1 + 1.5 - 0.5) / (4 x 3)
    with pytest.raises(ScheduleError, match="groups of 3 stages"):
        execute(["schedule", "interleaved_1f1b", "--stages=3", "--microbatches=4", "--chunks=2"])
    with pytest.raises(ConfigError, match="one chunk per stage"):
        execute(["schedule", "gpipe", "--chunks=2"])
