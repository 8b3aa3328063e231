"""The batches of a run on their way to the devices: of each batch, every process reads the rows that it holds."""

import time
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import jax

from jaxstack import data
from jaxstack.config import Config
from jaxstack.runtime import distributed


class DataLoader:
    """Training batches by their index, and the held-out ones.

    Attributes:
      held_out_batches: this process's rows of the held-out batches.
      global_held_out_batches: all of their rows, read when asked for.
    """

    def __init__(self, cfg: Config, dataset: data.Dataset, sharding: jax.sharding.Sharding) -> None:
        """
        Args:
          sharding: of a whole batch, by its rows.
        """
        window_args: dict[str, Any] = {name: getattr(cfg.data, name) for name in ("seq_len", "batch_size", "packing")}
        self._window_args = window_args
        self._cfg, self._dataset, self._sharding = cfg, dataset, sharding
        self._local_rows = distributed.rows_here(sharding, cfg.data.batch_size)
        self._batches = data.batches(dataset.train, seed=cfg.run.seed, rows=self._local_rows, **window_args)
        self.held_out_batches = [
            *data.eval_batches(dataset.eval, steps=cfg.train.eval_steps, rows=self._local_rows, **window_args)
        ]
        self.global_held_out_batches = data.eval_batches(dataset.eval, steps=cfg.train.eval_steps, **window_args)

    @cached_property
    def held_out_bytes(self) -> int:
        """Bytes of the held-out targets that count."""
        count = self._dataset.tokenizer.num_bytes
        return sum(count(b["targets"][b["loss_weights"] > 0]) for b in self.global_held_out_batches)

    def iterate(self, first: int, count: int, timed: Callable[[str], None]) -> Iterator[tuple[int, data.Batch, float]]:
        """Index, this process's rows, and the seconds waited for them, of `count` batches from `first` on."""
        timed("data")
        asked = time.perf_counter()
        for index, batch in data.prefetch(self._batches.slice(slice(first + count)), first):
            yield index, batch, time.perf_counter() - asked
            timed("data")
            asked = time.perf_counter()

    def first_batches(self, count: int) -> Iterator[data.Batch]:
        """All rows of the first `count` batches."""
        whole = data.batches(self._dataset.train, seed=self._cfg.run.seed, **self._window_args)
        return (whole[i] for i in range(count))

    def to_devices(self, batch: data.Batch) -> Any:
        """The whole batch on the devices, of the rows that each process has."""
        return distributed.to_global_batch(batch, self._sharding, self._local_rows, self._cfg.data.batch_size)

    def describe_batch(self, index: int) -> str:
        """What a batch was read from, in one line."""
        return data.describe_batch(self._dataset.train, index, seed=self._cfg.run.seed, **self._window_args)
