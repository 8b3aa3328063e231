"""Takes the keys of a JSON object one by one, with errors that name the file, the key and the value."""

import json
from typing import Any

from jaxstack.common.errors import shortened
from jaxstack.config import ConfigError


class Keys:
    """A JSON object whose keys are taken one by one, until none is left."""

    def __init__(self, where: str, values: Any) -> None:
        if not isinstance(values, dict):
            raise ConfigError(f"{where} is not a JSON object. Give the model's own config.json.")
        self.where, self._left = where, dict(values)

    def take(self, key: str, *default: Any) -> Any:
        """Returns the value of a key, or the default if there is one, and removes the key."""
        if key not in self._left and not default:
            raise ConfigError(f"{self.where} has no {key}. Copy it from the model's own config.json.")
        return self._left.pop(key, *default)

    def drop(self, names: set[str]) -> None:
        """Removes these keys, and those that begin with an underscore: by custom, they do not change the model."""
        self._left = {key: value for key, value in self._left.items() if key not in names and not key.startswith("_")}

    def rename(self, aliases: dict[str, str]) -> None:
        """Gives keys that have another name in some files their usual name."""
        self._left = {aliases.get(key, key): value for key, value in self._left.items()}

    def expect(self, key: str, *allowed: Any) -> None:
        """Takes a key that is absent or has one of these values."""
        value = self.take(key, allowed[0])
        if not any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed):
            raise self.error(key, value, f"Only {' or '.join(json.dumps(a) for a in allowed)} is supported")

    def error(self, key: str, value: Any, fix: str) -> ConfigError:
        """Returns the error for an unsupported value."""
        return ConfigError(f"{self.where}: {key}={shortened(json.dumps(value))} is not supported. {fix}.")

    def require_empty(self) -> None:
        """Checks that every key was taken."""
        if self._left:
            shown = ", ".join(f"{key}={json.dumps(value)[:40]}" for key, value in sorted(self._left.items())[:6])
            raise ConfigError(
                f"{self.where} has {len(self._left)} unknown keys ({shown}), which may change the model. Remove those "
                f"that do not."
            )
