"""A small causal language model in Flax nnx. Most of its matrices are annotated with logical axes; norms are not."""

import jax
import jax.numpy as jnp
from flax import nnx


class Attention(nnx.Module):
    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.heads = heads

        def linear(*axes: str) -> nnx.Linear:
            return nnx.Linear(width, width, use_bias=False, kernel_metadata={"out_sharding": axes}, rngs=rngs)

        self.query = linear("embed", "heads")
        self.key = linear("embed", "heads")
        self.value = linear("embed", "heads")
        self.out = linear("heads", "embed")

    def __call__(self, x: jax.Array) -> jax.Array:
        split = (*x.shape[:2], self.heads, -1)
        q, k, v = (f(x).reshape(split) for f in (self.query, self.key, self.value))
        return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, dropout: float, rngs: nnx.Rngs):
        self.norm1 = nnx.RMSNorm(width, rngs=rngs)
        self.attention = Attention(width, heads, rngs)
        self.norm2 = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(
            width,
            4 * width,
            kernel_metadata={"out_sharding": ("embed", "mlp")},
            bias_metadata={"out_sharding": ("mlp",)},
            rngs=rngs,
        )
        self.down = nnx.Linear(
            4 * width, width, use_bias=False, kernel_metadata={"out_sharding": ("mlp", "embed")}, rngs=rngs
        )
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))))


class Transformer(nnx.Module):
    def __init__(
        self, vocab: int, width: int, heads: int, layers: int, length: int, rngs: nnx.Rngs, dropout: float = 0.0
    ):
        self.tokens = nnx.Embed(vocab, width, embedding_metadata={"out_sharding": ("vocab", "embed")}, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (length, width)))
        self.blocks = nnx.List([Block(width, heads, dropout, rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Returns logits [batch, length, vocab] of token ids [batch, length]; the embedding is also the output head."""
        x = self.tokens(ids) + self.positions[jnp.arange(ids.shape[1])]
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))
