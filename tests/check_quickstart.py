"""Checks a finished quickstart run: `python tests/check_quickstart.py RUN`. Exits with 1 if a check fails."""

import json
import sys
from pathlib import Path

run = Path(sys.argv[1])
lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
held_out = [line["eval_bits_per_byte"] for line in lines if "eval_bits_per_byte" in line]
steps = [line["loss"] for line in lines if "loss" in line]
print(f"{len(steps)} training steps logged; held-out text: {held_out} bits per byte")
ngram = next(line["ngram_bits_per_byte"] for line in lines if "ngram_bits_per_byte" in line)
print(f"best n-gram model: {ngram} bits per byte")
checks = {
    "the model beats the n-gram model by 0.1 bits per byte": held_out[-1] < ngram - 0.1,
    "the loss falls from evaluation to evaluation": held_out == sorted(held_out, reverse=True),
    "every file of a run exists": all(
        (run / name).exists() for name in ("config.yaml", "loss.png", "samples.txt", "checkpoints", "tokenizer.json")
    ),
}
failed = [check for check, passed in checks.items() if not passed]
sys.exit(f"These checks fail: {'; '.join(failed)}" if failed else 0)
