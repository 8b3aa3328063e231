"""Measures what cleaning changes: `python benchmarks/clean.py [--steps 200] [--seeds 3] [--small]`

The text comes with this Python installation: the source of the standard library, and the documentation of all packages
(`*.md`, `*.rst`, `*.txt` and their METADATA). The same small byte-level model is trained for as many steps on three
sets, from the same seeds, and reads the same held-out texts at the end:

- `raw`: all documents;
- `duplicates`: without exact and near duplicates;
- `clean`: also by Gopher's filters, which are the defaults of `jaxstack data clean`.

Held-out documents are drawn by their hashes from all documents without duplicates. No training set has a document that
is equal or nearly equal to one of them. `held_out` has all drawn documents. `held_out_clean` has the drawn documents
that the filters keep. Results are in bits per byte, in `benchmarks/results/clean.json`.
"""

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
from hashlib import sha256
from pathlib import Path
from statistics import mean

import record

ROOT = Path(__file__).parent.parent
HELD_OUT = 20
"""One of this many documents is held out."""
BEGINNING = 1500
"""Characters of each held-out document that are scored, so that no long one decides."""
HELD_OUT_TEXTS = ("held_out", "held_out_clean")
MOST_BYTES = 400_000
"""Longer files are left out: tables, and licences of all parts of a package."""


def texts(small: bool) -> dict[str, str]:
    """Returns the documents by name."""
    from jaxstack.config import DataConfig
    from jaxstack.data.sources import documents

    found = {f"stdlib/{d.name}": d.text for d in documents(DataConfig(source="stdlib"))}
    packages = Path(sysconfig.get_path("purelib"))
    for path in sorted(packages.rglob("*")):
        if path.suffix in (".md", ".rst", ".txt") or path.name == "METADATA":
            try:
                found[f"packages/{path.relative_to(packages).as_posix()}"] = path.read_text("utf-8")
            except (OSError, UnicodeDecodeError):
                continue
    found = {name: text for name, text in found.items() if text and len(text.encode()) <= MOST_BYTES}
    return dict([*found.items()][:: 20 if small else 1])


def clean(folder: Path, name: str, *flags: str) -> tuple[list[str], list[dict]]:
    """Runs the command on `rows.jsonl`, and returns the kept texts and the rows of dropped ones."""
    words = ["data", "clean", str(folder / "rows.jsonl"), str(folder / name), "--data.source=hf", *flags]
    subprocess.run([sys.executable, "-m", "jaxstack", *words], check=True, cwd=ROOT)
    kept = [json.loads(line)["text"] for line in (folder / name / "kept.jsonl").read_text().splitlines()]
    return kept, [json.loads(line) for line in (folder / name / "dropped.jsonl").read_text().splitlines()]


def hash_of(text: str) -> str:
    """Returns the hash by which kept texts are ordered."""
    return sha256(text.encode()).hexdigest()


def is_held_out(text: str, one_of: int) -> bool:
    """Returns whether a document is drawn: one of `one_of` is."""
    return int(hash_of(text)[:8], 16) % one_of == 0


def train(folder: Path, name: str, seed: int, steps: int) -> dict[str, float]:
    """Trains on a set and returns the bits per byte of both held-out texts."""
    import jaxstack as js
    from jaxstack.cli.parser import execute
    from jaxstack.evaluate.text import score_text

    run = folder / f"run_{name}_{seed}"
    flags = [f"--train.steps={steps}", f"--run.seed={seed}", f"--run.dir={run}", f"--checkpoint.every={steps}"]
    flags += [f"--data.path={folder / name}.txt", "--data.source=path", "--data.tokenizer=bytes"]
    flags += ["--model.num_layers=2", "--model.d_model=96", "--model.d_ff=256", "--data.seq_len=128"]
    flags += ["--train.ngram_baseline=false", "--sample.prompts=[]", f"--train.eval_every={steps}"]
    execute(["train", *flags, "--train.eval_steps=1"])
    loaded = js.load(run)
    found = {}
    for text in HELD_OUT_TEXTS:
        content = (folder / f"{text}.txt").read_text("utf-8")
        score = score_text(loaded.scorer, loaded.tokenizer, content, context=128, overlap=64, rows=32)
        found[text] = score.bits_per_byte
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--small", action="store_true", help="a twentieth of the documents, and few steps")
    given = arguments.parse_args()
    steps = 4 if given.small else given.steps
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ("raw", "duplicates", "clean")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        every = texts(given.small)
        rows = "".join(json.dumps({"text": text}) + "\n" for text in every.values())
        (folder / "rows.jsonl").write_text(rows)
        unique, dropped = clean(folder, "unique", "--rules=[exact,near]")
        filtered, _ = clean(folder, "filtered")
        drawn = {text for text in unique if is_held_out(text, 3 if given.small else HELD_OUT)}
        rows_of = {f"row {i:,}": text for i, text in enumerate(every.values())}
        near = {rows_of[row["name"]] for row in dropped if rows_of[row["kept"]] in drawn} | drawn
        mixed = sorted(every.values(), key=hash_of)  # as kept texts are: a run holds out the end of its text
        sets = {"raw": mixed, "duplicates": unique, "clean": filtered}
        sizes = {}
        for name, documents in sets.items():
            left = [text for text in documents if text not in near]
            sizes[name] = {"documents": len(left), "bytes": sum(len(text.encode()) for text in left)}
            (folder / f"{name}.txt").write_text("\n\n".join(left))
        held_out = {"held_out": [*drawn], "held_out_clean": [text for text in drawn if text in {*filtered}]}
        for name, documents in held_out.items():
            whole = "\n\n".join(text[:BEGINNING] for text in sorted(documents))
            sizes[name] = {"documents": len(documents), "bytes": len(whole.encode())}
            (folder / f"{name}.txt").write_text(whole)
        report = json.loads((folder / "filtered" / "report.json").read_text())
        for seed in range(given.seeds):
            for name, found in runs.items():
                found.append(train(folder, name, seed, steps))
                print(f"seed {seed}  {name:<10} {found[-1]}", flush=True)
    means = {name: {text: round(mean(r[text] for r in found), 4) for text in held_out} for name, found in runs.items()}
    reasons = {name: {key: of[key] for key in ("documents", "bytes")} for name, of in report["reasons"].items()}
    result = {"steps": steps, "sizes": sizes, "reasons": reasons, "runs": runs, "means": means}
    print(json.dumps(means, indent=1))
    if not given.small:
        print(record.record("clean", result))


if __name__ == "__main__":
    main()
