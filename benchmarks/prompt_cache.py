"""Measures the time to the first token with and without prompt caching: `python benchmarks/prompt_cache.py`

A model with random weights reads prompts that share a beginning, such as a system prompt, and end differently. Two
batches, one with a cache of prompts and one without, take turns within each round; the texts are the same, token for
token, which is checked. The result is the median over the rounds of the time from the request to its first token. The
first round of each case compiles and reads the shared part once; it is left out.
"""

import argparse
import os
import time
from statistics import median
from typing import Any

import record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    args = parser.parse_args()

    import jax
    import numpy as np

    from jaxstack import families
    from jaxstack.config import Config, ModelConfig, SampleConfig
    from jaxstack.generate.continuous import ContinuousBatch, Prompt
    from jaxstack.generate.engine import Engine
    from jaxstack.generate.prompt_cache import PromptCache
    from jaxstack.generate.prompts import row_seeds
    from jaxstack.models import params
    from jaxstack.planner import memory

    cfg = ModelConfig(num_layers=args.layers, d_model=args.width, num_heads=args.width // 64, vocab_size=256)
    spec = families.spec(cfg)
    ctx = memory.context(Config(model=cfg), 1, jax.devices()[0].platform)
    engine = Engine.create(cfg, params.init(jax.random.key(0), spec), ctx=ctx)
    sample, rng = SampleConfig(tokens=8, temperature=1), np.random.default_rng(0)

    def write(batch: Any, tokens: list[int]) -> tuple[float, list[int], int]:
        """Returns the seconds to the first token, the text, and how many tokens were not read."""
        first, text, cached = 0.0, [], 0
        began = time.perf_counter()
        batch.add(Prompt(0, tokens, sample, row_seeds([tokens])[0]))
        while batch.busy:
            for part in batch.advance():
                first, cached = first or time.perf_counter() - began, cached or part.cached
                text += part.tokens
        return first, text, cached

    cases = []
    for shared, own in ((192, 32), (448, 32), (960, 32)):
        prefix = rng.integers(1, 256, shared).tolist()
        slots = shared + own + sample.tokens
        cache = PromptCache(cfg, 2**30)
        batches = {True: ContinuousBatch(engine, rows=1, slots=slots, cache=cache)}
        batches[False] = ContinuousBatch(engine, rows=1, slots=slots)
        times: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(args.rounds + 2):
            prompt = prefix + rng.integers(1, 256, own).tolist()
            texts = {}
            for kept in (True, False) if turn % 2 else (False, True):
                seconds, texts[kept], cached = write(batches[kept], prompt)
                if turn > 1:
                    times[kept].append(seconds)
                    assert cached == kept * shared
            assert texts[True] == texts[False], "another text"
        with_cache, without = median(times[True]), median(times[False])
        case = {
            "shared": shared, "own": own, "first_token_s": with_cache, "first_token_without_s": without,
            "ratio": without / with_cache, "bytes_per_prompt": cache.bytes // (args.rounds + 2),
        }  # fmt: skip
        print(", ".join(f"{name} {value:.4g}" for name, value in case.items()), flush=True)
        cases.append(case)
    shape = {"layers": args.layers, "width": args.width, "parameters": params.count(spec)}
    record.record("prompt_cache", {"model": shape, "cases": cases, "load": os.getloadavg()[0]})


if __name__ == "__main__":
    main()
