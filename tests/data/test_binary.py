"""Token files of nanoGPT, Megatron and llm.c, which the tests write by the formats' definitions."""

import gzip
import io
import json
import mmap
import os
import pathlib
import pickle
import resource
import struct
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from jaxstack import data
from jaxstack.config import ConfigError, DataConfig, SourceConfig
from jaxstack.data import binary, ngram
from jaxstack.data.file_ids import FileIds, Place
from jaxstack.data.sources import Document
from jaxstack.data.tokenizers import ByteTokenizer

IDS = {"source": "tokens", "tokenizer": "ids", "vocab_size": 300, "seq_len": 8}


def load(path, form, **keys):
    return data.load(DataConfig(**{**IDS, "path": str(path), "format": form, **keys}))


def write_megatron(prefix, documents, dtype="<u2", code=8, version=1, magic=b"MMIDIDX\0\0"):
    """Writes documents, each a list of sequences of ids."""
    sequences = [np.array(ids, dtype) for document in documents for ids in document]
    prefix.with_suffix(".bin").write_bytes(b"".join(ids.tobytes() for ids in sequences))
    lengths = np.array([ids.size for ids in sequences], "<i4")
    pointers = np.cumsum([0, *(ids.nbytes for ids in sequences)], dtype="<i8")[:-1]
    bounds = np.cumsum([0, *map(len, documents)], dtype="<i8")
    header = magic + struct.pack("<QBQQ", version, code, len(sequences), bounds.size)
    prefix.with_suffix(".idx").write_bytes(header + lengths.tobytes() + pointers.tobytes() + bounds.tobytes())
    return prefix


def write_llmc(path, ids, magic=20240520, version=1, dtype="<u2"):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids)
    path.write_bytes(header.tobytes() + np.array(ids, dtype).tobytes())
    return path


def llmc_bytes(**header):
    with tempfile.TemporaryDirectory() as folder:
        return write_llmc(pathlib.Path(folder, "a"), list(range(400)), **header).read_bytes()


def npy_bytes(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def is_mapped(tokens):
    bases = []
    for _, base in tokens.ids.parts:
        while isinstance(base, np.ndarray):
            base = base.base
        bases.append(getattr(base, "obj", base))
    return all(isinstance(base, mmap.mmap) for base in bases)


@pytest.mark.random
def test_a_folder_of_nanogpt(tmp_path, rng):
    parts = {name: rng.integers(0, 300, size).astype("<u2") for name, size in (("train", 500), ("val", 90))}
    for name, ids in parts.items():
        ids.tofile(tmp_path / f"{name}.bin")
    found = load(tmp_path, "nanogpt")
    np.testing.assert_array_equal(found.train.ids, parts["train"])
    np.testing.assert_array_equal(found.eval.ids, parts["val"])
    assert is_mapped(found.train)
    assert is_mapped(found.eval)
    assert found.description == f"{tmp_path}: 1 document, 500 tokens train, 90 tokens held out"
    alone = load(tmp_path / "train.bin", "nanogpt")
    assert (len(alone.train), len(alone.eval)) == (450, 50)
    batch = data.batches(found.train, seq_len=8, batch_size=4, seed=0, packing=False)[3]
    places = [parts["train"].tobytes().find(np.array(row, "<u2").tobytes()) for row in batch["tokens"]]
    assert all(place >= 0 for place in places)
    assert found.fingerprint != alone.fingerprint


def test_the_characters_of_nanogpt(tmp_path):
    text = "to be or not to be " * 20
    alphabet = sorted(set(text))
    ids = np.array([alphabet.index(c) for c in text], "<u2")
    ids[:300].tofile(tmp_path / "train.bin")
    ids[300:].tofile(tmp_path / "val.bin")
    meta = {"vocab_size": len(alphabet), "itos": dict(enumerate(alphabet)), "stoi": {}}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    found = load(tmp_path, "nanogpt", tokenizer="bytes", vocab_size=None)
    assert found.tokenizer.decode(found.train.ids) == text[:300]
    assert found.tokenizer.name == "chars"
    assert ngram.obstacle([found.train], found.tokenizer) is None

    class Program:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    for broken in (pickle.dumps(Program()), pickle.dumps({"itos": {0: "b", 1: "a"}}), pickle.dumps({"itos": 3}), b"x"):
        (tmp_path / "meta.pkl").write_bytes(broken)
        with pytest.raises(ConfigError, match=r"meta\.pkl (is not the list|has its characters in another order)") as e:
            load(tmp_path, "nanogpt", tokenizer="bytes", vocab_size=None)
        assert "\n" not in str(e.value)
    assert not (tmp_path / "made").exists(), "the file ran a program"


@pytest.mark.random
@pytest.mark.parametrize(("dtype", "code"), [("<u1", 1), ("<i4", 4), ("<i8", 5), ("<u2", 8), ("<i2", 3)])
def test_a_pair_of_megatron(tmp_path, rng, dtype, code):
    """A document is one sequence or several; documents are held out, and packing separates them."""
    high = 200 if dtype == "<u1" else 300
    documents = [
        [rng.integers(0, high, n).tolist() for n in rng.integers(1, 30, rng.integers(1, 4))] for _ in range(40)
    ]
    prefix = write_megatron(tmp_path / "x_text_document", documents, dtype, code)
    flat = [[i for ids in document for i in ids] for document in documents]
    for path in (prefix, prefix.with_suffix(".bin"), prefix.with_suffix(".idx")):
        found = load(path, "megatron", packing=True)
    read = [t.ids[a:b].tolist() for t in (found.train, found.eval) for a, b in zip(t.starts, t.ends, strict=True)]
    assert sorted(read) == sorted(flat)
    assert is_mapped(found.train)
    assert found.description.startswith(f"{prefix}.idx: 40 documents, ")
    batch = data.batches(found.train, seq_len=8, batch_size=40, seed=0, packing=True)[0]
    assert batch["segment_ids"].max() > 1


@pytest.mark.random
@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, "<u2"), (20240801, 7, "<u4")])
def test_a_file_of_llmc(tmp_path, rng, magic, version, dtype):
    ids = rng.integers(0, 300, 400)
    path = write_llmc(tmp_path / "a.bin", ids, magic, version, dtype)
    found = load(path, "llmc")
    np.testing.assert_array_equal(found.train.ids, ids)
    assert is_mapped(found.train)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ConfigError, match=r"declares 400 tokens, so it should have [\d,]+ bytes, but it has"):
        load(path, "llmc")


def test_a_format_that_is_not_the_files(tmp_path):
    """Every wrong guess is one line that says what the file is, or why it cannot be that."""
    few = list(range(50))
    (tmp_path / "raw.bin").write_bytes(np.array(few, "<u2").tobytes())
    np.save(tmp_path / "a.npy", few)
    (tmp_path / "odd.bin").write_bytes(b"abc")
    llmc = write_llmc(tmp_path / "llmc.bin", few)
    megatron = write_megatron(tmp_path / "mega", [[few]])
    own = tmp_path / "own"
    data.write_token_file(own, [Document("a", "text" * 9)], ByteTokenizer())
    (tmp_path / "folder").mkdir()
    for path, form, message in (
        (llmc, "jaxstack", r"llmc\.bin has the format llmc\. Use --data\.format=llmc"),
        (f"{megatron}.bin", "nanogpt", r"has the format megatron"),
        (megatron, "jaxstack", r"has the format megatron"),
        (f"{own}.bin", "nanogpt", r"has the format jaxstack"),
        (own, "megatron", r"has the format jaxstack"),
        (llmc, "megatron", r"has the format llmc"),
        (tmp_path / "raw.bin", "jaxstack", r"To train on ids of another program, set data\.format"),
        (tmp_path / "raw.bin", "llmc", r"begins with 65536 and 196610, but a file of data\.format=llmc begins with"),
        (tmp_path / "raw.bin", "megatron", r"raw\.idx does not exist"),
        (tmp_path / "a.npy", "jaxstack", r"a\.npy has the format nanogpt"),
        (tmp_path / "odd.bin", "nanogpt", r"odd\.bin has 3 bytes, so it does not contain ids of 2 bytes"),
        (
            tmp_path / "folder",
            "nanogpt",
            r"folder has no file of training ids, such as train\.bin or train_000001\.bin",
        ),
        (tmp_path / "folder", "megatron", r"folder has no file of training ids, such as train\.idx"),
    ):
        tokenizer = {"tokenizer": "bytes", "vocab_size": None} if form == "jaxstack" else {}
        with pytest.raises(ConfigError, match=message) as error:
            load(path, form, **tokenizer)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"magic": b"MMIDIDY\0\0"}, r"does not begin with MMIDIDX, so it is not an index of Megatron"),
        ({"version": 2}, r"has version 2 and type 8\. Version 1"),
        ({"code": 6, "dtype": "<f8"}, r"has version 1 and type 6"),
        ({"code": 4}, r"\.idx has no tokens, or its sequences are not stored one after another"),
    ],
)
def test_an_index_that_is_wrong(tmp_path, change, message):
    write_megatron(tmp_path / "m", [[[1, 2, 3]], [[4, 5], [6] * 20]], **change)
    with pytest.raises(ConfigError, match=message) as error:
        load(tmp_path / "m", "megatron")
    assert "\n" not in str(error.value)


def test_files_that_do_not_belong_together(tmp_path):
    prefix = write_megatron(tmp_path / "m", [[[1, 2, 3]], [[4, 5], [6] * 20]])
    index, ids = prefix.with_suffix(".idx").read_bytes(), prefix.with_suffix(".bin").read_bytes()
    prefix.with_suffix(".bin").write_bytes(ids[:-2])
    with pytest.raises(ConfigError, match=r"m\.bin has 48 bytes, but m\.idx requires 50 \(25 ids of 2 bytes\)"):
        load(prefix, "megatron")
    prefix.with_suffix(".idx").write_bytes(index[:-4])
    with pytest.raises(ConfigError, match=r"declares 3 sequences and 3 bounds .* should have 94 bytes, but it has 90"):
        load(prefix, "megatron")
    prefix.with_suffix(".idx").write_bytes(index[:-8] + struct.pack("<q", 2))
    with pytest.raises(ConfigError, match=r"does not have ascending bounds of documents from 0 to 3"):
        load(prefix, "megatron")
    prefix.with_suffix(".idx").write_bytes(index[:20])
    with pytest.raises(ConfigError, match=r"does not begin with MMIDIDX"):
        load(prefix, "megatron")


def test_what_the_ids_mean_must_be_said(tmp_path, monkeypatch):
    path = tmp_path / "train.bin"
    np.arange(400, dtype="<u2").tofile(path)
    with pytest.raises(
        ConfigError, match=r"does not contain its tokenizer\. Set data\.tokenizer to its tokenizer\.json; or"
    ):
        load(path, "nanogpt", tokenizer="bytes", vocab_size=None)
    with pytest.raises(
        ConfigError, match=r"has the id 300 at token 300, past the vocabulary of 300 of data\.tokenizer=ids"
    ):
        load(path, "nanogpt")
    with pytest.raises(ConfigError, match=r"has the id 399 at token 399, past the vocabulary of 399"):
        load(path, "nanogpt", vocab_size=399)
    with pytest.raises(ConfigError, match=r"data\.packing=true needs the starts of documents"):
        load(path, "nanogpt", vocab_size=400, packing=True)
    # Of a large file, evenly spaced parts are checked, and the rest when it is read.
    monkeypatch.setattr(binary, "_FULL_CHECK_BYTES", 100)
    monkeypatch.setattr(binary, "_CHUNK", 128)
    ids = np.arange(400, dtype="<u2") % 300
    ids[381] = 350
    ids.tofile(path)
    found = load(path, "nanogpt")
    with pytest.raises(ConfigError, match=r"holds id 350, past the vocabulary of 300"):
        data.eval_batches(found.eval, seq_len=8, batch_size=9, steps=1, packing=False)[0]
    ids[0] = 7
    ids.tofile(path)
    assert load(path, "nanogpt").fingerprint != found.fingerprint


def test_ids_without_a_tokenizer_are_shown_as_numbers():
    tokenizer = data.tokenizer_from_json(json.loads('{"kind": "ids", "vocab_size": 300}'))
    assert tokenizer.decode([17, 4, 250]) == "17 4 250"
    ids, starts, ends = tokenizer.encode_with_offsets(" 17 4  250")
    assert (ids.tolist(), starts.tolist(), ends.tolist()) == ([17, 4, 250], [1, 4, 7], [3, 5, 10])
    assert ids.dtype == np.uint16
    assert not tokenizer.keeps_text
    for wrong in ("300", "-1", "the cat"):
        with pytest.raises(ConfigError, match=r"is not an id below 300\. The tokenizer of this data is not known"):
            tokenizer.encode(wrong)


def test_formats_in_a_mixture(tmp_path):
    np.arange(300, dtype="<u2").tofile(tmp_path / "a.bin")
    write_megatron(tmp_path / "b", [[list(range(100))] for _ in range(20)])
    sources = (SourceConfig("tokens", str(tmp_path / "a.bin"), 1, format="nanogpt"),
               SourceConfig("tokens", str(tmp_path / "b"), 2, format="megatron"))  # fmt: skip
    found = data.load(DataConfig(mixture=sources, tokenizer="ids", vocab_size=300, seq_len=8))
    assert [one.train.starts.size for one in found.sources] == [1, 18]
    assert found.tokenizer.vocab_size == 300
    reader = data.MixtureReader([one.train for one in found.sources], ["a", "b"], found.weights,
                                {"seq_len": 8, "batch_size": 6, "packing": False}, 0)  # fmt: skip
    assert (reader.batches()[3]["tokens"].max(axis=1) >= 100).sum() <= 2


# --- what the file says -----------------------------------------------------------------------------------------------


@pytest.mark.random
@pytest.mark.parametrize("vocab_size", [65, 300, 50_257, 65_536, 128_000, 262_144, 1_000_000])
@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<u8"])
def test_the_width_of_ids_without_a_header(tmp_path, rng, vocab_size, dtype):
    """Files of every width are read, or refused where a vocabulary does not fit the width."""
    path = tmp_path / "train.bin"
    ids = rng.integers(0, vocab_size, 4000).astype(dtype)
    ids.tofile(path)
    if dtype == "<u2" and vocab_size > 65_536:
        with pytest.raises(ConfigError, match=r"does not have ids of 4 bytes below .* Name the tokenizer of the file"):
            load(path, "nanogpt", vocab_size=vocab_size)
        return
    found = load(path, "nanogpt", vocab_size=vocab_size)
    np.testing.assert_array_equal(found.train.ids[: ids.size], ids)
    assert is_mapped(found.train)
    batch = data.batches(found.train, seq_len=8, batch_size=4, seed=0, packing=False)[3]
    places = [ids.tobytes().find(np.array(row, dtype).tobytes()) for row in batch["tokens"]]
    assert all(place >= 0 for place in places)


@pytest.mark.random
@pytest.mark.parametrize("ids", [[0] * 40, [0, 1] * 20, [1] * 40, [3, 0, 7, 1] * 10, list(range(10)) * 4])
def test_texts_of_few_characters_have_ids_of_two_bytes(tmp_path, ids):
    np.array(ids, "<u2").tofile(tmp_path / "train.bin")
    assert load(tmp_path / "train.bin", "nanogpt", vocab_size=12).train.ids[:].tolist() == ids


def test_ids_of_four_bytes_past_the_vocabulary(tmp_path, rng):
    rng.integers(0, 128_000, 4000).astype("<u4").tofile(tmp_path / "train.bin")
    for vocab_size in (50_257, 65_536):
        with pytest.raises(ConfigError, match="ids have 4 bytes, and some are past the vocabulary"):
            load(tmp_path / "train.bin", "nanogpt", vocab_size=vocab_size)


@pytest.mark.random
@pytest.mark.parametrize("dtype", ["|u1", "<u2", "<i2", "<u4", "<i4", "<i8", ">u2", ">i4"])
def test_an_array_of_numpy(tmp_path, rng, dtype):
    ids = rng.integers(0, 256, 500).astype(dtype)
    np.save(tmp_path / "fineweb_train_000001.npy", ids)
    np.save(tmp_path / "fineweb_val_000000.npy", ids[:90])
    found = load(tmp_path, "nanogpt")
    np.testing.assert_array_equal(found.train.ids, ids)
    np.testing.assert_array_equal(found.eval.ids, ids[:90])
    assert is_mapped(found.train)
    batch = data.batches(found.train, seq_len=8, batch_size=4, seed=0, packing=False)[3]
    flat = ids.tolist()
    assert all(row.tolist() in [flat[i : i + 8] for i in range(493)] for row in batch["tokens"])


@pytest.mark.random
@pytest.mark.parametrize(
    ("magic", "version", "dtype"),
    [(20240520, 1, "<u2"), (20240801, 7, "<u4"), (20250401, 1, "<u2"), (278895051, 1, "<u4")],
)
def test_shards_with_a_header(tmp_path, rng, magic, version, dtype):
    """Those of modded-nanogpt and of its followers, who change the first number."""
    ids = rng.integers(0, 300, 400)
    for name in ("train", "val"):
        write_llmc(tmp_path / f"fineweb_{name}_000001.bin", ids, magic, version, dtype)
    found = load(tmp_path, "nanogpt")
    np.testing.assert_array_equal(found.train.ids, ids)
    np.testing.assert_array_equal(found.eval.ids, ids)
    np.testing.assert_array_equal(load(tmp_path / "fineweb_train_000001.bin", "nanogpt").train.ids, ids)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (llmc_bytes(magic=20240520, version=2), r"begins with 20240520 and 2, but a file of"),
        (llmc_bytes(magic=20240520)[:-2], r"declares 400 tokens, so it should have 1,824 bytes"),
        (llmc_bytes(magic=20250401)[:-2], r"begins with 20250401 and 1, but"),
        (npy_bytes(np.zeros((4, 8), "<u2")), r"an array of shape \(4, 8\) and type uint16, and not one row"),
        (npy_bytes(np.zeros(9, "<f4")), r"type float32, and not one row of integers"),
        (npy_bytes(np.zeros(0, "<u2")), r"an array of shape \(0,\)"),
        (npy_bytes(np.array(["a"])), r"type <U1"),
        (npy_bytes(np.arange(90))[:-8], r"is a damaged array of NumPy"),
        (npy_bytes(np.arange(90)) + bytes(8), r"should have 848 bytes by its header, but it has 856"),
        (npy_bytes(np.arange(-1, 90)), r"has the id 18,446,744,073,709,551,615 at token 0, past the vocabulary"),
        (b"\x93NUMPY\1\0\6\0{'a':" + bytes(40), r"is a damaged array of NumPy"),
        (gzip.compress(bytes(range(256)) * 9), r"is compressed with gzip, and not ids"),
        (b"PK\3\4" + bytes(range(256)), r"is an archive \(\.zip, \.npz or \.pt\)"),
        (pickle.dumps(list(range(256))), r"is a pickle"),
        (b"PAR1" + bytes(range(256)), r"is a Parquet file"),
        (struct.pack("<Q", 40) + b'{"a": {}}' + bytes(90), r"is a safetensors file"),
        (b"It was the best of times, it was the worst of times.\n", r"is text, and not ids"),
        ("Die Straße führt über 6 Brücken. ".encode() * 200, r"is text, and not ids"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            r"pointer of git-lfs, which `git lfs p",
        ),
        (b"", r"has 0 bytes"),
    ],
)
def test_files_that_are_not_ids_are_refused(tmp_path, content, message):
    path = tmp_path / "train.bin"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        load(path, "nanogpt", vocab_size=65_536)
    assert "\n" not in str(error.value)


# --- shards -----------------------------------------------------------------------------------------------------------


def write_shards(folder, rng, sizes, write):
    """Writes shards of both parts, and returns the ids of each part in the order of their numbers."""
    folder.mkdir(exist_ok=True)
    parts = {}
    for part, numbers in sizes.items():
        shards = [rng.integers(0, 300, size) for size in numbers.values()]
        for number, ids in zip(numbers, shards, strict=True):
            write(folder / f"fineweb_{part}_{number}", ids)
        parts[part] = np.concatenate(shards)
    return parts


WRITERS = {
    "modded-nanogpt": lambda path, ids: write_llmc(path.with_suffix(".bin"), ids),
    "build-nanogpt": lambda path, ids: np.save(path.with_suffix(".npy"), ids.astype(np.uint16)),
    "big-endian": lambda path, ids: np.save(path.with_suffix(".npy"), ids.astype(">i4")),
    "no header": lambda path, ids: path.with_suffix(".bin").write_bytes(ids.astype("<u4").tobytes()),
    "both widths of llm.c": lambda path, ids: write_llmc(
        path.with_suffix(".bin"), ids, *((20240801, 7, "<u4") if ids.size % 2 else (20240520, 1, "<u2"))
    ),
}


@pytest.mark.random
@pytest.mark.parametrize(
    ("writer", "form"),
    [*((writer, "nanogpt") for writer in WRITERS), ("modded-nanogpt", "llmc"), ("both widths of llm.c", "llmc")],
)
def test_shards_are_one_text(tmp_path, rng, writer, form):
    """Batches of shards are those of one file with all ids, from the first step and from a later one."""
    sizes = {"train": {"000001": 101, "000002": 64, "000010": 33, "000003": 200}, "val": {"000000": 40, "000001": 77}}
    ordered = {"train": dict(sorted(sizes["train"].items())), "val": sizes["val"]}
    parts = write_shards(tmp_path / "shards", rng, ordered, WRITERS[writer])
    found = load(tmp_path / "shards", form)
    assert is_mapped(found.train)
    assert is_mapped(found.eval)
    np.testing.assert_array_equal(found.train.ids, parts["train"])
    np.testing.assert_array_equal(found.eval.ids, parts["val"])
    assert found.description == f"{tmp_path / 'shards'}: 1 document, 398 tokens train, 117 tokens held out"

    (tmp_path / "one").mkdir()
    for part, ids in parts.items():
        ids.astype("<u4").tofile(tmp_path / "one" / f"{part}.bin")
    whole = load(tmp_path / "one", "nanogpt")
    order = {"seq_len": 8, "batch_size": 7, "seed": 5, "packing": False}
    one, several = (data.batches(each.train, **order) for each in (whole, found))
    for step in (0, 1, 6, 19, 40):
        for key, expected in one[step].items():
            np.testing.assert_array_equal(several[step][key], expected)
    flat = parts["train"].tolist() * 2
    assert all(row.tolist() in [flat[i : i + 8] for i in range(398)] for row in several[3]["tokens"])
    fixed = {"seq_len": 8, "batch_size": 50, "steps": 3, "packing": False}
    one, several = (data.eval_batches(each.eval, **fixed)[0] for each in (whole, found))
    np.testing.assert_array_equal(one["tokens"], several["tokens"])


def test_shards_are_in_the_order_of_their_numbers(tmp_path):
    """Numbers that are not padded, too; hidden files, such as those of a Mac, are no shards."""
    for number in range(12):
        np.full(40, number, "<u2").tofile(tmp_path / f"part-train-{number}-of-12.bin")
    (tmp_path / "._part-train-3-of-12.bin").write_bytes(b"Mac OS X")
    (tmp_path / "interval.bin").write_bytes(b"no shard")
    found = load(tmp_path, "nanogpt")
    ids = np.concatenate([np.asarray(found.train.ids)[a:b] for one in (found.train, found.eval)
                          for a, b in zip(one.starts, one.ends, strict=True)])  # fmt: skip
    np.testing.assert_array_equal(ids, np.repeat(np.arange(12), 40))
    assert (len(found.train), len(found.eval)) == (432, 48), "without a held-out file, the end is held out"


@pytest.mark.random
@pytest.mark.parametrize("names", [("corpus_0", "corpus_1", "corpus_10"), ("train_0", "train_1", "train_10")])
def test_pairs_of_megatron_in_a_folder(tmp_path, rng, names):
    """Documents of all files are documents of one text, in order; a pair named val is held out."""
    texts = {name: [[rng.integers(0, 300, n).tolist()] for n in rng.integers(1, 30, 15)] for name in (*names, "val_0")}
    for name in names:
        write_megatron(tmp_path / f"{name}_text_document", texts[name])
    if names[0] == "train_0":
        write_megatron(tmp_path / "val_0_text_document", texts["val_0"])
    found = load(tmp_path, "megatron", packing=True)
    read = {one: [one_text.ids[a:b].tolist() for a, b in zip(one_text.starts, one_text.ends, strict=True)]
            for one, one_text in (("train", found.train), ("eval", found.eval))}  # fmt: skip
    documents = [sequence for name in names for (sequence,) in texts[name]]
    if names[0] == "train_0":
        assert read["train"] == documents
        assert read["eval"] == [sequence for (sequence,) in texts["val_0"]]
    else:
        assert sorted(read["train"] + read["eval"]) == sorted(documents)
    batch = data.batches(found.train, seq_len=8, batch_size=40, seed=0, packing=True)[0]
    assert batch["segment_ids"].max() > 1


def test_folders_that_are_not_shards_of_one_text(tmp_path):
    ids = np.arange(40)
    several = r"which do not differ in their numbers alone\. Name one file, or make each text a source of data\.mixture"
    for number, (files, message) in enumerate(
        (
            ({"wiki_train_1.bin": ids, "books_train_1.bin": ids}, several),
            ({"train.bin": ids, "train_1.bin": ids}, several),
            ({"a_train_1.bin": ids, "a_train_1.npy": None}, several),
            ({"a_val_1.bin": ids, "a_val_2.bin": ids}, r"has no file of training ids"),
            ({"retrieval.bin": ids, "restraining.bin": ids}, r"has no file of training ids"),
            ({"train_1.bin": ids, "train_2.bin": ids + 270}, r"train_2\.bin has the id 300 at token 30, past the"),
            ({"train_1.bin": ids, "train_2.bin": ids[:0]}, r"train_2\.bin has 0 bytes"),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, content in files.items():
            if content is None:
                np.save(folder / name, ids)
            else:
                content.astype("<u2").tofile(folder / name)
        with pytest.raises(ConfigError, match=message) as error:
            load(folder, "nanogpt")
        assert "\n" not in str(error.value)
    write_megatron(tmp_path / "0" / "wiki_train_1", [[[1, 2, 3]]])
    (tmp_path / "0" / "books_train_1.bin").unlink()
    with pytest.raises(ConfigError, match=r"wiki_train_1\.bin has the format megatron"):
        load(tmp_path / "0", "nanogpt")
    (tmp_path / "w").mkdir()
    np.arange(80, dtype="<u4").tofile(tmp_path / "w" / "train_1.bin")
    np.arange(8, dtype="<u4").tofile(tmp_path / "w" / "train_2.bin")  # too few to tell their width
    with pytest.raises(ConfigError, match=r"differ in their bytes: 4 in train_1\.bin, 2 in train_2\.bin\. Write all"):
        load(tmp_path / "w", "nanogpt")


def test_shards_of_a_large_text(tmp_path, monkeypatch):
    """Evenly spaced parts of each shard are checked at the start, and every other id when it is read."""
    monkeypatch.setattr(binary, "_FULL_CHECK_BYTES", 1200)
    monkeypatch.setattr(binary, "_CHUNK", 128)
    monkeypatch.setattr(binary, "_PIECES", 8)
    shards = [np.arange(400, dtype="<u2") % 300 for _ in range(3)]
    read = []
    fromfile = np.fromfile
    monkeypatch.setattr(np, "fromfile", lambda *args, **keys: read.append(fromfile(*args, **keys)) or read[-1])

    def write():
        for number, ids in enumerate(shards):
            ids.tofile(tmp_path / f"train_{number}.bin")

    write()
    load(tmp_path, "nanogpt")
    assert [ids.tolist() for ids in read] == 3 * [ids[i : i + 16].tolist() for ids in shards[:1] for i in (0, 134, 268)]
    shards[1][20] = 350
    write()
    found = load(tmp_path, "nanogpt")
    with pytest.raises(ConfigError, match=r"holds id 350, past the vocabulary of 300"):
        data.batches(found.train, seq_len=8, batch_size=200, seed=0, packing=False)[0]
    shards[1][140] = 350
    write()
    with pytest.raises(ConfigError, match=r"train_1\.bin has the id 350 at token 140, past"):
        load(tmp_path, "nanogpt")


def test_a_shard_that_changes_during_the_run(tmp_path):
    for number in (1, 2):
        np.arange(100, dtype="<u2").tofile(tmp_path / f"train_{number}.bin")
    found = load(tmp_path, "nanogpt")
    read = data.batches(found.train, seq_len=8, batch_size=40, seed=0, packing=False)
    before = load(tmp_path, "nanogpt").fingerprint
    _ = read[0]
    np.arange(100, 200, dtype="<u2").tofile(tmp_path / "train_2.bin")
    with pytest.raises(ConfigError, match=r"train_2\.bin was changed during the run"):
        _ = read[1]
    assert load(tmp_path, "nanogpt").fingerprint != before
    (tmp_path / "train_2.bin").rename(tmp_path / "val_2.bin")
    assert load(tmp_path, "nanogpt").fingerprint != before


def test_more_shards_than_files_may_be_open(tmp_path):
    """A map keeps its file open, and 100 billion tokens of FineWeb are a thousand files."""
    for number in range(300):
        np.full(20, number, "<u2").tofile(tmp_path / f"train_{number}.bin")
    script = """
import resource, sys
import numpy as np
from jaxstack import data
from jaxstack.config import ConfigError, DataConfig
soft, hard = map(int, sys.argv[2:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
cfg = DataConfig(source="tokens", path=sys.argv[1], format="nanogpt", tokenizer="ids", vocab_size=300, seq_len=8)
try:
    found = data.load(cfg)
    print(np.asarray(found.train.ids).sum(), len(found.train) + len(found.eval))
except ConfigError as error:
    print(error)
"""
    hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 4096)
    out = [
        subprocess.run([sys.executable, "-c", script, tmp_path, *map(str, limits)], capture_output=True, text=True)
        for limits in ((100, hard), (100, 200))
    ]
    assert out[0].stdout.split() == [str(20 * sum(range(300))), "6000"], out[0].stderr
    assert "300 files of ids cannot be mapped into memory (Too many open files). Allow more" in out[1].stdout


@pytest.mark.random
def test_ids_of_files_are_read_as_an_array(tmp_path, rng):
    parts = [rng.integers(0, 300, size).astype(dtype) for size, dtype in ((7, "<u2"), (1, "<u4"), (12, ">u2"))]
    places = [Place(tmp_path / str(i), ids.dtype) for i, ids in enumerate(parts)]
    for place, ids in zip(places, parts, strict=True):
        place.file.write_bytes(ids.tobytes())
    ids = FileIds(places)
    flat = np.concatenate(parts)
    assert (ids.size, ids.shape, len(ids), ids.dtype) == (20, (20,), 20, np.uint32)
    for index in (0, 6, 7, 8, 19, -1, -20, slice(None), slice(5, 9), slice(8, 3), slice(-4, None), slice(1, 99, 3),
                  rng.integers(0, 20, (3, 4)), np.zeros((0, 2), int)):  # fmt: skip
        np.testing.assert_array_equal(ids[index], flat[index])
    assert [int(one) for one in ids] == flat.tolist()
    np.testing.assert_array_equal(np.asarray(ids, np.int64), flat)
    for index in (20, -21):
        with pytest.raises(IndexError):
            ids[index]
