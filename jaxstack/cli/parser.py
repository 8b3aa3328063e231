"""The command line `jaxstack COMMAND ...`: which commands exist, their help, and how they end.

A command is a module with two functions: `add_arguments(parser)` declares the arguments, and `main(args)` runs with
their values. Only the module of the command in use is imported, and neither it nor its help imports JAX.
"""

import difflib
import functools
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jaxstack
from jaxstack.common.errors import ConfigError, Exit, RunError, exit_code, in_lines, is_out_of_memory, one_line
from jaxstack.runtime import preemption

if TYPE_CHECKING:
    from jsonargparse import Namespace

    from jaxstack.config.reading.parse import Parser


class Command(NamedTuple):
    """A command of `jaxstack`.

    Attributes:
      group: heading in `jaxstack --help`.
      module: module in `jaxstack.cli` that declares and runs it.
      summary: what it does, in one line.
    """

    group: str
    module: str
    summary: str


COMMANDS = {
    "train": Command("Train", "train", "train a model, or resume a run"),
    "supervise": Command("Train", "supervise", "restart a run when it fails"),
    "launch": Command("Train", "launch", "write and submit the file that starts a run on a cluster"),
    "report": Command("Train", "report", "summarize runs in a table and a page with curves"),
    "debug": Command("Train", "debug", "find the operation that made a step not finite"),
    "generate": Command("Use a model", "generate", "continue prompts with the model of a run"),
    "eval": Command(
        "Use a model",
        "evaluate",
        "score a model by tasks of lm-eval, bits per byte of texts, or rewards of its answers",
    ),
    "chat": Command("Use a model", "chat", "talk with the model of a run"),
    "serve": Command("Use a model", "serve", "serve the model of a run over HTTP, with OpenAI's protocol"),
    "import": Command("Use a model", "import_model", "make a run from a Hugging Face folder"),
    "export": Command("Use a model", "export_model", "write a run as a Hugging Face folder, or as a program"),
    "compress quantize": Command("Use a model", "compress_quantize", "make a run with weights of few bits"),
    "compress prune": Command("Use a model", "compress_prune", "make a run with fewer layers, heads, units or weights"),
    "compress order": Command("Use a model", "compress_order", "measure which layers and experts are needed most"),
    "data tokenizer": Command("Data", "data_tokenizer", "make a tokenizer for your own text"),
    "data clean": Command("Data", "data_clean", "drop duplicates and poor text, and report each reason"),
    "data build": Command("Data", "data_build", "make a token file from text"),
    "data verify": Command("Data", "data_verify", "check a token file against its hashes"),
    "data show": Command("Data", "data_show", "print what a token file contains"),
    "plan": Command("Plan", "plan", "predict memory and communication on chips that you do not have"),
    "plan memory": Command("Plan", "plan_memory", "split the memory of a device by part and by recomputation policy"),
    "plan flops": Command("Plan", "plan_flops", "count the FLOPs of a step by every convention"),
    "plan time": Command("Plan", "plan_time", "predict the time of a step, MFU, and days for a token budget"),
    "plan mesh": Command("Plan", "plan_mesh", "find the fastest mesh that fits on a target"),
    "plan serve": Command("Plan", "plan_serve", "predict memory, latency, throughput and cost of serving a decoder"),
    "plan bytes": Command("Plan", "plan_bytes", "count the bytes that each part of a step moves on a GPU"),
    "plan roofline": Command("Plan", "roofline", "compute the least time of each part of a step on a chip"),
    "plan run": Command("Plan", "plan_run", "find model, batch, mesh, time and cost for a budget"),
    "plan experts": Command("Plan", "plan_experts", "place experts on devices by their measured load"),
    "plan fit": Command("Plan", "plan_fit", "fit a scaling law to runs, and find the best size for a budget"),
    "profile": Command("Plan", "profile", "measure the cost of a pipeline's layers"),
    "schedule": Command("Plan", "schedule", "draw a pipeline schedule as a Gantt chart"),
    "completion": Command("Shell", "completion", "print a script that completes commands, flags and keys"),
}
"""Every command by its name, in the order of `jaxstack --help`."""
WITHOUT_XLA = {"supervise", "launch", "report", "data", "schedule", "completion"}
"""Commands, or their first words, that compile nothing."""


def run(program: str, words: Sequence[str]) -> None:
    """Executes a command line and exits with a code of `Exit` if that fails, after one or two lines on stderr.

    If this is one of several processes, the others are told code and reason, and end with the same code.

    Args:
      program: what the user called, `jaxstack` or `train.py`. Error lines begin with it and the command's name.
    """
    try:
        _run(program, words)
    except Exception as error:  # a fault of the program, with a traceback
        if "jax" in sys.modules:
            from jaxstack.runtime import distributed

            if distributed.has_others():
                traceback.print_exc()
                distributed.leave(1, f"{type(error).__name__}: {error}")
        raise


def _run(program: str, words: Sequence[str]) -> None:
    name = _command_of(words)
    program = f"{program} {name}" if name and program == "jaxstack" else program
    advice = " Run the same command to start or resume the run." * (name == "train")
    interrupted = f"{program}: interrupted.{advice}"
    try:
        with preemption.exit_at_interrupt(interrupted):
            execute(words, program)
            sys.stdout.flush()  # if nobody reads what is left, Python would complain at its end
    except BrokenPipeError:  # the reader of the output has enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (ConfigError, RunError, OSError, MemoryError, RuntimeError) as error:
        code, text = ending(error, words)
        lines = in_lines(f"{program}: {text}", getattr(error, "advice", ""))
        print("\n".join(lines), file=sys.stderr, flush=True)
        if "jax" in sys.modules:
            from jaxstack.runtime import distributed

            distributed.leave(code, text)
        if isinstance(error, RunError) and code == Exit.NOT_SAVED:
            sys.stdout.flush()
            os._exit(code)  # the threads of a save that failed may wait for each other for ever
        sys.exit(code)
    except (TypeError, ValueError, IndexError) as error:
        if not (lines := explain_shapes(error)):
            raise
        print("\n".join(map(one_line, (f"{program}: error: {lines[0]}", *lines[1:]))), file=sys.stderr, flush=True)
        sys.exit(Exit.USER_ERROR)
    except KeyboardInterrupt:  # from code that handles the signal itself
        print(interrupted, file=sys.stderr)
        sys.exit(Exit.INTERRUPTED)


def explain_shapes(error: Exception) -> list[str]:
    """Returns the lines for an error about shapes in a model's code; none for others, and if all frames are wanted."""
    if "jax" not in sys.modules or os.environ.get("JAX_TRACEBACK_FILTERING"):
        return []
    from jaxstack.models import shape_errors  # here: it imports JAX

    return shape_errors.explain(error)


def ending(error: Exception, words: Sequence[str]) -> tuple[int, str]:
    """Returns the exit code of an error, and its line for the user.

    Args:
      words: the command line, in which a file that cannot be used may be named.

    Raises:
      Exception: the error itself, if none of the user, the run, a disk, a path and the memory is the cause.
    """
    code = exit_code(error)
    if isinstance(error, ConfigError):
        return code, f"error: {error}"
    if isinstance(error, RunError):
        return code, str(error)
    if isinstance(error, RecursionError):
        return code, "error: a file or an argument is nested too deeply. Check that it is the right one."
    if is_out_of_memory(error):
        reason = next(iter(str(error).splitlines()), "the machine has none left.")
        return code, f"error: out of memory: {reason} Use a smaller model or batch, or more devices."
    if code == 1 or not isinstance(error, OSError):
        raise error
    file = str(error.filename or "")
    if code == Exit.NOT_SAVED:
        where = f": {file}" if file else ""
        return code, f"error: {error.strerror}{where}. Make room or repair the disk, and try again."
    values = {word: word.rpartition("=")[2] for word in words}
    named = (word for word, value in values.items() if value and value in file)
    return code, f"error: {next(named, file)} cannot be used: {error.strerror}: {file}. Check the path."


def execute(words: Sequence[str], program: str | None = None) -> None:
    """Executes a command line: `["plan", "--target=v5e:4x4"]`.

    Args:
      program: name to show in usage and errors. None means `jaxstack` and the name of the command.

    Raises:
      ConfigError: the command or an argument is unknown or wrong.
    """
    if words[:1] == ["--version"]:
        print(f"jaxstack {jaxstack.__version__}")
        return
    if words[:1] == ["help"]:
        execute(help_words(words[1:]))
        return
    name = _command_of(words)
    if name is None:
        print(overview(words))
        return
    module = importlib.import_module(f"jaxstack.cli.{COMMANDS[name].module}")
    args = parser_of(name, program).read(_arguments_of(name, words))
    if name.split()[0] not in WITHOUT_XLA:
        from jaxstack.runtime import platform  # here: help need not wait for it

        platform.check_xla_flags()
    module.main(args)


def read_arguments(words: Sequence[str]) -> "Namespace":
    """Returns the values of a command line without running its command.

    Raises:
      ConfigError: the command or an argument is unknown or wrong.
    """
    name = _command_of(words)
    if name is None:
        raise ConfigError(f"{' '.join(words)} is not a command. {_HELP}")
    return parser_of(name).read(_arguments_of(name, words))


@functools.cache  # reading the docstring of every key takes half a second
def parser_of(name: str, program: str | None = None) -> "Parser":
    """Returns the parser of a command's arguments.

    Args:
      program: name to show in usage and errors. None means `jaxstack` and the name of the command.
    """
    from jaxstack.config.reading.parse import (
        Parser,  # here: it takes a tenth of a second, for which the overview must not wait
    )

    module = importlib.import_module(f"jaxstack.cli.{COMMANDS[name].module}")
    parser = Parser(prog=program or f"jaxstack {name}", description=module.__doc__)
    module.add_arguments(parser)
    return parser


def _command_of(words: Sequence[str]) -> str | None:
    """Returns the longest name of a command with which the words begin, or None."""
    names = (" ".join(words[:count]) for count in (2, 1))
    return next((name for name in names if name in COMMANDS), None)


def _arguments_of(name: str, words: Sequence[str]) -> list[str]:
    """Returns the words after the name of a command.

    Raises:
      ConfigError: the first of these words is nearly the second word of another command, such as `plan memroy`.
    """
    rest = list(words[len(name.split()) :])
    seconds = [other.removeprefix(f"{name} ") for other in COMMANDS if other.startswith(f"{name} ")]
    if rest and (close := difflib.get_close_matches(rest[0], seconds, n=1)):
        raise ConfigError(f"unknown command {name} {rest[0]}. Did you mean {name} {close[0]}?")
    return rest


_HELP = "`jaxstack --help` lists all commands."
_OTHER_NAMES = {
    "score": "eval", "test": "eval", "sample": "generate", "infer": "generate", "finetune": "train", "fit": "train",
    "sft": "train", "prepare": "data build", "tokenize": "data build", "convert": "import or export",
    "quantize": "compress quantize", "prune": "compress prune",
}  # fmt: skip
"""Commands by the names that other programs have for them."""


def help_words(words: Sequence[str]) -> list[str]:
    """Returns the command line that `jaxstack help ...` stands for.

    Args:
      words: a command, or else a group of keys or a key; flags after it give the values to show.
    """
    if words and words[0].startswith("-"):
        return []
    if not words or _command_of(words) or any(name.startswith(f"{words[0]} ") for name in COMMANDS):
        return [*words, "--help"]
    return ["train", f"--help.{words[0]}", *words[1:]]


def overview(words: Sequence[str]) -> str:
    """Returns the help of `jaxstack`, or of the commands that share a first word, such as `data`.

    Raises:
      ConfigError: the words are not the name of a command or of such a family.
    """
    words = [word for word in words if word not in ("-h", "--help")]
    if words and words[0].startswith("-"):
        command = next((word for word in words if word in COMMANDS), "train")
        raise ConfigError(
            f"{words[0]} comes before the command. Write the command first: `jaxstack {command} {words[0]}`."
        )
    if words and not any(name.startswith(f"{words[0]} ") for name in COMMANDS):
        close = [_OTHER_NAMES[words[0]]] if words[0] in _OTHER_NAMES else []
        close = close or difflib.get_close_matches(words[0], [*COMMANDS, "help"], n=1)
        raise ConfigError(f"unknown command {words[0]}. " + (f"Did you mean {close[0]}?" if close else _HELP))
    family = {name: command for name, command in COMMANDS.items() if not words or name.startswith(f"{words[0]} ")}
    if words[1:]:
        raise ConfigError(f"unknown command {' '.join(words[:2])}. Use one of {', '.join(family)}.")
    width = max(map(len, family))
    lines = [f"usage: jaxstack {words[0] if words else ''} COMMAND ...".replace("  ", " ")]
    for group in dict.fromkeys(command.group for command in family.values()):
        rows = [f"  {name:<{width}}  {c.summary}" for name, c in family.items() if c.group == group]
        lines += ["", f"{group}:", *rows]
    lines += [
        "",
        "`jaxstack help COMMAND` lists a command's arguments; `jaxstack help model` and `jaxstack help optim.lr`",
    ]
    lines += ["explain a group of keys and a key of the configuration."]
    if words:
        from jaxstack.config.reading.parse import GROUPS  # here: it takes a tenth of a second

        if words[0] in GROUPS:
            lines.append(f"`jaxstack train --help.{words[0]}` explains the group of keys {words[0]}.")
    return "\n".join(lines)


def main() -> None:
    """Runs the command line of this process."""
    run("jaxstack", sys.argv[1:])
