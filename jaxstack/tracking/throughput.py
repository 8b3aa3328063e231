"""Throughput, MFU and memory use of the training loop. See `jaxstack.tracking.goodput` for how its time is spent."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from jaxstack.config import DataConfig, ModelConfig
from jaxstack.families import flops as plan


class ThroughputMeter:
    """Times finished steps. The clock does not run before `restart`, so compilation and evaluation are not counted."""

    def __init__(self, model: ModelConfig, data: DataConfig, dtype: str, devices: list[jax.Device]) -> None:
        """Prepares a meter for a model and its batches, in a compute dtype, on the devices of the mesh."""
        self._conventions = {}  # FLOPs of a token, by the length of its row
        for length in data.lengths:
            rows = data.with_length(length)
            flops = plan.flops_per_token(model, length, rows.target_length, rows.batch_size)
            self._conventions[length] = {"mfu": flops.full, "mfu_causal": flops.causal}
        self._longest = data.seq_len
        self._tokens = data.batch_size * data.seq_len
        self._dtype = dtype
        self._kind = devices[0].device_kind
        self._devices = len(devices)
        self._since: float | None = None
        self._steps = 0
        self._waited = 0.0
        self._lengths = Counter[int]()

    @property
    def started(self) -> bool:
        """Whether the clock was started. Until then, the first step is being compiled."""
        return self._since is not None

    def restart(self) -> None:
        """Restarts the clock, and discards the steps timed so far."""
        self._since = time.perf_counter()
        self._steps = 0
        self._waited = 0.0
        self._lengths = Counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock inside the context."""
        began = time.perf_counter()
        yield
        if self._since is not None:
            self._since += time.perf_counter() - began

    def count_step(self, waited: float, length: int | None = None) -> None:
        """Counts a finished step, whose batch the loop waited for.

        Args:
          waited: seconds that the loop waited.
          length: length of the batch's rows. `None` means the longest.
        """
        self._steps += 1
        self._lengths[length or self._longest] += 1
        self._waited += waited

    def take(self) -> dict[str, float | None]:
        """Returns means since the clock was started or last read, or `None` for each if no step was timed.

        `tokens_per_s` is the sum over all devices, with padding. `step_time_s` and `data_wait_s` are seconds per step.
        `mfu` uses the full-attention convention and `mfu_causal` the causal one. `peak_bytes_in_use` is the largest
        memory use of any device of this process since it started. It is missing if devices do not report it, such as
        CPUs.
        """
        names = ("tokens_per_s", "mfu", "mfu_causal", "step_time_s", "data_wait_s")
        if self._since is None or not self._steps:
            return dict.fromkeys(names)
        seconds = (time.perf_counter() - self._since) / self._steps
        speed = self._tokens / seconds
        values: dict[str, float | None] = {
            "tokens_per_s": speed,
            "step_time_s": seconds,
            "data_wait_s": self._waited / self._steps,
        }
        for name in names[1:3]:
            per_token = sum(n * self._conventions[length][name] for length, n in self._lengths.items()) / self._steps
            values[name] = plan.mfu(speed * per_token, self._kind, self._devices, self._dtype)
        stats = [device.memory_stats() for device in jax.local_devices()]
        self.restart()
        peaks = [float(s["peak_bytes_in_use"]) for s in stats if s and "peak_bytes_in_use" in s]
        return {name: values[name] for name in names} | ({"peak_bytes_in_use": max(peaks)} if peaks else {})
