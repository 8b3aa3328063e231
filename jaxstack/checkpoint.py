"""Checkpoints of the train state, by orbax: asynchronous, committed by rename, the newest few kept."""

from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from jaxstack.config import CheckpointConfig, ConfigError
from jaxstack.tree import flatten


class Checkpoints:
    """The checkpoints of one run, `DIR/<step>/`. Use as a context manager: leaving it waits for the last save."""

    def __init__(self, cfg: CheckpointConfig, directory: Path) -> None:
        self._orbax = ocp.training.Checkpointer(
            directory.absolute(),
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),  # the loop decides when
            preservation_policy=ocp.training.preservation_policies.LatestN(cfg.keep),
            cleanup_tmp_directories=True,
        )
        self._directory = directory
        self._pending: Any = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        self._orbax.close()

    @property
    def latest(self) -> int | None:
        """Step of the newest committed checkpoint."""
        newest = self._orbax.latest
        return None if newest is None else newest.step

    def save(self, step: int, state: Any) -> None:
        """Starts writing the state; returns once it is copied, so that the next step may reuse its buffers."""
        self.wait()
        if step != self.latest:
            self._pending = self._orbax.save_async(step, state)

    def wait(self) -> None:
        """Until the save under way is committed; raises what made it fail."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def restore(self, step: int, abstract_state: Any) -> Any:
        """The state of `step`, laid out as `abstract_state` says; a leaf that is `...` there is not read.

        Raises:
          ConfigError: the checkpoint holds other arrays than this configuration makes; names the first that differ.
        """
        # The shapes are compared here since orbax would cast a wrong dtype in silence.
        saved, wanted = _kinds(self._orbax.metadata(step).metadata), _kinds(abstract_state)
        differ = [p for p in sorted(saved.keys() | wanted.keys()) if wanted.get(p) not in (..., saved.get(p))]
        differ.sort(key=lambda path: not path.startswith("params/"))
        if differ:
            shown = "; ".join(
                f"{path} is {saved.get(path, 'absent')}, not {wanted.get(path, 'absent')}" for path in differ[:3]
            )
            raise ConfigError(
                f"the checkpoint {self._directory / str(step)} does not fit this configuration in {len(differ)} "
                f"arrays ({shown}); restore the settings in config.yaml beside it, or name another run.dir"
            )
        return self._orbax.load(step, abstract_state)


def _kinds(tree: Any) -> dict[str, Any]:
    """Shape and dtype of every leaf, by path."""
    return {p: leaf if leaf is ... else (tuple(leaf.shape), str(leaf.dtype)) for p, leaf in flatten(tree).items()}
