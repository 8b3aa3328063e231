"""Keeps the small files of a Hugging Face folder in the run that imports it; `export` returns them unchanged."""

import json
import shutil
from pathlib import Path

import yaml

from jaxstack.config import ConfigError
from jaxstack.data import chat
from jaxstack.data.tokenizers import JsonObject

FOLDER = "imported"
"""The folder of a run that holds them."""
_TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", _TEMPLATE,
    "tokenizer.model", "vocab.json", "merges.txt",
)  # fmt: skip
FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES)
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def keep(folder: Path, run: Path) -> None:
    """Copies the files of a Hugging Face folder into a new run."""
    (run / FOLDER).mkdir()
    _copy(FILES, folder, run / FOLDER)


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
        source = (yaml.safe_load((run / "config.yaml").read_text("utf-8")) or {}).get("run", {}).get("init_from")
        if source is None:
            return None
        run = Path(source)
    return None


def restore(originals: Path, tokenizer: JsonObject | None, out: Path) -> None:
    """Adds files and special token ids to an exported folder. A run's own tokenizer replaces the original one.

    Args:
      originals: folder with the files.
      tokenizer: of the run, as JSON of `to_json`, if it has saved one.
      out: the exported folder, with its `config.json`.
    """
    before, path = _read(originals / "config.json"), originals / "tokenizer.json"
    same = path.is_file() and _read(path) == (tokenizer or {}).get("tokenizer")
    if same:
        template = out / _TEMPLATE
        own = template.read_text("utf-8") if template.is_file() else None
        template.unlink(missing_ok=True)
        _copy(TOKENIZER_FILES, originals, out)
        if own is not None and own != _template(originals):
            template.write_text(own, "utf-8")
    _copy(("generation_config.json",), originals, out)
    config = _read(out / "config.json")
    for key in SPECIAL_IDS:
        known = config[key] is not None  # the end of a document in the run's tokenizer
        if known and (before.get(key) is None or (tokenizer is not None and not same)):
            continue
        if key in before:
            config[key] = before[key]
        else:
            del config[key]  # its value is then the default of the family
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _template(originals: Path) -> str | None:
    """Returns the chat template of a folder, if it has one."""
    try:
        found = chat.read_template(str(originals / "tokenizer.json"))
    except ConfigError:
        return None
    return found["source"] if found else None


def _read(path: Path) -> JsonObject:
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}). Restore it.") from None


def _copy(names: tuple[str, ...], source: Path, to: Path) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, to / name)
