"""The parts that `tests/faults` combines, one at a time: manifests, policies, spikes, meshes of fewer devices."""

import hashlib
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from jaxstack.checkpoint import manifest, run_dir, verify
from jaxstack.checkpoint import store as checkpoint
from jaxstack.cli import supervise
from jaxstack.common import files
from jaxstack.common.errors import Exit, RunError
from jaxstack.config import CheckpointConfig, Config, ConfigError, MeshConfig, RunConfig, SpikeConfig
from jaxstack.runtime import watchdog
from jaxstack.tracking import step_log
from jaxstack.training import step


def make(directory: Path, number: int) -> Path:
    """Creates files like those of a checkpoint, with a manifest."""
    path = directory / str(number)
    (path / "state" / "d").mkdir(parents=True)
    (path / "state" / "d" / "array").write_bytes(bytes(range(200)))
    (path / "_METADATA").write_text("{}")
    (path / "empty").touch()
    manifest.write(path, manifest.hash_files(path, manifest.written_by(path, 0)))
    return path


HARM = {
    "has changed since it was written": lambda p: (p / "state/d/array").write_bytes(bytes([1, *range(1, 200)])),
    "has 100 bytes, not 200": lambda p: (p / "state/d/array").write_bytes(bytes(100)),
    "state/d/array is missing": lambda p: (p / "state/d/array").unlink(),
    "more is not in its manifest": lambda p: (p / "more").touch(),
    "it has no manifest": lambda p: (p / manifest.NAME).unlink(),
    "its manifest cannot be read": lambda p: (p / manifest.NAME).write_text('{"files": [1]}'),
    "empty directory": lambda p: (shutil.rmtree(p), p.mkdir()),
}


@pytest.mark.parametrize("why", HARM)
def test_a_seal_breaks(why, tmp_path):
    path = make(tmp_path, 7)
    assert manifest.corruption(path) is None
    HARM[why](path)
    assert why in manifest.corruption(path)


def test_the_files_of_a_checkpoint_are_shared_out(tmp_path, monkeypatch):
    """After a save, each process syncs and hashes what it wrote. Before a load, files are divided by size."""
    path, synced, fsync = tmp_path / "7", [], os.fsync
    monkeypatch.setattr(manifest.os, "fsync", lambda file: synced.append(os.fstat(file).st_ino) or fsync(file))
    wrote = {
        0: ["_METADATA", "state/d/index", "state/ocdbt.process_0/d/x", "state/array_metadatas/process_0"],
        1: ["state/ocdbt.process_1/d/y", "state/ocdbt.process_1/manifest.ocdbt", "state/array_metadatas/process_1"],
        12: ["state/ocdbt.process_12/d/z"],
    }
    for size, name in enumerate(name for names in wrote.values() for name in names):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(bytes(100 + size))
    for process in (0, 1, 2, 12):
        assert manifest.written_by(path, process) == sorted(wrote.get(process, []))
    sums = {name: sum for process in wrote for name, sum in manifest.hash_files(path, wrote[process]).items()}
    folders = {folder for name in sums for folder in (path / name).parents if folder.is_relative_to(path)}
    assert {*synced} == {each.stat().st_ino for each in (*(path / name for name in sums), *folders)}
    manifest.write(path, sums)
    assert manifest.corruption(path) is None
    assert manifest.read(path) == sums
    for count in (1, 2, 3, 20):
        shares = [manifest.share(sums, process, count) for process in range(count)]
        assert sorted(name for share in shares for name in share) == sorted(sums)
        sizes = [sum(size for size, _ in share.values()) for share in shares]
        assert max(sizes) - min(sizes) <= 107, "by no more than the largest file"
    uneven = {name: (size, "") for name, size in zip("abcdefg", (600, 100, 100, 100, 100, 100, 100), strict=True)}
    assert [sum(size for size, _ in manifest.share(uneven, i, 2).values()) for i in range(2)] == [600, 600]


def test_a_seal_waits_for_what_every_process_wrote(tmp_path, monkeypatch):
    """A checkpoint is not complete with a file that no process hashed, or that is not visible here."""
    path = make(tmp_path, 7)
    sums = manifest.read(path)
    (path / manifest.NAME).unlink()
    with pytest.raises(OSError, match="no process has written _METADATA"):
        manifest.write(path, {name: sum for name, sum in sums.items() if name != "_METADATA"})
    (path / "empty").rename(tmp_path / "late")
    monkeypatch.setattr(manifest.time, "sleep", lambda _: (tmp_path / "late").rename(path / "empty"))
    manifest.write(path, sums)
    assert manifest.corruption(path) is None
    (path / manifest.NAME).unlink()
    monkeypatch.setattr(manifest, "_VISIBLE_S", 0)
    with pytest.raises(OSError, match="absent was written by another process and is not visible here"):
        manifest.write(path, sums | {"absent": (3, "")})
    assert "no manifest" in manifest.corruption(path)


def test_a_checkpoint_goes_only_when_the_next_is_sealed(tmp_path, monkeypatch):
    """Whatever happens between commit and manifest: with `keep=1` only the older checkpoint is complete."""
    state, write, older = {"w": jnp.ones(3)}, manifest.write, []

    def fail(path, sums):
        older.append(verify.scan(tmp_path).step)
        raise OSError(28, "No space left on device")

    with checkpoint.Checkpoints(CheckpointConfig(keep=1), tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        monkeypatch.setattr(manifest, "write", fail)
        checkpoints.save(2, state, {})
        with pytest.raises(RunError, match="step 2 could not be written"):
            checkpoints.wait()
        assert (older, verify.scan(tmp_path).step) == ([1], 1)
        assert "it has no manifest" in manifest.corruption(tmp_path / "2")
        monkeypatch.setattr(manifest, "write", write)
        checkpoints.save(3, state, {})
    assert manifest.steps(tmp_path) == [3, 2], "the next start removes what has no manifest"


def test_the_newest_whole_step_is_found(tmp_path):
    for number in (4, 8, 12, 16):
        make(tmp_path, number)
    (tmp_path / "20.orbax-checkpoint-tmp-3").mkdir()
    (tmp_path / "notes").mkdir()
    HARM["state/d/array is missing"](tmp_path / "16")
    HARM["it has no manifest"](tmp_path / "12")
    found = verify.scan(tmp_path)
    assert (found.step, list(found.skipped), found.lost) == (8, [16, 12], False)
    assert manifest.complete_steps(tmp_path) == [16, 8, 4]
    for number in (4, 8):
        HARM["empty directory"](tmp_path / str(number))
    assert verify.scan(tmp_path).lost, "one was complete once"
    with pytest.raises(
        ConfigError, match=r"not hold a valid checkpoint .*step 16: state/d/array is missing; step 12: it was.*Restore"
    ):
        verify.latest_valid_step(tmp_path)


def test_a_first_checkpoint_that_was_not_finished_is_no_loss(tmp_path):
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / "half").touch()
    (tmp_path / "8").mkdir()
    assert not verify.scan(tmp_path).lost
    (tmp_path / "8" / "half").touch()
    assert verify.scan(tmp_path).lost, "one crash leaves at most one"


def test_set_aside_tidied_and_removed(tmp_path):
    saved, aside = tmp_path / "checkpoints", tmp_path / "quarantine"
    for _ in range(3):  # the same step may come again
        manifest.quarantine(make(saved, 4), aside)
    assert sorted(p.name for p in aside.iterdir()) == ["4", "4.1", "4.2"]
    make(saved, 8)
    (saved / "9.orbax-checkpoint-tmp-3").mkdir()
    make(saved, 12).rename(saved / ".removed-12")
    manifest.remove_partial(saved)
    assert [p.name for p in saved.iterdir()] == ["8"]
    manifest.remove(saved / "8")
    assert not list(saved.iterdir())


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ({"keep": 1}, {60}),
        ({"keep": 2}, {50, 60}),
        ({"keep": 1, "keep_every": 20}, {20, 40, 60}),
        ({"keep": 1, "keep_best": 2}, {10, 30, 60}),
        ({"keep": 2, "keep_best": 1, "keep_every": 40}, {30, 40, 50, 60}),
    ],
)
def test_what_the_policies_keep(policy, kept, tmp_path):
    checkpoints = checkpoint.Checkpoints(CheckpointConfig(**policy), tmp_path)
    checkpoints.scores = {10: 1.5, 20: 2.0, 30: 1.0, 40: 3.0, 70: 0.1}
    steps = [60, 50, 40, 30, 20, 10]
    assert {*steps} - {*checkpoints._expired(steps)} == kept


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_state_that_is_not_finite_is_refused(bad, tmp_path):
    """Any leaf counts, except integers. A finite state is saved, with a manifest."""
    state = {"step": jnp.int32(3), "params": {"w": jnp.ones((3, 2))}, "opt_state": jnp.zeros(4)}
    with checkpoint.Checkpoints(CheckpointConfig(), tmp_path) as checkpoints:
        with pytest.raises(RunError, match="after step 3 is not finite") as raised:
            checkpoints.save(3, state | {"opt_state": jnp.zeros(4).at[2].set(bad)}, {})
        assert raised.value.code is Exit.DIVERGED
        assert not manifest.steps(tmp_path)
        checkpoints.save(3, state, {"next_batch": 5})
    assert verify.scan(tmp_path).step == 3
    assert checkpoint.metadata(tmp_path, 3) == {"next_batch": 5}


def test_a_checkpoint_is_read_in_parts_no_larger_than_its_largest_array(rng, tmp_path, monkeypatch):
    """Each read opens the checkpoint again, and reads only arrays that are wanted and were not read before."""
    monkeypatch.setattr(checkpoint, "_AT_A_TIME", 40)
    state = {
        name: jnp.asarray(rng.normal(size=size), jnp.float32)
        for name, size in zip("abcdefg", (3, 7, 5, 25, 1, 2, 20), strict=True)
    }
    with checkpoint.Checkpoints(CheckpointConfig(), tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
    read, load = [], checkpoint.ocp.load

    def watched(path, tree):
        read.append([name for name in tree if tree[name] is not ...])
        return load(path, tree)

    monkeypatch.setattr(checkpoint.ocp, "load", watched)
    kinds = {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for name, a in state.items()}
    wanted = kinds | {"f": ...}
    found = checkpoint.restore(tmp_path, 1, wanted)
    assert read == [["a", "b", "c"], ["d"], ["e", "g"]]  # of 4 bytes each: 60, 100 and 84, and the largest has 100
    assert found.pop("f") is ...
    for name, value in found.items():
        np.testing.assert_array_equal(value, state[name])


def test_a_spike_is_what_its_definition_says(rng):
    """Compared with NumPy on both sides of the limit. Before the window is full, no step is a spike."""
    cfg = SpikeConfig(window=16, threshold=4.0)
    for scale in (1e-4, 0.3):  # a deviation below the floor of a hundredth, and above
        recent = (2 + scale * rng.standard_normal(16)).astype(np.float32)
        middle = np.median(recent.astype(np.float64))
        deviation = 1.4826 * np.median(np.abs(recent - middle))
        limit = middle + 4 * max(deviation, 0.01 * abs(middle))
        for loss, spike in ((limit * 1.0001, True), (limit * 0.9999, False), (np.nan, False), (np.inf, True)):
            assert bool(step.is_spike(cfg, jnp.asarray(recent), jnp.int32(16), jnp.float32(loss))) == spike
            assert not step.is_spike(cfg, jnp.asarray(recent), jnp.int32(15), jnp.float32(loss))


@pytest.mark.parametrize(
    ("sizes", "batch", "devices", "fits"),
    [
        ({"data": 4, "fsdp": 2}, 16, 8, (4, 2)),
        ({"data": 4, "fsdp": 2}, 16, 7, (2, 2)),  # three replicas would not divide the batch
        ({"data": 4, "fsdp": 2}, 12, 7, (3, 2)),
        ({"data": 1, "fsdp": 8}, 16, 7, (1, 4)),
        ({"data": 1, "fsdp": 6}, 30, 5, (1, 3)),  # what was stored in six parts is stored in a divisor of six
        ({"data": 2, "fsdp": 2, "tensor": 2}, 8, 6, (1, 2)),
        ({"data": 2, "tensor": 4}, 8, 3, None),
    ],
)
def test_the_mesh_of_the_devices_that_are_left(sizes, batch, devices, fits):
    mesh = MeshConfig(**sizes)
    if fits is None:
        with pytest.raises(ConfigError, match=r"3 devices remain, but .* need 4"):
            supervise.fit_mesh(mesh, batch, devices)
    else:
        found = supervise.fit_mesh(mesh, batch, devices)
        assert (found.data, found.fsdp) == fits
        assert found.tensor == mesh.tensor


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "x"
    files.write_atomic(path, "old")

    def fails(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(OSError, match="No space"):
        files.write_atomic(path, "new")
    assert path.read_text() == "old"


def test_a_lock_is_exclusive_and_says_who(tmp_path):
    with run_dir.DirectoryLock(tmp_path) as lock:
        assert lock.last_holder is None
        with pytest.raises(ConfigError, match=r"in use by process \d+ on "), run_dir.DirectoryLock(tmp_path):
            pass
        assert lock.is_intact()
    (tmp_path / ".lock").write_text("process 9 on a")
    with run_dir.DirectoryLock(tmp_path) as lock:
        assert lock.last_holder == "the previous run here did not shut down cleanly (process 9 on a)"
    assert (tmp_path / ".lock").read_text() == ""


def test_a_folder_of_other_files_does_not_become_a_run(tmp_path):
    """Nothing is written there. Empty folders, hidden files, and what a run has left behind are accepted."""
    folder = tmp_path / "texts"
    cfg = Config(run=RunConfig(dir=str(folder)))
    folder.mkdir()
    (folder / "poem.txt").write_text("a rose")
    with pytest.raises(ConfigError, match=r"run.dir=.*texts is not a run \(it has no config.yaml\) and is not empty"):
        run_dir.prepare(cfg, {})
    assert [path.name for path in folder.iterdir()] == ["poem.txt"]
    (folder / "poem.txt").rename(folder / ".hidden")
    assert run_dir.prepare(cfg, {}) == []
    (folder / "profile.json").touch()  # the costs of a pipeline, measured before the first write of a run
    assert run_dir.prepare(cfg, {}) == [], "the lock marks a run"
    (folder / ".lock").unlink()
    (folder / "config.yaml").touch()
    assert run_dir.prepare(cfg, {}) == []
    (folder / "config.yaml").unlink()
    make(folder / "checkpoints", 3)
    assert run_dir.prepare(cfg, {}) == []
    assert run_dir.prepare(Config(run=RunConfig(dir=str(tmp_path / "new"))), {}) == []


def test_a_course_steps_over_what_a_spike_was_read_from():
    loop = step_log.LoopState(step=4, batch=4, saved=4)
    for _ in range(3):
        loop = loop.advance()
    late = loop.roll_back(spike=6, limit=2)  # told when the step after it was on its way
    assert (late.step, late.batch, late.saved) == (4, 6, 4)
    again = late.advance().roll_back(spike=5, limit=2)
    assert (again.step, again.batch) == (4, 7), "the batches of three steps are behind it"
    with pytest.raises(RunError, match="3 spikes after step 4") as error:
        again.advance().roll_back(spike=5, limit=2)
    assert error.value.code == Exit.DIVERGED
    assert again.advance().after_save() == step_log.LoopState(step=5, batch=8, saved=5), "a new checkpoint, a new count"


def test_what_is_not_loaded_is_not_verified(rng, tmp_path, monkeypatch):
    """A damaged optimizer state does not prevent reading the parameters. A run resumes from an older step instead."""
    monkeypatch.setattr(checkpoint, "_FILE", 1 << 16)

    def draw() -> jax.Array:
        return jnp.asarray(rng.normal(size=(64, 512)), jnp.float32)  # 128 kB: no file holds two

    state = {"params": {"w": draw(), "v": draw()}, "opt_state": {"w": draw(), "v": draw()}, "step": jnp.int32(1)}
    with checkpoint.Checkpoints(CheckpointConfig(keep=2), tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.save(2, state, {})
    wanted = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
    wanted |= {"opt_state": {"w": ..., "v": ...}}
    path = tmp_path / "2"
    unread = verify._unread(path, wanted)
    everything = manifest.read(path)
    assert sum(everything[name][0] for name in unread) > 0.45 * sum(size for size, _ in everything.values())
    for name in unread:
        (path / name).write_bytes(rng.bytes(everything[name][0]))
    assert "has changed" in verify.corruption(tmp_path, 2)
    assert verify.latest_valid_step(tmp_path) == 1
    assert verify.latest_valid_step(tmp_path, wanted) == 2
    found = checkpoint.restore(tmp_path, 2, wanted)
    jax.tree.map(np.testing.assert_array_equal, found["params"], state["params"])
    for name in everything.keys() - unread:  # every other file counts, the index that names them among these
        if everything[name][0]:
            content = (path / name).read_bytes()
            (path / name).write_bytes(bytes([content[0] ^ 1]) + content[1:])
            assert f"{name} has changed" in verify.corruption(tmp_path, 2, wanted)
            (path / name).write_bytes(content)
    assert verify.corruption(tmp_path, 2, wanted) is None


def test_the_index_of_a_store_is_read_to_its_leaves(tmp_path):
    """The index of a large checkpoint is a tree, whose keys omit the common prefix of the nodes below."""
    config = {"max_decoded_node_bytes": 200, "max_inline_value_bytes": 10}
    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{tmp_path}/"}, "config": config}
    store = tensorstore.KvStore.open(spec).result()
    for array in ("params.layers.w", "params.layers.v", "step"):
        with tensorstore.Transaction() as transaction:
            for i in range(20):
                store.with_transaction(transaction)[f"{array}/c/{i}"] = bytes([i]) * 100
    stored = verify._stored(tmp_path)
    assert {array for array, _ in stored} == {"", "params.layers.w", "params.layers.v", "step"}
    newest = {f"d/{path.name}" for path in (tmp_path / "d").iterdir()}
    assert {file for _, file in stored} <= newest
    by = {array: {file for name, file in stored if name == array} for array, _ in stored}
    assert not by["params.layers.w"] & by["step"], "each was written by itself"


def test_complete_files_are_hashed_while_others_are_written(tmp_path, monkeypatch):
    """Only what has not changed since is not read again; young and small files wait, and so do those of others."""
    saving = tmp_path / "7.orbax-checkpoint-tmp-12" / "state"
    large = bytes(range(256)) * 5000
    names = ("ocdbt.process_0/d/done", "ocdbt.process_0/d/late", "ocdbt.process_0/d/young", "ocdbt.process_1/d/other")
    for name in (*names, "small"):
        (saving / name).parent.mkdir(parents=True, exist_ok=True)
        (saving / name).write_bytes(b"1" if name == "small" else large)
        if "young" not in name:
            os.utime(saving / name, (1e9, 1e9))
    early = manifest.EarlyDigests(tmp_path, 7, 0)
    early.hash_complete()
    assert len(early.known) == 2
    (saving / "ocdbt.process_0/d/late").write_bytes(large[::-1])
    saving.parent.rename(tmp_path / "7")
    path = tmp_path / "7"
    read = []
    monkeypatch.setattr(manifest, "_sha256", lambda file, real=manifest._sha256: read.append(file.name) or real(file))
    written = manifest.written_by(path, 0)
    digests = manifest.hash_files(path, written, early.known)
    assert sorted(read) == ["late", "small", "young"]
    assert digests == manifest.hash_files(path, written)
    assert len(digests) == 4


def test_a_save_hashes_complete_files_until_it_ends(tmp_path, monkeypatch):
    """As `store` uses it; a file of the temporary directory may be gone, for the save removes it."""
    monkeypatch.setattr(manifest, "_SETTLED_S", 0.01)
    saving = tmp_path / "7.orbax-checkpoint-tmp"
    saving.mkdir()
    (saving / "array").write_bytes(bytes(2 << 20))
    with manifest.EarlyDigests(tmp_path, 7, 0) as early:
        deadline = time.monotonic() + 60
        while not early.known and time.monotonic() < deadline:
            time.sleep(0.01)
        shutil.rmtree(saving)
    (digest,) = early.known.values()
    assert digest == (2 << 20, hashlib.sha256(bytes(2 << 20)).hexdigest())


def test_a_seal_is_of_all_files_but_itself_and_of_their_sizes(tmp_path):
    (tmp_path / "d").mkdir()
    for name in ("a", "d/b"):
        (tmp_path / name).write_bytes(b"12345")
    manifest.write(tmp_path, manifest.hash_files(tmp_path, ["a", "d/b"]))
    assert manifest.written_by(tmp_path, 0) == ["a", "d/b"]
    assert manifest.listing_corruption(tmp_path) is None
    for size in (4, 6):
        (tmp_path / "a").write_bytes(b"x" * size)
        assert manifest.listing_corruption(tmp_path) == f"a has {size} bytes, not 5"


def supervised(codes, newest, monkeypatch, tries=3, logged=None):
    """Returns the exit code of a supervised run, and the seconds before each restart.

    Args:
      codes: exit code of each try.
      newest: newest checkpoint before the first try and after each.
      logged: last step in the log after each try. None: each try logs one more.
    """
    log = iter(range(100) if logged is None else logged)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    steps, ends, waits = iter(newest), iter(codes), []
    supervisor = supervise.Supervisor(lambda: next(steps), lambda: next(log), tries, wait_s=2.0)
    monkeypatch.setattr(supervisor._stop, "wait", lambda seconds: waits.append(seconds))
    return supervisor.run(lambda: SimpleNamespace(wait=lambda: next(ends))), waits


@pytest.mark.parametrize(
    ("codes", "newest", "code", "waits"),
    [
        ([0], [0], 0, []),
        ([Exit.USER_ERROR], [0], Exit.USER_ERROR, []),
        ([7, 0], [0, 0], 0, [2]),
        ([1, 1, 1], [5, 5, 5, 5], 1, [2, 4]),  # nothing new in three tries
        ([-9, -9, -9], [0, 0, 0, 0], 128 + 9, [2, 4]),
        ([1, 1, 1, 1, 1], [0, 0, 10, 10, 10, 10], 1, [2, 2, 2, 4]),  # a checkpoint restarts the count
        ([1, 1, 1, 0], [0, 10, 20, 30], 0, [2, 2, 2]),
        ([1, 1, 1], [9, 3, 3, 3], 1, [2, 4]),  # an older one is none
    ],
)
def test_a_supervisor_tries_as_long_as_tries_commit_something(codes, newest, code, waits, monkeypatch):
    assert supervised(codes, newest, monkeypatch) == (code, waits)


@pytest.mark.parametrize(
    ("codes", "newest", "logged", "code", "waits"),
    [
        ([1, 1], [0, 0, 0], [0, 0], 1, [2]),  # before the first step, as with a damaged file
        ([1, 1], [8, 8, 8], [11, 11], 1, [2]),
        ([1, 1], [8, 8, 12], [12, 12], 1, [2]),  # the first try had not saved what it logged
        ([1, 1, 1, 0], [8] * 5, [11, 14, 12], 0, [2, 4, 8]),  # elsewhere each time
        ([1, -9, 1, 0], [0] * 5, [0, 0], 0, [2, 4, 8]),  # not in a row
        ([6, 6, 6, 0], [0] * 5, [], 0, [2, 4, 8]),  # another process was lost: another try may help
        ([139, 139, 0], [0] * 4, [], 0, [2, 4]),
    ],
)
def test_a_supervisor_gives_up_when_the_same_error_comes_again(codes, newest, logged, code, waits, monkeypatch):
    assert supervised(codes, newest, monkeypatch, tries=9, logged=logged) == (code, waits)


def test_a_supervisor_reads_the_last_step_of_a_damaged_log(tmp_path):
    log = tmp_path / "metrics.jsonl"
    assert supervise.last_step(log) == 0
    log.write_bytes(b'{"step": 7, "loss": 1.0}\n\xff\n{"step": 9, "event": "stopped"}\n{"step": 8, "loss": null}\n')
    assert supervise.last_step(log) == 8


def test_waits_between_tries_have_an_end(monkeypatch):
    _, waits = supervised([1] * 12, [0] * 13, monkeypatch, tries=12)
    assert waits == [2 * 2**i for i in range(8)] + [300] * 3


@pytest.mark.parametrize(
    ("moved", "heard", "ends", "said"),
    [
        (0, {1: 0}, {}, None),
        (99, {1: 59}, {}, None),
        (101, {1: 0}, {}, "no progress for train.stalled_s=100 s"),
        (0, {1: 61, 2: 0}, {}, "process 1 of 3 is lost"),
        (0, {1: 61, 2: 61}, {}, "process 1 and process 2 of 3 is lost"),
        (0, {1: 61, 2: 0}, {1: (1, "done")}, None),  # it said that it ends, and nobody waits long for that yet
    ],
)
def test_a_watch_judges_by_what_it_heard(moved, heard, ends, said, monkeypatch):
    """Checked once, at time 1000: seconds since the last progress here, and since each other process's heartbeat."""
    now, found = 1000.0, []
    watching = watchdog.Watchdog(lost_s=60, stalled_s=100)
    watching._progress, watching._count = now - moved, len(heard) + 1
    watching._heard, watching._ends = {i: now - seconds for i, seconds in heard.items()}, ends
    monkeypatch.setattr("time.monotonic", lambda: now)
    looks = iter([False, True])
    monkeypatch.setattr(watching, "_over", SimpleNamespace(wait=lambda _: next(looks)))
    monkeypatch.setattr(watching, "_end", lambda code, message: found.append((code, message)))
    watching._check_loop()
    if said is None:
        assert not found
    else:
        assert len(found) == 1
        assert said in found[0][1]
        assert found[0][0] == (Exit.STALLED if moved else Exit.PEER_LOST)
