"""What models of each kind answer, in the shape of OpenAI's or Hugging Face's endpoints.

| kind | models | route | shape |
|---|---|---|---|
| `feature-extraction` | encoders, contrastive models | `/v1/embeddings` | OpenAI's |
| `fill-mask` | encoders without labels | `/models/NAME` | Hugging Face's |
| `text-classification` | encoders with labels of sequences | `/models/NAME` | Hugging Face's |
| `translation` | encoder-decoders | `/models/NAME` | Hugging Face's |
| `text-to-image` | diffusion models | `/v1/images/generations` | OpenAI's |

`KINDS` has a row for each. Every parameter of a request has an effect or is refused by name.
"""

import base64
import io
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxstack.config import ConfigError, ModelConfig
from jaxstack.serve.catalog import Loaded
from jaxstack.serve.errors import ApiError
from jaxstack.serve.requests import JsonValue, RequestFields, shown_value

MOST_INPUTS = 256
"""Texts of a request."""
MOST_PICTURES = 10
"""Pictures of a request, as with OpenAI."""

Answer = Callable[[Loaded, RequestFields], JsonValue]


class Kind(NamedTuple):
    """What some models do.

    Attributes:
      task: Hugging Face's name of it.
      route: where requests for it go.
      has: whether a model does it.
      answer: returns the answer to the parameters of a request.
    """

    task: str
    route: str
    has: Callable[[ModelConfig], bool]
    answer: Answer


EMBEDDINGS = "/v1/embeddings"
IMAGES = "/v1/images/generations"
MODELS = "/models"


def embeddings(model: Loaded, fields: RequestFields) -> JsonValue:
    """Answers `/v1/embeddings`."""
    given = fields.take("input")
    if isinstance(given, str) or (isinstance(given, list) and given and all(type(one) is int for one in given)):
        given = [given]
    texts = model.config.model.family == "contrastive"  # and no token ids
    if not isinstance(given, list) or not 1 <= len(given) <= MOST_INPUTS:
        what, send = ("not text", "a text") if texts else ("neither text nor token ids", "a text, ids,")
        raise ApiError(
            f"input={shown_value(given)} is {what}. Send {send} or a list of up to {MOST_INPUTS} of them.", "input"
        )
    style = fields.take("encoding_format", "float")
    if style not in ("float", "base64"):
        raise ApiError(f"encoding_format={shown_value(style)} is not known. Use float or base64.", "encoding_format")
    fields.finish({})
    rows = [_ids_of(model, one) for one in given]
    if texts:
        if not all(isinstance(one, str) for one in given):
            raise ApiError(f"input={shown_value(given)} has token ids. Send texts, which this model reads.", "input")
        vectors = model.features(given)
    else:
        vectors = model.encoder.embeddings(rows)
    count = sum(map(len, rows))
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": _vector(v, style)} for i, v in enumerate(vectors)],
        "model": model.name,
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }


def _ids_of(model: Loaded, given: JsonValue) -> list[int]:
    """Returns the ids of a text of a request, with what its tokenizer puts around it."""
    if isinstance(given, list) and given and all(type(i) is int for i in given):
        return given
    if not isinstance(given, str) or not given:
        raise ApiError(f"input has the item {shown_value(given)}. Send a text or token ids, not empty.", "input")
    return model.ids(given)


def _vector(vector: np.ndarray, style: str) -> JsonValue:
    if style == "float":
        return [float(value) for value in vector]
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def fill_mask(model: Loaded, fields: RequestFields) -> JsonValue:
    """Answers `/models/NAME` of a masked language model: the likeliest tokens in place of each mask."""
    texts, single = _inputs(fields)
    options = _parameters(fields, {"targets": ([],)})
    top = options.integer("top_k", 5, 1, 100)
    options.finish({"targets": ([],)})
    mask, marker = model.mask
    rows = [model.ids_with_mask(text, marker, mask) for text in texts]
    for text, row in zip(texts, rows, strict=True):
        if mask not in row:
            raise ApiError(f"the text {shown_value(text)} has no {marker}. Write it where a token is hidden.", "inputs")
    answers = []
    for row, logits in zip(rows, model.encoder.logits(rows), strict=True):
        places = [i for i, token in enumerate(row) if token == mask]
        found = [_candidates(model, row, place, logits[place], top) for place in places]
        answers.append(found[0] if len(found) == 1 else found)
    return answers[0] if single else answers


def _candidates(model: Loaded, row: Sequence[int], place: int, logits: np.ndarray, top: int) -> list[JsonValue]:
    shares = _softmax(logits)
    found = []
    for token in np.argsort(-shares, kind="stable")[:top].tolist():
        if token >= model.tokenizer.vocab_size:
            continue
        text = [*row[:place], token, *row[place + 1 :]]
        found.append(
            {
                "score": float(shares[token]),
                "token": token,
                "token_str": model.decode([token]),
                "sequence": model.decode(text),
            }
        )
    return found


def classify(model: Loaded, fields: RequestFields) -> JsonValue:
    """Answers `/models/NAME` of a classifier: all labels of each text with their probabilities, the likeliest first."""
    texts, _ = _inputs(fields)
    options = _parameters(fields, {})
    labels = model.config.model.labels
    top = options.integer("top_k", len(labels), 1, len(labels))
    options.finish({"function_to_apply": ("softmax",)})
    answers = []
    for logits in model.encoder.logits([model.ids(text) for text in texts]):
        shares = _softmax(logits[0])  # the first token stands for the text
        order = np.argsort(-shares, kind="stable")[:top].tolist()
        answers.append([{"label": labels[i], "score": float(shares[i])} for i in order])
    return answers


def translation(model: Loaded, fields: RequestFields) -> JsonValue:
    """Answers `/models/NAME` of an encoder-decoder: greedily, or with `num_beams` beams, and never by sampling."""
    texts, _ = _inputs(fields)
    options = _parameters(fields, {})
    language = options.take("tgt_lang")
    if language is not None and not isinstance(language, str):
        raise ApiError(f"tgt_lang={shown_value(language)} is not text. Send the name of a language.", "tgt_lang")
    own = model.config.sample
    generate = options.take("generate_parameters", {})
    if not isinstance(generate, dict):
        raise ApiError(
            f"generate_parameters={shown_value(generate)} is not an object. Send one, or leave it out.",
            "generate_parameters",
        )
    more = RequestFields.of(generate)
    both = [options, more]  # `transformers` has them in one object, and the client of the hub in two
    beams = _integer(both, "num_beams", own.beams, 1, 64)
    tokens = _integer(both, "max_new_tokens", own.tokens or model.config.data.seq_len, 1, model.config.data.seq_len)
    options.finish({"src_lang": (None,), "clean_up_tokenization_spaces": (False, True)})
    more.finish({"do_sample": (False,)})
    return [{"translation_text": text} for text in model.translate(texts, language, beams, tokens)]


def _integer(places: Sequence[RequestFields], name: str, default: int, least: int, most: int) -> int:
    """Returns a parameter that may be in one of several objects."""
    found = default
    for fields in places:
        found = fields.integer(name, found, least, most)
    return found


def images(model: Loaded, fields: RequestFields) -> JsonValue:
    """Answers `/v1/images/generations`: pictures of a class, or of a text if the model reads texts."""
    prompt = fields.take("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise ApiError(f"prompt={shown_value(prompt)} is not a text. Send one.", "prompt")
    count = fields.integer("n", 1, 1, MOST_PICTURES)
    own = model.config.sample
    steps = fields.integer("steps", own.steps, 1, 1000)
    guidance = fields.number("guidance", own.guidance, 0, 100)
    seed = fields.integer("seed", None, 0, 2**32 - 1)
    height, width, _ = model.config.model.diffusion.image
    png = ("png",)
    fields.finish(
        {
            "size": (f"{width}x{height}", "auto"), "response_format": ("b64_json",), "output_format": png,
            "quality": ("auto", "standard"), "background": ("auto", "opaque"), "moderation": ("auto",),
            "output_compression": (100,), "partial_images": (0,), "stream": (False,), "style": (),
        }
    )  # fmt: skip
    pixels = model.draw(prompt, count, steps, guidance, seed)
    return {"created": int(time.time()), "data": [{"b64_json": _png(picture)} for picture in pixels]}


def _png(pixels: np.ndarray) -> str:
    """Returns a picture [H, W, C] with values from -1 to 1 as PNG in base64."""
    from PIL import Image

    levels = np.round((pixels.clip(-1, 1) + 1) * 127.5).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(levels[..., 0] if levels.shape[-1] == 1 else levels[..., :3]).save(out, format="PNG")
    return base64.b64encode(out.getvalue()).decode()


def _inputs(fields: RequestFields) -> tuple[list[str], bool]:
    """Returns the texts of a request in Hugging Face's form, and whether it is one text without a list."""
    given = fields.take("inputs")
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not 1 <= len(texts) <= MOST_INPUTS or not all(_is_text(one) for one in texts):
        raise ApiError(
            f"inputs={shown_value(given)} is neither a text nor a list of texts. Send one to {MOST_INPUTS} texts.",
            "inputs",
        )
    return texts, isinstance(given, str)


def _is_text(value: JsonValue) -> bool:
    return isinstance(value, str) and bool(value)


def _parameters(fields: RequestFields, harmless: dict[str, tuple[JsonValue, ...]]) -> RequestFields:
    """Returns the object `parameters` of a request, after checking that nothing else is left."""
    given = fields.take("parameters", {})
    if not isinstance(given, dict):
        raise ApiError(f"parameters={shown_value(given)} is not an object. Send one, or leave it out.", "parameters")
    fields.finish({"options": ({}, {"wait_for_model": True}, {"use_cache": True}), **harmless})
    return RequestFields.of(given)


def _softmax(logits: np.ndarray) -> np.ndarray:
    shares = np.exp(logits.astype(np.float64) - logits.max())
    return shares / shares.sum()


def _encoder(cfg: ModelConfig) -> bool:
    return cfg.family == "encoder"


KINDS = (
    Kind("feature-extraction", EMBEDDINGS, lambda cfg: cfg.family in ("encoder", "contrastive"), embeddings),
    Kind("fill-mask", MODELS, lambda cfg: _encoder(cfg) and not cfg.labels, fill_mask),
    Kind("text-classification", MODELS, lambda cfg: _encoder(cfg) and bool(cfg.labels), classify),
    Kind("translation", MODELS, lambda cfg: cfg.family == "encoder_decoder", translation),
    Kind("text-to-image", IMAGES, lambda cfg: cfg.family == "diffusion", images),
)
"""Kinds of models. A model may be of several, on different routes."""


def kinds_of(cfg: ModelConfig) -> list[Kind]:
    """Returns what a model does here.

    Raises:
      ConfigError: the model is of no kind that is served here. The error says how to use it.
    """
    if cfg.labels and cfg.label_each == "token":
        raise ConfigError("model.label_each=token: labels of words are not served. Serve a classifier of sequences.")
    if cfg.family == "branches":
        raise ConfigError(
            "model.family=branches has two branches and is not served. Make a run of one with `jaxstack export RUN OUT "
            "--branch=generation` or `--branch=understanding`, and serve that run."
        )
    found = [kind for kind in KINDS if kind.has(cfg)]
    if not found:
        raise ConfigError(
            f"model.family={cfg.family} is not served with other models. Serve it alone: jaxstack serve RUN."
        )
    return found
