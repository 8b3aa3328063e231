"""Keeps the small files of a Hugging Face folder in the run that imports it; `export` returns them unchanged."""

import json
import shutil
from pathlib import Path

import yaml

from jaxstack.common import files, inputs
from jaxstack.config import ConfigError
from jaxstack.config.reading import yaml_check
from jaxstack.data import chat
from jaxstack.data.tokenizers import JsonObject
from jaxstack.hf import compressed, configs

FOLDER = "imported"
"""The folder of a run that holds them."""
_TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", _TEMPLATE,
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "merges.txt", "vocab.txt",
)  # fmt: skip
FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES)
_DROPPED = (compressed.KEY, "auto_map")
"""Keys that do not go back: the exported weights are not quantised, and the folder's code is not copied."""
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def keep(folder: Path, run: Path, tokenizer: JsonObject | None = None) -> None:
    """Copies the files of a Hugging Face folder into a new run, with a tokenizer.json if one was built for it."""
    (run / FOLDER).mkdir()
    _copy(FILES, folder, run / FOLDER)
    if tokenizer is not None:
        (run / FOLDER / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")


def find(run: Path) -> Path | None:
    """Returns the folder with the files of the model that a run began with, or `None` if it began with none.

    Runs that began with other runs are followed. A Hugging Face folder that was not imported may have been removed.
    """
    seen: list[Path] = []
    while run not in seen:
        seen.append(run)
        if (run / FOLDER / "config.json").is_file():
            return run / FOLDER
        if not (run / "config.yaml").is_file():
            return run if (run / "config.json").is_file() else None
        source = _init_from(run / "config.yaml")
        if source is None:
            return None
        run = Path(source)
    return None


def family(originals: Path) -> str | None:
    """Returns the family that the kept `config.json` names."""
    return _read(originals / "config.json").get("model_type")


def _init_from(config: Path) -> str | None:
    """Returns `run.init_from` in the configuration of a run, or `None` if it has none or is damaged."""
    try:
        match yaml_check.load(inputs.read_text(config, yaml_check.MOST_BYTES)):
            case {"run": {"init_from": str(source)}}:
                return source
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        pass  # of a run that this one began with; only its other files matter here
    return None


def restore(originals: Path, tokenizer: JsonObject | None, out: Path) -> bool:
    """Adds files to an exported folder, and writes the imported `config.json` with the values that have changed.

    A run's own tokenizer, with its special token ids, replaces the original one.

    Args:
      tokenizer: tokenizer of the run, as JSON of `to_json`, if it has saved one.
    """
    before = _read(originals / "config.json")
    path = originals / "tokenizer.json"
    same = path.is_file() and _read(path) == (tokenizer or {}).get("tokenizer")
    if same:
        template = out / _TEMPLATE
        own = template.read_text("utf-8") if template.is_file() else None
        template.unlink(missing_ok=True)
        (out / "tokenizer_config.json").unlink(missing_ok=True)
        _copy(TOKENIZER_FILES, originals, out)
        if own is not None and own != _template(originals):
            template.write_text(own, "utf-8")
    _copy(("generation_config.json",), originals, out)
    config = _read(out / "config.json")
    ids = {}
    for key in SPECIAL_IDS:
        known = config[key] is not None  # the end of a document in the run's tokenizer
        if known and (before.get(key) is None or (tokenizer is not None and not same)):
            ids[key] = config[key]
        elif key in before:
            config[key] = before[key]
        else:
            del config[key]  # its value is then the default of the family
    text = (originals / "config.json").read_text("utf-8")
    if dropped := [key for key in _DROPPED if before.get(key)]:
        before = {key: value for key, value in before.items() if key not in dropped}
        text = json.dumps(before, indent=2) + "\n"
    changed = _changed_keys(before, config)
    if changed is None:
        text = json.dumps(config, indent=2) + "\n"
    (out / "config.json").write_text(_with_values(text, ids | (changed or {})), "utf-8")
    return same


def _changed_keys(before: JsonObject, now: JsonObject) -> JsonObject | None:
    """Returns the keys of a `config.json` that this run has changed, with their new values.

    Args:
      before: the imported one.
      now: the one that describes the exported model, with other keys than the imported one.

    Returns:
      `None` if the model is another one, such as one with experts that were copied from dense layers.
    """
    original = configs.from_json("config.json", before)
    exported = configs.from_json("config.json", now)
    if original.family != exported.family or configs.model_differences(original.model, exported.model):
        return None
    rendered = configs.to_json(original.family, original.model, 0)
    changed = {key: now[key] for key, value in rendered.items() if key not in SPECIAL_IDS and now[key] != value}
    if now["architectures"][0] not in before.get("architectures", []):
        changed["architectures"] = now["architectures"]  # such as the class of a model without a head
    names = [key for key in ("torch_dtype", "dtype") if key in before]
    return changed | {key: now["torch_dtype"] for key in names if before[key] != now["torch_dtype"]}


def _with_values(text: str, values: JsonObject) -> str:
    """Returns the text of a JSON object with other values of some keys; everything else stays as it is written."""
    decoder = json.JSONDecoder()
    pieces = []
    at = 0
    place = text.index("{") + 1
    left = dict(values)
    while True:
        place = _skip(text, place, " \t\r\n,")
        if text[place] == "}":
            break
        key, place = decoder.raw_decode(text, place)
        start = _skip(text, place, " \t\r\n:")
        _, place = decoder.raw_decode(text, start)
        if key in left:
            pieces += [text[at:start], json.dumps(left.pop(key))]
            at = place
    end = len(text[:place].rstrip())
    new = "".join(f",\n  {json.dumps(key)}: {json.dumps(value)}" for key, value in left.items())
    return "".join([*pieces, text[at:end], new.removeprefix("," * (text[end - 1] == "{")), text[end:]])


def _skip(text: str, place: int, characters: str) -> int:
    while text[place] in characters:
        place += 1
    return place


def _template(originals: Path) -> str | None:
    """Returns the chat template of a folder, if it has one."""
    try:
        found = chat.read_template(str(originals / "tokenizer.json"))
    except ConfigError:
        return None
    return found["source"] if found else None


def _read(path: Path) -> JsonObject:
    return files.read_json(path, "Restore it.")


def _copy(names: tuple[str, ...], source: Path, to: Path) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, to / name)
