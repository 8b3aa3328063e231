"""Readers of damaged and hostile input: each returns a value or raises the error that it promises, within limits.

`fuzz_child.py` has the limits of a try: 512 MB of address space and 10 s of CPU time. `benchmarks/fuzz.py` runs the
same strategies for as many tries as one likes.
"""

import json

import pytest
from fuzz_inputs import COSTS, INPUTS
from fuzz_readers import NEEDS, READERS
from fuzz_room import Room
from hypothesis import HealthCheck, Phase, given, settings

QUICK = 60
"""Tries of each reader in the quick tests."""

SLOW = 1000
"""Tries of each reader in the slow stage of CI."""


@pytest.fixture(scope="module")
def room():
    room = Room()
    yield room
    room.close()


def tries(count):
    """Settings for a number of tries, the same in every run: nothing is remembered, and nothing is drawn by chance."""
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],  # inputs are small, and to shrink one that takes 5 s would take minutes
        suppress_health_check=[*HealthCheck],
    )


def test_every_reader_has_inputs():
    assert READERS.keys() == INPUTS.keys()


def fuzz(room, name, count):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason="needs the extra [hf]")

    @tries(count)
    @given(INPUTS[name])
    def check(content):
        room.check(name, content)

    check()
    assert room.refused[name] < room.tries[name], "no input was valid"


LONG = [0] * 5000
FOUND = {
    "costs": {**COSTS, "forward": [LONG, 1.0]},
    "preferences": {
        "chosen": [{"role": "user", "content": "a"}, {"role": LONG, "content": "b"}],
        "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "d"}],
    },
}
"""Inputs whose messages once quoted all of a value, found by `benchmarks/fuzz.py`."""


@pytest.mark.parametrize("name", FOUND)
def test_a_message_quotes_a_part_of_a_long_value(name, room):
    room.check(name, json.dumps(FOUND[name]).encode())


@pytest.mark.parametrize("name", INPUTS)
def test_a_reader_returns_a_value_or_its_error(name, room):
    fuzz(room, name, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", INPUTS)
def test_a_reader_with_more_inputs(name, room):
    fuzz(room, name, SLOW)
