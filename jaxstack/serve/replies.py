"""Renders texts in OpenAI's format, whole or in the chunks of a stream."""

import time
import uuid
from collections.abc import Sequence
from typing import NamedTuple

from jaxstack.data import Tokenizer
from jaxstack.generate.sampling import Logprobs
from jaxstack.serve.requests import JsonValue, TextRequest


class Piece(NamedTuple):
    """What is new in a text.

    Attributes:
      place: number of the text in its request.
      text: the new text. It may be empty, since what is not certain comes later.
      tokens: ids of the new tokens.
      logprobs: log-probabilities of the new tokens, if they are wanted.
      finish_reason: why the text ends with this piece: `stop`, `length`, or empty if it does not end.
      of_prompt: whether the tokens belong to the prompt. Its first token has no log-probability.
    """

    place: int
    text: str
    tokens: list[int]
    logprobs: Logprobs | None
    finish_reason: str
    of_prompt: bool = False


class Usage(NamedTuple):
    """Numbers of tokens of a request: of its prompts, of its texts, and of the prompts that the cache had."""

    prompt: int
    completion: int
    cached: int

    def to_json(self) -> JsonValue:
        """Returns the numbers in OpenAI's format."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Reply:
    """The JSON objects that answer a request."""

    def __init__(self, asked: TextRequest, model: str, tokenizer: Tokenizer) -> None:
        """Begins the answer to a request.

        Args:
          model: name of the model.
        """
        self._asked = asked
        self._tokenizer = tokenizer
        kind = "chat.completion" if asked.chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if asked.chat and asked.stream else kind,
            "created": int(time.time()),
            "model": model,
        }
        self._offsets = [len(self.echo(i)) for i in range(len(asked.prompts) * asked.count)]
        self._begun: set[int] = set()

    def echo(self, index: int) -> str:
        """Returns what precedes a text: its prompt, if that is wanted."""
        return self._asked.echoes[index // self._asked.count]

    def whole(self, texts: Sequence[Sequence[Piece]], usage: Usage) -> JsonValue:
        """Returns all texts, given the pieces of each."""
        choices = []
        for pieces in texts:
            choice = self._choice(pieces)
            content = "".join(piece.text for piece in pieces)
            if self._asked.chat:
                choice["message"] = {"role": "assistant", "content": content, "refusal": None}
            else:
                choice["text"] = self.echo(pieces[0].place) + content
            choices.append(choice)
        return self._head | {"choices": choices, "usage": usage.to_json()}

    def chunk(self, piece: Piece) -> JsonValue:
        """Returns what is new in a text of a stream."""
        choice = self._choice([piece])
        first = piece.place not in self._begun
        self._begun.add(piece.place)
        if self._asked.chat:
            role = {"role": "assistant"} if first else {}
            choice["delta"] = role | ({"content": piece.text} if piece.text or first else {})
        else:
            choice["text"] = (self.echo(piece.place) if first else "") + piece.text
        return self._head | {"choices": [choice]} | ({"usage": None} if self._asked.usage else {})

    def usage(self, usage: Usage) -> JsonValue:
        """Returns the last chunk of a stream, which has the numbers of tokens."""
        return self._head | {"choices": [], "usage": usage.to_json()}

    def _choice(self, pieces: Sequence[Piece]) -> dict[str, JsonValue]:
        scores: JsonValue = None
        if self._asked.logprobs is not None:
            parts = [self._chat_scores(piece) if self._asked.chat else self._scores(piece) for piece in pieces]
            scores = {name: [one for part in parts for one in part[name]] for name in parts[0]}
            scores |= {"refusal": None} if self._asked.chat else {}
        return {"index": pieces[0].place, "logprobs": scores, "finish_reason": pieces[-1].finish_reason or None}

    def _scores(self, piece: Piece) -> dict[str, list[JsonValue]]:
        names = [self._name(token) for token in piece.tokens]
        offset = 0 if piece.of_prompt else self._offsets[piece.place]
        offsets = []
        for name in names:
            offsets.append(offset)
            if not (piece.of_prompt and not offset and not self.echo(piece.place).startswith(name)):  # such as BOS
                offset += len(name)
        if not piece.of_prompt:
            self._offsets[piece.place] = offset
        rows = self._rows(piece)
        nothing = [None] * (len(names) - len(rows))  # for the first token of a prompt, which has nothing before it
        scored = zip(names[len(nothing) :], rows, strict=True)
        return {
            "tokens": names,
            "token_logprobs": [*nothing, *(chosen for chosen, _ in rows)],
            "top_logprobs": [*nothing, *(self._likeliest(name, *row) for name, row in scored)],
            "text_offset": offsets,
        }

    def _likeliest(self, name: str, chosen: float, top: list[tuple[int, float]]) -> dict[str, float]:
        """Returns the log-probabilities of the likeliest tokens and of the chosen one, as OpenAI's server does.

        Of tokens with the same text, the likeliest counts.
        """
        values: dict[str, float] = {}
        for token, value in top:
            values.setdefault(self._name(token), value)
        values.setdefault(name, chosen)
        return values

    def _chat_scores(self, piece: Piece) -> dict[str, list[JsonValue]]:
        def one(token: int, value: float) -> dict[str, JsonValue]:
            data = self._tokenizer.to_bytes([token])[0].tolist()
            return {"token": self._name(token), "logprob": value, "bytes": data or None}

        rows = zip(piece.tokens, self._rows(piece), strict=True)
        content = [one(token, chosen) | {"top_logprobs": [one(*t) for t in top]} for token, (chosen, top) in rows]
        return {"content": content}

    def _name(self, token: int) -> str:
        """Returns the text of a token. One that is a part of a character shows its bytes, as OpenAI's does."""
        text = self._tokenizer.decode([token])
        data = self._tokenizer.to_bytes([token])[0].tolist() if "\ufffd" in text else []
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data) if data else text

    def _rows(self, piece: Piece) -> list[tuple[float, list[tuple[int, float]]]]:
        """Returns for each token its log-probability, and the most probable tokens with theirs."""
        count = self._asked.logprobs
        rows = []
        if piece.logprobs is not None:
            for chosen, ids, values in zip(*piece.logprobs, strict=True):
                top = zip(ids[:count].tolist(), values[:count].tolist(), strict=True)
                rows.append((max(float(chosen), _LEAST), [(token, max(value, _LEAST)) for token, value in top]))
        return rows


_LEAST = -9999.0
"""What stands for minus infinity, which JSON does not have; OpenAI's servers send it, too."""
