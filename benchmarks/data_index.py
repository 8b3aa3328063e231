"""Measures the memory that a text of many documents takes in a process: `python benchmarks/data_index.py`

A token file is made with a hole in place of its ids, so that it takes no room. A new process opens it, holds out a part
and reads rows with packing. Three figures come from that process: the peak of its memory above what it had after its
imports, without the pages of the mapped file (anonymous memory, `RssAnon` of Linux); the CPU seconds until the first
row; and the milliseconds for a row. `--before TREE` measures another checkout of the repository beside this one, in
turns.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import numpy as np
import record

TOKENS, SEQ_LEN, ROWS = 256, 2048, 64

CHILD = """
import json, re, resource, sys, threading, time
import grain, numpy as np
from jaxstack import data
from jaxstack.data import tokens, windows
tokens._FULL_CHECK_BYTES = 0  # the ids of a large file are not read at once
def memory():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1])
least = most = memory()
done = threading.Event()
def watch():
    global most
    while not done.wait(0.005):
        most = max(most, memory())
thread = threading.Thread(target=watch)
thread.start()
path, seq_len, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
began = time.process_time()
text, _ = data.read_token_file(path)
train, held_out = tokens.split(text, 0.0005)
reader = windows.SequenceReader(train, seq_len=seq_len, seed=0, packing=True)
first = reader.read(np.arange(1))
begin_s = time.process_time() - began
began = time.process_time()
reader.read(1 + np.arange(rows))
row_ms = 1000 * (time.process_time() - began) / rows
done.set()
thread.join()
assert (np.diff(first["segment_ids"]) >= 0).all()
print(json.dumps({"bytes": most - least, "begin_cpu_s": begin_s, "row_cpu_ms": row_ms}))
"""


def make(folder: Path, documents: int) -> Path:
    """Writes a token file of documents of 1 to 511 tokens, whose ids are a hole."""
    from jaxstack.data.tokenizers import ByteTokenizer

    starts = np.random.default_rng(0).integers(1, 2 * TOKENS, documents + 1)
    starts[0] = 0
    starts = np.cumsum(starts, dtype=np.int64)
    np.save(folder / "text.starts.npy", starts[:-1])
    with (folder / "text.bin").open("wb") as file:
        file.truncate(2 * int(starts[-1]))
    header = {
        "version": 1, "dtype": "uint16", "count": int(starts[-1]), "documents": documents, "vocab_size": 256,
        "bytes": 1, "tokenizer": ByteTokenizer().to_json(), "sha256": {"bin": "", "starts": ""},
    }  # fmt: skip
    (folder / "text.json").write_text(json.dumps(header))
    return folder / "text"


def measure(tree: Path, path: Path) -> dict[str, float]:
    command = [sys.executable, "-c", CHILD, str(path), str(SEQ_LEN), str(ROWS)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, nargs="+", default=[1_000_000, 10_000_000, 100_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--before", type=lambda path: Path(path).resolve(), help="another checkout, measured in turns with this one"
    )
    args = parser.parse_args()
    trees = {"now": Path(__file__).resolve().parent.parent} | ({"before": args.before.resolve()} if args.before else {})
    cases = []
    for documents in args.documents:
        with tempfile.TemporaryDirectory() as folder:
            path = make(Path(folder), documents)
            found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
            for _ in range(args.rounds):
                for name, tree in trees.items():
                    found[name].append(measure(tree, path))
        row: dict[str, float] = {"documents": documents}
        for name, rounds in found.items():
            medians = {key: median(one[key] for one in rounds) for key in rounds[0]}
            row[f"{name}_bytes_per_document"] = medians["bytes"] / documents
            row |= {f"{name}_{key}": value for key, value in medians.items()}
        cases.append(row)
        print(json.dumps(row), flush=True)
    setup = {"seq_len": SEQ_LEN, "rows": ROWS, "tokens_of_a_document": TOKENS, "rounds": args.rounds}
    record.record("data_index", {"setup": setup, "cases": cases})


if __name__ == "__main__":
    main()
