"""An error about shapes in a model's code names the code, the layer, and the logical axes of its operands."""

import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import test_meshes as meshes
from flax import linen, nnx

from jaxstack import families
from jaxstack.cli import parser
from jaxstack.common.errors import ConfigError
from jaxstack.families.context import make_context
from jaxstack.features import experts
from jaxstack.models import layers, params, shape_errors
from jaxstack.sharding import make_mesh
from jaxstack.training.assemble import make_gradients

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).name


def explained(f, *arguments):
    """Returns the lines about the error that a function raises, and the error's notes as one text."""
    with pytest.raises((TypeError, ValueError, IndexError)) as caught:
        f(*arguments)
    return shape_errors.explain(caught.value), "\n".join(getattr(caught.value, "__notes__", ()))


def traced(sizes, change=None, model="llama3", **options):
    """Returns the lines about the error of a step on a mesh, whose parameters' shapes may be changed."""
    cfg = meshes.config(model, sizes, **options)
    count = math.prod(size for size in sizes.values() if isinstance(size, int))
    ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.microbatch_size, jax.devices()[:count]))
    spec = params.pad_to_slots(families.spec(cfg.model), ctx.layout.stages)
    values = params.abstract(spec)
    if change:
        change(values)
    batch = meshes.random_batch(0, False, cfg.model, cfg.data.batch_size)
    return explained(jax.jit(make_gradients(cfg, ctx)).trace, values, batch)


def down_first(cfg, params, x, ctx):
    return jnp.matmul(x, params["w_down"])


LAYER = "layer    layers/mlp, in each of 2 layers of the decoder"


@pytest.mark.parametrize(
    ("sizes", "layer", "x", "w"),
    [
        (
            {},
            LAYER,
            "float32[8,32,64]  layers/mlp_norm/out: batch 8, sequence 32, embed 64",
            "float32[96,64]  {}: mlp 96, embed 64",
        ),
        (
            {"fsdp": 2, "tensor": 2},
            LAYER,
            "float32[4,16,64]  layers/mlp_norm/out: batch 4 (over fsdp=2), sequence 16 (over tensor=2), embed 64",
            "float32[48,64]  {}: mlp 48 (96 over tensor=2), embed 64",
        ),
        (
            {"pipe": 2},
            f"{LAYER}, on 2 stages",
            "float32[1,32,64]  layers/mlp_norm/out: batch 1, sequence 32, embed 64",
            "float32[96,64]  {}: mlp 96, embed 64",
        ),
    ],
    ids=["one device", "mesh", "pipeline"],
)
def test_a_wrong_product_names_the_layer_and_the_axes(monkeypatch, sizes, layer, x, w):
    monkeypatch.setattr(layers, "mlp", down_first)
    lines, notes = traced(sizes)
    line = down_first.__code__.co_firstlineno + 1
    assert lines[0].startswith("dot_general requires contracting dimensions to have the same shape, got (64,) and ")
    assert lines[1].endswith(f"{HERE}:{line} in down_first")
    assert lines[2:5] == [layer, f"x        {x}", f"params['w_down'] {w.format('layers/mlp/w_down')}"]
    assert lines[5].startswith("fix      Make sizes equal")
    assert len(lines) == 6
    assert "\n".join(lines[1:]) in notes


def test_a_weight_of_another_shape_is_named_with_the_declared_size():
    def change(values):
        old = values["layers"]["mlp"]["w_up"]
        values["layers"]["mlp"]["w_up"] = jax.ShapeDtypeStruct((2, 72, 96), old.dtype)

    lines, _ = traced({}, change)
    assert lines[4] == "w        float32[72,96]  layers/mlp/w_up: embed 72, declared 64, mlp 96"
    assert " in mlp_products, jaxstack/models/layers.py:" in lines[1]

    def flatter(values):
        old = values["layers"]["mlp"]["w_up"]
        values["layers"]["mlp"]["w_up"] = jax.ShapeDtypeStruct((2, 96), old.dtype)

    lines, _ = traced({}, flatter)
    assert lines[4] == "w        float32[96]  layers/mlp/w_up: declared embed 64, mlp 96"


def test_a_layer_that_returns_another_dtype_is_told_so(monkeypatch):
    monkeypatch.setattr(layers, "mlp", lambda cfg, params, x, ctx: x.astype(jnp.complex64))
    lines, _ = traced({})
    assert "must have equal types, but they differ: The input carry x has type float32[8,32,64]" in lines[0]
    assert "A layer must return the residual stream with the shape and dtype that it reads." in lines[-1]


def test_what_a_function_of_a_layer_gathers_again_has_its_path(monkeypatch):
    """The experts gather their parameters, so their arrays are others than those that the block has."""
    real = experts.moe
    monkeypatch.setattr(experts, "moe", lambda cfg, stack, own, h, *rest: real(cfg, stack, own, h[:, :, :-1], *rest))
    lines, _ = traced({"expert": 2}, model="softmax")
    assert lines[2] == LAYER.replace("layers/mlp", "layers/moe")
    assert "params['router'] float32[64,8]  layers/moe/router: embed 64, router 8" in lines


def test_whole_arrays_and_an_error_of_einsum(monkeypatch):
    def product(cfg, params, x, ctx):
        return jnp.einsum("bsd,de->bse", x, params["w_down"][0])

    monkeypatch.setattr(layers, "mlp", product)
    lines, _ = traced({"fsdp": 2, "partitioner": "auto"})
    assert "does not contain the correct number of indices" in lines[0]
    assert lines[2] == LAYER
    assert "those above are of the whole mesh" in lines[-1]


def test_a_branch_on_a_value_and_one_index_too_many(monkeypatch):
    def branch(cfg, params, x, ctx):
        return x if x.sum() > 0 else -x

    monkeypatch.setattr(layers, "mlp", branch)
    lines, _ = traced({})
    assert lines[0] == "Attempted boolean conversion of traced array with shape bool[]."
    assert "use jnp.where or jax.lax.cond" in lines[-1]
    monkeypatch.setattr(layers, "mlp", lambda cfg, params, x, ctx: x[:, :, 0, 0])
    lines, _ = traced({})
    assert lines[0] == "Too many indices: array is 3-dimensional, but 4 were indexed"
    assert lines[2] == LAYER


def test_modules_of_flax_are_named_with_their_paths_and_axes():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(4, 6, kernel_metadata={"out_sharding": ("embed", "mlp")}, rngs=rngs)
            self.down = nnx.Param(jnp.ones((5, 4)), out_sharding=("mlp", "embed"))

        def __call__(self, x):
            return self.up(x) @ self.down[...]

    class Model(nnx.Module):
        def __init__(self):
            self.blocks = nnx.List([Block(nnx.Rngs(0)), Block(nnx.Rngs(1))])

        def __call__(self, x):
            return self.blocks[1](x)

    with nnx.use_eager_sharding(False):
        model = Model()

    @nnx.jit
    def run(model, x):
        return model(x)

    def step(x):
        with shape_errors.explained():
            return run(model, x)

    lines, notes = explained(step, jnp.ones((2, 4)))
    assert lines[2] == "layer    blocks/1, Block"
    assert lines[3].startswith("self.down[...] float32[5,4]  blocks/1/down: mlp 5, embed 4")
    assert notes.endswith("\n".join(lines[1:]))
    lines, _ = explained(step, jnp.ones((2, 3)))
    assert lines[2] == "layer    blocks/1/up, Linear"
    assert lines[3] == "x        float32[2,3]"
    assert lines[4].startswith("self.up.kernel float32[4,6]  blocks/1/up/kernel: embed 4, mlp 6")

    class Inner(linen.Module):
        @linen.compact
        def __call__(self, x):
            return x @ jnp.ones((7, 2))

    class Outer(linen.Module):
        @linen.compact
        def __call__(self, x):
            return Inner(name="inner")(x)

    lines, _ = explained(lambda x: Outer().apply({}, x), jnp.ones((2, 3)))
    assert lines[2] == "layer    inner, Inner"


def test_other_errors_stay_as_they_are(monkeypatch):
    def own(cfg, params, x, ctx):
        raise ValueError("the shape is not to my taste")

    def arity(cfg, params, x, ctx):
        return down_first(x)

    for wrong in (own, arity):
        monkeypatch.setattr(layers, "mlp", wrong)
        lines, notes = traced({})
        assert lines == []
        assert "code  " not in notes
    assert shape_errors.explain(ConfigError("the shape")) == []
    assert shape_errors.explain(KeyError("shape")) == []


def test_a_command_prints_the_lines_and_exits_with_the_code_of_a_mistake(monkeypatch, capsys):
    def execute(words, program):
        jax.jit(down_first, static_argnums=(0, 3))(None, {"w_down": jnp.ones((3, 2))}, jnp.ones((4, 2)), None)

    monkeypatch.setattr(parser, "execute", execute)
    monkeypatch.delenv("JAX_TRACEBACK_FILTERING", raising=False)
    with pytest.raises(SystemExit) as ended:
        parser.run("jaxstack", ["train"])
    assert ended.value.code == 2
    shown = capsys.readouterr().err.splitlines()
    assert shown[0].startswith("jaxstack train: error: dot_general requires contracting dimensions")
    assert shown[1].startswith("code     ")
    assert len(shown) == 5
    monkeypatch.setenv("JAX_TRACEBACK_FILTERING", "off")
    with pytest.raises(TypeError):
        parser.run("jaxstack", ["train"])


@pytest.mark.slow
def test_a_run_with_a_wrong_layer_ends_with_six_lines(tmp_path):
    (tmp_path / "text.txt").write_text("all the words of this text are here, one after the other. " * 60)
    patch = """
import sys
from jaxstack.runtime import platform
configure = platform.configure
def patched(*arguments):
    configure(*arguments)
    from jaxstack.models import layers
    layers.mlp = lambda cfg, params, x, ctx: x @ params["w_down"]
platform.configure = patched
from jaxstack.cli import parser
parser.run("jaxstack", sys.argv[1:])
"""
    flags = f"""train --run.dir={tmp_path}/run --data.source=path --data.path={tmp_path}/text.txt --data.seq_len=16
        --data.batch_size=4 --mesh.data=1 --mesh.pipe=2 --model.num_layers=2 --model.d_model=16 --model.num_heads=2
        --train.steps=2 --train.eval_steps=1"""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": str(ROOT)}
    (tmp_path / "broken.py").write_text(patch)
    words = [sys.executable, str(tmp_path / "broken.py"), *flags.split()]
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()
    assert lines[0].startswith("jaxstack train: error: dot_general requires")
    assert lines[1].endswith("broken.py:8 in <lambda>")
    assert lines[2] == f"{LAYER}, on 2 stages"
    assert lines[4] == "params['w_down'] float32[344,16]  layers/mlp/w_down: mlp 344, embed 16"
    assert len(lines) == 6
