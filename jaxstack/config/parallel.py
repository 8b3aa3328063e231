"""Keys of the groups `mesh`, `pipeline`, `distributed` and `kernels`: how the work is spread over devices and done."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from jaxstack.config.bounds import (
    Interval,
    NonNegativeInt,
    PositiveInt,
    check_bounds,
    expand_home,
    pattern_error,
    require,
)
from jaxstack.config.scheme import Scheme


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the device mesh. Their product is the number of devices; one of them may be -1, which means the rest."""

    data: int = -1
    """Replicas, over which the batch is split. -1 means the devices that the other axes leave. On a CPU, the devices
    are simulated, one for each core; with -1, there are fewer if they do not divide the batch."""
    fsdp: int = 1
    """Shards of parameters, gradients and optimizer state (ZeRO-3). The batch is split over them too."""
    pipe: int = 1
    """Pipeline stages; see the group `pipeline`."""
    tensor: int = 1
    """Shards of attention heads, MLP width and vocabulary (Megatron)."""
    context: int = 1
    """Shards of the sequence."""
    expert: int = 1
    """Shards of the experts. The batch and all other parameters are split over them as over `fsdp`."""
    sequence_parallel: bool = True
    """With `tensor` above 1: split norms and residuals over the sequence, between the tensor-parallel matmuls."""
    context_method: Literal["ring", "all_gather"] = "ring"
    """With `context` above 1: pass keys and values around a ring, or gather them."""
    partitioner: Literal["manual", "auto"] = "manual"
    """What inserts the collectives of a training step: `manual`, this package; `auto`, XLA. See docs/meshes.md."""
    zero: Literal["none", "state", "gradients"] = "none"
    """What `mesh.data` shards in addition to the batch. `state`: the optimizer's state (ZeRO-1); a replica updates its
    part of the parameters, and all gather the changes. `gradients`: also the sums of gradients over `train.grad_accum`
    (ZeRO-2)."""

    def __post_init__(self) -> None:
        check_bounds("mesh", self)
        for axis, size in self.sizes.items():
            require(
                size == -1 or size >= 1,
                f"mesh.{axis}={size} is not positive. Use 1 or more, or -1 for the devices that the other axes leave.",
            )
        require(
            self.partitioner == "manual" or self.pipe == 1,
            f"mesh.partitioner=auto cannot run the stages of mesh.pipe={self.pipe}. Use mesh.partitioner=manual, or "
            f"split over data, fsdp, tensor, context and expert with mesh.pipe=1.",
        )
        require(
            self.partitioner == "manual" or self.zero == "none",
            f"mesh.zero={self.zero} scatters gradients itself, which mesh.partitioner=auto leaves to XLA. Use "
            f"mesh.partitioner=manual, or mesh.zero=none.",
        )
        free = [f"mesh.{axis}=-1" for axis, size in self.sizes.items() if size == -1]
        require(
            len(free) <= 1, f"{' and '.join(free)} are both open, but only one axis can be. Give the others a size."
        )

    @property
    def sizes(self) -> dict[str, int]:
        """Returns every axis and its size, which may be -1, outermost axis (slowest links) first.

        All axes always exist. An axis of size 1 costs nothing.
        """
        return {name: getattr(self, name) for name in ("pipe", "data", "fsdp", "expert", "context", "tensor")}

    @property
    def open_axis(self) -> str | None:
        """Returns the axis whose size is -1, or None."""
        return next((axis for axis, size in self.sizes.items() if size == -1), None)

    @property
    def known_sizes(self) -> dict[str, int]:
        """Returns the sizes before the devices are known: the open axis counts as 1."""
        return {axis: 1 if size == -1 else size for axis, size in self.sizes.items()}

    def resolved_sizes(self, devices: int) -> dict[str, int]:
        """Returns the sizes on this many devices: the open axis has all that the other axes leave, and at least one."""
        known = math.prod(self.known_sizes.values())
        return {axis: max(devices // known, 1) if size == -1 else size for axis, size in self.sizes.items()}


@dataclass(frozen=True)
class PipelineConfig:
    """How the stages of a mesh with `mesh.pipe` above 1 run. See docs/pipelines.md."""

    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zb1", "zb_h1"] = "1f1b"
    """Order in which a stage runs its microbatches. It changes time and memory, but not the result."""
    microbatches: PositiveInt | None = None
    """Microbatches per pipeline step. Null means as many as the batch allows, up to four per stage."""
    chunks: PositiveInt = 1
    """Model chunks per stage, for `interleaved_1f1b` and `zb1`. More chunks divide the idle time and multiply
    communication."""
    partition: str = "even"
    """Which layers each stage has. `even`: equally many. `auto`: balanced by costs that are measured when the run
    begins. Otherwise the path of a file of costs from `jaxstack profile`."""
    gather: Literal["once", "layer"] = "once"
    """When a stage gathers the weights that `mesh.fsdp` shards. `once`: all of them, before its first unit. `layer`:
    the weights of one layer at a time, in every unit, so that its memory never holds a complete stage."""
    split: tuple[str, ...] | None = None
    """Matrices of a layer whose gradients `zb1` and `zb_h1` compute later, as regular expressions for full names, such
    as `mlp/.*`. Null means as many gradients as fit while memory grows by at most 10%."""
    loops: Literal["auto", "dynamic", "static"] = "auto"
    """Loops of a pipeline. `dynamic` is one loop over all ticks. `static` is several loops with static trip counts, so
    that a GPU does not wait for the host. `auto` is `static` on GPUs."""

    def __post_init__(self) -> None:
        check_bounds("pipeline", self)
        expand_home(self, "partition")
        require(bool(self.partition), "pipeline.partition is empty. Use even, auto, or the path of a file of costs.")
        require(
            self.chunks == 1 or self.schedule in ("interleaved_1f1b", "zb1"),
            f"pipeline.chunks={self.chunks} is more than the one chunk per stage of pipeline.schedule={self.schedule}. "
            f"Use pipeline.schedule=interleaved_1f1b or zb1, or pipeline.chunks=1.",
        )
        why = pattern_error(self.split or ())
        require(why is None, f"pipeline.split: {why}. Correct it.")


@dataclass(frozen=True)
class DistributedConfig:
    """Processes of the run, if the launcher's environment does not set them. Give all three, or none.

    See docs/clusters.md.
    """

    coordinator: str | None = None
    """Address of process 0, as `host:port`. Null means the address in the launcher's environment."""
    num_processes: PositiveInt | None = None
    """Number of processes. Null means the number in the launcher's environment. 1 without the other two keys means one
    process, whatever the environment says."""
    process_id: NonNegativeInt | None = None
    """Index of this process, from 0. Null means the index in the launcher's environment."""
    timeout_s: PositiveInt = 300
    """Seconds to wait at the start until all processes have joined."""
    lost_s: Annotated[int, Interval(2)] = 60
    """Seconds without a sign of life after which another process counts as lost, and this process ends."""

    def __post_init__(self) -> None:
        check_bounds("distributed", self)
        three = {name: getattr(self, name) for name in ("coordinator", "num_processes", "process_id")}
        given = [f"distributed.{name}={value}" for name, value in three.items() if value is not None]
        missing = [f"distributed.{name}" for name, value in three.items() if value is None]
        require(
            not (given and missing) or given == ["distributed.num_processes=1"],
            f"{' and '.join(given)} is set without {' and '.join(missing)}. Give all three, or none to use the "
            f"launcher's environment.",
        )
        if self.coordinator is None or self.num_processes is None or self.process_id is None:
            return
        host, _, port = self.coordinator.rpartition(":")
        require(
            bool(host) and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536,
            f"distributed.coordinator={self.coordinator} is not an address. Use host:port, for example 10.0.0.1:8476.",
        )
        require(
            self.process_id < self.num_processes,
            f"distributed.process_id={self.process_id} is not below distributed.num_processes={self.num_processes}. "
            f"Count processes from 0.",
        )


@dataclass(frozen=True)
class KernelsConfig:
    """Implementation of each expensive operation.

    `auto` chooses by platform and shapes; the run prints the choice. `pallas` is this project's kernel for the
    platform. If you name an implementation that cannot run, you get an error that lists the ones that can.
    """

    attention: Literal["auto", "xla", "chunked", "cudnn", "pallas", "tokamax"] = "auto"
    """Attention. `xla` computes all scores at once; the others need memory linear in the sequence length. `cudnn` is
    NVIDIA's kernel. `tokamax` is the kernel of the package tokamax for Hopper GPUs (extra `[tokamax]`)."""
    norm: Literal["auto", "xla", "custom_vjp", "pallas"] = "auto"
    """RMSNorm and LayerNorm. `custom_vjp` uses a gradient written by hand."""
    linear: Literal["auto", "xla", "barrier", "float32_sums"] = "auto"
    """Linear layers. `barrier` keeps XLA from fusing other operations into the matmuls of the backward pass, which is
    faster on a CPU. `float32_sums` rounds gradients of weights after their sum over devices; `mesh.partitioner=auto`
    needs it to sum bfloat16 gradients in `train.reduce_dtype=float32`."""
    gelu: Literal["auto", "xla", "saved"] = "auto"
    """GELU. `saved` stores the derivative in the forward pass."""
    cross_entropy: Literal["auto", "xla", "chunked", "pallas"] = "auto"
    """Cross-entropy. `xla` computes all logits at once. `chunked` computes the logits of a few tokens at a time; its
    memory does not depend on the vocabulary."""
    moe: Literal["auto", "ragged", "grouped", "reference", "pallas", "tokamax"] = "auto"
    """Matmuls of the experts. `ragged` is lax.ragged_dot, `grouped` a loop over tiles, and `reference` computes every
    expert on every token. `tokamax` is the kernel of the package tokamax for Hopper GPUs (extra `[tokamax]`)."""
    layers: Literal["auto", "scan", "unrolled"] = "auto"
    """Layers of a training step. `scan` loops over stacked weights and compiles one layer. `unrolled` compiles every
    layer, which saves the copies in and out of stacked arrays."""
    update: Literal["auto", "branch", "select"] = "auto"
    """How a bad step is skipped. `branch` runs the optimizer only for a good step; `select` always runs it and then
    selects the old or the new values."""
    decode: Literal["auto", "scan", "unrolled"] = "auto"
    """Layers of one decoding step. `scan` loops over stacked weights; `unrolled` copies each layer's weights once."""
    decode_weights: Literal["float", "int8", "int4"] = "float"
    """Format of the copied weights that `decode=unrolled` reads for each new token, on one device. `int8` and `int4`
    store the matrices of layers as codes. Experts stay floats."""
    decode_group: PositiveInt | None = None
    """Inputs that share a scale in `decode_weights`. Null means all inputs of an output."""
    codes: Literal["auto", "xla", "int8", "pallas"] = "auto"
    """Matmuls with the codes of `decode_weights`. `int8` rounds inputs to 15 bits and multiplies integers, for CPUs.
    `pallas` converts codes to floats within its kernel."""

    def __post_init__(self) -> None:
        check_bounds("kernels", self)

    @property
    def decode_scheme(self) -> Scheme | None:
        """The format of `decode_weights`; `None` means floats."""
        return None if self.decode_weights == "float" else Scheme.of(self.decode_weights, self.decode_group)


def sequence_parts(mesh: MeshConfig) -> int:
    """Returns the number of equal parts that a sequence must have; an open axis counts as 1.

    A context shard has an early and a late chunk, so that all shards do the same work under the causal mask.
    """
    split = max(mesh.tensor, 1) if mesh.sequence_parallel else 1
    return split if mesh.context in (1, -1) else mesh.context * math.lcm(split, 2)
