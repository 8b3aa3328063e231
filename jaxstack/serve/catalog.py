"""Several models in one server: loaded when a request names them, and dropped when others need their memory."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import jax
import numpy as np

from jaxstack import families
from jaxstack.common.tree import PyTree
from jaxstack.config import ConfigError, ModelConfig
from jaxstack.data import Tokenizer
from jaxstack.data.captions import Given
from jaxstack.data.tokenizers import HFTokenizer
from jaxstack.generate import features, pictures, translate
from jaxstack.generate.encode import TextEncoder, framed
from jaxstack.generate.prompts import Rows
from jaxstack.loaded.trained_run import TrainedRun
from jaxstack.models import params
from jaxstack.serve.errors import ApiError

Translator: TypeAlias = Callable[[PyTree, Rows, int], Rows]
"""Writes the targets of inputs, as `translate.make_translate` builds it."""
MASK = "[MASK]"
"""How a request marks a hidden token of a text, if the tokenizer has no name for its mask."""


class Loaded:
    """A model in memory, and its compiled programs.

    Attributes:
      name: name of the model in requests.
      run: the loaded run.
    """

    def __init__(self, name: str, run: TrainedRun) -> None:
        self.name = name
        self.run = run
        self.config = run.config
        self.tokenizer: Tokenizer = run.tokenizer
        self._translators: dict[tuple[int | None, int, int], Translator] = {}
        self._drawers: dict[tuple[int, float], pictures.Draw] = {}

    @cached_property
    def encoder(self) -> TextEncoder:
        """The encoder that reads texts."""
        return TextEncoder.create(self.run.model, self.run.params, self.run.context)

    @cached_property
    def mask(self) -> tuple[int, str]:
        """The id that hides a token, and the text that marks it in requests."""
        mask = self.config.data.mask_id
        assert mask is not None, "it is filled when the run begins"
        if isinstance(self.tokenizer, HFTokenizer) and mask < self.tokenizer.vocab_size:
            return mask, self.tokenizer.decode([mask]).strip() or MASK
        return mask, MASK

    def ids(self, text: str) -> list[int]:
        """Returns the ids of a text with what its tokenizer puts around it."""
        return framed(self.tokenizer, self.tokenizer.encode(text).tolist())

    def ids_with_mask(self, text: str, marker: str, mask: int) -> list[int]:
        """Returns the ids of a text with the mask in place of each marker."""
        whole = self.tokenizer.encode(text).tolist()
        if mask not in whole:  # the tokenizer has no token for it
            parts = [self.tokenizer.encode(part).tolist() if part else [] for part in text.split(marker)]
            whole = parts[0] + [token for part in parts[1:] for token in [mask, *part]]
        return framed(self.tokenizer, whole)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids without special tokens."""
        special = self.tokenizer.special_ids if isinstance(self.tokenizer, HFTokenizer) else frozenset()
        kept = [i for i in ids if i < self.tokenizer.vocab_size and i not in special]
        return self.tokenizer.decode(kept) if kept else ""

    @cached_property
    def _text_features(self) -> features.Program:
        return features.make_program(self.run.model, self.run.context, 1)

    def features(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the features of texts by a contrastive model."""
        run = self.run
        length = run.config.data.target_length
        program = self._text_features
        return features.text_features(run.model, run.params, texts, run.tokenizer, length, run.context, program)

    def translate(self, texts: Sequence[str], language: str | None, beams: int, tokens: int) -> list[str]:
        """Returns what an encoder-decoder writes for each text, greedily or with beams.

        Equal settings share their programs.
        """
        run = self.run
        data = run.config.data
        special = translate.special_ids(data, run.tokenizer)
        gate = translate.gate_of(data, language) if run.model.moe.num_experts else None
        key = gate, beams, tokens
        if key not in self._translators:
            own = replace(run.config.sample, prompts=None, temperature=0.0, repetition_penalty=1.0)
            sample = replace(own, beams=beams, tokens=tokens)
            self._translators[key] = translate.make_translate(
                run.model, sample, start=special.start, stop=(special.eos,), gate=gate, ctx=run.context
            )
        inputs = translate.to_inputs(data, run.tokenizer, texts, language)
        rows = self._translators[key](run.params, inputs, run.config.run.seed)
        return [translate.to_text(data, run.tokenizer, row) for row in rows]

    def draw(self, prompt: str, count: int, steps: int, guidance: float, seed: int | None) -> np.ndarray:
        """Returns pictures [N, H, W, C] with values from -1 to 1. Equal settings share their programs."""
        run = self.run
        given = Given.named(run.model, [prompt], run.tokenizer, run.config.data).times(count)
        key = steps, guidance
        if key not in self._drawers:
            sample = replace(run.config.sample, steps=steps, guidance=guidance)
            self._drawers[key] = pictures.make_draw(run.model, sample, run.context)
        return self._drawers[key](run.params, given, run.config.run.seed if seed is None else seed)


def parameter_bytes(model: ModelConfig) -> int:
    """Returns the bytes of a model's parameters in memory, all devices together."""
    return 4 * params.count(families.spec(model.base))


class Catalog:
    """The models of a server. The least recently used are dropped when another one needs their memory.

    All methods run in the worker's thread, so no model is dropped while it answers.

    Attributes:
      loads: number of times that a model was read.
    """

    def __init__(
        self, models: Mapping[str, ModelConfig], load: Callable[[str], TrainedRun], limit: int | None = None
    ) -> None:
        """Begins without any model in memory.

        Args:
          models: the configuration of each model by its name.
          load: reads a model.
          limit: bytes of parameters that may be in memory at the same time. `None` means any number.

        Raises:
          ConfigError: a model alone exceeds the limit.
        """
        self.sizes = {name: parameter_bytes(model) for name, model in models.items()}
        self.loads = 0
        self._load = load
        self._limit = limit
        self._loaded: OrderedDict[str, Loaded] = OrderedDict()
        self._lock = threading.Lock()  # `resident` is read by other threads
        for name, size in self.sizes.items():
            if limit is not None and size > limit:
                raise ConfigError(
                    f"--memory={limit / 2**30:g} GiB is less than the {size / 2**30:.3g} GiB of {name}. Raise it."
                )

    @property
    def resident(self) -> list[str]:
        """The models in memory, the least recently used first."""
        with self._lock:
            return [*self._loaded]

    def get(self, name: str) -> Loaded:
        """Returns a model, after reading it if it is not in memory.

        Raises:
          ApiError: it cannot be read.
        """
        with self._lock:
            if name in self._loaded:
                self._loaded.move_to_end(name)
                return self._loaded[name]
            while self._limit is not None and self._bytes() + self.sizes[name] > self._limit:
                self._loaded.popitem(last=False)
        try:
            model = Loaded(name, self._load(name))
        except (ConfigError, OSError) as error:
            raise ApiError(f"the model {name} cannot be read: {error}", status=500, code="model_not_loaded") from None
        jax.block_until_ready(model.run.params)
        self.loads += 1
        with self._lock:
            self._loaded[name] = model
        return model

    def _bytes(self) -> int:
        return sum(self.sizes[name] for name in self._loaded)


def names_of(paths: Sequence[Path]) -> dict[str, Path]:
    """Returns the run directories by the names of their models: the names of the directories.

    Raises:
      ConfigError: two have the same name.
    """
    found: dict[str, Path] = {}
    for path in paths:
        name = path.resolve().name
        if name in found:
            raise ConfigError(f"{found[name]} and {path} have the same name. Rename one of the directories.")
        found[name] = path
    return found
