"""Reads private names of JAX in one place, so that a version of JAX without one breaks a feature, not every run.

Each name is read when its feature is used. tests/test_dependencies.py compares `FEATURES` with JAX and with the code.
"""

import importlib
from collections.abc import Mapping
from importlib.metadata import version
from types import ModuleType
from typing import Any

from jaxstack.common.errors import ConfigError

FEATURES = {
    # The key-value store of the coordinator has no public name; orbax uses it too.
    ("distributed", "global_state"): "a run of several processes",
    # `train.debug` refuses these operations within a step, and no public function returns them.
    ("callback", "pure_callback_p"): "train.debug=true",
    ("callback", "io_callback_p"): "train.debug=true",
    # No public function sets or clears the place in the code that new equations get.
    ("source_info_util", "_source_info_context"): "jaxstack debug",
    # No public function keeps the programs of operations within `jax.shard_map`, or reads the arrays there.
    ("shard_map", "HashablePartial"): "debug.eager=true",
    ("shard_map", "ShardMapTracer"): "debug.eager=true",
    # The public function rounds the log-sum-exp, and has no backward pass for a part of the keys.
    ("cudnn.fused_attention_stablehlo", "dot_product_attention"): "kernels.attention=cudnn with mesh.context",
    ("cudnn.fused_attention_stablehlo", "_dot_product_attention_bwd_rule"): "kernels.attention=cudnn with mesh.context",
    ("cudnn.fused_attention_stablehlo", "MaskType"): "kernels.attention=cudnn with mesh.context",
    ("cudnn.fused_attention_stablehlo", "AttentionLayout"): "kernels.attention=cudnn with mesh.context",
}
"""What needs each private name of JAX, by the module below `jax._src` and the name."""


def private_module(name: str) -> ModuleType:
    """Returns a module below `jax._src` in which every name of `FEATURES` exists.

    Raises:
      ConfigError: this version of JAX does not have the module, or one of the names.
    """
    names = [attribute for module, attribute in FEATURES if module == name]
    assert names, f"add jax._src.{name} to FEATURES"
    try:
        module = importlib.import_module(f"jax._src.{name}")
    except ImportError:
        module = ModuleType(name)  # without any name: the error below
    for attribute in names:
        if not hasattr(module, attribute):
            raise ConfigError(
                f"jax {version('jax')} has no jax._src.{name}.{attribute}, which {FEATURES[name, attribute]} needs.",
                "Install a version of jax that tests/test_dependencies.py passes with, such as 0.10.2.",
            )
    return module


def scan_sizes(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns how many inputs of a scan are constants, and how many are carried. JAX 0.11 has other parameters."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    constant, carried, _ = (len([*part.vals]) for part in params["ft_in"].unpack())
    return constant, carried
