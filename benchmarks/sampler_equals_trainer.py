"""Compares log-probabilities of the sampler with those of the trainer, bit by bit.

    python benchmarks/sampler_equals_trainer.py

The reference is the forward pass of 8 rows of 128 tokens without gradients. It is compared with other batches and
lengths, with the program that also computes gradients, and with tokens from a KV cache; then with exact texts
(`generate.exact`), and with simulated meshes. The operations that differ are compared alone. All figures are largest
absolute differences in nats, and shares of tokens whose bits differ.
"""

import argparse
import os
from dataclasses import replace
from functools import partial
from typing import Any

import record

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")

ROWS, SLOTS = 8, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["dense", "experts", "wide"])
    args = parser.parse_args()

    from jaxstack.config import ModelConfig, MoEConfig

    dense = ModelConfig(num_layers=2, d_model=64, num_heads=4, d_ff=128, vocab_size=256)
    models = {
        "dense": dense,
        "wide": replace(dense, d_model=384, num_heads=6, d_ff=1024),
        "experts": replace(dense, moe=MoEConfig(num_experts=4, top_k=2)),
    }
    operations = compare_operations()
    for each in operations:
        print(*each.values(), flush=True)
    meshes, cases = [], []
    for mesh in ({"data": 2}, {"tensor": 2}, {"fsdp": 2}, {"pipe": 2}):
        found = compare_mesh(models["dense"], mesh)
        print(mesh, *found.values(), flush=True)
        meshes.append({"mesh": mesh} | found)
    for name in args.models:
        for dtype in ("float32", "bfloat16"):
            for found in compare(models[name], dtype):
                print(name, dtype, *found.values(), flush=True)
                cases.append({"model": name, "dtype": dtype} | found)
            result = {"rows": ROWS, "slots": SLOTS, "cases": cases, "meshes": meshes, "operations": operations}
            record.record("sampler_equals_trainer", result)


def inputs(cfg: Any) -> tuple[Any, Any, Any]:
    """Returns varied parameters, tokens and targets."""
    import jax
    import numpy as np

    from jaxstack import families
    from jaxstack.models import params

    rng = np.random.default_rng(0)
    values = params.init(jax.random.key(0), families.spec(cfg))
    values = jax.tree.map(lambda a: a + rng.normal(0, 0.05, a.shape).astype(np.float32), values)
    tokens = rng.integers(1, cfg.vocab, (ROWS, SLOTS + 1)).astype(np.int32)
    return values, tokens[:, :-1], tokens[:, 1:]


def difference(found: Any, expected: Any) -> dict[str, float]:
    """Returns the largest difference, and the share of elements with other bits."""
    import numpy as np

    found, expected = (np.asarray(a, np.float32) for a in (found, expected))
    return {"largest": float(np.abs(found - expected).max()), "share": float((found != expected).mean())}


def compare(cfg: Any, dtype: str) -> list[dict[str, Any]]:
    """Returns the differences on one device."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxstack import families
    from jaxstack.config import Config, SampleConfig
    from jaxstack.generate.engine import Engine
    from jaxstack.generate.exact import Exact
    from jaxstack.generate.kv_cache import CachedDecoder
    from jaxstack.generate.score import Scorer
    from jaxstack.models import decoder
    from jaxstack.planner import memory
    from jaxstack.training import losses

    ctx = memory.context(Config(model=cfg), 1, "cpu")
    ctx = replace(ctx, layout=replace(ctx.layout, mesh=None), dtype=jnp.dtype(dtype)).whole_sequences()
    values, x, y = inputs(cfg)

    def log_probs(values: Any, x: Any, y: Any) -> Any:
        hidden, _ = families.of(cfg).hidden_states(cfg, values, {"tokens": x}, ctx)
        return decoder.log_probs(cfg, values, hidden, y, ctx)[0]

    forward = jax.jit(log_probs)
    base, half = np.asarray(forward(values, x, y)), SLOTS // 2
    order = np.random.default_rng(1).permutation(ROWS)
    pad = partial(np.pad, pad_width=((0, 0), (0, SLOTS)))
    found = {
        "rows in another order": (forward(values, x[order], y[order]), base[order]),
        "one row at a time": (np.concatenate([forward(values, x[i : i + 1], y[i : i + 1]) for i in range(ROWS)]), base),
        "rows of twice the length": (np.asarray(forward(values, pad(x), pad(y)))[:, :SLOTS], base),
        "rows of half the length": (forward(values, x[:, :half], y[:, :half]), base[:, :half]),
    }

    def with_gradients(function: Any) -> Any:
        def loss(values: Any) -> Any:
            found = function(values, x, y)
            return (found * jnp.arange(SLOTS)).sum(), found

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(values)[0][1]

    def exact(values: Any, x: Any, y: Any) -> Any:
        return losses.sequence_log_probs(cfg, values, {"tokens": x, "targets": y}, ctx)

    found["with gradients, residuals saved"] = with_gradients(log_probs), base
    found["with gradients, sequence_log_probs"] = with_gradients(exact), base

    def cached(values: Any, tokens: Any) -> Any:
        first = jnp.zeros(tokens.shape[0], jnp.int32)
        model = CachedDecoder.create(cfg, values, ctx, gate=None, vocabulary=cfg.vocab, first=first, num_slots=SLOTS)
        logits, cache = model.prefill(tokens[:, :half])

        def step(cache: Any, i: Any) -> Any:
            logits, cache = model.decode_token(jax.lax.dynamic_index_in_dim(tokens, i, 1, False), i, cache)
            return cache, logits

        _, more = jax.lax.scan(step, cache, jnp.arange(half, SLOTS))
        every = jax.nn.log_softmax(jnp.concatenate([logits[:, None], more.swapaxes(0, 1)], 1), -1)
        return every

    decoded = jax.jit(cached)
    for rows in (ROWS, 1):
        every = np.concatenate([decoded(values, x[i : i + rows]) for i in range(0, ROWS, rows)])
        own = np.take_along_axis(every, y[:, half - 1 :, None], -1)[..., 0]
        found[f"KV cache, {rows} rows at a time"] = own, base[:, half - 1 :]

    scorer, engine = Scorer.create(cfg, values, ctx), Engine.create(cfg, values, ctx=ctx)
    writer = Exact(scorer, engine, SampleConfig(tokens=32, temperature=1.0, prompts=None), (), ROWS)
    prompts = [row[: 20 + 3 * i].tolist() for i, row in enumerate(x)]
    texts, alone = writer.texts(prompts, 0), [writer.texts([prompt], 0)[0] for prompt in prompts[:2]]
    rows = np.zeros((ROWS, SLOTS + 1), np.int32)
    for row, prompt, text in zip(rows, prompts, texts, strict=True):
        row[: len(prompt) + 32] = [*prompt, *text.tokens]
    x, y = rows[:, :-1], rows[:, 1:]
    trained = np.asarray(with_gradients(exact))
    own = np.stack([trained[i, len(p) - 1 : len(p) + 31] for i, p in enumerate(prompts)])
    found["exact texts, against sequence_log_probs"] = np.stack([text.log_probs for text in texts]), own
    same = all(one.tokens == other.tokens for one, other in zip(alone, texts, strict=False))
    found["exact texts, one prompt at a time"] = np.stack([text.log_probs for text in alone]), own[:2]
    cases = [{"what": what} | difference(*pair) for what, pair in found.items()]
    cases[-2]["redrafted"] = sum(text.redrafted for text in texts)
    cases[-1]["same_tokens"] = same
    return cases


def compare_mesh(cfg: Any, mesh: dict[str, int]) -> dict[str, Any]:
    """Returns the differences between a mesh of simulated devices and one device, in float32."""
    import jax

    from jaxstack import families, sharding
    from jaxstack.config import Config, DataConfig, MeshConfig
    from jaxstack.families.context import make_context
    from jaxstack.generate.score import Scorer

    values, x, y = inputs(cfg)
    found = []
    for axes in ({}, mesh):
        sizes = replace(MeshConfig(data=1), **axes)
        run = Config(model=cfg, mesh=sizes, data=DataConfig(batch_size=ROWS, seq_len=SLOTS))
        count = 1
        for size in axes.values():
            count *= size
        ctx = make_context(run, sharding.make_mesh(sizes, ROWS, jax.devices()[:count]))
        scorer = Scorer.create(cfg, values, ctx)
        where = jax.tree.map(ctx.layout.sharding, ctx.layout.parameters(families.spec(cfg)))
        scorer = replace(scorer, params=jax.device_put(values, where))
        texts = [[*row.tolist(), int(last[-1])] for row, last in zip(x, y, strict=True)]
        scores = dict(scorer.scores(texts, ROWS))
        found.append([scores[i].log_probs for i in range(ROWS)])
    return difference(found[1], found[0])


def compare_operations() -> list[dict[str, Any]]:
    """Returns which operations give other bits to the rows of a smaller array than to those of 512 rows, in float32."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    rng, found = np.random.default_rng(0), []

    def draw(*shape: int) -> Any:
        return rng.normal(size=shape).astype(np.float32)

    def rms(x: Any) -> Any:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    for what, work, x, others in (
        ("matmul, 64 terms", jnp.matmul, draw(512, 64), [draw(64, 256)]),
        ("matmul, 256 terms", jnp.matmul, draw(512, 256), [draw(256, 256)]),
        ("matmul, 384 terms", jnp.matmul, draw(512, 384), [draw(384, 384)]),
        ("matmul, 3072 terms", jnp.matmul, draw(512, 3072), [draw(3072, 768)]),
        ("scores of 128 keys", lambda q, k: q @ k.T, draw(512, 64), [draw(128, 64)]),
        ("mean of squares", rms, draw(512, 384), []),
        ("softmax over 128 keys", jax.nn.softmax, draw(512, 128), []),
        ("log-sum-exp of 256 logits", partial(jax.nn.logsumexp, axis=-1), draw(512, 256), []),
    ):
        program = jax.jit(work)
        whole = np.asarray(program(x, *others))
        differ = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if (program(x[:n], *others) != whole[:n]).any()]
        found.append({"operation": what, "rows_with_other_bits": differ})
    return found


if __name__ == "__main__":
    main()
