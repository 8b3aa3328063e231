"""Experts of 4 bits beside others of 8: which they are, what they become, and how they are stored."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_meshes
import trained

import jaxstack as js
from jaxstack import families
from jaxstack.cli.parser import execute
from jaxstack.common.tree import flatten
from jaxstack.compress.calibrate import Walk
from jaxstack.compress.order import read_experts_of
from jaxstack.compress.quantize import Settings, by_stack, join, least_used, quantize, stacked_codes
from jaxstack.config import ConfigError
from jaxstack.config.scheme import Scheme
from jaxstack.hf import coded_folder
from jaxstack.models.context import Context
from jaxstack.models.params import flat_spec, map_spec


def drawn(cfg, seed):
    rng = np.random.default_rng(seed)
    return map_spec(lambda p: jnp.asarray(rng.normal(0, 0.2, p.shape), jnp.float32), families.spec(cfg))


def opened(folder, cfg, lower):
    """Returns a folder without the configuration of a run, whose model is given."""
    made = coded_folder.CodedFolder.__new__(coded_folder.CodedFolder)
    told = json.loads((folder / "codes.json").read_text())
    vars(made).update(folder=folder, model=cfg, _bits=told["bits"], _dtype=np.dtype(np.int8))
    made._int4_experts = made._read_experts(told["int4_experts"])
    assert all((made._int4_experts[name] == its).all() for name, its in lower.items())
    return made


def test_the_least_used_experts_of_each_layer():
    """Worked out by hand, over two stacks; of equal ones the first."""
    scores = {"encoder": np.array([[0.5, 0.1, 0.4]]), "decoder": np.array([[0.2, 0.2, 0.6], [0.3, 0.4, 0.3]])}
    chosen = least_used(scores, 1)
    assert chosen.tolist() == [[False, True, False], [True, False, False], [True, False, False]]
    assert least_used(scores, 2)[0].tolist() == [False, True, True]


def test_an_order_is_read_for_each_stack():
    stacks = {"encoder": 2, "decoder": 1}
    rows = [{"stack": name, "layer": i, "expert": e, "above": 10 * i + e + (100 if name == "decoder" else 0)}
            for name, depth in stacks.items() for i in range(depth) for e in range(2)]  # fmt: skip
    declared = {name: replace(any_stack(), depth=depth) for name, depth in stacks.items()}
    found = read_experts_of({"experts": rows[::-1]}, declared, 2)
    assert found["encoder"].tolist() == [[0, 1], [10, 11]]
    assert found["decoder"].tolist() == [[100, 101]]
    for wrong in (rows[1:], "x", [1], [*rows, {"stack": "decoder", "layer": 1, "expert": 0, "above": 1}]):
        with pytest.raises(ConfigError, match=r"--order (lacks|has) experts"):
            read_experts_of({"experts": wrong}, declared, 2)


def any_stack():
    (stack,) = families.of(test_meshes.MODELS["softmax"]).stacks(test_meshes.MODELS["softmax"]).values()
    return stack


@pytest.mark.random
def test_each_expert_has_the_values_of_its_format(seed, tmp_path):
    """Experts of 4 bits equal those of a model of 4 bits, and all other matrices those of a model of 8, bit for bit.

    The folder has as many bytes as the codes and scales need, and the values are read back.
    """
    cfg = test_meshes.MODELS["softmax"]
    values = drawn(cfg, seed)
    walk = Walk.of(cfg, Context())
    E = cfg.moe.num_experts
    (stack,) = walk.stacks
    rng = np.random.default_rng(seed)
    chosen = least_used({stack: rng.random((walk.stacks[stack].depth, E))}, E // 2 - 1)
    mixed = [*quantize(walk, values, [], Settings(Scheme(8, 16), "rtn", int4_experts=chosen))]
    uniform = {bits: [*quantize(walk, values, [], Settings(Scheme(bits, 16), "rtn"))] for bits in (4, 8)}
    joined = join(cfg, values, mixed)
    each = {bits: flatten(join(cfg, values, layers)) for bits, layers in uniform.items()}
    changed = 0
    for path, p in flat_spec(families.spec(cfg)).items():
        found = np.asarray(flatten(joined)[path])
        if p.batch_axes < 2:
            np.testing.assert_array_equal(found, each[8][path], err_msg=path)
            continue
        changed += 1
        np.testing.assert_array_equal(found[chosen], np.asarray(each[4][path])[chosen], err_msg=path)
        np.testing.assert_array_equal(found[~chosen], np.asarray(each[8][path])[~chosen], err_msg=path)
        assert (np.asarray(each[4][path]) != np.asarray(each[8][path])).any()
    assert changed == 3
    codes = stacked_codes(cfg, mixed)
    lower = by_stack(cfg, chosen)
    coded_folder.write(tmp_path, cfg, joined, codes, 8, "int", "float32", lower)
    read = flatten(opened(tmp_path, cfg, lower).read_params())
    for path, value in flatten(joined).items():
        np.testing.assert_array_equal(read[path], value, err_msg=path)
    sizes = [(p, codes[path][0], codes[path][1]) if path in codes else (p, None, None) for path, p in
             flat_spec(families.spec(cfg)).items()]  # fmt: skip
    needed = 0
    for p, numbers, scales in sizes:
        if numbers is None:
            needed += 4 * int(np.prod(p.shape))
            continue
        needed += 4 * scales.size
        if p.batch_axes < 2:
            needed += numbers.size
        else:
            needed += numbers[~chosen].size + int(np.prod(numbers[chosen].shape[:-1])) * -(-numbers.shape[-1] // 2)
    stored = (tmp_path / coded_folder.FILE).stat().st_size
    assert needed <= stored < needed + 8000  # names, shapes and dtypes of the tensors
    other = {name: np.roll(its, 1, 0) ^ np.eye(*its.shape, dtype=bool) for name, its in lower.items()}
    made = opened(tmp_path, cfg, lower)
    made._int4_experts = other
    with pytest.raises(ConfigError, match="have different experts of"):
        made.read_params()
    told = json.loads((tmp_path / "codes.json").read_text())
    for wrong in ({}, {"x": []}, {stack: [[0]]}, {stack: [[E]] * len(chosen)}, 3):
        with pytest.raises(ConfigError, match=r"codes\.json has experts that its config\.yaml does not have"):
            made._read_experts(wrong)
    assert sum(map(len, told["int4_experts"][stack])) == chosen.sum()


FLAGS = """--model.num_layers=2 --model.d_model=32 --model.num_heads=4 --model.d_ff=40 --data.seq_len=32
    --data.batch_size=4 --train.steps=2 --train.eval_every=2 --train.eval_steps=2 --optim.name=sgd --optim.lr=0.3
    --train.ngram_baseline=false --sample.prompts=[] --optim.warmup_steps=1 --model.moe.num_experts=4
    --model.moe.top_k=2 --model.moe.d_ff=20"""


@pytest.mark.slow
def test_the_command_gives_4_bits_to_the_experts_that_get_fewest_tokens(tmp_path, capsys):
    """By load and by a measured order; the result is a run like any other, and it is smaller than 8 bits alone."""
    pytest.importorskip("safetensors")
    run = trained.run(tmp_path, FLAGS, trained.words())
    ordered = run.with_name("order.json")
    execute(["compress", "order", str(run), str(ordered), "--by=int4", "--group=16", "--sequences=8"])
    capsys.readouterr()
    common = ["--group=16", "--method=rtn", "--sequences=8"]
    sizes = {}
    cases = {
        "int8": ["--weights=int8"], "load": ["--weights=int8", "--int4_experts=2"],
        "order": ["--weights=int8", "--int4_experts=2", "--experts_by=order", f"--order={ordered}"],
        "gptq": ["--weights=int8", "--int4_experts=2", "--method=gptq"],
    }  # fmt: skip
    for name, flags in cases.items():
        out = run.with_name(name)
        execute(["compress", "quantize", str(run), str(out), *common, *flags])
        said = capsys.readouterr().out
        stored = sum(path.stat().st_size for path in (out / "model").glob("*.safetensors"))
        sizes[name] = stored
        assert f"has {stored / 1e6:,.3f} MB of parameters" in said
        made = js.load(out)
        assert f"{made.evaluate().bits_per_byte:.4f} after" in said
    assert sizes["load"] < 0.95 * sizes["int8"]
    assert abs(sizes["order"] - sizes["load"]) < 100
    assert sizes["gptq"] == sizes["load"]
    found = json.loads(ordered.read_text())["experts"]
    for name, key in (("load", "load"), ("order", "above")):
        table = np.zeros((2, 4))
        for row in found:
            table[row["layer"], row["expert"]] = row[key]
        told = json.loads((run.with_name(name) / "model" / "codes.json").read_text())["int4_experts"]
        assert told == {"layers": np.sort(np.argsort(table, axis=1, kind="stable")[:, :2], axis=1).tolist()}
    for flags, message in (
        (["--int4_experts=4", "--weights=int8"], "leaves none of the 4 experts"),
        (["--int4_experts=2"], "--weights=int4 is not int8"),
        (["--int4_experts=2", "--weights=int8", "--experts_by=order"], "is not complete"),
        (["--int4_experts=2", "--weights=int8", f"--order={ordered}"], "is not complete"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            execute(["compress", "quantize", str(run), str(run.with_name("no")), *common, *flags])
        assert caught.value.advice
    more = js.load(run.with_name("load"))
    assert jax.tree.structure(more.params) == jax.tree.structure(js.load(run).params)
