"""A Hugging Face `config.json` as a `ModelConfig`, and back. Every key of it is read, or named here as one that changes
nothing; a value that our model cannot have is an error."""

import dataclasses
import itertools
import json
import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

from jaxstack.checkpoint import run_dir
from jaxstack.config import ConfigError, LoraConfig, ModelConfig, MoEConfig, RopeScaling, flat

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True)
class Family:
    """One `model_type`.

    Attributes:
      architecture: its class with a language model's head.
      fields: their key: ours within `ModelConfig`.
      activation: their key for the non-linearity.
      ours: what makes the family among our models.
      means: their keys that ours has no counterpart for, and the one value that means what ours computes.
      absent: what a key means where an older file leaves it out; other keys of `fields` must be there.
      windows: the kinds of a period of layers where `layer_types` is not there; None: this family has no windows.
      lists_layers: `layer_types` is a key of this family.
    """

    architecture: str
    fields: dict[str, str]
    activation: str = "hidden_act"
    ours: dict[str, Any] = field(default_factory=dict)
    means: dict[str, Any] = field(default_factory=dict)
    absent: dict[str, Any] = field(default_factory=dict)
    windows: tuple[str, ...] | None = None
    lists_layers: bool = False


_LLAMA = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "d_ff",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_positions",
    "tie_word_embeddings": "tied_embeddings",
}
_OLD_LLAMA = {"num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": False, "rope_theta": 10000.0}
_MOST_LAYERS = 10_000  # a file that asks for more is damaged
_FULL, _SLIDING = "full_attention", "sliding_attention"

FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        {
            "vocab_size": "vocab_size",
            "n_embd": "d_model",
            "n_layer": "num_layers",
            "n_head": "num_heads",
            "n_inner": "d_ff",
            "n_positions": "max_positions",
            "layer_norm_epsilon": "norm_eps",
            "tie_word_embeddings": "tied_embeddings",
        },
        activation="activation_function",
        ours={"norm": "layer", "positions": "learned", "gated": False, "bias": True},
        means={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
            "add_cross_attention": False,
        },
        absent={"n_inner": None, "tie_word_embeddings": True},
    ),
    "llama": Family(
        "LlamaForCausalLM",
        _LLAMA,
        means={"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
        absent=_OLD_LLAMA,
    ),
    "mistral": Family("MistralForCausalLM", _LLAMA, absent=_OLD_LLAMA, windows=(_SLIDING,)),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _LLAMA,
        ours={"qk_norm": True},
        means={"attention_bias": False},
        absent={"tie_word_embeddings": False},
        windows=(_FULL,),
        lists_layers=True,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _LLAMA | {"attn_logit_softcapping": "attention_softcap", "final_logit_softcapping": "logit_softcap"},
        activation="hidden_activation",
        ours={"norm_unit_offset": True, "post_norm": True, "embedding_scale": True},
        means={"attention_bias": False, "use_bidirectional_attention": None},
        absent={"tie_word_embeddings": True},
        windows=(_SLIDING, _FULL),
        lists_layers=True,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        _LLAMA | {"num_local_experts": "moe.num_experts", "num_experts_per_tok": "moe.top_k"},
        absent={"head_dim": None, "tie_word_embeddings": False},
        windows=(_SLIDING,),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _LLAMA
        | {
            "num_experts": "moe.num_experts",
            "num_experts_per_tok": "moe.top_k",
            "moe_intermediate_size": "moe.d_ff",
            "norm_topk_prob": "moe.normalize",
        },
        ours={"qk_norm": True},
        means={"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        absent={"tie_word_embeddings": False},
        windows=(_FULL,),
    ),
}

# What the files say beside the model: of files, of generation, of classifiers' heads, of what is returned.
_BESIDE = {
    "_name_or_path", "architectures", "bos_token_id", "cache_implementation", "dtype", "eos_token_id",
    "initializer_range", "model_type", "n_ctx", "output_router_logits", "pad_token_id",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "task_specific_params", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
_TRAINING = {
    "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "router_aux_loss_coef", "router_jitter_noise",
}  # fmt: skip


class _Keys:
    """A JSON object of which every key has to be taken."""

    def __init__(self, where: str, values: Any) -> None:
        if not isinstance(values, dict):
            raise ConfigError(f"{where} is no JSON object; give the model's own config.json")
        self.where, self._left = where, dict(values)

    def take(self, key: str, *default: Any) -> Any:
        if key not in self._left and not default:
            raise ConfigError(f"{self.where} has no {key}; add it, from the model's own config.json")
        return self._left.pop(key, *default)

    def expect(self, key: str, *allowed: Any) -> None:
        """Takes a key that may be absent, and otherwise has one of these values."""
        value = self.take(key, allowed[0])
        if not any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed):
            raise self.error(key, value, f"only {' or '.join(json.dumps(a) for a in allowed)} is what this model does")

    def error(self, key: str, value: Any, fix: str) -> ConfigError:
        return ConfigError(f"{self.where}: {key}={json.dumps(value)} cannot be had here; {fix}")

    def end(self) -> None:
        if self._left:
            shown = ", ".join(f"{key}={json.dumps(value)[:40]}" for key, value in sorted(self._left.items())[:6])
            raise ConfigError(
                f"{self.where} has {len(self._left)} keys that nothing here reads ({shown}); a model that needs them "
                f"would not be the same; remove what does not matter"
            )


def from_json(where: str, values: Any) -> tuple[str, ModelConfig, dict[str, Any]]:
    """What a `config.json` says.

    Args:
      where: its name, for errors.
      values: its content.

    Returns:
      The family, the model, and what is left out since it acts on training alone.

    Raises:
      ConfigError: another family, or a key or value that our model does not have.
    """
    keys = _Keys(where, values)
    name = keys.take("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise keys.error("model_type", name, f"the families are {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    if name == "qwen3_moe" and "num_local_experts" in values:  # as transformers 5 writes it
        keys = _Keys(where, {"num_experts" if k == "num_local_experts" else k: v for k, v in values.items()})
    left_out = {key: value for key in sorted(_TRAINING) if (value := keys.take(key, None))}
    for key in _BESIDE:
        keys.take(key, None)

    ours: dict[str, Any] = dict(family.ours)
    for key, path in family.fields.items():
        default = (family.absent[key],) if key in family.absent else ()
        ours[path] = _typed(keys, key, keys.take(key, *default), path)
    if ours["num_layers"] > _MOST_LAYERS:
        raise keys.error(_key_of(family, "num_layers"), ours["num_layers"], f"{_MOST_LAYERS} are the most")
    activation = keys.take(family.activation)
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise keys.error(family.activation, activation, f"the activations are {', '.join(ACTIVATIONS)}")
    ours["activation"] = ACTIVATIONS[activation]
    if name == "gemma2":
        keys.expect("hidden_act", *ACTIVATIONS)  # not read there, whatever it says
        ours["attention_scale"] = _number(keys, "query_pre_attn_scalar") ** -0.5
    if name != "gpt2":
        ours |= _rope(keys, family)
    for key, value in family.means.items():
        keys.expect(key, value, value or None)
    if family.windows is not None:
        ours["windows"] = _windows(keys, family, ours["num_layers"])
    keys.end()
    moe = {path.removeprefix("moe."): ours.pop(path) for path in list(ours) if path.startswith("moe.")}
    scaling = ours.pop("rope_scaling", {})
    try:
        return name, ModelConfig(**ours, moe=MoEConfig(**moe), rope_scaling=RopeScaling(**scaling)), left_out
    except ConfigError as error:
        raise ConfigError(f"{where} makes no model: {error}") from None


def _key_of(family: Family, path: str) -> str:
    return next(key for key, ours in family.fields.items() if ours == path)


def _typed(keys: _Keys, key: str, value: Any, path: str) -> Any:
    """The value of a key, if its type is that of our field."""
    group, name = (MoEConfig, path.removeprefix("moe.")) if path.startswith("moe.") else (ModelConfig, path)
    kind = next(f.type for f in fields(group) if f.name == name)
    kinds = get_args(kind) or (kind,)
    if name in ("vocab_size", "max_positions"):  # null in ours means: from the data
        kinds = (int,)
    if float in kinds and type(value) is int:
        value = float(value)
    if type(value) not in kinds:
        raise keys.error(key, value, f"it is a {' or '.join(k.__name__ for k in kinds)}")
    return value


def _number(keys: _Keys, key: str, *default: Any) -> float:
    value = keys.take(key, *default)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise keys.error(key, value, "it is a positive number")
    return float(value)


def _rope(keys: _Keys, family: Family) -> dict[str, Any]:
    """Both ways to write it: `rope_parameters`, or `rope_theta` and `rope_scaling` in files before transformers 5."""
    written = {key: value for key in ("rope_parameters", "rope_scaling") if (value := keys.take(key, None)) is not None}
    if len(written) > 1:
        raise ConfigError(f"{keys.where} has both rope_parameters and rope_scaling; remove one")
    name, values = next(iter(written.items()), ("rope_parameters", {}))
    rope = _Keys(f"{keys.where}: {name}", values)
    outside = keys.take("rope_theta", None)
    usual = outside or family.absent.get("rope_theta")
    theta = _number(rope, "rope_theta", *([] if usual is None else [usual]))
    if outside not in (None, theta):
        raise keys.error("rope_theta", outside, f"{name} says {theta}; remove one")
    kind = rope.take("rope_type", rope.take("type", "default"))
    rope.take("type", None)
    rope.expect("partial_rotary_factor", 1.0)
    scaling = {}
    if kind == "llama3":
        scaling = {key: _number(rope, key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
        scaling["original_max_position"] = int(_number(rope, "original_max_position_embeddings"))
    elif kind != "default":
        raise rope.error("rope_type", kind, "the types are default and llama3")
    rope.end()
    return {"rope_theta": theta, "rope_scaling": scaling}


def _windows(keys: _Keys, family: Family, layers: int) -> tuple[int, ...]:
    assert family.windows is not None
    size, kinds = keys.take("sliding_window", None), None
    if family.lists_layers:
        kinds = keys.take("layer_types", None)
    if _FULL in family.windows[:1]:  # Qwen3: only where it is switched on
        keys.take("max_window_layers", None)
        if kinds is None:
            keys.expect("use_sliding_window", False)
        elif not keys.take("use_sliding_window", False):
            size = None
    if size is not None and (type(size) is not int or size < 1):
        raise keys.error("sliding_window", size, "it is a positive number of tokens, or null")
    if kinds is None:
        kinds = list(itertools.islice(itertools.cycle(family.windows), layers))
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (_FULL, _SLIDING) for kind in kinds):
        raise keys.error("layer_types", kinds, f"it lists {_FULL} or {_SLIDING} for each of {layers} layers")
    if _SLIDING in kinds and size is None and family.lists_layers:
        raise keys.error("sliding_window", size, f"there are layers of {_SLIDING}")
    return _period(tuple(size or 0 if kind == _SLIDING else 0 for kind in kinds))


def _period(windows: tuple[int, ...]) -> tuple[int, ...]:
    """The shortest beginning that, repeated, gives them all."""
    n = len(windows)
    return next(windows[:p] for p in range(1, n + 1) if n % p == 0 and windows == windows[:p] * (n // p))


def to_json(name: str, model: ModelConfig, seq_len: int, end: int | None) -> dict[str, Any]:
    """The `config.json` of a model as one of a family; what the family cannot say is lost (see `family_of`).

    Args:
      name: of the family.
      model: the model.
      seq_len: of its training, where the model does not know how far its positions reach.
      end: token at the end of a document.
    """
    family, dense_width = FAMILIES[name], model.ff_width
    model = replace(_plain(model), max_positions=model.max_positions or seq_len)
    ours = flat(model)
    if (
        name == "qwen3_moe"
    ):  # it has a key for the experts' width, and one for that of dense layers, of which it has none
        ours["d_ff"] = dense_width
    values: dict[str, Any] = {"architectures": [family.architecture], "model_type": name}
    values |= {key: ours[path] for key, path in family.fields.items()}
    old = name == "gpt2"
    written = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new" if old else "gelu_pytorch_tanh"}
    values |= {family.activation: written[model.activation], **family.means}
    if name == "gemma2":
        scalar = model.head_width if model.attention_scale is None else model.attention_scale**-2
        values["query_pre_attn_scalar"] = round(scalar)
    if old:
        values |= {"attn_pdrop": 0.0, "embd_pdrop": model.dropout, "resid_pdrop": model.dropout}
    else:
        values |= {"rope_theta": model.rope_theta, "rope_scaling": None}
    if model.rope_scaling.factor != 1:
        scaling = dataclasses.asdict(model.rope_scaling)
        scaling["original_max_position_embeddings"] = scaling.pop("original_max_position")
        values["rope_scaling"] = {"rope_type": "llama3", **scaling}
    if family.windows is not None:
        size = max(model.windows)
        values["sliding_window"] = size or (
            model.max_positions if family.lists_layers and _SLIDING in family.windows else None
        )
        if family.lists_layers:
            kinds = [_SLIDING if window else _FULL for window in model.windows]
            values["layer_types"] = kinds * (model.num_layers // len(kinds))
        if _FULL in family.windows[:1]:
            values["use_sliding_window"] = size > 0
    return values | {
        "initializer_range": model.init_std,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": None,
        "use_cache": True,
    }


def family_of(model: ModelConfig) -> str:
    """The family that says all of a model: its `config.json`, read back, gives the model again.

    Raises:
      ConfigError: there is none; names the nearest and what keeps the model from it.
    """
    nearest: tuple[str, list[str]] | None = None
    for name in FAMILIES:
        try:
            found = model_differences(from_json(name, to_json(name, model, 1, None))[1], model)
        except ConfigError as error:
            found = [str(error)] * 99
        if not found:
            return name
        if nearest is None or len(found) < len(nearest[1]):
            nearest = name, found
    assert nearest is not None
    raise ConfigError(
        f"no family of Hugging Face has this model; the nearest is {nearest[0]}, which would be "
        f"{', '.join(nearest[1][:4])}; train a model of a family to export it"
    )


def model_differences(there: ModelConfig, here: ModelConfig) -> list[str]:
    """The keys in which two models differ such that one cannot have the parameters of the other, as `model.x=1, not 2`;
    a value that is left to its default equals the same one written out."""
    before, now = run_dir.shaping(_plain(there)), run_dir.shaping(_plain(here))
    keys = [key for key in now if now[key] != before[key]]
    if now["model.positions"] == "rope":  # how far they reach shapes nothing
        keys = [key for key in keys if key != "model.max_positions"]
    return [f"{key}={before[key]}, not {now[key]}" for key in keys]


def _plain(model: ModelConfig) -> ModelConfig:
    """The same model with derived values written out, and what it does not read at its default."""
    scale = None if model.attention_scale == model.head_width**-0.5 else model.attention_scale
    moe, rope = model.moe, model.positions == "rope"
    return replace(
        model,
        num_kv_heads=model.kv_heads,
        head_dim=model.head_width,
        d_ff=model.expert_width if moe.num_experts else model.ff_width,
        moe=replace(moe, d_ff=model.expert_width) if moe.num_experts else MoEConfig(),
        attention_scale=scale,
        windows=_period(model.windows),
        rope_theta=model.rope_theta if rope else ModelConfig.rope_theta,
        rope_scaling=model.rope_scaling if rope and model.rope_scaling.factor != 1 else RopeScaling(),
        max_positions=model.max_positions,
        lora=LoraConfig(),  # of a model that exists without it
    )


def read_config(folder: Path) -> tuple[str, ModelConfig, dict[str, Any]]:
    """`from_json` of a folder's `config.json`."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; give the model's own config.json") from None
    return from_json(str(path), values)
