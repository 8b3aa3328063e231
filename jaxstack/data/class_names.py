"""The names of the classes of pictures, in the place of a tokenizer: an id is a class."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxstack.config import ConfigError


class ClassNames:
    """Shows classes by their names: `0 7 7`. A run directory keeps it in place of a tokenizer.

    Attributes:
      names: of the classes, without spaces, in the order of their ids.
      image: height, width and channels of the pictures.
    """

    name = "classes"
    eos_id: int | None = None
    keeps_text = False

    def __init__(self, names: tuple[str, ...], image: tuple[int, ...]) -> None:
        self.names = names
        self.image = image
        self.vocab_size = len(names)

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of the names that a text lists.

        Raises:
          ConfigError: a word is not the name of a class.
        """
        for word in text.split():
            if word not in self.names:
                shown = ", ".join(self.names[:12]) + (", ..." if len(self.names) > 12 else "")
                raise ConfigError(f"{word!r} is not a class of the pictures. Use some of {shown}.")
        return np.array([self.names.index(word) for word in text.split()], np.min_scalar_type(self.vocab_size))

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the ids of the names, and the start and end of each name in the text, all [names]."""
        words = text.split()
        starts = np.array([text.index(word, 0) for word in words], np.int64)
        at = 0
        for i, word in enumerate(words):
            starts[i] = at = text.index(word, at)
            at += len(word)
        return self.encode(text), starts, starts + [len(word) for word in words]

    def decode(self, ids: ArrayLike) -> str:
        """Returns the names of classes."""
        return " ".join(self.names[i] for i in np.asarray(ids).ravel().tolist())

    def num_bytes(self, ids: ArrayLike) -> int:
        """Returns 0, because a class does not represent text."""
        return 0

    def to_bytes(self, ids: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Returns no bytes, because classes do not represent text."""
        return np.zeros(0, np.uint8), np.zeros(np.size(ids), np.int64)

    def to_json(self) -> dict[str, Any]:
        """Returns everything that `tokenizer_from_json` needs."""
        return {"kind": "classes", "names": list(self.names), "image": list(self.image)}
