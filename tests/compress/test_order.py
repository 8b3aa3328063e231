"""The measured order of layers and experts: each loss is the loss of a model that lacks the part, or has it rounded."""

import itertools
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
from jaxstack.compress import order, prune
from jaxstack.compress.calibrate import Walk
from jaxstack.config import ConfigError
from jaxstack.config.expert_layers import ExpertLayers
from jaxstack.config.scheme import Scheme
from jaxstack.kernels.rounding import round_matrix
from jaxstack.models.context import Context
from jaxstack.models.params import map_spec
from jaxstack.training.assemble import objective_of
from jaxstack.training.losses import evaluate


def drawn(model, seed):
    rng = np.random.default_rng(seed)
    return map_spec(lambda p: jnp.asarray(rng.normal(0, 0.2, p.shape), jnp.float32), families.spec(model))


def loss_of(model, values, batch):
    sums = jax.jit(lambda values: evaluate(objective_of(model), model, values, batch, Context()))(values)
    (term,) = objective_of(model).terms
    return float(sums.losses[term.name] / sums.weights[term.name])


def measured(name, seed, scheme=None, **changes):
    cfg = test_meshes.config(name, {})
    cfg = replace(cfg, model=replace(cfg.model, **changes))
    values = drawn(cfg.model, seed)
    batch = jax.tree.map(jnp.asarray, test_meshes.random_batch(seed, False, cfg.model))
    return cfg.model, values, batch, order.Order(cfg, Context(), values, [batch], scheme)


@pytest.mark.random
@pytest.mark.parametrize("name", ["t5", pytest.param("llama3", marks=pytest.mark.slow)])
def test_the_loss_without_a_layer_is_the_loss_of_a_model_with_fewer_layers(name, seed):
    model, values, batch, found = measured(name, seed)
    assert found.whole == pytest.approx(loss_of(model, values, batch), rel=1e-5)
    rows = list(found.layers())
    depths = {"encoder": "encoder_layers", "decoder": "num_layers", "layers": "num_layers"}
    stacks = families.of(model).stacks(model)
    assert [(row.stack, row.layer) for row in rows] == [(n, i) for n, one in stacks.items() for i in range(one.depth)]
    for row in rows:
        depth = stacks[row.stack].depth
        kept = jnp.asarray([i for i in range(depth) if i != row.layer])
        small = replace(model, **{depths[row.stack]: depth - 1})
        fewer = {**values, row.stack: jax.tree.map(lambda a, kept=kept: a[kept], values[row.stack])}
        assert row.loss == pytest.approx(loss_of(small, fewer, batch), rel=1e-5)
    assert len({round(row.loss, 4) for row in rows}) == len(rows), "the losses differ"


@pytest.mark.random
@pytest.mark.parametrize("name", ["softmax", pytest.param("sigmoid", marks=pytest.mark.slow)])
def test_the_loss_without_an_expert_is_the_loss_of_a_model_with_fewer_experts(name, seed):
    model, values, batch, found = measured(name, seed, num_layers=1)
    if model.moe.num_groups > 1:
        moe = replace(model.moe, num_groups=1, top_k_groups=1)
        model, values, batch, found = measured(name, seed, num_layers=1, moe=moe)
    E = model.moe.num_experts
    axes = {"router": 2, "balance": 1}
    for row in found.experts():
        kept = jnp.asarray([e for e in range(E) if e != row.expert])
        moe = {
            path: jnp.take(a, kept, axes.get(path, 1)) if not isinstance(a, dict) and path != "shared_gate" else a
            for path, a in values["layers"]["moe"].items()
        }
        small = replace(model, moe=replace(model.moe, num_experts=E - 1))
        fewer = {**values, "layers": {**values["layers"], "moe": moe}}
        assert row.loss == pytest.approx(loss_of(small, fewer, batch), rel=1e-5)
    assert [row.expert for row in found.experts()] == list(range(E))


@pytest.mark.random
@pytest.mark.slow
def test_the_loss_with_a_part_quantised_is_the_loss_with_its_matrices_rounded(seed):
    scheme = Scheme(4, 16)
    model, values, batch, found = measured("dit_experts", seed, scheme)

    def rounded(layer, expert=None):
        def one(p, a):
            if p.kind != "matrix" or (expert is not None and "experts" not in p.axes):
                return a
            new = round_matrix(a, p.batch_axes, p.in_axes, scheme)
            at = layer if expert is None else (layer, expert)
            return a.at[at].set(new[at])

        return {**values, "layers": map_spec(one, families.spec(model)["layers"], values["layers"])}

    for row in found.layers():
        assert row.loss == pytest.approx(loss_of(model, rounded(row.layer), batch), rel=1e-5)
    for row in found.experts():
        assert row.loss == pytest.approx(loss_of(model, rounded(row.layer, row.expert), batch), rel=1e-5)
    assert "none can be removed" in str(replace(found, scheme=None).why_no_experts)


@pytest.mark.random
def test_loads_are_the_shares_of_the_tokens_by_expert(seed):
    model, values, batch, _ = measured("dit_experts", seed)
    (loads,) = order.measure_loads(Walk.of(model, Context()), values, [batch]).values()
    starts = np.linspace(0, model.moe.max_timestep, model.moe.num_experts + 1)
    own = np.asarray(batch["gate_ids"]).reshape(-1)
    expected = [np.mean((own >= a) & (own < b)) for a, b in itertools.pairwise(starts)]
    np.testing.assert_allclose(loads, [expected] * model.num_layers, rtol=1e-5)


@pytest.mark.parametrize("name", ["switch_2", "encoder_units", "t5_listed", "listed", "encoder_only"])
def test_a_model_with_experts_in_some_layers_is_refused_before_anything_is_computed(name):
    """`compress order` would take units of layers for layers, and `compress prune` refuses such a model anyway."""
    cfg = test_meshes.config("switch_2" if name == "encoder_only" else name, {})
    if name == "encoder_only":
        every = ExpertLayers(numbers=tuple(range(cfg.model.num_layers)), encoder_numbers=(1,))
        cfg = replace(cfg, model=replace(cfg.model, moe=replace(cfg.model.moe, layers=every)))
    text = "model.moe.layers leaves layers without experts"
    with pytest.raises(ConfigError, match=text):
        order.Order(cfg, Context(), {}, [])
    with pytest.raises(ConfigError, match=text):
        Walk.of(cfg.model, Context())
    with pytest.raises(ConfigError, match=text):
        prune.smaller_sizes(cfg.model, {})


def test_an_order_of_another_model_is_refused():
    rows = [{"layer": 0, "expert": e, "above": float(e)} for e in range(2)]
    assert order.read_experts({"experts": rows}, 1, 2).tolist() == [[0.0, 1.0]]
    assert order.read_layers({"layers": [{"layer": 1, "above": 2.0}, {"layer": 0, "above": 3.0}]}, 2).tolist() == [3, 2]
    with pytest.raises(ConfigError, match="lacks experts of the model: it has 2 of 4"):
        order.read_experts({"experts": rows}, 2, 2)
    with pytest.raises(ConfigError, match="experts that the model does not have"):
        order.read_experts({"experts": rows}, 1, 1)


FLAGS = """--model.num_layers=2 --model.d_model=32 --model.num_heads=4 --model.num_kv_heads=2 --model.d_ff=40
    --model.moe.num_experts=4 --model.moe.top_k=2 --model.moe.d_ff=24 --data.seq_len=32 --data.batch_size=4
    --train.steps=3 --train.eval_every=3 --train.eval_steps=2 --optim.warmup_steps=1 --train.ngram_baseline=false
    --sample.prompts=[]"""


@pytest.mark.slow
def test_pruning_takes_the_order_and_the_load(tmp_path, capsys):
    """The experts that stay are those of the file; the smaller run has a consistent router, and is exported."""
    pytest.importorskip("safetensors")
    run = trained.run(tmp_path, FLAGS, trained.words())
    file = tmp_path / "order.json"
    execute(["compress", "order", str(run), str(file), "--sequences=8"])
    said = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert len(found["layers"]) == 2
    assert len(found["experts"]) == 8
    assert [row["loss"] for row in found["experts"]] == sorted(row["loss"] for row in found["experts"])
    assert f"loss {found['experts'][0]['loss']:.4f}" in said
    loads = np.zeros((2, 4))
    above = np.zeros((2, 4))
    for row in found["experts"]:
        loads[row["layer"], row["expert"]] = row["load"]
        above[row["layer"], row["expert"]] = row["above"]
    np.testing.assert_allclose(loads.sum(1), 1, rtol=1e-5)
    words = ["compress", "prune", str(run)]
    for by, table in (("order", above), ("load", loads)):
        more = [f"--order={file}"] if by == "order" else []
        out = tmp_path / by
        execute([*words, str(out), "--experts=3", f"--experts_by={by}", "--sequences=8", *more])
        kept = json.loads((out / "importance.json").read_text())["experts"]["kept"]
        assert kept == np.sort(np.argsort(-table, 1, kind="stable")[:, :3], 1).tolist()
        small = js.load(out)
        assert small.model.moe.num_experts == 3
        whole = js.load(run)
        for layer, own in enumerate(kept):
            router = np.asarray(whole.params["layers"]["moe"]["router"])[layer][:, own]
            np.testing.assert_array_equal(small.params["layers"]["moe"]["router"][layer], router)
    execute([*words, str(tmp_path / "shallow"), "--layers=1", "--layers_by=order", f"--order={file}", "--sequences=8"])
    kept = json.loads((tmp_path / "shallow" / "importance.json").read_text())["layers"]["kept"]
    assert kept == [found["layers"][-1]["layer"]]
    for wrong, message in (
        (["--experts=3", "--experts_by=order"], "needs a measured order"),
        (["--experts=3", f"--order={file}"], "is not used"),
        (["--experts=3", "--layers_by=cosine"], "--layers_by=cosine is not used, because no layers are removed. Set"),
        (["--d_ff=8", "--experts_by=load"], "--experts_by=load is not used, because no experts are removed. Set"),
        (["--experts=3", "--experts_by=order", f"--order={tmp_path / 'by.json'}"], "not an order of parts"),
    ):
        (tmp_path / "by.json").write_text(json.dumps(found | {"by": "int4"}))
        with pytest.raises(ConfigError, match=message):
            execute([*words, str(tmp_path / "wrong"), *wrong])
    execute(["export", str(tmp_path / "load"), str(tmp_path / "hf")])
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_experts"] == 3
