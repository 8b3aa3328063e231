"""Span corruption: counts and places of spans by their definition, and spans as a function of seed and sequence."""

import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from jaxstack import data
from jaxstack.config import ConfigError, DataConfig, DenoiserConfig
from jaxstack.data.seq2seq import Pair, make_batch, special_ids
from jaxstack.data.spans import SpanCorruption, draw_spans

T5 = DenoiserConfig()
UL2 = (
    DenoiserConfig(0.15, 3, "[R]"), DenoiserConfig(0.15, 8, "[R]"),
    DenoiserConfig(0.5, 3, "[X]"), DenoiserConfig(0.5, 8, "[X]"),
    DenoiserConfig(0.15, 64, "[X]"), DenoiserConfig(0.5, 64, "[X]"),
    DenoiserConfig(0.25, None, "[S]"),
)  # fmt: skip
BYTES = data.make_tokenizer("bytes", ())
B = 4


@pytest.fixture(scope="module")
def tokens():
    ids = np.random.default_rng(5).integers(1, 256, 20_000).astype(np.uint8)
    ends = np.arange(1, 21) * 1000
    return data.Tokens(ids, ends - 1000, ends, 256)


def corruption(*denoisers, seq_len, target_len=None, tokenizer=BYTES):
    return SpanCorruption.of(DataConfig(denoisers=denoisers, seq_len=seq_len, target_len=target_len), tokenizer)


def reader(tokens, spans, seed=3, batch_size=B, rows=None):
    sizes = {"seq_len": spans.text_len, "batch_size": batch_size, "packing": False, "masking": spans}
    return data.MixtureReader([tokens], ["text"], [(0, (1.0,))], sizes, seed).batches(rows)


def restore(inputs, targets, sentinels, eos):
    """The text of which inputs and targets were made, and the sizes of its spans. Checks all that is between them."""
    assert inputs[-1] == targets[-1] == eos
    number = {sentinel: k for k, sentinel in enumerate(sentinels)}
    spans = []
    for token in targets[:-1]:
        if token in number:
            assert number[token] == len(spans)
            spans.append([])
        else:
            spans[-1].append(token)
    text, seen = [], 0
    for token in inputs[:-1]:
        if token in number:
            assert number[token] == seen
            text += spans[seen]
            seen += 1
        else:
            text.append(token)
    assert seen == len(spans)
    return text, [len(span) for span in spans]


@pytest.mark.parametrize("length", [8, 20, 30, 100])
def test_spans_of_10000_windows(length, rng):
    """Share of hidden tokens, mean span and number of sentinels are exact; ends are hidden as often as they should be.

    In the original, texts of up to 30 tokens always lose their end, and never their beginning.
    """
    hidden, count = T5.counts(length)
    assert hidden == round(0.15 * length)
    assert count == max(1, round(hidden / 3))
    spans = corruption(T5, seq_len=512)
    found = np.zeros((10_000, length), bool)
    for mask in found:
        starts, sizes = draw_spans(rng, length, hidden, count)
        assert sizes.sum() == hidden
        assert sizes.min() >= 1
        assert (starts[1:] > (starts + sizes)[:-1]).all(), "spans do not touch"
        for start, size in zip(starts, sizes, strict=True):
            mask[start : start + size] = True
    assert (found.sum(1) == hidden).all()
    assert (np.diff(found, axis=1, prepend=False).sum(1) + found[:, -1] == 2 * count).all()
    # The first token is hidden if the first of `count` + 1 gaps is empty: C(N, count - 1) / C(N + 1, count) choices.
    share = count / (length - hidden + 1)
    for end in (found[:, 0], found[:, -1]):
        assert abs(end.mean() - share) < 5 * np.sqrt(share * (1 - share) / 10_000), (end.mean(), share)
    if length > 30:  # far from both ends a token is hidden with the same probability
        inside = found[:, 20:-20].mean(0)
        assert np.ptp(inside) < 10 * np.sqrt(0.15 * 0.85 / 10_000)
    for text in rng.integers(1, 256, (200, length)):
        pair = spans.corrupt(text, T5, rng)
        assert (pair.inputs.size, pair.targets.size) == T5.lengths(length)
        again, sizes = restore(pair.inputs.tolist(), pair.targets.tolist(), spans.ids.sentinels, spans.ids.eos)
        assert again == text.tolist()
        assert sum(sizes) == hidden
        assert len(sizes) == count


def test_all_choices_of_spans_have_the_same_probability(rng):
    """4 of 8 tokens in 2 spans: 3 ways to divide the spans, and C(5, 2) ways to place them."""
    counts = {}
    for _ in range(10_000):
        starts, sizes = draw_spans(rng, 8, 4, 2)
        key = (*starts.tolist(), *sizes.tolist())
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 30
    chi2 = sum((n - 10_000 / 30) ** 2 / (10_000 / 30) for n in counts.values())
    assert chi2 < 29 + 6 * np.sqrt(2 * 29)  # mean and standard deviation of its distribution are 29 and sqrt(58)


def test_lengths_are_those_of_t5_and_ul2():
    """512 inputs of 568 tokens, with 114 targets; with `target_len`, a denoiser takes less text where it must."""
    assert T5.text_length(512) == 568
    assert T5.lengths(568) == (512, 114)
    spans = corruption(T5, seq_len=512)
    assert (spans.text_len, spans.target_len, spans.ids.size) == (568, 114, 356)
    assert spans.ids.sentinels == tuple(range(355, 255, -1))
    half = DenoiserConfig(0.5, 3)
    assert [half.lengths(half.text_length(*rows)) for rows in ((512,), (512, 512))] == [(512, 513), (512, 512)]
    mixture = corruption(*UL2, seq_len=512, target_len=512)
    for each, length in zip(UL2, mixture.text_lengths, strict=True):
        inputs, targets = each.lengths(length)
        assert max(inputs, targets) in (511, 512), each
        assert each.counts(length)[0] == round(each.rate * length)
    assert mixture.ids.named == {"[R]": 256, "[X]": 257, "[S]": 258}
    assert mixture.ids.size == 259 + 127, "three modes, and a sentinel for each span of (3, 0.5)"


def test_shares_and_modes_of_a_mixture(tokens):
    """A row is of one denoiser: its mode comes first, and its share of the rows is its weight."""
    mixture = corruption(*UL2[:6], DenoiserConfig(0.25, None, "[S]", 3.0), seq_len=512, target_len=512)
    batch = reader(tokens, mixture, batch_size=3000)[0]
    shares = {"[R]": 2 / 9, "[X]": 4 / 9, "[S]": 3 / 9}
    for mode, share in shares.items():
        found = (batch["encoder_tokens"][:, 0] == mixture.ids.named[mode]).mean()
        assert abs(found - share) < 5 * np.sqrt(share * (1 - share) / 3000), mode
    prefix = np.flatnonzero(batch["encoder_tokens"][:, 0] == mixture.ids.named["[S]"])[0]
    used = batch["encoder_segment_ids"][prefix].sum()
    inputs = batch["encoder_tokens"][prefix, 1:used].tolist()
    targets = batch["targets"][prefix][batch["loss_weights"][prefix] == 1].tolist()
    text, sizes = restore(inputs, targets, mixture.ids.sentinels, mixture.ids.eos)
    assert sizes == [round(0.25 * len(text))]
    assert inputs[-2] == mixture.ids.sentinels[0], "the end is hidden"
    assert bytes(text) in tokens.ids.tobytes()
    # The others read 1007 tokens of a window at most, and a denoiser that takes fewer takes any part of them.
    window = np.arange(mixture.text_len)[None].repeat(100, 0)
    own = SpanCorruption(
        (UL2[0], UL2[5]), special_ids(data.tokenizers.IdTokenizer(2000), ["[R]", "[X]"], 100), 512, 512
    )
    read = own.apply({"tokens": window}, np.arange(100), 3)["encoder_tokens"]
    begins = read[read[:, 0] == own.ids.named["[R]"], 1]
    slack = np.ptp(own.text_lengths)
    assert begins.min() < 0.2 * slack
    assert 0.8 * slack < begins[begins < 2000].max() < slack + 20


def test_a_batch_has_the_arrays_of_an_encoder_decoder(tokens):
    spans = corruption(T5, seq_len=64, target_len=24)
    batch = reader(tokens, spans)[7]
    assert {name: (str(array.dtype), array.shape) for name, array in batch.items()} == {
        **{f"encoder_{name}": ("int32", (B, 64)) for name in ("tokens", "positions", "segment_ids")},
        **dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), ("int32", (B, 24))),
        "loss_weights": ("float32", (B, 24)),
    }
    used = T5.lengths(spans.text_len)[1]
    assert used == 14, "10 of 70 tokens, 3 sentinels and the end"
    assert (batch["tokens"][:, 0] == spans.ids.start).all()
    assert (batch["tokens"][:, 1:used] == batch["targets"][:, : used - 1]).all()
    for name in ("loss_weights", "segment_ids"):
        assert (batch[name] == (np.arange(24) < used)).all(), name
    assert (batch["positions"][:, :used] == np.arange(used)).all()
    assert (batch["encoder_positions"] == np.arange(64)).all()


def test_spans_are_a_function_of_seed_step_and_row(tokens):
    """Batches are equal however they are read: in any order, in parts of rows, and with other sizes."""
    spans = corruption(*UL2[:4], seq_len=128, target_len=128)
    whole = reader(tokens, spans)
    batch = whole[7]
    part = reader(tokens, spans, rows=np.array([1, 3]))
    part[2]
    assert all((part[7][name] == batch[name][[1, 3]]).all() for name in batch)
    double = reader(tokens, spans, batch_size=2 * B)[3]
    assert all((double[name][B:] == batch[name]).all() for name in batch)
    for other in (reader(tokens, spans, seed=4)[7], whole[8]):
        assert (other["encoder_tokens"] != batch["encoder_tokens"]).any()
    text = np.zeros((B, spans.text_len), np.int32)  # where all windows are equal, the spans are not
    same = spans.apply({"tokens": text}, np.arange(B), 3)["encoder_tokens"]
    assert len({row.tobytes() for row in same}) == B


def test_held_out_windows_always_have_the_same_spans(tokens):
    """Copies of the last window that fill up the last batch have weight 0."""
    spans = corruption(T5, seq_len=64)
    sizes = {"seq_len": spans.text_len, "batch_size": 200, "steps": 2, "packing": False, "masking": spans}
    first, again = data.eval_batches(tokens, **sizes), data.eval_batches(tokens, rows=np.array([5, 199]), **sizes)
    windows = (len(tokens) - 1) // spans.text_len
    assert len(first) == 2
    assert not first[1]["loss_weights"][windows - 200 :].any()
    assert first[1]["loss_weights"][: windows - 200].any(1).all()
    for i in range(2):
        assert all((again[i][name] == first[i][name][[5, 199]]).all() for name in again[i])


def test_the_example_of_the_page_is_what_the_code_makes():
    text = BYTES.encode("Thank you for inviting me to your party last week.")
    spans = corruption(T5, seq_len=64)
    pair = spans.corrupt(text, T5, np.random.default_rng(2))
    shown = {spans.ids.eos: "</s>"} | {sentinel: f"<{k}>" for k, sentinel in enumerate(spans.ids.sentinels)}
    inputs, targets = ("".join(shown.get(i) or chr(i) for i in side.tolist()) for side in pair[:2])
    assert inputs == "Thank you for inviting me t<0> party l<1>st wee<2>.</s>"
    assert targets == "<0>o your<1>a<2>k</s>"
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    assert f"inputs   {inputs}\ntargets  {targets}\n" in page
    mixture = next(text for text in re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S) if "denoisers" in text)
    shown = yaml.safe_load(mixture)["data"]
    assert tuple(DenoiserConfig(**each) for each in shown["denoisers"]) == UL2
    assert shown["seq_len"] == shown["target_len"] == 512


def test_pairs_of_a_row_are_apart():
    rows = [[Pair(np.array([5, 6]), np.array([7]), 2), Pair(np.array([8]), np.array([9, 1]), 3)], []]
    batch = make_batch(rows, 4, 5, 0, gates=True)
    assert {name: array[0].tolist() for name, array in batch.items()} == {
        "encoder_tokens": [5, 6, 8, 0], "encoder_positions": [0, 1, 0, 0], "encoder_segment_ids": [1, 1, 2, 0],
        "encoder_gate_ids": [2, 2, 3, 0], "tokens": [0, 0, 9, 0, 0], "targets": [7, 9, 1, 0, 0],
        "positions": [0, 0, 1, 0, 0], "segment_ids": [1, 2, 2, 0, 0], "gate_ids": [2, 3, 3, 0, 0],
        "loss_weights": [1, 1, 1, 0, 0],
    }  # fmt: skip
    assert not any(array[1].any() for array in batch.values())


def test_ids_that_a_tokenizer_lacks_are_behind_its_vocabulary(tmp_path):
    chars = special_ids(data.make_tokenizer("chars", ["abc"]), ["<2de>"], 3)
    assert (chars.eos, chars.start, chars.named, chars.size) == (3, 3, {"<2de>": 4}, 105)
    assert chars.sentinels == tuple(range(104, 4, -1))
    assert special_ids(BYTES, spans=101).sentinels[0] == 356
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra [hf]")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "</s>": 1, "a": 2, "[R]": 3}, unk_token="a"))
    made.add_special_tokens(["</s>", "<extra_id_2>", "<extra_id_1>", "<extra_id_0>"])
    made.save(str(tmp_path / "tokenizer.json"))
    own = data.make_tokenizer(str(tmp_path / "tokenizer.json"), ())
    ids = special_ids(own, ["[R]", "[S]"], 3)
    assert (ids.start, ids.eos, ids.named, ids.sentinels, ids.size) == (0, 1, {"[R]": 3, "[S]": 7}, (6, 5, 4), 8)
    with pytest.raises(ConfigError, match=r"hides up to 4 spans .* has 3 sentinels.* Lower"):
        corruption(T5, seq_len=75, tokenizer=own)


@pytest.mark.parametrize(("denoiser", "seq_len"), [(T5, 15), (DenoiserConfig(0.15, 64), 256)])
def test_spans_that_do_not_fit_the_row_are_an_error(denoiser, seq_len):
    with pytest.raises(ConfigError, match=rf"data\.denoisers: \{{.*\}} does not fit data\.seq_len={seq_len}: it hides"):
        denoiser.text_length(seq_len)


def test_a_text_shorter_than_a_window_is_an_error(tokens):
    """The message has the length that users set, and not that of the text behind it."""
    spans = corruption(T5, seq_len=64)
    short = tokens.clip(0, spans.text_len)
    sizes = {"seq_len": spans.text_len, "batch_size": 1, "packing": False, "masking": spans}
    for read, what in (
        (lambda: reader(short, spans), "to train on"),
        (lambda: data.eval_batches(short, steps=1, **sizes), "held out"),
    ):
        with pytest.raises(ConfigError, match=rf"data\.seq_len=64 with .* needs 71 tokens .* are 70 {what}\. Lower"):
            read()
    just = tokens.clip(0, spans.text_len + 1)
    assert reader(just, spans)[0]["tokens"].shape == (B, spans.target_len)
    assert len(data.eval_batches(just, steps=1, **sizes)) == 1
