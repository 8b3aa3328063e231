"""Writes a number with its noun: "1 layer", "2 layers"."""


def plural(count: float, one: str, more: str = "", spec: str = "") -> str:
    """Returns a number and the noun behind it: `plural(1, "layer")` is "1 layer", `plural(2, "layer")` is "2 layers".

    Args:
      count: how many.
      one: the noun behind 1. A verb may follow: "text exceeds".
      more: the noun behind other numbers: "texts exceed". The default is `one` with the ending of a plural.
      spec: how to format the number, as behind the colon of an f-string.
    """
    return f"{count:{spec}} {one if count == 1 else more or _ending(one)}"


def _ending(noun: str) -> str:
    """Returns the plural of a noun: layers, batches, entries."""
    if noun.endswith(("ch", "sh", "s", "x")):
        return f"{noun}es"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}s"
