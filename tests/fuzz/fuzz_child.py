"""The process in which readers run: it reads tries from stdin, and answers each with a JSON line on stdout.

Every try has limits of memory and of CPU time. The limit of time has no handler, so it ends the process, whatever the
process does at that moment; before, the process writes to stderr where it was.
"""

import contextlib
import faulthandler
import json
import os
import resource
import signal
import sys
import traceback
import warnings
from pathlib import Path

MEMORY = 512 << 20
"""Address space that a try may take beside what the process has."""

SECONDS = 5
"""CPU time that a try may take. Most take a few milliseconds."""

LONGEST = 1000
"""Characters of an error message that a user would still read."""


def attempt(name: str, content: bytes, folder: Path) -> dict[str, str]:
    """Returns the outcome of a try: `value`, `refused` with the message, or `failed` with what went wrong."""
    import fuzz_readers

    from jaxstack.common.errors import one_line

    fuzz_readers.clear(folder)
    allowed = fuzz_readers.ERRORS[name]
    with open("/proc/self/statm", encoding="ascii") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        fuzz_readers.READERS[name](content, folder)
        return {"outcome": "value"}
    except allowed as error:
        message = one_line(str(error))
        if not message or len(message) > LONGEST:
            return {"outcome": "failed", "why": f"the message has {len(message)} characters: {message[:300]}"}
        if any(isinstance(cause, MemoryError) for cause in chain(error)):
            return {"outcome": "failed", "why": "".join(traceback.format_exception(error))}
        return {"outcome": "refused", "message": message}
    except BaseException as error:
        return {"outcome": "failed", "why": "".join(traceback.format_exception(error))[-4000:]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def chain(error: BaseException | None) -> list[BaseException]:
    """Returns an error with those that led to it."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a reader prints
    warnings.simplefilter("error")  # as in the tests: a warning of a library is noise for a user
    for kind in (DeprecationWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    import fuzz_readers  # noqa: F401  # takes seconds, which belong to no try

    faulthandler.enable()
    faulthandler.register(signal.SIGPROF, all_threads=False, chain=True)
    while line := sys.stdin.buffer.readline():
        name, length, folder = json.loads(line)
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(attempt(name, sys.stdin.buffer.read(length), Path(folder))), file=answers, flush=True)


if __name__ == "__main__":
    main()
