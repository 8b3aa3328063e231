"""The rules of `jaxstack data clean` and their thresholds, with the defaults of the papers that define them."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Literal

from jaxstack.common.errors import ConfigError
from jaxstack.config.bounds import NonNegativeFloat, NonNegativeInt, PositiveInt, Probability, check_bounds

Rule = Literal["quality", "repetition", "c4", "exact", "near"]
RULES: tuple[Rule, ...] = ("quality", "repetition", "c4", "exact", "near")


@dataclass(frozen=True)
class QualityRules:
    """Gopher's quality filters (Rae et al. 2021, appendix A.1.1). A word is text between white space."""

    min_words: NonNegativeInt = 50
    """Fewest words of a document."""
    max_words: PositiveInt = 100_000
    """Most words of a document."""
    min_word_length: NonNegativeFloat = 3.0
    """Least mean length of the words, in characters."""
    max_word_length: NonNegativeFloat = 10.0
    """Largest mean length of the words, in characters."""
    max_hash_ratio: NonNegativeFloat = 0.1
    """Most symbols `#` for each word."""
    max_ellipsis_ratio: NonNegativeFloat = 0.1
    """Most ellipses (`...` or its single character) for each word."""
    max_bullet_lines: Probability = 0.9
    """Largest share of lines that start with a bullet point."""
    max_ellipsis_lines: Probability = 0.3
    """Largest share of lines that end with an ellipsis."""
    min_alphabetic_words: Probability = 0.8
    """Least share of words with a letter."""
    min_stop_words: NonNegativeInt = 2
    """Fewest different words of `stop_words` in a document."""
    stop_words: tuple[str, ...] = ("the", "be", "to", "of", "and", "that", "have", "with")
    """Words that English texts have."""
    bullets: tuple[str, ...] = ("•", "-", "*")
    """How a line with a bullet point starts. The paper does not list the signs."""

    def __post_init__(self) -> None:
        check_bounds("quality", self)


@dataclass(frozen=True)
class RepetitionRules:
    """Gopher's repetition filters (Rae et al. 2021, table A1): the largest share of each kind of repeated text."""

    lines: Probability = 0.30
    """Lines that occurred before in the document."""
    paragraphs: Probability = 0.30
    """Paragraphs that occurred before."""
    line_characters: Probability = 0.20
    """Characters in lines that occurred before."""
    paragraph_characters: Probability = 0.20
    """Characters in paragraphs that occurred before."""
    top_2gram: Probability = 0.20
    """Characters in the most frequent sequence of 2 words."""
    top_3gram: Probability = 0.18
    """Characters in the most frequent sequence of 3 words."""
    top_4gram: Probability = 0.16
    """Characters in the most frequent sequence of 4 words."""
    repeated_5gram: Probability = 0.15
    """Characters in sequences of 5 words that occur more than once."""
    repeated_6gram: Probability = 0.14
    """Characters in sequences of 6 words that occur more than once."""
    repeated_7gram: Probability = 0.13
    """Characters in sequences of 7 words that occur more than once."""
    repeated_8gram: Probability = 0.12
    """Characters in sequences of 8 words that occur more than once."""
    repeated_9gram: Probability = 0.11
    """Characters in sequences of 9 words that occur more than once."""
    repeated_10gram: Probability = 0.10
    """Characters in sequences of 10 words that occur more than once."""

    def __post_init__(self) -> None:
        check_bounds("repetition", self)


@dataclass(frozen=True)
class C4Rules:
    """C4's rules (Raffel et al. 2020, section 2.2). They remove lines, and documents with too few sentences left."""

    line_ends: tuple[str, ...] = (".", "!", "?", '"', "”")
    """Signs of which a line must end with one."""
    min_line_words: NonNegativeInt = 5
    """Fewest words of a line."""
    min_sentences: NonNegativeInt = 3
    """Fewest sentences of a document."""
    line_words: tuple[str, ...] = ("javascript",)
    """Words without which a line must be, in lower case."""
    line_phrases: tuple[str, ...] = (
        "terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies",
    )  # fmt: skip
    """Phrases without which a line must be, in lower case."""
    document_phrases: tuple[str, ...] = ("lorem ipsum", "{")
    """Phrases without which a document must be, in lower case."""
    bad_words: str | None = None
    """File with a word on each line. A document with one of them is dropped. `null` means no words."""
    span_sentences: NonNegativeInt = 3
    """Consecutive sentences of which all documents together keep one occurrence. 0 keeps all."""

    def __post_init__(self) -> None:
        check_bounds("c4", self)


@dataclass(frozen=True)
class LanguageRules:
    """Languages to keep, as the library `py3langid` names them."""

    keep: tuple[str, ...] = ()
    """Codes of languages, such as `en`. An empty list keeps all languages."""
    min_probability: Probability = 0.99
    """Least probability of the language. C4 has 0.99."""

    def __post_init__(self) -> None:
        check_bounds("language", self)


@dataclass(frozen=True)
class OverlapRules:
    """Overlap with texts of an evaluation, as for GPT-3 (Brown et al. 2020, appendix C)."""

    texts: tuple[str, ...] = ()
    """Files or folders with the texts of evaluations: text, or tables as `data.source=hf` reads them."""
    column: str = "text"
    """Column of the tables."""
    ngram: PositiveInt = 13
    """Words of a sequence: in lower case, between white space, without punctuation."""
    window: NonNegativeInt = 200
    """Characters that are removed on each side of a common sequence."""
    min_characters: NonNegativeInt = 200
    """Fewest characters of a piece that is left."""
    max_pieces: PositiveInt = 10
    """Most pieces of a document. A document with more is dropped."""
    max_documents: PositiveInt = 10
    """A sequence in more documents than this is ignored, because it is a common phrase."""

    def __post_init__(self) -> None:
        check_bounds("overlap", self)


@dataclass(frozen=True)
class NearRules:
    """Near duplicates by MinHash. The defaults are Gopher's: 13 words, and a Jaccard similarity of 0.8."""

    ngram: PositiveInt = 13
    """Words of a sequence. A document is compared as the set of its sequences."""
    threshold: Probability = 0.8
    """Least estimated Jaccard similarity of near duplicates."""
    hashes: PositiveInt = 128
    """Hash functions of a signature. The standard error of an estimate is about half of its inverse root."""

    def __post_init__(self) -> None:
        check_bounds("near", self)
        if self.hashes < 2 or not self.threshold:
            key, value, use = ("hashes", self.hashes, "2") if self.hashes < 2 else ("threshold", 0, "a number above 0")
            raise ConfigError(f"near.{key}={value} cannot tell documents apart. Use {use} or more.")


@dataclass(frozen=True)
class Settings:
    """All settings on which the cleaned texts depend."""

    rules: tuple[Rule, ...] = ("quality", "repetition", "exact", "near")
    quality: QualityRules = QualityRules()
    repetition: RepetitionRules = RepetitionRules()
    c4: C4Rules = C4Rules()
    language: LanguageRules = LanguageRules()
    overlap: OverlapRules = OverlapRules()
    near: NearRules = NearRules()

    def __post_init__(self) -> None:
        for name in ("quality", "repetition", "c4", "near"):
            group = getattr(self, name)
            default = type(group)()
            if name in self.rules or group == default:
                continue
            key = next(f.name for f in fields(group) if getattr(group, f.name) != getattr(default, f.name))
            raise ConfigError(
                f"{name}.{key}={getattr(group, key)} has no effect, because --rules=[{','.join(self.rules)}] is "
                f"without {name}. Add {name} to --rules, or remove the flag."
            )
        for name, switch in (("language", "keep"), ("overlap", "texts")):
            group = getattr(self, name)
            if not getattr(group, switch) and group != type(group)():
                raise ConfigError(f"the keys of the group {name} have no effect without {name}.{switch}. Set it, too.")

    def as_dict(self) -> dict[str, object]:
        """Returns all settings as JSON has them."""
        return dict(json.loads(json.dumps(asdict(self))))


GROUPS: dict[str, type] = {
    "quality": QualityRules, "repetition": RepetitionRules, "c4": C4Rules, "language": LanguageRules,
    "overlap": OverlapRules, "near": NearRules,
}  # fmt: skip
"""Groups of keys by their names."""


def from_dict(values: Mapping[str, dict[str, object]]) -> Settings:
    """Returns the settings that `Settings.as_dict` has given."""

    def group(name: str) -> object:
        fields = {key: tuple(v) if isinstance(v, list) else v for key, v in values[name].items()}
        return GROUPS[name](**fields)

    groups = {name: group(name) for name in GROUPS}
    return Settings(tuple(values["rules"]), **groups)  # type: ignore[arg-type]
