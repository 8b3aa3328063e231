"""Searches the meshes of a run on a number of devices, and ranks the meshes that fit by their predicted time.

Beside the axes of the mesh, the search chooses what goes with it: the pipeline's schedule, chunks and microbatches,
gradient accumulation, and what is recomputed. None of these changes what a step computes. What is allowed follows from
the checks of the configuration, of the pipeline and of the sharding rules: a candidate is what passes all of them.

Families without formulas are traced, in a second or more for each candidate. For these, a pipeline has the schedule and
chunks that are given, or 1f1b without chunks, and about four microbatches for each stage.

A candidate fits if `estimate.memory` is at most `HEADROOM` of the memory. Meshes are visited in the order of a lower
bound of their time, and no mesh is visited whose bound exceeds the times found. Nothing is compiled, and all meshes are
abstract.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Protocol, get_args, get_type_hints

from jaxstack import families
from jaxstack.config import Config, ConfigError, DataConfig, PipelineConfig, resolve, with_values
from jaxstack.planner import memory
from jaxstack.planner.estimate import divisors
from jaxstack.planner.job import Job
from jaxstack.planner.memory import Flags, Need, Room
from jaxstack.planner.sizes import has_formulas
from jaxstack.sharding import AXES
from jaxstack.training.state import Recipe, TrainState, abstract_state

PIPELINE_KEYS = ("pipeline.schedule", "pipeline.chunks", "pipeline.microbatches")

SCHEDULES = sorted(get_args(get_type_hints(PipelineConfig)["schedule"]))
"""Values of `pipeline.schedule`; 1f1b, which needs the least memory, is the first."""

LESS = {"none": (), "dots": ("none",), "selective": ("none",), "full": ("none", "dots", "selective")}
"""By recomputation policy, those that repeat only what it repeats and are never slower. `none` is the first."""

HEADROOM = 0.9
"""Fraction of the memory that a candidate may need by formula, whose error is up to a tenth."""


class Clock(Protocol):
    """Predicts the time of a training step."""

    def seconds(self, job: Job) -> float:
        """Returns the seconds of a step."""

    def bound(self, job: Job) -> float:
        """Returns seconds that no candidate on the mesh of one with the least recomputation and accumulation beats."""


@dataclass(frozen=True)
class Candidate:
    """A configuration with a mesh that fits.

    Attributes:
      seconds: predicted time of a step.
      need: memory of a device.
    """

    cfg: Config
    seconds: float
    need: Need

    @property
    def order(self) -> tuple[float, int, float, tuple[int, ...]]:
        """Sorts by time; among equals, fewer axes and less memory come first."""
        sizes = tuple(self.cfg.mesh.sizes.values())
        return (float(f"{self.seconds:.6g}"), sum(n > 1 for n in sizes), self.need.formula, sizes)


@dataclass
class Found:
    """The result of a search.

    Attributes:
      ranked: the best candidate of each mesh that was visited, fastest first.
      meshes: number of meshes that are possible.
      examined: number of candidates whose memory was estimated.
      too_large: how many of them do not fit.
      least: the candidate that needs the least memory, if none fits.
    """

    ranked: list[Candidate] = field(default_factory=list)
    meshes: int = 0
    examined: int = 0
    too_large: int = 0
    least: Candidate | None = None


def factorisations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yields every tuple of `count` positive integers with this product."""
    if count == 1:
        yield (number,)
        return
    for first in divisors(number):
        for rest in factorisations(number // first, count - 1):
            yield (first, *rest)


@dataclass(frozen=True)
class Space:
    """What a search may choose from.

    Attributes:
      cfg: the resolved configuration.
      devices: their number.
      platform: `cpu`, `gpu` or `tpu`.
      given: keys of `SEARCHED_KEYS` whose values in `cfg` are kept.
    """

    cfg: Config
    devices: int
    platform: str
    given: Collection[str] = ()

    def candidates(self) -> Iterator[Config]:
        """Yields every configuration that the search may choose.

        Left out are only repetitions: `interleaved_1f1b` with one chunk is `1f1b`, chunks that do not divide the layers
        evenly run as long as larger ones, without a pipeline its keys mean nothing, and without experts `expert` is
        `fsdp`.
        """
        for sizes in self.meshes():
            for accum in self.accums:
                for piped in self.pipelines(sizes, accum):
                    for remat in self.remats:
                        job = self.make(sizes | piped | {"train.grad_accum": accum, "train.remat": remat})
                        if job is not None and _divides(job):
                            yield job.cfg

    def meshes(self) -> Iterator[Flags]:
        """Yields the sizes of every mesh of the devices that keeps the given ones; not all of them are valid.

        Without experts, `expert` splits what `fsdp` splits, so that it stays 1.
        """
        sizes = self.cfg.mesh.sizes
        kept = {axis: sizes[axis] for axis in AXES if f"mesh.{axis}" in self.given and sizes[axis] > 0}
        if not self.cfg.model.moe.num_experts:
            kept.setdefault("expert", 1)
        for factors in factorisations(self.devices, len(AXES)):
            named = dict(zip(AXES, factors, strict=True))
            if all(named[axis] == size for axis, size in kept.items()):
                yield {f"mesh.{axis}": size for axis, size in named.items()}

    @property
    def accums(self) -> list[int]:
        """Values of `train.grad_accum`, ascending."""
        if "train.grad_accum" in self.given:
            return [self.cfg.train.grad_accum]
        return divisors(self.cfg.data.batch_size)

    @property
    def remats(self) -> tuple[str, ...]:
        """Values of `train.remat`; the last ones need the least memory."""
        return (self.cfg.train.remat,) if "train.remat" in self.given else tuple(LESS)

    def pipelines(self, sizes: Flags, accum: int) -> list[Flags]:
        """Returns the pipelines for a mesh: schedules and chunks, each with all numbers of microbatches, most first."""
        cfg = self.cfg
        stages = sizes["mesh.pipe"]
        if stages == 1:
            return [{}]
        kept = {key: getattr(cfg.pipeline, key.partition(".")[2]) for key in PIPELINE_KEYS if key in self.given}
        groups = cfg.model.layer_groups
        chunks = [n for n in divisors(groups // stages) if n > 1] if groups % stages == 0 else []
        if kept.get("pipeline.chunks", 1) > 1:
            chunks = [kept["pipeline.chunks"]]
        shapes = [(name, 1) for name in SCHEDULES if name != "interleaved_1f1b"]  # with one chunk it is 1f1b
        shapes += [(name, n) for n in chunks for name in SCHEDULES]
        if not has_formulas(cfg.model):  # each candidate is traced, in seconds
            shapes = [(kept.get("pipeline.schedule", "1f1b"), kept.get("pipeline.chunks", 1))]
        replicas = math.prod(sizes[f"mesh.{axis}"] for axis in ("data", "fsdp", "expert"))
        found = [
            {"pipeline.schedule": schedule, "pipeline.chunks": n, "pipeline.microbatches": count}
            for schedule, n in shapes
            for count in self._microbatches(cfg.data.batch_size // accum // replicas, stages)
        ]
        return [one for one in found if one.items() >= kept.items()]

    def _microbatches(self, sequences: int, stages: int) -> list[int]:
        """Returns the numbers of microbatches to try, most first. Where each is traced, it is about 4 a stage."""
        found = divisors(sequences)[::-1] if sequences else []
        if has_formulas(self.cfg.model):
            return found
        return sorted(found, key=lambda count: abs(math.log(count / (4 * stages))))[:1]

    def make(self, values: Flags) -> Job | None:
        """Returns the job with other values, or None if a check refuses it."""
        try:
            return self.require(values)
        except ConfigError:
            return None

    def require(self, values: Flags) -> Job:
        """Returns the job with other values.

        Raises:
          ConfigError: a check refuses it.
        """
        assert self.cfg.model.vocab_size is not None
        if values.get("mesh.pipe", self.cfg.mesh.pipe) == 1:  # a file's pipeline must not refuse other meshes
            values = values | {"pipeline.schedule": "1f1b", "pipeline.chunks": 1, "pipeline.microbatches": None}
        changed = resolve(with_values(self.cfg, values), None)
        return Job(changed, memory.context(changed, self.devices, self.platform))

    @property
    def is_possible(self) -> bool:
        """Whether the devices have any candidate."""
        return next(self.candidates(), None) is not None


def _divides(job: Job) -> bool:
    """Returns whether the mesh divides every parameter."""
    try:
        job.ctx.layout.parameters(families.spec(job.model))
    except ConfigError:
        return False
    return True


class Search:
    """Visits meshes, and keeps what it finds in `found`.

    Args of the constructor: see `search`.
    """

    def __init__(self, space: Space, room: Room, clock: Clock) -> None:
        self.space = space
        self.room = room
        self.clock = clock
        self.found = Found()
        self._states: dict[tuple[tuple[int, ...], tuple[int, ...]], TrainState | None] = {}

    def need(self, job: Job) -> Need | None:
        """Returns the memory of a device, or None if a rule does not divide a parameter. Counts the candidate."""
        state = self.state(job)
        return None if state is None else memory.need_of(job, state, self.space.platform)

    def state(self, job: Job) -> TrainState | None:
        """Returns the abstract state of a candidate, or None if a rule does not divide a parameter."""
        slots: tuple[int, ...] = ()
        if job.ctx.layout.pipeline is not None:
            slots = tuple(len(part.layer_of_slot) for part in job.ctx.layout.pipeline.stages.parts.values())
        key = tuple(job.cfg.mesh.sizes.values()), slots
        if key not in self._states:
            try:
                self._states[key] = abstract_state(Recipe.of(job.cfg), job.ctx)
            except ConfigError:
                self._states[key] = None
        return self._states[key]

    def fits(self, job: Job) -> Need | None:
        """Returns the memory of a candidate that fits, or None; counts it."""
        need = self.need(job)
        if need is None:
            return None
        self.found.examined += 1
        if need.formula * self.room.sharing <= HEADROOM * self.room.bytes:
            return need
        self.found.too_large += 1
        least = self.found.least
        if least is None or need.formula < least.need.formula:
            self.found.least = Candidate(job.cfg, math.inf, need)
        return None

    def first(self, sizes: Flags) -> tuple[float, Flags] | None:
        """Returns the lower bound of a mesh and its sizes, or None if no candidate has it."""
        for accum in self.space.accums:
            for piped in reversed(self.space.pipelines(sizes, accum)):
                job = self.make(sizes, accum, piped, self.space.remats[0])
                if job is not None and self.state(job) is not None:
                    return self.clock.bound(job), sizes
        return None

    def can_fit(self, sizes: Flags) -> bool:
        """Returns whether any candidate of a mesh may fit: one of those that need the least memory does.

        The most recomputation and microbatches need the least memory. A model with few activations needs less without
        accumulation, because accumulated gradients are arrays of their own.
        """
        accums = self.space.accums
        for ordered in (accums, accums[::-1]):
            tried = (
                self.make(sizes, accum, piped, remat)
                for accum in ordered
                for piped in self.space.pipelines(sizes, accum)[:1]
                for remat in self.space.remats[-2:]
            )
            jobs = [job for job in tried if job is not None]
            if any(self.fits(job) is not None for job in jobs[:2]):  # of the first accumulation that is valid
                return True
        return False

    def make(self, sizes: Flags, accum: int, piped: Flags, remat: str) -> Job | None:
        """Returns a candidate, or None if a check refuses it."""
        return self.space.make(sizes | piped | {"train.grad_accum": accum, "train.remat": remat})

    def visit(self, sizes: Flags) -> Candidate | None:
        """Returns the fastest candidate of a mesh that fits, or None if none does.

        More accumulation helps only where less does not fit, since it repeats what is done once for a microbatch. A
        pipeline has microbatches of its own.
        """
        if not self.can_fit(sizes):
            return None
        found: list[Candidate] = []
        accums = self.space.accums
        for piped in self.space.pipelines(sizes, accums[0]):
            fitted: dict[str, int] = {}  # by policy, the least accumulation that fits
            for remat in self.space.remats:
                enough = min((fitted[less] for less in LESS[remat] if less in fitted), default=math.inf)
                for accum in accums if sizes["mesh.pipe"] == 1 else accums[:1]:
                    if accum < enough and remat not in fitted and (one := self._fitting(sizes, accum, piped, remat)):
                        fitted[remat] = accum
                        found.append(one)
        return min(found, key=lambda one: one.order, default=None)

    def _fitting(self, sizes: Flags, accum: int, piped: Flags, remat: str) -> Candidate | None:
        job = self.make(sizes, accum, piped, remat)
        need = None if job is None else self.fits(job)
        return None if job is None or need is None else Candidate(job.cfg, self.clock.seconds(job), need)

    @property
    def any_fits(self) -> bool:
        """Whether a mesh of the devices fits."""
        return any(self.can_fit(sizes) for sizes in self.space.meshes())


def smaller_batches(data: DataConfig) -> list[int]:
    """Returns the divisors of the batch size that are smaller, largest first, and whose tokens fill all buckets."""
    return [n for n in divisors(data.batch_size)[-2::-1] if all(n * data.seq_len % each == 0 for each in data.lengths)]


def search(space: Space, room: Room, clock: Clock, count: int = 8) -> Found:
    """Returns the fastest candidates that fit, one for each mesh.

    Args:
      room: memory of a device, or of all devices if they share it.
      count: meshes to return at most.
    """
    run = Search(space, room, clock)
    bounds = [one for sizes in space.meshes() if (one := run.first(sizes)) is not None]
    run.found.meshes = len(bounds)
    ranked: list[Candidate] = []
    for bound, sizes in sorted(bounds, key=lambda one: (one[0], *one[1].values())):
        if len(ranked) >= count and bound > ranked[count - 1].seconds:
            break
        if (best := run.visit(sizes)) is not None:
            ranked = sorted([*ranked, best], key=lambda c: c.order)
    run.found.ranked = ranked[:count]
    return run.found
