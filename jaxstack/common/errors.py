"""The exit codes of a run, and the two errors that end one with a message for the user. See docs/reliability.md."""

import errno
import re
import sys
from enum import IntEnum
from pathlib import Path


class Exit(IntEnum):
    """Exit codes, which scripts and `jaxstack supervise` act on. 0 means that the run is complete."""

    USER_ERROR = 2
    """The configuration, the data or a model's code is wrong. Starting the run again would not help."""
    NOT_JOINED = 3
    """Some processes did not join the run in time."""
    DIVERGED = 4
    """Too many steps in a row had a spike, or a loss or gradient that is not finite. Check the model and the data."""
    NOT_SAVED = 5
    """A file could not be written. Checkpoints that were committed before are intact."""
    PEER_LOST = 6
    """Another process of the run died, stopped responding or ended with an error."""
    STALLED = 7
    """No step finished within `train.stalled_s` seconds."""
    STOPPED = 75
    """SIGTERM or SIGINT stopped the run after a saved step. The same command resumes it (TEMPFAIL of sysexits.h)."""
    INTERRUPTED = 130
    """A second SIGINT ended the run at once. Committed checkpoints are intact."""


class ConfigError(ValueError):
    """A mistake of the user: a sentence that says what is wrong, and one that says what to do.

    The commands show each sentence on a line of its own, see `in_lines`, and end with the exit code `USER_ERROR`.

    Attributes:
      advice: the second line, which says what to do. "" means that the message says it.
    """

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(message)
        self.advice = advice


class RunError(Exception):
    """A run that cannot continue: a message for the user as in `ConfigError`, and an exit code."""

    def __init__(self, code: Exit, message: str) -> None:
        super().__init__(message)
        self.code = code


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error means that a device or the host has no memory left.

    JAX, which need not be imported, reports it as RESOURCE_EXHAUSTED, or as an internal error whose text says "out of
    memory". Other resources do not count: scratch memory on the chip, which a kernel's tiles exceed, and the size of a
    message between processes.
    """
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower().replace("_", " ")
    return (
        type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
        and ("resource exhausted" in text or "out of memory" in text)
        and not any(word in text for word in ("vmem", "smem", "shared memory", "message larger"))
    )


DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}
"""Errors of the operating system that mean that a disk is full or broken."""

PATHS = {
    errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR,
    errno.ENOTEMPTY, errno.ENXIO, errno.EPERM,
}  # fmt: skip
"""Errors of the operating system that mean that a path is wrong, if they name one."""


def exit_code(error: BaseException) -> int:
    """Returns the exit code of a command that ends with an error; 1 if the error is a fault of the program."""
    if isinstance(error, RunError):
        return error.code
    if isinstance(error, ConfigError | RecursionError) or is_out_of_memory(error):
        return Exit.USER_ERROR
    if isinstance(error, OSError) and error.errno in DISK:
        return Exit.NOT_SAVED
    if isinstance(error, OSError) and error.errno in PATHS and error.filename:
        return Exit.USER_ERROR
    return 1


def program() -> str:
    """Returns the name of the command, `train.py` or `jaxstack train`, with which error lines begin."""
    name = Path(sys.argv[0]).name
    return f"jaxstack {sys.argv[1]}" if name in ("jaxstack", "__main__.py") and sys.argv[1:] else name


def shortened(text: str, most: int = 200) -> str:
    """Returns a text for a message, without its middle if it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[: most * 3 // 4]}...{text[-most // 4 :]}"


def quoted(value: object) -> str:
    """Returns a value that was read from a file as a message shows it: as Python writes it, at most 200 characters."""
    return shortened(repr(value))


_END = re.compile(r"(?<=[^\s.])[.?] (?=[A-Z`])")
"""The end of a message's first sentence."""


def in_lines(message: str, advice: str = "") -> list[str]:
    """Returns a message for users as one or two lines: what is wrong, and what to do.

    Without `advice`, which has the second line, the message's first sentence is the first line.
    """
    end = _END.search(message)
    if not advice and end is not None:
        advice = message[end.end() :]
        message = message[: end.start() + 1]
    return [one_line(part) for part in (message, advice) if part]


def one_line(text: str) -> str:
    """Returns a message for users as one line: without control characters, and with very long words cut."""
    shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    return re.sub(r"(\S{150})\S{100,}(\S{50})", r"\1...\2", shown)
