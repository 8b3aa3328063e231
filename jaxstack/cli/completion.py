"""Prints a script that completes commands, flags, configuration keys and their values.

Load it with `source <(jaxstack completion bash)`, `source <(jaxstack completion zsh)` or
`jaxstack completion fish | source`.
"""

from typing import Literal, get_args, get_origin

from jsonargparse import Namespace

from jaxstack.cli import parser as commands
from jaxstack.config.reading.parse import GROUPS, Parser, shipped

SHELLS = ("bash", "zsh", "fish")

Flags = dict[str, tuple[list[str], str]]
"""By flag: the values that it can have, which is empty if they cannot be listed, and its help."""


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    parser.add_argument("shell", metavar="SHELL", type=Literal[SHELLS], help=f"one of {', '.join(SHELLS)}")


def main(args: Namespace) -> None:
    """Prints the script of a shell."""
    known = {name: flags_of(commands.parser_of(name)) for name in commands.COMMANDS}
    print({"bash": bash, "zsh": zsh, "fish": fish}[args.shell](known), end="")


def flags_of(parser: Parser) -> Flags:
    """Returns the flags of a command, in the order of its help."""
    found: Flags = {}
    for action in parser._actions:
        for flag in (option for option in action.option_strings if option.startswith("--")):
            values = [*shipped()] if flag == "--config" else _values(getattr(action, "_typehint", None))
            found[flag] = values, " ".join((action.help or "").replace("%%", "%").split())
    return found


def _values(hint: object) -> list[str]:
    if get_origin(hint) is Literal:
        return [str(value) for value in get_args(hint)]
    if hint is bool:
        return ["true", "false"]
    return [value for part in get_args(hint) for value in _values(part)]


def _words(known: dict[str, Flags]) -> dict[str, list[str]]:
    """Returns what can follow `jaxstack` and each first word: commands, and second words such as `roofline`."""
    words: dict[str, list[str]] = {
        "": [*dict.fromkeys(name.split()[0] for name in known), "help", "--help", "--version"]
    }
    for name in known:
        first, *second = name.split()
        words.setdefault(first, []).extend(second)
    words["completion"] += SHELLS
    words["help"] = list(dict.fromkeys([*(name.split()[0] for name in known), *GROUPS]))
    return words


def bash(known: dict[str, Flags]) -> str:
    """Returns the script for bash.

    Bash splits words at `=`, so that the value of `--key=value` is a word of its own after the word `=`.
    """
    return f"""# Completion of jaxstack for bash: source <(jaxstack completion bash)
_jaxstack() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
    if [[ $word == = ]]; then
        word=""
    elif [[ $previous == = ]]; then
        previous="${{COMP_WORDS[COMP_CWORD-2]}}"
    fi
    local command="${{COMP_WORDS[1]}}" candidates="" values=""
    ((COMP_CWORD == 1)) && command=""
    ((COMP_CWORD > 2)) && case "$command ${{COMP_WORDS[2]}}" in
        {"|".join(f"'{name}'" for name in known if " " in name)}) command="$command ${{COMP_WORDS[2]}}" ;;
    esac
{_shell_cases(known)}
    if [[ $previous == --* && $word != --* ]]; then
        candidates=$values
    fi
    COMPREPLY=($(compgen -W "$candidates" -- "$word"))
    if ((${{#COMPREPLY[@]}} == 0)) && [[ $word != --* ]]; then
        compopt -o default 2>/dev/null
    fi
}}
complete -F _jaxstack jaxstack
"""


def _shell_cases(known: dict[str, Flags]) -> str:
    """Returns statements that set `candidates` by `$command`, and `values` by `$previous`, for bash and zsh."""
    words = _words(known)
    keys = [flag for flag in known["train"] if "." in flag]  # one variable, because several commands have them
    lines = [f"    local keys='{' '.join(keys)}'", '    case "$command" in']
    for name in dict.fromkeys([*words, *known]):
        flags = known.get(name, {})
        shared = {*keys} <= flags.keys()
        own = [*words.get(name, []), *(flag for flag in flags if not (shared and flag in keys))]
        lines.append(f"""        '{name}') candidates="{" ".join([*own, *(["$keys"] if shared else [])])}" ;;""")
    lines += ["    esac", '    case "$previous" in']
    values = {flag: values for flags in known.values() for flag, (values, _) in flags.items() if values}
    lines += [f"        {flag}) values='{' '.join(found)}' ;;" for flag, found in values.items()]
    return "\n".join([*lines, "    esac"])


def zsh(known: dict[str, Flags]) -> str:
    """Returns the script for zsh."""
    return f"""#compdef jaxstack
# Completion of jaxstack for zsh: source <(jaxstack completion zsh)
_jaxstack() {{
    local word="${{words[CURRENT]}}" previous="${{words[CURRENT-1]}}" command="" candidates="" values=""
    if [[ $word == --*=* ]]; then
        previous="${{word%%=*}}"
        compset -P '*='
        word=""
    fi
    ((CURRENT > 2)) && command="${{words[2]}}"
    ((CURRENT > 3)) && case "$command ${{words[3]}}" in
        {"|".join(f"'{name}'" for name in known if " " in name)}) command="$command ${{words[3]}}" ;;
    esac
{_shell_cases(known)}
    if [[ $previous == --* && $word != --* ]]; then
        candidates=$values
    fi
    compadd -- ${{=candidates}} || _files
}}
compdef _jaxstack jaxstack
"""


def fish(known: dict[str, Flags]) -> str:
    """Returns the script for fish, which shows the help of each flag beside it."""
    lines = ["# Completion of jaxstack for fish: jaxstack completion fish | source"]
    first = "test (count (commandline -opc)) -eq 1"
    lines += [f"complete -c jaxstack -f -n '{first}' -l {flag}" for flag in ("help", "version")]
    lines.append(f"complete -c jaxstack -f -n '{first}' -a help -d 'explain a command, a group of keys or a key'")
    lines.append(f"complete -c jaxstack -f -n '__fish_seen_subcommand_from help' -a {_quoted(' '.join(GROUPS))}")
    for name in dict.fromkeys(name.split()[0] for name in known):
        summary = commands.COMMANDS[name].summary if name in commands.COMMANDS else "commands for token files"
        lines.append(f"complete -c jaxstack -f -n '{first}' -a {name} -d {_quoted(summary)}")
    for name, flags in known.items():
        first, *second = name.split()
        seen = f"__fish_seen_subcommand_from {first}"
        for word in second:
            summary = commands.COMMANDS[name].summary
            lines.append(f"complete -c jaxstack -n '{seen}' -a {word} -d {_quoted(summary)}")
            seen += f"; and __fish_seen_subcommand_from {word}"
        for flag, (values, text) in flags.items():
            choices = f" -x -a {_quoted(' '.join(values))}" if values else ""
            lines.append(f"complete -c jaxstack -n '{seen}' -l {flag[2:]}{choices} -d {_quoted(text)}")
    lines.append(f"complete -c jaxstack -f -n '__fish_seen_subcommand_from completion' -a '{' '.join(SHELLS)}'")
    return "\n".join([*lines, ""])


def _quoted(text: str) -> str:
    """Returns the text between single quotes of fish."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
