"""Writes conversations and pairs of completions for a task that needs no download: digits are to be sorted.

    python docs/examples/sorting.py

It writes sorting.jsonl, whose answers are right in half of the conversations, and sorting_pairs.jsonl, in which the
right answer is preferred to one with two digits exchanged. The pairs have other digits than the conversations, and are
also prompts for rewards, which read `answer`. It also writes sorting_test.jsonl, prompts with other digits than both.
"""

import json
import random
from pathlib import Path

CONVERSATIONS, PAIRS, TEST = 6000, 2000, 128


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
    tests: dict[str, tuple[str, str, str]] = {}
    rng = random.Random(1)
    while len(tests) < TEST:
        one = draw(rng)
        if one[0] not in drawn:
            tests.setdefault(one[0], one)
    test = [{"prompt": prompt, "answer": right} for prompt, right, _ in tests.values()]
    for name, lines in (("sorting", chats), ("sorting_pairs", pairs), ("sorting_test", test)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        print(f"wrote {len(lines):,} lines to {folder / name}.jsonl")


if __name__ == "__main__":
    main()
