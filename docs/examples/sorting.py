"""Writes conversations and pairs of completions for a task that needs no download: digits are to be sorted.

    python docs/examples/sorting.py

It writes sorting.jsonl, whose answers are right in half of the conversations, and sorting_pairs.jsonl, in which the
right answer is preferred to one with two digits exchanged. The pairs have other digits than the conversations, and are
also prompts for rewards, which read `answer`.
"""

import json
import random
from pathlib import Path

CONVERSATIONS, PAIRS = 6000, 2000


def draw(rng: random.Random) -> tuple[str, str, str]:
    """Returns a prompt, the right answer, and a wrong one."""
    digits = rng.sample("0123456789", 5)
    right = sorted(digits)
    i, j = rng.sample(range(5), 2)
    wrong = right.copy()
    wrong[i], wrong[j] = right[j], right[i]
    return f"Sort {' '.join(digits)}", " ".join(right), " ".join(wrong)


def main(folder: Path = Path()) -> None:
    """Writes both files into a folder."""
    rng = random.Random(0)
    drawn: dict[str, tuple[str, str, str]] = {}
    while len(drawn) < CONVERSATIONS + PAIRS:
        one = draw(rng)
        drawn.setdefault(one[0], one)
    rows = [*drawn.values()]
    chats = [{"prompt": prompt, "completion": rng.choice([right, wrong])} for prompt, right, wrong in rows[:-PAIRS]]
    pairs = [
        {"prompt": prompt, "chosen": right, "rejected": wrong, "answer": right}
        for prompt, right, wrong in rows[-PAIRS:]
    ]
    for name, lines in (("sorting", chats), ("sorting_pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        print(f"wrote {len(lines):,} lines to {folder / name}.jsonl")


if __name__ == "__main__":
    main()
