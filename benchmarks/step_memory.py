"""Compares the planner's formula for the memory of a training step with programs that XLA compiles; nothing runs.

`python benchmarks/step_memory.py cpu` uses 8 simulated devices. `v5p` needs the extra `[tpu]` and `h100` the extra
`[cuda13]`, each in an environment of its own. Each writes results/step_memory_TARGET.json and prints a table. Names of
cases behind the target select some, which replace their rows. The cases cover each recomputation policy, dtype, family,
router, optimizer, kernel and mesh axis. `--check` compiles nothing and compares the compiled bytes of the file with the
formula of today.

`ratio` is compiled over formula of everything beside the arguments, whose bytes are exact. Its bounds are in
`jaxstack.planner.memory`; `tests/planner/test_memory.py` holds the results and some fresh programs within them.
"""

import json
import math
import os
import sys
import time
from dataclasses import replace
from typing import Any

if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    os.environ.pop("XLA_FLAGS", None)

import jax

from jaxstack.config import (
    Config,
    DataConfig,
    ExpertLayers,
    KernelsConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    PipelineConfig,
    RunConfig,
    TrainConfig,
)
from jaxstack.config.branches import BranchesConfig
from jaxstack.config.contrastive import ContrastiveConfig
from jaxstack.config.diffusion import DiffusionConfig
from jaxstack.planner.job import Job

TARGETS = {"cpu": None, "v5p": "v5p:2x2x2", "h100": "h100:1x1x8"}

LLAMA = ModelConfig(num_layers=8, d_model=1024, num_heads=8, num_kv_heads=4, d_ff=2816, vocab_size=16384)
GPT2 = replace(
    LLAMA, norm="layer", positions="learned", max_positions=1024, activation="gelu", gated=False, bias=True,
    num_kv_heads=8, d_ff=4096, tied_embeddings=True,
)  # fmt: skip
GEMMA = replace(
    LLAMA, norm_unit_offset=True, post_norm=True, windows=(256, 0), attention_softcap=50.0, logit_softcap=30.0,
    activation="gelu_tanh", tied_embeddings=True, embedding_scale=True,
)  # fmt: skip
MIXTRAL = replace(LLAMA, num_layers=4, moe=MoEConfig(num_experts=8, top_k=2, d_ff=1408))
DEEPSEEK = replace(
    LLAMA, num_layers=4,
    moe=MoEConfig(num_experts=16, top_k=4, d_ff=704, router="sigmoid", num_groups=4, top_k_groups=2, shared_experts=1),
)  # fmt: skip

_WIDE = {"num_layers": 4, "d_model": 512, "num_heads": 8, "vocab_size": 8192}
T5 = ModelConfig(**_WIDE, family="encoder_decoder", positions="relative", attention_scale=1.0, d_ff=1408)
SWITCH = replace(
    T5,
    moe=MoEConfig(num_experts=4, top_k=1, capacity_factor=1.5, layers=ExpertLayers(first=1, every=2), normalize=False),
)
BRANCHES = ModelConfig(
    **_WIDE, family="branches", branches=BranchesConfig(layers=2, rates=(1, 1)), norm="layer", activation="gelu",
    d_ff=1408, tied_embeddings=True,
)  # fmt: skip
DIT = ModelConfig(
    **_WIDE | {"vocab_size": 10}, family="diffusion", norm="layer", positions="learned", max_positions=256,
    activation="gelu_tanh", gated=False, d_ff=2048, diffusion=DiffusionConfig(image=(32, 32, 3)),
)  # fmt: skip
DIT_EXPERTS = replace(DIT, moe=MoEConfig(num_experts=4, router="timestep"))
COCA = ModelConfig(
    **_WIDE, family="contrastive", encoder_layers=4, norm="layer", positions="learned", max_positions=256,
    activation="gelu_tanh", gated=False, d_ff=2048, dropout=0.1,
    contrastive=ContrastiveConfig(image=(32, 32, 3), caption_layers=2),
)  # fmt: skip
"""Models of the families without formulas, whose memory follows from their trace."""


def case(model: ModelConfig = LLAMA, batch: int = 8, seq: int = 1024, **groups: dict[str, Any]) -> Config:
    """Returns a configuration in float32 with the kernels of the platform, unless `groups` has other values."""
    return Config(
        run=RunConfig(init_from="a folder" if model.lora.rank else None),
        model=model,
        data=DataConfig(seq_len=seq, batch_size=batch, **groups.get("data", {})),
        train=TrainConfig(**groups.get("train", {})),
        optim=OptimConfig(**groups.get("optim", {})),
        kernels=KernelsConfig(**groups.get("kernels", {})),
        mesh=MeshConfig(**{"data": 1} | groups.get("mesh", {})),
        pipeline=PipelineConfig(**groups.get("pipeline", {})),
    )


def _on_one_device() -> dict[str, Config]:
    found = {f"remat {remat}": case(train={"remat": remat}) for remat in ("none", "selective", "dots", "full")}
    for remat in ("none", "selective", "full"):
        found[f"bfloat16, remat {remat}"] = case(train={"remat": remat, "dtype": "bfloat16"})
    found |= {"gpt2": case(GPT2), "gpt2, remat none": case(GPT2, train={"remat": "none"}), "gemma2": case(GEMMA)}
    found |= {"mixtral": case(MIXTRAL), "mixtral, remat none": case(MIXTRAL, train={"remat": "none"})}
    found["mixtral, remat full"] = case(MIXTRAL, train={"remat": "full"})
    found["mixtral, capacity 1.25"] = case(replace(MIXTRAL, moe=replace(MIXTRAL.moe, capacity_factor=1.25)))
    found["deepseek"] = case(DEEPSEEK)
    adapted = replace(LLAMA, lora=LoraConfig(rank=16))
    found |= {"adapters": case(adapted), "adapters, remat none": case(adapted, train={"remat": "none"})}
    found |= {f"{name}, few tokens": case(batch=1, seq=256, optim={"name": name}) for name in ("adamw", "muon")}
    found |= {name: case(batch=2, optim={"name": name}) for name in ("muon", "adafactor", "lion", "sgd")}
    wide = replace(LLAMA, vocab_size=131072, num_layers=2)
    for loss in ("xla", "chunked"):
        found[f"vocabulary of 131,072, {loss} loss"] = case(wide, kernels={"cross_entropy": loss})
    found["xla attention"] = case(kernels={"attention": "xla"})
    found["xla attention, remat none"] = case(kernels={"attention": "xla"}, train={"remat": "none"})
    found["one sequence of 16,384"] = case(batch=1, seq=16384)
    found["32 layers"] = case(replace(LLAMA, num_layers=32))
    found["2 layers of 2,048"] = case(replace(LLAMA, num_layers=2, d_model=2048, num_heads=16, d_ff=5632))
    found["grad_accum 4"] = case(batch=32, train={"grad_accum": 4})
    found["packing"] = case(data={"packing": True, "source": "chat", "path": "chat.jsonl"})
    found["dropout"] = case(replace(LLAMA, dropout=0.1))
    return found


def _on_meshes() -> dict[str, Config]:
    found = {"data 8": case(batch=16, mesh={"data": 8}), "fsdp 8": case(batch=16, mesh={"fsdp": 8})}
    found |= {f"fsdp 8, remat {r}": case(batch=16, mesh={"fsdp": 8}, train={"remat": r}) for r in ("none", "full")}
    found["fsdp 2, tensor 4"] = case(batch=16, mesh={"fsdp": 2, "tensor": 4})
    found["fsdp 2, context 4"] = case(batch=16, mesh={"fsdp": 2, "context": 4})
    found["expert 8"] = case(MIXTRAL, 32, 512, mesh={"expert": 8})
    pipes = {"pipe": 4, "fsdp": 2}
    for schedule in ("gpipe", "1f1b"):
        how = {"schedule": schedule, "microbatches": 8}
        found[f"pipe 4, fsdp 2, {schedule}"] = case(batch=16, mesh=pipes, train={"remat": "full"}, pipeline=how)
    found["pipe 4, fsdp 2, selective"] = case(batch=16, mesh=pipes, pipeline={"microbatches": 8})
    return found


def _of_families() -> dict[str, Config]:
    found: dict[str, Config] = {}

    def add(
        name: str, model: ModelConfig, remat: str = "selective", accum: int = 1, micro: int = 0, **mesh: int
    ) -> None:
        sources = {"encoder_decoder": "pairs", "diffusion": "digits", "contrastive": "digits"}
        data: dict[str, Any] = {"source": sources.get(model.family, "stdlib")}
        if model.family in ("encoder_decoder", "contrastive"):
            data |= {"target_len": 256, "path": "pairs.jsonl" if model.family == "encoder_decoder" else None}
        how: dict[str, Any] = {"context_method": "all_gather"} if "context" in mesh else {}
        pipeline = {"schedule": "gpipe" if "gpipe" in name else "1f1b", "microbatches": micro} if micro else {}
        rows = (64 if model.family == "contrastive" else 32) if mesh else 16
        name = ", ".join((name, *(f"{axis} {size}" for axis, size in mesh.items()), f"remat {remat}"))
        train = {"remat": remat, "grad_accum": accum}
        found[name + (f", accum {accum}" if accum > 1 else "")] = case(
            model, rows, 256, data=data, train=train, mesh=mesh | how, pipeline=pipeline
        )

    models = {"t5": T5, "branches": BRANCHES, "dit": DIT, "coca": COCA}
    for name, model in models.items():
        add(name, model, "none")
        add(name, model)
        add(name, model, fsdp=2, context=4)
    for name in ("t5", "coca"):
        add(name, models[name], "none", fsdp=2, tensor=4)
    for name in ("t5", "branches", "coca"):
        add(name, models[name], "full", 2, data=2, fsdp=2, tensor=2)
    for name in ("t5", "branches", "dit"):  # two towers refuse pipelines
        add(name, models[name], "full", micro=4, pipe=2, fsdp=4)
    for name in ("branches", "dit"):
        add(f"{name} gpipe", models[name], micro=4, pipe=2, tensor=2)
    add("branches", BRANCHES, fsdp=8)
    add("coca", COCA, "full", fsdp=8)
    add("switch", SWITCH, data=2, expert=4)
    add("dit experts", DIT_EXPERTS, fsdp=2, expert=4)
    return found


CASES = _on_one_device() | _on_meshes() | _of_families()


def measure(cfg: Config, target: str | None) -> dict[str, Any]:
    """Compiles the step of a case, and returns its bytes on a device beside those of the formula."""
    from jaxstack.families.context import make_context
    from jaxstack.planner import aot, estimate, memory
    from jaxstack.sharding import make_mesh
    from jaxstack.training import assemble

    devices = jax.devices() if target is None else aot.devices(target)
    devices = devices[: math.prod(cfg.mesh.sizes.values())]
    ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.microbatch_size, devices))
    state, batch = estimate.abstract_inputs(Job(cfg, ctx))
    jitted: Any = assemble.jit_train_step(cfg, ctx, state)
    # Buffers are assigned before LLVM runs, whose optimizations only take time here.
    options = {"xla_backend_optimization_level": 0} if target is None else None
    found = jitted.lower(state, batch).compile(compiler_options=options).memory_analysis()
    return compare(cfg, memory.platform_of(devices[0]), found.argument_size_in_bytes, found.temp_size_in_bytes)


def compare(cfg: Config, platform: str, arguments: int, temporary: int) -> dict[str, Any]:
    """Returns the compiled bytes of a case beside those of the formula."""
    from jaxstack.planner import memory

    need = memory.need(cfg, math.prod(cfg.mesh.sizes.values()), platform)
    return {
        "arguments": arguments,
        "temporary": temporary,
        "formula": {name: round(value) for name, value in need.parts.items()},
        "argument_ratio": round(arguments / need.state, 3),
        "ratio": round(temporary / (need.formula - need.state), 3),
        "total_ratio": round((arguments + temporary) / need.formula, 3),
    }


if __name__ == "__main__":
    from record import RESULTS, record

    chip, words = sys.argv[1], [word for word in sys.argv[2:] if word != "--check"]
    names, check = words or list(CASES), "--check" in sys.argv
    earlier = RESULTS / f"step_memory_{chip}.json"
    rows: dict[str, Any] = json.loads(earlier.read_text())["cases"] if sys.argv[2:] and earlier.exists() else {}
    print("| case | compiled, MiB | formula, MiB | all | temporaries | s |\n|---|---|---|---|---|---|")
    for name in names:
        begin = time.perf_counter()
        if check:
            rows[name] = compare(CASES[name], chip, rows[name]["arguments"], rows[name]["temporary"])
        else:
            rows[name] = measure(CASES[name], TARGETS[chip])
        row = rows[name]
        total = row["arguments"] + row["temporary"]
        sizes = f"{total / 2**20:.0f} | {sum(row['formula'].values()) / 2**20:.0f}"
        seconds = time.perf_counter() - begin
        print(f"| {name} | {sizes} | {row['total_ratio']:.2f} | {row['ratio']:.2f} | {seconds:.0f} |", flush=True)
        jax.clear_caches()
        record(f"step_memory_{chip}", {"target": TARGETS[chip], "cases": rows})  # after every case: it takes long
