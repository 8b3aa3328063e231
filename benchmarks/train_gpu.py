"""Compares the training step on one GPU with torch.compile: `python benchmarks/train_gpu.py [--jobs dense_2048 ...]`

Needs jax, flax, optax, numpy, pyyaml and psutil; the peer also needs torch and transformers. Weights and tokens are
random; nothing is downloaded. Each side is a process with its share of the GPU's memory. Both take turns of a few steps
in rounds, so that other events on the chip affect both.

Our side starts. For each of `--remats` it selects the largest of the job's batches whose compiled step fits its share
of memory. The fastest of these candidates runs in the rounds. The peer takes the same batch, or the largest smaller one
that fits.

The peer is `transformers.LlamaForCausalLM` (`MixtralForCausalLM` for experts) with `attn_implementation="sdpa"`, the
fused AdamW of `torch.optim`, and gradients clipped to a global norm of 1. It only recomputes what torch.compile chooses
to recompute:
    torch_compile   float32 weights and optimizer, bfloat16 by autocast: the same arithmetic as ours
    torch_bf16      everything in bfloat16: less memory and traffic, different arithmetic
    torch_eager     like torch_compile, but not compiled

MFU follows two conventions: full attention (PaLM), or only the pairs that the causal mask leaves. Results are added to
`results/train_gpu.json` job by job. A call with one peer takes about five minutes per job, mostly to compile:

    python benchmarks/train_gpu.py --jobs dense_2048
    python benchmarks/train_gpu.py --jobs dense_4096
    python benchmarks/train_gpu.py --jobs moe_2_of_8 moe_8_of_64 --peers

`--small` is a smoke test for any device. `--aot h100` compiles every candidate for a chip that this machine does not
have (extra `[cuda13]`) and writes its memory to `results/train_gpu_aot.json`. A later run on such a chip skips the
candidates that cannot fit.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import record
import train_cpu

ROOT = Path(__file__).parent.parent
NAME = "train_gpu"
REMATS = ("none", "selective", "dots", "full")
RESERVED = 0.08  # fraction of the GPU's memory that is left to CUDA contexts and libraries


@dataclass(frozen=True)
class Job:
    """The sizes of a decoder and its batches: layers, features, heads, sequences and tokens."""

    layers: int
    width: int
    heads: int
    hidden: int
    seq_len: int
    batches: tuple[int, ...]
    vocab: int = 32768
    experts: int = 0
    top_k: int = 0


JOBS = {
    "dense_2048": Job(24, 2048, 16, 5632, 2048, (32, 16, 8, 4, 2, 1)),  # 1.37e9 parameters
    "dense_4096": Job(24, 2048, 16, 5632, 4096, (16, 8, 4, 2, 1)),
    "moe_2_of_8": Job(12, 1024, 8, 2816, 2048, (32, 16, 8, 4), experts=8, top_k=2),  # 9.5e8, 3.2e8 active
    "moe_8_of_64": Job(12, 1024, 8, 704, 2048, (32, 16, 8, 4), experts=64, top_k=8),  # the same with smaller experts
}
SMALL = {
    "dense_2048": Job(2, 64, 2, 128, 64, (4, 2), 256),
    "moe_2_of_8": Job(2, 64, 2, 64, 64, (4, 2), 256, experts=4, top_k=2),
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

    return Config(
        model=ModelConfig(
            num_layers=job.layers,
            d_model=job.width,
            num_heads=job.heads,
            d_ff=job.hidden,
            vocab_size=job.vocab,
            moe=MoEConfig(num_experts=job.experts, top_k=job.top_k) if job.experts else MoEConfig(),
        ),
        data=DataConfig(seq_len=job.seq_len, batch_size=batch),
        optim=OptimConfig(lr=3e-4, warmup_steps=0, schedule="constant"),
        train=TrainConfig(steps=10**6, dtype="bfloat16", remat=remat),  # type: ignore[arg-type]
        kernels=KernelsConfig(**kernels),  # type: ignore[arg-type]
        mesh=MeshConfig(data=1),
    )


def text(job: Job, batch: int) -> Any:
    """Returns random tokens."""
    import numpy as np

    return np.random.default_rng(0).integers(0, job.vocab, (batch, job.seq_len + 1)).astype(np.int32)


def ours(order: dict[str, Any]) -> None:
    """Runs our side in a process of its own."""
    import jax
    import numpy as np

    from jaxstack import sharding
    from jaxstack.models import flops as plan
    from jaxstack.models.context import Context
    from jaxstack.training import step
    from jaxstack.training.state import abstract_state, make_state

    job, device = Job(**order["job"]), jax.devices()[0]
    stats = device.memory_stats() or {}
    budget = stats.get("bytes_limit", float("inf"))

    def fitting(remat: str) -> tuple[Any, Any, dict[str, Any]] | None:
        """Returns state and compiled step at the largest batch that fits, and their description."""
        for batch in order["batches"]:
            cfg = config(job, batch, remat, order["kernels"])
            ctx = Context.create(cfg, sharding.make_mesh(cfg.mesh, batch, [device]))
            case = {"remat": remat, "batch": batch, "kernels": ctx.kernels}
            if any(case.items() <= c.items() and c["total"] > budget for c in order["known"]):
                continue
            abstract = abstract_state(cfg, ctx)
            ids, where = text(job, batch), ctx.sharding(ctx.batch)
            host = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_weights": np.ones(ids[:, 1:].shape, np.float32)}
            placed = jax.device_put(host, where)
            begin = time.perf_counter()
            train_step: Any = step.jit_train_step(cfg, ctx, abstract)
            compiled = train_step.lower(abstract, placed).compile()
            seconds = time.perf_counter() - begin
            memory = compiled.memory_analysis()
            total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
            flops = plan.flops_per_token(cfg.model, job.seq_len)
            said = {
                "remat": remat,
                "batch": batch,
                "compile_s": round(seconds, 1),
                "compiled_bytes": total,
                "kernels": ctx.kernels,
                "flops_per_token": flops._asdict(),
            }
            if total > budget:
                print(f"  {remat}, batch {batch}: {total / 2**30:.1f} GiB does not fit", file=sys.stderr, flush=True)
                continue
            try:
                state = make_state(cfg, ctx, abstract)
                state, metrics = compiled(state, placed)
                jax.block_until_ready(metrics)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                continue
            return state, lambda state: compiled(state, placed), said
        return None

    def steps(state: Any, advance: Any, count: int) -> tuple[Any, float, float]:
        """Returns the state, the seconds per step and the last loss; metrics are read one step late, as in train.py."""
        begin, unread = time.perf_counter(), None
        for _ in range(count):
            state, metrics = advance(state)
            if unread is not None:
                float(unread["loss"])
            unread = metrics
        assert unread is not None
        return state, float(unread["loss"]), (time.perf_counter() - begin) / count

    tried: list[dict[str, Any]] = []
    for remat in order["remats"]:
        if found := fitting(remat):
            state, advance, said = found
            state, _, seconds = steps(state, advance, order["steps"])
            tried.append(said | {"tokens_per_s": round(said["batch"] * job.seq_len / seconds, 1)})
            print(f"  {json.dumps(tried[-1])}", file=sys.stderr, flush=True)
            del state, advance, found
            gc.collect()
            jax.clear_caches()
    if not tried:
        sys.exit(f"no batch of {order['batches']} fits {budget / 2**30:.1f} GiB")
    best = max(tried, key=lambda said: said["tokens_per_s"])
    order["batches"] = [best["batch"]]
    again = fitting(best["remat"])
    assert again is not None
    state, advance, said = again
    begin = time.perf_counter()
    state, *_ = steps(state, advance, 1)
    first = {"first_step_s": time.perf_counter() - begin + said["compile_s"], "tried": tried, **said}
    print(json.dumps(first | {"device": device.device_kind}), flush=True)
    for line in sys.stdin:
        state, loss, seconds = steps(state, advance, int(line))
        # This peak includes every candidate of this process; compiled_bytes is the memory of the step itself.
        peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
        print(json.dumps({"step_s": seconds, "loss": loss, "peak_bytes": peak}), flush=True)


def torch_peer(order: dict[str, Any]) -> None:
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

    def run(advance: Any, count: int) -> tuple[float, float]:
        begin, unread = time.perf_counter(), None
        for _ in range(count):
            loss = advance()
            if unread is not None:
                unread.item()
            unread = loss
        assert unread is not None
        return unread.item(), (time.perf_counter() - begin) / count

    for batch in order["batches"]:
        try:
            begin, advance = time.perf_counter(), peer(batch)
            run(advance, 2)
            break
        except torch.OutOfMemoryError:
            print(f"  {mode}, batch {batch}: out of memory", file=sys.stderr, flush=True)
        gc.collect()
        torch.compiler.reset()
        torch.cuda.empty_cache()
    else:
        sys.exit(f"{mode}: no batch of {order['batches']} fits")
    print(json.dumps({"first_step_s": time.perf_counter() - begin, "batch": batch}), flush=True)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for line in sys.stdin:
        loss, seconds = run(advance, int(line))
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
        print(json.dumps({"step_s": seconds, "loss": loss, "peak_bytes": peak}), flush=True)


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
    """A process that trains on request."""

    script = __file__


def compare(name: str, job: Job, given: argparse.Namespace, kernels: dict[str, str]) -> dict[str, Any]:
    """Runs both sides of a job in rounds and returns their times and ratios."""
    share = (1 - RESERVED) / (1 + len(given.peers))
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{share:.3f}"
    order = {
        "job": asdict(job),
        "batches": given.batches or job.batches,
        "share": share,
        "steps": given.steps,
        "remats": given.remats,
        "kernels": kernels,
        "known": known(name),
    }
    workers = {"jaxstack": Worker("--worker", "ours", job=order)}
    own = workers["jaxstack"].first
    smaller = [batch for batch in order["batches"] if batch <= own["batch"]]
    for mode in given.peers:
        workers[mode] = Worker("--worker", mode, job=order | {"mode": mode, "batches": smaller})
    said = {key: worker.first for key, worker in workers.items()}
    for worker in workers.values():
        worker.turn(1)
    taken: dict[str, list[float]] = {key: [] for key in workers}
    last: dict[str, dict[str, Any]] = {}
    for turn in range(given.rounds):
        keys = list(workers)
        first = turn % len(keys)
        for key in keys[first:] + keys[:first]:  # no process always runs after the same one
            last[key] = workers[key].turn(given.steps)
            taken[key].append(last[key]["step_s"])
    for worker in workers.values():
        worker.close()

    from jaxstack.models import flops as plan

    rows = {}
    for key, seconds in taken.items():
        speeds = [said[key]["batch"] * job.seq_len / s for s in seconds]
        rows[key] = {
            "batch": said[key]["batch"],
            "step_ms": round(1e3 * median(seconds), 2),
            "tokens_per_s": round(median(speeds), 1),
            "first_step_s": round(said[key]["first_step_s"], 1),
            "peak_bytes": last[key]["peak_bytes"],
            "last_loss": last[key]["loss"],
        }
        for convention, flops in own["flops_per_token"].items():
            mfu = plan.mfu(flops * median(speeds), own["device"], 1, "bfloat16")
            rows[key]["mfu" if convention == "full" else f"mfu_{convention}"] = None if mfu is None else round(mfu, 4)
    rows["jaxstack"] |= {key: own[key] for key in ("remat", "kernels", "compiled_bytes")}
    ratios = {
        mode: median(
            (own["batch"] / a) / (said[mode]["batch"] / b) for a, b in zip(taken["jaxstack"], taken[mode], strict=True)
        )
        for mode in given.peers
    }
    return {
        "job": asdict(job),
        "device": own["device"],
        "command": " ".join(["python", *sys.argv]),
        "memory_share": round(share, 3),
        "rounds": given.rounds,
        "steps_a_turn": given.steps,
        "tried": own["tried"],
        "sides": rows,
        "speed_against": {mode: round(ratio, 3) for mode, ratio in ratios.items()},
    }


def known(name: str) -> list[dict[str, Any]]:
    """Returns the memory of a job's candidates by the ahead-of-time compiler."""
    path = record.RESULTS / f"{NAME}_aot.json"
    found = json.loads(path.read_text())["cases"] if path.exists() else []
    return [case for case in found if case["job"] == name]


def ahead_of_time(target: str, given: argparse.Namespace, kernels: dict[str, str]) -> None:
    """Compiles the candidates of all jobs for a chip that this machine does not have, and writes their memory."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    from jaxstack.common.hardware import CHIPS
    from jaxstack.planner import aot

    path = record.RESULTS / f"{NAME}_aot.json"
    cases = json.loads(path.read_text())["cases"] if path.exists() else []
    for name in given.jobs:
        for remat in given.remats:
            for batch in given.batches or JOBS[name].batches:
                cfg = config(JOBS[name], batch, remat, kernels)
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
                    "kernels_asked": kernels,
                    "kernels": aot.abstract_inputs(cfg, f"{target}:1x1x1")[0].kernels,
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
                if r.total < 0.35 * CHIPS[target].hbm_bytes:
                    break  # smaller batches fit
            record.record(f"{NAME}_aot", {"note": "by the ahead-of-time compiler; nothing ran", "cases": cases})


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    arguments.add_argument("--jobs", nargs="+", choices=JOBS, help="jobs to run (default: all)")
    arguments.add_argument("--peers", nargs="*", choices=["torch_compile", "torch_bf16", "torch_eager"])
    arguments.add_argument("--remats", nargs="+", choices=REMATS, default=["selective", "none"])
    arguments.add_argument("--kernels", nargs="*", default=[], metavar="OP=NAME", help="kernels.* of train.py")
    arguments.add_argument("--batches", type=int, nargs="+", help="largest first (default: those of the job)")
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--steps", type=int, default=5, help="steps of a turn")
    arguments.add_argument("--small", action="store_true", help="smoke test with tiny models")
    arguments.add_argument("--aot", metavar="CHIP", help="h100 or h200: only compile, for a chip that is not here")
    arguments.add_argument("--out", type=Path, help="folder of the result (default: results/; --small: no file)")
    arguments.add_argument("--worker", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    sys.path.insert(0, str(ROOT))
    if given.worker:
        order = json.loads(sys.stdin.readline())
        return ours(order) if given.worker == "ours" else torch_peer(order)
    kernels = dict(word.split("=") for word in given.kernels)
    jobs = SMALL if given.small else JOBS
    given.jobs = given.jobs or list(jobs)
    if given.aot:
        return ahead_of_time(given.aot, given, kernels)
    if given.peers is None:
        there = not subprocess.run(
            [sys.executable, "-c", "import torch, transformers"], capture_output=True, check=False
        ).returncode
        given.peers = ["torch_eager" if given.small else "torch_compile"] if there else []
    path = (given.out or record.RESULTS) / f"{NAME}.json"
    results = json.loads(path.read_text())["jobs"] if path.exists() else {}
    for name in given.jobs:
        found = compare(name, jobs[name], given, kernels)
        results[name] = found
        for side, row in found["sides"].items():
            print(
                f"{name:<12} {side:<14} batch {row['batch']:<3} {row['tokens_per_s']:>10,.0f} tokens/s  "
                f"MFU {_percent(row['mfu'])} full, {_percent(row['mfu_causal'])} causal",
                flush=True,
            )
        print(f"{name:<12} speed against {found['speed_against']}", flush=True)
        if given.out or not given.small:
            print(record.record(NAME, {"device": found["device"], "jobs": results}, given.out), flush=True)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


if __name__ == "__main__":
    main()
