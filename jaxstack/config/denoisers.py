"""Rules that hide spans of a text, and the lengths that follow from them: span corruption and mixtures of denoisers.

Lengths follow T5 (Raffel et al. 2019, arXiv:1910.10683, section 3.1.4): a row of 512 inputs is made of 568 tokens
of text, and has 114 targets.
"""

from dataclasses import dataclass
from typing import Annotated

from jaxstack.common.counts import plural
from jaxstack.config.bounds import Interval, PositiveFloat, ShortRepr, check_bounds, require


@dataclass(frozen=True, repr=False)
class DenoiserConfig(ShortRepr):
    """One denoiser: how much of a text is hidden, and how long the hidden spans are."""

    rate: Annotated[float, Interval(0, 1, low_open=True, high_open=True)] = 0.15
    """Share of the tokens that are hidden."""
    span: Annotated[float, Interval(1)] | None = 3.0
    """Mean length of a span in tokens. Null means that one span is hidden, at the end of the text."""
    mode: str | None = None
    """Token that is put before the inputs, such as `[R]`. It is added to the tokenizer if necessary. Null means
    none."""
    weight: PositiveFloat = 1.0
    """Share of the rows, relative to the weights of the other denoisers."""

    def __post_init__(self) -> None:
        check_bounds("data.denoisers", self)

    def counts(self, length: int) -> tuple[int, int]:
        """Returns how many tokens of a text of `length` >= 2 tokens are hidden, and in how many spans."""
        hidden = min(max(round(length * self.rate), 1), length - 1)
        spans = 1 if self.span is None else max(round(hidden / self.span), 1)
        return hidden, min(spans, length - hidden + 1)  # spans do not touch each other

    def lengths(self, length: int) -> tuple[int, int]:
        """Returns the number of inputs and of targets of a text of `length` tokens, sentinels and ends included."""
        hidden, spans = self.counts(length)
        return length - hidden + spans + 1 + (self.mode is not None), hidden + spans + 1

    def text_length(self, seq_len: int, target_len: int | None = None) -> int:
        """Returns the largest number of tokens of a text whose inputs and targets fit into a row.

        Args:
          seq_len: inputs of a row.
          target_len: targets of a row. `None` means as many as the inputs need.

        Raises:
          ConfigError: a row is too short for a span.
        """

        def fits(length: int) -> bool:
            inputs, targets = self.lengths(length)
            return inputs <= seq_len and targets <= (target_len or targets)

        length = 2
        while fits(length + 1):
            length += 1
        hidden = self.counts(length)[0]
        rows = f"data.seq_len={seq_len}" + (f" and data.target_len={target_len}" if target_len else "")
        require(
            fits(length) and hidden >= (self.span or 1),
            f"data.denoisers: {self} does not fit {rows}: it hides {plural(hidden, 'token')} of a row. Use longer "
            f"rows, or shorter spans.",
        )
        return length
