"""Pictures with texts of their own: what lines say, what is refused, and what batches have of key words and regions."""

import dataclasses
import json

import numpy as np
import pytest

from jaxstack import data
from jaxstack.config import ConfigError, DataConfig
from jaxstack.config.reading.parse import parse_config
from jaxstack.data import captions, images, own_captions
from jaxstack.data.captions import CaptionedImageReader
from jaxstack.data.tokenizers import make_tokenizer

BYTES = make_tokenizer("bytes", ())
SQUARE = [[0, 255], [51, 0], [9, 9], [0, 0]]


def written(folder, *lines, **keys):
    (folder / "a.jsonl").write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )
    options = {"target_len": 12, "eval_fraction": 0.5} | keys
    return DataConfig(source="captions", path=str(folder / "a.jsonl"), **options)


def test_lines_have_pictures_as_files_or_pixels_with_their_texts(tmp_path):
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "in").mkdir()
    image.fromarray(np.array(SQUARE, np.uint8)).save(tmp_path / "in" / "b.png")
    cfg = written(
        tmp_path,
        {"picture": "in/b.png", "text": "two cats", "key": ["cats"], "salient": [0, 1, 2, 3]},
        "",
        {"picture": SQUARE, "text": "a dog", "other": 1},
        {"picture": [[[0]] * 2] * 4, "text": "two cats", "key": ["two"]},
    )
    found = own_captions.read_own_captions(cfg)
    assert found.images.pixels.shape == (3, 4, 2, 1)
    np.testing.assert_array_equal(found.images.pixels[0], found.images.pixels[1])
    np.testing.assert_allclose(found.images.pixels[0, :, :, 0], np.array(SQUARE) / 127.5 - 1, atol=1e-6)
    assert found.texts == [("two cats",), ("a dog",)]
    assert found.keys == [({"cats", "two"},), (set(),)]  # of all lines with this text
    assert found.images.classes.tolist() == [0, 1, 0]
    assert found.images.boxes.tolist() == [[0, 1, 2, 3], [0] * 4, [0] * 4]
    assert found.images.names[1].endswith("a.jsonl, line 3")
    assert found.key_tokens(BYTES, 12, ["dog"]).tolist() == [[
        [0, *[1] * 3, 0, *[1] * 4, 0, 0, 0],
        [0, 0, 0, *[1] * 3, *[0] * 6],
    ]]  # fmt: skip


def test_texts_in_several_languages_are_rows_of_one_picture(tmp_path):
    lines = [
        {"picture": SQUARE, "text": {"en": "a cat", "de": "eine Katze"}, "key": {"de": ["Katze"]}},
        {"picture": SQUARE, "text": {"en": "a cat", "de": "ein Kater"}, "key": ["cat"]},
    ]
    found = own_captions.read_own_captions(written(tmp_path, *lines, languages=("en", "de")))
    assert found.of_language() == [["a cat", "a cat"], ["eine Katze", "ein Kater"]]
    assert found.images.classes.tolist() == [0, 1]
    assert found.keys == [(set(), {"Katze"}), ({"cat"}, {"cat"})]
    dataset = data.load(written(tmp_path, *lines, languages=("en", "de")), captions=True)
    assert dataset.train.captions["tokens"].shape == (2, 2, 12)
    assert "2 different texts in 2 languages" in dataset.description
    plain = data.load(
        written(tmp_path, *[{**line, "key": []} for line in lines], languages=("en", "de")), captions=True
    )
    assert dataset.fingerprint != plain.fingerprint


def test_a_key_word_is_a_whole_word_in_any_case():
    marks = own_captions.key_tokens("Cat, concat; à cat", ["cat", "à"], BYTES, 24)
    assert marks.tolist() == [0, *[1] * 3, *[0] * 10, 1, 1, 0, *[1] * 3, *[0] * 4]  # à has two bytes
    assert own_captions.key_tokens("a cat", ["cat"], BYTES, 4).tolist() == [0, 0, 0, 1]


WRONG = {
    "[1]": "this is not a JSON object",
    "{": "is not JSON",
    '{"text": "a"}': "is neither the name of a file",
    '{"picture": "no.png", "text": "a"}': "the picture 'no.png' is not a file in the folder",
    '{"picture": [[0, 1], [2]], "text": "a"}': "is neither the name of a file",
    '{"picture": [[0.5]], "text": "a"}': "is neither the name of a file",
    '{"picture": [[[1, 2]]], "text": "a"}': "is neither the name of a file",
    '{"picture": [[256]], "text": "a"}': "pixels from 256 to 256",
    '{"picture": [[0]]}': "text=None is empty",
    '{"picture": [[0]], "text": " "}': "text=' ' is empty",
    '{"picture": [[0]], "text": {"en": "a"}}': "name the languages in data.languages",
    '{"picture": [[0]], "text": "a cat", "key": ["ca"]}': "the key word 'ca' is not in the text",
    '{"picture": [[0]], "text": "a", "key": "a"}': "key='a' is neither",
    '{"picture": [[0]], "text": "a", "salient": [0, 0, 2, 1]}': "is not a region of a picture of 1x1",
    '{"picture": [[0]], "text": "a", "salient": [0, 0, 1, true]}': "is not a region",
    '{"picture": [[0, 1]], "text": "a"}': "the picture is 2x1 with 1 channel, but the first one is 1x1",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_line_is_named(tmp_path, line):
    with pytest.raises(ConfigError) as error:
        own_captions.read_own_captions(written(tmp_path, {"picture": [[7]], "text": "a"}, line))
    message = str(error.value)
    assert WRONG[line] in message
    assert "line 2" in message
    assert "\n" not in message
    assert message.endswith(".")


def test_other_wrong_data_are_refused(tmp_path):
    one = {"picture": SQUARE, "text": {"en": "a"}}
    for lines, keys, said in (
        ((), {}, "has no pictures"),
        ((one,), {"languages": ("en", "de")}, r"text is not an object with a text in each of"),
        ((), {"path": "no.jsonl"}, "is not a file"),
        ((), {"path": "drawn:cats"}, "is not a set that is drawn"),
        ((), {"path": "drawn:digits", "languages": ("fi",)}, "data.languages has fi"),
    ):
        cfg = dataclasses.replace(written(tmp_path, *lines), **keys)
        with pytest.raises(ConfigError, match=said) as error:
            own_captions.read_own_captions(cfg)
        assert "\n" not in str(error.value)


def test_drawn_digits_are_as_their_texts_say():
    pytest.importorskip("sklearn")
    found = own_captions.read_own_captions(DataConfig(source="captions", path="drawn:digits", languages=("fr", "en")))
    again = own_captions.read_own_captions(DataConfig(source="captions", path="drawn:digits"))
    assert images.fingerprint(found.images) == images.fingerprint(
        dataclasses.replace(again.images, classes=found.images.classes)
    )
    assert len(found.images) == 2 * 1797
    assert len(found.texts) == 160
    digits = images.read_digits()[0]
    for i in (0, 5, 1796, 1797, 3000):
        fr, en = found.texts[found.images.classes[i]]
        _, colour, digit, _, _, row, column = en.split()
        assert digit == own_captions.DIGITS["en"][digits.classes[i % 1797]]
        left, top, right, bottom = found.images.boxes[i]
        assert (row == "bottom", column == "right") == (top == 8, left == 8)
        assert (right - left, bottom - top) == (8, 8)
        assert fr.split()[1] == own_captions.DIGITS["fr"][digits.classes[i % 1797]]
        pixels = found.images.pixels[i] / 2 + 0.5
        saturation = pixels.max(-1) - pixels.min(-1)
        rgb = own_captions.RGB[own_captions.COLOURS["en"].index(colour)]
        inside = saturation[top:bottom, left:right]
        np.testing.assert_allclose(inside, (digits.pixels[i % 1797, :, :, 0] / 2 + 0.5) * np.ptp(rgb), atol=1e-5)
        saturation[top:bottom, left:right] = 0
        assert saturation.max() < 1e-5


@pytest.fixture
def reader(tmp_path):
    lines = [
        {"picture": np.arange(24).reshape(4, 6).tolist(), "text": "ab c", "key": ["c"], "salient": [1, 0, 4, 2]},
        {"picture": [[0] * 6] * 4, "text": "d"},
    ]
    dataset = data.load(written(tmp_path, *lines * 3, target_len=7, eval_fraction=0.4), captions=True)
    return CaptionedImageReader(dataset.train, 5, 4, 2, timesteps=9, num_classes=3, marks_keys=True, salient_weight=3.0)


def test_batches_weigh_patches_in_regions_and_mark_key_words(reader):
    rows = reader.read(np.arange(40))
    classes = reader.images.classes[reader.locate(np.arange(40))]
    # Of the patches of the first row, which have two columns each, one and two columns are inside.
    wanted = np.array([[2.5, 4, 1, 1, 1, 1], [1] * 6])
    np.testing.assert_allclose(rows["loss_weights"], wanted[classes])
    np.testing.assert_array_equal(rows["encoder_key_tokens"], np.array([[0, 0, 0, 0, 1, 0, 0], [0] * 7])[classes])
    empty = dataclasses.replace(reader, class_dropout=0.999).read(np.arange(40))
    assert not empty["encoder_key_tokens"].any()
    plain = dataclasses.replace(reader, marks_keys=False, salient_weight=0.0).read(np.arange(40))
    assert (plain["loss_weights"] == 1).all()
    assert "encoder_key_tokens" not in plain
    part = reader.batches(np.array([1, 3]))[3]
    assert all((part[name] == a[[1, 3]]).all() for name, a in reader.batches()[3].items())


FLAGS = [
    "--model.family=diffusion", "--model.diffusion.text_layers=1", "--data.source=captions", "--data.seq_len=4",
    "--data.target_len=40", "--model.diffusion.patch_size=8", "--model.diffusion.key_weight=1",
    "--model.diffusion.salient_weight=1", "--model.num_layers=1", "--model.d_model=16", "--model.num_heads=2",
    "--model.moe.max_timestep=50", "--train.ngram_baseline=false", "--data.batch_size=8",
]  # fmt: skip


def test_prompts_have_the_key_words_of_the_run(tmp_path):
    flags = [*FLAGS, "--data.path=drawn:digits", "--data.key_words=[red]", "--model.vocab_size=256"]
    cfg = parse_config([*flags, "--model.diffusion.image=[16,16,3]"])
    given = captions.Given.named(cfg.model, ["a red one", "reddish"], BYTES, cfg.data)
    assert given.condition["encoder_key_tokens"][:, :9].tolist() == [[0, 0, 0, 1, 1, 1, 0, 0, 0], [0] * 9]
    assert not given.nothing["encoder_key_tokens"].any()
    plain = dataclasses.replace(cfg.model, diffusion=dataclasses.replace(cfg.model.diffusion, key_weight=0.0))
    assert "encoder_key_tokens" not in captions.Given.named(plain, ["a"], BYTES, cfg.data).condition


def test_training_reads_weights_and_evaluation_does_not(tmp_path):
    pytest.importorskip("sklearn")
    from jaxstack.data.loader import picture_reader

    cfg = parse_config([*FLAGS, "--data.path=drawn:digits"])
    dataset = data.load_for(cfg.model, cfg.data)
    cfg = data.resolve_from_data(cfg)
    batch = picture_reader(cfg.model, dataset.train, 4, 0).batches()[0]
    assert sorted(batch["loss_weights"].ravel().tolist()) == [1] * 12 + [2] * 4  # each digit fills one patch
    held_out = picture_reader(cfg.model, dataset.eval, 4).batches()[0]
    assert (held_out["loss_weights"] == 1).all()
    assert batch["encoder_key_tokens"].sum(1).min() >= len("redonetopleft")


@pytest.mark.slow
def test_a_run_is_resumed_bit_for_bit_and_draws_from_a_prompt(tmp_path, capsys):
    pytest.importorskip("sklearn")
    from jaxstack.cli.parser import execute
    from jaxstack.train import main

    flags = [
        *FLAGS, "--data.path=drawn:digits", "--run.log_every=1", "--train.eval_every=2", "--train.eval_steps=1",
        "--checkpoint.every=2", "--sample.steps=2", "--sample.pictures=1", "--optim.warmup_steps=1",
        "--optim.schedule=constant", "--mesh.fsdp=2", "--mesh.data=4", "--data.key_words=[red]",
    ]  # fmt: skip
    for name, steps in (("straight", 4), ("resumed", 2), ("resumed", 4)):
        main(parse_config([*flags, f"--train.steps={steps}", f"--run.dir={tmp_path / name}"]))
    files = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("straight", "resumed")]
    lines = [{(line["step"], line["loss"]) for line in map(json.loads, each) if "loss" in line} for each in files]
    assert lines[0] == lines[1]
    assert len(lines[0]) == 4
    from PIL import Image

    with Image.open(tmp_path / "straight" / "samples" / "000004.png") as picture:  # ten texts
        assert picture.size == (48, 10 * 50 - 2)
    out = tmp_path / "red.png"
    execute(["generate", str(tmp_path / "straight"), "a red three", f"--out={out}", "--sample.guidance=2"])
    assert "a red three" in capsys.readouterr().out
    with Image.open(out) as picture:
        assert picture.size == (48, 48)
