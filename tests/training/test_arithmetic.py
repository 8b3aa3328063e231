"""The arithmetic of a traced bfloat16 step: what is summed in bfloat16, and which scalars are rounded to it.

A sum in bfloat16 loses digits with every term, and a scalar that is rounded before it multiplies changes the scale of a
whole array. Neither shows in tests of values with tolerances for bfloat16, so these tests read the traced step: each
sum in bfloat16 must be in `SUMS`, with the reason why it may be there.

Autodiff adds the gradients of an array that is read several times, two at a time (`add_any`). These are sums of two or
three terms, each rounded once, as in the forward pass. They are not listed, unless a loop adds them up.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_meshes as meshes
import test_precision as precision
from families import CLASSIFIERS, CONTRASTIVE, DIFFUSION, ENCODER_DECODERS, ENCODERS, FAMILIES
from jax.extend.core import Literal

from jaxstack import families, kernels, moe
from jaxstack.config import Config, KernelsConfig, LoraConfig, SampleConfig
from jaxstack.families import diffusion, encoder
from jaxstack.families.context import make_context
from jaxstack.features import adapters
from jaxstack.generate.kv_cache import CachedDecoder
from jaxstack.generate.sampling import sample_tokens
from jaxstack.kernels.implementation import interpret_mode
from jaxstack.kernels.taps import Tapped
from jaxstack.models import decoder, layers, params
from jaxstack.models.context import Context
from jaxstack.sharding import make_mesh
from jaxstack.training.assemble import make_train_step
from jaxstack.training.state import Recipe, abstract_state

PRODUCTS = {"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"}
REDUCTIONS = {"reduce_sum", "reduce", "cumsum", "reduce_window_sum", "scatter-add", "add"}
COLLECTIVES = {"psum", "psum_invariant", "unreduced_psum", "reduce_scatter", "psum_scatter"}

_PRODUCT = "XLA sums the products in float32 and rounds the result once"
_RESIDUAL = "the residual stream, to which a layer adds one array"
SUMS = {
    "products": {
        "kernels/linear.py": _PRODUCT,
        "kernels/taps.py": _PRODUCT,
        "kernels/quantized_matmul.py": _PRODUCT,
        "kernels/grouped_matmul.py": _PRODUCT,
        "moe/rounds.py": _PRODUCT,
        "kernels/attention/__init__.py": _PRODUCT,  # of weights and values; scores are float32
        "kernels/attention/reference.py": _PRODUCT,
        "kernels/context_attention.py": _PRODUCT,
    },
    "reductions": {
        "models/blocks.py::block": _RESIDUAL,
        "families/encoder.py::block": _RESIDUAL,
        "families/cross_block.py::cross_block": _RESIDUAL,
        "families/diffusion.py::picture_block": _RESIDUAL,
        "kernels/linear.py::linear": "the product of a matrix and that of its adapter",
        "families/diffusion.py::condition": "the embeddings of a time and a class",
        "moe/expert_mlp.py::product": "the product of a matrix and that of its adapter",
        "features/experts.py::_moe": "routed experts, summed in float32 and rounded, and shared ones",
    },
    "collectives": {
        "sharding/collectives.py::gather": "gradients of activations, of the devices of a tensor group",
        "sharding/collectives.py::reduce_scatter": "activations, of the devices of a tensor group",
        "sharding/collectives.py::all_reduce": "activations, of the devices of a tensor group",
        "sharding/collectives.py::varying": "gradients of activations, of the devices of a tensor group",
        "pipeline/operations.py::<lambda>": "of `broadcast`: one stage has an array and the others have zeros",
    },
}
"""Where a step may sum in bfloat16: a file, or a function of a file, with the reason."""

SCALARS = {
    "models/layers.py::embed": "Gemma rounds the square root of the width, and was trained with it",
    "kernels/quantized_matmul.py::quantized_matmul": "a scale that is a power of two",
}
"""Where an array may be multiplied by a scalar that is rounded to bfloat16."""


def place(equation: Any) -> str:
    """Returns the file and the function of the package that made an equation, the innermost one."""
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        path = frame.file_name.replace("\\", "/")
        if "/jaxstack/" in path and "/tests/" not in path:
            return f"{path.rpartition('/jaxstack/')[2]}::{frame.function_name.rpartition('.')[2]}"
    return "?"


def is_short(variable: Any) -> bool:
    return getattr(variable.aval, "dtype", None) == jnp.bfloat16


def bodies(jaxpr: Any) -> Iterator[Any]:
    """Yields a jaxpr and all inner ones."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from bodies(inner)


def short_sums(jaxpr: Any) -> set[tuple[str, str]]:
    """Returns the kind and the place of every sum whose result is bfloat16."""
    found = set()
    for equation in (e for body in bodies(jaxpr) for e in body.eqns):
        name = equation.primitive.name
        if not any(is_short(v) for v in equation.outvars):
            continue
        if name in PRODUCTS:
            found.add(("products", place(equation)))
        elif name in COLLECTIVES:
            found.add(("collectives", place(equation)))
        elif name in REDUCTIONS:
            terms = math.prod(equation.invars[0].aval.shape[i] for i in equation.params.get("axes", ()))
            if name != "reduce_sum" or terms > 1:
                found.add(("reductions", place(equation)))
    return found


def short_sums_of_loops(jaxpr: Any) -> set[str]:
    """Returns the places of loops that add to a bfloat16 array, which begins with zeros, in every iteration."""
    found = set()
    for body in bodies(jaxpr):
        made = {v: e for e in body.eqns for v in e.outvars}
        for loop in (e for e in body.eqns if e.primitive.name in ("scan", "while")):
            if loop.primitive.name == "scan":
                inner, skipped = loop.params["jaxpr"].jaxpr, loop.params["num_consts"]
                first, count = skipped, loop.params["num_carry"]
            else:
                inner, skipped = loop.params["body_jaxpr"].jaxpr, loop.params["body_nconsts"]
                first, count = skipped + loop.params["cond_nconsts"], len(inner.outvars)
            inside = {v: e for e in inner.eqns for v in e.outvars}
            for i in range(count):
                start, carry = loop.invars[first + i], inner.invars[skipped + i]
                begins_with_zeros = isinstance(start, Literal) or (
                    start in made and made[start].primitive.name in ("broadcast_in_dim", "full", "pvary", "pcast")
                )
                if is_short(carry) and begins_with_zeros and _is_added_to(carry, inner.outvars[i], inside):
                    found.add(place(loop))
    return found


def _is_added_to(carry: Any, result: Any, made: dict[Any, Any]) -> bool:
    """Returns whether a result is the carry plus something, and not the carry itself."""
    waiting = [(result, False)]
    while waiting:
        variable, added = waiting.pop()
        if variable is carry:
            if added:
                return True
            continue
        if isinstance(variable, Literal) or variable not in made:
            continue
        equation = made[variable]
        adds = equation.primitive.name in ("add", "add_any")
        if adds or equation.primitive.name in ("convert_element_type", "pvary", "pcast"):
            waiting += [(v, added or adds) for v in equation.invars]
    return False


def rounded_scalars(jaxpr: Any) -> dict[str, Any]:
    """Returns by place the scalars that are rounded to bfloat16 and multiply, or divide, a bfloat16 array.

    A power of two is exact. Of a scalar that is not a constant the value is None.
    """
    found = {}
    for body in bodies(jaxpr):
        made = {v: e for e in body.eqns for v in e.outvars}
        for equation in body.eqns:
            if equation.primitive.name not in ("mul", "div") or not is_short(equation.outvars[0]):
                continue
            if equation.outvars[0].aval.size == 1:
                continue
            for operand in equation.invars:
                is_scalar, value = _as_scalar(operand, made)
                if is_scalar and (value is None or math.frexp(value)[0] not in (0.5, -0.5, 0.0)):
                    found[place(equation)] = value
    return found


def _as_scalar(variable: Any, made: dict[Any, Any]) -> tuple[bool, float | None]:
    """Returns whether all elements are one scalar, and its value if it is a constant."""
    while not isinstance(variable, Literal):
        equation = made.get(variable)
        if equation is None:
            return variable.aval.size == 1, None
        same = ("broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "pvary", "pcast")
        if equation.primitive.name not in same:
            return variable.aval.size == 1, None
        variable = equation.invars[0]
    return np.ndim(variable.val) == 0, float(variable.val)


Case = tuple[str, dict[str, Any], dict[str, Any]]
QUICK: list[Case] = [
    ("gpt2", {}, {"accum": 2, "dropout": 0.1, "remat": "selective"}),
    ("sigmoid", {"expert": 2}, {}),
    ("capacity", {}, {}),
    ("t5", {}, {"dropout": 0.1}),
    ("dit", {}, {}),
]
CASES: list[Case] = [
    *QUICK,
    *((name, {}, {}) for name in ("llama3", "qwen3", "gemma2", "softmax", "domain", "lora", "lora_gpt2", "lora_moe")),
    *(("llama3", {}, {"quant": kind}) for kind in ("int8", "fp8", "fp8_tensorwise")),
    *((name, {}, {}) for name in ("bert_pairs", "modernbert", "bert_labels", "modernbert_labels", "t5_1_1")),
    *((name, {}, {}) for name in ("dit_experts", "dit_text", "coca", "clip", "branches", "deep_branches")),
    *((name, {}, {"dropout": 0.1}) for name in ("switch_2", "lora_t5")),
    ("llama3", {"data": 2, "fsdp": 2, "tensor": 2}, {"accum": 2}),
    ("gpt2", {"tensor": 2, **meshes.PLAIN}, {}),
    ("llama3", {"context": 4}, {"packing": True}),
    ("softmax", {"expert": 2, "fsdp": 2, "tensor": 2}, {"accum": 2}),
    ("gpt2", {"pipe": 2, "tensor": 2}, {}),
    ("gpt2", {"pipe": 2, "fsdp": 2}, {"schedule": "zb1"}),
    ("t5", {"pipe": 2, "tensor": 2}, {}),
    ("softmax", {"pipe": 2, "expert": 2}, {}),
    ("dit_text", {"fsdp": 2, "tensor": 2}, {}),
]
CHANGES: dict[str, dict[str, Any]] = {
    "lora": {"lora": LoraConfig(rank=3, alpha=4)},
    "gemma2": {"d_model": 96},
    "gpt2": {"base_width": 48},
}
"""What makes a factor of a model no power of two, by the first word of its name."""


def config(case: Case) -> Config:
    family, mesh, how = case
    how = dict(how)
    quant = how.pop("quant", "none")
    cfg = precision.config(family, mesh, "bfloat16", tokens=meshes.BATCH * meshes.SEQ, **how)
    model = dataclasses.replace(cfg.model, **CHANGES.get(family.partition("_")[0], {}))
    train = dataclasses.replace(cfg.train, quant=quant)
    return dataclasses.replace(cfg, model=model, train=train, kernels=KernelsConfig(cross_entropy="chunked"))


def traced_step(cfg: Config) -> Any:
    sizes = cfg.mesh.sizes
    devices = math.prod(sizes.values())
    mesh = make_mesh(cfg.mesh, cfg.data.batch_size // cfg.train.grad_accum, jax.devices()[:devices])
    ctx = make_context(cfg, mesh)
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), precision.text_like(0, cfg))
    return jax.make_jaxpr(make_train_step(cfg, ctx))(abstract_state(Recipe.of(cfg), ctx), batch).jaxpr


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=precision.name_of(c), marks=() if c in QUICK else pytest.mark.matrix) for c in CASES],
)
def test_a_step_sums_in_float32_and_rounds_no_scalar(case):
    step = traced_step(config(case))
    for kind, where in sorted(short_sums(step)):
        assert where in SUMS[kind] or where.partition("::")[0] in SUMS[kind], f"{where} has {kind} in bfloat16"
    assert not short_sums_of_loops(step)
    scalars = rounded_scalars(step)
    assert scalars.keys() <= SCALARS.keys(), scalars


KERNEL_SUMS = {
    "attention": {"xla": {"products"}, "chunked": {"products"}},  # of dk and dv, or of weights and values
    "linear": {name: {"products"} for name in kernels.OP_IMPLEMENTATIONS["linear"]},
    "moe": {"ragged": {"products"}, "grouped": {"products"}},
}
"""The sums in bfloat16 of the implementations of an operation. All others have none."""


def kernel_calls() -> dict[str, Any]:
    """Returns a function (implementation, *arrays) and the shapes of its arrays, by operation."""
    ids, weights, sizes = jnp.zeros((2, 40), jnp.int32), jnp.ones((2, 40)), jnp.array([20, 60])
    head, x = (2, 40, 2, 16), (2, 40, 32)

    def loss(name: str, x: jax.Array, head: jax.Array) -> jax.Array:
        return kernels.cross_entropy(x, head, ids, weights, implementation=name)

    def experts(name: str, x: jax.Array, w: jax.Array) -> jax.Array:
        return kernels.grouped_matmul(x.reshape(-1, 32), w, sizes, implementation=name)

    return {
        "attention": (lambda name, *qkv: kernels.attention(*qkv, scale=0.3, implementation=name), (head,) * 3),
        "linear": (lambda name, x, w: kernels.linear(x, w, implementation=name), (x, (32, 48))),
        "norm": (lambda name, x, s: kernels.rms_norm(x, s, eps=1e-6, implementation=name), (x, (32,))),
        "gelu": (lambda name, x: kernels.gelu(x, approximate=True, implementation=name), (x,)),
        "cross_entropy": (loss, (x, (32, 50))),
        "moe": (experts, (x, (2, 32, 48))),
    }


@pytest.mark.parametrize("op", kernel_calls())
def test_kernels_sum_in_float32(op):
    """Traces values and gradients of every implementation; those by Pallas include what runs on the chip."""
    call, shapes = kernel_calls()[op]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    for name in kernels.OP_IMPLEMENTATIONS[op]:
        if name in ("cudnn", "tokamax", "reference"):  # two of libraries, and one of `moe_mlp`
            continue

        def total(*arrays, name=name):
            return call(name, *arrays).astype(jnp.float32).sum()

        with interpret_mode():
            traced = jax.make_jaxpr(jax.value_and_grad(total, range(len(shapes))))(*arrays).jaxpr
        found = {kind for kind, _ in short_sums(traced)}
        assert found <= KERNEL_SUMS.get(op, {}).get(name, set()), (name, short_sums(traced))
        assert not short_sums_of_loops(traced), name
        assert not rounded_scalars(traced), name


def test_samplers_read_float32_logits():
    """A program that reads prompts and generates tokens has no logits [B, V] in bfloat16, and no other sums."""
    cfg, rows = FAMILIES["gemma2"], 3
    ctx = Context(dtype=jnp.bfloat16)
    sample = SampleConfig(temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.1)

    def work(values: Any, tokens: jax.Array, keys: jax.Array) -> jax.Array:
        first = jnp.zeros(rows, jnp.int32)
        model = CachedDecoder.create(cfg, values, ctx, gate=None, vocabulary=60, first=first, num_slots=12)
        used = jnp.zeros((rows, cfg.vocab), bool)
        logits, cache = model.prefill(tokens)
        new = sample_tokens(logits, used, keys, sample)
        logits, _ = model.decode_token(new, jnp.int32(6), cache)
        return sample_tokens(logits, used, keys, sample)

    values = params.abstract(families.spec(cfg))
    keys = jax.random.split(jax.random.key(0), rows)
    traced = jax.make_jaxpr(work)(values, jnp.zeros((rows, 6), jnp.int32), keys).jaxpr
    for equation in (e for body in bodies(traced) for e in body.eqns):
        for variable in filter(is_short, equation.outvars):
            shape = variable.aval.shape
            assert not (shape[:1] == (rows,) and shape[-1] == cfg.vocab), place(equation)
    for kind, where in short_sums(traced):
        assert where in SUMS[kind] or where.partition("::")[0] in SUMS[kind], f"{where} has {kind} in bfloat16"


# Values


def assert_rounded_once(found, exact):
    """Asserts that bfloat16 numbers are the nearest ones to the exact numbers.

    Where an exact number is within float32's error of the middle between two, it may be the other one: 1 in 10,000.
    """
    assert found.dtype == jnp.bfloat16
    assert (np.asarray(found) == np.asarray(jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16))).mean() >= 0.998


@pytest.mark.parametrize("factor", [0.9, 1 / 255, 4 / 3, 32**-0.5])
def test_a_factor_is_not_rounded(rng, factor):
    """The product is that of float64, rounded once. So is the gradient."""
    x = jnp.asarray(rng.normal(size=(64, 64)), jnp.bfloat16)
    exact = np.asarray(x, np.float64) * factor
    y, vjp = jax.vjp(lambda x: kernels.multiply_in_float32(x, factor), x)
    (dx,) = vjp(x)
    assert_rounded_once(y, exact)
    assert_rounded_once(dx, exact)


@pytest.mark.parametrize("shape", [(3, 1, 8), (8,), (1,), (3, 257, 8)], ids=str)
def test_the_gradient_of_a_factor_is_summed_in_float32(rng, shape):
    """A sum of up to 6168 terms, rounded once; the terms are about 2, so that float32 rounds the sum at 1e-6."""
    x, factor, dy = (jnp.asarray(rng.normal(size=n) + 1, jnp.bfloat16) for n in ((3, 257, 8), shape, (3, 257, 8)))
    y, vjp = jax.vjp(kernels.multiply_in_float32, x, factor)
    dx, d_factor = vjp(dy)
    x, factor, dy = (np.asarray(a, np.float64) for a in (x, factor, dy))
    assert_rounded_once(y, x * factor)
    assert_rounded_once(dx, dy * factor)
    axes = tuple(range(3 - len(shape))) + tuple(3 - len(shape) + i for i, n in enumerate(shape) if n == 1)
    expected = (dy * x).sum(axes).reshape(shape)
    assert d_factor.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(d_factor, np.float64), expected, rtol=1.001 * 2**-8, atol=1e-4)


@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_dropout_keeps_the_scale_of_bfloat16(rng, rate):
    """1 - 0.1 rounded to bfloat16 would make every element 0.2% too large."""
    x = jnp.asarray(rng.normal(size=(2, 8, 64)), jnp.bfloat16)
    y = layers.dropout(jax.random.key(0), rate, x, jnp.arange(16, dtype=jnp.uint32).reshape(2, 8))
    kept = np.asarray(y) != 0
    assert 0.5 < kept.mean() < 1
    assert_rounded_once(y, np.where(kept, np.asarray(x, np.float64) / (1 - rate), 0))


def test_adapters_keep_their_scale_in_bfloat16(rng):
    """alpha / rank = 4/3 would be rounded by 0.1%. Adapters of weights with a tap are scaled likewise."""
    cfg = LoraConfig(rank=3, alpha=4)
    b = jnp.asarray(rng.normal(size=(3, 64)), jnp.bfloat16)
    exact = np.asarray(b, np.float64) * 4 / 3
    _, scaled = adapters.get_adapter(cfg, {"lora_a_up": jnp.ones((8, 3)), "lora_b_up": b}, "up")
    _, tapped = adapters.get_adapter(cfg, {"lora_a_up": jnp.ones((8, 3)), "lora_b_up": Tapped(b)}, "up")
    for found in (scaled, tapped.changes[0](b), (Tapped(b) * (4 / 3)).changes[0](b)):
        assert_rounded_once(found, exact)


def test_modulations_of_diffusion_have_gradients_in_float32(rng):
    """The gradients of shift, scale and gate are sums over 512 patches, and 1 + scale keeps the digits of a scale."""
    cfg = DIFFUSION["dit"]
    x, shift, scale, dy = (
        jnp.asarray(rng.normal(size=n) * size, jnp.bfloat16)
        for n, size in (((2, 512, 32), 1), ((2, 1, 32), 1), ((2, 1, 32), 1e-3), ((2, 512, 32), 1))
    )
    y, vjp = jax.vjp(lambda *a: diffusion.modulated(cfg, *a, Context()), x, shift, scale)
    _, d_shift, d_scale = (np.asarray(g, np.float64) for g in vjp(dy))
    x, shift, scale, dy = (np.asarray(a, np.float64) for a in (x, shift, scale, dy))
    centred = x - x.mean(-1, keepdims=True)
    normal = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + cfg.norm_eps)
    # The norm, its product and the sum are each rounded by 2^-8 at most, of numbers up to 8.
    np.testing.assert_allclose(np.asarray(y, np.float64), normal * (1 + scale) + shift, atol=3 * 2**-8 * 8)
    assert_rounded_once(jnp.asarray(d_shift, jnp.bfloat16), dy.sum(1, keepdims=True))
    # Each term has the rounding of its norm, 2^-8 / sqrt(3) of it, and the sum is rounded once.
    terms = dy * normal
    noise = 2**-8 * np.sqrt(np.square(terms).sum(1, keepdims=True) / 3)
    assert (np.abs(d_scale - terms.sum(1, keepdims=True)) <= 2**-8 * np.abs(d_scale) + 4 * noise).all()


PAIR_WAYS = ["ragged", "grouped", "reference", "capacity"]


@pytest.mark.parametrize("way", PAIR_WAYS)
def test_the_outputs_of_a_token_s_experts_are_added_in_float32(rng, way):
    """One expert multiplies a token by 256 and three by 1. The sum of 259 is exact in float32, and rounded to 260 once.

    In bfloat16, 256 and 1 give 256: where 256 is the first or the second term, the sum would be 256 or 258. The
    gradient of a token is the same sum, in the order of its pairs.
    """
    factors = jnp.asarray([256, 1, 1, 1], jnp.bfloat16)
    eye = jnp.eye(16, dtype=jnp.bfloat16)
    weights = {"w_up": jnp.stack([eye] * 4), "w_down": factors[:, None, None] * eye}
    x = jnp.asarray(2.0 ** rng.integers(-3, 4, (24, 16)), jnp.bfloat16)
    experts = jnp.asarray(rng.permuted(np.tile(np.arange(4, dtype=np.int32), (24, 1)), axis=1))
    gates = jnp.ones((24, 4), jnp.float32)
    routing = moe.Routing(experts, gates, jnp.full((24, 4), 0.25), jnp.zeros((24, 4)))
    limit = {"capacity_factor": 1.0, "rows": 1} if way == "capacity" else {"implementation": way}
    options = moe.MoEOptions(num_experts=4, activation=lambda a: a, **limit)
    y, vjp = jax.vjp(lambda x: moe.moe_mlp(x, routing, weights, options)[0], x)
    (dx,) = vjp(x)
    expected = np.asarray(jnp.asarray(np.asarray(x, np.float64) * 259, jnp.bfloat16))
    np.testing.assert_array_equal(np.asarray(y), expected)
    if way != "reference":  # autodiff of the definition adds the experts' gradients by itself
        np.testing.assert_array_equal(np.asarray(dx), expected)


HEADS = {
    "decoder": FAMILIES["llama3"],
    "tied": FAMILIES["gpt2"],
    "capped": FAMILIES["gemma2"],
    "encoder": ENCODERS["modernbert"],
    "labels": CLASSIFIERS["bert_labels"],
    "encoder_decoder": ENCODER_DECODERS["t5"],
    "captions": CONTRASTIVE["coca"],
}


@pytest.mark.parametrize("name", HEADS)
def test_logits_are_those_of_float32(rng, name):
    """Logits, log-likelihoods and losses of bfloat16 hidden states and heads, against float64 of the same numbers.

    A sum of 33 exact products in float32 is right to 1e-6 of its largest terms; in bfloat16, to 2^-9 only.
    """
    cfg = HEADS[name]
    model = families.of(cfg)
    ctx = Context(dtype=jnp.bfloat16)
    values = jax.tree.map(
        lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.bfloat16).astype(jnp.float32), model.spec(cfg)
    )
    hidden = jnp.asarray(rng.normal(size=(2, 6, cfg.d_model)), jnp.bfloat16)
    read = {"caption": hidden} if name == "captions" else hidden
    table = encoder.head(cfg, values, ctx) if name in ("encoder", "labels") else decoder.head(cfg, values, ctx)
    x, w = np.asarray(hidden, np.float64), np.asarray(table, np.float64)
    exact = (x @ w[: cfg.d_model] + w[cfg.d_model :].sum(0))[..., : cfg.classes]  # encoders have a row of biases
    if cfg.logit_softcap is not None:
        exact = cfg.logit_softcap * np.tanh(exact / cfg.logit_softcap)
    logits = model.logits(cfg, values, read, ctx)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(
        logits[..., : cfg.classes], exact, atol=1e-6 * np.abs(x).max() * np.abs(w).max() * x.shape[-1]
    )

    targets = rng.integers(0, cfg.classes, (2, 6)).astype(np.int32)
    weights = rng.uniform(0.5, 1, (2, 6)).astype(np.float32)
    top = exact.max(-1, keepdims=True)
    log_probs = exact - top - np.log(np.exp(exact - top).sum(-1, keepdims=True))
    log_probs = np.take_along_axis(log_probs, targets[..., None], -1)[..., 0]
    batch = {"targets": targets, "loss_weights": weights}
    for implementation in ("xla", "chunked"):
        sums = model.loss(
            cfg,
            values,
            read,
            batch,
            dataclasses.replace(ctx, ops=dataclasses.replace(ctx.ops, cross_entropy=implementation)),
        )
        (total,) = sums.values()
        np.testing.assert_allclose(total, -(weights * log_probs).sum(), rtol=2e-6)
    if name not in ("encoder", "labels", "captions"):
        found, _ = decoder.log_probs(cfg, values, hidden, targets, ctx)
        np.testing.assert_allclose(found, log_probs, rtol=2e-6, atol=1e-5)
