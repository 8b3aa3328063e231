"""Computes the bytes that a device sends in a step, and its memory, by formula: `python benchmarks/traffic.py`

The first part shards one job on eight devices over one mesh axis after another. The formulas are those of
`jaxstack.planner.estimate`; `tests/sharding/test_collectives.py` and `tests/aot` compare them with compiled programs.
The second part is a model on 16 stages: the bytes that they exchange for each microbatch, beside the time that a chip
computes for it. Nothing is compiled. Writes `benchmarks/results/traffic.json` and the tables of docs/parallelism/ and
docs/pipeline_results.md, which `tests/test_docs.py` compares.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}  # before JAX is imported

from record import record

from jaxstack.planner.job import Job

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

DENSE, SPARSE = "llama3_8b", "qwen3_30b_a3b"
CASES: dict[str, tuple[str, list[str]]] = {  # the key is the mesh as the pages name it
    "data=8": (DENSE, ["--mesh.data=8"]),
    "fsdp=8": (DENSE, ["--mesh.fsdp=8"]),
    "data=2 fsdp=4": (DENSE, ["--mesh.data=2", "--mesh.fsdp=4"]),
    "tensor=8": (DENSE, ["--mesh.tensor=8"]),
    "tensor=8 -sp": (DENSE, ["--mesh.tensor=8", "--mesh.sequence_parallel=false"]),
    "fsdp=2 tensor=4": (DENSE, ["--mesh.fsdp=2", "--mesh.tensor=4"]),
    "context=8": (DENSE, ["--mesh.context=8"]),
    "context=8 all_gather": (DENSE, ["--mesh.context=8", "--mesh.context_method=all_gather"]),
    "fsdp=2 context=4": (DENSE, ["--mesh.fsdp=2", "--mesh.context=4"]),
    "pipe=8": (DENSE, ["--mesh.pipe=8"]),
    "pipe=2 fsdp=4": (DENSE, ["--mesh.pipe=2", "--mesh.fsdp=4"]),
    "fsdp=8, experts": (SPARSE, ["--mesh.fsdp=8"]),
    "expert=8": (SPARSE, ["--mesh.expert=8"]),
    "expert=8, capacity 1.25": (SPARSE, ["--mesh.expert=8", "--model.moe.capacity_factor=1.25"]),
    "fsdp=2 expert=4": (SPARSE, ["--mesh.fsdp=2", "--mesh.expert=4"]),
}
SHOWN = {
    "data": ["data=8"],
    "fsdp": ["fsdp=8", "data=2 fsdp=4", "data=8"],
    "tensor": ["tensor=8", "tensor=8 -sp", "fsdp=2 tensor=4", "fsdp=8"],
    "context": ["context=8", "context=8 all_gather", "fsdp=2 context=4", "fsdp=8"],
    "expert": ["expert=8", "expert=8, capacity 1.25", "fsdp=2 expert=4", "fsdp=8, experts"],
    "../pipeline_results": ["pipe=8", "pipe=2 fsdp=4", "fsdp=8"],
}
"""The cases in the table of each page."""

DEEP = [  # Llama 3 70B
    *("--model.num_layers=80", "--model.d_model=8192", "--model.num_heads=64", "--model.d_ff=28672"),
    *("--mesh.pipe=16", "--mesh.tensor=8", "--data.batch_size=64", "--pipeline.microbatches=64", "--train.remat=full"),
]
LINKS = [  # a chip, the name of a link, and the bytes/s that a device sends to the neighbouring stages
    ("v5p", "one of three axes", 600e9 / 3),
    ("h100", "InfiniBand", 400e9 / 8),  # NVIDIA DGX H100 data sheet: a port of 400 Gb/s for each GPU
]
STAGES_HEAD = (
    "| tokens | chip, link | computes, ms | neighbours, ms | head, ms | embedding, ms | tied, ms | head + embedding |"
)


def case(config: str, flags: list[str]) -> dict[str, Any]:
    """Returns the bytes that a device sends and stores for one mesh."""
    from jaxstack import sharding
    from jaxstack.config import resolve
    from jaxstack.config.reading import parse
    from jaxstack.families.context import make_context
    from jaxstack.planner import estimate, hlo
    from jaxstack.training.state import Recipe, abstract_state

    flags = ["--mesh.data=1", "--data.batch_size=8", "--data.packing=false", *flags]
    cfg = parse.parse_config([f"--config={config}", *flags])
    assert cfg.model.vocab_size is not None
    cfg = resolve(cfg, cfg.model.vocab_size)
    ctx = make_context(cfg, sharding.make_mesh(cfg.mesh, cfg.data.batch_size))
    state = abstract_state(Recipe.of(cfg), ctx)
    parts = estimate.memory(Job(cfg, ctx), state, {})
    moved = hlo.sent(estimate.traffic(Job(cfg, ctx)))
    return {
        "config": config,
        "flags": flags,
        "tokens": cfg.data.batch_size * cfg.data.seq_len,
        "sent_bytes": [{"axes": axes, "kind": kind, "bytes": round(n)} for (axes, kind), n in sorted(moved.items())],
        "memory_bytes": {part: round(value) for part, value in parts.items()},
    }


def deep(length: int, tied: bool) -> tuple[Any, dict[str, float]]:
    """Returns the operations of a model on 16 stages, and the bytes that a device sends over `pipe` per microbatch."""
    from jaxstack.config import resolve
    from jaxstack.config.reading import parse
    from jaxstack.planner import estimate, memory, roofline_step

    flags = [f"--config={DENSE}", *DEEP, "--mesh.data=1", "--data.packing=false", f"--data.seq_len={length}"]
    cfg = parse.parse_config([*flags, f"--model.tied_embeddings={str(tied).lower()}"])
    assert cfg.model.vocab_size is not None
    assert cfg.pipeline.microbatches is not None
    cfg = resolve(cfg, cfg.model.vocab_size)
    ctx = memory.context(cfg, None if cfg.mesh.open_axis is None else 16 * 8)
    sent = {"neighbours": 0.0, "head": 0.0, "embedding": 0.0}
    for c in estimate.traffic(Job(cfg, ctx)):
        if "pipe" in c.axes:
            what = next((name for name in sent if name in c.where), "head")  # else that of cross-entropy
            sent[what] += c.sent / cfg.pipeline.microbatches
    return roofline_step.operations(Job(cfg, ctx)), sent


def stages(length: int) -> list[dict[str, Any]]:
    """Returns the bytes that 16 stages exchange for each microbatch of one sequence, and the time that they compute."""
    from jaxstack.common.hardware import CHIPS
    from jaxstack.planner import roofline

    operations, sent = deep(length, tied=False)
    _, sent_if_tied = deep(length, tied=True)
    microbatches = next(int(flag.split("=")[1]) for flag in DEEP if "microbatches" in flag)
    found = []
    for chip, link, bandwidth in LINKS:
        limits = roofline.ChipLimits(CHIPS[chip])
        work = [op for op in operations if op.of_layer or op.name.startswith(("head", "cross-entropy"))]
        found.append(
            {
                "tokens": length,
                "chip": chip,
                "link": link,
                "link_bytes_per_s": bandwidth,
                "computing_s": sum(op.times * limits.seconds(op)[0] for op in work) / microbatches,
                "sent_bytes": sent | {"embedding, tied": sent_if_tied["embedding"]},
            }
        )
    return found


def stages_rows(found: list[dict[str, Any]]) -> str:
    """Returns the table of docs/pipeline_results.md."""
    lines = [STAGES_HEAD, "|---|---|---|---|---|---|---|---|"]
    for row in found:
        ms = {name: 1e3 * size / row["link_bytes_per_s"] for name, size in row["sent_bytes"].items()}
        computing = 1e3 * row["computing_s"]
        columns = [computing, ms["neighbours"], ms["head"], ms["embedding"], ms["embedding, tied"]]
        share = (ms["head"] + ms["embedding"]) / computing
        link = f"{row['chip']}, {row['link']}, {row['link_bytes_per_s'] / 1e9:.0f} GB/s"
        lines.append(f"| {row['tokens']:,} | {link} | {' | '.join(f'{n:.2f}' for n in columns)} | {share:.1%} |")
    return "\n".join(lines)


def rows(cases: dict[str, Any], names: list[str]) -> str:
    """Returns the table of a page."""
    lines = ["| mesh | sends, GB a step | state, GB | in all, GB |", "|---|---|---|---|"]
    for name in names:
        found = cases[name]
        sent = [(f"{x['axes']} {x['kind']}", x["bytes"] / 1e9) for x in found["sent_bytes"]]
        parts = "; ".join(f"{what} {size:.1f}" for what, size in sent if size >= 0.05)
        held = found["memory_bytes"]
        state = held["parameters, float32"] + held["optimizer state"]
        lines.append(f"| `{name}` | {parts} | {state / 1e9:.1f} | {sum(held.values()) / 1e9:.1f} |")
    return "\n".join(lines)


def main() -> None:
    found = {name: case(*words) for name, words in CASES.items()}
    sixteen = [row for length in (4096, 8192) for row in stages(length)]
    path = record("traffic", {"cases": found, "stages": {"config": DENSE, "flags": DEEP, "cases": sixteen}})
    print(path)
    file = ROOT / "docs" / "pipeline_results.md"
    head = re.escape(STAGES_HEAD)
    text, count = re.subn(rf"{head}.*?(?=\n\n)", lambda _: stages_rows(sixteen), file.read_text(), flags=re.S)
    assert count == 1, f"{file} has {count} tables of 16 stages"
    file.write_text(text)
    print(f"\n{file}\n{stages_rows(sixteen)}")
    for page, names in SHOWN.items():
        file = (ROOT / "docs" / "parallelism" / f"{page}.md").resolve()
        table = rows(found, names)
        text, count = re.subn(r"\| mesh \| sends.*?(?=\n\n)", lambda _, t=table: t, file.read_text(), flags=re.S)
        assert count == 1, f"{file} has {count} tables of traffic"
        file.write_text(text)
        print(f"\n{file}\n{table}")


if __name__ == "__main__":
    main()
