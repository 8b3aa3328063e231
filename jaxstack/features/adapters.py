"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): the family whose layers have them.

A matrix `w_q` gets two more, `lora_a_q` and `lora_b_q`, and the layer computes x w + alpha / rank (x a) b. This second
path costs T rank (in + out) more multiplications for T tokens. Training then needs no gradient with respect to w, which
leaves two of the three products of tokens and matrix. Computing x (w + a b) instead would have two disadvantages:

- It needs the third product, since the gradients of a and b follow from the gradient of w, which is as large as w.
- In bfloat16, an adapter's share would be rounded away where it is less than 1/256 of the weight.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod

import jax
import jax.numpy as jnp

from jaxstack import kernels
from jaxstack.config import ConfigError, LoraConfig, ModelConfig
from jaxstack.kernels import Adapted
from jaxstack.kernels.taps import Tapped
from jaxstack.models.blocks import Stack
from jaxstack.models.family import Extras, Family
from jaxstack.models.params import Param, Params, Spec, flat_spec, map_spec

A, B = "lora_a_", "lora_b_"


def add_adapters(spec: Spec, cfg: LoraConfig, stacks: Sequence[str]) -> Spec:
    """Adds adapters to the declarations of the layers of a model's stacks, and freezes everything else.

    Each matrix [in, out] of each layer and expert has an adapter of its own. a [in, rank] starts normal with standard
    deviation in ** -0.5, so that x a is as large as x; b [rank, out] starts with zeros, so that the model starts
    unchanged. Adapters are sharded along the axes that their matrix is sharded along.

    Raises:
      ConfigError: a pattern of `targets` that matches no matrix.
    """
    named = ((path, p) for stack in stacks for path, p in flat_spec(spec[stack]).items())
    matrices = [*dict.fromkeys(path for path, p in named if p.kind == "matrix")]
    for pattern in cfg.targets:
        if not any(re.fullmatch(pattern, path) for path in matrices):
            raise ConfigError(
                f"model.lora.targets: the pattern {pattern!r} matches no matrix of a layer. Use names among "
                f"{', '.join(matrices)}."
            )
    targets = {path for path in matrices if any(re.fullmatch(pattern, path) for pattern in cfg.targets)}

    def with_adapters(group: Spec, prefix: str) -> Spec:
        found: Spec = {}
        for name, below in group.items():
            if isinstance(below, dict):
                found[name] = with_adapters(below, f"{prefix}{name}/")
                continue
            found[name] = below
            if f"{prefix}{name}" in targets:
                suffix = name.removeprefix("w_")
                found[f"{A}{suffix}"], found[f"{B}{suffix}"] = _adapter(below, cfg.rank)
        return found

    frozen = map_spec(lambda p: replace(p, frozen=True), spec)
    return {**frozen, **{stack: with_adapters(frozen[stack], "") for stack in stacks}}


def _adapter(p: Param, rank: int) -> tuple[Param, Param]:
    lead, inputs = p.batch_axes, p.batch_axes + p.in_axes
    a = replace(
        p,
        shape=(*p.shape[:inputs], rank),
        axes=(*p.axes[:inputs], "lora"),
        std=prod(p.shape[lead:inputs]) ** -0.5,
        frozen=False,
    )
    b = replace(
        p,
        shape=(*p.shape[:lead], rank, *p.shape[inputs:]),
        axes=(*p.axes[:lead], "lora", *p.axes[inputs:]),
        in_axes=1,
        init="zeros",
        frozen=False,
    )
    return a, b


def with_adapters(family: Family) -> Family:
    """Returns the family with adapters in its layers, and everything else frozen, also the biases of routers.

    A matrix and its adapter become one `kernels.Adapted` before a layer reads its parameters.
    """

    def spec(cfg: ModelConfig) -> Spec:
        return add_adapters(family.spec(cfg), cfg.lora, [*family.stacks(cfg)])

    def stacks(cfg: ModelConfig) -> dict[str, Stack]:
        join = partial(join_adapters, cfg.lora)
        return {name: replace(stack, prepare=join) for name, stack in family.stacks(cfg).items()}

    def extras(cfg: ModelConfig) -> Extras:
        return replace(family.extras(cfg), after_update=Extras().after_update)

    return replace(family, spec=spec, stacks=stacks, extras=extras)


def join_adapters(cfg: LoraConfig, params: Params) -> Params:
    """Returns a group of parameters in which each matrix that has an adapter is one `kernels.Adapted` with it."""
    joined: Params = {}
    for name, below in params.items():
        if isinstance(below, dict):
            joined[name] = join_adapters(cfg, below)
        elif not name.startswith((A, B)):
            adapter = get_adapter(cfg, params, name.removeprefix("w_"))
            joined[name] = below if adapter is None else Adapted(below, *adapter)
    return joined


def get_adapter(cfg: LoraConfig, params: Params, name: str) -> tuple[jax.Array, jax.Array] | None:
    """Returns the adapter (a, b alpha / rank) of the matrix `w_<name>` in a group of parameters, or None."""
    if f"{A}{name}" not in params:
        return None
    b = params[f"{B}{name}"]
    scale = partial(kernels.multiply_in_float32, factor=cfg.alpha / cfg.rank)
    if isinstance(b, Tapped):
        return params[f"{A}{name}"], b.map(scale)  # type: ignore[return-value]  # it stands for its array
    return params[f"{A}{name}"], scale(b)


def merge_adapters(cfg: LoraConfig, params: Params) -> Params:
    """Adds the adapters to their matrices, and returns the parameters of the model without adapters; float32."""
    if not isinstance(params, dict):
        return params
    found = {name: merge_adapters(cfg, below) for name, below in params.items() if not name.startswith((A, B))}
    for suffix in (name.removeprefix(A) for name in params if name.startswith(A)):
        w, adapter = params[f"w_{suffix}"], get_adapter(cfg, params, suffix)
        assert adapter is not None
        a, b = adapter
        lead = a.ndim + b.ndim - 2 - w.ndim
        inputs = a.ndim - 1
        letters = "abcdefgh"[: w.ndim]
        equation = f"{letters[:inputs]}r,{letters[:lead]}r{letters[inputs:]}->{letters}"
        found[f"w_{suffix}"] = w + jnp.einsum(equation, a, b, precision=jax.lax.Precision.HIGHEST)
    return found
