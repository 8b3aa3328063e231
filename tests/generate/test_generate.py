"""Compares the KV cache with the uncached forward pass, samplers with NumPy, and beam search with brute force."""

import dataclasses
import functools
import io
import itertools
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy
import test_meshes
from families import DELTA, EXPERTS, FAMILIES, NEAR, SPARSE, STATE_SPACE

from jaxstack import families
from jaxstack.checkpoint import run_dir as rundir
from jaxstack.checkpoint import verify
from jaxstack.checkpoint.store import Checkpoints
from jaxstack.cli.parser import execute
from jaxstack.config import (
    Config,
    ConfigError,
    DataConfig,
    KernelsConfig,
    ModelConfig,
    PipelineConfig,
    RunConfig,
    SampleConfig,
)
from jaxstack.data import Dataset, Tokens
from jaxstack.data.dataset import Source
from jaxstack.data.tokenizers import ByteTokenizer
from jaxstack.families.context import make_context
from jaxstack.generate import beam_search, decode, engine, sampling
from jaxstack.generate.conversation import Conversation
from jaxstack.generate.engine import Engine, Programs
from jaxstack.generate.kv_cache import CachedDecoder
from jaxstack.generate.speculative import Speculation
from jaxstack.loaded.trained_run import TrainedRun
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.models.ops import Ops
from jaxstack.planner import generation_memory, memory
from jaxstack.sharding import make_mesh
from jaxstack.training.services import init_from
from jaxstack.training.state import Recipe, abstract_state, make_state

MODELS = FAMILIES | NEAR | EXPERTS | SPARSE | DELTA | STATE_SPACE
PROMPTS = [[1, 2, 3], [5], [7, 8, 9, 10, 11, 12, 13]]  # 12 more tokens let windows of 6 tokens slide
GREEDY = SampleConfig(tokens=12, temperature=0)
SAMPLED = SampleConfig(tokens=12, temperature=1, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.2)
UNROLLED = Context(ops=Ops(decode="unrolled"))
QUICK = [
    ("gpt2", "scan"),
    ("gemma2", "unrolled"),
    ("deepseek", "scan"),
    ("capacity", "unrolled"),
    ("latent", "scan"),
    ("dense_first", "scan"),
    ("gpt_oss", "unrolled"),
    ("mamba2", "scan"),
]
SLOW = [("llama3", "unrolled"), ("qwen3", "scan"), ("mixtral", "unrolled"), ("domain", "scan"), ("timestep", "scan")]
SLOW += [("cohere2", "unrolled"), ("olmo2", "scan"), ("granite", "unrolled"), ("qwen2_moe", "scan")]
SLOW += [("every_second", "unrolled"), ("listed", "scan")]
SLOW += [("latent", "unrolled"), ("qwen3_next", "unrolled"), ("delta_dense", "scan")]
SLOW += [("olmo", "scan"), ("apertus", "unrolled"), ("gptj", "unrolled")]
SLOW += [("hybrid", "unrolled"), ("hybrid_moe", "scan")]
"""One form for each model. The streams below have the other one."""


MATRIX = pytest.mark.matrix


def slow(cases: list[Any]) -> list[Any]:
    return [pytest.param(*case, marks=MATRIX) for case in cases]


@functools.cache
def values_of(cfg: ModelConfig) -> Any:
    """Returns parameters with varied norms and biases. With the initial ones, a text would repeat a single token."""
    leaves, tree = jax.tree.flatten(params.init(jax.random.key(0), families.spec(cfg)))
    rng = np.random.default_rng(1)
    return jax.tree.unflatten(tree, [leaf + rng.normal(0, 0.1, leaf.shape).astype(np.float32) for leaf in leaves])


def gate_of(cfg: ModelConfig) -> int | None:
    return 1 if cfg.moe.router in ("domain", "timestep") else None


@pytest.mark.parametrize(
    ("platform", "cfg", "kernels", "expected"),
    [
        ("gpu", ModelConfig(), {}, "unrolled"),  # a loop would copy every layer's weights for every token
        ("gpu", EXPERTS["mixtral"], {"moe": "grouped"}, "scan"),  # takes minutes to compile unrolled
        ("gpu", EXPERTS["mixtral"], {"moe": "grouped", "decode": "unrolled"}, "unrolled"),
        ("gpu", ModelConfig(num_layers=60), {}, "scan"),
        ("cpu", EXPERTS["mixtral"], {}, "unrolled"),
        ("tpu", ModelConfig(), {}, "scan"),
    ],
)
def test_how_a_new_token_runs_through_the_layers(platform, cfg, kernels, expected):
    run = Config(model=replace(cfg, vocab_size=256), kernels=KernelsConfig(**kernels))
    assert memory.context(run, 1, platform).ops.decode == expected


def assert_greedy(cfg: ModelConfig, prompts: list[list[int]], tokens: int, form: str) -> None:
    """Checks that every token is the likeliest one in the uncached forward pass."""
    values, gate = values_of(cfg), gate_of(cfg)
    sample = replace(GREEDY, tokens=tokens)
    rows = decode.generate(cfg, values, prompts, sample, gate=gate, ctx=Context(ops=Ops(decode=form)))
    whole = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, text in zip(whole, rows, strict=True):
        row[: len(text)] = text
    gates = None if gate is None else jnp.full_like(whole, gate)
    logits, _ = families.forward(decode.dropless(cfg), values, whole, gate_ids=gates)  # rows are aligned left here
    for prompt, text, scores in zip(prompts, rows, np.asarray(logits), strict=True):
        assert len(text) == len(prompt) + tokens
        assert text[: len(prompt)] == prompt
        assert text[len(prompt) :] == scores[len(prompt) - 1 : len(text) - 1].argmax(-1).tolist()


@pytest.mark.matrix(quick=["gemma2"])
@pytest.mark.parametrize(("name", "form"), [*QUICK, *slow(SLOW)])
def test_every_greedy_token_is_the_likeliest_of_the_uncached_forward(name, form):
    assert_greedy(MODELS[name], PROMPTS, GREEDY.tokens, form)


@pytest.mark.matrix(quick=["windows1-tokens1-scan"])
@pytest.mark.parametrize("form", ["scan", "unrolled"])
@pytest.mark.parametrize(
    ("windows", "tokens"),
    [((1, 6), [1, 5]), ((64, 130), [63, 129]), ((150, 0), [149, 168]), ((1000, 129), [168, 128])],
)
def test_a_layer_holds_what_its_window_sees(windows, tokens, form):
    """Tests windows within the 128 slots of the prompts, beyond them, and beyond all 168 slots.

    A cache entry for the newest token is not needed.
    """
    cfg = replace(FAMILIES["llama3"], windows=windows)
    prompts = [[1, 2, 3], np.random.default_rng(0).integers(0, cfg.vocab, 100).tolist()]
    assert_greedy(cfg, prompts, 40, form)

    def held(prompts, first):
        model = CachedDecoder.create(
            cfg, values_of(cfg), Context(ops=Ops(decode=form)), gate=None, vocabulary=61, first=first, num_slots=168
        )
        return model.prefill(prompts)[1]

    cache = jax.eval_shape(held, jax.ShapeDtypeStruct((2, 128), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32))
    (blocks,) = cache if form == "unrolled" else [cache]
    assert [block["keys"].shape[-1] for block in blocks] == tokens


def test_a_token_on_a_cpu_reads_head_and_cache_in_place(monkeypatch):
    """The compiled program copies and transposes no cache, here of 64 + 12 slots, and the tied table once."""
    cfg, compiled, jit = MODELS["gemma2"], [], decode.jit_on_mesh
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(decode, "jit_on_mesh", lambda *a, **how: compiled.append(jit(*a, **how)))
    decode.make_generate(cfg, GREEDY, ctx=UNROLLED)
    rows = np.zeros((1, 64), np.int32), np.zeros(1, np.int32), np.zeros((1, 2), np.uint32)
    lowered = compiled[0].lower(values_of(cfg), *rows, np.uint32(0))
    shapes = f"{cfg.vocab}x{cfg.d_model}xf32>) -> tensor<{cfg.d_model}x{cfg.vocab}xf32>"
    assert len(re.findall("stablehlo.transpose.*" + re.escape(shapes), lowered.as_text())) == 1
    text = lowered.compile().as_text()
    assert re.search(r" f32\[[0-9,]*\b76\b[0-9,]*\].* dynamic-update-slice\(", text)
    assert not re.findall(r" f32\[[0-9,]*\b76\b[0-9,]*\]\S* (?:copy|transpose)\(.*", text)


@pytest.mark.matrix
@pytest.mark.parametrize("name", MODELS)
def test_a_sampled_text_follows_from_its_prompt_and_seed_alone(name):
    cfg = MODELS[name]
    how: dict[str, Any] = {"seed": 3, "gate": gate_of(cfg)}
    prompts = [*PROMPTS, PROMPTS[1]]
    rows = decode.generate(cfg, values_of(cfg), prompts, SAMPLED, **how)
    assert rows == decode.generate_uncached(cfg, values_of(cfg), prompts, SAMPLED, window=32, **how)
    assert rows[1] != rows[3]  # an equal prompt gives another sample
    run = decode.make_generate(cfg, SAMPLED, gate=gate_of(cfg))
    for prompt, text in zip(PROMPTS, rows, strict=False):
        assert run(values_of(cfg), [prompt], 3) == [text]
    assert run(values_of(cfg), PROMPTS[:1], 4) != rows[:1]


def joined(prompts: list[list[int]], parts: Any) -> list[list[int]]:
    """Returns the prompts with the tokens that a stream adds to them."""
    rows = [list(prompt) for prompt in prompts]
    for part in parts:
        for row, new in zip(rows, part, strict=True):
            row += new
    return rows


def assert_streams(cfg: ModelConfig, values: Any, sample: SampleConfig, **options: Any) -> None:
    """Checks that a stream, and the replies of a conversation, have the tokens of `generate`."""
    prompts, stop = [*PROMPTS, PROMPTS[1]], (9,)
    how: dict[str, Any] = {"stop": stop, "seed": 3} | options
    ready = Engine.create(cfg, values, **options)
    rows = decode.generate(cfg, values, prompts, sample, **how)
    assert joined(prompts, decode.stream(ready, prompts, sample, stop=stop, seed=3)) == rows

    conversation = Conversation(ready, sample, context=45, stop=stop, seed=3)
    text = PROMPTS[2]
    for turn, added in enumerate([[4, 5], [6] * 3, None, [1]]):
        (expected,) = decode.generate(cfg, values, [text], sample, **how)
        expected = expected[:45]
        assert joined([text], ([part] for part in conversation.reply(text))) == [expected], turn
        assert conversation.tokens == expected[:-1], "the newest token is not in the cache yet"
        text = [*text[:5], 8, 7, 6] if added is None else [*expected, *added]  # the third turn goes back
    with pytest.raises(ConfigError, match="the text has 45 tokens and the context has 45"):
        next(conversation.reply([1] * 45))


OTHER = {"scan": "unrolled", "unrolled": "scan"}
STREAMED = [("gemma2", "scan"), ("capacity", "scan")]
MORE_STREAMED = [(name, OTHER[form]) for name, form in QUICK + SLOW if name not in dict(STREAMED)]


@pytest.mark.parametrize(("name", "form"), slow([*STREAMED, *MORE_STREAMED]))
def test_streams_and_conversations_have_the_tokens_of_one_call(name, form):
    cfg = MODELS[name]
    assert_streams(cfg, values_of(cfg), SAMPLED, gate=gate_of(cfg), ctx=Context(ops=Ops(decode=form)))


def test_a_conversation_reads_only_what_is_new(monkeypatch):
    cfg, read = FAMILIES["llama3"], []
    append = Programs.append
    monkeypatch.setattr(Programs, "append", lambda *a: read.append((int(a[-2][0]), int(a[-2][1]))) or append(*a))
    conversation = Conversation(Engine.create(cfg, values_of(cfg)), replace(GREEDY, tokens=4), context=150)
    prompt = [*range(60), *range(10)]
    (text,) = joined([prompt], ([part] for part in conversation.reply(prompt)))
    list(conversation.reply([*text, 1, 2]))
    list(conversation.reply([*text[:10], 7]))
    # 70 tokens in blocks of 64; the newest reply token and two more; and what follows the common beginning.
    assert read == [(64, 0), (6, 64), (3, 73), (1, 10)]


def on_mesh(name: str, mesh: dict[str, int], **changes: Any) -> tuple[ModelConfig, Any, dict[str, Any]]:
    """Returns a model with changed keys, its parameters on a mesh, and the options of `generate`."""
    cfg = test_meshes.config({"deep": "gemma2", "tall": "llama3"}.get(name, name), mesh)
    cfg = replace(cfg, model=replace(cfg.model, **changes))
    if name == "tall":  # stages with unequal numbers of layers, so that some slots are empty
        cfg = replace(cfg, model=replace(cfg.model, num_layers=6))
    if name == "deep":  # windows, and two chunks per stage, so that rows are not in the order of the layers
        chunks = PipelineConfig(schedule="interleaved_1f1b", chunks=2) if "pipe" in mesh else PipelineConfig()
        cfg = replace(cfg, model=replace(cfg.model, num_layers=8), pipeline=chunks)
    devices = jax.devices()[: math.prod(cfg.mesh.sizes.values())]
    ctx = make_context(cfg, make_mesh(cfg.mesh, test_meshes.BATCH, devices))
    values = make_state(Recipe.of(cfg), ctx, abstract_state(Recipe.of(cfg), ctx)).params
    values = jax.tree.map(lambda a: 4 * a, values)  # so that logits differ by more than rounding
    return cfg.model, values, {"gate": 1 if cfg.model.moe.router == "domain" else None, "ctx": ctx}


MESH_STREAMS = [
    ("llama3", {"data": 2, "tensor": 2}),
    ("gpt2", {"pipe": 2, "tensor": 2}),
    ("softmax", {"expert": 4, "tensor": 2}),
    ("gemma2", {"fsdp": 4, "tensor": 2}),
    ("llama3", {"context": 2, "data": 2}),
    ("deep", {"pipe": 2, "data": 2}),
    ("latent", {"data": 2, "tensor": 2}),
    ("latent", {"pipe": 2, "tensor": 2}),
    ("dense_first", {"data": 2, "expert": 2, "tensor": 2}),
    ("listed", {"data": 2, "expert": 2, "tensor": 2}),
    ("qwen3_next", {"data": 2, "expert": 2, "tensor": 2}),
    ("gpt_oss", {"expert": 2, "tensor": 2}),
    ("gpt_oss", {"fsdp": 2, "tensor": 2}),
]


@pytest.mark.parametrize(("name", "mesh"), slow(MESH_STREAMS))
def test_streams_and_conversations_on_a_mesh(name, mesh):
    cfg, values, options = on_mesh(name, mesh)
    assert_streams(cfg, values, SAMPLED, **options)


BEAMS = [(3, 1.0, (0,)), (4, 0.0, (2,)), (3, -1.0, (1, 3)), (4, 2.0, (4,)), (3, 1.0, ())]


@pytest.mark.parametrize(("tokens", "penalty", "stop"), [*BEAMS[:1], *slow(BEAMS[1:])])
def test_with_beams_for_every_beginning_the_text_is_the_best_of_all(tokens, penalty, stop):
    cfg = replace(FAMILIES["llama3"], vocab_size=5)
    prompts = [[1, 2, 3], [4]]
    sample = SampleConfig(tokens=tokens, temperature=0, beams=5 ** (tokens - 1), length_penalty=penalty)
    rows = decode.generate(cfg, values_of(cfg), prompts, sample, stop=stop, ctx=UNROLLED)
    assert rows == [best_of_all(cfg, prompt, tokens, penalty, stop) for prompt in prompts]


@pytest.mark.slow
def test_beams_take_their_states_along():
    cfg = replace(DELTA["delta_dense"], vocab_size=4)
    sample = SampleConfig(tokens=3, temperature=0, beams=16)
    rows = decode.generate(cfg, values_of(cfg), [[1, 2, 3], [0]], sample, stop=(3,))
    assert rows == [best_of_all(cfg, prompt, 3, 1.0, (3,)) for prompt in [[1, 2, 3], [0]]]


def test_what_drops_tokens_again_refuses_states():
    cfg = DELTA["delta_dense"]
    ready = Engine.create(cfg, values_of(cfg))
    with pytest.raises(ConfigError, match="every=3 has states, which cannot drop the tokens of a draft"):
        next(Speculation(ready, ready).stream([1], GREEDY))


def best_of_all(cfg: ModelConfig, prompt: list[int], tokens: int, penalty: float, stop: tuple[int, ...]) -> list[int]:
    texts = set()
    for text in itertools.product(range(cfg.vocab), repeat=tokens):
        texts.add(text[: next((i + 1 for i, token in enumerate(text) if token in stop), tokens)])
    ordered = sorted(texts)
    rows = np.asarray([[*prompt, *text, *[0] * (tokens - len(text))] for text in ordered], np.int32)
    logits = np.asarray(families.forward(cfg, values_of(cfg), rows)[0], np.float64)[:, len(prompt) - 1 :]
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    worth = [
        sum(row[i, token] for i, token in enumerate(text)) / len(text) ** penalty
        for row, text in zip(logs, ordered, strict=True)
    ]
    return [*prompt, *ordered[int(np.argmax(worth))]]


@pytest.mark.slow
@dataclasses.dataclass(frozen=True)
class Chain:
    """Replaces the model by a Markov chain. Its first token has the probabilities of the last row of the table."""

    first: jax.Array
    ctx: Context
    table: jax.Array

    def prefill(self, tokens):
        rows = len(tokens)
        return jnp.log(jnp.tile(self.table[-1], (rows, 1))), jnp.zeros((rows, 1, 1, 1))

    def decode_token(self, last, slot, cache):
        return jnp.log(self.table[last]), cache


@pytest.mark.parametrize(
    ("first", "beams", "penalty", "text"),
    [
        # The likelihood of 0 is 0.5, that of 1 0 is 0.3 x 0.9.
        ([0.5, 0.3, 0.2], 1, 0.0, [0]),
        # ln 0.5 = -0.693 and ln 0.27 / 2 = -0.655: the beam continues after a text has ended.
        ([0.5, 0.3, 0.2], 1, 1.0, [1, 0]),
        ([0.5, 0.3, 0.2], 2, 1.0, [2, 2, 2]),  # ln (0.2 x 0.97 x 0.97) / 3 = -0.557
        ([0.5, 0.3, 0.2], 2, 0.0, [0]),
        # The value of 0 is -0.598. The bound ln 0.25 / 3 = -0.462 exceeds it, and the text reaches -0.482.
        ([0.55, 0.2, 0.25], 1, 1.0, [2, 2, 2]),
    ],
)
def test_beams_by_hand(first, beams, penalty, text):
    table = jnp.asarray([[0.4, 0.3, 0.3], [0.9, 0.05, 0.05], [0.01, 0.02, 0.97], first])
    chain = Chain(jnp.zeros(1, jnp.int32), Context(), table)
    sample = SampleConfig(tokens=3, beams=beams, temperature=0.0, length_penalty=penalty)
    best, lengths = jax.jit(lambda: beam_search.beam_search(chain, jnp.zeros((1, 1), jnp.int32), sample, [0]))()
    assert np.asarray(best)[0, : int(lengths[0])].tolist() == text


def test_eight_beams_find_no_text_worth_less_than_greedy():
    cfg = FAMILIES["llama3"]

    def likelihood(rows: list[list[int]]) -> np.ndarray:
        whole = np.asarray([row[-(GREEDY.tokens + 1) :] for row in rows], np.int32)
        logs = jax.nn.log_softmax(families.forward(cfg, values_of(cfg), whole)[0], axis=-1)
        return np.take_along_axis(np.asarray(logs)[:, :-1], whole[:, 1:, None], -1).sum((1, 2))

    prompts = [[1], [2], [3], [4]]
    greedy = decode.generate(cfg, values_of(cfg), prompts, GREEDY)
    wide = decode.generate(cfg, values_of(cfg), prompts, replace(GREEDY, beams=8))
    assert (likelihood(wide) >= likelihood(greedy) - 1e-4).all()  # rounding of float32 sums


LOGITS = np.asarray([2.0, 1.5, 0.3, -0.4, 1.9, -3.0, 0.0, 1.2])
USED = np.asarray([1, 0, 0, 1, 0, 0, 1, 0], bool)


def distribution(sample: SampleConfig) -> np.ndarray:
    """Returns the distribution that `sample` defines, in float64, step by step."""
    logits = LOGITS.copy()
    for i in np.flatnonzero(USED):
        logits[i] = logits[i] / sample.repetition_penalty if logits[i] > 0 else logits[i] * sample.repetition_penalty
    p = np.exp(logits / sample.temperature)
    order = np.argsort(-p)
    if sample.top_k:
        p[order[sample.top_k :]] = 0
    p /= p.sum()
    kept = 0.0
    for i in order:
        p[i], kept = (0.0 if kept >= sample.top_p else p[i]), kept + p[i]
    p[p < sample.min_p * p.max()] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "flags",
    [
        {"temperature": 0.7},
        {"temperature": 2.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.3, "min_p": 0.25},
        {"temperature": 1.0, "repetition_penalty": 1.7},
        {"temperature": 1.1, "top_k": 6, "top_p": 0.9, "min_p": 0.2, "repetition_penalty": 0.8},
    ],
    ids=lambda flags: " ".join(f"{k}={v}" for k, v in flags.items()),
)
def test_samples_follow_the_distribution(flags, rng):
    sample, draws = SampleConfig(**flags), 20000
    expected = distribution(sample)
    keys = jax.random.split(jax.random.key(rng.integers(2**31)), draws)
    rows = [jnp.broadcast_to(jnp.asarray(a), (draws, LOGITS.size)) for a in (LOGITS.astype(np.float32), USED)]
    counts = np.bincount(sampling.sample_tokens(*rows, keys, sample), minlength=LOGITS.size)
    assert not counts[expected == 0].any()
    there = expected > 0
    assert there.sum() < LOGITS.size or not flags.keys() & {"top_k", "top_p", "min_p"}
    # This fails once in a million runs.
    assert scipy.stats.chisquare(counts[there], expected[there] * draws).pvalue > 1e-6


def test_a_text_ends_with_its_first_stop_token_and_the_loop_with_the_last_text(monkeypatch):
    cfg = FAMILIES["llama3"]
    rows = decode.generate(cfg, values_of(cfg), PROMPTS, GREEDY)
    stop = [row[len(prompt) + 3] for prompt, row in zip(PROMPTS, rows, strict=True)]
    turns, choose = [], sampling.sample_tokens

    def counted(*arguments: Any) -> jax.Array:
        jax.debug.callback(lambda: turns.append(1))
        return choose(*arguments)

    monkeypatch.setattr(sampling, "sample_tokens", counted)
    stopped = decode.generate(cfg, values_of(cfg), PROMPTS, replace(GREEDY, tokens=50), stop=stop)
    jax.effects_barrier()
    lengths = []
    for prompt, row, short in zip(PROMPTS, rows, stopped, strict=True):
        length = next(i + 1 for i, token in enumerate(row[len(prompt) :]) if token in stop)
        assert short == row[: len(prompt) + length]
        lengths.append(length)
    assert len(turns) == max(lengths) <= 4


@pytest.mark.slow
def test_samples_of_a_run_never_see_more_than_it_was_trained_on():
    shape = replace(FAMILIES["gpt2"], vocab_size=256)  # a table of 64 positions
    cfg = Config(model=shape, data=DataConfig(seq_len=48), sample=replace(SAMPLED, prompts=("ab", "c"), tokens=30))
    prompts = [list(b"ab"), list(b"c")]
    short = decode.generate(shape, values_of(shape), prompts, cfg.sample, stop=(0,))
    nothing = Tokens(np.zeros(0, np.uint8), np.zeros(0, np.int64), np.zeros(0, np.int64), 256)
    dataset = Dataset(ByteTokenizer(), (Source("text", nothing, nothing, "", ""),))

    def samples(sample):
        return decode.sample_texts(shape, sample, 0, cfg.data.seq_len, values_of(shape), dataset, Context())

    assert samples(cfg.sample) == [
        (prompt, decode.decode_text(ByteTokenizer(), row)) for prompt, row in zip(("ab", "c"), short, strict=True)
    ]
    longer = replace(cfg, sample=replace(cfg.sample, tokens=80))
    for (_, text), beginning in zip(samples(longer.sample), short, strict=True):
        assert text.startswith(decode.decode_text(ByteTokenizer(), beginning)[:20])
    with pytest.raises(ConfigError, match="the limit of beam search"):
        replace(longer, sample=replace(longer.sample, temperature=0, repetition_penalty=1, beams=2))


def test_a_prompt_uses_its_own_tokens_and_no_padding():
    tokens, first = jnp.asarray([[4, 1, 2], [0, 3, 3]]), jnp.asarray([0, 1])
    used = engine.used_at_first(tokens, first, jnp.zeros((2, 5)), 1.5)
    assert [np.flatnonzero(row).tolist() for row in used] == [[1, 2, 4], [3]]


def test_ids_that_the_tokenizer_does_not_have_are_never_written():
    cfg = FAMILIES["llama3"]
    rows = decode.generate(cfg, values_of(cfg), [[1], [2]], replace(SAMPLED, tokens=30, temperature=5.0), vocabulary=7)
    assert max(token for row in rows for token in row) < 7


def test_what_cannot_be_continued_says_so():
    cfg = FAMILIES["gpt2"]  # its table has 64 positions
    for prompts, words in (
        ([], "no prompts"),
        ([[1], []], "prompt 2 of 2 is empty"),
        ([[61]], "has the id 61. Ids are below 61"),
        ([[1] * 60], "learned positions ends at 64"),
    ):
        with pytest.raises(ConfigError, match=words):
            decode.generate(cfg, values_of(cfg), prompts, GREEDY)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates a run with two checkpoints, of steps 3 and 5."""
    path = tmp_path_factory.mktemp("run")
    shape = replace(FAMILIES["gpt2"], vocab_size=256)
    cfg = Config(model=shape, run=RunConfig(dir=str(path)), data=DataConfig(seq_len=64))
    ctx = make_context(cfg, make_mesh(replace(cfg.mesh, data=1), 1, jax.devices()[:1]))
    rundir.write(cfg, ByteTokenizer().to_json())
    with Checkpoints(cfg.checkpoint, rundir.checkpoints(path)) as checkpoints:
        for number in (3, 5):
            state = make_state(Recipe.of(cfg)._replace(seed=number), ctx, abstract_state(Recipe.of(cfg), ctx))
            checkpoints.save(number, replace(state, params=jax.tree.map(lambda a: 4 * a, state.params)), {})
    return path


def test_only_parameters_are_verified_and_read(run_dir, monkeypatch):
    """Applies to the newest step and to a given step. The state of AdamW is two thirds of a checkpoint."""
    asked, changed = [], verify._content_corruption
    monkeypatch.setattr(
        verify, "_content_corruption", lambda path, tree: asked.append((path, tree)) or changed(path, tree)
    )
    cfg = init_from.find_source(str(run_dir), "run")
    ctx = make_context(cfg, make_mesh(replace(cfg.mesh, data=1), 1, jax.devices()[:1]))
    for number in (None, 3):
        init_from.restore_params(cfg, ctx, number)
    assert [path.name for path, _ in asked] == ["5", "3"]
    for _, tree in asked:
        assert {*jax.tree.leaves(tree.opt_state)} == {...}
        assert ... not in jax.tree.leaves(tree.params)


@pytest.mark.slow
def test_the_command_continues_what_a_run_has_learned(run_dir, capsys, monkeypatch):
    def text(*flags: str) -> str:
        execute(["generate", str(run_dir), "ab", "--sample.temperature=0", "--sample.tokens=8", *flags])
        return capsys.readouterr().out

    newest, older = text(), text("--step=3")
    assert newest.startswith("ab")
    assert newest != older
    assert text("--step=5", "--mesh.tensor=2", "--mesh.data=1") == newest
    create, computed = Engine.create, []
    with monkeypatch.context() as patched:
        patched.setattr(
            Engine, "create", lambda *a, ctx, **how: computed.append(ctx.dtype) or create(*a, ctx=ctx, **how)
        )
        text(), text("--dtype=bfloat16")
    assert computed == [jnp.float32, jnp.bfloat16]
    for flags in ([], ["--sample.rows=1"], [f"--draft={run_dir}", "--draft_tokens=2"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("ab\ncde\n"))
        execute(["generate", str(run_dir), "-", "--sample.temperature=0", "--sample.tokens=8", *flags])
        first, second = capsys.readouterr().out.split("\n---\n")
        assert first == newest.rstrip("\n")
        assert second.startswith("cde")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "x"], "nowhere is not a run directory"),
        (["RUN", ""], "prompt 1 of 1 is empty"),
        (["RUN", "x" * 60], "learned positions ends at 64"),
        (["RUN", "x", "--sample.top_p=1.5"], "sample.top_p=1.5 is out of range"),
        (["RUN", "x", "--sample.topk=3"], r"unknown key sample.topk\. Did you mean sample.top_k\?"),
        (["RUN", "x", "--train.dtype=bfloat16"], r"unknown key train.dtype\. Did you mean dtype\?"),
        (["RUN", "x", "--sample.beams=4"], "Use sample.temperature=0 and"),
        (["RUN", "x", "--step=4", "--sample.tokens=3"], "has no step 4. Use one of"),
        (["RUN", "x", "--stop=ab"], "is 2 tokens"),
        (["RUN", "x", "--chat"], "--chat needs a chat template, which .* does not have"),
        (["RUN", "x", "--draft=nowhere", "--sample.tokens=3"], "nowhere is not a run directory"),
        (["RUN", "x", "--draft", "RUN", "--sample.repetition_penalty=2", "--sample.tokens=3"], "does not fit a draft"),
        (["RUN"], "PROMPT is missing"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(run_dir, words, message):
    with pytest.raises(ConfigError, match=message) as raised:
        execute(["generate", *(str(run_dir) if word == "RUN" else word for word in words)])
    assert "\n" not in str(raised.value)


def test_memory_that_runs_out_is_explained(run_dir, monkeypatch):
    """Before anything is read, if parameters and cache exceed the memory; otherwise when the runtime says so."""

    def fail(*args: object, **options: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 17592186044416 bytes.")

    for size, early in ((1e4, True), (1e12, False)):
        monkeypatch.setattr(
            generation_memory, "room_of", lambda devices, size=size: memory.Room("this machine", size, size)
        )
        monkeypatch.setattr(TrainedRun, "open" if early else "stream_tokens", fail)
        with pytest.raises(ConfigError, match=r"1 prompt of up to 10 tokens with sample.tokens=8 need") as raised:
            execute(["generate", str(run_dir), "ab", "--sample.tokens=8"])
        assert raised.value.advice.startswith("What would help")
        assert (raised.value.__cause__ is None) == early
        monkeypatch.undo()


def test_a_mistake_ends_with_code_2(run_dir):
    words = [sys.executable, "-m", "jaxstack", "generate", str(run_dir), "x", "--sample.top_p=0"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("jaxstack generate: error: sample.top_p=0.0 is out of range.\nUse a number in (0, 1]")
    assert done.stderr.count("\n") <= 2
