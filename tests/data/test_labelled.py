"""Texts with labels: what a file says, on which token a label is, and what a batch has of it."""

import json

import numpy as np
import pytest

from jaxstack import data
from jaxstack.config import ConfigError, DataConfig
from jaxstack.data.labelled import Labels
from jaxstack.data.windows import batches, eval_batches

SIDES = Labels(("left", "right", "7"), "sequence")
WORDS = Labels(("noun", "verb"), "token")


def load(tmp_path, labels, *lines, **keys):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return data.load(DataConfig(source="labels", path=str(path), **{"seq_len": 8, "batch_size": 2} | keys), labels)


def test_a_text_has_its_label_on_its_first_token(tmp_path):
    lines = [{"text": 3 * text, "label": label} for text, label in zip("abc", ("right", "left", 7), strict=True)]
    found = load(tmp_path, SIDES, *lines)
    both = [(found.train, 2), (found.eval, 1)]
    got = {}
    for tokens, steps in both:
        batch = eval_batches(tokens, seq_len=8, batch_size=1, steps=steps, packing=False)
        for row in (batch[i] for i in range(len(batch))):
            got[chr(row["tokens"][0, 0])] = int(row["targets"][0, 0])
            assert row["tokens"][0, 3:].tolist() == [0] * 5
            assert row["segment_ids"][0].tolist() == [1] * 3 + [0] * 5
            assert row["loss_weights"][0].tolist() == [1] + [0] * 7
            assert row["targets"][0, 1:].tolist() == [0] * 7
    assert got == {"a": 1, "b": 0, "c": 2}
    assert "3 texts with 3 labels" in found.sources[0].description


def test_a_word_has_its_label_on_its_first_token_and_long_texts_are_cut(tmp_path):
    line = {"tokens": ["a\u00e9", "run", "b", "cut"], "labels": ["noun", None, "verb", "noun"]}
    found = load(tmp_path, WORDS, line, line)
    batch = batches(found.train, seq_len=8, batch_size=1, seed=0, packing=False)[0]
    assert bytes(batch["tokens"][0].tolist()).decode() == "a\u00e9 run "[:7]
    assert "2 cut to data.seq_len=8" in found.sources[0].description
    assert batch["loss_weights"][0].tolist() == [1] + [0] * 7
    assert "cut to" not in load(tmp_path, WORDS, line, line, seq_len=13).sources[0].description
    found = load(tmp_path, WORDS, line, line, seq_len=16)
    batch = batches(found.train, seq_len=16, batch_size=1, seed=0, packing=False)[0]
    assert np.flatnonzero(batch["loss_weights"][0]).tolist() == [0, 8, 10]  # é has two bytes
    assert batch["targets"][0, [0, 8, 10]].tolist() == [0, 1, 0]


def test_packed_texts_are_segments_with_positions_of_their_own(tmp_path):
    lines = [{"text": "x" * n, "label": "left"} for n in (3, 5, 4, 3, 2, 6, 2)]
    found = load(tmp_path, SIDES, *lines)
    rows = batches(found.train, seq_len=8, batch_size=1, seed=0, packing=True)
    first = [rows[i] for i in range(3)]
    for batch in first:
        segments, weights = batch["segment_ids"][0], batch["loss_weights"][0]
        starts = np.flatnonzero(np.diff(segments, prepend=0) > 0)
        assert np.flatnonzero(weights).tolist() == starts.tolist()
        assert batch["positions"][0, starts].tolist() == [0] * starts.size
        assert (batch["tokens"][0] == 0).tolist() == (segments == 0).tolist()
    assert max(batch["segment_ids"].max() for batch in first) > 1


def test_special_tokens_surround_a_text(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra [hf]")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[U]": 0, "[CLS]": 1, "[SEP]": 2, "go": 3, "by": 4}, "[U]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["[CLS]", "[SEP]"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    keys = {"tokenizer": str(tmp_path / "tokenizer.json"), "seq_len": 4}
    found = load(tmp_path, SIDES, *[{"text": "go by go", "label": "right"}] * 2, **keys)
    batch = batches(found.train, seq_len=4, batch_size=1, seed=0, packing=False)[0]
    assert batch["tokens"][0].tolist() == [1, 3, 4, 2]
    assert (batch["targets"][0, 0], batch["loss_weights"][0].tolist()) == (1, [1, 0, 0, 0])
    found = load(tmp_path, WORDS, *[{"words": ["go", "by"], "labels": ["verb", "noun"]}] * 2, **keys)
    batch = batches(found.train, seq_len=4, batch_size=1, seed=0, packing=False)[0]
    assert batch["loss_weights"][0].tolist() == [0, 1, 1, 0]
    assert batch["targets"][0].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("labels", "line", "message"),
    [
        (SIDES, {"text": "a", "label": "up"}, "the label 'up' is not in model.labels (left, right, 7)"),
        (SIDES, {"text": "a", "label": True}, "the label True is not in model.labels"),
        (SIDES, {"text": "a"}, "there is no label, but model.label_each=sequence reads text and label"),
        (SIDES, {"words": ["a"], "labels": ["left"]}, "there is no text, but model.label_each=sequence"),
        (SIDES, {"text": "", "label": "left"}, "text='' is empty"),
        (SIDES, [1], "this is not a JSON object"),
        (SIDES, "{\n", "is not JSON"),
        (WORDS, {"text": "a", "label": "noun"}, "there is no words, but model.label_each=token"),
        (WORDS, {"words": ["a", "b"], "labels": ["noun"]}, "2 words have 1 label"),
        (WORDS, {"words": ["a", ""], "labels": ["noun", "noun"]}, "words=['a', ''] are not a list of strings"),
        (WORDS, {"words": ["a"], "labels": [None]}, "no word of ['a'] has a label"),
        (WORDS, {"words": ["long" * 9, "b"], "labels": [None, "noun"]}, "data.seq_len=8 leaves nothing with a label"),
        (SIDES, "", "has no texts"),
    ],
)
def test_a_line_that_is_no_text_with_labels_is_named(labels, line, message, tmp_path):
    good = {"text": "a", "label": "left"} if labels is SIDES else {"words": ["a"], "labels": ["noun"]}
    with pytest.raises(ConfigError) as error:
        load(tmp_path, labels, *([good, line] if line != "" else [line]))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert line == "" or "a.jsonl, line 2" in str(error.value)
