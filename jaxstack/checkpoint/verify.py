"""Finds the newest valid checkpoint: one whose files are as its manifest says.

All processes of a run share the work: each hashes its share of the files that will be loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import jax
import tensorstore

from jaxstack.checkpoint import manifest
from jaxstack.common import files
from jaxstack.common.tree import PyTree, flatten
from jaxstack.config import ConfigError
from jaxstack.runtime import distributed


@dataclass(frozen=True)
class CheckpointScan:
    """The result of a search for a valid checkpoint.

    Attributes:
      step: the newest valid step, or `None` if there is none.
      skipped: newer steps, and why each is not valid.
      lost: whether there were complete checkpoints, but none is valid. A first checkpoint that a crash interrupted does
        not count.
      misnamed: directories that are skipped because no step has their names, and why; on process 0 only.
    """

    step: int | None
    skipped: Mapping[int, str]
    lost: bool = False
    misnamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def reasons(self) -> dict[str, str]:
        """The directories that are skipped, by their names, each with the reason."""
        return {str(step): reason for step, reason in self.skipped.items()} | dict(self.misnamed)

    def error(self, directory: Path, fix: str) -> ConfigError:
        """Returns the error to raise if a valid step is needed and there is none.

        Args:
          directory: the directory that was searched.
          fix: what the user can do.
        """
        why = "; ".join(f"step {name}: {reason}" for name, reason in self.reasons.items())
        return ConfigError(f"{directory} does not hold a valid checkpoint{f' ({why})' * bool(why)}. {fix}")


def scan(directory: Path, abstract_state: PyTree = None) -> CheckpointScan:
    """Searches for the newest valid step. All processes of a run call this with the same arguments.

    Process 0 compares manifests, lists of files and sizes. All processes together then hash the files of the step that
    it selects. If a file has changed, the next older step is tried.

    Args:
      abstract_state: what will be loaded, as for `store.restore`. `None` means everything.

    Returns:
      The same step on all processes. Steps that fail the first comparison are listed in `skipped` on process 0 only.

    Raises:
      ConfigError: the processes do not see the same directory.
    """
    skipped: dict[int, str] = {}
    misnamed = manifest.misnamed_steps(directory) if jax.process_index() == 0 else {}
    while True:
        step = distributed.broadcast_from_process_0(
            _newest_candidate(directory, skipped) if jax.process_index() == 0 else 0
        )
        if step < 0:
            return CheckpointScan(None, skipped, lost=step == _LOST, misnamed=misnamed)
        distributed.assert_equal_across_processes(
            {f"checkpoint {directory / str(step)}": (directory / str(step)).is_dir()}
        )
        why = _content_corruption(directory / str(step), abstract_state)
        if why is None:
            return CheckpointScan(step, skipped, misnamed=misnamed)
        skipped[step] = why


_NONE = -1
_LOST = -2


def _newest_candidate(directory: Path, skipped: dict[int, str]) -> int:
    """Returns the newest step whose files and sizes match its manifest, or `_NONE` or `_LOST` if there is none.

    Adds newer steps to `skipped`, with the reason.
    """
    for step in manifest.steps(directory):
        if step not in skipped:
            why = manifest.listing_corruption(directory / str(step))
            if why is None:
                return step
            skipped[step] = why
    started = [step for step in skipped if not files.is_empty(directory / str(step))]
    misnamed = any((directory / name / manifest.NAME).is_file() for name in manifest.misnamed_steps(directory))
    return _LOST if misnamed or manifest.complete_steps(directory) or len(started) > 1 else _NONE


def corruption(directory: Path, step: int, abstract_state: PyTree = None) -> str | None:
    """Returns why a step must not be loaded, or `None` if it is valid.

    All processes of a run call this with the same arguments, and each hashes its share of the files.

    Args:
      step: step to verify.
      abstract_state: what will be loaded, as for `store.restore`. `None` means everything. Files whose arrays are not
        loaded are not hashed.
    """
    path = directory / str(step)
    # Only process 0 lists the files: thousands of processes would overload a file system.
    why = manifest.listing_corruption(path) if jax.process_index() == 0 else None
    return distributed.first_reason(why) or _content_corruption(path, abstract_state)


def _content_corruption(checkpoint: Path, abstract_state: PyTree) -> str | None:
    """Returns why files to be loaded differ from the manifest, or `None`; the same on all processes."""
    try:
        wanted = manifest.read(checkpoint)
        unread = _unread(checkpoint, abstract_state)
        wanted = {name: digest for name, digest in wanted.items() if name not in unread}
        share = manifest.share(wanted, jax.process_index(), jax.process_count())
        why = manifest.content_corruption(checkpoint, share)
    except (OSError, ValueError) as error:
        why = f"its manifest cannot be read ({error})"
    return distributed.first_reason(why)


def _unread(checkpoint: Path, abstract_state: PyTree) -> set[str]:
    """Returns the files that hold only arrays which are `...` in the abstract state."""
    skipped = {name.replace("/", ".") for name, leaf in flatten(abstract_state).items() if leaf is ...}
    if not skipped:
        return set()
    try:
        stored = _stored(checkpoint / _STATE)
    except ValueError:  # the index is damaged: verify all files, including the index
        return set()
    read = {file for array, file in stored if array not in skipped}
    return {f"{_STATE}/{file}" for _, file in stored if file not in read}


_STATE = "state"
"""Orbax's name for the only tree of a checkpoint."""


def _stored(store: Path) -> set[tuple[str, str]]:
    """Returns pairs of an array and a file that holds bytes of it, by the index of the store (OCDBT).

    Files of the index itself are paired with an empty name.
    """
    base = tensorstore.KvStore.open({"driver": "file", "path": f"{store.absolute()}/"}).result()
    index = tensorstore.ocdbt.dump(base).result()
    nodes = [(index["versions"][-1]["root"]["location"], b"")]
    stored = set()
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
    """Returns the file of a location, `value:ocdbt.process_0/:d/42a2c9b5:0:1938302`.

    Its parts are kind, folder, file, offset and length.
    """
    _, folder, file, _, _ = location.split(":")
    return folder + file


def latest_valid_step(directory: Path, abstract_state: PyTree = None) -> int:
    """Returns the newest valid step of `scan`, for programs that need one.

    Raises:
      ConfigError: there is no valid step.
    """
    found = scan(directory, abstract_state)
    if found.step is None:
        damaged = "Restore them from a copy, or train another run."
        raise found.error(directory, damaged if found.lost else "Train that run until it has saved one.")
    return found.step
