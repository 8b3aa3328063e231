"""A folder of `model*.safetensors` files: tensors by name, read in parts and written in few; nothing else of it is
trusted than what was checked. Headers are checked by safetensors: offsets, sizes, overlaps, the end of the file."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxstack.config import ConfigError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = ("F32", "F16", "BF16")
FILE_BYTES = (
    256e6  # a file is as large as this or as the largest tensor, whichever is more: so much is in memory at once
)


def import_safetensors() -> Any:
    """The package `safetensors`.

    Raises:
      ConfigError: it is not installed.
    """
    try:
        import safetensors.numpy
    except ImportError:
        raise ConfigError("Hugging Face weights need the safetensors library; install jaxstack[hf]") from None
    return safetensors


@dataclass(frozen=True)
class TensorInfo:
    """Of one tensor: the file that holds it, its shape and its dtype in safetensors' words."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class TensorFiles:
    """The tensors of a folder. Use as a context manager: leaving it closes the files.

    Attributes:
      infos: by name.

    Raises:
      ConfigError: no such files, a damaged one, or an index that does not fit them.
    """

    def __init__(self, folder: Path) -> None:
        self._safetensors, self._folder = import_safetensors(), folder
        self._stack, self._open = contextlib.ExitStack(), dict[Path, Any]()
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
        """Opens a file, which holds tensors of these names and no others (None: of any)."""
        try:
            # Not mapped into memory: only what is asked for is read, and pages of files do not count as ours.
            file = self._stack.enter_context(self._safetensors.safe_open(path, "numpy", backend="pread"))
        except (OSError, self._safetensors.SafetensorError) as error:
            raise ConfigError(f"{path} is no whole safetensors file: {error}; fetch or save it again") from None
        self._open[path] = file
        held = set(file.keys())
        if names is not None and held != names:
            raise ConfigError(
                f"{path} holds other tensors than {INDEX} says, such as {min(held ^ names)}; fetch or save both again"
            )
        for name in held:
            part = file.get_slice(name)
            self.infos[name] = TensorInfo(path, tuple(part.get_shape()), part.get_dtype())

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A part of a tensor, in its own dtype."""
        info = self.infos[name]
        try:
            return self._open[info.file].get_slice(name)[index]
        except (OSError, self._safetensors.SafetensorError) as error:
            raise ConfigError(f"{info.file} cannot be read: {error}; fetch or save it again") from None


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """The files of a folder, and the names that its index gives them."""
    single, index = folder / SINGLE, folder / INDEX
    if single.exists() and index.exists():
        raise ConfigError(f"{folder} holds both {SINGLE} and {INDEX}; remove the one that is not meant")
    if single.exists():
        return {single: None}
    if not index.exists():
        pickled = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        if pickled:
            raise ConfigError(
                f"{folder} holds {pickled[0]} and no {SINGLE}; a pickled file can run any code and is not read: "
                f"convert it, with transformers' save_pretrained or safetensors' convert"
            )
        raise ConfigError(f"{folder} holds neither {SINGLE} nor {INDEX}; give the folder of a whole model")
    try:
        names = json.loads(index.read_text("utf-8"))["weight_map"]
        entries = [(str(name), Path(file)) for name, file in names.items()]
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is no index of tensors ({error!r}); fetch or save it again") from None
    found: dict[Path, set[str] | None] = {}
    for name, file in entries:
        if file.name != str(file) or file.suffix != ".safetensors":
            raise ConfigError(f"{index} puts {name} into {str(file)!r}, which is no safetensors file of its folder")
        if not (folder / file).is_file():
            raise ConfigError(f"{index} names {file}, which is not there; fetch or save the whole model again")
        held = found.setdefault(folder / file, set())
        assert held is not None
        held.add(name)
    return found


def write_tensors(folder: Path, sizes: dict[str, int], tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes tensors into a folder, a file at a time.

    Args:
      folder: must be there, and empty.
      sizes: bytes of every tensor, in the order in which they come.
      tensors: names and values; no more than one file's are held.
    """
    import_safetensors()
    from safetensors.numpy import save_file

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
        try:
            save_file(held, folder / file, metadata={"format": "pt"})  # transformers asks for it
        except import_safetensors().SafetensorError as error:
            raise OSError(str(error)) from error
        del held, value


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A new folder to fill, which gets its name once it is whole; what fails leaves nothing.

    Raises:
      ConfigError: there is something of that name, or it cannot be made.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder} exists, and nothing is overwritten; name another folder")
    beside = folder.absolute().parent / f".{folder.absolute().name}.{os.getpid()}"
    try:
        beside.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error}; name another folder") from None
    try:
        yield beside
        os.replace(beside, folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}; make room, or name another folder") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
