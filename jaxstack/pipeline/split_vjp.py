"""The VJP of a layer, split into a forward half and a backward half that runs in a later tick."""

from collections.abc import Callable

import jax

from jaxstack.common.tree import PyTree


class SplitVJP:
    """The VJP of a layer in two halves, for a backward pass that runs in a later tick.

    The pullback holds arrays that the backward half can obtain again: the weights, the index of the layer group and
    the inputs. `forward` returns only the other arrays, as residuals. A layer under `jax.checkpoint` has little but
    `x` among them. The arrays are told apart by identity, with the same result in every trace.

    Attributes:
      penalty: shape, dtype and varying axes of the layer's penalty, set by `forward`.
    """

    penalty: jax.ShapeDtypeStruct

    def __init__(self, layer: Callable[..., tuple[jax.Array, jax.Array, PyTree]]) -> None:
        self._layer = layer
        self._structure: PyTree = None
        self._argument_of_leaf: list[int | None] = []

    def forward(
        self, weights: PyTree, x: jax.Array, group: jax.Array, inputs: PyTree
    ) -> tuple[jax.Array, jax.Array, PyTree, list[jax.Array]]:
        """Returns output, penalty, aux and the residuals."""

        def f(weights: PyTree, x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], PyTree]:
            y, penalty, aux = self._layer(weights, x, group, inputs)
            return (y, penalty), aux

        (y, penalty), pull, aux = jax.vjp(f, weights, x, has_aux=True)
        kind = jax.typeof(penalty)
        self.penalty = jax.ShapeDtypeStruct(kind.shape, kind.dtype, manual_axis_type=kind.mat)
        leaves, self._structure = jax.tree.flatten(pull)
        arguments = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves((weights, group, inputs)))}
        self._argument_of_leaf = [arguments.get(id(leaf)) for leaf in leaves]
        residuals = [leaf for leaf, i in zip(leaves, self._argument_of_leaf, strict=True) if i is None]
        return y, penalty, aux, residuals

    def backward(
        self,
        residuals: list[jax.Array],
        weights: PyTree,
        group: jax.Array,
        inputs: PyTree,
        dy: jax.Array,
        dpenalty: jax.Array,
    ) -> tuple[PyTree, jax.Array]:
        """Returns the gradients of the weights and of x."""
        arguments, rest = jax.tree.leaves((weights, group, inputs)), iter(residuals)
        leaves = [next(rest) if i is None else arguments[i] for i in self._argument_of_leaf]
        return jax.tree.unflatten(self._structure, leaves)((dy, dpenalty))
