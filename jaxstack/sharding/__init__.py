"""Meshes, the rules that map arrays to them, and any Flax model placed by those rules."""

from jaxstack.sharding.flax import placed, shard
from jaxstack.sharding.mesh import AXES, BATCH_AXES, make_mesh
from jaxstack.sharding.rules import Leaf, Rules, ShardingError, transformer
from jaxstack.sharding.summary import guard, over_even_split, replicated_fraction, table

__all__ = [
    "AXES",
    "BATCH_AXES",
    "Leaf",
    "Rules",
    "ShardingError",
    "guard",
    "make_mesh",
    "over_even_split",
    "placed",
    "replicated_fraction",
    "shard",
    "table",
    "transformer",
]
