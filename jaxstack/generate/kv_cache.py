"""A decoder with a KV cache: it reads the prompts at once, then one token at a time.

Rows are aligned at their ends: all prompts end in the same slot, and each added token takes the next slot. Attention
never reads the slots before a shorter prompt. A layer with a sliding window keeps only as many tokens as it attends to.
Its entry for slot n has index n modulo their number, so the newest token replaces the oldest.

Suffixes: B rows of this device, S slots of the prompts, T tokens that a layer keeps, V vocabulary.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxstack import families
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import ConfigError, ModelConfig
from jaxstack.kernels.coded_weight import CodedWeight
from jaxstack.models import decoder
from jaxstack.models.blocks import Stack, group_layers
from jaxstack.models.context import Context
from jaxstack.models.family import CACHED
from jaxstack.models.params import Param, cast_matrices, is_compressed, map_spec, unstack
from jaxstack.models.values import Aux
from jaxstack.sharding import collectives

SLOT_AXIS = {"keys": -1, "values": -2}
"""The axis of the tokens in the arrays of a cache: both matmuls of attention then read them without a transpose.

Other arrays of a cache sum up the whole text so far, and are replaced as a whole.
"""


class TokenWeights(NamedTuple):
    """Copies of weights that are read in place for one token (`ctx.ops.decode=unrolled`).

    Attributes:
      layer_groups: the weights of each group of layers, see `hidden_states_unrolled`.
      head: on a CPU, the transposed table of a model with tied embeddings [D, V/n]: XLA:CPU reads the table itself more
        slowly. Else `None`.
    """

    layer_groups: list[PyTree]
    head: jax.Array | None


@dataclass(frozen=True)
class CachedDecoder:
    """Runs a model on new tokens and returns the logits of the next ones; the work of one device.

    The cache holds keys [L/period, B, G, K, T] and values [L/period, B, G, T, K] for each block of a group of layers.
    With `token_weights` it holds keys [B, G, K, T] and values [B, G, T, K] for each block of each group.

    Attributes:
      cfg: the model.
      params: its parameters.
      ctx: the execution context.
      gate: domain of all tokens, for a model with a hard gate.
      vocabulary: number of ids that exist.
      first: slot of each prompt's first token [B].
      num_slots: number of slots, for the prompts and all tokens to come.
      spare: number of newest tokens that may be dropped again, see `verify_tokens`.
      token_weights: what a new token reads with `ctx.ops.decode=unrolled`.
    """

    cfg: ModelConfig
    params: PyTree
    ctx: Context
    gate: int | None
    vocabulary: int
    first: jax.Array
    num_slots: int
    token_weights: TokenWeights | None
    spare: int = 0

    @classmethod
    def create(
        cls,
        cfg: ModelConfig,
        params: PyTree,
        ctx: Context,
        *,
        gate: int | None,
        vocabulary: int,
        first: jax.Array,
        num_slots: int,
        token_weights: TokenWeights | None = None,
    ) -> "CachedDecoder":
        """Returns a decoder whose parameters are cast and copied once, unless they are already.

        `first` is the slot of each prompt's first token [B]. For the other arguments, see the class.

        Raises:
          ConfigError: layers with states, or layers of two kinds, on a pipeline.
        """
        if cfg.states_key and ctx.layout.pipeline is not None:
            raise ConfigError(
                f"{cfg.states_key} has states, with which a pipeline does not generate. Use --mesh.pipe=1."
            )
        if cfg.moe.num_experts and not all(cfg.has_experts) and ctx.layout.pipeline is not None:
            raise ConfigError(
                "model.moe.layers gives the model layers of two kinds, with which a pipeline does not generate. Use "
                "--mesh.pipe=1."
            )
        exact = params
        params = cast_matrices(families.spec(cfg), params, ctx.dtype)
        unrolled = ctx.ops.decode == "unrolled" and ctx.layout.pipeline is None
        several = len(families.of(cfg).stacks(cfg)) > 1 and ctx.ops.decode_weights is None
        if token_weights is None and unrolled and not several:
            name, stack = families.only_stack(cfg)
            stacked = group_layers(stack.period, params[name])
            groups = [jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(stack.depth // stack.period)]
            if ctx.ops.decode_weights is not None and (ctx.layout.mesh is None or ctx.layout.mesh.size == 1):
                groups = _to_codes(cfg, ctx, groups, group_layers(stack.period, exact[name]))
            copied = cfg.tied_embeddings and (ctx.ops.platform or jax.default_backend()) == "cpu"
            token_weights = TokenWeights(groups, params["embedding"]["tokens"].T if copied else None)
        return cls(cfg, params, ctx, gate, vocabulary, first, num_slots, token_weights)

    def prefill(self, tokens: jax.Array) -> tuple[jax.Array, PyTree]:
        """Returns the logits [B, V] after the prompts [B, S], and their cache."""
        return self.prefill_counted(tokens)[:2]

    def prefill_counted(self, tokens: jax.Array) -> tuple[jax.Array, PyTree, PyTree]:
        """Returns what `prefill` does for the prompts [B, S], and this device's `load`, see `decode_counted`."""
        x, cache, load = self.prefill_hidden(tokens)
        return self.logits(x[:, -1:])[:, 0], cache, load

    def first_batch(self, tokens: jax.Array) -> Batch:
        """Returns the batch of prompts [B, S], or of as many other tokens, for `decoder.make_layer_inputs`."""
        positions = jnp.arange(tokens.shape[1]) - self.first[:, None]
        there = (positions >= 0).astype(jnp.int32)
        batch: dict[str, Any] = {
            "tokens": tokens,
            "positions": jnp.maximum(positions, 0),
            "segment_ids": there,
            "loss_weights": there,
        }
        if self.gate is not None:
            batch["gate_ids"] = jnp.full_like(tokens, self.gate)
        return batch

    def prefill_hidden(self, tokens: jax.Array) -> tuple[jax.Array, PyTree, PyTree]:
        """Returns what the head reads of each token of the prompts [B, S, D], their cache, and the `load`."""
        batch = self.first_batch(tokens)
        x, aux = families.of(self.cfg).hidden_states(self.cfg, self.params, batch, self.ctx, cache={})
        cache = self._map_blocks(lambda T: partial(allocate, T), self._by_stack(aux))
        if self.token_weights is not None:
            cache = [jax.tree.map(lambda a, i=i: a[i], cache) for i in range(len(self.token_weights.layer_groups))]
        return x, cache, self.load_of(aux)

    def empty_cache(self) -> PyTree:
        """Returns the cache before the first token."""
        tokens = collectives.zeros((*self.first.shape, 1), jnp.int32, self.first)
        shapes = jax.eval_shape(lambda: self.prefill(tokens)[1])
        return jax.tree.map(lambda a: collectives.zeros(a.shape, a.dtype, a), shapes)

    def decode_token(self, tokens: jax.Array, slot: jax.Array, cache: PyTree) -> tuple[jax.Array, PyTree]:
        """Returns the logits [B, V] after one more token of each row [B], in `slot`, and the cache that includes it."""
        return self.decode_counted(tokens, slot, cache)[:2]

    def decode_counted(
        self, tokens: jax.Array, slot: jax.Array, cache: PyTree, counted: jax.Array | None = None
    ) -> tuple[jax.Array, PyTree, PyTree]:
        """Returns what `decode_token` does, and the `load`: how many of this device's tokens chose each expert.

        The load is int32 [L, E], or `()` for a model without experts. The sum over the devices that share the rows is
        the load of all rows. The rows `counted` [B] are counted; `None` means all.
        """
        x, new, load = self._hidden_states(tokens[:, None], slot, cache, counted)

        def update(axis: int, a: jax.Array, entry: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(a, entry, slot % a.shape[axis], axis)

        return self.logits(x)[:, 0], map_cache(update, cache, new), load

    def append_tokens(
        self, tokens: jax.Array, count: jax.Array, slot: jax.Array, cache: PyTree
    ) -> tuple[jax.Array, PyTree]:
        """Returns the logits [B, V] after `count` more tokens of each row, and the cache that includes them.

        Args:
          tokens: the tokens and padding after them [B, S].
          count: number of tokens that are not padding, from 1 to S.
          slot: slot of the first token.
          cache: cache of all tokens before that slot.
        """
        index = jnp.arange(tokens.shape[1])
        there = jnp.broadcast_to(index < count, tokens.shape).astype(jnp.int32)
        x, new, _ = self._hidden_states(tokens, slot, cache, there=there)

        def update(axis: int, a: jax.Array, entries: jax.Array) -> jax.Array:
            T = a.shape[axis]
            stays = (index < count) & (index >= count - T)  # a later token of these may take the same place
            places = jnp.where(stays, (slot + index) % T, T)
            return a.at[(..., places, *[slice(None)] * (-1 - axis))].set(entries, mode="drop")

        last = jax.lax.dynamic_slice_in_dim(x, count - 1, 1, 1)
        return self.logits(last)[:, 0], map_cache(update, cache, new)

    def verify_tokens(self, tokens: jax.Array, slot: jax.Array, cache: PyTree) -> tuple[jax.Array, PyTree]:
        """Returns the logits [B, S, V] after each of some more tokens, and the cache that includes them.

        The caller may drop all but the first of them: the next token then takes the slot of the first dropped one. A
        layer with a window holds `spare` tokens more for that, because the dropped ones have replaced the oldest.

        Args:
          tokens: the tokens [B, S]; S - 1 is at most `spare`.
          slot: slot of the first token.
          cache: cache of all tokens before that slot.
        """
        x, cache = self.verify_hidden(tokens, slot, cache)
        return self.logits(x), cache

    def verify_hidden(self, tokens: jax.Array, slot: jax.Array, cache: PyTree) -> tuple[jax.Array, PyTree]:
        """Returns what `verify_tokens` does, with what the head reads [B, S, D] in place of logits."""
        x, new, _ = self._hidden_states(tokens, slot, cache)
        return x, self.put_tokens(cache, new, slot, tokens.shape[1])

    def put_tokens(self, cache: PyTree, new: PyTree, slot: jax.Array, count: int) -> PyTree:
        """Returns the cache with the entries of some tokens that begin in a slot, and may be dropped again.

        `new` has the arrays of the cache with `count` slots, such as keys [L/period, B, G, K, count].
        """

        def update(axis: int, a: jax.Array, entries: jax.Array) -> jax.Array:
            T = a.shape[axis]
            if self.num_slots == T:  # all slots have an entry of their own
                return jax.lax.dynamic_update_slice_in_dim(a, entries, slot, axis)
            places = (slot + jnp.arange(count)) % T
            return a.at[(..., places, *[slice(None)] * (-1 - axis))].set(entries)

        return map_cache(update, cache, new)

    def move_cache(self, cache: PyTree, slot: jax.Array, to: jax.Array) -> PyTree:
        """Returns the cache of the tokens before a slot, with the slots of this decoder and with other slot numbers.

        Args:
          cache: cache from a decoder of any number of slots. Where it has more, the oldest tokens are dropped.
          slot: the slot after the newest token, a scalar [].
          to: new number of this slot, a scalar [].
        """

        def move(T: int, axis: int, a: jax.Array) -> jax.Array:
            had = a.shape[axis]
            in_order = jnp.roll(a, -slot % had, axis)
            if had > T:
                in_order = jax.lax.slice_in_dim(in_order, had - T, had, axis=axis)
            else:  # the newest are the last
                in_order = jnp.pad(in_order, [(T - had, 0) if i == axis % a.ndim else (0, 0) for i in range(a.ndim)])
            return jnp.roll(in_order, to % T, axis)

        def move_blocks(blocks: PyTree) -> PyTree:
            return self._map_blocks(lambda T: partial(move, T), blocks)

        return [move_blocks(group) for group in cache] if self.token_weights is not None else move_blocks(cache)

    def with_first(self, first: jax.Array) -> "CachedDecoder":
        """Returns the model for other rows, given the slot of the first token of each [B]."""
        return replace(self, first=first)

    def next_batch(
        self,
        tokens: jax.Array,
        slot: jax.Array,
        counted: jax.Array | None = None,
        there: jax.Array | None = None,
    ) -> Batch:
        """Returns the batch of the tokens [B, S] in the slots from `slot` on, for `decoder.make_layer_inputs`.

        Args:
          slot: slot of the first token.
          counted: see `decode_counted`.
          there: 1 for tokens and 0 for the padding after them [B, S]. `None` means that there is no padding.
        """
        batch: dict[str, Any] = {
            "tokens": tokens,
            "positions": (slot - self.first)[:, None] + jnp.arange(tokens.shape[1]),
            "distance": [self._distance(slot, T) for T in self._lengths],
        }
        if there is not None:
            batch["segment_ids"] = there
        if self.gate is not None:
            batch["gate_ids"] = jnp.full_like(tokens, self.gate)
        if counted is not None:
            batch["loss_weights"] = jnp.broadcast_to(counted[:, None], tokens.shape)
        return batch

    def no_load(self) -> PyTree:
        """Returns the load of no tokens, see `decode_counted`."""
        shape = self.cfg.expert_layers, self.cfg.moe.num_experts
        return collectives.zeros(shape, jnp.int32, self.first) if self.cfg.moe.num_experts else ()

    def load_of(self, aux: Aux) -> PyTree:
        """Returns the load among auxiliary values, see `decode_counted`."""
        return aux["load"].astype(jnp.int32) if self.cfg.moe.num_experts else ()

    def _hidden_states(
        self,
        tokens: jax.Array,
        slot: jax.Array,
        cache: PyTree,
        counted: jax.Array | None = None,
        there: jax.Array | None = None,
    ) -> tuple[jax.Array, PyTree, PyTree]:
        """Returns hidden states of the tokens [B, S] in the slots from `slot` on, their keys and values, and the load.

        `decode_counted` describes the load, and `next_batch` the other arguments.
        """
        batch = self.next_batch(tokens, slot, counted, there)
        if self.token_weights is not None:
            groups = self.token_weights.layer_groups
            x, new, aux = hidden_states_unrolled(self.cfg, self.params, groups, batch, cache, self.ctx)
            return x, new, self.load_of(aux)
        x, aux = families.of(self.cfg).hidden_states(self.cfg, self.params, batch, self.ctx, cache=cache)
        return x, self._by_stack(aux), self.load_of(aux)

    def _by_stack(self, aux: Aux) -> PyTree:
        """Returns keys and values of all layers [L, ...] as `Family.hidden_states` reads them, see its `cache`."""
        new = {name: aux[name] for name in CACHED if name in aux}
        stacks = families.of(self.cfg).stacks(self.cfg)
        if len(stacks) == 1:
            (only,) = stacks.values()
            return _group_cached(only, new)
        found = {}
        ends: Counter[str] = Counter()
        for name, stack in stacks.items():
            kept = Counter(array for arrays in stack.cached for array in arrays)
            starts = Counter(ends)
            ends.update({array: stack.depth // stack.period * count for array, count in kept.items()})
            found[name] = _group_cached(stack, {array: new[array][starts[array] : ends[array]] for array in kept})
        return found

    def _map_blocks(self, f: Callable[[int], Callable[..., jax.Array]], cache: PyTree) -> PyTree:
        """Returns `f(T)(slot_axis, array)` of each array of a cache, where T is the number of tokens it keeps."""
        if isinstance(cache, dict):
            return {name: self._map_blocks(f, blocks) for name, blocks in cache.items()}
        lengths = itertools.cycle(self._lengths)  # a unit of layers of several kinds has one
        return [map_cache(f(T), block) for T, block in zip(lengths, cache, strict=False)]

    @property
    def last_length(self) -> int:
        """The number of tokens that the last layer keeps."""
        return self._lengths[-1]

    @property
    def _lengths(self) -> list[int]:
        """The number of tokens that each block of a group keeps: all that its window spans, except the newest."""
        lengths = [max(window - 1, 1) + self.spare if window else self.num_slots for window in self.cfg.windows]
        return [min(T, self.num_slots) for T in lengths]

    def _distance(self, slot: jax.Array, T: int) -> jax.Array:
        """Returns how far each kept token [B, T] is before `slot`; 0 marks entries that are empty or before the row."""
        there = slot - 1 - (slot - 1 - jnp.arange(T)) % T
        return jnp.where(there >= self.first[:, None], slot - there, 0)

    def logits(self, x: jax.Array) -> jax.Array:
        """Returns the logits [B, S, V] of all vocabulary entries from hidden states [B, S, D]."""
        head = self.token_weights.head if self.token_weights is not None else None
        params = self.params if head is None else {"head": {"w": head}}
        local = decoder.logits(self.cfg, params, x, self.ctx)
        return known_logits(
            self.cfg, collectives.all_gather_invariant(local, self.ctx.layout.axes("vocab"), 2), self.vocabulary
        )


def hidden_states_unrolled(
    cfg: ModelConfig, params: PyTree, steps: list[list[PyTree]], batch: Batch, cache: list[PyTree], ctx: Context
) -> tuple[jax.Array, list[PyTree], Aux]:
    """Computes `Family.hidden_states` of tokens after a cache, without a loop over layers.

    The weights of each layer are arrays of their own. XLA:CPU reads such arrays in place, and would copy a layer's part
    of a stacked array for every token.

    Args:
      params: in the compute dtype; the layers are not read from here.
      steps: weights of each layer of each step.
      batch: see `Family.make_layer_inputs`.
      cache: cache of each layer of each step.

    Returns:
      Normalised hidden states, `keys` and `values` of these tokens for each layer of each step, and the other named
      values [L, ...].
    """
    family = families.of(cfg)
    _, stack = families.only_stack(cfg)
    inputs = family.make_layer_inputs(cfg, batch, ctx)
    x, _ = family.embed(cfg, params, inputs, ctx)
    new: list[PyTree] = []
    others: list[Aux] = []
    for index, (weights, earlier) in enumerate(zip(steps, cache, strict=True)):
        x, values = stack.step(cfg, ctx, stack, weights, x, index, inputs, earlier)
        new.append([{name: values[name][i] for name, i in layer.items()} for layer in places_of(stack.cached)])
        others.append({name: value for name, value in values.items() if name not in CACHED})
    return family.final_norm(cfg, params, x, inputs, ctx), new, jax.tree.map(lambda *a: jnp.concatenate(a), *others)


def _to_codes(cfg: ModelConfig, ctx: Context, groups: list[PyTree], stacked: list[PyTree]) -> list[PyTree]:
    """Returns the weights of each group of layers with codes in place of matrices, except for experts.

    Args:
      ctx: the execution context, with the format of the codes.
      groups: in the dtype of the computation.
      stacked: the same as they were given, before a cast, with all groups on a leading axis.
    """
    layer = unstack(families.spec(cfg)[families.only_stack(cfg)[0]])
    scheme = ctx.ops.decode_weights
    assert scheme is not None

    def code(p: Param, value: jax.Array, exact: jax.Array) -> jax.Array | CodedWeight:
        return (
            CodedWeight.of(exact, p.in_axes, scheme, ctx.ops.codes) if is_compressed(p) and not p.batch_axes else value
        )

    def one(i: int, block: PyTree, whole: PyTree) -> PyTree:
        return map_spec(code, layer, block, jax.tree.map(lambda a: a[i], whole))

    return [[one(i, *both) for both in zip(group, stacked, strict=True)] for i, group in enumerate(groups)]


def places_of(layers: Sequence[Sequence[str]]) -> list[dict[str, int]]:
    """Returns, for each layer of a step, the index of each of its arrays among the step's arrays of the same name.

    Args:
      layers: names of the arrays that each layer keeps.
    """
    counts: Counter[str] = Counter()
    found = []
    for names in layers:
        found.append({name: counts[name] for name in names})
        counts.update(names)
    return found


def _group_cached(stack: Stack, new: Aux) -> list[PyTree]:
    """Returns the arrays of a stack's layers, which follow each other [L, ...], by the layer of a step."""
    layers = places_of(stack.cached)
    sizes = Counter(name for names in stack.cached for name in names)
    grouped = {name: a.reshape(-1, sizes[name], *a.shape[1:]) for name, a in new.items()}
    return [{name: grouped[name][:, i] for name, i in places.items()} for places in layers]


def map_cache(f: Callable[..., jax.Array], cache: PyTree, *others: PyTree) -> PyTree:
    """Returns `f(slot_axis, array, *other_arrays)` of each array of a cache that has slots, such as [B, G, K, T].

    Of an array without slots it returns the array of the last tree.
    """

    def one(path: tuple[Any, ...], *arrays: jax.Array) -> jax.Array:
        axis = SLOT_AXIS.get(path[-1].key)
        return arrays[-1] if axis is None else f(axis, *arrays)

    return jax.tree_util.tree_map_with_path(one, cache, *others)


def allocate(T: int, axis: int, a: jax.Array) -> jax.Array:
    """Returns a cache [..., T, ...] with T slots along an axis, from an array [..., S, ...].

    Token i has slot i % T. If S is above T, the last T tokens stay; otherwise slots at the end are zeros.
    """
    S = a.shape[axis]
    if S <= T:
        widths = [(0, 0)] * a.ndim
        widths[axis] = (0, T - S)
        return jnp.pad(a, widths)
    return jnp.roll(jax.lax.slice_in_dim(a, S - T, S, axis=axis), S % T, axis)


def known_logits(cfg: ModelConfig, logits: jax.Array, vocabulary: int) -> jax.Array:
    """Returns logits [..., V] without padding, and with minus infinity for ids that the tokenizer does not have."""
    return jnp.where(jnp.arange(cfg.vocab) < vocabulary, logits[..., : cfg.vocab], -jnp.inf)
