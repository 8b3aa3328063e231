"""Tasks on the parts of a window, beside hidden tokens: BERT's next sentence, ERNIE's sentence distance and reordering.

A window is cut into parts of equal length, which stand for sentences. The tasks are from Devlin et al. 2018
(arXiv:1810.04805, section 3.1) and from Sun et al. 2019 (ERNIE 2.0, arXiv:1907.12412, section 4.2.2). Which task a
window has, and what it reads, depends on the seed and the number of its row in the run alone.

A window with a task has other text than what it was cut from: special tokens take the place of some, and the second
half of a pair may come from anywhere. So an epoch need not have each token exactly once.
"""

import math
from dataclasses import dataclass

import numpy as np

from jaxstack.common.counts import plural
from jaxstack.config import ConfigError
from jaxstack.config.sentences import SentencesConfig, SentenceTask
from jaxstack.data.token_stream import TokenStream
from jaxstack.data.tokenizers import Tokenizer

Batch = dict[str, np.ndarray]

_STREAM = 4  # keeps these draws apart from others, which are seeded with other lists
_SPECIAL = -1  # in place of an offset: a special token

NEIGHBOURS, ONE_DOCUMENT, TWO_DOCUMENTS = range(3)
"""The answers of the task `distance`. Those of `next` are `NEIGHBOURS`, and 1 for anything else."""


@dataclass(frozen=True)
class SentenceTasks:
    """Rearranges windows of text, and says what the tasks have to find out about them.

    Attributes:
      cfg: the tasks.
      seq_len: S, the tokens of a window.
      windows: number of the first windows of a row that have tasks; a row has them one after the other.
      before: special tokens before a window, such as [CLS].
      after: special tokens after a window, and between the halves of a pair, such as [SEP].
      has_types: whether batches have `token_types`.
    """

    cfg: SentencesConfig
    seq_len: int
    windows: int = 1
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    has_types: bool = False

    @classmethod
    def of(
        cls, cfg: SentencesConfig, seq_len: int, windows: int, tokenizer: Tokenizer | None, token_types: int
    ) -> "SentenceTasks | None":
        """Returns the tasks of a run, or `None` if it has none.

        Raises:
          ConfigError: the special tokens leave no room for a text.
        """
        if not cfg.tasks:
            return None
        before = () if tokenizer is None else tokenizer.before
        after = () if tokenizer is None else tokenizer.after
        room = seq_len - len(before) - 2 * len(after)
        if room < 2 * cfg.parts:
            raise ConfigError(
                f"data.seq_len={seq_len} leaves room for {plural(max(room, 0), 'token')} of text beside the special "
                f"ones, which model.sentences.tasks={list(cfg.tasks)} cuts into parts. Raise data.seq_len."
            )
        return cls(cfg, seq_len, windows, before, after, token_types > 1)

    def require_text(self, stream: TokenStream, where: str) -> None:
        """Makes sure that a text has every answer.

        Args:
          stream: the text; each of its pieces is a document.
          where: `to train on`, or `held out`.

        Raises:
          ConfigError: it is too short, or has one document only.
        """
        shown = f"model.sentences.tasks={list(self.cfg.tasks)}"
        needed = 4 * self.seq_len
        if len(stream) < needed:
            raise ConfigError(
                f"{shown} needs {plural(needed, 'token', spec=',')} of text, four windows, but there are "
                f"{len(stream):,} {where}. Use more text, or lower data.seq_len."
            )
        if "distance" in self.cfg.tasks and stream.starts_P.size < 2:
            raise ConfigError(
                f"{shown} tells one document from two, but the text has one document only ({where}). Use a text with "
                f"more documents, or --model.sentences.tasks=[next,reordering]."
            )

    def apply(self, batch: Batch, stream: TokenStream, first_B: np.ndarray, rows_B: np.ndarray, seed: int) -> Batch:
        """Returns a batch whose windows are rearranged, with the answers of each task.

        New arrays are, for each task, `<task>_targets`, int32, and `<task>_weights`, float32, which is 1 at the first
        token of a window with the task; and `token_types`, int32, which is 1 in the second half of a pair. They have
        the shape of `tokens`. The arrays `targets` and `loss_weights` stay as they are.

        Args:
          stream: the text; each of its pieces is a document.
          first_B: offset in the stream of the first token of each row.
          rows_B: number of each row in the run.
        """
        tokens = batch["tokens"].copy()
        S = self.seq_len
        targets = {task: np.zeros(tokens.shape, np.int32) for task in self.cfg.tasks}
        weights = {task: np.zeros(tokens.shape, np.float32) for task in self.cfg.tasks}
        types = np.zeros(tokens.shape, np.int32)
        for row, (first, number) in enumerate(zip(first_B.tolist(), rows_B.tolist(), strict=True)):
            rng = np.random.default_rng([seed, number, _STREAM])
            for start in range(0, self.windows * S, S):
                task = self.cfg.tasks[rng.integers(len(self.cfg.tasks))]
                begin = min((first + start) % len(stream), len(stream) - S)  # the last rows of an epoch continue there
                if task == "reordering":
                    at, answer = self._reorder(begin, rng)
                else:
                    at, answer, second = self._pair(task, stream, begin, rng)
                    types[row, start + second : start + S] = 1
                tokens[row, start : start + S] = self._ids(stream, at)
                targets[task][row, start] = answer
                weights[task][row, start] = 1
        made: Batch = {f"{task}_targets": each for task, each in targets.items()}
        made |= {f"{task}_weights": each for task, each in weights.items()}
        return batch | {"tokens": tokens} | made | ({"token_types": types} if self.has_types else {})

    def _ids(self, stream: TokenStream, at_S: np.ndarray) -> np.ndarray:
        """Returns the ids of a window, whose special tokens have no offset."""
        special = at_S == _SPECIAL
        ids = stream.ids_at(np.where(special, 0, at_S)).astype(np.int32)
        pairs = (special.sum() - len(self.before)) // max(len(self.after), 1)
        ids[special] = [*self.before, *self.after * int(pairs)]
        return ids

    def _reorder(self, first: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
        """Returns a text in parts that change places, as offsets of its tokens, and the number of the order.

        The orders of one part come first, then the orders of two parts, and so on, each in lexicographic order.
        """
        before, after = (np.full(len(each), _SPECIAL) for each in (self.before, self.after))
        text = first + np.arange(self.seq_len - before.size - after.size)
        count = int(rng.integers(1, self.cfg.parts + 1))
        order = rng.permutation(count).tolist()
        parts = np.array_split(text, count)
        answer = sum(math.factorial(fewer) for fewer in range(1, count))
        answer += sum(
            math.factorial(count - 1 - i) * sum(later < part for later in order[i + 1 :])
            for i, part in enumerate(order)
        )
        return np.concatenate([before, *(parts[part] for part in order), after]), answer

    def _pair(
        self, task: SentenceTask, stream: TokenStream, first: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, int, int]:
        """Returns two texts as offsets of their tokens, the answer, and the place of the second one in the window."""
        before, after = (np.full(len(each), _SPECIAL) for each in (self.before, self.after))
        text = self.seq_len - before.size - 2 * after.size
        size = text // 2
        end = first + text - size
        found = places(stream, first, end, size)
        if task == "next":
            apart = TWO_DOCUMENTS if found[TWO_DOCUMENTS] else ONE_DOCUMENT
            answer = int(rng.integers(2))
            kind = apart if answer else NEIGHBOURS
        else:
            possible = [kind for kind, ranges in enumerate(found) if ranges]
            answer = kind = possible[rng.integers(len(possible))]
        draw = int(rng.integers(sum(last - least + 1 for least, last in found[kind])))
        for least, last in found[kind]:
            if draw <= last - least:
                second = least + draw
                break
            draw -= last - least + 1
        parts = [before, np.arange(first, end), after, second + np.arange(size), after]
        return np.concatenate(parts), answer, self.seq_len - size - after.size


def places(stream: TokenStream, first: int, end: int, size: int) -> list[list[tuple[int, int]]]:
    """Returns where a second text may begin, for each answer of the task `distance`, as ranges from first to last.

    The last token of the first text decides which document it is of. Texts of one document have `size` tokens or more
    between them.

    Args:
      stream: the text; each of its pieces is a document.
      first: offset of the first token of the first text.
      end: offset behind its last token.
    """
    document = int(stream.pieces(np.array(end - 1)))
    begins = int(stream.bounds_P[document])
    ends = int(stream.bounds_P[document + 1])
    ranges = [
        [(end, end)],
        [(begins, first - 2 * size), (end + size, ends - size)],
        [(0, begins - size), (ends, len(stream) - size)],
    ]
    return [[(least, last) for least, last in each if least <= last] for each in ranges]
