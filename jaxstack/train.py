"""Trains a decoder language model: `jaxstack train` and `python train.py` run `main`, and `train` is the loop.

JAX is imported inside functions: it must start after `platform.configure`, and help and errors must not wait for it.
"""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxstack import data
from jaxstack.checkpoint import run_dir
from jaxstack.config import SEARCHED_KEYS, Config, ConfigError, flat, resolve, with_buckets, with_values
from jaxstack.planner.job import Job
from jaxstack.runtime import compile_cache, distributed, launchers, platform
from jaxstack.tracking import sinks

if TYPE_CHECKING:
    from jaxstack.models.context import Context
    from jaxstack.tracking.step_log import LoopState
    from jaxstack.training.features.watch import Watched
    from jaxstack.training.services.run import Run
    from jaxstack.training.state import TrainState


def main(cfg: Config, searched: Collection[str] | None = None, preflight: bool = False) -> None:
    """Trains with a configuration that was just read. Nothing is written before everything is checked.

    Args:
      cfg: the configuration.
      searched: for `--mesh=auto`, the keys that flags set, which the search for a mesh keeps. None means no search.
      preflight: check the machines, and return without training.
    """
    sinks.require_packages(cfg.run.sinks)
    dataset = data.load_for(cfg)
    cfg = resolve(with_buckets(cfg, dataset.buckets), dataset.vocab_size, dataset.image)
    kept = None
    if searched is not None:
        kept, cfg = earlier_mesh(cfg, searched), open_mesh(cfg, searched)
    # Every process checks the run directory before any process writes to it: they join only afterwards.
    changes = run_dir.prepare(kept or cfg, dataset.tokenizer.to_json())
    processes = launchers.detect(cfg.distributed)
    count = (processes and processes.count) or 1
    batch = cfg.microbatch_size if searched is None else 0
    platform.configure((kept or cfg).mesh, batch, count)  # before JAX is imported
    compile_cache.configure(processes.count if processes else 1)
    distributed.join(processes, cfg.distributed)
    from jaxstack.runtime.watchdog import EndListener

    with EndListener():
        if processes or preflight:
            from jaxstack.training.services import health

            health.check(cfg, preflight)
            if preflight:
                return
        if searched is not None:
            from jaxstack.planner import auto_mesh

            cfg = auto_mesh.choose(cfg, searched, kept)
            changes = run_dir.prepare(cfg, dataset.tokenizer.to_json())

        from jaxstack.planner import memory

        with memory.explained(lambda: memory.step_error(cfg)):
            train(cfg, dataset, changes)


def open_mesh(cfg: Config, searched: Collection[str]) -> Config:
    """Returns the configuration with an open axis and the sizes that `searched` names; all other axes are 1."""
    free = [f"mesh.{axis}" for axis in cfg.mesh.sizes if f"mesh.{axis}" not in searched]
    first = "mesh.data" if "mesh.data" in free else next(iter(free), None)
    opened = f"mesh.{cfg.mesh.open_axis}" in searched  # by a flag
    return with_values(cfg, {key: -1 if key == first and not opened else 1 for key in free})


def earlier_mesh(cfg: Config, searched: Collection[str]) -> Config | None:
    """Returns the configuration with the mesh of the earlier part of the run, or None.

    It is kept if it is closed, if it has what flags set, and if the configuration allows it.
    """
    earlier = run_dir.earlier_config(Path(cfg.run.dir))
    if earlier is None or earlier.mesh.open_axis is not None:
        return None
    before, now = flat(earlier), flat(cfg)
    if any(before[key] != now[key] for key in searched):
        return None
    try:
        return with_values(cfg, {key: before[key] for key in SEARCHED_KEYS})
    except ConfigError:
        return None


def show(cfg: Config, searched: Collection[str] | None = None) -> None:
    """Prints the sharding of every parameter, and the bytes of the state on each device. Nothing is computed.

    Args:
      cfg: the configuration.
      searched: see `main`. The mesh of an earlier part of the run is not read.
    """
    cfg = data.resolve_from_data(cfg)
    if searched is not None:
        cfg = open_mesh(cfg, searched)
    platform.configure(cfg.mesh, cfg.microbatch_size if searched is None else 0)

    from jaxstack import sharding
    from jaxstack.families.context import make_context
    from jaxstack.models import family, params
    from jaxstack.planner import auto_mesh
    from jaxstack.training.state import abstract_state

    if searched is not None:
        cfg = auto_mesh.choose(cfg, searched, kept=None)
    mesh = sharding.make_mesh(cfg.mesh, cfg.microbatch_size)
    state = abstract_state(cfg, make_context(cfg, mesh))
    declared = params.flat_spec(family.spec(cfg.model))
    leaves, specs = sharding.shardings_of(state.params)
    leaves = {path: leaf._replace(axes=declared[path].axes) for path, leaf in leaves.items()}
    print(sharding.summarize(leaves, specs, mesh))
    optimizer = sharding.summarize(*sharding.shardings_of(state.opt_state), mesh).splitlines()[-1]
    print(f"optimizer state: {optimizer}")


def log_step(cfg: Config, run: "Run", loop: "LoopState", metrics: dict[str, Any]) -> int | None:
    """Does what `Run.log_step` does. With `train.debug`, it waits for the step, and explains the first bad one."""
    spike, before, step = run.log_step(loop, metrics), run.logger.not_finite, loop.step
    if not cfg.train.debug:
        return spike
    spike = run.logger.flush() or spike
    import jax

    if before is None and run.logger.not_finite == step and jax.process_count() == 1:
        from jaxstack.debug import replay

        with run.recompiles.expected():
            for line in replay.explain_step(cfg, step, Path(cfg.run.dir) / "debug" / f"step_{step}"):
                run.console.print(line)
    return spike


def make_step(
    cfg: Config, ctx: "Context", abstract: "TrainState", watched: "Watched | None" = None
) -> Callable[..., Any]:
    """Returns the training step: compiled, or with `debug.eager` operation by operation. It measures what is watched.

    Raises:
      ConfigError: `debug.eager` with a pipeline whose loops cannot have static trip counts.
    """
    if cfg.debug.eager:
        from jaxstack.debug.eager import make_eager_step

        return make_eager_step(cfg, ctx, abstract, watched)
    from jaxstack.training.step import jit_train_step

    return jit_train_step(cfg, ctx, abstract, watched)


def make_choice(
    cfg: Config, ctx: "Context", abstract: "TrainState"
) -> Callable[[int, Callable[..., Any]], Callable[..., Any]]:
    """Returns `choose(number, step)`, the function that runs the step of a number: `step`, or one that measures.

    Raises:
      ConfigError: a pattern of `debug.watch` matches no name.
    """
    from jaxstack.training.features.watch import watched_of

    watched = watched_of(cfg)
    measuring = make_step(cfg, ctx, abstract, watched) if watched else None

    def choose(number: int, step: Callable[..., Any]) -> Callable[..., Any]:
        return step if measuring is None or number % cfg.debug.watch_every else measuring

    return choose


def train(cfg: Config, dataset: data.Dataset, changes: list[str]) -> None:
    """Trains until `train.steps` steps are done. Prints `changes`: the values that differ from an earlier start."""
    import jax

    from jaxstack import sharding
    from jaxstack.data.loader import DataLoader
    from jaxstack.families.context import make_context
    from jaxstack.generate import decode, pictures
    from jaxstack.planner import estimate, memory, pipeline_costs
    from jaxstack.training.features import teacher
    from jaxstack.training.services.run import Run
    from jaxstack.training.state import abstract_state, evaluated_params
    from jaxstack.training.step import make_eval_step

    # ---- devices and compiled steps
    mesh = sharding.make_mesh(cfg.mesh, cfg.microbatch_size)
    ctx = make_context(pipeline_costs.resolve_partition(cfg, mesh), mesh)
    abstract = abstract_state(cfg, ctx)  # shapes, dtypes and shardings, no arrays
    warning = memory.check(Job(cfg, ctx), abstract)  # before minutes of compiling
    job, split = estimate.resolve_split(Job(cfg, ctx))
    resolved = job.cfg
    choose = make_choice(resolved, ctx, abstract)  # some steps measure what `debug.watch` names
    steps = make_step(resolved, ctx, abstract), jax.jit(make_eval_step(cfg, ctx))  # of (state or params, batch)
    loader = DataLoader(
        cfg, dataset, ctx.layout.sharding(ctx.layout.batch)
    )  # batch = f(seed, index), so no reader has a state
    teach = teacher.open_teacher(cfg, dataset.tokenizer, mesh)

    # ---- run directory: lock, signals, watchdog, logs, checkpoints
    with Run(cfg, dataset, ctx, abstract, loader, pictures.make_grid(cfg, dataset, ctx)) as run:
        run.print_header(changes, warning, split)
        state, loop = run.restore_or_init()
        run.begin(loop)  # first write: a state that does not fit has raised an error above
        train_step, eval_step = run.ahead.wrap_steps(steps, abstract, loader, loop, teach)
        if loop.step and loop.step % cfg.train.eval_every == 0:
            run.evaluate(loop, eval_step, state)  # in case the run was interrupted before this evaluation
        batches = loader.iterate(loop.batch, cfg.train.steps - loop.step)

        # ---- training loop
        while loop.step < cfg.train.steps:
            batch, loop = teach(loader.to_devices(run.next_batch(batches))), loop.advance()
            state, metrics = run.profiler.run_step(loop.step, choose(loop.step, train_step), state, batch)
            spike = log_step(cfg, run, loop, metrics)  # reads the metrics of the step before: the host never waits
            stop, last = run.should_stop(loop), loop.step == cfg.train.steps
            evaluate = last or loop.step % cfg.train.eval_every == 0
            save = last or stop or loop.step % cfg.checkpoint.every == 0
            if evaluate or save:
                spike = spike or run.logger.flush()  # waits for this step: a spike must not be saved
            if spike:
                del state, metrics  # two states may not fit into memory
                state, loop = run.restore_before(spike, loop)
                batches = loader.iterate(loop.batch, cfg.train.steps - loop.step)
                continue
            if save:
                loop = run.save(loop, state)
            if stop:
                run.stop(loop)  # raises
            if evaluate:
                run.evaluate(loop, eval_step, state)

        # ---- end
        run.end_loop()
        run.evaluate(loop, eval_step, state)  # does nothing if the loop has just evaluated
        run.finish(decode.sample_texts(cfg, evaluated_params(cfg, state), dataset, ctx))
