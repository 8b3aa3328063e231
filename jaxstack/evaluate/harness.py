"""The interface of `lm-eval` to a run: it scores and continues what tasks ask for.

Lengths are handled as by the model class `hf` of `lm-eval`: the longest texts come first, what exceeds the context is
cut off at the left, and rolling windows do not overlap.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs

from jaxstack.common.counts import plural
from jaxstack.config import ConfigError, SampleConfig
from jaxstack.data import chat
from jaxstack.evaluate import text
from jaxstack.generate.answer_text import AnswerText
from jaxstack.generate.continuous import ContinuousBatch, Prompt
from jaxstack.generate.prompts import Rows, row_seeds
from jaxstack.loaded.trained_run import TrainedRun

MAX_TOKENS = 256
"""Number of tokens of an answer, at most, where a task does not say it; half of the context if that is less."""

_CHOICES = ("temperature", "top_k", "top_p", "min_p")
_READ = {"until", "do_sample", "max_gen_toks", *_CHOICES}


class RunModel(TemplateLM):
    """A run that answers the requests of tasks.

    Attributes:
      run: the model.
      context: number of tokens that it reads at once.
      rows: number of texts in a call.
      template: chat template, for tasks that are put as messages.
      truncated: number of texts that were cut off at the left so far.
    """

    def __init__(
        self,
        run: TrainedRun,
        *,
        context: int,
        rows: int,
        template: chat.ChatTemplate | None = None,
        progress: Callable[[int, int], None] = lambda done, whole: None,
    ) -> None:
        """Makes the model.

        Args:
          context: see the class.
          rows: see the class.
          template: see the class.
          progress: is called with the number of requests that are done, and of all of their kind.
        """
        super().__init__()
        self.run = run
        self.context = context
        self.rows = rows
        self.template = template
        self.truncated = 0
        self._tokenizer = run.tokenizer
        self._progress = progress
        self._before = [*self._tokenizer.before]

    @property
    def eot_token_id(self) -> int:
        """The token before a text without a context."""
        first = text.first_token(self._tokenizer)
        if first is None:
            raise ConfigError(
                f"a task has texts without a context, and the tokenizer {self._tokenizer.name} has no token to put "
                f"before them. Use a run whose tokenizer marks the end of a document."
            )
        return first

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokenizer."""
        return self._tokenizer.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        """Returns the ids of a text, after the tokens that the tokenizer puts before a text.

        Args:
          add_special_tokens: whether these tokens are added. `None` means unless the text has them already.
          **options: are not read.
        """
        ids = self._tokenizer.encode(string).tolist()
        framed = ids[: len(self._before)] == self._before
        wanted = not framed if add_special_tokens is None else add_special_tokens
        return [*self._before, *ids] if wanted else ids

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Returns the log-likelihood of each continuation, and whether it is the greedy one."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **options: Any
    ) -> list[tuple[float, bool]]:
        texts = []
        counts = []
        for _, context, continuation in requests:
            if not 0 < len(continuation) <= self.context:
                raise ConfigError(
                    f"a task has an answer of {plural(len(continuation), 'token')}, and the context has "
                    f"{self.context}. Use a larger --context."
                )
            self.truncated += len(context) + len(continuation) > self.context + 1
            texts.append((context + continuation)[-(self.context + 1) :])
            counts.append(len(continuation))
        return self._score(texts, counts)

    def _score(self, texts: Rows, counts: Sequence[int]) -> list[tuple[float, bool]]:
        """Returns the log-likelihood of the last tokens of each text, and whether they are the greedy ones."""
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(texts)
        for done, (i, found) in enumerate(self.run.scorer.scores(texts, self.rows) if texts else (), start=1):
            answers[i] = math.fsum(found.log_probs[-counts[i] :]), bool(found.greedy[-counts[i] :].all())
            self._progress(done, len(texts))
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Returns the log-likelihood of each text, by windows that do not overlap."""
        parts: list[list[text.Window]] = []
        for request in requests:
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            parts.append(text.windows([self.eot_token_id, *ids], self.context, 0))
        every = [window for windows in parts for window in windows]
        found = iter(self._score([window.tokens for window in every], [window.scored for window in every]))
        return [math.fsum(next(found)[0] for _ in windows) for windows in parts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Returns the continuation of each context, up to the first of its stop strings."""
        end = self._tokenizer.stop_ids
        turn = chat.end_of_turn(self.template, self._tokenizer)
        end += turn.tokens
        wanted = [self._prompt(*request.args) for request in requests]
        prompts = [ids for ids, _, _ in wanted]
        texts = [AnswerText(self._tokenizer, ids, end=end, stop=[*stops, *turn.texts]) for ids, _, stops in wanted]
        engine = self.run.engine(self.run.config.sample.domain)
        batch = ContinuousBatch(engine, rows=min(self.rows, len(texts)), slots=self.context, stop=end)
        for i, ((ids, sample, _), mark) in enumerate(zip(wanted, row_seeds(prompts), strict=True)):
            batch.add(Prompt(i, ids, sample, mark, self.run.config.run.seed % 2**32))
        answers = [""] * len(texts)
        done = 0
        while batch.busy:
            for part in batch.advance():
                answers[part.name] += texts[part.name].add(part.tokens, last=part.ended)
                if texts[part.name].finish_reason and not part.ended:
                    batch.remove(part.name)
                if texts[part.name].finish_reason or part.ended:
                    done += 1
                    self._progress(done, len(texts))
        return answers

    def _prompt(self, context: str, given: dict[str, Any]) -> tuple[list[int], SampleConfig, list[str]]:
        """Returns the ids of a prompt, how its tokens are chosen, and its stop strings."""
        options = dict(normalize_gen_kwargs(given, min(MAX_TOKENS, self.context // 2)))
        if unknown := sorted(options.keys() - _READ):
            raise ConfigError(
                f"a task sets generation_kwargs.{unknown[0]}, which generation does not have here. Use "
                f"{', '.join(sorted(_READ))}."
            )
        tokens = int(options["max_gen_toks"])
        if not 0 < tokens < self.context:
            raise ConfigError(
                f"a task asks for {plural(tokens, 'token')}, and the context has {self.context}. Use a larger "
                f"--context."
            )
        chosen = {name: options[name] for name in _CHOICES if name in options}
        if not options["do_sample"]:
            chosen = {"temperature": 0.0}
        plain = SampleConfig(tokens=tokens, prompts=None)
        ids = self.tok_encode(context)
        self.truncated += len(ids) > self.context - tokens
        ids = ids[-(self.context - tokens) :]
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        if not ids:
            ids = [self.eot_token_id]
        return ids, replace(plain, **chosen), [word for word in stops if word]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns messages in the chat template; without a prompt for an answer, up to the end of the last message."""
        assert self.template is not None
        messages: list[Any] = chat_history
        if add_generation_prompt:
            return self.template.prompt(messages)
        whole, spans = self.template.render(messages)
        begun = spans[-1][0]
        said = messages[-1]["content"].strip()
        return whole[: whole.index(said, begun) + len(said)]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns what identifies the template."""
        return self.tokenizer_name if chat_template else None
