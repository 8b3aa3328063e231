"""Completions of several turns: the model calls a tool, reads the result, and continues.

Each turn is a call of the trainer's sampler. The result of the tool is the next message, in the chat template. Its
tokens are in the row, and no loss reads them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jaxstack.config import ConfigError
from jaxstack.config.training import RLConfig
from jaxstack.data import Tokenizer, chat
from jaxstack.data.conversations import Message
from jaxstack.data.rewarded import RewardedPrompt
from jaxstack.generate.prompts import Rows
from jaxstack.posttrain import rewards, tasks
from jaxstack.posttrain.tasks import Tool

_SAID: list[Message] = [{"role": "user", "content": "Yes."}, {"role": "assistant", "content": "Yes."}]


class Completion(NamedTuple):
    """A completion of a prompt.

    Attributes:
      tokens: its ids, with the token that ends it.
      old_log_probs: log-probability of each token under the trainer's forward pass, float32 [tokens].
      log_probs: the same under the sampler; equal to them if it is exact.
      redrafted: number of tokens that the forward pass has chosen in place of drafts.
      learned: whether each token was sampled, bool [tokens]; a tool's results were not. `None` means that all were.
    """

    tokens: list[int]
    old_log_probs: np.ndarray
    log_probs: np.ndarray
    redrafted: int = 0
    learned: np.ndarray | None = None

    @property
    def mask(self) -> np.ndarray:
        """`learned` as an array, bool [tokens]."""
        return np.ones(len(self.tokens), bool) if self.learned is None else self.learned

    @property
    def turns(self) -> int:
        """Number of turns."""
        mask = self.mask
        return 1 + int((mask[1:] & ~mask[:-1]).sum())


class Answer(NamedTuple):
    """A completion, and the tokens of its last turn, which rewards read."""

    completion: Completion
    last: list[int]


Sample = Callable[[Rows, int], list[Completion]]
"""Returns a completion of each prompt, given a seed."""


@dataclass(frozen=True)
class Turns:
    """Lets completions call a tool.

    Attributes:
      name: name of the tool, in error messages.
      tool: returns the result of a call, or `None` if a text is not a call. It gives the same result to the same text.
      most: maximum number of turns.
      tokens: maximum number of tokens of a turn.
      tokenizer: tokenizer of the run.
      stop: tokens that end a turn.
    """

    name: str
    tool: Tool
    most: int
    tokens: int
    tokenizer: Tokenizer
    stop: tuple[int, ...]

    def sample(
        self, sample: Sample, rows: Sequence[RewardedPrompt], prompts: Rows, seed: int, longest: int
    ) -> list[Answer]:
        """Returns a completion of each prompt. It ends with an answer that calls no tool, or where no turn is left.

        Args:
          sample: samples a turn.
          rows: rows of the data with the prompts, for error messages.
          prompts: ids of the prompts.
          seed: seed of sampling.
          longest: number of positions of a row, which ends a completion without room for another turn.

        Raises:
          ConfigError: the tool raises an error or returns something other than a text; or see `between`.
        """
        texts = [[*prompt] for prompt in prompts]
        pieces: list[list[Completion]] = [[] for _ in prompts]
        calling = list(range(len(prompts)))
        for turn in range(self.most):
            own = seed if not turn else int(np.random.SeedSequence((seed, turn)).generate_state(1)[0])
            new = sample([texts[i] for i in calling], own) if calling else []
            unfinished = []
            for i, piece in zip(calling, new, strict=True):
                texts[i] += piece.tokens
                pieces[i].append(piece)
                result = self._result(rows[i], piece.tokens) if turn + 1 < self.most else None
                if result is not None and len(texts[i]) + len(result) + self.tokens - 1 <= longest:
                    texts[i] += result
                    unknown = np.zeros(len(result), np.float32)
                    pieces[i].append(Completion(result, unknown, unknown, 0, unknown > 0))
                    unfinished.append(i)
            calling = unfinished
        return [Answer(_joined(own), own[-1].tokens) for own in pieces]

    def _result(self, row: RewardedPrompt, tokens: list[int]) -> list[int] | None:
        """Returns the ids between a turn and the next one, or `None` if the turn calls no tool."""
        if tokens[-1] not in self.stop:
            return None
        text = self.tokenizer.decode(tokens[:-1])
        try:
            result = self.tool(text)
        except Exception as error:
            raise ConfigError(
                f"rl.tool={self.name} raised {type(error).__name__}: {error} for {row.name} and the text "
                f"{text[:80]!r}. Return a text, or None where nothing is called."
            ) from error
        if result is None:
            return None
        if not isinstance(result, str):
            raise ConfigError(
                f"rl.tool={self.name} returned {type(result).__name__} for {row.name} and the text {text[:80]!r}. "
                f"Return a text, or None where nothing is called."
            )
        return self.between(result)

    def between(self, result: str) -> list[int]:
        """Returns the ids that follow the end of a turn: the result as a message of the user, and the next beginning.

        Raises:
          ConfigError: the chat template does not render it behind the end of a turn.
        """
        before = self._template.prompt(_SAID[:1]) + _SAID[1]["content"]
        after = self._template.prompt([*_SAID, {"role": "user", "content": result}])
        ids = self.tokenizer.encode(after[len(before) :]).tolist()
        if not after.startswith(before) or not ids or ids[0] not in self.stop:
            raise ConfigError(
                f"rl.turns={self.most} needs a chat template that continues after an answer, but the template of "
                f"data.tokenizer={self.tokenizer.name} renders an answer differently when a message follows. Use "
                f"rl.turns=1, or another template."
            )
        return ids[1:]  # the turn has its end already

    @cached_property
    def _template(self) -> chat.ChatTemplate:
        return chat.template_for(self.tokenizer)


def open_turns(rl: RLConfig, path: str, tokenizer: Tokenizer, stop: tuple[int, ...]) -> Turns | None:
    """Returns what continues completions after calls of `rl.tool`, or of the task's tool; `None` with one turn.

    Args:
      path: `data.path`, which may name a task.
      stop: tokens that end a turn.

    Raises:
      ConfigError: there is no tool, or the chat template cannot continue.
    """
    if rl.turns == 1:
        return None
    tool: Tool | None
    if rl.tool is not None:
        name = rl.tool
        tool = rewards.find_function("rl.tool", name)
    else:
        name = path
        tool = tasks.find(path)[0].tool if path.startswith(tasks.PREFIX) else None
    if tool is None:
        raise ConfigError(
            f"rl.turns={rl.turns}, but data.path={path} has no tool. Name a function, such as "
            f"--rl.tool=tools.py:calculate, or use rl.turns=1."
        )
    turns = Turns(name, tool, rl.turns, rl.tokens, tokenizer, stop)
    turns.between("1")
    return turns


def _joined(pieces: Sequence[Completion]) -> Completion:
    """Returns turns and the results between them as one completion."""
    tokens = [token for piece in pieces for token in piece.tokens]
    old, log_probs, mask = (
        np.concatenate([getattr(piece, name) for piece in pieces]) for name in ("old_log_probs", "log_probs", "mask")
    )
    return Completion(tokens, old, log_probs, sum(piece.redrafted for piece in pieces), mask)
