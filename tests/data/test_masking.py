"""Masked language modelling: shares of the tokens, and masks that are a function of the seed and the sequence."""

import jax
import numpy as np
import pytest

from jaxstack import data
from jaxstack.config import ConfigError
from jaxstack.config.reading.parse import parse_config
from jaxstack.data.loader import HeldOut
from jaxstack.data.masking import Masking, Words
from jaxstack.data.tokenizers import IdTokenizer

MASK, VOCAB, S, B = 300, 256, 32, 4


@pytest.fixture(scope="module")
def tokens():
    ids = np.random.default_rng(5).integers(0, VOCAB, 20_000).astype(np.uint16)
    ends = np.arange(1, 21) * 1000
    return data.Tokens(ids, ends - 1000, ends, VOCAB)


def reader(tokens, masking=None, seed=3, batch_size=B, packing=False, rows=None):
    sizes = {"seq_len": S, "batch_size": batch_size, "packing": packing, "masking": masking}
    return data.MixtureReader([tokens], ["text"], [(0, (1.0,))], sizes, seed).batches(rows)


def test_shares_of_10000_windows(rng):
    """Each share is within five standard deviations of its expected value; the draws are fresh in every run."""
    windows = rng.integers(0, VOCAB, (10_000, S)).astype(np.int32)
    batch = Masking(0.15, MASK, VOCAB).apply({"tokens": windows}, np.arange(10_000), int(rng.integers(2**31)))
    chosen = batch["loss_weights"] == 1
    assert set(np.unique(batch["loss_weights"])) == {0, 1}
    assert (batch["tokens"][~chosen] == windows[~chosen]).all()
    assert (batch["targets"] == windows).all()
    masked = batch["tokens"][chosen] == MASK
    changed = ~masked & (batch["tokens"][chosen] != windows[chosen])
    random = 0.1 * (1 - 1 / VOCAB)  # one random token in 256 is the original
    for hits, share in ((chosen, 0.15), (masked, 0.8), (changed, random)):
        assert abs(hits.mean() - share) < 5 * np.sqrt(share * (1 - share) / hits.size), share
    # Every place of a window is chosen as often as the others, and random tokens are from the whole vocabulary.
    assert np.abs(chosen.mean(0) - 0.15).max() < 5 * np.sqrt(0.15 * 0.85 / 10_000)
    counts = np.bincount(batch["tokens"][chosen][changed], minlength=VOCAB)
    assert counts.size == VOCAB
    assert np.abs(counts - counts.mean()).max() < 6 * np.sqrt(counts.mean())


def test_whole_words_of_10000_windows(rng):
    """A word is hidden as a whole or not at all. Shares are within five standard deviations."""
    letters = np.frombuffer(b"abcde  ..", np.uint8)  # 5/9 of the bytes are letters: words have two on average
    windows = letters[rng.integers(0, letters.size, (10_000, S))].astype(np.int32)
    words = Words.of(data.make_tokenizer("bytes", ()), VOCAB + 1)
    seed = int(rng.integers(2**31))
    batch = Masking(0.15, MASK, VOCAB, words).apply({"tokens": windows}, np.arange(10_000), seed)
    chosen = batch["loss_weights"] == 1
    is_letter = windows >= ord("a")
    together = is_letter[:, 1:] & is_letter[:, :-1]
    assert (chosen[:, 1:] == chosen[:, :-1])[together].all()
    both = chosen[:, 1:] & chosen[:, :-1]
    apart = both[~together].mean()  # of tokens in different words the draws are independent
    assert abs(apart - 0.15**2) < 5 * np.sqrt(0.15**2 / (~together).sum())
    first = is_letter & ~np.pad(together, ((0, 0), (1, 0)))
    for of, share in ((chosen[first], 0.15), (chosen[~is_letter], 0.15), (batch["tokens"][chosen] == MASK, 0.8)):
        assert abs(of.mean() - share) < 5 * np.sqrt(share * (1 - share) / of.size), share
    lengths = 2 * 10_000 * S  # a word has the variance of its squared length, 2.25 letters and 6.9 on average
    assert abs(chosen.mean() - 0.15) < 5 * np.sqrt(0.15 * 0.85 * 6.9 / lengths)
    one = Masking(0.15, MASK, VOCAB, words).apply({"tokens": windows[7:8]}, np.array([7]), seed)
    assert all((one[name] == batch[name][7]).all() for name in one)


def test_words_are_tokens_in_a_row_that_continue_each_other(tmp_path):
    """Bytes of letters, digits and other alphabets; in BERT what begins with ##; never over the end of a document."""
    ids = np.frombuffer("a\u00e9 b1_c.".encode(), np.uint8)[None].astype(np.int32)
    words = Words.of(data.make_tokenizer("bytes", ()), 300)
    assert words.first_tokens(ids, None).tolist() == [[0, 0, 0, 3, 4, 4, 6, 7, 8]]
    assert words.first_tokens(ids, np.array([[1, 2, 2, 2, 2, 3, 3, 3, 3]])).tolist() == [[0, 1, 1, 3, 4, 5, 6, 7, 8]]
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra [hf]")
    vocab = {"[UNK]": 0, "play": 1, "##ing": 2, "##s": 3, "#": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    pieces = Words.of(data.make_tokenizer(str(tmp_path / "tokenizer.json"), ()), 5)
    assert pieces.first_tokens(np.array([[1, 2, 3, 4, 1, 3]]), None).tolist() == [[0, 0, 0, 3, 4, 4]]


def test_words_of_unknown_ids_are_an_error():
    with pytest.raises(ConfigError, match=r"data\.mask_words=true needs the text .* data\.tokenizer=ids"):
        Words.of(IdTokenizer(9), 9)


@pytest.mark.parametrize("packing", [False, True])
def test_a_mask_is_a_function_of_seed_step_and_row(tokens, packing):
    """Batches are equal however they are read: in any order, in parts of rows, and with other sizes."""
    masking = Masking(0.3, MASK, VOCAB)
    plain, masked = (reader(tokens, m, packing=packing) for m in (None, masking))
    batch = masked[7]
    assert (batch["targets"] == plain[7]["tokens"]).all()
    assert {k: (v.dtype, v.shape) for k, v in batch.items()} == {k: (v.dtype, v.shape) for k, v in plain[7].items()}
    part = reader(tokens, masking, packing=packing, rows=np.array([1, 3]))
    part[2]
    assert all((part[7][name] == batch[name][[1, 3]]).all() for name in batch)
    double = reader(tokens, masking, packing=packing, batch_size=2 * B)[3]
    assert all((double[name][B:] == batch[name]).all() for name in batch)
    other = reader(tokens, masking, seed=4, packing=packing)[7]
    assert (other["loss_weights"] != batch["loss_weights"]).any()
    assert (masked[8]["loss_weights"] != batch["loss_weights"]).any()
    assert (batch["loss_weights"][0] != batch["loss_weights"][1]).any()


def test_held_out_masks_are_always_the_same(tokens):
    """A window that fills up the last batch has weight 0, and the parts of a batch are those of the whole."""
    how = {"seq_len": S, "batch_size": 400, "steps": 2, "packing": False, "masking": Masking(0.15, MASK, VOCAB)}
    first, again = data.eval_batches(tokens, **how), data.eval_batches(tokens, rows=np.array([5, 399]), **how)
    windows = (len(tokens) - 1) // S
    assert len(first) == 2
    assert first[0]["loss_weights"].any(1).mean() > 0.9
    assert not first[1]["loss_weights"][windows - 400 :].any()
    for i in range(2):
        assert all((again[i][name] == first[i][name][[5, 399]]).all() for name in again[i])


def test_a_held_out_text_without_hidden_tokens_is_an_error(tokens):
    """The masks of held-out windows are fixed: at 1/64 the first window of 8 tokens has none, at 1/2 it has some."""
    one_window = data.Tokens(tokens.ids[:9], np.array([0]), np.array([9]), VOCAB)
    source = data.Source("short", tokens, one_window, "", "")
    flags = ["--model.family=encoder", "--model.tied_embeddings=true", "--train.ngram_baseline=false"]
    flags += ["--model.vocab_size=257", "--data.mask_id=256", "--data.seq_len=8", "--data.batch_size=128"]

    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def read(share):
        cfg = parse_config([*flags, f"--data.mask_share={share}"])
        return HeldOut(source, 1.0, None, cfg.model, cfg.data, cfg.train.eval_steps, where)

    with pytest.raises(ConfigError, match=r"data\.mask_share=0\.015625 hides none .* of short\. Raise"):
        read(1 / 64)
    assert read(0.5).batches[0]["loss_weights"].any()
