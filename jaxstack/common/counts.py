"""Writes a number with its noun: "1 layer", "2 layers"."""


def plural(count: float, one: str, more: str = "", spec: str = "") -> str:
    """Returns a number and the noun after it: `plural(1, "layer")` is "1 layer", `plural(2, "layer")` is "2 layers".

    Args:
      count: the number.
      one: the noun after 1. A verb may follow: "text exceeds".
      more: the noun after other numbers: "texts exceed". The default is `one` with the ending of a plural.
      spec: how to format the number, as after the colon of an f-string.
    """
    return f"{count:{spec}} {one if count == 1 else more or _ending(one)}"


def _ending(noun: str) -> str:
    """Returns the plural of a noun: layers, batches, entries."""
    if noun.endswith(("ch", "sh", "s", "x")):
        return f"{noun}es"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}s"
