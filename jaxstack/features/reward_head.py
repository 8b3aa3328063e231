"""A head that scores texts, for reward models: the family of decoders that have one.

The score of a token is the product of its hidden state and a vector. The score of a text is the one of its last token,
which attention lets see the whole text. The vector starts with zeros, so that all texts have the score 0 at first. The
head of the vocabulary stays as it is, without gradients: the embedding may be the same matrix.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxstack.common.tree import PyTree
from jaxstack.config import ModelConfig
from jaxstack.models.context import Context
from jaxstack.models.family import Family
from jaxstack.models.params import Param, Params, Spec, map_spec
from jaxstack.sharding import collectives

GROUP = "reward"
"""Name of the group of parameters."""


def with_reward_head(family: Family) -> Family:
    """Returns the family with a head that scores texts, and with a head of the vocabulary that is not trained."""

    def spec(cfg: ModelConfig) -> Spec:
        tree = dict(family.spec(cfg))
        if "head" in tree:
            tree["head"] = map_spec(lambda p: replace(p, frozen=True), tree["head"])
        tree[GROUP] = {"w": Param((cfg.d_model,), ("norm",), "vector", init="zeros")}
        return tree

    return replace(family, spec=spec)


def head_part(tree: PyTree) -> PyTree:
    """Returns what `scores` reads, of the parameters or of their declarations."""
    return {GROUP: tree[GROUP]}


def scores(params: Params, hidden: jax.Array, ctx: Context) -> jax.Array:
    """Returns the score of each token, float32 [B, S], from hidden states [B, S, D].

    Each device has the vector. Those that divide the vocabulary among them take turns along the width, so that each
    product is counted once.
    """
    axes = ctx.layout.axes("vocab")
    w = params[GROUP]["w"].astype(jnp.float32)
    own = jnp.arange(w.size) % collectives.count(axes) == collectives.index(axes)
    hidden, w = collectives.match_varying(hidden, jnp.where(own, w, 0.0))
    parts = jnp.einsum("bsd,d->bs", hidden.astype(jnp.float32), w, precision=jax.lax.Precision.HIGHEST)
    return collectives.all_reduce(parts, axes)
