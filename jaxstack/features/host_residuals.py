"""Residuals of layers in the host's memory (`train.offload`), copied there in the forward pass and back afterwards."""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import Offloadable, checkpoint_name

from jaxstack.common.tree import PyTree

INPUT = "layer_input"
"""The name of a layer's input: `jax.checkpoint` stores an input without a name on the device."""

STATISTICS = ("attention_lse", "norm_mean", "norm_inverse")
"""Names of residuals that are small, a number for each token or head, and stay on the device."""


def checkpoint(f: Callable[..., PyTree], *, policy: Callable[..., object], prevent_cse: bool) -> Callable[..., PyTree]:
    """Returns `jax.checkpoint(f)` that stores f's first argument, and what `policy` saves, in the host's memory."""

    def named(x: jax.Array, *others: Any) -> Any:
        return f(checkpoint_name(x, INPUT), *others)

    def stored(primitive: Any, *avals: Any, **params: Any) -> Any:
        name = params.get("name")
        if name != INPUT and not policy(primitive, *avals, **params):
            return False
        return True if name in STATISTICS else Offloadable("device", "pinned_host")

    return jax.checkpoint(named, policy=stored, prevent_cse=prevent_cse)
