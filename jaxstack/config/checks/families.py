"""Checks of `model.family` against all other keys: a table of keys that some families do not read, and what is left.

A family of your own (`docs/own_family.md`) has no rows in `REFUSED`, so it may read every key that decoders read.
"""

from dataclasses import fields
from operator import attrgetter
from typing import NamedTuple

from jaxstack.common.counts import plural
from jaxstack.config.bounds import require
from jaxstack.config.data import TEMPLATED
from jaxstack.config.groups import Groups
from jaxstack.config.model import ModelConfig
from jaxstack.config.pictures import PICTURES
from jaxstack.config.sentences import SentencesConfig

_DEFAULTS = ModelConfig()
_MASKED = ("encoder", "branches")
_EXPERT_LAYERS = ("decoder", "encoder", "encoder_decoder")
_NO_DECODER = (*_MASKED, "encoder_decoder", "diffusion", "contrastive")


class Only(NamedTuple):
    """A key that only some families read. Other families must leave it at its default.

    Attributes:
      key: the key.
      families: the families that read it. Advice names the first one.
      readers: what to call them.
      default: the value that the other families must have.
    """

    key: str
    families: tuple[str, ...]
    readers: str
    default: object


def _group(name: str, readers: str, *families: str) -> tuple[Only, ...]:
    """Returns the rows of all keys of a group of `model`."""
    group = getattr(_DEFAULTS, name)
    keys = [f.name for f in fields(group)]
    return tuple(Only(f"model.{name}.{key}", families, readers, getattr(group, key)) for key in keys)


ONLY = (
    Only("model.norm_after", ("encoder",), "encoders", False),
    Only("model.first_attention_norm", ("encoder",), "encoders", True),
    Only("model.token_types", ("encoder",), "encoders", 0),
    Only("model.first_position", ("encoder",), "encoders", 0),
    Only("model.labels", ("encoder",), "encoders", ()),
    Only("model.reward_head", ("decoder",), "decoders", False),
    Only("data.mask_id", _MASKED, "encoders and branches", None),
    Only("data.mask_words", _MASKED, "encoders and branches", False),
    Only("data.mask_phrases", _MASKED, "encoders and branches", None),
    Only("model.encoder_layers", ("encoder_decoder", "contrastive"), "encoder-decoders", None),
    Only("model.head_scale", ("encoder_decoder", "decoder"), "encoder-decoders and decoders", 1.0),
    Only("model.embedding_multiplier", ("decoder",), "decoders", 1.0),
    Only("model.residual_multiplier", ("decoder",), "decoders", 1.0),
    Only("model.pre_norm", ("decoder",), "decoders", True),
    Only("model.parallel", ("decoder",), "decoders", "no"),
    Only("model.rope_layers", ("decoder",), "decoders", (True,)),
    Only("model.moe.layers.first", _EXPERT_LAYERS, "decoders, encoders and encoder-decoders", 0),
    Only("model.moe.layers.every", _EXPERT_LAYERS, "decoders, encoders and encoder-decoders", 1),
    Only("model.moe.layers.numbers", _EXPERT_LAYERS, "decoders, encoders and encoder-decoders", ()),
    Only("model.moe.layers.encoder_numbers", ("encoder_decoder",), "encoder-decoders", ()),
    Only("model.latent.kv_rank", ("decoder",), "decoders", 0),
    Only("model.mtp.depth", ("decoder",), "decoders", 0),
    Only("model.attention_gate", ("decoder",), "decoders", False),
    Only("model.delta.every", ("decoder",), "decoders", 0),
    Only("model.norm_weights", ("decoder",), "decoders", True),
    Only("model.clip_qkv", ("decoder",), "decoders", None),
    Only("model.mlp_bias", ("decoder",), "decoders", False),
    Only("model.head_bias", ("decoder",), "decoders", False),
    Only("model.ssm.layers", ("decoder",), "decoders", ()),
    Only("model.attention_sinks", ("decoder",), "decoders", False),
    *_group("diffusion", "pictures made from noise", "diffusion"),
    *_group("contrastive", "pictures with texts", "contrastive"),
    *_group("branches", "models with two branches", "branches"),
)
"""Keys that only some families read."""


class Refused(NamedTuple):
    """A key that some families cannot use. They must have one value, or one of several that mean the same.

    Attributes:
      families: the families that refuse other values.
      key: the key.
      use: the value to use instead.
      same: other values that are allowed.
      unless: key that lets these families read it when it is set.
      advice: another way out, after the value.
    """

    families: tuple[str, ...]
    key: str
    use: object
    same: tuple[object, ...] = ()
    unless: str = ""
    advice: str = ""


def _without_texts(key: str, use: object) -> Refused:
    """Returns the row of a key that only pictures with texts read."""
    texts = "model.diffusion.text_layers"
    return Refused(("diffusion",), key, use, unless=texts, advice=f", or {texts}=2")


REFUSED = (
    Refused(_MASKED, "model.tied_embeddings", True),
    Refused(("diffusion",), "model.tied_embeddings", False),
    Refused(("branches", "contrastive"), "model.moe.num_experts", 0),
    Refused(("branches", "encoder_decoder", "diffusion", "contrastive"), "model.windows", (0,)),
    Refused(("encoder_decoder", "diffusion"), "model.post_norm", False),
    Refused((*_MASKED, "diffusion"), "model.logit_softcap", None),
    Refused(("diffusion",), "model.norm_unit_offset", False),
    Refused(("diffusion",), "model.embedding_scale", False),
    Refused(("diffusion",), "model.pad_vocab_to", None),
    Refused(("diffusion",), "model.dropout", 0),
    Refused((*_MASKED, "diffusion", "contrastive"), "model.lora.rank", 0),
    Refused(_NO_DECODER, "model.base_width", None),
    Refused(
        ("contrastive",), "model.contrastive.caption_weight", 2.0, unless="model.contrastive.caption_layers",
        advice=", or model.contrastive.caption_layers=1",
    ),
    Refused(("diffusion", "contrastive"), "data.packing", False),
    Refused(("branches",), "data.domains", ()),
    _without_texts("data.languages", ()),
    _without_texts("data.target_len", None),
    _without_texts("data.tokenizer", "bytes"),
    Refused(_NO_DECODER, "train.ngram_baseline", False),
    Refused(("contrastive",), "train.noise_scale", False),
    Refused(("contrastive",), "mesh.zero", "none", same=("state",)),
    Refused((*_MASKED, "encoder_decoder", "contrastive"), "sample.prompts", None, same=((),)),
    Refused(("branches", "diffusion", "contrastive"), "sample.beams", 1),
)  # fmt: skip
"""Keys that some families cannot use."""


def check_family(cfg: Groups) -> None:
    """Checks that the family reads the keys that are set, and learns from the data.

    Raises:
      ConfigError: a key or the data do not suit the family.
    """
    _check_table(cfg)
    _check_sources(cfg)
    _check_own_captions(cfg)
    if cfg.model.family in _NO_DECODER:
        _check_ring(cfg)
    _check_experts(cfg)
    _check_rope(cfg)
    _check_prediction(cfg)
    _check_towers(cfg)
    _check_branches(cfg)
    _check_sentences(cfg)


def _check_table(cfg: Groups) -> None:
    family = cfg.model.family
    for only in (row for row in ONLY if family not in row.families):
        value = attrgetter(only.key)(cfg)
        require(
            value == only.default,
            f"{only.key}={_shown(value)} is for {only.readers}, but model.family={family}. Add "
            f"--model.family={only.families[0]}, or leave {only.key} out.",
        )
    for row in (row for row in REFUSED if family in row.families):
        value = attrgetter(row.key)(cfg)
        reads = row.unless and attrgetter(row.unless)(cfg)
        require(
            bool(reads) or value in (row.use, *row.same),
            f"{row.key}={_shown(value)} does not suit model.family={family}. Use {row.key}={_shown(row.use)}"
            f"{row.advice}.",
        )
    require(
        cfg.model.positions != "relative" or family == "encoder_decoder",
        f"model.positions=relative is for encoder-decoders, but model.family={family}. Add "
        f"--model.family=encoder_decoder, or leave model.positions out.",
    )


def _shown(value: object) -> object:
    """Returns a value as YAML and flags have it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return list(value) if isinstance(value, tuple) else value


def _check_sources(cfg: Groups) -> None:
    """Checks that the data are what the family learns: texts, labels, pairs or pictures."""
    data = cfg.data
    model = cfg.model
    family = model.family
    names = [one.source for one in data.single_sources()]
    templated = [name for name in names if name in TEMPLATED]
    require(
        not templated or family not in _NO_DECODER,
        f"data.source={''.join(templated[:1])} does not suit model.family={family}. Use data.source=path.",
    )
    require(
        "labels" not in names or bool(model.labels),
        "data.source=labels has labels, but model.labels is empty. Name the labels of the file, and use an encoder.",
    )
    require(
        not model.labels or {*names} == {"labels"},
        f"model.labels={list(model.labels)} are learned from texts with labels, which data.source={names[0]} does not "
        f"have. Use --data.source=labels with a JSON file, or no labels.",
    )
    require(
        family in _MASKED or not data.has_triples,
        f"data.source=triples is for encoders and branches, but model.family={family}. Use --model.family=encoder, or "
        f"another source.",
    )
    require(
        not data.has_triples or not model.sentences.tasks,
        f"data.source=triples has rows of one text, which model.sentences.tasks={list(model.sentences.tasks)} would "
        f"rearrange. Remove the tasks, or use another source.",
    )
    key = f"data.denoisers={list(data.denoisers)}" if data.denoisers else "data.source=pairs"
    require(
        family == "encoder_decoder" or not (data.denoisers or "pairs" in names),
        f"{key} is for encoder-decoders, but model.family={family}. Use --model.family=encoder_decoder, or leave "
        f"{key.partition('=')[0]} out.",
    )
    texts = [name for name in names if name != "pairs"]
    require(
        family != "encoder_decoder" or not texts or bool(data.denoisers),
        f"model.family=encoder_decoder learns hidden spans or translations, but data.source={''.join(texts[:1])} has "
        f"texts, and data.denoisers is empty. Use --data.denoisers='[{{rate: 0.15, span: 3}}]', or data.source=pairs.",
    )
    pictures = [name for name in names if name in PICTURES]
    require(
        model.pictures is not None or not pictures,
        f"data.source={''.join(pictures[:1])} has pictures, which model.family={family} does not read. Use "
        f"model.family=diffusion or contrastive.",
    )
    learns = {"diffusion": "learns pictures", "contrastive": "compares pictures with the names of their classes"}
    require(
        model.pictures is None or (not data.mixture and names[0] in PICTURES),
        f"model.family={family} {learns.get(family)}, but data.source={names[0]} or a mixture is text. Use "
        f"--data.source=digits, or --data.source=images with a path.",
    )


def _check_own_captions(cfg: Groups) -> None:
    """Checks the keys of pictures with texts of their own."""
    data = cfg.data
    model = cfg.model
    names = [one.source for one in data.single_sources()]
    own = "captions" in names
    require(
        not own or model.reads_captions,
        f"data.source=captions has texts, which model.family={model.family} does not read. Use "
        f"model.family=contrastive, or diffusion with model.diffusion.text_layers=2.",
    )
    for key in ("model.diffusion.key_weight", "model.diffusion.salient_weight"):
        value = attrgetter(key)(cfg)
        require(
            own or not value,
            f"{key}={value} weighs what lines of pictures say, but data.source={names[0]} does not say it. Use "
            f"data.source=captions, or {key}=0.",
        )
    require(
        own or not data.key_words,
        f"data.key_words={list(data.key_words)} are of texts of pictures, but data.source={names[0]}. Use "
        f"data.source=captions, or leave them out.",
    )


def _check_ring(cfg: Groups) -> None:
    require(
        cfg.mesh.context == 1 or cfg.mesh.context_method == "all_gather",
        f"mesh.context={cfg.mesh.context} with mesh.context_method=ring computes causal attention only, and "
        f"model.family={cfg.model.family} has other attention, too. Use --mesh.context_method=all_gather.",
    )


def _check_rope(cfg: Groups) -> None:
    scaling = cfg.model.rope_scaling
    require(
        not scaling.is_short or cfg.data.seq_len <= scaling.original_max_position,
        f"data.seq_len={cfg.data.seq_len} is more than model.rope_scaling.original_max_position="
        f"{scaling.original_max_position}, up to which the frequencies of short texts are for. Use "
        f"--model.rope_scaling.long_context=true, or a shorter seq_len.",
    )


def _check_experts(cfg: Groups) -> None:
    model = cfg.model
    moe = cfg.model.moe
    _check_expert_layers(model)
    sides = [*model.expert_segments.values()]
    require(
        not moe.num_experts
        or cfg.mesh.pipe in (1, -1)
        or cfg.sample.prompts == ()
        or all(len(one) == len(one[0].kinds) == 1 for one in sides),
        f"{moe.layers.shown} gives a model layers of two kinds, from which mesh.pipe={cfg.mesh.pipe} does not generate "
        f"samples. Use --sample.prompts=[], and `jaxstack generate` with --mesh.pipe=1.",
    )
    states = model.states_key
    require(
        not states or cfg.mesh.pipe in (1, -1) or cfg.sample.prompts == (),
        f"{states} has states, with which mesh.pipe={cfg.mesh.pipe} does not generate samples. Use "
        f"--sample.prompts=[], and `jaxstack generate` with --mesh.pipe=1.",
    )
    name, taps = ("ssm", model.ssm.taps) if model.ssm.layers else ("delta", model.delta.taps)
    shortest = cfg.data.seq_len // (2 * max(cfg.mesh.context, 1))
    require(
        not states or shortest >= taps - 1 or cfg.mesh.context == 1,
        f"mesh.context={cfg.mesh.context} leaves parts of {plural(shortest, 'token')}, but model.{name}.taps={taps} "
        f"reads {plural(taps - 1, 'token')} of the part before. Raise data.seq_len, or lower mesh.context.",
    )
    by_time = moe.router == "timestep"
    require(
        not moe.num_experts or not by_time or model.family == "diffusion",
        "model.moe.router=timestep needs diffusion time, which text does not have. Use model.family=diffusion, or "
        "your own training loop with `gate_ids` in its batches.",
    )
    require(
        not moe.num_experts or by_time or model.family != "diffusion",
        f"model.moe.router={moe.router} does not suit model.family=diffusion. Use model.moe.router=timestep.",
    )


def _check_expert_layers(model: ModelConfig) -> None:
    layers = model.moe.layers
    if not model.moe.num_experts:
        return
    sides = [("num_layers", model.num_layers, layers.numbers)]
    if model.family == "encoder_decoder":
        sides.append(("encoder_layers", model.encoder_depth, layers.encoder_numbers))
    for name, depth, numbers in sides:
        require(
            all(number < depth for number in numbers),
            f"{layers.shown} lists layer {max(numbers, default=0)}, but "
            f"model.{name}={depth} layers are counted from 0. Lower it.",
        )
        require(
            layers.first < depth or layers.is_list,
            f"model.moe.layers.first={layers.first} leaves no layer of model.{name}={depth} for experts. Lower it.",
        )
    period = len(model.windows)
    cut = [one.start for parts in model.expert_segments.values() for one in parts if one.start % period]
    require(
        not cut,
        f"{layers.shown} has a change before layer {min(cut, default=0)}, which cuts a period of model.windows="
        f"{list(model.windows)}. Let experts begin and end at multiples of {plural(period, 'layer')}.",
    )


def _check_towers(cfg: Groups) -> None:
    require(
        cfg.model.family != "contrastive" or cfg.data.batch_size > 1,
        f"data.batch_size={cfg.data.batch_size} leaves a picture nothing to be compared with. Use at least two rows.",
    )
    require(
        not cfg.model.contrastive.translations or len(cfg.data.languages) > 1,
        f"model.contrastive.translations=true gives each picture two of data.languages={list(cfg.data.languages)}. "
        f"Name two or more, or use translations=false.",
    )


def _check_branches(cfg: Groups) -> None:
    model = cfg.model
    branches = cfg.model.branches
    if model.family != "branches":
        return
    depth = branches.depth(model.num_layers)
    require(
        depth < model.num_layers,
        f"model.branches.layers={depth} leaves no layer of model.num_layers={model.num_layers} for the trunk. Lower "
        f"branches.layers, or raise num_layers.",
    )
    require(
        not branches.freeze_trunk or cfg.run.init_from is not None,
        "model.branches.freeze_trunk=true keeps the trunk of an existing model, but run.init_from is not set. Name a "
        "run, or use freeze_trunk=false.",
    )


def _check_sentences(cfg: Groups) -> None:
    model = cfg.model
    data = cfg.data
    sentences = cfg.model.sentences
    if not sentences.tasks:
        default = SentencesConfig()
        for key, value in vars(sentences).items():
            require(
                value == getattr(default, key),
                f"model.sentences.{key}={value} is for tasks on sentences, but model.sentences.tasks is empty. Name "
                f"one, such as [next], or leave it out.",
            )
        return
    tasks = f"model.sentences.tasks={list(sentences.tasks)}"
    require(
        model.masks_tokens,
        f"{tasks} is learned beside hidden tokens, which model.family={model.family}"
        f"{' with model.labels' * bool(model.labels)} does not learn. Use --model.family=encoder without labels, or "
        f"tasks=[].",
    )
    require(
        not data.packing,
        f"{tasks} compares parts of a window, which data.packing=true keeps apart. Use data.packing=false.",
    )
    require(
        data.seq_len >= 4 * sentences.parts,
        f"data.seq_len={data.seq_len} is too short for {tasks} with up to {plural(sentences.parts, 'part')} of 4 "
        f"tokens or more. Raise it.",
    )


def _check_prediction(cfg: Groups) -> None:
    """Checks the keys that modules which predict later tokens do not fit."""
    if not cfg.model.mtp.depth:
        return
    depth = f"model.mtp.depth={cfg.model.mtp.depth}"
    require(
        cfg.mesh.pipe in (1, -1),
        f"{depth} has modules that read embedding and head, which the stages of mesh.pipe={cfg.mesh.pipe} do not have. "
        f"Use mesh.pipe=1.",
    )
    require(
        cfg.aim is None,
        f"{depth} predicts the tokens of texts, but data.source={cfg.data.source} has another objective. Use "
        f"model.mtp.depth=0.",
    )
