"""Compares the model of serving with sums by hand, with the arrays of this package's generation and with its programs.

Expected values are worked out from shapes that stand in the test, never by the functions of the module.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import published_serving as published
import pytest
from decode_gpu import MODELS

from jaxstack import families
from jaxstack.cli.parser import execute
from jaxstack.common.hardware import CHIPS
from jaxstack.config import ConfigError, ExpertLayers, ModelConfig
from jaxstack.config.experts import MoEConfig
from jaxstack.config.model import LatentConfig
from jaxstack.config.scheme import Scheme
from jaxstack.families.context import make_context
from jaxstack.generate.kv_cache import CachedDecoder
from jaxstack.kernels.coded_weight import CodedWeight
from jaxstack.models import params
from jaxstack.planner import serving
from jaxstack.planner.roofline import ChipLimits
from jaxstack.planner.serving import Server, Work, serve

ROOT = Path(published.__file__).parent.parent
RESULT = json.loads((ROOT / "benchmarks" / "results" / "published_serving.json").read_text())
A100 = ChipLimits(CHIPS["a100"])
PEAK, BANDWIDTH, LINK = 0.869 * 312e12, 2039e9, 300e9

SMALL = {"num_layers": 2, "d_model": 64, "num_heads": 4, "num_kv_heads": 2, "d_ff": 128, "vocab_size": 256}
DENSE = ModelConfig(**SMALL, tied_embeddings=False)
EXPERTS = ModelConfig(**SMALL, tied_embeddings=False, moe=MoEConfig(num_experts=4, top_k=2, d_ff=32))
LATENT = ModelConfig(
    **(SMALL | {"num_kv_heads": None}), head_dim=24, tied_embeddings=False,
    latent=LatentConfig(kv_rank=32, q_rank=16, rotary_dim=8, value_dim=16),
)  # fmt: skip
WINDOWS = ModelConfig(**SMALL, windows=(8, 0))
ATTENTION = 64 * 4 * 16 + 2 * 64 * 2 * 16 + 4 * 16 * 64
MLP = 3 * 64 * 128
HEAD = 64 * 256


def test_products_of_a_step_by_hand():
    work = Server(DENSE, A100).step(batch=3, seen=10)
    multiplied = 2 * (ATTENTION + MLP) + HEAD
    assert work.products == pytest.approx((2 * 3 * multiplied / PEAK, 2 * multiplied / BANDWIDTH))
    assert work.experts == (0, 0)
    assert work.layers == 2
    assert (work.exchanges, work.starts) == (0, 0)


def test_attention_of_a_step_by_hand():
    work = Server(DENSE, A100).step(batch=3, seen=10)
    flops = 2 * 3 * 10 * 4 * (16 + 16) * 2  # sequences, tokens, heads, key and value, layers
    kept = 2 * 2 * 16 * 2 * 2  # keys and values, heads, width, bytes, layers
    assert work.attention == pytest.approx((flops / PEAK, 3 * (10 + 1) * kept / BANDWIDTH))


def test_a_prefill_reads_weights_once_and_pairs_under_the_mask():
    work = Server(DENSE, A100).prefill(batch=3, prompt=5)
    multiplied = 15 * 2 * (ATTENTION + MLP) + 3 * HEAD  # the head reads the last tokens alone
    assert work.products[0] == pytest.approx(2 * multiplied / PEAK)
    assert work.products[1] == Server(DENSE, A100).step(3, 10).products[1]
    pairs = 3 * (1 + 2 + 3 + 4 + 5)
    assert work.attention[0] == pytest.approx(2 * pairs * 4 * 32 * 2 / PEAK)


def test_passes_by_hand():
    work = Server(DENSE, A100).step(batch=3, seen=10)
    of_layer = 10 * 64 + 3 * 128 + 2 * (4 + 2) * 16
    assert work.passes == pytest.approx((3 * 2 * (2 * of_layer + 64) + 3 * 8 * 256) / BANDWIDTH)


@pytest.mark.parametrize(("tokens", "share"), [(1, 1 / 2), (2, 3 / 4), (3, 7 / 8)])
def test_a_step_reads_the_experts_that_a_token_chose(tokens, share):
    work = Server(EXPERTS, A100).step(tokens, 10)
    matrices = 2 * 4 * 3 * 64 * 32
    assert work.experts == pytest.approx((2 * tokens * matrices / 2 / PEAK, share * 2 * matrices / BANDWIDTH))


def test_latent_attention_multiplies_latents_in_a_step_and_heads_in_a_prefill():
    server = Server(LATENT, A100)
    step = server.step(batch=3, seen=10)
    assert step.attention[0] == pytest.approx(2 * 3 * 10 * 4 * (32 + 8 + 32) * 2 / PEAK)
    assert step.attention[1] == pytest.approx(3 * (10 + 1) * (32 + 8) * 2 * 2 / BANDWIDTH)
    assert server.prefill(3, 1 + 1).attention[0] == pytest.approx(2 * 3 * 3 * 4 * (24 + 16) * 2 / PEAK)


def test_a_mean_over_steps_counts_what_windows_leave():
    work = Server(WINDOWS, A100).step(batch=1, seen=8, new=5)  # 6, 7, 8, 9, 10
    seen = (6 + 7 + 8 + 8 + 8 + 6 + 7 + 8 + 9 + 10) / 5
    assert work.attention[0] == pytest.approx(2 * seen * 4 * 32 / PEAK)


def test_tensor_parallelism_divides_the_work_and_sends_twice_a_layer():
    one = Server(DENSE, A100).step(3, 10)
    two = Server(DENSE, A100, tensor=2).step(3, 10)
    assert two.products == pytest.approx([each / 2 for each in one.products])
    assert two.attention == pytest.approx([each / 2 for each in one.attention])
    assert two.exchanges == pytest.approx(2 * 2 * (2 * 1 / 2 * 3 * 64 * 2) / LINK)
    assert two.starts == 4


def test_expert_parallelism_divides_experts_and_sequences():
    one = Server(EXPERTS, A100).step(4, 10)
    two = Server(EXPERTS, A100, expert=2).step(4, 10)
    assert two.experts == pytest.approx([each / 2 for each in one.experts])
    assert two.attention == pytest.approx([each / 2 for each in one.attention])
    assert two.products[1] == pytest.approx(one.products[1])
    assert two.exchanges == pytest.approx(2 * 2 * (1 / 2 * 2 * 2 * 64 * 2) / LINK)


def cached(cfg: ModelConfig, tokens: int):
    """Returns the abstract cache of one sequence in bfloat16, as `jaxstack generate` makes it."""
    from jaxstack.config import Config, DataConfig, MeshConfig, TrainConfig
    from jaxstack.sharding import make_mesh

    run = Config(model=cfg, data=DataConfig(batch_size=1), train=TrainConfig(dtype="bfloat16"), mesh=MeshConfig(data=1))
    ctx = make_context(run, make_mesh(run.mesh, 1, jax.devices()[:1])).whole_sequences()

    def make():
        weights = params.init(jax.random.key(0), families.spec(cfg))
        first = jnp.zeros(1, jnp.int32)
        model = CachedDecoder.create(cfg, weights, ctx, gate=None, vocabulary=256, first=first, num_slots=tokens)
        return model.params, model.empty_cache()

    return jax.eval_shape(make)


def size_of(tree) -> int:
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))


@pytest.mark.parametrize("cfg", [DENSE, LATENT, EXPERTS], ids=["grouped", "latent", "experts"])
def test_weights_and_cache_are_those_of_generation(cfg):
    weights, cache = cached(cfg, 48)
    server = Server(cfg, A100)
    assert server.cache_bytes(48) == size_of(cache)
    assert server.weight_bytes == size_of(weights)


def test_a_window_keeps_no_more_than_it_spans():
    of_token = 2 * 2 * 16 * 2
    assert Server(WINDOWS, A100).cache_bytes(48) == of_token * (8 + 48)
    _, cache = cached(WINDOWS, 48)
    assert size_of(cache) == of_token * (7 + 48)  # the newest token is not in the cache yet


def test_codes_have_the_bytes_of_generation():
    server = Server(DENSE, A100, weights="int8")
    spec = families.spec(DENSE)["layers"]
    coded = 0
    for p in jax.tree.leaves(spec, is_leaf=lambda x: isinstance(x, params.Param)):
        if params.is_compressed(p):
            w = jax.ShapeDtypeStruct(p.shape[1:], jnp.float32)
            coded += 2 * size_of(jax.eval_shape(lambda w, p=p: CodedWeight.of(w, p.in_axes, Scheme(8)), w))
    others = Server(DENSE, A100).weight_bytes - 2 * 2 * (ATTENTION + MLP)
    assert server.weight_bytes == coded + others


@pytest.mark.parametrize(("stored", "each"), [("bfloat16", 2.0), ("fp8", 1.0), ("int8", 1 + 4 / 16)])
def test_a_cache_of_8_bits(stored, each):
    assert Server(DENSE, A100, cache=stored).cache_bytes(10) == each * 10 * 2 * 2 * 2 * 16


@pytest.mark.parametrize("batch", [1, 8])
def test_bytes_of_a_step_are_those_of_the_compiled_program(batch):
    """The program of `jaxstack generate` for an H100 (benchmarks/results/decode_gpu_aot.json) moves 0.5% more than
    weights and cache for one sequence, and 5% more for eight."""
    cases = json.loads((ROOT / "benchmarks" / "results" / "decode_gpu_aot.json").read_text())["cases"]
    (case,) = (
        c for c in cases
        if (c["model"], c["batch"], c["decode"], c.get("weights")) == ("llama3_8b", batch, "unrolled", "bfloat16")
    )  # fmt: skip
    chip = CHIPS["h100"]
    server = Server(ModelConfig(**MODELS["llama3_8b"]), ChipLimits(chip))
    work = server.step(batch, 512 + (64 + 320) / 2)
    found = (work.products[1] + work.attention[1]) * chip.hbm_bandwidth
    assert found == pytest.approx(case["bytes_needed"], rel=0.001)
    assert 0.94 < found / case["bytes_moved"] < 1
    moved = found + work.passes * chip.hbm_bandwidth
    assert moved == pytest.approx(case["bytes_moved"], rel=0.05)  # some activations are written in float32


def test_the_largest_batch_just_fits():
    server = Server(DENSE, ChipLimits(CHIPS["l4"]), copies=3, expert=1)
    n = server.largest_batch(1000)
    used = server.weight_bytes + n * server.cache_bytes(1000)
    assert used <= 0.9 * (24 << 30) < used + server.cache_bytes(1000)
    assert Server(EXPERTS, A100, expert=2).largest_batch(1000) % 2 == 0
    large = ModelConfig(**MODELS["llama3_8b"])
    assert Server(large, ChipLimits(CHIPS["t4"])).largest_batch(100) == 0


def test_times_rates_and_cost_by_hand():
    kinds = serving.serving_rates().factors["gpu"]
    ones = serving.ServingRates({"gpu": dict.fromkeys(kinds, 0.0) | {"layer": 1e6}}, (0.5, 2.0), {})
    one = serve(Server(DENSE, A100, copies=2), batch=3, prompt=7, tokens=5, fitted=ones)  # a second for each layer
    assert (one.first_token, one.each_token) == (2, 2)
    assert one.seconds == 2 + 4 * 2
    assert one.tokens_per_s == 2 * 3 * 5 / 10
    assert one.cost(36.0) == pytest.approx(1e6 * 2 * 36 / 3600 / 3)


def test_each_term_is_multiplied_with_its_factor():
    work = Work((1, 2), (3, 4), (5, 6), 7, 8, 9, 10, is_step=True, low=False)
    names = ["products, computing", "products, moving", "experts, computing", "experts, moving", "attention, step"]
    names += ["attention, moving", "passes", "layer", "exchanges", "start"]
    factors = {name: 10.0**i for i, name in enumerate(names)}
    found = work.seconds(factors)
    assert found["products"] == 1 + 20
    assert found["experts"] == 300 + 4000
    assert found["attention"] == 50_000 + 600_000
    assert found["passes"] == 7e6
    assert found["layers"] == pytest.approx(8 * 10)
    assert found["exchanges"] == pytest.approx(9e8 + 10 * 1000)
    low = Work((1, 0), (0, 0), (1, 0), 0, 0, 0, 0, is_step=False, low=True)
    assert low.seconds(factors | {"products, 8 bits": 2, "experts, 8 bits": 0, "attention, prefill": 3}) == {
        "products": 2, "experts": 0, "attention": 3, "passes": 0, "layers": 0, "exchanges": 0,
    }  # fmt: skip


def test_copies_are_split_by_what_divides_the_model():
    def sizes(cfg: ModelConfig, devices: int, **kept: int):
        found = serving.servers(cfg, A100, devices, "bfloat16", "bfloat16", kept)
        return [(s.copies, s.tensor, s.expert) for s in found]

    assert sizes(DENSE, 8) == [(8, 1, 1), (4, 2, 1)]  # two heads of keys
    assert sizes(EXPERTS, 4) == [(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)]
    assert sizes(EXPERTS, 4, tensor=2) == [(2, 2, 1), (1, 2, 2)]
    odd = ModelConfig(**(SMALL | {"vocab_size": 257}), tied_embeddings=False)
    assert sizes(odd, 2) == [(2, 1, 1), (1, 2, 1)]  # the vocabulary is padded
    odd = replace(EXPERTS, d_ff=129, moe=replace(EXPERTS.moe, layers=ExpertLayers(first=1)))
    assert sizes(odd, 2) == [(2, 1, 1), (1, 1, 2)]


def test_the_command_prints_and_writes_the_figures(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["plan", "serve", "--target=h100:4", "--config=llama3_8b", "--weights=fp8", "--cache=fp8", "--price=2"]
    execute([*words, "--batch=[1,64,100000]", "--json=serve.json", "--explain"])
    printed = capsys.readouterr().out
    written = json.loads((tmp_path / "serve.json").read_text())
    best = written["copies"][written["best"]]
    assert "4 copies on 1 device" in printed
    assert "100000 sequences do not fit" in printed
    assert [row["batch"] for row in best["batches"]] == [1, 64]
    row = best["batches"][1]
    assert row["token_s"] == pytest.approx(sum(row["parts"]["token"].values()))
    assert row["tokens_per_s"] == pytest.approx(4 * 64 * 256 / (row["first_token_s"] + 255 * row["token_s"]))
    assert row["cost_per_million_tokens"] == pytest.approx(1e6 * 8 / 3600 / row["tokens_per_s"])
    assert f"{row['tokens_per_s']:,.0f}" in printed
    for line in printed.splitlines():
        if " ms  = " in line:
            value, formula = line.split(" ms  = ")
            terms = [part.split(" s of ") for part in formula.split(" + ")]
            seconds = sum(float(a) * float(b.rsplit(" x ", 1)[1]) for a, b in terms)
            assert float(value.split()[-1].replace(",", "")) == pytest.approx(1e3 * seconds, rel=1e-3, abs=1e-4)
    execute([*words, "--json"])
    assert json.loads(capsys.readouterr().out)["devices"] == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target=a100:1", "--config=llama3_8b", "--weights=fp8"], "--weights=fp8 multiplies in float8"),
        (["--target=t4:1", "--config=llama3_8b"], "no copy of the model fits t4:1"),
        (["--target=h100:4", "--config=llama3_8b", "--batch=[0]"], "--batch=[0] has a batch without sequences"),
        (["--target=h100:4", "--config=llama3_8b", "--mesh.tensor=4", "--mesh.expert=2"], "no number of copies of"),
        (["--target=h100:4", "--config=diffusion_digits"], "model.family=diffusion is not served"),
        (["--config=llama3_8b"], "--target is missing"),
    ],
)
def test_mistakes_are_named(words, message):
    with pytest.raises(ConfigError) as error:
        execute(["plan", "serve", *words])
    assert message in str(error.value)


def test_the_result_is_of_the_table_and_of_the_rates():
    rows = [{key: row[key] for key in published.TABLE["rows"][0]} for row in RESULT["rows"]]
    assert sorted(map(str, rows)) == sorted(map(str, published.TABLE["rows"]))
    fitted = serving.serving_rates()
    assert fitted.factors["gpu"] == RESULT["factors"]
    assert fitted.errors["median"] == RESULT["unseen_project"]["median"]
    for row in RESULT["rows"][::12]:
        assert published.case_of({k: row[k] for k in rows[0]}).ratio(RESULT["factors"]) == pytest.approx(row["ratio"])


def test_the_interval_holds_nine_of_ten_unseen_figures():
    low, high = serving.serving_rates().interval
    inside = [low <= 1 / row["unseen_project"] <= high for row in RESULT["rows"] if "unseen_project" in row]
    assert sum(inside) / len(inside) == pytest.approx(0.9, abs=0.01)


def test_the_page_has_the_figures_of_the_result():
    page = (ROOT / "docs" / "planning_results.md").read_text(encoding="utf-8")
    page = page[page.index("\n## Serving\n") : page.index("\n## GPT-3\n")]

    def percent(share: float) -> str:
        return f"{100 * share:.0f}%"

    rows = {"all": (RESULT["unseen_project"], RESULT["seen"])}
    rows |= {name: (RESULT["unseen_project_by"][name], seen) for name, seen in RESULT["seen_by_project"].items()}
    for name, (unseen, seen) in rows.items():
        cells = [name, str(unseen["rows"])]
        cells += [percent(one[key]) for one in (unseen, seen) for key in ("median", "90%")]
        assert f"| {' | '.join(cells)} |" in page
    assert f"has {len(RESULT['rows'])} figures" in page
    assert f"median error of {percent(RESULT['unseen_chip']['median'])}" in page
    assert f"models a median error of {percent(RESULT['unseen_model']['median'])}" in page
    slower = {name: 1 / one["median_ratio"] for name, one in RESULT["old"].items()}
    assert f"vLLM of 2023 takes {slower['vLLM']:.1f} times" in page
    assert f"FasterTransformer takes {slower['FasterTransformer']:.1f} times" in page
