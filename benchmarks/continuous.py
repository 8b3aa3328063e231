"""Compares continuous batching with one fixed batch of 64 prompts: `python benchmarks/continuous.py`

A model with random weights writes texts at temperature 1. Four of its 256 tokens end a text, so texts have 64 tokens on
average, 512 at most. The prompts have 8 to 512 tokens; the logarithm of the length is uniform. The fixed batch reads
and continues all prompts together until the last text ends. With `sample.rows` a row takes the next prompt when its
text ends. Both write the same tokens, which is checked. For each seed of lengths and samples they take turns; the
result is the ratio of their tokens a second. Medians over the seeds go to `benchmarks/results/continuous.json`.
"""

import argparse
import time
from dataclasses import replace
from statistics import median
from typing import Any

import record

PROMPTS, LONGEST, TOKENS, STOP = 64, 512, 512, (1, 2, 3, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[8, 16])
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3, 4, 5])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    args = parser.parse_args()

    import jax
    import numpy as np

    from jaxstack import families
    from jaxstack.config import Config, ModelConfig, SampleConfig
    from jaxstack.generate import decode
    from jaxstack.generate.engine import Engine
    from jaxstack.models import params
    from jaxstack.planner import memory

    cfg = ModelConfig(num_layers=args.layers, d_model=args.width, num_heads=args.width // 64, vocab_size=256)
    spec = families.spec(cfg)
    platform = jax.devices()[0].platform
    ctx = memory.context(Config(model=cfg), 1, platform)
    engine = Engine.create(cfg, params.init(jax.random.key(0), spec), ctx=ctx)
    sample = SampleConfig(tokens=TOKENS, temperature=1.0)

    def write(prompts: list[list[int]], rows: int | None, seed: int) -> tuple[float, list[list[int]]]:
        texts: list[list[int]] = [[] for _ in prompts]
        began = time.perf_counter()
        for parts in decode.stream(engine, prompts, replace(sample, rows=rows), stop=STOP, seed=seed, at_once=True):
            for text, part in zip(texts, parts, strict=True):
                text += part
        return time.perf_counter() - began, texts

    def prompts_of(seed: int) -> list[list[int]]:
        rng = np.random.default_rng(seed)
        lengths = np.exp(rng.uniform(np.log(8), np.log(LONGEST), PROMPTS)).astype(int)
        lengths[0] = LONGEST  # one compiled program serves all seeds
        return [rng.integers(0, cfg.vocab, n).tolist() for n in lengths]

    cases: list[dict[str, Any]] = []
    for seed in [0, *args.seeds]:  # the first one compiles
        prompts = prompts_of(seed)
        fixed, texts = write(prompts, None, seed)
        count = sum(map(len, texts))
        for rows in args.rows:
            seconds, same = write(prompts, rows, seed)
            assert same == texts, "another text"
            case = {
                "seed": seed, "rows": rows, "tokens": count, "longest": max(map(len, texts)),
                "fixed_tokens_per_s": count / fixed, "tokens_per_s": count / seconds, "ratio": fixed / seconds,
            }  # fmt: skip
            print(", ".join(f"{name} {value:.4g}" for name, value in case.items()), flush=True)
            if seed:
                cases.append(case)
    ratios = {str(rows): median(c["ratio"] for c in cases if c["rows"] == rows) for rows in args.rows}
    print(f"median ratio by rows: {ratios}")
    shape = {"layers": args.layers, "width": args.width, "parameters": params.count(spec)}
    record.record("continuous", {"model": shape, "median_ratio": ratios, "cases": cases})


if __name__ == "__main__":
    main()
