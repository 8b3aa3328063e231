"""`jaxstack COMMAND ...`: every command of the package. Only the one that is asked for is imported."""

import ast
import difflib
import importlib
import sys
from pathlib import Path

import jaxstack

COMMANDS = {
    "train": ("train.py", "train a model; --help lists every key of a configuration"),
    "generate": ("generate/__main__.py", "continue prompts with the model of a run"),
    "report": ("report/__main__.py", "sum up runs: a table here, and a page with curves"),
    "import": ("hf/__main__.py", "make a run of a Hugging Face folder"),
    "export": ("hf/__main__.py", "write a run's parameters as a Hugging Face folder"),
    "data": ("data/__main__.py", "make and check token files"),
    "plan": ("plan/__main__.py", "compile for chips that are not here: does it fit, what does it move; or `roofline`"),
    "profile": ("profile/__main__.py", "measure what the layers of a pipeline cost"),
    "supervise": ("supervise.py", "start a run again when it dies"),
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
    from jaxstack import cli

    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        cli.run("jaxstack", unknown, words)
    elif name in _BY_DOCSTRING and {"-h", "--help"} & set(rest):
        print(ast.get_docstring(ast.parse((Path(__file__).parent / COMMANDS[name][0]).read_text())))
    else:
        module = COMMANDS[name][0].removesuffix(".py").replace("/", ".")
        command = importlib.import_module(f"jaxstack.{module}").main
        cli.run(f"jaxstack {name}", command, [name, *rest] if name in ("import", "export") else rest)


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
