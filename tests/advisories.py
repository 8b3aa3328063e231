"""Lists known vulnerabilities by package; `python tests/advisories.py` checks every package that is installed here.

The list is part of the repository because CI may have no connection to a database of vulnerabilities. With one,
`pip-audit` tells what is new: add a row, and raise the floor in `pyproject.toml`. tests/test_dependencies.py compares
the rows with all floors.
"""

import sys
from importlib.metadata import distributions
from typing import NamedTuple

from packaging.utils import canonicalize_name
from packaging.version import Version


class Advisory(NamedTuple):
    """The last vulnerabilities of a package that are known to be repaired.

    Attributes:
      package: its name in the package registry.
      repaired: first version without any of them.
      names: identifiers, the most recent first.
      about: what the most serious of them allows.
    """

    package: str
    repaired: str
    names: tuple[str, ...]
    about: str


ADVISORIES = (
    # What pyproject.toml names.
    Advisory("babel", "2.9.1", ("CVE-2021-42771",), "a locale's name loads a pickle from any directory"),
    Advisory("datasets", "5.0.1", ("PYSEC-2026-3716",), "metadata of a folder of files reads any local file"),
    Advisory(
        "django",
        "5.2.17",
        ("CVE-2026-15307", "CVE-2026-15337", "CVE-2026-15830", "CVE-2026-15920", "CVE-2026-53878", "CVE-2026-1207"),
        "SQL injection; jaxstack reads only its translations",
    ),
    Advisory(
        "jinja2",
        "3.1.6",
        ("CVE-2025-27516", "CVE-2024-56326", "CVE-2024-56201", "CVE-2024-34064", "CVE-2024-22195"),
        "a template, such as a tokenizer's chat template, leaves the sandbox and runs code",
    ),
    Advisory("numpy", "1.22", ("CVE-2021-41496",), "a negative dimension overflows a buffer"),
    Advisory(
        "pillow",
        "12.3.0",
        (
            "CVE-2026-55379",
            "CVE-2026-40192",
            "CVE-2026-25990",
            "CVE-2025-48379",
            "CVE-2024-28219",
            "CVE-2023-50447",
            "CVE-2023-4863",
        ),
        "a picture writes outside of its buffer",
    ),
    Advisory("psutil", "5.6.6", ("CVE-2019-18874",), "memory is freed twice"),
    Advisory("pytest", "9.0.3", ("CVE-2025-71176",), "other local users replace its temporary folders"),
    Advisory("pyyaml", "5.4", ("CVE-2020-14343",), "a file runs code; jaxstack uses the safe loader"),
    Advisory("scikit-learn", "1.5.0", ("CVE-2024-5206",), "a vectorizer stores words of its training data"),
    Advisory(
        "starlette",
        "1.3.1",
        ("CVE-2026-54283", "CVE-2026-54282", "CVE-2026-48710", "CVE-2025-62727", "CVE-2025-54121"),
        "a Host header gets past checks of the path; one request occupies the server",
    ),
    Advisory("torch", "2.10.0", ("CVE-2026-24747", "CVE-2025-32434"), "a checkpoint runs code"),
    Advisory(
        "transformers",
        "5.10.0",
        ("CVE-2026-9856", "CVE-2026-5241", "CVE-2026-4372"),
        "a model's folder writes any file, or runs code",
    ),
    Advisory("uvicorn", "0.11.7", ("CVE-2020-7694", "CVE-2020-7695"), "a request writes lines of the log"),
    Advisory("wandb", "0.28.0", ("CVE-2026-39821",), "of the libraries within its binary"),
    # What those install in turn.
    Advisory("filelock", "3.20.3", ("CVE-2026-22701", "CVE-2025-68146"), "a symbolic link is truncated"),
    Advisory("fonttools", "4.60.2", ("CVE-2025-66034",), "a font's file writes any file"),
    Advisory("h11", "0.16.0", ("CVE-2025-43859",), "a chunked body is read as another request"),
    Advisory("nbconvert", "7.17.1", ("CVE-2026-39377", "CVE-2026-39378"), "a notebook writes any file"),
    Advisory("protobuf", "6.33.5", ("CVE-2026-0994", "CVE-2025-4565"), "a nested message overflows the stack"),
    Advisory("pyarrow", "14.0.1", ("CVE-2023-47248",), "a file runs code"),
    Advisory("pygments", "2.20.0", ("CVE-2026-4539",), "a text occupies the process"),
    Advisory("requests", "2.32.4", ("CVE-2024-47081",), "a URL gets another host's password"),
    Advisory("tqdm", "4.66.3", ("CVE-2024-34062",), "an option of its command runs code"),
    Advisory("urllib3", "2.7.0", ("CVE-2026-44431", "CVE-2026-44432"), "a response occupies the memory"),
)


def vulnerable(versions: dict[str, str]) -> list[str]:
    """Returns a line for each package, of the versions by name, that an advisory is about."""
    names = {canonicalize_name(name): version for name, version in versions.items()}
    return [
        f"{a.package} {names[a.package]}: {', '.join(a.names)} ({a.about}); repaired in {a.repaired}"
        for a in ADVISORIES
        if a.package in names and Version(names[a.package]) < Version(a.repaired)
    ]


def main() -> None:
    """Prints how many packages were compared, and fails if one is vulnerable."""
    versions = {d.metadata["Name"]: d.version for d in distributions()}
    lines = vulnerable(versions)
    if lines:
        sys.exit("\n".join(["Packages with known vulnerabilities are installed:", *lines]))
    print(f"{len(versions)} packages, none with one of {sum(len(a.names) for a in ADVISORIES)} known vulnerabilities")


if __name__ == "__main__":
    main()
