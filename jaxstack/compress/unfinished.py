"""Keeps the finished layers of a compression, so that the same command continues after an interruption."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxstack.common import files, inputs
from jaxstack.compress.quantize import QuantizedLayer
from jaxstack.config import ConfigError

_SETTINGS = "settings.json"


@dataclass(frozen=True)
class Unfinished:
    """A hidden folder beside the result, with a file for each finished layer.

    Attributes:
      folder: the folder.
    """

    folder: Path

    def path(self, index: int) -> Path:
        """Returns the file of a layer."""
        return self.folder / f"layer_{index:04}.npz"

    def read(self, index: int) -> QuantizedLayer | None:
        """Returns a finished layer, or `None`."""
        path = self.path(index)
        if not path.is_file():
            return None
        try:
            arrays = inputs.read_npz(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}. Remove it, and repeat the command.") from None
        layer: dict[str, Any] = {}
        codes: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for name, value in arrays.items():
            kind, _, rest = name.partition(":")
            if kind == "params":
                *groups, last = rest.split("/")
                group = layer
                for each in groups:
                    group = group.setdefault(each, {})
                group[last] = value
            elif kind == "codes":
                codes[rest] = value.view(str(arrays[f"dtype:{rest}"])), arrays[f"scales:{rest}"]
        return QuantizedLayer(layer, codes, inputs.parse_json(str(arrays["errors"])))

    def write(self, index: int, layer: QuantizedLayer) -> None:
        """Stores a layer; a crash leaves no part of a file."""
        arrays = {f"params:{path}": value for path, value in _flatten(layer.params)}
        for path, (codes, scales) in layer.codes.items():
            # NumPy's files have no 8-bit floats.
            arrays |= {f"codes:{path}": codes.view(np.int8), f"dtype:{path}": np.array(codes.dtype.name)}
            arrays[f"scales:{path}"] = scales
        scratch = self.folder / ".new.npz"
        np.savez(scratch, **(arrays | {"errors": np.array(json.dumps(layer.errors))}))  # type: ignore[arg-type]
        scratch.rename(self.path(index))

    def remove(self) -> None:
        """Removes the folder, once the result is complete."""
        shutil.rmtree(self.folder)


def open_folder(out: Path, settings: Mapping[str, Any]) -> Unfinished:
    """Opens or makes the folder of a result.

    Args:
      settings: what the finished layers depend on.

    Raises:
      ConfigError: the folder belongs to other settings.
    """
    folder = out.with_name(f".{out.name}.unfinished")
    text = json.dumps(dict(settings), indent=1)
    if (folder / _SETTINGS).is_file():
        before = files.read_json(folder / _SETTINGS, f"Remove the folder {folder}.")
        if not isinstance(before, dict):
            raise ConfigError(f"{folder / _SETTINGS} is not a JSON object. Remove the folder {folder}.")
        if different := [key for key, value in settings.items() if before.get(key) != value]:
            key = different[0]
            raise ConfigError(
                f"{folder} has layers of an interrupted command with {key}={before.get(key)}, not {settings[key]}. "
                f"Repeat that command, or remove the folder."
            )
        return Unfinished(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files.write_atomic(folder / _SETTINGS, text)
    return Unfinished(folder)


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, np.ndarray]]:
    found: list[tuple[str, np.ndarray]] = []
    for name, below in tree.items():
        path = f"{prefix}{name}"
        found += _flatten(below, f"{path}/") if isinstance(below, Mapping) else [(path, np.asarray(below))]
    return found
