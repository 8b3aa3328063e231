"""Texts with triples: rows, what is hidden in them, and that batches are a function of the seed and the sequence."""

import json

import numpy as np
import pytest

from jaxstack import data
from jaxstack.config import ConfigError, resolve
from jaxstack.config.reading.parse import parse_config
from jaxstack.data.loader import make_reader, window_sizes
from jaxstack.data.masking import Masking
from jaxstack.data.triples import TextWithTriple, encode_triples, read_triples

BYTES = data.make_tokenizer("bytes", ())
MASK = 256
ENCODER = ["--model.family=encoder", "--model.tied_embeddings=true", "--train.ngram_baseline=false"]
BRANCHES = ["--model.family=branches", *ENCODER[1:], "--model.branches.rates=[2,1]"]


def facts(count):
    return [
        {"text": f"text {i} of {i * 7919}", "triple": [f"head{i}", "says" if i % 2 else "has", f"tail{i}"]}
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("triples") / "facts.jsonl"
    file.write_text("".join(f"{json.dumps(fact)}\n" for fact in facts(60)))
    return str(file)


def opened(path, *flags, family=ENCODER):
    """The configuration and data of a run over these triples."""
    cfg = parse_config(
        [*family, "--data.source=triples", f"--data.path={path}", "--data.seq_len=64", "--data.batch_size=4", *flags]
    )
    dataset = data.load_for(cfg.model, cfg.data)
    return resolve(cfg, dataset.vocab_size), dataset


def shown(ids):
    """A row as text, with # for each mask."""
    return "".join("#" if i == MASK else chr(i) for i in ids.tolist()).rstrip("\0")


def test_a_row_is_the_triple_and_its_text():
    """Bytes have the end of a line as separator; a text that is too long is cut, and its triple is not."""
    rows = [TextWithTriple("x", ("a b", "has", "c"), "d e"), TextWithTriple("y", ("q", "r", "s"), "0123456789ABCDEF")]
    tokens, note = encode_triples(rows, BYTES, 16)
    assert bytes(tokens.ids) == b"a b\nhas\nc\nd e\nq\nr\ns\n012345678\n"
    assert "".join(map(str, tokens.parts)) == "1110222030444010203044444444" + "40"
    assert tokens.starts.tolist() == [0, 14]
    assert tokens.ends.tolist() == [14, 30]
    assert note == "1 cut to data.seq_len=16"


def test_separators_are_what_a_tokenizer_json_puts_behind_a_text(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra [hf]")
    vocab = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "b": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    plain = tmp_path / "plain.json"
    made.save(str(plain))
    around = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    made.post_processor = around
    made.save(str(tmp_path / "tokenizer.json"))
    row = [TextWithTriple("x", ("a", "b", "a"), "b b")]
    tokens, _ = encode_triples(row, data.make_tokenizer(str(tmp_path / "tokenizer.json"), ()), 16)
    assert tokens.ids.tolist() == [1, 3, 2, 4, 2, 3, 2, 4, 4, 2]
    assert tokens.parts.tolist() == [0, 1, 0, 2, 0, 3, 0, 4, 4, 0]
    with pytest.raises(ConfigError, match=r"plain\.json puts no token behind a text"):
        encode_triples(row, data.make_tokenizer(str(plain), ()), 16)


@pytest.mark.parametrize("packing", ["false", "true"])
def test_one_part_of_each_text_is_hidden(path, packing):
    """The part is hidden whole and nothing else, or tokens of the text are. Each part is drawn equally often."""
    cfg, dataset = opened(path, f"--data.packing={packing}", "--data.mask_share=0.5")
    reader = make_reader(cfg.model, cfg.data, dataset, 3)
    drawn = {"relation": 0, "text": 0}
    lines = {f"{f['triple'][0]}\n{f['triple'][1]}\n{f['triple'][2]}\n{f['text']}\n": f for f in facts(60)}
    rows = 0
    for index in range(30):
        batch = reader.read(index)
        assert (batch["loss_weights"][batch["segment_ids"] == 0] == 0).all()
        for row in range(4):
            for segment in range(1, int(batch["segment_ids"][row].max()) + 1):
                here = batch["segment_ids"][row] == segment
                fact = lines[shown(batch["targets"][row][here])]
                head, relation, tail = fact["triple"]
                hidden = batch["loss_weights"][row][here] == 1
                first = len(head) + 1
                is_relation = (np.arange(here.sum()) >= first) & (np.arange(here.sum()) < first + len(relation))
                is_text = np.arange(here.sum()) >= len(f"{head} {relation} {tail} ")
                is_text[-1] = False  # the separator
                if hidden[is_relation].any():
                    drawn["relation"] += 1
                    assert (hidden == is_relation).all()
                    assert (batch["tokens"][row][here][hidden] == MASK).all()
                else:
                    drawn["text"] += 1
                    assert not hidden[~is_text].any()
                if packing == "true":
                    assert batch["positions"][row][here].tolist() == [*range(here.sum())]
            rows += 1
            assert packing == "true" or batch["segment_ids"][row].max() == 1
    total = sum(drawn.values())
    assert total > rows or packing == "false"
    assert abs(drawn["relation"] / total - 0.5) < 5 * np.sqrt(0.25 / total)


def test_the_keys_choose_the_parts(path):
    """`head` and `tail` are hidden whole, too; only named parts are."""
    cfg, dataset = opened(path, "--data.triple_parts=[tail,head]")
    batch = make_reader(cfg.model, cfg.data, dataset, 3).read(0)
    found = set()
    for row in range(4):
        line = shown(batch["tokens"][row]).split("\n")
        (part,) = [i for i, each in enumerate(line) if set(each) == {"#"}]
        assert "#" not in "".join(each for i, each in enumerate(line) if i != part)
        found.add(part)
    assert found <= {0, 2}
    seen = {part for index in range(10) for part in hidden_parts(make_reader(cfg.model, cfg.data, dataset, 3), index)}
    assert seen == {0, 2}


def hidden_parts(reader, index):
    rows = [shown(row).split("\n") for row in reader.read(index)["tokens"]]
    return [i for row in rows for i, each in enumerate(row) if each and set(each) == {"#"}]


@pytest.mark.parametrize("family", [ENCODER, BRANCHES], ids=["encoder", "branches"])
def test_a_batch_is_a_function_of_seed_step_and_row(path, family):
    """In any order, in parts of rows, with other sizes; another seed has other batches."""
    cfg, dataset = opened(path, family=family)
    reader = make_reader(cfg.model, cfg.data, dataset, 3)
    batch = reader.read(5)
    part = reader.read(5, np.array([1, 3]))
    assert all((part[name] == batch[name][[1, 3]]).all() for name in batch)
    larger, _ = opened(path, "--data.batch_size=8", family=family)
    double = make_reader(larger.model, larger.data, dataset, 3).read(2)
    assert all((double[name][4:] == batch[name]).all() for name in batch)
    other = make_reader(cfg.model, cfg.data, dataset, 4).read(5)
    assert any((other[name] != batch[name]).any() for name in batch)
    assert {name: array.shape for name, array in batch.items()} == shapes(cfg)


def shapes(cfg):
    from jaxstack import families

    return {name: array.shape for name, array in families.of(cfg.model).batch_spec(cfg.model, cfg.data).items()}


def test_branches_read_other_texts_in_each_window(path):
    """Each window has a text of its own: two with hidden parts, and one whose next tokens are learned."""
    cfg, dataset = opened(path, family=BRANCHES)
    reader = make_reader(cfg.model, cfg.data, dataset, 3)
    texts = []
    for index in range(4):  # 54 texts train, so an epoch has 18 rows of three
        batch = reader.read(index)
        for row in range(4):
            masked = batch["masked_targets"][row]
            texts += [shown(masked[:, 0]), shown(masked[:, 1]), shown(batch["tokens"][row, :, 0])]
            assert batch["masked_weights"][row].any(0).all() or "text" in texts[-1]
            own = batch["tokens"][row, :, 0]
            learned = batch["loss_weights"][row, :, 0] == 1
            assert learned.sum() == len(texts[-1]) - 1
            assert (batch["targets"][row, :-1, 0][learned[:-1]] == own[1:][learned[:-1]]).all()
            segments = [batch["masked_segment_ids"][row, 0, 0], batch["masked_segment_ids"][row, 0, 1]]
            assert len({*segments, batch["segment_ids"][row, 0, 0]}) == 3
            padding = batch["masked_segment_ids"][row] == 0
            assert (batch["masked_weights"][row][padding] == 0).all()
    assert len({*texts}) == len(texts) == 48
    assert reader.describe(0).count("facts.jsonl, line") == 12


def test_plain_text_beside_triples_has_segments(path, tmp_path):
    """In a mixture, rows of plain text are one segment, and no array is left without a value."""
    (tmp_path / "plain.txt").write_text("plain words " * 200)
    mixture = f"[{{source: path, path: {tmp_path / 'plain.txt'}}}, {{source: triples, path: {path}}}]"
    cfg = parse_config([*ENCODER, f"--data.mixture={mixture}", "--data.seq_len=64", "--data.batch_size=4"])
    dataset = data.load_for(cfg.model, cfg.data)
    cfg = resolve(cfg, dataset.vocab_size)
    batch = make_reader(cfg.model, cfg.data, dataset, 0).read(1)
    plain = np.array([shown(row).count("plain") > 1 for row in batch["targets"]])
    assert plain.sum() == 2
    assert (batch["segment_ids"][plain] == 1).all()
    assert (batch["segment_ids"][~plain].min(1) == 0).all()
    assert {*batch} == {*shapes(cfg)}


def test_texts_about_the_same_are_held_out_together(tmp_path):
    """The same head and tail, in other letters and with another relation, are on one side."""
    rows = [
        {"text": f"{relation} {i}", "triple": [f"{'H' if relation == 'x' else 'h'}{i}", relation, "t"]}
        for i in range(40)
        for relation in ("x", "y")
    ]
    file = tmp_path / "facts.json"
    file.write_text(json.dumps(rows))
    _, dataset = opened(str(file), "--data.eval_fraction=0.3")
    held_out = {*dataset.eval.names}
    assert 4 < len(held_out) < 44
    numbers = {int(name.rsplit(" ", 1)[1]) - 1 for name in held_out}
    assert all(number ^ 1 in numbers for number in numbers)
    assert not held_out & {*dataset.train.names}


def test_held_out_rows_are_always_the_same(path):
    for family in (ENCODER, BRANCHES):
        cfg, dataset = opened(path, family=family)
        sizes = window_sizes(cfg.model, cfg.data, dataset.tokenizer)
        first, again = (data.eval_batches(dataset.eval, steps=9, **sizes) for _ in range(2))
        assert all((first[i][name] == again[i][name]).all() for i in range(len(first)) for name in first[i])
        assert len(first) >= 1


def test_tokens_of_the_text_are_hidden_and_no_others():
    """With a share of nearly 1, all tokens of the text are, and neither the triple nor a separator."""
    batch = {
        "tokens": np.frombuffer(b"New York\nis\nbig\nsee New York\n", np.uint8)[None].astype(np.int32),
        "segment_ids": np.ones((1, 29), np.int32),
        "parts": np.array([[1] * 8 + [0] + [2] * 2 + [0] + [3] * 3 + [0] + [4] * 12 + [0]], np.int8),
    }
    masking = Masking(0.999, MASK, 256, triple_parts=("text",))
    row = masking.apply(batch, np.array([0]), 0)
    assert row["loss_weights"][0, :16].sum() == 0
    assert row["loss_weights"][0, 16:28].sum() >= 11
    assert row["loss_weights"][0, 28] == 0
    assert "parts" not in row
    assert "parts" in batch


@pytest.mark.parametrize(
    ("content", "message", "advice"),
    [
        ("", "facts.jsonl has no texts with triples", "Give a file"),
        ('{"text": "a"}', "line 1: this is not an object with a text and a triple", "Write {"),
        ('\n"a"', "line 2: this is not an object", "Write {"),
        ('{"text": "a", "triple": ["a", "b"]}', r"line 1: the triple \['a', 'b'\] is not a list of three", "Write {"),
        ('{"text": "a", "triple": ["a", "b", 3]}', "line 1: the triple .* is not a list of three", "Write {"),
        ('{"text": "a", "triple": ["a", "b", " "]}', "line 1: the triple .* is not a list of three", "Write {"),
        ('{"text": "", "triple": ["a", "b", "c"]}', "line 1: the text '' is empty or not a string", "Write {"),
        ('{"text": "a", "triple": ["a", "b", "\\ud800"]}', "line 1: the triple .* is not a list", "Write {"),
    ],
)
def test_a_damaged_file_is_an_error_with_file_and_line(tmp_path, content, message, advice):
    file = tmp_path / "facts.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        [*read_triples(str(file))]
    assert caught.value.advice.startswith(advice)


def test_a_row_without_room_for_the_text_is_an_error(path):
    with pytest.raises(ConfigError, match=r"line 1: data\.seq_len=16 leaves no token of the text") as caught:
        opened(path, "--data.seq_len=16")
    assert caught.value.advice.startswith("Raise data.seq_len")


def test_too_few_texts_for_the_windows_of_a_row_are_an_error(path):
    cfg, dataset = opened(path, "--model.branches.rates=[50,50]", family=BRANCHES)
    with pytest.raises(ConfigError, match=r"^5[0-9] texts with triples cannot fill a row of 100 windows"):
        make_reader(cfg.model, cfg.data, dataset, 0)
