"""The list of mutants, the function that adds to it, and tests that several files name."""

from typing import Any

from mutations import Mutant

MUTANTS: list[Mutant] = []


def mistakes(room: str, file: str, tests: str, *pairs: tuple[Any, ...]) -> None:
    """Adds mutants of one file. A pair may be followed by other tests, and by what explains that a mutant passes."""
    for old, new, *rest in pairs:
        own = next((r for r in rest if isinstance(r, str)), tests)
        why = next((r for r in rest if isinstance(r, dict)), {})
        MUTANTS.append(Mutant(room, f"jaxstack/{file}", old, new, own, **why))


BY_HAND = "models/test_by_hand.py"
STEP = "training/test_step.py"
KERNELS = "kernels/test_kernels.py"
PIPELINE = "pipeline/test_pipeline.py -k 'gives and llama3'"
GENERATE = "generate/test_generate.py"
