"""How much each layer, head, hidden unit, expert and channel of a model matters on calibration batches.

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
from jaxstack.families import diffusion
from jaxstack.families.surgery import width_of
from jaxstack.models.params import Params

READERS = ("attention/w_q", "cross/w_q", "cross/w_k", "mlp/w_up", "moe/shared/w_up")
"""Matrices of a layer whose inputs are measured for the importance of channels."""


@dataclass(frozen=True)
class OfStack:
    """Importance of the parts of a stack of L layers.

    Attributes:
      turns: 1 - cosine of the residual stream before and after each step of layers, mean over tokens [L / period].
      heads: norm of the outputs of each query head, times the norm of its output projection [L, H], by the group of
        parameters: `attention`, and `cross`, which attends to another stack.
      neurons: norm of each hidden unit, times the norm of its output weights, by the group of parameters: `mlp` [L, F],
        `moe` [L, E, F], `moe/shared` [L, F].
      experts: root of the summed squares of each expert's weighted outputs [L, E]; E = 0 in a stack without experts.
      load: share of the pairs of tokens and experts that each expert gets [L, E].
    """

    turns: np.ndarray
    heads: Mapping[str, np.ndarray]
    neurons: Mapping[str, np.ndarray]
    experts: np.ndarray
    load: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))


@dataclass(frozen=True)
class Importance:
    """Importance of the parts of a model.

    Attributes:
      stacks: by the name of the stack.
      channels: by the name of the vectors (see `surgery.width_of`): of a residual stream, norms of what attention and
        MLPs read, summed over layers [D]. Of the condition of a diffusion model, and of the hidden layer that reads the
        timestep, norms times the norms of the weights that read them.
    """

    stacks: Mapping[str, OfStack]
    channels: Mapping[str, np.ndarray]


class _Layer(NamedTuple):
    heads: dict[str, np.ndarray]
    neurons: dict[str, np.ndarray]
    experts: np.ndarray
    channels: dict[str, np.ndarray]
    load: np.ndarray


def measure(walk: Walk, params: Params, batches: Sequence[Batch]) -> Importance:
    """Returns the importance of all parts, from one pass over the batches.

    The rows of an expert are not in the order of sequences. The norm of its units is that over all tokens, times the
    weights of the router.
    """
    layers: dict[str, list[_Layer]] = {}
    turns: dict[str, list[float]] = {}
    sequences = sum(len(next(iter(batch.values()))) for batch in batches)

    def one(index: int, layer: Params, measure: Measure) -> Params:
        own = layers.setdefault(measure.stack, [])
        if len(own) % walk.stacks[measure.stack].period == 0:
            turn = jax.device_get(measure.turn())
            turns.setdefault(measure.stack, []).append(float(turn.distance / turn.tokens))
        own.append(_of_layer(walk, layer, measure, sequences))
        return layer

    for _ in walk.run(params, batches, one):
        pass
    stacks = {name: _of_stack(turns[name], own) for name, own in layers.items()}
    channels: dict[str, np.ndarray] = {}
    for each in (layer for own in layers.values() for layer in own):
        for name, size in each.channels.items():
            channels[name] = channels.get(name, 0) + size
    if walk.cfg.family == "diffusion":
        channels["time"] = _of_time(walk, params, batches)
    return Importance(stacks, channels)


def _of_stack(turns: Sequence[float], layers: Sequence[_Layer]) -> OfStack:
    return OfStack(
        np.array(turns),
        {group: np.stack([layer.heads[group] for layer in layers]) for group in layers[0].heads},
        {group: np.stack([layer.neurons[group] for layer in layers]) for group in layers[0].neurons},
        np.stack([layer.experts for layer in layers]),
        np.stack([layer.load for layer in layers]),
    )


def _of_layer(walk: Walk, layer: Params, measure: Measure, sequences: int) -> _Layer:
    """Returns the importance of the parts of one layer."""
    found: Mapping[str, Statistics] = jax.device_get(measure())
    values = flatten(layer)
    neurons = {}
    experts = np.zeros(0)
    load = np.zeros(0)
    for path, p in measure.matrices.items():
        group, _, name = path.rpartition("/")
        if name != "w_down":
            continue
        w = np.asarray(values[path])
        norms = np.asarray(found[path].norms) / sequences
        if "experts" in p.axes:
            gram = found[path].gram
            norms = np.sqrt(np.diagonal(gram, axis1=1, axis2=2))
            experts = np.sqrt(((gram @ w) * w).sum((1, 2)).clip(0))
            tokens = np.asarray(found[path].tokens)
            load = tokens / tokens.sum()
        neurons[group] = norms * np.linalg.norm(w, axis=-1)
    heads = {}
    for group in ("attention", "cross"):
        if group in layer:
            sizes = np.linalg.norm(np.asarray(layer[group]["w_o"]), axis=(1, 2))  # of a matrix: Frobenius
            heads[group] = sizes * np.asarray(found[f"{group}/w_o"].norms) / sequences
    channels: dict[str, np.ndarray] = {}
    for path in READERS:
        if path in found:
            name = width_of(walk.cfg.family, f"{measure.stack}/{path}", "embed")
            channels[name] = channels.get(name, 0) + np.asarray(found[path].norms) / sequences
    if "modulation" in layer:
        weights = np.linalg.norm(np.asarray(layer["modulation"]["w"]), axis=(1, 2))
        channels["condition"] = weights * np.asarray(found["modulation/w"].norms) / sequences
    return _Layer(heads, neurons, experts, channels, load)


def _of_time(walk: Walk, params: Params, batches: Sequence[Batch]) -> np.ndarray:
    """Returns the importance of the hidden units that read the timestep of a diffusion model [D]."""
    run = jax.jit(lambda values, ids: diffusion.time_units(walk.cfg, values, ids, walk.ctx))
    values = params["condition"]
    units = np.concatenate([np.abs(jax.device_get(run(values, batch["gate_ids"])))[:, 0] for batch in batches])
    sizes: np.ndarray = units.astype(np.float32).mean(0) * np.linalg.norm(np.asarray(values["w_out"]), axis=-1)
    return sizes
