"""Renders conversations with a chat template, and encodes them with a mask of the answers.

Templates are programs that come with a model. They run in jinja2's sandbox, which gives them access to the
conversation only, and in a process with limits of time and memory.
"""

import importlib.util
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from jaxstack.common import inputs
from jaxstack.common.counts import plural
from jaxstack.config import ConfigError
from jaxstack.data.conversations import Conversation, Message
from jaxstack.data.template_process import CLOSE, OPEN, TemplateError, TemplateProcess
from jaxstack.data.tokenizers import HFTokenizer, SavedTemplate, Tokenizer, encode_each_with_offsets, id_dtype
from jaxstack.data.tokens import Tokens

Spans: TypeAlias = list[tuple[int, int]]
"""Start and end of each answer in a text, in characters. An answer includes the end of its turn."""


class ChatTemplate(Protocol):
    """Renders messages as one text."""

    def render(self, messages: Sequence[Message]) -> tuple[str, Spans]:
        """Returns the text, and the spans of the assistant's answers in it.

        Raises:
          ConfigError: the template rejects the messages, or the spans of the answers cannot be determined.
        """
        ...

    def prompt(self, messages: Sequence[Message]) -> str:
        """Returns the text that precedes an answer."""
        ...


class PlainTemplate:
    """The template of `bytes` and `chars`, which needs no download and no jinja2.

    A zero byte ends an answer, as it ends a document:

    <|user|>
    What is a lens?
    <|assistant|>
    Curved glass.\\0
    """

    def render(self, messages: Sequence[Message]) -> tuple[str, Spans]:
        """Returns the text, and the spans of the answers, see `ChatTemplate.render`."""
        text = ""
        spans = []
        for message in messages:
            if "\0" in message["content"]:
                raise ConfigError("a message contains a zero byte, which marks the end of an answer. Remove it.")
            text += f"<|{message['role']}|>\n"
            said = message["content"] + "\0" * (message["role"] == "assistant")
            if message["role"] == "assistant":
                spans.append((len(text), len(text) + len(said)))
            text += f"{said}\n"
        return text, spans

    def prompt(self, messages: Sequence[Message]) -> str:
        """Returns the text that precedes an answer."""
        return f"{self.render(messages)[0]}<|assistant|>\n"


_PROCESS = TemplateProcess()


class JinjaTemplate:
    """A chat template of a Hugging Face model.

    If the template marks answers by `{% generation %}`, those are the spans. Otherwise the template renders the
    messages before each answer, the messages with the answer, and all messages. Each text must be a prefix of the next.

    Args:
      saved: its source, and the special tokens that it may refer to.

    Raises:
      ConfigError: jinja2 is not installed, or the source is not a template.
    """

    def __init__(self, name: str, saved: SavedTemplate) -> None:
        if importlib.util.find_spec("jinja2") is None:
            raise ConfigError(f"{name} needs the jinja2 library. Run pip install 'jaxstack[hf]'.")
        self._name = name
        self._source = saved["source"]
        self._tokens = saved["tokens"]
        self._marks = re.search(r"\{%-?\s*generation\s*-?%\}", saved["source"]) is not None
        try:
            _PROCESS.run(self._source, [])
        except TemplateError as error:
            raise ConfigError(f"{name} is not a template: {error}. Use the template of the model.") from None

    def _texts(self, messages: Sequence[Message], calls: Sequence[tuple[int, bool]]) -> list[str]:
        """Runs the template on the first messages of a conversation.

        Args:
          calls: for each text, the number of messages, and whether the prompt for an answer follows.
        """
        variables = [
            {
                "messages": [*messages[:count]],
                "add_generation_prompt": prompt,
                "tools": None,
                "documents": None,
                **self._tokens,
            }
            for count, prompt in calls
        ]
        try:
            return _PROCESS.run(self._source, variables)
        except TemplateError as error:
            roles = ", ".join(m["role"] for m in messages) or "none"
            raise ConfigError(
                f"{self._name} cannot render these messages ({roles}): {error}. Change them or the template."
            ) from None

    def render(self, messages: Sequence[Message]) -> tuple[str, Spans]:
        """Returns the text, and the spans of the answers, see `ChatTemplate.render`."""
        if any(mark in message["content"] for mark in (OPEN, CLOSE) for message in messages):
            raise ConfigError("a message contains U+FDD0 or U+FDD1, which are not characters. Remove it.")
        whole = (len(messages), False)
        if self._marks:
            return _remove_marks(self._texts(messages, [whole])[0], self._name)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        text, *around = self._texts(messages, [whole, *(call for i in answers for call in ((i, True), (i + 1, False)))])
        spans = []
        for i, before, after in zip(answers, around[::2], around[1::2], strict=True):
            message = messages[i]
            if not after.startswith(before) or not text.startswith(after) or not after[len(before) :].strip():
                raise ConfigError(
                    f"{self._name} renders the messages before the answer in message {i + 1} differently with and "
                    f"without that answer, so its position is not known. Mark answers in the template by "
                    f"{{% generation %}} and {{% endgeneration %}}."
                )
            spans.append((len(before), len(before) + _answer_length(after[len(before) :], message["content"])))
        return text, spans

    def prompt(self, messages: Sequence[Message]) -> str:
        """Returns the text that precedes an answer."""
        return self._texts(messages, [(len(messages), True)])[0].replace(OPEN, "").replace(CLOSE, "")


def _remove_marks(text: str, name: str) -> tuple[str, Spans]:
    """Returns the text without marks, and the spans between them."""
    plain = ""
    spans = []
    start = None
    for piece in re.split(f"([{OPEN}{CLOSE}])", text):
        if piece == OPEN and start is None:
            start = len(plain)
        elif piece == CLOSE and start is not None:
            spans.append((start, len(plain)))
            start = None
        elif piece in (OPEN, CLOSE):
            raise ConfigError(f"{name} has {{% generation %}} within {{% generation %}}. Mark each answer once.")
        else:
            plain += piece
    return plain, spans


def _answer_length(written: str, content: str) -> int:
    """Returns the length of an answer with the end of its turn.

    White space between turns is not included, unless nothing else ends the turn.
    """
    at = written.rfind(content.strip())
    end = written[at + len(content.strip()) :] if at >= 0 else written
    return len(written.rstrip()) if end.strip() else len(written)


def read_template(tokenizer: str, *, required: bool = True) -> SavedTemplate | None:
    """Returns the chat template in the folder of a tokenizer.json, or `None` for `bytes` and `chars`.

    Args:
      required: whether a missing template is an error; otherwise the result is `None`.

    Raises:
      ConfigError: the template is missing or cannot be read.
    """
    if tokenizer in ("bytes", "chars"):
        return None
    folder = Path(tokenizer).parent
    settings: Any = {}
    try:
        if (folder / "tokenizer_config.json").is_file():
            settings = inputs.read_json(folder / "tokenizer_config.json")
            if not isinstance(settings, dict):
                raise ValueError("it is not a JSON object")
        source = settings.get("chat_template")
        if (folder / "chat_template.jinja").is_file():
            source = inputs.read_text(folder / "chat_template.jinja")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder}: tokenizer_config.json or chat_template.jinja cannot be read: {error}. Use the model's own."
        ) from None
    if isinstance(source, list):  # a list of named templates
        source = next((t.get("template") for t in source if isinstance(t, dict) and t.get("name") == "default"), None)
    if not isinstance(source, str):
        if not required:
            return None
        raise ConfigError(
            f"the folder of data.tokenizer={tokenizer} has neither a chat_template.jinja nor a "
            f"tokenizer_config.json with a chat_template. Copy the template of the instruction-tuned model there."
        )
    named = {key: value for key, value in settings.items() if key.endswith("_token")}
    contents = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {"source": source, "tokens": {key: value for key, value in contents.items() if isinstance(value, str)}}


def template_for(tokenizer: Tokenizer) -> ChatTemplate:
    """Returns the template that was saved with the tokenizer of a run.

    Raises:
      ConfigError: the run has no template.
    """
    if not isinstance(tokenizer, HFTokenizer):
        return PlainTemplate()
    if tokenizer.chat is None:
        raise ConfigError("this run has no chat template. Use a run that trained with data.source=chat.")
    return JinjaTemplate(f"the chat template of {tokenizer.name}", tokenizer.chat)


class EndOfTurn(NamedTuple):
    """What ends an answer.

    Attributes:
      tokens: ids that end it.
      texts: strings that end it, for an end that is spelled by several ordinary tokens.
    """

    tokens: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()


def end_of_turn(template: ChatTemplate | None, tokenizer: Tokenizer) -> EndOfTurn:
    """Returns what ends an answer. White space alone does not, since answers have some themselves."""
    if template is None:
        return EndOfTurn()
    said = "Yes."
    text, spans = template.render([{"role": "user", "content": said}, {"role": "assistant", "content": said}])
    end = text[spans[-1][0] : spans[-1][1]].rpartition(said)[2].strip(" \n") if spans else ""
    ids = tokenizer.encode(end).tolist() if end else []
    special = tokenizer.special_ids if isinstance(tokenizer, HFTokenizer) else frozenset()
    ordinary = next((i for i, token in enumerate(ids) if token in special), len(ids))
    if ordinary == 0 or len(ids) == 1:
        return EndOfTurn(tuple(ids[:1]))
    spelled = tokenizer.decode(ids[:ordinary]).strip()
    return EndOfTurn(tuple(ids[ordinary : ordinary + 1]), (spelled,) if spelled else ())


@dataclass(frozen=True)
class RenderedConversation:
    """A conversation as text, and the spans of the answers that are learned."""

    name: str
    text: str
    spans: Spans
    unlearned: bool = False
    """Whether the conversation itself says that no answer is learned."""


def render_conversations(
    conversations: Iterable[Conversation], template: ChatTemplate
) -> Iterator[RenderedConversation]:
    """Yields each conversation as text.

    Raises:
      ConfigError: the template cannot render a conversation. The message has the file and the line.
    """
    for conversation in conversations:
        try:
            text, spans = template.render(conversation.messages)
            answers = sum(message["role"] == "assistant" for message in conversation.messages)
            if conversation.unlearned and len(spans) != answers:
                raise ConfigError(
                    f"the template marks {plural(len(spans), 'span')} for {plural(answers, 'answer')}, so those with "
                    f"weight 0 are not known. Remove the conversation."
                )
        except ConfigError as error:
            raise ConfigError(f"{conversation.name}: {error}") from None
        learned = [span for i, span in enumerate(spans) if i not in conversation.unlearned]
        yield RenderedConversation(conversation.name, text, learned, len(conversation.unlearned) == answers)


def encode_answers(
    conversations: Iterable[RenderedConversation], tokenizer: Tokenizer
) -> Iterator[tuple[RenderedConversation, np.ndarray, np.ndarray]]:
    """Yields each conversation with its ids [n], and whether each id belongs to an answer that is learned, bool [n].

    A token belongs to an answer if any of its characters does.

    Raises:
      ConfigError: a conversation has no token to learn, and does not say so itself.
    """
    encoded = encode_each_with_offsets(conversations, lambda conversation: conversation.text, tokenizer)
    for conversation, (ids, starts, ends) in encoded:
        answers = np.zeros(ids.size, bool)
        for start, end in conversation.spans:
            touched = np.flatnonzero((ends > start) & (starts < end))
            if touched.size:  # includes tokens without characters in between
                answers[touched[0] : touched[-1] + 1] = True
        if not answers[1:].any() and not conversation.unlearned:
            raise ConfigError(f"{conversation.name}: no token of the rendered text is an answer's. Remove the line.")
        yield conversation, ids, answers


def encode_conversations(
    conversations: Iterable[RenderedConversation], tokenizer: Tokenizer, seq_len: int
) -> tuple[Tokens, str]:
    """Encodes all conversations in memory, without end-of-document ids, since the template ends them itself.

    Conversations of more than `seq_len` + 1 tokens are
    left out. If they were cut, the model would learn from an answer without its question, or from half an answer.

    Returns:
      The tokens, and a note for users about the conversations that were left out, or an empty string.

    Raises:
      ConfigError: all conversations are too long, or one has no token to learn.
    """
    pieces = []
    masks = []
    names = []
    too_long = []
    unlearned = 0
    for conversation, ids, answers in encode_answers(conversations, tokenizer):
        if conversation.unlearned:
            unlearned += 1
            continue
        if ids.size > seq_len + 1:
            too_long.append(ids.size)
            continue
        pieces.append(ids)
        masks.append(answers)
        names.append(conversation.name)
    notes = []
    if too_long:
        longest = f"the longest has {plural(max(too_long), 'token', spec=',')}"
        if not pieces:
            raise ConfigError(
                f"none of {plural(len(too_long), 'conversation', spec=',')} fits into data.seq_len={seq_len} "
                f"({longest}). Raise it."
            )
        notes.append(f"{len(too_long):,} left out, longer than data.seq_len={seq_len} ({longest})")
    if unlearned:
        if not pieces:
            raise ConfigError(
                f"the answers of all {plural(unlearned, 'conversation', spec=',')} have weight 0. Give "
                f"some the weight 1."
            )
        notes.append(f"{unlearned:,} left out, without an answer of weight 1")
    bounds = np.cumsum([0, *(piece.size for piece in pieces)], dtype=np.int64)
    ids = np.concatenate(pieces).astype(id_dtype(tokenizer.vocab_size), copy=False)
    tokens = Tokens(ids, bounds[:-1], bounds[1:], tokenizer.vocab_size, tuple(names), loss_mask=np.concatenate(masks))
    return tokens, ", ".join(notes)
