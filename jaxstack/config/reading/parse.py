"""YAML files and dotted flags to a checked `Config`, and back to YAML.

The parser is jsonargparse: types, help and defaults come from the dataclasses of `jaxstack.config`. JAX is not imported
here. Every mistake raises `ConfigError`.
"""

import argparse
import copy
import dataclasses
import difflib
import functools
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_origin

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, set_loader, set_parsing_settings

from jaxstack.common import inputs
from jaxstack.common.counts import plural
from jaxstack.common.errors import shortened
from jaxstack.config import Config, ConfigError, flat, resolve
from jaxstack.config.bounds import check_value, type_in_words
from jaxstack.config.reading import key_help, suggestions, yaml_check
from jaxstack.config.reading.shipped import config_file, shipped

set_parsing_settings(docstring_parse_attribute_docstrings=True)
set_loader("yaml", yaml_check.load, (yaml.YAMLError,))  # for files and for values of flags

GROUPS = tuple(f.name for f in dataclasses.fields(Config))
"""Groups of keys: `run`, `model`, `data`, ..."""


class Parser(ArgumentParser):
    """A parser of one command's arguments that raises `ConfigError` instead of exiting.

    It accepts no abbreviations, since a mistyped key must never match another key.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs |= {
            "allow_abbrev": False,
            "exit_on_error": False,
            "formatter_class": key_help.HelpFormatter,
            "print_config": None,  # ours applies the checks of training
        }
        super().__init__(*args, **kwargs)
        self._has_config = False
        self._default_config: str | None = None
        self._auto_mesh = False
        self._words: list[str] = []

    def add_config(self, default: str | Path | None = "quickstart", auto_mesh: bool = False) -> None:
        """Adds `--config` and a flag for every key of `Config`.

        Args:
          auto_mesh: whether `--mesh=auto` is accepted; `read` then returns whether it was given as `auto_mesh`.
          default: configuration that is read when the command line has no `--config`; `read` then returns the checked
            `Config` as `cfg`. None means that the command makes its own configuration from the words.
        """
        self._has_config = True
        self._default_config = None if default is None else str(default)
        self._auto_mesh = auto_mesh
        shown = f" (default: {default})" if default else ""
        self.add_argument(
            "--config",
            action=ActionConfigFile,
            metavar="NAME",
            help=f"YAML file, or name of a configuration that comes with jaxstack{shown}; later ones override earlier",
        )
        if default is not None:
            self.add_argument(
                "--print_config", action="store_true", help="check the configuration, print it as YAML, and exit"
            )
        self.add_class_arguments(Config, as_group=True)
        self._drop_class_help()

    def _drop_class_help(self) -> None:
        """Removes the flags of the library that explain the classes in lists, such as `--data.mixture.help`."""
        for action in [a for a in self._actions if a.dest.endswith(".help")]:
            self._actions.remove(action)
            for option in action.option_strings:
                del self._option_string_actions[option]
            for group in self._action_groups:
                if action in group._group_actions:
                    group._group_actions.remove(action)

    def read(self, argv: Sequence[str]) -> Namespace:
        """Returns the values of a command line, with three additions for commands that have a configuration.

        Args:
          argv: the words after the name of the command.

        Returns:
          All arguments by name; `cfg`: the checked configuration; `files`: files that `--config` named; `words`: all
          words except `--config` and its values; `auto_mesh`: whether `--mesh=auto` was among them.

        Raises:
          ConfigError: an unknown key, a wrong type, an impossible value or a missing file.
        """
        _check_digits(argv)
        given = list(argv)
        argv = without_auto_mesh(argv) if self._auto_mesh else list(argv)
        self._words = argv
        kinds = {a.dest: getattr(a, "_typehint", None) for a in self._keys()}
        self._check_groups(kinds)
        topics, others = _split_help(argv, {*kinds, *(key.rpartition(".")[0] for key in kinds)})
        if kinds and topics:
            print(self._help_text(topics, others, kinds))
            sys.exit()
        if not self._has_config:
            return self._within_bounds(self.instantiate(self.parse_args(argv)))
        values, named, words = self._values(argv, kinds)
        result = Namespace(**{name: value for name, value in vars(values).items() if name not in (*GROUPS, "config")})
        result.files = named
        result.words = words
        result.auto_mesh = given != argv
        if self._default_config is not None:
            groups = self.instantiate(values)
            result.cfg = Config(**{name: groups[name] for name in GROUPS})
            _check_secrets(flat(result.cfg))
            if values.print_config:
                _check_vocabulary(result.cfg)
                print(to_yaml(result.cfg), end="")
                sys.exit()
        return self._within_bounds(result)

    def _values(self, argv: Sequence[str], kinds: dict[str, Any]) -> tuple[Namespace, list[Path], list[str]]:
        """Returns all values of a command line, the files that `--config` names, and the other words."""
        names, words = _split_config(argv)
        named = [config_file(name) for name in names]
        files = named or [config_file(name) for name in [self._default_config] if name]
        for path in files:
            yaml_check.check_file(path, kinds)
        # Files come first, so that flags override them wherever they are on the command line.
        return self.parse_args([*(f"--config={path}" for path in files), *words]), named, words

    def _keys(self) -> list[argparse.Action]:
        """Returns the arguments that are keys of the configuration."""
        with_type = (a for a in self._actions if getattr(a, "_typehint", None) is not None)
        return [a for a in with_type if "." in a.dest and not a.dest.endswith(".help")]  # a dataclass has its own help

    def _help_text(self, topics: Sequence[str], argv: Sequence[str], kinds: dict[str, Any]) -> str:
        """Returns the help of the topics; an empty one stands for the short help.

        Args:
          topics: groups and keys, or empty.
          argv: the other words of the command line, which give the values.
          kinds: type of every key.
        """
        if self._has_config:
            positionals = [action for action in self._actions if action.required and not action.option_strings]
            for action in positionals:  # who asks for help need not give them
                action.required = False
            try:
                values, _, words = self._values(argv, kinds)
            finally:
                for action in positionals:
                    action.required = True
        else:
            values = self.get_defaults()
            words = []
        sections = {a: group for group in self._action_groups for a in group._group_actions if a.dest in kinds}
        groups: dict[str, key_help.Group] = {}
        for action, section in sections.items():
            name = action.dest.rpartition(".")[0]
            group = groups.setdefault(name, key_help.Group(name, str(section.title), []))
            key = action.dest
            text = " ".join((action.help or "").replace("%%", "%").split())
            group.keys.append(key_help.Key(key, text, kinds[key], action.default, values[key]))
        flags = ["the flags given"] if any(word.startswith("--") for word in words) else []
        files = _split_config(argv)[0] or [name for name in [self._default_config] if name]
        source = "the values of " + " and ".join([*files, *flags]) if files or flags else "their defaults"
        brief = copy.copy(self)
        brief._action_groups = [g for g in self._action_groups if not {*g._group_actions} & {*sections}]
        return "\n\n".join(
            key_help.topic(topic, [*groups.values()], self._names())
            if topic
            else key_help.short(brief.format_help(), [*groups.values()], source, self._command)
            for topic in topics
        )

    def _check_groups(self, kinds: dict[str, Any]) -> None:
        """Checks the YAML of flags that set a whole group, such as `--model.moe='{num_experts: 8}'`."""
        groups = {key[:i] for key in kinds for i, char in enumerate(key) if char == "."}
        for word, following in itertools.pairwise([*self._words, ""]):
            if word == "--":
                return
            key, equals, value = word.removeprefix("--").partition("=")
            if not word.startswith("--") or key not in groups or (not equals and following[:2] in ("", "--")):
                continue
            value = value if equals else following
            if os.path.isfile(value):
                if key == "data" and Path(value).suffix not in (".yaml", ".yml"):
                    raise ConfigError(
                        f"--data={value} is not a YAML file of the group data. For a text, use --data.source=path "
                        f"--data.path={value}."
                    )
                yaml_check.check_file(Path(value), kinds, key)
            elif value.lstrip().startswith("{"):
                yaml_check.check_text(value, f"--{key}", kinds, key)
            else:
                some = next(name for name in kinds if name.startswith(f"{key}."))
                if key == "model" and value in shipped():
                    raise ConfigError(
                        f"--model={value} is not a group of keys. Use --config {value}, or `jaxstack import DIR RUN` "
                        f"for weights of Hugging Face."
                    )
                raise ConfigError(
                    f"--{key}={value} is not a group of keys. Set its keys one by one, such as --{some}=VALUE, or "
                    f"together: --{key}='{{{some.rpartition('.')[2]}: VALUE}}'."
                    + (" --mesh=auto chooses all axes." if key == "mesh" else "")
                )

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
        if found := re.search(r"unrecognized arguments:(?: (.*))?", text):
            rest = found[1] or ""
            word = max((word for word in self._words if rest.startswith(word)), key=len, default=rest)
            if " -- " in str(self.usage) and "--" not in self._words:
                raise ConfigError(f"the command is not behind --. Write `{self.usage}`.")
            following = [*self._words, "", ""][self._words.index(word) + 1] if word in self._words else ""
            raise ConfigError(suggestions.unknown_argument(word, following, self._names()))
        for pattern in _UNKNOWN_KEY:
            if found := re.search(pattern, text):
                raise ConfigError(suggestions.unknown_key(".".join(found.groups()), self._names()))
        if found := re.search(r"argument (\S+): ignored explicit argument", text):
            raise ConfigError(f"{found[1]} takes no value. Write {found[1]} alone.")
        if found := re.search(r"argument (\S+): expected", text):
            raise ConfigError(f"{found[1]} has no value. Give it one, such as {found[1]}=VALUE.")
        if found := re.search(r"arguments are required: ([\w, ]+)", text):
            names = [self._display(name) for name in found[1].split(", ")]
            raise ConfigError(
                f"{' and '.join(names)} {'are' if names[1:] else 'is'} missing. `{self._command} --help` lists the "
                f"arguments."
            )
        keys = re.findall(r'Parser key "([\w.]+)"', text)
        value = re.search(r"(?:Got|Given) value:(?: (.*))?$", text)
        if keys and value:
            raise ConfigError(self._wrong_type(keys[-1], shortened(value[1] or "")))
        if found := re.search(r"argument (\S+): invalid choice: '?(.*?)'? \(choose from (.*)\)", text):
            known = [word.strip("' ") for word in found[3].split(",")]
            close = difflib.get_close_matches(found[2], known, n=1)
            advice = f"Did you mean {close[0]}?" if close else f"Use one of {', '.join(known)}."
            raise ConfigError(f"{found[1]}={found[2]} is not valid. {advice}")
        if found := re.match(r'Parser key "([\w.]+)": (.*[.?])$', text):  # our own words about an entry of a list
            words = re.sub(r"`[^`]*` lists all arguments\.$", "Add it to the entry.", found[2])
            raise ConfigError(f"{found[1]}: {words}")
        raise ConfigError(f"{key_help.plain_types(text).replace('Parser key ', '')}. {self._help}")

    @property
    def _help(self) -> str:
        if self._has_config:
            return f"`{self._command} --help.all` lists every key and its type."
        return f"`{self._command} --help` lists all arguments."

    @property
    def _command(self) -> str:
        return f"python {self.prog}" if self.prog.endswith(".py") else self.prog

    def _action(self, key: str) -> argparse.Action | None:
        return next((action for action in self._actions if action.dest == key), None)

    def _display(self, key: str) -> str:
        """Returns the name under which `--help` shows an argument."""
        action = self._action(key)
        if action is None or action.option_strings:
            return f"--{key}"
        return str(action.metavar or key)

    def _names(self) -> suggestions.Names:
        """Returns the names that the command has."""
        positionals = {a.dest: str(a.metavar or a.dest) for a in self._actions if not a.option_strings}
        options = [(option, a) for a in self._actions for option in a.option_strings if option.startswith("--")]
        flags = [option[2:] for option, _ in options]
        switches = [option[2:] for option, action in options if action.nargs == 0]
        usage = " ".join([self.prog, *positionals.values()])
        return suggestions.Names(flags, switches, positionals, shipped() if self._has_config else {}, usage, self._help)

    def _wrong_type(self, key: str, value: str) -> str:
        action = self._action(key)
        kind = getattr(action, "_typehint", None) or getattr(action, "type", None)
        name = key if "." in key else self._display(key)
        if not value:
            return f"{name} has no value. Use {type_in_words(kind)}."
        if value.startswith("="):
            return f"{name} is followed by a space. Write --{key}=VALUE, without spaces around the equals sign."
        number = float(value) if re.fullmatch(r"\d+\.0*|\d+\.?\d*e\+?\d+", value) else None
        such = f", such as {number:.0f}" if number is not None and number.is_integer() else ""
        if get_origin(kind) is list and re.fullmatch(r"\d+(,\d+)*", value):
            such = f", such as [{value}]"
        return f"{name}={value} is not valid. Use {type_in_words(kind)}{such}."


_INTEGER = re.compile(r"[-+]?(0[xX][\da-fA-F_]+|(0[bo])?[\d_]+)")


def _check_digits(words: Sequence[str]) -> None:
    """Refuses integers that are so long that Python does not convert them."""
    for word in words:
        flag, _, value = word.rpartition("=")
        if len(value) > inputs.MOST_DIGITS and _INTEGER.fullmatch(value):
            named = f"{flag}=" if flag else ""
            raise ConfigError(
                f"{named}{value[:12]}... is an integer of {plural(len(value), 'digit', spec=',')}. Use at most "
                f"{inputs.MOST_DIGITS}."
            )


_HELP_TEXTS = {  # by the first sentence of the parser's own text
    "Path to a configuration file": "keys of this group as YAML, or a YAML file of them",
}

_UNKNOWN_KEY = (  # the parser's words for a key of a file that does not exist
    r"Group '([\w.]+)' does not accept option '([^']+)'",
    r"Option '([^']+)' is not accepted",
)


def _split_config(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the values of `--config` on a command line, and the other words."""
    names = []
    others = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--config" and words:
            names.append(words.pop(0))
        elif word.startswith("--config="):
            names.append(word.removeprefix("--config="))
        else:
            others.append(word)
    return names, others


def _split_help(argv: Sequence[str], names: set[str]) -> tuple[list[str], list[str]]:
    """Returns what a command line asks help for, and the other words.

    Args:
      argv: the words. `--help.model`, `--help=model` and `--help model` ask for `model`, and `--help` for nothing.
      names: groups and keys.
    """
    topics = []
    others = []
    words = [*argv[: argv.index("--")]] if "--" in argv else [*argv]
    while words:
        word = words.pop(0)
        if word in ("-h", "--help"):
            topics.append(words.pop(0) if words and words[0] in names else "")
        elif word.startswith(("--help.", "--help=")):
            topics.append(word.removeprefix("--help")[1:])
        else:
            others.append(word)
    return topics, others


def without_auto_mesh(argv: Sequence[str]) -> list[str]:
    """Returns the words of a command line without `--mesh=auto` or `--mesh auto`."""
    return [
        word
        for before, (word, after) in zip(["", *argv], itertools.pairwise([*argv, ""]), strict=False)
        if word != "--mesh=auto" and (word, after) != ("--mesh", "auto") and (before, word) != ("--mesh", "auto")
    ]


def given_keys(words: Sequence[str], keys: Collection[str]) -> set[str]:
    """Returns which of the keys flags set, alone or in a group such as `--mesh='{tensor: 2}'`."""
    found = set()
    for word, following in itertools.pairwise([*words, ""]):
        key, equals, value = word.removeprefix("--").partition("=")
        value = value if equals else following
        if word.startswith("--") and key in keys:
            found.add(key)
        elif word.startswith("--") and value.lstrip().startswith("{"):
            found |= {f"{key}.{name}" for name in yaml_check.load(value)} & {*keys}
    return found


def user_path(text: str) -> str:
    """Returns a path of the command line, with a leading `~` replaced by the home directory."""
    return os.path.expanduser(text)


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
    parser.add_config(default_config, auto_mesh=True)
    return parser


_SECRET = re.compile(
    r"://[^/\s:@]+:[^/\s@]+@"  # a URL with a password
    r"|\bhf_[A-Za-z]{30,}|\bsk-[\w-]{20,}|\bgh[pousr]_\w{36,}|\bgithub_pat_\w{20,}|\bAKIA[0-9A-Z]{16}\b|\bya29\.[\w-]{20,}"
)


def _check_secrets(values: Mapping[str, object]) -> None:
    for key, value in values.items():
        if _SECRET.search(str(value)):
            raise ConfigError(
                f"{key} contains a password or an access token, which would be written to config.yaml, the screen and "
                f"every checkpoint. Pass it through the environment (HF_TOKEN, ...) or the service's own login."
            )


def _check_vocabulary(cfg: Config) -> None:
    """Applies the checks that depend on the vocabulary, if its size is given without reading data."""
    own = any(one.source == "tokens" for one in cfg.data.single_sources())  # a token file has its own tokenizer
    pictures = cfg.model.pictures
    bytes_only = cfg.data.tokenizer == "bytes" and not own and pictures is None
    if bytes_only or (cfg.model.vocab_size is not None and (pictures is None or pictures.image)):
        resolve(cfg, 256 if bytes_only else None)


def from_values(values: dict[str, object]) -> Config:
    """Returns the configuration with the values of `dataclasses.asdict`, which may have been JSON in between.

    Raises:
      ConfigError: a key or a value that this version does not have.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(yaml.safe_dump(values))
        return parse_config([f"--config={file}"])


def to_yaml(config: Config) -> str:
    """Returns a configuration as YAML that `--config` reads back to the same values."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value

    return yaml.safe_dump(plain(dataclasses.asdict(config)), sort_keys=False, allow_unicode=True)
