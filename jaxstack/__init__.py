"""jaxstack: a JAX-based functional training stack.

Every room of the package is an attribute, and so are the modules that other projects use most: `jaxstack.model`,
`jaxstack.params`. They are imported when they are first used, so importing the package costs nothing, and JAX starts
only when it is needed.
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
"""Public name -> module."""


def __getattr__(name: str) -> ModuleType:
    if name in _MODULES:
        return importlib.import_module(f"jaxstack.{_MODULES[name]}")
    raise AttributeError(f"module 'jaxstack' has no attribute {name!r}; it has {', '.join(_MODULES)}")


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]
