"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): rounds one input after the other, and lets the rest make up for it.

The squared error of a layer's outputs is quadratic in its weights, with the matrix of the inputs' products ("gram") as
Hessian. Once an input's weights are rounded, the best change of the weights that are still free is known in closed
form (optimal brain surgery). A Cholesky factor of the inverse holds what each of these changes needs.

Inputs with the most energy come first, while the most others can still make up for them. Scales are computed
from the matrix before any change, so that this order does not mix the groups. They may clip a few numbers where that
has the least error, weighted by the energy of the inputs.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxstack.config.scheme import Scheme
from jaxstack.kernels.rounding import Quantized, find_scales, repeat, to_codes

DAMP = 0.01
"""What is added to the diagonal of the gram matrix, as a share of its mean: it makes the inverse exist."""

_BLOCK = 128  # inputs after which the other columns are changed at once, by one matmul


@partial(jax.jit, static_argnames=("scheme", "damp", "dtype"))
def gptq(
    w: jax.Array, gram: jax.Array, scheme: Scheme, damp: float = DAMP, dtype: jax.typing.DTypeLike = jnp.float32
) -> Quantized:
    """Rounds a matrix such that the outputs for the inputs of the calibration change little.

    Args:
      w: [O, I].
      gram: sum over tokens of x x^T [I, I]. Inputs that are always zero are allowed.
      dtype: dtype in which scales are stored.

    Returns:
      The codes and scales. They are NaN if the factors of the gram matrix cannot be computed: use a larger `damp`.
    """
    inputs = w.shape[1]
    block = max(size for size in range(1, _BLOCK + 1) if inputs % size == 0)
    order = jnp.argsort(-jnp.diag(gram))
    scales = find_scales(w, scheme, dtype, jnp.diag(gram))
    step = repeat(scales, inputs)[:, order]
    factor = inverse_factor(gram[order][:, order], damp)

    def round_block(start: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        left, codes = carry
        rows = jax.lax.dynamic_slice_in_dim(factor, start * block, block, 0)
        own = jax.lax.dynamic_slice_in_dim(rows, start * block, block, 1)
        steps = jax.lax.dynamic_slice_in_dim(step, start * block, block, 1)

        def round_input(w: jax.Array, i: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            code = to_codes(w[:, i] / steps[:, i], scheme)
            error = (w[:, i] - code * steps[:, i]) / own[i, i]
            return w - error[:, None] * own[i], (code, error)

        columns = jax.lax.dynamic_slice_in_dim(left, start * block, block, 1)
        _, (found, errors) = jax.lax.scan(round_input, columns, jnp.arange(block))
        codes = jax.lax.dynamic_update_slice_in_dim(codes, found.T, start * block, 1)
        return left - errors.T @ rows, codes  # columns before the block are done, and not read again

    _, codes = jax.lax.fori_loop(0, inputs // block, round_block, (w[:, order], jnp.zeros_like(w)))
    return Quantized(codes[:, jnp.argsort(order)], scales)


def inverse_factor(gram: jax.Array, damp: float) -> jax.Array:
    """Returns the upper triangular U with U^T U = (gram + damp mean(diag) I)^-1.

    Row i of U, divided by U[i, i], is the change of the inputs after i for an error of 1 in input i, when those before
    it are fixed.
    """
    mean = jnp.mean(jnp.diag(gram))
    eye = jnp.eye(len(gram), dtype=gram.dtype)
    lower = jnp.linalg.cholesky(gram + jnp.where(mean > 0, damp * mean, 1) * eye)
    return jnp.linalg.cholesky(jax.scipy.linalg.cho_solve((lower, True), eye)).T
