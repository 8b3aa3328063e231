"""Selects the implementation of an op: which ones can run on a platform, and which one `auto` means.

The file of an op names its implementations in `IMPLEMENTATIONS`. `pallas` means the Pallas kernel of the platform,
`pallas_gpu` or `pallas_tpu`. Naming an implementation that cannot run is an error; `auto` tries the next one instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import jax

OpCase: TypeAlias = Mapping[str, Any]
"""The properties of a call that an implementation may depend on: `dtype`, and others that the op's file defines."""

InterpretSetting: TypeAlias = Any
"""False to compile Pallas kernels, True to interpret them, or `pltpu.InterpretParams(...)` for TPU kernels."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    Attributes:
      platforms: platforms that it runs on, of `cpu`, `gpu` and `tpu`.
      unsupported_reason: returns why it cannot compute a case, as the predicate of a sentence about it, or "" if it
        can. A case may lack properties that are not known yet; the function ignores those.
    """

    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")
    unsupported_reason: Callable[[OpCase], str] = lambda case: ""


Implementations: TypeAlias = Mapping[str, Implementation]
"""The implementations of one op, by name."""


def precedes(case: OpCase, capability: str = "8.0", what: str = "") -> str:
    """Returns why a kernel for NVIDIA GPUs of a compute capability and later cannot compute a case, or "" if it can."""
    there = case.get("compute_capability")
    if there is None or (there.replace(".", "").isdecimal() and float(there) >= float(capability)):
        return ""  # AMD's have letters
    return f"takes {what}NVIDIA GPUs of compute capability {capability} and later, not {there}"


def unsupported_by_tokamax(case: OpCase) -> str:
    """Returns why no kernel of the package tokamax can compute a case, or "" if one may."""
    if find_spec("tokamax") is None:
        return "needs the package tokamax, which is not installed (pip install 'jaxstack[tokamax]')"
    there = case.get("compute_capability")
    if there is not None and not there.startswith("9."):
        return f"takes NVIDIA GPUs of compute capability 9 (Hopper), not {there}"
    if case.get("dtype") is not None and np.dtype(case["dtype"]).name not in ("bfloat16", "float16"):
        return f"takes bfloat16 and float16, not {np.dtype(case['dtype']).name}"
    return ""


@cache
def load_tokamax() -> ModuleType:
    """Imports the package tokamax, which takes seconds.

    Its settings are flags of absl. Without this it would read them from our command line, which has other ones. It also
    warns at every call whose block sizes it has not measured, with all shapes of the call.
    """
    import tokamax
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["jaxstack"])
    unmeasured = "Autotuning cache miss"
    logging.getLogger("absl").addFilter(lambda record: not str(record.msg).startswith(unmeasured))
    return tokamax


def exceeds_float32(case: OpCase) -> str:
    """Returns why a kernel that computes in float32 cannot compute a case, or "" if it can."""
    if case.get("dtype") is not None and np.dtype(case["dtype"]).itemsize > 4:
        return f"computes in float32, which is less than {np.dtype(case['dtype']).name}"
    return ""


AUTO_ORDER: dict[str, dict[str, tuple[str, ...]]] = {
    "cpu": {  # benchmarks/results/train_cpu.json, generate_cpu.json
        "attention": ("chunked",),
        "linear": ("barrier",),
        "norm": ("custom_vjp",),
        "moe": ("grouped",),
        "decode": ("unrolled",),
        "gelu": ("saved",),
        "codes": ("int8",),
        "cross_entropy": ("chunked",),
    },
    # Nothing has been measured on an accelerator yet. These choices follow from the compilers' output
    # (docs/kernels.md). `auto` selects our Pallas kernels where the others move several times their bytes: for
    # attention on TPU, and on GPU where cuDNN's kernel does not compute it (attention_bytes.json); for experts and
    # codes on GPU. "grouped" has the host read a predicate before every tile, in 13,824 loops of a step of 64 experts,
    # and "ragged" multiplies all rows with all experts. On TPU ragged_dot is a kernel of XLA. XLA:GPU keeps the values
    # of codes in memory, so that a token of Llama 3 8B in int4 moves six times the bytes.
    # Attention: all but "xla" need memory linear in the sequence. cuDNN's kernel is NVIDIA's own, moves the fewest
    # bytes and comes first where it computes the definition. "chunked" moves more than 20 times the bytes of a kernel.
    # Norms on TPU use XLA, which fuses them with neighbouring operations. On GPU the compiled step decides on norms,
    # experts, layers and the update (benchmarks/results/step_bytes.json). The compiled step of a new token decides on
    # decoding (decode_gpu_aot.json).
    "gpu": {
        "attention": ("cudnn", "pallas_gpu", "chunked"),
        "norm": ("custom_vjp",),
        "cross_entropy": ("chunked",),
        "moe": ("pallas_gpu", "grouped"),
        "layers": ("unrolled",),
        "update": ("select",),
        "decode": ("unrolled",),
        "codes": ("pallas_gpu",),
    },
    "tpu": {"attention": ("pallas_tpu", "chunked"), "cross_entropy": ("chunked",)},
}
"""The implementations that `auto` tries first on a platform, in order. After them it tries the others of the op."""


def platform_of(device: jax.Device) -> str:
    """Returns `cpu`, `gpu` or `tpu`. Plugins of CUDA and ROCm may use other names for `gpu`."""
    return {"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform)


def select_implementation(op: str, implementations: Implementations, wanted: str, platform: str, case: OpCase) -> str:
    """Returns the name of the implementation to run, which is neither `auto` nor `pallas`.

    `op` is the op's key in the configuration, such as "attention". `wanted` is a name of `implementations`, "pallas" or
    "auto". `platform` is `cpu`, `gpu` or `tpu`. `case` has the known properties of the call.

    Raises:
      ValueError: the implementation does not exist, or it does not support the platform or the case.
    """
    if wanted == "auto":
        names = [*AUTO_ORDER.get(platform, {}).get(op, ()), *implementations]
        return next(name for name in names if not _unsupported_reason(implementations[name], platform, case))
    name = f"pallas_{platform}" if wanted == "pallas" else wanted
    able = [other for other in implementations if not _unsupported_reason(implementations[other], platform, case)]
    if name not in implementations:
        raise ValueError(f"{op} has no implementation {wanted!r} on {platform}. Use one of {', '.join(able)}, or auto.")
    if why := _unsupported_reason(implementations[name], platform, case):
        raise ValueError(f"{op}={wanted} {why}. Use one of {', '.join(able)}, or auto.")
    return name


def resolve_implementation(op: str, implementations: Implementations, wanted: str, case: OpCase) -> str:
    """Returns the name of the implementation to run for a function that is called directly.

    For "auto" and "pallas" it calls `select_implementation` with JAX's default platform. For other names it checks the
    case, but not the platform.

    Raises:
      ValueError: see `select_implementation`.
    """
    if wanted in implementations:
        if why := implementations[wanted].unsupported_reason(case):
            able = [name for name in implementations if not implementations[name].unsupported_reason(case)]
            raise ValueError(f"{op}={wanted} {why}. Use one of {', '.join(able)}, or auto.")
        return wanted
    import jax

    name = select_implementation(op, implementations, wanted, platform_of(jax.devices()[0]), case)
    if wanted == "auto":
        _log_once(op, name)
    return name


_INTERPRET: ContextVar[InterpretSetting] = ContextVar("interpret", default=False)


@contextmanager
def interpret_mode(how: InterpretSetting = True) -> Iterator[None]:
    """Interprets the Pallas kernels that are traced within this context, on any platform."""
    token = _INTERPRET.set(how)
    try:
        yield
    finally:
        _INTERPRET.reset(token)


def interpret_setting() -> InterpretSetting:
    """Returns the setting of the innermost `interpret_mode`, or False outside of it."""
    return _INTERPRET.get()


@cache
def _log_once(op: str, name: str) -> None:
    logging.getLogger("jaxstack.kernels").info("%s runs as %s", op, name)


def _unsupported_reason(implementation: Implementation, platform: str, case: OpCase) -> str:
    if platform not in implementation.platforms:
        return f"runs on {' and '.join(implementation.platforms)}, not on {platform}"
    return implementation.unsupported_reason(case)
