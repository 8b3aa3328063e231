"""A file imports only from lower floors (or within its own room): the table of docs and CONTRIBUTING, held."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "jaxstack"

FLOORS = {
    "config": 0,
    "tree": 0,
    "collectives": 0,
    "exits": 0,
    "files": 0,
    "chips": 0,
    "platform": 1,
    "cli": 1,
    "distributed": 1,
    "seal": 1,
    "sinks": 1,
    "signals": 1,
    "watch": 2,
    "sharding": 1,
    "kernels": 1,
    "params": 1,
    "lora": 2,
    "rundir": 2,
    "goodput": 2,
    "supervise": 3,
    "moe": 2,
    "pipeline": 2,
    "context": 3,
    "layers": 4,
    "model": 5,
    "data": 6,
    "optim": 6,
    "losses": 6,
    "checkpoint": 6,
    "loggers": 6,
    "generate": 9,
    "feed": 7,
    "step": 7,
    "aot": 8,
    "hf": 8,
    "profile": 8,
    "report": 8,
    "convert": 9,
    "plan": 9,
    "tracing": 12,
    "metrics": 10,
    "progress": 11,
    "train": 13,
    "__main__": 14,
}

JAX_FREE = {
    "chips", "config", "cli", "platform", "rundir", "data", "exits", "files", "seal", "signals", "supervise", "goodput",
    "loggers", "report", "__main__", "sinks",
}  # fmt: skip
"""What runs before JAX starts, for quick help and quick errors."""


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever the statement stands, as written."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def test_every_room_has_a_floor():
    assert {room(path) for path in FILES} == set(FLOORS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path):
    own = room(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "jaxstack" and len(parts) > 1 and parts[1] != own:
            assert FLOORS[parts[1]] < FLOORS[own], f"{own} (floor {FLOORS[own]}) imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_and_foreign_packages_stay_out(path):
    roots = {name.split(".")[0] for name in imports(path)}
    assert not roots & {"tensorflow", "torch", "transformers", "wandb"}
    if room(path) in JAX_FREE:
        assert not roots & {"jax", "jaxlib", "flax", "optax", "orbax"}
