"""Trains a model: `jaxstack train` and `python train.py` run `main`, and `train` is the loop.

JAX is imported inside functions: it must start after `platform.configure`, and help and errors must not wait for it.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxstack import data, start
from jaxstack.checkpoint import run_dir
from jaxstack.config import Config, resolve
from jaxstack.runtime import compile_cache, distributed, launchers, platform
from jaxstack.tracking import sinks

if TYPE_CHECKING:
    from jaxstack.tracking.step_log import LoopState
    from jaxstack.training.services.run import Run
    from jaxstack.training.setup import Setup
    from jaxstack.training.state import TrainState


def main(cfg: Config, searched: Collection[str] | None = None, preflight: bool = False) -> None:
    """Trains with a configuration that was just read. Nothing is written before everything is checked.

    Args:
      searched: for `--mesh=auto`, the keys that flags set, which the search for a mesh keeps. None means no search.
      preflight: check the machines, and return without training.
    """
    sinks.require_packages(cfg.run.sinks)
    dataset = data.load_for(cfg.model, cfg.data, cfg.aim)
    cfg = resolve(cfg, dataset.vocab_size, dataset.image, dataset.buckets)
    bounded = data.resolve_documents(cfg.data, cfg.model.family, cfg.run.seed, cfg.train.steps, dataset)
    cfg = replace(cfg, data=bounded)
    earlier = None
    if searched is not None:
        earlier = start.earlier_mesh(cfg, searched)
        cfg = start.open_mesh(cfg, searched)
    # Every process checks the run directory before any process writes to it: they join only afterwards.
    changes = run_dir.prepare(earlier or cfg, dataset.tokenizer.to_json())
    processes = launchers.detect(cfg.distributed)
    batch = cfg.microbatch_size if searched is None else 0
    platform.configure((earlier or cfg).mesh, batch, (processes and processes.count) or 1)  # before JAX is imported
    compile_cache.configure(processes.count if processes else 1)
    distributed.join(processes, cfg.distributed)
    from jaxstack.runtime.watchdog import EndListener

    with EndListener():
        if processes or preflight:
            from jaxstack.runtime import shared_cache
            from jaxstack.training.services import health

            shared_cache.share(Path(cfg.run.dir), cfg.distributed.timeout_s)
            health.check(cfg.model, cfg.mesh, cfg.run.dir, cfg.distributed.timeout_s, preflight)
            if preflight:
                return
        if searched is not None:
            import jax

            from jaxstack.planner import auto_mesh

            cfg, line = auto_mesh.choose(cfg, searched, earlier)
            if jax.process_index() == 0:
                print(line, flush=True)
            changes = run_dir.prepare(cfg, dataset.tokenizer.to_json())

        from jaxstack.planner import memory

        with memory.explained(lambda: memory.step_error(cfg)):
            train(start.resolve(cfg, dataset), changes)


def log_step(run: "Run", loop: "LoopState", metrics: dict[str, Any]) -> int | None:
    """Does what `Run.log_step` does. With `train.debug`, it waits for the step, and explains the first bad one."""
    cfg = run.setup.cfg
    before = run.logger.not_finite
    spike = run.log_step(loop, metrics)
    if not cfg.train.debug:
        return spike
    spike = run.logger.flush() or spike
    import jax

    if before is None and run.logger.not_finite == loop.step and jax.process_count() == 1:
        from jaxstack.debug import replay

        with run.recompiles.expected():
            folder = Path(cfg.run.dir) / "debug" / f"step_{loop.step}"
            for line in replay.explain_step(replay.Replay(cfg), loop.step, folder):
                run.console.print(line)
    return spike


def samples_of(setup: "Setup", state: "TrainState") -> list[tuple[str, str]]:
    """Returns the texts that show what a run has learned, with their prompts."""
    from jaxstack.generate import decode
    from jaxstack.training.features.qat import evaluated_params

    cfg = setup.cfg
    params = evaluated_params(setup.recipe, state)
    return decode.sample_texts(cfg.model, cfg.sample, cfg.run.seed, cfg.data.seq_len, params, setup.dataset, setup.ctx)


def train(setup: "Setup", changes: list[str]) -> None:
    """Trains until `train.steps` steps are done. Prints `changes`: the values that differ from an earlier start."""
    from jaxstack.generate import pictures
    from jaxstack.training.services.init_from import open_reference, open_teacher
    from jaxstack.training.services.run import Run
    from jaxstack.training.state import averaged_params

    cfg = setup.cfg
    ctx = setup.ctx
    dataset = setup.dataset
    steps = start.make_steps(setup)
    source = start.open_batches(setup)
    loader = source.loader  # a batch is a function of seed and index, so no reader has a state
    teach = open_teacher(cfg, dataset.tokenizer, setup.mesh)
    refer = open_reference(cfg, dataset.tokenizer, setup.mesh, ctx)

    # ---- run directory: lock, signals, watchdog, logs, checkpoints
    grid = pictures.make_grid(cfg.model, cfg.sample, cfg.run.seed, cfg.data, dataset, ctx)
    with Run(setup, loader, grid) as run:
        run.print_header(changes)
        state, loop = run.restore_or_init()
        run.begin(loop)  # first write: a state that does not fit has raised an error above
        lengths = loader.lengths(loop.batch, loop.batch + cfg.train.steps - loop.step)
        train_step = run.ahead.wrap(steps.train, setup.abstract, lengths, teach)
        evaluated = averaged_params(cfg.model, setup.abstract)
        eval_step = source.evaluation(run.ahead.wrap(steps.evaluate, evaluated, loader.held_out_lengths), refer)
        if lost := source.restore(loop.step, loop.batch):
            run.console.print(lost, style="yellow")
        if loop.step and loop.step % cfg.train.eval_every == 0:
            run.evaluate(loop, eval_step, state)  # in case the run was interrupted before this evaluation
        batches = loader.iterate(loop.batch, cfg.train.steps - loop.step)

        # ---- training loop
        while loop.step < cfg.train.steps:
            rows = run.next_batch(batches)
            batch, figures = source.place(rows, state.params, loop.batch, run.rollout)
            batch = refer(state.params, teach(batch))
            loop = loop.advance()
            step = steps.choose(loop.step, cfg.debug.watch_every, train_step)
            state, metrics = run.profiler.run_step(loop.step, step, state, batch)
            spike = log_step(run, loop, metrics | figures)  # reads the metrics of the step before: the host never waits
            stop = run.should_stop(loop)
            last = loop.step == cfg.train.steps
            evaluate = last or loop.step % cfg.train.eval_every == 0
            save = last or stop or loop.step % cfg.checkpoint.every == 0
            if evaluate or save:
                spike = spike or run.logger.flush()  # waits for this step: a spike must not be saved
            if spike:
                del state, metrics  # two states may not fit into memory
                state, loop = run.restore_before(spike, loop)
                batches = loader.iterate(loop.batch, cfg.train.steps - loop.step)
                source.forget()
                continue
            if save:
                loop = run.save(loop, state)
                source.save(loop.step)
            if stop:
                run.stop(loop)  # raises
            if evaluate:
                run.evaluate(loop, eval_step, state)
                run.log_samples(loop.step, source.take_samples())

        # ---- end
        run.end_loop()
        run.evaluate(loop, eval_step, state)  # does nothing if the loop has just evaluated
        run.finish(samples_of(setup, state))
