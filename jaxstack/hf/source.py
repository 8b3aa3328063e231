"""What holds parameters by its name: a run with a checkpoint, or a Hugging Face folder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxstack import checkpoint, cli, lora, model, params, rundir, seal, step
from jaxstack.config import Config, ConfigError
from jaxstack.context import Context
from jaxstack.hf.pretrained import Pretrained


def find(name: str, key: str) -> Config | Pretrained:
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
                return Pretrained(path)
            raise ConfigError(
                f"{key}={path} is no run directory: it holds no config.yaml; nor a Hugging Face folder: no config.json"
            )
        run = cli.parse_config([f"--config={path / 'config.yaml'}"], path)
        if seal.steps(rundir.checkpoints(path)):
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
    saved = rundir.checkpoints(Path(run.run.dir))
    layout = step.checkpoint_layout(run, ctx, step.abstract_state(run, ctx))
    wanted = layout.abstract
    if ctx.pipeline is None or ctx.pipeline.stages.in_order:
        wanted = replace(wanted, opt_state=jax.tree.map(lambda _: ..., wanted.opt_state))
    if number is None:
        number = checkpoint.newest(saved, wanted)
    elif number not in seal.steps(saved):
        raise ConfigError(f"{saved} holds no step {number}; its steps are {sorted(seal.steps(saved))}")
    elif why := checkpoint.broken(saved, number, wanted):
        raise ConfigError(f"step {number} in {saved} must not be used: {why}")
    values = layout.unpack(checkpoint.restore(saved, number, wanted)).params
    if not run.model.lora.rank:
        return values
    shardings = jax.tree.map(ctx.sharding, ctx.parameters(model.spec(run.model.base)))
    merge = lambda adapters, base: lora.merged(run.model.lora, params.join(adapters, base))  # noqa: E731
    return jax.jit(merge, out_shardings=shardings, donate_argnums=1)(*params.split(model.spec(run.model), values))
