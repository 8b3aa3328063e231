"""How a run ends before its last step: the exit codes, and the error that carries one. See docs/reliability.md."""

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes; scripts and `jaxstack.cli.supervise` go by them. 0: done."""

    USER_ERROR = 2
    """The configuration or the data; starting again would change nothing."""
    NOT_JOINED = 3
    """The processes did not all come together."""
    DIVERGED = 4
    """Losses or gradients that are not finite, or spikes, in a row: the model or the data need a look."""
    NOT_SAVED = 5
    """Something could not be written; what was committed before stands."""
    PEER_LOST = 6
    """Another process of the run died, stopped or ended with an error."""
    STALLED = 7
    """No step finished for too long."""
    STOPPED = 75
    """SIGTERM or SIGINT: the step was finished, the state saved, and the same command goes on (sysexits' TEMPFAIL)."""
    INTERRUPTED = 130
    """A second SIGINT: left at once."""


program = "train.py"
"""What the user called, with which error lines begin; `cli.run` sets it."""


class RunError(Exception):
    """The run cannot go on: one line for people, and an exit code."""

    def __init__(self, code: Exit, message: str) -> None:
        super().__init__(message)
        self.code = code
