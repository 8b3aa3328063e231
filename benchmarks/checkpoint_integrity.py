"""Measures how much of a checkpoint each process hashes: `python benchmarks/checkpoint_integrity.py [--mib 1024]`

Saves a state of random arrays, sharded over four CPU devices, with one process and with two. Looks for it as a starting
run does, again with one process and with two, and counts the bytes that each process hashes. Then measures the rate of
SHA-256 by threads of one process over files in the page cache, as the best of some repetitions. MB per second of wall
time fall when other work shares the cores, so the result has the load average; MB per second of CPU time hardly do. If
the latter are equal for one thread and for two, the threads do not wait for each other.

The time for a checkpoint of 70 billion parameters is computed: its bytes over processes, threads and MB per second of
CPU time. A file system may be slower than that. Writes results/checkpoint_integrity.json.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from record import record

DEVICES = 4
LARGE = 70 * 10**9 * 12
"""Bytes of 70 billion parameters with AdamW: three float32 numbers for each."""
PROCESSES = (1, 8, 64, 256)


def work(what: str, index: int, count: int, port: int, folder: Path, mib: int) -> None:
    """Saves a state or looks for the latest one, in a process of its own; prints the bytes hashed and the seconds."""
    import jax

    if count > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
    import numpy as np

    from jaxstack import sharding
    from jaxstack.checkpoint import manifest, verify
    from jaxstack.checkpoint import store as checkpoint
    from jaxstack.config import CheckpointConfig, MeshConfig

    hashed, sha256 = [], manifest._sha256

    def counted(path: Path) -> tuple[int, str]:
        hashed.append(path.stat().st_size)
        return sha256(path)

    manifest._sha256 = counted
    if what == "save":
        mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=DEVICES), DEVICES)
        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
        shape = (mib << 20) // 16 // 4096, 4096
        state = {}

        def shard(array: int, where: tuple[slice, ...]) -> np.ndarray:
            """Returns the random values of one shard."""
            rows = len(range(*where[0].indices(shape[0])))
            return np.random.default_rng((array, where[0].start or 0)).random((rows, shape[1]), np.float32)

        for i in range(4):
            state[f"array_{i}"] = jax.make_array_from_callback(shape, split, partial(shard, i))
        begin = time.perf_counter()
        with checkpoint.Checkpoints(CheckpointConfig(), folder) as checkpoints:
            checkpoints.save(1, state, {})
    else:
        begin = time.perf_counter()
        assert verify.scan(folder).step == 1
    seconds = time.perf_counter() - begin
    print(json.dumps({"bytes": sum(hashed), "files": len(hashed), "seconds": round(seconds, 2)}))


def processes(what: str, count: int, folder: Path, mib: int) -> list[dict[str, Any]]:
    """Runs `count` processes and returns the report of each."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES // count)}
    words = [sys.executable, __file__, f"--mib={mib}", "--worker", what]
    started = [
        subprocess.Popen([*words, *map(str, (i, count, port, folder))], env=env, stdout=subprocess.PIPE, text=True)
        for i in range(count)
    ]
    return [json.loads(p.communicate()[0].splitlines()[-1]) for p in started]


def rates(checkpoint: Path, repeats: int) -> dict[str, dict[str, float]]:
    """Returns MB per second of SHA-256 over a checkpoint, of wall time and of CPU time, by number of threads."""
    from jaxstack.checkpoint import manifest

    wanted, found = manifest.read(checkpoint), {}
    megabytes = sum(size for size, _ in wanted.values()) / 1e6
    for threads in (1, 2):
        manifest._THREADS = threads
        clock, cpu = [], []
        for _ in range(repeats):
            begin, spent = time.perf_counter(), time.process_time()
            assert manifest.content_corruption(checkpoint, wanted) is None
            clock.append(time.perf_counter() - begin)
            cpu.append(time.process_time() - spent)
        found[str(threads)] = {
            "mb_per_s": round(megabytes / min(clock), 1),
            "mb_per_cpu_s": round(megabytes / min(cpu), 1),
        }
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--mib", type=int, default=1024)
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.worker:
        what, index, count, port, folder = given.worker
        return work(what, int(index), int(count), int(port), Path(folder), given.mib)
    cases = []
    with tempfile.TemporaryDirectory() as directory:
        for count in (1, 2):
            folder = Path(directory) / str(count)
            for what, reading in (("save", count), ("start", 1), ("start", 2)):
                row = {"what": what, "saved_by": count, "processes": processes(what, reading, folder, given.mib)}
                cases.append(row)
                print(json.dumps(row), flush=True)
        by_threads = rates(Path(directory) / "1" / "1", given.repeats)
        total = sum(file.stat().st_size for file in (Path(directory) / "1" / "1").rglob("*") if file.is_file())
    print(by_threads)
    seconds = {
        f"{n} processes": {
            f"{threads} threads": round(LARGE / n / threads / (by_threads["2"]["mb_per_cpu_s"] * 1e6), 1)
            for threads in (1, 2, 8)
        }
        for n in PROCESSES
    }
    result = {
        "state_mib": given.mib,
        "checkpoint_bytes": total,
        "load_average": round(os.getloadavg()[0], 1),
        "cases": cases,
        "sha256_by_threads": by_threads,
        "by_arithmetic": {
            "bytes": LARGE,
            "rule": "bytes / processes / threads / mb_per_cpu_s of 2 threads",
            "seconds": seconds,
        },
    }
    print(record("checkpoint_integrity", result))


if __name__ == "__main__":
    main()
