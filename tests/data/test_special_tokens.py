"""What a tokenizer puts around a text, and what ends a text: compared with `transformers`."""

import json

import numpy as np
import pytest

from jaxstack import data
from jaxstack.checkpoint import run_dir
from jaxstack.cli import export_model
from jaxstack.config import Config, ConfigError, DataConfig
from jaxstack.data.text_stream import TextStream
from jaxstack.data.tokenizers import as_document, encode_prompt, tokenizer_from_json
from jaxstack.hf.families import FAMILIES

tokenizers = pytest.importorskip("tokenizers")
WORDS = ["<s>", "</s>", "<|im_end|>", "[CLS]", "[SEP]", *(f"w{i}" for i in range(20))]


def write_tokenizer(folder, before=(), after=(), **state):
    """Writes a tokenizer.json of words whose post-processor puts tokens around a text, and returns its path."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(WORDS[:5])
    if before or after:
        single = " ".join([*before, "$A", *after])
        used = [(word, WORDS.index(word)) for word in dict.fromkeys([*before, *after])]
        made.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=used)
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(made.to_str()) | state))
    return str(folder / "tokenizer.json")


FRAMES = [((), ()), (("<s>",), ()), (("<s>",), ("</s>",)), (("[CLS]",), ("[SEP]",)), (("<s>", "[CLS]"), ())]


@pytest.mark.parametrize(("before", "after"), FRAMES)
def test_a_text_has_what_the_post_processor_says(tmp_path, before, after):
    """The definition is the library's own: encoding with special tokens."""
    path = write_tokenizer(tmp_path, before, after)
    theirs = tokenizers.Tokenizer.from_file(path).encode("w1 w2").ids
    ours = data.make_tokenizer(path, ())
    assert [*ours.before, *ours.encode("w1 w2"), *ours.after] == theirs
    assert encode_prompt(ours, "w1 w2") == theirs[: len(theirs) - len(after)]
    document = as_document(ours, ours.encode("w1 w2")).tolist()
    assert document == theirs + [ours.eos_id] * (theirs[-1] != ours.eos_id)
    again = tokenizer_from_json(json.loads(json.dumps(ours.to_json())))
    assert (again.before, again.after, again.stop_ids) == (ours.before, ours.after, ours.stop_ids)
    off = data.make_tokenizer(path, (), None, special_tokens=False)
    assert (off.before, off.after) == ((), ())
    assert tokenizer_from_json(off.to_json()).before == ()


def test_bos_is_not_put_twice_and_not_shown(tmp_path):
    tokenizer = data.make_tokenizer(write_tokenizer(tmp_path, ("<s>",)), ())
    assert encode_prompt(tokenizer, "<s> w1") == [0, 6]
    assert as_document(tokenizer, tokenizer.encode("<s> w1 </s>")).tolist() == [0, 6, 1]
    assert as_document(tokenizer, tokenizer.encode("")).tolist() == [0, 1]
    stream = TextStream(tokenizer, "w1")
    stream.add([7])
    assert (stream.prompt, stream.text) == ([0, 6], "w1 w2")


def test_training_and_token_files_have_the_same_ids(tmp_path):
    path = write_tokenizer(tmp_path, ("<s>",))
    (tmp_path / "texts").mkdir()
    for i in range(12):
        (tmp_path / "texts" / f"{i}.txt").write_text("w1 w2 w3 " * 3)
    source = DataConfig(source="path", path=str(tmp_path / "texts"), tokenizer=path)
    text = data.load(source).sources[0].train
    assert text.ids[text.starts[0] : text.ends[0]].tolist() == [0, *[6, 7, 8] * 3, 1]
    plain = data.load(DataConfig(source="path", path=source.path, tokenizer=path, special_tokens=False))
    assert plain.sources[0].train.ids[0] == 6
    data.write_token_file(tmp_path / "tokens", data.documents(source), data.make_tokenizer(path, ()))
    np.testing.assert_array_equal(data.read_token_file(tmp_path / "tokens")[0].ids, text.ids)
    with pytest.raises(ConfigError, match="special_tokens=false, but the texts"):
        data.load(DataConfig(source="tokens", path=str(tmp_path / "tokens"), special_tokens=False))


STATE = {
    "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
    "padding": {
        "strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 3, "pad_type_id": 0,
        "pad_token": "[CLS]",
    },
}  # fmt: skip


def test_the_state_of_another_call_does_not_reach_texts(tmp_path):
    path = write_tokenizer(tmp_path, ("<s>",), (), **STATE)
    tokenizer = data.make_tokenizer(path, ())
    assert tokenizer.encode("w1 " * 30).tolist() == [6] * 30
    assert tokenizer.before == (0,)
    assert tokenizer.to_json()["tokenizer"] == json.loads((tmp_path / "tokenizer.json").read_text())


def test_dropout_does_not_reach_texts(tmp_path):
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({"a": 0, "aa": 1, "aaaa": 2}, [("a", "a"), ("aa", "aa")], dropout=0.5)
    )
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = data.make_tokenizer(str(tmp_path / "tokenizer.json"), ())
    assert tokenizer.encode("a" * 80).tolist() == [2] * 20


ENDS = [
    ({}, 1, (1,)),
    ({"tokenizer_config.json": {"eos_token": "<|im_end|>"}}, 2, (2,)),
    ({"tokenizer_config.json": {"eos_token": {"content": "<|im_end|>"}}}, 2, (2,)),
    ({"special_tokens_map.json": {"eos_token": "<|im_end|>"}}, 2, (2,)),
    ({"tokenizer_config.json": {"eos_token": None}, "config.json": {"eos_token_id": 2}}, 2, (2,)),
    ({"config.json": {"eos_token_id": [2, 1]}}, 1, (1, 2)),
    ({"config.json": {"eos_token_id": 4}, "generation_config.json": {"eos_token_id": [2, 3]}}, 2, (2, 3)),
    ({"special_tokens_map.json": {"eos_token": "</s>"}, "config.json": {"eos_token_id": [2, 99, -1]}}, 1, (1, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("files", "eos", "stop"), ENDS)
def test_the_files_of_a_model_say_what_ends_a_text(tmp_path, files, eos, stop):
    path = write_tokenizer(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    tokenizer = data.make_tokenizer(path, ())
    assert (tokenizer.eos_id, tokenizer.stop_ids) == (eos, stop)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", {"eos_token": "<none>"}, "not a token of the tokenizer.json"),
        ("config.json", {"eos_token_id": "2"}, "neither an id nor a list"),
        ("generation_config.json", [], "not a JSON object"),
    ],
)
def test_contradicting_files_are_refused(tmp_path, name, content, message):
    path = write_tokenizer(tmp_path)
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        data.make_tokenizer(path, ())


def test_a_run_from_before_the_key_puts_nothing_around_texts_and_continues_without(tmp_path):
    """Its tokenizer.json has no `ends`; only `data.special_tokens=false` trains on as before."""
    now = data.make_tokenizer(write_tokenizer(tmp_path, ("<s>",)), ())
    earlier = {name: value for name, value in now.to_json().items() if name != "ends"}
    assert tokenizer_from_json(earlier).before == ()
    saved = tmp_path / "run" / "tokenizer.json"
    with pytest.raises(ConfigError, match=r"put nothing around texts.*\n?.*Add --data.special_tokens=false"):
        run_dir.require_same_tokenizer(saved, earlier, now.to_json())
    run_dir.require_same_tokenizer(saved, earlier, now.without_special_tokens().to_json())
    run_dir.require_same_tokenizer(saved, now.to_json(), now.to_json())
    with pytest.raises(ConfigError, match="differs from"):
        run_dir.require_same_tokenizer(saved, earlier | {"name": "other"}, now.to_json())


def test_a_tokenizer_that_puts_nothing_around_texts_needs_no_key(tmp_path):
    """Its runs from before the key are resumed as they are, whatever the key says."""
    on = data.make_tokenizer(write_tokenizer(tmp_path), ())
    earlier = {name: value for name, value in on.to_json().items() if name not in ("ends", "special_tokens")}
    for now in (on, on.without_special_tokens()):
        run_dir.require_same_tokenizer(tmp_path / "tokenizer.json", earlier, now.to_json())
        assert now.describe_frame() == tokenizer_from_json(earlier).describe_frame() == ""
    assert on.to_json() == on.without_special_tokens().to_json()


# --- an exported tokenizer --------------------------------------------------------------------------------------------


def merges(folder, metaspace):
    """Trains a byte pair encoding like GPT-2's, or one like Llama 2's with spaces as symbols, and returns its path."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None if not metaspace else "<unk>"))
    level = tokenizers.pre_tokenizers.Metaspace if metaspace else tokenizers.pre_tokenizers.ByteLevel
    made.pre_tokenizer = level() if metaspace else level(add_prefix_space=False)
    made.decoder = tokenizers.decoders.Metaspace() if metaspace else tokenizers.decoders.ByteLevel()
    special = ["<unk>", "<s>", "</s>"] if metaspace else ["<|endoftext|>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=330, special_tokens=special, show_progress=False,
                                             initial_alphabet=level.alphabet() if not metaspace else [])  # fmt: skip
    made.train_from_iterator(TEXTS * 5, trainer)
    if metaspace:
        made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


TEXTS = [
    "the cat sat on the mat",
    "  two spaces, it's 1234 o'clock\n\n",
    "w1 w2 w19 </s> <|im_end|>",
    "un caf\xe9 , \u4f60\u597d !",
]
KINDS = {
    "like GPT-2": lambda folder: merges(folder, False),
    "like Llama": lambda folder: merges(folder, True),
    "words": lambda folder: write_tokenizer(folder, ("<s>",), ("</s>",)),
    "words without a frame": write_tokenizer,
    "words of BERT": lambda folder: write_tokenizer(folder, ("[CLS]",), ("[SEP]",)),
    "words with state": lambda folder: write_tokenizer(folder, ("<s>",), **STATE),
}


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "qwen3", "bert", "t5", "gemma2", "mistral"])
@pytest.mark.parametrize("special_tokens", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_an_exported_tokenizer(tmp_path, kind, special_tokens, family):
    """It gives the ids of the run, whatever class it has for the model's family."""
    transformers = pytest.importorskip("transformers")
    ours = data.make_tokenizer(KINDS[kind](tmp_path), (), special_tokens=special_tokens)
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text(json.dumps({"model_type": family}))
    export_model.write_tokenizer(ours.to_json(), out, Config().model, Config().data)
    insists = family in export_model.OWN_TOKENIZER_CLASS
    loader = transformers.PreTrainedTokenizerFast if insists else transformers.AutoTokenizer
    theirs = loader.from_pretrained(out)
    assert theirs.eos_token_id == ours.eos_id
    for text in TEXTS:
        if kind.startswith("words"):
            text = " ".join(word for word in text.split() if word in WORDS)
        assert theirs(text)["input_ids"] == [*ours.before, *ours.encode(text).tolist(), *ours.after]
        assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text))


def test_families_whose_tokenizer_class_cannot_be_chosen():
    """For these, transformers ignores the class that a folder names, so that export says how to load the tokenizer."""
    pytest.importorskip("transformers")
    from transformers.models.auto import tokenization_auto as auto

    theirs = {
        family
        for family in FAMILIES
        if family in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        and auto.TOKENIZER_MAPPING_NAMES[family] != "TokenizersBackend"
    }
    assert theirs == export_model.OWN_TOKENIZER_CLASS
