"""Tests of conversations: files, templates and their sandbox, the loss mask, and windows of complete conversations."""

import json
import sys

import numpy as np
import pytest

from jaxstack import data
from jaxstack.cli.parser import execute
from jaxstack.config import Config, ConfigError, DataConfig, TrainConfig
from jaxstack.data import chat, ngram
from jaxstack.data.conversations import read_conversations
from jaxstack.data.tokenizers import ByteTokenizer, CharTokenizer, tokenizer_from_json
from jaxstack.data.windows import document_windows

CHATML = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "<|im_start|>assistant\n{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße, 世界?"},
    {"role": "assistant", "content": "Ja 🙂."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "  No.\n"},
]


def jinja(source, **tokens):
    pytest.importorskip("jinja2")
    return chat.JinjaTemplate("the template", {"source": source, "tokens": tokens})


def answers(template, messages=TURNS):
    text, spans = template.render(messages)
    return [text[a:b] for a, b in spans]


def write(path, *lines):
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(path)


def pair(prompt, completion):
    return {"prompt": prompt, "completion": completion}


# --- files ------------------------------------------------------------------------------------------------------------


def test_both_formats(tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": TURNS, "id": 7}, "", pair("Hi", "Ho"))
    first, second = read_conversations(path)
    assert first.messages == TURNS
    assert second == chat.Conversation(
        f"{path}, line 3",
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}],
        "prompt and completion",
    )


def said(*contents, system=None):
    """Messages of the user and the assistant in turn."""
    first = [{"role": "system", "content": system}] if system else []
    return first + [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


def turns(*values, **more):
    return {"conversations": [{"from": ("human", "gpt")[i % 2], "value": v} for i, v in enumerate(values)], **more}


SHAPES = [
    (turns("Hi", "Ho", "Ha", "He"), "ShareGPT", said("Hi", "Ho", "Ha", "He")),
    (turns("Hi", "Ho", system="Be.", id=3), "ShareGPT", said("Hi", "Ho", system="Be.")),
    ({"conversations": [{"from": "system", "value": "Be.", "weight": None}, {"from": "user", "value": "Hi"},
                        {"from": "chatgpt", "value": "Ho"}]}, "ShareGPT", said("Hi", "Ho", system="Be.")),
    ({"instruction": "Sum", "input": "1 2", "output": "3", "text": "all"}, "Alpaca", said("Sum\n1 2", "3")),
    ({"instruction": "Hi", "input": "", "output": "Ho"}, "Alpaca", said("Hi", "Ho")),
    ({"instruction": "", "input": "Hi", "output": "Ho"}, "Alpaca", said("Hi", "Ho")),
    ({"instruction": "c", "output": "d", "system": "Be.", "history": [["a", "b"]]}, "Alpaca",
     said("a", "b", "c", "d", system="Be.")),
    ({"messages": said("Hi", "Ho"), "system": "Be."}, "messages", said("Hi", "Ho", system="Be.")),
]  # fmt: skip


def test_the_shapes_of_other_projects(tmp_path):
    """One object a line, or one list of all, with the same messages."""
    values = [value for value, _, _ in SHAPES]
    path, whole = write(tmp_path / "a.jsonl", *values), write(tmp_path / "a.json", json.dumps(values, indent=1))
    for found in (list(read_conversations(path)), list(read_conversations(whole))):
        assert [(one.shape, one.messages) for one in found] == [(shape, messages) for _, shape, messages in SHAPES]
    assert found[3].name == f"{whole}, item 4"
    loaded = data.load(DataConfig(source="chat", path=path, seq_len=200))
    assert "8 conversations, of several shapes (3 ShareGPT, 4 Alpaca, 1 messages), " in loaded.description
    alone = data.load(DataConfig(source="chat", path=write(tmp_path / "b.jsonl", *values[3:7]), seq_len=200))
    assert "4 conversations, " in alone.description
    assert "several" not in alone.description


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({**turns("a", "b"), "messages": said("a", "b")}, "has the keys of messages and of ShareGPT, so its content"),
        ({**pair("a", "b"), "instruction": "a", "output": "b"}, "keys of prompt and completion and of Alpaca"),
        ({"conversations": {}}, "line 2: conversations={} is not a list"),
        ({"conversations": ["a"]}, "line 2: turn 1 has str. Give it from and value"),
        ({"conversations": [{"from": "human", "value": "a", "id": 0}]}, "turn 1 has from, id, value. Give it"),
        ({"conversations": [{"from": "tool", "value": "a"}]}, "turn 1 is from 'tool'. Use one of human, user, gpt"),
        (turns("a"), r"line 2: no message is the assistant's \(the roles are user\)"),
        (turns("a", " "), "line 2: message 2 is an empty answer"),
        ({"instruction": "a", "output": ""}, "line 2: message 2 is an empty answer"),
        ({"instruction": ["a"], "output": "b"}, r"instruction=\['a'\] and input='' are not both text"),
        (
            {"instruction": "a", "output": "b", "history": ["c"]},
            r"history=\['c'\] is not a list of pairs. Write \[\[question",
        ),
        ({"messages": TURNS, "system": "Be."}, "there is a system message beside system='Be.'"),
        ({**pair("a", "b"), "system": 3}, "message 1 has content of type int"),
        ("{", "line 2 is not JSON"),
        ("[" * 100_000, "line 2 is not JSON"),
        ("3", "line 2: this is not a JSON object"),
        ({"text": "a"}, "line 2: the keys are text. Write messages"),
        ({"messages": {}}, "line 2: messages={} is not a list"),
        ({"messages": ["hi"]}, "line 2: message 1 has str. Give it role and content"),
        ({"messages": [{"role": "user"}]}, "line 2: message 1 has role. Give it role and content"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "line 2: message 1 has the role 'tool'. Use one of"),
        ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "message 1 has role, content, name"),
        ({"messages": [{"role": "user", "content": None}]}, "message 1 has role. Give it role and content"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "line 2: message 1 has content of type list. Write text"),
        (
            {"messages": [{"role": "user", "content": "a"}]},
            r"line 2: no message is the assistant's \(the roles are user\)",
        ),
        (pair("a", " \n"), "line 2: message 2 is an empty answer"),
        (pair("a", "\ud800"), "line 2: message 2 contains half a character"),
        ({**pair("a", "b"), "tools": [1]}, "line 2: tools is not supported"),
    ],
)
def test_a_line_that_is_no_conversation_is_named(tmp_path, line, message):
    path = write(tmp_path / "a.jsonl", pair("a", "b"), line)
    with pytest.raises(ConfigError, match=message) as error:
        list(read_conversations(path))
    assert path in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_hold_nothing(tmp_path):
    with pytest.raises(ConfigError, match=r"is not a file\. Give a file with .*one conversation"):
        list(read_conversations(str(tmp_path)))
    with pytest.raises(ConfigError, match="has no conversations"):
        list(read_conversations(write(tmp_path / "a.jsonl", "", "")))
    (tmp_path / "b.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"line 1 is not JSON .*UTF-8"):
        list(read_conversations(str(tmp_path / "b.jsonl")))


def weighted(*weights, key="weight", **more):
    """Questions and answers; each answer has a weight unless it is `None`."""
    messages = []
    for i, weight in enumerate(weights):
        messages += [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}", key: weight}]
    return {"messages": messages, **more}


@pytest.mark.parametrize(
    ("line", "learned"),
    [
        (weighted(0, 1), "a1"),  # as OpenAI, Mistral and Together define it
        (weighted(1.0, 0.0), "a0"),
        (weighted(None, 0), "a0"),  # null, as tables write a missing value, is learned
        (weighted(0, 1, key="loss_mask"), "a1"),
        (weighted(False, True, key="loss"), "a1"),  # of ms-swift and XTuner
        (weighted(False, None, key="train"), "a1"),  # of Axolotl
        (weighted(False, None, key="training"), "a1"),
        (weighted(None, None, weight=1.0), "a0 a1"),  # of Fireworks, for the whole conversation
        (weighted(1, 0, weight=1), "a0"),
        (turns("q0", "a0", weight=1), "a0"),
        ({"conversations": [{"from": "human", "value": "q0", "weight": 0}, {"from": "gpt", "value": "a0", "weight": 0},
                            {"from": "human", "value": "q1", "weight": 0}, {"from": "gpt", "value": "a1", "weight": 1},
                            ]}, "a1"),
        ({**pair("q0", "a0"), "label": True}, "a0"),
    ],
)  # fmt: skip
def test_weights_decide_which_answers_are_learned(tmp_path, line, learned):
    path = write(tmp_path / "a.jsonl", line, line)
    found = data.load(DataConfig(source="chat", path=path, seq_len=200)).train
    ids = found.ids[found.starts[0] : found.ends[0]]
    assert bytes(ids[found.loss_mask[: ids.size]]).decode().replace("\0", " ").strip() == learned
    whole = "".join(f"<|user|>\nq{i}\n<|assistant|>\na{i}\0\n" for i in range(bytes(ids).count(b"user")))
    assert bytes(ids).decode() == whole  # what is not learned is read


def test_conversations_without_a_learned_answer_are_counted(tmp_path):
    lines = [weighted(1), weighted(1), weighted(1, weight=0), weighted(0, 0), weighted(1, sample_weight=0)]
    source = DataConfig(source="chat", path=write(tmp_path / "a.jsonl", *lines), seq_len=200)
    assert ": 2 conversations, 3 left out, without an answer of weight 1, " in data.load(source).description
    write(tmp_path / "a.jsonl", *lines[2:])
    with pytest.raises(ConfigError, match="the answers of all 3 conversations have weight 0"):
        data.load(source)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (weighted(0.5), "line 1: message 2: weight is 0.5. Use 0, 1, false or true"),
        (weighted("1"), "line 1: message 2: weight is 1. Use 0"),
        (weighted([0, 1], key="loss_mask"), r"message 2: loss_mask is \[0, 1\]"),
        (weighted(1, weight=2.0), "line 1: weight is 2.0"),
        (weighted(1, weight=-1), "line 1: weight is -1"),
        ({**pair("a", "b"), "loss_mask": [0, 1]}, r"line 1: loss_mask is \[0, 1\]"),
        ({**turns("a", "b"), "mask": "User"}, "mask='User' is not read"),
        ({**pair("a", "b"), "label": False}, "label is false, so the answer must not be imitated"),
        ({**pair("a", "b"), "kto_tag": False}, "kto_tag is false"),
        (
            {"messages": [{"role": "user", "content": "a", "train": True}, said("a", "b")[1]]},
            "message 1 of the user is",
        ),
        ({"messages": [said("a")[0], {**said("a", "b")[1], "weight": 1, "train": False}]}, "weight and train say diff"),
    ],
)
def test_weights_that_are_not_clear_are_refused(tmp_path, line, message):
    with pytest.raises(ConfigError, match=message) as error:
        list(read_conversations(write(tmp_path / "a.jsonl", line)))
    assert "\n" not in str(error.value)


def test_a_template_with_other_marks_cannot_have_weights():
    messages = weighted(1, 1)["messages"]
    two = (
        "{% generation %}a{% endgeneration %}b{% generation %}c{% endgeneration %}{% generation %}d{% endgeneration %}"
    )
    (found,) = chat.render_conversations([chat.Conversation("x", messages)], jinja(two))
    assert len(found.spans) == 3
    with pytest.raises(ConfigError, match="x: the template marks 3 spans for 2 answers"):
        list(chat.render_conversations([chat.Conversation("x", messages, unlearned=frozenset([0]))], jinja(two)))


# --- templates --------------------------------------------------------------------------------------------------------


def test_the_plain_template():
    plain = chat.PlainTemplate()
    assert answers(plain) == ["Ja 🙂.\0", "  No.\n\0"]
    assert plain.render(TURNS[1:3])[0] == "<|user|>\nGrüße, 世界?\n<|assistant|>\nJa 🙂.\0\n"
    assert plain.render(TURNS)[0].startswith(plain.prompt(TURNS[:2]))
    with pytest.raises(ConfigError, match="zero byte"):
        plain.render([{"role": "user", "content": "a\0b"}])


def test_answers_are_found_by_marks_and_by_prefixes():
    assert answers(jinja(MARKED)) == answers(jinja(CHATML)) == ["Ja 🙂.<|im_end|>", "  No.\n<|im_end|>"]
    # The end of a turn belongs to the answer, even if it is only white space. White space between turns does not.
    assert answers(jinja(LLAMA2), TURNS[1:]) == [" Ja 🙂. </s>", "   No.\n </s>"]
    lines = jinja("{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}")
    # Without a generation prompt the role is part of the answer.
    assert answers(lines, TURNS[1:3]) == ["assistant: Ja 🙂.\n\n"]
    assert jinja(MARKED, bos_token="<s>").prompt(TURNS[:1]).startswith("<s><|im_start|>system")
    assert "\ufdd0" not in jinja(MARKED).prompt(TURNS)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "the template is not a template"),
        ("{{ raise_exception('only users\nhere') }}", r"cannot render these messages \(.*\): only users here"),
        ("{{ messages[9].content }}", "cannot render these messages"),
        ("{% for i in range(10000000) %}x{% endfor %}", "cannot render these messages .*Range too big"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot render these messages .*unsafe"),
        ("{{ messages.append(1) }}", "cannot render these messages .*safe"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "cannot render these messages .*unsafe"),
        ("{% include '/etc/passwd' %}", "cannot render these messages .*loader"),
        ("{{ messages | length }}", "differently with and without"),
        ("{{ messages[-1].content }}", "differently with and without"),
        ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", "its position is"),
        ("{% generation %}{% generation %}{% endgeneration %}{% endgeneration %}", "Mark each answer once"),
    ],
)
def test_templates_that_fail_or_reach_out_of_the_sandbox(source, message):
    with pytest.raises(ConfigError, match=message) as error:
        jinja(source).render(TURNS)
    assert "\n" not in str(error.value)


def test_content_cannot_mark():
    with pytest.raises(ConfigError, match="not characters"):
        jinja(MARKED).render([{"role": "user", "content": "\ufdd0a\ufdd1"}, *TURNS[1:3]])


def test_templates_beside_a_tokenizer(tmp_path):
    name = str(tmp_path / "tokenizer.json")
    assert chat.read_template("bytes") is None
    assert chat.read_template(name, required=False) is None
    with pytest.raises(ConfigError, match=r"has neither a chat_template\.jinja nor"):
        chat.read_template(name)
    settings = {"chat_template": "one", "bos_token": {"content": "<s>"}, "pad_token": None, "model_max_length": 3}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert chat.read_template(name) == {"source": "one", "tokens": {"bos_token": "<s>"}}
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "two"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": several}))
    assert chat.read_template(name)["source"] == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert chat.read_template(name)["source"] == "three"
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ConfigError, match="cannot be read"):
        chat.read_template(name)


def test_missing_jinja2_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigError, match=r"Run pip install 'jaxstack\[hf\]'"):
        chat.JinjaTemplate("x", {"source": "", "tokens": {}})


# --- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda text: ByteTokenizer(), CharTokenizer], ids=["bytes", "chars"])
def test_the_mask_is_that_of_the_answers(make):
    (one,) = chat.render_conversations([chat.Conversation("x", TURNS)], chat.PlainTemplate())
    tokenizer = make(one.text)
    tokens, said = chat.encode_conversations([one], tokenizer, 500)
    assert tokenizer.decode(tokens.ids) == one.text  # without an end-of-document id
    assert tokenizer.decode(tokens.ids[tokens.loss_mask]) == "Ja 🙂.\0  No.\n\0"
    assert said == ""


class Pieces:
    """A tokenizer with given pieces. The token of an empty piece represents no character."""

    name, vocab_size, separator = "pieces", 100, None

    def __init__(self, *pieces):
        self.pieces = pieces

    def encode_with_offsets(self, text):
        assert "".join(self.pieces) == text
        ends = np.cumsum([len(piece) for piece in self.pieces])
        starts = np.append(0, ends[:-1])
        return np.arange(len(self.pieces), dtype=np.uint8), starts, ends


@pytest.mark.parametrize(
    ("pieces", "learned"),
    [
        (("ab", "cd", "efg", "hi"), "0110"),  # the answer spans d, e, f; tokens that cross its edges count
        (("abc", "def", "ghi"), "010"),  # tokens that end and begin at the edges
        (("abc", "d", "ef", "g", "hi"), "01100"),
        (("ab", "cdefgh", "i"), "010"),  # one token that contains the whole answer
        (("abc", "", "d", "", "ef", "", "ghi"), "0011100"),  # tokens without characters in the answer and beside it
    ],
)
def test_a_token_is_learned_if_one_of_its_characters_is_an_answers(pieces, learned):
    tokens, _ = chat.encode_conversations([chat.RenderedConversation("x", "abcdefghi", [(3, 6)])], Pieces(*pieces), 500)
    assert "".join("01"[int(answer)] for answer in tokens.loss_mask) == learned
    first = chat.RenderedConversation("x", "abcdefghi", [(0, 2), (7, 9)])
    tokens, _ = chat.encode_conversations([first], Pieces("ab", "cd", "ef", "gh", "i"), 500)
    assert tokens.loss_mask.tolist() == [True, False, False, True, True]
    # The first token is never a target, since no token precedes it.
    with pytest.raises(ConfigError, match="x: no token of the rendered text is an answer's"):
        chat.encode_conversations([chat.RenderedConversation("x", "abcdefghi", [(0, 2)])], Pieces("ab", "cdefghi"), 500)


def test_long_conversations_are_left_out_whole_and_counted():
    rendered = [
        *chat.render_conversations(
            [chat.Conversation(f"line {n}", [*TURNS[1:3]] * n) for n in (1, 2, 3)], chat.PlainTemplate()
        )
    ]
    sizes = [len(one.text.encode()) for one in rendered]
    tokens, said = chat.encode_conversations(rendered, ByteTokenizer(), sizes[1] - 1)  # windows have seq_len + 1 tokens
    assert tokens.names == ("line 1", "line 2")
    assert said == f"1 left out, longer than data.seq_len={sizes[1] - 1} (the longest has {sizes[2]} tokens)"
    with pytest.raises(ConfigError, match=f"none of 3 conversations fits into data.seq_len=10 .* {sizes[2]} tokens"):
        chat.encode_conversations(rendered, ByteTokenizer(), 10)


def many(count=60, seed=0):
    rng = np.random.default_rng(seed)
    return [pair("q" * int(rng.integers(1, 60)), f"{i:03d}" + "a" * int(rng.integers(1, 60))) for i in range(count)]


def load(tmp_path, lines, **keys):
    path = write(tmp_path / "chat.jsonl", *lines)
    return data.load(DataConfig(source="chat", path=path, **keys))


@pytest.mark.parametrize("packing", [False, True])
def test_every_answer_is_learned_once_an_epoch_in_sight_of_its_question(tmp_path, packing):
    S, B = 160, 4
    found = load(tmp_path, many(), seq_len=S)
    reading = {"seq_len": S, "batch_size": B, "packing": packing}
    windows = document_windows(found.train, S, packing).size
    ds = data.batches(found.train, seed=1, **reading)
    rows = [{k: v[i] for k, v in ds[step].items()} for step in range(-(-windows // B)) for i in range(B)][:windows]
    learned = []
    for row in rows:
        ids = np.append(row["tokens"], row["targets"][-1])
        for segment in np.unique(row["segment_ids"]) if packing else [None]:
            own = np.ones(S, bool) if segment is None else row["segment_ids"] == segment
            if not row["loss_weights"][own].any():
                continue  # tokens that follow the window in the stream
            start = int(np.flatnonzero(own)[0])
            text = bytes(ids[start : np.flatnonzero(row["loss_weights"] * own)[-1] + 2].astype(np.uint8)).decode()
            answer = bytes(row["targets"][(row["loss_weights"] > 0) & own].astype(np.uint8)).decode()
            assert text.startswith("<|user|>\nq")
            assert text.endswith(f"<|assistant|>\n{answer}")
            assert not packing or row["positions"][start] == 0
            learned.append(answer)
    ids = found.train.ids
    expected = [
        bytes(ids[a:b][found.train.loss_mask[a:b]]).decode()
        for a, b in zip(found.train.starts, found.train.ends, strict=True)
    ]
    assert sorted(learned) == sorted(expected)
    assert all(text.endswith("\0") for text in learned)
    assert len(rows) < len(expected) * 0.8 if packing else len(rows) == len(expected)
    # A batch depends only on seed and step, not on the batches read before.
    again = data.batches(found.train, seed=1, **reading)
    for step in (9, 2):
        np.testing.assert_array_equal(ds[step]["tokens"], again[step]["tokens"])
    assert (data.batches(found.train, seed=2, **reading)[0]["tokens"] != ds[0]["tokens"]).any()
    assert "line " in data.describe_batch(found.train, 0, seed=1, **reading)
    held_out = data.eval_batches(found.eval, steps=50, **reading)
    counted = sum(held_out[i]["loss_weights"].sum() for i in range(len(held_out)))
    assert counted == sum(
        found.eval.loss_mask[a:b].sum() for a, b in zip(found.eval.starts, found.eval.ends, strict=True)
    )


def test_what_follows_a_conversation_in_its_row_weighs_nothing():
    """Uses two conversations of three tokens, all in answers.

    In the row of the first, no target of the second counts. If the second is packed behind the first, all its tokens
    count except the first one, which would be predicted from the other conversation.
    """
    both = data.Tokens(np.arange(6, dtype=np.uint8), np.array([0, 3]), np.array([3, 6]), 9, loss_mask=np.ones(6, bool))
    alone = document_windows(both, 5, packing=False).make_batch(np.array([0, 1]), 5, False, 9)
    assert alone["tokens"][0].tolist() == [0, 1, 2, 3, 4]
    assert alone["loss_weights"].tolist() == [[1, 1, 0, 0, 0]] * 2
    packed = document_windows(both, 5, packing=True).make_batch(np.array([0]), 5, True, 9)
    assert packed["loss_weights"].tolist() == [[1, 1, 0, 1, 1]]
    assert packed["segment_ids"].tolist() == [[1, 1, 1, 2, 2]]
    assert packed["positions"].tolist() == [[0, 1, 2, 0, 1]]


def test_packing_is_tight():
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 60, 500)
    ends = np.cumsum(lengths, dtype=np.int64)
    tokens = data.Tokens(np.zeros(ends[-1], np.uint8), ends - lengths, ends, 256, loss_mask=np.ones(ends[-1], bool))
    packed = document_windows(tokens, 128, True)
    _, length_W = packed.places(np.arange(packed.size))
    assert length_W.sum() == ends[-1]
    assert length_W.max() <= 129
    assert packed.size <= 1.02 * ends[-1] / 129 + 1


def test_whole_conversations_are_held_out_however_few(tmp_path):
    found = load(tmp_path, many(3), seq_len=200)
    assert (found.train.starts.size, found.eval.starts.size) == (2, 1)
    assert "3 conversations, " in found.description
    assert "of the tokens in answers" in found.description
    with pytest.raises(ConfigError, match="only one conversation"):
        load(tmp_path, many(1), seq_len=200)


def test_the_byte_comparison_is_left_out_by_itself(tmp_path):
    """It was an error that asked for `train.ngram_baseline=false`, which the user had not set."""
    Config(data=DataConfig(source="chat", path="x"), train=TrainConfig(ngram_baseline=True))
    found = load(tmp_path, many(3), seq_len=200)
    assert ngram.obstacle([found.train], found.tokenizer) == "only the answers of conversations are learned"


def test_what_cannot_be_combined():
    with pytest.raises(ConfigError, match="cannot become a token file"):
        execute(["data", "build", "--data.source=chat", "--data.path=x", "out"])


def make_tokenizer_folder(folder, template):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(["user assistant system and now the the answer is " * 5], trainer)
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return str(folder / "tokenizer.json")


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "marks"])
def test_a_tokenizer_folder_with_its_template(tmp_path, template):
    pytest.importorskip("jinja2")
    name = make_tokenizer_folder(tmp_path, template)
    found = load(tmp_path, [{"messages": TURNS}] * 2, tokenizer=name, seq_len=200)
    a, b = found.train.starts[0], found.train.ends[0]
    learned = found.train.ids[a:b][found.train.loss_mask[a:b]]
    assert found.tokenizer.decode(learned) == "Ja 🙂.<|im_end|>  No.\n<|im_end|>"
    rebuilt = tokenizer_from_json(json.loads(json.dumps(found.tokenizer.to_json())))
    assert chat.template_for(rebuilt).render(TURNS) == jinja(template, bos_token="<s>").render(TURNS)
    with pytest.raises(ConfigError, match="has no chat template"):
        chat.template_for(data.make_tokenizer(name, ()))


@pytest.mark.slow
def test_masks_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    name = make_tokenizer_folder(tmp_path, MARKED)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = chat.JinjaTemplate(name, chat.read_template(name))
    rng = np.random.default_rng(0)
    words = ["the", " answer", "Grüße", " 世界", "\n", "🙂", " is", "\n\n", " and "]

    def said() -> str:
        return "".join(rng.choice(words, 8)) + "."

    for turns in (1, 2, 3):
        messages = [{"role": role, "content": said()} for _ in range(turns) for role in ("user", "assistant")]
        expected = theirs.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        (one,) = chat.render_conversations([chat.Conversation("x", messages)], ours)
        tokens, _ = chat.encode_conversations([one], data.make_tokenizer(name, ()), 1000)
        assert one.text == theirs.apply_chat_template(messages, tokenize=False)
        assert tokens.ids.tolist() == expected["input_ids"]
        assert tokens.loss_mask.astype(int).tolist() == expected["assistant_masks"]


def test_the_token_that_ends_an_answer(tmp_path):
    assert chat.end_of_turn(chat.PlainTemplate(), ByteTokenizer()) == ((0,), ())
    name = make_tokenizer_folder(tmp_path, CHATML)
    pytest.importorskip("jinja2")
    tokenizer = data.make_tokenizer(name, (), chat.read_template(name))
    tokens, texts = chat.end_of_turn(chat.template_for(tokenizer), tokenizer)
    assert tokenizer.decode(tokens) == "<|im_end|>"
    assert texts == ()


@pytest.mark.parametrize(
    ("end", "token", "texts"),
    [
        ("<|end|>", "", ("<|end|>",)),  # seven characters, each a token
        ("\n### End\n", "", ("### End",)),
        ("!", "!", ()),
        ("\n\n", "", ()),  # white space does not end an answer
        ("", "", ()),
    ],
)
def test_an_end_of_several_tokens(end, token, texts):
    template = jinja("{% for m in messages %}{{ m.role }}: {{ m.content }}{{ " + repr(end) + " }}{% endfor %}")
    tokenizer = CharTokenizer("".join(map(chr, range(128))))
    found = chat.end_of_turn(template, tokenizer)
    assert (tokenizer.decode(found.tokens), found.texts) == (token, texts)
    # Training learns every token of the end.
    (one,) = chat.render_conversations([chat.Conversation("x", said("Hi", "Yes."))], template)
    tokens, _ = chat.encode_conversations([one], tokenizer, 500)
    assert tokenizer.decode(tokens.ids[tokens.loss_mask]).endswith("Yes." + (end.rstrip() or end))


def test_special_tokens_within_an_end(tmp_path):
    """A special token never occurs in an answer, so it ends one by itself; what is before it is found as text."""
    name = make_tokenizer_folder(tmp_path, CHATML)
    pytest.importorskip("jinja2")
    for end, token, texts in (
        ("<|im_end|><|im_start|>", "<|im_end|>", ()),
        ("</said><|im_end|>", "<|im_end|>", ("</said>",)),
        ("</said>", "", ("</said>",)),
    ):
        template = {"source": CHATML.replace("<|im_end|>", end), "tokens": {}}
        tokenizer = data.make_tokenizer(name, (), template)
        found = chat.end_of_turn(chat.template_for(tokenizer), tokenizer)
        assert (tokenizer.decode(found.tokens), found.texts) == (token, texts)
