"""Prints the packages that `pip install -e .` has installed, and fails if they are too many or too large."""

import sys
from importlib.metadata import distributions
from pathlib import Path

MOST_PACKAGES, MOST_MB = 45, 900
NOT_OURS = {"pip", "setuptools", "jaxstack"}  # packages of the environment itself

names = sorted({d.metadata["Name"].lower() for d in distributions()} - NOT_OURS)
site = Path(next(p for p in sys.path if p.endswith("site-packages")))
megabytes = sum(p.stat().st_size for p in site.rglob("*") if p.is_file() and "__pycache__" not in p.parts) / 1e6
print(f"{len(names)} packages, {megabytes:.0f} MB: {' '.join(names)}")
forbidden = {"torch", "tensorflow"} & set(names)
if len(names) > MOST_PACKAGES or megabytes > MOST_MB or forbidden:
    sys.exit(f"Allowed are {MOST_PACKAGES} packages and {MOST_MB} MB, without torch and tensorflow.")
