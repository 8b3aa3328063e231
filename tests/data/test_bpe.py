"""Tests of `jaxstack data tokenizer`: a byte-level BPE for one's own text, which other programs read."""

import json
import os
import subprocess
import sys

import pytest

from jaxstack import data
from jaxstack.cli.parser import execute
from jaxstack.config import ConfigError
from jaxstack.data import bpe, chat, text_pieces
from jaxstack.data.tokens import read_header

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra [hf]")

TEXT = "the cat and the hat,\nthe bat and the rat\r\n\n  été 中文 🙂 12345\n" * 40


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(TEXT)
    (tmp_path / "texts" / "b.txt").write_text("yz xyz xyz xyz")
    return tmp_path


def test_merges_are_the_most_frequent_pairs():
    """Worked out by hand: y z is there four times; then x yz three times, and a space before x twice."""
    content = bpe.train_bpe(["xyz xyz", " xyz yz"], 256 + 2 + 3, ["<a>", "<b>"])
    assert content["model"]["merges"] == [["y", "z"], ["x", "yz"], ["Ġ", "xyz"]]
    vocabulary = content["model"]["vocab"]
    assert (vocabulary["<a>"], vocabulary["<b>"], vocabulary["Ġxyz"]) == (0, 1, 260)
    assert sorted(vocabulary.values()) == [*range(261)]


def test_the_same_text_gives_the_same_file_with_any_number_of_threads(folder):
    contents = set()
    for threads in ("1", "3"):
        out = folder / threads
        command = [sys.executable, "-m", "jaxstack", "data", "tokenizer", "--vocab_size=350", str(folder / "texts")]
        env = os.environ | {"RAYON_NUM_THREADS": threads}
        subprocess.run([*command, str(out)], env=env, check=True, capture_output=True)
        contents.add((out / "tokenizer.json").read_text())
    assert len(contents) == 1


def test_long_texts_give_the_same_tokenizer_in_pieces(monkeypatch):
    whole = bpe.train_bpe([TEXT], 290, ["<a>"])
    monkeypatch.setattr(text_pieces, "_PIECE", 7)
    assert len([*text_pieces.pieces(TEXT)]) > 60
    assert bpe.train_bpe([TEXT], 290, ["<a>"]) == whole


def test_it_encodes_all_text_and_other_programs_agree(folder, capsys):
    out = folder / "out"
    texts = [str(folder / "texts" / "a.txt"), str(folder / "texts")]
    special = "--special_tokens=['<end>', '<|user|>']"
    execute(["data", "tokenizer", "--vocab_size=290", special, *texts, str(out)])
    assert "290 tokens, " in capsys.readouterr().out
    mine = data.make_tokenizer(str(out / "tokenizer.json"), [])
    assert mine.vocab_size == 290
    assert mine.keeps_text
    assert (mine.eos_id, mine.before, mine.after) == (0, (), ())
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x10000), 0x1F642]))
    ids = mine.encode(every)
    assert mine.decode(ids) == every
    assert mine.num_bytes(ids) == len(every.encode())
    assert mine.encode("<|user|>hi<end>").tolist()[::3] == [1, 0]
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert theirs.eos_token_id == 0
    for text in (TEXT, every, "<|user|>hi<end>"):
        assert theirs.encode(text) == mine.encode(text).tolist()
        assert theirs.decode(theirs.encode(text)) == text


def test_a_chat_template_ends_turns_with_a_special_token(folder):
    out = folder / "out"
    words = ["--chat", "--vocab_size=300", "--special_tokens=['<|endoftext|>', '<|user|>']"]
    execute(["data", "tokenizer", *words, str(folder / "texts"), str(out)])
    name = str(out / "tokenizer.json")
    mine = data.make_tokenizer(name, [], chat.read_template(name))
    text = "<|endoftext|> <|user|> <|system|> <|assistant|> <|end|>"
    assert [i for i in mine.encode(text).tolist() if i < 5] == [0, 1, 2, 3, 4]  # named ones first, and none twice
    template = chat.template_for(mine)
    said = [
        ("system", "Be brief."),
        ("user", "the cat?"),
        ("assistant", "a hat"),
        ("user", "?"),
        ("assistant", "rat\n"),
    ]
    messages = [{"role": role, "content": content} for role, content in said]
    rendered, spans = template.render(messages)
    turns = "<|system|>Be brief.<|end|><|user|>the cat?<|end|><|assistant|>a hat<|end|>"
    assert rendered == f"{turns}<|user|>?<|end|><|assistant|>rat\n<|end|>"
    assert [rendered[start:end] for start, end in spans] == ["a hat<|end|>", "rat\n<|end|>"]
    assert template.prompt(messages[:2]) == "<|system|>Be brief.<|end|><|user|>the cat?<|end|><|assistant|>"
    assert chat.end_of_turn(template, mine) == chat.EndOfTurn((4,))
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert theirs.apply_chat_template(messages, tokenize=False) == rendered
    found = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    conversation = chat.RenderedConversation("x", rendered, spans)
    ((_, ids, mask),) = chat.encode_answers([conversation], mine)
    assert (found["input_ids"], found["assistant_masks"]) == (ids.tolist(), mask.astype(int).tolist())


def test_the_figure_is_that_of_the_token_file(folder, capsys):
    out = str(folder / "out")
    execute(["data", "tokenizer", "--vocab_size=300", str(folder / "texts"), out])
    printed = capsys.readouterr().out
    tokens = str(folder / "tokens.bin")
    source = ["--data.source=path", f"--data.path={folder / 'texts'}"]
    execute(["data", "build", *source, f"--data.tokenizer={out}/tokenizer.json", tokens])
    header = read_header(tokens)
    text_tokens = header.count - header.documents  # without the end of each document
    assert f" {header.bytes / text_tokens:.2f} bytes per token of the first {header.bytes:,} bytes" in printed
    assert f"--data.tokenizer={out}/tokenizer.json" in printed


def test_a_short_text_gives_fewer_tokens_and_says_so(folder, capsys):
    execute(["data", "tokenizer", str(folder / "texts" / "b.txt"), str(folder / "out")])
    assert "fewer tokens than --vocab_size=8192" in capsys.readouterr().out
    assert len(json.loads((folder / "out" / "tokenizer.json").read_text())["model"]["vocab"]) < 300


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"OUT is missing"),
        (["out"], r"no text is named"),
        (["none", "out"], r"^none does not exist"),
        (["--special_tokens=", "texts", "out"], r"special_tokens has no value. Use a list of texts"),
        (["--vocab_size=256", "texts", "out"], r"--vocab_size=256 is less than 256 bytes and 1 special.* 257 or more"),
        (["--special_tokens=[]", "texts", "out"], r"--special_tokens=\[\] is empty"),
        (["--special_tokens=[a, a]", "texts", "out"], r"names an empty token or one twice"),
        (["--data.source=stdlib", "texts", "out"], r"stdlib reads no files, but texts is named"),
        (["--data.source=chat", "texts", "out"], r"data.source=chat is not valid. Use one of path, stdlib, hf"),
        (["--data.glob=*.md", "texts", "out"], r"data.glob=\*.md matches none"),
        (["texts", "texts"], r"texts exists and is never overwritten"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(words, message, folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=message):
        execute(["data", "tokenizer", *words])
    assert sorted(path.name for path in folder.iterdir()) == ["texts"]
    assert len([*(folder / "texts").iterdir()]) == 2


def test_without_the_library_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"Run pip install 'jaxstack\[hf\]'"):
        execute(["data", "tokenizer", str(folder / "texts"), str(folder / "out")])
