"""Device meshes, the rules that map arrays to them, and sharding of any Flax model by these rules."""

from jaxstack.sharding.flax import shard, shardings_of
from jaxstack.sharding.mesh import AXES, BATCH_AXES, abstract_mesh, find_devices, make_mesh
from jaxstack.sharding.partitioner import PartitionerWarning
from jaxstack.sharding.rules import Leaf, Rules, ShardingError, transformer
from jaxstack.sharding.summary import assert_sharded, replicated_fraction, replication_factor, summarize

__all__ = [
    "AXES",
    "BATCH_AXES",
    "Leaf",
    "PartitionerWarning",
    "Rules",
    "ShardingError",
    "abstract_mesh",
    "assert_sharded",
    "find_devices",
    "make_mesh",
    "replicated_fraction",
    "replication_factor",
    "shard",
    "shardings_of",
    "summarize",
    "transformer",
]
