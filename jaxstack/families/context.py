"""The execution context of a run: its layout on a mesh, and the kernels that fit configuration and platform."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxstack import families
from jaxstack.config import Config
from jaxstack.config.checks.buckets import require_lengths
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

    Kernels are as the configuration says, or fit the platform. Without one, every op has its default.

    Args:
      cfg: the run, resolved.
      mesh: its devices.
      platform: `cpu`, `gpu` or `tpu`. `None` means the platform of the mesh's devices.

    Raises:
      ConfigError: a pipeline or buckets that do not fit model, batch or mesh, or a kernel that cannot run.
    """
    device = None if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0]
    if platform is None and device is not None:
        platform = implementation.platform_of(device)
    layout = make_layout(cfg, mesh, platform)
    dtype = jnp.dtype(cfg.train.dtype)
    ops = make_ops(cfg, layout, dtype, platform, device)
    return Context(layout, ops, dtype=dtype, remat=cfg.train.remat)


def make_layout(cfg: Config, mesh: Mesh | AbstractMesh, platform: str | None) -> Layout:
    """Builds the layout of a run on a mesh. The platform decides whether a pipeline's loops have static trip counts.

    Raises:
      ConfigError: a pipeline or buckets that do not fit model, batch or mesh.
    """
    pipeline = pipeline_program(cfg, mesh, platform)
    microbatches = 1 if pipeline is None else pipeline.schedule.microbatches
    require_lengths(cfg, replace(cfg.mesh, **mesh.shape), microbatches)
    return Layout(
        mesh=mesh,  # type: ignore[arg-type]
        pipeline=pipeline,
        rules=transformer(cfg.mesh),
        partitioner=cfg.mesh.partitioner if mesh.size > 1 else "manual",
        gather=cfg.pipeline.gather if mesh.shape["pipe"] > 1 else "once",
        context_method=cfg.mesh.context_method,
        reduce_dtype=jnp.dtype(cfg.train.reduce_dtype),
    )


def make_ops(cfg: Config, layout: Layout, dtype: jnp.dtype, platform: str | None, device: jax.Device | None) -> Ops:
    """Selects the kernels of a run.

    Args:
      cfg: the run, resolved.
      layout: of its arrays.
      dtype: of activations.
      platform: `cpu`, `gpu` or `tpu`. `None` means that it is not known: every op has its default.
      device: one of the devices, whose generation some kernels depend on. `None` means that it is not known.

    Raises:
      ConfigError: a kernel that cannot run.
    """
    codes = cfg.kernels.decode_scheme
    ops = Ops(quant=cfg.train.quant, decode_weights=codes)
    if platform is None:
        return ops
    mesh = layout.mesh
    assert mesh is not None
    known = {"dtype": dtype, "compute_capability": getattr(device, "compute_capability", None)}
    cases = op_cases(cfg, mesh, layout.partitioner, layout.reduce_dtype)
    chosen = implementations(platform, cfg.kernels, {op: known | dict(cases.get(op, {})) for op in OPS})
    # Without a loop, XLA gathers the weights of a layer before those of the layer before it are freed. The loops
    # over tiles of rows in each layer of experts take minutes to compile.
    tile_loops = cfg.model.moe.num_experts and chosen["moe"] == "grouped"
    loops_save = layout.gathers_params or tile_loops or cfg.model.num_layers > MAX_UNROLLED_LAYERS
    if platform == "gpu" and loops_save:
        looped = ("layers",) if codes is not None and mesh.size == 1 else ("layers", "decode")
        chosen |= {op: "scan" for op in looped if getattr(cfg.kernels, op) == "auto"}
    return replace(ops, platform=platform, loss_chunk=CHUNK_TOKENS[platform], **chosen)


def pipeline_program(cfg: Config, mesh: Mesh | AbstractMesh, platform: str | None) -> Program | None:
    """Returns the program of a run's stages on a mesh, or `None` if there is one stage.

    Raises:
      ScheduleError: see `pipeline.resolve`.
    """
    stages = mesh.shape["pipe"]
    if stages == 1:
        return None
    replicas = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    sequences = cfg.data.batch_size // cfg.train.grad_accum // replicas
    static = {"auto": platform == "gpu", "static": True, "dynamic": False}[cfg.pipeline.loops]
    stacks = {name: (stack.depth, stack.period) for name, stack in families.of(cfg.model).stacks(cfg.model).items()}
    return resolve(cfg, stages, sequences, static, stacks)
