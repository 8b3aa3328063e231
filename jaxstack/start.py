"""The door: from a configuration to devices, mesh, model, data and plan. What follows takes the parts that it reads.

JAX is imported inside functions: it must start after `platform.configure`, and help and errors must not wait for it.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxstack import data
from jaxstack.checkpoint import run_dir
from jaxstack.config import SEARCHED_KEYS, Config, ConfigError, flat, with_values
from jaxstack.runtime import platform

if TYPE_CHECKING:
    from jaxstack.training.services.batches import Batches
    from jaxstack.training.setup import Setup
    from jaxstack.training.step import EvalStep, TrainStep


def resolve(cfg: Config, dataset: data.Dataset) -> "Setup":
    """Returns what a run needs before its first step. It is checked whether the run fits into memory.

    Args:
      cfg: the configuration, with the values that follow from the data, see `config.resolve`.
      dataset: what the run is trained on.

    Raises:
      ConfigError: mesh, pipeline, kernels or watched names do not fit the model or the devices.
    """
    from jaxstack import sharding
    from jaxstack.families.context import make_context
    from jaxstack.planner import estimate, memory, pipeline_costs
    from jaxstack.planner.job import Job
    from jaxstack.training.features.offload import check_memory
    from jaxstack.training.features.watch import watched_of
    from jaxstack.training.setup import Setup
    from jaxstack.training.state import Recipe, abstract_state

    mesh = sharding.make_mesh(cfg.mesh, cfg.microbatch_size)
    on_host = check_memory(cfg.train, mesh.local_devices)
    ctx = make_context(pipeline_costs.resolve_partition(cfg, mesh), mesh)
    abstract = abstract_state(Recipe.of(cfg), ctx)
    job = Job(cfg, ctx)
    warning = memory.check(job, abstract)  # before minutes of compiling
    chosen, split = estimate.resolve_split(job)
    if ctx.layout.pipeline is not None:
        pipeline = replace(ctx.layout.pipeline, split=chosen.pipeline.split)
        ctx = replace(ctx, layout=replace(ctx.layout, pipeline=pipeline))
    warnings = tuple(line for line in (warning, on_host) if line is not None)
    watched = watched_of(cfg.model, cfg.debug.patterns, cfg.data, cfg.train.dtype)
    return Setup(cfg, dataset, mesh, ctx, abstract, watched, warnings, split)


class Steps(NamedTuple):
    """The compiled steps of a run.

    Attributes:
      train: changes the state by a batch.
      watched: the same, and it measures what `debug.watch` names. `None` if nothing is watched.
      evaluate: returns the sums of a batch.
    """

    train: "TrainStep"
    watched: "TrainStep | None"
    evaluate: "EvalStep"

    def choose(self, number: int, every: int, usual: "TrainStep") -> "TrainStep":
        """Returns the function that runs the step of a number: `usual`, or in every `every`-th step `watched`."""
        return usual if self.watched is None or number % every else self.watched


def make_steps(setup: "Setup") -> Steps:
    """Returns the steps of a run: compiled, or with `debug.eager` operation by operation.

    Raises:
      ConfigError: `debug.eager` with a pipeline whose loops cannot have static trip counts.
    """
    import jax

    from jaxstack.training.assemble import jit_train_step, make_eval_step, objective_of

    cfg = setup.cfg
    make: Callable[..., Any] = jit_train_step
    if cfg.debug.eager:
        from jaxstack.debug.eager import make_eager_step

        make = make_eager_step
    watching = None if setup.watched is None else make(cfg, setup.ctx, setup.abstract, setup.watched)
    train = make(cfg, setup.ctx, setup.abstract)
    objective = objective_of(cfg.model, cfg.aim)
    evaluate = make_eval_step(cfg.model, setup.ctx, cfg.train.grad_accum, objective)
    return Steps(train, watching, jax.jit(evaluate))


def open_batches(setup: "Setup") -> "Batches":
    """Returns the batches of a run: rows of its data, or completions that it samples and learns from."""
    from jax.sharding import PartitionSpec

    from jaxstack.data.loader import DataLoader
    from jaxstack.training.services.batches import Batches

    layout = setup.ctx.layout
    if setup.cfg.learned_rewards is None:
        return Batches(DataLoader(setup.cfg, setup.dataset, layout.sharding(layout.batch)))
    from jaxstack.generate.rollouts import Rollouts

    # All processes read all prompts of a step, which is fewer rows than it has completions.
    return Rollouts.create(setup, DataLoader(setup.cfg, setup.dataset, layout.sharding(PartitionSpec())))


def open_mesh(cfg: Config, searched: Collection[str]) -> Config:
    """Returns the configuration with an open axis and the sizes that `searched` names; all other axes are 1."""
    free = [f"mesh.{axis}" for axis in cfg.mesh.sizes if f"mesh.{axis}" not in searched]
    first = "mesh.data" if "mesh.data" in free else next(iter(free), None)
    opened = f"mesh.{cfg.mesh.open_axis}" in searched  # by a flag
    return with_values(cfg, {key: -1 if key == first and not opened else 1 for key in free})


def earlier_mesh(cfg: Config, searched: Collection[str]) -> Config | None:
    """Returns the configuration with the mesh of the earlier part of the run, or None.

    The mesh is kept if it is closed, if it has what flags set, and if the configuration allows it.
    """
    earlier = run_dir.earlier_config(Path(cfg.run.dir))
    if earlier is None or earlier.mesh.open_axis is not None:
        return None
    before = flat(earlier)
    now = flat(cfg)
    if any(before[key] != now[key] for key in searched):
        return None
    try:
        return with_values(cfg, {key: before[key] for key in SEARCHED_KEYS})
    except ConfigError:
        return None


def show(cfg: Config, searched: Collection[str] | None = None) -> None:
    """Prints the sharding of every parameter, and the bytes of the state on each device. Nothing is computed.

    `searched` is the argument of `train.main`. The mesh of an earlier part of the run is not read.
    """
    cfg = data.resolve_from_data(cfg)
    if searched is not None:
        cfg = open_mesh(cfg, searched)
    platform.configure(cfg.mesh, cfg.microbatch_size if searched is None else 0)

    from jaxstack import families, sharding
    from jaxstack.families.context import make_context
    from jaxstack.models import params
    from jaxstack.planner import auto_mesh
    from jaxstack.training.state import Recipe, abstract_state

    if searched is not None:
        cfg, line = auto_mesh.choose(cfg, searched, kept=None)
        print(line)
    mesh = sharding.make_mesh(cfg.mesh, cfg.microbatch_size)
    state = abstract_state(Recipe.of(cfg), make_context(cfg, mesh))
    declared = params.flat_spec(families.spec(cfg.model))
    leaves, specs = sharding.shardings_of(state.params)
    leaves = {path: leaf._replace(axes=declared[path].axes) for path, leaf in leaves.items()}
    print(sharding.summarize(leaves, specs, mesh))
    optimizer = sharding.summarize(*sharding.shardings_of(state.opt_state), mesh).splitlines()[-1]
    print(f"optimizer state: {optimizer}")
