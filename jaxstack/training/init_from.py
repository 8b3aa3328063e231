"""What a run begins with: the parameters of another run, or of a Hugging Face folder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxstack import hf
from jaxstack.checkpoint import manifest, run_dir, store, verify
from jaxstack.config import Config, ConfigError, parse
from jaxstack.hf.pretrained import PretrainedFolder
from jaxstack.models import family, lora, params, surgery
from jaxstack.models.context import Context
from jaxstack.training.checkpoint_layout import checkpoint_layout
from jaxstack.training.state import TrainState, abstract_state, make_state


def find(name: str, key: str) -> Config | PretrainedFolder:
    """The run, as its configuration with `run.dir` where it lies, or the folder. A run that has not reached a
    checkpoint holds what it begins with, its own `run.init_from`.

    Args:
      name: of the directory.
      key: what names it, for errors.

    Raises:
      ConfigError: it is neither, or holds no parameters.
    """
    seen: list[Path] = []
    while True:
        path = Path(name)
        if path in seen:
            raise ConfigError(f"{key}={seen[0]} begins with itself; name what holds parameters")
        seen.append(path)
        if not (path / "config.yaml").exists():
            if (path / "config.json").exists():
                return PretrainedFolder(path)
            raise ConfigError(
                f"{key}={path} is no run directory: it holds no config.yaml; nor a Hugging Face folder: no config.json"
            )
        run = parse.parse_config([f"--config={path / 'config.yaml'}"], path)
        if manifest.steps(run_dir.checkpoints(path)):
            return replace(run, run=replace(run.run, dir=str(path)))
        if run.run.init_from is None:
            raise ConfigError(f"{key}={path} holds no checkpoint; let that run reach one")
        name = run.run.init_from


def restore(run: Config, ctx: Context, number: int | None = None) -> Any:
    """The parameters of a run after a step, by default of its newest whole checkpoint, as its model lies on this mesh;
    adapters are merged, so that they are those of `run.model.base`.

    The optimizer's state is not read, unless a pipeline stores its layers in another order, which moves all at once.

    Raises:
      ConfigError: no such checkpoint, or one that is damaged.
    """
    saved = run_dir.checkpoints(Path(run.run.dir))
    layout = checkpoint_layout(run, ctx, abstract_state(run, ctx))
    wanted = layout.abstract
    if ctx.pipeline is None or ctx.pipeline.stages.is_layer_order:
        wanted = replace(wanted, opt_state=jax.tree.map(lambda _: ..., wanted.opt_state))
    if number is None:
        number = verify.latest_valid_step(saved, wanted)
    elif number not in manifest.steps(saved):
        raise ConfigError(f"{saved} holds no step {number}; its steps are {sorted(manifest.steps(saved))}")
    elif why := verify.corruption(saved, number, wanted):
        raise ConfigError(f"step {number} in {saved} must not be used: {why}")
    values = layout.unpack(store.restore(saved, number, wanted)).params
    if not run.model.lora.rank:
        return values
    shardings = jax.tree.map(ctx.sharding, ctx.parameters(family.spec(run.model.base)))
    merge = lambda adapters, base: lora.merge_adapters(run.model.lora, params.combine(adapters, base))  # noqa: E731
    return jax.jit(merge, out_shardings=shardings, donate_argnums=1)(*params.partition(family.spec(run.model), values))


def start_from(cfg: Config, ctx: Context, abstract: TrainState) -> TrainState:
    """The first state of a run that begins with the parameters of another run or a Hugging Face folder,
    `run.init_from`.

    Where this run has experts and the other has none, the other is up-cycled. Adapters of the other are merged, and
    those of this run begin anew.

    Raises:
      ConfigError: neither is there, no checkpoint in the run, or another model.
    """
    name = cfg.run.init_from
    source = find(str(name), "run.init_from")
    there, here = source.model.base, cfg.model.base
    grows = bool(cfg.model.moe.num_experts and not there.moe.num_experts)
    if different := hf.model_differences(replace(there, moe=here.moe) if grows else there, here):
        raise ConfigError(
            f"run.init_from={name} holds another model ({'; '.join(different[:3])}); give this run the model keys of "
            f"its config.yaml, which `jaxstack import` writes for a Hugging Face folder"
        )
    if isinstance(source, PretrainedFolder):
        with source:
            values = source.read_params(ctx)
    else:
        values = restore(source, ctx)
    if grows:
        key = jax.random.key(cfg.run.seed)
        shardings = jax.tree.map(ctx.sharding, ctx.parameters(family.spec(here)))
        grow = jax.jit(lambda values: surgery.upcycle(there, values, cfg.model.moe, key)[1], out_shardings=shardings)
        values = grow(values)
    state = make_state(cfg, ctx, abstract)
    adapters = params.partition(family.spec(cfg.model), state.params)[0] if cfg.model.lora.rank else {}
    return replace(state, params=params.combine(adapters, values))
