"""What a run does beside its optimizer steps: the forward pass of a reference, and rollouts, in bytes and seconds.

The seconds of decoding are the least that memory and links allow. Other seconds are those of `step_time`.
"""

import math
from dataclasses import dataclass, replace

from jaxstack.common.counts import plural
from jaxstack.common.hardware import Chip
from jaxstack.config.training import PreferenceConfig, RLConfig
from jaxstack.planner import estimate, generation_memory, shards
from jaxstack.planner.explain import Figure
from jaxstack.planner.figures import work_figure
from jaxstack.planner.job import Job
from jaxstack.planner.roofline import ChipLimits
from jaxstack.planner.step_time import Placement, StepTime, work_of
from jaxstack.training.features.policy import scores_again


def rollout_memory(job: Job, step: list[Figure]) -> list[Figure]:
    """Returns the bytes of a rollout on one device by part. It is empty for a run without rollouts.

    The state and the reference stay where they are, and the step's other arrays do not exist yet.

    Args:
      step: the bytes of a step, see `figures.memory_by_policy`.
    """
    if job.cfg.learned_rewards is None:
        return []
    stay = (*estimate.EXACT[:2], estimate.FROZEN, f"parameters in {job.train.dtype}", estimate.WORK)
    tokens = job.data.seq_len
    _, cache = generation_memory.generation_need(_calls(job), tokens)
    rows = job.cfg.microbatch_size // job.ctx.layout.replicas
    formula = "{each:.12g} bytes x {rows} rows x {tokens} tokens"
    terms = {"each": cache / rows / tokens, "rows": rows, "tokens": tokens}
    return [
        *(figure for figure in step if figure.name in stay and figure.value),
        Figure(f"KV cache of {plural(rows, 'row')}", cache, formula, terms),
    ]


def _calls(job: Job) -> Job:
    """Returns the job with as many texts in a batch as a call of the sampler has."""
    return replace(job, cfg=replace(job.cfg, data=replace(job.data, batch_size=job.cfg.microbatch_size)))


@dataclass(frozen=True)
class Decoding:
    """What a device reads and gathers for each token of a call of the sampler.

    Attributes:
      weights: bytes of the weights, in the compute dtype. A stage of a pipeline reads its own once for each group.
      cache: bytes of keys and values, of texts of mean length.
      gathered: bytes of weights that other devices store.
      read: bytes/s of the memory.
      link: bytes/s of the links over which weights are gathered.
      tokens: number of decoding steps for one optimizer step.
    """

    weights: float
    cache: float
    gathered: float
    read: float
    link: float
    tokens: int

    @classmethod
    def of(cls, job: Job, limits: ChipLimits, rl: RLConfig) -> "Decoding":
        """Returns the decoding of a job, if every completion has `rl.tokens` tokens in each turn."""
        each = estimate.itemsize(job.train)
        spec = shards.flat_params(job.model.base, job.ctx).values()
        used = each * sum(math.prod(shards.used_shape(p, job.ctx)) for p in spec)
        groups = 1
        if job.ctx.layout.stages is not None:  # a stage reads its weights for each group of rows that passes
            rows = job.cfg.microbatch_size // job.ctx.layout.replicas
            groups = min(job.ctx.layout.stages.stages, rows)
        stored = each * sum(math.prod(shards.stored_shape(p, job.ctx)) for p in spec)
        _, cache = generation_memory.generation_need(_calls(job), job.data.seq_len)
        place = Placement(dict(shards.mesh_sizes(job.ctx)), limits)
        chip: Chip = limits.chip
        return cls(
            weights=groups * used,
            cache=cache * (1 - rl.tokens / 2 / job.data.seq_len),
            gathered=used - stored,
            read=chip.hbm_bandwidth,
            link=min(place.bandwidth(("fsdp",), "all-gather")),
            tokens=rl.tokens * rl.turns * job.train.grad_accum,
        )

    @property
    def figure(self) -> Figure:
        """The seconds of all decoding steps, with their formula."""
        formula = (
            "{tokens} tokens x (({weights:.6g} + {cache:.6g}) bytes / {read:.6g} bytes/s + {gathered:.6g} bytes / "
            "{link:.6g} bytes/s)"
        )
        value = self.tokens * ((self.weights + self.cache) / self.read + self.gathered / self.link)
        return Figure("rollout, decoding at least", value, formula, vars(self))


def time_beside(job: Job, limits: ChipLimits, time: StepTime) -> list[Figure]:
    """Returns the seconds of one step's share of what is computed beside the step itself, by part.

    A reference computes the forward pass of each batch once more, and so does the divergence of
    `preference.loss=kto`. A run that learns from rewards decodes completions, and computes forward passes over them:

    - two with `rl.exact`: the first chooses tokens, the second scores them,
    - one for the trainer's log-probabilities, where the sampler's may differ.

    With `rl.exact` the step also computes its forward pass again. In a pipeline, only `train.remat=full` does so.

    Args:
      time: time of the step.
    """
    aim = job.cfg.aim
    if aim is None:
        return []
    found = []
    forward = _forward(job, limits, time)
    if aim.has_reference:
        found.append(replace(forward, name="reference, forward pass"))
    if isinstance(aim, PreferenceConfig):
        if aim.loss == "kto":
            found.append(replace(forward, name="divergence, forward pass"))
        return found
    found.append(Decoding.of(job, limits, aim).figure)
    passes = 2 * aim.exact + scores_again(job.model, job.cfg.mesh, aim)
    terms = {"passes": passes, "forward": forward.value}
    found.append(
        Figure(
            f"rollout, {plural(passes, 'forward pass')}", passes * forward.value, "{passes} x {forward:.6g} s", terms
        )
    )
    if aim.exact and job.ctx.layout.pipeline is None:
        found.append(replace(forward, name="update, forward pass again"))
    return found


def _forward(job: Job, limits: ChipLimits, time: StepTime) -> Figure:
    """Returns the seconds of a forward pass, and of its part of what the step waits for collectives."""
    work = work_of(job, limits)
    ops = [op for op in work.ops if not (op.in_backward or op.for_remat or op.of_update)]
    figure = work_figure("forward pass", ops, limits, work.kernel)
    waits = math.fsum(time.exposed.values()) * time.forward / time.layers
    formula = figure.formula + " + {waits:.6g} s of waiting"
    return replace(figure, value=figure.value + waits, formula=formula, terms={**figure.terms, "waits": waits})
