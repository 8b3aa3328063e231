"""Selects the options with which XLA compiles training steps for several GPUs, and text generation on CPUs.

The options of training steps let arithmetic hide collectives. The one of generation avoids copies of the KV cache.

They are options of `jax.jit`. As `XLA_FLAGS` in the environment, one that the installed jaxlib lacks would end the
process, and jaxlib renames them. As options they can be tried, they affect no other program, and a step that is
compiled ahead of time has them too. `XLA_FLAGS` of the user win: an option that they set is left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jaxstack.runtime import platform

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

Value = bool | str

GPU_OPTIONS: dict[str, tuple[tuple[str, Value], ...]] = {
    "the scheduler that puts work beside collectives": (("xla_gpu_enable_latency_hiding_scheduler", True),),
    **{
        f"{kind} of the next layer during this one": (
            (f"xla_gpu_enable_pipelined_{name}", True),
            (f"xla_gpu_pipeline_{name}", "COLLECTIVE_PIPELINING_MODE_ON"),  # its name since jaxlib 0.11
        )
        for kind, name in (
            ("all-gather", "all_gather"),
            ("reduce-scatter", "reduce_scatter"),
            ("all-reduce", "all_reduce"),
        )
    },
}
"""The options for several GPUs: what each is for, and its names and values in different versions of jaxlib."""

NOT_IN_PIPELINES = "all-gather of the next layer during this one"
"""The option that pipelines do without.

A stage gathers its weights before its first tick. XLA would gather the embedding of a tick during the tick before, and
then note no trip count for the loop over ticks.
"""

OFF_FOR_SEVERAL = NOT_IN_PIPELINES, "reduce-scatter of the next layer during this one"
"""The options that are off for a loop whose turns run several layers.

XLA would gather the weights of all layers of a turn during the turn before, and keep their gradients in float32 for the
turn after. Without these options, it can still hide a collective of one layer of a turn behind another layer. They are
set to off and not left out, because XLA pipelines reduce-scatters by default.
"""

OFF: Mapping[Value, Value] = {True: False, "COLLECTIVE_PIPELINING_MODE_ON": "COLLECTIVE_PIPELINING_MODE_OFF"}
"""The value with which an option is off, by the one with which it is on."""

CACHE_OPTION = "xla_cpu_copy_insertion_use_region_analysis"
"""The analysis with which XLA:CPU sees that a token's keys are written after the earlier keys have been read.

Without it, XLA copies the complete cache twice for every token.
"""


class XlaOptions(NamedTuple):
    """The options of a step.

    Attributes:
      used: values by name.
      left_out: for each option that is not used, the reason, by the option's name.
    """

    used: dict[str, Value]
    left_out: dict[str, str]

    def explain(self) -> str:
        """Returns a line with the options that are left out, or "" if there are none."""
        reasons: dict[str, list[str]] = {}
        for name, why in self.left_out.items():
            reasons.setdefault(why, []).append(name)
        return "; ".join(f"{why}, so jaxstack leaves out {', '.join(names)}" for why, names in reasons.items())


def select_options(platform_name: str, mesh: Mesh | AbstractMesh | None, runs_several: bool = False) -> XlaOptions:
    """Returns the options of a step on a mesh of `cpu`, `gpu` or `tpu`; a mesh of `None` is one device.

    XLA needs no options on TPUs. On CPUs, `platform.configure` has set what a step needs, unless the user set
    `XLA_FLAGS`.

    Args:
      runs_several: whether a turn of a loop over layers runs several layers.
    """
    devices = mesh.size if mesh is not None else 1
    has_stages = mesh is not None and mesh.shape.get("pipe", 1) > 1
    given = _user_flags(os.environ.get("XLA_FLAGS", ""))
    used: dict[str, Value] = {}
    left_out: dict[str, str] = {}
    if platform_name == "cpu" and devices > 1 and given and given.get(platform.CPU_FLAG[0]) != platform.CPU_FLAG[1]:
        left_out["=".join(platform.CPU_FLAG)] = "XLA_FLAGS is set"
    wanted = {
        purpose: tuple((name, OFF[value]) for name, value in names)
        if runs_several and purpose in OFF_FOR_SEVERAL
        else names
        for purpose, names in GPU_OPTIONS.items()
        if not (has_stages and purpose == NOT_IN_PIPELINES)
    }
    for names in wanted.values() if platform_name == "gpu" and devices > 1 else ():
        theirs = next((name for name, _ in names if name in given), None)
        known = next(((name, value) for name, value in names if _exists(name, value)), None)
        if theirs is not None:
            left_out[theirs] = "XLA_FLAGS is set"
        elif known is None:
            left_out[names[0][0]] = "this jaxlib lacks it"
        else:
            used[known[0]] = known[1]
    return XlaOptions(used, left_out)


def select_decode_options(platform_name: str) -> dict[str, Value]:
    """Returns the options of a program that generates text on `cpu`, `gpu` or `tpu`, by name."""
    given = _user_flags(os.environ.get("XLA_FLAGS", ""))
    wanted = platform_name == "cpu" and CACHE_OPTION not in given
    return {CACHE_OPTION: True} if wanted and _exists(CACHE_OPTION, True) else {}


def _user_flags(text: str) -> Mapping[str, str]:
    """Returns the values of flags by name; `XLA_FLAGS` may also be the path of a file with flags, as XLA allows."""
    if text and not text.lstrip().startswith("-"):
        try:
            text = Path(text.strip()).read_text()
        except OSError:
            text = ""
    return dict(re.findall(r"--?(xla_\w+)(?:=(\S*))?", text))


@cache
def _exists(name: str, value: Value) -> bool:
    """Returns whether the installed jaxlib has an option with such a value: compiles an empty program with it."""
    import jax

    try:
        jax.jit(lambda: ()).lower().compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError as error:
        if "option" not in str(error):  # anything else, such as a device without free memory
            raise
        return False
    return True
