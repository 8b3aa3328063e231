"""Converts a Hugging Face `config.json` to a `ModelConfig` and back.

Every key is read, or listed in `jaxstack.hf.families` as one that changes nothing. A value that jaxstack's model does
not support is an error.
"""

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, get_args, get_type_hints

from jaxstack.checkpoint import run_dir
from jaxstack.common import inputs
from jaxstack.common.counts import plural
from jaxstack.config import (
    ConfigError,
    DeltaConfig,
    LatentConfig,
    LoraConfig,
    ModelConfig,
    MoEConfig,
    PredictionConfig,
    RopeScaling,
    StateSpaceConfig,
    flat,
)
from jaxstack.config.branches import BranchesConfig
from jaxstack.config.expert_layers import rule_of
from jaxstack.config.sentences import SentencesConfig
from jaxstack.hf import expert_keys
from jaxstack.hf.families import (
    ACTIVATIONS,
    FAMILIES,
    FOREIGN,
    FULL,
    GENERATION,
    LINEAR,
    SLIDING,
    TRAINING,
    UNRELATED,
    USUAL,
    Family,
    gated_name,
    read_activation,
)
from jaxstack.hf.json_keys import Keys
from jaxstack.hf.safetensors import refuse_pointer

JsonObject: TypeAlias = dict[str, Any]
"""The content of a `config.json`, or a part of it."""

_MOST_LAYERS = 10_000  # a file with more is damaged


class Description(NamedTuple):
    """What a `config.json` describes.

    Attributes:
      family: the name of the family.
      model: the model.
      training: keys and values that were ignored because they affect training alone.
      unknown: keys that jaxstack does not know, whose values are null, false or empty.
      code: the value of `auto_map`, which names code in the folder. Nothing of it is run.
    """

    family: str
    model: ModelConfig
    training: JsonObject
    unknown: JsonObject
    code: JsonObject


class SpecialIds(NamedTuple):
    """Ids of tokens with a meaning.

    Attributes:
      end: the token at the end of a document. `None` means that there is none.
      start: the token that the decoder of an encoder-decoder reads first. `None` means 0, as in T5.
    """

    end: int | None = None
    start: int | None = None


NO_IDS = SpecialIds()


def from_json(where: str, values: object) -> Description:
    """Returns the model that `values` of a `config.json` describe; `where` names the file in messages.

    Raises:
      ConfigError: an unknown family, or a key or value that jaxstack's model does not support.
    """
    keys = Keys(where, values)
    name = keys.take("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise keys.error("model_type", name, f"Use a model of one of the families {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    keys.rename(family.aliases)
    code = _code(keys, family)
    labels = _labels(keys, family)
    training = {key: keys.take(key, None) for key in sorted(TRAINING - family.fields.keys())}
    ignored = {key: value for key, value in training.items() if value}
    _drop_without_effect(keys, family)
    keys.take("quantization_config", None)  # about tensors, not about the model: `jaxstack.hf.compressed` reads it

    _set_defaults(keys, family)
    ours: JsonObject = dict(family.fixed) | labels
    for key, path in family.fields.items():
        ours[path] = _typed(keys, key, keys.take(key, *family.default_of(key)), path)
    if not 1 <= ours["num_layers"] <= _MOST_LAYERS:
        raise keys.error(family.key_of("num_layers"), ours["num_layers"], f"Use 1 to {_MOST_LAYERS}")
    ours |= read_activation(keys, family)
    if family.scales_head and keys.take("scale_decoder_outputs", ours["tied_embeddings"]):
        ours["head_scale"] = ours["d_model"] ** -0.5
    if family.expert_keys == "counts":
        ignored["expert_capacity"] = keys.take("expert_capacity", None)  # no token is dropped
    ours |= _switches(keys, family, ours)
    if family.latent:
        ours |= _latent(keys, ours["num_heads"])
    if family.delta:
        ours["delta.every"] = _delta_every(keys, ours["num_layers"])
    if family.expansion:
        ours = _state_space(keys, family, ours)
    if family.rope:
        ours |= _rope(keys, family, ours.get("max_positions"))
    if ours.get("moe.router") == "sigmoid" and ours["moe.top_k"] == 1 and ours["moe.normalize"]:
        raise keys.error("num_experts_per_tok", 1, "Use two or more, since a single weight would always be 1")
    for key, value in family.required.items():
        keys.expect(key, value, value or None)
    ours |= _layers(keys, family, ours)
    unknown = keys.take_empty()
    keys.require_empty()
    moe = _group(ours, "moe.")
    latent = _group(ours, "latent.")
    delta = _group(ours, "delta.")
    ssm = _group(ours, "ssm.")
    mtp = _group(ours, "mtp.")
    scaling = ours.pop("rope_scaling", {})
    try:
        scaled = RopeScaling(**scaling)
        groups: JsonObject = {"moe": MoEConfig(**moe), "latent": LatentConfig(**latent)}
        groups |= {"delta": DeltaConfig(**delta), "ssm": StateSpaceConfig(**ssm), "mtp": PredictionConfig(**mtp)}
        model = ModelConfig(**ours, **groups, rope_scaling=scaled)
    except ConfigError as error:
        raise ConfigError(f"{where} does not describe a valid model: {error}") from None
    return Description(name, model, ignored, unknown, code)


def _set_defaults(keys: Keys, family: Family) -> None:
    """Gives keys that follow from others, or may be null, their values."""
    if keys.value_of("mamba_d_head") == "auto":
        keys.take("mamba_d_head")
    if "mamba_d_head" in family.fields:
        keys.set_default("mamba_d_head", _even_head(keys, family))
    if "num_decoder_layers" in family.fields:  # an older file of T5 has a decoder as deep as the encoder
        keys.set_default("num_decoder_layers", keys.value_of("num_layers"))
    for key in ("n_group", "topk_group"):  # null means one group, as the absence of the key in most classes
        if key in family.fields and key in keys:
            keys.set_default(key, 1)


def _group(ours: JsonObject, prefix: str) -> JsonObject:
    """Takes the fields of a group of the model, by their names within it."""
    return {path.removeprefix(prefix): ours.pop(path) for path in list(ours) if path.startswith(prefix)}


def _switches(keys: Keys, family: Family, ours: JsonObject) -> JsonObject:
    """Returns the fields that the keys of attention, sums and experts give, beside `Family.fields`."""
    found: JsonObject = {}
    for key, path in family.reciprocals.items():
        found[path] = 1 / _number(keys, key, *family.default_of(key))
    if family.query_scalar:
        keys.expect("hidden_act", *ACTIVATIONS)  # these models do not read it
        scalar = _number(keys, "query_pre_attn_scalar", *family.default_of("query_pre_attn_scalar"))
        found["attention_scale"] = scalar**-0.5
    if family.bias_key:
        found["attention_bias"] = family.biased if _flag(keys, family, family.bias_key) else "none"
    if family.parallel is not None:
        key, kind = family.parallel
        found["parallel"] = kind if _flag(keys, family, key) else "no"
    if family.falcon:
        found |= _falcon(keys, family, ours["num_heads"])
    if family.rotary_size:
        found["rotary_fraction"] = _rotated_share(keys, family, ours["d_model"], ours["num_heads"])
    if family.interleaved_key:
        found["rotary_interleaved"] = keys.take(family.interleaved_key, True) is not False
    if family.group_key:
        found |= _expert_groups(keys, family.group_key)
    if family.shared_width:
        found["moe.shared_experts"] = _shared_experts(keys, family.shared_width, ours["moe.d_ff"])
    return found


def _layers(keys: Keys, family: Family, ours: JsonObject) -> JsonObject:
    """Returns the fields in which layers may differ: experts, windows, and which of them rotate and how."""
    found: JsonObject = {}
    layers = ours["num_layers"]
    if family.expert_keys:
        found["moe.layers"] = expert_keys.read(keys, family, layers, ours.get("encoder_layers"))
    if family.local_attention:
        found["windows"] = _local_attention(keys, layers)
    if family.layer_types is not None:
        found["windows"] = _windows(keys, family, layers)
    if family.unrotated:
        found |= _rotated_layers(keys, family, layers, found["windows"])
    if family.full_scaling and ours.get("rope_scaling") and max(found["windows"]):
        found["rope_theta_local"] = ours["rope_theta"]
    if family.bases:
        found |= _two_bases(keys, family, found["windows"])
    return found


def _flag(keys: Keys, family: Family, key: str) -> bool:
    """Takes a key that must be true or false."""
    value = keys.take(key, None)
    value = family.defaults.get(key, False) if value is None else value
    if not isinstance(value, bool):
        raise keys.error(key, value, "Use true or false")
    return value


def _shared_experts(keys: Keys, key: str, width: int | None) -> int:
    """Returns the number of shared experts, which together have the width that a key gives."""
    together = keys.take(key)
    if type(together) is not int or together < 1 or not width or width < 1 or together % width:
        raise keys.error(key, together, f"Give a multiple of {width}, the width of one expert")
    return together // width


def _latent(keys: Keys, heads: int) -> JsonObject:
    """Returns the fields of latent attention."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
    values = {key: keys.take(key, *((1536,) if key == "q_lora_rank" else ())) for key in names}
    for key, value in values.items():
        if (type(value) is not int or value < 1) and (key, value) != ("q_lora_rank", None):
            raise keys.error(key, value, "Give a positive number")
    rotary = values["qk_rope_head_dim"]
    width = values["qk_nope_head_dim"] + rotary
    keys.expect("num_key_value_heads", heads, None)  # all heads read one vector
    keys.drop_usual("head_dim", rotary, width)  # newer files have what follows from the others
    keys.drop_usual("qk_head_dim", width)
    return {
        "head_dim": width,
        "latent.kv_rank": values["kv_lora_rank"],
        "latent.q_rank": values["q_lora_rank"] or 0,
        "latent.rotary_dim": rotary,
        "latent.value_dim": values["v_head_dim"],
    }


def _delta_every(keys: Keys, layers: int) -> int:
    """Returns after how many layers one has full attention; the others have the gated delta rule."""
    every = keys.take("full_attention_interval", 4)
    types = keys.take("layer_types", None)
    if isinstance(types, list) and FULL in types:
        every = types.index(FULL) + 1
    if type(every) is not int or every < 2 or layers % every:
        raise keys.error("full_attention_interval", every, f"Give a divisor of {plural(layers, 'layer')}, 2 or more")
    if types not in (None, _delta_types(every, layers)):
        raise keys.error(
            "layer_types",
            types,
            f"Give {FULL} to the last of every {plural(every, 'layer')}, and {LINEAR} to the others",
        )
    return every


def _delta_types(every: int, layers: int) -> list[str]:
    """Returns `layer_types` of a model with the gated delta rule."""
    return [LINEAR if (i + 1) % every else FULL for i in range(layers)]


def _even_head(keys: Keys, family: Family) -> object:
    """Returns the width of a state-space head for which a file says that it follows from the others."""
    expand, width, heads = (
        keys.value_of(key) or family.defaults.get(key, 2) for key in (family.expansion, "hidden_size", "mamba_n_heads")
    )
    whole = all(type(size) is int and size > 0 for size in (expand, width, heads))
    return expand * width // heads if whole else None  # type: ignore[operator]


def _state_space(keys: Keys, family: Family, ours: JsonObject) -> JsonObject:
    """Returns the fields of a model with state spaces, after checking their keys that have no field.

    These are the width of all heads together, and the activation.
    """
    together = ours["ssm.heads"] * ours["ssm.head_dim"]
    expand = keys.take(family.expansion, 2)
    if type(expand) is not int or expand * ours["d_model"] != together:
        raise keys.error(
            family.expansion, expand, f"Its heads have {plural(together, 'element')} for {ours['d_model']}"
        )
    if ours["activation"] != "silu":
        raise keys.error(family.activation, ours["activation"], "Use silu, the activation of state spaces")
    return _hybrid(keys, ours) if "mamba_d_head" in family.fields else ours


def _hybrid(keys: Keys, ours: JsonObject) -> JsonObject:
    """Returns the fields with those of a model that may have state spaces, attention, experts and a shared MLP."""
    found = dict(ours)
    layers = ours["num_layers"]
    types = keys.take("layer_types", None) or [LINEAR] * layers
    names = {"mamba": LINEAR, "attention": FULL}
    if not isinstance(types, list) or len(types) != layers or any(names.get(t, t) not in (LINEAR, FULL) for t in types):
        raise keys.error("layer_types", types, f"Give mamba or attention for each of {plural(layers, 'layer')}")
    states = tuple(names.get(kind, kind) == LINEAR for kind in types)
    if any(states):
        found["ssm.layers"] = _period(states, cut=False)
    else:
        found = {path: value for path, value in found.items() if not path.startswith("ssm.")}
    positions = keys.take("position_embedding_type", None)
    if positions not in (None, "nope", "rope"):
        raise keys.error("position_embedding_type", positions, "Use rope or nope")
    found["positions"] = "rope" if positions == "rope" else "none"
    shared = "shared_intermediate_size"
    if found["moe.num_experts"]:
        found["moe.shared_experts"] = _shared_experts(keys, shared, ours["d_ff"])
    else:
        found = {path: value for path, value in found.items() if not path.startswith("moe.")}
        width = keys.take(shared, 1024)
        found["d_ff"] = _typed(keys, shared, width, "d_ff")
    return found


def _hybrid_keys(family: Family, model: ModelConfig) -> JsonObject:
    """Returns the keys of state spaces, and of a hybrid the kinds of its layers and the width of its shared MLP."""
    ssm = model.ssm
    values: JsonObject = {family.expansion: ssm.heads * ssm.head_dim / model.d_model}
    if values[family.expansion].is_integer():
        values[family.expansion] = int(values[family.expansion])
    if "mamba_d_head" not in family.fields:
        return values
    if not ssm.layers:  # attention alone; the class still asks for sizes that fit
        values |= {"mamba_n_heads": model.num_heads, "mamba_d_head": "auto", family.expansion: 2}
    states = (ssm.layers or (False,)) * model.num_layers
    values["layer_types"] = ["mamba" if state else "attention" for state in states[: model.num_layers]]
    values["position_embedding_type"] = "rope" if model.positions == "rope" else "nope"
    values["shared_intermediate_size"] = model.ff_width
    if model.moe.num_experts:
        values["shared_intermediate_size"] = model.moe.shared_experts * model.expert_width
    return values


def _latent_keys(model: ModelConfig) -> JsonObject:
    """Returns the keys of latent attention."""
    latent = model.latent
    return {
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.q_rank or None,
        "qk_rope_head_dim": latent.rotary_dim,
        "qk_nope_head_dim": model.head_width - latent.rotary_dim,
        "v_head_dim": latent.value_dim,
        "num_key_value_heads": model.num_heads,
    }


def _falcon(keys: Keys, family: Family, heads: int) -> JsonObject:
    """Returns how many heads share keys and values, and how many norms attention and MLP have together."""
    new = _flag(keys, family, "new_decoder_architecture")
    multi_query = keys.take("multi_query", True)
    shared = keys.take("num_kv_heads", None) or heads
    norms = keys.take("num_ln_in_parallel_attn", None) or 1 + new
    if type(shared) is not int or shared < 1:
        raise keys.error("num_kv_heads", shared, "Give a positive number")
    if norms not in (1, 1 + new):
        raise keys.error("num_ln_in_parallel_attn", norms, f"Use 1{' or 2' if new else ''}")
    if not new:
        shared = 1 if multi_query else heads
    return {"num_kv_heads": shared, "parallel": "two_norms" if norms == 2 else "one_norm"}


def _falcon_keys(model: ModelConfig) -> JsonObject:
    """Returns the keys of `_falcon`."""
    norms = 2 if model.parallel == "two_norms" else 1
    shared = model.kv_heads
    return {
        "new_decoder_architecture": norms == 2 or shared not in (1, model.num_heads),
        "multi_query": shared == 1,
        "num_kv_heads": shared,
        "num_ln_in_parallel_attn": norms,
    }


def _rotated_share(keys: Keys, family: Family, width: int, heads: int) -> float:
    """Returns which share of each head RoPE rotates, from the number of elements."""
    size = keys.take(family.rotary_size, *family.default_of(family.rotary_size))
    head = width // max(heads, 1)
    if type(size) is not int or size % 2 or not 2 <= size <= head:
        raise keys.error(family.rotary_size, size, f"Give an even number up to {head}, the width of a head")
    share = size / head
    return share if int(head * share) == size else math.nextafter(share, 1)  # rounded below the number


def _expert_groups(keys: Keys, key: str) -> JsonObject:
    """Returns the groups that experts are chosen from, which a file has without effect where it does not use them."""
    method = keys.take(key, "greedy")
    sizes = [keys.take(name, None) for name in ("n_group", "topk_group")]
    if method == "greedy":
        return {}
    if method != "group_limited_greedy":
        raise keys.error(key, method, "Use greedy or group_limited_greedy")
    for name, size in zip(("n_group", "topk_group"), sizes, strict=True):
        if type(size) is not int or size < 1:
            raise keys.error(name, size, "Give a positive number of groups")
    return {"moe.num_groups": sizes[0], "moe.top_k_groups": sizes[1]}


def _drop_without_effect(keys: Keys, family: Family) -> None:
    """Removes the keys whose values change nothing."""
    for key, other in family.repeats.items():
        default = family.sliding_window if other == "sliding_window" else family.defaults.get(other)
        keys.drop_usual(key, keys.value_of(other) if other in keys else default)
    for key, usual in family.harmless.items():
        keys.drop_usual(key, *usual)
    keys.drop((UNRELATED | GENERATION | family.ignored) - family.required.keys(), FOREIGN)
    for key, value in USUAL.items():
        if key not in family.required:
            keys.drop_usual(key, value)


def _code(keys: Keys, family: Family) -> JsonObject:
    """Takes `auto_map`, which names code in the folder, after checking that the model is of a class of the family.

    `transformers` does not run this code either unless it is told to, and takes its own class of the family.
    """
    code = keys.take("auto_map", None)
    if not code:
        return {}
    classes = keys.value_of("architectures")
    stem = re.split("For|LMHead", family.architecture)[0]
    known = [family.architecture, f"{stem}Model", *family.classifiers.values(), family.pairs]
    if isinstance(code, dict) and isinstance(classes, list) and classes and all(name in known for name in classes):
        return code
    raise keys.error("auto_map", code, f"It names code, which is not run. Use a model with architectures={known[:1]}")


_POOLING = {"cls": "first", "mean": "mean"}
"""Maps the values of ModernBERT's `classifier_pooling` to values of `ModelConfig.label_pooling`."""


def _labels(keys: Keys, family: Family) -> JsonObject:
    """Returns the labels of a classifier, and what has one, or the task of a model that learns pairs of sentences, too.

    For models of another class there is nothing. Their classes classify a sequence by its first token, or in ModernBERT
    by the mean of all tokens.
    """
    classes = keys.take("architectures", None) or []
    names = keys.take("id2label", None)
    kind = keys.take("problem_type", None)
    pooling = keys.take("classifier_pooling", "cls")
    if not isinstance(classes, list):
        raise keys.error("architectures", classes, "Give a list of names")
    each = next((each for each, name in family.classifiers.items() if name in classes), None)
    if each is None:
        return {"sentences": SentencesConfig(("next",))} if family.pairs in classes else {}
    names = {"0": "LABEL_0", "1": "LABEL_1"} if names is None else names
    ids = [str(i) for i in range(len(names))]
    if not isinstance(names, dict) or sorted(names) != sorted(ids) or not all(map(_is_name, names.values())):
        raise keys.error("id2label", names, "Give each index from 0 on the name of a label")
    if kind not in (None, "single_label_classification"):
        raise keys.error("problem_type", kind, "Use single_label_classification")
    if pooling not in _POOLING:
        raise keys.error("classifier_pooling", pooling, "Use cls or mean")
    pools = {"label_pooling": _POOLING[pooling]} if each == "sequence" else {}
    return {"labels": tuple(names[i] for i in ids), "label_each": each, **pools}


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _typed(keys: Keys, key: str, value: Any, path: str) -> Any:
    """Returns the value of a key after checking that it has the type of the field."""
    prefix, _, name = path.rpartition(".")
    groups: dict[str, Any] = {"moe": MoEConfig, "delta": DeltaConfig, "ssm": StateSpaceConfig, "mtp": PredictionConfig}
    group = groups.get(prefix, ModelConfig)
    kind = get_type_hints(group)[name]  # without the bounds
    kinds = get_args(kind) or (kind,)
    if name in ("vocab_size", "max_positions", "swiglu_limit"):  # the fields allow null, but a file must give a number
        kinds = kinds[:1]
    if float in kinds and type(value) is int:
        value = float(value)
    if type(value) not in kinds:
        raise keys.error(key, value, f"Give a value of type {' or '.join(k.__name__ for k in kinds)}")
    return value


def _number(keys: Keys, key: str, *default: Any) -> float:
    """Takes a key that must be a positive number."""
    return _number_of(keys, key, keys.take(key, *default))


def _number_of(keys: Keys, key: str, value: Any) -> float:
    """Returns the value of a key after checking that it is a positive number."""
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise keys.error(key, value, "Give a positive number")
    return float(value)


def _rope(keys: Keys, family: Family, max_positions: int | None) -> dict[str, Any]:
    """Returns the fields of rotary position embeddings.

    Files have them under `rope_parameters`, or before transformers 5 under `rope_theta` and `rope_scaling`. A file
    without the original context has `max_positions`, as in `transformers`.
    """
    both = {key: keys.take(key, None) for key in ("rope_parameters", "rope_scaling")}
    written = {key: value for key, value in both.items() if value is not None}
    if len(written) > 1:
        raise ConfigError(f"{keys.where} has both rope_parameters and rope_scaling. Remove one.")
    name, values = next(iter(written.items()), ("rope_parameters", family.default_rope))
    if family.full_scaling and isinstance(values, dict) and FULL in values:
        name, values = _of_full_layers(keys, name, values)
    rope = Keys(f"{keys.where}: {name}", values)
    outside = keys.take(family.theta_key, None)
    usual = outside or family.defaults.get(family.theta_key)
    theta = _number(rope, "rope_theta", *([] if usual is None else [usual]))
    if outside not in (None, theta):
        raise keys.error(family.theta_key, outside, f"Remove it or the other value, {theta} in {name}")
    kind = rope.take("rope_type", rope.take("type", "default"))
    rope.take("type", None)
    ours: dict[str, Any] = {"rope_theta": theta}
    if family.rotary_key:
        usual = keys.take(family.rotary_key, *family.default_of(family.rotary_key))
        ours["rotary_fraction"] = _number(rope, "partial_rotary_factor", usual)
    else:
        rope.expect("partial_rotary_factor", 1.0)
    original: object = max_positions
    if family.original_context:
        original = keys.take("original_max_position_embeddings", family.original_context)
        rope.take("original_max_position_embeddings", None)
    scaling: dict[str, Any] = {}
    if kind == "llama3":
        scaling = {key: _number(rope, key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
    elif kind == "linear":
        scaling = {"factor": _number(rope, "factor")}
    elif kind == "yarn":
        if family.latent:
            mscale = rope.value_of("mscale_all_dim") or 0.0
            ours["latent.mscale"] = _number_of(rope, "mscale_all_dim", mscale) if mscale else 0.0
        scaling = _yarn(rope)
    elif kind == "longrope":
        scaling = _longrope(rope, original, max_positions)
    elif kind == "dynamic" and max_positions:
        scaling = {"factor": _number(rope, "factor"), "original_max_position": max_positions}
    elif kind != "default":
        raise rope.error("rope_type", kind, "Use default, dynamic, linear, llama3, longrope or yarn")
    if kind in ("llama3", "yarn"):
        scaling["original_max_position"] = int(_number(rope, "original_max_position_embeddings", original))
    rope.require_empty()
    return ours | {"rope_scaling": scaling and scaling | {"kind": kind}}


def _yarn(rope: Keys) -> dict[str, Any]:
    """Returns the fields of YaRN. Of `mscale` and `mscale_all_dim` only the ratio of the resulting factors is read."""
    factor = _number(rope, "factor")
    scaling: dict[str, Any] = {"factor": factor}
    for key in ("beta_fast", "beta_slow"):
        value = rope.take(key, None)
        scaling[key] = getattr(RopeScaling, key) if not value else _number_of(rope, key, value)
    scales = [rope.take(key, None) for key in ("mscale", "mscale_all_dim")]
    attention_factor = rope.take("attention_factor", None)
    if attention_factor is not None:
        scaling["attention_factor"] = _number_of(rope, "attention_factor", attention_factor)
    elif all(scales):
        up, down = (0.1 * _number_of(rope, "mscale", scale) * math.log(factor) + 1 for scale in scales)
        scaling["attention_factor"] = up / down
    truncate = rope.take("truncate", True)
    if not isinstance(truncate, bool):
        raise rope.error("truncate", truncate, "Use true or false")
    return scaling | {"truncate": truncate}


def _longrope(rope: Keys, original: object, max_positions: int | None) -> dict[str, Any]:
    """Returns the fields of LongRoPE. A file without a factor has the ratio of both lengths of contexts."""
    context = int(_number(rope, "original_max_position_embeddings", original))
    ratio = (max_positions or context) / context
    given = rope.take("factor", None)
    factor = ratio if given is None else _number_of(rope, "factor", given)
    if factor <= 1:
        raise rope.error("factor", factor, "Use a context above original_max_position_embeddings")
    scaling: dict[str, Any] = {"factor": factor, "original_max_position": context}
    attention_factor = rope.take("attention_factor", None)
    if attention_factor is not None:
        scaling["attention_factor"] = _number_of(rope, "attention_factor", attention_factor)
    for key in ("short_factor", "long_factor"):
        factors = rope.take(key)
        if not isinstance(factors, list):
            raise rope.error(key, factors, "List a number for each frequency")
        scaling[f"{key}s"] = tuple(_number_of(rope, key, one) for one in factors)
    return scaling


def _of_full_layers(keys: Keys, name: str, values: JsonObject) -> tuple[str, JsonObject]:
    """Returns RoPE of the layers with full attention, after checking that the others have the same without scaling."""
    full = values[FULL]
    local = Keys(f"{keys.where}: {name}.{SLIDING}", values.get(SLIDING) or {})
    local.expect("rope_type", "default")
    theta = full.get("rope_theta") if isinstance(full, dict) else None
    if theta is not None:
        local.expect("rope_theta", theta)
    local.require_empty()
    return f"{name}.{FULL}", full


def _rotated_layers(keys: Keys, family: Family, layers: int, period: tuple[int, ...]) -> JsonObject:
    """Returns which layers rotate queries and keys, and the windows of as many layers."""
    windows = tuple(period[i % len(period)] for i in range(layers))
    if family.unrotated == "full":
        rotated = tuple(window > 0 or not max(windows) for window in windows)
    else:
        every = keys.take("no_rope_layer_interval", 4)
        listed = keys.take("no_rope_layers", None)
        if listed is None:
            if type(every) is not int or every < 1:
                raise keys.error("no_rope_layer_interval", every, "Give a positive number of layers")
            listed = [int((i + 1) % every != 0) for i in range(layers)]
        if not isinstance(listed, list) or len(listed) < layers or not all(one in (0, 1) for one in listed):
            raise keys.error(
                "no_rope_layers", listed, f"List 1, or 0 without RoPE, for each of {plural(layers, 'layer')}"
            )
        rotated = tuple(bool(one) for one in listed[:layers])
    return dict(zip(("windows", "rope_layers"), _shortest(windows, rotated), strict=True))


def _shortest(windows: tuple[int, ...], rotated: tuple[bool, ...]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Returns the windows and rotations of the shortest period of layers."""
    both = _period(tuple(zip(windows, rotated, strict=True)), cut=False)
    rotations = tuple(rotates for _, rotates in both)
    return tuple(window for window, _ in both), ((True,) if all(rotations) else rotations)


def _windows(keys: Keys, family: Family, layers: int) -> tuple[int, ...]:
    """Returns `ModelConfig.windows`: the window of each layer in the shortest period, 0 for full attention."""
    assert family.layer_types is not None
    size = keys.take("sliding_window", family.sliding_window)
    types = None
    if family.lists_layer_types:
        types = keys.take("layer_types", None)
    if family.window_pattern:
        types = _by_pattern(keys, size, types, layers)
    if family.late_windows:
        first = keys.take("max_window_layers", layers)
        if type(first) is not int:
            raise keys.error("max_window_layers", first, f"Give a number, such as {layers}")
        if types is None:
            types = [SLIDING if size is not None and i >= first else FULL for i in range(layers)]
    elif family.layer_types[0] == FULL:  # in Qwen 3, windows apply only if `use_sliding_window` is set
        keys.take("max_window_layers", None)
        if types is None:
            keys.expect("use_sliding_window", False)
            size = None
        elif not keys.take("use_sliding_window", False):
            size = None
    if size is not None and (type(size) is not int or size < 1):
        raise keys.error("sliding_window", size, "Give a positive number of tokens, or null")
    if types is None:
        types = list(itertools.islice(itertools.cycle(family.layer_types), layers))
    if not isinstance(types, list) or len(types) != layers or not all(kind in (FULL, SLIDING) for kind in types):
        raise keys.error("layer_types", types, f"List {FULL} or {SLIDING} for each of {plural(layers, 'layer')}")
    if SLIDING in types and size is None and family.lists_layer_types:
        raise keys.error("sliding_window", size, f"Give a number of tokens for the layers of {SLIDING}")
    return _period(tuple(size or 0 if kind == SLIDING else 0 for kind in types), cut=False)


def _by_pattern(keys: Keys, size: object, types: object, layers: int) -> object:
    """Returns the attention type of each layer from the key `sliding_window_pattern`, if the file does not list them.

    It is a number, the period of layers with full attention, or a text such as LLLG of local and global layers.
    """
    pattern = keys.take("sliding_window_pattern", None)
    if types is not None or (size is not None and pattern is None):
        return types
    if size is None:
        return [FULL] * layers
    if isinstance(pattern, str) and re.fullmatch("[LG]+", pattern):
        pattern = pattern.index("G") + 1 if re.fullmatch("L*G", pattern) else 0
    if type(pattern) is not int or pattern < 1:
        raise keys.error("sliding_window_pattern", pattern, "Give a number of layers, or a text such as LLLG")
    return [SLIDING if (i + 1) % pattern else FULL for i in range(layers)]


def _local_attention(keys: Keys, layers: int) -> tuple[int, ...]:
    """Returns `ModelConfig.windows` of a ModernBERT."""
    half = keys.take("local_attention", 128)
    if type(half) is not int or half < 0 or half % 2:
        raise keys.error("local_attention", half, "Give an even number of tokens")
    every = keys.take("global_attn_every_n_layers", 3)
    if type(every) is not int or every < 1:
        raise keys.error("global_attn_every_n_layers", every, "Give a positive number of layers")
    types = keys.take("layer_types", None) or [SLIDING if i % every else FULL for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not all(kind in (FULL, SLIDING) for kind in types):
        raise keys.error("layer_types", types, f"List {FULL} or {SLIDING} for each of {plural(layers, 'layer')}")
    return _period(tuple(half // 2 + 1 if kind == SLIDING else 0 for kind in types), cut=True)


def _two_bases(keys: Keys, family: Family, windows: tuple[int, ...]) -> dict[str, Any]:
    """Returns both bases of RoPE, which transformers 5 has in `rope_parameters` by the type of a layer."""
    parameters = Keys(f"{keys.where}: rope_parameters", keys.take("rope_parameters", None) or {})
    theta = []
    for kind, (name, usual) in zip((FULL, SLIDING), family.bases.items(), strict=True):
        given = _number(keys, name, usual)
        rope = Keys(f"{parameters.where}.{kind}", parameters.take(kind, None) or {})
        theta.append(_number(rope, "rope_theta", given))
        rope.expect("rope_type", "default")
        rope.require_empty()
    parameters.require_empty()
    local = theta[1] if max(windows) and theta[1] != theta[0] else None
    return {"rope_theta": theta[0], "rope_theta_local": local}


def _local_attention_keys(model: ModelConfig) -> JsonObject:
    """Returns the keys of ModernBERT for windows."""
    return {
        "local_attention": 2 * max(max(model.windows) - 1, 0),
        "layer_types": _layer_types(model),
    }


def _layer_types(model: ModelConfig) -> list[str]:
    """Returns the attention type of each layer."""
    return [SLIDING if window else FULL for window in model.layer_windows]


def _period(windows: tuple[Any, ...], cut: bool) -> tuple[Any, ...]:
    """Returns the shortest prefix whose repetition gives all values; with `cut`, the last one may be a part of it."""
    n = len(windows)
    if cut:
        return next(windows[:p] for p in range(1, n + 1) if windows == (windows[:p] * n)[:n])
    return next(windows[:p] for p in range(1, n + 1) if n % p == 0 and windows == windows[:p] * (n // p))


def to_json(name: str, model: ModelConfig, seq_len: int, ids: SpecialIds = NO_IDS) -> JsonObject:
    """Returns the `config.json` that describes a model in a family. Fields without a key are lost (see `family_of`).

    Args:
      seq_len: the sequence length of training, for a model without `max_positions`. 0 means that there is none.
      ids: special ids of the model's tokenizer.
    """
    family = FAMILIES[name]
    dense_width = model.ff_width
    model = replace(_plain(model), max_positions=model.max_positions or seq_len or None)
    ours = flat(model)
    if "moe.d_ff" in family.fields.values():  # `d_ff` is then the width of dense layers, although there are none
        ours["d_ff"] = dense_width
    values: JsonObject = {"architectures": [family.architecture], "model_type": name, **_head_keys(family, model)}
    values |= {key: ours[path] for key, path in family.fields.items()}
    activations = {name: name for name in ("silu", "gelu", "relu", "relu2", "xielu")} | {"gelu_tanh": family.tanh_gelu}
    values |= {family.activation: activations[model.activation], **family.required}
    if family.gated_names and model.gated:
        values[family.activation] = gated_name(values[family.activation])
    values |= _switch_keys(family, model)
    values |= {key: 1 / getattr(model, path) for key, path in family.reciprocals.items()}
    if family.dropout_keys:
        values |= dict.fromkeys(family.zero_keys, 0.0) | dict.fromkeys(family.dropout_keys, model.dropout)
    values |= expert_keys.keys_of(family, model)
    if family.rope:
        values |= _rope_keys(family, model)
    if family.local_attention:
        values |= _local_attention_keys(model)
    if family.bases:
        values |= dict(zip(family.bases, (model.rope_theta, model.rope_theta_local or model.rope_theta), strict=True))
    if family.layer_types is not None:
        size = max(model.windows)
        unlimited = model.max_positions if family.lists_layer_types and SLIDING in family.layer_types else None
        values["sliding_window"] = size or unlimited
        if family.lists_layer_types:
            values["layer_types"] = _layer_types(model)
        if family.layer_types[0] == FULL and not family.late_windows:
            values["use_sliding_window"] = size > 0
    return values | {
        "initializer_range": model.init_std,
        "bos_token_id": None,
        "eos_token_id": ids.end,
        "pad_token_id": family.required.get("pad_token_id"),
        "use_cache": True,
        **family.exported,
        **({} if ids.start is None else {"decoder_start_token_id": ids.start}),
    }


def _switch_keys(family: Family, model: ModelConfig) -> JsonObject:
    """Returns the keys of attention, sums and experts that are not in `Family.fields`."""
    values: JsonObject = {}
    if family.bias_key:
        values[family.bias_key] = model.attention_bias == family.biased
    if family.parallel is not None:
        values[family.parallel[0]] = model.parallel != "no"
    if family.latent:
        values |= _latent_keys(model)
    if family.delta:
        every = model.delta.every or model.num_layers
        values |= {"full_attention_interval": every, "layer_types": _delta_types(every, model.num_layers)}
    if family.expansion:
        values |= _hybrid_keys(family, model)
    if family.falcon:
        values |= _falcon_keys(model)
    if family.rotary_size:
        values[family.rotary_size] = model.rotary_width
    if family.interleaved_key:
        values[family.interleaved_key] = model.rotary_interleaved
    if family.group_key:
        values[family.group_key] = "group_limited_greedy" if model.moe.num_groups > 1 else "greedy"
        values |= {"n_group": model.moe.num_groups, "topk_group": model.moe.top_k_groups}
    if family.shared_width:
        values[family.shared_width] = model.moe.shared_experts * model.expert_width
    if "attention_scale" in family.fields.values() and model.attention_scale is None:
        values[family.key_of("attention_scale")] = model.head_width**-0.5
    if family.unrotated == "listed":
        values["no_rope_layers"] = [int(rotates) for rotates in model.layer_rotations]
    if family.scales_head:
        values["scale_decoder_outputs"] = model.head_scale != 1
    if family.query_scalar:
        scalar = model.head_width if model.attention_scale is None else model.attention_scale**-2
        values["query_pre_attn_scalar"] = round(scalar)
    return values


def _head_keys(family: Family, model: ModelConfig) -> JsonObject:
    """Returns the keys of a classifier, or of a model that learns pairs of sentences, too."""
    values: JsonObject = {}
    if model.labels and family.classifiers:
        values["architectures"] = [family.classifiers[model.label_each]]
        values["id2label"] = {str(i): label for i, label in enumerate(model.labels)}
        values["label2id"] = {label: i for i, label in enumerate(model.labels)}
        values |= {"problem_type": "single_label_classification"}
    if model.sentences.tasks and family.pairs:
        values["architectures"] = [family.pairs]
    if model.labels and family.local_attention:
        values["classifier_pooling"] = next(key for key, value in _POOLING.items() if value == model.label_pooling)
    return values


def _rope_keys(family: Family, model: ModelConfig) -> JsonObject:
    """Returns the keys of rotary position embeddings."""
    unscaled = {"rope_type": "default"} if family.default_rope else None
    values: JsonObject = {family.theta_key: model.rope_theta, "rope_scaling": unscaled}
    if family.rotary_key:
        values[family.rotary_key] = model.rotary_fraction
    scaling = model.rope_scaling
    if scaling.factor != 1:
        names = {
            "llama3": ("low_freq_factor", "high_freq_factor"),
            "linear": (),
            "dynamic": (),
            "yarn": ("beta_fast", "beta_slow"),
            "longrope": (),
        }
        keys: JsonObject = {"factor": scaling.factor}
        keys |= {name: getattr(scaling, name) for name in names[scaling.kind]}
        if scaling.kind == "longrope":
            keys |= {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
            keys["attention_factor"] = scaling.attention_factor
        if scaling.kind not in ("linear", "dynamic"):
            keys["original_max_position_embeddings"] = scaling.original_max_position
        if scaling.kind == "yarn":
            keys |= {"attention_factor": scaling.attention_factor, "truncate": scaling.truncate}
            if family.latent and model.latent.mscale:
                keys["mscale_all_dim"] = model.latent.mscale
                if scaling.attention_factor == 1:  # as in DeepSeek's files: both factors are equal
                    keys["mscale"] = model.latent.mscale
                    del keys["attention_factor"]
        if family.original_context and "original_max_position_embeddings" in keys:
            values["original_max_position_embeddings"] = keys.pop("original_max_position_embeddings")
        values["rope_scaling"] = {"rope_type": scaling.kind, **keys}
    if family.full_scaling:  # the form of transformers 5, which reads both bases only from it
        full = {"rope_type": "default"} | (values.pop("rope_scaling") or {}) | {"rope_theta": values.pop("rope_theta")}
        plain = {"rope_type": "default", "rope_theta": model.rope_theta}
        values["rope_parameters"] = {FULL: full, SLIDING: plain}
    return values


def family_of(model: ModelConfig, preferred: str | None = None) -> str:
    """Returns the family that can express all of a model: its `config.json`, read back, gives the model again.

    Args:
      preferred: the family to take if several can express the model, such as the family of the imported file.

    Raises:
      ConfigError: there is no such family. The message names the nearest one and the differences.
    """
    nearest: tuple[str, list[str]] | None = None
    for name in sorted(FAMILIES, key=lambda name: name != preferred):
        try:
            found = model_differences(from_json(name, to_json(name, model, 1))[1], model)
        except ConfigError as error:
            found = [str(error)] * 99
        if not found:
            return name
        if nearest is None or len(found) < len(nearest[1]):
            nearest = name, found
    assert nearest is not None
    if model.family == "branches":
        raise ConfigError(
            "no Hugging Face family has a model with two branches. Export one of them to a run with "
            "--branch=generation or --branch=understanding, then export that run."
        )
    raise ConfigError(
        f"no Hugging Face family has this model; the nearest is {nearest[0]}, which differs: "
        f"{', '.join(nearest[1][:4])}. Train a model of a family to export it."
    )


def model_differences(there: ModelConfig, here: ModelConfig) -> list[str]:
    """Returns the keys in which two models differ such that one cannot take the parameters of the other.

    Each entry reads `model.x=1, not 2`. A field that is left to its default equals the same value given explicitly.
    """
    before = run_dir.shaping(_plain(there))
    now = run_dir.shaping(_plain(here))
    keys = [key for key in now if now[key] != before[key]]
    if now["model.positions"] in ("rope", "none"):  # the number of positions does not change any parameter
        keys = [key for key in keys if key != "model.max_positions"]
    return [f"{key}={before[key]}, not {now[key]}" for key in keys]


def _plain(model: ModelConfig) -> ModelConfig:
    """Returns the same model with derived values made explicit, and fields that it does not read at their defaults."""
    scale = None if model.attention_scale == model.head_width**-0.5 else model.attention_scale
    moe = model.moe
    rope = model.positions == "rope"
    windows = _period(model.layer_windows, cut=model.family == "encoder")
    layers = moe.layers
    if layers.is_list and model.family != "encoder_decoder":
        layers = rule_of(model.has_experts)
    rotated: tuple[bool, ...] = (True,)
    if rope and not all(model.rope_layers):
        windows, rotated = _shortest(model.layer_windows, model.layer_rotations)
    if not model.attends:
        model = replace(model, num_heads=1, num_kv_heads=None, head_dim=None, attention_scale=None)
    return replace(
        model,
        num_kv_heads=model.kv_heads,
        head_dim=model.head_width,
        d_ff=_dense_width(model),
        latent=replace(model.latent, mscale=model.latent.mscale if _scales(model) else 0.0),
        moe=replace(moe, d_ff=model.expert_width, layers=layers) if moe.num_experts else MoEConfig(),
        attention_scale=scale,
        windows=windows,
        rope_layers=rotated,
        rotary_fraction=model.rotary_fraction if rope else 1.0,
        rotary_interleaved=rope and model.rotary_interleaved,
        base_width=model.base_width if model.tied_embeddings and model.width_ratio != 1 else None,
        rope_theta_local=model.rope_theta_local if rope and max(model.windows) else None,
        rope_theta=model.rope_theta if rope else ModelConfig.rope_theta,
        rope_scaling=_plain_scaling(model) if rope else RopeScaling(),
        max_positions=None if model.positions == "relative" else model.max_positions,
        encoder_layers=model.encoder_depth if model.family == "encoder_decoder" else None,
        branches=BranchesConfig(layers=model.branches.depth(model.num_layers) if model.family == "branches" else None),
        sentences=replace(
            model.sentences,
            weight=SentencesConfig.weight,
            parts=model.sentences.parts if "reordering" in model.sentences.tasks else SentencesConfig.parts,
        ),
        mtp=PredictionConfig(model.mtp.depth),
        lora=LoraConfig(),  # adapters belong to a model, but do not define it
    )


def _dense_width(model: ModelConfig) -> int | None:
    """Returns the hidden width of the MLP; where all layers have experts, their width, and without an MLP null."""
    if not model.ssm.mlp:
        return None
    all_routed = all(all(one.kinds) for parts in model.expert_segments.values() for one in parts)
    return model.expert_width if model.moe.num_experts and all_routed else model.ff_width


def _plain_scaling(model: ModelConfig) -> RopeScaling:
    """Returns the scaling of RoPE without what no file says: whether texts are longer than the original context."""
    if model.rope_scaling.factor == 1:
        return RopeScaling()
    return replace(model.rope_scaling, long_context=False)


def _scales(model: ModelConfig) -> bool:
    """Returns whether YaRN scales the scores of latent attention."""
    return model.rope_scaling.kind == "yarn" and model.rope_scaling.factor != 1


def read_config(folder: Path) -> Description:
    """Returns `from_json` of a folder's `config.json`."""
    path = folder / "config.json"
    _require_model_folder(folder)
    for file in sorted(folder.glob("*.json")):  # those of the tokenizer and the index of tensors, too
        refuse_pointer(file)
    try:
        values = inputs.read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Give the model's own config.json.") from None
    return from_json(str(path), values)


def _require_model_folder(folder: Path) -> None:
    """Checks that a path is a folder with a `config.json`, and advises by what is there instead."""
    if (folder / "config.json").exists():
        return
    if folder.is_file():
        raise ConfigError(f"{folder} is a file. Name the folder with the model's config.json.")
    if not folder.exists():
        if advice := how_to_fetch(folder):
            raise ConfigError(f"there is no folder {folder} here. {advice}")
        raise ConfigError(f"{folder} does not exist. Check the path.")
    if (folder / "config.yaml").exists():
        raise ConfigError(
            f"{folder} is a run of jaxstack, not a Hugging Face folder. Train it with `jaxstack train "
            f"--config={folder / 'config.yaml'}`, or write a Hugging Face folder with `jaxstack export {folder} DIR`."
        )
    if not any(folder.iterdir()):
        raise ConfigError(
            f"{folder} is empty. Fetch the model's config.json, *.safetensors and tokenizer.json into it."
        )
    if (folder / "adapter_config.json").exists():
        raise ConfigError(
            f"{folder} has adapters and no model. Import the model that they were trained on: `jaxstack import DIR RUN "
            f"--adapter {folder}`."
        )
    inside = sorted(path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/config.json"))
    if inside:
        raise ConfigError(f"{folder} has no config.json, but a folder in it has one. Name {inside[0]}.")
    other = next((path.name for path in sorted(folder.iterdir()) if path.suffix in (".gguf", ".pth")), None)
    if other is not None:
        raise ConfigError(
            f"{folder} has {other} and no config.json. Fetch the model's files in the format of safetensors."
        )
    raise ConfigError(f"{folder} has no config.json. Copy the model's own config.json into it.")


def how_to_fetch(folder: Path) -> str | None:
    """Returns how to fetch a model of the hub, if a path that does not exist may be its name or its address."""
    name = _HUB.sub("", str(folder))
    if not _HUB_NAME.fullmatch(name):
        return None
    local = name.rpartition("/")[2]
    return (
        f"If it is a model of the Hugging Face hub, fetch it with `hf download {name} --local-dir {local}`, and name "
        f"{local}."
    )


_HUB = re.compile(r"(https?:/+)?(www\.)?(huggingface\.co|hf\.co)/+|hf:/+(models/)?")
"""What addresses of the hub begin with, where a path has one slash for two."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
"""A name on the hub: one or two words, where a path would begin with a dot or a slash or have more parts."""
