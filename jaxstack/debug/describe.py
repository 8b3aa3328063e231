"""Says in words what the search has found: operation, layer, place in the code, device, and statistics around it."""

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from jaxstack import families
from jaxstack.common.files import short_path
from jaxstack.config import Config
from jaxstack.debug.guide import Place, RunGuide, is_stack, layers_of
from jaxstack.debug.search import Finding
from jaxstack.debug.statistics import statistics
from jaxstack.debug.way import Loop, Seen
from jaxstack.pipeline.operations import TICKS

LAYERS_SHOWN = 4
"""Layers before a bad one, and behind it, that are described."""

FORWARD = "what it reads"
BACKWARD = "gradient of what it returns"


def describe(cfg: Config, found: Finding, guide: RunGuide | None = None) -> list[str]:
    """Returns what a user reads about a finding: layer, direction, operation, place in the code, and statistics."""
    guide = guide or RunGuide(cfg)
    of = "the loss, in the forward pass" if not found.result else "gradients; the loss is finite"
    lines = [f"first    {found.equation.primitive.name}, for {of}"]
    if where := place(cfg, found, guide):
        lines.append(f"where    {where}")
    if on := device(found):
        lines.append(f"device   {on}")
    lines += code_lines(found)
    lines += around(cfg, found, guide)
    lines += [f"input    {statistics(value)}" for value in found.inputs]
    lines += [f"output   {statistics(value)}" for value in found.outputs]
    return lines


def code_lines(found: Finding) -> list[str]:
    """Returns a line for each place in the code that leads to the operation, innermost first, three at most."""
    own = [frame for frame in found.frames if "/jaxstack/debug/" not in frame[0]]
    return [
        f"{'called' if i else 'code':<9}{short_path(file)}:{line} in {function}"
        for i, (file, line, function) in enumerate(own[:3])
    ]


def device(found: Finding) -> str:
    """Returns on which devices of the mesh an output is bad, in words; empty outside of a mesh."""
    if found.devices.mesh is None:
        return ""
    split = {axis: at for axis, at in found.device.items() if found.devices.mesh.shape[axis] > 1}
    first = ", ".join(f"{axis} {at}" for axis, at in split.items())
    count = int(found.bad.sum())
    if count == 1:
        return f"{first} alone, of {found.bad.size} devices"
    return f"{count} of {found.bad.size} devices; the first is {first}, and its values follow"


def place(cfg: Config, found: Finding, guide: RunGuide | None = None) -> str:
    """Returns stage, microbatch and layer of a finding in words; empty outside of all of them."""
    guide = guide or RunGuide(cfg)
    parts = []
    unit = guide.place(found)
    for loop in found.loops:
        if is_stack(loop):
            parts.append(_layer(cfg, found, loop))
        elif loop.function == "work" and loop.length == cfg.train.grad_accum:
            of_pipeline = "" if unit is None else "accumulated "
            parts += [f"{of_pipeline}microbatch {loop.step} of {loop.length}"] * (cfg.train.grad_accum > 1)
        elif unit is None or not loop.function.endswith(("execute", "fori_loop")):
            of = "" if loop.length is None else f" of {loop.length}"
            at = f"{short_path(loop.frames[0][0])}:{loop.frames[0][1]}" if loop.frames else "an unknown place"
            parts.append(f"step {loop.step}{of} of the loop at {at}")
    if (after := re.search(r"after_(\d+)_steps", found.scopes)) and unit is None:  # see `blocks.scan_stack`
        parts.append(_layer_name(cfg, found, None, int(after[1])))
    if unit is not None:
        parts = [*parts[: cfg.train.grad_accum > 1], _unit(cfg, found, unit, guide)]
    return ", ".join(parts)


def _unit(cfg: Config, found: Finding, unit: Place, guide: RunGuide) -> str:
    """Returns stage, microbatch and layer of a pipeline in words."""
    assert guide.program is not None
    schedule = guide.program.schedule
    parts = [f"stage {unit.stage} of {schedule.stages}"] if unit.work.startswith(("forward", "backward", "wei")) else []
    work = re.sub(r"_(?!grad|in)\w+$", "", unit.work) if unit.stack else unit.work
    names = {"embed": "embedding", "embed_grad": "gradient of the embedding", "loss": "loss with its gradients"}
    names |= {"enter": f"begin of {unit.stack}", "enter_grad": f"gradient of the begin of {unit.stack}"}
    parts.append(
        f"{names[work]} in tick {unit.tick}" if work in names else f"{work.split('_')[0]} unit" if work else ""
    )
    if unit.microbatch is not None:
        parts.append(f"microbatch {unit.microbatch} of {schedule.microbatches}")
    if unit.group is not None:
        parts.append(_layer_name(cfg, found, unit.stack, unit.group))
    return ", ".join(filter(None, parts))


def _layer(cfg: Config, found: Finding, loop: Loop) -> str:
    names = [name for name in families.of(cfg.model).stacks(cfg.model) if f"stack_{name}" in loop.scopes]
    return _layer_name(cfg, found, names[-1] if names else None, loop.step)


def _layer_name(cfg: Config, found: Finding, stack: str | None, group: int) -> str:
    name, depth = layers_of(cfg, stack)
    inner, size = _layers_of_step(found)
    number = group * size + inner
    of = f" of {name}" if len(families.of(cfg.model).stacks(cfg.model)) > 1 else ""
    return f"layer {number}{of} ({number + 1} of {depth})"


def _layers_of_step(found: Finding) -> tuple[int, int]:
    """Returns the number of the layer within its step of the loop over layers, and how many layers a step has."""
    parts = re.findall(r"layer_(\d+)_of_(\d+)", found.scopes)
    inner, size = map(int, parts[-1]) if parts else (0, 1)
    return inner, size


def around(cfg: Config, found: Finding, guide: RunGuide) -> Iterator[str]:
    """Yields the statistics of layers, or stages, before the bad one and behind it, forward and backward."""
    unit = guide.place(found)
    size = _layers_of_step(found)[1]
    for loop in found.loops:
        if is_stack(loop):
            for one in sorted((loop, *loop.others), key=lambda loop: loop.reverse):
                what = BACKWARD if one.reverse else FORWARD
                rows = sorted((seen for seen in one.seen if abs(seen.step - loop.step) <= LAYERS_SHOWN), key=_step)
                yield from (f"layer {seen.step * size:<3}{what}: {seen.text()}" for seen in rows)
        elif unit is not None and unit.group is not None and loop.scopes.endswith(unit.work):
            yield from _layers_of_unit(found, unit, loop, guide, size)
        elif unit is not None and loop.seen and unit.microbatch is not None:
            yield from _stages(found, unit, guide)


def _step(seen: Seen) -> int:
    return seen.step


def _on_stage(found: Finding, stage: int) -> np.ndarray:
    """Returns which devices of the mesh are of a stage."""
    axes = found.devices.axes
    index = np.indices(found.bad.shape)[axes.index("pipe")] if "pipe" in axes else np.zeros(found.bad.shape, int)
    return index == stage


def _layers_of_unit(found: Finding, unit: Place, loop: Loop, guide: RunGuide, size: int) -> Iterator[str]:
    """Yields what the layers of a unit read up to the bad one, in the order in which they ran."""
    what = BACKWARD if unit.work.startswith("backward") else FORWARD
    chosen = _on_stage(found, unit.stage)
    own = found.loops.index(loop)
    for seen in loop.seen[-LAYERS_SHOWN - 1 :]:
        loops = (*found.loops[:own], replace(loop, step=seen.step))
        there = guide.place(replace(found, loops=loops))
        if there is not None and there.group is not None:
            yield f"layer {there.group * size:<3}{what}: {seen.text(chosen)}"


def _stages(found: Finding, unit: Place, guide: RunGuide) -> Iterator[str]:
    """Yields what the stages read for the microbatch of a unit, and the gradients that they get, in the model's order.

    They are what each stage receives from its neighbour. The first stage reads the embedding, and the last one gets the
    gradient of the loss; these are not sent.
    """
    ticks = [loop for loop in found.loops if loop.scopes.endswith(TICKS)]
    if guide.program is None:
        return
    stages = guide.program.schedule.stages
    chunks = guide.program.parts[0].stages.chunks
    by_tick = {(seen.step, number): seen for number, seen in _numbered(ticks[0].seen)}
    for direction, stage, tick in guide.unit_ticks(unit):
        part = next(p for p in guide.program.parts if p.loop == (f"_{unit.stack}" if unit.stack else ""))
        chunk = int((part.forward if direction == "forward" else part.backward).chunk_TP[tick, stage])
        first = stage == chunk == 0
        last = stage == stages - 1 and chunk == chunks - 1
        seen = by_tick.get((tick, int(direction == "backward")))
        if seen is not None and not (first if direction == "forward" else last):
            what = FORWARD if direction == "forward" else BACKWARD
            yield f"stage {stage:<3}{what}: {seen.text(_on_stage(found, stage))}"


def _numbered(rows: tuple[Seen, ...]) -> Iterator[tuple[int, Seen]]:
    """Yields rows with the number of their array among those of a step."""
    carries = sorted({seen.carry for seen in rows})
    for seen in rows:
        yield carries.index(seen.carry), seen
