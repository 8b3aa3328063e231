"""The VJP of a layer, split into a forward half, a backward half and weight gradients, each of which runs in a tick."""

from collections.abc import Callable

import jax

from jaxstack.common.tree import PyTree
from jaxstack.kernels.taps import Pair, Sites, find_sites

Pairs = dict[int, Pair]
"""What the weight gradients need, by the index of the weight's leaf."""

NO_SITES = Sites({})


class SplitVJP:
    """The VJP of a layer in parts, for a backward pass that runs in a later tick.

    The pullback holds arrays that the backward half can obtain again: the weights, the index of the layer group, the
    inputs and the taps, which are zeros. `forward` returns only the other arrays, as residuals. A layer under
    `jax.checkpoint` has little but `x` among them. The arrays are told apart by identity, with the same result in every
    trace.

    Attributes:
      penalty: shape, dtype and varying axes of the layer's penalty, set by `forward`.
      sites: products whose weight gradients are computed by `weights`, after `backward`.
    """

    penalty: jax.ShapeDtypeStruct

    def __init__(self, layer: Callable[..., tuple[PyTree, jax.Array, PyTree]], sites: Sites = NO_SITES) -> None:
        self._layer = layer
        self.sites = sites
        self._structure: PyTree = None
        self._argument_of_leaf: list[int | None] = []

    def find_sites(self, wanted: PyTree, weights: PyTree, x: PyTree, group: jax.Array, inputs: PyTree) -> None:
        """Sets `sites` to the products of the wanted weights, see `taps.find_sites` and `forward`."""
        self.sites = find_sites(lambda weights: self._layer(weights, x, group, inputs), weights, wanted)

    def forward(
        self, weights: PyTree, x: PyTree, group: jax.Array, inputs: PyTree
    ) -> tuple[PyTree, jax.Array, PyTree, list[jax.Array]]:
        """Returns output, penalty, aux and the residuals."""
        later, others = self.sites.without_gradients(weights)
        taps = self.sites.taps()

        def f(others: PyTree, x: PyTree, taps: Pairs) -> tuple[tuple[PyTree, jax.Array], PyTree]:
            y, penalty, aux = self._layer(self.sites.tap(later, others, taps), x, group, inputs)
            return (y, penalty), aux

        (y, penalty), pull, aux = jax.vjp(f, others, x, taps, has_aux=True)
        kind = jax.typeof(penalty)
        self.penalty = jax.ShapeDtypeStruct(kind.shape, kind.dtype, manual_axis_type=kind.mat)
        leaves, self._structure = jax.tree.flatten(pull)
        arguments = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves((weights, group, inputs, taps)))}
        self._argument_of_leaf = [arguments.get(id(leaf)) for leaf in leaves]
        residuals = [leaf for leaf, i in zip(leaves, self._argument_of_leaf, strict=True) if i is None]
        return y, penalty, aux, residuals

    def backward(
        self,
        residuals: list[jax.Array],
        weights: PyTree,
        group: jax.Array,
        inputs: PyTree,
        dy: PyTree,
        dpenalty: jax.Array,
    ) -> tuple[PyTree, PyTree, Pairs]:
        """Returns the gradients of the weights without a site (None for the others) and of x, and the sites' pairs."""
        arguments = jax.tree.leaves((weights, group, inputs, self.sites.taps()))
        rest = iter(residuals)
        leaves = [next(rest) if i is None else arguments[i] for i in self._argument_of_leaf]
        return jax.tree.unflatten(self._structure, leaves)((dy, dpenalty))

    def weights(self, weights: PyTree, pairs: Pairs) -> PyTree:
        """Returns the gradients of the weights with a site, and None for the others."""
        return self.sites.weight_gradients(self.sites.without_gradients(weights)[0], pairs)
