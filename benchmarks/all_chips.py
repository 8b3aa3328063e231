"""Plans one step on every chip of `jaxstack/common/hardware.py`: `python benchmarks/all_chips.py`

`jaxstack plan time` predicts the step of Qwen3 0.6B on one chip of each kind, with all devices that JAX has of it. A
microbatch is one sequence of 2,048 tokens, so that matmuls are large enough to be bound by compute. Chips without
bfloat16 compute in float16. `--price` gives the price of a device for an hour, and the result then has the cost of a
million tokens.

Nothing is compiled, and no device is used.
"""

import argparse
import os
from collections.abc import Sequence
from typing import Any

import record

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from unseen_steps import printed

from jaxstack.common.hardware import CHIPS

MODEL = "qwen3_0.6b"
SEQUENCES = 64
FIGURES = ("step_s", "tokens_per_s_per_device", "low", "high", "mfu", "mfu_causal", "attention", "within_fit", "parts")


def predict(name: str, price: float | None) -> dict[str, Any]:
    """Returns what `jaxstack plan time` prints for a chip, and the memory that `jaxstack plan memory` prints."""
    chip = CHIPS[name]
    dtype = "bfloat16" if "bfloat16" in chip.flops else "float16"
    words = [
        f"--target={name}:1", f"--config={MODEL}", "--mesh.data=1", f"--mesh.fsdp={chip.devices}",
        f"--train.dtype={dtype}", "--train.remat=full", "--data.seq_len=2048", f"--data.batch_size={SEQUENCES}",
        f"--train.grad_accum={SEQUENCES // chip.devices}",
    ]  # fmt: skip
    time = printed(["plan", "time", *words, *([] if price is None else [f"--price={price}"])])
    memory = printed(["plan", "memory", *words])
    return {
        "chip": name, "devices": time["devices"], "dtype": dtype, **{figure: time[figure] for figure in FIGURES},
        "GiB": sum(next(iter(part for title, part in memory.items() if title.startswith("memory"))).values()) / 2**30,
        "cost_of_a_million": None if price is None else 1e6 * time["cost"] / time["tokens"],
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--price", type=float, help="price of a device for an hour")
    price = arguments.parse_args(argv).price
    rows = [predict(name, price) for name in CHIPS]
    print(f"{'chip':<16} {'step s':>9} {'tokens/s':>10} {'in nine of ten cases':>22} {'MFU':>6} {'GiB':>6}")
    for row in rows:
        interval = f"{row['low']:,.0f} to {row['high']:,.0f}"
        rate = f"{row['tokens_per_s_per_device']:,.0f}"
        print(
            f"{row['chip']:<16} {row['step_s']:>9.4g} {rate:>10} {interval:>22} {row['mfu']:>6.1%} {row['GiB']:>6.1f}"
        )
    record.record("all_chips", {"model": MODEL, "sequences": SEQUENCES, "price": price, "rows": rows})


if __name__ == "__main__":
    main()
