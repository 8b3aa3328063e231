"""`jaxstack COMMAND ...`: every command of the package. Only the one that is asked for is imported."""

import ast
import difflib
import importlib
import sys
from pathlib import Path

import jaxstack

COMMANDS = {
    "train": ("train.py", "train a model; --help lists every key of a configuration"),
    "generate": ("cli/generate.py", "continue prompts with the model of a run"),
    "report": ("cli/report.py", "sum up runs: a table here, and a page with curves"),
    "import": ("cli/import_export.py", "make a run of a Hugging Face folder"),
    "export": ("cli/import_export.py", "write a run's parameters as a Hugging Face folder"),
    "data": ("cli/data.py", "make and check token files"),
    "plan": ("cli/roofline.py", "compile for chips that are not here: does it fit, what does it move; or `roofline`"),
    "profile": ("cli/profile.py", "measure what the layers of a pipeline cost"),
    "schedule": ("cli/schedule.py", "draw a pipeline's schedule as a Gantt chart"),
    "supervise": ("cli/supervise.py", "start a run again when it dies"),
}
"""Where each command lives, and what it is for."""

_BY_DOCSTRING = ("import", "export", "plan", "profile")  # their rooms import JAX, for which help must not wait


def main() -> None:
    """Runs the command that the first word names on the words after it."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        return print(usage())
    if words[0] == "--version":
        return print(f"jaxstack {jaxstack.__version__}")
    from jaxstack.config import parse

    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        parse.run("jaxstack", unknown, words)
    elif name in _BY_DOCSTRING and {"-h", "--help"} & set(rest):
        print(ast.get_docstring(ast.parse((Path(__file__).parent / COMMANDS[name][0]).read_text())))
    else:
        module = COMMANDS[name][0].removesuffix(".py").replace("/", ".")
        command = importlib.import_module(f"jaxstack.{module}").main
        parse.run(f"jaxstack {name}", command, [name, *rest] if name in ("import", "export") else rest)


def usage() -> str:
    rows = [f"  {name:<{max(map(len, COMMANDS))}}  {purpose}" for name, (_, purpose) in COMMANDS.items()]
    return "\n".join(["usage: jaxstack COMMAND ...", "", *rows, "", "`jaxstack COMMAND --help` says more."])


def unknown(words: list[str]) -> None:
    from jaxstack.config import ConfigError

    close = difflib.get_close_matches(words[0], COMMANDS, n=1)
    raise ConfigError(f"unknown command {words[0]}; " + (f"did you mean {close[0]}?" if close else
                      f"there are {', '.join(COMMANDS)}"))  # fmt: skip


if __name__ == "__main__":
    main()
