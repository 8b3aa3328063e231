"""Converts token ids to text as they come."""

from collections.abc import Collection, Sequence

from jaxstack.data.tokenizers import HFTokenizer, Tokenizer, missing_before

_INCOMPLETE = "\ufffd"


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Returns where the first of some strings begins in a text, or `None` if the text has none of them."""
    return min((at for at in (text.find(word) for word in stop) if at >= 0), default=None)


def count_held(text: str, stop: Sequence[str]) -> int:
    """Returns the length of the longest end of a text with which one of some strings begins."""
    longest = max((len(word) for word in stop), default=1) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((n for n in lengths if any(word.startswith(text[-n:]) for word in stop)), 0)


class TextStream:
    """The text of a prompt and of the tokens that are added to it, up to the end of the document.

    `take` returns it in pieces. What later tokens may change is held back: the bytes of a character that is not
    complete, and the beginning of a string that would end the text.

    Attributes:
      prompt: ids of the prompt, after those that the tokenizer puts before a text. The text does not show these.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: str, *, end: Collection[int] = (), stop: Sequence[str] = ()
    ) -> None:
        """Begins a text.

        Args:
          end: tokens that end the text and do not belong to it, besides the end of a document.
          stop: strings that end the text and do not belong to it. They are also found in the prompt.
        """
        ids: list[int] = tokenizer.encode(prompt).tolist()
        self.prompt = [*missing_before(tokenizer, ids), *ids]
        self._tokenizer = tokenizer
        self._end = {*end, *tokenizer.stop_ids}
        self._stop = stop
        self._ids: list[int] = []
        self._ended = False
        self._taken = ""
        self.add(ids)

    @property
    def text(self) -> str:
        """The complete text so far."""
        text = self._tokenizer.decode(self._ids)
        return text[: first_stop(text, self._stop)]

    @property
    def ended(self) -> bool:
        """Whether a token or a string has ended the text."""
        return self._ended or first_stop(self._tokenizer.decode(self._ids), self._stop) is not None

    def add(self, ids: Sequence[int]) -> None:
        """Adds tokens; those after the end of the text are ignored."""
        for token in ids:
            self._ended = self._ended or token in self._end
            if not self._ended:
                self._ids.append(token)

    def take(self, *, all: bool = False) -> str:
        """Returns what was not returned before.

        Args:
          all: whether to return what is held back, too. No tokens can be added afterwards.
        """
        text = self.text
        if not all and not self.ended:
            text = self._tokenizer.decode(self._settled()).rstrip(_INCOMPLETE)
            text = text[: len(text) - count_held(text, self._stop)]
        if not text.startswith(self._taken):  # a decoder that changes earlier text
            return f"\n{text}" if all else ""
        piece = text[len(self._taken) :]
        self._taken = text
        return piece

    def _settled(self) -> list[int]:
        """Returns the ids without the last ones that represent single bytes, which are decoded as one group."""
        single = self._tokenizer.byte_ids if isinstance(self._tokenizer, HFTokenizer) else frozenset()
        count = len(self._ids)
        while count and self._ids[count - 1] in single:
            count -= 1
        return self._ids[:count]
