"""The command `jaxstack` and `python -m jaxstack`; see `jaxstack.cli.parser`."""

import signal
import sys
from collections.abc import Sequence


def main(program: str = "jaxstack", words: Sequence[str] | None = None) -> None:
    """Runs a command line, by default the one of this process.

    Args:
      program: what the user called, `jaxstack` or `train.py`.
      words: name of the command and its arguments. None means the arguments of this process.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would print a traceback during the imports

    from jaxstack.cli import parser

    parser.run(program, sys.argv[1:] if words is None else words)


if __name__ == "__main__":
    main()
