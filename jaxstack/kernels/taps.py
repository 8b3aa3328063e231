"""Taps: weight gradients that are computed later than the other gradients of a layer.

The backward pass of a product y = x w has two halves: the gradient of x, which the previous layer waits for, and the
gradient of w, which nothing in the backward pass waits for. The second one needs only the pair (x, dy). To delay it,
a weight is replaced by a `Tapped`, and `product` then computes the same y, but returns the pair as the cotangent of the
tap's zeros. So a VJP with respect to taps in place of weights does no work for weights, under any remat policy: what
the policy does not save is recomputed once, for dx and the pair together.

Linear layers, adapters and the grouped matmuls of experts call `product`. Everything else has its gradients in the VJP,
together with dx: vectors (norms, biases), routers and embeddings are small or have no product, and experts behind an
exchange in rounds (`jaxstack.moe.rounds`) have a backward pass of their own, see `fused`. So has a weight that does not
reach one product unchanged, or that reaches it in a `lax.scan` or a `jax.vmap`: `find_sites` reads that in the jaxpr.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jaxstack.common.errors import ConfigError
from jaxstack.common.tree import PyTree, flatten
from jaxstack.sharding import collectives

Product = Callable[..., jax.Array]
"""(x, w, *integers) -> y, linear in w."""

Abstract = jax.ShapeDtypeStruct

MARK = "product_of_leaf_"
"""Names the call of a product in the jaxpr that `find_sites` reads, together with the index of the leaf."""

CALLS = ("jit", "pjit", "remat2", "checkpoint", "closed_call")
"""Equations that run their jaxpr once, on their own operands."""


class Pair(NamedTuple):
    """What the gradient of a weight needs; as a tap, zeros of the same shapes.

    Attributes:
      x: input of the product, or None if another product has the same one.
      dy: cotangent of its result.
      integers: other inputs, such as the sizes of groups, as float32.
    """

    x: Any
    dy: Any
    integers: tuple[Any, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tapped:
    """A weight whose product has a tap; it replaces the array in a tree of parameters.

    Attributes:
      value: the weight.
      tap: zeros, whose cotangents are the pair. `None` while `find_sites` looks for the products.
      changes: functions that the layer has applied to the weight, see `map`.
      collector: where `find_sites` collects what it finds.
      leaf: index of the weight among the leaves of its tree.
    """

    value: jax.Array
    tap: Pair | None = None
    changes: tuple[Callable[[jax.Array], jax.Array], ...] = field(default=(), metadata={"static": True})
    collector: "_Collector | None" = field(default=None, metadata={"static": True})
    leaf: int = field(default=0, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.value.shape

    def map(self, change: Callable[[jax.Array], jax.Array]) -> "Tapped":
        """Returns the weight changed by a linear function, whose transpose the weight gradient then includes."""
        return Tapped(self.value, self.tap, (*self.changes, change), self.collector, self.leaf)

    def astype(self, dtype: jnp.dtype) -> "Tapped":
        """Returns the weight in another dtype."""
        return self.map(lambda w: w.astype(dtype))

    def __mul__(self, factor: float) -> "Tapped":
        """Returns the weight times a Python number. An array would lose its own gradient."""
        if not isinstance(factor, int | float):
            raise TypeError(f"it is multiplied by a {type(factor).__name__}, which is not a Python number")
        return self.map(lambda w: (w.astype(jnp.float32) * factor).astype(w.dtype))

    __rmul__ = __mul__

    def __getitem__(self, key: Any) -> "Tapped":
        """Returns the weight for `w[...]`, by which an nnx module reads it."""
        if key is not Ellipsis:
            raise TypeError(f"it is indexed by {key!r}")
        return self


class Site(NamedTuple):
    """A product with a tap.

    Attributes:
      product: (x, weight before its changes, *integers) -> y.
      x, y, integers: shapes, dtypes and varying axes.
      x_from: leaf whose pair has x: the first product of the same x.
    """

    product: Product
    x: Abstract
    y: Abstract
    integers: tuple[Abstract, ...]
    x_from: int


@dataclass(eq=False)
class _Collector:
    """What `find_sites` collects: products by leaf, with their inputs; and leaves that cannot have taps."""

    sites: dict[int, tuple[Product, Any, Any, tuple[Any, ...]]] = field(default_factory=dict)
    excluded: set[int] = field(default_factory=set)
    marks: bool = False

    def run(self, leaf: int, f: Product, x: jax.Array, w: jax.Array, integers: tuple[jax.Array, ...]) -> jax.Array:
        """Returns f(x, w, *integers), and collects it. With `marks`, the jaxpr has it as a call with a name."""

        def call(*operands: jax.Array) -> jax.Array:
            return f(*operands)

        call.__name__ = f"{MARK}{leaf}"
        y = (jax.jit(call) if self.marks else f)(x, w, *integers)
        # One pair belongs to one product.
        if leaf in self.sites or not jnp.issubdtype(x.dtype, jnp.floating):
            self.excluded.add(leaf)
        self.sites[leaf] = f, x, y, integers
        return y


def product(f: Product, x: jax.Array, w: jax.Array | Tapped, *integers: jax.Array) -> jax.Array:
    """Returns f(x, w, *integers), and lets a pipeline compute the gradient of w later.

    Call it in any layer for the matrices whose gradients a pipeline may compute separately, such as
    `product(jnp.matmul, x, weights["up"])`. Outside a pipeline it costs nothing.

    Args:
      f: the product. It closes over no arrays.
      w: weight, of which f is a linear function.
      integers: arrays of integers below 2^24 that f needs, too.
    """
    if not isinstance(w, Tapped):
        return f(x, w, *integers)
    changes = w.changes

    def of_leaf(x: jax.Array, value: jax.Array, *integers: jax.Array) -> jax.Array:
        return f(x, functools.reduce(lambda value, change: change(value), changes, value), *integers)

    if w.collector is not None:
        return w.collector.run(w.leaf, of_leaf, x, w.value, integers)
    return _with_tap(of_leaf, x, w.value, w.tap, integers)


def fused(tree: PyTree) -> PyTree:
    """Returns weights as arrays, for code that `product` does not cover. They get no taps."""

    def value(w: Any) -> Any:
        if isinstance(w, Tapped):
            assert w.collector is not None, "find_sites gives taps only to weights that `fused` does not get"
            w.collector.excluded.add(w.leaf)
            return functools.reduce(lambda value, change: change(value), w.changes, w.value)
        return w

    return jax.tree.map(value, tree, is_leaf=lambda w: isinstance(w, Tapped))


def _with_tap(f: Product, x: jax.Array, w: jax.Array, tap: Pair | None, integers: tuple[jax.Array, ...]) -> jax.Array:
    """Returns f(x, w, *integers), whose VJP has the pair as the cotangent of the tap, and no cotangent of w."""
    assert tap is not None
    has_x = tap.x is not None

    @jax.custom_vjp
    def run(x: jax.Array, w: jax.Array, tap: Pair, integers: tuple[jax.Array, ...]) -> jax.Array:
        return f(x, w, *integers)

    def forward(x: jax.Array, w: jax.Array, tap: Pair, integers: tuple[jax.Array, ...]) -> tuple[jax.Array, Any]:
        y, pull = jax.vjp(lambda x: f(x, w, *integers), x)
        return y, (pull, x if has_x else None, integers)

    def backward(saved: Any, dy: jax.Array) -> tuple[Any, ...]:
        pull, x, integers = saved
        return *pull(dy), None, Pair(x, dy, tuple(n.astype(jnp.float32) for n in integers)), None

    run.defvjp(forward, backward)
    return run(x, w, tap, integers)


@dataclass(frozen=True)
class Sites:
    """The products of a layer that have taps, by the index of their weight's leaf. Trees of weights have its structure.

    Attributes:
      by_leaf: the products.
    """

    by_leaf: dict[int, Site]

    def taps(self) -> dict[int, Pair]:
        """Returns zeros, the taps of every product."""
        return {i: jax.tree.map(_zeros, self._pair(i, site)) for i, site in self.by_leaf.items()}

    def _pair(self, i: int, site: Site) -> Pair:
        return Pair(site.x if site.x_from == i else None, site.y, tuple(_as_float(n) for n in site.integers))

    def without_gradients(self, weights: PyTree) -> tuple[PyTree, PyTree]:
        """Splits weights into weights whose gradients are computed later, and the others.

        None takes the place of each leaf that is in the other tree.
        """
        leaves, structure = jax.tree.flatten(weights)
        later = [leaf if i in self.by_leaf else None for i, leaf in enumerate(leaves)]
        others = [None if i in self.by_leaf else leaf for i, leaf in enumerate(leaves)]
        return jax.tree.unflatten(structure, later), jax.tree.unflatten(structure, others)

    def tap(self, later: PyTree, others: PyTree, taps: dict[int, Pair]) -> PyTree:
        """Returns the weights that `without_gradients` has split, with taps."""
        a, structure = jax.tree.flatten(later, is_leaf=lambda w: w is None)
        b = jax.tree.leaves(others, is_leaf=lambda w: w is None)
        leaves = [Tapped(x, taps[i]) if i in self.by_leaf else y for i, (x, y) in enumerate(zip(a, b, strict=True))]
        return jax.tree.unflatten(structure, leaves)

    def weight_gradients(self, later: PyTree, pairs: dict[int, Pair]) -> PyTree:
        """Returns the gradients of weights from the cotangents of their taps, in the structure of `later`."""
        leaves, structure = jax.tree.flatten(later, is_leaf=lambda w: w is None)
        return jax.tree.unflatten(
            structure, [None if w is None else self._gradient(i, w, pairs) for i, w in enumerate(leaves)]
        )

    def _gradient(self, i: int, w: jax.Array, pairs: dict[int, Pair]) -> jax.Array:
        site = self.by_leaf[i]
        pair = pairs[i]
        x = pairs[site.x_from].x
        integers = tuple(n.astype(like.dtype) for n, like in zip(pair.integers, site.integers, strict=True))
        return jax.vjp(lambda w: site.product(x, w, *integers), w)[1](pair.dy)[0]


def find_sites(f: Callable[[PyTree], Any], weights: PyTree, wanted: PyTree) -> Sites:
    """Returns the products of a layer that can have taps. The layer is traced without computing anything.

    A weight gets no tap if several products use it, or if it goes through `fused`.

    Args:
      f: the layer as a function of its weights. It may be wrapped in `jax.checkpoint`.
      weights: arrays, or their shapes.
      wanted: for each weight, whether to look for a product. The layer uses such a weight only through `product`.

    Raises:
      ConfigError: the layer uses a wanted weight elsewhere.
    """
    collector = _Collector(marks=True)
    try:
        _trace(f, weights, wanted, collector)
    except Exception:
        for i, asked in enumerate(jax.tree.leaves(wanted)):
            if asked:
                _can_have_tap(f, weights, i, required=True)
        raise
    chosen = {i: site for i, site in sorted(collector.sites.items()) if i not in collector.excluded}
    first: dict[int, int] = {}  # by the identity of x, which all sites keep alive
    return Sites(
        {
            i: Site(of_leaf, _abstract(x), _abstract(y), tuple(map(_abstract, integers)), first.setdefault(id(x), i))
            for i, (of_leaf, x, y, integers) in chosen.items()
        }
    )


def find_weights(f: Callable[[PyTree], Any], weights: PyTree) -> PyTree:
    """Returns for each weight of any layer whether `find_sites` finds its product, as True or False.

    Each weight is tried alone, so that a layer may use the others as arrays.

    Raises:
      ConfigError: the layer gives a weight to `product`, and uses it elsewhere too.
    """
    leaves, structure = jax.tree.flatten(weights)
    return jax.tree.unflatten(structure, [_can_have_tap(f, weights, i) for i in range(len(leaves))])


def _can_have_tap(f: Callable[[PyTree], Any], weights: PyTree, leaf: int, required: bool = False) -> bool:
    """Returns whether one weight can have a tap; raises ConfigError if the layer cannot run with it but should."""
    leaves, structure = jax.tree.flatten(weights)
    collector = _Collector(marks=True)
    try:
        _trace(f, weights, jax.tree.unflatten(structure, [i == leaf for i in range(len(leaves))]), collector)
    except Exception as error:
        if not (required or leaf in collector.sites):
            return False
        path = [*flatten(weights)][leaf]
        raise ConfigError(
            f"the layer gives {path} to `product`, so that its gradient can be computed apart, but uses it elsewhere "
            f"too: {(str(error).strip() or type(error).__name__).splitlines()[0]}. Use it only as w of "
            f"product(f, x, w), or only as an array."
        ) from error
    return leaf in collector.sites and leaf not in collector.excluded


def _trace(f: Callable[[PyTree], Any], weights: PyTree, wanted: PyTree, collector: _Collector) -> None:
    """Traces the layer, and collects the products of the wanted weights; those that are used otherwise are excluded."""
    leaves, structure = jax.tree.flatten(weights)

    def trace(leaves: list[jax.Array]) -> Any:
        return f(_with_collector(jax.tree.unflatten(structure, leaves), wanted, collector))

    jaxpr = jax.make_jaxpr(trace)(leaves).jaxpr
    for i, (_, x, y, integers) in collector.sites.items():
        uses = _uses(jaxpr, jaxpr.invars[i])
        # An operand more is an array that the product closes over; in a `vmap`, arrays have a dimension more.
        shapes = [*map(jnp.shape, (x, leaves[i], *integers, y))]
        marked = [eqn for eqn in uses if eqn is not None and eqn.params.get("name") == f"{MARK}{i}"]
        found_shapes = [[getattr(v.aval, "shape", None) for v in (*eqn.invars, *eqn.outvars)] for eqn in marked]
        if len(uses) != 1 or found_shapes != [shapes]:
            collector.excluded.add(i)


def _uses(jaxpr: Jaxpr, var: Var) -> list[JaxprEqn | None]:
    """Returns the equations that read a variable, in calls too, except products; None if the jaxpr returns it."""
    uses: list[JaxprEqn | None] = [None for v in jaxpr.outvars if v is var]
    for eqn in jaxpr.eqns:
        for place, v in enumerate(eqn.invars):
            if v is not var:
                continue
            if eqn.primitive.name in CALLS and not str(eqn.params.get("name")).startswith(MARK):
                inner = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
                uses += _uses(inner, inner.invars[place])
            else:
                uses.append(eqn)
    return uses


def _with_collector(weights: PyTree, wanted: PyTree, collector: _Collector) -> PyTree:
    """Returns the weights, of which those that are wanted record their products in `collector`."""
    leaves, structure = jax.tree.flatten(weights)
    pairs = zip(leaves, jax.tree.leaves(wanted), strict=True)
    tapped = [Tapped(w, collector=collector, leaf=i) if asked else w for i, (w, asked) in enumerate(pairs)]
    return jax.tree.unflatten(structure, tapped)


def record_inputs(
    f: Callable[[PyTree], Any], weights: PyTree, wanted: PyTree
) -> tuple[Any, dict[int, tuple[jax.Array, tuple[jax.Array, ...]]]]:
    """Returns f(weights), and the inputs of the products with the wanted weights: x and integers, see `product`.

    It traces like `f`, so that it can be a part of a function that is compiled. A weight is missing if several
    products use it, or code that `product` does not cover, see `fused`. `f` is a layer without recomputation; for
    `wanted`, see `find_sites`. The inputs are by the index of the weight among the leaves.
    """
    collector = _Collector()
    result = f(_with_collector(weights, wanted, collector))
    return result, {i: (x, n) for i, (_, x, _, n) in sorted(collector.sites.items()) if i not in collector.excluded}


def _abstract(x: jax.Array) -> Abstract:
    kind = jax.typeof(x)
    return Abstract(kind.shape, kind.dtype, manual_axis_type=kind.mat)


def _as_float(n: Abstract) -> Abstract:
    return Abstract(n.shape, jnp.float32, manual_axis_type=n.manual_axis_type)


def _zeros(like: Abstract) -> jax.Array:
    return collectives.zeros(like.shape, like.dtype, like)
