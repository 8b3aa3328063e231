"""Compares the choice of `--mesh=auto` on simulated CPU devices with all meshes: `python benchmarks/mesh_search.py`

For four small models on 2, 4 and 8 devices, a process compiles every mesh that is possible and runs a step of each in
turn, round after round, so that other work on the machine slows all of them. A mesh is measured as the search would run
it; one with a pipeline also with the fewest microbatches. All times go to `results/mesh_search.json` case by case,
and a later call with `--resume` measures only what is missing. A process with 60 programs maps more pieces of memory
than Linux allows by default: `sysctl -w vm.max_map_count=1048576`, or LLVM ends with "Cannot allocate memory".

`--fit` prints the constants of `planner/step_clocks.py`, fitted to the ratios of the fastest quarter of the rounds.
`--report` prints the choice of each case, its time, the fastest mesh and the ratio. Both measure nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import record

from jaxstack.config import SEARCHED_KEYS, Config, DataConfig, ModelConfig, MoEConfig, OptimConfig, TrainConfig, flat
from jaxstack.planner.job import Job
from jaxstack.runtime import platform

WIDTH = {"d_model": 128, "num_heads": 8, "d_ff": 352, "vocab_size": 512}
MODELS: dict[str, tuple[ModelConfig, DataConfig]] = {
    "dense": (ModelConfig(num_layers=4, **WIDTH), DataConfig(seq_len=128, batch_size=8)),
    "moe": (
        ModelConfig(num_layers=2, moe=MoEConfig(num_experts=8, top_k=2, d_ff=176), **WIDTH),
        DataConfig(seq_len=128, batch_size=8),
    ),
    "long": (
        ModelConfig(num_layers=2, d_model=64, num_heads=8, d_ff=176, vocab_size=256),
        DataConfig(seq_len=2048, batch_size=2),
    ),
    "deep": (
        ModelConfig(num_layers=16, d_model=64, num_heads=8, d_ff=176, vocab_size=256),
        DataConfig(seq_len=64, batch_size=16),
    ),
}
DEVICES = (2, 4, 8)


def config(model: str) -> Config:
    """Returns the run of a model."""
    shape, data = MODELS[model]
    optim = OptimConfig(warmup_steps=0, schedule="constant")
    return Config(model=shape, data=data, optim=optim, train=TrainConfig(steps=10**6, remat="none"))


def cores() -> int:
    """Returns the cores that the devices share."""
    return platform.physical_cores()


def cases(model: str, devices: int, every: bool) -> Iterator[tuple[Config, Any]]:
    """Yields every mesh with its context, or all candidates without recomputation and accumulation."""
    from jaxstack.planner import mesh_search

    seen: dict[str, list[tuple[Config, Any]]] = {}
    given = ("train.remat", "train.grad_accum")
    for cfg in mesh_search.Space(config(model), devices, "cpu", given).candidates():
        job = mesh_search.Space(cfg, devices, "cpu").require({})
        seen.setdefault(str(cfg.mesh.sizes), []).append((job.cfg, job.ctx))
    for found in seen.values():
        plain = [one for one in found if one[0].pipeline.schedule == "1f1b"]
        yield from found if every else [plain[0], *plain[1:][-1:]]  # the most and the fewest microbatches


def name_of(cfg: Config) -> str:
    """Returns what distinguishes a candidate: the axes above 1, and the pipeline."""
    words = [f"{axis}={size}" for axis, size in cfg.mesh.sizes.items() if size > 1]
    if cfg.mesh.pipe > 1:
        p = cfg.pipeline
        words.append(f"{p.schedule} chunks={p.chunks} microbatches={p.microbatches}")
    return " ".join([*words, cfg.train.remat, f"accum={cfg.train.grad_accum}"])


def choice(model: str, devices: int) -> Config:
    """Returns what the search chooses."""
    from jaxstack.planner import memory, mesh_search, step_clocks

    room = memory.Room("this machine", float("inf"), 0, sharing=devices)
    clock = step_clocks.CpuClock(cores())
    return mesh_search.search(mesh_search.Space(config(model), devices, "cpu"), room, clock).ranked[0].cfg


def measure(model: str, devices: int, rounds: int, earlier: dict[str, Any]) -> dict[str, Any]:
    """Compiles and times every mesh of a case that is not in `earlier`."""
    import jax
    import numpy as np

    from jaxstack import sharding
    from jaxstack.families.context import make_context
    from jaxstack.planner import estimate
    from jaxstack.training import assemble
    from jaxstack.training.state import Recipe, abstract_state, make_state

    todo = {name_of(cfg): cfg for cfg, _ in cases(model, devices, every=False)}
    best = choice(model, devices)
    todo[name_of(best)] = best
    todo = {name: cfg for name, cfg in todo.items() if name not in earlier}
    runs: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    rng = np.random.default_rng(0)
    for name, cfg in todo.items():
        begin = time.perf_counter()
        ctx = make_context(cfg, sharding.make_mesh(cfg.mesh, cfg.microbatch_size, jax.devices()[:devices]))
        rows[name] = {"flags": flags(cfg), "seconds": []}
        cfg = estimate.resolve_split(Job(cfg, ctx))[0].cfg
        abstract = abstract_state(Recipe.of(cfg), ctx)
        shape = (cfg.data.batch_size, cfg.data.seq_len + 1)
        ids = rng.integers(0, cfg.model.vocab, shape).astype(np.int32)
        batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_weights": np.ones(ids[:, 1:].shape, np.float32)}
        train_step = assemble.jit_train_step(cfg, ctx, abstract)
        runs[name] = [
            make_state(Recipe.of(cfg), ctx, abstract),
            train_step,
            jax.device_put(batch, ctx.layout.sharding(ctx.layout.batch)),
        ]
        one_step(runs[name])
        print(f"  {name}: compiled in {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    print(f"  {rounds} rounds of {len(runs)} steps", file=sys.stderr, flush=True)
    for _ in range(rounds):
        for name, run in runs.items():
            rows[name]["seconds"].append(round(one_step(run), 5))
    return rows


def one_step(run: list[Any]) -> float:
    """Returns the seconds of one step, whose state replaces that of the run."""
    import jax

    state, train_step, batch = run
    begin = time.perf_counter()
    run[0], metrics = train_step(state, batch)
    jax.block_until_ready((run[0], metrics))
    return time.perf_counter() - begin


def flags(cfg: Config) -> dict[str, Any]:
    """Returns the values that the search chooses."""
    values = flat(cfg)
    return {key: values[key] for key in SEARCHED_KEYS}


def typical(seconds: list[float]) -> float:
    """Returns the time of a step without other work on the machine: the mean of the fastest quarter."""
    fastest = sorted(seconds)[: max(1, len(seconds) // 4)]
    return sum(fastest) / len(fastest)


def fit(found: dict[str, Any]) -> list[float]:
    """Returns the constants that minimize the squares of the relative errors, in logarithms.

    The times of a case have a factor of their own, which the fit leaves out: only ratios within a case decide a choice,
    and another case may have been measured beside other work.
    """
    import numpy as np
    from scipy.optimize import least_squares

    from jaxstack.planner.mesh_search import Space
    from jaxstack.planner.step_clocks import SECONDS, cpu_work

    work, seconds, case_of = [], [], []
    for index, case in enumerate(found.values()):
        share = case["devices"] / min(case["devices"], case["cores"])
        for row in case["meshes"].values():
            job = Space(config(case["model"]), case["devices"], "cpu").require(row["flags"])
            work.append([share * amount for amount in cpu_work(job)])
            seconds.append(typical(row["seconds"]))
            case_of.append(index)
    A, t, member = np.array(work), np.array(seconds), np.array(case_of)[:, None] == np.arange(len(found))

    def errors(logarithms: Any) -> Any:
        error = np.log(A @ np.exp(logarithms) / t)
        factors = error @ member / member.sum(0)
        anchor = 1e-3 * (logarithms - start)  # the common scale of all constants is free
        return np.concatenate([error - member @ factors, anchor])

    start = np.log(np.maximum(SECONDS, 1e-9 * np.max(SECONDS)))
    return [float(x) for x in np.exp(least_squares(errors, start).x)]


def report(found: dict[str, Any]) -> dict[str, Any]:
    """Returns, for each case, the choice, its time, the fastest mesh and the ratio; prints them."""
    rows = {}
    for key, case in found.items():
        times = {name: typical(row["seconds"]) for name, row in case["meshes"].items()}
        chosen, fastest = name_of(choice(case["model"], case["devices"])), min(times, key=lambda name: times[name])
        if chosen not in times:
            print(f"{key}: {chosen} is not measured; run again with --resume")
            continue
        ratio = times[chosen] / times[fastest]
        rows[key] = {"choice": chosen, "ms": 1e3 * times[chosen], "fastest": fastest, "ratio": round(ratio, 3)}
        rows[key] |= {"fastest_ms": 1e3 * times[fastest], "meshes": len(times)}
        rows[key]["slowest_ratio"] = round(max(times.values()) / times[fastest], 2)
        print(f"{key:<10} {ratio:.2f}  {chosen} {1e3 * times[chosen]:.1f} ms; fastest of {len(times)}: {fastest} "
              f"{1e3 * times[fastest]:.1f} ms; slowest {rows[key]['slowest_ratio']:.1f} times that")  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--devices", nargs="+", type=int, default=list(DEVICES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--resume", action="store_true", help="keep earlier measurements of other meshes")
    parser.add_argument("--fit", action="store_true", help="print constants fitted to the results")
    parser.add_argument("--report", action="store_true", help="print choices and ratios of the results")
    parser.add_argument("--name", default="mesh_search", help="name of the result file")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        model, devices, rounds = args.worker[0], int(args.worker[1]), int(args.worker[2])
        print(json.dumps(measure(model, devices, rounds, json.loads(sys.stdin.read()))))
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    path = record.RESULTS / f"{args.name}.json"
    old = json.loads(path.read_text())["cases"] if path.exists() else {}
    found: dict[str, Any] = old if args.resume or args.fit or args.report else {}
    for devices in () if args.fit or args.report else args.devices:
        for model in args.models:
            key = f"{model}, {devices}"
            case = found.setdefault(key, {"model": model, "devices": devices, "cores": cores(), "meshes": {}})
            case["meshes"] |= run_worker(model, devices, args.rounds, case["meshes"])
            record.record(args.name, {"cases": found})
    if args.fit:
        print(fit(found))
    elif found:
        record.record(args.name, {"report": report(found), "cases": found})


def run_worker(model: str, devices: int, rounds: int, earlier: dict[str, Any]) -> dict[str, Any]:
    """Measures a case in a process of its own, with the variables that `train.py` sets for its devices."""
    variables = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    variables["XLA_FLAGS"] = f"--{'='.join(platform.CPU_FLAG)}"
    variables["NPROC"] = str(2 * devices)  # threads; with one a device, collectives have waited for each other
    print(f"{model}, {devices} devices", file=sys.stderr, flush=True)
    words = [sys.executable, str(Path(__file__)), "--worker", model, str(devices), str(rounds)]
    answer = subprocess.run(
        words, input=json.dumps(earlier), env=os.environ | variables, stdout=subprocess.PIPE, text=True, check=True
    )
    return dict(json.loads(answer.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
