"""Sampling text from a model, by running the whole window for every new token: the plain reference."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxstack import collectives, model
from jaxstack.config import Config, ModelConfig
from jaxstack.context import Context
from jaxstack.data import Tokenizer


def generate(
    cfg: ModelConfig,
    params: Any,
    prompts: list[list[int]],
    *,
    tokens: int,
    temperature: float,
    key: jax.Array,
    window: int,
    gate: int | None = None,
    ctx: Context | None = None,
) -> list[list[int]]:
    """Continues each prompt by `tokens` tokens.

    Args:
      prompts: token ids, one list or more, each with one id or more.
      tokens: how many to add.
      temperature: divides the logits; 0 takes the likeliest token.
      key: randomness.
      gate: domain of the prompts, for a model with a hard gate.
      window: the model sees at most so many last tokens, its training length.

    Returns:
      Prompts with their continuations.
    """
    ctx = (ctx or Context()).whole_sequences()
    spec = model.spec(cfg)
    rows = -(-len(prompts) // ctx.replicas) * ctx.replicas  # devices share the prompts; the last one fills up
    lengths = [len(prompt) for prompt in prompts]
    size = max(max(lengths) + tokens, window)
    filled = np.zeros((rows, size), np.int32)
    for i, prompt in enumerate(prompts):
        filled[i, : len(prompt)] = prompt
    ends = np.asarray(lengths + [1] * (rows - len(prompts)), np.int32)

    def work(params: Any, buffer: jax.Array, ends: jax.Array) -> jax.Array:
        own = jnp.arange(buffer.shape[0])
        row_keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(ctx.rows(buffer.shape[0]))

        def add_one(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            buffer, ends = carry
            starts = jnp.maximum(ends - window, 0)
            seen = jax.vmap(lambda row, start: jax.lax.dynamic_slice(row, (start,), (window,)))(buffer, starts)
            gates = None if gate is None else jnp.full_like(seen, gate)
            x, _ = model.hidden(cfg, params, seen, ctx, gate=gates)  # causal: what lies behind the end is not seen
            last = x[own, ends - starts - 1][:, None]
            logits = collectives.gather_equal(model.logits(cfg, params, last, ctx)[:, 0], ctx.axes("vocab"), 1)
            if temperature == 0:
                new = logits.argmax(-1)
            else:
                keys = jax.vmap(lambda k: jax.random.fold_in(k, i))(row_keys)
                new = jax.vmap(jax.random.categorical)(keys, logits / temperature)
            return buffer.at[own, ends].set(new.astype(buffer.dtype)), ends + 1

        return jax.lax.fori_loop(0, tokens, add_one, (buffer, ends))[0]

    run = jax.jit(work)
    if ctx.mesh is not None:
        local = ctx.local(work, (ctx.parameters(spec), ctx.batch, ctx.batch), ctx.batch)
        run = jax.jit(local, out_shardings=ctx.sharding(PartitionSpec()))  # whole in every process
    filled = jax.device_get(run(params, filled, ends))
    return [row[: length + tokens].tolist() for row, length in zip(filled, lengths, strict=False)]


def texts(cfg: Config, params: Any, tokenizer: Tokenizer, ctx: Context) -> list[str]:
    """The prompts of `cfg.sample` and what the model adds to them, up to the end of the document."""
    prompts = [tokenizer.encode(prompt).tolist() for prompt in cfg.sample.prompts]
    rows = generate(
        cfg.model,
        params,
        prompts,
        tokens=cfg.sample.tokens,
        temperature=cfg.sample.temperature,
        key=jax.random.key(cfg.run.seed),
        window=cfg.data.seq_len,
        gate=cfg.sample.domain if cfg.model.moe.router == "domain" else None,
        ctx=ctx,
    )
    ends = [row.index(tokenizer.separator) if tokenizer.separator in row else len(row) for row in rows]
    return [tokenizer.decode(row[:end]) for row, end in zip(rows, ends, strict=True)]
