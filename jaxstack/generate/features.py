"""The features of pictures and of texts, which a contrastive model compares.

Suffixes: N pictures or texts, E width of the features.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import numpy as np

from jaxstack.common.tree import Batch
from jaxstack.config import ConfigError, ModelConfig
from jaxstack.data.captions import encode_texts
from jaxstack.data.images import to_patches
from jaxstack.data.seq2seq import special_ids
from jaxstack.data.tokenizers import Tokenizer
from jaxstack.families import contrastive
from jaxstack.generate.engine import jit_on_mesh
from jaxstack.models.context import Context
from jaxstack.models.params import Params

Program: TypeAlias = Callable[..., jax.Array]
"""Computes the features of one tower."""


def image_features(cfg: ModelConfig, params: Params, pixels: np.ndarray, ctx: Context) -> np.ndarray:
    """Returns the features of pictures [N, H, W, C] from -1 (black) to 1 (white), float32 [N, E]; each has length 1.

    Raises:
      ConfigError: the pictures are not of the model's size.
    """
    check_pictures(cfg, pixels)
    rows = {"patches": to_patches(pixels.astype(np.float32), cfg.contrastive.patch_size)}
    return _features(cfg, params, rows, 1, ctx, 0)


def check_pictures(cfg: ModelConfig, pixels: np.ndarray) -> None:
    """Checks that pictures [N, H, W, C] are of the size that a contrastive model reads.

    Raises:
      ConfigError: they are not.
    """
    size = cfg.contrastive.image
    if pixels.shape[1:] != size:
        raise ConfigError(
            f"the pictures [N, H, W, C] have the shape {list(pixels.shape)}, but the model reads pictures of "
            f"{'x'.join(map(str, size))}. Resize them."
        )


def text_features(
    cfg: ModelConfig,
    params: Params,
    texts: Sequence[str],
    tokenizer: Tokenizer,
    length: int,
    ctx: Context,
    program: Program | None = None,
) -> np.ndarray:
    """Returns the features of texts, float32 [N, E]; each has length 1.

    Args:
      texts: of at most `length` tokens with a start and an end.
      length: `data.target_length` of the run.
      program: program from `make_program`, to compile it once for several calls.

    Raises:
      ConfigError: a text is too long.
    """
    rows = encode_texts(texts, tokenizer, special_ids(tokenizer), length)
    return _features(cfg, params, rows, length, ctx, 1, program)


def _features(
    cfg: ModelConfig,
    params: Params,
    rows: dict[str, np.ndarray],
    length: int,
    ctx: Context,
    which: int,
    program: Program | None = None,
) -> np.ndarray:
    """Returns the features of one tower; what the other one would read is zeros, and nothing of it is computed."""
    count = len(next(iter(rows.values())))
    padded = count + -count % ctx.layout.replicas
    size = cfg.contrastive
    arrays = {
        "patches": np.zeros((padded, size.num_patches, size.patch_values), np.float32),
        "tokens": np.zeros((padded, length), np.int32),
        "pair_weights": np.zeros((padded, length), np.float32),
    }
    for name in arrays.keys() & rows.keys():
        arrays[name][:count] = rows[name]

    program = program or make_program(cfg, ctx, which)
    computed = program(params, *arrays.values(), np.int32(0))
    return np.asarray(jax.device_get(computed))[:count]


def make_program(cfg: ModelConfig, ctx: Context, which: int) -> Program:
    """Returns the program that computes features: of pictures (0), or of texts (1)."""
    ctx = ctx.whole_sequences()

    def work(params: Params, patches: jax.Array, tokens: jax.Array, pair_weights: jax.Array, _: jax.Array) -> jax.Array:
        batch: Batch = {"patches": patches, "tokens": tokens, "pair_weights": pair_weights}
        hidden = contrastive.FAMILY.hidden_states(cfg, params, batch, ctx)[0]
        return contrastive.features(cfg, params, hidden, batch, ctx)[which]

    return jit_on_mesh(work, cfg, ctx, parts=3)
