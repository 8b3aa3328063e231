"""Compares the meshes that the search finds with the meshes that others publish: `python benchmarks/peer_meshes.py`

A case is a row of `published_steps.json` that names its mesh. The search gets the same model, chips, batch and
precision, and chooses every axis itself. For both meshes the result has the time that `planner.step_time` predicts and
the memory of a device by formula. Nothing is compiled. `--cases` runs some of the cases.

`--variants` predicts the peer's mesh with a divided optimizer and with recomputation, which need less memory, and the
mesh of the last search again. It searches nothing.

`--seconds` measures how long the search takes for 64, 512 and 2,048 devices. The search runs in one thread, so its CPU
seconds are the wall seconds on a machine that does nothing else. Other work makes them longer, because programs share
the caches: the result also has the wall seconds and the load of the machine.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import record

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from published_steps import TABLE, InexpressibleError, job_of, limits_of, published_seconds

from jaxstack.config import SEARCHED_KEYS, Config, DataConfig, flat, resolve, with_values
from jaxstack.planner import memory, mesh_plan
from jaxstack.planner.job import Job
from jaxstack.planner.memory import GIB, Room
from jaxstack.planner.mesh_plan import Devices
from jaxstack.planner.step_clocks import ChipClock
from jaxstack.planner.step_time import step_time
from jaxstack.runtime.platform import GPU_MEMORY_FRACTION
from jaxstack.training.state import Recipe, abstract_state

CASES = {
    "Llama 3 8B, 8 H100": ("nemo-24.12", "Llama 3 8B", "h100", 8),
    "Llama 3 8B, 8 H100, Megatron Bridge": ("megatron-bridge-25.11", "Llama 3 8B", "h100", 8),
    "Llama 3 70B, 64 H100": ("megatron-bridge-26.04.01", "Llama 3 70B", "h100", 64),
    "Llama 3 405B, 1,024 H100": ("megatron-bridge-26.04.01", "Llama 3 405B", "h100", 1024),
    "Llama 3 405B, 8,192 H100": ("llama3-405b", "Llama 3 405B", "h100", 8192),
    "DeepSeek-V3, 2,048 H800": ("deepseek-v3", "DeepSeek-V3", "h800", 2048),
}
"""Source, model, chip and number of devices of the row of each case."""
BAR = 1.05
"""Largest predicted time of our mesh, as a multiple of theirs. Other cases are `missed` in the result."""
SIZES = {64: "h100:8x8", 512: "h100:64x8", 2048: "h100:256x8"}
"""Targets whose search is timed, with Llama 3 8B."""


def row_of(case: str) -> dict[str, Any]:
    """Returns the row of a case; of several the first, which has the largest batch."""
    wanted = CASES[case]
    return next(r for r in TABLE["rows"] if (r["source"], r["model"], r["chip"], r["devices"]) == wanted)


def devices_of(row: dict[str, Any]) -> Devices:
    """Returns the devices of a row, with the memory that a run reserves."""
    limits = limits_of(row)
    room = limits.chip.hbm_bytes * (GPU_MEMORY_FRACTION if limits.chip.platform == "gpu" else 1)
    return Devices(row["chip"], row["devices"], limits.chip.platform, Room("a device", room, room), ChipClock(limits))


def described(cfg: Config, devices: Devices, need: float) -> dict[str, Any]:
    """Returns the searched values that split or repeat something, the parts of the predicted time, and the memory."""
    found = step_time(Job(cfg, memory.context(cfg, devices.count, devices.platform)), devices.clock.limits)
    values = {key: value for key, value in flat(cfg).items() if key in SEARCHED_KEYS and value not in (1, None)}
    parts = {
        "layers": found.layers, "recomputation": found.recomputation, "head": found.head, "update": found.update,
        "bubble": found.bubble, **{f"waiting for {axes}": s for axes, s in found.exposed.items()},
    }  # fmt: skip
    return {"values": values, "seconds": found.total, "parts": parts, "GiB": need / GIB}


def cpu_seconds(begin: tuple[float, float]) -> dict[str, Any]:
    """Returns the CPU and wall seconds since `begin`, and the load of the machine."""
    cpu, wall = (now - then for now, then in zip((time.process_time(), time.perf_counter()), begin, strict=True))
    return {"cpu_s": round(cpu, 1), "wall_s": round(wall, 1), "load": round(os.getloadavg()[0], 1)}


def compare(case: str) -> dict[str, Any]:
    """Returns the peer's mesh and ours with their predicted times, or why no configuration expresses their mesh."""
    row = row_of(case)
    if row["flops"] == "not stated":  # it only decides the published seconds, which are not compared here
        row = row | {"flops": None}
    devices = devices_of(row)
    theirs: dict[str, Any] = {}
    try:
        job = job_of(row)
        state = abstract_state(Recipe.of(job.cfg), job.ctx)
        theirs["theirs"] = described(job.cfg, devices, memory.need_of(job, state, devices.platform).formula)
    except InexpressibleError as error:
        # The search needs a mesh to begin with, and chooses every axis itself.
        replicas = math.gcd(row["global_batch"], row["devices"])
        plain_mesh = {"fsdp": replicas, "tensor": row["devices"] // replicas}
        job = job_of(row | {"mesh": plain_mesh, "micro_batch": row["global_batch"] // replicas})
        theirs = {"reason": str(error), "published_seconds": published_seconds(row, job)}
    begin = time.process_time(), time.perf_counter()
    plain = with_values(job.cfg, {"model.pad_vocab_to": None})
    found = mesh_plan.search(plain, devices, (), 3)
    spent = cpu_seconds(begin)
    best = found.ranked[0]
    ours = described(best.cfg, devices, best.need.formula)
    ratio = {"ours_over_theirs": ours["seconds"] / theirs["theirs"]["seconds"]} if "theirs" in theirs else {}
    return {
        "case": case, "source": TABLE["sources"][row["source"]]["url"], "precision": row["precision"],
        "sequence": row["sequence"], "global_batch": row["global_batch"], **theirs, "ours": ours,
        **ratio, "room_GiB": devices.room.bytes / GIB,
        "meshes": found.meshes, "examined": found.examined, "search": spent,
    }  # fmt: skip


def variants(case: str, ours: dict[str, Any]) -> dict[str, Any]:
    """Returns time and memory of the peer's mesh with each `mesh.zero` and `train.remat`, and of our mesh.

    Args:
      ours: searched values of our mesh that are not 1 or `None`.
    """
    devices = devices_of(row_of(case))
    peer = job_of(row_of(case) | {"flops": None}).cfg

    def evaluated(values: dict[str, Any]) -> dict[str, float]:
        cfg = resolve(with_values(peer, values), None)
        job = Job(cfg, memory.context(cfg, devices.count, devices.platform))
        need = memory.need_of(job, abstract_state(Recipe.of(cfg), job.ctx), devices.platform).formula
        return {"seconds": step_time(job, devices.clock.limits).total, "GiB": need / GIB}

    plain = {key: None if key == "pipeline.microbatches" else 1 for key in SEARCHED_KEYS}
    plain |= {"pipeline.schedule": "1f1b", "train.remat": "none"}
    return {
        "room_GiB": devices.room.bytes / GIB,
        "theirs": {
            f"{zero}, {remat}": evaluated({"mesh.zero": zero, "train.remat": remat})
            for zero in ("none", "state")
            for remat in ("none", "selective", "full")
        },
        "ours": evaluated(plain | ours),
    }


def timed(count: int) -> dict[str, Any]:
    """Returns the seconds of a search for Llama 3 8B on H100 without pinned axes; each device has two sequences."""
    row = next(r for r in TABLE["rows"] if r["model"] == "Llama 3 8B" and r["chip"] == "h100")
    job = job_of(row)
    plain = with_values(job.cfg, {"train.grad_accum": 1, "mesh.data": -1, "mesh.context": 1, "mesh.fsdp": 1})
    cfg = resolve(replace(plain, data=DataConfig(seq_len=8192, batch_size=2 * count)), None)
    devices = mesh_plan.of_target(SIZES[count])
    begin = time.process_time(), time.perf_counter()
    found = mesh_plan.search(cfg, devices, (), 8)
    best = found.ranked[0]
    return {
        "devices": count, "target": SIZES[count], **cpu_seconds(begin), "meshes": found.meshes,
        "examined": found.examined, "best": described(best.cfg, devices, best.need.formula),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--cases", nargs="*", choices=CASES, default=[*CASES], help="default: all")
    arguments.add_argument("--seconds", nargs="*", type=int, choices=SIZES, help="time the search instead")
    arguments.add_argument("--variants", action="store_true", help="predict meshes of the last search again")
    given = arguments.parse_args(argv)
    path = record.RESULTS / "peer_meshes.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    result: dict[str, Any] = {name: before.get(name, {}) for name in ("cases", "missed", "seconds", "variants")}
    if given.variants:
        found = {name: case for name, case in (result["cases"] | result["missed"]).items() if "theirs" in case}
        result["variants"] = {name: variants(name, case["ours"]["values"]) for name, case in found.items()}
        print(json.dumps(result["variants"], indent=1))
        record.record("peer_meshes", result)
        return
    if given.seconds is not None:
        for count in given.seconds or SIZES:
            result["seconds"][str(count)] = timed(count)
            print(json.dumps(result["seconds"][str(count)]), flush=True)
            record.record("peer_meshes", result)
        return
    for case in given.cases:
        found = compare(case)
        within = found.get("ours_over_theirs", math.inf) <= BAR
        result["missed" if within else "cases"].pop(case, None)
        result["cases" if within else "missed"][case] = found
        print(json.dumps(found, indent=1), flush=True)
        record.record("peer_meshes", result)


if __name__ == "__main__":
    main()
