"""Trains a family of one's own on eight simulated devices: a decoder that also predicts the token after the next.

    python docs/examples/own_family.py

It differs from `jaxstack.models.decoder` in one more output matrix, and in a second loss with tokens of its own. The
mesh has two stages of a pipeline, FSDP and tensor parallelism; the family names none of them.
"""

import os

if not {"JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS"} & os.environ.keys():
    os.environ.update(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="8")

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxstack import kernels
from jaxstack.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from jaxstack.config.objective import Objective, Term
from jaxstack.families import register_family
from jaxstack.families.context import make_context
from jaxstack.models import decoder
from jaxstack.models.batches import BatchArray, BatchSpec
from jaxstack.models.context import Context
from jaxstack.models.params import Param, Params, Spec
from jaxstack.sharding import make_mesh
from jaxstack.training.assemble import jit_train_step
from jaxstack.training.state import Recipe, abstract_state, make_state


def spec(cfg: ModelConfig) -> Spec:
    """Declares the parameters: those of a decoder, and a second head. Rules shard dimensions by their names."""
    return decoder.spec(cfg) | {"second": {"w": Param((cfg.d_model, cfg.vocab), ("embed", "vocab"))}}


def batch_spec(model: ModelConfig, data: DataConfig) -> BatchSpec:
    """Declares a batch: that of a decoder, and the targets two tokens ahead with weights of their own."""
    first = decoder.batch_spec(model, data)
    ahead = BatchArray(first["targets"].shape, "ids", model.vocab), first["loss_weights"]
    return first | dict(zip(("second_targets", "second_weights"), ahead, strict=True))


def loss(cfg: ModelConfig, params: Params, hidden: jax.Array, batch: Any, ctx: Context) -> dict[str, jax.Array]:
    """Returns a sum for each term; who calls divides each by the weights of its term in the whole batch."""
    w = ctx.layout.gather_params(spec(cfg)["second"], params["second"])["w"].astype(ctx.dtype)
    targets, axes = batch["second_targets"], ctx.layout.axes("vocab")  # each device has some of the vocabulary
    second = kernels.cross_entropy(
        hidden, w, targets, batch["second_weights"], vocab_axes=axes, vocab_size=cfg.vocab, chunk=ctx.ops.loss_chunk
    )
    return decoder.loss(cfg, params, hidden, batch, ctx) | {"second": second}


TERMS = (Term("loss"), Term("second", weights="second_weights", scale=0.5))
family = replace(decoder.FAMILY, spec=spec, batch_spec=batch_spec, loss=loss)
register_family("two_ahead", family, Objective("held-out loss", "nats per token", terms=TERMS))


def make_batch(rng: np.random.Generator, cfg: Config) -> dict[str, np.ndarray]:
    """Returns rows in which each token is the sum of the two before it, modulo the vocabulary."""
    rows, length = cfg.data.batch_size, cfg.data.seq_len
    ids = rng.integers(0, cfg.model.vocab, (rows, length + 2)).astype(np.int32)
    for i in range(2, length + 2):
        ids[:, i] = (ids[:, i - 1] + ids[:, i - 2]) % cfg.model.vocab
    known = np.broadcast_to(np.arange(length) >= 1, (rows, length)).astype(np.float32)  # the first sum needs two tokens
    targets = {"targets": ids[:, 1:-1], "second_targets": ids[:, 2:]}
    return {"tokens": ids[:, :-2], "loss_weights": known, "second_weights": known} | targets


if __name__ == "__main__":
    cfg = Config(
        model=ModelConfig(family="two_ahead", num_layers=2, d_model=64, num_heads=4, d_ff=128, vocab_size=16),  # type: ignore[arg-type]
        data=DataConfig(seq_len=16, batch_size=64),
        train=TrainConfig(steps=300),
        optim=OptimConfig(lr=3e-3, warmup_steps=20),
        mesh=MeshConfig(data=1, pipe=2, fsdp=2, tensor=2),
    )
    ctx = make_context(cfg, make_mesh(cfg.mesh, cfg.data.batch_size))
    abstract = abstract_state(Recipe.of(cfg), ctx)
    state, train_step = make_state(Recipe.of(cfg), ctx, abstract), jit_train_step(cfg, ctx, abstract)
    rng = np.random.default_rng(0)
    for step in range(cfg.train.steps):
        state, metrics = train_step(state, jax.device_put(make_batch(rng, cfg), ctx.layout.sharding(ctx.layout.batch)))
        # Read in every step: with many steps under way, simulated devices may wait for each other without end.
        loss, second = float(metrics["loss"]), float(metrics["loss_second"])
        if step % 100 == 0 or step == cfg.train.steps - 1:
            print(f"step {step:3d}  loss {loss:.3f}  second token {second:.3f}")
