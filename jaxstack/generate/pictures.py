"""Draws pictures with a diffusion model, from noise to the picture in a few steps.

Each step predicts the velocity at its time, solves for the picture and the noise, and mixes them again for the time of
the next step. This is DDIM without added noise (Song et al. 2020, arXiv:2010.02502). On a straight path it is Euler's
method for the flow.

Suffixes: N pictures, H height, W width, C channels, B rows of this device, S patches, P values of a patch.
"""

from collections.abc import Callable
from pathlib import Path as FilePath
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack import families
from jaxstack.common import files
from jaxstack.common.tree import Batch, PyTree
from jaxstack.config import DataConfig, ModelConfig, SampleConfig
from jaxstack.data import Dataset
from jaxstack.data.captions import Given
from jaxstack.data.images import Images, from_patches
from jaxstack.families import diffusion
from jaxstack.families.noise_path import Path, time_of
from jaxstack.generate.engine import jit_on_mesh
from jaxstack.models.context import Context
from jaxstack.models.params import Params

ROWS = 1000
"""Maximum number of pictures that are drawn at a time."""
_STREAM = 3  # gives pictures other noise than training
_SHOWN = 10  # texts of an evaluation, where each picture has its own
_SCREEN_PIXELS = 48  # least height of a picture in a grid

Draw: TypeAlias = Callable[[PyTree, Given, int], np.ndarray]
"""Returns pictures [N, H, W, C] with values from -1 to 1, from parameters, what they are made from, and a seed."""


def timesteps(cfg: ModelConfig, steps: int) -> np.ndarray:
    """Returns the timesteps of a sampler, int32 [steps]: from the last one (noise) in equal parts to the first."""
    last = cfg.moe.max_timestep - 1
    return np.round(np.linspace(last, 0, steps) if steps > 1 else [last]).astype(np.int32)


def make_draw(cfg: ModelConfig, sample: SampleConfig, ctx: Context | None = None) -> Draw:
    """Builds `draw(params, given, seed) -> pictures`, which draws a picture for each class or text of `given`.

    A picture depends on its class or text, on the seed and on its place among `given`, up to rounding. It depends
    neither on the other pictures nor on the mesh. Another number of pictures compiles another program.

    Args:
      sample: `steps` and `guidance` are read.
      ctx: the execution context. `None` means one device.
    """
    ctx = (ctx or Context()).whole_sequences()
    size = cfg.diffusion
    levels = timesteps(cfg, sample.steps)

    def velocity(params: Params, noisy: jax.Array, condition: Batch, level: jax.Array) -> jax.Array:
        batch = {"noisy": noisy, "gate_ids": jnp.zeros(noisy.shape[:2], jnp.int32) + level, **condition}
        hidden, _ = families.of(cfg).hidden_states(cfg, params, batch, ctx)
        return diffusion.gather_predicted(diffusion.predict(cfg, params, hidden, batch, ctx), ctx)

    def guided(params: Params, noisy: jax.Array, condition: Batch, nothing: Batch, level: jax.Array) -> jax.Array:
        if sample.guidance == 1:
            return velocity(params, noisy, condition, level)
        both = jax.tree.map(lambda *a: jnp.concatenate(a), condition, nothing)
        with_it, without = jnp.split(velocity(params, jnp.concatenate([noisy, noisy]), both, level), 2)
        return without + sample.guidance * (with_it - without)

    def work(params: Params, noise: jax.Array, condition: Batch, nothing: Batch, levels: jax.Array) -> jax.Array:
        def step(noisy: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            here, there = (Path.at(size.path, time) for time in (time_of(cfg, at[0]), at[1]))
            clean, noise = here.solve(noisy, guided(params, noisy, condition, nothing, at[0]))
            return there.mix(clean, noise), None

        after = jnp.append(time_of(cfg, levels[1:]), 0.0)  # the last step ends at the picture
        return jax.lax.scan(step, noise, (levels, after))[0]

    compiled = jit_on_mesh(work, cfg, ctx, parts=3)

    def draw(params: PyTree, given: Given, seed: int) -> np.ndarray:
        found = []
        for start in range(0, given.rows, ROWS):
            count = min(ROWS, given.rows - start)
            # The rows that fill the devices repeat the first one.
            index = start + np.append(np.arange(count), np.zeros(-count % ctx.layout.replicas, int))
            own = jax.tree.map(lambda a, index=index: a[index], given)
            shape = (size.num_patches, size.patch_values)
            draws = (np.random.default_rng([seed, start + i, _STREAM]) for i in range(index.size))
            noise = np.stack([rng.standard_normal(shape, np.float32) for rng in draws])
            found.append(np.asarray(jax.device_get(compiled(params, noise, *own, levels)))[:count])
        return from_patches(np.concatenate(found), size.image, size.patch_size)

    return draw


def make_grid(
    model: ModelConfig, sample: SampleConfig, seed: int, data: DataConfig, dataset: Dataset, ctx: Context
) -> Callable[[PyTree, FilePath | None], None] | None:
    """Builds `grid(params, file)`, which draws the pictures of an evaluation and writes them: a row for each class.

    Args:
      model: the model. Only diffusion models draw.
      sample: its `prompts` name classes or texts. `None` means all classes or their texts; where each picture has a
        text of its own, it means the first ten texts. Texts are in the first language.
      seed: seed of the noise that pictures begin with.
      data: has the length of texts, and their key words.
      dataset: pictures and texts of the run.

    Returns:
      The function, which all processes of a run call. Only the process that names a file writes it. `None` if the run
      draws no pictures.
    """
    if model.family != "diffusion" or not sample.pictures or sample.prompts == ():
        return None
    assert isinstance(dataset.train, Images)
    captions = dataset.train.captions
    if sample.prompts:
        given = Given.named(model, sample.prompts, dataset.tokenizer, data)
    elif captions is not None:
        texts = {name: array[0] for name, array in captions.items()}
        if model.diffusion.key_weight:
            assert dataset.train.key_tokens is not None
            texts["key_tokens"] = dataset.train.key_tokens[0]
        shown = _SHOWN if data.source == "captions" else None
        given = Given.texts({name: array[:shown] for name, array in texts.items()})
    else:
        given = Given.classes(model, range(model.vocab))
    every = given.times(sample.pictures)
    draw = make_draw(model, sample, ctx)

    def grid(params: PyTree, file: FilePath | None) -> None:
        pixels = draw(params, every, seed)
        if file is not None:
            write_grid(file, pixels.reshape(given.rows, sample.pictures, *pixels.shape[1:]))

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
    picture = Image.fromarray(levels[..., 0] if channels == 1 else levels[..., :3])
    with files.atomic_file(path) as file:
        picture.save(file, format="PNG")
