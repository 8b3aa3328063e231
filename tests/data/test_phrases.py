"""Phrases of a list: where they are found, that they are hidden whole, and the shares of hidden tokens."""

import re

import numpy as np
import pytest

from jaxstack import data
from jaxstack.config import ConfigError
from jaxstack.config.reading.parse import parse_config
from jaxstack.data.loader import window_sizes
from jaxstack.data.masking import BranchWindows, Masking, Words, WordsAndPhrases
from jaxstack.data.phrases import Phrase, Phrases, read_phrases
from jaxstack.data.tokenizers import IdTokenizer

MASK, VOCAB = 300, 256
BYTES = data.make_tokenizer("bytes", ())


def listed(*texts):
    return [Phrase(f"list, line {i}", text) for i, text in enumerate(texts, start=1)]


def units(*texts, whole_words=False, tokenizer=BYTES, size=VOCAB + 1):
    words = None if tokenizer.name == "ids" else Words.of(tokenizer, size)
    return WordsAndPhrases(words, whole_words, Phrases.of(listed(*texts), tokenizer, 64, size))


def hidden_together(text, of, segments=None):
    """The parts of a text that `first_tokens` puts together, of more than one byte."""
    ids = np.frombuffer(text.encode(), np.uint8)[None].astype(np.int32)
    first = of.first_tokens(ids, None if segments is None else np.array([segments])).tolist()[0]
    assert all(first[i] in (i, first[i - 1]) for i in range(len(first)))  # a unit is one range
    spans = [[i for i, own in enumerate(first) if own == begin] for begin in sorted({*first})]
    return [text[span[0] : span[-1] + 1] for span in spans if len(span) > 1]


@pytest.mark.parametrize(
    ("text", "phrases", "alone", "beside_words"),
    [
        ("see New York.", ("New York",), ["New York"], ["see", "New York"]),
        ("New York", ("New York",), ["New York"], ["New York"]),  # a row may begin and end with a phrase
        ("a New Yorker", ("New York",), [], ["New", "Yorker"]),  # whole words only, at both ends
        ("xNew York", ("New York",), [], ["xNew", "York"]),
        ("os.path.join", ("os.path", "path.join"), ["path.join"], ["os", "path.join"]),  # the longest one
        ("ab cd ab", ("ab cd", "cd ab"), ["ab cd"], ["ab cd", "ab"]),  # equally long: the first one
        ("aa bb cc dd", ("aa bb", "bb cc dd"), ["bb cc dd"], ["aa", "bb cc dd"]),
        ("aa aa aa", ("aa aa",), ["aa aa"], ["aa aa", "aa"]),
        ("aa", ("aa bb", "b"), [], ["aa"]),
    ],
)
def test_phrases_are_whole_words_and_the_longest_counts(text, phrases, alone, beside_words):
    """Worked out by hand. Between phrases, bytes are hidden one at a time, or words."""
    assert hidden_together(text, units(*phrases)) == alone
    assert hidden_together(text, units(*phrases, whole_words=True)) == beside_words


def test_a_phrase_is_of_one_document():
    """With words of bytes, and with ids, whose words are not known."""
    of = units("ab cd")
    assert hidden_together("ab cd", of, [1, 1, 1, 1, 1]) == ["ab cd"]
    assert hidden_together("ab cd", of, [1, 1, 1, 2, 2]) == []
    numbers = units("7 8 9", "8 9", tokenizer=IdTokenizer(10), size=10)
    ids = np.array([[7, 8, 9, 1, 8, 9, 7, 8]])
    assert numbers.first_tokens(ids, None).tolist() == [[0, 0, 0, 3, 4, 4, 6, 7]]
    assert numbers.first_tokens(ids, np.array([[1, 2, 2, 2, 2, 3, 3, 3]])).tolist() == [[0, 1, 1, 3, 4, 5, 6, 7]]


def test_a_trie_finds_what_regular_expressions_find(rng):
    """Random phrases of a small alphabet in random text: each text has many of them, nested and overlapping."""
    letters = np.frombuffer(b"ab ", np.uint8)
    phrases = {bytes(letters[rng.integers(0, 3, rng.integers(1, 7))]).decode().strip() for _ in range(30)} - {""}
    of = units(*rng.permutation(sorted(phrases)).tolist())
    ids = letters[rng.integers(0, 3, (50, 40))].astype(np.int32)
    got = of.first_tokens(ids, None)
    for row, first in zip(ids, got, strict=True):
        text = bytes(row.astype(np.uint8)).decode()
        places = [
            (found.start(), len(phrase))
            for phrase in phrases
            for found in re.finditer(rf"(?<!\w)(?={re.escape(phrase)}(?!\w))", text)
        ]
        expected = np.arange(40)
        taken = np.zeros(40, bool)
        for start, size in sorted(places, key=lambda place: (-place[1], place[0])):
            if not taken[start : start + size].any():
                expected[start : start + size] = start
                taken[start : start + size] = True
        assert first.tolist() == expected.tolist(), text


def test_phrases_of_10000_windows(rng):
    """A phrase is hidden as a whole or not at all. The share of hidden tokens is within five standard deviations."""
    words = [np.frombuffer(each, np.uint8) for each in (b"New York ", b"of ", b"x, ")]
    windows = np.stack([np.concatenate([words[i] for i in row])[:32] for row in rng.integers(0, 3, (10_000, 16))])
    windows = windows.astype(np.int32)
    of = units("New York")
    seed = int(rng.integers(2**31))
    batch = Masking(0.15, MASK, VOCAB, of).apply({"tokens": windows}, np.arange(10_000), seed)
    chosen = batch["loss_weights"] == 1
    first = of.first_tokens(windows, None)
    assert (chosen == np.take_along_axis(chosen, first, 1)).all()
    size = (first[:, :, None] == first[:, None, :]).sum(2)
    assert (size[first != np.arange(32)] == 8).all()
    # The variance of the mean is that of units: a token of a unit of n tokens adds n times its own.
    assert abs(chosen.mean() - 0.15) < 5 * np.sqrt(0.15 * 0.85 * size.mean() / chosen.size)
    for n in (1, 8):
        assert abs(chosen[size == n].mean() - 0.15) < 5 * np.sqrt(0.15 * 0.85 * n / (size == n).sum()), n
    shown = batch["tokens"][chosen]
    assert abs((shown == MASK).mean() - 0.8) < 5 * np.sqrt(0.16 / shown.size)
    one = Masking(0.15, MASK, VOCAB, of).apply({"tokens": windows[7:8]}, np.array([7]), seed)
    assert all((one[name] == batch[name][7]).all() for name in one)


@pytest.mark.parametrize("kind", ["BPE", "WordPiece", "Unigram"])
def test_phrases_of_a_tokenizer_json(tmp_path, kind):
    """Wherever a phrase is in a text, its tokens are found: at the beginning, behind a space, a line or a bracket."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra [hf]")
    texts = ["New York is big", "see New York", "the New Yorker\nNew York"] * 4
    if kind == "BPE":
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=290, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
        )
    elif kind == "WordPiece":
        made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=60, special_tokens=["[UNK]"])
    else:
        made = tokenizers.Tokenizer(tokenizers.models.Unigram())
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        trainer = tokenizers.trainers.UnigramTrainer(vocab_size=60, special_tokens=["<unk>"], unk_token="<unk>")
    made.train_from_iterator(texts, trainer)
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    tokenizer = data.make_tokenizer(str(path), ())
    of = units("New York", tokenizer=tokenizer, size=tokenizer.vocab_size + 1)
    for text, is_found in (("New York is", 1), ("see New York", 1), ("is\nNew York", 1), ("New Yorker", 0)):
        ids, starts, ends = tokenizer.encode_with_offsets(text)
        first = of.first_tokens(ids[None].astype(np.int64), None)[0]
        begin = text.index("New")
        inside = (ends > begin) & (starts < begin + 8)
        assert (np.unique(first[inside]).size == 1) == is_found, (text, first)
        assert (first[~inside] == np.flatnonzero(~inside)).all()
    if kind != "BPE":  # BPE of bytes has a token for everything
        with pytest.raises(ConfigError, match=r"list, line 1: .* has no tokens for") as caught:
            units("\u4e2d", tokenizer=tokenizer, size=100)
        assert caught.value.advice.startswith("Remove the line")


def write(path, content):
    path.write_bytes(content)
    return str(path)


def test_a_list_has_a_phrase_on_each_line(tmp_path):
    path = write(tmp_path / "list.txt", b"\xef\xbb\xbfNew York\r\n\n  json.dumps \nold")
    expected = [(1, "New York"), (3, "json.dumps"), (4, "old")]
    assert [*read_phrases(path)] == [Phrase(f"{path}, line {number}", text) for number, text in expected]


@pytest.mark.parametrize(
    ("content", "message", "advice"),
    [
        (None, "data.mask_phrases=.*list.txt is not a file", "Give a text file"),
        (b" \n\n", "list.txt has no phrases", "Write one on each line"),
        (b"one\n\xff\n", r"list.txt, line 2: this is not UTF-8", "Save the list"),
        (b"one\n" + b"x" * 33, r"list.txt, line 2: 'x+' has 33 tokens, and a row data.seq_len=32", "Remove the line"),
    ],
)
def test_a_damaged_list_is_an_error_with_file_and_line(tmp_path, content, message, advice):
    path = str(tmp_path / "list.txt") if content is None else write(tmp_path / "list.txt", content)
    with pytest.raises(ConfigError, match=message) as caught:
        Phrases.of(read_phrases(path), BYTES, 32, VOCAB)
    assert caught.value.advice.startswith(advice)


def test_a_phrase_of_unknown_characters_is_an_error():
    with pytest.raises(ConfigError, match=r"list, line 2: character 'z'.* is not among"):
        Phrases.of(listed("ab", "az"), data.make_tokenizer("chars", ["abc"]), 32, 4)


def test_the_keys_of_a_run_make_the_masks(tmp_path):
    """For encoders and branches, alone and beside whole words."""
    path = write(tmp_path / "list.txt", b"New York\n")
    flags = ["--model.tied_embeddings=true", "--train.ngram_baseline=false", "--model.vocab_size=257"]
    flags += ["--data.mask_id=256", "--data.seq_len=32", f"--data.mask_phrases={path}"]
    for family, extra, words in (("encoder", [], False), ("branches", ["--data.mask_words=true"], True)):
        cfg = parse_config([*flags, f"--model.family={family}", *extra])
        masking = window_sizes(cfg.model, cfg.data, BYTES)["masking"]
        hidden = masking.masking if isinstance(masking, BranchWindows) else masking
        assert hidden.units.whole_words == words
        together = hidden_together("to New York it", hidden.units)
        assert together == (["to", "New York", "it"] if words else ["New York"])
    cfg = parse_config([*flags, "--model.family=encoder", "--data.mask_words=true", "--data.mask_phrases=null"])
    assert isinstance(window_sizes(cfg.model, cfg.data, BYTES)["masking"].units, Words)
