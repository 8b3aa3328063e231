"""Mixtures of experts: their declarations, their router, and the family whose layers have them.

Suffixes: B batch, S sequence, T tokens, D width, E experts.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack import moe as experts
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import ConfigError, DataConfig, ModelConfig
from jaxstack.config.expert_layers import Segment, segments
from jaxstack.features import router_losses
from jaxstack.kernels import Adapted
from jaxstack.models.batches import BatchSpec
from jaxstack.models.blocks import Stack, alternate
from jaxstack.models.context import Context
from jaxstack.models.family import Extras, Family
from jaxstack.models.layer_inputs import LayerInputs
from jaxstack.models.layers import RESIDUAL, activate, mlp_products, mlp_spec
from jaxstack.models.params import Param, Params, Spec, stack, unstack
from jaxstack.models.values import Aux, Mean
from jaxstack.moe import Routing, update_bias
from jaxstack.moe.placement import EXPERT_WEIGHTS
from jaxstack.sharding import collectives

HARD_GATES = ("domain", "timestep")
"""Routers that read the expert of each token from the batch."""


def spec_with_experts(family: Family, cfg: ModelConfig) -> Spec:
    """Returns the declarations of a family's model with experts in the layers that have them, see `with_experts`.

    Raises:
      ConfigError: the layers have no MLP whose place experts could take.
    """
    tree = family.spec(cfg)
    for name, stacked in family.stacks(cfg).items():
        if not stacked.plain:
            layer = unstack(tree[name])
            if "mlp" not in layer:
                raise ConfigError(
                    f"model.moe.num_experts={cfg.moe.num_experts} puts experts in place of the group mlp, but the "
                    f"layers of model.family={cfg.family} do not have it. Use model.moe.num_experts=0, or set "
                    f"Stack.plain for the stack {name}."
                )
            routed = {**{group: p for group, p in layer.items() if group != "mlp"}, "moe": moe_spec(cfg)}
            for segment in segments_of(cfg, name, stacked):
                kinds = [routed if has else layer for has in segment.kinds]
                unit = {f"layer_{i}": kind for i, kind in enumerate(kinds)} if kinds[1:] else kinds[0]
                tree[segment.name] = stack(unit, segment.units)
    return tree


def segments_of(cfg: ModelConfig, name: str, stacked: Stack) -> tuple[Segment, ...]:
    """Returns the stacks into which a stack is cut by `moe.layers`. Modules of prediction are like the last layer."""
    if name == "mtp":
        return segments(name, cfg.has_experts[-1:] * stacked.depth)
    has = cfg.moe.layers.of_stack(stacked.depth, encoder=name == "encoder")
    return segments(name, has, stacked.period)


def with_experts(family: Family) -> Family:
    """Returns the family with experts in place of the MLP of its layers.

    Where `moe.layers` leaves layers without them, a stack is cut into several, and some of them have units of layers,
    see `expert_layers.segments` and `blocks.alternate`. The losses of the router and what is logged of it are
    `router_losses`. Where the router has a bias, a step moves it.
    """

    def spec(cfg: ModelConfig) -> Spec:
        return spec_with_experts(family, cfg)

    def stacks(cfg: ModelConfig) -> dict[str, Stack]:
        found: dict[str, Stack] = {}
        for name, one in family.stacks(cfg).items():
            if one.plain:
                found[name] = one
                continue
            for segment in segments_of(cfg, name, one):
                found[segment.name] = _routed(one if segment.start == 0 else replace(one, enter=_go_on), segment)
        return found

    def routed_stacks(cfg: ModelConfig) -> dict[str, Stack]:
        return {name: one for name, one in stacks(cfg).items() if any(has_experts(one))}

    def batch_spec(model: ModelConfig, data: DataConfig) -> BatchSpec:
        arrays = family.batch_spec(model, data)
        moe = model.moe
        if moe.router in HARD_GATES and "gate_ids" not in arrays:
            below = moe.num_experts if moe.router == "domain" else moe.max_timestep
            tokens = [name for name in arrays if name.endswith("tokens")]
            arrays |= {f"{name.removesuffix('tokens')}gate_ids": replace(arrays[name], below=below) for name in tokens}
        return arrays

    def make_layer_inputs(cfg: ModelConfig, batch: Batch, ctx: Context) -> LayerInputs:
        """Builds what the layers read; see `Family.make_layer_inputs`. The batch also has, each [B, S]:

        - `gate_ids`: domain or timestep of each token, for hard gates.
        - `loss_weights`: the statistics of routing count the tokens whose weight is not zero. By default all. Encoders
          predict few tokens, and count all that `segment_ids` does not call padding.
        - the same of an encoder, by the names `encoder_gate_ids` and `encoder_segment_ids`.
        """
        inputs = family.make_layer_inputs(cfg, batch, ctx)
        counts = {one.counts for one in family.stacks(cfg).values()}
        weights = batch.get("segment_ids" if "segment_ids" in counts else "loss_weights")
        inputs = _counted(inputs, weights, batch.get("gate_ids"), ctx)
        if "encoder_segment_ids" in counts:
            assert inputs.encoder is not None
            theirs = batch.get("encoder_segment_ids"), batch.get("encoder_gate_ids")
            inputs = replace(inputs, encoder=_counted(inputs.encoder, *theirs, ctx))
        return inputs

    def extras(cfg: ModelConfig) -> Extras:
        routed = routed_stacks(cfg)
        move_biases = partial(update_router_biases, cfg, routed)
        return replace(router_losses.extras(cfg, routed), after_update=move_biases)

    return replace(
        family, spec=spec, stacks=stacks, batch_spec=batch_spec, make_layer_inputs=make_layer_inputs, extras=extras
    )


def _go_on(
    cfg: ModelConfig, params: Params, x: jax.Array, side: PyTree, inputs: LayerInputs, ctx: Context
) -> tuple[jax.Array, PyTree]:
    """Leads from one segment of a stack to the next, whose layers read the same; see `blocks.Enter`."""
    return x, side


def has_experts(one: Stack) -> list[bool]:
    """Returns whether each layer of a unit has experts; of a stack without units, whether its layers have."""
    return ["moe" in kind.stored for kind in one.kinds or (one,)]


def _routed(dense: Stack, segment: Segment) -> Stack:
    """Returns the stack of a segment, with experts in the layers that have them."""
    dense = replace(dense, depth=segment.depth, first=segment.start)
    routed = replace(dense, feed_forward=moe, stored=dense.stored | {"moe"})
    kinds = [routed if has else dense for has in segment.kinds]
    return alternate(segment.depth, kinds) if kinds[1:] else kinds[0]


def update_router_biases(
    cfg: ModelConfig, stacks: Mapping[str, Stack], params: Params, sums: Aux, ctx: Context
) -> Params:
    """Returns the parameters with every router's bias moved against the `load` of a step [L, E].

    The loss has no part in it (Wang et al. 2024, arXiv:2408.15664). Without such a bias the parameters are returned as
    they are. `stacks` are the stacks with experts.
    """
    if cfg.moe.router != "sigmoid":
        return params
    start = 0
    for name, one in stacks.items():
        routed = [i for i, has in enumerate(has_experts(one)) if has]
        end = start + one.depth * len(routed)
        loads = sums["load"][start:end].reshape(one.depth, len(routed), -1)
        start = end
        for j, i in enumerate(routed):
            path = (name, *([f"layer_{i}"] if one.kinds else []), "moe", "balance")
            load = ctx.layout.to_stage_order(loads[:, j], name)
            params = _with_leaf(params, path, partial(update_bias, counts=load, rate=cfg.moe.bias_update_rate))
    return params


def _with_leaf(tree: Params, path: Sequence[str], change: Callable[[jax.Array], jax.Array]) -> Params:
    """Returns a tree with one leaf changed."""
    first, *rest = path
    return {**tree, first: _with_leaf(tree[first], rest, change) if rest else change(tree[first])}


def _counted(inputs: LayerInputs, weights: jax.Array | None, gate_ids: jax.Array | None, ctx: Context) -> LayerInputs:
    """Returns the inputs with the tokens that the statistics of routing count, and with the ids of hard gates."""
    counted = None if weights is None else weights != 0
    gates = None if gate_ids is None else ctx.layout.slice_for_sequence_parallel(gate_ids)
    return inputs.adding(counted=counted, gate_ids=gates)


def moe_spec(cfg: ModelConfig) -> Spec:
    """Declares a router, `num_experts` MLPs, and one MLP as wide as the shared experts together."""
    D, E, F = cfg.d_model, cfg.moe.num_experts, cfg.expert_width
    down = cfg.init_std / (2 * cfg.num_layers) ** 0.5
    spec: Spec = {
        "w_up": Param((E, D, F), ("experts", "expert_embed", "mlp"), std=cfg.init_std),
        "w_down": Param((E, F, D), ("experts", "mlp", "expert_embed"), std=down, roles=("mlp_output",)),
    }
    if cfg.gated:
        spec["w_gate"] = Param((E, D, F), ("experts", "expert_embed", "mlp"), std=cfg.init_std)
    if cfg.moe.router in ("softmax", "sigmoid"):
        spec["router"] = Param((D, E), ("embed", "router"), "router", std=cfg.init_std)
    if cfg.moe.router == "sigmoid":
        spec["balance"] = Param((E,), ("router",), "vector", init="zeros")
    if cfg.moe.bias:
        spec["router_bias"] = Param((E,), ("router",), "vector", init="zeros")
        spec["b_up"] = Param((E, F), ("experts", "mlp"), "vector", init="zeros")
        spec["b_down"] = Param((E, D), ("experts", "norm"), "vector", init="zeros")
        if cfg.gated:
            spec["b_gate"] = spec["b_up"]
    if cfg.moe.shared_experts:
        spec["shared"] = mlp_spec(replace(cfg, d_ff=F * cfg.moe.shared_experts))
    if cfg.moe.shared_gate:
        spec["shared_gate"] = Param((D, 1), ("embed", "router"), std=cfg.init_std, orthogonal=False)
    return spec


def route(cfg: ModelConfig, params: Params, x: jax.Array, gate_ids: jax.Array | None) -> Routing:
    """Chooses the experts of tokens [T, D].

    Args:
      params: the group `moe` of a layer.
      x: [T, D].
      gate_ids: domain or timestep of each token [T], for hard gates.
    """
    moe = cfg.moe
    if moe.router in ("domain", "timestep"):
        if gate_ids is None:
            raise ValueError(
                f"model.moe.router={moe.router} needs the batch array `gate_ids`. Give each token's {moe.router}"
            )
        if moe.router == "domain":
            return experts.by_domain(gate_ids, moe.num_experts)
        return experts.by_timestep(gate_ids, moe.num_experts, moe.max_timestep, moe.timestep_starts)
    # A dot carries its precision to its gradients; the default would round both sides to bfloat16 on TPU, TF32 on GPU.
    logits = jnp.dot(x.astype(jnp.float32), params["router"], precision=lax.Precision.HIGHEST)
    if moe.bias:
        logits = logits + params["router_bias"]
    groups = {"groups": moe.num_groups, "top_groups": moe.top_k_groups}
    how: dict[str, Any] = {"normalize": moe.normalize, "scale": moe.routed_scale, **groups}
    if moe.router == "softmax":
        return experts.top_k_softmax(logits, moe.top_k, **how)
    return experts.sigmoid_groups(logits, params["balance"], moe.top_k, **how)


def moe(
    cfg: ModelConfig, stack: Stack, params: Params, x: jax.Array, ctx: Context, inputs: LayerInputs
) -> jax.Array:  # [B, S/n, D] -> [B, S/n, D]
    """Computes a mixture of experts (Shazeer et al. 2017, arXiv:1701.06538).

    It may have shared experts (DeepSeekMoE, arXiv:2401.06066). The router works on the layout of the residual stream,
    where each token is on one device of a tensor group. Its choices are then gathered for the tensor-parallel region,
    like the tokens.

    It keeps sums over this device's rows and counted tokens, which add up over devices and microbatches:
    `balance_loss`, `z_loss`, `dropped`, `entropy` and `load` [E], see `jaxstack.moe.metrics`.

    Args:
      params: parameters of the layer; the group `moe` is as it is stored.
      inputs: `layer` is read, and of its `arrays` `gate_ids` [B, S/n] and `counted` [B, S].
    """
    declared = stack.spec["moe"]
    replicas = None
    if ctx.placement is not None:
        assert inputs.layer is not None
        replicas = jnp.asarray(ctx.placement.replicas)[inputs.layer - stack.first]  # [E, R]
    arguments = params["moe"], x, inputs.arrays.get("gate_ids"), inputs.arrays.get("counted"), replicas
    where = declared, RESIDUAL, RESIDUAL, ("batch", "sequence"), (None, None)
    y: jax.Array = ctx.region(partial(_moe, cfg, stack), arguments, where, RESIDUAL)
    ctx.observe("moe/out", y, *RESIDUAL)
    return y


def _moe(
    cfg: ModelConfig,
    stack: Stack,
    ctx: Context,
    params: Params,
    x: jax.Array,  # [B, S/n, D]
    gate_ids: jax.Array | None,  # [B, S/n]
    counted: jax.Array | None,  # [B, S]
    replicas: jax.Array | None,  # [E, R]
) -> jax.Array:
    params = stack.prepare(ctx.layout.gather_params(stack.spec["moe"], params))
    rows = x.shape[0]
    between = ctx.layout.sequence_parallel_axes
    routing = route(cfg, params, x.reshape(-1, x.shape[-1]), None if gate_ids is None else gate_ids.reshape(-1))
    mask = None if counted is None else ctx.layout.slice_for_sequence_parallel(counted).reshape(-1)
    sums: Aux = {
        "balance_loss": experts.balance_loss(routing, rows, ctx.layout.axes("residual"), mask),
        "z_loss": experts.z_loss(routing, mask),
        "entropy": experts.entropy_sum(routing, mask),
        "load": experts.load(routing, mask),
    }
    for name, value in sums.items():
        ctx.keep(name, collectives.all_reduce(value, between))
    if routing.logits is not None:  # a hard gate has no scores
        counts = jnp.float32(x.shape[0] * x.shape[1]) if mask is None else mask.sum(dtype=jnp.float32)
        ctx.observe("moe/router_entropy", Mean(sums["entropy"], counts), *RESIDUAL)
    h = ctx.layout.gather_activations(x, "mlp")  # [B, S, D]
    tokens = h.shape[0] * h.shape[1]

    def gather_choices(a: jax.Array) -> jax.Array:
        return collectives.gather(a.reshape(*x.shape[:2], -1), between, 1).reshape(tokens, -1)

    gathered = Routing(*jax.tree.map(gather_choices, routing))
    if replicas is not None:
        device = collectives.index(ctx.layout.axes("experts"))
        gathered = gathered._replace(experts=experts.choose_replicas(gathered.experts, replicas, device))
    matrices: Params = {name: params[name] for name in EXPERT_WEIGHTS if name in params}
    if cfg.moe.bias:  # each device of a tensor group adds its share of the last one
        matrices["b_down"] = matrices["b_down"] / collectives.count(ctx.layout.axes("mlp"))
    adapted = {name: w for name, w in matrices.items() if isinstance(w, Adapted)}
    y, dropped = experts.moe_mlp(
        h.reshape(tokens, -1),
        gathered,
        matrices | {name: w.w for name, w in adapted.items()},
        _options(cfg, ctx, rows),
        mask=None if counted is None else counted.reshape(-1),
        adapters={name: (w.a, w.b) for name, w in adapted.items()},
    )
    y = y.reshape(h.shape)
    # All devices of a tensor group have gathered the same tokens and dropped the same pairs.
    ctx.keep("dropped", collectives.all_reduce(dropped, between) / collectives.count(between))
    if cfg.moe.shared_experts:
        shared = mlp_products(cfg, params["shared"], h, ctx)
        if cfg.moe.shared_gate:
            shared = shared * jax.nn.sigmoid(h @ params["shared_gate"])
        y = y + shared
    return ctx.layout.reduce_activations(y, "mlp")


def _options(cfg: ModelConfig, ctx: Context, rows: int) -> experts.MoEOptions:
    """Returns the static settings of the experts for `rows` sequences on this device."""
    expert_axes = ctx.layout.axes("experts")
    placement = ctx.placement
    limit = cfg.moe.swiglu_limit
    # A capacity is a multiple of the even share of an expert, not of a replica.
    assert placement is None or cfg.moe.capacity_factor is None
    return experts.MoEOptions(
        num_experts=cfg.moe.num_experts if placement is None else placement.stored.shape[1],
        activation=(lambda a: activate(cfg.activation, a, ctx)) if limit is None else partial(clamped_gate, limit),
        of_up=(lambda a: a) if limit is None else partial(clamped_up, limit),
        expert_axis=expert_axes[0] if expert_axes else None,
        capacity_factor=cfg.moe.capacity_factor,
        rows=rows,
        implementation=ctx.ops.moe,
        room=cfg.moe.room,
    )


def clamped_gate(limit: float, gate: jax.Array) -> jax.Array:
    """Returns gate * sigmoid(1.702 * gate), where the gate is at most `limit` (gpt-oss)."""
    gate = jnp.minimum(gate, limit)
    return gate * jax.nn.sigmoid(1.702 * gate)


def clamped_up(limit: float, up: jax.Array) -> jax.Array:
    """Returns what the activated gate is multiplied by: 1 + up, where up is between -limit and limit (gpt-oss)."""
    return 1 + jnp.clip(up, -limit, limit)


def matrix_sizes(model: ModelConfig, tensor_shards: int) -> tuple[int, ...]:
    """Returns the inputs and outputs of the matrices of an expert on one device; nothing for a dense model."""
    if not model.moe.num_experts:
        return ()
    names = ("moe/w_up", "moe/w_gate", "moe/w_down")
    adapted = any(re.fullmatch(pattern, name) for pattern in model.lora.targets for name in names)
    of_adapters = (model.lora.rank,) if model.lora.rank and adapted else ()
    of_biases = (1,) if model.moe.bias else ()
    return model.d_model, model.expert_width // tensor_shards, *of_adapters, *of_biases
