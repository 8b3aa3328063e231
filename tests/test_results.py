"""Figures of docs/results.md are those of the committed results: a sample of each section, read from its file."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in PAGE.splitlines() if line.startswith("| ")]
FIGURES = {cells[0]: cells[1] for cells in ROWS if len(cells) == 3}


def result(name: str):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def listed(values, form: str = "{:.3f}", unit: str = "") -> str:
    """Returns values as the page writes them."""
    return ", ".join(form.format(value) for value in values) + unit


def quality() -> dict[str, str]:
    quant = result("quantize")["rows"]
    lost = {row["method"]: row["lost"] for row in quant if (row["bits"], row["group"]) == (4, 64)}
    above = {row["method"] for row in quant}
    assert above >= {"rtn", "gptq", "awq"}
    runs = result("reinforcement")
    after = {wrong: [run["pass@1"] for run in runs["runs"] if run["shuffled"] is wrong] for wrong in (False, True)}
    distill = result("distill")["cases"]
    encoders = result("encoder_baselines")
    langs = [case for case in result("translate")["cases"] if case["kind"] == "language experts"]
    dense = [case for case in result("translate")["cases"] if case["kind"] == "dense"]
    digits = {case["loss"]: case["mean_recall"] for case in result("contrastive")["cases"]}
    return {
        "the quickstart with weights of 4 bits in groups of 64, by GPTQ: bits per byte lost": f"{lost['gptq']:.2%}",
        "the same by AWQ": f"{lost['awq']:.2%}",
        "the same by rounding to the nearest": f"{lost['rtn']:.2%}",
        "GRPO on sorting digits, pass@1 on held-out prompts before": f"{runs['supervised']['pass@1']:.1%}",
        "pass@1 after GRPO, three seeds": listed(after[False], "{:.1%}"),
        "pass@1 after GRPO with shuffled rewards, three seeds": listed(after[True], "{:.1%}"),
        "the same without its teacher": listed([c["scratch"] for c in distill], unit=" held-out bits per byte"),
        "masked bytes of docstrings, held out: an encoder": f"{encoders['encoder']['loss']:.3f} nats",
        "the same by a decoder with the same layers": f"{encoders['decoder']['loss']:.3f} nats",
        "experts by language, chrF": listed([case["chrf_mean"] for case in langs], "{:.1f}"),
        "the dense model, chrF": listed([case["chrf_mean"] for case in dense], "{:.1f}"),
        "the dense model with equal active parameters, held out": listed(
            [case["held_out_loss"] for case in dense], unit=" nats per byte"
        ),
        "the same with the softmax loss": f"{digits['softmax']:.3f}",
        "seeds on which the experts are better": f"{result('moe')['experts_better']} of 3",
    }


def speed() -> dict[str, str]:
    jobs = result("train_cpu")["jobs"].values()
    texts = result("generate_cpu")["cases"]
    by_batch = {n: [case["speed_against_better_transformers"] for case in texts if case["batch"] == n] for n in (1, 8)}
    drafts = {
        heat: [case["ratio"] for case in result("speculative")["cases"] if case["temperature"] == heat]
        for heat in (0.0, 0.8)
    }
    served = result("serve")
    debug = result("debug_time")["commands"]
    assert (served["lost"], served["wrong"]) == (0, 0)
    return {
        "training step of three jobs, compared with torch (the better of eager and `torch.compile`): torch is still "
        "faster": listed([job["speed_against_better_torch"] for job in jobs], "{:.2f}x"),
        "the same at batch 8": listed(by_batch[8], "{:.2f}x"),
        "the same at temperature 0.8": listed(drafts[0.8][-3:], "{:.2f}x"),
        "32 clients of `jaxstack serve` for two minutes on a busy machine: answers, of which none was lost or mixed "
        "up": f"{served['answers']:,}",
        "the same for step 3": f"{debug['debug step 3']['seconds']:.0f} s",
    }


def planner() -> dict[str, str]:
    steps = result("published_steps")
    unseen = steps["left_one_project_out"]
    memory = result("predicted_memory")["summary"]
    meshes = [row["ratio"] for row in result("mesh_search")["report"].values()]
    return {
        f"step times of `plan time`, compared with {unseen['all']['rows']} published steps of "
        f"{len(unseen['by_project'])} projects; each project is predicted by a fit to the others: median error": (
            f"{unseen['all']['median']:.0%}"
        ),
        "90th percentile of these errors": f"{unseen['all']['90%']:.0%}",
        "published steps within the printed interval": f"{unseen['covered_by_interval']:.0%}",
        "mean error on the eight steps of Korthikanti et al.": f"{steps['korthikanti']['mean']:.0%}",
        "predicted memory of a device, 36 programs of three models compiled for 8 x H100 and 8 x TPU v5p: within 10%": (
            f"{memory['all']['within_10_percent']} of {memory['all']['cases']}"
        ),
        "rank correlation of predicted and compiled memory, H100 and TPU v5p": listed(
            [memory[chip]["rank_correlation"] for chip in ("h100", "v5p")]
        ),
        "`--mesh=auto` on 2, 4 and 8 devices of a CPU, four models and 287 measured programs: time of its choice "
        "divided by the time of the fastest": f"{min(meshes):.2f} to {max(meshes):.2f}",
    }


def mutants() -> dict[str, str]:
    summary = result("mutations")["summary"]
    run = summary["mutants"]
    return {
        "mutants of the code on which the tests were run, of all mutants": f"{run:,} of {run + summary['not_run']:,}",
        "mutants that the tests kill, equivalent ones left out": f"{summary['killed_fraction']:.1%}",
    }


def test_the_memory_of_kernels_is_what_their_compilers_report():
    """These rows follow one another, and some have the same name."""
    case = result("kernel_memory")["cases"]["h100:1x1x1"]
    found = [
        case[operation][name]["temporary_bytes"] / 2**20
        for operation, names in (
            ("cross_entropy", ("pallas", "chunked", "xla")),
            ("attention", ("pallas", "cudnn", "chunked", "xla")),
        )
        for name in names
    ]
    shown = [cells[1] for cells in ROWS if cells[2:] == ["`benchmarks/results/kernel_memory.json`"]]
    assert shown == [f"{mib:,.0f} MiB" if mib > 10 else f"{mib:.1f} MiB" for mib in found]


@pytest.mark.parametrize("section", [quality, speed, planner, mutants], ids=lambda section: section.__name__)
def test_the_page_has_the_figures_of_the_committed_results(section):
    for what, figure in section().items():
        assert FIGURES[what] == figure, what


def test_every_row_has_a_source_that_exists():
    """A row names a file of results, a test, a script or a page; all files that it names exist."""
    assert len(FIGURES) > 120
    for cells in ROWS:
        if len(cells) != 3 or cells[0] in ("what", "---"):
            continue
        files = re.findall(r"(?:\.ci|benchmarks|configs|tests)/[\w/.]+\w", cells[2])
        assert files or cells[2] in ("the same command", "`pytest`"), cells
        for file in files:
            assert (ROOT / file).exists(), file


def test_a_row_has_one_quantity():
    """Values of a row are of one kind: numbers with the same unit, in one list."""
    for what, figure in FIGURES.items():
        units = {re.sub(r"[-\d.,e]", "", part).strip() for part in figure.split(", ") if re.match(r"\d", part)}
        assert len(units - {""}) <= 1, (what, figure)
        assert ";" not in figure, (what, figure)
