"""The mesh does not change values: on every mesh, loss and gradients equal those of one device.

`python tests/test_meshes.py` prints the table of docs/meshes.md, and with `--measure` what each case shows.
"""

import os
import sys

if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
import pytest
from families import (
    BRANCHES,
    CLASSIFIERS,
    CONTRASTIVE,
    DELTA,
    DIFFUSION,
    ENCODER_DECODERS,
    ENCODERS,
    FAMILIES,
    NEAR,
    PAIRS,
    SPARSE,
    STATE_SPACE,
)

from jaxstack import families as models
from jaxstack.common.tree import flatten
from jaxstack.config import (
    Config,
    DataConfig,
    DeltaConfig,
    ExpertLayers,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    RunConfig,
    SampleConfig,
    StateSpaceConfig,
    TrainConfig,
)
from jaxstack.config.branches import BranchesConfig
from jaxstack.config.sentences import SentencesConfig
from jaxstack.data.seq2seq import Pair, make_batch
from jaxstack.families.context import make_context
from jaxstack.models import params
from jaxstack.sharding import make_mesh
from jaxstack.training.assemble import make_gradients
from jaxstack.training.state import Recipe, abstract_state, make_state

BATCH, SEQ = 8, 32
WIDE: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 8, "d_model": 64, "head_dim": 8, "d_ff": 96, "vocab_size": 64}
ALL = FAMILIES | NEAR | ENCODERS | PAIRS | CLASSIFIERS | ENCODER_DECODERS | DIFFUSION | CONTRASTIVE | BRANCHES
MODELS: dict[str, ModelConfig] = {
    **{name: dataclasses.replace(cfg, **WIDE) for name, cfg in ALL.items()},
    "grouped": dataclasses.replace(FAMILIES["qwen3"], **{**WIDE, "num_kv_heads": 2}, attention_bias="qkv"),
}
EXPERTS = {
    "softmax": MoEConfig(num_experts=8, d_ff=32, z_loss_weight=0.1, aux_loss_weight=0.5),
    "capacity": MoEConfig(num_experts=8, d_ff=32, capacity_factor=0.75, aux_loss_weight=0.5),
    "sigmoid": MoEConfig(
        num_experts=8, top_k=3, d_ff=32, router="sigmoid", num_groups=4, top_k_groups=2, shared_experts=1
    ),
    "domain": MoEConfig(num_experts=8, d_ff=32, router="domain"),
    "shared_gate": MoEConfig(num_experts=8, d_ff=32, normalize=False, shared_experts=2, shared_gate=True),
}
MODELS["t5_gates"] = dataclasses.replace(MODELS["t5_1_1"], moe=EXPERTS["domain"])
MODELS |= {f"t5_{name}": dataclasses.replace(MODELS["t5"], moe=EXPERTS[name]) for name in ("softmax", "sigmoid")}
_SWITCH = {"encoder_layers": 4, "num_layers": 2}
MODELS |= {
    f"{name}_{n}": dataclasses.replace(
        MODELS["t5"], moe=dataclasses.replace(moe, layers=ExpertLayers(first=1, every=n)), **_SWITCH | own
    )
    for name, n, moe, own in (
        ("switch", 2, dataclasses.replace(EXPERTS["softmax"], top_k=1, normalize=False), {}),
        ("switch_sigmoid", 3, EXPERTS["sigmoid"], {"encoder_layers": 6, "num_layers": 6}),
    )
}
# Whole periods are in the loop over layers, and the last two layers behind it.
MODELS["modernbert_cut"] = dataclasses.replace(MODELS["modernbert"], num_layers=5, windows=(0, 4, 4))
MODELS["untied"] = dataclasses.replace(MODELS["gpt2"], tied_embeddings=False)
MODELS |= {name: dataclasses.replace(MODELS["llama3"], moe=moe) for name, moe in EXPERTS.items()}
MODELS["dense_first"] = dataclasses.replace(
    MODELS["llama3"], num_layers=3, moe=dataclasses.replace(EXPERTS["sigmoid"], layers=ExpertLayers(first=1))
)
MODELS["listed"] = dataclasses.replace(
    MODELS["llama3"], num_layers=6, moe=dataclasses.replace(EXPERTS["sigmoid"], layers=SPARSE["listed"].moe.layers)
)
MODELS["encoder_experts"] = dataclasses.replace(
    MODELS["modernbert"], num_layers=4, moe=dataclasses.replace(EXPERTS["softmax"], layers=ExpertLayers(first=2))
)
MODELS["encoder_units"] = dataclasses.replace(
    MODELS["modernbert"],
    num_layers=4,
    windows=(0,),
    moe=dataclasses.replace(EXPERTS["sigmoid"], layers=ExpertLayers(every=2)),
)
MODELS["t5_listed"] = dataclasses.replace(
    MODELS["t5"],
    encoder_layers=4,
    num_layers=4,
    moe=dataclasses.replace(EXPERTS["softmax"], layers=ExpertLayers(numbers=(1, 3), encoder_numbers=(3,))),
)
MODELS["latent_plain"] = dataclasses.replace(
    MODELS["latent"], latent=dataclasses.replace(MODELS["latent"].latent, q_rank=0)
)
# The first tokens of a document read little where their query is nearly orthogonal to their keys. A norm with a small
# epsilon would magnify the rounding of such a reading a thousand times.
_UNITS = DeltaConfig(every=2, key_heads=4, value_heads=8, key_dim=12, value_dim=8, taps=3)
_DELTA = WIDE | {"norm_eps": 0.1}
MODELS["qwen3_next"] = dataclasses.replace(DELTA["qwen3_next"], **_DELTA, delta=_UNITS, moe=EXPERTS["shared_gate"])
MODELS["delta_dense"] = dataclasses.replace(DELTA["delta_dense"], **_DELTA, delta=dataclasses.replace(_UNITS, every=3))
_SPACE = StateSpaceConfig((True,), heads=8, head_dim=8, groups=4, state_dim=12, taps=3, mlp=False)
_HYBRID = dataclasses.replace(_SPACE, layers=(True, False, True), groups=1, mlp=True)
MODELS["mamba2"] = dataclasses.replace(STATE_SPACE["mamba2"], **_DELTA | {"d_ff": None}, ssm=_SPACE)
MODELS["hybrid"] = dataclasses.replace(STATE_SPACE["hybrid"], **_DELTA, ssm=_HYBRID)
MODELS["hybrid_moe"] = dataclasses.replace(
    STATE_SPACE["hybrid_moe"], **_DELTA, moe=EXPERTS["softmax"], ssm=dataclasses.replace(_HYBRID, layers=(True, False))
)
ADAPTED = {"lora": "llama3", "lora_gpt2": "gpt2", "lora_moe": "softmax", "lora_sigmoid": "sigmoid"}
ADAPTED |= {"lora_latent": "latent", "lora_delta": "delta_dense", "lora_hybrid": "hybrid", "lora_gpt_oss": "gpt_oss"}
ADAPTED |= {"lora_t5": "t5", "lora_switch": "switch_2"}
MODELS |= {name: dataclasses.replace(MODELS[of], lora=LoraConfig(rank=4, alpha=8)) for name, of in ADAPTED.items()}
PLAIN = {"sequence_parallel": False}
AUTO = {"partitioner": "auto"}
SLOW = pytest.mark.slow
MATRIX = pytest.mark.matrix
Arrays = dict[str, np.ndarray]
Case = tuple[str, dict[str, Any], dict[str, Any]]
# Every axis and every family of models, in few cases.
QUICK: list[Case] = [
    ("llama3", {"data": 2, "fsdp": 2, "tensor": 2}, {"accum": 2, "dropout": 0.3}),
    ("gpt2", {"tensor": 2, **PLAIN}, {}),
    ("gemma2", {"fsdp": 2, "tensor": 2}, {"remat": "selective"}),
    ("llama3", {"fsdp": 2, "context": 4}, {"packing": True}),
    ("sigmoid", {"data": 2, "expert": 4}, {"remat": "selective"}),
    ("lora", {"fsdp": 2, "tensor": 2}, {}),
    ("llama3", {"data": 2, "fsdp": 2, "tensor": 2, **AUTO}, {"accum": 2, "dropout": 0.3}),
]
# Every axis alone at 2, 4 and 8, pairs, triples; accumulation, packing, dropout, remat.
CASES: list[Case] = [
    *QUICK,
    *(("llama3", {axis: size}, {}) for axis in ("data", "fsdp", "tensor", "context") for size in (2, 4, 8)),
    *(("llama3", {"tensor": size, **PLAIN}, {}) for size in (2, 8)),
    *(("llama3", {"context": size, "context_method": "all_gather"}, {"packing": True}) for size in (2, 4)),
    ("gpt2", {"tensor": 4}, {"dropout": 0.3}),
    ("gpt2", {"fsdp": 4, "tensor": 2, **PLAIN}, {"dropout": 0.3, "accum": 2}),
    ("gemma2", {"context": 2, "tensor": 2}, {"packing": True, "remat": "full"}),
    ("qwen3", {"data": 2, "tensor": 4}, {"accum": 2, "packing": True}),
    ("grouped", {"data": 4, "tensor": 2}, {"accum": 2, "remat": "selective"}),
    ("llama3", {"data": 2, "fsdp": 4}, {"accum": 1, "remat": "selective"}),
    ("llama3", {"context": 4, "tensor": 2}, {"dropout": 0.3, "packing": True}),
    ("llama3", {"data": 2, "fsdp": 2, "context": 2}, {"accum": 2}),
    ("llama3", {"data": 2, "context": 2, "tensor": 2}, {"packing": True}),
    ("llama3", {"fsdp": 2, "expert": 2, "tensor": 2}, {"accum": 2}),
    ("softmax", {"expert": 2, "tensor": 2}, {"accum": 2}),
    *(("softmax", {"expert": size}, {}) for size in (2, 4, 8)),
    ("softmax", {"tensor": 4, **PLAIN}, {"accum": 2}),
    ("softmax", {"expert": 4, "context": 2}, {"accum": 2, "packing": True}),
    ("softmax", {"fsdp": 2, "expert": 2, "tensor": 2}, {"accum": 2, "remat": "full"}),
    ("capacity", {"expert": 8}, {}),
    ("capacity", {"data": 2, "expert": 2, "tensor": 2}, {"accum": 2}),
    ("capacity", {"expert": 4, "tensor": 2, **PLAIN}, {}),
    ("sigmoid", {"fsdp": 4, "expert": 2}, {"accum": 1}),
    ("sigmoid", {"expert": 2, "context": 2, "tensor": 2}, {"accum": 2}),
    ("domain", {"expert": 2, "fsdp": 2, "tensor": 2}, {"accum": 2}),
    ("grouped", {"fsdp": 2, "context": 2, "tensor": 2}, {"packing": True, "accum": 2, "remat": "full"}),
    *(("lora", {axis: 4}, {}) for axis in ("data", "fsdp", "tensor", "context")),
    ("lora", {"tensor": 4, "fsdp": 2, **PLAIN}, {"dropout": 0.3}),
    ("lora", {"data": 2, "fsdp": 2, "tensor": 2}, {"accum": 2, "packing": True, "remat": "selective"}),
    ("lora_gpt2", {"fsdp": 2, "tensor": 2}, {"remat": "full"}),
    ("lora_moe", {"expert": 4}, {"remat": "selective"}),
    ("lora_moe", {"fsdp": 2, "expert": 2, "tensor": 2}, {"accum": 2}),
    ("lora_sigmoid", {"expert": 2, "context": 2, "tensor": 2}, {"accum": 2}),
    ("gpt2", {"data": 2, "tensor": 2, **PLAIN, **AUTO}, {"dropout": 0.3, "remat": "full"}),
    ("gemma2", {"fsdp": 4, "tensor": 2, **AUTO}, {"remat": "selective"}),
    ("llama3", {"fsdp": 2, "context": 4, **AUTO}, {"packing": True}),
    ("softmax", {"fsdp": 2, "expert": 2, "tensor": 2, **AUTO}, {"accum": 2, "remat": "full"}),
    ("sigmoid", {"expert": 2, "context": 2, "tensor": 2, **AUTO}, {"accum": 2}),
    ("capacity", {"expert": 4, "tensor": 2, **PLAIN, **AUTO}, {}),
    ("domain", {"expert": 4, "data": 2, **AUTO}, {}),
    ("lora", {"data": 2, "fsdp": 2, "tensor": 2, **AUTO}, {"accum": 2, "packing": True, "remat": "selective"}),
]

GATHER = {"context_method": "all_gather"}
NEAR_CASES: list[Case] = [
    ("olmo2", {"data": 2, "fsdp": 2, "tensor": 2}, {"accum": 2}),
    ("cohere2", {"fsdp": 2, "tensor": 2}, {"remat": "selective", "dropout": 0.3}),
    ("granite", {"fsdp": 2, "context": 2, "tensor": 2}, {"packing": True}),
    ("shared_gate", {"data": 2, "expert": 2, "tensor": 2}, {"remat": "selective"}),
    ("latent", {"data": 2, "fsdp": 2, "tensor": 2}, {"accum": 2, "packing": True}),
    ("olmo2", {"tensor": 8}, {"remat": "full"}),
    ("olmo", {"fsdp": 2, "tensor": 2}, {"accum": 2, "packing": True}),
    ("olmo", {"data": 2, "context": 2, "tensor": 2, **AUTO}, {"remat": "full"}),
    ("gptj", {"fsdp": 2, "context": 2, "tensor": 2}, {"packing": True}),
    ("gptj", {"data": 2, "tensor": 4, **PLAIN}, {"accum": 2, "remat": "selective"}),
    ("gptj", {"fsdp": 2, "tensor": 2, **AUTO}, {"dropout": 0.3}),
    ("apertus", {"data": 2, "fsdp": 2, "tensor": 2}, {"remat": "selective"}),
    ("apertus", {"context": 2, "tensor": 2, **PLAIN}, {"packing": True}),
    ("apertus", {"fsdp": 2, "tensor": 2, **AUTO}, {"accum": 2}),
    ("olmo2", {"tensor": 2, **PLAIN}, {"remat": "selective"}),
    ("olmo2", {"fsdp": 2, "context": 4}, {"packing": True}),
    ("olmo2", {"fsdp": 2, "tensor": 2, **AUTO}, {"accum": 2}),
    ("cohere2", {"data": 2, "context": 2, "tensor": 2}, {"packing": True, "accum": 2}),
    ("cohere2", {"fsdp": 2, "tensor": 2, **AUTO}, {"remat": "full"}),
    ("granite", {"fsdp": 8}, {"remat": "full"}),
    ("granite", {"data": 2, "tensor": 4, **PLAIN}, {"accum": 2, "dropout": 0.3}),
    ("shared_gate", {"expert": 2, "context": 2, "tensor": 2}, {"accum": 2}),
    ("shared_gate", {"fsdp": 2, "expert": 2, "tensor": 2, **AUTO}, {"accum": 2}),
    *(("latent", {axis: 4}, {}) for axis in ("data", "fsdp", "tensor", "context")),
    ("latent", {"tensor": 2, **PLAIN}, {"remat": "selective", "dropout": 0.3}),
    ("latent", {"fsdp": 2, "context": 2, "tensor": 2, **GATHER}, {"packing": True, "remat": "full"}),
    ("latent", {"fsdp": 2, "tensor": 2, **AUTO}, {"accum": 2}),
    ("dense_first", {"data": 2, "expert": 2, "tensor": 2}, {"accum": 2}),
    ("dense_first", {"fsdp": 2, "context": 2, "tensor": 2}, {"packing": True, "remat": "selective"}),
    ("dense_first", {"fsdp": 2, "expert": 2, "tensor": 2, **AUTO}, {"dropout": 0.3}),
    ("lora_latent", {"fsdp": 2, "tensor": 2}, {"remat": "selective"}),
    *(("gpt_oss", {axis: 4}, {}) for axis in ("fsdp", "tensor", "expert", "context")),
    ("gpt_oss", {"fsdp": 2, "expert": 2, "tensor": 2}, {"packing": True, "remat": "selective"}),
    ("gpt_oss", {"context": 2, "expert": 2, "tensor": 2, **GATHER}, {"packing": True, "accum": 2}),
    ("gpt_oss", {"data": 2, "tensor": 2, **PLAIN}, {"remat": "full", "dropout": 0.3}),
    ("gpt_oss", {"fsdp": 2, "expert": 2, "tensor": 2, **AUTO}, {"accum": 2}),
    ("lora_gpt_oss", {"expert": 2, "tensor": 2}, {"remat": "selective"}),
    ("latent_plain", {"data": 2, "fsdp": 2, "tensor": 2}, {"remat": "full"}),
    ("listed", {"data": 2, "expert": 2, "tensor": 2}, {"accum": 2, "dropout": 0.3}),
    ("listed", {"fsdp": 2, "context": 2, "tensor": 2}, {"packing": True, "remat": "selective"}),
    ("listed", {"fsdp": 2, "expert": 2, "tensor": 2, **AUTO}, {"remat": "full"}),
]
"""Meshes of decoders with other norms, rotations and sums, in docs/huggingface.md. All commits run the first five."""

DELTA_CASES: list[Case] = [
    ("qwen3_next", {"fsdp": 2, "expert": 2, "tensor": 2}, {"accum": 2, "packing": True}),
    ("delta_dense", {"fsdp": 2, "context": 4}, {"packing": True, "remat": "selective"}),
    *(("delta_dense", {axis: 4}, {}) for axis in ("data", "fsdp", "tensor", "context")),
    ("delta_dense", {"tensor": 2, **PLAIN}, {"remat": "selective", "dropout": 0.3}),
    ("delta_dense", {"fsdp": 2, "context": 2, "tensor": 2, **GATHER}, {"packing": True, "remat": "full"}),
    ("delta_dense", {"fsdp": 2, "tensor": 2, **AUTO}, {"accum": 2}),
    ("delta_dense", {"fsdp": 2, "context": 2, "tensor": 2, **AUTO}, {"packing": True}),
    ("qwen3_next", {"expert": 8}, {"remat": "selective"}),
    ("qwen3_next", {"expert": 2, "context": 2, "tensor": 2}, {"packing": True, "accum": 2}),
    ("qwen3_next", {"fsdp": 2, "expert": 2, "tensor": 2, **AUTO}, {"remat": "full"}),
    ("lora_delta", {"fsdp": 2, "tensor": 2}, {"remat": "selective"}),
]
"""Meshes of models with the gated delta rule. All commits run the first two."""

STATE_SPACE_CASES: list[Case] = [
    ("mamba2", {"fsdp": 2, "context": 2, "tensor": 2}, {"packing": True, "remat": "selective"}),
    ("hybrid", {"fsdp": 2, "tensor": 2}, {"accum": 2, "packing": True}),
    ("mamba2", {"context": 4}, {}),
    ("mamba2", {"tensor": 4, **PLAIN}, {"remat": "full", "dropout": 0.3}),
    ("mamba2", {"fsdp": 2, "context": 2, "tensor": 2, **AUTO}, {"packing": True}),
    ("hybrid", {"fsdp": 2, "context": 2, "tensor": 2}, {"packing": True, "remat": "selective"}),
    ("hybrid", {"data": 2, "tensor": 2, **PLAIN}, {"dropout": 0.3}),
    ("hybrid", {"fsdp": 2, "tensor": 2, **AUTO}, {"packing": True}),
    ("hybrid_moe", {"fsdp": 2, "expert": 2, "tensor": 2}, {"packing": True}),
    ("lora_hybrid", {"fsdp": 2, "tensor": 2}, {}),
]
"""Meshes of models with state-space layers. All commits run the first two."""

ENCODER_CASES: list[Case] = [
    ("bert_pairs", {"data": 2, "fsdp": 2, "tensor": 2}, {"accum": 2, "dropout": 0.3}),
    *(("bert", {axis: 4}, {}) for axis in ("data", "fsdp", "tensor")),
    ("bert_pairs", {"tensor": 2, **PLAIN}, {"remat": "selective"}),
    ("bert_pairs", {"fsdp": 2, "context": 2, **GATHER, **AUTO}, {}),
    ("bert", {"fsdp": 2, "context": 2, "tensor": 2, **GATHER}, {"packing": True}),
    ("bert", {"data": 2, "context": 2, **GATHER, **AUTO}, {"packing": True, "dropout": 0.2}),
    ("modernbert", {"data": 2, "tensor": 4}, {"packing": True, "accum": 2}),
    ("modernbert", {"context": 2, **GATHER}, {"accum": 2, "remat": "selective"}),
    ("modernbert", {"fsdp": 2, "context": 4, **GATHER}, {"packing": True, "remat": "full"}),
    ("modernbert", {"fsdp": 8}, {"remat": "full"}),
    ("modernbert_cut", {"fsdp": 2, "tensor": 2}, {"dropout": 0.3, "remat": "selective"}),
    ("modernbert_cut", {"data": 2, "tensor": 2, **AUTO}, {"remat": "full"}),
    ("modernbert", {"data": 2, "fsdp": 2, "tensor": 2, **AUTO}, {"remat": "selective"}),
    ("bert_labels", {"fsdp": 2, "context": 2, "tensor": 2, **GATHER}, {"accum": 2, "packing": True}),
    ("bert_words", {"data": 2, "tensor": 2, **PLAIN, **AUTO}, {"dropout": 0.3}),
    ("modernbert_labels", {"fsdp": 2, "tensor": 4}, {"remat": "selective"}),
    ("modernbert_labels", {"fsdp": 2, "context": 2, "tensor": 2, **GATHER}, {"accum": 2, "packing": True}),
    ("modernbert_labels", {"data": 2, "context": 2, **GATHER, **AUTO}, {}),
    ("encoder_experts", {"fsdp": 2, "expert": 2, "tensor": 2}, {"accum": 2, "packing": True}),
    ("encoder_experts", {"expert": 2, "context": 2, "tensor": 2, **GATHER}, {"remat": "selective"}),
    ("encoder_units", {"data": 2, "expert": 4}, {"packing": True, "remat": "full"}),
]
"""Meshes of encoders, in docs/encoders.md. The first one is quick."""
PAIR_CASES: list[Case] = [
    ("t5", {"data": 2, "fsdp": 2, "tensor": 2}, {"accum": 2, "dropout": 0.3}),
    *(("t5", {axis: 4}, {}) for axis in ("data", "fsdp", "tensor")),
    ("t5", {"tensor": 2, **PLAIN}, {"remat": "selective"}),
    ("t5", {"context": 4, **GATHER}, {}),
    ("t5", {"fsdp": 2, "context": 2, "tensor": 2, **GATHER}, {"accum": 2}),
    ("t5", {"fsdp": 2, "tensor": 2, **AUTO}, {"dropout": 0.3, "remat": "full"}),
    ("t5_1_1", {"data": 2, "tensor": 4}, {"accum": 2}),
    ("t5_1_1", {"fsdp": 8}, {"remat": "full"}),
    ("t5_1_1", {"data": 2, "context": 2, **GATHER, **AUTO}, {}),
    ("t5_gates", {"data": 2, "expert": 4}, {"remat": "selective"}),
    ("t5_gates", {"fsdp": 2, "expert": 2, "tensor": 2}, {"accum": 2}),
    ("t5_gates", {"expert": 2, "context": 2, "tensor": 2, **GATHER}, {}),
    ("t5_softmax", {"data": 2, "expert": 2, "tensor": 2}, {"accum": 2}),
    ("t5_sigmoid", {"fsdp": 2, "expert": 2, "context": 2, **GATHER}, {"remat": "selective"}),
    ("switch_2", {"fsdp": 2, "expert": 2, "tensor": 2}, {"accum": 2, "dropout": 0.3}),
    ("switch_sigmoid_3", {"data": 2, "expert": 4}, {"remat": "selective"}),
    ("lora_t5", {"data": 2, "fsdp": 2, "tensor": 2}, {"accum": 2, "dropout": 0.3}),
    ("lora_switch", {"fsdp": 2, "expert": 2}, {"remat": "selective"}),
    ("t5_listed", {"fsdp": 2, "expert": 2, "tensor": 2}, {"accum": 2, "dropout": 0.3}),
]
"""Meshes of encoder-decoders, whose rows have several pairs and padding. All commits run the first one."""

DIFFUSION_CASES: list[Case] = [
    ("dit_experts", {"data": 2, "expert": 2, "tensor": 2}, {"accum": 2, "remat": "selective"}),
    *(("dit", {axis: 4}, {}) for axis in ("data", "fsdp", "tensor")),
    ("dit", {"context": 4, **GATHER}, {}),
    ("dit", {"tensor": 2, **PLAIN}, {"remat": "selective"}),
    ("dit", {"data": 2, "fsdp": 2, "tensor": 2}, {"accum": 2, "remat": "full"}),
    ("dit", {"fsdp": 2, "context": 2, "tensor": 2, **GATHER}, {"accum": 2}),
    ("dit", {"data": 2, "fsdp": 2, "tensor": 2, **AUTO}, {"remat": "selective"}),
    ("dit", {"data": 2, "context": 2, **GATHER, **AUTO}, {}),
    ("dit_experts", {"expert": 4}, {}),
    ("dit_experts", {"fsdp": 4, "expert": 2}, {"remat": "selective"}),
    ("dit_experts", {"expert": 2, "context": 2, "tensor": 2, **GATHER}, {"accum": 2}),
    ("dit_experts", {"fsdp": 2, "expert": 2, "tensor": 2, **AUTO}, {"accum": 2}),
    ("dit_text", {"data": 2, "fsdp": 2, "tensor": 2}, {"accum": 2, "remat": "selective"}),
    ("dit_text", {"expert": 2, "context": 2, "tensor": 2, **GATHER}, {}),
    ("dit_text", {"fsdp": 2, "context": 2, **GATHER, **AUTO}, {"remat": "full"}),
]
"""Meshes of diffusion transformers, in docs/diffusion.md. The first one is quick."""

CONTRASTIVE_CASES: list[Case] = [
    ("clip", {"fsdp": 2, "tensor": 2}, {"accum": 2, "dropout": 0.3}),
    ("coca", {"data": 2, "fsdp": 2, "tensor": 2}, {"accum": 2, "dropout": 0.3}),
    *(("coca", {axis: 4}, {}) for axis in ("data", "fsdp", "tensor")),
    ("coca", {"context": 4, **GATHER}, {}),
    ("coca", {"tensor": 2, **PLAIN}, {"remat": "selective"}),
    ("coca", {"fsdp": 2, "context": 2, "tensor": 2, **GATHER}, {"accum": 2}),
    ("coca", {"data": 2, "fsdp": 2, "tensor": 2, **AUTO}, {"dropout": 0.3, "remat": "full"}),
    ("clip", {"data": 8}, {}),
    ("clip", {"fsdp": 8}, {"remat": "full"}),
    ("clip", {"data": 2, "tensor": 4}, {}),
    ("clip", {"context": 2, "tensor": 2, **GATHER}, {}),
    ("clip", {"data": 2, "context": 2, **GATHER, **AUTO}, {}),
    ("clip", {"data": 4, "tensor": 2, **PLAIN, **AUTO}, {"remat": "selective"}),
]
"""Meshes of contrastive models, in docs/contrastive.md. All commits run the first one."""

BRANCH_CASES: list[Case] = [
    ("branches", {"data": 2, "fsdp": 2, "tensor": 2}, {"accum": 2, "dropout": 0.3}),
    *(("branches", {axis: 4}, {}) for axis in ("data", "fsdp", "tensor")),
    ("branches", {"tensor": 2, **PLAIN}, {"remat": "selective"}),
    ("branches", {"context": 4, **GATHER}, {}),
    ("branches", {"fsdp": 2, "context": 2, "tensor": 2, **GATHER}, {"packing": True}),
    ("deep_branches", {"fsdp": 8}, {"remat": "full"}),
    ("deep_branches", {"data": 2, "tensor": 4}, {"accum": 2}),
    ("deep_branches", {"data": 2, "context": 2, "tensor": 2, **GATHER}, {"accum": 4}),
    ("branches", {"fsdp": 2, "tensor": 2, **AUTO}, {"dropout": 0.3, "remat": "full"}),
    ("deep_branches", {"data": 2, "context": 2, **GATHER, **AUTO}, {}),
    ("branches", {"data": 2, "fsdp": 2, "tensor": 2, **AUTO}, {"accum": 2, "remat": "selective"}),
]
"""Meshes of a trunk with two branches, in docs/branches.md. All commits run the first one."""
EVERY_CASE = [*CASES, *NEAR_CASES, *DELTA_CASES, *STATE_SPACE_CASES, *ENCODER_CASES, *PAIR_CASES]
EVERY_CASE += [*DIFFUSION_CASES, *CONTRASTIVE_CASES, *BRANCH_CASES]
VARIED = {"accum", "dropout", "packing", "remat"}
UNUSED = {"encoder_decoder": {"packing"}, "diffusion": {"packing", "dropout"}, "contrastive": {"packing"}}
"""What a family does not have; rows of encoder-decoders always have several pairs."""
QUICK_CASES = (QUICK[0], QUICK[3], QUICK[4], ENCODER_CASES[0])
ALWAYS = (
    *QUICK,
    *NEAR_CASES[:5],
    *DELTA_CASES[:2],
    *STATE_SPACE_CASES[:2],
    PAIR_CASES[0],
    DIFFUSION_CASES[0],
    CONTRASTIVE_CASES[0],
    BRANCH_CASES[0],
)


def name_of(case: Case) -> str:
    family, mesh, how = case
    words = [family, *(f"{k}={v}" for k, v in (mesh | how).items())]
    name = " ".join(words).replace("=True", "").replace("context_method=", "").replace("partitioner=", "")
    return name.replace("sequence_parallel=False", "-sp")


def two_kinds(model: Any) -> bool:
    """Returns whether some layers have experts and some have not."""
    return model.moe.num_experts > 0 and not all(model.has_experts)


def config(family: str, mesh: dict[str, Any], *, accum: int = 1, packing: bool = False, remat: str = "none",
           dropout: float = 0.0) -> Config:  # fmt: skip
    sources = {"encoder_decoder": "pairs", "diffusion": "digits", "contrastive": "digits"}
    two_lengths = MODELS[family].family == "encoder_decoder" or MODELS[family].reads_captions
    source = "labels" if MODELS[family].labels else sources.get(MODELS[family].family, "stdlib")
    source = "captions" if MODELS[family].diffusion.key_weight else source
    return Config(
        sample=SampleConfig(prompts=() if two_kinds(MODELS[family]) or MODELS[family].states_key else None),
        run=RunConfig(init_from="base" if MODELS[family].lora.rank else None),
        model=dataclasses.replace(MODELS[family], dropout=dropout),
        data=DataConfig(
            seq_len=SEQ,
            batch_size=BATCH,
            target_len=SEQ // 2 if two_lengths else None,
            packing=packing,
            source=source,
            languages=("en", "de") if MODELS[family].contrastive.translations else (),
            path=f"{source}.jsonl" if source in ("labels", "pairs", "captions") else None,
            domains=tuple("abcdefgh") if MODELS[family].moe.router == "domain" else (),
        ),
        train=TrainConfig(grad_accum=accum, remat=remat),
        mesh=MeshConfig(**{"data": 1} | mesh),
    )


def random_batch(seed: int, packing: bool, cfg: ModelConfig, rows: int = BATCH) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    if cfg.family == "encoder_decoder":
        return random_pairs(rng, cfg, rows)
    if cfg.family == "diffusion":
        return random_pictures(rng, cfg, rows)
    if cfg.family == "contrastive":
        return random_captions(rng, cfg, rows)
    if cfg.family == "branches":
        return random_windows(seed, packing, cfg, rows)
    ids = rng.integers(0, cfg.vocab, (rows, SEQ + 1)).astype(np.int32)
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:] % cfg.classes}
    batch["loss_weights"] = (rng.random((rows, SEQ)) < rng.uniform(0.3, 1.0, (rows, 1))).astype(np.float32)
    batch["loss_weights"][rows // 2] = 0  # a sequence that is padding alone
    if packing:
        starts = rng.random((rows, SEQ)) < 0.15
        starts[:, 0] = True
        batch["segment_ids"] = np.cumsum(starts, axis=1).astype(np.int32)
        first = np.maximum.accumulate(np.where(starts, np.arange(SEQ), 0), axis=1)
        batch["positions"] = (np.arange(SEQ) - first).astype(np.int32)
    if cfg.sentences.tasks:
        batch |= random_tasks(rng, cfg, rows)
    if cfg.labels:  # the last tokens are padding
        real = np.arange(SEQ) < rng.integers(1, SEQ + 1, (rows, 1))
        batch["segment_ids"] = np.where(real, batch.get("segment_ids", 1), 0).astype(np.int32)
        firsts = np.arange(SEQ) == 0 if cfg.label_each == "sequence" else 1
        batch["loss_weights"] *= real * firsts
    if cfg.token_types:
        batch["token_types"] = rng.integers(0, cfg.token_types, (rows, SEQ)).astype(np.int32)
    if cfg.moe.router == "domain":
        batch["gate_ids"] = rng.integers(0, cfg.moe.num_experts, (rows, SEQ)).astype(np.int32)
    return batch


def random_pairs(rng: np.random.Generator, cfg: ModelConfig, rows: int) -> dict[str, np.ndarray]:
    """Returns rows of one to three pairs with padding behind them; one row is padding alone."""

    def pair(inputs: int, targets: int) -> Pair:
        ids = (rng.integers(1, cfg.vocab, n).astype(np.int32) for n in (inputs, targets))
        return Pair(*ids, gate=int(rng.integers(max(cfg.moe.num_experts, 1))))

    made = [[pair(*rng.integers(1, (11, 6))) for _ in range(rng.integers(1, 4))] for _ in range(rows)]
    made[rows // 2] = []
    batch = make_batch(made, SEQ, SEQ // 2, 0, gates=bool(cfg.moe.num_experts))
    batch["loss_weights"] *= rng.random(batch["loss_weights"].shape) < 0.8
    return batch


def random_tasks(rng: np.random.Generator, cfg: ModelConfig, rows: int) -> dict[str, np.ndarray]:
    """Returns the answers of tasks on sentences: each row has one task at its first token, and one row has none."""
    tasks, found = cfg.sentences.tasks, {}
    drawn = rng.integers(0, len(tasks), rows)
    drawn[rows // 2] = -1
    for i, task in enumerate(tasks):
        weights = np.zeros((rows, SEQ), np.float32)
        weights[drawn == i, 0] = 1
        targets = rng.integers(0, cfg.sentences.classes(task), (rows, SEQ)).astype(np.int32)
        found |= {f"{task}_targets": targets, f"{task}_weights": weights}
    return found


def random_windows(seed: int, packing: bool, cfg: ModelConfig, rows: int) -> dict[str, np.ndarray]:
    """Returns windows for both branches, of which `understanding` has its arrays with a prefix."""
    found = {}
    plain = dataclasses.replace(cfg, family="decoder", branches=BranchesConfig(), sentences=SentencesConfig())
    for prefix, rate in zip(("masked_", ""), cfg.branches.rates, strict=True):
        seed, made = seed + 1000, random_batch(seed, packing, plain, rows * rate)
        named = {f"{prefix}{name}": a for name, a in made.items()}
        if prefix and cfg.sentences.tasks:
            named |= random_tasks(np.random.default_rng(seed), cfg, rows * rate)
        found |= {name: a.reshape(rows, rate, SEQ).swapaxes(1, 2) for name, a in named.items()}
    found["masked_weights"] = found.pop("masked_loss_weights")
    return found


def random_pictures(rng: np.random.Generator, cfg: ModelConfig, rows: int) -> dict[str, np.ndarray]:
    shape = (rows, cfg.diffusion.num_patches)
    by_row = {"gate_ids": cfg.moe.max_timestep} | ({} if cfg.reads_captions else {"classes": cfg.vocab + 1})
    text = (rows, SEQ // 2)
    texts = {
        "encoder_tokens": rng.integers(0, cfg.vocab, text).astype(np.int32),
        "encoder_segment_ids": (np.arange(text[1]) < rng.integers(1, text[1] + 1, (rows, 1))).astype(np.int32),
        "encoder_key_tokens": rng.integers(0, 2, text).astype(np.int32),
    }
    return {
        **(texts if cfg.reads_captions else {}),
        **{n: rng.standard_normal((*shape, cfg.diffusion.patch_values), np.float32) for n in ("patches", "noise")},
        **{n: np.repeat(rng.integers(0, most, (rows, 1)), shape[1], 1).astype(np.int32) for n, most in by_row.items()},
        "loss_weights": (rng.random(shape) < rng.uniform(0.3, 1.0, (rows, 1))).astype(np.float32),
    }


def random_captions(rng: np.random.Generator, cfg: ModelConfig, rows: int) -> dict[str, np.ndarray]:
    """Returns pictures with texts of several lengths; some show the same, and one text is padding alone."""
    shape = (rows, SEQ // 2)
    last = rng.integers(1, shape[1], (rows, 1))
    place, real = np.arange(shape[1]), np.arange(rows)[:, None] != rows // 2
    if cfg.contrastive.translations:
        one = dataclasses.replace(cfg, contrastive=dataclasses.replace(cfg.contrastive, translations=False))
        both = [random_captions(rng, one, rows) for _ in range(2)]
        both[1]["pair_weights"] = both[1]["pair_weights"] / 2
        texts = {n: np.stack([each[n] for each in both], 2) for n in both[0] if n not in ("patches", "pair_ids")}
        return both[0] | texts
    return {
        "patches": rng.standard_normal((rows, cfg.contrastive.num_patches, cfg.contrastive.patch_values), np.float32),
        "pair_ids": np.repeat(rng.integers(0, rows // 2, (rows, 1)), shape[1], 1).astype(np.int32),
        "pair_weights": ((place == last) * real * rng.uniform(0.5, 1.5, (rows, 1))).astype(np.float32),
        "loss_weights": ((place < last) * real).astype(np.float32),
        **{name: rng.integers(0, cfg.vocab, shape).astype(np.int32) for name in ("tokens", "targets")},
    }


def gradients(
    cfg: Config, seed: int, make: Any = make_gradients, batch: Arrays | None = None
) -> tuple[Arrays, Arrays, Arrays]:
    """Returns loss and routing's sums, gradients, and initial values on the mesh of `cfg`, layers in the model's order.

    Gradients are taken away from the initial values, where norms and biases are not all alike and hide nothing. The
    batch is random unless it is given.
    """
    devices = jax.devices()[: math.prod(cfg.mesh.sizes.values())]
    mesh = make_mesh(cfg.mesh, cfg.data.batch_size // cfg.train.grad_accum, devices)
    ctx = make_context(cfg, mesh)
    spec = models.spec(cfg.model)
    abstract = abstract_state(Recipe.of(cfg), ctx)
    initial = make_state(Recipe.of(cfg), ctx, abstract).params
    stacked = {path for path, p in params.flat_spec(spec).items() if p.stacked}
    rng = np.random.default_rng(seed)

    def in_order(path: str, value: jax.Array) -> np.ndarray:
        whole = np.asarray(value)
        if ctx.layout.stages is None or path not in stacked:
            return whole
        stages = ctx.layout.stages.of(path)
        assert not whole[stages.layer_of_slot < 0].any(), f"{path}: rows without a layer must stay zero"
        return whole[stages.slot_of_layer]

    def move(path: str, value: jax.Array) -> jax.Array:
        whole = in_order(path, value)
        whole = whole + rng.normal(0, 0.1, whole.shape).astype(np.float32)
        if ctx.layout.stages is not None and path in stacked:
            rows = np.zeros(value.shape, np.float32)
            rows[ctx.layout.stages.of(path).slot_of_layer] = whole
            whole = rows
        return jax.device_put(whole, value.sharding)

    moved = jax.tree.unflatten(jax.tree.structure(initial), [move(*item) for item in flatten(initial).items()])
    if batch is None:
        batch = random_batch(seed, cfg.data.packing, cfg.model, cfg.data.batch_size)
    placed = jax.device_put(batch, ctx.layout.sharding(ctx.layout.batch))
    key = jax.random.key(seed) if cfg.model.dropout else None
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params.partition(spec, abstract.params)[0])
    loss, grads, sums = jax.jit(make(cfg, ctx), out_shardings=(None, shardings, None))(moved, placed, key)
    ordered = [{path: in_order(path, v) for path, v in flatten(tree).items()} for tree in (grads, initial)]
    trained = params.flat_spec(params.partition(spec, spec)[0])
    assert {path: p.shape for path, p in trained.items()} == {path: x.shape for path, x in ordered[0].items()}
    return jax.tree.map(np.asarray, {"loss": loss, **sums}), *ordered


@functools.cache
def on_one_device(family: str, how: tuple[tuple[str, Any], ...], seed: int) -> Any:
    return gradients(config(family, {}, **dict(how)), seed)


def compare(case: Case, seed: int) -> tuple[float, float]:
    """Returns relative errors against one device: of the loss (or the worst sum of routing) and of the worst gradient.

    That one neither accumulates nor recomputes.
    """
    family, mesh, how = case
    plain = tuple((k, v) for k, v in how.items() if k in ("packing", "dropout"))
    return errors(family, on_one_device(family, plain, seed), gradients(config(family, mesh, **how), seed))


def errors(family: str, one: Any, other: Any) -> tuple[float, float]:
    """Returns the largest relative errors of sums and of gradients of `other` against `one`."""
    (sums, grads, initial), (other_sums, other_grads, other_initial) = one, other
    for path, value in initial.items():
        assert (value == other_initial[path]).all(), f"initial values of {path} differ"
    # A key's bias moves all scores of a query alike: without RoPE its true gradient is zero, and what is left is noise.
    zero = {path for path in grads if path.endswith("/b_k") and MODELS[family].positions != "rope"}
    apart = {
        path: float(np.linalg.norm(other_grads[path] - g) / np.linalg.norm(g))
        for path, g in grads.items()
        if path not in zero and g.any()  # a balancing bias has no gradient
    }
    total = math.sqrt(sum(float(np.square(g).sum()) for g in grads.values()))
    assert all(np.linalg.norm(other_grads[path]) < 1e-5 * total for path in zero)
    of_sums = [np.linalg.norm(other_sums[name] - s) / max(np.linalg.norm(s), 1e-9) for name, s in sums.items()]
    return float(max(of_sums)), max(apart.values())


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=name_of(c), marks=() if c in QUICK_CASES else SLOW if c in ALWAYS else MATRIX)
        for c in EVERY_CASE
    ],
)
def test_every_mesh_gives_the_loss_and_gradients_of_one_device(case, seed):
    loss, gradient = compare(case, seed)
    # float32 sums in another order; sharding mistakes are of the order of one.
    assert loss < 1e-5
    assert gradient < 1e-5


def varied(cases: list[Case]) -> set[str]:
    return {key for _, _, how in cases for key in how}


@pytest.mark.parametrize("family", models.FAMILIES)
def test_a_family_has_twelve_meshes_that_vary_what_it_can(family):
    cases = [*{name_of(c): c for c in EVERY_CASE if MODELS[c[0]].family == family}.values()]
    assert len(cases) >= 12
    assert {axis for _, mesh, _ in cases for axis in mesh} >= {"data", "fsdp", "context", "tensor", "partitioner"}
    assert varied(cases) >= VARIED - UNUSED.get(family, set())


def test_a_mesh_of_ones_is_no_mesh_at_all():
    """The program is the same, operation for operation."""
    cfg = config("softmax", {}, accum=2, remat="selective", dropout=0.1)
    ctx = make_context(cfg, make_mesh(cfg.mesh, BATCH, jax.devices()[:1]))
    values = params.abstract(models.spec(cfg.model))
    batch, key = random_batch(0, False, cfg.model), jax.random.key(0)
    with_mesh, without = (
        str(jax.make_jaxpr(make_gradients(cfg, c))(values, batch, key))
        for c in (ctx, dataclasses.replace(ctx, layout=dataclasses.replace(ctx.layout, mesh=None)))
    )
    assert "psum" not in with_mesh
    assert with_mesh == without


def test_tokens_are_numbered_alike_on_every_mesh():
    """Rows are split over data. A context shard has an early and a late chunk of a row, split further over tensor."""
    cfg = config("llama3", {"data": 2, "context": 2, "tensor": 2})
    ctx = make_context(cfg, make_mesh(cfg.mesh, BATCH, jax.devices()))
    P = jax.sharding.PartitionSpec
    number = np.arange(BATCH)[:, None] * SEQ + np.arange(SEQ)
    split = jax.shard_map(
        lambda x: ctx.layout.dropout_ids(ctx.layout.row_indices(x.shape[0]), SEQ // 2),
        mesh=ctx.layout.mesh, in_specs=P("data"), out_specs=P("data", ("context", "tensor")),
    )  # fmt: skip
    ids = np.asarray(split(number))
    chunks = [0, 3, 1, 2]  # of eight tokens each: the first context shard has the ends, the second the middle
    assert ids.tolist() == np.concatenate([number[:, 8 * c : 8 * c + 8] for c in chunks], axis=1).tolist()


def table(seed: int | None = None) -> str:
    """Returns the cases as a Markdown table. With a seed, it runs them and adds the measured errors."""
    lines = ["| model | mesh | devices |", "|---|---|---|"]
    if seed is not None:
        lines = ["| model | mesh | devices | loss | worst gradient |", "|---|---|---|---|---|"]
    for case in CASES:
        family, mesh, how = case
        devices = math.prod(config(family, mesh, **how).mesh.sizes.values())
        label = ", ".join([family, *(f"{k} {v}".replace(" True", "") for k, v in how.items())])
        lines.append(f"| {label} | {name_of(('', mesh, {})).strip()} | {devices} |")
        if seed is not None:
            lines[-1] += " {:.0e} | {:.0e} |".format(*compare(case, seed))
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(0 if "--measure" in sys.argv else None))
