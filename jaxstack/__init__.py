"""jaxstack: a JAX-based functional training stack.

Every room of the package is an attribute, and so are the modules that other projects use most: `jaxstack.model` and
`jaxstack.params`. Each is imported at its first use, so that importing the package is fast and does not start JAX.
"""

import importlib
from types import ModuleType

__version__ = "0.1.0"

_MODULES = {"model": "models.decoder", "params": "models.params"} | {
    room: room
    for room in (
        "checkpoint", "common", "config", "data", "generate", "hf", "kernels", "models", "moe", "pipeline", "planner",
        "report", "runtime", "sharding", "tracking", "training",
    )
}  # fmt: skip
"""Module of each public name, within the package."""


def __getattr__(name: str) -> ModuleType:
    if name in _MODULES:
        return importlib.import_module(f"jaxstack.{_MODULES[name]}")
    raise AttributeError(f"module 'jaxstack' has no attribute {name!r}. It has {', '.join(_MODULES)}.")


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]
