"""Texts for the classes of pictures, and batches of pictures, each with a text of its class.

The text of a class is its name, or with `data.languages` the name of the number that it is, in each of these languages
(num2words). A batch depends only on seed and step. Suffixes: N pictures, L languages, C classes, B rows of a batch, S
patches of a picture, T tokens of a text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxstack.common.counts import plural
from jaxstack.common.errors import quoted
from jaxstack.config import ConfigError, DataConfig, ModelConfig
from jaxstack.data.images import Batch, ImageReader, PictureReader, to_patches
from jaxstack.data.own_captions import key_tokens
from jaxstack.data.seq2seq import SpecialIds, special_ids
from jaxstack.data.tokenizers import Tokenizer

_STREAM = 3  # keeps the draws of languages apart from others, which are seeded with other lists

_OTHER_STREAM = 4  # of second languages


def class_texts(cfg: DataConfig, names: Sequence[str]) -> list[list[str]]:
    """Returns the text of each class in each language [L][C]; without `data.languages` their names [1][C].

    Raises:
      ConfigError: a class is not a number, or num2words is not installed or does not have a language.
    """
    if not cfg.languages:
        return [[*names]]
    try:
        from num2words import CONVERTER_CLASSES, num2words  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        raise ConfigError(
            f"data.languages={list(cfg.languages)} names numbers in languages, which needs num2words. Run pip install "
            f"'jaxstack[images]'."
        ) from None
    numbers = [name for name in names if not name.isdecimal()]
    if numbers:
        raise ConfigError(
            f"data.languages={list(cfg.languages)} names numbers, but the class {numbers[0]!r} is not one. Leave "
            f"data.languages empty, so that texts are the names of the classes."
        )
    for language in cfg.languages:
        if language not in CONVERTER_CLASSES:
            raise ConfigError(
                f"data.languages has {language}, in which num2words has no numbers. Use some of "
                f"{', '.join(sorted(CONVERTER_CLASSES))}."
            )
    return [[num2words(int(name), lang=language) for name in names] for language in cfg.languages]


def encode_texts(texts: Sequence[str], tokenizer: Tokenizer, special: SpecialIds, target_len: int) -> Batch:
    """Returns rows of texts, each between a start and an end, which is the token that stands for the text.

    Returns:
      - `tokens` [texts, T], int32: start, text, end, and zeros behind it.
      - `targets` [texts, T], int32: the token after each, and `loss_weights` [texts, T], float32: 1 where there is one.
      - `pair_weights` [texts, T], float32: 1 at the end.

    Raises:
      ConfigError: a text is longer than T.
    """
    shape = (len(texts), target_len)
    tokens, targets = (np.zeros(shape, np.int32) for _ in range(2))
    words, pairs = (np.zeros(shape, np.float32) for _ in range(2))
    for i, text in enumerate(texts):
        ids = [special.start, *tokenizer.encode(text).tolist(), special.eos]
        if len(ids) > target_len:
            raise ConfigError(
                f"data.target_len={target_len} is less than the {plural(len(ids), 'token')} of {quoted(text)} with its "
                f"start and end. Raise it."
            )
        tokens[i, : len(ids)] = ids
        targets[i, : len(ids) - 1] = ids[1:]
        words[i, : len(ids) - 1] = 1
        pairs[i, len(ids) - 1] = 1
    return {"tokens": tokens, "targets": targets, "loss_weights": words, "pair_weights": pairs}


def encode_captions(
    texts: Sequence[Sequence[str]], tokenizer: Tokenizer, special: SpecialIds, target_len: int
) -> dict[str, np.ndarray]:
    """Returns the arrays of `encode_texts` for texts [L][C], each [L, C, T]."""
    flat = encode_texts([text for each in texts for text in each], tokenizer, special, target_len)
    return {name: array.reshape(len(texts), -1, target_len) for name, array in flat.items()}


@dataclass(frozen=True)
class CaptionedReader(PictureReader):
    """Draws the language of a row from the seed and the row's number."""

    def languages_of(self, numbers_B: np.ndarray) -> np.ndarray:
        """Returns the index of the language of each row, int [B]."""
        assert self.images.captions is not None
        count = len(self.images.captions["tokens"])
        draws = (np.random.default_rng([self.seed, number, _STREAM]) for number in numbers_B.tolist())
        return np.array([rng.integers(count) for rng in draws])


@dataclass(frozen=True)
class CaptionReader(CaptionedReader):
    """Reads batches for a contrastive model: pictures with texts.

    Attributes:
      translations: whether each picture has its text in two languages.
    """

    translations: bool = field(default=False, kw_only=True)

    def read(self, numbers_B: np.ndarray) -> Batch:
        """Returns the rows with these numbers, counted over all batches.

        - `patches` [B, S, P], float32: the pictures.
        - `pair_ids` [B, T], int32: the class of the row. Rows of one class match each other in all languages.
        - `tokens`, `targets`, `loss_weights`, `pair_weights` [B, T], see `encode_texts`; with `translations` they are
          [B, T, 2], of two languages.
        """
        captions = self.images.captions
        assert captions is not None
        index_B = self.locate(numbers_B)
        classes_B = self.images.classes[index_B]
        language_B = self.languages_of(numbers_B)
        batch = {name: array[language_B, classes_B] for name, array in captions.items()}
        if self.translations:
            other_B = self.others_of(numbers_B, language_B)
            batch = {name: np.stack([a, captions[name][other_B, classes_B]], 2) for name, a in batch.items()}
        return batch | {
            "patches": to_patches(self.images.pixels[index_B], self.patch_size),
            "pair_ids": np.repeat(classes_B[:, None], batch["tokens"].shape[1], 1),
        }

    def others_of(self, numbers_B: np.ndarray, language_B: np.ndarray) -> np.ndarray:
        """Returns the index of another language of each row, int [B]."""
        assert self.images.captions is not None
        count = len(self.images.captions["tokens"])
        draws = (np.random.default_rng([self.seed, number, _OTHER_STREAM]) for number in numbers_B.tolist())
        return (language_B + np.array([rng.integers(1, count) for rng in draws])) % count


@dataclass(frozen=True)
class CaptionedImageReader(ImageReader, CaptionedReader):
    """Reads batches for a diffusion model whose condition is a text, see `ImageReader`.

    Attributes:
      marks_keys: whether batches say which tokens are of key words.
      salient_weight: what the loss of a patch counts more, times the share of its pixels in the salient region.
    """

    marks_keys: bool = field(default=False, kw_only=True)
    salient_weight: float = field(default=0.0, kw_only=True)

    def condition(self, numbers_B: np.ndarray, index_B: np.ndarray, dropped_B: np.ndarray, patches: int) -> Batch:
        """Returns the texts of rows, in languages drawn from the seed and the row's number.

        - `encoder_tokens` [B, T], int32: the text between its start and end. A dropped one is empty.
        - `encoder_segment_ids` [B, T], int32: 1 up to the end, and 0 behind it.
        - `encoder_key_tokens` [B, T], int32, if `marks_keys`: 1 at tokens of key words.
        """
        captions = self.images.captions
        assert captions is not None
        language_B = self.languages_of(numbers_B)
        texts = {name: array[language_B, self.images.classes[index_B]] for name, array in captions.items()}
        if self.marks_keys:
            assert self.images.key_tokens is not None
            texts["key_tokens"] = self.images.key_tokens[language_B, self.images.classes[index_B]]
        return text_condition(texts, dropped_B)

    def weigh(self, index_B: np.ndarray, patches: int) -> np.ndarray:
        """Returns 1, and `salient_weight` more times the share of the patch in the salient region, float32 [B, S]."""
        if not self.salient_weight or self.images.boxes is None:
            return super().weigh(index_B, patches)
        left, top, right, bottom = self.images.boxes[index_B].T[:, :, None]
        height, width = (np.arange(size) for size in self.images.pixels.shape[1:3])
        rows = (height >= top) & (height < bottom)  # [B, H]
        columns = (width >= left) & (width < right)
        inside = (rows[:, :, None] & columns[:, None])[..., None].astype(np.float32)
        return 1 + self.salient_weight * to_patches(inside, self.patch_size).mean(-1, dtype=np.float32)


def text_condition(texts: Batch, dropped_B: np.ndarray | bool = False) -> Batch:
    """Returns the arrays `encoder_tokens` and `encoder_segment_ids` of texts, see `CaptionedImageReader.condition`.

    Args:
      texts: from `encode_texts`; a text begins with its start. `key_tokens` [B, T] are optional.
      dropped_B: which texts are replaced by the empty one, its start and its end.
    """
    tokens = texts["tokens"]
    ends = texts["pair_weights"] != 0
    place = np.arange(tokens.shape[1])
    end_B = ends.argmax(1)
    eos_B = tokens[np.arange(len(tokens)), end_B]
    last_B = np.where(dropped_B, 1, end_B)[:, None]
    read = np.where(place < last_B, tokens, np.where(place == last_B, eos_B[:, None], 0))
    made = {"encoder_tokens": read.astype(np.int32), "encoder_segment_ids": (place <= last_B).astype(np.int32)}
    if "key_tokens" in texts:
        made["encoder_key_tokens"] = np.where(place < last_B, texts["key_tokens"], 0).astype(np.int32)
    return made


class Given(NamedTuple):
    """What N pictures are made from: arrays of N rows, as the model's batches have them.

    Attributes:
      condition: the class or the text of each.
      nothing: no class, or the empty text, which guidance moves away from.
    """

    condition: Batch
    nothing: Batch

    @classmethod
    def classes(cls, cfg: ModelConfig, ids: Sequence[int]) -> "Given":
        """Returns the classes with these ids."""
        shape = (len(ids), cfg.diffusion.num_patches)
        rows = np.repeat(np.asarray(ids, np.int32)[:, None], shape[1], 1)
        return cls({"classes": rows}, {"classes": np.full(shape, cfg.vocab, np.int32)})

    @classmethod
    def texts(cls, arrays: Batch) -> "Given":
        """Returns texts, from the arrays of `captions.encode_texts`."""
        return cls(text_condition(arrays), text_condition(arrays, True))

    @classmethod
    def named(cls, model: ModelConfig, names: Sequence[str], tokenizer: Tokenizer, data: DataConfig) -> "Given":
        """Returns what a user names, with the tokenizer of the run: classes, or texts of at most `target_len` tokens.

        `data.key_words` are the key words of texts.

        Raises:
          ConfigError: a class does not exist, or a text is too long.
        """
        if model.reads_captions:
            longest = data.target_length
            arrays = encode_texts(names, tokenizer, special_ids(tokenizer), longest)
            if model.diffusion.key_weight:
                marks = [key_tokens(name, data.key_words, tokenizer, longest) for name in names]
                arrays["key_tokens"] = np.array(marks, np.int32)
            return cls.texts(arrays)
        return cls.classes(model, tokenizer.encode(" ".join(names)).tolist())

    def times(self, count: int) -> "Given":
        """Returns each of them `count` times, one after the other."""
        return Given(*({name: np.repeat(a, count, 0) for name, a in arrays.items()} for arrays in self))

    @property
    def rows(self) -> int:
        """Returns the number of pictures, N."""
        return len(next(iter(self.condition.values())))
