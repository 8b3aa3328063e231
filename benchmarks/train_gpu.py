"""Measures the training step on one GPU, alone and beside torch.compile: `python benchmarks/train_gpu.py --jobs NAME`

Needs jax, flax, optax, numpy, pyyaml and psutil; the peer also needs torch and transformers, and is left out without
them. Weights and tokens are random; nothing is downloaded. There are two phases, and `--phases` selects one:
    alone      each side in turn has the GPU for itself
    together   each side has an equal share of the memory; they take turns of about two seconds in rounds, so that other
               events on the chip affect all

For each of `--remats`, our side selects the largest of the job's batches whose compiled step fits its share of memory.
The fastest of these candidates runs in the rounds. The peer takes the same batch, or the largest smaller one that fits.

The peer is `transformers.LlamaForCausalLM` (`MixtralForCausalLM` for experts) with `attn_implementation="sdpa"`, the
fused AdamW of `torch.optim`, and gradients clipped to a global norm of 1. It only recomputes what torch.compile chooses
to recompute:
    torch_compile   float32 weights and optimizer, bfloat16 by autocast: the same arithmetic as ours
    torch_bf16      everything in bfloat16: less memory and traffic, different arithmetic
    torch_eager     like torch_compile, but not compiled

MFU follows two conventions: full attention (PaLM), or only the pairs that masks and windows leave. Each phase of a job
writes `results/train_gpu_<device>_<job>_<phase>.json` after each candidate and each round; options that change what is
measured add to the name. docs/benchmarks.md has the commands for the first half hour with a GPU.

`--small` is a smoke test for any device. `--aot h200` compiles each job for a chip that this machine does not have
(extra `[cuda13]`), from its largest batch down to the first that fits, and writes the memory to
`results/train_gpu_aot.json`. Later runs skip batches of at least the size that does not fit.
"""

import argparse
import gc
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import record
import train_cpu

ROOT = Path(__file__).parent.parent
NAME = "train_gpu"
REMATS = ("none", "selective", "dots", "full")
REMATS_TRIED = ["selective", "none"]
PHASES = ("alone", "together")
TURN_S = 2.0  # least duration of a turn, unless --steps is given
RESERVED = 0.08  # fraction of the GPU's memory that is left to CUDA contexts and libraries

Advance = Callable[[], Any]
"""Trains one step and returns its loss on the device."""


@dataclass(frozen=True)
class Job:
    """A decoder and its batches.

    Attributes:
      layers, width, heads, hidden, vocab: sizes of the model; `hidden` is the width of its MLP or of one expert.
      seq_len: tokens of a sequence.
      batches: candidates for the sequences that are computed at once, largest first.
      experts, top_k: experts of a layer, and those of a token. 0 means a dense model.
      family: `llama`, or `nanochat`: ReLU squared without a gate, QK-norm, three of four layers see half the sequence.
      optimizer: `adamw` or `muon`.
      step_tokens: tokens of an optimizer step, which sums the gradients of several batches. 0 means one batch.
    """

    layers: int
    width: int
    heads: int
    hidden: int
    seq_len: int
    batches: tuple[int, ...]
    vocab: int = 32768
    experts: int = 0
    top_k: int = 0
    family: str = "llama"
    optimizer: str = "adamw"
    step_tokens: int = 0


# karpathy/nanochat's dev/LEADERBOARD.md, run 1: 16,704 steps of 524,288 tokens in 10,949 s on 8 H100. Value embeddings
# are left out: look-ups without matmuls. One GPU also runs all of Muon for these tokens, as the eight did together.
NANOCHAT: dict[str, Any] = {"family": "nanochat", "optimizer": "muon", "step_tokens": 524288}
PUBLISHED = {"nanochat_d24": {"tokens_per_s": 100.0e3, "device": "one of 8 H100"}}
JOBS = {
    "dense_2048": Job(24, 2048, 16, 5632, 2048, (32, 16, 8, 4, 2, 1)),  # 1.37e9 parameters
    "dense_4096": Job(24, 2048, 16, 5632, 4096, (16, 8, 4, 2, 1)),
    "moe_2_of_8": Job(12, 1024, 8, 2816, 2048, (32, 16, 8, 4), experts=8, top_k=2),  # 9.5e8, 3.2e8 active
    "moe_8_of_64": Job(12, 1024, 8, 704, 2048, (32, 16, 8, 4), experts=64, top_k=8),  # the same with smaller experts
    "nanochat_d24": Job(24, 1536, 12, 6144, 2048, (32, 16, 8, 4), **NANOCHAT),  # 7.3e8 in matmuls
}
SMALL = {
    "dense_2048": Job(2, 64, 2, 128, 64, (4, 2), 256),
    "moe_2_of_8": Job(2, 64, 2, 64, 64, (4, 2), 256, experts=4, top_k=2),
    "nanochat_d24": Job(4, 64, 2, 128, 64, (4, 2), 256, **NANOCHAT | {"step_tokens": 512}),
}


def config(job: Job, batch: int, remat: str, kernels: dict[str, str]) -> Any:
    """Returns the configuration of a job."""
    from jaxstack.config import (
        Config,
        DataConfig,
        KernelsConfig,
        MeshConfig,
        ModelConfig,
        MoEConfig,
        OptimConfig,
        TrainConfig,
    )

    nanochat: dict[str, Any] = {
        "activation": "relu2",
        "gated": False,
        "qk_norm": True,
        "windows": (job.seq_len // 2,) * 3 + (0,),
    }
    whole = job.step_tokens // job.seq_len or batch
    return Config(
        model=ModelConfig(
            num_layers=job.layers,
            d_model=job.width,
            num_heads=job.heads,
            d_ff=job.hidden,
            vocab_size=job.vocab,
            moe=MoEConfig(num_experts=job.experts, top_k=job.top_k) if job.experts else MoEConfig(),
            **nanochat if job.family == "nanochat" else {},
        ),
        data=DataConfig(seq_len=job.seq_len, batch_size=whole),
        optim=OptimConfig(name=job.optimizer, lr=3e-4, warmup_steps=0, schedule="constant"),  # type: ignore[arg-type]
        train=TrainConfig(steps=10**6, dtype="bfloat16", remat=remat, grad_accum=whole // batch),  # type: ignore[arg-type]
        kernels=KernelsConfig(**kernels),  # type: ignore[arg-type]
        mesh=MeshConfig(data=1),
    )


def text(job: Job, batch: int) -> Any:
    """Returns random tokens."""
    import numpy as np

    return np.random.default_rng(0).integers(0, job.vocab, (batch, job.seq_len + 1)).astype(np.int32)


def say(message: dict[str, Any]) -> None:
    """Sends a message to the process that has started this one."""
    print(json.dumps(message), flush=True)


def timed(advance: Advance, read: Callable[[Any], float], steps: int) -> tuple[float, float]:
    """Returns the seconds per step and the last loss; losses are read one step late, as in train.py."""
    begin, unread = time.perf_counter(), None
    for _ in range(steps):
        loss = advance()
        if unread is not None:
            read(unread)
        unread = loss
    last = read(unread)
    return (time.perf_counter() - begin) / steps, last


def serve(advance: Advance, read: Callable[[Any], float], lines: Iterable[str], peak: Callable[[], int | None]) -> None:
    """Answers each line, a number of steps, with the seconds per step, the last loss and the most memory so far."""
    for line in lines:
        seconds, loss = timed(advance, read, int(line))
        say({"step_s": seconds, "loss": loss, "peak_bytes": peak()})


def ours(order: dict[str, Any], lines: Iterable[str]) -> None:
    """Runs our side in a process of its own.

    It sends `candidate`s, one for each batch that is compiled or tried, then what it has selected, and then serves.
    """
    import jax

    device = record.accelerator(order["small"])
    budget = (device.memory_stats() or {}).get("bytes_limit", float("inf"))
    known: list[dict[str, Any]] = list(order["known"])
    best: dict[str, Any] = {}
    for remat in order["remats"]:
        for batch in order["batches"]:
            found, advance = candidate(order, batch, remat, known, budget)
            if advance is not None:
                timed(advance, float, 1)
                seconds = timed(advance, float, order["steps"] or 1)[0]
                speed = tokens_of(order["job"], batch) / seconds
                found |= {"step_s": seconds, "tokens_per_s": round(speed, 1)}
                best = max(best, found, key=lambda row: row.get("tokens_per_s", 0.0))
            say({"candidate": found})
            known.append(found)
            del advance  # with its state
            gc.collect()
            if "step_s" in found:
                break
    if not best:
        sys.exit(f"no batch of {order['batches']} fits {budget / 2**30:.1f} GiB")
    jax.clear_caches()
    begin = time.perf_counter()
    _, advance = candidate(order, best["batch"], best["remat"], [], float("inf"))
    assert advance is not None
    timed(advance, float, 1)
    say(best | {"first_step_s": time.perf_counter() - begin, "device": device.device_kind})
    # This peak includes every candidate of this process; compiled_bytes is the memory of the step itself.
    serve(advance, float, lines, lambda: (device.memory_stats() or {}).get("peak_bytes_in_use"))


def candidate(
    order: dict[str, Any], batch: int, remat: str, known: list[dict[str, Any]], budget: float
) -> tuple[dict[str, Any], Advance | None]:
    """Returns the description of a candidate, and a function that trains one step, or None if it does not fit.

    Nothing refers to the state of a candidate that does not fit when this returns.
    """
    import jax
    import numpy as np

    from jaxstack import sharding
    from jaxstack.families.context import make_context
    from jaxstack.planner import memory
    from jaxstack.training import assemble
    from jaxstack.training.state import Recipe, abstract_state, make_state

    job, device = Job(**order["job"]), jax.devices()[0]
    cfg = config(job, batch, remat, order["kernels"])
    ctx = make_context(cfg, sharding.make_mesh(cfg.mesh, cfg.microbatch_size, [device]))
    found: dict[str, Any] = {"remat": remat, "batch": batch, "kernels": kernels_of(job, ctx)}
    if why := too_large(found, known, budget):
        return found | {"skipped": why}, None
    least = memory.need(cfg, 1, "gpu").bounds[0]
    if device.platform != "cpu" and least > budget:
        return found | {"skipped": f"needs at least {least / 2**30:.1f} GiB by formula"}, None
    abstract = abstract_state(Recipe.of(cfg), ctx)
    ids, where = text(job, cfg.data.batch_size), ctx.layout.sharding(ctx.layout.batch)
    host = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_weights": np.ones(ids[:, 1:].shape, np.float32)}
    placed = jax.device_put(host, where)
    begin = time.perf_counter()
    train_step: Any = assemble.jit_train_step(cfg, ctx, abstract)
    compiled = train_step.lower(abstract, placed).compile()
    sizes = compiled.memory_analysis()
    total = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes
    found |= {"compile_s": round(time.perf_counter() - begin, 1), "total": total}
    if total > budget:
        return found, None
    held: list[Any] = []  # the state; only `advance` refers to it

    def advance() -> Any:
        state, metrics = compiled(held.pop(), placed)
        held.append(state)
        return metrics["loss"]

    try:
        held.append(make_state(Recipe.of(cfg), ctx, abstract))
        jax.block_until_ready(advance())
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return found | {"total": max(total, budget + 1), "out_of_memory": True}, None
    return found, advance


def kernels_of(job: Job, ctx: Any) -> dict[str, str]:
    """Returns the implementation of each op that a step of the job runs."""
    unused = ("decode", "gelu") if job.experts else ("decode", "gelu", "moe")
    return {op: name for op, name in ctx.ops.by_name.items() if op not in unused}


def too_large(wanted: dict[str, Any], known: list[dict[str, Any]], budget: float) -> str:
    """Returns why a candidate cannot fit, or "": an equal one with at most its batch needs more than the budget."""
    for case in known:
        same = all(case[key] == wanted[key] for key in ("remat", "kernels"))
        if same and case["batch"] <= wanted["batch"] and case.get("total", 0) > budget:
            return f"batch {case['batch']} needs {case['total'] / 2**30:.1f} GiB"
    return ""


def tokens_of(job: dict[str, Any], batch: int) -> int:
    """Returns the tokens of an optimizer step."""
    return job["step_tokens"] or batch * job["seq_len"]


def torch_peer(order: dict[str, Any], lines: Iterable[str]) -> None:
    """Runs the side of torch in a process of its own."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    job, mode = Job(**order["job"]), order["mode"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(order["share"])
    torch.set_float32_matmul_precision("high")
    low = mode == "torch_bf16"

    def peer(batch: int) -> Any:
        torch.manual_seed(0)
        model = _transformers(job).to(device, torch.bfloat16 if low else torch.float32).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        ids = torch.from_numpy(text(job, batch)).long().to(device)
        inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].reshape(-1)

        def loss_of() -> Any:
            with torch.autocast(device, torch.bfloat16, enabled=not low):
                logits = model(inputs).logits
            return F.cross_entropy(logits.flatten(0, 1).float(), targets)

        compiled = loss_of if mode == "torch_eager" else torch.compile(loss_of, dynamic=False)

        def advance() -> Any:
            optimizer.zero_grad(set_to_none=True)
            loss = compiled()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss.detach()

        return advance

    def fitting() -> tuple[int, float, Any]:
        for batch in order["batches"]:
            begin, advance = time.perf_counter(), None
            try:
                advance = peer(batch)
                timed(advance, read, 2)
                return batch, time.perf_counter() - begin, advance
            except torch.OutOfMemoryError:
                say({"candidate": {"mode": mode, "batch": batch, "out_of_memory": True}})
            del advance  # with its model
            gc.collect()
            torch.compiler.reset()
            if device == "cuda":
                torch.cuda.empty_cache()
        sys.exit(f"{mode}: no batch of {order['batches']} fits")

    def read(loss: Any) -> float:
        return float(loss.item())

    batch, first_step_s, advance = fitting()
    seconds = timed(advance, read, 1)[0]
    kind = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    say({"first_step_s": first_step_s, "batch": batch, "step_s": seconds, "device": kind})
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    serve(advance, read, lines, lambda: torch.cuda.max_memory_allocated() if device == "cuda" else None)


def _transformers(job: Job) -> Any:
    """Returns the model of the peer."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    common: dict[str, Any] = {
        "vocab_size": job.vocab,
        "hidden_size": job.width,
        "intermediate_size": job.hidden,
        "num_hidden_layers": job.layers,
        "num_attention_heads": job.heads,
        "num_key_value_heads": job.heads,
        "max_position_embeddings": job.seq_len,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    if not job.experts:
        return LlamaForCausalLM(LlamaConfig(**common))
    common |= {"num_local_experts": job.experts, "num_experts_per_tok": job.top_k, "sliding_window": None}
    return MixtralForCausalLM(MixtralConfig(**common))


class Worker(train_cpu.Worker):
    """A process that trains on request. Descriptions of candidates go to `note` as they arrive."""

    script = __file__

    def __init__(self, side: str, order: dict[str, Any], note: Callable[[dict[str, Any]], None]) -> None:
        self.note = note
        super().__init__("--worker", side, job=order)

    def _hear(self) -> dict[str, Any]:
        while "candidate" in (said := super()._hear()):
            self.note(said["candidate"])
        return said


def measure(phase: str, name: str, job: Job, given: argparse.Namespace, known: list[dict[str, Any]]) -> dict[str, Any]:
    """Measures the sides of a job in one phase, writes the result as it grows, and returns it.

    Args:
      phase: of `PHASES`.
      name: of the job.
      job: the job.
      given: the command line, with the device and the peers of this job.
      known: memory of candidates; those of this phase are added.
    """
    sides = ["jaxstack", *given.peers]
    share = (1 - RESERVED) / (len(sides) if phase == "together" else 1)
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{share:.3f}"
    order = {"job": asdict(job), "batches": given.batches or job.batches, "share": share, "steps": given.steps,
             "remats": given.remats, "kernels": given.kernels, "known": known, "small": given.small}  # fmt: skip
    result: dict[str, Any] = {
        "device": given.device,
        "phase": phase,
        "name": name,
        "job": asdict(job),
        "memory_share": round(share, 3),
        "tried": [],
        "failed": {},
        "sides": {},
        "speed_against": {},
        "published": None if given.small else PUBLISHED.get(name),
    }
    variant = [f"{key}-{value}" for key, value in given.kernels.items()]
    variant += [*(given.remats if given.remats != REMATS_TRIED else ()), *map(str, given.batches or ())]
    file = record.name_of("train_gpu", given.device, name, *variant, phase)
    taken: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    workers: dict[str, Worker] = {}

    def write() -> None:
        if given.out or not given.small:
            record.record(file, result, given.out)

    def note(candidate: dict[str, Any]) -> None:
        print(f"  {json.dumps(candidate)}", file=sys.stderr, flush=True)
        result["tried"].append(candidate)
        if "total" in candidate:
            known.append(candidate)
        write()

    def start(side: str) -> bool:
        batches = order["batches"]
        if (own := result["sides"].get("jaxstack")) and side != "jaxstack":
            batches = [batch for batch in batches if batch <= own["batch"]]
        try:
            how = order | {"mode": side, "batches": batches}
            workers[side] = Worker("ours" if side == "jaxstack" else side, how, note)
            workers[side].turn(1)
        except SystemExit as ended:  # its own error is on the screen; the other sides are still measured
            result["failed"][side] = str(ended)
        else:
            result["sides"][side] = {key: value for key, value in workers[side].first.items() if key != "step_s"}
        write()
        return side in result["sides"]

    def turn(side: str) -> None:
        worker = workers[side]
        taken[side].append(worker.turn(given.steps or max(1, math.ceil(TURN_S / worker.first["step_s"]))))
        result["sides"][side] |= figures(job, worker.first, taken[side])
        result["speed_against"] = ratios(taken, workers) if phase == "together" else {}
        write()

    if phase == "alone":
        for side in sides:
            if start(side):
                for _ in range(given.rounds):
                    turn(side)
            if side in workers:
                workers.pop(side).close()
        return result
    started = [side for side in sides if start(side)]
    for number in range(given.rounds):
        first = number % max(len(started), 1)
        for side in started[first:] + started[:first]:  # no process always runs after the same one
            turn(side)
    for worker in workers.values():
        worker.close()
    return result


def figures(job: Job, first: dict[str, Any], turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the medians of a side's turns."""
    from jaxstack.families import flops

    model = config(job, first["batch"], "none", {}).model
    tokens = tokens_of(asdict(job), first["batch"]) if first.get("remat") else first["batch"] * job.seq_len
    seconds = median(turn["step_s"] for turn in turns)
    found: dict[str, Any] = {
        "step_ms": round(1e3 * seconds, 2),
        "tokens_per_s": round(tokens / seconds, 1),
        "rounds": len(turns),
        "step_ms_of_rounds": [round(1e3 * turn["step_s"], 2) for turn in turns],
        "peak_bytes": turns[-1]["peak_bytes"],
        "last_loss": turns[-1]["loss"],
    }
    for convention, count in flops.flops_per_token(model, job.seq_len)._asdict().items():
        share = flops.mfu(count * tokens / seconds, first["device"], 1, "bfloat16")
        found["mfu" if convention == "full" else f"mfu_{convention}"] = None if share is None else round(share, 4)
    return found


def ratios(taken: dict[str, list[dict[str, Any]]], workers: dict[str, Worker]) -> dict[str, float]:
    """Returns our speed over that of each peer, the median over the rounds that both have finished."""

    def speeds(side: str) -> list[float]:
        return [workers[side].first["batch"] / turn["step_s"] for turn in taken[side]]

    if not taken["jaxstack"]:
        return {}
    peers = [side for side, turns in taken.items() if turns and side != "jaxstack"]
    pairs = {side: list(zip(speeds("jaxstack"), speeds(side), strict=False)) for side in peers}
    return {side: round(median(a / b for a, b in both), 3) for side, both in pairs.items()}


def known_memory(name: str) -> list[dict[str, Any]]:
    """Returns the memory of a job's candidates by the ahead-of-time compiler."""
    path = record.RESULTS / f"{NAME}_aot.json"
    found = json.loads(path.read_text())["cases"] if path.exists() else []
    return [case for case in found if case["job"] == name]


def ahead_of_time(target: str, given: argparse.Namespace) -> None:
    """Compiles the jobs for a chip that this machine does not have, and writes their memory."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    from jaxstack.common.hardware import CHIPS
    from jaxstack.planner import aot, memory

    path = record.RESULTS / f"{NAME}_aot.json"
    cases = json.loads(path.read_text())["cases"] if path.exists() else []
    for name, remat in itertools.product(given.jobs, given.remats):
        for batch in given.batches or JOBS[name].batches:
            cfg = config(JOBS[name], batch, remat, given.kernels)
            if memory.need(cfg, 1, "gpu").bounds[0] > CHIPS[target].hbm_bytes:
                print(f"{name} {remat} {batch}: does not fit by formula", flush=True)
                continue
            begin = time.perf_counter()
            try:
                r = aot.compile(cfg, f"{target}:1x1x1")
            except Exception as error:  # compilers raise their own types, for programs that do not fit among others
                print(f"{name} {remat} {batch}: {str(error)[:300]}", flush=True)
                continue
            row = {
                "job": name,
                "target": target,
                "remat": remat,
                "batch": batch,
                "kernels_asked": given.kernels,
                "kernels": kernels_of(JOBS[name], aot.abstract_inputs(cfg, f"{target}:1x1x1")[0]),
                "compile_s": round(time.perf_counter() - begin, 1),
                "arguments": r.arguments,
                "temporary": r.temporary,
                "total": r.total,
                "formula": round(sum(r.memory.values())),
                "fits": r.total <= CHIPS[target].hbm_bytes,
            }
            same = ("job", "target", "remat", "batch", "kernels_asked")
            cases = [c for c in cases if any(c[key] != row[key] for key in same)] + [row]
            print(json.dumps(row), flush=True)
            record.record(f"{NAME}_aot", {"note": "by the ahead-of-time compiler; nothing ran", "cases": cases})
            if row["fits"]:
                break


def installed(modules: str) -> bool:
    """Returns whether another process can import the modules; this one must not touch the GPU."""
    words = [sys.executable, "-c", f"import {modules}"]
    return not subprocess.run(words, capture_output=True, check=False).returncode


def device_kind(small: bool) -> str:
    """Returns the kind of JAX's first device, which another process looks up. Exits politely without a GPU."""
    code = f"import record, sys; sys.argv[0] = 'train_gpu.py'; print(record.accelerator({small}).device_kind)"
    words, env = [sys.executable, "-c", code], os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path])}
    found = subprocess.run(
        words, stdout=subprocess.PIPE, text=True, check=False, cwd=Path(__file__).parent,
        env=env | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    )  # fmt: skip
    if found.returncode:
        sys.exit(found.returncode)
    return found.stdout.strip().splitlines()[-1]


def main(argv: Sequence[str] | None = None) -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--jobs", nargs="+", choices=JOBS, help="jobs to run (default: all)")
    arguments.add_argument("--phases", nargs="+", choices=PHASES, default=[*PHASES])
    arguments.add_argument("--peers", nargs="*", choices=["torch_compile", "torch_bf16", "torch_eager"])
    arguments.add_argument("--remats", nargs="+", choices=REMATS, default=REMATS_TRIED)
    arguments.add_argument("--kernels", nargs="*", default=[], metavar="OP=NAME", help="kernels.* of train.py")
    arguments.add_argument("--batches", type=int, nargs="+", help="largest first (default: those of the job)")
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--steps", type=int, default=0, help="steps of a turn (default: about two seconds)")
    arguments.add_argument("--small", action="store_true", help="smoke test with tiny models")
    arguments.add_argument("--aot", metavar="CHIP", help="h100 or h200: only compile, for a chip that is not here")
    arguments.add_argument("--out", type=Path, help="folder of the result (default: results/; --small: no file)")
    arguments.add_argument("--worker", help=argparse.SUPPRESS)
    given = arguments.parse_args(argv)
    if given.worker:
        order = json.loads(sys.stdin.readline())
        return ours(order, sys.stdin) if given.worker == "ours" else torch_peer(order, sys.stdin)
    given.kernels = dict(word.split("=") for word in given.kernels)
    jobs = SMALL if given.small else JOBS
    given.jobs = given.jobs or list(jobs)
    if given.aot:
        return ahead_of_time(given.aot, given)
    given.device = device_kind(given.small)
    torch = given.peers != [] and installed("torch, transformers")
    if given.peers and not torch:
        sys.exit(f"--peers={' '.join(given.peers)} needs torch and transformers. Install them, or give --peers alone.")
    peers = given.peers if given.peers is not None else ["torch_eager" if given.small else "torch_compile"] * torch
    with tempfile.TemporaryDirectory() as cache:  # the second phase need not compile what the first has compiled
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
        for name in given.jobs:
            given.peers = peers if jobs[name].family == "llama" else []  # transformers does not have the others
            known = known_memory(name)
            for phase in given.phases:
                if phase == "alone" or given.peers:
                    found = measure(phase, name, jobs[name], given, known)
                    show(found)
                    given.peers = [peer for peer in given.peers if peer not in found["failed"]]
    return None


def show(found: dict[str, Any]) -> None:
    """Prints the result of one phase."""
    for side, row in found["sides"].items():
        print(
            f"{found['name']:<12} {found['phase']:<9} {side:<14} batch {row['batch']:<3} {row['tokens_per_s']:>10,.0f} "
            f"tokens/s  MFU {_percent(row['mfu'])} full, {_percent(row['mfu_causal'])} causal",
            flush=True,
        )
    for side, why in found["failed"].items():
        print(f"{found['name']:<12} {found['phase']:<9} {side}: {why}", flush=True)
    for side, ratio in found["speed_against"].items():
        print(f"{found['name']:<12} {found['phase']:<9} {ratio} times the speed of {side}", flush=True)
    if found["published"]:
        print(f"{found['name']:<12} published: {found['published']}", flush=True)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


if __name__ == "__main__":
    main()
