"""Throughput, MFU and memory of the training loop; `jaxstack.tracking.goodput` says where its seconds go."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from jaxstack.config import Config
from jaxstack.models import flops as plan


class ThroughputMeter:
    """Times finished steps. The clock stands still until `restart`, so compilation and evaluation are not counted."""

    def __init__(self, cfg: Config, devices: list[jax.Device]) -> None:
        flops = plan.flops_per_token(cfg.model, cfg.data.seq_len)
        self._conventions = {"mfu": flops.full, "mfu_causal": flops.causal}
        self._tokens = cfg.data.batch_size * cfg.data.seq_len
        self._dtype = cfg.train.dtype
        self._kind, self._devices = devices[0].device_kind, len(devices)
        self._since: float | None = None
        self._steps, self._waited = 0, 0.0

    @property
    def started(self) -> bool:
        """Whether the clock has been started; before that the first step is compiled."""
        return self._since is not None

    def restart(self) -> None:
        """Starts the clock, and forgets what was timed before."""
        self._since, self._steps, self._waited = time.perf_counter(), 0, 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The clock stands still while the context lasts."""
        began = time.perf_counter()
        yield
        if self._since is not None:
            self._since += time.perf_counter() - began

    def finished(self, waited: float) -> None:
        """One more step is done; the loop had waited so many seconds for its batch."""
        self._steps += 1
        self._waited += waited

    def take(self) -> dict[str, float | None]:
        """Means since the clock was started or last read; None where no step was timed.

        `tokens_per_s` over all devices, `step_time_s` and `data_wait_s` in seconds a step, `mfu` by the
        full-attention convention and `mfu_causal` by the causal one. `peak_bytes_in_use` is the most that one of this
        process's devices has held since the beginning; left out where the device does not tell, as a CPU.
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
        for name, flops in self._conventions.items():
            values[name] = plan.mfu(speed * flops, self._kind, self._devices, self._dtype)
        stats = [device.memory_stats() for device in jax.local_devices()]
        self.restart()
        peaks = [float(s["peak_bytes_in_use"]) for s in stats if s and "peak_bytes_in_use" in s]
        return {name: values[name] for name in names} | ({"peak_bytes_in_use": max(peaks)} if peaks else {})
