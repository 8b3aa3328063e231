"""Files that other programs wrote: byte order marks, keys that occur twice, and arrays that are not bare ids."""

import json

import numpy as np
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


@pytest.mark.parametrize("vocab_size", [300, 50_257, 65_536, 128_000])
def test_ids_of_four_bytes_are_not_read_as_two(tmp_path, rng, vocab_size):
    rng.integers(0, vocab_size, 4000, dtype=np.uint32).tofile(tmp_path / "t.bin")
    source = {"source": "tokens", "format": "nanogpt", "path": str(tmp_path / "t.bin"), "tokenizer": "ids"}
    with pytest.raises(ConfigError, match="ids have 4 bytes"):
        data.load(DataConfig(**source, vocab_size=65_536))
    rng.integers(0, min(vocab_size, 65_536), 4000, dtype=np.uint16).tofile(tmp_path / "t.bin")
    assert len(data.load(DataConfig(**source, vocab_size=65_536)).train) == 3600


def test_an_array_of_numpy_is_not_bare_ids(tmp_path):
    np.save(tmp_path / "t.npy", np.arange(4000, dtype=np.uint16))
    source = DataConfig(
        source="tokens", format="nanogpt", path=str(tmp_path / "t.npy"), tokenizer="ids", vocab_size=65_536
    )
    with pytest.raises(ConfigError, match="an array of NumPy"):
        data.load(source)
