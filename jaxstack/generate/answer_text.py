"""The text of an answer, as its tokens come: what is certain, up to a stop string."""

from collections.abc import Collection, Sequence

from jaxstack.data import Tokenizer
from jaxstack.data.text_stream import TextStream, count_held, first_stop
from jaxstack.data.tokenizers import HFTokenizer

_SEEN = 16
"""Number of tokens of the prompt with which the first new ones are decoded: a space or a character may depend on it."""


class AnswerText:
    """The text that tokens add to a prompt. It ends before the first stop string, or before a token that ends it.

    Text that later tokens may change is held back: bytes of a character that is not complete, and the beginning of a
    stop string. The text does not depend on how its tokens are divided into calls.

    Attributes:
      tokens: number of tokens of the text, including the tokens that ended it.
      finish_reason: `stop` if a stop string or a token has ended it, else empty.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        *,
        end: Collection[int] = (),
        stop: Sequence[str] = (),
        skip_special_tokens: bool = False,
    ) -> None:
        """Begins an answer.

        Args:
          prompt: ids of the prompt. Empty means that the answer is decoded alone, as in a chat.
          end: tokens that end the answer.
          stop: strings that end the answer.
          skip_special_tokens: whether to leave out special tokens of the tokenizer.
        """
        self.tokens = 0
        self.finish_reason = ""
        self._stop = tuple(stop)
        self._end = {*end}
        skipped = tokenizer.special_ids if skip_special_tokens and isinstance(tokenizer, HFTokenizer) else frozenset()
        self._skipped_ids = skipped - self._end
        self._stream = TextStream(tokenizer, "", end=end)
        seen = [*prompt[-_SEEN:]]
        while any(token in self._end or token == tokenizer.eos_id for token in seen):
            seen.pop(0)  # what follows the end of a document does not depend on it
        self._stream.add(seen)
        self._skip = len(self._stream.text.rstrip("\ufffd"))  # a character that is not complete is the answer's
        self._text = ""
        self._sent = 0

    def add(self, tokens: Sequence[int], *, last: bool) -> str:
        """Returns the text that is certain after some more tokens, beyond what was returned before.

        Args:
          tokens: the new ids.
          last: whether these are the last tokens.
        """
        steps = [[token] for token in tokens] if self._stop else [list(tokens)]
        for i, step in enumerate(steps):
            if self.finish_reason:
                break
            self._add(step, last and i == len(steps) - 1)
        held = 0 if last or self.finish_reason else count_held(self._text[self._sent :], self._stop)
        piece = self._text[self._sent : len(self._text) - held]
        self._sent += len(piece)
        return piece

    def _add(self, tokens: list[int], last: bool) -> None:
        self._stream.add([token for token in tokens if token not in self._skipped_ids])
        self.tokens += len(tokens)
        ended = any(token in self._end for token in tokens)
        piece = self._stream.take(all=last or ended)
        skipped = min(self._skip, len(piece))
        self._skip -= skipped
        self._text += piece[skipped:]
        if ended:
            self.finish_reason = "stop"
        found = first_stop(self._text, self._stop)
        if found is not None:
            self._text = self._text[:found]
            self.finish_reason = "stop"
