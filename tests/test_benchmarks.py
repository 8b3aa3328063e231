"""Runs the benchmarks of accelerators on tiny shapes, so that errors show before a GPU is rented."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import debug_faults
import decode_gpu
import gpu_check
import jax
import jax.numpy as jnp
import kernels
import numpy as np
import pytest
import record
import train_gpu
import tune
import weight_stashing

import jaxstack.kernels
from jaxstack import families
from jaxstack.config import ModelConfig, SampleConfig
from jaxstack.generate import decode
from jaxstack.kernels import OP_IMPLEMENTATIONS, tiles
from jaxstack.models import params
from jaxstack.training import assemble


def tree_bytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def result(folder: Path, name: str):
    found = json.loads((folder / f"{name}.json").read_text())
    assert found["device"] == "cpu"
    assert found["command"]
    assert found["versions"]["jax"]
    return found


def test_kernels(tmp_path, capsys):
    kernels.main(["--small", "--ops", "norm", "gelu", "--rounds", "1", "--out", str(tmp_path)])
    by_op = {case["op"]: case for case in result(tmp_path, "kernels_cpu_norm_gelu")["cases"]}
    for op in ("norm", "gelu"):
        ran = {row["implementation"]: row for row in by_op[op]["rows"]}
        # Every implementation has run, or has a reason why not.
        assert set(ran) | set(by_op[op]["left_out"]) >= set(OP_IMPLEMENTATIONS[op]), capsys.readouterr().out
        assert all(row["ms"] > 0 for row in by_op[op]["rows"])
        for name in ran.keys() & OP_IMPLEMENTATIONS[op].keys():  # float32: sums of 128 terms, some 1e-7
            assert len(ran[name]["errors"]) == {"norm": 3, "gelu": 2}[op]  # the value and each gradient
            assert max(ran[name]["errors"]) < 1e-5
    assert {"xla", "custom_vjp", "copy"} <= {row["implementation"] for row in by_op["norm"]["rows"]}


def test_a_benchmark_that_is_killed_leaves_its_measurements(tmp_path, monkeypatch):
    rounds = iter(range(10))
    measure = kernels.Loop.measure

    def killed_later(loop):
        if loop.turns and next(rounds) == 9:
            raise KeyboardInterrupt
        measure(loop)

    monkeypatch.setattr(kernels.Loop, "measure", killed_later)
    with pytest.raises(KeyboardInterrupt):  # two implementations, two passes: four calls when they are made, then five
        kernels.main(["--small", "--ops", "gelu", "--rounds", "3", "--out", str(tmp_path)])
    rows = result(tmp_path, "kernels_cpu_gelu")["cases"][0]["rows"]
    assert [row["rounds"] for row in rows] == [1, 1, 1, 1]


def test_cases_that_did_not_run_keep_their_rows(tmp_path):
    """A second run replaces the rows of its own cases; the others name the commit that measured them."""
    keys = ("model", "batch")
    first = [{"model": "a", "batch": 1, "ms": 1}, {"model": "b", "batch": 1, "ms": 2}]
    assert record.replace_cases("x", first, keys, tmp_path) == first
    path = record.record("x", {"cases": first}, tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"commit": "old"}))
    for ms in (3, 4):  # a benchmark writes after each case
        again = [{"model": "a", "batch": 1, "ms": ms}]
        cases = record.replace_cases("x", again, keys, tmp_path)
        assert cases == [{"commit": "old", **first[1]}, *again]
        record.record("x", {"cases": cases}, tmp_path)


@pytest.mark.matrix
def test_block_sizes_are_timed_only_where_values_are_right(tmp_path, monkeypatch):
    """The smallest size of the cross-entropy is made wrong here; the present one stays."""
    loss = jaxstack.kernels.cross_entropy
    monkeypatch.setattr(tiles, "TABLE", dict(tiles.TABLE))
    (before,) = (tiles.TABLE["gpu"].sizes["cross_entropy"][name] for name in ("float32",))

    def wrong(*args, implementation, **options):
        now = tiles.find_tile("cross_entropy", "float32", "gpu")
        return loss(*args, implementation=implementation, **options) * (1 + 1e-3 * (now != before))

    monkeypatch.setattr(jaxstack.kernels, "cross_entropy", wrong)
    tune.main(["--small", "--kernels", "cross_entropy", "--rounds", "1", "--out", str(tmp_path)])
    found = result(tmp_path, "tiles_cpu")["kernels"]["cross_entropy"]["float32"]
    assert [(row["before"], row["ok"], "ms" in row) for row in found["tried"]] == [
        (True, True, True),
        (False, False, False),
    ]
    assert found["best"] == before._asdict()
    assert tiles.find_tile("cross_entropy", "float32", "gpu") == before


@pytest.mark.matrix
def test_block_sizes_of_attention(tmp_path, monkeypatch):
    monkeypatch.setattr(tiles, "TABLE", dict(tiles.TABLE))
    tune.main(["--small", "--kernels", "attention_forward", "--rounds", "2", "--out", str(tmp_path)])
    found = result(tmp_path, "tiles_cpu")["kernels"]["attention_forward"]["float32"]
    assert all(row["ok"] and row["ms"] > 0 for row in found["tried"])
    assert len(found["tried"]) == 3
    fastest = min(found["tried"], key=lambda row: row["ms"])["tile"]
    assert found["best"] == fastest == tiles.find_tile("attention_forward", "float32", "gpu")._asdict()


def test_a_wrong_kernel_is_an_error(tmp_path, monkeypatch):
    gelu = jaxstack.kernels.gelu
    wrong = {"saved": 1.001}
    monkeypatch.setattr(
        jaxstack.kernels, "gelu", lambda x, implementation: wrong.get(implementation, 1) * gelu(x, implementation="xla")
    )
    with pytest.raises(SystemExit, match="gelu: exact, 64 x 64, saved"):
        gpu_check.main(["--small", "--ops", "gelu", "--out", str(tmp_path)])
    found = result(tmp_path, "gpu_check_cpu_gelu")
    assert found["wrong"] == ["gelu: exact, 64 x 64, saved"]
    assert [row["ok"] for row in found["cases"]["gelu: exact, 64 x 64"].values()] == [True, False]
    x = jnp.arange(1.0, 9)
    ways = {"xla": jnp.sin, "fails": lambda x: x @ jnp.ones(3), "nan": lambda x: jnp.sqrt(-x)}
    rows = gpu_check.compare(ways, (x,), jnp.sin(x), "xla", "float32")
    assert [row["ok"] for row in rows.values()] == [True, False, False]


@pytest.mark.parametrize("script", [gpu_check, decode_gpu])
def test_without_a_gpu(script):
    with pytest.raises(SystemExit, match=r"needs a GPU or a TPU, and JAX finds none\. Use --small"):
        script.main([])


def test_the_page_shows_the_faults_of_the_result():
    """`python benchmarks/debug_faults.py --print` prints the table."""
    page = (Path(debug_faults.__file__).parent.parent / "docs" / "debugging.md").read_text()
    cases = debug_faults.measured()
    assert debug_faults.rows(cases) in page
    text = " ".join(page.split())
    times = {case["fault"]: case["quickstart"]["cpu_seconds"] for case in cases if "quickstart" in case}
    assert f"all {len(cases)} on their meshes, and {len(times)} of them in the quickstart" in text
    deeper = times.pop(debug_faults.DEEPER)
    sentences = (
        f"{min(times.values()):.0f} to {max(times.values()):.0f} s. The pipeline of four stages took {deeper:.0f} s"
    )
    assert sentences in text


@pytest.mark.matrix
def test_every_operation_has_a_case(capsys):
    kernels.main(["--small", "--rounds", "1"])
    assert "no cases for layers, update, decode\n" in capsys.readouterr().out


ORDER = {"remats": ["selective"], "kernels": {}, "known": [], "steps": 2, "small": True}


def order(name):
    job = asdict(train_gpu.SMALL[name])
    return ORDER | {"job": job, "batches": job["batches"]}


def test_a_batch_that_does_not_fit_is_left_at_once(monkeypatch):
    """Its state is freed before the next one is made, although the error has been caught while it existed."""

    class TooLarge:
        def lower(self, *_):
            return self

        compile = lower

        def memory_analysis(self):
            return SimpleNamespace(argument_size_in_bytes=1, temp_size_in_bytes=1)

        def __call__(self, state, batch):
            assert jax.tree.leaves(state)[0].is_deleted() is False
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(assemble, "jit_train_step", lambda *_: TooLarge())
    before = len(jax.live_arrays())
    found, advance = train_gpu.candidate(order("dense_2048"), 4, "selective", [], budget=1e9)
    assert advance is None
    assert found["out_of_memory"]
    assert found["total"] > 1e9
    assert len(jax.live_arrays()) == before
    # A later candidate of at least that batch is not even compiled, unless it differs or there is more memory.
    for remat, batch, budget, skipped in (
        ("selective", 4, 1e9, True), ("selective", 8, 1e9, True), ("selective", 2, 1e9, False),
        ("none", 8, 1e9, False), ("selective", 8, 2e9, False),
    ):  # fmt: skip
        wanted = found | {"remat": remat, "batch": batch}
        assert bool(train_gpu.too_large(wanted, [found], budget)) == skipped


def test_each_candidate_is_reported_and_the_fastest_one_served(monkeypatch, capsys):
    """The worker's side of train_gpu.py. A step takes a second with one policy, and half a second with the other."""
    seconds = {"none": 1.0, "selective": 0.5}

    def candidate(order, batch, remat, known, budget):
        found = {"remat": remat, "batch": batch, "kernels": {}, "total": 10 * batch}
        return found, None if batch > 2 else lambda: seconds[remat]

    monkeypatch.setattr(train_gpu, "candidate", candidate)
    monkeypatch.setattr(train_gpu, "timed", lambda advance, read, steps: (advance(), 1.5))
    train_gpu.ours(order("dense_2048") | {"remats": ["selective", "none"]}, ["2"])
    *tried, served, turn = map(json.loads, capsys.readouterr().out.splitlines())
    assert [(row["candidate"]["remat"], row["candidate"]["batch"], "step_s" in row["candidate"]) for row in tried] == [
        ("selective", 4, False), ("selective", 2, True), ("none", 4, False), ("none", 2, True)
    ]  # fmt: skip
    assert (served["remat"], served["batch"], served["tokens_per_s"]) == (
        "selective",
        2,
        256.0,
    )  # 2 x 64 in half a second
    assert turn["step_s"] == 0.5


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["moe_2_of_8", "nanochat_d24"])
def test_our_side_of_the_whole_step(name, capsys):
    train_gpu.ours(order(name), ["2"])
    tried, served, turn = map(json.loads, capsys.readouterr().out.splitlines())
    assert served["batch"] == 4  # the largest one
    assert tried["candidate"]["total"] > 0
    assert abs(turn["loss"] - math.log(256)) < 1  # random tokens, a few steps after the start
    cfg = train_gpu.config(train_gpu.SMALL[name], 4, "none", {})
    assert cfg.data.batch_size == {"moe_2_of_8": 4, "nanochat_d24": 8}[name]
    assert cfg.train.grad_accum == {"moe_2_of_8": 1, "nanochat_d24": 2}[name]


def test_decoding(tmp_path, capsys):
    """The bytes are those of the arrays, and the measured programs add the tokens of `generate`."""
    decode_gpu.main(["--small", "--batches", "2", "--rounds", "1", "--out", str(tmp_path)])
    (case,) = result(tmp_path, "decode_gpu_cpu_tiny")["cases"]
    assert len(case["ms_of_rounds"]) == 1, capsys.readouterr().out
    cfg = ModelConfig(**decode_gpu.SMALL["tiny"])
    ctx, length = decode_gpu.context(cfg, "float32", {}, jax.devices()[0]), decode_gpu.Length(64, 4, 12)
    values = params.init(jax.random.key(0), families.spec(cfg))
    table = values["embedding"]["tokens"]
    # All weights but the table, of which each sequence needs a row; 64 + 8 tokens and the new one.
    assert case["bytes_of_token"]["parameters"] == tree_bytes(values) - table.nbytes + 2 * table[0].nbytes
    work = decode_gpu.Decoding(cfg, ctx, 2, length)
    weights = jax.jit(work.prepare)(values)
    tokens = jax.random.randint(jax.random.key(1), (2, 64), 0, cfg.vocab)
    state = jax.jit(work.start)(weights, tokens)
    slots = 64 + 12
    assert case["bytes_of_token"]["cache"] == tree_bytes(state["cache"]) * (64 + 8 + 1) / slots
    _, added = jax.jit(work.extend)(weights, state, 11)
    sample = SampleConfig(tokens=12, temperature=0)
    rows = decode.generate(cfg, values, tokens.tolist(), sample, ctx=ctx)
    first = np.asarray(state["last"])[:, None]
    assert [row[64:] for row in rows] == np.concatenate([first, added.tokens[:, :11]], axis=1).tolist()


@pytest.mark.matrix
def test_the_whole_step(tmp_path):
    """Runs our side alone; if the extra `[parity]` is installed, that of torch alone, and both beside each other."""
    words = ("--small", "--jobs", "dense_2048", "--rounds", "2", "--steps", "2", "--remats", "selective")
    train_gpu.main([*words, "--out", str(tmp_path)])
    alone = result(tmp_path, "train_gpu_cpu_dense_2048_selective_alone")
    peers = ["torch_eager"] if train_gpu.installed("torch, transformers") else []
    results = [alone]
    if peers:
        together = result(tmp_path, "train_gpu_cpu_dense_2048_selective_together")
        assert together["speed_against"]["torch_eager"] > 0
        results.append(together)
    for found in results:
        assert set(found["sides"]) == {"jaxstack", *peers}
        assert not found["failed"]
        for side in found["sides"].values():
            assert side["tokens_per_s"] > 0
            assert side["batch"] == 4  # the largest one
            assert side["mfu"] is None  # the peak of a CPU is not known
            assert side["rounds"] == 2
            # The same model on the same tokens: ln(256) at the first step, and slightly less after memorizing.
            assert abs(side["last_loss"] - math.log(256)) < 1


@pytest.mark.matrix
def test_the_check_of_a_device(tmp_path):
    """Values and gradients of every kernel and of a whole step."""
    gpu_check.main(["--small", "--out", str(tmp_path)])
    rows = result(tmp_path, "gpu_check_cpu")["cases"]
    assert {"step: dense", "step: experts"} < set(rows)
    for case, ways in rows.items():
        assert ways.keys() - {"xla", "ragged"}, case  # something was compared
        assert all(row["ok"] for row in ways.values()), case


def test_the_tuner_counts_what_every_kernel_loads():
    """Arithmetic alone, which is otherwise computed only where a compiler for GPUs is."""
    for search in tune.searches("gpu", False, [*tiles.TABLE["h100"].sizes]):
        tile = tiles.TABLE["gpu"].sizes[search.kernel][search.shape_class]
        assert min(tune.loaded_bytes(search.kernel, tile, search.case).values()) > 0


def test_each_layer_gets_the_weights_that_its_stage_has_kept():
    """Entry t % 8 has the weights after t updates: on four stages, two layers each, the last stage has the newest."""
    stash = jax.tree.map(
        lambda a: jnp.broadcast_to(jnp.arange(8.0).reshape(8, *(1,) * a.ndim), (8, *a.shape)),
        weight_stashing.init(jax.random.key(0)),
    )
    M, late = weight_stashing.settings()["M=1, stale, P=4"]
    assert (M, late) == (1, [3, 3, 2, 2, 1, 1, 0, 0])
    for t, versions in (10, [7, 7, 0, 0, 1, 1, 2, 2]), (1, [0, 0, 0, 0, 0, 0, 1, 1]):
        used = weight_stashing.old_weights(stash, t, jnp.array(late))
        found = [used["first"]["b"][0], used["second"]["b"][0], *used["blocks"]["b"][:, 0], used["head"]["b"][0]]
        assert found == versions
        assert used["blocks"]["w"].shape == (5, 108, 12)
