"""What a device sends in a step, and what it holds, by formula: `python benchmarks/traffic.py`, nothing is compiled.

One job on eight devices, split along one axis of the mesh after the other. The formulas are `jaxstack.aot.formula`'s,
which `tests/test_collectives.py` and `tests/aot` hold against compiled programs. The result is
`benchmarks/results/traffic.json`, and the tables of docs/parallelism/ and docs/pipelines.md are written anew;
`tests/test_docs.py` compares them.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

from record import record

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

DENSE, SPARSE = "llama3_8b", "qwen3_30b_a3b"
CASES: dict[str, tuple[str, list[str]]] = {  # by their mesh, as the pages name it
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
    "../pipelines": ["pipe=8", "pipe=2 fsdp=4", "fsdp=8"],
}
"""Which cases each page's table has."""


def case(config: str, flags: list[str]) -> dict[str, Any]:
    from jaxstack import aot, cli, sharding, step
    from jaxstack.aot import hlo
    from jaxstack.config import resolve
    from jaxstack.context import Context

    file = ROOT / "configs" / f"{config}.yaml"
    flags = ["--mesh.data=1", "--data.batch_size=8", "--data.packing=false", *flags]
    cfg = cli.parse_config([f"--config={file}", *flags], file)
    assert cfg.model.vocab_size is not None
    cfg = resolve(cfg, cfg.model.vocab_size)
    ctx = Context.create(cfg, sharding.make_mesh(cfg.mesh, cfg.data.batch_size))
    state = step.abstract_state(cfg, ctx)
    parts = aot.formula.memory(cfg, ctx, state, {})
    moved = hlo.sent(aot.formula.traffic(cfg, ctx))
    return {
        "config": config,
        "flags": flags,
        "tokens": cfg.data.batch_size * cfg.data.seq_len,
        "sent_bytes": [{"axes": axes, "kind": kind, "bytes": round(n)} for (axes, kind), n in sorted(moved.items())],
        "memory_bytes": {part: round(value) for part, value in parts.items()},
    }


def rows(cases: dict[str, Any], names: list[str]) -> str:
    """A table of a page."""
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
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}  # before JAX is imported
    found = {name: case(*words) for name, words in CASES.items()}
    path = record("traffic", {"cases": found})
    print(path)
    for page, names in SHOWN.items():
        file = (ROOT / "docs" / "parallelism" / f"{page}.md").resolve()
        table = rows(found, names)
        text, count = re.subn(r"\| mesh \| sends.*?(?=\n\n)", lambda _, t=table: t, file.read_text(), flags=re.S)
        assert count == 1, f"{file} has {count} tables of traffic"
        file.write_text(text)
        print(f"\n{file}\n{table}")


if __name__ == "__main__":
    main()
