"""From a configuration to the program of its pipeline: the schedule, and the layers of each stage.

JAX is not imported.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from jaxstack.common.counts import plural
from jaxstack.config import ConfigError, ModelConfig, PipelineConfig
from jaxstack.config.expert_layers import stack_of
from jaxstack.pipeline.costs import Costs
from jaxstack.pipeline.partition import Partition, cut, even
from jaxstack.pipeline.program import Program
from jaxstack.pipeline.schedule import (
    Schedule,
    ScheduleError,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    zb1,
    zb_h1,
)
from jaxstack.pipeline.stages import Stages

SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": lambda stages, microbatches, chunks: gpipe(stages, microbatches),
    "1f1b": lambda stages, microbatches, chunks: one_f_one_b(stages, microbatches),
    "interleaved_1f1b": interleaved_one_f_one_b,
    "zb1": zb1,
    "zb_h1": lambda stages, microbatches, chunks: zb_h1(stages, microbatches),
}
"""Builds each schedule from stages, microbatches and chunks."""

WEIGHTLESS = ("gpipe", "1f1b", "interleaved_1f1b")
"""Schedules without weight units, which can run several stacks."""


MOST_STACKS = 3
"""Most stacks of a model whose layers `model.moe.layers` cuts. A program of four stacks hung on simulated devices."""


def resolve(
    pipeline: PipelineConfig,
    model: ModelConfig,
    stages: int,
    batch_size: int,
    grad_accum: int = 1,
    replicas: int = 1,
    static: bool = False,
    stacks: Mapping[str, tuple[int, int]] | None = None,
) -> Program:
    """Returns the program of a model's stages.

    Args:
      pipeline: the schedule, and where stages are cut.
      model: the model whose layers are cut.
      stages: size of the mesh axis `pipe`, P.
      batch_size: sequences of a batch.
      grad_accum: microbatches of gradient accumulation. The pipeline divides each into its own microbatches.
      replicas: number of parts of the mesh over which the sequences are split.
      static: whether all loops have static trip counts. A model with several stacks ignores it.
      stacks: layers of each stack and its period. By default one stack, as a decoder has.

    Raises:
      ScheduleError: the sizes do not fit each other; the message names sizes that do.
      ConfigError: the file of `pipeline.partition` has the costs of another model, or no cut fits in memory.
    """
    sequences = batch_size // grad_accum // replicas
    batch = (
        f"another data.batch_size={batch_size} (over train.grad_accum={grad_accum} and the axes that share the batch)"
    )

    def microbatches_of(chunks: int) -> int:
        return _microbatches(pipeline.microbatches, stages, sequences, chunks, batch)

    if stacks is not None and len(stacks) > 1:
        return _resolve_stacks(pipeline, model, stages, stacks, microbatches_of)
    depth, period = next(iter(stacks.values())) if stacks else (model.num_layers, len(model.windows))
    groups = -(-depth // period)
    model_chunks = stages * pipeline.chunks
    unit = "layers" if period == 1 else f"groups of {plural(period, 'layer')} (model.windows)"
    if depth < model.num_layers:  # a layer of the stack is a unit of layers of several kinds
        unit = f"units of {plural(model.num_layers // depth, 'layer')}"
    if model_chunks > groups:
        fits = [n for n in range(1, groups + 1) if n * pipeline.chunks <= groups] or [1]
        chunks = f", or pipeline.chunks={groups // stages}" if groups >= stages else ""
        raise ScheduleError(
            f"mesh.pipe={stages} x pipeline.chunks={pipeline.chunks} makes {plural(model_chunks, 'model chunk')}, but "
            f"model.num_layers={model.num_layers} has only {groups} {unit}. Use mesh.pipe={fits[-1]}{chunks}."
        )
    microbatches = microbatches_of(pipeline.chunks)
    groups_G = even(groups, model_chunks)
    if pipeline.partition == "even":
        placed = Stages(stages, _layers(depth, period, groups_G), period)
        return _even_program(pipeline.schedule, placed, microbatches, static)
    schedule = SCHEDULES[pipeline.schedule](stages, microbatches, pipeline.chunks)
    partition = _cut(pipeline.partition, model.num_layers, schedule, groups, unit)
    placed = Stages(stages, _layers(depth, period, partition.layers), period)
    return Program(schedule, placed, partition, static)


def _layers(depth: int, period: int, groups_G: Sequence[int]) -> tuple[int, ...]:
    """Returns the layers of each model chunk from its groups, of which the last one may have fewer layers."""
    *most, last = (period * n for n in groups_G)
    return (*most, last - (period * sum(groups_G) - depth))


def _resolve_stacks(
    pipeline: PipelineConfig,
    model: ModelConfig,
    stages: int,
    stacks: Mapping[str, tuple[int, int]],
    microbatches_of: Callable[[int], int],
) -> Program:
    """Returns the program of a model with several stacks, see `resolve`. Each stack is cut evenly over all stages."""
    chunks = pipeline.chunks
    for key, works in (("schedule", WEIGHTLESS), ("partition", ("even",)), ("loops", ("auto", "dynamic"))):
        if getattr(pipeline, key) not in works:
            raise ScheduleError(
                f"pipeline.{key}={getattr(pipeline, key)} is for models with one stack of layers, but "
                f"model.family={model.family} has {len(stacks)} ({', '.join(stacks)}). Use "
                f"{' or '.join(f'pipeline.{key}={value}' for value in works)}."
            )
    layers: tuple[int, ...] = ()
    segments = {one.name: one for of_stack in model.expert_segments.values() for one in of_stack}
    parts = {one.name: one for of_stack in model.expert_segments.values() for one in of_stack if of_stack[1:]}
    if len(stacks) > MOST_STACKS and parts:
        raise ScheduleError(
            f"{model.moe.layers.shown} cuts the model into {plural(len(stacks), 'stack')} of layers "
            f"({', '.join(stacks)}), and mesh.pipe={stages} runs at most {MOST_STACKS}: with four, devices of a tensor "
            f"group waited for each other. Let layers with experts repeat as a group, or use mesh.pipe=1."
        )
    for name, (depth, period) in stacks.items():
        groups = depth // period
        # A segment of a stack may leave stages without a layer, unless it is the largest one of its stack.
        largest = max(stacks[other][0] for other in stacks if stack_of(other) == stack_of(name))
        if stages * chunks > groups and (depth == largest or name not in parts):
            unit = period * len(segments[name].kinds) if name in segments else period
            size = plural(groups, "layer") if unit == 1 else f"{plural(groups, 'group')} of {plural(unit, 'layer')}"
            raise ScheduleError(
                f"mesh.pipe={stages} x pipeline.chunks={chunks} makes {plural(stages * chunks, 'model chunk')} of each "
                f"stack, but the {name} of model.family={model.family} has only {size}. Use "
                f"mesh.pipe={max(groups // chunks, 1)}."
            )
        full = min(groups, stages * chunks)
        layers += tuple(period * n for n in even(groups, full)) + (0,) * (stages * chunks - full)
    all_chunks = chunks * len(stacks)
    named = tuple((name, chunks, period) for name, (_, period) in stacks.items())
    placed = Stages(stages, layers, stacks=named, sparse=bool(parts))
    return _program_of_stacks(pipeline.schedule, placed, microbatches_of(all_chunks))


@lru_cache(maxsize=512)
def _program_of_stacks(schedule: str, stages: Stages, microbatches: int) -> Program:
    """Returns the program of several stacks. A search over meshes asks for the same ones often."""
    make = gpipe if schedule == "gpipe" else interleaved_one_f_one_b
    return Program(make(stages.stages, microbatches, stages.chunks), stages)


@lru_cache(maxsize=512)
def _even_program(schedule: str, stages: Stages, microbatches: int, static: bool) -> Program:
    """Returns the program of stages with equally many layers. A search over meshes asks for the same ones often."""
    return Program(SCHEDULES[schedule](stages.stages, microbatches, stages.chunks), stages, static=static)


def _cut(name: str, num_layers: int, schedule: Schedule, groups: int, unit: str) -> Partition:
    """Returns the partition by a file of costs, the value of `pipeline.partition`."""
    if name == "auto":
        raise ConfigError(
            "pipeline.partition=auto is measured by train.py when it trains. Elsewhere use even, or name a file made "
            "by jaxstack profile."
        )
    costs = Costs.load(Path(name))
    if costs.layers != groups:
        raise ConfigError(
            f"pipeline.partition={name} holds costs of {plural(costs.layers, 'layer')}, but "
            f"model.num_layers={num_layers} has {groups} {unit}. Measure this model by "
            f"jaxstack profile, or use pipeline.partition=even."
        )
    try:
        best = cut(costs, schedule, costs.memory_bytes)
    except ConfigError as error:
        raise ConfigError(f"pipeline.partition={name}: {error}") from error
    evenly = Partition(costs, schedule, even(groups, schedule.model_chunks))
    fits = costs.memory_bytes is None or evenly.stage_bytes <= costs.memory_bytes
    # `cut` assumes that stages run freely, but a tick of the executor takes as long as its longest unit.
    return evenly if fits and evenly.lockstep_seconds <= best.lockstep_seconds else best


def _microbatches(asked: int | None, stages: int, sequences: int, chunks: int, batch: str) -> int:
    """Returns `pipeline.microbatches`, which is `asked`; `None` means the largest that works, up to four a stage.

    `batch` says in a message what else decides.
    """
    multiple = stages if chunks > 1 else 1  # interleaved schedules need groups of P microbatches
    works = [m for m in range(multiple, sequences + 1, multiple) if sequences % m == 0]
    if asked is None and works:
        return max([m for m in works if m <= 4 * stages], default=works[0])
    if asked not in works:
        near = sorted(works, key=lambda m: (abs(m - (asked or stages)), m))[:2]
        advice = f"Use {' or '.join(map(str, sorted(near)))}, or {batch}" if near else f"No number does: use {batch}"
        groups = f" in groups of mesh.pipe={stages} ({plural(chunks, 'model chunk')} a stage)" if multiple > 1 else ""
        raise ScheduleError(
            f"pipeline.microbatches={'null' if asked is None else asked} does not divide the "
            f"{plural(sequences, 'sequence')} of a replica{groups}. {advice}."
        )
    return asked
