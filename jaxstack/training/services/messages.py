"""What a run prints at its start and at its end."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from jaxstack import families
from jaxstack.common import files
from jaxstack.common.counts import plural
from jaxstack.data.loader import DataLoader
from jaxstack.data.tokenizers import describe_frame
from jaxstack.models import params
from jaxstack.runtime import xla_options
from jaxstack.tracking.console import Console
from jaxstack.training.optimizer import schedule_warning
from jaxstack.training.setup import Setup


def print_header(
    console: Console, setup: Setup, loader: DataLoader, changes: Sequence[str], last_holder: str | None
) -> None:
    """Prints what will be trained and on what, what has changed since the earlier part of the run, and warnings.

    Args:
      changes: values that differ from the earlier part.
      last_holder: a line about a process that held the lock of the run directory before, if there was one.
    """
    cfg = setup.cfg
    several = families.runs_several(cfg.model)
    left_out = xla_options.select_options(setup.ctx.ops.platform, setup.mesh, several).explain()
    warning = schedule_warning(cfg.optim, cfg.train.steps)
    for line in _model_lines(setup):
        console.print(line)
    if left_out:
        console.print(f"xla      {left_out}", style="yellow")
    console.print(f"data     {setup.dataset.description}")
    if frame := describe_frame(setup.dataset.tokenizer):
        console.print(f"         {frame}")
    for line in loader.describe_sources():
        console.print(f"         {line}")
    console.print(f"run      {Path(cfg.run.dir)}/")
    warnings = [*(f"changed  {change}" for change in changes), warning, *setup.warnings, last_holder]
    for line in filter(None, warnings):
        console.print(line, style="yellow")


def _model_lines(setup: Setup) -> Iterator[str]:
    cfg = setup.cfg
    ctx = setup.ctx
    devices = list(setup.mesh.devices.flat)
    processes = f" in {plural(jax.process_count(), 'process')}" if jax.process_count() > 1 else ""
    yield f"device   {len(devices)} x {devices[0].device_kind}{processes}"
    spec = families.spec(cfg.model)
    count = plural(params.count(spec), "parameter", spec=",")
    yield f"model    {count}, {plural(cfg.model.num_layers, 'layer')}"
    if cfg.model.padded_vocab > cfg.model.vocab:
        rows = plural(cfg.model.vocab, "row", spec=",")
        yield f"padding  {rows} of the vocabulary, padded with zeros to {cfg.model.padded_vocab:,}"
    if cfg.model.lora.rank:
        trained = params.count(params.partition(spec, spec)[0])
        yield f"adapters {plural(trained, 'parameter', spec=',')} of rank {cfg.model.lora.rank}; all others are frozen"
    if ctx.layout.pipeline is not None:
        yield f"pipeline {ctx.layout.pipeline}"
        if explanation := ctx.layout.pipeline.explain():
            yield explanation
        if setup.split:
            yield f"         {setup.split}"
    yield f"kernels  {', '.join(f'{op} {name}' for op, name in ctx.ops.by_name.items())}"


def print_samples(console: Console, path: Path, samples: Sequence[tuple[str, str]]) -> None:
    """Writes samples to a file, and prints them. Each is a prompt, and a text that begins with it."""
    if samples:
        files.write_atomic(path, "\n\n".join(text for _, text in samples) + "\n")
    for i, (prompt, text) in enumerate(samples, start=1):
        console.print(f"--- sample {i} of {len(samples)}")
        console.print_sample(text, bold=prompt)


def print_end(console: Console, directory: Path) -> None:
    """Prints what a finished run has left in its directory, and what to do next."""
    names = ("loss.png", "metrics.jsonl", "samples.txt", "tokenizer.json", "config.yaml")
    there = ", ".join(name for name in names if (directory / name).exists())
    console.print(
        f"{directory}/ contains {there} and checkpoints/. To continue, "
        f"raise --train.steps. To start a new run, set another --run.dir. To see its curves: "
        f"jaxstack report {directory}"
    )
