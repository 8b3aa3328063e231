"""Compares matmuls of XLA and torch on one core: `python benchmarks/gemm_cpu.py [--rounds 9]`

Needs the extra `[parity]`. The shapes are those of job J2 of `train_cpu.py`, whose training step can be no faster.
XLA is measured as it is, without YNNPACK and with oneDNN; "kernel" is what its compiled program calls. The sides take
turns in rounds, and `speed_against_torch` is the median of torch's time over each one's. The result goes to
`benchmarks/results/gemm_cpu.json`.
"""

import argparse
import os
import re
import time
from statistics import median
from typing import Any

import record

# [M, K] x [K, N] as in a forward pass, and with a transposed left or right operand as in a backward pass.
SHAPES = [(2048, 384, 1536, "nn"), (2048, 1536, 384, "nn"), (2048, 1536, 384, "nt"), (384, 2048, 1536, "tn")]

OPTIONS: dict[str, dict[str, Any]] = {
    "xla": {},
    "xla without ynnpack": {"xla_cpu_experimental_ynn_fusion_type": ""},
    "xla with onednn": {"xla_cpu_use_onednn": True, "xla_cpu_experimental_onednn_custom_call": True},
}


def seconds(call: Any) -> float:
    """Returns the seconds of one call."""
    begin = time.perf_counter()
    for _ in range(10):
        call()
    return (time.perf_counter() - begin) / 10


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--rounds", type=int, default=9)
    rounds = arguments.parse_args().rounds
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

    import jax
    import numpy as np
    import torch

    torch.set_num_threads(1)
    rng, results = np.random.default_rng(0), []
    for m, k, n, form in SHAPES:
        a = rng.standard_normal((k, m) if form == "tn" else (m, k), np.float32)
        b = rng.standard_normal((n, k) if form == "nt" else (k, n), np.float32)

        def product(x: Any, y: Any, form: str = form) -> Any:
            return x.T @ y if form == "tn" else x @ y.T if form == "nt" else x @ y

        own, theirs = (jax.numpy.asarray(a), jax.numpy.asarray(b)), (torch.from_numpy(a), torch.from_numpy(b))
        programs = {name: jax.jit(product).lower(*own).compile(how) for name, how in OPTIONS.items()}
        calls = {name: lambda f=f, x=own: f(*x).block_until_ready() for name, f in programs.items()}
        calls["torch"] = lambda f=product, x=theirs: f(*x)
        texts = {name: program.as_text() for name, program in programs.items()}
        kernels = {name: re.findall(r"ynn_fusion|onednn\S*matmul|dot\(", text)[-1:] for name, text in texts.items()}
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            seconds(call)  # compiles and warms up
        for _ in range(rounds):
            for name, call in calls.items():
                taken[name].append(seconds(call))
        ratios = {
            name: round(median(t / x for x, t in zip(taken[name], taken["torch"], strict=True)), 3) for name in programs
        }
        rates = {name: round(2e-9 * m * k * n / median(values), 1) for name, values in taken.items()}
        row = {"shape": [m, k, n], "form": form, "gflops": rates, "speed_against_torch": ratios, "kernel": kernels}
        results.append(row | {"load_average": os.getloadavg()[0]})
        print(results[-1], flush=True)
    print(record.record("gemm_cpu", {"rounds": rounds, "products": results}))


if __name__ == "__main__":
    main()
