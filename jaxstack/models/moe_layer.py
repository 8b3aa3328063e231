"""The mixture-of-experts layer of a block: its declarations, its router, and its place in a tensor-parallel region.

Suffixes: B batch, S sequence, T tokens, D width, E experts.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack import moe as experts
from jaxstack.config import ModelConfig
from jaxstack.models import lora, watch
from jaxstack.models.context import Context
from jaxstack.models.layers import Aux, LayerInputs, activate, mlp_products, mlp_spec
from jaxstack.models.params import Param, Params, Spec
from jaxstack.moe import Routing
from jaxstack.sharding import collectives


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
    if cfg.moe.shared_experts:
        spec["shared"] = mlp_spec(replace(cfg, d_ff=F * cfg.moe.shared_experts))
    return spec


def route(cfg: ModelConfig, params: Params, x: jax.Array, gate_ids: jax.Array | None) -> Routing:
    """Chooses the experts of tokens [T, D].

    Args:
      cfg: the model.
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
    if moe.router == "softmax":
        return experts.top_k_softmax(logits, moe.top_k, normalize=moe.normalize)
    return experts.sigmoid_groups(
        logits, params["balance"], moe.top_k, groups=moe.num_groups, top_groups=moe.top_k_groups, scale=moe.routed_scale
    )


def moe(
    cfg: ModelConfig, params: Params, x: jax.Array, ctx: Context, layer_inputs: LayerInputs
) -> tuple[jax.Array, Aux]:
    """Computes a mixture of experts (Shazeer et al. 2017, arXiv:1701.06538).

    It may have shared experts (DeepSeekMoE, arXiv:2401.06066). The router works on the layout of the residual stream,
    where each token is on one device of a tensor group. Its choices are then gathered for the tensor-parallel region,
    like the tokens.

    Args:
      cfg: the model.
      params: the group `moe` of a layer, as it is stored.
      x: [B, S/n, D].
      ctx: execution context.
      layer_inputs: `gate_ids`, `counted` and `replicas` are read.

    Returns:
      [B, S/n, D], and sums over this device's rows and counted tokens, which add up over devices and microbatches:
      `balance_loss`, `z_loss`, `dropped`, `entropy` and `load` [E], see `jaxstack.moe.metrics`. What is watched.
    """
    spec = lora.with_adapters_of(params, moe_spec(cfg), cfg.lora.rank)
    arguments = params, x, layer_inputs.gate_ids, layer_inputs.counted, layer_inputs.replicas
    residual = ("batch", "residual")
    where = (spec, residual, residual, ("batch", "sequence"), (None, None))
    y, aux = ctx.region(partial(_moe, cfg, spec), arguments, where, residual)
    return y, aux | watch.measure(ctx, {"moe/out": y}, *residual)


def _moe(
    cfg: ModelConfig,
    spec: Spec,
    ctx: Context,
    params: Params,
    x: jax.Array,
    gate_ids: jax.Array | None,
    counted: jax.Array | None,
    replicas: jax.Array | None,
) -> tuple[jax.Array, Aux]:
    params = ctx.layout.gather_params(spec, params)
    rows, between = x.shape[0], ctx.layout.sequence_parallel_axes
    routing = route(cfg, params, x.reshape(-1, x.shape[-1]), None if gate_ids is None else gate_ids.reshape(-1))
    mask = None if counted is None else ctx.layout.slice_for_sequence_parallel(counted).reshape(-1)
    aux = {
        "balance_loss": experts.balance_loss(routing, rows, ctx.layout.axes("residual"), mask),
        "z_loss": experts.z_loss(routing, mask),
        "entropy": experts.entropy_sum(routing, mask),
        "load": experts.load(routing, mask),
    }
    counts = x.shape[0] * x.shape[1] if mask is None else mask
    watched: Aux = {}
    if routing.logits is not None:  # a hard gate has no scores
        watched = watch.measure_mean(ctx, "moe/router_entropy", aux["entropy"], counts, "batch", "residual")
    aux = {name: collectives.all_reduce(value, between) for name, value in aux.items()} | watched
    h = ctx.layout.gather_activations(x, "mlp")
    tokens = h.shape[0] * h.shape[1]

    def gather_choices(a: jax.Array) -> jax.Array:
        return collectives.gather(a.reshape(*x.shape[:2], -1), between, 1).reshape(tokens, -1)

    gathered = Routing(*jax.tree.map(gather_choices, routing))
    if replicas is not None:
        device = collectives.index(ctx.layout.axes("experts"))
        gathered = gathered._replace(experts=experts.choose_replicas(gathered.experts, replicas, device))
    y, dropped = experts.moe_mlp(
        h.reshape(tokens, -1),
        gathered,
        {name: params[name] for name in ("w_up", "w_gate", "w_down") if name in params},
        _options(cfg, ctx, rows),
        mask=None if counted is None else counted.reshape(-1),
        adapters={
            f"w_{name}": found for name in ("up", "gate", "down") if (found := lora.get_adapter(cfg.lora, params, name))
        },
    )
    y = y.reshape(h.shape)
    # All devices of a tensor group have gathered the same tokens and dropped the same pairs.
    aux["dropped"] = collectives.all_reduce(dropped, between) / collectives.count(between)
    if cfg.moe.shared_experts:
        y = y + mlp_products(cfg, params["shared"], h, ctx)[0]
    return ctx.layout.reduce_activations(y, "mlp"), aux


def _options(cfg: ModelConfig, ctx: Context, rows: int) -> experts.MoEOptions:
    """Returns the static settings of the experts for `rows` sequences on this device."""
    expert_axes, placement = ctx.layout.axes("experts"), ctx.placement
    # A capacity is a multiple of the even share of an expert, not of a replica.
    assert placement is None or cfg.moe.capacity_factor is None
    return experts.MoEOptions(
        num_experts=cfg.moe.num_experts if placement is None else placement.stored.shape[1],
        activation=lambda a: activate(cfg.activation, a, ctx),
        expert_axis=expert_axes[0] if expert_axes else None,
        capacity_factor=cfg.moe.capacity_factor,
        rows=rows,
        implementation=ctx.ops.moe,
    )
