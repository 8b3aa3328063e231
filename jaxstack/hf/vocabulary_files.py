"""Builds a tokenizer.json from the vocabulary files of older folders, as `transformers` does.

| files | tokenizer | of |
|---|---|---|
| `vocab.json`, `merges.txt` | byte-level BPE | GPT-2, RoBERTa |
| `vocab.txt` | WordPiece | BERT |

Names and flags of special tokens are in `tokenizer_config.json`, `special_tokens_map.json` and `added_tokens.json`.
"""

import json
from pathlib import Path
from typing import Any

from jaxstack.common import files
from jaxstack.config import ConfigError
from jaxstack.data.tokenizers import JsonObject

_CLASSES = {"gpt2": "GPT2Tokenizer", "roberta": "RobertaTokenizer", "bert": "BertTokenizer"}
"""The class of a family's tokenizer, for a folder that does not name it."""

_SPECIAL = {
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    "RobertaTokenizer": {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>", "pad_token": "<pad>",
        "cls_token": "<s>", "mask_token": "<mask>",
    },
    "BertTokenizer": {
        "unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]",
    },
}  # fmt: skip
"""The special tokens of a class, for a folder that does not name them."""

_SENTENCEPIECE = ("spiece.model", "sentencepiece.bpe.model", "tokenizer.model")


def build_tokenizer(folder: Path, family: str) -> JsonObject | None:
    """Returns the content of a tokenizer.json, or `None` if the files are not those of a class that is known here.

    Raises:
      ConfigError: a file is damaged, or the `tokenizers` library is missing.
    """
    settings = _read(folder / "tokenizer_config.json")
    name = str(settings.get("tokenizer_class") or _CLASSES.get(family, "")).removesuffix("Fast")
    pieces = ("vocab.txt",) if name == "BertTokenizer" else ("vocab.json", "merges.txt")
    if name not in _SPECIAL or not all((folder / file).is_file() for file in pieces):
        return None
    try:
        import tokenizers
    except ImportError:
        raise ConfigError(f"{folder} needs the tokenizers library. Run pip install 'jaxstack[hf]'.") from None
    settings |= {} if "added_tokens_decoder" in settings else _read(folder / "special_tokens_map.json")
    special = _SPECIAL[name] | {key: value for key, value in settings.items() if key in _SPECIAL["RobertaTokenizer"]}
    try:
        built = (_word_piece if name == "BertTokenizer" else _byte_level)(folder, settings, special)
        for text, flags in _added_tokens(folder, settings, special):
            token = tokenizers.AddedToken(text, **flags)
            (built.add_special_tokens if token.special else built.add_tokens)([token])
        built.post_processor = _frame(name, built, settings, special)
    except Exception as error:  # the library raises plain Exception for a malformed file
        raise ConfigError(
            f"{folder} has a damaged tokenizer in {' and '.join(pieces)}: {error}. Restore the files of the model."
        ) from None
    content: JsonObject = json.loads(built.to_str())
    return content


def advice(folder: Path) -> str:
    """Returns what to do about a folder without a tokenizer that can be read."""
    other = next((name for name in (*_SENTENCEPIECE, "vocab.json", "vocab.txt") if (folder / name).is_file()), None)
    if other is None:
        return "Copy the model's own tokenizer.json into it and import again, or name it with --data.tokenizer=..."
    code = f"from transformers import AutoTokenizer as T; T.from_pretrained('{folder}').save_pretrained('{folder}')"
    install = "pip install transformers sentencepiece protobuf"
    return f'Write it from {other} with `{install}` and `python -c "{code}"`, and import again.'


def _byte_level(folder: Path, settings: JsonObject, special: JsonObject) -> Any:
    """Returns the byte-level BPE of GPT-2 and RoBERTa."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    built = Tokenizer(model)
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=settings.get("add_prefix_space", False))
    built.decoder = decoders.ByteLevel()
    return built


def _word_piece(folder: Path, settings: JsonObject, special: JsonObject) -> Any:
    """Returns the WordPiece of BERT."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    built = Tokenizer(models.WordPiece.from_file(str(folder / "vocab.txt"), unk_token=_text(special["unk_token"])))
    built.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=settings.get("do_lower_case", True),
    )
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.decoder = decoders.WordPiece(prefix="##")
    return built


def _frame(name: str, built: Any, settings: JsonObject, special: JsonObject) -> Any:
    """Returns the post-processor, which puts special tokens around a text."""
    from tokenizers import processors

    if name == "GPT2Tokenizer":
        before = [_text(special["bos_token"])] if settings.get("add_bos_token") else []
        after = [_text(special["eos_token"])] if settings.get("add_eos_token") else []
    else:
        before = [_text(special["cls_token"])]
        after = [_text(special["sep_token"])]
    ids = [(token, built.token_to_id(token)) for token in (*after, *before)]
    if name == "RobertaTokenizer":
        add_space = settings.get("add_prefix_space", False)
        return processors.RobertaProcessing(ids[0], ids[1], settings.get("trim_offsets", True), add_space)
    single = [*before, "$A", *after]
    return processors.TemplateProcessing(single, [*single, "$B:1", *(f"{token}:1" for token in after)], ids)


_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def _added_tokens(folder: Path, settings: JsonObject, special: JsonObject) -> list[tuple[str, JsonObject]]:
    """Returns the tokens that match before the text is split, and their flags, in the order of their ids."""
    named: JsonObject = {}
    for value in special.values():
        if value is not None:
            flags = {key: value[key] for key in _FLAGS if key in value} if isinstance(value, dict) else {}
            named[_text(value)] = named.get(_text(value), {}) | flags | {"special": True}
    listed = {int(i): token for i, token in settings.get("added_tokens_decoder", {}).items()}
    if not listed:
        listed = {int(i): {"content": text} for text, i in _read(folder / "added_tokens.json").items()}
    added: JsonObject = {}
    for _, token in sorted(listed.items()):
        flags = {key: token[key] for key in (*_FLAGS, "special") if key in token}
        added[token["content"]] = flags | ({"special": True} if token["content"] in named else {})
    return [*added.items(), *((text, flags) for text, flags in named.items() if text not in added)]


def _text(token: Any) -> str:
    """Returns the text of a token, which may be written with its flags."""
    return token["content"] if isinstance(token, dict) else token


def _read(file: Path) -> JsonObject:
    """Returns the content of a JSON file, or an empty object if there is no file."""
    content = files.read_json(file, "Use the model's own file.") if file.is_file() else {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is not a JSON object. Use the model's own file.")
    return content
