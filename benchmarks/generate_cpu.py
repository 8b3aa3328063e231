"""Compares greedy decoding with that of `transformers` on the CPU: `python benchmarks/generate_cpu.py [--models 15M]`

Needs the extra `[parity]`. Three model shapes (the quickstart, llama2.c 15M and 42M) have tied embeddings and random
float32 weights, and continue prompts of 64 tokens by 128. Three processes take turns in rounds, so that other work on
the machine slows all of them: jaxstack, transformers with a thread for each core, and transformers with one thread,
which suffers less on a busy machine. The result is the ratio within a round: the time of the better transformers over
ours. We also measure 256 new tokens, because late tokens must cost as much as early ones, attention excepted. Medians
are printed and written to `benchmarks/results/generate_cpu.json`, where models that did not run keep their rows.

`--int8` adds a fourth process, which is jaxstack with `kernels.decode_weights=int8`. The float32 processes are then a
baseline, and the result is `benchmarks/results/generate_int8.json`.
"""

import argparse
import itertools
import json
import os
import sys
import time
from statistics import median
from typing import Any

import record
import train_cpu

SHAPES = {
    "1M": {"layers": 4, "width": 128, "heads": 4, "hidden": 384, "vocab": 256},
    "15M": {"layers": 6, "width": 288, "heads": 6, "hidden": 768, "vocab": 32000},
    "42M": {"layers": 8, "width": 512, "heads": 8, "hidden": 1376, "vocab": 32000},
}
PROMPT, NEW, LONG = 64, 128, 256


def ours(batch: int, shape: dict[str, int], weights: str) -> Any:
    """Returns a function that decodes with jaxstack and weights of some kind."""
    sys.path.insert(0, str(train_cpu.ROOT))

    import jax
    import numpy as np

    from jaxstack import families
    from jaxstack.config import ModelConfig, SampleConfig
    from jaxstack.config.scheme import Scheme
    from jaxstack.generate import decode
    from jaxstack.models import params
    from jaxstack.models.context import Context
    from jaxstack.models.ops import Ops, implementations

    cfg = ModelConfig(
        num_layers=shape["layers"],
        d_model=shape["width"],
        num_heads=shape["heads"],
        d_ff=shape["hidden"],
        vocab_size=shape["vocab"],
        tied_embeddings=True,
    )
    values = jax.jit(lambda: params.init(jax.random.key(0), families.spec(cfg)))()
    prompts = np.random.default_rng(0).integers(0, shape["vocab"], (batch, PROMPT)).tolist()
    ctx = Context(ops=Ops(**implementations("cpu"), decode_weights=Scheme(8) if weights == "int8" else None))
    runs = {n: decode.make_generate(cfg, SampleConfig(tokens=n, temperature=0), ctx=ctx) for n in (1, NEW, LONG)}
    return lambda new: runs[new](values, prompts, 0)


def theirs(batch: int, shape: dict[str, int], threads: int) -> Any:
    """Returns a function that decodes with transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=shape["layers"],
        hidden_size=shape["width"],
        num_attention_heads=shape["heads"],
        intermediate_size=shape["hidden"],
        vocab_size=shape["vocab"],
        tie_word_embeddings=True,
    )
    peer = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, shape["vocab"], (batch, PROMPT))
    how = {"attention_mask": torch.ones_like(ids), "do_sample": False, "use_cache": True, "eos_token_id": None}

    def run(new: int) -> None:
        with torch.inference_mode():
            texts = peer.generate(ids, min_new_tokens=new, max_new_tokens=new, pad_token_id=0, **how)
        assert texts.shape == (batch, PROMPT + new)

    return run


def serve(run: Any) -> None:
    """Answers each line `n` with the seconds that n new tokens and their prompt took."""
    begin = time.perf_counter()
    run(NEW)
    print(json.dumps({"first_step_s": time.perf_counter() - begin}), flush=True)
    for line in sys.stdin:
        begin = time.perf_counter()
        run(int(line))
        print(json.dumps({"s": time.perf_counter() - begin}), flush=True)


def compare(name: str, batch: int, rounds: int, int8: bool) -> dict[str, Any]:
    """Runs all sides in rounds and returns their times and ratios."""
    cores = len(os.sched_getaffinity(0))
    names = {"jaxstack": "float", f"transformers, {cores} threads": str(cores), "transformers, 1 thread": "1"}
    if int8:
        names["jaxstack, int8"] = "int8"
    workers = {key: Worker("--worker", kind, str(batch), name, job={}) for key, kind in names.items()}
    for key in names:
        if key.startswith("jaxstack"):
            workers[key].turn(1), workers[key].turn(LONG)  # compiles
    seconds: dict[str, list[float]] = {key: [] for key in workers}
    early, late = [], []
    for turn in range(rounds):
        order = list(names)
        first = turn % len(order)
        for key in order[first:] + order[:first]:  # no process always runs after the same one
            seconds[key].append(workers[key].turn(NEW)["s"])
        prompt, long = (workers["jaxstack"].turn(n)["s"] for n in (1, LONG))
        early.append((seconds["jaxstack"][-1] - prompt) / (NEW - 1))
        late.append((long - prompt) / (LONG - 1))
    for worker in workers.values():
        worker.close()
    in_8_bits = seconds.get("jaxstack, int8", [])
    baseline = zip(*(times for key, times in seconds.items() if key != "jaxstack, int8"), strict=True)
    ratios = [min(theirs) / ours for ours, *theirs in baseline]
    gains = [ours / own for own, ours in zip(in_8_bits, seconds["jaxstack"], strict=False)]
    gained = {} if not int8 else {
        "int8_against_float": [round(r, 3) for r in gains],
        "speed_of_int8_against_float": round(median(gains), 3),
        "speed_of_int8_against_better_transformers": round(
            median(gain * ratio for gain, ratio in zip(gains, ratios, strict=True)), 3
        ),
    }  # fmt: skip
    return {
        **gained,
        "model": name,
        "batch": batch,
        "rounds": rounds,
        "tokens_per_s": {key: round(batch * NEW / median(values), 1) for key, values in seconds.items()},
        "ratios": [round(r, 3) for r in ratios],
        "speed_against_better_transformers": round(median(ratios), 3),
        "ms_per_step": {f"of {NEW}": round(1e3 * median(early), 2), f"of {LONG}": round(1e3 * median(late), 2)},
        "late_against_early": round(median(b / a for a, b in zip(early, late, strict=True)), 3),
        "load_average": os.getloadavg()[0],
    }


class Worker(train_cpu.Worker):
    """A process that decodes on request."""

    script = __file__


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--models", nargs="+", choices=SHAPES, default=[*SHAPES])
    arguments.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--int8", action="store_true", help="also decode with weights of 8 bits")
    arguments.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.worker:
        side, batch, shape = given.worker[0], int(given.worker[1]), SHAPES[given.worker[2]]
        sys.stdin.readline()
        return serve(theirs(batch, shape, int(side)) if side.isdecimal() else ours(batch, shape, side))
    cases = []
    for name, batch in itertools.product(given.models, given.batches):
        cases.append(compare(name, batch, given.rounds, given.int8))
        print(json.dumps(cases[-1]), flush=True)
    result = "generate_int8" if given.int8 else "generate_cpu"
    cases = record.replace_cases(result, cases, ("model", "batch"))
    print(record.record(result, {"shapes": SHAPES, "prompt": PROMPT, "new": NEW, "cases": cases}))


if __name__ == "__main__":
    main()
