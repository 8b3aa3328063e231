"""Pairs of completions: what a file says, what a row has of it, and what is held out."""

import json
import re

import numpy as np
import pytest

from jaxstack import data
from jaxstack.config import ConfigError, DataConfig
from jaxstack.data.chat import PlainTemplate
from jaxstack.data.preferences import PreferenceWindows, as_pairs, encode_preferences, read_preferences
from jaxstack.data.tokenizers import ByteTokenizer
from jaxstack.data.windows import batches, eval_batches

USER = {"role": "user", "content": "q"}
GOOD = {"role": "assistant", "content": "yes"}
BAD = {"role": "assistant", "content": "no"}


def write(path, *lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return str(path)


def load(tmp_path, *lines, **keys):
    path = write(tmp_path / "a.jsonl", *lines)
    return data.load(DataConfig(source="preferences", path=path, **{"seq_len": 80, "batch_size": 2} | keys))


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": "q", "chosen": "yes", "rejected": "no"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "q", "chosen": [USER, GOOD], "rejected": [USER, BAD], "score_chosen": 8.0},  # UltraFeedback
        {"chosen": [USER, GOOD], "rejected": [USER, BAD], "prompt": None},  # TRL's implicit prompt
        {"prompt": [USER], "chosen": "yes", "rejected": [BAD | {"name": None}]},
    ],
    ids=["text", "messages", "repeated prompt", "no prompt", "mixed"],
)
def test_every_shape_is_read_as_the_same_pair(tmp_path, value):
    path = write(tmp_path / "a.jsonl", value)
    (found,) = read_preferences(path)
    assert (found.prompt, found.chosen, found.rejected) == ([USER], "yes", "no")
    (listed,) = read_preferences(write(tmp_path / "b.json", json.dumps([value])))
    assert (listed.prompt, listed.chosen, listed.rejected) == ([USER], "yes", "no")


def test_a_system_message_and_earlier_answers_belong_to_the_prompt(tmp_path):
    earlier = [USER, {"role": "assistant", "content": "earlier"}, USER]
    line = {"system": "s", "prompt": earlier, "chosen": [*earlier, GOOD], "rejected": "no"}
    (found,) = read_preferences(write(tmp_path / "a.jsonl", line))
    assert found.prompt == [{"role": "system", "content": "s"}, *earlier]
    loaded = load(tmp_path, line, line | {"system": "t"}, seq_len=300)
    batch = batches(loaded.train, seq_len=300, batch_size=1, seed=0, packing=False)[0]
    learned = bytes(batch["targets"][batch["loss_weights"] > 0].tolist()).decode()
    assert learned == "yes\0no\0", "earlier answers are not learned"


BROKEN = [
    ("[]\n", "has no pairs of completions"),
    ("", "has no pairs of completions"),
    ("{\n", "line 1 is not JSON"),
    ("3\n", "line 1: 3 is not a JSON object"),
    ({"prompt": "q", "chosen": "a"}, "line 1: the keys are chosen, prompt. Write prompt, chosen and rejected"),
    ({"prompt": "q", "completion": "a"}, "the keys are completion, prompt. Write prompt, chosen and rejected"),
    ({"prompt": "q", "completion": "a", "label": 1}, "label=1 is neither true nor false"),
    ({"prompt": "q", "completion": 3, "label": True}, "completion=3 is neither text nor a list of messages"),
    ({"completion": "a", "label": True}, "the row has no prompt, and its completion is not a list"),
    ({"completion": [GOOD], "label": True}, "the prompt is empty"),
    ({"prompt": "q", "completion": [USER], "label": True}, "completion has nothing after the prompt"),
    ({"prompt": 3, "chosen": "a", "rejected": "b"}, "prompt=3 is neither text nor a list of messages"),
    ({"prompt": "q", "chosen": {"a": 1}, "rejected": "b"}, "chosen={'a': 1} is neither text nor a list of messages"),
    ({"prompt": "q", "chosen": "a", "rejected": None}, "rejected=None is neither text"),
    ({"prompt": "q", "chosen": "a", "rejected": " "}, "rejected: message 1 is an empty answer"),
    ({"prompt": "q", "chosen": [USER], "rejected": "b"}, "chosen has nothing after the prompt"),
    ({"prompt": "q", "chosen": [GOOD, USER, BAD], "rejected": "b"}, "chosen has assistant, user, assistant after"),
    ({"prompt": "q", "chosen": [{"role": "tool", "content": "a"}], "rejected": "b"}, "chosen: message 1 has the role"),
    ({"prompt": "q", "chosen": [{"role": [], "content": "a"}], "rejected": "b"}, "chosen: message 1 has the role"),
    ({"prompt": [GOOD], "chosen": "a", "rejected": "b"}, "the prompt ends with an answer"),
    ({"prompt": [], "chosen": "a", "rejected": "b"}, "the prompt is empty"),
    ({"chosen": "a", "rejected": "b"}, "the row has no prompt, and chosen or rejected is not a list"),
    ({"chosen": [USER, GOOD], "rejected": [BAD, BAD]}, "chosen and rejected differ before their last messages"),
    ({"chosen": [], "rejected": []}, "the prompt is empty"),
    ({"prompt": "q", "chosen": "a", "rejected": "b", "tools": [1]}, "tools is not supported"),
    ({"system": "s", "prompt": [{"role": "system", "content": "t"}, USER], "chosen": "a", "rejected": "b"},
     "beside system="),
    *(({"prompt": "q", "chosen": "a", "rejected": "b", "margin": wrong}, rf"margin={shown} is not a number of at most")
      for wrong, shown in (("1", "'1'"), (True, "True"), (1e7, "10000000.0"), ([1], r"\[1\]"))),
    ({"prompt": "\ud800", "chosen": "a", "rejected": "b"}, "prompt: message 1 contains half a character"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), BROKEN, ids=[message[:30] for _, message in BROKEN])
def test_a_line_that_is_no_pair_is_named(tmp_path, line, message):
    with pytest.raises(ConfigError, match=message) as error:
        [*read_preferences(write(tmp_path / "a.jsonl", line))]
    assert "a.jsonl" in str(error.value)
    assert "\n" not in str(error.value)


def sides(batch):
    """Returns each conversation of a batch as its text, its learned text, and whether it is the chosen one."""
    found = []
    for row in zip(*(batch[k] for k in ("tokens", "targets", "segment_ids", "loss_weights", "positions")), strict=True):
        tokens, targets, segments, weights, positions = row
        for segment in range(1, segments.max() + 1):
            here = segments == segment
            assert positions[here].tolist() == [*range(here.sum())]
            text = bytes([tokens[here][0], *targets[here].tolist()]).decode()
            assert text[:-1].encode() == bytes(tokens[here].tolist())
            learned = bytes(targets[here & (weights > 0)].tolist()).decode()
            found.append((text, learned, bool(segment % 2)))
    return found


@pytest.mark.parametrize("packing", [False, True])
def test_rows_have_both_conversations_of_each_pair(tmp_path, packing):
    lines = [{"prompt": f"{i}", "chosen": f"c{i}" * (i + 1), "rejected": f"r{i}"} for i in range(6)]
    found = load(tmp_path, *lines, seq_len=180)
    seen = {}
    rows = 0
    for tokens in (found.train, found.eval):
        read = eval_batches(tokens, seq_len=180, batch_size=1, steps=9, packing=packing)
        for batch in (read[i] for i in range(len(read))):
            rows += 1
            assert batch["pair_weights"].sum() == batch["segment_ids"].max() / 2
            assert (batch["segment_ids"][batch["pair_weights"] > 0] % 2 == 1).all()
            assert (batch["positions"][batch["pair_weights"] > 0] == 0).all()
            of_batch = sides(batch)
            for (chosen, yes, first), (rejected, no, second) in zip(of_batch[::2], of_batch[1::2], strict=True):
                assert (first, second) == (True, False)
                seen[chosen, rejected] = (yes, no)
    expected = {}
    for i, line in enumerate(lines):
        texts = [f"<|user|>\n{i}\n<|assistant|>\n{line[side]}\0\n" for side in ("chosen", "rejected")]
        expected[tuple(texts)] = tuple(f"{line[side]}\0" for side in ("chosen", "rejected"))
    assert seen == expected
    assert rows < 6 if packing else rows == 6


LABELLED = [
    {"prompt": "q", "completion": "yes", "label": True},
    {"prompt": [USER], "completion": [USER, GOOD], "label": True, "score": 3},
    {"completion": [USER, GOOD], "label": True},
]


@pytest.mark.parametrize("value", LABELLED, ids=["text", "repeated prompt", "no prompt"])
def test_every_shape_is_read_as_the_same_completion_with_its_label(tmp_path, value):
    (found,) = read_preferences(write(tmp_path / "a.jsonl", value))
    assert (found.prompt, found.completion, found.wanted) == ([USER], "yes", True)


def test_a_scored_conversation_ends_with_the_token_that_has_the_score(tmp_path):
    """The token that ends the turn is an input, and nothing of the template behind it."""
    lines = [{"prompt": f"{i}", "chosen": "yes", "rejected": "no"} for i in range(4)]
    path = write(tmp_path / "a.jsonl", *lines)
    found = data.load(DataConfig(source="preferences", path=path, seq_len=120, batch_size=2), reads="scores")
    batch = batches(found.train, seq_len=120, batch_size=1, seed=0, packing=False)[0]
    ends = np.flatnonzero(batch["loss_weights"][0])
    for segment, (end, answer) in enumerate(zip(ends, ("yes", "no"), strict=True), start=1):
        here = batch["segment_ids"][0] == segment
        assert np.flatnonzero(here)[-1] == end
        assert bytes(batch["tokens"][0][here].tolist()).decode().endswith(f"<|assistant|>\n{answer}\0")


def load_labels(tmp_path, *lines, **keys):
    path = write(tmp_path / "a.jsonl", *lines)
    source = DataConfig(source="preferences", path=path, **{"seq_len": 120, "batch_size": 2} | keys)
    return data.load(source, reads="labels")


@pytest.mark.parametrize("packing", [False, True])
def test_a_completion_with_a_label_is_beside_one_of_another_prompt(tmp_path, packing):
    """Also where two lines of a prompt are neighbours, as in a file that was made from pairs."""
    lines = [{"prompt": f"{i // 2}", "completion": f"c{i}", "label": i % 3 == 0} for i in range(12)]
    lines += [{"prompt": "pair", "chosen": "c12", "rejected": "c13"}]
    found = load_labels(tmp_path, *lines, seq_len=240, eval_fraction=0.3)
    assert re.search(r"\d+ completions with labels train, \d+ held out", found.sources[0].description)
    labels = {f"c{i}": i % 3 == 0 for i in range(12)} | {"c12": True, "c13": False}
    prompts = {f"c{i}": f"{i // 2}" for i in range(12)} | {"c12": "pair", "c13": "pair"}
    seen = []
    for tokens in (found.train, found.eval):
        own = []
        others = []
        read = eval_batches(tokens, seq_len=240, batch_size=1, steps=99, packing=packing)
        for batch in (read[i] for i in range(len(read))):
            first = batch["pair_weights"] > 0
            assert (batch["wanted_weights"] + batch["unwanted_weights"] == batch["pair_weights"]).all()
            both = sides(batch)
            for (text, yes, _), (other_text, other, _), wanted in zip(
                both[::2], both[1::2], batch["wanted_weights"][first], strict=True
            ):
                (asked,), (other_asked,) = (re.findall(r"user..\n(\w+)\n", one) for one in (text, other_text))
                assert asked == other_asked == prompts[yes[:-1]], "both are of the prompt"
                assert prompts[other[:-1]] != asked, "the other completion is of another prompt"
                assert labels[yes[:-1]] == wanted
                own.append(yes[:-1])
                others.append(other[:-1])
        assert sorted(own) == sorted(others), "each completion is once beside another prompt"
        seen += own
    assert sorted(seen) == sorted(labels)


def test_completions_with_labels_are_refused_where_they_do_not_suit(tmp_path):
    line = {"prompt": "q", "completion": "a", "label": True}
    with pytest.raises(ConfigError, match=r"line 1: a completion with a label is for preference\.loss=kto"):
        load(tmp_path, line)
    with pytest.raises(ConfigError, match=r"5 of . completions have the same prompt"):
        load_labels(tmp_path, *[line] * 5, line | {"prompt": "p"}, *(line | {"prompt": f"{i}"} for i in range(3)))
    others = [line | {"prompt": f"{i}"} for i in range(6)]
    with pytest.raises(ConfigError, match=r"none of 6 pairs fits into data\.seq_len"):
        load_labels(tmp_path, *others, seq_len=20, eval_fraction=0.4)


def test_pairs_of_a_prompt_are_held_out_together(tmp_path):
    lines = [{"prompt": f"{i % 10}", "chosen": f"c{i}", "rejected": f"r{i}"} for i in range(40)]
    found = load(tmp_path, *lines, eval_fraction=0.3)
    prompts = [{name.split()[-1] for name in tokens.names} for tokens in (found.train, found.eval)]
    of = [{(int(number) - 1) % 10 for number in each} for each in prompts]
    assert of[0] | of[1] == {*range(10)}
    assert not of[0] & of[1]
    with pytest.raises(ConfigError, match="there is only one prompt"):
        load(tmp_path, *(line | {"prompt": "q"} for line in lines))


def test_what_does_not_fit_or_does_not_differ_is_left_out_and_counted(tmp_path):
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    long = pair | {"rejected": "x" * 60}
    found = load(tmp_path, pair, pair | {"prompt": "p"}, long, pair | {"chosen": "b"})
    notes = r"1 left out, longer than data.seq_len=80 \(the longest needs \d+ positions\), 1 left out, with equal compl"
    assert re.search(notes, found.sources[0].description)
    sizes = [*found.train.targets, *found.eval.targets]
    assert len(sizes) == 2
    exact = int(max(sizes))
    load(tmp_path, pair, pair | {"prompt": "p"}, seq_len=exact)
    with pytest.raises(ConfigError, match=r"none of 2 pairs fits into data\.seq_len"):
        load(tmp_path, pair, pair | {"prompt": "p"}, seq_len=exact - 1)
    with pytest.raises(ConfigError, match="the completions of 1 pair are equal"):
        load(tmp_path, pair | {"chosen": "b"})


@pytest.mark.parametrize("packing", [False, True])
def test_a_batch_is_a_function_of_seed_and_step_and_an_epoch_has_each_pair_once(tmp_path, packing):
    lines = [{"prompt": f"{i}", "chosen": f"c{i}", "rejected": f"r{i}"} for i in range(20)]
    found = load(tmp_path, *lines, seq_len=200).train
    sizes = {"seq_len": 200, "batch_size": 2, "packing": packing}
    one, again, other = (batches(found, seed=seed, **sizes) for seed in (0, 0, 1))
    for i in (5, 0, 9):
        for name, array in one[i].items():
            np.testing.assert_array_equal(array, again[i][name])
    assert any((one[i]["tokens"] != other[i]["tokens"]).any() for i in range(3))
    rows = batches(found, seed=0, **sizes | {"batch_size": 1})
    count = 0
    texts = []
    while count < found.starts.size:
        batch = rows[len(texts)]
        texts.append([text for text, _, _ in sides(batch)])
        count += len(texts[-1]) // 2
    flat = [text for row in texts for text in row]
    assert len(flat) == len({*flat}) == 2 * found.starts.size


def test_each_pair_has_its_own_margin(tmp_path):
    """It is at the first position of the pair, for scores alone; rows without one have 0."""
    margins = [1.5, 0, None, -2, 3, 0.25]
    lines = [{"prompt": f"{i}", "chosen": f"c{i}", "rejected": f"r{i}", "margin": m} for i, m in enumerate(margins)]
    del lines[2]["margin"]
    path = write(tmp_path / "pairs.jsonl", *lines)
    pairs = as_pairs(read_preferences(path))
    assert [one.margin for one in pairs] == [1.5, 0, 0, -2, 3, 0.25]
    tokens, _, _ = encode_preferences(pairs, PlainTemplate(), ByteTokenizer(), 200, scores=True)
    some = tokens.documents(np.array([4, 0, 3]))
    for packing in (False, True):
        windows = PreferenceWindows.of(some, 200, packing)
        batch = windows.make_batch(np.arange(windows.first_W.size), 200, packing, 256)
        assert sorted(batch["margins"][batch["pair_weights"] > 0].tolist()) == [-2, 1.5, 3]
        assert not batch["margins"][batch["pair_weights"] == 0].any()
        for row, ids in zip(batch["margins"], batch["tokens"], strict=True):
            text = bytes(ids.tolist()).decode()
            first = int(text.split("\n")[1])
            assert row[0] == margins[first]
    plain, _, _ = encode_preferences(pairs, PlainTemplate(), ByteTokenizer(), 200)
    windows = PreferenceWindows.of(plain, 200, False)
    assert "margins" not in windows.make_batch(np.arange(2), 200, False, 256)
