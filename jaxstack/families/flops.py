"""Formulas of a model's compute: FLOPs per token, and the share of a chip's peak that a run reaches (MFU)."""

import re
from typing import NamedTuple

import jax

from jaxstack import families
from jaxstack.common import hardware
from jaxstack.config import ModelConfig
from jaxstack.config.expert_layers import stack_of
from jaxstack.families import branches, diffusion
from jaxstack.models.params import Param, flat_spec


class Flops(NamedTuple):
    """FLOPs of training on one token (forward and backward, three times the forward pass), by two conventions.

    Attributes:
      full: attention counted as if every token saw the whole sequence (PaLM, arXiv:2204.02311, appendix B).
      causal: only the scores that the causal mask and sliding windows leave.
    """

    full: float
    causal: float


def matmul_params(cfg: ModelConfig, frozen: bool | None = None) -> int:
    """Returns the number of weights that a token is multiplied with: matrices and the head, tied or not.

    Embedding look-ups are not multiplications. `frozen` restricts the count to frozen or to trained weights; `None`
    means both.
    """
    leaves = jax.tree.leaves(families.spec(cfg), is_leaf=lambda x: isinstance(x, Param))
    leaves = [p for p in leaves if frozen in (None, p.frozen)]
    encoder = cfg.family == "encoder"
    rows = cfg.d_model * (cfg.tied_embeddings and not cfg.labels) + encoder  # an encoder's head has its bias as a row
    head = rows * cfg.classes if frozen in (None, bool(cfg.lora.rank)) else 0
    if cfg.sentences.tasks and not frozen:  # their heads have biases as rows, too
        head += sum(p.size for path, p in flat_spec(families.spec(cfg)).items() if re.match("sentences/.*/bias", path))
    return head + sum(
        p.size * cfg.moe.choices // cfg.moe.num_experts if "experts" in p.axes else p.size
        for p in leaves
        if p.kind in ("matrix", "router")
    )


def flops_per_token(cfg: ModelConfig, seq_len: int, target_len: int = 0, rows: int = 0) -> Flops:
    """Returns the FLOPs of one training token; a multiply-add is two. Recomputation (remat) is not counted.

    Per layer, the two attention matmuls of the forward pass cost 2 * H * (K + value width) FLOPs for each (query, key)
    pair. The gated delta rule reads, corrects and reads a state of K * V numbers of each head, which costs 6 * K * V
    for each token, and a state space writes and reads, 4 * K * V. Computing in chunks takes about twice these FLOPs.

    Args:
      seq_len: number of tokens of a sequence, S. In an encoder-decoder, the tokens that the encoder reads; with
        pictures, the patches of one. The FLOPs of a row with two inputs are divided by this number.
      target_len: number of tokens that the decoder of an encoder-decoder writes, or of a text beside a picture, T.
      rows: number of rows that a contrastive model compares, which are the rows of a batch.
    """
    S = seq_len
    if cfg.family == "encoder_decoder":
        return _of_pairs(cfg, S, target_len)
    if cfg.family == "contrastive":
        return _of_towers(cfg, S, target_len, rows)
    if cfg.family == "branches":
        return _of_branches(cfg, S)
    per_pair = 2 * cfg.num_heads * (cfg.head_width + cfg.value_width)
    attends = cfg.attention_layers
    seen = 0.0  # keys that a token sees on average, summed over layers
    for window in cfg.layer_windows[:attends]:
        w = min(window or S, S)
        before = (w * (w + 1) / 2 + (S - w) * w) / S  # and itself
        seen += before if cfg.family == "decoder" else 2 * before - 1
    # A frozen weight is multiplied forward and for the gradient of its input; it has no gradient of its own.
    dense = 6.0 * matmul_params(cfg) - 2.0 * matmul_params(cfg, frozen=True)
    if cfg.family == "diffusion":
        dense += diffusion.flops_correction(cfg, S, target_len)
    dense += 3.0 * _state_flops(cfg) * (cfg.num_layers - attends)
    return Flops(dense + 3.0 * per_pair * S * attends, dense + 3.0 * per_pair * seen)


def _state_flops(cfg: ModelConfig) -> float:
    """Returns the FLOPs of a forward pass of one token and layer with the states of all heads."""
    if cfg.ssm.layers:
        return 4.0 * cfg.ssm.heads * cfg.ssm.head_dim * cfg.ssm.state_dim
    return 6.0 * cfg.delta.value_heads * cfg.delta.key_dim * cfg.delta.value_dim


def _of_pairs(cfg: ModelConfig, inputs: int, targets: int) -> Flops:
    """Returns the FLOPs of a row of an encoder-decoder, divided by the tokens that the encoder reads."""
    head = cfg.d_model * cfg.vocab if cfg.tied_embeddings else 0
    dense = {"inputs": 0.0, "targets": (4.0 if cfg.lora.rank else 6.0) * head}
    for path, p in flat_spec(families.spec(cfg)).items():
        if p.kind in ("matrix", "router"):
            reads = stack_of(path.split("/")[0]) == "encoder" or re.search("/cross/(w|lora_[ab])_[kv]$", path)
            size = p.size * cfg.moe.choices / cfg.moe.num_experts if "experts" in p.axes else p.size
            # A frozen weight is multiplied forward and for the gradient of its input.
            dense["inputs" if reads else "targets"] += (4.0 if p.frozen else 6.0) * size
    products = dense["inputs"] * inputs + dense["targets"] * targets
    crossing = cfg.encoder_depth * inputs**2 + cfg.num_layers * inputs * targets
    per_pair = 12 * cfg.num_heads * cfg.head_width
    full, causal = targets**2, targets * (targets + 1) / 2
    return Flops(*((products + per_pair * (crossing + cfg.num_layers * own)) / inputs for own in (full, causal)))


def _of_towers(cfg: ModelConfig, patches: int, words: int, rows: int) -> Flops:
    """Returns the FLOPs of a row of a contrastive model, divided by its patches."""
    own, weights = cfg.contrastive, {"patch": 0.0, "word": 0.0, "row": 0.0}
    texts = own.texts
    weights["word"] += cfg.d_model * cfg.vocab if own.caption_layers and cfg.tied_embeddings else 0
    for path, p in flat_spec(families.spec(cfg)).items():
        if p.kind == "matrix":
            reads = path.startswith(("picture/", "image/")) or path.endswith(("cross/w_k", "cross/w_v"))
            times = texts if path.endswith(("cross/w_k", "cross/w_v", "projection/text")) else 1
            weights["row" if path.startswith("projection/") else "patch" if reads else "word"] += p.size * times
    words_of_row = words * texts
    dense = 6.0 * (weights["patch"] * patches + weights["word"] * words_of_row + weights["row"])
    dense -= 2.0 * own.patch_values * cfg.d_model * patches  # patches have no gradients
    dense += 6.0 * rows * texts * (own.features or cfg.d_model)  # a row's similarities
    per_pair, crossing = 12 * cfg.num_heads * cfg.head_width, own.caption_layers * words_of_row * patches
    fixed = dense + per_pair * (cfg.encoder_depth * patches**2 + crossing)
    full, causal = words**2, words * (words + 1) / 2
    deep = (cfg.num_layers + own.caption_layers) * texts
    return Flops(*((fixed + per_pair * deep * own_words) / patches for own_words in (full, causal)))


def _of_branches(cfg: ModelConfig, length: int) -> Flops:
    """Returns the FLOPs of a row of a trunk with branches, divided by the tokens of a window."""
    both = zip(branches.BRANCHES, cfg.branches.rates, strict=True)
    each = [(flops_per_token(branches.model_of(cfg, branch), length), rate) for branch, rate in both]
    frozen = 2.0 * sum(cfg.branches.rates) * matmul_params(cfg, frozen=True)  # they have no gradients of their own
    return Flops(*(sum(getattr(one, name) * rate for one, rate in each) - frozen for name in Flops._fields))


def mfu(flops_per_s: float, device_kind: str, devices: int, dtype: str) -> float | None:
    """Returns model FLOPs utilisation as a fraction, or None where the peak is not known.

    Args:
      flops_per_s: model FLOPs that all devices together do in a second.
      device_kind: JAX's name of the device.
      dtype: dtype of the matmuls. Runs are usually compared in 16 bits, so utilisation is not given for float32.
    """
    name = hardware.chip_name(device_kind)
    peak = hardware.CHIPS[name].flops.get(dtype) if name and dtype != "float32" else None
    return None if peak is None else flops_per_s / (peak * devices)
