"""Which implementation of an op runs where: what can run at all, and which of those `auto` takes.

An op's file has a table `IMPLEMENTATIONS` of its names. `pallas` stands for the Pallas kernel of the platform at hand,
`pallas_gpu` or `pallas_tpu`. A name that cannot run is an error; only `auto` goes on to the next one.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

OpCase = Mapping[str, Any]
"""What an implementation may depend on beside the platform: `dtype`, and what the op's own file names."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    Attributes:
      platforms: `cpu`, `gpu`, `tpu`; where it runs.
      unsupported_reason: what of a case it cannot do, in words that end a sentence; empty where it can. It is asked
      with as much of
        a case as is known, and says nothing of what is not.
    """

    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")
    unsupported_reason: Callable[[OpCase], str] = lambda case: ""


def float32_at_most(case: OpCase) -> str:
    """What keeps a kernel that computes in float32 from a case, see `Implementation.unsupported_reason`."""
    if case.get("dtype") is not None and np.dtype(case["dtype"]).itemsize > 4:
        return f"computes in float32, which is less than {np.dtype(case['dtype']).name}"
    return ""


Table = Mapping[str, Implementation]

AUTO: dict[str, dict[str, tuple[str, ...]]] = {
    "cpu": {  # benchmarks/results/train_cpu.json, generate_cpu.json
        "attention": ("chunked",),
        "linear": ("barrier",),
        "norm": ("custom_vjp",),
        "moe": ("grouped",),
        "decode": ("unrolled",),
        "gelu": ("saved",),
        "cross_entropy": ("chunked",),
    },
    # Nothing has been measured on an accelerator: these go by what the compilers say (docs/kernels.md), and a Pallas
    # kernel of ours has to be named until a device has shown its values and its speed.
    # Attention: all but "xla" need memory linear in the sequence. cuDNN's kernel is NVIDIA's own and comes first where
    # it computes the definition; "chunked" needs a thousand times its memory, and 23 s to compile for an H100.
    # Norms stay with XLA, which fuses them with what lies around them; ragged_dot multiplies all rows with all experts
    # on GPU, and is a kernel of XLA's on TPU.
    "gpu": {
        "attention": ("cudnn", "chunked"),
        "cross_entropy": ("chunked",),
        "moe": ("grouped",),
    },
    "tpu": {"attention": ("chunked",), "cross_entropy": ("chunked",)},
}
"""What `auto` tries on a platform, in this order, and why; an op that is not named takes the first of its table."""


def platform_of(device: Any) -> str:
    """`cpu`, `gpu` or `tpu`; a plugin of CUDA or ROCm may give its own name."""
    return {"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform)


def select_implementation(op: str, table: Table, wanted: str, platform: str, case: OpCase) -> str:
    """The implementation of an op that runs: a name of its table other than `auto` and `pallas`.

    Raises:
      ValueError: no such implementation, or it cannot run there or do this.
    """
    if wanted == "auto":
        names = [*AUTO.get(platform, {}).get(op, ()), *table]
        return next(name for name in names if not _obstacle(table[name], platform, case))
    name = f"pallas_{platform}" if wanted == "pallas" else wanted
    able = [other for other in table if not _obstacle(table[other], platform, case)]
    if name not in table:
        raise ValueError(f"{op} has no implementation {wanted!r} on {platform}; use one of {', '.join(able)}, or auto")
    if why := _obstacle(table[name], platform, case):
        raise ValueError(f"{op}={wanted} {why}; use one of {', '.join(able)}, or auto")
    return name


def resolve_implementation(op: str, table: Table, wanted: str, case: OpCase) -> str:
    """`select_implementation` for a function that is called by itself, on JAX's default platform; a definite name is
    taken as it is.

    Raises:
      ValueError: see `select_implementation`.
    """
    if wanted in table:
        if why := table[wanted].unsupported_reason(case):
            able = [name for name in table if not table[name].unsupported_reason(case)]
            raise ValueError(f"{op}={wanted} {why}; use one of {', '.join(able)}, or auto")
        return wanted
    import jax

    name = select_implementation(op, table, wanted, platform_of(jax.devices()[0]), case)
    if wanted == "auto":
        _say_once(op, name)
    return name


_INTERPRET: ContextVar[Any] = ContextVar("interpret", default=False)


@contextmanager
def interpret_mode(how: Any = True) -> Iterator[None]:
    """Within it Pallas kernels are traced to be interpreted, on any platform: `how` is True, or for TPU kernels
    `pltpu.InterpretParams(...)`."""
    token = _INTERPRET.set(how)
    try:
        yield
    finally:
        _INTERPRET.reset(token)


def interpret() -> Any:
    return _INTERPRET.get()


@cache
def _say_once(op: str, name: str) -> None:
    logging.getLogger("jaxstack.kernels").info("%s runs as %s", op, name)


def _obstacle(implementation: Implementation, platform: str, case: OpCase) -> str:
    if platform not in implementation.platforms:
        return f"runs on {' and '.join(implementation.platforms)}, not on {platform}"
    return implementation.unsupported_reason(case)
