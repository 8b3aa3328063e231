"""Faults on meshes and pipelines: the search names operation, layer, line, direction, stage, microbatch and device.

Each fault is a function of the code that is replaced by one that fails, or a poisoned parameter or batch. The line that
must be found ends with a comment such as `# fault exp`, or is the only line of a file of the package with a text.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_meshes as meshes
from jax import lax
from jax.sharding import NamedSharding

import jaxstack
from jaxstack import families
from jaxstack.common.tree import flatten
from jaxstack.config import Config, MeshConfig, PipelineConfig
from jaxstack.debug import replay
from jaxstack.debug.describe import describe, device, place
from jaxstack.debug.guide import RunGuide
from jaxstack.debug.statistics import is_bad
from jaxstack.families.context import make_context
from jaxstack.features import experts
from jaxstack.models import decoder, params
from jaxstack.models.blocks import Stack
from jaxstack.models.context import Context
from jaxstack.sharding import make_mesh

HERE, PACKAGE = Path(__file__), Path(jaxstack.__file__).parent
ROWS = 8


@jax.custom_vjp
def bad_rule(x):
    return x


bad_rule.defvjp(lambda x: (x, jnp.zeros(())), lambda zero, g: (g / zero,))  # fault rule


@jax.custom_jvp
def bad_tangent(x):
    return jnp.abs(x)


@bad_tangent.defjvp
def _tangent(primals, tangents):
    (x,), (t,) = primals, tangents
    return jnp.abs(x), t * jnp.log(jnp.abs(x) * 0)  # fault tangent


def overflow(x):
    return jnp.exp(jnp.abs(x) * 0 + 200.0).astype(x.dtype) * x  # fault exp


def divide(x):
    return x / (x - x)  # fault divide


def root(x):
    return x + jnp.sqrt(x * 0)  # fault root


def logarithm(x):
    return x + jnp.log(jnp.abs(x) * 0)  # fault logarithm


def large(x):
    return x + (x * 0 + 3e38) * 8  # fault large


def no_norm(x):
    return x * lax.rsqrt((jnp.square(x) * 0).mean(-1, keepdims=True))  # fault norm


def power(x):
    return x + jnp.abs(x * 0) ** 0.5  # fault power


def device_of(**at):
    """Returns a fault of one device of the mesh, or of one stage."""

    def fault(x):
        here = jnp.asarray(True)
        for axis, index in at.items():
            here &= lax.axis_index(axis) == index
        return x / jnp.where(here, 0, 1).astype(x.dtype)  # fault device

    return fault


def summed(axis):
    """Returns a fault of a sum over devices, of which each has a finite value."""

    def fault(x):
        total = lax.psum(x * 0 + 2e38, axis)  # fault sum
        return x + total * 0

    return fault


def sent(x):
    back = [(i, (i + 1) % 2) for i in range(2)]
    near = lax.ppermute(x, "context", back)
    return x + jnp.log(jnp.abs(near) * 0)  # fault sent


def in_layer(number: int, fault: Callable[..., Any]):
    """Returns what applies a fault in one layer, which is found by its norm's scale, see `setting`."""

    def apply(p, x):
        is_here = jnp.abs(p["attention_norm"]["scale"].mean() - (1 + number / 64)) < 1 / 256
        return jax.lax.cond(is_here, fault, lambda x: x, x)

    return apply


def after_block(fault):
    """Applies a fault to what the block of layer `number` returns."""

    def patch(monkeypatch, number):
        real = Stack.run_layer
        apply = in_layer(number, fault)

        def run_layer(stack, cfg, ctx, p, x, *rest, **how):
            x, values = real(stack, cfg, ctx, p, x, *rest, **how)
            return apply(p, x), values

        monkeypatch.setattr(Stack, "run_layer", run_layer)

    return patch


def patched(module, name, change):
    """Replaces a function by `change(real)`."""
    return lambda monkeypatch, number: monkeypatch.setattr(module, name, change(getattr(module, name)))


def starving(real):
    """A mixture of experts that divides by the tokens of each expert, of which one has none."""

    def moe(cfg, stack, p, x, ctx, inputs):
        y = real(cfg, stack, p, x, ctx, inputs)
        aux = ctx.values
        share = aux["balance_loss"] / (aux["load"] * jnp.arange(aux["load"].shape[0])).min()  # fault expert
        return y + share.astype(y.dtype) * 0

    return moe


def wrong_loss(real):
    """A loss that is infinite where the first target is 7."""

    def loss(cfg, p, hidden, batch, ctx):
        sums = real(cfg, p, hidden, batch, ctx)
        poison = jnp.exp(jnp.where((batch["targets"] == 7).all(), 200.0, 0.0))  # fault loss
        return {name: total * poison for name, total in sums.items()}

    return loss


def wrong_norm(real):
    """A final norm whose gradient is not finite."""
    return lambda *arguments: bad_rule(real(*arguments))


def large_queries(values, batch, number):
    """Makes queries and keys of a layer so large that their products overflow."""
    for name in ("w_q", "w_k"):
        values[f"layers/attention/{name}"][number] *= 1e22


def bad_row(values, batch, number):
    """Makes the embedding of token 5 so large that its mean overflows, in the last row of the batch alone."""
    values["embedding/tokens"][5] = 3e38
    batch["tokens"][batch["tokens"] == 5] = 6
    batch["tokens"][-1] = 5


def seven(rows):
    """Lets all targets of some rows be 7, and of no others."""

    def poison(values, batch, number):
        batch["targets"][batch["targets"] == 7] = 6
        batch["targets"][rows] = 7

    return poison


def no_weights(values, batch, number):
    batch["loss_weights"][:] = 0


@dataclasses.dataclass(frozen=True)
class Fault:
    """A row of the table.

    Attributes:
      family, mesh, how: model and mesh, see `test_meshes`; `how` may have the keys of a pipeline too.
      line: end of the line of this file, or a file of the package and a text of its line.
      layer: number of the layer; -1 if the fault is not in one.
      patch: replaces functions. `poison` changes parameters and batch.
      where: what the place must contain.
      backward: whether the fault is of the gradients; `None` if it depends on the mode.
      on: what the description of the devices must contain.
    """

    family: str
    mesh: dict[str, Any]
    line: str | tuple[str, str]
    layer: int = -1
    patch: Any = None
    poison: Any = None
    how: dict[str, Any] = dataclasses.field(default_factory=dict)
    where: str = ""
    backward: bool | None = False
    on: str = ""
    dtype: str = "float32"


def pipe(schedule="1f1b", microbatches=4, chunks=1, layers=4, **how):
    return {"schedule": schedule, "microbatches": microbatches, "chunks": chunks, "layers": layers, **how}


NORM = "kernels/norm.py", "wide.mean(-1, keepdims"
SHARES = "training/losses.py", "mean = value / (total"
ATTENTION = "kernels/attention/reference.py", "scores = o.scale * jnp.einsum"
FAULTS = {
    # Operations of one layer, beside every axis of the mesh.
    "exp, data and tensor": Fault("llama3", {"data": 2, "tensor": 2}, "# fault exp", 1, after_block(overflow)),
    "division, fsdp": Fault("gpt2", {"fsdp": 4}, "# fault divide", 1, after_block(divide)),
    "norm of zero, context": Fault("llama3", {"context": 2, "fsdp": 2}, "# fault norm", 0, after_block(no_norm)),
    "logarithm, recomputed": Fault(
        "gemma2", {"fsdp": 2, "tensor": 2}, "# fault logarithm", 1, after_block(logarithm), how={"remat": "full"}
    ),
    "overflow of attention's scores": Fault("llama3", {"data": 2, "tensor": 2}, ATTENTION, 1, poison=large_queries),
    "bfloat16": Fault(
        "qwen3", {"data": 2, "tensor": 2}, "# fault large", 1, after_block(large), dtype="bfloat16", how={"accum": 2}
    ),
    "division, XLA's partitioner": Fault(
        "llama3", {"data": 2, "fsdp": 2, "partitioner": "auto"}, "# fault divide", 1, after_block(divide)
    ),
    "division, encoder-decoder": Fault(
        "t5", {"data": 2, "fsdp": 2}, "# fault divide", 1, after_block(divide), where="of encoder"
    ),
    "an expert without tokens": Fault(
        "softmax", {"expert": 4}, "# fault expert", 0, patched(experts, "moe", starving), backward=None
    ),
    "a neighbour's keys": Fault("llama3", {"context": 2}, "# fault sent", 1, after_block(sent)),
    # Faults that one device has, or that only their sum has.
    "one device": Fault(
        "llama3",
        {"data": 2, "tensor": 2},
        "# fault device",
        1,
        after_block(device_of(data=1, tensor=0)),
        on="data 1, tensor 0 alone, of 4",
    ),
    "one shard of experts": Fault(
        "softmax", {"expert": 2, "tensor": 2}, "# fault device", 0, after_block(device_of(expert=1)), on="expert 1"
    ),
    "a sum over devices": Fault(
        "llama3", {"data": 2, "tensor": 2}, "# fault sum", 1, after_block(summed("tensor")), backward=None
    ),
    # Outside of layers, and batches.
    "a row of the embedding": Fault(
        "untied", {"data": 4}, NORM, 0, poison=bad_row, on="data 3 alone", how={"accum": 2}, where="microbatch 1 of 2"
    ),
    "a batch without weights": Fault("gpt2", {"data": 2, "tensor": 2}, SHARES, poison=no_weights),
    "the loss of one microbatch": Fault(
        "llama3",
        {"data": 2},
        "# fault loss",
        patch=patched(decoder, "loss", wrong_loss),
        poison=seven(slice(1, None, 2)),
        how={"accum": 2},
        where="microbatch 1 of 2",
    ),
    # The backward pass alone.
    "a rule for gradients": Fault(
        "llama3", {"data": 2, "tensor": 2}, "# fault rule", 1, after_block(bad_rule), backward=True
    ),
    "a rule outside of layers": Fault(
        "llama3", {"fsdp": 2}, "# fault rule", patch=patched(decoder, "final_norm", wrong_norm), backward=True
    ),
    "a rule for tangents": Fault(
        "bert", {"fsdp": 2, "data": 2}, "# fault tangent", 1, after_block(bad_tangent), backward=None
    ),
    "the root's gradient": Fault(
        "llama3",
        {"context": 2, "data": 2},
        "# fault root",
        1,
        after_block(root),
        backward=True,
        how={"remat": "selective"},
    ),
    "the power's gradient, adapters": Fault(
        "lora", {"data": 2, "tensor": 2}, "# fault power", 1, after_block(power), backward=True
    ),
    # Pipelines.
    "a stage": Fault(
        "llama3",
        {"pipe": 2, "data": 2},
        "# fault device",
        3,
        after_block(device_of(pipe=1)),
        how=pipe(),
        where="stage 1 of 2, forward unit, microbatch 0 of 4",
    ),
    "a layer of a stage, on idle stages too": Fault(
        "llama3",
        {"pipe": 4},
        "# fault divide",
        5,
        after_block(divide),
        how=pipe(layers=6, batch=8),
        where="stage 3 of 4, forward unit, microbatch 0 of 4",
    ),
    "the loss of one microbatch, pipeline": Fault(
        "llama3",
        {"pipe": 2, "tensor": 2},
        "# fault loss",
        patch=patched(decoder, "loss", wrong_loss),
        poison=seven(slice(2, None, 4)),
        how=pipe(),
        where="loss with its gradients in tick 3, microbatch 2 of 4",
    ),
    "a rule, interleaved": Fault(
        "gpt2",
        {"pipe": 2, "fsdp": 2},
        "# fault rule",
        3,
        after_block(bad_rule),
        how=pipe("interleaved_1f1b", chunks=2, layers=7),
        backward=True,
        where="backward unit, microbatch 0 of 4",
    ),
    "exp, zero bubble": Fault(
        "llama3",
        {"pipe": 2},
        "# fault exp",
        1,
        after_block(overflow),
        how=pipe("zb1", remat="full"),
        where="stage 0 of 2",
    ),
    "exp, static loops": Fault(
        "gpt2",
        {"pipe": 2, "data": 2},
        "# fault exp",
        2,
        after_block(overflow),
        how=pipe("1f1b", loops="static", remat="selective"),
        where="stage 1 of 2, forward unit, microbatch 0 of 4",
    ),
    "division, gpipe with experts": Fault(
        "softmax", {"pipe": 2, "expert": 2}, "# fault divide", 2, after_block(divide), how=pipe("gpipe", accum=1)
    ),
    "a row of the embedding, pipeline": Fault(
        "untied", {"pipe": 2, "data": 2}, NORM, 0, poison=bad_row, how=pipe(), where="microbatch 3 of 4", on="data 1"
    ),
    "one device of a stage": Fault(
        "llama3",
        {"pipe": 2, "tensor": 2, "data": 2},
        "# fault device",
        2,
        after_block(device_of(pipe=1, tensor=1, data=0)),
        how=pipe(remat="selective"),
        where="stage 1 of 2",
        on="pipe 1, data 0, tensor 1 alone, of 8",
    ),
}


def config(fault: Fault) -> Config:
    how = dict(fault.how)
    of_pipe = {name: how.pop(name) for name in ("schedule", "microbatches", "chunks", "loops", "gather") if name in how}
    depth, batch = how.pop("layers", None), how.pop("batch", ROWS)
    cfg = meshes.config(fault.family, fault.mesh, **how)
    if depth is not None:
        depths: dict[str, Any] = {"num_layers": depth}
        if cfg.model.family == "encoder_decoder":
            depths["encoder_layers"] = depth
        cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, **depths))
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, batch_size=batch))
    return dataclasses.replace(cfg, pipeline=PipelineConfig(split=(".*",), **of_pipe))


def setting(fault: Fault) -> tuple[Config, Context, Any, Any]:
    """Returns configuration, context, parameters and batch on the mesh; all scales of layer i's norm are 1 + i/64."""
    cfg = config(fault)
    devices = jax.devices()[: math.prod(cfg.mesh.sizes.values())]
    ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.microbatch_size, devices))
    ctx = dataclasses.replace(ctx, dtype=jnp.dtype(fault.dtype))
    spec = families.spec(cfg.model)
    initial = params.init(jax.random.key(0), spec)
    values = {path: np.array(value) for path, value in flatten(initial).items()}
    for path, value in values.items():
        if path.endswith("attention_norm/scale"):
            value[:] = (1 + np.arange(len(value)) / 64).reshape(-1, *(1,) * (value.ndim - 1))
    batch = meshes.random_batch(0, cfg.data.packing, cfg.model, cfg.data.batch_size)
    batch = {name: np.array(value) for name, value in batch.items()}
    if fault.poison is not None:
        fault.poison(values, batch, fault.layer)
    stacked = {path for path, p in params.flat_spec(spec).items() if p.stacked}
    for path in stacked if ctx.layout.stages is not None else ():
        stages = ctx.layout.stages.of(path)
        rows = np.zeros((len(stages.layer_of_slot), *values[path].shape[1:]), values[path].dtype)
        rows[stages.slot_of_layer] = values[path]
        values[path] = rows
    tree = jax.tree.unflatten(jax.tree.structure(initial), [*values.values()])
    specs = jax.tree.map(lambda s: NamedSharding(ctx.layout.mesh, s), ctx.layout.parameters(spec))
    return cfg, ctx, jax.device_put(tree, specs), jax.device_put(batch, ctx.layout.sharding(ctx.layout.batch))


def line_of(line: str | tuple[str, str]) -> tuple[str, int]:
    """Returns the file and the number of the only line that a row names."""
    file, text = (HERE, line) if isinstance(line, str) else (PACKAGE / line[0], line[1])
    lines = enumerate(file.read_text().splitlines(), 1)
    (number,) = [i for i, one in lines if (one.endswith(text) if file == HERE else text in one)]
    return str(file), number


def check(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Finds a fault, compares what the table says, and returns what a user reads."""
    fault = FAULTS[name]
    if fault.patch is not None:
        fault.patch(monkeypatch, fault.layer)
    cfg, ctx, values, batch = setting(fault)
    assert replay.bad_inputs(values, batch) == []
    found = replay.explain(cfg, ctx, values, batch)
    assert found is not None
    guide = RunGuide(cfg.model, cfg.train.grad_accum, ctx.layout.pipeline)
    lines = describe(found, guide)
    text = "\n".join(lines)
    assert found.frames[0][:2] == line_of(fault.line), text
    assert fault.backward in (None, bool(found.result)), text
    where = place(found, guide)
    assert (f"layer {fault.layer} " in where) if fault.layer >= 0 else ("layer" not in where), text
    assert fault.where in where, text
    assert fault.on in device(found), text
    assert not any(map(is_bad, found.inputs)), text
    assert any(map(is_bad, found.outputs)), text
    return lines


MARKS = dict.fromkeys(FAULTS, meshes.MATRIX) | {
    "one device": (),
    "a row of the embedding": meshes.SLOW,  # in a microbatch
    "a layer of a stage, on idle stages too": meshes.SLOW,
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=marks) for n, marks in MARKS.items()])
def test_a_fault_on_a_mesh_is_found(name, monkeypatch):
    check(name, monkeypatch)


def test_the_table_is_as_large_as_the_documents_say():
    pipelines = {(*f.mesh.items(), f.how.get("schedule"), f.how.get("loops")) for f in FAULTS.values()}
    text = f"lists {len(FAULTS)} injected faults on {len(pipelines)} layouts of devices"
    assert text in (PACKAGE.parent / "docs" / "debugging.md").read_text()
    assert {axis for f in FAULTS.values() for axis in f.mesh} >= {*MeshConfig().sizes}
