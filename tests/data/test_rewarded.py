"""Prompts of `data.source=prompts`: what is read, what is refused, and in which order a run has them."""

import json

import numpy as np
import pytest

from jaxstack import data
from jaxstack.config import ConfigError, DataConfig
from jaxstack.data.chat import PlainTemplate
from jaxstack.data.rewarded import read_prompts


def write(path, *values):
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values))
    return str(path)


def test_prompts_keep_their_fields_and_end_where_an_answer_begins(tmp_path):
    path = write(
        tmp_path / "prompts.jsonl",
        {"prompt": "1 + 2", "completion": "3", "answer": 3, "note": None},
        {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                    {"role": "user", "content": "c"}], "system": "s"},
    )  # fmt: skip
    first, second = read_prompts(path)
    assert (first.text, first.fields) == ("1 + 2", {"answer": 3, "note": None})
    assert (second.text, second.fields) == ("c", {})
    assert PlainTemplate().prompt(second.messages).endswith("<|user|>\nc\n<|assistant|>\n")
    tokens = data.load(DataConfig(source="prompts", path=path, seq_len=128)).train
    (number,) = tokens.numbers.tolist()
    assert tokens.rows[number].text in ("1 + 2", "c")
    assert bytes(tokens.ids_of([0])[0]).endswith(f"{tokens.rows[number].text}\n<|assistant|>\n".encode())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1], "item 1: this is not a JSON object with a prompt"),
        ({"question": "1"}, "this is not a JSON object with a prompt"),
        ({"prompt": 3}, "prompt=3 is neither text nor a list of messages"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [{"role": "assistant", "content": "a"}]}, "the prompt ends with an answer"),
        ({"prompt": [{"role": "user"}]}, "content"),
        ({"prompt": "a", "tools": [1]}, "tools is not supported"),
        ({"prompt": [{"role": "system", "content": "a"}], "system": "b"}, "system message beside system='b'"),
    ],
)
def test_what_is_not_a_prompt_is_named_with_its_line(tmp_path, value, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(value))
    with pytest.raises(ConfigError, match=message) as error:
        [*read_prompts(str(path))]
    assert str(path) in str(error.value)


def test_files_without_prompts_and_prompts_that_do_not_fit_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="has no prompts"):
        [*read_prompts(str(tmp_path / "empty.jsonl"))]
    path = write(tmp_path / "long.jsonl", {"prompt": "a" * 50}, {"prompt": "b" * 60})
    with pytest.raises(ConfigError, match=r"none of 2 prompts fits into data\.seq_len=40"):
        data.load(DataConfig(source="prompts", path=path, seq_len=40))
    path = write(tmp_path / "some.jsonl", *({"prompt": "a" * n} for n in (5, 6, 90)))
    found = data.load(DataConfig(source="prompts", path=path, seq_len=40))
    assert "1 left out, too long" in found.description


def test_an_epoch_has_every_prompt_once_and_equal_prompts_are_on_one_side(tmp_path):
    rows = [{"prompt": f"p{i % 20}", "i": i} for i in range(40)]
    found = data.load(DataConfig(source="prompts", path=write(tmp_path / "p.jsonl", *rows), seq_len=64))
    train, held_out = ({found.train.rows[n].text for n in part.numbers} for part in (found.train, found.eval))
    assert not train & held_out
    count = found.train.starts.size
    batches = data.batches(found.train, seq_len=64, batch_size=1, seed=3, packing=False)
    epochs = [[int(batches[e * count + i]["prompts"][0, 0]) for i in range(count)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(found.train.numbers.tolist())
    assert epochs[0] != epochs[1]
    np.testing.assert_array_equal(batches[3]["prompts"], batches[3]["prompts"])
