"""The model's switches against Hugging Face's code: GPT-2, Llama 3, Qwen3 and Gemma 2 with the same random weights.

A table per family says where each of our parameters lies among theirs. Logits, loss, every gradient and five steps of
AdamW then have to agree in float32. Needs the extra `[parity]`.

Suffixes: D width, H query heads, G key/value heads, K head width, F hidden width of the MLP.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import FAMILIES

from jaxstack import losses, model, params, step
from jaxstack.config import Config, DataConfig, ModelConfig, OptimConfig, RopeScaling, TrainConfig
from jaxstack.context import Context
from jaxstack.tree import flatten, path_of

torch = pytest.importorskip("torch", reason="needs the extra [parity]")
transformers = pytest.importorskip("transformers", reason="needs the extra [parity]")

pytestmark = pytest.mark.slow

# More than one chunk of the chunked kernels (64 rows of attention, 512 tokens of cross-entropy), neither a multiple.
BATCH, LENGTH = 8, 72

CONTEXTS = {
    "xla": Context(),
    "cpu": Context(attention="chunked", cross_entropy="chunked"),
}

# A large epsilon, so that where it is added shows.
CONFIGS: dict[str, ModelConfig] = {
    family: dataclasses.replace(FAMILIES[family], norm_eps=0.01, **changes)
    for family, changes in {
        "gpt2": {"max_positions": 80},
        # Wavelengths 6, 20, 63 and 199 tokens: one is left alone, one lies between, two are slowed in full.
        "llama3": {"rope_theta": 100.0, "rope_scaling": RopeScaling(factor=4.0, original_max_position=32)},
        "qwen3": {"tied_embeddings": True},
        "gemma2": {"num_layers": 4},  # two periods of a window of 6 tokens and full attention
    }.items()
}


def their_config(family: str, cfg: ModelConfig):
    """The configuration of Hugging Face's model that `cfg` should be equal to."""
    common = {"vocab_size": cfg.vocab, "attn_implementation": "eager", "use_cache": False}
    common |= {"bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": cfg.tied_embeddings}
    if family == "gpt2":
        return transformers.GPT2Config(
            **common,
            n_layer=cfg.num_layers,
            n_embd=cfg.d_model,
            n_head=cfg.num_heads,
            n_positions=cfg.max_positions,
            layer_norm_epsilon=cfg.norm_eps,
        )
    common |= {
        "num_hidden_layers": cfg.num_layers,
        "hidden_size": cfg.d_model,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_width,
        "intermediate_size": cfg.ff_width,
        "rms_norm_eps": cfg.norm_eps,
        "max_position_embeddings": 4 * LENGTH,
        # Gemma's default is 0, and the embedding then passes no gradient to the row of that token.
        "pad_token_id": None,
    }
    rope = {"rope_type": "default", "rope_theta": cfg.rope_theta}
    if family == "llama3":
        scaling = cfg.rope_scaling
        rope |= {"rope_type": "llama3", "factor": scaling.factor}
        rope |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
        rope |= {"original_max_position_embeddings": scaling.original_max_position}
        return transformers.LlamaConfig(**common, rope_parameters=rope)
    if family == "qwen3":
        return transformers.Qwen3Config(**common, rope_parameters=rope)
    return transformers.Gemma2Config(
        **common,
        rope_parameters=rope,
        query_pre_attn_scalar=round(cfg.attention_scale**-2),
        attn_logit_softcapping=cfg.attention_softcap,
        final_logit_softcapping=cfg.logit_softcap,
        sliding_window=cfg.windows[0],  # even layers slide and see as many tokens, themselves included
    )


# How one of their weights becomes one of ours. `nn.Linear` keeps [out, in]; GPT-2's Conv1D keeps [in, out] as we do.


def same(cfg, w):
    return w


def transposed(cfg, w):
    return w.T


def to_heads(cfg, w):
    """[H * K, D] to [D, H, K]."""
    return w.T.reshape(cfg.d_model, -1, cfg.head_width)


def from_heads(cfg, w):
    """[D, H * K] to [H, K, D]."""
    return from_heads_conv(cfg, w.T)


def from_heads_conv(cfg, w):
    """[H * K, D] to [H, K, D]."""
    return w.reshape(-1, cfg.head_width, cfg.d_model)


def third(i):
    """Queries, keys or values of [..., 3 * H * K] as [..., H, K]."""
    return lambda cfg, w: np.split(w, 3, axis=-1)[i].reshape(*w.shape[:-1], -1, cfg.head_width)


GPT2 = {
    "embedding/tokens": ("transformer.wte.weight", same),
    "embedding/positions": ("transformer.wpe.weight", same),
    "layers/attention_norm/scale": ("transformer.h.{}.ln_1.weight", same),
    "layers/attention_norm/bias": ("transformer.h.{}.ln_1.bias", same),
    "layers/attention/w_q": ("transformer.h.{}.attn.c_attn.weight", third(0)),
    "layers/attention/w_k": ("transformer.h.{}.attn.c_attn.weight", third(1)),
    "layers/attention/w_v": ("transformer.h.{}.attn.c_attn.weight", third(2)),
    "layers/attention/w_o": ("transformer.h.{}.attn.c_proj.weight", from_heads_conv),
    "layers/attention/b_q": ("transformer.h.{}.attn.c_attn.bias", third(0)),
    "layers/attention/b_k": ("transformer.h.{}.attn.c_attn.bias", third(1)),
    "layers/attention/b_v": ("transformer.h.{}.attn.c_attn.bias", third(2)),
    "layers/attention/b_o": ("transformer.h.{}.attn.c_proj.bias", same),
    "layers/mlp_norm/scale": ("transformer.h.{}.ln_2.weight", same),
    "layers/mlp_norm/bias": ("transformer.h.{}.ln_2.bias", same),
    "layers/mlp/w_up": ("transformer.h.{}.mlp.c_fc.weight", same),
    "layers/mlp/b_up": ("transformer.h.{}.mlp.c_fc.bias", same),
    "layers/mlp/w_down": ("transformer.h.{}.mlp.c_proj.weight", same),
    "layers/mlp/b_down": ("transformer.h.{}.mlp.c_proj.bias", same),
    "final_norm/scale": ("transformer.ln_f.weight", same),
    "final_norm/bias": ("transformer.ln_f.bias", same),
}
LLAMA_TIED = {
    "embedding/tokens": ("model.embed_tokens.weight", same),
    "layers/attention_norm/scale": ("model.layers.{}.input_layernorm.weight", same),
    "layers/attention/w_q": ("model.layers.{}.self_attn.q_proj.weight", to_heads),
    "layers/attention/w_k": ("model.layers.{}.self_attn.k_proj.weight", to_heads),
    "layers/attention/w_v": ("model.layers.{}.self_attn.v_proj.weight", to_heads),
    "layers/attention/w_o": ("model.layers.{}.self_attn.o_proj.weight", from_heads),
    "layers/mlp_norm/scale": ("model.layers.{}.post_attention_layernorm.weight", same),  # before the MLP, all the same
    "layers/mlp/w_gate": ("model.layers.{}.mlp.gate_proj.weight", transposed),
    "layers/mlp/w_up": ("model.layers.{}.mlp.up_proj.weight", transposed),
    "layers/mlp/w_down": ("model.layers.{}.mlp.down_proj.weight", transposed),
    "final_norm/scale": ("model.norm.weight", same),
}
TABLES = {
    "gpt2": GPT2,
    "llama3": LLAMA_TIED | {"head/w": ("lm_head.weight", transposed)},
    "qwen3": LLAMA_TIED
    | {
        "layers/attention/q_norm/scale": ("model.layers.{}.self_attn.q_norm.weight", same),
        "layers/attention/k_norm/scale": ("model.layers.{}.self_attn.k_norm.weight", same),
    },
    "gemma2": LLAMA_TIED
    | {  # here Llama's name means what it says
        "layers/attention_post_norm/scale": ("model.layers.{}.post_attention_layernorm.weight", same),
        "layers/mlp_norm/scale": ("model.layers.{}.pre_feedforward_layernorm.weight", same),
        "layers/mlp_post_norm/scale": ("model.layers.{}.post_feedforward_layernorm.weight", same),
    },
}


def to_ours(family: str, theirs: dict[str, np.ndarray]):
    """Their named arrays (weights or gradients: the map is linear) as our tree."""
    cfg = CONFIGS[family]

    def one(path: str) -> np.ndarray:
        name, transform = TABLES[family][path]
        if "{}" in name:
            return np.stack([transform(cfg, theirs[name.format(i)]) for i in range(cfg.num_layers)])
        return transform(cfg, theirs[name])

    return jax.tree_util.tree_map_with_path(lambda keys, _: one(path_of(keys)), params.abstract(model.spec(cfg)))


def build(family: str, rng: np.random.Generator):
    """Their model with every weight random: no zeros and ones for anything to hide behind."""
    theirs = transformers.AutoModelForCausalLM.from_config(their_config(family, CONFIGS[family])).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.copy_(torch.from_numpy(rng.normal(0, 1.0 if weight.ndim == 1 else 0.3, weight.shape)))
    return theirs


def copied(tensors) -> dict[str, np.ndarray]:
    """Copies: JAX may read NumPy's memory in place, and torch's optimizer writes there."""
    return {name: tensor.numpy(force=True).copy() for name, tensor in tensors}


def random_batch(cfg: ModelConfig, rng: np.random.Generator) -> dict[str, np.ndarray]:
    ids = rng.integers(0, cfg.vocab, (BATCH, LENGTH + 1))
    weights = rng.random((BATCH, LENGTH)).astype(np.float32)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": weights}


def their_loss(theirs, batch: dict[str, np.ndarray]):
    """Mean over weighted tokens of the negative log-likelihood. (Their own `labels=` shifts, and takes no weights.)"""
    tokens, targets, weights = (torch.from_numpy(batch[name]) for name in ("tokens", "targets", "weights"))
    logits = theirs(tokens).logits
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (nll * weights.flatten()).sum() / weights.sum()


def deviations(got, expected) -> dict[str, float]:
    """Relative norm of the difference of each parameter; of stacked ones the worst layer's."""
    found = {}
    expected = flatten(expected)
    for path, value in flatten(got).items():
        rows = len(value) if path.startswith("layers/") else 1
        # A key bias adds the same score to every key of a query, which softmax ignores: its true gradient is zero and
        # what is there is rounding, to be measured against the query bias's.
        scale = expected[path.replace("/b_k", "/b_q")].reshape(rows, -1)
        difference = np.asarray(value - expected[path]).reshape(rows, -1)
        found[path] = float((np.linalg.norm(difference, axis=1) / np.linalg.norm(scale, axis=1)).max())
    return found


@pytest.mark.parametrize("family", CONFIGS)
def test_the_tables_use_every_weight_once(family):
    """Every element of their weights gets a number, and ours hold each number once."""
    theirs = copied(build(family, np.random.default_rng(0)).named_parameters())
    ends = np.cumsum([weight.size for weight in theirs.values()])
    numbers = {n: np.arange(e - w.size, e).reshape(w.shape) for (n, w), e in zip(theirs.items(), ends, strict=True)}
    ours = to_ours(family, numbers)
    declared = params.abstract(model.spec(CONFIGS[family]))
    assert TABLES[family].keys() == flatten(declared).keys()
    assert jax.tree.map(np.shape, ours) == jax.tree.map(np.shape, declared)
    np.testing.assert_array_equal(np.sort(np.concatenate([x.ravel() for x in jax.tree.leaves(ours)])), range(ends[-1]))


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("family", CONFIGS)
def test_logits(family, context, rng):
    cfg, theirs = CONFIGS[family], build(family, rng)
    values = to_ours(family, copied(theirs.named_parameters()))
    tokens = random_batch(cfg, rng)["tokens"]
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
    got, _ = jax.jit(lambda v, t: model.forward(cfg, v, t, CONTEXTS[context]))(values, tokens)
    print(
        "LOGITS", family, context, float(np.abs(got - expected).max() / np.abs(expected).max()), np.abs(expected).max()
    )
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("family", CONFIGS)
def test_loss_and_every_gradient(family, context, rng):
    cfg, theirs = CONFIGS[family], build(family, rng)
    values = to_ours(family, copied(theirs.named_parameters()))
    batch = random_batch(cfg, rng)

    def loss_fn(values):
        return losses.next_token(cfg, values, batch, CONTEXTS[context])[0] / batch["weights"].sum()

    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(values)
    their = their_loss(theirs, batch)
    their.backward()
    d = deviations(grads, to_ours(family, copied((n, w.grad) for n, w in theirs.named_parameters())))
    print(
        "GRADS",
        family,
        context,
        "loss",
        float(abs(loss - their.item()) / their.item()),
        sorted(d.items(), key=lambda x: -x[1])[:4],
    )
    assert abs(loss - their.item()) <= 1e-6 * their.item()
    assert {path: d for path, d in d.items() if d > 1e-4} == {}


@pytest.mark.parametrize("family", CONFIGS)
def test_five_steps_of_adamw(family, rng):
    optim = OptimConfig(lr=1e-2, warmup_steps=0, schedule="constant", weight_decay=0.1, clip_norm=1.0, eps=1e-4)
    cfg = Config(
        model=CONFIGS[family],
        data=DataConfig(seq_len=LENGTH, batch_size=BATCH),
        optim=optim,
        train=TrainConfig(steps=5),
    )
    theirs = build(family, rng)
    start = to_ours(family, copied(theirs.named_parameters()))
    # Decay by shape: their biases and norms are vectors, their matrices and tables are not.
    groups = [
        {"params": [w for w in theirs.parameters() if w.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [w for w in theirs.parameters() if w.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.b1, optim.b2), eps=optim.eps)
    zero = jnp.zeros((), jnp.int32)
    state = step.TrainState(zero, zero, zero, start, step.make_optimizer(cfg).init(start))
    train_step = jax.jit(step.make_train_step(cfg, Context()))
    for _ in range(cfg.train.steps):
        batch = random_batch(cfg.model, rng)
        state, metrics = train_step(state, batch)
        adamw.zero_grad()
        loss = their_loss(theirs, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), optim.clip_norm)
        adamw.step()
        print(
            "STEP",
            family,
            float(metrics["loss"]),
            loss.item() / float(metrics["loss"]) - 1,
            norm.item() / float(metrics["grad_norm"]) - 1,
            norm.item(),
        )
    end = to_ours(family, copied(theirs.named_parameters()))
    d = deviations(jax.tree.map(lambda a, b: a - b, state.params, start), jax.tree.map(lambda a, b: a - b, end, start))
    print("MOVED", family, sorted(d.items(), key=lambda x: -x[1])[:5])
