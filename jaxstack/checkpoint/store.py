"""Checkpoints of the train state: written by orbax in the background, committed by a rename, and deleted by a policy.

A step is complete once its manifest is written (`jaxstack/checkpoint/manifest.py`). Until then, no older step is
deleted. Each process of a run hashes the files that it wrote. `jaxstack/checkpoint/verify.py` finds the step to load.
"""

import contextlib
import importlib.metadata
import itertools
import json
import logging
import math
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from jaxstack.checkpoint import manifest
from jaxstack.checkpoint.run_dir import Metadata
from jaxstack.common import files, version
from jaxstack.common.counts import plural
from jaxstack.common.errors import Exit, RunError
from jaxstack.common.tree import PyTree, flatten
from jaxstack.config import CheckpointConfig, ConfigError
from jaxstack.runtime import distributed

_PROBE_S = 10
"""Seconds between tests of the disk while waiting for a save."""

_TIMEOUT_S = 10**7
"""Seconds that orbax waits for a save, by the wall clock. The limit is high: large models are slow, and clocks get
adjusted. A failing disk, or `train.stalled_s`, ends the wait earlier."""

_CHUNK = 16 << 20
"""Bytes of an array that are compressed together. Readers hold few of them in memory, and decompress in parallel."""

_FILE = 256 << 20
"""Approximate bytes of a file of arrays. Threads and processes hash whole files, and a load of some arrays skips whole
files. The default of orbax is 2 GB."""

_AT_A_TIME = 256 << 20
"""Minimum bytes of arrays that are read at a time, since each read opens the checkpoint again."""


def metadata(directory: Path, step: int) -> Metadata:
    """Returns the metadata of a checkpoint."""
    return dict(ocp.metadata(directory.absolute() / str(step)).custom_metadata)


def restore(directory: Path, step: int, abstract_state: PyTree) -> PyTree:
    """Returns the state of a step, sharded as in `abstract_state`.

    While it reads, a host needs memory for the arrays, and about 1.5 times the largest array or 256 MB more: for the
    part that it has just read, and the compressed form of this part.

    Args:
      step: step to read.
      abstract_state: shapes, dtypes and shardings. A leaf that is `...` is not read.

    Raises:
      ConfigError: arrays of the checkpoint do not have the shapes and dtypes of `abstract_state`; all are named.
    """
    path = directory.absolute() / str(step)
    # Orbax would silently cast a wrong dtype, so compare first.
    saved = _shapes_and_dtypes(ocp.metadata(path).metadata)
    wanted = _shapes_and_dtypes(abstract_state)
    differ = [name for name in sorted(saved.keys() | wanted.keys()) if wanted.get(name) not in (..., saved.get(name))]
    differ.sort(key=lambda name: not name.startswith("params/"))
    if differ:
        shown = "; ".join(f"{n} is {saved.get(n, 'absent')}, not {wanted.get(n, 'absent')}" for n in differ)
        raise ConfigError(
            f"the checkpoint {directory / str(step)} does not fit this configuration in {plural(len(differ), 'array')} "
            f"({shown}). Use the settings of config.yaml in the run directory, or set another run.dir."
        )
    leaves, tree = jax.tree.flatten(abstract_state)
    for part in _read_groups([0 if leaf is ... else math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves]):
        wanted_now = jax.tree.unflatten(tree, [leaf if i in part else ... for i, leaf in enumerate(leaves)])
        # Orbax does not wait for copies to devices, and its host memory is in use until they are done.
        read = jax.block_until_ready(jax.tree.leaves(ocp.load(path, wanted_now)))
        leaves = [read[i] if i in part else leaf for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(tree, leaves)


def _read_groups(sizes: Sequence[int]) -> list[range]:
    """Groups consecutive arrays to read together: at most the size of the largest array, or `_AT_A_TIME`."""
    limit = max([_AT_A_TIME, *sizes])
    parts = [range(0)]
    total = 0
    for i, size in enumerate(sizes):
        total += size
        if total > limit:
            parts.append(range(i, i))
            total = size
        parts[-1] = range(parts[-1].start, i + 1)
    return parts


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries on which the meaning of a state depends."""
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    libraries = {name: importlib.metadata.version(name) for name in names}
    return {"python": sys.version.split()[0], "jaxstack": version.__version__, **libraries}


class Checkpoints:
    """Writes the checkpoints of a run to `DIRECTORY/<step>/`. Leaving it as a context manager waits for the last save.

    All processes of a run create one and call it with the same arguments. Only process 0 writes manifests and deletes.

    Attributes:
      scores: held-out loss by step, for `checkpoint.keep_best`.
    """

    def __init__(self, cfg: CheckpointConfig, directory: Path) -> None:
        """Prepares to save; `directory` is created by the first save."""
        self._cfg = cfg
        self._directory = directory
        self._background = ThreadPoolExecutor(1, thread_name_prefix="jaxstack-checkpoint")
        self._pending: Future[None] | None = None
        self._step: int | None = None
        # `wait` reports a failed save in one line; orbax's threads would print a traceback each.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self.scores: dict[int, float] = {}

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.wait()
        except RunError as error:
            if kind is None:
                raise
            print(f"a save failed too: {error}", file=sys.stderr)  # neither error may hide the other
        finally:
            self._background.shutdown(wait=False)

    def save(self, step: int, state: PyTree, metadata: Metadata) -> None:
        """Starts to write the state. Returns once it is copied, so that the next step may reuse its buffers.

        Args:
          metadata: JSON to store with the state.

        Raises:
          RunError: an earlier save failed, or the state is not finite. Such a state is never saved.
        """
        self.wait()
        if not _finite(state):
            raise RunError(
                Exit.DIVERGED,
                f"the state after step {step} is not finite, so it was not saved ({self._newest()}). Lower optim.lr, "
                f"or check the data of the last steps.",
            )
        self._step = step
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            for folder in (self._directory.parent, self._directory.parent.parent):
                with contextlib.suppress(OSError):  # of a folder above the run, which may be another user's
                    files.sync_directory(folder)  # a power failure could take the new directory away
            path = self._directory.absolute() / str(step)
            options = ocp.Context()
            options.asynchronous.timeout_secs = _TIMEOUT_S
            options.array.saving.storage_options.chunk_byte_size = _CHUNK
            options.array.saving.ocdbt_target_data_file_size = _FILE
            with options:
                response = ocp.save_async(path, state, custom_metadata=dict(metadata))
        except jax.errors.JaxRuntimeError:
            raise  # a failure of a device or process, not of the disk
        except Exception as error:
            raise self._failed(error) from error
        self._pending = self._background.submit(self._finish, step, next(_saves), response)

    def wait(self) -> None:
        """Waits until the current save is complete, if there is one.

        Raises:
          RunError: the save failed.
        """
        if self._pending is not None:
            pending = self._pending
            self._pending = None
            try:
                while not wait([pending], timeout=_PROBE_S).done:
                    self._probe()  # after a disk failure, orbax's threads may wait for each other
                pending.result()
            except jax.errors.JaxRuntimeError:
                raise
            except Exception as error:
                raise self._failed(error) from error

    def _finish(self, step: int, save: int, response: Any) -> None:
        index = jax.process_index()
        with manifest.EarlyDigests(self._directory, step, index) as early:
            response.result()  # every process has written, and process 0 has committed
        path = self._directory / str(step)
        local = manifest.hash_files(path, manifest.written_by(path, index), early.known)
        gathered = distributed.gather_to_process_0(f"digests/{save}", json.dumps(local), _TIMEOUT_S)
        if index == 0:
            digests = [(name, tuple(digest)) for text in gathered for name, digest in json.loads(text).items()]
            manifest.write(path, dict(digests))
        distributed.coordinator_barrier(f"complete/{save}", _TIMEOUT_S)
        if index == 0:
            for old in self._expired(manifest.complete_steps(self._directory)):
                manifest.remove(self._directory / str(old))

    def _expired(self, steps: list[int]) -> list[int]:
        """Returns the steps that no policy keeps.

        Args:
          steps: all complete steps, newest first.
        """
        kept = set(steps[: self._cfg.keep])
        if self._cfg.keep_every:
            kept |= {step for step in steps if step % self._cfg.keep_every == 0}
        scored = sorted((self.scores[step], step) for step in steps if math.isfinite(self.scores.get(step, math.nan)))
        kept |= {step for _, step in scored[: self._cfg.keep_best]}
        return [step for step in steps if step not in kept]

    def _failed(self, error: Exception) -> RunError:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        try:
            self._probe()
        except OSError as disk:  # this names the cause; the store's error may be a consequence
            reason = str(disk.strerror)
        return RunError(
            Exit.NOT_SAVED,
            f"the checkpoint of step {self._step} could not be written: {reason} ({self._newest()}). Free space or "
            f"repair the disk, then run the same command to resume.",
        )

    def _probe(self) -> None:
        """Writes 1 MB to the directory of the checkpoints, which raises an error if the disk has failed."""
        probe = self._directory / ".probe"
        try:
            with files.atomic_file(probe) as file:
                file.write(bytes(1 << 20))
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()

    def _newest(self) -> str:
        steps = manifest.complete_steps(self._directory)
        return f"the newest checkpoint is step {steps[0]} in {self._directory}" if steps else "no step was saved before"


_saves = itertools.count()
"""Numbers the saves, equally on all processes. The step cannot serve: after a rollback it may be saved again."""


@jax.jit
def _finite(state: PyTree) -> jax.Array:
    leaves = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all()


def _shapes_and_dtypes(tree: PyTree) -> dict[str, Any]:
    """Returns shape and dtype of every leaf by path; `...` for a leaf that is `...`."""
    return {p: leaf if leaf is ... else (tuple(leaf.shape), str(leaf.dtype)) for p, leaf in flatten(tree).items()}
