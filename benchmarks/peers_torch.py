"""Trains the jobs of the CPU comparison in PyTorch, eager or compiled, one optimizer step at a time.

gpt    The block of nanoGPT as configured by its own jobs: LayerNorm and linear layers without biases, learned
       positions, exact GELU, `scaled_dot_product_attention`, head tied to the embedding.
llama  `transformers.LlamaForCausalLM` with `attn_implementation="sdpa"`.
bert   `transformers.BertForMaskedLM`, likewise, without dropout. All tokens are targets.
t5     `transformers.T5ForConditionalGeneration` without dropout: half as many targets as inputs.

All use float32, the fused AdamW of `torch.optim`, and gradients clipped to a global norm of 1.
"""

from dataclasses import dataclass

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
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                down = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * job.layers) ** 0.5 if down else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


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
    """One job in one mode on a fixed random batch. `step()` trains once and returns the loss in nats per token."""

    def __init__(self, name: str, mode: str, *, threads: int, lr: float = 1e-3) -> None:
        if name not in JOBS or mode not in MODES:
            raise ValueError(
                f"job {name!r} in mode {mode!r} does not exist. The jobs are {', '.join(JOBS)}; the modes are "
                f"{', '.join(MODES)}."
            )
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        job = JOBS[name]
        self.model = {"gpt": GPT, "llama": _llama, "bert": _bert, "t5": _t5}[job.family](job)
        self.model.train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        text = torch.randint(job.vocab, (job.batch, job.seq_len + 1))
        self.inputs, self.targets = text[:, :-1].contiguous(), text[:, 1:].reshape(-1)
        self.given: dict[str, Tensor] = {}
        if job.family == "t5":
            self.targets = text[:, : job.seq_len // 2].reshape(-1)
            self.given = {"decoder_input_ids": text[:, 1 : job.seq_len // 2 + 1].contiguous()}
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
