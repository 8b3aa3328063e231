"""Compares what two commits compute, to show that a mechanical change leaves every program and loss as it was.

    python tests/same_programs.py OLD NEW [--only CASE] [--keep DIR]
    python tests/same_programs.py OLD NEW --tests

OLD and NEW are git refs; "." is the working tree. Each case runs `python train.py` in a copy of both trees, for a few
steps of a tiny model on simulated CPU devices. The tool compares:

- every lowered program: its StableHLO text, without names of functions and source locations;
- metrics.jsonl, without times and speeds, and samples.txt;
- the files of tests/golden.

`--keep` writes whatever differs into a folder. `--tests` compares the names of the tests that pytest collects instead.
The exit code is 1 if anything differs. Kernels that run only on an accelerator are not compared.
"""

import argparse
import io
import json
import math
import os
import random
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

KEYS = {
    "model.moe.num_groups": "model.moe.groups",
    "model.moe.top_k_groups": "model.moe.top_groups",
    "model.moe.routed_scale": "model.moe.scale",
    "model.moe.bias_update_rate": "model.moe.bias_rate",
    "model.moe.aux_loss_weight": "model.moe.balance_weight",
    "model.moe.z_loss_weight": "model.moe.z_weight",
    "kernels.norm=custom_vjp": "kernels.norm=explicit_vjp",
}
"""Maps a key in TINY or CASES to its name in older trees; "key=value" pairs rename a value. Each tree is given the new
name first, and the old one if it rejects that."""
METRICS: dict[str, str] = {}
"""Maps a field of metrics.jsonl to its name in older trees."""
TESTS: dict[str, str] = {
    "speed is not a cost; remove it": "speed is no cost; drop it",
    "the smallest cut of": "the leanest cut of",
}
"""Maps a part of a test's name to the text that older trees have there."""
ONE_FOR_EACH = ("test_imports_go_down", "test_heavy_and_foreign_packages_stay_out", "test_a_command_resolves")
"""Tests that run once for each file of the package or each command of the documents. Those ids are not compared."""

TINY = """--data.source=path --data.path={texts} --data.seq_len=32 --data.batch_size=8 --model.num_layers=2
    --model.d_model=32 --model.num_heads=4 --model.d_ff=64 --model.vocab_size=256 --train.steps=3 --train.eval_every=2
    --train.eval_steps=1 --train.ngram_baseline=false --train.grad_accum=1 --run.dir={dir}/run --run.log_every=1
    --optim.lr=1e-2 --optim.warmup_steps=1 --sample.prompts=[ab,c] --sample.tokens=3 --mesh.data=1"""
GEMMA = "--config=gemma2_2b --model.windows=[8,0] --model.num_kv_heads=2 --model.head_dim=8"
QWEN = "--config=qwen3_0.6b --model.num_kv_heads=2 --model.head_dim=16 --data.seq_len=64"
MOE = "--model.moe.num_experts=8 --model.moe.d_ff=32"
CASES = {
    "dense": ["--config=quickstart --optim.name=adamw --train.dtype=bfloat16 --train.grad_accum=2"],
    "resume": [
        "--config=quickstart --train.steps=2 --sample.temperature=0 --sample.beams=2 --train.remat=none",
        "--config=quickstart --train.steps=4 --train.ngram_baseline=true --train.remat=none",
        "--config=quickstart --run.init_from={dir}/run --run.dir={dir}/other --optim.name=lion",
    ],
    "gpt2_xla": ["""--config=gpt2 --mesh.data=2 --model.dropout=0.1 --kernels.attention=xla --kernels.norm=xla
        --kernels.linear=xla --kernels.gelu=xla --kernels.cross_entropy=xla --kernels.decode=scan"""],
    "lora_chat": [QWEN, f"""{QWEN} --run.init_from={{dir}}/run --run.dir={{dir}}/other --model.lora.rank=2
        --data.source=chat --data.path={{texts}}.jsonl --mesh.fsdp=2 --mesh.tensor=2"""],
    "muon_int8": ["--config=quickstart --train.quant=int8 --mesh.fsdp=2 --train.spike.action=skip"],
    "adafactor_fp8": ["--config=llama3_8b --model.num_kv_heads=2 --train.quant=fp8 --optim.name=adafactor"],
    "gemma_sharded": [f"""{GEMMA} --mesh.data=2 --mesh.fsdp=2 --mesh.tensor=2 --train.grad_accum=2
        --train.reduce_dtype=bfloat16"""],
    "no_sequence_parallel": ["--config=quickstart --optim.name=sgd --mesh.tensor=2 --mesh.sequence_parallel=false"],
    "encoder": ["""--config=encoder_quickstart --sample.prompts=null --model.vocab_size=257 --model.windows=[8,0]
        --mesh.data=2 --mesh.context=2 --mesh.context_method=all_gather"""],
    "context_ring": [f"{GEMMA} --mesh.data=2 --mesh.context=2 --mesh.tensor=2"],
    "context_all_gather": [f"{GEMMA} --mesh.context=4 --mesh.context_method=all_gather"],
    "moe_softmax": [f"""--config=mixtral_8x7b {MOE} --model.num_kv_heads=2 --model.moe.aux_loss_weight=0.02
        --model.moe.z_loss_weight=0.01 --mesh.fsdp=2 --mesh.expert=2 --mesh.tensor=2 --train.grad_accum=2"""],
    "moe_capacity": [f"--config=moe_quickstart {MOE} --model.moe.capacity_factor=1.1 --mesh.data=2 --mesh.expert=2"],
    "moe_sigmoid": [f"""--config=moe_quickstart {MOE} --model.moe.router=sigmoid --model.moe.shared_experts=1
        --model.moe.top_k=3 --model.moe.num_groups=4
        --model.moe.top_k_groups=2 --model.moe.routed_scale=2.5 --model.moe.bias_update_rate=0.1 --mesh.expert=4"""],
    "moe_ragged": [f"""--config=qwen3_30b_a3b {MOE} --model.num_kv_heads=2 --model.head_dim=8 --model.moe.top_k=2
        --kernels.moe=ragged"""],
    "moe_domain": ["""--config=quickstart --model.moe.num_experts=2 --model.moe.router=domain --data.packing=true
        --data.domains=["[0-4].*",".*"] --sample.domain=1"""],
    "gpipe": ["--config=gpt2 --mesh.pipe=2 --mesh.context=2 --pipeline.schedule=gpipe"],
    "1f1b": [f"""{GEMMA} --model.num_layers=4 --mesh.pipe=2 --mesh.fsdp=2 --mesh.tensor=2 --pipeline.microbatches=4
        --optim.name=muon"""],
    "interleaved": [f"""--config=moe_quickstart {MOE} --model.moe.router=sigmoid --model.num_layers=4 --mesh.pipe=2
        --mesh.expert=2 --mesh.tensor=2 --pipeline.schedule=interleaved_1f1b --pipeline.chunks=2"""],
}  # fmt: skip
"""The command lines of each case, in order. The flags of TINY precede them; `--config` is the name of a file."""


@dataclass
class Outcome:
    """The result of one case in one tree.

    Attributes:
      programs: normalised texts, with the number of times that each was compiled.
      names: a name for each text.
      lines: metrics.jsonl and samples.txt of every run.
      error: the message of the command that failed, empty if none did.
    """

    programs: Counter[str] = field(default_factory=Counter)
    names: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    error: str = ""


def snapshot(ref: str, to: Path) -> None:
    """Writes the files of a git ref into a folder. "." means the working tree, without the files that git ignores."""

    def git(*words: str, **more: str) -> bytes:
        return subprocess.run(["git", *words], cwd=ROOT, env=os.environ | more, capture_output=True, check=True).stdout

    if ref == ".":
        index = {"GIT_INDEX_FILE": f"{to}.index"}
        git("add", "--all", **index)
        ref = git("write-tree", **index).decode().strip()
    with tarfile.open(fileobj=io.BytesIO(git("archive", ref))) as archive:
        archive.extractall(to, filter="data")


def write_texts(to: Path) -> None:
    """Writes documents and conversations, the same in every run of the tool."""
    draw = random.Random(0)
    words = [" ".join("".join(draw.choices("abcde", k=draw.randint(1, 7))) for _ in range(n)) for n in [100, 250] * 6]
    to.mkdir()
    for i, text in enumerate(words):
        (to / f"{i}.txt").write_text(text)
    turns = [{"user": text[:9], "assistant": text[9:20]} for text in words]
    rows = [{"messages": [{"role": role, "content": text} for role, text in turn.items()]} for turn in turns]
    Path(f"{to}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def normalised(program: str) -> str:
    """Returns the text of a program without locations and without the names of its module, functions and results."""
    text = re.sub(r"^(#loc.*\n)|\s+loc\(.*\)$", "", program, flags=re.MULTILINE)
    text = re.sub(r"^module @\S+", "module @module", text)
    text = re.sub(r'jax\.result_info = "(?:[^"\\]|\\.)*"', 'jax.result_info = ""', text)
    symbol = r'@(?:"[^"]*"|[\w.$-]+)'
    own = set(re.findall(rf"func\.func (?:public|private) ({symbol})", text))  # the others are targets of custom calls
    seen: dict[str, str] = {}
    return re.sub(symbol, lambda m: seen.setdefault(m[0], f"@f{len(seen)}") if m[0] in own else m[0], text)


def compared(line: str) -> str:
    """Returns a line of metrics.jsonl without times and speeds, under the older names."""
    timed = re.compile(r".*_s|time|seconds|mfu.*|peak_bytes_in_use")
    kept = {METRICS.get(k, k): v for k, v in json.loads(line).items() if not timed.fullmatch(k)}
    return json.dumps(kept, sort_keys=True)


def older(word: str, error: str) -> str:
    """Returns a flag, with its older name if the error rejects the new one."""
    refused = error.partition("did you mean")[0]
    for new, old in KEYS.items():
        if new.partition("=")[0] in refused and f"{word}=".startswith(f"--{new}="):
            return word.replace(new, old, 1)
    return word


def train(tree: Path, words: list[str], dumped: Path) -> str:
    """Runs train.py, which writes its programs into the folder `dumped`. Returns the error, empty if it succeeded."""
    sizes = dict(re.findall(r"--mesh\.([a-z]+)=(\d+)", " ".join(words)))  # the last of repeated flags counts
    flags = "--xla_backend_optimization_level=0"
    if version("jaxlib").startswith("0.10."):  # see tests/conftest.py
        flags += " --xla_cpu_use_fusion_emitters=false"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))} | {
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(math.prod(map(int, sizes.values()))),
        "JAX_DUMP_IR_TO": str(dumped),
        "JAX_INCLUDE_DEBUG_INFO_IN_DUMPS": "0",
        "JAX_COMPILATION_CACHE_DIR": str(tree.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, "train.py", *words]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    again = [older(word, done.stderr) for word in words] if done.returncode == 2 else words
    if again != words:
        return train(tree, again, dumped)
    return done.stderr[-600:].strip() or "failed" if done.returncode else ""


def config(tree: Path, name: str) -> Path:
    """Returns the path of a tree's configuration file, in whichever folder it is."""
    return next((tree / "configs").rglob(f"{name}.yaml"))


def run(case: str, tree: Path, texts: Path, folder: Path) -> Outcome:
    """Runs the command lines of a case in a tree."""
    outcome = Outcome()
    for i, command in enumerate(CASES[case]):
        words = f"{TINY} {command}".format(dir=folder, texts=texts).split()
        words = [re.sub(r"^--config=(\w.*)", lambda m: f"--config={config(tree, m[1])}", word) for word in words]
        dumped = folder / f"programs{i}"
        if error := train(tree, words, dumped):
            outcome.error = error
            return outcome
        for path in sorted(dumped.glob("*.mlir")):
            text = normalised(path.read_text())
            outcome.programs[text] += 1
            outcome.names.setdefault(text, f"{i}_{path.stem.removeprefix('jax_ir')}")
    for path in sorted(folder.glob("*/metrics.jsonl")):
        outcome.lines += map(compared, path.read_text().splitlines())
    outcome.lines += [path.read_text() for path in sorted(folder.glob("*/samples.txt"))]
    return outcome


def difference(case: str, old: Outcome, new: Outcome, keep: Path | None) -> str:
    """Returns the differences between two outcomes of a case in words, empty if there are none."""
    if old.error or new.error:
        return "; ".join(f"{side} failed: {o.error}" for side, o in (("OLD", old), ("NEW", new)) if o.error)
    if not (old.programs and old.lines):
        return "OLD wrote no program or no metrics, so nothing was compared"
    found = []
    for side, mine, other in (("old", old, new), ("new", new, old)):
        unlike = sorted(mine.names[text] for text in mine.programs - other.programs)
        found += [f"programs only in {side.upper()}: {', '.join(unlike)}"] if unlike else []
        if keep and (unlike or old.lines != new.lines):
            (folder := keep / case / side).mkdir(parents=True, exist_ok=True)
            (folder / "lines.txt").write_text("\n".join(mine.lines) + "\n")
            for text in mine.programs - other.programs:
                (folder / f"{mine.names[text]}.mlir").write_text(text)
    if count := sum(first != second for first, second in zip_longest(old.lines, new.lines)):
        found.append(f"{count} of the lines differ")
    return "; ".join(found)


def golden(tree: Path) -> dict[str, bytes]:
    """Returns the golden files of a tree by name."""
    return {path.name: path.read_bytes() for path in (tree / "tests").rglob("golden/*")}


def tests(tree: Path) -> Counter[str]:
    """Returns the names of all tests of a tree, including slow ones, without the names of their files."""
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "norecursedirs="]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "tests", *options]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"pytest cannot collect the tests of {tree.name}:\n{done.stdout[-2000:]}{done.stderr[-500:]}")
    names = [line.split("::", 1)[1] for line in done.stdout.splitlines() if "::" in line]
    for new, old in TESTS.items():
        names = [name.replace(new, old) for name in names]
    short = {name: name.partition("[")[0] for name in names}
    return Counter(short[name] if short[name] in ONE_FOR_EACH else name for name in names)


def same_tests(old: Path, new: Path) -> bool:
    """Compares the names of tests and prints those that only one tree has."""
    with ThreadPoolExecutor(2) as pool:
        before, after = pool.map(tests, (old, new))
    counts = before.total(), after.total()
    for name in ONE_FOR_EACH:
        before[name], after[name] = min(before[name], 1), min(after[name], 1)
    for sign, only in (("-", before - after), ("+", after - before)):
        print("\n".join(f"{sign} {name}" for name in sorted(only.elements())) or f"{sign} none")
    print(f"{counts[0]} tests in OLD, {counts[1]} in NEW")
    return before == after


def same_programs(trees: list[Path], only: str | None, keep: Path | None) -> bool:
    """Compares what both trees compute and prints a row for each case."""
    write_texts(texts := trees[0].parent / "texts")
    files = [golden(tree) for tree in trees]
    changed = sorted({name for name, _ in files[0].items() ^ files[1].items()})
    print(f"{'golden files':22} {len(files[0])} files  {'changed: ' + ', '.join(changed) if changed else 'equal'}")
    cases, bad = [case for case in CASES if only in (None, case)], len(changed) or int(not files[0])
    # OLD runs one case ahead, so that NEW loads equal programs from the compilation cache.
    pairs = zip([*cases, ""], ["", *cases], strict=True)
    order = [(case, tree) for pair in pairs for case, tree in zip(pair, trees, strict=True) if case]
    with ThreadPoolExecutor(2) as pool:
        runs = {(c, t): pool.submit(run, c, t, texts, t.parent / f"{c}_{t.name}") for c, t in order}
        for case in cases:
            old, new = (runs[case, tree].result() for tree in trees)
            why = difference(case, old, new, keep)
            bad += bool(why)
            print(f"{case:22} {old.programs.total():3} programs {len(old.lines):3} lines  {why or 'equal'}", flush=True)
    print(f"{bad} differences" if bad else "no difference")
    return not bad


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("old", metavar="OLD", help='a git ref, or "." for the working tree')
    parser.add_argument("new", metavar="NEW", help="likewise")
    parser.add_argument("--only", choices=CASES, help="run one case")
    parser.add_argument("--keep", type=Path, help="write programs and lines that differ into this folder")
    parser.add_argument("--tests", action="store_true", help="compare the names of tests instead")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jaxstack-same-") as scratch:
        trees = [Path(scratch, "old"), Path(scratch, "new")]
        for ref, tree in zip((options.old, options.new), trees, strict=True):
            snapshot(ref, tree)
        return int(not (same_tests(*trees) if options.tests else same_programs(trees, options.only, options.keep)))


if __name__ == "__main__":
    sys.exit(main())
