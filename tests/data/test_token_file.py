"""Tests of token files: they are complete or absent, they are checked when read, and they have commands."""

import json
import mmap
import subprocess
import sys

import numpy as np
import pytest

from jaxstack import data
from jaxstack.cli.parser import execute
from jaxstack.config import ConfigError, DataConfig
from jaxstack.data.sources import Document
from jaxstack.data.tokenizers import ByteTokenizer, CharTokenizer
from jaxstack.data.tokens import read_header, verify_token_file

TEXTS = ["the cat", "sat", "on the mat, the cat did"]
DOCUMENTS = [Document(str(i), text) for i, text in enumerate(TEXTS)]


@pytest.fixture
def file(tmp_path):
    data.write_token_file(tmp_path / "t", DOCUMENTS, ByteTokenizer())
    return tmp_path / "t"


def change_header(file, **values):
    path = file.with_suffix(".json")
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("suffix", ["", ".bin", ".json"])
def test_round_trip(file, suffix):
    tokens, tokenizer = data.read_token_file(f"{file}{suffix}")
    want = data.encode(DOCUMENTS, ByteTokenizer())
    assert tokens.ids.dtype == np.uint16
    assert tokenizer.name == "bytes"
    assert tokens.vocab_size == 256
    np.testing.assert_array_equal(tokens.ids, want.ids)
    np.testing.assert_array_equal(tokens.starts, want.starts)
    np.testing.assert_array_equal(tokens.ends, want.ends)
    header = verify_token_file(file)
    assert (header.count, header.documents, header.bytes) == (len(want), 3, sum(map(len, TEXTS)))
    assert np.fromfile(f"{file}.bin", "<u2").tolist() == want.ids.tolist()


def test_is_memory_mapped_and_a_split_copies_nothing(file):
    tokens, _ = data.read_token_file(file)
    ((_, ids),) = tokens.ids.parts
    assert isinstance(getattr(ids.base, "obj", ids.base), mmap.mmap)
    assert not ids.flags.writeable
    for part in data.split(tokens, 0.5):
        assert part.ids is tokens.ids
    many = [Document(str(i), "x" * 9) for i in range(20)]
    data.write_token_file(f"{file}20", many, ByteTokenizer())
    tokens, _ = data.read_token_file(f"{file}20")
    train, held_out = data.split(tokens, 0.1)
    assert train.ids is tokens.ids is held_out.ids
    assert held_out.starts.size == 2


def test_large_vocabulary_takes_uint32(tmp_path):
    text = "".join(map(chr, range(0x10000, 0x10000 + 70_000)))
    header = data.write_token_file(tmp_path / "big", [Document("a", text)], CharTokenizer(text))
    tokens, tokenizer = data.read_token_file(tmp_path / "big")
    assert header.dtype == "uint32"
    assert tokens.ids[-1] == 69_999
    assert tokenizer.decode(tokens.ids) == text


def test_load_uses_the_tokenizer_of_the_file(tmp_path):
    path = str(tmp_path / "c")
    data.write_token_file(path, DOCUMENTS, CharTokenizer("".join(TEXTS)))
    got = data.load(DataConfig(source="tokens", path=path))
    assert got.tokenizer.name == "chars"
    assert got.tokenizer.decode(got.train.ids[:7]) == "the cat"
    assert got.description == f"{path}: 3 documents, 29 tokens train, 4 tokens held out"
    with pytest.raises(ConfigError, match=r"data\.tokenizer=gpt2\.json, but .* was made with chars. Build the file"):
        data.load(DataConfig(source="tokens", path=path, tokenizer="gpt2.json"))


@pytest.mark.parametrize("suffix", [".bin", ".json", ".starts.npy"])
def test_nothing_is_overwritten(tmp_path, suffix):
    existing = tmp_path / f"t{suffix}"
    existing.write_text("mine")
    with pytest.raises(ConfigError, match=r"exists and is never overwritten\. Remove it or choose another name"):
        data.write_token_file(tmp_path / "t", DOCUMENTS, ByteTokenizer())
    assert existing.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [existing]


def test_interrupted_write_leaves_nothing(tmp_path):
    def interrupted():
        yield DOCUMENTS[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        data.write_token_file(tmp_path / "t", interrupted(), ByteTokenizer())
    assert list(tmp_path.iterdir()) == []
    data.write_token_file(tmp_path / "t", DOCUMENTS, ByteTokenizer())
    data.read_token_file(tmp_path / "t")


def test_killed_between_renames_is_no_token_file(file):
    """The header is moved last. Without it, the other files are not read."""
    file.with_suffix(".json").unlink()
    with pytest.raises(ConfigError, match=r"/t is not a token file: .*/t\.json does not exist.*an interrupted build"):
        data.read_token_file(file)


@pytest.mark.parametrize("name", ["", "new/"])
def test_a_folder_is_not_the_name_of_a_token_file(name, tmp_path):
    with pytest.raises(ConfigError, match=r"is a folder\. Name a token file in it, such as .*tokens\.$"):
        data.write_token_file(f"{tmp_path}/{name}", DOCUMENTS, ByteTokenizer())


def test_folder_must_exist(tmp_path):
    with pytest.raises(ConfigError, match=r"is not a folder. Create it before building t\.bin there"):
        data.write_token_file(tmp_path / "no" / "t", DOCUMENTS, ByteTokenizer())


def test_truncated(file):
    path = file.with_suffix(".bin")
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(ConfigError, match=r"t\.bin is truncated.*expected 72 bytes \(36 tokens of 2\), found 66"):
        data.read_token_file(file)


def test_ids_past_the_vocabulary(file, monkeypatch):
    monkeypatch.setattr("jaxstack.data.tokens._CHUNK", 3)
    ids = np.fromfile(f"{file}.bin", "<u2")
    ids[5] = 256
    ids.tofile(f"{file}.bin")
    with pytest.raises(ConfigError, match=r"t\.bin holds id 256 at token 5, past the vocabulary of 256"):
        data.read_token_file(file)


def test_changed_after_it_was_built(file, monkeypatch):
    ids = np.fromfile(f"{file}.bin", "<u2")
    ids[5] ^= 1  # an id with a flipped bit is still valid, so only the hash reveals it
    ids.tofile(f"{file}.bin")
    for read in (data.read_token_file, verify_token_file):
        with pytest.raises(ConfigError, match=r"t\.bin has sha256 .* changed after it was built"):
            read(file)
    monkeypatch.setattr("jaxstack.data.tokens._FULL_CHECK_BYTES", 0)
    data.read_token_file(file)  # a large file is not completely read at every start


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"version": 9}, "has format version 9"),
        ({"dtype": [0] * 5000}, r"dtype \[0, 0, [0, ]{20,34}, but version 1"),
        ({"version": [0] * 5000}, r"version \[0, 0, [0, ]{20,34} and dtype"),
        ({"dtype": "float64"}, "dtype float64"),
        ({"count": -1}, r"declares count, documents, vocab_size = \(-1,"),
        ({"documents": 4}, "does not hold 4 ascending document starts"),
        ({"vocab_size": 400}, "declares vocab_size=400, but its tokenizer has 256"),
        ({"colour": "red"}, "is not a header of a token file"),
        ({"tokenizer": {}}, "is not of a known kind"),
    ],
)
def test_bad_headers(file, values, message):
    change_header(file, **values)
    with pytest.raises(ConfigError, match=message) as error:
        data.read_token_file(file)
    assert "\n" not in str(error.value)


def test_bad_starts(file):
    starts = f"{file}.starts.npy"
    for wrong in ([0, 20, 10], [0, 20, 40], [1, 2, 3], [0.0, 1.0, 2.0], 0):
        np.save(starts, np.array(wrong))
        with pytest.raises(ConfigError, match="does not hold 3 ascending document starts within 36 tokens"):
            data.read_token_file(file)
    file.with_suffix(".starts.npy").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"t\.starts\.npy cannot be read"):
        data.read_token_file(file)
    file.with_suffix(".starts.npy").unlink()
    with pytest.raises(ConfigError, match=r"t\.starts\.npy is missing"):
        data.read_token_file(file)


def test_header_that_is_not_json(file):
    file.with_suffix(".json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_header(file)


# --- command line -----------------------------------------------------------------------------------------------------


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for document in DOCUMENTS:
        (folder / document.name).write_text(document.text)
    return folder


@pytest.mark.parametrize("tokenizer", ["bytes", "chars"])
def test_build_verify_show(text, tmp_path, capsys, tokenizer):
    out = str(tmp_path / "out")
    execute(["data", "build", "--data.source=path", f"--data.path={text}", f"--data.tokenizer={tokenizer}", out])
    printed = capsys.readouterr().out
    assert f"jaxstack train --data.source=tokens --data.path={out}" in printed
    assert "3 documents" in printed
    assert "bytes per token" in printed
    execute(["data", "verify", out])
    assert "is intact: 3 documents" in capsys.readouterr().out
    execute(["data", "show", out])
    assert "begins: 'the cat" in capsys.readouterr().out
    want = data.load(DataConfig(source="path", path=str(text), tokenizer=tokenizer))
    got = data.load(DataConfig(source="tokens", path=out))
    np.testing.assert_array_equal(got.train.ids, want.train.ids)
    np.testing.assert_array_equal(got.eval.starts, want.eval.starts)


def test_mistakes_are_one_line_and_exit_code_2(text, tmp_path):
    def run(*words):
        return subprocess.run([sys.executable, "-m", "jaxstack", "data", *words], capture_output=True, text=True)

    missing = run("verify", str(tmp_path / "none"))
    assert missing.returncode == 2
    assert missing.stderr.startswith("jaxstack data verify: error: ")
    assert missing.stderr.count("\n") <= 2
    (text / "image").write_bytes(b"\0")
    binary = run("build", "--data.source=path", f"--data.path={text}", str(tmp_path / "out"))
    assert binary.returncode == 2
    assert "image is a binary file" in binary.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["text"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["build", "--data.source=path", "out"], r"data\.path is missing"),
        (["build", "--data.source=disk", "out"], "disk"),
        (["build", "--data.seq_len=4", "out"], r"data\.seq_len"),
        (["build", "--data.source=tokens", "--data.path=t", "out"], "is already a token file"),
        (["biuld", "out"], "biuld"),
        (["build"], "OUT is missing"),
    ],
)
def test_command_line_mistakes(words, message):
    with pytest.raises(ConfigError, match=message) as error:
        execute(["data", *words])
    assert "\n" not in str(error.value)
