"""Runs quick tests with other versions of packages than the ones that pip chooses: `python tests/selected.py lowest`

`lowest` covers what reads the packages of pyproject.toml, `newest` what depends on Python and JAX. Each takes one to
three minutes on two cores. `.ci/run` makes the environments.
"""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
SELECTIONS = {
    "lowest": [
        "tests/test_dependencies.py",
        "tests/checkpoint",
        "tests/data/test_chat.py",
        "tests/data/test_data.py",
        "tests/data/test_images.py",
        "tests/hf/test_hf.py",
        "tests/serve",
        "tests/tracking",
    ],
    "newest": [
        "tests/test_dependencies.py",
        "tests/debug/test_eager.py",
        "tests/kernels/test_kernels.py",
        "tests/models/test_by_hand.py",
        "tests/runtime/test_host_reads.py",
        "tests/sharding/test_collectives.py",
        "tests/training/test_step.py",
    ],
}
"""Files and folders of tests. Those marked slow are left out."""


def main() -> None:
    """Runs a selection and exits as tests/again.py does, which runs a failed test once more."""
    (selection,) = sys.argv[1:]
    print(f"Python {sys.version.split()[0]}, jax {version('jax')}, flax {version('flax')}", flush=True)
    command = [sys.executable, "tests/again.py", *SELECTIONS[selection]]
    sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)


if __name__ == "__main__":
    main()
