"""Trains a decoder language model: `python train.py --config configs/NAME.yaml --model.num_layers=4 ...`

The whole loop, top to bottom. `python train.py --help` lists every key; CONTRIBUTING.md says where everything else is.
"""

import math
import os
import signal
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jaxstack import cli, data, distributed, goodput, platform, rundir, seal, signals
from jaxstack.config import Config, ConfigError, DistributedConfig, resolve
from jaxstack.exits import Exit, RunError

QUICKSTART = Path(__file__).parent / "configs" / "quickstart.yaml"


def main(argv: list[str]) -> None:
    cfg, print_shardings = cli.parse(argv, QUICKSTART)
    if print_shardings:
        return show(cfg)
    dataset = data.load(cfg.data)
    cfg = resolve(cfg, dataset.tokenizer.vocab_size)
    changes = rundir.check(cfg, dataset.tokenizer.to_json())  # in every process before any writes: they have not joined
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

    from jaxstack import model, params, sharding, step
    from jaxstack.context import Context

    mesh = sharding.make_mesh(cfg.mesh, cfg.data.batch_size // cfg.train.grad_accum)
    state = step.abstract_state(cfg, Context.create(cfg, mesh))
    declared = params.flat_spec(model.spec(cfg.model))
    leaves, specs = sharding.placed(state.params)
    print(sharding.table({path: leaf._replace(axes=declared[path].axes) for path, leaf in leaves.items()}, specs, mesh))
    optimizer = sharding.table(*sharding.placed(state.opt_state), mesh).splitlines()[-1]
    print(f"optimizer state: {optimizer}")


def train(cfg: Config, dataset: data.Dataset, changes: list[str]) -> None:
    import jax

    from jaxstack import checkpoint, convert, loggers, metrics, model, params, sharding, step, watch
    from jaxstack.context import Context
    from jaxstack.data import ngram
    from jaxstack.generate import decode
    from jaxstack.profile import costs

    run = Path(cfg.run.dir)
    saved = rundir.checkpoints(run)
    account = goodput.Account()
    mesh = sharding.make_mesh(cfg.mesh, cfg.data.batch_size // cfg.train.grad_accum)
    devices = list(mesh.devices.flat)
    ctx = Context.create(costs.settled(cfg, mesh), mesh)
    batch_sharding = ctx.sharding(ctx.batch)
    first = jax.process_index() == 0  # it alone prints, and writes what is not a checkpoint
    several = jax.process_count() > 1

    reading = {"seq_len": cfg.data.seq_len, "batch_size": cfg.data.batch_size, "packing": cfg.data.packing}
    here = distributed.rows_here(batch_sharding, cfg.data.batch_size)  # of each batch, every process reads its share
    batches = data.batches(dataset.train, seed=cfg.run.seed, rows=here, **reading)
    held_out = [*data.eval_batches(dataset.eval, steps=cfg.train.eval_steps, rows=here, **reading)]
    all_held_out = data.eval_batches(dataset.eval, steps=cfg.train.eval_steps, **reading)  # read when asked for
    held_out_bytes = math.nan
    if first:
        held_out_bytes = sum(dataset.tokenizer.num_bytes(b["targets"][b["weights"] > 0]) for b in all_held_out)

    def to_devices(batch: data.Batch) -> Any:
        return distributed.whole(batch, batch_sharding, here, cfg.data.batch_size)

    abstract = step.abstract_state(cfg, ctx)
    layout = step.checkpoint_layout(cfg, ctx, abstract)
    train_step = step.jit_train_step(cfg, ctx, abstract)
    eval_step = jax.jit(step.make_eval_step(cfg, ctx))

    with (
        watch.Watch(cfg.distributed.lost_s, cfg.train.stalled_s) as watching,
        rundir.lock(run) if first else nullcontext() as left_behind,
        signals.caught((lambda: os.kill(os.getpid(), signal.SIGTERM)) if several else None) as request,
        loggers.Screen(cfg.train.steps, shown=first) as screen,
        checkpoint.Checkpoints(cfg.checkpoint, saved, first) as checkpoints,
    ):
        processes = f" in {jax.process_count()} processes" if several else ""
        screen.say(f"device   {len(devices)} x {devices[0].device_kind}{processes}")
        screen.say(f"model    {params.count(model.spec(cfg.model)):,} parameters, {cfg.model.num_layers} layers")
        if ctx.pipeline is not None:
            screen.say(f"pipeline {ctx.pipeline}")
            if why := ctx.pipeline.explain():
                screen.say(why)
        screen.say(f"kernels  {', '.join(f'{op} {name}' for op, name in ctx.kernels.items())}")
        screen.say(f"data     {dataset.description}")
        screen.say(f"run      {run}/")
        for change in changes:
            screen.say(f"changed  {change}", style="yellow")
        if left_behind:
            screen.say(left_behind, style="yellow")

        # The newest checkpoint that is whole; process 0 looks, since it reads every byte.
        found = checkpoint.find(saved) if first else checkpoint.Found(None, {})
        for number, why in found.passed_over.items():
            screen.say(f"passed over step {number}: {why}", style="yellow")
        start = distributed.from_first(-1 if found.lost else found.step or 0)
        if start < 0:
            raise ConfigError(
                f"{saved} holds no whole checkpoint ({'; '.join(found.passed_over.values())}); put back a copy, or "
                f"name another run.dir"
            )
        distributed.agree({
            "configuration": replace(cfg, distributed=DistributedConfig()),
            "data": (dataset.fingerprint, len(dataset.train), len(dataset.eval), dataset.tokenizer.to_json()),
            "newest checkpoint of run.dir": not start or (saved / str(start)).is_dir(),
            "pipeline.partition's file": str(ctx.pipeline),
        })  # fmt: skip

        def state_of(number: int) -> tuple[step.TrainState, int]:
            """The state after a step, and the index of the batch that comes next."""
            if number:
                state = layout.unpack(checkpoint.restore(saved, number, layout.abstract))
                return state, checkpoint.facts(saved, number)["next_batch"]
            if cfg.run.init_from:
                return convert.start_from(cfg, ctx, abstract), 0
            return step.make_state(cfg, ctx, abstract), 0

        if start:
            rundir.same_data(checkpoint.facts(saved, start), cfg, dataset.fingerprint)
        elif cfg.run.init_from:
            screen.say(f"starts with the parameters of {cfg.run.init_from}")
        state, next_batch = state_of(start)
        if start:
            screen.say(f"resumed from step {start}")

        sharding.guard(*sharding.placed(state.params), mesh, axes=("pipe", "fsdp", "tensor"), limit=0.1)

        log = loggers.JsonLines(run / "metrics.jsonl" if first else None)
        if first:  # only now: nothing is overwritten by what does not fit
            rundir.write(cfg, dataset.tokenizer.to_json())
            seal.tidy(saved)
            for number in found.passed_over:
                screen.say(f"step {number} was moved to {seal.set_aside(saved / str(number), run / 'passed_over')}/")
            if event := goodput.resumed(start, log.records, log.rewind(start)):
                log.write(event)
        checkpoints.scores |= {r["step"]: r["eval_loss"] for r in log.records if "eval_loss" in r}
        facts = {"config": asdict(cfg), "versions": checkpoint.versions(), "data": dataset.fingerprint}
        meter = metrics.Meter(cfg, devices)

        def report(number: int, batch: int, device_values: dict[str, jax.Array], waited: float) -> bool:
            """Handles the metrics of one finished step, for which fetching them waits; whether to go back before it."""
            values = {name: value.item() for name, value in jax.device_get(device_values).items()}
            meter.finished(waited)
            watching.moved()
            timed = meter.take() if number % cfg.run.log_every == 0 or number == cfg.train.steps else {}
            if not meter.started:
                screen.say(f"first step done {platform.seconds_since_start():.1f} s after the command")
                meter.restart()  # compilation is not training time
                account.enter("step")
            if timed:
                log.write({"step": number, **values, **timed, "time": time.time(), "seconds": account.take()})
            screen.step(number, values["loss"], timed.get("tokens_per_s"))
            if not values["spike"] and not values["skipped_in_a_row"]:
                return False
            read = data.batch_identity(dataset.train, batch, seed=cfg.run.seed, **reading)
            what = f"loss {values['loss']}, gradient norm {values['grad_norm']}; batch of {read}"
            name = f"a spike{'' if values['skipped_in_a_row'] else ', not'} skipped" if values["spike"] else "skipped"
            screen.say(f"step {number} {name}: {what}", style="yellow")
            if values["skipped_in_a_row"] >= cfg.train.max_bad_steps:
                count = values["skipped_in_a_row"]
                raise RunError(Exit.BAD_STEPS, f"stopped at step {number}, {count} in a row skipped: {what}")
            return bool(values["spike"]) and cfg.train.spike.action == "rollback"

        def evaluate(number: int) -> None:
            """Held-out loss, unless the log has it from before an interruption."""
            if distributed.from_first(any(r["step"] == number and "eval_loss" in r for r in log.records)):
                return
            account.enter("evaluation")
            nats = tokens = 0.0
            for batch in held_out:
                # One at a time: programs in flight that do not depend on each other can block each other's collectives.
                sums = jax.device_get(eval_step(state.params, to_devices(batch)))
                nats, tokens = nats + float(sums[0]), tokens + float(sums[1])
                watching.moved()
            bits = nats / math.log(2) / held_out_bytes
            log.write({"step": number, "eval_loss": nats / tokens, "eval_bits_per_byte": bits})
            checkpoints.scores[number] = nats / tokens
            screen.say(f"step {number:>6}  held-out loss {nats / tokens:.4f} nats per token, {bits:.3f} bits per byte")

        # Metrics are read one step late: while the host waits for step n, the device already runs step n + 1.
        screen.start(start)
        done, newest = start, start  # steps that `state` has done, and that the newest checkpoint has
        offset = next_batch - start  # of the batches that were stepped over
        returns = 0  # to that checkpoint
        if start and start % cfg.train.eval_every == 0:
            evaluate(start)
        while done < cfg.train.steps:
            unread: tuple[Any, ...] = ()
            go_back = False
            account.enter("data")
            asked = time.perf_counter()
            for index, batch in data.prefetch(batches.slice(slice(cfg.train.steps + offset)), done + offset):
                waited = time.perf_counter() - asked
                account.enter("step" if meter.started else "compile")
                state, device_values = train_step(state, to_devices(batch))
                go_back = bool(unread) and report(*unread)
                done += 1
                unread = (done, index, device_values, waited)
                stopping = distributed.stop_here(done, request.by is not None)
                evaluating = done == cfg.train.steps or done % cfg.train.eval_every == 0
                saving = done == cfg.train.steps or done % cfg.checkpoint.every == 0 or stopping
                if not go_back and (evaluating or saving):
                    go_back = report(*unread)
                    unread = ()
                if go_back:
                    break
                if saving:
                    account.enter("checkpoint")
                    checkpoints.save(done, layout.pack(state), facts | {"next_batch": index + 1})
                    newest, returns = done, 0
                if stopping:
                    checkpoints.wait()
                    distributed.wait_for_all()
                    log.write({"step": done, "event": "stopped", "time": time.time(), "seconds": account.take()})
                    raise RunError(Exit.STOPPED, f"stopped as asked after step {done}, which is saved; the same "
                                                 f"command goes on from there")  # fmt: skip
                if evaluating:
                    evaluate(done)
                if evaluating or saving:
                    meter.restart()
                account.enter("data")
                asked = time.perf_counter()
            if go_back:
                returns += 1
                if returns > cfg.train.max_bad_steps:
                    raise RunError(Exit.BAD_STEPS, f"stopped at step {done}: {returns} spikes after step {newest}, to "
                                                   f"which the run went back each time")  # fmt: skip
                spike = unread[0] - 1 if unread else done  # a step behind, where the next one was on its way already
                account.enter("checkpoint")
                checkpoints.wait()
                del state, device_values  # two states may not fit
                state, _ = state_of(newest)
                done, offset = newest, spike + offset - newest
                lost = goodput.total(log.rewind(newest))
                log.write({"step": newest, "event": "rolled back", "spike": spike, "lost_s": lost})
                screen.say(f"went back from step {spike} to {newest}, and steps over the batches between", "yellow")
                meter.restart()
        screen.stop()

        account.enter("end")
        evaluate(cfg.train.steps)
        texts = decode.texts(cfg, state.params, dataset.tokenizer, ctx) if cfg.sample.prompts else []
        checkpoints.wait()
        if not first:
            return distributed.wait_for_all()  # what is left is done by one

        final = next(r for r in log.records if r["step"] == cfg.train.steps and "eval_loss" in r)
        baseline = None
        if cfg.train.ngram_baseline:
            known = [r for r in log.records if r["step"] == cfg.train.steps and "ngram_order" in r]
            if not known:
                whole = data.batches(dataset.train, seed=cfg.run.seed, **reading)
                order, bits = ngram.baseline((whole[i] for i in range(cfg.train.steps)), all_held_out)
                known = [{"step": cfg.train.steps, "ngram_order": order, "ngram_bits_per_byte": bits}]
                log.write(known[0])
            order, bits = known[0]["ngram_order"], known[0]["ngram_bits_per_byte"]
            baseline = (f"byte {order}-gram", bits * math.log(2))
            read = cfg.train.steps * cfg.data.batch_size * cfg.data.seq_len
            screen.say(f"held out, this model      {final['eval_bits_per_byte']:.3f} bits per byte", style="bold")
            screen.say(f"held out, byte {order}-grams    {bits:.3f} bits per byte, fitted on the same {read:,} bytes")
        if texts:
            (run / "samples.txt").write_text("\n\n".join(texts) + "\n")
        for prompt, text in zip(cfg.sample.prompts, texts, strict=True):
            screen.say(f"--- {prompt.strip()}", style="bold")
            screen.say(text)
        loggers.plot(log.records, run / "loss.png", baseline)
        log.write({"step": cfg.train.steps, "event": "finished", "time": time.time(), "seconds": account.take()})
        screen.say(f"{run}/ holds loss.png, metrics.jsonl, samples.txt, config.yaml and checkpoints/. To go on, raise "
                   f"--train.steps; to start anew, name another --run.dir; to look at it: "
                   f"python -m jaxstack.report {run}")  # fmt: skip
        distributed.wait_for_all()


if __name__ == "__main__":
    cli.run("train.py", main)
