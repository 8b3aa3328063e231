"""The least time of each part of a training step on one device of a mesh, by the roofline of a chip.

Every operation takes at least FLOPs / peak and at least bytes / bandwidth; the larger of the two is its bound (Williams
et al. 2009, Communications of the ACM 52). Operations run one after the other, so their times add up. `roofline_ops`
describes how FLOPs and bytes are counted, and `roofline_step` lists the operations.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from jaxstack.common.counts import plural
from jaxstack.common.hardware import Chip, chip_name
from jaxstack.config import ConfigError
from jaxstack.families import flops
from jaxstack.planner.job import Job
from jaxstack.planner.roofline_ops import PARTS, Op, Traffic
from jaxstack.planner.roofline_step import one_layer, operations


@dataclass(frozen=True)
class ChipLimits:
    """A chip and the fraction of its data sheet that programs reach.

    Attributes:
      chip: the chip by its data sheet.
      matmul_efficiency: fraction of the peak that matmuls reach. 1 is the limit that no program exceeds. Large matmuls
        reach about 0.7 to 0.8 on an H100, and reached about half in PyTorch of 2020 on a V100.
      bandwidth_efficiency: fraction of the memory bandwidth; a copy reaches about 0.9.
      link: bytes/s that a device sends; `None` means the figure of the chip.
      network: bytes/s that a device sends to other hosts or slices; `None` means the figure of the chip.
      host_devices: devices of one host or slice, which the links connect; `None` means the figure of the chip.
    """

    chip: Chip
    matmul_efficiency: float = 1.0
    bandwidth_efficiency: float = 1.0
    link: float | None = None
    network: float | None = None
    host_devices: int | None = None

    @property
    def name(self) -> str:
        """The chip's name in `hardware.CHIPS`."""
        return chip_name(self.chip.kinds[0]) or ""

    def peak(self, dtype: str) -> float:
        """Returns the peak FLOP/s of matmuls.

        In float32 it is the peak of JAX's default: TensorFloat-32 on GPUs, bfloat16 on TPUs.

        Raises:
          ConfigError: if the chip does not compute in this dtype.
        """
        names = ("tensorfloat32", "float32", "bfloat16") if dtype == "float32" else (dtype,)
        found = [self.chip.flops[name] for name in names if name in self.chip.flops]
        if not found:
            takes = [name for name in ("bfloat16", "float32") if name in self.chip.flops]
            advice = f"Set --train.dtype={takes[0]}." if dtype in ("bfloat16", "float32") else "Set --train.quant=none."
            raise ConfigError(f"{self.chip.kinds[0]} has no peak for {dtype}. {advice}")
        return found[0]

    @property
    def link_bandwidth(self) -> float:
        """Bytes/s that a device sends."""
        return self.link or self.chip.interconnect_bandwidth

    @property
    def linked_devices(self) -> int:
        """Devices that the links connect: all of one host, or of one slice."""
        return self.host_devices or self.chip.linked_devices

    @property
    def network_bandwidth(self) -> float:
        """Bytes/s that a device sends to other hosts or slices.

        Raises:
          ConfigError: neither the chip nor the user gives it.
        """
        found = self.network or self.chip.network_bandwidth
        if not found:
            raise ConfigError(
                f"{self.chip.kinds[0]} has no reference network, and the mesh has more than the "
                f"{plural(self.linked_devices, 'device')} that its links connect. Give the GB/s that a device sends to "
                f"other hosts: --network."
            )
        return found

    def seconds(self, op: Op) -> tuple[float, str]:
        """Returns the least time of one run, and its bound: `compute`, `memory` or `network`."""
        if op.kind == "transfer":
            return op.bytes / self.link_bandwidth, "network"
        moving = op.bytes / (self.chip.hbm_bandwidth * self.bandwidth_efficiency)
        computing = op.flops / (self.peak(op.dtype) * self.matmul_efficiency) if op.kind == "contraction" else 0.0
        return max((computing, "compute"), (moving, "memory"))


@dataclass(frozen=True)
class Row:
    """The sum over the operations of one part of a layer or a step.

    Attributes:
      name: the part.
      flops: FLOPs of all its operations.
      bytes: bytes of all its operations.
      seconds: least time of the operations.
      bound: the limit of most of that time: `compute`, `memory` or `network`.
    """

    name: str
    flops: float
    bytes: float
    seconds: float
    bound: str

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else None


def summarize(ops: Iterable[Op], limits: ChipLimits, by: Literal["part", "kind"] = "part") -> list[Row]:
    """Returns one row for each part, or for each kind of operation."""
    rows: dict[str, Row] = {}
    bounds: dict[str, Counter[str]] = {}
    for op in ops:
        name = op.part if by == "part" else op.kind
        seconds, bound = limits.seconds(op)
        before = rows.get(name, Row(name, 0.0, 0.0, 0.0, ""))
        bounds.setdefault(name, Counter())[bound] += op.times * seconds  # type: ignore[assignment]
        rows[name] = Row(
            name,
            before.flops + op.times * op.flops,
            before.bytes + op.times * op.bytes,
            before.seconds + op.times * seconds,
            bounds[name].most_common(1)[0][0],
        )
    return [rows[name] for name in (PARTS if by == "part" else tuple(rows)) if name in rows]


@dataclass(frozen=True)
class Roofline:
    """The least times of one layer and one step on a device.

    Attributes:
      chip: name of the chip.
      limits: the chip and the fractions of its peaks that programs reach.
      devices: devices of the mesh.
      traffic: the model of memory traffic.
      dtype: dtype of matmuls.
      ops: operations of a step.
      bubble: idle time of a pipeline's layers, as a fraction of the time that they compute.
      tokens: tokens of a step over all devices.
      flops_per_token: model FLOPs by both conventions.
      measured: measured seconds by part of one layer, with `layer` for all of it, and of `optimizer` and `step`.
    """

    chip: str
    limits: ChipLimits
    devices: int
    traffic: Traffic
    dtype: str
    ops: list[Op]
    bubble: float
    tokens: int
    flops_per_token: flops.Flops
    measured: dict[str, float]

    @property
    def computing(self) -> float:
        """Least seconds that a device works in a step, including the idle time of a pipeline."""
        with_bubble = 1 + self.bubble  # only layers wait for other stages
        return sum(
            op.times * self.limits.seconds(op)[0] * (with_bubble if op.of_layer else 1)
            for op in self.ops
            if op.kind != "transfer"
        )

    @property
    def communicating(self) -> float:
        """Least seconds that a device sends in a step."""
        return sum(op.times * self.limits.seconds(op)[0] for op in self.ops if op.kind == "transfer")

    @property
    def step_seconds(self) -> tuple[float, float]:
        """Least seconds of a step without and with overlap of communication and computing."""
        return self.computing + self.communicating, max(self.computing, self.communicating)

    @property
    def tables(self) -> dict[str, list[Row]]:
        """Rows of one layer and of one step."""
        return {"layer": summarize(one_layer(self.ops), self.limits), "step": summarize(self.ops, self.limits)}

    def mfu(self, seconds: float) -> flops.Flops:
        """Returns the MFU of a step that takes this many seconds, by both conventions."""
        peak = self.limits.peak(self.dtype) * self.devices
        return flops.Flops(*(each * self.tokens / seconds / peak for each in self.flops_per_token))

    def __str__(self) -> str:
        limits = self.limits
        lines = [
            f"one of {self.devices} x {self.chip}: {limits.peak(self.dtype) / 1e12:.4g} TFLOP/s in {self.dtype}, "
            f"{limits.chip.hbm_bandwidth / 1e9:.4g} GB/s of memory, "
            f"{limits.link_bandwidth / 1e9:.4g} GB/s to the others; "
            f"memory traffic {self.traffic}",
            f"matmuls reach {limits.matmul_efficiency:.0%} of the peak, everything {limits.bandwidth_efficiency:.0%} "
            f"of the memory's bandwidth",
        ]
        for name, rows in self.tables.items():
            lines += self._table_lines(name, rows)
        lines.append("")
        if self.bubble:
            lines.append(f"pipeline: idle time adds {self.bubble:.1%} to the time of its layers")
        for title, seconds in zip(("one after the other", "communication hidden"), self.step_seconds, strict=True):
            if title == "one after the other" or self.communicating:
                mfu = self.mfu(seconds)
                lines.append(
                    f"step, {title + ':':<22} {1e3 * seconds:10.3f} ms at least, "
                    f"{self.tokens / seconds:12,.0f} tokens/s and MFU "
                    f"{mfu.full:.1%} (full attention), {mfu.causal:.1%} (causal) at most"
                )
        return "\n".join(lines)

    def _table_lines(self, name: str, rows: list[Row]) -> list[str]:
        """Returns the text of one table; the optimizer is measured for a step, all other parts for a layer."""
        title = {"layer": "one layer, one microbatch, forward and backward", "step": "one step"}[name]
        of_step = ("optimizer", "step")
        measured = {part: s for part, s in self.measured.items() if (part in of_step) == (name == "step")}
        seconds = sum(row.seconds for row in rows)
        total = Row("all", sum(r.flops for r in rows), sum(r.bytes for r in rows), seconds, "")
        lines = [_line(row, seconds, measured.get(row.name)) for row in rows]
        return ["", title, _HEADER, *lines, _line(total, seconds, measured.get(name))]

    def as_json(self) -> dict[str, object]:
        """Returns everything for a file, with every operation."""
        serial, overlapped = self.step_seconds
        return {
            "chip": self.chip,
            "peak": self.limits.peak(self.dtype),
            "bandwidth": self.limits.chip.hbm_bandwidth,
            "link": self.limits.link_bandwidth,
            "matmul_efficiency": self.limits.matmul_efficiency,
            "bandwidth_efficiency": self.limits.bandwidth_efficiency,
            "devices": self.devices,
            "traffic": self.traffic,
            "dtype": self.dtype,
            "tokens": self.tokens,
            "flops_per_token": self.flops_per_token._asdict(),
            "bubble": self.bubble,
            "seconds": {"one_after_the_other": serial, "communication_hidden": overlapped},
            "mfu": {
                "one_after_the_other": self.mfu(serial)._asdict(),
                "communication_hidden": self.mfu(overlapped)._asdict(),
            },
            "measured": self.measured,
            **{
                name: [{"part": r.name, "flops": r.flops, "bytes": r.bytes, "seconds": r.seconds, "bound": r.bound}
                       for r in rows]
                for name, rows in self.tables.items()
            },
            "operations": [
                {key: value for key, value in op._asdict().items() if key != "matrix"}
                | dict(zip(("seconds", "bound"), self.limits.seconds(op), strict=True))
                for op in self.ops
            ],
        }  # fmt: skip


_HEADER = " ".join(
    f"{title:{align}}"
    for title, align in (
        ("part", "<15"), ("GFLOP", ">12"), ("MB", ">12"), ("FLOP/byte", ">10"), ("bound", ">8"), ("least ms", ">10"),
        ("share", ">7"), ("measured", ">10"),
    )
)  # fmt: skip


def _line(row: Row, total: float, measured: float | None) -> str:
    """Returns one row of a table as text; `total` is the least time of the table in seconds."""
    intensity = "" if row.intensity is None or row.name in ("communication", "all") else f"{row.intensity:.1f}"
    return (
        f"{row.name:<15} {row.flops / 1e9:>12,.2f} {row.bytes / 1e6:>12,.1f} {intensity:>10} {row.bound:>8} "
        f"{1e3 * row.seconds:>10.3f} {row.seconds / total if total else 0:>7.1%} "
        f"{'' if measured is None else f'{1e3 * measured:.3f}':>10}"
    ).rstrip()


def make_roofline(
    job: Job,
    chip: str,
    limits: ChipLimits,
    traffic: Traffic = "fused",
    measured: dict[str, float] | None = None,
) -> Roofline:
    """Returns the roofline of a step on a chip.

    Args:
      chip: name of the chip, for people.
      limits: the chip and the fractions of its peaks that programs reach.
      traffic: the model of memory traffic.
      measured: measured seconds of `measure.parts`.

    Raises:
      ConfigError: if the chip does not compute in `train.dtype`.
    """
    layout = job.ctx.layout
    assert layout.mesh is not None
    limits.peak(job.train.dtype)  # fails early if the chip has none
    return Roofline(
        chip=chip,
        limits=limits,
        devices=layout.mesh.size,
        traffic=traffic,
        dtype=job.train.dtype,
        ops=operations(job, traffic),
        bubble=0.0 if layout.pipeline is None else layout.pipeline.bubble,
        tokens=job.data.batch_size * job.data.seq_len,
        flops_per_token=flops.flops_per_token(job.model, job.data.seq_len, job.data.target_length),
        measured=measured or {},
    )
