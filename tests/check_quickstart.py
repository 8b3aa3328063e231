"""Checks a finished quickstart run: `python tests/check_quickstart.py RUN`. Exits with 1 where a promise is broken."""

import json
import sys
from pathlib import Path

run = Path(sys.argv[1])
lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
held_out = [line["eval_bits_per_byte"] for line in lines if "eval_bits_per_byte" in line]
steps = [line["loss"] for line in lines if "loss" in line]
print(f"{len(steps)} loss lines, held out {held_out} bits per byte")
ngram = next(line["ngram_bits_per_byte"] for line in lines if "ngram_bits_per_byte" in line)
print(f"best n-gram {ngram} bits per byte")
promises = {
    "the model beats the n-gram by a tenth of a bit": held_out[-1] < ngram - 0.1,
    "evaluations go down": held_out == sorted(held_out, reverse=True),
    "nothing is missing": all(
        (run / name).exists() for name in ("config.yaml", "loss.png", "samples.txt", "checkpoints", "tokenizer.json")
    ),
}
broken = [promise for promise, kept in promises.items() if not kept]
sys.exit(f"not kept: {'; '.join(broken)}" if broken else 0)
