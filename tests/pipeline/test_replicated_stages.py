"""Stages on several devices: the choice of PipeDream's dynamic programme against all others, and its own example."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from jaxstack.config import ConfigError
from jaxstack.pipeline import Replicas, ReplicatedCut, ScheduleError, replicate
from jaxstack.pipeline.costs import Costs


def random_costs(rng: np.random.Generator, layers: int, spread: bool) -> Costs:
    draw = lambda n=layers: tuple(rng.uniform(0.1, 3, n))  # noqa: E731
    return Costs(
        forward=draw(), backward=draw(), state_bytes=draw(), stash_bytes=draw(), boundary_bytes=draw(),
        first=draw(2), last=draw(2), spread=spread, bandwidth=float(rng.uniform(0.3, 5)),
        latency=float(rng.uniform(0, 0.5)), measured_on="chance", weight=draw(), pair_bytes=draw(),
    )  # fmt: skip


def by_hand(costs: Costs, layers, replicas, microbatches, gradient_bytes) -> list[float]:
    """Returns the seconds of each stage for one microbatch, divided among its devices."""
    times = []
    begin = 0
    for stage, (count, devices) in enumerate(zip(layers, replicas, strict=True)):
        span = range(begin, begin + count)
        t = sum(costs.forward[i] + costs.backward[i] + costs.weight[i] for i in span)
        if stage > 0:
            t += costs.latency + costs.boundary_bytes[begin - 1] / costs.bandwidth
        if stage < len(layers) - 1:
            t += costs.latency + costs.boundary_bytes[span[-1]] / costs.bandwidth
        if not costs.spread:
            t += sum(costs.first) if stage == 0 else 0
            t += sum(costs.last) if stage == len(layers) - 1 else 0
        t /= devices
        sent_and_received = 2 * (devices - 1) / devices * sum(gradient_bytes[i] for i in span)
        t += sent_and_received / costs.bandwidth / microbatches
        t += (sum(costs.first) + sum(costs.last)) / sum(replicas) if costs.spread else 0
        times.append(t)
        begin += count
    return times


def sums(total: int, terms: int):
    """Yields all ways to write `total` as a sum of positive terms."""
    for cuts in itertools.combinations(range(1, total), terms - 1):
        yield tuple(np.diff([0, *cuts, total]).tolist())


@pytest.mark.parametrize("case", range(60))
def test_the_choice_is_the_best_of_all(rng, case):
    layers, devices, microbatches = (int(rng.integers(1, n)) for n in (7, 7, 9))
    costs = random_costs(rng, layers, spread=case % 4 == 0)
    sizes = tuple(rng.uniform(0, 20, layers))
    most = min(layers, devices)
    stages = int(rng.integers(1, most + 1)) if case % 3 == 0 else None
    found = replicate(costs, devices, microbatches, sizes, stages)
    all_choices = [
        (max(by_hand(costs, layers_P, replicas_P, microbatches, sizes)), p)
        for p in ([stages] if stages else range(1, most + 1))
        for layers_P in sums(layers, p)
        for replicas_P in sums(devices, p)
    ]
    assert sum(found.layers) == layers
    assert sum(found.replicas) == devices
    np.testing.assert_allclose(
        found.stage_seconds, by_hand(costs, found.layers, found.replicas, microbatches, sizes), rtol=1e-12
    )
    least = min(all_choices)[0]
    assert found.slowest == pytest.approx(least, rel=1e-12)
    assert len(found.layers) == min(p for t, p in all_choices if t <= least * (1 + 1e-9))


def vgg16() -> tuple[Costs, list[float]]:
    """VGG-16 in float32, 64 pictures of 224 x 224 on a V100 (taken as 7 TFLOP/s), with a network of 10 Gbit/s."""
    channels, side = 3, 224
    forward, outputs, weights = [], [], []
    for outs, pool in [
        (64, 0),
        (64, 1),
        (128, 0),
        (128, 1),
        (256, 0),
        (256, 0),
        (256, 1),
        *[(512, 0), (512, 0), (512, 1)] * 2,
    ]:
        forward.append(64 * 2 * 9 * channels * outs * side**2 / 7e12)
        weights.append(9 * channels * outs)
        channels, side = outs, side // (1 + pool)
        outputs.append(4 * 64 * outs * side**2)
    for ins, outs in [(25088, 4096), (4096, 4096), (4096, 1000)]:
        forward.append(64 * 2 * ins * outs / 7e12)
        weights.append(ins * outs)
        outputs.append(4 * 64 * outs)
    assert sum(weights) == pytest.approx(138.3e6, rel=1e-3)  # without biases; the published model has 138.4 million
    assert sum(forward) / 64 * 7e12 == pytest.approx(31e9, rel=0.01)  # 15.5 billion multiplications and additions
    sizes = [4.0 * n for n in weights]
    costs = Costs(
        forward=tuple(forward), backward=tuple(2 * t for t in forward), state_bytes=tuple(4 * n for n in sizes),
        stash_bytes=tuple(outputs), boundary_bytes=tuple(map(float, outputs)), first=(0, 0), last=(0, 0), spread=False,
        bandwidth=10e9 / 8, latency=0.0, measured_on="formulae",
    )  # fmt: skip
    return costs, sizes


def test_vgg16_on_sixteen_devices_is_divided_as_in_the_paper():
    """PipeDream (Narayanan et al. 2019, table 1) has "15-1": one device for the large matrices, 15 for convolutions."""
    costs, sizes = vgg16()
    found = replicate(costs, 16, 16)
    assert found == replicate(costs, 16, 16, sizes)
    assert (found.layers, found.replicas) == ((12, 4), (15, 1))  # of 13 convolutions, the one device has the last
    assert found.slowest < replicate(costs, 16, 16, stages=1).slowest / 1.2  # data parallelism
    assert str(found).startswith("layers 0-11 on 15 devices ")
    # With a link that costs nothing, data parallelism is best: no stage is slower than another one.
    assert replicate(replace(costs, bandwidth=1e18), 16, 16).replicas == (16,)


def test_the_devices_of_stages_and_the_way_of_parts_by_hand():
    replicas = Replicas((1, 2, 3))
    assert (replicas.devices, replicas.parts, replicas.most) == (6, 6, 6)
    assert [replicas.runs(stage) for stage in range(3)] == [6, 3, 2]
    assert replicas.stage_D.tolist() == [0, 1, 1, 2, 2, 2]
    assert replicas.replica_D.tolist() == [0, 0, 1, 0, 1, 2]
    assert replicas.counts_D.tolist() == [1, 2, 2, 3, 3, 3]
    assert [replicas.path(part) for part in (0, 1, 5)] == [[(0, 1), (1, 3)], [(0, 2), (2, 4)], [(0, 2), (2, 5)]]
    assert replicas.rotation(1) == [(1, 2), (2, 1), (3, 4), (4, 5), (5, 3)]
    assert replicas.rotation(2) == [(3, 5), (4, 3), (5, 4)]


def test_a_cut_makes_functions_of_stages():
    cut = ReplicatedCut((2, 1), (1, 3), (1e-3, 2e-3))
    functions = [lambda w, x: x + w, lambda w, x: x * w, lambda w, x: x - w]
    first, second = cut.chain(functions)
    assert cut.group([5, 2, 1]) == [[5, 2], [1]]
    assert first([5, 2], 1) == 12
    assert second([1], 12) == 11
    assert str(cut) == "layers 0-1 on 1 device 1 ms | layers 2-2 on 3 devices 2 ms"


def test_mistakes_are_named(rng):
    costs = random_costs(rng, 3, spread=False)
    for words, arguments in {
        r"stages=4 must be from 1 to 3 for 3 layers and 8 devices": (8, 1, None, 4),
        r"devices=0 and microbatches=1 must be 1 or more": (0, 1),
        r"gradient_bytes has 2 entries, but the costs have 3 layers": (4, 1, [1.0, 2.0]),
    }.items():
        with pytest.raises(ConfigError, match=words):
            replicate(costs, *arguments)
    with pytest.raises(ScheduleError, match=r"replicas=\[1, 0\] must be an integer of 1 or more for each stage"):
        Replicas((1, 0))
    with pytest.raises(ConfigError, match="got 2 entries, but the cut has 3 layers"):
        ReplicatedCut((2, 1), (1, 3), (1e-3, 2e-3)).group([1, 2])
