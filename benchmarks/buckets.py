"""Measures padding and time of rows of several lengths: `python benchmarks/buckets.py`

The text is the standard library's files as documents, in bytes. `padding` has the share of padding for several lengths
of the longest row: with one document in each row of that length, with `data.buckets=auto`, and with best-fit packing.
`time` compares steps of two cores: the programs of all buckets and that of full windows take turns in rounds. A run of
buckets takes the mean of its programs, weighted by their share of the batches. `per_token` is the time of a token with
buckets over that of a token of full windows, padding included; `per_learned_token` counts only tokens that are learned.
The result goes to `benchmarks/results/buckets.json`.
"""

import argparse
import os
import time
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import record

from jaxstack import data
from jaxstack.config import Config, ConfigError, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig, resolve
from jaxstack.data.buckets import BucketReader, choose_lengths, row_lengths, whole_documents
from jaxstack.data.loader import DataLoader, bucket_sizes
from jaxstack.data.windows import document_windows

PADDING = [(256, 16), (1024, 16), (4096, 16), (8192, 16), (16384, 16), (16384, 24), (32768, 24)]
"""Tokens of the longest row, and rows of a batch."""

TIMES = [(1024, 8, 0.02), (4096, 2, 0.1)]
"""Tokens of the longest row, rows of a batch, and the limit of padding."""


def padding(text: data.Tokens, seq_len: int, rows: int) -> dict[str, Any]:
    """Returns the shares of padding of the training text, and the lengths that `auto` chooses; `null` if it refuses."""
    whole = whole_documents(text, seq_len)
    length_D = row_lengths(whole)[0]
    used = int(length_D.sum())
    packed = document_windows(whole, seq_len, packing=True).first_W.size
    found: dict[str, Any] = {"seq_len": seq_len, "batch_size": rows, "one_length": 1 - used / (length_D.size * seq_len)}
    try:
        lengths = np.array(choose_lengths(DataConfig(seq_len=seq_len, batch_size=rows, buckets="auto"), [text]))
        padded = int(lengths[np.searchsorted(lengths, length_D)].sum())
        found |= {"auto": 1 - used / padded, "buckets": lengths.tolist()}
    except ConfigError as error:
        found |= {"auto": None, "refused": str(error)}
    found["best_fit"] = 1 - used / (packed * seq_len)
    return {name: round(value, 5) if isinstance(value, float) else value for name, value in found.items()}


def measure(dataset: data.Dataset, seq_len: int, rows: int, limit: float, rounds: int) -> dict[str, Any]:
    """Returns the milliseconds of a step of full windows and of each bucket, and both ratios."""
    import jax

    from jaxstack import families, sharding
    from jaxstack.families.context import make_context
    from jaxstack.training.assemble import jit_train_step
    from jaxstack.training.services.compile_ahead import CompileAhead
    from jaxstack.training.state import Recipe, abstract_state, make_state

    asked = DataConfig(seq_len=seq_len, batch_size=rows, buckets="auto", max_padding=limit)
    plain = DataConfig(seq_len=seq_len, batch_size=rows)
    lengths = choose_lengths(asked, [*dataset.training_texts])
    base = Config(
        model=ModelConfig(num_layers=2, d_model=64, num_heads=2, d_ff=176),
        optim=OptimConfig(warmup_steps=0, schedule="constant"),
        train=TrainConfig(steps=10**6, eval_steps=1),
        mesh=MeshConfig(data=1),
    )
    base = resolve(base, dataset.vocab_size)
    cfgs = {"windows": replace(base, data=plain), "buckets": replace(base, data=replace(asked, buckets=lengths))}
    steps: dict[str, tuple[Any, Any, Any]] = {}
    for name, cfg in cfgs.items():
        ctx = make_context(cfg, sharding.make_mesh(cfg.mesh, cfg.microbatch_size))
        abstract = abstract_state(Recipe.of(cfg), ctx)
        ahead = CompileAhead(
            cfg.data, families.batch_spec(cfg.model, cfg.data), ctx.layout.sharding(ctx.layout.batch)
        ).__enter__()
        step = ahead.wrap(jit_train_step(cfg, ctx, abstract), abstract, cfg.data.lengths)
        steps[name] = (
            step,
            make_state(Recipe.of(cfg), ctx, abstract),
            DataLoader(cfg, dataset, ctx.layout.sharding(ctx.layout.batch)),
        )
    text = whole_documents(next(dataset.training_texts), seq_len)
    reader = BucketReader([text], ["stdlib"], [(0, (1.0,))], bucket_sizes(cfgs["buckets"].data), 0)
    places = {length: [k for k in range(40_000) if reader.row_figures(k)["bucket"] == length][:4] for length in lengths}
    turns = [("windows", 0, range(4)), *(("buckets", length, places[length]) for length in lengths)]
    seconds: dict[tuple[str, int], list[float]] = {(name, length): [] for name, length, _ in turns}
    for turn in range(rounds + 1):  # the first compiles
        for name, length, indices in turns:
            step, state, loader = steps[name]
            batch = loader.to_devices(next(loader.iterate(indices[turn % len(indices)], 1)))
            begin = time.perf_counter()
            state, metrics = step(state, batch)
            jax.block_until_ready((state, metrics))
            steps[name] = (step, state, loader)
            if turn:
                seconds[name, length].append(time.perf_counter() - begin)
    times = {key: 1e3 * median(found) for key, found in seconds.items()}
    mean = sum(share * times["buckets", length] for share, length in zip(reader.shares, lengths, strict=True))
    ratio = mean / times["windows", 0]
    return {
        "seq_len": seq_len,
        "batch_size": rows,
        "buckets": list(lengths),
        "shares": [round(share, 4) for share in reader.shares],
        "padding": round(reader.padding, 4),
        "rounds": rounds,
        "ms_windows": round(times["windows", 0], 1),
        "ms_buckets": [round(times["buckets", length], 1) for length in lengths],
        "per_token": round(ratio, 3),
        "per_learned_token": round(ratio / (1 - reader.padding), 3),
    }


def main() -> None:
    """Measures and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10, help="steps of each program (default: 10)")
    parser.add_argument("--small", action="store_true", help="two rounds of the shorter rows; writes nothing")
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    dataset = data.load(DataConfig())
    text = next(dataset.training_texts)
    paddings = [padding(text, *each) for each in PADDING]
    for each in paddings:
        print(each)
    before = os.getloadavg()[0]
    times = []
    for each in TIMES[:1] if args.small else TIMES:
        times.append(measure(dataset, *each, 2 if args.small else args.rounds))
        print(times[-1])
    if not args.small:
        busy = {"before": round(before, 1), "after": round(os.getloadavg()[0], 1)}
        text_of = {"documents": int(text.starts.size), "tokens": len(text)}
        print(record.record("buckets", {"text": text_of, "padding": paddings, "time": times, "load_average": busy}))


if __name__ == "__main__":
    main()
