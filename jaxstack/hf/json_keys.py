"""Takes the keys of a JSON object one by one, with errors that name the file, the key and the value."""

import json
from typing import Any

from jaxstack.common.counts import plural
from jaxstack.common.errors import shortened
from jaxstack.config import ConfigError


class Keys:
    """A JSON object whose keys are taken one by one, until none is left."""

    def __init__(self, where: str, values: Any) -> None:
        if not isinstance(values, dict):
            raise ConfigError(f"{where} is not a JSON object. Give the model's own config.json.")
        self.where = where
        self._left = dict(values)

    def __contains__(self, key: str) -> bool:
        return key in self._left

    def take(self, key: str, *default: Any) -> Any:
        """Returns the value of a key, or the default if there is one, and removes the key."""
        if key not in self._left and not default:
            raise ConfigError(f"{self.where} has no {key}. Copy it from the model's own config.json.")
        return self._left.pop(key, *default)

    def drop(self, names: set[str], prefixes: tuple[str, ...] = ()) -> None:
        """Removes these keys, and all that begin with one of the prefixes."""
        kept = {key: value for key, value in self._left.items() if key not in names and not key.startswith(prefixes)}
        self._left = kept

    def drop_usual(self, name: str, *values: object) -> None:
        """Removes a key if it has one of these values. Otherwise the key stays and `require_empty` refuses it."""
        if name in self._left and any(_same(self._left[name], value) for value in values):
            del self._left[name]

    def set_default(self, key: str, value: object) -> None:
        """Gives a key that is absent or null this value."""
        if self._left.get(key) is None:
            self._left[key] = value

    def value_of(self, key: str) -> object:
        """Returns the value of a key, which stays, or `None`."""
        return self._left.get(key)

    def rename(self, aliases: dict[str, str]) -> None:
        """Gives keys that have another name in some files their usual name."""
        self._left = {aliases.get(key, key): value for key, value in self._left.items()}

    def expect(self, key: str, *allowed: Any) -> None:
        """Takes a key that is absent or has one of these values."""
        value = self.take(key, allowed[0])
        if not any(_same(value, a) for a in allowed):
            raise self.error(key, value, f"Only {' or '.join(json.dumps(a) for a in allowed)} is supported")

    def error(self, key: str, value: Any, fix: str) -> ConfigError:
        """Returns the error for an unsupported value."""
        return ConfigError(f"{self.where}: {key}={shortened(json.dumps(value))} is not supported. {fix}.")

    def take_empty(self) -> dict[str, object]:
        """Takes the keys whose values are null, false or empty: whatever such a key names, the file does not use it."""
        empty = {k: v for k, v in self._left.items() if v is None or v is False or v in ("", [], {})}
        self._left = {key: value for key, value in self._left.items() if key not in empty}
        return empty

    def require_empty(self) -> None:
        """Checks that every key was taken."""
        if self._left:
            shown = ", ".join(f"{key}={json.dumps(value)[:40]}" for key, value in sorted(self._left.items())[:6])
            raise ConfigError(
                f"{self.where} has {plural(len(self._left), 'unknown key')} ({shown}), which may change the model. "
                f"Remove those that do not."
            )


def _same(one: object, other: object) -> bool:
    """Returns whether two JSON values are equal, where true is not 1."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)
