"""Checkpoints of the train state, by orbax: written beside the training, committed by rename, sealed, kept by policy.

A step counts once its seal is written (`jaxstack/checkpoint/manifest.py`); before that nothing older is deleted. All
processes of a run share the hashing: each sums the files that it wrote, and before a load each verifies its share of
what is loaded.
"""

import contextlib
import importlib.metadata
import itertools
import json
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tensorstore
from orbax.checkpoint import v1 as ocp

import jaxstack
from jaxstack.checkpoint import manifest as seal
from jaxstack.common.errors import Exit, RunError
from jaxstack.common.tree import flatten
from jaxstack.config import CheckpointConfig, ConfigError
from jaxstack.runtime import distributed

_PROBE_S = 10
"""Seconds between looks at the disk while a save is waited for."""

_PATIENCE_S = 10**7
"""What orbax waits for a save, by the wall clock: large models are slow, and clocks are set. That something is wrong is
told by the disk, and by `train.stalled_s`."""

_CHUNK = 16 << 20
"""Bytes of an array that are compressed as one: who reads it need not hold all of it compressed, and uses all cores."""

_FILE = 256 << 20
"""Bytes of a file of arrays, about: files are what threads and processes share when they hash, and what a load of some
arrays need not verify. Orbax would write one of 2 GB."""

_AT_A_TIME = 256 << 20
"""Bytes of arrays that are read in one go, even where the largest is smaller: each go opens the checkpoint anew."""


@dataclass(frozen=True)
class CheckpointScan:
    """What a run's checkpoints hold.

    Attributes:
      step: the newest whose seal holds; None where there is none.
      skipped: newer steps, and why each must not be used.
      lost: nothing can be used of what was there: more than a first checkpoint that a crash kept from being finished.
    """

    step: int | None
    skipped: Mapping[int, str]
    lost: bool = False

    def nothing_whole(self, directory: Path, fix: str) -> ConfigError:
        """The error of who needs a step, and there is none."""
        why = "; ".join(f"step {step}: {reason}" for step, reason in self.skipped.items())
        return ConfigError(f"{directory} holds no whole checkpoint{f' ({why})' * bool(why)}; {fix}")


def scan(directory: Path, abstract_state: Any = None) -> CheckpointScan:
    """Looks for the newest step that may be loaded. All processes of a run call it alike.

    Process 0 goes by seals, lists of files and their sizes; of the step that it names all verify the bytes together. If
    they have changed, the next older step is tried.

    Args:
      abstract_state: what is going to be loaded, as for `restore`; by default everything.

    Returns:
      The same step on all processes. Process 0 alone knows the steps whose seals, files or sizes did not fit.

    Raises:
      ConfigError: the processes do not see the same directory.
    """
    skipped: dict[int, str] = {}
    while True:
        step = distributed.broadcast_from_process_0(_likely(directory, skipped) if jax.process_index() == 0 else 0)
        if step < 0:
            return CheckpointScan(None, skipped, lost=step == _LOST)
        distributed.assert_equal_across_processes(
            {f"checkpoint {directory / str(step)}": (directory / str(step)).is_dir()}
        )
        why = _changed(directory / str(step), abstract_state)
        if why is None:
            return CheckpointScan(step, skipped)
        skipped[step] = why


_NONE, _LOST = -1, -2


def _likely(directory: Path, skipped: dict[int, str]) -> int:
    """Returns the newest step whose seal, files and sizes fit, and records in `skipped` why newer ones do not.
    Returns `_NONE` or `_LOST` if there is no such step."""
    for step in seal.steps(directory):
        if step not in skipped:
            why = seal.misfit(directory / str(step))
            if why is None:
                return step
            skipped[step] = why
    begun = [step for step in skipped if any((directory / str(step)).iterdir())]
    return _LOST if seal.sealed(directory) or len(begun) > 1 else _NONE


def corruption(directory: Path, step: int, abstract_state: Any = None) -> str | None:
    """Returns why a step must not be loaded, None if it may be. All processes call it alike, and each hashes its share.

    Args:
      abstract_state: what is going to be loaded, as for `restore`; by default everything. Files that hold only arrays
        which are not read are not hashed.
    """
    path = directory / str(step)
    # One looks at the list of files: thousands of processes that do would keep a file system busy.
    why = seal.misfit(path) if jax.process_index() == 0 else None
    return distributed.objection(why) or _changed(path, abstract_state)


def _changed(checkpoint: Path, abstract_state: Any) -> str | None:
    """Returns why the files to be loaded differ from those that were sealed; all processes return the same."""
    try:
        wanted, unread = seal.read(checkpoint), _unread(checkpoint, abstract_state)
        wanted = {name: sums for name, sums in wanted.items() if name not in unread}
        why = seal.changed(checkpoint, seal.share(wanted, jax.process_index(), jax.process_count()))
    except (OSError, ValueError) as error:
        why = f"its seal cannot be read ({error})"
    return distributed.objection(why)


def _unread(checkpoint: Path, abstract_state: Any) -> set[str]:
    """The files of a checkpoint that hold nothing but arrays which are `...` in the abstract state."""
    skipped = {name.replace("/", ".") for name, leaf in flatten(abstract_state).items() if leaf is ...}
    if not skipped:
        return set()
    try:
        stored = _stored(checkpoint / _STATE)
    except ValueError:  # the index is damaged, so it cannot say; all files are verified then, and the index is one
        return set()
    read = {file for array, file in stored if array not in skipped}
    return {f"{_STATE}/{file}" for _, file in stored if file not in read}


_STATE = "state"
"""Orbax's name for the one tree that a checkpoint of ours holds."""


def _stored(store: Path) -> set[tuple[str, str]]:
    """Which arrays have bytes in which files, by the index of the store (OCDBT). The index's own files count as an
    array without a name."""
    base = tensorstore.KvStore.open({"driver": "file", "path": f"{store.absolute()}/"}).result()
    manifest = tensorstore.ocdbt.dump(base).result()
    nodes, stored = [(manifest["versions"][-1]["root"]["location"], b"")], set()
    while nodes:
        location, prefix = nodes.pop()
        stored.add(("", _file(location)))
        node = tensorstore.ocdbt.dump(base, node=location).result()
        for entry in node["entries"]:
            if node["height"]:
                nodes.append((entry["location"], prefix + entry["subtree_common_prefix"]))
            elif "indirect_value" in entry:
                stored.add(((prefix + entry["key"]).decode().split("/")[0], _file(entry["indirect_value"])))
    return stored


def _file(location: str) -> str:
    """Of `value:ocdbt.process_0/:d/42a2c9b5:0:1938302`, which is kind, folder, file, offset and length."""
    _, folder, file, _, _ = location.split(":")
    return folder + file


def latest_valid_step(directory: Path, abstract_state: Any = None) -> int:
    """The step of `scan`, for those who only read.

    Raises:
      ConfigError: there is none.
    """
    found = scan(directory, abstract_state)
    if found.step is None:
        raise found.nothing_whole(directory, "let that run reach one")
    return found.step


def metadata(directory: Path, step: int) -> dict[str, Any]:
    """What `Checkpoints.save` was given beside the state."""
    return dict(ocp.metadata(directory.absolute() / str(step)).custom_metadata)


def restore(directory: Path, step: int, abstract_state: Any) -> Any:
    """The state of `step`, laid out as `abstract_state` says; a leaf that is `...` there is not read.

    Beyond the arrays themselves, a host holds about 1.5 times the largest one (or 256 MB) while it reads: what is read,
    and what is still compressed of it.

    Raises:
      ConfigError: the checkpoint holds other arrays than this configuration makes; names all that differ.
    """
    path = directory.absolute() / str(step)
    # The shapes are compared here since orbax would cast a wrong dtype in silence.
    saved, wanted = _kinds(ocp.metadata(path).metadata), _kinds(abstract_state)
    differ = [name for name in sorted(saved.keys() | wanted.keys()) if wanted.get(name) not in (..., saved.get(name))]
    differ.sort(key=lambda name: not name.startswith("params/"))
    if differ:
        shown = "; ".join(f"{n} is {saved.get(n, 'absent')}, not {wanted.get(n, 'absent')}" for n in differ)
        raise ConfigError(
            f"the checkpoint {directory / str(step)} does not fit this configuration in {len(differ)} arrays; restore "
            f"the settings in config.yaml beside it, or name another run.dir ({shown})"
        )
    leaves, tree = jax.tree.flatten(abstract_state)
    for part in _parts([0 if leaf is ... else math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves]):
        wanted_now = jax.tree.unflatten(tree, [leaf if i in part else ... for i, leaf in enumerate(leaves)])
        # Orbax does not wait for the copies to devices, and the memory it read into lives as long as these take.
        read = jax.block_until_ready(jax.tree.leaves(ocp.load(path, wanted_now)))
        leaves = [read[i] if i in part else leaf for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(tree, leaves)


def _parts(sizes: Sequence[int]) -> list[range]:
    """Neighbours to read in one go: as much as the largest has, or `_AT_A_TIME`."""
    limit, parts, total = max([_AT_A_TIME, *sizes]), [range(0)], 0
    for i, size in enumerate(sizes):
        total += size
        if total > limit:
            parts.append(range(i, i))
            total = size
        parts[-1] = range(parts[-1].start, i + 1)
    return parts


def versions() -> dict[str, str]:
    """Of Python and of the libraries that decide what a state means."""
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    theirs = {name: importlib.metadata.version(name) for name in names}
    return {"python": sys.version.split()[0], "jaxstack": jaxstack.__version__, **theirs}


class Checkpoints:
    """Writes the checkpoints of one run, `DIR/<step>/`. As a context manager: leaving it waits for the last save.

    All processes of a run make one and call it alike; process 0 alone seals and deletes.
    """

    def __init__(self, cfg: CheckpointConfig, directory: Path) -> None:
        self._cfg, self._directory = cfg, directory
        self._background = ThreadPoolExecutor(1, thread_name_prefix="jaxstack-checkpoint")
        self._pending: Future[None] | None = None
        self._step: int | None = None
        # A save that fails says so in `wait`, in one line; orbax's threads would each print a traceback beside it.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self.scores: dict[int, float] = {}
        """Held-out loss after a step, for `checkpoint.keep_best`."""

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.wait()
        except RunError as error:
            if kind is None:
                raise
            print(f"beside the error that follows: {error}", file=sys.stderr)  # neither may hide the other
        finally:
            self._background.shutdown(wait=False)

    def save(self, step: int, state: Any, metadata: Mapping[str, Any]) -> None:
        """Starts writing the state; returns once it is copied, so that the next step may reuse its buffers.

        Args:
          metadata: what belongs to the state and is no array, as JSON.

        Raises:
          RunError: an earlier save failed, or the state holds numbers that are not finite, which is never saved.
        """
        self.wait()
        if not _finite(state):
            raise RunError(
                Exit.DIVERGED,
                f"the state after step {step} holds numbers that are not finite, so it was not saved; {self._stands()}"
                f": lower optim.lr, or look at the data of the last steps",
            )
        self._step = step
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            path = self._directory.absolute() / str(step)
            saving = ocp.Context()
            saving.asynchronous.timeout_secs = _PATIENCE_S
            saving.array.saving.storage_options.chunk_byte_size = _CHUNK
            saving.array.saving.ocdbt_target_data_file_size = _FILE
            with saving:
                response = ocp.save_async(path, state, custom_metadata=dict(metadata))
        except jax.errors.JaxRuntimeError:
            raise  # devices and other processes are not the disk
        except Exception as error:
            raise self._failed(error) from error
        self._pending = self._background.submit(self._finish, step, next(_saves), response)

    def wait(self) -> None:
        """Until the save under way is committed and sealed.

        Raises:
          RunError: it failed.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            try:
                while not wait([pending], timeout=_PROBE_S).done:
                    self._probe()  # orbax's threads may wait for each other long after the disk has failed
                pending.result()
            except jax.errors.JaxRuntimeError:
                raise
            except Exception as error:
                raise self._failed(error) from error

    def _finish(self, step: int, save: int, response: Any) -> None:
        response.result()  # every process has written, and process 0 has committed
        path, me = self._directory / str(step), jax.process_index()
        mine = seal.sums_of(path, seal.written_by(path, me))
        everyones = distributed.to_first(f"sums/{save}", json.dumps(mine), _PATIENCE_S)
        if me == 0:
            seal.write(
                path, {name: (size, sum) for said in everyones for name, (size, sum) in json.loads(said).items()}
            )
        distributed.meet(f"sealed/{save}", _PATIENCE_S)
        if me == 0:
            for old in self._superfluous(seal.sealed(self._directory)):
                seal.remove(self._directory / str(old))

    def _superfluous(self, steps: list[int]) -> list[int]:
        """Of the sealed steps, newest first, those that no policy keeps."""
        kept = set(steps[: self._cfg.keep])
        if self._cfg.keep_every:
            kept |= {step for step in steps if step % self._cfg.keep_every == 0}
        scored = sorted((self.scores[step], step) for step in steps if step in self.scores)
        kept |= {step for _, step in scored[: self._cfg.keep_best]}
        return [step for step in steps if step not in kept]

    def _failed(self, error: Exception) -> RunError:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        try:
            self._probe()
        except OSError as disk:  # its own word; the store's may be an echo
            reason = str(disk.strerror)
        return RunError(
            Exit.NOT_SAVED,
            f"the checkpoint of step {self._step} could not be written: {reason}; {self._stands()}: make room or mend "
            f"the disk, and the same command goes on from there",
        )

    def _probe(self) -> None:
        """Writes a little where checkpoints go, and raises what is wrong with the disk."""
        probe = self._directory / ".probe"
        try:
            probe.write_bytes(bytes(1 << 20))
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()

    def _stands(self) -> str:
        steps = seal.sealed(self._directory)
        return f"step {steps[0]} in {self._directory} stands" if steps else "no earlier step was saved"


_saves = itertools.count()
"""Numbers the saves of this process, which all processes do alike: a step may be saved twice, after going back."""


@jax.jit
def _finite(state: Any) -> jax.Array:
    leaves = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all()


def _kinds(tree: Any) -> dict[str, Any]:
    """Shape and dtype of every leaf, by path."""
    return {p: leaf if leaf is ... else (tuple(leaf.shape), str(leaf.dtype)) for p, leaf in flatten(tree).items()}
