"""Measures how many drafted tokens a model accepts from its own module: `python benchmarks/own_draft.py [--run RUN]`

Without a run, it trains one on the source text of the standard library, into `--folder`: the quickstart with half of
its steps and `model.mtp.depth=1`. That takes about four minutes of CPU time. The model continues prompts of 64 bytes
from the held-out text by 96 bytes, alone and with drafts of its module, and again with drafts of a module that has its
initial values. At temperature 0 the bytes are compared.

`benchmarks/results/own_draft.json` has the share of drafted tokens that were accepted, and the tokens of a round, which
is one forward pass of the model. Times are left out, because other work ran beside it.
"""

import argparse
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import record

TRAIN = ["--model.mtp.depth=1", "--train.steps=330", "--train.eval_every=330", "--checkpoint.every=330"]
PROMPT = 64
TOKENS = 96
DRAFTED = (1, 2, 4)


def train(folder: Path) -> Path:
    """Trains the model, unless that was done, and returns the run."""
    path = folder / "mtp"
    if not (path / "samples.txt").is_file():  # written at the end
        script = record.RESULTS.parent.parent / "train.py"
        subprocess.run([sys.executable, str(script), f"--run.dir={path}", *TRAIN], check=True)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("runs/own_draft"))
    parser.add_argument("--prompts", type=int, default=8)
    args = parser.parse_args()
    path = args.run or train(args.folder)

    import jax

    import jaxstack
    from jaxstack import data, families
    from jaxstack.config import SampleConfig
    from jaxstack.generate import decode
    from jaxstack.generate.speculative import Speculation
    from jaxstack.models import params

    run = jaxstack.load(path)
    dataset = data.load_for(run.config.model, run.config.data)
    ids = next(iter(dataset.held_out_texts)).ids
    step = (len(ids) - PROMPT) // args.prompts
    prompts = [ids[i * step : i * step + PROMPT].tolist() for i in range(args.prompts)]
    initial = params.init(jax.random.key(1), families.spec(run.model))
    trained = run.engine()
    engines = {"trained": trained, "initial": replace(trained, modules=initial["mtp"])}
    cases: list[dict[str, Any]] = []
    equal = True
    for temperature in (0.0, 0.8):
        sample = SampleConfig(tokens=TOKENS, temperature=temperature)
        texts: list[list[int]] = []
        if temperature == 0:
            for prompt in prompts:
                parts = decode.stream(trained, [prompt], sample, at_once=True)
                texts.append([token for (part,) in parts for token in part])
        for module, engine in engines.items():
            for tokens in DRAFTED:
                work = Speculation(engine, None, tokens)
                accepted = 0
                rounds = 0
                for i, prompt in enumerate(prompts):
                    *_, found = work.stream(prompt, sample, at_once=True)
                    accepted += int(found.accepted)
                    rounds += int(found.rounds)
                    if temperature == 0:
                        equal &= found.added[0, : found.count[0]].tolist() == texts[i]
                case = {
                    "temperature": temperature, "module": module, "draft_tokens": tokens,
                    "accepted": accepted / (tokens * rounds), "tokens_per_round": 1 + accepted / rounds,
                }  # fmt: skip
                print(", ".join(f"{name} {value}" for name, value in case.items()), flush=True)
                cases.append(case)
    print(f"greedy texts are equal: {equal}")
    sizes = {name: params.count(spec) for name, spec in families.spec(run.model).items()}
    record.record(
        "own_draft",
        {
            "parameters": sum(sizes.values()), "module_parameters": sizes["mtp"], "prompts": args.prompts,
            "prompt": PROMPT, "tokens": TOKENS, "greedy_texts_equal": equal, "cases": cases,
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
