"""Every check of `jaxstack/config` by values on both sides of its edge; the list of checks is read from the source."""

import ast
import dataclasses
import inspect
import math
import traceback
import typing

import pytest

from jaxstack import config
from jaxstack.config import (
    Config,
    ConfigError,
    DenoiserConfig,
    SourceConfig,
    WeightChange,
    bounds,
    branches,
    contrastive,
    data,
    denoisers,
    diffusion,
    expert_layers,
    experts,
    model,
    parallel,
    pictures,
    run,
    sentences,
    training,
)
from jaxstack.config.checks import buckets, families, mesh
from jaxstack.config.checks import training as run_checks

MODULES = (
    branches,
    buckets,
    contrastive,
    data,
    denoisers,
    diffusion,
    expert_layers,
    experts,
    families,
    mesh,
    model,
    parallel,
    pictures,
    run,
    run_checks,
    sentences,
    training,
)
FILES = {module.__file__: inspect.getsource(module) for module in MODULES}
CHECKS = {
    (path, node.lineno): node
    for path, source in FILES.items()
    for node in ast.walk(ast.parse(source))
    if (isinstance(node, ast.Call) and ast.unparse(node.func) == "require") or isinstance(node, ast.Raise)
}
"""By file and line: calls of `require`, and errors raised outright. Bounds of single values are data, see `edges`."""

MOE, SIGMOID = {"model.moe.num_experts": 8}, {"model.moe.num_experts": 8, "model.moe.router": "sigmoid"}
DOMAIN = {"model.moe.num_experts": 2, "model.moe.router": "domain"}
BEAMS = {"sample.beams": 4, "sample.temperature": 0.0, "sample.prompts": ("\u00e9\u00e9\u00e9",)}  # six bytes
H1_RING = {"pipeline.schedule": "zb_h1", "mesh.pipe": 2, "mesh.context": 2}
THREE = {"distributed.coordinator": "host:1234", "distributed.num_processes": 2, "distributed.process_id": 0}

DIT = {
    "model.family": "diffusion", "data.source": "digits", "data.seq_len": 16, "model.diffusion.image": (8, 8, 1),
}  # fmt: skip
TOWERS = {
    "model.family": "contrastive", "data.source": "digits", "data.seq_len": 16, "model.contrastive.image": (8, 8, 1),
}  # fmt: skip
OWN_TEXTS = DIT | {"data.source": "captions", "data.path": "a", "model.diffusion.text_layers": 1}
TIMESTEP = {"model.moe.num_experts": 8, "model.moe.router": "timestep"}
ENCODER = {"model.family": "encoder", "model.tied_embeddings": True}
CUT = {"model.family": "encoder", "model.tied_embeddings": True, "model.windows": (0, 4, 4)}
NEXT = {"model.family": "encoder", "model.tied_embeddings": True, "model.sentences.tasks": ("next",)}
TWO = {"model.family": "branches", "model.tied_embeddings": True}

TRIPLES = {"data.source": "triples", "data.path": "x"}
LABELS = {"data.source": "labels", "data.path": "x", "model.labels": ("a", "b")}

SPANS = {"model.family": "encoder_decoder", "data.denoisers": (DenoiserConfig(),)}
PAIRS = {"model.family": "encoder_decoder", "data.source": "pairs", "data.path": "x"}

A, B = SourceConfig("path", "a", 1.0), SourceConfig("path", "b", 1.0)
TOKENS = {"data.source": "tokens", "data.path": "x", "data.format": "megatron"}
AB = {"data.mixture": (A, B)}


def mixed(*sources, **changes):
    """A mixture of these sources, with new weights from a step on."""
    new = tuple(WeightChange(int(step[1:]), weights) for step, weights in changes.items())
    return {"data.mixture": sources} | ({"data.mixture_changes": new} if new else {})


COMPLETIONS = {"data.source": "preferences", "data.path": "x", "run.init_from": "x"}
DELTA = {"model.delta.every": 2}
MTP = {"model.mtp.depth": 1}
STATES = {"model.ssm.layers": (True, False)}
MAMBA = {"model.ssm.layers": (True,), "model.ssm.mlp": False, "model.positions": "none"}
XIELU = {"model.activation": "xielu", "model.gated": False}
DYNAMIC = {"model.rope_scaling.kind": "dynamic", "model.rope_scaling.factor": 2.0}
DYNAMIC |= {"model.rope_scaling.original_max_position": 512}
LONGROPE = {"model.rope_scaling.kind": "longrope", "model.rope_scaling.original_max_position": 512}
LONGROPE |= {f"model.rope_scaling.{name}_factors": (1.0,) * 32 for name in ("short", "long")}
SCORES = {"preference.loss": "reward", "model.reward_head": True}
LATENT = {"model.latent.kv_rank": 32, "model.head_dim": 192}
PROMPTS = {"data.source": "prompts", "data.path": "x", "run.init_from": "x"}
EDGES = [  # what is refused, and beside it the nearest that is not, or is not by this check
    ({"run.dir": ""}, {"run.dir": "r"}),
    ({"kernels.decode_group": 64}, {"kernels.decode_group": 64, "kernels.decode_weights": "int4"}),
    ({"train.quant": "int8", "kernels.decode_weights": "int4"},
     {"train.quant": "int8", "kernels.decode_weights": "int8"}),
    ({"train.quant": "int8", "kernels.decode_weights": "int8", "kernels.decode_group": 64},
     {"train.quant": "fp8", "kernels.decode_weights": "int8", "kernels.decode_group": 64}),
    ({"train.offload": "residuals", "train.remat": "none"}, {"train.offload": "residuals", "train.remat": "full"}),
    ({"train.offload": "residuals", "mesh.pipe": 2}, {"train.offload": "optimizer", "mesh.pipe": 2}),
    ({"train.offload": "both", "kernels.layers": "unrolled"}, {"train.offload": "both", "kernels.layers": "scan"}),
    ({"train.offload": "optimizer", "kernels.update": "branch"},
     {"train.offload": "optimizer", "kernels.update": "select"}),
    ({"train.offload": "optimizer", "optim.name": "sgd", "optim.b1": 0.0},
     {"train.offload": "optimizer", "optim.name": "sgd", "optim.b1": 0.1}),
    (DIT | {"data.source": "captions", "data.path": "a"}, OWN_TEXTS),
    (DIT | {"model.diffusion.key_weight": 0.5}, OWN_TEXTS | {"model.diffusion.key_weight": 0.5}),
    (DIT | {"model.diffusion.salient_weight": 0.5}, OWN_TEXTS | {"model.diffusion.salient_weight": 0.5}),
    (DIT | {"data.key_words": ("cat",)}, OWN_TEXTS | {"data.key_words": ("cat",)}),
    (TOWERS | {"model.contrastive.translations": True, "data.languages": ("en",)},
     TOWERS | {"model.contrastive.translations": True, "data.languages": ("en", "de")}),
    ({"train.offload": "residuals", "debug.eager": True}, {"train.offload": "none", "debug.eager": True}),
    ({"model.rope_scaling.low_freq_factor": 4.0}, {"model.rope_scaling.low_freq_factor": 3.9}),
    ({"model.rope_scaling.low_freq_factor": 0.0}, {"model.rope_scaling.low_freq_factor": 0.1}),
    ({"model.rope_scaling.beta_slow": 32.1}, {"model.rope_scaling.beta_slow": 32.0}),
    ({"model.rope_scaling.short_factors": (1.0,)}, {"model.rope_scaling.short_factors": ()}),
    ({"model.rope_scaling.long_context": True}, LONGROPE | {"model.rope_scaling.long_context": True}),
    (LONGROPE | {"model.rope_scaling.long_factors": (0.0,) * 32}, LONGROPE),
    (LONGROPE | {"model.rope_scaling.short_factors": (1.0,) * 31}, LONGROPE),
    (LONGROPE | {"data.seq_len": 513}, LONGROPE | {"data.seq_len": 512}),
    ({"model.pre_norm": False}, {"model.pre_norm": False, "model.post_norm": True}),
    ({"model.pre_norm": False, "model.post_norm": True, "model.parallel": "one_norm"}, {"model.parallel": "one_norm"}),
    ({"model.post_norm": True, "model.parallel": "two_norms"}, {"model.post_norm": True}),
    ({"model.norm_bias": True}, {"model.norm_bias": True, "model.norm": "layer"}),
    ({"model.norm_bias": True, "model.norm": "layer", "model.bias": True}, {"model.norm": "layer", "model.bias": True}),
    ({"model.qk_norm_over": "all"}, {"model.qk_norm_over": "all", "model.qk_norm": True}),
    ({"model.rotary_fraction": 0.01}, {"model.rotary_fraction": 0.5}),
    ({"model.moe.layers.first": 1}, MOE | {"model.moe.layers.first": 1}),
    (MOE | {"model.moe.layers.numbers": (2, 1)}, MOE | {"model.moe.layers.numbers": (1, 2)}),
    (MOE | {"model.moe.layers.numbers": (1,), "model.moe.layers.first": 1}, MOE | {"model.moe.layers.first": 1}),
    (MOE | {"model.moe.layers.numbers": (6,)}, MOE | {"model.moe.layers.numbers": (5,)}),
    ({"model.moe.bias": True}, MOE | {"model.moe.bias": True}),
    ({"model.moe.swiglu_limit": 7.0}, MOE | {"model.moe.swiglu_limit": 7.0}),
    (MOE | {"model.moe.swiglu_limit": 7.0, "model.gated": False}, MOE | {"model.gated": False}),
    (MOE | {"model.moe.bias": True, "model.moe.shared_experts": 1}, MOE | {"model.moe.shared_experts": 1}),
    (MOE | {"model.moe.bias": True, "model.moe.router": "domain", "data.domains": tuple("abcdefgh")},
     MOE | {"model.moe.router": "domain", "data.domains": tuple("abcdefgh")}),
    (LATENT | {"model.attention_sinks": True}, {"model.attention_sinks": True}),
    (MOE | {"model.moe.layers.first": 6}, MOE | {"model.moe.layers.first": 5}),
    (MOE | {"model.moe.layers.first": 1, "model.windows": (4, 0)},
     MOE | {"model.moe.layers.first": 2, "model.windows": (4, 0)}),
    (MOE | {"model.moe.layers.first": 1, "mesh.pipe": 2},
     MOE | {"model.moe.layers.first": 1, "mesh.pipe": 2, "sample.prompts": ()}),
    ({"model.latent.rotary_dim": 32}, LATENT | {"model.latent.rotary_dim": 32}),
    ({"model.delta.taps": 3}, DELTA | {"model.delta.taps": 3}),
    (LATENT | {"model.latent.rotary_dim": 31}, LATENT | {"model.latent.rotary_dim": 32}),
    (LATENT | {"model.latent.rotary_dim": 192}, LATENT | {"model.latent.rotary_dim": 190}),
    (LATENT | {"model.positions": "learned"}, LATENT),
    (LATENT | {"model.rotary_fraction": 0.5}, {"model.rotary_fraction": 0.5}),
    (LATENT | {"model.num_kv_heads": 2}, {"model.num_kv_heads": 2}),
    (LATENT | {"model.qk_norm": True}, {"model.qk_norm": True}),
    (LATENT | {"model.attention_bias": "all"}, {"model.attention_bias": "all"}),
    ({"model.delta.taps": 3}, DELTA | {"model.delta.taps": 3}),
    (DELTA | {"model.delta.key_heads": 3}, DELTA | {"model.delta.key_heads": 4}),
    (DELTA | {"model.delta.every": 1}, DELTA),
    (DELTA | {"model.num_layers": 5}, {"model.num_layers": 5}),
    (DELTA | {"model.windows": (4, 0)}, {"model.windows": (4, 0)}),
    (DELTA | MOE | {"model.moe.layers.first": 2}, MOE | {"model.moe.layers.first": 2}),
    (DELTA | SIGMOID, DELTA | MOE),
    (DELTA | {"model.base_width": 64}, {"model.base_width": 64}),
    ({"model.mtp.weight": 0.3}, MTP | {"model.mtp.weight": 0.3}),
    (MTP | DELTA, DELTA),
    (MTP | {"model.positions": "learned"}, {"model.positions": "learned"}),
    (MTP | {"model.embedding_multiplier": 2.0}, {"model.embedding_multiplier": 2.0}),
    (MTP | {"model.lora.rank": 4, "run.init_from": "x"}, {"model.lora.rank": 4, "run.init_from": "x"}),
    (MTP | {"mesh.pipe": 2}, {"mesh.pipe": 2}),
    (MTP | COMPLETIONS, COMPLETIONS),
    (DELTA | {"model.attention_bias": "all"}, {"model.attention_bias": "all"}),
    (DELTA | {"mesh.pipe": 2}, DELTA | {"mesh.pipe": 2, "sample.prompts": ()}),
    (DELTA | {"mesh.context": 2, "data.seq_len": 8}, DELTA | {"mesh.context": 2, "data.seq_len": 12}),
    (LATENT | {"model.attention_gate": True}, {"model.attention_gate": True}),
    ({"model.ssm.taps": 3}, STATES | {"model.ssm.taps": 3}),
    (STATES | {"model.ssm.groups": 3}, STATES | {"model.ssm.groups": 4}),
    ({"model.ssm.layers": (False, False)}, STATES),
    (STATES | DELTA, STATES),
    (STATES | {"model.num_layers": 5}, {"model.num_layers": 5}),
    (STATES | {"model.ssm.layers": (True,)}, STATES | {"model.ssm.layers": (True,), "model.positions": "none"}),
    (STATES | {"model.ssm.heads": 30, "mesh.tensor": 4}, STATES | {"model.ssm.heads": 32, "mesh.tensor": 4}),
    (STATES | {"model.ssm.groups": 2, "mesh.tensor": 4}, STATES | {"model.ssm.groups": 1, "mesh.tensor": 4}),
    (STATES | {"mesh.context": 2, "data.seq_len": 8}, STATES | {"mesh.context": 2, "data.seq_len": 12}),
    (MAMBA | MOE, STATES | MOE),
    (MAMBA | {"model.parallel": "one_norm"}, {"model.parallel": "one_norm"}),
    (MAMBA | {"model.d_ff": 512}, MAMBA),
    ({"model.norm_weights": False, "model.norm_unit_offset": True}, {"model.norm_weights": False}),
    (XIELU | {"model.gated": True}, XIELU),
    (LATENT | {"model.clip_qkv": 8.0}, {"model.clip_qkv": 8.0}),
    ({"model.bias": True, "model.mlp_bias": True}, {"model.mlp_bias": True}),
    (MOE | {"model.mlp_bias": True}, {"model.mlp_bias": True}),
    (MAMBA | {"model.mlp_bias": True}, STATES | {"model.mlp_bias": True}),
    (XIELU | {"model.mlp_bias": True}, XIELU),
    ({"model.head_bias": True, "model.tied_embeddings": True}, {"model.head_bias": True}),
    (DYNAMIC | {"data.seq_len": 513}, DYNAMIC | {"data.seq_len": 512}),
    (DYNAMIC | {"model.rope_scaling.long_context": True, "model.rope_scaling.kind": "yarn"},
     DYNAMIC | {"model.rope_scaling.long_context": True, "data.seq_len": 1024}),
    ({"model.rope_layers": (True, False)}, {"model.rope_layers": (True, False), "model.windows": (0, 0)}),
    ({"model.rope_layers": (False,)}, {"model.rope_layers": (True,)}),
    (MOE | {"model.moe.shared_gate": True}, MOE | {"model.moe.shared_gate": True, "model.moe.shared_experts": 1}),
    (MOE | {"model.moe.top_k": 9}, MOE | {"model.moe.top_k": 8}),
    (SIGMOID | {"model.moe.top_k": 9}, SIGMOID | {"model.moe.top_k": 8}),
    (MOE | {"model.moe.top_k": 1}, MOE | {"model.moe.top_k": 1, "model.moe.normalize": False}),
    (MOE | {"model.moe.top_k": 1}, SIGMOID | {"model.moe.top_k": 1}),
    (SIGMOID | {"model.moe.num_groups": 3}, SIGMOID | {"model.moe.num_groups": 4}),
    (SIGMOID | {"model.moe.num_groups": 2, "model.moe.top_k_groups": 3},
     SIGMOID | {"model.moe.num_groups": 2, "model.moe.top_k_groups": 2}),
    (SIGMOID | {"model.moe.num_groups": 8, "model.moe.top_k_groups": 2, "model.moe.top_k": 3},
     SIGMOID | {"model.moe.num_groups": 8, "model.moe.top_k_groups": 3, "model.moe.top_k": 3}),
    (MOE | {"model.moe.capacity_factor": 0.0}, MOE | {"model.moe.capacity_factor": 0.1}),
    (MOE | {"model.moe.room": 0.0}, MOE | {"model.moe.room": 0.1}),
    (MOE | {"model.moe.capacity_factor": 1.0, "model.moe.room": None}, MOE | {"model.moe.room": None}),
    (DOMAIN | {"model.moe.capacity_factor": 1.0, "data.domains": ("a", "b")},
     DOMAIN | {"data.domains": ("a", "b")}),
    ({"model.lora.alpha": 0.0}, {"model.lora.alpha": 0.1}),
    ({"model.lora.targets": ()}, {"model.lora.targets": ("x",)}),
    ({"model.lora.targets": ("(",)}, {"model.lora.targets": ("()",)}),
    ({"model.dropout": 1.0}, {"model.dropout": 0.99}),
    ({"model.num_layers": 10_001}, {"model.num_layers": 10_000}),
    ({"model.dropout": -0.1}, {"model.dropout": 0.0}),
    ({"model.rope_theta": 1.0}, {"model.rope_theta": 1.1}),
    ({"model.num_heads": 3}, {"model.num_heads": 2}),
    ({"model.num_heads": 3}, {"model.num_heads": 3, "model.head_dim": 2}),
    ({"model.head_dim": 3}, {"model.head_dim": 4}),
    ({"model.head_dim": 3}, {"model.head_dim": 3, "model.positions": "none"}),
    ({"model.num_kv_heads": 3}, {"model.num_kv_heads": 2}),
    ({"model.windows": ()}, {"model.windows": (0,)}),
    ({"model.windows": (-1,)}, {"model.windows": (1,)}),
    ({"model.windows": (1, 1, 1, 1)}, {"model.windows": (1, 1, 1)}),
    (MOE | {"model.bias": True}, {"model.bias": True}),
    ({"model.bias": True, "model.attention_bias": "qkv"}, {"model.bias": True}),
    ({"model.base_width": 64, "model.embedding_scale": True}, {"model.embedding_scale": True}),
    ({"model.base_width": 64, "optim.name": "sgd"}, {"model.base_width": 64}),
    ({"model.norm_after": True}, ENCODER | {"model.norm_after": True}),
    ({"model.token_types": 2}, ENCODER | {"model.token_types": 2}),
    ({"model.first_position": 2}, ENCODER | {"model.first_position": 2}),
    ({"model.first_attention_norm": False, "model.norm_after": True}, {"model.first_attention_norm": False}),
    ({"data.mask_id": 4}, ENCODER | {"data.mask_id": 4}),
    ({"data.mask_words": True}, ENCODER | {"data.mask_words": True}),
    ({"data.mask_phrases": "x"}, ENCODER | {"data.mask_phrases": "x"}),
    (TRIPLES, ENCODER | TRIPLES),
    (NEXT | TRIPLES, ENCODER | TRIPLES),
    (ENCODER | {"data.triple_parts": ("tail",)}, ENCODER | TRIPLES | {"data.triple_parts": ("tail",)}),
    (ENCODER | TRIPLES | {"data.triple_parts": ()}, ENCODER | TRIPLES | {"data.triple_parts": ("tail", "head")}),
    (ENCODER | TRIPLES | {"data.triple_parts": ("tail", "tail")}, ENCODER | TRIPLES | {"data.triple_parts": ("head",)}),
    (ENCODER | TRIPLES | {"data.domains": (".*",)}, ENCODER | TRIPLES),
    (ENCODER | {"data.mask_id": 256}, ENCODER | {"data.mask_id": 255}),
    (ENCODER | {"model.vocab_size": 256}, ENCODER | {"model.vocab_size": 257}),
    (ENCODER | {"model.tied_embeddings": False}, {"model.tied_embeddings": False}),
    (TWO | MOE, ENCODER | MOE),
    (ENCODER | {"model.lora.rank": 1, "run.init_from": "x"}, {"model.lora.rank": 1, "run.init_from": "x"}),
    (ENCODER | {"model.base_width": 64}, {"model.base_width": 64}),
    (ENCODER | {"model.logit_softcap": 1.0}, ENCODER | {"model.attention_softcap": 1.0}),
    (ENCODER | {"train.ngram_baseline": True}, {"train.ngram_baseline": True}),
    (ENCODER | {"data.source": "chat", "data.path": "x"}, ENCODER | {"data.source": "path", "data.path": "x"}),
    (ENCODER | {"sample.prompts": ("a",)}, ENCODER | {"sample.prompts": ()}),
    ({"model.labels": ("a",)}, ENCODER | LABELS),
    ({"model.labels": ("a", "b")}, ENCODER | LABELS),
    ({"model.label_each": "token"}, ENCODER | LABELS | {"model.label_each": "token"}),
    (CUT | {"model.num_layers": 2}, CUT | {"model.num_layers": 4}),
    ({"model.label_pooling": "mean"}, ENCODER | LABELS | {"model.label_pooling": "mean"}),
    (ENCODER | LABELS | {"model.label_pooling": "mean", "model.label_each": "token"},
     ENCODER | LABELS | {"model.label_each": "token"}),
    (ENCODER | LABELS | {"model.labels": ()}, ENCODER | LABELS),
    (ENCODER | {"model.labels": ("a", "b")}, ENCODER | LABELS),
    (MOE | {"model.moe.layers.encoder_numbers": (1,)}, SPANS | MOE | {"model.moe.layers.encoder_numbers": (1,)}),
    (
        SPANS | MOE | {"model.encoder_layers": 4, "model.moe.layers.encoder_numbers": (4,)},
        SPANS | MOE | {"model.encoder_layers": 5, "model.moe.layers.encoder_numbers": (4,)},
    ),
    (
        SPANS | MOE | {"model.encoder_layers": 4, "model.moe.layers.first": 4},
        SPANS | MOE | {"model.encoder_layers": 5, "model.moe.layers.first": 4},
    ),
    ({"model.sentences.parts": 4}, NEXT | {"model.sentences.parts": 4}),
    (NEXT | {"model.sentences.tasks": ("next", "next")}, NEXT | {"model.sentences.tasks": ("next", "distance")}),
    (NEXT | {"model.family": "decoder"}, NEXT | {"model.family": "branches"}),
    (NEXT | {"data.packing": True}, {**NEXT, "model.sentences.tasks": (), "data.packing": True}),
    (NEXT | {"data.seq_len": 11}, NEXT | {"data.seq_len": 12}),
    ({"model.branches.layers": 1}, TWO | {"model.branches.layers": 1}),
    (TWO | {"model.branches.rates": (0, 1)}, TWO | {"model.branches.rates": (2, 1)}),
    (TWO | {"model.branches.freeze_trunk": True}, TWO | {"model.branches.freeze_trunk": True, "run.init_from": "x"}),
    (TWO | {"model.branches.layers": 6}, TWO | {"model.branches.layers": 5}),
    (TWO | {"model.windows": (1,)}, {"model.windows": (1,)}),
    (TWO | {"mesh.context": 2}, TWO | {"mesh.context": 2, "mesh.context_method": "all_gather"}),
    (TWO | {"model.tied_embeddings": False}, {"model.tied_embeddings": False}),
    (TWO | {"model.norm_after": True}, ENCODER | {"model.norm_after": True}),
    ({"data.mask_id": 4}, TWO | {"data.mask_id": 4}),
    ({"model.encoder_layers": 2}, PAIRS | {"model.encoder_layers": 2}),
    (ENCODER | {"model.head_scale": 2.0}, {"model.head_scale": 2.0}),
    ({"model.positions": "relative"}, PAIRS | {"model.positions": "relative"}),
    (PAIRS | {"model.windows": (1,)}, ENCODER | {"model.windows": (1,)}),
    (PAIRS | {"model.post_norm": True}, {"model.post_norm": True}),
    (ENCODER | {"mesh.context": 2}, ENCODER | {"mesh.context": 2, "mesh.context_method": "all_gather"}),
    ({"data.denoisers": (DenoiserConfig(),)}, SPANS),
    ({"data.source": "pairs", "data.path": "x"}, PAIRS),
    ({"model.family": "encoder_decoder"}, PAIRS),
    ({"data.languages": ("de",)}, PAIRS | {"data.languages": ("de",)}),
    (PAIRS | {"data.languages": ("de", "de")}, PAIRS | {"data.languages": ("de", "fr")}),
    ({"data.target_len": 80}, SPANS | {"data.target_len": 80}),
    (SPANS | {"data.source": "chat", "data.path": "x"}, SPANS | {"data.source": "path", "data.path": "x"}),
    (PAIRS | {"data.denoisers": (DenoiserConfig(),)}, PAIRS),
    (SPANS | {"data.packing": True}, PAIRS | {"data.packing": True}),
    (SPANS | {"data.domains": ("a",)}, PAIRS | DOMAIN | {"data.domains": ("a", "b"), "data.languages": ("a", "b")}),
    (SPANS | {"data.denoisers": (DenoiserConfig(mode=""),)}, SPANS | {"data.denoisers": (DenoiserConfig(mode="S"),)}),
    (SPANS | {"data.seq_len": 15}, SPANS | {"data.seq_len": 16}),
    (SPANS | {"data.target_len": 4}, SPANS | {"data.target_len": 5}),
    (SPANS | {"data.target_len": 6, "mesh.tensor": 4}, SPANS | {"data.target_len": 8, "mesh.tensor": 4}),
    (PAIRS | {"data.target_len": 6, "mesh.tensor": 4}, PAIRS | {"data.target_len": 8, "mesh.tensor": 4}),
    ({"data.source": "digits"}, DIT),
    (TIMESTEP, DIT | TIMESTEP),
    (DIT | MOE | {"model.moe.router": "softmax"}, DIT | TIMESTEP),
    (DIT | {"data.source": "stdlib"}, DIT),
    (DIT | {"data.source": "images"}, DIT | {"data.source": "images", "data.path": "x"}),
    (DIT | {"data.path": "x"}, DIT),
    (DIT | {"model.tied_embeddings": True}, {"model.tied_embeddings": True}),
    (DIT | {"model.lora.rank": 1, "run.init_from": "x"}, {"model.lora.rank": 1, "run.init_from": "x"}),
    (DIT | {"model.dropout": 0.1}, {"model.dropout": 0.1}),
    (DIT | {"mesh.context": 2}, DIT | {"mesh.context": 2, "mesh.context_method": "all_gather"}),
    (DIT | {"model.diffusion.image": (8, 8)}, DIT | {"model.diffusion.image": (8, 8, 3)}),
    (DIT | {"model.diffusion.image": (8, 8, 0)}, DIT),
    (DIT | {"model.diffusion.image": (8, 9, 1)}, DIT),
    (DIT | {"model.diffusion.patch_size": 3}, DIT | {"model.diffusion.patch_size": 4}),
    (DIT | {"model.diffusion.image": ()}, DIT),
    (DIT | {"data.seq_len": 32}, DIT),
    (DIT | {"model.diffusion.class_dropout": 1.0}, DIT | {"model.diffusion.class_dropout": 0.0}),
    (DIT | {"data.languages": ("en",)}, TOWERS | {"data.languages": ("en",)}),
    (DIT | {"data.target_len": 8}, TOWERS | {"data.target_len": 8}),
    (DIT | {"data.tokenizer": "chars"}, DIT | {"data.tokenizer": "chars", "model.diffusion.text_layers": 1}),
    ({"model.diffusion.text_layers": 1},
     DIT | {"model.diffusion.text_layers": 1, "data.languages": ("en",), "data.target_len": 8}),
    ({"model.contrastive.loss": "softmax"}, TOWERS | {"model.contrastive.loss": "softmax"}),
    ({"model.contrastive.caption_layers": 1}, TOWERS | {"model.contrastive.caption_layers": 1}),
    ({"model.contrastive.patch_size": 4}, TOWERS | {"model.contrastive.patch_size": 2}),
    (TOWERS | {"model.contrastive.caption_weight": 1.0},
     TOWERS | {"model.contrastive.caption_weight": 1.0, "model.contrastive.caption_layers": 1}),
    (TOWERS | {"data.source": "stdlib"}, TOWERS),
    (TOWERS | {"data.batch_size": 1}, TOWERS | {"data.batch_size": 2}),
    (TOWERS | MOE, DIT | TIMESTEP),
    (TOWERS | {"model.windows": (1,)}, {"model.windows": (1,)}),
    (TOWERS | {"data.packing": True}, {"data.packing": True}),
    (TOWERS | {"model.contrastive.image": ()}, TOWERS),
    (TOWERS | {"model.contrastive.patch_size": 3}, TOWERS | {"model.contrastive.patch_size": 2}),
    (TOWERS | {"data.seq_len": 32}, TOWERS),
    (TOWERS | {"data.target_len": 6, "mesh.tensor": 4}, TOWERS | {"data.target_len": 8, "mesh.tensor": 4}),
    (TOWERS | {"model.positions": "learned", "model.max_positions": 15, "data.target_len": 16},
     TOWERS | {"model.positions": "learned", "model.max_positions": 16, "data.target_len": 16}),
    (TOWERS | {"data.denoisers": (DenoiserConfig(),)}, TOWERS),
    ({"model.attention_softcap": 0.0}, {"model.attention_softcap": 0.1}),
    ({"model.logit_softcap": 0.0}, {"model.logit_softcap": 0.1}),
    ({"model.attention_scale": 0.0}, {"model.attention_scale": 0.1}),
    ({"data.eval_fraction": 0.0}, {"data.eval_fraction": 0.01}),
    ({"data.eval_fraction": 1.0}, {"data.eval_fraction": 0.99}),
    ({"data.tokenizer": ""}, {"data.tokenizer": "chars"}),
    ({"data.source": "path"}, {"data.source": "path", "data.path": "x"}),
    ({"data.path": "x"}, {"data.path": "x", "data.source": "tokens"}),
    ({"data.mixture_changes": (WeightChange(3, (1.0, 2.0)),)}, mixed(A, B, s3=(1.0, 2.0))),
    (AB | {"data.source": "path", "data.path": "x"}, AB),
    (AB | {"data.source": "tokens"}, AB),
    (DOMAIN | AB | {"data.domains": ("a", "b")}, DOMAIN | {"data.domains": ("a", "b")}),
    (mixed(SourceConfig("path")), mixed(SourceConfig("stdlib"))),
    (mixed(SourceConfig("stdlib", "x")), mixed(SourceConfig("tokens", "x"))),
    (mixed(SourceConfig("path", "x", name="")), mixed(SourceConfig("path", "x", name="a b"))),
    (mixed(SourceConfig("path", "x", name="a ")), mixed(SourceConfig("path", "x", name="a"))),
    (mixed(A, SourceConfig("path", "b", name="a")), mixed(A, SourceConfig("path", "x/b", name="c"))),
    (mixed(A, SourceConfig("hf", "x/a")), mixed(A, SourceConfig("hf", "x/a", name="y"))),
    (mixed(A, B, s3=(1.0,)), mixed(A, B, s3=(1.0, 0.0))),
    (mixed(A, B, s3=(0.0, 0.0)), mixed(A, B, s3=(0.0, 1.0))),
    (mixed(A, B, s3=(1.0, math.inf)), mixed(A, B, s3=(0.0, 1e9))),
    (mixed(SourceConfig("path", "a", -1.0), B), mixed(SourceConfig("path", "a", 0.0), B)),
    (mixed(SourceConfig("path", "a", 0.0)), mixed(A)),
    (mixed(A, B, s3=(1.0, 2.0), s2=(1.0, 3.0)), mixed(A, B, s3=(1.0, 2.0), s4=(1.0, 3.0))),
    (mixed(A, B, s0=(1.0, 2.0)), mixed(A, B, s1=(1.0, 2.0))),
    ({"data.format": "nanogpt"}, {"data.format": "nanogpt", "data.source": "tokens", "data.path": "x"}),
    (mixed(SourceConfig("path", "x", format="llmc")), mixed(SourceConfig("tokens", "x", format="llmc"))),
    ({"data.tokenizer": "ids", "data.vocab_size": 9}, TOKENS | {"data.tokenizer": "ids", "data.vocab_size": 9}),
    (TOKENS | {"data.tokenizer": "ids"}, TOKENS),
    (TOKENS | {"data.vocab_size": 9}, TOKENS),
    (AB | {"data.glob": "*.txt"}, AB),
    ({"data.glob": "*.txt"}, {"data.glob": "*.txt", "data.source": "path", "data.path": "x"}),
    ({"data.glob": "", "data.source": "path", "data.path": "x"}, {"data.source": "path", "data.path": "x"}),
    (mixed(SourceConfig("tokens", "x", glob="*")), mixed(SourceConfig("path", "x", glob="*"))),
    ({"data.skip": True}, {"data.skip": True, "data.source": "path", "data.path": "x"}),
    (TOKENS | {"data.skip": True}, AB | {"data.skip": True}),
    ({"train.spike.threshold": 0.0}, {"train.spike.threshold": 0.1}),
    ({"train.loss_scale.initial": 1000.0}, {"train.loss_scale.initial": 1024.0}),
    ({"optim.b1": 1.0}, {"optim.b1": 0.99}),
    ({"optim.b2": -0.1}, {"optim.b2": 0.0}),
    ({"optim.final_lr_fraction": 1.1}, {"optim.final_lr_fraction": 1.0}),
    ({"optim.final_lr_fraction": -0.1}, {"optim.final_lr_fraction": 0.0}),
    ({"optim.decay_fraction": 0.0}, {"optim.decay_fraction": 0.1}),
    ({"optim.decay_fraction": 1.1}, {"optim.decay_fraction": 1.0}),
    ({"optim.clip_norm": 0.0}, {"optim.clip_norm": None}),
    ({"mesh.tensor": 0}, {"mesh.tensor": 1}),
    ({"mesh.tensor": -2}, {"mesh.tensor": -1, "mesh.data": 1}),
    ({"mesh.fsdp": -1}, {"mesh.fsdp": -1, "mesh.data": 1}),
    ({"pipeline.partition": ""}, {"pipeline.partition": "auto"}),
    ({"pipeline.chunks": 2}, {"pipeline.chunks": 2, "pipeline.schedule": "interleaved_1f1b"}),
    ({"pipeline.schedule": "zb_h1", "pipeline.chunks": 2}, {"pipeline.schedule": "zb1", "pipeline.chunks": 2}),
    (H1_RING, H1_RING | {"mesh.context_method": "all_gather"}),
    (H1_RING, H1_RING | {"pipeline.schedule": "zb1"}),
    (H1_RING, H1_RING | {"mesh.pipe": 1}),
    ({"pipeline.split": ("(",)}, {"pipeline.split": ("mlp/.*",)}),
    ({"distributed.num_processes": 2}, {"distributed.num_processes": 1}),
    ({"distributed.num_processes": 1, "distributed.process_id": 0}, THREE),
    (THREE | {"distributed.coordinator": "host"}, THREE),
    (THREE | {"distributed.coordinator": ":1234"}, THREE),
    (THREE | {"distributed.coordinator": "host:x"}, THREE),
    (THREE | {"distributed.coordinator": "host:0"}, THREE | {"distributed.coordinator": "host:1"}),
    (THREE | {"distributed.coordinator": "host:65536"}, THREE | {"distributed.coordinator": "host:65535"}),
    (THREE | {"distributed.process_id": 2}, THREE | {"distributed.process_id": 1}),
    ({"sample.top_p": 0.0}, {"sample.top_p": 0.1}),
    ({"sample.top_p": 1.1}, {"sample.top_p": 1.0}),
    ({"sample.min_p": -0.1}, {"sample.min_p": 0.0}),
    ({"sample.min_p": 1.1}, {"sample.min_p": 1.0}),
    ({"sample.repetition_penalty": 0.0}, {"sample.repetition_penalty": 0.1}),
    ({"sample.beams": 2}, {"sample.beams": 2, "sample.temperature": 0.0}),
    ({"debug.watch": ("a", "")}, {"debug.watch": ("a", "b")}),
    ({"debug.watch": ""}, {"debug.watch": "a"}),
    (BEAMS | {"sample.repetition_penalty": 1.1}, BEAMS),
    (BEAMS | {"sample.rows": 2}, BEAMS),
    ({"sample.rows": 0}, {"sample.rows": 1}),
    ({"distill.weight": 0.0}, {"distill.weight": 1.0}),
    ({"distill.weight": 1.1}, {"distill.weight": 0.1}),
    ({"distill.temperature": 0.0}, {"distill.temperature": 0.1}),
    ({"distill.top_tokens": 0}, {"distill.top_tokens": 1}),
    (TOWERS | {"distill.teacher": "RUN"}, ENCODER | {"distill.teacher": "RUN"}),
    (DIT | {"distill.teacher": "RUN", "distill.temperature": 2.0}, DIT | {"distill.teacher": "RUN"}),
    ({"distill.teacher": "RUN", "data.domains": ("a",), "data.buckets": "auto"},
     {"distill.teacher": "RUN", "data.domains": ("a",)}),
    ({"rl.group": 4}, PROMPTS | {"rl.group": 4}),
    (PROMPTS | {"rl.group": 1}, PROMPTS | {"rl.group": 2}),
    (PROMPTS | {"rl.group": 3}, PROMPTS | {"rl.group": 16}),
    (PROMPTS | {"rl.tokens": 256}, PROMPTS | {"rl.tokens": 255}),
    (PROMPTS | {"rl.overlong_buffer": 129}, PROMPTS | {"rl.overlong_buffer": 128}),
    (PROMPTS | {"rl.rewards": ("a:b",), "rl.weights": (1.0, 2.0)},
     PROMPTS | {"rl.rewards": ("a:b", "a:c"), "rl.weights": (1.0, 2.0)}),
    (PROMPTS | {"rl.updates": 2, "rl.loss": "rloo"}, PROMPTS | {"rl.updates": 2}),
    (PROMPTS | {"rl.tool": "a:b"}, PROMPTS | {"rl.tool": "a:b", "rl.turns": 2}),
    (PROMPTS | {"rl.overlong_buffer": 2, "rl.turns": 2}, PROMPTS | {"rl.overlong_buffer": 2}),
    (PROMPTS | {"mesh.pipe": 2}, PROMPTS | {"mesh.pipe": 2, "train.remat": "full"}),
    (PROMPTS | {"mesh.pipe": 2}, PROMPTS | {"mesh.pipe": 2, "rl.exact": False}),
    (PROMPTS | MOE | {"model.moe.layers.first": 1, "mesh.pipe": 2, "train.remat": "full", "sample.prompts": ()},
     PROMPTS | MOE | {"mesh.pipe": 2, "train.remat": "full", "sample.prompts": ()}),
    (PROMPTS | {"rl.clip_low": 0.1, "rl.loss": "cispo"}, PROMPTS | {"rl.clip_high": 0.1, "rl.loss": "cispo"}),
    (PROMPTS | {"rl.clip_high": 0.1, "rl.loss": "rloo"}, PROMPTS | {"rl.clip_high": 0.1, "rl.loss": "gspo"}),
    (PROMPTS | {"run.init_from": None}, PROMPTS),
    (PROMPTS | {"model.dropout": 0.1}, PROMPTS),
    (PROMPTS | {"data.packing": True}, PROMPTS),
    (PROMPTS | {"mesh.context": 2}, PROMPTS | {"mesh.tensor": 2}),
    (PROMPTS | {"model.lora.rank": 2}, COMPLETIONS | {"model.lora.rank": 2}),
    (PROMPTS | MOE | {"model.moe.router": "timestep"}, PROMPTS | MOE),
    (PROMPTS | {"train.qat": "int8"}, COMPLETIONS | {"train.qat": "int8"}),
    (PROMPTS | {"train.debug": True}, COMPLETIONS | {"train.debug": True}),
    (PROMPTS | {"distill.teacher": "x"}, PROMPTS),
    ({"run.init_from": "x", "data.mixture": (SourceConfig("prompts", "a"), SourceConfig("chat", "b"))}, PROMPTS),
    ({"preference.beta": 0.2}, COMPLETIONS | {"preference.beta": 0.2}),
    (COMPLETIONS | {"preference.beta": 0.0}, COMPLETIONS | {"preference.beta": 0.1}),
    (COMPLETIONS | {"preference.nll_weight": -0.1}, COMPLETIONS | {"preference.nll_weight": 0.0}),
    (COMPLETIONS | {"preference.label_smoothing": 0.5}, COMPLETIONS | {"preference.label_smoothing": 0.49}),
    (COMPLETIONS | {"preference.label_smoothing": 0.1, "preference.loss": "ipo"},
     COMPLETIONS | {"preference.label_smoothing": 0.1, "preference.loss": "robust"}),
    (COMPLETIONS | {"preference.gamma": 0.1}, COMPLETIONS | {"preference.gamma": 0.1, "preference.loss": "simpo"}),
    (COMPLETIONS | {"preference.reference": "y", "preference.loss": "orpo"},
     COMPLETIONS | {"preference.reference": "y"}),
    (COMPLETIONS | {"run.init_from": None, "preference.loss": "dpo"},
     COMPLETIONS | {"run.init_from": None, "preference.loss": "orpo"}),
    (COMPLETIONS | SCORES | {"model.reward_head": False}, COMPLETIONS | SCORES),
    (COMPLETIONS | {"model.reward_head": True}, COMPLETIONS | SCORES),
    (SCORES | {"model.reward_head": True, "preference.loss": "dpo"}, COMPLETIONS),
    (COMPLETIONS | {"preference.margin": 0.5}, COMPLETIONS | SCORES | {"preference.margin": 0.5}),
    (COMPLETIONS | SCORES | {"preference.center": -0.5}, COMPLETIONS | SCORES | {"preference.center": 0.01}),
    (COMPLETIONS | SCORES | {"preference.beta": 0.5}, COMPLETIONS | SCORES),
    (ENCODER | {"model.reward_head": True}, ENCODER),
    (COMPLETIONS | {"preference.wanted_weight": 2.0},
     COMPLETIONS | {"preference.wanted_weight": 2.0, "preference.loss": "kto"}),
    (COMPLETIONS | {"preference.wanted_weight": -1.0, "preference.loss": "kto"},
     COMPLETIONS | {"preference.unwanted_weight": 0.0, "preference.loss": "kto"}),
    (COMPLETIONS | {"preference.wanted_weight": 0.0, "preference.unwanted_weight": 0.0, "preference.loss": "kto"},
     COMPLETIONS | {"preference.wanted_weight": 0.0, "preference.loss": "kto"}),
    (COMPLETIONS | {"preference.nll_weight": 0.5, "preference.loss": "kto"},
     COMPLETIONS | {"preference.nll_weight": 0.0, "preference.loss": "kto"}),
    (COMPLETIONS | {"distill.teacher": "x"}, COMPLETIONS),
    (COMPLETIONS | {"data.buckets": "auto"}, COMPLETIONS | {"data.packing": True}),
    (COMPLETIONS | MOE | {"model.moe.router": "timestep"}, COMPLETIONS | MOE),
    ({"run.init_from": "x", "data.mixture": (SourceConfig("preferences", "a"), SourceConfig("chat", "b"))},
     {"run.init_from": "x", "data.mixture": (SourceConfig("preferences", "a"), SourceConfig("preferences", "b"))}),
    ({"train.qat": "fp8"}, {"train.qat": "fp8", "train.qat_group": None}),
    ({"train.qat": "nf4", "train.qat_group": 32}, {"train.qat": "nf4"}),
    ({"train.qat_group": 0}, {"train.qat_group": 1}),
    ({"data.max_documents": 8}, {"data.max_documents": 8, "data.packing": True}),
    ({"data.max_documents": 0, "data.packing": True}, {"data.max_documents": 1, "data.packing": True}),
    ({"data.max_padding": 0.2}, {"data.max_padding": 0.2, "data.buckets": "auto"}),
    ({"data.buckets": (256, 128)}, {"data.buckets": (128, 256)}),
    ({"data.buckets": (0, 256)}, {"data.buckets": (1, 256)}),
    ({"data.buckets": (64, 128)}, {"data.buckets": (64, 128), "data.seq_len": 128}),
    ({"data.buckets": "auto", "data.packing": True}, {"data.packing": True}),
    (SPANS | {"data.packing": "best_fit"}, SPANS),
    (SPANS | {"data.buckets": "auto"}, SPANS),
    (ENCODER | {"data.buckets": "auto"}, LABELS | ENCODER | {"data.buckets": "auto"}),
    (ENCODER | {"data.packing": "best_fit"}, ENCODER | {"data.packing": True}),
    (MOE | {"model.moe.capacity_factor": 1.0, "data.buckets": "auto"}, MOE | {"data.buckets": "auto"}),
    ({"data.buckets": (24, 256)}, {"data.buckets": (32, 256)}),
    ({"data.buckets": (192, 256), "data.batch_size": 12, "mesh.data": 3}, {"data.buckets": (128, 256)}),
    ({"data.buckets": (8, 256), "mesh.context": 8}, {"data.buckets": (16, 256), "mesh.context": 8}),
    (PAIRS | {"data.buckets": (8, 256), "data.target_len": 16},
     PAIRS | {"data.buckets": (16, 256), "data.target_len": 16}),
    ({"data.buckets": (128, 256), "mesh.pipe": 2, "pipeline.microbatches": 3, "data.batch_size": 4},
     {"data.buckets": (128, 256), "mesh.pipe": 2, "pipeline.microbatches": 4, "data.batch_size": 4}),
    ({"sample.prompts": ("a", "")}, {"sample.prompts": ("a",)}),
    ({"profile.steps": "5"}, {"profile.steps": ""}),
    ({"profile.steps": "0:5"}, {"profile.steps": "1:5"}),
    ({"profile.steps": "5:4"}, {"profile.steps": "5:5"}),
    ({"profile.steps": "5:11", "train.steps": 10}, {"profile.steps": "5:10", "train.steps": 10}),
    ({"train.grad_accum": 3}, {"train.grad_accum": 4}),
    (DOMAIN | {"data.domains": ("a",)}, DOMAIN | {"data.domains": ("a", "b")}),
    (MOE | {"data.domains": ("a",)}, MOE),
    (DOMAIN | {"data.domains": ("a", "b"), "data.source": "tokens", "data.path": "x"},
     DOMAIN | {"data.domains": ("a", "b"), "data.source": "path", "data.path": "x"}),
    (MOE | {"model.moe.router": "timestep"}, {"model.moe.router": "timestep"}),
    (DIT | TIMESTEP | {"model.moe.timestep_starts": (500,)}, DIT | TIMESTEP),
    (DIT | TIMESTEP | {"model.moe.timestep_starts": (1, 2, 3, 4, 5, 7, 7)},
     DIT | TIMESTEP | {"model.moe.timestep_starts": (1, 2, 3, 4, 5, 6, 999)}),
    ({"model.diffusion.class_dropout": 0.2}, DIT | {"model.diffusion.class_dropout": 0.2}),
    ({"sample.domain": 1}, {"sample.domain": 0}),
    (DOMAIN | {"data.domains": ("a", "b"), "sample.domain": 2},
     DOMAIN | {"data.domains": ("a", "b"), "sample.domain": 1}),
    ({"model.lora.rank": 1}, {"model.lora.rank": 1, "run.init_from": "x"}),
    ({"optim.keep_zeros": True}, {"optim.keep_zeros": True, "run.init_from": "x"}),
    ({"optim.keep_zeros": True, "run.init_from": "x", "model.lora.rank": 1},
     {"run.init_from": "x", "model.lora.rank": 1}),
    ({"run.init_adapter": "a"}, {"run.init_adapter": "a", "run.init_from": "x", "model.lora.rank": 1}),
    (BEAMS | {"sample.tokens": 11, "data.seq_len": 16}, BEAMS | {"sample.tokens": 10, "data.seq_len": 16}),
    (BEAMS | {"sample.tokens": 11, "data.seq_len": 16},
     {"sample.tokens": 11, "data.seq_len": 16, "sample.prompts": ("abcdef",)}),
    (BEAMS | {"sample.prompts": None, "sample.tokens": 16, "data.seq_len": 16},
     BEAMS | {"sample.prompts": None, "sample.tokens": 15, "data.seq_len": 16}),
    ({"model.positions": "learned", "model.max_positions": 15, "data.seq_len": 16},
     {"model.positions": "learned", "model.max_positions": 16, "data.seq_len": 16}),
    ({"mesh.data": 3}, {"mesh.data": 4}),
    ({"mesh.fsdp": 16, "train.grad_accum": 2}, {"mesh.fsdp": 8, "train.grad_accum": 2}),
    ({"mesh.expert": 3}, {"mesh.expert": 1}),
    ({"mesh.tensor": 8}, {"mesh.tensor": 4}),
    ({"mesh.tensor": 4, "model.num_kv_heads": 2}, {"mesh.tensor": 2, "model.num_kv_heads": 2}),
    ({"mesh.tensor": 4, "model.d_ff": 6}, {"mesh.tensor": 2, "model.d_ff": 6}),
    (MOE | {"mesh.tensor": 4, "model.moe.d_ff": 6}, MOE | {"mesh.tensor": 2, "model.moe.d_ff": 6}),
    (MOE | {"mesh.expert": 16}, MOE | {"mesh.expert": 8}),
    (MOE | {"mesh.fsdp": 2, "mesh.expert": 8, "model.d_model": 72}, MOE | {"mesh.expert": 8, "model.d_model": 72}),
    ({"mesh.pipe": 4, "model.head_dim": 32, "model.d_model": 130},
     {"mesh.pipe": 4, "model.head_dim": 32, "model.d_model": 132}),
    ({"mesh.pipe": 4, "model.head_dim": 32, "model.d_model": 130},
     {"mesh.pipe": 4, "model.head_dim": 32, "model.d_model": 130, "model.tied_embeddings": True}),
    (MOE | {"model.moe.capacity_factor": 1.0, "mesh.context": 2}, MOE | {"model.moe.capacity_factor": 1.0}),
    ({"mesh.partitioner": "auto", "mesh.pipe": 2}, {"mesh.partitioner": "auto"}),
    ({"mesh.partitioner": "auto", "train.quant": "int8"}, {"mesh.partitioner": "auto"}),
    ({"mesh.partitioner": "auto", "mesh.zero": "state"}, {"mesh.zero": "state"}),
    ({"mesh.context": 2, "data.seq_len": 6}, {"mesh.context": 2, "data.seq_len": 8}),
    ({"mesh.tensor": 4, "data.seq_len": 6}, {"mesh.tensor": 4, "data.seq_len": 6, "mesh.sequence_parallel": False}),
    ({"mesh.context": 2, "mesh.tensor": 4, "data.seq_len": 12},
     {"mesh.context": 2, "mesh.tensor": 4, "data.seq_len": 16}),
    ({"model.vocab_size": 255}, {"model.vocab_size": 256}),
    ({"model.pad_vocab_to": 255}, {"model.pad_vocab_to": 256}),
]  # fmt: skip


def groups(kind=Config, prefix=""):
    """Every group of keys, by its dotted name."""
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            yield f"{prefix}{name}", hint
            yield from groups(hint, f"{prefix}{name}.")


BOUNDS = {
    f"{group}.{name}": (interval, typing.get_type_hints(kind)[name])
    for group, kind in groups()
    for name, hint in typing.get_type_hints(kind, include_extras=True).items()
    if (interval := bounds.interval_of(hint))
}
"""Every bounded key: its interval and its type."""


def edges():
    """For both ends of every interval: a value outside, and the nearest inside."""
    for key, (interval, kind) in BOUNDS.items():
        step = 1 if "int" in str(kind) else 1 / 16
        for end, is_open, outwards in ((interval.low, interval.low_open, -1), (interval.high, interval.high_open, 1)):
            if not math.isinf(end):
                wrong, right = (end, end - outwards * step) if is_open else (end + outwards * step, end)
                yield {key: wrong}, {key: right}


def build(kind, values, prefix=""):
    """A configuration of dotted keys."""
    own = {}
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            own[name] = build(hint, values, f"{prefix}{name}.")
        elif f"{prefix}{name}" in values:
            own[name] = values[f"{prefix}{name}"]
    return kind(**own)


def refusal(values):
    """The check that refuses a configuration, by file and line or by its bounded key, and its message; or nothing."""
    try:
        config.resolve(build(Config, values), 256)
    except ConfigError as error:
        frames = traceback.extract_tb(error.__traceback__)
        if frames[-1].name == "check_value":
            return str(error).partition("=")[0], str(error)
        frame = [f for f in frames if f.filename in FILES][-1]
        found = [
            (path, line)
            for (path, line), node in CHECKS.items()
            if path == frame.filename and line <= frame.lineno <= node.end_lineno
        ]
        assert len(found) == 1, (values, frame)
        return found[0], str(error)
    return None, ""


def test_every_check_refuses_what_is_past_its_edge_and_nothing_before_it():
    seen = set()
    for wrong, right in [*EDGES, *edges()]:
        check, message = refusal(wrong)
        assert check is not None, f"nothing refuses {wrong}"
        named = [(key, value) for key, value in wrong.items() if key in message]
        assert named, message
        assert "empty" in message or any(str(value).strip("(),'").lower() in message for _, value in named), message
        assert "\n" not in message
        assert message.endswith(".")
        assert ". " in message, f"say what is wrong, then what to do: {message}"
        assert refusal(right)[0] != check, f"{right} is refused: {refusal(right)[1]}"
        seen.add(check)
    unseen = [ast.unparse(node) for place, node in CHECKS.items() if place not in seen]
    assert not unseen, "no row of EDGES is refused by these checks; add one for each"
    assert seen >= BOUNDS.keys()


FAMILIES = {"encoder": ENCODER, "branches": TWO, "encoder_decoder": PAIRS, "diffusion": DIT, "contrastive": TOWERS}
OTHER_VALUES = {
    "model.ssm.layers": (True, False), "model.clip_qkv": 8.0,
    "model.windows": (1,), "model.logit_softcap": 1.0, "model.pad_vocab_to": 512, "model.lora.rank": 1,
    "model.base_width": 64, "data.domains": ("a",), "data.languages": ("en",), "data.target_len": 16,
    "data.tokenizer": "chars", "data.mask_id": 4, "data.mask_phrases": "x", "sample.prompts": ("a",), "sample.beams": 4,
    "model.labels": ("a", "b"), "model.encoder_layers": 2, "model.diffusion.image": (8, 8, 1),
    "model.diffusion.path": "cosine", "model.contrastive.image": (8, 8, 1), "model.contrastive.loss": "softmax",
    "model.contrastive.features": 8, "model.branches.layers": 1, "model.branches.rates": (2, 1),
    "model.moe.layers.numbers": (1,), "model.moe.layers.encoder_numbers": (1,),
}  # fmt: skip
"""Values that are not the default of their key, where it is not a number or a switch."""
WITH = {"sample.beams": {"sample.temperature": 0.0}, "model.moe.num_experts": {"model.moe.top_k": 1}}
WITH |= {"model.lora.rank": {"run.init_from": "x"}, "model.moe.num_experts": {"model.moe.router": "sigmoid"}}
WITH |= {"data.domains": DOMAIN, "model.latent.kv_rank": {"model.head_dim": 192}}
WITH |= {f"model.moe.layers.{key}": MOE for key in ("first", "every", "numbers", "encoder_numbers")}
ROWS = [(row.key, row.default, family, FAMILIES.get(family, {})) for row in families.ONLY
        for family in ("decoder", *FAMILIES) if family not in row.families]  # fmt: skip
ROWS += [(row.key, row.use, family, FAMILIES[family]) for row in families.REFUSED for family in row.families]


@pytest.mark.parametrize(("key", "usual", "family", "values"), ROWS)
def test_every_row_of_the_table_of_families_is_refused(key, usual, family, values):
    """The table says which keys a family cannot use; each is refused by its name, with the value to use instead."""
    if isinstance(usual, bool):
        wrong = not usual
    else:
        wrong = OTHER_VALUES[key] if key in OTHER_VALUES else (usual or 0) * 2 or 1
    check, message = refusal(values | WITH.get(key, {}) | {key: wrong})
    assert check is not None, f"{family} takes {key}={wrong}"
    if key not in WITH:
        assert message.startswith(f"{key}="), message


@pytest.mark.parametrize("key", BOUNDS)
def test_a_bound_says_its_interval(key):
    """It does not say the default of the class, since each configuration has its own."""
    interval, kind = BOUNDS[key]
    value = interval.low - 1
    _, message = refusal({key: value})
    parts = typing.get_args(kind)
    words = [word for part in parts if typing.get_origin(part) is typing.Literal for word in typing.get_args(part)]
    words += ["null"] if type(None) in parts else []
    others = "".join(f", or {word}" for word in words)
    assert message == f"{key}={value} is out of range. Use {interval.advice()}{others}."


def leaves(kind=Config, prefix=""):
    """Every key, by its dotted name, and its type."""
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            yield from leaves(hint, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", hint


@pytest.mark.parametrize(
    ("kind", "wrong", "said"),
    [
        ("int", bounds.MAX_INT + 1, "=2147483648 is too large. Use 2147483647 or less"),
        ("float", math.inf, "=inf is not finite. Use a finite number"),
        ("float", math.nan, "=nan is "),
        ("str", "a\0b", "='a\\x00b' has a zero byte or is not UTF-8. Use other text"),
        ("str", "\udcff", "='\\udcff' has a zero byte or is not UTF-8. Use other text"),
    ],
)
def test_no_key_takes_a_value_that_would_fail_later(kind, wrong, said):
    found = 0
    for key, hint in leaves():
        kinds = {kind for part in (hint, *typing.get_args(hint)) for kind in (part, *typing.get_args(part))}
        if kind not in {getattr(kind, "__name__", "") for kind in kinds} or typing.get_origin(hint) is typing.Literal:
            continue
        _, message = refusal({key: (wrong,) if tuple in map(typing.get_origin, (hint, *kinds)) else wrong})
        if key not in BOUNDS or (wrong in BOUNDS[key][0] and math.isinf(BOUNDS[key][0].high)):
            assert message.startswith(f"{key}{said}"), (key, message)
        found += 1
    assert found >= 10, "the table of keys has them"
