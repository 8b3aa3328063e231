"""How a parameter is laid out in a tensor of a Hugging Face model: transposed, joined, or one part of several."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from jaxstack.models.params import Param

PIECE_BYTES = 32e6
"""Bytes of a tensor that are read at a time."""

Index = tuple[slice, ...]
"""A slice for each dimension, with start and stop."""


@dataclass(frozen=True)
class TensorLayout:
    """The layout of a parameter, of one layer and one expert, in a Hugging Face tensor of one or two axes.

    If the tensor has all experts, these are the axes of each of its parts.

    The tensor joins all input dimensions (such as H * K) in one axis, and all output dimensions in another. A vector
    has one axis.

    Attributes:
      transposed: whether the tensor is [outputs, inputs], as in `nn.Linear`, and not [inputs, outputs], as in jaxstack
        and in GPT-2's `Conv1D`.
      joined: the length of the axis of outputs, if it holds several parameters. `None` means that it holds this one.
      blocks: the number of equal blocks of that axis, of which each holds a part of every parameter, in their order. In
        GPT-NeoX there is one for each head, and in the experts of gpt-oss one for each element.
      start: within each block, the number of outputs before this parameter's part.
      first_layer: the first layer that has the tensor. Layers before it have ones, which the model does not read.
      layers: of units with several layers, how many a unit has, and which of them this one is. A parameter has a row
        for each unit.
      depthwise: whether the tensor has an axis of size one behind the outputs, as in a depthwise `nn.Conv1d`.
      stacked: whether the tensor has all experts of a layer, on an axis before the others.
    """

    transposed: bool = False
    joined: int | None = None
    blocks: int = 1
    start: int = 0
    first_layer: int = 0
    layers: tuple[int, int] = (1, 0)
    depthwise: bool = False
    stacked: bool = False

    def name(self, pattern: str, at: tuple[int, ...]) -> str:
        """Returns the name of a tensor, from its pattern and the numbers of the unit of layers and of the expert."""
        size, which = self.layers
        return pattern.format(*(number * size + which if i == 0 else number for i, number in enumerate(at)))

    def outputs_axis(self, p: Param) -> int:
        """Returns the axis of the tensor that holds the outputs."""
        return 0 if self.transposed or p.kind == "vector" else 1

    def _axes(self, p: Param) -> tuple[tuple[int, ...], ...]:
        """Returns the dimensions of the parameter that each axis of the tensor joins."""
        own = tuple(range(len(p.shape) - p.batch_axes))
        if p.kind == "vector":
            return (own,)
        inputs = own[: p.in_axes]
        outputs = own[p.in_axes :]
        return (outputs, inputs) if self.transposed else (inputs, outputs)

    def shape(self, p: Param) -> tuple[int, ...]:
        """Returns the shape of the whole tensor."""
        own = p.shape[p.batch_axes :]
        sizes = [prod(own[d] for d in axis) for axis in self._axes(p)]
        sizes[self.outputs_axis(p)] = self.joined or sizes[self.outputs_axis(p)]
        if self.depthwise:
            return (sizes[0], 1, *sizes[1:])
        return (p.shape[p.batch_axes - 1], *sizes) if self.stacked else tuple(sizes)

    def tensors(self, p: Param) -> int:
        """Returns the number of tensors that have a part of the parameter."""
        return prod(p.shape[: p.batch_axes - self.stacked])

    def outputs(self, p: Param) -> np.ndarray:
        """Returns where the axis of outputs holds each output of the parameter, in the shape of its outputs."""
        own = p.shape[p.batch_axes :]
        shape = own if p.kind == "vector" else own[p.in_axes :]
        places = np.arange(prod(shape)).reshape(shape)
        if self.joined is None:
            return places
        block = places.size // self.blocks
        return places // block * (self.joined // self.blocks) + self.start + places % block

    def read_pieces(
        self, p: Param, index: Index, fetch: Callable[[Index], np.ndarray]
    ) -> Iterator[tuple[Index, np.ndarray]]:
        """Yields a part of the parameter in pieces, each with its index within the part.

        Args:
          index: the part, without the dimensions of layers and experts.
          fetch: reads a part of the tensor.
        """
        # Pieces are slices of the tensor's first axis, because these are contiguous in the file.
        rows = self._axes(p)[0][0]
        row_bytes = 4 * prod(s.stop - s.start for s in index) / (index[rows].stop - index[rows].start)
        step = max(int(PIECE_BYTES / row_bytes), 1)
        for start in range(index[rows].start, index[rows].stop, step):
            cut = slice(start, min(start + step, index[rows].stop))
            to = slice(cut.start - index[rows].start, cut.stop - index[rows].start)
            full = (slice(None),) * len(index)
            piece = self._piece(p, (*index[:rows], cut, *index[rows + 1 :]), fetch)
            yield (*full[:rows], to, *full[rows + 1 :]), piece

    def _piece(self, p: Param, index: Index, fetch: Callable[[Index], np.ndarray]) -> np.ndarray:
        """Returns a contiguous piece of the parameter."""
        own = p.shape[p.batch_axes :]
        axes = self._axes(p)
        where: list[slice] = []
        shape: list[int] = []
        inner: list[slice] = []
        for axis in axes:
            first = index[axis[0]]
            rest = axis[1:]
            size = prod(own[d] for d in rest)
            where.append(slice(first.start * size, first.stop * size))
            shape += [first.stop - first.start, *(own[d] for d in rest)]
            inner += [slice(None), *(index[d] for d in rest)]
        order = [d for axis in axes for d in axis]
        at = self.outputs_axis(p)
        if self.joined is not None:
            places = self.outputs(p).ravel()[where[at]]
            where[at] = slice(int(places[0]), int(places[-1]) + 1)
            whole = fetch((where[0], slice(0, 1), *where[1:]) if self.depthwise else tuple(where))
            fetched = whole if whole.shape[at] == len(places) else whole.take(places - places[0], axis=at)
        else:
            fetched = fetch(tuple(where))
        return fetched.reshape(shape)[tuple(inner)].transpose(np.argsort(order))

    def to_hf(self, p: Param, values: np.ndarray) -> np.ndarray:
        """Returns what the tensor holds of a parameter of one layer and one expert, in the order of its outputs."""
        axes = self._axes(p)
        sizes = [prod(values.shape[d] for d in axis) for axis in axes]
        sizes = [sizes[0], 1, *sizes[1:]] if self.depthwise else sizes
        return values.transpose([d for axis in axes for d in axis]).reshape(sizes)
