"""Draws the figures of docs/benchmarks.md and docs/kernels.md from results/: `python benchmarks/plots.py`

If a result does not exist, its figure is skipped and named. The roofline is computed and needs no device.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import record

from jaxstack.common import drawing

ROOT = Path(__file__).parent.parent
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
OURS = drawing.BLUE
THEIRS = drawing.RED
REST = (drawing.GRAY, drawing.ORANGE, drawing.GREEN, drawing.PURPLE)
ROOFLINE = ("llama3_8b", "h100", "--mesh.fsdp=8", "--mesh.data=1", "--train.dtype=bfloat16")


def load(name: str) -> dict[str, Any] | None:
    """Reads a result; `None` means that it does not exist."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


@contextmanager
def chart(name: str, width: float, height: float, columns: int = 1) -> Iterator[list[Any]]:
    """Yields the axes of a picture beside each other, and writes it to docs/."""
    with drawing.picture(DOCS / f"{name}.png", width, height) as figure:
        yield list(figure.subplots(1, columns, squeeze=False)[0])
    print(f"docs/{name}.png")


def groups(ax: Any, names: list[str], series: dict[str, list[float]], form: str) -> None:
    """Draws bars side by side with their values above them; 0 means that there is no value."""
    wide = 0.8 / len(series)
    for i, (label, values) in enumerate(series.items()):
        color = OURS if label == "jaxstack" else (THEIRS, *REST)[i % 5]
        places = [at + (i - (len(series) - 1) / 2) * wide for at in range(len(names))]
        bars = ax.bar(places, values, wide * 0.94, color=color, label=label)
        ax.bar_label(bars, [form.format(v) if v else "" for v in values], fontsize=8)
    ax.set_xticks(range(len(names)), names)
    ax.legend()


def train_cpu(result: dict[str, Any]) -> None:
    """Draws the time per step of all sides on the CPU."""
    with chart("benchmark_train_cpu", 9, 3.2, len(result["jobs"])) as axes:
        for ax, (name, job) in zip(axes, result["jobs"].items(), strict=True):
            sides = job["step_ms"]
            bars = ax.bar(list(sides), list(sides.values()), color=[OURS, THEIRS, REST[0]])
            ax.bar_label(bars, [f"{v:,.0f}" for v in sides.values()], fontsize=8)
            ax.set_title(f"{name}: {job['speed_against_better_torch']:.2f} x the better torch", fontsize=10)
            ax.tick_params(axis="x", labelsize=8)
        axes[0].set_ylabel("ms per step, less is better")


def kernels(result: dict[str, Any], name: str) -> None:
    """Draws the time of each implementation, forward and backward, over the fastest of its case."""
    with chart(name, 9, 0.34 * sum(len(c["rows"]) for c in result["cases"]) / 2 + 1.6) as (ax,):
        labels, values, colors = [], [], []
        for case in result["cases"]:
            rows = [row for row in case["rows"] if row["pass"] == "forward and backward"]
            best = min((row["ms"] for row in rows), default=1)
            for row in rows:
                labels.append(f"{case['op']}, {case['case'].split(', the busiest')[0]}: {row['implementation']}")
                values.append(row["ms"] / best)
                colors.append(OURS if row["ms"] == best else REST[0])
        bars = ax.barh(range(len(values)), values, color=colors)
        ax.bar_label(bars, [f"{v:.2f}" for v in values], fontsize=8, padding=2)
        ax.set_yticks(range(len(labels)), labels, fontsize=8)
        ax.invert_yaxis()
        ax.set_xlabel(f"time over the fastest, forward and backward, {result['device']}, {result['dtype']}")


def train_gpu(results: list[dict[str, Any]], name: str) -> None:
    """Draws tokens per second and MFU of each side alone on the GPU, by job."""
    with chart(name, 10, 3.6, 2) as (speed, mfu):
        jobs = [result["name"] for result in results]
        sides = list(dict.fromkeys(side for result in results for side in result["sides"]))

        def values(key: str, scale: float) -> dict[str, list[float]]:
            return {
                side: [scale * (result["sides"].get(side, {}).get(key) or 0) for result in results] for side in sides
            }

        groups(speed, jobs, values("tokens_per_s", 1e-3), "{:.1f}")
        speed.set_ylabel(f"thousand tokens per second, one {results[0]['device']}")
        groups(mfu, jobs, values("mfu", 100), "{:.1f}")
        mfu.set_ylabel("MFU, %, full attention counted")
        for ax in (speed, mfu):
            ax.tick_params(axis="x", labelsize=7)


def train_gpu_aot(result: dict[str, Any]) -> None:
    """Draws the memory of the candidates on the GPU."""
    cases = sorted(result["cases"], key=lambda c: (c["job"], c["remat"], c["batch"], c["total"]))
    with chart("benchmark_memory", 9, 0.32 * len(cases) + 1.2) as (ax,):
        gib = 2**30
        for i, case in enumerate(cases):
            ax.barh(i, case["arguments"] / gib, color=OURS, label="weights, optimizer, batch" if i == 0 else None)
            ax.barh(i, case["temporary"] / gib, left=case["arguments"] / gib, color=REST[1],
                    label="activations, gradients, work" if i == 0 else None)  # fmt: skip
        ax.axvline(80, color=THEIRS, linewidth=1.2, label="memory of an H100")
        ax.axvline(141e9 / gib, color=REST[2], linewidth=1.2, label="memory of an H200")
        names = [
            f"{c['job']}, {c['remat']}, batch {c['batch']} ({c['kernels']['attention']} attention"
            + (f", {c['kernels']['moe']} experts)" if "moe" in c["job"] else ")")
            for c in cases
        ]
        ax.set_yticks(range(len(cases)), names, fontsize=8)
        ax.invert_yaxis()
        ax.set_xlabel("GiB on one device by the ahead-of-time compiler; nothing ran")
        ax.figure.legend(loc="outside upper center", ncols=4)


def quant(result: dict[str, Any]) -> None:
    """Draws training losses as thin lines and held-out losses as points."""
    with chart("benchmark_quant", 8, 3.2) as (ax,):
        for (kind, curve), color in zip(result["curves"].items(), (REST[0], OURS, THEIRS), strict=False):
            label = "bfloat16" if kind == "none" else kind
            ax.plot(*zip(*curve["training"], strict=True), color=color, linewidth=1, label=label)
            ax.plot(*zip(*curve["held_out"], strict=True), "o", color=color, markersize=5)
        ax.set_ylim(1.2, 3.2)
        ax.set_xlabel("step")
        ax.set_ylabel("nats per token; points: held out")
        ax.legend()


def roofline() -> None:
    """Draws the roofline of Llama 3 8B on an H100."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.path.insert(0, str(ROOT))
    from jaxstack.common.hardware import CHIPS
    from jaxstack.config import resolve
    from jaxstack.config.reading import parse
    from jaxstack.planner import memory, plot
    from jaxstack.planner import roofline as roof
    from jaxstack.planner.job import Job

    name, chip, *flags = ROOFLINE
    cfg = parse.parse_config([f"--config={name}", *flags])
    cfg = resolve(cfg, cfg.model.vocab)
    job = Job(cfg, memory.context(cfg))
    plot.draw(roof.make_roofline(job, chip, roof.ChipLimits(CHIPS[chip])), DOCS / "roofline.png")
    print("docs/roofline.png")


def plan() -> None:
    """Draws the memory of Llama 3 8B on two hosts for each recomputation policy, and a step of GPT-3."""
    from jaxstack.cli.parser import execute

    memory = ["--target=h100:2x8", "--config=llama3_8b", "--mesh.data=1", "--mesh.fsdp=16", "--data.batch_size=16"]
    step = ["--target=a100:128x8", "--config=gpt3", "--mesh.data=8", "--mesh.pipe=16", "--mesh.tensor=8"]
    for name, flags in (("memory", memory), ("time", step)):
        execute(["plan", name, *flags, f"--plot={DOCS}/plan_{name}.png"])


def main() -> None:
    drawn = {"train_cpu": train_cpu, "train_gpu_aot": train_gpu_aot, "quant": quant}
    for name, draw in drawn.items():
        if (result := load(name)) is None:
            print(f"results/{name}.json does not exist; its figure is skipped")
        else:
            draw(result)
    for path in sorted(RESULTS.glob("kernels_*.json")):
        kernels(json.loads(path.read_text()), f"benchmark_{path.stem}")
    alone: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(RESULTS.glob("train_gpu_*_alone.json")):
        result = json.loads(path.read_text())
        alone.setdefault(result["device"], []).append(result)
    for device, results in alone.items():
        train_gpu(results, f"benchmark_{record.name_of('train_gpu', device)}")
    if not alone:
        print("results/train_gpu_*_alone.json do not exist; their figure is skipped")
    roofline()
    plan()


if __name__ == "__main__":
    main()
