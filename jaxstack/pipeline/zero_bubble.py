"""Zero-bubble schedules: weight units fill time in which stages would be idle (Qi et al. 2024, arXiv:2401.10241).

Both run forward and backward units at the ticks of 1F1B. The backward units are shorter, because they leave the
gradients of the weights to weight units. JAX is not imported.
"""

import numpy as np

from jaxstack.pipeline.fused import interleaved_one_f_one_b, one_f_one_b
from jaxstack.pipeline.schedule import BACKWARD, FORWARD, IDLE, WEIGHT, Schedule


def zb1(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Builds 1F1B (interleaved, with several chunks) with weight units that all stages run at the same ticks.

    The weight unit of a microbatch runs on all stages at the tick of the first stage's backward unit. So the bubble,
    (P - 1) (F + B) in time with one chunk, has no weight gradients. With one chunk, a stage stores as many units as in
    1F1B, and at most P of them wait for their weight units.

    Raises:
      ScheduleError: see `interleaved_one_f_one_b`.
    """
    fused = interleaved_one_f_one_b(stages, microbatches, chunks) if chunks > 1 else one_f_one_b(stages, microbatches)
    first_stage_G = np.arange(fused.model_chunks) // stages * stages
    weight_MG = fused.backward_MG[:, first_stage_G]
    return Schedule("zb1", stages, chunks, microbatches, fused.forward_MG, fused.backward_MG, weight_MG)


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """Builds ZB-H1 for stages in lockstep: weight units also run in the lanes where a stage has no unit at the end.

    At the end of a step, stage s is idle in P - 1 - s forward lanes and in s backward lanes. With P - 1 weight units in
    these, the weight lane runs in P - 1 ticks less: the bubble is (P - 1) (F + B - W) in time, if a weight unit takes
    no longer than a forward or a backward unit. A stage stores as many units as in 1F1B.

    Fewer than 2P - 1 microbatches leave fewer weight units that can wait for these lanes: M - P, or none.
    """
    P = stages
    M = microbatches
    fused = one_f_one_b(P, M)
    saved = min(max(M - P, 0), P - 1)
    pause = max(M, 2 * P - 1) - 1  # so that a unit waits when the first stage's forward lane is idle
    runs_T = np.arange(fused.ticks) >= 2 * (P - 1)  # whether the tick has a weight lane
    runs_T[pause : pause + saved] = False
    weight_MG = np.zeros((M, P), int)
    lane_MG = np.zeros((M, P), int)
    idle = {FORWARD: fused.forward_TP == IDLE, BACKWARD: fused.backward_TP == IDLE}
    for stage in range(P):
        m = 0  # the next weight unit of the stage
        for tick, lane in np.ndindex(fused.ticks, 3):
            # The forward lane ends with the last stage's last unit.
            free = runs_T[tick] if lane == WEIGHT else idle[lane][tick, stage] and not idle[lane][tick].all()
            if free and m < M and 3 * fused.backward_MG[m, stage] + BACKWARD < 3 * tick + lane:
                weight_MG[m, stage] = tick
                lane_MG[m, stage] = lane
                m += 1
        assert m == M, f"stage {stage} of {P} has {M - m} weight units left"
    return Schedule("zb_h1", P, 1, M, fused.forward_MG, fused.backward_MG, weight_MG, lane_MG)


def pair_slots(s: Schedule) -> np.ndarray:
    """Returns the pair slot that each stage's backward unit writes to; in an idle stage a free one. int32 [T, P]."""
    tables = [s.backward_TP != IDLE, (s.weight_KTP != IDLE).sum(0)]
    ran, done = (table.cumsum(0) - table for table in tables)
    return np.where(ran - done < s.pair_slots, ran % max(1, s.pair_slots), s.pair_slots).astype(np.int32)
