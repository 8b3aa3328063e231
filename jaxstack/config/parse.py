"""From YAML files and dotted flags to a checked `Config`; any mistake becomes one line and exit code 2.

The parser is jsonargparse: types, help and defaults come from the dataclasses of `jaxstack/config.py`. JAX is not
imported here.
"""

import argparse
import dataclasses
import difflib
import errno
import functools
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, DefaultHelpFormatter, Namespace, set_parsing_settings

from jaxstack.common import errors
from jaxstack.common.errors import Exit, RunError
from jaxstack.config import Config, ConfigError, flat

set_parsing_settings(docstring_parse_attribute_docstrings=True)


class HelpFormatter(DefaultHelpFormatter):
    """Help that shows types as users write them: `int >= 1 or null`, without the syntax of Python's annotations."""

    def _expand_help(self, action: argparse.Action) -> str:
        return _plain_types(super()._expand_help(action))


def _plain_types(text: str) -> str:
    """Returns the text with Python's type annotations in plain words."""
    text = re.sub(r"Annotated\[(int|float), ([^\[\]]+|in [\[(][^\])]*[\])])\]", r"\1 \2", text)
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text).replace("typing.", "")
    return re.sub(r"Optional\[(.+?[\])]?)\](?=,|$)", r"\1 or null", text).replace(" | null", " or null")


class Parser(ArgumentParser):
    """jsonargparse's parser without abbreviations (a mistyped key must never match another), raising `ConfigError`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs |= {"allow_abbrev": False, "exit_on_error": False, "formatter_class": HelpFormatter}
        super().__init__(*args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        # Nested failures come as an indented tree; the user needs its text, not its shape.
        text = " ".join(line.strip(" -") for line in message.splitlines() if line.strip())
        for pattern in _UNKNOWN_KEY:
            if found := re.search(pattern, text):
                key = ".".join(found.groups())
                close = difflib.get_close_matches(key, {action.dest for action in self._actions}, n=1)
                raise ConfigError(f"unknown key {key}; " + (f"did you mean {close[0]}?" if close else self._help))
        text = _plain_types(text).replace("Parser key ", "")
        number = re.search(r"Expected a str\. Got value: [\d.]+$", text)
        quotes = "put it in quotes, since YAML takes what it can for a number, and 10:15 for minutes and seconds"
        raise ConfigError(f"{text}; {quotes if number else self._help}")

    @property
    def _help(self) -> str:
        return f"`{'python ' * self.prog.endswith('.py')}{self.prog} --help` lists every key and its type"


def run(program: str, main: Callable[[list[str]], None], argv: list[str] | None = None) -> None:
    """Runs a command on its words (none: those of the process); what stops it is one line and an exit code of `Exit`.

    Args:
      program: what the user called; the line begins with it.
    """
    errors.program = program
    try:
        main(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        sys.exit(Exit.USER_ERROR)
    except RunError as error:
        print(f"{program}: {error}", file=sys.stderr, flush=True)
        if error.code is Exit.NOT_SAVED:  # the threads of a save that failed may wait for each other for ever
            sys.stdout.flush()
            os._exit(error.code)
        sys.exit(error.code)
    except OSError as error:
        if error.errno not in _DISK:
            raise
        where = f": {error.filename}" if error.filename else ""
        print(f"{program}: error: {error.strerror}{where}; make room or mend the disk, and the same command goes on",
              file=sys.stderr)  # fmt: skip
        sys.exit(Exit.NOT_SAVED)
    except KeyboardInterrupt:
        print(f"{program}: interrupted; the same command goes on from the newest checkpoint", file=sys.stderr)
        sys.exit(Exit.INTERRUPTED)


_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}


def take(argv: Sequence[str], flag: str) -> tuple[str | None, list[str]]:
    """The value of a flag that is no part of the configuration, or None, and the other words."""
    words = list(argv)
    for i, word in enumerate(words):
        if word == flag and words[i + 1 :]:
            return words[i + 1], words[:i] + words[i + 2 :]
        if word.startswith(f"{flag}="):
            return word.removeprefix(f"{flag}="), words[:i] + words[i + 1 :]
    return None, words


_UNKNOWN_KEY = (  # the parser's words for a key it does not have: on the command line, and in a file
    r"unrecognized arguments: (?:--)?([\w.]+)",
    r"Group '([\w.]+)' does not accept option '(\w+)'",
    r"Option '([\w.]+)' is not accepted",
)


def shipped() -> dict[str, Path]:
    """Returns the files of the configurations that come with jaxstack, by name: runnable jobs, then published models.

    An installed package contains them; in a checkout they are beside the package.
    """
    inside, beside = (folder / "configs" for folder in Path(__file__).parents[1:3])
    folder = inside if inside.is_dir() else beside
    return {path.stem: path for pattern in ("*.yaml", "models/*.yaml") for path in sorted(folder.glob(pattern))}


def config_file(name: str) -> Path:
    """The file that `--config=NAME` means: a path, or the name of a shipped one.

    Raises:
      ConfigError: there is neither.
    """
    if (path := Path(name)).is_file():
        return path
    known = shipped()
    if name not in known:
        raise ConfigError(f"--config={name} is not a file. Name a YAML file, or one of {', '.join(known)}.")
    return known[name]


def parse_config(argv: Sequence[str], default_config: str | Path = "quickstart") -> Config:
    """The configuration that a command line means, see `parse`."""
    return parse(argv, default_config)[0]


def parse(argv: Sequence[str], default_config: str | Path = "quickstart") -> tuple[Config, bool]:
    """Parses the command line of `train.py`, which is that of `jaxstack train`.

    It has `--config FILE`, where FILE may be the name of a shipped one, and dotted flags, which override it wherever
    they stand.

    Args:
      argv: the words after the program's name.
      default_config: what is read when `argv` names none.

    Returns:
      The configuration, and whether it is only to be shown how it lies on the mesh (`--print_shardings`).

    Raises:
      ConfigError: an unknown key, a wrong type, an impossible value or a missing file.
    """
    program = errors.program if errors.program in ("train.py", "jaxstack train") else "jaxstack train"
    parser = _parser(program, str(default_config))
    named: list[str] = []
    flags: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--config" and words:
            named.append(words.pop(0))
        elif word.startswith("--config="):
            named.append(word.removeprefix("--config="))
        else:
            flags.append(word)
    files = [config_file(name) for name in named or [str(default_config)]]
    for path in files:
        _check_keys(path)
    values = parser.parse_args([*(f"--config={path}" for path in files), *flags])
    for f in dataclasses.fields(Config):
        if not isinstance(values[f.name], Namespace):
            raise ConfigError(f"{f.name}={values[f.name]} must be a group of keys, such as {f.name}: {{...}} in YAML")
    groups = parser.instantiate(values)
    config = Config(**{f.name: groups[f.name] for f in dataclasses.fields(Config)})
    for key, value in flat(config).items():
        if _SECRET.search(str(value)):
            raise ConfigError(
                f"{key} holds a password or an access token, which would stand in config.yaml, on the screen and in "
                f"every checkpoint; give it through the environment (HF_TOKEN, ...) or by the service's own login"
            )
    return config, values.print_shardings


@functools.cache
def _parser(program: str, default_config: str) -> Parser:
    """Returns the parser of `parse`. Making it takes longer than parsing, since it reads every key's docstring."""
    parser = Parser(prog=program, description="Trains a decoder language model; writes everything to run.dir.")
    parser.add_argument(
        "--config", action=ActionConfigFile, help=f"YAML file of values, or the name of one of configs/ (default: "
                                                  f"{default_config})"
    )  # fmt: skip
    parser.add_argument(
        "--print_shardings", action="store_true", help="print how every parameter lies on the mesh, and stop"
    )
    parser.add_class_arguments(Config, as_group=True)
    return parser


_SECRET = re.compile(
    r"://[^/\s:@]+:[^/\s@]+@"  # a URL with a password
    r"|\bhf_[A-Za-z]{30,}|\bsk-[\w-]{20,}|\bgh[pousr]_\w{36,}|\bgithub_pat_\w{20,}|\bAKIA[0-9A-Z]{16}\b|\bya29\.[\w-]{20,}"
)


def _check_keys(path: Path) -> None:
    """YAML itself would quietly take the last of two equal keys.

    Raises:
      ConfigError: a key stands twice in one group, or the file is not YAML.
    """
    try:
        nodes = [yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)]
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except (OSError, ValueError):
        return  # the parser will say what is wrong
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value]
            for i, (key, value) in enumerate(node.value):
                if key.value in keys[:i]:
                    line = key.start_mark.line + 1
                    raise ConfigError(f"{path}, line {line}: the key {key.value} stands there twice; leave one of them")
                nodes.append(value)
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value


def to_yaml(config: Config) -> str:
    """The resolved configuration as YAML that `--config` reads back to the same values."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return list(value) if isinstance(value, tuple) else value

    return yaml.safe_dump(plain(dataclasses.asdict(config)), sort_keys=False, allow_unicode=True)
