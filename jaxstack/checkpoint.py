"""Checkpoints of the train state, by orbax: written beside the training, committed by rename, sealed, kept by policy.

A step counts once its seal is written (`jaxstack/seal.py`); before that nothing older is deleted.
"""

import contextlib
import importlib.metadata
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
from orbax.checkpoint import v1 as ocp

import jaxstack
from jaxstack import seal
from jaxstack.config import CheckpointConfig, ConfigError
from jaxstack.exits import Exit, RunError
from jaxstack.tree import flatten

_PROBE_S = 10
"""Seconds between looks at the disk while a save is waited for."""

_PATIENCE_S = 10**7
"""What orbax waits for a save, by the wall clock: large models are slow, and clocks are set. That something is wrong is
told by the disk, and by `train.stalled_s`."""

_CHUNK = 16 << 20
"""Bytes of an array that are compressed as one: who reads it need not hold all of it compressed, and uses all cores."""

_AT_A_TIME = 256 << 20
"""Bytes of arrays that are read in one go, even where the largest is smaller: each go opens the checkpoint anew."""


@dataclass(frozen=True)
class Found:
    """What a run's checkpoints hold.

    Attributes:
      step: the newest whose seal holds; None where there is none.
      passed_over: newer steps, and why each must not be used.
      lost: nothing can be used of what was there: more than a first checkpoint that a crash kept from being finished.
    """

    step: int | None
    passed_over: Mapping[int, str]
    lost: bool = False

    def nothing_whole(self, directory: Path, fix: str) -> ConfigError:
        """The error of who needs a step, and there is none."""
        why = "; ".join(f"step {step}: {reason}" for step, reason in self.passed_over.items())
        return ConfigError(f"{directory} holds no whole checkpoint{f' ({why})' * bool(why)}; {fix}")


def find(directory: Path) -> Found:
    """Reads the checkpoints of `directory`, newest first, until the seal of one holds."""
    passed_over: dict[int, str] = {}
    for step in seal.steps(directory):
        why = seal.broken(directory / str(step))
        if why is None:
            return Found(step, passed_over)
        passed_over[step] = why
    begun = [step for step in passed_over if any((directory / str(step)).iterdir())]
    return Found(None, passed_over, lost=bool(seal.sealed(directory)) or len(begun) > 1)


def newest(directory: Path) -> int:
    """The step of `find`, for those who only read.

    Raises:
      ConfigError: there is none.
    """
    found = find(directory)
    if found.step is None:
        raise found.nothing_whole(directory, "let that run reach one")
    return found.step


def facts(directory: Path, step: int) -> dict[str, Any]:
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

    All processes of a run make one and call it alike; the `first` alone seals and deletes.
    """

    def __init__(self, cfg: CheckpointConfig, directory: Path, first: bool = True) -> None:
        self._cfg, self._directory, self._first = cfg, directory, first
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

    def save(self, step: int, state: Any, facts: Mapping[str, Any]) -> None:
        """Starts writing the state; returns once it is copied, so that the next step may reuse its buffers.

        Args:
          facts: what belongs to the state and is no array, as JSON.

        Raises:
          RunError: an earlier save failed, or the state holds numbers that are not finite, which is never saved.
        """
        self.wait()
        if not _finite(state):
            raise RunError(
                Exit.BAD_STEPS,
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
            with saving:
                response = ocp.save_async(path, state, custom_metadata=dict(facts))
        except jax.errors.JaxRuntimeError:
            raise  # devices and other processes are not the disk
        except Exception as error:
            raise self._failed(error) from error
        self._pending = self._background.submit(self._finish, step, response)

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

    def _finish(self, step: int, response: Any) -> None:
        response.result()
        if self._first:
            seal.write(self._directory / str(step))
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


@jax.jit
def _finite(state: Any) -> jax.Array:
    leaves = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all()


def _kinds(tree: Any) -> dict[str, Any]:
    """Shape and dtype of every leaf, by path."""
    return {p: leaf if leaf is ... else (tuple(leaf.shape), str(leaf.dtype)) for p, leaf in flatten(tree).items()}
