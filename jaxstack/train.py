"""Trains a decoder language model: `main` is what `jaxstack train` and `python train.py` run,
and `train` the loop, top to bottom.

JAX is imported within functions, after help, mistakes and `platform.configure`.
"""

import math
import os
import signal
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from jaxstack import data
from jaxstack.checkpoint import manifest, run_dir
from jaxstack.common.errors import Exit, RunError
from jaxstack.config import Config, DistributedConfig, resolve
from jaxstack.runtime import distributed, platform, preemption
from jaxstack.tracking import goodput, sinks

if TYPE_CHECKING:  # JAX must start after `platform.configure`
    import jax

    from jaxstack.checkpoint.store import Checkpoints, CheckpointScan
    from jaxstack.data.loader import DataLoader
    from jaxstack.models.context import Context
    from jaxstack.tracking.jsonl import JsonLines, Screen


def main(cfg: Config) -> None:
    """Trains with a configuration that was just read. Nothing is written before everything is checked."""
    sinks.check(cfg.run.sinks)
    dataset = data.load(cfg.data)
    cfg = resolve(cfg, dataset.tokenizer.vocab_size)
    changes = run_dir.check(
        cfg, dataset.tokenizer.to_json()
    )  # in every process before any writes: they have not joined
    processes = distributed.detect(cfg.distributed)
    count = (processes and processes.count) or 1
    # Before JAX is imported, which reads it.
    platform.configure(cfg.mesh, cfg.data.batch_size // cfg.train.grad_accum, count)
    distributed.join(processes, cfg.distributed)
    train(cfg, dataset, changes)


def show(cfg: Config) -> None:
    """Prints how every parameter lies on the mesh, and what the state takes of a device; nothing is computed."""
    vocabulary = cfg.model.vocab_size or data.load(cfg.data).tokenizer.vocab_size
    cfg = resolve(cfg, vocabulary)
    platform.configure(cfg.mesh, cfg.data.batch_size // cfg.train.grad_accum)

    from jaxstack import sharding
    from jaxstack.models import family, params
    from jaxstack.models.context import Context
    from jaxstack.training.state import abstract_state

    mesh = sharding.make_mesh(cfg.mesh, cfg.data.batch_size // cfg.train.grad_accum)
    state = abstract_state(cfg, Context.create(cfg, mesh))
    declared = params.flat_spec(family.spec(cfg.model))
    leaves, specs = sharding.placed(state.params)
    print(sharding.table({path: leaf._replace(axes=declared[path].axes) for path, leaf in leaves.items()}, specs, mesh))
    optimizer = sharding.table(*sharding.placed(state.opt_state), mesh).splitlines()[-1]
    print(f"optimizer state: {optimizer}")


def train(cfg: Config, dataset: data.Dataset, changes: list[str]) -> None:
    """Takes steps until `train.steps` are done; evaluates, saves, and goes back where it must."""
    import jax

    from jaxstack import sharding
    from jaxstack.checkpoint import store
    from jaxstack.data.loader import DataLoader
    from jaxstack.generate import decode
    from jaxstack.models.context import Context
    from jaxstack.planner import pipeline_costs
    from jaxstack.runtime import watchdog
    from jaxstack.tracking import jsonl, profiler, throughput
    from jaxstack.tracking.step_log import LoopState, StepLogger
    from jaxstack.training import init_from, step
    from jaxstack.training.checkpoint_layout import checkpoint_layout
    from jaxstack.training.state import TrainState, abstract_state, make_state

    run = Path(cfg.run.dir)
    saved = run_dir.checkpoints(run)
    account = goodput.GoodputRecorder()
    mesh = sharding.make_mesh(cfg.mesh, cfg.data.batch_size // cfg.train.grad_accum)
    devices = list(mesh.devices.flat)
    ctx = Context.create(pipeline_costs.settled(cfg, mesh), mesh)
    first = jax.process_index() == 0  # it alone prints, and writes what is not a checkpoint
    several = jax.process_count() > 1
    meter = throughput.ThroughputMeter(cfg, devices)
    loader = DataLoader(cfg, dataset, ctx.sharding(ctx.batch))

    abstract = abstract_state(cfg, ctx)
    layout = checkpoint_layout(cfg, ctx, abstract)
    train_step = step.jit_train_step(cfg, ctx, abstract)
    eval_step = jax.jit(step.make_eval_step(cfg, ctx))

    with (
        watchdog.Watch(cfg.distributed.lost_s, cfg.train.stalled_s) as watching,
        run_dir.lock(run) if first else nullcontext() as left_behind,
        preemption.caught((lambda: os.kill(os.getpid(), signal.SIGTERM)) if several else None) as request,
        jsonl.Screen(cfg.train.steps, shown=first) as screen,
        store.Checkpoints(cfg.checkpoint, saved) as checkpoints,
        profiler.Tracer(cfg.profile, run, screen.say, account, meter) as tracer,
        sinks.Sinks() as others,
    ):
        print_run_header(screen, cfg, ctx, devices, dataset, changes, left_behind)
        found = resolve_start_step(screen, cfg, ctx, dataset)
        start = found.step or 0

        def state_of(number: int) -> tuple[TrainState, int]:
            """The state after a step, and the index of the batch that comes next."""
            if number:
                state = layout.unpack(store.restore(saved, number, layout.abstract))
                return state, store.metadata(saved, number)["next_batch"]
            if cfg.run.init_from:
                return init_from.start_from(cfg, ctx, abstract), 0
            return make_state(cfg, ctx, abstract), 0

        if start:
            run_dir.same_data(store.metadata(saved, start), cfg, dataset.fingerprint)
        elif cfg.run.init_from:
            screen.say(f"starts with the parameters of {cfg.run.init_from}")
        state, next_batch = state_of(start)
        if start:
            screen.say(f"resumed from step {start}")
        sharding.guard(*sharding.placed(state.params), mesh, axes=("pipe", "fsdp", "expert", "tensor"), limit=0.1)

        # Only now: nothing is overwritten by what does not fit.
        log = open_log(screen, cfg, dataset, found, start, others) if first else jsonl.JsonLines(None)
        checkpoints.scores |= {r["step"]: r["eval_loss"] for r in log.records if "eval_loss" in r}
        metadata = {"config": asdict(cfg), "versions": store.versions(), "data": dataset.fingerprint}
        progress = StepLogger(cfg, loader, log, screen, meter, watching, account)

        def evaluate(number: int) -> None:
            """Held-out loss, unless the log has it from before an interruption."""
            if not distributed.broadcast_from_process_0(progress.evaluated(number)):
                account.enter("evaluation")
                sums = (eval_step(state.params, loader.to_devices(batch)) for batch in loader.held_out_batches)
                checkpoints.scores[number] = progress.evaluation(number, sums)

        course = LoopState(done=start, batch=next_batch, newest=start)
        screen.start(start)
        if start and start % cfg.train.eval_every == 0:
            evaluate(start)
        while course.done < cfg.train.steps:
            spike = None
            for index, batch, waited in loader.iterate(course.batch, cfg.train.steps - course.done, account.enter):
                account.enter("step" if meter.started else "compile")
                course = course.stepped()
                state, device_values = tracer.step(course.done, train_step, state, loader.to_devices(batch))
                spike = progress.step(course.done, index, device_values, waited)  # of the step before this one
                stopping = distributed.should_stop(course.done, request.by is not None)
                last = course.done == cfg.train.steps
                evaluating = last or course.done % cfg.train.eval_every == 0
                saving = last or course.done % cfg.checkpoint.every == 0 or stopping
                if evaluating or saving:
                    spike = spike or progress.flush()
                if spike:
                    break
                if saving:
                    account.enter("checkpoint")
                    checkpoints.save(course.done, layout.pack(state), metadata | {"next_batch": course.batch})
                    course = course.saved()
                if stopping:
                    stop(course.done, checkpoints, log, account)
                if evaluating:
                    evaluate(course.done)
                if evaluating or saving:
                    meter.restart()
            if spike:
                course = course.back(spike, most=cfg.train.max_bad_steps)
                account.enter("checkpoint")
                checkpoints.wait()
                del state, device_values  # two states may not fit
                if course.done and (why := store.corruption(saved, course.done)):
                    raise damaged(course.done, why)
                state, _ = state_of(course.done)
                progress.log_rollback(course, spike)
        screen.stop()

        account.enter("end")
        evaluate(cfg.train.steps)
        texts = decode.sample_texts(cfg, state.params, dataset.tokenizer, ctx) if cfg.sample.prompts else []
        checkpoints.wait()
        if first:  # what is left is done by one
            write_final_report(cfg, loader, texts, log, screen, account)
        distributed.barrier()


def print_run_header(
    screen: "Screen",
    cfg: Config,
    ctx: "Context",
    devices: "list[jax.Device]",
    dataset: data.Dataset,
    changes: list[str],
    left_behind: str | None,
) -> None:
    """Says what is going to be trained, on what, and what is unlike the run's earlier part."""
    import jax

    from jaxstack.models import family, params

    processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    screen.say(f"device   {len(devices)} x {devices[0].device_kind}{processes}")
    screen.say(f"model    {params.count(family.spec(cfg.model)):,} parameters, {cfg.model.num_layers} layers")
    if cfg.model.lora.rank:
        trained = params.count(params.partition(spec := family.spec(cfg.model), spec)[0])
        screen.say(f"adapters {trained:,} of them are trained, rank {cfg.model.lora.rank}; the rest is frozen")
    if ctx.pipeline is not None:
        screen.say(f"pipeline {ctx.pipeline}")
        if why := ctx.pipeline.explain():
            screen.say(why)
    screen.say(f"kernels  {', '.join(f'{op} {name}' for op, name in ctx.kernels.items())}")
    screen.say(f"data     {dataset.description}")
    screen.say(f"run      {Path(cfg.run.dir)}/")
    for change in changes:
        screen.say(f"changed  {change}", style="yellow")
    if left_behind:
        screen.say(left_behind, style="yellow")


def resolve_start_step(screen: "Screen", cfg: Config, ctx: "Context", dataset: data.Dataset) -> "CheckpointScan":
    """The newest checkpoint that is whole, verified by all processes together, once they are of one mind about the run.

    Raises:
      ConfigError: they are not, or there were checkpoints and none is whole.
    """
    from jaxstack.checkpoint import store

    distributed.assert_equal_across_processes({
        "configuration": replace(cfg, distributed=DistributedConfig()),
        "data": (dataset.fingerprint, len(dataset.train), len(dataset.eval), dataset.tokenizer.to_json()),
        "pipeline.partition's file": str(ctx.pipeline),
    })  # fmt: skip
    saved = run_dir.checkpoints(Path(cfg.run.dir))
    found = store.scan(saved)
    for number, why in found.skipped.items():
        screen.say(f"passed over step {number}: {why}", style="yellow")
    if found.lost:
        raise found.nothing_whole(saved, "put back a copy, or name another run.dir")
    return found


def open_log(
    screen: "Screen", cfg: Config, dataset: data.Dataset, found: "CheckpointScan", start: int, others: sinks.Sinks
) -> "JsonLines":
    """metrics.jsonl as it was after step `start`, in a directory that is tidied up; by process 0.

    Args:
      others: begin there, and get the lines that are written from now on.
    """
    from jaxstack.tracking.jsonl import JsonLines

    run = Path(cfg.run.dir)
    saved = run_dir.checkpoints(run)
    log = JsonLines(run / "metrics.jsonl", others)
    run_dir.write(cfg, dataset.tokenizer.to_json())
    manifest.remove_partial(saved)
    for number in found.skipped:
        screen.say(f"step {number} was moved to {manifest.quarantine(saved / str(number), run / 'passed_over')}/")
    dropped = log.rewind(start)
    others.begin(cfg, start)
    if event := goodput.resumed(start, log.records, dropped):
        log.write(event)
    return log


def stop(done: int, checkpoints: "Checkpoints", log: "JsonLines", account: goodput.GoodputRecorder) -> NoReturn:
    """Ends a run that was asked to stop, once the step that it has done is saved everywhere."""
    checkpoints.wait()
    distributed.barrier()
    log.write({"step": done, "event": "stopped", "time": time.time(), "seconds": account.take()})
    raise RunError(
        Exit.STOPPED, f"stopped as asked after step {done}, which is saved; the same command goes on from there"
    )


def damaged(number: int, why: str) -> RunError:
    """What a run ends with that must go back to a checkpoint which was damaged after it was written."""
    return RunError(
        Exit.NOT_SAVED,
        f"the run must go back to step {number}, which must not be used: {why}; mend the disk and give the same "
        f"command, which goes on from the newest whole checkpoint",
    )


def write_final_report(
    cfg: Config,
    loader: "DataLoader",
    texts: list[str],
    log: "JsonLines",
    screen: "Screen",
    account: goodput.GoodputRecorder,
) -> None:
    """Writes what is made at the end of a run: the comparison with n-grams, samples and the picture; by process 0."""
    from jaxstack.data import ngram
    from jaxstack.tracking import jsonl

    run, steps = Path(cfg.run.dir), cfg.train.steps
    final = next(r for r in log.records if r["step"] == steps and "eval_loss" in r)
    baseline = None
    if cfg.train.ngram_baseline:
        known = [r for r in log.records if r["step"] == steps and "ngram_order" in r]
        if not known:
            order, bits = ngram.baseline(loader.first_batches(steps), loader.global_held_out_batches)
            known = [{"step": steps, "ngram_order": order, "ngram_bits_per_byte": bits}]
            log.write(known[0])
        order, bits = known[0]["ngram_order"], known[0]["ngram_bits_per_byte"]
        baseline = (f"byte {order}-gram", bits * math.log(2))
        read = steps * cfg.data.batch_size * cfg.data.seq_len
        screen.say(f"held out, this model      {final['eval_bits_per_byte']:.3f} bits per byte", style="bold")
        screen.say(f"held out, byte {order}-grams    {bits:.3f} bits per byte, fitted on the same {read:,} bytes")
    if texts:
        (run / "samples.txt").write_text("\n\n".join(texts) + "\n")
    for prompt, text in zip(cfg.sample.prompts, texts, strict=True):
        screen.say(f"--- {prompt.strip()}", style="bold")
        screen.say(text)
    jsonl.plot(log.records, run / "loss.png", baseline)
    log.write({"step": steps, "event": "finished", "time": time.time(), "seconds": account.take()})
    screen.say(f"{run}/ holds loss.png, metrics.jsonl, samples.txt, config.yaml and checkpoints/. To go on, raise "
               f"--train.steps; to start anew, name another --run.dir; to look at it: "
               f"jaxstack report {run}")  # fmt: skip
