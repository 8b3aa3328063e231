"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) as a transformation of a model's declarations.

Beside a matrix `w_q` stand `lora_a_q` and `lora_b_q`, and the layer computes x w + alpha / rank (x a) b: a second path,
and not x (w + a b). It costs T rank (in + out) multiplications more than the model alone, and its gradient needs none
with respect to w: of the three products that training makes of T tokens and a matrix, two are left. Merged in every
step, the third would come back (the gradients of a and b go through that of w, which is as large as w), and in bfloat16
what an adapter adds would be rounded away where it is less than 1/256 of the weight.
"""

import re
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from jaxstack.config import ConfigError, LoraConfig
from jaxstack.models.params import Param, Spec, flat_spec, map_spec

A, B = "lora_a_", "lora_b_"


def add_adapters(spec: Spec, cfg: LoraConfig) -> Spec:
    """The declarations of a model with adapters beside its layers' matrices, and all else frozen.

    With inputs [in] and outputs [out] of a matrix, one adapter a layer and an expert: a [in, rank] starts normal with
    standard deviation in ** -0.5, so that x a is as large as x; b [rank, out] starts with zeros, so that nothing is
    added. What is split of the matrix is split of them likewise.

    Raises:
      ConfigError: a pattern of `targets` that no matrix has.
    """
    matrices = [path for path, p in flat_spec(spec["layers"]).items() if p.kind == "matrix"]
    for pattern in cfg.targets:
        if not any(re.fullmatch(pattern, path) for path in matrices):
            raise ConfigError(
                f"model.lora.targets: no matrix of a block is called {pattern!r}; they are {', '.join(matrices)}"
            )
    targets = {path for path in matrices if any(re.fullmatch(pattern, path) for pattern in cfg.targets)}

    def beside(group: Spec, at: str) -> Spec:
        found: dict[str, Any] = {}
        for name, below in group.items():
            if isinstance(below, dict):
                found[name] = beside(below, f"{at}{name}/")
                continue
            found[name] = below
            if f"{at}{name}" in targets:
                suffix = name.removeprefix("w_")
                found[f"{A}{suffix}"], found[f"{B}{suffix}"] = _adapter(below, cfg.rank)
        return found

    frozen = map_spec(lambda p: replace(p, frozen=True), spec)
    return {**frozen, "layers": beside(frozen["layers"], "")}


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


def get_adapter(cfg: LoraConfig, params: Any, name: str) -> tuple[jax.Array, jax.Array] | None:
    """The adapter of the matrix `w_<name>` in a group of parameters, alpha / rank multiplied into b; None: it has
    none."""
    if f"{A}{name}" not in params:
        return None
    return params[f"{A}{name}"], params[f"{B}{name}"] * (cfg.alpha / cfg.rank)


def merge_adapters(cfg: LoraConfig, params: Any) -> Any:
    """The parameters of the model without adapters, with what they add in its matrices; float32."""
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
