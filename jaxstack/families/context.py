"""The execution context of a run: its layout on a mesh, and the kernels that fit configuration and platform."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxstack import families
from jaxstack.config import Config, KernelsConfig, MeshConfig, ModelConfig, PipelineConfig, TrainConfig
from jaxstack.config.bounds import require
from jaxstack.config.checks.buckets import require_lengths
from jaxstack.features import experts, host_residuals
from jaxstack.kernels import implementation
from jaxstack.kernels.cross_entropy import CHUNK_TOKENS
from jaxstack.models.context import Context
from jaxstack.models.layout import Layout
from jaxstack.models.ops import OPS, Ops, implementations, op_cases
from jaxstack.pipeline import Program, resolve
from jaxstack.sharding import BATCH_AXES, transformer

MAX_UNROLLED_LAYERS = 48
"""Layers up to which `kernels.layers=auto` unrolls. The time to compile grows with every layer."""


def make_context(cfg: Config, mesh: Mesh | AbstractMesh, platform: str | None = None) -> Context:
    """Builds the context of a run on a mesh.

    The configuration names the kernels, or they fit the platform. Without a platform, every op has its default.

    Args:
      cfg: the run, resolved.
      platform: `cpu`, `gpu` or `tpu`. `None` means the platform of the mesh's devices, if they exist.

    Raises:
      ConfigError: a pipeline or buckets that do not fit model, batch or mesh, or a kernel that cannot run.
    """
    device = None if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0]
    if platform is None and device is not None:
        platform = implementation.platform_of(device)
    pipeline = pipeline_program(cfg.model, cfg.pipeline, cfg.data.batch_size, cfg.train.grad_accum, mesh, platform)
    require_lengths(cfg, replace(cfg.mesh, **mesh.shape), 1 if pipeline is None else pipeline.schedule.microbatches)
    layout = make_layout(cfg.mesh, mesh, pipeline, cfg.pipeline.gather, jnp.dtype(cfg.train.reduce_dtype))
    segments = cfg.has_segments, cfg.data.known_documents
    ops = make_ops(cfg.model, cfg.kernels, cfg.train, *segments, layout, platform, device)
    ctx = Context(layout, ops, dtype=jnp.dtype(cfg.train.dtype), remat=cfg.train.remat)
    return replace(ctx, checkpoint=host_residuals.checkpoint) if cfg.train.offloads_residuals else ctx


def make_layout(
    keys: MeshConfig, mesh: Mesh | AbstractMesh, pipeline: Program | None, gather: str, reduce_dtype: jnp.dtype
) -> Layout:
    """Builds the layout of a run on a mesh.

    Args:
      keys: the group `mesh` of the configuration: rules, partitioner, context method and ZeRO are read.
      pipeline: the program of the stages. `None` means one stage.
      gather: when stages gather weights, `pipeline.gather`.
      reduce_dtype: dtype in which gradients are summed over devices.
    """
    return Layout(
        mesh=mesh,  # type: ignore[arg-type]
        pipeline=pipeline,
        rules=transformer(keys),
        partitioner=keys.partitioner if mesh.size > 1 else "manual",
        gather=gather if mesh.shape["pipe"] > 1 else "once",  # type: ignore[arg-type]
        context_method=keys.context_method,
        reduce_dtype=reduce_dtype,
        zero=keys.zero,
    )


def make_ops(
    model: ModelConfig,
    kernels: KernelsConfig,
    train: TrainConfig,
    segments: bool,
    max_documents: int | None,
    layout: Layout,
    platform: str | None,
    device: jax.Device | None,
) -> Ops:
    """Selects the kernels of a run.

    Args:
      model: the model.
      kernels: implementations that the user has named, or `auto`.
      train: `dtype`, `quant`, `grad_accum`, `remat` and `offload` are read.
      segments: whether batches have segment ids.
      max_documents: largest number of segments in a row. `None` means that it is not known.
      layout: layout of the arrays.
      platform: `cpu`, `gpu` or `tpu`. `None` means that it is not known: every op has its default.
      device: one of the devices, whose generation some kernels depend on. `None` means that it is not known.

    Raises:
      ConfigError: a kernel that cannot run.
    """
    require(
        platform != "tpu" or train.dtype != "float16",
        "train.dtype=float16 is for GPUs, and this is a TPU, which multiplies bfloat16. Use train.dtype=bfloat16.",
    )
    codes = kernels.decode_scheme
    ops = Ops(quant=train.quant, decode_weights=codes, max_documents=max_documents)
    if platform is None:
        return ops
    mesh = layout.mesh
    assert mesh is not None
    known = {"dtype": jnp.dtype(train.dtype), "compute_capability": getattr(device, "compute_capability", None)}
    cases = op_cases(model, layout, codes, segments, max_documents)
    cases["moe"] = {"widths": experts.matrix_sizes(model, mesh.shape["tensor"])}
    chosen = implementations(platform, kernels, {op: known | dict(cases.get(op, {})) for op in OPS})
    # The loops over tiles of rows in each layer of experts take minutes to compile.
    tile_loops = model.moe.num_experts and chosen["moe"] == "grouped"
    too_long = tile_loops or model.num_layers > MAX_UNROLLED_LAYERS
    if platform == "gpu":
        # With FSDP alone, unrolled layers pay (benchmarks/results/fsdp_layers.json). If everything is recomputed they
        # save 2% of the time, and XLA's scheduler keeps what is recomputed: 40% more memory. In a loop of microbatches
        # they take more memory, too. With another axis, it has not been shown that they pay.
        others = any(mesh.shape[axis] > 1 for axis in ("pipe", "expert", "context", "tensor"))
        loops = others or train.grad_accum > 1 or train.remat == "full"
        looped = {
            "layers": too_long or (layout.gathers_params and loops) or train.offloads_residuals,
            # An unrolled token keeps the weights of all layers, which FSDP has no room for.
            "decode": (too_long or layout.gathers_params) and not (codes is not None and mesh.size == 1),
        }
        chosen |= {op: "scan" for op, wanted in looped.items() if wanted and getattr(kernels, op) == "auto"}
    return replace(ops, platform=platform, loss_chunk=CHUNK_TOKENS[platform], **chosen)


def pipeline_program(
    model: ModelConfig,
    pipeline: PipelineConfig,
    batch_size: int,
    grad_accum: int,
    mesh: Mesh | AbstractMesh,
    platform: str | None,
) -> Program | None:
    """Returns the program of a model's stages on a mesh, or `None` if there is one stage.

    Raises:
      ScheduleError: see `pipeline.resolve`.
    """
    stages = mesh.shape["pipe"]
    if stages == 1:
        return None
    replicas = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    static = {"auto": platform == "gpu", "static": True, "dynamic": False}[pipeline.loops]
    stacks = {name: (stack.depth, stack.period) for name, stack in families.of(model).stacks(model).items()}
    return resolve(pipeline, model, stages, batch_size, grad_accum, replicas, static, stacks)
