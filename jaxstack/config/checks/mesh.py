"""Checks of the mesh: what its axes divide, and what its methods allow."""

import math

from jaxstack.common.counts import plural
from jaxstack.config.bounds import require
from jaxstack.config.groups import Groups
from jaxstack.config.parallel import sequence_parts
from jaxstack.config.scheme import Scheme


def check_mesh(cfg: Groups) -> None:
    """Checks that the mesh divides batch, model and sequences, and that its methods can compute the run.

    Raises:
      ConfigError: an axis does not divide a size, or a method cannot be used.
    """
    _check_batch(cfg)
    _check_model(cfg)
    _check_products(cfg)
    _check_schedule(cfg)
    _check_sequence(cfg)


def _check_batch(cfg: Groups) -> None:
    batch = cfg.microbatch_size
    for axis in ("data", "fsdp", "expert"):
        size = cfg.mesh.known_sizes[axis]
        require(
            batch % size == 0,
            f"mesh.{axis}={size} does not divide the {plural(batch, 'sequence')} of a microbatch "
            f"(data.batch_size={cfg.data.batch_size} / train.grad_accum={cfg.train.grad_accum}). Use a divisor.",
        )


def _check_model(cfg: Groups) -> None:
    mesh = cfg.mesh
    model = cfg.model
    sizes = cfg.mesh.known_sizes
    split = {"num_heads": model.num_heads, "num_kv_heads": model.kv_heads} if model.attends else {}
    if model.ssm.layers:
        split |= {"ssm.heads": model.ssm.heads}
        split |= {"ssm.groups": model.ssm.groups} if model.ssm.groups > 1 else {}
    if model.moe.num_experts:
        split["moe.d_ff"] = model.expert_width
    elif model.ssm.mlp:
        split["d_ff"] = model.ff_width
    for key, size in split.items():
        require(
            size % sizes["tensor"] == 0,
            f"mesh.tensor={mesh.tensor} does not divide model.{key}={size}. Use a divisor.",
        )
    require(
        model.moe.num_experts % sizes["expert"] == 0,
        f"mesh.expert={mesh.expert} does not divide model.moe.num_experts={model.moe.num_experts}. Use a divisor.",
    )
    shards = sizes["fsdp"] * sizes["expert"]
    require(
        model.d_model % shards == 0,
        f"mesh.fsdp={mesh.fsdp} x mesh.expert={mesh.expert} does not divide model.d_model={model.d_model}, which both "
        f"split. Make the product {math.gcd(shards, model.d_model)}, or model.d_model a multiple of {shards}.",
    )
    parts = sizes["pipe"] * shards
    has_tokens = model.family not in ("diffusion", "contrastive")
    require(
        sizes["pipe"] == 1 or model.tied_embeddings or not has_tokens or model.d_model % parts == 0,
        f"mesh.pipe={mesh.pipe} x mesh.fsdp={mesh.fsdp} x mesh.expert={mesh.expert} does not divide "
        f"model.d_model={model.d_model}, by which the embedding is split. Make the product "
        f"{math.gcd(parts, model.d_model)}, or model.d_model a multiple of {parts}.",
    )
    require(
        mesh.context == 1 or model.moe.num_experts == 0 or model.moe.capacity_factor is None,
        f"model.moe.capacity_factor={model.moe.capacity_factor} counts tokens of whole sequences, but "
        f"mesh.context={mesh.context} splits sequences. Use capacity_factor=null (dropless), or mesh.context=1.",
    )


def _check_schedule(cfg: Groups) -> None:
    """Requires attention that a stage can compute while the others do something else, which `zb_h1` asks of it.

    A ring of XLA:CPU waits for all devices of the mesh, not only for its own, so that the step would never end. Other
    platforms are refused too, so that a configuration means the same on each.
    """
    mesh = cfg.mesh
    require(
        cfg.pipeline.schedule != "zb_h1" or 1 in (mesh.pipe, mesh.context) or mesh.context_method != "ring",
        f"mesh.context={mesh.context} with mesh.context_method=ring needs all stages at once, but "
        f"pipeline.schedule=zb_h1 lets them do different work. Use mesh.context_method=all_gather, or "
        f"pipeline.schedule=zb1.",
    )


def _check_sequence(cfg: Groups) -> None:
    mesh = cfg.mesh
    if mesh.open_axis in ("context", "tensor"):
        return
    parts = sequence_parts(mesh)
    targets = cfg.data.target_length if cfg.model.family == "encoder_decoder" or cfg.model.reads_captions else 0
    require(
        targets % parts == 0,
        f"data.target_len={targets} cannot be split into {plural(parts, 'equal part')}, as "
        f"mesh.context={mesh.context} and mesh.tensor={mesh.tensor} require. Use "
        f"--data.target_len={-(-targets // parts) * parts}.",
    )
    require(
        cfg.data.seq_len % parts == 0,
        f"data.seq_len={cfg.data.seq_len} cannot be split into {plural(parts, 'equal part')}, as "
        f"mesh.context={mesh.context} and mesh.tensor={mesh.tensor} with "
        f"mesh.sequence_parallel={str(mesh.sequence_parallel).lower()} require. Use a multiple of {parts}.",
    )


def _check_products(cfg: Groups) -> None:
    """Checks that products in few bits fit the mesh, and inputs the codes of weights.

    Raises:
      ConfigError: they do not.
    """
    kernels = cfg.kernels
    require(
        kernels.decode_group is None or kernels.decode_weights != "float",
        f"kernels.decode_group={kernels.decode_group} is for codes, and kernels.decode_weights is float. Use "
        f"decode_weights=int4, or decode_group=null.",
    )
    require(
        cfg.train.quant != "int8" or kernels.decode_scheme in (None, Scheme(8)),
        f"kernels.decode_weights={kernels.decode_weights} with kernels.decode_group={kernels.decode_group} cannot be "
        f"multiplied with inputs of train.quant=int8. Use int8 and null, or decode_weights=float.",
    )
    require(
        cfg.mesh.partitioner == "manual" or cfg.train.quant == "none",
        f"train.quant={cfg.train.quant} would sum gradients over devices in train.dtype with mesh.partitioner=auto. "
        f"Use mesh.partitioner=manual, or train.quant=none.",
    )
