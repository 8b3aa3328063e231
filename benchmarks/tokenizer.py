"""Measures how fast a tokenizer.json encodes on one core and on all, and how many bytes its tokens have.

    python benchmarks/tokenizer.py [--rounds=12] [--small]

The text is Python's standard library. Every twentieth file is held out, and tokenizers are made from the others.

- Speed: the library's `encode` of one document after another against `Tokenizer.encode_batch`, in alternating rounds.
  The ids must be the same. `seconds` is the minimum of the rounds. `busiest_thread_seconds` is the CPU time of the
  thread that worked most: what a round takes if each thread has a core of its own. Other programs on the machine change
  the first more than the second. `load` is the mean number of processes that wanted a core.
- Memory: the growth of the peak when all files are one text, with and without pieces, each in a process of its own.
- Bytes per token: for three vocabularies.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import record

from jaxstack.config import DataConfig
from jaxstack.data.bpe import END_OF_TEXT, train_bpe
from jaxstack.data.sources import documents
from jaxstack.data.tokenizers import HFTokenizer

VOCABULARIES = (1024, 8192, 32768)


def texts_of(small: bool) -> tuple[list[str], list[str]]:
    """Returns the texts to make tokenizers from, and those that are held out."""
    texts = [document.text for document in documents(DataConfig(source="stdlib"))][: 60 if small else None]
    return [text for i, text in enumerate(texts) if i % 20], texts[::20]


def encode_one_by_one(tokenizer: HFTokenizer, texts: list[str]) -> list[list[int]]:
    """Returns the ids of each text by one call of the library for each, which uses one core."""
    return [tokenizer._tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def thread_seconds() -> dict[str, float]:
    """Returns the CPU time of each thread of this process."""
    found = {}
    for path in Path("/proc/self/task").iterdir():
        fields = (path / "stat").read_text().rpartition(")")[2].split()
        found[path.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def speed(tokenizer: HFTokenizer, texts: list[str], rounds: int) -> dict:
    """Returns the times of both ways over alternating rounds, after checking that the ids are the same."""
    ways = {
        "one_by_one": lambda: encode_one_by_one(tokenizer, texts),
        "encode_batch": lambda: tokenizer.encode_batch(texts),
    }
    one_by_one = ways["one_by_one"]()
    assert one_by_one == [ids.tolist() for ids in ways["encode_batch"]()]
    count = sum(map(len, one_by_one))
    walls: dict[str, list[float]] = {name: [] for name in ways}
    busiest: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, encode in ways.items():
            before = thread_seconds()
            start = time.perf_counter()
            encode()
            walls[name].append(round(time.perf_counter() - start, 3))
            after = thread_seconds()
            busiest[name].append(round(max(after[thread] - before.get(thread, 0.0) for thread in after), 3))
    rows = {
        name: {
            "seconds": min(walls[name]),
            "busiest_thread_seconds": min(busiest[name]),
            "tokens_per_second": round(count / min(walls[name])),
            "all_seconds": walls[name],
            "all_busiest_thread_seconds": busiest[name],
        }
        for name in ways
    }
    return {
        "tokens": count,
        "rows": rows,
        "ratio": round(min(walls["one_by_one"]) / min(walls["encode_batch"]), 3),
        "ratio_of_busiest_threads": round(min(busiest["one_by_one"]) / min(busiest["encode_batch"]), 3),
        "same_ids": True,
        "load": os.getloadavg()[0],
    }


def peak(way: str, small: bool) -> float:
    """Returns the bytes by which the peak of this process grows for each character of one long text."""
    texts, _ = texts_of(small)
    tokenizer = HFTokenizer("t", train_bpe(texts[:50], 1024, [END_OF_TEXT]))
    text = "".join(texts) * 2
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if way == "one_by_one":
        encode_one_by_one(tokenizer, [text])
    else:
        tokenizer.encode(text)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / len(text)


def main(argv: list[str] | None = None) -> None:
    """Measures and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--small", action="store_true", help="a few files, for a test; writes nothing")
    parser.add_argument("--peak", choices=("one_by_one", "pieces"), help="measure only memory, of this process")
    args = parser.parse_args(argv)
    if args.peak:
        print(peak(args.peak, args.small))
        return
    texts, held_out = texts_of(args.small)
    figures = []
    for size in VOCABULARIES[: 1 if args.small else None]:
        start = time.perf_counter()
        tokenizer = HFTokenizer("t", train_bpe(texts, size, [END_OF_TEXT]))
        row = {"vocab_size": size, "seconds": round(time.perf_counter() - start, 1)}
        for name, part in (("made_from", texts), ("held_out", held_out)):
            count = sum(ids.size for ids in tokenizer.encode_batch(part))
            row[f"bytes_per_token_{name}"] = round(sum(len(text.encode()) for text in part) / count, 3)
        figures.append(row)
        print(row, flush=True)
        if size == VOCABULARIES[:2][-1] or args.small:
            measured = speed(tokenizer, texts[::4], args.rounds)
            print(json.dumps(measured), flush=True)
    memory = {}
    for way in ("one_by_one", "pieces"):
        command = [sys.executable, __file__, f"--peak={way}", *(["--small"] if args.small else [])]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        memory[way] = round(float(done.stdout), 1)
    print(memory)
    result = {
        "characters": sum(map(len, texts)),
        "documents": len(texts),
        "speed": measured,
        "bytes_of_memory_per_character_of_one_text": memory,
        "vocabularies": figures,
    }
    if not args.small:
        print(record.record("tokenizer", result))


if __name__ == "__main__":
    main()
