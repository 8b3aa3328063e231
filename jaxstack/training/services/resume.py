"""The state with which a run begins or resumes: of a checkpoint, of another model, or initial."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxstack.checkpoint import manifest, run_dir, store, verify
from jaxstack.checkpoint.verify import CheckpointScan
from jaxstack.config import DistributedConfig
from jaxstack.runtime import distributed
from jaxstack.tracking.console import Console
from jaxstack.training.services import init_from
from jaxstack.training.services.checkpoint_layout import checkpoint_layout
from jaxstack.training.setup import Setup
from jaxstack.training.state import TrainState, make_state


class Resume:
    """Reads the states of a run.

    Attributes:
      saved: folder of its checkpoints.
      layout: layout of the state in a checkpoint.
    """

    def __init__(self, setup: Setup) -> None:
        """Prepares to read; nothing is read yet."""
        self._setup = setup
        self.saved = run_dir.checkpoints(Path(setup.cfg.run.dir))
        self.layout = checkpoint_layout(setup.recipe, setup.ctx, setup.abstract)

    def require_source(self) -> None:
        """Checks the folder of `run.init_from`, if the run has no checkpoint and begins with its parameters.

        Raises:
          ConfigError: the folder has no parameters.
        """
        name = self._setup.cfg.run.init_from
        if name and not manifest.steps(self.saved):
            init_from.find_source(name, "run.init_from")

    def newest(self, console: Console) -> CheckpointScan:
        """Returns the newest valid checkpoint, once all processes agree on configuration, data and partition.

        Raises:
          ConfigError: the processes differ, the data has changed, or there are checkpoints but none is valid.
        """
        cfg = self._setup.cfg
        dataset = self._setup.dataset
        distributed.assert_equal_across_processes({
            "configuration": replace(cfg, distributed=DistributedConfig()),
            "data": (dataset.fingerprint, [(len(one.train), len(one.eval)) for one in dataset.sources]),
            "tokenizer": dataset.tokenizer.to_json(),
            "pipeline.partition's file": str(self._setup.ctx.layout.pipeline),
        })  # fmt: skip
        scan = verify.scan(self.saved)
        for name, reason in scan.reasons.items():
            console.print(f"skipped the checkpoint of step {name}: {reason}", style="yellow")
        if scan.lost:
            raise scan.error(self.saved, "Restore a copy, or set another run.dir.")
        if scan.step:
            run_dir.require_same_data(self.metadata(scan.step), cfg.data, dataset.fingerprint, cfg.run.dir)
        return scan

    def metadata(self, step: int) -> dict[str, Any]:
        """Returns what was saved with a checkpoint besides its arrays."""
        return store.metadata(self.saved, step)

    def state(self, step: int) -> tuple[TrainState, int]:
        """Returns the state after a step, and the index of the next batch. Step 0 is initialized again."""
        setup = self._setup
        if step:
            state = self.layout.unpack(store.restore(self.saved, step, self.layout.abstract))
            return state, self.metadata(step)["next_batch"]
        if setup.cfg.run.init_from:
            return init_from.init_state_from(setup.cfg, setup.ctx, setup.abstract, setup.dataset.tokenizer), 0
        return make_state(setup.recipe, setup.ctx, setup.abstract), 0
