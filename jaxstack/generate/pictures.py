"""Draws pictures with a diffusion model, from noise to the picture in a few steps.

Each step predicts the velocity at its time, solves for the picture and the noise, and mixes them again for the time of
the next step. This is DDIM without added noise (Song et al. 2020, arXiv:2010.02502). On a straight path it is Euler's
method for the flow.

Suffixes: N pictures, H height, W width, C channels, B rows of this device, S patches, P values of a patch.
"""

from collections.abc import Callable, Sequence
from pathlib import Path as FilePath
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack.common.tree import PyTree
from jaxstack.config import Config, ModelConfig, SampleConfig
from jaxstack.data import Dataset
from jaxstack.data.images import from_patches
from jaxstack.generate.decode import jit_on_mesh
from jaxstack.models import diffusion
from jaxstack.models.context import Context
from jaxstack.models.diffusion import Path
from jaxstack.models.params import Params

ROWS = 1000
"""Pictures that are drawn at a time, at most."""
_STREAM = 3  # keeps the noise of pictures apart from that of training
_SCREEN_PIXELS = 48  # least height of a picture in a grid

Draw: TypeAlias = Callable[[PyTree, Sequence[int], int], np.ndarray]
"""Returns pictures [N, H, W, C] with values from -1 to 1, from parameters, the class of each, and a seed."""


def timesteps(cfg: ModelConfig, steps: int) -> np.ndarray:
    """Returns the timesteps of a sampler, int32 [steps]: from the last one (noise) in equal parts to the first."""
    last = cfg.moe.max_timestep - 1
    return np.round(np.linspace(last, 0, steps) if steps > 1 else [last]).astype(np.int32)


def make_draw(cfg: ModelConfig, sample: SampleConfig, ctx: Context | None = None) -> Draw:
    """Builds `draw(params, classes, seed) -> pictures`.

    A picture depends on its class, on the seed and on its place among `classes`, up to rounding. It depends neither on
    the other pictures nor on the mesh. Another number of pictures compiles another program.

    Args:
      cfg: the model.
      sample: `steps` and `guidance` are read.
      ctx: the execution context. `None` means one device.
    """
    ctx = (ctx or Context()).whole_sequences()
    size, levels = cfg.diffusion, timesteps(cfg, sample.steps)

    def velocity(params: Params, noisy: jax.Array, classes: jax.Array, level: jax.Array) -> jax.Array:
        batch = {"noisy": noisy, "classes": classes, "gate_ids": jnp.zeros_like(classes) + level}
        hidden, _ = diffusion.hidden_states(cfg, params, batch, ctx)
        return diffusion.gather_predicted(diffusion.predict(cfg, params, hidden, batch, ctx), ctx)

    def guided(params: Params, noisy: jax.Array, classes: jax.Array, level: jax.Array) -> jax.Array:
        if sample.guidance == 1:
            return velocity(params, noisy, classes, level)
        both = jnp.concatenate([classes, jnp.full_like(classes, cfg.vocab)])
        with_class, without = jnp.split(velocity(params, jnp.concatenate([noisy, noisy]), both, level), 2)
        return without + sample.guidance * (with_class - without)

    def work(params: Params, noise: jax.Array, classes: jax.Array, levels: jax.Array) -> jax.Array:
        def step(noisy: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            here, there = (Path.at(size.path, time) for time in (diffusion.time_of(cfg, at[0]), at[1]))
            clean, noise = here.solve(noisy, guided(params, noisy, classes, at[0]))
            return there.mix(clean, noise), None

        after = jnp.append(diffusion.time_of(cfg, levels[1:]), 0.0)  # the last step ends at the picture
        return jax.lax.scan(step, noise, (levels, after))[0]

    compiled = jit_on_mesh(work, cfg, ctx, parts=2)

    def draw(params: PyTree, classes: Sequence[int], seed: int) -> np.ndarray:
        found = []
        for start in range(0, len(classes), ROWS):
            own = [*classes[start : start + ROWS]]
            filled = np.asarray(own + [0] * (-len(own) % ctx.replicas), np.int32)
            shape = (size.num_patches, size.patch_values)
            draws = (np.random.default_rng([seed, start + i, _STREAM]) for i in range(filled.size))
            noise = np.stack([rng.standard_normal(shape, np.float32) for rng in draws])
            rows = np.repeat(filled[:, None], shape[0], 1)
            found.append(np.asarray(jax.device_get(compiled(params, noise, rows, levels)))[: len(own)])
        return from_patches(np.concatenate(found), size.image, size.patch_size)

    return draw


def make_grid(cfg: Config, dataset: Dataset, ctx: Context) -> Callable[[PyTree, FilePath | None], None] | None:
    """Builds `grid(params, file)`, which draws the pictures of an evaluation and writes them: a row for each class.

    Args:
      cfg: the run; `sample.prompts` names the classes, and null means all.
      dataset: what the run learns.
      ctx: its execution context.

    Returns:
      The function, which all processes of a run call, and of which one names the file; `None` if the run draws none.
    """
    sample = cfg.sample
    if cfg.model.family != "diffusion" or not sample.pictures or sample.prompts == ():
        return None
    names = " ".join(sample.prompts) if sample.prompts else None
    classes = range(cfg.model.vocab) if names is None else dataset.tokenizer.encode(names).tolist()
    every = [number for number in classes for _ in range(sample.pictures)]
    draw = make_draw(cfg.model, sample, ctx)

    def grid(params: PyTree, file: FilePath | None) -> None:
        pixels = draw(params, every, cfg.run.seed)
        if file is not None:
            write_grid(file, pixels.reshape(len(classes), sample.pictures, *pixels.shape[1:]))

    return grid


def write_grid(path: FilePath, pictures: np.ndarray) -> None:
    """Writes a PNG file with pictures [rows, columns, H, W, C] beside each other, enlarged if they are small."""
    from PIL import Image

    rows, columns, height, width, channels = pictures.shape
    times = -(-_SCREEN_PIXELS // height)
    framed = np.pad(pictures.repeat(times, 2).repeat(times, 3), [(0, 0), (0, 0), (0, 2), (0, 2), (0, 0)])
    page = framed.swapaxes(1, 2).reshape(rows * (height * times + 2), columns * (width * times + 2), channels)
    levels = np.round((page[:-2, :-2].clip(-1, 1) + 1) * 127.5).astype(np.uint8)
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(levels[..., 0] if channels == 1 else levels[..., :3]).save(path)
