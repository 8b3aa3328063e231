"""Measures speculative decoding at batch 1: `python benchmarks/speculative.py [--target RUN --draft RUN]`

Without runs, it trains them on the source text of the standard library, into `--folder`: a model of eight layers, and
the draft, which has an eighth of its parameters and learns from it. That takes about 20 minutes on two cores. The draft
has two wide layers, since the time of a small model on a CPU grows with its number of operations. The larger model
continues prompts of 64 bytes from the held-out text by 128 bytes, alone and with the draft. They take turns, and the
result is the median of the ratios of their times for a prompt. At temperature 0 the bytes are compared.

With `--int8`, the larger model has matrices of 8 bits (`jaxstack compress quantize --weights=int8 --group=null`), and
so it checks a draft with products of int8. It is also compared with the model in float32 without a draft: the ratio is
to the faster of the two. The result is then `benchmarks/results/speculative_int8.json`.

`benchmarks/results/speculative.json` also has the share of drafted tokens that were accepted, and the time of a round
over that of a token of the larger model alone.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import record

TARGET = ["--model.num_layers=8", "--model.d_model=256", "--model.num_heads=8", "--model.d_ff=768", "--train.steps=330"]
DRAFT = ["--model.num_layers=2", "--model.d_model=192", "--model.num_heads=4", "--model.d_ff=400", "--train.steps=880"]
PROMPT, TOKENS = 64, 128


def train(folder: Path, name: str, flags: list[str]) -> Path:
    """Trains the quickstart with flags, unless that was done, and returns the run."""
    path = folder / name
    if not (path / "samples.txt").is_file():  # written at the end
        command = [sys.executable, str(record.RESULTS.parent.parent / "train.py"), f"--run.dir={path}", *flags]
        subprocess.run([*command, "--train.eval_every=110", "--checkpoint.every=110"], check=True)
    return path


def quantize(run: Path) -> Path:
    """Returns the run with matrices of 8 bits, which is made unless it exists."""
    from jaxstack.cli.parser import execute

    out = run.with_name(f"{run.name}-int8")
    if not out.is_dir():
        execute(["compress", "quantize", str(run), str(out), "--weights=int8", "--group=null", "--method=rtn"])
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("runs/speculative"))
    parser.add_argument("--draft_tokens", type=int, nargs="*", default=[2, 3, 4, 6, 8])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--int8", action="store_true", help="matrices of the target in 8 bits")
    args = parser.parse_args()
    target_path = args.target or train(args.folder, "target", TARGET)
    draft_path = args.draft or train(args.folder, "draft", [*DRAFT, f"--distill.teacher={target_path}"])

    import jaxstack
    from jaxstack import data, families
    from jaxstack.config import SampleConfig
    from jaxstack.generate import decode
    from jaxstack.generate.speculative import Speculation
    from jaxstack.models import params

    target, draft = jaxstack.load(target_path), jaxstack.load(draft_path)
    plain = [target]  # models without a draft
    if args.int8:
        target = jaxstack.load(quantize(target_path))
        plain = [target, *plain]
    sizes = [params.count(families.spec(run.model)) for run in (target, draft)]
    dataset = data.load_for(target.config.model, target.config.data)
    ids = next(iter(dataset.held_out_texts)).ids
    step = (len(ids) - PROMPT) // args.prompts
    prompts = [ids[i * step : i * step + PROMPT].tolist() for i in range(args.prompts)]
    cases: list[dict[str, Any]] = []
    for temperature in (0.0, 0.8):
        sample = SampleConfig(tokens=TOKENS, temperature=temperature)

        def alone(prompt: list[int], model: Any, sample: SampleConfig = sample) -> list[int]:
            parts = decode.stream(model.engine(), [prompt], sample, at_once=True)
            return [token for (part,) in parts for token in part]

        works = {g: Speculation(target.engine(), draft.engine(), g) for g in args.draft_tokens}
        for model in plain:
            alone(prompts[0], model)
        for work in works.values():
            list(work.stream(prompts[0], sample, at_once=True))
        ratios: dict[int, list[float]] = {g: [] for g in works}
        rates: dict[int, list[float]] = {g: [] for g in works}
        accepted, rounds, equal = dict.fromkeys(works, 0), dict.fromkeys(works, 0), True
        own: list[list[float]] = [[] for _ in plain]
        for prompt in prompts:
            texts = []
            for model, speeds in zip(plain, own, strict=True):
                began = time.perf_counter()
                texts.append(alone(prompt, model))
                speeds.append(len(texts[-1]) / (time.perf_counter() - began))
            text, seconds = texts[0], 1 / max(speeds[-1] for speeds in own)
            for g, work in works.items():
                began = time.perf_counter()
                *_, found = work.stream(prompt, sample, at_once=True)
                each = (time.perf_counter() - began) / int(found.count[0])
                ratios[g].append(seconds / each)
                rates[g].append(1 / each)
                accepted[g] += int(found.accepted)
                rounds[g] += int(found.rounds)
                if temperature == 0:
                    equal &= found.added[0, : found.count[0]].tolist() == text
        for g in works:
            case = {
                "temperature": temperature, "draft_tokens": g, "ratio": median(ratios[g]),
                "tokens_per_s": median(rates[g]), "alone_tokens_per_s": median(own[0]),
                "accepted": accepted[g] / (g * rounds[g]), "tokens_per_round": 1 + accepted[g] / rounds[g],
            }  # fmt: skip
            if args.int8:
                case["float_alone_tokens_per_s"] = median(own[1])
            case["round_over_token"] = case["tokens_per_round"] / case["ratio"]  # in the time of a token alone
            print(", ".join(f"{name} {value:.3g}" for name, value in case.items()), flush=True)
            cases.append(case)
        if temperature == 0:
            print(f"greedy texts are equal: {equal}")
            cases[0]["greedy_texts_equal"] = equal
    models = dict(zip(("target", "draft"), sizes, strict=True))
    record.record(
        "speculative_int8" if args.int8 else "speculative",
        {"parameters": models, "prompt": PROMPT, "tokens": TOKENS, "cases": cases},
    )


if __name__ == "__main__":
    main()
