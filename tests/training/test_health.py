"""Checks of machines before the first step: what each reports by hand-made machines, and an all-reduce by its data."""

import dataclasses
import types
from pathlib import Path

import jax
import pytest

from jaxstack import train
from jaxstack.common.errors import Exit, RunError
from jaxstack.common.hardware import CHIPS
from jaxstack.config import Config, ConfigError, MeshConfig, ModelConfig, RunConfig
from jaxstack.runtime import launchers
from jaxstack.training.services import health

H100 = CHIPS["h100"].kinds[0]
GOOD = health.Machine("node", 8, H100, {"jax": "0.10.2", "python": "3.11"}, 1000.0, 10**12, 300e9)


def machines(**different):
    """Four machines, the third of which differs."""
    third = dataclasses.replace(GOOD, host="node2", **different)
    return [GOOD, dataclasses.replace(GOOD, host="node1", clock=1000.5), third, dataclasses.replace(GOOD, host="node3")]


def test_equal_machines_pass():
    assert health.faults(machines(), 32, 10**12) == []
    assert health.faults(machines(), None, 10**12) == []
    assert health.slow(machines(), 200e9, 400e9) == []
    assert "; 2.5 GB free; all-reduce 200 GB/s" in health.summary(machines(free=2_500_000_000), 200e9, 0.0)
    line = health.summary(machines(), 200e9, 400e9)
    assert (
        line
        == f"health   4 x 8 {H100}; clocks within 0.50 s; 1,000 GB free; all-reduce 200 GB/s, 50% of the data sheet"
    )


@pytest.mark.parametrize(
    ("different", "words"),
    [
        ({"devices": 7}, "node2 (process 2) has 7 devices, and others have 8. Repair it"),
        ({"kind": "NVIDIA A100"}, f"node2 (process 2) has devices of kind NVIDIA A100, and others {H100}. Use one"),
        ({"idle_gpus": 8}, "node2 (process 2) has 8 GPUs that JAX cannot use, so it uses the CPU. Check the driver"),
        ({"free": 5 * 10**9 - 1}, "node2 (process 2) has 5 GB free for run.dir, and a checkpoint has at least 5 GB."),
        ({"versions": {"jax": "0.10.1", "python": "3.11"}}, "node2 (process 2) has jax 0.10.1, and others 0.10.2."),
        ({"versions": {"jax": "0.10.2"}}, "node2 (process 2) has python missing, and others 3.11."),
    ],
)
def test_a_machine_that_differs_is_named(different, words):
    (found,) = health.faults(machines(**different), None, 5 * 10**9)
    assert found.startswith(words)
    assert found.count(". ") == 1, "what is wrong, and what to do"


def test_mixed_machines_are_right_if_the_mesh_has_all_their_devices():
    assert health.faults(machines(devices=4), 28, 0) == []
    assert len(health.faults(machines(devices=4), 32, 0)) == 1


@pytest.mark.parametrize(
    ("different", "words"),
    [
        ({"clock": 1030.0}, "The clock of node2 (process 2) is 30 s ahead of the others. Start"),
        ({"clock": 900.0}, "The clock of node2 (process 2) is 100 s behind the others. Start"),
        ({"bandwidth": 25e9}, "An all-reduce within node2 (process 2) has 25 GB/s, and the data sheet says 450. Check"),
    ],
)
def test_wrong_clocks_and_slow_links_are_named(different, words):
    (found,) = health.slow(machines(**different), 200e9, 400e9)
    assert found.startswith(words)
    assert found.count(". ") == 1


def test_one_of_two_clocks_is_named():
    (found,) = health.slow([GOOD, dataclasses.replace(GOOD, host="node1", clock=1010.0)], 0.0, 0.0)
    assert found.startswith("The clock of node1 (process 1) is 10 s ahead of the others.")


def test_a_slow_network_names_its_hosts():
    (found,) = health.slow(machines(), 99e9, 400e9)
    assert found.startswith(
        "An all-reduce among all devices has 99 GB/s, and the data sheet says 400. Check the network"
    )
    assert "node and node1 and node2 and node3." in found
    assert health.slow(machines(), 101e9, 400e9) == []
    assert health.slow(machines(bandwidth=0.0), 0.0, 0.0) == [], "one device, or a chip that is not listed"
    tpu = [dataclasses.replace(GOOD, kind="TPU v5p", bandwidth=1e9)]
    assert health.slow(tpu, 500e9, 600e9) == [], "a host has some of the links of a TPU slice"


def device(kind, process, slice_index=0):
    return types.SimpleNamespace(device_kind=kind, process_index=process, slice_index=slice_index)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([device(H100, 0)] * 8, 450e9),  # NVLink
        ([device(H100, 0)] * 8 + [device(H100, 1)] * 8, 400e9),  # eight cards of 50 GB/s in each host
        ([device(H100, 0)] * 2 + [device(H100, 1)] * 2, 100e9),
        ([device("TPU v5p", i) for i in range(16)], 600e9),  # one slice, whatever the number of hosts
        ([device("TPU v5p", i, i // 4) for i in range(8)], 4 * 6.25e9),
        ([device("cpu", 0)] * 8, 0.0),
    ],
)
def test_the_expected_bandwidth_is_that_of_the_data_sheet(devices, expected):
    assert health.expected_bandwidth(devices) == pytest.approx(expected)


def test_an_all_reduce_is_timed_by_what_a_ring_sends(monkeypatch):
    """Eight devices of 2**18 floats: 2 * 7/8 MiB each, in the shortest of five times."""
    clock = iter([0.0, 3.0, 10.0, 11.0, 20.0, 22.0, 30.0, 34.0, 40.0, 45.0])
    monkeypatch.setattr(health.time, "perf_counter", lambda: next(clock))
    assert health.all_reduce_bandwidth(jax.devices()) == pytest.approx(2 * 7 / 8 * 4 * 2**18)
    assert health.all_reduce_bandwidth(jax.devices()[:1]) == 0.0


def test_a_preflight_of_one_process_trains_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("hello world " * 1000)
    base = Config()
    cfg = dataclasses.replace(
        base,
        run=RunConfig(dir="runs/first"),
        mesh=MeshConfig(data=8),
        data=dataclasses.replace(base.data, source="path", path="text.txt"),
    )
    monkeypatch.setattr(launchers, "detect", lambda *_: None)
    train.main(cfg, preflight=True)
    health_line, passed = capsys.readouterr().out.splitlines()
    assert health_line.startswith("health   1 x 8 cpu; clocks within 0.00 s; ")
    assert passed.strip() == "preflight passed; nothing was trained"
    assert [path.name for path in (tmp_path / "runs" / "first").iterdir()] == [".lock"]
    monkeypatch.setattr(health, "least_bytes", lambda _: 10**18)
    with pytest.raises(
        ConfigError, match=r"\(process 0\) has .* GB free for run\.dir, and a checkpoint has at least 1,000,000,000"
    ):
        train.main(cfg, preflight=True)
    monkeypatch.setattr(health, "least_bytes", lambda _: 0)
    monkeypatch.setattr(health, "slow", lambda *_: ["One is slow. Do this."] * 5)
    with pytest.raises(ConfigError, match=r"^(One is slow\. Do this\. ){3}2 more machines have faults\.$"):
        train.main(cfg, preflight=True)


def test_gpus_that_jax_left_out_are_counted(tmp_path, monkeypatch):
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.setattr(health, "Path", lambda path: tmp_path if path == "/dev" else Path(path))
    assert health.measure("runs").idle_gpus == 0, "JAX_PLATFORMS=cpu asks for CPUs"
    monkeypatch.delenv("JAX_PLATFORMS")
    assert health.measure("runs").idle_gpus == 2


def test_a_process_that_is_lost_meanwhile_is_an_error_of_one_line(monkeypatch):
    def lost(*_):
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: no answer\nmore")

    monkeypatch.setattr(health.distributed, "gather_to_process_0", lost)
    with pytest.raises(RunError, match=r"were checked \(DEADLINE_EXCEEDED: no answer\)\. Check the logs") as raised:
        health.check(ModelConfig(), MeshConfig(), RunConfig().dir, 300.0, preflight=True)
    assert raised.value.code is Exit.PEER_LOST


def test_a_checkpoint_has_at_least_the_trained_parameters():
    cfg = Config()
    vocabulary = dataclasses.replace(cfg.model, vocab_size=256)
    count = health.params.count(health.families.spec(vocabulary))
    assert health.least_bytes(vocabulary) == 4 * count > 0
