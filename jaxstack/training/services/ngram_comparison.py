"""Compares the held-out loss of a run with the loss of an n-gram model."""

import math
from collections.abc import Callable, Sequence

from jaxstack.common.counts import plural
from jaxstack.data import Dataset, ngram
from jaxstack.data.loader import DataLoader
from jaxstack.tracking.console import Console
from jaxstack.tracking.jsonl import Record


def compare_with_ngrams(
    steps: int,
    keeps_documents: bool,
    dataset: Dataset,
    loader: DataLoader,
    records: Sequence[Record],
    write: Callable[[Record], None],
    console: Console,
) -> tuple[str, float] | None:
    """Prints the held-out loss beside the loss of an n-gram model, and returns its name and its nats per token.

    The n-gram model is fitted on the same bytes, unless the log has it from an earlier start. `None` means that there
    is nothing to compare with, and a line says why.

    Args:
      steps: number of steps of the run.
      keeps_documents: see `DataConfig.keeps_documents`.
      dataset: what the run was trained on.
      loader: loader of its batches.
      records: records of its log.
      write: adds a record to the log.
    """
    tokenizer = dataset.tokenizer
    if reason := ngram.obstacle([*dataset.training_texts], tokenizer):
        console.print(f"held out, byte n-grams    left out: {reason}")
        return None
    final = next(r for r in records if r["step"] == steps and "eval_loss" in r)
    fitted = next((r for r in records if r["step"] == steps and "ngram_train_bytes" in r), None)
    if fitted is None:
        held_out = loader.held_out[0].batches
        baseline = ngram.baseline(loader.first_batches(steps), held_out, tokenizer, padded=keeps_documents)
        fitted = {"step": steps, **{f"ngram_{name}": value for name, value in baseline._asdict().items()}}
        write(fitted)
    order, bits, read = (fitted[f"ngram_{name}"] for name in ngram.Baseline._fields)
    own = math.nan if final["eval_bits_per_byte"] is None else final["eval_bits_per_byte"]
    console.print(f"held out, this model      {own:.3f} bits per byte", style="bold")
    console.print(
        f"held out, byte {order}-grams    {bits:.3f} bits per byte, fitted on the same {plural(read, 'byte', spec=',')}"
    )
    return f"byte {order}-gram", bits * math.log(2) * loader.held_out_bytes_per_token
