"""jaxstack: a JAX-based functional training stack.

`jaxstack.load("runs/quickstart")` loads a run, to generate text, compute logits or evaluate it.

Every room of the package is an attribute, and so are the modules that other projects use most: `jaxstack.model` and
`jaxstack.params`. Each is imported at its first use, so that importing the package is fast and does not start JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxstack.common.version import __version__ as __version__

_MODULES = {"model": "models.decoder", "params": "models.params"} | {
    room: room
    for room in (
        "checkpoint", "common", "config", "data", "families", "generate", "hf", "kernels", "loaded", "models", "moe",
        "pipeline", "planner", "report", "runtime", "sharding", "tracking", "training",
    )
}  # fmt: skip
"""Module of each public name, within the package."""


if TYPE_CHECKING:
    from jaxstack.loaded.load_run import load as load


def __getattr__(name: str) -> Any:
    if name == "load":
        return importlib.import_module("jaxstack.loaded.load_run").load
    if name in _MODULES:
        return importlib.import_module(f"jaxstack.{_MODULES[name]}")
    raise AttributeError(f"module 'jaxstack' has no attribute {name!r}. It has load, {', '.join(_MODULES)}.")


def __dir__() -> list[str]:
    return [*globals(), "load", *_MODULES]
