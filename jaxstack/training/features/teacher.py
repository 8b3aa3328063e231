"""The teacher of a distilled run: what it says of each token of a batch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxstack.common.tree import Batch
from jaxstack.config import Config, ConfigError, PipelineConfig
from jaxstack.data import Tokenizer
from jaxstack.families.context import make_context
from jaxstack.hf.pretrained import PretrainedFolder
from jaxstack.kernels.cross_entropy import log_sum_exp
from jaxstack.models import decoder, family
from jaxstack.models.context import Context
from jaxstack.models.params import Params, cast_matrices
from jaxstack.sharding import collectives
from jaxstack.training.services import init_from

Teach = Callable[[Batch], Batch]
"""Adds `teacher_ids` and `teacher_log_probs` [B, S, K] to a global batch."""


def open_teacher(cfg: Config, tokenizer: Tokenizer, mesh: jax.sharding.Mesh) -> Teach:
    """Reads the parameters of `distill.teacher`, and returns what adds what it says to batches; without one, nothing.

    Its parameters are sharded over the mesh by the rules of their own model, in the dtype of the run. They belong to no
    checkpoint. It reads whole sequences, so devices of the axis `context` do the same work.

    Args:
      cfg: the resolved configuration of the run that learns.
      tokenizer: of its data.
      mesh: its mesh.

    Raises:
      ConfigError: the teacher cannot be read, or it does not suit the run.
    """
    if cfg.distill.teacher is None:
        return lambda batch: batch
    name = f"distill.teacher={cfg.distill.teacher}"
    source = init_from.find_source(str(cfg.distill.teacher), "distill.teacher")
    init_from.require_same_tokenizer(source, name, cfg.data, tokenizer)
    model = replace(source.model, pad_vocab_to=cfg.model.pad_vocab_to)
    if model.family != "decoder" or model.moe.router in ("domain", "timestep"):
        kind = f"model.family={model.family}" if model.family != "decoder" else f"model.moe.router={model.moe.router}"
        raise ConfigError(
            f"{name} has {kind}, which does not teach decoders. Name a run whose model is a plain decoder."
        )
    if model.vocab_size != cfg.model.vocab_size:
        raise ConfigError(
            f"{name} has model.vocab_size={model.vocab_size}, and this run has {cfg.model.vocab_size}. Name a teacher "
            f"with the same tokenizer."
        )
    if model.positions == "learned" and (model.max_positions or 0) < cfg.data.seq_len:
        raise ConfigError(
            f"{name} has learned positions up to {model.max_positions}, but data.seq_len={cfg.data.seq_len}. Shorten "
            f"data.seq_len, or name another teacher."
        )
    run = replace(cfg, model=replace(model, dropout=0.0), optim=replace(cfg.optim, ema=None), pipeline=PipelineConfig())
    ctx = make_context(run, mesh)
    if isinstance(source, PretrainedFolder):
        with source:
            values = source.read_params(ctx, cfg.model.pad_vocab_to)
    else:
        train = replace(run.train, qat=source.train.qat, qat_group=source.train.qat_group)
        there = replace(run, run=replace(run.run, dir=source.run.dir), optim=source.optim, train=train, model=model)
        values = init_from.restore_params(there, ctx)
    return make_teach(replace(run, model=run.model.base), values, ctx.whole_sequences())


def make_teach(cfg: Config, values: Params, ctx: Context) -> Teach:
    """Returns what a model says of batches.

    Args:
      cfg: a configuration with the model of the teacher.
      values: its parameters.
      ctx: its execution context, for whole sequences.
    """
    model, count = cfg.model, min(cfg.distill.top_tokens, cfg.model.vocab)
    spec = family.spec(model)

    def likeliest(values: Params, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns ids and log-probabilities [B, C, K] after hidden states [B, C, D]."""
        logits = decoder.logits(model, values, hidden, ctx) / cfg.distill.temperature
        axes, V = ctx.layout.axes("vocab"), logits.shape[-1]
        lse = log_sum_exp(logits, axes)
        found, ids = jax.lax.top_k(logits, min(count, V))
        ids += collectives.index(axes) * V
        found, ids = (collectives.all_gather_invariant(a, axes, 2) for a in (found, ids))
        found, at = jax.lax.top_k(found, count)
        return jnp.take_along_axis(ids, at, axis=-1), lse.log_probs(found)

    def work(values: Params, batch: Batch) -> dict[str, jax.Array]:
        hidden, _ = decoder.hidden_states(model, values, batch, ctx)
        B, S, D = hidden.shape
        size = max(1, min(S, ctx.ops.loss_chunk // B))
        padded = jnp.pad(hidden, ((0, 0), (0, -S % size), (0, 0))).reshape(B, -1, size, D).swapaxes(0, 1)
        ids, log_probs = jax.lax.map(lambda x: likeliest(values, x), padded)
        whole = (a.swapaxes(0, 1).reshape(B, -1, count)[:, :S] for a in (ids, log_probs))
        return dict(zip(("teacher_ids", "teacher_log_probs"), whole, strict=True))

    def read(batch: Batch) -> Batch:
        return {name: batch[name] for name in ("tokens", "positions", "segment_ids") if name in batch}

    if ctx.layout.mesh is None:
        local: Callable[..., Any] = work
    else:
        local = ctx.layout.local(work, (ctx.layout.parameters(spec), ctx.layout.batch), ctx.layout.batch)
    program = jax.jit(local)
    values = jax.jit(lambda values: cast_matrices(spec, values, ctx.dtype))(values)
    return lambda batch: {**batch, **program(values, read(batch))}
