"""YAML files and dotted flags to a checked `Config`, and back to YAML.

The parser is jsonargparse: types, help and defaults come from the dataclasses of `jaxstack.config`. JAX is not imported
here. Every mistake raises `ConfigError`.
"""

import argparse
import dataclasses
import difflib
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, DefaultHelpFormatter, Namespace, set_parsing_settings

from jaxstack.config import Config, ConfigError, flat
from jaxstack.config.bounds import check_value

set_parsing_settings(docstring_parse_attribute_docstrings=True)

GROUPS = tuple(f.name for f in dataclasses.fields(Config))
"""Groups of keys: `run`, `model`, `data`, ..."""


class HelpFormatter(DefaultHelpFormatter):
    """Help that shows types as users write them: `int >= 1 or null`, without the syntax of Python's annotations."""

    def _expand_help(self, action: argparse.Action) -> str:
        text = _plain_types(super()._expand_help(action))
        return re.sub(r" \(required(, type: str)?\)$", "", text)


def _plain_types(text: str) -> str:
    """Returns the text with Python's type annotations in plain words."""
    text = re.sub(r"Annotated\[(int|float), ([^\[\]]+|in [\[(][^\])]*[\])])\]", r"\1 \2", text)
    text = re.sub(r"tuple\[(.+?), \.\.\.\]", r"list of \1", text).replace("default: ()", "default: []")
    text = re.sub(r"(?<=default: )(True|False)\b", lambda found: found[1].lower(), text)
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text).replace("typing.", "")
    text = re.sub(r"Literal\[([^\]]*)\]", lambda found: f"one of {found[1]}".replace("'", ""), text)
    return re.sub(r"Optional\[(.+?[\])]?)\](?=,|$)", r"\1 or null", text).replace(" | null", " or null")


class Parser(ArgumentParser):
    """A parser of one command's arguments that raises `ConfigError` instead of exiting.

    It accepts no abbreviations, since a mistyped key must never match another key.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs |= {"allow_abbrev": False, "exit_on_error": False, "formatter_class": HelpFormatter}
        super().__init__(*args, **kwargs)
        self._default_config: str | None = None
        self._builds_config = False

    def add_config(self, default: str | Path = "quickstart", build: bool = True) -> None:
        """Adds `--config` and a flag for every key of `Config`.

        Args:
          default: configuration that is read when the command line has no `--config`.
          build: whether `read` returns the checked `Config` as `cfg`.
        """
        self._default_config, self._builds_config = str(default), build
        self.add_argument(
            "--config",
            action=ActionConfigFile,
            help=f"YAML file, or name of a configuration that comes with jaxstack (default: {default})",
        )
        self.add_class_arguments(Config, as_group=True)

    def read(self, argv: Sequence[str]) -> Namespace:
        """Returns the values of a command line, with three additions for commands that have a configuration.

        Args:
          argv: the words after the name of the command.

        Returns:
          All arguments by name; `cfg`: the checked configuration; `files`: files that `--config` named; `words`: all
          words except `--config` and its values.

        Raises:
          ConfigError: an unknown key, a wrong type, an impossible value or a missing file.
        """
        if self._default_config is None:
            return self._within_bounds(self.instantiate(self.parse_args(argv)))
        names, words = _split_config(argv)
        named = [config_file(name) for name in names]
        files = named or [config_file(self._default_config)]
        for path in files:
            _check_yaml(path)
        # Files come first, so that flags override them wherever they are on the command line.
        values = self.parse_args([*(f"--config={path}" for path in files), *words])
        for name in GROUPS:
            if not isinstance(values[name], Namespace):
                raise ConfigError(
                    f"{name}={values[name]} is not a group of keys. Write its keys below it, such as "
                    f"{name}: {{key: value}}."
                )
        result = Namespace(**{name: value for name, value in vars(values).items() if name not in (*GROUPS, "config")})
        result.files, result.words = named, words
        if self._builds_config:
            groups = self.instantiate(values)
            result.cfg = Config(**{name: groups[name] for name in GROUPS})
            _check_secrets(result.cfg)
        return self._within_bounds(result)

    def _within_bounds(self, values: Namespace) -> Namespace:
        """Returns the values of a command line after checking those that are not keys of a configuration."""
        for action in self._actions:
            if "." not in action.dest and action.dest in values:
                check_value(f"--{action.dest}", values[action.dest], getattr(action, "_typehint", None), action.default)
        return values

    def format_help(self, formatter: argparse.HelpFormatter | None = None) -> str:
        """Returns the help, with a usage line that does not repeat every key."""
        if self.usage is None and any("." in action.dest for action in self._actions):
            words = [str(a.metavar) + " ..." * (a.nargs == "+") for a in self._actions if not a.option_strings]
            config = ["[--config NAME]"] if self._default_config else []
            self.usage = " ".join(["%(prog)s", *words, "[options]", *config, "[--GROUP.KEY=VALUE ...]"])
        for action in self._actions:
            action.help = _HELP_TEXTS.get(str(action.help).partition(".")[0], action.help)
        return super().format_help(formatter)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raises `ConfigError` with a message of the parser in one line that says what to do."""
        # Nested failures come as an indented tree, of which the user needs only the text.
        text = " ".join(line.strip(" -") for line in message.splitlines() if line.strip())
        for pattern in _UNKNOWN_KEY:
            if found := re.search(pattern, text):
                raise ConfigError(self._unknown(".".join(found.groups())))
        if found := re.search(r"argument (\S+): expected", text):
            raise ConfigError(f"{found[1]} has no value. Give it one, such as {found[1]}=VALUE.")
        if found := re.search(r"arguments are required: ([\w, ]+)", text):
            names = [self._display(name) for name in found[1].split(", ")]
            raise ConfigError(f"{' and '.join(names)} {'are' if names[1:] else 'is'} missing. {self._help}")
        keys, value = re.findall(r'Parser key "([\w.]+)"', text), re.search(r"(?:Got|Given) value: (.*)$", text)
        if keys and value:
            raise ConfigError(self._wrong_type(keys[-1], value[1]))
        if keys and (value := re.search(r"Unable to load config ['\"](.*?)['\"]", text)):
            raise ConfigError(
                f"{keys[-1]}={value[1]} is not a group of keys. Write them in braces, such as "
                f"--{keys[-1]}='{{key: value}}'."
            )
        raise ConfigError(f"{_plain_types(text).replace('Parser key ', '')}. {self._help}")

    @property
    def _help(self) -> str:
        python = "python " if self.prog.endswith(".py") else ""
        what = "every key and its type" if self._default_config else "all arguments"
        return f"`{python}{self.prog} --help` lists {what}."

    def _action(self, key: str) -> argparse.Action | None:
        return next((action for action in self._actions if action.dest == key), None)

    def _display(self, key: str) -> str:
        """Returns the name under which `--help` shows an argument."""
        action = self._action(key)
        if action is None or action.option_strings:
            return f"--{key}"
        return str(action.metavar or key)

    def _unknown(self, key: str) -> str:
        if self._default_config and key in shipped():
            return f"unknown argument {key}. Did you mean --config {key}?"
        close = difflib.get_close_matches(key, {action.dest for action in self._actions}, n=1)
        return f"unknown key {key}. " + (f"Did you mean {close[0]}?" if close else self._help)

    def _wrong_type(self, key: str, value: str) -> str:
        action = self._action(key)
        kind = getattr(action, "_typehint", None) or getattr(action, "type", None)
        name = key if "." in key else self._display(key)
        if kind is str and re.fullmatch(r"[\d.]+", value):
            return (
                f"{name}={value} is a number, but the key takes text. Put the text in quotes: YAML reads 10:15 as "
                f"minutes and seconds."
            )
        return f"{name}={value} is not valid. Use {_type_in_words(kind)}."


def _type_in_words(kind: Any) -> str:
    """Returns the values of a type in words: `one of a, b`, `a list of a, b`, `an integer >= 1 or null`."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is tuple:
        part = get_args(kind)[0]
        return f"a list of {_PLURAL.get(part) or _type_in_words(part).removeprefix('one of ')}"
    if get_origin(kind) is Annotated:
        return f"{_type_in_words(kind.__origin__)} {kind.__metadata__[0]!r}"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_type_in_words, get_args(kind)))
    return _WORDS.get(kind, str(kind))


_WORDS = {int: "an integer", float: "a number", str: "text", bool: "true or false", type(None): "null"}
_PLURAL = {int: "integers", str: "texts"}


_HELP_TEXTS = {  # by the first sentence of the parser's own text
    "Path to a configuration file": "keys of this group as YAML, or a YAML file of them",
    "Print the configuration after applying all other arguments and exit": "print the configuration as YAML, and exit",
}

_UNKNOWN_KEY = (  # the parser's words for a key that does not exist: on the command line, and in a file
    r"unrecognized arguments: (?:--)?([\w.]+)",
    r"Group '([\w.]+)' does not accept option '([\w.]+)'",
    r"Option '([\w.]+)' is not accepted",
)


def _split_config(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the values of `--config` on a command line, and the other words."""
    names, others, words = [], [], list(argv)
    while words:
        word = words.pop(0)
        if word == "--config" and words:
            names.append(words.pop(0))
        elif word.startswith("--config="):
            names.append(word.removeprefix("--config="))
        else:
            others.append(word)
    return names, others


def shipped() -> dict[str, Path]:
    """Returns the files of the configurations that come with jaxstack, by name: runnable jobs, then published models.

    An installed package contains them; in a checkout they are beside the package.
    """
    inside, beside = (folder / "configs" for folder in Path(__file__).parents[1:3])
    folder = inside if inside.is_dir() else beside
    return {path.stem: path for pattern in ("*.yaml", "models/*.yaml") for path in sorted(folder.glob(pattern))}


def config_file(name: str) -> Path:
    """Returns the file that `--config=NAME` means: a path, or the name of a shipped configuration.

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
    """Returns the configuration that the flags of `jaxstack train` give.

    Args:
      argv: `--config FILE` and dotted flags, which override the file wherever they are.
      default_config: configuration that is read when `argv` has no `--config`.

    Raises:
      ConfigError: an unknown key, a wrong type, an impossible value or a missing file.
    """
    return _config_parser(str(default_config)).read(argv).cfg


@functools.cache
def _config_parser(default_config: str) -> Parser:
    """Returns the parser of `parse_config`. To make it takes longer than to use it, since it reads every docstring."""
    parser = Parser(prog="jaxstack train")
    parser.add_config(default_config)
    return parser


_SECRET = re.compile(
    r"://[^/\s:@]+:[^/\s@]+@"  # a URL with a password
    r"|\bhf_[A-Za-z]{30,}|\bsk-[\w-]{20,}|\bgh[pousr]_\w{36,}|\bgithub_pat_\w{20,}|\bAKIA[0-9A-Z]{16}\b|\bya29\.[\w-]{20,}"
)


def _check_secrets(cfg: Config) -> None:
    for key, value in flat(cfg).items():
        if _SECRET.search(str(value)):
            raise ConfigError(
                f"{key} contains a password or an access token, which would be written to config.yaml, the screen and "
                f"every checkpoint. Pass it through the environment (HF_TOKEN, ...) or the service's own login."
            )


def _check_yaml(path: Path) -> None:
    """Checks that a file is YAML without duplicate keys, of which YAML would silently use the last one.

    Raises:
      ConfigError: a group contains a key twice, or the file is not YAML.
    """
    try:
        nodes = [yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)]
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}. Correct the file.") from None
    except (OSError, ValueError):
        return  # the parser reports the error
    if not isinstance(nodes[0], yaml.MappingNode):
        raise ConfigError(f"{path} does not contain keys. Write groups of keys, such as model: {{num_layers: 4}}.")
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value]
            for i, (key, value) in enumerate(node.value):
                if key.value in keys[:i]:
                    line = key.start_mark.line + 1
                    raise ConfigError(f"{path}, line {line}: the key {key.value} occurs twice. Remove one of them.")
                nodes.append(value)
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value


def to_yaml(config: Config) -> str:
    """Returns a configuration as YAML that `--config` reads back to the same values."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return list(value) if isinstance(value, tuple) else value

    return yaml.safe_dump(plain(dataclasses.asdict(config)), sort_keys=False, allow_unicode=True)
