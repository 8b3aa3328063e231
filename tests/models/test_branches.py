"""A trunk with two branches against its definition: an encoder and a decoder whose first layers are the same arrays."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import BRANCHES

import jaxstack
from jaxstack.cli.parser import execute
from jaxstack.common.tree import flatten
from jaxstack.config import Config, ConfigError, DataConfig, ModelConfig, RunConfig
from jaxstack.config.branches import BranchesConfig
from jaxstack.config.sentences import SentencesConfig
from jaxstack.data.loader import window_sizes
from jaxstack.data.mixture import MixtureReader
from jaxstack.data.tokens import Tokens
from jaxstack.families import branches, encoder
from jaxstack.models import decoder, params
from jaxstack.models.context import Context
from jaxstack.training.assemble import make_gradients

SEQ, ROWS, IDS = 16, 2, 60
IN_BRANCH = {"understanding": (encoder.FAMILY, "masked_"), "generation": (decoder.FAMILY, "")}


def text(rng, documents=40):
    ends = np.cumsum(rng.integers(20, 90, documents))
    return Tokens(rng.integers(0, IDS, ends[-1]).astype(np.uint16), np.append(0, ends[:-1]), ends, IDS)


def config(kind, packing=False, **own):
    model = dataclasses.replace(BRANCHES[kind], max_positions=SEQ if kind == "branches" else None)
    model = dataclasses.replace(model, branches=dataclasses.replace(model.branches, **own))
    data = DataConfig(seq_len=SEQ, batch_size=ROWS, packing=packing, mask_id=IDS, mask_share=0.3)
    return Config(model=model, data=data, run=RunConfig(init_from="x"))


def read(cfg, tokens, rows=None, step=1):
    sizes = window_sizes(cfg.model, cfg.data)
    return MixtureReader([tokens], ["text"], [(0, (1.0,))], sizes, seed=3).batches(rows)[step]


def alone(cfg: ModelConfig, values, name):
    """Returns a model of the present families, and its parameters, as the branch is defined: the trunk, then its own
    layers."""
    family = "encoder" if name == "understanding" else "decoder"
    model = dataclasses.replace(cfg, family=family, branches=BranchesConfig())
    if name == "generation":
        model = dataclasses.replace(model, sentences=SentencesConfig())
    layers = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), values["trunk"], values["branches"][name])
    tables = dict(values["embedding"])
    if name == "generation":
        tables.pop("norm")
    return model, {**values[name], "layers": layers, "embedding": tables}


@functools.partial(jax.jit, static_argnums=(0, 1))
def one_window(family, model, values, batch):
    hidden, _ = family.hidden_states(model, values, batch)
    return family.loss(model, values, hidden, batch, Context())


@pytest.mark.random
@pytest.mark.parametrize(
    ("kind", "packing"),
    [
        pytest.param("branches", True, marks=pytest.mark.matrix),
        pytest.param("deep_branches", False, marks=pytest.mark.matrix),
    ],
)
def test_losses_and_gradients_are_those_of_an_encoder_and_a_decoder(kind, packing, seed):
    """Each window has a call of its own, on arrays without the dimension of windows."""
    cfg = config(kind, packing)
    batch = read(cfg, text(np.random.default_rng(seed)))
    values = params.init(jax.random.key(seed), branches.spec(cfg.model))
    values = jax.tree.map(lambda a: a + 0.05 * jax.random.normal(jax.random.key(a.size), a.shape), values)

    def definition(values):
        terms = dict.fromkeys(("causal", "masked", *cfg.model.sentences.tasks), 0.0)
        for name, (family, prefix) in IN_BRANCH.items():
            model, own = alone(cfg.model, values, name)
            weights = batch["masked_weights" if prefix else "loss_weights"]
            for row in range(ROWS):
                for window in range(weights.shape[2]):
                    names = ("tokens", "targets", "positions", "segment_ids")
                    one = {n: batch[prefix + n][row : row + 1, :, window] for n in names if prefix + n in batch}
                    one["loss_weights"] = weights[row : row + 1, :, window]
                    for task in model.sentences.tasks:
                        answers = {f"{task}_{kind}": batch[f"{task}_{kind}"] for kind in ("targets", "weights")}
                        one |= {n: a[row : row + 1, :, window] for n, a in answers.items()}
                    sums = one_window(family, model, own, one)
                    main = "masked" if prefix else "causal"
                    terms[main] += sums.get("masked", sums.get("loss")) / weights.sum()
                    for task in model.sentences.tasks:
                        terms[task] += sums[task] / max(batch[f"{task}_weights"].sum(), 1)
        scales = {"masked": cfg.model.branches.masked_weight}
        scales |= dict.fromkeys(cfg.model.sentences.tasks, cfg.model.sentences.weight)
        return sum(scales.get(name, 1.0) * term for name, term in terms.items()), terms

    (want, terms), want_grads = jax.value_and_grad(definition, has_aux=True)(values)
    loss, grads, sums = make_gradients(cfg, Context())(values, batch)
    assert float(loss) == pytest.approx(float(want), rel=1e-5)
    for name, term in terms.items():
        assert float(sums[f"loss_{name}"]) == pytest.approx(float(term), rel=1e-5), name
    found, wanted = flatten(grads), flatten(want_grads)
    assert found.keys() == wanted.keys()
    for path, grad in found.items():
        assert np.linalg.norm(grad - wanted[path]) <= 2e-5 * max(np.linalg.norm(wanted[path]), 1e-3), path

    frozen = config(kind, packing, freeze_trunk=True)
    _, grads, _ = make_gradients(frozen, Context())(values, batch)
    left = {path for path in wanted if not path.startswith("trunk/")}
    assert flatten(grads).keys() == left
    np.testing.assert_allclose(grads["embedding"]["tokens"], wanted["embedding/tokens"], rtol=1e-4, atol=1e-6)


@pytest.mark.random
@pytest.mark.parametrize("packing", [False, True])
def test_windows_of_the_branches_are_neighbours_in_the_text(packing, seed):
    """A row is a text of three windows: two with hidden tokens, then one whose next tokens are learned."""
    tokens = text(np.random.default_rng(seed))
    cfg = config("branches", packing)
    assert cfg.model.branches.rates == (2, 1)
    plain = Config(model=ModelConfig(vocab_size=61), data=DataConfig(seq_len=3 * SEQ, batch_size=ROWS, packing=packing))
    rows, batch = read(plain, tokens), read(cfg, tokens)
    declared = branches.batch_spec(cfg.model, cfg.data)
    assert {n: (a.shape, a.dtype) for n, a in batch.items()} == {n: (a.shape, a.dtype) for n, a in declared.items()}
    for name, windows in (("masked_targets", [0, 1]), ("tokens", [2]), ("targets", [2]), ("loss_weights", [2])):
        source = rows["tokens" if name == "masked_targets" else name]
        for i, window in enumerate(windows):
            np.testing.assert_array_equal(batch[name][..., i], source[:, window * SEQ : (window + 1) * SEQ], name)
    hidden = batch["masked_weights"] == 1
    assert 0 < hidden.mean() < 0.6
    np.testing.assert_array_equal(batch["masked_tokens"][~hidden], batch["masked_targets"][~hidden])
    assert (batch["masked_tokens"][hidden] == IDS).mean() > 0.5
    for name in ("masked_positions", "positions") if packing else ():
        begins = np.diff(batch[name.replace("positions", "segment_ids")], axis=1, prepend=-1) != 0
        np.testing.assert_array_equal(batch[name] == 0, begins)
        assert (np.diff(batch[name], axis=1)[~begins[:, 1:]] == 1).all()
    part = read(cfg, tokens, rows=np.array([1]))
    for name, array in batch.items():
        np.testing.assert_array_equal(part[name], array[1:], name)


def losses(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {(line["step"], key): line[key] for line in lines for key in line if "loss" in key}


@pytest.mark.matrix
def test_a_run_is_resumed_bit_for_bit_and_its_branches_are_runs_of_their_own(tmp_path, rng, capsys):
    file = tmp_path / "text.txt"
    file.write_text("".join(chr(c) for c in rng.integers(97, 122, 9000)))
    flags = ["--config=configs/branches_quickstart.yaml", "--data.source=path", f"--data.path={file}"]
    flags += [
        "--model.num_layers=2",
        "--model.d_model=32",
        "--model.d_ff=64",
        "--data.seq_len=32",
        "--optim.name=adamw",
    ]
    flags += [
        "--train.eval_every=2",
        "--train.eval_steps=1",
        "--checkpoint.every=2",
        "--optim.warmup_steps=1",
        "--optim.schedule=constant",
        "--run.log_every=1",
    ]
    for name, steps in (("straight", 4), ("resumed", 2), ("resumed", 4)):
        execute(["train", *flags, f"--train.steps={steps}", f"--run.dir={tmp_path / name}"])
    found = losses(tmp_path / "straight")
    assert found == losses(tmp_path / "resumed")
    assert {"loss_causal", "loss_masked", "eval_loss_causal", "eval_loss_masked"} <= {key for _, key in found}
    execute(["report", str(tmp_path / "straight"), f"--out={tmp_path / 'report.html'}"])
    assert "causal and masked loss" in capsys.readouterr().out

    whole = jaxstack.load(tmp_path / "straight")
    for branch in branches.BRANCHES:
        execute(["export", str(tmp_path / "straight"), str(tmp_path / branch), f"--branch={branch}"])
        alone = jaxstack.load(tmp_path / branch)
        for path, value in flatten(alone.params).items():
            group, _, rest = path.partition("/")
            if group == "layers":
                parts = flatten(whole.params["trunk"])[rest], flatten(whole.params["branches"][branch])[rest]
                np.testing.assert_array_equal(value, np.concatenate(parts))
            else:
                there = whole.params if group == "embedding" else whole.params[branch]
                np.testing.assert_array_equal(value, flatten(there)[path])
        assert np.isfinite(alone.evaluate().loss)
    text = jaxstack.load(tmp_path / "generation").generate("abc", tokens=3, temperature=0.0)
    assert len(text) >= 3
    continued = tmp_path / "understanding"
    execute(["train", f"--config={continued / 'config.yaml'}", "--train.steps=1", f"--run.dir={continued}"])
    with pytest.raises(ConfigError, match="without branches"):
        execute(["export", str(continued), str(tmp_path / "again"), "--branch=generation"])

    frozen = [f"--run.init_from={tmp_path / 'straight'}", "--model.branches.freeze_trunk=true", "--train.steps=2"]
    execute(["train", *flags, *frozen, f"--run.dir={tmp_path / 'frozen'}"])
    after = jaxstack.load(tmp_path / "frozen").params
    jax.tree.map(np.testing.assert_array_equal, after["trunk"], whole.params["trunk"])
    assert not np.array_equal(after["embedding"]["tokens"], whole.params["embedding"]["tokens"])


def test_each_window_has_dropout_of_its_own():
    """Equal numbers would drop the same units in two windows, on every mesh alike."""
    key = np.asarray(jax.random.key_data(jax.random.key(0)))
    batch = {"masked_tokens": np.zeros((4, SEQ, 3), np.int32), "tokens": np.zeros((4, SEQ, 2), np.int32)}
    batch |= {"rows": np.arange(4, 8, dtype=np.int32), "key": key}
    made = {branch: branches.of_branch(batch, branch) for branch in branches.BRANCHES}
    assert [sorted(made[branch]["rows"].tolist()) for branch in branches.BRANCHES] == [
        [*range(12, 24)],
        [*range(8, 16)],
    ]
    assert (made["understanding"]["key"] != made["generation"]["key"]).any()
