"""What the planner says of references and rollouts: bytes and seconds by hand, and as real arrays have them."""

import re
from pathlib import Path

import jax
import pytest

from jaxstack import families
from jaxstack.cli.parser import execute
from jaxstack.cli.plan import with_vocabulary
from jaxstack.common.hardware import CHIPS
from jaxstack.config.reading.parse import parse_config
from jaxstack.models import params
from jaxstack.models.params import cast_matrices
from jaxstack.planner import beside, estimate, figures, memory
from jaxstack.planner.job import Job
from jaxstack.planner.step_time import step_time

LAYERS, WIDTH, TOKENS = 2, 256, 512
MODEL = [
    f"--model.num_layers={LAYERS}", f"--model.d_model={WIDTH}", "--model.num_heads=4", "--model.d_ff=512",
    f"--data.seq_len={TOKENS}", "--data.batch_size=32", "--train.dtype=bfloat16", "--run.init_from=runs/x",
    "--mesh.data=1", "--mesh.fsdp=4", "--data.path=x.jsonl", "--model.vocab_size=512",
]  # fmt: skip
PAIRS = [*MODEL, "--data.source=preferences"]
PROMPTS = [*MODEL, "--data.source=prompts", "--rl.rewards=[x.py:f]", "--rl.tokens=128"]
PAGE = (Path(__file__).parents[2] / "docs/chat_model.md").read_text(encoding="utf-8")
H100 = figures.limits_of("h100:4")[2]


def job(*flags):
    cfg = with_vocabulary(parse_config(flags))
    return Job(cfg, memory.context(cfg, 4, "gpu"))


def parts(one):
    found = figures.memory_figures(one)
    for figure in found:
        formula = re.sub(r"(?<![\w.])[A-Za-z][\w.,']*", "", figure.explanation.replace(" x ", " * "))
        assert eval(formula) == pytest.approx(figure.value), figure.name
    return {figure.name: figure.value for figure in found}


def arrays(model):
    """Returns the bytes of matrices in bfloat16, and of vectors in float32, of real arrays."""
    values = params.init(jax.random.key(0), families.spec(model))
    leaves = jax.tree.leaves(cast_matrices(families.spec(model), values, jax.numpy.bfloat16))
    return [sum(leaf.nbytes for leaf in leaves if leaf.dtype == dtype) for dtype in ("bfloat16", "float32")]


def test_a_reference_needs_what_its_arrays_take():
    one = job(*PAIRS)
    matrices, vectors = arrays(one.cfg.model)
    assert parts(one)[estimate.FROZEN] == matrices / 4 + vectors  # the mesh shards matrices alone
    need = memory.need(one.cfg, 4, "gpu")
    assert need.state == parts(one)[estimate.FROZEN] + sum(parts(one)[name] for name in estimate.EXACT)


@pytest.mark.parametrize(
    ("flags", "stored"),
    [
        ([*PAIRS, "--preference.loss=simpo"], False),
        ([*PAIRS, "--model.lora.rank=4"], False),  # the model without its adapters
        ([*PAIRS, "--model.lora.rank=4", "--preference.reference=runs/y"], True),
        (PROMPTS, False),
        ([*PROMPTS, "--rl.kl_weight=0.1"], True),
        ([*PROMPTS, "--rl.reference=runs/y"], True),
    ],
)
def test_which_runs_store_a_reference(flags, stored):
    one = job(*flags)
    assert estimate.stores_reference(one) == stored
    assert (estimate.FROZEN in parts(one)) == stored


def test_a_rollout_has_the_state_and_the_cache_of_a_call():
    one = job(*PROMPTS, "--train.grad_accum=2")
    step = figures.memory_figures(one)
    found = {figure.name: figure for figure in beside.rollout_memory(one, step)}
    rows = 32 // 2 // 4
    cache = found[f"KV cache of {rows} rows"]
    assert cache.value == 2 * 2 * LAYERS * rows * TOKENS * WIDTH  # keys and values, two bytes
    assert eval(cache.explanation.replace(" x ", " * ").replace("bytes", "").replace("rows", "").replace("tokens", ""))
    names = {figure.name for figure in step}
    assert found.keys() - names == {cache.name}
    assert {"optimizer state", "parameters, float32"} <= found.keys()
    assert "gradients" not in found
    assert beside.rollout_memory(job(*PAIRS), step) == []


def test_decoding_reads_weights_and_cache_for_each_token():
    one = job(*PROMPTS, "--train.grad_accum=2", "--rl.turns=3", "--rl.tool=x.py:g")
    found = beside.Decoding.of(one, H100, one.cfg.rl)
    weights = 2 * params.count(families.spec(one.cfg.model))
    chip = CHIPS["h100"]
    assert found.weights == weights
    matrices, _ = arrays(one.cfg.model)
    assert found.gathered == matrices * 3 / 4
    assert found.tokens == 128 * 3 * 2
    mean = 2 * 2 * LAYERS * 4 * (TOKENS - 64) * WIDTH
    assert found.cache == mean
    each = (weights + mean) / chip.hbm_bandwidth + matrices * 3 / 4 / chip.interconnect_bandwidth
    assert found.figure.value == pytest.approx(found.tokens * each)


def named(*flags):
    one = job(*flags)
    time = step_time(one, H100)
    return time, {figure.name: figure.value for figure in beside.time_beside(one, H100, time)}


def test_a_reference_takes_a_forward_pass():
    """A third of a step without recomputation, where products are most of the work, give or take other operations."""
    wide = ("--model.d_model=1024", "--model.num_heads=8", "--model.d_ff=4096")
    time, found = named(*PAIRS, *wide, "--train.remat=none")
    assert found.keys() == {"reference, forward pass"}
    assert found["reference, forward pass"] == pytest.approx((time.total - time.update) / 3, rel=0.2)
    assert found["reference, forward pass"] > time.forward
    assert named(*PAIRS, "--preference.loss=kto")[1].keys() == {"reference, forward pass", "divergence, forward pass"}
    assert named(*PAIRS, "--preference.loss=orpo")[1] == {}
    assert named(*MODEL, "--data.source=chat")[1] == {}


def test_rewards_take_rollouts_and_forward_passes():
    _, exact = named(*PROMPTS, "--rl.kl_weight=0.1")
    once = exact["reference, forward pass"]
    assert exact["rollout, 2 forward passes"] == pytest.approx(2 * once)
    assert exact["update, forward pass again"] == once
    _, fast = named(*PROMPTS, "--rl.exact=false")
    assert fast.keys() == {"rollout, decoding at least", "rollout, 1 forward pass"}
    assert fast["rollout, 1 forward pass"] == pytest.approx(once)


def test_log_probabilities_are_computed_once_more_where_the_sampler_has_other_bits():
    for flags in (["--mesh.tensor=2"], ["--rl.turns=2", "--rl.tool=x.py:g"], ["--model.moe.num_experts=4"]):
        flags = [*flags, "--mesh.fsdp=2"] if "tensor" in flags[0] else flags
        assert "rollout, 3 forward passes" in named(*PROMPTS, *flags)[1], flags


def test_stages_read_their_weights_for_each_group_and_recompute_in_the_step():
    flags = [*PROMPTS, "--mesh.fsdp=2", "--mesh.pipe=2", "--train.remat=full"]
    one = job(*flags)
    half = beside.Decoding.of(one, H100, one.cfg.rl)
    weights = 2 * params.count(families.spec(one.cfg.model))
    # Half of the layers, and half of the vocabulary at both ends: two groups read both twice, which is all of them. The
    # last norm is on both stages.
    assert half.weights == weights + 2 * WIDTH
    assert half.cache == 2 * 2 * (LAYERS / 2) * 16 * (TOKENS - 64) * WIDTH
    _, found = named(*flags)
    assert "rollout, 3 forward passes" in found
    assert "update, forward pass again" not in found


@pytest.mark.parametrize("name", ["pretrain", "sft", "dpo", "grpo"])
def test_the_configurations_of_the_page_are_planned(name, capsys):
    flags = [f"--config=configs/speedrun/{name}.yaml", "--target=h100:8"]
    execute(["plan", "memory", *flags])
    shown = capsys.readouterr().out
    assert "fits by this formula" in shown
    assert ("frozen reference" in shown) == (name == "dpo")
    assert ("a rollout, before the step" in shown) == (name == "grpo")
    total = re.search(r"^sum +([\d.]+)", shown, re.M)[1]
    execute(["plan", "time", *flags])
    shown = capsys.readouterr().out
    sums = re.findall(r"^sum +([\d.]+)", shown, re.M)
    row = [f"{float(each):.{digits}f}" for each, digits in zip([total, *sums, "0"][:3], (1, 0, 0), strict=True)]
    assert f"| {' | '.join(row)} |" in next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}.yaml`"))
    assert ("beside each step" in shown) == (name in ("dpo", "grpo"))
    (days,) = map(float, re.findall(r"([\d.e-]+) days for", shown))
    if name in ("dpo", "grpo"):
        (each,) = re.findall(r"beside it: ([\d.,]+) ms", shown)
        steps = {"dpo": 1000, "grpo": 500}[name]
        assert days * 86400 == pytest.approx(steps * float(each.replace(",", "")) / 1e3, rel=2e-3)


def test_a_run_whose_rollout_does_not_fit_is_said(capsys):
    """With little saved for the backward pass, the cache of a rollout is what decides."""
    flags = ["--config=configs/speedrun/grpo.yaml", "--target=h100:8", "--train.remat=full", "--data.batch_size=4608"]
    execute(["plan", "memory", *flags, "--train.grad_accum=1"])
    shown = capsys.readouterr().out
    assert "the run does NOT fit" in shown
    step, rollout = (float(each.replace(",", "")) for each in re.findall(r"^sum +([\d.,]+)", shown, re.M)[:2])
    assert rollout > 80 > step
