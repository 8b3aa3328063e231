"""Reads files that others wrote, within limits of size, depth and digits that no intended file exceeds.

Such a file may be damaged, or made to do harm: a pipe that never ends, a small archive that expands to gigabytes, a
number of thousands of digits. Every function here raises `OSError` or `ValueError` with the reason in a few words. The
caller catches both, names the key, and says what to do.
"""

import json
import math
import os
import stat
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from jaxstack.common import host_memory
from jaxstack.common.counts import plural

Json: TypeAlias = Any
"""A value of JSON, before anybody has checked its form."""

MOST_BYTES = 256 << 20
"""Largest file that is read at once. The largest tokenizer.json of a known model has 35 MB."""

MOST_DEPTH = 100
"""Deepest nesting of JSON and YAML. Python's own functions fail at about 1,000."""

MOST_DIGITS = 100
"""Longest integer, in digits. Some tokenizers write 10**30 for no limit; a float ends at 10**308."""

_EXPANSION = 100
_EXPANDED_BYTES = 64 << 20
"""An archive may expand to this many bytes, or to `_EXPANSION` times its size. Pictures shrink to a tenth at best."""


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Returns the content of a regular file.

    Args:
      path: path of the file. It is opened without waiting, so a pipe without a writer cannot stop the process.
      most: largest number of bytes.

    Raises:
      OSError, ValueError: the file cannot be opened, is not a regular file, or is too large.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {plural(most, 'byte', spec=',')}")
    return content


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """Returns the text of a regular file in UTF-8. Raises what `read_bytes` raises."""
    return decode(read_bytes(path, most))


def decode(content: bytes) -> str:
    """Returns UTF-8 as text, without a byte order mark.

    Raises:
      ValueError: the bytes are not UTF-8; the message has the place and not the content.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text (byte {error.start:,})") from None


def read_json(path: Path, most: int = MOST_BYTES) -> Json:
    """Returns the value of a JSON file. Raises what `read_bytes` and `parse_json` raise."""
    return parse_json(read_bytes(path, most))


def parse_json(content: str | bytes, unique_keys: bool = False) -> Json:
    """Returns the value of JSON.

    Args:
      unique_keys: whether an object that has a key twice is an error. Otherwise the last value counts.

    Raises:
      ValueError: the content is not JSON, has a key twice, is nested more than `MOST_DEPTH` levels deep, or has an
        integer of more than `MOST_DIGITS` digits.
    """
    text = decode(content) if isinstance(content, bytes) else content
    try:
        pairs_hook = _unique_keys if unique_keys else None
        value = json.loads(text, parse_int=parse_integer, object_pairs_hook=pairs_hook)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if _is_deeper(value, MOST_DEPTH):
        raise ValueError(_TOO_DEEP)
    return value


def _unique_keys(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """Returns the object that has these keys and values, each key once."""
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"it has the key {max(keys, key=keys.count)!r} twice")
    return content


_TOO_DEEP = f"it is nested more than {MOST_DEPTH} levels deep"


def parse_integer(digits: str) -> int:
    """Returns an integer in decimal digits.

    Raises:
      ValueError: the text is not an integer, or has more than `MOST_DIGITS` digits.
    """
    if len(digits) > MOST_DIGITS:
        raise ValueError(
            f"the integer {digits[:12]}... has {plural(len(digits), 'digit', spec=',')}, and {MOST_DIGITS} are allowed"
        )
    return int(digits)


def _is_deeper(value: object, levels: int) -> bool:
    """Returns whether lists and mappings are nested deeper than a number of levels."""
    layer = [value] if isinstance(value, dict | list) else []
    for _ in range(levels):
        layer = [
            child
            for parent in layer
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not layer:
            return False
    return True


def _check_array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> None:
    """Refuses an array that declares more bytes than it has, for which NumPy would make room before it reads."""
    with archive.open(info) as file:
        version = np.lib.format.read_magic(file)
        older = version == (1, 0)
        read = np.lib.format.read_array_header_1_0 if older else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    if math.prod(shape) * dtype.itemsize > info.file_size:
        raise ValueError(
            f"{info.filename} declares the shape {shape}, but has {plural(info.file_size, 'byte', spec=',')}"
        )


def check_npy_header(path: Path) -> None:
    """Checks that an .npy file is not shorter than its header says: NumPy makes room for the header before it reads it.

    Raises:
      OSError, ValueError: the file cannot be opened, or is shorter.
    """
    with path.open("rb") as file:
        begin = file.read(12)
    length = int.from_bytes(begin[8:12], "little")  # since version 2 of the format; version 1 has two bytes
    if begin[6:7] >= b"\x02" and 12 + length > path.stat().st_size:
        raise ValueError("it is shorter than its header")


def read_npz(path: Path, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """Returns arrays of an .npz file by name, each of the shape [...] in its header, never unpickled.

    Args:
      names: arrays to read. `None` means all.

    Raises:
      OSError, ValueError: the file is not a complete .npz file, lacks an array, expands more than a hundredfold to more
        than 64 MB, or does not fit into memory.
    """
    if not path.is_file():
        raise ValueError("it is not a regular file")
    try:
        with zipfile.ZipFile(path) as archive:
            infos = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            members = {name: info.file_size for name, info in infos.items()}
            for name in members if names is None else members.keys() & {*names}:
                _check_array(archive, infos[name])
        wanted = [*members] if names is None else [*names]
        if absent := [name for name in wanted if name not in members]:
            raise ValueError(f"it has no array {absent[0]}")
        expanded = sum(members[name] for name in wanted)
        packed = path.stat().st_size
        if expanded > max(_EXPANDED_BYTES, _EXPANSION * packed):
            raise ValueError(f"its {plural(packed, 'byte', spec=',')} expand to {expanded:,}")
        host_memory.require(expanded)
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in wanted}
    except MemoryError:  # NumPy makes room for the shape that an array declares before it reads the array
        raise ValueError("it declares an array that does not fit into memory") from None
    except (OSError, ValueError):
        raise
    except Exception as error:  # NumPy parses the headers of arrays as Python, which fails in any way
        raise ValueError(" ".join(str(error).split())[:200] or type(error).__name__) from None
    if strange := [name for name, value in arrays.items() if not isinstance(value, np.ndarray)]:
        raise ValueError(f"{strange[0]} is not an array")
    return arrays
