"""Ahead-of-time compilation without another chip's compiler: counts against formulas, and errors of the command."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import BRANCHES, CONTRASTIVE, DIFFUSION, ENCODER_DECODERS, ENCODERS, FAMILIES, PAIRS

from jaxstack import families as models
from jaxstack.cli.parser import execute
from jaxstack.config import (
    Config,
    ConfigError,
    DataConfig,
    ExpertLayers,
    LoraConfig,
    MeshConfig,
    MoEConfig,
    RunConfig,
    TrainConfig,
)
from jaxstack.config.denoisers import DenoiserConfig
from jaxstack.families import encoder, flops
from jaxstack.families.context import make_context
from jaxstack.models.batches import abstract_batch
from jaxstack.models.context import Context
from jaxstack.planner import aot, estimate
from jaxstack.planner.job import Job
from jaxstack.sharding import make_mesh
from jaxstack.training.assemble import make_gradients
from jaxstack.training.state import Recipe, abstract_state, init_state, make_state

LLAMA = dataclasses.replace(FAMILIES["llama3"], vocab_size=64)
_SWITCH = MoEConfig(num_experts=4, top_k=1, normalize=False, d_ff=24, layers=ExpertLayers(first=1, every=3))
PAIR_MODELS = ENCODER_DECODERS | {
    "switch": dataclasses.replace(ENCODER_DECODERS["t5"], encoder_layers=6, num_layers=3, moe=_SWITCH),
    "adapters": dataclasses.replace(ENCODER_DECODERS["t5"], lora=LoraConfig(rank=3)),
}


@pytest.mark.parametrize("family", ["gpt2", "llama3", "qwen3", "bert_pairs", "modernbert", "dit", "dit_experts"])
def test_matmuls_counted_are_those_of_the_formula(family, monkeypatch):
    monkeypatch.setattr(encoder, "LABEL_MULTIPLE", 1)  # the padding of heads is not counted
    model = (FAMILIES | ENCODERS | PAIRS | DIFFUSION)[family]
    source = "digits" if family in DIFFUSION else "stdlib"
    data = DataConfig(source=source, seq_len=32, batch_size=2)
    cfg, ctx = Config(model=model, data=data, train=TrainConfig(remat="none")), Context()
    values = jax.eval_shape(lambda: init_state(Recipe.of(cfg))).params
    arrays = models.of(model).batch_spec(cfg.model, cfg.data).items()
    batch = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays}
    counted = aot.matmul_flops(make_gradients(cfg, ctx), values, batch)
    assert counted == 2 * 32 * flops.flops_per_token(cfg.model, 32).full


@pytest.mark.parametrize("kind", PAIR_MODELS)
def test_matmuls_of_pairs_are_those_of_the_formula(kind):
    data = DataConfig(seq_len=32, target_len=12, batch_size=2, denoisers=(DenoiserConfig(),))
    # Without relative biases, whose selection is a product on some devices. It is not one of the model.
    model = dataclasses.replace(PAIR_MODELS[kind], positions="none")
    cfg = Config(model=model, data=data, train=TrainConfig(remat="none"), run=RunConfig(init_from="x"))
    values = jax.eval_shape(lambda: init_state(Recipe.of(cfg))).params
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    batch = abstract_batch(models.of(cfg.model).batch_spec(cfg.model, cfg.data), one)
    counted = aot.matmul_flops(make_gradients(cfg, Context()), values, batch)
    assert counted == pytest.approx(2 * 32 * flops.flops_per_token(cfg.model, 32, 12).full, rel=1e-12)


@pytest.mark.parametrize("kind", [*PAIR_MODELS, "dit_text"])
def test_a_made_up_batch_has_no_padding(kind, rng):
    """Tokens of segment 0 are padding: a decoder would see no token of its encoder."""
    source = {"source": "captions", "path": "a.jsonl"} if kind == "dit_text" else {"denoisers": (DenoiserConfig(),)}
    data = DataConfig(seq_len=32, target_len=12, batch_size=2, **source)
    cfg = Config(model=(PAIR_MODELS | DIFFUSION)[kind], data=data, run=RunConfig(init_from="x"))
    arrays = models.of(cfg.model).batch_spec(cfg.model, cfg.data).items()
    made = {name: array.draw(rng) for name, array in arrays if name.endswith("segment_ids")}
    assert made.keys() >= {"encoder_segment_ids"}
    assert all((ids == 1).all() for ids in made.values())


@pytest.mark.parametrize("kind", [*CONTRASTIVE, "dit_text"])
def test_matmuls_of_pictures_with_texts_are_those_of_the_formula(kind):
    """Both rows of the batch are compared with both."""
    model = dataclasses.replace((CONTRASTIVE | DIFFUSION)[kind], positions="none")  # see pairs
    source = {"source": "captions", "path": "a.jsonl"} if kind == "dit_text" else {"source": "digits"}
    if kind == "unix2":  # each picture has a text in two languages
        source |= {"languages": ("en", "de")}
    cfg = Config(model=model, data=DataConfig(seq_len=32, target_len=12, batch_size=2, **source))
    values = jax.eval_shape(lambda: init_state(Recipe.of(cfg))).params
    batch = abstract_batch(
        models.of(model).batch_spec(cfg.model, cfg.data), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )
    counted = aot.matmul_flops(make_gradients(cfg, Context()), values, batch)
    assert counted == pytest.approx(2 * 32 * flops.flops_per_token(model, 32, 12, 2).full, rel=1e-12)


@pytest.mark.parametrize("kind", BRANCHES)
@pytest.mark.parametrize("frozen", [False, True])
def test_matmuls_of_branches_are_those_of_the_formula(kind, frozen, monkeypatch):
    monkeypatch.setattr(encoder, "LABEL_MULTIPLE", 1)
    own = dataclasses.replace(BRANCHES[kind].branches, freeze_trunk=frozen)
    model = dataclasses.replace(BRANCHES[kind], branches=own)
    cfg = Config(model=model, data=DataConfig(seq_len=32, batch_size=2), run=RunConfig(init_from="x"))
    values = jax.eval_shape(lambda: init_state(Recipe.of(cfg))).params
    batch = abstract_batch(
        models.of(model).batch_spec(cfg.model, cfg.data), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )
    counted = aot.matmul_flops(make_gradients(cfg, Context()), values, batch)
    assert counted == pytest.approx(2 * 32 * flops.flops_per_token(model, 32).full, rel=1e-12)


@pytest.mark.parametrize("accum", [1, 2])
def test_memory_of_the_state_is_what_lies_on_a_device(accum):
    cfg = Config(
        model=LLAMA,
        data=DataConfig(seq_len=32, batch_size=8),
        train=TrainConfig(grad_accum=accum),
        mesh=MeshConfig(data=2, fsdp=2, tensor=2),
    )
    ctx = make_context(cfg, make_mesh(cfg.mesh, 8 // accum, jax.devices()[:8]))
    abstract = abstract_state(Recipe.of(cfg), ctx)
    state = make_state(Recipe.of(cfg), ctx, abstract)
    batch = {"tokens": jax.ShapeDtypeStruct((8, 32), jnp.int32, sharding=ctx.layout.sharding(ctx.layout.batch))}
    memory = estimate.memory(Job(cfg, ctx), abstract, batch)
    stored = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    assert memory["parameters, float32"] + memory["optimizer state"] == stored
    assert memory["batch"] == 8 * 32 * 4 / 4
    # In float32, a gradient is as large as its parameter; accumulation adds that of a microbatch.
    assert memory["gradients"] == memory["parameters, float32"] * accum


def test_the_formula_falls_with_what_is_split_and_recomputed():
    def saved(remat: str, **mesh: int) -> float:
        cfg = Config(
            model=LLAMA,
            data=DataConfig(seq_len=32, batch_size=8),
            train=TrainConfig(remat=remat),
            mesh=MeshConfig(**{"data": 1} | mesh),
        )
        devices = int(np.prod(list(cfg.mesh.sizes.values())))
        ctx = make_context(cfg, make_mesh(cfg.mesh, 8, jax.devices()[:devices]))
        return sum(
            v
            for k, v in estimate.memory(Job(cfg, ctx), abstract_state(Recipe.of(cfg), ctx), {}).items()
            if "saved" in k
        )

    assert saved("none") > saved("selective") > saved("full") > 0
    assert saved("full", tensor=2) * 2 == saved("full") == saved("full", tensor=2, sequence_parallel=False)
    assert saved("selective", tensor=2) * 2 == saved("selective") == saved("selective", fsdp=4) * 4


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--target is missing"),
        (["--target=v5e:2x2", "--data.source=path", "--data.path=x.txt"], "model.vocab_size is missing"),
        (["--target=tpu:2x2", "--model.vocab_size=64"], "'tpu' is not the name of a chip. Use one of t4"),
        (["--target=v5e:4,4", "--model.vocab_size=64"], "'4,4' is not a topology"),
    ],
    ids=str,
)
def test_mistakes_are_answered(argv, message):
    with pytest.raises(ConfigError, match=message):
        execute(["plan", *argv])


@pytest.mark.parametrize(("partitioner", "error"), [("auto", ConfigError), ("manual", ValueError)])
def test_a_loop_of_the_partitioner_whose_length_is_unknown_is_an_answer(partitioner, error):
    """XLA may write matmuls with their collectives as loops; `manual` has no such loop, so that one is a fault."""
    program = """
ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8] parameter(0)
  ROOT %w = f32[8] while(%p), condition=%c, body=%b, metadata={op_name="jit(step)/dot_general"}
}
%c (x: f32[8]) -> pred[] {
  %x = f32[8] parameter(0)
  ROOT %t = pred[] constant(true)
}
%b (y: f32[8]) -> f32[8] {
  %y = f32[8] parameter(0)
  ROOT %s = f32[8] collective-permute(%y), source_target_pairs={{0,1},{1,0}}
}
"""
    mesh = MeshConfig(data=2, partitioner=partitioner)
    cfg = Config(model=LLAMA, data=DataConfig(seq_len=32, batch_size=8), mesh=mesh)
    ctx = make_context(cfg, make_mesh(mesh, 8, jax.devices()[:2]))
    with pytest.raises(error, match="loop whose trip count"):
        aot._collectives(program, ctx, "v5p:2")


@pytest.mark.parametrize(
    ("target", "module", "extra"), [("v5e:2x2", "libtpu", "tpu"), ("h100:1x1x4", "jax_cuda13_plugin", "cuda13")]
)
def test_without_a_compiler_the_formula_is_printed_and_the_extra_named(target, module, extra, capsys):
    if importlib.util.find_spec(module):
        pytest.skip(f"{module} is installed")
    execute(["plan", f"--target={target}", "--model.vocab_size=64", "--mesh.data=-1"])
    out = capsys.readouterr().out
    assert "nothing was compiled" in out
    assert f"pip install -e '.[{extra}]'" in out
    assert "by formula" in out
