"""Says in words what the search has found: operation, layer, place in the code, device, and statistics around it."""

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from jaxstack import families
from jaxstack.common.counts import plural
from jaxstack.common.files import short_path
from jaxstack.config import ModelConfig
from jaxstack.debug.guide import Place, RunGuide, is_stack
from jaxstack.debug.search import Finding
from jaxstack.debug.statistics import statistics
from jaxstack.debug.way import Loop
from jaxstack.pipeline.operations import TICKS

LAYERS_SHOWN = 4
"""Layers before a bad one, and behind it, that are described."""

FORWARD = "what it reads"
BACKWARD = "gradient of what it returns"


def describe(finding: Finding, guide: RunGuide) -> list[str]:
    """Returns what a user reads about a finding: layer, direction, operation, place in the code, and statistics."""
    of = "the loss, in the forward pass" if not finding.result else "gradients; the loss is finite"
    lines = [f"first    {finding.equation.primitive.name}, for {of}"]
    if where := place(finding, guide):
        lines.append(f"where    {where}")
    if on := device(finding):
        lines.append(f"device   {on}")
    lines += code_lines(finding)
    lines += around(finding, guide)
    lines += [f"input    {statistics(value)}" for value in finding.inputs]
    lines += [f"output   {statistics(value)}" for value in finding.outputs]
    return lines


def code_lines(finding: Finding) -> list[str]:
    """Returns a line for each place in the code that leads to the operation, innermost first, three at most."""
    frames = [frame for frame in finding.frames if "/jaxstack/debug/" not in frame[0]]
    return [
        f"{'called' if i else 'code':<9}{short_path(file)}:{line} in {function}"
        for i, (file, line, function) in enumerate(frames[:3])
    ]


def device(finding: Finding) -> str:
    """Returns on which devices of the mesh an output is bad, in words; empty outside of a mesh."""
    if finding.devices.mesh is None:
        return ""
    split = {axis: at for axis, at in finding.device.items() if finding.devices.mesh.shape[axis] > 1}
    first = ", ".join(f"{axis} {at}" for axis, at in split.items())
    count = int(finding.bad.sum())
    if count == 1:
        return f"{first} alone, of {plural(finding.bad.size, 'device')}"
    return f"{count} of {plural(finding.bad.size, 'device')}; the first is {first}, and its values follow"


def place(finding: Finding, guide: RunGuide) -> str:
    """Returns stage, microbatch and layer of a finding in words; empty outside of all of them."""
    parts = []
    unit = guide.place(finding)
    for loop in finding.loops:
        if is_stack(loop):
            parts.append(_layer(guide.model, finding, loop))
        elif loop.function == "accumulate" and loop.length == guide.grad_accum:
            of_pipeline = "" if unit is None else "accumulated "
            parts += [f"{of_pipeline}microbatch {loop.step} of {loop.length}"] * (guide.grad_accum > 1)
        elif unit is None or not loop.function.endswith(("execute", "fori_loop")):
            of = "" if loop.length is None else f" of {loop.length}"
            at = f"{short_path(loop.frames[0][0])}:{loop.frames[0][1]}" if loop.frames else "an unknown place"
            parts.append(f"step {loop.step}{of} of the loop at {at}")
    if (after := re.search(r"after_(\d+)_steps", finding.scopes)) and unit is None:  # see `blocks.scan_stack`
        parts.append(_layer_name(guide.model, finding, None, int(after[1])))
    if unit is not None:
        parts = [*parts[: guide.grad_accum > 1], _unit(finding, unit, guide)]
    return ", ".join(parts)


def _unit(finding: Finding, unit: Place, guide: RunGuide) -> str:
    """Returns stage, microbatch and layer of a pipeline in words."""
    assert guide.program is not None
    schedule = guide.program.schedule
    parts = []
    if unit.work.startswith(("forward", "backward", "weight")):
        parts.append(f"stage {unit.stage} of {schedule.stages}")
    work = re.sub(r"_(?!grad|in)\w+$", "", unit.work) if unit.stack else unit.work
    names = {"embed": "embedding", "embed_grad": "gradient of the embedding", "loss": "loss with its gradients"}
    names |= {"enter": f"begin of {unit.stack}", "enter_grad": f"gradient of the begin of {unit.stack}"}
    if work in names:
        parts.append(f"{names[work]} in tick {unit.tick}")
    elif work:
        parts.append(f"{work.split('_')[0]} unit")
    if unit.microbatch is not None:
        parts.append(f"microbatch {unit.microbatch} of {schedule.microbatches}")
    if unit.group is not None:
        parts.append(_layer_name(guide.model, finding, unit.stack, unit.group))
    return ", ".join(parts)


def _layer(model: ModelConfig, finding: Finding, loop: Loop) -> str:
    names = [name for name in families.of(model).stacks(model) if f"stack_{name}" in loop.scopes]
    return _layer_name(model, finding, names[-1] if names else None, loop.step)


def _layer_name(model: ModelConfig, finding: Finding, stack: str | None, group: int) -> str:
    stacks = families.of(model).stacks(model)
    name = stack or next(iter(stacks))
    inner, size = _layers_of_step(finding)
    number = group * size + inner
    of_stack = f" of {name}" if len(stacks) > 1 else ""
    depth = stacks[name].depth * max(len(stacks[name].kinds), 1)
    return f"layer {number}{of_stack} ({number + 1} of {depth})"


def _layers_of_step(finding: Finding) -> tuple[int, int]:
    """Returns the number of the layer within its step of the loop over layers, and how many layers a step has."""
    parts = re.findall(r"layer_(\d+)_of_(\d+)", finding.scopes)
    inner, size = map(int, parts[-1]) if parts else (0, 1)
    return inner, size


def around(finding: Finding, guide: RunGuide) -> Iterator[str]:
    """Yields the statistics of layers, or stages, before the bad one and behind it, forward and backward."""
    unit = guide.place(finding)
    size = _layers_of_step(finding)[1]
    for loop in finding.loops:
        if is_stack(loop):
            for one in sorted((loop, *loop.others), key=lambda loop: loop.reverse):
                what = BACKWARD if one.reverse else FORWARD
                near = [reading for reading in one.readings if abs(reading.step - loop.step) <= LAYERS_SHOWN]
                for reading in sorted(near, key=lambda reading: reading.step):
                    yield f"layer {reading.step * size:<3}{what}: {reading.text()}"
        elif unit is not None and unit.group is not None and loop.scopes.endswith(unit.work):
            yield from _layers_of_unit(finding, unit, loop, guide, size)
        elif unit is not None and loop.readings and unit.microbatch is not None:
            yield from _stages(finding, unit, guide)


def _on_stage(finding: Finding, stage: int) -> np.ndarray:
    """Returns which devices of the mesh are of a stage."""
    axes = finding.devices.axes
    index = np.indices(finding.bad.shape)[axes.index("pipe")] if "pipe" in axes else np.zeros(finding.bad.shape, int)
    return index == stage


def _layers_of_unit(finding: Finding, unit: Place, loop: Loop, guide: RunGuide, size: int) -> Iterator[str]:
    """Yields what the layers of a unit read up to the bad one, in the order in which they ran."""
    what = BACKWARD if unit.work.startswith("backward") else FORWARD
    devices = _on_stage(finding, unit.stage)
    outer = finding.loops[: finding.loops.index(loop)]
    for reading in loop.readings[-LAYERS_SHOWN - 1 :]:
        layer = guide.place(replace(finding, loops=(*outer, replace(loop, step=reading.step))))
        if layer is not None and layer.group is not None:
            yield f"layer {layer.group * size:<3}{what}: {reading.text(devices)}"


def _stages(finding: Finding, unit: Place, guide: RunGuide) -> Iterator[str]:
    """Yields what the stages read for the microbatch of a unit, and the gradients that they get, in the model's order.

    They are what each stage receives from its neighbour. The first stage reads the embedding, and the last one gets the
    gradient of the loss; these are not sent.
    """
    ticks = [loop for loop in finding.loops if loop.scopes.endswith(TICKS)]
    if guide.program is None:
        return
    stages = guide.program.schedule.stages
    chunks = guide.program.parts[0].stages.chunks
    # In each tick, stages read activations (the lower carry) and gradients.
    carries = sorted({reading.carry for reading in ticks[0].readings})
    by_tick = {(reading.step, carries.index(reading.carry)): reading for reading in ticks[0].readings}
    for direction, stage, tick in guide.unit_ticks(unit):
        part = next(p for p in guide.program.parts if p.loop == (f"_{unit.stack}" if unit.stack else ""))
        chunk = int((part.forward if direction == "forward" else part.backward).chunk_TP[tick, stage])
        first = stage == chunk == 0
        last = stage == stages - 1 and chunk == chunks - 1
        reading = by_tick.get((tick, int(direction == "backward")))
        if reading is not None and not (first if direction == "forward" else last):
            what = FORWARD if direction == "forward" else BACKWARD
            yield f"stage {stage:<3}{what}: {reading.text(_on_stage(finding, stage))}"
