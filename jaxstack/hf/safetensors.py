"""Reads and writes folders of `model*.safetensors` files. Tensors are read in parts and written a file at a time.

The safetensors library checks each file: offsets, sizes, overlaps and the end of the file. Nothing else in the folder
is trusted without a check.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from jaxstack.common import files, inputs
from jaxstack.common.errors import quoted, shortened
from jaxstack.config import ConfigError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = ("F32", "F16", "BF16")
FP8 = "F8_E4M3"
FILE_BYTES = 256e6
"""The size of a written file, unless one tensor is larger. Writing needs memory for one file."""


def import_safetensors() -> ModuleType:
    """Returns the package `safetensors`.

    Raises:
      ConfigError: it is not installed.
    """
    try:
        import safetensors.numpy
    except ImportError:
        raise ConfigError(
            "Hugging Face weights need the safetensors library. Run pip install 'jaxstack[hf]'."
        ) from None
    return safetensors


@dataclass(frozen=True)
class TensorInfo:
    """The file that holds a tensor, its shape, and its dtype as safetensors spells it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def refuse_pointer(path: Path) -> None:
    """Checks that a file is not a pointer, which a clone without Git LFS has in place of large files.

    Raises:
      ConfigError: it is a pointer.
    """
    begin = b"version https://git-lfs"
    try:
        with open(path, "rb") as file:
            pointer = file.read(len(begin)) == begin
    except OSError:
        return  # whoever reads the file says why
    if pointer:
        raise ConfigError(f"{path} is a pointer of Git LFS, not the file. Run `git lfs pull` in {path.parent}.")


class TensorFiles:
    """The tensors of a folder. Use it as a context manager, which closes the files.

    Attributes:
      folder: the path of the folder.
      infos: the tensors by name.

    Raises:
      ConfigError: no safetensors files, a damaged file, or an index that does not match the files.
    """

    def __init__(self, folder: Path) -> None:
        self._safetensors = import_safetensors()
        self.folder = folder
        self._stack = contextlib.ExitStack()
        self._open = dict[Path, Any]()
        self.infos: dict[str, TensorInfo] = {}
        with contextlib.ExitStack() as undo:
            undo.push(self._stack)
            for path, names in _files(folder).items():
                self._add(path, names)
            undo.pop_all()

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _add(self, path: Path, names: set[str] | None) -> None:
        """Opens a file, which must hold exactly the tensors `names`; `None` allows any tensors."""
        refuse_pointer(path)
        if not path.is_file():
            raise ConfigError(f"{path} is not a regular file. Fetch or save it again.")
        try:
            # `pread` reads only the parts that are asked for, and the file's pages do not count as our memory.
            file = self._stack.enter_context(self._safetensors.safe_open(path, "numpy", backend="pread"))
        except (OSError, self._safetensors.SafetensorError) as error:
            raise ConfigError(f"{path} is not a complete safetensors file: {error}. Fetch or save it again.") from None
        self._open[path] = file
        held = set(file.keys())
        if names is not None and held != names:
            raise ConfigError(
                f"{path} holds other tensors than {INDEX} lists, such as {min(held ^ names)}. Fetch or save both again."
            )
        for name in held:
            part = file.get_slice(name)
            self.infos[name] = TensorInfo(path, tuple(part.get_shape()), part.get_dtype())

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a part of a tensor in the dtype of the file."""
        info = self.infos[name]
        if info.dtype == FP8:
            return _read_fp8(info, name, index)
        try:
            return self._open[info.file].get_slice(name)[index]
        except (OSError, self._safetensors.SafetensorError) as error:
            raise ConfigError(f"{info.file} cannot be read: {error}. Fetch or save it again.") from None


def _read_fp8(info: TensorInfo, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """Returns a part of a float8 tensor, which the library cannot give to NumPy. Its rows are read completely.

    The library has checked the file's header, which begins with its own length in 8 bytes.
    """
    parts = [slice(*s.indices(n)[:2]) for s, n in zip(index, info.shape, strict=True)]
    rows = parts[0] if parts else slice(0, 1)
    count = max(rows.stop - rows.start, 0)
    width = math.prod(info.shape[1:])
    try:
        with open(info.file, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            begin = inputs.parse_json(file.read(length))[name]["data_offsets"][0]
            file.seek(8 + length + begin + rows.start * width)
            held = np.frombuffer(file.read(count * width), ml_dtypes.float8_e4m3fn)
        return held.reshape(count, *info.shape[1:])[:, *parts[1:]] if parts else held.reshape(())
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{info.file} cannot be read: {error}. Fetch or save it again.") from None


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """Returns the files of a folder, each with the tensors that the index lists for it, or `None` without an index."""
    single = folder / SINGLE
    index = folder / INDEX
    if single.exists() and index.exists():
        raise ConfigError(f"{folder} holds both {SINGLE} and {INDEX}. Remove one of them.")
    if single.exists():
        return {single: None}
    if not index.exists():
        present = sorted(path.name for path in folder.glob("*") if not files.is_foreign(path.name))
        pickled = [name for name in present if Path(name).suffix in (".bin", ".pt", ".pth", ".ckpt")]
        if pickled:
            raise ConfigError(
                f"{folder} holds {pickled[0]} and no {SINGLE}. A pickled file can run any code and is not read. "
                f"Convert it with transformers' save_pretrained or safetensors' convert."
            )
        raise ConfigError(f"{folder} holds neither {SINGLE} nor {INDEX}. Give the folder of a complete model.")
    try:
        names = inputs.read_json(index)["weight_map"]
        entries = [(str(name), Path(file)) for name, file in names.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is not an index of tensors ({error!r}). Fetch or save it again.") from None
    found: dict[Path, set[str] | None] = {}
    for name, file in entries:
        if file.name != str(file) or file.suffix != ".safetensors":
            raise ConfigError(
                f"{index} assigns {shortened(name)} to {quoted(str(file))}, which is not a safetensors file of its "
                f"folder. Fetch or save it again."
            )
        if not (folder / file).is_file():
            raise ConfigError(f"{index} lists {file}, which does not exist. Fetch or save the whole model again.")
        held = found.setdefault(folder / file, set())
        assert held is not None
        held.add(name)
    return found


def write_tensors(folder: Path, sizes: dict[str, int], tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes tensors into a folder, a file at a time.

    Args:
      folder: an existing, empty folder.
      sizes: bytes of each tensor, in the order of `tensors`.
      tensors: names and values. At most the tensors of one file are in memory.
    """
    limit = max(FILE_BYTES, *sizes.values())
    groups: list[list[str]] = [[]]
    for name, size in sizes.items():
        if sum(sizes[n] for n in groups[-1]) + size > limit:
            groups.append([])
        groups[-1].append(name)
    names = [SINGLE]
    if len(groups) > 1:
        names = [f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
        weight_map = {name: file for file, group in zip(names, groups, strict=True) for name in group}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    source = iter(tensors)
    for file, group in zip(names, groups, strict=True):
        held = {}
        for expected in group:
            name, value = next(source)
            assert (name, value.nbytes) == (expected, sizes[expected])
            held[name] = value
        save_file(held, folder / file)
        del held, value


def save_file(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Writes one file, which must not exist."""
    library = import_safetensors()
    try:
        library.numpy.save_file(tensors, path, metadata={"format": "pt"})  # transformers requires the metadata
    except library.SafetensorError as error:
        raise OSError(str(error)) from error


def require_new(folder: Path) -> None:
    """Makes sure that a folder to write does not exist, or is empty.

    Raises:
      ConfigError: it has files.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is never overwritten. Name another folder.")


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder to fill. It gets its name at the end of the block; after an error it is removed.

    Raises:
      ConfigError: the name exists already, or the folder cannot be created or written.
    """
    require_new(folder)
    begun = False
    try:
        with files.scratch_folder(folder) as scratch:
            begun = True
            yield scratch
            os.replace(scratch, folder)
    except OSError as error:
        if not begun:
            raise ConfigError(f"{folder} cannot be created: {error}. Name another folder.") from None
        raise ConfigError(f"{folder} cannot be written: {error}. Free some space, or name another folder.") from None
