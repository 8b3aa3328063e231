"""Predicts what serving a decoder takes on chips: memory, largest batch, time of prompts and of new tokens.

A copy of the model has `tensor` x `expert` devices. It reads the prompts of a batch at once (the prefill). Each step
then adds one token to every sequence. A prefill or a step takes these seconds by the data sheet:

    products   FLOPs / peak, and bytes / bandwidth, of matrices that all tokens are multiplied with
    experts    the same of experts
    attention  the same; a step reads the cache
    passes     bytes / bandwidth of norms, sums, activations and logits
    layers     launches and small kernels of each layer
    exchanges  bytes / link of each collective, and its start

`serving_rates.json` has a factor for each term, and `benchmarks/published_serving.py` fits them to published figures.
Nothing is compiled, and no array is made.

A step reads all weights once, whatever the batch is, except experts: of E experts, n tokens with k choices each leave
the part (1 - k / E) ** n unread, if the choices are even.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

from jaxstack import families
from jaxstack.common.counts import plural
from jaxstack.config import Config, ConfigError, DataConfig, MeshConfig, ModelConfig, TrainConfig
from jaxstack.models.params import Param, is_compressed
from jaxstack.planner import memory, rates, shards
from jaxstack.planner.estimate import divisors
from jaxstack.planner.generation_memory import cached_tokens, cached_vectors
from jaxstack.planner.job import Job
from jaxstack.planner.roofline import ChipLimits
from jaxstack.planner.step_time import Placement

Weights = Literal["bfloat16", "fp8", "int8"]
"""Format of the matrices of layers. `fp8` also multiplies in 8 bits; `int8` multiplies in 16 bits, and has one float32
scale for each output. Embedding, head, router and norms keep their types."""
CacheFormat = Literal["bfloat16", "fp8", "int8"]
"""Format of the keys and values. `int8` has one float32 scale for each key and each value of a head."""

USABLE = 0.9
"""Part of a device's memory for weights and cache. The rest is for activations and programs, as vLLM leaves it."""


@dataclass(frozen=True)
class Work:
    """What a device does in a prefill or a step, in seconds by the data sheet.

    Attributes:
      products: seconds to compute, and to move, the products with the matrices that all tokens are multiplied with.
      experts: seconds to compute, and to move, the products with experts.
      attention: seconds to compute, and to move, attention.
      passes: seconds to move everything else.
      layers: number of layers.
      exchanges: seconds of all collectives alone.
      starts: sum over the collectives of the logarithm of their devices, to base 2.
      is_step: whether every sequence has one new token.
      low: whether matrices are multiplied in 8 bits.
    """

    products: tuple[float, float]
    experts: tuple[float, float]
    attention: tuple[float, float]
    passes: float
    layers: int
    exchanges: float
    starts: float
    is_step: bool
    low: bool

    @property
    def terms(self) -> dict[str, tuple[tuple[float, str], ...]]:
        """For each part its terms: seconds by the data sheet, and the factor that they are multiplied with."""
        computing = "8 bits" if self.low else "computing"
        kernel = "step" if self.is_step else "prefill"
        return {
            "products": ((self.products[0], f"products, {computing}"), (self.products[1], "products, moving")),
            "experts": ((self.experts[0], f"experts, {computing}"), (self.experts[1], "experts, moving")),
            "attention": ((self.attention[0], f"attention, {kernel}"), (self.attention[1], "attention, moving")),
            "passes": ((self.passes, "passes"),),
            "layers": ((1e-6 * self.layers, "layer"),),
            "exchanges": ((self.exchanges, "exchanges"), (1e-6 * self.starts, "start")),
        }

    def seconds(self, factors: Mapping[str, float]) -> dict[str, float]:
        """Returns the seconds of each part; `factors` are those of a platform in `serving_rates.json`."""
        return {name: math.fsum(factors[kind] * each for each, kind in terms) for name, terms in self.terms.items()}


@dataclass(frozen=True)
class ServingRates:
    """Factors between the data sheet and servers.

    Attributes:
      factors: by platform and part, the time as a multiple of the time by the data sheet. `layer` and `start` are
        microseconds.
      interval: lowest and highest time, as multiples of the predicted time. It holds 90% of the published figures of a
        project that the fit has not seen.
      errors: median and 90% quantile of the errors on such figures, and their number.
    """

    factors: Mapping[str, Mapping[str, float]]
    interval: tuple[float, float]
    errors: Mapping[str, float]


@cache
def serving_rates() -> ServingRates:
    """Returns the rates of `serving_rates.json`."""
    found = json.loads(Path(__file__).with_name("serving_rates.json").read_text(encoding="utf-8"))
    return ServingRates(found["factors"], tuple(found["interval"]), found["errors"])


@dataclass(frozen=True)
class Server:
    """A model on the devices of one or more copies.

    Attributes:
      model: the model, without adapters.
      limits: the chip with its links.
      copies: how often the model is stored. Each copy serves batches of its own.
      tensor, expert: devices of a copy that share its heads and widths, and its experts and sequences.
      weights, cache: formats.
    """

    model: ModelConfig
    limits: ChipLimits
    copies: int = 1
    tensor: int = 1
    expert: int = 1
    weights: Weights = "bfloat16"
    cache: CacheFormat = "bfloat16"

    def __post_init__(self) -> None:
        if self.weights == "fp8" and "float8" not in self.limits.chip.flops:
            raise ConfigError(
                f"--weights=fp8 multiplies in float8, which {self.limits.chip.kinds[0]} does not. Use --weights=int8."
            )

    def __str__(self) -> str:
        """Returns how many copies there are, and how each is split."""
        split = [f"{axis} {n}" for axis, n in (("tensor", self.tensor), ("expert", self.expert)) if n > 1]
        size = self.tensor * self.expert
        devices = f"{plural(size, 'device')} ({', '.join(split)})" if split else "1 device"
        return f"{self.copies} {'copies' if self.copies > 1 else 'copy'} on {devices}"

    @property
    def devices(self) -> int:
        """Devices of all copies."""
        return self.copies * self.tensor * self.expert

    @property
    def dtype(self) -> Literal["bfloat16", "float16"]:
        """Dtype of activations and of all that has no other format: float16 where the chip has no bfloat16."""
        return "bfloat16" if "bfloat16" in self.limits.chip.flops else "float16"

    @cached_property
    def job(self) -> Job:
        """The model on its mesh.

        Raises:
          ConfigError: the mesh does not divide the model.
        """
        rows = -(-self.model.vocab // self.tensor) * self.tensor  # padding changes no result
        cfg = Config(
            model=replace(self.model.base, pad_vocab_to=rows),
            data=DataConfig(batch_size=self.copies * self.expert, seq_len=64),
            train=TrainConfig(dtype="bfloat16"),
            mesh=MeshConfig(data=self.copies, expert=self.expert, tensor=self.tensor, sequence_parallel=False),
        )
        return Job(cfg, memory.context(cfg, self.devices, self.limits.chip.platform))

    @property
    def is_possible(self) -> bool:
        """Whether the mesh divides the model."""
        if self.model.kv_heads % self.tensor and not self.model.latent.kv_rank:
            return False
        try:
            ctx = self.job.ctx
            ctx.layout.parameters(families.spec(self.job.model))
        except ConfigError:
            return False
        return True

    @cached_property
    def params(self) -> dict[str, tuple[Param, tuple[int, ...]]]:
        """Every parameter with the shape of the part that a device holds and multiplies with.

        Experts are split over `expert`. The other weights are copied there, not gathered for each step.
        """
        ctx = self.job.ctx
        return {path: (p, shards.used_shape(p, ctx)) for path, p in shards.flat_params(self.job.model, ctx).items()}

    def bytes_of(self, p: Param, shape: tuple[int, ...]) -> float:
        """Returns the bytes of a device's part of a parameter in its format."""
        size = math.prod(shape)
        if not p.is_cast:
            return 4.0 * size
        if not (p.stacked and is_compressed(p)) or self.weights == "bfloat16":
            return 2.0 * size
        outputs = math.prod(shape[: p.batch_axes]) * math.prod(shape[p.batch_axes + p.in_axes :])
        return size + 4.0 * outputs

    @property
    def weight_bytes(self) -> float:
        """Bytes of the parameters of a device."""
        return math.fsum(self.bytes_of(p, shape) for p, shape in self.params.values())

    def cache_bytes(self, tokens: float) -> float:
        """Returns the bytes of a device for the keys and values of one sequence with this many tokens.

        All devices of a tensor group keep the same latents of latent attention.
        """
        return math.fsum(self._vector_bytes * cached_tokens(w, tokens) for w in self.model.layer_windows)

    @property
    def _vector_bytes(self) -> float:
        """Bytes of one token in one layer of the cache, on a device."""
        vectors, elements = cached_vectors(self.model, self.tensor)
        each = 2 if self.cache == "bfloat16" else 1
        return each * elements + (4 * vectors if self.cache == "int8" else 0)

    @property
    def room(self) -> float:
        """Bytes that a device has for weights and cache."""
        return USABLE * self.limits.chip.hbm_bytes

    def largest_batch(self, tokens: int) -> int:
        """Returns how many sequences of this many tokens a copy can hold; 0 if the weights alone do not fit."""
        rows = max(0.0, self.room - self.weight_bytes) // self.cache_bytes(tokens)
        return int(rows) * self.expert

    def step(self, batch: int, seen: float, new: int = 1) -> Work:
        """Returns the work of one step.

        Args:
          batch: sequences of a copy.
          seen: mean tokens of a sequence when its newest is computed, with it.
          new: how many steps the mean is over, of which the last sees (new - 1) / 2 more tokens.
        """
        first = seen - (new - 1) / 2
        return self._work(batch, 1, [_mean_seen(w, first, new) for w in self.model.layer_windows])

    def prefill(self, batch: int, prompt: int) -> Work:
        """Returns the work of reading prompts with this many tokens; the head reads only their last tokens."""
        return self._work(batch, prompt, [_mean_seen(w, 1, prompt) for w in self.model.layer_windows])

    def _work(self, batch: int, length: int, seen: list[float]) -> Work:
        """Returns the work of `length` new tokens of each sequence, which see `seen` tokens in each layer."""
        m = self.job.model
        chip = self.limits.chip
        rows = -(-batch // self.expert)  # sequences of a device
        tokens = rows * length
        products: list[tuple[float, float]] = []
        experts: list[tuple[float, float]] = []
        for p, shape in self.params.values():
            if p.kind in ("matrix", "router") or "head" in p.roles:
                of_experts = "experts" in p.axes
                multiplied = rows if "head" in p.roles else tokens
                (experts if of_experts else products).append(self._product(p, shape, multiplied, batch * length))
        attention = [self._attention(rows, length, keys) for keys in seen]
        hidden = m.ff_width if not m.moe.num_experts else m.expert_width * (m.moe.choices + m.moe.shared_experts)
        width = 10 * m.d_model + (3 * hidden + 2 * (m.num_heads + m.kv_heads) * m.head_width) / self.tensor
        logits = 8 * rows * m.padded_vocab / self.tensor  # float32, written and read
        passes = 2.0 * tokens * width * m.num_layers + 2.0 * tokens * m.d_model + logits
        seconds, starts = self._exchanges(tokens)
        return Work(
            products=_sum(products),
            experts=_sum(experts),
            attention=_sum(attention),
            passes=passes / chip.hbm_bandwidth,
            layers=m.num_layers,
            exchanges=seconds,
            starts=starts,
            is_step=length == 1,
            low=self.weights == "fp8",
        )

    def _product(self, p: Param, shape: tuple[int, ...], tokens: float, of_copy: int) -> tuple[float, float]:
        """Returns computing and moving of the products with a matrix, in all layers that have it.

        Args:
          tokens: number of tokens that a device multiplies with a dense matrix.
          of_copy: tokens of all sequences of the copy.
        """
        moe = self.model.moe
        share = 1.0  # of the matrices that are read
        pairs = tokens
        if "experts" in p.axes:
            share = 1 - (1 - moe.choices / moe.num_experts) ** of_copy
            pairs = of_copy * moe.choices / moe.num_experts
        low = self.weights == "fp8" and bool(p.stacked) and is_compressed(p)
        dtype = "float32" if p.kind == "router" else "float8" if low else self.dtype
        peak = self.limits.peak(dtype) * rates.largest(self.limits, low)
        moving = share * self.bytes_of(p, shape)
        return 2 * pairs * math.prod(shape) / peak, moving / self.limits.chip.hbm_bandwidth

    def _attention(self, rows: int, length: int, keys: float) -> tuple[float, float]:
        """Returns computing and moving of one layer's attention: a step reads the cache, a prefill its own keys."""
        m = self.model
        if m.latent.kv_rank and length == 1:  # scores and sums are over the latents
            width = m.num_heads * (2 * m.latent.kv_rank + m.latent.rotary_dim)
        else:
            width = m.num_heads * (m.head_width + m.value_width)
        peak = self.limits.peak(self.dtype) * rates.largest(self.limits, False)
        computing = 2 * rows * length * keys * width / self.tensor / peak
        read = rows * self._vector_bytes * (keys if length == 1 else length)
        written = rows * self._vector_bytes * length
        return computing, (read + written) / self.limits.chip.hbm_bandwidth

    def _exchanges(self, tokens: float) -> tuple[float, float]:
        """Returns the seconds of all collectives of a pass alone, and the sum of the logarithms of their devices."""
        m = self.job.model
        sizes = dict(shards.mesh_sizes(self.job.ctx))
        place = Placement(sizes, self.limits)
        seconds = starts = 0.0
        if self.tensor > 1:  # after attention and after the MLP, or after both at once
            each = 1 if m.parallel != "no" else 2
            sent = 2 * (self.tensor - 1) / self.tensor * 2 * tokens * m.d_model
            seconds += each * m.num_layers * sent / min(place.bandwidth(("tensor",), "all-reduce"))
            starts += each * m.num_layers * math.log2(self.tensor)
        if self.expert > 1:  # to the experts and back
            sent = (self.expert - 1) / self.expert * 2 * tokens * m.moe.choices * m.d_model
            seconds += 2 * m.expert_layers * sent / min(place.bandwidth(("expert",), "all-to-all"))
            starts += 2 * m.expert_layers * math.log2(self.expert)
        return seconds, starts


def _sum(terms: list[tuple[float, float]]) -> tuple[float, float]:
    """Returns the sums of computing and of moving."""
    return math.fsum(c for c, _ in terms), math.fsum(m for _, m in terms)


def _mean_seen(window: int, first: float, count: int) -> float:
    """Returns the mean of min(n, window) for n = first, first + 1, ..., of `count` numbers; 0 means no window."""
    last = first + count - 1
    if not window or last <= window:
        return (first + last) / 2
    below = max(0.0, math.floor(window - first) + 1)  # numbers up to the window
    return (below * (2 * first + below - 1) / 2 + (count - below) * window) / count


@dataclass(frozen=True)
class Served:
    """The predicted times of one batch on every copy.

    Attributes:
      server: the model on its devices.
      batch: sequences of a copy.
      prompt, tokens: tokens of a prompt, and new tokens.
      prefill_work: reading the prompts of the batch.
      step_work: mean work of a new token of each sequence.
      fitted: how long work takes.
    """

    server: Server
    batch: int
    prompt: int
    tokens: int
    prefill_work: Work
    step_work: Work
    fitted: ServingRates

    @property
    def interval(self) -> tuple[float, float]:
        """Lowest and highest time as multiples of the predicted time."""
        return self.fitted.interval

    @property
    def prefill(self) -> dict[str, float]:
        """Seconds of reading the prompts of the batch, by part."""
        return self.prefill_work.seconds(self.fitted.factors[self.server.limits.chip.platform])

    @property
    def step(self) -> dict[str, float]:
        """Mean seconds of a new token of each sequence, by part."""
        return self.step_work.seconds(self.fitted.factors[self.server.limits.chip.platform])

    @property
    def first_token(self) -> float:
        """Seconds until each sequence has its first token."""
        return math.fsum(self.prefill.values())

    @property
    def each_token(self) -> float:
        """Mean seconds from one token of a sequence to its next."""
        return math.fsum(self.step.values())

    @property
    def seconds(self) -> float:
        """Seconds of the batch. The prefill gives the first token."""
        return self.first_token + (self.tokens - 1) * self.each_token

    @property
    def tokens_per_s(self) -> float:
        """New tokens a second of all copies."""
        return self.server.copies * self.batch * self.tokens / self.seconds

    def cost(self, price: float) -> float:
        """Returns the cost of a million new tokens, at a price for a device and hour."""
        return 1e6 * price * self.server.devices / 3600 / self.tokens_per_s


def serve(server: Server, batch: int, prompt: int, tokens: int, fitted: ServingRates | None = None) -> Served:
    """Predicts the times of batches of equal sequences.

    Args:
      batch: sequences of a copy.
      prompt, tokens: tokens of a prompt, and new tokens.
      fitted: how long work takes; `None` means `serving_rates()`.

    Raises:
      ConfigError: the mesh does not divide the model, or needs a network whose speed is not known.
    """
    new = max(1, tokens - 1)  # the first new token is the prefill's
    step = server.step(batch, prompt + 1 + (new - 1) / 2, new)
    return Served(server, batch, prompt, tokens, server.prefill(batch, prompt), step, fitted or serving_rates())


def servers(
    model: ModelConfig,
    limits: ChipLimits,
    devices: int,
    weights: Weights,
    stored: CacheFormat,
    kept: Mapping[str, int],
) -> list[Server]:
    """Returns every way to put copies on all devices that the model's sizes allow.

    Args:
      devices: number of devices.
      weights, stored: formats of the weights and of the cache.
      kept: sizes of `tensor` and `expert` that are given. Without experts, only `tensor` splits a copy.
    """
    found = []
    for size in divisors(devices):
        for expert in divisors(size):
            split = {"tensor": size // expert, "expert": expert}
            if (expert > 1 and not model.moe.num_experts) or any(split[axis] != n for axis, n in kept.items()):
                continue
            server = Server(model, limits, devices // size, split["tensor"], expert, weights, stored)
            if server.is_possible:
                found.append(server)
    return found


def explain(work: Work, platform: str) -> list[tuple[str, float, str]]:
    """Returns the name, the seconds and the formula of each part that takes time on a platform."""
    factors = serving_rates().factors[platform]
    seconds = work.seconds(factors)
    return [
        (name, seconds[name], " + ".join(f"{each:.6g} s of {kind} x {factors[kind]:.4g}" for each, kind in terms))
        for name, terms in work.terms.items()
        if seconds[name]
    ]


def published_errors(platform: str) -> str:
    """Returns a line with the errors of predictions on published figures of projects that the fit has not seen."""
    if platform == "tpu":
        return "no published figure of a TPU was compared: its factors are expected values, and the interval a GPU's"
    errors = serving_rates().errors
    return (
        f"on {errors['rows']:.0f} published figures, each by a fit without its project, this model is off by "
        f"{errors['median']:.0%} (median) and {errors['90%']:.0%} (90th percentile)"
    )
