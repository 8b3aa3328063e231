"""The mistakes that tests/mutations.py makes, room by room: a file, tests, and pairs of old and new text.

Each is of the kind that a human makes: a swapped argument, an off-by-one, a wrong axis, sign, dtype or constant, a
missing sum or check, a stale value. The old text must occur exactly once; tests/test_mutants.py checks that.
"""

from importlib import import_module

from mutants.rows import MUTANTS

PARTS = (
    "models",
    "step",
    "kernels",
    "moe",
    "sharding",
    "pipeline",
    "data",
    "hf",
    "tracking",
    "cli",
    "generate",
    "planner",
    "runs",
    "optimizer",
    "diffusion",
    "contrastive",
    "serve",
    "compress",
    "evaluate",
    "watch",
    "posttrain",
)
"""Files of this folder in the order of their mutants, which is that of the committed results."""

for part in PARTS:
    import_module(f"mutants.{part}")

__all__ = ["MUTANTS"]
