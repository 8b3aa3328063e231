"""Files that other programs wrote: byte order marks, keys that occur twice, and tables of texts."""

import csv
import gzip
import json

import pytest

from jaxstack import data
from jaxstack.config import ConfigError, DataConfig
from jaxstack.data.conversations import read_conversations


def test_a_byte_order_mark_is_not_text(tmp_path):
    (tmp_path / "text.txt").write_bytes("a text".encode("utf-8-sig"))
    (document,) = data.documents(DataConfig(source="path", path=str(tmp_path / "text.txt")))
    assert document.text == "a text"


@pytest.mark.parametrize("as_list", [False, True])
def test_conversations_may_have_a_byte_order_mark(tmp_path, as_list):
    one = {"prompt": "a", "completion": "b"}
    (tmp_path / "chat.json").write_text(json.dumps([one] if as_list else one), "utf-8-sig")
    assert len([*read_conversations(str(tmp_path / "chat.json"))]) == 1


@pytest.mark.parametrize("form", ["{}", "[{}]"])
def test_a_key_that_occurs_twice_is_refused(tmp_path, form):
    text = '{"prompt": "a", "completion": "b", "completion": "c"}'
    (tmp_path / "chat.json").write_text(form.format(text))
    with pytest.raises(ConfigError, match="the key 'completion' twice"):
        [*read_conversations(str(tmp_path / "chat.json"))]


# --- tables of texts --------------------------------------------------------------------------------------------------

ROWS = [{"text": "one", "n": 1}, {"text": None, "n": 2}, {"text": "", "n": 3}, {"text": "zwei\n", "n": 4}]
LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS)


def table(path, rows=ROWS):
    """Writes rows by the suffix of a file, with libraries that jaxstack does not use for it."""
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        case ".json":
            path.write_text(json.dumps(rows))
        case ".gz":
            path.write_bytes(gzip.compress(LINES.encode()))
        case ".parquet":
            pytest.importorskip("pyarrow.parquet").write_table(
                pytest.importorskip("pyarrow").Table.from_pylist(rows), path
            )
        case ".csv" | ".tsv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, ["n", "text"], delimiter=",\t"[path.suffix == ".tsv"])
                writer.writeheader()
                writer.writerows(rows)
    return str(path)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    try:
        import datasets
    except ImportError:
        return
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr(datasets.config, "HF_CACHE_HOME", str(tmp_path_factory.mktemp("hub")))


def texts(path, skipped=None, **keys):
    pytest.importorskip("datasets")
    return [one.text for one in data.documents(DataConfig(source="hf", path=str(path), **keys), skipped)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.parquet", "a.csv", "a.tsv"])
def test_a_single_file_is_a_dataset(tmp_path, name):
    path = table(tmp_path / name)
    (tmp_path / "other.txt").write_text("not this\n")
    skipped = []
    assert texts(path, skipped) == ["one", "zwei\n"]
    if name.endswith(("csv", "tsv")):  # these have no null: an empty field
        assert texts(path, hf_column="text", hf_split="train[:1]") == ["one"]
    else:
        assert skipped == ["row 1"]


def test_null_rows_are_counted(tmp_path):
    pytest.importorskip("datasets")
    description = data.load(DataConfig(source="hf", path=table(tmp_path / "a.jsonl"))).description
    assert ": 2 documents (skipped 1 row without text: row 1), " in description
    with pytest.raises(
        ConfigError, match=r"holds no text \(skipped 4 rows without text: row 0, row 1, row 2, \.\.\.\)"
    ):
        texts(table(tmp_path / "b.jsonl", [{"text": None}] * 4))


def test_what_save_to_disk_has_written_is_a_dataset(tmp_path):
    datasets = pytest.importorskip("datasets")
    train, test = (datasets.Dataset.from_dict({"text": [f"{name}{i}" for i in range(4)]}) for name in "ab")
    train.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=train, test=test).save_to_disk(tmp_path / "two")
    assert texts(tmp_path / "one") == texts(tmp_path / "two") == ["a0", "a1", "a2", "a3"]
    assert texts(tmp_path / "two", hf_split="test") == ["b0", "b1", "b2", "b3"]
    assert texts(tmp_path / "two", hf_split="train[:50%]+test[-1:]") == ["a0", "a1", "b3"]
    (arrow,) = (tmp_path / "one").glob("*.arrow")
    assert texts(arrow) == ["a0", "a1", "a2", "a3"]
    with pytest.raises(ConfigError, match=r'hf_split=dev could not be loaded: Unknown split "dev"'):
        texts(tmp_path / "one", hf_split="dev")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.json": b'{"text": "a"}\n{"text": 1'}, "could not be loaded: JSON parse error: .* in row 1"),
        ({"a.jsonl": b'{"text": "a"}\n', "b.jsonl": b'{"body": "a"}\n'}, "column names don't match"),
        ({"a.jsonl": b'{"text": "a"}\n', "b.csv": b"text\na\n"}, r"several formats, such as a\.jsonl and b\.csv, and"),
        ({"a.jsonl": b'{"text": "a"}\n{"text": 1}\n'}, "holds int in row 1. Use a column of text"),
        ({"a.jsonl": b'{"text": "a"}\n{"text": ["b"]}\n'}, "holds list in row 1"),
        ({"a.jsonl": b'{"text": "\xff"}\n'}, "cannot be read from row 0 on: .*byte 0xff"),
        ({"a.jsonl": b'{"text": "\\ud800"}\n'}, "surrogate pair in string is invalid"),
        ({"a.jsonl": b'{"text": 1}\n{"text": "\\ud800"}\n'}, "could not be loaded|holds int in row 0"),
        ({"a.jsonl": b'{"text": "a", "text": "b"}\n'}, "was specified twice"),
        ({"a.jsonl": b""}, "could not be loaded: it has no rows"),
        ({"a.parquet": b"PAR1 and no more PAR1"}, r"could not be loaded: .*a\.parquet"),
        ({"a.arrow": b"ARROW1"}, "could not be loaded"),
        ({"state.json": b"{}"}, "could not be loaded"),
        ({"a.bin": b"abc"}, "could not be loaded: No "),
        ({}, "could not be loaded: .*doesn't contain any data files"),
    ],
)
def test_damaged_datasets_are_one_line(tmp_path, capfd, files, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for path in [tmp_path, *(tmp_path / name for name in files if len(files) == 1 and name != "state.json")]:
        with pytest.raises(ConfigError, match=message if path == tmp_path else None) as error:
            texts(path)
        assert "\n" not in str(error.value)
    assert "Failed" not in capfd.readouterr().err


def test_a_name_that_cannot_be_a_dataset_is_not_looked_up(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.HfApi, "dataset_info", lambda *args, **kwargs: pytest.fail("looked up"))
    for name in ("rows/nope.jsonl", str(tmp_path / "nope"), "a/b/c"):
        with pytest.raises(ConfigError, match=r"does not exist\. Give a file, a folder, or the name of a dataset"):
            texts(name)


def test_without_a_connection_nothing_is_tried_again(monkeypatch):
    datasets, hub = pytest.importorskip("datasets"), pytest.importorskip("huggingface_hub")

    def fails(*args, **kwargs):
        raise ValueError("no connection")

    monkeypatch.setattr(hub.HfApi, "dataset_info", fails)
    before = datasets.config.HF_HUB_OFFLINE
    with pytest.raises(ConfigError, match=r"some/set is neither a file .* hub cannot be reached\. Check the name and"):
        texts("some/set")
    assert datasets.config.HF_HUB_OFFLINE == hub.constants.HF_HUB_OFFLINE == before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES), ("a.ndjson", "{}"), ("a.JSONL", LINES), ("a.jsonl.gz", "x"), ("a.parquet", "PAR1"),
        ("a.json", LINES), ("a.json", f"\ufeff[\n{LINES}]"), ("a.json", '{"messages": []}'), ("a.csv", "n,text\n1,a\n"),
        ("a.tsv", 'n\t"text"\n1\ta\n'),
    ],
)  # fmt: skip
def test_a_table_is_not_read_as_one_text(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    (tmp_path / "b.txt").write_text(content)
    source = DataConfig(source="path", path=str(tmp_path / name))
    with pytest.raises(
        ConfigError, match=r"is a table with a text in each row, .* Use --data\.source=hf with"
    ) as error:
        list(data.documents(source))
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"is a table"):
        list(data.documents(DataConfig(source="path", path=str(tmp_path))))
    skipped = []
    (one,) = data.documents(DataConfig(source="path", path=str(tmp_path), skip=True), skipped)
    assert (one.name, skipped) == ("b.txt", [name])  # the name decides, so that syntax can be a text, too


@pytest.mark.parametrize(
    ("name", "content"), [("a.json", '{"name": "a"}'), ("a.json", '[{"id": 1}]'), ("a.csv", "context,n\na,1\n")]
)
def test_other_files_of_a_source_tree_are_texts(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    (one,) = data.documents(DataConfig(source="path", path=str(tmp_path)))
    assert one.text == content
