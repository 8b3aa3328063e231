"""Reads pictures with texts of their own, the source `captions`: from JSON lines, or drawn.

| key of a line | value |
|---|---|
| `picture` | a PNG or JPEG file in the folder of the lines, or rows of pixels from 0 to 255: `[[0, 255], [9, 3]]` |
| `text` | the text, or with `data.languages` one in each: `{"en": "two cats", "de": "zwei Katzen"}` |
| `key` | optional: key words of the text, or of the text of each language |
| `salient` | optional: what the picture is about, in pixels `[left, top, right, bottom]`; the last two are excluded |

Other keys are ignored. `data.path=drawn:digits` reads no file: it puts scikit-learn's digits in four colours into a
corner of a larger picture, and says so in English, German and French. Suffixes: N pictures, L languages, C different
texts, T tokens of a text.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxstack.common.errors import quoted
from jaxstack.config import ConfigError, DataConfig
from jaxstack.data.conversations import json_objects
from jaxstack.data.images import Images, format_size, read_digits, read_picture, room_for
from jaxstack.data.tokenizers import Tokenizer

DRAWN = "drawn:digits"
"""The value of `data.path` for pictures that are drawn."""
COLOURS = {
    "en": ("red", "green", "blue", "yellow"),
    "de": ("rote", "grüne", "blaue", "gelbe"),
    "fr": ("rouge", "vert", "bleu", "jaune"),
}
DIGITS = {
    "en": ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    "de": ("Null", "Eins", "Zwei", "Drei", "Vier", "Fünf", "Sechs", "Sieben", "Acht", "Neun"),
    "fr": ("zéro", "un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf"),
}
PLACES = {
    "en": ("top left", "top right", "bottom left", "bottom right"),
    "de": ("oben links", "oben rechts", "unten links", "unten rechts"),
    "fr": ("en haut à gauche", "en haut à droite", "en bas à gauche", "en bas à droite"),
}
_PATTERNS = {
    "en": "a {colour} {digit} at the {place}",
    "de": "eine {colour} {digit} {place}",
    "fr": "un {digit} {colour} {place}",
}
RGB = np.array([[1, 0.1, 0.1], [0.1, 0.9, 0.1], [0.2, 0.3, 1], [1, 0.9, 0.1]], np.float32)
"""The colours of drawn digits, from 0 to 1."""
_CANVAS = 16
_GREY = 0.5  # lightest background


class Example(NamedTuple):
    """One picture with its texts.

    Attributes:
      name: in error messages, the file and the line.
      pixels: [H, W, C], from -1 (black) to 1 (white).
      texts: in each language, or one.
      keys: key words of each text.
      box: left, top, right and bottom of the salient region; all 0 if there is none.
    """

    name: str
    pixels: np.ndarray
    texts: tuple[str, ...]
    keys: tuple[tuple[str, ...], ...]
    box: tuple[int, int, int, int] = (0, 0, 0, 0)


@dataclass(frozen=True)
class OwnCaptions:
    """Pictures without their tokens, and the different texts.

    Attributes:
      images: whose `classes` are the indices of texts. Pictures with equal texts match each other.
      texts: [C][L].
      keys: key words of each of them [C][L].
    """

    images: Images
    texts: list[tuple[str, ...]]
    keys: list[tuple[set[str], ...]]

    def of_language(self) -> list[list[str]]:
        """Returns the texts by language [L][C]."""
        return [[*column] for column in zip(*self.texts, strict=True)]

    def key_tokens(self, tokenizer: Tokenizer, target_len: int, more: Sequence[str]) -> np.ndarray:
        """Returns which tokens are of key words, int32 [L, C, T], in texts that `captions.encode_captions` encodes.

        Args:
          more: key words of all texts.
        """
        rows = [
            [key_tokens(text, [*keys, *more], tokenizer, target_len) for text, keys in zip(texts, keys_of, strict=True)]
            for texts, keys_of in zip(self.texts, self.keys, strict=True)
        ]
        return np.array(rows).swapaxes(0, 1)


def key_tokens(text: str, words: Sequence[str], tokenizer: Tokenizer, target_len: int) -> np.ndarray:
    """Returns which tokens of an encoded text with a start are of one of some words, int32 [T].

    Upper and lower case are alike. A word within a longer one does not count.
    """
    marks = np.zeros(target_len, np.int32)
    _, starts, ends = tokenizer.encode_with_offsets(text)
    for word in words:
        for first, last in _places(word, text):
            touched = 1 + np.flatnonzero((ends > first) & (starts < last))
            marks[touched[touched < target_len]] = 1
    return marks


def _places(word: str, text: str) -> list[tuple[int, int]]:
    return [found.span() for found in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE)]


def read_own_captions(cfg: DataConfig) -> OwnCaptions:
    """Returns the pictures of the source `captions` with their texts.

    Raises:
      ConfigError: there are none, they differ in size, or a line or a picture cannot be read.
    """
    path = str(cfg.path)
    read = draw_digits(cfg) if path.startswith("drawn:") else read_examples(path, cfg.languages)
    examples = [*read]
    if not examples:
        raise ConfigError(f"data.path={path} has no pictures. Give a file with at least one.")
    first = examples[0]
    pixels = room_for(Path(path), (len(examples), *first.pixels.shape))
    for number, one in enumerate(examples):
        if one.pixels.shape != first.pixels.shape:
            raise ConfigError(
                f"{one.name}: the picture is {format_size(one.pixels.shape)}, but the first one is "
                f"{format_size(first.pixels.shape)}. Resize them all to one size."
            )
        pixels[number] = one.pixels
    index: dict[tuple[str, ...], int] = {}
    keys: list[tuple[set[str], ...]] = []
    for one in examples:
        if one.texts not in index:
            index[one.texts] = len(index)
            keys.append(tuple(set[str]() for _ in one.texts))
        for words, known in zip(one.keys, keys[index[one.texts]], strict=True):
            known.update(words)
    classes = np.array([index[one.texts] for one in examples], np.int32)
    boxes = np.array([one.box for one in examples], np.int32)
    return OwnCaptions(Images(pixels, classes, tuple(one.name for one in examples), boxes=boxes), [*index], keys)


def read_examples(path: str, languages: Sequence[str]) -> Iterator[Example]:
    """Yields the pictures of a file with one JSON object per line, or with one JSON list of objects.

    Raises:
      ConfigError: the file or a picture does not exist, or an object is not a picture with its text. The message has
        the file and the line.
    """
    for name, value in json_objects(path, "picture with its text"):
        try:
            if not isinstance(value, dict):
                raise ConfigError("this is not a JSON object. Write {\"picture\": ..., \"text\": ...}.")  # fmt: skip
            pixels = _pixels(value.get("picture"), Path(path).parent)
            texts = _texts(value.get("text"), languages)
            keys = _keys(value.get("key"), texts, languages)
            yield Example(name, pixels, texts, keys, _box(value.get("salient"), pixels.shape))
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None


def _pixels(value: Any, folder: Path) -> np.ndarray:
    if isinstance(value, str) and value:
        file = folder / value
        try:
            there = file.is_file()
        except OSError:  # the name is too long
            there = False
        if not there:
            raise ConfigError(f"the picture {quoted(value)} is not a file in the folder {folder}/. Correct its path.")
        return (read_picture(file) / 127.5 - 1).astype(np.float32)
    try:
        array = np.array(value)
    except ValueError:  # rows of several lengths
        array = np.array(None)
    shaped = array.ndim in (2, 3) and array.size and array.shape[2:] in ((), (1,), (3,))
    if array.dtype.kind not in "iu" or not shaped:
        raise ConfigError(
            f"picture={quoted(value)} is neither the name of a file nor rows of pixels of equal length. Write a name, "
            f"or integers [H][W] or [H][W][3]."
        )
    if array.min() < 0 or array.max() > 255:
        raise ConfigError(f"the picture has pixels from {array.min()} to {array.max()}. Use integers from 0 to 255.")
    return (array.reshape(*array.shape[:2], -1) / 127.5 - 1).astype(np.float32)


def _texts(value: Any, languages: Sequence[str]) -> tuple[str, ...]:
    if not languages:
        texts: list[Any] = [value]
        wanted = f"text={quoted(value)} is empty or not a string. Write text, or name the languages in data.languages."
    else:
        texts = [value.get(name) for name in languages] if isinstance(value, dict) else [None]
        wanted = (
            f"text is not an object with a text in each of data.languages={[*languages]}. Write them, or change "
            f"data.languages."
        )
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise ConfigError(wanted)
    return tuple(texts)


def _keys(value: Any, texts: Sequence[str], languages: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Returns the key words of each text. A word of an object is in the text of its language, another one in any."""
    if value is None:
        return ((),) * len(texts)
    by_language = isinstance(value, dict) and bool(languages)
    lists = [value.get(name, []) for name in languages] if by_language else [value] * len(texts)
    if not all(isinstance(words, list) and all(isinstance(word, str) and word for word in words) for words in lists):
        raise ConfigError(
            f'key={quoted(value)} is neither a list of words nor one for each language. Write ["two", "cats"].'
        )
    for text, words in zip(texts, lists, strict=True):
        for word in words:
            if not any(_places(word, each) for each in ([text] if by_language else texts)):
                raise ConfigError(f"the key word {quoted(word)} is not in the text. Correct it, or leave it out.")
    return tuple(tuple(words) for words in lists)


def _box(value: Any, shape: Sequence[int]) -> tuple[int, int, int, int]:
    if value is None:
        return (0, 0, 0, 0)
    whole = isinstance(value, list) and len(value) == 4 and all(type(edge) is int for edge in value)
    if not whole or not (0 <= value[0] < value[2] <= shape[1] and 0 <= value[1] < value[3] <= shape[0]):
        raise ConfigError(
            f"salient={quoted(value)} is not a region of a picture of {format_size(shape)}. Write [left, top, right, "
            f"bottom] in pixels."
        )
    return (value[0], value[1], value[2], value[3])


def draw_digits(cfg: DataConfig) -> Iterator[Example]:
    """Yields each of scikit-learn's digits twice, always the same: in one of four colours, in one of four corners.

    The background is a shade of grey that changes along the picture, which no text names.

    Raises:
      ConfigError: another set or another language is asked for, or scikit-learn is not installed.
    """
    languages = cfg.languages or ("en",)
    unknown = [name for name in languages if name not in _PATTERNS]
    if cfg.path != DRAWN:
        raise ConfigError(f"data.path={cfg.path} is not a set that is drawn. Use {DRAWN}, or a file of JSON lines.")
    if unknown:
        raise ConfigError(
            f"data.languages has {unknown[0]}, in which {DRAWN} has no texts. Use some of {', '.join(_PATTERNS)}."
        )
    digits, _ = read_digits()
    ink = digits.pixels[..., 0] / 2 + 0.5  # [N, 8, 8]
    rng = np.random.RandomState(0)  # its stream never changes
    for turn in range(2):
        for i, shape in enumerate(ink):
            colour, place = rng.randint(0, 4, 2)
            corner, along, across = rng.uniform(0, _GREY, 3)
            ramp = np.linspace(0, 1, _CANVAS)
            grey = corner + ramp[:, None] * (along - corner) / 2 + ramp * (across - corner) / 2
            pixels = np.repeat(grey[..., None], 3, 2)
            top = (_CANVAS - len(shape)) * (place // 2)
            left = (_CANVAS - len(shape)) * (place % 2)
            region = pixels[top : top + len(shape), left : left + len(shape)]
            region += shape[..., None] * (RGB[colour] - region)
            box = (left, top, left + len(shape), top + len(shape))
            said = [describe_digit(name, int(digits.classes[i]), colour, place) for name in languages]
            texts = tuple(text for text, _ in said)
            keys = tuple(words for _, words in said)
            shown = (pixels * 2 - 1).astype(np.float32)
            yield Example(f"digit {i}, turn {turn + 1}", shown, texts, keys, box)


def describe_digit(language: str, digit: int, colour: int, place: int) -> tuple[str, tuple[str, ...]]:
    """Returns the text of a drawn digit in a language, and its key words: colour, digit and place."""
    words = {"colour": COLOURS[language][colour], "digit": DIGITS[language][digit], "place": PLACES[language][place]}
    return _PATTERNS[language].format(**words), (words["colour"], words["digit"], words["place"])
