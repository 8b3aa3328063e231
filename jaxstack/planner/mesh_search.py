"""Searches the meshes of a run on a number of devices, and ranks the meshes that fit by their predicted time.

Beside the axes of the mesh, the search chooses what goes with it: the pipeline's schedule, chunks and microbatches,
gradient accumulation, and what is recomputed. None of these changes what a step computes. What is allowed follows from
the checks of the configuration, of the pipeline and of the sharding rules: a candidate is what passes all of them.

Families without formulas are traced, in a second or more for each candidate. For these, a pipeline has the schedule and
chunks that are given, or 1f1b without chunks, and about four microbatches for each stage.

A candidate fits if `estimate.memory` is at most `HEADROOM` of the memory. The search is branch and bound: each set of
candidates has seconds that none of them beats (`step_floor`), and no candidate is examined whose bound exceeds the
times found. The result equals the result of trying all candidates. Nothing is compiled, and all meshes are abstract.
"""

import heapq
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, get_args, get_type_hints

from jaxstack.config import Config, ConfigError, DataConfig, PipelineConfig, resolve, with_values
from jaxstack.planner import memory, shards
from jaxstack.planner.estimate import divisors
from jaxstack.planner.job import Job
from jaxstack.planner.memory import Flags, Need, Room
from jaxstack.planner.sizes import LayerStack, has_formulas, layer_stacks
from jaxstack.planner.step_floor import Floor
from jaxstack.sharding import AXES
from jaxstack.sharding.mesh import BATCH_AXES
from jaxstack.training.state import TrainState

PIPELINE_KEYS = ("pipeline.schedule", "pipeline.chunks", "pipeline.microbatches")

SCHEDULES = sorted(get_args(get_type_hints(PipelineConfig)["schedule"]))
"""Values of `pipeline.schedule`; 1f1b, which needs the least memory, is the first."""

LESS = {"none": (), "dots": ("none",), "selective": ("none",), "full": ("none", "dots", "selective")}
"""For each recomputation policy, the policies that repeat only a part of its work and are never slower."""

HEADROOM = 0.9
"""Fraction of the memory that a candidate may need by formula, whose error is up to a tenth."""

NEVER = Floor(math.inf)
"""Bound of candidates that do not fit."""

SAME = 1e-5
"""Relative difference of two times that are compared by memory, see `Candidate.order`."""


class Clock(Protocol):
    """Predicts the time of a training step."""

    def seconds(self, job: Job) -> float:
        """Returns the seconds of a step."""

    def floor(self, job: Job) -> Floor:
        """Returns a lower bound of the seconds of all candidates that do the same or more work on the same mesh.

        Other candidates may have more microbatches or recomputation, and another schedule.
        """


@dataclass(frozen=True)
class Candidate:
    """A configuration with a mesh that fits.

    Attributes:
      cfg: the resolved configuration.
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
      too_large: number of examined candidates that do not fit.
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
      devices: number of devices.
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
                        if job is not None and shards.divides(job.model, job.ctx):
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
        if "train.remat" in self.given:
            return (self.cfg.train.remat,)
        return tuple(remat for remat in LESS if remat != "none" or not self.cfg.train.offloads_residuals)

    def pipelines(self, sizes: Flags, accum: int) -> list[Flags]:
        """Returns the pipelines for a mesh: schedules and chunks, each with all numbers of microbatches, most first.

        Args:
          sizes: sizes of the mesh.
          accum: value of `train.grad_accum`.
        """
        cfg = self.cfg
        stages = sizes["mesh.pipe"]
        if stages == 1:
            return [{}]
        kept = {key: getattr(cfg.pipeline, key.partition(".")[2]) for key in PIPELINE_KEYS if key in self.given}
        groups = cfg.model.layer_groups
        if stages > groups:
            return []
        chunks = [n for n in divisors(groups // stages) if n > 1] if groups % stages == 0 else []
        if kept.get("pipeline.chunks", 1) > 1:
            chunks = [kept["pipeline.chunks"]]
        shapes = [(name, 1) for name in SCHEDULES if name != "interleaved_1f1b"]  # with one chunk it is 1f1b
        shapes += [(name, n) for n in chunks for name in SCHEDULES]
        if len(stacks := layer_stacks(cfg.model)) > 1:  # each has its chunks, and `resolve` runs 1f1b interleaved
            names = [kept["pipeline.schedule"]] if "pipeline.schedule" in kept else ["1f1b", "gpipe"]
            counts = [kept["pipeline.chunks"]] if "pipeline.chunks" in kept else [1, *_chunks(stacks, stages)]
            shapes = [(name, n) for n in counts for name in names]
        if not has_formulas(cfg.model):  # each candidate is traced, in seconds
            shapes = [(kept.get("pipeline.schedule", "1f1b"), kept.get("pipeline.chunks", 1))]
        replicas = math.prod(sizes[f"mesh.{axis}"] for axis in ("data", "fsdp", "expert"))
        found = [
            {"pipeline.schedule": schedule, "pipeline.chunks": n, "pipeline.microbatches": count}
            for schedule, n in shapes
            for count in self._microbatches(cfg.data.batch_size // accum // replicas, stages)
            if (n == 1 and len(stacks) == 1) or count % stages == 0  # chunks need groups of as many as stages
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


def _chunks(stacks: Sequence[LayerStack], stages: int) -> list[int]:
    """Returns the numbers of chunks above 1 that divide the layers of the largest stack evenly."""
    layers = max(one.layers for one in stacks)
    return [n for n in divisors(layers // stages) if n > 1] if layers % stages == 0 else []


@dataclass(frozen=True)
class Branch:
    """Candidates of one mesh that share some values, with a bound of their times.

    Attributes:
      sizes: sizes of the mesh.
      floor: seconds that no candidate of the branch beats, and what its layers take. They are infinite if no candidate
        fits.
      least: bytes that every candidate of the mesh needs on a device.
      accum: value of `train.grad_accum`. `None` means that candidates have any.
      pipelines: pipelines of the candidates, which have one number of microbatches.
      remat: value of `train.remat`. `None` means that candidates have any.
      divided: for each part that is a branch of its own already, the microbatches of a replica, and seconds that none
        of the part's candidates beats; see `divide`.
    """

    sizes: Flags
    floor: Floor
    least: float = 0.0
    accum: int | None = None
    pipelines: tuple[Flags, ...] = ()
    remat: str | None = None
    divided: tuple[tuple[int, float], ...] = ()

    @property
    def values(self) -> Flags:
        """The values of the first candidate."""
        return self.sizes | self.pipelines[0] | {"train.grad_accum": self.accum, "train.remat": self.remat}


class Search:
    """Finds the fastest candidates that fit, by branch and bound, and keeps what it finds in `found`.

    The branch with the least bound is divided first: by accumulation and number of microbatches, then by recomputation,
    then by schedule. So a candidate is examined only if no better one is known by then.

    Args of the constructor: see `search`.
    """

    def __init__(self, space: Space, room: Room, clock: Clock) -> None:
        self.space = space
        self.room = room
        self.clock = clock
        self.found = Found()
        self._bounds_time = has_formulas(space.cfg.model)
        self._states: dict[tuple[tuple[int, ...], tuple[int, ...]], TrainState | None] = {}
        self._limit = HEADROOM * room.bytes / room.sharing
        self._fitted: set[tuple[object, ...]] = set()
        self._shares: dict[tuple[object, ...], float] = {}

    def job(self, values: Flags) -> Job | None:
        """Returns a candidate with its state, or None if a check refuses it or a rule does not divide a parameter."""
        job = self.space.make(values)
        return None if job is None else self._with_state(job)

    def _with_state(self, job: Job) -> Job | None:
        """Returns a job with its state, or None if a rule does not divide a parameter."""
        slots: tuple[int, ...] = ()
        if job.ctx.layout.pipeline is not None:
            slots = tuple(len(part.layer_of_slot) for part in job.ctx.layout.pipeline.stages.parts.values())
        key = tuple(job.cfg.mesh.sizes.values()), slots
        if key not in self._states:
            try:
                self._states[key] = job.state
            except ConfigError:
                self._states[key] = None
        state = self._states[key]
        return None if state is None else replace(job, known_state=state)

    def fits(self, job: Job) -> Need | None:
        """Returns the memory of a candidate that fits, or None; counts it."""
        need = memory.need_of(job, job.state, self.space.platform)
        self.found.examined += 1
        if need.formula <= self._limit:
            return need
        self.found.too_large += 1
        least = self.found.least
        if least is None or need.formula < least.need.formula:
            self.found.least = Candidate(job.cfg, math.inf, need)
        return None

    def first(self, sizes: Flags) -> Branch | None:
        """Returns the branch of all candidates of a mesh, or None if there are none.

        The bound is computed with the fewest microbatches: these have the largest matmuls, which are never slower. The
        least memory is computed there, too.
        """
        for accum in self._accums(sizes):
            for piped in _fewest_first(self.space.pipelines(sizes, accum)):
                values = sizes | piped | {"train.grad_accum": accum, "train.remat": self.space.remats[0]}
                try:
                    job = self.space.require(values)
                except ConfigError as error:
                    if not any(word in str(error) for word in ("accum", "pipeline", "batch")):
                        return None  # a message names what it refuses: it is the mesh, whatever these keys are
                    continue
                if not shards.divides(job.model, job.ctx):
                    continue
                least = memory.least_bytes(job, self.space.platform) if self._bounds_time else 0.0
                if least > self._limit:
                    return Branch(sizes, NEVER, least)
                if (known := self._with_state(job)) is not None:
                    free = known if "train.remat" in self.space.given else known.with_remat("none")
                    return Branch(sizes, self.clock.floor(free), least)
        return None

    def _accums(self, sizes: Flags) -> list[int]:
        """Returns the values of `train.grad_accum` whose microbatches the devices divide."""
        replicas = math.prod(sizes[f"mesh.{axis}"] for axis in BATCH_AXES)
        return [n for n in self.space.accums if self.space.cfg.data.batch_size % (n * replicas) == 0]

    def can_fit(self, sizes: Flags) -> bool:
        """Returns whether any candidate of a mesh may fit: one of those that need the least memory does.

        The most recomputation and microbatches need the least memory. A model with few activations needs less without
        accumulation, because accumulated gradients are arrays of their own.
        """
        accums = self._accums(sizes)
        for ordered in (accums, accums[::-1]):
            tried = (
                self.job(sizes | piped | {"train.grad_accum": accum, "train.remat": remat})
                for accum in ordered
                for piped in self.space.pipelines(sizes, accum)[:1]
                for remat in self.space.remats[-2:]
            )
            jobs = [job for job in tried if job is not None]
            if any(self.fits(job) is not None for job in jobs[:2]):  # of the first accumulation that is valid
                return True
        return False

    def divide(self, branch: Branch) -> list[Branch]:
        """Returns the parts of a branch, each with its own bound.

        More microbatches in a pipeline do what accumulation does, and with less idle time. A multiple of a number of
        microbatches is never faster. So all parts but the first stay together until their common bound is the least:
        their own bounds need large tables of schedules.
        """
        if branch.accum is None:
            return self._by_microbatches(branch)
        if branch.remat is None:
            return self._by_remat(branch)
        stages = branch.sizes["mesh.pipe"]
        return [
            replace(branch, pipelines=(piped,), floor=branch.floor.with_idle(self.space.cfg.model, stages, piped))
            for piped in branch.pipelines
        ]

    def _by_microbatches(self, branch: Branch) -> list[Branch]:
        traces = not self._bounds_time and not branch.divided  # each candidate, in seconds
        if traces and not self.can_fit(branch.sizes):
            return []
        accums = self._accums(branch.sizes)
        groups: dict[tuple[int, int | None], list[Flags]] = {}
        for accum in accums if branch.sizes["mesh.pipe"] == 1 else accums[:1]:
            for piped in self.space.pipelines(branch.sizes, accum):
                groups.setdefault((accum, piped.get("pipeline.microbatches")), []).append(piped)
        known = dict(branch.divided)
        numbers = {key: key[0] * (key[1] or 1) for key in groups}
        left = sorted((key for key in groups if numbers[key] not in known), key=lambda key: numbers[key])
        if not left:
            return []
        first, *others = left
        part = replace(branch, divided=(), accum=first[0], pipelines=tuple(groups[first]))
        if len(part.pipelines) > 1 and (job := self.job(replace(part, remat=self.space.remats[0]).values)) is not None:
            part = replace(part, floor=self.clock.floor(job))
        if not others:
            return [part]
        known[numbers[first]] = part.floor.seconds
        least = min(
            max((seconds for number, seconds in known.items() if numbers[key] % number == 0), default=0.0)
            for key in others
        )
        floor = replace(branch.floor, seconds=max(branch.floor.seconds, least))
        return [part, replace(branch, floor=floor, divided=tuple(known.items()))]

    def _by_remat(self, branch: Branch) -> list[Branch]:
        parts = [replace(branch, remat=remat) for remat in self.space.remats]
        if len(branch.pipelines) == 1:
            return parts
        return [replace(part, floor=branch.floor.with_recomputation(self._repeated(part))) for part in parts]

    def _repeated(self, branch: Branch) -> float:
        """Returns which share of the forward units the backward units repeat beyond the first policy.

        It depends on the policy and on the shapes of one layer and microbatch, which many meshes share.
        """
        assert branch.accum is not None
        rows = self.space.cfg.data.batch_size // branch.accum // branch.pipelines[0]["pipeline.microbatches"]
        split = math.prod(branch.sizes[f"mesh.{axis}"] for axis in BATCH_AXES)
        inner = (branch.sizes[f"mesh.{axis}"] for axis in ("context", "expert", "tensor"))
        key = branch.remat, rows // split, *inner
        if key not in self._shares:
            jobs = [self.job(replace(branch, remat=remat).values) for remat in (self.space.remats[0], branch.remat)]
            before, after = (None if job is None else self.clock.floor(job) for job in jobs)
            if before is None or after is None or not before.forward:
                return 0.0
            self._shares[key] = (after.backward - before.backward) / before.forward
        return self._shares[key]

    def examine(self, branch: Branch) -> Candidate | None:
        """Returns the only candidate of a branch, or None if it does not fit or one that fits is never slower.

        More accumulation helps only where less does not fit, since it repeats what is done once for a microbatch. More
        recomputation helps only where less does not fit, too.
        """
        assert branch.accum is not None
        assert branch.remat is not None
        others = (*branch.sizes.values(), *branch.pipelines[0].values())
        faster = (
            (*others, accum, remat)
            for accum in self._accums(branch.sizes)
            for remat in (branch.remat, *LESS[branch.remat])
            if accum <= branch.accum
        )
        if not self._fitted.isdisjoint(faster):
            return None
        job = self.job(branch.values)
        need = None if job is None else self.fits(job)
        if job is None or need is None:
            return None
        self._fitted.add((*others, branch.accum, branch.remat))
        return Candidate(job.cfg, self.clock.seconds(job), need)

    def best(self, branches: Sequence[Branch], count: int) -> list[Candidate]:
        """Returns the fastest candidate of each of the `count` fastest meshes, from the branches of all meshes.

        If none fits, `found.least` is one that needs little memory.
        """
        numbers = itertools.count()
        queue = [(branch.floor.seconds, next(numbers), branch) for branch in branches if branch.floor != NEVER]
        heapq.heapify(queue)
        found: dict[tuple[int, ...], Candidate] = {}
        while queue:
            bound, _, branch = heapq.heappop(queue)
            # Candidates whose times differ in rounding alone are compared by their memory.
            limits = sorted(one.seconds * (1 + SAME) for one in found.values())
            if len(limits) >= count and bound > limits[count - 1]:
                break
            mesh = tuple(branch.sizes.values())
            if mesh in found and bound > found[mesh].seconds * (1 + SAME):
                continue
            if branch.remat is None or len(branch.pipelines) > 1:
                for part in self.divide(branch):
                    heapq.heappush(queue, (max(bound, part.floor.seconds), next(numbers), part))
            elif (one := self.examine(branch)) is not None:
                found[mesh] = min(one, found.get(mesh, one), key=lambda c: c.order)
        for branch in sorted(branches, key=lambda branch: branch.least) if not found else ():
            if self.found.least is None or branch.least < self.found.least.need.formula:
                self.can_fit(branch.sizes)
        return sorted(found.values(), key=lambda c: c.order)[:count]

    @property
    def any_fits(self) -> bool:
        """Whether a mesh of the devices fits."""
        return any(self.can_fit(sizes) for sizes in self.space.meshes())


def _fewest_first(pipelines: list[Flags]) -> list[Flags]:
    """Returns pipelines by their number of microbatches; among equals the order stays."""
    return sorted(pipelines, key=lambda piped: piped.get("pipeline.microbatches") or 1)


def smaller_batches(data: DataConfig) -> list[int]:
    """Returns the divisors of the batch size that are smaller, largest first, and whose tokens fill all buckets."""
    return [n for n in divisors(data.batch_size)[-2::-1] if all(n * data.seq_len % each == 0 for each in data.lengths)]


def search(space: Space, room: Room, clock: Clock, count: int = 8) -> Found:
    """Returns the fastest candidates that fit, one for each mesh.

    Args:
      space: the candidates.
      room: memory of a device, or of all devices if they share it.
      clock: predicts times.
      count: meshes to return at most.
    """
    run = Search(space, room, clock)
    meshes = list(space.meshes())
    branches = [branch for sizes in meshes if (branch := run.first(sizes)) is not None]
    run.found.meshes = len(branches)
    run.found.ranked = run.best(branches, count)
    return run.found
