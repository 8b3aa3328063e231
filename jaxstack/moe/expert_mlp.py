"""The MLPs of experts, on rows that are sorted by expert or padded to a fixed number for each.

Suffixes: N rows, E experts of this shard, D width, F hidden width of an expert, r rank of an adapter.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxstack.kernels import grouped_matmul
from jaxstack.moe.pairs import starts_of

Weights: TypeAlias = dict[str, jax.Array]
"""`w_up` [E, D, F], `w_down` [E, F, D] and, for a gated MLP, `w_gate` [E, D, F]. `b_up` [E, F], `b_down` [E, D] and
`b_gate` [E, F] are their biases, if they have any."""

Adapters: TypeAlias = dict[str, tuple[jax.Array, jax.Array]]
"""By the name of a weight, the matrices a [E, I, r] and b [E, r, O] of its adapter: x w + (x a) b."""

Activation: TypeAlias = Callable[[jax.Array], jax.Array]
Matmul: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]


def expert_mlp(
    x: jax.Array,
    weights: Weights,
    adapters: Adapters,
    activation: Activation,
    matmul: Matmul,
    scale: jax.Array | None = None,
    of_up: Activation = lambda up: up,
) -> jax.Array:
    """Computes the experts' MLP.

    Args:
      x: rows, in the order that `matmul` takes them.
      weights: of the experts.
      adapters: adapters of the weights; `{}` means none.
      activation: elementwise; hidden = activation(gate) * of_up(up), or activation(up).
      matmul: product of rows and a weight.
      scale: [..., 1], float32; multiplies the hidden layer, and the last bias. `None` means 1.
      of_up: elementwise.
    """

    def product(x: jax.Array, name: str, scale: jax.Array | None = None) -> jax.Array:
        y = matmul(x, weights[f"w_{name}"])
        if f"w_{name}" in adapters:
            a, b = adapters[f"w_{name}"]
            y = y + matmul(matmul(x, a), b)
        if f"b_{name}" in weights:
            # A bias is the matrix of one more input, which is 1. So rows find the bias of their expert, and the
            # gradient is summed over them, as `matmul` does it.
            one = jnp.ones_like(x[..., :1]) if scale is None else scale.astype(x.dtype)
            y = y + matmul(one, weights[f"b_{name}"][:, None].astype(x.dtype))
        return y

    up = checkpoint_name(product(x, "up"), "mlp_up")
    if "w_gate" in weights:
        hidden = activation(checkpoint_name(product(x, "gate"), "mlp_gate")) * of_up(up)
    else:
        hidden = activation(up)
    if scale is not None:
        hidden = (hidden.astype(jnp.promote_types(hidden.dtype, jnp.float32)) * scale).astype(hidden.dtype)
    return product(hidden, "down", scale)


def apply_by_expert(
    x: jax.Array, experts: jax.Array, num_experts: int, mlp: Callable[..., jax.Array], implementation: str
) -> jax.Array:
    """Computes each row with its own expert.

    Args:
      x: rows sorted by expert, [N, D].
      experts: expert of each row, [N]; `num_experts` marks an empty row.
      num_experts: E.
      mlp: computes the MLP of sorted rows, with the matmul that is given as `matmul`.
      implementation: implementation of `kernels.grouped_matmul`.

    Returns:
      [N, D]; the values of empty rows have no meaning.
    """
    sizes = jnp.diff(starts_of(experts, num_experts))
    return mlp(x, matmul=partial(grouped_matmul, sizes=sizes, implementation=implementation))
