"""Loads a run in Python: `jaxstack.load("runs/quickstart")`. JAX is imported after its devices were chosen."""

import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jaxstack.config import Config, ConfigError, MeshConfig
from jaxstack.config.reading import parse
from jaxstack.data import Tokenizer
from jaxstack.data.tokenizers import HFTokenizer, read_saved_tokenizer
from jaxstack.runtime import compile_cache, platform

if TYPE_CHECKING:  # JAX must start after `platform.configure`
    from jaxstack.loaded.trained_run import TrainedRun
    from jaxstack.moe.placement import Placement


def load(
    path: str | Path,
    *,
    mesh: Mapping[str, int] | MeshConfig | None = None,
    step: int | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    placement: str | Path | None = None,
) -> "TrainedRun":
    """Loads the model of a run, to generate text, compute logits or evaluate it.

    Args:
      path: run directory, of `jaxstack train` or `jaxstack import`.
      mesh: sizes of mesh axes, with the names of the configuration: `{"data": 2, "tensor": 2}`. An axis that is not
        given has size 1, and `None` means one device.
      step: step of the checkpoint. `None` means the newest valid one.
      dtype: dtype of the computation. `None` means `train.dtype` of the run.
      placement: file that says which experts each device stores, from `jaxstack plan experts`. `None` means equal
        parts.

    Raises:
      ConfigError: the folder is not a run, its checkpoint is damaged, the mesh does not fit the model or the devices,
        or the placement does not fit model or mesh.
    """
    if not isinstance(mesh, MeshConfig):
        unknown = sorted((mesh or {}).keys() - {field.name for field in fields(MeshConfig)})
        if unknown:
            raise ConfigError(f"the mesh has no axis {unknown[0]}. Use {', '.join(MeshConfig().sizes)}.")
        mesh = replace(MeshConfig(data=1), **(mesh or {}))  # type: ignore[arg-type]
    path = Path(path).expanduser()
    cfg, tokenizer = read_run(path)
    if dtype is not None and dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype={dtype} is unknown. Use float32, bfloat16 or float16.")
    cfg = replace(cfg, train=replace(cfg.train, dtype=dtype or cfg.train.dtype))
    return open_run(path, cfg, tokenizer, mesh, step, placement=placement)


def read_run(path: Path) -> tuple[Config, Tokenizer]:
    """Returns the configuration and the tokenizer of a run directory.

    Raises:
      ConfigError: the folder is not a run directory.
    """
    if not (path / "config.yaml").is_file():
        advice = "Name the run.dir of a training run."
        if (path / "config.json").is_file():
            advice = f"It is a Hugging Face folder: make a run of it with `jaxstack import {path} RUN`."
        raise ConfigError(f"{path} is not a run directory: it has no config.yaml. {advice}")
    if not (path / "tokenizer.json").is_file():
        raise ConfigError(
            f"{path} has no tokenizer.json: it was lost, or the run was imported without a tokenizer and has not "
            f"trained. Restore the file, train the run, or import it again with --data.tokenizer=FILE."
        )
    cfg = parse.parse_config([f"--config={path / 'config.yaml'}"])
    tokenizer = read_saved_tokenizer(path)
    if isinstance(tokenizer, HFTokenizer) and not cfg.data.special_tokens:
        tokenizer = tokenizer.without_special_tokens()
    return cfg, tokenizer


def open_run(
    path: Path,
    cfg: Config,
    tokenizer: Tokenizer,
    mesh: MeshConfig,
    step: int | None,
    rows: int | None = None,
    check: Callable[[Config, "Placement | None"], None] = lambda cfg, placement: None,
    placement: str | Path | None = None,
) -> "TrainedRun":
    """Starts JAX with the devices of a mesh, and reads the parameters of a run.

    Args:
      path: run directory.
      cfg: configuration of the run. Its dtype and the group `sample` may have been changed.
      step: step of the checkpoint. `None` means the newest valid one.
      rows: number of texts that are processed at once; it limits the size of an open axis. `None` means the rows of a
        microbatch of the run.
      check: receives the configuration on the mesh and the placement once JAX has its devices, before anything is
        read.
      placement: file that says where the experts are stored. `None` means equal parts.

    Raises:
      ConfigError: see `load`.
    """
    cfg = _on_mesh(cfg, mesh, rows)
    if "jax" not in sys.modules:
        platform.configure(cfg.mesh, cfg.microbatch_size)
        compile_cache.configure()
    elif not {"JAX_NUM_CPU_DEVICES", "XLA_FLAGS"} & os.environ.keys():
        _add_cpu_devices(platform.cpu_devices(cfg.mesh, cfg.microbatch_size))

    from jaxstack.loaded import replicas
    from jaxstack.loaded.trained_run import TrainedRun

    if placement is None:
        check(cfg, None)
        return TrainedRun.open(path, cfg, tokenizer, step)
    file = Path(placement)
    stored = replicas.read(file, cfg.model, cfg.mesh)
    check(cfg, stored)
    return replicas.place(TrainedRun.open(path, cfg, tokenizer, step), file, stored)


def _on_mesh(cfg: Config, mesh: MeshConfig, rows: int | None) -> Config:
    """Returns the configuration on another mesh, with a larger batch if the mesh does not divide the run's."""
    shards = math.prod(mesh.known_sizes[axis] for axis in ("data", "fsdp", "expert"))
    data = cfg.data
    train = cfg.train
    if rows is not None or cfg.microbatch_size % shards:
        longest = (data.seq_len,) if data.buckets else ()  # other lengths may not divide another batch
        data = replace(data, buckets=longest, batch_size=-(-(rows or data.batch_size) // shards) * shards)
        train = replace(train, grad_accum=1)
    # Measuring costs would take longer than what even stages lose.
    pipeline = replace(cfg.pipeline, partition="even", microbatches=None if rows else cfg.pipeline.microbatches)
    return replace(cfg, mesh=mesh, data=data, train=train, pipeline=pipeline)


def _add_cpu_devices(count: int) -> None:
    """Asks JAX, which was imported before, for this many CPU devices. If it has started, it keeps those that it has."""
    import jax

    if count > 1:
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:
            return
