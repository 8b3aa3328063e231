"""Completions of several turns: what a tool is asked, which tokens are learned, and when a completion ends."""

import json

import numpy as np
import pytest

from jaxstack.config import ConfigError
from jaxstack.config.reading.parse import parse_config
from jaxstack.config.training import RLConfig
from jaxstack.data.conversations import read_conversations
from jaxstack.data.rewarded import RewardedPrompt, read_prompts
from jaxstack.data.tokenizers import ByteTokenizer
from jaxstack.generate.rollouts import Judged, make_arrays
from jaxstack.generate.turns import Completion, Turns, open_turns
from jaxstack.posttrain import tasks
from jaxstack.posttrain.tasks import arithmetic
from jaxstack.train import main

END = 0  # the byte that ends a turn
BETWEEN = b"\n<|user|>\n12\n<|assistant|>\n"


def turns(most=3, tool=arithmetic.calculate):
    return Turns("t", tool, most, 16, ByteTokenizer(), (END,))


def scripted(*calls):
    """Returns a sampler of fixed texts for each call, whose token `i` of a text has the log-probability -i."""
    asked = []

    def sample(prompts, seed):
        asked.append(([[*prompt] for prompt in prompts], seed))
        found = []
        for text in calls[len(asked) - 1]:
            each = -np.arange(len(text), dtype=np.float32)
            found.append(Completion([*text], each, each, 1))
        return found

    return sample, asked


ROW = RewardedPrompt("row 1", [{"role": "user", "content": "What is 3 * 4?"}], {})


def test_a_call_gets_its_result_and_the_model_goes_on():
    sample, asked = scripted([b"calc 3 * 4\0", b"7\0"], [b"12\0"])
    called, plain = turns().sample(sample, [ROW, ROW], [[65], [66]], 5, 100)
    assert plain.completion.tokens == [*b"7\0"]
    assert plain.completion.turns == 1
    assert plain.last == [*b"7\0"]
    completion = called.completion
    assert bytes(completion.tokens) == b"calc 3 * 4\0" + BETWEEN + b"12\0"
    assert completion.learned.tolist() == [True] * 11 + [False] * len(BETWEEN) + [True] * 3
    assert completion.log_probs.tolist() == [*range(0, -11, -1)] + [0] * len(BETWEEN) + [0, -1, -2]
    assert (completion.turns, completion.redrafted, called.last) == (2, 2, [*b"12\0"])
    assert [prompts for prompts, _ in asked] == [[[65], [66]], [[65, *b"calc 3 * 4\0", *BETWEEN]]]
    assert asked[0][1] == 5 != asked[1][1]


@pytest.mark.parametrize(
    ("most", "longest", "text", "count"),
    [
        (1, 100, b"calc 1\0", 1),  # no turn is left
        (2, 100, b"calc 1", 1),  # the turn was cut
        (2, 100, b"1\0", 1),  # nothing is called
        (2, 1 + 7 + 26 + 16 - 1, b"calc 1\0", 2),
        (2, 1 + 7 + 26 + 16 - 2, b"calc 1\0", 1),  # another turn has no room
    ],
)
def test_a_completion_ends_where_no_turn_can_follow(most, longest, text, count):
    assert len(turns().between("1")) == 26
    sample, asked = scripted([text], [b"1\0"])
    (answer,) = turns(most).sample(sample, [ROW], [[65]], 0, longest)
    assert len(asked) == count == answer.completion.turns


def test_a_tools_result_is_not_learned():
    """The loss reads the targets that were sampled, and the row has all of them."""
    sample, _ = scripted([b"calc 3 * 4\0"], [b"12\0"])
    (answer,) = turns().sample(sample, [ROW], [[65, 66]], 5, 100)
    judged = [Judged(ROW, [65, 66], answer.completion, True, "12", [one], one) for one in (1.0, 0.0)]
    arrays = make_arrays(RLConfig(turns=3, tokens=16, loss="dr_grpo"), [judged], 64)
    learned = arrays["loss_weights"][0] > 0
    assert bytes(arrays["targets"][0][learned].tolist()) == b"calc 3 * 4\0" + b"12\0"
    assert bytes(arrays["tokens"][0][: 2 + 11 + len(BETWEEN) + 2].tolist()) == b"ABcalc 3 * 4\0" + BETWEEN + b"12"
    for name in ("old_log_probs", "importance", "token_weights"):
        assert not arrays[name][0][~learned].any(), name
    np.testing.assert_allclose(arrays["token_weights"][0][learned], 1 / (3 * 16))


def test_a_tool_that_fails_is_named_with_its_row():
    def fails(text):
        raise ValueError("no")

    with pytest.raises(ConfigError, match=r"rl\.tool=t raised ValueError: no for row 1 and the text 'ab'"):
        turns(tool=fails).sample(scripted([b"ab\0"])[0], [ROW], [[65]], 0, 100)
    with pytest.raises(ConfigError, match=r"rl\.tool=t returned int for row 1"):
        turns(tool=len).sample(scripted([b"ab\0"])[0], [ROW], [[65]], 0, 100)
    with pytest.raises(ConfigError, match=r"rl\.turns=2, but data\.path=task:addition has no tool"):
        open_turns(RLConfig(turns=2), "task:addition", ByteTokenizer(), (END,))
    assert open_turns(RLConfig(turns=2), "task:calculator", ByteTokenizer(), (END,)).tool is arithmetic.calculate
    assert open_turns(RLConfig(), "task:calculator", ByteTokenizer(), (END,)) is None


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("calc 3 * 4", "12"), ("calc 1 - 2 * 3", "-5"), ("calc 1 / 3", "1/3"), ("calc (2 + 3) * 4", "20"),
        ("calc 1 / 0", "error"), ("calc", None), ("12", None), ("calc 2 ** 9", "error"), ("calc open('x')", "error"),
        ("calc " + "(" * 300, "error"), ("calc ", "error"),
    ],
)  # fmt: skip
def test_the_calculator_reads_formulas_and_runs_nothing(text, result):
    assert arithmetic.calculate(text) == result


def test_conversations_of_the_task_call_the_tool():
    for conversation in list(read_conversations("task:calculator:2"))[:20]:
        question, call, result, answer = (message["content"] for message in conversation.messages)
        assert [message["role"] for message in conversation.messages] == ["user", "assistant", "user", "assistant"]
        formula = question.removeprefix("What is ").removesuffix("?")
        assert call == f"calc {formula}"
        assert int(result) == int(answer) == eval(formula)
    row = next(read_prompts("task:calculator"))
    assert [*row.fields] == ["answer"]
    assert tasks.find("task:calculator")[0].reward(f" {row.fields['answer']}\n", row.fields["answer"]) == 1
    assert tasks.find("task:calculator")[0].reward(f"calc {row.fields['answer']}", row.fields["answer"]) == 0


SIZES = [
    "--model.num_layers=1", "--model.d_model=32", "--model.d_ff=64", "--model.num_heads=2", "--data.seq_len=128",
    "--data.batch_size=16", "--train.eval_every=80", "--train.eval_steps=1", "--run.log_every=1", "--mesh.data=-1",
    "--sample.prompts=[]", "--optim.warmup_steps=0", "--optim.schedule=constant", "--data.path=task:calculator:1",
]  # fmt: skip


@pytest.mark.slow
def test_a_run_learns_from_completions_that_call_the_calculator(tmp_path):
    """After a little training on conversations, some completions call it. Their first ratios are exactly 1."""
    chat = [*SIZES, "--data.source=chat", "--data.packing=true", f"--run.dir={tmp_path}/chat", "--optim.lr=1e-2"]
    main(parse_config([*chat, "--train.steps=160", "--optim.name=muon"]))
    flags = ["--data.source=prompts", "--rl.turns=2", "--rl.tokens=24", "--train.steps=3", "--optim.lr=1e-3"]
    main(parse_config([*SIZES, *flags, f"--run.init_from={tmp_path}/chat", f"--run.dir={tmp_path}/rl"]))
    records = [json.loads(line) for line in (tmp_path / "rl" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "grad_norm" in record]
    assert [(record["ratio_min"], record["ratio_max"]) for record in steps] == [(1, 1)] * 3
    assert all(1 < record["turns"] <= 2 for record in steps), [record["turns"] for record in steps]
    assert all(record["sampler_difference"] < 1e-3 for record in steps)
