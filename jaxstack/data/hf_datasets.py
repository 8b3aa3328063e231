"""Reads a column of text with the `datasets` library: of the hub, a folder, a file, or what `save_to_disk` wrote."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from jaxstack.common.files import is_foreign
from jaxstack.config import ConfigError, DataConfig

if TYPE_CHECKING:
    import datasets

_TABLES = (".arrow", ".csv", ".json", ".jsonl", ".ndjson", ".parquet", ".tsv")
_NOT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def column_texts(cfg: DataConfig) -> Iterator[tuple[str, str | None]]:
    """Yields the name and the text of each row of `data.hf_column`. `None` is a row whose text is null.

    Raises:
      ConfigError: the dataset or the column does not exist, a file is damaged, or a row holds something else.
    """
    rows = _load(cfg)
    if cfg.hf_column not in rows.column_names:
        raise ConfigError(
            f"data.hf_column={cfg.hf_column} is not a column of {cfg.path}. Use one of {rows.column_names}."
        )
    i = -1
    try:
        for i, row in enumerate(rows.select_columns([cfg.hf_column])):
            text = row[cfg.hf_column]
            if not isinstance(text, str | None):
                raise ConfigError(
                    f"data.hf_column={cfg.hf_column} holds {type(text).__name__} in row {i:,}. Use a column of text."
                )
            if text is not None:
                text.encode()  # half a character of JSON fails here
            yield f"row {i:,}", text
    except (UnicodeError, OSError, ValueError) as error:
        raise ConfigError(
            f"data.path={cfg.path} cannot be read from row {max(i, 0):,} on: {_first_cause(error)}. Repair the file."
        ) from None


def _load(cfg: DataConfig) -> "datasets.Dataset":
    """Returns the rows of `data.hf_split`."""
    try:
        import datasets
    except ImportError:
        raise ConfigError("data.source=hf needs the datasets library. Run pip install 'jaxstack[hf]'.") from None
    path = Path(str(cfg.path))
    if not path.exists() and (path.suffix in _TABLES or not _HUB_NAME.fullmatch(str(path))):
        raise ConfigError(f"data.path={path} does not exist. Give a file, a folder, or the name of a dataset.")
    with _library_errors() as logged:
        try:
            if path.suffix == ".arrow" and path.is_file():
                return _split({"train": datasets.Dataset.from_file(str(path))}, cfg.hf_split)
            if path.is_file():
                return datasets.load_dataset(str(path.parent.resolve()), data_files=path.name, split=cfg.hf_split)
            if (path / "state.json").is_file():
                return _split({"train": datasets.load_from_disk(path)}, cfg.hf_split)
            if (path / "dataset_dict.json").is_file():
                return _split({**datasets.load_from_disk(path)}, cfg.hf_split)
            if path.is_dir():
                _require_one_format(path)
                return datasets.load_dataset(str(path), split=cfg.hf_split)
            with _without_retries(str(path)):
                return datasets.load_dataset(str(path), split=cfg.hf_split)
        except ConfigError:
            raise
        except Exception as error:  # the library has no common class of errors
            reason = logged[0] if logged else _first_cause(error)
    raise ConfigError(
        f"data.path={path} with data.hf_split={cfg.hf_split} could not be loaded: {reason}. Repair the data, or "
        f"correct data.path or data.hf_split."
    )


def _split(splits: "dict[str, datasets.Dataset]", wanted: str) -> "datasets.Dataset":
    """Returns a split, or a part of splits such as `train[:10%]`, of datasets that are already loaded."""
    import datasets

    parts = datasets.ReadInstruction.from_spec(wanted).to_absolute({name: len(rows) for name, rows in splits.items()})
    return datasets.concatenate_datasets([splits[part.splitname].select(range(part.from_, part.to)) for part in parts])


def _require_one_format(folder: Path) -> None:
    """Refuses a folder with files of several formats, of which the library would read only one.

    A README.md may say which files are the data.
    """
    if (folder / "README.md").is_file():
        return
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    first = {file.suffix: file for file in files if not is_foreign(file.name) and file.name not in _NOT_DATA}
    tables = [file.relative_to(folder).as_posix() for suffix, file in first.items() if suffix in _TABLES]
    if tables[1:]:
        raise ConfigError(
            f"data.path={folder} has files of several formats, such as {' and '.join(tables[:2])}, and only one format "
            f"would be read. Keep one, or give a file."
        )


@contextmanager
def _without_retries(name: str) -> Iterator[None]:
    """Reads a dataset of the hub from the cache, without waiting, if the hub cannot be reached."""
    import datasets
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        huggingface_hub.HfApi().dataset_info(name, timeout=10)
        offline = False
    except (HfHubHTTPError, OfflineModeIsEnabled):  # the library says more about these
        offline = False
    except Exception:  # no connection, or none to that name
        offline = True
    before = datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE
    if offline:
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        yield
    except ConnectionError:
        if not offline:
            raise
        raise ConfigError(
            f"data.path={name} is neither a file nor a folder nor in the cache, and the Hugging Face hub cannot be "
            f"reached. Check the name and the connection."
        ) from None
    finally:
        datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE = before


class _Collect(logging.Handler):
    """Keeps the messages of a logger, which name the file that cannot be read."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a message."""
        self.messages.append(_one_line(re.sub(r" with error .*?: ", ": ", record.getMessage(), count=1)))


@contextmanager
def _library_errors() -> Iterator[list[str]]:
    """Yields the errors that the library logs in the meantime, which are not printed then."""
    logger = logging.getLogger("datasets")
    handlers = logger.handlers
    collect = _Collect()
    logger.handlers = [collect]
    try:
        yield collect.messages
    finally:
        logger.handlers = handlers


def _first_cause(error: BaseException) -> str:
    """Returns the message of the error that caused others, on one line."""
    while cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = cause
    return _one_line(str(error)) or "it has no rows"


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return (line if len(line) <= 300 else f"{line[:300]}...").removesuffix(".")
