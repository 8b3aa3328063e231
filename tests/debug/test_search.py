"""Faults of many kinds: the search names the operation, the layer, the line and the direction.

Each fault is a function of the code that is replaced by one that fails in a certain layer, or a poisoned parameter.
The line that must be found is the one that ends with a comment such as `# fault exp`. More faults are in
`test_faults_on_meshes.py`.
"""

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_meshes as meshes
from jax.sharding import AxisType, PartitionSpec

from jaxstack import families
from jaxstack.cli.parser import execute
from jaxstack.config import ConfigError
from jaxstack.debug import describe, replay, rules, search
from jaxstack.debug.guide import RunGuide
from jaxstack.debug.statistics import Statistics, is_bad, statistics
from jaxstack.debug.way import Guide
from jaxstack.families.context import make_context
from jaxstack.models import params
from jaxstack.models.blocks import Stack
from jaxstack.models.context import Context
from jaxstack.models.ops import Ops, implementations
from jaxstack.sharding import make_mesh
from jaxstack.training.assemble import jit_train_step
from jaxstack.training.state import Recipe, abstract_state

HERE = str(Path(__file__))


def line_of(text, file=HERE):
    """Returns the number of the only line of a file with this text."""
    (number,) = [i for i, line in enumerate(Path(file).read_text().splitlines(), 1) if line.endswith(text)]
    return number


@jax.custom_vjp
def bad_backward(x):
    return x


def _forward(x):
    return x, jnp.zeros(())


def _backward(zero, g):
    return (g / zero,)  # fault backward


bad_backward.defvjp(_forward, _backward)


@jax.custom_jvp
def bad_tangent(x):
    return jnp.abs(x)


@bad_tangent.defjvp
def _tangent(primals, tangents):
    (x,), (t,) = primals, tangents
    return jnp.abs(x), t * jnp.log(jnp.zeros_like(x))  # fault tangent


def in_layer(number, f, otherwise):
    """Counts the layers by the first value of their norm, which the test has set to the number of the layer."""

    def chosen(p, x):
        return jax.lax.cond(p["attention_norm"]["scale"].ravel()[0] == 100 + number, f, otherwise, x)

    return chosen


def wrap_block(monkeypatch, number, f):
    """Applies `f` to what the block of one layer returns."""
    real = Stack.run_layer

    def run_layer(stack, cfg, ctx, p, x, *rest, **how):
        x, values = real(stack, cfg, ctx, p, x, *rest, **how)
        return in_layer(number, f, lambda x: x)(p, x), values

    monkeypatch.setattr(Stack, "run_layer", run_layer)


def overflow(x):
    return jnp.exp(jnp.abs(x) * 0 + 200.0).astype(x.dtype) * x  # fault exp


def backward(x):
    return bad_backward(x)


def tangent(x):
    return bad_tangent(x)


def exponential(x):
    return x + jnp.exp(jnp.abs(x))  # fault large


def divide(x):
    return x / (x - x)  # fault divide


FAULTS = {
    # name: (family, what a layer does, text of the line, direction)
    "overflow of exp": ("llama3", overflow, "# fault exp", False),
    "custom backward pass": ("bert", backward, "# fault backward", True),
    "custom tangent": ("modernbert", tangent, "# fault tangent", None),
    "division in a unit of layers": ("switch_2", divide, "# fault divide", False),
    "division in a trunk": ("branches", divide, "# fault divide", False),
}


def setting(kind, **how):
    """Returns configuration, context, parameters and batch; the first norm of layer i begins with 100 + i."""
    cfg = meshes.config(kind, {}, **how)
    ctx = Context(ops=Ops(**implementations("cpu")))
    values = params.init(jax.random.key(0), families.spec(cfg.model))

    def numbered(path, a):
        if "attention_norm/scale" not in path:
            return a
        _, _, inner = path.partition("layer_")  # in a step with two layers
        numbers = 100.0 + (2 * np.arange(len(a)) + int(inner[0]) if inner else np.arange(len(a)))
        return a.at[:, 0].set(jnp.asarray(numbers, a.dtype))

    values = jax.tree_util.tree_map_with_path(lambda keys, a: numbered("/".join(str(k.key) for k in keys), a), values)
    return cfg, ctx, values, meshes.random_batch(0, cfg.data.packing, cfg.model, cfg.data.batch_size)


@pytest.mark.matrix
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_layer_is_found(fault, monkeypatch):
    kind, f, text, backward = FAULTS[fault]
    wrap_block(monkeypatch, 1, f)
    cfg, ctx, values, batch = setting(kind)
    found = replay.explain(cfg, ctx, values, batch)
    assert found is not None
    assert found.frames[0][:2] == (HERE, line_of(text))
    assert backward in (None, bool(found.result))
    where = describe.place(found, RunGuide(cfg.model, cfg.train.grad_accum))
    of = {"switch_2": " of encoder", "branches": " of trunk"}.get(kind, "")
    assert f"layer 1{of} (2 of" in where
    assert not any(map(is_bad, found.inputs))
    assert any(map(is_bad, found.outputs))


def test_small_programs():
    """Each has values that are bad on purpose, and one operation that is at fault."""

    def explain(f, *x):
        found = search.find(jax.make_jaxpr(f)(*x), x)
        return found and (found.equation.primitive.name, [loop.step for loop in found.loops], found.result)

    x = jnp.array([1.0, 2.0, 3.0])
    masked = jnp.where(x > 9, x, -jnp.inf)  # all scores of a row are masked
    assert explain(lambda m, x: jax.nn.softmax(jnp.where(m, x, -jnp.inf)), x > 2, x) is None
    assert explain(lambda m, x: jnp.where(m, x, -jnp.inf) - masked.max(), x > 9, x) == ("sub", [], 0)
    assert explain(lambda x: (x.sum(), jnp.log(x - 1).sum()), x) == ("log", [], 1)
    assert explain(lambda x: jnp.exp(x * 100).sum() - jnp.exp(x * 100).sum(), x)[0] == "exp"

    def running(largest, x):  # begins with -inf, and is finite from the second step on
        largest = jnp.maximum(largest, jnp.where(x > 1, x, -jnp.inf))
        return largest, jnp.sqrt(2.5 - x)

    assert explain(lambda x: jax.lax.scan(running, -jnp.inf, x), x) == ("sqrt", [2], 1)
    assert explain(lambda x: jax.lax.scan(running, -jnp.inf, x[:0]), x) is None  # no step
    # From the end, products are 3, 6e20 and infinite; from the beginning the last one would be.
    factors = jnp.array([1e30, 2e20, 3.0, 1.0])
    assert explain(lambda x: jax.lax.scan(lambda c, f: (c * f, c), 1.0, x, reverse=True), factors) == ("mul", [0], 0)
    grows = lambda x: jax.lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * 1e10), (0, x))[1]  # noqa: E731
    assert explain(grows, 1.0) == ("mul", [3], 0)
    chosen = lambda x: jax.lax.cond(x > 0, lambda x: x / (x - x), lambda x: x, x)  # noqa: E731
    assert explain(chosen, 1.0) == ("div", [], 0)
    assert explain(chosen, -1.0) is None


def test_small_programs_on_a_mesh():
    """Programs in which devices differ: in their values, branches and turns of a loop, or only in what they sum."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4], axis_types=(AxisType.Auto,) * 2)
    both = PartitionSpec(("a", "b"))

    def explain(f, x):
        program = jax.shard_map(f, mesh=mesh, in_specs=both, out_specs=both)
        found = search.find(jax.make_jaxpr(lambda x: program(x) + 1)(x), (x,))  # not the shard_map alone
        if found is None:
            return None
        assert any(map(is_bad, found.outputs))
        return (
            found.equation.primitive.name,
            found.device,
            found.bad.astype(int).tolist(),
            [p.step for p in found.loops],
        )

    x = jnp.array([1.0, 2.0, 3.0, 0.0])  # by device (a, b)
    assert explain(lambda x: x * 2, x) is None
    assert explain(lambda x: 1 / x, x) == ("div", {"a": 1, "b": 1}, [[0, 0], [0, 1]], [])

    # Each device takes its own branch; only that of the first two is wrong, which all others would find bad too.
    def chosen(x):
        return jax.lax.cond((x < 3)[0] & (x > 0)[0], lambda x: x / (x - x), lambda x: x + jnp.log(x + 1), x)

    assert explain(chosen, x) == ("div", {"a": 0, "b": 0}, [[1, 1], [0, 0]], [])

    # Device i makes x[i] turns. Three are too many, and turns that a device does not make do not count.
    def grows(x):
        def turn(carry):
            return carry[0] + 1, carry[1], carry[2] * 1e15

        return jax.lax.while_loop(lambda carry: (carry[0] < carry[1])[0], turn, (x * 0, x, x + 1))[2]

    assert explain(grows, x) == ("mul", {"a": 1, "b": 0}, [[0, 0], [1, 0]], [2])
    # Finite on each device, and too large together; equal along b.
    assert explain(lambda x: x + jax.lax.psum(x * 0 + 2e38, "a"), x) == (
        "psum_invariant",
        {"a": 0, "b": 0},
        [[1] * 2] * 2,
        [],
    )
    scanned = lambda x: jax.lax.scan(lambda c, f: (c * f, None), x, jnp.array([1e20, 1.5e18, 1.0]))[0]  # noqa: E731
    assert explain(scanned, x) == ("mul", {"a": 1, "b": 0}, [[0, 0], [1, 0]], [1])


def test_the_work_of_a_loop_of_one_step_is_among_the_equations_around_it():
    """So it is not run again. A loop that the guide follows is kept, and so is one with a result for each step."""

    def explain(f, guide=None):
        rows = jnp.array([[1.0, 2.0, 0.0]])
        found = search.find(jax.make_jaxpr(f)(rows), (rows,), guide)
        return found.equation.primitive.name, [loop.step for loop in found.loops], found.scopes, found.inputs

    class Followed(Guide):
        def is_followed(self, loop):
            return loop.length == 1

    def add(sums, row):
        with jax.named_scope("inner"):
            return sums + jnp.log(row - 1), None

    def total(rows):
        with jax.named_scope("outer"):
            return jax.lax.scan(add, jnp.zeros(3), rows)[0] * 2

    name, steps, scopes, (read,) = explain(total)
    assert (name, steps, scopes) == ("log", [], "/outer/inner")
    assert read.tolist() == [0, 1, -1]
    assert explain(total, Followed())[:2] == ("log", [0])
    assert explain(lambda rows: total(jnp.concatenate([rows, rows])))[:2] == ("log", [0])
    each = lambda rows: jax.lax.scan(lambda c, row: (c, jnp.log(row - 1)), 0.0, rows)[1]  # noqa: E731
    assert explain(each)[:2] == ("log", [0])
    name, steps, _, (read,) = explain(lambda rows: total(total(rows + 1)[None]))  # both loops have the same body
    assert (name, steps, read.tolist()) == ("log", [], [1, 2, 0])


def test_a_loop_runs_once_and_its_bad_step_once_more():
    """So the search takes less than two runs of a step. It goes into later steps if the first bad values are meant."""
    ran = []

    def explain(step, *x, reverse=False):
        def counted(carry, x):
            jax.debug.callback(lambda: ran.append(1))
            return step(carry, x)

        ran.clear()
        found = search.find(jax.make_jaxpr(lambda *x: jax.lax.scan(counted, *x, reverse=reverse))(*x), x)
        jax.effects_barrier()
        return found and (found.equation.primitive.name, [loop.step for loop in found.loops], len(ran))

    x = jnp.array([3.0, 2.0, 1.0, 4.0, 5.0, 1.0])
    assert explain(lambda c, x: (c + jnp.log(x - 1), c), 0.0, x) == ("log", [2], 7)
    assert explain(lambda c, x: (c + jnp.log(x - 1), c), 0.0, x, reverse=True) == ("log", [5], 7)
    assert explain(lambda c, x: (c, jnp.log(x - 1)), 0.0, x) == ("log", [2], 7)
    assert explain(lambda c, x: (c, x), 0.0, x) is None
    assert len(ran) == 6
    # The first entry of each result is a mask; an operation makes NaN of finite values in the fourth step.
    masked = lambda c, x: (c, jnp.array([-jnp.inf, 0]) + jnp.sqrt(3.5 - x))  # noqa: E731
    assert explain(masked, 0.0, x)[:2] == ("sqrt", [3])
    # What is carried is infinite from the beginning, and NaN after the fourth step.
    assert explain(lambda c, x: (c + jnp.exp(25 * jnp.maximum(x, 2)), c), -jnp.inf, x)[:2] == ("exp", [3])
    # A result is infinite in each step, and not by a constant alone in the fifth: nothing is bad for the first time.
    grows = lambda c, x: (c + 1, jnp.stack([jnp.where(c > 3.5, jnp.exp(c * 50), 0), -jnp.inf]))  # noqa: E731
    assert explain(grows, 0.0, x)[:2] == ("exp", [4])


def test_operations_are_repeated_on_their_devices(tmp_path):
    """A sum over devices is saved with the inputs of all devices, and another operation with those of one."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4], axis_types=(AxisType.Auto,) * 2)
    both, x = PartitionSpec(("a", "b")), jnp.array([1.0, 2.0, 3.0, 0.0])
    for name, f, shapes in (
        ("sum", lambda x: x + jax.lax.psum(x * 1e38, "a"), [(4, 1)]),
        ("one", lambda x: x / (x * 0), [(1,), (1,)]),
    ):
        program = jax.shard_map(f, mesh=mesh, in_specs=both, out_specs=both)
        found = search.find(jax.make_jaxpr(program)(x), (x,))
        assert replay.needs_mesh(found) == (name == "sum")
        assert replay.save(found, tmp_path / name)
        inputs, outputs = replay.repeat(tmp_path / name)
        assert [a.shape for a in inputs] == shapes
        assert any(map(is_bad, outputs))


def test_equations_of_rules_have_their_own_lines():
    """In a loop and in a branch: first the line of the rule, then that of the call."""

    def loss(x):
        return jax.lax.scan(lambda c, _: (jax.lax.cond(c[0] > 0, backward, tangent, c), None), x, None, length=2)[
            0
        ].sum()

    def explain(x):
        with rules.own_lines():
            traced = jax.make_jaxpr(jax.grad(loss))(x)
        return [frame[:2] for frame in search.find(traced, (x,)).frames][:2]

    calls = [line_of(f"return bad_{name}(x)") for name in ("backward", "tangent")]
    assert explain(jnp.ones(3)) == [(HERE, line_of("# fault backward")), (HERE, calls[0])]
    assert explain(-jnp.ones(3))[0] == (HERE, line_of("# fault tangent"))
    assert jax.custom_vjp.__call__.__module__.startswith("jax.")


@pytest.mark.matrix
def test_masks_and_padding_are_no_faults():
    cfg, ctx, values, batch = setting("gemma2", packing=True)
    assert replay.explain(cfg, ctx, values, batch) is None


@pytest.mark.matrix
def test_faults_outside_of_layers_and_in_bfloat16(monkeypatch):
    """A batch without learned tokens, and an overflow in bfloat16 in the rows of the second microbatch alone."""
    cfg, ctx, values, batch = setting("llama3", accum=2)
    found = replay.explain(cfg, ctx, values, batch | {"loss_weights": np.zeros_like(batch["loss_weights"])})
    assert found.frames[0][0].endswith("training/losses.py")
    assert found.frames[0][2] == "share"
    assert found.equation.primitive.name == "div"

    wrap_block(monkeypatch, 0, exponential)
    large = {**values, "embedding": {"tokens": values["embedding"]["tokens"].at[5].set(1e4)}}
    one = batch | {"tokens": np.where(np.arange(8)[:, None] % 2, 5, 6) * np.ones_like(batch["tokens"])}
    found = replay.explain(cfg, dataclasses.replace(ctx, dtype=jnp.bfloat16), large, one)
    assert found is not None
    assert found.result == 0
    guide = RunGuide(cfg.model, cfg.train.grad_accum)
    assert describe.place(found, guide) == "microbatch 1 of 2, layer 0 (1 of 2)"
    reads = [line for line in describe.describe(found, guide) if line.startswith("layer ")]
    assert [line.partition(":")[0] for line in reads] == [
        f"layer {i}  {what}" for what in ("what it reads", "gradient of what it returns") for i in (0, 1)
    ]
    assert ["no finite value" in line for line in reads] == [False, True, True, True]
    assert found.frames[0][:2] == (HERE, line_of("# fault large"))


def test_statistics_are_those_of_numpy(rng):
    """Of all entries together, of some, and of values whose squares float32 and bfloat16 do not have."""
    x = rng.normal(size=(3, 4, 5)).astype(np.float32) * 1e30
    x[1, 2, 3], x[2, 0, 1] = np.nan, -np.inf
    every = Statistics.of(jnp.asarray(x))
    for entries, chosen in ((slice(None), x), (np.array([0, 2]), x[[0, 2]])):
        fine = chosen[np.isfinite(chosen)].astype(np.float64)
        text = f"float32 4x5: {fine.min():.4g} to {fine.max():.4g}, RMS {np.sqrt(np.square(fine).mean()):.4g}"
        assert every.text(entries).startswith(text)
    assert every.text().endswith("1 of 60 NaN, 1 of 60 infinite")
    assert statistics(jnp.full((2,), 3e38, jnp.bfloat16)) == "bfloat16 2: 3.004e+38 to 3.004e+38, RMS 3.004e+38"
    assert statistics(np.zeros((0, 2), np.float32)) == "float32 0x2, empty"
    assert statistics(np.int32(7)) == "int32 scalar: 7 to 7, RMS 7"
    assert statistics(jax.random.key(0)) == "key<fry> scalar"


def test_train_debug_does_not_change_the_program():
    """The step that is compiled has the same text with `train.debug`; the search traces its own program."""

    def text(debug):
        cfg = meshes.config("gpt2", {"data": 2})
        cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, debug=debug))
        ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.microbatch_size, jax.devices()[:2]))
        abstract = abstract_state(Recipe.of(cfg), ctx)
        batch = meshes.random_batch(0, False, cfg.model, cfg.data.batch_size)
        return jit_train_step(cfg, ctx, abstract).lower(abstract, batch).as_text()

    assert text(True) == text(False)


def test_parameters_and_batches_that_are_not_finite_are_named():
    _, _, values, batch = setting("bert")
    assert replay.bad_inputs(values, batch) == []
    values["layers"]["mlp"]["w_up"] = values["layers"]["mlp"]["w_up"].at[1, 2, 3].set(jnp.nan)
    batch["loss_weights"][3, 4] = np.inf
    assert replay.bad_inputs(values, batch) == [
        "the parameter layers/mlp/w_up, first at [1, 2, 3]: " + statistics(values["layers"]["mlp"]["w_up"]),
        "the batch's loss_weights, first at [3, 4]: " + statistics(batch["loss_weights"]),
    ]


@pytest.mark.matrix
def test_the_command_explains_the_first_skipped_step_and_its_operation_can_be_repeated(tmp_path, capsys):
    """Plain gradient descent with a huge rate overflows after a few steps; the state is computed from the beginning."""
    text = tmp_path / "text.txt"
    text.write_text("all the words of this text are here, one after the other. " * 60)
    run = tmp_path / "run"
    words = f"""--run.dir={run} --data.source=path --data.path={text} --data.seq_len=32 --data.batch_size=8
        --mesh.data=4 --mesh.tensor=2 --model.num_layers=2 --model.d_model=32 --model.num_heads=2 --train.steps=8
        --train.ngram_baseline=false --train.max_bad_steps=20 --train.dtype=bfloat16 --train.eval_steps=1
        --optim.name=sgd --optim.lr=1e12 --optim.clip_norm=null --optim.warmup_steps=0 --optim.schedule=constant
        --checkpoint.every=3 --checkpoint.keep=9"""
    execute(["train", *words.split(), "--train.debug=true"])
    during = capsys.readouterr().out
    assert during.count("from the beginning, on 8 x cpu") + during.count("of step 3, on 8 x cpu") >= 1
    shutil.rmtree(run / "debug")
    with pytest.raises(ConfigError, match=r"no config\.yaml"):
        execute(["debug", str(tmp_path)])
    with pytest.raises(ConfigError, match=r"--step=9 is past the last one"):
        execute(["debug", str(run), "--step=9"])
    execute(["debug", str(run)])
    out = capsys.readouterr().out
    found = out.index("first    ")
    assert "jaxstack/" in out
    assert "infinite" in out or "NaN" in out
    code = out[found:].partition("input")[0]  # figures differ: during the run, the last checkpoint may be on its way
    assert code in during
    (folder,) = (run / "debug").iterdir()
    _, outputs = replay.repeat(folder)
    assert any(map(is_bad, outputs))
    with pytest.raises(ConfigError, match="exists, with what was found before"):
        execute(["debug", str(run)])
    execute(["debug", str(run), "--step=1"])
    assert "loss and gradients are finite here" in capsys.readouterr().out


def test_a_layer_behind_the_loop_over_layers_has_its_number():
    found = SimpleNamespace(loops=(), scopes="stack_layers/after_1_steps/layer_1_of_3", device={})
    assert describe.place(found, RunGuide(meshes.config("modernbert_cut", {}).model)) == "layer 4 (5 of 5)"
