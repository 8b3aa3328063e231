"""The batches of a run: each process reads the rows of a batch that its devices hold."""

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import jax

from jaxstack import data
from jaxstack.common.tree import Batch
from jaxstack.config import Config
from jaxstack.runtime import distributed


class DataLoader:
    """Reads training batches by their index, and the held-out batches.

    A training batch depends only on the seed and its index, so a checkpoint stores nothing but the index.

    Attributes:
      held_out_batches: this process's rows of the held-out batches.
      global_held_out_batches: all rows of the held-out batches, read when needed.
    """

    def __init__(self, cfg: Config, dataset: data.Dataset, sharding: jax.sharding.Sharding) -> None:
        """Prepares to read batches; only the held-out ones are read at once.

        Args:
          cfg: sizes and seed.
          dataset: training and held-out tokens.
          sharding: the sharding of a batch over its rows.
        """
        window_args: dict[str, Any] = {name: getattr(cfg.data, name) for name in ("seq_len", "batch_size", "packing")}
        self._window_args = window_args
        self._cfg, self._dataset, self._sharding = cfg, dataset, sharding
        self._local_rows = distributed.local_rows(sharding, cfg.data.batch_size)
        self._batches = data.batches(dataset.train, seed=cfg.run.seed, rows=self._local_rows, **window_args)
        self.held_out_batches = [
            *data.eval_batches(dataset.eval, steps=cfg.train.eval_steps, rows=self._local_rows, **window_args)
        ]
        self.global_held_out_batches = data.eval_batches(dataset.eval, steps=cfg.train.eval_steps, **window_args)

    @cached_property
    def held_out_bytes(self) -> float:
        """The number of bytes of the held-out targets, without targets of loss weight 0. NaN if the ids do not say."""
        tokenizer = self._dataset.tokenizer
        if not tokenizer.keeps_text:
            return math.nan
        count = tokenizer.num_bytes
        return sum(count(b["targets"][b["loss_weights"] > 0]) for b in self.global_held_out_batches) or math.nan

    @cached_property
    def held_out_bytes_per_token(self) -> float:
        """The mean number of bytes of the held-out targets, without targets of loss weight 0."""
        return self.held_out_bytes / sum(int((b["loss_weights"] > 0).sum()) for b in self.global_held_out_batches)

    def iterate(self, first: int, count: int) -> Iterator[data.Batch]:
        """Yields this process's rows of `count` batches from index `first` on. A thread reads ahead."""
        for _, batch in data.prefetch(self._batches.slice(slice(first + count)), first):
            yield batch

    def first_batches(self, count: int) -> Iterator[data.Batch]:
        """Returns an iterator over all rows of the first `count` batches."""
        batches = data.batches(self._dataset.train, seed=self._cfg.run.seed, **self._window_args)
        return (batches[i] for i in range(count))

    def to_devices(self, batch: data.Batch) -> Batch:
        """Returns the global batch on the devices, from the rows that each process has read."""
        return distributed.to_global_batch(batch, self._sharding, self._local_rows, self._cfg.data.batch_size)

    def describe_batch(self, index: int) -> str:
        """Returns one line that lists the sources of a batch."""
        return data.describe_batch(self._dataset.train, index, seed=self._cfg.run.seed, **self._window_args)
