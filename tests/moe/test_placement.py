"""Placements of experts by their load: by hand, against every placement of small cases, and bad files."""

import itertools
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.cli.parser import execute
from jaxstack.config import ConfigError
from jaxstack.moe import choose_replicas
from jaxstack.moe.placement import (
    Placement,
    even,
    imbalance,
    place,
    read,
    read_load,
    require_devices,
    write_load,
)


def test_the_hot_expert_gets_the_free_slots_and_the_devices_equal_loads():
    """Two layers of three experts: 60, 20, 20 tokens divide as 30 + 20 and 30 + 20 over two devices of two slots."""
    load = np.asarray([[60, 20, 20], [10, 10, 80]])
    found = place(load, devices=2, slots=2)
    assert [{*device} for device in found.experts[0].tolist()] in ([{0, 1}, {0, 2}], [{0, 2}, {0, 1}])
    np.testing.assert_allclose(found.device_load(load), 50)
    assert imbalance(even(2, 4, 2).device_load(np.asarray([[60, 20, 10, 10], [0, 0, 0, 0]]))).tolist() == [1.6, 1.0]


def test_the_expert_with_the_most_tokens_for_each_replica_gets_one_more():
    """With 50, 40, 6 and 4 tokens, 50 is divided first, and then 40 is more than 25."""
    (layer,) = place(np.asarray([[50, 40, 6, 4]]), devices=3, slots=2).stored
    assert np.bincount(layer).tolist() == [2, 2, 1, 1]


def test_a_swap_makes_devices_equal():
    """From the heaviest down, 3, 3, 2, 2, 2 and 0 are packed as 7 and 5. After a swap of 3 and 2, both have 6."""
    load = np.asarray([[3, 3, 2, 2, 2, 0]])
    assert place(load, devices=2, slots=3).device_load(load).tolist() == [[6, 6]]


def test_replicas_of_an_expert_divide_its_tokens():
    placement = Placement(3, np.asarray([[[2, 0], [0, 1], [0, 2]]]))
    assert placement.stored.tolist() == [[2, 0, 0, 1, 0, 2]]
    assert placement.replicas.tolist() == [[[1, 2, 4], [3, -1, -1], [0, 5, -1]]]
    assert placement.device_load(np.asarray([[9, 5, 4]])).tolist() == [[5, 8, 5]]


@pytest.mark.random
def test_placements_are_near_the_best_of_all(rng):
    """Every assignment of experts to six slots is tried. In 3,000 draws, none was more than 1.28 times the best."""
    choices = [*itertools.combinations_with_replacement(range(4), 3)]
    every = np.asarray([pair for pair in itertools.product(choices, choices) if {*pair[0], *pair[1]} == {0, 1, 2, 3}])
    for _ in range(20):
        load = rng.zipf(1.5, 4).clip(max=1000).astype(float)[None]
        counts = (every.reshape(-1, 6, 1) == np.arange(4)).sum(1)
        best = np.take_along_axis(load / counts, every.reshape(-1, 6), 1).reshape(-1, 2, 3).sum(2).max(1).min()
        found = place(load, devices=2, slots=3)
        assert {*found.stored[0].tolist()} == {0, 1, 2, 3}
        assert best <= found.device_load(load).max() * (1 + 1e-9)
        assert found.device_load(load).max() <= 4 / 3 * best * (1 + 1e-9)


@pytest.mark.random
def test_swaps_only_lower_the_largest_load_and_no_device_stores_an_expert_twice(rng):
    load = rng.zipf(1.3, (3, 32)).clip(max=10000).astype(float)
    found = place(load, devices=8, slots=5)
    assert found.experts.shape == (3, 8, 5)
    for layer in found.experts:
        assert all(len({*device.tolist()}) == 5 for device in layer)
        assert {*layer.ravel().tolist()} == set(range(32))
    assert (imbalance(found.device_load(load)) <= imbalance(even(3, 32, 8).device_load(load))).all()


def test_the_pairs_of_an_expert_take_turns_on_its_replicas():
    """Device 1 begins with the second replica. Expert 1 has one replica, in slot 3."""
    replicas = jnp.asarray([[1, 2, 4], [3, -1, -1], [0, 5, -1]])
    chosen = jnp.asarray([[0, 1], [2, 0], [0, 2], [2, 1]])
    assert choose_replicas(chosen, replicas, 0).tolist() == [[1, 3], [0, 2], [4, 5], [0, 3]]
    assert choose_replicas(chosen, replicas, 1).tolist() == [[2, 3], [5, 4], [1, 0], [5, 3]]


GOOD = {"experts": 3, "devices": 2, "slots": 2, "layers": [[[0, 1], [0, 2]], [[2, 1], [0, 2]]]}
BAD = [
    ({**GOOD, "experts": 4}, "places experts=4 of layers=2, but the model has 3 experts in 2 layers"),
    ({**GOOD, "layers": GOOD["layers"][:1]}, "places experts=3 of layers=1"),  # type: ignore[index]
    ({**GOOD, "layers": [[[0, 1], [0, 1]]] * 2}, "has no slot for expert 2 in layer 0"),
    ({**GOOD, "layers": [[[0, 1], [0, 2]], [[0, 1, 2], [0]]]}, "has slots=2, but device 0 of layer 1 has 3 replicas"),
    ({**GOOD, "layers": [[[0, 1], [0, 3]]] * 2}, "has expert 3 in layer 0, but ids end at 2"),
    ({**GOOD, "devices": 3}, "has devices=3, but layer 0 has 2"),
    ({"experts": 3}, "is not a placement: it needs experts, devices, slots and layers"),
    ({**GOOD, "layers": 5}, "is not a placement"),
    ([], "is not a placement"),
    ("{", "is not JSON"),
]


@pytest.mark.parametrize(("content", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_a_bad_placement_is_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "placement.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        read(path, 2, 3)
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_placement_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "placement.json"
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file"):
        read(path, 2, 3)
    path.write_text(Placement(3, np.asarray(GOOD["layers"])).to_json())
    found = read(path, 2, 3)
    assert json.loads(path.read_text()) == GOOD
    assert found.experts.tolist() == GOOD["layers"]
    with pytest.raises(ConfigError, match=r"has devices=2, but mesh.expert=4. Use --mesh.expert=2"):
        require_devices(path, found, 4)


def test_the_command_places_what_was_measured(tmp_path, capsys):
    load, out, picture = tmp_path / "load.json", tmp_path / "placement.json", tmp_path / "load.png"
    write_load(load, np.asarray([[60, 20, 10, 10], [5, 5, 5, 5]]))
    assert read_load(load).tolist() == [[60, 20, 10, 10], [5, 5, 5, 5]]
    words = ["plan", "experts", str(load), "--devices=2", f"--out={out}"]
    execute([*words, "--slots=3", f"--plot={picture}"])
    said = capsys.readouterr().out
    assert re.search(r"0\s+1\.60\s+1\.00", said)
    assert re.search(r"1\s+1\.00\s+1\.00", said)
    assert picture.stat().st_size > 10_000
    assert read(out, 2, 4).devices == 2
    out.unlink()
    for flags, message in (
        (["--slots=1"], "slots=1 on each of devices=2 do not fit experts=4. Use from 2 to 4 slots"),
        (["--slots=5"], "Use from 2 to 4 slots"),
        (["--slots=2", "--plot=load.txt"], "does not end in .png"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            execute([*words, *flags])
    for text in ('{"experts": 3, "tokens": [[1, 2]]}', '{"experts": 2, "tokens": [[1, -2]]}', "[]"):
        load.write_text(text)
        with pytest.raises(ConfigError, match="does not have the tokens of each expert"):
            execute([*words, "--slots=2"])
    assert not out.exists()
