"""Peak compute, memory and bandwidth of accelerators, by their makers' data sheets."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypedDict

from jaxstack.common.errors import ConfigError


@dataclass(frozen=True)
class Chip:
    """The figures of one device of JAX. Variants of a chip, such as SXM and PCIe, are separate entries.

    Attributes:
      kinds: values of `jax.Device.device_kind` that mean this chip.
      flops: dense FLOP/s of the matrix units by dtype of the operands, without sparsity. `float32` is true float32 if
        the chip has it. JAX's default for float32 on a GPU is TensorFloat-32, which is `tensorfloat32` here.
      hbm_bandwidth: bytes/s of the memory.
      hbm_bytes: bytes of the memory.
      interconnect_bandwidth: bytes/s that the device sends to devices of its host or slice, over all links together, in
        one direction.
      source: data sheet that these figures are from.
      devices: devices of JAX on one chip, which share its compute, memory and links equally.
      linked_devices: maximum number of devices that the links connect: the devices of a host, or of a TPU slice.
      network_bandwidth: bytes/s that a device sends to other hosts or slices in one direction, or 0 where the maker
        describes no such system.
      network_source: name of the system from which `linked_devices` and `network_bandwidth` are taken.
      torus: dimensions of the torus that the links form, or 0 if every device reaches every other one at full speed.
      cores: multiprocessors or compute units, over which a GPU distributes the tiles of a matmul; 0 for other chips.
      tile: rows and columns of a TPU's matrix unit, to which it pads a matmul; 0 for other chips.
    """

    kinds: tuple[str, ...]
    flops: Mapping[str, float]
    hbm_bandwidth: float
    hbm_bytes: int
    interconnect_bandwidth: float
    source: str
    devices: int = 1
    linked_devices: int = 8
    network_bandwidth: float = 0.0
    network_source: str = "the maker describes no network; eight cards in a host"
    torus: int = 0
    cores: int = 0
    tile: int = 0

    @property
    def platform(self) -> str:
        """JAX's platform of the chip: `tpu` or `gpu`. Trainium is planned as a `gpu`; nothing was run on it."""
        return "tpu" if self.kinds[0].startswith("TPU") else "gpu"


class _Network(TypedDict):
    """The keyword arguments of `Chip` for its network."""

    network_bandwidth: float
    network_source: str


_CORES = " and tables 1 and 5 of Norrie et al. 2021 (IEEE Micro 41); a device is one of the chip's two cores"
_TPU = "cloud.google.com/tpu/docs/{0}; link: half of the two directions together"
_NVIDIA = "NVIDIA {0} data sheet; dense: half of the figure with sparsity; link: half of the two directions together"
_GEFORCE = "NVIDIA {0}; dense, with float32 accumulation; link: PCIe x16, half of the two directions together"
_HOPPER = {
    "bfloat16": 989.4e12, "float16": 989.4e12, "tensorfloat32": 494.7e12, "float32": 66.9e12,
    "float8": 1978.9e12, "int8": 1978.9e12,
}  # fmt: skip
_AMPERE = {
    "bfloat16": 312e12, "float16": 312e12, "tensorfloat32": 156e12, "float32": 19.5e12, "int8": 624e12
}  # fmt: skip
_BLACKWELL = {
    "bfloat16": 2250e12, "float16": 2250e12, "tensorfloat32": 1125e12, "float32": 75e12,
    "float8": 4500e12, "int8": 4500e12,
}  # fmt: skip
_GRACE_BLACKWELL = {
    "bfloat16": 2500e12, "float16": 2500e12, "tensorfloat32": 1250e12, "float32": 80e12,
    "float8": 5000e12, "int8": 5000e12,
}  # fmt: skip
_DGX_1: _Network = {"network_bandwidth": 6.25e9, "network_source": "DGX-1 data sheet: 4 x 100 Gb/s for 8 GPUs"}
_DGX_A100: _Network = {"network_bandwidth": 25e9, "network_source": "DGX A100 data sheet: 8 x 200 Gb/s for 8 GPUs"}
_DGX_H100: _Network = {
    "network_bandwidth": 50e9,
    "network_source": "DGX H100, H200 and B200 data sheets: 8 x 400 Gb/s for 8 GPUs",
}
_POD = "cloud.google.com/tpu/docs/{0}: chips of a pod and its data centre network"
_NO_DCN = "cloud.google.com/tpu/docs/{0}: chips of a pod; it does not list the data centre network"


def _ec2(instance: str, gigabits: int) -> _Network:
    """Returns the network of an instance of Amazon EC2 with eight GPUs."""
    return {
        "network_bandwidth": gigabits / 8 / 8 * 1e9,
        "network_source": f"Amazon EC2 {instance}: {gigabits} Gb/s for 8 GPUs",
    }


CHIPS: dict[str, Chip] = {
    "t4": Chip(
        ("Tesla T4", "NVIDIA T4"), {"float16": 65e12, "float32": 8.1e12, "int8": 130e12},
        320e9, 16 << 30, 16e9, "NVIDIA T4 data sheet; link: PCIe 3.0 x16, half of the two directions together",
        cores=40,
        **_ec2("g4dn.metal", 100),
    ),
    "p100": Chip(
        ("Tesla P100-SXM2-16GB",), {"float16": 21.2e12, "float32": 10.6e12},
        732e9, 16 << 30, 80e9, "NVIDIA P100 data sheet (SXM2, 16 GB; no matrix units); link: one direction", cores=56,
        **_DGX_1,
    ),
    "v100": Chip(
        ("Tesla V100-SXM2-16GB",), {"float16": 125e12, "float32": 15.7e12},
        900e9, 16 << 30, 150e9, "NVIDIA V100 data sheet (SXM2, 16 GB); link: half of the two directions together",
        cores=80,
        **_DGX_1,
    ),
    "v100_32gb": Chip(
        ("Tesla V100-SXM2-32GB",), {"float16": 125e12, "float32": 15.7e12},
        900e9, 32 << 30, 150e9, "NVIDIA V100 data sheet (SXM2, 32 GB); link: half of the two directions together",
        cores=80,
        **_DGX_1,
    ),
    "a100": Chip(
        ("NVIDIA A100-SXM4-80GB",), _AMPERE, 2039e9, 80 << 30, 300e9, _NVIDIA.format("A100 80GB SXM"),
        cores=108,
        **_DGX_A100,
    ),
    "a100_pcie": Chip(
        ("NVIDIA A100 80GB PCIe",), _AMPERE, 1935e9, 80 << 30, 32e9, _NVIDIA.format("A100 80GB PCIe"), cores=108,
    ),
    "a100_40gb": Chip(
        ("NVIDIA A100-SXM4-40GB",), _AMPERE, 1555e9, 40 << 30, 300e9, _NVIDIA.format("A100 40GB SXM"),
        cores=108,
        **_DGX_A100,
    ),
    "a100_40gb_pcie": Chip(
        ("NVIDIA A100-PCIE-40GB",), _AMPERE, 1555e9, 40 << 30, 32e9, _NVIDIA.format("A100 40GB PCIe"), cores=108,
    ),
    "a10": Chip(
        ("NVIDIA A10",),
        {"bfloat16": 125e12, "float16": 125e12, "tensorfloat32": 62.5e12, "float32": 31.2e12, "int8": 250e12},
        600e9, 24 << 30, 32e9, _NVIDIA.format("A10"), cores=72,
    ),
    "a10g": Chip(
        ("NVIDIA A10G",),
        {"bfloat16": 70e12, "float16": 70e12, "tensorfloat32": 35e12, "float32": 35e12, "int8": 140e12},
        600e9, 24 << 30, 32e9, _NVIDIA.format("A10G"),
        cores=80,
        **_ec2("g5.48xlarge", 100),
    ),
    "a6000": Chip(
        ("NVIDIA RTX A6000",),
        {"bfloat16": 154.8e12, "float16": 154.8e12, "tensorfloat32": 77.4e12, "float32": 38.7e12, "int8": 309.7e12},
        768e9, 48 << 30, 32e9, _NVIDIA.format("RTX A6000 (and GA102 whitepaper; PCIe without an NVLink bridge)"),
        cores=84,
    ),
    "rtx3090": Chip(
        ("NVIDIA GeForce RTX 3090",),
        {"bfloat16": 71e12, "float16": 71e12, "tensorfloat32": 35.6e12, "float32": 35.6e12, "int8": 284e12},
        936e9, 24 << 30, 32e9, _GEFORCE.format("Ampere GA102 GPU architecture whitepaper, table 9"), cores=82,
    ),
    "rtx4090": Chip(
        ("NVIDIA GeForce RTX 4090",),
        {"bfloat16": 165.2e12, "float16": 165.2e12, "tensorfloat32": 82.6e12, "float32": 82.6e12, "float8": 330.3e12,
         "int8": 660.6e12},
        1008e9, 24 << 30, 32e9, _GEFORCE.format("Ada GPU architecture whitepaper, table 3"), cores=128,
    ),
    "rtx5090": Chip(
        ("NVIDIA GeForce RTX 5090",),
        {"bfloat16": 209.5e12, "float16": 209.5e12, "tensorfloat32": 104.8e12, "float32": 104.8e12,
         "float8": 419e12, "int8": 838e12},
        1792e9, 32 << 30, 64e9, _GEFORCE.format("RTX Blackwell GPU architecture whitepaper, appendix A"), cores=170,
    ),
    "h100": Chip(
        ("NVIDIA H100 80GB HBM3",), _HOPPER, 3350e9, 80 << 30, 450e9, _NVIDIA.format("H100 SXM5"),
        cores=132,
        **_DGX_H100,
    ),
    "h100_pcie": Chip(
        ("NVIDIA H100 PCIe",),
        {"bfloat16": 756e12, "float16": 756e12, "tensorfloat32": 378e12, "float32": 51.2e12, "float8": 1513e12,
         "int8": 1513e12},
        2000e9, 80 << 30, 64e9, _NVIDIA.format("H100 PCIe"), cores=114,
    ),
    "h100_500w": Chip(
        ("NVIDIA H100 HBM2e 96GB",), {name: 0.844 * peak for name, peak in _HOPPER.items()},
        2400e9, 96 * 10**9, 450e9, "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: 500 W, HBM2e; the clock "
        "scales the peaks of the H100 SXM5",
        cores=132,
        **_DGX_H100,
    ),
    "h800": Chip(
        ("NVIDIA H800",), _HOPPER, 3350e9, 80 << 30, 200e9,
        "DeepSeek-V3 technical report (arXiv:2412.19437), section 3.1; NVLink has 400 GB/s in both directions together",
        cores=132,
        network_bandwidth=50e9, network_source="DeepSeek-V3 technical report: InfiniBand, 8 x 400 Gb/s for 8 GPUs",
    ),
    "h20": Chip(
        ("NVIDIA H20",),
        {"bfloat16": 148e12, "float16": 148e12, "tensorfloat32": 74e12, "float32": 44e12, "float8": 296e12,
         "int8": 296e12},
        4000e9, 96 * 10**9, 450e9, "NVIDIA HGX H20 specifications; dense; link: half of the two directions together",
        cores=78,
        **_DGX_H100,
    ),
    "h200": Chip(
        ("NVIDIA H200",), _HOPPER, 4800e9, 141 * 10**9, 450e9, _NVIDIA.format("H200 SXM"),
        cores=132,
        **_DGX_H100,
    ),
    "b200": Chip(
        ("NVIDIA B200",), _BLACKWELL, 8000e9, 180 * 10**9, 900e9, _NVIDIA.format("DGX B200, an eighth of it"),
        cores=148,
        **_DGX_H100,
    ),
    "gb200": Chip(
        ("NVIDIA GB200",), _GRACE_BLACKWELL, 8000e9, 186 * 10**9, 900e9,
        _NVIDIA.format("GB200 NVL72, one of its 72 GPUs"), linked_devices=72, cores=152,
        network_bandwidth=50e9, network_source="GB200 NVL72: one ConnectX-7 of 400 Gb/s for each GPU",
    ),
    "b300": Chip(
        ("NVIDIA B300",), _BLACKWELL | {"int8": 150e12}, 8000e9, 270 * 10**9, 900e9,
        _NVIDIA.format("DGX B300, an eighth of it"), cores=148,
        network_bandwidth=100e9, network_source="DGX B300 data sheet: 8 x 800 Gb/s for 8 GPUs",
    ),
    "gb300": Chip(
        ("NVIDIA GB300",), _GRACE_BLACKWELL | {"int8": 165e12}, 8000e9, 279 * 10**9, 900e9,
        _NVIDIA.format("GB300 NVL72, one of its 72 GPUs"), linked_devices=72, cores=152,
        network_bandwidth=100e9, network_source="GB300 NVL72: one ConnectX-8 of 800 Gb/s for each GPU",
    ),
    "mi300x": Chip(
        ("AMD Instinct MI300X",),
        {"bfloat16": 1307.4e12, "float16": 1307.4e12, "tensorfloat32": 653.7e12, "float32": 163.4e12,
         "float8": 2614.9e12, "int8": 2614.9e12},
        5300e9, 192 * 10**9, 448e9, "AMD Instinct MI300X data sheet; link: seven links, half of the two directions",
        network_bandwidth=50e9, network_source="rocm.docs.amd.com, vllm-mori-distributed: 8 x 400 Gb/s for 8 GPUs",
        cores=304,
    ),
    "mi325x": Chip(
        ("AMD Instinct MI325X",),
        {"bfloat16": 1307.4e12, "float16": 1307.4e12, "tensorfloat32": 653.7e12, "float32": 163.4e12,
         "float8": 2614.9e12, "int8": 2614.9e12},
        6000e9, 256 * 10**9, 448e9, "AMD Instinct MI325X data sheet; link: seven links, half of the two directions",
        network_bandwidth=50e9, network_source="AMD Instinct MI325X platform: 8 x 400 Gb/s for 8 GPUs", cores=304,
    ),
    "trn2": Chip(
        ("trn2", "Trainium2"), {"bfloat16": 166.75e12, "float16": 166.75e12, "float32": 45.25e12, "float8": 324.75e12},
        725e9, 24 << 30, 160e9, "AWS Neuron documentation, Trainium2 architecture: two of the eight cores of a "
        "chip (LNC=2); link: half of the two directions together",
        devices=4, linked_devices=64, torus=2, network_bandwidth=6.25e9,
        network_source="Amazon EC2 trn2.48xlarge: 3,200 Gb/s for 16 chips",
    ),
    "l4": Chip(
        ("NVIDIA L4",),
        {"bfloat16": 121e12, "float16": 121e12, "tensorfloat32": 60e12, "float32": 30.3e12, "float8": 242.5e12,
         "int8": 242.5e12},
        300e9, 24 << 30, 32e9, _NVIDIA.format("L4"),
        cores=58,
        **_ec2("g6.48xlarge", 100),
    ),
    "l40s": Chip(
        ("NVIDIA L40S",),
        {"bfloat16": 362e12, "float16": 362e12, "tensorfloat32": 183e12, "float32": 91.6e12, "float8": 733e12,
         "int8": 733e12},
        864e9, 48 << 30, 32e9, _NVIDIA.format("L40S"),
        cores=142,
        **_ec2("g6e.48xlarge", 400),
    ),
    "v2": Chip(
        ("TPU v2",), {"bfloat16": 23e12}, 350e9, 8 << 30, 124e9, _TPU.format("v2") + _CORES, devices=2,
        linked_devices=512, torus=2, network_source=_NO_DCN.format("v2"), tile=128,
    ),
    "v3": Chip(
        ("TPU v3",), {"bfloat16": 61.5e12}, 450e9, 16 << 30, 164e9, _TPU.format("v3") + _CORES, devices=2,
        linked_devices=2048, torus=2, network_source=_NO_DCN.format("v3"), tile=128,
    ),
    "v4": Chip(
        ("TPU v4",), {"bfloat16": 275e12, "int8": 275e12}, 1228e9, 32 << 30, 300e9, _TPU.format("v4"),
        linked_devices=4096, torus=3, network_source=_NO_DCN.format("v4"), tile=128,
    ),
    "v5e": Chip(
        ("TPU v5 lite", "TPU v5e"), {"bfloat16": 197e12, "int8": 393e12}, 819e9, 16 << 30, 200e9, _TPU.format("v5e"),
        linked_devices=256, torus=2, network_bandwidth=3.125e9, network_source=_POD.format("v5e"), tile=128,
    ),
    "v5p": Chip(
        ("TPU v5", "TPU v5p"), {"bfloat16": 459e12, "int8": 918e12}, 2765e9, 95 << 30, 600e9, _TPU.format("v5p"),
        linked_devices=6144, torus=3, network_bandwidth=6.25e9, network_source=_POD.format("v5p"), tile=128,
    ),
    "v6e": Chip(
        ("TPU v6 lite", "TPU v6e"), {"bfloat16": 918e12, "int8": 1836e12}, 1640e9, 32 << 30, 448e9, _TPU.format("v6e"),
        linked_devices=256, torus=2, network_bandwidth=12.5e9, network_source=_POD.format("v6e"), tile=256,
    ),
    "v7x": Chip(
        ("TPU7x",), {"bfloat16": 1153.5e12, "float8": 2307e12}, 3690e9, 96 << 30, 300e9,
        _TPU.format("tpu7x") + "; a device is one of the chip's two cores", devices=2,
        linked_devices=18432, torus=3, network_source=_NO_DCN.format("tpu7x"), tile=256,
    ),
}  # fmt: skip
"""Every chip by the name that commands take. No program exceeds these figures, and few reach them."""

_PCIE = "{0}: PCIe {1} x16, half of the two directions together"
_SCALING_BOOK = "jax-ml.github.io/scaling-book/tpus: PCIe of a chip in one direction"
_HOST_LINKS: dict[str, tuple[tuple[str, ...], float, str]] = {
    "pcie3": (("t4", "p100", "v100", "v100_32gb"), 16e9, _PCIE.format("NVIDIA's data sheet", "3.0")),
    "pcie4": (
        ("a100", "a100_pcie", "a100_40gb", "a100_40gb_pcie", "a10", "a6000", "rtx3090", "rtx4090", "l4", "l40s"),
        32e9,
        _PCIE.format("NVIDIA's data sheet", "4.0"),
    ),
    "pcie5": (
        ("rtx5090", "h100", "h100_pcie", "h100_500w", "h800", "h20", "h200", "b200"),
        64e9,
        _PCIE.format("NVIDIA's data sheet", "5.0"),
    ),
    "pcie5_amd": (("mi300x", "mi325x"), 64e9, _PCIE.format("AMD's data sheet", "5.0")),
    "c2c": (
        ("gb200", "gb300"),
        225e9,
        "NVIDIA's data sheet: NVLink-C2C has 900 GB/s in both directions together, for two GPUs",
    ),
    "tpu": (("v4", "v5e", "v5p"), 15e9, _SCALING_BOOK),
    "trillium": (("v6e",), 32e9, _SCALING_BOOK),
}

HOST_BANDWIDTH: dict[str, tuple[float, str]] = {
    chip: (rate, source) for chips, rate, source in _HOST_LINKS.values() for chip in chips
}
"""Bytes/s that a device copies to its host's memory, with the source. It copies as many from the host at the same time.

Chips are left out if no source gives the figure.
"""


@cache
def chip_name(device_kind: str) -> str | None:
    """Returns the name in `CHIPS` of a device kind of JAX, or None if the kind is not listed."""
    return next((name for name, chip in CHIPS.items() if device_kind in chip.kinds), None)


def find_chip(name: str) -> str:
    """Returns the key of `CHIPS` for a name: the key or JAX's device kind, in any case, spaced or hyphenated.

    Raises:
      ConfigError: there is no such chip; the message names the nearest ones.
    """
    wanted = _plain(name)
    keys = {_plain(key): key for key in CHIPS}
    kinds = {kind.lower(): key for key, chip in CHIPS.items() for kind in chip.kinds}
    if found := kinds.get(name.lower(), keys.get(wanted)):
        return found
    ordered = sorted((short for short in keys if short in wanted), key=len, reverse=True)
    ordered += [short for short in keys if wanted and wanted in short]
    ordered += difflib.get_close_matches(wanted, keys, n=3, cutoff=0.6)
    close = [keys[short] for short in dict.fromkeys(ordered)][:3]
    advice = f"Did you mean {' or '.join(close)}?" if close else f"Use one of {', '.join(CHIPS)}."
    raise ConfigError(f"{name!r} is not the name of a chip. {advice}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]|^(tpu|nvidia)", "", name.lower())
