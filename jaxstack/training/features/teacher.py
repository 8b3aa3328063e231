"""The teacher of a distilled run: what it says of each token, or of each patch of a picture, of a batch.

A teacher of tokens or labels says which ones are likely. A teacher of pictures says a velocity.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxstack import families, kernels
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import ModelConfig
from jaxstack.config.training import DistillConfig
from jaxstack.families import diffusion, encoder
from jaxstack.kernels.cross_entropy import log_sum_exp
from jaxstack.models import decoder
from jaxstack.models.context import Context
from jaxstack.models.params import Params, cast_matrices
from jaxstack.sharding import collectives
from jaxstack.training.losses import Loss, Sums

Teach = Callable[[Batch], Batch]
"""Adds what a teacher says to a global batch: `teacher_ids` and `teacher_log_probs` [B, S, K], or of pictures
`teacher_velocity` [B, S, P]."""

GATES = ("gate_ids", "encoder_gate_ids")
"""Arrays of a batch that choose experts. A model without experts by domain does not read them."""


def taught(loss: Loss, distill: DistillConfig, model: ModelConfig) -> Loss:
    """Returns the loss of a model that is mixed with the teacher's, for batches of `make_teach`.

    A batch that no teacher has seen gets `loss`. Of several terms, the teacher has a part in the first one.
    """
    mix = kernels.Mix(distill.weight, distill.temperature)
    name = model.objective.terms[0].name

    def measure(
        hidden: jax.Array, w: jax.Array, targets: jax.Array, weights: jax.Array, *teacher: jax.Array, **options: Any
    ) -> jax.Array:
        ids, log_probs = teacher
        return kernels.distillation_loss(hidden, w, targets, weights, (ids, log_probs), mix, **options)

    def mixed(cfg: ModelConfig, params: Params, hidden: PyTree, batch: Batch, ctx: Context) -> Sums:
        if "teacher_velocity" in batch:
            own = loss(cfg, params, hidden, batch, ctx)[name]
            apart = diffusion.squared_error(cfg, params, hidden, batch, batch["teacher_velocity"], ctx)
            return {name: (1 - distill.weight) * own + distill.weight * apart}
        if "teacher_ids" not in batch:
            return loss(cfg, params, hidden, batch, ctx)
        arrays = [batch[name] for name in ("targets", "loss_weights", "teacher_ids", "teacher_log_probs")]
        over_classes = encoder.sum_over_classes if cfg.family == "encoder" else decoder.sum_over_vocabulary
        first = {name: over_classes(measure, cfg, params, hidden, arrays, ctx)}
        return loss(cfg, params, hidden, batch, ctx) | first if len(cfg.objective.terms) > 1 else first

    return mixed


def make_teach(distill: DistillConfig, model: ModelConfig, values: Params, ctx: Context) -> Teach:
    """Returns what a teacher says of batches.

    Args:
      distill: how many tokens it names, and its temperature.
      ctx: its execution context, for whole sequences.
    """
    count = min(distill.top_tokens, model.classes)
    spec = families.spec(model)
    family = families.of(model)

    def likeliest(values: Params, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns ids and log-probabilities [B, C, K] after hidden states [B, C, D]."""
        logits = family.logits(model, values, hidden, ctx) / distill.temperature
        axes = ctx.layout.axes("vocab")
        V = logits.shape[-1]
        lse = log_sum_exp(logits, axes)
        found, ids = jax.lax.top_k(logits, min(count, V))
        ids += collectives.index(axes) * V
        found, ids = (collectives.all_gather_invariant(a, axes, 2) for a in (found, ids))
        found, at = jax.lax.top_k(found, count)
        return jnp.take_along_axis(ids, at, axis=-1), lse.log_probs(found)

    def work(values: Params, batch: Batch) -> dict[str, jax.Array]:
        hidden, _ = family.hidden_states(model, values, batch, ctx)
        if model.family == "diffusion":
            velocity = diffusion.predict(model, values, hidden, batch, ctx)
            return {"teacher_velocity": diffusion.gather_predicted(velocity, ctx)}
        B, S, D = hidden.shape
        size = max(1, min(S, ctx.ops.loss_chunk // B))
        padded = jnp.pad(hidden, ((0, 0), (0, -S % size), (0, 0))).reshape(B, -1, size, D).swapaxes(0, 1)
        ids, log_probs = jax.lax.map(lambda x: likeliest(values, x), padded)
        whole = (a.swapaxes(0, 1).reshape(B, -1, count)[:, :S] for a in (ids, log_probs))
        return dict(zip(("teacher_ids", "teacher_log_probs"), whole, strict=True))

    def read(batch: Batch) -> Batch:
        """Returns what the layers read: what is learned of a batch would only be sent to the devices again."""
        return {name: a for name, a in batch.items() if not name.endswith(("targets", "weights"))}

    if ctx.layout.mesh is None:
        local: Callable[..., Any] = work
    else:
        local = ctx.layout.local(work, (ctx.layout.parameters(spec), ctx.layout.batch), ctx.layout.batch)
    program = jax.jit(local)
    values = jax.jit(lambda values: cast_matrices(spec, values, ctx.dtype))(values)
    return lambda batch: {**batch, **program(values, read(batch))}


def without_gates(teach: Teach, model: ModelConfig) -> Teach:
    """Returns a teacher whose batches lack the domains that a model without experts by domain does not read."""
    if model.family == "diffusion" or (model.moe.num_experts and model.moe.router == "domain"):
        return teach
    return lambda batch: {name: a for name, a in teach(batch).items() if name not in GATES}
