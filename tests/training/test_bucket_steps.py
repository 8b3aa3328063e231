"""Batches of several lengths: loss and gradients are those of each document alone, and a length has one program."""

import dataclasses
import re
import signal
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_meshes as meshes
import test_train
from lines import lines, values

from jaxstack import families
from jaxstack.checkpoint import manifest
from jaxstack.config import Config, ConfigError, PipelineConfig
from jaxstack.data.buckets import BucketReader
from jaxstack.data.loader import bucket_sizes
from jaxstack.data.pairs import PairTokens
from jaxstack.data.tokens import Tokens
from jaxstack.families.context import make_context
from jaxstack.features.router_losses import Counts
from jaxstack.models import params
from jaxstack.models.context import Context
from jaxstack.planner import memory, mesh_search
from jaxstack.sharding import make_mesh
from jaxstack.training import losses
from jaxstack.training.services.compile_ahead import CompileAhead

SIZES = {8: (3, 8), 16: (9, 13), 32: (19, 32)}
"""Tokens of the documents in the rows of each length. Few are different, since each has a program of its own."""


def config(family: str, mesh: dict[str, Any], accum: int = 1, microbatches: int | None = None) -> Config:
    cfg = meshes.config(family, mesh, accum=accum)
    pipeline = PipelineConfig(microbatches=microbatches)
    return dataclasses.replace(cfg, pipeline=pipeline, data=dataclasses.replace(cfg.data, buckets=tuple(SIZES)))


def make_batch(cfg: Config, length: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The first batch of this length of random documents, pairs, or texts with labels."""
    model, number = cfg.model, list(SIZES).index(length)
    texts, pairs = bool(model.labels), model.family == "encoder_decoder"
    # Pairs have targets of half the length, and documents have one token more than a row.
    size_D = np.repeat(list(SIZES.values()), cfg.data.with_length(8).batch_size, axis=0).ravel() + (not texts)
    inputs_D = size_D - 1 if pairs else size_D
    targets_D = np.maximum(inputs_D // 2, 1) if pairs else 0 * size_D
    ends = np.cumsum(inputs_D + targets_D)
    starts = ends - inputs_D - targets_D
    ids = rng.integers(1, model.vocab, int(ends[-1])).astype(np.uint16)
    tokens = Tokens(ids, starts, ends, model.vocab, loss_mask=rng.random(ids.size) < 0.8)
    if texts:
        labels = np.where(tokens.loss_mask, rng.integers(0, len(model.labels), ids.size), -1).astype(np.int32)
        labels[starts], tokens.loss_mask[starts] = 1, True
        tokens = dataclasses.replace(tokens, labels=labels)
    if pairs:
        fields = {f.name: getattr(tokens, f.name) for f in dataclasses.fields(tokens)}
        tokens = PairTokens(**fields, middles=starts + inputs_D, lengths=(32, 16))
    reader = BucketReader([tokens], ["text"], [(0, (1.0,))], bucket_sizes(cfg.data), seed=1)
    index = next(k for k in range(100) if reader.row_figures(k)["bucket"] == reader.lengths[number])
    return reader.batches()[index]


def alone(real_BK: np.ndarray):
    """Builds the gradients of a batch from each of its rows alone, without padding; `real` counts both sides."""

    def make(cfg: Config, ctx: Context):
        ctx = dataclasses.replace(ctx, layout=dataclasses.replace(ctx.layout, mesh=None))
        spec, (term,) = families.spec(cfg.model), cfg.model.objective.terms

        def gradients(weights: params.Params, batch: dict[str, jax.Array], key: None):
            total = batch["loss_weights"].sum()
            rows = float(real_BK.shape[0])
            stacks = dict.fromkeys(families.of(cfg.model).stacks(cfg.model), total)
            counts = Counts(stacks, dict.fromkeys(stacks, rows))

            def objective(trained, frozen):
                loss, added = 0.0, 0.0
                for encoder, length in np.unique(real_BK, axis=0).tolist():
                    here = np.flatnonzero((real_BK == (encoder, length)).all(1))
                    cut = {n: a[here, : encoder if n.startswith("encoder_") else length] for n, a in batch.items()}

                    def one(row):
                        row = {name: a[None] for name, a in row.items()}
                        sums, aux = losses.loss_sums(cfg.model, params.combine(trained, frozen), row, ctx)
                        return sums[term.name], families.of(cfg.model).extras(cfg.model).loss(aux, counts, None)

                    sums, aux = jax.lax.map(one, cut)
                    loss, added = loss + sums.sum() / total, added + jnp.sum(aux)
                return loss + added, loss

            (_, loss), grads = jax.value_and_grad(objective, has_aux=True)(*params.partition(spec, weights))
            return loss, grads, {"tokens": total}

        return gradients

    return make


def compare(case: tuple[str, dict[str, Any], dict[str, Any]], length: int, rng, dtype: str = "float32"):
    """Returns both results: of each document alone on one device in float32, and of the batch on the mesh."""
    family, mesh, how = case
    cfg = config(family, mesh, **how)
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, dtype=dtype))
    batch = make_batch(cfg, length, rng)
    assert batch["loss_weights"].shape[0] == meshes.BATCH * meshes.SEQ // length
    learned = batch.get("segment_ids", batch["loss_weights"]) > 0
    real = learned.shape[1] - np.argmax(learned[:, ::-1], axis=1)
    encoder = (batch["encoder_segment_ids"] > 0).sum(1) if "encoder_segment_ids" in batch else real
    assert real.min() < learned.shape[1], "there must be padding"
    one = meshes.gradients(config(family, {}), 1, alone(np.stack([encoder, real], 1)), batch)
    return one, meshes.gradients(cfg, 1, batch=batch)


CASES = [
    (8, ("llama3", {"data": 2, "context": 2, "tensor": 2}, {})),
    (16, ("llama3", {"data": 2, "fsdp": 2}, {"accum": 2})),
    (8, ("softmax", {"expert": 2, "tensor": 2}, {})),
    (16, ("gpt2", {"pipe": 2, "fsdp": 2}, {"microbatches": 2})),
    (32, ("t5", {"fsdp": 2, "tensor": 2}, {})),
    (16, ("t5", {"pipe": 2, "data": 2}, {"microbatches": 2})),
    (8, ("bert_words", {"data": 2, "tensor": 2}, {})),
]


@pytest.mark.parametrize(
    ("length", "case"),
    [
        pytest.param(32, ("llama3", {"tensor": 2}, {}), id="tensor=2"),
        *(pytest.param(*c, id=f"{c[0]} {meshes.name_of(c[1])}", marks=meshes.MATRIX) for c in CASES),
    ],
)
def test_a_batch_has_the_loss_and_gradients_of_each_document_alone(case, length, rng):
    one, other = compare(case, length, rng)
    loss, gradient = meshes.errors(case[0], one, other)
    # float32 sums in another order; padding that is seen or counted is of the order of one
    assert loss < 1e-5
    assert gradient < 1e-5


@pytest.mark.matrix
def test_in_bfloat16_a_batch_is_near_each_document_alone_in_float32(rng):
    (_, exact, _), (_, short, _) = compare(("llama3", {"data": 2, "tensor": 2}, {}), 8, rng, "bfloat16")
    for path, g in exact.items():
        assert np.linalg.norm(short[path] - g) < 0.03 * np.linalg.norm(g), path


def ahead_of(cfg: Config, ctx: Context) -> CompileAhead:
    """Builds what compiles the steps of a run ahead."""
    return CompileAhead(cfg.data, families.batch_spec(cfg.model, cfg.data), ctx.layout.sharding(ctx.layout.batch))


def toy(cfg: Config, step, lengths) -> tuple[CompileAhead, Any, list[dict[str, np.ndarray]]]:
    """A jitted step that is compiled ahead for batches of three lengths, and such batches."""
    mesh = make_mesh(cfg.mesh, cfg.microbatch_size, jax.devices()[:1])
    ahead = ahead_of(cfg, make_context(cfg, mesh)).__enter__()
    first = jax.ShapeDtypeStruct((), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    run = ahead.wrap(jax.jit(step), first, lengths)
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    rng = np.random.default_rng(0)
    made = [jax.device_put(make_batch(cfg, length, rng), where) for length in SIZES]
    return ahead, run, made


def test_a_length_has_one_program_that_a_thread_compiles_before_it_is_needed():
    traced: list[tuple[int, str]] = []

    def step(first, batch):
        traced.append((batch["tokens"].shape[1], threading.current_thread().name))
        return first + batch["loss_weights"].sum()

    cfg = config("llama3", {})
    ahead, run, batches = toy(cfg, step, [16, 8])
    total = jnp.zeros(())
    for batch in [batches[1], batches[0], batches[1], batches[2], batches[0], batches[2]]:
        total = run(total, batch)
    assert [length for length, _ in traced] == [16, 8, 32], "in the order of first use; the last when it is needed"
    assert all(name.startswith("jaxstack-compile") for _, name in traced)
    assert len(ahead._programs) == 3, "none is compiled twice"
    assert float(total) == 2 * sum(float(batch["loss_weights"].sum()) for batch in batches)
    ahead.__exit__(None, None, None)
    plain = meshes.config("llama3", {})
    ctx = make_context(plain, make_mesh(plain.mesh, plain.microbatch_size, jax.devices()[:1]))
    function = jax.jit(step)
    assert ahead_of(plain, ctx).wrap(function, total, [32]) is function, "rows of one length"


def test_a_program_that_cannot_be_compiled_is_an_error_of_the_next_step():
    def step(first, batch):
        if batch["tokens"].shape[1] == 32:
            raise ConfigError("no room for 32 tokens")
        return first

    ahead, run, batches = toy(config("llama3", {}), step, [8, 32])

    def two_steps():
        run(jnp.zeros(()), batches[0])  # the thread may still be at it
        while not all(program.done() for program in ahead._programs):
            time.sleep(0.01)
        run(jnp.zeros(()), batches[0])

    with pytest.raises(ConfigError, match="no room for 32"):
        two_steps()
    ahead.__exit__(None, None, None)


def test_plans_are_for_the_longest_rows_which_need_the_most_memory():
    cfg = config("llama3", {"data": 2, "tensor": 2})
    found = memory.need(cfg, 4, "cpu")
    assert found == memory.need(meshes.config("llama3", {"data": 2, "tensor": 2}), 4, "cpu")
    auto = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, buckets="auto"))
    assert found == memory.need(auto, 4, "cpu"), "the text is not read"
    others = [dataclasses.replace(cfg, data=cfg.data.with_length(length)) for length in cfg.data.lengths]
    assert max(memory.need(other, 4, "cpu").formula for other in others) == found.formula
    assert mesh_search.smaller_batches(cfg.data) == [4, 2, 1]
    odd = dataclasses.replace(cfg.data, batch_size=12, seq_len=32, buckets=(24, 32))
    assert mesh_search.smaller_batches(odd) == [6, 3], "the tokens fill rows of 24"


@pytest.mark.matrix
def test_a_run_compiles_each_length_once_and_resumes_bit_for_bit(tmp_path):
    """Conversations in three buckets, on two devices: one run to the end, and one that is killed and resumed."""
    turn = '{{"prompt": "{}", "completion": "{}"}}\n'
    rng = np.random.default_rng(0)
    words = np.repeat([1, 12, 40], 100)[:, None] + rng.integers(0, 3, (300, 2))  # beside about 26 of the template
    (tmp_path / "chat.jsonl").write_text(
        "".join(turn.format("q" * a, "a" * b) for a, b in rng.permutation(words).tolist())
    )
    argv = [each for each in test_train.SMALL if "source" not in each and "seq_len" not in each]
    argv += [
        "--data.source=chat",
        f"--data.path={tmp_path / 'chat.jsonl'}",
        "--data.seq_len=128",
        "--data.batch_size=4",
    ]
    argv += [
        "--data.buckets=[32, 64, 128]",
        "--train.steps=24",
        "--train.eval_steps=8",
        "--mesh.data=2",
        *test_train.PLAIN,
    ]
    env = {"JAX_NUM_CPU_DEVICES": "2"}
    straight, again = tmp_path / "straight", tmp_path / "again"
    _, log = test_train.run(*argv, f"--run.dir={straight}", JAX_LOG_COMPILES="1", **env)
    compiled = re.findall(r"Finished XLA compilation of jit\((train_step|work)\)", log)
    assert sorted(compiled) == ["train_step"] * 3 + ["work"] * 3, "a program for each length of steps and evaluations"
    steps = [line for line in lines(straight) if "loss" in line]
    assert {line["bucket"] for line in steps} == {32, 64, 128}
    assert all(0 <= line["padding"] < 0.6 for line in steps)
    process = test_train.start(*argv, f"--run.dir={again}", **env)
    while not (again / "checkpoints" / "4" / manifest.NAME).is_file() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    out, _ = test_train.run(*argv, f"--run.dir={again}", **env)
    assert "resumed from step " in out
    assert values(again) == values(straight)
    ends = [test_train.arrays(folder / "checkpoints" / "24") for folder in (straight, again)]
    for (path, a), (other, b) in zip(*ends, strict=True):
        assert path == other
        assert np.array_equal(a, b), path
