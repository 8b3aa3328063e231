"""Tells the language of a text with `py3langid`, a naive Bayes classifier whose model comes with the package."""

import functools
from typing import Any

from jaxstack.common.errors import ConfigError
from jaxstack.data.clean.settings import LanguageRules

_MOST_CHARACTERS = 20_000
"""Only the beginning of a longer text is classified."""


@functools.cache
def _identifier() -> Any:
    try:
        from py3langid import langid
    except ImportError:
        raise ConfigError(
            "language.keep needs the py3langid library. Run pip install 'jaxstack[clean]', or remove language.keep."
        ) from None
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


def language_of(text: str) -> tuple[str, float]:
    """Returns the code of a text's language, and its probability among all languages of the model."""
    code, probability = _identifier().classify(text[:_MOST_CHARACTERS])
    return str(code), float(probability)


def check_languages(rules: LanguageRules) -> None:
    """Checks that the library is here and has the languages to keep.

    Raises:
      ConfigError: it is missing, or does not have a language.
    """
    if not rules.keep:
        return
    known = sorted(_identifier().labels)
    for code in rules.keep:
        if code not in known:
            raise ConfigError(f"language.keep={code} is not a code of py3langid. Use some of {', '.join(known)}.")
