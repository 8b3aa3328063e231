"""How much each layer, head, hidden unit, expert and channel of a decoder or an encoder matters on calibration batches.

Parts are measured by the size of their activations, as in Minitron (Muralidharan et al. 2024, arXiv:2407.14679, section
2.2): the L2 norm over the tokens of a sequence, and the mean over sequences. Norms of heads and hidden units are times
the norm of the weights that read them, because what they add to the residual stream matters. A layer is measured by
the angle between its input and its output, or by the loss of the model without it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np

from jaxstack.common.tree import Batch, flatten
from jaxstack.compress.calibrate import Measure, Statistics, Walk
from jaxstack.models.params import Params


@dataclass(frozen=True)
class Importance:
    """Importance of the parts of a decoder or an encoder with L layers.

    Attributes:
      turns: 1 - cosine of the residual stream before and after each step of layers, mean over tokens [L / period].
      heads: norm of the outputs of each query head, times the norm of its output projection [L, H].
      neurons: norm of each hidden unit, times the norm of its output weights, by the group of parameters: `mlp` [L, F],
        `moe` [L, E, F], `moe/shared` [L, F].
      experts: root of the summed squares of each expert's weighted outputs [L, E]; E = 0 in a dense model.
      channels: norms of what attention and MLPs read, summed over layers [D].
      load: share of the pairs of tokens and experts that each expert gets [L, E]; E = 0 in a dense model.
    """

    turns: np.ndarray
    heads: np.ndarray
    neurons: Mapping[str, np.ndarray]
    experts: np.ndarray
    channels: np.ndarray
    load: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))


class _Layer(NamedTuple):
    heads: np.ndarray
    neurons: dict[str, np.ndarray]
    experts: np.ndarray
    channels: np.ndarray
    load: np.ndarray


def measure(walk: Walk, params: Params, batches: Sequence[Batch]) -> Importance:
    """Returns the importance of all parts, from one pass over the batches.

    The rows of an expert are not in the order of sequences. The norm of its units is that over all tokens, times the
    weights of the router.
    """
    layers: list[_Layer] = []
    turns: dict[int, float] = {}
    period = len(walk.cfg.windows)

    sequences = sum(len(batch["tokens"]) for batch in batches)

    def one(index: int, layer: Params, measure: Measure) -> Params:
        turn = jax.device_get(measure.turn())
        turns[index // period] = float(turn.distance / turn.tokens)
        layers.append(_of_layer(walk, layer, jax.device_get(measure()), sequences))
        return layer

    for _ in walk.run(params, batches, one):
        pass
    return Importance(
        np.array([turns[step] for step in sorted(turns)]),
        np.stack([layer.heads for layer in layers]),
        {group: np.stack([layer.neurons[group] for layer in layers]) for group in layers[0].neurons},
        np.stack([layer.experts for layer in layers]),
        np.sum([layer.channels for layer in layers], axis=0),
        np.stack([layer.load for layer in layers]),
    )


def _of_layer(walk: Walk, layer: Params, found: Mapping[str, Statistics], sequences: int) -> _Layer:
    """Returns the importance of the parts of one layer."""
    neurons = {}
    experts = np.zeros(0)
    load = np.zeros(0)
    for path, p in walk.matrices.items():
        group, _, name = path.rpartition("/")
        if name != "w_down":
            continue
        w = np.asarray(flatten(layer)[path])
        norms = np.asarray(found[path].norms) / sequences
        if "experts" in p.axes:
            gram = found[path].gram
            norms = np.sqrt(np.diagonal(gram, axis1=1, axis2=2))
            experts = np.sqrt(((gram @ w) * w).sum((1, 2)).clip(0))
            tokens = np.asarray(found[path].tokens)
            load = tokens / tokens.sum()
        neurons[group] = norms * np.linalg.norm(w, axis=-1)
    heads = np.linalg.norm(np.asarray(layer["attention"]["w_o"]), axis=(1, 2))  # of a matrix: Frobenius
    read = [found[path].norms for path in ("attention/w_q", "mlp/w_up", "moe/shared/w_up") if path in found]
    return _Layer(
        heads * np.asarray(found["attention/w_o"].norms) / sequences,
        neurons,
        experts,
        np.sum(read, axis=0) / sequences,
        load,
    )
