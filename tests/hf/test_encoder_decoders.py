"""T5 and Switch Transformers of `transformers`: import, logits, gradients, training steps, export, padding, packing.

The weights are random and the lengths odd. The tolerances are those of tests/hf/test_parity.py.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxstack import families, hf
from jaxstack.cli.parser import execute
from jaxstack.common.tree import flatten, path_of
from jaxstack.config import Config, ConfigError, DataConfig, OptimConfig, SampleConfig, TrainConfig
from jaxstack.config.denoisers import DenoiserConfig
from jaxstack.config.reading.parse import parse_config
from jaxstack.data.seq2seq import Pair, make_batch
from jaxstack.families import encoder_decoder
from jaxstack.generate.translate import make_translate
from jaxstack.hf import peft
from jaxstack.hf import safetensors as tensor_files
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.models.ops import Ops, implementations
from jaxstack.models.params import Param
from jaxstack.training import assemble
from jaxstack.training.state import Recipe, init_state

torch = pytest.importorskip("torch", reason="needs the extra [parity]")
transformers = pytest.importorskip("transformers", reason="needs the extra [parity]")
safetensors = pytest.importorskip("safetensors.numpy", reason="needs the extra [parity]")

S, T, V = 45, 22, 61
CPU = Context(ops=Ops(**implementations("cpu")))
KINDS = {
    "t5": {"feed_forward_proj": "relu"},
    "1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "gelu": {"feed_forward_proj": "gelu", "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
    "switch": {"num_layers": 4, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 1},
    "switch of 3": {"num_decoder_layers": 3, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
}
"""Of the second one, the head is a matrix of its own, and what it reads is not scaled. In the last ones, one of two or
three layers has experts."""
NAMES = {kind: "switch_transformers" if kind.startswith("switch") else "t5" for kind in KINDS}


def build(kind: str, rng: np.random.Generator):
    """Builds their model with random values for every weight; a large epsilon shows where it is added.

    Scores are not scaled, so larger weights would make most of the softmax 0 or 1, and gradients noise.
    """
    sizes = {"vocab_size": V, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_heads": 4, "layer_norm_epsilon": 0.01}
    own = {"num_layers": 3, "num_decoder_layers": 2, "dropout_rate": 0.0} | KINDS[kind]
    if NAMES[kind] == "t5":
        config = transformers.T5Config(**sizes, **own)
    else:  # with room for all tokens
        config = transformers.SwitchTransformersConfig(**sizes, **own, num_experts=4, expert_capacity=1000)
    theirs = transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager").eval()
    if kind == "1.1":
        theirs.lm_head.weight = torch.nn.Parameter(torch.empty(V, 32))
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.copy_(torch.from_numpy(rng.normal(0, 1.0 if weight.ndim == 1 else 0.15, weight.shape)))
    return theirs


def saved(kind, rng, folder):
    """Returns their model, and ours from the folder that theirs is saved to."""
    theirs = build(kind, rng)
    if kind == "1.1":  # files of this version say that the head is not tied; newer programs write that it is
        theirs.config.tie_word_embeddings = False
    theirs.save_pretrained(folder)
    with hf.PretrainedFolder(folder) as source:
        return theirs, source.model, source.read_params()


def to_ours(cfg, named):
    """Returns their weights or gradients as a tree of ours."""
    theirs, spec = {name: tensor.numpy(force=True) for name, tensor in named}, families.spec(cfg)
    rows = hf.weight_map("switch_transformers" if cfg.moe.num_experts else "t5", spec)
    return jax.tree_util.tree_map_with_path(
        lambda keys, p: hf.read_param(p, rows[path_of(keys)], lambda name, index: theirs[name][index]),
        spec, is_leaf=lambda x: isinstance(x, Param),
    )  # fmt: skip


def with_gradients(theirs):
    """Returns their gradients by name; that of an expert without tokens is zero, as in our step."""
    for weight in theirs.parameters():
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
    return [(name, weight.grad) for name, weight in theirs.named_parameters()]


def random_pairs(rng) -> list[Pair]:
    sizes = ((30, 9), (17, 20), (5, 3), (41, 13))
    return [Pair(*(rng.integers(1, V, n).astype(np.int32) for n in both)) for both in sizes]


def their_logits(theirs, batch):
    given = {"input_ids": "encoder_tokens", "attention_mask": "encoder_segment_ids", "decoder_input_ids": "tokens"}
    return theirs(**{name: torch.from_numpy(batch[ours]).long() for name, ours in given.items()}).logits


def their_loss(theirs, batch):
    targets, weights = (torch.from_numpy(batch[name]).flatten() for name in ("targets", "loss_weights"))
    each = torch.nn.functional.cross_entropy(
        their_logits(theirs, batch).flatten(0, 1), targets.long(), reduction="none"
    )
    return (each * weights).sum() / weights.sum()


def our_logits(cfg, values, batch):
    hidden, _ = families.of(cfg).hidden_states(cfg, values, batch, CPU)
    return encoder_decoder.logits(cfg, values, hidden, CPU)


def assert_near(got, expected, tolerance):
    got, expected = flatten(got), flatten(expected)
    off = {path: np.linalg.norm(got[path] - e) / max(np.linalg.norm(e), 1e-6) for path, e in expected.items()}
    assert {path: value for path, value in off.items() if not value <= tolerance} == {}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_of_an_imported_model_and_its_export(kind, tmp_path, rng):
    theirs, cfg, values = saved(kind, rng, tmp_path / "saved")
    pairs = random_pairs(rng)
    batch = make_batch([[pair] for pair in pairs], S, T, 0)
    expected = their_logits(theirs, batch).numpy(force=True)
    real = batch["loss_weights"] > 0
    loss = their_loss(theirs, batch)
    loss.backward()
    wanted = to_ours(cfg, with_gradients(theirs))

    def work(values):
        hidden, _ = families.of(cfg).hidden_states(cfg, values, batch, CPU)
        total = encoder_decoder.loss(cfg, values, hidden, batch, CPU)["loss"]
        return total / batch["loss_weights"].sum(), encoder_decoder.logits(cfg, values, hidden, CPU)

    (got_loss, logits), grads = jax.jit(jax.value_and_grad(work, has_aux=True))(values)
    assert np.abs(np.asarray(logits) - expected)[real].max() <= 5e-5 * np.abs(expected[real]).max()
    assert float(got_loss) == pytest.approx(loss.item(), rel=2e-6)
    assert_near(grads, wanted, 1e-4)

    packed = np.asarray(jax.jit(lambda v, b: our_logits(cfg, v, b))(
        values, make_batch([[pairs[0], pairs[2]], [pairs[1]], [pairs[3]]], S, T, 0)))  # fmt: skip
    apart = [packed[0, :9], packed[1, :20], packed[0, 9:12], packed[2, :13]]
    for row, one in enumerate(apart):
        assert np.abs(one - expected[row, : len(one)]).max() <= 5e-5 * np.abs(expected[real]).max()

    (tmp_path / "out").mkdir()
    assert hf.save_pretrained(tmp_path / "out", cfg, values, "float32", S) == NAMES[kind]
    before, after = (safetensors.load_file(tmp_path / f / tensor_files.SINGLE) for f in ("saved", "out"))
    assert before.keys() == after.keys()
    assert [name for name in before if before[name].tobytes() != after[name].tobytes()] == []
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert np.array_equal(their_logits(again.eval(), batch).numpy(force=True)[real], expected[real])


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["t5", "1.1", "switch"])
def test_five_steps_of_adamw(kind, tmp_path, rng):
    """See test_parity.py: clipping, weight decay of matrices only, and AdamW with a large epsilon."""
    theirs, model, start = saved(kind, rng, tmp_path / "saved")
    model = dataclasses.replace(model, moe=dataclasses.replace(model.moe, aux_loss_weight=0.0))  # their loss has none
    optim = OptimConfig(lr=1e-2, warmup_steps=0, schedule="constant", weight_decay=0.1, clip_norm=1.0, eps=1e-4)
    data = DataConfig(seq_len=S, target_len=T, batch_size=4, denoisers=(DenoiserConfig(),))
    cfg = Config(model=model, data=data, optim=optim, train=TrainConfig(steps=5))
    state = dataclasses.replace(init_state(Recipe.of(cfg)), params=start)
    train_step = jax.jit(assemble.make_train_step(cfg, CPU))
    named = dict(theirs.named_parameters())
    decayed = {name for name, w in named.items() if w.ndim > 1 and "relative" not in name}
    groups = [
        {"params": [w for name, w in named.items() if name in decayed], "weight_decay": optim.weight_decay},
        {"params": [w for name, w in named.items() if name not in decayed], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.b1, optim.b2), eps=optim.eps)
    got, expected = [], []
    for _ in range(5):
        batch = make_batch([[pair] for pair in random_pairs(rng)], S, T, 0)
        state, metrics = train_step(state, batch)
        got.append(float(metrics["loss"]))
        adamw.zero_grad()
        loss = their_loss(theirs, batch)
        loss.backward()
        with_gradients(theirs)
        torch.nn.utils.clip_grad_norm_(named.values(), optim.clip_norm)
        adamw.step()
        expected.append(loss.item())
    np.testing.assert_allclose(got, expected, rtol=1e-4)
    end = to_ours(model, theirs.named_parameters())
    moved, they_moved = (jax.tree.map(np.subtract, values, start) for values in (state.params, end))
    assert_near(moved, they_moved, 1e-3)


@pytest.mark.matrix
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("kind", ["t5", "1.1", "switch"])
def test_written_tokens(kind, beams, tmp_path, rng):
    """Greedy tokens are theirs. Texts of beams are as likely: their length is that without the end, ours with it."""
    theirs, cfg, values = saved(kind, rng, tmp_path / "saved")
    inputs = [rng.integers(2, V, n).tolist() for n in (9, 30, 1)]
    write = make_translate(cfg, SampleConfig(tokens=12, temperature=0.0, beams=beams), start=0, stop=(1,))

    def value(row, written):
        given = torch.tensor([row]), torch.tensor([[0, *written[:-1]]])
        likely = theirs(input_ids=given[0], decoder_input_ids=given[1]).logits.log_softmax(-1)[0]
        return likely[range(len(written)), written].mean().item()

    for row, got in zip(inputs, write(values, inputs, 0), strict=True):
        (found,) = theirs.generate(
            input_ids=torch.tensor([row]), max_new_tokens=12, num_beams=beams, do_sample=False, eos_token_id=1,
            pad_token_id=0, decoder_start_token_id=0, early_stopping="never",
        ).tolist()  # fmt: skip
        expected = found[1 : found.index(1) + 1] if 1 in found else found[1:]
        assert got == expected or (beams > 1 and value(row, got) > value(row, expected))


@pytest.mark.parametrize(
    ("key", "value"),
    [("feed_forward_proj", "gated-tanh"), ("is_decoder", True), ("d_kv", 0), ("new_key", 1)],
)
def test_a_config_that_we_cannot_have_is_refused(key, value, tmp_path):
    transformers.T5Config(vocab_size=V).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ConfigError, match=f"{key}=|model.head_dim"):
        hf.PretrainedFolder(tmp_path)


@pytest.mark.parametrize("kind", ["t5", "switch"])
def test_a_folder_becomes_a_run_with_the_data_that_flags_name(kind, tmp_path, rng, capsys):
    """Without flags it learns hidden spans, so that an import needs no data."""
    build(kind, rng).save_pretrained(tmp_path / "saved")
    execute(["import", str(tmp_path / "saved"), str(tmp_path / "run")])
    assert ("expert_capacity=1000, because jaxstack drops no token" in capsys.readouterr().out) == (kind == "switch")
    execute(["import", str(tmp_path / "saved"), str(tmp_path / "other"), "--data.denoisers=[{rate: 0.5, span: 4}]"])
    rates = []
    for name in ("run", "other"):
        cfg = parse_config([f"--config={tmp_path / name / 'config.yaml'}"])
        assert cfg.model.moe.layers.every == (2 if kind == "switch" else 1)
        rates.append([denoiser.rate for denoiser in cfg.data.denoisers])
    assert rates == [[0.15], [0.5]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("kind", ["t5", "switch"])
def test_adapters_of_peft_are_read_and_written(kind, tmp_path, rng):
    """In both stacks, in self-attention and in cross-attention. The tolerance is that of logits in test_peft.py."""
    library = pytest.importorskip("peft", reason="needs the extra [parity]")
    base, adapter, out = (tmp_path / n for n in ("base", "adapter", "out"))
    build(kind, rng).save_pretrained(base)

    def load():
        load = transformers.AutoModelForSeq2SeqLM.from_pretrained
        return load(base, attn_implementation="eager").eval()

    how = {"r": 3, "lora_alpha": 6, "target_modules": ["SelfAttention.q", "EncDecAttention.v", "SelfAttention.o"]}
    theirs = library.get_peft_model(load(), library.LoraConfig(task_type="SEQ_2_SEQ_LM", **how)).eval()
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.from_numpy(rng.normal(0, 0.3, weight.shape)))
    theirs.save_pretrained(adapter)
    batch = make_batch([[pair] for pair in random_pairs(rng)], S, T, 0)
    real = batch["loss_weights"] > 0
    expected = their_logits(theirs, batch).numpy(force=True)[real]
    assert np.abs(expected - their_logits(load(), batch).numpy(force=True)[real]).max() > 0.1 * np.abs(expected).max()
    with hf.PretrainedFolder(base, adapter) as source:
        merged, found = source.read_params(), source.adapters
        cfg = dataclasses.replace(source.model, lora=found.lora)
    with hf.PretrainedFolder(base) as source:
        values = params.combine(peft.place(found, source.model, CPU), source.read_params())
    out.mkdir()
    peft.save_adapters(out, NAMES[kind], cfg, values, "float32", str(base))
    again = library.PeftModel.from_pretrained(load(), out).eval()
    logits = [our_logits(cfg.base, merged, batch), our_logits(cfg, values, batch)]
    for one in (
        *(np.asarray(each)[real][:, :V] for each in logits),
        their_logits(again, batch).numpy(force=True)[real],
    ):
        assert np.abs(one - expected).max() <= 2e-4 * np.abs(expected).max()
