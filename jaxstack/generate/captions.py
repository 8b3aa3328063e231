"""Writes captions of pictures with the language branch of a contrastive model: greedy, or sampled.

Rows are the start token and the beginning of a caption, and end in the same slot. The picture is read once; every token
then reads the keys of its patches and of the tokens before it.

See `caption_cache`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import numpy as np

from jaxstack.common.tree import PyTree
from jaxstack.config import ConfigError, ModelConfig, SampleConfig
from jaxstack.data.images import to_patches
from jaxstack.data.seq2seq import special_ids
from jaxstack.data.tokenizers import Tokenizer
from jaxstack.generate import decode
from jaxstack.generate.caption_cache import CachedCaptions
from jaxstack.generate.engine import RowSampler, Sampling, jit_on_mesh
from jaxstack.generate.features import check_pictures
from jaxstack.generate.prompts import begin_captions, require_captions, row_seeds
from jaxstack.models.context import Context


def make_captions(
    cfg: ModelConfig, sample: SampleConfig, tokenizer: Tokenizer, longest: int, ctx: Context | None = None
) -> Callable[[PyTree, np.ndarray, Sequence[str], int], list[str]]:
    """Builds `run(params, pixels, beginnings, seed) -> texts`, which writes a caption of each picture.

    `pixels` are pictures [N, H, W, C] with values from -1 (black) to 1 (white), each with its beginning.

    A caption ends with its end token, or has `sample.tokens` tokens more than its beginning, and at most `longest` in
    all. It depends on picture, beginning, and seed, and on how often the same beginning precedes it, up to rounding.

    Args:
      sample: how tokens are chosen.
      longest: `data.target_length` of the run, up to which the model has learned captions.
      ctx: the execution context. `None` means one device.

    Raises:
      ConfigError: the model writes no captions, or runs on a pipeline; when run, the pictures are not of the model's
        size, or a beginning is too long.
    """
    require_captions(cfg)
    ctx = (ctx or Context()).whole_sequences()
    if ctx.layout.pipeline is not None:
        raise ConfigError(
            f"mesh.pipe={ctx.layout.pipeline.stages.stages} does not write captions, because a token runs through two "
            f"stacks. Use --mesh.pipe=1."
        )
    special = special_ids(tokenizer)

    def work(
        params: PyTree, tokens: jax.Array, first: jax.Array, marks: jax.Array, patches: jax.Array, seed: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        slots = tokens.shape[1]
        count = max(min(sample.tokens, longest - slots), 1)
        model = CachedCaptions.create(
            cfg, params, ctx, vocabulary=special.size, first=first, patches=patches, num_slots=slots + count
        )
        sampling = Sampling.of_all(replace(sample, tokens=count), (special.eos,))
        return decode.write(RowSampler(model, sampling), tokens, marks, seed)

    compiled = jit_on_mesh(work, cfg, ctx, parts=4)

    def run(params: PyTree, pixels: np.ndarray, beginnings: Sequence[str], seed: int) -> list[str]:
        check_pictures(cfg, pixels)
        rows = begin_captions(tokenizer, beginnings, longest)
        index = np.append(np.arange(len(rows)), np.zeros(-len(rows) % ctx.layout.replicas, int))
        slots = max(map(len, rows))
        filled = [rows[i] for i in index]
        tokens = np.stack([np.pad(np.asarray(row, np.int32), (slots - len(row), 0)) for row in filled])
        first = np.asarray([slots - len(row) for row in filled], np.int32)
        patches = to_patches(pixels.astype(np.float32), cfg.contrastive.patch_size)[index]
        added, lengths = jax.device_get(compiled(params, tokens, first, row_seeds(filled), patches, np.uint32(seed)))
        texts = []
        for begin, row, length in zip(beginnings, added, lengths, strict=False):
            ids = [token for token in row[:length].tolist() if token != special.eos]
            texts.append(tokenizer.decode([*tokenizer.encode(begin).tolist(), *ids]))
        return texts

    return run
