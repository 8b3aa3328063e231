"""Talks with the model of a run. Arguments that are not given have the run's values.

A run without a chat template continues what you type. The conversation stays in the KV cache.
"""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import Namespace

from jaxstack.cli import generate
from jaxstack.common.counts import plural
from jaxstack.config import ConfigError, ModelConfig
from jaxstack.config.reading.parse import Parser, user_path
from jaxstack.data import Tokenizer, chat
from jaxstack.data.text_stream import TextStream
from jaxstack.data.tokenizers import encode_prompt
from jaxstack.generate.prompts import require_decoder
from jaxstack.loaded import load_run
from jaxstack.runtime import preemption
from jaxstack.tracking.console import printable

if TYPE_CHECKING:  # JAX must start after `platform.configure`
    from jaxstack.generate.conversation import Conversation

HELP = """\
/reset   begin a new conversation
/exit    end the chat, as Ctrl-D does
/help    list these commands
Ctrl-C stops an answer. Begin a text with a space if its first character is a slash."""


def add_arguments(parser: Parser) -> None:
    """Declares the arguments."""
    parser.add_argument("run", metavar="RUN", type=user_path, help="run directory")
    parser.add_argument("--system", metavar="TEXT", type=str, help="system message at the beginning of a conversation")
    parser.add_argument(
        "--context", type=int, help="maximum number of tokens of a conversation; null means data.seq_len of the run"
    )
    generate.add_model_arguments(parser)


def main(args: Namespace) -> None:
    """Answers the lines of standard input until it ends.

    Raises:
      ConfigError: the run cannot be read, or an argument does not suit it.
    """
    path = Path(args.run)
    cfg, tokenizer = load_run.read_run(path)
    require_decoder(cfg.model)
    stop = generate.stop_tokens(tokenizer, args.stop)
    template = generate.template_of(cfg.data, tokenizer)
    turn = chat.end_of_turn(template, tokenizer)
    stop += turn.tokens
    if template is None and args.system is not None:
        raise ConfigError(f"--system needs a chat template, which {path} does not have. Leave it out.")
    cfg = generate.with_arguments(cfg, args)
    if cfg.sample.beams > 1:
        raise ConfigError(f"sample.beams={cfg.sample.beams} cannot show tokens as they come. Use sample.beams=1.")
    context = context_of(cfg.model, args.context, cfg.data.seq_len)
    run = load_run.open_run(path, cfg, tokenizer, args.mesh, args.step, rows=1, placement=args.placement)

    from jaxstack.generate.conversation import Conversation

    conversation = Conversation(
        run.engine(cfg.sample.domain), cfg.sample, context=context, stop=stop, seed=cfg.run.seed
    )
    if template is None:
        how = "it has no chat template, so the model continues what you type"
        generate.note_frame(tokenizer)
    else:
        how = "each line is a message"
    note(f"{path}: {how}. The context has {plural(context, 'token')}. /help lists commands.")
    history = History(tokenizer, template, args.system)
    talk(history, conversation, partial(TextStream, tokenizer, "", end=stop, stop=turn.texts))


def context_of(cfg: ModelConfig, context: int | None, trained: int) -> int:
    """Returns the maximum number of tokens of a text. `None` means the length that the model was trained on.

    Raises:
      ConfigError: it is out of range.
    """
    if context is None:
        context = trained
    table = cfg.max_positions if cfg.positions == "learned" else None
    if context < 2 or (table is not None and context > table):
        raise ConfigError(f"--context={context} is out of range. Use a number from 2 to {table or 'any size'}.")
    return context


class History:
    """What was said so far, and its tokens.

    With a chat template it is a list of messages, which the template renders again for each answer. Otherwise it is the
    text on the screen: the lines that were typed, with their line ends, and what the model added.
    """

    def __init__(self, tokenizer: Tokenizer, template: chat.ChatTemplate | None, system: str | None) -> None:
        """Begins a conversation."""
        self._tokenizer = tokenizer
        self._template = template
        self._system = system
        self.reset()

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self._messages: list[chat.Message] = []
        if self._system is not None:
            self._messages.append({"role": "system", "content": self._system})
        self._ids: list[int] = []

    def ask(self, line: str) -> list[int]:
        """Returns all tokens before the answer to a line, which is not remembered yet."""
        if self._template is not None:
            text = self._template.prompt([*self._messages, {"role": "user", "content": line}])
            return self._encode(text)
        if not self._ids:
            return encode_prompt(self._tokenizer, f"{line}\n")
        return self._ids + self._encode(f"\n{line}\n")

    def remember(self, line: str, asked: list[int], answer: list[int], text: str) -> None:
        """Adds a line and its answer.

        Args:
          asked: tokens of `ask`.
          answer: tokens of the answer.
          text: text of the answer.
        """
        self._messages += [{"role": "user", "content": line}, {"role": "assistant", "content": text}]
        self._ids = [*asked, *answer]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).tolist()
        return ids


def talk(history: History, conversation: "Conversation", begin: Callable[[], TextStream]) -> None:
    """Reads lines, runs commands and prints answers until the input ends.

    Args:
      begin: returns the text of an answer, to which tokens are added.
    """
    for line in lines():
        match line.rstrip():
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/reset":
                history.reset()
                note("a new conversation begins")
            case "/help":
                note(HELP)
            case word if word.startswith("/"):
                note(f"{word.split()[0]} is not a command. /help lists them.")
            case _:
                try:
                    answer(line.removeprefix(" ") if line.startswith(" /") else line, history, conversation, begin())
                except ConfigError as error:  # such as a character that the tokenizer does not have
                    note(f"error: {error}")


def answer(line: str, history: History, conversation: "Conversation", text: TextStream) -> None:
    """Prints the answer to a line as its tokens come, which are added to `text`. Ctrl-C stops it."""
    asked = history.ask(line)
    full = f"The context of {plural(conversation.context, 'token')} is full. /reset begins a new conversation."
    if conversation.room(asked) < 1:
        note(f"{full} This line was not read: the text would have {plural(len(asked), 'token')}.")
        return
    tokens = []
    with interrupts() as hits:
        for part in conversation.reply(asked):
            tokens += part
            text.add(part)
            generate.write(text.take())
            if hits or text.ended:
                break
    generate.write(text.take(all=True) + "\n")
    history.remember(line, asked, tokens, text.text)
    if hits:
        note("(stopped)")
    elif not conversation.room([*asked, *tokens]):
        note(full)
    elif tokens and not text.ended:
        note(f"(stopped after {plural(len(tokens), 'token')}; --sample.tokens allows more)")


def lines() -> Iterator[str]:
    """Yields the lines of standard input. On a terminal they can be edited, and Ctrl-C begins the line again."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\r\n") for line in sys.stdin)
        return
    with suppress(ImportError):
        import readline  # noqa: F401  # `input` then has keys and a history of lines
    while True:
        try:
            with preemption.handle_interrupts(signal.default_int_handler):
                line = input("> ")
        except KeyboardInterrupt:
            print(flush=True)
            note("Ctrl-D or /exit ends the chat.")
            continue
        except EOFError:
            print(flush=True)
            return
        yield line


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collects interrupts inside the context, so that programs finish; the second one ends the command."""
    hits: list[int] = []

    def interrupt(number: int, _: object) -> None:
        hits.append(number)
        if len(hits) > 1:
            raise KeyboardInterrupt

    with preemption.handle_interrupts(interrupt):
        yield hits


def note(text: str) -> None:
    """Prints a line that is not the model's to stderr."""
    print(printable(text), file=sys.stderr, flush=True)
