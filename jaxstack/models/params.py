"""Declarations of parameters, and what derives from them: initial values, abstract trees, counts, casts."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxstack.common.tree import PyTree, path_of
from jaxstack.pipeline.stages import Stages

Role: TypeAlias = Literal["token_table", "head", "query", "key", "attention_output", "mlp_output"]
"""What a parameter is for, see `Param.roles`."""


@dataclass(frozen=True)
class Param:
    """Declares one array.

    Attributes:
      shape: dimensions, inputs before outputs.
      axes: logical name of each dimension.
      kind: `matrix` is contracted with its input, `table` is looked up by row (embeddings), `vector` acts
        elementwise (norms, biases). A `router` is a matrix that is not cast.
      in_axes: number of leading dimensions (after `layers` and `experts`) that a matrix contracts.
      init: initial values; `normal` has mean 0 and standard deviation `std`, and a number fills all elements.
      std: standard deviation for `init='normal'`.
      frozen: whether the parameter never changes; it has neither gradients nor optimizer state.
      roles: names by which other code finds a parameter without its path, see `find_role`. `token_table` is the
        embedding of tokens, `head` the output matrix; tied embeddings are both. In a layer, `query`, `key`,
        `attention_output` and `mlp_output` are the matrices whose outputs have these names, and their adapters.
      cast: whether a forward pass uses it in the compute dtype. `None` means yes for matrices and tables only.
      decay: whether weight decay applies to it. `None` means yes for all kinds but vectors.
      orthogonal: whether Muon orthogonalises it. `None` means matrices between two hidden widths; the head is not one.
      width_ratio: for a matrix that reads a hidden width, the width of the model over the width of its base model, see
        `features.width`. The optimizer divides updates by it, Muon by its square root. 1 leaves the updates as they
        are.
      unpadded: shape without the zeros at the ends of padded dimensions, which change no result. `None` means that the
        array has none.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    kind: Literal["matrix", "table", "vector", "router"] = "matrix"
    in_axes: int = 1
    init: Literal["normal", "zeros", "ones"] | float = "normal"
    std: float = 0.02
    frozen: bool = False
    roles: tuple[Role, ...] = ()
    cast: bool | None = None
    decay: bool | None = None
    orthogonal: bool | None = None
    width_ratio: float = 1.0
    unpadded: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), f"{self.shape} and {self.axes} differ in length"

    @property
    def is_cast(self) -> bool:
        """Whether a forward pass uses it in the compute dtype; by default vectors and routers stay in float32."""
        return self.kind in ("matrix", "table") if self.cast is None else self.cast

    @property
    def is_decayed(self) -> bool:
        """Whether weight decay applies to it; by default not to vectors."""
        return self.kind != "vector" if self.decay is None else self.decay

    @property
    def stacked(self) -> int:
        """1 where the leading dimension runs over layers, else 0."""
        return int(self.axes[:1] == ("layers",))

    @property
    def batch_axes(self) -> int:
        """Number of leading dimensions that count matrices: layers, experts."""
        return self.stacked + int("experts" in self.axes)

    @property
    def size(self) -> int:
        """Returns the number of elements without padding."""
        return prod(self.unpadded or self.shape)

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether it is a matrix between two hidden widths, which Muon orthogonalises; the head is not."""
        return self.kind == "matrix" and "vocab" not in self.axes if self.orthogonal is None else self.orthogonal


Spec: TypeAlias = dict[str, Any]
"""Declarations of parameters: a nested dict whose leaves are `Param`."""

Params: TypeAlias = dict[str, Any]
"""Parameters, or a group of them: a nested dict like the `Spec` that declares it, with arrays as leaves."""


def is_compressed(p: Param) -> bool:
    """Returns whether a parameter of a layer is a matrix that compression and `train.qat` round: adapters are not."""
    return p.kind == "matrix" and "lora" not in p.axes


def flat_spec(spec: Spec) -> dict[str, Param]:
    """Returns every declaration by its path, in the tree's own order."""
    leaves = jax.tree_util.tree_leaves_with_path(spec, is_leaf=lambda x: isinstance(x, Param))
    return {path_of(keys): p for keys, p in leaves}


def find_role(spec: Spec, role: Role) -> tuple[str, Param]:
    """Returns path and declaration of the parameter with a role."""
    ((path, p),) = ((path, p) for path, p in flat_spec(spec).items() if role in p.roles)
    return path, p


def map_spec(f: Callable[..., Any], spec: Spec, *rest: PyTree) -> PyTree:
    """Maps a function over trees like `jax.tree.map`, with the declarations as leaves."""
    return jax.tree.map(f, spec, *rest, is_leaf=lambda x: isinstance(x, Param))


def stack(spec: Spec, layers: int) -> Spec:
    """Stacks the declarations of `layers` equal blocks on a new leading axis."""
    return map_spec(lambda p: replace(p, shape=(layers, *p.shape), axes=("layers", *p.axes)), spec)


def unstack(spec: Spec) -> Spec:
    """Returns the declarations of one block of a stack, without the leading axis."""
    return map_spec(lambda p: replace(p, shape=p.shape[1:], axes=p.axes[1:]), spec)


def pad(p: Param, dim: int, size: int) -> Param:
    """Returns the declaration with zeros at the end of dimension `dim`, such that it has `size` elements."""
    shape = (*p.shape[:dim], size, *p.shape[dim + 1 :])
    return p if shape == p.shape else replace(p, shape=shape, unpadded=p.shape)


def without_padding(p: Param) -> Param:
    """Returns the declaration without the zeros at the ends of padded dimensions."""
    return p if p.unpadded is None else replace(p, shape=p.unpadded, unpadded=None)


def partition(spec: Spec, values: PyTree) -> tuple[PyTree, PyTree]:
    """Splits `values`, a tree with the structure of the declarations, into its trained and its frozen part.

    Groups without leaves are left out of either part. If nothing is frozen, the parts are the tree and an empty one.
    """
    if isinstance(spec, Param):
        return (None, values) if spec.frozen else (values, None)
    parts = {name: partition(below, values[name]) for name, below in spec.items()}
    trained, frozen = ({name: part[i] for name, part in parts.items() if not _is_empty(part[i])} for i in (0, 1))
    return trained, frozen


def _is_empty(part: PyTree) -> bool:
    return part is None or (isinstance(part, dict) and not part)


def combine(trained: PyTree, frozen: PyTree) -> PyTree:
    """Returns the tree that `partition` has split into these two parts."""
    if not (isinstance(trained, dict) and isinstance(frozen, dict)):
        return frozen if trained is None else trained
    names = [*trained, *(name for name in frozen if name not in trained)]
    return {name: combine(trained.get(name), frozen.get(name)) for name in names}


def count(spec: Spec) -> int:
    """Returns the number of parameters, without padding."""
    return sum(p.size for p in jax.tree.leaves(spec, is_leaf=lambda x: isinstance(x, Param)))


def abstract(spec: Spec, dtype: DTypeLike = jnp.float32) -> Params:
    """Returns shapes without values, all with one dtype."""
    return map_spec(lambda p: jax.ShapeDtypeStruct(p.shape, dtype), spec)


def pad_to_slots(spec: Spec, stages: Stages | None) -> Spec:
    """Returns the declarations with as many layers as stages have slots for; `None` means that there are no stages."""
    if stages is None:
        return spec
    placed = stages

    def pad(keys: tuple[Any, ...], p: Param) -> Param:
        slots = len(placed.of(path_of(keys)).layer_of_slot) if p.stacked else 0
        return replace(p, shape=(slots, *p.shape[1:])) if p.stacked else p

    return jax.tree_util.tree_map_with_path(pad, spec, is_leaf=lambda x: isinstance(x, Param))


def random_key(key: jax.Array, *path: str | int | jax.Array) -> jax.Array:
    """Returns the PRNG key [] of one draw, which its path below `key` determines.

    Two draws are independent if neither path begins with the other one. Never draw from a key that is also folded or
    split: its children are bits of the draw.

    Args:
      key: PRNG key from which all draws derive.
      path: names, such as names of parameters, and indices, such as the index of a layer.
    """
    for part in path:
        key = jax.random.fold_in(key, zlib.crc32(part.encode()) if isinstance(part, str) else part)
    return key


def init(key: jax.Array, spec: Spec, stages: Stages | None = None) -> Params:
    """Draws initial values, float32: for each declaration an array of its `shape` [...].

    Each array's key is folded from its path and, where layers are stacked, from the layer's index. So values depend
    neither on the mesh, nor on how layers are grouped, nor on which other parameters exist.

    Args:
      key: PRNG key that all values derive from.
      stages: which layer each slot of the stacked arrays has; empty slots are zeros. `None` means that slot i has
        layer i.
    """

    def one(keys: tuple[Any, ...], p: Param) -> jax.Array:
        own = random_key(key, path_of(keys))
        shape = (p.unpadded or p.shape)[p.stacked :]

        def draw(key: jax.Array) -> jax.Array:
            if p.init == "normal":
                return p.std * jax.random.normal(key, shape, jnp.float32)
            return jnp.full(shape, p.init if isinstance(p.init, float) else float(p.init == "ones"), jnp.float32)

        if p.unpadded:
            return jnp.pad(draw(own), [(0, to - size) for size, to in zip(shape, p.shape, strict=True)])
        if not p.stacked:
            return draw(own)
        layers = np.arange(p.shape[0]) if stages is None else stages.of(path_of(keys)).layer_of_slot
        numbers = jnp.arange(p.shape[0]) if stages is None else jnp.asarray(layers)
        values = jax.vmap(lambda i: draw(random_key(own, i)))(numbers)
        if (layers >= 0).all():
            return values
        return jnp.where((numbers >= 0).reshape(-1, *(1,) * len(shape)), values, 0.0)

    return jax.tree_util.tree_map_with_path(one, spec, is_leaf=lambda x: isinstance(x, Param))


def cast_matrices(spec: Spec, params: Params, dtype: DTypeLike) -> Params:
    """Casts matrices and tables to the dtype of a forward pass; vectors and routers stay as they are."""
    return map_spec(lambda p, v: v.astype(dtype) if p.is_cast else v, spec, params)
