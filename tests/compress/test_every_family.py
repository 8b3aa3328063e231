"""Quantisation and rounding of every family: what a walk measures, what is stored, and that training loses nothing."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_meshes
import trained

import jaxstack as js
from jaxstack import families, kernels
from jaxstack.cli.parser import execute
from jaxstack.common.tree import flatten
from jaxstack.compress import prune
from jaxstack.compress.calibrate import Walk
from jaxstack.compress.importance import measure
from jaxstack.compress.quantize import Settings, by_stack, join, quantize, stacked_codes
from jaxstack.config import ConfigError, MoEConfig
from jaxstack.config.reading.parse import parse_config
from jaxstack.config.scheme import Scheme
from jaxstack.hf import coded_folder
from jaxstack.models.context import Context
from jaxstack.models.params import flat_spec, is_compressed, map_spec
from jaxstack.train import main
from jaxstack.training.features import qat

QUICK = ["t5", "dit_text", "coca"]
DENSE = [
    "t5",
    *(pytest.param(n, marks=pytest.mark.slow) for n in (*QUICK[1:], "modernbert", "bert", "gpt2", "clip", "dit")),
]
ROUTED = ["dit_experts"]


def model_of(name):
    cfg = test_meshes.MODELS[name]
    return replace(cfg, num_layers=3) if name == "modernbert" else cfg  # the last step has one layer of two


def drawn(cfg, seed):
    rng = np.random.default_rng(seed)
    return map_spec(lambda p: jnp.asarray(rng.normal(0, 0.2, p.shape), jnp.float32), families.spec(cfg))


def batches_of(cfg, seed, count=2):
    return [jax.tree.map(jnp.asarray, test_meshes.random_batch(seed + i, False, cfg, 2)) for i in range(count)]


def opened(folder, cfg, scheme):
    """Returns a folder without the configuration of a run, whose model is given."""
    made = coded_folder.CodedFolder.__new__(coded_folder.CodedFolder)
    kind = np.dtype(coded_folder._DTYPES[scheme.kind])
    vars(made).update(folder=folder, model=cfg, _bits=scheme.bits, _dtype=kind)
    return made


def recorded(cfg, values, batches, monkeypatch):
    """Returns the sum of x x^T of each matrix by its first number, from the model run operation by operation."""
    grams = {}
    real = kernels.linear

    def look(x, w, b=None, *, in_axes=1, **options):
        rows = np.asarray(x, np.float64).reshape(-1, int(np.prod(w.shape[:in_axes])))
        key = float(np.asarray(w).reshape(-1)[0])
        grams[key] = grams.get(key, 0) + rows.T @ rows
        return real(x, w, b, in_axes=in_axes, **options)

    with monkeypatch.context() as patch, jax.disable_jit():
        patch.setattr(kernels, "linear", look)
        for batch in batches:
            families.of(cfg).hidden_states(cfg, values, batch, Context())
    return grams


@pytest.mark.random
@pytest.mark.parametrize("name", DENSE)
def test_a_walk_measures_the_inputs_of_every_matrix(name, seed, monkeypatch):
    cfg = model_of(name)
    cfg = replace(cfg, moe=MoEConfig(max_timestep=cfg.moe.max_timestep))
    values, batches = drawn(cfg, seed), batches_of(cfg, seed)
    grams = recorded(cfg, values, batches, monkeypatch)
    walk, seen = Walk.of(cfg, Context()), []

    def look(index, layer, measure):
        for path, found in measure().items():
            expected = grams[float(np.asarray(flatten(layer)[path]).reshape(-1)[0])]
            # float32 sums of some hundred products
            np.testing.assert_allclose(found.gram, expected, rtol=1e-3, atol=1e-4 * expected.max(), err_msg=path)
            seen.append((measure.stack, index, path))
        assert set(measure()) == set(measure.matrices)
        return layer

    for _ in walk.run(values, batches, look):
        pass
    spec = families.spec(cfg)
    stacks = families.of(cfg).stacks(cfg)
    expected = {path for path, p in flat_spec(spec).items() if path.partition("/")[0] in stacks and is_compressed(p)}
    assert {f"{stack}/{path}" for stack, _, path in seen} == expected
    assert sorted({index for _, index, _ in seen}) == list(range(sum(one.depth for one in stacks.values())))


@pytest.mark.random
@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, "gpt2"])
def test_gptq_is_nearer_than_rounding_in_every_stack(name, seed):
    cfg = model_of(name)
    values, batches = drawn(cfg, seed), batches_of(cfg, seed)
    walk = Walk.of(cfg, Context())
    errors = {}
    for method in ("rtn", "gptq"):
        layers = list(quantize(walk, values, batches, Settings(Scheme(4, 16), method)))
        errors[method] = {
            stack: sum(sum(one.errors.values()) for one in own) for stack, own in by_stack(cfg, layers).items()
        }
    assert errors["gptq"].keys() == families.of(cfg).stacks(cfg).keys()
    for stack, error in errors["gptq"].items():
        assert error < 0.9 * errors["rtn"][stack], stack


@pytest.mark.random
@pytest.mark.parametrize(
    "name", ["t5", *(pytest.param(n, marks=pytest.mark.slow) for n in (*QUICK[1:], "dit_experts"))]
)
def test_the_values_of_a_folder_of_codes_are_those_of_training_with_rounded_matrices(name, seed, tmp_path):
    """They have equal bits, for 4 bits with an odd number of inputs, 8 bits and fp8."""
    cfg = model_of(name)
    values = drawn(cfg, seed)
    for scheme in (Scheme(4, 16), Scheme(8), Scheme(8, None, "float")):
        layers = list(quantize(Walk.of(cfg, Context()), values, [], Settings(scheme, "rtn")))
        joined = join(cfg, values, layers)
        rounded = qat.round_arrays(cfg, scheme, values)
        codes = stacked_codes(cfg, layers)
        folder = tmp_path / f"{scheme.bits}{scheme.kind}"
        folder.mkdir()
        coded_folder.write(folder, cfg, joined, codes, scheme.bits, scheme.kind, "float32")
        made = coded_folder.CodedFolder.__new__(coded_folder.CodedFolder)
        vars(made).update(
            folder=folder, model=cfg, _bits=scheme.bits, _dtype=np.dtype(coded_folder._DTYPES[scheme.kind])
        )
        read = flatten(made.read_params())
        for path, value in flatten(rounded).items():
            np.testing.assert_array_equal(read[path], flatten(joined)[path], err_msg=path)
            np.testing.assert_array_equal(read[path], value, err_msg=path)
            if path in codes:
                assert np.any(read[path] != flatten(values)[path]), path
        assert (folder / coded_folder.FILE).stat().st_size < sum(a.nbytes for a in jax.tree.leaves(values)) * 0.6


def test_two_codes_of_four_bits_are_in_a_byte():
    codes = np.array([[-8, 7, -1], [0, 1, 2]], np.int8)
    packed = coded_folder.pack(codes)
    assert packed.tolist() == [[0x78, 0x0F], [0x10, 0x02]]
    np.testing.assert_array_equal(coded_folder.unpack(packed, 3), codes)


def test_a_folder_with_other_parameters_is_refused(tmp_path):
    cfg = model_of("dit")
    values = drawn(cfg, 0)
    coded_folder.write(tmp_path, cfg, values, {}, 8, "int", "float32")
    with pytest.raises(ConfigError, match="have different parameters"):
        opened(tmp_path, model_of("coca"), Scheme(8)).read_params()


@pytest.mark.slow
def test_a_trunk_with_two_branches_is_rounded_and_not_calibrated(tmp_path, capsys):
    """The trunk's matrices have the inputs of both branches. Methods that need these inputs are refused, and write
    nothing."""
    run = tmp_path / "run"
    (tmp_path / "F.txt").write_text(trained.words())
    flags = [*WORDS.split(), "--model.family=branches", "--model.branches.layers=1", "--model.tied_embeddings=true"]
    flags += ["--data.source=path", f"--data.path={tmp_path / 'F.txt'}", "--data.seq_len=32", "--train.qat=int4"]
    main(parse_config([*flags, "--train.qat_group=16", f"--run.dir={run}"]))
    small, other = tmp_path / "small", str(tmp_path / "other")
    execute(["compress", "quantize", str(run), str(small), "--group=16", "--method=rtn"])
    assert f"train it with `jaxstack train --config={small / 'config.yaml'}`" in capsys.readouterr().out
    assert js.load(small).evaluate().loss == js.load(run).evaluate().loss
    execute(["compress", "prune", str(run), str(tmp_path / "sparse"), "--sparsity=2:4", "--method=magnitude"])
    told = r"inputs of two branches.*Use --method={}, or export a branch"
    for method in ("gptq", "awq"):
        with pytest.raises(ConfigError, match=told.format("rtn")):
            execute(["compress", "quantize", str(run), other, f"--method={method}"])
    for method in ("sparsegpt", "wanda"):
        with pytest.raises(ConfigError, match=told.format("magnitude")):
            execute(["compress", "prune", str(run), other, "--sparsity=0.5", f"--method={method}"])
    execute(["compress", "order", str(run), str(tmp_path / "order.json"), "--sequences=8"])
    assert "prune by it" not in capsys.readouterr().out
    assert not (tmp_path / "other").exists()


def test_a_mesh_is_refused_for_a_family_that_is_not_a_decoder():
    from jaxstack.families.context import make_context
    from jaxstack.sharding import make_mesh

    cfg = test_meshes.config("t5", {"data": 2})
    ctx = make_context(cfg, make_mesh(cfg.mesh, test_meshes.BATCH, jax.devices()[:2]))
    with pytest.raises(ConfigError, match=r"model\.family=encoder_decoder is calibrated on one device"):
        Walk.of(cfg.model, ctx)


@pytest.mark.random
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("modernbert", marks=pytest.mark.slow),
        "modernbert_cut",
        pytest.param("bert", marks=pytest.mark.slow),
    ],
)
def test_parts_of_an_encoder_that_add_nothing_leave_without_a_trace(name, seed):
    """Half of the heads and of the hidden units of each layer have no output weights, and are pruned.

    The last step of "modernbert_cut" has two layers of three, as in the published ModernBERT.
    """
    cfg = test_meshes.MODELS[name] if name == "modernbert_cut" else replace(test_meshes.MODELS[name], num_layers=2)
    values, rng = jax.tree.map(np.array, drawn(cfg, seed)), np.random.default_rng(seed)
    given = {"heads": 4, "d_ff": cfg.ff_width // 2}
    layers = values["layers"]
    for layer in range(cfg.num_layers):
        layers["attention"]["w_o"][layer, rng.permutation(cfg.num_heads)[:4]] = 0
        layers["mlp"]["w_down"][layer, rng.permutation(cfg.ff_width)[: cfg.ff_width // 2]] = 0
    values = jax.tree.map(jnp.asarray, values)
    batch = batches_of(cfg, seed, 1)[0]
    found = measure(Walk.of(cfg, Context()), values, [batch])
    sizes = prune.smaller_sizes(cfg, given)
    small, kept = prune.smaller_model(cfg, sizes), prune.choose(cfg, sizes, found)

    def logits(model, params):
        hidden, _ = families.of(model).hidden_states(model, params, batch)
        return families.of(model).logits(model, params, hidden)

    expected, got = logits(cfg, values), logits(small, prune.keep(cfg, small, Context(), values, kept))
    np.testing.assert_allclose(got, expected, atol=1e-4 * float(jnp.abs(expected).max()))  # sums in another order


WORDS = """--model.num_layers=2 --model.d_model=32 --model.num_heads=4 --model.d_ff=40 --train.steps=2
    --train.eval_every=2 --train.eval_steps=2 --train.ngram_baseline=false --optim.warmup_steps=1 --mesh.data=8
    --checkpoint.every=2 --data.batch_size=8"""
RUNS = {
    "encoder": "--model.family=encoder --model.tied_embeddings=true --data.source=path --data.path=F.txt "
    "--data.seq_len=32",
    "encoder_decoder": "--model.family=encoder_decoder --model.positions=relative --model.attention_scale=1.0 "
    "--data.source=pairs --data.path=F.jsonl --data.languages=[up] --data.seq_len=8 --data.target_len=8",
    "diffusion": "--model.family=diffusion --data.source=images --data.path=F.npz --data.seq_len=16 "
    "--sample.pictures=0",
    "contrastive": "--model.family=contrastive --model.norm=layer --data.source=images --data.path=F.npz "
    "--data.seq_len=16 --data.target_len=8",
    "gpt2": "--model.norm=layer --model.bias=true --model.gated=false --model.activation=gelu_tanh "
    "--model.tied_embeddings=true --model.qk_norm=false --model.positions=learned --model.max_positions=64 "
    "--data.source=path --data.path=F.txt --data.seq_len=32 --sample.prompts=[]",
}


def flags_of(folder, family):
    """Writes what a family reads, and returns the flags of a run of two steps."""
    rng = np.random.default_rng(0)
    (folder / "F.txt").write_text(trained.words())
    pairs = [{"source": f"ab{i}", "target": f"AB{i}", "language": "up"} for i in range(200)]
    (folder / "F.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    np.savez(folder / "F.npz", images=rng.random((40, 8, 8)), labels=np.arange(40) % 3)
    return [*WORDS.split(), *RUNS[family].replace("F.", f"{folder}/F.").split()]


@pytest.mark.slow
@pytest.mark.parametrize("family", RUNS)
def test_a_run_of_each_family_is_quantised_stored_and_trained_on(family, tmp_path, capsys):
    """Trained with rounded matrices, a run loses nothing when it is stored; it is used and trained like any other."""
    pytest.importorskip("safetensors")
    flags = flags_of(tmp_path, family)
    main(parse_config([*flags, f"--run.dir={tmp_path / 'run'}", "--train.qat=int4", "--train.qat_group=16"]))
    capsys.readouterr()
    words = ["compress", "quantize", str(tmp_path / "run"), str(tmp_path / "small"), "--group=16", "--method=rtn"]
    execute(words)
    said = capsys.readouterr().out
    assert "has codes that jaxstack alone reads" in said
    run, small = js.load(tmp_path / "run"), js.load(tmp_path / "small")
    assert small.evaluate().loss == run.evaluate().loss
    more = [*flags, f"--run.dir={tmp_path / 'more'}", f"--run.init_from={tmp_path / 'small'}"]
    main(parse_config(more))
    calibrated = [*words[:3], str(tmp_path / "gptq"), "--group=16", "--method=gptq", "--sequences=8"]
    execute(calibrated)
    assert "outputs off by at most" in capsys.readouterr().out
    execute(["compress", "prune", str(tmp_path / "run"), str(tmp_path / "sparse"), "--sparsity=2:4", "--sequences=8"])
    sparse = js.load(tmp_path / "sparse")
    stacks = families.of(sparse.model).stacks(sparse.model)
    declared = flat_spec(families.spec(sparse.model)).items()
    matrices = [path for path, p in declared if path.partition("/")[0] in stacks and is_compressed(p)]
    for path in matrices:
        zeros = np.mean(np.asarray(flatten(sparse.params)[path]) == 0)
        before = np.mean(np.asarray(flatten(run.params)[path]) == 0)  # some codes, or all of a new modulation
        assert 0.5 <= zeros <= max(0.6, before), path
    kept = [*flags, f"--run.dir={tmp_path / 'kept'}", f"--run.init_from={tmp_path / 'sparse'}"]
    main(parse_config([*kept, "--optim.keep_zeros=true"]))
    after = flatten(js.load(tmp_path / "kept").params)
    for path in matrices:  # the loaded run is rounded too, which makes more zeros than pruning has made
        assert np.mean(np.asarray(after[path]) == 0) >= 0.5, path
    for wrong, message in (("--method=awq", "awq moves factors|"), ("--weights=nf4 --group=64", "nf4 is stored as")):
        if family != "gpt2" or "nf4" in wrong:
            with pytest.raises(ConfigError, match=message):
                execute([*words[:3], str(tmp_path / "other"), *wrong.split()])
