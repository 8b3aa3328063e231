"""The gradient noise scale of a run: averages over steps, for metrics.jsonl."""

import math
from collections.abc import Mapping, Sequence

from jaxstack.tracking.jsonl import Record

WINDOW = 50
"""Steps that the averages are taken over: all of them at first, then with weights that fall by 1/50 from step to step.
The estimates of one step are noisy, and the noise scale grows during a run."""
_KEYS = ("grad_signal", "grad_noise")


class NoiseScale:
    """Averages |G|^2 and S separately over steps: the mean of their quotients would be biased."""

    def __init__(self, batch_size: int, records: Sequence[Record]) -> None:
        """Continues the averages of a run, or starts new ones.

        Args:
          batch_size: sequences of a step.
          records: records of metrics.jsonl so far.
        """
        self._batch_size = batch_size
        last = next((r for r in reversed(records) if all(r.get(key) is not None for key in _KEYS)), {"step": 0})
        self._means = {key: float(last.get(key, 0)) for key in _KEYS}
        self._steps = min(int(last["step"]), WINDOW)

    def add(self, values: Mapping[str, float]) -> None:
        """Adds the estimates of a good step, unless they are not finite."""
        if all(math.isfinite(values[key]) for key in _KEYS):
            self._steps = min(self._steps + 1, WINDOW)
            self._means = {key: mean + (values[key] - mean) / self._steps for key, mean in self._means.items()}

    def record(self, tokens: float) -> Record:
        """Returns the averages, and the noise scale in tokens and in sequences.

        The noise scale is NaN if |G|^2 is lost in the noise.

        Args:
          tokens: sum of the loss weights of a step.
        """
        signal = self._means["grad_signal"]
        noise = self._means["grad_noise"]
        scale = noise / signal if signal > 0 and noise > 0 else math.nan
        return {**self._means, "noise_scale_tokens": scale, "noise_scale_sequences": scale * self._batch_size / tokens}
