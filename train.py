"""Trains a decoder language model: `python train.py --config configs/NAME.yaml --model.num_layers=4 ...`

The whole loop, top to bottom. `python train.py --help` lists every key; CONTRIBUTING.md says where everything else is.
"""

import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxstack import cli, data, distributed, platform, rundir
from jaxstack.config import Config, DistributedConfig, resolve

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
    distributed.join(processes, cfg.distributed.timeout_s)
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

    from jaxstack import checkpoint, convert, loggers, metrics, model, params, sharding, step
    from jaxstack.context import Context
    from jaxstack.data import ngram
    from jaxstack.generate import decode
    from jaxstack.profile import costs

    run = Path(cfg.run.dir)
    mesh = sharding.make_mesh(cfg.mesh, cfg.data.batch_size // cfg.train.grad_accum)
    devices = list(mesh.devices.flat)
    ctx = Context.create(costs.settled(cfg, mesh), mesh)
    batch_sharding = ctx.sharding(ctx.batch)
    first = jax.process_index() == 0  # it alone prints, and writes what is not a checkpoint

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
        loggers.Screen(cfg.train.steps, shown=first) as screen,
        checkpoint.Checkpoints(cfg.checkpoint, rundir.checkpoints(run)) as checkpoints,
    ):
        processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
        screen.say(f"device   {len(devices)} x {devices[0].device_kind}{processes}")
        screen.say(f"model    {params.count(model.spec(cfg.model)):,} parameters, {cfg.model.num_layers} layers")
        if ctx.pipeline is not None:
            screen.say(f"pipeline {ctx.pipeline}")
            if why := ctx.pipeline.explain():
                screen.say(why)
        screen.say(f"data     {dataset.description}")
        screen.say(f"run      {run}/")
        for change in changes:
            screen.say(f"changed  {change}", style="yellow")

        start = checkpoints.latest or 0
        distributed.agree({
            "configuration": replace(cfg, distributed=DistributedConfig()),
            "data": (dataset.description, len(dataset.train), len(dataset.eval), dataset.tokenizer.to_json()),
            "newest checkpoint of run.dir": start,
            "pipeline.partition's file": str(ctx.pipeline),
        })  # fmt: skip
        if start:
            state = layout.unpack(checkpoints.restore(start, layout.abstract))
            screen.say(f"resumed from step {start}")
        elif cfg.run.init_from:
            state = convert.start_from(cfg, ctx, abstract)
            screen.say(f"starts with the parameters of {cfg.run.init_from}")
        else:
            state = step.make_state(cfg, ctx, abstract)

        sharding.guard(*sharding.placed(state.params), mesh, axes=("pipe", "fsdp", "tensor"), limit=0.1)

        if first:  # only now: nothing is overwritten by what does not fit
            rundir.write(cfg, dataset.tokenizer.to_json())
        log = loggers.JsonLines(run / "metrics.jsonl" if first else None, after=start)
        meter = metrics.Meter(cfg, devices)

        def report(number: int, device_values: dict[str, jax.Array], waited: float) -> None:
            """Handles the metrics of one finished step; fetching them waits for it."""
            values = {name: value.item() for name, value in jax.device_get(device_values).items()}
            meter.finished(waited)
            timed = meter.take() if number % cfg.run.log_every == 0 or number == cfg.train.steps else {}
            if timed:
                log.write({"step": number, **values, **timed})
            if number == start + 1:
                screen.say(f"first step done {platform.seconds_since_start():.1f} s after the command")
                meter.restart()  # compilation is not training time
            screen.step(number, values["loss"], timed.get("tokens_per_s"))
            if values["skipped_in_a_row"]:
                read = data.batch_identity(dataset.train, number - 1, seed=cfg.run.seed, **reading)
                what = f"loss {values['loss']}, gradient norm {values['grad_norm']}; batch of {read}"
                screen.say(f"step {number} skipped: {what}", style="yellow")
                if values["skipped_in_a_row"] >= cfg.train.max_bad_steps:
                    count = values["skipped_in_a_row"]
                    raise SystemExit(f"train.py: stopped at step {number}, the {count}th in a row skipped: {what}")

        def evaluate(number: int) -> None:
            """Held-out loss, unless the log has it from before an interruption."""
            if distributed.from_first(any(r["step"] == number and "eval_loss" in r for r in log.records)):
                return
            nats = tokens = 0.0
            for batch in held_out:
                # One at a time: programs in flight that do not depend on each other can block each other's collectives.
                sums = jax.device_get(eval_step(state.params, to_devices(batch)))
                nats, tokens = nats + float(sums[0]), tokens + float(sums[1])
            bits = nats / math.log(2) / held_out_bytes
            log.write({"step": number, "eval_loss": nats / tokens, "eval_bits_per_byte": bits})
            screen.say(f"step {number:>6}  held-out loss {nats / tokens:.4f} nats per token, {bits:.3f} bits per byte")

        # Metrics are read one step late: while the host waits for step n, the device already runs step n + 1.
        screen.start(start)
        unread: tuple[Any, ...] = ()
        asked = time.perf_counter()
        for index, batch in data.prefetch(batches.slice(slice(cfg.train.steps)), start):
            waited = time.perf_counter() - asked
            state, device_values = train_step(state, to_devices(batch))
            if unread:
                report(*unread)
            number = index + 1
            unread = (number, device_values, waited)
            evaluating = number == cfg.train.steps or number % cfg.train.eval_every == 0
            saving = number == cfg.train.steps or number % cfg.checkpoint.every == 0
            if evaluating or saving:
                report(*unread)
                unread = ()
                if evaluating:
                    evaluate(number)
                if saving:
                    checkpoints.save(number, layout.pack(state))
                meter.restart()
            asked = time.perf_counter()
        screen.stop()

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
                log.write({"step": cfg.train.steps, "ngram_order": order, "ngram_bits_per_byte": bits})
            order, bits = log.records[-1]["ngram_order"], log.records[-1]["ngram_bits_per_byte"]
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
        screen.say(f"{run}/ holds loss.png, metrics.jsonl, samples.txt, config.yaml and checkpoints/. To go on, raise "
                   f"--train.steps; to start anew, name another --run.dir.")  # fmt: skip
        distributed.wait_for_all()


if __name__ == "__main__":
    try:
        cli.run("train.py", main)
    except KeyboardInterrupt:
        print("train.py: interrupted; the same command continues from the newest checkpoint", file=sys.stderr)
        sys.exit(130)
