"""Conversations: read from JSON lines, rendered by a chat template, encoded with a mask of what the assistant said.

Templates are programs that come with a model. They run in jinja2's sandbox, which lets them reach nothing but the
conversation.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxstack.config import ConfigError
from jaxstack.data.tokenizers import HFTokenizer, Tokenizer, id_dtype
from jaxstack.data.tokens import Tokens

Message = dict[str, str]
Spans = list[tuple[int, int]]

ROLES = ("system", "user", "assistant")
_UNSUPPORTED_KEYS = (
    "tools",
    "functions",
    "documents",
    "chat_template_kwargs",
)  # keys beside the messages that mean something


@dataclass(frozen=True)
class Conversation:
    """Messages, and the name that errors give them: the file and the line."""

    name: str
    messages: list[Message]


class ChatTemplate(Protocol):
    """What writes messages as one text."""

    def render(self, messages: Sequence[Message]) -> tuple[str, Spans]:
        """The text, and where in it the assistant's answers lie, the end of each turn included: [start, end) in
        characters.

        Raises:
          ConfigError: the template refuses the messages, or does not tell where the answers are.
        """
        ...

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text after which an answer begins."""
        ...


class PlainTemplate:
    """The template of `bytes` and `chars`: no download, no jinja2. A zero byte ends an answer, as it ends a document.

    <|user|>
    What is a lens?
    <|assistant|>
    Curved glass.\\0
    """

    def render(self, messages: Sequence[Message]) -> tuple[str, Spans]:
        text, spans = "", []
        for message in messages:
            if "\0" in message["content"]:
                raise ConfigError("a message holds a zero byte, which ends an answer here; remove it")
            text += f"<|{message['role']}|>\n"
            said = message["content"] + "\0" * (message["role"] == "assistant")
            if message["role"] == "assistant":
                spans.append((len(text), len(text) + len(said)))
            text += f"{said}\n"
        return text, spans

    def prompt(self, messages: Sequence[Message]) -> str:
        return f"{self.render(messages)[0]}<|assistant|>\n"


_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # characters that are none: no text has them


class JinjaTemplate:
    """A chat template as Hugging Face's models have them.

    Where it marks the answers by `{% generation %}`, they are what is marked. Otherwise the text up to an answer is
    rendered, and with it: the first must be how the second begins, and the second how the whole begins.

    Args:
      name: for errors.
      saved: its `source`, and the special `tokens` that it may name.

    Raises:
      ConfigError: no jinja2, or no template.
    """

    def __init__(self, name: str, saved: dict[str, Any]) -> None:
        try:
            import jinja2
            from jinja2 import ext, nodes, sandbox
        except ImportError:
            raise ConfigError(f"{name} needs the jinja2 library; install jaxstack[hf]") from None

        class Marks(ext.Extension):
            """`{% generation %}...{% endgeneration %}`"""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

            def mark(self, caller: Any) -> str:
                return f"{_OPEN}{caller()}{_CLOSE}"

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        def to_json(value: Any, **how: Any) -> str:
            return json.dumps(value, **{"ensure_ascii": False} | how)

        # As transformers sets it up, but without `strftime_now`: the data would change with the day. Templates that
        # ask whether it is defined, as Llama 3's do, have a fixed date for that.
        made = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Marks, ext.loopcontrols]
        )
        made.filters["tojson"] = to_json
        made.globals["raise_exception"] = refuse
        self._name, self._tokens = name, saved["tokens"]
        self._marks = re.search(r"\{%-?\s*generation\s*-?%\}", saved["source"]) is not None
        try:
            self._template = made.from_string(saved["source"])
        except jinja2.TemplateError as error:
            raise ConfigError(f"{name} is no template: {error}; give the model's own") from None

    def _text(self, messages: Sequence[Message], prompt: bool) -> str:
        try:
            return self._template.render(
                messages=[dict(m) for m in messages],
                add_generation_prompt=prompt,
                tools=None,
                documents=None,
                **self._tokens,
            )
        except Exception as error:  # it is a program, and may fail like one
            shown = " ".join(str(error).split()) or type(error).__name__
            roles = ", ".join(m["role"] for m in messages) or "none"
            raise ConfigError(f"{self._name} cannot write these messages ({roles}): {shown}") from None

    def render(self, messages: Sequence[Message]) -> tuple[str, Spans]:
        if any(mark in message["content"] for mark in (_OPEN, _CLOSE) for message in messages):
            raise ConfigError("a message holds U+FDD0 or U+FDD1, which are no characters; remove it")
        whole = self._text(messages, prompt=False)
        if self._marks:
            return _remove_marks(whole, self._name)
        spans = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before, after = self._text(messages[:i], prompt=True), self._text(messages[: i + 1], prompt=False)
                if not after.startswith(before) or not whole.startswith(after) or not after[len(before) :].strip():
                    raise ConfigError(
                        f"{self._name} writes the messages before the answer in message {i + 1} otherwise than it "
                        f"writes them with it, so where the answer lies is not known; mark answers in the template by "
                        f"{{% generation %}} and {{% endgeneration %}}"
                    )
                spans.append((len(before), len(before) + _answer_length(after[len(before) :], message["content"])))
        return whole, spans

    def prompt(self, messages: Sequence[Message]) -> str:
        return self._text(messages, prompt=True).replace(_OPEN, "").replace(_CLOSE, "")


def _remove_marks(text: str, name: str) -> tuple[str, Spans]:
    """The text without marks, and what lay between them."""
    plain, spans, start = "", [], None
    for piece in re.split(f"([{_OPEN}{_CLOSE}])", text):
        if piece == _OPEN and start is None:
            start = len(plain)
        elif piece == _CLOSE and start is not None:
            spans.append((start, len(plain)))
            start = None
        elif piece in (_OPEN, _CLOSE):
            raise ConfigError(f"{name} has {{% generation %}} within {{% generation %}}; mark each answer once")
        else:
            plain += piece
    return plain, spans


def _answer_length(written: str, content: str) -> int:
    """Of an answer with the end of its turn, without the white space that templates put between turns; where nothing
    else ends the turn, with it."""
    at = written.rfind(content.strip())
    end = written[at + len(content.strip()) :] if at >= 0 else written
    return len(written.rstrip()) if end.strip() else len(written)


def read_template(tokenizer: str) -> dict[str, Any] | None:
    """The chat template that lies beside a tokenizer.json, as `JinjaTemplate` takes it; None for `bytes` and `chars`.

    Raises:
      ConfigError: there is none, or it cannot be read.
    """
    if tokenizer in ("bytes", "chars"):
        return None
    folder = Path(tokenizer).parent
    settings: Any = {}
    try:
        if (folder / "tokenizer_config.json").is_file():
            settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
            if not isinstance(settings, dict):
                raise ValueError("it holds no JSON object")
        source = settings.get("chat_template")
        if (folder / "chat_template.jinja").is_file():
            source = (folder / "chat_template.jinja").read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder}: tokenizer_config.json or chat_template.jinja cannot be read: {error}; give the model's own"
        ) from None
    if isinstance(source, list):  # several, by name
        source = next((t.get("template") for t in source if isinstance(t, dict) and t.get("name") == "default"), None)
    if not isinstance(source, str):
        raise ConfigError(
            f"data.source=chat: beside data.tokenizer={tokenizer} there is neither a chat_template.jinja nor a "
            f"tokenizer_config.json with a chat_template; put the template of the model's instructed kin there"
        )
    named = {key: value for key, value in settings.items() if key.endswith("_token")}
    contents = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {"source": source, "tokens": {key: value for key, value in contents.items() if isinstance(value, str)}}


def template_for(tokenizer: Tokenizer) -> ChatTemplate:
    """The template that a run's tokenizer was saved with.

    Raises:
      ConfigError: it was saved with none.
    """
    if not isinstance(tokenizer, HFTokenizer):
        return PlainTemplate()
    if tokenizer.chat is None:
        raise ConfigError("this run knows no chat template; those that train with data.source=chat do")
    return JinjaTemplate(f"the chat template of {tokenizer.name}", tokenizer.chat)


def end_of_turn_id(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """The token that ends an answer; None: the template has none that is one token alone."""
    said = "Yes."
    text, spans = template.render([{"role": "user", "content": said}, {"role": "assistant", "content": said}])
    end = text[spans[-1][0] : spans[-1][1]].rpartition(said)[2].strip(" \n") if spans else ""
    ids = tokenizer.encode(end).tolist() if end else []
    return ids[0] if len(ids) == 1 else None


def read_conversations(path: str) -> Iterator[Conversation]:
    """The conversations of a file, one JSON object a line: `{"messages": [{"role": ..., "content": ...}, ...]}`, or
    `{"prompt": ..., "completion": ...}`, which is what a user says and an assistant answers. Empty lines are passed
    over, and so are keys beside them that say nothing about the conversation (an id, a source).

    Raises:
      ConfigError: no such file, or a line that is no conversation; names the file and the line.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"data.path={path} is no file; give a file of conversations in JSON, one a line")
    empty = True
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            name = f"{path}, line {number:,}"
            try:
                values = json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{name} is not JSON ({error}); each line is one object, in UTF-8") from None
            try:
                yield Conversation(name, _messages(values))
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
            empty = False
    if empty:
        raise ConfigError(f"data.path={path} holds no conversation; give a file with some")


def _messages(values: Any) -> list[Message]:
    if not isinstance(values, dict):
        raise ConfigError("this is no JSON object; write {\"messages\": [...]}")  # fmt: skip
    if changes := [key for key in _UNSUPPORTED_KEYS if values.get(key)]:
        raise ConfigError(f"{changes[0]} cannot be had here; write what it says into the messages")
    if "messages" not in values:
        if not {"prompt", "completion"} <= values.keys():
            shown = ", ".join(sorted(map(str, values))) or "nothing"
            raise ConfigError(f"there are neither messages nor prompt and completion, but {shown}")
        said = [("user", values["prompt"]), ("assistant", values["completion"])]
        values = {"messages": [{"role": role, "content": content} for role, content in said]}
    messages = values["messages"]
    if not isinstance(messages, list):
        raise ConfigError("messages is no list")
    for i, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            keys = ", ".join(message) if isinstance(message, dict) else type(message).__name__
            raise ConfigError(f"message {i} has {keys}; a message has role and content and nothing else")
        if message["role"] not in ROLES:
            raise ConfigError(f"message {i} has the role {message['role']!r}; the roles are {', '.join(ROLES)}")
        if not isinstance(message["content"], str):
            raise ConfigError(f"message {i} has a content that is {type(message['content']).__name__}, not text")
        if any("\ud800" <= char <= "\udfff" for char in message["content"]):
            raise ConfigError(f"message {i} holds half a character (a lone surrogate, such as \\ud800); remove it")
        if message["role"] == "assistant" and not message["content"].strip():
            raise ConfigError(f"message {i} is an empty answer; remove it, or the whole conversation")
    if not any(message["role"] == "assistant" for message in messages):
        raise ConfigError("no message is the assistant's, so there is nothing to learn; remove the conversation")
    return messages


@dataclass(frozen=True)
class RenderedConversation:
    """A conversation as text, and where its answers lie."""

    name: str
    text: str
    spans: Spans


def render_conversations(
    conversations: Iterable[Conversation], template: ChatTemplate
) -> Iterator[RenderedConversation]:
    """Each conversation as text.

    Raises:
      ConfigError: names the file and the line.
    """
    for conversation in conversations:
        try:
            text, spans = template.render(conversation.messages)
        except ConfigError as error:
            raise ConfigError(f"{conversation.name}: {error}") from None
        yield RenderedConversation(conversation.name, text, spans)


def encode_conversations(
    conversations: Iterable[RenderedConversation], tokenizer: Tokenizer, seq_len: int
) -> tuple[Tokens, str]:
    """All conversations in memory, without a separator: a template says itself how they end.

    A token is part of an answer if one of its characters is. Conversations of more than `seq_len` + 1 tokens are left
    out: cut, they would teach an answer without its question, or half of one.

    Returns:
      The tokens, and what there is to say of those left out, or nothing.

    Raises:
      ConfigError: all are too long, or one has no token to learn.
    """
    pieces, masks, names, too_long = [], [], [], []
    for one in conversations:
        ids, starts, ends = tokenizer.encode_with_offsets(one.text)
        answers = np.zeros(ids.size, bool)
        for start, end in one.spans:
            touched = np.flatnonzero((ends > start) & (starts < end))
            if touched.size:  # tokens of no width lie between
                answers[touched[0] : touched[-1] + 1] = True
        if not answers[1:].any():
            raise ConfigError(f"{one.name}: as the template writes it, no token is an answer's; remove the line")
        if ids.size > seq_len + 1:
            too_long.append(ids.size)
            continue
        pieces.append(ids)
        masks.append(answers)
        names.append(one.name)
    said = ""
    if too_long:
        longest = f"the longest has {max(too_long):,} tokens"
        if not pieces:
            raise ConfigError(f"none of {len(too_long):,} conversations fits into data.seq_len={seq_len}; {longest}")
        said = f"{len(too_long):,} left out, longer than data.seq_len={seq_len} ({longest})"
    bounds = np.cumsum([0, *(piece.size for piece in pieces)], dtype=np.int64)
    ids = np.concatenate(pieces).astype(id_dtype(tokenizer.vocab_size), copy=False)
    tokens = Tokens(ids, bounds[:-1], bounds[1:], tokenizer.vocab_size, tuple(names), loss_mask=np.concatenate(masks))
    return tokens, said
