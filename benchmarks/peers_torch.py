"""Trains the jobs of the CPU comparison in PyTorch, eager or compiled, one optimizer step at a time.

gpt    The block of nanoGPT as configured by its own jobs: LayerNorm and linear layers without biases, learned
       positions, exact GELU, `scaled_dot_product_attention`, head tied to the embedding.
llama  `transformers.LlamaForCausalLM` with `attn_implementation="sdpa"`.
bert   `transformers.BertForMaskedLM`, likewise, without dropout. All tokens are targets.
t5     `transformers.T5ForConditionalGeneration` without dropout: half as many targets as inputs.

All use float32, the fused AdamW of `torch.optim`, and gradients clipped to a global norm of 1. Weights and batch are
those that jaxstack's side has written (`train_cpu.write_start`).
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Job:
    """The sizes of a model and of its fixed batch: layers, features, heads, sequences and tokens."""

    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    batch: int
    seq_len: int
    vocab: int


JOBS = {
    "J1": Job("gpt", 4, 128, 4, 4, 512, batch=12, seq_len=64, vocab=256),  # the CPU job of nanoGPT
    "J2": Job("gpt", 6, 384, 6, 6, 1536, batch=16, seq_len=256, vocab=256),  # its Shakespeare job, without dropout
    "J3": Job("llama", 8, 512, 8, 4, 1408, batch=4, seq_len=512, vocab=32_000),
    "E1": Job("bert", 4, 256, 4, 4, 1024, batch=16, seq_len=128, vocab=8192),
    "T1": Job("t5", 3, 256, 4, 4, 1024, batch=16, seq_len=128, vocab=8192),  # three layers of each stack
}
MODES = ("eager", "compile")


class Block(nn.Module):
    """The transformer block of nanoGPT."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.heads = job.heads
        self.norm_1 = nn.LayerNorm(job.width, bias=False)
        self.qkv = nn.Linear(job.width, 3 * job.width, bias=False)
        self.out = nn.Linear(job.width, job.width, bias=False)
        self.norm_2 = nn.LayerNorm(job.width, bias=False)
        self.up = nn.Linear(job.width, job.hidden, bias=False)
        self.down = nn.Linear(job.hidden, job.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = (
            part.view(b, s, self.heads, d // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).split(d, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, d))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """A model of nanoGPT."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.tokens = nn.Embedding(job.vocab, job.width)
        self.positions = nn.Embedding(job.seq_len, job.width)
        self.blocks = nn.ModuleList(Block(job) for _ in range(job.layers))
        self.norm = nn.LayerNorm(job.width, bias=False)
        self.head = nn.Linear(job.width, job.vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt_weights(values: Mapping[str, np.ndarray]) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yields name, path in jaxstack and values of each weight of `GPT`, from jaxstack's parameters by path."""
    yield "tokens.weight", "embedding/tokens", values["embedding/tokens"]
    yield "positions.weight", "embedding/positions", values["embedding/positions"]
    yield "norm.weight", "final_norm/scale", values["final_norm/scale"]
    layers, width = values["layers/attention_norm/scale"].shape
    for i in range(layers):
        block = {path.removeprefix("layers/"): v[i] for path, v in values.items() if path.startswith("layers/")}
        qkv = np.concatenate([block[f"attention/w_{each}"].reshape(width, -1) for each in "qkv"], axis=1)
        yield f"blocks.{i}.norm_1.weight", "layers/attention_norm/scale", block["attention_norm/scale"]
        yield f"blocks.{i}.qkv.weight", "layers/attention/w_q", qkv.T
        yield f"blocks.{i}.out.weight", "layers/attention/w_o", block["attention/w_o"].reshape(-1, width).T
        yield f"blocks.{i}.norm_2.weight", "layers/mlp_norm/scale", block["mlp_norm/scale"]
        yield f"blocks.{i}.up.weight", "layers/mlp/w_up", block["mlp/w_up"].T
        yield f"blocks.{i}.down.weight", "layers/mlp/w_down", block["mlp/w_down"].T


def _llama(job: Job) -> nn.Module:
    """Returns a Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=job.vocab,
        hidden_size=job.width,
        intermediate_size=job.hidden,
        num_hidden_layers=job.layers,
        num_attention_heads=job.heads,
        num_key_value_heads=job.kv_heads,
        max_position_embeddings=job.seq_len,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def _bert(job: Job) -> nn.Module:
    """Returns a BERT of transformers with its masked-LM head."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=job.vocab,
        hidden_size=job.width,
        intermediate_size=job.hidden,
        num_hidden_layers=job.layers,
        num_attention_heads=job.heads,
        max_position_embeddings=job.seq_len,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
        dtype="float32",
    )
    return BertForMaskedLM(config)


def _t5(job: Job) -> nn.Module:
    """Returns a T5 1.0 of transformers."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=job.vocab,
        d_model=job.width,
        d_kv=job.width // job.heads,
        d_ff=job.hidden,
        num_layers=job.layers,
        num_heads=job.heads,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


class Peer:
    """One job in one mode on a fixed batch. `step()` trains once and returns the loss in nats per token.

    Args:
      folder: has the initial weights and the batch.
    """

    def __init__(self, name: str, mode: str, *, folder: Path, threads: int, lr: float = 1e-3) -> None:
        if name not in JOBS or mode not in MODES:
            raise ValueError(
                f"job {name!r} in mode {mode!r} does not exist. The jobs are {', '.join(JOBS)}; the modes are "
                f"{', '.join(MODES)}."
            )
        torch.set_num_threads(threads)
        job = JOBS[name]
        self.model = {"gpt": GPT, "llama": _llama, "bert": _bert, "t5": _t5}[job.family](job)
        self.model.train()
        named = dict(self.model.named_parameters())
        with np.load(folder / "weights.npz", allow_pickle=False) as weights, torch.no_grad():
            if missing := named.keys() - {*weights.files}:
                raise ValueError(f"the weights of {name} lack {', '.join(sorted(missing))}.")
            for key, parameter in named.items():
                parameter.copy_(torch.from_numpy(weights[key]).reshape(parameter.shape))
        decayed = {*json.loads((folder / "decayed.json").read_text())}
        groups = [
            {"params": [p for key, p in named.items() if (key in decayed) is kind], "weight_decay": 0.1 * kind}
            for kind in (True, False)
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
        with np.load(folder / "batch.npz", allow_pickle=False) as batch:
            arrays = {key: torch.from_numpy(batch[key]) for key in batch.files}
        self.inputs, self.targets = arrays["tokens"].long(), arrays["targets"].long().reshape(-1)
        self.given: dict[str, Tensor] = {}
        if job.family == "t5":
            self.given = {"decoder_input_ids": self.inputs}
            self.inputs = arrays["encoder_tokens"].long()
        self.loss = torch.compile(self._loss) if mode == "compile" else self._loss

    def _loss(self) -> Tensor:
        out = self.model(self.inputs, **self.given)
        logits = out if isinstance(out, Tensor) else out.logits
        return F.cross_entropy(logits.flatten(0, 1), self.targets)

    def step(self) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()
