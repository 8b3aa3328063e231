"""jaxstack: a JAX-based functional training stack.

Rooms are imported when they are first used (`jaxstack.model`, `jaxstack.data`, ...), so that importing the package
costs nothing and JAX starts only when it is needed.
"""

import importlib
from types import ModuleType

__version__ = "0.1.0"

_ROOMS = (
    "aot", "checkpoint", "cli", "config", "context", "data", "generate", "hf", "kernels", "layers", "loggers", "losses",
    "metrics", "model", "moe", "optim", "params", "pipeline", "plan", "platform", "rundir", "sharding", "step", "tree",
)  # fmt: skip


def __getattr__(name: str) -> ModuleType:
    if name in _ROOMS:
        return importlib.import_module(f"jaxstack.{name}")
    raise AttributeError(f"module 'jaxstack' has no attribute {name!r}; it has {', '.join(_ROOMS)}")


def __dir__() -> list[str]:
    return [*globals(), *_ROOMS]
