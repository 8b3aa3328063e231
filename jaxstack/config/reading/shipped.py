"""The configurations that come with jaxstack, and what `--config` names."""

import difflib
import os
from collections.abc import Sequence
from pathlib import Path

from jaxstack.common.errors import ConfigError


def shipped() -> dict[str, Path]:
    """Returns the files of the configurations that come with jaxstack, by name: runnable jobs, then published models.

    The steps of the speedrun follow, as `speedrun/sft`. An installed package contains all files; in a checkout they are
    beside the package.
    """
    inside, beside = (folder / "configs" for folder in Path(__file__).parents[2:4])
    folder = inside if inside.is_dir() else beside
    found = {path.stem: path for pattern in ("*.yaml", "models/*.yaml") for path in sorted(folder.glob(pattern))}
    return found | {f"speedrun/{path.stem}": path for path in sorted(folder.glob("speedrun/*.yaml"))}


def first_command(files: Sequence[Path]) -> str:
    """Returns the command that comes before the one of a configuration, from its line `# First: ...`, or "".

    Args:
      files: that `--config` named. The last one counts.
    """
    lines = files[-1].read_text(encoding="utf-8").splitlines() if files else []
    return next((line.removeprefix("# First: ") for line in lines if line.startswith("# First: ")), "")


def config_file(name: str) -> Path:
    """Returns the file that `--config=NAME` means: a path, or the name of a shipped configuration.

    Raises:
      ConfigError: there is neither.
    """
    path = Path(os.path.expanduser(name))
    known = shipped()
    if path.is_file():
        return path
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--config={name} is not a regular file, and it is read twice. Save it as a YAML file.")
    if name in known:
        return known[name]
    if (path / "config.yaml").is_file():
        raise ConfigError(f"--config={name} is a directory. Did you mean --config={path / 'config.yaml'}?")
    stem = path.name.removesuffix(".yaml").removesuffix(".yml")
    if close := difflib.get_close_matches(stem, known, n=1):
        raise ConfigError(f"--config={name} is not a file. Did you mean --config {close[0]}?")
    raise ConfigError(f"--config={name} is not a file. Name a YAML file, or one of {', '.join(known)}.")
