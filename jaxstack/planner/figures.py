"""The figures of `jaxstack plan memory`, `plan flops` and `plan time`, each with the formula that it is computed by."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey

from jaxstack import families
from jaxstack.common.counts import plural
from jaxstack.common.hardware import CHIPS
from jaxstack.common.tree import Batch
from jaxstack.config import ConfigError, ModelConfig
from jaxstack.models import params
from jaxstack.planner import aot, estimate, generation_memory, megatron, offload, rates, shards, trace, traced
from jaxstack.planner.explain import Figure, Recorded, Recorder, recorded
from jaxstack.planner.job import Job
from jaxstack.planner.roofline import ChipLimits
from jaxstack.planner.roofline_ops import Op
from jaxstack.planner.sizes import FORMULAS, has_formulas, require_usual_layers
from jaxstack.planner.step_time import Placement, StepTime, Work, work_of
from jaxstack.planner.traffic import traffic
from jaxstack.training.state import TrainState

POLICIES: tuple[Literal["none", "selective", "dots", "full"], ...] = ("none", "selective", "dots", "full")
"""Values of `train.remat`, the one that saves most first."""


def limits_of(target: str, link: float | None = None, network: float | None = None) -> tuple[str, int, ChipLimits]:
    """Returns the chip of a target, the number of its devices, and the chip with its links.

    Args:
      target: chip and topology. With several numbers for GPUs the last one is the number of devices in a host.
      link, network: bytes/s that a device sends within its host or slice, and beyond; `None` means the chip's figures.

    Raises:
      ConfigError: the chip is unknown, or its hosts or slices do not have the given number of devices.
    """
    name, topology = aot.parse_target(target)
    chip = CHIPS[name]
    count = math.prod(topology) * chip.devices
    host = chip.linked_devices
    if chip.platform == "tpu" and count > host:
        raise ConfigError(
            f"target={target} has {plural(count // chip.devices, 'chip')}, but a slice of {name} has at most "
            f"{host // chip.devices}. Use a smaller topology."
        )
    if chip.platform == "gpu" and len(topology) > 1:
        if topology[-1] > host:
            hosts = math.ceil(math.prod(topology) / host)
            raise ConfigError(
                f"target={target} has hosts of {plural(topology[-1], 'device')}, but a host of {name} has at most "
                f"{host}. Use --target {name}:{hosts}x{host}, which is hosts x devices of a host."
            )
        host = topology[-1]
    return name, count, ChipLimits(chip, link=link, network=network, host_devices=host)


def memory_figures(job: Job) -> list[Figure]:
    """Returns the bytes of a training step on one device by purpose, as `estimate.memory` counts them."""
    state, batch = estimate.abstract_inputs(job)
    recorder = Recorder()
    parts = estimate.memory(job, state, batch, recorder)
    spec = shards.flat_params(job.model, job.ctx).items()
    elements = recorder.named(
        "parameters", sum(recorder.shaped(path, shards.stored_shape(p, job.ctx), p.axes) for path, p in spec)
    )
    exact = dict(
        zip(
            estimate.EXACT,
            (4 * elements, _state_bytes(replace(offload.device_state(job, state), params=())), _batch_bytes(batch)),
            strict=True,
        )
    )
    found = []
    arrays = {} if has_formulas(job.model) else traced.memory(job)
    for name, size in parts.items():
        formula = _traced_bytes(arrays[name]) if name in arrays else recorded(exact.get(name, size))
        if name.startswith("saved by") and job.ctx.layout.pipeline is not None:
            name = f"pipeline stash, {name}"
        found.append(Figure(name, float(size), formula.text, where=formula.where))
    return found


def host_figures(job: Job) -> list[Figure]:
    """Returns the bytes that a device needs in its host's memory, by purpose."""
    sizes = estimate.host_memory(job, job.state).items()
    return [Figure(name, size, "{size:.12g} bytes", {"size": size}) for name, size in sizes]


def _state_bytes(state: TrainState) -> float:
    """Returns the bytes of a device's part of an abstract state, recorded as a sum over the names of fields."""
    counts: dict[tuple[str, int], int] = defaultdict(int)
    for path, leaf in jax.tree.leaves_with_path(state):
        field = [key.name for key in path if isinstance(key, GetAttrKey)][-1]
        counts[field, leaf.dtype.itemsize] += math.prod(leaf.sharding.shard_shape(leaf.shape))
    return sum(size * Recorded(count, f"{count} {field}") for (field, size), count in counts.items())


def _traced_bytes(arrays: Mapping[trace.Array, int]) -> Recorded:
    """Returns the bytes of traced arrays, recorded as a sum: the largest by name and shape, then all others."""
    whole = trace.total(arrays)
    ranked = sorted(arrays.items(), key=lambda each: -each[0].bytes * each[1])
    large = {array: count for array, count in ranked if 50 * array.bytes * count >= whole}
    terms = [f"{n} x {'x'.join(map(str, array.shape)) or '1'} {array.dtype} {array.name}" for array, n in large.items()]
    rest = whole - trace.total(large)
    return Recorded(whole, " + ".join([*terms, *([f"{plural(rest, 'byte')} of smaller arrays"] if rest else [])]))


def _batch_bytes(batch: Batch) -> float:
    """Returns the bytes of a device's part of an abstract batch, recorded as a sum over its arrays."""
    total: float = 0
    for name, array in batch.items():
        shape = array.sharding.shard_shape(array.shape)
        dims = zip(shape, ("rows", "length", "values"), strict=False)
        where = {f"{name} of the batch": " x ".join(f"{size} {dim}" for size, dim in dims)}
        size = math.prod(shape)
        total += array.dtype.itemsize * Recorded(size, f"{size} {name} of the batch", where=where)
    return total


def memory_by_policy(job: Job, bytes_per_parameter: int | None = None) -> dict[str, list[Figure]]:
    """Returns the bytes of a training step by purpose, under each policy of `train.remat`.

    Args:
      bytes_per_parameter: 16 or 18 count as Megatron-LM does; `None` means `memory_figures`.

    Raises:
      ConfigError: the model has layers that Megatron-LM's formulas do not count.
    """
    if bytes_per_parameter:
        require_usual_layers(job.model, "--style=megatron-fp16")
    found: dict[str, list[Figure]] = {}
    for policy in POLICIES:
        other = job.with_remat(policy)
        found[policy] = megatron.memory(other, bytes_per_parameter) if bytes_per_parameter else memory_figures(other)
    return found


def saved_figures(job: Job, policies: Mapping[str, list[Figure]]) -> list[Figure]:
    """Returns the bytes of what the layers save for the backward pass, under each policy.

    At the step's peak of memory, some of these bytes may be free again. Here, all of them count.

    Args:
      policies: policies from `memory_by_policy`.
    """
    found = []
    for policy, figures in policies.items():
        if has_formulas(job.model):
            found += [replace(figure, name=f"remat {policy}") for figure in figures if is_saved(figure)]
            continue
        other, _ = estimate.resolve_split(job.with_remat(policy))
        for label, arrays in traced.saved(other).items():
            layers = label.removeprefix("saved by ").partition(",")[0]
            formula = _traced_bytes(arrays)
            found.append(Figure(f"remat {policy}, {layers}", float(formula), formula.text))
    return found


def is_saved(figure: Figure) -> bool:
    """Returns whether a figure of memory is of the activations that the layers save for the backward pass."""
    return "saved by" in figure.name or figure.name.startswith("activations")


def generation_figures(job: Job) -> list[Figure]:
    """Returns the bytes of generation on a device: float32 parameters, and the KV cache of `data.batch_size` prompts.

    A prompt with its continuation has `data.seq_len` tokens. Each layer of an encoder-decoder's decoder has keys of the
    encoder's tokens and of its own. Other families have no cache, and an empty result.
    """
    m = job.model.base
    tokens = job.data.seq_len
    if m.family == "encoder_decoder":
        tokens += job.data.target_length
    if m.family not in (*FORMULAS, "encoder_decoder"):
        return []
    params, cache = generation_memory.generation_need(job, tokens)
    keys = m.kv_heads * m.head_width / shards.mesh_sizes(job.ctx)["tensor"]
    rows = job.data.batch_size // job.ctx.layout.replicas * job.sample.beams
    terms = {"rows": rows, "keys": keys, "each": jnp.dtype(job.train.dtype).itemsize}
    seen = cache / (2 * terms["each"] * rows * keys)
    formula = "2 x {each} bytes x {rows} rows x {seen:g} tokens of all layers x {keys:g} elements of a key"
    return [
        Figure("parameters, float32", params, "4 bytes x {elements:.12g} parameters", {"elements": params / 4}),
        Figure(f"KV cache of {plural(tokens, 'token')}", cache, formula, terms | {"seen": seen}),
    ]


def flops_figures(job: Job, time: StepTime, budget: float, classic: bool = False) -> list[Figure]:
    """Returns the FLOPs of a step by every convention, and the days for a budget of tokens at the chips' peak.

    Args:
      budget: training tokens.
      classic: whether to count recomputation as Megatron-LM does.

    Raises:
      ConfigError: `classic` with layers that Megatron-LM's formulas do not count.
    """
    if classic:
        require_usual_layers(job.model, "--style=megatron-fp16")
    per_step = time.model_flops
    tokens = time.tokens
    again = megatron.hardware_flops(job) - per_step.full if classic else time.recomputed_flops
    hardware = per_step.full + again
    per_token = "{each:.8g} FLOPs a token x {tokens} tokens"
    days = Figure(
        "days at the peak", hardware / tokens * budget / time.peak / 86400,
        "{each:.8g} FLOPs a token x {budget:.6g} tokens / {peak:.6g} FLOP/s / 86400",
        {"each": hardware / tokens, "budget": budget, "peak": time.peak},
    )  # fmt: skip
    return [
        Figure("model, full attention", per_step.full, per_token, {"each": per_step.full / tokens, "tokens": tokens}),
        Figure("model, causal", per_step.causal, per_token, {"each": per_step.causal / tokens, "tokens": tokens}),
        Figure("recomputed", again, per_token, {"each": again / tokens, "tokens": tokens}),
        Figure("hardware, full attention", hardware, "{model:.8g} + {again:.8g}",
               {"model": per_step.full, "again": again}),
        days,
    ]  # fmt: skip


def time_figures(job: Job, limits: ChipLimits, time: StepTime, work: Work | None = None) -> list[Figure]:
    """Returns the seconds of a step by part, with the seconds by the data sheet that they follow from.

    Args:
      work: what a device does; `None` means jaxstack's program.
    """
    work = work or work_of(job, limits)
    layer = [op for op in work.ops if op.of_layer]
    ends = [op for op in work.ops if not op.of_layer and not op.of_update]
    found = [
        work_figure("layers", [op for op in layer if not op.for_remat], limits, work.kernel),
        work_figure("recomputation", [op for op in layer if op.for_remat], limits, work.kernel),
        work_figure("embedding, head, loss", ends, limits, work.kernel),
        work_figure("optimizer, casts, sums", [op for op in work.ops if op.of_update], limits, work.kernel),
    ]
    for axes, seconds in time.exposed.items():
        alone = seconds + time.hidden[axes]
        terms = {"alone": alone, "hidden": time.hidden[axes]}
        found.append(Figure(f"waiting for {axes}", seconds, "{alone:.6g} s alone - {hidden:.6g} s hidden", terms))
    if job.ctx.layout.pipeline is not None:
        busy = time.layers + time.recomputation
        terms = {"busy": busy, "idle": time.bubble / busy}
        formula = "{busy:.6g} s of layers x {idle:.6g} idle ticks of the schedule"
        found.append(Figure("pipeline bubble", time.bubble, formula, terms))
    return [figure for figure in found if figure.value]


def work_figure(name: str, ops: Iterable[Op], limits: ChipLimits, kernel: str) -> Figure:
    """Returns the seconds of operations: seconds by the data sheet for each kind of work, times the fitted factors.

    For `kernel` see `rates.work`.
    """
    fitted = rates.rates()
    done: dict[str, float] = defaultdict(float)
    for op in ops:
        for kind, seconds in rates.work(op, limits, kernel).items():
            done[kind] += op.times * seconds
    parts = []
    terms: dict[str, float] = {}
    for k, (kind, seconds) in enumerate(done.items()):
        terms |= {f"least{k}": seconds, f"factor{k}": fitted.seconds({kind: 1.0}, limits)}
        parts.append(f"{{least{k}:.6g}} s of {kind} x {{factor{k}:.4g}}")
    return Figure(name, fitted.seconds(done, limits), " + ".join(parts), terms)


def traffic_figures(job: Job, limits: ChipLimits) -> list[Figure]:
    """Returns the bytes that a device sends in a step over each axis, and the links that they use."""
    place = Placement(dict(shards.mesh_sizes(job.ctx)), limits)
    sent: dict[tuple[str, str, float], float] = defaultdict(float)
    for c in traffic(job):
        link, network = place.bandwidth(c.axes, c.kind)
        where = "links" if math.isinf(network) else "network"
        sent["+".join(c.axes), where, min(link, network)] += c.sent
    return [
        Figure(f"{axes}, {where}", size, "{size:.8g} bytes, {rate:.6g} bytes/s", {"size": size, "rate": rate})
        for (axes, where, rate), size in sent.items()
    ]


def copy_figures(job: Job, limits: ChipLimits) -> list[Figure]:
    """Returns the bytes that a device copies to its host in a step, by purpose. As many bytes are copied back."""
    formula = "{size:.12g} bytes in each direction, {rate:.6g} bytes/s"
    rate = offload.host_rate(limits.name) if job.train.offload != "none" else 0.0
    return [
        Figure(name, size, formula, {"size": size, "rate": rate}) for name, size in estimate.host_traffic(job).items()
    ]


def outside_fit(model: ModelConfig, chip: str) -> str:
    """Returns a line with the chip, size or family that no published step of the fit has, or "" if there is none."""
    parameters = params.count(families.spec(model))
    differs = {
        f"chip {chip}": chip not in FITTED_CHIPS,
        f"{parameters:.3g} parameters": not FITTED_PARAMETERS[0] <= parameters <= FITTED_PARAMETERS[1],
        f"family {model.family}": model.family != "decoder",
    }
    found = [name for name, is_so in differs.items() if is_so]
    return f"no published step has {', '.join(found)}: the interval does not cover that." if found else ""


FITTED_CHIPS = ("a100", "a100_40gb", "h100", "h100_500w", "h200", "b200", "b300", "gb200", "gb300",
                "v3", "v4", "v5e", "v5p", "v6e", "v7x")  # fmt: skip
"""Chips of the published steps that rates were fitted to."""
FITTED_PARAMETERS = (3e8, 1.1e12)
"""The smallest and the largest model of these steps."""


def published_errors() -> str:
    """Returns a line with the errors of `step_time` on steps of projects that the fit has not seen."""
    errors = rates.rates().errors
    return (
        f"on {errors['rows']:.0f} published steps, each by a fit without its project, this model is off by "
        f"{errors['median']:.0%} (median) and {errors['90%']:.0%} (90th percentile)"
    )
