"""Keys that earlier versions had: files of a run that have them are read, flags are refused with the new key."""

from typing import NamedTuple

from jaxstack.common import inputs
from jaxstack.common.errors import ConfigError


class Renamed(NamedTuple):
    """What a key is called now.

    Attributes:
      key: the new key, for advice.
      advice: how to write the value now.
    """

    key: str
    advice: str


RENAMED = {
    "model.moe.dense_layers": Renamed("model.moe.layers.first", "The value is the same"),
    "model.moe.every": Renamed(
        "model.moe.layers.every",
        "Set model.moe.layers.first=1 with it: the second layer was the first with experts",
    ),
}
"""The keys by their earlier names."""


def with_new_keys(values: inputs.Json) -> inputs.Json:
    """Returns the values of a file with the keys of this version.

    Raises:
      ConfigError: an old key beside the new one.
    """
    model = values.get("model") if isinstance(values, dict) else None
    moe = model.get("moe") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(moe, dict) or not moe.keys() & {"dense_layers", "every"}:
        return values
    if moe.keys() & {"layers"}:
        old = sorted(moe.keys() & {"dense_layers", "every"})
        raise ConfigError(
            f"model.moe.{old[0]} is the earlier name of what model.moe.layers says, which is set, too. Remove "
            f"model.moe.{old[0]}."
        )
    kept = {name: value for name, value in moe.items() if name not in ("dense_layers", "every")}
    layers: dict[str, inputs.Json] = {}
    first = moe.get("dense_layers", 0)
    every = moe.get("every", 1)
    if every != 1:
        layers = {"first": 1, "every": every}
    elif first != 0:
        layers = {"first": first}
    moe = {**kept, "layers": layers} if layers else kept
    return {**values, "model": {**model, "moe": moe}}
