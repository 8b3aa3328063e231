"""Mixture of experts: routers choose experts, `dispatch` sends tokens to them and back, `metrics` sums statistics.

All functions work on local arrays. They run as they are on one device. Inside a fully manual
`jax.shard_map(check_vma=True)` they take the names of the mesh axes that they communicate over. None sums over data.

Suffixes: T tokens of this shard, k choices of a token, N rows of (token, choice) pairs, E experts, D width, F hidden
width of an expert.
"""

from jaxstack.moe.dispatch import MoEOptions, moe_mlp, upcycle
from jaxstack.moe.metrics import balance_loss, entropy_sum, load, summary, z_loss
from jaxstack.moe.pairs import choose_replicas
from jaxstack.moe.routers import (
    Routing,
    by_domain,
    by_timestep,
    check_domains,
    sigmoid_groups,
    top_k_softmax,
    update_bias,
)

__all__ = [
    "MoEOptions",
    "Routing",
    "balance_loss",
    "by_domain",
    "by_timestep",
    "check_domains",
    "choose_replicas",
    "entropy_sum",
    "load",
    "moe_mlp",
    "sigmoid_groups",
    "summary",
    "top_k_softmax",
    "upcycle",
    "update_bias",
    "z_loss",
]
