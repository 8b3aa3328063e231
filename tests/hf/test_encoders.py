"""BERT, RoBERTa and ModernBERT as `transformers` saves them: import, logits, gradients, training steps and export.

Each has its masked-LM head, or a classifier of sequences or of tokens; BERT also a head for pairs of sentences.
The weights are random, rows have odd lengths and padding. The tolerances are those of tests/hf/test_parity.py.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxstack import hf
from jaxstack.cli.parser import execute
from jaxstack.common.tree import flatten, path_of
from jaxstack.config import Config, ConfigError, DataConfig, OptimConfig, TrainConfig
from jaxstack.config.reading.parse import parse_config
from jaxstack.families import encoder
from jaxstack.hf import safetensors as tensor_files
from jaxstack.models.context import Context
from jaxstack.models.ops import Ops, implementations
from jaxstack.models.params import Param
from jaxstack.training import assemble
from jaxstack.training.state import Recipe, init_state

torch = pytest.importorskip("torch", reason="needs the extra [parity]")
transformers = pytest.importorskip("transformers", reason="needs the extra [parity]")
safetensors = pytest.importorskip("safetensors.numpy", reason="needs the extra [parity]")

B, S, V, PAD = 3, 19, 67, {"bert": 0, "roberta": 1, "modernbert": 0}
COMMON = {"vocab_size": V, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 40}
CPU = Context(ops=Ops(**implementations("cpu")))
LABELS = ("down", "level", "up")
HEADS = [
    *((family, "") for family in PAD),
    ("bert", "sequence"),
    ("bert", "pairs"),
    ("bert", "token"),
    *((family, each) for family in ("roberta", "modernbert") for each in ("sequence", "token")),
    ("modernbert", "mean"),
]
"""Families, and what their labels are of; empty for masked language models, `pairs` if these learn pairs, too, and
`mean` if a sequence is classified by the mean of its tokens."""
CLASSES = {"sequence": "SequenceClassification", "mean": "SequenceClassification", "token": "TokenClassification"}


def build(family: str, rng: np.random.Generator, each: str = ""):
    """Builds their model with random values for every weight; a large epsilon shows where it is added."""
    own = {**COMMON, "num_hidden_layers": 4 if family == "modernbert" else 2, "pad_token_id": PAD[family]}
    own |= dict.fromkeys(("bos_token_id", "eos_token_id"))
    if each in CLASSES:
        own |= {"id2label": dict(enumerate(LABELS)), "label2id": {label: i for i, label in enumerate(LABELS)}}
    if family == "modernbert":
        own |= dict.fromkeys(("cls_token_id", "sep_token_id"))
        # Layers 1 and 2 of 4 have windows of three tokens to each side.
        config = transformers.ModernBertConfig(
            **own,
            local_attention=6,
            norm_eps=0.01,
            global_rope_theta=1000.0,
            local_rope_theta=100.0,
            classifier_pooling="mean" if each == "mean" else "cls",
        )
    else:
        kind = {"bert": transformers.BertConfig, "roberta": transformers.RobertaConfig}[family]
        types = 2 if family == "bert" else 1
        config = kind(**own, type_vocab_size=types, max_position_embeddings=S + 4, layer_norm_eps=0.01)
    theirs = their_class(each).from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.copy_(torch.from_numpy(rng.normal(0, 1.0 if weight.ndim == 1 else 0.3, weight.shape)))
    return theirs


def their_class(each: str):
    if each == "pairs":
        return transformers.AutoModelForPreTraining
    return getattr(transformers, f"AutoModelFor{CLASSES.get(each, 'MaskedLM')}")


def read(folder):
    with hf.PretrainedFolder(folder) as source:
        return source.model, source.read_params()


def saved(family, rng, folder, each=""):
    """Returns their model, and ours from the folder that theirs is saved to."""
    theirs = build(family, rng, each)
    theirs.save_pretrained(folder)
    return theirs, *read(folder)


def to_ours(family, cfg, named):
    """Returns their weights or gradients as a tree of ours."""
    theirs, spec = {name: tensor.numpy(force=True) for name, tensor in named if tensor is not None}, encoder.spec(cfg)
    rows = hf.weight_map(family, spec)
    return jax.tree_util.tree_map_with_path(
        lambda keys, p: hf.read_param(p, rows[path_of(keys)], lambda name, index: theirs[name][index]),
        spec, is_leaf=lambda x: isinstance(x, Param),
    )  # fmt: skip


def random_batch(family, cfg, rng):
    real = np.arange(S) < np.array([S, 11, 1])[:, None]
    tokens = np.where(real, rng.integers(2, V, (B, S)), PAD[family]).astype(np.int32)
    weights = (real & (rng.random((B, S)) < 0.5)).astype(np.float32)
    weights[:, 0] = 1
    if cfg.labels and cfg.label_each == "sequence":
        weights[:, 1:] = 0
    batch = {
        "tokens": tokens,
        "targets": rng.integers(0, cfg.classes, (B, S)).astype(np.int32),
        "loss_weights": weights,
    }
    batch["segment_ids"] = real.astype(np.int32)
    for task in cfg.sentences.tasks:
        batch[f"{task}_targets"] = rng.integers(0, 2, (B, S)).astype(np.int32)
        batch[f"{task}_weights"] = np.zeros((B, S), np.float32)
        batch[f"{task}_weights"][:, 0] = 1
    if cfg.token_types == 2:
        batch["token_types"] = rng.integers(0, 2, (B, S)).astype(np.int32)
    return batch


def their_output(theirs, batch):
    given = {"input_ids": batch["tokens"], "attention_mask": batch["segment_ids"]}
    if "token_types" in batch:
        given["token_type_ids"] = batch["token_types"]
    return theirs(**{name: torch.from_numpy(value).long() for name, value in given.items()})


def their_logits(theirs, batch, output=None):
    """Returns their logits [B, S, V]; a classifier of sequences has S = 1."""
    output = output or their_output(theirs, batch)
    logits = output.logits if "logits" in output else output.prediction_logits
    return logits if logits.ndim == 3 else logits[:, None]


def their_loss(theirs, batch):
    output = their_output(theirs, batch)
    logits = their_logits(theirs, batch, output)
    targets, weights = (torch.from_numpy(batch[name][:, : logits.shape[1]]) for name in ("targets", "loss_weights"))
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.long().flatten(), reduction="none")
    loss = (each * weights.flatten()).sum() / weights.sum()
    if "next_targets" not in batch:
        return loss
    answers = torch.from_numpy(batch["next_targets"][:, 0]).long()
    return loss + torch.nn.functional.cross_entropy(output.seq_relationship_logits, answers)


def assert_near(got, expected, tolerance, family):
    """Compares by parameter and layer. A key's bias adds the same to all scores, and has the noise of the query's."""
    got, expected, off = flatten(got), flatten(expected), {}
    for path in got:
        rows = slice(1 if family == "modernbert" and path == "layers/attention_norm/scale" else 0, None)
        lead = len(got[path]) if path.startswith("layers/") else 1
        scale = np.reshape(expected[path.replace("/b_k", "/b_q")], (lead, -1))[rows]
        difference = np.reshape(got[path] - expected[path], (lead, -1))[rows]
        off[path] = (np.linalg.norm(difference, axis=1) / np.linalg.norm(scale, axis=1)).max()
    assert {path: value for path, value in off.items() if not value <= tolerance} == {}


@pytest.mark.matrix(quick=["[bert-]"])
@pytest.mark.parametrize(("family", "each"), HEADS)
def test_logits_and_gradients_of_an_imported_model_and_its_export(family, each, tmp_path, rng):
    theirs, cfg, values = saved(family, rng, tmp_path / "saved", each)
    assert cfg.labels == (LABELS if each in CLASSES else ())
    assert cfg.label_each == ("token" if each == "token" else "sequence")
    assert cfg.label_pooling == ("mean" if each == "mean" else "first")
    assert cfg.windows == ((0, 4, 4) if family == "modernbert" else (0,))  # four layers repeat three windows
    assert cfg.sentences.tasks == (("next",) if each == "pairs" else ())
    batch = random_batch(family, cfg, rng)
    expected = their_logits(theirs, batch).numpy(force=True)
    real = batch["segment_ids"][:, : expected.shape[1]] == 1
    expected = expected[real]
    loss = their_loss(theirs, batch)
    loss.backward()
    wanted = to_ours(family, cfg, ((name, weight.grad) for name, weight in theirs.named_parameters()))

    def work(values):
        hidden, _ = encoder.FAMILY.hidden_states(cfg, values, batch, CPU)
        sums = encoder.loss(cfg, values, hidden, batch, CPU)
        total = sum(sums[term.name] / batch[term.weights].sum() for term in cfg.objective.terms)
        return total, encoder.logits(cfg, values, hidden, CPU)

    (got_loss, logits), grads = jax.jit(jax.value_and_grad(work, has_aux=True))(values)
    assert (
        np.abs(np.asarray(logits)[:, : real.shape[1], : cfg.classes][real] - expected).max()
        <= 5e-5 * np.abs(expected).max()
    )
    assert float(got_loss) == pytest.approx(loss.item(), rel=2e-6)
    assert_near(grads, wanted, 1e-4, family)

    (tmp_path / "out").mkdir()
    assert hf.save_pretrained(tmp_path / "out", cfg, values, "float32", S) == family
    before, after = (safetensors.load_file(tmp_path / f / tensor_files.SINGLE) for f in ("saved", "out"))
    assert before.keys() == after.keys()
    assert [name for name in before if before[name].tobytes() != after[name].tobytes()] == []
    again = their_class(each).from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert np.array_equal(their_logits(again, batch).numpy(force=True)[real], expected)
    assert again.config.id2label == theirs.config.id2label


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "each"), HEADS)
def test_five_steps_of_adamw(family, each, tmp_path, rng):
    """See test_parity.py: clipping, weight decay of matrices only, and AdamW with a large epsilon."""
    theirs, model, start = saved(family, rng, tmp_path / "saved", each)
    optim = OptimConfig(lr=1e-2, warmup_steps=0, schedule="constant", weight_decay=0.1, clip_norm=1.0, eps=1e-4)
    data = DataConfig(seq_len=S, batch_size=B, **({"source": "labels", "path": "x"} if model.labels else {}))
    cfg = Config(model=model, data=data, optim=optim, train=TrainConfig(steps=5))
    state = dataclasses.replace(init_state(Recipe.of(cfg)), params=start)
    train_step = jax.jit(assemble.make_train_step(cfg, CPU))
    weights = list(theirs.parameters())
    groups = [
        {"params": [w for w in weights if w.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [w for w in weights if w.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.b1, optim.b2), eps=optim.eps)
    got, expected = [], []
    for _ in range(5):
        batch = random_batch(family, model, rng)
        state, metrics = train_step(state, batch)
        got.append(float(metrics["loss"]))
        adamw.zero_grad()
        loss = their_loss(theirs, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, optim.clip_norm)
        adamw.step()
        expected.append(loss.item())
    np.testing.assert_allclose(got, expected, rtol=1e-4)
    end = to_ours(family, model, theirs.named_parameters())
    moved, they_moved = (jax.tree.map(np.subtract, values, start) for values in (state.params, end))
    assert_near(moved, they_moved, 1e-3, family)


def test_a_classifier_becomes_a_run_with_the_labels_that_flags_name(tmp_path, rng):
    build("bert", rng, "sequence").save_pretrained(tmp_path / "saved")
    execute(["import", str(tmp_path / "saved"), str(tmp_path / "run")])
    flags = ["--data.path=texts.jsonl", "--data.seq_len=16"]
    execute(["import", str(tmp_path / "saved"), str(tmp_path / "other"), *flags])
    for name, path in (("run", "labels.jsonl"), ("other", "texts.jsonl")):
        cfg = parse_config([f"--config={tmp_path / name / 'config.yaml'}"])
        assert (cfg.model.labels, cfg.data.source, cfg.data.path) == (LABELS, "labels", path)


def test_names_and_tensors_that_older_files_have(tmp_path, rng):
    """Older files of BERT have gamma and beta, positions, heads for sentences, and copies of what is tied."""
    _, _, values = saved("bert", rng, tmp_path / "saved")
    path = tmp_path / "saved" / tensor_files.SINGLE
    tensors = safetensors.load_file(path)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    old["bert.embeddings.position_ids"] = np.arange(S + 4)[None]
    old["bert.pooler.dense.weight"] = old["cls.seq_relationship.weight"] = np.ones((2, 32), np.float32)
    old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"]
    old["cls.predictions.decoder.bias"] = old["cls.predictions.bias"]
    safetensors.save_file(old, path)
    for got, expected in zip(jax.tree.leaves(read(path.parent)[1]), jax.tree.leaves(values), strict=True):
        np.testing.assert_array_equal(got, expected)
    old["cls.predictions.decoder.bias"] = old["cls.predictions.bias"] + 1
    safetensors.save_file(old, path)
    with pytest.raises(ConfigError, match=r"cls.predictions.decoder.bias is not equal to cls.predictions.bias"):
        read(path.parent)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("roberta", "pad_token_id", 0),
        ("roberta", "hidden_act", "silu"),
        ("bert", "is_decoder", True),
        ("bert", "position_embedding_type", "relative_key"),
        ("modernbert", "local_attention", 7),
        ("modernbert", "norm_bias", True),
        ("modernbert", "layer_types", ["full_attention"]),
        ("modernbert", "global_rope_theta", -1.0),
        ("bert", "problem_type", "regression"),
        ("bert", "id2label", {"1": "a", "2": "b"}),
        ("modernbert", "classifier_pooling", "max"),
    ],
)
def test_a_config_that_we_cannot_have_is_refused(family, key, value, tmp_path, rng):
    build(family, rng).config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    if key in ("problem_type", "id2label", "classifier_pooling"):
        values["architectures"] = [hf.FAMILIES[family].classifiers["sequence"]]
    if key == "global_rope_theta":
        del values["rope_parameters"]
    path.write_text(json.dumps(values | {key: value}))
    with pytest.raises(ConfigError, match=rf"{key}={json.dumps(value)[:10]}".replace("[", r"\[").replace("{", r"\{")):
        hf.PretrainedFolder(tmp_path)
